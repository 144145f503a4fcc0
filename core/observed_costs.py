"""Costs that are updated while decoding: every pass is timed, and corrects the profile for passes of its kind.

Seconds of a pass over one row are the base. Everything else is kept as a quotient to it, as in a measurement, because
the speed of a machine drifts by the minute and slows all passes alike. Each context bucket has a base and quotients of
its own; one that no pass has reached has those of the nearest one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

from .costs import CostProfile, Quality, context_bucket
from .settings import STORED
from .types import LayerSet

# Effective number of one-row passes averaged in the base time; few, so that it follows changes in machine speed.
BASE_MEMORY = 16
MEMORY = 256  # Effective number of passes averaged in a quotient.
# Weight of the profile's own figure, in observed passes, by the profile's quality.
PRIOR = {"disturbed": 4, "quiet": 64, "refined": 64}
FEWEST_BASES = 2  # One-row passes needed before other passes are compared with the base.
# Passes other than one-row target passes after which a profile counts as "refined". It also needs at least
# `BASE_MEMORY` one-row target passes.
REFINED_AFTER = 64
# Bound on a pass's deviation from its expected log seconds: a pass may have been interrupted.
LARGEST_STEP = math.log(2.0)
REBUILD_EVERY = 16  # Passes after which `updated` computes a new profile.
MOST_KEPT = 512  # Entries of a bucket's cache of profiled costs; a full cache is cleared.

K = TypeVar("K", int, str)
# Number of rows of a pass, and the layer set of the draft; None: a pass of the target model.
Part = tuple[int, LayerSet | None]


@dataclass(frozen=True, slots=True)
class PassTiming:
    """Seconds of one pass, or of several passes timed together, at a mean context length."""

    parts: Sequence[Part]
    n_positions: float
    seconds: float


@dataclass(slots=True)
class _Quotient:
    """A moving average of log(observed cost ÷ profiled cost)."""

    log: float = 0.0
    n: float = 0.0

    def add(self, residual: float, weight: float, prior: float) -> None:
        self.n += weight
        self.log += weight * residual / min(MEMORY, prior + self.n)


@dataclass(slots=True)
class _Bucket:
    """One context bucket: its measured profile, and corrections learned from passes since."""

    profile: CostProfile
    base: _Quotient = field(default_factory=_Quotient)  # Log seconds of a one-row target pass.
    widths: dict[int, _Quotient] = field(default_factory=dict)  # Corrections for target passes, by number of rows.
    # Corrections for draft passes, by weight format.
    formats: dict[str, _Quotient] = field(default_factory=dict)
    current: CostProfile | None = None
    n_since: int = 0  # Passes learned since `current` was computed.
    # Cache: cost of a pass according to `profile`, in one-row target passes.
    profiled: dict[Part, float] = field(default_factory=dict)

    @property
    def is_trusted(self) -> bool:
        """Whether the profile can be used for its context before any pass was observed there."""
        return self.profile.quality != "disturbed"

    @property
    def n_passes(self) -> float:
        """How many passes were observed."""
        return self.base.n + sum(quotient.n for quotient in (*self.widths.values(), *self.formats.values()))

    def learn(self, parts: Sequence[Part], seconds: float) -> None:
        """Update the base from a one-row target pass, or the quotients from any other passes."""
        if list(parts) == [(1, None)]:
            self.base.n += 1
            step = math.log(seconds) - self.base.log
            # The first pass of a process is slow because it allocates memory, so the second one replaces the base and
            # is not averaged with it.
            self.base.log += step if self.base.n <= FEWEST_BASES else _clipped(step) / min(BASE_MEMORY, self.base.n)
        elif self.base.n >= FEWEST_BASES:
            expected = [self._expected(*part) for part in parts]
            residual = _clipped(math.log(seconds) - self.base.log - math.log(sum(expected)))
            prior = PRIOR[self.profile.quality]
            for (n_rows, layer_set), cost in zip(parts, expected, strict=True):
                for quotient, weight in self._quotients(n_rows, layer_set):
                    quotient.add(residual, weight * cost / sum(expected), prior)
        else:
            return
        self.n_since += 1
        if self.n_since >= REBUILD_EVERY:
            self.current = None

    def _expected(self, n_rows: int, layer_set: LayerSet | None) -> float:
        """Return the cost of a pass in one-row passes of the target, as far as it is known."""
        profile, part = self.profile, (n_rows, layer_set)
        if part not in self.profiled:
            if len(self.profiled) >= MOST_KEPT:
                self.profiled.clear()
            cost = profile.verify_cost(n_rows) if layer_set is None else profile.draft_cost(layer_set, n_rows)
            self.profiled[part] = cost
        return self.profiled[part] * math.exp(
            sum(weight * quotient.log for quotient, weight in self._quotients(n_rows, layer_set))
        )

    def _quotients(self, n_rows: int, layer_set: LayerSet | None) -> Iterator[tuple[_Quotient, float]]:
        """Yield the quotients that a pass depends on, with weights whose sum is 1; none for the base."""
        if layer_set is not None:
            names = {name for _, name in layer_set.formats} or {STORED}
            for name in names:
                yield self.formats.setdefault(name, _Quotient()), 1 / len(names)
            return
        widths = [n for n in self.profile.pass_s if n > 1]
        if n_rows == 1 or not widths:
            return
        at = min(bisect_left(widths, n_rows), len(widths) - 1)
        high = widths[at]
        low = widths[at - 1] if at else 1
        share = min(1.0, (n_rows - low) / (high - low))
        for n, weight in ((low, 1 - share), (high, share)):
            if n > 1 and weight > 0:
                yield self.widths.setdefault(n, _Quotient()), weight

    def updated(self) -> CostProfile:
        """Return the profile corrected by observed passes; the same object until it is rebuilt."""
        if self.current is None:
            self.current, self.n_since = self._updated(), 0
        return self.current

    def _updated(self) -> CostProfile:
        profile = self.profile
        if not self.base.n:
            return profile
        by = math.exp(self.base.log) / profile.target_pass_s(1)
        seconds = {n: s * by * _factor(self.widths, n) for n, s in profile.pass_s.items()}
        updated = by * _factor(self.formats, STORED)
        is_refined = self.base.n >= BASE_MEMORY and self.n_passes - self.base.n >= REFINED_AFTER
        return replace(
            profile,
            attn_s=profile.attn_s * updated,
            mlp_s=profile.mlp_s * updated,
            head_s=profile.head_s * updated,
            fixed_s=profile.fixed_s * updated,
            # A pass over more rows cannot take less time, so seconds never decrease with n.
            pass_s=dict(zip(seconds, accumulate(seconds.values(), max), strict=True)),
            formats={name: costs.scaled(by * _factor(self.formats, name)) for name, costs in profile.formats.items()},
            quality="refined" if is_refined else profile.quality,
            remark=f"{self.n_passes:.0f} passes of decoding" if is_refined else profile.remark,
        )


class ObservedCosts:
    """Costs by context length, updated from the timed passes of decoding.

    Args: profile: of a typical context. others: further profiles of the same model, device, dtype and software.
    """

    def __init__(self, profile: CostProfile, others: Iterable[CostProfile] = ()) -> None:
        self._typical = profile.context_bucket
        self._buckets = {other.context_bucket: _Bucket(other) for other in others}
        self._buckets[self._typical] = _Bucket(profile)

    def learn(self, timings: Iterable[PassTiming]) -> None:
        """Learn from passes that were timed, oldest first."""
        for timing in timings:
            if any(layer_set is not None and self.missing(layer_set) for _, layer_set in timing.parts):
                continue
            bucket = self._begun(context_bucket(math.ceil(timing.n_positions)))
            bucket.learn(timing.parts, timing.seconds)
            if bucket.n_passes > self._buckets[self._typical].n_passes:
                self._typical = bucket.profile.context_bucket

    def _begun(self, size: int) -> _Bucket:
        """Return the context bucket that learns from passes; a new one starts with the costs of the nearest."""
        bucket = self._buckets.get(size)
        if bucket is None or not (bucket.n_passes or bucket.is_trusted):
            nearest = self._nearest(size).updated()
            # The costs come from another context length, so they do not count as refined here.
            quality: Quality = "disturbed" if nearest.quality == "disturbed" else "quiet"
            bucket = self._buckets[size] = _Bucket(replace(nearest, context_bucket=size, quality=quality))
        return bucket

    def _nearest(self, size: int) -> _Bucket:
        """Return the bucket with the nearest context length among those with observed passes or a trusted profile."""
        taught = [bucket for bucket in self._buckets.values() if bucket.n_passes or bucket.is_trusted]
        return min(
            taught or self._buckets.values(), key=lambda bucket: abs(math.log(bucket.profile.context_bucket / size))
        )

    def at(self, n_positions: int | None = None) -> CostProfile:
        """Return the costs of passes in a context of that many tokens, or the nearest known; None: in the usual one.

        The usual context is the one that most passes were in, and before any the one that was measured. The profile is
        the same object until passes have changed it.
        """
        return self._nearest(self._typical if n_positions is None else context_bucket(n_positions)).updated()

    def missing(self, layer_set: LayerSet) -> frozenset[str]:
        """Return the formats of a draft whose costs were not measured."""
        return self.at().missing(layer_set)

    def refined(self) -> list[CostProfile]:
        """Return the changed profiles of all context buckets with enough observed passes."""
        for bucket in self._buckets.values():
            bucket.current = None
        profiles = [(bucket.profile, bucket.updated()) for bucket in self._buckets.values()]
        return [after for before, after in profiles if after.quality == "refined" and after != before]


def _factor(quotients: Mapping[K, _Quotient], key: K) -> float:
    return math.exp(quotients[key].log) if key in quotients else 1.0


def _clipped(step: float) -> float:
    return max(-LARGEST_STEP, min(LARGEST_STEP, step))
