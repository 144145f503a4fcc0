"""Layer sets over HTTP: single lookups, batches of lookups, and lists.

Lookups must be fast. So answers are encoded once, one query every half second checks which of them are still valid, and
equal concurrent lookups share a database query.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, cast

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, Header, Path, Query, Request
from prometheus_client import Histogram
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from ..core.errors import NotFound, StoreUnavailable, SwiftoptError
from ..core.records import FoundPlan, LayerSetList, ModelList
from ..core.settings import EngineName
from ..core.types import DEFAULT_TASK
from ..store import Store
from ..store.plans import REREAD_S, LookupState, tasks_between
from .bodies import Strict
from .errors import MEDIA_TYPE, Problem, as_problem, kind_of
from .middleware import Shared
from .schemas import Depth, Word

FRESH_S = 0.5  # Age in seconds from which a cached answer is checked in the background.
LONGEST_S = 2.0  # Age in seconds from which a cached answer is no longer used.
MAX_ANSWERS = 10_000
MAX_QUERIES = 1000
THREADS = 4  # Threads reserved for cache misses, so that other slow requests do not delay lookups.
BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
CACHE_CONTROL = "max-age=1"

router = APIRouter(prefix="/v1", tags=["layer sets"])


class LookupQuery(Strict):
    """One lookup of a batch."""

    model_config = ConfigDict(frozen=True)

    model: Word
    task: Word
    alias: Word = "best"
    engine: EngineName | None = None  # Selects this engine's best plan instead of `alias`.
    device: Word | None = None
    dtype: Word | None = None
    version: Depth | None = None  # Selects a stored version instead of `alias`.


class Batch(Strict):
    """Lookups to answer together."""

    queries: list[LookupQuery] = Field(max_length=MAX_QUERIES)


@dataclass(frozen=True, slots=True)
class PlanAnswer(FoundPlan):
    """How to decode, under the requested names; `fallback` describes how the plan differs from the request.

    `layer_set` and `learned` are null if the method needs none, `alias` if a version was requested.
    """

    model: str = ""
    task: str = ""


class LookupAnswers(BaseModel):
    """An answer per query, in order."""

    schema_: Literal["swiftopt.lookup/1"] = Field(alias="schema")
    answers: list[PlanAnswer | Problem]


Answer = dict[str, Any] | SwiftoptError


def find_plans(store: Store, queries: Sequence[LookupQuery]) -> list[Answer]:
    """Return the JSON object of each lookup, or its error; lookups that differ only in the task share a query.

    Raises: StoreUnavailable: the database is unreachable.
    """
    tasks: dict[LookupQuery, list[str]] = {}  # Tasks of queries that differ only in the task, by the first query.
    for query in queries:
        if query.version is None:
            tasks.setdefault(query.model_copy(update={"task": ""}), []).append(query.task)
    plans = {
        query: store.lookup_many(query.model, names, query.device, query.dtype, query.engine or query.alias)
        for query, names in tasks.items()
        if len(names) > 1  # Single lookups follow below.
    }
    return [
        _find_plan(store, query, plans.get(query.model_copy(update={"task": ""}), {}).get(query.task))
        for query in queries
    ]


def _find_plan(store: Store, query: LookupQuery, plan: FoundPlan | None) -> Answer:
    """Return the JSON object of a lookup, or its error, which says what is stored.

    Args: plan: the result if it is known; None: look it up.
    """
    try:
        if query.version is not None:
            plan = store.plan(query.model, query.task, query.version)
        elif plan is None:
            plan = store.lookup(query.model, query.task, query.device, query.dtype, query.engine or query.alias)
    except StoreUnavailable:
        raise
    except SwiftoptError as error:
        return error
    alias = plan.alias if query.version is None else None
    return PlanAnswer(plan.plan, plan.version, alias, plan.fallback, query.model, query.task).to_json()


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """The encoded answer or problem of a query, read at `read_at_s` (monotonic clock) in the model's `state`."""

    status: int
    media_type: str
    body: bytes
    etag: str
    read_at_s: float
    state: LookupState


@dataclass(frozen=True, slots=True)
class CheckedState:
    """The state of a model, read at `read_at_s` (monotonic clock)."""

    state: LookupState
    read_at_s: float


Loaded = dict[LookupQuery, CachedAnswer | SwiftoptError]  # The result of each query, or its error.


class LookupCache:
    """Cached answers. `find_answers` runs in a thread, once for equal concurrent queries.

    One database query in the background, `states_of`, reads for all recently requested models whether an alias has
    moved. So few requests wait for the database: an answer is looked up again only if its task is among `tasks_moved`
    since, and every REREAD_S. NotFound is cached like an answer.

    Raises: SwiftoptError: any other error of a query, which is not cached.
    """

    def __init__(
        self,
        find_answers: Callable[[Sequence[LookupQuery]], Sequence[Answer]],
        states_of: Callable[[Sequence[str]], Mapping[str, LookupState]],
        tasks_moved: Callable[[int, int | None], Collection[str]],
    ) -> None:
        self._find_answers, self._states_of, self._tasks_moved = find_answers, states_of, tasks_moved
        self._cached: dict[LookupQuery, CachedAnswer] = {}
        self._states: dict[str, CheckedState] = {}  # By model.
        self._asked_at_s: dict[str, float] = {}  # By model.
        self._loading: dict[LookupQuery, asyncio.Task[Loaded]] = {}
        self._checking: asyncio.Task[None] | None = None
        self._threads: CapacityLimiter | None = None
        self.times = Histogram(
            "swiftopt_lookup_seconds", "Seconds per single lookup.", registry=None, buckets=BUCKETS_S
        )

    async def get(self, queries: Sequence[LookupQuery]) -> list[CachedAnswer]:
        """Return answers at most `LONGEST_S` old; from `FRESH_S` on, read the models' states in the background."""
        now_s, distinct = time.monotonic(), dict.fromkeys(queries)
        self._asked_at_s |= dict.fromkeys((query.model for query in distinct), now_s)
        age_s = max((self._age_s(query, now_s) for query in distinct if query in self._cached), default=0.0)
        if age_s >= FRESH_S and self._checking is None:
            self._checking = asyncio.create_task(self._check())
            self._checking.add_done_callback(self._checked)
        if age_s >= LONGEST_S and self._checking is not None:
            # Shield the task, because a caller that disconnects must not cancel it for others.
            await asyncio.shield(self._checking)
        absent = {query for query in distinct if self._age_s(query, now_s) >= LONGEST_S}
        old = {query for query in distinct.keys() - absent if now_s >= self._cached[query].read_at_s + REREAD_S}
        answers: dict[LookupQuery, CachedAnswer | SwiftoptError] = {
            query: self._cached[query] for query in distinct if query not in absent
        }
        if to_load := [query for query in distinct if query in absent | old and query not in self._loading]:
            task = asyncio.create_task(self._load(to_load))
            self._loading |= dict.fromkeys(to_load, task)
            task.add_done_callback(partial(self._loaded, to_load))
        for query, task in {query: self._loading[query] for query in absent}.items():
            answers[query] = (await asyncio.shield(task))[query]
        return [_unless_error(answers[query]) for query in queries]

    def _age_s(self, query: LookupQuery, now_s: float) -> float:
        """Return the seconds since an answer was last known to be current; infinity without an answer."""
        if (answer := self._cached.get(query)) is None:
            return math.inf
        checked = self._states.get(query.model)
        # A missing version may be stored later without a move of an alias.
        if checked is None or checked.state != answer.state or (query.version is not None and answer.status != 200):
            return now_s - answer.read_at_s
        return now_s - max(answer.read_at_s, checked.read_at_s)

    async def _check(self) -> None:
        """Read the states of recently requested models, and confirm the answers that no move of an alias affects."""
        lately_s = time.monotonic() - REREAD_S
        self._asked_at_s = {model: asked_s for model, asked_s in self._asked_at_s.items() if asked_s >= lately_s}
        models = list(self._asked_at_s)
        states, moved = await to_thread.run_sync(self._read_states, models, limiter=self._limiter())
        for query, answer in self._cached.items() if moved else ():
            tasks = moved.get(query.model, ())
            if tasks and query.task not in tasks and answer.state == self._states[query.model].state:
                self._cached[query] = replace(answer, state=states[query.model].state)
        self._states = states

    def _read_states(self, models: Sequence[str]) -> tuple[dict[str, CheckedState], dict[str, Collection[str]]]:
        """Return the models' states, and for models with few changes the tasks that moved since the previous one."""
        now_s = time.monotonic()  # The states' age counts from before the query.
        states, moved = dict[str, CheckedState](), dict[str, Collection[str]]()
        for model, state in {**dict.fromkeys(models), **self._states_of(models)}.items():
            last, states[model] = self._states.get(model), CheckedState(state, now_s)
            tasks = None if last is None else tasks_between(last.state, state, self._tasks_moved)
            if tasks and DEFAULT_TASK not in tasks:
                moved[model] = tasks
        return states, moved

    async def _load(self, queries: Sequence[LookupQuery]) -> Loaded:
        loaded = await to_thread.run_sync(self._read_answers, queries, limiter=self._limiter())
        for query, answer in loaded.items():
            self._cached.pop(query, None)
            if isinstance(answer, CachedAnswer):
                self._cached[query] = answer
        while len(self._cached) > MAX_ANSWERS:
            del self._cached[next(iter(self._cached))]  # Drop the oldest answer.
        # `_check` forgets models, but runs only if a query is repeated.
        if len(self._asked_at_s) > 2 * MAX_ANSWERS:
            models = {query.model for query in self._cached}
            self._asked_at_s = {model: self._asked_at_s[model] for model in models & self._asked_at_s.keys()}
        return loaded

    def _read_answers(self, queries: Sequence[LookupQuery]) -> Loaded:
        now_s = time.monotonic()
        # Read the state before the answers: an answer newer than its state is only read once more than needed.
        states = self._states_of(list({query.model for query in queries}))
        answers = self._find_answers(queries)
        return {
            query: _encoded(answer, now_s, states.get(query.model))
            for query, answer in zip(queries, answers, strict=True)
        }

    def _limiter(self) -> CapacityLimiter:
        self._threads = self._threads or CapacityLimiter(THREADS)  # Created late: it needs a running event loop.
        return self._threads

    def _checked(self, task: asyncio.Task[None]) -> None:
        self._checking = None
        _retrieve(task)

    def _loaded(self, queries: Sequence[LookupQuery], task: asyncio.Task[Loaded]) -> None:
        for query in queries:
            self._loading.pop(query, None)
        _retrieve(task)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve a task's exception, because asyncio would log it if every caller has disconnected."""
    if not task.cancelled():
        task.exception()


def _encoded(answer: Answer, now_s: float, state: LookupState) -> CachedAnswer | SwiftoptError:
    status, media_type = 200, "application/json"
    if isinstance(answer, NotFound):
        status, media_type, answer = 404, MEDIA_TYPE, as_problem(404, kind_of(answer), str(answer))
    if isinstance(answer, SwiftoptError):
        return answer
    body = json.dumps(answer).encode()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return CachedAnswer(status, media_type, body, etag, now_s, state)


def _unless_error(answer: CachedAnswer | SwiftoptError) -> CachedAnswer:
    if isinstance(answer, SwiftoptError):
        raise answer
    return answer


async def _cache_of(request: Request) -> LookupCache:
    return cast(LookupCache, request.app.state.lookups)


Cache = Annotated[LookupCache, Depends(_cache_of)]


@router.get(
    "/layer-sets/{model:path}/{task}",
    operation_id="layer_set",
    response_model=PlanAnswer,
    responses={
        200: {"headers": {name: {"schema": {"type": "string"}} for name in ("ETag", "Cache-Control")}},
        304: {"description": "The caller's copy is still current."},
    },
)
async def layer_set(
    cache: Cache,
    model: Annotated[Word, Path(description="Name or fingerprint, percent-encoded.")],
    task: Annotated[Word, Path(description="The task, without '/'.")],
    alias: Annotated[Word, Query(description="The name of the alias.")] = "best",
    engine: Annotated[
        EngineName | None, Query(description="Return the best plan for this engine, instead of `alias`.")
    ] = None,
    device: Annotated[Word | None, Query(description="Prefer a set that was tuned on this device.")] = None,
    dtype: Annotated[Word | None, Query(description="Prefer a set that was tuned in this dtype.")] = None,
    version: Annotated[Depth | None, Query(description="Return this version, ignoring the alias.")] = None,
    # Declared as str: FastAPI does not split a header at commas, so a list would hold the whole line.
    if_none_match: Annotated[
        str | None, Header(description="ETags that the caller has; 304 if one is still current.")
    ] = None,
) -> Response:
    """How to decode this task with this model: the plan, and the layer set, heads or probe that its method needs.

    Falls back to another dtype or device, then to the task `default`; `fallback` describes the difference.
    """
    query = LookupQuery(model=model, task=task, alias=alias, engine=engine, device=device, dtype=dtype, version=version)
    started_s = time.perf_counter()
    [answer] = await cache.get([query])
    cache.times.observe(time.perf_counter() - started_s)
    if answer.status != 200:
        return Response(answer.body, answer.status, media_type=answer.media_type)
    headers = {"ETag": answer.etag, "Cache-Control": CACHE_CONTROL}
    tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    if answer.etag in tags or tags == ["*"]:
        return Response(status_code=304, headers=headers)
    return Response(answer.body, 200, headers, answer.media_type)


@router.post("/layer-sets:lookup", operation_id="lookup", response_model=LookupAnswers)
async def lookup(cache: Cache, body: Batch) -> Response:
    """Up to 1000 lookups at once; the answers are plans or problem objects, in the same order."""
    bodies = b",".join(answer.body for answer in await cache.get(body.queries))
    return Response(b'{"schema": "swiftopt.lookup/1", "answers": [' + bodies + b"]}", media_type="application/json")


@router.get("/layer-sets", operation_id="layer_sets", response_model=LayerSetList)
def layer_sets(
    app: Shared,
    model: Annotated[Word | None, Query(description="A name or fingerprint of a model.")] = None,
    task: Annotated[Word | None, Query(description="A task.")] = None,
) -> Response:
    """The stored versions of a model, of a task, of both or of all, the newest first."""
    versions = LayerSetList(tuple(app.store.layer_sets(model, task)))
    return Response(json.dumps(versions.to_json()), media_type="application/json")


@router.get("/models", operation_id="models", response_model=ModelList)
def models(app: Shared) -> Response:
    """OpenAI's list of served models; then the models loaded before, with the names that lookups accept."""
    stored_models = ModelList(tuple(app.store.models()), tuple(app.store.model_names())).to_json()
    return JSONResponse(
        {**stored_models, "object": "list", "data": [engine.card() for engine in app.engines.of.values()]}
    )


@router.get("/models/{model:path}", operation_id="model", response_class=Response)
def model(app: Shared, model: Annotated[Word, Path(description="A served model.")]) -> Response:
    """One model that is served, in OpenAI's form."""
    return JSONResponse(app.engines.find(model).card())
