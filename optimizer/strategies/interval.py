"""Random search that asks a model of the scores for a candidate at every interval-th step (SWIFT 4.1.2, Eq. 2)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

from ...core.errors import LayerSetError, SettingsError
from ...core.types import LayerSet, Trial
from .base import Proposal, Study, StudyKind, with_bits
from .process import DEADLINE_S, Bits, Engine, Request, SuggestionProcess

MAX_REDRAWS = 64  # exchanges tried to get away from a set proposed before; spaces of a few sets run dry
MAX_PENDING = 64  # proposed sets without a score that a suggestion is told of; a caller may drop candidates


class IntervalStrategy:
    """Uniform draws, and at every `interval`-th step what `engine` suggested; without an engine only draws.

    A suggestion asked for at step n, with the trials observed by then, is used at step n + interval. If it is late,
    that step is drawn (origin "late") and the suggestion is used at the first due step after it arrives;
    `deterministic` waits for it instead. Step n draws from a generator of (seed, n), so one step replaced by a
    suggestion leaves the others as they are.
    """

    def __init__(
        self,
        base: LayerSet,
        n_skipped: int,
        seed: int,
        *,
        engine: Engine | None = None,
        interval: int = 25,
        deterministic: bool = False,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if interval < 1:
            raise SettingsError(f"interval {interval} between two suggestions is out of range: use 1 or more steps")
        self._base = base
        self._size = len(base.bits())
        self._seed = seed
        self._interval = interval
        self._deterministic = deterministic
        self._process = SuggestionProcess(engine, seed, deadline_s) if engine else None
        self._step = 0
        self._seen: set[Bits] = set()
        self._pending: dict[Bits, None] = {}  # in the order proposed
        self.set_n_skipped(n_skipped)

    def set_n_skipped(self, n_skipped: int) -> None:
        """See `Strategy`; a suggestion that was asked for with the old number is thrown away."""
        self._n_skipped = checked_size(self._base, n_skipped)

    def wants(self, prompt_id: str) -> StudyKind | None:
        """See `Strategy`; nothing: it is blind to the model."""
        return None

    def study(self, prompt_id: str, study: Study) -> None:
        """See `Strategy`."""

    def propose(self) -> Proposal:
        """See `Strategy`."""
        self._step += 1
        rng = random.Random(f"{self._seed}/{self._step}")
        drawn = draw(self._size, self._n_skipped, rng)
        # With one set to choose from there is nothing to learn.
        process = self._process if comb(self._size, self._n_skipped) > 1 else None
        if process is None or self._step % self._interval:
            return self._proposal(drawn, "random", rng)
        was_asked = process.in_flight
        suggested = process.take(wait=self._deterministic)
        if suggested is not None and sum(suggested) == self._n_skipped:
            proposal = self._proposal(suggested, process.engine, rng)
        else:
            proposal = self._proposal(drawn, "late" if was_asked else "random", rng)
        process.ask(self._step, self._n_skipped, list(self._pending))
        return proposal

    def observe(self, trial: Trial) -> None:
        """See `Strategy`."""
        bits = checked_bits(self._base, trial)
        self._seen.add(bits)
        self._pending.pop(bits, None)
        if self._process is not None:
            self._process.observe(bits, trial.score)

    def rate(self, layer_sets: Sequence[LayerSet]) -> list[float] | None:
        """See `Strategy`; a score speaks for itself."""
        return None

    def state(self) -> dict[str, Any]:
        """See `Strategy`; a suggestion on its way is kept as what was asked for."""
        asked = self._process.request if self._process is not None else None
        return {"step": self._step, "n_skipped": self._n_skipped, "asked": None if asked is None else asked.to_json()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Strategy`; a suggestion that was on its way is asked for again, of the scores it was asked of."""
        self._step = state["step"]
        self.set_n_skipped(state["n_skipped"])
        if state["asked"] is not None and self._process is not None:
            self._process.ask_again(Request.from_json(state["asked"]))

    def close(self) -> None:
        """End the suggestion process, at once; see `Strategy`."""
        if self._process is not None:
            self._process.close()

    def _proposal(self, bits: Bits, origin: str, rng: random.Random) -> Proposal:
        """The nearest set to `bits` that a bounded walk finds unseen, noted as proposed."""
        for _ in range(MAX_REDRAWS):
            if bits not in self._seen:
                break
            bits = exchanged(bits, rng)  # keeps a uniform draw uniform, and a suggestion close to what was suggested
        self._seen.add(bits)
        self._pending[bits] = None
        if len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        return Proposal(with_bits(self._base, bits), origin)


def checked_size(base: LayerSet, n_skipped: int) -> int:
    """Raises: SettingsError: the model has fewer searchable sub-layers."""
    size = len(base.bits())
    if not 0 <= n_skipped <= size:
        raise SettingsError(
            f"cannot skip {n_skipped} sub-layers of a model with {base.n_layers} layers: use 0 to {size}"
        )
    return n_skipped


def checked_bits(base: LayerSet, trial: Trial) -> Bits:
    """Raises: LayerSetError: the trial is of a model with another number of layers."""
    if trial.layer_set.n_layers != base.n_layers:
        raise LayerSetError(
            f"a trial of a model with {trial.layer_set.n_layers} layers was given to a search over "
            f"{base.n_layers} layers: use one strategy per model"
        )
    return trial.layer_set.bits()


def draw(size: int, n_skipped: int, rng: random.Random) -> Bits:
    """A uniform choice of `n_skipped` among `size` sub-layers; 1 is skipped."""
    chosen = set(rng.sample(range(size), n_skipped))
    return tuple(int(i in chosen) for i in range(size))


def exchanged(bits: Bits, rng: random.Random) -> Bits:
    """The set after a skipped sub-layer and a kept one, both at random, change places; itself if it lacks a kind."""
    skipped = [i for i, bit in enumerate(bits) if bit]
    kept = [i for i, bit in enumerate(bits) if not bit]
    if not skipped or not kept:
        return bits
    out, into = rng.choice(skipped), rng.choice(kept)
    return tuple(int(i == into or (bit == 1 and i != out)) for i, bit in enumerate(bits))
