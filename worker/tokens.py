"""What single tokens are: their bytes, exact where a decoded text has half of a character, and where a thought ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

THINK, THOUGHT = "<think>", "</think>"
TAIL = 16  # tokens at a prompt's end that say whether it has begun a thought
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte in the vocabularies of sentencepiece
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
# Vocabularies of bytes write a byte as the character of its number, and those that would not show behind 255, in order.
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}

Piece = str | list[int]  # a token's text; its bytes, where these are none


class Tokens:
    """The tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # What a decoder consists of is told by its state alone, which is JSON.
        state = b"" if backend is None or backend.decoder is None else backend.decoder.__getstate__()
        self._has_bytes, self._has_marks = b"ByteLevel" in state, "▁".encode() in state
        self._added = set(getattr(tokenizer, "added_tokens_decoder", ()))

    def piece(self, token_id: int) -> Piece:
        """Return what a token adds to a text."""
        own = self._bytes(token_id)
        try:
            return str(self._tokenizer.decode([token_id])) if own is None else own.decode()
        except UnicodeDecodeError:
            assert own is not None
            return list(own)

    def _bytes(self, token_id: int) -> bytes | None:
        """Return a token's bytes; None where the vocabulary does not tell them."""
        if token_id in self._added or not (self._has_bytes or self._has_marks):
            return None
        word = self._tokenizer.convert_ids_to_tokens(token_id)
        if self._has_bytes:
            return bytes(BYTE_OF[each] for each in word) if word and all(each in BYTE_OF for each in word) else None
        if (byte := _BYTE.fullmatch(word or "")) is not None:
            return bytes([int(byte[1], 16)])
        return None if word is None else word.replace("▁", " ").encode()

    @cached_property
    def end_of_thought(self) -> int | None:
        """The token that ends a thought; None: the model's chat template knows none."""
        if THOUGHT not in str(getattr(self._tokenizer, "chat_template", None)):
            return None
        found = self._tokenizer.get_vocab().get(THOUGHT)
        return None if found is None else int(found)

    def ends_in_thought(self, token_ids: Sequence[int]) -> bool:
        """Tell whether a prompt leaves a thought open, which the completion then goes on with."""
        return str(self._tokenizer.decode(list(token_ids[-TAIL:]))).rstrip().endswith(THINK)
