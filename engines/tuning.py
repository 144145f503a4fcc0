"""Tunes another engine for a task by running it: plainly, with n-grams, and with drafts of several lengths.

There are three steps on prompts of the stream: each kind of draft at one length; the fastest kind at other lengths; and
the fastest of all against plain decoding, on held-out prompts. The result may be plain decoding. In a step the variants
take turns. If their processes do not fit into memory together, they run in groups that each include plain decoding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from ..core.errors import LayerSetNotFound, SwiftoptError
from ..core.records import FoundPlan, ModelInfo, Plan
from ..core.settings import EngineName, n_threads
from ..core.types import Prompt, Verdict
from ..models.costs import device_name
from ..models.fingerprint import earlier_fingerprints, fingerprint
from ..models.gguf_files import gguf_of, stored_type
from ..models.loading import info_of
from ..models.saved import OnStep, no_step, quiet, supported_config
from ..models.sources import Source, local_folder, resolve
from ..optimizer.verdict import Timed, hold_out, judge, speed, speed_ratio
from ..store import Store
from .devices import chosen_device
from .evidence import judged
from .export import SHARED, export
from .packages import PACKAGES, RUNNABLE, SERVER, Row, RunnableEngine, Weights, check_tunable
from .turns import DTYPES, Question, RowRuns, Turns, TurnsRequest, questions_of

Drafts = Literal["none", "text", "own-text", "bits", "layers", "model", "shared", "server"]

FIRST_LENGTH = 5  # Draft length at which the kinds of draft are compared, in tokens.
OTHER_LENGTHS = (2, 3, 8)  # Draft lengths then tried for the fastest kind, in tokens.
STEP_PROMPTS = 6  # Maximum number of prompts per tuning step.
# Plan whose draft is the model itself in 4 bits.
FOUR_BITS = FoundPlan(Plan("adaptive", settings={"draft_format": "int4"}), 0, None)
# Variants slower than this share of plain decoding's speed are not tested on held-out prompts.
LEAST_RATIO = 0.95


@dataclass(frozen=True, slots=True)
class EngineTuneRequest:
    """Request to tune `engine` for `model`; `dtype` and `device` of the target are as for `load`.

    `draft_model` is a smaller model that may draft. `servers` are (name, address) of running servers of this engine
    with different settings, the plain one first. If there are any, these are compared, and no engine is started.
    """

    model: str
    engine: EngineName
    dtype: str = "auto"
    device: str = "auto"
    max_new_tokens: int = 128
    draft_model: str | None = None
    servers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineVariant:
    """One way in which the engine can decode."""

    row: Row
    drafts: Drafts = "none"  # Source of drafts; "shared": swiftopt drafts inside the engine.
    length: int = 0  # Draft tokens per round.
    plan: Plan | None = None  # Plan of swiftopt whose draft is used, if any.
    draft_model: str | None = None

    @property
    def method(self) -> str:
        """The method of swiftopt that is nearest to this variant."""
        if self.drafts == "shared" and self.plan is not None:
            return self.plan.method
        return {"none": "plain", "text": "prompt-lookup", "own-text": "prompt-lookup"}.get(self.drafts, "spd")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the plan to store."""
        if self.drafts == "none":
            return {}
        if self.drafts == "server":
            return {"server": self.row.variant}
        if self.drafts == "shared" and self.plan is not None:
            return {"drafts": self.drafts, **self.plan.settings}
        return {"drafts": self.drafts, "draft_tokens": self.length}

    def with_length(self, length: int) -> EngineVariant:
        """Return this variant with drafts of another length."""
        stem = self.row.variant.rpartition("-")[0]
        row = replace(self.row, variant=f"{stem}-{length}", options={**self.row.options, "draft_tokens": length})
        return replace(self, row=row, length=length)


@dataclass(frozen=True, slots=True)
class TriedVariant:
    """Result of a variant in one step, or the `reason` why it failed."""

    name: str
    step: int
    tok_s: float | None = None
    ratio: float | None = None  # Ratio to plain decoding in the same step.
    acceptance: float | None = None
    equal: int = 0  # Number of prompts on which the tokens were those of plain decoding.
    n_prompts: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EngineTuned:
    """Result for a task: the chosen variant (`way`), its verdict, the stored plan, and all variants tried."""

    task: str
    way: str
    verdict: Verdict
    found: FoundPlan
    tried: tuple[TriedVariant, ...]


RunTurns = Callable[[TurnsRequest, Sequence[Question], Sequence[Row], OnStep], Iterable[Sequence[RowRuns]]]


def _by_turns(
    request: TurnsRequest, questions: Sequence[Question], rows: Sequence[Row], on_step: OnStep
) -> Iterator[Sequence[RowRuns]]:
    for group in Turns(request, questions, rows, on_step).groups():
        turns = Turns(request, questions, group, on_step)
        turns.run()
        if turns.interrupted:
            raise KeyboardInterrupt
        yield turns.runs


class EngineUnusable(SwiftoptError):
    """An engine's plain decoding fails, so nothing can be compared with it."""


@dataclass(slots=True)
class EngineTuning:
    """Tunes one engine for the tasks of a stream; `run_turns` runs rows on questions in groups that fit into memory."""

    request: EngineTuneRequest
    store: Store
    on_step: OnStep = no_step
    run_turns: RunTurns = _by_turns
    _folder: Path = field(init=False, default=Path())
    _device: str = field(init=False, default="cpu")

    def run(self, prompts: Sequence[Prompt]) -> list[EngineTuned]:
        """Tune every task of the prompts, in order of first appearance.

        Raises: InvalidInput: swiftopt cannot run the engine, or a task has too few prompts. EngineUnusable: plain
            decoding failed. SwiftoptError: the model cannot be loaded.
        """
        request = self.request
        check_tunable(request.engine, bool(request.servers), prompts)
        by_task: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            by_task.setdefault(prompt.task, []).append(prompt)
        source = resolve(request.model)
        self._folder = local_folder(source, self.on_step)
        if not request.servers:
            self._device = chosen_device(request.device, self._folder, request.dtype)
        info = model_info(self._folder, source)
        self.store.remember_model(info)
        questions_by_task = {
            task: questions_of(self._folder, task_prompts, request.max_new_tokens)
            for task, task_prompts in by_task.items()
        }
        return [self._tune(task, questions, info) for task, questions in questions_by_task.items()]

    def _tune(self, task: str, questions: Sequence[Question], info: ModelInfo) -> EngineTuned:
        tuning, held_out = hold_out(questions)
        tried: list[TriedVariant] = []
        with ExitStack() as stack:
            plain, *others = self._variants(task, info, stack)
            best = self._fastest(plain, others, tuning[:STEP_PROMPTS], tried, 1)
            if best is not None and best.length:
                lengths = [best, *map(best.with_length, OTHER_LENGTHS)]
                # In short streams, step 1 also used some of these prompts.
                best = self._fastest(plain, lengths, tuning[-STEP_PROMPTS:], tried, 2)
            if best is None:
                all_failed = all(variant.reason for variant in tried if variant.name != "plain")
                reason = "nothing else ran" if all_failed else "nothing was faster while choosing"
                verdict = Verdict("plain", reason=reason)
            else:
                run = self._step([plain, best], held_out, tried, 3).get(best.row.name)
                verdict = judge(*run, None) if run else Verdict("plain", reason="it failed on the held-out prompts")
        chosen, request = best or plain, self.request
        version = "a server"
        if not request.servers:
            version = PACKAGES[RUNNABLE[request.engine].package].built_for(self._device).title
        plan = Plan(
            chosen.method,
            None if chosen.plan is None else chosen.plan.layer_set,
            {**chosen.settings, "engine_version": version},
            draft_model=chosen.draft_model,
            device=device_name(torch.device(self._device)),
            dtype=DTYPES[stored_type(self._folder)] if request.dtype == "auto" else request.dtype,
            engine=request.engine,
        )
        acceptance = tried[-1].acceptance if verdict.word == "use" else None  # From the held-out run.
        stored_plan = self.store.add_plan(info.fingerprint, task, judged(plan, verdict, acceptance))
        return EngineTuned(task, chosen.row.variant, verdict, stored_plan, tuple(tried))

    def _fastest(
        self,
        plain: EngineVariant,
        variants: Sequence[EngineVariant],
        questions: Sequence[Question],
        tried: list[TriedVariant],
        step: int,
    ) -> EngineVariant | None:
        """Return the variant with the highest ratio to plain in a step; None if all fail or are below LEAST_RATIO."""
        if not variants:
            return None
        runs = self._step([plain, *variants], questions, tried, step)
        ratios = {name: speed_ratio(*run) for name, run in runs.items()}
        fast_enough = [variant for variant in variants if ratios.get(variant.row.name, 0.0) >= LEAST_RATIO]
        return max(fast_enough, key=lambda variant: ratios[variant.row.name], default=None)

    def _step(
        self, variants: Sequence[EngineVariant], questions: Sequence[Question], tried: list[TriedVariant], step: int
    ) -> dict[str, tuple[list[Timed], list[Timed]]]:
        """Run the variants in turns, the first of which is plain decoding; add their results to `tried`.

        Returns: by row name, the timings of each variant that ran, and those of plain decoding in the same turns.
        """
        request = self.request
        common = TurnsRequest(request.model, self._folder, request.dtype, n_threads(), device=self._device)
        timings: dict[str, tuple[list[Timed], list[Timed]]] = {}
        for plain, *runs in self.run_turns(common, questions, [variant.row for variant in variants], self.on_step):
            if plain.reason:
                raise EngineUnusable(f"{request.engine} did not decode plainly: {plain.reason}; nothing was stored")
            tried += [_tried(run, plain, step) for run in (plain, *runs)]
            timings |= {run.row.name: (run.timed, plain.timed) for run in runs if not run.reason}
        return timings

    def _variants(self, task: str, info: ModelInfo, stack: ExitStack) -> list[EngineVariant]:
        """Return plain decoding and all kinds of draft that the engine can run, each at FIRST_LENGTH."""
        request = self.request
        if request.servers:
            return [
                EngineVariant(Row(SERVER, name, "folder", {"url": url}), "server" if number else "none")
                for number, (name, url) in enumerate(request.servers)
            ]
        runnable = RUNNABLE[request.engine]
        package = PACKAGES[runnable.package]

        def drafting(
            name: str, drafts: Drafts, draft: Weights | Path | None = None, plan: Plan | None = None, **options: Any
        ) -> EngineVariant:
            options |= {"draft_tokens": FIRST_LENGTH}
            row = Row(package, f"{name}-{FIRST_LENGTH}", runnable.weights, options, draft)
            return EngineVariant(row, drafts, FIRST_LENGTH, plan, request.draft_model if drafts == "model" else None)

        variants = [EngineVariant(Row(package, "plain", runnable.weights)), drafting("ngram", "text", ngram=True)]
        if runnable.own_text:
            variants.append(drafting("own-text", "own-text", own_text=True))
        four_bits: Weights | Path | None = runnable.four_bits
        if four_bits is None:
            four_bits, shared = self._exported(FOUR_BITS, "shared-int4", "a draft in 4 bits", stack)
            variants += shared
        if four_bits is not None:
            variants.append(drafting("int4", "bits", four_bits))
        if request.draft_model is not None:
            variants.append(drafting("model", "model", self._draft_model(request.draft_model, runnable)))
        if (stored_plan := self._stored_plan(task, info)) is not None:
            layers, shared = self._exported(stored_plan, "shared", "the stored layer set", stack)
            variants += [drafting("layers", "layers", layers, stored_plan.plan)] if layers is not None else []
            variants += shared
        return variants

    def _draft_model(self, name: str, runnable: RunnableEngine) -> Path:
        folder = local_folder(resolve(name), self.on_step)
        return gguf_of(folder, "stored", self.on_step) if runnable.weights == "stored" else folder

    def _stored_plan(self, task: str, info: ModelInfo) -> FoundPlan | None:
        """Return the task's best plan if its draft skips sub-layers."""
        with suppress(LayerSetNotFound):
            stored_plan = self.store.lookup(info.fingerprint, task)
            record = stored_plan.plan.layer_set
            if record is not None and record.layer_set.n_skipped:
                return stored_plan
        return None

    def _exported(
        self, found: FoundPlan, name: str, description: str, stack: ExitStack
    ) -> tuple[Path | None, list[EngineVariant]]:
        """Export a plan into a folder that is removed when `stack` closes.

        Returns: the path of the draft checkpoint, if there is one; and the variant `name`, in which swiftopt drafts
                 inside the engine, if the engine supports this.
        """
        engine = self.request.engine
        out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swiftopt-engine-"))) / "plan"
        try:
            export(found, self.request.model, engine, out, self.store, self.on_step)
        except SwiftoptError as error:
            self.on_step(f"{description} is not tried: {error}")
            return None, []
        draft = next((out / file for file in ("draft.gguf", "draft") if (out / file).exists()), None)
        row = Row(PACKAGES[RUNNABLE[engine].package], name, "folder", {"layer_set": str(out / SHARED)})
        return draft, [EngineVariant(row, "shared", plan=found.plan)] if (out / SHARED).exists() else []


def _tried(run: RowRuns, plain: RowRuns, step: int) -> TriedVariant:
    if run.reason:
        return TriedVariant(run.row.variant, step, reason=run.reason)
    equal = sum(turn.token_ids == base.token_ids for turn, base in zip(run.turns, plain.turns, strict=True))
    ratio = None if run is plain else speed_ratio(run.timed, plain.timed)
    return TriedVariant(run.row.variant, step, speed(run.timed), ratio, run.acceptance, equal, len(run.turns))


def model_info(folder: Path, source: Source) -> ModelInfo:
    """Return the model's description for the store, without loading its weights.

    Raises: UnsupportedModel: its architecture is not supported.
    """
    config = supported_config(folder)
    auto: Any = AutoModelForCausalLM
    with quiet(), torch.device("meta"):
        model = auto.from_config(config)
    return info_of(model, fingerprint(folder), source.names, earlier=earlier_fingerprints(folder))
