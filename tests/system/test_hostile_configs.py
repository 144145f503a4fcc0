"""Configs that no model has are refused in a sentence, in little time and memory, or load as a model that works."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import write_gguf
from families import DENSE, tiny_model, variants
from multimodal import MODELS, whole_model, write
from tiny_files import edit_config, save
from transformers import CONFIG_MAPPING, __version__

from swiftopt.core.errors import ModelNotFound, SettingsError, SwiftoptError, UnsupportedModel
from swiftopt.models.gguf_reader import GgufFile
from swiftopt.models.gguf_settings import config_of
from swiftopt.models.loading import load
from swiftopt.models.rows import Rows

HOSTILE = [0, -1, 3, 10**9, 1 << 40, 1e-40, math.nan, math.inf, "7", [], [1], {}, True, 0.5]
MOST_S, MOST_BYTES = 4.0, 2 << 30  # seconds of processors, of which torch uses several
DENSE_TYPES = [pytest.param(name, marks=pytest.mark.families) for name in DENSE if ":" not in name]
Path_ = tuple[str, ...]


@contextmanager
def limited() -> Iterator[None]:
    """Fail where a block takes much time, or a memory that no tiny model needs."""
    resource = pytest.importorskip("resource")
    usual = resource.getrlimit(resource.RLIMIT_AS)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    started_s = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (has + MOST_BYTES, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)
    assert time.process_time() - started_s < MOST_S


def numeric_fields(values: Mapping[str, Any], path: Path_ = ()) -> Iterator[Path_]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from numeric_fields(value, (*path, name))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*path, name)


def changed(values: Mapping[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    name, *rest = path
    return {**values, name: changed(values[name], tuple(rest), value) if rest else value}


def loads_or_is_refused(folder: Path) -> str | None:
    """Return the sentence; None: the model loads and computes."""
    with limited():
        try:
            runtime = load(str(folder), device="cpu", speed="eager")
            runtime.forward(Rows([1, 2, 3], 0), runtime.new_buffer(8))
        except SwiftoptError as error:
            sentence = str(error)
            assert "\n" not in sentence and len(sentence) < 600 and "memory of cpu" not in sentence
            return sentence
    return None


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.families)])
@pytest.mark.parametrize("family", [*variants(), *DENSE_TYPES, "qwen2_5_vl"])
def test_any_number_of_a_config_loads_or_is_refused(family: str, part: int, tmp_path: Path) -> None:
    """In the default suite each field has a tenth of the values, by turns."""
    folder = tmp_path / "model"
    if family in MODELS:
        write(folder, whole_model(family))
    else:
        save(folder, family)
    values = json.loads((folder / "config.json").read_text())
    fields = [path for path in numeric_fields(values) if path[0] != "vision_config"]
    assert len(fields) > 8
    n_refused = 0
    for number, path in enumerate(fields):
        for place, value in enumerate(HOSTILE):
            if ((number + place) % 10 == 0) == (part == 0):
                (folder / "config.json").write_text(json.dumps(changed(values, path, value)))
                n_refused += loads_or_is_refused(folder) is not None
    assert n_refused > len(fields) // 2


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "layers": ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, which is not a whole number"),
    "layers that files lack": ("llama", {"num_hidden_layers": 5}, r"holds 4 layers, and its config\.json says 5"),
    "no layers": ("gpt2", {"n_layer": 0}, "n_layer = 0, which is not a whole number from 1 to"),
    "size": ("llama", {"hidden_size": 1 << 40}, "hidden_size = 1099511627776, which is not"),
    "negative": ("qwen2", {"intermediate_size": -48}, "intermediate_size = -48, which is not"),
    "inner size": ("llama", {"intermediate_size": 1 << 20}, "describes a model of .* parameters, and its files hold"),
    "theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": math.nan}}, "rope_theta = nan"),
    "epsilon": ("llama", {"rms_norm_eps": math.inf}, "rms_norm_eps = inf, which is not a number from 0 to 1"),
    "any other number": ("llama", {"of_no_family": math.inf}, "of_no_family = inf, which is no number to compute"),
    "cap": ("gemma3", {"final_logit_softcapping": -1.0}, r"final_logit_softcapping = -1\.0, which is not"),
    "heads": ("llama", {"num_key_value_heads": 3}, "4 attention heads for 3 key heads"),
    "uneven heads": ("qwen2", {"num_attention_heads": 6}, "a hidden size of 32 for 6 heads"),
    "head": ("llama", {"head_dim": 0}, "head_dim = 0, which is not"),
    "no window": ("mistral", {"sliding_window": 0}, "a sliding window of 0 tokens"),
    "no words": ("llama", {"vocab_size": 0}, "vocab_size = 0, which is not"),
    "words": ("llama", {"vocab_size": 98}, r"embed_tokens\.weight in .* has the shape \[97, 32\], and .* \[98, 32\]"),
    "types": ("gemma3", {"layer_types": ["full_attention"] * 3}, "layer"),
    "a string": ("llama", {"num_attention_heads": "4"}, "num_attention_heads = '4', which is not a whole number"),
    "a list": ("llama", {"hidden_size": [32]}, "a list as hidden_size, which is not a whole number"),
    "factors": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
        "short_factor",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_impossible_config_is_refused_by_field(case: str, tmp_path: Path) -> None:
    family, changes, words = CASES[case]
    edit_config(save(tmp_path, family), **changes)
    with limited(), pytest.raises(ModelNotFound, match=words):
        load(str(tmp_path), device="cpu")


def test_a_type_that_the_installed_transformers_lacks_is_named_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "qwen2")
    monkeypatch.delitem(CONFIG_MAPPING._mapping, "qwen2")
    words = rf"the model type 'qwen2', which transformers {re.escape(__version__)} does not have: pip install --upgrade"
    with pytest.raises(UnsupportedModel, match=words):
        load(str(tmp_path), device="cpu")


def test_limit_of_a_model_may_be_infinite(tmp_path: Path) -> None:
    edit_config(save(tmp_path), time_step_limit=[0.0, math.inf])
    assert load(str(tmp_path), device="cpu").n_layers == 4


def test_endlessly_nested_values_are_refused(tmp_path: Path) -> None:
    nested: dict[str, Any] = {}
    for _ in range(200):
        nested = {"more": nested}
    edit_config(save(tmp_path), nested=nested)
    with pytest.raises(ModelNotFound, match="nests its values deeper than 16 levels"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "x": ' + "[" * 10**5 + "]" * 10**5 + "}")
    with pytest.raises(ModelNotFound, match="is no model's config"):
        load(str(tmp_path))


BY_LAYER = [[1, 2, 3, 4], [0] * 4, [1 << 40] * 4, [True, "a", 1.5, -1], [[4]] * 4]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "gemma4_text", "gemma4_text:31b"])
def test_any_setting_of_a_gguf_file_loads_or_is_refused(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, torch.float32)
    file = GgufFile(write_gguf(tmp_path / "tiny.gguf", model))
    own = {key: value for key, value in file.settings.items() if key.startswith(f"{file.architecture}.")}
    assert len(own) >= 6
    n_refused = 0
    for key, usual in own.items():
        for value in [*HOSTILE, *BY_LAYER]:
            file.settings[key] = value
            with limited():
                try:
                    config_of(file)
                except SwiftoptError as error:
                    assert "\n" not in str(error)
                    n_refused += 1
        file.settings[key] = usual
    assert n_refused > 4 * len(own)


def test_gguf_file_with_missing_layers_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    model.config.num_hidden_layers = 900
    path = write_gguf(tmp_path / "tiny.gguf", model)
    with limited(), pytest.raises((ModelNotFound, SettingsError), match="parameters, and its files hold"):
        load(str(path), device="cpu")
