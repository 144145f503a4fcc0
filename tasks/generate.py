"""Decode prompts by the stored plan, or by the method that the caller asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from threading import Lock
from typing import Any

from ..core.errors import ContextOverflow, InvalidInput, LayerSetNotFound, NotFound
from ..core.plainly import REQUESTED, WhyPlain
from ..core.records import FoundPlan, Plan
from ..core.requests import GenerateRequest, settled
from ..core.types import Completion, Prompt, TokenLogprob, TracedToken
from ..decoding.engine import side_by_side
from ..decoding.events import Generated, GenerateInfo, Prefilled, Round, Shown, TextAdded, Turn, WorkEvent
from ..decoding.methods import PLAIN, Method, build, method_info
from ..decoding.session import Session
from ..decoding.work import Work, subscribed
from ..models.costs import machine_name, memory_for_texts
from ..models.loading import load
from ..models.runtime import Runtime
from ..models.saved import OnStep, no_step
from ..store import Store
from .job import ModelTurn
from .recipes import Recipe, Recipes, opened

MOST_PLANNED = 64  # Tasks whose decoding methods a planner keeps in memory.


def generate(
    request: GenerateRequest,
    prompts: Sequence[Prompt],
    store: Store | None,
    on_step: OnStep = no_step,
) -> Iterator[Shown]:
    """Decode the prompts, `request.concurrency` at a time; yield new text, and each finished turn.

    Raises: ContextOverflow: a chat's later turn does not fit the context; all other prompts were decoded before.
            LayerSetNotFound, LearnedNotFound: a method was asked for, and what it needs is neither stored nor given.
            LayerSetError: the given set was tuned on another model. SettingsError: there is no such method.
    """
    if request.method is not None:
        method_info(request.method)
    session = opened(request, prompts, store, on_step, request.stop)
    planner = Planner(request, session.runtime, store, on_step)
    too_long: list[ContextOverflow] = []

    def work(prompt: Prompt) -> Work[None]:
        try:
            yield from as_planned(session, planner.plan_for(request.task or prompt.task), prompt)
        except ContextOverflow as error:
            too_long.append(error)

    for event in side_by_side(map(work, prompts), request.concurrency, memory_for_texts(session.runtime)):
        if isinstance(event, Shown):
            yield event
    if too_long:
        raise too_long[0]


def as_planned(session: Session, planned: tuple[Method, GenerateInfo], prompt: Prompt, **options: Any) -> Work[None]:
    """Decode one prompt by its task's plan; also report `TextAdded`, and `Generated` after each turn."""
    method, info = planned
    text = GrowingText(session, prompt)

    def show(event: WorkEvent) -> Work[None]:
        if isinstance(event, Turn):
            yield from text.ended(event.completion)
            yield Generated(event.prompt, event.completion, info.of(event.completion))
        elif isinstance(event, Prefilled | Round):
            yield from text.grown(event)

    yield from subscribed(session.request(prompt, method, **options), show)


class Planner:
    """Choose and build each task's method once: the request's, else the stored plan's. Thread-safe.

    Args: version: of the plan, whatever its verdict; None: the `best` one, if its verdict is "use". turn: see
          `stored_costs`.
    """

    def __init__(
        self,
        request: GenerateRequest,
        runtime: Runtime,
        store: Store | None,
        on_step: OnStep = no_step,
        version: int | None = None,
        turn: ModelTurn = nullcontext,
    ) -> None:
        self.request, self.runtime, self.store, self.version = request, runtime, store, version
        self._on_step, self._turn, self._planning = on_step, turn, Lock()
        self._planned: dict[str, tuple[Method, GenerateInfo]] = {}
        self._drafts: dict[str, Runtime] = {}
        self._adaptive: Planner | None = None

    def plan_for(self, task: str) -> tuple[Method, GenerateInfo]:
        """Return the method for a task and its origin."""
        if (planned := self._planned.get(task)) is None:
            with self._planning:
                planned = self._planned[task] = self._planned.get(task) or self._plan(task)
        # Move the task to the end of the dict, then drop the least recently used tasks.
        self._planned[task] = self._planned.pop(task, planned)
        for other in list(self._planned)[:-MOST_PLANNED]:
            self._planned.pop(other, None)
        return planned

    def refresh(self) -> None:
        """Forget plans that look-ups no longer find, and tasks without a plan. Thread-safe.

        Raises: StoreError: the database is away.
        """
        for task, (_, info) in list(self._planned.items()):
            stored, _ = self._look_up(task)
            if stored is None or stored.version != info.version:
                self._planned.pop(task, None)

    def drafting_for(self, task: str) -> Method:
        """Return the method for a task: adaptive drafts if no stored plan can be used here."""
        method, info = self.plan_for(task)
        if not info.note:
            return method
        if self._adaptive is None:
            self._adaptive = Planner(replace(self.request, method="adaptive"), self.runtime, self.store, self._on_step)
        return self._adaptive.plan_for(task)[0]

    def _plan(self, task: str) -> tuple[Method, GenerateInfo]:
        request = self.request
        if request.method == "plain":
            return PLAIN, GenerateInfo("plain", why_plain=REQUESTED)
        if request.layer_set is not None:
            return self._requested(request.method or request.layer_set.found_for, task, None)
        stored, missing = self._look_up(task)
        if request.method is not None:
            return self._requested(request.method, task, stored)
        if stored is None:
            return PLAIN, GenerateInfo("plain", note=missing, why_plain=WhyPlain("no_plan", missing))
        plan = stored.plan
        info = GenerateInfo(plan.method, plan.layer_set, stored.version, plan.verdict, stored.fallback)
        if plan.method == "plain" or (plan.verdict != "use" and self.version is None):
            return PLAIN, replace(info, method="plain", why_plain=_why_not(task, stored))
        try:
            return self._build(plan, self._recipe(task, plan)), info
        except (InvalidInput, NotFound) as error:
            # The plan's parts may be missing here, for example a draft model that is not on this machine.
            if self.version is not None:
                raise
            note = f"the stored plan cannot be used here: {error}"
            why = WhyPlain("unusable_plan", note)
            return PLAIN, replace(info, method="plain", record=None, note=note, why_plain=why)

    def _requested(self, name: str, task: str, stored: FoundPlan | None) -> tuple[Method, GenerateInfo]:
        """Build a method by name; use the stored plan's parts if it has the same method."""
        same = stored if stored is not None and stored.plan.method == name else None
        plan = Plan(name, self.request.layer_set) if same is None else same.plan
        recipe = self._recipe(task, plan)
        info = GenerateInfo(name, recipe.layer_set)
        if recipe.layer_set is not None:
            info = replace(info, version=recipe.layer_set.version, verdict=recipe.layer_set.verdict)
        if same is not None:
            info = replace(info, version=same.version, verdict=same.plan.verdict, fallback=same.fallback)
        return self._build(plan, recipe), info

    def _recipe(self, task: str, plan: Plan) -> Recipe:
        request, name, draft = self.request, self.request.draft_model or plan.draft_model, None
        if name and method_info(plan.method).drafts_with_model:
            if name not in self._drafts:
                self._drafts[name] = load(name, request.dtype, request.device, self._on_step, request.speed)
            draft = self._drafts[name]
        recipes = Recipes(self.runtime, self.store, draft, self._on_step, self._turn)
        return recipes.of(plan.method, task, request.layer_set or plan.layer_set, plan.learned, plan.settings)

    def _build(self, plan: Plan, recipe: Recipe) -> Method:
        if plan.method == "swift" and self.request.settings is not None:
            return build("swift", recipe.parts, self.request.settings)
        settings = method_info(plan.method).settings_from(plan.settings or recipe.settings)
        return build(plan.method, recipe.parts, settings)

    def _look_up(self, task: str) -> tuple[FoundPlan | None, str]:
        """Return the stored plan, or why there is none."""
        if self.store is None:
            return None, "no database to look a plan up in: pass --db or --layer-set FILE"
        runtime = self.runtime
        if self.version is not None:
            stored = self.store.plan(runtime.info.fingerprint, task, self.version)
            if stored.plan.engine is not None:
                raise InvalidInput(
                    f"version {self.version} of {task} is for {stored.plan.engine} and not decoded here: name another"
                )
            return stored, ""
        try:
            return self.store.lookup(runtime.info.fingerprint, task, machine_name(runtime), runtime.dtype_name), ""
        except LayerSetNotFound:
            model = self.request.model
            advice = f"run `swiftopt tune --model {model} --stream FILE --task {task}`"
            return None, f"nothing is stored for {model}/{task}: {advice}"


def _why_not(task: str, stored: FoundPlan) -> WhyPlain:
    """Return why a stored plan means plain decoding."""
    plan, name = stored.plan, f"the stored plan of {task!r}, version {stored.version},"
    if plan.method != "plain" and plan.verdict == "unmeasured":
        return WhyPlain("unmeasured", f"{name} was not measured against plain decoding: run `swiftopt compare`")
    return WhyPlain("verdict", f"{name} says that plain decoding is faster")


class GrowingText:
    """Turn tokens into text incrementally; hold back text that later tokens may change or a stop string may cut."""

    def __init__(self, session: Session, prompt: Prompt) -> None:
        self._to_text, self._min_new_tokens = session.to_text, session.min_new_tokens
        self._stop = (*session.stop_strings, *prompt.stop)
        self._start()

    def _start(self) -> None:
        self._token_ids: list[int] = []
        self._text = ""
        # Token positions: start and end of the last decoded window; tokens sent.
        self._from = self._read = self._n_shown = 0
        self._shown = 0  # Count of characters that were shown.
        self._logprobs: tuple[TokenLogprob, ...] = ()
        self._traced: tuple[TracedToken, ...] = ()

    def grown(self, event: Prefilled | Round) -> Iterator[TextAdded]:
        """Yield the text that an event's tokens complete, if any."""
        self._logprobs += event.logprobs
        self._traced += event.traced
        of_prompt = event.prompt_logprobs if isinstance(event, Prefilled) else ()
        if (text := self.add(event.token_ids)) or of_prompt:
            yield self._added(text, of_prompt)

    def ended(self, completion: Completion) -> Iterator[TextAdded]:
        """Yield the rest of the completion's text and tokens, if any. The next token begins a new completion."""
        # A final stop token adds no text, but its log probability still has to be sent.
        if (text := self._new(completion.text)) or self._logprobs:
            yield self._added(text)
        self._start()

    def _added(self, text: str, prompt_logprobs: tuple[TokenLogprob, ...] = ()) -> TextAdded:
        n_tokens, self._n_shown = len(self._token_ids) - self._n_shown, len(self._token_ids)
        logprobs, self._logprobs = self._logprobs, ()
        traced, self._traced = self._traced, ()
        return TextAdded(text, n_tokens, logprobs, prompt_logprobs, traced)

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that they complete."""
        self._token_ids += token_ids
        # Decode the newest tokens together with a few earlier ones: a token's text can depend on the one before.
        before, text = (self._to_text(self._token_ids[self._from : end]) for end in (self._read, None))
        # Wait for more tokens: the last character is still incomplete.
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._text += text[len(before) :]
        self._from, self._read = self._read, len(self._token_ids)
        free = self._token_ids[: self._min_new_tokens] if self._stop else []
        return self._new(self._text[: settled(self._text, self._stop, len(self._to_text(free)) if free else 0)])

    def _new(self, text: str) -> str:
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new
