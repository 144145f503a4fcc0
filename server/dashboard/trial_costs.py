"""Costs of drafts with the layer sets of a search, from measured costs of the model's parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from markupsafe import Markup

from ...core.costs import CostProfile, FormatCosts
from ...core.layer_sets import KINDS, Kind, LayerSet
from ...core.requests import Job
from ...core.settings import STORED
from ...store import Store
from ...store.results import Tried
from .drawing import DIAMOND, DOT, Plot
from .trials import MOST_DOTS, TrialQuery, layers_of, mark, skipped_words


class TriedSet(NamedTuple):
    """A layer set that was tried: its draft's cost in plain passes, and the means of its trials."""

    trial: Tried
    cost: float
    matchness: float
    score: float
    n_trials: int


def tried_sets(trials: Sequence[Tried], costs: CostProfile) -> list[TriedSet]:
    """Return the tried sets whose costs are known, cheapest first."""
    # Set -> [first trial, number of trials, sum of matchness, sum of scores].
    sums_by_set: dict[tuple[str, str, tuple[str, str]], list[Any]] = {}
    for trial in trials:
        if (set_sum := sums_by_set.get(key := trial.key)) is None:
            sums_by_set[key] = [trial, 1, trial.matchness, trial.score]
        else:
            set_sum[1] += 1
            set_sum[2] += trial.matchness
            set_sum[3] += trial.score
    prices: dict[tuple[str, str], Callable[[str, str], float] | None] = {}
    sets = []
    for (attn, mlp, forms), (first_trial, n, matchness, score) in sums_by_set.items():
        if forms not in prices:
            full_set = replace(first_trial.layer_set, skip_attn=frozenset(), skip_mlp=frozenset())
            prices[forms] = None if costs.missing(full_set) else cost_of(costs, full_set)
        if (cost := prices[forms]) is not None:
            sets.append(TriedSet(first_trial, cost(attn, mlp), matchness / n, score / n, n))
    return sorted(sets, key=lambda trial: (trial.cost, -trial.matchness))


def cost_of(costs: CostProfile, full_set: LayerSet) -> Callable[[str, str], float]:
    """Return a function from skipped layers (JSON lists) to c; formats are those of `full_set`, which skips nothing.

    It is 20 times as fast as `CostProfile.draft_cost` per set. Results are rounded, so that equal costs compare equal.
    """
    plain_s, whole_cost = costs.target_pass_s(1), costs.draft_cost(full_set)
    part_costs = {kind: [costs.part_s(kind, i, full_set) / plain_s for i in range(full_set.n_layers)] for kind in KINDS}

    @cache
    def saved_cost(kind: Kind, layers: str) -> float:
        return sum(part_costs[kind][layer] for layer in layers_of(layers, full_set.n_layers))

    return lambda skip_attn, skip_mlp: round(
        whole_cost - saved_cost("attn", skip_attn) - saved_cost("mlp", skip_mlp), 9
    )


def front_of(tried_sets: Sequence[TriedSet]) -> list[TriedSet]:
    """Return the Pareto front of cost and matchness, cheapest first."""
    front: list[TriedSet] = []
    for tried_set in tried_sets:
        if not front or tried_set.matchness > front[-1].matchness:
            front.append(tried_set)
    return front


def cost_chart(tried_sets: Sequence[TriedSet], front: Sequence[TriedSet], query: TrialQuery | None = None) -> Markup:
    """Draw matchness over draft cost, with the front."""
    points = [(tried_set.cost, tried_set.matchness) for tried_set in tried_sets]
    step = -(-len(points) // MOST_DOTS)
    description = (
        f"{len(tried_sets)} layer sets, {len(front)} of them on the front: nothing cheaper has as high a matchness."
    )
    x_label = "c, draft pass / plain pass"
    plot = Plot("Matchness over cost", description, x_label, "mean matchness", points, 1.0)
    query_of_dots = query if step == 1 else None
    mark(plot, "dots", [tried_set.trial for tried_set in tried_sets[::step]], points[::step], DOT, query_of_dots)
    best = [(tried_set.cost, tried_set.matchness) for tried_set in front]
    plot.steps("best", best)
    mark(plot, "adopted", [tried_set.trial for tried_set in front], best, DIAMOND, query)
    return plot.draw()


def costs_of(store: Store, job: Job) -> CostProfile | None:
    """Return the measured costs of a job's model, on the device of the job if known, or else the newest."""
    stored_set = job.layer_sets[0] if job.layer_sets else None
    fingerprint = stored_set.fingerprint if stored_set is not None else None
    if fingerprint is None:
        fingerprint = next(
            (model_info.fingerprint for model_info in store.models() if job.model in model_info.names), None
        )
    profiles = store.cost_profiles(fingerprint) if fingerprint is not None else []
    same_device = [
        profile
        for profile in profiles
        if stored_set is not None and (profile.device, profile.dtype) == (stored_set.device, stored_set.dtype)
    ]
    return next(iter(same_device or profiles), None)


def parts_of(costs: CostProfile) -> list[dict[str, Any]]:
    """Return the costs of a pass's parts, for the model's own weights and each format."""
    plain_pass_s = costs.target_pass_s(1)
    model_costs = FormatCosts(costs.attn_s, costs.mlp_s, costs.head_s, costs.fixed_s)
    return [
        {
            "weights": name,
            "costs": format_costs,
            "attn_share": format_costs.attn_s / plain_pass_s,
            "mlp_share": format_costs.mlp_s / plain_pass_s,
            "cost": costs.draft_cost(LayerSet(costs.n_layers).filled(STORED if format_costs is model_costs else name)),
        }
        for name, format_costs in (("the model's own", model_costs), *costs.formats.items())
    ]


def cost_values(trials: Sequence[Tried], costs: CostProfile | None, query: TrialQuery) -> dict[str, Any]:
    """Return the template values of the section on costs; `costs` None: none are stored."""
    points = [] if costs is None else tried_sets(trials, costs)
    front = front_of(points)
    return {
        "costs": costs,
        "parts": [] if costs is None else parts_of(costs),
        "cost_chart": cost_chart(points, front, query) if points else None,
        "front": [(point, *skipped_words(point.trial)) for point in front[:: -(-len(front) // 20) or 1]],
        "n_sets": len(points),
    }
