"""The pages of searches: what was tried by a job, how good it was and what it costs; charts are SVG of a few paths."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from fastapi import Query, Request
from markupsafe import Markup, escape
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ...core.costs import CostProfile, FormatCosts
from ...core.requests import UNFINISHED, Job
from ...core.settings import STORED
from ...core.types import LayerSet
from ...store import Store
from ...store.results import StoredSearch, Tried
from ..problems import Refused
from ..state import Shared, State
from . import Visiting, live, page, pages, render
from .overview import served_now
from .plans import CELL, KINDS, LABEL, PER_BLOCK, RULER, SELDOM_S, Name, layer_map, spans

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 240, 60, 24, 12, 42  # of a chart
MOST_DOTS = 400  # beyond which trials are drawn as a band
N_GROUPS = 160  # of a band
BAR = 44  # height of a row of bars
MOST_ROWS = 10  # of a table of trials

Point = tuple[float, float]

router = pages()


# --- charts


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(each * unit for each in (1, 2, 5, 10) if each * unit >= rough)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


@dataclass(slots=True)
class Plot:
    """A chart with two axes; every series is one path, whose class in the style sheet is its name."""

    title: str
    description: str
    x_label: str
    y_label: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    _paths: list[str] = field(default_factory=list)

    @classmethod
    def around(cls, title: str, description: str, x_label: str, y_label: str, points: Sequence[Point]) -> Plot:
        """Return an empty chart with room for the points."""
        xs, ys = zip(*points, strict=True)
        return cls(title, description, x_label, y_label, _wider(xs), _wider(ys))

    def _at(self, point: Point) -> str:
        (x_low, x_high), (y_low, y_high) = self.x_range, self.y_range
        x = LEFT + (point[0] - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (point[1] - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f} {y:.1f}"

    def _add(self, name: str, path: str) -> None:
        self._paths.append(f'<path class="{name}" d="{path}"/>')

    def dots(self, name: str, points: Iterable[Point]) -> None:
        """Add dots: the round ends of lines without length."""
        self._add(name, "".join(f"M{self._at(point)}h0" for point in points))

    def diamonds(self, name: str, points: Iterable[Point]) -> None:
        """Add marks that are told from dots by their shape."""
        self._add(name, "".join(f"M{self._at(point)}m0 -6l6 6l-6 6l-6 -6z" for point in points))

    def line(self, name: str, points: Sequence[Point]) -> None:
        """Add a line."""
        self._add(name, "M" + "L".join(map(self._at, points)) if points else "")

    def steps(self, name: str, points: Sequence[Point]) -> None:
        """Add a line that keeps each value until the next point."""
        corners = [(after[0], before[1]) for before, after in pairwise(points)]
        joined = [point for pair in zip(points, corners, strict=False) for point in pair]
        self.line(name, [*joined, *points[-1:]])

    def band(self, name: str, low: Sequence[Point], high: Sequence[Point]) -> None:
        """Add the area between two lines."""
        self._add(name, "M" + "L".join(map(self._at, [*low, *reversed(high)])) + "z")

    def draw(self) -> Markup:
        """Return the SVG."""
        lines, words = [], []
        for value in ticks(*self.y_range):
            y = self._at((self.x_range[0], value)).partition(" ")[2]
            lines.append(f"M{LEFT} {y}H{WIDTH - RIGHT}")
            words.append(f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        for value in ticks(*self.x_range):
            x = self._at((value, self.y_range[0])).partition(" ")[0]
            words.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{value:.6g}</text>')
        middle = (LEFT + WIDTH - RIGHT) // 2
        words.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self.x_label)}</text>')
        words.append(
            f'<text x="12" y="{(HEIGHT - BOTTOM) // 2}" text-anchor="middle"'
            f' transform="rotate(-90 12 {(HEIGHT - BOTTOM) // 2})">{escape(self.y_label)}</text>'
        )
        return Markup(
            f'<svg class="graph" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
            f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>"
            f'<path class="axis" d="{"".join(lines)}"/>{"".join(self._paths)}{"".join(words)}</svg>'
        )


def _wider(values: Sequence[float]) -> Point:
    """Return the range of the values with a margin."""
    low, high = min(values), max(values)
    margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def trial_chart(tried: Sequence[Tried], label: str, value: Callable[[Tried], float]) -> Markup:
    """Draw a figure of the trials by their number, with the best so far and the sets that were adopted."""
    points = [(float(each.step), value(each)) for each in tried]
    best: list[Point] = []
    for step, reached in points:
        if not best or reached > best[-1][1]:
            best.append((step, reached))
    last, top = points[-1][0], best[-1]
    words = (
        f"{len(points)} trials; the highest is {top[1]:.3g}, of trial {top[0]:.0f}; the last is {points[-1][1]:.3g}."
    )
    plot = Plot.around(f"{label} by trial", words, "trial", label, points)
    if len(points) <= MOST_DOTS:
        plot.dots("dots", points)
    else:
        size = -(-len(points) // N_GROUPS)
        groups = [points[i : i + size] for i in range(0, len(points), size)]
        middles = [(group[0][0] + group[-1][0]) / 2 for group in groups]
        values = [[reached for _, reached in group] for group in groups]
        plot.band(
            "band",
            list(zip(middles, map(min, values), strict=True)),
            list(zip(middles, map(max, values), strict=True)),
        )
        plot.line("mean", [(x, sum(each) / len(each)) for x, each in zip(middles, values, strict=True)])
    plot.steps("best", [*best[:: -(-len(best) // MOST_DOTS)], (last, top[1])])
    plot.diamonds("adopted", [(each.step, value(each)) for each in tried if each.adopted][-MOST_DOTS:])
    return plot.draw()


def share_map(n_layers: int, shares: dict[str, list[float]], title: str) -> Markup:
    """Draw a bar per sub-layer, attention above MLP, as high as its share (0 to 1)."""
    width = max(LABEL + CELL * min(n_layers, PER_BLOCK) + 2, 512)
    block = RULER + (BAR + 6) * len(KINDS) + 4
    frames, bars, texts, words = [], [], [], []
    for row, (kind, name) in enumerate(KINDS):
        for i, share in enumerate(shares[kind]):
            x, top = LABEL + CELL * (i % PER_BLOCK), block * (i // PER_BLOCK)
            y, height = top + RULER + (BAR + 6) * row, round(BAR * share, 1)
            frames.append(f"M{x} {y}h18v{BAR}h-18z")
            bars.append(f"M{x} {y + BAR}h18v{-height}h-18z" if height else "")
            if row == 0 and (i % 5 == 0 or n_layers <= 12):
                texts.append(f'<text x="{x + 9}" y="{top + 11}" text-anchor="middle">{i}</text>')
            if i % PER_BLOCK == 0:
                texts.append(f'<text x="0" y="{y + BAR // 2 + 4}">{name}</text>')
        often = [i for i, share in enumerate(shares[kind]) if share >= 0.5]
        words.append(f"{name} left out in at least half of them: {spans(often) or 'none'}.")
    height = block * -(-n_layers // PER_BLOCK)
    return Markup(
        f'<svg class="map" role="img" viewBox="-1 0 {width} {height}" width="{width}" height="{height}">'
        f"<title>{escape(title)}</title><desc>{escape(' '.join(words))}</desc>"
        f'<path class="kept" d="{"".join(frames)}"/><path class="bar" d="{"".join(bars)}"/>{"".join(texts)}</svg>'
    )


# --- what was tried


def skip_shares(tried: Sequence[Tried]) -> dict[str, list[float]]:
    """Return per sub-layer in how many of the trials it was left out, as a share."""
    found = {}
    for kind, texts in (("attn", Counter(t.skip_attn for t in tried)), ("mlp", Counter(t.skip_mlp for t in tried))):
        counts = [0] * tried[0].n_layers
        for text, n in texts.items():
            for layer in json.loads(text):
                if type(layer) is int and 0 <= layer < len(counts):  # else the trial was changed by hand
                    counts[layer] += n
        found[kind] = [count / len(tried) for count in counts]
    return found


class TriedSet(NamedTuple):
    """A layer set that was tried: its draft's cost in plain passes, and the means of its trials."""

    trial: Tried
    cost: float
    matchness: float
    score: float
    n_trials: int


def tried_sets(tried: Sequence[Tried], costs: CostProfile) -> list[TriedSet]:
    """Return the sets that were tried and whose costs are known, cheapest first."""
    sums: dict[tuple[str, str, str | None], list[Any]] = {}  # first trial, number, matchness, score
    for each in tried:
        if (own := sums.get(each.key)) is None:
            sums[each.key] = [each, 1, each.matchness, each.score]
        else:
            own[1:] = own[1] + 1, own[2] + each.matchness, own[3] + each.score
    prices: dict[str | None, Prices | None] = {}
    found = []
    for (attn, mlp, formats), (trial, n, matchness, score) in sums.items():
        if formats not in prices:
            whole = replace(trial.layer_set, skip_attn=frozenset(), skip_mlp=frozenset())
            prices[formats] = None if costs.missing(whole) else Prices.of(costs, whole)
        if (of := prices[formats]) is not None:
            found.append(TriedSet(trial, of.cost(attn, mlp), matchness / n, score / n, n))
    return sorted(found, key=lambda each: (each.cost, -each.matchness))


@dataclass(frozen=True, slots=True)
class Prices:
    """What a draft that skips nothing costs in some formats, and what leaving out each sub-layer saves; plain passes.

    Reckoning with these takes a twentieth of the time of `CostProfile.draft_cost` for every set.
    """

    whole: float
    attn: list[float]
    mlp: list[float]
    _known: dict[tuple[bool, str], float] = field(default_factory=dict)

    @classmethod
    def of(cls, costs: CostProfile, whole: LayerSet) -> Prices:
        """Return the prices of drafts in the formats of a set that skips nothing."""
        plain_s, layers = costs.target_pass_s(1), range(whole.n_layers)
        attn, mlp = ([costs.part_s(kind, i, whole) / plain_s for i in layers] for kind, _ in KINDS)
        return cls(costs.draft_cost(whole), attn, mlp)

    def cost(self, skip_attn: str, skip_mlp: str) -> float:
        """Return c of the draft that leaves out those layers, JSON lists; rounded, so that equal ones are equal."""
        return round(self.whole - self._saved(True, skip_attn) - self._saved(False, skip_mlp), 9)

    def _saved(self, is_attn: bool, layers: str) -> float:
        if (is_attn, layers) not in self._known:
            prices = self.attn if is_attn else self.mlp
            self._known[is_attn, layers] = sum(prices[layer] for layer in json.loads(layers))
        return self._known[is_attn, layers]


def front_of(found: Sequence[TriedSet]) -> list[TriedSet]:
    """Return those that nothing cheaper matches as well, cheapest first."""
    front: list[TriedSet] = []
    for each in found:
        if not front or each.matchness > front[-1].matchness:
            front.append(each)
    return front


def cost_chart(found: Sequence[TriedSet], front: Sequence[TriedSet]) -> Markup:
    """Draw matchness over draft cost, with the front."""
    points = [(each.cost, each.matchness) for each in found]
    words = f"{len(found)} layer sets, {len(front)} of them on the front: nothing cheaper has as high a matchness."
    x_label = "c, draft pass / plain pass"
    plot = Plot.around("Matchness over cost", words, x_label, "mean matchness", points)
    plot.dots("dots", points[:: -(-len(points) // MOST_DOTS)])
    best = [(each.cost, each.matchness) for each in front]
    plot.steps("best", best)
    plot.diamonds("adopted", best)
    return plot.draw()


def costs_of(store: Store, job: Job) -> CostProfile | None:
    """Return the measured costs of a job's model: of the device that it ran on where that is known, else the newest."""
    own = job.layer_sets[0] if job.layer_sets else None
    fingerprint = own.fingerprint if own is not None else None
    if fingerprint is None:
        fingerprint = next((info.fingerprint for info in store.models() if job.model in info.names), None)
    profiles = store.cost_profiles(fingerprint) if fingerprint is not None else []
    same = [each for each in profiles if own is not None and (each.device, each.dtype) == (own.device, own.dtype)]
    return next(iter(same or profiles), None)


def parts_of(costs: CostProfile) -> list[dict[str, Any]]:
    """Return what the parts of a pass cost, for the model's own weights and each format."""
    whole = costs.target_pass_s(1)
    rows = []
    own = FormatCosts(costs.attn_s, costs.mlp_s, costs.head_s, costs.fixed_s)
    for name, each in (("the model's own", own), *costs.formats.items()):
        layer_set = LayerSet(costs.n_layers).filled(STORED if each is own else name)
        rows.append(
            {
                "weights": name,
                "attn_s": each.attn_s,
                "mlp_s": each.mlp_s,
                "head_s": each.head_s,
                "fixed_s": each.fixed_s,
                "attn_share": each.attn_s / whole,
                "mlp_share": each.mlp_s / whole,
                "cost": costs.draft_cost(layer_set),
            }
        )
    return rows


def search_values(store: Store, job_id: str, task: str | None) -> dict[str, Any]:
    """Return what the page of a search shows.

    Raises: NotFound: there is no such job; Refused: 404, it has no trials for the task.
    """
    job, searches = store.jobs.get(job_id), store.searches(job_id)
    mine = next((each for each in searches if task in (None, each.task)), None)
    if mine is None and searches:
        words = f"job {job_id} has no trials for this task: it has some for {', '.join(s.task for s in searches)}"
        raise Refused(404, "not-found", words)
    values: dict[str, Any] = {"job": job, "searches": searches, "search": mine, "live": job.state in UNFINISHED}
    if mine is None:
        return values
    tried, costs = store.tried(job_id, mine.task), costs_of(store, job)
    settings = job.request.get("settings")
    by_speed = not isinstance(settings, dict) or settings.get("objective", "expected_speedup") == "expected_speedup"
    label = "expected speed, plain = 1" if by_speed else "score"
    finished = None if values["live"] else store.jobs.evidence(job_id, mine.task)[0]
    ranked = sorted(tried, key=lambda each: -each.score)
    tenth = ranked[: -(-len(ranked) // 10)]
    found = [] if costs is None else tried_sets(tried, costs)
    front = front_of(found)
    shares = skip_shares(tenth)
    title = f"How often each sub-layer was left out in the best {len(tenth)} of {len(tried)} trials"
    return {
        **values,
        "score_label": label,
        "charts": [
            trial_chart(tried, "matchness", lambda each: each.matchness),
            trial_chart(tried, label, lambda each: each.score),
        ],
        "is_band": len(tried) > MOST_DOTS,
        "tables": [(title, _rows(each)) for title, each in (("Best", ranked), ("Latest", tried[::-1]))],
        "shares": shares,
        "share_map": share_map(tried[0].n_layers, shares, title),
        "n_best": len(tenth),
        "seconds": sum(each.seconds for each in tried),
        "n_adopted": sum(each.adopted for each in tried),
        "ended": finished.stopped_because if finished is not None else None,
        "costs": costs,
        "parts": parts_of(costs) if costs is not None else [],
        "cost_chart": cost_chart(found, front) if found else None,
        "front": [(each, *_skipped(each.trial)) for each in front[:: -(-len(front) // 20) or 1]],
        "n_sets": len(found),
    }


def _rows(tried: Sequence[Tried]) -> list[tuple[Tried, str, str]]:
    return [(each, *_skipped(each)) for each in tried[:MOST_ROWS]]


def _skipped(trial: Tried) -> tuple[str, str]:
    """Return the layers whose attention and whose MLP a trial left out, in words."""
    layer_set = trial.layer_set
    return spans(layer_set.skip_attn) or "none", spans(layer_set.skip_mlp) or "none"


# --- routes


async def list_values(app: State) -> dict[str, Any]:
    """Return what the list of searches shows."""
    served = [
        (one.engine.served.name, task, layer_map(task.layer_set, f"Drafts of {task.task}"))
        for one in await served_now(app)
        for task in one.tasks
    ]
    return {"rows": await run_in_threadpool(app.store.searches), "served": served}


@router.get("/searches")
async def searches(request: Request, app: Shared, visit: Visiting) -> Response:
    """The searches of jobs, and those beside requests."""
    return page(request, visit, "searches.html", **await list_values(app))


@router.get("/live/searches")
async def searches_live(app: Shared, visit: Visiting) -> Response:
    """The same, as it changes."""

    async def part() -> str:
        return render("searches_part.html", **await list_values(app))

    return live(part, SELDOM_S)


@router.get("/searches/{job}")
async def search(
    request: Request, app: Shared, visit: Visiting, job: str, task: Annotated[Name | None, Query()] = None
) -> Response:
    """One job's search for one task."""
    return page(request, visit, "search.html", **await run_in_threadpool(search_values, app.store, job, task))


@router.get("/live/searches/{job}")
async def search_live(app: Shared, visit: Visiting, job: str, task: Annotated[Name | None, Query()] = None) -> Response:
    """The same, as the job goes on; it is made anew for another state, or 1 % more trials."""
    seen: tuple[list[StoredSearch], str] = ([], "")

    async def part() -> str:
        nonlocal seen
        now = await run_in_threadpool(app.store.searches, job)
        if not seen[1] or is_news(seen[0], now):
            values = await run_in_threadpool(search_values, app.store, job, task)
            seen = now, render("search_part.html", **values)
        return seen[1]

    return live(part)


def is_news(before: Sequence[StoredSearch], now: Sequence[StoredSearch]) -> bool:
    """Return whether a job has another state or task, or so many more trials that its charts show them."""
    if [(each.task, each.state) for each in before] != [(each.task, each.state) for each in now]:
        return True
    return sum(each.n_trials for each in now) > 1.01 * sum(each.n_trials for each in before)
