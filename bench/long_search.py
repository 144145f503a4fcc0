"""How far strategies end from the best there is: a long climb from the best set that they found, judged on everything.

Every set is judged on all recorded windows, or until it is well behind, so that luck has no part in it. Single
sub-layers are flipped first, then pairs of them, the most promising first; where neither helps any more, a few
sub-layers of the best set are flipped at random and the climb begins again (iterated local search).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from ..core.types import LayerSet
from .search import AT_ONCE, Bench

PAIRS = 96  # pairs of sub-layers that are tried before a set counts as a peak
KICK = 4  # sub-layers that are flipped at random to leave a peak

OnGain = Callable[[str, float, float], None]


def with_long_search(bench: Bench, report: dict[str, Any], most: int, on_gain: OnGain) -> dict[str, Any]:
    """A report of `compare_strategies` with the long search from its best set, and every result's share of that."""
    best = max(report["results"], key=lambda result: result["final"])
    start = LayerSet(bench.runtime.n_layers, frozenset(best["skip_attn"]), frozenset(best["skip_mlp"]))
    found = LongSearch(bench, start, most, on_gain).run()
    results = [{**result, "of_long": round(result["final"] / found["best"], 5)} for result in report["results"]]
    return {**report, "results": results, "long_search": found}


class LongSearch:
    """The climb; `most` is how many sets it may judge."""

    def __init__(self, bench: Bench, start: LayerSet, most: int, on_gain: OnGain) -> None:
        self.bench, self.most, self.on_gain = bench, most, on_gain
        self.held = self.best = start
        self.n_judged, self.n_peaks = 0, 0
        self._draws = random.Random(bench.settings.seed)

    def run(self) -> dict[str, Any]:
        """What it came to, as JSON values."""
        started_at = self._value(self.best)
        while self.n_judged < self.most and self.best.n_searched:
            self._climb()
            n = self.best.n_searched
            self.held = self._flipped(self.best, self._draws.sample(range(n), min(KICK, n)))
        return {
            "sets": self.n_judged,
            "peaks": self.n_peaks,
            "start": started_at,
            "best": self._value(self.best),
            "n_skipped": self.best.n_skipped,
            "skip_attn": sorted(self.best.skip_attn),
            "skip_mlp": sorted(self.best.skip_mlp),
        }

    def _climb(self) -> None:
        """Go up from the set held until no flip of one or two sub-layers helps, or enough sets were judged."""
        while self.n_judged < self.most:
            singles = {(unit,): self._flipped(self.held, [unit]) for unit in range(self.held.n_searched)}
            ratios = self._race(list(singles.values()))
            by_move = {move: ratios[own] for move, own in singles.items() if own in ratios}
            best_first = sorted(by_move, key=by_move.__getitem__, reverse=True)
            helping = [move for move in best_first if by_move[move] > 1]
            if helping:
                self._hold(singles[helping[0]])
                self._take(helping[1:])
            elif not self._doubled(by_move):
                self.n_peaks += self.n_judged < self.most
                return

    def _take(self, moves: Sequence[tuple[int]]) -> None:
        """Make those of the moves, the best first, that go on helping together."""
        for move in moves:
            moved = self._flipped(self.held, move)
            if self._race([moved]).get(moved, 0.0) > 1:
                self._hold(moved)

    def _doubled(self, by_move: Mapping[tuple[int], float]) -> bool:
        """Make the best of the first few pairs of moves among which one helps; says whether there was one."""
        pairs = sorted(combinations(by_move, 2), key=lambda two: by_move[two[0]] + by_move[two[1]], reverse=True)
        for first in range(0, min(PAIRS, len(pairs)), AT_ONCE):
            ratios = self._race([self._flipped(self.held, [*a, *b]) for a, b in pairs[first : first + AT_ONCE]])
            if ratios and max(ratios.values()) > 1:
                self._hold(max(ratios, key=ratios.__getitem__))
                return True
        return False

    def _race(self, layer_sets: Sequence[LayerSet]) -> dict[LayerSet, float]:
        """As many as there is still room for, against the set held."""
        layer_sets = layer_sets[: max(0, self.most - self.n_judged)]
        self.n_judged += len(layer_sets)
        return self.bench.race(layer_sets, self.held)

    def _hold(self, layer_set: LayerSet) -> None:
        self.held = layer_set
        if (value := self._value(layer_set)) > self._value(self.best):
            self.best = layer_set
            self.on_gain("long search", self.n_judged, value)

    def _value(self, layer_set: LayerSet) -> float:
        return self.bench.judge(layer_set)[0]

    @staticmethod
    def _flipped(layer_set: LayerSet, units: Sequence[int]) -> LayerSet:
        bits = layer_set.bits()
        return layer_set.with_bits([1 - bit if i in units else bit for i, bit in enumerate(bits)])
