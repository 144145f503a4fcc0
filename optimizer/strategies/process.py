"""The near end of the suggestion process: one request at a time, never waited for unless asked to.

A Gaussian process takes from a tenth of a second to minutes per suggestion, and decoding must not wait for it, nor
share its interpreter lock. It therefore runs in a Python process of its own; a plain one, not multiprocessing's, which
would run the caller's script a second time.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from .base import Bits

Engine = Literal["gp", "tpe"]  # a module of this package with MAX_POINTS and suggest()

DEADLINE_S = 60.0  # seconds that one suggestion may take, the start of the process included
MAX_FAILURES = 3  # crashes or missed deadlines in a row, after which nothing is asked any more
MODULE = "swiftopt.optimizer.strategies.suggest"

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
