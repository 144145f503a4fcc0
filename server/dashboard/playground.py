"""The playground: one prompt decoded by a plan and plainly, each token shown with where it came from.

Both completions are requests to the model's engine, one after the other, so that neither takes the other's time; each
reads the prompt anew. Nothing is learnt from them, and the figures of the traffic leave them out.
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
from ...core.requests import CompletionRequest, Piece
from ...core.types import Completion, Sampling, TokenSource
from ..engines import EngineProcess, next_event
from ..problems import Refused, UnusableField, refused_by
from ..state import Shared, State, Task
from . import Sent, Visit, Visiting, live, page, pages, render

MOST_TRIES = 32  # that are remembered
MOST_TOKENS = 1024  # of a completion
PERIOD_S = 0.2  # between two looks at what has come
FIRST = {"form": "chat", "tokens": "128", "temperature": "0"}  # of what is typed
PLANS = ("adaptive", "prompt-lookup", "swift")  # that are suggested, beside stored versions
SOURCES: Mapping[TokenSource, str] = {
    "target": "the model itself",
    "draft": "its draft",
    "text": "earlier text",
    "prediction": "the prediction",
    "grammar": "the grammar",
}
assert set(SOURCES) == set(get_args(TokenSource))
TaskName: TypeAdapter[str] = TypeAdapter(Annotated[Task, StringConstraints(strip_whitespace=True)])

Told = tuple[Piece, TokenSource, list[Piece]]  # a token, where it came from, and what was drafted in its place

router = pages()


@dataclass(slots=True, eq=False)
class Side:
    """One of both completions, as it grows."""

    name: str
    request: CompletionRequest
    told: list[Told] = field(default_factory=list)
    asked_at: float | None = None
    first_at: float | None = None
    completion: Completion | None = None
    decoded_with: str = ""
    problem: str = ""

    async def run(self, engine: EngineProcess, within_s: float) -> None:
        """Have the engine decode it; what goes wrong is kept as `problem`."""
        until, self.asked_at = time.monotonic() + within_s, time.perf_counter()
        try:
            reply = engine.ask("decode", request=self.request.to_json())
        except SwiftoptError as error:
            self.problem = str(error)
            return
        try:
            while self.completion is None:
                self._take((await next_event(reply.events, until - time.monotonic()))[1])
        except TimeoutError:
            self.problem = f"it has taken longer than {within_s:g} s: ask for fewer tokens, or raise --timeout"
        except SwiftoptError as error:
            self.problem = str(error)
        except asyncio.CancelledError:
            self.problem = "it was stopped"
            raise
        finally:
            engine.drop(reply)

    def _take(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "text":
                self.first_at = self.first_at or time.perf_counter()
                self.told += event["trace"]
            case "restarted":
                self.told, self.first_at = [], None
            case "done":
                version = event["version"]
                self.decoded_with = event["decoded_with"] + (f", version {version}" if version else "")
                self.completion = Completion.from_json(event["completion"])

    @property
    def tok_s(self) -> float | None:
        """Return tokens per second behind the first, as the engine measured them, or as they come."""
        if (done := self.completion) is not None:
            spent = done.timings.total_s - done.prefill_s
            return (done.n_tokens - done.first_tokens) / spent if spent and done.n_tokens > 1 else None
        if self.first_at is None or len(self.told) < 2:
            return None
        return (len(self.told) - 1) / (time.perf_counter() - self.first_at)

    @property
    def first_s(self) -> float | None:
        """Return the seconds until its first text."""
        return None if self.first_at is None or self.asked_at is None else self.first_at - self.asked_at

    @property
    def tokens(self) -> Iterator[tuple[str, TokenSource, str]]:
        """Yield each token's text, where it came from, and the text that was drafted in its place."""
        decoder = getincrementaldecoder("utf-8")("replace")  # a character may take several tokens
        for piece, source, rejected in self.told:
            yield decoder.decode(_bytes(piece)), source, b"".join(map(_bytes, rejected)).decode("utf-8", "replace")

    @property
    def by_source(self) -> list[tuple[str, int]]:
        """Return how many tokens came from where, in words."""
        counted = Counter(source for _, source, _ in self.told)
        return [(words, counted[source]) for source, words in SOURCES.items() if counted[source]]


@dataclass(slots=True, eq=False)
class Try:
    """A prompt, and what became of it; `messages` are the chat that it ends, where it is one."""

    id: str
    owner: str | None
    typed: dict[str, str]
    sides: tuple[Side, Side]
    work: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.work is None or self.work.done()

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The chat; empty where the prompt is a text."""
        return self.sides[0].request.messages

    @property
    def unlike(self) -> int | None:
        """Return where the completions begin to differ, counted from 1; None: nowhere."""
        one, other = (side.completion.token_ids if side.completion else () for side in self.sides)
        if one == other:
            return None
        same = (i for i, pair in enumerate(zip(one, other, strict=False), 1) if pair[0] != pair[1])
        return next(same, min(len(one), len(other)) + 1)

    async def run(self, engine: EngineProcess, within_s: float) -> None:
        """Decode both, one after the other."""
        for side in self.sides:
            await side.run(engine, within_s)


def _bytes(piece: Piece) -> bytes:
    return piece.encode() if isinstance(piece, str) else bytes(piece)


def request_of(typed: Mapping[str, str], earlier: Try | None) -> CompletionRequest:
    """Return what a form asks for; a chat goes on where the earlier one ended.

    Raises: InvalidInput: a field cannot be used.
    """
    if not typed["prompt"].strip():
        raise UnusableField("prompt", "the prompt is empty: write something to go on with")
    plan, task = typed["plan"].strip(), None
    try:
        task = TaskName.validate_python(typed["task"]) if typed["task"].strip() else None
    except ValidationError:
        raise UnusableField("task", "the task is no name of one: leave out slashes, and keep it short") from None
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
        found = float(typed[name])
    except ValueError:
        found = least - 1
    if not least <= found <= most:
        raise UnusableField(name, f"{name} is {typed[name]!r}: give a number from {least} to {most}")
    return found


async def values_of(app: State, typed: Mapping[str, str]) -> dict[str, Any]:
    """Return what the form shows: what is typed, and suggestions for it."""
    tasks = {task.task for engine in app.engines.of.values() for task in engine.tuning.tasks}
    engine = app.engines.of.get(typed["model"])
    versions: list[int] = []
    if engine is not None and engine.about is not None and typed["task"]:
        fingerprint = engine.about["fingerprint"]
        try:
            found = await run_in_threadpool(app.store.plan_versions, fingerprint, typed["task"])
            versions = [each.version for each in found]
        except (StoreError, InvalidInput):  # suggestions only
            pass
    return {"typed": typed, "models": list(app.engines.of), "tasks": sorted(tasks), "plans": [*versions, *PLANS]}


def _typed(values: Mapping[str, Any], app: State) -> dict[str, str]:
    """Return the form's fields as they were typed, and those that were not as they are at first."""
    model = next(iter(app.engines.of), "")
    names = ("model", "task", "plan", "prompt", "form", "tokens", "temperature", "after")
    first = {**dict.fromkeys(names, ""), **FIRST, "model": model}
    if "form" not in values and (engine := app.engines.of.get(str(values.get("model", model)))) is not None:
        first["form"] = "chat" if (engine.about or {}).get("chats") else "text"
    return first | {name: str(values[name]) for name in names if name in values}


def _found(app: State, visit: Visit, number: str) -> Try:
    """Raises: Refused: 404, there is none, or it is another's."""
    found: Try | None = app.tries.get(number)
    if found is None or found.owner != visit.owner:
        raise Refused(404, "no-such-try", "this try is no longer remembered: start another one at /playground")
    return found


@router.get("/playground")
async def new(request: Request, app: Shared, visit: Visiting) -> Response:
    """The form; a query such as `?model=…&task=…&plan=…` fills it."""
    typed = _typed(request.query_params, app)
    return page(request, visit, "playground.html", **await values_of(app, typed), tried=None, wrong="")


@router.post("/playground")
async def start(request: Request, app: Shared, visit: Sent) -> Response:
    """Decode a prompt both ways."""
    typed = _typed(await request.form(), app)
    earlier: Try | None = app.tries.get(typed["after"])
    if earlier is not None and earlier.owner != visit.owner:
        earlier = None
    try:
        asked, engine = request_of(typed, earlier), app.engines.find(typed["model"])
    except SwiftoptError as error:
        refused = refused_by(error)
        values = await values_of(app, typed)
        return page(request, visit, "playground.html", refused.status_code, **values, tried=earlier, wrong=str(error))
    number = secrets.token_hex(6)
    plain = replace(asked, method="plain", version=None)
    sides = [Side(name, replace(own, salt=f"{number}-{name}")) for name, own in (("The plan", asked), ("Plain", plain))]
    tried = Try(number, visit.owner, typed, (sides[0], sides[1]))
    tried.work = asyncio.create_task(tried.run(engine, app.settings.timeout_s))
    while len(app.tries) >= MOST_TRIES:
        _stop(app.tries.pop(next(iter(app.tries))))
    app.tries[number] = tried
    return RedirectResponse(f"/playground/{number}", 303)


@router.get("/playground/{number}")
async def show(request: Request, app: Shared, visit: Visiting, number: str) -> Response:
    """A prompt's completions as they come, and a form that goes on from them."""
    tried = _found(app, visit, number)
    typed = {**tried.typed, "prompt": "" if tried.messages else tried.typed["prompt"], "after": number}
    values = await values_of(app, typed)
    return page(request, visit, "playground.html", **values, tried=tried, sources=SOURCES, wrong="")


@router.get("/live/playground/{number}")
async def show_live(app: Shared, visit: Visiting, number: str) -> Response:
    """What of it grows."""
    tried = _found(app, visit, number)

    async def part() -> str:
        return render("playground_part.html", tried=tried, visit=visit)

    return live(part, PERIOD_S, lambda: tried.is_over)


@router.post("/playground/{number}/stop")
async def stop(app: Shared, visit: Sent, number: str) -> Response:
    """Give up what is still decoded."""
    _stop(_found(app, visit, number))
    return RedirectResponse(f"/playground/{number}", 303)


def _stop(tried: Try) -> None:
    if tried.work is not None:
        tried.work.cancel()
