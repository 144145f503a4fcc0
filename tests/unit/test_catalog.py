"""Aliases of models, and the resolution of names before anything is loaded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from swiftopt.core.errors import ModelNotFound
from swiftopt.models.saved import needed_files
from swiftopt.models.sources import ALIASES, find_alias, nearest_aliases, resolve


def test_aliases_are_lower_case_and_lead_to_hub_ids() -> None:
    for name, alias in ALIASES.items():
        assert name == name.lower()
        assert "/" not in name
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", alias.hub_id), name


def test_alias_size_agrees_with_its_name() -> None:
    """Names round their sizes and may omit embeddings, so the two agree within a quarter."""
    for name, alias in ALIASES.items():
        said = re.search(r"(\d+(?:\.\d+)?)([mb])(?:-|$)", name)
        if said is not None:
            assert alias.n_parameters == pytest.approx(float(said[1]) * {"m": 1e6, "b": 1e9}[said[2]], rel=0.25), name
        assert 2 < alias.n_layers <= 80


def test_find_alias_ignores_case_and_knows_no_other_name() -> None:
    assert find_alias("CodeLlama-13B") is ALIASES["codellama-13b"]
    assert find_alias("codellama-14b") is None


def test_an_alias_of_a_similar_name_is_named_and_no_other() -> None:
    assert nearest_aliases("codelama-13b").startswith(" (nearest: codellama-13b")
    assert nearest_aliases("someone/Qwen3-8B").startswith(" (nearest: qwen3-8b")
    assert nearest_aliases("zzz") == ""


def test_resolve_prefers_a_folder_over_an_alias_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert resolve("gpt2").kind == "hub"
    (tmp_path / "gpt2" / "config.json").write_text("{}")
    found = resolve("gpt2")
    assert (found.kind, found.location) == ("folder", str((tmp_path / "gpt2").resolve()))
    assert found.names == ("gpt2", found.location)


def test_resolve_takes_a_gguf_file_that_exists(tmp_path: Path) -> None:
    path = tmp_path / "Some.Model.GGUF"
    with pytest.raises(ModelNotFound, match="no GGUF file"):
        resolve(str(path))
    path.write_bytes(b"GGUF")
    assert resolve(str(path)).kind == "gguf"


def test_resolve_lets_alias_and_hub_id_lead_to_the_same_names() -> None:
    by_alias, by_id = resolve("Qwen3-8B"), resolve("Qwen/Qwen3-8B")
    assert (by_alias.kind, by_alias.location) == (by_id.kind, by_id.location) == ("hub", "Qwen/Qwen3-8B")
    assert set(by_alias.names) >= {"qwen3-8b", "Qwen/Qwen3-8B"} <= set(by_id.names)


@pytest.mark.parametrize("name", ["codelama-13b", "", "with space/x", "x" * 5000, "a\0b"])
def test_resolve_names_what_it_accepts_when_nothing_fits(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"there is no model .*folder.*\.gguf.*hub id"):
        resolve(name)


@pytest.mark.parametrize("name", ["a/b/c", "../nowhere", "./x", "/no/such", "~/nowhere"])
def test_resolve_takes_for_a_path_what_looks_like_one(name: str) -> None:
    with pytest.raises(ModelNotFound, match=f"there is no folder {name}: check the path"):
        resolve(name)


def test_resolve_says_what_a_folder_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
        resolve(str(tmp_path))


def test_resolve_does_not_import_torch() -> None:
    code = "import sys; from swiftopt.models.sources import resolve; resolve('gpt2'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_needed_files_are_one_form_of_the_weights() -> None:
    small = ["config.json", "tokenizer.model", "model.safetensors.index.json"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    rest = ["README.md", "pytorch_model.bin", "consolidated.safetensors", "original/params.json", "onnx/model.onnx"]
    assert needed_files([*small, *shards, *rest]) == [*small, *shards]
    assert needed_files(["config.json", "pytorch_model.bin", "flax_model.msgpack"]) == [
        "config.json",
        "pytorch_model.bin",
    ]
    assert needed_files(["model.safetensors", *shards]) == ["model.safetensors"]
