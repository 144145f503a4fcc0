"""The suggestion process: `python -m swiftopt.optimizer.strategies.suggest gp|tpe SEED`; ends with its standard input.

One JSON object per line each way. A request holds `step`, `n_skipped`, the observations since the last request
(`new`: pairs of a 0/1 string and a score) and the sets being scored (`pending`: 0/1 strings); the answer is
`{"bits": [0, 1, …]}` or `{"error": "…"}`. It depends on the engine, the seed, the step and the observations, and on
nothing else.
"""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from importlib import import_module
from typing import Any

from .history import History
from .process import Bits

NICENESS = 10  # added to the priority value: decoding goes first


def answer(engine: str, seed: int, history: History, request: dict[str, Any]) -> Bits:
    """Take in the request's observations and suggest a layer set."""
    for text, score in request["new"]:
        history.add(_bits(text), score)
    # Each engine loads its own library, seconds of start-up that the other need not pay.
    library = import_module(f"{__package__}.{engine}")
    request_seed = random.Random(f"{seed}/{request['step']}/{engine}").getrandbits(32)
    pending = [_bits(text) for text in request["pending"]]
    points = history.points(library.MAX_POINTS)
    suggestion: Bits = library.suggest(points, pending, request["n_skipped"], request_seed)
    return suggestion


def _bits(text: str) -> Bits:
    return tuple(int(character) for character in text)


def main() -> None:
    """Answer requests until the standard input ends."""
    engine, seed = sys.argv[1], int(sys.argv[2])
    os.nice(NICENESS)
    warnings.simplefilter("ignore")  # scikit-learn warns of each fit that ends at a bound; nobody reads it here
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not end up between two answers
    history = History()
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = {"bits": answer(engine, seed, history, json.loads(line))}
        except Exception as error:  # whatever it is, the near end logs it and goes on without
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
