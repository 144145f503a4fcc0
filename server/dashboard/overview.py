"""The first page: what is decoded now and how much faster than plainly, what is in use, and what needs attention."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ...core.errors import EngineGone, StoreError
from ..engines import EngineProcess
from ..state import Shared, State
from . import Visiting, live, page, pages, render

router = pages()


@dataclass(frozen=True, slots=True)
class ServedNow:
    """An engine and what it says of its tasks (`Traffic.to_json`); `tuning` None: it does not answer."""

    engine: EngineProcess
    tuning: dict[str, Any] | None

    @property
    def tasks(self) -> list[dict[str, Any]]:
        """Return the tasks of which requests came."""
        return [] if self.tuning is None else list(self.tuning["tasks"])

    @property
    def tokens(self) -> int:
        """Return the tokens of completions so far."""
        return sum(task["tokens"] for task in self.tasks)

    @property
    def saved_s(self) -> float:
        """Return the seconds that plain decoding would have taken longer, by each task's measured ratio."""
        return float(sum(task["saved_s"] for task in self.tasks))


async def served_now(app: State) -> list[ServedNow]:
    """Ask every engine what it does."""

    async def ask(engine: EngineProcess) -> ServedNow:
        try:
            return ServedNow(engine, await engine.tell("tuning"))
        except EngineGone:
            return ServedNow(engine, None)

    return list(await asyncio.gather(*map(ask, app.engines.of.values())))


def alarms(served: list[ServedNow], states: dict[str, int] | str) -> list[str]:
    """Return what needs attention, a sentence each; `states` are numbers of jobs, or why there are none."""
    found = [f"{one.engine.served.name} does not serve: {one.engine.state}" for one in served if one.tuning is None]
    if isinstance(states, str):
        found.append(f"The database is away: {states}")
    for one in served:
        for task in one.tasks:
            if task["in_use"] == "plain" and task["pinned"] is None:
                ratio = f"measured {task['ratio']:.2f}x of plain" if task["ratio"] is not None else "not measured"
                found.append(f"Drafting is off for {one.engine.served.name}/{task['task']}: {ratio}")
    return found


async def values_of(app: State) -> dict[str, Any]:
    """Return what the page shows."""
    served = await served_now(app)
    try:
        states: dict[str, int] | str = await run_in_threadpool(app.store.jobs.states)
    except StoreError as error:
        states = str(error)
    return {
        "served": served,
        "alarms": alarms(served, states),
        "jobs": {} if isinstance(states, str) else states,
        "saved_s": sum(one.saved_s for one in served),
        "tokens": sum(one.tokens for one in served),
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
