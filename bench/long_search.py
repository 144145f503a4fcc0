"""A long search, which estimates the best objective that any layer set has on recorded windows."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from ..core.layer_sets import LayerSet
from .recorded_windows import AT_ONCE, RecordedWindows

PAIRS = 96  # Pairs of flips that are tried before a layer set counts as a local optimum.
KICK = 4  # Random flips that leave a local optimum.

OnGain = Callable[[str, float, float], None]  # Called with a name, the passes or judged sets so far, and the objective.


def left_out_of(layer_set: LayerSet) -> dict[str, Any]:
    skipped = {"skip_attn": sorted(layer_set.skip_attn), "skip_mlp": sorted(layer_set.skip_mlp)}
    return {"n_skipped": layer_set.n_skipped, **skipped}


def with_long_search(
    windows: RecordedWindows, report: dict[str, Any], max_judged: int, on_gain: OnGain
) -> dict[str, Any]:
    """Return `report` with a long search from its best set, and each result's share of that search's objective."""
    best = max(report["results"], key=lambda result: result["final"])
    start_set = LayerSet(windows.runtime.n_layers, frozenset(best["skip_attn"]), frozenset(best["skip_mlp"]))
    search = LongSearch(windows, start_set, max_judged, on_gain)
    long_search = search.run()
    results = [{**result, "of_long": round(result["final"] / long_search["best"], 5)} for result in report["results"]]
    return {**report, "interrupted": search.interrupted, "results": results, "long_search": long_search}


class LongSearch:
    """Iterated local search that judges at most `max_judged` layer sets.

    Sets race on all recorded windows. The search flips single sub-layers, and where no single flip helps, pairs of
    them, best first. At a local optimum it flips random sub-layers of the best set and climbs again. Ctrl-C ends it.
    """

    def __init__(self, windows: RecordedWindows, start_set: LayerSet, max_judged: int, on_gain: OnGain) -> None:
        self.windows, self.max_judged, self.on_gain = windows, max_judged, on_gain
        self.current = self.best = start_set
        self.n_judged, self.n_peaks, self.interrupted = 0, 0, False
        self._random = random.Random(windows.settings.seed)

    def run(self) -> dict[str, Any]:
        started_at = self._value(self.best)
        try:
            while self.n_judged < self.max_judged and len(self.best.bits()):
                self._climb()
                n = len(self.best.bits())
                self.current = self._flip(self.best, self._random.sample(range(n), min(KICK, n)))
        except KeyboardInterrupt:
            self.interrupted = True
        return {
            "sets": self.n_judged,
            "peaks": self.n_peaks,
            "start": started_at,
            "best": self._value(self.best),
            **left_out_of(self.best),
        }

    def _climb(self) -> None:
        """Improve the current set until no flip of one or two sub-layers helps, or `max_judged` sets are judged."""
        while self.n_judged < self.max_judged:
            singles = {(bit,): self._flip(self.current, [bit]) for bit in range(len(self.current.bits()))}
            ratios = self._race(list(singles.values()))
            ratio_by_flip = {flip: ratios[layer_set] for flip, layer_set in singles.items() if layer_set in ratios}
            flips_by_ratio = sorted(ratio_by_flip, key=ratio_by_flip.__getitem__, reverse=True)
            improving_flips = [flip for flip in flips_by_ratio if ratio_by_flip[flip] > 1]
            if improving_flips:
                self._take(singles[improving_flips[0]])
                for flip in improving_flips[1:]:  # Add further flips that still help in combination.
                    flipped = self._flip(self.current, flip)
                    if self._race([flipped]).get(flipped, 0.0) > 1:
                        self._take(flipped)
            elif not self._try_pairs(ratio_by_flip):
                self.n_peaks += self.n_judged < self.max_judged
                return

    def _try_pairs(self, ratio_by_flip: Mapping[tuple[int], float]) -> bool:
        """Try pairs of flips in batches and take the best pair of the first batch with one that helps.

        Returns: whether a pair helped.
        """
        pairs = sorted(
            combinations(ratio_by_flip, 2),
            key=lambda flip_pair: ratio_by_flip[flip_pair[0]] + ratio_by_flip[flip_pair[1]],
            reverse=True,
        )
        for batch_start in range(0, min(PAIRS, len(pairs)), AT_ONCE):
            ratios = self._race(
                [
                    self._flip(self.current, [*first_flip, *second_flip])
                    for first_flip, second_flip in pairs[batch_start : batch_start + AT_ONCE]
                ]
            )
            if ratios and max(ratios.values()) > 1:
                self._take(max(ratios, key=ratios.__getitem__))
                return True
        return False

    def _race(self, layer_sets: Sequence[LayerSet]) -> dict[LayerSet, float]:
        """Race as many of the sets as may still be judged against the current one."""
        layer_sets = layer_sets[: max(0, self.max_judged - self.n_judged)]
        ratios = self.windows.race(layer_sets, self.current)
        self.n_judged += len(layer_sets)
        return ratios

    def _take(self, layer_set: LayerSet) -> None:
        self.current = layer_set
        if (objective := self._value(layer_set)) > self._value(self.best):
            self.best = layer_set
            self.on_gain("long search", self.n_judged, objective)

    def _value(self, layer_set: LayerSet) -> float:
        return self.windows.judge(layer_set)[0]

    @staticmethod
    def _flip(layer_set: LayerSet, units: Sequence[int]) -> LayerSet:
        bits = layer_set.bits()
        return layer_set.with_bits([1 - bit if i in units else bit for i, bit in enumerate(bits)])
