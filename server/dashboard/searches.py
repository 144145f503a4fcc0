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


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


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

    def marks(self, name: str, points: Iterable[Point], mark: str) -> None:
        """Add a mark, a path of its own, at each point."""
        self._paths.append(path(name, (f"M{self._at(point)}{mark}" for point in points)))

    def line(self, name: str, points: Sequence[Point], end: str = "") -> None:
        """Add a line; with the end "z" the area that it encloses."""
        self._paths.append(path(name, ["M", "L".join(map(self._at, points)), end] if points else []))

    def steps(self, name: str, points: Sequence[Point]) -> None:
        """Add a line that keeps each value until the next point."""
        corners = [(after[0], before[1]) for before, after in pairwise(points)]
        joined = [point for pair in zip(points, corners, strict=False) for point in pair]
        self.line(name, [*joined, *points[-1:]])

    def draw(self) -> Markup:
        """Return the SVG."""
        lines, words = [], []
        for value in ticks(*self._y_range):
            y = self._at((self._x_range[0], value)).partition(" ")[2]
            lines.append(f"M{LEFT} {y}H{WIDTH - RIGHT}")
            words.append(f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        for value in ticks(*self._x_range):
            x = self._at((value, self._y_range[0])).partition(" ")[0]
            words.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{value:.6g}</text>')
        middle_x, middle_y = (LEFT + WIDTH - RIGHT) // 2, (HEIGHT - BOTTOM) // 2
        words.append(f'<text x="{middle_x}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self._x_label)}</text>')
        turned = f'text-anchor="middle" transform="rotate(-90 12 {middle_y})"'
        words.append(f'<text x="12" y="{middle_y}" {turned}>{escape(self._y_label)}</text>')
        size, axis = (WIDTH, HEIGHT), path("axis", lines)
        return svg("graph", size, self._title, self._description, axis, *self._paths, *words)


def _with_margin(values: Sequence[float]) -> Point:
    low, high = min(values), max(values)
    margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def trial_chart(tried: Sequence[Tried], label: str, value: Callable[[Tried], float], top: float = math.inf) -> Markup:
    """Draw a figure over the trials' numbers, with the best value so far and the adopted sets.

    Args: top: as of `Plot`.
    """
    points = [(float(trial.step), value(trial)) for trial in tried]
    best: list[Point] = []
    for step, reached in points:
        if not best or reached > best[-1][1]:
            best.append((step, reached))
    last, highest = points[-1], best[-1]
    words = (
        f"{len(points)} trials; the highest is {highest[1]:.3g}, of trial {highest[0]:.0f}; the last is {last[1]:.3g}."
    )
    plot = Plot(f"{label} by trial", words, "trial", label, points, top)
    if len(points) <= MOST_DOTS:
        plot.marks("dots", points, DOT)
    else:
        size = -(-len(points) // N_GROUPS)
        groups = [points[i : i + size] for i in range(0, len(points), size)]
        middles = [(group[0][0] + group[-1][0]) / 2 for group in groups]
        values = [[reached for _, reached in group] for group in groups]
        low, high = (list(zip(middles, map(end, values), strict=True)) for end in (min, max))
        plot.line("band", [*low, *reversed(high)], "z")
        plot.line("mean", [(x, sum(trial) / len(trial)) for x, trial in zip(middles, values, strict=True)])
    plot.steps("best", [*best[:: -(-len(best) // MOST_DOTS)], (last[0], highest[1])])
    plot.marks("adopted", [(trial.step, value(trial)) for trial in tried if trial.adopted][-MOST_DOTS:], DIAMOND)
    return plot.draw()


def share_map(n_layers: int, shares: dict[str, list[float]], title: str) -> Markup:
    """Draw a bar per sub-layer, attention above MLP, as high as its share (0 to 1)."""
    grid = LayerGrid(n_layers, BAR + 6, BAR // 2 + 4)
    frames, bars, words = [], [], []
    for row, (kind, name) in enumerate(KINDS.items()):
        for i, share in enumerate(shares[kind]):
            (x, y), height = grid.at(row, i), round(BAR * share, 1)
            frames.append(f"M{x} {y}h18v{BAR}h-18z")
            bars.append(f"M{x} {y + BAR}h18v{-height}h-18z" if height else "")
        often = [i for i, share in enumerate(shares[kind]) if share >= 0.5]
        words.append(f"{name} left out in at least half of them: {spans(often) or 'none'}.")
    size, drawn = (grid.width, grid.height), (path("kept", frames), path("bar", bars), grid.labels)
    return svg("map", size, title, " ".join(words), *drawn, left=-1)


# --- trials


def skip_shares(tried: Sequence[Tried]) -> dict[str, list[float]]:
    """Return per sub-layer the share of trials that skipped it."""
    shares = {}
    for kind, texts in (("attn", Counter(t.skip_attn for t in tried)), ("mlp", Counter(t.skip_mlp for t in tried))):
        counts = [0] * tried[0].n_layers
        for text, n in texts.items():
            for layer in json.loads(text):
                # Ignore invalid layers in trials that were edited by hand.
                if type(layer) is int and 0 <= layer < len(counts):
                    counts[layer] += n
        shares[kind] = [count / len(tried) for count in counts]
    return shares


class TriedSet(NamedTuple):
    """A layer set that was tried: its draft's cost in plain passes, and the means of its trials."""

    trial: Tried
    cost: float
    matchness: float
    score: float
    n_trials: int


def tried_sets(tried: Sequence[Tried], costs: CostProfile) -> list[TriedSet]:
    """Return the sets that were tried and whose costs are known, cheapest first."""
    # Set -> [first trial, number of trials, sum of matchness, sum of scores].
    sums: dict[tuple[str, str, str | None], list[Any]] = {}
    for tried_trial in tried:
        if (set_sum := sums.get(tried_trial.key)) is None:
            sums[tried_trial.key] = [tried_trial, 1, tried_trial.matchness, tried_trial.score]
        else:
            set_sum[1:] = set_sum[1] + 1, set_sum[2] + tried_trial.matchness, set_sum[3] + tried_trial.score
    prices: dict[str | None, Callable[[str, str], float] | None] = {}
    sets = []
    for (attn, mlp, formats), (trial, n, matchness, score) in sums.items():
        if formats not in prices:
            whole = replace(trial.layer_set, skip_attn=frozenset(), skip_mlp=frozenset())
            prices[formats] = None if costs.missing(whole) else cost_of(costs, whole)
        if (cost := prices[formats]) is not None:
            sets.append(TriedSet(trial, cost(attn, mlp), matchness / n, score / n, n))
    return sorted(sets, key=lambda tried_trial: (tried_trial.cost, -tried_trial.matchness))


def cost_of(costs: CostProfile, whole: LayerSet) -> Callable[[str, str], float]:
    """Return a function from skipped layers, JSON lists, to c; formats are those of `whole`, which skips nothing.

    It is 20 times as fast as `CostProfile.draft_cost` per set. Results are rounded, so that equal costs compare equal.
    """
    plain_s, whole_cost = costs.target_pass_s(1), costs.draft_cost(whole)
    parts = {kind: [costs.part_s(kind, i, whole) / plain_s for i in range(whole.n_layers)] for kind in KINDS}

    @cache
    def saved(kind: Kind, layers: str) -> float:
        left_out: list[int] = json.loads(layers)
        return sum(parts[kind][layer] for layer in left_out)

    return lambda skip_attn, skip_mlp: round(whole_cost - saved("attn", skip_attn) - saved("mlp", skip_mlp), 9)


def front_of(found: Sequence[TriedSet]) -> list[TriedSet]:
    """Return the Pareto front of cost and matchness, cheapest first."""
    front: list[TriedSet] = []
    for point in found:
        if not front or point.matchness > front[-1].matchness:
            front.append(point)
    return front


def cost_chart(found: Sequence[TriedSet], front: Sequence[TriedSet]) -> Markup:
    """Draw matchness over draft cost, with the front."""
    points = [(point.cost, point.matchness) for point in found]
    words = f"{len(found)} layer sets, {len(front)} of them on the front: nothing cheaper has as high a matchness."
    x_label = "c, draft pass / plain pass"
    plot = Plot("Matchness over cost", words, x_label, "mean matchness", points, 1.0)
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
        fingerprint = next((info.fingerprint for info in store.models() if job.model in info.names), None)
    profiles = store.cost_profiles(fingerprint) if fingerprint is not None else []
    same = [
        profile
        for profile in profiles
        if stored_set is not None and (profile.device, profile.dtype) == (stored_set.device, stored_set.dtype)
    ]
    return next(iter(same or profiles), None)


def parts_of(costs: CostProfile) -> list[dict[str, Any]]:
    """Return the costs of a pass's parts, for the model's own weights and each format."""
    whole = costs.target_pass_s(1)
    model_costs = FormatCosts(costs.attn_s, costs.mlp_s, costs.head_s, costs.fixed_s)
    return [
        {
            "weights": name,
            "costs": format_costs,
            "attn_share": format_costs.attn_s / whole,
            "mlp_share": format_costs.mlp_s / whole,
            "cost": costs.draft_cost(LayerSet(costs.n_layers).filled(STORED if format_costs is model_costs else name)),
        }
        for name, format_costs in (("the model's own", model_costs), *costs.formats.items())
    ]


def trial_values(tried: Sequence[Tried], label: str) -> dict[str, Any]:
    """Return the values of the trials' charts and tables; `label` names their score."""
    ranked = sorted(tried, key=lambda trial: -trial.score)
    tenth = ranked[: -(-len(ranked) // 10)]
    shares = skip_shares(tenth)
    title = f"How often each sub-layer was left out in the best {len(tenth)} of {len(tried)} trials"
    return {
        "charts": [
            trial_chart(tried, "matchness", lambda trial: trial.matchness, 1.0),
            trial_chart(tried, label, lambda trial: trial.score),
        ],
        "is_band": len(tried) > MOST_DOTS,
        "tables": [
            (name, [(trial, *_skipped(trial)) for trial in trials[:MOST_ROWS]])
            for name, trials in (("Best", ranked), ("Latest", tried[::-1]))
        ],
        "shares": shares,
        "share_map": share_map(tried[0].n_layers, shares, title),
        "n_best": len(tenth),
        "seconds": sum(trial.seconds for trial in tried),
        "n_adopted": sum(trial.adopted for trial in tried),
    }


def cost_values(tried: Sequence[Tried], costs: CostProfile | None) -> dict[str, Any]:
    """Return the values of the part on costs; None: none are stored."""
    points = [] if costs is None else tried_sets(tried, costs)
    front = front_of(points)
    return {
        "costs": costs,
        "parts": [] if costs is None else parts_of(costs),
        "cost_chart": cost_chart(points, front) if points else None,
        "front": [(point, *_skipped(point.trial)) for point in front[:: -(-len(front) // 20) or 1]],
        "n_sets": len(points),
    }


def _skipped(trial: Tried) -> tuple[str, str]:
    """Return the layers whose attention and whose MLP a trial left out, in words."""
    layer_set = trial.layer_set
    return spans(layer_set.skip_attn) or "none", spans(layer_set.skip_mlp) or "none"


# --- routes


@shown_page(router, "/searches", "searches", SELDOM_S)
async def searches(app: Shared) -> dict[str, Any]:
    """Return the searches of jobs, and those of served models."""
    served = [
        (one.engine.served.name, task, layer_map(task.layer_set, f"Drafts of {task.task}"))
        for one in await served_now(app)
        for task in one.tuning.tasks
    ]
    return {"rows": await run_in_threadpool(app.store.searches), "served": served}


@shown_page(router, "/searches/{job}", "search")
def search(app: Shared, job: str, task: Name | None = None) -> dict[str, Any]:
    """Return a job's search for one task.

    Raises: NotFound: there is no such job; Refused: 404, it has no trials for the task.
    """
    store = app.store
    searched_job, searches = store.jobs.get(job), store.searches(job)
    mine = next((trial for trial in searches if task in (None, trial.task)), None)
    if mine is None and searches:
        words = f"job {job} has no trials for this task: it has some for {', '.join(s.task for s in searches)}"
        raise Refused(404, "not-found", words)
    values: dict[str, Any] = {
        "job": searched_job,
        "searches": searches,
        "search": mine,
        "live": searched_job.state in UNFINISHED,
    }
    if mine is None:
        return values
    settings = searched_job.request.get("settings")
    by_speed = not isinstance(settings, dict) or settings.get("objective", "expected_speedup") == "expected_speedup"
    finished = None if values["live"] else store.jobs.evidence(job, mine.task)[0]
    values |= {"ended": finished and finished.stopped_because}
    values |= {"score_label": "expected speed, plain = 1" if by_speed else "score"}
    tried = [trial for trial in store.tried(job, mine.task) if math.isfinite(trial.score + trial.matchness)]
    if not tried:
        return {**values, "search": None}
    return {**values, **trial_values(tried, values["score_label"]), **cost_values(tried, costs_of(store, searched_job))}


@router.get("/live/searches/{job}")
async def search_live(app: Shared, session: CurrentSession, job: str, task: Name | None = None) -> Response:
    """The live part, rendered again for another state or 1 % more trials."""
    seen: tuple[list[StoredSearch], str] = ([], "")

    async def part() -> str:
        nonlocal seen
        now = await run_in_threadpool(app.store.searches, job)
        if not seen[1] or is_news(seen[0], now):
            values = await run_in_threadpool(search, app, job, task)
            seen = now, render("search_part.html", **values)
        return seen[1]

    return live(part)


def is_news(before: Sequence[StoredSearch], now: Sequence[StoredSearch]) -> bool:
    """Return whether a job has another state or task, or so many more trials that its charts show them."""
    if [(search_state.task, search_state.state) for search_state in before] != [
        (search_state.task, search_state.state) for search_state in now
    ]:
        return True
    return sum(search_state.n_trials for search_state in now) > 1.01 * sum(
        search_state.n_trials for search_state in before
    )
