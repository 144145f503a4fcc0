"""One model's engine in its own process: it reads messages from standard input and answers on standard output.

Both are lines of `core/messages.py`. While nothing is decoded, the engine also runs queued jobs of its model.
`swiftopt serve` starts the process as `python -m swiftopt.worker.serving NAME LEVEL FORMAT`, with the log's level and
format.
"""

from __future__ import annotations

if __name__ == "__main__":
    from ..core import collector

    collector.start()

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..core import logs
from ..core.errors import (
    Conflict,
    ContextOverflow,
    InvalidInput,
    NotFound,
    OutputError,
    SettingsError,
    StreamError,
    SwiftoptError,
)
from ..core.events import ModelTuning
from ..core.messages import (
    AnswerDone,
    AnswerText,
    Cancel,
    Decode,
    Detokenize,
    Failed,
    FromEngine,
    FromServer,
    Keys,
    Loading,
    PieceLogprob,
    PromptRead,
    PromptTokens,
    Ready,
    Serve,
    Steer,
    Tokenize,
    TokensText,
    TuningNow,
    encode,
    from_server,
)
from ..core.requests import CompletionRequest, Piece, ServedModel
from ..core.streams import LineWriter, parse_stream, stream_lines
from ..core.threads import repeating
from ..core.types import DEFAULT_TASK, Prompt, Sampling, TokenLogprob
from ..decoding.corpus import BYTES_PER_TOKEN, Corpora
from ..decoding.events import Generated, Shown, TextAdded
from ..decoding.grammar import Grammar
from ..decoding.prefix_files import PrefixFolder
from ..decoding.session import MAX_CHARS_PER_TOKEN, Session
from ..decoding.template_inputs import template_inputs
from ..decoding.work import Work
from ..models.costs import machine_name
from ..models.measuring import measuring_turn
from ..models.runtime import Runtime
from ..tasks import model as models
from ..tasks.generate import decode_as_planned
from ..tasks.model import Ticket
from ..tasks.traffic import REFRESH_S, Traffic
from .attempt import EngineJobs
from .served_tokens import Tokens, check_vocabulary, prompt_field, session_of, token_ids_of

LEAST_LOGPROB = -9999.0  # Stands for minus infinity, as in OpenAI's API: JSON has no infinities.
LONG_LINE = 1 << 16  # Bytes beyond which a request is tokenized in another thread.

logger = logging.getLogger("swiftopt.worker.serving")  # Explicit, because __name__ is "__main__" in this process.


class MessageWriter:
    """Writes messages as lines; thread-safe."""

    def __init__(self, output: BinaryIO) -> None:
        self._out, self._lock = output, threading.Lock()

    def send(self, message: FromEngine) -> None:
        line = encode(message)
        with self._lock:
            self._out.write(line)
            self._out.flush()

    def fail(self, number: int | None, error: BaseException) -> None:
        """Report the failure of a request, or of the engine (None); unexpected errors are logged with a traceback."""
        if not isinstance(error, SwiftoptError):
            logger.error("completion=failed error=%s", type(error).__name__, exc_info=error)
            problem = f"the engine failed on this request ({type(error).__name__}): see its log"
            error = SwiftoptError(problem)
        self.send(Failed.of(number, error))


class SentCompletion(Ticket):
    """A request whose answer is sent to the server; a request that only reads its prompt sends no tokens.

    `on_end` is called with its last event, except for requests with a trace: the playground's are not counted.
    """

    def __init__(
        self,
        messages: MessageWriter,
        number: int,
        request: CompletionRequest,
        piece_of: Callable[[int], Piece],
        on_end: Callable[[Generated], None],
    ) -> None:
        super().__init__()
        self._asked_at, self._request_id = time.perf_counter(), logs.request_id.get()
        self._messages, self.number, self.request, self._piece_of = messages, number, request, piece_of
        self.counts, self._on_end = not request.trace, on_end

    def put(self, event: Shown) -> None:
        if self.request.max_new_tokens == 0:
            event = _without_text(event)
        if isinstance(event, TextAdded):
            self._messages.send(self._text(event))
            return
        if self.counts:
            self._on_end(event)
        waited_s = time.perf_counter() - self._asked_at
        completion, decoding = event.completion, event.info
        queued_s = max(0.0, waited_s - completion.timings.total_s)
        n_tokens = completion.n_prompt_tokens, completion.n_cached, completion.n_tokens
        logger.info(
            "completion=done task=%s method=%s prompt=%d cached=%d tokens=%d queued=%.3f s took=%.3f s",
            *(event.prompt.task, decoding.method, *n_tokens, queued_s, completion.timings.total_s),
        )
        decoded_with = decoding.method, decoding.version, decoding.why_plain, decoding.saved_s
        self._messages.send(
            AnswerDone(
                self.number, queued_s, event.prompt.task, completion, *decoded_with, decoding.verdict, decoding.rounds
            )
        )

    def _text(self, text_added: TextAdded) -> AnswerText:
        has_logprobs = self.request.logprobs is not None
        traced_tokens = text_added.traced if self.request.trace else ()
        return AnswerText(
            self.number,
            text_added.text,
            text_added.n_tokens,
            logprobs=tuple(map(self._logprob, text_added.logprobs)) if has_logprobs else (),
            prompt_logprobs=tuple(map(self._logprob, text_added.prompt_logprobs)) if has_logprobs else None,
            trace=tuple(
                (self._piece_of(token.token_id), token.source, tuple(map(self._piece_of, token.rejected)))
                for token in traced_tokens
            ),
        )

    def _logprob(self, token: TokenLogprob) -> PieceLogprob:
        """Return a token's text or bytes, its log probability, and both of its alternatives."""
        alternatives = tuple((self._piece_of(token_id), max(LEAST_LOGPROB, logprob)) for token_id, logprob in token.top)
        return self._piece_of(token.token_id), max(LEAST_LOGPROB, token.logprob), alternatives

    def end(self, error: BaseException | None = None) -> None:
        super().end(error)
        if isinstance(error, ContextOverflow):
            error.param = error.param or prompt_field(self.request)
        elif isinstance(error, NotFound | InvalidInput) and self.request.method is not None and error.param is None:
            error = InvalidInput(str(error), "method")  # The requested method cannot be used here or for this request.
        if error is not None:
            with logs.about_request(self._request_id):
                self._messages.fail(self.number, error)


def _without_text(event: TextAdded | Generated) -> TextAdded | Generated:
    """Return an event without its tokens; only its data about the prompt remains."""
    if isinstance(event, TextAdded):
        return replace(event, text="", n_tokens=0, logprobs=())
    completion = replace(event.completion, token_ids=(), text="", finish_reason="length", first_tokens=0)
    return event._replace(completion=completion)


def _not_counted(event: Generated) -> None:
    """Ignore an ended request: a model served without tuning keeps no figures per task."""


def corpora_of(model: ServedModel, runtime: Runtime) -> Corpora:
    """Return the corpora of a served model's answers.

    Raises: SettingsError: another server uses the folder. OutputError: it cannot be written to.
    """
    max_bytes, folder = model.corpus_mb << 20, None
    if model.keep_corpus is not None and max_bytes:
        from ..decoding.corpus_files import CorpusFolder

        folder = CorpusFolder(Path(model.keep_corpus), runtime.info.fingerprint, max_bytes // BYTES_PER_TOKEN)
    return Corpora(max_bytes, folder)


class EngineHost:
    """Serves one model to the process that writes the lines."""

    def __init__(self, model: ServedModel, messages: MessageWriter) -> None:
        self._messages = messages

        def loading(step: str) -> None:
            messages.send(Loading(step))

        self.traffic: Traffic | None = None
        on_cpu = model.device == "cpu" or not torch.cuda.is_available()
        # A server starts its models at the same time. Load one at a time, because reading weights would disturb another
        # model's cost measurement.
        with measuring_turn(torch.device("cpu"), loading) if on_cpu else nullcontext():
            loading("reading its weights")
            self.model = models.load(model.path, model.dtype, model.device, loading, model.speed, model.db)
            runtime, store = self.model.runtime, self.model.store
            if model.tune:
                corpora = corpora_of(model, runtime)
                self.traffic = Traffic(model.name, runtime, store, None, loading, self._has_waiting, corpora)
        # Compile a JSON grammar before the first request, because the first one is slow. Requests report errors.
        with suppress(InvalidInput):
            Session(runtime, Sampling(), 1, grammar=Grammar.json_object()).rule()
        self._folder = None
        if model.keep_prefixes is not None:
            self._folder = PrefixFolder(Path(model.keep_prefixes), runtime, int(1e9 * model.prefixes_gb))
        self.engine = self.model.engine(model.concurrency, model.memory, self._folder)
        self.model.turn = self.engine.turn
        self._jobs = EngineJobs(model, store, runtime, self.engine.turn) if model.tune and store is not None else None
        self._tokens = Tokens(runtime.tokenizer)
        self._tickets: dict[int, SentCompletion] = {}
        self._long_texts = ThreadPoolExecutor(1, "long")
        self._prompt_file: LineWriter | None = None
        self._prompt_file_lock = threading.Lock()
        if model.keep_prompts is not None:
            self._prompt_file = LineWriter(Path(model.keep_prompts), what="prompts", option="--keep-prompts")

    def run(self, lines: Iterator[bytes]) -> None:
        """Answer the lines of the input until it ends."""
        runtime = self.model.runtime
        self._messages.send(
            Ready(
                max_positions=runtime.max_positions,
                fingerprint=runtime.info.fingerprint,
                exact=runtime.exact,
                device=machine_name(runtime),
                dtype=runtime.dtype_name,
                template=template_inputs(runtime.tokenizer),
            )
        )
        # Traffic looks up its own plans. Do not wait for the database at the end.
        refresh = repeating(self._refresh_plans, REFRESH_S, "plans", join_s=0)
        try:
            with refresh if self.traffic is None else nullcontext():
                for line in lines:
                    if self.engine.is_closed:
                        # Exit when the engine's thread has failed: the server then starts a new process.
                        raise SystemExit(1)
                    message = from_server(line)
                    with logs.about_request(getattr(message, "request_id", "")):
                        self._handle(message, is_long=len(line) > LONG_LINE)
        finally:
            self._long_texts.shutdown(wait=False, cancel_futures=True)
            if self._jobs is not None:
                self._jobs.ending.set()
            self.engine.close()
            if self._jobs is not None:
                self._jobs.close()
            if self.traffic is not None:
                self.traffic.close()
            if self._folder is not None:
                self._folder.close()

    def _handle(self, message: FromServer, is_long: bool) -> None:
        match message:
            case Decode(request, number):
                self._tickets = {id: ticket for id, ticket in self._tickets.items() if not ticket.is_done}
                on_end = self.traffic.count if self.traffic is not None else _not_counted
                ticket = self._tickets[number] = SentCompletion(
                    self._messages, number, request, self._tokens.piece, on_end
                )
                self._read(number, is_long, partial(self._decode, ticket))
            case Cancel(number):
                if (cancelled := self._tickets.pop(number, None)) is not None:
                    cancelled.cancel()
            case Tokenize(request, number):
                self._read(number, is_long, partial(self._tokenize, number, request))
            case Detokenize(token_ids, number):
                self._read(number, is_long, partial(self._detokenize, number, token_ids))
            case Keys(names):
                self.engine.call(partial(self._forget_keys, frozenset(names)))
            case Steer(verb, _, _, number):
                if verb is not None and self.traffic is None:
                    problem = "this server does not learn: start it without --no-tune to control tuning"
                    self._messages.fail(number, Conflict(problem))
                else:
                    self.engine.call(partial(self._send_tuning, message))

    def _has_waiting(self) -> bool:
        return self.engine.n_waiting > 0

    def _forget_keys(self, names: frozenset[str]) -> None:
        """Delete everything kept for API keys other than these; runs in the engine's thread."""
        self.engine.forget_owners(lambda owner: owner not in names)
        if self.traffic is not None:
            self.traffic.corpora.forget_owners(lambda owner: owner not in names)

    def _read(self, number: int, is_long: bool, tokenize: Callable[[], None]) -> None:
        """Tokenize a text; long texts in sequence in a separate thread, so that other requests do not wait."""

        def tokenize_or_fail() -> None:
            try:
                tokenize()
            except Exception as error:
                self._messages.fail(number, error)
                if (ticket := self._tickets.get(number)) is not None:
                    ticket.end()

        if is_long:
            self._long_texts.submit(copy_context().run, tokenize_or_fail)
        else:
            tokenize_or_fail()

    def _tokenize(self, number: int, request: CompletionRequest) -> None:
        session = Session(self.model.runtime, request.sampling, 1)
        ids = token_ids_of(session, request)
        self._messages.send(PromptTokens(number, tuple(ids), session.runtime.max_positions))

    def _detokenize(self, number: int, token_ids: Sequence[int]) -> None:
        check_vocabulary(token_ids, self.model.runtime, "tokens")
        self._messages.send(TokensText(number, self.model.runtime.tokenizer.decode(token_ids)))

    def _refresh_plans(self) -> None:
        """Follow changes of the alias `best`; while the database is unreachable, keep the current plans."""
        with suppress(SwiftoptError):
            self.model.refresh_plans()

    def _send_tuning(self, steer: Steer) -> None:
        """Obey a verb, if any, and send the tuning status; runs in the engine's thread."""
        tuning = ModelTuning(paused=True)
        try:
            if self.traffic is not None:
                if steer.verb is not None:
                    self.traffic.steer(steer.verb, steer.task, steer.way)
                tuning = self.traffic.status()
            kept = self.engine.kept
            if self.traffic is not None:
                corpora = self.traffic.corpora
                kept = replace(kept, corpus_tokens=corpora.n_tokens, corpus_bytes=corpora.n_bytes)
            tuning = replace(tuning, kept=kept)
        except Exception as error:
            self._messages.fail(steer.id, error)
        else:
            self._messages.send(TuningNow(steer.id, tuning))

    def _decode(self, ticket: SentCompletion) -> None:
        request = ticket.request
        if self._is_cancelled(ticket):
            return
        session, prompt = session_of(self.model, request, self.engine.memory_tokens)
        self._keep(ticket.number, request)
        tokenizer = self.model.runtime.tokenizer
        prediction = request.prediction[: MAX_CHARS_PER_TOKEN * self.model.runtime.max_positions]
        options: dict[str, Any] = {
            "salt": request.salt,
            "logprobs": request.logprobs,
            "prompt_logprobs": request.echo and request.logprobs is not None,
            "prediction": list(tokenizer(prediction, add_special_tokens=False)["input_ids"]) if prediction else [],
        }
        self._send_prompt(ticket.number, request, prompt.token_ids)
        if self.traffic is None or request.method is not None or request.version is not None:
            run_planned = partial(self._run_planned, ticket, session, prompt, options)
            threading.Thread(target=copy_context().run, args=[run_planned], name="plan", daemon=True).start()
        else:
            options |= {"learn": request.learn, "counts": ticket.counts}
            self._run(ticket, self.traffic.work(session, prompt, request.task, **options))

    def _run_planned(
        self, ticket: SentCompletion, session: Session, prompt: Prompt, options: Mapping[str, Any]
    ) -> None:
        """Decode a request by its plan; look up and build the plan in a separate thread."""
        try:
            method_and_info = self.model.plan_for(prompt.task, ticket.request.method, ticket.request.version)
            self._run(ticket, decode_as_planned(session, method_and_info, prompt, **options))
        except Exception as error:
            ticket.end(error)

    def _run(self, ticket: SentCompletion, work: Work[None]) -> None:
        self.engine.run(work, ticket)
        # A cancellation may have arrived before the engine knew the request.
        if self._is_cancelled(ticket):
            ticket.cancel()

    def _is_cancelled(self, ticket: SentCompletion) -> bool:
        return self._tickets.get(ticket.number) is not ticket

    def _send_prompt(self, number: int, request: CompletionRequest, token_ids: Sequence[int]) -> None:
        """Send the prompt's length before decoding, with its text and open thought if the answer needs them."""
        prompt_read = PromptRead(number, len(token_ids))
        if request.echo:
            text = request.text or self.model.runtime.tokenizer.decode(token_ids)
            prompt_read = replace(prompt_read, text=text, first=self._tokens.piece(token_ids[0]))
        if request.messages:
            tokens = self._tokens
            prompt_read = replace(
                prompt_read,
                forms=tokens.forms,
                end_of_thought=tokens.end_of_thought,
                in_thought=tokens.ends_in_thought(token_ids),
                is_constrained=bool(request.forced) or request.json_schema is not None,
            )
        self._messages.send(prompt_read)

    def _keep(self, number: int, request: CompletionRequest) -> None:
        """Append the prompt to the file of prompts, if there is one and a stream's line can hold the prompt."""
        is_plain = all(set(message) == {"role", "content"} for message in request.messages)
        if self._prompt_file is None or request.token_ids or request.tools or not (is_plain and request.special_tokens):
            return
        task, text = request.task or DEFAULT_TASK, None if request.messages else request.text
        line = stream_lines([Prompt(f"{time.time_ns()}-{number}", task, text, tuple(request.messages))])
        try:
            parse_stream([line.encode()], "a prompt", task)
            with self._prompt_file_lock:
                self._prompt_file.write(line.rstrip("\n"))
        except StreamError:
            return
        except OutputError as error:
            # Only log the error: answers do not depend on the file of prompts.
            logger.warning("prompt=not kept reason=%r", str(error))


def main() -> None:
    """Serve the model that the first line describes, until SIGTERM; prints of other code go to standard error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    messages = MessageWriter(output)
    _, _, level, log_format = sys.argv
    logs.start("json" if log_format == "json" else "text", level)
    lines = iter(sys.stdin.buffer.readline, b"")
    try:
        match from_server(next(lines)):
            case Serve(model):
                host = EngineHost(model, messages)
            case message:
                raise SettingsError(f"the first message is {type(message).__name__}: the server begins with Serve")
    except SwiftoptError as error:
        messages.fail(None, error)
        sys.exit(2)
    host.run(lines)


if __name__ == "__main__":
    main()
