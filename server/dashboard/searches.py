"""The pages of searches, of jobs and of served models: the list, one search with its trials, and two side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import Depends, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ...core.costs import CostProfile
from ...core.layer_sets import LayerSet
from ...core.requests import UNFINISHED, Job
from ...store import Store
from ...store.results import StoredSearch, Tried
from ...store.served_trials import STATE
from ..errors import Refused
from ..middleware import Shared
from ..schemas import Word
from . import CurrentSession, live, pages, render, shown_page
from .drawing import differing_parts, layer_map, map_words
from .overview import served_now
from .plans import SELDOM_S
from .trial_costs import cost_values, costs_of
from .trials import (
    RANK_OF,
    SCORE_OF,
    TrialQuery,
    figures_of,
    importance,
    importance_map,
    trial_chart,
    trial_query,
    trial_values,
)

SPEED, SCORE = "expected speed, plain = 1", "score"  # Labels of the score, by what the search maximised.
SORTS = {  # Order of the list -> what it sorts by, the highest first.
    "begun": lambda search: search.created_at,
    "trials": lambda search: search.n_trials,
    "score": lambda search: search.best_score,
    "matchness": lambda search: search.best_matchness,
}
Sort = Literal["begun", "trials", "score", "matchness"]
Chosen = Annotated[Word | Literal[""] | None, Query()]

router = pages()


@dataclass(frozen=True, slots=True)
class FoundSearch:
    """A search as its page shows it; `job` is None for one of a served model.

    `tasks` are the searches of the same job; `stored` is the search on the page (None: nothing was tried), with its
    `trials`; `label` names their score.
    """

    id: str
    job: Job | None
    tasks: list[StoredSearch]
    stored: StoredSearch | None
    trials: list[Tried]
    label: str
    ended: str | None = None

    @property
    def is_live(self) -> bool:
        """Whether more trials may come."""
        return self.job is None or self.job.state in UNFINISHED


def find_search(store: Store, id: str, task: str | None) -> FoundSearch:
    """Return a search of a job, or of a served model.

    Raises: NotFound: there is no such job; Refused: 404, it has no trials for the task.
    """
    if served := store.served_searches(id):
        return FoundSearch(id, None, served, served[0], _finite(store.served_tried(id)), SPEED)
    job, searches = store.jobs.get(id), store.searches(id)
    stored = next((shown for shown in searches if task in (None, shown.task)), None)
    if stored is None and searches:
        problem = f"job {id} has no trials for this task: it has some for {', '.join(s.task for s in searches)}"
        raise Refused(404, "not-found", problem)
    settings = job.request.get("settings")
    by_speed = not isinstance(settings, dict) or settings.get("objective", "expected_speedup") == "expected_speedup"
    shown = FoundSearch(id, job, searches, stored, [], SPEED if by_speed else SCORE)
    if stored is None:
        return shown
    trials = _finite(store.tried(id, stored.task))
    finished = None if shown.is_live else store.jobs.evidence(id, stored.task)[0]
    ended = None if finished is None else finished.stopped_because
    return replace(shown, stored=stored if trials else None, trials=trials, ended=ended)


def _finite(trials: Sequence[Tried]) -> list[Tried]:
    return [trial for trial in trials if math.isfinite(trial.score + trial.matchness)]


def _costs(store: Store, search: FoundSearch) -> CostProfile | None:
    if search.job is not None:
        return costs_of(store, search.job)
    fingerprint = store.fingerprint_of_search(search.id)
    return next(iter(store.cost_profiles(fingerprint)), None) if fingerprint is not None else None


def _whole(trials: Sequence[Tried], costs: CostProfile | None) -> LayerSet:
    """Return the model of a search as a set that skips nothing; the costs tell which sub-layers are absent."""
    return LayerSet(trials[0].n_layers, absent=() if costs is None else costs.absent or ())


# --- routes


@shown_page(router, "/searches", "searches", SELDOM_S)
async def searches(
    app: Shared, model: Chosen = None, task: Chosen = None, kind: Chosen = None, sort: Sort = "begun"
) -> dict[str, Any]:
    """Return the searches of jobs and of served models, optionally of one model and task, sorted."""
    live_searches = [
        (engine_state.name, task_state, layer_map(task_state.layer_set, f"Drafts of {task_state.task}"))
        for engine_state in await served_now(app)
        for task_state in engine_state.tuning.tasks
    ]
    stored = await run_in_threadpool(app.store.searches) + await run_in_threadpool(app.store.served_searches)
    rows = [
        summary
        for summary in stored
        if (model or summary.model) == summary.model
        and (task or summary.task) == summary.task
        and kind in (None, "", _kind(summary))
    ]
    return {
        "rows": sorted(rows, key=SORTS[sort], reverse=True),
        "served": live_searches,
        "all": stored,
        "chosen": {"model": model or "", "task": task or "", "kind": kind or "", "sort": sort},
        "choices": {
            "model": sorted({summary.model for summary in stored}),
            "task": sorted({summary.task for summary in stored}),
            "kind": sorted({_kind(summary) for summary in stored}),
        },
        "sorts": list(SORTS),
    }


def _kind(search: StoredSearch) -> str:
    return "served" if search.state == STATE else "job"


@shown_page(router, "/searches/compare", "search_compare")
def compare(
    app: Shared,
    left: Annotated[str, Query(min_length=1, max_length=500)],
    right: Annotated[str, Query(min_length=1, max_length=500)],
) -> dict[str, Any]:
    """Return two searches side by side; each is given as ID/TASK.

    Raises: as `find_search`; Refused: 404, one of them has no trials.
    """
    sides = []
    for name in (left, right):
        id, _, task = name.partition("/")
        side = find_search(app.store, id, task or None)
        if side.stored is None:
            raise Refused(404, "not-found", f"the search {id} has tried nothing: choose another one at /searches")
        sides.append(side)
    best = [max(side.trials, key=RANK_OF) for side in sides]
    wholes = [_whole(side.trials, _costs(app.store, side)) for side in sides]
    sets = [replace(trial.layer_set, absent=whole.absent) for trial, whole in zip(best, wholes, strict=True)]
    differing = differing_parts(*sets)
    return {
        "sides": [
            {
                "found": side,
                "figures": figures_of(side.trials, side.label),
                "chart": trial_chart(side.trials, side.label, SCORE_OF),
                "best": trial,
                "map": layer_map(layer_set, f"Layer map of trial {trial.step}", differing),
                "map_words": map_words(layer_set),
                "importance_map": importance_map(whole, importance(side.trials)),
            }
            for side, trial, whole, layer_set in zip(sides, best, wholes, sets, strict=True)
        ],
        "n_differing": len(differing),
    }


ChosenTrials = Annotated[TrialQuery, Depends(trial_query)]


@shown_page(router, "/searches/{job}", "search")
def search(app: Shared, job: str, query: ChosenTrials) -> dict[str, Any]:
    """Return a search for one task; `job` is the id of its job, or the search's own id for a served model.

    Raises: as `find_search`.
    """
    shown = find_search(app.store, job, query.task)
    values: dict[str, Any] = {"found": shown, "job": shown.job, "search": shown.stored, "query": query}
    if shown.stored is None:
        return values
    values |= {"score_label": shown.label, "ended": shown.ended}
    costs = _costs(app.store, shown)
    return {
        **values,
        **trial_values(shown.trials, shown.label, query, _whole(shown.trials, costs)),
        **cost_values(shown.trials, costs, query),
    }


@router.get("/live/searches/{job}")
async def search_live(app: Shared, session: CurrentSession, job: str, query: ChosenTrials) -> Response:
    """The live part, rendered again for another state or 1 % more trials."""
    last_rendered: tuple[list[StoredSearch], str] = ([], "")

    async def render_part() -> str:
        nonlocal last_rendered
        current_searches = await run_in_threadpool(app.store.served_searches, job)
        current_searches = current_searches or await run_in_threadpool(app.store.searches, job)
        if not last_rendered[1] or is_news(last_rendered[0], current_searches):
            values = await run_in_threadpool(search, app, job, query)
            last_rendered = current_searches, render("search_part.html", **values)
        return last_rendered[1]

    return live(render_part)


def is_news(previous: Sequence[StoredSearch], current: Sequence[StoredSearch]) -> bool:
    """Return whether a job has a new state or task, or enough new trials to change its charts."""
    if [(stored_search.task, stored_search.state) for stored_search in previous] != [
        (stored_search.task, stored_search.state) for stored_search in current
    ]:
        return True
    return sum(stored_search.n_trials for stored_search in current) > 1.01 * sum(
        stored_search.n_trials for stored_search in previous
    )
