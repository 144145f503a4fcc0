"""Identifies a model by a hash of what determines its function.

The hash covers the fields of the config that change the function, and the name, the shape and 64 values at fixed
positions of every tensor. A folder is hashed as stored, and a model in memory as it was cast. A bfloat16 model has the
same fingerprint in its folder, in memory as bfloat16, and in memory as float32, because that cast is exact. If a cast
rounds weights (float32 or float16 loaded as bfloat16), the model in memory has another fingerprint than its folder, so
`load` always uses the folder's.

The fingerprint of a merged model is a hash of its base's and of the adapter's tensors, sampled in the same way.

The fingerprint of a GGUF file covers its architecture's settings, and bytes of each tensor at fixed positions; the
file's name and place do not matter. A folder that the file was converted to has the same fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.errors import InvalidInput, ModelNotFound, SwiftoptError
from .cache import converted_folder, replacing
from .gguf_reader import GgufFile
from .saved import GGUF_WEIGHTS, LEFTOVERS, is_complete, linked_gguf, naming, supported_config, weight_files

VERSION = "v1"
N_RUNS = 4  # Runs of values sampled per tensor.
RUN_LENGTH = 16  # Consecutive values per run.

# Config fields that do not affect what the model computes: storage, loading, training and special tokens.
_IGNORED = frozenset(
    {
        *("architectures", "auto_map", "dtype", "name_or_path", "torch_dtype", "torchscript", "transformers_version"),
        *("chunk_size_feed_forward", "initializer_range", "pretraining_tp", "is_decoder", "return_dict", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "keys_to_ignore_at_inference"),
        *("finetuning_task", "id2label", "label2id", "prefix", "problem_type", "task_specific_params"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "tokenizer_class"),
    }
)
# Prefixes of base models, removed from names: files of GPT-2 on the hub lack them, and those of Nemotron-H differ.
_PREFIXES = ("model.", "transformer.", "gpt_neox.", "backbone.")
_HEAD = "lm_head.weight"
OF_GGUF = (
    "gguf.json"  # File in a folder converted from GGUF, with the fingerprints of the GGUF file and of the weights.
)
OF_ADAPTER = "merged.json"  # File in a folder of merged weights, with the fingerprint of base and adapter.
OF_WEIGHTS = "weights"  # Key of the fingerprint of the converted weights.


def fingerprint(model: Any, file: GgufFile | None = None) -> str:
    """Compute the fingerprint of a folder (path) or of a causal-LM model in memory: "v1:" and 16 hex digits.

    Only samples of a folder's tensors are read, so the time does not grow with their size. `file`: the folder's GGUF
    file, if it is open already.

    Raises: as `supported_config`. ModelNotFound: the folder has no readable weights. InvalidInput: a weight of the
        model in memory is on the meta device, where nothing is stored.
    """
    if not isinstance(model, str | Path):
        return _digest(model.config, model.state_dict())
    folder = Path(model)
    if (folder / GGUF_WEIGHTS).is_file():
        return _of_gguf(file or GgufFile(linked_gguf(folder)))
    return _noted(folder) or _noted(folder, file=OF_ADAPTER) or _of_weights(folder)


def fingerprint_with(base: str, parts: Iterable[tuple[str, Tensor]]) -> str:
    """Return the fingerprint of a model made of a base, given by its fingerprint, and further named tensors."""
    digest = hashlib.sha256(base.encode())
    for name, tensor in parts:
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(_sample(name, tensor).numpy().tobytes())
    return f"{VERSION}:{digest.hexdigest()[:16]}"


def earlier_fingerprints(folder: Path) -> tuple[str, ...]:
    """Return the fingerprints under which plans of this model may be stored besides `fingerprint`.

    Earlier versions converted GGUF files, and stored plans under the fingerprint of the converted weights.
    """
    try:
        is_settings = (folder / GGUF_WEIGHTS).is_file()
        converted = converted_folder(linked_gguf(folder)) if is_settings else folder
        if not is_complete(converted) or not (is_settings or _noted(folder)):
            return ()
        weights = _noted(converted, OF_WEIGHTS)
        if weights is None:  # Computed once, because it maps hundreds of megabytes, which add to a load's peak memory.
            weights = _of_weights(converted)
            with suppress(OSError):
                _note(converted, {"fingerprint": fingerprint(folder), OF_WEIGHTS: weights})
        return (weights,)
    except SwiftoptError:
        return ()


def note_gguf(folder: Path, gguf: Path) -> None:
    """Record in a folder of converted weights the fingerprint of their GGUF file."""
    _note(folder, {"fingerprint": _of_gguf(GgufFile(gguf))})


def note_merged(folder: Path, identity: str) -> None:
    """Record in a folder of merged weights the fingerprint of base and adapter."""
    _note(folder, {"fingerprint": identity}, OF_ADAPTER)


def _note(folder: Path, fingerprints: Mapping[str, str], file: str = OF_GGUF) -> None:
    with replacing(folder / file) as part:
        part.write_text(json.dumps(fingerprints) + "\n", encoding="utf-8")


def _noted(folder: Path, kind: str = "fingerprint", file: str = OF_GGUF) -> str | None:
    try:
        return str(json.loads((folder / file).read_text(encoding="utf-8"))[kind])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _of_weights(folder: Path) -> str:
    files = weight_files(folder)
    if not files:
        raise ModelNotFound(f"{folder} holds no weights: expected model.safetensors, pytorch_model.bin or their index")
    named = naming(folder)
    tensors = {name: tensor for path in files for name, tensor in _in_file(path, named).items()}
    return _digest(supported_config(folder), tensors)


def _of_gguf(file: GgufFile) -> str:
    settings = {"architecture": file.architecture, **file.own_settings()}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(file.tensors.items()):
        digest.update(f"{name}{tensor.type_name}{list(tensor.shape)}".encode("utf-8", "surrogateescape"))
        digest.update(_sample(name, torch.from_numpy(tensor.data)).to(torch.uint8).numpy().tobytes())
        file.release(tensor)  # Reading a few bytes maps many pages around them.
    return f"{VERSION}:{digest.hexdigest()[:16]}"


def _digest(config: Any, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(_function_of(config), sort_keys=True, default=str).encode())
    tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    for stored in sorted(tensors, key=lambda stored: (plain_name(stored), stored)):
        name = plain_name(stored)
        if name.endswith(LEFTOVERS) or (tied and name == _HEAD):
            continue
        digest.update(f"{name}{list(tensors[stored].shape)}".encode())
        digest.update(_sample(stored, tensors[stored]).numpy().tobytes())
    return f"{VERSION}:{digest.hexdigest()[:16]}"


def _function_of(config: Any) -> dict[str, Any]:
    """Return the config fields that change the function and differ from the class's defaults.

    Defaults are left out, so that a field added by a later transformers does not change every fingerprint.
    """
    try:
        defaults = _relevant(type(config)().to_dict())
    except (TypeError, ValueError):  # The config class cannot be built without arguments.
        defaults = {}
    values = _relevant(config.to_dict())
    kept = {key: value for key, value in values.items() if key not in defaults or value != defaults[key]}
    return {**kept, "model_type": config.model_type}


def _relevant(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(key): _relevant(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key not in _IGNORED
        and value is not None
        and not str(key).startswith("_")
        and not str(key).endswith(("dropout", "dropout_prob", "pdrop"))
    }


def plain_name(name: str) -> str:
    """Return a tensor's name in the loaded transformers model, given its name in a file."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return _HEAD if name == "embed_out.weight" else name  # GPT-NeoX calls its LM head embed_out.


def _sample(name: str, tensor: Tensor) -> Tensor:
    """Return up to 64 values, float32 on the CPU: all of a small tensor, else evenly spaced runs.

    Only these values are read from a file.
    """
    if tensor.is_meta:
        raise InvalidInput(f"weight {name} is on the meta device: load the model with all its weights in memory")
    flat = tensor.detach().reshape(-1)
    if len(flat) > N_RUNS * RUN_LENGTH:
        starts = [i * (len(flat) - RUN_LENGTH) // (N_RUNS - 1) for i in range(N_RUNS)]
        flat = torch.cat([flat[start : start + RUN_LENGTH] for start in starts])
    return flat.to("cpu").to(torch.float32)


def _in_file(path: Path, named: Callable[[str], str | None]) -> dict[str, Tensor]:
    """Return the tensors of a file that are loaded, by name in the model."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                stored_names = file.keys()
                return {name: file.get_tensor(stored) for stored in stored_names if (name := named(stored))}
        values = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        tensors = {stored: tensor for stored, tensor in values.items() if isinstance(tensor, Tensor)}
        return {name: tensor for stored, tensor in tensors.items() if (name := named(stored))}
    except FileNotFoundError as error:
        raise ModelNotFound(f"the weights {path} are missing: copy the model's folder again") from error
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelNotFound(f"the weights {path} cannot be read: copy the model's folder again") from error
