"""Laws of targets whose weights are 8-bit floats: what they stand for, bit by bit; their logits; and their drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CONFIGS, variants
from native import library
from packed_files import FLOATS, IDS, Packing, check_drafts, logits_of, packed_folder, reference
from safetensors.torch import load_file, save_file
from tiny_files import edit_config
from torch import nn
from transformers import AutoModelForCausalLM

from swiftopt.core.errors import ModelNotFound, UnsupportedModel
from swiftopt.models.fingerprint import fingerprint
from swiftopt.models.loading import load
from swiftopt.models.quantised import QuantisedLinear
from swiftopt.models.quantised_checkpoints import load_packed
from swiftopt.models.saved import ReadShare, WeightStorage, no_step, quiet, supported_type

BLOCKS = Packing("fp8", 8, 64, rows=32, scale_dtype=torch.float32)
UP = "model.layers.1.mlp.up_proj."
each_packing = pytest.mark.parametrize("packing", FLOATS, ids=str)


@each_packing
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_codes_times_scales(packing: Packing, dtype: str, tmp_path: Path) -> None:
    meant = packed_folder(tmp_path, "qwen2", packing)
    scheme = supported_type(tmp_path)[1]
    assert scheme is not None
    model, n_parameters = load_packed(tmp_path, scheme, dtype, WeightStorage(), ReadShare(no_step, ""))
    assert n_parameters == sum(parameter.numel() for parameter in model.parameters())
    own = model.state_dict()
    assert all(torch.equal(own[name], value.to(getattr(torch, dtype))) for name, value in meant.items())
    assert all(type(m) is nn.Linear for name, m in model.named_modules() if name.endswith("_proj"))


@each_packing
def test_logits_are_those_of_transformers_with_the_de_quantised_weights(packing: Packing, tmp_path: Path) -> None:
    meant = packed_folder(tmp_path, "llama", packing)
    runtime = load(str(tmp_path), "float32", "cpu", speed="eager")
    right = reference("llama", meant)(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits_of(runtime), right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", variants(family for family in CONFIGS if family != "llama"))
def test_every_family_can_have_8_bit_float_weights(family: str, tmp_path: Path) -> None:
    meant = packed_folder(tmp_path, family, BLOCKS)
    runtime = load(str(tmp_path), "float32", "cpu", speed="eager")
    right = reference(family, meant)(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits_of(runtime), right, rtol=0, atol=1e-4)


def test_logits_equal_transformers_own_reading(tmp_path: Path) -> None:
    # It parts a matrix into equal blocks on a CPU, so only these are its own: the format cuts the last one off.
    packed_folder(tmp_path, "llama", Packing("fp8", 8, 32, rows=32, scale_dtype=torch.float32))
    with quiet():
        auto: Any = AutoModelForCausalLM
        theirs = auto.from_pretrained(tmp_path, dtype=torch.float32, device_map={"": "cpu"}).float()
    right = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(
        logits_of(load(str(tmp_path), "float32", "cpu", speed="eager")), right, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("speed", ["eager", "exact"])
def test_drafts_change_no_token(speed: Any, tmp_path: Path) -> None:
    packed_folder(tmp_path, "qwen2", FLOATS[0])
    if speed == "exact":
        library()
    runtime = load(str(tmp_path), "float32", "cpu", speed=speed)
    check_drafts(runtime)
    assert isinstance(runtime.copies.head("int8"), QuantisedLinear)


def test_identity_is_that_of_the_codes(tmp_path: Path) -> None:
    packed_folder(tmp_path, "llama", BLOCKS)
    first = fingerprint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[UP + "weight_scale_inv"] *= 2
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert fingerprint(tmp_path) != first
    assert load(str(tmp_path), "float32", "cpu").info.fingerprint == fingerprint(tmp_path)


Edit = Callable[[dict[str, torch.Tensor]], object]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(UP + "weight"), "it lacks weight"),
        (lambda t: t.pop(UP + "weight_scale_inv"), "up_proj.weight in .* is torch.float8_e4m3fn of shape"),
        (
            lambda t: t.update({UP + "weight": t[UP + "weight"].half()}),
            "its weight is torch.float16 in place of torch.f",
        ),
        (
            lambda t: t.update({UP + "weight_scale_inv": t[UP + "weight_scale_inv"][:2].clone()}),
            r"its weight_scale_inv has shape \[2, 1\] in place of \[3, 1\]",
        ),
        (lambda t: t.update({UP + "weight_scale_inv": torch.ones(3, 1).int()}), "its weight_scale_inv is torch.int32"),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(edit: Edit, words: str, tmp_path: Path) -> None:
    packed_folder(tmp_path, "llama", BLOCKS)
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotFound, match=words) as refused:
        load(str(tmp_path), device="cpu", speed="eager")
    assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("input_activations", {"dynamic": False}, "activations of 8 bits in compressed-tensors, which is not supp"),
        ("weights", {"type": "int"}, "format 'float-quantized' of int weights"),
        ("weights", {"symmetric": False}, "format 'float-quantized' of float weights"),
        ("weights", {"num_bits": 4}, "4 bits in float-quantized"),
        ("weights", {"strategy": "token"}, "strategy 'token'"),
    ],
)
def test_other_options_of_compressed_tensors_are_refused(
    part: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    packed_folder(tmp_path, "llama", FLOATS[0])
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"][part].update(changes)
    edit_config(tmp_path, quantization_config=config)
    with pytest.raises(UnsupportedModel, match=words):
        load(str(tmp_path), device="cpu")
