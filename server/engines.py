"""The engines behind the server: a process per model, restarted when it dies; requests in, events out.

The HTTP process never computes. When an engine dies, the next one gets the requests whose clients have seen nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from itertools import count, product, zip_longest
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core import errors
from ..core.errors import Busy, EngineGone, InvalidInput, ModelNotFound, SwiftoptError
from ..core.events import ModelTuning, TaskTuning, phase_of
from ..core.requests import CompletionRequest, ServedModel
from ..core.types import Completion, Timings

LONGEST_LINE = 1 << 28  # bytes of one event
BACKOFF_S = (0.5, 30.0)  # after the first death, and at most
ANSWER_S = 30.0  # to a question that needs no decoding
TUNING_S = 0.5  # that a scrape of the metrics waits for the engines' tuning
MOST_RESTARTS = 2  # of a request in flight when engines died: it may be the cause
ENDS = ("done", "failed")  # the last events of a request
LOG_S = 30.0  # between two log lines about one phase of loading a model
END_S = 5.0  # for a process to end by itself
STEADY_S = 60.0  # after a process that lived so long, the wait is the shortest again

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
WAITS = (
    ("time_to_first_token_seconds", "From a request to its first text."),
    ("inter_token_latency_seconds", "Per token after the first text."),
    ("e2e_request_latency_seconds", "From a request to its end."),
)
COUNTERS = (  # names, words, and the sum of `Period` that each is
    ("prompt_tokens", "Tokens of prompts.", "prompt_tokens"),
    ("generation_tokens", "Tokens of completions.", "tokens"),
    ("prefix_cache_queries", "Tokens of prompts looked up in what was read before.", "prompt_tokens"),
    ("prefix_cache_hits", "Tokens of prompts that were found there.", "cached_tokens"),
    ("spec_decode_num_drafts", "Rounds that drafted.", "drafts"),
    ("spec_decode_num_draft_tokens", "Draft steps.", "drafted"),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", "accepted"),
)
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
SUCCESS, ERROR = "vllm:request_success", "error"
ENDINGS = ("stop", "length", ERROR)
OF_TASK: tuple[tuple[str, str, Callable[[TaskTuning], float | None]], ...] = (  # gauges; None: not known yet
    ("drafts", "1 where a task's requests are decoded with drafts, 0 where plainly.", lambda of: of.in_use == "drafts"),
    ("version", "The stored plan in use.", lambda of: of.version),
    ("ratio", "Plain seconds / drafted seconds, as measured.", lambda of: of.ratio),
    ("ratio_low", "The lower end of the ratio's interval.", lambda of: of.interval and of.interval[0]),
    ("ratio_high", "The upper end of the ratio's interval.", lambda of: of.interval and of.interval[1]),
    ("plain_tokens_per_second", "Of plain decoding, in the pairs of the ratio.", lambda of: of.plain_tok_s),
    ("drafted_tokens_per_second", "With drafts, in the pairs of the ratio.", lambda of: of.drafted_tok_s),
    ("saved_seconds", "That plain decoding would have taken longer, since the start.", lambda of: of.all_saved_s),
)
SINCE_START: tuple[tuple[str, str, Callable[[TaskTuning], float]], ...] = (  # counters, of the engine's process
    ("requests", "Requests that have ended.", lambda of: of.requests),
    ("tokens", "Tokens of these.", lambda of: of.tokens),
    ("decode_seconds", "Seconds of rounds.", lambda of: of.seconds),
    ("search_seconds", "Seconds that the search has taken beside these.", lambda of: of.search.seconds),
)

PERIOD_S = 10  # of the history
NOW_S = 60  # that its "now" looks back
KEPT_S = 6 * 3600  # that it goes back
MOST_HISTORIES = 64  # of tasks: those of the latest requests

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Reply:
    """A request in flight; its events go to a queue, which several replies may share.

    The event "restarted" cancels all before it: the engine died, and its successor decodes the request.
    """

    number: int
    request: Mapping[str, Any]  # as it goes over the wire
    events: Events
    has_sent: bool = False  # the engine has sent an event
    n_restarts: int = 0
    is_shown: bool = False  # its client has seen something of it
    sent_at: float = field(default_factory=time.perf_counter)

    def put(self, event: dict[str, Any]) -> None:
        """Take an event in."""
        self.events.put_nowait((self, event))


OnState = Callable[[str, str], None]  # gets a model's name and its `EngineProcess.state` when that has changed
Events = asyncio.Queue[tuple[Reply, dict[str, Any]]]


async def next_event(events: Events, within_s: float) -> tuple[Reply, dict[str, Any]]:
    """Wait for the next event of the replies that share a queue.

    Raises: TimeoutError: none comes in time. SwiftoptError: the request failed, as the engine's process has it.
    """
    async with asyncio.timeout(within_s):
        reply, event = await events.get()
    if event["event"] == "failed":
        raise getattr(errors, event["kind"], SwiftoptError)(event["message"], event.get("param"))
    return reply, event


class EngineProcess:
    """One model's process, and the requests that it has."""

    def __init__(self, served: ServedModel, most_waiting: int, on_state: OnState = lambda name, state: None) -> None:
        self.served, self.most_waiting, self._on_state = served, most_waiting, on_state
        self.about: dict[str, Any] | None = None  # of the model, once it is loaded
        self.reason = "it is loading the model"  # why it cannot serve
        self.n_starts, self.created = 0, int(time.time())
        self._replies: dict[int, Reply] = {}
        self._verbs: dict[Any, Mapping[str, Any]] = {}  # verbs about its tuning, for the next process
        self._numbers = count(1)
        self.tuning = ModelTuning()  # as of the last answer
        self._stdin: asyncio.StreamWriter | None = None
        self._load_ended = asyncio.Event()  # the model is loaded, or cannot be
        self.n_until_loaded = 0  # requests that wait for that
        self._logged = ("", -LOG_S)  # phase of loading that was logged last, and when

    @property
    def state(self) -> str:
        """Why it takes no requests, or "ok"."""
        return self.reason if self.about is None else "ok"

    def card(self) -> dict[str, Any]:
        """Return the model in OpenAI's form."""
        about = self.about or {}
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.created,
            "owned_by": "swiftopt",
            "root": self.served.path,
            "max_model_len": about.get("max_positions"),
            **{key: about.get(key) for key in ("fingerprint", "device", "dtype")},
        }

    @property
    def n_places(self) -> int:
        """The most requests that may run and wait."""
        return self.served.concurrency + self.most_waiting

    @property
    def n_requests(self) -> int:
        """The requests that run or wait."""
        replies = list(self._replies.values())  # the metrics are read in a thread of their own
        return sum(reply.request["op"] == "decode" for reply in replies)

    async def until_loaded(self, within_s: float) -> bool:
        """Wait while the model is being loaded, then return True; `ask` raises where it is not loaded even so.

        Raises: Busy: as many requests as may run and wait do so already.
        """
        if self.about is None:
            self._check_places(self.n_requests + self.n_until_loaded)
            self.n_until_loaded += 1
            try:
                async with asyncio.timeout(within_s):
                    await self._load_ended.wait()
            except TimeoutError:
                pass
            finally:
                self.n_until_loaded -= 1
        return True

    def _check_places(self, n_taken: int) -> None:
        if n_taken >= self.n_places:
            words = f"{n_taken} requests run or wait already for {self.served.name}: try again in a few seconds"
            raise Busy(words)

    def ask(self, op: str, events: Events | None = None, **values: Any) -> Reply:
        """Send a request, whose events come to the queue (None: to a queue of its own).

        Raises: EngineGone: the process is not there. Busy: too many requests to decode wait. InvalidInput: `_encoded`.
        """
        if self.about is None:
            raise EngineGone(f"the engine of {self.served.name} cannot serve now ({self.reason}): try again soon")
        if op == "decode":
            self._check_places(self.n_requests)
        number = next(self._numbers)
        reply = Reply(number, {"op": op, "id": number, **values}, asyncio.Queue() if events is None else events)
        self._write(reply.request)
        self._replies[number] = reply
        return reply

    async def call(self, op: str, within_s: float = ANSWER_S, **values: Any) -> dict[str, Any]:
        """Return the single event that answers a request.

        Raises: as `ask`; the engine's own error; EngineGone: it does not answer in time.
        """
        reply = self.ask(op, **values)
        try:
            return (await next_event(reply.events, within_s))[1]
        except TimeoutError:
            raise EngineGone(f"the engine of {self.served.name} does not answer: try again soon") from None
        finally:
            self.drop(reply)

    async def ask_tuning(self, within_s: float = ANSWER_S) -> ModelTuning:
        """Return its tuning, which is kept as `tuning`; `unavailable` says why it does not answer."""
        try:
            self.tuning = ModelTuning.from_json(await self.call("tuning", within_s))
        except SwiftoptError as error:
            return ModelTuning(unavailable=str(error))
        return self.tuning

    async def steer(self, **values: Any) -> None:
        """Pause, resume or pin its tuning, in this process and those after it; raises as `call`."""
        await self.call("tuning", **values)
        self._verbs[values["task"] if values["verb"] == "pin" else None] = values

    def drop(self, reply: Reply) -> None:
        """Forget a request that has ended, or cancel it."""
        if self._replies.pop(reply.number, None) is not None:
            self._write({"op": "cancel", "id": reply.number})

    def give_up(self) -> None:
        """Fail the requests that are left, because the server ends."""
        self._load_ended.set()
        for reply in list(self._replies.values()):
            self.drop(reply)
            words = "the server ended before the answer did (--drain): ask again"
            reply.put({"event": "failed", "kind": "EngineGone", "message": words})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._stdin is not None and not self._stdin.is_closing():
            self._stdin.write(_encoded(line))

    async def keep(self) -> None:
        """Keep a process alive until this is cancelled."""
        wait_s = BACKOFF_S[0]
        while True:
            began = time.monotonic()
            try:
                await self._run_once()
            except (OSError, ValueError) as error:
                self.reason = str(error)
            logger.warning("engine=ended model=%s reason=%r", self.served.name, self.reason)
            self._fail_replies()
            if self.about is None:  # it could not be loaded, which those that wait for it are told
                self._load_ended.set()
            else:
                self._load_ended.clear()
            self.about, self.tuning = None, ModelTuning()
            self._on_state(self.served.name, self.state)
            wait_s = BACKOFF_S[0] if time.monotonic() - began > STEADY_S else wait_s
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, BACKOFF_S[1])

    async def _run_once(self) -> None:
        """Run one process until it ends."""
        self.n_starts += 1
        level = logging.getLevelName(logger.getEffectiveLevel())
        command = (sys.executable, "-m", "swiftopt.worker.serving", self.served.name, level)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
            start_new_session=True,  # Ctrl-C is the server's, which lets requests in flight end
        )
        assert process.stdout is not None
        self._stdin, self.reason = process.stdin, "it is loading the model"
        self._load_ended.clear()
        self._write(self.served.to_json())  # with the database's password, which `ps` would show as an argument
        self._log_loading("starting its process")
        try:
            async for line in process.stdout:
                if line.endswith(b"\n"):  # else it died while it wrote
                    self._receive(json.loads(line))
            code = await process.wait()
        finally:
            await _end(process)
        if self.about is not None or "loading" in self.reason:
            self.reason = f"its process ended by signal {-code}" if code < 0 else f"its process ended with code {code}"

    def _receive(self, event: dict[str, Any]) -> None:
        number = event["id"]
        if number is not None:
            if (reply := self._replies.get(number)) is not None:
                reply.has_sent = True
                if event["event"] in ENDS:
                    del self._replies[number]
                reply.put(event)
        elif event["event"] == "ready":
            self.about = event
            self._load_ended.set()
            logger.info("engine=ready model=%s", self.served.name)
            self._on_state(self.served.name, self.state)
            for values in self._verbs.values():
                self._write({"op": "tuning", "id": 0, **values})
            for reply in self._replies.values():  # those that an earlier process had not begun to reply
                self._write(reply.request)
        elif event["event"] == "failed":
            self.reason = event["message"]
        else:
            self.reason = f"it is loading the model: {event['step']}"
            self._log_loading(event["step"])

    def _log_loading(self, step: str) -> None:
        """Log a step of the loading if its phase has just begun or lasts LOG_S."""
        self._on_state(self.served.name, self.state)
        (phase, logged_at), now = self._logged, time.monotonic()
        if phase_of(step) != phase or now - logged_at >= LOG_S:
            self._logged = phase_of(step), now
            logger.info("engine=loading model=%s step=%r", self.served.name, step)

    def _fail_replies(self) -> None:
        """Fail the requests of which clients have seen a part, and those restarted too often; others wait."""
        replies = list(self._replies.values())
        begun = [reply for reply in replies if reply.has_sent]
        if self.about is not None:  # it may have died of the first that it had not read to its end
            begun += [reply for reply in replies if not reply.has_sent and reply.request["op"] == "decode"][:1]
        for reply in replies:
            if reply in begun and not reply.is_shown and reply.n_restarts < MOST_RESTARTS:
                reply.has_sent, reply.n_restarts = False, reply.n_restarts + 1
                reply.put({"event": "restarted"})
            elif reply in begun:
                del self._replies[reply.number]
                words = f"the engine of {self.served.name} died ({self.reason}): ask again"
                reply.put({"event": "failed", "kind": "EngineGone", "message": words})


def _encoded(line: Mapping[str, Any]) -> bytes:
    """Return a line for an engine.

    Raises: InvalidInput: a text of a request has half of a character, or objects are nested too deeply.
    """
    try:
        text = json.dumps(line, default=CompletionRequest.to_json)
        if r"\ud" in text:  # a character of two halves, or one of them
            json.dumps(line, default=CompletionRequest.to_json, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        words = "a text in the body has half of a character (a surrogate without the other): send whole ones"
        raise InvalidInput(words) from None
    except ValueError:
        raise InvalidInput("the body has too many objects within each other: send it with fewer") from None
    return text.encode() + b"\n"


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process that still runs."""
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()
            await process.wait()


@dataclass(slots=True)
class Period:
    """Sums over requests that ended within one period, which begins `at` seconds since 1970, and their figures.

    `decoded` are the tokens of rounds, `drafts` the rounds that drafted. `first_token_s` and, of the `n_timed` requests
    with more than one token, `between_tokens_s` are what their clients waited, on average per request. What each figure
    means is a table in docs/serving.md.
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
    spent: Timings = field(default_factory=Timings)
    accepted_per_position: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, at: int, done: Completion, first_token_s: float, whole_s: float) -> Period:
        """Return the sums of one request; seconds are those that its client waited."""
        n_between = done.n_tokens - 1
        return cls(
            at,
            requests=1,
            tokens=done.n_tokens,
            decoded=done.n_decoded,
            prompt_tokens=done.n_prompt_tokens,
            cached_tokens=done.n_cached,
            drafts=sum(map(sum, done.by_draft_length.values())),
            drafted=done.drafted,
            accepted=done.accepted,
            first_token_s=first_token_s,
            n_timed=int(n_between > 0),
            between_tokens_s=(whole_s - first_token_s) / n_between if n_between > 0 else 0.0,
            spent=done.timings,
            accepted_per_position=list(done.accepted_per_position),
        )

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second of decoding: those of rounds / the rounds' seconds, of one request."""
        return _quotient(self.decoded, self.spent.decode_s)

    @property
    def acceptance_rate(self) -> float | None:
        """α: accepted / drafted tokens."""
        return _quotient(self.accepted, self.drafted)

    @property
    def cached_share(self) -> float | None:
        """Share of the prompts' tokens that were read before."""
        return _quotient(self.cached_tokens, self.prompt_tokens)

    @property
    def mean_first_token_s(self) -> float | None:
        return _quotient(self.first_token_s, self.requests)

    @property
    def mean_between_tokens_s(self) -> float | None:
        return _quotient(self.between_tokens_s, self.n_timed)

    @property
    def accepted_by_position(self) -> list[float]:
        """Share of the rounds that drafted in which each position of the draft was accepted."""
        return [n / self.drafts for n in self.accepted_per_position] if self.drafts else []

    def throughput(self, length_s: float) -> float | None:
        """Tokens per second of all requests, idle time included; None where none ended, or it has just begun.

        Args: length_s: seconds of the whole period, which may not be over.
        """
        passed_s = min(length_s, time.time() - self.at)
        return self.tokens / passed_s if self.requests and passed_s >= PERIOD_S else None

    def __add__(self, other: Period) -> Period:
        """Return the sums of both, from the beginning of this one."""
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)[1:-1]}
        both = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return Period(self.at, **sums, accepted_per_position=[a + b for a, b in both])


def _quotient(above: float, below: float) -> float | None:
    return above / below if below else None


class History:
    """The latest traffic by model and task, in periods of PERIOD_S, and the sums of each model since the start."""

    def __init__(self) -> None:
        self._periods: dict[tuple[str, str], deque[Period]] = {}
        self._totals: dict[str, Period] = {}

    @property
    def tasks(self) -> list[tuple[str, str]]:
        """The models and tasks of which a request ended."""
        return list(self._periods)

    def add(self, model: str, task: str, done: Completion, first_token_s: float, whole_s: float) -> Period:
        """Count a request that has ended; return its sums."""
        at = int(time.time()) // PERIOD_S * PERIOD_S
        ended = Period.of(at, done, first_token_s, whole_s)
        self._totals[model] = self.total(model) + ended
        if (model, task) not in self._periods and len(self._periods) >= MOST_HISTORIES:
            del self._periods[min(self._periods, key=lambda each: self._periods[each][-1].at)]
        own = self._periods.setdefault((model, task), deque(maxlen=KEPT_S // PERIOD_S))
        if own and own[-1].at == at:
            own[-1] += ended
        else:
            own.append(ended)
        return ended

    def total(self, model: str) -> Period:
        """Return a model's traffic since the server's start."""
        return self._totals.get(model, Period(0))

    def last(self, span_s: int, n: int, model: str | None = None, task: str | None = None) -> list[Period]:
        """Return the last `span_s` seconds of a model and task (None: of all) in `n` periods, the oldest first."""
        length = max(PERIOD_S, span_s // n)
        end = int(time.time()) // length * length + length
        found = [Period(at) for at in range(end - n * length, end, length)]
        for (of_model, of_task), periods in self._periods.items():
            for period in reversed(periods if model in (None, of_model) and task in (None, of_task) else ()):
                if period.at < found[0].at:
                    break
                found[(period.at - found[0].at) // length] += period
        return found

    def now(self, model: str) -> Period:
        """Return the traffic of a model in the last NOW_S seconds, up to a period fewer: the newest has just begun."""
        first, *rest = self.last(NOW_S, NOW_S // PERIOD_S, model)
        return sum(rest, first)


def metric(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    words: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    """Return a metric from its values, each with those of its labels."""
    found = kind(name, words, labels=labels)
    for of, value in values:
        found.add_metric(of, value)
    return found


class EngineMetrics(Collector):
    """The engines' metrics, under vLLM's names; and their latest `history`."""

    def __init__(self, engines: Mapping[str, EngineProcess]) -> None:
        self._engines, self._counted, self.history = engines, CollectorRegistry(), History()
        given: dict[str, Any] = {"labelnames": ["model_name"], "registry": self._counted}
        self._waits = {name: Histogram(f"vllm:{name}", words, **given, buckets=BUCKETS_S) for name, words in WAITS}
        self._counters = {name: Counter(f"vllm:{name}", words, **given) for name, words, _ in COUNTERS}
        given["labelnames"] = ["model_name", "finished_reason"]
        self._ended = Counter(SUCCESS, "Requests that ended.", **given)
        for name, reason in product(engines, ENDINGS):  # so that the first failure is an increase
            self._ended.labels(name, reason)
        given["labelnames"] = ["model_name", "position"]
        self._per_position = Counter(PER_POSITION, "Accepted tokens by position in the draft, from 0.", **given)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        label, engines = ["model_name"], self._engines.items()
        running = [([name], min(each.n_requests, each.served.concurrency)) for name, each in engines]
        waiting = [
            ([name], max(0, each.n_requests - each.served.concurrency) + each.n_until_loaded) for name, each in engines
        ]
        starts = [([name], each.n_starts) for name, each in engines]
        yield metric(GaugeMetricFamily, "vllm:num_requests_running", "Requests that are decoded.", label, running)
        yield metric(GaugeMetricFamily, "vllm:num_requests_waiting", "Requests that wait.", label, waiting)
        yield metric(CounterMetricFamily, "swiftopt_engine_starts", "Starts of an engine.", label, starts)
        tasks = [(name, task) for name, engine in engines for task in engine.tuning.tasks]  # as of the last answers
        for kind, figures in ((GaugeMetricFamily, OF_TASK), (CounterMetricFamily, SINCE_START)):
            for own, words, value_of in figures:
                found = [([name, task.task], value_of(task)) for name, task in tasks]
                known = [(labels, float(value)) for labels, value in found if value is not None]
                yield metric(kind, f"swiftopt_serving_{own}", words, ["model_name", "task"], known)
        yield from self._counted.collect()

    def add(self, model: str, task: str, done: Completion, first_token_s: float, whole_s: float) -> None:
        """Count a request that has ended; seconds are those that its client waited."""
        ended = self.history.add(model, task, done, first_token_s, whole_s)
        waits = {"time_to_first_token_seconds": first_token_s, "e2e_request_latency_seconds": whole_s}
        if ended.n_timed:
            waits["inter_token_latency_seconds"] = ended.between_tokens_s
        for name, seconds in waits.items():
            self._waits[name].labels(model).observe(seconds)
        for name, _, total in COUNTERS:
            self._counters[name].labels(model).inc(getattr(ended, total))
        reason = "length" if done.finish_reason == "length" else "stop"
        self._ended.labels(model, reason).inc()
        for position, n in enumerate(done.accepted_per_position):
            self._per_position.labels(model, str(position)).inc(n)

    def fail(self, model: str, n: int) -> None:
        """Count requests that have failed."""
        self._ended.labels(model, ERROR).inc(n)


class Engines:
    """The engines of one server, by the names that clients use; none: it decodes nothing."""

    def __init__(
        self,
        served: Sequence[ServedModel] = (),
        most_waiting: int = 0,
        on_state: OnState = lambda name, state: None,
    ) -> None:
        self.of = {model.name: EngineProcess(model, most_waiting, on_state) for model in served}
        self.metrics = EngineMetrics(self.of)

    def all(self) -> list[EngineProcess]:
        """Return every engine.

        Raises: ModelNotFound: there is none.
        """
        if not self.of:
            raise ModelNotFound("this server decodes nothing: start it with `swiftopt serve --model MODEL`", "model")
        return list(self.of.values())

    def find(self, name: str) -> EngineProcess:
        """Return the engine that serves a model.

        Raises: ModelNotFound: none does; it names the nearest.
        """
        known = [engine.served.name for engine in self.all()]
        if name not in known:
            likely = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ModelNotFound(f"no model {name!r} is served here: did you mean {likely!r}?", "model")
        return self.of[name]

    def give_up(self) -> None:
        """Fail the requests that are left, because the server ends."""
        logger.warning("drain=over requests=%d", sum(engine.n_requests for engine in self.of.values()))
        for engine in self.of.values():
            engine.give_up()

    async def ask_tuning(self, within_s: float = ANSWER_S) -> dict[str, ModelTuning]:
        """Return the tuning of every engine, by the name of its model."""
        found = await asyncio.gather(*(engine.ask_tuning(within_s) for engine in self.of.values()))
        return dict(zip(self.of, found, strict=True))

    @asynccontextmanager
    async def running(self, app: object) -> AsyncIterator[None]:
        """Keep the processes alive while the app is served."""
        tasks = [asyncio.create_task(engine.keep(), name=f"engine {name}") for name, engine in self.of.items()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
