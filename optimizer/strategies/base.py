"""The seam between the search and whoever proposes its candidates: ask for one, tell how a scored one did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ...core.types import LayerSet, Trial


@dataclass(frozen=True, slots=True)
class Proposal:
    """The next candidate; `origin` is "random", "gp", "tpe" or "late", as in `Trial.origin`."""

    layer_set: LayerSet
    origin: str


class Strategy(Protocol):
    """Proposes layer sets of one size; several may be asked for before the first of them is scored."""

    def propose(self) -> Proposal:
        """The next candidate: exactly n_skipped searchable sub-layers, not proposed before where that is avoidable."""

    def observe(self, trial: Trial) -> None:
        """Learn from a scored candidate, anyone's; `trial.score` is what is maximised.

        Raises: LayerSetError: the trial is of a model with another number of layers.
        """

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
