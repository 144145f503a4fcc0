"""Settings, progress reports and results of training; this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...core.errors import SettingsError
from ...core.records import LearnedKind
from ...core.serialization import LARGEST, Settings, count, ranged, share

ProbeSampling = Literal["greedy", "top-p"]


@dataclass(frozen=True, slots=True)
class TrainingSettings(Settings):
    """Settings of heads and probes alike. `minutes` ends training early, with the cosine at its end.

    Raises: SettingsError: a value is out of its range.
    """

    epochs: int = count(5)
    minutes: float | None = ranged(None, gt=0)
    learning_rate: float = ranged(1e-3, gt=0, le=1)
    batch: int = count(128)  # Token positions per optimizer step.
    warm_up: float = share(0.03)  # Share of all steps over which the learning rate rises to its maximum.
    max_new_tokens: int = count(128, least=2)
    seed: int = ranged(0, ge=-LARGEST, le=LARGEST)


@dataclass(frozen=True, slots=True)
class HeadSettings(TrainingSettings):
    """Adam, batch, cosine and warm-up are those of AdaDecode, appendix D.

    DEVIATION: 5 epochs instead of the paper's 100 (ParaDecode: 50), so that a small model is trained in minutes on two
    cores; the batch counts positions, not texts; and the rate is a fifth of the paper's 5e-3, which makes the heads of
    SmolLM2-135M overconfident: at threshold 0.75, layers 18, 22 and 26, 26 % of the early tokens of 8
    held-out prompts were wrong with it, and 9 % with this one. The heads sit deeper than the paper's quarters (8, 16,
    24 of 32), with which 15 % were wrong and fewer tokens early: a small model decides late.
    """

    KIND: ClassVar[LearnedKind] = "heads"

    layers: tuple[int, ...] | None = None  # Number of layers below each head; None: derived from `shares`.
    # Head positions as shares of the model's depth, used if `layers` is None: 18, 22 and 26 of 30 layers.
    shares: tuple[float, ...] = (0.6, 0.73, 0.87)
    full: bool = False  # True: train whole heads instead of a transform in front of the model's own head (Table 3).

    def depths(self, n_layers: int) -> tuple[int, ...]:
        """Return the depths of the heads in a model of so many layers, shallowest first.

        Raises: SettingsError: a layer is not inside the model, or named twice.
        """
        default = {min(n_layers - 1, max(1, round(n_layers * share))) for share in self.shares}
        return checked_depths(self.layers or tuple(default), n_layers)


@dataclass(frozen=True, slots=True)
class ProbeSettings(TrainingSettings):
    """`sampling` says how the early token is chosen, and what "accepted" means; ours, the paper gives no rate."""

    KIND: ClassVar[LearnedKind] = "probe"

    epochs: int = count(20)
    layer: int | None = None  # Number of layers below the probe; None: a quarter of the model's layers.
    sampling: ProbeSampling = "greedy"
    top_p: float = ranged(0.9, gt=0, le=1)  # Nucleus size if `sampling` is "top-p" (AdaSPEED III).

    def depths(self, n_layers: int) -> tuple[int, ...]:
        """Return the one depth of the probe in a model of so many layers.

        Raises: SettingsError: the layer is not inside the model.
        """
        return checked_depths((max(1, round(n_layers / 4)) if self.layer is None else self.layer,), n_layers)


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
    """Progress of training: `done` of `total` prompts or steps; `note` is a remark, for example on resuming."""

    phase: Literal["collect", "train", "measure"]
    done: int = 0
    total: int = 0
    loss: float | None = None
    note: str = ""


OnStep = Callable[[TrainingStep], None]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """Trained weights, figures measured on held-out prompts, and the loss curve (at most 200 points)."""

    # `Heads` or `Probe` of papers/early_exit.py; not imported, to keep torch out of this module.
    model: Any
    figures: Mapping[str, float]
    curve: tuple[tuple[int, float], ...]


def ignore(step: TrainingStep) -> None:
    """Ignore a progress report."""
