"""The first page: what is decoded now, how much faster than plainly, and what needs attention; and the traffic."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ...core.errors import EngineGone, StoreError
from ...core.events import ModelTuning, TaskTuning
from ...core.types import seconds_by_part
from ..engines import EngineProcess, Period
from ..state import Shared, State, Word
from . import Visiting, live, page, pages, render

SPANS = {"10 minutes": 600, "1 hour": 3600, "6 hours": 21_600}
POINTS = 60  # of a chart
POSITIONS = 8  # of a draft, whose acceptance is shown

router = pages()


# --- overview


@dataclass(frozen=True, slots=True)
class ServedNow:
    """An engine and what it says of its tasks; `tuning` None: it does not answer. `lately`: what ended lately."""

    engine: EngineProcess
    tuning: ModelTuning | None
    lately: Period

    @property
    def tok_s(self) -> float:
        """Return the tokens per second that ended lately."""
        return self.lately.tokens / (time.time() - self.lately.at)

    @property
    def tasks(self) -> tuple[TaskTuning, ...]:
        """Return the tasks that it knows."""
        return () if self.tuning is None else self.tuning.tasks


async def served_now(app: State) -> list[ServedNow]:
    """Ask every engine what it does."""

    async def ask(engine: EngineProcess) -> ServedNow:
        tuning: ModelTuning | None = None
        with suppress(EngineGone):
            tuning = await engine.ask_tuning()
        return ServedNow(engine, tuning, app.engines.metrics.history.now(engine.served.name))

    return list(await asyncio.gather(*map(ask, app.engines.of.values())))


def alarms(served: list[ServedNow], states: dict[str, int] | str) -> list[str]:
    """Return what needs attention, a sentence each; `states` are numbers of jobs, or why there are none."""
    found = [f"{one.engine.served.name} does not serve: {one.engine.state}" for one in served if one.tuning is None]
    if isinstance(states, str):
        found.append(f"The database is away: {states}")
    for one in served:
        for task in one.tasks:
            if task.in_use == "plain" and task.pinned is None and task.requests:
                measured = "drafts were slower" if task.ratio is None else f"drafts were measured at {task.ratio:.2f}x"
                why = task.shifts.latest or measured
                since = time.strftime("%H:%M", time.localtime(task.since))
                found.append(f"Drafting is off for {one.engine.served.name}/{task.task} since {since}: {why}")
    return found


async def values_of(app: State) -> dict[str, Any]:
    """Return what the page shows."""
    served = await served_now(app)
    try:
        states: dict[str, int] | str = await run_in_threadpool(app.store.jobs.states)
    except StoreError as error:
        states = str(error)
    tasks = [task for one in served for task in one.tasks]
    drafted, accepted = (sum(getattr(one.lately, name) for one in served) for name in ("drafted", "accepted"))
    return {
        "served": served,
        "alarms": alarms(served, states),
        "jobs": {} if isinstance(states, str) else states,
        "saved_s": sum(task.saved_s for task in tasks),
        "tokens": sum(task.tokens for task in tasks),
        "tok_s": sum(one.tok_s for one in served),
        "acceptance": accepted / drafted if drafted else None,
        "n_running": sum(min(one.engine.n_requests, one.engine.served.concurrency) for one in served),
        "n_requests": sum(one.engine.n_requests for one in served),
    }


@router.get("/")
async def overview(request: Request, app: Shared, visit: Visiting) -> Response:
    """What goes on now."""
    return page(request, visit, "overview.html", **await values_of(app))


@router.get("/live/overview")
async def overview_live(app: Shared, visit: Visiting) -> Response:
    """The same, as it changes."""

    async def part() -> str:
        return render("overview_part.html", **await values_of(app))

    return live(part)


# --- traffic


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart that is a table too: lines by name, a value for each moment (None: nothing ended then)."""

    title: str
    unit: str
    lines: dict[str, list[float | None]]


def charts(periods: list[Period], length_s: float) -> list[Chart]:
    """Return the charts of a task's traffic."""

    def each(value: Any) -> list[float | None]:
        return [round(value(period), 4) if period.requests else None for period in periods]

    def ratio(above: str, below: str) -> list[float | None]:
        pairs = [(getattr(period, above), getattr(period, below)) for period in periods]
        return [round(a / b, 4) if b else None for a, b in pairs]

    parts = [seconds_by_part(period.spent) for period in periods]
    return [
        Chart("Tokens per second", "", {"completions": each(lambda own: own.tokens / length_s)}),
        Chart("Time to first token", "s", {"mean": ratio("first_token_s", "requests")}),
        Chart("Time per token", "s", {"mean": ratio("between_tokens_s", "requests")}),
        Chart("Acceptance", "", {"accepted / drafted": ratio("accepted", "drafted")}),
        Chart("Prompt tokens read before", "", {"cached / prompt": ratio("cached_tokens", "prompt_tokens")}),
        Chart("Where time went", "s", {name: [round(own[name], 4) for own in parts] for name in parts[0]}),
    ]


def by_position(periods: list[Period]) -> list[tuple[int, float]]:
    """Return the share of rounds in which each position of the draft was accepted, from 1."""
    whole = sum(periods[1:], periods[0])
    shown = whole.accepted_per_position[:POSITIONS]
    return [(place, n / whole.rounds) for place, n in enumerate(shown, 1)] if whole.rounds else []


def traffic_of(app: State, span: str, model: str | None, task: str | None) -> dict[str, Any]:
    """Return what the page shows of the last `span`."""
    history, span_s = app.engines.metrics.history, SPANS.get(span, 3600)
    periods = history.last(span_s, POINTS, model, task)
    length_s = max(1, span_s // POINTS)
    return {
        "charts": charts(periods, length_s),
        "moments": [period.at for period in periods],
        "clock": [time.strftime("%H:%M:%S", time.localtime(period.at)) for period in periods],
        "by_position": by_position(periods),
        "requests": sum(period.requests for period in periods),
        "tokens": sum(period.tokens for period in periods),
    }


Named = Annotated[Word | None, Query()]
Span = Annotated[str, Query(max_length=20)]


@router.get("/traffic")
async def traffic(
    request: Request, app: Shared, visit: Visiting, span: Span = "1 hour", model: Named = None, task: Named = None
) -> Response:
    """The traffic of the last minutes or hours, of one model and task or of all."""
    span = span if span in SPANS else "1 hour"
    values: dict[str, Any] = {"span": span, "model": model, "task": task, "spans": list(SPANS)}
    values |= {"query": request.url.query, "tasks": app.engines.metrics.history.tasks}
    return page(request, visit, "traffic.html", **values, **traffic_of(app, span, model, task))


@router.get("/live/traffic")
async def traffic_live(
    app: Shared, visit: Visiting, span: Span = "1 hour", model: Named = None, task: Named = None
) -> Response:
    """The same, as it changes."""

    async def part() -> str:
        return render("traffic_part.html", **traffic_of(app, span, model, task))

    return live(part)
