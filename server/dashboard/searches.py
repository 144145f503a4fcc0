"""The pages of searches: a job's trials, their scores and costs; charts are SVG of a few paths."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from markupsafe import Markup, escape
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
from .plans import SELDOM_S, LayerGrid, Name, layer_map, path, spans, svg
from .served import served_now

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 240, 60, 24, 12, 42  # Size and margins of a chart in SVG units.
MOST_DOTS = 400  # Trials above which a chart shows a band instead of dots.
N_GROUPS = 160  # Most groups of trials in a band.
BAR = 44  # Height of a bar in SVG units.
MOST_ROWS = 10  # Most rows of a table of trials.
DOT, DIAMOND = "h0", "m0 -6l6 6l-6 6l-6 -6z"  # SVG paths. A dot is a line of length 0 with round caps.

Point = tuple[float, float]

router = pages()


# --- charts


def ticks(lowest: float, highest: float) -> list[float]:
    """Return about five round numbers from `lowest` to `highest`."""
    if not highest > lowest:
        return [lowest]
    rough_step = (highest - lowest) / 5
    power_of_ten = 10.0 ** math.floor(math.log10(rough_step))
    step = next(factor * power_of_ten for factor in (1, 2, 5, 10) if factor * power_of_ten >= rough_step)
    return [n * step for n in range(math.ceil(lowest / step - 1e-9), math.floor(highest / step + 1e-9) + 1)]


class Plot:
    """A chart with two axes and room for the points; every series is one path, with its name as CSS class.

    Args: top: where the y axis ends at most, such as 1 of a share.
    """

    def __init__(
        self, title: str, description: str, x_label: str, y_label: str, points: Sequence[Point], top: float = math.inf
    ) -> None:
        self._title, self._description = title, description
        self._x_label, self._y_label = x_label, y_label
        xs, ys = zip(*points, strict=True)
        self._x_range, (low, high) = _with_margin(xs), _with_margin(ys)
        self._y_range = low, high if max(ys) > top else min(high, top)
        self._paths: list[str] = []

    def _at(self, point: Point) -> str:
        (x_low, x_high), (y_low, y_high) = self._x_range, self._y_range
        x = LEFT + (point[0] - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (point[1] - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f} {y:.1f}"

    def marks(self, name: str, points: Iterable[Point], mark_path: str) -> None:
        """Add a mark, a path of its own, at each point."""
        self._paths.append(path(name, (f"M{self._at(point)}{mark_path}" for point in points)))

    def line(self, name: str, points: Sequence[Point], ending: str = "") -> None:
        """Add a line; with the end "z" the area that it encloses."""
        self._paths.append(path(name, ["M", "L".join(map(self._at, points)), ending] if points else []))

    def steps(self, name: str, points: Sequence[Point]) -> None:
        """Add a line that keeps each value until the next point."""
        corners = [(following[0], previous[1]) for previous, following in pairwise(points)]
        step_points = [point for pair in zip(points, corners, strict=False) for point in pair]
        self.line(name, [*step_points, *points[-1:]])

    def draw(self) -> Markup:
        """Return the SVG."""
        lines, labels = [], []
        for tick in ticks(*self._y_range):
            y = self._at((self._x_range[0], tick)).partition(" ")[2]
            lines.append(f"M{LEFT} {y}H{WIDTH - RIGHT}")
            labels.append(f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
        for tick in ticks(*self._x_range):
            x = self._at((tick, self._y_range[0])).partition(" ")[0]
            labels.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{tick:.6g}</text>')
        middle_x, middle_y = (LEFT + WIDTH - RIGHT) // 2, (HEIGHT - BOTTOM) // 2
        labels.append(f'<text x="{middle_x}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self._x_label)}</text>')
        rotation = f'text-anchor="middle" transform="rotate(-90 12 {middle_y})"'
        labels.append(f'<text x="12" y="{middle_y}" {rotation}>{escape(self._y_label)}</text>')
        size, axis = (WIDTH, HEIGHT), path("axis", lines)
        return svg("graph", size, self._title, self._description, axis, *self._paths, *labels)


def _with_margin(values: Sequence[float]) -> Point:
    low, high = min(values), max(values)
    margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


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


def share_map(n_layers: int, shares: dict[str, list[float]], title: str) -> Markup:
    """Draw a bar per sub-layer, attention above MLP, as high as its share (0 to 1)."""
    grid = LayerGrid(n_layers, BAR + 6, BAR // 2 + 4)
    frames, bars, sentences = [], [], []
    for row, (kind, name) in enumerate(KINDS.items()):
        for i, share in enumerate(shares[kind]):
            (x, y), height = grid.at(row, i), round(BAR * share, 1)
            frames.append(f"M{x} {y}h18v{BAR}h-18z")
            bars.append(f"M{x} {y + BAR}h18v{-height}h-18z" if height else "")
        skipped_often = [i for i, share in enumerate(shares[kind]) if share >= 0.5]
        sentences.append(f"{name} left out in at least half of them: {spans(skipped_often) or 'none'}.")
    size, elements = (grid.width, grid.height), (path("kept", frames), path("bar", bars), grid.labels)
    return svg("map", size, title, " ".join(sentences), *elements, left_x=-1)


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
