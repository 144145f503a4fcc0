"""Layer sets as checkpoints: restacked layers compute what the set computes, for every family that can be restacked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from families import CONFIGS, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_files import edit_config, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftopt.core.errors import LayerSetError, UnsupportedModel
from swiftopt.core.types import LayerSet, ModelInfo, searchable
from swiftopt.models import restacked
from swiftopt.models.restacked import distance, nearest, pairs_of, write_restacked
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.models.saved import quiet

DEPTH = 6
BY_LAYER = ("qwen2-window", "gemma3", "gemma3-softcap")
FAMILIES = [name for name in CONFIGS if name not in BY_LAYER]
IDS = [1, 2, 3, 4, 5, 60, 61, 62, 7, 8, 9, 10, 11, 90, 91, 92]  # more than the windows of the tiny models


def set_of(kept: tuple[bool, ...]) -> LayerSet:
    """The set that keeps those sub-layers, in the order in which they run."""
    left_out = [frozenset(i for i, keep in enumerate(kept[first::2]) if not keep) for first in (0, 1)]
    return LayerSet(len(kept) // 2, *left_out)


def alternates(kept: tuple[bool, ...]) -> bool:
    """By the definition: what is left is attention, MLP, attention, MLP, …, at least one of each."""
    left = [place % 2 for place, keep in enumerate(kept) if keep]
    return bool(left) and left == [0, 1] * (len(left) // 2)


@st.composite
def alternating(draw: Any, depth: int = DEPTH) -> LayerSet:
    kept, wanted = [], 0
    for place in range(2 * depth):
        keep = place % 2 == wanted and draw(st.booleans())
        kept.append(keep)
        wanted ^= keep
    if wanted or not any(kept):  # an attention without an MLP, or nothing
        kept[-1] = True
        kept[-2] = not wanted or kept[-2]
    return set_of(tuple(kept))


@contextmanager
def written(folder: Path, layer_set: LayerSet, parallel: bool = False) -> Iterator[Path]:
    with TemporaryDirectory() as out:
        write_restacked(folder, pairs_of(layer_set, parallel), Path(out))
        yield Path(out)


def logits_of(folder: Path) -> torch.Tensor:
    """Of the checkpoint as transformers loads and computes it."""
    auto: Any = AutoModelForCausalLM
    with quiet():  # sdpa: the eager attention computes its softmax in float32
        model, found = auto.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="sdpa", output_loading_info=True
        )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    with torch.inference_mode():
        out: torch.Tensor = model.eval()(torch.tensor([IDS])).logits[0]
    return out


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runtime]:
    """A tiny model in float64, as a folder and as a runtime."""
    depth = "n_layer" if request.param == "gpt2" else "num_hidden_layers"
    changed: dict[str, Any] = {depth: DEPTH}
    if "layer_types" in CONFIGS[request.param].to_dict():
        changed["layer_types"] = ["full_attention"] * DEPTH
    model = tiny_model(request.param, scale=2.0, **changed)
    with torch.no_grad():
        for parameter in model.parameters():  # biases are zero and norms one at first
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, Runtime(model, None, ModelInfo("tiny", request.param, DEPTH, 1))


@settings(max_examples=12)
@given(layer_set=alternating())
def test_restacked_checkpoint_has_the_logits_of_the_skipped_model(
    saved: tuple[Path, Runtime], layer_set: LayerSet
) -> None:
    folder, runtime = saved
    if runtime.parallel:
        layer_set = nearest(layer_set, parallel=True)[0]
    with torch.inference_mode():
        skipped = runtime.forward(Rows(IDS, 0, variants=(layer_set,)), runtime.new_buffer(len(IDS)))
    with written(folder, layer_set, runtime.parallel) as out:
        torch.testing.assert_close(logits_of(out), skipped, rtol=1e-9, atol=1e-9)


def test_logits_of_another_set_differ(saved: tuple[Path, Runtime]) -> None:
    """So that the equality above is of the sets, not of a model that ignores its layers."""
    folder, runtime = saved
    with written(folder, LayerSet(DEPTH, frozenset({2}), frozenset({2})), runtime.parallel) as out:
        other = runtime.forward(Rows(IDS, 0), runtime.new_buffer(len(IDS)))
        assert not torch.allclose(logits_of(out), other, rtol=1e-4, atol=1e-4)


@given(kept=st.tuples(*[st.booleans()] * 2 * DEPTH))
def test_a_set_has_pairs_exactly_where_it_alternates(kept: tuple[bool, ...]) -> None:
    layer_set = set_of(kept)
    if alternates(kept):
        pairs = pairs_of(layer_set)
        assert [place for a, m in pairs for place in (2 * a, 2 * m + 1)] == [i for i, keep in enumerate(kept) if keep]
    else:
        with pytest.raises(LayerSetError, match=r"alternate|MLP|nothing"):
            pairs_of(layer_set)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_nearest_sets_are_all_those_with_the_fewest_changes(depth: int) -> None:
    """Against every set there is."""
    everything = [set_of(kept) for kept in product((False, True), repeat=2 * depth) if alternates(kept)]
    for kept in product((False, True), repeat=2 * depth):
        layer_set = set_of(kept)
        found = nearest(layer_set, most=1000)
        fewest = min(distance(layer_set, each) for each in everything)
        assert len(found) == len(set(found))
        assert set(found) == {each for each in everything if distance(layer_set, each) == fewest}
        assert nearest(layer_set, most=1) == found[:1] and all(pairs_of(each) for each in found)


def test_nearest_set_keeps_the_earlier_sub_layer_and_the_formats() -> None:
    layer_set = LayerSet(4, frozenset(), frozenset({1}), formats=(("mlp", "int4"),))  # A0 M0 A1 A2 M2 A3 M3
    found = nearest(layer_set)
    assert [(sorted(each.skip_attn), sorted(each.skip_mlp)) for each in found] == [([], []), ([2], [1]), ([1], [1])]
    assert all(each.formats == layer_set.formats for each in found)


def test_nearest_set_of_the_deepest_model_is_found_at_once() -> None:
    skipped = [sub for i, sub in enumerate(searchable(126)) if i % 3]
    (found,) = nearest(LayerSet(126).skipping(skipped), most=1)
    assert pairs_of(found)


@given(kept=st.tuples(*[st.booleans()] * 2 * DEPTH))
def test_parallel_models_are_parted_by_whole_layers_only(kept: tuple[bool, ...]) -> None:
    layer_set = set_of(kept)
    (found,) = nearest(layer_set, parallel=True, most=1)
    assert found.skip_attn == found.skip_mlp and all(a == m for a, m in pairs_of(found, parallel=True))
    if layer_set.skip_attn != layer_set.skip_mlp:
        with pytest.raises(LayerSetError, match="sets of whole layers"):
            pairs_of(layer_set, parallel=True)


@pytest.mark.parametrize("family", BY_LAYER)
def test_models_with_attention_types_by_layer_are_refused(family: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", family)
    with pytest.raises(UnsupportedModel, match="attention types by layer"):
        write_restacked(folder, [(0, 0)], tmp_path)


def test_gpt2_that_scales_by_the_layers_index_is_refused(tmp_path: Path) -> None:
    folder = edit_config(save(tmp_path / "model", "gpt2"), scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(UnsupportedModel, match="layer's index"):
        write_restacked(folder, [(0, 0)], tmp_path)


def test_large_checkpoints_are_parted_and_have_their_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, layer_set = save(tmp_path / "model"), LayerSet(4, frozenset({1}), frozenset({1}))
    with written(folder, layer_set) as out:
        whole = logits_of(out)
    monkeypatch.setattr(restacked, "SHARD_BYTES", 20_000)
    with written(folder, layer_set) as out:
        assert len(list(out.glob("model-*.safetensors"))) > 2 and not (out / "model.safetensors").exists()
        assert torch.equal(logits_of(out), whole)
        assert AutoTokenizer.from_pretrained(out)("w3 w5")["input_ids"] == [3, 5]


def test_a_tensor_of_neither_sub_layer_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.1.extra.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="neither to attention nor to the MLP"), written(folder, LayerSet(4)):
        pass
