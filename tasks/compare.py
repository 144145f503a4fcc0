"""Compare methods on one stream: find or make their parts, run them by turns, and make the best one the task's plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from .. import __version__
from ..core.errors import SwiftoptError
from ..core.requests import BASE, PEERS, CompareRequest, GenerateRequest
from ..core.settings import Preset, preset_of
from ..core.types import DEFAULT_TASK, Prompt, now
from ..decoding.draft_models import OtherModel
from ..decoding.methods import Method, build, method_info
from ..decoding.session import Session, hf_generate
from ..decoding.verify import TargetWalk
from ..models.costs import machine_name
from ..models.early_exit import n_parameters
from ..models.loading import load
from ..models.runtime import Runtime
from ..store import Store
from .measures import EnergyMeter, buffer_bytes, held_bytes, nll
from .quality import check_judges, measure_of, quality
from .recipes import MakingRecipes, Recipe, opened
from .report import SCHEMA, Figures, by_ratio, figures, qualities, with_plan
from .runs import Contender, Decoded, Interleaved, OnRun, Run, Runs, decoding_with

LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens of hf-lookup, the value of transformers' documentation


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One method of the comparison, or a peer where `method` is None; `error`: why it cannot run at all."""

    name: str
    method: Method | None = None
    recipe: Recipe | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


class Comparison:
    """Compare methods, from loading to the report.

    Args: others: prompts that are not compared, which brief searches and trainings may see; without any they see the
          compared ones.
    """

    def __init__(
        self,
        request: CompareRequest,
        prompts: Sequence[Prompt],
        store: Store | None,
        others: Sequence[Prompt] = (),
        on_step: Callable[[str], None] = lambda words: None,
        on_run: OnRun | None = None,
    ) -> None:
        self.request, self.store, self.on_step, self.on_run = request, store, on_step, on_run
        self.prompts, self.others = sampled(first_turns(prompts), request.samples), first_turns(others)
        check_judges(self.prompts)
        self.task = request.task or task_of(self.prompts)
        self.measure = measure_of(self.prompts)
        self._nll: dict[tuple[int, tuple[int, ...]], float] = {}
        self._quality: dict[tuple[str, str], float] = {}  # by question and answer

    def run(self) -> dict[str, Any]:
        """Return the object that `swiftopt compare --json` prints; `interrupted` if Ctrl-C came while methods ran.

        Raises: InvalidInput: the draft model's tokenizer is not the target's, or a prompt does not fit.
        """
        request = self.request
        session, draft = open_models(request, self.prompts, self.store, self.on_step)
        runtime, n_positions = session.runtime, max(map(session.check, self.prompts))
        keep = self.store if request.keep else None
        presets = {preset.method: preset for preset in map(preset_of, request.presets)}
        looked_at = self.others or self.prompts
        recipes = MakingRecipes(
            session, self.store, draft, request.model, self.task, looked_at, keep, self.on_step, presets
        )
        entries = [
            enter(name, recipes, {**_settings_of(presets.get(name)), **request.settings.get(name, {})})
            for name in dict.fromkeys((*request.methods, *presets))
        ]
        able = [contender(entry, session, draft) for entry in entries if entry.error is None]
        meter = EnergyMeter.of(runtime.device.type, runtime.device.index or 0)
        runs = Interleaved(able, self.prompts, meter, self.on_run)
        finished = runs.run()
        if finished:
            self.on_step("perplexity of the outputs under the model")
        rows = [self._row(entry, runs, session, draft, n_positions, finished) for entry in entries]
        report = self._report(by_ratio(rows), runtime, recipes, meter.source, finished)
        used = {entry.name: entry.recipe for entry in entries if entry.recipe is not None}
        return with_plan(report, rows, used, runtime.info.fingerprint, keep)

    def _row(
        self, entry: Entry, runs: Interleaved, session: Session, draft: Runtime | None, n_positions: int, finished: bool
    ) -> Figures:
        """Return the entry's row, without perplexities if Ctrl-C came: they take time."""
        known = about(entry, session, draft, n_positions)
        if entry.error is not None:
            return known.missing(len(self.prompts), entry.error)

        def nll_of(number: int, run: Run) -> float:
            key = number, run.token_ids
            if key not in self._nll:
                self._nll[key] = nll(session.runtime, session.encode(self.prompts[number]), run.token_ids)
            return self._nll[key]

        own, base = runs.runs[entry.name], runs.runs[BASE]
        row = figures(
            known,
            own,
            base,
            len(self.prompts),
            nll_of if finished else None,
            keeps_tokens=_keeps_tokens(entry, session),
            predicts_early=entry.method is not None and "heads" in method_info(entry.name).needs,
        )
        if finished and self.measure is not None:
            row = replace(row, **qualities(self._scores(own, session), self.request.samples))
        if finished and row.reason is None and row.prompts < row.of:
            return replace(row, reason="for it is less than half as fast as plain decoding")
        return row

    def _scores(self, runs: Runs, session: Session) -> dict[int, float]:
        """Return how good each answer is, by the prompt's number; equal answers are judged once."""
        found = {}
        for number, run in runs.by_prompt.items():
            prompt = self.prompts[number]
            text = session.ending(session.room(prompt), prompt.stop).text(run.token_ids)
            key = prompt.reference.get("before", prompt.id), text
            if key not in self._quality:
                self._quality[key] = quality(prompt, text)
            found[number] = self._quality[key]
        return found

    def _report(
        self, rows: Sequence[Figures], runtime: Runtime, recipes: MakingRecipes, energy: str | None, finished: bool
    ) -> dict[str, Any]:
        request = self.request
        return {
            "schema": SCHEMA,
            "model": request.model,
            "draft_model": request.draft_model,
            "task": self.task,
            "device": machine_name(runtime),
            "dtype": runtime.dtype_name,
            "torch": torch.__version__,
            "swiftopt": __version__,
            "created_at": now(),
            "max_new_tokens": request.max_new_tokens,
            "sampling": asdict(request.sampling),
            "prompts": len(self.prompts),
            "samples": request.samples,
            "quality": self.measure,
            "base": BASE,
            "energy": energy,
            "made": [{"piece": one.piece, "how": one.how, "seconds": round(one.seconds, 1)} for one in recipes.made],
            "made_on": made_on(self.others),
            "results": [row.to_json() for row in rows],
            "interrupted": not finished,
        }


def made_on(others: Sequence[Prompt]) -> str:
    """Say which prompts brief searches and trainings saw."""
    return "other prompts" if others else "the compared prompts"


def _settings_of(preset: Preset | None) -> Mapping[str, Any]:
    return {} if preset is None else preset.settings


def first_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Cut chats to their first turn, so that all methods decode the same ids."""
    return [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]


def sampled(prompts: Sequence[Prompt], n: int) -> list[Prompt]:
    """Return each prompt `n` times, the later ones with draws of their own."""
    return [
        replace(prompt, id=f"{prompt.id}~{i}" if i else prompt.id, sample=i) for prompt in prompts for i in range(n)
    ]


def task_of(prompts: Sequence[Prompt]) -> str:
    """Return the task of the prompts; the default one where they have several."""
    tasks = {prompt.task for prompt in prompts}
    return tasks.pop() if len(tasks) == 1 else DEFAULT_TASK


def open_models(
    request: CompareRequest | GenerateRequest,
    prompts: Sequence[Prompt],
    store: Store | None,
    on_step: Callable[[str], None],
) -> tuple[Session, Runtime | None]:
    """Open the target for the prompts and, if the request names one, load the draft model.

    Raises: InvalidInput: the draft model's tokenizer is not the target's, or a prompt does not fit.
    """

    def on_load(step: str) -> None:
        on_step(f"load: {step}")

    session = opened(request, prompts, store, on_load)
    if request.draft_model is None:
        return session, None
    draft = load(request.draft_model, request.dtype, request.device, on_load, request.speed)
    OtherModel(draft).check(session.runtime)
    return session, draft


def enter(name: str, recipes: MakingRecipes, told: Mapping[str, Any]) -> Entry:
    """Build a method; `told` are settings that replace its defaults, or those stored with its layer set."""
    if name in PEERS:
        return Entry(name)
    try:
        recipe = recipes.of(name, recipes.task, settings=told)
        settings = method_info(name).settings_from({**recipe.settings, **told})
        return Entry(name, build(name, recipe.parts, settings), recipe, settings.to_json())
    except SwiftoptError as error:
        return Entry(name, error=str(error))


def contender(entry: Entry, session: Session, draft: Runtime | None) -> Contender:
    """Return the entry as something to run."""
    if entry.method is None:
        return peer(entry.name, session, draft)
    return Contender(entry.name, decoding_with(session, entry.method))


def peer(name: str, session: Session, draft: Runtime | None) -> Contender:
    """Return transformers' own decoding, of the PEERS; `draft` drafts for "hf-assisted"."""
    options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if name == "hf-lookup" else {}
    if name == "hf-assisted" and draft is not None:
        options = {"assistant_model": draft.hf_model}

    def run(prompt: Prompt) -> Decoded:
        return hf_generate(session, session.encode(prompt), session.room(prompt), prompt.stop, **options), None

    return Contender(name, run)


def about(entry: Entry, session: Session, draft: Runtime | None, n_positions: int) -> Figures:
    """Return the entry's row with what is known without its runs; call it after them, for memory taken while running.

    Args: n_positions: of the longest prompt and completion together.
    """
    if entry.name in PEERS:
        size = draft.info.n_parameters if entry.name == "hf-assisted" and draft is not None else 0
        return Figures(entry.name, PEERS[entry.name], extra_parameters=size)
    info = method_info(entry.name)
    known = Figures(entry.name, info.title, info.lossy, settings=entry.settings)
    if entry.method is None or entry.recipe is None:
        return known
    parts, runtime = entry.recipe.parts, session.runtime
    trained = [n_parameters(part) for part in (parts.heads, parts.probe) if part is not None]
    drafting = parts.draft_runtime
    extra = buffer_bytes(entry.method, runtime, n_positions, session.max_new_tokens)
    return replace(
        known,
        extra_parameters=sum(trained) + (0 if drafting is None else drafting.info.n_parameters),
        extra_bytes=held_bytes(entry.method, runtime) + extra,
    )


def _keeps_tokens(entry: Entry, session: Session) -> bool:
    """Return whether it emits plain decoding's tokens: when sampling, a ratio test draws differently from the seed."""
    return session.sampling.greedy or entry.method is None or isinstance(entry.method.verifier, TargetWalk)
