"""Usage by API key and model: of this server since its start, and of all servers by day.

The HTTP process counts, so a restarted engine loses nothing. It adds its counts to the database regularly, where those
of all servers are summed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core.errors import StoreError
from ..core.logs import Outage
from ..core.threads import repeating
from ..core.types import now
from ..core.usage import SUMS, KeyUsage, Usage
from ..store import Store
from .metrics import metric

LABELS = ("key", "model_name")
# Metrics: (kind, name, help text, value). Saved seconds are a gauge, because they fall if drafts are slower.
METRICS: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, Callable[[KeyUsage], float]], ...] = (
    (CounterMetricFamily, "requests", "Requests to a model, including failed ones.", lambda usage: usage.requests),
    (CounterMetricFamily, "prompt_tokens", "Prompt tokens.", lambda usage: usage.prompt_tokens),
    (CounterMetricFamily, "completion_tokens", "Completion tokens.", lambda usage: usage.completion_tokens),
    (CounterMetricFamily, "cached_tokens", "Prompt tokens found in a cache.", lambda usage: usage.cached_tokens),
    (GaugeMetricFamily, "saved_seconds", "Seconds saved against plain decoding.", lambda usage: usage.saved_s),
)

STORE_S = 30.0  # Seconds between two additions to the database.

logger = logging.getLogger(__name__)


class UsageTable(Collector):
    """Usage by (name of the API key, model). Both come from the configuration, so the number of rows is bounded."""

    def __init__(self) -> None:
        self._since, self._usage = now(), dict[tuple[str | None, str], KeyUsage]()
        self._stored: dict[tuple[str | None, str], KeyUsage] = {}  # The part of it that the database has.
        self._store_lock = threading.Lock()

    def add(self, key: str | None, model: str, tokens: Mapping[str, Any], saved_s: float) -> None:
        """Count a request that has ended.

        Args: key: name of its API key. tokens: `usage` of its answer, in OpenAI's form. saved_s: see `KeyUsage`.
        """
        cached = tokens["prompt_tokens_details"]["cached_tokens"]
        usage = KeyUsage(key, model, 1, tokens["prompt_tokens"], tokens["completion_tokens"], cached, saved_s)
        self._usage[key, model] = _sum(self._usage.get((key, model), KeyUsage(key, model)), usage)

    def store_in(self, store: Store) -> None:
        """Add the counts since the last call to the database.

        Raises: StoreError: it accepts no writes; the next call adds these counts, too.
        """
        with self._store_lock:
            rows = dict(self._usage)
            new_rows = [_sum(row, self._stored.get(key, KeyUsage(*key)), -1) for key, row in rows.items()]
            store.add_usage(now()[:10], [row for row in new_rows if row.requests])
            self._stored = rows

    def of(self, key: str | None, every_key: bool) -> Usage:
        """Return the usage of one key, or of every key, sorted by key and model."""
        rows = [usage for usage in list(self._usage.values()) if every_key or usage.key == key]
        return _sorted(self._since, rows)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics; requests without a key have an empty label."""
        rows = list(self._usage.values())  # Copy, because metrics are read in another thread.
        for kind, name, help, value_of in METRICS:
            values = [((usage.key or "", usage.model), float(value_of(usage))) for usage in rows]
            yield metric(kind, f"swiftopt_usage_{name}", help, LABELS, values)


def _sum(usage: KeyUsage, other: KeyUsage, factor: int = 1) -> KeyUsage:
    """Return a row plus `factor` times another one."""
    return replace(usage, **{name: getattr(usage, name) + factor * getattr(other, name) for name in SUMS})


def _sorted(since: str, rows: Iterable[KeyUsage]) -> Usage:
    """Return rows sorted by key and model, with rounded seconds."""
    rounded_rows = [replace(usage, saved_s=round(usage.saved_s, 3)) for usage in rows]
    return Usage(since, tuple(sorted(rounded_rows, key=lambda usage: (usage.key or "", usage.model))))


def of_all_servers(store: Store, table: UsageTable, day: str, key: str | None, every_key: bool) -> Usage:
    """Return the usage of one key, or of every key, since a day on all servers that share the database.

    This server's counts are added first; other servers add theirs every STORE_S.

    Raises: StoreError: the database is unreachable or accepts no writes.
    """
    table.store_in(store)
    return _sorted(day, (usage for usage in store.usage_since(day) if every_key or usage.key == key))


@contextmanager
def stored_usage(store: Store, table: UsageTable) -> Iterator[None]:
    """Add a table's counts to the database every STORE_S, and at the end."""
    store_now = partial(_try_to_store, store, table, Outage(logger, "usage=waiting", "usage=stored"))
    try:
        with repeating(store_now, STORE_S, "usage"):
            yield
    finally:
        store_now()


def _try_to_store(store: Store, table: UsageTable, outage: Outage) -> None:
    try:
        table.store_in(store)
        outage.over()
    except StoreError as error:
        outage.failed(error)
