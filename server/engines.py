"""The engines behind the server: a process per model, restarted when it dies; requests in, events out.

The HTTP process never computes. What had sent nothing when an engine died is asked of the next one again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core import errors
from ..core.errors import Busy, EngineGone, ModelNotFound, SwiftoptError
from ..core.requests import ServedModel
from ..core.types import Completion

LONGEST_LINE = 1 << 28  # bytes of one event
BACKOFF_S = (0.5, 30.0)  # after the first death, and at most
ANSWER_S = 30.0  # to a question that needs no decoding
STEADY_S = 60.0  # a process that lived so long begins with the shortest wait again

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
WAITS = {
    "time_to_first_token_seconds": "From a request to its first text.",
    "inter_token_latency_seconds": "Per token behind the first text.",
    "e2e_request_latency_seconds": "From a request to its end.",
}
COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Tokens of completions.",
    "prefix_cache_queries": "Tokens of prompts that were looked for in what was read before.",
    "prefix_cache_hits": "Tokens of prompts that were found there.",
    "spec_decode_num_drafts": "Rounds.",
    "spec_decode_num_draft_tokens": "Draft steps.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "request_success": "Requests that ended.",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
PER_POSITION_WORDS = "Accepted tokens by position in the draft, from 0."

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Reply:
    """A request in flight: its events as they come, until the last one."""

    request: Mapping[str, Any]  # as it goes over the wire, without its number
    events: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    has_sent: bool = False
    asked_at: float = field(default_factory=time.perf_counter)

    def put(self, event: dict[str, Any]) -> None:
        """Take an event in."""
        self.has_sent = True
        self.events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        while True:
            event = await self.events.get()
            if event["event"] == "failed":
                raise _error(event["kind"], event["message"])
            yield event
            if event["event"] not in ("prompt", "text"):
                return


class EngineProcess:
    """One model's process, and the requests that it has."""

    def __init__(self, served: ServedModel, most_waiting: int) -> None:
        self.served, self.most_waiting = served, most_waiting
        self.about: dict[str, Any] | None = None  # of the model, once it is loaded
        self.reason = "it is loading the model"  # why it cannot serve
        self.n_starts, self.created = 0, int(time.time())
        self._replies: dict[int, Reply] = {}
        self._next = 0
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.about is not None

    @property
    def state(self) -> str:
        """ "ok", or why it takes none."""
        return "ok" if self.is_ready else self.reason

    def card(self) -> dict[str, Any]:
        """The model in OpenAI's form."""
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
    def n_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._replies)

    def start(self) -> None:
        """Begin to keep a process alive."""
        self._task = asyncio.create_task(self._keep(), name=f"engine {self.served.name}")

    async def close(self) -> None:
        """End the process; what it still does is given up."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), 5)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    def ask(self, op: str, **values: Any) -> Reply:
        """Send a request; its events come to the reply.

        Raises: EngineGone: the process is not there. Busy: too many requests wait.
        """
        if not self.is_ready:
            raise EngineGone(f"the engine of {self.served.name} cannot serve now ({self.reason}): try again soon")
        if self.n_requests >= self.served.concurrency + self.most_waiting:
            raise Busy(
                f"{self.n_requests} requests run or wait already for {self.served.name}: try again in a few seconds"
            )
        reply = Reply({"op": op, **values})
        self._next += 1
        self._replies[self._next] = reply
        self._write({**reply.request, "id": self._next})
        return reply

    async def tell(self, op: str, **values: Any) -> dict[str, Any]:
        """Ask what has a single event as its reply.

        Raises: as `ask`, and what the engine refuses it with; EngineGone: it does not answer in time.
        """
        reply = self.ask(op, **values)
        try:
            return await asyncio.wait_for(anext(aiter(reply)), ANSWER_S)
        except TimeoutError:
            raise EngineGone(f"the engine of {self.served.name} does not answer: try again soon") from None
        finally:
            self.drop(reply)

    def drop(self, reply: Reply) -> None:
        """Forget a request that has ended, or give it up."""
        for number, own in list(self._replies.items()):
            if own is reply:
                del self._replies[number]
                self._write({"op": "cancel", "id": number})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _keep(self) -> None:
        wait_s = BACKOFF_S[0]
        while True:
            began = time.monotonic()
            try:
                await self._live()
            except OSError as error:
                self.reason = str(error)
            self.about = None
            logger.warning("engine=ended model=%s reason=%r", self.served.name, self.reason)
            self._lose()
            wait_s = BACKOFF_S[0] if time.monotonic() - began > STEADY_S else wait_s
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, BACKOFF_S[1])

    async def _live(self) -> None:
        """Run one process to its end."""
        self.n_starts += 1
        command = (sys.executable, "-m", "swiftopt.tasks.serving", json.dumps(self.served.to_json()))
        self._process = process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
            env=os.environ.copy(),
            start_new_session=True,  # Ctrl-C is the server's, which lets requests in flight end
        )
        assert process.stdout is not None
        self.reason = "it is loading the model"
        async for line in process.stdout:
            self._hear(json.loads(line))
        code = await process.wait()
        if self.about is not None or "loading" in self.reason:
            self.reason = f"its process ended by signal {-code}" if code < 0 else f"its process ended with code {code}"

    def _hear(self, event: dict[str, Any]) -> None:
        number = event["id"]
        if number is not None:
            if (reply := self._replies.get(number)) is not None:
                reply.put(event)
        elif event["event"] == "ready":
            self.about = event
            logger.info("engine=ready model=%s", self.served.name)
            for own, reply in self._replies.items():  # those that an earlier process had not begun to reply
                self._write({**reply.request, "id": own})
        elif event["event"] == "failed":
            self.reason = event["message"]
        else:
            self.reason = f"it is loading the model: {event['step']}"

    def _lose(self) -> None:
        """Fail the requests that had sent something; the others wait for the next process."""
        for number, reply in list(self._replies.items()):
            if reply.has_sent:
                del self._replies[number]
                words = f"the engine of {self.served.name} died ({self.reason}): ask again"
                reply.put({"event": "failed", "kind": "EngineGone", "message": words})


def _error(kind: str, message: str) -> SwiftoptError:
    """The error of that class, as the engine's process had it."""
    error: SwiftoptError = getattr(errors, kind, SwiftoptError)(message)
    return error


class EngineMetrics(Collector):
    """What engines do, under vLLM's names."""

    def __init__(self, engines: Mapping[str, EngineProcess]) -> None:
        self._engines = engines
        self._waits = {
            name: Histogram(f"vllm:{name}", words, ["model_name"], registry=None, buckets=BUCKETS_S)
            for name, words in WAITS.items()
        }
        self._counters = {
            name: Counter(f"vllm:{name}", words, ["model_name"], registry=None) for name, words in COUNTERS.items()
        }
        self._per_position = Counter(PER_POSITION, PER_POSITION_WORDS, ["model_name", "position"], registry=None)

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests that are decoded.", labels=["model_name"])
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait.", labels=["model_name"])
        starts = CounterMetricFamily("swiftopt_engine_starts", "Starts of an engine.", labels=["model_name"])
        for name, engine in self._engines.items():
            n, most = engine.n_requests, engine.served.concurrency
            running.add_metric([name], min(n, most))
            waiting.add_metric([name], max(0, n - most))
            starts.add_metric([name], engine.n_starts)
        yield from (running, waiting, starts)
        for metric in (*self._waits.values(), *self._counters.values(), self._per_position):
            yield from metric.collect()

    def add(self, model: str, done: Completion, first_token_s: float, whole_s: float) -> None:
        """Count a request that has ended; seconds are those that its client waited."""
        self._waits["time_to_first_token_seconds"].labels(model).observe(first_token_s)
        self._waits["e2e_request_latency_seconds"].labels(model).observe(whole_s)
        if done.n_tokens > 1:
            per_token = (whole_s - first_token_s) / (done.n_tokens - 1)
            self._waits["inter_token_latency_seconds"].labels(model).observe(per_token)
        counts = {
            "prompt_tokens": done.n_prompt_tokens,
            "generation_tokens": done.n_tokens,
            "prefix_cache_queries": done.n_prompt_tokens,
            "prefix_cache_hits": done.n_cached,
            "spec_decode_num_drafts": sum(done.verified_widths.values()),
            "spec_decode_num_draft_tokens": done.drafted,
            "spec_decode_num_accepted_tokens": done.accepted,
            "request_success": 1,
        }
        for name, n in counts.items():
            self._counters[name].labels(model).inc(n)
        for position, n in enumerate(done.accepted_per_position):
            self._per_position.labels(model, str(position)).inc(n)


class Engines:
    """The engines of one server, by the names that clients use."""

    def __init__(self, served: Sequence[ServedModel], most_waiting: int) -> None:
        self.of = {model.name: EngineProcess(model, most_waiting) for model in served}
        self.metrics = EngineMetrics(self.of)

    def find(self, name: str) -> EngineProcess:
        """The engine that serves a model.

        Raises: ModelNotFound: none does; it names the nearest.
        """
        if name not in self.of:
            likely = get_close_matches(name, self.of, n=1, cutoff=0.0)[0]
            raise ModelNotFound(f"no model {name!r} is served here: did you mean {likely!r}?")
        return self.of[name]

    def start(self) -> None:
        """Begin to load all models."""
        for engine in self.of.values():
            engine.start()

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(engine.close() for engine in self.of.values()))
