"""Training of heads and probes: Adam with a cosine rate over shuffled rows, cut after any step and resumed alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.types import Prompt
from ..models.runtime import Runtime
from .features import Checkpoint, Collected, collect, greedy_session
from .lessons import lessons_of
from .settings import HeadSettings, OnStep, ProbeSettings, Trained, TrainingSettings, TrainingStep, ignore

MAX_POINTS = 200  # of a curve

# (weights, rows int64) -> mean loss of the rows and its gradient, shaped as the weights
Gradient = Callable[[Tensor, Tensor], tuple[float, Tensor]]


@torch.no_grad()
def train(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    settings: HeadSettings | ProbeSettings,
    on_step: OnStep = ignore,
    *,
    budget_s: float | None = None,
    kept: Checkpoint | None = None,
) -> Trained:
    """Train heads, all together, or a probe on the model's own greedy completions of the prompts.

    Args:   budget_s: seconds for all of it: at most half for the completions, the rest for training.
            kept: where to keep what is done; it is there still when this returns.
    Raises: SettingsError: a layer is out of range. InvalidInput: the stream or its completions are too short.
    """
    depths, started = settings.depths(runtime.n_layers), time.monotonic()
    session = greedy_session(runtime, settings.max_new_tokens)
    half_s = None if budget_s is None else budget_s / 2
    data = collect(session, prompts, depths, settings.seed, on_step, kept, half_s)
    lessons = lessons_of(runtime, settings, data.train)
    left_s = None if budget_s is None else max(1.0, budget_s - (time.monotonic() - started))
    descent = Descent(lessons.start(), settings, left_s, kept)
    descent.run(data.train.n_rows, lessons.gradient, on_step)
    on_step(TrainingStep("measure"))
    figures = {**descent.figures(data, lessons.LAST_POINTS), **lessons.figures(descent.weights, data.held_out)}
    return Trained(lessons.model(descent.weights), figures, descent.curve())


def learning_rate(settings: TrainingSettings, progress: float) -> float:
    """Return the learning rate at that share of the training, from 0 to 1."""
    if progress < settings.warm_up:
        return settings.learning_rate * progress / settings.warm_up
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def batch_of(settings: TrainingSettings, step: int, n_rows: int) -> Tensor:
    """Return the rows of a step: every epoch sees each once, in an order of its own."""
    per_epoch = math.ceil(n_rows / settings.batch)
    epoch, number = divmod(step, per_epoch)
    order = torch.randperm(n_rows, generator=torch.Generator().manual_seed((settings.seed << 20) + epoch))
    return order[number * settings.batch : (number + 1) * settings.batch]


class Descent:
    """Minimises a loss by its gradient; `weights` are changed in place.

    With `seconds`, or minutes in the settings, the clock decides where the cosine stands once it is ahead.
    """

    def __init__(
        self, weights: Tensor, settings: TrainingSettings, seconds: float | None = None, kept: Checkpoint | None = None
    ) -> None:
        self.weights, self.settings, self.kept = weights, settings, kept
        limits = [limit for limit in (seconds, settings.minutes and 60 * settings.minutes) if limit is not None]
        self.seconds = min(limits, default=None)
        self._adam = torch.optim.Adam([weights])
        self.step = 0
        self.spent_s = 0.0
        self.losses: list[float] = []

    def run(self, n_rows: int, gradient: Gradient, on_step: OnStep) -> None:
        """Take all steps that are left."""
        total = self.settings.epochs * math.ceil(n_rows / self.settings.batch)
        self._resume(total, on_step)
        started, before_s = time.monotonic(), self.spent_s
        while (progress := self._progress(total)) < 1:
            loss, self.weights.grad = gradient(self.weights, batch_of(self.settings, self.step, n_rows))
            # Set here and not by a scheduler of torch: it goes by the clock, too.
            self._adam.param_groups[0]["lr"] = learning_rate(self.settings, max(progress, 1 / total))
            self._adam.step()
            self.step += 1
            self.losses.append(loss)
            self.spent_s = before_s + time.monotonic() - started
            on_step(TrainingStep("train", self.step, total, loss))
            if self.kept is not None and self.kept.due():
                self._save(self.kept)
        if self.kept is not None:
            self._save(self.kept)

    def curve(self) -> tuple[tuple[int, float], ...]:
        """Return (step, mean loss up to it) at evenly spaced steps."""
        width = math.ceil(len(self.losses) / MAX_POINTS)
        parts = [self.losses[at : at + width] for at in range(0, len(self.losses), max(1, width))]
        return tuple((min((i + 1) * width, self.step), sum(part) / len(part)) for i, part in enumerate(parts))

    def figures(self, data: Collected, n_points: int) -> dict[str, float]:
        """Return the figures of collecting and training; `loss` is the mean of the curve's last points."""
        last = [loss for _, loss in self.curve()[-n_points:]]
        return {
            "prompts": data.n_prompts,
            "positions": data.train.n_rows,
            "held_out_positions": data.held_out.n_rows,
            "steps": self.step,
            "loss": sum(last) / len(last),
            "collect_s": round(data.seconds, 1),
            "train_s": round(self.spent_s, 1),
        }

    def _progress(self, total: int) -> float:
        clock = 0.0 if self.seconds is None else self.spent_s / self.seconds
        return max(self.step / total, clock)

    def _save(self, kept: Checkpoint) -> None:
        tensors = {"weights": self.weights, **self._adam.state[self.weights]}
        kept.save(tensors, {"step": self.step, "spent_s": self.spent_s, "losses": self.losses})

    def _resume(self, total: int, on_step: OnStep) -> None:
        state = None if self.kept is None else self.kept.state()
        if state is None:
            return
        tensors, values = state
        self.weights.copy_(tensors.pop("weights"))
        self._adam.load_state_dict({**self._adam.state_dict(), "state": {0: tensors}})
        self.step, self.spent_s, self.losses = values["step"], values["spent_s"], values["losses"]
        on_step(TrainingStep("train", self.step, total, note=f"resumed: step {self.step} of {total}"))
