"""What heads and probes are taught: the loss and its gradient on collected states, and the figures of held-out ones.

Heads learn to say what the last layer says (AdaDecode 2.1); a probe predicts whether the token read at its layer is
accepted (AdaSPEED II.B).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from ..models.early_exit import Heads, Probe
from ..models.runtime import Runtime
from .features import Features
from .settings import HeadSettings, ProbeSettings

CHUNK_VALUES = 1 << 19  # logits taken at once on a CPU: small enough for its caches, which is what sets the speed
CHUNK_ROWS = 64  # positions whose logits are held at once
THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


def lessons_of(runtime: Runtime, settings: HeadSettings | ProbeSettings, data: Features) -> HeadLessons | ProbeLessons:
    """Return what is to be learned from states, which are those at the settings' depths."""
    depths = settings.depths(runtime.n_layers)
    if isinstance(settings, HeadSettings):
        return HeadLessons(runtime, data, depths, settings.full)
    return ProbeLessons(data, depths[0], partial(acceptances, runtime, depth=depths[0], settings=settings))


class HeadLessons:
    """The loss of heads and its gradient; weights are (heads, hidden_size, hidden_size), or (heads, vocab, hidden_size)
    of whole heads, in float32 at least, and are rounded to the model's dtype for every step."""

    LAST_POINTS: ClassVar = 5  # of the curve, whose mean is the loss that is reported

    def __init__(self, runtime: Runtime, data: Features, depths: Sequence[int], full: bool) -> None:
        self.runtime, self.depths, self.full = runtime, tuple(depths), full
        self._final = data.final
        self._normed = torch.stack([runtime.normed(data.hidden[d].to(runtime.device)).cpu() for d in depths])
        self._vocabulary = cast(Tensor, cast(Any, runtime.hf_model).get_output_embeddings().weight).detach()
        self._softcap = None if full else getattr(runtime.config, "final_logit_softcapping", None)

    def start(self) -> Tensor:
        """Return weights with which every head is the model's own."""
        wide = torch.float64 if self.runtime.dtype == torch.float64 else torch.float32
        width = self._vocabulary.shape[1]
        one = self._vocabulary if self.full else torch.eye(width, device=self.runtime.device)
        return one.to(self.runtime.device, wide).repeat(len(self.depths), 1, 1)

    def model(self, weights: Tensor) -> Heads:
        """Return heads with those weights, in the model's dtype."""
        rounded = weights.to(self.runtime.dtype)
        return Heads({depth: rounded[i].clone() for i, depth in enumerate(self.depths)}, self.full)

    def gradient(self, weights: Tensor, rows: Tensor) -> tuple[float, Tensor]:
        """Return the mean KL(last layer || head) of these positions and heads, and each head's own gradient.

        No autograd through the vocabulary: with head_probs - target_probs at the logits, two products remain.
        """
        device, rounded = self.runtime.device, weights.to(self.runtime.dtype)
        target = self.runtime.head(self._final[rows].to(device))  # (rows, vocab)
        normed = self._normed[:, rows].to(device)  # (heads, rows, hidden)
        moved = normed @ rounded.transpose(1, 2)  # (heads, rows, hidden), or logits (heads, rows, vocab)
        logits = moved if self.full else self.runtime.head(moved.flatten(0, 1)).view(len(self.depths), *target.shape)
        kl = kl_to_gradient(target, logits, self._softcap)
        slope = logits if self.full else (logits.flatten(0, 1) @ self._vocabulary.to(device)).view_as(normed)
        wide = weights.dtype
        gradient = slope.to(wide).transpose(1, 2) @ normed.to(wide) / len(rows)
        return float(kl.mean()) / len(rows), gradient

    def figures(self, weights: Tensor, data: Features) -> dict[str, float]:
        """Measure heads with those weights on held-out positions."""
        return head_figures(self.runtime, self.model(weights), data)


def kl_to_gradient(target: Tensor, heads: Tensor, softcap: float | None = None) -> Tensor:
    """Replace every head's logits by the gradient of its rows' KL(target || head) by them, in place.

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


def head_figures(runtime: Runtime, heads: Heads, data: Features) -> dict[str, float]:
    """Measure heads on held-out positions.

    Returns: per head `agreement@DEPTH` with the last layer's argmax, the same of the model's own head read there
             (`identity@DEPTH`), and `kl@DEPTH`; per threshold γ `early@γ`, the share of positions where a head's
             highest probability reaches it, and `rejected@γ`, the share of those where the shallowest such head is
             wrong.
    """
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
    """Return the share of positions predicted early, and that of wrong ones among them.

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


def acceptances(runtime: Runtime, data: Features, depth: int, settings: ProbeSettings) -> Tensor:
    """Tell whether the token that the exit at `depth` gives is accepted by the last layer; bool (n,).

    "greedy": both argmaxes are the same. "top-p": the token is drawn from the exit's distribution and accepted with
    min(1, target_probs / draft_probs), both cut to the same top-p.
    """
    random = torch.Generator().manual_seed(settings.seed)
    found = []
    for start in range(0, data.n_rows, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        draft = runtime.logits(data.hidden[depth][rows].to(runtime.device))
        target = runtime.head(data.final[rows].to(runtime.device))
        if settings.sampling == "greedy":
            found.append((draft.argmax(-1) == target.argmax(-1)).cpu())
            continue
        draft_probs, target_probs = _top_p(draft, settings.top_p), _top_p(target, settings.top_p)
        token_ids = torch.multinomial(draft_probs, 1, generator=random)
        odds = target_probs.gather(1, token_ids) / draft_probs.gather(1, token_ids)
        found.append((torch.rand(odds.shape, generator=random) < odds)[:, 0])
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)


def _top_p(logits: Tensor, top_p: float) -> Tensor:
    kept = TopPLogitsWarper(top_p)(cast(Any, None), cast(Any, logits.float()))
    return torch.softmax(kept, dim=-1).cpu()


class ProbeLessons:
    """The binary cross-entropy of a linear probe on standardised states; weights are (hidden_size + 1,), bias last.

    Args: accept: tells of positions whether the token read at `depth` is accepted; bool (n,).
    """

    LAST_POINTS: ClassVar = 1

    def __init__(self, data: Features, depth: int, accept: Callable[[Features], Tensor]) -> None:
        self.depth, self._accept = depth, accept
        states = data.hidden[depth].float()
        self._mean, self._scale = states.mean(0), states.std(0).clamp_min(1e-6)
        self._states = (states - self._mean) / self._scale
        self._accepted = accept(data).float()

    def start(self) -> Tensor:
        """Return the weights of an untrained probe."""
        return torch.zeros(self._states.shape[1] + 1)

    def model(self, weights: Tensor) -> Probe:
        """Return the probe of raw states: mean and scale folded into it."""
        direction = weights[:-1] / self._scale
        return Probe(self.depth, direction, float(weights[-1] - direction @ self._mean))

    def gradient(self, weights: Tensor, rows: Tensor) -> tuple[float, Tensor]:
        """Return the mean loss of the rows, and its gradient: (probability - label) times the state."""
        states, wanted = self._states[rows], self._accepted[rows]
        scores = states @ weights[:-1] + weights[-1]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, wanted)
        off = (torch.sigmoid(scores) - wanted) / len(rows)
        return float(loss), torch.cat((off @ states, off.sum()[None]))

    def figures(self, weights: Tensor, data: Features) -> dict[str, float]:
        """Measure the probe with those weights on held-out positions."""
        probe = self.model(weights)
        return probe_figures(data.hidden[self.depth].float() @ probe.direction + probe.bias, self._accept(data))


def probe_figures(scores: Tensor, accepted: Tensor) -> dict[str, float]:
    """Measure a probe: `accuracy` at one half, `base_rate` of acceptance, and `auc` where both outcomes occur.

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
