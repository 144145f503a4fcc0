"""Attention of rows over the KV buffers of several sequences on a CUDA device, in Triton; see `device.py`.

A table of int64 numbers describes the rows, so one call serves sequences of any lengths. Slots are summed `SPLIT` at a
time, beginning with the first that a row sees, so a row's bits do not depend on other rows.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from .device import TILE, on_its_device

SPLIT = 256  # KV slots per partial sum of attention.
READ_SLOTS = 64  # Maximum KV slots that an attention tile reads per step.
READ_BYTES = 16384  # Maximum bytes of keys, and of values, per step: both must fit into registers.
# Software pipeline stages: on an H200 5 to 7 % faster than Triton's default of 3, at 2,000 and 8,000 slots.
ATTENTION_STAGES = 2

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["layer"])
    def _store(
        query, key, value, table, cos, sin, out, layer, n_layers, stride, q_row, q_head, k_row, k_head, v_row, v_head,
        n_queries, ROTATED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, POSITION_: tl.constexpr,
        SLOT_: tl.constexpr, BUFFER_: tl.constexpr, CAPACITY_: tl.constexpr,
    ):  # fmt: skip
        # Programs per row: one per query head (only with rotary embedding), then one per key head.
        row, head, n_heads = tl.program_id(0), tl.program_id(1) - n_queries, tl.num_programs(1) - n_queries
        lane = tl.arange(0, PADDED)
        slot = tl.load(table + SLOT_ * stride + row)
        mask = lane < WIDTH
        if head < 0:
            source = query + row * q_row + (head + n_queries) * q_head
            place = out + (row * n_queries + head + n_queries) * WIDTH
        else:
            source = key + row * k_row + head * k_head
            buffer = tl.load(table + BUFFER_ * stride + row).to(tl.pointer_type(key.dtype.element_ty))
            capacity = tl.load(table + CAPACITY_ * stride + row)
            place = buffer + ((layer * n_heads + head) * capacity + slot) * WIDTH
            mask = mask & (slot >= 0)  # Padding rows have a negative slot and store nothing.
            read = tl.load(value + row * v_row + head * v_head + lane, mask=mask)
            tl.store(place + n_layers * n_heads * capacity * WIDTH + lane, read, mask=mask)
        kept = tl.load(source + lane, mask=mask)
        if ROTATED:  # Round after each operation, as torch does.
            turned = mask & (lane < ROTATED)
            at = tl.load(table + POSITION_ * stride + row) * ROTATED + lane
            other = tl.load(source + (lane + ROTATED // 2) % ROTATED, mask=turned, other=0.0).to(tl.float32)
            other = (other * tl.load(sin + at, mask=turned, other=0.0).to(tl.float32)).to(kept.dtype)
            straight = kept.to(tl.float32) * tl.load(cos + at, mask=turned, other=1.0).to(tl.float32)
            kept = (straight.to(kept.dtype).to(tl.float32) + other.to(tl.float32)).to(kept.dtype)
        tl.store(place + lane, kept, mask=mask)

    @triton.jit(do_not_specialize=["layer"])
    def _attend(
        query, table, sums, tops, weights, layer, n_layers, stride, view, n_groups, n_heads, q_stride, scaling,
        softcap, sinks, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, ROWS_: tl.constexpr, WIDTH: tl.constexpr,
        PADDED: tl.constexpr, SPLIT_: tl.constexpr, READ: tl.constexpr, BUFFER_: tl.constexpr, CAPACITY_: tl.constexpr,
        START_: tl.constexpr, RUN_: tl.constexpr, LISTED_: tl.constexpr, FIRST_: tl.constexpr,
        COUNT_: tl.constexpr, LIST_: tl.constexpr, WHOLE: tl.constexpr,
    ):  # fmt: skip
        # A tile holds rows of one sequence and the query heads of one key head. All see slots from the same first slot
        # on, so each slot is read once per tile.
        tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        n_kv_heads, n_splits = tl.num_programs(1), tl.num_programs(2)
        view_table = table + view * stride
        first = tl.load(view_table + FIRST_ * stride + tile)
        n_queries = tl.load(view_table + COUNT_ * stride + tile) * n_groups
        lane = tl.arange(0, ROWS_)
        there = lane < n_queries
        rows = first + lane // n_groups
        heads = kv_head * n_groups + lane % n_groups
        run = tl.load(view_table + RUN_ * stride + rows, mask=there, other=0)
        counts = run + tl.load(view_table + LISTED_ * stride + rows, mask=there, other=0)
        last = tl.max(counts, axis=0)
        if split * SPLIT_ < last:
            start = tl.load(view_table + START_ * stride + first)
            longest = tl.max(run, axis=0)
            buffer = tl.multiple_of(tl.load(table + BUFFER_ * stride + first), 16)
            keys = tl.multiple_of(buffer.to(tl.pointer_type(query.dtype.element_ty)), 16)
            capacity = tl.load(table + CAPACITY_ * stride + first)
            keys += (layer * n_kv_heads + kv_head) * capacity * WIDTH
            values = keys + n_layers * n_kv_heads * capacity * WIDTH
            width = tl.arange(0, PADDED)
            at = rows * q_stride + heads * WIDTH
            mask = there[:, None] & (width < WIDTH)[None, :]
            queries = tl.load(query + at[:, None] + width[None, :], mask=mask, other=0.0)
            top = tl.full((ROWS_,), float("-inf"), dtype=tl.float32)
            weight = tl.zeros((ROWS_,), dtype=tl.float32)
            total = tl.zeros((ROWS_, PADDED), dtype=tl.float32)
            for step in range(SPLIT_ // READ):
                steps = split * SPLIT_ + step * READ + tl.arange(0, READ)
                inside = steps < last
                listed = table + (LIST_ + view + steps - longest) * stride + first
                slots = tl.load(listed, mask=inside & (steps >= longest), other=0)
                slots = tl.where(steps < longest, start + steps, slots)
                written = inside[:, None] & (width < WIDTH)[None, :]
                key = tl.load(keys + slots[:, None] * WIDTH + width[None, :], mask=written, other=0.0)
                score = tl.dot(queries, tl.trans(key), input_precision="ieee") * scaling
                if HAS_CAP:  # softcap * tanh(score / softcap)
                    score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
                score = tl.where(steps[None, :] < counts[:, None], score, float("-inf"))
                higher = tl.maximum(top, tl.max(score, axis=1))
                base = tl.where(higher == float("-inf"), 0.0, higher)
                kept = tl.exp(top - base)
                share = tl.exp(score - base[:, None])
                weight = weight * kept + tl.sum(share, axis=1)
                value = tl.load(values + slots[:, None] * WIDTH + width[None, :], mask=written, other=0.0)
                total = tl.dot(share.to(value.dtype), value, total * kept[:, None], input_precision="ieee")
                top = higher
            at = (rows * n_heads + heads) * n_splits + split
            if HAS_SINKS and split == 0:  # A row's first split includes the sink, a score without a value.
                sink = tl.load(sinks + heads, mask=there, other=float("-inf")).to(tl.float32)
                higher = tl.maximum(top, sink)
                base = tl.where(higher == float("-inf"), 0.0, higher)
                kept = tl.exp(top - base)
                weight = weight * kept + tl.exp(sink - base)
                total = total * kept[:, None]
                top = higher
            if WHOLE:  # With a single split, the result is final: `_merge` would give the same bits.
                total = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
            else:
                tl.store(tops + at, top, mask=there)
                tl.store(weights + at, weight, mask=there)
            tl.store(
                sums + at[:, None] * WIDTH + width[None, :],
                total.to(sums.dtype.element_ty),
                mask=there[:, None] & (width < WIDTH)[None, :],
            )

    @triton.jit
    def _merge(
        sums, tops, weights, table, out, n_splits, stride, view, WIDTH: tl.constexpr, PADDED: tl.constexpr,
        SPLIT_: tl.constexpr, RUN_: tl.constexpr, LISTED_: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        at = (row * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        row_table = table + view * stride + row
        count = tl.load(row_table + RUN_ * stride) + tl.load(row_table + LISTED_ * stride)
        width = tl.arange(0, PADDED)
        top = tl.full((), float("-inf"), dtype=tl.float32)
        weight = tl.full((), 0.0, dtype=tl.float32)
        total = tl.zeros((PADDED,), dtype=tl.float32)
        split = 0
        while split * SPLIT_ < count:
            higher = tl.maximum(top, tl.load(tops + at * n_splits + split))
            kept, share = tl.exp(top - higher), tl.exp(tl.load(tops + at * n_splits + split) - higher)
            weight = weight * kept + tl.load(weights + at * n_splits + split) * share
            part = tl.load(sums + (at * n_splits + split) * WIDTH + width, mask=width < WIDTH, other=0.0)
            total = total * kept + part * share
            top = higher
            split += 1
        total = total / tl.where(weight > 0.0, weight, 1.0)  # Padding rows attend to nothing: avoid a division by zero.
        tl.store(out + at * WIDTH + width, total.to(out.dtype.element_ty), mask=width < WIDTH)


# Fields of a row table, int64 (fields, rows). The first five describe the row. For each attention window of the layers,
# the fields from `view` on describe the slots that the row attends to: a contiguous run, then a list of single slots.
TOKEN, POSITION, SLOT, BUFFER, CAPACITY = range(5)
ROW_FIELDS = 5
# From LIST on there are as many fields as the longest list has slots.
START, RUN, LISTED, TILE_FIRST, TILE_COUNT, LIST = range(6)


def rows_of_tile(n_groups: int) -> int:
    """Return how many rows of a chain share an attention tile, given `n_groups` query heads per key head."""
    return max(1, TILE // n_groups)


@on_its_device
def store(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, rotation: tuple[Tensor, Tensor] | None, layer: int,
    n_layers: int,
) -> Tensor:  # fmt: skip
    """Rotate keys (rows, kv_heads, head_dim), and write keys and values of a layer to the slots in a table.

    Args:    rotation: cosine and sine (positions, rotary_dim), the first half of the sine negated. n_layers: number of
             layers in a buffer, see `KVBuffer`.
    Returns: the rotated queries (rows, heads, head_dim).
    """
    (rows, heads, width), kv_heads = query.shape, key.shape[1]
    cos, sin = (query, query) if rotation is None else rotation
    out = query if rotation is None else torch.empty(query.shape, dtype=query.dtype, device=query.device)
    n_queries = 0 if rotation is None else heads
    _store[(rows, n_queries + kv_heads)](
        query, key, value, table, cos, sin, out, layer, n_layers, table.stride(0), query.stride(0), query.stride(1),
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), n_queries,
        ROTATED=0 if rotation is None else cos.shape[-1], WIDTH=width, PADDED=triton.next_power_of_2(width),
        POSITION_=POSITION, SLOT_=SLOT, BUFFER_=BUFFER, CAPACITY_=CAPACITY,
    )  # fmt: skip
    return out


@on_its_device
def attend(
    query: Tensor, table: Tensor, view: int, n_tiles: int, n_slots: int, layer: int, n_layers: int, n_kv_heads: int,
    scaling: float, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention of queries (rows, heads, head_dim) over the buffers in a table.

    One call serves rows of any number of sequences. A row's slots are summed in their order, whatever slots are between
    them, so a node of a tree gets the same bits as a token of a chain.

    Args:    view: first field of the window's view. n_tiles: tiles of that view. n_slots: bound of the slots that a row
             sees. softcap: bound of scores (None: no bound). sinks: (heads,) scores without a value, or None.
    Returns: (rows, heads * head_dim).
    """
    query = query.contiguous()
    rows, heads, width = query.shape
    groups, padded = heads // n_kv_heads, max(TILE, triton.next_power_of_2(width))
    read = min(READ_SLOTS, max(TILE, READ_BYTES // (padded * query.dtype.itemsize)))
    n_splits = -(-n_slots // SPLIT)
    out = torch.empty((rows, heads * width), dtype=query.dtype, device=query.device)
    shape, whole = (rows, heads, n_splits), n_splits == 1
    sums = out if whole else torch.empty((*shape, width), dtype=torch.float32, device=query.device)
    tops, weights = (out if whole else torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2))
    _attend[(n_tiles, n_kv_heads, n_splits)](
        query, table, sums, tops, weights, layer, n_layers, table.stride(0), view, groups, heads, query.stride(0),
        scaling, softcap or 0.0, query if sinks is None else sinks, HAS_CAP=softcap is not None,
        HAS_SINKS=sinks is not None, ROWS_=max(TILE, triton.next_power_of_2(groups)),
        WIDTH=width, PADDED=padded, SPLIT_=SPLIT, READ=read, BUFFER_=BUFFER, CAPACITY_=CAPACITY, START_=START, RUN_=RUN,
        LISTED_=LISTED, FIRST_=TILE_FIRST, COUNT_=TILE_COUNT, LIST_=LIST, WHOLE=whole, num_stages=ATTENTION_STAGES,
    )  # fmt: skip
    if not whole:
        _merge[(rows, heads)](
            sums, tops, weights, table, out, n_splits, table.stride(0), view, WIDTH=width, PADDED=padded, SPLIT_=SPLIT,
            RUN_=RUN, LISTED_=LISTED,
        )  # fmt: skip
    return out
