"""Scoring candidate layer sets on generated context: several of them in one pass, behind the committed slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.types import LayerSet
from ..decoding.context import Context
from ..decoding.engine import PassGenerator
from ..models.rows import Pass, Rows


@dataclass(frozen=True, slots=True)
class WindowScore:
    """What a candidate predicted over a window, one entry per position.

    `ranks[i]`: how many tokens the draft held more probable than the generated one (0: it is the argmax);
    `confidences[i]`: the draft's top-1 probability.
    """

    ranks: tuple[int, ...]
    confidences: tuple[float, ...]

    @property
    def matchness(self) -> float:
        """Share of positions whose argmax is the generated token (SWIFT Eq. 4)."""
        return sum(rank == 0 for rank in self.ranks) / len(self.ranks)


def score_window(context: Context, layer_sets: Sequence[LayerSet], window: int) -> PassGenerator[list[WindowScore]]:
    """Predict the latest `window` generated tokens with every layer set, all in one pass.

    Each candidate reads the target's keys and values up to the window and its own behind that, in scratch slots; the
    tokens of the window are the input, so one pass predicts all positions (SWIFT Eq. 3).

    Args: window: at most the number of generated tokens; the buffer must have window * len(layer_sets) slots left.
    """
    token_ids = context.token_ids
    first = len(token_ids) - window - 1  # position of the token from which the window's first one is predicted
    inputs = token_ids[first:-1]
    n, scratch = len(layer_sets), context.root_slot
    visible = torch.zeros((n * window, scratch + n * window), dtype=torch.bool)
    visible[:, :first] = True
    causal = torch.ones((window, window), dtype=torch.bool).tril()
    for i in range(n):
        visible[i * window : (i + 1) * window, scratch + i * window : scratch + (i + 1) * window] = causal
    positions = list(range(first, first + window)) * n
    rows = Rows(list(inputs) * n, scratch, positions, visible, tuple(layer_sets))
    logits = yield Pass(context.runtime, rows, context.buffer)  # (n * window, vocab)
    ranks, confidences = _read(context, logits, first, window)
    return [
        WindowScore(tuple(ranks[i * window : (i + 1) * window]), tuple(confidences[i * window : (i + 1) * window]))
        for i in range(n)
    ]


def _read(context: Context, logits: Tensor, first: int, window: int) -> tuple[list[int], list[float]]:
    """Rank of the generated token and top-1 probability for each row."""
    rule = context.rule
    if rule.processors:
        contexts = [context.token_ids[: first + 1 + row % window] for row in range(logits.shape[0])]
        scores = torch.stack([rule.scores(ids, row) for ids, row in zip(contexts, logits, strict=True)])
    else:
        scores = logits.float()
    wanted = torch.tensor(context.token_ids[first + 1 :], device=scores.device).repeat(scores.shape[0] // window)
    at_wanted = scores.gather(1, wanted[:, None])
    top, argmax = scores.max(dim=-1)
    ranks = (scores > at_wanted).sum(dim=-1)
    ranks += (ranks == 0) & (argmax != wanted)  # of equal scores, frequent in 16 bits, the draft takes one
    confidences = (top - scores.logsumexp(dim=-1)).exp()
    return ranks.tolist(), confidences.tolist()
