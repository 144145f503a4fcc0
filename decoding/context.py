"""What a request has committed so far, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..core.types import FinishReason
from ..models.buffer import KVBuffer
from ..models.runtime import Runtime
from .rule import TokenRule


@dataclass(slots=True)
class Context:
    """A request in flight.

    Slots 0 … n-2 of `buffer` hold the target's keys and values of `token_ids`; the last token, the root of the next
    draft, is not in it yet and will go to slot n-1, behind which drafts and scratch rows are written.
    """

    runtime: Runtime
    buffer: KVBuffer
    rule: TokenRule
    token_ids: list[int]
    n_prompt: int

    @property
    def root_slot(self) -> int:
        """Where the last committed token's keys and values go."""
        return len(self.token_ids) - 1

    @property
    def generated(self) -> list[int]:
        """Tokens committed after the prompt."""
        return self.token_ids[self.n_prompt :]


class EndRule(Protocol):
    """Decides where a completion ends."""

    @property
    def max_new_tokens(self) -> int:
        """Most tokens it can have."""
        ...

    def crop(self, generated: Sequence[int], block: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """As much of `block` as belongs to the completion, and why it ended there; None if it goes on."""
        ...

    def cut(self, text: str) -> int | None:
        """Where the text of the completion ends early, None if nowhere."""
        ...


@dataclass(frozen=True, slots=True)
class Ending:
    """When a completion is over: a stop token, a stop string, or the length."""

    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    to_text: Callable[[Sequence[int]], str] | None = field(default=None, repr=False)

    def crop(self, generated: Sequence[int], block: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """As much of `block` as belongs to the completion, and why it ended there; None if it goes on."""
        room = self.max_new_tokens - len(generated)
        for n, token_id in enumerate(block[:room], 1):
            if token_id in self.stop_token_ids:
                return list(block[:n]), "stop"
            if self.stop_strings and self.cut(self._tail(generated, block[:n])) is not None:
                return list(block[:n]), "stop_string"
        return list(block[:room]), "length" if len(block) >= room else None

    def cut(self, text: str) -> int | None:
        """Where the first stop string begins in `text`, None if there is none."""
        found = [at for at in (text.find(stop) for stop in self.stop_strings) if at >= 0]
        return min(found, default=None)

    def _tail(self, generated: Sequence[int], block: Sequence[int]) -> str:
        """The end of the text, long enough for a stop string that the last token completes."""
        assert self.to_text is not None  # built together with stop_strings
        # A token that shows is at least a byte of UTF-8; 8 more for special tokens and characters cut at the start.
        reach = max(len(stop.encode(errors="surrogatepass")) for stop in self.stop_strings) + 8
        return self.to_text([*generated, *block][-reach:])
