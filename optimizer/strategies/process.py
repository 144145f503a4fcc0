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
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

Bits = tuple[int, ...]
Engine = Literal["gp", "tpe"]

DEADLINE_S = 60.0  # seconds that one suggestion may take, the start of the process included
MAX_FAILURES = 3  # crashes or missed deadlines in a row, after which nothing is asked any more
MODULE = "swiftopt.optimizer.strategies.suggest"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """What a suggestion depends on, besides engine and seed: the first `n_observed` scores and what is being scored."""

    step: int
    n_skipped: int
    n_observed: int
    pending: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a snapshot."""
        return {**asdict(self), "pending": list(self.pending)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls(values["step"], values["n_skipped"], values["n_observed"], tuple(values["pending"]))


class SuggestionProcess:
    """Holds the observations, and the process that turns them into suggestions, started with the first request.

    A crash or a missed deadline costs one suggestion: the process is started anew, with every observation, at the next
    request. After `MAX_FAILURES` in a row a warning is logged and `ask` does nothing from then on.
    """

    def __init__(self, engine: Engine, seed: int, deadline_s: float = DEADLINE_S) -> None:
        self.engine = engine
        self._seed = seed
        self._deadline_s = deadline_s
        self._history: list[tuple[str, float]] = []
        self._n_sent = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = _nothing
        self._reply: queue.SimpleQueue[bytes] | None = None
        self.request: Request | None = None  # the one in flight, known also after `close`
        self._due_at = 0.0
        self._failures = 0

    @property
    def in_flight(self) -> bool:
        """Whether a suggestion was asked for and not yet taken."""
        return self._reply is not None

    @property
    def gave_up(self) -> bool:
        """Whether it failed too often, or was closed, and suggests nothing any more."""
        return self._failures >= MAX_FAILURES

    @property
    def pid(self) -> int | None:
        """Of the running process; None if there is none."""
        return self._child.pid if self._child and self._child.poll() is None else None

    def observe(self, bits: Bits, score: float) -> None:
        """Keep a score for the next request; one that is not finite is left out, no engine can use it."""
        if math.isfinite(score):
            self._history.append((_text(bits), score))

    def ask(self, step: int, n_skipped: int, pending: Sequence[Bits]) -> None:
        """Ask for a set of `n_skipped` sub-layers; `step` seeds it; `pending` sets are being scored elsewhere.

        Does nothing while a request is in flight, before the first observation, and after too many failures.
        """
        self.ask_again(Request(step, n_skipped, len(self._history), tuple(_text(bits) for bits in pending)))

    def ask_again(self, request: Request) -> None:
        """Ask what another life of this search asked, of the scores it had then; else as `ask`."""
        if self.in_flight or self.gave_up or not self._history:
            return
        if self.pid is None:
            try:
                self._start()
            except OSError as error:
                self._fail(f"no process: {error}")
                return
        assert self._child is not None
        message = {
            "step": request.step,
            "n_skipped": request.n_skipped,
            "new": self._history[self._n_sent : request.n_observed],
            "pending": request.pending,
        }
        self._n_sent = request.n_observed
        self.request = request
        self._reply = queue.SimpleQueue()
        self._due_at = time.monotonic() + self._deadline_s
        # The write blocks too, as soon as a long history fills the pipe of a process that is still importing.
        line = json.dumps(message).encode() + b"\n"
        threading.Thread(target=_exchange, args=(self._child, line, self._reply), daemon=True).start()

    def take(self, *, wait: bool) -> Bits | None:
        """The suggestion that was asked for, once; None if there is none (yet). `wait` waits up to the deadline."""
        if self._reply is None:
            return None
        left_s = max(0.0, self._due_at - time.monotonic())
        try:
            line = self._reply.get(timeout=left_s) if wait and left_s else self._reply.get_nowait()
        except queue.Empty:
            if time.monotonic() >= self._due_at:
                self._fail(f"no suggestion within {self._deadline_s:g} s")
            return None
        self._reply = self.request = None
        try:
            suggestion = _parsed(line)
        except ValueError as error:
            self._fail(str(error))
            return None
        self._failures = 0
        return suggestion

    def close(self) -> None:
        """Kill the process and ask nothing any more; may be called twice."""
        self._stop()
        self._reply = None
        self._failures = MAX_FAILURES

    def _start(self) -> None:
        self._stop()
        self._n_sent = 0
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # -P: a file of the caller's folder named like a library must not shadow it. The session of its own keeps a
        # terminal's Ctrl-C from it; it ends when its standard input does, whatever ended this process.
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, self.engine, str(self._seed)],
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
        self._reply = self.request = None
        self._failures += 1
        logger.info("suggestions=failed engine=%s failures=%d reason=%r", self.engine, self._failures, reason)
        if self.gave_up:
            logger.warning(
                "suggestions=off engine=%s failures=%d reason=%r candidates=random", self.engine, self._failures, reason
            )


def _nothing() -> None:
    """There is no process to stop yet."""


def _text(bits: Bits) -> str:
    return "".join(map(str, bits))


def _parsed(line: bytes) -> Bits:
    """The layer set in an answer.

    Raises: ValueError: there is none; its text says why.
    """
    if not line.endswith(b"\n"):
        raise ValueError("the process ended")
    answer = json.loads(line)
    if not isinstance(answer, dict) or "bits" not in answer:
        raise ValueError(str(answer))
    return tuple(int(bit) for bit in answer["bits"])


def _exchange(child: subprocess.Popen[bytes], line: bytes, reply: queue.SimpleQueue[bytes]) -> None:
    """Send one request and wait for its answer, in a thread of its own; an empty answer says that the process ended."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(line)
        child.stdin.flush()
        reply.put(child.stdout.readline())
    except (OSError, ValueError):  # a broken pipe, or one that was closed meanwhile
        reply.put(b"")


def _kill(child: subprocess.Popen[bytes], owner_pid: int) -> None:
    """End the process, unless this is a fork of the one that started it."""
    if os.getpid() != owner_pid:
        return
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:  # what was still to be written has no reader
            continue
