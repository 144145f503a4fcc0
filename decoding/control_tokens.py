"""Text that spells a control token stays text: only what the chat template itself writes becomes control tokens.

While a template is rendered, a random word that no template changes stands in place of each control token that a
caller's text spells. The run of text around such a word, up to the next tokens of the template, is then encoded without
the vocabulary's added tokens. transformers' `sanitize_control_tokens` (from 5.20) does not cover the keys of objects,
and hides `</think>` in earlier answers from the templates that cut thoughts off there.
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
    """The control tokens that texts spell, and the words that stand for them while a template is rendered.

    Control tokens are the tokenizer's special tokens, and those of its added tokens that the template writes. Of the
    latter, an assistant's message keeps what it has: it is the model's own text, with its thoughts and calls.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.words: dict[str, str] = {}  # Token -> word that stands for it in the rendered text.
        template = str(getattr(tokenizer, "chat_template", None))
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = tuple(token.content for token in added if token.special)
        written = (token.content for token in added if token.content in template and not token.content.isspace())
        self._special, self._control = any_of(special), any_of((*special, *written))

    def hidden(self, value: Any, is_answer: bool = False) -> Any:
        """Return a JSON value whose texts and keys have placeholder words instead of control tokens."""
        if isinstance(value, str):
            pattern = self._special if is_answer else self._control
            return pattern.sub(lambda match: self.words.setdefault(match[0], f"q{secrets.token_hex(8)}q"), value)
        if isinstance(value, Mapping):
            return {self.hidden(key, is_answer): self.hidden(part, is_answer) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.hidden(part, is_answer) for part in value]
        return value

    def shown(self, text: str) -> str:
        """Return a rendered text with the placeholder words turned back into control tokens."""
        for token, word in self.words.items():
            text = text.replace(word, token)
        return text


def encode(tokenizer: Any, rendered: str, literals: Literals) -> list[int]:
    """Return the token ids of a rendered text; placeholder words stand for control tokens that must stay text.

    Raises: InvalidInput: the vocabulary has nothing but the control token for a text that spells it.
    """
    if not literals.words:
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    control = {tokenizer.convert_tokens_to_ids(token): token for token in literals.words}
    ids = list[int]()
    for text, has_literal in _runs(tokenizer, rendered, literals):
        if not has_literal:
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
            continue
        plain = _encode_plain(tokenizer, literals.shown(text), is_first=not ids)
        if not control.keys().isdisjoint(plain):
            # The vocabulary has the control token as an ordinary word, too: encode the text in parts that do not form
            # it.
            plain = [i for part in _parts(text, literals) for i in _encode_plain(tokenizer, part, is_first=not ids)]
        if (spelled := next((control[i] for i in plain if i in control), None)) is not None:
            words = f"a text spells {spelled!r}, which is a control token to this model's tokenizer and no text"
            raise InvalidInput(f"{words}: leave it out")
        ids += plain
    return ids


def _runs(tokenizer: Any, rendered: str, literals: Literals) -> Iterator[tuple[str, bool]]:
    """Yield the text in runs, and whether a run has a literal; such a run lies between two added tokens."""
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    words = set(literals.words.values())
    pieces = [*any_of((*words, *added)).split(rendered), ""]  # Alternates: text, token or word, text, …, text, "".
    waiting = run = ""
    has_literal, before = False, None
    for text, delimiter in zip(pieces[::2], pieces[1::2], strict=True):
        run += text
        if delimiter in words:
            run, has_literal = run + delimiter, True
            continue
        after = added.get(delimiter)
        if has_literal:
            run = run.lstrip() if before is not None and before.rstrip else run
            run = run.rstrip() if after is not None and after.lstrip else run
            yield from [(waiting, False)] if waiting else []
            yield run, True
            waiting = run = ""
        waiting, run, has_literal, before = waiting + run + delimiter, "", False, after
    if waiting:
        yield waiting, False


def _parts(text: str, literals: Literals) -> Iterator[str]:
    """Yield a text in parts, split after the first character of each literal control token."""
    tokens = {word: token for token, word in literals.words.items()}
    pieces, begun = any_of(tuple(tokens)).split(text), ""
    for i in range(0, len(pieces), 2):
        token = tokens[pieces[i + 1]] if i + 1 < len(pieces) else ""
        yield from filter(None, [begun + pieces[i] + token[:1]])
        begun = token[1:]


def _encode_plain(tokenizer: Any, text: str, is_first: bool) -> list[int]:
    """Tokenize a text without recognising added tokens in it."""
    if not is_first:
        before = _without_added(tokenizer, NEWLINE)
        ids = _without_added(tokenizer, NEWLINE + text)
        if before and ids[: len(before)] == before:
            return ids[len(before) :]
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
