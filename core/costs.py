"""Measured costs of a model's parts on one machine, and the expected speedup of drafts from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple, Protocol, Self, get_args

from .layer_sets import Kind, LayerSet
from .serialization import BY_NUMBER, Record
from .settings import STORED
from .types import WHERE_ANY, Completion

SMALLEST_BUCKET = 256  # Smallest context length, in tokens, for which costs are measured.

# How far a cost profile can be trusted, worst first: measured while other programs ran, measured on an idle machine,
# or updated from the timed passes of real decoding.
Quality = Literal["disturbed", "quiet", "refined"]
QUALITIES: tuple[Quality, ...] = get_args(Quality)


def context_bucket(n_positions: int) -> int:
    """Return the context length that costs are measured at: the next power of two, at least 256."""
    return max(SMALLEST_BUCKET, 1 << (max(1, n_positions) - 1).bit_length())


class CostSource(Protocol):
    """Source of the costs of passes: one measured profile, or profiles updated from timed passes."""

    def at(self, n_positions: int | None = None) -> CostProfile:
        """Return the costs of passes in a context of that many tokens; None: of a typical context."""

    def missing(self, layer_set: LayerSet) -> frozenset[str]:
        """Return the formats of a draft whose costs were not measured."""


class ExpertCounts(NamedTuple):
    """Counts of the experts that the rows of passes used, without shared experts.

    `distinct`: number of experts used by any row, averaged over the mixtures. For rows that follow another row of the
    same text, `taken` counts the experts that they used, and `repeated` those that the previous row used, too.
    """

    distinct: float
    taken: int = 0
    repeated: int = 0


@dataclass(frozen=True, slots=True)
class ExpertCosts(Record):
    """Costs of the experts of a model's mixtures; shared experts count as part of the MLP.

    A row uses `n_chosen` of `n_experts` in each of `layers`, and a draft's row at least `least`. `distinct[n]`: number
    of distinct experts per layer in the n-row pass that took `pass_s[n]`; empty if nothing counts them.
    `overlap`: share of a token's experts that the previous token used, too; None: not observed yet.
    """

    n_experts: int
    n_chosen: int
    layers: tuple[int, ...]
    expert_s: float
    least: int = 1
    distinct: Annotated[Mapping[int, float], BY_NUMBER] = field(default_factory=dict)
    overlap: float | None = None

    def saved_s(self, layer_set: LayerSet, layer: int, expert_s: float) -> float:
        """Seconds of `expert_s` each that the draft's MLP of a layer saves by taking fewer experts."""
        number = layer_set.experts_of(layer) if layer in self.layers else None
        return 0.0 if number is None else (self.n_chosen - number) * expert_s


def distinct_experts(n_rows: int, n_chosen: int, overlap: float) -> float:
    """Number of distinct experts of a layer that `n_rows` rows of a text use, if each uses `n_chosen`.

    Args: overlap: share of a row's experts that another row uses, too. With n_chosen / n_experts, as in uniform
          routing, the result is the expected number.
    """
    return n_rows * n_chosen if overlap <= 0 else n_chosen * (1 - (1 - overlap) ** n_rows) / overlap


@dataclass(frozen=True, slots=True)
class FormatCosts(Record):
    """Seconds of one attention, one MLP, the head and the rest of a one-row pass, in one weight format.

    `wider[n]`: cost of a draft pass over n rows / cost of one over a single row. `expert_s`: seconds of one expert of
    one MLP; 0 for a model without mixtures.
    """

    attn_s: float
    mlp_s: float
    head_s: float
    fixed_s: float = 0.0
    wider: Annotated[Mapping[int, float], BY_NUMBER] = field(default_factory=dict)
    expert_s: float = field(default=0.0, metadata=WHERE_ANY)

    def scaled(self, factor: float) -> FormatCosts:
        seconds = {name: factor * getattr(self, name) for name in ("attn_s", "mlp_s", "head_s", "fixed_s", "expert_s")}
        return replace(self, **seconds)


@dataclass(frozen=True, slots=True)
class CostProfile(Record):
    """Measured seconds of a model's parts on one device, dtype and context bucket.

    `attn_s`, `mlp_s`: one sub-layer on one row; `head_s`: final norm, head and reading its answer; `fixed_s`: the
    rest of a one-row pass; `pass_s[n]`: a whole target pass over n rows, n ascending; `formats[name]`: the parts of a
    draft in that format, or of another draft model under the name of its costs; `software`: the software that was
    measured, empty if unknown. `quality`: how far the figures can be trusted, with the reason in `remark` (empty for
    "quiet"). `experts`: None for a model without mixtures. `absent`: missing sub-layers, such as "mlp:3", of layers
    with a single sub-layer; None: every layer has both.
    """

    fingerprint: str
    device: str
    dtype: str
    context_bucket: int
    n_layers: int
    attn_s: float
    mlp_s: float
    head_s: float
    fixed_s: float
    pass_s: Annotated[Mapping[int, float], BY_NUMBER]
    formats: Mapping[str, FormatCosts] = field(default_factory=dict)
    software: str = ""
    quality: Quality = "quiet"
    remark: str = ""
    experts: ExpertCosts | None = field(default=None, metadata={"exclude_if": lambda experts: experts is None})
    absent: tuple[str, ...] | None = field(default=None, metadata={"exclude_if": lambda absent: absent is None})

    def n_parts(self, kind: Kind) -> int:
        """Return the number of layers that have a sub-layer of this kind."""
        return self.n_layers - sum(part.startswith(f"{kind}:") for part in self.absent or ())

    def at(self, n_positions: int | None = None) -> Self:
        """Return the profile itself, because it covers a single context."""
        return self

    def may_replace(self, other: CostProfile) -> bool:
        """Return whether this profile may overwrite a stored one of the same model, device, dtype and context bucket.

        A stored profile of better quality is kept, unless other software measured it.
        """
        is_worse = QUALITIES.index(self.quality) < QUALITIES.index(other.quality)
        return not is_worse or self.software != other.software

    def missing(self, layer_set: LayerSet) -> frozenset[str]:
        """Return the formats of a draft whose costs were not measured."""
        return frozenset(format_name for _, format_name in layer_set.formats if format_name != STORED) - frozenset(
            self.formats
        )

    def target_pass_s(self, n_rows: int) -> float:
        """Seconds of a target pass over `n_rows` rows, linear between the measured widths and beyond the last."""
        return interpolate(self.pass_s, n_rows)

    def draft_pass_s(self, layer_set: LayerSet) -> float:
        """Seconds of a one-row draft pass; KeyError if the draft uses a format that is `missing`."""
        if not layer_set.formats and not layer_set.experts and not self.absent:
            kept_attn = self.n_layers - len(layer_set.skip_attn)
            kept_mlp = self.n_layers - len(layer_set.skip_mlp)
            return self.fixed_s + self.head_s + kept_attn * self.attn_s + kept_mlp * self.mlp_s
        layers = range(self.n_layers)
        attn = sum(self.part_s("attn", layer, layer_set) for layer in layers if layer not in layer_set.skip_attn)
        mlp = sum(self.part_s("mlp", layer, layer_set) for layer in layers if layer not in layer_set.skip_mlp)
        return self._head_and_fixed_s(layer_set) + attn + mlp + self.part_s("head", 0, layer_set)

    def _head_and_fixed_s(self, layer_set: LayerSet) -> float:
        """Seconds of a pass outside attention, MLP and head: the largest `fixed_s` of the formats in use.

        Formats of single layers are ignored.
        """
        names = {layer_set.format_of("attn"), layer_set.format_of("mlp")}
        return max(self.fixed_s if format_name is None else self.formats[format_name].fixed_s for format_name in names)

    def part_s(self, kind: Literal["attn", "mlp", "head"], layer: int, layer_set: LayerSet) -> float:
        """Seconds of one part of a draft, in its format by the layer set; KeyError if that is `missing`."""
        format_name = layer_set.format_of(kind, layer)
        costs = self if format_name is None else self.formats[format_name]
        if self.absent and f"{kind}:{layer}" in self.absent:
            return 0.0
        if kind == "mlp" and layer_set.experts and self.experts is not None:
            expert_s = self.experts.expert_s if format_name is None else self.formats[format_name].expert_s
            return max(0.0, costs.mlp_s - self.experts.saved_s(layer_set, layer, expert_s))
        return {"attn": costs.attn_s, "mlp": costs.mlp_s, "head": costs.head_s}[kind]

    def draft_cost(self, layer_set: LayerSet, n_rows: int = 1) -> float:
        """c: cost of a draft pass / cost of a one-row target pass; for n rows, scaled by the largest `wider[n]`."""
        cost = self.draft_pass_s(layer_set) / self.target_pass_s(1)
        if n_rows == 1:
            return cost
        costs_by_rows = [
            self.formats[format_name].wider for _, format_name in layer_set.formats if format_name != STORED
        ]
        return cost * max(
            (interpolate(wider, n_rows) for wider in costs_by_rows if wider), default=self.verify_cost(n_rows)
        )

    def format_cost(self, name: str, n_rows: int = 1) -> float:
        """Cost of a draft pass over `n_rows` rows, with the parts of `formats[name]` / one-row target pass."""
        costs = self.formats[name]
        seconds = costs.attn_s + costs.mlp_s + costs.head_s + costs.fixed_s
        return seconds / self.target_pass_s(1) * (interpolate(costs.wider, n_rows) if costs.wider else n_rows)

    def verify_cost(self, n_rows: int) -> float:
        """A target pass over `n_rows` rows / one over a single row."""
        return self.target_pass_s(n_rows) / self.target_pass_s(1)

    def expected_speedup(
        self, layer_set: LayerSet, tokens: float, draft_steps: float, widths: Mapping[int, float]
    ) -> float:
        """E(Spd.): tokens per plain pass's time, for that many draft steps and target passes per width.

        Source: SWIFT Eq. 6. DEVIATION: c is measured instead of 1 - r, and a verification has the measured cost of its
        rows instead of one plain pass.
        """
        return tokens / self.passes_of(layer_set, draft_steps, widths)

    def _verification_cost(self, widths: Mapping[int, float]) -> float:
        """Cost of target passes, in units of a one-row target pass; `widths` counts them by their rows."""
        return sum(count * self.verify_cost(n_rows) for n_rows, count in widths.items())

    def passes_of(self, layer_set: LayerSet, draft_steps: float, widths: Mapping[int, float]) -> float:
        """Cost of these draft steps and target passes, in units of a one-row target pass; `widths`: passes by rows."""
        return draft_steps * self.draft_cost(layer_set) + self._verification_cost(widths)


def published_speedup(layer_set: LayerSet, mean_generated_length: float, acceptance_rate: float) -> float:
    """E(Spd.) as SWIFT Eq. 6 has it: a draft pass takes 1 - r of a plain one, and every verification one plain pass."""
    draft_cost, n_accepted = 1 - layer_set.skip_ratio, mean_generated_length - 1
    return mean_generated_length * acceptance_rate / (n_accepted * draft_cost + acceptance_rate)


def expected_of(costs: CostProfile | None, completions: Iterable[Completion]) -> float | None:
    """E(Spd.) of real runs without prefill: from their drafters' estimated costs, or by Eq. 6 with their last set.

    None without a target pass, or if a run has neither.
    """
    n_tokens, total_cost = 0, 0.0
    for completion in completions:
        if not completion.verified_widths:  # The completion has only the token that prefill gave.
            continue
        cost = completion.estimated_cost
        if cost is None and costs is not None and completion.layer_set is not None:
            cost = costs.passes_of(completion.layer_set, completion.drafted, completion.verified_widths)
        if cost is None:
            return None
        n_tokens += completion.n_tokens - completion.first_tokens
        total_cost += cost
    return n_tokens / total_cost if total_cost else None


def interpolate(known_values: Mapping[int, float], x: int) -> float:
    """The value at `x`, by linear interpolation between known values and extrapolation beyond the last."""
    known_points = sorted(known_values)
    if x <= known_points[0] or len(known_points) == 1:
        return known_values[known_points[0]]
    upper = next((point for point in known_points if point >= x), known_points[-1])
    lower = known_points[known_points.index(upper) - 1]
    return known_values[lower] + (known_values[upper] - known_values[lower]) / (upper - lower) * (x - lower)
