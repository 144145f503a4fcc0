"""The seam between the search and whoever proposes its candidates: ask for one, tell how a scored one did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from ...core.costs import CostProfile
from ...core.types import LayerSet, Trial
from .process import Bits

StudyKind = Literal["similarity", "knapsack", "clasp"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """The next candidate; `origin` is its word in `Trial.origin`: "random", "gp", "tpe", "late", "family" or "move"."""

    layer_set: LayerSet
    origin: str


@dataclass(frozen=True, slots=True)
class Study:
    """What one look at the model's own pass over a window says of its sub-layers.

    `turns`: per searchable sub-layer, 1 - cosine of the residual stream before and after it, averaged over the window.
    `sets`: layer sets that dynamic programs found. `rows`: what it cost, in rows of the full model.
    """

    turns: tuple[float, ...]
    sets: tuple[Bits, ...]
    rows: float

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a snapshot."""
        return {"turns": list(self.turns), "sets": ["".join(map(str, bits)) for bits in self.sets], "rows": self.rows}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Study:
        """Inverse of `to_json`."""
        sets = tuple(tuple(map(int, bits)) for bits in values["sets"])
        return cls(tuple(values["turns"]), sets, values["rows"])


@dataclass(frozen=True, slots=True)
class Prices:
    """What a draft pass costs in plain passes: `whole` with nothing left out, less `saved` of each searchable one."""

    whole: float
    saved: tuple[float, ...]

    @classmethod
    def of(cls, costs: CostProfile, base: LayerSet) -> Prices:
        """The measured ones for drafts in the formats of `base`."""
        full = with_bits(base, [0] * len(base.bits()))
        bits = range(len(full.bits()))
        singles = (costs.draft_cost(with_bits(full, [int(i == at) for i in bits])) for at in bits)
        whole = costs.draft_cost(full)
        return cls(whole, tuple(max(0.0, whole - single) for single in singles))


def with_bits(base: LayerSet, bits: Sequence[int]) -> LayerSet:
    """`base` with other sub-layers left out, and all else as it is."""
    chosen = LayerSet.from_bits(base.n_layers, bits)
    return replace(base, skip_attn=chosen.skip_attn, skip_mlp=chosen.skip_mlp)


class Strategy(Protocol):
    """Proposes layer sets; several may be asked for before the first of them is scored."""

    def propose(self) -> Proposal:
        """The next candidate, not proposed before where that is avoidable.

        It leaves out exactly n_skipped searchable sub-layers, unless the strategy was given prices: then some choose
        the number themselves.
        """

    def wants(self, prompt_id: str) -> StudyKind | None:
        """What it would study on a window of that prompt, before its next proposal; None: nothing (any more)."""

    def study(self, prompt_id: str, study: Study) -> None:
        """Take in what it wanted."""

    def observe(self, trial: Trial) -> None:
        """Learn from a scored candidate, anyone's; `trial.score` is what is maximised.

        Raises: LayerSetError: the trial is of a model with another number of layers.
        """

    def rate(self, layer_sets: Sequence[LayerSet]) -> list[float] | None:
        """What it expects each of them to score, after all that it has seen; None: it has no opinion."""

    def set_n_skipped(self, n_skipped: int) -> None:
        """The skip ratio changed: candidates have `n_skipped` sub-layers from now on.

        Raises: SettingsError: the model has fewer searchable sub-layers.
        """

    def state(self) -> dict[str, Any]:
        """Its position as JSON values, without the trials; to be taken when every proposal has been scored."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state` of a strategy of the same settings; its trials were observed here in their order before.

        Raises: KeyError, TypeError, SettingsError: that is no such state.
        """

    def close(self) -> None:
        """Free what the strategy holds; a closed one may still be asked and draws at random."""
