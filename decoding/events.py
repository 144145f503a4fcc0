"""Events that a request yields while it is decoded: tokens, text, and the layer-set search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from ..core.events import Event
from ..core.plainly import WhyPlain, why_nothing_was_drafted
from ..core.records import LayerSetRecord
from ..core.rounds import NO_ROUNDS, RequestRounds
from ..core.types import Completion, Prompt, TokenLogprob, TokenSource, TracedToken, VerdictWord
from .context import Context


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """The prompt was read and gave the first token; a resumed request has no new token.

    `state` is the mean state (hidden_size,) of the prompt's tokens after the final norm, in float32; tokens read by
    another request count with the mean of that request's prompt.
    `logprobs` are those of `token_ids`, `prompt_logprobs` those of the prompt's tokens after the first; empty if not
    requested.
    """

    context: Context
    token_ids: Sequence[int]
    state: Tensor | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def traced(self) -> tuple[TracedToken, ...]:
        """The committed tokens; none of them was drafted."""
        return tuple(map(TracedToken, self.token_ids))


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One draft and its verification, with the committed tokens and, if requested, their `logprobs`.

    `traced` gives the source of each token, and `drafter` what drafted ("target": nothing was drafted).
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
    drafter: TokenSource = "target"

    @property
    def shared_s(self) -> float:
        """The request's share of the round's seconds; the shares of concurrent requests add up to the elapsed time."""
        return (self.draft_s + self.verify_s) / self.context.load.checked


class Turn(NamedTuple):
    """A prompt and its completion; the turns of a chat get the ids `id#1`, `id#2`, …"""

    prompt: Prompt
    completion: Completion


@dataclass(frozen=True, slots=True)
class GenerateInfo:
    """How a completion was decoded: method, layer set and its origin, a note for the user, reason for not drafting.

    `ratio` is plain seconds / drafted seconds, as measured for the plan; `saved_s` is the resulting saving in the
    completion's drafted rounds: the extra seconds of plain decoding.
    """

    method: str
    record: LayerSetRecord | None = None
    version: int | None = None
    verdict: VerdictWord | None = None
    fallback: str | None = None
    note: str = ""
    why_plain: WhyPlain | None = None
    ratio: float | None = None
    saved_s: float = 0.0
    rounds: RequestRounds = NO_ROUNDS

    def of(self, completion: Completion) -> GenerateInfo:
        """Return a copy with the reason why nothing was drafted for a completion, unless one is set already."""
        return replace(self, why_plain=self.why_plain or why_nothing_was_drafted(completion))


class Generated(NamedTuple):
    """A completion and how it was decoded."""

    prompt: Prompt
    completion: Completion
    info: GenerateInfo


@dataclass(frozen=True, slots=True)
class TextAdded:
    """A final piece of text of a completion.

    It has `n_tokens` tokens, `traced` to their sources, with `logprobs` if requested; `prompt_logprobs` are
    those of the prompt's tokens after the first one.
    """

    text: str
    n_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    traced: tuple[TracedToken, ...] = ()


Shown = TextAdded | Generated  # Events that a client of a request receives.
# All events of a request; `Event` comes from the layer-set search.
WorkEvent = Prefilled | Round | Turn | Shown | Event
