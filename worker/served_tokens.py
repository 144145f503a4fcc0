"""The prompt and the tokens of a request to a served model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..core.answer_forms import AnswerForm, forms_of, merged
from ..core.errors import InvalidInput
from ..core.requests import CompletionRequest, Piece
from ..core.types import DEFAULT_TASK, Prompt
from ..decoding.grammar import Grammar
from ..decoding.session import Session
from ..decoding.turn_tokens import template_text
from ..models.runtime import Runtime
from ..tasks.model import Model

TAIL = 16  # Tokens at a prompt's end that are searched for an open thinking tag.
ANSWER_SHARE = 3 / 4  # Share of the remaining KV memory that an answer without max_new_tokens may use.
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # Byte tokens in sentencepiece vocabularies.
# Byte-level BPE vocabularies (GPT-2) represent each byte by a printable character.
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]


class Tokens:
    """Tokens of one tokenizer: their text or exact bytes, and the markers of thoughts in its chats."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # The tokenizers library exposes a decoder's components only in its pickled state, which is JSON.
        state = b"" if backend is None or backend.decoder is None else backend.decoder.__getstate__()
        self._has_bytes, self._has_marks = b"ByteLevel" in state, "▁".encode() in state
        self._added_token_ids = set(getattr(tokenizer, "added_tokens_decoder", ()))

    def piece(self, token_id: int) -> Piece:
        """Return the text or bytes that a token adds to a text."""
        in_bytes = self._bytes(token_id)
        try:
            return str(self._tokenizer.decode([token_id])) if in_bytes is None else in_bytes.decode()
        except UnicodeDecodeError:
            assert in_bytes is not None
            return list(in_bytes)

    def _bytes(self, token_id: int) -> bytes | None:
        """Return a token's bytes; None where the vocabulary has none."""
        if token_id in self._added_token_ids or not (self._has_bytes or self._has_marks):
            return None
        token_text = self._tokenizer.convert_ids_to_tokens(token_id)
        if self._has_bytes:
            return (
                bytes(map(BYTE_OF.__getitem__, token_text))
                if token_text and all(letter in BYTE_OF for letter in token_text)
                else None
            )
        if (byte := _BYTE.fullmatch(token_text or "")) is not None:
            return bytes([int(byte[1], 16)])
        return None if token_text is None else token_text.replace("▁", " ").encode()

    @property
    def forms(self) -> tuple[str, ...]:
        """The names of the chat template's rows in the table of answer forms."""
        return forms_of(template_text(self._tokenizer))

    @property
    def form(self) -> AnswerForm:
        """How the model writes thoughts and calls."""
        return merged(self.forms)

    @cached_property
    def end_of_thought(self) -> int | None:
        """The token that ends a thought; None if thoughts do not end with a single token, or may recur."""
        form, vocabulary = self.form, self._tokenizer.get_vocab()
        ends = [vocabulary[mark] for mark in form.thought_ends if mark in vocabulary]
        return None if form.rethinks or not ends else int(ends[0])

    def ends_in_thought(self, token_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends within a thought, which the completion continues."""
        marks = self.form.thinks
        return bool(marks) and str(self._tokenizer.decode(list(token_ids[-TAIL:]))).rstrip().endswith(marks)


def session_of(model: Model, request: CompletionRequest, most_tokens: int | None = None) -> tuple[Session, Prompt]:
    """Return a request's session, and its prompt as token ids.

    Args:   most_tokens: number of tokens that fit the KV memory, for requests without a length; None: no limit.
    Raises: InvalidInput: the prompt cannot be encoded, or a field cannot be used. ContextOverflow: the prompt does not
            fit the model's context, or the completion after it.
    """
    grammar = None
    if request.forced:
        functions = {f"tools[{i}].function.parameters": request.tools[i]["function"] for i in request.forced}
        grammar = Grammar.call(functions)
    elif request.json_schema is not None:
        with about("json_schema"):
            grammar = Grammar.json_schema(request.json_schema)
    end_options = request.stop, request.ignore_eos, request.stop_token_ids, request.min_new_tokens
    shown_marks = ""
    if request.messages:
        form = merged(forms_of(template_text(model.runtime.tokenizer)))
        shown_marks = form.marks(with_calls=bool(request.tools))
    session = Session(model.runtime, request.sampling, 1, *end_options, grammar, shown_marks)
    ids, source = token_ids_of(session, request), prompt_field(request)
    n_free_positions = model.runtime.max_positions - len(ids)
    n_memory_tokens = n_free_positions if most_tokens is None else int(ANSWER_SHARE * (most_tokens - len(ids)))
    default_length = (
        min(n_free_positions, n_memory_tokens) if n_memory_tokens > 0 else n_free_positions
    )  # Where `n_memory_tokens` <= 0, the engine refuses the prompt.
    session.max_new_tokens = max(1, default_length if request.max_new_tokens is None else request.max_new_tokens)
    with about(source if n_free_positions < 1 else "max_new_tokens"):
        model.runtime.check_context(len(ids), session.max_new_tokens)
    return session, Prompt("prompt", request.task or DEFAULT_TASK, token_ids=tuple(ids))


def token_ids_of(session: Session, request: CompletionRequest) -> list[int]:
    """Return the token ids of a request's prompt, even if they exceed the model's context.

    Raises: InvalidInput: it cannot be encoded. ContextOverflow: it is far too long and was not encoded completely.
    """
    with about(prompt_field(request)):
        if request.token_ids:
            ids = list(request.token_ids)
            check_vocabulary(ids, session.runtime, prompt_field(request))
        elif request.messages:
            ids = session.encode_chat(request.messages, request.tools, request.template)
            is_begun = request.template.get("add_generation_prompt", True)
            if is_begun and (request.forced or request.json_schema is not None):
                tokenizer = session.runtime.tokenizer
                begin = Tokens(tokenizer).form.answer_begin
                ids += tokenizer(begin, add_special_tokens=False)["input_ids"] if begin else []
        else:
            ids = session.encode_text(request.text, request.special_tokens)
        if not ids:
            raise InvalidInput("the prompt has no tokens: write at least one word")
    return ids


def prompt_field(request: CompletionRequest) -> str:
    """Return the request's field to name in errors about its prompt."""
    return "messages" if request.messages else "text"


def check_vocabulary(token_ids: Sequence[int], runtime: Runtime, param: str) -> None:
    """Raises: InvalidInput: the model has no such token."""
    for token_id in token_ids:
        if not 0 <= token_id < runtime.vocab_size:
            problem = f"there is no token {token_id}: use token ids from 0 to {runtime.vocab_size - 1}"
            raise InvalidInput(problem, param)


@contextmanager
def about(param: str) -> Iterator[None]:
    """Set this field in errors that name no field of the request."""
    try:
        yield
    except InvalidInput as error:
        error.param = error.param or param
        raise
