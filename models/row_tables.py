"""Tables of rows, for kernels that read the KV buffers of any number of sequences in one call.

A table's size does not depend on the context: a row sees a run of slots, which begins where its window does, and then
a list of single slots, for nodes of a tree between nodes of other branches. So a pass uploads only a few numbers per
row, and a captured pass can run any rows of any buffers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .blocks import Block, BufferRows
from .config_layout import AttentionWindow
from .kernels import device_attention as kernels
from .rotation import RotaryTables
from .rows import BufferPlan, Member, PassPlan, PassRunner
from .transfers import uploaded

Table = NDArray[np.int64]
Seen = tuple[int, int, list[int]]  # First slot of a contiguous run, its length, and the single slots after it.


class TableFullError(ValueError):
    """A table of fixed size has no room for all rows, or for all slots that a row sees."""


class RowTable:
    """Makes tables of rows; field numbers are those of `kernels.device`.

    Args: width: number of rows of each table (None: as many as it needs). n_slots: bound of the slots that a row sees.
          longest: number of slots in a list. Without a width, `n_slots`, `longest` and `n_tiles` are those of the last
          table.
    """

    def __init__(self, runtime: PassRunner, width: int | None = None, n_slots: int = 0, longest: int = 0) -> None:
        self.windows = tuple(dict.fromkeys(runtime.windows))
        n_groups = next(block.heads.n_groups for block in runtime.blocks if block.has_attention)
        self.tile = kernels.rows_of_tile(n_groups)
        self.width, self.n_slots, self.longest = width, n_slots, longest
        self.n_tiles = [width or 0 for _ in self.windows]
        self.n_positions = min(n_slots, runtime.max_positions)

    @property
    def n_fields(self) -> int:
        return self.field(len(self.windows))

    def made(self, members: Sequence[Member], device: torch.device) -> Table:
        """Return the table (fields, rows) of the members' rows.

        Raises: TableFullError: there are more rows than `width`, or a list is longer than `longest`.
        """
        rows = [_Rows(plan, _chosen(plan, variants)) for plan, variants in members]
        seen = [[slots for sequence in rows for slots in sequence.seen(window)] for window in self.windows]
        n, longest = (
            sum(len(sequence.chosen) for sequence in rows),
            max(len(slots[2]) for sequence in seen for slots in sequence),
        )
        if self.width is None:
            self.longest, width = longest, n
        else:
            width = self.width
            if n > width or longest > self.longest:
                raise TableFullError(f"{n} rows and lists of {longest} slots do not fit a table of {width}")
        table = np.zeros((self.n_fields, width), np.int64)
        table[kernels.SLOT, n:] = -1
        at = 0
        for sequence in rows:
            part = table[:, at : (at := at + len(sequence.chosen))]
            part[kernels.TOKEN], part[kernels.POSITION] = sequence.tokens, sequence.positions[sequence.chosen]
            part[kernels.SLOT], part[kernels.BUFFER] = sequence.first + sequence.chosen, sequence.buffer.address(device)
            part[kernels.CAPACITY] = sequence.buffer.capacity
        table[kernels.BUFFER, n:], table[kernels.CAPACITY, n:] = table[kernels.BUFFER, 0], table[kernels.CAPACITY, 0]
        ends = {at for at in np.cumsum([len(sequence.chosen) for sequence in rows]).tolist()}
        for view, seen_of_rows in enumerate(seen):
            part = table[self.field(view) :]
            for row, (start, run, slots) in enumerate(seen_of_rows):
                part[: kernels.TILE_FIRST, row] = start, run, len(slots)
                part[kernels.LIST : kernels.LIST + len(slots), row] = slots
            tiles = self._tiles(seen_of_rows, ends)
            part[kernels.TILE_FIRST, : len(tiles)] = [first for first, _ in tiles]
            part[kernels.TILE_COUNT, : len(tiles)] = [last - first for first, last in tiles]
            if self.width is None:
                self.n_tiles[view] = len(tiles)
                self.n_slots = max(self.n_slots, *(run + len(slots) for _, run, slots in seen_of_rows))
                self.n_positions = int(table[kernels.POSITION].max()) + 1
        return table

    def field(self, view: int) -> int:
        return kernels.ROW_FIELDS + view * (kernels.LIST + self.longest)

    def _tiles(self, seen: Sequence[Seen], ends: set[int]) -> list[tuple[int, int]]:
        """Cut rows into tiles (first, last): single rows, or rows of one sequence whose runs begin at the same slot."""
        cuts = [0]
        for row in range(1, len(seen)):
            (start, _, slots), (before, _, listed) = seen[row], seen[row - 1]
            if row in ends or row - cuts[-1] == self.tile or slots or listed or start != before:
                cuts.append(row)
        return list(pairwise([*cuts, len(seen)]))


class _Rows:
    def __init__(self, plan: PassPlan, chosen: NDArray[np.int64]) -> None:
        assert plan.buffer is not None
        rows, self.buffer, self.chosen, self.first = plan.rows, plan.buffer, chosen, plan.rows.first_slot
        # Token ids given as a tensor stay on the device; reading them would wait for the GPU.
        self.rows, self.tokens = rows, 0 if isinstance(rows.token_ids, Tensor) else np.array(rows.token_ids)[chosen]
        given = np.arange(self.first, plan.end) if rows.positions is None else np.array(rows.positions)
        self.positions = given.astype(np.int64)

    def seen(self, window: AttentionWindow | None) -> list[Seen]:
        """Return what each row sees through a window."""
        starts = np.zeros_like(self.positions) if window is None else np.maximum(0, window.oldest(self.positions))
        if self.rows.visible is None:
            return [(int(starts[row]), int(self.positions[row] + 1 - starts[row]), []) for row in self.chosen]
        visible = self.rows.visible.numpy()
        older = max(0, self.first + len(self.positions) - visible.shape[1])
        runs = older + np.logical_and.accumulate(visible, axis=1).sum(axis=1)
        views: list[Seen] = []
        for row in self.chosen:
            slots = older + np.flatnonzero(visible[row])
            slots = slots[slots >= runs[row]]
            if window is not None:
                of_rows = self.positions[np.maximum(0, slots - self.first)]
                slots = slots[np.where(slots < self.first, slots, of_rows) >= starts[row]]
            start = min(int(starts[row]), int(runs[row]))
            views.append((start, int(runs[row]) - start, slots.tolist()))
        return views


def _chosen(plan: PassPlan, variants: frozenset[int]) -> NDArray[np.int64]:
    if variants == plan.every:
        return np.arange(plan.n)
    return np.concatenate([np.arange(v * plan.share, (v + 1) * plan.share) for v in sorted(variants)])


class TableRows:
    """Rows in a table for the kernels, for layers with the same device, window and rotation; see `blocks.LayerRows`.

    The kernel that stores keys and values also rotates keys and queries, if it supports the rotation.

    Args: beside: the rows for a recurrence in parallel to attention; None: the layers have none.
    """

    rotation: RotaryTables | None = None

    def __init__(
        self, runtime: PassRunner, table: RowTable, data: Tensor, block: Block, beside: BufferRows | None = None
    ) -> None:
        self._table, self._data, self._beside = table, data, beside
        # A buffer's block has the layers with attention on its device, in their order.
        self._layers = [other.index for other in runtime.blocks if other.has_attention and other.device == block.device]
        self._view = table.windows.index(block.window)
        self._tables = runtime.rotation(block.layer_type, block.device, table.n_positions)
        rotated_late = block.head_norm == "rotated" and block.parts.q_norm is not None
        if self._tables is not None and (rotated_late or not self._tables.is_usual(runtime.dtype)):
            self.rotation, self._tables = self._tables.at(data[kernels.POSITION].long()), None

    def convolution(self, block: Block, conv: Any, projected: Tensor) -> Tensor:
        raise NotImplementedError("a table of rows has no slots of a convolution's inputs")

    def recurrence_convolved(self, block: Block, inputs: Tensor) -> Tensor:
        assert self._beside is not None
        return self._beside.recurrence_convolved(block, inputs)

    def recurrence(self, block: Block, inputs: Tensor) -> Tensor:
        assert self._beside is not None
        return self._beside.recurrence(block, inputs)

    def attend(self, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        table, layer, n_layers = self._table, self._layers.index(block.index), len(self._layers)
        rotation = None if self._tables is None else self._tables[:2]
        query = kernels.store(query, key, value, self._data, rotation, layer, n_layers)
        view, n_tiles = table.field(self._view), table.n_tiles[self._view]
        return kernels.attend(
            *(query, self._data, view, n_tiles, table.n_slots, layer, n_layers, key.shape[1], block.scaling),
            softcap=block.softcap,
            sinks=block.sinks,
        )


class TablePlan:
    """Data shared by the layers of a forward pass when kernels read tables: one table per subset of its rows.

    Token mixers other than attention are computed per sequence.

    Args: table, data: a table to use for all subsets, and its numbers on the device (None: tables are made).
    """

    def __init__(self, runtime: PassRunner, table: RowTable | None = None, data: Tensor | None = None) -> None:
        self._runtime = runtime
        self._given = None if table is None or data is None else (table, data)
        self._tables: dict[Hashable, tuple[RowTable, Tensor]] = {}
        self._rows: dict[Hashable, TableRows] = {}
        self._per_sequence = BufferPlan(attends=False)

    def rows(self, block: Block, members: Sequence[Member]) -> TableRows | BufferRows:
        """Return the rows of `members` as `block` sees them."""
        if not block.has_attention:
            return self._per_sequence.rows(block, members)
        table_key = (block.device, tuple((plan.first, variants) for plan, variants in members))
        key = (table_key, block.window, block.layer_type, block.n_taps)
        if key not in self._rows:
            beside = None if block.rule is None else self._per_sequence.rows(block, members)
            table, data = self._given or self._table(table_key, block, members)
            self._rows[key] = TableRows(self._runtime, table, data, block, beside)
        return self._rows[key]

    def _table(self, key: Hashable, block: Block, members: Sequence[Member]) -> tuple[RowTable, Tensor]:
        if key not in self._tables:
            table = RowTable(self._runtime)
            self._tables[key] = table, uploaded(table.made(members, block.device), block.device)
        return self._tables[key]


SharedRows = BufferPlan | TablePlan  # Row data shared by all layers of a forward pass.
