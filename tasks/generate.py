"""Decode prompts as the stored plan says, or as the caller insists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..core.errors import InvalidInput, LayerSetNotFound, NotFound
from ..core.methods import method_info
from ..core.requests import GenerateRequest
from ..core.types import Completion, FoundPlan, LayerSetRecord, Plan, Prompt, VerdictWord
from ..decoding.engine import PassGenerator, side_by_side
from ..decoding.loop import Watch
from ..decoding.method import PLAIN, Method
from ..decoding.methods import build
from ..decoding.session import Session
from ..models.costs import machine_name
from ..models.loading import load
from ..models.runtime import Runtime
from ..models.saved import no_step
from ..store import Store
from .recipes import Pieces, StoredPieces


@dataclass(frozen=True, slots=True)
class GenerateInfo:
    """How a completion was decoded: the layer set in use, where it came from, and what a person should know."""

    method: str
    record: LayerSetRecord | None = None
    version: int | None = None
    verdict: VerdictWord | None = None
    fallback: str | None = None
    note: str = ""


Turn = tuple[Prompt, Completion, GenerateInfo]


def generate(
    request: GenerateRequest,
    prompts: Sequence[Prompt],
    store: Store | None,
    on_text: Callable[[str], None] | None = None,
    on_step: Callable[[str], None] = no_step,
) -> Iterator[Turn]:
    """Decode each prompt; `on_text` gets the text as it grows, where prompts are decoded one after the other.

    Raises: LayerSetNotFound, LearnedNotFound: a method was asked for, and what it needs is neither stored nor given.
            LayerSetError: the given set was tuned on another model. SettingsError: there is no such method.
    """
    if request.method is not None:
        method_info(request.method)
    runtime = load(request.model, request.dtype, request.device, on_step, request.speed)
    if store is not None:
        store.remember_model(runtime.info)
    session = Session(runtime, request.sampling, request.max_new_tokens, request.stop)
    for prompt in prompts:
        session.check(prompt)
    planner = Planner(request, runtime, store, on_step)
    if request.concurrency > 1:
        works = (_request(session, planner, prompt) for prompt in prompts)
        for turns in side_by_side(works, request.concurrency):
            yield from turns
        return
    for prompt in prompts:
        method, info = planner.plan_for(request.task or prompt.task)
        text = TextStream(runtime, on_text, request.stop) if on_text is not None else None
        watch = Watch(on_tokens=text.add) if text is not None else None
        for turn, completion in session.run(prompt, method, watch):
            if text is not None:
                text.finish(completion)
            yield turn, completion, info


def _request(session: Session, planner: Planner, prompt: Prompt) -> PassGenerator[list[Turn]]:
    method, info = planner.plan_for(planner.request.task or prompt.task)
    return [(turn, done, info) for turn, done in (yield from session.request(prompt, method))]


class Planner:
    """Chooses and builds the method of each task once: what the caller insists on, else what the stored plan says."""

    def __init__(
        self, request: GenerateRequest, runtime: Runtime, store: Store | None, on_step: Callable[[str], None] = no_step
    ) -> None:
        self.request, self.runtime, self.store = request, runtime, store
        self._on_step = on_step
        self._planned: dict[str, tuple[Method, GenerateInfo]] = {}
        self._drafts: dict[str, Runtime] = {}

    def plan_for(self, task: str) -> tuple[Method, GenerateInfo]:
        """The method for a task, and where it came from."""
        if task not in self._planned:
            self._planned[task] = self._plan(task)
        return self._planned[task]

    def _plan(self, task: str) -> tuple[Method, GenerateInfo]:
        request = self.request
        if request.method == "plain":
            return PLAIN, GenerateInfo("plain")
        if request.layer_set is not None:
            return self._insisted(request.method or request.layer_set.found_for, task, None)
        found, missing = self._look_up(task)
        if request.method is not None:
            return self._insisted(request.method, task, found)
        if found is None:
            return PLAIN, GenerateInfo("plain", note=missing)
        record = found.plan.layer_set
        info = GenerateInfo(found.plan.method, record, found.version, found.plan.verdict, found.fallback)
        if found.plan.verdict != "use":
            return PLAIN, replace(info, method="plain")
        try:
            return self._built(found.plan.method, task, found.plan), info
        except (InvalidInput, NotFound) as error:  # made where its draft model is, or its heads were
            note = f"the stored plan cannot be used here: {error}"
            return PLAIN, replace(info, method="plain", record=None, note=note)

    def _insisted(self, name: str, task: str, found: FoundPlan | None) -> tuple[Method, GenerateInfo]:
        """A method by name, with the plan's own pieces where the plan is of that method."""
        same = found if found is not None and found.plan.method == name else None
        plan = Plan(name, self.request.layer_set) if same is None else same.plan
        pieces = self._pieces(name, task, plan)
        info = GenerateInfo(name, pieces.layer_set)
        if pieces.layer_set is not None:
            info = replace(info, version=pieces.layer_set.version, verdict=pieces.layer_set.verdict)
        if same is not None:
            info = replace(info, version=same.version, verdict=same.plan.verdict, fallback=same.fallback)
        return self._build(plan, pieces), info

    def _built(self, name: str, task: str, plan: Plan) -> Method:
        return self._build(plan, self._pieces(name, task, plan))

    def _pieces(self, name: str, task: str, plan: Plan) -> Pieces:
        draft_model = self.request.draft_model or plan.draft_model
        draft = self._draft(draft_model) if draft_model and method_info(name).drafts_with_model else None
        stored = StoredPieces(self.runtime, self.store, draft, self._on_step)
        return stored.of(name, task, self.request.layer_set or plan.layer_set, plan.learned, plan.settings)

    def _build(self, plan: Plan, pieces: Pieces) -> Method:
        if plan.method == "swift" and self.request.settings is not None:
            return build("swift", pieces.parts, self.request.settings)
        settings = method_info(plan.method).settings_from(plan.settings or pieces.settings)
        return build(plan.method, pieces.parts, settings)

    def _draft(self, name: str) -> Runtime:
        if name not in self._drafts:
            request = self.request
            self._drafts[name] = load(name, request.dtype, request.device, self._on_step, request.speed)
        return self._drafts[name]

    def _look_up(self, task: str) -> tuple[FoundPlan | None, str]:
        """The stored plan, or why there is none."""
        if self.store is None:
            return None, "no database to look a plan up in: pass --db or --layer-set FILE"
        runtime = self.runtime
        try:
            found = self.store.lookup(runtime.info.fingerprint, task, machine_name(runtime), runtime.dtype_name)
            return found, ""
        except LayerSetNotFound:
            model = self.request.model
            return None, (
                f"nothing is stored for {model}/{task}: run `swiftopt tune --model {model} --stream FILE --task {task}`"
            )


class TextStream:
    """Turns tokens into text as they come; holds back what a later token could still change or a stop string cut."""

    def __init__(self, runtime: Runtime, on_text: Callable[[str], None], stop: Sequence[str] = ()) -> None:
        self._tokenizer = runtime.tokenizer
        self._on_text = on_text
        self._stop = tuple(stop)
        self._start()

    def _start(self) -> None:
        self._token_ids: list[int] = []
        self._text = ""
        self._from = self._read = self._shown = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Pass on the text that these tokens complete."""
        self._token_ids += token_ids
        # Only the newest tokens are decoded, behind some that were before: a token's text can depend on its neighbour.
        known, text = (self._decoded(self._token_ids[self._from : end]) for end in (self._read, None))
        if len(text) > len(known) and not text.endswith("\ufffd"):  # half of a character
            self._text += text[len(known) :]
            self._from, self._read = self._read, len(self._token_ids)
            self._show(self._text[: settled(self._text, self._stop)])

    def finish(self, completion: Completion) -> None:
        """Pass on the rest of the completion's text; the next tokens begin another one."""
        self._show(completion.text)
        self._start()

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _show(self, text: str) -> None:
        if len(text) > self._shown:
            self._on_text(text[self._shown :])
            self._shown = len(text)


def settled(text: str, stop_strings: Sequence[str]) -> int:
    """Length of the part of `text` that no stop string, found or begun at its end, can cut."""
    length = len(text)
    for stop in stop_strings:
        found = text.find(stop)
        begun = next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
        length = min(length, found if found >= 0 else len(text) - begun)
    return length
