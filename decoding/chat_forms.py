"""Rewriting of a chat into a form of which the model's template drops nothing.

Templates differ in the form that they read: content as a text or as parts, arguments as an object or as JSON. A
template silently drops what it does not read, and raises an error for missing input. So a probe of the chat, with a
marker in place of each text, is rendered in one form after another until all markers appear. The resulting form is
cached by the shape of the chat.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, combinations
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from ..core.answer_forms import FORMS
from .template_limits import LimitExceeded, limited

Message = Mapping[str, Any]
MAX_FORMS = 512  # Maximum forms cached per tokenizer.
MAX_CHANGES = 3  # Maximum changes combined in one form.
ID_LENGTH = 9  # Length of a tool call's id that Mistral's templates demand.
# Errors that a template raises to refuse a chat; TypeError for an unexpected value.
REFUSALS = (TemplateError, TypeError, ValueError)
# Fields that templates read an earlier answer's thought from.
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking", "tool_plan")
_THOUGHT_PARTS = re.compile(r"==\s*['\"]thinking['\"]")  # Templates that read thoughts as parts of the content.
_THOUGHT_BLOCKS = re.compile(r"==\s*['\"]thoughts['\"]")  # Apertus: as blocks of the content.
WRITTEN = FORMS["tool_call"]  # How calls are written for templates without tool calls.
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

    def render(self) -> str:
        """Return the chat rendered by the template.

        Raises: one of `REFUSALS`. LimitExceeded: the template runs or grows without end.
        """
        values = {"add_generation_prompt": True, **self.values, "tokenize": False}
        with limited():
            return str(self.tokenizer.apply_chat_template(list(self.messages), **values))

    def apply(self, form: Sequence[Change]) -> Chat:
        chat = self
        for change in form:
            chat = change(chat)
        return chat


Change = Callable[[Chat], Chat]  # Rewrites a chat.

# Cached forms by tokenizer.
_FORMS: WeakKeyDictionary[Any, dict[bytes, tuple[Change, ...] | LeftOut]] = WeakKeyDictionary()


def remembered_form(chat: Chat) -> tuple[Change, ...] | LeftOut:
    """Return changes after which the template drops nothing of the chat, or the part that it drops in every form.

    If the template refuses every form, no changes are returned: rendering the chat itself then raises the template's
    error.
    """
    forms, shape = _FORMS.setdefault(chat.tokenizer, {}), _shape(chat)
    form = forms.pop(shape, None)
    forms[shape] = form = _find_form(chat) if form is None else form  # Reinsert as the most recently used.
    for oldest_shape in list(forms)[:-MAX_FORMS]:
        forms.pop(oldest_shape, None)
    return form


def rendered_in_form(chat: Chat) -> str:
    """Return the chat rendered in its remembered form; "" if the template refuses it."""
    with suppress(*REFUSALS, LimitExceeded):
        form = remembered_form(chat)
        return chat.render() if isinstance(form, LeftOut) else chat.apply(form).render()
    return ""


def _shape(chat: Chat) -> bytes:
    """Return a digest of everything that a template may branch on, which is all but the texts."""

    def row(message: Message) -> Any:
        call_shapes = [
            (_arguments_kind(call["function"]["arguments"]), len(str(call.get("id")))) for call in _calls(message)
        ]
        content_shape = type(message.get("content")) if has_text(message) else message.get("content")
        return message["role"], content_shape, call_shapes, len(str(message.get("tool_call_id"))), sorted(message)

    values = {**chat.values, "tools": sorted({_is_described(tool) for tool in chat.values.get("tools") or ()})}
    shape = (
        chat.tokenizer.chat_template,
        [row(message) for message in chat.messages],
        sorted(values.items()),
    )
    return hashlib.sha256(repr(shape).encode(errors="replace")).digest()


def _arguments_kind(arguments: Any) -> tuple[type, bool]:
    return type(arguments), bool(arguments)


def _find_form(chat: Chat) -> tuple[Change, ...] | LeftOut:
    probe, latest_left_out = _Probe(chat), None
    changes = [change for change in CHANGES if probe.chat.apply([change]) != probe.chat]
    forms = (form for n in range(MAX_CHANGES + 1) for form in combinations(changes, n))
    for form in sorted(forms, key=lambda form: (WRITTEN_CALLS in form, len(form))):
        try:
            left_out = probe.find_left_out(form)
        except REFUSALS:
            continue
        if left_out is None:
            return form
        latest_left_out = (
            left_out
            if latest_left_out is None
            else max(latest_left_out, left_out, key=lambda candidate: candidate.message)
        )
    return () if latest_left_out is None else latest_left_out


class _Probe:
    """A chat of the same shape with a marker in place of each text; `places` maps markers to message parts."""

    def __init__(self, chat: Chat) -> None:
        self.places: dict[str, LeftOut] = {}
        messages = [self._mark_message(i, message) for i, message in enumerate(chat.messages)]
        values = {**chat.values, "continue_final_message": False}  # Handled by transformers; no template sees it.
        self.chat = replace(chat, messages=messages, values=values)

    def _mark_message(self, message_index: int, message: Message) -> Message:
        marked_message = dict(message)
        if has_text(message):
            marked_message["content"] = self._new_marker(message_index, "content")
        if calls := _calls(message):
            marked_message["tool_calls"] = [
                self._mark_call(message_index, call_index, call) for call_index, call in enumerate(calls)
            ]
        return marked_message

    def _mark_call(self, message_index: int, call_index: int, call: Mapping[str, Any]) -> Mapping[str, Any]:
        part_name, arguments = f"tool_calls[{call_index}]", call["function"]["arguments"]
        match arguments:
            case {} if arguments:
                arguments = {"key": self._new_marker(message_index, part_name)}
            case [_, *_]:
                arguments = [self._new_marker(message_index, part_name)]
            case str() if arguments:
                arguments = self._new_marker(message_index, part_name)
        return {
            **call,
            "function": {
                **call["function"],
                "name": self._new_marker(message_index, part_name),
                "arguments": arguments,
            },
        }

    def _new_marker(self, message_index: int, part: str) -> str:
        marker = f"Qz{len(self.places)}zQ"
        self.places[marker] = LeftOut(message_index, part)
        return marker

    def find_left_out(self, form: Sequence[Change]) -> LeftOut | None:
        """Return the part of the chat that the template drops in a form; None if it drops nothing.

        Raises: one of `REFUSALS`: the template does not accept the form.
        """
        chat = self.chat.apply(form)
        text = chat.render()
        if any(literal in text for literal in _type_error_texts(chat.messages)):
            raise TypeError("the template writes a value of another type than it expects")
        kept_messages = {message_part.message for marker, message_part in self.places.items() if marker in text}
        for marker, (message_index, part) in self.places.items():
            if marker not in text:
                return LeftOut(message_index, part if message_index in kept_messages else "role")
        roles = {message["role"] for message in chat.messages if _is_empty(message)} - {*MAY_BE_EMPTY}
        for role in sorted(roles):
            other_messages = [message for message in chat.messages if message["role"] != role or not _is_empty(message)]
            try:
                vanishes = bool(other_messages) and replace(chat, messages=other_messages).render() == text
            except REFUSALS:
                # The template refuses the chat without the empty message, so it needs that message for the order of
                # roles.
                continue
            if vanishes:
                empty_indices = (
                    message_index
                    for message_index, message in enumerate(self.chat.messages)
                    if message["role"] == role and _is_empty(message)
                )
                return LeftOut(next(empty_indices), "content")
        return None


def _type_error_texts(messages: Sequence[Message]) -> Iterator[str]:
    """Yield renderings of non-text values that show that a template took them for texts."""
    for message in messages:
        for content_part in message["content"] if isinstance(message.get("content"), list) else ():
            yield from (str(content_part), json.dumps(content_part))
        arguments = (call["function"]["arguments"] for call in _calls(message))
        yield from (str(argument) for argument in arguments if argument and isinstance(argument, Mapping | list))


def has_text(message: Message) -> bool:
    """Return whether a message has a text that is not blank."""
    return isinstance(content := message.get("content"), str) and bool(content.strip())


def _is_empty(message: Message) -> bool:
    return not (has_text(message) or _calls(message) or isinstance(message.get("content"), list | Mapping))


def _calls(message: Message) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


# --- changes


def with_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:
    """Return a message whose calls' arguments are replaced by `convert` of them."""
    if not (calls := _calls(message)):
        return message
    functions = ({**call["function"], "arguments": convert(call["function"].get("arguments"))} for call in calls)
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
    return [
        with_arguments(
            message, lambda arguments: arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
        )
    ]


def _with_short_ids(message: Message) -> list[Message]:
    """Shorten the ids of calls; equal ids stay equal."""
    new_message = dict(message)
    if "tool_call_id" in message:
        new_message["tool_call_id"] = _short_id(message["tool_call_id"])
    if calls := _calls(message):
        new_message["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in calls]
    return [new_message]


def _short_id(call_id: Any) -> str:
    text = str(call_id)
    is_short = len(text) == ID_LENGTH and text.isalnum()
    return text if is_short else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:ID_LENGTH]


def _separate_text(message: Message) -> list[Message]:
    """Move text that comes with calls into its own message, for templates that drop text in messages with calls."""
    if not (has_text(message) and _calls(message)):
        return [message]
    text = {key: value for key, value in _without_calls(message).items() if key not in THOUGHT_FIELDS}
    return [text, {**message, "content": ""}]


def _without_calls(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _split_calls(messages: Sequence[Message]) -> list[Message]:
    """Split calls into one message each, with its result after it, for templates that read one call per message.

    Such templates may attribute a result to the last call.
    """
    changed = list[Message]()
    places = dict[str, int]()  # Of the results that follow the latest calls: where each belongs in `changed`.
    for message in messages:
        calls = _calls(message)
        if len(calls) > 1:
            later = {key: value for key, value in message.items() if key not in THOUGHT_FIELDS} | {"content": ""}
            split = [{**(later if i else message), "tool_calls": [call]} for i, call in enumerate(calls)]
            places = {str(call.get("id")): len(changed) + i for i, call in enumerate(calls, start=1)}
            changed += split
        elif message["role"] == "tool" and (place := places.get(str(message.get("tool_call_id")))) is not None:
            changed.insert(place, message)
            places = {call_id: other + (other >= place) for call_id, other in places.items()}
        else:
            places = places if message["role"] == "tool" else {}
            changed.append(message)
    return changed


def _with_written_calls(message: Message) -> list[Message]:
    """Write calls into the content as Qwen and Hermes do, for templates without tool calls."""
    if not (calls := _calls(message)) or message["role"] != "assistant":
        return [message]
    texts = [message["content"]] if has_text(message) else []
    return [{**_without_calls(message), "content": "\n".join([*texts, *map(_call_text, calls)])}]


def _call_text(call: Mapping[str, Any]) -> str:
    name, arguments = json.dumps(call["function"]["name"], ensure_ascii=False), call["function"]["arguments"]
    return f'{WRITTEN.calls[0]}\n{{"name": {name}, "arguments": {_as_json(arguments)}}}\n{WRITTEN.calls_end}'


def _with_parts(message: Message) -> list[Message]:
    """Convert contents to lists of parts, for templates of vision models."""
    content = message.get("content")
    return [{**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message]


def _with_named_ids(messages: Sequence[Message]) -> list[Message]:
    """Write each call's name into its id, for Kimi's templates, which write nothing else of it."""
    n_calls, ids, changed = 0, dict[str, str](), list[Message]()
    for message in messages:
        new_message = dict(message)
        if calls := _calls(message):
            new_ids = [f"functions.{call['function']['name']}:{n_calls + i}" for i, call in enumerate(calls)]
            ids |= {str(call.get("id")): new_id for call, new_id in zip(calls, new_ids, strict=True)}
            new_message["tool_calls"] = [{**call, "id": new_id} for call, new_id in zip(calls, new_ids, strict=True)]
            n_calls += len(calls)
        if "tool_call_id" in message:
            call_id = message["tool_call_id"]
            new_message["tool_call_id"] = ids.get(str(call_id), call_id)
        changed.append(new_message)
    return changed


def _with_descriptions(chat: Chat) -> Chat:
    """Give functions without a description an empty one, for templates that concatenate a text and the description."""
    tools = [
        tool if _is_described(tool) else {**tool, "function": {**tool["function"], "description": ""}}
        for tool in chat.values.get("tools") or ()
    ]
    return replace(chat, values={**chat.values, "tools": tools}) if tools else chat


def _is_described(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return not isinstance(function, Mapping) or isinstance(function.get("description"), str)


def _all(change: Callable[[Sequence[Message]], list[Message]]) -> Change:
    """Return the change of a chat that rewrites its messages."""
    return lambda chat: replace(chat, messages=change(chat.messages))


def _each(change: Callable[[Message], list[Message]]) -> Change:
    """Return the change of a chat that rewrites each message as one or more messages."""
    return _all(lambda messages: list(chain.from_iterable(map(change, messages))))


WRITTEN_CALLS = _each(_with_written_calls)
CHANGES: tuple[Change, ...] = (  # Tried in this order, the likeliest first.
    *map(_each, (_with_json, _with_objects, _with_short_ids, _separate_text)),
    *map(_all, (_split_calls, _with_named_ids)),
    *(_each(_with_parts), _with_descriptions, WRITTEN_CALLS),
)


# --- thoughts


def with_read_thoughts(messages: Sequence[Message], template: str) -> list[Message]:
    """Return messages with the thoughts of earlier answers in the field that the template reads."""
    thoughts = [_thought_of(message) for message in messages]
    fields = [field for field in THOUGHT_FIELDS if _reads(field).search(template)]
    # Such a template refuses a chat that has answers with blocks and answers that are texts.
    in_blocks = any(thought is not None for thought in thoughts) and not fields and _THOUGHT_BLOCKS.search(template)
    changed = list[Message]()
    for message, thought in zip(messages, thoughts, strict=True):
        content = message.get("content")
        if in_blocks and message["role"] == "assistant" and isinstance(content, str | None):
            blocks = [{"type": "thoughts", "text": thought}] if thought else []
            blocks += [{"type": "response", "text": content}] if content else []
            changed.append({**message, "content": {"blocks": blocks}})
        elif thought is not None and _THOUGHT_PARTS.search(template) and isinstance(content, str):
            text_part = [{"type": "text", "text": content}] if content else []
            changed.append({**message, "content": [{"type": "thinking", "thinking": thought}, *text_part]})
        else:
            changed.append(message if thought is None else {**message, **dict.fromkeys(fields, thought)})
    return changed


def _thought_of(message: Message) -> str | None:
    if message["role"] != "assistant":
        return None
    return next((message[field] for field in THOUGHT_FIELDS if isinstance(message.get(field), str)), None)


@cache
def _reads(field: str) -> re.Pattern[str]:
    return re.compile(rf"(?:\.|\[['\"]|get\(['\"]){field}\b")
