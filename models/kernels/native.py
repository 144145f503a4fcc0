"""Runs a runtime's passes with our C++ kernels, which read the model's weights in place, without a copy.

A row's logits have the same bits whatever other rows are in the pass (`dense.h`, `attention.h`). So drafting does not
change a completion, in bfloat16 as in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.costs import ExpertCounts
from ...core.layer_sets import LayerSet
from ..blocks import Block
from ..coded_slots import SlotCoding
from ..rows import HeadRows, Pass, keepers
from . import layout
from .build import Kernels
from .calls import likeliest, linear, run, write_likeliest
from .description import ModelDescription
from .layout import Unsupported
from .mixers import sequence_of

if TYPE_CHECKING:
    from ..runtime import Runtime

DTYPES = (torch.float32, torch.bfloat16)
STEPS: dict[type[ctypes.Structure], int] = {
    **{layout.Attention: layout.ATTENTION, layout.Convolution: layout.CONVOLUTION},
    **{layout.Recurrence: layout.RECURRENCE, layout.Mlp: layout.MLP, layout.Mixture: layout.MIXTURE},
}
MAX_PROGRAMS = 64


@dataclass(slots=True)
class Program:
    """The steps of a pass for some layer sets."""

    steps: ctypes.Array[layout.Step]
    lists: list[frozenset[int]]  # For each row list of the steps, the layer sets whose rows are in it.
    held: list[Any] = field(default_factory=list)  # Objects that the steps point to, kept alive with them.
    n_out: int = 0  # Outputs of the head, if it is the last step; it runs on one further row list.


class NativePasses:
    """A runtime's passes, computed by the library.

    Raises: Unsupported: the kernels do not support a part of the model.
    """

    def __init__(self, runtime: Runtime, kernels: Kernels) -> None:
        self.runtime, self.kernels, self.level = runtime, kernels, kernels.level
        self.library = kernels.path.stem
        # Seconds per kind of work in `layout.WORK`; None: not timed.
        self.seconds: ctypes.Array[ctypes.c_double] | None = None
        self._experts = layout.CountedExperts()  # Counts of the passes since the last call of `taken_experts`.
        if runtime.device.type != "cpu" or not runtime.one_device:
            raise Unsupported(f"the model lies on {runtime.device}, and the kernels are for a CPU")
        if runtime.dtype not in DTYPES:
            raise Unsupported(f"weights of {runtime.dtype} are computed by torch; ask for float32 or bfloat16")
        self._types = list(dict.fromkeys(block.layer_type for block in runtime.blocks))
        self.forget()

    def forget(self) -> None:
        """Describe the model to the library again, after weights have moved in memory."""
        self._program = lru_cache(maxsize=MAX_PROGRAMS)(self._new_program)
        self._model = ModelDescription(self.runtime)

    def join(self, embedded: Tensor, of_tokens: Tensor) -> Tensor:
        """Compute per-layer inputs as `PerLayerInputs.joined` does; `of_tokens` is overwritten and returned."""
        assert self._model.inputs is not None
        step = layout.Step(ctypes.addressof(self._model.inputs), layout.LAYER_INPUTS, 0, 0, 0, -1, 0)
        call = layout.Call(inputs=of_tokens.data_ptr(), n_inputs=of_tokens.shape[1])
        run(self.kernels, call, embedded.contiguous(), (layout.Step * 1)(step), [None])
        return of_tokens

    def run_layers(
        self,
        hidden: Tensor,
        passes: Sequence[Pass],
        first: int,
        last: int,
        read: HeadRows | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor | None:
        """Overwrite `hidden` (rows of all passes, hidden_size) with the states after layers first … last - 1.

        Args:    read: the head's format, and the rows whose logits the same run computes; None: no logits.
                 inputs: the rows' per-layer inputs, if the model has them; see `PerLayerInputs`.
        Returns: the logits (rows, vocab) of the rows to read, or None.
        """
        self._check(hidden)
        sequences: list[layout.Sequence] = []
        positions: list[int] = []
        visible: list[Tensor | None] = []
        members: dict[LayerSet, list[range]] = {}  # Row ranges by layer set.
        n = 0
        for pass_ in passes:
            rows, n_pass_rows = pass_.rows, len(pass_.rows.token_ids)
            end = rows.first_slot + n_pass_rows
            seen = rows.seen()
            if end > pass_.buffer.capacity or (seen is not None and seen.shape != (n_pass_rows, end)):
                raise ValueError(
                    f"{n_pass_rows} rows from slot {rows.first_slot} on do not fit the buffer, or what they see"
                )
            if rows.positions is not None and len(rows.positions) != n_pass_rows:
                raise ValueError(f"{n_pass_rows} rows have {len(rows.positions)} positions")
            positions += range(rows.first_slot, end) if rows.positions is None else rows.positions
            visible.append(None if seen is None else seen.contiguous())  # Keep it alive until the pass has run.
            sequences.append(sequence_of(pass_, visible[-1]))
            sets = rows.variants or (self.runtime.whole,)
            n_set_rows = n_pass_rows // len(sets)
            for i, layer_set in enumerate(sets):
                members.setdefault(layer_set, []).append(range(n + i * n_set_rows, n + (i + 1) * n_set_rows))
            n += n_pass_rows
        program = self._program(tuple(members), first, last, None if read is None else (read[0],))
        rows_of_sets = list(members.values())
        indices = [
            None if len(ids) == len(rows_of_sets) else _indices(rows_of_sets[i] for i in ids) for ids in program.lists
        ]
        row_positions = torch.tensor(positions, dtype=torch.int32)
        rotations = self._rotations(max(positions, default=0) + 1)
        call = layout.Call(positions=row_positions.data_ptr(), rotations=rotations, n_sequences=len(sequences))
        call.sequences = (layout.Sequence * len(sequences))(*sequences)
        call.seconds = self.seconds
        if inputs is not None:
            call.inputs, call.n_inputs = inputs.data_ptr(), inputs.shape[1]
        call.experts = ctypes.pointer(self._experts)
        logits = None
        if read is not None:
            indices.append(read[1])
            logits = torch.empty((n if read[1] is None else len(read[1]), program.n_out), dtype=hidden.dtype)
            call.logits, call.norm = logits.data_ptr(), ctypes.pointer(self._model.norm)
        run(self.kernels, call, hidden, program.steps, indices)
        return logits

    def taken_experts(self) -> ExpertCounts | None:
        """Return which experts rows took in the passes since the last call; None: no pass had a mixture."""
        counts, self._experts = self._experts, layout.CountedExperts()
        n = counts.mixtures
        return ExpertCounts(counts.distinct / n, counts.taken, counts.repeated) if n else None

    def slot_coding(self, capacity: int) -> SlotCoding | None:
        """Return how drafts made of the model read a buffer of `capacity` slots; None: as the target does."""
        runtime = self.runtime
        full = [block for block in runtime.blocks if block.has_attention and block.window is None]
        heads = {block.index: block.heads for block in full if block.heads.latent is None}
        return SlotCoding.of(
            self.kernels,
            {layer: (sizes.n_kv_heads, sizes.width) for layer, sizes in heads.items()},
            [block.source for block in runtime.blocks],
            runtime.info.n_parameters,
            capacity,
            runtime.dtype.itemsize,
        )

    def _rotations(self, n_positions: int) -> ctypes.Array[layout.Rotation]:
        tables = (layout.Rotation * len(self._types))()
        for i, layer_type in enumerate(self._types):
            table = self.runtime.rotation(layer_type, self.runtime.device, n_positions)
            if table is not None:
                scale = None if table.query_scale is None else table.query_scale.data_ptr()
                is_wide = table.cos.dtype != self.runtime.dtype
                addresses = table.cos.data_ptr(), table.sin.data_ptr()
                tables[i] = layout.Rotation(*addresses, scale, table.cos.shape[1], table.pairs, is_wide)
        return tables

    def logits(
        self, hidden: Tensor, name: str | None = None, index: Tensor | None = None, normed: bool = True
    ) -> Tensor:
        """Return the logits (rows, vocab) of states (rows, hidden_size), or of the rows in `index`.

        Args: name: format of the head's copy (None: the head itself). normed: apply the final norm first.
        """
        self._check(hidden)
        return linear(self.kernels, self._model.head_of(name), hidden, index, self._model.norm if normed else None)

    def mapped(self, x: Tensor, module: Any) -> Tensor:
        """Apply a linear map outside of the layers to `x` (rows, n_in)."""
        self._check(x)
        return linear(self.kernels, self._model.map_of(module), x.contiguous())

    def likeliest(self, logits: Tensor) -> tuple[list[int], list[float]]:
        self._check(logits)
        return likeliest(self.kernels, logits)

    def best(self, logits: Tensor) -> Tensor:
        """Return the most probable token of each row of `logits` (rows, vocab), int64 (rows,); of equals the first."""
        self._check(logits)
        token_ids = torch.empty(logits.shape[0], dtype=torch.int64)
        write_likeliest(self.kernels, logits, token_ids.data_ptr(), None)
        return token_ids

    def _check(self, hidden: Tensor) -> None:
        if hidden.dtype != self.runtime.dtype:
            raise ValueError(f"the states of a pass are {hidden.dtype}, and the model's weights {self.runtime.dtype}")

    def _new_program(
        self, variants: tuple[LayerSet, ...], first: int, last: int, head: tuple[str | None] | None = None
    ) -> Program:
        runtime, kept = self.runtime, keepers(self.runtime.n_layers, variants, self.runtime.givers)
        lists: list[frozenset[int]] = []
        steps: list[layout.Step] = []
        held: list[Any] = []

        def add(kind: int, block: Block, part: ctypes.Structure | None, members: frozenset[int]) -> None:
            if members not in lists:
                lists.append(members)
            held.append(part)
            address = None if part is None else ctypes.addressof(part)
            has_rotary = runtime.rotation(block.layer_type, runtime.device, 1) is not None
            rotation = self._types.index(block.layer_type) if has_rotary else -1
            window = block.window
            size = 0 if window is None else -window.size if window.chunks else window.size
            steps.append(layout.Step(address, kind, block.index, size, lists.index(members), rotation, 0))

        all_sets = frozenset(range(len(variants)))
        for block in runtime.blocks[first:last]:
            members_by_kind = kept[block.index]
            from_saved = runtime.parallel and bool(members_by_kind["attn"])
            if from_saved and members_by_kind["mlp"]:
                add(layout.SAVE, block, None, all_sets)
            if block.parts.beside is not None and members_by_kind["attn"]:
                add(layout.SAVE, block, None, all_sets)
            for kind in block.kinds:
                for form, members in members_by_kind[kind]:
                    for number, part in enumerate(self._model.parts_of(kind, block.index, form)):
                        add(STEPS[type(part)], block, part, members)
                        steps[-1].from_saved = number > 0 or (from_saved and kind == "mlp")
            if block.index in self._model.ends:
                add(layout.LAYER_END, block, self._model.ends[block.index], all_sets)
        if head is not None:
            held.append(self._model.head_of(*head))
            steps.append(layout.Step(ctypes.addressof(held[-1]), layout.LOGITS, 0, 0, len(lists), -1, 0))
        n_out = 0 if head is None else held[-1].n_out
        return Program((layout.Step * len(steps))(*steps), lists, held, n_out)


def _indices(rows_of_sets: Iterable[Iterable[range]]) -> Tensor:
    """Return the indices of the rows of some layer sets, int32 in ascending order."""
    return torch.tensor(sorted(row for ranges in rows_of_sets for rows in ranges for row in rows), dtype=torch.int32)
