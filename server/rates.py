"""How many requests a caller may send: a bucket of tokens for each, filled again at a steady rate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

MAX_CALLERS = 10_000  # buckets kept; beyond it those that are full again are forgotten


class Rates:
    """At most `per_min` requests a minute for each caller, all of them at once if it was silent; 0: no limit."""

    def __init__(self, per_min: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._per_s, self._clock = float(per_min), per_min / 60, clock
        self._buckets: dict[str, tuple[float, float]] = {}  # caller -> tokens, and when they were counted

    def wait_s(self, caller: str) -> int:
        """0 if the caller may go on, else after how many seconds it may."""
        if not self._size:
            return 0
        now = self._clock()
        tokens = self._tokens(caller, now)
        if tokens < 1:
            return max(1, math.ceil((1 - tokens) / self._per_s))
        self._buckets[caller] = (tokens - 1, now)
        if len(self._buckets) > MAX_CALLERS:
            self._forget(now)
        return 0

    def _tokens(self, caller: str, now: float) -> float:
        tokens, counted = self._buckets.get(caller, (self._size, now))
        return min(self._size, tokens + (now - counted) * self._per_s)

    def _forget(self, now: float) -> None:
        self._buckets = {
            caller: bucket for caller, bucket in self._buckets.items() if self._tokens(caller, now) < self._size
        }
        while len(self._buckets) > MAX_CALLERS:  # the oldest first
            del self._buckets[next(iter(self._buckets))]
