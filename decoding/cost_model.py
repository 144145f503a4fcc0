"""What a draft is worth, in tokens against measured time: the quantities that adaptive drafting decides by.

All times are in plain passes of the target over one row. With λ the tokens per such pass that decoding gets at present,
whatever takes t must bring λ · t tokens, or the time is better spent otherwise; a draft that is decided by this rule,
step by step, makes λ as large as it can be (the fixed point of a ratio of sums, Dinkelbach 1967). Nothing pays where
λ · cost is above the chance of a token, and then plain decoding is left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..core.costs import CostProfile
from ..core.types import LayerSet

BOUNDS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999)  # of the draft's confidence, between classes
PRIOR = 4.0  # observations that a prior counts for
FADING = 0.1  # weight of the latest round in a running mean
MEMORY = 256.0  # observations after which the old ones fade


class HasLayerSet(Protocol):
    """A draft model whose layer set may change between rounds."""

    @property
    def layer_set(self) -> LayerSet | None: ...


class PassCosts:
    """Costs in plain passes of the target, from a measured profile; looked up once per layer set and number of rows.

    With `load` sequences side by side, a pass is taken to have as many rows of each of the others: the tokens of one
    are weighed against the time of all, for the others do the same.

    Args: drafts: the draft model, or its layer set; None: there is none.
    """

    def __init__(self, costs: CostProfile, drafts: HasLayerSet | LayerSet | None) -> None:
        self._costs, self._drafts = costs, drafts
        self.load = 1
        self._draft: dict[tuple[LayerSet, int], float] = {}
        self._verify: dict[int, float] = {}

    def draft(self, n_rows: int) -> float:
        """Return the cost of a draft pass over `n_rows` rows of each sequence; infinite without a draft model."""
        return self._draft_of(n_rows * self.load)

    def _draft_of(self, n_rows: int) -> float:
        own = self._drafts if self._drafts is None or isinstance(self._drafts, LayerSet) else self._drafts.layer_set
        if own is None:
            return float("inf")
        if (own, n_rows) not in self._draft:
            self._draft[own, n_rows] = self._costs.draft_cost(own, n_rows)
        return self._draft[own, n_rows]

    @property
    def shared(self) -> float:
        """The part of a draft pass over a row of each sequence that does not depend on how many of them join it."""
        if self.load == 1:
            return 1.0
        one, joined = self._draft_of(1), self._draft_of(self.load)
        return max(0.0, 1 - self.load * (joined - one) / (self.load - 1) / joined)

    def verify(self, n_rows: int) -> float:
        """Return the cost of a target pass over `n_rows` rows of each sequence."""
        n_rows *= self.load
        if n_rows not in self._verify:
            self._verify[n_rows] = self._costs.verify_cost(n_rows)
        return self._verify[n_rows]


@dataclass(slots=True)
class Rate:
    """A share that is learnt while it is used, from a prior; old observations fade, so that it can change."""

    prior: float
    hits: float = 0.0
    seen: float = 0.0

    def learn(self, hit: bool) -> None:
        """Count an observation."""
        if self.seen >= MEMORY:
            self.hits, self.seen = self.hits / 2, self.seen / 2
        self.seen += 1
        self.hits += hit

    @property
    def value(self) -> float:
        """The share; the prior counts as a few observations."""
        return (self.hits + PRIOR * self.prior) / (self.seen + PRIOR)


def _by_confidence() -> list[Rate]:
    """Return a rate per class of confidence, each with the middle of its class as the prior."""
    return [Rate((low + high) / 2) for low, high in zip((0.0, *BOUNDS), (*BOUNDS, 1.0), strict=True)]


@dataclass(slots=True)
class Acceptance:
    """How often the target accepts a token, by classes of the draft's confidence in it, and over all of them."""

    classes: list[Rate] = field(default_factory=_by_confidence)
    overall: Rate = field(default_factory=lambda: Rate(0.8))

    def of(self, confidence: float) -> float:
        """Return the chance that a token of that confidence is accepted, given that those before it were."""
        return self.classes[bisect_right(BOUNDS, confidence)].value

    def learn(self, confidence: float, hit: bool) -> None:
        """Count a token of that confidence that was accepted, or was not."""
        self.classes[bisect_right(BOUNDS, confidence)].learn(hit)
        self.overall.learn(hit)


@dataclass(slots=True)
class Throughput:
    """λ: tokens per plain pass's time, over the latest rounds."""

    tokens: float = 8.0
    spent: float = 8.0
    memory: float = 0.97  # of a round after the next one

    @property
    def rate(self) -> float:
        """λ."""
        return self.tokens / self.spent

    def add(self, tokens: int, spent: float) -> None:
        """Count a round."""
        self.tokens = self.memory * self.tokens + tokens
        self.spent = self.memory * self.spent + spent


@dataclass(slots=True)
class Probing:
    """When to draft although it does not seem to pay: rarely, and ever more rarely while it goes on not paying.

    Without it a drafter that was switched off would never notice that the text has changed.
    """

    first: int = 32
    last: int = 512
    idle: float = 0.0
    wait: int = 32

    def due(self, load: int = 1) -> bool:
        """Return whether to draft in this round of one of `load` sequences, in which nothing else is drafted.

        All of them wait while one drafts, and all ask: one asks for a share of a round.
        """
        self.idle += 1 / load
        if self.idle < self.wait:
            return False
        self.idle, self.wait = 0.0, min(2 * self.wait, self.last)
        return True

    def paid(self) -> None:
        """Note that drafting pays again."""
        self.idle, self.wait = 0.0, self.first


@dataclass(slots=True)
class Joining:
    """Whether to draft by a model beside other sequences, that wait for whoever drafts.

    A draft pass pays if what it brings to all of them is worth its time. Once it is made, whoever gains more than it
    adds to the pass's cost should join it. What the others gain is taken from earlier rounds, for each sequence decides
    before the next one's tokens are there.
    """

    gain: float = 1.0  # tokens that joining brings a sequence, where the pass is made anyway: a running mean

    def pays(self, gain: float, shared: float, load: int) -> bool:
        """Return whether one of `load` sequences should draft in this round.

        Args: gain: its tokens more than without the draft model, less an equal part of the passes' cost. shared: how
            much of that part does not depend on its joining, in tokens.
        """
        own, others = max(0.0, gain + shared), self.gain
        self.gain = faded(self.gain, own)
        return own > 0 and own + (load - 1) * others >= load * shared


def faded(mean: float, latest: float) -> float:
    """Return a running mean with the latest value in it."""
    return mean + FADING * (latest - mean)


def chain_worth(chances: Sequence[float], step: float, rate: float, costs: PassCosts) -> tuple[int, float]:
    """Return the length at which a chain is worth most, and what it is worth: tokens - λ · time of the round.

    Args: chances: that a token is accepted, given those before it. step: the cost of drafting each.
    """
    alive, tokens = 1.0, 1.0
    best = (0, 1.0 - rate * costs.verify(1))
    for n, chance in enumerate(chances, 1):
        alive *= chance
        tokens += alive
        worth = tokens - rate * (n * step + costs.verify(n + 1))
        if worth > best[1]:
            best = (n, worth)
    return best
