"""The layer set in use (the incumbent), and the tests by which challengers replace it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.layer_sets import LayerSet, SubLayer
from ..core.serialization import Record
from ..core.types import Trial
from ..decoding.events import Round

FINALISTS = 4  # Maximum challengers kept at a time.
FINAL_WINDOWS = 2  # Windows that a challenger must win in addition to the one where it entered.


@dataclass(frozen=True, slots=True)
class WindowStart:
    """Identifies a window by its prompt and the position of its first token in the text."""

    prompt_id: str
    position: int

    def is_new_after(self, earlier: WindowStart, window: int) -> bool:
        """Tell whether at least half of the window's tokens are not in the earlier one."""
        is_other_text = self.prompt_id != earlier.prompt_id or self.position < earlier.position
        return is_other_text or 2 * (self.position - earlier.position) >= window


@dataclass(slots=True)
class Incumbent:
    """The set in use, with its mean score and matchness over the `n` windows it was scored on."""

    layer_set: LayerSet
    n: int = 0
    score: float = 0.0
    matchness: float = 0.0
    rounds: list[tuple[int, int]] = field(default_factory=list)  # (draft steps, accepted) of its latest rounds.

    def add(self, trial: Trial) -> None:
        """Add the set's trial on one more window to the means."""
        self.n += 1
        self.score += (trial.score - self.score) / self.n
        self.matchness += (trial.matchness - self.matchness) / self.n

    def acceptance_after(self, round_: Round, n_rounds: int) -> float | None:
        """Add a round; return α over the latest `n_rounds`, or None if there are fewer or nothing was drafted."""
        self.rounds = [*self.rounds, (round_.n_steps, round_.n_accepted)][-n_rounds:]
        n_drafted = sum(n_steps for n_steps, _ in self.rounds)
        if len(self.rounds) < n_rounds or not n_drafted:
            return None
        return sum(n_accepted for _, n_accepted in self.rounds) / n_drafted


@dataclass(frozen=True, slots=True)
class Finalist:
    """A challenger that is compared with the set in use on further windows."""

    layer_set: LayerSet
    entry: float  # Its score on the window where it entered.
    latest: WindowStart = field(metadata={"alias": "place"})  # Window on which it was scored last.
    leads: tuple[float, ...] = ()  # Its score minus that of the set in use, for each later window.

    @property
    def lead(self) -> float:
        """Mean lead over the set in use."""
        return sum(self.leads) / max(1, len(self.leads))


@dataclass(slots=True)
class Finals:
    """Successive halving over windows: of the finalists scored together with the set in use, the better half stays.

    A finalist is scored on windows of new text only, and a window serves for one final at most, so that a lucky window
    cannot decide.
    """

    finalists: list[Finalist] = field(default_factory=list)
    latest: WindowStart | None = None  # Window on which finalists were last scored.

    def enter(self, challengers: Mapping[LayerSet, float], window_start: WindowStart, min_rating: float) -> None:
        """Add a window's challengers rated above `min_rating`; keep the `FINALISTS` best finalists."""
        known_sets = {finalist.layer_set for finalist in self.finalists}
        for layer_set, rating in challengers.items():
            if rating > min_rating and layer_set not in known_sets:
                self.finalists.append(Finalist(layer_set, rating, window_start))
        self.finalists.sort(key=lambda finalist: (len(finalist.leads), finalist.lead, finalist.entry), reverse=True)
        del self.finalists[FINALISTS:]

    def due(self, window_start: WindowStart, window: int) -> list[LayerSet]:
        """Return the finalists to score, together with the set in use, on the window at `window_start`."""
        if self.latest is not None and not window_start.is_new_after(self.latest, window):
            return []
        return [finalist.layer_set for finalist in self.finalists if window_start.is_new_after(finalist.latest, window)]

    def settle(self, window_start: WindowStart, leads: Mapping[LayerSet, float]) -> Finalist | None:
        """Add the finalists' leads on a window and drop the worse half of them; return the winner, if there is one."""
        scored = [finalist for finalist in self.finalists if finalist.layer_set in leads]
        waiting = [finalist for finalist in self.finalists if finalist.layer_set not in leads]
        updated = [
            replace(finalist, latest=window_start, leads=(*finalist.leads, leads[finalist.layer_set]))
            for finalist in scored
        ]
        leaders = sorted(
            (finalist for finalist in updated if finalist.lead > 0), key=lambda finalist: finalist.lead, reverse=True
        )
        leaders = leaders[: (len(updated) + 1) // 2]
        self.latest = window_start
        winner = next((finalist for finalist in leaders if len(finalist.leads) >= FINAL_WINDOWS), None)
        self.finalists = [*(leaders if winner is None else []), *waiting]
        return winner


@dataclass(slots=True)
class ChallengerTest(Record):
    """The set in use, its challengers, and the rules by which one of them is adopted."""

    incumbent: Incumbent
    finals: Finals = field(default_factory=Finals)
    first: list[LayerSet] = field(default_factory=list)  # Known sets to score before new proposals.
    # Window of the latest scoring pass.
    latest_window: WindowStart | None = field(default=None, metadata={"alias": "looked"})
    opened_at: int = 0  # Number of trials when the search was opened.
    n_at_gain: int = 0  # Number of trials when the set in use was adopted, or first scored.

    def is_new_window(self, window_start: WindowStart, window: int) -> bool:
        """Tell whether at least half of the window is text that the latest pass did not score."""
        return self.latest_window is None or window_start.is_new_after(self.latest_window, window)

    def adopt_highest(self, trials: Sequence[Trial]) -> Trial | None:
        """Adopt the set with the highest score so far (SWIFT 4.1); return its trial if the set is new."""
        best_trial, old_incumbent = max(trials, key=lambda trial: trial.score), self.incumbent
        if old_incumbent.n and best_trial.score <= old_incumbent.score:
            return None
        adopted_trial = self._adopt_set(best_trial, [best_trial])
        if best_trial.layer_set != old_incumbent.layer_set:
            return adopted_trial
        self.incumbent.rounds = old_incumbent.rounds
        return None

    def adopt_best(self, best_set: LayerSet, trials: Sequence[Trial], earlier_trials: Sequence[Trial]) -> Trial | None:
        """Adopt the set that the strategy rates best, if it is new and this pass scored it; return its trial.

        If only an earlier pass scored it, the next pass scores it again before it is adopted.
        """
        best_trial = next((trial for trial in trials if trial.layer_set == best_set), None)
        if best_trial is None or best_set == self.incumbent.layer_set:
            return None
        trials_of_set = [trial for trial in (*earlier_trials, best_trial) if trial.layer_set == best_set]
        return self._adopt_set(best_trial, trials_of_set)

    def judge(
        self, window_start: WindowStart, incumbent_trial: Trial, finalist_trials: Sequence[Trial]
    ) -> Trial | None:
        """Add the scores of the set in use and of the finalists on a window; adopt a winner and return its trial."""
        if self.incumbent.n == 0:
            self.n_at_gain = incumbent_trial.step + 1
        self.incumbent.add(incumbent_trial)
        if not finalist_trials:
            return None
        leads = {trial.layer_set: trial.score - incumbent_trial.score for trial in finalist_trials}
        winner = self.finals.settle(window_start, leads)
        if winner is None:
            return None
        winning_trial = next(trial for trial in finalist_trials if trial.layer_set == winner.layer_set)
        # The winner was scored on fewer and perhaps easier windows: derive its score from its lead.
        score = self.incumbent.score + winner.lead
        return self._adopt_set(winning_trial, [replace(winning_trial, score=score)])

    def adopt(self, layer_set: LayerSet, trials: Sequence[Trial]) -> None:
        """Put a set in use, with its mean score over its trials among `trials`."""
        self.incumbent = Incumbent(layer_set)
        for trial in trials:
            if trial.layer_set == layer_set:
                self.incumbent.add(trial)

    def _adopt_set(self, winning_trial: Trial, trials_of_set: Sequence[Trial]) -> Trial:
        """Put the set of `winning_trial` in use, whose trials are `trials_of_set`; return the trial as adopted."""
        self.adopt(winning_trial.layer_set, trials_of_set)
        self.n_at_gain = winning_trial.step + 1
        return replace(winning_trial, adopted=True)


def trim(layer_set: LayerSet, n_skipped: int) -> LayerSet:
    """Return `layer_set` with only `n_skipped` of its skipped sub-layers, evenly spread over the depth."""
    skipped: list[SubLayer] = [("attn", layer) for layer in layer_set.skip_attn] + [
        ("mlp", layer) for layer in layer_set.skip_mlp
    ]
    skipped.sort(key=lambda sub_layer: sub_layer[::-1])
    if n_skipped >= len(skipped):
        return layer_set
    return layer_set.skipping(skipped[(index * len(skipped)) // n_skipped] for index in range(n_skipped))
