"""What a chat template reads of a request, so that the server can name what has no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Const, Getattr
from transformers.utils import chat_template_utils

from ..core.messages import TemplateInputs
from .chat_forms import REFUSALS, THOUGHT_FIELDS, Chat, Message, rendered_in_form
from .template_limits import LimitExceeded, limited

_CALL_ID = "Qz0000000"
_CALL = {"id": _CALL_ID, "type": "function", "function": {"name": "Qz", "arguments": {"Qz": "Qz"}}}
_USER: Message = {"role": "user", "content": "Qz"}
_CHATS: tuple[tuple[Message, ...], ...] = (  # A template may refuse one of them.
    (_USER, {"role": "assistant", "content": "Qz"}),
    (
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "Qz", "tool_call_id": _CALL_ID},
    ),
)


def template_inputs(tokenizer: Any) -> TemplateInputs | None:
    """Return what the chat templates of a tokenizer read; None: it has none.

    A key of messages counts as read if a template has its name anywhere, as an attribute or as a text.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    utils: Any = chat_template_utils
    values, keys = set[str](), set[str]()
    for source in template.values() if isinstance(template, Mapping) else [template]:
        try:
            with limited():  # transformers caches the compiled template, which has to be in this sandbox.
                tree = utils._compile_jinja_template(source).environment.parse(source)
        except (*REFUSALS, LimitExceeded):
            return TemplateInputs()  # The template refuses every chat.
        values |= find_undeclared_variables(tree)
        keys |= {attribute.attr for attribute in tree.find_all(Getattr)}
        keys |= {constant.value for constant in tree.find_all(Const) if isinstance(constant.value, str)}
    if not keys.isdisjoint((*THOUGHT_FIELDS, "thoughts")):  # See `with_read_thoughts`.
        keys.update(THOUGHT_FIELDS)
    return TemplateInputs(tuple(sorted(values)), None if _may_write_any_key(tokenizer) else tuple(sorted(keys)))


def _may_write_any_key(tokenizer: Any) -> bool:
    """Return whether the template writes a key of messages without naming it, or refuses all chats of this test."""
    key, marker = "Qz_key", "Qz_value"
    texts = [rendered_in_form(Chat(tokenizer, [{**message, key: marker} for message in chat], {})) for chat in _CHATS]
    return not any(texts) or any(marker in text for text in texts)
