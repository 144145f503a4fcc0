"""One model's engine in a process of its own: requests come as JSON lines, and their events go back as JSON lines.

Standard input brings `{"op": "decode", "id": …, "request": CompletionRequest}`, `cancel`, `tokenize`, `detokenize` and
`close`; standard output carries `{"id": …, "event": …}`, and `{"id": null, "event": "ready"}` once the model is there.
Jobs of the model that wait in the queue run in the engine as well, while nothing is decoded.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ..core.errors import InvalidInput, NotFound, OutputError, StoreError, StreamError, SwiftoptError
from ..core.events import ModelTuning, TuningVerb, Way
from ..core.requests import DEFAULT_QUEUE, CompletionRequest, Delivery, Job, ServedModel, TuneRequest
from ..core.streams import LineWriter, parse_stream, stream_lines
from ..core.types import DEFAULT_TASK, Prompt, Sampling, TokenLogprob
from ..decoding.grammar import Grammar
from ..decoding.session import Session
from ..models.costs import machine_name
from ..models.runtime import Runtime
from ..store import Store
from ..tasks import model as models
from ..tasks.generate import Generated, TextAdded
from ..tasks.job import HandedBack
from ..tasks.model import Cancelled, LiveEngine, Model, Ticket
from ..tasks.traffic import Traffic
from .attempt import HAND_BACK_S, KeptModel, WorkerContext, engine_lock, request_of, run_attempt
from .tokens import Piece, Tokens

LOOK_S = 1.0  # between two looks for jobs of the model
HOLD_S = 30.0  # that these are kept from the workers of this machine without saying so again

logger = logging.getLogger(__name__)


class Wire:
    """Writes events as lines; any thread may."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._lock = out, threading.Lock()

    def send(self, number: int | None, event: str, **values: Any) -> None:
        """Write one event of a request, or of the engine (None)."""
        line = json.dumps({"id": number, "event": event, **values})
        with self._lock:
            self._out.write(line + "\n")
            self._out.flush()

    def fail(self, number: int | None, error: BaseException) -> None:
        """Write why a request failed, or the engine (None); what is nobody's input goes to the log as it is."""
        known = isinstance(error, SwiftoptError)
        if not known:
            traceback.print_exception(error)
        words = str(error) if known else f"the engine failed at this request ({type(error).__name__}): see its log"
        kind, param = type(error).__name__ if known else "SwiftoptError", getattr(error, "param", None)
        self.send(number, "failed", kind=kind, message=words, param=param)


class _Sent(Ticket):
    """A request whose events go over the wire.

    Of one that only reads its prompt, the token that the reading gives as well is left out.
    """

    def __init__(self, wire: Wire, number: int, request: CompletionRequest, piece_of: Callable[[int], Piece]) -> None:
        super().__init__()
        self._asked_at = time.perf_counter()
        self._wire, self._number, self._request, self._piece_of = wire, number, request, piece_of

    def put(self, event: TextAdded | Generated) -> None:
        """Write an event."""
        if self._request.max_new_tokens == 0:
            event = _without_text(event)
        if isinstance(event, TextAdded):
            told: dict[str, Any] = {"text": event.text, "n_tokens": event.n_tokens}
            if self._request.logprobs is not None:
                told["logprobs"] = [self._told(each) for each in event.logprobs]
                told["prompt_logprobs"] = [self._told(each) for each in event.prompt_logprobs]
            if self._request.trace:
                pieces = [(token, [*map(self._piece_of, token.rejected)]) for token in event.traced]
                told["trace"] = [(self._piece_of(token.token_id), token.source, rest) for token, rest in pieces]
            self._wire.send(self._number, "text", **told)
        else:
            waited_s = time.perf_counter() - self._asked_at
            self._wire.send(
                self._number,
                "done",
                queued_s=max(0.0, waited_s - event.completion.timings.total_s),
                task=event.prompt.task,
                completion=event.completion.to_json(),
                decoded_with=event.info.method,
                version=event.info.version,
            )

    def _told(self, token: TokenLogprob) -> list[Any]:
        """A token's text or bytes, its log probability, and both of its alternatives."""
        top = [(self._piece_of(own), value) for own, value in token.top]
        return [self._piece_of(token.token_id), token.logprob, top]

    def end(self, error: BaseException | None = None) -> None:
        """Write why it failed, if it did."""
        super().end(error)
        if isinstance(error, NotFound | InvalidInput) and self._request.method is not None and error.param is None:
            error = InvalidInput(str(error), "method")  # the method cannot be used, or not with such a request
        if error is not None:
            self._wire.fail(self._number, error)


def _without_text(event: TextAdded | Generated) -> TextAdded | Generated:
    """Return an event with nothing but what it says of the prompt."""
    if isinstance(event, TextAdded):
        return replace(event, text="", n_tokens=0, logprobs=())
    done = replace(event.completion, token_ids=(), text="", finish_reason="length", first_tokens=0)
    return event._replace(completion=done)


class EngineJobs:
    """Runs the default queue's jobs of the model that an engine has loaded, one at a time, in the engine's turns.

    They need no Redis. Workers of this machine leave them alone for as long as this says so to the database.
    """

    def __init__(self, served: ServedModel, store: Store, runtime: Runtime, engine: LiveEngine) -> None:
        request = TuneRequest(served.path, "", dtype=served.dtype, device=served.device, speed=served.speed)
        self._name, self._store, self._engine = engine_lock(request), store, engine
        self._kept = KeptModel(request, runtime)
        self._others: set[str] = set()  # jobs that wait and are not for this engine
        worker = f"{socket.gethostname()}-{os.getpid()}-engine"
        self._context = WorkerContext(worker, store.url, "", DEFAULT_QUEUE, served.device, store.jobs.lease_s)
        self._ending, self._held = threading.Event(), -HOLD_S
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Have the job that runs handed back."""
        self._ending.set()

    def close(self) -> None:
        """Wait until it is, and leave the jobs to others."""
        self._thread.join(HAND_BACK_S)
        with suppress(StoreError):
            self._store.jobs.lock(self._name, self._context.name, 0.0)

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._hold()
                for delivery in self._due():
                    run_attempt(self._context, self._store, delivery, self._ending, self._kept, self._turn)
            except SwiftoptError as error:  # the database is away, or the job is
                logger.warning("engine=no look for jobs reason=%r", str(error))
            self._ending.wait(LOOK_S)

    def _due(self) -> Iterator[Delivery]:
        """Yield the attempts that wait for this model."""
        due = [each for each in self._store.jobs.due() if each.queue == DEFAULT_QUEUE]
        self._others &= {delivery.job for delivery in due}
        for delivery in due:
            if delivery.job not in self._others and not self._ending.is_set():
                if self._is_ours(self._store.jobs.get(delivery.job)):
                    yield delivery
                else:
                    self._others.add(delivery.job)

    def _is_ours(self, job: Job) -> bool:
        try:
            return job.kind == "tune" and self._kept.is_wanted_by(request_of(self._context, job.request))
        except InvalidInput:  # a worker's attempt says so
            return False

    def _hold(self) -> None:
        """Keep workers of this machine from the jobs; where no reconciler runs, do its part for lost ones."""
        if time.monotonic() - self._held >= HOLD_S / 3:
            self._held = time.monotonic()
            self._store.jobs.lock(self._name, self._context.name, HOLD_S)
            if self._store.jobs.lock("reconciler", self._context.name, HOLD_S / 2):
                self._store.jobs.expire()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with suppress(StoreError):
            self._hold()
        with ExitStack() as turn:
            try:
                turn.enter_context(self._engine.turn())
            except Cancelled:
                raise HandedBack from None
            yield


class EngineHost:
    """Serves one model to whoever writes the lines."""

    def __init__(self, served: ServedModel, wire: Wire) -> None:
        self._wire = wire

        def loading(step: str) -> None:
            wire.send(None, "loading", step=step)

        loading("reading its weights")
        self.model = models.load(served.path, served.dtype, served.device, loading, served.speed, served.db)
        self.traffic: Traffic | None = None
        runtime, store = self.model.runtime, self.model.store
        with suppress(InvalidInput):  # a request says it; read now, for the first grammar must not keep rounds waiting
            Session(runtime, Sampling(), 1, grammar=Grammar.json_object()).rule()
        if served.tune:
            self.traffic = Traffic(served.name, runtime, store, None, loading, lambda: self.engine.n_waiting > 0)
        self.engine = self.model.engine(served.concurrency, served.memory)
        self._jobs = EngineJobs(served, store, runtime, self.engine) if served.tune and store is not None else None
        self._tokens = Tokens(runtime.tokenizer)
        self._tickets: dict[int, _Sent] = {}
        self._kept: LineWriter | None = None
        if served.keep_prompts is not None:
            self._kept = LineWriter(Path(served.keep_prompts), what="prompts", option="--keep-prompts")

    def run(self, lines: Iterator[str]) -> None:
        """Obey line by line, until there are none."""
        runtime = self.model.runtime
        self._wire.send(
            None,
            "ready",
            max_positions=runtime.max_positions,
            fingerprint=runtime.info.fingerprint,
            exact=runtime.exact,
            device=machine_name(runtime),
            dtype=runtime.dtype_name,
            chats=bool(getattr(runtime.tokenizer, "chat_template", None)),
        )
        try:
            for line in lines:
                self._obey(json.loads(line))
        finally:
            if self._jobs is not None:
                self._jobs.end()
            self.engine.close()
            if self._jobs is not None:
                self._jobs.close()
            if self.traffic is not None:
                self.traffic.close()

    def _obey(self, asked: Mapping[str, Any]) -> None:
        number = asked["id"]
        try:
            match asked["op"]:
                case "decode":
                    self._decode(number, CompletionRequest.from_json(asked["request"]))
                case "cancel":
                    if (ticket := self._tickets.pop(number, None)) is not None:
                        ticket.cancel()
                case "tokenize":
                    _, prompt = session_of(self.model, CompletionRequest.from_json(asked["request"]))
                    self._wire.send(number, "tokens", token_ids=list(prompt.token_ids))
                case "detokenize":
                    check_vocabulary(asked["token_ids"], self.model.runtime, "tokens")
                    text = self.model.runtime.tokenizer.decode(asked["token_ids"])
                    self._wire.send(number, "detokenized", text=text)
                case "tuning":
                    steered = (asked.get("verb"), asked.get("task"), asked.get("way"))
                    self.engine.call(partial(self._tell_tuning, number, *steered))
        except Cancelled:  # the engine's thread has failed: a new process is what helps
            raise SystemExit(1) from None
        except Exception as error:
            self._wire.fail(number, error)

    def _tell_tuning(self, number: int, verb: TuningVerb | None, task: str | None, way: Way | None) -> None:
        """Obey a verb, if there is one, and say what is in use and being tried; in the engine's thread."""
        found = ModelTuning(paused=True)
        if self.traffic is not None:
            if verb is not None:
                self.traffic.steer(verb, task, way)
            found = self.traffic.status()
        self._wire.send(number, "tuning", **found.to_json())

    def _decode(self, number: int, request: CompletionRequest) -> None:
        self._tickets = {own: ticket for own, ticket in self._tickets.items() if not ticket.is_done}
        session, prompt = session_of(self.model, request)
        self._keep(number, request)
        ticket = self._tickets[number] = _Sent(self._wire, number, request, self._tokens.piece)
        options = {
            "salt": request.salt,
            "logprobs": request.logprobs,
            "prompt_logprobs": request.echo and request.logprobs is not None,
            "prediction": self._predicted(request.prediction),
        }
        if self.traffic is None or request.method is not None or request.version is not None:
            work = self.model.decoding(session, prompt, request.method, request.version, **options)
        else:
            work = self.traffic.work(session, prompt, request.task, request.learn, **options)
        self._tell_prompt(number, request, prompt.token_ids)
        self.engine.run(work, ticket)

    def _tell_prompt(self, number: int, request: CompletionRequest, token_ids: Sequence[int]) -> None:
        """Say how long the prompt is, before anything is decoded, and what it is where that is wanted."""
        told: dict[str, Any] = {}
        if request.echo:
            text = request.text or self.model.runtime.tokenizer.decode(token_ids)
            told = {"text": text, "first": self._tokens.piece(token_ids[0])}
        if request.messages and (end_of_thought := self._tokens.end_of_thought) is not None:
            told = {"end_of_thought": end_of_thought, "in_thought": self._tokens.ends_in_thought(token_ids)}
        self._wire.send(number, "prompt", n_tokens=len(token_ids), **told)

    def _keep(self, number: int, request: CompletionRequest) -> None:
        """Append the prompt to the file of prompts, if there is one; what no line of a stream can say is left out."""
        is_plain = all(set(each) == {"role", "content"} for each in request.messages)
        if self._kept is None or request.token_ids or request.tools or not is_plain:
            return
        task, text = request.task or DEFAULT_TASK, None if request.messages else request.text
        line = stream_lines([Prompt(f"{time.time_ns()}-{number}", task, text, tuple(request.messages))])
        try:
            parse_stream([line.encode()], "a prompt", task)
            self._kept.write(line.rstrip("\n"))
        except StreamError:
            return
        except OutputError as error:  # the client has asked for its answer, not for this
            logger.warning("prompt=not kept reason=%r", str(error))

    def _predicted(self, text: str) -> list[int]:
        tokenizer = self.model.runtime.tokenizer
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def session_of(model: Model, request: CompletionRequest) -> tuple[Session, Prompt]:
    """Return how a request is decoded, and its prompt as token ids.

    Raises: InvalidInput: the prompt cannot be encoded, or a field cannot be used. ContextOverflow: the prompt does not
            fit the model's context, or the completion behind it.
    """
    grammar = None
    if request.json_schema is not None:
        with about("json_schema"):
            grammar = Grammar.json_schema(request.json_schema)
    session = Session(
        model.runtime,
        request.sampling,
        1,
        request.stop,
        request.ignore_eos,
        request.stop_token_ids,
        request.min_new_tokens,
        grammar,
    )
    source = "messages" if request.messages else "text"
    with about(source):
        if request.token_ids:
            ids = list(request.token_ids)
            check_vocabulary(ids, model.runtime, source)
        elif request.messages:
            ids = session.encode_chat(request.messages, request.tools, **request.template)
        else:
            ids = session.encode_text(request.text)
        if not ids:
            raise InvalidInput("the prompt has no tokens: write at least one word")
    room = model.runtime.max_positions - len(ids)
    session.max_new_tokens = max(1, room if request.max_new_tokens is None else request.max_new_tokens)
    with about(source if room < 1 else "max_new_tokens"):
        model.runtime.check_context(len(ids), session.max_new_tokens)
    return session, Prompt("prompt", request.task or DEFAULT_TASK, token_ids=tuple(ids))


def check_vocabulary(token_ids: Sequence[int], runtime: Runtime, param: str) -> None:
    """Raises: InvalidInput: the model has no such token."""
    for token_id in token_ids:
        if not 0 <= token_id < runtime.vocab_size:
            words = f"there is no token {token_id}: this model has tokens 0 to {runtime.vocab_size - 1}, use those"
            raise InvalidInput(words, param)


@contextmanager
def about(param: str) -> Iterator[None]:
    """Let errors that name no field of the request name this one."""
    try:
        yield
    except InvalidInput as error:
        error.param = error.param or param
        raise


def main() -> None:
    """Serve the model that the first argument describes, until SIGTERM; what others print goes to standard error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    wire = Wire(out)
    try:
        host = EngineHost(ServedModel.from_json(json.loads(sys.argv[1])), wire)
    except SwiftoptError as error:
        wire.fail(None, error)
        sys.exit(2)
    host.run(iter(sys.stdin.readline, ""))
