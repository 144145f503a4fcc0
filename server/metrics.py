"""Statistics of requests: per period of the last hours, since the server's start, and as Prometheus metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product, zip_longest
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core.events import KeptTexts, ModelTuning, TaskTuning
from ..core.requests import ServedModel
from ..core.rounds import NO_ROUNDS, RequestRounds
from ..core.types import Completion, FinishReason, Timings

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LATENCIES = (  # Histograms: (name, help text).
    ("time_to_first_token_seconds", "Seconds from a request to its first text."),
    ("inter_token_latency_seconds", "Seconds per token after the first text."),
    ("e2e_request_latency_seconds", "Seconds from a request to its end."),
)
# Counters: (name, help text, attribute of `Period`).
COUNTERS = (
    ("prompt_tokens", "Prompt tokens.", "prompt_tokens"),
    ("generation_tokens", "Completion tokens.", "tokens"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prompt_tokens"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "cached_tokens"),
    ("spec_decode_num_drafts", "Rounds that drafted.", "drafts"),
    ("spec_decode_num_draft_tokens", "Draft steps.", "drafted"),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", "accepted"),
)
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
SUCCESS, ERROR = "vllm:request_success", "error"
FINISH_REASONS = ("stop", "length", ERROR)
# Gauges per task: (name, help text, value; None if not known yet).
TASK_GAUGES: tuple[tuple[str, str, Callable[[TaskTuning], float | None]], ...] = (
    ("drafts", "1 if the task's requests are decoded with drafts, 0 if plainly.", lambda task: task.in_use == "drafts"),
    ("version", "Version of the stored plan in use.", lambda task: task.version),
    ("ratio", "Measured speed-up: plain seconds / drafted seconds.", lambda task: task.ratio),
    ("ratio_low", "Lower end of the speed-up's interval.", lambda task: task.interval and task.interval[0]),
    ("ratio_high", "Upper end of the speed-up's interval.", lambda task: task.interval and task.interval[1]),
    ("plain_tokens_per_second", "Plain decoding in the speed-up's pairs.", lambda task: task.plain_tok_s),
    ("drafted_tokens_per_second", "Decoding with drafts in the speed-up's pairs.", lambda task: task.drafted_tok_s),
    ("saved_seconds", "Seconds saved against plain decoding since the start.", lambda task: task.all_saved_s),
)
# Counters per task since the start of the engine's process: (name, help text, value).
TASK_COUNTERS: tuple[tuple[str, str, Callable[[TaskTuning], float]], ...] = (
    ("requests", "Ended requests.", lambda task: task.requests),
    ("tokens", "Completion tokens of ended requests.", lambda task: task.tokens),
    ("decode_seconds", "Seconds of rounds.", lambda task: task.seconds),
    ("search_seconds", "Additional seconds that the search has taken.", lambda task: task.search.seconds),
)
# Gauges of an engine's prefix cache and corpus: (name, help text, value).
CACHE_GAUGES: tuple[tuple[str, str, Callable[[KeptTexts], float]], ...] = (
    ("prefix_cache_tokens", "Tokens whose keys and values are in memory.", lambda kept: kept.prefix_tokens),
    ("prefix_cache_bytes", "Memory of these keys and values.", lambda kept: kept.prefix_bytes),
    ("prefix_cache_disk_bytes", "Disk space of stored keys and values.", lambda kept: kept.disk_bytes),
    ("corpus_tokens", "Tokens of finished answers that drafts may repeat.", lambda kept: kept.corpus_tokens),
    ("corpus_bytes", "Memory of these tokens.", lambda kept: kept.corpus_bytes),
)
DISK_HITS = "swiftopt_prefix_cache_disk_tokens", "Prompt tokens whose keys and values were read from disk."

PERIOD_S = 10  # Length of a period of the history, in seconds.
NOW_S = 60  # Time window of `History.now`, in seconds.
KEPT_S = 6 * 3600  # Seconds for which the history is kept.
MOST_HISTORIES = 64  # Maximum number of tasks with a history; a new task replaces the one that was idle longest.


@dataclass(slots=True)
class Period:
    """Sums over the requests that ended within one period, which begins `at` seconds since 1970.

    `decoded` counts the tokens of rounds, `drafts` the rounds that drafted. Rounds that drafted made `drafted_tokens`
    in `drafted_s` seconds, the others `plain_tokens` in `plain_s`. `exact` counts tokens known to equal those of plain
    decoding. `first_token_s` sums the clients' waits for the first token; `between_tokens_s` sums the mean wait between
    tokens of the `n_timed` requests with more than one token. docs/serving.md has a table of the figures.
    """

    at: int
    requests: int = 0
    tokens: int = 0
    decoded: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    first_token_s: float = 0.0
    n_timed: int = 0
    between_tokens_s: float = 0.0
    exact: int = 0
    plain_tokens: int = 0
    plain_s: float = 0.0
    drafted_tokens: int = 0
    drafted_s: float = 0.0
    spent: Timings = field(default_factory=Timings)
    accepted_per_position: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, completion: Completion, first_token_s: float, total_s: float, rounds: RequestRounds = NO_ROUNDS
    ) -> Period:
        """Return the sums of a request that ends now.

        Args: first_token_s, total_s: the client's seconds until its first text and until the end.
        """
        n_between = completion.n_tokens - 1
        return cls(
            int(time.time()) // PERIOD_S * PERIOD_S,
            requests=1,
            tokens=completion.n_tokens,
            decoded=completion.n_decoded,
            prompt_tokens=completion.n_prompt_tokens,
            cached_tokens=completion.n_cached,
            drafts=completion.n_drafts,
            drafted=completion.drafted,
            accepted=completion.accepted,
            first_token_s=first_token_s,
            n_timed=int(n_between > 0),
            between_tokens_s=(total_s - first_token_s) / n_between if n_between > 0 else 0.0,
            exact=completion.n_tokens if completion.exact else 0,
            plain_tokens=rounds.plain_tokens,
            plain_s=rounds.plain_s,
            drafted_tokens=rounds.drafted_tokens,
            drafted_s=rounds.drafted_s,
            spent=completion.timings,
            accepted_per_position=list(completion.accepted_per_position),
        )

    @property
    def decode_tok_s(self) -> float | None:
        """Decoding speed of a request, in tokens per second: tokens of rounds / seconds of rounds."""
        return _quotient(self.decoded, self.spent.decode_s)

    @property
    def plain_tok_s(self) -> float | None:
        """Tokens per second of rounds without a draft."""
        return _quotient(self.plain_tokens, self.plain_s)

    @property
    def drafted_tok_s(self) -> float | None:
        """Tokens per second of rounds that drafted."""
        return _quotient(self.drafted_tokens, self.drafted_s)

    @property
    def acceptance_rate(self) -> float | None:
        """Acceptance rate α: accepted / drafted tokens."""
        return _quotient(self.accepted, self.drafted)

    @property
    def cached_share(self) -> float | None:
        """Share of the prompts' tokens found in the prefix cache."""
        return _quotient(self.cached_tokens, self.prompt_tokens)

    @property
    def mean_first_token_s(self) -> float | None:
        return _quotient(self.first_token_s, self.requests)

    @property
    def mean_between_tokens_s(self) -> float | None:
        return _quotient(self.between_tokens_s, self.n_timed)

    @property
    def ratio(self) -> float | None:
        """Speed-up: tokens per second of rounds that drafted / of the others; None unless there were both."""
        plain, drafted = self.plain_tok_s, self.drafted_tok_s
        return drafted / plain if plain and drafted is not None else None

    @property
    def accepted_by_position(self) -> list[float]:
        """Per draft position, the share of the rounds that drafted in which it was accepted."""
        return [n / self.drafts for n in self.accepted_per_position] if self.drafts else []

    def throughput(self, length_s: float) -> float | None:
        """Return the tokens per second of all requests, idle time included.

        None: no request has ended, or less than PERIOD_S has passed.

        Args: length_s: seconds of the whole period, which may not be over.
        """
        passed_s = min(length_s, time.time() - self.at)
        return self.tokens / passed_s if self.requests and passed_s >= PERIOD_S else None

    def __add__(self, other: Period) -> Period:
        """Return the sums of both periods, dated by the start of this one."""
        field_sums = {
            period_field.name: getattr(self, period_field.name) + getattr(other, period_field.name)
            for period_field in fields(self)[1:-1]
        }
        position_pairs = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return Period(self.at, **field_sums, accepted_per_position=[a + b for a, b in position_pairs])


def _quotient(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


class History:
    """Recent traffic by model and task, in periods of PERIOD_S, and each model's sums since the start."""

    def __init__(self) -> None:
        self._periods: dict[tuple[str, str], deque[Period]] = {}
        self._totals: dict[str, Period] = {}

    @property
    def tasks(self) -> list[tuple[str, str]]:
        """The models and tasks with at least one ended request."""
        return list(self._periods)

    def add(self, model: str, task: str, request_sums: Period) -> None:
        """Count a request that has ended."""
        self._totals[model] = self.total(model) + request_sums
        if (model, task) not in self._periods and len(self._periods) >= MOST_HISTORIES:
            del self._periods[min(self._periods, key=lambda key: self._periods[key][-1].at)]
        periods = self._periods.setdefault((model, task), deque(maxlen=KEPT_S // PERIOD_S))
        if periods and periods[-1].at == request_sums.at:
            periods[-1] += request_sums
        else:
            periods.append(request_sums)

    def total(self, model: str) -> Period:
        """Return a model's sums since the server's start."""
        return self._totals.get(model, Period(0))

    def last(
        self, span_s: int, n: int, model: str | None = None, task: str | None = None, until_s: float | None = None
    ) -> list[Period]:
        """Return the last `span_s` seconds in `n` periods, the oldest first.

        Args: model, task: None: of all. until_s: end of the last period, in seconds since 1970; None: now.
        """
        length = max(PERIOD_S, span_s // n)
        end_s = int(time.time() if until_s is None else until_s) // length * length + length
        merged = [Period(start_s) for start_s in range(end_s - n * length, end_s, length)]
        for periods in self._matching(model, task):
            for period in reversed(periods):
                if period.at < merged[0].at:
                    break
                if period.at < end_s:
                    merged[(period.at - merged[0].at) // length] += period
        return merged

    def last_at(self, model: str | None = None, task: str | None = None) -> int | None:
        """Return when the last period with an ended request began, in seconds since 1970; None: there is none."""
        return max((periods[-1].at for periods in self._matching(model, task) if periods), default=None)

    def _matching(self, model: str | None, task: str | None) -> list[deque[Period]]:
        return [
            periods
            for (model_name, task_name), periods in self._periods.items()
            if model in (None, model_name) and task in (None, task_name)
        ]

    def now(self, model: str) -> Period:
        """Return a model's sums of the last NOW_S seconds or up to PERIOD_S less: the newest period is incomplete."""
        oldest, *later_periods = self.last(NOW_S, NOW_S // PERIOD_S, model)
        return sum(later_periods, oldest)


def metric(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    help: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    """Return a metric whose samples are pairs of label values and value."""
    family = kind(name, help, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


class MeasuredEngine(Protocol):
    """The attributes of an engine that its metrics read; `n_until_loaded` counts requests waiting for the load."""

    served: ServedModel
    n_starts: int
    n_until_loaded: int
    tuning: ModelTuning

    @property
    def n_requests(self) -> int: ...


class EngineMetrics(Collector):
    """The engines' metrics, under vLLM's names where vLLM has them; the counters are the totals of `history`."""

    def __init__(self, engines: Mapping[str, MeasuredEngine]) -> None:
        self._engines, self._request_metrics, self.history = engines, CollectorRegistry(), History()
        metric_options: dict[str, Any] = {"labelnames": ["model_name"], "registry": self._request_metrics}
        self._latencies = {
            name: Histogram(f"vllm:{name}", help, **metric_options, buckets=BUCKETS_S) for name, help in LATENCIES
        }
        metric_options["labelnames"] = ["model_name", "finished_reason"]
        self._ended_counter = Counter(SUCCESS, "Ended requests.", **metric_options)
        # Create each counter at 0, so that Prometheus' rate() sees the first failure as an increase.
        for name, reason in product(engines, FINISH_REASONS):
            self._ended_counter.labels(name, reason)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        label, engines = ["model_name"], self._engines.items()
        running = [([name], min(engine.n_requests, engine.served.concurrency)) for name, engine in engines]
        waiting = [
            ([name], max(0, engine.n_requests - engine.served.concurrency) + engine.n_until_loaded)
            for name, engine in engines
        ]
        starts = [([name], engine.n_starts) for name, engine in engines]
        yield metric(GaugeMetricFamily, "vllm:num_requests_running", "Requests being decoded.", label, running)
        yield metric(GaugeMetricFamily, "vllm:num_requests_waiting", "Requests waiting for a place.", label, waiting)
        yield metric(CounterMetricFamily, "swiftopt_engine_starts", "Starts of the engine's process.", label, starts)
        tasks = [(name, task) for name, engine in engines for task in engine.tuning.tasks]
        for kind, figures in ((GaugeMetricFamily, TASK_GAUGES), (CounterMetricFamily, TASK_COUNTERS)):
            for figure_name, help, value_of in figures:
                values = [([name, task.task], value_of(task)) for name, task in tasks]
                samples = [(labels, float(value)) for labels, value in values if value is not None]
                yield metric(kind, f"swiftopt_serving_{figure_name}", help, ["model_name", "task"], samples)
        caches = [([name], engine.tuning.kept) for name, engine in engines if engine.tuning.kept is not None]
        for name, help, size_of in CACHE_GAUGES:
            samples = [(labels, float(size_of(kept))) for labels, kept in caches]
            yield metric(GaugeMetricFamily, f"swiftopt_{name}", help, label, samples)
        disk_samples = [(labels, float(kept.disk_tokens)) for labels, kept in caches]
        yield metric(CounterMetricFamily, *DISK_HITS, label, disk_samples)
        totals = [(name, self.history.total(name)) for name in self._engines]
        for name, help, field_name in COUNTERS:
            samples = [([model], float(getattr(total, field_name))) for model, total in totals]
            yield metric(CounterMetricFamily, f"vllm:{name}", help, label, samples)
        help = "Accepted tokens by position in the draft, from 0."
        by_position = [
            ([model, str(position)], float(n))
            for model, total in totals
            for position, n in enumerate(total.accepted_per_position)
        ]
        yield metric(CounterMetricFamily, PER_POSITION, help, ["model_name", "position"], by_position)
        yield from self._request_metrics.collect()

    def add(self, model: str, task: str, request_sums: Period, total_s: float, finish_reason: FinishReason) -> None:
        """Count an ended request; its client waited `total_s` seconds for the end."""
        self.history.add(model, task, request_sums)
        latencies = {
            "time_to_first_token_seconds": request_sums.first_token_s,
            "e2e_request_latency_seconds": total_s,
        }
        if request_sums.n_timed:
            latencies["inter_token_latency_seconds"] = request_sums.between_tokens_s
        for name, seconds in latencies.items():
            self._latencies[name].labels(model).observe(seconds)
        self._ended_counter.labels(model, "length" if finish_reason == "length" else "stop").inc()

    def fail(self, model: str, n: int) -> None:
        """Count `n` failed requests."""
        self._ended_counter.labels(model, ERROR).inc(n)
