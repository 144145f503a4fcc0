"""OpenAI's Responses: the same chats under other names, with text, streams and calls of functions; none is stored."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Mapping
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field, ValidationError
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from ..core.errors import InvalidInput, UnsupportedField
from ..core.serialization import LARGEST, explained_body
from .completions import Exchange, Pieces
from .middleware import Shared, State, sse
from .schemas import MOST_MESSAGES, AskedChat, CommonFields, Lenient, call_arguments

router = APIRouter(prefix="/v1", tags=["completions"])

NOT_HERE = ("previous_response_id", "reasoning", "max_tool_calls", "safety_identifier", "prompt_cache_key")
FIXED = {"truncation": "disabled", "store": False, "background": False, "service_tier": "default", "top_logprobs": 0}
STORED = ("previous_response_id", "conversation", "background", "prompt")  # fields that need stored responses
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}  # by those of chats


class TextOptions(Lenient):
    """What the text of a response is to be."""

    format: dict[str, Any] | None = None


class AskedResponse(CommonFields):
    """A request in the form of Responses."""

    UNSUPPORTED: ClassVar = {
        **AskedChat.UNSUPPORTED,
        **{"truncation": ("disabled",), "top_logprobs": (0,), "include": ([], ["reasoning.encrypted_content"])},
    }

    input: str | Annotated[list[dict[str, Any]], Field(max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None

    def check(self) -> None:
        super().check()
        for name in STORED:
            if self.extra.get(name):
                words = f"{name} is not supported, for no response is stored here: send the whole input"
                raise UnsupportedField(words, name)
        for name in ("return_metrics", "return_token_ids"):
            if getattr(self, name):
                raise UnsupportedField(f"{name} is not supported in Responses: ask /v1/chat/completions for it", name)

    def name_of(self, field: str) -> str:
        if field == "json_schema" and self.tool_choice not in (None, "none", "auto"):
            return "tools"
        name = super().name_of(field)
        return NAMES.get(re.split(r"[.\[]", name)[0], name)

    def repeated(self) -> dict[str, Any]:
        """Return the fields of the request that its response repeats, with their defaults."""
        blank = {"description": None, "parameters": None, "strict": None}
        return {
            **dict.fromkeys(NOT_HERE),
            **self.model_dump(include={"instructions", "max_output_tokens"}),
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "tools": [{**blank, **tool} for tool in self.tools or ()],
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {"format": (self.text and self.text.format) or {"type": "text"}},
            "metadata": self.extra.get("metadata") or {},
            **FIXED,
        }

    def chat(self) -> AskedChat:
        """Return the chat that it asks for.

        Raises: InvalidInput: a part of it cannot be asked for here.
        """
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [_message(item, f"input[{i}]") for i, item in enumerate(self.input)]
        if not messages:
            raise InvalidInput("input is an empty list: send at least one item", "input")
        choice: Any = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
        values = {
            **self.model_dump(include={*CommonFields.model_fields, "parallel_tool_calls"}),
            **{"messages": messages, "max_tokens": self.max_output_tokens, "response_format": self._format()},
            **{"tools": [_tool(each) for each in self.tools or ()] or None, "tool_choice": choice},
        }
        try:
            return AskedChat.model_validate(values)
        except ValidationError as error:
            words, place, _ = explained_body(error.errors(include_url=False), values)
            raise InvalidInput(f"as a chat: {words}", place) from error

    def _format(self) -> dict[str, Any] | None:
        """Return the form of the text as chats have it."""
        own = self.text.format if self.text is not None else None
        if own is None or own.get("type") != "json_schema":
            return own
        return {"type": "json_schema", "json_schema": {key: own[key] for key in own if key != "type"}}


def _message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return an item of the input as a message of a chat."""
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, Mapping)]
            words = [text for text in texts if isinstance(text, str)]
            if len(words) < len(content):
                raise InvalidInput(f"{place}: only parts of text are supported here", place)
            content = "".join(words)
        return {"role": item.get("role"), "content": content}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": call_arguments(item.get("arguments"), place)}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    raise InvalidInput(f"{place}: items of type {kind!r} are not supported here", place)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": tool.get("type"), "function": {key: value for key, value in tool.items() if key != "type"}}


class ResponseExchange(Exchange):
    """A response, whose stream names the items that it has: one message, and the calls."""

    WORD = "resp"

    def __init__(self, app: State, request: Request, body: AskedResponse) -> None:
        body.check()
        super().__init__(app, request, body.chat())
        self.ignored, self._repeated, self._numbers = body.ignored, body.repeated(), count()
        self._item = {"id": f"msg_{self.id.removeprefix('resp-')}", "type": "message", "role": "assistant"}

    def whole(self) -> dict[str, Any]:
        choice, usage = self.choices[0], self.usage()
        is_cut = choice.finish_reason == "length"
        text = [self._text_item("completed")] if choice.text or not choice.calls else []
        return {
            **self._head("incomplete" if is_cut else "completed"),
            "output": [*text, *map(_call_item, choice.calls)],
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": int(time.time()),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    async def stream(self, pieces: Pieces) -> AsyncGenerator[ServerSentEvent]:
        choice, at = self.choices[0], {"output_index": 0}
        part = {**at, "item_id": self._item["id"], "content_index": 0}
        is_begun = False
        async for choice, text in pieces:
            if not is_begun:  # only now: a request that the engine refuses is answered by its status
                is_begun = True
                yield self._event("created", response=self._head("in_progress"))
                yield self._event("in_progress", response=self._head("in_progress"))
            if text and text == choice.text:  # it is the first
                item = {**self._item, "status": "in_progress", "content": []}
                yield self._event("output_item.added", **at, item=item)
                yield self._event("content_part.added", **part, part=_text_part(""))
            if text:
                yield self._event("output_text.delta", **part, delta=text, logprobs=[])
        if choice.text:
            yield self._event("output_text.done", **part, text=choice.text, logprobs=[])
            yield self._event("content_part.done", **part, part=_text_part(choice.text))
            yield self._event("output_item.done", **at, item=self._text_item("completed"))
        for i, call in enumerate(choice.calls, start=int(bool(choice.text))):
            item, at = _call_item(call), {"output_index": i}
            yield self._event("output_item.added", **at, item={**item, "status": "in_progress", "arguments": ""})
            yield self._event("function_call_arguments.delta", **at, item_id=item["id"], delta=item["arguments"])
            yield self._event("function_call_arguments.done", **at, item_id=item["id"], arguments=item["arguments"])
            yield self._event("output_item.done", **at, item=item)
        whole = self.whole()
        yield self._event(whole["status"], response=whole)

    def failed(self, error: dict[str, Any]) -> list[ServerSentEvent]:
        response = {
            **self._head("failed"),
            "output": [self._text_item("incomplete")] if self.choices[0].text else [],
            "error": {"code": error["error"]["code"] or "server_error", "message": error["error"]["message"]},
        }
        return [self._event("failed", response=response)]

    def _event(self, kind: str, **values: Any) -> ServerSentEvent:
        name = f"response.{kind}"
        return sse({"type": name, "sequence_number": next(self._numbers), **values}, name)

    def _head(self, status: str) -> dict[str, Any]:
        """Return a response without output, and with the fields of its request."""
        return {
            **{"id": self.id, "object": "response", "created_at": self.created, "status": status},
            **{"model": self.body.model, "output": [], "incomplete_details": None, "error": None},
            **{"completed_at": None, **self._repeated, "usage": None},
        }

    def _text_item(self, status: str) -> dict[str, Any]:
        """Return the message with the text so far."""
        return {**self._item, "status": status, "content": [_text_part(self.choices[0].text)]}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    number = call["id"].removeprefix("call_")
    common = {"id": f"fc_{number}", "type": "function_call", "status": "completed", "call_id": call["id"]}
    return {**common, **call["function"]}


@router.post("/responses", operation_id="response", response_class=Response)
async def responses(app: Shared, request: Request, body: AskedResponse) -> Response:
    """Answer in the form of Responses."""
    with body.naming():
        return await ResponseExchange(app, request, body).answer()
