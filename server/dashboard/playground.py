"""The playground: one prompt decoded by a plan and plainly, with the source of each token.

Both completions are requests to the model's engine, one after the other, so that neither slows the other; each reads
the prompt again. The server learns nothing from them, and they do not count in the traffic's figures.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, get_args

from fastapi import Request
from pydantic import StringConstraints, TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from ...core.errors import InvalidInput, StoreError, SwiftoptError
from ...core.messages import Answer, AnswerDone, AnswerText, Decode, TracedPiece
from ...core.requests import CompletionRequest, Piece
from ...core.types import Completion, Sampling, TokenSource
from ..engines import EngineProcess, Reply, Restarted, next_answer
from ..errors import Refused, refused_by
from ..middleware import Shared, State
from ..schemas import Task
from . import CurrentSession, DashboardSession, FormSession, live, page, pages, render, shown_page

MOST_TRIES = 32  # Maximum number of playground runs in memory.
MOST_TOKENS = 1024  # Maximum tokens of a completion in the playground.
PERIOD_S = 0.2  # Seconds between two updates of a running completion.
DEFAULT_FIELDS = {"form": "chat", "tokens": "128", "temperature": "0"}  # Default values of the playground's form.
OF = " of "  # Separates the version and the task of a chosen plan.
MOST_VERSIONS = 200  # Maximum number of stored versions that the form offers.
PLANS = ("adaptive", "prompt-lookup", "swift")  # Methods that the form suggests besides stored versions.
SOURCES: Mapping[TokenSource, str] = {
    "target": "the model itself",
    "draft": "its draft",
    "text": "earlier text",
    "corpus": "earlier answers",
    "prediction": "the prediction",
    "grammar": "the grammar",
}
assert set(SOURCES) == set(get_args(TokenSource))
TaskName: TypeAdapter[str] = TypeAdapter(Annotated[Task, StringConstraints(strip_whitespace=True)])


router = pages()


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
        deadline_s, self.sent_at = time.monotonic() + within_s, time.perf_counter()
        reply: Reply | None = None
        try:
            reply = engine.ask(Decode(self.request))
            while self.completion is None:
                self._take((await next_answer(reply.answers, deadline_s - time.monotonic()))[1])
        except TimeoutError:
            self.problem = f"it took longer than {within_s:g} s: request fewer tokens, or raise --timeout"
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
                if answer.completion.finish_reason == "stop":
                    # The token that ends a text is part of it, but whether it comes with other text depends on drafts.
                    self.traced = self.traced[: answer.completion.n_tokens - 1]

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
        for token, source, rejected_drafts in self.traced:
            yield (
                decoder.decode(_bytes(token)),
                source,
                b"".join(map(_bytes, rejected_drafts)).decode("utf-8", "replace"),
            )

    @property
    def by_source(self) -> list[tuple[str, int]]:
        """The number of tokens by source, in words."""
        counts = Counter(source for _, source, _ in self.traced)
        return [(source_name, counts[source]) for source, source_name in SOURCES.items() if counts[source]]


@dataclass(slots=True, eq=False)
class PlaygroundRun:
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
        """The chat; empty if the prompt is a text."""
        return self.sides[0].request.messages

    @property
    def unlike(self) -> int | None:
        """The first token (from 1) in which the completions differ; None: they are the same."""
        first_ids, second_ids = (side.completion.token_ids if side.completion else () for side in self.sides)
        if first_ids == second_ids:
            return None
        mismatches = (
            i
            for i, token_pair in enumerate(zip(first_ids, second_ids, strict=False), 1)
            if token_pair[0] != token_pair[1]
        )
        return next(mismatches, min(len(first_ids), len(second_ids)) + 1)

    async def run(self, engine: EngineProcess, within_s: float) -> None:
        """Decode both completions, one after the other."""
        for side in self.sides:
            await side.run(engine, within_s)


def _bytes(token: Piece) -> bytes:
    return token.encode() if isinstance(token, str) else bytes(token)


def request_of(form_fields: Mapping[str, str], previous: PlaygroundRun | None) -> CompletionRequest:
    """Return the request of a form; a chat continues the previous one.

    Raises: InvalidInput: a field cannot be used.
    """
    if not form_fields["prompt"].strip():
        raise InvalidInput("the prompt is empty: write a text to continue", "prompt")
    plan, of, task_of_plan = form_fields["plan"].strip().partition(OF)
    task = None
    try:
        task = TaskName.validate_python(form_fields["task"]) if form_fields["task"].strip() else None
    except ValidationError:
        raise InvalidInput("the task is not a valid name: use a short word without slashes", "task") from None
    if of and task not in (None, task_of_plan):
        problem = f"version {plan} is of the task {task_of_plan!r}, not of {task!r}: choose that task, or none"
        raise InvalidInput(problem, "plan")
    task = task_of_plan if of else task
    version = int(plan) if plan.isascii() and plan.isdecimal() and len(plan) < 10 else None
    method = None if plan in ("", "best") or version is not None else plan
    tokens, temperature = _number(form_fields, "tokens", 1, MOST_TOKENS), _number(form_fields, "temperature", 0, 10)
    request = CompletionRequest(
        task=task,
        method=method,
        version=version,
        learn=False,
        trace=True,
        max_new_tokens=int(tokens),
        sampling=Sampling(temperature=temperature),
    )
    if form_fields["form"] == "text":
        return replace(request, text=form_fields["prompt"])
    messages: tuple[Mapping[str, Any], ...] = ()
    if previous is not None and (previous_answer := previous.sides[0].completion) is not None and previous.messages:
        messages = (*previous.messages, {"role": "assistant", "content": previous_answer.text})
    return replace(request, messages=(*messages, {"role": "user", "content": form_fields["prompt"]}))


def _number(form_fields: Mapping[str, str], name: str, lowest: int, highest: int) -> float:
    try:
        number = float(form_fields[name])
    except ValueError:
        number = lowest - 1
    if not lowest <= number <= highest:
        raise InvalidInput(f"{name} is {form_fields[name]!r}: use a number from {lowest} to {highest}", name)
    return number


async def form_values(app: State, form_fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the form: its texts and its choices."""
    tasks = {task.task for engine in app.engines.of.values() for task in engine.tuning.tasks}
    engine = app.engines.of.get(form_fields["model"])
    versions: list[str] = []
    if engine is not None and engine.about is not None:
        try:
            stored = await run_in_threadpool(app.store.plan_versions, engine.about.fingerprint)
        except (StoreError, InvalidInput):
            stored = []  # Without the database there are fewer plans to choose from.
        versions = [f"{plan_version.version}{OF}{plan_version.task}" for plan_version in stored[:MOST_VERSIONS]]
        tasks |= {plan_version.task for plan_version in stored}
    plans = {**{name: f"version {name}" for name in versions}, **{name: f"the method {name}" for name in PLANS}}
    # A plan named in the address is also a choice.
    if (plan := form_fields["plan"]) and plan not in plans:
        plans[plan] = plan
    tasks |= {form_fields["task"]} - {""}
    return {
        "typed": form_fields,
        "models": list(app.engines.of),
        "tasks": [(task, task) for task in sorted(tasks)],
        "plans": list(plans.items()),
        "ready": engine is None or engine.about is not None,
        "state": "" if engine is None else engine.state,
    }


def _read_form(submitted_fields: Mapping[str, Any], app: State) -> dict[str, str]:
    """Return the form's fields as typed; the others have their defaults."""
    model = next(iter(app.engines.of), "")
    names = ("model", "task", "plan", "prompt", "form", "tokens", "temperature", "after")
    defaults = {**dict.fromkeys(names, ""), **DEFAULT_FIELDS, "model": model}
    if (
        "form" not in submitted_fields
        and (engine := app.engines.of.get(str(submitted_fields.get("model", model)))) is not None
    ):
        defaults["form"] = "chat" if engine.about is not None and engine.about.template is not None else "text"
    form_fields = defaults | {name: str(submitted_fields[name]) for name in names if name in submitted_fields}
    plan, task = form_fields["plan"], form_fields["task"]
    return {**form_fields, "plan": f"{plan}{OF}{task}" if plan.isdecimal() and task else plan}


def _run_of(app: State, session: DashboardSession, number: str) -> PlaygroundRun:
    """Raises: Refused: 404, there is no such run, or it belongs to another session."""
    playground_run: PlaygroundRun | None = app.tries.get(number)
    if playground_run is None or playground_run.owner != session.owner:
        raise Refused(404, "no-such-try", "this run is no longer stored: start another one at /playground")
    return playground_run


@shown_page(router, "/playground", "playground")
async def new(request: Request, app: Shared) -> dict[str, Any]:
    """Return the form; a query such as `?model=…&task=…&plan=…` fills it."""
    return {**await form_values(app, _read_form(request.query_params, app)), "tried": None, "wrong": ""}


@router.post("/playground")
async def start(request: Request, app: Shared, session: FormSession) -> Response:
    """Decode a prompt both ways."""
    form_fields = _read_form(await request.form(), app)
    previous: PlaygroundRun | None = app.tries.get(form_fields["after"])
    if previous is not None and previous.owner != session.owner:
        previous = None
    try:
        planned_request, engine = request_of(form_fields, previous), app.engines.find(form_fields["model"])
    except SwiftoptError as error:
        refusal = refused_by(error)
        values = await form_values(app, form_fields)
        return page(
            request, session, "playground.html", refusal.status_code, **values, tried=previous, wrong=str(error)
        )
    number = secrets.token_hex(6)
    plain_request = replace(planned_request, method="plain", version=None)
    sides = [
        Side(name, replace(side_request, salt=f"{number}-{name}"))
        for name, side_request in (("The plan", planned_request), ("Plain", plain_request))
    ]
    playground_run = PlaygroundRun(number, session.owner, form_fields, (sides[0], sides[1]))
    playground_run.work = asyncio.create_task(playground_run.run(engine, app.settings.timeout_s))
    while len(app.tries) >= MOST_TRIES:
        _stop(app.tries.pop(next(iter(app.tries))))
    app.tries[number] = playground_run
    return RedirectResponse(f"/playground/{number}", 303)


@shown_page(router, "/playground/{number}", "playground")
async def show(app: Shared, session: CurrentSession, number: str) -> dict[str, Any]:
    """Return a prompt's completions as they come, and a form to continue."""
    playground_run = _run_of(app, session, number)
    form_fields = {
        **playground_run.typed,
        "prompt": "" if playground_run.messages else playground_run.typed["prompt"],
        "after": number,
    }
    return {**await form_values(app, form_fields), "tried": playground_run, "sources": SOURCES, "wrong": ""}


@router.get("/live/playground/{number}")
async def show_live(app: Shared, session: CurrentSession, number: str) -> Response:
    """The completions as they grow."""
    playground_run = _run_of(app, session, number)

    async def render_part() -> str:
        return render("playground_part.html", tried=playground_run, session=session)

    return live(render_part, PERIOD_S, lambda: playground_run.is_over)


@router.post("/playground/{number}/stop")
async def stop(app: Shared, session: FormSession, number: str) -> Response:
    """Stop the decoding."""
    _stop(_run_of(app, session, number))
    return RedirectResponse(f"/playground/{number}", 303)


def _stop(playground_run: PlaygroundRun) -> None:
    if playground_run.work is not None:
        playground_run.work.cancel()
