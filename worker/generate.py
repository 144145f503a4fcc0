"""Decode prompts as the stored plan says, or as the caller insists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..core.errors import LayerSetError, LayerSetNotFound, SettingsError
from ..core.requests import GenerateRequest
from ..core.settings import SwiftSettings
from ..core.types import Completion, FoundPlan, LayerSetRecord, Prompt, VerdictWord
from ..decoding.loop import Watch
from ..decoding.method import PLAIN, Method, swift
from ..decoding.session import Session
from ..models.costs import device_name
from ..models.loading import load
from ..models.runtime import Runtime
from ..store import Store

METHODS = ("plain", "swift")


@dataclass(frozen=True, slots=True)
class GenerateInfo:
    """How a completion was decoded: the layer set in use, where it came from, and what a person should know."""

    method: str
    record: LayerSetRecord | None = None
    version: int | None = None
    verdict: VerdictWord | None = None
    fallback: str | None = None
    note: str = ""


def generate(
    request: GenerateRequest,
    prompts: Sequence[Prompt],
    store: Store | None,
    on_text: Callable[[str], None] | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Iterator[tuple[Prompt, Completion, GenerateInfo]]:
    """Decode each prompt; `on_text` gets the text as it grows.

    Raises: LayerSetNotFound: `swift` was asked for and no set is stored or given.
            LayerSetError: the given set was tuned on another model.
    """
    if request.method not in (None, *METHODS):
        raise SettingsError(f"unknown method {request.method!r}: known are {', '.join(METHODS)}")
    runtime = load(request.model, request.dtype, request.device, on_step)
    if store is not None:
        store.remember_model(runtime.info)
    session = Session(runtime, request.sampling, request.max_new_tokens, request.stop)
    for prompt in prompts:
        session.check(prompt)
    for prompt in prompts:
        method, info = plan_for(request, runtime, request.task or prompt.task, store)
        text = TextStream(runtime, on_text, request.stop) if on_text is not None else None
        watch = Watch(on_tokens=text.add) if text is not None else None
        for turn, completion in session.run(prompt, method, watch):
            if text is not None:
                text.finish(completion)
            yield turn, completion, info


def plan_for(request: GenerateRequest, runtime: Runtime, task: str, store: Store | None) -> tuple[Method, GenerateInfo]:
    """The method for one task: the caller's layer set, else the stored plan, else plain decoding."""
    if request.method == "plain":
        return PLAIN, GenerateInfo("plain")
    if request.layer_set is not None:
        record = request.layer_set
        if record.fingerprint is not None and record.fingerprint != runtime.info.fingerprint:
            raise LayerSetError(
                f"the layer set was tuned on {record.model} ({record.fingerprint}), but this model is"
                f" {runtime.info.fingerprint}: tune it first, or export a set of this model"
            )
        return _skipping(request, record, runtime), GenerateInfo("swift", record, record.version, record.verdict)
    found, missing = _look_up(request, runtime, task, store)
    if found is None or found.plan.layer_set is None:
        if request.method == "swift":
            raise missing or LayerSetNotFound(f"the plan stored for {request.model}/{task} has no layer set")
        return PLAIN, GenerateInfo("plain", note=str(missing or ""))
    record, verdict = found.plan.layer_set, found.plan.verdict
    method = request.method or ("swift" if verdict == "use" else "plain")
    info = GenerateInfo(method, record, found.version, verdict, found.fallback)
    return (_skipping(request, record, runtime) if method == "swift" else PLAIN), info


def _look_up(
    request: GenerateRequest, runtime: Runtime, task: str, store: Store | None
) -> tuple[FoundPlan | None, LayerSetNotFound | None]:
    if store is None:
        return None, LayerSetNotFound("no database to look a layer set up in: pass --db or --layer-set FILE")
    dtype = runtime.dtype_name
    try:
        return store.lookup(runtime.info.fingerprint, task, device_name(runtime.device), dtype), None
    except LayerSetNotFound:
        return None, LayerSetNotFound(
            f"nothing is stored for {request.model}/{task}:"
            f" run `swiftopt tune --model {request.model} --stream FILE --task {task}`"
        )


def _skipping(request: GenerateRequest, record: LayerSetRecord, runtime: Runtime) -> Method:
    runtime.check_layer_set(record.layer_set)
    settings = request.settings or SwiftSettings.from_json(record.settings)
    return swift(record.layer_set, settings)


class TextStream:
    """Turns tokens into text as they come; holds back what a later token could still change or a stop string cut."""

    def __init__(self, runtime: Runtime, on_text: Callable[[str], None], stop: Sequence[str] = ()) -> None:
        self._tokenizer = runtime.tokenizer
        self._on_text = on_text
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._shown = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Pass on the text that these tokens complete."""
        self._token_ids += token_ids
        text = str(self._tokenizer.decode(self._token_ids, skip_special_tokens=True))
        if not text.endswith("\ufffd"):  # half of a character
            self._show(text[: settled(text, self._stop)])

    def finish(self, completion: Completion) -> None:
        """Pass on the rest of the completion's text; the next tokens begin another one."""
        self._show(completion.text)
        self._token_ids, self._shown = [], 0

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
