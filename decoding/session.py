"""From a prompt to token ids and back: chat templates, turns, stop tokens, and the model's own defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from transformers import LogitsProcessor, MinNewTokensLengthLogitsProcessor

from ..core.errors import ContextOverflow, InvalidInput, SettingsError
from ..core.serialization import LARGEST
from ..core.streams import EMPTY_STOP
from ..core.types import Prompt, Sampling, n_turns
from ..models.prompts import refuse_tokens
from ..models.runtime import Runtime
from .chats import ChatPrompt
from .context import Ending, ResumePoint, TokenRule
from .engine import alone
from .events import Turn
from .grammar import Grammar
from .loop import decoding
from .methods import Method
from .turn_tokens import hidden_ids, turn_end_ids
from .work import Work

# Lengths in characters per context position. Texts longer than LONG are tokenized in pieces of PIECE, to refuse a
# prompt that is too long without encoding all of it.
MAX_CHARS_PER_TOKEN, PIECE_CHARS_PER_TOKEN = 16, 4


@dataclass(eq=False)
class Session:
    """Decodes prompts on one runtime with the same sampling; every completion starts from the request's seed.

    Args:   stop_token_ids: additional tokens that end a completion. ignore_eos: the model's own end tokens do not end
            it. min_new_tokens: number of tokens before which no stop token is chosen and no stop string counts.
            grammar: constraint on completions, for lossless methods only; a completion ends where it allows nothing
            more. shown_marks: special tokens that occur in this text stay in the text of completions.
    Raises: SettingsError: a stop string is empty, a number is below 0, or the model has no such token.
            InvalidInput: the grammar cannot be used with the model's tokenizer.
    """

    runtime: Runtime
    sampling: Sampling
    max_new_tokens: int
    stop_strings: Sequence[str] = ()
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    min_new_tokens: int = 0
    grammar: Grammar | None = None
    shown_marks: str = ""

    def __post_init__(self) -> None:
        if "" in self.stop_strings:
            raise SettingsError(EMPTY_STOP, "stop")
        for name in ("max_new_tokens", "min_new_tokens"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} {getattr(self, name)} is out of range: use 0 or more", name)
        refuse_tokens("stop_token_ids", self.stop_token_ids, self.runtime.vocab_size)
        refuse_tokens("logit_bias", dict(self.sampling.logit_bias), self.runtime.vocab_size)
        self.generation_config: Any = getattr(self.runtime.hf_model, "generation_config", None)
        if self.grammar is not None:
            self.rule()  # Refuse a grammar that cannot be compiled for this tokenizer.
        self._hidden_ids = (
            hidden_ids(self._tokenizer(), self.shown_marks, self._model_stop_token_ids()) if self.shown_marks else None
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, up to its first turn.

        Raises: InvalidInput: the model has no tokenizer or chat template for it, or it has no tokens.
        """
        return self._encode(prompt, self._messages(prompt))

    def encode_text(self, text: str, special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, possibly none.

        Raises: InvalidInput: the model has no tokenizer. ContextOverflow: the text is much longer than the context.
        """
        tokenizer = self._tokenizer()
        self._check_length(text)
        return list(tokenizer(text, add_special_tokens=special_tokens)["input_ids"])

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] = {},
    ) -> list[int]:
        """Return the token ids of a chat by the model's template, which gets the `tools` and the values of `template`.

        Raises: InvalidInput: there is no template, it refuses the chat, or it would drop the part that `param` names.
                ContextOverflow: the chat is much longer than the context.
        """
        return self._apply_template(messages, {"tools": list(tools) or None, **template})

    def check(self, prompt: Prompt) -> int:
        """Return the positions that the prompt's first turn needs, completion included.

        Raises: ContextOverflow, InvalidInput: it cannot be decoded on this model; the message names the prompt.
        """
        prompt_ids = self.encode(prompt)
        with _add_prompt_id(prompt.id):
            self.runtime.check_context(len(prompt_ids), self.room(prompt))
        return len(prompt_ids) + self.room(prompt)

    def run(self, prompt: Prompt, method: Method) -> list[Turn]:
        """Decode all turns of a prompt by itself; see `request`."""
        return alone(self.request(prompt, method))

    def request(
        self,
        prompt: Prompt,
        method: Method,
        answers: Sequence[str] = (),
        resume_from: ResumePoint | None = None,
        **options: Any,
    ) -> Work[list[Turn]]:
        """Decode a prompt, pass by pass; yield a `Turn` per turn of the user, later ones seeing the earlier answers.

        Also yields the events of `decoding`, which takes the `options`.

        Args:   answers: texts of the finished turns, which are not decoded again. resume_from: state of the turn
                after them if it was interrupted.
        Raises: ContextOverflow: a turn with all before it does not fit; the turns before it were yielded.
                SettingsError: a lossy method cannot follow a grammar.
        """
        if self.grammar is not None and method.lossy:
            raise SettingsError(f"method {method.name} is lossy and cannot follow a grammar: use a lossless one")
        answer_texts, turns = list(answers), list[Turn]()
        while len(answer_texts) < n_turns(prompt):
            turn = turn_of(prompt, len(answer_texts))
            prompt_ids = self._encode(turn, self._messages(prompt, answer_texts))
            with _add_prompt_id(turn.id):
                ending, rule = self.ending(self.room(turn), prompt.stop), self.rule(len(prompt_ids), prompt.sample)
                completion = yield from decoding(self.runtime, prompt_ids, method, rule, ending, resume_from, **options)
            answer_texts.append(completion.text)
            resume_from = None
            turns.append(Turn(turn, completion))
            yield turns[-1]
        return turns

    def rule(self, n_prompt: int = 0, sample: int = 0) -> TokenRule:
        """Return a new token rule for a prompt of `n_prompt` tokens, seeded by the seed plus the sample's number."""
        stop_ids, constraints = sorted(self._stop_token_ids()), list[LogitsProcessor]()
        if self.min_new_tokens and stop_ids:
            device = str(self.runtime.device)
            constraints.append(MinNewTokensLengthLogitsProcessor(n_prompt, self.min_new_tokens, stop_ids, device))
        if self.grammar is not None:
            tokenizer, model_stops = self.runtime.tokenizer, sorted(self._model_stop_token_ids())
            constraints.append(self.grammar.mask(tokenizer, self.runtime.vocab_size, n_prompt, model_stops))
        sampling = replace(self.sampling, seed=(self.sampling.seed + sample) % LARGEST) if sample else self.sampling
        return TokenRule.of(sampling, self.generation_config, n_prompt, constraints)

    def ending(self, max_new_tokens: int, stop: Sequence[str] = ()) -> Ending:
        """Return the ending conditions of a completion; `stop` are stop strings in addition to the session's."""
        stop_ids, stop_strings = self._stop_token_ids(), tuple(dict.fromkeys((*self.stop_strings, *stop)))
        return Ending(max_new_tokens, stop_ids, stop_strings, self.to_text, self.min_new_tokens)

    def room(self, prompt: Prompt) -> int:
        return prompt.max_new_tokens or self.max_new_tokens

    def _messages(self, prompt: Prompt, answer_texts: Sequence[str] = ()) -> Sequence[Mapping[str, str]] | None:
        if prompt.messages:
            return prompt.messages
        texts = [
            text
            for prompt_and_answer in zip(prompt.turns, [*answer_texts, None], strict=False)
            for text in prompt_and_answer
            if text is not None
        ]
        roles = cycle(("user", "assistant"))
        return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)] or None

    def _encode(self, prompt: Prompt, messages: Sequence[Mapping[str, str]] | None) -> list[int]:
        tokenizer = self._tokenizer()
        if prompt.token_ids:
            prompt_ids = list(prompt.token_ids)
        elif messages is None:
            prompt_ids = list(tokenizer(prompt.text)["input_ids"])
        else:
            with _add_prompt_id(prompt.id, InvalidInput):
                prompt_ids = self._apply_template(messages)
        if not prompt_ids:
            raise InvalidInput(f"prompt {prompt.id!r} has no tokens: write at least one word")
        return prompt_ids

    def _tokenizer(self) -> Any:
        if self.runtime.tokenizer is None:
            raise InvalidInput("this model has no tokenizer: put the tokenizer files next to its weights")
        return self.runtime.tokenizer

    def _apply_template(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any] = {}) -> list[int]:
        chat = ChatPrompt(self.runtime.tokenizer, messages, values)
        if len(str(messages)) + len(str(values)) > MAX_CHARS_PER_TOKEN * self.runtime.max_positions:
            self._check_length(chat.text)
        return chat.encode()

    def _check_length(self, text: str) -> None:
        """Check in pieces whether a very long text fits: encoding all of it blocks other requests for seconds per MB.

        Raises: ContextOverflow: it does not.
        """
        max_tokens, tokenizer = self.runtime.max_positions, self._tokenizer()
        n_tokens, starts = (
            0,
            range(
                0, len(text) if len(text) > MAX_CHARS_PER_TOKEN * max_tokens else 0, PIECE_CHARS_PER_TOKEN * max_tokens
            ),
        )
        for n_pieces, start in enumerate(starts):
            n_tokens += len(
                tokenizer(text[start : start + PIECE_CHARS_PER_TOKEN * max_tokens], add_special_tokens=False)[
                    "input_ids"
                ]
            )
            if n_tokens - n_pieces > max_tokens:  # Each cut between pieces may add one token.
                raise ContextOverflow(
                    f"this model's maximum context length is {max_tokens} tokens, but the prompt has more than"
                    f" {n_tokens}: shorten it"
                )

    def _stop_token_ids(self) -> frozenset[int]:
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else self._model_stop_token_ids())

    def _model_stop_token_ids(self) -> frozenset[int]:
        """Return the stop tokens of the generation config (or the tokenizer), and those that end a chat's turn."""
        owners = (self.generation_config, self.runtime.tokenizer)
        eos_settings = (getattr(owner, "eos_token_id", None) for owner in owners)
        stop_ids = next((token_ids for token_ids in eos_settings if token_ids is not None), ())
        own_ids = frozenset([stop_ids] if isinstance(stop_ids, int) else stop_ids)
        return own_ids | turn_end_ids(self.runtime.tokenizer)

    def to_text(self, token_ids: Sequence[int]) -> str:
        """Return the tokens as text, without special tokens except the shown ones."""
        tokenizer, hidden = self.runtime.tokenizer, self._hidden_ids
        if hidden is None:
            return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))
        shown_ids = [token_id for token_id in token_ids if token_id not in hidden]
        return str(tokenizer.decode(shown_ids, skip_special_tokens=False))


def turn_of(prompt: Prompt, number: int) -> Prompt:
    """Return the prompt with the id of one of its turns (0-based); with a single turn the id stays."""
    return prompt if len(prompt.turns) < 2 else replace(prompt, id=f"{prompt.id}#{number + 1}")


def hf_generate(
    session: Session, token_ids: Sequence[int], max_new_tokens: int, stop: Sequence[str] = (), **options: Any
) -> tuple[int, ...]:
    """Decode with transformers' own greedy `generate`, on the same model object and with the same stop conditions.

    Args: stop: additional stop strings. options: further options of `generate`, such as `assistant_model`.
    """
    model: Any = session.runtime.hf_model
    ending = session.ending(max_new_tokens, stop)
    if ending.stop_strings:
        options = {**options, "stop_strings": list(ending.stop_strings), "tokenizer": session.runtime.tokenizer}
    prompt_tensor = torch.tensor([token_ids], device=session.runtime.device)
    output_ids = model.generate(
        prompt_tensor,
        attention_mask=torch.ones_like(prompt_tensor),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(ending.stop_token_ids) or None,
        **options,
    )
    return tuple(output_ids[0, len(token_ids) :].tolist())


@contextmanager
def _add_prompt_id(prompt_id: str, error_class: type[InvalidInput] = ContextOverflow) -> Iterator[None]:
    """Add the prompt's id to errors of a kind."""
    try:
        yield
    except error_class as error:
        raise type(error)(f"prompt {prompt_id!r}: {error}", error.param) from error
