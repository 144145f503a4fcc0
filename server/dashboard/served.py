"""The pages of served models: the overview of what is decoded now, the traffic, and the playground.

The playground decodes one prompt by a plan and plainly, and shows each token with its source. Both completions are
requests to the model's engine, one after the other, so that neither slows the other; each reads the prompt again.
Nothing is learnt from them, and the traffic's figures leave them out.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, get_args

from fastapi import Query, Request
from pydantic import StringConstraints, TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from ...core.errors import InvalidInput, StoreError, SwiftoptError
from ...core.events import ModelTuning
from ...core.messages import Answer, AnswerDone, AnswerText, Decode, TracedPiece
from ...core.requests import CompletionRequest, Piece
from ...core.types import Completion, Sampling, TokenSource, seconds_by_part
from ..engines import EngineProcess, Reply, Restarted, next_answer
from ..errors import Refused, refused_by
from ..metrics import NOW_S, Period
from ..middleware import Shared, State
from ..schemas import Task, Word
from . import LIVE_S, CurrentSession, DashboardSession, FormSession, live, page, pages, render, shown_page

SPANS = {"10 minutes": 600, "1 hour": 3600, "6 hours": 21_600}
POINTS = 60  # Points of a chart.
POSITIONS = 8  # Draft positions whose acceptance rate is shown.
MOST_TRIES = 32  # Most playground runs in memory.
MOST_TOKENS = 1024  # Most tokens of a completion in the playground.
PERIOD_S = 0.2  # Seconds between two updates of a running completion.
FIRST = {"form": "chat", "tokens": "128", "temperature": "0"}  # Default values of the playground's form.
PLANS = ("adaptive", "prompt-lookup", "swift")  # Methods that the form suggests besides stored versions.
SOURCES: Mapping[TokenSource, str] = {
    "target": "the model itself",
    "draft": "its draft",
    "text": "earlier text",
    "prediction": "the prediction",
    "grammar": "the grammar",
}
assert set(SOURCES) == set(get_args(TokenSource))
TaskName: TypeAdapter[str] = TypeAdapter(Annotated[Task, StringConstraints(strip_whitespace=True)])


router = pages()


# --- overview


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


def alarms(served: list[ServedNow], store_error: str) -> list[str]:
    """Return what needs attention, a sentence each."""
    sentences = [
        f"{one.engine.served.name} does not serve: {one.engine.state}" for one in served if one.tuning.unavailable
    ]
    if store_error:
        sentences.append(store_error)
    for one in served:
        for task in one.tuning.tasks:
            if task.in_use == "plain" and task.pinned is None and task.requests:
                measured = "drafts were slower" if task.ratio is None else f"drafts were measured at {task.ratio:.2f}x"
                why = task.shifts.latest or measured
                since = time.strftime("%H:%M", time.localtime(task.since))
                sentences.append(f"Drafting is off for {one.engine.served.name}/{task.task} since {since}: {why}")
    return sentences


@shown_page(router, "/", "overview", LIVE_S, live_path="/live/overview")
async def overview(app: Shared) -> dict[str, Any]:
    """Return what is decoded now."""
    served = await served_now(app)
    jobs: dict[str, int] = {}
    error = ""
    try:
        jobs = await run_in_threadpool(app.store.jobs.states)
        if problem := await run_in_threadpool(app.storage.problem):
            error = f"Nothing can be stored: {problem}"
    except StoreError as failure:
        error = f"The database is away: {failure}"
    tasks = [task for one in served for task in one.tuning.tasks]
    return {
        "served": served,
        "alarms": alarms(served, error),
        "jobs": jobs,
        "saved_s": sum(task.all_saved_s for task in tasks),
        "tokens": sum(one.total.tokens for one in served),
        "lately": sum((one.lately for one in served), Period(0)),
        "n_running": sum(min(one.engine.n_requests, one.engine.served.concurrency) for one in served),
        "n_requests": sum(one.engine.n_requests for one in served),
    }


# --- traffic


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

    def values(figure: Callable[[Period], float | None]) -> list[float | None]:
        figures_by_period = [figure(period) for period in periods]
        return [None if value is None else round(value, 4) for value in figures_by_period]

    speeds = {
        "decoding, one request": values(lambda part_figures: part_figures.decode_tok_s),
        "throughput, all requests": values(lambda part_figures: part_figures.throughput(length_s)),
    }
    parts = [seconds_by_part(period.spent) for period in periods]
    by_part: dict[str, list[float | None]] = {
        name: [round(part_figures[name], 4) for part_figures in parts] for name in parts[0]
    }
    return [
        Chart("Tokens per second", "", speeds),
        Chart("Time to first token", "s", {"mean": values(lambda part_figures: part_figures.mean_first_token_s)}),
        Chart("Time per token", "s", {"mean": values(lambda part_figures: part_figures.mean_between_tokens_s)}),
        Chart("Acceptance", "", {"accepted / drafted": values(lambda part_figures: part_figures.acceptance_rate)}, 1.0),
        Chart(
            "Prompt tokens read before",
            "",
            {"cached / prompt": values(lambda part_figures: part_figures.cached_share)},
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
    """Return the traffic of the last minutes or hours, of one model and task or of all."""
    span = span if span in SPANS else "1 hour"
    history = app.engines.metrics.history
    periods = history.last(SPANS[span], POINTS, model, task)
    whole = sum(periods[1:], periods[0])
    return {
        **{"span": span, "spans": list(SPANS), "model": model, "task": task, "tasks": history.tasks},
        "query": request.url.query,
        "charts": charts(periods, SPANS[span] // POINTS),
        "moments": [period.at for period in periods],
        "clock": [time.strftime("%H:%M:%S", time.localtime(period.at)) for period in periods],
        "by_position": list(enumerate(whole.accepted_by_position[:POSITIONS], 1)),
        "whole": whole,
    }


# --- playground


@dataclass(slots=True, eq=False)
class Side:
    """One of the two completions, as it grows."""

    name: str
    request: CompletionRequest
    traced: list[TracedPiece] = field(default_factory=list)
    sent_at: float | None = None
    first_at: float | None = None
    completion: Completion | None = None
    decoded_with: str = ""
    problem: str = ""

    async def run(self, engine: EngineProcess, within_s: float) -> None:
        """Decode the prompt with the engine; an error is kept in `problem`."""
        until, self.sent_at = time.monotonic() + within_s, time.perf_counter()
        reply: Reply | None = None
        try:
            reply = engine.ask(Decode(self.request))
            while self.completion is None:
                self._take((await next_answer(reply.answers, until - time.monotonic()))[1])
        except TimeoutError:
            self.problem = f"it has taken longer than {within_s:g} s: ask for fewer tokens, or raise --timeout"
        except SwiftoptError as error:
            self.problem = str(error)
        except asyncio.CancelledError:
            self.problem = "it was stopped"
            raise
        finally:
            if reply is not None:
                engine.drop(reply)

    def _take(self, answer: Answer | Restarted) -> None:
        match answer:
            case AnswerText():
                self.first_at = self.first_at or time.perf_counter()
                self.traced += answer.trace
            case Restarted():
                self.traced, self.first_at = [], None
            case AnswerDone(decoded_with=method, version=version):
                self.decoded_with = method + (f", version {version}" if version else "")
                self.completion = answer.completion

    @property
    def tok_s(self) -> float | None:
        """Decoding speed in tokens per second: measured by the engine, or by arrival until the end."""
        if self.completion is not None:
            return self.completion.decode_tok_s if self.completion.n_decoded else None
        if self.first_at is None or len(self.traced) < 2:
            return None
        return (len(self.traced) - 1) / (time.perf_counter() - self.first_at)

    @property
    def first_s(self) -> float | None:
        """Seconds until its first text."""
        return None if self.first_at is None or self.sent_at is None else self.first_at - self.sent_at

    @property
    def tokens(self) -> Iterator[tuple[str, TokenSource, str]]:
        """Each token's text, its source, and the rejected draft in its place."""
        decoder = getincrementaldecoder("utf-8")("replace")  # Incremental, because a character may span several tokens.
        for piece, source, rejected in self.traced:
            yield decoder.decode(_bytes(piece)), source, b"".join(map(_bytes, rejected)).decode("utf-8", "replace")

    @property
    def by_source(self) -> list[tuple[str, int]]:
        """The number of tokens by source, in words."""
        counted = Counter(source for _, source, _ in self.traced)
        return [(words, counted[source]) for source, words in SOURCES.items() if counted[source]]


@dataclass(slots=True, eq=False)
class Try:
    """A prompt and its two completions."""

    id: str
    owner: str | None
    typed: dict[str, str]
    sides: tuple[Side, Side]
    work: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether both completions have ended."""
        return self.work is None or self.work.done()

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The chat; empty where the prompt is a text."""
        return self.sides[0].request.messages

    @property
    def unlike(self) -> int | None:
        """The first token, counted from 1, in which the completions differ; None: they are the same."""
        one, other = (side.completion.token_ids if side.completion else () for side in self.sides)
        if one == other:
            return None
        same = (i for i, pair in enumerate(zip(one, other, strict=False), 1) if pair[0] != pair[1])
        return next(same, min(len(one), len(other)) + 1)

    async def run(self, engine: EngineProcess, within_s: float) -> None:
        """Decode both completions, one after the other."""
        for side in self.sides:
            await side.run(engine, within_s)


def _bytes(piece: Piece) -> bytes:
    return piece.encode() if isinstance(piece, str) else bytes(piece)


def request_of(typed: Mapping[str, str], earlier: Try | None) -> CompletionRequest:
    """Return the request of a form; a chat goes on where the earlier one ended.

    Raises: InvalidInput: a field cannot be used.
    """
    if not typed["prompt"].strip():
        raise InvalidInput("the prompt is empty: write something to go on with", "prompt")
    plan, task = typed["plan"].strip(), None
    try:
        task = TaskName.validate_python(typed["task"]) if typed["task"].strip() else None
    except ValidationError:
        raise InvalidInput("the task is no name of one: leave out slashes, and keep it short", "task") from None
    version = int(plan) if plan.isascii() and plan.isdecimal() and len(plan) < 10 else None
    method = None if plan in ("", "best") or version is not None else plan
    tokens, temperature = _number(typed, "tokens", 1, MOST_TOKENS), _number(typed, "temperature", 0, 10)
    request = CompletionRequest(
        task=task,
        method=method,
        version=version,
        learn=False,
        trace=True,
        max_new_tokens=int(tokens),
        sampling=Sampling(temperature=temperature),
    )
    if typed["form"] == "text":
        return replace(request, text=typed["prompt"])
    messages: tuple[Mapping[str, Any], ...] = ()
    if earlier is not None and (answered := earlier.sides[0].completion) is not None and earlier.messages:
        messages = (*earlier.messages, {"role": "assistant", "content": answered.text})
    return replace(request, messages=(*messages, {"role": "user", "content": typed["prompt"]}))


def _number(typed: Mapping[str, str], name: str, least: int, most: int) -> float:
    try:
        number_typed = float(typed[name])
    except ValueError:
        number_typed = least - 1
    if not least <= number_typed <= most:
        raise InvalidInput(f"{name} is {typed[name]!r}: give a number from {least} to {most}", name)
    return number_typed


async def form_values(app: State, typed: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the form: its texts, and suggestions."""
    tasks = {task.task for engine in app.engines.of.values() for task in engine.tuning.tasks}
    engine = app.engines.of.get(typed["model"])
    versions: list[int] = []
    if engine is not None and engine.about is not None and typed["task"]:
        fingerprint = engine.about.fingerprint
        try:
            stored_versions = await run_in_threadpool(app.store.plan_versions, fingerprint, typed["task"])
            versions = [plan_version.version for plan_version in stored_versions]
        except (StoreError, InvalidInput):
            # Ignore errors: the names are only suggestions.
            pass
    return {"typed": typed, "models": list(app.engines.of), "tasks": sorted(tasks), "plans": [*versions, *PLANS]}


def _typed(values: Mapping[str, Any], app: State) -> dict[str, str]:
    """Return the form's fields as they were typed; those that were not have their defaults."""
    model = next(iter(app.engines.of), "")
    names = ("model", "task", "plan", "prompt", "form", "tokens", "temperature", "after")
    first = {**dict.fromkeys(names, ""), **FIRST, "model": model}
    if "form" not in values and (engine := app.engines.of.get(str(values.get("model", model)))) is not None:
        first["form"] = "chat" if engine.about is not None and engine.about.has_chats else "text"
    return first | {name: str(values[name]) for name in names if name in values}


def _try_of(app: State, session: DashboardSession, number: str) -> Try:
    """Raises: Refused: 404, there is none, or it is another's."""
    tried: Try | None = app.tries.get(number)
    if tried is None or tried.owner != session.owner:
        raise Refused(404, "no-such-try", "this try is no longer remembered: start another one at /playground")
    return tried


@shown_page(router, "/playground", "playground")
async def new(request: Request, app: Shared) -> dict[str, Any]:
    """Return the form; a query such as `?model=…&task=…&plan=…` fills it."""
    return {**await form_values(app, _typed(request.query_params, app)), "tried": None, "wrong": ""}


@router.post("/playground")
async def start(request: Request, app: Shared, session: FormSession) -> Response:
    """Decode a prompt both ways."""
    typed = _typed(await request.form(), app)
    earlier: Try | None = app.tries.get(typed["after"])
    if earlier is not None and earlier.owner != session.owner:
        earlier = None
    try:
        asked, engine = request_of(typed, earlier), app.engines.find(typed["model"])
    except SwiftoptError as error:
        refused = refused_by(error)
        values = await form_values(app, typed)
        return page(request, session, "playground.html", refused.status_code, **values, tried=earlier, wrong=str(error))
    number = secrets.token_hex(6)
    plain = replace(asked, method="plain", version=None)
    sides = [
        Side(name, replace(side_request, salt=f"{number}-{name}"))
        for name, side_request in (("The plan", asked), ("Plain", plain))
    ]
    tried = Try(number, session.owner, typed, (sides[0], sides[1]))
    tried.work = asyncio.create_task(tried.run(engine, app.settings.timeout_s))
    while len(app.tries) >= MOST_TRIES:
        _stop(app.tries.pop(next(iter(app.tries))))
    app.tries[number] = tried
    return RedirectResponse(f"/playground/{number}", 303)


@shown_page(router, "/playground/{number}", "playground")
async def show(app: Shared, session: CurrentSession, number: str) -> dict[str, Any]:
    """Return a prompt's completions as they come, and a form to continue."""
    tried = _try_of(app, session, number)
    typed = {**tried.typed, "prompt": "" if tried.messages else tried.typed["prompt"], "after": number}
    return {**await form_values(app, typed), "tried": tried, "sources": SOURCES, "wrong": ""}


@router.get("/live/playground/{number}")
async def show_live(app: Shared, session: CurrentSession, number: str) -> Response:
    """The completions as they grow."""
    tried = _try_of(app, session, number)

    async def part() -> str:
        return render("playground_part.html", tried=tried, session=session)

    return live(part, PERIOD_S, lambda: tried.is_over)


@router.post("/playground/{number}/stop")
async def stop(app: Shared, session: FormSession, number: str) -> Response:
    """Stop the decoding."""
    _stop(_try_of(app, session, number))
    return RedirectResponse(f"/playground/{number}", 303)


def _stop(tried: Try) -> None:
    if tried.work is not None:
        tried.work.cancel()
