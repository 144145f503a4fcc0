"""Models in the stores of other programs: their names, and the errors of damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from swiftopt.core.errors import ModelNotFound
from swiftopt.models import stores
from swiftopt.models.sources import resolve
from swiftopt.models.stores import StoredModel, find_stored, stored_models

CONTENT = b"GGUF and no more"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty home folder, without other stores."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def file(path: Path, content: bytes = CONTENT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def pull(root: Path, place: str, *more: str, content: bytes = CONTENT) -> tuple[Path, Path]:
    """Store a model as Ollama does, with layers of `more` media types; return its manifest and its blob."""
    digest = sha256(content).hexdigest()
    kinds = ["application/vnd.ollama.image.template", stores.OLLAMA_MODEL, *more]
    layers = [{"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)} for kind in kinds]
    manifest = {"schemaVersion": 2, "config": {"digest": f"sha256:{digest}"}, "layers": layers}
    blob = file(root / "blobs" / f"sha256-{digest}", content)
    return file(root / "manifests" / place, json.dumps(manifest).encode()), blob


def names() -> list[str]:
    return [model.name for model in stored_models()]


def test_ollamas_models_are_opened_by_their_names_there(home: Path) -> None:
    _, blob = pull(home / "ollama", "registry.ollama.ai/library/llama3.2/1b")
    pull(home / "ollama", "registry.ollama.ai/library/qwen3/latest")
    pull(home / ".ollama" / "models", "registry.ollama.ai/someone/tuned/v1")
    pull(home / ".ollama" / "models", "hf.co/bartowski/small-GGUF/Q4_K_M")
    assert names() == [
        *("ollama:hf.co/bartowski/small-GGUF:Q4_K_M", "ollama:llama3.2:1b"),
        *("ollama:qwen3:latest", "ollama:someone/tuned:v1"),
    ]
    source = resolve("ollama:llama3.2:1b")
    assert (source.kind, source.location) == ("gguf", str(blob))
    assert source.names == ("ollama:llama3.2:1b", str(blob))
    assert resolve("ollama:qwen3").names == ("ollama:qwen3", "ollama:qwen3:latest", str(blob))


def test_lm_studios_files_are_opened_without_projectors_and_later_parts(home: Path) -> None:
    folder = home / ".lmstudio" / "models" / "publisher"
    path = file(folder / "repo" / "small-Q4_K_M.gguf")
    for name in ("mmproj-small-f16.gguf", "big-00002-of-00002.gguf", "notes.txt"):
        file(folder / "repo" / name)
    first = file(folder / "split" / "big-00001-of-00002.gguf")
    file(home / ".cache" / "lm-studio" / "models" / "older" / "repo" / "old.gguf")
    assert names() == [
        *("lmstudio:older/repo/old.gguf", "lmstudio:publisher/repo/small-Q4_K_M.gguf"),
        "lmstudio:publisher/split/big-00001-of-00002.gguf",
    ]
    for name in ("/small-Q4_K_M.gguf", "/small-Q4_K_M", ""):
        assert resolve(f"lmstudio:publisher/repo{name}").location == str(path)
    assert resolve("lmstudio:publisher/split").location == str(first)


def snapshot(home: Path, hub_id: str, revision: str) -> Path:
    folder = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    file(folder / "refs" / "main", b"newer")
    return folder / "snapshots" / revision


def linked(path: Path, content: bytes = CONTENT) -> Path:
    """Store a file as the hub's client does, as a link to a blob."""
    blob = file(path.parents[2] / "blobs" / sha256(str(path).encode()).hexdigest(), content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(blob)
    return path


def test_the_hubs_cache_lists_models_and_repositories_of_gguf_files(home: Path) -> None:
    path = linked(snapshot(home, "someone/small-GGUF", "newer") / "small.Q4_K_M.gguf")
    linked(snapshot(home, "someone/small-GGUF", "older") / "small.Q8_0.gguf")
    whole = snapshot(home, "org/whole", "newer")
    linked(whole / "config.json", b'{"model_type": "llama"}')
    for name in ("model.safetensors", "tokenizer.json"):
        linked(whole / name)
    linked(snapshot(home, "org/images", "newer") / "config.json", b'{"model_type": "vit"}')
    assert names() == ["hub:someone/small-GGUF/small.Q4_K_M.gguf", "org/whole"]
    source = resolve("someone/small-GGUF")
    assert (source.kind, source.location) == ("gguf", str(path))
    assert resolve("hub:someone/small-GGUF/small.Q4_K_M.gguf").location == str(path)
    source = resolve("hub:org/whole")
    assert (source.kind, source.location) == ("hub", "org/whole")


def test_of_several_files_one_has_to_be_named(home: Path) -> None:
    for kind in ("Q4_K_M", "Q8_0"):
        linked(snapshot(home, "someone/small-GGUF", "newer") / f"{kind}.gguf")
    with pytest.raises(ModelNotFound, match="is 2 GGUF files: name one of them, such as hub:someone/small-GGUF/Q4_K_M"):
        resolve("someone/small-GGUF")


DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no JSON": (lambda manifest, blob: manifest.write_text("{"), "cannot be read: pull the model again"),
    "no object": (lambda manifest, blob: manifest.write_text("[]"), "cannot be read: pull the model again"),
    "no text": (lambda manifest, blob: manifest.write_bytes(b"\xff\xfe"), "cannot be read: pull the model again"),
    "no layers": (lambda manifest, blob: manifest.write_text('{"layers": []}'), "names 0 GGUF files"),
    "a way out": (
        lambda manifest, blob: manifest.write_text(manifest.read_text().replace("sha256:", "../../sha256:")),
        "names no blob by its SHA-256",
    ),
    "no blob": (lambda manifest, blob: blob.unlink(), "is missing: pull the model again"),
    "another file": (lambda manifest, blob: blob.write_bytes(b"PK"), "is no GGUF file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_listed_and_said_why(home: Path, damage: str) -> None:
    act, words = DAMAGES[damage]
    act(*pull(home / "ollama", "registry.ollama.ai/library/llama3.2/1b"))
    (model,) = stored_models()
    assert model.name == "ollama:llama3.2:1b" and words in (model.problem or "")
    with pytest.raises(ModelNotFound, match=words):
        resolve("ollama:llama3.2:1b")


def test_a_model_with_an_adapter_is_refused(home: Path) -> None:
    pull(home / "ollama", "registry.ollama.ai/library/tuned/v1", stores.OLLAMA_ADAPTER)
    with pytest.raises(ModelNotFound, match="adds an adapter"):
        resolve("ollama:tuned:v1")


def test_a_name_that_a_store_does_not_have_gets_the_nearest_or_where_was_looked(home: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"nothing is in .*\.lmstudio"):
        resolve("lmstudio:small.gguf")
    pull(home / "ollama", "registry.ollama.ai/library/llama3.2/1b")
    with pytest.raises(ModelNotFound, match=r"did you mean ollama:llama3\.2:1b"):
        resolve("ollama:llama3.2:3b")
    assert find_stored("qwen2.5-0.5b") is None


def test_the_first_folder_that_has_a_name_wins(home: Path) -> None:
    pull(home / "ollama", "registry.ollama.ai/library/llama3.2/1b")
    pull(home / ".ollama" / "models", "registry.ollama.ai/library/llama3.2/1b", content=b"GGUF, another")
    (model,) = stored_models()
    assert model == StoredModel("ollama", model.name, resolve_blob(home / "ollama"), len(CONTENT))


def resolve_blob(root: Path) -> Path:
    return root / "blobs" / f"sha256-{sha256(CONTENT).hexdigest()}"
