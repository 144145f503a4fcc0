"""Whether the process lives, whether it can serve, and its metrics; none of them needs a key.

The metrics are made from SQL and Redis when they are asked for: what counts lives no longer than a job. The
`spec_decode` names are those of vLLM: drafts are rounds, and 1 + accepted / drafts is tokens per target pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, Response

from ..core.errors import ServiceUnreachable, StoreError
from ..core.jobs import DEFAULT_QUEUE, STATES
from ..store import Store
from .schemas import Liveness, Readiness
from .state import QueueView, Shared, State

router = APIRouter(tags=["operation"])
_UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"model": Readiness, "description": "The database or an engine is away."}
}

BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)

# The store's counter -> metric, help, and the name of its label, if it has one.
BY_MODEL = {
    "drafts": ("swiftopt_spec_decode_num_drafts", "Rounds that drafted.", None),
    "draft_tokens": ("swiftopt_spec_decode_num_draft_tokens", "Draft steps.", None),
    "accepted_tokens": ("swiftopt_spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", None),
    "accepted_per_position": (
        "swiftopt_spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens by position in the draft, from 0.",
        "position",
    ),
    "trials": ("swiftopt_trials", "Candidates that were scored.", None),
    "trial_seconds": ("swiftopt_trial_seconds", "Seconds that scoring took.", None),
}
BY_LABEL = {
    "attempts": ("swiftopt_job_attempts", "Attempts of jobs, by how they ended (started: all).", "outcome"),
    "reconciled": ("swiftopt_reconciler_actions", "What the reconciler mended.", "action"),
}


@router.get("/livez", operation_id="livez", response_model=Liveness)
async def livez() -> Response:
    """The process answers; nothing else is looked at."""
    return JSONResponse({"status": "ok"})


@router.get("/readyz", operation_id="readyz", response_model=Readiness, responses=_UNREADY)
def readyz(app: Shared) -> Response:
    """Database, migrations, Redis, engines; 503 when the database is away or an engine not there.

    Without Redis look-ups and submissions work.
    """
    return _ready(app)


@router.get("/health", operation_id="health", response_model=Readiness, responses=_UNREADY)
def health(app: Shared) -> Response:
    """As /readyz."""
    return _ready(app)


@router.get(
    "/metrics",
    operation_id="metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def metrics(app: Shared) -> Response:
    """Prometheus metrics."""
    own = registry(app.store, app.queue, app.lookup_times)
    if app.engines is not None:
        own.register(app.engines.metrics)
    return Response(generate_latest(own), media_type=CONTENT_TYPE_LATEST)


def _ready(app: State) -> Response:
    engines = {} if app.engines is None else {name: own.state for name, own in app.engines.of.items()}
    found: dict[str, Any] = {"status": "ok", "database": "ok", "migrations": "ok", "redis": _redis(app)}
    found["engines"] = engines
    try:
        state = app.store.schema()
        if not state.ok:
            found["migrations"] = f"at {state.revision}, this server needs {state.head}: run `swiftopt db upgrade`"
    except StoreError as error:
        found["database"], found["migrations"] = str(error), "unknown"
    if any(part != "ok" for part in (found["database"], found["migrations"], *engines.values())):
        found["status"] = "unavailable"
    return JSONResponse(found, 200 if found["status"] == "ok" else 503)


def _redis(app: State) -> str:
    if app.queue is None:
        return "not configured"
    try:
        app.queue.ping()
    except ServiceUnreachable:
        return "unreachable, jobs wait"
    return "ok"


def lookup_times() -> Histogram:
    """Return the histogram of single look-ups, in this process."""
    return Histogram("swiftopt_lookup_seconds", "Seconds per single look-up.", registry=None, buckets=BUCKETS_S)


class ServiceCollector(Collector):
    """Reads the database and Redis at each scrape; one that is away leaves its metrics out and its `up` at 0."""

    def __init__(self, store: Store, queue: QueueView | None) -> None:
        self._store, self._queue = store, queue

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        yield from self._of_database()
        if self._queue is not None:
            yield from self._of_queue(self._queue)

    def _of_database(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("swiftopt_database_up", "Whether the database answers.")
        try:
            metrics = [*self._counters(), self._states()]
        except StoreError:
            metrics = []
        up.add_metric([], float(bool(metrics)))
        return [*metrics, up]

    def _counters(self) -> list[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for name, (metric, words, label) in BY_MODEL.items():
            families[name] = CounterMetricFamily(metric, words, labels=["model", "task", *([label] if label else [])])
        for name, (metric, words, label) in BY_LABEL.items():
            families[name] = CounterMetricFamily(metric, words, labels=[label])
        for count in self._store.jobs.counts():
            if count.name in BY_MODEL:
                more = [count.label] if BY_MODEL[count.name][2] else []
                families[count.name].add_metric([count.model, count.task, *more], count.value)
            elif count.name in BY_LABEL:
                families[count.name].add_metric([count.label], count.value)
        return list(families.values())

    def _states(self) -> Metric:
        found = self._store.jobs.states()
        family = GaugeMetricFamily("swiftopt_jobs", "Jobs by state.", labels=["state"])
        for state in STATES:
            family.add_metric([state], found.get(state, 0))
        return family

    def _of_queue(self, queue: QueueView) -> Iterable[Metric]:
        up = GaugeMetricFamily("swiftopt_redis_up", "Whether Redis answers.")
        workers = GaugeMetricFamily("swiftopt_workers", "Registered workers.", labels=["queue", "state"])
        depth = GaugeMetricFamily("swiftopt_queue_depth", "Attempts that wait for a worker.", labels=["queue"])
        try:
            found = queue.workers()
            for pair in sorted({(worker.queue, worker.state) for worker in found}):
                workers.add_metric(list(pair), sum((worker.queue, worker.state) == pair for worker in found))
            for name in sorted({DEFAULT_QUEUE, *(worker.queue for worker in found)}):
                depth.add_metric([name], queue.depth(name))
        except ServiceUnreachable:
            up.add_metric([], 0.0)
            return [up]
        up.add_metric([], 1.0)
        return [workers, depth, up]


def registry(store: Store, queue: QueueView | None, times: Histogram) -> CollectorRegistry:
    """An app's own registry."""
    own = CollectorRegistry()
    own.register(times)
    own.register(ServiceCollector(store, queue))
    return own
