"""Hit rates of drafts from earlier text, by the length of the match that they come from."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_RATED_LENGTH = 8  # Longest match length with its own hit rate; longer matches share it.
PRIOR_TOKENS = 2  # Weight of the prior hit rate, in observed tokens.
EARLIER_TOKENS = 8  # Weight of the hit rate from earlier texts, in observed tokens.
MAX_SEEN = 1024.0  # Observations per match length above which the counts are halved.


@dataclass(slots=True, eq=False)
class HitRates:
    """How often the token that followed an earlier match recurred, by the length of the match.

    The prior for a match of m tokens is m / (m + 1), or the rate of `earlier` texts, which is also updated.
    """

    earlier: HitRates | None = None
    seen: list[float] = field(default_factory=lambda: [0.0] * (MAX_RATED_LENGTH + 1))
    hits: list[float] = field(default_factory=lambda: [0.0] * (MAX_RATED_LENGTH + 1))

    def alone(self) -> HitRates:
        """Return these rates without `earlier`, so that later observations do not update the earlier texts' rates."""
        return HitRates(None, self.seen, self.hits)

    def learn(self, match_length: int, hit: bool) -> None:
        length = min(match_length, MAX_RATED_LENGTH)
        if self.seen[length] >= MAX_SEEN:  # Halve old counts so that recent tokens weigh more.
            self.seen[length], self.hits[length] = self.seen[length] / 2, self.hits[length] / 2
        self.seen[length] += 1
        self.hits[length] += hit
        if self.earlier is not None:
            self.earlier.learn(match_length, hit)

    def rate(self, match_length: int) -> float:
        length = min(match_length, MAX_RATED_LENGTH)
        if self.earlier is None:
            prior, weight = length / (length + 1), PRIOR_TOKENS
        else:
            prior, weight = self.earlier.rate(match_length), EARLIER_TOKENS
        return (self.hits[length] + weight * prior) / (self.seen[length] + weight)
