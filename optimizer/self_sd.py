"""Self-SD's offline search: Bayesian optimisation over all 2L sub-layers, by the tokens per second that each set gives.

Source: Draft & Verify (arXiv:2309.08168), Eq. 1 and section 3.2; SWIFT 3.1 on its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from ..core.errors import InvalidInput
from ..core.types import LayerSet, Prompt
from ..decoding.methods import PLAIN, Method, Resources, build
from ..decoding.session import Session
from .strategies.process import points_of
from .strategies.surrogate import Array

MAX_STEPS = 200  # AdaDecode, appendix C; Draft & Verify itself takes 1,000
N_PROMPTS = 4  # evaluation prompts, as there
SKIPPED = 0.5  # a sub-layer is left out where its coordinate exceeds this
KAPPA = 2.5
START_RATIOS = (0.2, 0.35, 0.5)  # of evenly spaced sub-layers, tried before anything else


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layer set and the tokens per second that Self-SD made with it; `plain` is plain decoding's, run beside it."""

    layer_set: LayerSet
    tok_s: float
    plain_tok_s: float

    @property
    def ratio(self) -> float:
        """Times as fast as plain decoding."""
        return self.tok_s / self.plain_tok_s


@dataclass(frozen=True, slots=True)
class SelfSdSearch:
    """The outcome of a search: its best candidate, and all of them in the order tried."""

    best: Candidate
    candidates: tuple[Candidate, ...]
    seconds: float

    @property
    def typical_ratio(self) -> float:
        """Median ratio of all candidates to plain decoding, an estimate for a random one."""
        return median(candidate.ratio for candidate in self.candidates)


def search(
    session: Session,
    prompts: Sequence[Prompt],
    max_steps: int = MAX_STEPS,
    budget_s: float = float("inf"),
    seed: int = 0,
    uniform_starts: bool = True,
    on_candidate: Callable[[int, Candidate], None] | None = None,
) -> SelfSdSearch:
    """Find the layer set with which Self-SD is fastest on `prompts`, which are decoded once per candidate.

    DEVIATION: with `uniform_starts` the search starts from evenly spaced sets, for of the random halves that the cube's
    points mean few give one accepted token, and a search of some dozen steps would learn nothing else. What is
    maximised is the ratio to a plain run made right after each candidate, not tokens per second alone: of a machine
    that slows down for a while, a bad layer set would be learnt.

    Args:   budget_s: no candidate is begun after so many seconds.
    Raises: InvalidInput: there is no prompt, or the model has no sub-layer to leave out.
    """
    n_layers = session.runtime.n_layers
    if not prompts or not n_layers:
        raise InvalidInput("a search needs prompts to decode: give a stream with at least one")
    started = perf_counter()
    chooser = _Chooser(n_layers, seed, START_RATIOS if uniform_starts else ())
    candidates: list[Candidate] = []
    while not candidates or (len(candidates) < max_steps and perf_counter() - started < budget_s):
        layer_set = chooser.propose()
        method = build("self-sd", Resources(session.runtime, layer_set))
        candidate = Candidate(layer_set, *(_speed(session, prompts, each) for each in (method, PLAIN)))
        chooser.observe(candidate)
        candidates.append(candidate)
        if on_candidate is not None:
            on_candidate(len(candidates), candidate)
    best = max(candidates, key=lambda candidate: candidate.ratio)
    return SelfSdSearch(best, tuple(candidates), perf_counter() - started)


class _Chooser:
    """bayesian-optimization over the cube of 2L coordinates, attention first."""

    def __init__(self, n_layers: int, seed: int, start_ratios: Sequence[float]) -> None:
        self.n_layers = n_layers
        self._seed = seed
        self._points: list[tuple[tuple[float, ...], float]] = []
        inner = 2 * max(0, n_layers - 2)
        starts = [LayerSet.uniform(n_layers, round(share * inner)) for share in start_ratios]
        self._starts = list(dict.fromkeys(starts))  # equal points would make the library print to stdout
        self._asked: Array | None = None

    def propose(self) -> LayerSet:
        if self._starts:
            layer_set = self._starts.pop(0)
            bits = [layer_set.skips("attn", i) for i in range(self.n_layers)]
            bits += [layer_set.skips("mlp", i) for i in range(self.n_layers)]
            self._asked = np.where(bits, 0.75, 0.25)
        else:
            self._asked = self._suggest()
        left_out = np.flatnonzero(self._asked > SKIPPED)
        attn = frozenset(int(i) for i in left_out if i < self.n_layers)
        mlp = frozenset(int(i) - self.n_layers for i in left_out if i >= self.n_layers)
        return LayerSet(self.n_layers, attn, mlp)

    def observe(self, candidate: Candidate) -> None:
        assert self._asked is not None
        self._points.append((tuple(self._asked), candidate.ratio))

    def _suggest(self) -> Array:
        from bayes_opt.acquisition import UpperConfidenceBound  # seconds, that only a search is worth

        from .strategies.gp import MAX_POINTS, next_point

        if not self._points:  # as the library begins
            return np.random.default_rng(self._seed).random(2 * self.n_layers)
        points = points_of(self._points, MAX_POINTS)
        return next_point(points, UpperConfidenceBound(kappa=KAPPA), self._seed + len(self._points))


def _speed(session: Session, prompts: Sequence[Prompt], method: Method) -> float:
    """Decode whole requests and return tokens per second."""
    tokens, seconds = 0, 0.0
    for prompt in prompts:
        done = next(iter(session.run(prompt, method)))[1]
        tokens += done.n_tokens
        seconds += done.timings.total_s
    return tokens / max(seconds, 1e-9)
