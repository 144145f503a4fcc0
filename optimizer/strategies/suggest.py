"""The suggestion process: `python -m swiftopt.optimizer.strategies.suggest`; ends with its standard input.

One JSON object per line each way. A request names the `engine` and holds its `seed`, `n_skipped`, all `scores` so far
(pairs of a 0/1 string and a score) and the sets being scored (`pending`: 0/1 strings); the answer is
`{"bits": [0, 1, …]}` or `{"error": "…"}`. It depends on the request and on nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from .base import Bits

Point = tuple[Bits, float]

NICENESS = 10  # added to the priority value: decoding goes first


def answer(request: Mapping[str, Any]) -> Bits:
    """Suggest a layer set."""
    # Each engine loads its own library, seconds of start-up that the other need not pay.
    library = import_module(f"{__package__}.{request['engine']}")
    points = points_of(((_bits(text), score) for text, score in request["scores"]), library.MAX_POINTS)
    pending = [_bits(text) for text in request["pending"]]
    suggestion: Bits = library.suggest(points, pending, request["n_skipped"], request["seed"])
    return suggestion


def points_of(scores: Iterable[Point], limit: int) -> list[Point]:
    """Return at most `limit` sets with their mean scores: the best of the older ones, then the latest (two thirds).

    A set scored twice saw two windows of text; its mean is the better estimate, and bayesian-optimization takes no
    point twice. It counts as scored when it was last scored.
    """
    by_set: dict[Bits, list[float]] = {}
    for bits, score in scores:
        by_set[bits] = [*by_set.pop(bits, []), score]
    points = [(bits, sum(own) / len(own)) for bits, own in by_set.items()]
    if len(points) <= limit:
        return points
    n_latest = limit * 2 // 3
    older, latest = points[:-n_latest], points[-n_latest:]
    best = sorted(older, key=lambda point: point[1], reverse=True)[: limit - n_latest]
    return best + latest


def _bits(text: str) -> Bits:
    return tuple(int(character) for character in text)


def main() -> None:
    """Answer requests until the standard input ends."""
    os.nice(NICENESS)
    warnings.simplefilter("ignore")  # scikit-learn warns of each fit that ends at a bound; nobody reads it here
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not end up between two answers
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = {"bits": answer(json.loads(line))}
        except Exception as error:  # whatever it is, the near end logs it and goes on without
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
