"""Counts the experts that rows take if torch or Triton computes mixtures; our CPU kernels count them themselves.

The time of a pass grows with the distinct experts of its rows, so the cost of a draft depends on their number. A few
operations at the end of a pass count them. On a CUDA device the counts are copied without waiting: the copy is complete
once the caller has read the pass's result.
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

PADDING, FIRST, FOLLOWING = range(3)  # Kinds of rows: padding of a captured pass, a sequence's first row, the others.


class ExpertCounter:
    """Counts the experts that rows take in a model's mixtures, once `watch` was called."""

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        self._modules: list[Any] = [
            block.parts.mlp.get_submodule(block.experts.experts) for block in blocks if block.experts is not None
        ]
        routers = (block.parts.mlp.get_submodule(block.experts.router) for block in blocks if block.experts is not None)
        self._n_experts = max((router.weight.shape[0] for router in routers), default=0)
        self._device, self._is_watching = device, False
        self._choices: list[Tensor] | None = None  # Experts of the rows of the running pass, by mixture.
        self._sums: Tensor | None = None  # Numbers of distinct, taken and repeated experts, and of mixtures.
        self._sent: tuple[Tensor, Any] | None = None  # The sums on the host, and the event of this copy.

    def watch(self) -> None:
        """Record the experts that rows take from now on; call it again after a `forward` of experts was replaced."""
        self._is_watching = bool(self._modules)
        for module in self._modules:
            if not isinstance(vars(module).get("forward"), _RecordingForward):
                module.forward = _RecordingForward(self, module.forward)

    def counts(self, passes: Sequence[Pass]) -> bool:
        """Tell whether passes that run together are counted.

        Drafts are not counted, because their experts say nothing about the target's; nor are passes over some layers.
        """
        return self._is_watching and not any(
            pass_.kind == "draft" or pass_.rows.variants or pass_.layers is not None for pass_ in passes
        )

    def begin(self, passes: Sequence[Pass], plans: Sequence[PassPlan]) -> Tensor | None:
        """Record the experts of rows until `end`; return each row's kind, int64 (rows,); None: they are not counted."""
        self._choices = [] if self.counts(passes) else None
        return None if self._choices is None else self.kinds(plans)

    def kinds(self, plans: Sequence[PassPlan]) -> Tensor:
        return uploaded([FOLLOWING if row else FIRST for plan in plans for row in range(plan.n)], self._device)

    def record(self) -> None:
        """Record the experts of rows while a pass is captured; `counted` then returns the counts of its replays."""
        self._choices = [] if self._is_watching else None

    def counted(self, kinds: Tensor | None) -> Tensor | None:
        """Return the pass's counts: int64 (4,) on the device, as `_sums`. Args: kinds: as `begin` returned them."""
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
        """Add the counts of the pass since `begin`."""
        if (counts := self.counted(kinds)) is not None:
            self.add(counts)

    def add(self, counts: Tensor) -> None:
        """Add the counts of a pass, as `counted` returns them."""
        self._sums = counts.clone() if self._sums is None else self._sums + counts
        if self._sums.device.type == "cuda":
            copied = cast(Any, torch.cuda.Event)()
            self._sent = self._sums.to("cpu", non_blocking=True), copied
            copied.record(torch.cuda.current_stream(self._sums.device))

    def taken(self) -> ExpertCounts | None:
        """Return the counts of passes since the last call; None: there were none, or the copy is not complete."""
        sums, sent = self._sums, self._sent
        self._sums = self._sent = None
        if sent is not None:
            sums = sent[0] if sent[1].query() else None
        if sums is None:
            return None
        distinct, n_taken, repeated, n_mixtures = sums.tolist()
        return ExpertCounts(distinct / n_mixtures, n_taken, repeated)


class _RecordingForward:
    """The `forward` of a module of experts; it also records the experts that rows take."""

    def __init__(self, counter: ExpertCounter, forward: Callable[..., Tensor]) -> None:
        self._counter, self._forward = counter, forward

    def __call__(self, hidden: Tensor, taken: Tensor, *others: Any) -> Tensor:
        if self._counter._choices is not None:
            self._counter._choices.append(taken)
        return self._forward(hidden, taken, *others)
