"""The first page: what is the case now, in a sentence and a curve; then the tasks and what needs attention."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool

from ...core.errors import StoreError
from ...core.events import ModelTuning
from ..engines import EngineProcess
from ..metrics import NOW_S, Period
from ..middleware import Shared, State
from . import LIVE_S, pages, shown_page

router = pages()


@dataclass(frozen=True, slots=True)
class ServedNow:
    """An engine, its tuning, and its traffic: of the last minute, and since the server's start."""

    engine: EngineProcess
    tuning: ModelTuning
    lately: Period
    total: Period

    @property
    def throughput(self) -> float | None:
        """Tokens per second of the last minute, of all requests."""
        return self.lately.throughput(NOW_S)


async def served_now(app: State) -> list[ServedNow]:
    """Return what every engine does now."""
    tunings, history = await app.engines.ask_tuning(), app.engines.metrics.history
    return [
        ServedNow(engine, tunings[name], history.now(name), history.total(name))
        for name, engine in app.engines.of.items()
    ]


def alarms(engine_states: list[ServedNow], store_error: str) -> list[str]:
    """Return what needs attention, a sentence each."""
    sentences = [
        f"{engine_state.engine.served.name} does not serve: {engine_state.engine.state}"
        for engine_state in engine_states
        if engine_state.tuning.unavailable
    ]
    if store_error:
        sentences.append(store_error)
    for engine_state in engine_states:
        for task in engine_state.tuning.tasks:
            if task.in_use == "plain" and task.pinned is None and task.requests:
                measurement = (
                    "drafts were slower" if task.ratio is None else f"drafts were measured at {task.ratio:.2f}x"
                )
                reason = task.shifts.latest or measurement
                off_since = time.strftime("%H:%M", time.localtime(task.since))
                sentences.append(
                    f"Drafting is off for {engine_state.engine.served.name}/{task.task} since {off_since}: {reason}"
                )
    return sentences


@shown_page(router, "/", "overview", LIVE_S, live_path="/live/overview")
async def overview(app: Shared) -> dict[str, Any]:
    """Return what is decoded now."""
    engine_states = await served_now(app)
    jobs: dict[str, int] = {}
    error = ""
    try:
        jobs = await run_in_threadpool(app.store.jobs.states)
        if problem := await run_in_threadpool(app.storage.problem):
            error = f"Nothing can be stored: {problem}"
    except StoreError as failure:
        error = f"The database is away: {failure}"
    tasks = [task for engine_state in engine_states for task in engine_state.tuning.tasks]
    return {
        "served": engine_states,
        "alarms": alarms(engine_states, error),
        "jobs": jobs,
        "saved_s": sum(task.all_saved_s for task in tasks),
        "tokens": sum(engine_state.total.tokens for engine_state in engine_states),
        "lately": sum((engine_state.lately for engine_state in engine_states), Period(0)),
        "n_running": sum(
            min(engine_state.engine.n_requests, engine_state.engine.served.concurrency)
            for engine_state in engine_states
        ),
        "n_requests": sum(engine_state.engine.n_requests for engine_state in engine_states),
    }
