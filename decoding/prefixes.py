"""What finished requests read: kept in memory for texts that begin alike, by value where memory is short.

A text is worth what it would take to read again, times how likely it comes again, per byte.
Source: GreedyDual-Size-Frequency (Cherkasova, 1998): the clock is the value of the last evicted text, so that what was
not used for long falls behind, and uses count as often as they came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.costs import context_bucket
from ..core.requests import owner_of
from ..models.buffer import KVBuffer
from ..models.rows import Pass
from .work import Slots

MIN_USED_FRACTION = 1 / 2  # Minimum share of a kept text that counts as a use of it.
FADING_WEIGHT = 0.1  # Weight of the latest pass in the mean seconds of reading a token.


@dataclass(slots=True, eq=False)
class Prefix:
    """A text whose keys and values other requests can reuse."""

    slots: Slots
    buffer: KVBuffer
    token_ids: NDArray[np.int64]
    n_uses: float = 1.0
    used_at: float = 0.0  # The cache's clock at the latest use.
    is_kept: bool = False

    @property
    def n_bytes(self) -> int:
        return self.buffer.capacity * self.slots.runtime.slot_bytes + self.buffer.state_bytes

    def common(self, slots: Slots, token_ids: NDArray[np.int64]) -> int:
        """Return the length of the common prefix with `token_ids`, whose keys and values can be reused."""
        if self.slots.runtime is not slots.runtime or self.slots.salt != slots.salt:
            return 0
        n_compared = min(len(self.token_ids), len(token_ids))
        is_same = self.token_ids[:n_compared] == token_ids[:n_compared]
        return n_compared if is_same.all() else int(is_same.argmin())

    def reachable(self, slots: Slots, token_ids: NDArray[np.int64]) -> int:
        """Return behind how many of `token_ids` another text can go on from this one's buffer."""
        return self.buffer.reachable(self.common(slots, token_ids))


@dataclass(slots=True)
class ReadCosts:
    """Seconds of reading a token of a prompt, by the number of tokens before it, as passes took them."""

    _seconds: dict[int, float] = field(default_factory=dict)  # By context bucket.

    def learn(self, passes: Sequence[Pass], seconds: float) -> None:
        """Learn from passes of the whole target that read prompts together."""
        if any(pass_.kind != "beside" or pass_.layers is not None for pass_ in passes):
            return
        n_tokens = sum(len(pass_.rows.token_ids) for pass_ in passes)
        bucket = context_bucket(sum(pass_.rows.first_slot for pass_ in passes) // len(passes))
        latest, mean = seconds / n_tokens, self._seconds.get(bucket)
        self._seconds[bucket] = latest if mean is None else mean + FADING_WEIGHT * (latest - mean)

    def of(self, start: int, end: int) -> float:
        """Return the seconds of reading the tokens from `start` to `end`; as many as tokens before any was timed."""
        if not self._seconds:
            return float(end - start)
        seconds, place = 0.0, start
        while place < end:
            bucket = context_bucket(place + 1)
            n_tokens = min(bucket, end) - place
            nearest = min(self._seconds, key=lambda known: max(known, bucket) / min(known, bucket))
            seconds, place = seconds + n_tokens * self._seconds[nearest], place + n_tokens
        return seconds


class Match(NamedTuple):
    """The longest common prefix of a text with another, and that one; None: there is none."""

    n_tokens: int
    prefix: Prefix | None


class PrefixCache:
    """Kept texts, least recently used first."""

    def __init__(self) -> None:
        self.costs = ReadCosts()
        self._prefixes: list[Prefix] = []
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._prefixes)

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._prefixes)

    @property
    def n_bytes(self) -> int:
        return sum(prefix.n_bytes for prefix in self._prefixes)

    @property
    def n_tokens(self) -> int:
        return sum(len(prefix.token_ids) for prefix in self._prefixes)

    def add(self, prefix: Prefix) -> None:
        """Keep a text, in place of those that are its own beginnings."""
        beginnings = [
            kept for kept in self._prefixes if kept.common(prefix.slots, prefix.token_ids) == len(kept.token_ids)
        ]
        prefix.n_uses = max((kept.n_uses for kept in beginnings), default=prefix.n_uses)
        prefix.used_at = self._clock
        self._drop(beginnings)
        prefix.is_kept = True
        self._prefixes.append(prefix)

    def use(self, prefix: Prefix, n_tokens: int) -> None:
        """Count that a text goes on from the first `n_tokens` of a kept one, unless they are few of it.

        A beginning that many texts have in common says nothing about any of them.
        """
        if prefix.is_kept and n_tokens >= MIN_USED_FRACTION * len(prefix.token_ids):
            prefix.n_uses, prefix.used_at = prefix.n_uses + 1, self._clock
            self._prefixes.sort(key=lambda kept: kept is prefix)

    def evict(self, keep: Prefix | None = None) -> bool:
        """Drop the text of the least value, never `keep`; return whether there was one."""
        values = [(self._value(prefix), prefix) for prefix in self._prefixes if prefix is not keep]
        if not values:
            return False
        value, prefix = min(values, key=lambda value_and_prefix: value_and_prefix[0])
        self._clock = max(self._clock, value)
        self._drop([prefix])
        return True

    def _value(self, prefix: Prefix) -> float:
        """Return the value per byte; only what no other kept text holds would have to be read again."""
        others = (other for other in self._prefixes if other is not prefix)
        n_shared = max((other.common(prefix.slots, prefix.token_ids) for other in others), default=0)
        return prefix.used_at + prefix.n_uses * self.costs.of(n_shared, len(prefix.token_ids)) / prefix.n_bytes

    def forget_owners(self, is_gone: Callable[[str], bool]) -> None:
        self._drop([prefix for prefix in self._prefixes if is_gone(owner_of(prefix.slots.salt))])

    def clear(self) -> None:
        self._drop(list(self._prefixes))

    def _drop(self, dropped: Iterable[Prefix]) -> None:
        for prefix in dropped:
            prefix.is_kept = False
        self._prefixes = [prefix for prefix in self._prefixes if prefix.is_kept]
