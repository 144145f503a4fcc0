"""The page of traffic: charts of the last minutes or hours, each also a table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Query, Request

from ...core.types import seconds_by_part
from ..metrics import History, Period
from ..middleware import Shared
from ..schemas import Word
from . import LIVE_S, pages, shown_page

SPANS = {"10 minutes": 600, "1 hour": 3600, "6 hours": 21_600}
POINTS = 60  # Points of a chart.
LEAST_POINTS = 12  # Minimum points of a chart whose empty start is cut off.
POSITIONS = 8  # Draft positions whose acceptance rate is shown.

router = pages()


def periods_with_data(
    history: History, span_s: int, n: int, model: str | None = None, task: str | None = None
) -> list[Period]:
    """Return the last span in which requests ended, in `n` periods, without empty ones at its start.

    It ends now if a request ended within the span, and otherwise at the last request. At least LEAST_POINTS remain.
    """
    periods = history.last(span_s, n, model, task)
    if not any(period.requests for period in periods) and (last_at := history.last_at(model, task)) is not None:
        periods = history.last(span_s, n, model, task, last_at)
    first = next((i for i, period in enumerate(periods) if period.requests), len(periods))
    return periods[max(0, min(first - 1, len(periods) - LEAST_POINTS)) :]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart that is also shown as a table: named lines with a value per period (None: no request ended).

    `top` is the end of its axis; None: a little above the largest value.
    """

    title: str
    unit: str
    lines: dict[str, list[float | None]]
    top: float | None = None


def charts(periods: list[Period], length_s: float) -> list[Chart]:
    """Return the charts of a task's traffic."""

    def values(figure_of: Callable[[Period], float | None]) -> list[float | None]:
        figures_by_period = [figure_of(period) for period in periods]
        return [None if value is None else round(value, 4) for value in figures_by_period]

    speeds = {
        "decoding, one request": values(lambda period: period.decode_tok_s),
        "throughput, all requests": values(lambda period: period.throughput(length_s)),
        "rounds with drafts": values(lambda period: period.drafted_tok_s),
        "rounds without": values(lambda period: period.plain_tok_s),
    }
    seconds_per_part = [seconds_by_part(period.spent) for period in periods]
    by_part: dict[str, list[float | None]] = {
        name: [round(part_seconds[name], 4) for part_seconds in seconds_per_part] for name in seconds_per_part[0]
    }
    return [
        Chart("Tokens per second", "", speeds),
        Chart("Time to first token", "s", {"mean": values(lambda period: period.mean_first_token_s)}),
        Chart("Time per token", "s", {"mean": values(lambda period: period.mean_between_tokens_s)}),
        Chart("Acceptance", "", {"accepted / drafted": values(lambda period: period.acceptance_rate)}, 1.0),
        Chart(
            "Prompt tokens read before",
            "",
            {"cached / prompt": values(lambda period: period.cached_share)},
            1.0,
        ),
        Chart("Where the requests' time went", "s", by_part),
    ]


Named = Annotated[Word | None, Query()]


@shown_page(router, "/traffic", "traffic", LIVE_S)
async def traffic(
    request: Request,
    app: Shared,
    span: Annotated[str, Query(max_length=20)] = "1 hour",
    model: Named = None,
    task: Named = None,
) -> dict[str, Any]:
    """Return the traffic of the last minutes or hours, optionally of one model and task."""
    span = span if span in SPANS else "1 hour"
    history = app.engines.metrics.history
    periods = periods_with_data(history, SPANS[span], POINTS, model, task)
    total = sum(periods[1:], periods[0])
    return {
        **{"span": span, "spans": list(SPANS), "model": model, "task": task, "tasks": history.tasks},
        "query": request.url.query,
        "charts": charts(periods, SPANS[span] // POINTS),
        "moments": [period.at for period in periods],
        "clock": [time.strftime("%H:%M:%S", time.localtime(period.at)) for period in periods],
        "by_position": list(enumerate(total.accepted_by_position[:POSITIONS], 1)),
        "whole": total,
    }
