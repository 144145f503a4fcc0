"""The rows of a forward pass as one table, for kernels that read the buffers of any number of sequences in one call.

Nothing in a table depends on the context: a row sees a run of slots, from the first that its window reaches, and behind
it a list of slots, nodes of a tree that lie between nodes of other branches. So what is moved to a device for each pass
is a few numbers per row, and a captured pass takes any rows of any buffers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .blocks import Block, HeadLayout
from .kernels import device as kernels
from .rows import Member, PassPlan, PassRunner, uploaded

Table = NDArray[np.int64]
Seen = tuple[int, int, list[int]]  # first slot, slots from there on, and slots behind these


class TableModel(PassRunner, Protocol):
    """What tables need of a model; `models.runtime.Runtime` has it."""

    @property
    def windows(self) -> Sequence[int | None]: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def blocks(self) -> Sequence[Block]: ...


class TableFullError(ValueError):
    """Rows, or the slots that one of them sees, are more than a table of fixed size holds."""


class RowTable:
    """Makes tables of rows; field numbers are those of `kernels.device`.

    Args: width: rows that each table has (None: as many as are in it). n_slots: no row sees more. longest: slots that
          lists have room for. Without a width, the latter two and `n_tiles` are those of the table that was made last.
    """

    def __init__(self, runtime: TableModel, width: int | None = None, n_slots: int = 0, longest: int = 0) -> None:
        self.windows = tuple(dict.fromkeys(runtime.windows))
        heads: HeadLayout = runtime.blocks[0].heads
        self.tile = kernels.rows_of_tile(heads.n_heads // heads.n_kv_heads)
        self.width, self.n_slots, self.longest = width, n_slots, longest
        self.n_tiles = [width or 0 for _ in self.windows]
        self.n_positions = min(n_slots, runtime.max_positions)

    @property
    def n_fields(self) -> int:
        """Fields of a table."""
        return self.field(len(self.windows))

    def made(self, members: Sequence[Member], device: torch.device) -> Table:
        """Return the table (fields, rows) of passes, or of their rows of some variants.

        Raises: TableFullError: there are more rows than `width`, or a list has no room.
        """
        rows = [_Rows(plan, _chosen(plan, variants)) for plan, variants in members]
        seen = [[slots for own in rows for slots in own.seen(window)] for window in self.windows]
        n, longest = sum(len(own.chosen) for own in rows), max(len(slots[2]) for own in seen for slots in own)
        if self.width is None:
            self.longest, width = longest, n
        else:
            width = self.width
            if n > width or longest > self.longest:
                raise TableFullError(f"{n} rows and lists of {longest} slots do not fit a table of {width}")
        table = np.zeros((self.n_fields, width), np.int64)
        table[kernels.SLOT, n:] = -1
        at = 0
        for own in rows:
            part = table[:, at : (at := at + len(own.chosen))]
            part[kernels.TOKEN], part[kernels.POSITION] = own.tokens, own.positions[own.chosen]
            part[kernels.SLOT], part[kernels.BUFFER] = own.first + own.chosen, own.buffer.address(device)
            part[kernels.CAPACITY] = own.buffer.capacity
        table[kernels.BUFFER, n:], table[kernels.CAPACITY, n:] = table[kernels.BUFFER, 0], table[kernels.CAPACITY, 0]
        ends = {at for at in np.cumsum([len(own.chosen) for own in rows]).tolist()}
        for view, own_seen in enumerate(seen):
            part = table[self.field(view) :]
            for row, (start, run, slots) in enumerate(own_seen):
                part[: kernels.TILE_FIRST, row] = start, run, len(slots)
                part[kernels.LIST : kernels.LIST + len(slots), row] = slots
            tiles = self._tiles(own_seen, ends)
            part[kernels.TILE_FIRST, : len(tiles)] = [first for first, _ in tiles]
            part[kernels.TILE_COUNT, : len(tiles)] = [last - first for first, last in tiles]
            if self.width is None:
                self.n_tiles[view] = len(tiles)
                self.n_slots = max(self.n_slots, *(run + len(slots) for _, run, slots in own_seen))
                self.n_positions = int(table[kernels.POSITION].max()) + 1
        return table

    def field(self, view: int) -> int:
        """Return the field that a window's view begins with."""
        return kernels.ROW_FIELDS + view * (kernels.LIST + self.longest)

    def _tiles(self, seen: Sequence[Seen], ends: set[int]) -> list[tuple[int, int]]:
        """Cut rows into tiles: of one row, or of several of one sequence that see runs from one slot on."""
        cuts = [0]
        for row in range(1, len(seen)):
            (start, _, slots), (before, _, listed) = seen[row], seen[row - 1]
            if row in ends or row - cuts[-1] == self.tile or slots or listed or start != before:
                cuts.append(row)
        return list(pairwise([*cuts, len(seen)]))


class _Rows:
    """The chosen rows of one pass, and what they see."""

    def __init__(self, plan: PassPlan, chosen: NDArray[np.int64]) -> None:
        assert plan.buffer is not None
        rows, self.buffer, self.chosen, self.first = plan.rows, plan.buffer, chosen, plan.rows.first_slot
        # Tokens that are on the device already are never read from it.
        self.rows, self.tokens = rows, 0 if isinstance(rows.token_ids, Tensor) else np.array(rows.token_ids)[chosen]
        given = np.arange(self.first, plan.end) if rows.positions is None else np.array(rows.positions)
        self.positions = given.astype(np.int64)

    def seen(self, window: int | None) -> list[Seen]:
        """Return what each row sees through a window of so many positions."""
        starts = np.zeros_like(self.positions) if window is None else np.maximum(0, self.positions + 1 - window)
        if self.rows.visible is None:
            return [(int(starts[row]), int(self.positions[row] + 1 - starts[row]), []) for row in self.chosen]
        visible = self.rows.visible.numpy()
        older = max(0, self.first + len(self.positions) - visible.shape[1])
        n_read = older if self.rows.n_read is None else min(older, self.rows.n_read)
        runs = np.full(len(visible), n_read)
        if n_read == older:  # the newest slots that follow are part of the run
            runs += np.logical_and.accumulate(visible, axis=1).sum(axis=1)
        found: list[Seen] = []
        for row in self.chosen:
            slots = older + np.flatnonzero(visible[row])
            slots = slots[slots >= runs[row]]
            if window is not None:
                of_rows = self.positions[np.maximum(0, slots - self.first)]
                slots = slots[np.where(slots < self.first, slots, of_rows) >= starts[row]]
            start = min(int(starts[row]), int(runs[row]))
            found.append((start, int(runs[row]) - start, slots.tolist()))
        return found


def _chosen(plan: PassPlan, variants: frozenset[int]) -> NDArray[np.int64]:
    if variants == plan.every:
        return np.arange(plan.n)
    return np.concatenate([np.arange(v * plan.share, (v + 1) * plan.share) for v in sorted(variants)])


class TableRows:
    """Rows as kernels read them for the layers of one device, window and kind of rotation; see `blocks.LayerRows`."""

    def __init__(self, runtime: TableModel, table: RowTable, data: Tensor, block: Block) -> None:
        self._table, self._data, self._devices = table, data, [each.device for each in runtime.blocks]
        self._view = table.windows.index(block.window)
        rotation = runtime.rotation(block.layer_type, block.device, table.n_positions)
        positions = data[kernels.POSITION]
        self.cos = None if rotation is None else rotation[0][positions][:, None]
        self.sin = None if rotation is None else rotation[1][positions][:, None]

    def attend(self, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return what the rows read, (rows, heads * width), after writing their keys and values; of all buffers."""
        table, devices, own = self._table, self._devices, block.device
        layer, n_layers = devices[: block.index].count(own), devices.count(own)
        kernels.store(key, value, self._data, layer, n_layers)
        view, n_tiles = table.field(self._view), table.n_tiles[self._view]
        return kernels.attend(
            query, self._data, view, n_tiles, table.n_slots, layer, n_layers, key.shape[1], block.scaling
        )


class TablePlan:
    """What the layers of a forward pass share where kernels read a table: for each subset of its rows one table.

    Args: table, data: one made before, that stands for all subsets.
    """

    def __init__(self, runtime: TableModel, table: RowTable | None = None, data: Tensor | None = None) -> None:
        self._runtime = runtime
        self._given = None if table is None or data is None else (table, data)
        self._tables: dict[Hashable, tuple[RowTable, Tensor]] = {}
        self._rows: dict[Hashable, TableRows] = {}

    def rows(self, block: Block, members: Sequence[Member]) -> TableRows:
        """Return the rows of `members` as `block` sees them."""
        some = (block.device, tuple((plan.first, variants) for plan, variants in members))
        key = (some, block.window, block.layer_type)
        if key not in self._rows:
            self._rows[key] = TableRows(self._runtime, *(self._given or self._table(some, block, members)), block)
        return self._rows[key]

    def _table(self, key: Hashable, block: Block, members: Sequence[Member]) -> tuple[RowTable, Tensor]:
        if key not in self._tables:
            table = RowTable(self._runtime)
            self._tables[key] = table, uploaded(table.made(members, block.device), block.device)
        return self._tables[key]
