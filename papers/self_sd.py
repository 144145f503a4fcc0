"""Self-SD's offline search: Bayesian optimisation over all 2L sub-layers for the highest tokens per second.

Source: Draft & Verify (arXiv:2309.08168), Eq. 1 and section 3.2; SWIFT 3.1 describes its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from ..core.errors import InvalidInput
from ..core.layer_sets import LayerSet, n_skipped_for
from ..core.types import Prompt
from ..decoding.methods import PLAIN, Method, Resources, build
from ..decoding.session import Session
from ..optimizer.suggestions import Array, next_point
from .methods.chains import AdaptiveThreshold

MAX_STEPS = 200  # Candidates tried, as in AdaDecode's appendix C; Draft & Verify uses 1,000.
SKIP_THRESHOLD = 0.5  # Sub-layers whose coordinate in the search cube exceeds this value are skipped.
START_RATIOS = (0.2, 0.35, 0.5)  # Skip ratios of the uniform layer sets that the search tries first.


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layer set and Self-SD's speed with it, in tokens per second."""

    layer_set: LayerSet
    tok_s: float
    plain_tok_s: float  # Speed of the plain run right after it.

    @property
    def ratio(self) -> float:
        """Speedup over plain decoding."""
        return self.tok_s / self.plain_tok_s


@dataclass(frozen=True, slots=True)
class SelfSdSearch:
    """The outcome of a search: its best candidate, and all of them in the order tried."""

    best: Candidate
    candidates: tuple[Candidate, ...]
    seconds: float

    @property
    def typical_ratio(self) -> float:
        """Median speedup of all candidates, which estimates that of a random layer set."""
        return median(candidate.ratio for candidate in self.candidates)


def search(
    session: Session,
    prompts: Sequence[Prompt],
    max_steps: int = MAX_STEPS,
    budget_s: float = float("inf"),
    seed: int = 0,
    uniform_starts: bool = True,
    on_candidate: Callable[[int, Candidate], None] | None = None,
    settings: AdaptiveThreshold | None = None,
) -> SelfSdSearch:
    """Find the layer set with which Self-SD is fastest on `prompts`, which are decoded once per candidate.

    DEVIATION: with `uniform_starts` the search first tries uniform sets. A random point of the cube skips half of the
    sub-layers, and with few of these sets a single token is accepted, so a search of some dozen steps would learn
    nothing. The score is the ratio to a plain run right after each candidate: tokens per second also depend on the
    machine's load.

    Args:   budget_s: seconds after which no candidate is started. settings: Self-SD's settings for all candidates.
    Raises: InvalidInput: there is no prompt, or the model has no layers.
    """
    n_layers = session.runtime.n_layers
    if not prompts or not n_layers:
        raise InvalidInput("a search needs prompts to decode: give a stream with at least one")
    started = perf_counter()
    starts = _start_points(n_layers) if uniform_starts else []
    points: list[tuple[tuple[float, ...], float]] = []
    candidates: list[Candidate] = []
    while not candidates or (len(candidates) < max_steps and perf_counter() - started < budget_s):
        point = _propose(points, starts, n_layers, seed)
        layer_set = _point_to_layer_set(point)
        method = build("self-sd", Resources(session.runtime, layer_set), settings)
        candidate = Candidate(layer_set, _speed(session, prompts, method), _speed(session, prompts, PLAIN))
        points.append((tuple(point), candidate.ratio))
        candidates.append(candidate)
        if on_candidate is not None:
            on_candidate(len(candidates), candidate)
    best_candidate = max(candidates, key=lambda candidate: candidate.ratio)
    return SelfSdSearch(best_candidate, tuple(candidates), perf_counter() - started)


def _propose(points: Sequence[tuple[tuple[float, ...], float]], starts: list[Array], n_layers: int, seed: int) -> Array:
    """Return the next point to try in the cube of 2L coordinates, first those of attention, then those of MLPs."""
    if len(points) < len(starts):
        return starts[len(points)]
    if not points:  # The first point of a search without start points is random.
        return np.random.default_rng(seed).random(2 * n_layers)
    return next_point(points, seed + len(points))


def _start_points(n_layers: int) -> list[Array]:
    """Return the points of uniform sets, without duplicates: for these the library prints to stdout."""
    sets = dict.fromkeys(LayerSet.uniform(n_layers, n_skipped_for(n_layers, ratio)) for ratio in START_RATIOS)
    skips = ([one.skips(kind, layer) for kind in ("attn", "mlp") for layer in range(n_layers)] for one in sets)
    return [np.where(row, 0.75, 0.25) for row in skips]


def _point_to_layer_set(point: Array) -> LayerSet:
    attn, mlp = (frozenset(np.flatnonzero(half > SKIP_THRESHOLD).tolist()) for half in np.split(point, 2))
    return LayerSet(len(point) // 2, attn, mlp)


def _speed(session: Session, prompts: Sequence[Prompt], method: Method) -> float:
    """Decode the prompts' first turns with a method; return tokens per second, prefill included."""
    n_tokens, total_s = 0, 0.0
    for prompt in prompts:
        completion = next(iter(session.run(prompt, method)))[1]
        n_tokens += completion.n_tokens
        total_s += completion.timings.total_s
    return n_tokens / max(total_s, 1e-9)
