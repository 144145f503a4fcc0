"""The special tokens of a chat's answer: those that end its turn, and those kept in its text for the parsers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from ..core.answer_forms import forms_of, merged
from .chat_forms import Chat, rendered_in_form
from .control_tokens import any_of

_ANSWER, _NEXT = "Qz1zQ", "Qz2zQ"  # Texts that no template changes or writes itself.
# Found tokens by tokenizer and template.
_TURN_ENDS: WeakKeyDictionary[Any, dict[str, frozenset[int]]] = WeakKeyDictionary()


def template_text(tokenizer: Any) -> str:
    """Return the chat template, or all named ones in one text; "" without one."""
    return str(getattr(tokenizer, "chat_template", None) or "")


def turn_end_ids(tokenizer: Any) -> frozenset[int]:
    """Return the special tokens that end an answer: the one that the template writes after it, and those of its form.

    A generation config may lack them and name only the end-of-text token.
    """
    template = template_text(tokenizer)
    if not template:
        return frozenset()
    ends = _TURN_ENDS.setdefault(tokenizer, {})
    if template not in ends:
        ends[template] = frozenset(_find_turn_ends(tokenizer, template))
    return ends[template]


def _find_turn_ends(tokenizer: Any, template: str) -> Iterator[int]:
    special = {token.content: token_id for token_id, token in _special_tokens(tokenizer)}
    form = merged(forms_of(template))
    yield from (special[token] for token in form.turn_ends if token in special)
    behind = any_of(tuple(special)).findall(_text_behind_answer(tokenizer))
    yield from (special[token] for token in [token for token in behind if token not in form.marks()][:1])


def _text_behind_answer(tokenizer: Any) -> str:
    """Return the template's text between an answer and the next message; "" if it refuses the chat."""
    roles = {"user": "Qz0zQ", "assistant": _ANSWER}
    messages = [*({"role": role, "content": text} for role, text in roles.items()), {"role": "user", "content": _NEXT}]
    text = rendered_in_form(Chat(tokenizer, messages, {"add_generation_prompt": False}))
    return text.rpartition(_ANSWER)[2].partition(_NEXT)[0]


def hidden_ids(tokenizer: Any, shown_marks: str, stop_token_ids: Iterable[int]) -> frozenset[int] | None:
    """Return the special tokens omitted from a completion's text; None: all, because none is in `shown_marks`.

    Stop tokens are always omitted.
    """
    special = dict(_special_tokens(tokenizer))
    shown = {token_id for token_id, token in special.items() if token.content in shown_marks} - {*stop_token_ids}
    return frozenset(special) - shown if shown else None


def _special_tokens(tokenizer: Any) -> Iterator[tuple[int, Any]]:
    tokens = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return ((token_id, token) for token_id, token in tokens if token.special and token.content.strip())
