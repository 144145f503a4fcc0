"""Adam with a cosine rate over shuffled rows, which can be cut after any step and resumes with the same result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .features import Collected
from .settings import OnStep, TrainingSettings, TrainingStep

MAX_POINTS = 200  # of a curve

# (weights, rows int64) -> mean loss of the rows and its gradient, shaped as the weights
Gradient = Callable[[Tensor, Tensor], tuple[float, Tensor]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long, and at what rate. With `seconds`, the clock decides where the cosine stands once it is ahead."""

    epochs: int
    batch: int
    learning_rate: float
    warm_up: float
    seed: int
    seconds: float | None = None

    @classmethod
    def of(cls, settings: TrainingSettings, seconds: float | None) -> Schedule:
        """Return the schedule of the settings; `seconds` shortens it further."""
        limits = [s for s in (seconds, settings.minutes and 60 * settings.minutes) if s is not None]
        return cls(
            settings.epochs,
            settings.batch,
            settings.learning_rate,
            settings.warm_up,
            settings.seed,
            min(limits, default=None),
        )

    def rate(self, progress: float) -> float:
        """Return the learning rate at that share of the training, from 0 to 1."""
        if progress < self.warm_up:
            return self.learning_rate * progress / self.warm_up
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def rows(self, step: int, n_rows: int) -> Tensor:
        """Return the rows of a step: every epoch sees each once, in an order of its own."""
        per_epoch = math.ceil(n_rows / self.batch)
        epoch, number = divmod(step, per_epoch)
        order = torch.randperm(n_rows, generator=torch.Generator().manual_seed((self.seed << 20) + epoch))
        return order[number * self.batch : (number + 1) * self.batch]


class Descent:
    """Minimises a loss by its gradient; `weights` are changed in place."""

    def __init__(self, weights: Tensor, schedule: Schedule, kept: Checkpoint | None = None) -> None:
        self.weights, self.schedule, self.kept = weights, schedule, kept
        self._adam = torch.optim.Adam([weights])
        self.step = 0
        self.spent_s = 0.0
        self.losses: list[float] = []

    def run(self, n_rows: int, gradient: Gradient, on_step: OnStep) -> None:
        """Take all steps that are left."""
        total = self.schedule.epochs * math.ceil(n_rows / self.schedule.batch)
        self._resume(total, on_step)
        started, before_s = time.monotonic(), self.spent_s
        while (progress := self._progress(total)) < 1:
            loss, self.weights.grad = gradient(self.weights, self.schedule.rows(self.step, n_rows))
            # Set here and not by a scheduler of torch: it goes by the clock, too.
            self._adam.param_groups[0]["lr"] = self.schedule.rate(max(progress, 1 / total))
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
        clock = 0.0 if self.schedule.seconds is None else self.spent_s / self.schedule.seconds
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
