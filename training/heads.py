"""Light heads at intermediate layers, trained to say what the last layer says (AdaDecode 2.1)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..core.types import Prompt
from ..models.early_exit import Heads
from ..models.runtime import Runtime
from .checkpoint import Checkpoint, Features
from .descent import Descent, Schedule
from .features import collect, greedy_session
from .settings import HeadSettings, OnStep, Trained, TrainingStep, ignore

CHUNK_VALUES = 1 << 19  # logits taken at once on a CPU: small enough for its caches, which is what sets the speed
CHUNK_ROWS = 64  # held-out positions measured at once
THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


@torch.no_grad()
def train_heads(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    settings: HeadSettings | None = None,
    on_step: OnStep = ignore,
    *,
    budget_s: float | None = None,
    kept: Checkpoint | None = None,
) -> Trained[Heads]:
    """Train heads on the model's own greedy completions of the prompts, all heads together.

    Args:   budget_s: seconds for all of it: at most half for the completions, the rest for training.
            kept: where to keep what is done; it is there still when this returns.
    Raises: SettingsError: a layer is out of range. InvalidInput: the stream or its completions are too short.
    """
    settings = settings or HeadSettings()
    depths, started = settings.depths(runtime.n_layers), time.monotonic()
    session = greedy_session(runtime, settings.max_new_tokens)
    half_s = None if budget_s is None else budget_s / 2
    data = collect(session, prompts, depths, settings.seed, on_step, kept, half_s)
    lessons = HeadLessons(runtime, data.train, depths, settings.full)
    left_s = None if budget_s is None else max(1.0, budget_s - (time.monotonic() - started))
    descent = Descent(lessons.start(), Schedule.of(settings, left_s), kept)
    descent.run(data.train.n_rows, lessons.gradient, on_step)
    heads = lessons.heads(descent.weights)
    on_step(TrainingStep("measure"))
    figures = {**descent.figures(data, n_points=5), **head_figures(runtime, heads, data.held_out)}
    return Trained(heads, depths, figures, descent.curve())


class HeadLessons:
    """The loss of heads and its gradient; weights are (heads, hidden_size, hidden_size), or (heads, vocab, hidden_size)
    of whole heads, in float32 at least, and are rounded to the model's dtype for every step."""

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

    def heads(self, weights: Tensor) -> Heads:
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
