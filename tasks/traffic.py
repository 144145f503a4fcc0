"""Learn from the requests that a model serves: search beside them, try what was found on them, keep what pays.

A request's output is plain decoding's however it is decoded. So from time to time all requests are decoded for a few
rounds the way that is not in use, plain or drafted: each request then has timings of both ways for one text, and the
verdict's statistics judge these pairs. The surer the verdict, the fewer such rounds. There are always some, so that
drafts that stop paying are dropped, and are used again when they pay.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import mul
from typing import Any, TypeVar

from ..core.costs import CostProfile
from ..core.errors import LayerSetNotFound, StoreError
from ..core.events import CostStatus, ModelTuning, ShiftStatus, TuningVerb, Way
from ..core.observed_costs import ObservedCosts
from ..core.records import FoundPlan, KnownSet, LayerSetRecord, single, unit
from ..core.settings import SwiftSettings, TuningSettings
from ..core.types import DEFAULT_TASK, Completion, LayerSet, Prompt
from ..decoding.context import Context
from ..decoding.draft import Draft, Drafter, Outcome
from ..decoding.engine import PassGenerator, Work, intercept
from ..decoding.loop import Prefilled, Round
from ..decoding.methods import PLAIN, Method
from ..decoding.session import Session, Turn
from ..models.costs import machine_name
from ..models.rows import Load
from ..models.runtime import Runtime
from ..models.saved import OnStep, no_step
from ..optimizer.shift import SERVED_ALARM, SERVED_N_LEARN, ReadPrompt, ShiftWatch
from ..store import Store
from .generate import Generated, GenerateInfo, GrowingText
from .job import patiently
from .plainly import WhyPlain
from .recipes import TYPICAL_POSITIONS, stamped, stored_costs
from .served_task import RoundTimings, TaskTraffic

DRAFT_FORMAT = "int4"
LEASE_S = 30.0  # that a replica holds a task's search; it renews the lease after a third of that
SAVE_COSTS_S = 60.0  # between two times that costs which followed decoding are stored
REFRESH_S = 5.0  # between two look-ups of what other replicas stored
MAX_TASKS = 64  # of one model; where all are tuned, requests of further names count as the default's
MIN_SIMILARITY = 0.8  # cosine of a text's state and a task's, to be taken for that task

T = TypeVar("T")

logger = logging.getLogger(__name__)


class SwitchedDrafter(Drafter):
    """Drafts in a round, or decodes it plainly, as `drafts` says when the round begins.

    The request's own method is known only after its prefill: whoever handles its `Prefilled` sets `method`.
    """

    def __init__(self, typical: Method, drafts: Callable[[], bool]) -> None:
        self.method, self._drafts = typical, drafts

    @property
    def layer_set(self) -> LayerSet | None:
        return self.method.layer_set

    def max_rows(self, room: int) -> int:
        return self.method.drafter.max_rows(room)

    def start(self) -> None:
        self._drafter, self._plain = (own.drafter.begin(self.context) for own in (self.method, PLAIN))
        self._now = self._plain

    def draft(self, room: int) -> PassGenerator[Draft]:
        self._now = self._drafter if self._drafts() else self._plain
        return (yield from self._now.draft(room))

    def observe(self, outcome: Outcome) -> None:
        self._now.observe(outcome)


class BackgroundQueries:
    """Queries the database in a thread of its own, in order; `take` passes the results on in the decoding thread.

    So no round waits for a database that is slow or away.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "traffic")
        self._open: dict[tuple[str, str], tuple[Future[Any], Callable[[Any], None]]] = {}
        self._asked: dict[tuple[str, str], float] = {}

    def ask(self, what: str, task: str, work: Callable[[], T], take: Callable[[T], None], every_s: float = 0.0) -> None:
        """Run `work` and pass its result to `take`; not while the same query is open, nor again within `every_s`."""
        query, now = (what, task), time.monotonic()
        if query not in self._open and now - self._asked.get(query, -math.inf) >= every_s:
            self._asked[query] = now
            self._open[query] = self._pool.submit(work), take

    def take(self) -> None:
        """Pass on the results that are there; where the database was away, log it and leave things as they are."""
        for query, (result, take) in list(self._open.items()):
            if not result.done():
                return
            del self._open[query]
            try:
                take(result.result())
            except StoreError as error:
                logger.warning("tuning=no %s task=%s reason=%r", *query, str(error))

    def forget(self, task: str) -> None:
        """Forget when a task's queries were asked."""
        self._asked = {query: at for query, at in self._asked.items() if query[1] != task}

    def close(self) -> None:
        """Wait for the running query and for versions to be stored; drop the others."""
        for query, (result, _) in list(self._open.items()):
            if query[0] != "version" and result.cancel():
                del self._open[query]
        self._pool.shutdown()
        self.take()


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
    ) -> None:
        self.model, self.runtime, self.store = model, runtime, store
        self.settings = settings or TuningSettings(draft_format=DRAFT_FORMAT)
        if store is not None:  # what is stored of it is found under its alias and path, too
            known = replace(runtime.info, names=(*runtime.info.names, model))
            patiently(lambda: store.remember_model(known))
        self.costs = self._stored_costs(on_step)
        self._costs_saved_at = time.monotonic()
        runtime.copies.prepare(LayerSet(runtime.n_layers).filled(self.settings.draft_format), on_step)
        runtime.copies.kept.add(self.settings.draft_format)
        self.paused = False
        self._is_busy = is_busy
        # The target's passes of the latest comparison, whose rounds all draft, or none does. All requests take part at
        # once: a plain round beside drafted ones waits for their drafts, so its time is not that of plain decoding.
        self._compared, self._compared_drafts = range(0), False
        self._n_running = self._n_begun = 0  # requests being decoded; begun since the latest comparison did
        self._tasks: dict[str, TaskTraffic] = {}
        self._owner = secrets.token_hex(8)
        self._leases: dict[str, float] = {}  # by task: until when its search is ours, as `time.monotonic` counts
        self._queries = BackgroundQueries()
        self._known: tuple[KnownSet, ...] = ()
        if store is not None:
            self._known = tuple(store.known_sets(runtime.info.fingerprint))
        for each in self._known:  # the newest first
            if each.task and each.task not in self._tasks and len(self._tasks) < MAX_TASKS:
                self._tasks[each.task] = self._new_task(each.task)
                self._tasks[each.task].shift.total = each.state

    def _stored_costs(self, on_step: OnStep) -> ObservedCosts:
        """Return stored costs of the model's passes in all contexts, those of a typical one measured if need be."""
        runtime, draft_format = self.runtime, self.settings.draft_format
        profile = stored_costs(runtime, self.store, TYPICAL_POSITIONS, on_step, [draft_format])
        stored: Sequence[CostProfile] = []
        if self.store is not None:
            with suppress(StoreError):  # the typical context's are enough
                device, dtype = profile.device, profile.dtype
                stored = self.store.cost_profiles(profile.fingerprint, device=device, dtype=dtype)
        alike = (other for other in stored if other.software == profile.software and draft_format in other.formats)
        return ObservedCosts(profile, (other for other in alike if other.context_bucket != profile.context_bucket))

    def work(
        self,
        session: Session,
        prompt: Prompt,
        task: str | None,
        learn: bool = True,
        counts: bool = True,
        **options: Any,
    ) -> Work[None]:
        """Decode one request; yields `TextAdded` and `Generated`.

        Args: task: whose drafts; None: the task whose prompts are most similar. learn: whether ways are compared on
              the request, and the search may use it. counts: whether its rounds are part of the task's figures.
        """
        drafter = SwitchedDrafter(
            self._task(task or DEFAULT_TASK).search.method, lambda: rounds is not None and rounds.is_drafted
        )
        scratch = max(own.search.scratch_rows for own in self._tasks.values()) if learn else 0
        text = GrowingText(session, prompt)
        own: TaskTraffic  # and `rounds` are known once the prompt was read
        rounds: RoundTimings | None = None
        why_plain: WhyPlain | None = None
        read: ReadPrompt | None = None

        def handle(event: Any) -> Iterator[Any]:
            nonlocal own, rounds, why_plain, read
            self._queries.take()
            if isinstance(event, Prefilled | Round):
                self._learn_costs(event.context.load)
            if isinstance(event, Prefilled):
                own = self._task(task or self._nearest_task(event))
                if learn:
                    read = own.add_prompt(event)
                rounds, why_plain = self._begin(own, learn, event.context.load), own.why_plain
                drafter.method = own.search.method
            assert rounds is not None
            if isinstance(event, Round):
                rounds.add(event)
            elif isinstance(event, Turn):
                yield from text.ended(event.completion)
                if counts:
                    own.count_rounds(rounds)
                if learn:
                    self._learn(own, rounds, event.completion, read)
                info = GenerateInfo("adaptive" if rounds.drafts else "plain", version=own.version)
                info = replace(info, why_plain=why_plain or rounds.why_plain).of(event.completion)
                yield Generated(replace(event.prompt, task=own.name), event.completion, info)
            if isinstance(event, Prefilled | Round):
                yield from text.grown(event)
                if learn and self._may_search(own, prompt.id) and event.context.finish is None:
                    yield from intercept(self._look(own, event.context, prompt.id), handle)
                rounds.begin(self._compared, self._compared_drafts, event.context.load)

        method = Method("adaptive", drafter)
        try:
            yield from intercept(
                session.request(prompt, method, scratch_rows=scratch, with_state=True, **options), handle
            )
        finally:
            self._n_running -= rounds is not None

    def _begin(self, task: TaskTraffic, learn: bool, load: Load) -> RoundTimings:
        """Count a request whose prompt was read; once per as many requests as are running, begin a comparison."""
        self._n_running += 1
        self._n_begun += 1
        n_rounds = task.n_compared_rounds if learn and not self.paused else 0
        rounds = RoundTimings(task.drafts, n_rounds > 0, task.search.layer_set)
        is_over = self._n_running == 1 or load.n_checks >= self._compared.stop
        if n_rounds and is_over and self._n_begun >= self._n_running:
            self._n_begun = 0
            first = load.n_checks + (self._n_running > 1)  # rounds of others have begun in this pass
            self._compared, self._compared_drafts = range(first, first + n_rounds), not rounds.drafts
        return rounds

    def _learn_costs(self, load: Load) -> None:
        """Let the costs follow the passes that were timed since the last event, and store them from time to time."""
        self.costs.learn(load.take_timings())
        now = time.monotonic()
        if self.store is None or now < self._costs_saved_at + SAVE_COSTS_S:
            return
        self._costs_saved_at = now
        if refined := self.costs.refined():
            self._queries.ask("costs", "", partial(self._save_costs, self.store, refined), lambda _: None)

    def _save_costs(self, store: Store, profiles: Sequence[CostProfile]) -> None:
        for profile in profiles:
            store.save_cost_profile(profile)

    def count(self, event: Generated) -> None:
        """Count a request that has ended, however it was decoded."""
        self._task(event.prompt.task).count(event.completion)

    def _look(self, task: TaskTraffic, context: Context, prompt_id: str) -> Work[None]:
        """Look at candidates beside a request, and count the seconds of that."""
        before, expected_s = context.tally.optimise_s, self._look_s(task, prompt_id)
        try:
            yield from task.search.score(context, prompt_id)
        finally:
            task.count_look(context.tally.optimise_s - before, expected_s)

    def _look_s(self, task: TaskTraffic, prompt_id: str) -> float:
        """The seconds that the next look beside a prompt is expected to take, by measured costs."""
        return self.costs.at().target_pass_s(task.search.rows_ahead(prompt_id))

    def _may_search(self, task: TaskTraffic, prompt_id: str) -> bool:
        if self.paused or self._is_busy() or not task.search.optimising:
            return False
        return task.may_search(self._look_s(task, prompt_id)) and self._has_lease(task.name)

    def _has_lease(self, task: str) -> bool:
        """Whether this replica alone, among those on machines alike, surely searches for a task."""
        if self.store is None:
            return True
        take = partial(self._leases.__setitem__, task)
        self._queries.ask("lease", task, partial(self._lease, self.store, task), take, LEASE_S / 3)
        return time.monotonic() < self._leases.get(task, -math.inf)

    def _lease(self, store: Store, task: str, seconds: float = LEASE_S) -> float:
        """Lease the search of a task, or give it back with 0 seconds; returns until when this replica has it."""
        own = self.runtime.info.fingerprint, machine_name(self.runtime), self.runtime.dtype_name, task
        until = time.monotonic() + seconds
        return until if store.jobs.lock(" ".join(("search", *own)), self._owner, seconds) else -math.inf

    def _nearest_task(self, prefilled: Prefilled) -> str:
        """The task whose prompts are most similar to one that was just read, else the default."""
        assert prefilled.state is not None
        state = single(unit(prefilled.state.tolist()))
        near = {task.name: sum(map(mul, state, task.shift.state)) for task in self._tasks.values() if task.shift.state}
        best = max(near, key=lambda name: near[name], default=DEFAULT_TASK)
        return best if near.get(best, 0.0) >= MIN_SIMILARITY else DEFAULT_TASK

    def _learn(self, task: TaskTraffic, rounds: RoundTimings, completion: Completion, read: ReadPrompt | None) -> None:
        if (shifted := task.shifted_by(completion, read)) is not None:
            task.drop_pairs()
            task.shifts = ShiftStatus(task.shifts.n + 1, shifted.reason, task.n_requests + 1)
            logger.info("tuning=shifted task=%s reason=%r", task.name, shifted.reason)
        if task.add(rounds):
            self._store_version(task)

    def _store_version(self, task: TaskTraffic) -> None:
        if self.store is None:
            return
        record = stamped(task.record_in_use(self.model, self.runtime))

        def take(stored: LayerSetRecord) -> None:
            task.version, task.stored_for = stored.version, stored.layer_set

        self._queries.ask("version", task.name, partial(self.store.add_layer_set, record), take)

    def _task(self, name: str) -> TaskTraffic:
        """The task, with the newest plan known by now that any replica has stored for it."""
        self._queries.take()
        if name not in self._tasks and len(self._tasks) >= MAX_TASKS and not self._drop_task():
            name = DEFAULT_TASK
        if name not in self._tasks:
            self._tasks[name] = self._new_task(name)
            self._tasks[name].looked_up = self.store is None
        task = self._tasks[name]
        task.used_at = time.monotonic()
        if self.store is not None:
            take = partial(self._use_stored, task)
            self._queries.ask("plan", name, partial(self._look_up, self.store, name), take, REFRESH_S)
        return task

    def _drop_task(self) -> bool:
        """Drop the untuned task that was used least recently, those without trials first; return whether there is one.

        Requests of it that are being decoded go on with its drafts.
        """
        known = {DEFAULT_TASK, *(each.task for each in self._known)}
        untuned = [task for task in self._tasks.values() if not task.is_tuned and task.name not in known]
        if not untuned:
            return False
        task = min(untuned, key=lambda each: (bool(each.search.trials), each.used_at))
        task.search.close()
        del self._tasks[task.name]
        self._leases.pop(task.name, None)
        self._queries.forget(task.name)
        return True

    def _look_up(self, store: Store, name: str) -> FoundPlan | None:
        """The plan that `best` means for a task here, if it is a layer set for adaptive drafts in our format."""
        runtime = self.runtime
        try:
            found = store.lookup(runtime.info.fingerprint, name, machine_name(runtime), runtime.dtype_name)
        except LayerSetNotFound:
            return None
        record = found.plan.layer_set
        if record is None or found.plan.method != "adaptive" or found.fallback is not None:
            return None
        return None if self.costs.missing(record.layer_set) else found

    def _use_stored(self, task: TaskTraffic, stored: FoundPlan | None) -> None:
        task.looked_up = True
        if stored is None or stored.plan.layer_set is None:
            return
        before, task.best = task.best, stored.version
        if stored.version not in (before, task.version):  # `best` was moved: by another replica, or by hand
            task.use_plan(stored, self._new_task(task.name, stored.plan.layer_set.layer_set).search)

    def _new_task(self, name: str, start: LayerSet | None = None) -> TaskTraffic:
        task = TaskTraffic.begin(name, self.runtime, self.settings, self.costs, self._known, start)
        task.shift = ShiftWatch(self._known, SERVED_ALARM, SERVED_N_LEARN)
        return task

    def steer(self, verb: TuningVerb, task: str | None = None, way: Way | None = None) -> None:
        """Pause or resume searches and comparisons, or pin a task to one way (None: let it be judged again)."""
        if verb == "pin":
            own = self._task(task or DEFAULT_TASK)
            before, own.pinned = own.drafts, way
            own.since = own.since if own.drafts == before else time.time()
        else:
            self.paused = verb == "pause"

    def status(self) -> ModelTuning:
        """Return what is in use, what is being tried, what it costs and what it brings."""
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
            task.search.close()
        if self.store is not None:
            with suppress(StoreError):  # the next engine measures again
                self._save_costs(self.store, self.costs.refined())
        for name, until in self._leases.items():
            if self.store is not None and time.monotonic() < until:
                with suppress(StoreError):  # it ends by itself
                    self._lease(self.store, name, 0.0)
