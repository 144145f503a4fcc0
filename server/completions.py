"""OpenAI's routes: chats and completions, whole or as streams, and the tokens of a text.

Every choice is a request of its own to the model's engine; this process checks fields, and turns events into OpenAI's
objects. Errors have OpenAI's form here. Fields that nobody knows are ignored, and the header `x-swiftopt-ignored` names
them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import JSONResponse, Response

from ..core.errors import ServiceUnreachable, SwiftoptError
from ..core.requests import CompletionRequest
from ..core.types import Completion, Sampling
from .engines import EngineProcess, Engines, Reply
from .problems import UnusableField, openai_error, status_of
from .schemas import Task
from .state import Shared, State, engines_of
from .tools import ToolText, call_schema, names_of

MOST_CHOICES = 128
MOST_LOGPROBS = 20
TEXT_TOKENS = 16  # of a completion of text whose length nobody names
RESERVED = frozenset(  # arguments of the tokenizer, which are not the template's
    [
        *("conversation", "tools", "documents", "chat_template", "tokenize", "return_dict", "return_tensors"),
        *("return_assistant_tokens_mask", "padding", "truncation", "max_length", "tokenizer_kwargs"),
    ]
)
PING_S = 15
GONE = 499  # the client has closed the connection: nobody reads it

T = TypeVar("T")

router = APIRouter(tags=["completions"])


class Options(BaseModel):
    """Our own part of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task: Task | None = None
    method: str | None = None
    plan: Literal["best", "plain"] = "best"


class StreamOptions(BaseModel):
    """What a stream tells beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(BaseModel):
    """A schema by name, as OpenAI wraps it."""

    model_config = ConfigDict(extra="allow")

    name: str = ""
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(BaseModel):
    """What the text is to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_of_text(self) -> dict[str, Any] | None:
        """The JSON schema that the text keeps to.

        Raises: UnusableField: it is missing.
        """
        if self.type == "json_object":
            return {"type": "object"}
        if self.type == "json_schema" and self.json_schema is None:
            raise UnusableField(
                "response_format.json_schema", "response_format.json_schema is missing: give the schema"
            )
        return None if self.json_schema is None or self.type == "text" else self.json_schema.schema_


class Prediction(BaseModel):
    """Text that the completion is expected to repeat: it drafts."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class Asked(BaseModel):
    """The fields that chats and completions share."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    UNSUPPORTED: ClassVar[tuple[str, ...]] = ("best_of", "suffix", "audio", "modalities", "web_search_options")

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[int, float] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    min_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: str | None = Field(default=None, max_length=128)
    return_metrics: bool = False
    swiftopt: Options = Field(default_factory=Options)

    def check(self) -> None:
        """Raises: UnusableField: a field is known and has no effect here."""
        for name in self.UNSUPPORTED:
            if (self.model_extra or {}).get(name) is not None:
                raise UnusableField(name, f"{name} is not supported: leave it out")
        if self.stream_options is not None and not self.stream:
            raise UnusableField("stream_options", "stream_options needs stream: set stream to true, or leave it out")

    @property
    def n_logprobs(self) -> int | None:
        """Alternatives of each token whose log probabilities are wanted; None: none are."""
        return None

    @property
    def ignored(self) -> list[str]:
        """Fields that nobody knows."""
        return sorted(self.model_extra or {})

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(self) -> Sampling:
        """How tokens are drawn; OpenAI's default is the distribution itself, with a seed that nobody chose."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((self.logit_bias or {}).items()),
            seed=secrets.randbits(62) if self.seed is None else self.seed,
        )

    def common(self, salt: str) -> CompletionRequest:
        """The request without its prompt."""
        return CompletionRequest(
            task=self.swiftopt.task,
            method="plain" if self.swiftopt.plan == "plain" else self.swiftopt.method,
            max_new_tokens=self.max_tokens,
            sampling=self.sampling(),
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids),
            min_new_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=self.n_logprobs,
            json_schema=None if self.response_format is None else self.response_format.schema_of_text(),
            prediction="" if self.prediction is None else joined(self.prediction.content, "prediction.content"),
            salt=f"{salt}:{self.cache_salt or ''}",
        )


class Message(BaseModel):
    """One message of a chat; parts of text are joined."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def plain(self, place: str) -> dict[str, Any]:
        """The message as templates read it."""
        more = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        return {"role": self.role, "content": joined(self.content or "", place), **more}


def joined(content: str | Sequence[Mapping[str, Any]], place: str) -> str:
    """The text of a content.

    Raises: UnusableField: a part of it is no text.
    """
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UnusableField(place, f"{place}: only parts of type text are supported here")
    return "".join(part["text"] for part in content)


class NamedTool(BaseModel):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: dict[str, Any]


class AskedChat(Asked):
    """A chat."""

    UNSUPPORTED = (*Asked.UNSUPPORTED, "functions", "function_call")

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise UnusableField("top_logprobs", "top_logprobs needs logprobs: set logprobs to true, or leave it out")

    @property
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def requests(self, salt: str) -> list[CompletionRequest]:
        """The one prompt."""
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise UnusableField(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other: choose one",
            )
        template = {**self.chat_template_kwargs}
        for name in sorted(RESERVED & set(template)):
            place = f"chat_template_kwargs.{name}"
            raise UnusableField(place, f"{place} is no value of a template: leave it out")
        if self.continue_final_message:
            template |= {"continue_final_message": True, "add_generation_prompt": False}
        elif not self.add_generation_prompt:
            template["add_generation_prompt"] = False
        schema = self._forced_call()
        if schema is not None and self.response_format is not None and self.response_format.type != "text":
            raise UnusableField("tool_choice", "tool_choice that forces a call and response_format exclude each other")
        common = self.common(salt)
        messages = tuple(each.plain(f"messages[{i}].content") for i, each in enumerate(self.messages))
        request = replace(
            common,
            json_schema=schema or common.json_schema,
            messages=messages,
            tools=tuple(self.tools or ()) if self.tool_choice != "none" else (),
            template=template,
            max_new_tokens=self.max_completion_tokens or self.max_tokens,
        )
        return [request]

    def _forced_call(self) -> dict[str, Any] | None:
        """The schema of the call that must be made; None: none must be.

        Raises: UnusableField: there is no such tool.
        """
        if self.tool_choice in (None, "none", "auto"):
            return None
        wanted = self.tool_choice.function.get("name") if isinstance(self.tool_choice, NamedTool) else None
        functions = [each.get("function", {}) for each in self.tools or ()]
        calls = [call_schema(each) for each in functions if wanted is None or each.get("name") == wanted]
        if not calls:
            words = "a tool is to be called, but none is given" if wanted is None else f"there is no tool {wanted!r}"
            raise UnusableField("tool_choice", f"{words}: add it to tools, or leave tool_choice out")
        return {"anyOf": calls}


class AskedText(Asked):
    """A completion of texts, or of token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs

    def requests(self, salt: str) -> list[CompletionRequest]:
        """A request per prompt."""
        is_one = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        prompts: Any = [self.prompt] if is_one else self.prompt
        if not prompts:
            raise UnusableField("prompt", "prompt is an empty list: give at least one prompt")
        common = replace(self.common(salt), max_new_tokens=self.max_tokens or TEXT_TOKENS, echo=self.echo)
        return [
            replace(common, text=each) if isinstance(each, str) else replace(common, token_ids=tuple(each))
            for each in prompts
        ]


Told = list[Any]  # a token's text, its log probability (None: it has none), and both of its alternatives


def _logprob(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


@dataclass(slots=True)
class Choice:
    """One completion of an answer as it grows."""

    index: int
    reply: Reply
    prefix: str = ""  # the prompt, where it is echoed
    first: str = ""  # its first token, which has no log probability
    text: str = ""
    n_tokens: int = 0
    first_text_s: float = 0.0  # that its client has waited for its first text
    tools: ToolText | None = None  # where it may call some
    done: dict[str, Any] | None = None  # the engine's last event
    completion: Completion = field(default_factory=lambda: Completion((), "", "length", ""))  # what it came to, then
    logprobs: list[Told] = field(default_factory=list)  # of the tokens whose text was not handed on yet
    n_characters: int = 0  # of the tokens that were, for their offsets

    @property
    def waited_s(self) -> float:
        """Seconds since it was asked for."""
        return time.perf_counter() - self.reply.asked_at

    def add(self, event: Mapping[str, Any]) -> str:
        """Take a piece of text in; returns what of it can be shown."""
        if not self.n_tokens:
            self.first_text_s = self.waited_s
        self.n_tokens += event["n_tokens"]
        if of_prompt := event.get("prompt_logprobs"):
            self.logprobs += [[self.first, None, []], *of_prompt]
        self.logprobs += event.get("logprobs", ())
        return self._show(event["text"] if self.tools is None else self.tools.add(event["text"]))

    def end(self, event: dict[str, Any]) -> str:
        """Take the end in; returns the rest of the text."""
        self.done, self.completion = event, Completion.from_json(event["completion"])
        if not self.n_tokens:  # it has no text
            self.first_text_s = self.waited_s
        self.n_tokens = self.completion.n_tokens
        return self._show("" if self.tools is None else self.tools.end())

    def chat_logprobs(self) -> dict[str, Any]:
        """Those that are waiting, in the form of chats."""
        waiting, self.logprobs = self.logprobs, []
        content = [
            {**_logprob(token, value), "top_logprobs": [_logprob(*each) for each in top]}
            for token, value, top in waiting
        ]
        return {"content": content, "refusal": None}

    def text_logprobs(self) -> dict[str, Any]:
        """Those that are waiting, in the form of completions."""
        waiting, self.logprobs = self.logprobs, []
        offsets = list(accumulate((len(token) for token, _, _ in waiting), initial=self.n_characters))
        self.n_characters = offsets[-1]
        return {
            "tokens": [token for token, _, _ in waiting],
            "token_logprobs": [value for _, value, _ in waiting],
            "top_logprobs": [None if value is None else dict(top) for _, value, top in waiting],
            "text_offset": offsets[:-1],
        }

    def _show(self, text: str) -> str:
        self.text += text
        return text

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of tools that it makes."""
        return [] if self.tools is None else self.tools.calls

    @property
    def finish_reason(self) -> str | None:
        """In OpenAI's words."""
        if self.done is None:
            return None
        return "tool_calls" if self.calls else "length" if self.completion.finish_reason == "length" else "stop"


Piece = tuple[Choice, str]


@dataclass(slots=True)
class Exchange:
    """A request of a client and what becomes of it; `chat` says which of the two forms its objects have."""

    asked: Asked
    engines: Engines
    engine: EngineProcess
    chat: bool
    choices: list[Choice]
    id: str
    until: float  # on the monotonic clock, when it is given up
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, chunk: bool = False) -> dict[str, Any]:
        """What stands in each of its objects."""
        of_chat = "chat.completion.chunk" if chunk else "chat.completion"
        form = of_chat if self.chat else "text_completion"
        return {"id": self.id, "object": form, "created": self.created, "model": self.asked.model}

    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt of several choices counts once."""
        done = [choice.completion for choice in self.choices if choice.done is not None]
        n_prompt = sum(each.n_prompt_tokens for each in done[:: self.asked.n or 1])
        n_tokens = sum(choice.n_tokens for choice in self.choices)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_tokens,
            "total_tokens": n_prompt + n_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(each.n_cached for each in done)},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": sum(each.accepted_prediction for each in done),
                "rejected_prediction_tokens": sum(each.rejected_prediction for each in done),
            },
        }

    async def pieces(self) -> AsyncGenerator[Piece]:
        """The text of all choices as it comes; a choice whose text is over is `done`."""
        merged: asyncio.Queue[tuple[Choice, dict[str, Any] | Exception]] = asyncio.Queue()

        async def pump(choice: Choice) -> None:
            try:
                async for event in choice.reply:
                    merged.put_nowait((choice, event))
            except Exception as error:
                merged.put_nowait((choice, error))

        pumps = [asyncio.create_task(pump(choice)) for choice in self.choices]
        try:
            open_choices = len(self.choices)
            while open_choices:
                try:
                    choice, event = await asyncio.wait_for(merged.get(), self.until - time.monotonic())
                except TimeoutError:
                    words = "the completion took longer than this server lets one take: ask for fewer tokens, or later"
                    raise ServiceUnreachable(words) from None
                if isinstance(event, Exception):
                    raise event
                if event["event"] == "prompt":
                    choice.prefix, choice.first = event["text"], event["first"]
                elif event["event"] == "text":
                    yield choice, choice.add(event)
                else:
                    open_choices -= 1
                    rest = choice.end(event)
                    self.engines.metrics.add(self.asked.model, choice.completion, choice.first_text_s, choice.waited_s)
                    yield choice, rest
        finally:
            for task in pumps:
                task.cancel()
            for choice in self.choices:
                self.engine.drop(choice.reply)

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        found = {**self.head(), "choices": [self._whole(choice) for choice in self.choices], "usage": self.usage()}
        return {**found, **self.metrics(), "system_fingerprint": (self.engine.about or {}).get("fingerprint")}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        ended = {"finish_reason": choice.finish_reason, "logprobs": self._logprobs(choice)}
        if not self.chat:
            return {"index": choice.index, "text": choice.prefix + choice.text, **ended}
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": choice.calls}
        return {"index": choice.index, "message": message, **ended}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Those that were not handed on yet, where they are wanted."""
        if self.asked.n_logprobs is None:
            return None
        return choice.chat_logprobs() if self.chat else choice.text_logprobs()

    def chunk(self, choice: Choice, text: str | None, finish_reason: str | None = None) -> dict[str, Any]:
        """A piece of a stream; `text` None: the last one of its choice."""
        ended = {"finish_reason": finish_reason, "logprobs": self._logprobs(choice)}
        if self.chat:
            delta: dict[str, Any] = {} if text is None else {"content": text}
            if text is None and choice.calls:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(choice.calls)]
            own = {"index": choice.index, "delta": delta, **ended}
        else:
            own = {"index": choice.index, "text": text or "", **ended}
        return {**self.head(chunk=True), "choices": [own], **self._usage_beside()}

    def opening(self, choice: Choice) -> dict[str, Any]:
        """The chunk that a choice begins with: its role, or the prompt that it echoes."""
        if not self.chat:
            return self.chunk(choice, choice.prefix)
        own = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "finish_reason": None,
            "logprobs": None,
        }
        return {**self.head(chunk=True), "choices": [own], **self._usage_beside()}

    def _usage_beside(self) -> dict[str, Any]:
        options = self.asked.stream_options
        if options is None or not options.include_usage:
            return {}
        return {"usage": self.usage() if options.continuous_usage_stats else None}

    def metrics(self) -> dict[str, Any]:
        """Statistics in vLLM's form, where they are wanted and there is one choice."""
        if not self.asked.return_metrics or len(self.choices) != 1 or self.choices[0].done is None:
            return {}
        done = self.choices[0].completion
        seconds = done.timings.total_s
        first_s = self.choices[0].first_text_s
        at_least = [done.target_passes, *done.accepted_per_position, 0]  # rounds that accepted so many tokens or more
        speculative = {
            "mean_acceptance_length": done.mean_generated_length,
            "draft_acceptance_rate": done.acceptance_rate,
            "num_spec_steps": done.target_passes,
            "num_draft_tokens": done.drafted,
            "num_accepted_draft_tokens": done.accepted,
            "num_spec_tokens": done.drafted,
            "acceptance_histogram": [more - fewer for more, fewer in pairwise(at_least)],
        }
        return {
            "metrics": {
                "time_to_first_token_ms": round(1000 * first_s, 3),
                "generation_time_ms": round(1000 * (seconds - done.prefill_s), 3),
                "tokens_per_second": round(done.n_tokens / seconds, 3) if seconds else None,
                "speculative_decoding": speculative,
                "decoded_with": self.choices[0].done["decoded_with"],
                "plan_version": self.choices[0].done["version"],
            }
        }


@router.post("/v1/chat/completions", operation_id="chat_completion", response_class=Response)
async def chat_completions(app: Shared, request: Request, asked: AskedChat) -> Response:
    """Answer a chat, in OpenAI's form."""
    return await _answer(app, request, asked)


@router.post("/v1/completions", operation_id="completion", response_class=Response)
async def completions(app: Shared, request: Request, asked: AskedText) -> Response:
    """Complete texts, in OpenAI's form."""
    return await _answer(app, request, asked)


async def _answer(app: State, request: Request, asked: AskedChat | AskedText) -> Response:
    exchange, headers = begin(app, request, asked, "cmpl" if isinstance(asked, AskedText) else "chatcmpl")
    if asked.stream:
        return await _streamed(request, exchange, headers)
    return await answered(request, exchange, headers, exchange.whole)


def begin(app: State, request: Request, asked: AskedChat | AskedText, word: str) -> tuple[Exchange, dict[str, str]]:
    """Ask the engine for all choices; returns the exchange, and the headers of its answer.

    Raises: UnusableField: a field cannot be used. ModelNotFound, EngineGone, Busy: as the engines raise it.
    """
    asked.check()
    salt = str(request.scope.get("state", {}).get("key_owner") or "")  # prefixes are shared within a key
    requests = asked.requests(salt)
    engines = engines_of(app)
    engine = engines.find(asked.model)
    is_chat = isinstance(asked, AskedChat)
    until = time.monotonic() + app.settings.timeout_s
    exchange = Exchange(asked, engines, engine, is_chat, [], f"{word}-{secrets.token_hex(12)}", until)
    try:
        for i, one in enumerate(each for own in requests for each in _choices_of(own, asked.n or 1)):
            choice = Choice(i, engine.ask("decode", request=one.to_json()))
            choice.tools = ToolText(list(names_of(one.tools))) if one.tools else None
            exchange.choices.append(choice)
    except SwiftoptError:
        for choice in exchange.choices:
            engine.drop(choice.reply)
        raise
    headers = {"x-request-id": exchange.id}
    if asked.ignored:
        headers["x-swiftopt-ignored"] = ", ".join(asked.ignored)[:500]
    return exchange, headers


async def answered(
    request: Request, exchange: Exchange, headers: Mapping[str, str], whole: Callable[[], dict[str, Any]]
) -> Response:
    """The answer as one object, once all choices are done."""

    async def collected() -> dict[str, Any]:
        async with aclosing(exchange.pieces()) as pieces:
            async for _ in pieces:
                pass
        return whole()

    done = await _unless_gone(request, collected())
    return Response(status_code=GONE) if done is None else JSONResponse(done, headers=dict(headers))


def _choices_of(request: CompletionRequest, n: int) -> Iterator[CompletionRequest]:
    """A request per choice, each with a seed of its own."""
    for i in range(n):
        seed = (request.sampling.seed + i) % 2**62
        yield replace(request, sampling=replace(request.sampling, seed=seed)) if i else request


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work gives; None, and the work is given up, where the client goes away meanwhile."""
    working = asyncio.create_task(work)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(gone())
    await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not working.done():
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
        return None
    return working.result()


async def _streamed(request: Request, exchange: Exchange, headers: Mapping[str, str]) -> Response:
    """A stream, whose status is that of its first event: what cannot be decoded is refused with a status of its own."""
    pieces = exchange.pieces()

    async def begun() -> Piece:
        return await anext(pieces)

    try:
        first = await _unless_gone(request, begun())
    except BaseException:
        await pieces.aclose()
        raise
    if first is None:
        await pieces.aclose()
        return Response(status_code=GONE)
    return EventSourceResponse(_chunks(exchange, first, pieces), headers=dict(headers), ping=PING_S, sep="\n")


async def _chunks(
    exchange: Exchange,
    first: Piece,
    rest: AsyncGenerator[Piece],
) -> AsyncIterator[ServerSentEvent]:
    """The stream's events: each choice's opening, its text, its end; then the usage and `[DONE]`."""
    opened: set[int] = set()
    try:
        async with aclosing(_behind(first, rest)) as pieces:
            async for choice, text in pieces:
                if choice.index not in opened:
                    opened.add(choice.index)
                    if exchange.chat or choice.prefix:
                        yield _sse(exchange.opening(choice))
                if text:
                    yield _sse(exchange.chunk(choice, text))
                if choice.done is not None:
                    yield _sse(exchange.chunk(choice, None, choice.finish_reason))
    except SwiftoptError as error:
        yield _sse(openai_error(status_of(error), str(error)))
    else:
        options = exchange.asked.stream_options
        if options is not None and options.include_usage:
            yield _sse({**exchange.head(chunk=True), "choices": [], "usage": exchange.usage(), **exchange.metrics()})
    yield ServerSentEvent("[DONE]")


async def _behind(first: T, rest: AsyncGenerator[T]) -> AsyncGenerator[T]:
    async with aclosing(rest):
        yield first
        async for each in rest:
            yield each


def _sse(values: Mapping[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(values))


class AskedTokens(BaseModel):
    """A text, or a chat, whose tokens are wanted; vLLM's form."""

    model_config = ConfigDict(extra="allow")

    model: str
    prompt: str | None = None
    messages: list[Message] | None = None


class AskedDetokenized(BaseModel):
    """Token ids whose text is wanted."""

    model_config = ConfigDict(extra="allow")

    model: str
    tokens: list[int]


@router.post("/tokenize", operation_id="tokenize", response_class=Response)
async def tokenize(app: Shared, asked: AskedTokens) -> Response:
    """The token ids of a prompt, as the model gets it."""
    if (asked.prompt is None) == (asked.messages is None):
        raise UnusableField("prompt", "give exactly one of prompt and messages")
    messages = tuple(each.plain(f"messages[{i}].content") for i, each in enumerate(asked.messages or ()))
    request = CompletionRequest(text=asked.prompt or "", messages=messages, max_new_tokens=1)
    engine = engines_of(app).find(asked.model)
    event = await engine.tell("tokenize", request=request.to_json())
    ids = event["token_ids"]
    assert engine.about is not None
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": engine.about["max_positions"]})


@router.post("/detokenize", operation_id="detokenize", response_class=Response)
async def detokenize(app: Shared, asked: AskedDetokenized) -> Response:
    """The text of token ids."""
    event = await engines_of(app).find(asked.model).tell("detokenize", token_ids=asked.tokens)
    return JSONResponse({"prompt": event["text"]})
