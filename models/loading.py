"""Loads a model into a runtime, and chooses how it computes for the requested speed."""

from __future__ import annotations

import json
import logging
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from ..core import collector
from ..core.errors import ModelNotFound, SettingsError, UnsupportedModel, first_line
from ..core.records import ModelInfo
from ..core.requests import Speed
from ..core.settings import n_threads
from .adapters import Adapter, read_adapter
from .block_experts import BlockExperts
from .buffer import free_bytes
from .checkpoints import read_model, reading
from .coded import CodedLinear
from .config_bounds import shown
from .copies import Seconds
from .fingerprint import earlier_fingerprints, fingerprint
from .fused import fuse
from .gguf_model import load_gguf, settings_folder
from .gguf_packing import opened, packing_of
from .gguf_reader import GgufFile
from .graphs import GraphPasses, launched_s, pass_seconds, replayed_s
from .huge_pages import PAGES, weights_in
from .kernels.device import obstacle
from .layer_inputs import with_map
from .mapped_rows import count_values
from .memory import memory_plan
from .merging import identity, load_merged
from .mtp import MtpRuntime, has_mtp, read_mtp
from .quantised_checkpoints import check_library, is_by_library, load_packed, take_maps
from .row_invariant import make_row_invariant
from .runtime import Runtime
from .saved import (
    GGUF_WEIGHTS,
    OnStep,
    ReadShare,
    WeightStorage,
    check_files,
    files_of,
    no_step,
    quiet,
    reporting_progress,
    supported_config,
    supported_type,
)
from .sources import Source, base_folder, check_names, local_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

# Fields of generation_config.json that change the generated text and that swiftopt does not support.
STEERING = (
    *("min_length", "min_new_tokens", "stop_strings", "guidance_scale", "watermarking_config", "token_healing"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "bad_words_ids"),
    *("sequence_bias", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("exponential_decay_length_penalty", "num_beams", "constraints", "force_words_ids", "penalty_alpha"),
    *("dola_layers", "use_mtp"),
)


def load(
    name: str, dtype: str = "auto", device: str = "auto", on_step: OnStep | None = None, speed: Speed = "auto"
) -> Runtime:
    """Load a target model by alias, hub id, folder (of a model or an adapter) or GGUF file; nothing is printed.

    torch and our kernels then compute with one thread per usable core, or with as many as SWIFTOPT_THREADS says.

    Args:   dtype: "auto" (as stored; bfloat16 for GGUF), "float32", "bfloat16" or "float16".
            device: "cpu", "cuda", "cuda:N", "auto-map" to spread the model over devices, or "auto": the first GPU with
            room for the model, all GPUs together if none has, and the CPU if there is no GPU.
            on_step: called with a few words at each step.
            speed: see `at_speed`.
    Raises: ModelNotFound: nothing of that name can be loaded.
            UnsupportedModel: sub-layers cannot be skipped in its architecture.
            SettingsError: dtype, device or speed is unknown or not available here, or the device has too little memory.
            OutputError: the cache cannot be written.
    """
    step = on_step or no_step
    torch.set_num_threads(n_threads())
    source = check_names(name, dtype, device, speed, here=True)
    with ExitStack() as stack:
        stack.enter_context(quiet())
        file: GgufFile | None = None
        if source.kind == "gguf":
            file = stack.enter_context(opened(Path(source.location), dtype, device, speed))
        folder, adapter = _folder_of(source, step) if file is None else (settings_folder(file.path, step, file), None)
        config, texts = supported_config(folder), folder if adapter is None else adapter.tokenizer_folder(folder)
        check_files(files_of(texts), texts)
        tokenizer, generation_config = load_tokenizer(texts, config), _generation_config(folder)
        collector.leave_imports()
        if adapter is not None and adapter.has_tokenizer():
            refuse_new_tokens(tokenizer, config, adapter)
        if device not in ("cpu", "auto-map"):
            use_expandable_segments()
        wide = dtype if adapter is None else _wider(dtype, config)
        place = placement(device, folder, wide, speed, file)
        doing = f"reading {source.name}"
        step(memory_plan(folder, wide, place == "cpu", speed, file).sentence(source.name))
        step(doing)
        with reporting_progress(step, doing):
            coded = place == "cpu" and speed in ("auto", "exact")
            if adapter is None:
                for_device = place.startswith("cuda") and speed == "exact"
                storage = WeightStorage(coded, for_device, maps_rows=place == "cpu")
                model, n_parameters = _load_model(folder, dtype, place, storage, ReadShare(step, doing), file)
            else:
                model, n_parameters = load_merged(adapter, folder, dtype, place, maps_rows=place == "cpu")
        if generation_config is not None:
            model.generation_config = generation_config
        refuse_steering(model.generation_config, folder)
        collector.run()
        if adapter is None:
            fingerprints = fingerprint(folder, file), earlier_fingerprints(folder)
        else:
            fingerprints = identity(adapter, folder), ()
        info = info_of(model, fingerprints[0], source.names, n_parameters, fingerprints[1])
        runtime = Runtime(model, tokenizer, info)
        runtime.suppressed = suppressed_tokens(model.generation_config, runtime.vocab_size, runtime.device, folder)
        is_readable = file is not None or supported_type(folder)[1] is None
        if runtime.family.mtp is not None and is_readable and has_mtp(folder, file, runtime.n_layers):
            runtime.mtp_folder = folder
    if speed != "eager":
        step("preparing the kernels")
    at_speed(runtime, speed)
    return runtime


def mtp_of(runtime: Runtime, on_step: OnStep = no_step) -> MtpRuntime | None:
    """Return the multi-token-prediction layer of the model's checkpoint, or None; it is read at the first call.

    Raises: ModelNotFound: its tensors do not fit the model.
    """
    if runtime.mtp is None and runtime.mtp_folder is not None:
        on_step("reading the multi-token-prediction layer")
        with quiet(), reading("the multi-token-prediction layer", runtime.mtp_folder, str(runtime.device)):
            mtp = read_mtp(runtime.mtp_folder, runtime)
        at_speed(mtp, "eager" if runtime.native is None else "auto")
        runtime.mtp = mtp
    return cast("MtpRuntime | None", runtime.mtp)


def _folder_of(source: Source, step: OnStep) -> tuple[Path, Adapter | None]:
    """Return the folder with a source's weights, and the adapter to merge into them if the source is an adapter."""
    if source.base is None:
        return local_folder(source, step), None
    adapter = read_adapter(Path(source.location), source.base.name)
    step(f"the adapter {source.name} is merged into {adapter.base}")
    return base_folder(source, step), adapter


def _wider(dtype: str, config: Any) -> str:
    """Return the wider of the requested dtype and the stored one: a base is read as stored and cast after the merge."""
    stored = getattr(config, "dtype", None) or torch.float32
    return "auto" if dtype == "auto" or getattr(torch, dtype).itemsize <= stored.itemsize else dtype


def refuse_new_tokens(tokenizer: Any, config: Any, adapter: Adapter) -> None:
    """Raises: ModelNotFound: an adapter's tokenizer has tokens for which its base has no embedding."""
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= config.vocab_size:
        raise ModelNotFound(
            f"the tokenizer in {adapter.folder} has the token {highest}, and the base {adapter.base} has tokens up to"
            f" {config.vocab_size - 1}: resize the embedding of the base, save it, and name that folder as base"
        )


def info_of(
    model: Any,
    fingerprint: str,
    names: tuple[str, ...] = (),
    n_parameters: int | None = None,
    earlier: tuple[str, ...] = (),
) -> ModelInfo:
    """Describe a model of transformers.

    Args: n_parameters: its number of weights; None: they are counted here, which is wrong if some are quantised.
          earlier: fingerprints that earlier versions gave it.
    """
    if n_parameters is None:
        n_parameters = sum(parameter.numel() for parameter in model.parameters())
    n_layers = int(model.config.num_hidden_layers)
    return ModelInfo(fingerprint, str(model.config.model_type), n_layers, n_parameters, names, earlier)


def use_expandable_segments() -> None:
    """Make torch's CUDA allocator use expandable segments unless configured otherwise; call before its first use."""
    if torch.cuda.is_available():
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def placement(device: str, folder: Path, dtype: str, speed: Speed = "auto", file: GgufFile | None = None) -> str:
    """Choose where the weights go: "cpu", "cuda:N" or "auto-map".

    Args:   file: the GGUF file, if it is open already.
    Raises: SettingsError: there is too little memory.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        plan = memory_plan(folder, dtype, True, speed, file)
        packing = None if file is None else packing_of(file)
        plan.check("this machine", free_bytes(torch.device("cpu")) + (0 if packing is None else packing.n_bytes))
        return "cpu"
    if device == "auto-map":  # auto-map may also use the CPU, so GPU memory is not checked.
        return device
    plan = memory_plan(folder, dtype, False, speed, file)
    if device != "auto":
        place = torch.device("cuda", torch.device(device).index or 0)
        # Query no other GPU: the query creates a CUDA context, which takes memory.
        plan.check(str(place), free_bytes(place))
        return str(place)
    free = [free_bytes(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
    for bytes_asked in (plan.needed + plan.copies, plan.needed):  # Prefer a GPU with room for draft copies.
        for i, n_bytes in enumerate(free):
            if n_bytes >= bytes_asked:
                return f"cuda:{i}"
    plan.check(f"{len(free)} GPUs", sum(free))
    return "auto-map"


def _load_model(
    folder: Path, dtype: str, placement: str, storage: WeightStorage, share: ReadShare, file: GgufFile | None
) -> tuple[Any, int]:
    """Return the model, in evaluation mode, and its number of weights.

    Args: share: reports the share of the weights that was read. file: the GGUF file, if it is open already.
    """
    scheme = supported_type(folder)[1]
    if scheme is not None and scheme.kind is None:
        if placement == "auto-map":
            named = folder if file is None else file.path
            advice = "such a model lies on one device: use --device cpu or cuda:N"
            raise SettingsError(f"{named} is quantised ({scheme.words}), and {advice}")
        with reading(str(folder), folder, placement):
            if scheme.format == "gguf":
                model, n_parameters = load_gguf(folder, dtype, storage, share, file)
            else:
                model, n_parameters = load_packed(folder, scheme, dtype, storage, share)
            return model.to(placement), n_parameters
    if scheme is not None:
        check_library(folder, scheme)
    maps_rows = storage.maps_rows and scheme is None
    model = read_model(folder, dtype, placement, by_library=scheme is not None, maps_rows=maps_rows)
    if scheme is not None:
        return model, take_maps(model, scheme, dtype, folder)
    return model, count_values(model)


def _generation_config(folder: Path) -> Any:
    """Read the folder's generation_config.json; None: it has none.

    transformers silently ignores a file that it cannot read; completions would then not end.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        ends = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
        if not all(token_id is None or isinstance(token_id, int) for token_id in ends):
            raise ValueError(f"its eos_token_id is {generation.eos_token_id!r}")
        float(generation.repetition_penalty or 1.0)
    except Exception as error:  # GenerationConfig raises various exceptions for invalid values.
        raise ModelNotFound(f"{path} cannot be read ({first_line(error)}): copy the model's folder again") from error
    refuse_steering(generation, folder)
    return generation


def refuse_steering(config: Any, folder: Path) -> None:
    """Raises: UnsupportedModel: generation_config.json sets a field of `STEERING`, which would change the text."""
    defaults = GenerationConfig._get_default_generation_params()
    for name in STEERING:
        value = getattr(config, name, None)
        if value is not None and value is not False and value != defaults.get(name):
            raise UnsupportedModel(
                f"the generation_config.json of {folder} asks for {name} {value!r}, which swiftopt does not apply:"
                " remove it there to decode without it"
            )


def suppressed_tokens(config: Any, vocab_size: int, device: torch.device, folder: Path) -> Tensor | None:
    """Return the tokens that the model must never generate, such as Gemma 4's end of an image; None: there are none.

    Raises: ModelNotFound: they are no tokens of the model.
    """
    tokens = getattr(config, "suppress_tokens", None)
    if not tokens:
        return None
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise ModelNotFound(
            f"the generation_config.json of {folder} has suppress_tokens {shown(tokens)}, which are no tokens of the"
            " model: copy the model's folder again"
        )
    return torch.tensor(sorted({*tokens}), device=device)


def load_tokenizer(folder: Path, config: Any = None) -> Any:
    """Return the folder's tokenizer.

    Args:   config: the model's config, if the model is in another folder.
    Raises: ModelNotFound: there is none, or it cannot be read.
    """
    try:
        with reading(f"the tokenizer in {folder}", folder, "cpu"):
            # AutoTokenizer would replace a GGUF file's tokenizer by a class with other rules for some architectures.
            is_gguf = (folder / GGUF_WEIGHTS).exists()
            if is_gguf:
                return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            from transformers import AutoTokenizer

            tokenizer: Any = AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True)
            if tokenizer.chat_template is None:
                tokenizer.chat_template = _processor_template(folder)
            return tokenizer
    except ModelNotFound as error:
        if (folder / "tokenizer.json").is_file():
            raise
        raise ModelNotFound(
            f"{folder} has no tokenizer.json, and its other files of a tokenizer cannot be read here"
            f" ({first_line(cast(Exception, error.__cause__))}): pip install sentencepiece protobuf, or copy the file"
            " from the model that this one was made of"
        ) from error


def _processor_template(folder: Path) -> str | None:
    """Return the chat template of an older multimodal model, which its processor keeps in a separate file."""
    path = folder / "chat_template.json"
    return str(json.loads(path.read_text(encoding="utf-8"))["chat_template"]) if path.is_file() else None


def at_speed(runtime: Runtime, speed: Speed, lay_out: bool = True) -> None:
    """Choose what computes a runtime's passes; call it before the first buffer is made.

    "auto": our kernels (`models.kernels`) on a CPU, if they can compute the model; "graphs" on a single CUDA device, if
    a few timed passes are faster with them; otherwise "eager".
    "exact": our kernels, with which a row's bits do not depend on the other rows: those in C++ on a CPU, those in
    Triton on a CUDA device, replayed as CUDA graphs if that is faster.
    "eager": torch's operations one by one; a new runtime has this speed.
    "graphs": passes of up to 128 rows are replayed as CUDA graphs.

    Args:   lay_out: GPT-2's weights may be transposed in memory; other users of the model see changed strides.
    Raises: SettingsError: the speed is unknown or not available on this machine; the runtime is unchanged.
    """
    if speed not in get_args(Speed):
        raise SettingsError(f"speed {speed!r} does not exist: use {', '.join(get_args(Speed))}")
    if speed in ("auto", "exact"):
        by_triton = speed == "exact" and runtime.device.type == "cuda"
        reason = _use_row_invariant(runtime) if by_triton else _use_native(runtime, lay_out)
        if reason is not None and speed == "exact":
            raise SettingsError(f"passes cannot be exact here: {reason}: use another speed")
        if reason is not None:
            de_quantise(runtime)
            runtime.counter.watch()
            _use_graphs(runtime)
            runtime.copies.lay_out(packed=_draft_kernels(runtime))
        return
    if speed == "graphs" and _has_maps_by_library(runtime):
        raise SettingsError("speed 'graphs' is not for maps that a library computes: use auto or eager")
    de_quantise(runtime)
    runtime.counter.watch()
    graphs = GraphPasses(runtime) if speed == "graphs" else None
    if graphs is not None:
        fuse(runtime)
    runtime.graphs, runtime.speed, runtime.native = graphs, speed, None
    runtime.by_table = graphs is not None
    runtime.copies.lay_out(packed=graphs is not None and _draft_kernels(runtime))


def _use_native(runtime: Runtime, lay_out: bool) -> str | None:
    """Let our kernels compute the passes; return why they cannot, or None."""
    if runtime.device.type != "cpu":
        return f"they are for a CPU, and the model lies on {runtime.device}"
    from .kernels.build import kernels
    from .kernels.layout import Unsupported
    from .kernels.native import NativePasses

    chosen = kernels()
    if isinstance(chosen, str):
        return chosen
    transposed = outputs_first(runtime) if lay_out else []
    try:
        runtime.native = NativePasses(runtime, chosen)
    except Unsupported as error:
        for parameter in transposed:
            parameter.data = parameter.data.contiguous()
        return str(error)
    runtime.speed = "native"
    PAGES.add(weights_in(runtime.hf_model))
    runtime.copies.lay_out(packed=True)
    return None


def _use_row_invariant(runtime: Runtime) -> str | None:
    reason = make_row_invariant(runtime)
    if reason is None:
        runtime.speed = "exact"
        runtime.counter.watch()
        runtime.copies.lay_out(packed=True)
        _use_graphs(runtime)
    return reason


def _use_graphs(runtime: Runtime) -> None:
    if runtime.device.type != "cuda" or not runtime.one_device or not runtime.has_alike_layers:
        return
    try:
        graphs, faster = GraphPasses(runtime), False
        if not _has_maps_by_library(runtime):  # Kernels of other libraries may not be capturable.
            launched, replayed = pass_seconds(runtime, graphs)
            faster = replayed < launched
    except Exception as error:  # The model also runs without CUDA graphs, so any failure is only logged.
        logger.warning("passes are not replayed as CUDA graphs here: %s", first_line(error))
        return
    runtime.by_table = True
    if faster:
        if not runtime.row_invariant:
            fuse(runtime)
            graphs.forget()  # The captured graphs still contain torch's norms.
        runtime.graphs = graphs
        runtime.speed = "graphs" if runtime.speed == "eager" else f"{runtime.speed}+graphs"


def _draft_kernels(runtime: Runtime) -> bool | Seconds:
    """Return a timer to choose between our kernels and torch's for drafts; False: ours cannot run here.

    If passes are replayed as graphs, the timer leaves out the time to launch kernels.
    """
    on_gpus = all(block.device.type == "cuda" for block in runtime.blocks)
    if not on_gpus or obstacle() or _has_maps_by_library(runtime):
        return False
    return partial(launched_s if runtime.graphs is None else replayed_s, runtime.blocks[0].device)


def _has_maps_by_library(runtime: Runtime) -> bool:
    return any(is_by_library(module) for module in runtime.hf_model.modules())


def random_runtime(config: PreTrainedConfig, device: str) -> Runtime:
    """Return a model of random bfloat16 weights, for measurements."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.bfloat16)
    return Runtime(model.eval().requires_grad_(False), None, info_of(model, "random"))


def outputs_first(runtime: Runtime) -> list[nn.Parameter]:
    """Transpose weights in memory that are stored as (inputs, outputs): GPT-2's maps, and some families' experts.

    Returns: the weights that were transposed.
    """
    named = runtime.family.experts
    weights = [module.weight for module in runtime.hf_model.modules() if isinstance(module, Conv1D)]
    if named is not None and named.by_inputs:
        mixtures = [block.parts.mlp for block in runtime.blocks if block.experts is not None]
        experts: list[Any] = [mlp.get_submodule(named.experts) for mlp in mixtures]
        plain = [module for module in experts if not isinstance(module, BlockExperts)]
        weights += [weight for module in plain for weight in (module.gate_up_proj, module.down_proj)]
    transposed = [weight for weight in weights if weight.is_contiguous()]
    for weight in transposed:
        weight.data = weight.data.transpose(-1, -2).contiguous().transpose(-1, -2)
    return transposed


@torch.inference_mode()
def de_quantise(runtime: Runtime) -> None:
    """Replace quantised maps by plain weights in the model's dtype, because torch cannot compute with codes."""
    for name, module in list(runtime.hf_model.named_modules()):
        if isinstance(module, CodedLinear):
            _replace_map(runtime, name, module, module.plain())
            module.codes.data = module.codes.data.new_empty(0)


def _replace_map(runtime: Runtime, name: str, module: nn.Module, plain: nn.Module) -> None:
    cast(Any, runtime.hf_model).set_submodule(name, plain)
    for block in runtime.blocks:
        block.parts = block.parts.with_map(module, plain)
        if block.end is not None:
            block.end = with_map(block.end, module, plain)
    if runtime.layer_inputs is not None:
        runtime.layer_inputs = with_map(runtime.layer_inputs, module, plain)
    if runtime.head_module(None) is module:
        runtime.take_head(plain)
