"""Exports a stored plan as another engine's files: a draft checkpoint, the engine's settings, and a README.

ENGINES lists the engines. The README has the commands and the measured figures. The folder gets its final name when it
is complete. Module `drafts` chooses what the engine drafts with.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from safetensors import SafetensorError

from ..core.errors import InvalidInput, OutputError, first_line
from ..core.layer_sets import LayerSet
from ..core.records import FoundPlan
from ..core.settings import EXPORT_SCHEMA, EXPORT_SUMMARY
from ..core.types import Prompt
from ..models.cache import share
from ..models.config_layout import is_parallel
from ..models.gguf_files import stored_type, write_gguf
from ..models.quantised import BITS
from ..models.restacked import NO_OPS_CODE, pairs_of, write_restacked
from ..models.saved import OnStep, no_step, refuse_existing, supported_config
from ..models.sources import local_folder, resolve
from ..store import Store
from .drafts import LOADS, MEASURED, EngineDraft, ExportEngine, Kind, Speculation, planned_draft, with_checkpoint

SHARED = "layer_set.json"  # File with the plan's layer set, which swiftopt.custom_generate loads.
PROPOSER = "swiftopt.engines.vllm_drafts.TextProposer"  # Class that drafts from earlier text inside vLLM.
NGRAM_TOKENS = 3  # Length of the n-gram looked up in earlier text, in tokens.


@dataclass(frozen=True, slots=True)
class Exported:
    """Summary of an export; `remarks` say how the engine's draft differs from the plan's."""

    kind: Kind
    n_draft_tokens: int
    layer_set: LayerSet | None
    files: tuple[str, ...]
    remarks: tuple[str, ...]


# --- the engines


def _code_block(language: Literal["python", "bash"], code: str, when: str = "") -> str:
    """Return code as a Markdown block; `when` introduces it if there are several ways to run the engine."""
    return (f"{when}:\n\n" if when else "") + f"```{language}\n{code}\n```\n"


def _transformers_settings(speculation: Speculation) -> dict[str, Any]:
    if speculation.kind == "text":
        return {"prompt_lookup_num_tokens": speculation.n_tokens, "max_matching_ngram_size": NGRAM_TOKENS}
    return {
        "num_assistant_tokens": speculation.n_tokens,
        "num_assistant_tokens_schedule": "constant",
        # Always set: without it, transformers ends drafts at its own default threshold.
        "assistant_confidence_threshold": speculation.confidence,
    }


def _transformers_commands(draft: EngineDraft) -> list[str]:
    loading = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({draft.target!r})\n"
        f'target = AutoModelForCausalLM.from_pretrained({draft.target!r}, dtype="auto")\n'
    )
    decoding = (
        'inputs = tokenizer("def fibonacci(n):", return_tensors="pt")\n'
        "ids = target.generate(**inputs, {arguments}, do_sample=False, max_new_tokens=128)\n"
        "print(tokenizer.decode(ids[0]))"
    )
    settings = _transformers_settings(draft)
    if draft.kind == "text":
        arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return [_code_block("python", loading + decoding.format(arguments=arguments))]
    blocks = []
    if draft.shared is not None:
        arguments = f"custom_generate=swiftopt.custom_generate, layer_set={SHARED!r}"
        code = "import swiftopt\n" + loading + decoding.format(arguments=arguments)
        when = (
            "With swiftopt next to transformers (`pip install swiftopt`; recommended): drafts read the target's keys"
            " and values, as they did when the plan was tuned, one sequence at a time"
        )
        blocks.append(_code_block("python", code, when))
    if draft.layer_set is not None:
        loading += 'draft = AutoModelForCausalLM.from_pretrained("draft", dtype="auto")\n'
        loading += "".join(f"draft.generation_config.{name} = {value!r}\n" for name, value in settings.items())
        code = loading + decoding.format(arguments="assistant_model=draft")
        when = "With transformers alone: the draft has its own keys and values, and fewer of its tokens are accepted"
        blocks.append(_code_block("python", code, when))
    return blocks


def _llamacpp_settings(speculation: Speculation) -> dict[str, Any]:
    n_tokens, confidence = speculation.n_tokens, speculation.confidence
    if speculation.kind == "text":
        sizes = {"spec-ngram-simple-size-n": NGRAM_TOKENS, "spec-ngram-simple-size-m": n_tokens}
        return {"spec-type": "ngram-simple", **sizes}
    threshold = {} if confidence is None else {"spec-draft-p-min": confidence}
    return {"model-draft": "draft.gguf", "spec-type": "draft-simple", "spec-draft-n-max": n_tokens, **threshold}


def _llamacpp_commands(draft: EngineDraft) -> list[str]:
    options = {"md" if name == "model-draft" else name: value for name, value in _llamacpp_settings(draft).items()}
    target = draft.target if draft.target.endswith(".gguf") else "TARGET.gguf"
    return [_code_block("bash", f"llama-server -m {quote(target)} {_flags(options)}")]


def _flags(options: Mapping[str, Any]) -> str:
    return " ".join(f"{'-' if name == 'md' else '--'}{name} {value}" for name, value in options.items())


def _vllm_settings(speculation: Speculation) -> dict[str, Any]:
    n_tokens = {"num_speculative_tokens": speculation.n_tokens}
    if speculation.own_text:
        return {"method": "custom_class", "model": PROPOSER, **n_tokens}
    if speculation.kind == "text":
        return {"method": "ngram", **n_tokens, "prompt_lookup_min": 1, "prompt_lookup_max": NGRAM_TOKENS}
    by_load = [list(length) for length in speculation.lengths]
    lengths = {"num_speculative_tokens_per_batch_size": by_load} if by_load else {}
    return {"method": "draft_model", "model": "draft", **n_tokens, **lengths}


def _vllm_commands(draft: EngineDraft) -> list[str]:
    trust = "--trust-remote-code " if draft.no_ops else ""
    command = f'vllm serve {quote(draft.target)} {trust}--speculative-config "$(cat speculative_config.json)"'
    if draft.kind != "text":
        return [_code_block("bash", command)]
    config = json.dumps(_vllm_settings(replace(draft, own_text=True)))
    with_swiftopt = _code_block(
        "bash",
        f"vllm serve {quote(draft.target)} --speculative-config '{config}'",
        "With swiftopt in vLLM's environment (`pip install --no-deps swiftopt pydantic`): its drafts from earlier text,"
        " as long as they are worth their time",
    )
    if draft.own_text:
        return [with_swiftopt]
    return [with_swiftopt, _code_block("bash", command, "With vLLM alone: its n-grams")]


def _openvino_settings(speculation: Speculation) -> dict[str, Any]:
    if speculation.kind == "text":
        return {"num_assistant_tokens": speculation.n_tokens, "max_ngram_size": NGRAM_TOKENS}
    if speculation.confidence:  # OpenVINO accepts a draft length or a confidence threshold, not both.
        return {"assistant_confidence_threshold": speculation.confidence}
    return {"num_assistant_tokens": speculation.n_tokens}


def _openvino_commands(draft: EngineDraft) -> list[str]:
    target, with_draft = draft.target, draft.kind == "draft"
    once = ""
    if not target.endswith(".gguf"):
        once, target = f"# Once: optimum-cli export openvino -m {quote(target)} target\n", "target"
    conversion = """
if not Path("draft/openvino_model.xml").is_file():  # Once: OpenVINO writes its own format next to the GGUF file.
    Path("draft").mkdir(exist_ok=True)
    Path("draft/draft.gguf").symlink_to(Path("draft.gguf").resolve())
    genai.LLMPipeline("draft/draft.gguf", "CPU", enable_save_ov_model=True)
"""
    code = (
        once
        + ("from pathlib import Path\n\n" if with_draft else "")
        + "import openvino_genai as genai\n"
        + (conversion if with_draft else "\n")
        + f"pipeline = genai.LLMPipeline({target!r}, "
        + ('"CPU", draft_model=genai.draft_model("draft", "CPU"))\n' if with_draft else '"CPU", prompt_lookup=True)\n')
        + "config = genai.GenerationConfig()\nconfig.max_new_tokens = 128\n"
        + "".join(f"config.{name} = {value}\n" for name, value in _openvino_settings(draft).items())
        + 'print(pipeline.generate("def fibonacci(n):", config))'
    )
    return [_code_block("python", code)]


def _sglang_settings(speculation: Speculation) -> dict[str, Any]:
    if speculation.kind == "text":
        return {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": speculation.n_tokens}
    return {
        "speculative-algorithm": "STANDALONE",
        "speculative-draft-model-path": "draft",
        "speculative-num-steps": speculation.n_tokens,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": speculation.n_tokens + 1,
    }


def _sglang_commands(draft: EngineDraft) -> list[str]:
    command = f"python -m sglang.launch_server --model-path {quote(draft.target)} {_flags(_sglang_settings(draft))}"
    return [_code_block("bash", command)]


def _tensorrt_settings(speculation: Speculation) -> dict[str, Any]:
    is_text = speculation.kind == "text"
    config = {"decoding_type": "NGram" if is_text else "DraftTarget", "max_draft_len": speculation.n_tokens}
    return {"speculative_config": config if is_text else {**config, "speculative_model": "draft"}}


def _tensorrt_commands(draft: EngineDraft) -> list[str]:
    command = f"trtllm-serve {quote(draft.target)} --extra_llm_api_options settings.json  # JSON is valid YAML."
    return [_code_block("bash", command)]


ENGINES: Mapping[str, ExportEngine] = {
    "transformers": ExportEngine(
        "transformers",
        "settings.json",
        _transformers_settings,
        _transformers_commands,
        shares=True,
        is_tested=True,
        confidence=0.4,  # transformers' default threshold.
    ),
    "llamacpp": ExportEngine("llama.cpp", "settings.json", _llamacpp_settings, _llamacpp_commands, "gguf"),
    "vllm": ExportEngine(
        "vLLM", "speculative_config.json", _vllm_settings, _vllm_commands, "compressed-tensors", no_ops=True
    ),
    "openvino": ExportEngine("OpenVINO GenAI", "settings.json", _openvino_settings, _openvino_commands, "gguf"),
    "sglang": ExportEngine("SGLang", "settings.json", _sglang_settings, _sglang_commands, "compressed-tensors"),
    "tensorrt-llm": ExportEngine("TensorRT-LLM", "settings.json", _tensorrt_settings, _tensorrt_commands),
}


# --- the files


def export(
    found: FoundPlan,
    model: str,
    engine: str,
    out: Path,
    store: Store | None = None,
    on_step: OnStep = no_step,
    prompts: Sequence[Prompt] = (),
) -> Exported:
    """Write a plan as an engine's files into a new folder, which is removed on failure.

    Args:   model: the target's name, as for `load`. engine: one of ENGINES. store: has the search's trials, which
            choose among equally near sets, and measured costs, which choose draft lengths; None: neither is used.
            prompts: if the draft is a checkpoint, its acceptance on these chooses the set and the draft lengths.
    Raises: InvalidInput: the folder exists, or the engine cannot draft as the plan does. LayerSetError: the set belongs
            to another model. UnsupportedModel: no draft can be built from the model's layers. ModelNotFound: the model
            cannot be read. OutputError: the folder cannot be written.
    """
    if engine not in ENGINES:
        raise InvalidInput(f"there is no engine {engine!r}: export to one of {', '.join(ENGINES)}")
    row = ENGINES[engine]
    refuse_existing(out)
    source = resolve(model)
    folder = local_folder(source, on_step)
    loads_source = source.kind in ("folder", "hub") or (source.kind == "gguf" and row.checkpoint_format == "gguf")
    target = source.location if loads_source else str(folder)
    swiftopt_plan, n_tokens = _swiftopt_plan(found, engine)
    draft = planned_draft(swiftopt_plan, Path(model).name, target, folder, row)
    if draft.layer_set is not None:
        draft = with_checkpoint(draft, folder, row, store, prompts, on_step)
    if n_tokens is not None:
        own_text = found.plan.settings.get("drafts") == "own-text"
        lengths = ((1, LOADS[-1], n_tokens),)
        draft = replace(draft, found=found, n_tokens=n_tokens, lengths=lengths, own_text=own_text)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{out.name}.", dir=out.parent, ignore_cleanup_errors=True
        ) as unfinished:
            remarks = _write(draft, engine, folder, Path(unfinished), on_step)
            files = tuple(sorted(str(p.relative_to(unfinished)) for p in Path(unfinished).rglob("*") if p.is_file()))
            share(Path(unfinished))
            refuse_existing(out)
            os.rename(unfinished, out)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{out} cannot be written ({first_line(error)}): choose another --out") from error
    return Exported(draft.kind, draft.n_tokens, draft.layer_set, files, remarks)


def _swiftopt_plan(found: FoundPlan, engine: str) -> tuple[FoundPlan, int | None]:
    """Return the plan of swiftopt that is nearest to a plan tuned in the engine, and the draft length of that plan.

    A plan tuned in swiftopt is returned unchanged, with None.

    Raises: InvalidInput: the plan is for another engine, or its draft cannot be written.
    """
    plan = found.plan
    if plan.engine is None:
        return found, None
    if plan.engine != engine:
        raise InvalidInput(
            f"version {found.version} is for {plan.engine}: export it --to {plan.engine}, or export another version"
        )
    drafts = plan.settings.get("drafts")
    if drafts == "shared":
        return replace(found, plan=replace(plan, engine=None)), None
    text: tuple[str, dict[str, Any]] = ("prompt-lookup", {})
    nearest = {"text": text, "own-text": text, "bits": ("adaptive", {"draft_format": "int4"}), "layers": ("swift", {})}
    if drafts not in nearest:
        what = f"drafts with {plan.draft_model}" if plan.draft_model else f"decodes with {plan.method}"
        raise InvalidInput(f"version {found.version} {what}, which needs no files: see its settings")
    method, settings = nearest[drafts]
    plan_of_swiftopt = replace(plan, method=method, settings=settings, engine=None)
    return replace(found, plan=plan_of_swiftopt), int(plan.settings["draft_tokens"])


def _write(draft: EngineDraft, engine: str, folder: Path, out: Path, on_step: OnStep) -> tuple[str, ...]:
    """Write all files into an empty folder; return the remarks."""
    row = ENGINES[engine]
    remarks: list[str] = []
    if draft.lengths and not any(k for _, _, k in draft.lengths):
        remarks.append("with the costs measured in swiftopt, plain decoding is faster than this draft: compare both")
    if draft.layer_set is not None:
        remarks += _write_checkpoint(draft, draft.layer_set, engine, folder, out, on_step)
    elif draft.kind == "draft":
        remarks.append(f"there is no checkpoint for {row.title} alone: {SHARED} is for swiftopt inside it")
    settings = {} if draft.kind == "draft" and draft.layer_set is None else row.settings(draft)
    contents = {row.settings_file: settings, EXPORT_SUMMARY: summary(draft, engine, settings)}
    if draft.shared is not None:
        contents[SHARED] = draft.shared.to_json()
    for name, value in contents.items():
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(readme(draft, engine, remarks), encoding="utf-8")
    return tuple(remarks)


def _write_checkpoint(
    draft: EngineDraft, layer_set: LayerSet, engine: str, folder: Path, out: Path, on_step: OnStep
) -> list[str]:
    """Write the draft's weights in the engine's format; return remarks on how they differ from the plan's draft."""
    on_step("writing the draft's checkpoint")
    row, checkpoint = ENGINES[engine], out / "draft"
    checkpoint.mkdir()
    pairs = pairs_of(layer_set, is_parallel(supported_config(folder)), draft.no_ops)
    formats_set = layer_set if row.checkpoint_format == "compressed-tensors" else None
    written_format = write_restacked(folder, pairs, checkpoint, formats_set)
    reason = "the plan's set does not alternate attention and MLP:"
    remarks = []
    if draft.no_ops:
        remarks.append(
            f"{reason} some of the draft's layers lack one of them, which {row.title} loads with --trust-remote-code;"
            f" this runs swiftopt's config, draft/{NO_OPS_CODE.name}"
        )
    if draft.n_changed:
        remarks.append(f"{reason} the draft is the nearest set that does, with {draft.n_changed} sub-layers changed")
    if row.checkpoint_format == "gguf":
        on_step("writing the draft as GGUF")
        unrounded = "F16" if engine == "openvino" else stored_type(checkpoint)  # OpenVINO cannot read BF16 GGUF files.
        write_gguf(checkpoint, out / "draft.gguf", gguf_type(layer_set) or unrounded)
        shutil.rmtree(checkpoint)
    elif written_format is not None:
        remarks.append(
            f"the draft's linear maps are rounded to {written_format} (compressed-tensors); its other weights are the"
            " model's"
        )
    elif layer_set.formats:
        remarks.append("in swiftopt, the plan's draft has fewer bits; here it has the model's own weights")
    if layer_set.experts:
        remarks.append("in swiftopt, the plan's draft runs fewer experts; here it runs as many as the model")
    return remarks


def gguf_type(layer_set: LayerSet) -> str | None:
    """Return the GGUF type nearest to the most common format of the draft's MLPs; None: the stored type."""
    formats = [layer_set.format_of("mlp", layer) for layer in range(layer_set.n_layers)]
    most_common = max(set(formats), key=formats.count)
    return None if most_common is None else f"Q{BITS[most_common]}_0"


def summary(draft: EngineDraft, engine: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the summary file, which has the same fields for every engine.

    Its `draft` and `layer_set` are paths in the folder.
    """
    is_gguf = ENGINES[engine].checkpoint_format == "gguf"
    path = None if draft.layer_set is None else "draft.gguf" if is_gguf else "draft"
    return {
        "schema": EXPORT_SCHEMA,
        "engine": engine,
        "kind": draft.kind,
        "draft": path,
        "draft_tokens": draft.n_tokens,
        "model": draft.name,
        "version": draft.found.version,
        "settings": dict(settings),
        "acceptance": None if draft.acceptance is None else round(draft.acceptance, 4),
        "acceptance_from": draft.acceptance_from,
        "layer_set": SHARED if draft.shared is not None else None,
    }


README = """\
# {draft.name} in {row.title}

Written by `swiftopt export` from version {draft.found.version} of a stored plan ({draft.found.plan.method}). {what}
{remarks}
## Run it

Run this in the folder of this file; {row.settings_file} has the same settings.

{commands}
## What to expect

- Draft tokens per round: {draft.n_tokens}.{guess}
- Measured in swiftopt: {measured}. There a draft reads the target's keys and values; a draft checkpoint has its own.
{acceptance}- The output is the target's own, because the target verifies every drafted token. Passes over several \
rows may round differently from plain decoding, so the choice between nearly equal probabilities can differ.
- {proof}
"""


def readme(draft: EngineDraft, engine: str, remarks: Sequence[str] = ()) -> str:
    """Return the README: what the files are, how to run them, and what speed to expect."""
    row = ENGINES[engine]
    acceptance = ""
    if draft.acceptance is not None:
        hint = "" if draft.acceptance_from == MEASURED else " This estimate is too high: use --stream to measure it."
        acceptance = f"- Acceptance as a checkpoint: {draft.acceptance:.2f}, {draft.acceptance_from}.{hint}\n"
    return README.format(
        draft=draft,
        row=row,
        what=_what_drafts(draft),
        remarks="".join(f"\nNote: {remark}.\n" for remark in remarks),
        commands="\n".join(row.commands(draft)),
        guess="" if acceptance or draft.kind == "text" else " This is a default: no acceptance was measured.",
        measured=_measured(draft.found),
        acceptance=acceptance,
        proof=f"swiftopt's tests load such files in {row.title}; the speed of these there was not measured."
        if row.is_tested
        else f"Not run: these files were not loaded in {row.title} when they were written.",
    )


def _what_drafts(draft: EngineDraft) -> str:
    if draft.kind == "draft" and draft.layer_set is None:
        return "The draft is the model itself with fewer bits or without some sub-layers, made when it is first used."
    if draft.layer_set is None:
        return "Drafts come from earlier text, by the engine's own n-grams: no checkpoint is needed."
    if draft.no_ops:
        return f"The draft is the model without {draft.layer_set.n_skipped} of its attentions and MLPs."
    n_kept = draft.layer_set.n_layers - len(draft.layer_set.skip_attn)
    return (
        f"The draft is the model with {n_kept} of its {draft.layer_set.n_layers} layers, composed of the sub-layers"
        " that the plan keeps."
    )


def _measured(found: FoundPlan) -> str:
    """Describe what swiftopt measured for the plan, and on which device."""
    plan, record = found.plan, found.plan.layer_set
    figures = {
        "acceptance": record and record.acceptance_rate,
        "matchness": record and record.matchness,
        "speed-up": plan.measured_speedup,
    }
    words = ", ".join(f"{name} {value:.2f}" for name, value in figures.items() if value is not None)
    if not words:
        return "nothing"
    place = ", ".join(filter(None, (plan.device or (record.device if record else None), plan.dtype)))
    return f"{words} on {place}, verdict {plan.verdict}"
