"""Text parts of multimodal checkpoints give the logits of transformers' whole model for texts, and read no more."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, WINDOW
from multimodal import MODELS, whole_model, write, write_parts
from native import library
from packed_files import Packing, packed_folder
from safetensors.torch import load_file, save_file
from tiny_files import edit_config, save_adapter

from swiftopt.core.errors import ModelNotFound, UnsupportedModel
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Sampling
from swiftopt.decoding.chats import ChatPrompt
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.loop import decode
from swiftopt.decoding.methods import PLAIN, swift
from swiftopt.models.fingerprint import fingerprint
from swiftopt.models.loading import load
from swiftopt.models.memory import memory_plan
from swiftopt.models.restacked import pairs_of, write_restacked
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.models.saved import files_of, weight_files
from swiftopt.models.sources import model_folder

N_NEW = 24
IDS = [(5 * i + 3) % (VOCAB - 2) + 2 for i in range(WINDOW + 8)]
SET = LayerSet(4, frozenset({1}), frozenset({2}))
CASES = [
    pytest.param(
        model_type, spelling, marks=() if spelling == "new" and "mistral4" not in model_type else pytest.mark.families
    )
    for model_type in MODELS
    for spelling in ("new", "qwen" if model_type in ("qwen2_vl", "qwen2_5_vl") else "llava")
    if (model_type, spelling) not in (("qwen3_vl", "llava"), ("qwen3_vl_moe", "llava"), ("llama4", "llava"))
]


@cache
def _whole(model_type: str, tied: bool = False) -> Any:
    return whole_model(model_type, tied)


def _logits(runtime: Runtime) -> torch.Tensor:
    """Return the logits of all rows except the first few of a text, in two passes."""
    buffer = runtime.new_buffer(len(IDS))
    return torch.cat([runtime.forward(Rows(part, first), buffer) for first, part in ((0, IDS[:9]), (9, IDS[9:]))])


def _decoded(runtime: Runtime, method: Any = PLAIN) -> list[int]:
    rule = TokenRule.of(Sampling(), None)
    return list(decode(runtime, IDS, method, rule, Ending(N_NEW)).token_ids)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "spelling"), CASES)
def test_text_part_gives_the_logits_of_the_whole_model(model_type: str, spelling: str, tmp_path: Path) -> None:
    library()
    whole = _whole(model_type)
    folder = str(write(tmp_path / "model", whole, spelling))
    wanted = whole(torch.tensor([IDS])).logits[0]
    inputs = {"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, len(IDS), dtype=torch.long)}
    texts = whole.generate(**inputs, max_new_tokens=N_NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    for speed in ("exact", "eager"):
        runtime = load(folder, device="cpu", speed=speed)  # type: ignore[arg-type]
        torch.testing.assert_close(_logits(runtime), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
        assert _decoded(runtime) == texts[0, len(IDS) :].tolist()
        draft = swift(SET, SwiftSettings(early_stop=False, max_draft_length=4))
        assert _decoded(runtime, draft) == _decoded(runtime)
    if runtime.family.experts is not None:
        return  # Of experts transformers has no products in float64.
    runtime = load(folder, device="cpu", speed="eager")
    in_float64 = Runtime(runtime.hf_model.double(), None, runtime.info)
    wanted = whole_model(model_type).double()(torch.tensor([IDS])).logits[0]
    # Of a gated delta rule transformers computes the state in float32 whatever the model's type.
    bound = 1e-5 * float(wanted.abs().max()) if in_float64.recurrent else 1e-9
    torch.testing.assert_close(_logits(in_float64), wanted, rtol=0, atol=bound)


def test_unused_projections_of_gemma_4_are_ignored(tmp_path: Path) -> None:
    """Its checkpoints contain projections of layers that share another layer's keys and values."""
    whole = _whole("gemma4")
    at, others = "model.language_model.layers.3.self_attn", ("k_proj", "v_proj", "k_norm")
    unread = {f"{at}.{name}.weight": torch.ones(48, 32) for name in others}
    config = json.loads(whole.config.to_json_string())
    runtime = load(str(write_parts(tmp_path / "model", {**whole.state_dict(), **unread}, config)), device="cpu")
    wanted = whole(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(_logits(runtime), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


ENDS = ("q_proj", "o_proj", "down_proj")


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("gemma3", {}),
        ("qwen3_vl", {"target_modules": r".*language_model.*(q_proj|o_proj|down_proj)"}),
        *(
            pytest.param(model_type, config, marks=pytest.mark.families)
            for model_type in ("mistral3", "mistral3:ministral3", "qwen2_vl", "qwen2_5_vl")
            for config in ({}, {"use_dora": True})
        ),
    ],
)
def test_an_adapter_of_the_whole_model_is_merged_into_its_text_part(
    model_type: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """Its weights for the vision tower are ignored, like the tower."""
    whole = whole_model(model_type)
    write(tmp_path / "base", whole)
    adapter = save_adapter(tmp_path / "adapter", "../base", whole, *ENDS, **config)
    tensors = load_file(adapter / "adapter_model.safetensors")
    runtime, plain = load(str(adapter), device="cpu", speed="eager"), load(str(tmp_path / "base"), device="cpu")
    for name, module in whole.named_modules():
        a, b, magnitude = (
            tensors.get(f"base_model.model.{name}.lora_{part}") for part in ("A.weight", "B.weight", "magnitude_vector")
        )
        if a is not None and b is not None:
            module.weight += 2 * b @ a
            if magnitude is not None:
                module.weight *= (magnitude / module.weight.norm(dim=1))[:, None]
    wanted = whole(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(_logits(runtime), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert not torch.allclose(_logits(plain), wanted, atol=0.01)
    assert runtime.info.fingerprint != plain.info.fingerprint
    merged = load(str(model_folder(str(adapter))), device="cpu", speed="eager")
    assert torch.equal(_logits(merged), _logits(runtime)) and merged.info.fingerprint == runtime.info.fingerprint


def test_incomplete_adapter_of_a_multimodal_model_is_refused(tmp_path: Path) -> None:
    whole = _whole("gemma3")
    write(tmp_path / "base", whole)
    adapter = save_adapter(tmp_path / "adapter", "../base", whole, *ENDS[:1])
    path = adapter / "adapter_model.safetensors"
    save_file({name: one for name, one in load_file(path).items() if "language_model.layers.2." not in name}, path)
    with pytest.raises(ModelNotFound, match=r"lacks lora_A of model\.layers\.2\.self_attn\.q_proj"):
        load(str(adapter))


@pytest.mark.parametrize("file", ["gone", "cut"])
def test_files_with_only_other_parts_are_not_read(file: str, tmp_path: Path) -> None:
    whole = _whole("gemma3")
    folder = write(tmp_path / "model", whole)
    images = folder / "images.safetensors"
    if file == "gone":
        images.unlink()
    else:
        images.write_bytes(images.read_bytes()[:100])
    runtime = load(str(folder), device="cpu")
    assert [path.name for path in weight_files(folder)] == ["text.safetensors"]
    assert not [name for name, _ in runtime.hf_model.named_parameters() if "vision" in name or "projector" in name]
    text = sum(tensor.nbytes for tensor in load_file(folder / "text.safetensors").values())
    assert memory_plan(folder, "auto", on_cpu=True).weights == text


def test_missing_file_of_the_text_part_is_reported(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", _whole("mistral3"))
    (folder / "text.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"lacks text\.safetensors, which its index names"):
        load(str(folder))


def test_one_model_has_one_fingerprint_however_its_tensors_are_named(tmp_path: Path) -> None:
    whole = _whole("qwen2_5_vl")
    folders = [write(tmp_path / spelling, whole, spelling) for spelling in ("new", "qwen")]
    values = json.loads((folders[1] / "config.json").read_text())
    text = values.pop("text_config")
    flat = {**values, **text, "model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    flat |= {"rope_theta": text["rope_parameters"]["rope_theta"]}
    del flat["rope_parameters"]
    (folders[1] / "config.json").write_text(json.dumps(flat))
    runtime = load(str(folders[1]), device="cpu")
    found = {fingerprint(folder) for folder in folders} | {fingerprint(runtime.hf_model), runtime.info.fingerprint}
    assert len(found) == 1 and runtime.config.model_type == "qwen2"
    other = write(tmp_path / "other", _whole("qwen2_vl"))
    assert fingerprint(other) not in found


@pytest.mark.parametrize("model_type", ["gemma3", "mistral3", "qwen3_vl"])
def test_a_tied_head_is_the_embedding_and_a_stored_head_is_not(model_type: str, tmp_path: Path) -> None:
    tied: Any = load(str(write(tmp_path / "tied", _whole(model_type, True))), device="cpu").hf_model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    # Newer configs say so only of the whole model, whose class may have another default than the text part's.
    folder = write(tmp_path / "apart", _whole(model_type), tie_word_embeddings=None)
    apart: Any = load(str(folder), device="cpu").hf_model
    assert torch.equal(apart.lm_head.weight, _whole(model_type).lm_head.weight)


def test_settings_of_the_whole_model_apply_to_the_text_part(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", _whole("gemma3"), eos_token_id=[7, 9], dtype=None)
    runtime = load(str(folder), device="cpu")
    assert runtime.dtype == torch.float32 and runtime.config.eos_token_id == [7, 9]
    edit_config(folder, dtype="bfloat16")
    assert load(str(folder), device="cpu").dtype == torch.bfloat16


def test_unsupported_text_part_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", _whole("mistral3"))
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit_config(folder, text_config={**text, "model_type": "mamba"})
    with pytest.raises(UnsupportedModel, match="has a text part of the type 'mamba', which is not supported in a"):
        load(str(folder))
    edit_config(folder, text_config=None)
    with pytest.raises(UnsupportedModel, match="has no text_config"):
        load(str(folder))
    edit_config(folder, text_config=text, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(UnsupportedModel, match="its library reads no text part alone: use the model as it was"):
        load(str(folder))
    edit_config(folder, quantization_config=None, architectures=["Mistral3ForSequenceClassification"])
    with pytest.raises(UnsupportedModel, match="is no causal language model of type mistral3"):
        load(str(folder))


def test_tensors_of_no_known_part_are_refused(tmp_path: Path) -> None:
    whole = _whole("qwen2_vl")
    tensors = {**whole.state_dict(), "model.language_model.layers.0.gate.weight": torch.ones(3)}
    config = json.loads(whole.config.to_json_string())
    with pytest.raises(ModelNotFound, match=r"no place, such as model\.layers\.0\.gate\.weight"):
        load(str(write_parts(tmp_path / "model", tensors, config)), device="cpu")


def test_quantised_text_part_gives_the_same_logits_alone(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    packed_folder(alone, "qwen2", Packing("gptq", 4, 32))
    stored = load_file(alone / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    config = json.loads((alone / "config.json").read_text())
    whole = {
        "model_type": "qwen2_5_vl",
        "quantization_config": config.pop("quantization_config"),
        "text_config": {**config, "model_type": "qwen2_5_vl_text"},
    }
    folder = write_parts(tmp_path / "model", {**tensors, "model.visual.norm.weight": torch.ones(2)}, whole)
    runtimes = [load(str(one), "float32", "cpu", speed="eager") for one in (folder, alone)]
    assert torch.equal(*(_logits(runtime) for runtime in runtimes))
    plans = [memory_plan(one, "float32", on_cpu=True) for one in (folder, alone)]
    assert plans[0].weights == plans[1].weights


def test_a_draft_of_a_text_part_is_a_model_of_its_own(tmp_path: Path) -> None:
    folder, out = write(tmp_path / "model", _whole("qwen3_vl")), tmp_path / "draft"
    out.mkdir()
    layer_set = LayerSet(4, frozenset({1}), frozenset({1}))
    write_restacked(folder, pairs_of(layer_set), out)
    draft = load(str(out), device="cpu")
    assert draft.n_layers == 3 and draft.config.model_type == "qwen3" and "images.safetensors" not in files_of(out)
    stored = load(str(folder), device="cpu").hf_model.state_dict()
    assert torch.equal(
        draft.hf_model.state_dict()["model.layers.2.mlp.up_proj.weight"], stored["model.layers.3.mlp.up_proj.weight"]
    )


# The template of a processor, which reads a content as parts.
PARTS_TEMPLATE = (
    "{% for m in messages %}w95 {% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}w90 {% elif part['type'] == 'text' %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}w96{% endif %}"
)


@pytest.mark.parametrize("file", ["chat_template.json", "chat_template.jinja"])
def test_a_processors_template_renders_a_chat_of_texts(file: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", _whole("gemma3"))
    stored = json.dumps({"chat_template": PARTS_TEMPLATE}) if file.endswith(".json") else PARTS_TEMPLATE
    (folder / file).write_text(stored)
    tokenizer = load(str(folder), device="cpu").tokenizer
    messages = [{"role": "user", "content": "w7 w8"}]
    assert tokenizer.chat_template == PARTS_TEMPLATE
    prompt = ChatPrompt(tokenizer, messages, {"add_generation_prompt": True})
    assert prompt.text.split() == ["w95", "w7", "w8", "w96"]
