"""What a completion may say: grammars of llguidance, and the processor that forbids all other tokens.

Source: llguidance (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import LogitsProcessor

from ..core.errors import InvalidInput

MOST_VOCABULARIES = 4  # tokenizers that are kept as llguidance reads them
MOST_GRAMMARS = 64  # that are kept compiled
# Half a second to compile at most, and a tenth for a mask: others wait meanwhile.
LIMITS = LLParserLimits(max_grammar_size=10_000, initial_lexer_fuel=100_000)
MOST_CHARACTERS = 1 << 18  # of a grammar
MOST_SEARCHED = 1 << 17  # characters of parts that are compiled by themselves to find where a schema is wrong
DEFINITIONS = ("$defs", "definitions")
EXCERPT = re.compile(r"^ *\d+ \|.*", re.MULTILINE | re.DOTALL)
BY_NAME = (*DEFINITIONS, "properties", "patternProperties")  # keys of schemas by name


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that completions keep to: `source` as llguidance reads it; `words` name it in messages."""

    source: str
    words: str

    @classmethod
    def json_object(cls) -> Grammar:
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """Return the grammar of a schema's JSON values.

        Raises: InvalidInput: it cannot be compiled, or takes too much work; the message names the part.
        """
        try:
            source = LLMatcher.grammar_from_json_schema(dict(schema))
        except ValueError:
            raise InvalidInput(
                "the JSON schema cannot be used: it is nested too deeply, or an integer in it is not below 2^64"
            ) from None
        if problem := _problem(source):
            raise InvalidInput(f"the JSON schema cannot be used, at {_place(schema, problem)}: {problem}")
        return cls(source, "the JSON schema")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of the texts that a regular expression, in Rust's `regex` syntax, matches as a whole.

        Raises: InvalidInput: it cannot be compiled, or takes too much work.
        """
        source = LLMatcher.grammar_from_regex(pattern)
        if problem := _problem(source):
            raise InvalidInput(f"the regular expression cannot be used: {problem}")
        return cls(source, "the regular expression")

    def mask(self, tokenizer: Any, n_vocab: int, n_prompt: int, stop_token_ids: Sequence[int]) -> GrammarMask:
        """Return the processor of a request.

        Args:   n_vocab: logits of a row. n_prompt: tokens of the prompt, which the grammar does not cover.
                stop_token_ids: what ends a text of the language, at least one.
        Raises: InvalidInput: there is none, or llguidance cannot read the tokenizer.
        """
        if not stop_token_ids:
            raise InvalidInput("this model has no stop token to end a text with: decode without a grammar")
        vocabulary = _vocabulary(tokenizer, n_vocab, tuple(sorted(stop_token_ids)))
        return GrammarMask(_matcher(vocabulary, self.source, self.words).deep_copy(), n_prompt, stop_token_ids)


class GrammarMask(LogitsProcessor):
    """Forbids every token that cannot follow what was generated; where none can, all but the stop tokens.

    Its one matcher is moved back and forward to the text that it is asked about, so that drafts, every node of a tree
    and the target get the masks that plain decoding would.
    """

    def __init__(self, matcher: LLMatcher, n_prompt: int, stop_token_ids: Sequence[int]) -> None:
        self.matcher, self.n_prompt = matcher, n_prompt
        self.stop_token_ids = sorted(stop_token_ids)
        self._read: list[int] = []  # tokens that the matcher has consumed
        self._n_committed = 0  # of them, those that stay: what is asked for next begins with them

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores (1, vocab) after `input_ids` (1, tokens), minus infinity where a token is forbidden."""
        n_known = min(self._n_committed, input_ids.shape[1] - self.n_prompt)
        newest = input_ids[0, self.n_prompt + n_known :].tolist()
        allowed = self.allowed(newest, scores.shape[-1], n_known).to(scores.device)
        masked = scores.masked_fill(~allowed, float("-inf"))
        if bool(masked.isneginf().all()):  # other processors, or a narrower draft model, have ruled out all the rest
            masked = torch.where(allowed, 0.0, masked)
        return masked

    def allowed(self, generated: Sequence[int], n_vocab: int, n_known: int = 0) -> Tensor:
        """Return which tokens may come next: bool (vocab,); all of them behind a text that is not of the language.

        Args:   generated: without the first `n_known`, which are committed ones.
        Raises: InvalidInput: the grammar takes too much work here.
        """
        ended = torch.zeros(n_vocab, dtype=torch.bool)
        ended[self.stop_token_ids] = True
        if not set(self.stop_token_ids).isdisjoint(generated):
            return ended
        if not self._move(generated, n_known):  # no lossless verifier gets here
            return torch.ones_like(ended)
        found = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8)[:n_vocab] != 0
        if self.matcher.is_error():
            raise InvalidInput(f"the grammar cannot be followed any further: {_line(self.matcher.get_error())}")
        if self.matcher.is_stopped():
            return ended
        return found | ended if self.matcher.is_accepting() else found & ~ended

    def forced(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that the grammar leaves no choice about behind the committed `token_ids`, prompt included.

        They are as the tokenizer would split that text; the model may split it another way.
        """
        newest = token_ids[self.n_prompt + self._n_committed :]
        if not set(self.stop_token_ids).isdisjoint(newest) or not self._move(newest, self._n_committed):
            return []
        self._n_committed = len(self._read)
        return [] if self.matcher.is_stopped() else list(self.matcher.compute_ff_tokens())

    def _move(self, generated: Sequence[int], n_known: int) -> bool:
        """Move the matcher behind `n_known` committed tokens and those; return whether it accepts them all."""
        read = self._read[n_known:]
        pairs = enumerate(zip(read, generated, strict=False))
        n_same = next((n for n, (own, other) in pairs if own != other), min(len(read), len(generated)))
        if n_same < len(read):
            self.matcher.rollback(len(read) - n_same)
        n_more = self.matcher.try_consume_tokens(list(generated[n_same:]))
        self._read[n_known + n_same :] = generated[n_same : n_same + n_more]
        self._n_committed = min(self._n_committed, n_known + n_same)
        return n_same + n_more == len(generated)


def _problem(source: str) -> str:
    """Return why a grammar cannot be compiled, "" if it can."""
    return f"more than {MOST_CHARACTERS} characters" if len(source) > MOST_CHARACTERS else _compiling(source)


@lru_cache(maxsize=MOST_GRAMMARS)
def _compiling(source: str) -> str:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(source, limits=LIMITS)
    return _line(messages[0]) if is_error else ""


@lru_cache(maxsize=MOST_GRAMMARS)
def _matcher(vocabulary: LLTokenizer, source: str, words: str) -> LLMatcher:
    """Return a grammar's matcher at its start, not to be moved; raise InvalidInput where it does not compile."""
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise InvalidInput(f"{words} cannot be used with this model's tokens: {_line(matcher.get_error())}")
    return matcher


@lru_cache(maxsize=MOST_VOCABULARIES)
def _vocabulary(tokenizer: Any, n_vocab: int, stop_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Return a tokenizer's tokens as llguidance reads them; raise InvalidInput where it cannot."""
    try:
        n_tokens = max(n_vocab, tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=True))
        return from_tokenizer(tokenizer, n_tokens, list(stop_token_ids))
    except (AttributeError, ValueError) as error:
        raise InvalidInput(
            f"llguidance cannot read this model's tokenizer ({_line(str(error))}): decode without a grammar"
        ) from error


def _place(schema: Mapping[str, Any], problem: str) -> str:
    """Return the innermost part of a schema that has the problem by itself, as a JSON pointer.

    In a schema of many parts it may be one further out.
    """
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
    place, parts, left = "#", _parts(schema), MOST_SEARCHED
    while left > 0 and (found := next(parts, None)) is not None:
        name, part = found
        source = LLMatcher.grammar_from_json_schema({**definitions, **part})
        left -= len(source)
        if _problem(source) == problem:
            place, parts = f"{place}/{name}", _parts(part)
    return place


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the schemas directly within a schema, by their places; definitions first."""
    for key in sorted(schema, key=lambda key: key not in DEFINITIONS):
        value = schema[key]
        if key in BY_NAME and isinstance(value, Mapping):
            within = [(f"{key}/{name}", part) for name, part in value.items()]
        elif isinstance(value, list):
            within = [(f"{key}/{number}", part) for number, part in enumerate(value)]
        else:
            within = [(key, value)]
        yield from ((name, part) for name, part in within if isinstance(part, Mapping))


def _line(message: str) -> str:
    """Return a message of llguidance on one line, without the excerpt of its own form of the grammar, and its state."""
    return " ".join(EXCERPT.sub("", message).partition("<state>")[0].split())
