"""A stream that changes its kind: noticed from acceptance, and met with the sets of whatever it resembles now."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from ..core.completions import layer_set_from_json, layer_set_to_json
from ..core.known_sets import KnownSet, State, nearest, packed, single, unit, unpacked
from ..core.types import Completion, LayerSet

N_LEARN = 3  # completions that say what acceptance is usual
ALARM = 4.0  # height of a sum, in standard deviations, that means a shift
SLACK = 0.5  # deviations per completion that are no news
LARGEST = 4.0  # deviations that one completion counts at most: one odd text is no shift
USUAL_SPREAD, USUAL_WEIGHT = 0.06, 4  # how much acceptance varies from text to text, before the texts have said so
N_STORED = 3  # known sets that are tried after a shift


@dataclass(slots=True)
class AcceptanceChart:
    """A self-starting two-sided CUSUM chart of the completions' acceptance rates.

    Each is compared with the mean and the spread of those before it, and counted into them afterwards, an outlying one
    with two spreads: the first texts of another kind would otherwise hide the rest. Undisturbed, some 300 texts
    pass between two false alarms; a change of two spreads is noticed by the eighth text, one of four by the second.

    Source: E. S. Page, "Continuous inspection schemes", 1954; D. M. Hawkins, "Self-starting CUSUM charts", 1987.
    """

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0  # of deviations from the mean, summed
    rise: float = 0.0
    fall: float = 0.0

    @property
    def spread(self) -> float:
        """Standard deviation from text to text."""
        usual = USUAL_WEIGHT * USUAL_SPREAD**2
        return sqrt((usual + self.squares) / (USUAL_WEIGHT + max(0, self.n - 1)))

    def add(self, accepted: int, drafted: int) -> bool:
        """Take in a completion; whether its kind of text is another one by now."""
        rate = accepted / drafted
        if self.n >= N_LEARN:
            noise = self.mean * (1 - self.mean) / drafted  # a short text's rate says little
            z = (rate - self.mean) / sqrt((self.spread**2 + noise) * (1 + 1 / self.n))
            z = max(-LARGEST, min(LARGEST, z))
            self.rise, self.fall = max(0.0, self.rise + z - SLACK), max(0.0, self.fall - z - SLACK)
            reach = 2 * self.spread
            rate = max(self.mean - reach, min(self.mean + reach, rate))
        before = rate - self.mean
        self.n += 1
        self.mean += before / self.n
        self.squares += before * (rate - self.mean)
        return max(self.rise, self.fall) > ALARM


@dataclass(slots=True)
class ShiftWatch:
    """One task's stream: the chart of its acceptance since the search ended, and the sets of its earlier kinds of text.

    `known` are sets from elsewhere, such as the store's. A set's state is the mean of its prompts' states.
    """

    known: Sequence[KnownSet] = ()
    chart: AcceptanceChart = field(default_factory=AcceptanceChart)
    left: list[KnownSet] = field(default_factory=list)  # of this stream, before the latest shift
    latest: State = ()  # of the prompt that was read last
    settled: bool = False  # whether the search had ended by then
    total: State = ()  # of the prompts since the latest shift

    @property
    def state(self) -> State | None:
        """Where the prompts since the latest shift lie; None before the first."""
        return single(unit(self.total)) if self.total else None

    def saw(self, state: Sequence[float], settled: bool) -> None:
        """A prompt was read: its mean hidden state, and whether all of its completion will be drafted with one set."""
        self.settled = settled
        self.latest = single(unit(state))
        before = self.total or (0.0,) * len(self.latest)
        self.total = single([a + b for a, b in zip(before, self.latest, strict=True)])

    def add(self, completion: Completion) -> str:
        """Take in the completion of the prompt read last; in words what has changed, or ""."""
        before = self.chart.mean
        if not self.settled or not completion.drafted or not self.chart.add(completion.accepted, completion.drafted):
            return ""
        word = "fell" if self.chart.fall > self.chart.rise else "rose"
        rate = completion.accepted / completion.drafted
        return f"acceptance {word} from {before:.2f} to {rate:.2f}"

    def moved(self, layer_set: LayerSet) -> list[LayerSet]:
        """Remember the set in use for the text that is over; the known sets nearest to the latest prompt."""
        before = self.state
        found = nearest([*self.left, *self.known], self.latest, N_STORED)
        if before is not None:
            self.left = [*(own for own in self.left if own.layer_set != layer_set), KnownSet(layer_set, before)]
        self.chart, self.total, self.settled = AcceptanceChart(), self.latest, False
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a snapshot; `known` is not among them."""
        chart = {name: getattr(self.chart, name) for name in AcceptanceChart.__slots__}
        left = [[layer_set_to_json(own.layer_set), _text(own.state)] for own in self.left]
        states = {"latest": _text(self.latest), "total": _text(self.total)}
        return {"chart": chart, "left": left, "settled": self.settled, **states}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Go on from `to_json`."""
        self.chart = AcceptanceChart(**values["chart"])
        self.left = [KnownSet(layer_set_from_json(own), _state(state)) for own, state in values["left"]]
        self.settled = bool(values["settled"])
        self.latest, self.total = _state(values["latest"]), _state(values["total"])


def _text(state: State) -> str:
    return b64encode(packed(state)).decode()


def _state(text: str) -> State:
    return unpacked(b64decode(text))
