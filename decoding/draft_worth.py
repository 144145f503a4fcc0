"""The value of drafts: costs in plain passes, and estimates of acceptance learnt from outcomes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ..core.layer_sets import LayerSet

if TYPE_CHECKING:
    from ..core.costs import CostProfile, CostSource
    from .draft import DraftModel

CONFIDENCE_LIMITS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999)  # Limits between the classes of draft confidence.
PRIOR_WEIGHT = 4.0  # Weight of a prior, in observations.
FADING_WEIGHT = 0.1  # Weight of the latest round in running means.
MAX_OBSERVATIONS = 256.0  # Observations above which the counts are halved.


class PassCosts:
    """Costs in plain passes of the target, from measured profiles; looked up once per layer set and number of rows.

    With `load` concurrent sequences, a pass is assumed to have the same number of rows of each. The tokens of one
    sequence are weighed against the time of the whole pass, because the others do the same.

    Args: drafts: the draft model, or its layer set; None: there is none.
    """

    def __init__(self, costs: CostSource, drafts: DraftModel | LayerSet | None) -> None:
        self.source, self._drafts = costs, drafts
        self._lookups: dict[int, _Lookups] = {}  # Cached costs by context bucket.
        self.load = 1
        self._use_profile(costs.at())

    def follow(self, n_positions: int, load: int) -> None:
        """Use the newest costs for a context of `n_positions` tokens and `load` concurrent sequences."""
        self.load = load
        self._use_profile(self.source.at(n_positions))

    def _use_profile(self, profile: CostProfile) -> None:
        lookups = self._lookups.get(profile.context_bucket)
        if lookups is None or lookups.profile is not profile:
            draft_cost, format_cost = cache(profile.draft_cost), cache(profile.format_cost)
            lookups = _Lookups(profile, draft_cost, cache(profile.verify_cost), format_cost)
            self._lookups[profile.context_bucket] = lookups
        self._lookup = lookups

    @property
    def context_bucket(self) -> int:
        """The context length of the costs in use."""
        return self._lookup.profile.context_bucket

    def draft(self, n_rows: int) -> float:
        """Return the cost of a draft pass over `n_rows` rows of each sequence; infinite without a draft model."""
        return self._draft_pass_cost(n_rows * self.load)

    def _draft_pass_cost(self, n_rows: int) -> float:
        drafts = self._drafts
        if drafts is None or isinstance(drafts, LayerSet):
            layer_set = drafts
        elif drafts.cost_name is not None:
            return self._lookup.format_cost(drafts.cost_name, n_rows)
        else:
            layer_set = drafts.layer_set
        return float("inf") if layer_set is None else self._lookup.draft_cost(layer_set, n_rows)

    @property
    def shared(self) -> float:
        """Share of a draft pass's cost that does not depend on the number of sequences in the pass."""
        if self.load == 1:
            return 1.0
        cost_alone, cost_joined = self._draft_pass_cost(1), self._draft_pass_cost(self.load)
        return max(0.0, 1 - self.load * (cost_joined - cost_alone) / (self.load - 1) / cost_joined)

    def verify(self, n_rows: int) -> float:
        """Return the cost of a target pass over `n_rows` rows of each sequence."""
        return self._lookup.verify_cost(n_rows * self.load)


class _Lookups(NamedTuple):
    """A cost profile with its cached lookups."""

    profile: CostProfile
    draft_cost: Callable[[LayerSet, int], float]
    verify_cost: Callable[[int], float]
    format_cost: Callable[[str, int], float]


@dataclass(slots=True)
class Rate:
    """An acceptance share learnt online; old observations fade, so that the share follows changes."""

    prior: float
    hits: float = 0.0
    seen: float = 0.0

    def learn(self, hit: bool) -> None:
        if self.seen >= MAX_OBSERVATIONS:
            self.hits, self.seen = self.hits / 2, self.seen / 2
        self.seen += 1
        self.hits += hit

    @property
    def value(self) -> float:
        """The estimated share; the prior counts as `PRIOR_WEIGHT` observations."""
        return (self.hits + PRIOR_WEIGHT * self.prior) / (self.seen + PRIOR_WEIGHT)


@dataclass(slots=True)
class Acceptance:
    """How often the target accepts a token, by classes of the draft's confidence (a class's middle is the prior)."""

    classes: list[Rate] = field(
        default_factory=lambda: [Rate((a + b) / 2) for a, b in pairwise((0.0, *CONFIDENCE_LIMITS, 1.0))]
    )
    overall: Rate = field(default_factory=lambda: Rate(0.8))

    def of(self, confidence: float) -> float:
        """Return the probability that a token of that confidence is accepted, given that those before it were."""
        return self.classes[bisect_right(CONFIDENCE_LIMITS, confidence)].value

    def learn(self, confidence: float, hit: bool) -> None:
        self.classes[bisect_right(CONFIDENCE_LIMITS, confidence)].learn(hit)
        self.overall.learn(hit)


@dataclass(slots=True)
class Throughput:
    """λ: tokens per time of a plain pass, as a decaying mean over rounds."""

    tokens: float = 8.0
    spent: float = 8.0
    memory: float = 0.97  # Factor by which older rounds lose weight with each new round.

    @property
    def rate(self) -> float:
        return self.tokens / self.spent

    def add(self, tokens: int, spent: float) -> None:
        self.tokens = self.memory * self.tokens + tokens
        self.spent = self.memory * self.spent + spent


@dataclass(slots=True)
class Probing:
    """Decides when to try a draft that does not seem to pay: rarely, and less often the longer it does not pay.

    Without such trials a drafter that was switched off would never notice a change of the text.
    """

    first: int = 32
    last: int = 512
    idle: float = 0.0
    wait: int = 32

    def due(self, load: int = 1) -> bool:
        """Return whether to draft in this round, in which nothing else is drafted, of one of `load` sequences.

        All sequences wait while one drafts, and all ask, so each call counts as a share of a round.
        """
        self.idle += 1 / load
        if self.idle < self.wait:
            return False
        self.idle, self.wait = 0.0, min(2 * self.wait, self.last)
        return True

    def paid(self) -> None:
        self.idle, self.wait = 0.0, self.first


@dataclass(slots=True)
class DraftParticipation:
    """Decides whether to draft by a model with concurrent sequences, which wait for the one that drafts.

    A draft pass pays if its gain over all sequences is worth its time. A sequence should then join if it gains more
    than it adds to the cost. The gain of the others is that of earlier rounds, because sequences decide one by one.
    """

    # Running mean of the tokens that a sequence gains by joining a draft pass that is run anyway.
    gain: float = 1.0

    def pays(self, gain: float, shared: float, load: int) -> bool:
        """Return whether one of `load` sequences should draft in this round.

        Args: gain: additional tokens from the draft model, less an equal share of the passes' cost. shared: the part
            of that share that does not depend on its joining, in tokens.
        """
        gain_alone, gain_of_others = max(0.0, gain + shared), self.gain
        self.gain = faded(self.gain, gain_alone)
        return gain_alone > 0 and gain_alone + (load - 1) * gain_of_others >= load * shared


def faded(mean: float, latest: float) -> float:
    return mean + FADING_WEIGHT * (latest - mean)


def chain_worth(chances: Sequence[float], step_cost: float, rate: float, costs: PassCosts) -> tuple[int, float]:
    """Return a chain's best length and its value: tokens - λ · time of the round.

    Args: chances: probability that each token is accepted, given those before it. step_cost: cost of drafting one.
    """
    chain_chance, tokens = 1.0, 1.0
    best_length_and_worth = (0, 1.0 - rate * costs.verify(1))
    for length, chance in enumerate(chances, 1):
        chain_chance *= chance
        tokens += chain_chance
        worth = tokens - rate * (length * step_cost + costs.verify(length + 1))
        if worth > best_length_and_worth[1]:
            best_length_and_worth = (length, worth)
    return best_length_and_worth
