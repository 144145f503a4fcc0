"""OpenAI's routes: chats and completions, whole or as streams, and the tokens of a text.

Each choice is a separate request to the model's engine. An `Exchange` turns the engine's events into pieces of text.
Its subclasses turn these into answers, streams and errors in the form of each route. The header `x-swiftopt-ignored`
lists the request's fields without effect.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from fastapi import APIRouter, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import JSONResponse, Response

from ..core.errors import EngineGone, InvalidInput, ServiceUnreachable, SwiftoptError
from ..core.messages import (
    AnswerDone,
    AnswerText,
    Decode,
    Detokenize,
    PieceLogprob,
    PromptRead,
    PromptTokens,
    Question,
    Tokenize,
    TokensText,
)
from ..core.requests import CompletionRequest, Piece
from .choices import Choice, draft_statistics, logprob_by_name, token_name_and_bytes
from .engines import Answers, Restarted, next_answer
from .errors import answer_to, refused_by
from .middleware import Shared, State, sse
from .request_log import EndedRequest
from .schemas import AskedChat, AskedDetokenized, AskedText, AskedTokens, CommonFields
from .tracing import request_span
from .transport import await_unless_disconnected, prepend

PING_S = 15
LAST_EVENT = ServerSentEvent("[DONE]")
CLIENT_CLOSED_REQUEST = 499  # Status in the log when the client closed the connection early, as in nginx.

T = TypeVar("T")
Pieces = AsyncGenerator[tuple[Choice, str]]  # (choice, its new text); `choice.done` is set with the last text.

router = APIRouter(tags=["completions"])


class Exchange(ABC):
    """A client's request and its answer. Each choice is sent to the engine as a request.

    Raises: InvalidInput: a field cannot be used. Refused: the caller has no tokens left in this minute.
            ModelNotFound: the model is not served.
    """

    ID_PREFIX: ClassVar[str]  # Prefix of response ids.
    OPERATION: ClassVar = "chat"  # Name of the operation in traces.

    def __init__(self, app: State, http_request: Request, body: AskedChat | AskedText) -> None:
        body.check()
        scope_state = http_request.scope["state"]
        app.tokens.check(scope_state["caller"], "tokens")
        self._key_owner: str | None = scope_state["key_owner"]
        api_key = app.settings.keys.find(self._key_owner)
        # Salt of cached prefixes: they are shared only among requests with the same API key.
        salt = self._key_owner or ""
        self._requests = [
            replace(request, task=request.task or (api_key and api_key.task)) for request in body.requests(salt)
        ]
        self.client_body: CommonFields = body
        self.body, self._request, self._app, self._caller = body, http_request, app, scope_state["caller"]
        self.engine, self._metrics = app.engines.find(body.model), app.engines.metrics
        self._check_places(len(self._requests))
        self.id, self.created = f"{self.ID_PREFIX}-{secrets.token_hex(12)}", int(time.time())
        self._arrived_s = time.monotonic()
        self._deadline_s, self._answers = self._arrived_s + app.settings.timeout_s, Answers()
        self.choices: list[Choice] = []
        self._is_begun = False  # Set once a part of the stream was sent.

    def _check_places(self, n_prompts: int) -> None:
        """Raise InvalidInput for more completions than the engine has places."""
        n_completions, n_choices = n_prompts * (self.body.n or 1), self.body.n or 1
        if n_completions > self.engine.n_places:
            limit = f"this server accepts at most {self.engine.n_places} at a time"
            problem = f"{n_completions} completions are requested, but {limit}"
            raise InvalidInput(f"{problem}: request fewer", "n" if n_choices > 1 else "prompt")

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the answer as one object, once all choices are done."""

    @abstractmethod
    def stream(self, pieces: Pieces) -> AsyncGenerator[ServerSentEvent]:
        """Yield the events of a stream."""

    @abstractmethod
    def error_events(self, error: dict[str, Any]) -> list[ServerSentEvent]:
        """Return the last events of a stream that fails."""

    def ignored(self) -> list[str]:
        """Return the places of the request's fields without effect; complete once the model is loaded."""
        return [*self.body.ignored, *self.engine.unread(self.body)]

    async def answer(self) -> Response:
        """Answer with one object or a stream. An error before a stream's first event sets the HTTP status."""
        events = self._events_of_stream()
        first_output: Awaitable[Any] = anext(events) if self.body.stream else self._collect_answer()
        output = await await_unless_disconnected(self._request, first_output)
        if output is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        headers = ignored_header(self.ignored())
        if not self.body.stream:
            return JSONResponse(output, headers=headers)
        return EventSourceResponse(
            prepend(output, events),
            headers=headers,
            ping=PING_S,
            sep="\n",
            shutdown_grace_period=math.inf,  # No limit here: the server aborts streams itself at shutdown.
        )

    async def _ask(self) -> None:
        """Send all choices to the engine, once the model is loaded.

        Raises: EngineGone, Busy: as the engine raises it.
        """
        remaining_s = self._deadline_s - time.monotonic()
        await self.engine.until_loaded(min(self._app.settings.load_wait_s, remaining_s))
        body = self.body
        must_call, most_calls = (body.must_call, body.most_calls) if isinstance(body, AskedChat) else (False, None)
        seeded = (choice for request in self._requests for choice in _with_seeds(request, body.n or 1))
        for i, request in enumerate(seeded):
            reply = self.engine.ask(Decode(request), self._answers)
            functions = [tool["function"] for tool in request.tools]
            schemas = {function["name"]: function.get("parameters") for function in functions}
            self.choices.append(Choice(i, reply, schemas, must_call, most_calls))

    async def _collect_answer(self) -> dict[str, Any]:
        with self._closing():
            await self._ask()
            async for _ in self._pieces():
                pass
            return self.whole()

    async def _events_of_stream(self) -> AsyncGenerator[ServerSentEvent]:
        """Yield the events of a stream. An error before the first event is raised; a later one ends the stream."""
        try:
            with self._closing():
                await self._ask()
                async with aclosing(self._pieces()) as pieces, aclosing(self.stream(pieces)) as events:
                    async for event in events:
                        self._is_begun = True
                        for choice in self.choices:
                            choice.reply.is_shown = True
                        yield event
        except SwiftoptError as error:
            if not self._is_begun:
                raise
            self.client_body.name(error)
            for event in self.error_events(refused_by(error).openai()):
                yield event

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Free the engine's places at the end. Count server errors, and all errors after a stream has begun."""
        try:
            with request_span(self._app.traces, self.OPERATION, self.body.model, self.choices):
                yield
        except SwiftoptError as error:
            if self._is_begun or answer_to(error)[0] >= 500:
                self._count_failed(str(error))
            raise
        finally:
            self._close()

    async def _pieces(self) -> Pieces:
        """Yield the text of all choices as it arrives.

        Raises: ServiceUnreachable: the server's time limit is exceeded. EngineGone: the engine died after the client
                had received text, which a restart might not repeat. SwiftoptError: an error of the engine.
        """
        index_by_reply = {choice.reply: i for i, choice in enumerate(self.choices)}
        while any(choice.done is None for choice in self.choices):
            try:
                reply, answer = await next_answer(self._answers, self._deadline_s - time.monotonic())
            except TimeoutError:
                problem = "the completion exceeded the server's time limit: request fewer tokens, or try later"
                raise ServiceUnreachable(problem) from None
            choice = self.choices[index_by_reply[reply]]
            match answer:
                case Restarted():
                    # Text may have been sent to the client already, so the request cannot restart.
                    if reply.is_shown:
                        raise EngineGone(f"the engine of {self.engine.served.name} died: send the request again")
                    self.choices[index_by_reply[reply]] = choice.fresh_copy()
                case PromptRead():
                    choice.begin(answer)
                case AnswerText():
                    yield choice, choice.add(answer)
                case AnswerDone():
                    text = choice.add(answer)
                    self._count(choice, answer)
                    yield choice, text

    def _count(self, choice: Choice, done: AnswerDone) -> None:
        """Count a finished choice, and keep its figures."""
        request, is_single = choice.reply.question, len(self.choices) == 1
        assert isinstance(request, Decode)
        id, keeps_texts = self.id if is_single else f"{self.id}-{choice.index}", bool(self.engine.served.keep_prompts)
        waits_s, owner = (choice.first_text_s, choice.waited_s), self._key_owner
        ended = EndedRequest.of(id, self.body.model, request.request, done, waits_s, owner, keeps_texts)
        self._metrics.add(ended.model, ended.task, ended.sums, ended.total_s, done.completion.finish_reason)
        self._app.engines.requests.add(ended)

    def _count_failed(self, error: str) -> None:
        """Count the unfinished choices as failed; one entry in the list of requests gives the reason for all."""
        n_open = sum(choice.done is None for choice in self.choices) if self.choices else len(self._requests)
        self._metrics.fail(self.body.model, n_open)
        total_s = time.monotonic() - self._arrived_s
        failed = EndedRequest.failed(self.id, self.body.model, self._requests[0], error, total_s, self._key_owner)
        self._app.engines.requests.add(failed)

    def explanation(self) -> dict[str, Any]:
        """Return the answer's field that states how it was decoded; {} if the server omits it.

        With several choices it describes the first; only `exact` covers all.
        """
        done = self.choices[0].done
        if not self._app.settings.explains or done is None:
            return {}
        explanation = {
            "exact": all(choice.completion.exact for choice in self.choices),
            "task": done.task,
            "method": done.decoded_with,
            "plan": None if done.version is None else {"task": done.task, "version": done.version},
            "why_plain": None if done.why_plain is None else done.why_plain.to_json(),
        }
        return {"swiftopt": explanation}

    def _close(self) -> None:
        for choice in self.choices:
            self.engine.drop(choice.reply)
        tokens = self.usage()
        self._app.tokens.spend(self._caller, tokens["total_tokens"])
        if self.choices:
            saved_s = sum(choice.done.saved_s for choice in self.choices if choice.done is not None)
            self._app.usage.add(self._key_owner, self.body.model, tokens, saved_s)

    def usage(self) -> dict[str, Any]:
        """Return the tokens so far in OpenAI's form; a prompt shared by several choices counts once."""
        completions, first_choices = [choice.completion for choice in self.choices], self.choices[:: self.body.n or 1]
        n_prompt = sum(choice.n_prompt for choice in first_choices)
        n_tokens = sum(choice.n_tokens for choice in self.choices)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_tokens,
            "total_tokens": n_prompt + n_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.completion.n_cached for choice in first_choices)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.n_thought for choice in self.choices),
                "accepted_prediction_tokens": sum(completion.accepted_prediction for completion in completions),
                "rejected_prediction_tokens": sum(completion.rejected_prediction for completion in completions),
            },
        }


def ignored_header(fields: Sequence[str]) -> dict[str, str]:
    """Return the header that lists a request's fields without effect, in ASCII."""
    names = [json.dumps(field)[1:-1] for field in fields]
    return {"x-swiftopt-ignored": ", ".join(names)[:500]} if names else {}


def _with_seeds(request: CompletionRequest, n: int) -> Iterator[CompletionRequest]:
    """Yield a request per choice, each with its own seed."""
    for i in range(n):
        seed = (request.sampling.seed + i) % 2**62
        yield replace(request, sampling=replace(request.sampling, seed=seed)) if i else request


class ChatExchange(Exchange):
    """A chat. Its stream has chunks of the same form, and ends with `[DONE]`."""

    ID_PREFIX = "chatcmpl"
    # `object` of a whole answer and of a stream's chunk.
    OBJECTS: ClassVar = ("chat.completion", "chat.completion.chunk")

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(choice, self._content(choice), choice.finish_reason) for choice in self.choices]
        if self.body.return_token_ids:
            for choice_object, choice in zip(choices, self.choices, strict=True):
                choice_object["token_ids"] = list(choice.completion.token_ids)
        answer = {**self._head(self.OBJECTS[0]), "choices": choices, "usage": self.usage(), **self._statistics()}
        answer |= self.explanation()
        return {**answer, "system_fingerprint": self.engine.about and self.engine.about.fingerprint}

    async def stream(self, pieces: Pieces) -> AsyncGenerator[ServerSentEvent]:
        opened: set[int] = set()
        has_usage = self.body.stream_options is not None and bool(self.body.stream_options.include_usage)
        async for choice, text in pieces:
            if choice.index not in opened:
                opened.add(choice.index)
                for delta in self._opening_deltas(choice):
                    yield self._chunk(delta)
            for content in self._deltas(choice, text):
                yield self._chunk(self._choice(choice, content))
            if choice.done is not None:
                is_last = not has_usage and all(other.done is not None for other in self.choices)
                content = self._choice(choice, self._last_delta(), choice.finish_reason)
                yield self._chunk(content, self.explanation() if is_last else {})
        if has_usage:
            figures = {"usage": self.usage(), **self._statistics(), **self.explanation()}
            yield sse({**self._head(self.OBJECTS[1]), "choices": [], **figures})
        yield LAST_EVENT

    def error_events(self, error: dict[str, Any]) -> list[ServerSentEvent]:
        return [sse(error), LAST_EVENT]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.body.model}

    def _choice(self, choice: Choice, content: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        """Return a choice or a delta of it, with unsent log probabilities if the client asked for them."""
        logprobs = None
        if self.body.n_logprobs is not None:
            logprobs = self._logprobs(choice, choice.prompt_logprobs + choice.logprobs)
            choice.prompt_logprobs, choice.logprobs = [], []
        return {"index": choice.index, **content, "finish_reason": finish_reason, "logprobs": logprobs}

    def _chunk(self, choice: Mapping[str, Any], extra: Mapping[str, Any] = {}) -> ServerSentEvent:
        options, usage = self.body.stream_options, {}
        if options is not None and options.include_usage:
            usage = {"usage": self.usage() if options.continuous_usage_stats else None}
        return sse({**self._head(self.OBJECTS[1]), "choices": [choice], **usage, **extra})

    def _content(self, choice: Choice) -> dict[str, Any]:
        """Return the message of a whole choice."""
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.thought:
            message |= {"reasoning_content": choice.thought}
        if choice.calls or choice.thought or choice.is_forced:
            message |= {"content": choice.text or None}
        if choice.calls:
            message |= {"tool_calls": choice.calls}
        return {"message": message}

    def _opening_deltas(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """Yield the first delta of a choice, if it has one."""
        delta = {"role": "assistant", "content": ""}
        yield {"index": choice.index, "delta": delta, "finish_reason": None, "logprobs": None}

    def _deltas(self, choice: Choice, text: str) -> Iterator[dict[str, Any]]:
        """Yield the new parts of a choice: its thought, its text, and each call's name and arguments."""
        if thought := choice.thought[choice.n_sent_thought :]:
            choice.n_sent_thought += len(thought)
            yield {"delta": {"reasoning_content": thought}}
        if text:
            yield {"delta": {"content": text}}
        for i, call in enumerate(choice.calls[choice.n_sent_calls :], start=choice.n_sent_calls):
            name = {**call["function"], "arguments": ""}
            yield {"delta": {"tool_calls": [{"index": i, **call, "function": name}]}}
            arguments = {"arguments": call["function"]["arguments"]}
            yield {"delta": {"tool_calls": [{"index": i, "function": arguments}]}}
        choice.n_sent_calls = len(choice.calls)

    def _last_delta(self) -> dict[str, Any]:
        """Return the content of a choice's last delta."""
        return {"delta": {}}

    def _logprobs(self, choice: Choice, tokens: Sequence[PieceLogprob]) -> dict[str, Any]:
        """Return the tokens' log probabilities in the form of the route."""

        def of(token: Piece, logprob: float | None) -> dict[str, Any]:
            name, as_bytes = token_name_and_bytes(token)
            return {"token": name, "logprob": logprob, "bytes": as_bytes}

        content = [
            {**of(token, logprob), "top_logprobs": [of(*alternative) for alternative in alternatives]}
            for token, logprob, alternatives in tokens
        ]
        return {"content": content, "refusal": None}

    def _statistics(self) -> dict[str, Any]:
        """Return the requested statistics in vLLM's form; null for several choices, as in vLLM."""
        choice = self.choices[0]
        if not self.body.return_metrics:
            return {}
        if len(self.choices) != 1 or choice.done is None:
            return {"metrics": None}
        completion, total_s = choice.completion, choice.completion.timings.total_s
        decoding_ms = 1000 * (total_s - completion.prefill_s)
        metrics = {
            "time_to_first_token_ms": round(1000 * completion.prefill_s, 3),
            "generation_time_ms": round(decoding_ms, 3),
            "queue_time_ms": round(1000 * choice.done.queued_s, 3),
            "mean_itl_ms": round(decoding_ms / (completion.n_tokens - 1), 3) if completion.n_tokens > 1 else None,
            "tokens_per_second": round(completion.n_tokens / total_s, 3) if total_s else None,
            "speculative_decoding": draft_statistics(completion),
            "decoded_with": choice.done.decoded_with,
            "plan_version": choice.done.version,
        }
        return {"metrics": metrics}


class TextExchange(ChatExchange):
    """A completion of texts, in OpenAI's older form."""

    ID_PREFIX = "cmpl"
    OPERATION = "text_completion"
    OBJECTS = ("text_completion", "text_completion")

    def _content(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.prefix + choice.text}

    def _opening_deltas(self, choice: Choice) -> Iterator[dict[str, Any]]:
        if choice.prefix:
            # Hold the log probabilities back: they belong to the text that follows.
            logprobs, choice.logprobs = choice.logprobs, []
            yield self._choice(choice, {"text": choice.prefix})
            choice.logprobs = logprobs

    def _deltas(self, choice: Choice, text: str) -> Iterator[dict[str, Any]]:
        if text:
            yield {"text": text}

    def _last_delta(self) -> dict[str, Any]:
        return {"text": ""}

    def _logprobs(self, choice: Choice, tokens: Sequence[PieceLogprob]) -> dict[str, Any]:
        full_text = choice.prefix + choice.text
        return {
            "tokens": [token_name_and_bytes(token)[0] for token, _, _ in tokens],
            "token_logprobs": [logprob for _, logprob, _ in tokens],
            "top_logprobs": [
                None if logprob is None else logprob_by_name(alternatives) for _, logprob, alternatives in tokens
            ],
            "text_offset": [choice.offset(token, full_text) for token, _, _ in tokens],
        }


@router.post("/v1/chat/completions", operation_id="chat_completion", response_class=Response)
async def chat_completions(app: Shared, request: Request, body: AskedChat) -> Response:
    """Answer a chat in OpenAI's form."""
    with body.naming():
        return await ChatExchange(app, request, body).answer()


@router.post("/v1/completions", operation_id="completion", response_class=Response)
async def completions(app: Shared, request: Request, body: AskedText) -> Response:
    """Complete texts in OpenAI's form."""
    with body.naming():
        return await TextExchange(app, request, body).answer()


@router.post("/tokenize", operation_id="tokenize", response_class=Response)
async def tokenize(app: Shared, request: Request, body: AskedTokens) -> Response:
    """Token ids of the prompt of the chat or the completion with this body."""
    with body.naming():
        body.check()
        prompt, *further_prompts = body.requests("")
        if further_prompts:
            raise InvalidInput(f"prompt has {1 + len(further_prompts)} prompts: send one at a time", "prompt")
        prompt_tokens = await _call_engine(app, request, body.model, Tokenize(prompt), PromptTokens)
    if prompt_tokens is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    values = {
        "tokens": prompt_tokens.token_ids,
        "count": len(prompt_tokens.token_ids),
        "max_model_len": prompt_tokens.max_positions,
    }
    fields = dict.fromkeys([*body.ignored, *body.beside_prompt, *app.engines.find(body.model).unread(body)])
    return JSONResponse(values, headers=ignored_header(list(fields)))


@router.post("/detokenize", operation_id="detokenize", response_class=Response)
async def detokenize(app: Shared, request: Request, body: AskedDetokenized) -> Response:
    """Text of token ids."""
    tokens_text = await _call_engine(app, request, body.model, Detokenize(tuple(body.tokens)), TokensText)
    if tokens_text is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse({"prompt": tokens_text.text}, headers=ignored_header(body.ignored))


async def _call_engine(app: State, request: Request, model: str, question: Question, kind: type[T]) -> T | None:
    """Return the model's answer to a question, once it is loaded; None: the client has disconnected."""
    engine = app.engines.find(model)

    async def call() -> T:
        await engine.until_loaded(app.settings.load_wait_s)
        return await engine.call(question, kind)

    return await await_unless_disconnected(request, call())
