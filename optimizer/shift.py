"""Detection of a distribution shift in a stream, from the acceptance rate and from the prompts' hidden states.

After a shift, the search first tries known layer sets of similar text.
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
# N_LEARN and ALARM for served requests: many are short, and their acceptance rates vary by 0.2.
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
    """Running mean and spread of values; few values leave the spread near a given prior."""

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

    Each rate is compared with the mean and the spread of the earlier rates, then added to them. An outlier is added as
    a deviation of two spreads: otherwise the first texts after a shift would hide the following ones.

    Mean time between false alarms: 600 texts whose rates vary by 0.06. A fall from 0.8 to 0.55 is detected at the third
    or fourth text. With the bounds for served requests: 300 texts of HumanEval, whose rates vary by 0.2 (50 with the
    other bounds); a fall from 0.8 to 0.5 is detected at the sixth text, in 19 of 20 cases by the seventeenth.

    Source: E. S. Page, "Continuous inspection schemes", 1954; D. M. Hawkins, "Self-starting CUSUM charts", 1987.
    """

    rise: float = 0.0
    fall: float = 0.0

    def add(self, accepted: int, drafted: int, alarm: float = ALARM, n_learn: int = N_LEARN) -> bool:
        """Add a completion; return whether a CUSUM exceeds `alarm`, which signals a shift."""
        acceptance_rate = accepted / drafted
        if self.n >= n_learn:
            spread = self.spread(USUAL_SPREAD)
            # Sampling variance of the completion's rate, which is large for short completions.
            sampling_variance = self.mean * (1 - self.mean) / drafted
            deviation = (acceptance_rate - self.mean) / sqrt((spread**2 + sampling_variance) * (1 + 1 / self.n))
            deviation = max(-MAX_DEVIATION, min(MAX_DEVIATION, deviation))
            self.rise, self.fall = max(0.0, self.rise + deviation - SLACK), max(0.0, self.fall - deviation - SLACK)
            max_outlier = 2 * spread
            acceptance_rate = max(self.mean - max_outlier, min(self.mean + max_outlier, acceptance_rate))
        self.count(acceptance_rate)
        return max(self.rise, self.fall) > alarm


class ReadPrompt(NamedTuple):
    """The state of a `ShiftWatch` when a prompt was read, for the prompt's completion."""

    chart: AcceptanceChart | None  # Chart that counts the completion; None: its layer set may change meanwhile.
    is_far: bool  # Whether the prompt's hidden state is far from the earlier ones.


@dataclass(slots=True)
class ShiftWatch(Record):
    """Detects shifts of one task's stream.

    A lasting change of the acceptance rate is a shift. While prompts have hidden states far from the earlier ones, a
    smaller change is enough. Several far prompts in a row are a shift regardless of acceptance: a search in progress
    would mix two kinds of text, and a set that is still accepted may not be the fastest for the new kind.
    """

    COMPLETE: ClassVar = True

    known: Sequence[KnownSet] = field(default=(), metadata=NOT_WRITTEN)  # Layer sets from elsewhere, as the store's.
    alarm: float = field(default_factory=lambda: ALARM, metadata=NOT_WRITTEN)
    n_learn: int = field(default=N_LEARN, metadata=NOT_WRITTEN)
    chart: AcceptanceChart = field(default_factory=AcceptanceChart)  # Completions since the search ended.
    # Sets used before earlier shifts of this stream, each with the mean hidden state of its prompts.
    former_sets: list[tuple[LayerSet, PackedState]] = field(default_factory=list, metadata={"alias": "left"})
    latest: PackedState = ()  # State of the latest prompt.
    settled: bool = False  # Whether the search had ended when that prompt was read.
    # Cosines of the prompts' states to the mean state of the earlier prompts.
    nearness: RunningStats = field(default_factory=RunningStats)
    n_far: int = 0  # Number of consecutive far prompts, up to the latest.
    far_total: PackedState = field(default=(), metadata={"alias": "elsewhere"})  # Sum of these far prompts' states.
    total: PackedState = ()  # Sum of the other prompts' states since the latest shift.

    @property
    def state(self) -> State | None:
        """Mean hidden state of the prompts since the latest shift; None before the first prompt."""
        return round_to_single(unit(self.total)) if self.total else None

    def add_prompt(self, state: Sequence[float], settled: bool, is_later_turn: bool = False) -> ReadPrompt:
        """Add a prompt.

        Args:    state: the prompt's mean hidden state. settled: the search has ended, so that one layer set drafts the
                 whole completion. is_later_turn: the prompt is a later turn of a chat, whose state does not count.
        Returns: the argument for `add` with the prompt's completion.
        """
        self.settled = settled
        if not is_later_turn:
            self._compare_prompt(state)
        return self._last_read_prompt

    @property
    def _last_read_prompt(self) -> ReadPrompt:
        return ReadPrompt(self.chart if self.settled else None, self.n_far > 0)

    def _compare_prompt(self, state: Sequence[float]) -> None:
        """Decide whether a prompt is far from the earlier ones, and update the sums."""
        self.latest = round_to_single(unit(state))
        mean_state, cosines = self.state, self.nearness
        if mean_state is not None:
            cosine = sum(map(mul, mean_state, self.latest))
            min_near_cosine = cosines.mean - FAR_SPREADS * cosines.spread(USUAL_COSINE_SPREAD)
            if cosines.n >= N_LEARN and cosine < min_near_cosine:
                self.n_far += 1
                self.far_total = _add_states(self.far_total, self.latest)
                return
            cosines.count(cosine)
        self.n_far, self.far_total = 0, ()
        self.total = _add_states(self.total, self.latest)

    def add(self, completion: Completion, prompt: ReadPrompt | None = None) -> str:
        """Add the completion of a prompt, by default the latest; return the reason of a shift in words, or "".

        A completion does not count if a shift came after its prompt was read.
        """
        chart, is_far = prompt or self._last_read_prompt
        if self.n_far >= FAR_PROMPTS:
            return f"{self.n_far} prompts in a row have hidden states far from the earlier ones"
        mean_before, alarm = self.chart.mean, self.alarm * (FAR_ALARM_FACTOR if is_far else 1.0)
        if chart is not self.chart or not completion.drafted:
            return ""
        if not self.chart.add(completion.accepted, completion.drafted, alarm, self.n_learn):
            return ""
        direction = "fell" if self.chart.fall > self.chart.rise else "rose"
        acceptance_rate = completion.accepted / completion.drafted
        return f"acceptance {direction} from {mean_before:.2f} to {acceptance_rate:.2f}"

    def restart(self, layer_set: LayerSet) -> list[LayerSet]:
        """Start anew after a shift; return the known sets whose text is most similar to the new text.

        `layer_set`, the set in use, is remembered for the text before the shift.
        """
        state_before, state_after = self.state, self.far_total or self.latest
        known_sets = [*starmap(KnownSet, self.former_sets), *self.known]
        nearest_sets = nearest(known_sets, round_to_single(unit(state_after)), N_NEAREST_SETS)
        if state_before is not None:
            other_sets = [earlier for earlier in self.former_sets if earlier[0] != layer_set]
            self.former_sets = [*other_sets, (layer_set, state_before)]
        self.chart, self.nearness = AcceptanceChart(), RunningStats()
        self.total, self.far_total, self.n_far, self.settled = state_after, (), 0, False
        return nearest_sets


def _add_states(state_sum: State, state: State) -> State:
    return round_to_single([a + b for a, b in zip(state_sum or (0.0,) * len(state), state, strict=True)])
