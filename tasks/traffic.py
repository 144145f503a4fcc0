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
from collections.abc import Callable, Sequence
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
from ..core.plainly import WhyPlain
from ..core.records import FoundPlan, KnownSet, LayerSetRecord, single, unit
from ..core.settings import SwiftSettings, TuningSettings
from ..core.types import DEFAULT_TASK, Completion, LayerSet, Prompt
from ..decoding.context import Context
from ..decoding.draft import Draft, Drafter, Outcome
from ..decoding.events import Generated, GenerateInfo, Prefilled, Round, Turn, WorkEvent
from ..decoding.load import Load
from ..decoding.methods import PLAIN, Method
from ..decoding.session import Session
from ..decoding.work import PassGenerator, Work, subscribed
from ..models.costs import machine_name
from ..models.runtime import Runtime
from ..models.saved import OnStep, no_step
from ..optimizer.shift import SERVED_ALARM, SERVED_N_LEARN, ReadPrompt, ShiftWatch
from ..store import Store
from .generate import GrowingText
from .job import patiently
from .recipes import TYPICAL_POSITIONS, stamped, stored_costs
from .served_task import RoundTimings, TaskTraffic

DRAFT_FORMAT = "int4"
LEASE_S = 30.0  # A replica holds a task's search for so long, and renews the lease after a third of it.
SAVE_COSTS_S = 60.0  # The time between two times of storing costs that followed decoding.
REFRESH_S = 5.0  # The time between two look-ups of what other replicas stored.
MAX_TASKS = 64  # When as many tasks of a model are tuned, further names count as the default task.
MIN_SIMILARITY = 0.8  # A text with a larger cosine of its state to a task's state is taken for that task.

T = TypeVar("T")

logger = logging.getLogger(__name__)


class SwitchedDrafter(Drafter):
    """Drafts by `method` in a round, or decodes it plainly, as `drafts` says when the round begins.

    The method may change until the prompt was read.
    """

    def __init__(self, method: Method, drafts: Callable[[], bool]) -> None:
        self.method, self._drafts = method, drafts

    @property
    def layer_set(self) -> LayerSet | None:
        return self.method.layer_set

    def max_rows(self, room: int) -> int:
        return self.method.drafter.max_rows(room)

    def start(self) -> None:
        self._drafter, self._plain = (method.drafter.begin(self.context) for method in (self.method, PLAIN))
        self._current = self._plain

    def draft(self, room: int) -> PassGenerator[Draft]:
        self._current = self._drafter if self._drafts() else self._plain
        return (yield from self._current.draft(room))

    def observe(self, outcome: Outcome) -> None:
        self._current.observe(outcome)


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


class ServedRequest:
    """One request while it is decoded: what its client gets, and what is learnt from it.

    Its task is known once its prompt was read, where the request names none: `handle` of `Prefilled` begins its rounds.

    Args: task: whose drafts; None: the task whose prompts are most similar. learns: whether ways are compared on the
          request, and the search may use it. counts: whether its rounds are part of the task's figures.
    """

    def __init__(
        self, traffic: Traffic, session: Session, prompt: Prompt, task: str | None, learns: bool, counts: bool
    ) -> None:
        self._traffic, self._prompt_id, self._name = traffic, prompt.id, task
        self._learns, self._counts = learns, counts
        self._text = GrowingText(session, prompt)
        self._task = traffic.task(task or DEFAULT_TASK)
        self._rounds: RoundTimings | None = None
        self._why_plain: WhyPlain | None = None
        self._read: ReadPrompt | None = None
        self.drafter = SwitchedDrafter(
            self._task.search.method, lambda: self._rounds is not None and self._rounds.is_drafted
        )

    @property
    def is_begun(self) -> bool:
        """Whether its prompt was read, so that it counts as running."""
        return self._rounds is not None

    def handle(self, event: WorkEvent) -> Work[None]:
        """Report what the client gets of an event of the decoding, and search for better drafts after it."""
        self._traffic.take_stored()
        match event:
            case Prefilled(context=context):
                self._traffic.learn_costs(context.load)
                self._begin(event)
            case Round(context=context):
                self._traffic.learn_costs(context.load)
                self._begun.add(event)
            case Turn(completion=completion):
                yield from self._text.ended(completion)
                yield self._ended(event)
                return
            case _:
                return
        yield from self._text.grown(event)
        if self._learns and self._traffic.may_search(self._task, self._prompt_id) and context.finish is None:
            yield from self._traffic.look(self._task, context, self._prompt_id)
            self._traffic.take_stored()
        self._traffic.compare(self._begun, context.load)

    @property
    def _begun(self) -> RoundTimings:
        assert self._rounds is not None
        return self._rounds

    def _begin(self, prefilled: Prefilled) -> None:
        self._task = self._traffic.task(self._name or self._traffic.nearest_task(prefilled))
        if self._learns:
            self._read = self._task.add_prompt(prefilled)
        self._rounds = self._traffic.begin(self._task, self._learns, prefilled.context.load)
        self._why_plain = self._task.why_plain
        self.drafter.method = self._task.search.method

    def _ended(self, turn: Turn) -> Generated:
        task, rounds = self._task, self._begun
        if self._counts:
            task.count_rounds(rounds)
        if self._learns:
            self._traffic.learn(task, rounds, turn.completion, self._read)
        info = GenerateInfo("adaptive" if rounds.drafts else "plain", version=task.version)
        info = replace(info, why_plain=self._why_plain or rounds.why_plain).of(turn.completion)
        return Generated(replace(turn.prompt, task=task.name), turn.completion, info)


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
        if store is not None:  # Look-ups then find what is stored under the model's alias and path, too.
            named = replace(runtime.info, names=(*runtime.info.names, model))
            patiently(lambda: store.remember_model(named))
        self.costs = self._stored_costs(on_step)
        self._costs_saved_at = time.monotonic()
        runtime.copies.prepare(LayerSet(runtime.n_layers).filled(self.settings.draft_format), on_step)
        runtime.copies.kept.add(self.settings.draft_format)
        self.paused = False
        self._is_busy = is_busy
        # The target's passes of the latest comparison, whose rounds all draft, or none does. All requests take part at
        # once: a plain round beside drafted ones waits for their drafts, so its time is not that of plain decoding.
        self._compared, self._compared_drafts = range(0), False
        self._n_running = self._n_begun = 0  # Requests being decoded, and those begun since the latest comparison.
        self._tasks: dict[str, TaskTraffic] = {}
        self._owner = secrets.token_hex(8)
        self._leases: dict[str, float] = {}  # By task: until when this replica searches, in `time.monotonic` seconds.
        self._queries = BackgroundQueries()
        self._known: tuple[KnownSet, ...] = ()
        if store is not None:
            self._known = tuple(store.known_sets(runtime.info.fingerprint))
        for known_set in self._known:  # The newest come first.
            if known_set.task and known_set.task not in self._tasks and len(self._tasks) < MAX_TASKS:
                self._tasks[known_set.task] = self._new_task(known_set.task)
                self._tasks[known_set.task].shift.total = known_set.state

    def _stored_costs(self, on_step: OnStep) -> ObservedCosts:
        """Return stored costs of the model's passes in all contexts, those of a typical one measured if need be."""
        runtime, draft_format = self.runtime, self.settings.draft_format
        profile = stored_costs(runtime, self.store, TYPICAL_POSITIONS, on_step, [draft_format])
        stored: Sequence[CostProfile] = []
        if self.store is not None:
            with suppress(StoreError):  # The typical context's costs are enough.
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
        """Decode one request; reports `TextAdded` and `Generated`, too. Arguments as for `ServedRequest`."""
        served = ServedRequest(self, session, prompt, task, learn, counts)
        scratch = max(task_known.search.scratch_rows for task_known in self._tasks.values()) if learn else 0
        method, given = Method("adaptive", served.drafter), {**options, "scratch_rows": scratch, "with_state": True}
        try:
            yield from subscribed(session.request(prompt, method, **given), served.handle)
        finally:
            self._n_running -= served.is_begun

    def begin(self, task: TaskTraffic, learn: bool, load: Load) -> RoundTimings:
        """Count a request whose prompt was read; once per as many requests as are running, begin a comparison."""
        self._n_running += 1
        self._n_begun += 1
        n_rounds = task.n_compared_rounds if learn and not self.paused else 0
        rounds = RoundTimings(task.drafts, n_rounds > 0, task.search.layer_set)
        is_over = self._n_running == 1 or load.n_checks >= self._compared.stop
        if n_rounds and is_over and self._n_begun >= self._n_running:
            self._n_begun = 0
            first = load.n_checks + (self._n_running > 1)  # Other requests' rounds have begun in this pass.
            self._compared, self._compared_drafts = range(first, first + n_rounds), not rounds.drafts
        return rounds

    def compare(self, rounds: RoundTimings, load: Load) -> None:
        """Begin the next round of a request, in the way that the present comparison has, if there is one."""
        rounds.begin(self._compared, self._compared_drafts, load)

    def take_stored(self) -> None:
        """Take in what queries of the database have brought."""
        self._queries.take()

    def learn_costs(self, load: Load) -> None:
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
        self.task(event.prompt.task).count(event.completion)

    def look(self, task: TaskTraffic, context: Context, prompt_id: str) -> PassGenerator[None]:
        """Look at candidates beside a request, and count the seconds of that."""
        before, expected_s = context.tally.optimise_s, self._look_s(task, prompt_id)
        try:
            yield from task.search.score(context, prompt_id)
        finally:
            task.count_look(context.tally.optimise_s - before, expected_s)

    def _look_s(self, task: TaskTraffic, prompt_id: str) -> float:
        """The seconds that the next look beside a prompt is expected to take, by measured costs."""
        return self.costs.at().target_pass_s(task.search.rows_ahead(prompt_id))

    def may_search(self, task: TaskTraffic, prompt_id: str) -> bool:
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
        place = self.runtime.info.fingerprint, machine_name(self.runtime), self.runtime.dtype_name
        until = time.monotonic() + seconds
        return until if store.jobs.lock(" ".join(("search", *place, task)), self._owner, seconds) else -math.inf

    def nearest_task(self, prefilled: Prefilled) -> str:
        """The task whose prompts are most similar to one that was just read, else the default."""
        assert prefilled.state is not None
        state = single(unit(prefilled.state.tolist()))
        states = {task.name: task.shift.state for task in self._tasks.values()}
        cosines = {name: sum(map(mul, state, of_task)) for name, of_task in states.items() if of_task}
        nearest = max(cosines, key=lambda name: cosines[name], default=DEFAULT_TASK)
        return nearest if cosines.get(nearest, 0.0) >= MIN_SIMILARITY else DEFAULT_TASK

    def learn(self, task: TaskTraffic, rounds: RoundTimings, completion: Completion, read: ReadPrompt | None) -> None:
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

    def task(self, name: str) -> TaskTraffic:
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
        stored = {DEFAULT_TASK, *(known_set.task for known_set in self._known)}
        untuned = [task for task in self._tasks.values() if not task.is_tuned and task.name not in stored]
        if not untuned:
            return False
        task = min(untuned, key=lambda candidate: (bool(candidate.search.trials), candidate.used_at))
        task.search.close()
        del self._tasks[task.name]
        self._leases.pop(task.name, None)
        self._queries.forget(task.name)
        return True

    def _look_up(self, store: Store, name: str) -> FoundPlan | None:
        """The plan that `best` means for a task here, if it is a layer set for adaptive drafts in our format."""
        runtime = self.runtime
        try:
            plan = store.lookup(runtime.info.fingerprint, name, machine_name(runtime), runtime.dtype_name)
        except LayerSetNotFound:
            return None
        record = plan.plan.layer_set
        if record is None or plan.plan.method != "adaptive" or plan.fallback is not None:
            return None
        return None if self.costs.missing(record.layer_set) else plan

    def _use_stored(self, task: TaskTraffic, stored: FoundPlan | None) -> None:
        task.looked_up = True
        if stored is None or stored.plan.layer_set is None:
            return
        before, task.best = task.best, stored.version
        if stored.version not in (before, task.version):  # Another replica, or a person, has moved `best`.
            task.use_plan(stored, self._new_task(task.name, stored.plan.layer_set.layer_set).search)

    def _new_task(self, name: str, start: LayerSet | None = None) -> TaskTraffic:
        task = TaskTraffic.begin(name, self.runtime, self.settings, self.costs, self._known, start)
        task.shift = ShiftWatch(self._known, SERVED_ALARM, SERVED_N_LEARN)
        return task

    def steer(self, verb: TuningVerb, task: str | None = None, way: Way | None = None) -> None:
        """Pause or resume searches and comparisons, or pin a task to one way (None: let it be judged again)."""
        if verb == "pin":
            steered = self.task(task or DEFAULT_TASK)
            before, steered.pinned = steered.drafts, way
            steered.since = steered.since if steered.drafts == before else time.time()
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
            with suppress(StoreError):  # The next engine measures again.
                self._save_costs(self.store, self.costs.refined())
        for name, until in self._leases.items():
            if self.store is not None and time.monotonic() < until:
                with suppress(StoreError):  # The lease ends by itself.
                    self._lease(self.store, name, 0.0)
