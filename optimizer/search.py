"""One task's search: which layer set drafts now, what was tried, and when the search is over (SWIFT 4.1, B.2, C.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeVar

import torch

from ..core.costs import CostProfile
from ..core.events import Adopted, DraftingChosen, Event, SkipRatioLowered, TrialsDone
from ..core.settings import SwiftSettings
from ..core.types import LayerSet, Prompt, Trial, n_skipped_for
from ..decoding.context import Context, ResumePoint
from ..decoding.draft_models import SkippedTarget
from ..decoding.engine import Work, intercept
from ..decoding.loop import Prefilled, Round
from ..decoding.session import Session, Turn
from ..models.restacked import nearest
from .challengers import FINALISTS, Finals, Incumbent, Place, Standing, lowered_ratio, trimmed
from .drafting import (
    FEWEST_WINDOWS,
    MOST_WINDOWS,
    drafting_with,
    search_drafting,
    starting_set,
)
from .evaluation import WindowScore, affordable, candidates_per_pass, objective, score_window
from .proposer import Proposer, chooses_size
from .strategies import Proposal, recipe_of

T = TypeVar("T")


class Search:
    """Proposes, scores and adopts layer sets between rounds of decoding, until one of the stopping rules holds.

    `method` drafts with the set in use; `during` searches beside a request. `start` is the set to
    begin with, whose formats every candidate keeps; None: evenly spaced sub-layers by `skip_ratio`. `n_tokens` is how
    long the stream will be, where that is known: strategies that choose the size themselves are kept to a share of it.
    `parallel`: the model's attention and MLP read the same values, for `settings.exportable`.
    """

    def __init__(
        self,
        task: str,
        n_layers: int,
        settings: SwiftSettings,
        skip_ratio: float,
        costs: CostProfile | None,
        start: LayerSet | None = None,
        n_tokens: int | None = None,
        parallel: bool = False,
    ) -> None:
        self.task, self.settings, self.costs = task, settings, costs
        self._longest_draft = settings.max_draft_length  # whatever is chosen for one text or the other
        self.skip_ratio, self.n_layers = skip_ratio, n_layers
        self._parallel = parallel
        start = self._wanted(start or starting_set(n_layers, settings, skip_ratio, chooses_size(settings, costs)))
        self._start = start
        self._draft = SkippedTarget(start)
        self.method = drafting_with(self._draft, settings, costs)
        self.trials: list[Trial] = []
        self.batch = settings.candidates or candidates_per_pass(costs, settings.context_window)
        self._windows: list[WindowScore] = []  # what the set in use predicted, the latest last
        self.stopped_because = self._never
        self._most = settings.max_steps
        if n_tokens is not None and recipe_of(settings.strategy).chooses_size:
            self._most = min(self._most, affordable(costs, start, settings.context_window, n_tokens))
        self._standing = Standing(Incumbent(start))
        self._candidate_rows = 0
        self._n_rounds = 0  # of all requests
        self._proposer = self._new_proposer() if self.optimising else None
        self._scoring = False

    @property
    def layer_set(self) -> LayerSet:
        """The set in use."""
        return self._standing.incumbent.layer_set

    @property
    def optimising(self) -> bool:
        """Whether the search still goes on."""
        return not self.stopped_because

    @property
    def matchness(self) -> float | None:
        """Mean matchness of the set in use over the windows it was scored on; None before its first."""
        return self._standing.incumbent.matchness if self._standing.incumbent.n else None

    @property
    def scratch_rows(self) -> int:
        """Buffer slots that `score` may write behind the committed ones."""
        if self._proposer is None or not self.optimising:
            return 0
        n_sets = 1 + max(self.batch, FINALISTS + 1)  # the set in use, and candidates or finalists with one candidate
        return max(self.settings.context_window * n_sets, self._proposer.scratch_rows)

    @property
    def rows_run(self) -> float:
        """Rows of the full model that the search has cost, a study's counted by the share of the model they ran."""
        return self._candidate_rows + (0.0 if self._proposer is None else self._proposer.rows_run)

    def request(
        self,
        session: Session,
        prompt: Prompt,
        answers: Sequence[str] = (),
        resume_from: ResumePoint | None = None,
        **options: Any,
    ) -> Work[list[Turn]]:
        """Decode a prompt with the set in use, and search meanwhile; arguments as for `Session.request`."""
        options["scratch_rows"] = self.scratch_rows
        return self.during(session.request(prompt, self.method, answers, resume_from, **options), prompt.id)

    def during(self, request: Work[T], prompt_id: str) -> Work[T]:
        """Decode a request, and search after its prefill and after its rounds; yields its events and the search's.

        The request must have `scratch_rows`. Several may run beside each other: one at a time has candidates scored.
        """
        has_room = bool(self.scratch_rows)  # a search that is opened meanwhile has none behind this request

        def handle(event: Any) -> Work[None]:
            if isinstance(event, Round):
                self._n_rounds += 1
                yield from self.lower(event)
            yield event
            if has_room and isinstance(event, Prefilled | Round) and event.context.finish is None:
                yield from self.score(event.context, prompt_id)

        return intercept(request, handle)

    def score(self, context: Context, prompt_id: str) -> Work[None]:
        """Score candidates in one pass, once the context window is full; at most once between two rounds.

        A pass that the memory does not hold is given up, and later ones score half as many candidates.
        """
        settings = self.settings
        window, waits = settings.context_window, self._n_rounds % settings.optimise_interval > 0
        if not self.optimising or self._scoring or context.searched or waits or len(context.generated) < window:
            return
        context.searched = True  # a request that is kept from here on is not searched again
        start = context.n_prompt if settings.window_at == "first" else len(context.token_ids) - window
        place = Place(prompt_id, start)
        assert self._proposer is not None
        if self._proposer.paired and not self._standing.is_news(place, window):
            return
        clock = perf_counter()
        self._scoring = True
        try:
            self._standing.looked = place
            sets = self._sets(context, place)
            scores = yield from score_window(context, [layer_set for layer_set, _ in sets], window, start)
        except (torch.OutOfMemoryError, MemoryError):  # the request goes on, and the search asks for less
            self.batch //= 2
            if not self.batch:
                self.finish("the memory is too small for the pass of a candidate")
            return
        finally:
            self._scoring = False
        if self.stopped_because:  # meanwhile
            return
        self._candidate_rows += window * len(sets)
        events = self._settle(place, self._trials_of(place, sets, scores, clock), scores)
        context.tally.optimise_s += perf_counter() - clock
        yield from events

    def lower(self, round_: Round) -> Iterator[Event]:
        """Lower the skip ratio where acceptance stays too low while optimising (SWIFT C.2).

        Strategies that choose the size themselves have no ratio to lower.
        """
        if self._proposer is None or not self.optimising or self._proposer.chooses_size:
            return
        settings = self.settings
        acceptance = self._standing.incumbent.acceptance_after(round_, settings.min_acceptance_rounds)
        if acceptance is not None and acceptance < settings.min_acceptance:
            lowered = lowered_ratio(self.n_layers, self.skip_ratio, self.layer_set.n_skipped, settings.skip_ratio_step)
            if 0 < n_skipped_for(self.n_layers, lowered) < self.layer_set.n_skipped:
                self._lower(lowered)
                yield SkipRatioLowered(self.task, lowered, acceptance)

    def reopen(self, first: Sequence[LayerSet] = ()) -> bool:
        """Search again, as if anew, from the set in use; the sets of `first` are scored before any other.

        The set that the search began with comes behind them: what was thinned out for one text may be too thin for the
        next, and a search that only goes on from there needs long to find back. Nothing that was tried before counts:
        the text has changed. Where no search was wanted, none begins.

        Returns: whether one has begun.
        """
        if self._never:
            return False
        self.close()
        self.stopped_because = ""
        known = dict.fromkeys(map(self._wanted, [*first, self._start]))
        stored = [layer_set for layer_set in known if layer_set != self.layer_set]
        n = len(self.trials)
        self._standing = Standing(Incumbent(self.layer_set), first=stored, opened_at=n, n_at_gain=n)
        self._windows = []
        self._candidate_rows += 0 if self._proposer is None else round(self._proposer.rows_run)
        self._proposer = self._new_proposer()
        return True

    def finish(self, reason: str) -> None:
        """End the search, if it has not ended yet."""
        if self.optimising:
            self.stopped_because = reason
            self.close()

    def choose_drafting(self) -> Iterator[Event]:
        """Once the search has ended, choose stop threshold, draft length and branching for the set in use.

        To be called between prompts: `method` is another one afterwards. Adaptive drafts need none of the three.
        """
        settings = self.settings
        wanted = settings.search_drafting and settings.method == "swift" and settings.objective == "expected_speedup"
        if self.optimising or not wanted or self.costs is None or len(self._windows) < FEWEST_WINDOWS:
            return
        found, promised, before = search_drafting(
            self._windows, self.layer_set, settings, self.costs, self._longest_draft
        )
        self._windows = []
        if found != settings:
            self._draft_by(found)
            chosen = found.stop_threshold, found.max_draft_length, found.branching
            yield DraftingChosen(self.task, *chosen, promised, before)

    def _draft_by(self, settings: SwiftSettings) -> None:
        self.settings = settings
        self.method = drafting_with(self._draft, settings, self.costs)

    def close(self) -> None:
        """Free what the strategy holds, whether the search has ended or was cut short."""
        if self._proposer is not None:
            self._proposer.strategy.close()

    def state(self) -> dict[str, Any]:
        """Where the search stands between two passes, as JSON values, without its trials."""
        return {
            "n_trials": len(self.trials),
            "skip_ratio": self.skip_ratio,
            "n_rounds": self._n_rounds,
            "standing": self._standing.to_json(),
            "stopped_because": self.stopped_because,
            "windows": [[list(score.ranks), list(score.confidences)] for score in self._windows],
            "drafting": [self.settings.stop_threshold, self.settings.max_draft_length, list(self.settings.branching)],
            "learnt": self.method.drafter.state(),
            "strategy": None if self._proposer is None or not self.optimising else self._proposer.strategy.state(),
        }

    def restore(self, state: Mapping[str, Any], trials: Sequence[Trial]) -> None:
        """Go on from the `state` of a search of the same settings, and the trials it had made by then, in their order.

        Raises: KeyError, TypeError, ValueError: they are no such state, or not its trials.
        """
        if [trial.step for trial in trials] != list(range(state["n_trials"])):
            raise ValueError(f"task {self.task!r} stood at {state['n_trials']} trials, but {len(trials)} are stored")
        self.trials, self.skip_ratio, self._n_rounds = list(trials), state["skip_ratio"], state["n_rounds"]
        self._standing = Standing.from_json(state["standing"])
        self._windows = [WindowScore(tuple(ranks), tuple(sure)) for ranks, sure in state["windows"]]
        threshold, length, branching = state["drafting"]
        pairs = tuple((bound, k) for bound, k in branching)
        self._draft_by(replace(self.settings, stop_threshold=threshold, max_draft_length=length, branching=pairs))
        if state["learnt"] is not None:
            self.method.drafter.restore(state["learnt"])
        self._draft.layer_set = self.layer_set
        self.stopped_because = state["stopped_because"]
        if self._proposer is not None and self.optimising:
            for trial in self.trials[self._standing.opened_at :]:
                self._proposer.strategy.observe(trial)
            self._proposer.strategy.restore(state["strategy"])

    @property
    def _never(self) -> str:
        """Why there is no search at all; "" where there is one."""
        if not self.settings.optimise:
            return "optimisation is switched off"
        return "" if self.settings.max_steps else "no candidates were asked for"

    def _new_proposer(self) -> Proposer:
        project = self._wanted if self.settings.exportable else None
        return Proposer(self.settings, self.costs, self.layer_set, self.skip_ratio, project)

    def _wanted(self, layer_set: LayerSet) -> LayerSet:
        """Return the set, or the nearest one that is a checkpoint where only such are searched."""
        return nearest(layer_set, self._parallel, most=1)[0] if self.settings.exportable else layer_set

    def _sets(self, context: Context, place: Place) -> list[Proposal]:
        """What the next pass scores, each with its origin: what must be scored now comes before what is proposed."""
        assert self._proposer is not None
        standing, n_tried = self._standing, len(self.trials) - self._standing.opened_at
        room = self._most - n_tried
        held = Proposal(self.layer_set, "in use" if self.trials else "uniform")
        due = standing.finals.due(place, self.settings.context_window)
        if self._by_rating and (best := self._proposer.strategy.best(self.layer_set)) != self.layer_set:
            due = [best]
        if standing.incumbent.n == 0:
            due, sets = [], [Proposal(self.layer_set, "trimmed") if n_tried else held]
        elif (due or self._proposer.paired) and len(due) + 1 < room:
            sets = [held, *(Proposal(layer_set, "final") for layer_set in due)]
        else:
            due, sets = [], []
        room -= len(sets)
        n = min(self._proposer.n_beside(len(due), self.batch, len(sets)), room)
        stored = standing.take_first(n)
        sets += [Proposal(own, "uniform" if own == self._start else "stored") for own in stored]
        return sets + self._proposer.proposed(context, place.prompt_id, n - len(stored))

    def _trials_of(
        self, place: Place, sets: Sequence[Proposal], scores: Sequence[WindowScore], began: float
    ) -> list[Trial]:
        """Describe the sets that one pass scored, which `began` at that time, and what their predictions are worth."""
        worths = [
            objective(score, own, self.settings, self.costs) for (own, _), score in zip(sets, scores, strict=True)
        ]
        share = (perf_counter() - began) / len(sets)
        return [
            Trial(
                step=len(self.trials) + i,
                layer_set=layer_set,
                origin=origin,
                matchness=scores[i].matchness,
                score=worths[i],
                prompt_id=place.prompt_id,
                position=place.position,
                seed=self.settings.seed,
                seconds=share,
            )
            for i, (layer_set, origin) in enumerate(sets)
        ]

    def _settle(self, place: Place, trials: list[Trial], scores: Sequence[WindowScore]) -> list[Event]:
        """Show the strategy the trials, take a better set into use, and see whether the search is over.

        `scores` are what the trials' sets predicted. Returns the events, `TrialsDone` last.
        """
        events: list[Event] = []
        assert self._proposer is not None
        standing, strategy, n_before = self._standing, self._proposer.strategy, len(self.trials)
        finalists = [trial for trial in trials if trial.origin == "final" and not self._by_rating]
        by_finals = self.settings.adoption == "finals" and not self._by_rating
        decided = None
        for trial in trials:
            strategy.observe(trial)
        if self.settings.adoption == "highest":
            decided = standing.take_highest(trials)
        elif trials[0].layer_set == self.layer_set:
            decided = standing.judge(place, trials[0], finalists)
        if self._by_rating:
            decided = standing.take_best(strategy.best(self.layer_set), trials, self.trials[standing.opened_at :])
        if decided is not None:
            trials = [decided if trial.step == decided.step else trial for trial in trials]
            self._draft.layer_set = self.layer_set
            self._windows = []
            events.append(Adopted(self.task, self.layer_set, self.matchness, decided.step))
        if self.settings.search_drafting:
            seen = [score for trial, score in zip(trials, scores, strict=True) if trial.layer_set == self.layer_set]
            self._windows = [*self._windows, *seen[:1]][-MOST_WINDOWS:]
        self.trials += trials
        fresh = [trial for trial in trials if trial.origin != "final" and trial.layer_set != self.layer_set]
        if by_finals and fresh and not self._spent(n_before):
            standing.admit(place, fresh)
        self._check_end()
        return [*events, TrialsDone(self.task, tuple(trials))]

    @property
    def _by_rating(self) -> bool:
        """Whether sets are judged by what all trials say of them, in place of wins over single windows."""
        return self.settings.adoption == "finals" and self._proposer is not None and self._proposer.paired

    def _spent(self, n_tried: int) -> bool:
        """Whether as many candidates as are waited for have brought nothing."""
        assert self._proposer is not None
        return n_tried - self._standing.n_at_gain >= self._proposer.patience

    def _check_end(self) -> None:
        assert self._proposer is not None
        settings, n = self.settings, len(self.trials)
        n_tried, matchness = n - self._standing.opened_at, self._standing.incumbent.matchness
        if not self._proposer.chooses_size and matchness > settings.target_matchness:
            self.finish(f"matchness {matchness:.2f} is above {settings.target_matchness}")
        elif n_tried >= self._most:
            enough = "" if n_tried >= settings.max_steps else ", as many as a stream of this length is worth"
            self.finish(f"{n_tried} candidates were scored{enough}")
        elif self._spent(n) and not self._standing.finals.finalists:
            self.finish(f"no better layer set in {self._proposer.patience} candidates")

    def _lower(self, skip_ratio: float) -> None:
        """Go on with fewer skipped sub-layers, starting from the set in use without some of them."""
        assert self._proposer is not None
        self.skip_ratio = skip_ratio
        n_skipped = n_skipped_for(self.n_layers, skip_ratio)
        self._proposer.strategy.set_n_skipped(n_skipped)
        self._standing.incumbent = Incumbent(self._wanted(trimmed(self.layer_set, n_skipped)))
        self._standing.finals = Finals()
        self._draft.layer_set = self.layer_set
        self._windows = []
