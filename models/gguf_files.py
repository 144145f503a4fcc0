"""Converts GGUF files to model folders, and model folders to GGUF files, for other engines.

swiftopt itself uses a file as it is (`gguf_model`). For other engines it is converted to bfloat16 once, in the cache.
Written GGUF files are meant for token ids as input and output: their tokenizer has every token, but does not split text
as the model's own tokenizer does.
"""

from __future__ import annotations

import json
import math
import shutil
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..core.errors import OutputError, SettingsError, UnsupportedModel, first_line
from .buffer import free_bytes
from .cache import cache_root, converted_folder, made_once, replacing
from .config_layout import heads_of
from .fingerprint import OF_GGUF, fingerprint, note_gguf
from .gguf_form import GgufForm
from .gguf_forms import FORMS
from .gguf_model import load_gguf, names_of, settings_folder
from .gguf_reader import GgufFile
from .gguf_settings import FIELDS
from .saved import LEFTOVERS, TOKENIZER_FILES, OnStep, ReadShare, WeightStorage, no_step, supported_config
from .stored_tensors import is_readable, stored_tensors

Rounding = Literal["stored", "F16", "Q8_0", "Q4_0"]
WRITER = "1"  # Version in the folder name of every written file; raise it when the written content changes.
STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # Token type numbers of the GGUF format.


def converted(gguf: Path, on_step: OnStep) -> Path:
    """Return the cache folder with the file's weights in bfloat16 and its tokenizer; write it if necessary.

    Raises: ModelNotFound: there is no readable GGUF file. UnsupportedModel: its architecture or a setting is not
        supported. SettingsError: there is too little memory. OutputError: the cache cannot be written.
    """
    folder = converted_folder(gguf)

    def write(unfinished: Path) -> None:
        on_step(f"converting {gguf.name}, only once")
        settings = settings_folder(gguf, on_step)
        _check_room(gguf)
        model = load_gguf(settings, "bfloat16", WeightStorage(coded=False), ReadShare(on_step, "reading"))[0]
        on_step("writing the converted model to the cache")
        model.save_pretrained(unfinished)
        for path in settings.iterdir():
            if path.name.startswith("tokenizer") or path.suffix == ".jinja" or path.name in TOKENIZER_FILES:
                shutil.copy(path, unfinished)
        note_gguf(unfinished, gguf)

    made_once(folder, lambda: is_readable(folder), write)
    if not (folder / OF_GGUF).is_file():  # An earlier version converted the file.
        with suppress(OSError):
            note_gguf(folder, gguf)
    return folder


def _check_room(gguf: Path) -> None:
    needed = 2 * GgufFile(gguf).n_values
    free = free_bytes(torch.device("cpu"))
    if needed > free:
        raise SettingsError(
            f"{gguf} takes {needed / 1e9:.1f} GB of memory while it is converted to bfloat16, but this machine has"
            f" {free / 1e9:.1f} GB free: use a smaller model, or its hub id"
        )


def stored_type(folder: Path) -> str:
    """Return GGUF's name for the dtype of the folder's weights: BF16, F16 or F32.

    Raises: UnsupportedModel: they have another dtype.
    """
    config = supported_config(folder)
    name = str(config.dtype or "float32").removeprefix("torch.")
    if name not in STORED:
        raise UnsupportedModel(
            f"the weights in {folder} are stored as {name}: GGUF files are made of {', '.join(sorted(STORED))}"
        )
    return STORED[name]


def gguf_of(folder: Path, rounding: Rounding, on_step: OnStep = no_step) -> Path:
    """Return the GGUF file of the folder's weights in the cache; write it if necessary.

    "stored" keeps the dtype of weights; "F16", "Q8_0" and "Q4_0" round every matrix to that type, embeddings included.
    Vectors are F32. F16 has bfloat16 values from 2^-17 to 65504 exactly, and smaller ones to within 2^-25.

    Raises: UnsupportedModel: the architecture's GGUF form is not supported. ModelNotFound: the folder's weights cannot
        be read. OutputError: the cache cannot be written.
    """
    kind = stored_type(folder) if rounding == "stored" else rounding
    path = cache_root() / "peers" / "weights" / f"{fingerprint(folder).replace(':', '-')}-{WRITER}" / f"{kind}.gguf"
    if path.is_file():
        return path
    on_step(f"writing {kind} weights for llama.cpp to {path}, only once")
    try:
        with replacing(path) as unfinished:
            write_gguf(folder, unfinished, kind)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({first_line(error)}): make room there or set SWIFTOPT_CACHE_DIR"
        ) from error
    return path


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write the folder's weights to a GGUF file, tensor by tensor; matrices have the GGUF type `kind`.

    Raises: as `gguf_of`, but OSError if the file cannot be written.
    """
    import gguf

    config = supported_config(folder)
    form = _form_of(config, folder)
    names = names_of(form.architecture, config.num_hidden_layers)
    types = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(str(path), form.architecture)
    _add_settings(writer, config, gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    _add_tokens(writer, folder, config, str(form.pre_tokenizer))
    with closing(writer), stored_tensors(folder) as tensors:
        placed = []
        for stored, shape in tensors.shapes().items():
            if stored.endswith(LEFTOVERS):
                continue
            place = names.get_name(stored, try_suffixes=(".weight", ".bias"))
            if place is None:
                raise UnsupportedModel(
                    f"{folder} has a weight {stored!r}, for which llama.cpp's {form.architecture} has no place"
                )
            if place == "output.weight" and config.tie_word_embeddings:
                continue
            of_type = types[kind] if len(shape) > 1 else types.F32
            block, block_bytes = gguf.GGML_QUANT_SIZES[of_type]
            if shape[-1] % block:
                raise UnsupportedModel(
                    f"{stored} in {folder} has rows of {shape[-1]} values, and {kind} needs a multiple of {block}"
                )
            n_bytes = math.prod(shape) // block * block_bytes
            writer.add_tensor_info(place, shape, np.dtype(np.float32), n_bytes, of_type)
            placed.append((stored, of_type))
        for part in ("header", "kv_data", "ti_data"):
            getattr(writer, f"write_{part}_to_file")()
        for stored, of_type in placed:
            values = tensors.read(stored).float().numpy()
            if form.pairs_halves:
                values = _paired(stored, values, config)
            writer.write_tensor_data(gguf.quants.quantize(values, of_type))


def _form_of(config: Any, folder: Path) -> GgufForm:
    form = FORMS.get(config.model_type)
    if form is None or form.pre_tokenizer is None:
        written = sorted(name for name, form in FORMS.items() if form.pre_tokenizer)
        raise UnsupportedModel(
            f"{folder} is of type {config.model_type}, and GGUF files are written for {', '.join(written)} only"
        )
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type", "default") != "default":
        raise UnsupportedModel(f"{folder} scales its rotary positions, which the GGUF writer here does not know")
    if getattr(config, "use_sliding_window", False):
        raise UnsupportedModel(f"{folder} attends through a sliding window, which the GGUF writer here does not know")
    return form


def _add_settings(writer: Any, config: Any, file_type: int) -> None:
    head_dim = heads_of(config).width
    writer.add_file_type(file_type)
    for key, field in FIELDS.items():
        value = getattr(config, field)
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{writer.arch}.{key}", value)
    for name in ("key_length", "value_length", "rope_dimension_count"):
        getattr(writer, f"add_{name}")(head_dim)
    writer.add_rope_freq_base((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))


def _add_tokens(writer: Any, folder: Path, config: Any, pre_tokenizer: str) -> None:
    """Write the text and type of every token, and the merges; unused ids get made-up texts."""
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
    rows = [texts.get(number, (f"[PAD{number}]", UNUSED)) for number in range(config.vocab_size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([text for text, _ in rows])
    writer.add_token_types([kind for _, kind in rows])
    writer.add_token_merges(merges or ["a b"])  # llama.cpp refuses a file without merges.
    for name in ("bos", "eos", "pad"):
        number = getattr(config, f"{name}_token_id", None)
        if isinstance(number, list):
            number = number[0]
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(False)


def _paired(stored: str, values: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    """Return the rows of query and key weights in llama.cpp's order; other weights unchanged.

    Args: values: float32, shape (heads · head size, hidden) or, for a bias, (heads · head size,).
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    n_heads = heads.get(stored.split(".")[-2])
    if n_heads is None:
        return values
    halves = values.reshape(n_heads, 2, -1, *values.shape[1:])  # (heads, 2, head size / 2, hidden)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
