"""One task's search: which layer set drafts now, what was tried, and when the search is over (SWIFT 4.1, B.2, C.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from ..core.events import Adopted, Event, SkipRatioLowered, TrialsDone
from ..core.settings import SwiftSettings
from ..core.types import CostProfile, LayerSet, Trial, n_skipped_for
from ..decoding.context import Context
from ..decoding.loop import Round
from ..decoding.method import swift
from ..decoding.models import SkippedTarget
from .evaluation import WindowScore, score_window
from .incumbent import Incumbent, lowered_ratio, trimmed
from .objective import objective
from .strategies import make_strategy

LARGEST_BATCH = 8  # candidates per pass
BATCH_GAIN = 0.95  # a larger batch must cut the seconds per candidate at least to this share
CONFIRM_WINDOWS = 2  # a swap is decided on this many context windows
TellEvent = Callable[[Event], None]


def candidates_per_pass(costs: CostProfile | None, window: int) -> int:
    """How many candidates one pass should score: as many as make each cheaper, by the measured cost of rows.

    Only widths that were measured count: beyond them a line through the last two promises savings that a processor
    already busy does not give (SmolLM2-135M on 2 cores: 8 candidates, 256 rows, cost 8 times one).
    """
    best = 1
    if costs is not None:
        for n in (2, 4, LARGEST_BATCH):
            cheaper = costs.target_pass_s(n * window) / n < BATCH_GAIN * costs.target_pass_s(best * window) / best
            if n * window <= max(costs.pass_s) and cheaper:
                best = n
    return best


class Search:
    """Proposes, scores and adopts layer sets between rounds of decoding, until one of the stopping rules holds.

    `method` drafts with the set in use; pass `before_round` and `after_round` to the decode loop.
    """

    def __init__(
        self,
        task: str,
        n_layers: int,
        settings: SwiftSettings,
        skip_ratio: float,
        costs: CostProfile | None,
        tell: TellEvent,
        prompt_id: Callable[[], str],
    ) -> None:
        self.task, self.settings, self.costs = task, settings, costs
        self.skip_ratio = skip_ratio
        self.n_layers = n_layers
        start = LayerSet.uniform(n_layers, n_skipped_for(n_layers, skip_ratio))
        self._draft = SkippedTarget(start)
        self.method = swift(self._draft, settings)
        self.trials: list[Trial] = []
        self.stopped_because = "" if settings.optimise else "optimisation is switched off"
        if settings.optimise and not settings.max_steps:
            self.stopped_because = "no candidates were asked for"
        self.batch = candidates_per_pass(costs, settings.context_window)
        self._incumbent = Incumbent(start)
        self._n_at_gain = 0  # candidates scored when the set in use was first scored or adopted
        self._tell, self._prompt_id = tell, prompt_id
        self._strategy = None if self.stopped_because else self._make_strategy(start.n_skipped)

    @property
    def layer_set(self) -> LayerSet:
        """The set in use."""
        return self._incumbent.layer_set

    @property
    def optimising(self) -> bool:
        """Whether the search still goes on."""
        return not self.stopped_because

    @property
    def matchness(self) -> float | None:
        """Mean matchness of the set in use over the windows it was scored on; None before its first."""
        return self._incumbent.matchness if self._incumbent.n else None

    @property
    def scratch_rows(self) -> int:
        """Buffer slots that `before_round` may write behind the committed ones."""
        if not self.optimising:
            return 0
        # The first pass scores the starting set beside a batch; a confirmation scores two sets on a longer window.
        return self.settings.context_window * max(self.batch + 1, 2 * CONFIRM_WINDOWS)

    def before_round(self, context: Context) -> None:
        """One pass over candidates, once the context window is full."""
        n_generated = len(context.generated)
        if not self.optimising or n_generated < self.settings.context_window:
            return
        assert self._strategy is not None
        clock = perf_counter()
        room = self.settings.max_steps - len(self.trials)
        starting = self._incumbent.n == 0
        proposals = [self._strategy.propose() for _ in range(min(self.batch, room - starting))]
        sets = [(p.layer_set, p.origin) for p in proposals]
        if starting:
            sets.insert(0, (self.layer_set, "uniform" if not self.trials else "trimmed"))
        scores = score_window(context, [layer_set for layer_set, _ in sets], self.settings.context_window)
        share = (perf_counter() - clock) / len(sets)
        trials = [
            self._trial(context, i, layer_set, origin, score, share)
            for i, ((layer_set, origin), score) in enumerate(zip(sets, scores, strict=True))
        ]
        if starting:
            self._incumbent.add(trials[0].score, trials[0].matchness)
            self._n_at_gain = trials[0].step + 1
        self._settle(context, trials)

    def after_round(self, context: Context, round_: Round) -> None:
        """Lower the skip ratio where acceptance stays too low while optimising (SWIFT C.2)."""
        if not self.optimising:
            return
        settings = self.settings
        acceptance = self._incumbent.acceptance_after(round_, settings.min_acceptance_rounds)
        if acceptance is not None and acceptance < settings.min_acceptance:
            lowered = lowered_ratio(self.n_layers, self.skip_ratio, self.layer_set.n_skipped, settings.skip_ratio_step)
            if n_skipped_for(self.n_layers, lowered) > 0:
                self._lower(lowered, acceptance)

    def finish(self, reason: str) -> None:
        """End the search, if it has not ended yet."""
        if self.optimising:
            self.stopped_because = reason
            self.close()

    def close(self) -> None:
        """Free what the strategy holds, whether the search has ended or was cut short."""
        if self._strategy is not None:
            self._strategy.close()

    def state(self) -> dict[str, Any]:
        """Where the search stands between two passes, as JSON values, without its trials."""
        return {
            "n_trials": len(self.trials),
            "skip_ratio": self.skip_ratio,
            "incumbent": self._incumbent.to_json(),
            "n_at_gain": self._n_at_gain,
            "stopped_because": self.stopped_because,
            "strategy": self._strategy.state() if self._strategy is not None and self.optimising else None,
        }

    def restore(self, state: Mapping[str, Any], trials: Sequence[Trial]) -> None:
        """Go on from the `state` of a search of the same settings, and the trials it had made by then, in their order.

        Raises: KeyError, TypeError, ValueError: they are no such state, or not its trials.
        """
        if [trial.step for trial in trials] != list(range(state["n_trials"])):
            raise ValueError(f"task {self.task!r} stood at {state['n_trials']} trials, but {len(trials)} are stored")
        self.trials, self.skip_ratio = list(trials), state["skip_ratio"]
        self._incumbent = Incumbent.from_json(state["incumbent"])
        self._draft.layer_set = self.layer_set
        self._n_at_gain, self.stopped_because = state["n_at_gain"], state["stopped_because"]
        if self._strategy is not None and self.optimising:
            for trial in self.trials:
                self._strategy.observe(trial)
            self._strategy.restore(state["strategy"])

    def _make_strategy(self, n_skipped: int) -> Any:
        settings = self.settings
        return make_strategy(
            settings.strategy,
            self.n_layers,
            n_skipped,
            settings.seed,
            interval=settings.bayes_interval,
            deterministic=settings.deterministic,
        )

    def _trial(
        self, context: Context, offset: int, layer_set: LayerSet, origin: str, score: WindowScore, seconds: float
    ) -> Trial:
        return Trial(
            step=len(self.trials) + offset,
            layer_set=layer_set,
            origin=origin,
            matchness=score.matchness,
            score=objective(score, layer_set, self.settings, self.costs),
            prompt_id=self._prompt_id(),
            position=len(context.token_ids) - self.settings.context_window,
            seed=self.settings.seed,
            seconds=seconds,
        )

    def _settle(self, context: Context, trials: list[Trial]) -> None:
        """Tell the strategy, swap if the best of the batch holds up, and see whether the search is over."""
        assert self._strategy is not None
        best = max(trials, key=lambda trial: trial.score)
        if best.layer_set != self.layer_set and best.score > self._incumbent.score and self._confirm(context, best):
            trials[trials.index(best)] = replace(best, adopted=True)
            self._n_at_gain = best.step + 1
            self._tell(Adopted(self.task, self.layer_set, self._incumbent.matchness, best.step))
        self.trials += trials
        for trial in trials:
            self._strategy.observe(trial)
        self._check_end()  # first, so that who is told of the trials may keep a state that knows of the end
        self._tell(TrialsDone(self.task, tuple(trials)))

    def _confirm(self, context: Context, challenger: Trial) -> bool:
        """Score both on one window, twice as long if the text is; adopt the challenger if it is better there.

        Scores of different windows are different noise, and a challenger that looks best was lucky in its own window;
        the tokens before that one are as good a judge of both.
        """
        window = min(len(context.generated), CONFIRM_WINDOWS * self.settings.context_window)
        sets = (self.layer_set, challenger.layer_set)
        held, new = score_window(context, sets, window)
        held_score, new_score = (
            objective(score, layer_set, self.settings, self.costs)
            for layer_set, score in zip(sets, (held, new), strict=True)
        )
        if new_score <= held_score:
            self._incumbent.add(held_score, held.matchness)
            return False
        self._use(challenger.layer_set)
        self._incumbent.add(new_score, new.matchness)
        return True

    def _use(self, layer_set: LayerSet) -> None:
        self._incumbent = Incumbent(layer_set)
        self._draft.layer_set = layer_set

    def _check_end(self) -> None:
        settings, n = self.settings, len(self.trials)
        if self._incumbent.matchness > settings.target_matchness:
            self.finish(f"matchness {self._incumbent.matchness:.2f} is above {settings.target_matchness}")
        elif n >= settings.max_steps:
            self.finish(f"{n} candidates were scored")
        elif n - self._n_at_gain >= settings.patience:
            self.finish(f"no better layer set in {settings.patience} candidates")

    def _lower(self, skip_ratio: float, acceptance: float) -> None:
        """Go on with fewer skipped sub-layers, starting from the set in use without some of them."""
        assert self._strategy is not None
        self.skip_ratio = skip_ratio
        n_skipped = n_skipped_for(self.n_layers, skip_ratio)
        self._strategy.set_n_skipped(n_skipped)
        self._use(trimmed(self.layer_set, n_skipped))
        self._tell(SkipRatioLowered(self.task, skip_ratio, acceptance))
