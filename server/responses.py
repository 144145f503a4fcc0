"""OpenAI's Responses: chats under other field names, with text, streams and tool calls. No response is stored."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field, PrivateAttr, ValidationError
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from ..core.errors import InvalidInput, SwiftoptError, UnsupportedField, UnsupportedValue
from ..core.serialization import LARGEST, check_json, explain_body_error
from ..core.streams import text_of
from .bodies import FieldRefusal, Lenient
from .completions import Exchange, Pieces
from .middleware import Shared, State, sse
from .response_tools import CALLS, ResponseTools, chat_call, chat_name
from .schemas import MOST_EFFORT, MOST_MESSAGES, AskedChat, CommonFields

router = APIRouter(prefix="/v1", tags=["completions"])

UNSUPPORTED_FIELDS = ("previous_response_id", "max_tool_calls", "safety_identifier", "prompt_cache_key")
ONLY_VALUES = {
    "truncation": "disabled",
    "store": False,
    "background": False,
    "service_tier": "default",
    "top_logprobs": 0,
}
STORED = ("previous_response_id", "conversation", "background", "prompt")  # Fields that would need stored responses.
RESPONSE_PATHS = {  # Pattern of a field's path in a chat -> its path in a request to /v1/responses.
    r"messages\b": "input",
    r"max_tokens\b": "max_output_tokens",
    r"response_format(\.json_schema)?\b": "text.format",
    r"(tool_choice)\.function\b": r"\1",
    r"reasoning_effort\b": "reasoning.effort",
}
REASONING_TYPES = {"reasoning_text": "text"}  # Part types of reasoning items.


class TextOptions(Lenient):
    """The required form of the text."""

    format: dict[str, Any] | None = None


class ReasoningOptions(Lenient):
    """How long the model should think."""

    effort: str | None = Field(default=None, max_length=MOST_EFFORT)


class AskedResponse(CommonFields):
    """A request in the form of Responses."""

    UNSUPPORTED: ClassVar = {
        **CommonFields.UNSUPPORTED,
        "truncation": FieldRefusal(("disabled",)),
        "include": FieldRefusal(([], ["reasoning.encrypted_content"])),
    }

    REPLACED_BY: ClassVar = {"form": "text.format", "length": "max_output_tokens", "prompt": "input"}

    input: str | Annotated[list[dict[str, Any]], Field(max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    _places: dict[str, str] = PrivateAttr(default_factory=dict)  # Path in the chat -> path in the request.
    _left_out: list[str] = PrivateAttr(default_factory=list)  # Paths of tools and items that the chat lacks.
    _offered: ResponseTools = PrivateAttr(default_factory=lambda: ResponseTools(()))

    def check(self) -> None:
        for name in STORED:
            if self.extra.get(name):
                problem = f"{name} is not supported, because no response is stored here: send the whole input"
                raise UnsupportedField(problem, name)
        super().check()
        for name in ("return_metrics", "return_token_ids"):
            if getattr(self, name):
                raise UnsupportedField(f"{name} is not supported in Responses: ask /v1/chat/completions for it", name)
        check_json(self.repeated())

    def name_of(self, field: str) -> str:
        return self._with_request_paths(super().name_of(field))

    def name(self, error: SwiftoptError) -> None:
        super().name(error)
        if error.param not in self.extra:
            error.args = (self._with_request_paths(str(error)),)

    def _with_request_paths(self, text: str) -> str:
        """Return a text with each path in the chat replaced by the path in the request."""

        def request_path(match: re.Match[str]) -> str:
            path_parts = re.split(r"(?=[.\[])", match[0])
            for n in range(len(path_parts), 0, -1):
                if (path := self._places.get("".join(path_parts[:n]))) is not None:
                    return path + "".join(path_parts[n:])
            return match[0]

        text = re.sub(r"\b(messages|tools)\[\d+\](\.\w+|\[\d+\])*", request_path, text)
        for pattern, path in RESPONSE_PATHS.items():
            text = re.sub(rf"\b{pattern}", path, text)
        return text

    def repeated(self) -> dict[str, Any]:
        """Return the request's fields that the response repeats, with defaults for absent ones."""
        blank = {"description": None, "parameters": None, "strict": None}
        return {
            **dict.fromkeys(UNSUPPORTED_FIELDS),
            **self.model_dump(include={"instructions", "max_output_tokens"}),
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "tools": [{**(blank if tool.get("type") == "function" else {}), **tool} for tool in self.tools or ()],
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {"format": (self.text and self.text.format) or {"type": "text"}},
            "reasoning": self.reasoning and {"effort": self.reasoning.effort, "summary": None},
            "metadata": self.extra.get("metadata") or {},
            **ONLY_VALUES,
        }

    def chat(self) -> AskedChat:
        """Return the request as a chat.

        Raises: InvalidInput: a part of the request is not supported.
        """
        messages = ChatMessages()
        if self.instructions:
            messages.add({"role": "system", "content": self.instructions}, "instructions", "", "")
        if isinstance(self.input, str):
            messages.add({"role": "user", "content": self.input}, "input", "", "")
        else:
            for i, input_item in enumerate(self.input):
                messages.add_item(input_item, f"input[{i}]")
        self._offered = ResponseTools(self.tools or ())
        self._places = messages.places | self._offered.places
        self._left_out = messages.left_out + self._offered.left_out
        if not messages.messages:
            raise InvalidInput("input has nothing to answer: send at least one message", "input")
        values = {
            **self.model_dump(include={*CommonFields.model_fields, "parallel_tool_calls"}),
            **{"messages": messages.messages, "max_tokens": self.max_output_tokens, "response_format": self._format()},
            **{"tools": self._offered.functions or None, "tool_choice": self._chat_tool_choice()},
            "reasoning_effort": self.reasoning and self.reasoning.effort,
        }
        try:
            return AskedChat.model_validate(values)
        except ValidationError as error:
            problem, path, _ = explain_body_error(error.errors(include_url=False), values)
            raise InvalidInput(problem, path) from error

    def _chat_tool_choice(self) -> Any:
        """Return `tool_choice` in the form of chats.

        Raises: InvalidInput: it is neither a word nor a named function.
        """
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return choice
        options = {key: value for key, value in choice.items() if key not in ("type", "namespace")}
        kind, name = choice.get("type"), chat_name(choice.get("namespace"), choice.get("name"))
        if kind not in ("function", "custom"):
            problem = f"tool_choice is of type {kind!r}: use 'none', 'auto', 'required' or a function by its name"
            raise UnsupportedValue(problem, "tool_choice.type")
        if not isinstance(name, str):
            raise InvalidInput("tool_choice has no name: give the name of one of the tools", "tool_choice.name")
        return {"type": "function", "function": {**options, "name": name}}

    def unused(self) -> Iterator[str]:
        yield from self._left_out

    @property
    def offered(self) -> ResponseTools:
        """The tools of the chat; empty before `chat` was called."""
        return self._offered

    def _format(self) -> dict[str, Any] | None:
        """Return `text.format` as the `response_format` of a chat."""
        text_format = self.text.format if self.text is not None else None
        if text_format is None or text_format.get("type") != "json_schema":
            return text_format
        return {"type": "json_schema", "json_schema": {key: text_format[key] for key in text_format if key != "type"}}


class ChatMessages:
    """The items of an input as messages of a chat.

    `places` maps places in the chat to places in the request. `left_out` lists the places of items that say nothing to
    the model. An answer of the assistant, with its thought and its calls, becomes one message.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        self.left_out: list[str] = []
        self._is_open = False  # Whether further items may extend the last assistant message.

    def add(self, message: dict[str, Any], path: str, role: str = ".role", content: str = ".content") -> None:
        """Add a message from the place `path`; `role` and `content` are the rest of the places of these keys."""
        message_place = f"messages[{len(self.messages)}]"
        self.messages.append(message)
        self.places |= {
            message_place: path,
            f"{message_place}.role": path + role,
            f"{message_place}.content": path + content,
        }
        self._is_open = message["role"] == "assistant"

    def add_item(self, item: Mapping[str, Any], path: str) -> None:
        """Add an item of the input.

        Raises: InvalidInput: it is not supported, or incomplete.
        """
        match kind := item.get("type", "message"):
            case "message":
                message = {"role": item.get("role"), "content": item.get("content")}
                if self._is_open and message["role"] == "assistant" and "content" not in self.messages[-1]:
                    self.messages[-1] |= message
                    self.places[f"messages[{len(self.messages) - 1}].content"] = f"{path}.content"
                else:
                    self.add(message, path)
            case "reasoning":
                thought = text_of(item.get("content") or (), f"{path}.content", REASONING_TYPES)
                if thought:
                    self.places[f"messages[{len(self.messages)}].reasoning_content"] = f"{path}.content"
                    self.add({"role": "assistant", "reasoning_content": thought}, path)
                else:  # Some clients do not send the thought itself, only its id or a summary.
                    self.left_out.append(path)
            case "function_call" | "custom_tool_call":
                self._add_call(item, path)
            case "function_call_output" | "custom_tool_call_output":
                if item.get("output") is None:
                    raise InvalidInput(f"{path} has no output: give what the function returned", f"{path}.output")
                message = {"role": "tool", "content": item["output"], "tool_call_id": item.get("call_id")}
                self.add(message, path, role=".type", content=".output")
            case _:
                problem = f"{path}: items of type {kind!r} are not supported here"
                raise UnsupportedValue(f"{problem}: leave it out", f"{path}.type")

    def _add_call(self, item: Mapping[str, Any], path: str) -> None:
        if not self._is_open:
            self.add({"role": "assistant", "content": ""}, path, role=".type")
        calls = self.messages[-1].setdefault("tool_calls", [])
        call_place = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.places |= {call_place: path, f"{call_place}.function": path}
        calls.append(chat_call(item))


class ResponseExchange(Exchange):
    """A response. Its output has up to three kinds of items: the thought, one message, and the calls."""

    ID_PREFIX = "resp"

    def __init__(self, app: State, request: Request, body: AskedResponse) -> None:
        body.check()
        super().__init__(app, request, body.chat())
        self.client_body, self._item_of = body, body.offered.item
        self._repeated_fields, self._numbers = body.repeated(), count()
        number = self.id.removeprefix("resp-")
        self._item = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
        self._thought = {"id": f"rs_{number}", "type": "reasoning", "summary": []}

    def ignored(self) -> list[str]:
        return sorted({*self.client_body.ignored, *map(self.client_body.name_of, super().ignored())})

    def whole(self) -> dict[str, Any]:
        choice, usage = self.choices[0], self.usage()
        is_cut = choice.finish_reason == "length"
        text = [self._text_item("completed")] if choice.text or not choice.calls else []
        return {
            **self._head("incomplete" if is_cut else "completed"),
            "output": [*self._thought_items("completed"), *text, *map(self._item_of, choice.calls)],
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": int(time.time()),
            **self.explanation(),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
                "total_tokens": usage["total_tokens"],
            },
        }

    async def stream(self, pieces: Pieces) -> AsyncGenerator[ServerSentEvent]:
        choice, is_begun, is_thought_done = self.choices[0], False, False
        thought_position = {"output_index": 0, "item_id": self._thought["id"], "content_index": 0}
        part_position = thought_position
        async for choice, text in pieces:
            # Begin the stream with the first text: until then, an error of the engine can still set the HTTP status.
            if not is_begun:
                is_begun = True
                yield self._event("created", response=self._head("in_progress"))
                yield self._event("in_progress", response=self._head("in_progress"))
            if thought := choice.thought[choice.n_sent_thought :]:
                if not choice.n_sent_thought:
                    item = {**self._thought, "status": "in_progress", "content": []}
                    yield self._event("output_item.added", output_index=0, item=item)
                    yield self._event("content_part.added", **thought_position, part=_thought_part(""))
                choice.n_sent_thought += len(thought)
                yield self._event("reasoning_text.delta", **thought_position, delta=thought)
            if choice.thought and not is_thought_done and (text or choice.calls or choice.done is not None):
                is_thought_done = True
                for event in self._end_of_thought(thought_position):
                    yield event
            if text and text == choice.text:  # The first text opens the message.
                item = {**self._item, "status": "in_progress", "content": []}
                n_before = int(bool(choice.thought))
                part_position = {"output_index": n_before, "item_id": self._item["id"], "content_index": 0}
                yield self._event("output_item.added", output_index=n_before, item=item)
                yield self._event("content_part.added", **part_position, part=_text_part(""))
            if text:
                yield self._event("output_text.delta", **part_position, delta=text, logprobs=[])
        if choice.text:
            yield self._event("output_text.done", **part_position, text=choice.text, logprobs=[])
            yield self._event("content_part.done", **part_position, part=_text_part(choice.text))
            index = part_position["output_index"]
            yield self._event("output_item.done", output_index=index, item=self._text_item("completed"))
        for i, call in enumerate(choice.calls, start=bool(choice.thought) + bool(choice.text)):
            call_item, call_position = self._item_of(call), {"output_index": i}
            field, events = CALLS[call_item["type"]]
            begun_item = {**call_item, "status": "in_progress", field: ""}
            item_position = {**call_position, "item_id": call_item["id"]}
            yield self._event("output_item.added", **call_position, item=begun_item)
            yield self._event(f"{events}.delta", **item_position, delta=call_item[field])
            yield self._event(f"{events}.done", **item_position, **{field: call_item[field]})
            yield self._event("output_item.done", **call_position, item=call_item)
        response = self.whole()
        yield self._event(response["status"], response=response)

    def error_events(self, error: dict[str, Any]) -> list[ServerSentEvent]:
        response = {
            **self._head("failed"),
            "output": [
                *self._thought_items("incomplete"),
                *([self._text_item("incomplete")] if self.choices[0].text else []),
            ],
            "error": {"code": error["error"]["code"] or "server_error", "message": error["error"]["message"]},
        }
        return [self._event("failed", response=response)]

    def _end_of_thought(self, position: Mapping[str, Any]) -> Iterator[ServerSentEvent]:
        (item,) = self._thought_items("completed")
        thought = self.choices[0].thought
        yield self._event("reasoning_text.done", **position, text=thought)
        yield self._event("content_part.done", **position, part=_thought_part(thought))
        yield self._event("output_item.done", output_index=position["output_index"], item=item)

    def _event(self, kind: str, **values: Any) -> ServerSentEvent:
        name = f"response.{kind}"
        return sse({"type": name, "sequence_number": next(self._numbers), **values}, name)

    def _head(self, status: str) -> dict[str, Any]:
        """Return a response without output, with the fields of the request that it repeats."""
        return {
            **{"id": self.id, "object": "response", "created_at": self.created, "status": status},
            **{"model": self.body.model, "output": [], "incomplete_details": None, "error": None},
            **{"completed_at": None, **self._repeated_fields, "usage": None},
        }

    def _thought_items(self, status: str) -> list[dict[str, Any]]:
        """Return the item of the thought so far; an empty list without a thought."""
        thought = self.choices[0].thought
        return [{**self._thought, "status": status, "content": [_thought_part(thought)]}] if thought else []

    def _text_item(self, status: str) -> dict[str, Any]:
        """Return the message with the text so far."""
        return {**self._item, "status": status, "content": [_text_part(self.choices[0].text)]}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


@router.post("/responses", operation_id="response", response_class=Response)
async def responses(app: Shared, request: Request, body: AskedResponse) -> Response:
    """Answer in the form of Responses."""
    with body.naming():
        return await ResponseExchange(app, request, body).answer()
