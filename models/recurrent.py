"""Recurrent states of a sequence; `state_rules.py` has the rules by which rows change them.

A state lies at its root, after committed text only. The rows of a pass are computed from there and leave it as it is:
of the latest rows the inputs are kept, and when rows have been accepted, the next pass through a layer takes theirs
into its state, in their order and by the same operations. So a rejected row leaves no trace, and a state's bits do not
depend on how its text was cut into passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .coded_values import coded, decoded
from .kernels import device_states
from .state_rules import StateForm, StateRule
from .transfers import uploaded

MOST_SNAPSHOTS = 4  # Most snapshots per text; a further one replaces the second oldest.


def state_bytes(forms: Sequence[StateForm], dtype: torch.dtype, n_rows: int, lag: int) -> int:
    """Return the bytes of a sequence's `RecurrentStates`, of layers of these forms."""
    wide = torch.promote_types(dtype, torch.float32).itemsize
    return sum(
        (1 + (lag > 0)) * form.n_heads * form.key_width * form.value_width * wide
        + (n_rows + form.n_taps - 1 + lag) * form.kept_width(dtype) * dtype.itemsize
        for form in forms
    )


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What another sequence needs to go on after the first `end` slots of a text, by layer.

    `states`: (n, heads, key_width, value_width), the newest first, and `roots`, int32 (n,): the slots that each is
    after. `inputs`: of the last slots before `end`, oldest first, as many as bring the oldest state there.
    """

    end: int
    states: Mapping[int, Tensor]
    roots: Mapping[int, Tensor]
    inputs: Mapping[int, Tensor]

    @property
    def n_bytes(self) -> int:
        return sum(one.nbytes for tensors in (self.states, self.inputs) for one in tensors.values())


class StateRows(NamedTuple):
    """Rows of one sequence in a recurrent layer, in the order of their `slots`.

    `inputs`: (rows, values). `seen`: bool (rows, slots), the slots that each row sees; None: all before its own.
    `is_text`: they are the next rows of committed text.
    """

    inputs: Tensor
    slots: Sequence[int]
    seen: Tensor | None
    is_text: bool


class _Move(NamedTuple):
    """A token that is taken into a state.

    `begins`: which of the states it is taken into; None: the one after the move before. `last`: slots of its last
    tokens, its own last. `row`: the row of the pass that reads the state then. `stays`: which of the states it then is.
    """

    begins: int | None
    last: list[int]
    row: int | None
    stays: int | None


@dataclass(slots=True, eq=False)
class _Moves:
    """What brings the older state to its root, and then the newest to its own and rows after it; the roots then.

    `kept`: places in the ring of the last rows' inputs; none where a row does not see the text. By device: `places`,
    int64 (n,), are these, and `tables` are the moves as kernels read them.
    """

    older: list[_Move]
    newest: list[_Move]
    roots: list[int]
    kept: list[int]
    places: dict[torch.device, Tensor] = field(default_factory=dict)
    tables: dict[torch.device, list[Tensor]] = field(default_factory=dict)


class RecurrentStates:
    """States of one sequence, by layer.

    `states`: (2, heads, key_width, value_width), float32 or wider: at the root, and with a `lag` so many slots before
    it, or at the text's beginning, for rows that see less; `roots`, int32 (layers of the model, 2), are their slots.
    `inputs`: (n_kept, kept_width), a ring: those of slot s at s % n_kept. Slots before `committed` hold text: the next
    pass through a layer brings its root there.

    Args: devices: of the layers that have states. n_rows: most rows that a pass has after committed text.
    """

    def __init__(
        self,
        devices: Mapping[int, torch.device],
        n_layers: int,
        form: StateForm,
        dtype: torch.dtype,
        n_rows: int,
        lag: int = 0,
    ) -> None:
        self.form, self.lag, self.committed = form, lag, 0
        self.n_kept = n_rows + form.n_taps - 1 + lag
        shape = (1 + (lag > 0), form.n_heads, form.key_width, form.value_width)
        wide = torch.promote_types(dtype, torch.float32)
        self.states = {layer: torch.zeros(shape, dtype=wide, device=place) for layer, place in devices.items()}
        self.inputs = {
            layer: torch.zeros((self.n_kept, form.kept_width(dtype)), dtype=dtype, device=place)
            for layer, place in devices.items()
        }
        self.roots = torch.zeros((n_layers, 2), dtype=torch.int32)
        self.snapshots: list[Snapshot] = []
        self.keeps_snapshots = False
        self._made: tuple[Any, Tensor | None, _Moves] | None = None  # The moves that were made last, and of what.

    @property
    def n_bytes(self) -> int:
        state_bytes = sum(one.nbytes for tensors in (self.states, self.inputs) for one in tensors.values())
        return state_bytes + sum(snapshot.n_bytes for snapshot in self.snapshots)

    def check(self, first_slot: int, n_rows: int, is_text: bool) -> None:
        """Raises: ValueError: rows at slots `first_slot`, … are not where the states can take them, or too many."""
        newest = self._newest_root
        if is_text and not newest <= self.committed == first_slot:
            raise ValueError(f"text at slot {first_slot} does not follow the states, which are at {newest}")
        if not is_text and not newest <= self.committed <= first_slot:
            raise ValueError(f"rows at slot {first_slot} lie before the states, which are at {newest}")
        room = self.n_kept - self.lag - self.form.n_taps + 1
        if not is_text and first_slot + n_rows - self.committed > room:
            raise ValueError(f"{n_rows} rows at slot {first_slot} are more than the {room} whose inputs are kept")

    def commit(self, n_slots: int) -> None:
        """Say that the first slots hold text; the next passes bring the states there."""
        self.committed = n_slots

    def begin_at(self, n_slots: int) -> None:
        """Take the states as they are for those after so many slots, as measurements do."""
        self.committed = n_slots
        self.roots[:] = n_slots

    def convolved(self, layer: int, rule: StateRule, rows: StateRows) -> Tensor:
        """Return what the convolution before a layer's state gives for rows, whose inputs are what it reads alone.

        Returns: (rows, n_convolved).
        """
        moves, kept = self._moves_of(layer, rows), self._kept_inputs(layer)
        if device_states.computes(rule, rows.inputs):
            table = self._tables_of(moves, rows)[1]
            return device_states.convolved(rows.inputs, kept, rule, table, len(rows.slots))
        n, n_taps = self.form.n_convolved, self.form.n_taps
        tails = rows.inputs.new_zeros((len(rows.slots), n_taps, n))
        new_inputs = dict(zip(rows.slots, rows.inputs, strict=True))
        for move in moves.newest:
            if move.row is not None:
                last = self._last_inputs(kept, move.last, new_inputs)
                tails[move.row, n_taps - len(last) :] = torch.stack([one[:n] for one in last])
        return rule.convolved(tails)

    def _kept_inputs(self, layer: int) -> Tensor:
        """Return the ring as it was given: (n_kept, n_inputs)."""
        inputs = self.inputs[layer]
        return decoded(inputs, self.form.n_convolved) if self.form.codes_values(inputs.dtype) else inputs

    def _last_inputs(self, kept: Tensor, slots: Sequence[int], new_inputs: Mapping[int, Tensor]) -> list[Tensor]:
        return [new_inputs[one] if one in new_inputs else kept[one % self.n_kept] for one in slots]

    def _last_slots(self, slot: int, base: int, path: Sequence[int]) -> list[int]:
        """Return the slots of the last tokens up to one, which comes after the text before `base` and a path."""
        return [*range(max(0, base - self.form.n_taps), base), *path, slot][-self.form.n_taps :]

    def _sees_text(self, rows: StateRows, row: int) -> bool:
        return rows.seen is None or bool(rows.seen[row, : self.committed].all())

    def advance(self, layer: int, rule: StateRule, rows: StateRows) -> Tensor:
        """Return what rows give by their inputs (rows, n_inputs): (rows, heads * value_width)."""
        moves = self._moves_of(layer, rows)
        by_kernels = device_states.computes(rule, rows.inputs)
        take = self._take_by_kernels if by_kernels else self._take_by_torch
        out = take(layer, rule, rows, moves)
        self.roots[layer, : len(moves.roots)] = torch.tensor(moves.roots)
        if moves.kept:
            place = rows.inputs.device
            if place not in moves.places:
                moves.places[place] = uploaded(moves.kept, place)
            kept = rows.inputs[len(rows.slots) - len(moves.kept) :]
            if self.form.codes_values(kept.dtype):
                kept = coded(kept, self.form.n_convolved)
            self.inputs[layer][moves.places[place]] = kept
        return out

    def _take_by_torch(self, layer: int, rule: StateRule, rows: StateRows, moves: _Moves) -> Tensor:
        new_inputs, kept = dict(zip(rows.slots, rows.inputs, strict=True)), self._kept_inputs(layer)
        states = list(self.states[layer])
        state, outs = states[0], list[Tensor]()
        for move in (*moves.older, *moves.newest):
            state = state if move.begins is None else states[move.begins]
            state, out = rule.step(state, torch.stack(self._last_inputs(kept, move.last, new_inputs)))
            if move.stays is not None:
                states[move.stays] = state
            if move.row is not None:
                outs.append(out)
        for which, one in enumerate(states):
            self.states[layer][which] = one
        return torch.stack(outs).flatten(1)

    def _take_by_kernels(self, layer: int, rule: StateRule, rows: StateRows, moves: _Moves) -> Tensor:
        states, kept = self.states[layer], self._kept_inputs(layer)
        read = rows.inputs.new_empty((len(rows.slots), self.form.n_heads * self.form.value_width))
        for root, table in zip((states[-1], states[0]), self._tables_of(moves, rows), strict=True):
            if len(table):
                device_states.take(root, states[-1], rule, rows.inputs, kept, table, read)
        return read

    def _tables_of(self, moves: _Moves, rows: StateRows) -> list[Tensor]:
        """Return the moves of the older state and those of the newest, as the kernels read them."""
        place = rows.inputs.device
        if place not in moves.tables:
            new = {slot: row for row, slot in enumerate(rows.slots)}
            moves.tables[place] = [
                uploaded([self._fields(move, new) for move in of_one], place, torch.int32)
                for of_one in (moves.older, moves.newest)
            ]
        return moves.tables[place]

    def _fields(self, move: _Move, new: Mapping[int, int]) -> list[int]:
        """Return a move as the kernels read it, which have one state that stays. Args: new: rows by slots."""
        begins = device_states.CARRIED
        if move.begins is not None:  # What brings the older state has it as its root.
            is_root = move.begins == 0 or move.stays is not None
            begins = device_states.ROOT if is_root else device_states.OLDER
        places = [new.get(slot, len(new) + slot % self.n_kept) for slot in move.last]
        absent = [-1] * (self.form.n_taps - len(places))
        return [begins, -1 if move.row is None else move.row, int(move.stays is not None), *absent, *places]

    def _moves_of(self, layer: int, rows: StateRows) -> _Moves:
        """Return by which moves the states of a layer come to their new roots, and rows read them.

        Layers whose roots are alike, as those of a pass mostly are, share them.
        """
        roots: list[int] = self.roots[layer, : len(self.states[layer])].tolist()
        about = (roots, self.committed, self.n_kept, list(rows.slots), rows.is_text)
        if self._made is None or self._made[0] != about or self._made[1] is not rows.seen:
            self._made = about, rows.seen, self._make_moves(list(roots), rows)
        return self._made[2]

    def _make_moves(self, roots: list[int], rows: StateRows) -> _Moves:
        goal, oldest = self.committed, len(roots) - 1
        end = rows.slots[-1] + 1 if rows.is_text else goal
        brought = [
            [
                _Move(which if slot == root else None, self._last_slots(slot, slot, ()), None, which)
                for slot in range(root, to)
            ]
            for which, (root, to) in enumerate(zip(roots, (goal, end - self.lag), strict=False))
        ]
        roots = [max(pair) for pair in zip(roots, (goal, end - self.lag), strict=False)]
        newest, is_kept = brought[0], True
        done: tuple[int, list[int]] = (-1, [])
        for row, slot in enumerate(rows.slots):
            if rows.is_text:
                begins = None if newest else 0
                newest.append(_Move(begins, self._last_slots(slot, slot, ()), row, 0))
                continue
            sees_all = self._sees_text(rows, row)
            is_kept &= sees_all
            which = 0 if sees_all else oldest
            base = roots[which]
            path = [*_path(rows, row, base), slot]
            # On a branch, or in another text's window, begin at the root again.
            n_done = len(path) - 1 if (base, path[:-1]) == done else 0
            for n in range(n_done, len(path)):
                reader = row if n == len(path) - 1 else None
                newest.append(_Move(None if n else which, self._last_slots(path[n], base, path[:n]), reader, None))
            done = base, path
        if rows.is_text:
            roots[0] = end
        kept = [slot % self.n_kept for slot in rows.slots[-self.n_kept :]] if is_kept else []
        return _Moves(brought[1] if oldest else [], newest, roots, kept)

    def move(self, source: int | Sequence[int], target: int) -> None:
        """Copy a slot's inputs of all layers to another slot; of several, to consecutive ones."""
        sources = [source] if isinstance(source, int) else source
        rows = [slot % self.n_kept for slot in sources]
        places = [slot % self.n_kept for slot in range(target, target + len(sources))]
        for inputs in self.inputs.values():
            inputs[places] = inputs[rows]

    # -- Going on from an earlier place --------------------------------------------------------------------------------

    def reachable(self, n_slots: int) -> int:
        """Return after how many of the first `n_slots` slots another sequence can go on: of a snapshot, or all."""
        if self._newest_root <= n_slots:
            return min(n_slots, self.committed)
        return max((snapshot.end for snapshot in self.snapshots if snapshot.end <= n_slots), default=0)

    def places(self, n_slots: int) -> list[int]:
        """Return all numbers of slots, up to `n_slots`, after which another sequence can go on."""
        ends = {snapshot.end for snapshot in self.snapshots if snapshot.end <= n_slots}
        return sorted(ends | {self.reachable(n_slots)} - {0})

    @property
    def _newest_root(self) -> int:
        return max((int(self.roots[layer, 0]) for layer in self.states), default=0)

    def take_snapshot(self) -> None:
        """Keep a copy of the states; they are at one root, after text alone."""
        end = self.committed
        is_whole = all(int(self.roots[layer, 0]) == end for layer in self.states)
        if self.keeps_snapshots and is_whole and end not in (0, *(snapshot.end for snapshot in self.snapshots)):
            states = {layer: states[:1].clone() for layer, states in self.states.items()}
            self._keep(self._snapshot(end, states))

    def _keep(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)
        self.snapshots.sort(key=lambda one: one.end)
        del self.snapshots[1 : len(self.snapshots) - MOST_SNAPSHOTS + 1]

    def _snapshot(self, end: int, states: Mapping[int, Tensor]) -> Snapshot:
        """Return a snapshot of these of the sequence's states, with copies of the roots and inputs."""
        roots = {layer: self.roots[layer, : len(state)].clone() for layer, state in states.items()}
        inputs = {
            layer: self.inputs[layer][[slot % self.n_kept for slot in range(self._first_input(root), end)]]
            for layer, root in roots.items()
        }
        return Snapshot(end, states, roots, inputs)

    def _first_input(self, roots: Tensor) -> int:
        """Return the first slot whose inputs take the states at these roots on."""
        return max(0, int(roots[-1]) - self.form.n_taps + 1)

    def at(self, n_slots: int) -> Snapshot:
        """Return what is after the first `n_slots` slots, a number that is `reachable`; states are not copied."""
        if self._newest_root <= n_slots:
            return self._snapshot(n_slots, self.states)
        return next(snapshot for snapshot in self.snapshots if snapshot.end == n_slots)

    def copy_from(self, other: RecurrentStates, n_slots: int) -> None:
        """Take what another sequence has after its first `n_slots` slots, a number that it says is `reachable`."""
        self.go_on_from(other.at(n_slots))
        self.snapshots = [snapshot for snapshot in other.snapshots if snapshot.end <= n_slots]

    def go_on_from(self, snapshot: Snapshot) -> None:
        """Take the states of a snapshot; the ring becomes longer where it has no room for the inputs."""
        self._make_room(max((len(inputs) for inputs in snapshot.inputs.values()), default=0))
        for layer, states in self.states.items():
            n_states = min(len(states), len(snapshot.states[layer]))
            states[:n_states] = snapshot.states[layer][:n_states]
            if n_states < len(states):
                states[1:] = states[:1].clone()
            self.roots[layer] = snapshot.roots[layer][:n_states][[0, -1]]
            slots = range(self._first_input(self.roots[layer]), snapshot.end)
            rows = snapshot.inputs[layer][len(snapshot.inputs[layer]) - len(slots) :]
            self.inputs[layer][[slot % self.n_kept for slot in slots]] = rows
        self.committed = snapshot.end

    def _make_room(self, n_inputs: int) -> None:
        """Make the ring at least so long; what is in it goes."""
        if self.n_kept < n_inputs:
            self.n_kept = n_inputs
            for layer, inputs in self.inputs.items():
                self.inputs[layer] = inputs.new_zeros((n_inputs, *inputs.shape[1:]))

    # -- States on disk -----------------------------------------------------------------------------------------------

    def saved(self, n_slots: int) -> bytes:
        """Return the newest states after the first `n_slots` slots, a number that is `reachable`, for `restore`."""
        snapshot, parts = self.at(n_slots), list[bytes]()
        for layer, states in snapshot.states.items():
            root = snapshot.roots[layer][:1]
            inputs = snapshot.inputs[layer]
            rows = inputs[len(inputs) - (n_slots - self._first_input(root)) :]
            parts += (_bytes_of(part) for part in (root, states[:1], rows))
        return b"".join(parts)

    def restore(self, n_slots: int, saved: NDArray[np.uint8]) -> None:
        """Go on from what `saved` returned for a sequence of the same model, uint8 (bytes,).

        Raises: ValueError: the bytes are of another number of slots or of another model.
        """
        place = 0

        def take(like: Tensor, *shape: int) -> Tensor:
            nonlocal place
            n_bytes = math.prod(shape) * like.element_size()
            part, place = saved[place : place + n_bytes].copy(), place + n_bytes
            if len(part) < n_bytes:
                raise ValueError(f"states after {n_slots} slots are cut short")
            return torch.from_numpy(part).view(like.dtype).view(shape)

        states, roots, inputs = dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()
        for layer, state in self.states.items():
            roots[layer] = take(self.roots, 1)
            if not 0 <= int(roots[layer]) <= n_slots:
                raise ValueError(f"states after {n_slots} slots have the root {int(roots[layer])}")
            states[layer] = take(state, 1, *state.shape[1:]).to(state.device)
            n_rows = n_slots - self._first_input(roots[layer])
            inputs[layer] = take(self.inputs[layer], n_rows, *self.inputs[layer].shape[1:]).to(state.device)
        if place != len(saved):
            raise ValueError(f"states after {n_slots} slots have {len(saved) - place} bytes too many")
        snapshot = Snapshot(n_slots, states, roots, inputs)
        self.go_on_from(snapshot)
        if self.keeps_snapshots and all(int(root) == n_slots for root in roots.values()):
            self._keep(snapshot)


def _path(rows: StateRows, row: int, base: int) -> list[int]:
    """Return the slots from `base` on that a row sees before its own."""
    slot = rows.slots[row]
    return list(range(base, slot)) if rows.seen is None else (rows.seen[row, base:slot].nonzero()[:, 0] + base).tolist()


def _bytes_of(part: Tensor) -> bytes:
    return part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
