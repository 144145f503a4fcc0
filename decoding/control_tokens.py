"""Text that spells a control token stays text: only what the chat template itself writes becomes control tokens.

Before rendering, each control token that is spelled in a caller's text is replaced by a random word that no template
changes. The run of text around such a word, up to the template's next tokens, is then encoded without the
vocabulary's added tokens. transformers' `sanitize_control_tokens` (from 5.20) does not cover the keys of objects, and
hides `</think>` in earlier answers from templates that remove thoughts there.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from ..core.errors import InvalidInput

# Prefix for encoding a run of text: some tokenizers put a space before any text, and this prefix takes it.
NEWLINE = "\n"


class Literals:
    """The control tokens spelled in texts, and the placeholder words that replace them during rendering.

    Control tokens are the tokenizer's special tokens, and those of its added tokens that the template writes. Added
    tokens in an assistant's message are kept, because it is the model's own text with thoughts and calls.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.words: dict[str, str] = {}  # Token -> its placeholder in the rendered text.
        template = str(getattr(tokenizer, "chat_template", None))
        added_tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special_words = tuple(token.content for token in added_tokens if token.special)
        template_words = (
            token.content for token in added_tokens if token.content in template and not token.content.isspace()
        )
        self._special, self._control = any_of(special_words), any_of((*special_words, *template_words))

    def hide(self, value: Any, is_answer: bool = False) -> Any:
        """Return a JSON value whose texts and keys have placeholder words instead of control tokens."""
        if isinstance(value, str):
            pattern = self._special if is_answer else self._control
            return pattern.sub(lambda match: self.words.setdefault(match[0], f"q{secrets.token_hex(8)}q"), value)
        if isinstance(value, Mapping):
            return {self.hide(key, is_answer): self.hide(inner, is_answer) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(inner, is_answer) for inner in value]
        return value

    def restore(self, text: str) -> str:
        """Return a rendered text with the placeholder words turned back into control tokens."""
        for token, word in self.words.items():
            text = text.replace(word, token)
        return text


def encode(tokenizer: Any, rendered: str, literals: Literals) -> list[int]:
    """Return the token ids of a rendered text; placeholder words stand for control tokens that must stay text.

    Raises: InvalidInput: the vocabulary can encode the spelling of a control token only as that token.
    """
    if not literals.words:
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    control_ids = {tokenizer.convert_tokens_to_ids(token): token for token in literals.words}
    ids = list[int]()
    for run, has_literal in _split_at_added(tokenizer, rendered, literals):
        if not has_literal:
            ids += tokenizer(run, add_special_tokens=False)["input_ids"]
            continue
        plain_ids = _encode_plain(tokenizer, literals.restore(run), is_first=not ids)
        if not control_ids.keys().isdisjoint(plain_ids):
            # The vocabulary has the control token as an ordinary word, too: encode the text in parts that do not form
            # it.
            plain_ids = [
                token_id
                for text_part in _split_literals(run, literals)
                for token_id in _encode_plain(tokenizer, text_part, is_first=not ids)
            ]
        if (
            spelled := next((control_ids[token_id] for token_id in plain_ids if token_id in control_ids), None)
        ) is not None:
            message = f"a text contains {spelled!r}, which this model's tokenizer can only encode as a control token"
            raise InvalidInput(f"{message}: remove it")
        ids += plain_ids
    return ids


def _split_at_added(tokenizer: Any, rendered: str, literals: Literals) -> Iterator[tuple[str, bool]]:
    """Yield the text in runs, and whether a run has a literal; such a run lies between two added tokens."""
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    words = set(literals.words.values())
    pieces = [*any_of((*words, *added)).split(rendered), ""]  # Alternates: text, token or word, text, …, text, "".
    joined = run_text = ""
    has_literal, token_before = False, None
    for text, delimiter in zip(pieces[::2], pieces[1::2], strict=True):
        run_text += text
        if delimiter in words:
            run_text, has_literal = run_text + delimiter, True
            continue
        token_after = added.get(delimiter)
        if has_literal:
            run_text = run_text.lstrip() if token_before is not None and token_before.rstrip else run_text
            run_text = run_text.rstrip() if token_after is not None and token_after.lstrip else run_text
            yield from [(joined, False)] if joined else []
            yield run_text, True
            joined = run_text = ""
        joined, run_text, has_literal, token_before = joined + run_text + delimiter, "", False, token_after
    if joined:
        yield joined, False


def _split_literals(text: str, literals: Literals) -> Iterator[str]:
    """Yield a text in parts, split after the first character of each literal control token."""
    tokens = {word: token for token, word in literals.words.items()}
    pieces, carried = any_of(tuple(tokens)).split(text), ""
    for i in range(0, len(pieces), 2):
        token = tokens[pieces[i + 1]] if i + 1 < len(pieces) else ""
        yield from filter(None, [carried + pieces[i] + token[:1]])
        carried = token[1:]


def _encode_plain(tokenizer: Any, text: str, is_first: bool) -> list[int]:
    """Tokenize a text without recognising added tokens in it."""
    if not is_first:
        newline_ids = _without_added(tokenizer, NEWLINE)
        ids = _without_added(tokenizer, NEWLINE + text)
        if newline_ids and ids[: len(newline_ids)] == newline_ids:
            return ids[len(newline_ids) :]
    return _without_added(tokenizer, text)


def _without_added(tokenizer: Any, text: str) -> list[int]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
    text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    words = [text]
    if backend.pre_tokenizer is not None:
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for word in words for token in backend.model.tokenize(word)]


@lru_cache(64)
def any_of(strings: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern with one group that matches any of the strings, preferring longer ones."""
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")
