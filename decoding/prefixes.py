"""Prefix cache: texts read by finished requests, kept in memory for texts with the same prefix; evicted by value.

The value of a text is the time to read it again, times its frequency of use, per byte.
Source: GreedyDual-Size-Frequency (Cherkasova, 1998): the clock is the value of the last evicted text, so texts that are
not used lose value, and every use counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.costs import SMALLEST_BUCKET, context_bucket
from ..core.requests import owner_of
from ..models.buffer import KVBuffer
from ..models.rows import Pass
from ..models.runtime import Runtime
from .work import Slots

Tokens = NDArray[np.int64]

MIN_USED_FRACTION = 1 / 2  # Minimum share of a kept text that counts as a use of it.
FADING_WEIGHT = 0.1  # Weight of the latest pass in the mean seconds of reading a token.


def common_length(first: Tokens, second: Tokens, start: int = 0) -> int:
    """Return the length of the common prefix of two texts, whose first `start` tokens are known to be the same."""
    n_compared = min(len(first), len(second))
    is_same = first[start:n_compared] == second[start:n_compared]
    return n_compared if is_same.all() else start + int(is_same.argmin())


@dataclass(slots=True, eq=False)
class Prefix:
    """A text whose keys and values other requests can reuse."""

    slots: Slots
    buffer: KVBuffer
    token_ids: Tokens
    n_uses: float = 1.0
    used_at: float = 0.0  # The cache's clock at the latest use.
    use_number: int = 0  # Sequence number of the latest use among all uses.
    n_shared: int = 0  # Tokens at its start that another kept text also has.
    is_kept: bool = False

    @property
    def n_bytes(self) -> int:
        buffer = self.buffer
        return buffer.capacity * self.slots.runtime.slot_bytes + buffer.state_bytes + buffer.coded_bytes

    def common(self, slots: Slots, token_ids: Tokens) -> int:
        """Return the length of the common prefix with `token_ids`, whose keys and values can be reused."""
        if self.slots.runtime is not slots.runtime or self.slots.salt != slots.salt:
            return 0
        return common_length(self.token_ids, token_ids)

    def reachable(self, slots: Slots, token_ids: Tokens) -> int:
        """Return the number of `token_ids` after which another text can continue from this one's buffer."""
        return self.buffer.reachable(self.common(slots, token_ids))


@dataclass(slots=True)
class ReadCosts:
    """Measured seconds of reading a prompt token, by the number of tokens before it."""

    _seconds: dict[int, float] = field(default_factory=dict)  # By context bucket.
    # Seconds of the tokens before each bucket's, and of each of its tokens, since the latest pass.
    _sums: dict[int, tuple[float, float]] = field(default_factory=dict)

    def learn(self, passes: Sequence[Pass], seconds: float) -> None:
        """Learn from passes of the whole target that read prompts together."""
        if any(pass_.kind != "beside" or pass_.layers is not None for pass_ in passes):
            return
        n_tokens = sum(len(pass_.rows.token_ids) for pass_ in passes)
        bucket = context_bucket(sum(pass_.rows.first_slot for pass_ in passes) // len(passes))
        latest, mean = seconds / n_tokens, self._seconds.get(bucket)
        self._seconds[bucket] = latest if mean is None else mean + FADING_WEIGHT * (latest - mean)
        self._sums.clear()

    def of(self, start: int, end: int) -> float:
        """Return the seconds of reading the tokens from `start` to `end`; before any timing, their number."""
        return self._until(end) - self._until(start)

    def _until(self, end: int) -> float:
        if not self._seconds:
            return float(end)
        bucket = context_bucket(end)
        start = bucket // 2 if bucket > SMALLEST_BUCKET else 0
        if bucket not in self._sums:
            nearest = min(self._seconds, key=lambda known: max(known, bucket) / min(known, bucket))
            self._sums[bucket] = self._until(start) if start else 0.0, self._seconds[nearest]
        before, per_token = self._sums[bucket]
        return before + (end - start) * per_token


class Match(NamedTuple):
    """Length of the common prefix of a text with a kept one, and that text; None: there is none."""

    n_tokens: int
    prefix: Prefix | None


NO_MATCH = Match(0, None)


class SortedTexts:
    """Kept texts of one runtime and salt in lexicographic order, with the common prefixes of neighbours.

    The common prefix of any two is the shortest one of the neighbours between them, so that no further tokens are
    compared. Source: the LCP array (Manber and Myers, Suffix arrays, 1993).
    """

    def __init__(self) -> None:
        self._texts: list[Prefix] = []
        self._common = [0]  # Length of the common prefix with the text before, for each text and for the end.

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, prefix: Prefix) -> None:
        place, *common = self._place(prefix.token_ids)
        self._texts.insert(place, prefix)
        self._common[place : place + 1] = common
        self._update(place - 1, place, place + 1)

    def remove(self, prefix: Prefix) -> None:
        place = self._texts.index(prefix)
        del self._texts[place]
        self._common[place : place + 2] = [min(self._common[place : place + 2])]
        self._update(place - 1, place)

    def matches(self, token_ids: Tokens) -> Iterator[tuple[int, Prefix]]:
        """Yield the texts that begin with the same token and the common prefixes' lengths, the longest first."""
        behind, left, right = self._place(token_ids)
        before = behind - 1
        while left or right:
            if left >= right:
                yield left, self._texts[before]
                left, before = min(left, self._common[before]), before - 1
            else:
                yield right, self._texts[behind]
                behind += 1
                right = min(right, self._common[behind])

    def _place(self, token_ids: Tokens) -> tuple[int, int, int]:
        """Return where a text belongs, after equal ones, and its common prefixes with the texts before and there."""
        low, high, low_common, high_common = 0, len(self._texts), 0, 0
        while low < high:
            middle = (low + high) // 2
            other = self._texts[middle].token_ids
            # All texts between the two known ones have what these have in common.
            n_common = common_length(other, token_ids, min(low_common, high_common))
            is_after = n_common < len(other) and (n_common == len(token_ids) or other[n_common] > token_ids[n_common])
            if is_after:
                high, high_common = middle, n_common
            else:
                low, low_common = middle + 1, n_common
        return low, low_common, high_common

    def _update(self, *places: int) -> None:
        for place in places:
            if 0 <= place < len(self._texts):
                self._texts[place].n_shared = max(self._common[place : place + 2])


class PrefixCache:
    """Kept texts; memory for others is taken from those of the least value."""

    def __init__(self) -> None:
        self.costs = ReadCosts()
        self._texts: dict[tuple[Runtime, str], SortedTexts] = {}  # By runtime and salt.
        self._prefixes: dict[Prefix, None] = {}
        self._clock, self._n_uses = 0.0, 0

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
        """Keep a text, replacing kept texts that are prefixes of it."""
        texts = self._texts.setdefault((prefix.slots.runtime, prefix.slots.salt), SortedTexts())
        beginnings = [kept for n, kept in texts.matches(prefix.token_ids) if n == len(kept.token_ids)]
        self._mark_used(prefix, max((kept.n_uses for kept in beginnings), default=prefix.n_uses))
        texts.add(prefix)
        for kept in beginnings:
            self._drop(kept)
        prefix.is_kept = True
        self._prefixes[prefix] = None

    def longest(self, slots: Slots, token_ids: Tokens) -> Match:
        """Return the longest prefix of a text that a kept one has, and the most recently used such text.

        The most recent one is chosen because a prefix shared by many texts must not make an old text look recent.
        """
        best, best_use = NO_MATCH, 0
        texts = self._texts.get((slots.runtime, slots.salt))
        for n_common, prefix in texts.matches(token_ids) if texts is not None else ():
            if n_common < best.n_tokens:
                break
            n_reachable = prefix.buffer.reachable(n_common)
            if n_reachable and (n_reachable, prefix.use_number) > (best.n_tokens, best_use):
                best, best_use = Match(n_reachable, prefix), prefix.use_number
        return best

    def use(self, prefix: Prefix, n_tokens: int) -> None:
        """Count a use of the first `n_tokens` of a kept text, unless they are a small part of it.

        A prefix that many texts share says nothing about the use of a single one.
        """
        if prefix.is_kept and n_tokens >= MIN_USED_FRACTION * len(prefix.token_ids):
            self._mark_used(prefix, prefix.n_uses + 1)

    def _mark_used(self, prefix: Prefix, n_uses: float) -> None:
        self._n_uses += 1
        prefix.n_uses, prefix.used_at, prefix.use_number = n_uses, self._clock, self._n_uses

    def evict(self, n_bytes: int, keep: Prefix | None = None) -> None:
        """Drop the least valuable texts, never `keep`, until `n_bytes` are freed or no others are left."""
        values = [(self._value(prefix), prefix.use_number, prefix) for prefix in self._prefixes if prefix is not keep]
        heapify(values)
        while n_bytes > 0 and values:
            value, number, prefix = values[0]
            # The prefix shared with a dropped text would now have to be read again.
            if (latest := self._value(prefix)) > value:
                heapreplace(values, (latest, number, prefix))
                continue
            heappop(values)
            self._clock = max(self._clock, value)
            n_bytes -= prefix.n_bytes
            self._drop(prefix)

    def _value(self, prefix: Prefix) -> float:
        """Return the value per byte; only tokens that no other kept text has would have to be read again."""
        seconds = self.costs.of(prefix.n_shared, len(prefix.token_ids))
        return prefix.used_at + prefix.n_uses * seconds / prefix.n_bytes

    def forget_owners(self, is_gone: Callable[[str], bool]) -> None:
        for prefix in [prefix for prefix in self._prefixes if is_gone(owner_of(prefix.slots.salt))]:
            self._drop(prefix)

    def clear(self) -> None:
        for prefix in list(self._prefixes):
            self._drop(prefix)

    def _drop(self, prefix: Prefix) -> None:
        prefix.is_kept = False
        del self._prefixes[prefix]
        texts = self._texts[key := (prefix.slots.runtime, prefix.slots.salt)]
        texts.remove(prefix)
        if not texts:
            del self._texts[key]
