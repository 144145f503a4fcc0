"""Random search that asks a model of the scores for a candidate at every interval-th step (SWIFT 4.1.2, Eq. 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import comb
from typing import Any

from ...core.errors import SettingsError
from ...core.types import Trial
from .base import Bits, Proposal, SearchProblem, Strategy, draw
from .process import DEADLINE_S, Engine, PendingPoint, SuggestionProcess

MAX_PENDING = 64  # proposed sets without a score that a suggestion is told of; a caller may drop candidates


class IntervalStrategy(Strategy):
    """Draws uniformly, and takes at every `interval`-th step what `engine` suggested; without an engine only draws.

    A suggestion asked for at step n, with the trials observed by then, is used at step n + interval. If it is late,
    that step is drawn (origin "late") and the suggestion is used at the first due step after it arrives;
    `deterministic` asks at the due step itself and waits, as SWIFT does. A suggestion for another number of skipped
    sub-layers is dropped.

    Args:   interval: in place of the problem's.
    Raises: SettingsError: the interval or the number of skipped sub-layers is out of its range.
    """

    def __init__(
        self,
        problem: SearchProblem,
        engine: Engine | None = None,
        interval: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        super().__init__(problem)
        self.engine = engine
        self._interval = problem.interval if interval is None else interval
        if self._interval < 1:
            raise SettingsError(
                f"interval {self._interval} between two suggestions is out of range: use 1 or more steps"
            )
        self._process = SuggestionProcess(engine, problem.seed, deadline_s) if engine else None
        self._pending: dict[Bits, None] = {}  # in the order proposed

    def propose(self) -> Proposal:
        rng = self.next_step()
        bits, origin = draw(self.size, self.n_skipped, rng), "random"
        # With one set to choose from there is nothing to learn.
        due = self.step % self._interval == 0 and comb(self.size, self.n_skipped) > 1
        process = self._process if due else None
        waits = self.problem.deterministic
        if process is not None:
            if waits:
                process.ask(self.step, self.n_skipped, list(self._pending))
            was_asked = process.in_flight
            suggested = process.take(wait=waits)
            if suggested is not None and sum(suggested) == self.n_skipped:
                bits, origin = suggested, process.engine
            elif was_asked:
                origin = "late"
        proposal = self.proposed(bits, origin, rng)
        self._pending[proposal.layer_set.bits()] = None
        if len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        if process is not None and not waits:
            process.ask(self.step, self.n_skipped, list(self._pending))
        return proposal

    def observe(self, trial: Trial) -> None:
        bits = self.observed(trial)
        self._pending.pop(bits, None)
        if self._process is not None:
            self._process.observe(bits, trial.score)

    def state(self) -> dict[str, Any]:
        """Return the position; a suggestion in progress is kept as what was asked for."""
        asked = self._process.request if self._process is not None else None
        return {**super().state(), "asked": None if asked is None else asdict(asked)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; a suggestion that was in progress is asked for again, with the scores it was given."""
        super().restore(state)
        if state["asked"] is not None and self._process is not None:
            self._process.ask_again(PendingPoint(**state["asked"]))

    def close(self) -> None:
        """End the suggestion process at once."""
        if self._process is not None:
            self._process.close()
