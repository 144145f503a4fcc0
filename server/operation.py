"""Routes for operators: health, metrics, the usage of API keys, and the tuning of served models.

Health and metrics need no key. A scrape reads the counters of jobs from the database, because a job's process ends with
the job. The `spec_decode` metrics follow vLLM's: `drafts` counts rounds that drafted, so 1 + accepted / drafts is the
mean number of tokens of such a round.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, BeforeValidator, Field
from starlette.responses import JSONResponse, Response

from ..core.errors import InvalidInput, ServiceUnreachable, StoreError
from ..core.events import Tuning, TuningVerb, Way
from ..core.messages import Steer
from ..core.requests import DEFAULT_QUEUE, STATES
from ..core.usage import Usage
from ..store import Store
from ..worker.queue import RedisQueue
from .bodies import Strict
from .engines import TUNING_S
from .errors import Refused
from .lookups import Cache
from .metrics import metric
from .middleware import Shared
from .schemas import Task, Word
from .storage import StorageCheck
from .usage import of_all_servers

router = APIRouter(tags=["operation"])
tuning_router = APIRouter(prefix="/v1", tags=["tuning"])
usage_router = APIRouter(prefix="/v1", tags=["usage"])

KEY_NAME = Query(
    description="Name of one key; an admin's key may name any, and so may anyone if there are no keys.", max_length=64
)


def _day(text: object) -> object:
    """Return the text of a day; raise ValueError for others, which pydantic may read as a number of seconds."""
    if isinstance(text, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) is None:
        raise ValueError("it is not a day: use the form 2026-11-01")
    return text


SINCE = Query(description="A day (UTC, `2026-11-01`) from which the usage of all servers of the database is counted.")

TASK_LABELS = ["model", "task"]
COUNTERS = {  # Counter in the store -> ((metric, help text), labels).
    "drafts": (("swiftopt_spec_decode_num_drafts", "Rounds that drafted."), TASK_LABELS),
    "draft_tokens": (("swiftopt_spec_decode_num_draft_tokens", "Draft steps."), TASK_LABELS),
    "accepted_tokens": (
        ("swiftopt_spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."),
        TASK_LABELS,
    ),
    "accepted_per_position": (
        ("swiftopt_spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position in the draft, from 0."),
        [*TASK_LABELS, "position"],
    ),
    "trials": (("swiftopt_trials", "Scored candidates."), TASK_LABELS),
    "trial_seconds": (("swiftopt_trial_seconds", "Seconds of scoring."), TASK_LABELS),
    "attempts": (("swiftopt_job_attempts", "Attempts of jobs by outcome; `started` counts all."), ["outcome"]),
    "reconciled": (("swiftopt_reconciler_actions", "Repairs by the reconciler."), ["action"]),
}


class Liveness(BaseModel):
    """The answer of a process that runs."""

    status: Literal["ok"]


class Readiness(BaseModel):
    """Whether requests can be served; each part is `ok` or states its problem.

    `degraded`: models and lookups are served, but nothing can be stored.
    """

    status: Literal["ok", "degraded", "unavailable"]
    database: str
    migrations: str
    storage: str = Field(description="Whether the database and the folders of files can be written.")
    redis: str
    engines: dict[str, str] = Field(description="By served model.")


_READINESS: dict[str, Any] = {
    "response_model": Readiness,
    "responses": {503: {"model": Readiness, "description": "The database or an engine is unavailable."}},
}


@router.get("/livez", operation_id="livez", response_model=Liveness)
async def livez() -> Response:
    """Answer that the process runs; nothing else is checked."""
    return JSONResponse({"status": "ok"})


@router.get("/health", operation_id="health", name="health", description="As /readyz.", **_READINESS)
@router.get("/readyz", operation_id="readyz", **_READINESS)
def readyz(app: Shared) -> Response:
    """State of database, migrations, storage, Redis and engines; 503 if the database or an engine is unavailable.

    Lookups and submissions work without Redis. If the database or a disk accepts no writes, which is checked at most
    every ten seconds, the status is `degraded`: models and lookups are served, but nothing new is stored.
    """
    engines = {name: engine.state for name, engine in app.engines.of.items()}
    report: dict[str, Any] = {"status": "ok", "database": "ok", "migrations": "ok", "redis": redis_state(app.queue)}
    report |= {"engines": engines, "storage": "unknown"}
    try:
        state = app.store.schema()
        if not state.ok:
            report["migrations"] = f"at {state.revision}, this server needs {state.head}: run `swiftopt db upgrade`"
    except StoreError as error:
        report["database"], report["migrations"] = str(error), "unknown"
    else:
        report["storage"] = app.storage.problem() or "ok"
        report["status"] = "ok" if report["storage"] == "ok" else "degraded"
    if any(status != "ok" for status in (report["database"], report["migrations"], *engines.values())):
        report["status"] = "unavailable"
    return JSONResponse(report, 503 if report["status"] == "unavailable" else 200)


def redis_state(queue: RedisQueue | None) -> str:
    """Return "ok", or the problem with Redis in words."""
    if queue is None:
        return "not configured"
    try:
        queue.ping()
    except ServiceUnreachable:
        return "unreachable, jobs wait"
    return "ok"


@router.get(
    "/metrics",
    operation_id="metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(app: Shared, cache: Cache) -> Response:
    """Prometheus metrics."""
    await app.engines.ask_tuning(TUNING_S)
    collectors: list[Collector] = [cache.times, app.answers, ServiceCollector(app.store, app.queue, app.storage)]
    if app.engines.of:
        collectors += [app.engines.metrics, app.usage]
    # Run in a thread, because the database may be slow.
    text = await asyncio.to_thread(lambda: b"".join(map(generate_latest, collectors)))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@usage_router.get("/usage", operation_id="usage", response_model=Usage)
async def usage(
    app: Shared,
    request: Request,
    key: Annotated[str | None, KEY_NAME] = None,
    since: Annotated[date | None, SINCE, BeforeValidator(_day)] = None,
) -> Response:
    """Requests, tokens and saved seconds by API key and model, of this server since its start or of all since a day.

    A key sees its own usage, an admin's key that of all keys. Without keys there is one row per model.
    """
    owner: str | None = request.scope["state"]["key_owner"]
    api_key = app.settings.keys.find(owner)
    is_admin = not app.settings.keys.required or (api_key is not None and api_key.is_admin)
    if not is_admin and key not in (None, owner):
        raise Refused(403, "not-your-key", f"the usage of {key!r} is for its owner and admins: leave out `key`")
    selection = key or owner, is_admin and key is None
    if since is None:
        return JSONResponse(app.usage.of(*selection).to_json())
    total = await asyncio.to_thread(of_all_servers, app.store, app.usage, since.isoformat(), *selection)
    return JSONResponse(total.to_json())


class ServiceCollector(Collector):
    """Reads the database and Redis at each scrape. If one is unreachable, its `up` is 0 and its metrics are omitted."""

    def __init__(self, store: Store, queue: RedisQueue | None, storage: StorageCheck) -> None:
        self._store, self._queue, self._storage = store, queue, storage

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        yield from _with_up("swiftopt_database_up", "Whether the database answers.", self._of_database)
        samples: list[tuple[list[str], float]] = [([], float(not self._storage.problem()))]
        help = "Whether the database and the folders of files can be written."
        yield metric(GaugeMetricFamily, "swiftopt_storage_writable", help, [], samples)
        if self._queue is not None:
            yield from _with_up("swiftopt_redis_up", "Whether Redis answers.", partial(self._of_queue, self._queue))

    def _of_database(self) -> list[Metric]:
        families = {
            key: CounterMetricFamily(*name_and_help, labels=labels) for key, (name_and_help, labels) in COUNTERS.items()
        }
        for count in self._store.jobs.counts():
            if count.name in families:
                labels_of_count = {"model": count.model, "task": count.task}
                labels = COUNTERS[count.name][1]
                families[count.name].add_metric(
                    [labels_of_count.get(label, count.label) for label in labels], count.value
                )
        states = self._store.jobs.states()
        n_jobs = [([state], states.get(state, 0)) for state in STATES]
        return [*families.values(), metric(GaugeMetricFamily, "swiftopt_jobs", "Jobs by state.", ["state"], n_jobs)]

    def _of_queue(self, queue: RedisQueue) -> list[Metric]:
        workers = Counter((worker.queue, worker.state) for worker in queue.workers())
        depths = [([name], queue.depth(name)) for name in sorted({DEFAULT_QUEUE, *(name for name, _ in workers)})]
        gauges = (
            ("swiftopt_workers", "Registered workers.", ["queue", "state"], sorted(workers.items())),
            ("swiftopt_queue_depth", "Attempts waiting for a worker.", ["queue"], depths),
        )
        return [metric(GaugeMetricFamily, *gauge) for gauge in gauges]


def _with_up(name: str, help: str, collect: Callable[[], list[Metric]]) -> list[Metric]:
    """Return the metrics of a service, and the gauge of whether it answers."""
    try:
        return [*collect(), metric(GaugeMetricFamily, name, help, [], [([], 1.0)])]
    except (StoreError, ServiceUnreachable):
        return [metric(GaugeMetricFamily, name, help, [], [([], 0.0)])]


class Steering(Strict):
    """The model and the task that a verb applies to; `way` is what `pin` fixes (null: the verdict decides again)."""

    model: Word | None = None
    task: Task | None = None
    way: Way | None = None


@tuning_router.get("/tuning", operation_id="tuning", response_model=Tuning)
async def tuning(app: Shared) -> Response:
    """By model and task: what is in use, what is being tried, its cost, and the time saved."""
    app.engines.all()  # Raises ModelNotFound if no model is served.
    return JSONResponse(Tuning(await app.engines.ask_tuning()).to_json())


@tuning_router.post("/tuning:{verb}", operation_id="steer_tuning", response_model=Tuning)
async def steer(app: Shared, verb: TuningVerb, body: Steering) -> Response:
    """Pause or resume learning, or pin a task to its best drafts or to plain decoding; returns the new state."""
    engines = app.engines.all()
    if verb == "pin" and body.task is None:
        raise InvalidInput("pin is for one task: name it as `task`")
    for engine in [app.engines.find(body.model)] if body.model else engines:
        await engine.steer(Steer(verb, body.task, body.way))
    return await tuning(app)
