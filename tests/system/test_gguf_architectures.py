"""GGUF files of every architecture: transformers' logits in float32, and the native kernels on the file's codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from converted import Edit, More, add, llama3_factors, write_gguf
from families import MIXTURES, WINDOW, tiny_model
from gguf_models import BY_LAYER, FILES, IDS, NO_STATES
from native import library

from swiftopt.core.errors import ModelNotFound, UnsupportedModel
from swiftopt.models.block_experts import BlockExperts
from swiftopt.models.block_maps import BlockLinear
from swiftopt.models.blocks import has_experts
from swiftopt.models.gguf_forms import FORMS
from swiftopt.models.gguf_model import settings_folder
from swiftopt.models.gguf_reader import GgufFile
from swiftopt.models.gguf_settings import config_of
from swiftopt.models.loading import load
from swiftopt.models.memory import memory_plan
from swiftopt.models.rows import Rows
from swiftopt.models.saved import no_step


def _factors(model: Any) -> More:
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return lambda writer: None
    return lambda writer: writer.add_tensor("rope_freqs.weight", llama3_factors(model.config).numpy())


def _add(**settings: Any) -> More:
    """Add settings by name without the architecture's prefix, with __ for a dot."""

    def more(writer: gguf.GGUFWriter) -> None:
        for name, value in settings.items():
            add(writer, f"{writer.arch}.{name.replace('__', '.')}", value)

    return more


def _rows(kinds: bool = False) -> list[Any]:
    """Return the files with kinds of codes in rotation; those beyond the first of an architecture are marked."""
    rows = []
    for i, what in enumerate(FILES):
        row = (what, ("Q8_0", "Q4_K")[i % 2]) if kinds else (what,)
        rows.append(pytest.param(*row, marks=pytest.mark.families if "," in what else ()))
    return rows


def check(path: Path, model: Any) -> None:
    runtime = load(str(path), "float32", "cpu", speed="eager")
    found = runtime.forward(Rows(IDS, 0), runtime.new_buffer(64))
    expected = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("what", _rows())
def test_file_gives_the_logits_of_transformers(what: str, tmp_path: Path, new_cache: Path) -> None:
    family, changed = FILES[what]
    model = tiny_model(family, torch.float32, **changed)
    check(write_gguf(tmp_path / "a.gguf", model, more=_factors(model)), model)


ALL = ["sliding_attention"] * 4
SLIDES = [kind == "sliding_attention" for kind in BY_LAYER]
_WINDOW = {"sliding_window": WINDOW}
# Windows of architectures whose files have none of llama.cpp's converter.
IN_WINDOWS: dict[str, tuple[str, dict[str, Any], More]] = {
    "llama": ("mistral-window", {}, _add(attention__sliding_window=WINDOW)),
    "llama by layer": (
        "ministral",
        {"layer_types": BY_LAYER},
        _add(attention__sliding_window=WINDOW, attention__sliding_window_pattern=SLIDES),
    ),
    "qwen2": (
        "qwen2-window",
        {"layer_types": BY_LAYER},
        _add(attention__sliding_window=WINDOW, attention__sliding_window_pattern=SLIDES),
    ),
    "qwen3": (
        "qwen3",
        {**_WINDOW, "use_sliding_window": True, "layer_types": ALL},
        _add(attention__sliding_window=WINDOW, attention__sliding_window_pattern=[True] * 4),
    ),
    "starcoder2": ("starcoder2", {}, _add(attention__sliding_window=WINDOW)),
    "mistral3": ("ministral3:window", {}, _add(attention__sliding_window=WINDOW)),
    "gemma2 by another pattern": (
        "gemma2",
        {"query_pre_attn_scalar": 16, "layer_types": BY_LAYER},
        _add(attention__sliding_window_pattern=SLIDES),
    ),
}


@pytest.mark.parametrize("what", IN_WINDOWS)
def test_windows_of_a_file_are_used(what: str, tmp_path: Path, new_cache: Path) -> None:
    family, changed, more = IN_WINDOWS[what]
    model = tiny_model(family, torch.float32, **changed)
    check(write_gguf(tmp_path / "a.gguf", model, more=more), model)


def test_files_of_gemma_2_without_a_window_have_its_default(tmp_path: Path) -> None:
    model = tiny_model("gemma2", torch.float32)
    key = "gemma2.attention.sliding_window"
    path = write_gguf(tmp_path / "a.gguf", model, more=lambda writer: writer.kv_data[0].pop(key))
    config = config_of(GgufFile(path))
    assert (config["sliding_window"], config["layer_types"]) == (4096, ["sliding_attention", "full_attention"] * 2)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("qwen3moe", "qwen3vlmoe"),
        *(pytest.param(f"{type}-window", f"{type}vl", marks=pytest.mark.families) for type in ("qwen2", "qwen3")),
    ],
)
def test_text_parts_of_multimodal_models_are_read(what: str, named: str, tmp_path: Path, new_cache: Path) -> None:
    family, changed = FILES.get(what, (what.partition("-")[0], {}))
    model = tiny_model(family, torch.float32, **changed)
    more = _add(rope__dimension_sections=[2, 1, 1, 0], n_deepstack_layers=3)
    check(write_gguf(tmp_path / "a.gguf", model, more=more, named=named), model)


@pytest.mark.parametrize("what", ["glm4moe", "qwen35", "nemotron_h"])
def test_multi_token_prediction_layers_are_ignored(what: str, tmp_path: Path, new_cache: Path) -> None:
    """Files of GLM-4.5, Qwen3.5 and Nemotron 3 have one after the model's layers."""
    family, changed = FILES[what]
    model = tiny_model(family, torch.float32, **changed)

    def more(writer: gguf.GGUFWriter) -> None:
        _add(block_count=5, nextn_predict_layers=1)(writer)
        if what == "nemotron_h":  # That has attention and experts.
            _add(attention__head_count_kv=[2, 0, 0, 0, 2], feed_forward_length=[0, 0, 24, 24, 24])(writer)
        writer.add_tensor("blk.4.nextn.eh_proj.weight", torch.ones(32, 64).numpy())
        writer.add_tensor("blk.4.attn_norm.weight", torch.ones(32).numpy())

    check(write_gguf(tmp_path / "a.gguf", model, more=more), model)


_OF_ENCODERS = {"v.blk.0.attn_q.weight": (8, 8), "a.conv1d.0.weight": (4, 3), "mm.input_projection.weight": (32, 8)}


@pytest.mark.parametrize("what", ["gemma4", pytest.param("gemma4, 26b", marks=pytest.mark.families)])
def test_parts_for_images_and_audio_are_ignored(what: str, tmp_path: Path, new_cache: Path) -> None:
    """Ollama's files contain them, and keys of layers that share another layer's, as checkpoints do."""
    family, changed = FILES[what]
    model = tiny_model(family, torch.float32, **changed)
    n_layers, n_own = len(model.config.layer_types), len(model.config.layer_types) - model.config.num_kv_shared_layers

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(n_own, n_layers):
            for part in ("k", "k_norm", "v"):
                tensors[f"blk.{layer}.attn_{part}.weight"] = tensors[f"blk.1.attn_{part}.weight"]
        tensors |= {name: torch.ones(shape) for name, shape in _OF_ENCODERS.items()}

    more = _add(vision__block_count=16, audio__attention__layer_norm_epsilon=1e-6, mm__tokens_per_image=256)
    path = write_gguf(tmp_path / "a.gguf", model, more=more, edit=edit)
    check(path, model)
    steps = list[str]()
    loaded = load(str(path), "float32", "cpu", on_step=steps.append, speed="eager")
    assert loaded.info.n_parameters >= sum(parameter.numel() for parameter in model.parameters())
    assert "; its parts for images and audio are left out" in steps[0]
    folder = settings_folder(path, no_step)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in loaded.hf_model.state_dict().values()}
    factors = 4 * 64  # Of frequencies, which the config has.
    assert memory_plan(folder, "float32", on_cpu=True).weights == sum(held.values()) + factors


def test_suppressed_tokens_of_a_file_are_never_generated(tmp_path: Path, new_cache: Path) -> None:
    """Gemma 4's ends of images are an example; llama.cpp and transformers give them no probability either."""
    model = tiny_model("gemma4_text", torch.float32)
    usual = load(str(write_gguf(tmp_path / "a.gguf", model)), "float32", "cpu", speed="eager")
    logits = usual.forward(Rows(IDS, 0), usual.new_buffer(64))
    often = int(logits.argmax(dim=-1).mode().values)

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_array("tokenizer.ggml.suppress_tokens", [often, 4])

    path = write_gguf(tmp_path / "b.gguf", model, more=more)
    library()
    for speed in ("eager", "exact"):
        runtime = load(str(path), "float32", "cpu", speed=speed)
        found = runtime.forward(Rows(IDS, 0), runtime.new_buffer(64))
        assert bool((found[:, [often, 4]] == -torch.inf).all()) and often not in found.argmax(dim=-1)
        others = [token for token in range(found.shape[1]) if token not in (often, 4)]
        torch.testing.assert_close(found[:, others], logits[:, others], rtol=1e-4, atol=1e-4)


def _fused(tensors: dict[str, torch.Tensor]) -> None:
    for layer in range(4):
        for leaf in ("weight", "bias"):
            names = [f"blk.{layer}.attn_{part}.{leaf}" for part in "qkv"]
            if names[0] in tensors:
                tensors[f"blk.{layer}.attn_qkv.{leaf}"] = torch.cat([tensors.pop(name) for name in names])


def _by_key_head(tensors: dict[str, torch.Tensor]) -> None:
    """Order projections of states as in the first files of Qwen3-Next."""
    for layer in range(3):
        qkv, z = (tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in ("qkv", "gate"))
        parts = [part.unflatten(0, (2, -1)) for part in (*qkv.split([16, 16, len(z)]), z)]
        tensors[f"blk.{layer}.ssm_in.weight"] = torch.cat(parts, dim=1).flatten(0, 1)


def _joint_experts(tensors: dict[str, torch.Tensor]) -> None:
    for layer in range(4):
        halves = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat(halves, dim=1)


def _whole_latents(tensors: dict[str, torch.Tensor]) -> None:
    """Join the map from a latent to keys and values as in files before April 2025."""
    for layer in range(4):
        of_keys, of_values = (tensors.pop(f"blk.{layer}.attn_{part}_b.weight") for part in ("k", "v"))
        both = torch.cat((of_keys.transpose(1, 2), of_values), dim=1)
        tensors[f"blk.{layer}.attn_kv_b.weight"] = both.flatten(0, 1)


def _scaled(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".attn_q.weight" in name or ".ffn_down.weight" in name]:
        tensors[name] = tensors[name] / 0.25
        tensors[name.replace("weight", "scale")] = torch.tensor([0.25])


@pytest.mark.parametrize(
    ("what", "edit"),
    [
        ("phi2", _fused),
        ("chatglm", _fused),
        ("llama", _fused),
        ("bitnet", _scaled),
        ("qwen3next", _by_key_head),
        ("qwen35moe", _joint_experts),
        ("deepseek2", _whole_latents),
    ],
)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_other_layouts_of_tensors_are_read(what: str, edit: Edit, kind: str, tmp_path: Path, new_cache: Path) -> None:
    """Queries, keys and values are one tensor, both halves of experts are one, and tensors have scales."""
    family, changed = FILES[what]
    known = tiny_model(family, torch.float32, **changed).config.to_dict()
    whole_blocks = {"intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    whole_blocks |= {"linear_value_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16}
    sizes = {name: size for name, size in whole_blocks.items() if name in known}
    model = tiny_model(family, torch.float32, **changed, **sizes)
    path = write_gguf(tmp_path / "a.gguf", model, kind, edit=edit)
    if kind == "F32":
        check(path, model)
        return
    library()
    whole, coded = load(str(path), "float32", "cpu", speed="eager"), load(str(path), device="cpu", speed="exact")
    for name, module in coded.hf_model.named_modules():
        if isinstance(module, BlockLinear):
            weight = whole.hf_model.get_submodule(name).weight.bfloat16()
            if module.head_order is not None:
                weight = weight.unflatten(1, (len(module.head_order), -1))[:, module.head_order].flatten(1)
            assert torch.equal(module.weight, weight)
        if isinstance(module, BlockExperts):
            gates = whole.hf_model.get_submodule(name).gate_up_proj.chunk(2, dim=1)[0]
            assert all(torch.equal(one.numbers(), gate) for one, gate in zip(module.maps["gate"], gates, strict=True))
    assert any(isinstance(module, BlockLinear) for module in coded.hf_model.modules())


def test_tensors_of_different_types_form_one_map(tmp_path: Path, new_cache: Path) -> None:
    model = tiny_model("granitemoehybrid:attention", torch.float32, **NO_STATES)
    for name, parameter in model.named_parameters():
        if "input_linear" in name:
            parameter.copy_(parameter.half().float())
    kinds = {f"blk.{layer}.ffn_gate.weight": "F16" for layer in range(4)}
    check(write_gguf(tmp_path / "a.gguf", model, kinds=kinds), model)


# Codes of whole blocks of 32 or 256 in each row.
WIDE = {
    **{name: 256 for name in ("hidden_size", "n_embd")},
    "head_dim": 64,
    **{name: 512 for name in ("intermediate_size", "n_inner", "ffn_hidden_size", "shared_intermediate_size")},
    **{name: 256 for name in ("moe_intermediate_size", "shared_expert_intermediate_size")},
    **{name: 64 for name in ("linear_key_head_dim", "linear_value_head_dim")},
    "hidden_size_per_layer_input": 256,
    "mamba_d_head": 192,
    "mamba_d_ssm": 768,
    **{"mamba_head_dim": 64, "moe_shared_expert_intermediate_size": 256},
    **{name: 256 for name in ("mamba_dt_rank", "time_step_rank")},
    **{"expand": 2, "num_heads": 8},
    **{"q_lora_rank": 256, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 64},
}
# Maps between latents and heads, which have as few inputs as a head has values.
_BY_HEAD = {f"blk.{layer}.attn_{part}_b.weight": "Q8_0" for layer in range(4) for part in "kv"}


_MXFP4 = {f"blk.{layer}.ffn_{part}_exps.weight": "MXFP4" for layer in range(4) for part in ("gate", "up", "down")}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "kind"), _rows(kinds=True))
def test_native_kernels_compute_with_the_codes_of_a_file(what: str, kind: str, tmp_path: Path, new_cache: Path) -> None:
    """Logits are close to those of decoded weights, and each row has the same bits alone and beside others."""
    family, changed = FILES[what]
    known = tiny_model(family, torch.float32, **changed).config.to_dict()
    wide = {name: size for name, size in WIDE.items() if known.get(name)}
    model = tiny_model(family, torch.float32, scale=1.0, **{**changed, **wide})
    kinds = _MXFP4 if what == "gpt-oss" else _BY_HEAD
    path = write_gguf(tmp_path / "a.gguf", model, kind, _factors(model), kinds=kinds)
    library()
    whole = load(str(path), "float32", "cpu", speed="eager")
    coded = load(str(path), device="cpu", speed="exact")
    linear = [name for name, module in whole.hf_model.named_modules() if isinstance(module, torch.nn.Linear)]
    # As llama.cpp's tool rounds; our kernels have the map from a latent by head.
    linear = [name for name in linear if not name.endswith((".router", ".router.proj", ".gate.wg", ".kv_b_proj"))]
    assert all(isinstance(coded.hf_model.get_submodule(name), BlockLinear) for name in linear) and len(linear) > 8
    mixtures = [name for name, _ in whole.hf_model.named_modules() if name.endswith(".experts")]
    assert all(isinstance(coded.hf_model.get_submodule(name), BlockExperts) for name in mixtures)
    assert len(mixtures) == sum(has_experts(block.parts.mlp) for block in whole.blocks)
    assert bool(mixtures) == (family in MIXTURES)
    buffers = [runtime.new_buffer(48) for runtime in (whole, coded, coded)]
    right, together = (
        runtime.forward(Rows(IDS, 0), at) for runtime, at in zip((whole, coded), buffers[:2], strict=True)
    )
    errors = (together.float() - right).norm(dim=-1) / right.norm(dim=-1)
    # Rounding makes some rows of a mixture take another expert. Gemma 4 multiplies scores by no factor below 1.
    assert float(errors.median() if mixtures or what == "gemma4" else errors.max()) < 0.1
    alone = torch.cat([coded.forward(Rows([token], i), buffers[2]) for i, token in enumerate(IDS)])
    assert torch.equal(together.view(torch.int16), alone.view(torch.int16))


REFUSED: dict[str, tuple[str, More, type[Exception], str]] = {
    "a model without positions": (
        "granite",
        _add(rope__scaling__finetuned=False),
        UnsupportedModel,
        r"rope\.scaling\.finetuned = False",
    ),
    "scores by position of another length": (
        "mistral3",
        _add(attention__temperature_length=99),
        UnsupportedModel,
        r"attention\.temperature_length = 99",
    ),
    "other positions in windows": (
        "cohere2",
        _add(rope__freq_base_swa=5.0),
        UnsupportedModel,
        r"rope\.freq_base_swa = 5\.0",
    ),
    "heads of the first StarCoder": (
        "starcoder",
        _add(attention__head_count_kv=4),
        UnsupportedModel,
        r"attention\.head_count_kv = 4",
    ),
    "other heads by layer": (
        "granitehybrid",
        _add(attention__head_count_kv=[0, 2, 1, 0]),
        UnsupportedModel,
        r"attention\.head_count_kv = \[2, 1\]",
    ),
    "another activation": (
        "bitnet",
        _add(hidden_activation="gelu"),
        UnsupportedModel,
        "hidden_activation = gelu",
    ),
    "another epsilon": (
        "olmo",
        _add(attention__layer_norm_epsilon=1e-6),
        UnsupportedModel,
        r"attention\.layer_norm_epsilon = 9\.9",
    ),
    "heads of no whole width": (
        "qwen35",
        _add(ssm__inner_size=46),
        UnsupportedModel,
        r"ssm\.inner_size = 46",
    ),
    "attention and an MLP in one layer": (
        "nemotron_h",
        _add(feed_forward_length=[24, 0, 24, 24]),
        UnsupportedModel,
        r"feed_forward_length = \[24, 0, 24, 24\]",
    ),
    "two epsilons": (
        "nemotron_h",
        _add(attention__layer_norm_epsilon=1e-3),
        UnsupportedModel,
        r"attention\.layer_norm_rms_epsilon = ",
    ),
    "attention in no layer": (
        "lfm2",
        _add(attention__head_count_kv=[0, 0, 0, 0]),
        UnsupportedModel,
        r"attention\.head_count_kv = \[0, 0, 0, 0\]",
    ),
    "too few layers": (
        "qwen35",
        _add(attention__recurrent_layers=[True, False]),
        UnsupportedModel,
        r"attention\.recurrent_layers = \[True, False\]",
    ),
    "no sizes of states": (
        "qwen35",
        lambda writer: writer.kv_data[0].pop("qwen35.ssm.group_count"),
        ModelNotFound,
        r"ssm\.group_count = None",
    ),
    "a window in the last layer": (
        "gemma4",
        _add(attention__sliding_window_pattern=[True, False, False, True]),
        UnsupportedModel,
        r"attention\.sliding_window_pattern = \[True, False, False, True\]",
    ),
    "windows of too few layers": (
        "gemma4",
        _add(attention__sliding_window_pattern=[True, False]),
        UnsupportedModel,
        r"attention\.sliding_window_pattern = \[True, False\]",
    ),
    "all keys shared": (
        "gemma4",
        _add(attention__shared_kv_layers=4),
        UnsupportedModel,
        r"attention\.shared_kv_layers = 4",
    ),
    "wide MLPs in other layers": (
        "gemma4",
        _add(feed_forward_length=[48, 96, 96, 96]),
        UnsupportedModel,
        r"feed_forward_length = \[48, 96, 96, 96\]",
    ),
    "key heads by layer beside values": (
        "gemma4",
        _add(attention__head_count_kv=[2, 1, 2, 1]),
        UnsupportedModel,
        r"attention\.head_count_kv = \[2, 1, 2, 1\]",
    ),
    "values of another width in windows": (
        "gemma4",
        _add(attention__value_length_swa=8),
        UnsupportedModel,
        r"attention\.value_length_swa = 8",
    ),
    "a part of heads rotated in windows": (
        "gemma4",
        _add(rope__dimension_count_swa=8),
        UnsupportedModel,
        r"rope\.dimension_count_swa = 8",
    ),
    "part of a head": ("arcee", _add(rope__dimension_count=4), UnsupportedModel, r"rope\.dimension_count = 4"),
    "numbers of too few layers": (
        "apertus",
        lambda writer: writer.add_xielu_alpha_p([1.0, 2.0]),
        ModelNotFound,
        r"xielu\.alpha_p = \[1\.0, 2\.0\], and needs a number for each of 4 layers",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_impossible_settings_are_refused_in_one_sentence(what: str, tmp_path: Path) -> None:
    name, more, error, words = REFUSED[what]
    family, changed = FILES[name]
    path = write_gguf(tmp_path / "a.gguf", tiny_model(family, torch.float32, **changed), more=more)
    with pytest.raises(error, match=words) as caught:
        config_of(GgufFile(path))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_no_architecture_ignores_a_setting_silently(tmp_path: Path) -> None:
    for family, changed in FILES.values():
        path = write_gguf(
            tmp_path / "a.gguf", tiny_model(family, torch.float32, **changed), more=_add(attention__new=3)
        )
        with pytest.raises(
            UnsupportedModel, match=r"setting attention\.new = 3, for which its architecture has no place"
        ):
            config_of(GgufFile(path))


@pytest.mark.parametrize(
    ("factors", "error", "words"),
    [
        ([1.0] * 16 + [2.0] * 48, UnsupportedModel, "factors between those of pairs that are rotated and of those"),
        ([1e30] * 48 + [1.0] * 16, UnsupportedModel, "factors between"),
        ([1.0] * 16, ModelNotFound, r"is F32 of the shape \[16\]"),
        (None, ModelNotFound, "lacks rope_freqs.weight"),
    ],
)
def test_rotation_factors_of_another_rotation_are_refused(
    factors: list[float] | None, error: type[Exception], words: str, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["rope_freqs.weight"]
        tensors |= {} if factors is None else {"rope_freqs.weight": torch.tensor(factors)}

    family, changed = FILES["gemma4"]
    path = write_gguf(tmp_path / "a.gguf", tiny_model(family, torch.float32, **changed), edit=edit)
    with pytest.raises(error, match=words) as caught:
        config_of(GgufFile(path))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


SHAPES: dict[str, tuple[str, Edit, str]] = {
    "an embedding by layer of other layers": (
        "gemma4",
        lambda tensors: tensors.update({"per_layer_token_embd.weight": torch.ones(97, 36)}),
        r"per_layer_token_embd\.weight in .* has the shape \[97, 36\], and .* \[97, 48\]",
    ),
    "too few norms": (
        "stablelm",
        lambda tensors: tensors.update({"blk.1.attn_q_norm.weight": torch.ones(3, 8)}),
        r"blk\.1\.attn_q_norm\.weight in .* has the shape \[3, 8\], and .* \[4, 8\]",
    ),
    "halves of two sizes": (
        "granitehybrid",
        lambda tensors: tensors.update({"blk.1.ffn_up.weight": torch.ones(47, 32)}),
        r"blk\.1\.ffn_up\.weight in .* has the shape \[47, 32\], and .* \[48, 32\]",
    ),
    "too few heads in one tensor": (
        "phi2",
        lambda tensors: (_fused(tensors), tensors.update({"blk.1.attn_qkv.weight": torch.ones(90, 32)})),
        r"blk\.1\.attn_qkv\.weight in .* has the shape \[90, 32\], and .* \[64, 32\]",
    ),
    "a factor by row": (
        "bitnet",
        lambda tensors: tensors.update({"blk.1.attn_q.scale": torch.ones(32)}),
        r"blk\.1\.attn_q\.scale in .* has the shape \[32\], and .* \[1\]",
    ),
}


@pytest.mark.parametrize("what", SHAPES)
def test_tensors_of_wrong_shapes_are_refused_in_one_sentence(what: str, tmp_path: Path, new_cache: Path) -> None:
    name, edit, words = SHAPES[what]
    family, changed = FILES[name]
    path = write_gguf(tmp_path / "a.gguf", tiny_model(family, torch.float32, **changed), edit=edit)
    with pytest.raises(ModelNotFound, match=words) as caught:
        load(str(path), "float32", "cpu", speed="eager")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_every_form_is_tested_here_or_with_the_settings() -> None:
    tested = {tiny_model(family, torch.float32, **changed).config.model_type for family, changed in FILES.values()}
    windows = {
        tiny_model(family, torch.float32, **changed).config.model_type for family, changed, _ in IN_WINDOWS.values()
    }
    # GLM-4.7-Flash's files have the architecture of DeepSeek V3.
    assert (tested | windows | {"gemma3_text", "phi3", "gpt2"}) - {"glm4_moe_lite"} == set(FORMS)
