"""The layer set in use and its challengers, which replace it after several wins on the same windows."""

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
    """A window's prompt, and its first token's position in the text."""

    prompt_id: str
    position: int

    def is_new_after(self, earlier: WindowStart, window: int) -> bool:
        """Tell whether at least half of the window's tokens are not in the earlier one."""
        is_other_text = self.prompt_id != earlier.prompt_id or self.position < earlier.position
        return is_other_text or 2 * (self.position - earlier.position) >= window


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

    def add(self, trial: Trial) -> None:
        """Add its trial on one more window to the means."""
        self.n += 1
        self.score += (trial.score - self.score) / self.n
        self.matchness += (trial.matchness - self.matchness) / self.n

    def acceptance_after(self, round_: Round, n_rounds: int) -> float | None:
        """Return α over the latest `n_rounds`, this one included; None if there are fewer, or nothing was drafted."""
        self.rounds = [*self.rounds, (round_.n_steps, round_.n_accepted)][-n_rounds:]
        n_drafted = sum(n_steps for n_steps, _ in self.rounds)
        if len(self.rounds) < n_rounds or not n_drafted:
            return None
        return sum(n_accepted for _, n_accepted in self.rounds) / n_drafted


@dataclass(frozen=True, slots=True)
class Finalist:
    """A challenger: the rating that brought it here, where it was scored last, and its leads over the set in use."""

    layer_set: LayerSet
    entry: float
    place: WindowStart
    leads: tuple[float, ...] = ()

    @property
    def lead(self) -> float:
        """Mean lead over the set in use, on the windows where both were scored."""
        return sum(self.leads) / max(1, len(self.leads))


@dataclass(slots=True)
class Finals:
    """Successive halving over windows: of those scored with the set in use, the better half stays.

    A window is used for one final at most, and its text must be new to those who are scored, so that luck on one window
    wins nothing.
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
        return [finalist.layer_set for finalist in self.finalists if window_start.is_new_after(finalist.place, window)]

    def settle(self, window_start: WindowStart, leads: Mapping[LayerSet, float]) -> Finalist | None:
        """Add the finalists' leads on a window; return the winner, if any."""
        scored = [finalist for finalist in self.finalists if finalist.layer_set in leads]
        waiting = [finalist for finalist in self.finalists if finalist.layer_set not in leads]
        updated = [
            replace(finalist, place=window_start, leads=(*finalist.leads, leads[finalist.layer_set]))
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
    """The set in use and its challengers.

    `first` are sets to be scored before any that is proposed; `looked` is the window of the latest pass. `opened_at`
    and `n_at_gain` count the candidates that were scored when the search was opened, and when the set in use was
    first scored or adopted.
    """

    incumbent: Incumbent
    finals: Finals = field(default_factory=Finals)
    first: list[LayerSet] = field(default_factory=list)
    looked: WindowStart | None = None
    opened_at: int = 0
    n_at_gain: int = 0

    def is_new_window(self, place: WindowStart, window: int) -> bool:
        """Tell whether at least half of the window is text that the latest pass did not score."""
        return self.looked is None or place.is_new_after(self.looked, window)

    def take_highest(self, trials: Sequence[Trial]) -> Trial | None:
        """Adopt the set with the highest score so far (SWIFT 4.1); return its trial if the set is new."""
        best_trial, old_incumbent = max(trials, key=lambda trial: trial.score), self.incumbent
        if old_incumbent.n and best_trial.score <= old_incumbent.score:
            return None
        adopted_trial = self._adopt_set(best_trial, [best_trial])
        if best_trial.layer_set != old_incumbent.layer_set:
            return adopted_trial
        self.incumbent.rounds = old_incumbent.rounds
        return None

    def take_best(self, best_set: LayerSet, trials: Sequence[Trial], earlier_trials: Sequence[Trial]) -> Trial | None:
        """Adopt the set with the best estimate by all trials if this pass scored it; return its trial if it is new.

        One that was only scored in an earlier pass is scored again first.
        """
        best_trial = next((trial for trial in trials if trial.layer_set == best_set), None)
        if best_trial is None or best_set == self.incumbent.layer_set:
            return None
        return self._adopt_set(
            best_trial, [trial for trial in (*earlier_trials, best_trial) if trial.layer_set == best_set]
        )

    def judge(
        self, window_start: WindowStart, incumbent_trial: Trial, finalist_trials: Sequence[Trial]
    ) -> Trial | None:
        """Add the scores of the set in use and of finalists; adopt a winner and return its trial."""
        if self.incumbent.n == 0:
            self.n_at_gain = incumbent_trial.step + 1
        self.incumbent.add(incumbent_trial)
        if not finalist_trials:
            return None
        winner = self.finals.settle(
            window_start, {trial.layer_set: trial.score - incumbent_trial.score for trial in finalist_trials}
        )
        if winner is None:
            return None
        winning_trial = next(trial for trial in finalist_trials if trial.layer_set == winner.layer_set)
        # The winner was scored on fewer, perhaps easier windows, so derive its score from the lead over the set in use.
        score = self.incumbent.score + winner.lead
        return self._adopt_set(winning_trial, [replace(winning_trial, score=score)])

    def take(self, layer_set: LayerSet, trials: Sequence[Trial]) -> None:
        """Put a set in use, with its mean score over `trials`."""
        self.incumbent = Incumbent(layer_set)
        for trial in trials:
            if trial.layer_set == layer_set:
                self.incumbent.add(trial)

    def _adopt_set(self, winning_trial: Trial, trials_of_set: Sequence[Trial]) -> Trial:
        """Put the set of the trial `winning_trial` in use; `trials_of_set` are the set's trials so far."""
        self.take(winning_trial.layer_set, trials_of_set)
        self.n_at_gain = winning_trial.step + 1
        return replace(winning_trial, adopted=True)


def trim(layer_set: LayerSet, n_skipped: int) -> LayerSet:
    """Return `layer_set` with `n_skipped` of its sub-layers still skipped, spread over the depth."""
    skipped: list[SubLayer] = [("attn", layer) for layer in layer_set.skip_attn] + [
        ("mlp", layer) for layer in layer_set.skip_mlp
    ]
    skipped.sort(key=lambda sub_layer: sub_layer[::-1])
    if n_skipped >= len(skipped):
        return layer_set
    return layer_set.skipping(skipped[(index * len(skipped)) // n_skipped] for index in range(n_skipped))
