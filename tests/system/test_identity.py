"""Which model a GGUF file is: one value wherever it lies, by which its plans are found."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import write_gguf
from families import tiny_model

from swiftopt.core.errors import ModelNotFound, OutputError
from swiftopt.core.records import Plan
from swiftopt.models import loading, quantised_checkpoints
from swiftopt.models.fingerprint import OF_GGUF, fingerprint
from swiftopt.models.gguf_files import converted
from swiftopt.models.gguf_reader import GgufFile
from swiftopt.models.runtime import Runtime
from swiftopt.models.saved import no_step
from swiftopt.models.sources import local_folder, resolve
from swiftopt.store import Store

PLAN = Plan("spd", settings={"draft_length": 5}, verdict="use", device="here", dtype="bfloat16")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file, beside a cache and a home of its own."""
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", torch.float32))


def load(name: Path | str) -> Runtime:
    return loading.load(str(name), speed="eager")


def test_a_moved_and_renamed_file_is_the_same_model(file: Path, tmp_path: Path) -> None:
    first = load(file).info
    (tmp_path / "elsewhere").mkdir()
    moved = load(file.rename(tmp_path / "elsewhere" / "other-name.gguf")).info
    assert moved.fingerprint == first.fingerprint and moved.names != first.names


def _other_setting(writer: Any) -> None:
    writer.add_float32("llama.rope.freq_base", 5000.0)


CHANGES: dict[str, Callable[[Path], object]] = {
    "another setting": lambda path: write_gguf(path, tiny_model("llama", torch.float32), more=_other_setting),
    "other weights": lambda path: write_gguf(path, tiny_model("llama", torch.float32, seed=1)),
    "another type": lambda path: write_gguf(path, tiny_model("llama", torch.float32), kind="F16"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_content_under_the_same_name_is_another_model(file: Path, change: str) -> None:
    before = load(file).info.fingerprint
    CHANGES[change](file)
    assert load(file).info.fingerprint != before


def test_plans_of_the_old_conversion_are_found(file: Path, tmp_path: Path) -> None:
    folder = converted(file, no_step)
    (folder / OF_GGUF).unlink()  # Versions that computed with the conversion wrote no such file.
    old = load(folder).info
    assert old.earlier == ()
    with Store.open(str(tmp_path / "plans.db")) as store:
        store.remember_model(replace(old, names=(str(file),)))
        found = store.add_plan(str(file), "code", PLAN)
        new = load(file).info
        assert new.fingerprint != old.fingerprint and new.earlier == (old.fingerprint,)
        store.remember_model(new)
        assert store.lookup(new.fingerprint, "code") == store.lookup(str(file), "code") == found


def test_a_folder_converted_for_other_engines_is_the_model_of_its_file(file: Path) -> None:
    folder = local_folder(resolve(str(file)))
    own = load(file).info
    assert fingerprint(folder) == own.fingerprint and load(folder).info.earlier == own.earlier
    (folder / OF_GGUF).unlink()
    assert local_folder(resolve(str(file))) == folder and fingerprint(folder) == own.fingerprint


def test_blobs_of_stores_are_loaded_where_they_are(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = load(file).info
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    blob = tmp_path / "ollama" / "blobs" / f"sha256-{'a' * 64}"
    manifest = tmp_path / "ollama" / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "1b"
    for path in (blob, manifest):
        path.parent.mkdir(parents=True)
    file.rename(blob)
    layer = '{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:' + "a" * 64 + '"}'
    manifest.write_text(f'{{"layers": [{layer}]}}')
    assert load("ollama:tiny:1b").info.fingerprint == own.fingerprint
    snapshot = tmp_path / "hub" / "models--org--tiny-GGUF" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "tiny.gguf").symlink_to(os.path.relpath(blob, snapshot))
    assert load("org/tiny-GGUF").info.fingerprint == own.fingerprint


def test_file_truncated_during_loading_is_reported_in_a_sentence(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(file)
    config_of = quantised_checkpoints.unquantised_config

    def cutting(folder: Path, dtype: str) -> Any:
        made = config_of(folder, dtype)
        reader = GgufFile.refuse_changed

        def refuse(own: GgufFile) -> None:
            os.truncate(file, 4096)
            reader(own)

        monkeypatch.setattr(GgufFile, "refuse_changed", refuse)
        return made

    monkeypatch.setattr(quantised_checkpoints, "unquantised_config", cutting)
    with pytest.raises(ModelNotFound, match="was changed while it was read"):
        load(file)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_full_or_read_only_cache_is_reported_in_a_sentence(
    file: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, *args: Any, **more: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(
        OutputError, match=rf"cannot be written \({os.strerror(number)}\): make room there or set SWIFT"
    ):
        load(file)
