"""The set that drafts now, and what is left of one when fewer sub-layers are to be skipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.completions import layer_set_from_json, layer_set_to_json
from ..core.types import LayerSet, n_skipped_for
from ..decoding.loop import Round


@dataclass(slots=True)
class Incumbent:
    """The set in use with the mean of its scores over all windows it was scored on, and its latest rounds.

    `rounds` are pairs of draft steps and those accepted.
    """

    layer_set: LayerSet
    n: int = 0
    score: float = 0.0
    matchness: float = 0.0
    rounds: list[tuple[int, int]] = field(default_factory=list)

    def add(self, score: float, matchness: float) -> None:
        """Take in the scores of one more window."""
        self.n += 1
        self.score += (score - self.score) / self.n
        self.matchness += (matchness - self.matchness) / self.n

    def acceptance_after(self, round_: Round, n_rounds: int) -> float | None:
        """α over the latest `n_rounds`, with the one just made; None where there are fewer, or nothing was drafted."""
        self.rounds = [*self.rounds, (round_.n_steps, round_.n_accepted)][-n_rounds:]
        drafted = sum(steps for steps, _ in self.rounds)
        if len(self.rounds) < n_rounds or not drafted:
            return None
        return sum(accepted for _, accepted in self.rounds) / drafted

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a snapshot."""
        return {
            "layer_set": layer_set_to_json(self.layer_set),
            "n": self.n,
            "score": self.score,
            "matchness": self.matchness,
            "rounds": [list(round_) for round_ in self.rounds],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Incumbent:
        """Inverse of `to_json`."""
        rounds = [(n_steps, n_accepted) for n_steps, n_accepted in values["rounds"]]
        return cls(layer_set_from_json(values["layer_set"]), values["n"], values["score"], values["matchness"], rounds)


def lowered_ratio(n_layers: int, skip_ratio: float, n_skipped: int, step: float) -> float:
    """`skip_ratio` less `step`, or less as many as give a sub-layer back: on a small model one may give nothing."""
    lowered = skip_ratio - step
    while 0 < n_skipped <= n_skipped_for(n_layers, lowered):
        lowered -= step
    return lowered


def trimmed(layer_set: LayerSet, n_skipped: int) -> LayerSet:
    """`layer_set` with `n_skipped` of its sub-layers still skipped, the ones given back spread over the depth."""
    skipped = sorted(
        [("attn", i) for i in layer_set.skip_attn] + [("mlp", i) for i in layer_set.skip_mlp], key=lambda sub: sub[::-1]
    )
    if n_skipped >= len(skipped):
        return layer_set
    kept = [skipped[(j * len(skipped)) // n_skipped] for j in range(n_skipped)] if n_skipped else []
    left = LayerSet.of(layer_set.n_layers, kept)  # type: ignore[arg-type]
    return replace(layer_set, skip_attn=left.skip_attn, skip_mlp=left.skip_mlp)
