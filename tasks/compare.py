"""Compare methods on one stream: prepare their parts, run them alternately, and store the best one as the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from time import perf_counter
from typing import Any

import torch

from .. import __version__
from ..core.costs import CostProfile
from ..core.errors import SwiftoptError
from ..core.requests import BASE, PEERS, CompareRequest, GenerateRequest
from ..core.settings import preset_of
from ..core.types import DEFAULT_TASK, Prompt, now
from ..decoding.draft_models import OtherModel
from ..decoding.methods import PLAIN, Method, build, method_info
from ..decoding.session import Session
from ..decoding.verify import TargetWalk
from ..models.costs import machine_name
from ..models.loading import load
from ..models.runtime import Runtime
from ..models.saved import OnStep, no_step
from ..store import Store
from .measures import EnergyMeter, check_judges, extra_bytes, measure_of, nll, quality
from .recipes import MakingRecipes, Recipe, open_session, stored_costs
from .report import SCHEMA, Figures, Interleaved, OnRun, Runs, by_ratio, decoder, figures, peer, qualities, with_plan


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A method of the comparison, or one of transformers' own (`method` is None)."""

    name: str
    method: Method | None = None
    recipe: Recipe | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None  # Why it cannot run.


class Comparison:
    """Compares methods, from loading the model to the report.

    Args: others: prompts for brief searches and trainings, which otherwise use the compared prompts. on_plain: called
          with plain decoding's seconds for the first prompt, before any part is made.
    """

    def __init__(
        self,
        request: CompareRequest,
        prompts: Sequence[Prompt],
        store: Store | None,
        others: Sequence[Prompt] = (),
        on_step: OnStep = no_step,
        on_run: OnRun | None = None,
        on_plain: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.request, self.store, self.on_step, self.on_run, self.on_plain = request, store, on_step, on_run, on_plain
        self.prompts, self.others = repeat_samples(first_turns(prompts), request.samples), first_turns(others)
        check_judges(self.prompts)
        self.task = request.task or task_of(self.prompts)
        self.measure = measure_of(self.prompts)
        self._quality: dict[tuple[str, str], float] = {}  # Scores of judged answers, by (prompt, answer).

    def run(self) -> dict[str, Any]:
        """Return the object that `swiftopt compare --json` prints; `interrupted` is true if Ctrl-C stopped the runs.

        Raises: InvalidInput: the draft model's tokenizer is not the target's, or a prompt does not fit the context.
        """
        request = self.request
        session, draft = self.session, self.draft = open_models(request, self.prompts, self.store, self.on_step)
        self.n_positions = max(map(session.check, self.prompts))
        started_s = perf_counter()
        decoder(session, PLAIN)(self.prompts[0])
        self.on_plain(perf_counter() - started_s)
        parts_store = self.store if request.keep else None
        presets = {preset.method: preset for preset in map(preset_of, request.presets)}
        preset_settings = {name: preset.settings for name, preset in presets.items()}
        training_prompts = self.others or self.prompts
        recipes = MakingRecipes(
            session, self.store, draft, request.model, self.task, training_prompts, parts_store, self.on_step, presets
        )
        entries = [
            make_entry(name, recipes, {**preset_settings.get(name, {}), **request.settings.get(name, {})})
            for name in dict.fromkeys((*request.methods, *presets))
        ]
        meter = EnergyMeter.of(session.runtime.device)
        decoders = {
            entry.name: peer(entry.name, session, draft) if entry.method is None else decoder(session, entry.method)
            for entry in entries
            if entry.error is None
        }
        runs = Interleaved(decoders, self.prompts, meter, self.on_run)
        is_complete = runs.run()
        if is_complete:
            self.on_step("perplexity of the outputs under the model")
        prompts = self.prompts
        self._nll = cache(lambda number, token_ids: nll(session.runtime, session.encode(prompts[number]), token_ids))
        rows = [self._row(entry, runs.runs, is_complete) for entry in entries]
        report = self._report(by_ratio(rows), recipes, meter.source, is_complete)
        recipes_by_name = {entry.name: entry.recipe for entry in entries if entry.recipe is not None}
        return with_plan(report, rows, recipes_by_name, session.runtime.info.fingerprint, parts_store)

    def _base_row(self, entry: Entry) -> Figures:
        """Return the entry's row without timings; call it after the runs, to include the memory that they allocated."""
        if entry.name in PEERS:
            n_extra = self.draft.info.n_parameters if entry.name == "hf-assisted" and self.draft is not None else 0
            return Figures(entry.name, PEERS[entry.name], extra_parameters=n_extra)
        method = method_info(entry.name)
        row = Figures(entry.name, method.title, method.lossy, settings=entry.settings)
        if entry.method is None or entry.recipe is None:
            return row
        resources, session = entry.recipe.parts, self.session
        n_trained = 0 if entry.recipe.learned is None else entry.recipe.learned.n_parameters
        n_drafting = 0 if resources.draft_runtime is None else resources.draft_runtime.info.n_parameters
        n_bytes = extra_bytes(entry.method, session.runtime, self.n_positions, session.max_new_tokens)
        return replace(row, extra_parameters=n_trained + n_drafting, extra_bytes=n_bytes)

    def _row(self, entry: Entry, runs: Mapping[str, Runs], is_complete: bool) -> Figures:
        """Return the entry's row; after Ctrl-C without figures that take time to compute, as perplexities."""
        base_row = self._base_row(entry)
        if entry.error is not None:
            return base_row.unmeasured(len(self.prompts), entry.error)
        method_runs, method = runs[entry.name], entry.method
        row = figures(
            base_row,
            method_runs,
            runs[BASE],
            len(self.prompts),
            self._nll if is_complete else None,
            # When sampling, verifiers by ratio tests draw other tokens than plain decoding does with the same seed.
            keeps_tokens=self.session.sampling.greedy or method is None or isinstance(method.verifier, TargetWalk),
            predicts_early=method is not None and method_info(entry.name).predicts_early,
            samples=self.request.samples,
            costs=self._costs_of(method_runs) if is_complete else None,
        )
        if is_complete and self.measure is not None:
            row = replace(row, **qualities(self._scores(method_runs), self.request.samples))
        if is_complete and row.reason is None and row.prompts < row.of:
            return replace(row, reason="because it is less than half as fast as plain decoding")
        return row

    def _costs_of(self, runs: Runs) -> CostProfile | None:
        """Return the costs of passes with the runs' layer sets, measured if not stored; None if no run has one.

        Runs whose drafter estimates its costs itself are ignored.
        """
        completions = [run.completion for run in runs.by_prompt.values() if run.completion is not None]
        layer_sets = {
            completion.layer_set
            for completion in completions
            if completion.layer_set is not None and completion.estimated_cost is None
        }
        formats = {name for layer_set in layer_sets for _, name in layer_set.formats}
        runtime, store = self.session.runtime, self.store
        return stored_costs(runtime, store, self.n_positions, self.on_step, formats) if layer_sets else None

    def _scores(self, runs: Runs) -> dict[int, float]:
        """Return the quality of each prompt's answer by prompt number; equal answers are judged once."""
        scores = {}
        for number, run in runs.by_prompt.items():
            prompt = self.prompts[number]
            text = self.session.ending(self.session.room(prompt), prompt.stop).text(run.token_ids)
            key = prompt.reference.get("before", prompt.id), text
            if key not in self._quality:
                self._quality[key] = quality(prompt, text)
            scores[number] = self._quality[key]
        return scores

    def _report(
        self, rows: Sequence[Figures], recipes: MakingRecipes, energy: str | None, is_complete: bool
    ) -> dict[str, Any]:
        request, runtime = self.request, self.session.runtime
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
            "made": [made_part._asdict() for made_part in recipes.made],
            "made_on": training_prompts_words(self.others),
            "results": [row.to_json() for row in rows],
            "interrupted": not is_complete,
        }


def training_prompts_words(others: Sequence[Prompt]) -> str:
    """Describe on which prompts brief searches and trainings ran."""
    return "other prompts" if others else "the compared prompts"


def first_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Cut chats to their first turn, so that all methods decode the same ids."""
    return [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]


def repeat_samples(prompts: Sequence[Prompt], n: int) -> list[Prompt]:
    """Return each prompt `n` times, each copy with its own seed."""
    return [
        replace(prompt, id=f"{prompt.id}~{i}" if i else prompt.id, sample=i) for prompt in prompts for i in range(n)
    ]


def task_of(prompts: Sequence[Prompt]) -> str:
    """Return the prompts' common task, or the default task if they have several."""
    tasks = {prompt.task for prompt in prompts}
    return tasks.pop() if len(tasks) == 1 else DEFAULT_TASK


def open_models(
    request: CompareRequest | GenerateRequest,
    prompts: Sequence[Prompt],
    store: Store | None,
    on_step: OnStep,
) -> tuple[Session, Runtime | None]:
    """Open the target for the prompts and load the draft model, if the request names one.

    Raises: InvalidInput: the draft model's tokenizer is not the target's, or a prompt does not fit.
    """

    def on_load(step: str) -> None:
        on_step(f"load: {step}")

    session = open_session(request, prompts, store, on_load)
    if request.draft_model is None:
        return session, None
    draft = load(request.draft_model, request.dtype, request.device, on_load, request.speed)
    OtherModel(draft).check(session.runtime)
    return session, draft


def make_entry(name: str, recipes: MakingRecipes, overrides: Mapping[str, Any]) -> Entry:
    """Build a method; `overrides` replace its default settings, or those stored with its layer set."""
    if name in PEERS:
        return Entry(name)
    try:
        recipe = recipes.of(name, recipes.task, settings=overrides)
        settings = method_info(name).settings_from({**recipe.settings, **overrides})
        return Entry(name, build(name, recipe.parts, settings), recipe, settings.to_json())
    except SwiftoptError as error:
        return Entry(name, error=str(error))
