"""OpenAI's Responses: the same chats under other names, with text, streams and calls of functions; none is stored."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from ..core.errors import SwiftoptError
from ..core.serialization import explained
from .completions import PING_S, AskedChat, Exchange, Options, answered, begin
from .problems import UnusableField, openai_error, status_of
from .state import Shared

router = APIRouter(prefix="/v1", tags=["completions"])

NOT_HERE = ("previous_response_id", "reasoning", "max_tool_calls", "safety_identifier", "prompt_cache_key")
FIXED = {  # what there is no choice about
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "top_logprobs": 0, "parallel_tool_calls": True},
    **{"truncation": "disabled", "store": False, "background": False, "service_tier": "default"},
}
STORED = ("previous_response_id", "conversation", "background", "prompt")  # what would need stored responses


class AskedResponse(BaseModel):
    """A request in the form of Responses."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    stream: bool = False
    user: str | None = None
    swiftopt: Options = Field(default_factory=Options)

    def told(self) -> dict[str, Any]:
        """What a response repeats of its request, with the defaults of what it did not say."""
        own = self.model_dump(include={"instructions", "max_output_tokens"})
        blank = {"description": None, "parameters": None, "strict": None}
        return {
            **dict.fromkeys(NOT_HERE),
            **own,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "tools": [{**blank, **tool} for tool in self.tools],
            "tool_choice": self.tool_choice or "auto",
            "text": {"format": {"type": "text"}},
            "metadata": (self.model_extra or {}).get("metadata") or {},
            **FIXED,
        }

    def chat(self) -> AskedChat:
        """The chat that it asks for.

        Raises: UnusableField: a part of it cannot be asked for here.
        """
        for name in STORED:
            if (self.model_extra or {}).get(name):
                raise UnusableField(
                    name, f"{name} is not supported, for no response is stored here: send the whole input"
                )
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [_message(item, f"input[{i}]") for i, item in enumerate(self.input)]
        if not messages:
            raise UnusableField("input", "input is an empty list: send at least one item")
        tools = [_tool(each, i) for i, each in enumerate(self.tools)] or None
        choice: Any = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
        values = {
            "tool_choice": choice,
            **self.model_dump(include={"model", "temperature", "top_p", "user"}),
            **{"messages": messages, "max_tokens": self.max_output_tokens, "tools": tools, "swiftopt": self.swiftopt},
        }
        try:
            return AskedChat.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            words = explained([str(part) for part in first["loc"]], first["type"], first["msg"], first["input"])
            raise UnusableField("input", f"input, as a chat: {words}") from error


def _message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    """An item of the input as a message of a chat."""
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        if isinstance(content, list):
            texts = [
                part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            ]
            if len(texts) < len(content):
                raise UnusableField(place, f"{place}: only parts of text are supported here")
            content = "".join(texts)
        role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
        return {"role": role, "content": content}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": _arguments(item, place)}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    raise UnusableField(place, f"{place}: items of type {kind!r} are not supported here")


def _arguments(item: Mapping[str, Any], place: str) -> Any:
    """The arguments of an earlier call, as templates read them: an object."""
    try:
        return json.loads(item.get("arguments") or "{}")
    except (TypeError, ValueError):
        raise UnusableField(place, f"{place}: the arguments are no JSON: send them as the call had them") from None


def _tool(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise UnusableField(f"tools[{number}]", f"tools[{number}]: only functions are supported here")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


@router.post("/responses", operation_id="response", response_class=Response)
async def responses(app: Shared, request: Request, asked: AskedResponse) -> Response:
    """Answer in the form of Responses."""
    exchange, headers = begin(app, request, asked.chat(), "resp")
    whole = partial(_whole, asked.told(), exchange)
    if not asked.stream:
        return await answered(request, exchange, headers, partial(whole, "completed"))
    return EventSourceResponse(_events(exchange, whole), headers=headers, ping=PING_S, sep="\n")


def _whole(told: Mapping[str, Any], exchange: Exchange, status: str) -> dict[str, Any]:
    """The response as it is now, beside what the request said."""
    usage = exchange.usage()
    is_cut = status == "completed" and exchange.choices[0].finish_reason == "length"
    return {
        "id": exchange.id,
        "object": "response",
        "created_at": exchange.created,
        "status": "incomplete" if is_cut else status,
        "model": exchange.asked.model,
        "output": [] if status == "in_progress" else _output(exchange),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "completed_at": None if status == "in_progress" else int(time.time()),
        **told,
        "usage": None
        if status == "in_progress"
        else {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _output(exchange: Exchange) -> list[dict[str, Any]]:
    choice = exchange.choices[0]
    text = [_text_item(exchange, choice.text, "completed")] if choice.text or not choice.calls else []
    return [*text, *(_call_item(call) for call in choice.calls)]


def _text_item(exchange: Exchange, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    number = exchange.id.removeprefix("resp-")
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status, "content": content}


def _call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    number = call["id"].removeprefix("call_")
    return {
        "id": f"fc_{number}",
        "type": "function_call",
        "status": "completed",
        "call_id": call["id"],
        **call["function"],
    }


async def _events(exchange: Exchange, whole: Callable[[str], dict[str, Any]]) -> AsyncIterator[ServerSentEvent]:
    """The stream's events, numbered."""
    number = 0

    def event(kind: str, **values: Any) -> ServerSentEvent:
        nonlocal number
        number += 1
        return ServerSentEvent(json.dumps({"type": kind, "sequence_number": number - 1, **values}), event=kind)

    yield event("response.created", response=whole("in_progress"))
    yield event("response.in_progress", response=whole("in_progress"))
    choice, where = exchange.choices[0], {"output_index": 0}
    part = {**where, "item_id": _text_item(exchange, None, "")["id"], "content_index": 0}
    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    is_open = False
    try:
        async with aclosing(exchange.pieces()) as pieces:
            async for _, text in pieces:
                if text and not is_open:
                    is_open = True
                    yield event("response.output_item.added", **where, item=_text_item(exchange, None, "in_progress"))
                    yield event("response.content_part.added", **part, part=empty)
                if text:
                    yield event("response.output_text.delta", **part, delta=text, logprobs=[])
    except SwiftoptError as error:
        yield event("error", **openai_error(status_of(error), str(error))["error"])
        return
    if is_open:
        yield event("response.output_text.done", **part, text=choice.text, logprobs=[])
        yield event("response.content_part.done", **part, part={**empty, "text": choice.text})
        yield event("response.output_item.done", **where, item=_text_item(exchange, choice.text, "completed"))
    for i, call in enumerate(choice.calls, start=int(is_open)):
        item, at = _call_item(call), {"output_index": i}
        yield event("response.output_item.added", **at, item={**item, "status": "in_progress", "arguments": ""})
        yield event("response.function_call_arguments.delta", **at, item_id=item["id"], delta=item["arguments"])
        yield event("response.function_call_arguments.done", **at, item_id=item["id"], arguments=item["arguments"])
        yield event("response.output_item.done", **at, item=item)
    done = whole("completed")
    yield event(f"response.{done['status']}", response=done)
