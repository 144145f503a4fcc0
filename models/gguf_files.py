"""GGUF files: one as a model's folder, and a folder's weights as such files for the engines that read that format.

A file is converted once and kept in the user's cache. Codes of Q8_0 and Q4_0 stay as they are, number by number, in a
checkpoint of compressed-tensors; all else becomes bfloat16. Files that are written are for token ids in and token ids
out: their tokenizer names every token, but splits no text as the model's own does.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..core.errors import ModelNotFound, OutputError, SettingsError, SwiftoptError, UnsupportedModel
from .buffer import free_bytes
from .coded import PackedForm, packed
from .families import FAMILIES, GgufForm, family_of
from .fingerprint import fingerprint
from .gguf_settings import FIELDS, take_ends, take_settings, take_split
from .saved import (
    LEFTOVERS,
    OnStep,
    cache_root,
    converted_folder,
    first_line,
    no_step,
    refuse_mismatched,
    refuse_missing,
    refuse_other_file,
    remove_stale,
    replacing,
    share,
    stored_tensors,
    supported_config,
    supported_type,
)

BLOCK = 32  # inputs that share a scale
FORMS = {"Q8_0": PackedForm(8, BLOCK), "Q4_0": PackedForm(4, BLOCK)}
SCALE_BYTES = 2  # Bytes of a block's scale, in float16, ahead of its codes.
HEAD, EMBEDDING = "lm_head", "token_embd.weight"
FACTORS = "rope_f"  # what the names of tensors of rotary factors begin with

Rounding = Literal["stored", "F16", "Q8_0", "Q4_0"]
WRITER = "1"  # part of every file's folder; raise it when the writing changes
STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types of GGUF


def converted(gguf: Path, on_step: OnStep) -> Path:
    """Return the folder of the file's weights and tokenizer, converting the file the first time.

    It appears under its name only when it is complete, so that processes may convert at the same time.

    Raises: ModelNotFound: no readable GGUF file. UnsupportedModel: its architecture, or what would be lost of it.
        SettingsError: there is too little memory. OutputError: the cache cannot be written.
    """
    folder = converted_folder(gguf)
    if _is_whole(folder):
        return folder
    on_step(f"converting {gguf.name}, only once")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(folder.parent.glob(".*"))
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
        ) as unfinished:
            with _parsed_once():
                _check(gguf)
                model, tokenizer, coded = _read(gguf)
            on_step("writing the converted model to the cache")
            model.save_pretrained(unfinished, state_dict=None if coded is None else coded[0])
            if coded is not None:
                path = Path(unfinished) / "config.json"
                path.write_text(json.dumps({**json.loads(path.read_text()), **coded[1]}, indent=2) + "\n")
            tokenizer.save_pretrained(unfinished)
            share(Path(unfinished))
            _publish(unfinished, folder)
    except SwiftoptError:
        raise
    except Exception as error:  # safetensors wraps a full disk in an error of its own
        raise OutputError(
            f"the cache {folder.parent} cannot be written ({first_line(error)}): make room there or set"
            " SWIFTOPT_CACHE_DIR"
        ) from error
    return folder


def _check(gguf: Path) -> None:
    """Refuse files that transformers would fail on with a traceback, or read wrongly in silence."""
    import gguf as gguf_library

    refuse_other_file(gguf)
    try:
        reader = gguf_library.GGUFReader(str(gguf))
        rotary = {
            key.partition(".rope.")[2]: field.contents() for key, field in reader.fields.items() if ".rope." in key
        }
        factor = rotary.get("scaling.factor", rotary.get("scale_linear", 1.0))  # which without a type is linear
        scaling = rotary.get("scaling.type", "none" if factor in (0.0, 1.0) else "linear")
        factors = [tensor.data for tensor in reader.tensors if tensor.name.startswith(FACTORS)]
        n_weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
        n_parts = reader.fields["split.count"].contents() if "split.count" in reader.fields else 1
    except Exception as error:  # the reader has no error of its own: a damaged file can raise almost anything
        raise ModelNotFound(f"{gguf} is damaged or cut short ({first_line(error)}): download it again") from error
    if n_parts > 1:
        raise UnsupportedModel(
            f"{gguf} is one of {n_parts} files that hold the model together: join them by `llama-gguf-split --merge`"
        )
    needed, free = 4 * n_weights, free_bytes(torch.device("cpu"))
    if needed > free:
        raise SettingsError(
            f"{gguf} takes {needed / 1e9:.1f} GB of memory while it is converted, in float32, but this machine has"
            f" {free / 1e9:.1f} GB free: use a smaller model, or its hub id"
        )
    if scaling not in ("none", "") or any(bool((values != 1).any()) for values in factors):
        raise UnsupportedModel(
            f"{gguf} scales its rotary positions, which transformers drops when it reads GGUF: use the model's hub id"
        )


def _read(gguf: Path) -> tuple[Any, Any, tuple[dict[str, Any], dict[str, Any]] | None]:
    """Read the model, in bfloat16, its tokenizer, and `coded_checkpoint`'s part; tied weights stay tied."""
    import gguf as gguf_library
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    reader = gguf_library.GGUFReader(str(gguf))
    try:
        config = AutoConfig.from_pretrained(**where)
        family_of(config)
        prefix = f"{reader.fields['general.architecture'].contents()}."
        settings = {key: field.contents() for key, field in reader.fields.items() if key.startswith(prefix)}
        take_settings({key.removeprefix(prefix): value for key, value in settings.items()}, config, gguf)
        family_of(config)  # it may ask for what no test proves
        tokenizer = AutoTokenizer.from_pretrained(**where)
        take_split(reader, tokenizer, gguf)
        model, loading_info = auto.from_pretrained(
            **where, config=config, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except UnsupportedModel:
        raise
    except Exception as error:  # as in _check
        if "is not supported" in str(error):
            supported = ", ".join(sorted(FAMILIES))
            raise UnsupportedModel(
                f"{gguf} is of an architecture that is not supported: use one of {supported}"
            ) from error
        raise ModelNotFound(f"{gguf} cannot be converted ({first_line(error)}): download it again") from error
    refuse_mismatched(loading_info["mismatched_keys"], gguf, "its settings")
    refuse_missing(loading_info["missing_keys"], gguf)
    _refuse_unread(reader, model, gguf)
    take_ends(reader, tokenizer, model.generation_config)
    coded = coded_checkpoint(reader, model)
    return _plain(model.to(torch.bfloat16)), tokenizer, coded


def _refuse_unread(reader: Any, model: Any, gguf: Path) -> None:
    """Raises: UnsupportedModel: the file has weights, of biases or experts say, that transformers leaves out."""
    places = _places(reader.fields["general.architecture"].contents(), model.config)
    read = {places.get_name(stored_name, try_suffixes=(".weight", ".bias")) for stored_name in model.state_dict()}
    for tensor in reader.tensors:
        if tensor.name not in read and not tensor.name.startswith(FACTORS):
            raise UnsupportedModel(
                f"{gguf} has a tensor {tensor.name!r}, which transformers drops when it reads GGUF: use the model's hub"
                " id"
            )


def _plain(model: Any) -> Any:
    """Return the same weights in a model without GGUF settings: transformers refuses to save the one it read."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = auto.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Give transformers one reader for config, tokenizer and weights, and one map of names.

    It would parse the file for each of them, and make the map anew for each module. The reader slices the file as a
    plain array: a memmap takes five times as long for that.
    """
    import gguf as gguf_library

    library: Any = gguf_library
    reader, name_map = library.GGUFReader, library.get_tensor_name_map

    class Reader(reader):  # type: ignore[misc, valid-type]  # it is Any
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    try:
        library.GGUFReader, library.get_tensor_name_map = cache(Reader), cache(name_map)
        yield
    finally:
        library.GGUFReader, library.get_tensor_name_map = reader, name_map


def _is_whole(folder: Path) -> bool:
    """Tell whether a converted folder is there, its weights as long as they say: crashes may cut them."""
    try:
        supported_type(folder)
        with stored_tensors(folder):
            return True
    except SwiftoptError:
        return False


def _publish(unfinished: str, folder: Path) -> None:
    try:
        os.replace(unfinished, folder)
    except OSError:
        if _is_whole(folder):  # another process was faster, with the same result
            return
        shutil.rmtree(folder, ignore_errors=True)  # remains that a crash of the machine, or somebody, has damaged
        os.replace(unfinished, folder)


def coded_checkpoint(reader: Any, model: Any) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return a state with the file's codes in place of weights, bfloat16 for all else, and the config's fields for it.

    The codes are those of linear maps in the type that most of them have; None where that is neither Q8_0 nor Q4_0.

    Args: reader: gguf's, of the file. model: as transformers read it, in float32: what the codes have to stand for.
    """
    tensors = _tensors_of_maps(reader, model)
    (kind, _), *_ = Counter(tensor.tensor_type.name for tensor in tensors.values()).most_common(1) or [("", 0)]
    if kind not in FORMS:
        return None
    state, plain = dict(model.state_dict()), []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        tensor, coded = tensors.get(name), None
        if tensor is not None and tensor.tensor_type.name == kind:
            coded = _coded(tensor, module.weight, model.config)
        if coded is None:
            plain.append(name)
            continue
        del state[f"{name}.weight"]
        state |= {f"{name}.{part}": value for part, value in coded.items()}
    tied = bool(model.config.tie_word_embeddings) and HEAD in plain
    config = {**FORMS[kind].config(plain), "ignore": sorted(plain)}  # the head is coded, too, where it can be
    state = {name: value.to(torch.bfloat16) if value.dtype == torch.float32 else value for name, value in state.items()}
    return state, {"quantization_config": config, "tie_word_embeddings": tied}


def _tensors_of_maps(reader: Any, model: Any) -> dict[str, Any]:
    """The file's tensors of the model's linear maps; of a head that is tied, the embedding's."""
    stored: Mapping[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
    places = _places(reader.fields["general.architecture"].contents(), model.config)
    tensors = {}
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            place = places.get_name(f"{module_name}.weight", try_suffixes=(".weight",))
            tensor = stored.get(place or "") or (stored.get(EMBEDDING) if module_name == HEAD else None)
            if tensor is not None:
                tensors[module_name] = tensor
    return tensors


def _places(architecture: str, config: Any) -> Any:
    """gguf's map from transformers' names of tensors to those of a file."""
    import gguf

    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    return gguf.get_tensor_name_map(arch, config.num_hidden_layers)


def _coded(tensor: Any, weight: Tensor, config: Any) -> dict[str, Tensor] | None:
    """A matrix's tensors in the checkpoint; None where its codes are not seen to stand for that weight."""
    n_out, n_in = weight.shape
    blocks = np.asarray(tensor.data).reshape(n_out, n_in // BLOCK, -1)
    scales = torch.from_numpy(blocks[..., :SCALE_BYTES].copy().view(np.float16)[..., 0])
    packed_codes = torch.from_numpy(blocks[..., SCALE_BYTES:].copy())
    bits = FORMS[tensor.tensor_type.name].bits
    # Bytes of Q8_0 have a sign; those of Q4_0 hold the first half of a block in their low halves.
    codes = (packed_codes ^ 128 if bits == 8 else torch.cat((packed_codes & 15, packed_codes >> 4), dim=-1)).flatten(1)
    values = (codes.short() - (1 << (bits - 1))).float() * scales.float().repeat_interleave(BLOCK, dim=1)
    rows = _rows_in_order(values, weight, config)
    if rows is None:
        return None
    words = packed(codes[rows], bits)
    return {"weight_packed": words, "weight_scale": scales[rows], "weight_shape": torch.tensor([n_out, n_in])}


def _rows_in_order(values: Tensor, weight: Tensor, config: Any) -> Tensor | None:
    """The file's rows in the order of the weight's: llama.cpp keeps rotary pairs side by side in some models."""
    as_filed = torch.arange(len(values))
    orders = [as_filed]
    for n_heads in {config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)}:
        if len(values) % (2 * n_heads) == 0:
            orders.append(as_filed.view(n_heads, -1, 2).transpose(1, 2).reshape(-1))
    return next((rows for rows in orders if torch.equal(values[rows], weight.float())), None)


def stored_type(folder: Path) -> str:
    """Return GGUF's name for the type of the folder's weights: BF16, F16 or F32.

    Raises: UnsupportedModel: they are of another type.
    """
    config = supported_config(folder)
    name = str(config.dtype or "float32").removeprefix("torch.")
    if name not in STORED:
        raise UnsupportedModel(
            f"the weights in {folder} are stored as {name}: GGUF files are made of {', '.join(sorted(STORED))}"
        )
    return STORED[name]


def gguf_of(folder: Path, rounding: Rounding, on_step: OnStep = no_step) -> Path:
    """Return the GGUF file of the folder's weights in the cache, written where it is not there yet.

    "stored" keeps the type of the weights; "F16", "Q8_0" and "Q4_0" round every matrix to it, embeddings included.
    Vectors are in F32. F16 holds bfloat16 values exactly from 2^-17 to 65504, and smaller ones to within 2^-25.

    Raises: UnsupportedModel: llama.cpp's form of this architecture is not known here. ModelNotFound: the folder's
        weights cannot be read. OutputError: the cache cannot be written.
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
    """Write the folder's weights in one file, matrices as `kind` (a GGUF type), tensor by tensor.

    Raises: as `gguf_of`, but OSError where the file cannot be written.
    """
    import gguf

    config = supported_config(folder)
    form = _form_of(config, folder)
    names = _places(form.architecture, config)
    types = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(str(path), form.architecture)
    _add_settings(writer, config, gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    _add_tokens(writer, folder, config, form.pre_tokenizer)
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
    form = FAMILIES[config.model_type].gguf
    if form is None:
        written = sorted(name for name, family in FAMILIES.items() if family.gguf is not None)
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
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_file_type(file_type)
    for key, field in FIELDS.items():
        value = getattr(config, field)
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{writer.arch}.{key}", value)
    for name in ("key_length", "value_length", "rope_dimension_count"):
        getattr(writer, f"add_{name}")(head_dim)
    writer.add_rope_freq_base((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))


def _add_tokens(writer: Any, folder: Path, config: Any, pre_tokenizer: str) -> None:
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
    rows = [texts.get(number, (f"[PAD{number}]", UNUSED)) for number in range(config.vocab_size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
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
    """Return rows of query and key in llama.cpp's order; other weights as they are.

    Args: values: float32, shape (heads · head size, hidden) or, for a bias, (heads · head size,).
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    n_heads = heads.get(stored.split(".")[-2])
    if n_heads is None:
        return values
    halves = values.reshape(n_heads, 2, -1, *values.shape[1:])  # (heads, 2, head size / 2, hidden)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
