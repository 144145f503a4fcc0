"""One task's search: the layer set in use, the trials, and the stopping rules (SWIFT 4.1, B.2, C.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter
from typing import Any, TypeVar

from ..core.costs import CostProfile, CostSource
from ..core.events import Adopted, DraftingChosen, Event, SkipRatioLowered, TrialsDone
from ..core.layer_sets import LayerSet, SubLayer
from ..core.settings import SwiftSettings
from ..core.types import Prompt, Trial
from ..decoding.context import Context, ResumePoint
from ..decoding.draft_models import SkippedTarget
from ..decoding.events import Prefilled, Round, Turn, WorkEvent
from ..decoding.session import Session
from ..decoding.work import PassGenerator, Subscriber, Work, subscribed
from ..models.costs import is_out_of_memory
from ..models.restacked import nearest
from .challengers import FINALISTS, ChallengerTest, Finals, Incumbent, WindowStart, trim
from .drafting import MAX_WINDOWS, MIN_WINDOWS, drafting_with, search_drafting, starting_set
from .evaluation import (
    MIN_CANDIDATES_REOPENED,
    WindowScore,
    affordable_candidates,
    candidates_in_share,
    candidates_per_pass,
    objective,
    score_window,
)
from .proposer import MIN_PAIRED_SETS, Proposer, chooses_size
from .strategies import Proposal, strategy_info

T = TypeVar("T")


class Search:
    """Proposes, scores and adopts layer sets between rounds of decoding, until one of the stopping rules holds.

    `method` drafts with the set in use; `during` searches while a request is decoded.

    Args: whole: the model, as a set that leaves nothing out. sub_layers: those that a set may leave out.
          start: the set to begin with, whose formats every candidate keeps; None: evenly spaced sub-layers by
          `skip_ratio`. n_tokens: how long the stream will be, where that is known: strategies that choose the size are
          kept to a share of it. parallel: attention and MLP read the same values, for `settings.exportable`.
          whole_layers: a set leaves out both sub-layers of a layer, or none.
    """

    def __init__(
        self,
        task: str,
        whole: LayerSet,
        sub_layers: tuple[SubLayer, ...],
        settings: SwiftSettings,
        skip_ratio: float,
        costs: CostSource | None,
        start: LayerSet | None = None,
        n_tokens: int | None = None,
        parallel: bool = False,
        whole_layers: bool = False,
    ) -> None:
        self.task, self.settings, self._cost_source = task, settings, costs
        self._longest_draft = settings.max_draft_length  # Upper bound for draft lengths that the search chooses.
        self.skip_ratio, self._parallel = skip_ratio, parallel
        self._sub_layers, self._whole_layers = sub_layers, whole_layers
        profile = self.costs
        drafting = settings, self._n_skipped_for(skip_ratio), chooses_size(settings, profile)
        start = start or starting_set(whole, *drafting, self._sub_layers)
        start = self._nearest_allowed(replace(start, absent=whole.absent))
        self._start = start
        self._draft = SkippedTarget(start)
        self.method = drafting_with(self._draft, settings, costs)
        self.trials: list[Trial] = []
        self.batch = settings.candidates or candidates_per_pass(profile, settings.context_window)
        self._incumbent_scores: list[WindowScore] = []  # Latest windows predicted by the set in use, oldest first.
        self.stopped_because = self._why_switched_off
        self._max_candidates = settings.max_steps  # Maximum candidates scored in one search.
        self._is_budgeted = n_tokens is not None and strategy_info(settings.strategy).chooses_size
        if n_tokens is not None and self._is_budgeted:
            self._max_candidates = min(
                self._max_candidates, affordable_candidates(profile, start, settings.context_window, n_tokens)
            )
        self._challengers = ChallengerTest(Incumbent(start))
        self._candidate_rows = 0
        self._n_rounds = 0  # Rounds of all requests so far.
        self._proposer = self._new_proposer()
        self._is_scoring = False

    @property
    def layer_set(self) -> LayerSet:
        """The layer set in use."""
        return self._challengers.incumbent.layer_set

    @property
    def optimising(self) -> bool:
        """Whether the search is still running."""
        return not self.stopped_because

    @property
    def matchness(self) -> float | None:
        """Mean matchness of the set in use over the windows it was scored on; None before its first."""
        return self._challengers.incumbent.matchness if self._challengers.incumbent.n else None

    @property
    def scratch_rows(self) -> int:
        """Buffer slots after the committed ones that `score` needs for a full batch."""
        return self._scratch_rows(self.batch) if self.optimising else 0

    def _scratch_rows(self, batch: int) -> int:
        # The set in use, plus either a batch of candidates or all finalists and one candidate.
        n_sets = 1 + max(batch, FINALISTS + 1)
        return max(self.settings.context_window * n_sets, self._proposer.scratch_rows)

    @property
    def rows_run(self) -> float:
        """Cost of the search so far in rows of the full model; studies count by the share of the model they ran."""
        return self._candidate_rows + self._proposer.rows_run

    def rows_ahead(self, prompt_id: str) -> int:
        """Maximum rows that the next scoring pass runs on this prompt, including those of a study if one is due."""
        n_sets = 1 + max(self.batch, MIN_PAIRED_SETS)
        return self.settings.context_window * n_sets + self._proposer.max_rows_ahead(prompt_id)

    def request(
        self,
        session: Session,
        prompt: Prompt,
        answers: Sequence[str] = (),
        resume_from: ResumePoint | None = None,
        on_event: Subscriber = lambda event: None,
        **options: Any,
    ) -> Work[list[Turn]]:
        """Decode a prompt with the set in use, and search meanwhile; see `Session.request` and `during`."""
        options["scratch_rows"] = self.scratch_rows
        request = session.request(prompt, self.method, answers, resume_from, **options)
        return self.during(request, prompt.id, on_event)

    def during(self, request: Work[T], prompt_id: str, on_event: Subscriber = lambda event: None) -> Work[T]:
        """Decode a request, and search after its prefill and after its rounds; reports the search's events, too.

        The request should have `scratch_rows`. Several may run at once: one at a time has candidates scored.

        Args: on_event: gets each event of the request, and what comes of it before the search looks at the request, and
              each event of that look.
        """
        # Scratch slots are reserved when a request starts: a search that starts later cannot use this request.
        has_room = bool(self.scratch_rows)

        def follow(event: WorkEvent) -> Work[None]:
            if isinstance(event, Round):
                self._n_rounds += 1
                yield from self.lower(event)
            yield from on_event(event) or ()
            if has_room and isinstance(event, Prefilled | Round) and event.context.finish is None:
                for search_event in (yield from self.score(event.context, prompt_id)):
                    yield from on_event(search_event) or ()
                    yield search_event

        return subscribed(request, follow)

    def score(self, context: Context, prompt_id: str) -> PassGenerator[Sequence[Event]]:
        """Score candidates in one pass, once the context window is full; at most once between two rounds.

        They are as many as the request's buffer has slots for. A pass that does not fit in memory is given up, and
        later ones score half as many. Returns the events that come of it.
        """
        settings = self.settings
        window, must_wait = settings.context_window, self._n_rounds % settings.optimise_interval > 0
        if not self.optimising or self._is_scoring or context.searched or must_wait or len(context.generated) < window:
            return ()
        n_free_slots = context.buffer.capacity - context.root_slot
        if n_free_slots < self._scratch_rows(1):
            return ()
        batch = min(self.batch, n_free_slots // window - 1)  # One window of scratch slots is for the set in use.
        context.searched = True  # If this request is interrupted and resumed, it is not searched again.
        start = context.n_prompt if settings.window_at == "first" else len(context.token_ids) - window
        window_start = WindowStart(prompt_id, start)
        if self._proposer.paired and not self._challengers.is_new_window(window_start, window):
            return ()
        started = perf_counter()
        try:
            return (yield from self._score_pass(context, window_start, batch))
        finally:
            context.tally.optimise_s += perf_counter() - started

    def _score_pass(self, context: Context, place: WindowStart, batch: int) -> PassGenerator[list[Event]]:
        """Score up to `batch` candidates together with the set in use; return the resulting events."""
        started, incumbent, window = perf_counter(), self._challengers.incumbent, self.settings.context_window
        self._is_scoring = True
        try:
            self._challengers.looked = place
            proposals = self._choose_sets(context, place, batch)
            scores = yield from score_window(context, [layer_set for layer_set, _ in proposals], window, place.position)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.batch = batch // 2  # Later passes use a smaller batch; this request goes on decoding.
            if not self.batch:
                self.finish("the memory is too small for the pass of a candidate")
            return []
        finally:
            self._is_scoring = False
        # A concurrent request has ended the search or replaced the set in use during this pass, so discard the scores.
        if self.stopped_because or self._challengers.incumbent is not incumbent:
            return []
        self._candidate_rows += window * len(proposals)
        return self._settle(place, self._make_trials(place, proposals, scores, started), scores)

    def lower(self, round_: Round) -> Iterator[Event]:
        """Lower the skip ratio if acceptance stays too low (SWIFT C.2), unless the strategy chooses the size."""
        if not self.optimising or self._proposer.chooses_size:
            return
        settings, n_before = self.settings, self.layer_set.n_skipped
        acceptance = self._challengers.incumbent.acceptance_after(round_, settings.min_acceptance_rounds)
        if acceptance is None or acceptance >= settings.min_acceptance:
            return
        new_ratio = self.skip_ratio - settings.skip_ratio_step
        # A single step of the ratio may not change the number of skipped sub-layers.
        while 0 < n_before <= self._n_skipped_for(new_ratio):
            new_ratio -= settings.skip_ratio_step
        n_skipped = self._n_skipped_for(new_ratio)
        if 0 < n_skipped < n_before:
            self.skip_ratio = new_ratio
            self._proposer.strategy.set_n_skipped(n_skipped)
            self._challengers.incumbent = Incumbent(self._nearest_allowed(trim(self.layer_set, n_skipped)))
            self._challengers.finals = Finals()
            self._draft_with_incumbent()
            yield SkipRatioLowered(self.task, new_ratio, acceptance)

    def reopen(self, first: Sequence[LayerSet] = ()) -> bool:
        """Restart the search from the set in use; the sets of `first` are scored before any other.

        The set that the search began with follows them: what was thinned out for one text may be too thin for the next,
        and a search that only goes on from there takes long to return. Nothing that was tried before counts, as the
        text has changed. The budget is whole at the first shift of a stream; later ones have what is left of that, and
        what fits in the search's share of the rounds so far.

        Returns: whether a search has begun; none does where none was wanted.
        """
        if self._why_switched_off:
            return False
        self.close()
        self.stopped_because = ""
        candidate_sets = dict.fromkeys(map(self._nearest_allowed, [*first, self._start]))
        stored = [layer_set for layer_set in candidate_sets if layer_set != self.layer_set]
        n_trials = len(self.trials)
        self._challengers = ChallengerTest(
            Incumbent(self.layer_set), first=stored, opened_at=n_trials, n_at_gain=n_trials
        )
        self._incumbent_scores = []
        self._candidate_rows += round(self._proposer.rows_run)
        self._proposer = self._new_proposer()
        return True

    def finish(self, reason: str) -> None:
        """End the search, if it has not ended yet."""
        if self.optimising:
            self.stopped_because = reason
            self.close()

    @property
    def contenders(self) -> list[LayerSet]:
        """Sets ranked by estimates only, to be compared by time, the one in use first; [] if scores decide."""
        ranks_by_estimate = self._proposer.chooses_size and self.settings.adoption == "finals"
        sets = list(dict.fromkeys([self.layer_set, self._start]))
        return sets if ranks_by_estimate and not self.settings.deterministic and len(sets) > 1 else []

    def take(self, layer_set: LayerSet) -> None:
        """Put a set in use that was measured to be faster."""
        if layer_set != self.layer_set:
            self._challengers.take(layer_set, self.trials[self._challengers.opened_at :])
            self._draft_with_incumbent()

    def choose_drafting(self) -> Iterator[Event]:
        """Once the search has ended, choose stop threshold, draft length and branching for the set in use.

        Call it between prompts, as it replaces `method`. Adaptive drafts need none of the three.
        """
        settings = self.settings
        is_searched = (
            settings.search_drafting and settings.method == "swift" and settings.objective == "expected_speedup"
        )
        if self.optimising or not is_searched or self.costs is None or len(self._incumbent_scores) < MIN_WINDOWS:
            return
        chosen_settings, expected_after, expected_before = search_drafting(
            self._incumbent_scores, self.layer_set, settings, self.costs, self._longest_draft
        )
        self._incumbent_scores = []
        if chosen_settings != settings:
            self._draft_by(chosen_settings)
            chosen_values = chosen_settings.stop_threshold, chosen_settings.max_draft_length, chosen_settings.branching
            yield DraftingChosen(self.task, *chosen_values, expected_after, expected_before)

    def _draft_by(self, settings: SwiftSettings) -> None:
        self.settings = settings
        self.method = drafting_with(self._draft, settings, self._cost_source)

    def close(self) -> None:
        """Free the strategy's resources, even if the search was cut short."""
        self._proposer.strategy.close()

    def state(self) -> dict[str, Any]:
        """Return the position between two passes as JSON values, without the trials."""
        return {
            "n_trials": len(self.trials),
            "skip_ratio": self.skip_ratio,
            "n_rounds": self._n_rounds,
            "standing": self._challengers.to_json(),
            "stopped_because": self.stopped_because,
            "windows": [
                [list(score.ranks), list(score.confidences), score.reads_late] for score in self._incumbent_scores
            ],
            "drafting": [self.settings.stop_threshold, self.settings.max_draft_length, list(self.settings.branching)],
            "learnt": self.method.drafter.state(),
            "strategy": self._proposer.strategy.state() if self.optimising else None,
        }

    def restore(self, state: Mapping[str, Any], trials: Sequence[Trial]) -> None:
        """Continue from the `state` of a search of the same settings, and its trials by then, in their order.

        Raises: KeyError, TypeError, ValueError: they are no such state, or not its trials.
        """
        if [trial.step for trial in trials] != list(range(state["n_trials"])):
            raise ValueError(f"task {self.task!r} stood at {state['n_trials']} trials, but {len(trials)} are stored")
        self.trials, self.skip_ratio, self._n_rounds = list(trials), state["skip_ratio"], state["n_rounds"]
        self._challengers = ChallengerTest.from_json(state["standing"])
        self._incumbent_scores = [
            WindowScore(tuple(ranks), tuple(confidences), *reads_late)
            for ranks, confidences, *reads_late in state["windows"]
        ]
        threshold, max_draft_length, branching = state["drafting"]
        branching_pairs = tuple((bound, n_candidates) for bound, n_candidates in branching)
        self._draft_by(
            replace(
                self.settings, stop_threshold=threshold, max_draft_length=max_draft_length, branching=branching_pairs
            )
        )
        if state["learnt"] is not None:
            self.method.drafter.restore(state["learnt"])
        self._draft.layer_set = self.layer_set
        self.stopped_because = state["stopped_because"]
        if self.optimising:
            for trial in self.trials[self._challengers.opened_at :]:
                self._proposer.strategy.observe(trial)
            self._proposer.strategy.restore(state["strategy"])

    @property
    def costs(self) -> CostProfile | None:
        """The latest costs of passes in a typical context; None if none were measured."""
        return None if self._cost_source is None else self._cost_source.at()

    @property
    def _budget(self) -> int:
        """Maximum number of candidates that this search may score since its latest start."""
        opened_at = self._challengers.opened_at
        if not opened_at or not self._is_budgeted:
            return self._max_candidates
        n_affordable = candidates_in_share(self.costs, self._start, self.settings.context_window, self._n_rounds)
        return min(
            self._max_candidates, max(MIN_CANDIDATES_REOPENED, 2 * self._max_candidates + n_affordable - opened_at)
        )

    @property
    def _why_switched_off(self) -> str:
        """Reason why no search takes place; "" if one does."""
        if not self.settings.optimise:
            return "optimisation is switched off"
        return "" if self.settings.max_steps else "no candidates were asked for"

    def _new_proposer(self) -> Proposer:
        project = self._nearest_allowed if self.settings.exportable or self._whole_layers else None
        space = self.skip_ratio, project, self._whole_layers, self._sub_layers
        return Proposer(self.settings, self.costs, self.layer_set, *space)

    def _n_skipped_for(self, skip_ratio: float) -> int:
        """Return how many sub-layers a share of those that a set may leave out is, rounded to the nearest."""
        return round(skip_ratio * len(self._sub_layers))

    def _nearest_allowed(self, layer_set: LayerSet) -> LayerSet:
        """Return the set itself, or the nearest one if only exportable sets are searched, or those of whole layers."""
        if self.settings.exportable:
            return nearest(layer_set, self._parallel or self._whole_layers, most=1)[0]
        return layer_set.in_whole_layers() if self._whole_layers else layer_set

    def _choose_sets(self, context: Context, window_start: WindowStart, batch: int) -> list[Proposal]:
        """Return the sets that the next pass scores, with origins: due finalists before new proposals."""
        challengers, n_tried = self._challengers, len(self.trials) - self._challengers.opened_at
        n_left = self._budget - n_tried
        incumbent_proposal = Proposal(self.layer_set, "in use" if self.trials else "uniform")
        due_sets = challengers.finals.due(window_start, self.settings.context_window)
        if self._adopts_by_rating and (best_set := self._proposer.strategy.best(self.layer_set)) != self.layer_set:
            due_sets = [best_set]
        if challengers.incumbent.n == 0:
            due_sets, proposals = [], [Proposal(self.layer_set, "trimmed") if n_tried else incumbent_proposal]
        elif (due_sets or self._proposer.paired) and len(due_sets) + 1 < n_left:
            proposals = [incumbent_proposal, *(Proposal(layer_set, "final") for layer_set in due_sets)]
        else:
            due_sets, proposals = [], []
        n_left -= len(proposals)
        n_new = min(self._proposer.n_beside(len(due_sets), batch, len(proposals)), n_left)
        stored = challengers.first[:n_new]  # Sets stay in `first` until they are scored.
        proposals += [
            Proposal(stored_set, "uniform" if stored_set == self._start else "stored") for stored_set in stored
        ]
        return proposals + self._proposer.next_candidates(context, window_start.prompt_id, n_new - len(stored))

    def _make_trials(
        self, window_start: WindowStart, proposals: Sequence[Proposal], scores: Sequence[WindowScore], started: float
    ) -> list[Trial]:
        """Return the trials of one scoring pass, which started at `started`."""
        objectives = [
            objective(score, proposal[0], self.settings, self.costs)
            for proposal, score in zip(proposals, scores, strict=True)
        ]
        seconds_each = (perf_counter() - started) / len(proposals)
        prompt_id, position, seed = window_start.prompt_id, window_start.position, self.settings.seed
        return [
            Trial(
                step,
                proposal,
                origin,
                score.matchness,
                objective_value,
                prompt_id,
                position,
                seed,
                seconds=seconds_each,
            )
            for step, (proposal, origin), score, objective_value in zip(
                count(len(self.trials)), proposals, scores, objectives, strict=False
            )
        ]

    def _settle(self, window_start: WindowStart, trials: list[Trial], scores: Sequence[WindowScore]) -> list[Event]:
        """Show the strategy the trials, adopt a better set, and check whether the search is over.

        `scores` are what the trials' sets predicted. Returns the events, `TrialsDone` last.
        """
        events: list[Event] = []
        challengers, strategy, n_before = self._challengers, self._proposer.strategy, len(self.trials)
        finalists = [trial for trial in trials if trial.origin == "final" and not self._adopts_by_rating]
        adopts_by_finals = self.settings.adoption == "finals" and not self._adopts_by_rating
        adopted = None
        for trial in trials:
            strategy.observe(trial)
        challengers.first = [
            stored_set for stored_set in challengers.first if stored_set not in {trial.layer_set for trial in trials}
        ]
        if self.settings.adoption == "highest":
            adopted = challengers.take_highest(trials)
        elif trials[0].layer_set == self.layer_set:
            adopted = challengers.judge(window_start, trials[0], finalists)
        if self._adopts_by_rating:
            adopted = challengers.take_best(strategy.best(self.layer_set), trials, self.trials[challengers.opened_at :])
        if adopted is not None:
            trials = [adopted if trial.step == adopted.step else trial for trial in trials]
            self._draft_with_incumbent()
            events.append(Adopted(self.task, self.layer_set, self.matchness, adopted.step))
        if self.settings.search_drafting:
            incumbent_scores = [
                score for trial, score in zip(trials, scores, strict=True) if trial.layer_set == self.layer_set
            ]
            self._incumbent_scores = [*self._incumbent_scores, *incumbent_scores[:1]][-MAX_WINDOWS:]
        self.trials += trials
        new_challengers = [trial for trial in trials if trial.origin != "final" and trial.layer_set != self.layer_set]
        if adopts_by_finals and new_challengers and not self._has_stalled(n_before):
            challengers.finals.enter(
                {trial.layer_set: trial.score for trial in new_challengers}, window_start, challengers.incumbent.score
            )
        self._check_end()
        return [*events, TrialsDone(self.task, tuple(trials))]

    @property
    def _adopts_by_rating(self) -> bool:
        """Whether sets are adopted by the strategy's estimate from all trials, not by wins on single windows."""
        return self.settings.adoption == "finals" and self._proposer.paired

    def _has_stalled(self, n_tried: int) -> bool:
        """Whether the last `patience` candidates brought no better set."""
        return n_tried - self._challengers.n_at_gain >= self._proposer.patience

    def _check_end(self) -> None:
        settings, n_trials = self.settings, len(self.trials)
        n_tried, matchness = n_trials - self._challengers.opened_at, self._challengers.incumbent.matchness
        if not self._proposer.chooses_size and matchness > settings.target_matchness:
            self.finish(f"matchness {matchness:.2f} is above {settings.target_matchness}")
        elif n_tried >= self._budget:
            limit_note = "" if n_tried >= settings.max_steps else ", the limit for this stream"
            self.finish(f"{n_tried} candidates were scored{limit_note}")
        elif self._has_stalled(n_trials) and not self._challengers.finals.finalists:
            self.finish(f"no better layer set in {self._proposer.patience} candidates")

    def _draft_with_incumbent(self) -> None:
        self._draft.layer_set = self.layer_set
        self._incumbent_scores = []
