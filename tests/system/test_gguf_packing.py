"""Weights of a GGUF file that are packed in a thread before a load: the same bits, and the same errors."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import write_gguf
from families import tiny_model
from native import library

from swiftopt.core.errors import ModelNotFound
from swiftopt.models import gguf_packing, loading
from swiftopt.models.block_maps import BlockEmbedding, BlockLinear
from swiftopt.models.gguf_packing import EarlyPacking, begin_packing, opened, packing_of
from swiftopt.models.loading import load
from swiftopt.models.runtime import Runtime

WANTED: dict[str, Any] = {"dtype": "auto", "device": "cpu", "speed": "auto"}


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch, new_cache: Path) -> None:
    library()
    monkeypatch.setenv("SWIFTOPT_THREADS", "2")


def written(folder: Path, family: str = "qwen2", hidden_size: int = 64) -> Path:
    model = tiny_model(family, torch.float32, hidden_size=hidden_size, intermediate_size=96)
    return write_gguf(folder / "model.gguf", model, "Q8_0")


def begun(path: Path) -> EarlyPacking:
    begin_packing(path, **WANTED)
    return gguf_packing._begun[path]


def parts_of(runtime: Runtime) -> dict[str, torch.Tensor]:
    modules: Any = runtime.hf_model.named_modules()
    coded = {name: one.packed for name, one in modules if isinstance(one, BlockLinear | BlockEmbedding)}
    return {f"{name}.{part}": getattr(one, part) for name, one in coded.items() for part in ("codes", "scales")}


@pytest.mark.parametrize(("family", "n_left"), [("qwen2", 0), ("llama", 2 * 4)])
def test_load_uses_weights_that_were_packed_before(
    family: str, n_left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but llama's queries and keys, whose rows lie in another order in files."""
    path = written(tmp_path, family)
    monkeypatch.setenv("SWIFTOPT_THREADS", "1")
    alone = parts_of(load(str(path), **WANTED))
    monkeypatch.setenv("SWIFTOPT_THREADS", "2")
    early, packed_late = begun(path), []
    own = gguf_packing.packed_arrays
    monkeypatch.setattr("swiftopt.models.block_maps.packed_arrays", lambda *a: (packed_late.append(a), own(*a))[1])
    found = parts_of(load(str(path), **WANTED))
    assert len(packed_late) == n_left and early.n_bytes > 0
    assert found.keys() == alone.keys() and all(torch.equal(found[name], alone[name]) for name in alone)
    assert all(part.data_ptr() % gguf_packing.LINE == 0 for part in found.values())
    assert not early._packed and not gguf_packing._begun


def test_file_changed_before_its_load_is_opened_again(tmp_path: Path) -> None:
    path = written(tmp_path)
    begun(path)
    (tmp_path / "other").mkdir()
    written(tmp_path / "other", hidden_size=128).replace(path)
    assert load(str(path), **WANTED).config.hidden_size == 128
    begun(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 64)
    with pytest.raises(ModelNotFound, match="cut short"):
        load(str(path), **WANTED)
    assert not gguf_packing._begun


def test_weights_that_cannot_be_packed_early_are_packed_by_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, own = written(tmp_path), gguf_packing.packed_arrays

    def short(*args: Any) -> Any:
        if threading.current_thread().name == "packing":
            raise MemoryError
        return own(*args)

    monkeypatch.setattr(gguf_packing, "packed_arrays", short)
    early = begun(path)
    assert parts_of(load(str(path), **WANTED)) and early.n_bytes == 0


def test_memory_of_early_packing_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    needed = loading.memory_plan(Path(loading.settings_folder(path, str)), "auto", True).needed
    early = begun(path)
    for tensor in list(early._tensors.values()):
        assert early.take(tensor) is not None
    monkeypatch.setattr(loading, "free_bytes", lambda device: needed - early.n_bytes)
    load(str(path), **WANTED)


@pytest.mark.parametrize(
    ("changed", "environ"),
    [
        ({"dtype": "float32"}, {}),
        ({"device": "cuda"}, {}),
        ({"speed": "eager"}, {}),
        ({}, {"SWIFTOPT_THREADS": "1"}),
        ({}, {"SWIFTOPT_KERNELS": "torch"}),
    ],
    ids=str,
)
def test_early_packing_is_skipped_if_codes_are_not_needed(
    changed: dict[str, str], environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    gguf_packing.kernels.cache_clear()
    try:
        with opened(path, **WANTED | changed) as file:
            assert packing_of(file) is None
    finally:
        gguf_packing.kernels.cache_clear()


def test_early_packing_is_skipped_if_memory_may_not_suffice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    monkeypatch.setattr(gguf_packing, "free_memory", lambda: 2 * path.stat().st_size - 1)
    with opened(path, **WANTED) as file:
        assert packing_of(file) is None
