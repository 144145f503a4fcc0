"""From a line of a stream to token ids and back: chat templates, turns, stop tokens, and the model's own defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import LogitsProcessor, MinNewTokensLengthLogitsProcessor

from ..core.errors import ContextOverflow, InvalidInput, SettingsError
from ..core.serialization import LARGEST
from ..core.types import Completion, Prompt, Sampling
from ..models.runtime import Runtime
from .context import Ending, ResumePoint, TokenRule
from .engine import Work, alone
from .grammar import Grammar
from .loop import decoding
from .methods import Method


class Turn(NamedTuple):
    """A completion of a prompt; of several turns each prompt has an id of its own, `id#1`, `id#2`, …"""

    prompt: Prompt
    completion: Completion


@dataclass(eq=False)
class Session:
    """Decodes prompts on one runtime with one way of sampling; every completion starts from the request's seed.

    Args:   stop_token_ids: tokens that end a completion beside the model's own. ignore_eos: the model's own do not end
            it. min_new_tokens: before so many no stop token is chosen, and no stop string ends it. grammar: what
            completions keep to, by lossless methods only; where it allows nothing more, they end.
    Raises: SettingsError: a stop string is empty, or the model has no such token.
            InvalidInput: the grammar cannot be read with the model's tokenizer.
    """

    runtime: Runtime
    sampling: Sampling
    max_new_tokens: int
    stop_strings: Sequence[str] = ()
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    min_new_tokens: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if "" in self.stop_strings:
            raise SettingsError("a stop string is empty, and would end every completion at once: leave it out", "stop")
        if self.min_new_tokens < 0:
            words = f"min_new_tokens {self.min_new_tokens} is out of range: use 0 or more"
            raise SettingsError(words, "min_new_tokens")
        self._check_tokens("stop_token_ids", self.stop_token_ids)
        self._check_tokens("logit_bias", [token_id for token_id, _ in self.sampling.logit_bias])
        self.generation_config: Any = getattr(self.runtime.hf_model, "generation_config", None)
        if self.grammar is not None:
            self.rule()  # one that cannot be read with this tokenizer is refused here

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, up to its first turn.

        Raises: InvalidInput: the model has no tokenizer or chat template for it, or it has no tokens.
        """
        return self._encode(prompt, self._messages(prompt))

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text; none, perhaps.

        Raises: InvalidInput: the model has no tokenizer.
        """
        return list(self._tokenizer()(text)["input_ids"])

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **template: Any
    ) -> list[int]:
        """Token ids of a chat by the model's template, which gets the `tools` and the values of `template`.

        Raises: InvalidInput: there is none, or it refuses the messages.
        """
        return self._templated("the prompt", messages, tools=list(tools) or None, **template)

    def check(self, prompt: Prompt) -> int:
        """Positions that the prompt's first turn needs, completion included.

        Raises: ContextOverflow, InvalidInput: it cannot be decoded on this model; the message names the prompt.
        """
        ids = self.encode(prompt)
        with _naming(prompt.id):
            self.runtime.check_context(len(ids), self.room(prompt))
        return len(ids) + self.room(prompt)

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

        Beside them come the events of `decoding`, which takes the `options`.

        Args:   answers: texts of the turns that are done, which are not decoded again. resume_from: where the turn
                after them was interrupted.
        Raises: ContextOverflow: a turn with all before it does not fit; the turns before it were yielded.
                SettingsError: there is a grammar, which a lossy method would not keep to.
        """
        if self.grammar is not None and method.lossy:
            raise SettingsError(f"method {method.name} is lossy and keeps to no grammar: use a lossless one")
        said, turns = list(answers), list[Turn]()
        while len(said) < n_turns(prompt):
            turn = turn_of(prompt, len(said))
            ids = self._encode(turn, self._messages(prompt, said))
            with _naming(turn.id):
                ending, rule = self.ending(self.room(turn), prompt.stop), self.rule(len(ids), prompt.sample)
                done = yield from decoding(self.runtime, ids, method, rule, ending, resume_from, **options)
            said.append(done.text)
            resume_from = None
            turns.append(Turn(turn, done))
            yield turns[-1]
        return turns

    def rule(self, n_prompt: int = 0, sample: int = 0) -> TokenRule:
        """A fresh rule for a prompt of so many tokens, its draws starting from the seed plus the sample's number."""
        stops, constraints = sorted(self._stop_token_ids()), list[LogitsProcessor]()
        if self.min_new_tokens and stops:
            device = str(self.runtime.device)
            constraints.append(MinNewTokensLengthLogitsProcessor(n_prompt, self.min_new_tokens, stops, device))
        if self.grammar is not None:
            tokenizer, own_stops = self.runtime.tokenizer, sorted(self._own_stop_token_ids())
            constraints.append(self.grammar.mask(tokenizer, self.runtime.vocab_size, n_prompt, own_stops))
        sampling = replace(self.sampling, seed=(self.sampling.seed + sample) % LARGEST) if sample else self.sampling
        return TokenRule.of(sampling, self.generation_config, n_prompt, constraints)

    def ending(self, max_new_tokens: int, stop: Sequence[str] = ()) -> Ending:
        """When a completion of this session ends; `stop` are strings beside the session's own."""
        stops, strings = self._stop_token_ids(), tuple(dict.fromkeys((*self.stop_strings, *stop)))
        return Ending(max_new_tokens, stops, strings, self._to_text, self.min_new_tokens)

    def room(self, prompt: Prompt) -> int:
        """Most tokens of each of the prompt's completions."""
        return prompt.max_new_tokens or self.max_new_tokens

    def _messages(self, prompt: Prompt, said: Sequence[str] = ()) -> Sequence[Mapping[str, str]] | None:
        """The messages up to the turn behind the answers `said`; None for raw text."""
        if prompt.messages:
            return prompt.messages
        texts = [text for pair in zip(prompt.turns, [*said, None], strict=False) for text in pair if text is not None]
        roles = cycle(("user", "assistant"))
        return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)] or None

    def _encode(self, prompt: Prompt, messages: Sequence[Mapping[str, str]] | None) -> list[int]:
        tokenizer = self._tokenizer()
        if prompt.token_ids:
            ids = list(prompt.token_ids)
        elif messages is None:
            ids = list(tokenizer(prompt.text)["input_ids"])
        else:
            ids = self._templated(f"prompt {prompt.id!r}", messages)
        if not ids:
            raise InvalidInput(f"prompt {prompt.id!r} has no tokens: write at least one word")
        return ids

    def _check_tokens(self, what: str, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.runtime.vocab_size:
                raise SettingsError(
                    f"{what} names token {token_id}, but this model has tokens 0 to {self.runtime.vocab_size - 1}: use"
                    " ids of its own tokenizer",
                    what,
                )

    def _tokenizer(self) -> Any:
        if self.runtime.tokenizer is None:
            raise InvalidInput("this model has no tokenizer: put its tokenizer's files next to its weights")
        return self.runtime.tokenizer

    def _templated(self, name: str, messages: Sequence[Mapping[str, Any]], **values: Any) -> list[int]:
        tokenizer = self.runtime.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            raise InvalidInput(
                f"{name} is a chat, but this model's tokenizer has no chat template:"
                " give plain text, or use an instruct model"
            )
        values = {"add_generation_prompt": True, **values}
        try:
            encoded = tokenizer.apply_chat_template(list(messages), return_dict=True, **values)
        except (TemplateError, ValueError) as error:  # templates raise it for roles that their model was not trained on
            raise InvalidInput(
                f"{name} does not suit this model's chat template ({error}): change its messages"
            ) from error
        return list(encoded["input_ids"])

    def _stop_token_ids(self) -> frozenset[int]:
        """The tokens that end a completion."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else self._own_stop_token_ids())

    def _own_stop_token_ids(self) -> frozenset[int]:
        """The generation config's stop tokens, else the tokenizer's."""
        stops = getattr(self.generation_config, "eos_token_id", None)
        if stops is None:
            stops = getattr(self.runtime.tokenizer, "eos_token_id", None)
        if stops is None:
            return frozenset()
        return frozenset([stops] if isinstance(stops, int) else stops)

    def _to_text(self, token_ids: Sequence[int]) -> str:
        return str(self.runtime.tokenizer.decode(list(token_ids), skip_special_tokens=True))


def n_turns(prompt: Prompt) -> int:
    """How many completions a prompt has."""
    return max(1, len(prompt.turns))


def turn_of(prompt: Prompt, number: int) -> Prompt:
    """The prompt under the name of one of its turns (0-based), which is its own where there is only one."""
    return prompt if len(prompt.turns) < 2 else replace(prompt, id=f"{prompt.id}#{number + 1}")


@contextmanager
def _naming(prompt_id: str) -> Iterator[None]:
    """Say which prompt does not fit the context."""
    try:
        yield
    except ContextOverflow as error:
        raise ContextOverflow(f"prompt {prompt_id!r}: {error}") from error
