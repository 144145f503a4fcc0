"""Our kernels for CUDA devices, in Triton: linear maps, norms and attention of rows that do not depend on one another.

Torch's kernels choose how they sum by the number of rows, so that a token that is checked among others may differ
from the same token alone. These sum each row in one order, which depends only on shapes of weights and on the row's own
length: products go through tiles of `TILE` rows whatever their number, and attention through `SPLIT` slots at a time,
counted from the first that the row sees. A pass of several rows then gives the bits of passes of one row.

The maps also read codes of 4 and 8 bits as `kernels/quantised.h` lays them out, and never write the weights out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 16  # rows of a product: the smallest that tensor cores take
SPLIT = 256  # slots that are summed by themselves
READ_SLOTS = 64  # that a tile of attention reads at a time, at most
READ_BYTES = 16384  # and of keys, and of values: what it holds must fit the registers
WIDE, NARROW = 64, 16  # outputs of a tile
INPUTS, WORDS = 128, 32  # inputs, or 32-bit words of codes, that are read at a time
PROGRAMS = 512  # at least, for a map: several for each processor of the largest devices
MOST_SPLITS = 8  # parts of a map's inputs that are summed by themselves

Others = ParamSpec("Others")
Found = TypeVar("Found")

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _dense(
        x, weight, out, n_rows, n_in, n_out, x_stride, w_stride, w_step,
        ROWS_: tl.constexpr, OUTPUTS: tl.constexpr, READ: tl.constexpr, STEPS: tl.constexpr,
    ):  # fmt: skip
        rows = tl.program_id(1) * ROWS_ + tl.arange(0, ROWS_)
        outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        first = tl.program_id(2) * (STEPS * READ)
        total = tl.zeros((ROWS_, OUTPUTS), dtype=tl.float32)
        for step in range(STEPS):
            inputs = first + step * READ + tl.arange(0, READ)
            own = tl.load(
                x + rows[:, None] * x_stride + inputs[None, :],
                mask=(rows < n_rows)[:, None] & (inputs < n_in)[None, :],
                other=0.0,
            )
            read = tl.load(
                weight + outputs[None, :].to(tl.int64) * w_stride + inputs[:, None] * w_step,
                mask=(outputs < n_out)[None, :] & (inputs < n_in)[:, None],
                other=0.0,
            ).to(own.dtype)
            total = tl.dot(own, read, total, input_precision="ieee")
        at = tl.program_id(2).to(tl.int64) * n_rows * n_out + rows[:, None] * n_out + outputs[None, :]
        tl.store(out + at, total, mask=(rows < n_rows)[:, None] & (outputs < n_out)[None, :])

    @triton.jit
    def _coded(
        x, codes, scales, out, n_rows, n_in, n_out, x_stride, n_words, n_groups,
        BITS: tl.constexpr, GROUP: tl.constexpr, ZERO_CODES: tl.constexpr,
        ROWS_: tl.constexpr, OUTPUTS: tl.constexpr, READ: tl.constexpr, STEPS: tl.constexpr,
    ):  # fmt: skip
        per_word: tl.constexpr = 32 // BITS
        middle: tl.constexpr = 1 << (BITS - 1)
        rows = tl.program_id(1) * ROWS_ + tl.arange(0, ROWS_)
        outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        block, within = (outputs // 16).to(tl.int64), outputs % 16
        kept = outputs < n_out
        first = tl.program_id(2) * (STEPS * READ)
        total = tl.zeros((ROWS_, OUTPUTS), dtype=tl.float32)
        for step in range(STEPS):
            words = first + step * READ + tl.arange(0, READ)
            mask = (words < n_words)[:, None] & kept[None, :]
            packed = tl.load(codes + (block * n_words * 16 + within)[None, :] + words[:, None] * 16, mask=mask, other=0)
            group = (words * per_word) // GROUP
            pair = scales + (block * n_groups * 32 + within)[None, :] + group[:, None] * 32
            scale = tl.load(pair, mask=mask, other=0.0).to(tl.float32)
            zero = tl.load(pair + 16, mask=mask, other=0.0).to(tl.float32)
            for i in tl.static_range(per_word):
                code = (packed >> (8 * (i % 4) + 4 * (i // 4))) & ((1 << BITS) - 1)
                if ZERO_CODES:
                    value = ((code - middle).to(tl.float32) + zero) * scale
                else:
                    value = (code - middle).to(tl.float32) * scale + zero
                inputs = words * per_word + i
                own = tl.load(
                    x + rows[:, None] * x_stride + inputs[None, :],
                    mask=(rows < n_rows)[:, None] & (inputs < n_in)[None, :],
                    other=0.0,
                )
                total = tl.dot(own, value.to(own.dtype), total, input_precision="ieee")
        at = tl.program_id(2).to(tl.int64) * n_rows * n_out + rows[:, None] * n_out + outputs[None, :]
        tl.store(out + at, total, mask=(rows < n_rows)[:, None] & kept[None, :])

    @triton.jit
    def _joined(
        parts, scales, bias, out, n_rows, n_out,
        N_PARTS: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, OUTPUTS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(1)
        outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        mask = outputs < n_out
        total = tl.zeros((OUTPUTS,), dtype=tl.float32)
        for part in tl.static_range(N_PARTS):
            total += tl.load(parts + (part * n_rows + row).to(tl.int64) * n_out + outputs, mask=mask, other=0.0)
        if HAS_SCALES:
            total *= tl.load(scales + outputs, mask=mask, other=0.0)
        if HAS_BIAS:
            total += tl.load(bias + outputs, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row.to(tl.int64) * n_out + outputs, total.to(out.dtype.element_ty), mask=mask)

    @triton.jit
    def _norm(
        x, weight, bias, out, n, eps, CENTRED: tl.constexpr, PLUS_ONE: tl.constexpr, HAS_BIAS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, WIDTH)
        mask = at < n
        own = tl.load(x + row * n + at, mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            own = tl.where(mask, own - tl.sum(own, axis=0) / n, 0.0)
        own = own * tl.rsqrt(tl.sum(own * own, axis=0) / n + eps)
        scale = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
        if PLUS_ONE:
            own = own * (1.0 + scale)
        elif CENTRED:
            own = own * scale
        else:  # as Llama's: rounded before the weight
            own = own.to(out.dtype.element_ty).to(tl.float32) * scale
        if HAS_BIAS:
            own += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * n + at, own.to(out.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["layer"])
    def _store(
        key, value, table, layer, n_layers, stride, k_row, k_head, v_row, v_head, WIDTH: tl.constexpr,
        PADDED: tl.constexpr, SLOT_: tl.constexpr, BUFFER_: tl.constexpr, CAPACITY_: tl.constexpr,
    ):  # fmt: skip
        row, head, n_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
        slot = tl.load(table + SLOT_ * stride + row)
        if slot >= 0:  # else the row only fills a pass up
            buffer = tl.load(table + BUFFER_ * stride + row).to(tl.pointer_type(key.dtype.element_ty))
            capacity = tl.load(table + CAPACITY_ * stride + row)
            own = tl.arange(0, PADDED)
            mask = own < WIDTH
            at = (layer * n_heads + head) * capacity + slot
            tl.store(buffer + at * WIDTH + own, tl.load(key + row * k_row + head * k_head + own, mask=mask), mask=mask)
            at += n_layers * n_heads * capacity
            tl.store(
                buffer + at * WIDTH + own, tl.load(value + row * v_row + head * v_head + own, mask=mask), mask=mask
            )

    @triton.jit(do_not_specialize=["layer"])
    def _attend(
        query, table, sums, tops, weights, layer, n_layers, stride, view, n_groups, n_heads, q_stride, scaling,
        ROWS_: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLIT_: tl.constexpr, READ: tl.constexpr,
        BUFFER_: tl.constexpr, CAPACITY_: tl.constexpr, START_: tl.constexpr, RUN_: tl.constexpr,
        LISTED_: tl.constexpr, FIRST_: tl.constexpr, COUNT_: tl.constexpr, LIST_: tl.constexpr,
    ):  # fmt: skip
        # A tile: rows of one sequence with the query heads of one key head, that read the same slots one after another.
        tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        n_kv_heads, n_splits = tl.num_programs(1), tl.num_programs(2)
        own_view = table + view * stride
        first = tl.load(own_view + FIRST_ * stride + tile)
        n_queries = tl.load(own_view + COUNT_ * stride + tile) * n_groups
        own = tl.arange(0, ROWS_)
        there = own < n_queries
        rows = first + own // n_groups
        heads = kv_head * n_groups + own % n_groups
        run = tl.load(own_view + RUN_ * stride + rows, mask=there, other=0)
        counts = run + tl.load(own_view + LISTED_ * stride + rows, mask=there, other=0)
        last = tl.max(counts, axis=0)
        if split * SPLIT_ < last:
            start = tl.load(own_view + START_ * stride + first)
            longest = tl.max(run, axis=0)
            buffer = tl.multiple_of(tl.load(table + BUFFER_ * stride + first), 16)
            keys = tl.multiple_of(buffer.to(tl.pointer_type(query.dtype.element_ty)), 16)
            capacity = tl.load(table + CAPACITY_ * stride + first)
            keys += (layer * n_kv_heads + kv_head) * capacity * WIDTH
            values = keys + n_layers * n_kv_heads * capacity * WIDTH
            width = tl.arange(0, PADDED)
            at = rows * q_stride + heads * WIDTH
            mask = there[:, None] & (width < WIDTH)[None, :]
            asked = tl.load(query + at[:, None] + width[None, :], mask=mask, other=0.0)
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
                score = tl.dot(asked, tl.trans(key), input_precision="ieee") * scaling
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
            tl.store(tops + at, top, mask=there)
            tl.store(weights + at, weight, mask=there)
            tl.store(sums + at[:, None] * WIDTH + width[None, :], total, mask=there[:, None] & (width < WIDTH)[None, :])

    @triton.jit
    def _merge(
        sums, tops, weights, table, out, n_splits, stride, view, WIDTH: tl.constexpr, PADDED: tl.constexpr,
        SPLIT_: tl.constexpr, RUN_: tl.constexpr, LISTED_: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        at = (row * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        own = table + view * stride + row
        count = tl.load(own + RUN_ * stride) + tl.load(own + LISTED_ * stride)
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
        total = total / tl.where(weight > 0.0, weight, 1.0)  # rows that only fill a pass up see nothing
        tl.store(out + at * WIDTH + width, total.to(out.dtype.element_ty), mask=width < WIDTH)


@cache
def are_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def _on_its_device(
    function: Callable[Concatenate[Tensor, Others], Found],
) -> Callable[Concatenate[Tensor, Others], Found]:
    """Launch the kernels of a function where its first tensor lies.

    Triton launches them on a thread's current device, the first one unless it is told another.
    """

    @wraps(function)
    def launched(x: Tensor, /, *args: Others.args, **kwargs: Others.kwargs) -> Found:
        with torch.cuda.device_of(x):
            return function(x, *args, **kwargs)

    return launched


def _tiles(n_out: int, n_in: int, read: int) -> tuple[int, int, int]:
    """Outputs of a tile, steps of `read` inputs in a part, and the number of parts; by the weight's shape alone."""
    outputs = WIDE if n_out >= WIDE * PROGRAMS else NARROW
    wanted = min(MOST_SPLITS, -(-PROGRAMS // -(-n_out // outputs)), -(-n_in // read))
    steps = -(-n_in // (wanted * read))
    return outputs, steps, -(-n_in // (steps * read))


def _finished(parts: Tensor, scales: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    n_parts, n_rows, n_out = parts.shape
    out = torch.empty((n_rows, n_out), dtype=dtype, device=parts.device)
    _joined[(-(-n_out // 256), n_rows)](
        parts, out if scales is None else scales, out if bias is None else bias, out, n_rows, n_out,
        N_PARTS=n_parts, HAS_SCALES=scales is not None, HAS_BIAS=bias is not None, OUTPUTS=256,
    )  # fmt: skip
    return out


@_on_its_device
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
    """Return the linear map (rows, out) of `x` (rows, in) by a weight (out, in) of any strides; sums are in float32.

    Args: weight: of the type of `x`, or float8_e4m3fn, which is read as that. scales: float32, one for each output.
    """
    x = x.contiguous()
    (n_rows, n_in), n_out = x.shape, weight.shape[0]
    outputs, steps, n_parts = _tiles(n_out, n_in, INPUTS)
    parts = torch.empty((n_parts, n_rows, n_out), dtype=torch.float32, device=x.device)
    _dense[(-(-n_out // outputs), -(-n_rows // TILE), n_parts)](
        x, weight, parts, n_rows, n_in, n_out, x.stride(0), *weight.stride(),
        ROWS_=TILE, OUTPUTS=outputs, READ=INPUTS, STEPS=steps,
    )  # fmt: skip
    return _finished(parts, scales, bias, x.dtype)


@_on_its_device
def coded_linear(
    x: Tensor, codes: Tensor, scales: Tensor, bits: int, group: int, n_out: int, zero_codes: bool, bias: Tensor | None
) -> Tensor:
    """Return the linear map (rows, out) of `x` (rows, in) by codes and scales that `coded.pack` laid out.

    A weight is rounded to the type of `x` before it is multiplied; sums are in float32.

    Args: group: inputs that share a scale. zero_codes: zeros are added to codes, and not to weights.
    """
    x = x.contiguous()
    n_rows, n_in = x.shape
    n_words = codes.shape[1] // (4 * scales.shape[-1])
    outputs, steps, n_parts = _tiles(n_out, n_words, WORDS)
    parts = torch.empty((n_parts, n_rows, n_out), dtype=torch.float32, device=x.device)
    _coded[(-(-n_out // outputs), -(-n_rows // TILE), n_parts)](
        x, codes.view(torch.int32), scales, parts, n_rows, n_in, n_out, x.stride(0), n_words, scales.shape[1],
        BITS=bits, GROUP=group, ZERO_CODES=zero_codes, ROWS_=TILE, OUTPUTS=outputs, READ=WORDS, STEPS=steps,
    )  # fmt: skip
    return _finished(parts, None, bias, x.dtype)


@_on_its_device
def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, plus_one: bool) -> Tensor:
    """Return a norm over the last dimension of `x` (…, n): LayerNorm if `centred`, else an RMS norm.

    Args: plus_one: the weight is one more than what is stored (Gemma's).
    """
    x = x.contiguous()
    n = x.shape[-1]
    out = torch.empty_like(x)
    _norm[(x.numel() // n,)](
        x, weight, weight if bias is None else bias, out, n, eps,
        CENTRED=centred, PLUS_ONE=plus_one, HAS_BIAS=bias is not None, WIDTH=triton.next_power_of_2(n),
    )  # fmt: skip
    return out


# The fields of a table of rows, int64 (fields, rows): what each row is, and for each window that layers have, from
# field `view` on, which slots it sees: a run of them, and then those of a list.
TOKEN, POSITION, SLOT, BUFFER, CAPACITY = range(5)
ROW_FIELDS = 5
START, RUN, LISTED, TILE_FIRST, TILE_COUNT, LIST = range(6)  # LIST: as many fields as the longest list has slots


def rows_of_tile(n_groups: int) -> int:
    """Return how many rows of a chain, of `n_groups` query heads to a key head, attention takes together."""
    return max(1, TILE // n_groups)


@_on_its_device
def store(key: Tensor, value: Tensor, table: Tensor, layer: int, n_layers: int) -> None:
    """Write keys and values (rows, kv_heads, head_dim) of a layer to the slots that a table names.

    Args: n_layers: that a buffer holds; see `KVBuffer`.
    """
    rows, heads, width = key.shape
    _store[(rows, heads)](
        key, value, table, layer, n_layers, table.stride(0), key.stride(0), key.stride(1), value.stride(0),
        value.stride(1), WIDTH=width, PADDED=triton.next_power_of_2(width),
        SLOT_=SLOT, BUFFER_=BUFFER, CAPACITY_=CAPACITY,
    )  # fmt: skip


@_on_its_device
def attend(
    query: Tensor, table: Tensor, view: int, n_tiles: int, n_slots: int, layer: int, n_layers: int, n_kv_heads: int,
    scaling: float,
) -> Tensor:  # fmt: skip
    """Compute attention of (rows, heads, head_dim) over the buffers that a table names: (rows, heads * head_dim).

    Rows of any number of sequences are computed in one call. A row's slots are taken in their order, whatever lies
    between them, so that a node of a tree is computed as the token of a chain is.

    Args: view: field that the window's view begins with. n_tiles: tiles of that view. n_slots: no row sees more.
    """
    query = query.contiguous()
    rows, heads, width = query.shape
    groups, padded = heads // n_kv_heads, max(TILE, triton.next_power_of_2(width))
    read = min(READ_SLOTS, max(TILE, READ_BYTES // (padded * query.dtype.itemsize)))
    n_splits = -(-n_slots // SPLIT)
    shape = (rows, heads, n_splits)
    sums = torch.empty((*shape, width), dtype=torch.float32, device=query.device)
    tops, weights = (torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2))
    _attend[(n_tiles, n_kv_heads, n_splits)](
        query, table, sums, tops, weights, layer, n_layers, table.stride(0), view, groups, heads, query.stride(0),
        scaling, ROWS_=max(TILE, triton.next_power_of_2(groups)), WIDTH=width, PADDED=padded, SPLIT_=SPLIT, READ=read,
        BUFFER_=BUFFER, CAPACITY_=CAPACITY, START_=START, RUN_=RUN, LISTED_=LISTED, FIRST_=TILE_FIRST,
        COUNT_=TILE_COUNT, LIST_=LIST,
    )  # fmt: skip
    out = torch.empty((rows, heads * width), dtype=query.dtype, device=query.device)
    _merge[(rows, heads)](
        sums, tops, weights, table, out, n_splits, table.stride(0), view, WIDTH=width, PADDED=padded, SPLIT_=SPLIT,
        RUN_=RUN, LISTED_=LISTED,
    )  # fmt: skip
    return out
