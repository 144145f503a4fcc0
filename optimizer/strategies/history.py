"""Scores of layer sets, each set once, cut to what a model of them can be fitted to in time."""

from __future__ import annotations

from .process import Bits

Point = tuple[Bits, float]


class History:
    """Mean score per layer set, in the order in which the sets were last scored.

    A set scored twice saw two windows of text; its mean is the better estimate, and bayesian-optimization takes no
    point twice.
    """

    def __init__(self) -> None:
        self._scores: dict[Bits, list[float]] = {}

    def add(self, bits: Bits, score: float) -> None:
        """Note a score; the set counts as the latest."""
        self._scores[bits] = [*self._scores.pop(bits, []), score]

    def points(self, limit: int) -> list[Point]:
        """At most `limit` sets with their mean scores: the best of the older ones, then the latest (two thirds)."""
        points = [(bits, sum(scores) / len(scores)) for bits, scores in self._scores.items()]
        if len(points) <= limit:
            return points
        n_latest = limit * 2 // 3
        older, latest = points[:-n_latest], points[-n_latest:]
        best = sorted(older, key=lambda point: point[1], reverse=True)[: limit - n_latest]
        return best + latest
