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
from ..core.errors import InvalidInput, LayerSetError, OutputError, UnsupportedModel
from ..core.records import FoundPlan, LayerSetRecord
from ..core.settings import FORMATS, SwiftSettings
from ..core.types import LayerSet, Prompt, Trial
from ..models.fingerprint import fingerprint
from ..models.gguf_weights import stored_type, write_gguf
from ..models.loading import load
from ..models.restacked import (
    NO_OPS_CODE,
    check_restackable,
    distance,
    is_parallel,
    nearest,
    pairs_of,
    takes_fewer_bits,
    takes_no_ops,
    write_restacked,
)
from ..models.saved import OnStep, first_line, no_step, supported_config
from ..models.sources import local_folder, resolve
from ..store import Store
from .acceptance import OwnAcceptance, own_acceptance

Kind = Literal["draft", "text"]  # what a plan drafts with elsewhere: a checkpoint, or earlier text

SCHEMA = "swiftopt.export/1"
SUMMARY = "export.json"
SHARED = "layer_set.json"  # the plan's own set, for swiftopt.custom_generate
PROPOSER = "swiftopt.engines.vllm_drafts.TextProposer"  # drafts from text in vLLM
Writes = Literal["stored", "compressed-tensors", "gguf"]  # a draft's weights: the model's own, or in fewer bits, too

LONGEST = 16  # draft tokens of a round
BITS_SHARE: Mapping[str | None, float] = {
    None: 1.0,
    "int8": 0.5,
    **dict.fromkeys(("int4", "int4-64", "int4-32"), 0.25),
}  # of a pass over 16 bits
MEASURED_SETS = 5  # at equal distance, whose acceptance is measured at most
MEASURED = "measured with its own keys and values"
ESTIMATED = "estimated from the plan's, which reads the target's keys and values"
CONFIDENCE = 0.4  # of transformers: below it a draft ends
GUESSED_LENGTH = 5  # where no acceptance was measured
LOADS = (1, 2, 4, 8, 16, 32, 64)  # requests at a time, up to which a draft length is chosen
NGRAM_TOKENS = 3  # of the text's end, looked for in the text before it
TEXT_METHODS = ("prompt-lookup", "adaptive")  # that draft from earlier text
ROUNDED = {"int8": "Q8_0", "int4": "Q4_0", "int4-64": "Q4_0", "int4-32": "Q4_0"}  # our format: that of GGUF


@dataclass(frozen=True, slots=True)
class EngineDraft:
    """What an engine's files are written from. `lengths`: (fewest requests, most, draft tokens) by load, if known.

    `name` is the target's, `target` what an engine reads it from. `layer_set` is that of the checkpoint, if there is
    one; with `no_ops` some of its layers lack one half. `shared` is the plan's own, where the engine can draft with the
    target's keys and values. Below a confidence of `threshold` the plan's drafts end.
    """

    found: FoundPlan
    name: str
    target: str
    kind: Kind
    n_tokens: int
    lengths: tuple[tuple[int, int, int], ...] = ()
    layer_set: LayerSet | None = None
    n_changed: int = 0
    no_ops: bool = False
    shared: LayerSetRecord | None = None
    threshold: float | None = None
    acceptance: float | None = None
    acceptance_from: str | None = None

    @property
    def gguf_type(self) -> str | None:
        """The GGUF type nearest to the format of most of the draft's MLPs; None: as the model is stored."""
        if self.layer_set is None:
            return None
        names = [self.layer_set.format_of("mlp", layer) for layer in range(self.layer_set.n_layers)]
        return ROUNDED.get(max(set(names), key=names.count) or "")


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines to run, in a language; `when` says which way they are, where there are two."""

    language: Literal["python", "bash"]
    text: str
    when: str = ""


@dataclass(frozen=True, slots=True)
class ExportEngine:
    """An engine: the name of its settings file, what goes into it, and the lines that run it.

    `writes`: the draft's form; all but "stored" can have fewer bits, so that a set that only quantises is a draft, too.
    `no_ops`: layers of a draft may lack one half. `shares`: swiftopt runs inside it. `run_here`: the files are loaded
    by the project's own tests or `make engines`.
    """

    title: str
    settings_file: str
    settings: Callable[[EngineDraft], Mapping[str, Any]]
    lines: Callable[[EngineDraft], list[Lines]]  # the ways to run it, the best first
    writes: Writes = "stored"
    no_ops: bool = False
    shares: bool = False
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
        return {"prompt_lookup_num_tokens": draft.n_tokens, "max_matching_ngram_size": NGRAM_TOKENS}
    if draft.layer_set is None:
        return {}
    values: dict[str, Any] = {"num_assistant_tokens": draft.n_tokens, "num_assistant_tokens_schedule": "constant"}
    # Said aloud in any case: left out, transformers ends drafts at a value of its own.
    return {**values, "assistant_confidence_threshold": CONFIDENCE if draft.threshold is None else draft.threshold}


def _transformers_lines(draft: EngineDraft) -> list[Lines]:
    loading = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({draft.target!r})\n"
        f'target = AutoModelForCausalLM.from_pretrained({draft.target!r}, dtype="auto")\n'
    )
    decoding = (
        'inputs = tokenizer("def fibonacci(n):", return_tensors="pt")\n'
        "ids = target.generate(**inputs, {given}, do_sample=False, max_new_tokens=128)\n"
        "print(tokenizer.decode(ids[0]))"
    )
    values = _transformers_settings(draft)
    if draft.kind == "text":
        given = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return [Lines("python", loading + decoding.format(given=given))]
    found = []
    if draft.shared is not None:
        given = f"custom_generate=swiftopt.custom_generate, layer_set={SHARED!r}"
        code = "import swiftopt\n" + loading + decoding.format(given=given)
        when = (
            "With swiftopt beside transformers (`pip install swiftopt`): drafts read the target's keys and values, as"
        )
        when += " they did when the plan was tuned, one sequence at a time; take this where you can"
        found.append(Lines("python", code, when))
    if draft.layer_set is not None:
        loading += 'draft = AutoModelForCausalLM.from_pretrained("draft", dtype="auto")\n'
        loading += "".join(f"draft.generation_config.{name} = {value!r}\n" for name, value in values.items())
        code = loading + decoding.format(given="assistant_model=draft")
        when = "With transformers alone: the draft has keys and values of its own, and fewer of its tokens are accepted"
        found.append(Lines("python", code, when))
    return found


def _llamacpp_settings(draft: EngineDraft) -> dict[str, Any]:
    if draft.kind == "text":
        sizes = {"spec-ngram-simple-size-n": NGRAM_TOKENS, "spec-ngram-simple-size-m": draft.n_tokens}
        return {"spec-type": "ngram-simple", **sizes}
    return {"model-draft": "draft.gguf", "spec-type": "draft-simple", "spec-draft-n-max": draft.n_tokens}


def _llamacpp_lines(draft: EngineDraft) -> list[Lines]:
    options = {("md" if name == "model-draft" else name): value for name, value in _llamacpp_settings(draft).items()}
    flags = [f"{'-' if name == 'md' else '--'}{name} {value}" for name, value in options.items()]
    target = draft.target if draft.target.endswith(".gguf") else "TARGET.gguf"
    return [Lines("bash", " ".join(["llama-server", f"-m {target}", *flags]))]


def _vllm_settings(draft: EngineDraft) -> dict[str, Any]:
    if draft.kind == "text" and draft.found.plan.settings.get("drafts") == "own-text":
        return _proposing(draft)
    if draft.kind == "text":
        sizes = {"prompt_lookup_min": 1, "prompt_lookup_max": NGRAM_TOKENS}
        return {"method": "ngram", "num_speculative_tokens": draft.n_tokens, **sizes}
    values: dict[str, Any] = {"method": "draft_model", "model": "draft", "num_speculative_tokens": draft.n_tokens}
    if draft.lengths:
        values["num_speculative_tokens_per_batch_size"] = [list(each) for each in draft.lengths]
    return values


def _proposing(draft: EngineDraft) -> dict[str, Any]:
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": draft.n_tokens}


def _vllm_lines(draft: EngineDraft) -> list[Lines]:
    trust = "--trust-remote-code " if draft.no_ops else ""
    line = f'vllm serve {draft.target} {trust}--speculative-config "$(cat speculative_config.json)"'
    alone = Lines("bash", line)
    if draft.kind != "text":
        return [alone]
    own = f"vllm serve {draft.target} --speculative-config '{json.dumps(_proposing(draft))}'"
    when = (
        "With swiftopt in vLLM's environment (`pip install --no-deps swiftopt pydantic`): its own drafts from text, as"
        " long as they are worth their time"
    )
    ways = [Lines("bash", own, when)]
    if _vllm_settings(draft)["method"] == "ngram":
        ways.append(replace(alone, when="With vLLM alone: its n-grams"))
    return ways


def _openvino_settings(draft: EngineDraft) -> dict[str, Any]:
    more = {"max_ngram_size": NGRAM_TOKENS} if draft.kind == "text" else {}
    return {"num_assistant_tokens": draft.n_tokens, **more}


def _openvino_lines(draft: EngineDraft) -> list[Lines]:
    target, with_draft = draft.target, draft.kind == "draft"
    once = ""
    if not target.endswith(".gguf"):
        once, target = f"# Once: optimum-cli export openvino -m {target} target\n", "target"
    made = """
if not Path("draft/openvino_model.xml").is_file():  # once: it writes its own form into the folder of the file
    Path("draft").mkdir(exist_ok=True)
    Path("draft/draft.gguf").symlink_to(Path("draft.gguf").resolve())
    genai.LLMPipeline("draft/draft.gguf", "CPU", enable_save_ov_model=True)
"""
    text = (
        once
        + ("from pathlib import Path\n\n" if with_draft else "")
        + "import openvino_genai as genai\n"
        + (made if with_draft else "\n")
        + f"pipeline = genai.LLMPipeline({target!r}, "
        + ('"CPU", draft_model=genai.draft_model("draft", "CPU"))\n' if with_draft else '"CPU", prompt_lookup=True)\n')
        + "config = genai.GenerationConfig()\nconfig.max_new_tokens = 128\n"
        + "".join(f"config.{name} = {value}\n" for name, value in _openvino_settings(draft).items())
        + 'print(pipeline.generate("def fibonacci(n):", config))'
    )
    return [Lines("python", text)]


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


def _sglang_lines(draft: EngineDraft) -> list[Lines]:
    flags = " ".join(f"--{name} {value}" for name, value in _sglang_settings(draft).items())
    return [Lines("bash", f"python -m sglang.launch_server --model-path {draft.target} {flags}")]


def _tensorrt_settings(draft: EngineDraft) -> dict[str, Any]:
    if draft.kind == "text":
        values: dict[str, Any] = {"decoding_type": "NGram", "max_draft_len": draft.n_tokens}
    else:
        values = {"decoding_type": "DraftTarget", "max_draft_len": draft.n_tokens, "speculative_model": "draft"}
    return {"speculative_config": values}


def _tensorrt_lines(draft: EngineDraft) -> list[Lines]:
    line = f"trtllm-serve {draft.target} --extra_llm_api_options settings.json  # JSON is YAML, too"
    return [Lines("bash", line)]


ENGINES: Mapping[str, ExportEngine] = {
    "transformers": ExportEngine(
        "transformers", "settings.json", _transformers_settings, _transformers_lines, shares=True, run_here=True
    ),
    "llamacpp": ExportEngine("llama.cpp", "settings.json", _llamacpp_settings, _llamacpp_lines, "gguf"),
    "vllm": ExportEngine(
        "vLLM", "speculative_config.json", _vllm_settings, _vllm_lines, "compressed-tensors", no_ops=True
    ),
    "openvino": ExportEngine("OpenVINO GenAI", "settings.json", _openvino_settings, _openvino_lines, "gguf"),
    "sglang": ExportEngine("SGLang", "settings.json", _sglang_settings, _sglang_lines, "compressed-tensors"),
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
    prompts: Sequence[Prompt] = (),
) -> Exported:
    """Write a plan as an engine's files into a new folder, of which nothing is left where it fails.

    Args:   model: the target's name, as for `load`. engine: one of ENGINES. store: of the trials by which a set at
            equal distance is chosen, and of the measured costs by which draft lengths are; None: neither is known.
            prompts: on which the acceptance of the draft as a model by itself is measured, where it is a checkpoint:
            it then decides on set and lengths.
    Raises: InvalidInput: the folder exists, or the engine has no way to draft as the plan does. LayerSetError: the set
            is another model's. UnsupportedModel: its layers cannot be put together anew. ModelNotFound: the model
            cannot be read. OutputError: the folder cannot be written.
    """
    if engine not in ENGINES:
        raise InvalidInput(f"there is no engine {engine!r}: export to one of {', '.join(ENGINES)}")
    refuse_existing(out)
    source = resolve(model)
    folder = local_folder(source, on_step)
    reads_it = source.kind != "gguf" or ENGINES[engine].writes == "gguf"
    target = source.location if reads_it else str(folder)
    given, n_tokens = _of_engine(found, engine)
    draft = draft_of(given, Path(model).name, target, folder, ENGINES[engine], store, prompts, on_step)
    if n_tokens is not None:
        draft = replace(draft, found=found, n_tokens=n_tokens, lengths=((1, LOADS[-1], n_tokens),))
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


def _of_engine(found: FoundPlan, engine: str) -> tuple[FoundPlan, int | None]:
    """Return a plan that was tuned in the engine as one of swiftopt that drafts alike, and its draft tokens per round.

    Another plan is returned as it is. Raises: InvalidInput: it is for another engine, or there is nothing to write.
    """
    plan = found.plan
    if plan.engine is None:
        return found, None
    if plan.engine != engine:
        raise InvalidInput(
            f"version {found.version} is for {plan.engine}: export it --to {plan.engine}, or another one"
        )
    drafts = plan.settings.get("drafts")
    if drafts == "shared":
        return replace(found, plan=replace(plan, engine=None)), None
    text: tuple[str, dict[str, Any]] = ("prompt-lookup", {})
    alike = {"text": text, "own-text": text, "bits": ("adaptive", {"draft_format": "int4"}), "layers": ("swift", {})}
    if drafts not in alike:
        what = f"drafts with {plan.draft_model}" if plan.draft_model else f"decodes with {plan.method}"
        raise InvalidInput(f"version {found.version} {what}, of which there is nothing to write: see its settings")
    method, settings = alike[drafts]
    same = replace(plan, method=method, settings=settings, engine=None)
    return replace(found, plan=same), int(plan.settings["draft_tokens"])


def refuse_existing(out: Path) -> None:
    """Raises: InvalidInput: something is there already."""
    if os.path.lexists(out):
        raise InvalidInput(f"{out} exists already: name a new folder with --out, or remove it first")


def draft_of(
    found: FoundPlan,
    name: str,
    target: str,
    folder: Path,
    engine: ExportEngine,
    store: Store | None,
    prompts: Sequence[Prompt] = (),
    on_step: OnStep = no_step,
) -> EngineDraft:
    """Return what the engine drafts with in place of the plan's own draft.

    Raises: as `export`.
    """
    plan, record = found.plan, found.plan.layer_set
    config = supported_config(folder)
    n_layers = int(config.num_hidden_layers)
    layer_set = None if record is None else record.layer_set
    if layer_set is None and plan.method == "adaptive":
        name_of = str(plan.settings.get("draft_format", "int4"))
        layer_set = LayerSet(n_layers).filled(name_of if name_of in FORMATS else "int4")
    skips = layer_set is not None and layer_set.n_skipped > 0
    if layer_set is not None and (skips or (layer_set.formats and (engine.shares or engine.writes != "stored"))):
        own = fingerprint(folder)
        if layer_set.n_layers != n_layers or (record is not None and record.fingerprint not in (None, own)):
            raise LayerSetError(
                f"the layer set was tuned on another model than {name} ({own}): export it with the model it is of"
            )
        settings = SwiftSettings.from_json(record.settings) if record is not None else SwiftSettings(method="adaptive")
        threshold = settings.stop_threshold if settings.method == "swift" and settings.early_stop else None
        made = EngineDraft(found, name, target, "draft", GUESSED_LENGTH, threshold=threshold)
        if engine.shares:
            own_way = {"method": plan.method} if plan.method in ("swift", "adaptive") else {}
            known = record or LayerSetRecord(name, "any", layer_set, settings=settings.to_json())
            made = replace(made, shared=replace(known, settings={**known.settings, **own_way}))
        if not skips and engine.writes == "stored":
            return made
        try:
            check_restackable(config)
            if not skips and engine.writes == "compressed-tensors" and not takes_fewer_bits(folder):
                raise UnsupportedModel(
                    f"the linear maps of {name} cannot be written in fewer bits for {engine.title}: export a layer set"
                    " that skips, or to another engine"
                )
        except UnsupportedModel:
            if engine.shares:
                return made
            raise
        trials = (
            store.trials(record.job, record.task) if store is not None and record is not None and record.job else []
        )
        whole = alternating(layer_set, is_parallel(config), trials)
        candidates = (layer_set, *whole) if engine.no_ops and _needs_no_ops(layer_set, whole, folder) else whole
        runs = [each if engine.writes != "stored" else replace(each, formats=()) for each in candidates]
        costs = _stored_costs(store, found, own)
        if prompts:
            runtime = load(str(folder), on_step=on_step)
            measured = own_acceptance(runtime, prompts, runs[:MEASURED_SETS], on_step)
            best = max(range(len(measured)), key=lambda i: _fastest(speed_of(runs[i], measured[i], costs)))
            given: float | OwnAcceptance | None = measured[best]
        else:
            best, given = 0, None
            if record is not None:
                given = record.matchness if record.acceptance_rate is None else record.acceptance_rate
        lengths = lengths_by_load(runs[best], given, costs)
        n_tokens = max([1, *(k for _, _, k in lengths)])
        acceptance = given.rate(n_tokens) if isinstance(given, OwnAcceptance) else given
        source = MEASURED if prompts else None if given is None else ESTIMATED
        return replace(
            made,
            n_tokens=n_tokens,
            lengths=lengths,
            layer_set=candidates[best],
            no_ops=candidates[best] not in whole,
            n_changed=distance(layer_set, candidates[best]),
            acceptance=acceptance,
            acceptance_from=source,
        )
    if plan.method in TEXT_METHODS:
        return EngineDraft(found, name, target, "text", int(plan.settings.get("max_draft_length", 10)))
    if layer_set is not None:
        raise InvalidInput(
            f"this plan's draft leaves out no sub-layer, it only has fewer bits, in which swiftopt writes none for"
            f" {engine.title}: export a layer set that skips, or to another engine"
        )
    raise InvalidInput(
        f"this plan decodes with {plan.method}, for which {engine.title} has nothing: export a version with a layer set"
        " or with prompt-lookup (`swiftopt layers list` shows those with a layer set)"
    )


def alternating(layer_set: LayerSet, parallel: bool, trials: Sequence[Trial]) -> tuple[LayerSet, ...]:
    """Return the set itself where it is a checkpoint, else the nearest ones that are, the most promising first.

    Those come first that have the highest mean matchness among the sets that the search has tried; those that it has
    not tried follow as `nearest` lists them.
    """
    tried: dict[LayerSet, list[float]] = {}
    for trial in trials:
        tried.setdefault(replace(trial.layer_set, formats=()), []).append(trial.matchness)

    def promise(one: LayerSet) -> float:
        return fmean(tried.get(replace(one, formats=()), [-1.0]))

    return tuple(sorted(nearest(layer_set, parallel), key=promise, reverse=True))


def _needs_no_ops(layer_set: LayerSet, whole: Sequence[LayerSet], folder: Path) -> bool:
    """Return whether the set itself is a checkpoint only with layers of one half, which the model's type can have."""
    if layer_set in whole or not takes_no_ops(folder):
        return False
    try:
        return bool(pairs_of(layer_set, no_ops=True))
    except LayerSetError:
        return False


def speed_of(
    layer_set: LayerSet, acceptance: float | OwnAcceptance, costs: CostProfile | None
) -> Callable[[int, int], float]:
    """Return what tells tokens per plain pass's time, for a number of requests and of draft tokens per round.

    A round of k draft tokens commits what was measured, or 1 + a + … + a^k tokens on average where a is the acceptance,
    and costs k draft passes and one of the target over k + 1 rows per request. Without measured costs a draft pass
    costs its share of the sub-layers, each by its bits of 16, and a target pass the same at any width.

    Args: layer_set: as the engine runs it, with formats only where it has them.
    """
    known = None if costs is None or costs.missing(layer_set) else costs
    kinds: tuple[Literal["attn", "mlp"], ...] = ("attn", "mlp")
    kept = [(kind, i) for i in range(layer_set.n_layers) for kind in kinds if not layer_set.skips(kind, i)]
    share = sum(BITS_SHARE[layer_set.format_of(*sub)] for sub in kept) / (2 * layer_set.n_layers)

    def speed(n_requests: int, k: int) -> float:
        if isinstance(acceptance, OwnAcceptance):
            tokens = acceptance.tokens_per_round(k)
        else:
            tokens = float(sum(acceptance**i for i in range(k + 1)))
        if known is None:
            return tokens / (k * share + 1)
        drafting = k * known.draft_cost(layer_set, n_requests)
        return tokens * known.verify_cost(n_requests) / (drafting + known.verify_cost(n_requests * (k + 1)))

    return speed


def _fastest(speed: Callable[[int, int], float]) -> float:
    return max(speed(1, k) for k in range(LONGEST + 1))


def lengths_by_load(
    layer_set: LayerSet, acceptance: float | OwnAcceptance | None, costs: CostProfile | None
) -> tuple[tuple[int, int, int], ...]:
    """Return (fewest requests, most, draft tokens) with the most tokens per second, for every load; see `speed_of`.

    Without measured costs there is one length for all loads.
    """
    if acceptance is None:
        return ((1, LOADS[-1], GUESSED_LENGTH),)
    speed = speed_of(layer_set, acceptance, costs)
    if costs is not None and costs.missing(layer_set):
        costs = None
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
        pairs = pairs_of(draft.layer_set, is_parallel(config), draft.no_ops)
        form = write_restacked(
            folder, pairs, checkpoint, draft.layer_set if row.writes == "compressed-tensors" else None
        )
        if draft.no_ops:
            remarks.append(
                "the plan's set does not alternate attention and MLP: some of the draft's layers lack one half, which"
                f" {row.title} loads with --trust-remote-code: it lets draft/{NO_OPS_CODE.name} run, a config of ours"
            )
        if draft.n_changed:
            remarks.append(
                f"the plan's set does not alternate attention and MLP: the draft is of the nearest one that does,"
                f" {draft.n_changed} sub-layers off"
            )
        if row.writes == "gguf":
            on_step("writing the draft as GGUF")
            kind = draft.gguf_type or ("F16" if engine == "openvino" else stored_type(checkpoint))  # it reads no BF16
            write_gguf(checkpoint, out / "draft.gguf", kind)
            shutil.rmtree(checkpoint)
        elif form is not None:
            remarks.append(f"the draft's linear maps are rounded to {form} (compressed-tensors), the rest is as stored")
        elif draft.layer_set.formats:
            remarks.append("the plan's draft has fewer bits in swiftopt: here it has the model's own weights")
    elif draft.kind == "draft":
        remarks.append(f"there is no checkpoint for {row.title} alone: {SHARED} is for swiftopt inside it")
    if draft.shared is not None:
        (out / SHARED).write_text(json.dumps(draft.shared.to_json(), indent=2) + "\n", encoding="utf-8")
    settings = row.settings(draft)
    for name, value in ((row.settings_file, settings), (SUMMARY, summary(draft, engine, settings))):
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(readme(draft, engine, remarks), encoding="utf-8")
    return tuple(remarks)


def _block(way: Lines) -> list[str]:
    return [*([f"{way.when}:", ""] if way.when else []), f"```{way.language}", way.text, "```", ""]


def summary(draft: EngineDraft, engine: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what programs read of the folder, whatever the engine; `draft` and `layer_set` are paths in it."""
    path = None if draft.layer_set is None else "draft.gguf" if ENGINES[engine].writes == "gguf" else "draft"
    return {
        "schema": SCHEMA,
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


def readme(draft: EngineDraft, engine: str, remarks: Sequence[str] = ()) -> str:
    """Return the page beside the files: what they are, how they are run, what to expect."""
    row, plan, record = ENGINES[engine], draft.found.plan, draft.found.plan.layer_set
    if draft.kind == "draft" and draft.layer_set is None:
        what = "The draft is the model itself in fewer bits or without some sub-layers, made when it is first used."
    elif draft.layer_set is None:
        what = "Drafts come from earlier text, by the engine's own n-grams: no checkpoint is needed."
    elif draft.no_ops:
        what = f"The draft is the model without {draft.layer_set.n_skipped} of its attentions and MLPs."
    else:
        left = draft.layer_set.n_layers - len(draft.layer_set.skip_attn)
        what = (
            f"The draft is the model with {left} of its {draft.layer_set.n_layers} layers, put together from the"
            " sub-layers that the plan keeps."
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
    expected = [] if draft.acceptance is None else [
        f"- Acceptance as a checkpoint: {draft.acceptance:.2f}, {draft.acceptance_from}."
        + ("" if draft.acceptance_from == MEASURED else " It is too high: export with --stream to have it measured.")
    ]  # fmt: skip
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
            *(line for way in row.lines(draft) for line in _block(way)),
            "## What to expect",
            "",
            f"- Draft tokens per round: {draft.n_tokens}."
            + ("" if draft.acceptance is not None or draft.kind == "text" else " A guess: no acceptance was measured."),
            f"- Measured in swiftopt: {measured}. There a draft reads the target's keys and values; a draft checkpoint"
            " has its own.",
            *expected,
            "- The output is the target's own: every drafted token is checked by the target. Passes over several rows"
            " may round otherwise than plain decoding, so that near ties can fall the other way.",
            f"- {proof}",
            "",
        ]
    )
