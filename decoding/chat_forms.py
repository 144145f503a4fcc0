"""Rewriting a chat into a form of which the model's template drops nothing.

Templates differ in what they read: a content as a text or as parts, arguments as an object or as JSON. What one does
not read, it leaves out in silence. So a probe of the chat, with a marker in place of each text, is rendered in one form
after the other, until all markers are there. Forms are remembered by the shape of the chat.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from ..core.requests import CALL_BEGINS, CALL_ENDS

Message = Mapping[str, Any]
Change = Callable[[Message], list[Message]]  # Rewrites one message as one or more messages.

MOST_FORMS = 512  # Maximum forms cached per tokenizer.
MOST_CHANGES = 3  # Maximum changes combined in one form.
ID_LENGTH = 9  # Length of a tool call's id that Mistral's templates demand.
# Errors that a template raises to refuse a chat; TypeError for an unexpected value.
REFUSALS = (TemplateError, TypeError, ValueError)
MAY_BE_EMPTY = ("system", "developer")  # Roles whose empty messages may be dropped: they carry no request.


class LeftOut(NamedTuple):
    """The part of a message that a template drops; part "role" means the whole message."""

    message: int
    part: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and the other `values` passed to the template."""

    tokenizer: Any
    messages: Sequence[Message]
    values: Mapping[str, Any]

    def rendered(self) -> str:
        """Return the chat rendered by the template.

        Raises: one of `REFUSALS`.
        """
        values = {"add_generation_prompt": True, **self.values, "tokenize": False}
        return str(self.tokenizer.apply_chat_template(list(self.messages), **values))

    def changed(self, form: Sequence[Change]) -> Chat:
        chat = self
        for change in form:
            chat = replace(chat, messages=list(chain.from_iterable(map(change, chat.messages))))
        return chat


# Cached forms by tokenizer.
_FORMS: WeakKeyDictionary[Any, dict[bytes, tuple[Change, ...] | LeftOut]] = WeakKeyDictionary()


def remembered_form(chat: Chat) -> tuple[Change, ...] | LeftOut:
    """Return changes after which the template drops nothing of the chat, or what it drops in every form.

    Where it refuses every form, that is none: the chat itself shows why.
    """
    forms, shape = _FORMS.setdefault(chat.tokenizer, {}), _shape(chat)
    form = forms.pop(shape, None)
    forms[shape] = form = _form(chat) if form is None else form  # Reinsert as the most recently used.
    for other in list(forms)[:-MOST_FORMS]:
        forms.pop(other, None)
    return form


def _shape(chat: Chat) -> bytes:
    """Return a digest of all that a template may branch on: everything but the texts."""

    def row(message: Message) -> Any:
        calls = [(_kind(call["function"]["arguments"]), len(str(call.get("id")))) for call in _calls(message)]
        content = type(message.get("content")) if says(message) else message.get("content")
        return message["role"], content, calls, len(str(message.get("tool_call_id"))), sorted(message)

    values = {**chat.values, "tools": bool(chat.values.get("tools"))}
    shape = (
        chat.tokenizer.chat_template,
        [row(message) for message in chat.messages],
        sorted(values.items()),
    )
    return hashlib.sha256(repr(shape).encode(errors="replace")).digest()


def _kind(arguments: Any) -> tuple[type, bool]:
    return type(arguments), bool(arguments)


def _form(chat: Chat) -> tuple[Change, ...] | LeftOut:
    probe, furthest = _Probe(chat), None
    changes = [change for change in CHANGES if probe.chat.changed([change]) != probe.chat]
    forms = (form for n in range(MOST_CHANGES + 1) for form in combinations(changes, n))
    for form in sorted(forms, key=lambda form: (_with_written_calls in form, len(form))):
        try:
            left_out = probe.left_out(form)
        except REFUSALS:
            continue
        if left_out is None:
            return form
        furthest = left_out if furthest is None else max(furthest, left_out, key=lambda each: each.message)
    return () if furthest is None else furthest


class _Probe:
    """A chat of the same shape with a marker in place of each text; `places` maps markers to message parts."""

    def __init__(self, chat: Chat) -> None:
        self.places: dict[str, LeftOut] = {}
        messages = [self._marked(i, message) for i, message in enumerate(chat.messages)]
        values = {**chat.values, "continue_final_message": False}  # Handled by transformers; no template sees it.
        self.chat = replace(chat, messages=messages, values=values)

    def _marked(self, i: int, message: Message) -> Message:
        marked = dict(message)
        if says(message):
            marked["content"] = self._marker(i, "content")
        if calls := _calls(message):
            marked["tool_calls"] = [self._marked_call(i, j, call) for j, call in enumerate(calls)]
        return marked

    def _marked_call(self, i: int, j: int, call: Mapping[str, Any]) -> Mapping[str, Any]:
        place, arguments = f"tool_calls[{j}]", call["function"]["arguments"]
        match arguments:
            case {} if arguments:
                arguments = {"key": self._marker(i, place)}
            case [_, *_]:
                arguments = [self._marker(i, place)]
            case str() if arguments:
                arguments = self._marker(i, place)
        return {**call, "function": {**call["function"], "name": self._marker(i, place), "arguments": arguments}}

    def _marker(self, i: int, part: str) -> str:
        marker = f"Qz{len(self.places)}zQ"
        self.places[marker] = LeftOut(i, part)
        return marker

    def left_out(self, form: Sequence[Change]) -> LeftOut | None:
        """Return what the template drops of the chat in a form; None if nothing.

        Raises: one of `REFUSALS`: the template does not take the form.
        """
        chat = self.chat.changed(form)
        text = chat.rendered()
        if any(literal in text for literal in _as_python(chat.messages)):
            raise TypeError("the template writes a value of another type than it expects")
        kept = {place.message for marker, place in self.places.items() if marker in text}
        for marker, (i, part) in self.places.items():
            if marker not in text:
                return LeftOut(i, part if i in kept else "role")
        roles = {message["role"] for message in chat.messages if _is_empty(message)} - {*MAY_BE_EMPTY}
        for role in sorted(roles):
            others = [message for message in chat.messages if message["role"] != role or not _is_empty(message)]
            try:
                vanishes = bool(others) and replace(chat, messages=others).rendered() == text
            except REFUSALS:
                # The template refuses the chat without the empty message, so it needs that message for the order of
                # roles.
                continue
            if vanishes:
                empty = (
                    i for i, message in enumerate(self.chat.messages) if message["role"] == role and _is_empty(message)
                )
                return LeftOut(next(empty), "content")
        return None


def _as_python(messages: Sequence[Message]) -> Iterator[str]:
    """Yield renderings of non-text values that show that a template took them for texts."""
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            yield from (str(part), json.dumps(part))
        arguments = (call["function"]["arguments"] for call in _calls(message))
        yield from (str(argument) for argument in arguments if argument and isinstance(argument, Mapping | list))


def says(message: Message) -> bool:
    """Return whether a message has a text that is not blank."""
    return isinstance(content := message.get("content"), str) and bool(content.strip())


def _is_empty(message: Message) -> bool:
    return not (says(message) or _calls(message) or isinstance(message.get("content"), list))


def _calls(message: Message) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


# --- changes


def with_arguments(message: Message, read: Callable[[Any], Any]) -> Message:
    """Return a message whose calls' arguments are replaced by `read` of them."""
    if not (calls := _calls(message)):
        return message
    functions = ({**call["function"], "arguments": read(call["function"].get("arguments"))} for call in calls)
    return {
        **message,
        "tool_calls": [{**call, "function": function} for call, function in zip(calls, functions, strict=True)],
    }


def _with_json(message: Message) -> list[Message]:
    """Encode arguments as JSON strings, as in OpenAI's API."""
    return [with_arguments(message, _as_json)]


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_objects(message: Message) -> list[Message]:
    """Wrap arguments that are not an object into one, for templates that iterate over keys."""
    return [with_arguments(message, lambda own: own if isinstance(own, Mapping) else {"arguments": own})]


def _with_short_ids(message: Message) -> list[Message]:
    """Shorten the ids of calls; equal ids stay equal."""
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if calls := _calls(message):
        changed["tool_calls"] = [{**call, "id": _short(call.get("id"))} for call in calls]
    return [changed]


def _short(call_id: Any) -> str:
    text = str(call_id)
    is_short = len(text) == ID_LENGTH and text.isalnum()
    return text if is_short else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:ID_LENGTH]


def _apart(message: Message) -> list[Message]:
    """Move text beside calls into a message of its own, for templates that drop text in messages with calls."""
    if not (says(message) and _calls(message)):
        return [message]
    return [_without_calls(message), {**message, "content": ""}]


def _without_calls(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _singly(message: Message) -> list[Message]:
    """Split calls into one message each, for templates that read only one call per message."""
    if len(calls := _calls(message)) < 2:
        return [message]
    others = ({**message, "content": "", "tool_calls": [call]} for call in calls[1:])
    return [{**message, "tool_calls": calls[:1]}, *others]


def _with_written_calls(message: Message) -> list[Message]:
    """Write calls into the content as Qwen and Hermes do, for templates without tool calls."""
    if not (calls := _calls(message)) or message["role"] != "assistant":
        return [message]
    said = [message["content"]] if says(message) else []
    return [{**_without_calls(message), "content": "\n".join([*said, *map(_written, calls)])}]


def _written(call: Mapping[str, Any]) -> str:
    name, arguments = json.dumps(call["function"]["name"], ensure_ascii=False), call["function"]["arguments"]
    return f'{CALL_BEGINS}\n{{"name": {name}, "arguments": {_as_json(arguments)}}}\n{CALL_ENDS}'


def _with_parts(message: Message) -> list[Message]:
    """Convert contents to lists of parts, for templates of vision models."""
    content = message.get("content")
    return [{**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message]


CHANGES: tuple[Change, ...] = (  # Tried in this order, the likeliest first.
    *(_with_json, _with_objects, _with_short_ids, _apart, _singly),
    *(_with_parts, _with_written_calls),
)
