"""The suggestion process: `python -m swiftopt.optimizer.strategies.process`, and who asks it; never waited for.

A Gaussian process takes from a tenth of a second to minutes per suggestion, and decoding must not wait for it, nor
share its interpreter lock. It therefore runs in a Python process of its own; a plain one, not multiprocessing's, which
would run the caller's script a second time.

One JSON object per line goes each way. A request names the `engine` and holds its `seed`, `n_skipped`, all `scores` so
far (pairs of a 0/1 string and a score) and the sets being scored (`pending`: 0/1 strings); the answer is
`{"bits": [0, 1, …]}` or `{"error": "…"}`. It depends on the request and on nothing else.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import random
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeVar

from .base import Bits

P = TypeVar("P")  # a layer set, or any point of a search
Engine = Literal["gp", "tpe", "cube"]  # a module of this package with MAX_POINTS and suggest()

DEADLINE_S = 60.0  # seconds that one suggestion may take, the start of the process included
MAX_FAILURES = 3  # crashes or missed deadlines in a row, after which nothing is asked any more
MODULE = "swiftopt.optimizer.strategies.process"
NICENESS = 10  # added to the priority value of the process: decoding goes first

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingPoint:
    """What a suggestion depends on, besides engine and seed: the first `n_observed` scores and the sets in progress."""

    step: int
    n_skipped: int
    n_observed: int
    pending: list[str]


class SuggestionProcess:
    """Holds the observations, and the process that turns them into suggestions, started with the first request.

    Every request carries all observations, so that a process that crashed or missed a deadline costs one suggestion:
    the next request starts another. After `MAX_FAILURES` in a row a warning is logged and `ask` does nothing from then
    on.
    """

    def __init__(self, engine: Engine, seed: int, deadline_s: float = DEADLINE_S) -> None:
        self.engine = engine
        self.request: PendingPoint | None = None  # the one in flight, known also after `close`
        self._seed = seed
        self._deadline_s = deadline_s
        self._scores: list[tuple[str, float]] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None
        self._answer: Future[Bits] | None = None
        self._due_at = 0.0
        self._failures = 0

    @property
    def in_flight(self) -> bool:
        """Whether a suggestion was asked for and not yet taken."""
        return self._answer is not None

    @property
    def gave_up(self) -> bool:
        """Whether it failed too often, or was closed, and suggests nothing any more."""
        return self._failures >= MAX_FAILURES

    @property
    def pid(self) -> int | None:
        """Process id of the running process; None if there is none."""
        return self._child.pid if self._child and self._child.poll() is None else None

    def observe(self, bits: Bits, score: float) -> None:
        """Keep a score for the next request; one that is not finite is left out, no engine can use it."""
        if math.isfinite(score):
            self._scores.append((_text(bits), score))

    def ask(self, step: int, n_skipped: int, pending: Sequence[Bits]) -> None:
        """Ask for a set of `n_skipped` sub-layers; `step` seeds it; `pending` sets are being scored elsewhere.

        Does nothing while a request is in flight, before the first observation, and after too many failures.
        """
        self.ask_again(PendingPoint(step, n_skipped, len(self._scores), [_text(bits) for bits in pending]))

    def ask_again(self, request: PendingPoint) -> None:
        """Repeat a request of an earlier process of this search, with the scores it had then; else as `ask`."""
        if self.in_flight or self.gave_up or not self._scores:
            return
        if self.pid is None:
            try:
                self._start()
            except OSError as error:
                self._fail(f"no process: {error}")
                return
        message = {
            "engine": self.engine,
            "seed": random.Random(f"{self._seed}/{request.step}/{self.engine}").getrandbits(32),
            "n_skipped": request.n_skipped,
            "scores": self._scores[: request.n_observed],
            "pending": request.pending,
        }
        self.request, self._answer = request, Future()
        self._due_at = time.monotonic() + self._deadline_s
        # In a thread: the write, too, blocks as soon as a long history fills the pipe of a process still importing. A
        # daemon, for an interpreter that ends waits for an executor's threads.
        exchange = (self._child, json.dumps(message).encode() + b"\n", self._answer)
        threading.Thread(target=_exchange, args=exchange, daemon=True).start()

    def take(self, *, wait: bool) -> Bits | None:
        """Return the suggestion that was asked for, once; None if there is none (yet). `wait`: up to the deadline."""
        if self._answer is None:
            return None
        left_s = max(0.0, self._due_at - time.monotonic())
        try:
            suggestion = self._answer.result(left_s if wait else 0.0)
        except TimeoutError:
            if time.monotonic() >= self._due_at:
                self._fail(f"no suggestion within {self._deadline_s:g} s")
            return None
        except ValueError as error:
            self._fail(str(error))
            return None
        self._answer = self.request = None
        self._failures = 0
        return suggestion

    def close(self) -> None:
        """Kill the process and ask nothing any more; may be called twice."""
        self._stop()
        self._answer = None
        self._failures = MAX_FAILURES

    def _start(self) -> None:
        self._stop()
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # -P: a file of the caller's folder named like a library must not shadow it. The session of its own keeps a
        # terminal's Ctrl-C from it; it ends when its standard input does, whatever ended this process.
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | one_thread,
            start_new_session=True,
        )
        self._stop = weakref.finalize(self, _kill, self._child, os.getpid())
        logger.debug("suggestions=started engine=%s pid=%d", self.engine, self._child.pid)

    def _fail(self, reason: str) -> None:
        self._stop()
        self._answer = self.request = None
        self._failures += 1
        logger.info("suggestions=failed engine=%s failures=%d reason=%r", self.engine, self._failures, reason)
        if self.gave_up:
            logger.warning(
                "suggestions=off engine=%s failures=%d reason=%r candidates=random", self.engine, self._failures, reason
            )


def _text(bits: Bits) -> str:
    return "".join(map(str, bits))


def _bits(text: str) -> Bits:
    return tuple(map(int, text))


def _exchange(child: subprocess.Popen[bytes], line: bytes, answer: Future[Bits]) -> None:
    """Send one request and wait for its answer; a ValueError says in its text why there is none."""
    assert child.stdin is not None and child.stdout is not None
    reply = b""
    with suppress(OSError, ValueError):  # a broken pipe, or one that was closed meanwhile
        child.stdin.write(line)
        child.stdin.flush()
        reply = child.stdout.readline()
    try:
        if not reply.endswith(b"\n"):
            raise ValueError("the process ended")
        values = json.loads(reply)
        if not isinstance(values, dict) or "bits" not in values:
            raise ValueError(str(values))
        answer.set_result(tuple(int(bit) for bit in values["bits"]))
    except ValueError as error:
        answer.set_exception(error)


def _kill(child: subprocess.Popen[bytes], owner_pid: int) -> None:
    """End the process, unless this is a fork of the one that started it."""
    if os.getpid() == owner_pid:
        child.kill()
        with suppress(OSError), child:  # closes its pipes; what was still to be written has no reader
            pass


def answer(request: Mapping[str, Any]) -> Bits:
    """Suggest a layer set; the far end's work."""
    # Each engine loads its own library, seconds of start-up that the other need not pay.
    gc.disable()  # what an import makes stays: to walk it again and again takes a sixth of the time
    library = import_module(f"{__package__}.{request['engine']}")
    gc.enable()
    points = points_of(((_bits(text), score) for text, score in request["scores"]), library.MAX_POINTS)
    pending = [_bits(text) for text in request["pending"]]
    suggestion: Bits = library.suggest(points, pending, request["n_skipped"], request["seed"])
    return suggestion


def points_of(scores: Iterable[tuple[P, float]], limit: int) -> list[tuple[P, float]]:
    """Return at most `limit` sets with their mean scores: the best of the older ones, then the latest (two thirds).

    A set scored twice saw two windows of text; its mean is the better estimate, and bayesian-optimization takes no
    point twice. It counts as scored when it was last scored.
    """
    by_set: dict[P, list[float]] = {}
    for bits, score in scores:
        by_set[bits] = [*by_set.pop(bits, []), score]
    points = [(bits, sum(own) / len(own)) for bits, own in by_set.items()]
    if len(points) <= limit:
        return points
    n_latest = limit * 2 // 3
    older, latest = points[:-n_latest], points[-n_latest:]
    best = sorted(older, key=lambda point: point[1], reverse=True)[: limit - n_latest]
    return best + latest


def main() -> None:
    """Answer requests until the standard input ends."""
    os.nice(NICENESS)
    warnings.simplefilter("ignore")  # scikit-learn warns of each fit that ends at a bound; nobody reads it here
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not end up between two answers
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = {"bits": answer(json.loads(line))}
        except Exception as error:  # whatever it is, the near end logs it and goes on without
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
