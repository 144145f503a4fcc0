"""Random search with interval Bayesian optimisation: a model of the scores suggests every interval-th candidate.

Source: SWIFT 4.1.2, Eq. 2. A Gaussian process takes from a tenth of a second to minutes per suggestion, and decoding
must neither wait for it nor share its interpreter lock. It therefore runs in a separate Python process,
`optimizer/suggestions.py`. `multiprocessing` is not used, because it would run the caller's script a second time.
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ...core.errors import SettingsError
from ...core.settings import OMP_THREADS
from ...core.types import Trial
from .base import Bits, Proposal, SearchProblem, Strategy, StrategyInfo

DEADLINE_S = 60.0  # Maximum seconds per suggestion, including the start of the process.
ENGINES_WITHOUT_DEADLINE = frozenset({"cube"})  # Search engines without a time limit, as in SWIFT's published code.
MAX_FAILURES = 3  # Consecutive crashes or timeouts after which no more suggestions are requested.
MAX_PENDING = 64  # Maximum pending sets sent with a request; needed because callers may never score a candidate.
SUGGESTIONS_MODULE = "swiftopt.optimizer.suggestions"

logger = logging.getLogger(__name__)


class IntervalStrategy(Strategy):
    """Draws candidates uniformly; every `interval`-th one is suggested by `engine`, if there is one.

    A suggestion is requested at step n with the trials observed by then, and used at step n + interval. If it has not
    arrived, that candidate is drawn (origin "late"), and the suggestion is used at the first due step after it arrives.
    With `deterministic` it is requested at the due step itself, which waits for it, as in SWIFT. A suggestion for
    another number of skipped sub-layers is dropped.

    Args:   engine: a function of `optimizer/suggestions.py`. interval: replaces the problem's interval.
    Raises: SettingsError: the interval or the number of skipped sub-layers is out of range.
    """

    def __init__(self, problem: SearchProblem, engine: str | None = None, interval: int | None = None) -> None:
        super().__init__(problem)
        self._interval = problem.interval if interval is None else interval
        if self._interval < 1:
            raise SettingsError(
                f"interval {self._interval} between two suggestions is out of range: use 1 or more steps"
            )
        self._process = SuggestionProcess(engine, problem.seed) if engine else None
        self._pending: dict[Bits, None] = {}  # Proposed sets without a score, in the order of proposal.

    def propose(self) -> Proposal:
        rng = self.next_step()
        bits, origin = self.problem.draw(self.n_skipped, rng), "random"
        # With only one possible set there is nothing to suggest.
        is_due = self.step % self._interval == 0 and math.comb(self.size, self.n_skipped) > 1
        process = self._process if is_due else None
        must_wait = self.problem.deterministic
        if process is not None:
            if must_wait:
                process.ask(self.step, self.n_skipped, list(self._pending))
            was_asked = process.in_flight
            suggestion = process.take(wait=must_wait)
            if suggestion is not None and sum(suggestion) == self.n_skipped:
                bits, origin = suggestion, process.engine
            elif was_asked:
                origin = "late"
        proposal = self.claim_unseen(bits, origin, rng)
        self._pending[self.problem.bits_of(proposal.layer_set)] = None
        if len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        if process is not None and not must_wait:
            process.ask(self.step, self.n_skipped, list(self._pending))
        return proposal

    def observe(self, trial: Trial) -> None:
        bits = self.mark_seen(trial)
        self._pending.pop(bits, None)
        if self._process is not None:
            self._process.observe(bits, trial.score)

    def state(self) -> dict[str, Any]:
        """Return the state; a suggestion in progress is stored as its request."""
        request = self._process.request if self._process is not None else None
        return {**super().state(), "asked": None if request is None else asdict(request)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; a suggestion that was in progress is requested again with the same scores."""
        super().restore(state)
        if state["asked"] is not None and self._process is not None:
            self._process.send(SuggestionRequest(**state["asked"]))

    def close(self) -> None:
        """End the suggestion process at once."""
        if self._process is not None:
            self._process.close()


@dataclass(frozen=True, slots=True)
class SuggestionRequest:
    """Inputs of a suggestion besides engine and seed: the first `n_observed` scores and the pending sets."""

    step: int
    n_skipped: int
    n_observed: int
    pending: list[str]


class SuggestionProcess:
    """Holds the observed scores and the process that turns them into suggestions; the first request starts it.

    Every request contains all observations. So if the process crashes or misses a deadline, only one suggestion is
    lost, and the next request starts a new process. After `MAX_FAILURES` failures in a row, a warning is logged and no
    more suggestions are requested.
    """

    def __init__(self, engine: str, seed: int) -> None:
        self.engine = engine
        self.request: SuggestionRequest | None = None  # The request in progress; kept after `close`.
        self._seed = seed
        self._scores: list[tuple[str, float]] = []
        self._subprocess: subprocess.Popen[bytes] | None = None
        self._stop_subprocess: Callable[[], object] = lambda: None
        self._answer: Future[Bits] | None = None
        self._due_at = 0.0
        self._failures = 0

    @property
    def in_flight(self) -> bool:
        """Whether a suggestion was requested and not yet fetched."""
        return self._answer is not None

    @property
    def gave_up(self) -> bool:
        """Whether the process failed too often or was closed, so that no more suggestions come."""
        return self._failures >= MAX_FAILURES

    @property
    def pid(self) -> int | None:
        """Process id of the running process, if any."""
        return self._subprocess.pid if self._subprocess and self._subprocess.poll() is None else None

    def observe(self, bits: Bits, score: float) -> None:
        """Store a score for the next request; drop non-finite scores, which no engine can use."""
        if math.isfinite(score):
            self._scores.append((_bits_text(bits), score))

    def ask(self, step: int, n_skipped: int, pending: Sequence[Bits]) -> None:
        """Request a set of `n_skipped` sub-layers, seeded by `step`; `pending` are the sets without a score so far.

        Does nothing while a request is in flight, before the first observation, or after too many failures.
        """
        self.send(SuggestionRequest(step, n_skipped, len(self._scores), [_bits_text(bits) for bits in pending]))

    def send(self, request: SuggestionRequest) -> None:
        """Send a request, possibly one of an earlier process of this search; see `ask`."""
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
        self._due_at = math.inf if self.engine in ENGINES_WITHOUT_DEADLINE else time.monotonic() + DEADLINE_S
        # A thread, because even the write can block: a long history fills the pipe while the process still imports.
        # A daemon thread, because the interpreter would wait for an executor's threads when it exits.
        exchange = (self._subprocess, json.dumps(message).encode() + b"\n", self._answer)
        threading.Thread(target=_exchange, args=exchange, daemon=True).start()

    def take(self, *, wait: bool) -> Bits | None:
        """Return the requested suggestion, once; None if it is not available. `wait`: block until the deadline."""
        if self._answer is None:
            return None
        remaining_s = max(0.0, self._due_at - time.monotonic())
        try:
            suggestion = self._answer.result(min(remaining_s, threading.TIMEOUT_MAX) if wait else 0.0)
        except TimeoutError:
            if time.monotonic() >= self._due_at:
                self._fail(f"no suggestion within {DEADLINE_S:g} s")
            return None
        except ValueError as error:
            self._fail(str(error))
            return None
        self._answer = self.request = None
        self._failures = 0
        return suggestion

    def close(self) -> None:
        """Kill the process and stop requesting suggestions; may be called repeatedly."""
        self._stop_subprocess()
        self._answer = None
        self._failures = MAX_FAILURES

    def _start(self) -> None:
        self._stop_subprocess()
        one_thread = dict.fromkeys((OMP_THREADS, "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # -P: files in the caller's folder must not shadow libraries. The separate session shields the process from a
        # terminal's Ctrl-C. It exits when its standard input closes, however this process ends.
        self._subprocess = subprocess.Popen(
            [sys.executable, "-P", "-m", SUGGESTIONS_MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | one_thread,
            start_new_session=True,
        )
        self._stop_subprocess = weakref.finalize(self, _kill, self._subprocess, os.getpid())
        logger.debug("suggestions=started engine=%s pid=%d", self.engine, self._subprocess.pid)

    def _fail(self, reason: str) -> None:
        self._stop_subprocess()
        self._answer = self.request = None
        self._failures += 1
        logger.info("suggestions=failed engine=%s failures=%d reason=%r", self.engine, self._failures, reason)
        if self.gave_up:
            logger.warning(
                "suggestions=off engine=%s failures=%d reason=%r candidates=random", self.engine, self._failures, reason
            )


def _bits_text(bits: Bits) -> str:
    return "".join(map(str, bits))


def _exchange(suggester: subprocess.Popen[bytes], line: bytes, answer: Future[Bits]) -> None:
    """Send one request, wait for the reply, and store the suggestion or a ValueError in `answer`."""
    assert suggester.stdin is not None and suggester.stdout is not None
    reply = b""
    with suppress(OSError, ValueError):  # The pipe is broken or was closed meanwhile.
        suggester.stdin.write(line)
        suggester.stdin.flush()
        reply = suggester.stdout.readline()
    try:
        if not reply.endswith(b"\n"):
            raise ValueError("the process ended")
        reply_values = json.loads(reply)
        if not isinstance(reply_values, dict) or "bits" not in reply_values:
            raise ValueError(str(reply_values))
        answer.set_result(tuple(int(bit) for bit in reply_values["bits"]))
    except ValueError as error:
        answer.set_exception(error)


def _kill(child: subprocess.Popen[bytes], owner_pid: int) -> None:
    """Kill the child, unless the current process is a fork of the one that started the child."""
    if os.getpid() == owner_pid:
        child.kill()
        with suppress(OSError), child:  # Close the pipes; unwritten data has no reader any more.
            pass


def _suggesting_strategy(help: str, engine: str, interval: int | None = None) -> StrategyInfo:
    return StrategyInfo(help, partial(IntervalStrategy, engine=engine, interval=interval), suggests=True)


STRATEGIES = {
    "random": StrategyInfo("uniform draws", IntervalStrategy),
    "bayes": _suggesting_strategy("a Gaussian process at every step", "gp", 1),
    "swift": _suggesting_strategy("draws, and a Gaussian process at every β-th step", "gp"),
    "published": _suggesting_strategy("the same over the cube of all sub-layers, as SWIFT's code", "cube"),
    "tpe": _suggesting_strategy("a tree-structured Parzen estimator at every step", "tpe", 1),
}
