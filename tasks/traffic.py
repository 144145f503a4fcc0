"""Learn from the requests that a model serves: search beside them, try what was found on them, keep what pays.

A request's output is plain decoding's however it is decoded. So from time to time all requests are decoded for a few
rounds the way that is not in use, plain or drafted: each request has then timings of both ways of one text, and the
verdict's own statistics judge these pairs. The surer they are, the fewer such rounds; there are always some, so that
drafts that stop paying are left, and are taken up again when they pay.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import mul
from typing import Any, TypeVar

from ..core.costs import CostProfile
from ..core.errors import LayerSetNotFound, StoreError
from ..core.events import ModelTuning, SearchStatus, ShiftStatus, TaskTuning, TrialsDone, TuningVerb, Way
from ..core.records import FoundPlan, KnownSet, LayerSetRecord, single, unit
from ..core.settings import SwiftSettings, TuningSettings
from ..core.types import DEFAULT_TASK, Completion, LayerSet, Prompt, Verdict, VerdictWord
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
from ..optimizer.search import Search
from ..optimizer.shift import SERVED_ALARM, SERVED_N_LEARN, AcceptanceChart, ShiftWatch
from ..optimizer.task_state import TunedTask
from ..optimizer.verdict import Timed, judge, speed
from ..store import Store
from .generate import Generated, GenerateInfo, GrowingText
from .recipes import TYPICAL_POSITIONS, stamped, stored_costs

DRAFT_FORMAT = "int4"
SEARCH_SHARE = 0.03  # of the time spent decoding, that searches may take
LATEST = 20  # pairs that a verdict is made of
FEWEST = 6  # below, there is none
JUDGED_EVERY = 2  # requests from one verdict to the next
OTHER_ROUNDS: Mapping[VerdictWord, int] = {
    "unmeasured": 8,
    "use": 2,
    "plain": 4,
}  # of the way that is not in use, in a comparison
LEASE_S = 30.0  # that a replica holds a task's search; it renews it after a third of that
REFRESH_S = 5.0  # between two looks for what other replicas stored
MOST_TASKS = 64  # of one model; requests of further names count as the default's
NEAREST = 0.8  # least cosine of a text's state and a task's, to be taken for that task

NOTHING = Timed(0, 0.0)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Alternating(Drafter):
    """Drafts in a round, or not, as `drafts` says when it begins.

    What drafts is chosen when the request begins, after its prefill: `method` is set by whoever gets its `Prefilled`.
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
        """Draft, or not."""
        self._now = self._drafter if self._drafts() else self._plain
        return (yield from self._now.draft(room))

    def observe(self, outcome: Outcome) -> None:
        self._now.observe(outcome)


@dataclass(frozen=True, slots=True)
class ComparedPasses:
    """The target's passes, from the `first` to before the `end`, whose rounds all draft, or none does.

    All requests take part at once: a plain round beside drafted ones waits for their drafts, and does not tell what
    plain decoding takes.
    """

    first: int = 0
    end: int = 0
    drafts: bool = False


@dataclass(slots=True)
class Rounds:
    """Tokens and seconds of one request's rounds, plain and drafted; `layer_set` is of their drafts.

    Args: drafts: which way is in use. compares: whether it takes part in comparisons.
    """

    drafts: bool
    compares: bool
    layer_set: LayerSet
    spent: list[Timed] = field(default_factory=lambda: [NOTHING, NOTHING])
    alone: list[Timed] = field(default_factory=lambda: [NOTHING, NOTHING])  # of `spent`, with nothing read beside them
    drafted: bool = False  # the round that goes on
    _n_beside: int = 0

    def begin(self, passes: ComparedPasses, load: Load) -> None:
        """Choose the way of the round that begins."""
        compared = self.compares and passes.first <= load.n_checks < passes.end
        self.drafted = passes.drafts if compared else self.drafts
        self._n_beside = load.n_beside

    def add(self, round_: Round) -> None:
        """Count the round that has ended."""
        own = Timed(len(round_.token_ids), round_.draft_s + round_.verify_s)
        self.spent[self.drafted] += own
        if round_.context.load.n_beside == self._n_beside:
            self.alone[self.drafted] += own

    @property
    def pair(self) -> tuple[Timed, Timed] | None:
        """The plain and the drafted rounds, where there were both."""
        plain, drafted = self.alone
        return (plain, drafted) if self.compares and plain.tokens and drafted.tokens else None


@dataclass(slots=True)
class TaskTraffic(TunedTask):
    """One task of a served model: what is known of its drafts, and which way is in use.

    `word` is the verdict on the drafts in use, `pairs` what it is made of: plain and drafted rounds of one request.
    Nothing is searched for until the database has said what it holds (`looked_up`).
    """

    looked_up: bool = False
    version: int | None = None  # of the stored plan in use
    best: int | None = None  # that `best` meant at the latest look
    word: VerdictWord = "unmeasured"
    verdict: Verdict | None = None
    pairs: deque[tuple[Timed, Timed]] = field(default_factory=lambda: deque(maxlen=LATEST))
    paired: LayerSet | None = None  # whose drafts the pairs are of
    pinned: Way | None = None
    n_requests: int = 0
    n_tokens: int = 0
    seconds: float = 0.0
    search_s: float = 0.0
    compared_s: float = 0.0  # of the rounds of the way that is not in use
    saved_s: float = 0.0  # that plain decoding would have taken longer, by the ratio known then
    stored_for: LayerSet | None = None
    since: float = field(default_factory=time.time)  # when the way in use became that; seconds since 1970
    shifts: ShiftStatus = field(default_factory=ShiftStatus)

    @property
    def drafts(self) -> bool:
        """Whether drafts are in use: until they are known not to pay."""
        return self.pinned == "best" or (self.pinned is None and self.word != "plain")

    @property
    def n_other_rounds(self) -> int:
        """Rounds of the next comparison."""
        return 0 if self.pinned is not None else OTHER_ROUNDS[self.word]

    def may_search(self, pass_s: float) -> bool:
        """Whether the search's share of the time has room for a pass of so many seconds."""
        has_room = self.search_s + pass_s <= SEARCH_SHARE * self.seconds
        return self.looked_up and self.pinned is None and has_room

    def count(self, rounds: Rounds) -> None:
        """Count a request's rounds."""
        both = rounds.spent[False] + rounds.spent[True]
        self.n_requests += 1
        self.n_tokens += both.tokens
        self.seconds += both.seconds
        self.compared_s += rounds.spent[not rounds.drafts].seconds
        if self.verdict is not None and self.verdict.ratio is not None:
            self.saved_s += rounds.spent[True].seconds * (self.verdict.ratio - 1)

    def add(self, rounds: Rounds) -> bool:
        """Learn from a request's rounds; returns whether that is news to be stored."""
        layer_set, pair = self.search.layer_set, rounds.pair
        if self.paired != layer_set:
            self.forget()
            self.paired = layer_set
        if pair is None or rounds.layer_set != layer_set:
            return False
        self.pairs.append(pair)
        if len(self.pairs) < FEWEST or self.n_requests % JUDGED_EVERY:
            return False
        self.verdict = self._judged()
        assert self.verdict.interval is not None
        pays, before = self.verdict.word == "use", self.word
        self.word = "use" if pays else "plain" if self.verdict.interval[1] < 1 else before
        if "plain" in (self.word, before) and self.word != before:
            self.since = time.time()
        return pays and (before != "use" or self.stored_for != layer_set)

    def _judged(self) -> Verdict:
        return judge([drafted for _, drafted in self.pairs], [plain for plain, _ in self.pairs], None)

    def forget(self) -> None:
        """Judge anew: what drafts is another set, or the text another kind."""
        self.pairs.clear()
        self.verdict = None

    def take_up(self, stored: FoundPlan, search: Search) -> None:
        """Use a stored plan's drafts, those of `search`, from the next request on.

        What a server has stored while it searched goes on being searched and judged from there; a job's search is over.
        """
        plan, record = stored.plan, stored.plan.layer_set
        self.search.finish("a stored plan is in use")
        self.search = search
        self.version, self.word, self.stored_for = stored.version, plan.verdict, search.layer_set
        self.pairs.clear()
        self.paired = search.layer_set
        self.verdict = Verdict(plan.verdict, plan.measured_speedup, plan.measured_interval)
        if record is not None and record.job is None and record.evidence:
            self.pairs += [(Timed(int(n), s), Timed(int(m), t)) for n, s, m, t in record.evidence]
            self.verdict = self._judged()
        else:
            search.finish("a stored plan is in use")
        self.shift.chart, self.shift.settled = AcceptanceChart(), False  # requests in progress have the old drafts

    def status(self) -> TaskTuning:
        """Return what `GET /v1/tuning` says of it."""
        found, search = self.verdict, self.search
        low, high = found.interval if found is not None and found.interval is not None else (None, None)
        return TaskTuning(
            task=self.name,
            in_use="drafts" if self.drafts else "plain",
            since=round(self.since, 3),
            verdict=self.word,
            version=self.version,
            pinned=self.pinned,
            layer_set=search.layer_set,
            pairs=len(self.pairs),
            ratio=None if found is None or found.ratio is None else round(found.ratio, 4),
            interval=None if low is None or high is None else (round(low, 4), round(high, 4)),
            shifts=self.shifts,
            requests=self.n_requests,
            tokens=self.n_tokens,
            seconds=round(self.seconds, 3),
            compared_s=round(self.compared_s, 3),
            saved_s=round(self.saved_s, 3),
            plain_tok_s=_speed([plain for plain, _ in self.pairs]),
            drafted_tok_s=_speed([drafted for _, drafted in self.pairs]),
            search=SearchStatus(
                trials=len(search.trials),
                seconds=round(self.search_s, 3),
                share=round(self.search_s / self.seconds, 4) if self.seconds else 0.0,
                matchness=search.matchness,
                ended=search.stopped_because or None,
                latest=search.trials[-1] if search.trials else None,
            ),
        )


def _speed(runs: Sequence[Timed]) -> float | None:
    return round(speed(runs), 2) if runs else None


class Questions:
    """Asks the database in a thread of its own; `take` hands over the answers in the thread that decodes.

    No round waits for a database that is slow or away: what it was asked is not known until it has answered. Questions
    are answered in their order.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "traffic")
        self._open: dict[tuple[str, str], tuple[Future[Any], Callable[[Any], None]]] = {}
        self._asked: dict[tuple[str, str], float] = {}

    def ask(self, what: str, task: str, work: Callable[[], T], take: Callable[[T], None], every_s: float = 0.0) -> None:
        """Have `work` done and `take` get what it returns; not while that is open, nor again within `every_s`."""
        question, now = (what, task), time.monotonic()
        if question in self._open or now - self._asked.get(question, -math.inf) < every_s:
            return
        self._asked[question] = now
        self._open[question] = self._pool.submit(work), take

    def take(self) -> None:
        """Hand over the answers that are there; where the database was away, say so and leave things as they are."""
        for question, (answer, take) in list(self._open.items()):
            if not answer.done():
                return
            del self._open[question]
            try:
                take(answer.result())
            except StoreError as error:
                logger.warning("tuning=no %s task=%s reason=%r", *question, str(error))

    def close(self) -> None:
        """Wait for the question being answered and for versions to be stored; what else was asked is dropped."""
        for question, (answer, _) in list(self._open.items()):
            if question[0] != "version" and answer.cancel():
                del self._open[question]
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
        self.costs: CostProfile = stored_costs(runtime, store, TYPICAL_POSITIONS, on_step, [self.settings.draft_format])
        runtime.copies.prepare(LayerSet(runtime.n_layers).filled(self.settings.draft_format), on_step)
        runtime.copies.kept.add(self.settings.draft_format)
        self.paused = False
        self._is_busy = is_busy
        self._compared = ComparedPasses()
        self._n_running = self._n_begun = 0  # requests being decoded; begun since the latest comparison did
        self._known: tuple[KnownSet, ...] = ()
        self._tasks: dict[str, TaskTraffic] = {}
        self._owner = secrets.token_hex(8)
        self._leases: dict[str, float] = {}  # by task: until when its search is ours, as `time.monotonic` counts
        self._questions = Questions()
        if store is not None:
            self._known = tuple(store.known_sets(runtime.info.fingerprint))
        for known in self._known:  # the newest first
            if known.task and known.task not in self._tasks and len(self._tasks) < MOST_TASKS:
                self._tasks[known.task] = self._begun(known.task)
                self._tasks[known.task].shift.total = known.state

    def work(
        self, session: Session, prompt: Prompt, task: str | None, learn: bool = True, **options: Any
    ) -> Work[None]:
        """Decode one request; yields `TextAdded` and `Generated`.

        Args: task: whose drafts; None: the task whose prompts lie nearest to this one. learn: whether ways are compared
              on it, and the search may use it.
        """
        typical = self._task(task or DEFAULT_TASK).search.method
        drafter = Alternating(typical, lambda: rounds is not None and rounds.drafted)
        scratch = max(own.search.scratch_rows for own in self._tasks.values())
        text = GrowingText(session, prompt)
        own: TaskTraffic  # and `rounds` are known once the prompt was read
        rounds: Rounds | None = None

        def handle(event: Any) -> Iterator[Any]:
            nonlocal own, rounds
            self._questions.take()
            if isinstance(event, Prefilled):
                own = self._task(task or self._nearest(event))
                if learn:
                    own.saw(event)
                rounds = self._begin(own, learn, event.context.load)
                drafter.method = own.search.method
            assert rounds is not None
            if isinstance(event, Round):
                rounds.add(event)
            elif isinstance(event, TrialsDone):
                own.search_s += sum(trial.seconds for trial in event.trials)
            elif isinstance(event, Turn):
                yield from text.ended(event.completion)
                own.count(rounds)
                if learn:
                    self._learn(own, rounds, event.completion)
                info = GenerateInfo("adaptive" if rounds.drafts else "plain", version=own.version)
                yield Generated(replace(event.prompt, task=own.name), event.completion, info)
            if isinstance(event, Prefilled | Round):
                yield from text.grown(event)
                if learn and self._may_search(own) and own.search.scratch_rows <= scratch:
                    yield from intercept(_unless_done(own, event.context, prompt.id), handle)
                rounds.begin(self._compared, event.context.load)

        method = Method("adaptive", drafter)
        try:
            yield from intercept(
                session.request(prompt, method, scratch_rows=scratch, with_state=True, **options), handle
            )
        finally:
            self._n_running -= rounds is not None

    def _begin(self, task: TaskTraffic, learn: bool, load: Load) -> Rounds:
        """Take in a request whose prompt was read; every so many as are running, a comparison begins."""
        self._n_running += 1
        self._n_begun += 1
        n_rounds = task.n_other_rounds if learn and not self.paused else 0
        rounds = Rounds(task.drafts, n_rounds > 0, task.search.layer_set)
        is_over = self._n_running == 1 or load.n_checks >= self._compared.end
        if n_rounds and is_over and self._n_begun >= self._n_running:
            self._n_begun = 0
            first = load.n_checks + (self._n_running > 1)  # rounds of others have begun in this pass
            self._compared = ComparedPasses(first, first + n_rounds, drafts=not rounds.drafts)
        return rounds

    def _may_search(self, task: TaskTraffic) -> bool:
        rows = self.settings.context_window * (1 + task.search.batch)
        if self.paused or self._is_busy() or not task.search.optimising:
            return False
        return task.may_search(self.costs.target_pass_s(rows)) and self._leads(task.name)

    def _leads(self, task: str) -> bool:
        """Return whether the search for a task is surely this replica's: one at a time, on machines alike, has it."""
        if self.store is None:
            return True
        take = partial(self._leases.__setitem__, task)
        self._questions.ask("lease", task, partial(self._lease, self.store, task), take, LEASE_S / 3)
        return time.monotonic() < self._leases.get(task, -math.inf)

    def _lease(self, store: Store, task: str, seconds: float = LEASE_S) -> float:
        """Ask for the search of a task, or give it back with 0 seconds; returns until when it is this replica's."""
        own = self.runtime.info.fingerprint, machine_name(self.runtime), self.runtime.dtype_name, task
        until = time.monotonic() + seconds
        return until if store.jobs.lock(" ".join(("search", *own)), self._owner, seconds) else -math.inf

    def _nearest(self, prefilled: Prefilled) -> str:
        """The task whose prompts lie nearest to a prompt that was just read, if one is near."""
        assert prefilled.state is not None
        state = single(unit(prefilled.state.tolist()))
        near = {task.name: sum(map(mul, state, task.shift.state)) for task in self._tasks.values() if task.shift.state}
        best = max(near, key=lambda name: near[name], default=DEFAULT_TASK)
        return best if near.get(best, 0.0) >= NEAREST else DEFAULT_TASK

    def _learn(self, task: TaskTraffic, rounds: Rounds, completion: Completion) -> None:
        """Learn from a request that has ended."""
        if (shifted := task.shifted_by(completion)) is not None:
            task.forget()
            task.shifts = ShiftStatus(task.shifts.n + 1, shifted.reason, task.n_requests)
            logger.info("tuning=shifted task=%s reason=%r", task.name, shifted.reason)
        if task.add(rounds):
            self._keep(task)

    def _keep(self, task: TaskTraffic) -> None:
        """Have the drafts stored with their evidence as a new version."""
        if self.store is None or task.verdict is None:
            return
        record = stamped(task.record(self.model, self.runtime, task.verdict, task.pairs))

        def kept(stored: LayerSetRecord) -> None:
            task.version, task.stored_for = stored.version, stored.layer_set

        self._questions.ask("version", task.name, partial(self.store.add_layer_set, record), kept)

    def _task(self, name: str) -> TaskTraffic:
        """The task, with what is known by now of the plans that any replica has stored for it."""
        self._questions.take()
        if name not in self._tasks and len(self._tasks) >= MOST_TASKS:
            name = DEFAULT_TASK
        if name not in self._tasks:
            self._tasks[name] = self._begun(name)
            self._tasks[name].looked_up = self.store is None
        task = self._tasks[name]
        if self.store is not None:
            found = partial(self._looked_up, task)
            self._questions.ask("plan", name, partial(self._stored, self.store, name), found, REFRESH_S)
        return task

    def _stored(self, store: Store, name: str) -> FoundPlan | None:
        """What `best` means for a task here, if that is a layer set for adaptive drafts in our format."""
        runtime = self.runtime
        try:
            found = store.lookup(runtime.info.fingerprint, name, machine_name(runtime), runtime.dtype_name)
        except LayerSetNotFound:
            return None
        own = found.plan.layer_set
        if own is None or found.plan.method != "adaptive" or found.fallback is not None:
            return None
        return None if self.costs.missing(own.layer_set) else found

    def _looked_up(self, task: TaskTraffic, stored: FoundPlan | None) -> None:
        task.looked_up = True
        if stored is None or stored.plan.layer_set is None:
            return
        before, task.best = task.best, stored.version
        if stored.version not in (before, task.version):  # `best` was moved: by another replica, or by hand
            task.take_up(stored, self._begun(task.name, stored.plan.layer_set.layer_set).search)

    def _begun(self, name: str, start: LayerSet | None = None) -> TaskTraffic:
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
        self._questions.take()
        return ModelTuning(self.paused, tuple(task.status() for task in self._tasks.values()))

    def close(self) -> None:
        """End all searches, so that another replica can take them up."""
        self._questions.close()
        for task in self._tasks.values():
            task.search.close()
        for name, until in self._leases.items():
            if self.store is not None and time.monotonic() < until:
                with suppress(StoreError):  # it ends by itself
                    self._lease(self.store, name, 0.0)


def _unless_done(task: TaskTraffic, context: Context, prompt_id: str) -> Work[None]:
    if context.finish is None:
        yield from task.search.score(context, prompt_id)
