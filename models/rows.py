"""The rows of a pass, and what its layers share of them: subsets by layer set, rotations and masks, each made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from ..core.types import LayerSet
from .blocks import Block, BufferRows, LayerRows, RowGroup
from .buffer import KVBuffer


@dataclass(slots=True)
class Load:
    """How many sequences the latest passes of an engine served: of the whole target, and of drafts.

    `n_checks` counts passes of the target that checked drafts; `n_beside` those that read a prompt or scored a window,
    and what else took time beside rounds.
    """

    checked: int = 1
    drafted: int = 1
    n_checks: int = 0
    n_beside: int = 0


class PassRunner(Protocol):
    """What passes need of a model; `models.runtime.Runtime` has it."""

    @property
    def n_layers(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def rotation(self) -> Callable[[str, torch.device, int], tuple[Tensor, Tensor] | None]: ...

    def forward_together(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Return the wanted logits (rows, vocab) of each pass."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """What one pass runs over.

    `token_ids`, int64 where they are a tensor, go to slots `first_slot`, `first_slot` + 1, …. Without `visible` the
    rows are a chain: row i stands at position `first_slot` + i and sees every slot up to its own. With it, `positions`
    are given and `visible`, bool (n, newest), says which of the newest slots each row sees; of the slots before these,
    all see the first `n_read` (None: all). `variants` splits the rows into equal consecutive shares, each leaving out
    its own layer set; empty means the full model.
    """

    token_ids: Sequence[int] | Tensor
    first_slot: int
    positions: Sequence[int] | None = None
    visible: Tensor | None = None
    variants: tuple[LayerSet, ...] = ()
    n_read: int | None = None

    def seen(self, device: torch.device | None = None) -> Tensor | None:
        """Return which slots the rows see, bool (n, first_slot + n), of which `visible` alone is moved to the device.

        None: the rows are a chain.
        """
        if self.visible is None:
            return None
        n, newest = self.visible.shape
        older = self.first_slot + n - newest
        if older <= 0:
            return self.visible.to(device)
        before = torch.ones((n, older), dtype=torch.bool, device=device)
        if self.n_read is not None:
            before[:, self.n_read :] = False
        return torch.cat((before, self.visible.to(device)), dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Rows of one sequence that are to be run through a model.

    `buffer` holds the sequence's keys and values; `wanted` are the rows that logits are wanted of (None: all);
    `capture` is as in `Runtime.forward`. `drafts` says that the sequence is still drafting, `beside` that a prompt is
    read or a window scored. `layers` (first, last): the rows, whose states (rows, hidden_size) after `first` layers are
    `hidden`, run up to `last` layers only, and logits are read there.
    """

    runtime: PassRunner
    rows: Rows
    buffer: KVBuffer
    wanted: Sequence[int] | None = None
    capture: Mapping[int, list[Tensor]] | None = None
    drafts: bool = False
    hidden: Tensor | None = None
    layers: tuple[int, int] | None = None
    beside: bool = False


Kind = Literal["attn", "mlp"]
KINDS: tuple[Kind, ...] = ("attn", "mlp")  # of sub-layers, as they follow each other in a layer
Groups = tuple[tuple[str | None, frozenset[int]], ...]  # weight format (None: the model's own), and variants


@lru_cache(maxsize=64)
def keepers(n_layers: int, variants: tuple[LayerSet, ...]) -> tuple[Mapping[Kind, Groups], ...]:
    """Per layer which variants run its attention and which its MLP, by weight format; without any, one runs all."""
    sets = variants or (LayerSet(n_layers),)
    return tuple({kind: _groups(kind, layer, sets) for kind in KINDS} for layer in range(n_layers))


def _groups(kind: Kind, layer: int, sets: Sequence[LayerSet]) -> Groups:
    groups: dict[str | None, set[int]] = {}
    for variant, layer_set in enumerate(sets):
        if not layer_set.skips(kind, layer):
            groups.setdefault(layer_set.format_of(kind, layer), set()).add(variant)
    return tuple((name, frozenset(own)) for name, own in groups.items())


class PassPlan:
    """What the layers of one pass share: row subsets, rotations and masks, each made once."""

    def __init__(self, runtime: PassRunner, rows: Rows, buffer: KVBuffer | None = None, first: int = 0) -> None:
        self.runtime, self.rows, self.buffer = runtime, rows, buffer
        self.first = first  # row of the forward pass that its own rows begin with
        self.n = len(rows.token_ids)
        self.end = rows.first_slot + self.n
        self.every = frozenset(range(max(1, len(rows.variants))))
        self.share = self.n // len(self.every)
        self.kept = keepers(runtime.n_layers, rows.variants)
        self._groups: dict[tuple[int | None, str, torch.device, frozenset[int]], RowGroup] = {}
        self._indices: dict[tuple[frozenset[int], torch.device], Tensor] = {}

    def row_index(self, variants: frozenset[int], device: torch.device) -> Tensor:
        """int64, the rows of those variants in order."""
        key = (variants, device)
        if key not in self._indices:
            shares = [torch.arange(v * self.share, (v + 1) * self.share, device=device) for v in sorted(variants)]
            self._indices[key] = torch.cat(shares)
        return self._indices[key]

    def positions(self, device: torch.device) -> Tensor:
        """int64, (rows,)."""
        if self.rows.positions is None:
            return torch.arange(self.rows.first_slot, self.end, device=device)
        return uploaded(self.rows.positions, device)

    def group(self, block: Block, variants: frozenset[int]) -> RowGroup:
        """The rows of `variants` as `block` sees them."""
        key = (block.window, block.layer_type, block.device, variants)
        if key not in self._groups:
            self._groups[key] = self._make_group(block, variants)
        return self._groups[key]

    def _make_group(self, block: Block, variants: frozenset[int]) -> RowGroup:
        first = self.rows.first_slot
        n_positions = self.end if self.rows.positions is None else max(self.rows.positions) + 1
        table = self.runtime.rotation(block.layer_type, block.device, n_positions)
        cos = sin = None
        if table is not None:
            at = slice(first, self.end) if self.rows.positions is None else self.positions(block.device)
            cos, sin = table[0][at][:, None], table[1][at][:, None]
        spans: tuple[tuple[int, int, int], ...] = ((0, first, self.n),)
        start, mask = self._mask(block)
        if variants != self.every:
            index = self.row_index(variants, block.device)
            cos = None if cos is None else cos[index]
            sin = None if sin is None else sin[index]
            mask = None if mask is None else mask[index]
            spans = tuple((i * self.share, first + v * self.share, self.share) for i, v in enumerate(sorted(variants)))
        mask = None if mask is None else block.heads.of_groups(mask)
        return RowGroup(cos, sin, spans, start, self.end, mask)

    def _mask(self, block: Block) -> tuple[int, Tensor | None]:
        """First slot to read and the additive mask over the slots from there, for all rows."""
        if self.rows.visible is None and self.n == 1:
            return (0 if block.window is None else max(0, self.end - block.window)), None
        return 0, self.mask(block.window, block.device)

    def mask(self, window: int | None, device: torch.device) -> Tensor:
        """What is added to the scores of all slots, (rows, end): 0 where a row sees the slot."""
        visible = self.rows.seen(device)
        if visible is None:
            visible = torch.arange(self.end, device=device)[None] <= self.positions(device)[:, None]
        if window is not None:  # slots whose *position* is less than `window` behind the row's
            own = self.positions(device)
            slots = torch.cat((torch.arange(self.rows.first_slot, device=device), own))
            visible = visible & (slots[None] > own[:, None] - window)
        mask = torch.zeros(visible.shape, dtype=self.runtime.dtype, device=device)
        return mask.masked_fill_(~visible, torch.finfo(self.runtime.dtype).min)


Member = tuple[PassPlan, frozenset[int]]  # a pass, and those of its variants that run a sub-layer


class SharedRows(Protocol):
    """What the layers of a forward pass share."""

    def rows(self, block: Block, members: Sequence[Member]) -> LayerRows:
        """Return the rows of `members` as `block` sees them."""
        ...


class BufferPlan:
    """What the layers of a forward pass share where torch reads each sequence's buffer; see `SharedRows`."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, BufferRows] = {}

    def rows(self, block: Block, members: Sequence[Member]) -> BufferRows:
        """Return the rows of `members` as `block` sees them."""
        some = tuple((plan.first, variants) for plan, variants in members)
        key = (some, block.window, block.layer_type, block.device)
        if key not in self._rows:
            groups = [(plan.group(block, own), cast(KVBuffer, plan.buffer)) for plan, own in members]
            self._rows[key] = BufferRows(groups)
        return self._rows[key]


def uploaded(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for what the device was asked to do before."""
    tensor = torch.as_tensor(values).to(dtype)
    if device.type == "cpu":
        return tensor
    pinned = tensor.pin_memory() if torch.cuda.is_available() else tensor
    return pinned.to(device, non_blocking=True)
