"""Mixtures of experts on CUDA devices, in Triton: choosing a row's experts, and products by expert.

Rows are grouped by their experts into tiles of `device.TILE` rows, and `expert_linear` multiplies each tile by one
expert's weights or codes. All sums have a fixed order, so a row's bits do not depend on other rows.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from . import layout
from .device import TILE, expert_parts, on_its_device, sum_parts
from .device_codes import CodedMap, coded_parts

CELLS = 8192  # Most choices times experts that a Triton program compares at once.
MIXED = 256  # Outputs of a row that a Triton program adds up.

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from .device import sigmoid

    @triton.jit
    def _best(scores, is_free, at, n):
        """Return the index of the largest free score, of equal ones the first; NaN comes last."""
        scores = tl.where(is_free & (scores == scores), scores, float("-inf"))
        return tl.min(tl.where(is_free & (scores == tl.max(scores, axis=0)), at, n), axis=0)

    @triton.jit
    def _chosen(
        logits, correction, experts, weights, n_experts, least, scale, jitter,
        SCORES: tl.constexpr, HAS_CORRECTION: tl.constexpr, NORMALISED: tl.constexpr, N_CHOSEN: tl.constexpr,
        N_GROUPS: tl.constexpr, N_GROUPS_CHOSEN: tl.constexpr, N_BEST: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        # The same as `choose` in mixture.h; tests compare both with torch's routers.
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, WIDTH)
        is_there = at < n_experts
        score = tl.load(logits + row * n_experts + at, mask=is_there, other=float("-inf")).to(tl.float32)
        is_taken = at < 0
        if SCORES == 2:  # Phi's sparse mixer.
            mixed = tl.zeros((WIDTH,), dtype=tl.float32)
            for _ in tl.static_range(2):
                best = _best(score, is_there & (is_taken == 0), at, n_experts)
                largest = tl.sum(tl.where(at == best, score, 0.0), axis=0)
                logit = tl.where(is_there, score, largest)
                behind = largest - logit
                is_far = behind / tl.maximum(tl.abs(logit), largest) > 2 * jitter
                is_near = is_there & (is_taken == 0) & (is_far == 0)
                total = tl.sum(tl.where(is_near, tl.exp(-behind), 0.0), axis=0)
                mixed = tl.where(at == best, 1.0 / total, mixed)
                is_taken = is_taken | (at == best)
            score = mixed
        else:
            rank = score
            if SCORES == 1 or SCORES == 3:
                score = sigmoid(score)
            else:
                score = tl.exp(score - tl.max(score, axis=0))
                score = score / tl.sum(score, axis=0)
            if SCORES != 3:  # With LATE_SIGMOID, experts are chosen by logits.
                rank = score
            if HAS_CORRECTION:
                rank += tl.load(correction + at, mask=is_there, other=0.0)
            is_free = is_there
            if N_GROUPS_CHOSEN < N_GROUPS:  # A group's score is the sum of its best scores, one or two.
                size = n_experts // N_GROUPS
                of_groups = tl.full((WIDTH,), float("-inf"), tl.float32)
                for group in tl.static_range(N_GROUPS):
                    is_own = is_there & (at // size == group)
                    first = _best(rank, is_own, at, n_experts)
                    total = tl.sum(tl.where(at == first, rank, 0.0), axis=0)
                    if size > 1 and N_BEST > 1:
                        second = _best(rank, is_own & (at != first), at, n_experts)
                        total += tl.sum(tl.where(at == second, rank, 0.0), axis=0)
                    of_groups = tl.where(is_own, total, of_groups)
                is_free = at < 0
                for _ in tl.static_range(N_GROUPS_CHOSEN):
                    best = _best(of_groups, is_there & (is_free == 0), at, n_experts)
                    is_free = is_free | (is_there & (at // size == best // size))
            for _ in tl.static_range(N_CHOSEN):
                best = _best(rank, is_free & (is_taken == 0), at, n_experts)
                is_taken = is_taken | (at == best)
            if NORMALISED:
                score = score / tl.maximum(tl.sum(tl.where(is_taken, score, 0.0), axis=0), least)
            score = score * scale
        place = row * N_CHOSEN + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        tl.store(experts + place, at, mask=is_taken)
        tl.store(weights + place, score, mask=is_taken)

    @triton.jit(do_not_specialize=["n_choices", "n_tiles"])
    def _shared_out(
        choices, order, tiles, n_choices, n_tiles, TILE_: tl.constexpr, EXPERTS: tl.constexpr, READ: tl.constexpr
    ):  # fmt: skip
        # A single program suffices: it reads far less than the weights of one expert.
        every = tl.arange(0, EXPERTS)[None, :]
        counts = tl.zeros((EXPERTS,), dtype=tl.int32)
        begun = 0
        while begun < n_choices:
            at = begun + tl.arange(0, READ)
            taken = tl.load(choices + at, mask=at < n_choices, other=-1)
            counts += tl.sum((taken[:, None] == every).to(tl.int32), axis=0)
            begun += READ
        first = tl.cumsum(counts, 0) - counts
        n_own = (counts + TILE_ - 1) // TILE_
        ends = tl.cumsum(n_own, 0)
        free = first
        begun = 0
        while begun < n_choices:
            at = begun + tl.arange(0, READ)
            taken = tl.load(choices + at, mask=at < n_choices, other=-1)
            is_own = (taken[:, None] == every).to(tl.int32)
            places = free[None, :] + tl.cumsum(is_own, 0) - is_own
            tl.store(order + tl.sum(is_own * places, axis=1), at, mask=at < n_choices)
            free += tl.sum(is_own, axis=0)
            begun += READ
        begun = 0
        while begun < n_tiles:
            tile = begun + tl.arange(0, READ)
            expert = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
            is_own = (expert[:, None] == every).to(tl.int32)
            before = TILE_ * (tile - tl.sum(is_own * (ends - n_own)[None, :], axis=1))
            left = tl.sum(is_own * counts[None, :], axis=1) - before  # ≤ 0 for tiles after the last used one.
            there = tile < n_tiles
            tl.store(tiles + tile, expert, mask=there)
            tl.store(tiles + n_tiles + tile, before + tl.sum(is_own * first[None, :], axis=1), mask=there)
            tl.store(tiles + 2 * n_tiles + tile, tl.minimum(left, TILE_), mask=there)
            begun += READ

    @triton.jit
    def _mixed(
        parts, bias, experts, weights, out, n_rows, n_out,
        N_PARTS: tl.constexpr, N_CHOSEN: tl.constexpr, HAS_BIAS: tl.constexpr, OUTPUTS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(1)
        outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        mask = outputs < n_out
        mixed = tl.zeros((OUTPUTS,), dtype=tl.float32)
        for turn in range(N_CHOSEN):
            choice = row * N_CHOSEN + turn
            total = tl.zeros((OUTPUTS,), dtype=tl.float32)
            for part in tl.static_range(N_PARTS):
                at = (part * n_rows * N_CHOSEN + choice).to(tl.int64) * n_out + outputs
                total += tl.load(parts + at, mask=mask, other=0.0)
            if HAS_BIAS:
                expert_bias = bias + tl.load(experts + choice) * n_out
                total += tl.load(expert_bias + outputs, mask=mask, other=0.0).to(tl.float32)
            mixed += total * tl.load(weights + choice).to(tl.float32)
        tl.store(out + row.to(tl.int64) * n_out + outputs, mixed.to(out.dtype.element_ty), mask=mask)


@on_its_device
def choose(logits: Tensor, correction: Tensor | None, routing: layout.Routing) -> tuple[Tensor, Tensor]:
    """Choose experts; return them, int32 (rows, chosen) in ascending order, and their weights, float32.

    Of equal scores, the first expert is chosen.

    Args: logits: (rows, experts), contiguous. correction: (experts,), added to scores only to choose.
    """
    n_rows, n_experts = logits.shape
    experts = torch.empty((n_rows, routing.n_chosen), dtype=torch.int32, device=logits.device)
    weights = torch.empty((n_rows, routing.n_chosen), dtype=torch.float32, device=logits.device)
    _chosen[(n_rows,)](
        logits, logits if correction is None else correction, experts, weights, n_experts, routing.min_sum,
        routing.scale, routing.jitter, SCORES=routing.scores, HAS_CORRECTION=correction is not None,
        NORMALISED=bool(routing.normalised), N_CHOSEN=routing.n_chosen, N_GROUPS=routing.n_groups,
        N_GROUPS_CHOSEN=routing.n_groups_chosen, N_BEST=routing.n_best, WIDTH=triton.next_power_of_2(n_experts),
    )  # fmt: skip
    return experts, weights


@on_its_device
def shared_out(experts: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """Sort choices by expert, and cut them into tiles of at most `TILE` choices of one expert.

    Args:    experts: (rows, chosen), int32.
    Returns: order: (choices,), the sorted choices. tiles: (3, n): each tile's expert, its first choice in `order`, and
             its number of choices, which is ≤ 0 for unused tiles: n depends on shapes only.
    """
    n_choices, place = experts.numel(), experts.device
    n_tiles = n_choices // TILE + min(n_experts, n_choices)
    order = torch.empty(n_choices, dtype=torch.int32, device=place)
    tiles = torch.empty((3, n_tiles), dtype=torch.int32, device=place)
    width = triton.next_power_of_2(n_experts)
    _shared_out[(1,)](
        experts, order, tiles, n_choices, n_tiles, TILE_=TILE, EXPERTS=width, READ=max(1, CELLS // width), num_warps=8
    )
    return order, tiles


def _parts(
    x: Tensor, weight: Tensor | CodedMap, order: Tensor, tiles: Tensor, n_chosen: int, dtype: torch.dtype
) -> Tensor:
    if isinstance(weight, CodedMap):
        return coded_parts(x, weight, order, tiles, n_chosen)
    return expert_parts(x, weight, order, tiles, n_chosen, dtype)


@on_its_device
def expert_linear(
    x: Tensor, weight: Tensor | CodedMap, bias: Tensor | None, experts: Tensor, order: Tensor, tiles: Tensor
) -> Tensor:
    """Apply the maps of each row's experts to it; return (choices, out).

    Args: x: (rows, in). weight: (experts, out, in) with any strides, or codes. bias: (experts, out). experts: (rows,
          n_chosen), int32.
    """
    parts = _parts(x, weight, order, tiles, experts.shape[1], x.dtype if bias is None else torch.float32)
    whole = bias is None and len(parts) == 1 and parts.dtype == x.dtype
    return parts[0] if whole else sum_parts(parts, None, bias, x.dtype, experts)


@on_its_device
def mixed(
    inner: Tensor,
    weight: Tensor | CodedMap,
    bias: Tensor | None,
    experts: Tensor,
    weights: Tensor,
    order: Tensor,
    tiles: Tensor,
) -> Tensor:
    """Return each row's weighted sum (rows, out) of its experts' outputs, in the order of `experts` (rows, chosen).

    Args: inner: (choices, in), the inputs of the down maps. weight: as for `expert_linear`. bias: (experts, out).
          weights: (rows, chosen).
    """
    n_rows, n_chosen = experts.shape
    parts = _parts(inner, weight, order, tiles, n_chosen, torch.float32)
    n_parts, _, n_out = parts.shape
    out = torch.empty((n_rows, n_out), dtype=inner.dtype, device=inner.device)
    _mixed[(-(-n_out // MIXED), n_rows)](
        parts, parts if bias is None else bias, experts, weights, out, n_rows, n_out,
        N_PARTS=n_parts, N_CHOSEN=n_chosen, HAS_BIAS=bias is not None, OUTPUTS=MIXED,
    )  # fmt: skip
    return out
