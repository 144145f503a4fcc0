"""Light heads at intermediate layers, trained to say what the last layer says (AdaDecode 2.1)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..core.types import Prompt
from ..models.learned import Heads
from ..models.runtime import Runtime
from .checkpoint import Checkpoint
from .descent import Descent, Schedule
from .divergence import kl_to_gradient
from .features import Collected, Features, collect, greedy_session
from .measure import head_figures
from .settings import HeadSettings
from .trained import OnStep, Trained, TrainingStep, ignore


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
    figures = {**_run_figures(data, descent), **head_figures(runtime, heads, data.held_out)}
    return Trained(heads, depths, figures, descent.curve())


def _run_figures(data: Collected, descent: Descent) -> dict[str, float]:
    last = [loss for _, loss in descent.curve()[-5:]]
    return {
        "prompts": data.n_prompts,
        "positions": data.train.n_rows,
        "held_out_positions": data.held_out.n_rows,
        "steps": descent.step,
        "loss": sum(last) / len(last),
        "collect_s": round(data.seconds, 1),
        "train_s": round(descent.spent_s, 1),
    }


class HeadLessons:
    """The training's loss and gradient; weights are (heads, hidden_size, hidden_size), or (heads, vocab, hidden_size)
    of whole heads, in float32 at least, and are rounded to the model's dtype for every step."""

    def __init__(self, runtime: Runtime, data: Features, depths: Sequence[int], full: bool) -> None:
        self.runtime, self.depths, self.full = runtime, tuple(depths), full
        self._final = data.final
        self._normed = torch.stack([runtime.normed(data.hidden[d].to(runtime.device)).cpu() for d in depths])
        self._vocabulary = cast(Tensor, cast(Any, runtime.hf_model).get_output_embeddings().weight).detach()
        self._softcap = None if full else getattr(runtime.config, "final_logit_softcapping", None)

    def start(self) -> Tensor:
        """Weights with which every head is the model's own."""
        wide = torch.float64 if self.runtime.dtype == torch.float64 else torch.float32
        width = self._vocabulary.shape[1]
        one = self._vocabulary if self.full else torch.eye(width, device=self.runtime.device)
        return one.to(self.runtime.device, wide).repeat(len(self.depths), 1, 1)

    def heads(self, weights: Tensor) -> Heads:
        """Heads with those weights, in the model's dtype."""
        rounded = weights.to(self.runtime.dtype)
        return Heads({depth: rounded[i].clone() for i, depth in enumerate(self.depths)}, self.full)

    def gradient(self, weights: Tensor, rows: Tensor) -> tuple[float, Tensor]:
        """Mean KL(last layer || head) of these positions and heads, and each head's own gradient.

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
