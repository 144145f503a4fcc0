"""The server's engines: one process per model, restarted when it crashes.

The HTTP process never computes. After a crash, the new process gets all requests whose clients have seen no output.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import count
from typing import Any, TypeVar

from ..core import logs
from ..core.errors import (
    Busy,
    EngineGone,
    HubUnreachable,
    ModelNotFound,
    SettingsError,
    SwiftoptError,
    UnsupportedModel,
)
from ..core.events import ModelTuning, phase_of
from ..core.messages import (
    Answer,
    AnswerDone,
    Cancel,
    Decode,
    Failed,
    FromEngine,
    FromServer,
    Keys,
    Loading,
    Question,
    Ready,
    Serve,
    Steer,
    TuningNow,
    encode,
    from_engine,
)
from ..core.requests import ServedModel
from .metrics import EngineMetrics
from .request_log import RequestLog
from .schemas import GenerationFields

MOST_LINE_BYTES = 1 << 28  # Maximum bytes of a message from an engine's process.
BACKOFF_S = (0.5, 30.0)  # Seconds before a restart: after the first crash, and at most.
ANSWER_S = 30.0  # Timeout of questions that need no decoding.
TUNING_S = 0.5  # Timeout for the engines' tuning status when metrics are scraped.
MOST_RESTARTS = 2  # Crashes that a request survives; after more, it fails as their likely cause.
LOG_S = 30.0  # Seconds between two log lines about the same phase of loading a model.
END_S = 5.0  # Seconds for a process to exit before it is killed.
KEYS_S = 5.0  # Seconds between two checks for changed API keys.
MOST_NAMED = 8  # Maximum number of models named in an error.
STEADY_S = 60.0  # Uptime after which the restart delay is reset to its minimum.

# Signal that ended a process -> its likely cause, as a clause.
LIKELY_CAUSES: dict[int, str] = {
    signal.SIGBUS: ", because a file of the model was truncated while it was read: the model is loaded again",
    signal.SIGKILL: ", probably for lack of memory",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restarted:
    """The engine crashed, and a new process decodes the request again. The answers so far are void."""


@dataclass(eq=False, slots=True)
class Reply:
    """A question in progress; its answers go to a queue, which several replies may share.

    `has_answers`: the engine has sent an answer. `is_shown`: the client has seen a part of the output.
    """

    question: Question
    answers: Answers
    has_answers: bool = False
    n_restarts: int = 0
    is_shown: bool = False
    sent_at: float = field(default_factory=time.perf_counter)

    def put(self, answer: Answer | Restarted) -> None:
        """Add an answer to the queue."""
        self.answers.put_nowait((self, answer))


OnState = Callable[[str, str], None]  # Called with (model name, its new `EngineProcess.state`).
Answers = asyncio.Queue[tuple[Reply, Answer | Restarted]]
A = TypeVar("A")


async def next_answer(answers: Answers, within_s: float) -> tuple[Reply, Answer | Restarted]:
    """Wait for the next answer to the replies that share a queue.

    Raises: TimeoutError: no answer in time. SwiftoptError: the request failed in the engine's process.
    """
    async with asyncio.timeout(within_s):
        reply, answer = await answers.get()
    if isinstance(answer, Failed):
        raise answer.error
    return reply, answer


class EngineProcess:
    """One model's process and its requests."""

    def __init__(self, served: ServedModel, most_waiting: int, on_state: OnState = lambda name, state: None) -> None:
        self.served, self.most_waiting, self._on_state = served, most_waiting, on_state
        self.about: Ready | None = None  # None until the model is loaded.
        self.reason = "it is loading the model"  # Why the engine cannot serve, for error messages.
        self.load_error: SwiftoptError | None = None  # Why the model cannot be loaded at all.
        self.n_starts, self.created = 0, int(time.time())
        self._replies: dict[int, Reply] = {}
        # Latest verb per pinned task (None: for all tasks). A restarted process gets them again.
        self._verbs: dict[str | None, Steer] = {}
        self._keys: Keys | None = None  # API keys in force, if there are any.
        self._numbers = count(1)
        self.tuning = ModelTuning()  # Last tuning status that the engine sent.
        self._stdin: asyncio.StreamWriter | None = None
        self._load_ended = asyncio.Event()  # Set when loading has succeeded or failed.
        self._was_loaded = False
        self.n_until_loaded = 0  # Requests waiting for `_load_ended`.
        self._last_logged = ("", -LOG_S)  # Last logged phase of loading, and when it was logged.

    @property
    def state(self) -> str:
        """Why the engine accepts no requests; "ok" if it does."""
        return self.reason if self.about is None else "ok"

    def card(self) -> dict[str, Any]:
        """Return the model in OpenAI's form."""
        about = self.about
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.created,
            "owned_by": "swiftopt",
            "root": self.served.path,
            "max_model_len": about and about.max_positions,
            "fingerprint": about and about.fingerprint,
            "device": about and about.device,
            "dtype": about and about.dtype,
        }

    def unread(self, body: GenerationFields) -> list[str]:
        """Return the places of the values that only the chat template could use, but does not read."""
        template = None if self.about is None else self.about.template
        return [] if template is None else sorted(body.unread(template))

    @property
    def n_places(self) -> int:
        """Maximum number of requests that may run or wait at a time."""
        return self.served.concurrency + self.most_waiting

    @property
    def n_requests(self) -> int:
        """Number of running and waiting requests."""
        replies = list(self._replies.values())  # Copy, because metrics are read in another thread.
        return sum(isinstance(reply.question, Decode) for reply in replies)

    async def until_loaded(self, within_s: float) -> None:
        """Wait while the model is being loaded, at most `within_s`. `ask` raises if it is not loaded then.

        Raises: Busy: the limit of running and waiting requests is reached.
        """
        if self.about is None:
            self._check_places(self.n_requests + self.n_until_loaded)
            self.n_until_loaded += 1
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(within_s):
                        await self._load_ended.wait()
            finally:
                self.n_until_loaded -= 1

    def _check_places(self, n_taken: int) -> None:
        if n_taken >= self.n_places:
            problem = f"{n_taken} requests already run or wait for {self.served.name}: try again in a few seconds"
            raise Busy(problem)

    def ask(self, question: Question, answers: Answers | None = None) -> Reply:
        """Send a question; its answers go to `answers` (None: to a new queue).

        Raises: EngineGone: no process runs. Busy: too many requests wait. InvalidInput: as in `encode`.
        """
        if self.about is None:
            raise EngineGone(f"the engine of {self.served.name} is not available ({self.reason}): try again soon")
        if isinstance(question, Decode):
            self._check_places(self.n_requests)
        question = replace(question, id=next(self._numbers), request_id=logs.request_id.get())
        reply = Reply(question, asyncio.Queue() if answers is None else answers)
        self._write(question)
        self._replies[question.id] = reply
        return reply

    async def call(self, question: Question, kind: type[A], within_s: float = ANSWER_S) -> A:
        """Return the answer to a question that has exactly one answer, of the type `kind`.

        Raises: as `ask`; an error of the engine; EngineGone: there is no answer in time.
        """
        reply = self.ask(question)
        try:
            with suppress(TimeoutError):
                _, answer = await next_answer(reply.answers, within_s)
                if isinstance(answer, kind):
                    return answer
        finally:
            self.drop(reply)
        raise EngineGone(f"the engine of {self.served.name} does not answer: try again soon")

    async def ask_tuning(self, within_s: float = ANSWER_S) -> ModelTuning:
        """Return the engine's tuning status and keep it in `tuning`; without an answer, `unavailable` says why."""
        try:
            self.tuning = (await self.call(Steer(), TuningNow, within_s)).tuning
        except SwiftoptError as error:
            return ModelTuning(unavailable=str(error))
        return self.tuning

    async def steer(self, steer: Steer) -> None:
        """Pause, resume or pin the tuning, in this process and restarted ones; raises as `call`."""
        await self.call(steer, TuningNow)
        self._verbs[steer.task if steer.verb == "pin" else None] = steer

    def tell_keys(self, names: tuple[str, ...]) -> None:
        """Have the engine delete cached texts of all API keys but these, also after restarts."""
        if self._keys is None or self._keys.names != names:
            self._keys = Keys(names)
            if self.about is not None:
                self._write(self._keys)

    def drop(self, reply: Reply) -> None:
        """Forget a request that has ended, or cancel it."""
        if self._replies.pop(reply.question.id, None) is not None:
            self._write(Cancel(reply.question.id))

    def give_up(self) -> None:
        """Fail the remaining requests because the server shuts down."""
        self._load_ended.set()
        for reply in list(self._replies.values()):
            self.drop(reply)
            problem = "the server shut down before the answer was complete (--drain): send the request again"
            reply.put(Failed.of(reply.question.id, EngineGone(problem)))

    def _write(self, message: FromServer) -> None:
        line = encode(message)  # Encode first: an invalid request is refused even while no process runs.
        if self._stdin is not None and not self._stdin.is_closing():
            self._stdin.write(line)

    async def keep(self) -> None:
        """Run and restart the process until this is cancelled, or the first load shows that the model is unusable."""
        wait_s = BACKOFF_S[0]
        while True:
            started_s = time.monotonic()
            try:
                await self._run_once()
            except (OSError, ValueError, SettingsError) as error:
                self.reason = str(error)
            logger.warning("engine=ended model=%s reason=%r", self.served.name, self.reason)
            self._fail_replies()
            # Loading failed: wake the waiting requests, which then fail.
            if self.about is None:
                self._load_ended.set()
            else:
                self._load_ended.clear()
            self.about, self.tuning = None, ModelTuning()
            self._on_state(self.served.name, self.state)
            if self.load_error is not None:
                return
            wait_s = BACKOFF_S[0] if time.monotonic() - started_s > STEADY_S else wait_s
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, BACKOFF_S[1])

    async def _run_once(self) -> None:
        """Run one process until it ends."""
        self.n_starts += 1
        level = logging.getLevelName(logger.getEffectiveLevel())
        command = (sys.executable, "-m", "swiftopt.worker.serving", self.served.name, level, logs.current_format())
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MOST_LINE_BYTES,
            start_new_session=True,  # Only the server gets Ctrl-C, and lets requests in progress finish.
        )
        assert process.stdout is not None
        self._stdin, self.reason = process.stdin, "it is loading the model"
        self._load_ended.clear()
        # Send the settings by standard input: as arguments, `ps` would show the database's password.
        self._write(Serve(self.served))
        self._log_loading("starting the process")
        try:
            async for line in process.stdout:
                if line.endswith(b"\n"):  # Skip an incomplete line, written by a process that crashed.
                    self._receive(from_engine(line))
            code = await process.wait()
        finally:
            await _end(process)
        if self.about is not None or "loading" in self.reason:
            self.reason = ended_how(code)

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Ready():
                self.about, self._was_loaded = message, True
                self._load_ended.set()
                logger.info("engine=ready model=%s", self.served.name)
                self._on_state(self.served.name, self.state)
                if self._keys is not None:
                    self._write(self._keys)
                for steer in self._verbs.values():
                    self._write(steer)
                for unanswered in self._replies.values():
                    self._write(unanswered.question)
            case Loading(step):
                self.reason = f"it is loading the model: {step}"
                self._log_loading(step)
            case Failed(None, _, reason):
                self.reason = reason
                # A model that was loaded before is tried again, because its file may have been incomplete.
                if not self._was_loaded and _is_of_model(message.error):
                    self.load_error = message.error
            case answer:
                if answer.id is not None and (reply := self._replies.get(answer.id)) is not None:
                    reply.has_answers = True
                    if isinstance(answer, AnswerDone | Failed):
                        del self._replies[answer.id]
                    reply.put(answer)

    def _log_loading(self, step: str) -> None:
        """Log a step of loading if its phase is new or was last logged LOG_S ago."""
        self._on_state(self.served.name, self.state)
        (phase, logged_at), now_s = self._last_logged, time.monotonic()
        if phase_of(step) != phase or now_s - logged_at >= LOG_S:
            self._last_logged = phase_of(step), now_s
            logger.info("engine=loading model=%s step=%r", self.served.name, step)

    def _fail_replies(self) -> None:
        """Fail the requests whose clients saw a part of the answer, or that were restarted too often.

        The others stay for the next process.
        """
        replies = list(self._replies.values())
        started_replies = [reply for reply in replies if reply.has_answers]
        # The first request without answers counts as restarted, too: reading its prompt may have caused the crash.
        if self.about is not None:
            unread = (reply for reply in replies if not reply.has_answers and isinstance(reply.question, Decode))
            started_replies += [first_unread for first_unread in [next(unread, None)] if first_unread is not None]
        for reply in started_replies:
            if not reply.is_shown and reply.n_restarts < MOST_RESTARTS:
                reply.has_answers, reply.n_restarts = False, reply.n_restarts + 1
                reply.put(Restarted())
            else:
                del self._replies[reply.question.id]
                problem = f"the engine of {self.served.name} died ({self.reason}): send the request again"
                reply.put(Failed.of(reply.question.id, EngineGone(problem)))


def _is_of_model(error: SwiftoptError) -> bool:
    """Return whether the model itself is the reason of a failed load, so that another attempt would fail, too."""
    return isinstance(error, ModelNotFound | UnsupportedModel) and not isinstance(error, HubUnreachable)


def ended_how(code: int) -> str:
    """Return how a process ended, in words; a negative exit code is a signal."""
    if code >= 0:
        return f"its process ended with code {code}"
    return f"its process ended by signal {-code}{LIKELY_CAUSES.get(-code, '')}"


async def _end(process: asyncio.subprocess.Process) -> None:
    """Terminate a process if it still runs; kill it after END_S."""
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()
            await process.wait()


class Engines:
    """The engines of a server, by the names that clients use; empty if no models are served."""

    def __init__(
        self,
        models: Sequence[ServedModel] = (),
        most_waiting: int = 0,
        on_state: OnState = lambda name, state: None,
        key_names: Callable[[], tuple[str, ...] | None] = lambda: None,
    ) -> None:
        """Args: key_names: returns the names of the valid API keys; None: requests need no key."""
        self.of = {model.name: EngineProcess(model, most_waiting, on_state) for model in models}
        self._key_names = key_names
        self.metrics, self.requests = EngineMetrics(self.of), RequestLog()

    @property
    def load_error(self) -> SwiftoptError | None:
        """The error of a model that cannot be loaded, which ends the server; None: no such error."""
        return next((engine.load_error for engine in self.of.values() if engine.load_error is not None), None)

    def all(self) -> list[EngineProcess]:
        """Return every engine.

        Raises: ModelNotFound: there is none.
        """
        if not self.of:
            raise ModelNotFound("this server has no model: start it with `swiftopt serve --model MODEL`", "model")
        return list(self.of.values())

    def find(self, name: str) -> EngineProcess:
        """Return the engine that serves a model.

        Raises: ModelNotFound: the model is not served; the message names a similar one, or those that are served.
        """
        names = [engine.served.name for engine in self.all()]
        if name not in names:
            similar_names = get_close_matches(name, names, n=1)
            advice = f"did you mean {similar_names[0]!r}?" if similar_names else f"use {', '.join(names[:MOST_NAMED])}"
            raise ModelNotFound(f"the model {name!r} is not served here: {advice}", "model")
        return self.of[name]

    def give_up(self) -> None:
        """Fail the remaining requests because the server shuts down."""
        logger.warning("drain=over requests=%d", sum(engine.n_requests for engine in self.of.values()))
        for engine in self.of.values():
            engine.give_up()

    async def ask_tuning(self, within_s: float = ANSWER_S) -> dict[str, ModelTuning]:
        """Return the tuning status of every engine by the name of its model."""
        tunings = await asyncio.gather(*(engine.ask_tuning(within_s) for engine in self.of.values()))
        return dict(zip(self.of, tunings, strict=True))

    @asynccontextmanager
    async def running(self, app: object) -> AsyncIterator[None]:
        """Run the engines' processes while the app is served."""
        tasks = [asyncio.create_task(engine.keep(), name=f"engine {name}") for name, engine in self.of.items()]
        tasks.append(asyncio.create_task(self._follow_keys(), name="keys"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow_keys(self) -> None:
        """Send changed names of API keys to the engines until this is cancelled."""
        while True:
            if (names := self._key_names()) is not None:
                for engine in self.of.values():
                    engine.tell_keys(names)
            await asyncio.sleep(KEYS_S)
