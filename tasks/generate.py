"""Decode prompts by the stored plan of their task, or by the method that the caller requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..core.errors import ContextOverflow, InvalidInput, LayerSetNotFound, NotFound
from ..core.plainly import REQUESTED, WhyPlain
from ..core.records import FoundPlan, Plan
from ..core.requests import GenerateRequest, settled_length, tune_command
from ..core.rounds import RoundFigures, RoundLog
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
from .job import ModelTurn
from .recipes import Recipe, Recipes, open_session

if TYPE_CHECKING:
    from ..store import Store

MAX_PLANNED_TASKS = 64  # Maximum tasks whose methods a planner keeps in memory.


def generate(
    request: GenerateRequest,
    prompts: Sequence[Prompt],
    store: Store | None,
    on_step: OnStep = no_step,
) -> Iterator[Shown]:
    """Decode the prompts, `request.concurrency` at a time; yield new text, and each finished turn.

    Raises: ContextOverflow: a later turn of a chat does not fit the context; raised after all other prompts.
            LayerSetNotFound, LearnedNotFound: a part that the requested method needs is neither stored nor given.
            LayerSetError: the given set was tuned on another model. SettingsError: there is no such method.
    """
    if request.method is not None:
        method_info(request.method)
    session = open_session(request, prompts, store, on_step, request.stop)
    planner = Planner(request, session.runtime, store, on_step)
    overflows: list[ContextOverflow] = []

    def work(prompt: Prompt) -> Work[None]:
        try:
            yield from decode_as_planned(session, planner.plan_for(request.task or prompt.task), prompt)
        except ContextOverflow as error:
            overflows.append(error)

    for event in side_by_side(map(work, prompts), request.concurrency, memory_for_texts(session.runtime)):
        if isinstance(event, Shown):
            yield event
    if overflows:
        raise overflows[0]


def decode_as_planned(
    session: Session, method_and_info: tuple[Method, GenerateInfo], prompt: Prompt, **options: Any
) -> Work[None]:
    """Decode one prompt with a task's method; also yields `TextAdded`, and `Generated` after each turn."""
    method, info = method_and_info
    text, rounds, drafted_s = GrowingText(session, prompt), RoundLog(), 0.0

    def follow(event: WorkEvent) -> Work[None]:
        nonlocal drafted_s, rounds
        if isinstance(event, Turn):
            yield from text.finish_completion(event.completion)
            saved_s = 0.0 if info.ratio is None else drafted_s * (info.ratio - 1)
            turn_info = replace(info.of(event.completion), saved_s=saved_s, rounds=rounds.total())
            yield Generated(event.prompt, event.completion, turn_info)
            drafted_s, rounds = 0.0, RoundLog()
        elif isinstance(event, Prefilled | Round):
            if isinstance(event, Round):
                drafted_s += event.shared_s
                log_round(rounds, event)
            yield from text.read_event(event)

    yield from subscribed(session.request(prompt, method, **options), follow)


def log_round(rounds: RoundLog, event: Round) -> None:
    """Add a round to a request's log."""
    figures = RoundFigures(len(event.token_ids), event.n_steps, event.n_accepted, event.drafter)
    rounds.add(figures, event.draft_s + event.verify_s, event.context.load.checked)


class Planner:
    """Chooses and builds each task's method once: the request's method, else the stored plan's. Thread-safe.

    Args: version: use this version of the plan, whatever its verdict; None: the `best` version, if its verdict is
          "use". turn: see `stored_costs`.
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
        self._on_step, self._turn, self._plan_lock = on_step, turn, Lock()
        self._method_by_task: dict[str, tuple[Method, GenerateInfo]] = {}  # The least recently used task comes first.
        self._draft_models: dict[str, Runtime] = {}
        self._adaptive: Planner | None = None

    def plan_for(self, task: str) -> tuple[Method, GenerateInfo]:
        """Return the method for a task and its origin."""
        if (method_and_info := self._method_by_task.get(task)) is None:
            with self._plan_lock:
                method_and_info = self._method_by_task[task] = self._method_by_task.get(task) or self._plan(task)
        # Move the task to the end of the dict, then drop the least recently used tasks.
        self._method_by_task[task] = self._method_by_task.pop(task, method_and_info)
        for oldest_task in list(self._method_by_task)[:-MAX_PLANNED_TASKS]:
            self._method_by_task.pop(oldest_task, None)
        return method_and_info

    def refresh(self) -> None:
        """Forget tasks without a plan, and plans that are no longer the ones in the database. Thread-safe.

        Raises: StoreError: the database is away.
        """
        for task, (_, info) in list(self._method_by_task.items()):
            stored_plan, _ = self._look_up(task)
            if stored_plan is None or stored_plan.version != info.version:
                self._method_by_task.pop(task, None)

    def drafting_for(self, task: str) -> Method:
        """Return the method for a task, or adaptive drafts if no stored plan can be used here."""
        method, info = self.plan_for(task)
        if not info.note:
            return method
        if self._adaptive is None:
            self._adaptive = Planner(replace(self.request, method="adaptive"), self.runtime, self.store, self._on_step)
        return self._adaptive.plan_for(task)[0]

    def _plan(self, task: str) -> tuple[Method, GenerateInfo]:
        """Choose and build a task's method, plain decoding if its plan cannot be used."""
        request = self.request
        if request.method == "plain":
            return PLAIN, GenerateInfo("plain", why_plain=REQUESTED)
        if request.layer_set is not None:
            return self._build_requested(request.method or request.layer_set.found_for, task, None)
        stored_plan, reason = self._look_up(task)
        if request.method is not None:
            return self._build_requested(request.method, task, stored_plan)
        if stored_plan is None:
            return PLAIN, GenerateInfo("plain", note=reason, why_plain=WhyPlain("no_plan", reason))
        plan = stored_plan.plan
        info = GenerateInfo(plan.method, plan.layer_set, stored_plan.version, plan.verdict, stored_plan.fallback)
        if plan.method == "plain" or (plan.verdict != "use" and self.version is None):
            return PLAIN, replace(info, method="plain", why_plain=_explain_plain(task, stored_plan))
        try:
            return self._build(plan, self._recipe(task, plan)), replace(info, ratio=plan.measured_speedup)
        except (InvalidInput, NotFound) as error:
            # A part of the plan may be missing here, for example a draft model that is not on this machine.
            if self.version is not None:
                raise
            note = f"the stored plan cannot be used here: {error}"
            why_plain = WhyPlain("unusable_plan", note)
            return PLAIN, replace(info, method="plain", record=None, note=note, why_plain=why_plain)

    def _build_requested(self, name: str, task: str, stored_plan: FoundPlan | None) -> tuple[Method, GenerateInfo]:
        """Build a method by name; use the stored plan's parts if it has the same method."""
        same_method_plan = stored_plan if stored_plan is not None and stored_plan.plan.method == name else None
        plan = Plan(name, self.request.layer_set) if same_method_plan is None else same_method_plan.plan
        recipe = self._recipe(task, plan)
        info = GenerateInfo(name, recipe.layer_set)
        if recipe.layer_set is not None:
            info = replace(info, version=recipe.layer_set.version, verdict=recipe.layer_set.verdict)
        if same_method_plan is not None:
            info = replace(
                info,
                version=same_method_plan.version,
                verdict=same_method_plan.plan.verdict,
                fallback=same_method_plan.fallback,
            )
        return self._build(plan, recipe), info

    def _recipe(self, task: str, plan: Plan) -> Recipe:
        """Return the parts of a plan's method; loads its draft model if it has one."""
        request, name, draft_model = self.request, self.request.draft_model or plan.draft_model, None
        if name and method_info(plan.method).drafts_with_model:
            if name not in self._draft_models:
                self._draft_models[name] = load(name, request.dtype, request.device, self._on_step, request.speed)
            draft_model = self._draft_models[name]
        recipes = Recipes(self.runtime, self.store, draft_model, self._on_step, self._turn)
        return recipes.of(plan.method, task, request.layer_set or plan.layer_set, plan.learned, plan.settings)

    def _build(self, plan: Plan, recipe: Recipe) -> Method:
        if plan.method == "swift" and self.request.settings is not None:
            return build("swift", recipe.parts, self.request.settings)
        settings = method_info(plan.method).settings_from(plan.settings or recipe.settings)
        return build(plan.method, recipe.parts, settings)

    def _look_up(self, task: str) -> tuple[FoundPlan | None, str]:
        """Return (the stored plan, ""), or (None, the reason why there is none)."""
        if self.store is None:
            return None, "there is no database to look a plan up in: pass --db or --layer-set FILE"
        runtime = self.runtime
        if self.version is not None:
            try:
                stored_plan = self.store.plan(runtime.info.fingerprint, task, self.version)
            except LayerSetNotFound as error:
                # Clients know the model by its name, not by its fingerprint.
                message = str(error).replace(runtime.info.fingerprint, self.request.model)
                raise LayerSetNotFound(message, "version") from error
            if stored_plan.plan.engine is not None:
                raise InvalidInput(
                    f"version {self.version} of {task} is for the engine {stored_plan.plan.engine} and cannot be used"
                    " here: use another version"
                )
            return stored_plan, ""
        try:
            return self.store.lookup(runtime.info.fingerprint, task, machine_name(runtime), runtime.dtype_name), ""
        except LayerSetNotFound:
            model = self.request.model
            return None, f"nothing is stored for the task {task} of {model}: run `{tune_command(model, task)}`"


def _explain_plain(task: str, stored_plan: FoundPlan) -> WhyPlain:
    """Return why prompts are decoded plainly although the task has a stored plan."""
    plan, name = stored_plan.plan, f"the stored plan of {task!r}, version {stored_plan.version},"
    if plan.method != "plain" and plan.verdict == "unmeasured":
        return WhyPlain("unmeasured", f"{name} was not measured against plain decoding: run `swiftopt compare`")
    return WhyPlain("verdict", f"{name} says that plain decoding is faster")


class GrowingText:
    """Turns tokens into text incrementally; holds back text that later tokens may change or a stop string may cut."""

    def __init__(self, session: Session, prompt: Prompt) -> None:
        self._to_text, self._min_new_tokens = session.to_text, session.min_new_tokens
        self._stop_strings = (*session.stop_strings, *prompt.stop)
        self._start_completion()

    def _start_completion(self) -> None:
        self._token_ids: list[int] = []
        self._text = ""  # Text that further tokens cannot change.
        self._window_start = self._window_end = 0  # Tokens that were decoded together last.
        self._n_tokens_shown = self._n_characters_shown = 0
        # Of the tokens that are not shown yet.
        self._logprobs: tuple[TokenLogprob, ...] = ()
        self._traced_tokens: tuple[TracedToken, ...] = ()

    def read_event(self, event: Prefilled | Round) -> Iterator[TextAdded]:
        """Yield the text that an event's tokens complete, if any."""
        self._logprobs += event.logprobs
        self._traced_tokens += event.traced
        prompt_logprobs = event.prompt_logprobs if isinstance(event, Prefilled) else ()
        if (text := self.add(event.token_ids)) or prompt_logprobs:
            yield self._make_event(text, prompt_logprobs)

    def finish_completion(self, completion: Completion) -> Iterator[TextAdded]:
        """Yield the rest of the completion's text and tokens, if any. The next token begins a new completion."""
        # A final stop token adds no text, but its log probability still has to be sent.
        if (text := self._take_new_text(completion.text)) or self._logprobs:
            yield self._make_event(text)
        self._start_completion()

    def _make_event(self, text: str, prompt_logprobs: tuple[TokenLogprob, ...] = ()) -> TextAdded:
        n_tokens, self._n_tokens_shown = len(self._token_ids) - self._n_tokens_shown, len(self._token_ids)
        logprobs, self._logprobs = self._logprobs, ()
        traced_tokens, self._traced_tokens = self._traced_tokens, ()
        return TextAdded(text, n_tokens, logprobs, prompt_logprobs, traced_tokens)

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that they complete."""
        self._token_ids += token_ids
        # Decode the newest tokens together with some earlier ones, because a token's text can depend on those before.
        previous_text = self._to_text(self._token_ids[self._window_start : self._window_end])
        text = self._to_text(self._token_ids[self._window_start :])
        # If the last character is incomplete, wait for more tokens.
        if len(text) <= len(previous_text) or text.endswith("\ufffd"):
            return ""
        self._text += text[len(previous_text) :]
        self._window_start, self._window_end = self._window_end, len(self._token_ids)
        # Stop strings cannot cut the text of the first `min_new_tokens` tokens.
        unstoppable_ids = self._token_ids[: self._min_new_tokens] if self._stop_strings else []
        n_unstoppable = len(self._to_text(unstoppable_ids)) if unstoppable_ids else 0
        return self._take_new_text(self._text[: settled_length(self._text, self._stop_strings, n_unstoppable)])

    def _take_new_text(self, text: str) -> str:
        """Return the part of the completion's `text` that was not shown yet, and count it as shown."""
        new_text, self._n_characters_shown = text[self._n_characters_shown :], max(self._n_characters_shown, len(text))
        return new_text
