"""Laws of targets that bitsandbytes computes: its modules and weights, independent rows, and drafts."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import CONFIGS, tiny_model, variants
from packed_files import IDS, Packing, check_drafts, logits_of, packed_folder
from safetensors.torch import load_file, save_file
from tiny_files import edit_config, save
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from swiftopt.core.errors import ModelNotFound, SettingsError, UnsupportedModel
from swiftopt.core.layer_sets import LayerSet, PartForm
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.loop import decode
from swiftopt.decoding.methods import PLAIN, swift
from swiftopt.models.fingerprint import fingerprint
from swiftopt.models.loading import at_speed, load
from swiftopt.models.quantised_checkpoints import is_by_library
from swiftopt.models.restacked import pairs_of, write_restacked
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.models.saved import quiet

INT8: dict[str, Any] = {"load_in_8bit": True}
NF4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DOUBLE = {**NF4, "bnb_4bit_use_double_quant": True}
FP4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
each_kind = pytest.mark.parametrize("kind", [INT8, NF4, DOUBLE, FP4], ids=["int8", "nf4", "double", "fp4"])
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # whole blocks of 64 inputs
UP = "model.layers.1.mlp.up_proj."
Edit = Callable[[dict[str, torch.Tensor]], object]


def library_folder(
    folder: Path, kind: dict[str, Any], family: str = "llama", louder: float = 1.0, size: Any = WIDE
) -> Path:
    """Save a tiny model that the library quantised; `louder`: scale of its first inputs' norms."""
    pytest.importorskip("bitsandbytes", reason="an optional library: pip install 'swiftopt[quantised]'")
    save(folder, family)
    model = tiny_model(family, torch.float32, **size)
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter[:3] *= louder
    model.save_pretrained(folder)
    auto: Any = AutoModelForCausalLM
    with quiet():
        own = {"quantization_config": BitsAndBytesConfig(**kind), "device_map": {"": "cpu"}, "dtype": torch.float32}
        auto.from_pretrained(folder, **own).save_pretrained(folder)
    return folder


def library_target(folder: Path, dtype: str = "float32") -> Runtime:
    return load(str(folder), dtype, "cpu")


def de_quantised(tensors: dict[str, torch.Tensor], name: str, shape: torch.Size) -> torch.Tensor:
    """Return a map's float32 weight by the library's definition."""
    codes = tensors[f"{name}.weight"]
    if f"{name}.SCB" in tensors:
        return codes.float() * (tensors[f"{name}.SCB"][:, None] / 127)
    (state,) = (value for key, value in tensors.items() if key.startswith(f"{name}.weight.quant_state."))
    said = json.loads(bytes(state.tolist()))
    scales = tensors[f"{name}.weight.absmax"]
    if "nested_offset" in said:
        table, sizes = tensors[f"{name}.weight.nested_quant_map"], tensors[f"{name}.weight.nested_absmax"]
        spread = sizes.repeat_interleave(said["nested_blocksize"])[: len(scales)]
        scales = table[scales.long()] * spread + said["nested_offset"]
    halves = torch.stack((codes >> 4, codes & 15), dim=-1).flatten().long()  # the first in the high bits
    values = tensors[f"{name}.weight.quant_map"][halves]
    return (values * scales.repeat_interleave(said["blocksize"])[: len(values)]).view(shape)


@each_kind
def test_maps_are_the_librarys_modules_with_the_files_weights(kind: dict[str, Any], tmp_path: Path) -> None:
    runtime = library_target(library_folder(tmp_path, kind))
    import bitsandbytes

    library: Any = bitsandbytes
    tensors = load_file(tmp_path / "model.safetensors")
    of = {True: library.nn.Linear8bitLt, False: library.nn.Linear4bit}["load_in_8bit" in kind]
    maps = {name: module for name, module in runtime.hf_model.named_modules() if is_by_library(module)}
    assert len(maps) == 4 * 7 and all(type(module) is of for module in maps.values())
    whole = tiny_model("llama", **WIDE)
    for name, module in maps.items():
        meant = de_quantised(tensors, name, whole.get_submodule(name).weight.shape)
        if kind is INT8:
            held = module.weight.data.float() * (module.weight.SCB[:, None] / 127)
        else:
            held = library.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        torch.testing.assert_close(held, meant, rtol=0, atol=1e-6 if kind is DOUBLE else 0)
    assert runtime.speed == "eager" and runtime.info.n_parameters == sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize("kind", [NF4, DOUBLE, FP4], ids=["nf4", "double", "fp4"])
def test_logits_of_four_bits_are_those_of_the_de_quantised_weights(kind: dict[str, Any], tmp_path: Path) -> None:
    runtime = library_target(library_folder(tmp_path, kind))
    right = de_quantised_model(tmp_path)(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits_of(runtime), right, rtol=0, atol=1e-4)
    rounded = logits_of(library_target(tmp_path, "bfloat16")).float()
    assert (rounded - right).norm() / right.norm() < 0.03


def de_quantised_model(folder: Path) -> Any:
    tensors = load_file(folder / "model.safetensors")
    model = tiny_model("llama", torch.float32, **WIDE)
    for name, value in model.state_dict().items():
        mapped = name.endswith("_proj.weight")
        value.copy_(de_quantised(tensors, name.removesuffix(".weight"), value.shape) if mapped else tensors[name])
    return model


@pytest.mark.parametrize("louder", [1.0, 12.0])
def test_logits_of_eight_bits_are_those_of_transformers(louder: float, tmp_path: Path) -> None:
    runtime = library_target(library_folder(tmp_path, INT8, louder=louder))
    auto: Any = AutoModelForCausalLM
    with quiet():
        theirs = auto.from_pretrained(tmp_path, dtype=torch.float32, device_map={"": "cpu"})
    buffer = runtime.new_buffer(4)
    own = runtime.forward(Rows(IDS[:1], 0), buffer)  # one row: what outliers the library sees are that row's
    right = theirs(torch.tensor([IDS[:1]])).logits[0]
    torch.testing.assert_close(own, right, rtol=0, atol=1e-4)


def test_row_of_llm_int8_does_not_depend_on_outliers_of_others(tmp_path: Path) -> None:
    folder = library_folder(tmp_path, INT8)
    runtime = library_target(folder)
    own = runtime.hf_model.get_submodule(UP.rstrip("."))
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    rows[torch.arange(6), torch.arange(6) * 9] = 7.0 + torch.arange(6.0)  # an outlier of each row, in its own column
    with torch.inference_mode():
        together = own(rows)
        alone = torch.cat([own(row[None]) for row in rows])
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
        theirs: Any = copy.copy(own)
        theirs.state, theirs.forward = copy.copy(own.state), type(own).forward.__get__(theirs)
        theirs.state.threshold = 6.0
        torch.testing.assert_close(torch.cat([theirs(row[None]) for row in rows]), alone, rtol=0, atol=1e-5)
        assert (theirs(rows) - alone).abs().max() > 1e-4  # the library's own: the reason for the deviation
        exact = F.linear(rows, own.state.CB.float() * (own.state.SCB[:, None] / 127))
        assert (alone - exact).norm() / exact.norm() < 0.02


@each_kind
def test_drafts_change_no_token(kind: dict[str, Any], tmp_path: Path) -> None:
    check_drafts(library_target(library_folder(tmp_path, kind, "qwen2", louder=12.0)))


@each_kind
def test_draft_copies_are_the_targets_own_maps(kind: dict[str, Any], tmp_path: Path) -> None:
    runtime = library_target(library_folder(tmp_path, kind))
    own = runtime.blocks[1].parts
    for name in ("int8", "int4"):
        assert (
            runtime.copies.parts("attn", 1, PartForm(name)) is own
            and runtime.copies.parts("mlp", 1, PartForm(name)) is own
        )
    draft = LayerSet(4, frozenset({1}), formats=(("attn", "int4"), ("mlp", "int8"), ("head", "int8")))
    rule, ending = TokenRule.of(Sampling(), None), Ending(24)
    plain = decode(runtime, IDS, PLAIN, rule, ending)
    assert decode(runtime, IDS, swift(draft, SwiftSettings()), rule, ending).token_ids == plain.token_ids


@pytest.mark.parametrize("family", variants(family for family in CONFIGS if family != "llama"))
def test_every_family_can_be_quantised(family: str, tmp_path: Path) -> None:
    size = {"n_embd": 64} if family == "gpt2" else WIDE
    runtime = library_target(library_folder(tmp_path, NF4, family, size=size))
    through = runtime.hf_model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits_of(runtime), through, rtol=0, atol=1e-4)
    assert any(is_by_library(module) for module in runtime.hf_model.modules())


def test_identity_is_that_of_the_quantised_files(tmp_path: Path) -> None:
    names = [fingerprint(library_folder(tmp_path / str(i), kind)) for i, kind in enumerate((INT8, NF4, DOUBLE, FP4))]
    assert len({*names, fingerprint(tiny_model("llama", torch.float32, **WIDE))}) == 5
    tensors = load_file(tmp_path / "1" / "model.safetensors")
    tensors[UP + "weight.absmax"] *= 2
    save_file(tensors, tmp_path / "1" / "model.safetensors", {"format": "pt"})
    assert library_target(tmp_path / "1").info.fingerprint == fingerprint(tmp_path / "1") != names[1]


def test_exported_draft_of_such_a_target_has_its_codes(tmp_path: Path) -> None:
    library_folder(tmp_path / "model", DOUBLE)
    layer_set = LayerSet(4, frozenset({2}), frozenset({1}))
    (tmp_path / "draft").mkdir()
    write_restacked(tmp_path / "model", pairs_of(layer_set), tmp_path / "draft")
    whole, draft = (library_target(tmp_path / name) for name in ("model", "draft"))
    skipped = whole.forward(Rows(IDS, 0, variants=(layer_set,)), whole.new_buffer(16))
    torch.testing.assert_close(logits_of(draft), skipped, rtol=0, atol=1e-5)


def test_unsupported_options_of_the_library_are_refused(tmp_path: Path) -> None:
    library_folder(tmp_path, NF4)
    runtime = library_target(tmp_path)
    with pytest.raises(SettingsError, match="speed 'graphs' is not for maps that a library computes: use auto"):
        at_speed(runtime, "graphs")
    with pytest.raises(SettingsError, match="passes cannot be exact here: "):
        load(str(tmp_path), "float32", "cpu", speed="exact")


# --- bad input


@each_kind
def test_without_the_library_a_sentence_says_what_to_install(
    kind: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_folder(tmp_path, "llama", Packing("gptq", 4, 32))
    edit_config(tmp_path, quantization_config={"quant_method": "bitsandbytes", **kind})
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UnsupportedModel, match=r"not installed here: pip install 'swiftopt\[quantised\]'$") as refused:
        load(str(tmp_path), device="cpu")
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "said", "edit", "words"),
    [
        (INT8, NF4, None, r"says bitsandbytes, nf4, but no linear map in its files is stored so"),
        (NF4, INT8, None, r"says bitsandbytes, int8, but no linear map"),
        (NF4, FP4, None, r"says bitsandbytes, fp4, but no linear map"),
        (INT8, INT8, lambda t: t.pop(UP + "SCB"), "cannot be loaded"),
        (NF4, NF4, lambda t: t.pop(UP + "weight.absmax"), "cannot be loaded"),
        (NF4, NF4, lambda t: t.pop(UP + "weight"), "cannot be loaded|lacks 1 weights"),
        (NF4, NF4, lambda t: t.update({UP + "weight.absmax": torch.ones(9)}), r"nf4\): its weight is torch.uint8"),
        (
            NF4,
            NF4,
            lambda t: t.update({UP + "weight": t[UP + "weight"][:99].clone()}),
            r"nf4\): its weight is torch.uint8",
        ),
        (INT8, INT8, lambda t: t.update({UP + "SCB": t[UP + "SCB"][:9].clone()}), r"up_proj in .* is not what its"),
        (INT8, INT8, lambda t: t.pop("model.norm.weight"), r"lacks 1 weights, such as model\.norm\.weight"),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(
    kind: dict[str, Any], said: dict[str, Any], edit: Edit | None, words: str, tmp_path: Path
) -> None:
    library_folder(tmp_path, kind)
    edit_config(tmp_path, quantization_config={"quant_method": "bitsandbytes", **said})
    tensors = load_file(tmp_path / "model.safetensors")
    if edit is not None:
        edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotFound, match=words) as refused:
        logits_of(library_target(tmp_path))
    assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)


def test_partial_blocks_of_inputs_are_refused_on_a_cpu(tmp_path: Path) -> None:
    library_folder(tmp_path, NF4, size={**WIDE, "intermediate_size": 96})
    with pytest.raises(UnsupportedModel, match=r"down_proj in .* has 96 inputs, which blocks of 64 do not divide, and"):
        library_target(tmp_path)


def test_quantised_head_is_refused(tmp_path: Path) -> None:
    library_folder(tmp_path, {**INT8, "llm_int8_skip_modules": ["nothing"]})
    with pytest.raises(UnsupportedModel, match=r"has a head that bitsandbytes quantised, .*skip_modules=\['lm_head'\]"):
        library_target(tmp_path)
