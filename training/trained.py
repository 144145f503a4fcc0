"""What training reports on the way, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Model = TypeVar("Model")


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """`done` of `total` prompts collected or steps trained; `note` is a remark that stays, such as a resumption."""

    phase: Literal["collect", "train", "measure"]
    done: int = 0
    total: int = 0
    loss: float | None = None
    note: str = ""


OnStep = Callable[[TrainingStep], None]


@dataclass(frozen=True, slots=True, eq=False)
class Trained(Generic[Model]):
    """A trained model with the figures of held-out prompts and the loss over the steps, at most 200 points."""

    model: Model
    depths: tuple[int, ...]
    figures: Mapping[str, float]
    curve: tuple[tuple[int, float], ...]


def ignore(step: TrainingStep) -> None:
    """For callers that want no news."""
