"""The pages of searches: a job's trials, their scores and costs; charts are SVG of a few paths."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ...core.costs import CostProfile, FormatCosts
from ...core.requests import UNFINISHED, Job
from ...core.settings import STORED
from ...core.types import KINDS, Kind, LayerSet
from ...store import Store
from ...store.results import StoredSearch, Tried
from ..errors import Refused
from ..middleware import Shared
from . import CurrentSession, live, pages, render, shown_page
from .drawing import DIAMOND, DOT, Plot, Point, layer_map, share_map, spans
from .overview import served_now
from .plans import SELDOM_S, Name

MOST_DOTS = 400  # Trials above which a chart shows a band instead of dots.
N_GROUPS = 160  # Most groups of trials in a band.
MOST_ROWS = 10  # Most rows of a table of trials.
router = pages()


def trial_chart(
    trials: Sequence[Tried], label: str, value_of: Callable[[Tried], float], top: float = math.inf
) -> Markup:
    """Draw a figure over the trials' numbers, with the best value so far and the adopted sets.

    Args: top: as of `Plot`.
    """
    points = [(float(trial.step), value_of(trial)) for trial in trials]
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
        plot.marks("dots", points, DOT)
    else:
        size = -(-len(points) // N_GROUPS)
        groups = [points[i : i + size] for i in range(0, len(points), size)]
        middles = [(group[0][0] + group[-1][0]) / 2 for group in groups]
        values = [[figure for _, figure in group] for group in groups]
        lowest, highest = (list(zip(middles, map(extreme, values), strict=True)) for extreme in (min, max))
        plot.line("band", [*lowest, *reversed(highest)], "z")
        plot.line("mean", [(x, sum(trial) / len(trial)) for x, trial in zip(middles, values, strict=True)])
    plot.steps("best", [*best[:: -(-len(best) // MOST_DOTS)], (last_point[0], best_point[1])])
    plot.marks("adopted", [(trial.step, value_of(trial)) for trial in trials if trial.adopted][-MOST_DOTS:], DIAMOND)
    return plot.draw()


# --- trials


def skip_shares(trials: Sequence[Tried]) -> dict[str, list[float]]:
    """Return per sub-layer the share of trials that skipped it."""
    shares = {}
    for kind, texts in (("attn", Counter(t.skip_attn for t in trials)), ("mlp", Counter(t.skip_mlp for t in trials))):
        counts = [0] * trials[0].n_layers
        for text, n in texts.items():
            for layer in json.loads(text):
                # Ignore invalid layers in trials that were edited by hand.
                if type(layer) is int and 0 <= layer < len(counts):
                    counts[layer] += n
        shares[kind] = [count / len(trials) for count in counts]
    return shares


class TriedSet(NamedTuple):
    """A layer set that was tried: its draft's cost in plain passes, and the means of its trials."""

    trial: Tried
    cost: float
    matchness: float
    score: float
    n_trials: int


def tried_sets(trials: Sequence[Tried], costs: CostProfile) -> list[TriedSet]:
    """Return the sets that were tried and whose costs are known, cheapest first."""
    # Set -> [first trial, number of trials, sum of matchness, sum of scores].
    sums_by_set: dict[tuple[str, str, str | None], list[Any]] = {}
    for trial in trials:
        if (set_sum := sums_by_set.get(trial.key)) is None:
            sums_by_set[trial.key] = [trial, 1, trial.matchness, trial.score]
        else:
            set_sum[1:] = set_sum[1] + 1, set_sum[2] + trial.matchness, set_sum[3] + trial.score
    prices: dict[str | None, Callable[[str, str], float] | None] = {}
    sets = []
    for (attn, mlp, formats), (first_trial, n, matchness, score) in sums_by_set.items():
        if formats not in prices:
            full_set = replace(first_trial.layer_set, skip_attn=frozenset(), skip_mlp=frozenset())
            prices[formats] = None if costs.missing(full_set) else cost_of(costs, full_set)
        if (cost := prices[formats]) is not None:
            sets.append(TriedSet(first_trial, cost(attn, mlp), matchness / n, score / n, n))
    return sorted(sets, key=lambda trial: (trial.cost, -trial.matchness))


def cost_of(costs: CostProfile, full_set: LayerSet) -> Callable[[str, str], float]:
    """Return a function from skipped layers, JSON lists, to c; formats are those of `full_set`, which skips nothing.

    It is 20 times as fast as `CostProfile.draft_cost` per set. Results are rounded, so that equal costs compare equal.
    """
    plain_s, whole_cost = costs.target_pass_s(1), costs.draft_cost(full_set)
    part_costs = {kind: [costs.part_s(kind, i, full_set) / plain_s for i in range(full_set.n_layers)] for kind in KINDS}

    @cache
    def saved_cost(kind: Kind, layers: str) -> float:
        skipped_layers: list[int] = json.loads(layers)
        return sum(part_costs[kind][layer] for layer in skipped_layers)

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


def cost_chart(tried_sets: Sequence[TriedSet], front: Sequence[TriedSet]) -> Markup:
    """Draw matchness over draft cost, with the front."""
    points = [(point.cost, point.matchness) for point in tried_sets]
    description = (
        f"{len(tried_sets)} layer sets, {len(front)} of them on the front: nothing cheaper has as high a matchness."
    )
    x_label = "c, draft pass / plain pass"
    plot = Plot("Matchness over cost", description, x_label, "mean matchness", points, 1.0)
    plot.marks("dots", points[:: -(-len(points) // MOST_DOTS)], DOT)
    best = [(point.cost, point.matchness) for point in front]
    plot.steps("best", best)
    plot.marks("adopted", best, DIAMOND)
    return plot.draw()


def costs_of(store: Store, job: Job) -> CostProfile | None:
    """Return the measured costs of a job's model: of the device that it ran on where that is known, else the newest."""
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


def trial_values(trials: Sequence[Tried], label: str) -> dict[str, Any]:
    """Return the values of the trials' charts and tables; `label` names their score."""
    ranked_trials = sorted(trials, key=lambda trial: -trial.score)
    best_tenth = ranked_trials[: -(-len(ranked_trials) // 10)]
    shares = skip_shares(best_tenth)
    title = f"How often each sub-layer was left out in the best {len(best_tenth)} of {len(trials)} trials"
    return {
        "charts": [
            trial_chart(trials, "matchness", lambda trial: trial.matchness, 1.0),
            trial_chart(trials, label, lambda trial: trial.score),
        ],
        "is_band": len(trials) > MOST_DOTS,
        "tables": [
            (name, [(trial, *_skipped_words(trial)) for trial in listed_trials[:MOST_ROWS]])
            for name, listed_trials in (("Best", ranked_trials), ("Latest", trials[::-1]))
        ],
        "shares": shares,
        "share_map": share_map(trials[0].n_layers, shares, title),
        "n_best": len(best_tenth),
        "seconds": sum(trial.seconds for trial in trials),
        "n_adopted": sum(trial.adopted for trial in trials),
    }


def cost_values(trials: Sequence[Tried], costs: CostProfile | None) -> dict[str, Any]:
    """Return the values of the part on costs; None: none are stored."""
    points = [] if costs is None else tried_sets(trials, costs)
    front = front_of(points)
    return {
        "costs": costs,
        "parts": [] if costs is None else parts_of(costs),
        "cost_chart": cost_chart(points, front) if points else None,
        "front": [(point, *_skipped_words(point.trial)) for point in front[:: -(-len(front) // 20) or 1]],
        "n_sets": len(points),
    }


def _skipped_words(trial: Tried) -> tuple[str, str]:
    """Return the layers whose attention and whose MLP a trial left out, in words."""
    layer_set = trial.layer_set
    return spans(layer_set.skip_attn) or "none", spans(layer_set.skip_mlp) or "none"


# --- routes


@shown_page(router, "/searches", "searches", SELDOM_S)
async def searches(app: Shared) -> dict[str, Any]:
    """Return the searches of jobs, and those of served models."""
    live_searches = [
        (engine_state.engine.served.name, task, layer_map(task.layer_set, f"Drafts of {task.task}"))
        for engine_state in await served_now(app)
        for task in engine_state.tuning.tasks
    ]
    return {"rows": await run_in_threadpool(app.store.searches), "served": live_searches}


@shown_page(router, "/searches/{job}", "search")
def search(app: Shared, job: str, task: Name | None = None) -> dict[str, Any]:
    """Return a job's search for one task.

    Raises: NotFound: there is no such job; Refused: 404, it has no trials for the task.
    """
    store = app.store
    searched_job, searches = store.jobs.get(job), store.searches(job)
    task_search = next((trial for trial in searches if task in (None, trial.task)), None)
    if task_search is None and searches:
        problem = f"job {job} has no trials for this task: it has some for {', '.join(s.task for s in searches)}"
        raise Refused(404, "not-found", problem)
    values: dict[str, Any] = {
        "job": searched_job,
        "searches": searches,
        "search": task_search,
        "live": searched_job.state in UNFINISHED,
    }
    if task_search is None:
        return values
    settings = searched_job.request.get("settings")
    by_speed = not isinstance(settings, dict) or settings.get("objective", "expected_speedup") == "expected_speedup"
    finished = None if values["live"] else store.jobs.evidence(job, task_search.task)[0]
    values |= {"ended": finished and finished.stopped_because}
    values |= {"score_label": "expected speed, plain = 1" if by_speed else "score"}
    trials = [trial for trial in store.tried(job, task_search.task) if math.isfinite(trial.score + trial.matchness)]
    if not trials:
        return {**values, "search": None}
    return {
        **values,
        **trial_values(trials, values["score_label"]),
        **cost_values(trials, costs_of(store, searched_job)),
    }


@router.get("/live/searches/{job}")
async def search_live(app: Shared, session: CurrentSession, job: str, task: Name | None = None) -> Response:
    """The live part, rendered again for another state or 1 % more trials."""
    last_rendered: tuple[list[StoredSearch], str] = ([], "")

    async def render_part() -> str:
        nonlocal last_rendered
        current_searches = await run_in_threadpool(app.store.searches, job)
        if not last_rendered[1] or is_news(last_rendered[0], current_searches):
            values = await run_in_threadpool(search, app, job, task)
            last_rendered = current_searches, render("search_part.html", **values)
        return last_rendered[1]

    return live(render_part)


def is_news(previous: Sequence[StoredSearch], current: Sequence[StoredSearch]) -> bool:
    """Return whether a job has another state or task, or so many more trials that its charts show them."""
    if [(stored_search.task, stored_search.state) for stored_search in previous] != [
        (stored_search.task, stored_search.state) for stored_search in current
    ]:
        return True
    return sum(stored_search.n_trials for stored_search in current) > 1.01 * sum(
        stored_search.n_trials for stored_search in previous
    )
