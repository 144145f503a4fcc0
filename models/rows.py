"""The rows of a pass in the form that its layers share, by sequence; `row_tables.py` has the form for kernels on a GPU.

Subsets by layer set, rotations and masks are computed once per pass.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from ..core.costs import ExpertCounts
from ..core.layer_sets import KINDS, Kind, LayerSet, PartForm
from .blocks import Block, BufferRows, RowGroup
from .buffer import KVBuffer
from .config_layout import AttentionWindow
from .convolutions import places_of
from .heads import of_groups
from .rotation import TablesByType
from .transfers import uploaded

PassKind = Literal["check", "draft", "beside"]
HeadRows = tuple[str | None, Tensor | None]  # Format of the LM head (None: as stored), and the rows that it reads.


class PassRunner(Protocol):
    """Interface of a model that runs passes; implemented by `models.runtime.Runtime`."""

    n_layers: int
    windows: tuple[AttentionWindow | None, ...]
    max_positions: int
    blocks: list[Block]
    givers: frozenset[int]
    dtype: torch.dtype
    rotation: TablesByType

    @property
    def n_first(self) -> int:
        """Number of passes so far that were slow because they were not yet replayed as CUDA graphs."""

    def forward_together(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Return the wanted logits (rows, vocab) of each pass."""

    def taken_experts(self) -> ExpertCounts | None:
        """Return which experts rows took since the last call; None: none, or they are not counted."""

    def read_best(self, logits: Sequence[Tensor], unread: Sequence[Tensor | None]) -> list[list[float]]:
        """Return the most probable token of each row, by sequence; a sequence's `unread` numbers follow its tokens."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one pass: a chain, or a tree if `visible` is given.

    token_ids: sequence, or int64 (n,). Row i uses slot `first_slot` + i.
    visible: bool (n, newest), which of the newest slots each row sees; all rows see the older ones. None: the rows are
        a chain, so that row i is at position `first_slot` + i and sees every slot up to its own.
    positions: of the rows of a tree.
    variants: layer sets; the rows are split into as many consecutive parts of equal size. Empty: the full model.
    is_text: the rows are a chain of committed text, and recurrent states move behind it.
    """

    token_ids: Sequence[int] | Tensor
    first_slot: int
    positions: Sequence[int] | None = None
    visible: Tensor | None = None
    variants: tuple[LayerSet, ...] = ()
    is_text: bool = False

    def seen(self, device: torch.device | None = None) -> Tensor | None:
        """Return which slots the rows see, bool (n, first_slot + n), on the device; None: the rows are a chain."""
        if self.visible is None:
            return None
        n, newest = self.visible.shape
        older = self.first_slot + n - newest
        visible = self.visible if device is None else uploaded(self.visible, device, torch.bool)
        if older <= 0:
            return visible
        return torch.cat((torch.ones((n, older), dtype=torch.bool, device=device), visible), dim=1)

    def see_all(self, n_slots: int) -> bool:
        """Return whether all rows see the first `n_slots` slots, which lie before theirs."""
        if self.visible is None:
            return True
        older = self.first_slot + len(self.visible) - self.visible.shape[1]
        return bool(self.visible[:, : max(0, n_slots - older)].all())


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Rows of one sequence to run through a model.

    buffer: the sequence's keys and values.
    wanted: the rows whose logits are returned (None: all).
    capture: as in `Runtime.forward`.
    layers, hidden: run only layers first … last - 1, from `hidden` (rows, hidden_size), the states before them.
    kind: for the engine that runs several sequences: "check" is a target's pass over a draft, "draft" a pass of a
        draft, "beside" one that reads a prompt or scores a window. It changes no result.
    reads_coded: attention may read the buffer's copies in 4 bits of old slots; only drafts do, and their rows must see
        all slots before the newest.
    """

    runtime: PassRunner
    rows: Rows
    buffer: KVBuffer
    wanted: Sequence[int] | None = None
    capture: Mapping[int, list[Tensor]] | None = None
    hidden: Tensor | None = None
    layers: tuple[int, int] | None = None
    kind: PassKind = "check"
    reads_coded: bool = False

    def run(self) -> Generator[Pass, Tensor, Tensor]:
        """Yield this pass to the driver of the calling generator; return its logits (rows, vocab)."""
        return (yield self)


# The forms in which a sub-layer runs (None: the model's own), and the indices of the variants that run each.
Groups = tuple[tuple[PartForm | None, frozenset[int]], ...]

Kept = tuple[Mapping[Kind, Groups], ...]  # By layer and kind of sub-layer.


@lru_cache(maxsize=64)
def keepers(n_layers: int, variants: tuple[LayerSet, ...], givers: frozenset[int]) -> Kept:
    """Return by layer which variants run its attention and its MLP, in which form; without variants, the full model.

    Args: givers: layers whose keys and values other layers read. Their attention is never skipped, because those
          layers would then read other rows' keys.
    """
    sets = [layer_set.keeping_attn(givers) for layer_set in variants or (LayerSet(n_layers),)]
    return tuple({kind: _groups(kind, layer, sets) for kind in KINDS} for layer in range(n_layers))


def _groups(kind: Kind, layer: int, sets: Sequence[LayerSet]) -> Groups:
    groups: dict[PartForm | None, set[int]] = {}
    for variant, layer_set in enumerate(sets):
        if not layer_set.skips(kind, layer):
            groups.setdefault(layer_set.form_of(kind, layer), set()).add(variant)
    return tuple((form, frozenset(members_of_form)) for form, members_of_form in groups.items())


class PassPlan:
    """Data shared by the layers of one pass: row subsets, rotations and masks, each computed once."""

    def __init__(self, runtime: PassRunner, rows: Rows, buffer: KVBuffer | None = None, first: int = 0) -> None:
        self.runtime, self.rows, self.buffer = runtime, rows, buffer
        self.first, self.n = first, len(rows.token_ids)  # Index in the forward pass of this pass's first row.
        self.end = rows.first_slot + self.n
        self.every = frozenset(range(max(1, len(rows.variants))))  # The indices of all variants.
        self.share = self.n // len(self.every)  # Rows of each variant.
        self.kept = keepers(runtime.n_layers, rows.variants, runtime.givers)
        self._groups: dict[Hashable, RowGroup] = {}
        self._indices: dict[tuple[frozenset[int], torch.device], Tensor] = {}

    def row_index(self, variants: frozenset[int], device: torch.device) -> Tensor:
        """Return the indices of the rows of some variants in order, int64 (n,)."""
        key = (variants, device)
        if key not in self._indices:
            shares = [torch.arange(v * self.share, (v + 1) * self.share, device=device) for v in sorted(variants)]
            self._indices[key] = torch.cat(shares)
        return self._indices[key]

    def positions(self, device: torch.device) -> Tensor:
        if self.rows.positions is None:
            return torch.arange(self.rows.first_slot, self.end, device=device)
        return uploaded(self.rows.positions, device)

    def group(self, block: Block, variants: frozenset[int], attends: bool = True) -> RowGroup:
        """Return the rows of some variants as `block` sees them, with a mask for its attention if they `attend`."""
        key = block.row_form, variants, attends
        if key not in self._groups:
            self._groups[key] = self._make_group(block, variants, attends)
        return self._groups[key]

    def _make_group(self, block: Block, variants: frozenset[int], attends: bool) -> RowGroup:
        first = self.rows.first_slot
        n_positions = self.end if self.rows.positions is None else max(self.rows.positions) + 1
        rotation = self.runtime.rotation(block.layer_type, block.device, n_positions)
        if rotation is not None:
            rotation = rotation.at(
                slice(first, self.end) if self.rows.positions is None else self.positions(block.device)
            )
        spans: tuple[tuple[int, int, int], ...] = ((0, first, self.n),)
        start, mask = self._mask(block) if attends and block.has_attention else (0, None)
        before = self.slots_before(block.n_taps) if block.n_taps and block.rule is None else None
        seen = self.rows.seen() if block.rule is not None else None
        if variants != self.every:
            index = self.row_index(variants, block.device)
            before = None if before is None else before[index.cpu()]
            seen = None if seen is None else seen[index.cpu()]
            rotation = None if rotation is None else rotation.of_rows(index)
            mask = None if mask is None else mask[index]
            spans = tuple((i * self.share, first + v * self.share, self.share) for i, v in enumerate(sorted(variants)))
        mask = None if mask is None else of_groups(block.heads, mask)
        places = None if before is None else uploaded(places_of(before), block.device)
        return RowGroup(rotation, spans, start, self.end, mask, places, seen, self.rows.is_text)

    def slots_before(self, n: int) -> Tensor:
        """Return the slots of the last `n` tokens that each row sees, its own last: int64 (rows, n), -1: no token."""
        slots_of_rows = torch.arange(self.rows.first_slot, self.end)[:, None]
        if self.rows.visible is None:
            return (slots_of_rows + torch.arange(1 - n, 1)).clamp(min=-1)
        seen = cast(Tensor, self.rows.seen()) & (torch.arange(self.end) <= slots_of_rows)
        slots = torch.where(seen, torch.arange(self.end), -1)
        padded = torch.nn.functional.pad(slots, (max(0, n - self.end), 0), value=-1)
        return padded.topk(n, dim=1).values.flip(1)

    def _mask(self, block: Block) -> tuple[int, Tensor | None]:
        """Return the first slot to read and the additive mask over the slots from there, for all rows."""
        if self.rows.visible is None and self.n == 1:
            return (0 if block.window is None else max(0, block.window.oldest(self.end - 1))), None
        return 0, self.mask(block.window, block.device)

    def mask(self, window: AttentionWindow | None, device: torch.device) -> Tensor:
        """Return the additive attention mask over all slots, (rows, end): 0 where a row sees the slot."""
        visible = self.rows.seen(device)
        if visible is None:
            visible = torch.arange(self.end, device=device)[None] <= self.positions(device)[:, None]
        if window is not None:
            row_positions = self.positions(device)
            slots = torch.cat((torch.arange(self.rows.first_slot, device=device), row_positions))
            visible = visible & (slots[None] >= window.oldest(row_positions)[:, None])
        mask = torch.zeros(visible.shape, dtype=self.runtime.dtype, device=device)
        return mask.masked_fill_(~visible, torch.finfo(self.runtime.dtype).min)


def plans_of(runtime: PassRunner, passes: Sequence[Pass]) -> list[PassPlan]:
    """Return the plan of each pass; in the forward pass its rows follow those of earlier passes."""
    plans: list[PassPlan] = []
    for pass_ in passes:
        first = plans[-1].first + plans[-1].n if plans else 0
        if pass_.buffer.states is not None:
            states, n_rows = pass_.buffer.states, len(pass_.rows.token_ids)
            n_kept = n_rows if pass_.rows.see_all(states.committed) else 0
            states.check(pass_.rows.first_slot, n_kept, pass_.rows.is_text)
        plans.append(PassPlan(runtime, pass_.rows, pass_.buffer, first))
    return plans


def token_ids_of(plans: Sequence[PassPlan], device: torch.device) -> Tensor:
    """Return the token ids of all plans' rows on a device, int64 (rows,)."""
    texts = [plan.rows.token_ids for plan in plans]
    if any(isinstance(ids, Tensor) for ids in texts):
        return torch.cat([ids if isinstance(ids, Tensor) else uploaded(ids, device) for ids in texts])
    return uploaded([token_id for ids in texts for token_id in ids], device)


Member = tuple[PassPlan, frozenset[int]]  # A pass, and the indices of its variants that run a sub-layer.


class BufferPlan:
    """Data shared by the layers of a forward pass when token mixers are computed per sequence.

    Args: attends: attention is one of these mixers.
    """

    def __init__(self, attends: bool = True) -> None:
        self._attends = attends
        self._rows: dict[Hashable, BufferRows] = {}

    def rows(self, block: Block, members: Sequence[Member]) -> BufferRows:
        """Return the rows of `members` as `block` sees them."""
        member_key = tuple((plan.first, variants) for plan, variants in members)
        key = member_key, block.row_form
        if key not in self._rows:
            self._rows[key] = BufferRows(
                [
                    (plan.group(block, member_rows, self._attends), cast(KVBuffer, plan.buffer))
                    for plan, member_rows in members
                ]
            )
        return self._rows[key]


def read_together(*parts: Tensor | None) -> list[list[float]]:
    """Return the numbers of each part, in one transfer from their device; [] for a part that is None."""
    numbers = iter(torch.cat([part.flatten().double() for part in parts if part is not None]).tolist())
    return [[] if part is None else list(islice(numbers, part.numel())) for part in parts]


def best_of(logits: Tensor) -> Tensor:
    """Return the most probable token of each row of `logits` (rows, vocab), int64 (rows,); of equal ones the first."""
    return logits.max(dim=-1).indices  # Same as argmax, but 4 to 7 times faster in bfloat16 on a CPU.


def by_form(plans: Sequence[PassPlan], layer: int, kind: Kind) -> dict[PartForm | None, list[Member]]:
    """Return the rows that run a sub-layer, by the form in which their layer set runs it (None: the model's own)."""
    members: dict[PartForm | None, list[Member]] = {}
    for plan in plans:
        for form, variants in plan.kept[layer][kind]:
            members.setdefault(form, []).append((plan, variants))
    return members


def rows_of(members: Sequence[Member], plans: Sequence[PassPlan], device: torch.device) -> Tensor | None:
    """Return the members' row indices in the forward pass, int64; None for all rows."""
    if len(members) == len(plans) and all(variants == plan.every for plan, variants in members):
        return None
    indices = [plan.row_index(variants, device) + plan.first for plan, variants in members]
    return indices[0] if len(indices) == 1 else torch.cat(indices)
