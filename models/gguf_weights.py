"""A model folder's own weights as GGUF files, in the stored type or rounded, for the engines that read that format.

The files are for token ids in and token ids out: their tokenizer names every token, but splits no text as the model's
own does.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ..core.errors import OutputError, UnsupportedModel
from .fingerprint import fingerprint
from .saved import OnStep, StoredTensors, cache_root, first_line, no_step

Rounding = Literal["stored", "F16", "Q8_0", "Q4_0"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
WRITER = "1"  # part of every file's folder; raise it when the writing changes
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # model type -> llama.cpp's
PAIRED = ("llama",)  # architectures of llama.cpp that keep the two halves of a rotary pair side by side
STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types of GGUF


def stored_type(folder: Path) -> str:
    """GGUF's word for the type of the folder's weights: BF16, F16 or F32.

    Raises: UnsupportedModel: they are of another type.
    """
    config = _config(folder)
    name = str(config.dtype or "float32").removeprefix("torch.")
    if name not in STORED:
        raise UnsupportedModel(f"the weights in {folder} are stored as {name}: GGUF files are made of {_words(STORED)}")
    return STORED[name]


def gguf_of(folder: Path, rounding: Rounding, on_step: OnStep = no_step) -> Path:
    """The folder's weights in one GGUF file in the cache, written where it is not there yet.

    "stored" keeps the type of the weights; "F16", "Q8_0" and "Q4_0" round every matrix to it, embeddings included.
    Vectors are in F32. F16 holds bfloat16 values exactly from 2^-17 to 65504, and smaller ones to within 2^-25.

    Raises: UnsupportedModel: llama.cpp's form of this architecture is not known here. ModelNotFound: the folder's
        weights cannot be read. OutputError: the cache cannot be written.
    """
    kind = stored_type(folder) if rounding == "stored" else rounding
    path = weights_folder(folder) / f"{kind}.gguf"
    if path.is_file():
        return path
    on_step(f"writing {kind} weights for llama.cpp to {path}, only once")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise OutputError(_full(path, error)) from error
    try:
        write_gguf(folder, Path(unfinished), kind)
        os.replace(unfinished, path)
    except OSError as error:
        raise OutputError(_full(path, error)) from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(unfinished)
    return path


def weights_folder(folder: Path) -> Path:
    """Where the cache keeps what was made of the folder's weights; named by their fingerprint."""
    return cache_root() / "peers" / "weights" / f"{fingerprint(folder).replace(':', '-')}-{WRITER}"


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write the folder's weights in one file, matrices as `kind` (a GGUF type), tensor by tensor.

    Raises: as `gguf_of`, but OSError where the file cannot be written.
    """
    import gguf

    config = _config(folder)
    name = _architecture(config, folder)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    types = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(str(path), name)
    _add_settings(writer, config, gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    _add_tokens(writer, folder, config.vocab_size)
    try:
        placed = []
        for stored, shape in _shapes(folder).items():
            place = names.get_name(stored, try_suffixes=(".weight", ".bias"))
            if place is None:
                raise UnsupportedModel(f"{folder} has a weight {stored!r}, for which llama.cpp's {name} has no place")
            if place == "output.weight" and config.tie_word_embeddings:
                continue
            of_type = types[kind] if len(shape) > 1 else types.F32
            block, block_bytes = gguf.GGML_QUANT_SIZES[of_type]
            if shape[-1] % block:
                raise UnsupportedModel(
                    f"{stored} in {folder} has rows of {shape[-1]} values, which {kind} does not part by {block}"
                )
            n_bytes = math.prod(shape) // block * block_bytes
            writer.add_tensor_info(place, shape, np.dtype(np.float32), n_bytes, of_type)
            placed.append((stored, of_type))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with StoredTensors(folder) as tensors:
            for stored, of_type in placed:
                values = tensors.read(stored).float().numpy()
                if name in PAIRED:
                    values = _paired(stored, values, config)
                writer.write_tensor_data(gguf.quants.quantize(values, of_type))
    finally:
        writer.close()


def _architecture(config: Any, folder: Path) -> str:
    if config.model_type not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{folder} is of type {config.model_type}, and GGUF files are written for {_words(ARCHITECTURES)} only"
        )
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type", "default") != "default":
        raise UnsupportedModel(f"{folder} scales its rotary positions, which the GGUF writer here does not know")
    if getattr(config, "use_sliding_window", False):
        raise UnsupportedModel(f"{folder} attends through a sliding window, which the GGUF writer here does not know")
    return ARCHITECTURES[config.model_type]


def _add_settings(writer: Any, config: Any, file_type: int) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_file_type(file_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))
    writer.add_vocab_size(config.vocab_size)


def _add_tokens(writer: Any, folder: Path, vocab_size: int) -> None:
    """Every token's text and merges; ids that the tokenizer does not use get a name of their own."""
    path = folder / "tokenizer.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        model = stored["model"]
        ids = {str(text): int(number) for text, number in model["vocab"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{path} cannot be read as a tokenizer for GGUF ({first_line(error)})") from error
    texts = {number: (text, NORMAL) for text, number in ids.items()}
    for added in stored.get("added_tokens", ()):
        texts[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
    rows = [texts.get(number, (f"[PAD{number}]", UNUSED)) for number in range(vocab_size)]
    merges = [each if isinstance(each, str) else " ".join(each) for each in model.get("merges", ())]
    config = _config(folder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if config.model_type.startswith("qwen") else "smollm")
    writer.add_token_list([text for text, _ in rows])
    writer.add_token_types([kind for _, kind in rows])
    writer.add_token_merges(merges or ["a b"])  # llama.cpp refuses a file without any
    for name in ("bos", "eos", "pad"):
        number = getattr(config, f"{name}_token_id", None)
        if isinstance(number, list):
            number = number[0]
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(False)


def _paired(stored: str, values: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    """Rows of query and key in llama.cpp's order; other weights as they are.

    Args: values: float32, shape (heads · head size, hidden) or, for a bias, (heads · head size,).
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    n_heads = heads.get(stored.split(".")[-2])
    if n_heads is None:
        return values
    halves = values.reshape(n_heads, 2, -1, *values.shape[1:])  # (heads, 2, head size / 2, hidden)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with StoredTensors(folder) as tensors:
        return tensors.shapes()


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True)


def _words(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _full(path: Path, error: Exception) -> str:
    return f"{path} cannot be written ({first_line(error)}): make room there or set SWIFTOPT_CACHE_DIR"
