"""Settings, progress reports and results of training; this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...core.errors import SettingsError
from ...core.records import LearnedKind
from ...core.serialization import LARGEST, Settings, count, ranged, share

ProbeSampling = Literal["greedy", "top-p"]

MIXED_TASK = "mixed"  # Task name under which heads trained on several streams are stored.


@dataclass(frozen=True, slots=True)
class TrainingSettings(Settings):
    """Settings that heads and probes share. With `minutes`, the learning rate reaches its end within that time.

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
    """Settings of heads: Adam, batch size, cosine schedule and warm-up of AdaDecode, appendix D.

    DEVIATION: 5 epochs instead of the paper's 100 (ParaDecode: 50) train a small model in minutes on two cores. The
    batch counts positions, not texts. The learning rate is a fifth of the paper's 5e-3, which makes the heads of
    SmolLM2-135M overconfident: with 5e-3, 26 % of the early tokens of 8 held-out prompts were wrong, with 1e-3 9 %
    (threshold 0.75; layers 18, 22 and 26). The heads are deeper than the paper's quarters (8, 16 and 24 of 32), with
    which 15 % were wrong and fewer tokens were early: intermediate layers of a small model predict its output less
    well.
    """

    KIND: ClassVar[LearnedKind] = "heads"

    layers: tuple[int, ...] | None = None  # Number of layers below each head; None: derived from `shares`.
    # Head positions as shares of the model's depth, used if `layers` is None: 18, 22 and 26 of 30 layers.
    shares: tuple[float, ...] = (0.6, 0.73, 0.87)
    # True: train full heads (vocab, hidden_size) instead of transforms in front of the model's head (Table 3).
    full: bool = False

    def depths(self, n_layers: int) -> tuple[int, ...]:
        """Return the depths of the heads in a model of `n_layers` layers, shallowest first.

        Raises: SettingsError: a layer is not inside the model, or is given twice.
        """
        default_depths = {min(n_layers - 1, max(1, round(n_layers * share))) for share in self.shares}
        return checked_depths(self.layers or tuple(default_depths), n_layers)


@dataclass(frozen=True, slots=True)
class ProbeSettings(TrainingSettings):
    """Settings of a probe; `sampling` says how the exit chooses its token and when that token counts as accepted.

    AdaSPEED III trains for 500 batches of 4 texts and gives no learning rate and no p: epochs, rate and p are ours.
    """

    KIND: ClassVar[LearnedKind] = "probe"

    epochs: int = count(20)
    layer: int | None = None  # Number of layers below the probe; None: a quarter of the model's layers.
    sampling: ProbeSampling = "greedy"
    top_p: float = ranged(0.9, gt=0, le=1)  # p of the exit's and the target's distributions if `sampling` is "top-p".

    def depths(self, n_layers: int) -> tuple[int, ...]:
        """Return the depth of the probe in a model of `n_layers` layers.

        Raises: SettingsError: the layer is not inside the model.
        """
        return checked_depths((default_exit(n_layers) if self.layer is None else self.layer,), n_layers)


def default_exit(n_layers: int) -> int:
    """Return the default exit layer: a quarter of the layers, as in LayerSkip's examples (8 of 32)."""
    return max(1, round(n_layers / 4))


def checked_depths(depths: tuple[int, ...], n_layers: int) -> tuple[int, ...]:
    """Return the depths, sorted.

    Raises: SettingsError: a depth is not inside the model, or is given twice.
    """
    for depth in depths:
        if not 0 < depth < n_layers:
            raise SettingsError(f"layer {depth} is out of range: the model has {n_layers}, use 1 to {n_layers - 1}")
    if len(set(depths)) < len(depths):
        raise SettingsError(f"layers {', '.join(map(str, depths))} contain a layer twice: give each layer once")
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

    model: Any  # `Heads` or `Probe` of papers/early_exit.py, which imports torch.
    figures: Mapping[str, float]
    curve: tuple[tuple[int, float], ...]


def ignore(step: TrainingStep) -> None:
    """Ignore a progress report."""
