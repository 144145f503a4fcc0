"""The layer set in use and its challengers, which replace it after several wins on the same windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.serialization import Record
from ..core.types import LayerSet, SubLayer, Trial
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
        drafted = sum(steps for steps, _ in self.rounds)
        if len(self.rounds) < n_rounds or not drafted:
            return None
        return sum(accepted for _, accepted in self.rounds) / drafted


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
    """Successive halving over windows: of those scored beside the set in use, the better half stays.

    A window is used for one final at most, and its text must be new to those who are scored, so that luck on one window
    wins nothing.
    """

    finalists: list[Finalist] = field(default_factory=list)
    latest: WindowStart | None = None  # Window on which finalists were last scored.

    def enter(self, challengers: Mapping[LayerSet, float], place: WindowStart, bar: float) -> None:
        """Add a window's challengers rated above `bar`; keep the `FINALISTS` best finalists."""
        entered = {finalist.layer_set for finalist in self.finalists}
        for layer_set, rating in challengers.items():
            if rating > bar and layer_set not in entered:
                self.finalists.append(Finalist(layer_set, rating, place))
        self.finalists.sort(key=lambda own: (len(own.leads), own.lead, own.entry), reverse=True)
        del self.finalists[FINALISTS:]

    def due(self, place: WindowStart, window: int) -> list[LayerSet]:
        """Return the finalists to score, together with the set in use, on the window at `place`."""
        if self.latest is not None and not place.is_new_after(self.latest, window):
            return []
        return [finalist.layer_set for finalist in self.finalists if place.is_new_after(finalist.place, window)]

    def settle(self, place: WindowStart, leads: Mapping[LayerSet, float]) -> Finalist | None:
        """Add the finalists' leads on a window; return the winner, if any."""
        scored = [finalist for finalist in self.finalists if finalist.layer_set in leads]
        waiting = [finalist for finalist in self.finalists if finalist.layer_set not in leads]
        judged = [
            replace(finalist, place=place, leads=(*finalist.leads, leads[finalist.layer_set])) for finalist in scored
        ]
        better = sorted(
            (finalist for finalist in judged if finalist.lead > 0), key=lambda finalist: finalist.lead, reverse=True
        )
        better = better[: (len(judged) + 1) // 2]
        self.latest = place
        won = next((finalist for finalist in better if len(finalist.leads) >= FINAL_WINDOWS), None)
        self.finalists = [*(better if won is None else []), *waiting]
        return won


@dataclass(slots=True)
class Contest(Record):
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

    def is_news(self, place: WindowStart, window: int) -> bool:
        """Tell whether at least half of the window is text that the latest pass did not score."""
        return self.looked is None or place.is_new_after(self.looked, window)

    def take_highest(self, trials: Sequence[Trial]) -> Trial | None:
        """Adopt the set with the highest score so far (SWIFT 4.1); return its trial if the set is new."""
        best, before = max(trials, key=lambda trial: trial.score), self.incumbent
        if before.n and best.score <= before.score:
            return None
        adopted = self._adopt(best, [best])
        if best.layer_set != before.layer_set:
            return adopted
        self.incumbent.rounds = before.rounds
        return None

    def take_best(self, best: LayerSet, trials: Sequence[Trial], earlier: Sequence[Trial]) -> Trial | None:
        """Adopt the set with the best estimate by all trials if this pass scored it; return its trial if it is new.

        One that was only scored in an earlier pass is scored again first.
        """
        decided = next((trial for trial in trials if trial.layer_set == best), None)
        if decided is None or best == self.incumbent.layer_set:
            return None
        return self._adopt(decided, [trial for trial in (*earlier, decided) if trial.layer_set == best])

    def judge(self, place: WindowStart, held: Trial, finalists: Sequence[Trial]) -> Trial | None:
        """Add the scores of the set in use and of finalists; adopt a winner and return its trial."""
        if self.incumbent.n == 0:
            self.n_at_gain = held.step + 1
        self.incumbent.add(held)
        if not finalists:
            return None
        won = self.finals.settle(place, {trial.layer_set: trial.score - held.score for trial in finalists})
        if won is None:
            return None
        decided = next(trial for trial in finalists if trial.layer_set == won.layer_set)
        # The winner was scored on fewer, perhaps easier windows, so derive its score from the lead over the set in use.
        score = self.incumbent.score + won.lead
        return self._adopt(decided, [replace(decided, score=score)])

    def take(self, layer_set: LayerSet, trials: Sequence[Trial]) -> None:
        """Put a set in use, with its mean score over `trials`."""
        self.incumbent = Incumbent(layer_set)
        for trial in trials:
            if trial.layer_set == layer_set:
                self.incumbent.add(trial)

    def _adopt(self, decided: Trial, scored: Sequence[Trial]) -> Trial:
        """Put the set of the trial `decided` in use; `scored` are the set's trials so far."""
        self.take(decided.layer_set, scored)
        self.n_at_gain = decided.step + 1
        return replace(decided, adopted=True)


def trimmed(layer_set: LayerSet, n_skipped: int) -> LayerSet:
    """Return `layer_set` with `n_skipped` of its sub-layers still skipped, spread over the depth."""
    skipped: list[SubLayer] = [("attn", i) for i in layer_set.skip_attn] + [("mlp", i) for i in layer_set.skip_mlp]
    skipped.sort(key=lambda sub: sub[::-1])
    if n_skipped >= len(skipped):
        return layer_set
    return layer_set.skipping(skipped[(j * len(skipped)) // n_skipped] for j in range(n_skipped))
