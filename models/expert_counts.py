"""Counts which experts rows of passes take where torch or Triton computes mixtures; our CPU kernels count themselves.

A pass costs by the distinct experts of its rows, so prices of drafts need their number. The choices of a pass are
counted by a few operations at its end. On a CUDA device the numbers are copied without waiting: they are there when
whoever asked for the pass has read its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..core.costs import ExpertCounts
from .blocks import Block
from .rows import Pass, PassPlan
from .transfers import uploaded

PADDING, FIRST, FOLLOWING = range(3)  # Rows that only fill a pass up, first rows of sequences, and those that follow.


class ExpertCounter:
    """What rows take of a model's mixtures; it counts nothing before `watch`."""

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        self._modules: list[Any] = [
            block.parts.mlp.get_submodule(block.experts.experts) for block in blocks if block.experts is not None
        ]
        routers = (block.parts.mlp.get_submodule(block.experts.router) for block in blocks if block.experts is not None)
        self._n_experts = max((router.weight.shape[0] for router in routers), default=0)
        self._device, self._is_watching = device, False
        self._choices: list[Tensor] | None = None  # Of the pass that is being computed.
        self._sums: Tensor | None = None  # Distinct, taken and repeated experts, and mixtures.
        self._sent: tuple[Tensor, Any] | None = None  # A copy in this machine's memory, and when it is there.

    def watch(self) -> None:
        """Note from now on what modules of experts are given; call it again when their `forward` was replaced."""
        self._is_watching = bool(self._modules)
        for module in self._modules:
            if not isinstance(vars(module).get("forward"), _Noting):
                module.forward = _Noting(self, module.forward)

    def counts(self, passes: Sequence[Pass]) -> bool:
        """Tell whether passes that run together are counted.

        Drafts are not: what they take says nothing of the target's rows. Nor are passes over a part of the layers.
        """
        return self._is_watching and not any(
            one.kind == "draft" or one.rows.variants or one.layers is not None for one in passes
        )

    def begin(self, passes: Sequence[Pass], plans: Sequence[PassPlan]) -> Tensor | None:
        """Note what the rows of passes take until `end`; return the kind of each row, int64 (rows,), None: of none."""
        self._choices = [] if self.counts(passes) else None
        return None if self._choices is None else self.kinds(plans)

    def kinds(self, plans: Sequence[PassPlan]) -> Tensor:
        return uploaded([FOLLOWING if row else FIRST for plan in plans for row in range(plan.n)], self._device)

    def record(self) -> None:
        """Note what the rows of a pass to be captured take; `counted` gives numbers of its runs."""
        self._choices = [] if self._is_watching else None

    def counted(self, kinds: Tensor | None) -> Tensor | None:
        """Return what the rows of the pass took: int64 (4,), on their device. Args: kinds: as of `begin`."""
        choices, self._choices = self._choices, None
        if not choices or kinds is None:
            return None
        taken = torch.stack([of_layer.to(kinds.device) for of_layer in choices]).long()  # (mixtures, rows, chosen)
        n_mixtures, n_rows, n_chosen = taken.shape
        is_member = torch.zeros((n_mixtures, n_rows, self._n_experts), dtype=torch.bool, device=taken.device)
        is_member.scatter_(2, taken, (kinds != PADDING)[None, :, None].expand(taken.shape))
        follows = kinds == FOLLOWING
        is_repeated = is_member[:, 1:] & is_member[:, :-1] & follows[None, 1:, None]
        n_mixtures_each = torch.full((), n_mixtures, dtype=torch.int64, device=taken.device)
        n_taken = follows.sum() * (n_mixtures * n_chosen)
        return torch.stack((is_member.any(dim=1).sum(), n_taken, is_repeated.sum(), n_mixtures_each))

    def end(self, kinds: Tensor | None) -> None:
        """Add what the rows of a pass took since `begin`."""
        if (counts := self.counted(kinds)) is not None:
            self.add(counts)

    def add(self, counts: Tensor) -> None:
        """Add the numbers of a pass, as `counted` returns them."""
        self._sums = counts.clone() if self._sums is None else self._sums + counts
        if self._sums.device.type == "cuda":
            there = cast(Any, torch.cuda.Event)()
            self._sent = self._sums.to("cpu", non_blocking=True), there
            there.record(torch.cuda.current_stream(self._sums.device))

    def taken(self) -> ExpertCounts | None:
        """Return the numbers of passes since the last call; None: there were none, or they are not there yet."""
        sums, sent = self._sums, self._sent
        self._sums = self._sent = None
        if sent is not None:
            sums = sent[0] if sent[1].query() else None
        if sums is None:
            return None
        distinct, n_taken, repeated, n_mixtures = sums.tolist()
        return ExpertCounts(distinct / n_mixtures, n_taken, repeated)


class _Noting:
    """The `forward` of a module of experts, which notes the experts that rows take."""

    def __init__(self, counter: ExpertCounter, forward: Callable[..., Tensor]) -> None:
        self._counter, self._forward = counter, forward

    def __call__(self, hidden: Tensor, taken: Tensor, *others: Any) -> Tensor:
        if self._counter._choices is not None:
            self._counter._choices.append(taken)
        return self._forward(hidden, taken, *others)
