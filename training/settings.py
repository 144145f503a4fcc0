"""Settings of training, what it reports on the way, and what it returns. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from ..core.errors import SettingsError

DEFAULT_SHARES = (0.6, 0.73, 0.87)  # of the depth, where heads sit: 18, 22 and 26 of 30 layers
ProbeSampling = Literal["greedy", "top-p"]
Model = TypeVar("Model")


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Settings of heads and probes alike. `minutes` ends training early, the cosine reaching its end by then.

    Raises: SettingsError: a value is out of its range.
    """

    epochs: int = 5
    minutes: float | None = None
    learning_rate: float = 5e-3
    batch: int = 128  # positions
    warm_up: float = 0.03  # share of the steps
    max_new_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        at_least = {"epochs": 1, "batch": 1, "max_new_tokens": 2}
        for name, low in at_least.items():
            if getattr(self, name) < low:
                raise SettingsError(f"{name} {getattr(self, name)} is out of range: use {low} or more")
        if self.minutes is not None and not self.minutes > 0:
            raise SettingsError(f"minutes {self.minutes} is out of range: use a number above 0")
        if not 0 < self.learning_rate <= 1:
            raise SettingsError(f"learning_rate {self.learning_rate} is out of range: use a number from 0 to 1")

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for the store and for the checkpoint's name."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class HeadSettings(TrainingSettings):
    """Adam, batch, cosine and warm-up are those of AdaDecode, appendix D.

    DEVIATION: 5 epochs instead of the paper's 100 (ParaDecode: 50), so that a small model is trained in minutes on two
    cores; the batch counts positions, not texts; and the rate is a fifth of the paper's 5e-3, which makes the heads of
    SmolLM2-135M overconfident: at threshold 0.75, layers 18, 22 and 26, 26 % of the early tokens of 8
    held-out prompts were wrong with it, and 9 % with this one. The heads sit deeper than the paper's quarters (8, 16,
    24 of 32), with which 15 % were wrong and fewer tokens early: a small model decides late.
    """

    learning_rate: float = 1e-3
    layers: tuple[int, ...] | None = None  # layers run before each head; None: DEFAULT_SHARES
    full: bool = False  # whole heads instead of a transform before the model's own (Table 3)

    def depths(self, n_layers: int) -> tuple[int, ...]:
        """Return the depths of the heads in a model of so many layers, shallowest first.

        Raises: SettingsError: a layer is not inside the model, or named twice.
        """
        default = {min(n_layers - 1, max(1, round(n_layers * share))) for share in DEFAULT_SHARES}
        return checked_depths(self.layers or tuple(default), n_layers)


@dataclass(frozen=True, slots=True)
class ProbeSettings(TrainingSettings):
    """`sampling` says how the early token is chosen, and what "accepted" means; ours, the paper gives no rate."""

    epochs: int = 20
    learning_rate: float = 1e-3
    layer: int | None = None  # layers run; None: a quarter of the depth
    sampling: ProbeSampling = "greedy"
    top_p: float = 0.9  # for "top-p" (AdaSPEED III)

    def depth(self, n_layers: int) -> int:
        """Return the depth of the probe in a model of so many layers.

        Raises: SettingsError: the layer is not inside the model.
        """
        return checked_depths((max(1, round(n_layers / 4)) if self.layer is None else self.layer,), n_layers)[0]


def checked_depths(depths: tuple[int, ...], n_layers: int) -> tuple[int, ...]:
    """Return the depths, sorted.

    Raises: SettingsError: one is not inside the model, or named twice.
    """
    for depth in depths:
        if not 0 < depth < n_layers:
            raise SettingsError(f"layer {depth} is out of range: the model has {n_layers}, use 1 to {n_layers - 1}")
    if len(set(depths)) < len(depths):
        raise SettingsError(f"layers {', '.join(map(str, depths))} name one twice: name each once")
    return tuple(sorted(depths))


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """`done` of `total` prompts collected or steps trained; `note` is a remark to keep, such as on resumption."""

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
    """Report progress to nobody."""
