"""Interface of the search strategies, which propose layer sets and observe their scores."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ...core.costs import ExpertCosts
from ...core.errors import LayerSetError, SettingsError
from ...core.layer_sets import LayerSet, SubLayer, searchable
from ...core.serialization import Record
from ...core.types import Trial

# A layer set: one entry per searchable sub-layer, 1 if it is skipped; then the expert bits, if experts are searched.
Bits = tuple[int, ...]
StudyKind = Literal["similarity", "knapsack", "clasp"]

MAX_REDRAWS = 64  # Maximum exchanges to find an unseen set; small spaces may have none.


class Proposal(NamedTuple):
    """The next candidate; `origin` is stored as `Trial.origin`: "random" for a draw, else the strategy's own word."""

    layer_set: LayerSet
    origin: str


@dataclass(frozen=True, slots=True)
class Study(Record):
    """An analysis of the model's own pass over a window.

    `turns`: per searchable sub-layer, 1 - cosine of the residual stream before and after it, averaged over the window.
    `sets`: layer sets that dynamic programs found, with or without expert bits. `rows`: cost of the study, in rows of
    the full model.
    """

    turns: tuple[float, ...]
    sets: tuple[Bits, ...]
    rows: float


@dataclass(frozen=True, slots=True)
class ExpertLevels:
    """Numbers of experts, fewer than the model's, that a draft may take in each of `layers`.

    `numbers` descend. A layer has a bit for each number: 1 if the draft takes that many experts or fewer.
    """

    layers: tuple[int, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, experts: ExpertCosts | None, n_layers: int) -> ExpertLevels | None:
        """Return the levels of a model's inner layers: halves down to one expert, then only the shared experts."""
        if experts is None:
            return None
        numbers = [experts.n_chosen >> n_halvings for n_halvings in range(1, experts.n_chosen.bit_length())]
        layers = tuple(layer for layer in experts.layers if 0 < layer < n_layers - 1)
        numbers = [number for number in (*numbers, 0) if number >= experts.least]
        return cls(layers, tuple(numbers)) if layers and numbers else None

    def changes(self, first: int) -> Iterator[tuple[int, int, Bits]]:
        """Yield (layer, number, indices of the bits that are 1 for it); expert bits start at index `first`."""
        for layer in self.layers:
            for level, number in enumerate(self.numbers, start=1):
                yield layer, number, tuple(range(first, first + level))
            first += len(self.numbers)

    def bits_of(self, layer_set: LayerSet) -> Bits:
        """Return the bits of all layers; those of a layer whose MLP is skipped are 0."""
        n_experts = [None if layer_set.skips("mlp", layer) else layer_set.experts_of(layer) for layer in self.layers]
        return tuple(int(n is not None and n <= number) for n in n_experts for number in self.numbers)

    def set_of(self, layer_set: LayerSet, bits: Bits) -> LayerSet:
        """Return `layer_set` with the numbers of experts that `bits` mean: only how many 1s a layer has counts."""
        n = len(self.numbers)
        levels = [sum(bits[index * n : (index + 1) * n]) for index in range(len(self.layers))]
        numbers = [
            (f"mlp:{layer}", self.numbers[level - 1]) for layer, level in zip(self.layers, levels, strict=True) if level
        ]
        return replace(layer_set, experts=tuple(numbers))


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """The space of a search: the sub-layers of `base`, whose formats every proposal keeps."""

    base: LayerSet
    n_skipped: int  # Sub-layers that a candidate skips, unless a strategy chooses the number by `savings`.
    seed: int
    interval: int = 25  # β: steps between two suggestions of a model of the scores.
    deterministic: bool = False  # Wait for suggestions.
    window: int = 32  # Tokens on which a candidate is scored.
    # Plain passes that each bit saves; an expert bit's saving is on top of the bits before it.
    savings: tuple[float, ...] | None = None
    # Maps a proposal to the nearest allowed set; `n_skipped` is then approximate. None: all sets are allowed.
    project: Callable[[LayerSet], LayerSet] | None = None
    experts: ExpertLevels | None = None  # Numbers of experts to search; None: proposals keep those of `base`.
    whole_layers: bool = False  # A proposal skips both sub-layers of a layer or neither.
    sub_layers: tuple[SubLayer, ...] | None = None  # Sub-layers that a candidate may skip; None: of all inner layers.

    @property
    def searched(self) -> tuple[SubLayer, ...]:
        """The sub-layers that a candidate may skip, in the order of their bits."""
        return searchable(self.base.n_layers) if self.sub_layers is None else self.sub_layers

    def bits_of(self, layer_set: LayerSet) -> Bits:
        """Return a set as bits: those of the searchable sub-layers, then the expert bits if experts are searched."""
        bits = tuple(int(layer_set.skips(kind, layer)) for kind, layer in self.searched)
        return bits + (() if self.experts is None else self.experts.bits_of(layer_set))

    def set_of(self, bits: Bits) -> LayerSet:
        """Return the set that these bits stand for, with the formats of `base`."""
        searched = self.searched
        layer_set = self.base.skipping(sub_layer for sub_layer, bit in zip(searched, bits, strict=False) if bit)
        return layer_set if self.experts is None else self.experts.set_of(layer_set, bits[len(searched) :])

    def draw(self, n_skipped: int, rng: random.Random) -> Bits:
        """Return a uniform draw of `n_skipped` sub-layers; with `whole_layers`, of as many in whole layers."""
        size = len(self.searched)
        return 2 * draw(size // 2, n_skipped // 2, rng) if self.whole_layers else draw(size, n_skipped, rng)

    def exchange(self, bits: Bits, rng: random.Random) -> Bits:
        """Return the set with a random skipped and a random kept sub-layer exchanged, or layer with `whole_layers`."""
        if not self.whole_layers:
            return exchange(bits, rng)
        n_layers = len(self.searched) // 2
        return 2 * exchange(bits[:n_layers], rng) + bits[2 * n_layers :]

    def canonical(self, bits: Bits) -> Bits:
        """Return the bits that `bits_of` returns for the same set: several bits may mean one number of experts."""
        return bits if self.experts is None else self.bits_of(self.set_of(bits))

    def project_bits(self, bits: Bits) -> Bits:
        """Return `bits` in their canonical form, or the nearest allowed set if `bits` is not allowed."""
        return self.canonical(bits) if self.project is None else self.bits_of(self.project(self.set_of(bits)))


class Strategy(ABC):
    """Proposes layer sets. A caller may request several before the first of them is scored.

    Subclasses implement `propose` and `observe`; the other public methods are hooks with a default. The base class
    counts steps, and stores the sets that were seen and the number of skipped sub-layers.

    Raises: SettingsError: the model has fewer searchable sub-layers than `n_skipped`.
    """

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.size = len(problem.searched)  # Number of searchable sub-layers.
        self.step = 0
        self.seen: set[Bits] = set()  # Sets proposed or observed so far.
        self.set_n_skipped(problem.n_skipped)

    @abstractmethod
    def propose(self) -> Proposal:
        """Return the next candidate, if possible one that was not proposed before.

        It skips exactly `n_skipped` searchable sub-layers, unless the strategy chooses the number by the savings.
        """

    @abstractmethod
    def observe(self, trial: Trial) -> None:
        """Learn from a scored candidate, which another strategy may have proposed; `trial.score` is maximised.

        Raises: LayerSetError: the trial belongs to a model with another number of layers.
        """

    def wants(self, prompt_id: str) -> StudyKind | None:
        """Return the kind of study to run on a window of this prompt before the next proposal; None for no study."""
        return None

    def study(self, prompt_id: str, study: Study) -> None:  # noqa: B027 - optional hook
        """Receive the result of a study that `wants` asked for."""

    def best(self, in_use: LayerSet) -> LayerSet:
        """Return the scored set with the best estimate from all trials; `in_use` if none is probably better."""
        return in_use

    def set_n_skipped(self, n_skipped: int) -> None:
        """Make candidates skip `n_skipped` sub-layers from now on.

        Raises: SettingsError: the model has fewer searchable sub-layers.
        """
        if not 0 <= n_skipped <= self.size:
            n_layers = self.problem.base.n_layers
            raise SettingsError(
                f"cannot skip {n_skipped} sub-layers of a model with {n_layers} layers: use 0 to {self.size}"
            )
        self.n_skipped = n_skipped - n_skipped % 2 if self.problem.whole_layers else n_skipped

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values, without the trials; valid once every proposal has been scored."""
        return {"step": self.step, "n_skipped": self.n_skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` of a strategy with the same problem, after its trials were observed in order.

        Raises: KeyError, TypeError, SettingsError: `state` is not such a state.
        """
        self.step = state["step"]
        self.set_n_skipped(state["n_skipped"])

    def close(self) -> None:  # noqa: B027 - optional hook
        """Free resources; a closed strategy can still propose random sets."""

    def next_step(self) -> random.Random:
        """Count a step and return its generator, seeded by (seed, step): steps draw independently of each other."""
        self.step += 1
        return random.Random(f"{self.problem.seed}/{self.step}")

    def claim_unseen(self, bits: Bits, origin: str, rng: random.Random) -> Proposal:
        """Walk from `bits` by random exchanges to an unseen set, at most `MAX_REDRAWS`; mark it as seen, return it."""
        for _ in range(MAX_REDRAWS):
            bits = self.problem.project_bits(bits)
            if bits not in self.seen:
                break
            # A random exchange stays close to the suggestion, and keeps a random set uniformly random.
            bits = self.problem.exchange(bits, rng)
        bits = self.problem.project_bits(bits)
        self.seen.add(bits)
        return Proposal(self.problem.set_of(bits), origin)

    def mark_seen(self, trial: Trial) -> Bits:
        """Return the bits of a trial's set, and mark it as seen.

        Raises: LayerSetError: the trial belongs to a model with another number of layers.
        """
        n_layers = self.problem.base.n_layers
        if trial.layer_set.n_layers != n_layers:
            raise LayerSetError(
                f"a trial of a model with {trial.layer_set.n_layers} layers was passed to a search over "
                f"{n_layers} layers: use one strategy per model"
            )
        bits = self.problem.bits_of(trial.layer_set)
        self.seen.add(bits)
        return bits


@dataclass(frozen=True, slots=True)
class StrategyInfo:
    """A row of the registry of strategies."""

    help: str  # How the strategy proposes candidates.
    make: Callable[[SearchProblem], Strategy]
    study: StudyKind | None = None  # The study of the model that it requests.
    patience: int | None = None  # Candidates without a better one after which the search stops.
    suggests: bool = False  # A separate process suggests candidates; `deterministic` waits for them.

    @property
    def chooses_size(self) -> bool:
        """Whether it chooses the number of skipped sub-layers, if it has the savings."""
        return self.study is not None


def draw(size: int, n_skipped: int, rng: random.Random) -> Bits:
    """Return a uniform choice of `n_skipped` among `size` sub-layers."""
    chosen_indices = set(rng.sample(range(size), n_skipped))
    return tuple(int(index in chosen_indices) for index in range(size))


def exchange(bits: Bits, rng: random.Random) -> Bits:
    """Return the set with a random skipped and a random kept sub-layer exchanged; itself if it lacks either kind."""
    skipped = [index for index, bit in enumerate(bits) if bit]
    kept = [index for index, bit in enumerate(bits) if not bit]
    if not skipped or not kept:
        return bits
    removed, added = rng.choice(skipped), rng.choice(kept)
    return tuple(int(index == added or (bit == 1 and index != removed)) for index, bit in enumerate(bits))
