"""Counts what the requests of each API key come to, by model, since the server's start.

The counts belong to the HTTP process, so that an engine's process that is started again changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core.types import now
from ..core.usage import KeyUsage, Usage
from .metrics import metric

LABELS = ("key", "model_name")
# Metrics: (kind, name, help text, value). Seconds are a gauge: they fall where drafts are slower than plain decoding.
METRICS: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, Callable[[KeyUsage], float]], ...] = (
    (CounterMetricFamily, "requests", "Requests to a model, those that failed included.", lambda of: of.requests),
    (CounterMetricFamily, "prompt_tokens", "Tokens of their prompts.", lambda of: of.prompt_tokens),
    (CounterMetricFamily, "completion_tokens", "Tokens of their completions.", lambda of: of.completion_tokens),
    (CounterMetricFamily, "cached_tokens", "Prompt tokens that were read before.", lambda of: of.cached_tokens),
    (GaugeMetricFamily, "saved_seconds", "That plain decoding would have taken longer.", lambda of: of.saved_s),
)


class UsageTable(Collector):
    """Usage by (name of the API key, model). Both come from the server's configuration, so the table is bounded."""

    def __init__(self) -> None:
        self._since, self._usage = now(), dict[tuple[str | None, str], KeyUsage]()

    def add(self, key: str | None, model: str, tokens: Mapping[str, Any], saved_s: float) -> None:
        """Count a request that has ended.

        Args: key: name of its API key. tokens: `usage` of its answer in OpenAI's form. saved_s: see `KeyUsage`.
        """
        usage = self._usage.get((key, model)) or KeyUsage(key, model)
        self._usage[key, model] = replace(
            usage,
            requests=usage.requests + 1,
            prompt_tokens=usage.prompt_tokens + tokens["prompt_tokens"],
            completion_tokens=usage.completion_tokens + tokens["completion_tokens"],
            cached_tokens=usage.cached_tokens + tokens["prompt_tokens_details"]["cached_tokens"],
            saved_s=usage.saved_s + saved_s,
        )

    def of(self, key: str | None, every_key: bool) -> Usage:
        """Return the usage of one key, or of every key; sorted by key and model."""
        rows = [usage for usage in list(self._usage.values()) if every_key or usage.key == key]
        rounded_rows = [replace(usage, saved_s=round(usage.saved_s, 3)) for usage in rows]
        return Usage(self._since, tuple(sorted(rounded_rows, key=lambda usage: (usage.key or "", usage.model))))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now; requests without a key have an empty label."""
        rows = list(self._usage.values())  # Copy, because metrics are read in another thread.
        for kind, name, help, value_of in METRICS:
            values = [((usage.key or "", usage.model), float(value_of(usage))) for usage in rows]
            yield metric(kind, f"swiftopt_usage_{name}", help, LABELS, values)
