"""Laws of quantised targets: the weights of a checkpoint bit by bit, its logits, and equal tokens with drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import write_gguf
from families import CONFIGS, tiny_model, variants
from native import library
from packed_files import IDS, PACKINGS, SIZE, Packing, check_drafts, logits_of, packed_folder, reference
from safetensors.torch import load_file, save_file
from tiny_files import edit_config
from torch import nn
from transformers import AutoModelForCausalLM

from swiftopt.core.errors import ModelNotFound, SettingsError, SwiftoptError, UnsupportedModel
from swiftopt.core.layer_sets import LayerSet, PartForm
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.loop import decode
from swiftopt.decoding.methods import PLAIN, swift
from swiftopt.models.coded import CodedLinear
from swiftopt.models.fingerprint import fingerprint
from swiftopt.models.loading import load
from swiftopt.models.quantised import QuantisedLinear
from swiftopt.models.quantised_checkpoints import load_packed
from swiftopt.models.restacked import pairs_of, write_restacked
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.models.saved import ReadShare, WeightStorage, no_step, supported_type

each_packing = pytest.mark.parametrize("packing", PACKINGS, ids=str)


@each_packing
def test_weights_equal_the_formats_definition(packing: Packing, tmp_path: Path) -> None:
    meant = packed_folder(tmp_path, "qwen2", packing)
    scheme = supported_type(tmp_path)[1]
    assert scheme is not None
    model, n_parameters = load_packed(tmp_path, scheme, "float32", WeightStorage(), ReadShare(no_step, ""))
    maps = {name: module for name, module in model.named_modules() if isinstance(module, CodedLinear)}
    assert len(maps) == 4 * 7 + packing.head
    for name, module in maps.items():
        assert torch.equal(module.weight, meant[f"{name}.weight"])
    kept = {
        name: value for name, value in meant.items() if name.rpartition(".")[0] not in maps or name.endswith("bias")
    }
    own = model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in kept.items())
    assert n_parameters == sum(p.numel() for p in tiny_model("qwen2", **SIZE).parameters())


@each_packing
def test_eager_logits_equal_those_of_de_quantised_weights(packing: Packing, tmp_path: Path) -> None:
    check_logits(tmp_path, "llama", packing)


@pytest.mark.parametrize("family", variants(family for family in CONFIGS if family != "llama"))
def test_every_family_can_be_quantised(family: str, tmp_path: Path) -> None:
    check_logits(tmp_path, family, PACKINGS[0])


def check_logits(folder: Path, family: str, packing: Packing) -> None:
    """Compare eager logits, of the runtime and of transformers' module, with those of de-quantised weights."""
    meant = packed_folder(folder, family, packing)
    runtime = load(str(folder), "float32", "cpu", speed="eager")
    assert not any(isinstance(module, CodedLinear) for module in runtime.hf_model.modules())
    right = reference(family, meant)(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits_of(runtime), right, rtol=0, atol=1e-4)
    through = runtime.hf_model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(through, right, rtol=0, atol=1e-4)


def native_target(folder: Path, dtype: str) -> Runtime:
    library()
    return load(str(folder), dtype, "cpu", speed="exact")


@each_packing
def test_native_target_keeps_its_codes_and_gives_plain_tokens(packing: Packing, tmp_path: Path) -> None:
    packed_folder(tmp_path, "qwen2", packing)
    if packing.act_order:  # the maps of one input were calibrated on the same input, and share its order
        share_order(tmp_path, packing)
    eager = logits_of(load(str(tmp_path), "float32", "cpu", speed="eager"))
    for dtype in ("float32", "bfloat16"):
        runtime = native_target(tmp_path, dtype)
        assert sum(isinstance(module, CodedLinear) for module in runtime.hf_model.modules()) == 28 + packing.head
        together = logits_of(runtime)
        # Activations in 8 bits, and in bfloat16: close to the reference, not equal.
        error = (together.float() - eager).norm() / eager.norm()
        assert error < (0.05 if dtype == "float32" else 0.08)
        buffer = runtime.new_buffer(16)
        alone = torch.cat([runtime.forward(Rows([token], at), buffer) for at, token in enumerate(IDS)])
        assert torch.equal(alone, together)
        check_drafts(runtime)


def share_order(folder: Path, packing: Packing) -> None:
    part = "g_idx" if packing.format.startswith("gptq") else "weight_g_idx"
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(part)]:
        first = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
        stem = name.split(".")
        tensors[name] = tensors[".".join([*stem[:-2], first.get(stem[-2], stem[-2]), stem[-1]])].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_maps_of_one_input_in_several_orders_are_de_quantised(tmp_path: Path) -> None:
    packed_folder(tmp_path, "llama", Packing("gptq", 4, 32, act_order=True))
    library()
    with pytest.raises(SettingsError, match="maps of one input whose weights are grouped in several ways"):
        load(str(tmp_path), "float32", "cpu", speed="exact")
    runtime = load(str(tmp_path), "float32", "cpu")
    assert runtime.speed == "eager" and not any(isinstance(m, CodedLinear) for m in runtime.hf_model.modules())


def test_unsupported_groups_are_de_quantised(tmp_path: Path) -> None:
    meant = packed_folder(tmp_path, "llama", Packing("gptq", 4, 16))
    library()
    with pytest.raises(SettingsError, match="groups of 16 weights are computed by torch"):
        load(str(tmp_path), "float32", "cpu", speed="exact")
    right = reference("llama", meant)(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits_of(load(str(tmp_path), "float32", "cpu")), right, rtol=0, atol=1e-4)


def test_draft_copies_are_made_only_where_they_save_bits(tmp_path: Path) -> None:
    packed_folder(tmp_path / "four", "llama", Packing("gptq", 4, 32))
    packed_folder(tmp_path / "eight", "llama", Packing("gptq", 8, 32))
    four, eight = (native_target(tmp_path / name, "bfloat16") for name in ("four", "eight"))
    for name, runtime in (("int8", four), ("int4", four), ("int8", eight)):
        own = runtime.blocks[1].parts
        assert (
            runtime.copies.parts("attn", 1, PartForm(name)) is own
            and runtime.copies.parts("mlp", 1, PartForm(name)) is own
        )
    assert isinstance(eight.copies.parts("mlp", 1, PartForm("int4")).mlp.up_proj, QuantisedLinear)
    assert isinstance(four.copies.head("int4"), QuantisedLinear)  # the head is not quantised
    draft = LayerSet(4, frozenset({1}), formats=(("attn", "int4"), ("mlp", "int4"), ("head", "int4")))
    for runtime in (four, eight):
        rule, ending = TokenRule.of(Sampling(), None), Ending(24)
        plain = decode(runtime, IDS, PLAIN, rule, ending)
        assert decode(runtime, IDS, swift(draft, SwiftSettings()), rule, ending).token_ids == plain.token_ids


def test_identity_is_that_of_the_quantised_files(tmp_path: Path) -> None:
    names = []
    for i, packing in enumerate((Packing("gptq", 4, 32), Packing("gptq_v2", 4, 32), Packing("awq", 4, 32))):
        packed_folder(tmp_path / str(i), "llama", packing)
        names.append(fingerprint(tmp_path / str(i)))
    tensors = load_file(tmp_path / "0" / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.scales"] *= 2
    save_file(tensors, tmp_path / "0" / "model.safetensors", {"format": "pt"})
    names.append(fingerprint(tmp_path / "0"))
    assert len(set(names)) == 4
    assert load(str(tmp_path / "0"), "float32", "cpu").info.fingerprint == names[3]


def test_dtype_is_the_stored_one_by_default(tmp_path: Path) -> None:
    packed_folder(tmp_path, "llama", PACKINGS[0])
    assert load(str(tmp_path), device="cpu").dtype == torch.float16
    library()
    with pytest.raises(SettingsError, match="float16 are computed by torch; ask for float32 or bfloat16"):
        load(str(tmp_path), device="cpu", speed="exact")
    with pytest.raises(
        SettingsError, match=r"quantised \(gptq, 4 bits, groups of 32\), and such a model lies on one dev"
    ):
        load(str(tmp_path), device="auto-map")
    eager = load(str(tmp_path), "bfloat16", "cpu", speed="eager")
    assert eager.dtype == torch.bfloat16 and eager.speed == "eager"
    assert not any(isinstance(module, CodedLinear) for module in eager.blocks[0].parts.qkv)


def test_bias_of_a_file_is_used_even_if_the_model_has_none(tmp_path: Path) -> None:
    meant = packed_folder(tmp_path, "llama", Packing("gptq", 4, 32))
    model = reference("llama", meant)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96).half()
    tensors["model.layers.1.mlp.up_proj.bias"] = torch.arange(96.0).half()
    model.model.layers[1].mlp.up_proj.bias = nn.Parameter(torch.arange(96.0))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    right = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(
        logits_of(load(str(tmp_path), "float32", "cpu", speed="eager")), right, rtol=0, atol=1e-4
    )


def test_missing_bias_of_a_file_is_an_error(tmp_path: Path) -> None:
    packed_folder(tmp_path, "qwen2", Packing("awq", 4, 32))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.3.self_attn.k_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotFound, match=r"layers\.3\.self_attn\.k_proj in .*: it lacks its bias; download"):
        load(str(tmp_path), device="cpu")


def test_exported_draft_of_a_quantised_target_has_its_codes(tmp_path: Path) -> None:
    packed_folder(tmp_path / "model", "qwen2", Packing("gptq", 4, 32, act_order=True))
    layer_set = LayerSet(4, frozenset({2}), frozenset({1}))  # leaves the attention of layer 1 and the MLP of layer 2
    (tmp_path / "draft").mkdir()
    write_restacked(tmp_path / "model", pairs_of(layer_set), tmp_path / "draft")
    whole, draft = (load(str(tmp_path / name), "float32", "cpu", speed="eager") for name in ("model", "draft"))
    skipped = whole.forward(Rows(IDS, 0, variants=(layer_set,)), whole.new_buffer(16))
    assert draft.n_layers == 3
    torch.testing.assert_close(logits_of(draft), skipped, rtol=0, atol=1e-5)


# --- GGUF


@pytest.mark.parametrize(("kind", "copied"), [("Q8_0", True), ("Q5_0", False), ("Q4_0", False)])
def test_draft_copies_only_parts_with_clearly_more_bits(
    kind: str, copied: bool, tmp_path: Path, new_cache: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", torch.float32, **SIZE), kind=kind)
    library()
    runtime = load(str(path), device="cpu", speed="exact")
    runtime.copies.prepare(LayerSet(runtime.n_layers).filled("int4"))
    assert (runtime.copies.n_bytes > 0) == copied
    assert (runtime.copies.parts("mlp", 0, PartForm("int4")).mlp is not runtime.blocks[0].parts.mlp) == copied


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_codes_are_kept_and_run(kind: str, tied: bool, tmp_path: Path, new_cache: Path) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf", tiny_model("llama", torch.float32, tie_word_embeddings=tied, **SIZE), kind=kind
    )
    auto: Any = AutoModelForCausalLM
    meant = auto.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    library()
    whole = load(str(path), "float32", "cpu", speed="eager")
    right = meant(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits_of(whole), right, rtol=0, atol=1e-5)
    runtime = load(str(path), device="cpu", speed="exact")
    maps = {name: m for name, m in runtime.hf_model.named_modules() if isinstance(m, CodedLinear)}
    assert len(maps) == 4 * 7 + 1 and {m.bits for m in maps.values()} == {8 if kind == "Q8_0" else 4}
    for name, module in maps.items():
        assert torch.equal(module.weight, meant.get_submodule(name).weight.bfloat16())
    check_drafts(runtime)
    (folder,) = (new_cache / "gguf-settings").iterdir()
    assert fingerprint(folder) == runtime.info.fingerprint == whole.info.fingerprint


# --- bad input

Edit = Callable[[dict[str, torch.Tensor]], object]
UP = "model.layers.1.mlp.up_proj."


def without(name: str) -> Edit:
    return lambda tensors: tensors.pop(name)


def cut(name: str, n: int) -> Edit:
    return lambda tensors: tensors.update({name: tensors[name][:n].clone()})


def index(values: torch.Tensor) -> Edit:
    return lambda tensors: tensors.update({UP + "g_idx": values.int()})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (without(UP + "qzeros"), "it lacks qzeros"),
        (without(UP + "qweight"), r"lacks 1 weights, such as model\.layers\.1\.mlp\.up_proj\.weight"),
        (lambda tensors: tensors.update({UP + "bias": torch.zeros(95)}), r"its bias is torch.float32 of shape \[95\]"),
        (without("model.norm.weight"), r"lacks 1 weights, such as model\.norm\.weight"),
        (cut(UP + "scales", 1), r"its scales has shape \[1, 96\] in place of \[2, 96\]"),
        (cut(UP + "qweight", 4), r"its qweight has shape \[4, 96\] in place of \[8, 96\]"),
        (cut("model.norm.weight", 4), r"of shape \[4\], and a model of its config.json has .* shape \[64\]"),
        (index(torch.arange(10)), r"its g_idx is torch.int32 of shape \[10\] for 64 inputs"),
        (index(torch.arange(64) // 16), "its g_idx does not put its 64 inputs into groups of 32"),
        (index(torch.arange(64) // 32 + 1), "its g_idx does not put its 64 inputs into groups of 32"),
        (lambda tensors: tensors.update({UP + "scales": tensors[UP + "scales"].int()}), "its scales are torch.int32"),
        (
            lambda tensors: tensors.update({"model.layers.4.x.qweight": torch.ones(1)}),
            r"1 weights for .*layers\.4\.x\.qw",
        ),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(edit: Edit, words: str, tmp_path: Path) -> None:
    packed_folder(tmp_path, "llama", Packing("gptq", 4, 32))
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotFound, match=words) as refused:
        load(str(tmp_path), device="cpu", speed="eager")
    assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"quant_method": "hqq"}, UnsupportedModel, "quant_method 'hqq', which is not supported: use GPTQ"),
        ({"quant_method": "bitsandbytes"}, UnsupportedModel, "neither 4 nor 8 bits in bitsandbytes"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
            UnsupportedModel,
            "bnb_4bit_quant_type 'int4' of bitsandbytes",
        ),
        ({"quant_method": "fp8", "activation_scheme": "static"}, UnsupportedModel, "activation_scheme 'static' of fp8"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, UnsupportedModel, "scale_fmt 'ue8m0' of fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, UnsupportedModel, "for fp8 that cannot be read"),
        ({"quant_method": "fp8", "weight_block_size": [12, 128]}, UnsupportedModel, "groups of 12"),
        ({"quant_method": "fp8"}, ModelNotFound, "8 bits, blocks of 128 x 128, but no linear map in its files is st"),
        ({}, UnsupportedModel, r"quant_method '\(none\)'"),
        ({"bits": 4}, UnsupportedModel, r"quant_method '\(none\)'"),
        ("gptq", UnsupportedModel, r"quant_method '\(unreadable\)'"),
        ({**Packing("gptq", 3, 32).config}, UnsupportedModel, "3 bits in gptq"),
        ({**Packing("gptq", 4, 12).config}, UnsupportedModel, "groups of 12"),
        ({**Packing("gptq", 4, 32).config, "bits": "four"}, UnsupportedModel, "for gptq that cannot be read"),
        ({**Packing("gptq", 4, 32).config, "checkpoint_format": "marlin"}, UnsupportedModel, "GPTQ format 'marlin'"),
        ({**Packing("awq", 4, 32).config, "version": "gemv"}, UnsupportedModel, "AWQ version 'gemv'"),
        ({**Packing("awq", 8, 32).config}, UnsupportedModel, "8 bits in awq"),
        ({"quant_method": "compressed-tensors"}, UnsupportedModel, "compressed-tensors that cannot be read"),
        ({**Packing("awq", 4, 32).config}, ModelNotFound, r"\(awq, 4 bits, groups of 32\): its qweight has shape"),
        ({**Packing("gptq", 8, 32).config}, ModelNotFound, r"\(gptq, 8 bits, groups of 32\): its qweight has shape"),
        ({**Packing("gptq", 4, 64).config}, ModelNotFound, r"\(gptq, 4 bits, groups of 64\): its qzeros has shape"),
        ({**Packing("pack-quantized", 4, 32).config}, ModelNotFound, "but no linear map in its files is stored so"),
    ],
)
def test_unsupported_config_is_refused(config: Any, error: type[SwiftoptError], words: str, tmp_path: Path) -> None:
    packed_folder(tmp_path, "llama", Packing("gptq", 4, 32))
    edit_config(tmp_path, quantization_config=config)
    with pytest.raises(error, match=words) as refused:
        load(str(tmp_path), device="cpu", speed="eager")
    assert "\n" not in str(refused.value)


def test_activations_that_a_checkpoint_quantises_are_refused(tmp_path: Path) -> None:
    packing = Packing("int-quantized", 8, -1)
    packed_folder(tmp_path, "llama", packing)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    edit_config(tmp_path, quantization_config=config)
    with pytest.raises(UnsupportedModel, match="activations of 8 bits in compressed-tensors, which is not supported"):
        load(str(tmp_path), device="cpu")


def transforms(*locations: str) -> dict[str, Any]:
    apply = [{"targets": ["Linear"], "location": location, "inverse": False} for location in locations]
    return {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": apply}}}}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sparsity_config": {"format": "dense", "global_sparsity": 0.01}}, None),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ({"transform_config": {}}, None),
        (transforms("weight_output", "weight_input"), None),  # which changed the weights before they were rounded
        (transforms("weight_input", "input"), "transformed activations"),
    ],
)
def test_options_of_compressed_tensors_are_obeyed_or_refused(
    more: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    packing = Packing("pack-quantized", 4, 32)
    packed_folder(tmp_path, "llama", packing)
    edit_config(tmp_path, quantization_config={**packing.config, **more})
    if words is None:
        assert supported_type(tmp_path)[1] is not None
        return
    with pytest.raises(UnsupportedModel, match=f"{words} in compressed-tensors, which is not supported"):
        supported_type(tmp_path)
