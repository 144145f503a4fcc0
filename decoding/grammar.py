"""Grammars that completions must follow, compiled by llguidance, and the processor that forbids all other tokens.

Source: llguidance (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor
from transformers import LogitsProcessor

from ..core.errors import InvalidInput, ParametersError, SchemaError
from ..core.json_schemas import has_arguments, relax
from .json_grammar import LIMITS, advised, json_grammar, problem_of

MAX_VOCABULARIES = 4  # Maximum tokenizers cached in llguidance's form.
MAX_GRAMMARS = 64  # Maximum compiled grammars in the cache.


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that completions must follow: `source` is in llguidance's syntax, `words` is its name in messages."""

    source: str
    words: str

    @classmethod
    def json_object(cls) -> Grammar:
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """Return the grammar of a schema's JSON values.

        Raises: SchemaError: it cannot be compiled, or takes too much work; the message names the part.
        """
        return cls(LLMatcher.grammar_from_json_schema(json_grammar(schema)), "the JSON schema")

    @classmethod
    def call(cls, functions: Mapping[str, Mapping[str, Any]]) -> Grammar:
        """Return the grammar of `{"name": …, "arguments": …}`, a call of one of the functions.

        Args:   functions: OpenAI's objects, by the place of their parameters in the request. Each schema of parameters
                is a separate document: `#` in its references is its root.
        Raises: ParametersError: a schema cannot be used; the error's `param` is its place.
        """
        call_rules, schema_rules = list[str](), list[str]()
        for parameters_path, function in functions.items():
            call_prefix = f'{{"name": {_quote(function["name"])}, "arguments": '
            if not has_arguments(function.get("parameters")):
                call_rules.append(_quote(call_prefix + "{}}"))
                continue
            try:
                schema = json_grammar(_arguments_schema(function))
            except SchemaError as error:
                raise ParametersError(str(error), parameters_path) from error
            call_rules.append(f'{_quote(call_prefix)} arguments_{len(schema_rules)} "}}"')
            schema_rules.append(f"arguments_{len(schema_rules)}: %json {json.dumps(schema)}")
        source = LLMatcher.grammar_from_lark("\n".join([f"start: {' | '.join(call_rules)}", *schema_rules]))
        if problem := problem_of(source, "offer fewer, or simplify their parameters"):
            raise ParametersError(f"the tools cannot be used together: {problem}", "tools")
        return cls(source, "the grammar of the tools")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of the texts that a regular expression, in Rust's `regex` syntax, matches as a whole.

        Raises: InvalidInput: it cannot be compiled, or takes too much work.
        """
        source = LLMatcher.grammar_from_regex(pattern)
        if problem := problem_of(source, "correct or simplify it"):
            raise InvalidInput(f"the regular expression cannot be used: {problem}")
        return cls(source, "the regular expression")

    def mask(self, tokenizer: Any, n_vocab: int, n_prompt: int, stop_token_ids: Sequence[int]) -> GrammarMask:
        """Return the processor of a request.

        Args:   n_vocab: number of logits per row. n_prompt: number of prompt tokens, which the grammar does not cover.
                stop_token_ids: tokens that end a text of the grammar, at least one.
        Raises: InvalidInput: there is no stop token, or llguidance cannot read the tokenizer.
        """
        if not stop_token_ids:
            raise InvalidInput("this model has no stop token to end a text with: decode without a grammar")
        vocabulary = _vocabulary(tokenizer, n_vocab, tuple(sorted(stop_token_ids)))
        return GrammarMask(_matcher(vocabulary, self.source, self.words).deep_copy(), n_prompt, stop_token_ids)


class GrammarMask(LogitsProcessor):
    """Forbids every token that the grammar does not allow next; if none is allowed, all but the stop tokens.

    Its single matcher moves back and forth to the text in question, so that drafts, every node of a tree and the target
    get the same masks as plain decoding.
    """

    def __init__(self, matcher: LLMatcher, n_prompt: int, stop_token_ids: Sequence[int]) -> None:
        self.matcher, self.n_prompt = matcher, n_prompt
        self.stop_token_ids = sorted(stop_token_ids)
        self._read: list[int] = []  # Tokens that the matcher has consumed.
        self._n_committed = 0  # Number of leading `_read` tokens that are committed and never rolled back.

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores (1, vocab) after `input_ids` (1, tokens), minus infinity where a token is forbidden."""
        n_known = min(self._n_committed, input_ids.shape[1] - self.n_prompt)
        new_ids = input_ids[0, self.n_prompt + n_known :].tolist()
        allowed = self.allowed(new_ids, scores.shape[-1], n_known).to(scores.device)
        masked_scores = scores.masked_fill(~allowed, float("-inf"))
        # If other processors or a smaller draft vocabulary exclude all allowed tokens, restore them.
        if bool(masked_scores.isneginf().all()):
            masked_scores = torch.where(allowed, 0.0, masked_scores)
        return masked_scores

    def allowed(self, generated: Sequence[int], n_vocab: int, n_known: int = 0) -> Tensor:
        """Return a mask of the tokens allowed next: bool (vocab,); all True if the text violates the grammar.

        Args:   generated: the generated tokens without the first `n_known`, which are committed.
        Raises: InvalidInput: the grammar needs too much work at this point.
        """
        stop_mask = torch.zeros(n_vocab, dtype=torch.bool)
        stop_mask[self.stop_token_ids] = True
        if not set(self.stop_token_ids).isdisjoint(generated):
            return stop_mask
        # The text violates the grammar, which only lossy verifiers permit.
        if not self._move_matcher(generated, n_known):
            return torch.ones_like(stop_mask)
        grammar_mask = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8)[:n_vocab] != 0
        self._check_matcher()
        if self.matcher.is_stopped():
            return stop_mask
        return grammar_mask | stop_mask if self.matcher.is_accepting() else grammar_mask & ~stop_mask

    def forced(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that the grammar forces after the committed `token_ids` (prompt included).

        They are split as the tokenizer would split that text; the model may split it differently.
        """
        new_ids = token_ids[self.n_prompt + self._n_committed :]
        if not set(self.stop_token_ids).isdisjoint(new_ids) or not self._move_matcher(new_ids, self._n_committed):
            return []
        self._n_committed = len(self._read)
        return [] if self.matcher.is_stopped() else list(self.matcher.compute_ff_tokens())

    def _check_matcher(self) -> None:
        """Raise InvalidInput if the grammar took too much work: the matcher would take no further token."""
        if self.matcher.is_error():
            problem = advised(self.matcher.get_error(), "use a simpler schema or expression")
            raise InvalidInput(f"the grammar cannot be followed any further: {problem}")

    def _move_matcher(self, generated: Sequence[int], n_known: int) -> bool:
        """Advance the matcher past `n_known` committed tokens and `generated`; return whether it accepts them all.

        Raises: InvalidInput: the grammar takes too much work here.
        """
        consumed = self._read[n_known:]
        id_pairs = enumerate(zip(consumed, generated, strict=False))
        n_same = next(
            (index for index, (token_id, new_id) in id_pairs if token_id != new_id), min(len(consumed), len(generated))
        )
        if n_same < len(consumed):
            self.matcher.rollback(len(consumed) - n_same)
        n_accepted = self.matcher.try_consume_tokens(list(generated[n_same:]))
        self._check_matcher()
        self._read[n_known + n_same :] = generated[n_same : n_same + n_accepted]
        self._n_committed = min(self._n_committed, n_known + n_same)
        return n_same + n_accepted == len(generated)


def _arguments_schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, restricted to objects."""
    schema = function["parameters"]
    argument_types = schema.get("type", "object")
    if argument_types != "object" and not (isinstance(argument_types, list) and "object" in argument_types):
        raise SchemaError(
            f"the JSON schema cannot be used: the arguments of a call are an object, not {argument_types!r}"
        )
    schema = {**schema, "type": "object"}
    return relax(schema) if function.get("strict") is False else schema


def _quote(text: str) -> str:
    """Return a text as a quoted string of JSON and of llguidance's grammars."""
    return json.dumps(text, ensure_ascii=False)


@lru_cache(maxsize=MAX_GRAMMARS)
def _matcher(vocabulary: LLTokenizer, source: str, words: str) -> LLMatcher:
    """Return a grammar's initial matcher, which callers must copy; raise InvalidInput if it does not compile."""
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        problem = advised(matcher.get_error(), "use a simpler one, or decode without it")
        raise InvalidInput(f"{words} cannot be used with this model's tokens: {problem}")
    return matcher


@lru_cache(maxsize=MAX_VOCABULARIES)
def _vocabulary(tokenizer: Any, n_vocab: int, stop_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Return a tokenizer in llguidance's form; raise InvalidInput if llguidance cannot read it."""
    from llguidance.hf import from_tokenizer  # It imports transformers' converters of tokenizers.

    try:
        n_tokens = max(n_vocab, tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=True))
        return from_tokenizer(tokenizer, n_tokens, list(stop_token_ids))
    except (AttributeError, ValueError) as error:
        problem = advised(str(error), "decode without a grammar")
        raise InvalidInput(f"no grammar can be used with this model's tokenizer: {problem}") from error
