"""Choose how another engine decodes a task fastest, by running it: plainly, by n-grams, or with a draft of some length.

The ways are tried by turns on prompts of the stream, in three steps: each kind of draft at one length, the fastest kind
at other lengths, and the winner against plain decoding on prompts that neither step saw. The result may be "plain".
If the processes of a step do not fit into memory, they run in groups, each of which includes plain decoding.
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
# The model itself, quantised to 4 bits, as the draft.
FOUR_BITS = FoundPlan(Plan("adaptive", settings={"draft_format": "int4"}), 0, None)
# Ways slower than this share of plain decoding's speed are not tested on held-out prompts.
LEAST_RATIO = 0.95


@dataclass(frozen=True, slots=True)
class EngineTuneRequest:
    """Request to tune `engine` for `model`; `dtype` and `device` of the target are as for `load`.

    `draft_model` names a smaller model that may draft. `servers` are (name, address) of running servers of this engine
    with different settings, the plain one first; if given, only these are compared, and no engine is started.
    """

    model: str
    engine: EngineName
    dtype: str = "auto"
    device: str = "auto"
    max_new_tokens: int = 128
    draft_model: str | None = None
    servers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Way:
    """One way in which the engine can decode; `drafts` is what it drafts from, `length` tokens per round.

    `plan` is the swiftopt plan whose draft is used, if any; with `drafts` "shared", swiftopt runs inside the engine.
    """

    row: Row
    drafts: Drafts = "none"
    length: int = 0
    plan: Plan | None = None
    draft_model: str | None = None

    @property
    def method(self) -> str:
        """Return the swiftopt method that is closest to this way of decoding."""
        if self.drafts == "shared" and self.plan is not None:
            return self.plan.method
        return {"none": "plain", "text": "prompt-lookup", "own-text": "prompt-lookup"}.get(self.drafts, "spd")

    @property
    def settings(self) -> dict[str, Any]:
        if self.drafts == "none":
            return {}
        if self.drafts == "server":
            return {"server": self.row.variant}
        if self.drafts == "shared" and self.plan is not None:
            return {"drafts": self.drafts, **self.plan.settings}
        return {"drafts": self.drafts, "draft_tokens": self.length}

    def at(self, length: int) -> Way:
        stem = self.row.variant.rpartition("-")[0]
        row = replace(self.row, variant=f"{stem}-{length}", options={**self.row.options, "draft_tokens": length})
        return replace(self, row=row, length=length)


@dataclass(frozen=True, slots=True)
class TriedWay:
    """Result of a way in one step: tokens per second and ratio to plain decoding there, or `reason` for a failure.

    On `equal` of `n_prompts` prompts, the tokens were the same as in plain decoding.
    """

    name: str
    step: int
    tok_s: float | None = None
    ratio: float | None = None
    acceptance: float | None = None
    equal: int = 0
    n_prompts: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EngineTuned:
    """Result for a task: the chosen way, its verdict, all ways tried, and the stored plan."""

    task: str
    way: str
    verdict: Verdict
    found: FoundPlan
    tried: tuple[TriedWay, ...]


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
    """Tunes one engine for the tasks of a stream. Tests replace `run_turns`, which runs rows over questions in groups.

    Raises: in `run`: InvalidInput: swiftopt cannot run the engine, or a task has too few prompts. EngineUnusable: plain
        decoding failed. SwiftoptError: the model cannot be loaded.
    """

    request: EngineTuneRequest
    store: Store
    on_step: OnStep = no_step
    run_turns: RunTurns = _by_turns
    _folder: Path = field(init=False, default=Path())
    _device: str = field(init=False, default="cpu")

    def run(self, prompts: Sequence[Prompt]) -> list[EngineTuned]:
        """Tune every task of the prompts, in order of first appearance."""
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
        asked = {
            task: questions_of(self._folder, task_prompts, request.max_new_tokens)
            for task, task_prompts in by_task.items()
        }
        return [self._tune(task, questions, info) for task, questions in asked.items()]

    def _tune(self, task: str, questions: Sequence[Question], info: ModelInfo) -> EngineTuned:
        tuning, held_out = hold_out(questions)
        tried: list[TriedWay] = []
        with ExitStack() as stack:
            plain, *others = self._ways(task, info, stack)
            best = self._fastest(plain, others, tuning[:STEP_PROMPTS], tried, 1)
            if best is not None and best.length:
                again = tuning[-STEP_PROMPTS:]  # In short streams, step 1 used some of these prompts, too.
                best = self._fastest(plain, [best, *map(best.at, OTHER_LENGTHS)], again, tried, 2)
            if best is None:
                reason = (
                    "nothing else ran"
                    if all(tried_way.reason for tried_way in tried if tried_way.name != "plain")
                    else ""
                )
                verdict = Verdict("plain", reason=reason or "nothing was faster while choosing")
            else:
                run = self._step([plain, best], held_out, tried, 3).get(best.row.name)
                verdict = judge(*run, None) if run else Verdict("plain", reason="it failed on the held-out prompts")
        way, request = best or plain, self.request
        version = "a server"
        if not request.servers:
            version = PACKAGES[RUNNABLE[request.engine].package].built_for(self._device).title
        plan = Plan(
            way.method,
            None if way.plan is None else way.plan.layer_set,
            {**way.settings, "engine_version": version},
            draft_model=way.draft_model,
            device=device_name(torch.device(self._device)),
            dtype=DTYPES[stored_type(self._folder)] if request.dtype == "auto" else request.dtype,
            engine=request.engine,
        )
        acceptance = tried[-1].acceptance if verdict.word == "use" else None  # From the held-out run.
        stored_plan = self.store.add_plan(info.fingerprint, task, judged(plan, verdict, acceptance))
        return EngineTuned(task, way.row.variant, verdict, stored_plan, tuple(tried))

    def _fastest(
        self, plain: Way, ways: Sequence[Way], questions: Sequence[Question], tried: list[TriedWay], step: int
    ) -> Way | None:
        """Return the way with the highest ratio to plain in one step; None if all fail or are below LEAST_RATIO."""
        if not ways:
            return None
        runs = self._step([plain, *ways], questions, tried, step)
        ratios = {name: speed_ratio(*run) for name, run in runs.items()}
        ran = [way for way in ways if ratios.get(way.row.name, 0.0) >= LEAST_RATIO]
        return max(ran, key=lambda way: ratios[way.row.name], default=None)

    def _step(
        self, ways: Sequence[Way], questions: Sequence[Question], tried: list[TriedWay], step: int
    ) -> dict[str, tuple[list[Timed], list[Timed]]]:
        """Run the ways by turns, the first of which is plain decoding.

        Returns: by row name, the timings of each way that ran and those of the plain runs between them.
        """
        request = self.request
        common = TurnsRequest(request.model, self._folder, request.dtype, n_threads(), device=self._device)
        timings: dict[str, tuple[list[Timed], list[Timed]]] = {}
        for plain, *runs in self.run_turns(common, questions, [way.row for way in ways], self.on_step):
            if plain.reason:
                raise EngineUnusable(f"{request.engine} did not decode plainly: {plain.reason}; nothing was stored")
            tried += [_tried(run, plain, step) for run in (plain, *runs)]
            timings |= {run.row.name: (run.timed, plain.timed) for run in runs if not run.reason}
        return timings

    def _ways(self, task: str, info: ModelInfo, stack: ExitStack) -> list[Way]:
        """Return plain decoding and all kinds of draft that the engine can run, each at FIRST_LENGTH."""
        request = self.request
        if request.servers:
            return [
                Way(Row(SERVER, name, "folder", {"url": url}), "server" if number else "none")
                for number, (name, url) in enumerate(request.servers)
            ]
        runnable = RUNNABLE[request.engine]
        package = PACKAGES[runnable.package]

        def way(
            name: str, drafts: Drafts, draft: Weights | Path | None = None, plan: Plan | None = None, **options: Any
        ) -> Way:
            options |= {"draft_tokens": FIRST_LENGTH}
            row = Row(package, f"{name}-{FIRST_LENGTH}", runnable.weights, options, draft)
            return Way(row, drafts, FIRST_LENGTH, plan, request.draft_model if drafts == "model" else None)

        ways = [Way(Row(package, "plain", runnable.weights)), way("ngram", "text", ngram=True)]
        if runnable.own_text:
            ways.append(way("own-text", "own-text", own_text=True))
        bits: Weights | Path | None = runnable.four_bits
        if bits is None:
            bits, inside = self._exported(FOUR_BITS, "shared-int4", "a draft in 4 bits", stack)
            ways += inside
        if bits is not None:
            ways.append(way("int4", "bits", bits))
        if request.draft_model is not None:
            ways.append(way("model", "model", self._draft_model(request.draft_model, runnable)))
        if (stored := self._stored(task, info)) is not None:
            path, inside = self._exported(stored, "shared", "the stored layer set", stack)
            ways += [way("layers", "layers", path, stored.plan)] if path is not None else []
            ways += inside
        return ways

    def _draft_model(self, name: str, runnable: RunnableEngine) -> Path:
        folder = local_folder(resolve(name), self.on_step)
        return gguf_of(folder, "stored", self.on_step) if runnable.weights == "stored" else folder

    def _stored(self, task: str, info: ModelInfo) -> FoundPlan | None:
        """Return the task's best plan, if its draft leaves out sub-layers."""
        with suppress(LayerSetNotFound):
            stored_plan = self.store.lookup(info.fingerprint, task)
            record = stored_plan.plan.layer_set
            if record is not None and record.layer_set.n_skipped:
                return stored_plan
        return None

    def _exported(self, found: FoundPlan, name: str, what: str, stack: ExitStack) -> tuple[Path | None, list[Way]]:
        """Export a plan; return the draft's path, and a way `name` with swiftopt inside the engine, if it can.

        The exported files are removed when `stack` closes.
        """
        engine = self.request.engine
        out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swiftopt-engine-"))) / "plan"
        try:
            export(found, self.request.model, engine, out, self.store, self.on_step)
        except SwiftoptError as error:
            self.on_step(f"{what} is not tried: {error}")
            return None, []
        draft = next((out / file for file in ("draft.gguf", "draft") if (out / file).exists()), None)
        row = Row(PACKAGES[RUNNABLE[engine].package], name, "folder", {"layer_set": str(out / SHARED)})
        return draft, [Way(row, "shared", plan=found.plan)] if (out / SHARED).exists() else []


def _tried(run: RowRuns, plain: RowRuns, step: int) -> TriedWay:
    if run.reason:
        return TriedWay(run.row.variant, step, reason=run.reason)
    equal = sum(run_turn.token_ids == base.token_ids for run_turn, base in zip(run.turns, plain.turns, strict=True))
    ratio = None if run is plain else speed_ratio(run.timed, plain.timed)
    return TriedWay(run.row.variant, step, speed(run.timed), ratio, run.acceptance, equal, len(run.turns))


def model_info(folder: Path, source: Source) -> ModelInfo:
    """Return the model's description for the store, without loading its weights.

    Raises: UnsupportedModel: its architecture is not supported.
    """
    config = supported_config(folder)
    auto: Any = AutoModelForCausalLM
    with quiet(), torch.device("meta"):
        model = auto.from_config(config)
    return info_of(model, fingerprint(folder), source.names, earlier=earlier_fingerprints(folder))
