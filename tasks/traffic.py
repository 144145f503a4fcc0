"""Tuning on the requests that a model serves: search for better drafts, compare them with plain decoding, adopt them.

Drafts never change a request's output. Therefore all requests can switch between drafted and plain decoding for a few
rounds from time to time (a comparison): each request then has timings of both for the same text, and the verdict
compares these pairs. The surer the verdict, the fewer rounds are compared. Some always are, so that drafts are dropped
when they stop paying, and used again when they pay.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import mul
from typing import Any, TypeVar

from ..core.costs import CostProfile, context_bucket
from ..core.errors import StoreError
from ..core.events import CostStatus, ModelTuning, ShiftStatus, TuningVerb, Way
from ..core.layer_sets import LayerSet
from ..core.observed_costs import ObservedCosts
from ..core.plainly import WhyPlain
from ..core.records import FoundPlan, KnownSet, LayerSetRecord, round_to_single, unit
from ..core.rounds import RoundLog
from ..core.settings import SwiftSettings, TuningSettings
from ..core.types import DEFAULT_TASK, Completion, Prompt
from ..decoding.context import Context
from ..decoding.corpus import LEAD_TOKENS, Corpora
from ..decoding.events import Generated, GenerateInfo, Prefilled, Round, Turn, WorkEvent
from ..decoding.load import Load
from ..decoding.methods import Method
from ..decoding.session import Session
from ..decoding.work import PassGenerator, Work, subscribed
from ..models.costs import machine_name, slot_copies
from ..models.mtp import MTP_COSTS
from ..models.runtime import Runtime
from ..models.saved import OnStep, no_step
from ..optimizer.shift import SERVED_ALARM, SERVED_N_LEARN, ReadPrompt, ShiftWatch
from ..store import Store
from .background import BackgroundQueries
from .generate import GrowingText, log_round
from .job import with_retries
from .recipes import TYPICAL_POSITIONS, stamp, stored_costs
from .served_task import RoundTimings, SwitchedDrafter, TaskTraffic
from .served_trials import ServedTrials
from .stored_plans import StoredPlans

DRAFT_FORMAT = "int4"
LEASE_S = 30.0  # Lease of a replica on a task's search; it is renewed after a third of this time.
SAVE_COSTS_S = 60.0  # Seconds between two writes of the refined costs to the database.
CORPUS_BYTES = 64 << 20  # Default memory for finished answers.
STORE_TRIALS_S = 5.0  # Seconds between two writes of a task's trials to the database.
REFRESH_S = 5.0  # Seconds between two lookups of plans that other replicas stored.
# Maximum tasks per model. When all of them are tuned, requests with new task names count as the default task.
MAX_TASKS = 64
# Minimum cosine between a prompt's hidden state and a task's mean state to assign the prompt to the task.
MIN_SIMILARITY = 0.8

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ServedRequest:
    """One request while it is decoded: what its client gets, and what its task learns from it.

    Args: task: whose drafts to use; None: the task with the most similar prompts, chosen after the prefill. learns:
          whether comparisons and the search may use the request, and other requests may draft from its answer. counts:
          whether its rounds count in the task's figures. salt: only requests with the same salt draft from its answer.
    """

    def __init__(
        self,
        traffic: Traffic,
        session: Session,
        prompt: Prompt,
        task: str | None,
        learns: bool,
        counts: bool,
        salt: str = "",
    ) -> None:
        self._traffic, self._prompt_id, self._task_name = traffic, prompt.id, task
        self._learns, self._counts, self._salt = learns, counts, salt
        self._lead: Sequence[int] = ()  # The last tokens of the prompt.
        self._text, self._log = GrowingText(session, prompt), RoundLog()
        self._task = traffic.task(task or DEFAULT_TASK)
        self._rounds: RoundTimings | None = None
        self._why_plain: WhyPlain | None = None
        self._read_prompt: ReadPrompt | None = None
        self.drafter = SwitchedDrafter(
            self._task.search.method, lambda: self._rounds is not None and self._rounds.is_drafted
        )

    @property
    def is_begun(self) -> bool:
        """Whether the request's prompt was read, so that it counts as running."""
        return self._rounds is not None

    def handle(self, event: WorkEvent) -> Work[None]:
        """Yield what the client gets of a decoding event, then score candidates if that is due."""
        self._traffic.process_queries()
        match event:
            case Prefilled(context=context):
                self._traffic.learn_costs(context.load)
                self._begin(event)
            case Round(context=context):
                self._traffic.learn_costs(context.load)
                self._current_rounds.add(event)
                log_round(self._log, event)
            case Turn(completion=completion):
                yield from self._text.finish_completion(completion)
                yield self._finish(event)
                return
            case _:
                return
        yield from self._text.read_event(event)
        if self._learns and self._traffic.may_search(self._task, self._prompt_id) and context.finish is None:
            yield from self._traffic.score_candidates(self._task, context, self._prompt_id)
            self._traffic.process_queries()
        self._traffic.begin_round(self._current_rounds, context.load)

    @property
    def _current_rounds(self) -> RoundTimings:
        assert self._rounds is not None
        return self._rounds

    def _begin(self, prefilled: Prefilled) -> None:
        """Choose the task and its drafts, now that the prompt's hidden state is known."""
        self._task = self._traffic.task(self._task_name or self._traffic.nearest_task(prefilled))
        context = prefilled.context
        context.corpus = self._traffic.corpora.of(self._salt, self._task.name)
        self._lead = context.token_ids[max(0, context.n_prompt - LEAD_TOKENS) : context.n_prompt]
        if self._learns:
            self._read_prompt = self._task.add_prompt(prefilled)
        bucket = context_bucket(context.root_slot)
        self._rounds = self._traffic.begin_request(self._task, self._learns, context.load, bucket)
        self._why_plain = self._task.why_plain_at(bucket)
        self.drafter.method = self._task.search.method

    def _finish(self, turn: Turn) -> Generated:
        """Add the finished request to its task's figures; return the event for the client."""
        task, rounds = self._task, self._current_rounds
        if self._counts:
            task.count_rounds(rounds)
        saved_s = task.saved_by(rounds)
        if self._learns:
            self._traffic.learn(task, rounds, turn.completion, self._read_prompt)
            self._traffic.corpora.add(self._salt, task.name, self._lead, turn.completion.token_ids)
        info = GenerateInfo(
            "adaptive" if rounds.drafts else "plain",
            version=task.version,
            verdict=task.word,
            saved_s=saved_s,
            rounds=self._log.total(),
            why_plain=self._why_plain or rounds.why_plain,
        )
        return Generated(replace(turn.prompt, task=task.name), turn.completion, info.of(turn.completion))


class Traffic:
    """All tasks of one model, and how their requests are decoded."""

    def __init__(
        self,
        model: str,
        runtime: Runtime,
        store: Store | None,
        settings: SwiftSettings | None = None,
        on_step: OnStep = no_step,
        is_busy: Callable[[], bool] = lambda: False,
        corpora: Corpora | None = None,
    ) -> None:
        """Args: model: the name under which the model is served. corpora: finished answers that drafts may copy from;
        None: those of this process, in memory.
        """
        self.model, self.runtime, self.store = model, runtime, store
        self.corpora = Corpora(CORPUS_BYTES) if corpora is None else corpora
        self.settings = settings or TuningSettings(draft_format=DRAFT_FORMAT)
        # Store the name under which the model is served, so that lookups by this name find the model's plans.
        if store is not None:
            named_info = replace(runtime.info, names=(*runtime.info.names, model))
            with_retries(lambda: store.remember_model(named_info))
        self.costs = self._stored_costs(on_step)
        self._costs_saved_s = time.monotonic()
        runtime.copies.prepare(runtime.whole.filled(self.settings.draft_format), on_step)
        runtime.copies.kept.add(self.settings.draft_format)
        self.paused = False
        self._is_busy = is_busy
        # The latest comparison: its target passes, numbered by `Load.n_checks`, and whether its rounds draft. All
        # requests switch together: a plain round in one batch with drafted rounds would wait for their drafts, which
        # distorts the time of plain decoding.
        self._compared_passes, self._compared_drafts = range(0), False
        self._n_running = self._n_begun = 0  # Requests now decoding; requests begun since the latest comparison.
        self._tasks: dict[str, TaskTraffic] = {}
        self._owner = secrets.token_hex(8)  # Identifies this replica in leases.
        self._leases: dict[str, float] = {}  # Task -> end of this replica's lease on its search, monotonic clock.
        self._queries = BackgroundQueries()
        self._stored_plans = None if store is None else StoredPlans(store, runtime, self._has_costs)
        self._trial_log = ServedTrials(runtime.info.fingerprint, model)
        self._known_sets: tuple[KnownSet, ...] = ()
        if store is not None:
            self._known_sets = tuple(store.known_sets(runtime.info.fingerprint))
        for known_set in self._known_sets:  # The newest sets come first.
            if known_set.task and known_set.task not in self._tasks and len(self._tasks) < MAX_TASKS:
                self._tasks[known_set.task] = self._new_task(known_set.task)
                self._tasks[known_set.task].shift.total = known_set.state

    def _stored_costs(self, on_step: OnStep) -> ObservedCosts:
        """Return the stored costs of the model's passes at all context lengths; measure a typical one if missing."""
        runtime, draft_format = self.runtime, self.settings.draft_format
        typical = stored_costs(runtime, self.store, TYPICAL_POSITIONS, on_step, [draft_format])
        profiles: Sequence[CostProfile] = []
        if self.store is not None:
            with suppress(StoreError):
                # Without the other profiles, the costs of the typical context serve at all lengths.
                device, dtype = typical.device, typical.dtype
                profiles = self.store.cost_profiles(typical.fingerprint, device=device, dtype=dtype)
        needed_formats = {draft_format, *(name for name in typical.formats if name.startswith(MTP_COSTS))}
        others = (
            profile
            for profile in profiles
            if profile.software == typical.software
            and needed_formats <= set(profile.formats)
            and profile.context_bucket != typical.context_bucket
        )
        return ObservedCosts(typical, others, slot_copies(runtime))

    def work(
        self,
        session: Session,
        prompt: Prompt,
        task: str | None,
        learn: bool = True,
        counts: bool = True,
        salt: str = "",
        **options: Any,
    ) -> Work[None]:
        """Decode one request; also yields `TextAdded` and `Generated`. Arguments as for `ServedRequest`."""
        served_request = ServedRequest(self, session, prompt, task, learn, counts, salt)
        options |= {"salt": salt, "scratch_rows": 0, "with_state": True}
        if learn:
            # The prompt may turn out to be of any task: reserve the most slots that a search needs.
            options["scratch_rows"] = max(known_task.search.scratch_rows for known_task in self._tasks.values())
        method = Method("adaptive", served_request.drafter)
        try:
            yield from subscribed(session.request(prompt, method, **options), served_request.handle)
        finally:
            self._n_running -= served_request.is_begun

    def begin_request(self, task: TaskTraffic, learn: bool, load: Load, bucket: int) -> RoundTimings:
        """Count a request whose prompt was read, and begin a comparison if one is due.

        A comparison is due once as many requests have begun since the latest one as are running.

        Args: bucket: the request's context bucket.
        """
        self._n_running += 1
        self._n_begun += 1
        n_rounds = task.compared_rounds_at(bucket) if learn and not self.paused else 0
        rounds = RoundTimings(task.drafts_at(bucket), n_rounds > 0, task.search.layer_set, context_bucket=bucket)
        is_over = self._n_running == 1 or load.n_checks >= self._compared_passes.stop
        if n_rounds and is_over and self._n_begun >= self._n_running:
            self._n_begun = 0
            # If other requests run, start at the next pass, because their rounds in this one have begun.
            first_pass = load.n_checks + (self._n_running > 1)
            self._compared_passes, self._compared_drafts = range(first_pass, first_pass + n_rounds), not rounds.drafts
        return rounds

    def begin_round(self, rounds: RoundTimings, load: Load) -> None:
        """Begin a request's next round, drafted or plain as the current comparison requires."""
        rounds.begin(self._compared_passes, self._compared_drafts, load)

    def process_queries(self) -> None:
        """Process the results of finished database queries."""
        self._queries.take()

    def learn_costs(self, load: Load) -> None:
        """Refine the costs by the passes timed since the last call, and store them every SAVE_COSTS_S."""
        self.costs.learn(load.take_timings())
        now_s = time.monotonic()
        if self.store is None or now_s < self._costs_saved_s + SAVE_COSTS_S:
            return
        self._costs_saved_s = now_s
        if refined_profiles := self.costs.refined():
            self._queries.ask("costs", "", partial(self._save_costs, self.store, refined_profiles), lambda _: None)

    def _save_costs(self, store: Store, profiles: Sequence[CostProfile]) -> None:
        for profile in profiles:
            store.save_cost_profile(profile)

    def count(self, event: Generated) -> None:
        """Count a request that has ended, however it was decoded."""
        self.task(event.prompt.task).count(event.completion)

    def score_candidates(self, task: TaskTraffic, context: Context, prompt_id: str) -> PassGenerator[None]:
        """Score candidates of a task's search during a request, count the seconds, and store the trials."""
        search_before_s, expected_s = context.tally.optimise_s, self._expected_scoring_s(task, prompt_id)
        try:
            yield from task.search.score(context, prompt_id)
        finally:
            task.count_scoring(context.tally.optimise_s - search_before_s, expected_s)
            self._store_trials(task)

    def _store_trials(self, task: TaskTraffic) -> None:
        """Store the trials of a task's search that are not stored yet, in the background."""
        search, trials = self._trial_log.unstored(task.name, task.search)
        if self.store is not None and trials:
            run_query = partial(self.store.add_served_trials, search, trials)
            mark_stored = partial(self._trial_log.mark_stored, search, trials)
            self._queries.ask("trials", task.name, run_query, lambda _: mark_stored(), STORE_TRIALS_S)

    def _expected_scoring_s(self, task: TaskTraffic, prompt_id: str) -> float:
        """Return how long the next scoring pass on a prompt takes at most, by measured costs."""
        return self.costs.at().target_pass_s(task.search.max_scoring_rows(prompt_id))

    def may_search(self, task: TaskTraffic, prompt_id: str) -> bool:
        """Tell whether this replica may score candidates of a task now."""
        if self.paused or self._is_busy() or not task.search.optimising:
            return False
        return task.may_search(self._expected_scoring_s(task, prompt_id)) and self._has_lease(task.name)

    def _has_lease(self, task: str) -> bool:
        """Tell whether this replica holds the lease on a task's search; requests or renews it in the background.

        Of replicas on identical machines, one at a time searches.
        """
        if self.store is None:
            return True
        keep_end = partial(self._leases.__setitem__, task)
        self._queries.ask("lease", task, partial(self._lease, self.store, task), keep_end, LEASE_S / 3)
        return time.monotonic() < self._leases.get(task, -math.inf)

    def _lease(self, store: Store, task: str, seconds: float = LEASE_S) -> float:
        """Lease a task's search (0 seconds: release it); return the lease's end, -inf if another replica has it."""
        machine = self.runtime.info.fingerprint, machine_name(self.runtime), self.runtime.dtype_name
        lease_end_s = time.monotonic() + seconds
        is_leased = store.jobs.lock(" ".join(("search", *machine, task)), self._owner, seconds)
        return lease_end_s if is_leased else -math.inf

    def nearest_task(self, prefilled: Prefilled) -> str:
        """Return the task whose prompts are most similar to the prompt that was read, else the default task."""
        assert prefilled.state is not None
        state = round_to_single(unit(prefilled.state.tolist()))
        mean_states = {task.name: task.shift.state for task in self._tasks.values()}
        cosines = {name: sum(map(mul, state, mean_state)) for name, mean_state in mean_states.items() if mean_state}
        most_similar = max(cosines, key=lambda name: cosines[name], default=DEFAULT_TASK)
        return most_similar if cosines.get(most_similar, 0.0) >= MIN_SIMILARITY else DEFAULT_TASK

    def learn(
        self, task: TaskTraffic, rounds: RoundTimings, completion: Completion, read_prompt: ReadPrompt | None
    ) -> None:
        """Add a finished request to its task's shift detection and verdict; store the drafts if they are new."""
        if (shift := task.add_completion(completion, read_prompt)) is not None:
            task.drop_pairs()
            task.shifts = ShiftStatus(task.shifts.n + 1, shift.reason, task.n_requests + 1)
            logger.info("tuning=shifted task=%s reason=%r", task.name, shift.reason)
        if task.add(rounds):
            self._store_version(task)

    def _store_version(self, task: TaskTraffic) -> None:
        if self.store is None:
            return
        record = stamp(task.record_in_use(self.model, self.runtime))

        def note_version(stored_record: LayerSetRecord) -> None:
            task.version, task.stored_set = stored_record.version, stored_record.layer_set

        self._queries.ask("version", task.name, partial(self.store.add_layer_set, record), note_version)

    def task(self, name: str) -> TaskTraffic:
        """Return the task of that name, and look up its stored plans in the background.

        If there are too many tasks, an untuned one is dropped; if all are tuned, the default task is returned.
        """
        self._queries.take()
        if name not in self._tasks and len(self._tasks) >= MAX_TASKS and not self._drop_task():
            name = DEFAULT_TASK
        if name not in self._tasks:
            self._tasks[name] = self._new_task(name)
            self._tasks[name].looked_up = self.store is None
        task = self._tasks[name]
        task.used_at = time.monotonic()
        if self._stored_plans is not None:
            if not task.looked_up:
                self._request_plans("plan", name, [name], self._stored_plans.look_up)
            names = [known_name for known_name, known_task in self._tasks.items() if known_task.looked_up]
            self._request_plans("plans", "", names, self._stored_plans.look_up_changed)
        return task

    def _drop_task(self) -> bool:
        """Drop the untuned task that was used least recently, tasks without trials first; return False without any.

        Requests of that task in progress keep its drafts.
        """
        stored_tasks = {DEFAULT_TASK, *(known_set.task for known_set in self._known_sets)}
        untuned = [task for task in self._tasks.values() if not task.is_tuned and task.name not in stored_tasks]
        if not untuned:
            return False
        task = min(untuned, key=lambda candidate: (bool(candidate.search.trials), candidate.used_at))
        task.search.close()
        del self._tasks[task.name]
        self._leases.pop(task.name, None)
        self._queries.forget(task.name)
        self._trial_log.forget(task.name)
        return True

    def _has_costs(self, layer_set: LayerSet) -> bool:
        return not self.costs.missing(layer_set)

    def _request_plans(
        self,
        query_name: str,
        task: str,
        names: Sequence[str],
        look_up: Callable[[Sequence[str]], Mapping[str, FoundPlan]],
    ) -> None:
        """Look up the stored plans of these tasks in the background, and use them when they arrive."""

        def use_plans(plans: Mapping[str, FoundPlan]) -> None:
            for name in names:
                if (known_task := self._tasks.get(name)) is not None:
                    self._use_stored_plan(known_task, plans.get(name))

        self._queries.ask(query_name, task, partial(look_up, names), use_plans, REFRESH_S)

    def _use_stored_plan(self, task: TaskTraffic, stored_plan: FoundPlan | None) -> None:
        task.looked_up = True
        if stored_plan is None or stored_plan.plan.layer_set is None:
            return
        previous_best, task.best = task.best, stored_plan.version
        # If the version is neither the previous best nor this replica's, another replica or an operator moved `best`.
        if stored_plan.version not in (previous_best, task.version):
            task.use_plan(stored_plan, self._new_task(task.name, stored_plan.plan.layer_set.layer_set).search)

    def _new_task(self, name: str, start_set: LayerSet | None = None) -> TaskTraffic:
        task = TaskTraffic.begin(name, self.runtime, self.settings, self.costs, self._known_sets, start_set)
        task.shift = ShiftWatch(self._known_sets, SERVED_ALARM, SERVED_N_LEARN)
        return task

    def steer(self, verb: TuningVerb, task: str | None = None, way: Way | None = None) -> None:
        """Pause or resume searches and comparisons, or pin a task to drafts or plain decoding (None: unpin)."""
        if verb == "pin":
            pinned_task = self.task(task or DEFAULT_TASK)
            had_drafts, pinned_task.pinned = pinned_task.drafts, way
            if pinned_task.drafts != had_drafts:
                pinned_task.since = time.time()
        else:
            self.paused = verb == "pause"

    def status(self) -> ModelTuning:
        """Return the tuning status: drafts in use, candidates, cost of the search, and seconds saved."""
        self._queries.take()
        profile = self.costs.at()
        costs = CostStatus(profile.quality, profile.remark, profile.context_bucket, profile.target_pass_s(1))
        return ModelTuning(self.paused, tuple(task.status() for task in self._tasks.values()), costs=costs)

    def close(self) -> None:
        """End all searches, so that another replica can take them over."""
        self._queries.close()
        for task in self._tasks.values():
            search, trials = self._trial_log.unstored(task.name, task.search)
            if self.store is not None and trials:
                with suppress(StoreError):
                    # If the database is away, the last trials are lost: they are not worth a wait.
                    self.store.add_served_trials(search, trials)
            task.search.close()
        if self.store is not None:
            with suppress(StoreError):
                # If the costs cannot be stored, the next engine starts from the earlier ones.
                self._save_costs(self.store, self.costs.refined())
        for name, lease_end_s in self._leases.items():
            if self.store is not None and time.monotonic() < lease_end_s:
                with suppress(StoreError):
                    # If the release fails, the lease expires.
                    self._lease(self.store, name, 0.0)
