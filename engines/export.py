"""A stored plan as the files of another engine: plan, layer set, restacked layers, and what that engine reads.

ENGINES lists the engines. Each gets a folder with the draft checkpoint where the plan has one, the engine's settings,
and a README with the commands and what was measured. The folder appears under its name when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ..core.costs import CostProfile
from ..core.errors import InvalidInput, LayerSetError, OutputError
from ..core.types import FoundPlan, LayerSet, Trial
from ..models.fingerprint import fingerprint
from ..models.gguf_weights import stored_type, write_gguf
from ..models.restacked import check_restackable, distance, is_parallel, nearest, pairs_of, write_restacked
from ..models.saved import OnStep, first_line, no_step, supported_config
from ..models.sources import local_folder, resolve
from ..store import Store

Kind = Literal["draft", "text"]  # what a plan drafts with elsewhere: a checkpoint, or earlier text

SCHEMA = "swiftopt.export/1"
SUMMARY = "export.json"
GGUF_DRAFTS = ("llamacpp",)  # engines whose draft is a GGUF file

LONGEST = 16  # draft tokens of a round
GUESSED_LENGTH = 5  # where no acceptance was measured
LOADS = (1, 2, 4, 8, 16, 32, 64)  # requests at a time, up to which a draft length is chosen
TEXT_METHODS = ("prompt-lookup", "adaptive")  # that draft from earlier text
ROUNDED = {"int8": "Q8_0", "int4": "Q4_0", "int4-64": "Q4_0", "int4-32": "Q4_0"}  # our format: that of GGUF


@dataclass(frozen=True, slots=True)
class EngineDraft:
    """What an engine's files are written from. `lengths`: (fewest requests, most, draft tokens) by load, if known.

    `name` is the target's, `target` what an engine reads it from.
    """

    found: FoundPlan
    name: str
    target: str
    kind: Kind
    n_tokens: int
    lengths: tuple[tuple[int, int, int], ...] = ()
    layer_set: LayerSet | None = None
    n_changed: int = 0

    @property
    def gguf_type(self) -> str | None:
        """The GGUF type nearest to the format of most of the draft's MLPs; None: as the model is stored."""
        if self.layer_set is None:
            return None
        names = [self.layer_set.format_of("mlp", layer) for layer in range(self.layer_set.n_layers)]
        return ROUNDED.get(max(set(names), key=names.count) or "")


@dataclass(frozen=True, slots=True)
class ExportEngine:
    """An engine: the name of its settings file, what goes into it, and the lines that run it.

    `rounds`: it takes a draft in fewer bits, so that a set that only quantises is a draft, too. `run_here`: the files
    are loaded by the project's own tests or `make engines`.
    """

    title: str
    settings_file: str
    settings: Callable[[EngineDraft], Mapping[str, Any]]
    lines: Callable[[EngineDraft], tuple[str, str]]  # language, text
    rounds: bool = False
    run_here: bool = False


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: the folder and its files; `remarks` say what the engine's draft has not of the plan."""

    folder: Path
    kind: Kind
    n_draft_tokens: int
    layer_set: LayerSet | None
    files: tuple[str, ...]
    remarks: tuple[str, ...]


# --- the engines


def _transformers_settings(draft: EngineDraft) -> dict[str, Any]:
    if draft.kind == "text":
        return {"prompt_lookup_num_tokens": draft.n_tokens, "max_matching_ngram_size": 3}
    return {"num_assistant_tokens": draft.n_tokens, "num_assistant_tokens_schedule": "constant"}


def _transformers_lines(draft: EngineDraft) -> tuple[str, str]:
    values = _transformers_settings(draft)
    loaded = 'draft = AutoModelForCausalLM.from_pretrained("draft", dtype="auto")\n' if draft.kind == "draft" else ""
    settings = "".join(f"draft.generation_config.{name} = {value!r}\n" for name, value in values.items())
    given = "assistant_model=draft" if draft.kind == "draft" else ", ".join(f"{k}={v!r}" for k, v in values.items())
    text = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({draft.target!r})\n"
        f'target = AutoModelForCausalLM.from_pretrained({draft.target!r}, dtype="auto")\n'
        f"{loaded}{settings if draft.kind == 'draft' else ''}"
        'inputs = tokenizer("def fibonacci(n):", return_tensors="pt")\n'
        f"ids = target.generate(**inputs, {given}, do_sample=False, max_new_tokens=128)\n"
        "print(tokenizer.decode(ids[0]))"
    )
    return "python", text


def _llamacpp_settings(draft: EngineDraft) -> dict[str, Any]:
    if draft.kind == "text":
        return {"spec-type": "ngram-simple"}
    return {"model-draft": "draft.gguf", "spec-type": "draft-simple", "spec-draft-n-max": draft.n_tokens}


def _llamacpp_lines(draft: EngineDraft) -> tuple[str, str]:
    options = {("md" if name == "model-draft" else name): value for name, value in _llamacpp_settings(draft).items()}
    flags = [f"{'-' if name == 'md' else '--'}{name} {value}" for name, value in options.items()]
    target = draft.target if draft.target.endswith(".gguf") else "TARGET.gguf"
    return "bash", " ".join(["llama-server", f"-m {target}", *flags])


def _vllm_settings(draft: EngineDraft) -> dict[str, Any]:
    if draft.kind == "text":
        return {"method": "ngram", "num_speculative_tokens": draft.n_tokens, "prompt_lookup_max": 5}
    values: dict[str, Any] = {"method": "draft_model", "model": "draft", "num_speculative_tokens": draft.n_tokens}
    if draft.lengths:
        values["num_speculative_tokens_per_batch_size"] = [list(each) for each in draft.lengths]
    return values


def _vllm_lines(draft: EngineDraft) -> tuple[str, str]:
    return "bash", f'vllm serve {draft.target} --speculative-config "$(cat speculative_config.json)"'


def _openvino_settings(draft: EngineDraft) -> dict[str, Any]:
    more = {"max_ngram_size": 3} if draft.kind == "text" else {}
    return {"num_assistant_tokens": draft.n_tokens, **more}


def _openvino_lines(draft: EngineDraft) -> tuple[str, str]:
    with_draft = draft.kind == "draft"
    text = (
        f"# Once: optimum-cli export openvino -m {draft.target} target_ir\n"
        + ("# Once: optimum-cli export openvino -m draft draft_ir\n" if with_draft else "")
        + "import openvino_genai as genai\n\n"
        + ('pipeline = genai.LLMPipeline("target_ir", "CPU", ')
        + ('draft_model=genai.draft_model("draft_ir", "CPU"))\n' if with_draft else "prompt_lookup=True)\n")
        + "config = genai.GenerationConfig()\nconfig.max_new_tokens = 128\n"
        + "".join(f"config.{name} = {value}\n" for name, value in _openvino_settings(draft).items())
        + 'print(pipeline.generate("def fibonacci(n):", config))'
    )
    return "python", text


def _sglang_settings(draft: EngineDraft) -> dict[str, Any]:
    if draft.kind == "text":
        return {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": draft.n_tokens}
    return {
        "speculative-algorithm": "STANDALONE",
        "speculative-draft-model-path": "draft",
        "speculative-num-steps": draft.n_tokens,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": draft.n_tokens + 1,
    }


def _sglang_lines(draft: EngineDraft) -> tuple[str, str]:
    flags = " ".join(f"--{name} {value}" for name, value in _sglang_settings(draft).items())
    return "bash", f"python -m sglang.launch_server --model-path {draft.target} {flags}"


def _tensorrt_settings(draft: EngineDraft) -> dict[str, Any]:
    if draft.kind == "text":
        values: dict[str, Any] = {"decoding_type": "NGram", "max_draft_len": draft.n_tokens}
    else:
        values = {"decoding_type": "DraftTarget", "max_draft_len": draft.n_tokens, "speculative_model": "draft"}
    return {"speculative_config": values}


def _tensorrt_lines(draft: EngineDraft) -> tuple[str, str]:
    return "bash", f"trtllm-serve {draft.target} --extra_llm_api_options settings.json  # JSON is YAML, too"


ENGINES: Mapping[str, ExportEngine] = {
    "transformers": ExportEngine(
        "transformers", "settings.json", _transformers_settings, _transformers_lines, run_here=True
    ),
    "llamacpp": ExportEngine("llama.cpp", "settings.json", _llamacpp_settings, _llamacpp_lines, rounds=True),
    "vllm": ExportEngine("vLLM", "speculative_config.json", _vllm_settings, _vllm_lines),
    "openvino": ExportEngine("OpenVINO GenAI", "settings.json", _openvino_settings, _openvino_lines),
    "sglang": ExportEngine("SGLang", "settings.json", _sglang_settings, _sglang_lines),
    "tensorrt-llm": ExportEngine("TensorRT-LLM", "settings.json", _tensorrt_settings, _tensorrt_lines),
}


# --- from a plan to what is written


def export(
    found: FoundPlan,
    model: str,
    engine: str,
    out: Path,
    store: Store | None = None,
    on_step: OnStep = no_step,
) -> Exported:
    """Write a plan as an engine's files into a new folder, of which nothing is left where it fails.

    Args:   model: the target's name, as for `load`. engine: one of ENGINES. store: of the trials by which a set at
            equal distance is chosen, and of the measured costs by which draft lengths are; None: neither is known.
    Raises: InvalidInput: the folder exists, or the engine has no way to draft as the plan does. LayerSetError: the set
            is another model's. UnsupportedModel: its layers cannot be put together anew. ModelNotFound: the model
            cannot be read. OutputError: the folder cannot be written.
    """
    if engine not in ENGINES:
        raise InvalidInput(f"there is no engine {engine!r}: export to one of {', '.join(ENGINES)}")
    refuse_existing(out)
    source = resolve(model)
    folder = local_folder(source, on_step)
    reads_it = source.kind != "gguf" or engine == "llamacpp"
    target = source.location if reads_it else str(folder)
    draft = draft_of(found, Path(model).name, target, folder, ENGINES[engine], store)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{out.name}.", dir=out.parent, ignore_cleanup_errors=True
        ) as unfinished:
            remarks = _write(draft, engine, folder, Path(unfinished), on_step)
            files = tuple(sorted(str(p.relative_to(unfinished)) for p in Path(unfinished).rglob("*") if p.is_file()))
            Path(unfinished).chmod(0o755)
            refuse_existing(out)
            os.rename(unfinished, out)
    except OSError as error:
        raise OutputError(f"{out} cannot be written ({first_line(error)}): choose another --out") from error
    return Exported(out, draft.kind, draft.n_tokens, draft.layer_set, files, remarks)


def refuse_existing(out: Path) -> None:
    """Raises: InvalidInput: something is there already."""
    if os.path.lexists(out):
        raise InvalidInput(f"{out} exists already: name a new folder with --out, or remove it first")


def draft_of(
    found: FoundPlan, name: str, target: str, folder: Path, engine: ExportEngine, store: Store | None
) -> EngineDraft:
    """Return what the engine drafts with in place of the plan's own draft.

    Raises: as `export`.
    """
    plan, record = found.plan, found.plan.layer_set
    config = supported_config(folder)
    n_layers = int(config.num_hidden_layers)
    layer_set = None if record is None else record.layer_set
    if layer_set is None and plan.method == "adaptive":
        layer_set = LayerSet(n_layers).filled(str(plan.settings.get("draft_format", "int4")))
    if layer_set is not None and (layer_set.n_skipped or (layer_set.formats and engine.rounds)):
        own = fingerprint(folder)
        if layer_set.n_layers != n_layers or (record is not None and record.fingerprint not in (None, own)):
            raise LayerSetError(
                f"the layer set was tuned on another model than {name} ({own}): export it with the model it is of"
            )
        check_restackable(config)
        trials = (
            store.trials(record.job, record.task) if store is not None and record is not None and record.job else []
        )
        chosen = alternating(layer_set, is_parallel(config), trials)
        acceptance = None
        if record is not None:
            acceptance = record.matchness if record.acceptance_rate is None else record.acceptance_rate
        costs = _stored_costs(store, found, own)
        lengths = lengths_by_load(chosen, acceptance, costs)
        n_tokens = max([1, *(k for _, _, k in lengths)])
        return EngineDraft(found, name, target, "draft", n_tokens, lengths, chosen, distance(layer_set, chosen))
    if plan.method in TEXT_METHODS:
        return EngineDraft(found, name, target, "text", int(plan.settings.get("max_draft_length", 10)))
    if layer_set is not None:
        raise InvalidInput(
            f"this plan's draft leaves out no sub-layer, it only has fewer bits, which {engine.title} gets by settings"
            " of its own: export a layer set that skips, or --to llamacpp"
        )
    raise InvalidInput(
        f"this plan decodes with {plan.method}, for which {engine.title} has nothing: export a version with a layer set"
        " or with prompt-lookup (`swiftopt layers list` shows those with a layer set)"
    )


def alternating(layer_set: LayerSet, parallel: bool, trials: Sequence[Trial]) -> LayerSet:
    """Return the set itself where it is a checkpoint, else the nearest one that is.

    Of several at equal distance it is the one with the highest mean matchness among those that the search has tried,
    and where it has tried none the first that `nearest` lists.
    """
    tried: dict[LayerSet, list[float]] = {}
    for trial in trials:
        tried.setdefault(replace(trial.layer_set, formats=()), []).append(trial.matchness)
    return max(
        nearest(layer_set, parallel),
        key=lambda each: fmean(tried.get(replace(each, formats=()), [-1.0])),
    )


def lengths_by_load(
    layer_set: LayerSet, acceptance: float | None, costs: CostProfile | None
) -> tuple[tuple[int, int, int], ...]:
    """Return (fewest requests, most, draft tokens) with the most tokens per second, for every load.

    A round of k draft tokens commits 1 + a + … + a^k tokens on average, a being the acceptance, and costs k draft
    passes and one of the target over k + 1 rows per request. Without measured costs a draft pass costs its share of the
    sub-layers, and a target pass the same at any width: then there is one length for all loads.
    """
    if acceptance is None:
        return ((1, LOADS[-1], GUESSED_LENGTH),)
    plain = replace(layer_set, formats=())  # what the engine runs; formats are ours
    share = 1 - layer_set.n_skipped / (2 * layer_set.n_layers)

    def speed(n_requests: int, k: int) -> float:
        tokens = sum(acceptance**i for i in range(k + 1))
        if costs is None:
            return tokens / (k * share + 1)
        drafting = k * costs.draft_cost(plain, n_requests)
        return tokens * costs.verify_cost(n_requests) / (drafting + costs.verify_cost(n_requests * (k + 1)))

    found: list[tuple[int, int, int]] = []
    lowest = 1
    for n_requests in LOADS if costs is not None else (LOADS[-1],):
        k = max(range(LONGEST + 1), key=lambda k: speed(n_requests, k))
        if found and found[-1][2] == k:
            found[-1] = (found[-1][0], n_requests, k)
        else:
            found.append((lowest, n_requests, k))
        lowest = n_requests + 1
    return tuple(found)


def _stored_costs(store: Store | None, found: FoundPlan, own: str) -> CostProfile | None:
    from ..models.costs import context_bucket
    from ..tasks.recipes import TYPICAL_POSITIONS

    record = found.plan.layer_set
    if store is None or record is None or record.device is None or record.dtype is None:
        return None
    return store.cost_profile(own, record.device, record.dtype, context_bucket(TYPICAL_POSITIONS))


def _write(draft: EngineDraft, engine: str, folder: Path, out: Path, on_step: OnStep) -> tuple[str, ...]:
    """Write all files into an empty folder; return the remarks."""
    row = ENGINES[engine]
    remarks: list[str] = []
    if draft.lengths and not any(k for _, _, k in draft.lengths):
        remarks.append("by the costs measured in swiftopt this draft is not worth its time: compare it with no draft")
    if draft.layer_set is not None:
        on_step("writing the draft's checkpoint")
        checkpoint = out / "draft"
        checkpoint.mkdir()
        config = supported_config(folder)
        write_restacked(folder, pairs_of(draft.layer_set, is_parallel(config)), checkpoint)
        if draft.n_changed:
            remarks.append(
                f"the plan's set does not alternate attention and MLP: the draft is of the nearest one that does,"
                f" {draft.n_changed} sub-layers off"
            )
        if engine in GGUF_DRAFTS:
            on_step("writing the draft as GGUF")
            write_gguf(checkpoint, out / "draft.gguf", draft.gguf_type or stored_type(checkpoint))
            shutil.rmtree(checkpoint)
        elif draft.layer_set.formats:
            remarks.append("the plan's draft has fewer bits in swiftopt: here it has the model's own weights")
    settings = row.settings(draft)
    for name, value in ((row.settings_file, settings), (SUMMARY, summary(draft, engine, settings))):
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(readme(draft, engine, remarks), encoding="utf-8")
    return tuple(remarks)


def summary(draft: EngineDraft, engine: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what programs read of the folder, whatever the engine; `draft` is a path in it."""
    path = None if draft.kind == "text" else "draft.gguf" if engine in GGUF_DRAFTS else "draft"
    return {
        "schema": SCHEMA,
        "engine": engine,
        "kind": draft.kind,
        "draft": path,
        "draft_tokens": draft.n_tokens,
        "model": draft.name,
        "version": draft.found.version,
        "settings": dict(settings),
    }


def readme(draft: EngineDraft, engine: str, remarks: Sequence[str] = ()) -> str:
    """Return the page beside the files: what they are, how they are run, what to expect."""
    row, plan, record = ENGINES[engine], draft.found.plan, draft.found.plan.layer_set
    language, lines = row.lines(draft)
    if draft.layer_set is None:
        what = "Drafts come from earlier text, by the engine's own n-grams: no checkpoint is needed."
    else:
        left = draft.layer_set.n_layers - len(draft.layer_set.skip_attn)
        what = (
            f"The draft is the model with {left} of its {draft.layer_set.n_layers} layers, put together from the"
            " sub-layers that the plan keeps; the weights are the model's own."
        )
    known = [f"{word} {value:.2f}" for word, value in (
        ("acceptance", record and record.acceptance_rate),
        ("matchness", record and record.matchness),
        ("speed-up", plan.measured_speedup),
    ) if value is not None]  # fmt: skip
    where = (
        " on " + ", ".join(filter(None, (plan.device or (record.device if record else None), plan.dtype)))
        if known
        else ""
    )
    measured = f"{', '.join(known)}{where}, verdict {plan.verdict}" if known else "nothing"
    proof = (
        "Loading these files there is one of swiftopt's tests; their speed there was not measured."
        if row.run_here
        else f"Not run: these files were not loaded in {row.title} when they were written."
    )
    return "\n".join(
        [
            f"# {draft.name} in {row.title}",
            "",
            f"Written by `swiftopt export` from version {draft.found.version} of a stored plan ({plan.method}). {what}",
            *(f"\nNote: {remark}." for remark in remarks),
            "",
            "## Run it",
            "",
            f"In this folder; {row.settings_file} holds the same settings.",
            "",
            f"```{language}",
            lines,
            "```",
            "",
            "## What to expect",
            "",
            f"- Draft tokens per round: {draft.n_tokens}."
            + ("" if known else " It is a guess: no acceptance was measured."),
            f"- Measured in swiftopt: {measured}. There a draft reads the target's keys and values; in another engine"
            " it has its own, so measure acceptance and speed again.",
            "- The output is the target's own: every drafted token is checked by the target. Passes over several rows"
            " may round otherwise than plain decoding, so that near ties can fall the other way.",
            f"- {proof}",
            "",
        ]
    )
