"""Views of a search's trials: charts whose dots link to a trial, importance of sub-layers, a sorted table."""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Query
from markupsafe import Markup

from ...core.layer_sets import KINDS, Kind, LayerSet
from ...core.types import origin_words
from ...store.results import Tried
from .drawing import DIAMOND, DOT, Plot, Point, bar_map, layer_map, map_words, spans

MOST_DOTS = 400  # Number of trials above which a chart shows a band instead of dots.
MOST_ADOPTED = 80  # Maximum number of adopted trials marked in a chart, the newest ones.
N_GROUPS = 160  # Maximum number of groups of trials in a band.
PER_PAGE = 20  # Rows of the table of trials.

Order = Literal["score", "matchness", "newest", "oldest"]
SCORE_OF, MATCHNESS_OF, STEP_OF = map(attrgetter, ("score", "matchness", "step"))
# Ranking of trials. If drafts do not pay, all have the same score, so matchness decides.
RANK_OF = attrgetter("score", "matchness")
ORDERS: dict[Order, tuple[Callable[[Tried], Any], bool]] = {  # What each order sorts by, and whether descending.
    "score": (RANK_OF, True),
    "matchness": (MATCHNESS_OF, True),
    "newest": (STEP_OF, True),
    "oldest": (STEP_OF, False),
}


@dataclass(frozen=True, slots=True)
class TrialQuery:
    """Filter and order of the listed trials, and the trial shown in detail."""

    task: str | None = None
    sort: Order = "score"
    origin: str = ""
    adopted: bool = False
    page: int = 1
    trial: int | None = None

    def address(self, **changes: object) -> str:
        """Return the query string, with changes and without default values."""
        defaults = TrialQuery()
        values = {name: changes.get(name, getattr(self, name)) for name in self.__slots__}
        return urlencode(
            {name: value for name, value in values.items() if value is not None and value != getattr(defaults, name)}
        )


Text = Annotated[str, Query(max_length=200)]


def trial_query(
    task: Annotated[str | None, Query(min_length=1)] = None,
    sort: Order = "score",
    origin: Text = "",
    adopted: bool = False,
    page: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
    trial: Annotated[int | None, Query(ge=0, le=2**62)] = None,
) -> TrialQuery:
    """Return the query of a request."""
    return TrialQuery(task, sort, origin, adopted, page, trial)


# --- charts


def trial_chart(
    trials: Sequence[Tried],
    label: str,
    value_of: Callable[[Tried], float],
    top: float = math.inf,
    query: TrialQuery | None = None,
) -> Markup:
    """Draw a figure over the trials' numbers, with the best value so far and the adopted sets.

    Args: top: as in `Plot`. query: query of the page to which dots link; None: no links.
    """
    points = list(zip(map(float, map(STEP_OF, trials)), map(value_of, trials), strict=True))
    best: list[Point] = []
    for step, figure in points:
        if not best or figure > best[-1][1]:
            best.append((step, figure))
    last_point, best_point = points[-1], best[-1]
    description = (
        f"{len(points)} trials; the highest is {best_point[1]:.3g}, of trial {best_point[0]:.0f};"
        f" the last is {last_point[1]:.3g}."
    )
    plot = Plot(f"{label} by trial", description, "trial", label, points, top)
    if len(points) <= MOST_DOTS:
        mark(plot, "dots", trials, points, DOT, query)
    else:
        size = -(-len(points) // N_GROUPS)
        groups = [points[i : i + size] for i in range(0, len(points), size)]
        middles = [(group[0][0] + group[-1][0]) / 2 for group in groups]
        values = [[figure for _, figure in group] for group in groups]
        lowest, highest = (list(zip(middles, map(extreme, values), strict=True)) for extreme in (min, max))
        plot.line("band", [*lowest, *reversed(highest)], "z")
        plot.line("mean", [(x, sum(trial) / len(trial)) for x, trial in zip(middles, values, strict=True)])
    plot.steps("best", [*best[:: -(-len(best) // MOST_DOTS)], (last_point[0], best_point[1])])
    adopted = [trial for trial in trials if trial.adopted][-MOST_ADOPTED:]
    mark(plot, "adopted", adopted, [(float(trial.step), value_of(trial)) for trial in adopted], DIAMOND, query)
    return plot.draw()


def mark(
    plot: Plot,
    name: str,
    trials: Sequence[Tried],
    points: Sequence[Point],
    mark_path: str,
    query: TrialQuery | None,
) -> None:
    """Mark each trial at its point; with a query the marks link to their trials, unless there are very many."""
    if query is None or len(trials) > MOST_DOTS:
        plot.marks(name, points, mark_path)
        return
    links = [f"?{query.address(trial=trial.step, page=1)}#trial" for trial in trials]
    plot.links(name, points, mark_path, links, [f"Trial {trial.step}" for trial in trials])


# --- sub-layers


def skip_shares(trials: Sequence[Tried]) -> dict[Kind, list[float]]:
    """Return for each sub-layer the share of trials that skipped it."""
    shares: dict[Kind, list[float]] = {}
    texts_by_kind: dict[Kind, Counter[str]] = {
        "attn": Counter(trial.skip_attn for trial in trials),
        "mlp": Counter(trial.skip_mlp for trial in trials),
    }
    for kind, texts in texts_by_kind.items():
        counts = [0] * trials[0].n_layers
        for text, n in texts.items():
            for layer in layers_of(text, len(counts)):
                counts[layer] += n
        shares[kind] = [count / len(trials) for count in counts]
    return shares


@lru_cache(maxsize=1 << 16)
def layers_of(text: str, n_layers: int) -> tuple[int, ...]:
    """Return the layers of a JSON list; ignore invalid ones, from trials that were edited by hand.

    Cached, because parsing the lists of 10,000 trials takes longer than the rest of the page.
    """
    return tuple(layer for layer in json.loads(text) if type(layer) is int and 0 <= layer < n_layers)


def importance(trials: Sequence[Tried]) -> dict[Kind, list[float | None]]:
    """Return for each sub-layer the loss of matchness from skipping it; None: it was always, or never, skipped.

    It is the mean matchness of trials that keep it - that of trials that skip it, among trials that skip the same
    number of sub-layers, because larger sets have lower matchness anyway. The differences are weighted by
    n·m / (n + m), as in a regression with a constant per number.
    """
    n_layers = trials[0].n_layers
    sums_by_set: dict[tuple[str, str], tuple[int, float]] = {}  # Layers left out -> trials, sum of their matchness.
    for trial in trials:
        n, matchness = sums_by_set.get(key := (trial.skip_attn, trial.skip_mlp), (0, 0.0))
        sums_by_set[key] = n + 1, matchness + trial.matchness
    # Per number of skipped sub-layers: trials and the sum of their matchness, and the same for those without a layer.
    totals: dict[int, list[float]] = {}
    without: dict[int, dict[Kind, list[list[float]]]] = {}
    for (attn, mlp), (n, matchness) in sums_by_set.items():
        parts: dict[Kind, tuple[int, ...]] = {"attn": layers_of(attn, n_layers), "mlp": layers_of(mlp, n_layers)}
        number = sum(map(len, parts.values()))
        if number not in totals:
            totals[number] = [0.0, 0.0]
            without[number] = {kind: [[0.0, 0.0] for _ in range(n_layers)] for kind in KINDS}
        for sums in (totals[number], *(without[number][kind][layer] for kind in parts for layer in parts[kind])):
            sums[0] += n
            sums[1] += matchness
    return {
        kind: [
            _cost_of_leaving_out((totals[number], without[number][kind][layer]) for number in totals)
            for layer in range(n_layers)
        ]
        for kind in KINDS
    }


def _cost_of_leaving_out(groups: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float | None:
    """Return the weighted mean of differences; a group has the sums of all trials, and of those without the layer."""
    weights = differences = 0.0
    for (n, matchness), (n_without, matchness_without) in groups:
        n_with = n - n_without
        if n_with and n_without:
            weight = n_with * n_without / n
            weights += weight
            differences += weight * ((matchness - matchness_without) / n_with - matchness_without / n_without)
    return differences / weights if weights else None


def skipped_words(trial: Tried) -> tuple[str, str]:
    """Return the layers whose attention, and those whose MLP, a trial skipped, in words."""
    layer_set = trial.layer_set
    return spans(layer_set.skip_attn) or "none", spans(layer_set.skip_mlp) or "none"


# --- values of the page


def figures_of(trials: Sequence[Tried], label: str) -> list[tuple[str, str]]:
    """Return the figures of a search, each with its name; `label` is that of its score."""
    return [
        ("Trials", f"{len(trials):,}"),
        ("Adopted", f"{sum(trial.adopted for trial in trials):,}"),
        (f"Best {label}", f"{max(trial.score for trial in trials):.2f}"),
        ("Best matchness", f"{max(trial.matchness for trial in trials):.2f}"),
    ]


def trial_values(trials: Sequence[Tried], label: str, query: TrialQuery, whole: LayerSet) -> dict[str, Any]:
    """Return the template values of the trials' charts and table; `label` names their score, `whole` is the model."""
    best_tenth = heapq.nlargest(-(-len(trials) // 10), trials, key=RANK_OF)
    shares, weights = skip_shares(best_tenth), importance(trials)
    chosen = [trial for trial in trials if query.origin in ("", trial.origin) and (trial.adopted or not query.adopted)]
    key, descending = ORDERS[query.sort]
    chosen.sort(key=key, reverse=descending)
    listed = chosen[(query.page - 1) * PER_PAGE : query.page * PER_PAGE]
    title = f"How often each sub-layer was left out in the best {len(best_tenth)} of {len(trials)} trials"
    return {
        "query": query,
        "charts": [
            trial_chart(trials, "matchness", MATCHNESS_OF, 1.0, query),
            trial_chart(trials, label, SCORE_OF, query=query),
        ],
        "is_band": len(trials) > MOST_DOTS,
        "rows": [(trial, *skipped_words(trial)) for trial in listed],
        "n_chosen": len(chosen),
        "n_pages": max(1, -(-len(chosen) // PER_PAGE)),
        "origins": [(name, origin_words(name)) for name in sorted({trial.origin for trial in trials})],
        "orders": list(ORDERS),
        "shares": shares,
        "share_map": bar_map(whole, shares, title, "left out in at least half of them", 0.5),
        "importance": weights,
        "importance_map": importance_map(whole, weights),
        "n_best": len(best_tenth),
        "seconds": sum(trial.seconds for trial in trials),
        "figures": figures_of(trials, label),
        **shown_trial(trials, query.trial, whole),
    }


def importance_map(whole: LayerSet, weights: dict[Kind, list[float | None]]) -> Markup:
    """Draw the cost of leaving out each sub-layer, the most expensive as a full bar."""
    dearest = max((value for values in weights.values() for value in values if value is not None), default=0.0)
    bars = {
        kind: [max(0.0, value or 0.0) / dearest if dearest > 0 else 0.0 for value in values]
        for kind, values in weights.items()
    }
    return bar_map(whole, bars, "What leaving out each sub-layer costs", "half of the most expensive or more", 0.5)


def shown_trial(trials: Sequence[Tried], step: int | None, whole: LayerSet) -> dict[str, Any]:
    """Return the template values of the trial shown in detail, with its neighbours; `step` None: no trial."""
    at = next((i for i, trial in enumerate(trials) if trial.step == step), None) if step is not None else None
    if at is None:
        return {"trial": None, "missing": step}
    trial = trials[at]
    layer_set = replace(trial.layer_set, absent=whole.absent)
    return {
        "trial": trial,
        "missing": None,
        "trial_map": layer_map(layer_set, f"Layer map of trial {trial.step}"),
        "trial_words": map_words(layer_set),
        "before": trials[at - 1].step if at else None,
        "after": trials[at + 1].step if at + 1 < len(trials) else None,
    }
