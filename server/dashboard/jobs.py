"""The pages of jobs: the list and its workers, one job with its events and verbs, and the form for a new one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from fastapi import Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.responses import RedirectResponse, Response

from ...core.errors import (
    InvalidInput,
    ServiceUnreachable,
    StoreError,
    StoreUnavailable,
    SwiftoptError,
)
from ...core.events import PHASES, Event, JobState, PromptFinished, PromptStarted, StateChanged, TrialsDone, event_line
from ...core.requests import DEFAULT_QUEUE, STATES, VERB_HELP, Job, JobEvent, TuneRequest, Verb
from ...core.types import epoch_s
from ...store import Store
from ...store.jobs import JobStanding
from ...worker import queue
from ...worker.engine_locks import model_of
from .. import jobs as api
from ..jobs import JobId
from ..middleware import Shared, State
from . import LIVE_S, CurrentSession, FormSession, PageNumber, number, page, pages, seconds, shown_page, templates
from .job_form import form_errors, form_values, label, submit_form

PER_PAGE = 50
EVENTS_SHOWN = 100
ATTEMPTS_SHOWN = 50  # State changes shown on a job's page.
OUTPUTS_SHOWN = 5
WORKERS_SHOWN = 200
TEXT_SHOWN = 300  # Characters shown of a completion.
ENGINE = "-engine"  # Suffix of the worker names of engines of served models.
STATE_BY_VERB = {"pause": "running, to pause at its next step", "stop": "running, to stop at its next step"}

router = pages()


# --- jobs in words


def state_shown(job: Job) -> str:
    """Return the job's state, and what it will do next on request."""
    return STATE_BY_VERB.get(job.wanted or "", job.state) if job.state == "running" else job.state


def place_shown(job: Job, standing: JobStanding | None) -> str:
    """Return the remaining time of the attempt's lease, or what the attempt waits for."""
    if standing is None:
        return "–"
    if job.state == "running" and standing.lease_s is not None:
        if standing.lease_s < 0:
            return f"lease expired {seconds(-standing.lease_s)} ago: its worker is lost"
        return f"lease for another {seconds(standing.lease_s)}"
    if job.state != "queued":
        return "–"
    waits = standing.due_s is not None and standing.due_s > 0
    return f"next attempt in {seconds(standing.due_s)}" if waits else "waits for a worker"


def retry_problem(app: State, job: Job) -> str:
    """Return the reason why a finished job cannot be retried from here, as a sentence; empty: it can."""
    problem = _attempt_problem(app.store, job.id, job.attempt, job.state, _model_of(job))
    if problem or job.queue is not None or app.queue is not None or job.state not in ("failed", "cancelled"):
        return problem
    return app.board.obstacle(replace(job, state="queued", queue=DEFAULT_QUEUE)) or ""


@lru_cache(maxsize=PER_PAGE)
def _attempt_problem(store: Store, job: str, attempt: int, state: JobState, model: tuple[Any, ...]) -> str:
    """Return `queue.retry_problem` of a job, cached: a live page asks every 2 s, and a check reads the stream."""
    return queue.retry_problem(store, store.jobs.get(job))


def _model_of(job: Job) -> tuple[Any, ...]:
    """Return a value that changes when the files of a job's model change."""
    try:
        return model_of(TuneRequest.from_json(job.request))
    except InvalidInput:
        return ()


def verbs_of(job: Job, standing: JobStanding | None, problem: str = "") -> list[Verb]:
    """Return the verbs that `store.transitions` allows in the job's state, without "retry" if there is a `problem`."""
    runs, queued = job.state == "running", job.state == "queued"
    has_checkpoints = standing is not None and standing.n_checkpoints > 0
    # Whether the job's prompts are stored.
    has_prompts = job.kind != "tune" or job.queue is not None or job.stream is not None
    allowed: dict[Verb, bool] = {
        "pause": queued or (runs and job.queue is not None and job.wanted != "pause"),
        "resume": job.state == "paused" or (runs and job.wanted == "pause"),
        "stop": not job.is_finished and job.wanted != "stop" and (runs or has_checkpoints),
        "cancel": not job.is_finished,
        "retry": job.state in ("failed", "cancelled") and has_prompts and not problem,
    }
    return [verb for verb, is_allowed in allowed.items() if is_allowed]


class WorkerSeen(NamedTuple):
    """A worker of a queue, or a served model's engine; `doing` is its state in words, `sign` its last heartbeat."""

    name: str
    queue: str
    job: str | None
    doing: str
    sign: str


def workers_of(app: State) -> tuple[list[WorkerSeen], str]:
    """Return the workers, and a sentence on why some may be missing (empty: none are).

    Raises: StoreError: the database is unavailable.
    """
    workers, missing_reason = _registered_workers(app)
    names = {worker.name for worker in workers}
    running = [job for job in app.store.jobs.latest("running", WORKERS_SHOWN) if job.worker]
    standings = app.store.jobs.standings([job.id for job in running])
    for job in running:
        name = str(job.worker)
        if name not in names:
            description = "engine of a served model" if name.endswith(ENGINE) else "not in Redis"
            life_sign = place_shown(job, standings.get(job.id))
            workers.append(WorkerSeen(name, job.queue or "none", job.id, description, life_sign))
    return workers, missing_reason


def _registered_workers(app: State) -> tuple[list[WorkerSeen], str]:
    if app.queue is None:
        return [], "No Redis is configured, so no workers are listed; jobs of served models run in their engines."
    try:
        workers = app.queue.workers()[:WORKERS_SHOWN]
    except ServiceUnreachable as error:
        return [], f"Redis is unavailable, so jobs wait in the database: {error}."
    workers_seen = []
    for worker in workers:
        job = worker.job.rpartition("-a")[0] if worker.job else None
        age_s = worker.heartbeat_age_s
        life_sign = "none yet" if age_s == float("inf") else f"{seconds(max(0.0, age_s))} ago"
        workers_seen.append(WorkerSeen(worker.name, worker.queue, job or None, worker.state, life_sign))
    return workers_seen, ""


def event_words(event: JobEvent, n_prompts: int, payload: Event | None) -> str:
    """Return an event in words; an unreadable one (payload None) only with its name."""
    match payload:
        case None:
            return f"{event.type}: edited by hand, or written by a newer swiftopt"
        case TrialsDone():
            n, matchnesses = (
                len(payload.trials),
                [trial.matchness for trial in payload.trials if trial.matchness is not None],
            )
            best = max(matchnesses, default=None)
            return f"{payload.task}: {n} candidate{'' if n == 1 else 's'} scored, best matchness {number(best)}"
        case PromptStarted():
            return f"{payload.task}: prompt {payload.index + 1} of {payload.n_prompts} ({payload.prompt_id}) begins"
        case StateChanged(state="failed"):
            return f"failed: {payload.detail}"
        case _:
            return event_line(payload, n_prompts) or event.type


def describe_events(events: Sequence[JobEvent], n_prompts: int) -> list[tuple[int, str, str]]:
    """Return events in words with their times; the start of a prompt is left out once the prompt has ended."""
    read_events = [(event, event.event) for event in events]  # Read once: an event may have hundreds of trials.
    ended_prompts = {payload.index for _, payload in read_events if isinstance(payload, PromptFinished)}
    return [
        (event.id, event.created_at, event_words(event, n_prompts, payload))
        for event, payload in read_events
        if not isinstance(payload, PromptStarted) or payload.index not in ended_prompts
    ]


def figures_of(job: Job) -> list[tuple[str, str]]:
    """Return the latest figures of a running job; none if a newer swiftopt wrote them."""
    figures = job.figures
    if figures is None:
        return []
    return [
        ("Task", figures.task[:60]),
        ("Phase", PHASES[figures.phase]),
        ("Tokens per second of decoding", number(figures.tok_s, 1)),
        ("Tokens", number(figures.tokens, 0)),
        ("Candidates", number(figures.n_trials, 0)),
        ("Matchness, best", number(figures.best_matchness)),
        ("Acceptance α", number(figures.acceptance_rate)),
        ("Tokens per pass M", number(figures.mean_generated_length)),
        ("Skip ratio", number(figures.skip_ratio)),
    ]


def _flatten(request: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in request.items():
        if name in ("settings", "sampling") and isinstance(value, Mapping):
            yield from ((f"{name}.{field}", field_value) for field, field_value in value.items())
        else:
            yield name, value


def request_words(request: Mapping[str, Any]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return a job's request in words: the chosen values, and those at their defaults."""
    default_values = dict(_flatten(TuneRequest("", "").to_json()))
    rows_by_default: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    for name, value in _flatten(request):
        if name != "out":
            rows_by_default[name in default_values and default_values[name] == value].append(
                (label(name), _value_text(value))
            )
    return rows_by_default


def _value_text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else json.dumps(value)


templates.globals |= {
    "state_shown": state_shown,
    "place_shown": place_shown,
    "verbs_about": VERB_HELP,
    "most_events": EVENTS_SHOWN,
    "text_shown": TEXT_SHOWN,
}
templates.filters["since"] = epoch_s


# --- routes


@shown_page(router, "/jobs", "jobs", LIVE_S)
def jobs(app: Shared, state: JobState | None = None, at: PageNumber = 1) -> dict[str, Any]:
    """Return the jobs of a page (from 1), the newest first, and the workers.

    Raises: StoreError: the database is unavailable.
    """
    newest = app.store.jobs.latest(state, PER_PAGE + 1, (at - 1) * PER_PAGE)
    shown, states = newest[:PER_PAGE], app.store.jobs.states()
    standings = app.store.jobs.standings([job.id for job in shown])
    workers, why = workers_of(app)
    n = sum(states.values()) if state is None else states.get(state, 0)
    return {
        "rows": [(job, standings.get(job.id)) for job in shown],
        "filters": [(None, sum(states.values())), *((name, states.get(name, 0)) for name in STATES)],
        "state": state,
        "at": at,
        "n_pages": max(1, -(-n // PER_PAGE)),
        "more": len(newest) > PER_PAGE,
        "workers": workers,
        "why": why,
        "engines": [engine.served.name for engine in app.engines.of.values() if engine.served.tune],
    }


@shown_page(router, "/jobs/new", "job_new")
def new(request: Request, app: Shared) -> dict[str, Any]:
    """Return the form for a new job; a query such as `?model=…&task=…` fills it."""
    return form_values(app, FormData(dict(request.query_params)), ())


@router.post("/jobs/new")
async def submit(request: Request, app: Shared, session: FormSession) -> Response:
    """Submit a job; if that fails, return the form with its errors."""
    form = await request.form()  # Already parsed and cached by the check of the form's token.
    upload = form.get("file")
    file, content = (upload.filename or "", await upload.read()) if isinstance(upload, UploadFile) else ("", b"")
    try:
        job, is_new = await run_in_threadpool(submit_form, app, form, content, file)
    except StoreUnavailable:
        raise
    except (ValidationError, SwiftoptError) as error:
        values = await run_in_threadpool(form_values, app, form, form_errors(error))
        return page(request, session, "job_new.html", 422, **values)
    return RedirectResponse(f"/jobs/{job.id}" + ("" if is_new else "?known=1"), 303)


@shown_page(router, "/jobs/{job}", "job", LIVE_S)
def show(app: Shared, job: JobId, known: bool = False) -> dict[str, Any]:
    """Return one job; `known`: the submission found an existing job.

    Raises: NotFound: no such job. StoreError: the database is unavailable.
    """
    shown_job, jobs = app.board.get(job), app.store.jobs
    standing = jobs.standings([shown_job.id]).get(shown_job.id)
    outputs: list[PromptFinished] = []
    problem = ""
    try:
        outputs = jobs.outputs(shown_job.id, OUTPUTS_SHOWN)
    except StoreUnavailable:
        raise
    except StoreError as error:
        problem = str(error)
    events = jobs.newest_events(shown_job.id, EVENTS_SHOWN)
    changes = jobs.newest_events(shown_job.id, ATTEMPTS_SHOWN, "state_changed")
    chosen_values, defaults = request_words(shown_job.request)
    retry_obstacle = retry_problem(app, shown_job)
    return {
        **{"job": shown_job, "known": known, "standing": standing, "chosen": chosen_values, "defaults": defaults},
        "verbs": verbs_of(shown_job, standing, retry_obstacle),
        "retry_problem": retry_obstacle,
        "figures": figures_of(shown_job),
        "attempts": [
            (change.created_at, new_state) for change in changes if isinstance(new_state := change.event, StateChanged)
        ],
        "events": describe_events(events, shown_job.n_prompts),
        "has_older": len(events) == EVENTS_SHOWN,
        "outputs": outputs,
        "outputs_problem": problem,
        "why": app.board.obstacle(shown_job) or "",
    }


@router.get("/jobs/{job}/outputs")
def outputs(app: Shared, session: CurrentSession, job: JobId) -> Response:
    """The finished completions as a file: those of `GET /v1/jobs/ID/outputs`."""
    return api.outputs(app, job)


@shown_page(router, "/jobs/{job}/cancel", "job_cancel")
def ask_cancel(app: Shared, job: JobId) -> dict[str, Any]:
    """Return the page that asks for confirmation to cancel the job."""
    return {"job": app.board.get(job)}


@router.post("/jobs/{job}/{verb}")
async def act(app: Shared, session: FormSession, job: JobId, verb: Verb) -> Response:
    """Pause, resume, stop, cancel or retry a job."""
    job_after = await run_in_threadpool(app.board.act, job, verb)
    return RedirectResponse(f"/jobs/{job_after.id}", 303)
