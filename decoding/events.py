"""What a request reports while it is decoded, in tokens, in text, and of the search beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from ..core.events import Event
from ..core.plainly import WhyPlain, why_nothing_was_drafted
from ..core.records import LayerSetRecord
from ..core.types import Completion, Prompt, TokenLogprob, TracedToken, VerdictWord
from .context import Context


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """The prompt was read, and gave its first token; a resumed request has no new one.

    `state` is the mean state (hidden_size,) behind the final norm, in float32, of the prompt's tokens; those that
    another request has read count as the mean of what it has read of its prompt.
    `logprobs` are those of `token_ids`, `prompt_logprobs` those of the prompt's tokens after the first; empty where
    not wanted.
    """

    context: Context
    token_ids: Sequence[int]
    state: Tensor | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def traced(self) -> tuple[TracedToken, ...]:
        """The tokens, which nothing has drafted."""
        return tuple(map(TracedToken, self.token_ids))


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One draft and its verification, and the tokens that they committed, with their `logprobs` where wanted.

    `traced` says where each of the tokens came from.
    """

    context: Context
    token_ids: Sequence[int]
    n_steps: int
    n_accepted: int
    n_rows: int
    draft_s: float
    verify_s: float
    logprobs: tuple[TokenLogprob, ...] = ()
    traced: tuple[TracedToken, ...] = ()


class Turn(NamedTuple):
    """A completion of a prompt; of several turns each prompt has an id of its own, `id#1`, `id#2`, …"""

    prompt: Prompt
    completion: Completion


@dataclass(frozen=True, slots=True)
class GenerateInfo:
    """How a completion was decoded: method, layer set and its origin, a note for the user, and why plainly, if so."""

    method: str
    record: LayerSetRecord | None = None
    version: int | None = None
    verdict: VerdictWord | None = None
    fallback: str | None = None
    note: str = ""
    why_plain: WhyPlain | None = None

    def of(self, completion: Completion) -> GenerateInfo:
        """Return it with the reason why nothing was drafted for a completion, where none was known before."""
        return replace(self, why_plain=self.why_plain or why_nothing_was_drafted(completion))


class Generated(NamedTuple):
    """A completion, and how it was decoded."""

    prompt: Prompt
    completion: Completion
    info: GenerateInfo


@dataclass(frozen=True, slots=True)
class TextAdded:
    """Text that a completion has grown by, final.

    It came with `n_tokens` tokens, `traced` to their sources, with their `logprobs` where wanted; `prompt_logprobs` are
    those of the prompt's tokens after the first one.
    """

    text: str
    n_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    traced: tuple[TracedToken, ...] = ()


Shown = TextAdded | Generated  # What a client of a request gets.
WorkEvent = Prefilled | Round | Turn | Shown | Event  # All that a request may report; `Event` is of its search.
