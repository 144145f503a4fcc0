"""The first page: problems that need attention, a summary sentence, a curve of the speed, and the tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from markupsafe import Markup
from starlette.concurrency import run_in_threadpool

from ...core.errors import StoreError
from ..metrics import History, Period
from ..middleware import Shared, State
from ..operation import redis_state
from . import LIVE_S, pages, shown_page
from .drawing import DOT, Plot, Point
from .headline import ServedNow, headline
from .traffic import POINTS, SPANS, periods_with_data

NARROW = 480  # Width of the curve in SVG units, so that it fits a phone's screen.

router = pages()


async def served_now(app: State) -> list[ServedNow]:
    """Return the current state of every engine."""
    tunings, history = await app.engines.ask_tuning(), app.engines.metrics.history
    return [
        ServedNow(engine, tunings[name], history.now(name), history.total(name))
        for name, engine in app.engines.of.items()
    ]


def alarms(engine_states: Sequence[ServedNow], service_problems: Iterable[str]) -> list[str]:
    """Return the problems that need attention, one sentence each; `service_problems` concern database, disks, Redis."""
    sentences = [
        f"{engine_state.name} does not serve: {engine_state.engine.state}"
        for engine_state in engine_states
        if engine_state.tuning.unavailable
    ]
    sentences += filter(None, service_problems)
    for engine_state in engine_states:
        costs = engine_state.tuning.costs
        if costs is not None and costs.quality == "disturbed":
            reason = f" ({costs.remark})" if costs.remark else ""
            sentences.append(
                f"The costs of {engine_state.name} were measured while other programs ran{reason}:"
                " drafts are chosen by inaccurate costs until requests have refined these"
            )
        for task in engine_state.tuning.tasks:
            if task.in_use == "plain" and task.pinned is None and task.requests:
                measurement = (
                    "drafts were slower" if task.ratio is None else f"drafts were measured at {task.ratio:.2f}x"
                )
                reason = task.shifts.latest or measurement
                off_since = time.strftime("%H:%M", time.localtime(task.since))
                sentences.append(f"Drafting is off for {engine_state.name}/{task.task} since {off_since}: {reason}")
    return sentences


def speed_chart(periods: Sequence[Period]) -> Markup | None:
    """Draw tokens per second of rounds with a draft and of the others, over time; None: no round was timed."""
    series: tuple[tuple[str, str, Callable[[Period], float | None]], ...] = (
        ("drafted", "with drafts", lambda period: period.drafted_tok_s),
        ("plain", "plain", lambda period: period.plain_tok_s),
    )
    lines = {
        name: [(float(period.at), speed) for period in periods if (speed := speed_of(period)) is not None]
        for name, _, speed_of in series
    }
    points = [point for line in lines.values() for point in line]
    if not points:
        return None
    total = sum(periods[1:], periods[0])
    speeds = [f"{words} {tok_s:.1f}" for _, words, speed_of in series if (tok_s := speed_of(total)) is not None]
    description = f"On average {', '.join(speeds)} tokens per second."
    length_s = periods[1].at - periods[0].at
    times = float(periods[0].at), float(periods[-1].at + length_s)
    title = "Tokens per second of decoding a request"
    plot = Plot(title, description, "", "tokens/s", points, bottom=0, times=times, width=NARROW)
    for name, words, _ in series:
        for stretch in stretches(lines[name], length_s):
            plot.line(name, stretch)
        plot.marks(f"{name} dots", lines[name], DOT)
        if lines[name]:
            plot.key(name, words)
    return plot.draw()


def recent_periods(history: History) -> list[Period]:
    """Return the last hour with data, in periods of 10 s if all data are within ten minutes, otherwise of a minute."""
    minutes, hour = (periods_with_data(history, SPANS[span], POINTS) for span in ("10 minutes", "1 hour"))
    return minutes if _requests(minutes) == _requests(hour) else hour


def _requests(periods: Sequence[Period]) -> int:
    return sum(period.requests for period in periods)


def stretches(points: Sequence[Point], step: float) -> list[list[Point]]:
    """Return runs of points at a distance of one step; nothing was measured between runs."""
    runs: list[list[Point]] = []
    for point in points:
        if runs and point[0] - runs[-1][-1][0] <= step:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


@shown_page(router, "/", "overview", LIVE_S, live_path="/live/overview")
async def overview(app: Shared) -> dict[str, Any]:
    """Return what is decoded now."""
    engine_states, jobs, redis = await asyncio.gather(
        served_now(app), run_in_threadpool(_jobs, app), run_in_threadpool(redis_state, app.queue)
    )
    job_counts, problem = jobs
    redis_problem = "" if redis in ("ok", "not configured") else f"Redis is {redis}"
    tasks = [task for engine_state in engine_states for task in engine_state.tuning.tasks]
    periods = recent_periods(app.engines.metrics.history)
    n_running = sum(
        min(engine_state.engine.n_requests, engine_state.engine.served.concurrency) for engine_state in engine_states
    )
    return {
        "headline": headline(engine_states, job_counts),
        "chart": speed_chart(periods),
        "served": engine_states,
        "alarms": alarms(engine_states, (problem, redis_problem)),
        "jobs": job_counts,
        "saved_s": sum(task.all_saved_s for task in tasks),
        "lately": sum((engine_state.lately for engine_state in engine_states), Period(0)),
        "n_running": n_running,
        "n_waiting": sum(engine_state.engine.n_requests for engine_state in engine_states) - n_running,
    }


def _jobs(app: State) -> tuple[dict[str, int], str]:
    """Return the jobs by state, and a sentence if the database or a disk cannot be used (empty: they can)."""
    try:
        jobs = app.store.jobs.states()
    except StoreError as failure:
        return {}, f"The database is unavailable: {failure}"
    problem = app.storage.problem()
    return jobs, f"Nothing can be stored: {problem}" if problem else ""
