"""Models that other programs store on this machine: Ollama's blobs, LM Studio's folders, the hub's cache.

A store is a row of `STORES`. Its models are opened in place: nothing is copied.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from ..core.errors import ModelNotFound, SwiftoptError
from .adapters import is_adapter
from .saved import has_tokenizer, is_complete, refuse_other_file, supported_type

OLLAMA_MODEL = "application/vnd.ollama.image.model"  # The media type of a manifest's layer that is a GGUF file.
OLLAMA_ADAPTER = "application/vnd.ollama.image.adapter"
OLLAMA_DEFAULTS = ("registry.ollama.ai", "library")  # Registry and namespace of names without them.
PROJECTOR = "mmproj"  # Part of the file names of image encoders, which are not language models.
LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in a store. `name` opens it; `path` is its GGUF file (the first of a split one) or its folder.

    `n_bytes` is the size of that file, or of the folder's weights. `problem` is a sentence on why the model cannot be
    opened; None: no problem is known.
    """

    store: str
    name: str
    path: Path
    n_bytes: int = 0
    problem: str | None = None

    @property
    def is_gguf(self) -> bool:
        return not self.path.is_dir()


@dataclass(frozen=True, slots=True)
class ModelStore:
    """A program's store: its title, the folders where it may be, and the function that lists a folder's models."""

    title: str
    roots: Callable[[], list[Path]]
    read: Callable[[Path], Iterator[StoredModel]]

    def models(self) -> list[StoredModel]:
        """Return the store's models by name, each from the first folder that has it; unreadable folders are ignored."""
        models_by_name: dict[str, StoredModel] = {}
        for root in self.roots():
            try:
                for model in self.read(root):
                    models_by_name.setdefault(model.name, model)
            except OSError:
                continue
        return [models_by_name[name] for name in sorted(models_by_name)]


def _gguf(store: str, name: str, path: Path) -> StoredModel:
    try:
        refuse_other_file(path)
        return StoredModel(store, name, path, path.stat().st_size)
    except (SwiftoptError, OSError) as error:
        return StoredModel(store, name, path, problem=str(error))


# --- Ollama


def _ollama_roots() -> list[Path]:
    root = os.environ.get("OLLAMA_MODELS")
    # The second folder is that of Ollama's system service.
    homes = Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")
    return [*([Path(root).expanduser()] if root else []), *homes]


def _read_ollama(root: Path) -> Iterator[StoredModel]:
    manifests = root / "manifests"
    for manifest in sorted(manifests.glob("*/*/*/*")):
        if not manifest.is_file():
            continue
        *places, tag = manifest.relative_to(manifests).parts
        for default in OLLAMA_DEFAULTS:
            if places[0] != default:
                break
            del places[0]
        name = f"ollama:{'/'.join(places)}:{tag}"
        try:
            yield _gguf("ollama", name, _ollama_blob(root, manifest))
        except ModelNotFound as error:
            yield StoredModel("ollama", name, manifest, problem=str(error))


def _ollama_blob(root: Path, manifest: Path) -> Path:
    """Return the GGUF file of a manifest.

    Raises: ModelNotFound: the manifest is damaged, or its model is not exactly one GGUF file.
    """
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == OLLAMA_MODEL]
        has_adapter = any(layer["mediaType"] == OLLAMA_ADAPTER for layer in layers)
        digest = _DIGEST.fullmatch(digests[0]) if digests else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelNotFound(f"Ollama's manifest {manifest} cannot be read: pull the model again") from error
    if has_adapter:
        raise ModelNotFound(f"Ollama's manifest {manifest} adds an adapter to its model: merge the adapter first")
    if len(digests) != 1:
        raise ModelNotFound(f"Ollama's manifest {manifest} names {len(digests)} GGUF files: pull a model that is one")
    if digest is None:
        raise ModelNotFound(f"Ollama's manifest {manifest} names no blob by its SHA-256: pull the model again")
    blob = root / "blobs" / f"sha256-{digest[1]}"
    if not blob.is_file():
        raise ModelNotFound(f"Ollama's blob {blob} is missing: pull the model again")
    return blob


# --- LM Studio


def _lmstudio_roots() -> list[Path]:
    return [Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"]


def _read_ggufs(store: str, folder: Path, pattern: str, prefix: str = "") -> Iterator[StoredModel]:
    for path in sorted(folder.glob(pattern)):
        is_other = PROJECTOR in path.name.lower() or LATER_PART.search(path.name)
        if path.is_file() and not is_other:
            yield _gguf(store, f"{store}:{prefix}{path.relative_to(folder).as_posix()}", path)


def _read_lmstudio(root: Path) -> Iterator[StoredModel]:
    return _read_ggufs("lmstudio", root, "*/*/*.gguf")


# --- the hub's cache


def _hub_roots() -> list[Path]:
    from huggingface_hub.constants import HF_HUB_CACHE

    return [Path(HF_HUB_CACHE)]


def _read_hub(root: Path) -> Iterator[StoredModel]:
    for repository in sorted(root.glob("models--*--*")):
        hub_id = "/".join(repository.name.split("--", 2)[1:])
        snapshot = _snapshot(repository)
        if snapshot is None:
            continue
        yield from _read_ggufs("hub", snapshot, "**/*.gguf", f"{hub_id}/")
        try:
            is_model = is_complete(snapshot) and has_tokenizer(snapshot) and not is_adapter(snapshot)
            if is_model and supported_type(snapshot):
                n_bytes = sum(path.stat().st_size for path in snapshot.glob("*.safetensors"))
                yield StoredModel("hub", hub_id, snapshot, n_bytes)
        except (SwiftoptError, OSError):  # The cache also has repositories that are not language models.
            continue


def _snapshot(repository: Path) -> Path | None:
    """Return the snapshot folder of the repository's main branch, or else the newest snapshot."""
    folders = [path for path in repository.glob("snapshots/*") if path.is_dir()]
    main = repository / "refs" / "main"
    revision = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
    named = [path for path in folders if path.name == revision]
    return next(iter(named or sorted(folders, key=lambda path: -path.stat().st_mtime)), None)


def hub_ggufs(hub_id: str) -> list[StoredModel]:
    """Return the GGUF files of a hub model if its snapshot in the cache has no other weights; else []."""
    repositories = [root / f"models--{hub_id.replace('/', '--')}" for root in _hub_roots()]
    for repository in repositories:
        snapshot = _snapshot(repository) if repository.is_dir() else None
        if snapshot is not None and not (snapshot / "config.json").is_file():
            return list(_read_ggufs("hub", snapshot, "**/*.gguf", f"{hub_id}/"))
    return []


STORES: dict[str, ModelStore] = {
    "ollama": ModelStore("Ollama", _ollama_roots, _read_ollama),
    "lmstudio": ModelStore("LM Studio", _lmstudio_roots, _read_lmstudio),
    "hub": ModelStore("the hub's cache", _hub_roots, _read_hub),
}


def stored_models() -> list[StoredModel]:
    """Return the models of all stores on this machine; only manifests and the first bytes of files are read."""
    return [model for store in STORES.values() for model in store.models()]


def find_stored(name: str) -> StoredModel | None:
    """Return the model of a name such as ollama:llama3.2:1b; None: the name is not that of a store.

    The tag "latest" may be omitted, and so may the file's name if a folder has only one file.

    Raises: ModelNotFound: the store has no such model, several, or one that cannot be opened.
    """
    store = STORES.get(name.partition(":")[0])
    if store is None:
        return None
    models = store.models()
    exact_matches = [
        model for model in models if model.name in (name, f"{name}:latest", f"{name}.gguf", name.removeprefix("hub:"))
    ]
    return only(name, exact_matches or [model for model in models if model.name.startswith(f"{name}/")], store, models)


def only(name: str, found: list[StoredModel], store: ModelStore, models: list[StoredModel]) -> StoredModel:
    """Return the only model in `found`.

    Raises: ModelNotFound: there is none, several, or one that cannot be opened.
    """
    if not found:
        near = get_close_matches(name, [model.name for model in models], n=1)
        roots = " and ".join(str(root) for root in store.roots())
        if near:
            advice = f"did you mean {near[0]}?"
        elif models:
            advice = f"there are {len(models)} others in {roots}: `swiftopt models` lists them"
        else:
            advice = f"nothing is in {roots}"
        raise ModelNotFound(f"{store.title} has no model {name} on this machine: {advice}")
    if len(found) > 1:
        raise ModelNotFound(f"{name} is {len(found)} GGUF files: name one of them, such as {found[0].name}")
    if found[0].problem is not None:
        raise ModelNotFound(found[0].problem)
    return found[0]
