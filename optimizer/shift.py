"""Detection of distribution shift in a stream, from acceptance and from its prompts' hidden states.

After a shift, known sets of similar text are tried first.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import starmap
from math import sqrt
from operator import mul
from typing import Annotated, ClassVar, NamedTuple

from ..core.layer_sets import LayerSet
from ..core.records import KnownSet, State, nearest, pack_state, round_to_single, unit, unpack_state
from ..core.serialization import Form, Record
from ..core.types import NOT_WRITTEN, Completion

N_LEARN = 3  # Completions from which the usual acceptance rate is learnt.
ALARM = 4.0  # CUSUM height, in standard deviations, that signals a shift.
# N_LEARN and ALARM for served requests: there are many short ones, and their acceptance rates vary by 0.2.
SERVED_N_LEARN, SERVED_ALARM = 8, 8.0
FAR_ALARM_FACTOR = 0.375  # Factor on ALARM for prompts whose hidden states are far from the earlier ones.
FAR_SPREADS = 3.0  # A prompt is far if its cosine to the earlier ones is this many deviations below usual.
FAR_PROMPTS = 3  # Consecutive far prompts that signal a shift regardless of acceptance.
USUAL_COSINE_SPREAD = 0.02  # Assumed spread of the cosines until enough prompts were read.
SLACK = 0.5  # CUSUM slack: deviations per completion that count as noise.
MAX_DEVIATION = 4.0  # Maximum deviations that one completion adds, so that one outlier signals no shift.
# Prior spread of acceptance rates between texts, and its weight in completions.
USUAL_SPREAD, USUAL_WEIGHT = 0.1, 4
N_NEAREST_SETS = 3  # Known sets that are tried after a shift.


# A prompt's hidden state; base64 in JSON.
PackedState = Annotated[
    State, Form(lambda state: b64encode(pack_state(state)).decode(), str, lambda text: unpack_state(b64decode(text)))
]


@dataclass(slots=True)
class RunningStats:
    """Running mean and spread of values; with few values the spread is pulled towards a given prior."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0  # Sum of squared deviations from the mean.

    def spread(self, usual: float) -> float:
        """Return the standard deviation of the values, with `usual` as prior."""
        return sqrt((USUAL_WEIGHT * usual**2 + self.squares) / (USUAL_WEIGHT + max(0, self.n - 1)))

    def count(self, value: float) -> None:
        """Add a value."""
        deviation = value - self.mean
        self.n += 1
        self.mean += deviation / self.n
        self.squares += deviation * (value - self.mean)


@dataclass(slots=True)
class AcceptanceChart(RunningStats):
    """A self-starting two-sided CUSUM chart of the completions' acceptance rates.

    Each is compared with the mean and the spread of those before it, and then added to them, an outlier as two spreads:
    the first texts of another kind would otherwise hide the rest. About 600 texts whose rates vary by 0.06 pass between
    two false alarms; a fall from 0.8 to 0.55 is detected at the third or fourth. With the bounds for served requests
    about 300 texts of HumanEval pass, whose rates vary by 0.2 (with the other bounds 50), and a fall from 0.8 to 0.5 is
    detected at the sixth, 19 times of 20 by the seventeenth.

    Source: E. S. Page, "Continuous inspection schemes", 1954; D. M. Hawkins, "Self-starting CUSUM charts", 1987.
    """

    rise: float = 0.0
    fall: float = 0.0

    def add(self, accepted: int, drafted: int, alarm: float = ALARM, n_learn: int = N_LEARN) -> bool:
        """Add a completion; return True if a CUSUM exceeds `alarm`, which signals a shift."""
        acceptance_rate = accepted / drafted
        if self.n >= n_learn:
            spread = self.spread(USUAL_SPREAD)
            # Sampling variance of a completion's rate: large for short completions.
            sampling_variance = self.mean * (1 - self.mean) / drafted
            deviation = (acceptance_rate - self.mean) / sqrt((spread**2 + sampling_variance) * (1 + 1 / self.n))
            deviation = max(-MAX_DEVIATION, min(MAX_DEVIATION, deviation))
            self.rise, self.fall = max(0.0, self.rise + deviation - SLACK), max(0.0, self.fall - deviation - SLACK)
            max_outlier = 2 * spread
            acceptance_rate = max(self.mean - max_outlier, min(self.mean + max_outlier, acceptance_rate))
        self.count(acceptance_rate)
        return max(self.rise, self.fall) > alarm


class ReadPrompt(NamedTuple):
    """State when a prompt was read: the chart for its completion, and whether it is far from earlier prompts."""

    chart: AcceptanceChart | None  # None: the layer set may change during the completion.
    is_far: bool


@dataclass(slots=True)
class ShiftWatch(Record):
    """One task's stream: the chart of its acceptance since the search ended, and the sets of its earlier kinds of text.

    A lasting change of acceptance is a shift. Where the prompts' hidden states are far from those before, a smaller
    change is enough, and several such prompts in a row are a shift by themselves: a search in progress would mix the
    kinds, and a set that is still accepted may not be the fastest for the new one. `known` are sets from elsewhere,
    such as the store's; they and the chart's bounds are no part of the JSON object. A set's state is the mean of its
    prompts' states.
    """

    COMPLETE: ClassVar = True

    known: Sequence[KnownSet] = field(default=(), metadata=NOT_WRITTEN)
    alarm: float = field(default_factory=lambda: ALARM, metadata=NOT_WRITTEN)
    n_learn: int = field(default=N_LEARN, metadata=NOT_WRITTEN)
    chart: AcceptanceChart = field(default_factory=AcceptanceChart)
    # Sets used before earlier shifts of this stream, with their texts' states.
    left: list[tuple[LayerSet, PackedState]] = field(default_factory=list)
    latest: PackedState = ()  # State of the prompt read last.
    settled: bool = False  # Whether the search had ended when that prompt was read.
    # Cosines of the prompts to the mean of the earlier ones.
    nearness: RunningStats = field(default_factory=RunningStats)
    n_far: int = 0  # Number of consecutive far prompts, up to the latest.
    elsewhere: PackedState = ()  # Sum of these far prompts' states.
    total: PackedState = ()  # Sum of the other prompts' states since the latest shift.

    @property
    def state(self) -> State | None:
        """Mean hidden state of the prompts since the latest shift; None before the first prompt."""
        return round_to_single(unit(self.total)) if self.total else None

    def add_prompt(self, state: Sequence[float], settled: bool, goes_on: bool = False) -> ReadPrompt:
        """Add a prompt's mean hidden state, and whether all of its completion will be drafted with one set.

        Args:    goes_on: it is a later turn of a chat, whose state does not count.
        Returns: what `add` takes with its completion.
        """
        self.settled = settled
        if not goes_on:
            self._compare_prompt(state)
        return self._last_read_prompt

    @property
    def _last_read_prompt(self) -> ReadPrompt:
        return ReadPrompt(self.chart if self.settled else None, self.n_far > 0)

    def _compare_prompt(self, state: Sequence[float]) -> None:
        """Decide whether a prompt is far from the earlier ones, and update the sums."""
        self.latest = round_to_single(unit(state))
        mean_state, usual_cosines = self.state, self.nearness
        if mean_state is not None:
            cosine = sum(map(mul, mean_state, self.latest))
            if usual_cosines.n >= N_LEARN and cosine < usual_cosines.mean - FAR_SPREADS * usual_cosines.spread(
                USUAL_COSINE_SPREAD
            ):
                self.n_far += 1
                self.elsewhere = _add_states(self.elsewhere, self.latest)
                return
            usual_cosines.count(cosine)
        self.n_far, self.elsewhere = 0, ()
        self.total = _add_states(self.total, self.latest)

    def add(self, completion: Completion, prompt: ReadPrompt | None = None) -> str:
        """Add the completion of a prompt, by default the one read last; return in words what has changed, or "".

        It does not count where a shift has come since its prompt was read.
        """
        chart, is_far = prompt or self._last_read_prompt
        if self.n_far >= FAR_PROMPTS:
            return f"{self.n_far} prompts in a row lie elsewhere than those before"
        mean_before, alarm = self.chart.mean, self.alarm * (FAR_ALARM_FACTOR if is_far else 1.0)
        if chart is not self.chart or not completion.drafted:
            return ""
        if not self.chart.add(completion.accepted, completion.drafted, alarm, self.n_learn):
            return ""
        direction = "fell" if self.chart.fall > self.chart.rise else "rose"
        acceptance_rate = completion.accepted / completion.drafted
        return f"acceptance {direction} from {mean_before:.2f} to {acceptance_rate:.2f}"

    def restart(self, layer_set: LayerSet) -> list[LayerSet]:
        """Remember the set in use for the text before the shift; return the known sets nearest to the text after it."""
        state_before, state_after = self.state, self.elsewhere or self.latest
        nearest_sets = nearest(
            [*starmap(KnownSet, self.left), *self.known], round_to_single(unit(state_after)), N_NEAREST_SETS
        )
        if state_before is not None:
            self.left = [*(left_set for left_set in self.left if left_set[0] != layer_set), (layer_set, state_before)]
        self.chart, self.nearness = AcceptanceChart(), RunningStats()
        self.total, self.elsewhere, self.n_far, self.settled = state_after, (), 0, False
        return nearest_sets


def _add_states(state_sum: State, state: State) -> State:
    return round_to_single([a + b for a, b in zip(state_sum or (0.0,) * len(state), state, strict=True)])
