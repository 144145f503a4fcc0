"""Prometheus metrics, made from SQL and Redis when they are asked for: what counts lives no longer than a job.

The `spec_decode` names are those of vLLM: drafts are rounds, and 1 + accepted / drafts is tokens per target pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core.errors import ServiceUnreachable, StoreError
from ..core.jobs import DEFAULT_QUEUE, STATES
from ..store import Store

if TYPE_CHECKING:
    from .parts import QueueView

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


class LookupTimes:
    """The histogram of single look-ups, in this process."""

    def __init__(self) -> None:
        self.histogram = Histogram(
            "swiftopt_lookup_seconds", "Seconds per single look-up.", registry=None, buckets=BUCKETS_S
        )

    def observe(self, seconds: float) -> None:
        """Count one look-up."""
        self.histogram.observe(seconds)


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


def registry(store: Store, queue: QueueView | None, times: LookupTimes) -> CollectorRegistry:
    """An app's own registry."""
    own = CollectorRegistry()
    own.register(times.histogram)
    own.register(ServiceCollector(store, queue))
    return own
