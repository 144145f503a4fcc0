"""Where a search stands: the set in use, who challenges it, and since when nothing better came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.completions import layer_set_from_json, layer_set_to_json
from ..core.types import LayerSet, Trial
from .finals import Finals, Place
from .incumbent import Incumbent


@dataclass(slots=True)
class Standing:
    """The set in use and its challengers.

    `first` are sets to be scored before any that is proposed; `looked` is the window of the latest pass. `opened_at`
    and `n_at_gain` count the candidates that were scored when the search was opened, and when the set in use was
    first scored or adopted.
    """

    incumbent: Incumbent
    finals: Finals = field(default_factory=Finals)
    first: list[LayerSet] = field(default_factory=list)
    looked: Place | None = None
    opened_at: int = 0
    n_at_gain: int = 0

    def is_news(self, place: Place, window: int) -> bool:
        """Whether at least half of that window is text that the latest pass did not see."""
        return self.looked is None or place.is_new_after(self.looked, window)

    def take_first(self, n: int) -> list[LayerSet]:
        """At most `n` of the sets to be scored first; they are gone from there."""
        taken, self.first = self.first[:n], self.first[n:]
        return taken

    def admit(self, place: Place, trials: Sequence[Trial], ratings: Sequence[float] | None) -> None:
        """Let in who promises more than the set in use.

        Args: ratings: of the set in use and of the trials' sets, where there are any beside their scores.
        """
        bar, *own = ratings or (self.incumbent.score, *(trial.score for trial in trials))
        rated = dict(zip((trial.layer_set for trial in trials), own, strict=True))
        self.finals.enter(rated, place, bar)

    def judge(
        self, place: Place, held: Trial, finalists: Sequence[Trial], ratings: Sequence[float] | None
    ) -> Trial | None:
        """Score the set in use, and those beside it; the trial that decided for a winner, which then is in use.

        Args: ratings: of the set in use and of the finalists, by earlier trials, where the strategy has such.
        """
        if self.incumbent.n == 0:
            self.n_at_gain = held.step + 1
        self.incumbent.add(held.score, held.matchness)
        if not finalists:
            return None
        doubted = set[LayerSet]()
        if ratings is not None:
            bar, *own = ratings
            doubted = {trial.layer_set for trial, rating in zip(finalists, own, strict=True) if rating <= bar}
        won = self.finals.settle(place, {trial.layer_set: trial.score - held.score for trial in finalists}, doubted)
        if won is None:
            return None
        decided = next(trial for trial in finalists if trial.layer_set == won.layer_set)
        score = self.incumbent.score + won.lead  # its own windows were fewer, and maybe easier
        self.incumbent = Incumbent(won.layer_set)
        self.incumbent.add(score, decided.matchness)
        self.n_at_gain = decided.step + 1
        return replace(decided, adopted=True)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a snapshot."""
        return {
            "incumbent": self.incumbent.to_json(),
            "finals": self.finals.to_json(),
            "first": [layer_set_to_json(layer_set) for layer_set in self.first],
            "looked": None if self.looked is None else self.looked.to_json(),
            "opened_at": self.opened_at,
            "n_at_gain": self.n_at_gain,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Standing:
        """Inverse of `to_json`."""
        return cls(
            Incumbent.from_json(values["incumbent"]),
            Finals.from_json(values["finals"]),
            [layer_set_from_json(each) for each in values["first"]],
            None if values["looked"] is None else Place(*values["looked"]),
            values["opened_at"],
            values["n_at_gain"],
        )
