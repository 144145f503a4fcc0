"""OpenAI's routes: chats and completions, whole or as streams, and the tokens of a text.

Every choice is a request of its own to the model's engine. An exchange turns the engine's events into pieces of text,
and a subclass per form says how pieces, ends and errors are told. Errors have OpenAI's form here. The header
`x-swiftopt-ignored` names the fields that nobody knows.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from fastapi import APIRouter, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import JSONResponse, Response

from ..core.errors import EngineGone, ServiceUnreachable, SwiftoptError
from ..core.requests import CompletionRequest, Piece
from .asked import AskedChat, AskedDetokenized, AskedText, AskedTokens, functions_of, plain_messages
from .choices import Choice, Told, by_name, named, speculative
from .engines import Events, next_event
from .middleware import too_many
from .problems import UnusableField, openai_error, status_of
from .state import Shared, State, sse

PING_S = 15
DONE = ServerSentEvent("[DONE]")
GONE = 499  # the client has closed the connection: nobody reads it

T = TypeVar("T")

router = APIRouter(tags=["completions"])


Pieces = AsyncGenerator[tuple[Choice, str]]  # text of a choice; a choice whose text is over is `done`


class Exchange(ABC):
    """A request of a client and what becomes of it; made, it has asked the engine for all choices.

    Raises: UnusableField: a field cannot be used. Refused: its caller has had its tokens of this minute. ModelNotFound,
            EngineGone, Busy: as the engines raise it.
    """

    WORD: ClassVar[str]  # with which ids begin
    SPLITS_THOUGHTS: ClassVar[bool] = False  # from what is said

    def __init__(self, app: State, request: Request, asked: AskedChat | AskedText) -> None:
        asked.check()
        caller = request.scope["state"]
        if wait_s := app.tokens.wait_s(caller["caller"]):
            raise too_many(f"{app.settings.tokens_per_min} tokens", wait_s)
        task = app.settings.keys.task(caller["key_owner"])
        requests = [
            replace(each, task=each.task or task)
            for each in asked.requests(caller["key_owner"] or "")  # prefixes are shared within a key
        ]
        self.asked, self._request, self._app, self._caller = asked, request, app, caller["caller"]
        self.engine, self._metrics = app.engines.find(asked.model), app.engines.metrics
        asked.check_places(len(requests), self.engine.n_places)
        self.ignored = asked.ignored
        self.id, self.created = f"{self.WORD}-{secrets.token_hex(12)}", int(time.time())
        self._until, self._events = time.monotonic() + app.settings.timeout_s, Events()
        self.choices: list[Choice] = []
        is_forced = isinstance(asked, AskedChat) and asked.tool_choice not in (None, "none", "auto")
        try:
            for i, own in enumerate(one for each in requests for one in _seeded(each, asked.n or 1)):
                reply = self.engine.ask("decode", self._events, request=own.to_json())
                names = [function["name"] for function in functions_of(own.tools)]
                self.choices.append(Choice(i, reply, names, is_forced, asked.most_calls))
        except SwiftoptError:
            self._close()
            raise

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the answer as one object, once all choices are done."""

    @abstractmethod
    def told(self, pieces: Pieces) -> AsyncGenerator[ServerSentEvent]:
        """Yield the events of a stream."""

    @abstractmethod
    def failed(self, error: dict[str, Any]) -> list[ServerSentEvent]:
        """Return the events that a stream ends with where the exchange fails."""

    async def answer(self) -> Response:
        """Answer with one object, or with a stream, whose status is that of its first event."""
        headers = {"x-request-id": self.id}
        if self.ignored:
            headers["x-swiftopt-ignored"] = ", ".join(self.ignored)[:500]
        if not self.asked.stream:
            found = await _unless_gone(self._request, self._collected())
            return Response(status_code=GONE) if found is None else JSONResponse(found, headers=headers)
        events = self._streamed()
        first = await _unless_gone(self._request, anext(events))
        if first is None:
            return Response(status_code=GONE)
        return EventSourceResponse(_behind(first, events), headers=headers, ping=PING_S, sep="\n")

    async def _collected(self) -> dict[str, Any]:
        try:
            async for _ in self._pieces():
                pass
            return self.whole()
        finally:
            self._close()

    async def _streamed(self) -> AsyncGenerator[ServerSentEvent]:
        """Yield the events of a stream; an error before the first of them is raised, a later one is told."""
        is_begun = False
        try:
            async with aclosing(self._pieces()) as pieces, aclosing(self.told(pieces)) as events:
                async for event in events:
                    is_begun = True
                    for choice in self.choices:
                        choice.reply.is_shown = True
                    yield event
        except SwiftoptError as error:
            if not is_begun:
                raise
            for event in self.failed(openai_error(status_of(error), str(error))):
                yield event
        finally:
            self._close()

    async def _pieces(self) -> Pieces:
        """Yield the text of all choices as it comes.

        Raises: ServiceUnreachable: it takes longer than the server lets it take. EngineGone: the engine died, and the
                client has seen text that another one may not repeat. SwiftoptError: as the engine says.
        """
        places = {choice.reply: i for i, choice in enumerate(self.choices)}
        while any(choice.done is None for choice in self.choices):
            try:
                reply, event = await next_event(self._events, self._until - time.monotonic())
            except TimeoutError:
                words = "the completion took longer than this server lets one take: ask for fewer tokens, or later"
                raise ServiceUnreachable(words) from None
            choice = self.choices[places[reply]]
            if event["event"] == "restarted":
                if reply.is_shown:  # by what was on its way when the engine died
                    raise EngineGone(f"the engine of {self.engine.served.name} died: ask again")
                self.choices[places[reply]] = choice.again()
                continue
            if event["event"] == "prompt":
                choice.begin(event, self.SPLITS_THOUGHTS)
                continue
            text = choice.add(event)
            if choice.done is not None:
                task = str(choice.done["task"])
                self._metrics.add(self.asked.model, task, choice.completion, choice.first_text_s, choice.waited_s)
            yield choice, text

    def _close(self) -> None:
        for choice in self.choices:
            self.engine.drop(choice.reply)
        self._app.tokens.spend(self._caller, self.usage()["total_tokens"])

    def usage(self) -> dict[str, Any]:
        """Count the tokens so far; a prompt of several choices counts once."""
        done = [choice.completion for choice in self.choices if choice.done is not None]
        n_prompt = sum(choice.n_prompt for choice in self.choices[:: self.asked.n or 1])
        n_tokens = sum(choice.n_tokens for choice in self.choices)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_tokens,
            "total_tokens": n_prompt + n_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(each.n_cached for each in done)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.n_thought for choice in self.choices),
                "accepted_prediction_tokens": sum(each.accepted_prediction for each in done),
                "rejected_prediction_tokens": sum(each.rejected_prediction for each in done),
            },
        }


def _seeded(request: CompletionRequest, n: int) -> Iterator[CompletionRequest]:
    """Yield a request per choice, each with a seed of its own."""
    for i in range(n):
        seed = (request.sampling.seed + i) % 2**62
        yield replace(request, sampling=replace(request.sampling, seed=seed)) if i else request


async def _unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """Return what the work gives; None, and the work is given up, where the client goes away meanwhile."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


async def _behind(first: T, rest: AsyncGenerator[T]) -> AsyncGenerator[T]:
    async with aclosing(rest):
        yield first
        async for each in rest:
            yield each


class ChatExchange(Exchange):
    """A chat, whose stream has chunks of the same form, and ends with `[DONE]`."""

    WORD = "chatcmpl"
    SPLITS_THOUGHTS = True
    OBJECTS = ("chat.completion", "chat.completion.chunk")  # a whole answer, and a chunk

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(choice, self._said(choice), choice.finish_reason) for choice in self.choices]
        if self.asked.return_token_ids:
            choices = [
                {**own, "token_ids": list(choice.completion.token_ids)}
                for own, choice in zip(choices, self.choices, strict=True)
            ]
        found = {**self._head(self.OBJECTS[0]), "choices": choices, "usage": self.usage(), **self._statistics()}
        return {**found, "system_fingerprint": (self.engine.about or {}).get("fingerprint")}

    async def told(self, pieces: Pieces) -> AsyncGenerator[ServerSentEvent]:
        opened: set[int] = set()
        async for choice, text in pieces:
            if choice.index not in opened:
                opened.add(choice.index)
                for own in self._opening(choice):
                    yield self._chunk(own)
            for said in self._pieces_of(choice, text):
                yield self._chunk(self._choice(choice, said))
            if choice.done is not None:
                yield self._chunk(self._choice(choice, self._last(), choice.finish_reason))
        options = self.asked.stream_options
        if options is not None and options.include_usage:
            yield sse({**self._head(self.OBJECTS[1]), "choices": [], "usage": self.usage(), **self._statistics()})
        yield DONE

    def failed(self, error: dict[str, Any]) -> list[ServerSentEvent]:
        return [sse(error), DONE]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.asked.model}

    def _choice(self, choice: Choice, said: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        """Return a choice, or a piece of it, with the log probabilities that were not handed on yet, if wanted."""
        logprobs = None
        if self.asked.n_logprobs is not None:
            told, choice.prompt_logprobs, choice.logprobs = choice.prompt_logprobs + choice.logprobs, [], []
            logprobs = self._logprobs(choice, told)
        return {"index": choice.index, **said, "finish_reason": finish_reason, "logprobs": logprobs}

    def _chunk(self, choice: Mapping[str, Any]) -> ServerSentEvent:
        options, usage = self.asked.stream_options, {}
        if options is not None and options.include_usage:
            usage = {"usage": self.usage() if options.continuous_usage_stats else None}
        return sse({**self._head(self.OBJECTS[1]), "choices": [choice], **usage})

    def _said(self, choice: Choice) -> dict[str, Any]:
        """Return what a whole choice says."""
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.thought:
            message |= {"reasoning_content": choice.thought}
        if choice.calls or choice.thought or choice.is_forced:
            message |= {"content": choice.text or None}
        if choice.calls:
            message |= {"tool_calls": choice.calls}
        return {"message": message}

    def _opening(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """Yield the piece that a choice begins with, if it has one."""
        delta = {"role": "assistant", "content": ""}
        yield {"index": choice.index, "delta": delta, "finish_reason": None, "logprobs": None}

    def _pieces_of(self, choice: Choice, text: str) -> Iterator[dict[str, Any]]:
        """Yield what is new of a choice: its thought, its text, and each call's name and arguments."""
        if thought := choice.thought[choice.n_told_thought :]:
            choice.n_told_thought += len(thought)
            yield {"delta": {"reasoning_content": thought}}
        if text:
            yield {"delta": {"content": text}}
        for i, call in enumerate(choice.calls[choice.n_told_calls :], start=choice.n_told_calls):
            name = {**call["function"], "arguments": ""}
            yield {"delta": {"tool_calls": [{"index": i, **call, "function": name}]}}
            arguments = {"arguments": call["function"]["arguments"]}
            yield {"delta": {"tool_calls": [{"index": i, "function": arguments}]}}
        choice.n_told_calls = len(choice.calls)

    def _last(self) -> dict[str, Any]:
        """Return what the last piece of a choice says."""
        return {"delta": {}}

    def _logprobs(self, choice: Choice, told: Sequence[Told]) -> dict[str, Any]:
        """Return the tokens' log probabilities in the form's words."""

        def of(piece: Piece, value: float) -> dict[str, Any]:
            token, own = named(piece)
            return {"token": token, "logprob": value, "bytes": own}

        content = [{**of(token, value), "top_logprobs": [of(*each) for each in top]} for token, value, top in told]
        return {"content": content, "refusal": None}

    def _statistics(self) -> dict[str, Any]:
        """Return statistics in vLLM's form, where they are wanted; null, as there, for several choices."""
        choice = self.choices[0]
        if not self.asked.return_metrics:
            return {}
        if len(self.choices) != 1 or choice.done is None:
            return {"metrics": None}
        done, seconds = choice.completion, choice.completion.timings.total_s
        decoding_ms = 1000 * (seconds - done.prefill_s)
        found = {
            "time_to_first_token_ms": round(1000 * done.prefill_s, 3),
            "generation_time_ms": round(decoding_ms, 3),
            "queue_time_ms": round(1000 * choice.done["queued_s"], 3),
            "mean_itl_ms": round(decoding_ms / (done.n_tokens - 1), 3) if done.n_tokens > 1 else None,
            "tokens_per_second": round(done.n_tokens / seconds, 3) if seconds else None,
            "speculative_decoding": speculative(done),
            "decoded_with": choice.done["decoded_with"],
            "plan_version": choice.done["version"],
        }
        return {"metrics": found}


class TextExchange(ChatExchange):
    """A completion of texts: the same in the older form."""

    WORD = "cmpl"
    OBJECTS = ("text_completion", "text_completion")

    def _said(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.prefix + choice.text}

    def _opening(self, choice: Choice) -> Iterator[dict[str, Any]]:
        if choice.prefix:
            own, choice.logprobs = choice.logprobs, []  # these come with their own text
            yield self._choice(choice, {"text": choice.prefix})
            choice.logprobs = own

    def _pieces_of(self, choice: Choice, text: str) -> Iterator[dict[str, Any]]:
        if text:
            yield {"text": text}

    def _last(self) -> dict[str, Any]:
        return {"text": ""}

    def _logprobs(self, choice: Choice, told: Sequence[Told]) -> dict[str, Any]:
        whole = choice.prefix + choice.text
        return {
            "tokens": [named(piece)[0] for piece, _, _ in told],
            "token_logprobs": [value for _, value, _ in told],
            "top_logprobs": [None if value is None else by_name(top) for _, value, top in told],
            "text_offset": [choice.offset(piece, whole) for piece, _, _ in told],
        }


@router.post("/v1/chat/completions", operation_id="chat_completion", response_class=Response)
async def chat_completions(app: Shared, request: Request, asked: AskedChat) -> Response:
    """Answer a chat, in OpenAI's form."""
    with asked.naming():
        return await ChatExchange(app, request, asked).answer()


@router.post("/v1/completions", operation_id="completion", response_class=Response)
async def completions(app: Shared, request: Request, asked: AskedText) -> Response:
    """Complete texts, in OpenAI's form."""
    with asked.naming():
        return await TextExchange(app, request, asked).answer()


@router.post("/tokenize", operation_id="tokenize", response_class=Response)
async def tokenize(app: Shared, asked: AskedTokens) -> Response:
    """The token ids of a prompt, as the model gets it."""
    if (asked.prompt is None) == (asked.messages is None):
        raise UnusableField("prompt", "give exactly one of prompt and messages")
    messages = plain_messages(asked.messages or ())
    request = CompletionRequest(text=asked.prompt or "", messages=messages, max_new_tokens=1)
    engine = app.engines.find(asked.model)
    ids = (await engine.tell("tokenize", request=request.to_json()))["token_ids"]
    assert engine.about is not None
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": engine.about["max_positions"]})


@router.post("/detokenize", operation_id="detokenize", response_class=Response)
async def detokenize(app: Shared, asked: AskedDetokenized) -> Response:
    """The text of token ids."""
    event = await app.engines.find(asked.model).tell("detokenize", token_ids=asked.tokens)
    return JSONResponse({"prompt": event["text"]})
