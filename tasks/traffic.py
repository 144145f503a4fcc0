"""Learn from the requests that a model serves: search for drafts meanwhile, try them, and keep those that pay.

Drafts never change a request's output. So from time to time all requests switch for a few rounds between drafted and
plain decoding: each request then has timings of both for the same text, and the verdict compares these pairs. The surer
the verdict, the fewer such rounds. Some always remain, so that drafts that stop paying are dropped, and are used again
once they pay.
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
from .kept_trials import KeptTrials
from .recipes import TYPICAL_POSITIONS, stamp, stored_costs
from .served_task import RoundTimings, SwitchedDrafter, TaskTraffic
from .stored_plans import StoredPlans

DRAFT_FORMAT = "int4"
LEASE_S = 30.0  # Lease of a replica on a task's search. It is renewed after a third of this time.
SAVE_COSTS_S = 60.0  # Seconds between two writes of the refined costs to the database.
CORPUS_BYTES = 64 << 20  # Memory for finished answers where nothing else is said.
KEEP_TRIALS_S = 5.0  # Seconds between two writes of a task's trials to the database.
REFRESH_S = 5.0  # Seconds between two lookups of plans that other replicas stored.
# Tasks kept per model. When all of them are tuned, requests with new task names count as the default task.
MAX_TASKS = 64
# Cosine between a prompt's hidden state and a task's mean from which the prompt is assigned to that task.
MIN_SIMILARITY = 0.8

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ServedRequest:
    """One request while it is decoded: what its client gets, and what is learnt from it.

    Its task is known once its prompt was read, where the request names none: `handle` of `Prefilled` begins its rounds.

    Args: task: whose drafts to use; None: the task with the most similar prompts. learns: whether comparisons and the
          search may use the request, and drafts its answer. counts: whether its rounds count in the task's figures.
          salt: only requests of the same one draft from its answer.
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
        self._traffic, self._prompt_id, self._name = traffic, prompt.id, task
        self._learns, self._counts, self._salt = learns, counts, salt
        self._lead: Sequence[int] = ()  # The last tokens of the prompt.
        self._text, self._log = GrowingText(session, prompt), RoundLog()
        self._task = traffic.task(task or DEFAULT_TASK)
        self._rounds: RoundTimings | None = None
        self._why_plain: WhyPlain | None = None
        self._read: ReadPrompt | None = None
        self.drafter = SwitchedDrafter(
            self._task.search.method, lambda: self._rounds is not None and self._rounds.is_drafted
        )

    @property
    def is_begun(self) -> bool:
        """Whether the request's prompt was read, so that it counts as running."""
        return self._rounds is not None

    def handle(self, event: WorkEvent) -> Work[None]:
        """Report the client's part of a decoding event, then search for better drafts."""
        self._traffic.take_stored()
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
            yield from self._traffic.look(self._task, context, self._prompt_id)
            self._traffic.take_stored()
        self._traffic.compare(self._current_rounds, context.load)

    @property
    def _current_rounds(self) -> RoundTimings:
        assert self._rounds is not None
        return self._rounds

    def _begin(self, prefilled: Prefilled) -> None:
        self._task = self._traffic.task(self._name or self._traffic.nearest_task(prefilled))
        context = prefilled.context
        context.corpus = self._traffic.corpora.of(self._salt, self._task.name)
        self._lead = context.token_ids[max(0, context.n_prompt - LEAD_TOKENS) : context.n_prompt]
        if self._learns:
            self._read = self._task.add_prompt(prefilled)
        bucket = context_bucket(context.root_slot)
        self._rounds = self._traffic.begin(self._task, self._learns, context.load, bucket)
        self._why_plain = self._task.why_plain_at(bucket)
        self.drafter.method = self._task.search.method

    def _finish(self, turn: Turn) -> Generated:
        task, rounds = self._task, self._current_rounds
        if self._counts:
            task.count_rounds(rounds)
        saved_s = task.saved_by(rounds)
        if self._learns:
            self._traffic.learn(task, rounds, turn.completion, self._read)
            self._traffic.corpora.add(self._salt, task.name, self._lead, turn.completion.token_ids)
        method = "adaptive" if rounds.drafts else "plain"
        verdict_and_rounds: dict[str, Any] = {"verdict": task.word, "rounds": self._log.total()}
        decoding = GenerateInfo(method, version=task.version, saved_s=saved_s, **verdict_and_rounds)
        decoding = replace(decoding, why_plain=self._why_plain or rounds.why_plain).of(turn.completion)
        return Generated(replace(turn.prompt, task=task.name), turn.completion, decoding)


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
        """Args: corpora: what drafts may repeat of finished answers; None: those of this process, in memory."""
        self.model, self.runtime, self.store = model, runtime, store
        self.corpora = Corpora(CORPUS_BYTES) if corpora is None else corpora
        self.settings = settings or TuningSettings(draft_format=DRAFT_FORMAT)
        # Store the name under which the model is served, so that lookups by it find the model's plans.
        if store is not None:
            named_info = replace(runtime.info, names=(*runtime.info.names, model))
            with_retries(lambda: store.remember_model(named_info))
        self.costs = self._stored_costs(on_step)
        self._costs_saved_at = time.monotonic()
        runtime.copies.prepare(runtime.whole.filled(self.settings.draft_format), on_step)
        runtime.copies.kept.add(self.settings.draft_format)
        self.paused = False
        self._is_busy = is_busy
        # Target passes (numbered by load.n_checks) of the latest comparison, and whether its rounds draft. All requests
        # switch together: a plain round that is batched with drafted rounds waits for their drafts, which would distort
        # the time of plain decoding.
        self._compared_passes, self._compared_drafts = range(0), False
        self._n_running = self._n_begun = 0  # Requests now decoding; requests begun since the latest comparison.
        self._tasks: dict[str, TaskTraffic] = {}
        self._owner = secrets.token_hex(8)
        # Task -> end of this replica's lease on its search, on the monotonic clock.
        self._leases: dict[str, float] = {}
        self._queries = BackgroundQueries()
        self._stored_plans = None if store is None else StoredPlans(store, runtime, self._has_costs)
        self._kept_trials = KeptTrials(runtime.info.fingerprint, model)
        self._known_sets: tuple[KnownSet, ...] = ()
        if store is not None:
            self._known_sets = tuple(store.known_sets(runtime.info.fingerprint))
        for known_set in self._known_sets:  # The newest sets come first.
            if known_set.task and known_set.task not in self._tasks and len(self._tasks) < MAX_TASKS:
                self._tasks[known_set.task] = self._new_task(known_set.task)
                self._tasks[known_set.task].shift.total = known_set.state

    def _stored_costs(self, on_step: OnStep) -> ObservedCosts:
        """Return stored costs of the model's passes in all contexts, those of a typical one measured if need be."""
        runtime, draft_format = self.runtime, self.settings.draft_format
        profile = stored_costs(runtime, self.store, TYPICAL_POSITIONS, on_step, [draft_format])
        stored_profiles: Sequence[CostProfile] = []
        if self.store is not None:
            with suppress(StoreError):
                # Costs at the typical context length are enough.
                device, dtype = profile.device, profile.dtype
                stored_profiles = self.store.cost_profiles(profile.fingerprint, device=device, dtype=dtype)
        needed_formats = {draft_format, *(name for name in profile.formats if name.startswith(MTP_COSTS))}
        same_software = (
            stored_profile
            for stored_profile in stored_profiles
            if stored_profile.software == profile.software and needed_formats <= set(stored_profile.formats)
        )
        return ObservedCosts(
            profile,
            (
                stored_profile
                for stored_profile in same_software
                if stored_profile.context_bucket != profile.context_bucket
            ),
            slot_copies(runtime),
        )

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
        """Decode one request; also report `TextAdded` and `Generated`. Arguments as for `ServedRequest`."""
        served_request = ServedRequest(self, session, prompt, task, learn, counts, salt)
        n_scratch_rows = max(each_task.search.scratch_rows for each_task in self._tasks.values()) if learn else 0
        method, decode_options = (
            Method("adaptive", served_request.drafter),
            {**options, "salt": salt, "scratch_rows": n_scratch_rows, "with_state": True},
        )
        try:
            yield from subscribed(session.request(prompt, method, **decode_options), served_request.handle)
        finally:
            self._n_running -= served_request.is_begun

    def begin(self, task: TaskTraffic, learn: bool, load: Load, bucket: int) -> RoundTimings:
        """Count a request whose prompt was read; once per as many requests as are running, begin a comparison.

        Args: bucket: of the request's context.
        """
        self._n_running += 1
        self._n_begun += 1
        n_rounds = task.compared_rounds_at(bucket) if learn and not self.paused else 0
        rounds = RoundTimings(task.drafts_at(bucket), n_rounds > 0, task.search.layer_set, context_bucket=bucket)
        is_over = self._n_running == 1 or load.n_checks >= self._compared_passes.stop
        if n_rounds and is_over and self._n_begun >= self._n_running:
            self._n_begun = 0
            # With other requests running, start at the next pass: their rounds in this one have begun already.
            first_pass = load.n_checks + (self._n_running > 1)
            self._compared_passes, self._compared_drafts = range(first_pass, first_pass + n_rounds), not rounds.drafts
        return rounds

    def compare(self, rounds: RoundTimings, load: Load) -> None:
        """Begin a request's next round, drafted or plain as the current comparison requires."""
        rounds.begin(self._compared_passes, self._compared_drafts, load)

    def take_stored(self) -> None:
        """Process the results of finished database queries."""
        self._queries.take()

    def learn_costs(self, load: Load) -> None:
        """Update the costs from passes timed since the last event, and store them every SAVE_COSTS_S."""
        self.costs.learn(load.take_timings())
        now_s = time.monotonic()
        if self.store is None or now_s < self._costs_saved_at + SAVE_COSTS_S:
            return
        self._costs_saved_at = now_s
        if refined_profiles := self.costs.refined():
            self._queries.ask("costs", "", partial(self._save_costs, self.store, refined_profiles), lambda _: None)

    def _save_costs(self, store: Store, profiles: Sequence[CostProfile]) -> None:
        for profile in profiles:
            store.save_cost_profile(profile)

    def count(self, event: Generated) -> None:
        """Count a request that has ended, however it was decoded."""
        self.task(event.prompt.task).count(event.completion)

    def look(self, task: TaskTraffic, context: Context, prompt_id: str) -> PassGenerator[None]:
        """Score candidates during a request, and count the seconds."""
        search_before_s, expected_s = context.tally.optimise_s, self._look_s(task, prompt_id)
        try:
            yield from task.search.score(context, prompt_id)
        finally:
            task.count_look(context.tally.optimise_s - search_before_s, expected_s)
            self._keep_trials(task)

    def _keep_trials(self, task: TaskTraffic) -> None:
        """Store the trials of a task's search that are not stored yet, in the background."""
        search, trials = self._kept_trials.unstored(task.name, task.search)
        if self.store is not None and trials:
            store_trials = partial(self.store.add_served_trials, search, trials)
            mark = partial(self._kept_trials.mark, search, trials)
            self._queries.ask("trials", task.name, store_trials, lambda _: mark(), KEEP_TRIALS_S)

    def _look_s(self, task: TaskTraffic, prompt_id: str) -> float:
        """Expected seconds of scoring candidates on a prompt, from measured costs."""
        return self.costs.at().target_pass_s(task.search.rows_ahead(prompt_id))

    def may_search(self, task: TaskTraffic, prompt_id: str) -> bool:
        if self.paused or self._is_busy() or not task.search.optimising:
            return False
        return task.may_search(self._look_s(task, prompt_id)) and self._has_lease(task.name)

    def _has_lease(self, task: str) -> bool:
        """Whether this replica holds the lease on a task's search among replicas on identical machines."""
        if self.store is None:
            return True
        take = partial(self._leases.__setitem__, task)
        self._queries.ask("lease", task, partial(self._lease, self.store, task), take, LEASE_S / 3)
        return time.monotonic() < self._leases.get(task, -math.inf)

    def _lease(self, store: Store, task: str, seconds: float = LEASE_S) -> float:
        """Lease a task's search (0 seconds: release it); return the lease's end, -inf if another replica has it."""
        lock_parts = self.runtime.info.fingerprint, machine_name(self.runtime), self.runtime.dtype_name
        lease_end_s = time.monotonic() + seconds
        return (
            lease_end_s if store.jobs.lock(" ".join(("search", *lock_parts, task)), self._owner, seconds) else -math.inf
        )

    def nearest_task(self, prefilled: Prefilled) -> str:
        """The task whose prompts are most similar to the prompt just read, else the default task."""
        assert prefilled.state is not None
        state = round_to_single(unit(prefilled.state.tolist()))
        states = {task.name: task.shift.state for task in self._tasks.values()}
        cosines = {name: sum(map(mul, state, of_task)) for name, of_task in states.items() if of_task}
        most_similar = max(cosines, key=lambda name: cosines[name], default=DEFAULT_TASK)
        return most_similar if cosines.get(most_similar, 0.0) >= MIN_SIMILARITY else DEFAULT_TASK

    def learn(
        self, task: TaskTraffic, rounds: RoundTimings, completion: Completion, read_prompt: ReadPrompt | None
    ) -> None:
        if (shift := task.shifted_by(completion, read_prompt)) is not None:
            task.drop_pairs()
            task.shifts = ShiftStatus(task.shifts.n + 1, shift.reason, task.n_requests + 1)
            logger.info("tuning=shifted task=%s reason=%r", task.name, shift.reason)
        if task.add(rounds):
            self._store_version(task)

    def _store_version(self, task: TaskTraffic) -> None:
        if self.store is None:
            return
        record = stamp(task.record_in_use(self.model, self.runtime))

        def take(stored_record: LayerSetRecord) -> None:
            task.version, task.stored_for = stored_record.version, stored_record.layer_set

        self._queries.ask("version", task.name, partial(self.store.add_layer_set, record), take)

    def task(self, name: str) -> TaskTraffic:
        """The task of that name, using the newest plan known from any replica."""
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
                self._ask_plans("plan", name, [name], self._stored_plans.look_up)
            names = [known_name for known_name, known_task in self._tasks.items() if known_task.looked_up]
            self._ask_plans("plans", "", names, self._stored_plans.look_again)
        return task

    def _drop_task(self) -> bool:
        """Drop the untuned task that was used least recently, those without trials first; return whether there is one.

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
        self._kept_trials.forget(task.name)
        return True

    def _has_costs(self, layer_set: LayerSet) -> bool:
        return not self.costs.missing(layer_set)

    def _ask_plans(
        self,
        query_name: str,
        task: str,
        names: Sequence[str],
        look_up: Callable[[Sequence[str]], Mapping[str, FoundPlan]],
    ) -> None:
        """Use the stored plans of these tasks in a moment."""

        def take(plans: Mapping[str, FoundPlan]) -> None:
            for name in names:
                if (asked_task := self._tasks.get(name)) is not None:
                    self._use_stored_plan(asked_task, plans.get(name))

        self._queries.ask(query_name, task, partial(look_up, names), take, REFRESH_S)

    def _use_stored_plan(self, task: TaskTraffic, stored_plan: FoundPlan | None) -> None:
        task.looked_up = True
        if stored_plan is None or stored_plan.plan.layer_set is None:
            return
        previous_best, task.best = task.best, stored_plan.version
        # A version that is neither the previous best nor our own: another replica or an operator changed `best`.
        if stored_plan.version not in (previous_best, task.version):
            task.use_plan(stored_plan, self._new_task(task.name, stored_plan.plan.layer_set.layer_set).search)

    def _new_task(self, name: str, start_set: LayerSet | None = None) -> TaskTraffic:
        task = TaskTraffic.begin(name, self.runtime, self.settings, self.costs, self._known_sets, start_set)
        task.shift = ShiftWatch(self._known_sets, SERVED_ALARM, SERVED_N_LEARN)
        return task

    def steer(self, verb: TuningVerb, task: str | None = None, way: Way | None = None) -> None:
        """Pause or resume searches and comparisons, or pin a task to drafts or plain decoding (None: unpin)."""
        if verb == "pin":
            target = self.task(task or DEFAULT_TASK)
            had_drafts, target.pinned = target.drafts, way
            target.since = target.since if target.drafts == had_drafts else time.time()
        else:
            self.paused = verb == "pause"

    def status(self) -> ModelTuning:
        """Return the tuning status: drafts in use, candidates, cost of the search, and seconds saved."""
        self._queries.take()
        return ModelTuning(
            self.paused, tuple(task.status() for task in self._tasks.values()), costs=self._cost_status()
        )

    def _cost_status(self) -> CostStatus:
        profile = self.costs.at()
        return CostStatus(profile.quality, profile.remark, profile.context_bucket, profile.target_pass_s(1))

    def close(self) -> None:
        """End all searches, so that another replica can take them over."""
        self._queries.close()
        for task in self._tasks.values():
            search, trials = self._kept_trials.unstored(task.name, task.search)
            if self.store is not None and trials:
                with suppress(StoreError):
                    # The last trials are not worth waiting for a database that is away.
                    self.store.add_served_trials(search, trials)
            task.search.close()
        if self.store is not None:
            with suppress(StoreError):
                # If storing fails, the next engine measures the costs again.
                self._save_costs(self.store, self.costs.refined())
        for name, lease_end_s in self._leases.items():
            if self.store is not None and time.monotonic() < lease_end_s:
                with suppress(StoreError):
                    # If the release fails, the lease expires.
                    self._lease(self.store, name, 0.0)
