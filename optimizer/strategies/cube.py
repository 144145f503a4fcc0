"""A suggestion as SWIFT's published code makes it: a Gaussian process over the cube of all searchable sub-layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from bayes_opt.acquisition import UpperConfidenceBound

from .base import Bits
from .gp import KAPPA, MAX_POINTS, next_point

__all__ = ["MAX_POINTS", "suggest"]


def suggest(points: Sequence[tuple[Bits, float]], pending: Sequence[Bits], n_skipped: int, seed: int) -> Bits:
    """Return the set of the `n_skipped` largest coordinates of the point with the highest bound (SWIFT Eq. 2).

    DEVIATION: the points that the process knows are the 0/1 sets that were run, where the published code registers the
    continuous point that it was given; one candidate at a time is scored, so `pending` is not told.
    """
    point = next_point(points, UpperConfidenceBound(kappa=KAPPA), seed)
    chosen = set(np.argsort(-point, kind="stable")[:n_skipped].tolist())
    return tuple(int(i in chosen) for i in range(len(point)))
