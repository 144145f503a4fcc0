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

from .context_costs import RowShare, SlotCopies, deepened
from .costs import CostProfile, ExpertCosts, ExpertCounts, Quality, context_bucket, distinct_experts, interpolate
from .layer_sets import LayerSet
from .settings import STORED

# Effective number of one-row passes averaged in the base time; few, so that it follows changes in machine speed.
MAX_BASE_WEIGHT = 16
MAX_WEIGHT = 256  # Effective number of passes averaged in a quotient.
# Weight of the profile's own figure, in observed passes, by the profile's quality.
PRIOR_WEIGHTS = {"disturbed": 4, "quiet": 64, "refined": 64}
MIN_BASE_PASSES = 2  # One-row passes needed before other passes are compared with the base.
# Passes other than one-row target passes after which a profile counts as "refined". It also needs at least
# `MAX_BASE_WEIGHT` one-row target passes.
MIN_REFINED_PASSES = 64
# Bound on a pass's deviation from its expected log seconds: a pass may have been interrupted.
MAX_LOG_STEP = math.log(2.0)
PASSES_PER_REBUILD = 16  # Passes after which `updated` computes a new profile.
MAX_CACHED_COSTS = 512  # Entries of a bucket's cache of profiled costs; a full cache is cleared.

MANY_PASSES = 64  # Passes of a context that was not measured during which its costs are computed anew with each one.
MIN_CHANGE = 0.02  # Least change of what a longer context adds, in plain passes, that is taken over.
MAX_TAKEN = 1 << 18  # Experts taken by tokens, over all layers, that the overlap of neighbours is averaged over.
OVERLAP_PRIOR = 64  # Weight of the profile's own overlap, in tokens of one layer.
# Weight of the profile's own seconds of an expert: the squared error of a pass's log time by that of the log seconds.
SLOPE_PRIOR = (0.05 / 0.2) ** 2
MIN_COST_SHARE = 0.1  # Least share of a pass's usual cost that one with few experts is taken to have.

K = TypeVar("K", int, str)
# Number of rows of a pass, and the layer set of the draft; None: a pass of the target model.
Part = tuple[int, LayerSet | None]


@dataclass(frozen=True, slots=True)
class PassTiming:
    """Seconds of one pass, or of several passes timed together, at a mean context length.

    `experts`: what the rows of the target's own pass took of its mixtures; None: not counted, or there are none. A pass
    that was not timed, such as one over a prompt, has no parts.
    """

    parts: Sequence[Part]
    n_positions: float
    seconds: float
    experts: ExpertCounts | None = None


@dataclass(slots=True)
class _Quotient:
    """A moving average of log(observed cost ÷ profiled cost)."""

    log: float = 0.0
    n: float = 0.0

    def add(self, residual: float, weight: float, prior: float) -> None:
        self.n += weight
        self.log += weight * residual / min(MAX_WEIGHT, prior + self.n)


@dataclass(slots=True)
class _Slope:
    """A factor on the seconds of an expert, by how passes with more distinct experts than usual differ in time.

    A regression of the residuals of log seconds, towards a factor of 1 by the weight of the measured figure.
    """

    products: float = 0.0  # Sum of deviation · residual.
    squares: float = SLOPE_PRIOR  # Sum of squared deviations.

    @property
    def log(self) -> float:
        return max(-MAX_LOG_STEP, min(MAX_LOG_STEP, self.products / self.squares))

    def add(self, deviation: float, residual: float) -> None:
        """Learn from a pass that has a share `deviation` more of its cost in experts than usual.

        Args: residual: log of the observed by the expected cost with this factor.
        """
        self.products += deviation * (residual + deviation * self.log)
        self.squares += deviation * deviation


@dataclass(slots=True)
class _Overlap:
    """How many experts a token takes that the token before took, too; old counts fade."""

    repeated: float = 0.0
    taken: float = 0.0

    def add(self, counts: ExpertCounts) -> None:
        fading = min(1.0, MAX_TAKEN / (self.taken + counts.taken)) if counts.taken else 1.0
        self.repeated = (self.repeated + counts.repeated) * fading
        self.taken = (self.taken + counts.taken) * fading


@dataclass(slots=True)
class _Bucket:
    """One context bucket: its measured profile, and corrections learned from passes since."""

    profile: CostProfile
    base: _Quotient = field(default_factory=_Quotient)  # Log seconds of a one-row target pass.
    widths: dict[int, _Quotient] = field(default_factory=dict)  # Corrections for target passes, by number of rows.
    # Corrections for draft passes, by weight format.
    formats: dict[str, _Quotient] = field(default_factory=dict)
    overlap: _Overlap = field(default_factory=_Overlap)
    # Corrections for the experts that rows add to those of the first, by number of rows.
    added: dict[int, _Quotient] = field(default_factory=dict)
    slope: _Slope = field(default_factory=_Slope)
    current: CostProfile | None = None
    n_since: int = 0  # Passes learned since `current` was computed.
    # Profile of a shorter context that `profile` was computed from; None: it was not.
    origin: CostProfile | None = None
    copies: SlotCopies | None = None  # What drafts read in place of slots in long contexts.
    # What the longer context was taken to add to a plain pass, in seconds, and to each further row of that.
    deepened_by: tuple[float, float] = (0.0, 0.0)
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

    def learn(self, timing: PassTiming) -> None:
        """Update the base from a one-row target pass, or the quotients from any other passes."""
        parts, seconds, counts = timing.parts, timing.seconds, timing.experts
        if counts is not None and self.profile.experts is not None and self.profile.experts.distinct:
            self.overlap.add(counts)
            if len(parts) == 1:
                self._learn_distinct(self.profile.experts, parts[0][0], counts.distinct)
        if not parts:
            return
        if list(parts) == [(1, None)]:
            self.base.n += 1
            log_step = math.log(seconds) - self.base.log
            # The first pass of a process is slow because it allocates memory, so the second one replaces the base and
            # is not averaged with it.
            self.base.log += (
                log_step if self.base.n <= MIN_BASE_PASSES else _clip(log_step) / min(MAX_BASE_WEIGHT, self.base.n)
            )
        elif self.base.n >= MIN_BASE_PASSES:
            expected_costs = [self._expected_cost(*part) for part in parts]
            further, deviation = self._further_costs(parts, counts)
            expected_cost = max(sum(expected_costs) + further, MIN_COST_SHARE * sum(expected_costs))
            residual = _clip(math.log(seconds) - self.base.log - math.log(expected_cost))
            if deviation:
                self.slope.add(deviation / expected_cost, residual)
            prior = PRIOR_WEIGHTS[self.profile.quality if self.origin is None else "disturbed"]
            for (n_rows, layer_set), cost in zip(parts, expected_costs, strict=True):
                for quotient, weight in self._quotients(n_rows, layer_set):
                    quotient.add(residual, weight * cost / sum(expected_costs), prior)
        else:
            return
        self.n_since += 1
        if self.n_since >= (PASSES_PER_REBUILD if self.origin is None or self.n_passes > MANY_PASSES else 1):
            self.current = None

    def learn_depth(self, parts: Sequence[Part], seconds: float, share: RowShare) -> None:
        """Learn what the longer context adds to passes, where the profile is of another one."""
        if self.origin is None or self.base.n < MIN_BASE_PASSES:
            return
        base_s, origin_s = math.exp(self.base.log), self.origin.target_pass_s(1)
        ((n_rows, layer_set), *others) = parts
        if layer_set is None and n_rows > 1 and not others:
            share.learn(n_rows, seconds / base_s, self.origin.verify_cost(n_rows), base_s / origin_s - 1)
        added_s = max(0.0, base_s - origin_s)
        (known_s, known_share), by = self.deepened_by, (added_s, share.value)
        if abs(added_s - known_s) > MIN_CHANGE * base_s or abs(share.value - known_share) > MIN_CHANGE:
            self.profile = deepened(self.origin, self.profile.context_bucket, *by, self.copies)
            self.deepened_by = by
            self.profiled.clear()
            self.current = None

    def _learn_distinct(self, experts: ExpertCosts, n_rows: int, distinct: float) -> None:
        added, expected = distinct - experts.n_chosen, self._distinct(experts, n_rows) - experts.n_chosen
        if added > 0 and expected > 0:
            for quotient, weight in self._of_widths(self.added, n_rows):
                quotient.add(_clip(math.log(added / expected)), weight, PRIOR_WEIGHTS["disturbed"])

    def _distinct(self, experts: ExpertCosts, n_rows: int) -> float:
        """Return how many different experts of a layer the rows of a text take, by what was seen so far."""
        overlap = experts.overlap
        if self.overlap.taken:
            prior = experts.n_chosen / experts.n_experts if overlap is None else overlap
            seen = self.overlap.taken / experts.n_chosen
            overlap = (self.overlap.repeated / experts.n_chosen + OVERLAP_PRIOR * prior) / (seen + OVERLAP_PRIOR)
        if overlap is None:
            return interpolate(experts.distinct, n_rows)
        added = distinct_experts(n_rows, experts.n_chosen, overlap) - experts.n_chosen
        logs = sum(weight * quotient.log for quotient, weight in self._of_widths(self.added, n_rows))
        return min(float(experts.n_experts), experts.n_chosen + added * math.exp(logs))

    def _further_costs(self, parts: Sequence[Part], counts: ExpertCounts | None) -> tuple[float, float]:
        """Return what a pass costs more because its rows took more experts: than the profile's pass, and than usual."""
        experts = self.profile.experts
        if experts is None or counts is None or not experts.distinct or len(parts) != 1:
            return 0.0, 0.0
        n_rows = parts[0][0]
        usual_numbers = interpolate(experts.distinct, n_rows), self._distinct(experts, n_rows)
        of_profile, of_usual = ((counts.distinct - n) * self._layer_cost(experts) for n in usual_numbers)
        return of_profile, of_usual

    def _layer_cost(self, experts: ExpertCosts) -> float:
        """Return the cost of one more expert in each layer that has a mixture, in one-row passes of the target."""
        return len(experts.layers) * experts.expert_s / self.profile.target_pass_s(1) * math.exp(self.slope.log)

    def _expected_cost(self, n_rows: int, layer_set: LayerSet | None) -> float:
        """Return the cost of a pass in one-row passes of the target, as far as it is known."""
        profile, pass_key = self.profile, (n_rows, layer_set)
        if pass_key not in self.profiled:
            if len(self.profiled) >= MAX_CACHED_COSTS:
                self.profiled.clear()
            cost = profile.verify_cost(n_rows) if layer_set is None else profile.draft_cost(layer_set, n_rows)
            self.profiled[pass_key] = cost
        return self.profiled[pass_key] * math.exp(
            sum(weight * quotient.log for quotient, weight in self._quotients(n_rows, layer_set))
        )

    def _quotients(self, n_rows: int, layer_set: LayerSet | None) -> Iterator[tuple[_Quotient, float]]:
        """Yield the quotients that a pass depends on, with weights whose sum is 1; none for the base."""
        if layer_set is not None:
            names = {format_name for _, format_name in layer_set.formats} or {STORED}
            for format_name in names:
                yield self.formats.setdefault(format_name, _Quotient()), 1 / len(names)
            return
        yield from self._of_widths(self.widths, n_rows)

    def _of_widths(self, quotients: dict[int, _Quotient], n_rows: int) -> Iterator[tuple[_Quotient, float]]:
        """Yield the quotients of the measured widths next to a number of rows, with weights; none for one row."""
        widths = [width for width in self.profile.pass_s if width > 1]
        if n_rows == 1 or not widths:
            return
        index = min(bisect_left(widths, n_rows), len(widths) - 1)
        upper = widths[index]
        lower = widths[index - 1] if index else 1
        upper_weight = min(1.0, (n_rows - lower) / (upper - lower))
        for width, weight in ((lower, 1 - upper_weight), (upper, upper_weight)):
            if width > 1 and weight > 0:
                yield quotients.setdefault(width, _Quotient()), weight

    def updated(self) -> CostProfile:
        """Return the profile corrected by observed passes; the same object until it is rebuilt."""
        if self.current is None:
            self.current, self.n_since = self._correct_profile(), 0
        return self.current

    def _correct_profile(self) -> CostProfile:
        profile = self.profile
        if not self.base.n:
            return profile
        experts, further = self._corrected_experts()
        base_factor = math.exp(self.base.log) / profile.target_pass_s(1)
        corrected_s = {
            n_rows: (measured_s * _correction_factor(self.widths, n_rows) + further.get(n_rows, 0.0)) * base_factor
            for n_rows, measured_s in profile.pass_s.items()
        }
        stored_factor = base_factor * _correction_factor(self.formats, STORED)
        is_refined = self.base.n >= MAX_BASE_WEIGHT and self.n_passes - self.base.n >= MIN_REFINED_PASSES
        return replace(
            profile,
            attn_s=profile.attn_s * stored_factor,
            mlp_s=profile.mlp_s * stored_factor,
            head_s=profile.head_s * stored_factor,
            fixed_s=profile.fixed_s * stored_factor,
            # A pass over more rows cannot take less time, so seconds never decrease with n.
            pass_s=dict(zip(corrected_s, accumulate(corrected_s.values(), max), strict=True)),
            formats={
                name: costs.scaled(base_factor * _correction_factor(self.formats, name))
                for name, costs in profile.formats.items()
            },
            quality="refined" if is_refined else profile.quality,
            remark=f"{self.n_passes:.0f} passes of decoding" if is_refined else profile.remark,
            experts=None if experts is None else replace(experts, expert_s=experts.expert_s * stored_factor),
        )

    def _corrected_experts(self) -> tuple[ExpertCosts | None, dict[int, float]]:
        """Return the costs of experts by what was seen, and the seconds by which passes over n rows change with it."""
        experts = self.profile.experts
        if experts is None or not experts.distinct or not self.overlap.taken:
            return experts, {}
        distinct = {n_rows: self._distinct(experts, n_rows) for n_rows in experts.distinct}
        layer_s = self._layer_cost(experts) * self.profile.target_pass_s(1)
        further = {n_rows: layer_s * (distinct[n_rows] - before) for n_rows, before in experts.distinct.items()}
        overlap = self.overlap.repeated / self.overlap.taken
        expert_s = experts.expert_s * math.exp(self.slope.log)
        return replace(experts, distinct=distinct, overlap=overlap, expert_s=expert_s), further


class ObservedCosts:
    """Costs by context length, updated from the timed passes of decoding.

    Args: profile: of a typical context. others: further profiles of the same model, device, dtype and software.
          copies: what drafts read in place of slots in long contexts; None: the slots.
    """

    def __init__(
        self, profile: CostProfile, others: Iterable[CostProfile] = (), copies: SlotCopies | None = None
    ) -> None:
        self._copies = copies
        self._typical_bucket = profile.context_bucket
        self._row_share = RowShare()
        self._buckets = {other_profile.context_bucket: _Bucket(other_profile) for other_profile in others}
        self._buckets[self._typical_bucket] = _Bucket(profile)

    def learn(self, timings: Iterable[PassTiming]) -> None:
        """Learn from passes that were timed, oldest first."""
        for timing in timings:
            if any(layer_set is not None and self.missing(layer_set) for _, layer_set in timing.parts):
                continue
            bucket = self._bucket_for(context_bucket(math.ceil(timing.n_positions)))
            if timing.parts:
                bucket.learn_depth(timing.parts, timing.seconds, self._row_share)
            bucket.learn(timing)
            if bucket.n_passes > self._buckets[self._typical_bucket].n_passes:
                self._typical_bucket = bucket.profile.context_bucket

    def _bucket_for(self, size: int) -> _Bucket:
        """Return the context bucket that learns from passes; a new one starts with the costs of the nearest."""
        bucket = self._buckets.get(size)
        if bucket is None or not (bucket.n_passes or bucket.is_trusted):
            nearest_bucket = self._nearest_bucket(size)
            nearest_profile = nearest_bucket.updated()
            # The costs come from another context length, so they do not count as refined here.
            quality: Quality = "disturbed" if nearest_profile.quality == "disturbed" else "quiet"
            nearest_profile = replace(nearest_profile, quality=quality)
            origin = nearest_profile if nearest_profile.context_bucket < size else None
            bucket = _Bucket(replace(nearest_profile, context_bucket=size), origin=origin, copies=self._copies)
            self._buckets[size] = bucket
        return bucket

    def _nearest_bucket(self, size: int) -> _Bucket:
        """Return the bucket with the nearest context length among those with observed passes or a trusted profile."""
        usable_buckets = [bucket for bucket in self._buckets.values() if bucket.n_passes or bucket.is_trusted]
        return min(
            usable_buckets or self._buckets.values(),
            key=lambda bucket: abs(math.log(bucket.profile.context_bucket / size)),
        )

    def at(self, n_positions: int | None = None) -> CostProfile:
        """Return the costs of passes in a context of that many tokens, or the nearest known; None: in the usual one.

        The usual context is the one that most passes were in, and before any the one that was measured. The profile is
        the same object until passes have changed it.
        """
        return self._nearest_bucket(
            self._typical_bucket if n_positions is None else context_bucket(n_positions)
        ).updated()

    def missing(self, layer_set: LayerSet) -> frozenset[str]:
        """Return the formats of a draft whose costs were not measured."""
        return self.at().missing(layer_set)

    def refined(self) -> list[CostProfile]:
        """Return the changed profiles of all context buckets with enough observed passes."""
        for bucket in self._buckets.values():
            bucket.current = None
        profiles = [(bucket.profile, bucket.updated()) for bucket in self._buckets.values()]
        return [
            corrected for measured, corrected in profiles if corrected.quality == "refined" and corrected != measured
        ]


def _correction_factor(quotients: Mapping[K, _Quotient], key: K) -> float:
    return math.exp(quotients[key].log) if key in quotients else 1.0


def _clip(step: float) -> float:
    return max(-MAX_LOG_STEP, min(MAX_LOG_STEP, step))
