"""What held-out positions say of heads and probes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.learned import Heads
from ..models.runtime import Runtime
from .divergence import kl_to_gradient
from .features import Features

THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
CHUNK_ROWS = 64


def head_figures(runtime: Runtime, heads: Heads, data: Features) -> dict[str, float]:
    """Per head: `agreement@DEPTH` with the last layer's argmax, the same of the model's own head read there
    (`identity@DEPTH`), and `kl@DEPTH`; per threshold γ: `early@γ`, the share of positions where a head's highest
    probability reaches it, and `rejected@γ`, the share of those where the shallowest such head is wrong."""
    right = {depth: torch.zeros(data.n_rows, dtype=torch.bool) for depth in heads.depths}
    sure = {depth: torch.zeros(data.n_rows) for depth in heads.depths}
    same = dict.fromkeys(heads.depths, 0)
    kl = dict.fromkeys(heads.depths, 0.0)
    for start in range(0, data.n_rows, CHUNK_ROWS):
        rows = slice(start, min(start + CHUNK_ROWS, data.n_rows))
        target = runtime.head(data.final[rows].to(runtime.device))
        for depth in heads.depths:
            hidden = data.hidden[depth][rows].to(runtime.device)
            logits = heads.logits(runtime, depth, hidden)
            probs, token_ids = torch.softmax(logits, dim=-1, dtype=torch.float32).max(-1)
            right[depth][rows] = (token_ids == target.argmax(-1)).cpu()
            sure[depth][rows] = probs.cpu()
            same[depth] += int((runtime.logits(hidden).argmax(-1) == target.argmax(-1)).sum())
            kl[depth] += float(kl_to_gradient(target, logits[None]))
    figures = {f"agreement@{depth}": float(right[depth].float().mean()) for depth in heads.depths}
    figures |= {f"identity@{depth}": same[depth] / data.n_rows for depth in heads.depths}
    figures |= {f"kl@{depth}": kl[depth] / data.n_rows for depth in heads.depths}
    for threshold in THRESHOLDS:
        early, wrong = early_exits([sure[d] for d in heads.depths], [right[d] for d in heads.depths], threshold)
        figures |= {f"early@{threshold}": early, f"rejected@{threshold}": wrong}
    return figures


def early_exits(sure: list[Tensor], right: list[Tensor], threshold: float) -> tuple[float, float]:
    """Shares of positions predicted early, and of wrong ones among them.

    Args: sure, right: per head, shallowest first, (n,): its highest probability, and whether it means the last
          layer's token.
    """
    open_ = torch.ones_like(right[0])
    wrong = torch.zeros_like(right[0])
    for probs, correct in zip(sure, right, strict=True):
        exits = open_ & (probs >= threshold)
        wrong |= exits & ~correct
        open_ &= ~exits
    n_early = int((~open_).sum())
    return n_early / len(open_), int(wrong.sum()) / max(1, n_early)


def probe_figures(scores: Tensor, accepted: Tensor) -> dict[str, float]:
    """`accuracy` at one half, `base_rate` of acceptance, and `auc` where both outcomes occur.

    Args: scores: logits (n,); accepted: bool (n,).
    """
    figures = {
        "accuracy": float(((scores > 0) == accepted).float().mean()),
        "base_rate": float(accepted.float().mean()),
    }
    n_yes = int(accepted.sum())
    n_no = len(accepted) - n_yes
    if n_yes and n_no:  # the chance that an accepted token scores above a rejected one, from the sum of ranks
        _, inverse, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
        ranks = (counts.cumsum(0) - (counts - 1) / 2)[inverse]
        figures["auc"] = (float(ranks[accepted].sum()) - n_yes * (n_yes + 1) / 2) / (n_yes * n_no)
    return figures
