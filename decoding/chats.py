"""Chat to token ids by the model's template: no message is dropped, and no text becomes a control token."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.errors import InvalidInput
from ..models.prompts import no_template
from .chat_forms import (
    REFUSALS,
    Chat,
    LeftOut,
    Message,
    has_text,
    remembered_form,
    with_arguments,
    with_read_thoughts,
)
from .control_tokens import Literals, encode
from .template_limits import LimitExceeded


class ChatPrompt:
    """A chat as the text and the token ids of a prompt.

    Args:   messages: in OpenAI's form, with texts as contents. A call's arguments are JSON, or whatever an earlier
            answer had in their place: truncated JSON, or not an object. values: other values for the template, such
            as `tools`, and other arguments of transformers' `apply_chat_template`.
    Raises: InvalidInput: there is no template, it runs or grows without end, it refuses the chat, or it would drop the
            part that `param` names.
    """

    def __init__(self, tokenizer: Any, messages: Sequence[Message], values: Mapping[str, Any]) -> None:
        template = getattr(tokenizer, "chat_template", None)
        if template is None:
            raise no_template("this")
        messages = [with_arguments(message, _parse_arguments) for message in messages]
        messages = with_read_thoughts(messages, str(template))
        if "developer" not in str(template):
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
            ]
        chat = Chat(tokenizer, messages, values)
        self._tokenizer, self._literals = tokenizer, Literals(tokenizer)
        try:
            form = remembered_form(chat)
            if isinstance(form, LeftOut):
                raise _left_out_error(chat, form)
            self._rendered = self._render(chat.apply(form))
        except LimitExceeded as error:
            raise InvalidInput(str(error)) from error

    def _render(self, chat: Chat) -> str:
        """Return the rendered text, with placeholder words for control tokens spelled in texts."""
        hide = self._literals.hide
        messages = [hide(message, is_answer=message["role"] == "assistant") for message in chat.messages]
        values = {name: hide(value) for name, value in chat.values.items()}
        try:
            return replace(chat, messages=messages, values=values).render()
        except REFUSALS as error:
            message_text = f"the chat does not suit this model's chat template ({error}): change its messages"
            raise InvalidInput(message_text, _refused_role(chat, error)) from error

    @property
    def text(self) -> str:
        return self._literals.restore(self._rendered)

    def encode(self) -> list[int]:
        """Return the token ids; they equal transformers' own if no text spells a control token.

        Raises: InvalidInput: a text spells a token that the tokenizer cannot encode in any other way.
        """
        return encode(self._tokenizer, self._rendered, self._literals)


def _parse_arguments(arguments: Any) -> Any:
    """Parse a call's JSON; return invalid JSON, such as a truncated object, unchanged."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return {} if parsed is None else parsed


def _left_out_error(chat: Chat, left_out: LeftOut) -> InvalidInput:
    message, part_name = chat.messages[left_out.message], f"messages[{left_out.message}].{left_out.part}"
    if left_out.part == "role":
        advice = f"messages[{left_out.message}] with the role {message['role']!r}: use a role that it supports"
    elif left_out.part == "content":
        advice = f"{part_name}: " + ("send it as a separate message" if has_text(message) else "write something")
    else:
        advice = f"{part_name}: remove it"
    return InvalidInput(f"this model's chat template drops {advice}", part_name)


def _refused_role(chat: Chat, error: Exception) -> str | None:
    """Return the JSON path of the first role that the template refuses; None if its error is not about a role."""

    def is_refused(n_messages: int) -> bool:
        try:
            replace(chat, messages=chat.messages[:n_messages]).render()
        except REFUSALS:
            return True
        return False

    if "role" not in str(error).lower():
        return None
    return f"messages[{bisect_left(range(1, len(chat.messages)), True, key=is_refused)}].role"
