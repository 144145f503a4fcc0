"""KL(target || head) over the vocabulary, and its gradient in closed form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK_VALUES = 1 << 19  # logits taken at once on a CPU: small enough for its caches, which is what sets the speed


def kl_to_gradient(target: Tensor, heads: Tensor, softcap: float | None = None) -> Tensor:
    """Turn every head's logits into the gradient of its rows' KL(target || head) by its logits, in place.

    It is head_probs - target_probs; where the logits were capped, by the logits before the cap. Probabilities are
    taken in float32 (float64 of float64), whatever the logits' dtype, and the target's only once for all heads.

    Args:    target: logits (rows, vocab); heads: logits (heads, rows, vocab).
    Returns: KL in nats, summed over the rows, float64 (heads,).
    """
    wide = torch.float64 if target.dtype == torch.float64 else torch.float32
    total = torch.zeros(heads.shape[0], dtype=torch.float64, device=target.device)
    for rows in _chunks(target):
        target_logprobs = torch.log_softmax(target[rows], dim=-1, dtype=wide)
        target_probs = target_logprobs.exp()
        own = (target_probs * target_logprobs).sum(dtype=torch.float64)
        for number in range(heads.shape[0]):
            logits = heads[number, rows]
            logprobs = torch.log_softmax(logits, dim=-1, dtype=wide)
            total[number] += own - (target_probs * logprobs).sum(dtype=torch.float64)
            slope = logprobs.exp_().sub_(target_probs)
            if softcap is not None:
                slope.mul_(1 - (logits.to(wide) / softcap) ** 2)
            logits.copy_(slope)
    return total


def _chunks(logits: Tensor) -> Sequence[slice]:
    n_rows, width = logits.shape
    size = max(1, CHUNK_VALUES // width) if logits.device.type == "cpu" else max(1, n_rows)
    return [slice(start, start + size) for start in range(0, n_rows, size)]
