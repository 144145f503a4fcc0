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
    DRAFT_BLOCK,
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
    """Proposes, scores and adopts layer sets between rounds of decoding, until a stopping rule ends it.

    `method` drafts with the set in use. `during` searches while a request is decoded.

    Args: whole: the layer set of the full model, which skips nothing. sub_layers: those that a set may skip.
          start: the first set in use; every candidate keeps its formats. None: skip evenly spaced sub-layers, as many
          as `skip_ratio` says. n_tokens: expected length of the stream. If given, strategies that choose the number of
          skipped sub-layers may use only a share of the stream's time. parallel: the model's attention and MLP read the
          same input (needed for `settings.exportable`). whole_layers: a set skips both sub-layers of a layer or
          neither.
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
        self._max_draft_length = settings.max_draft_length  # Upper bound for the draft lengths that are searched.
        self.skip_ratio, self._parallel = skip_ratio, parallel
        self._sub_layers, self._whole_layers = sub_layers, whole_layers
        profile, window = self.costs, settings.context_window
        if start is None:
            n_skipped = self._n_skipped_for(skip_ratio)
            start = starting_set(whole, settings, n_skipped, chooses_size(settings, profile), sub_layers)
        self._start = start = self._nearest_allowed(replace(start, absent=whole.absent))
        self._draft = SkippedTarget(start)
        self.method = drafting_with(self._draft, settings, costs)
        self.trials: list[Trial] = []
        self.batch = settings.candidates or candidates_per_pass(profile, window)  # Candidates per scoring pass.
        self._incumbent_scores: list[WindowScore] = []  # Latest windows predicted by the set in use, oldest first.
        self.stopped_because = self._off_reason
        self._max_candidates = settings.max_steps  # Maximum candidates scored in one search.
        self._is_budgeted = n_tokens is not None and strategy_info(settings.strategy).chooses_size
        if n_tokens is not None and self._is_budgeted:
            self._max_candidates = min(self._max_candidates, affordable_candidates(profile, start, window, n_tokens))
        self._challengers = ChallengerTest(Incumbent(start))
        self._candidate_rows = 0  # Rows that scored candidates.
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
        """Mean matchness of the set in use over the windows it was scored on; None if it was not scored yet."""
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
        """Cost of the search so far, in rows of the full model. A study counts the share of the model that it ran."""
        return self._candidate_rows + self._proposer.rows_run

    def max_scoring_rows(self, prompt_id: str) -> int:
        """Return an upper bound of the rows that the next scoring pass runs on this prompt, with a study if due."""
        n_sets = 1 + max(self.batch, MIN_PAIRED_SETS)
        return self.settings.context_window * n_sets + self._proposer.study_row_limit(prompt_id)

    def request(
        self,
        session: Session,
        prompt: Prompt,
        answers: Sequence[str] = (),
        resume_from: ResumePoint | None = None,
        on_event: Subscriber = lambda event: None,
        **options: Any,
    ) -> Work[list[Turn]]:
        """Decode a prompt with the set in use while searching; arguments as for `Session.request` and `during`."""
        options["scratch_rows"] = self.scratch_rows
        request = session.request(prompt, self.method, answers, resume_from, **options)
        return self.during(request, prompt.id, on_event)

    def during(self, request: Work[T], prompt_id: str, on_event: Subscriber = lambda event: None) -> Work[T]:
        """Decode a request, and score candidates after its prefill and its rounds; also yields the search's events.

        The request must have been started with `scratch_rows` scratch slots. Several requests may run at once; only one
        of them scores candidates at a time.

        Args: on_event: called with each event of the request before candidates are scored after it, then with each
              event of that scoring.
        """
        # Scratch slots are reserved when a request starts: a search that starts later cannot use this request.
        has_scratch_slots = bool(self.scratch_rows)

        def follow(event: WorkEvent) -> Work[None]:
            if isinstance(event, Round):
                self._n_rounds += 1
                yield from self.lower_skip_ratio(event)
            yield from on_event(event) or ()
            if has_scratch_slots and isinstance(event, Prefilled | Round) and event.context.finish is None:
                for search_event in (yield from self.score(event.context, prompt_id)):
                    yield from on_event(search_event) or ()
                    yield search_event

        return subscribed(request, follow)

    def score(self, context: Context, prompt_id: str) -> PassGenerator[Sequence[Event]]:
        """Score candidates in one pass, if the context window is full and none were scored since the latest round.

        The free slots of the request's buffer limit the number of candidates. If the pass does not fit in memory, it is
        dropped, and later passes score half as many.

        Returns: the resulting events.
        """
        settings, window = self.settings, self.settings.context_window
        is_due = self._n_rounds % settings.optimise_interval == 0 and not context.searched
        if not self.optimising or self._is_scoring or not is_due or len(context.generated) < window:
            return ()
        n_free_slots = context.buffer.capacity - context.root_slot
        if n_free_slots < self._scratch_rows(1):
            return ()
        batch = min(self.batch, n_free_slots // window - 1)  # One window of scratch slots is for the set in use.
        context.searched = True  # Saved with the request: when it is resumed, this round is not searched again.
        start = context.n_prompt if settings.window_at == "first" else len(context.token_ids) - window
        window_start = WindowStart(prompt_id, start)
        if self._proposer.paired and not self._challengers.is_new_window(window_start, window):
            return ()
        started = perf_counter()
        try:
            return (yield from self._score_pass(context, window_start, batch))
        finally:
            context.tally.optimise_s += perf_counter() - started

    def _score_pass(self, context: Context, window_start: WindowStart, batch: int) -> PassGenerator[list[Event]]:
        """Score up to `batch` candidates together with the set in use; return the resulting events."""
        started, incumbent, window = perf_counter(), self._challengers.incumbent, self.settings.context_window
        self._is_scoring = True
        try:
            self._challengers.latest_window = window_start
            proposals = self._choose_sets(context, window_start, batch)
            layer_sets = [proposal.layer_set for proposal in proposals]
            block = window if self.settings.objective == "matchness" else DRAFT_BLOCK
            scores = yield from score_window(context, layer_sets, window, window_start.position, block)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.batch = batch // 2  # Later passes use a smaller batch. The request itself goes on.
            if not self.batch:
                self.finish("a scoring pass with one candidate does not fit in memory")
            return []
        finally:
            self._is_scoring = False
        # If a concurrent request ended the search or replaced the set in use during this pass, discard the scores.
        if self.stopped_because or self._challengers.incumbent is not incumbent:
            return []
        self._candidate_rows += window * len(proposals)
        trials = self._make_trials(window_start, proposals, scores, started)
        return self._process_trials(window_start, trials, scores)

    def lower_skip_ratio(self, round_: Round) -> Iterator[Event]:
        """Lower the skip ratio if α stays too low (SWIFT C.2), unless the strategy chooses the number of sub-layers."""
        if not self.optimising or self._proposer.chooses_size:
            return
        settings, n_before = self.settings, self.layer_set.n_skipped
        acceptance = self._challengers.incumbent.acceptance_after(round_, settings.min_acceptance_rounds)
        if acceptance is None or acceptance >= settings.min_acceptance:
            return
        new_ratio = self.skip_ratio - settings.skip_ratio_step
        # One step may be too small to change the number of skipped sub-layers: repeat it until the number falls.
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

    def reopen(self, known_sets: Sequence[LayerSet] = ()) -> bool:
        """Restart the search from the set in use, because the text has changed; earlier trials no longer count.

        The first candidates are `known_sets`, then the set that the search began with. The set in use may skip too much
        for the new text, and proposals near it take long to get back to one that skips less.

        Returns: False if the search is switched off.
        """
        if self._off_reason:
            return False
        self.close()
        self.stopped_because = ""
        first_candidates = dict.fromkeys(map(self._nearest_allowed, [*known_sets, self._start]))
        first_candidates.pop(self.layer_set, None)
        n_trials = len(self.trials)
        self._challengers = ChallengerTest(
            Incumbent(self.layer_set), first=[*first_candidates], opened_at=n_trials, n_at_gain=n_trials
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
    def sets_to_time(self) -> list[LayerSet]:
        """The set in use and the first one, if only their estimated speedups were compared; else []."""
        ranks_by_estimate = self._proposer.chooses_size and self.settings.adoption == "finals"
        layer_sets = list(dict.fromkeys([self.layer_set, self._start]))
        return layer_sets if ranks_by_estimate and not self.settings.deterministic and len(layer_sets) > 1 else []

    def adopt(self, layer_set: LayerSet) -> None:
        """Put in use a set that was measured to be faster."""
        if layer_set != self.layer_set:
            self._challengers.adopt(layer_set, self.trials[self._challengers.opened_at :])
            self._draft_with_incumbent()

    def choose_drafting(self) -> Iterator[Event]:
        """After the search, choose stop threshold, draft length and branching of SWIFT's drafts for the set in use.

        Call it between prompts, because it replaces `method`.
        """
        settings = self.settings
        applies = settings.search_drafting and settings.method == "swift" and settings.objective == "expected_speedup"
        if self.optimising or not applies or self.costs is None or len(self._incumbent_scores) < MIN_WINDOWS:
            return
        best, expected_after, expected_before = search_drafting(
            self._incumbent_scores, self.layer_set, settings, self.costs, self._max_draft_length
        )
        self._incumbent_scores = []
        if best != settings:
            self._use_settings(best)
            chosen_values = best.stop_threshold, best.max_draft_length, best.branching
            yield DraftingChosen(self.task, *chosen_values, expected_after, expected_before)

    def _use_settings(self, settings: SwiftSettings) -> None:
        self.settings = settings
        self.method = drafting_with(self._draft, settings, self._cost_source)

    def close(self) -> None:
        """Free the strategy's resources, even if the search was cut short."""
        self._proposer.strategy.close()

    def state(self) -> dict[str, Any]:
        """Return the search's state between two passes as JSON values, without the trials."""
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
        """Continue from the `state` of a search with the same settings, and its trials up to then in order.

        Raises: KeyError, TypeError, ValueError: `state` is not such a state, or `trials` do not belong to it.
        """
        if [trial.step for trial in trials] != list(range(state["n_trials"])):
            raise ValueError(f"task {self.task!r} had {state['n_trials']} trials, but {len(trials)} are stored")
        self.trials, self.skip_ratio, self._n_rounds = list(trials), state["skip_ratio"], state["n_rounds"]
        self._challengers = ChallengerTest.from_json(state["standing"])
        self._incumbent_scores = [
            WindowScore(tuple(ranks), tuple(confidences), *reads_late)
            for ranks, confidences, *reads_late in state["windows"]
        ]
        threshold, max_draft_length, branching = state["drafting"]
        branching_pairs = tuple((bound, n_candidates) for bound, n_candidates in branching)
        changes = dict[str, Any](stop_threshold=threshold, max_draft_length=max_draft_length, branching=branching_pairs)
        self._use_settings(replace(self.settings, **changes))
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
        """Maximum number of candidates that this search may score since it was last opened.

        After the first shift of a stream the full limit applies again. After later shifts, what is left of that
        applies, plus what the search's share of the rounds so far allows.
        """
        opened_at = self._challengers.opened_at
        if not opened_at or not self._is_budgeted:
            return self._max_candidates
        n_affordable = candidates_in_share(self.costs, self._start, self.settings.context_window, self._n_rounds)
        return min(
            self._max_candidates, max(MIN_CANDIDATES_REOPENED, 2 * self._max_candidates + n_affordable - opened_at)
        )

    @property
    def _off_reason(self) -> str:
        """Reason why the settings allow no search; "" if they allow one."""
        if not self.settings.optimise:
            return "optimisation is switched off"
        return "" if self.settings.max_steps else "max_steps is 0"

    def _new_proposer(self) -> Proposer:
        project = self._nearest_allowed if self.settings.exportable or self._whole_layers else None
        return Proposer(
            self.settings, self.costs, self.layer_set, self.skip_ratio, project, self._whole_layers, self._sub_layers
        )

    def _n_skipped_for(self, skip_ratio: float) -> int:
        """Return the number of sub-layers that a skip ratio stands for."""
        return round(skip_ratio * len(self._sub_layers))

    def _nearest_allowed(self, layer_set: LayerSet) -> LayerSet:
        """Return the set, or the nearest allowed one if only exportable sets or whole layers are searched."""
        if self.settings.exportable:
            return nearest(layer_set, self._parallel or self._whole_layers, most=1)[0]
        return layer_set.in_whole_layers() if self._whole_layers else layer_set

    def _choose_sets(self, context: Context, window_start: WindowStart, batch: int) -> list[Proposal]:
        """Return the sets that the next pass scores: the set in use, finalists, known sets, then new candidates.

        The set in use is scored on its first window, and whenever others are compared with it.
        """
        challengers, n_tried = self._challengers, len(self.trials) - self._challengers.opened_at
        n_left = self._budget - n_tried
        incumbent_proposal = Proposal(self.layer_set, "in use" if self.trials else "uniform")
        finalists = challengers.finals.due(window_start, self.settings.context_window)
        if self._adopts_by_rating and (best_set := self._proposer.strategy.best(self.layer_set)) != self.layer_set:
            finalists = [best_set]
        if challengers.incumbent.n == 0:
            finalists, proposals = [], [Proposal(self.layer_set, "trimmed") if n_tried else incumbent_proposal]
        elif (finalists or self._proposer.paired) and len(finalists) + 1 < n_left:
            proposals = [incumbent_proposal, *(Proposal(layer_set, "final") for layer_set in finalists)]
        else:
            finalists, proposals = [], []
        n_left -= len(proposals)
        n_new = min(self._proposer.n_new_candidates(len(finalists), batch, len(proposals)), n_left)
        known_sets = challengers.first[:n_new]  # They stay in `first` until they are scored.
        proposals += [Proposal(known, "uniform" if known == self._start else "stored") for known in known_sets]
        return proposals + self._proposer.next_candidates(context, window_start.prompt_id, n_new - len(known_sets))

    def _make_trials(
        self, window_start: WindowStart, proposals: Sequence[Proposal], scores: Sequence[WindowScore], started: float
    ) -> list[Trial]:
        """Return the trials of one scoring pass, which started at `started`."""
        objectives = [
            objective(score, proposal.layer_set, self.settings, self.costs)
            for proposal, score in zip(proposals, scores, strict=True)
        ]
        seconds_each = (perf_counter() - started) / len(proposals)
        prompt_id, position, seed = window_start.prompt_id, window_start.position, self.settings.seed
        return [
            Trial(step, layer_set, origin, score.matchness, value, prompt_id, position, seed, seconds=seconds_each)
            for step, (layer_set, origin), score, value in zip(
                count(len(self.trials)), proposals, scores, objectives, strict=False
            )
        ]

    def _process_trials(
        self, window_start: WindowStart, trials: list[Trial], scores: Sequence[WindowScore]
    ) -> list[Event]:
        """Let the strategy observe the trials, adopt a better set, and check whether the search is over.

        Args:    scores: the predictions of each trial's set.
        Returns: the events, `TrialsDone` last.
        """
        events: list[Event] = []
        challengers, n_before = self._challengers, len(self.trials)
        for trial in trials:
            self._proposer.strategy.observe(trial)
        scored_sets = {trial.layer_set for trial in trials}
        challengers.first = [known_set for known_set in challengers.first if known_set not in scored_sets]
        adopted = self._adopt_better(window_start, trials)
        if adopted is not None:
            trials = [adopted if trial.step == adopted.step else trial for trial in trials]
            self._draft_with_incumbent()
            events.append(Adopted(self.task, self.layer_set, self.matchness, adopted.step))
        if self.settings.search_drafting:
            pairs = zip(trials, scores, strict=True)
            incumbent_scores = [score for trial, score in pairs if trial.layer_set == self.layer_set]
            self._incumbent_scores = [*self._incumbent_scores, *incumbent_scores[:1]][-MAX_WINDOWS:]
        self.trials += trials
        has_finals = self.settings.adoption == "finals" and not self._adopts_by_rating
        others = [trial for trial in trials if trial.origin != "final" and trial.layer_set != self.layer_set]
        if has_finals and others and not self._has_stalled(n_before):
            ratings = {trial.layer_set: trial.score for trial in others}
            challengers.finals.enter(ratings, window_start, challengers.incumbent.score)
        self._check_end()
        return [*events, TrialsDone(self.task, tuple(trials))]

    def _adopt_better(self, window_start: WindowStart, trials: Sequence[Trial]) -> Trial | None:
        """Adopt a set that these trials show to be better, by the rule of the settings; return its trial."""
        challengers = self._challengers
        if self.settings.adoption == "highest":
            return challengers.adopt_highest(trials)
        adopted: Trial | None = None
        if trials[0].layer_set == self.layer_set:
            finalists = [trial for trial in trials if trial.origin == "final" and not self._adopts_by_rating]
            adopted = challengers.judge(window_start, trials[0], finalists)
        if self._adopts_by_rating:
            best_set = self._proposer.strategy.best(self.layer_set)
            adopted = challengers.adopt_best(best_set, trials, self.trials[challengers.opened_at :])
        return adopted

    @property
    def _adopts_by_rating(self) -> bool:
        """Whether sets are adopted by the strategy's estimate from all trials, not by wins on single windows."""
        return self.settings.adoption == "finals" and self._proposer.paired

    def _has_stalled(self, n_trials: int) -> bool:
        """Whether the last `patience` of `n_trials` candidates brought no better set."""
        return n_trials - self._challengers.n_at_gain >= self._proposer.patience

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
