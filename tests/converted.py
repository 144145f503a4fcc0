"""Tiny models as GGUF files, with the settings and tensors that llama.cpp's converter writes for each architecture.

It follows the converter's source and knows nothing of the table that our reader goes by, so that each can be wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

More = Callable[[gguf.GGUFWriter], object]
Edit = Callable[[dict[str, Tensor]], object]
Settings = dict[str, Any]

# Architectures whose name is not that of transformers' type.
ARCHITECTURES = {
    **dict.fromkeys(("mistral", "ministral", "internlm3", "iquestcoder"), "llama"),
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_bigcode": "starcoder",
    "gpt_neox": "gptneox",
    "phi": "phi2",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "glm": "chatglm",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "mistral3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "glm4_moe": "glm4moe",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
    "exaone_moe": "exaone-moe",
    "minimax_m2": "minimax-m2",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "gpt_oss": "gpt-oss",
    "llama4_text": "llama4",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "lfm2_moe": "lfm2moe",
}
# The converter's classes that derive from LlamaModel, and those of them that do not permute.
LIKE_LLAMA = ("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "arcee", "apertus", "mistral3")
NEMOTRON_H = ("nemotron_h", "nemotron_h_moe")
UNPERMUTED = ("apertus",)
DELTA = ("qwen35", "qwen35moe", "qwen3next")
TILED = ("qwen35", "qwen35moe")  # The classes that derive from _LinearAttentionVReorderBase.
MAMBA2 = ("granitehybrid", "falcon-h1", "mamba2", *NEMOTRON_H)  # The classes that derive from Mamba2Model.
NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", *DELTA)
NO_OUTPUT = ("gemma", "gemma2", "command-r", "cohere2", "bitnet")
Q4_K_BYTES, Q4_K_INPUTS = 144, 256


def architecture_of(model: Any) -> str:
    if model.config.model_type == "nemotron_h" and "moe" in model.config.layer_types:
        return "nemotron_h_moe"
    return ARCHITECTURES.get(model.config.model_type, model.config.model_type)


def write_gguf(
    path: Path,
    model: Any,
    kind: str = "F32",
    more: More = lambda writer: None,
    edit: Edit = lambda tensors: None,
    kinds: Mapping[str, str] = MappingProxyType({}),
    named: str | None = None,
) -> Path:
    """Write a model, matrices as `kind`, with a tokenizer of single letters.

    Args: more: adds settings and tensors. edit: changes the tensors, by name. kinds: other types of some of them.
          named: another architecture, whose files are the same.
    """
    architecture = architecture_of(model)
    writer = gguf.GGUFWriter(str(path), named or architecture)
    writer.add_name("tiny")
    for name, value in settings_of(model.config, architecture).items():
        add(writer, f"{writer.arch}.{name}", value)
    for leaf in ("alpha_p", "alpha_n", "beta", "eps") if architecture == "apertus" else ():
        values = [float(value) for name, value in model.state_dict().items() if name.endswith(f"act_fn.{leaf}")]
        getattr(writer, f"add_xielu_{leaf}")(values)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*map(chr, range(33, 127)), "ab", "cd", "ef"])
    writer.add_token_types([1] * model.config.vocab_size)
    writer.add_token_merges(["a b", "c d", "e f"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    tensors = dict(tensors_of(model, architecture))
    edit(tensors)
    for name, tensor in tensors.items():
        _add_tensor(writer, name, np.ascontiguousarray(tensor.float().numpy()), kinds.get(name, kind))
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a setting, in place of an earlier one of its name."""
    for written in writer.kv_data:
        written.pop(key, None)
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], kind: str) -> None:
    """As llama.cpp's own tool rounds: vectors, norms and positions stay in float32."""
    types = gguf.GGMLQuantizationType
    kept = ("norm", "ffn_gate_inp.", "exps.bias", "conv1d", "shortconv.conv")
    is_matrix = (
        values.ndim > 1
        and name.endswith(".weight")
        and not any(one in name for one in kept)
        and name != "position_embd.weight"
    )
    own = types[kind] if is_matrix else types.F32
    if own == types.Q4_K:
        writer.add_tensor(name, _random_q4_k(values), raw_dtype=own)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, own), raw_dtype=own)


def _random_q4_k(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Blocks of any codes, of about the size of the values: gguf reads this type and does not write it."""
    rng = np.random.default_rng(values.shape[0])
    blocks = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // Q4_K_INPUTS, Q4_K_BYTES), np.uint8)
    scale = np.float16(float(values.std()) / (31 * 4.6))
    blocks[..., :4] = np.array([scale, scale * np.float16(7.5)], np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def settings_of(config: Any, architecture: str) -> Settings:
    """Return the architecture's settings, by name without its prefix."""
    own = _OWN.get(architecture)
    return own(config) if own is not None else _usual(config)


def _first(config: Any, *names: str) -> Any:
    hparams = config.to_dict()
    return next((hparams[name] for name in names if hparams.get(name) is not None), None)


def _head(config: Any) -> int:
    return int(_first(config, "head_dim") or config.hidden_size // config.num_attention_heads)


def _rope(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return dict(rope.get("full_attention", rope))


# Settings that most of the converter's classes write, and their names in transformers' configs.
NAMES: Mapping[str, tuple[str, ...]] = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("ffn_hidden_size", "n_inner", "intermediate_size"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "expert_count": ("num_local_experts",),
    "expert_used_count": ("num_experts_per_tok",),
}
SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
KV_HEADS, EPSILON = "attention.head_count_kv", "attention.layer_norm_epsilon"


def _named(config: Any, *names: str) -> Settings:
    """What a class writes one by one: sizes, and further settings of `NAMES`; without those that a config lacks."""
    found = {name: _first(config, *NAMES[name]) for name in (*SIZES, *names)}
    return {name: value for name, value in found.items() if value is not None}


def _without(settings: Settings, *prefixes: str) -> Settings:
    return {name: value for name, value in settings.items() if not name.startswith(prefixes)}


def _usual(config: Any) -> Settings:
    """TextModel.set_gguf_parameters."""
    rope, local = _rope(config), config.rope_parameters.get("sliding_attention")
    found = {**_named(config, *NAMES), "rope.freq_base": float(rope["rope_theta"])}
    if local is not None:
        found["rope.freq_base_swa"] = local["rope_theta"]
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def _like_llama(config: Any) -> Settings:
    return {**_usual(config), "vocab_size": config.vocab_size, "rope.dimension_count": _head(config)}


def _gemma(config: Any) -> Settings:
    return _without(_usual(config), "rope.", "vocab", "expert")


def _gemma2(config: Any) -> Settings:
    return {
        **_gemma(config),
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": config.sliding_window,
    }


def _gemma3(config: Any) -> Settings:
    cap = {"final_logit_softcapping": config.final_logit_softcapping} if config.final_logit_softcapping else {}
    return {**_usual(config), **cap, "attention.sliding_window": config.sliding_window}


def _gemma4(config: Any) -> Settings:
    """Gemma4Model, behind Gemma3Model: of what differs by the type of a layer, the last written counts."""
    kinds, by_layer, inner = config.layer_types, config.per_layer_config, config.intermediate_size
    slides = [kind == "sliding_attention" for kind in kinds]
    in_windows, elsewhere = by_layer["sliding_attention"], by_layer["full_attention"]
    n_own, n_shared = len(kinds) - config.num_kv_shared_layers, config.num_kv_shared_layers
    wide = {"feed_forward_length": [inner] * n_own + [2 * inner] * n_shared} if config.use_double_wide_mlp else {}
    n_heads = [(in_windows if slid else elsewhere).num_key_value_heads for slid in slides]
    experts = {"expert_count": config.num_experts, "expert_used_count": config.top_k_experts}
    return {
        **_gemma3(config),
        **wide,
        **({KV_HEADS: n_heads} if config.attention_k_eq_v else {}),
        "attention.shared_kv_layers": n_shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "attention.sliding_window_pattern": slides,
        "attention.key_length": elsewhere.head_dim,
        "attention.value_length": elsewhere.head_dim,
        "attention.key_length_swa": in_windows.head_dim,
        "attention.value_length_swa": in_windows.head_dim,
        "rope.dimension_count": elsewhere.head_dim,
        "rope.dimension_count_swa": in_windows.head_dim,
        **({**experts, "expert_feed_forward_length": config.moe_intermediate_size} if config.enable_moe_block else {}),
    }


def _phi3(config: Any) -> Settings:
    return {
        **_without(_usual(config), "rope.scaling", "attention.key", "attention.value"),
        "rope.dimension_count": int(_head(config) * _rope(config).get("partial_rotary_factor", 1.0)),
        "attention.sliding_window": config.sliding_window or 0,
    }


def _gpt2(config: Any) -> Settings:
    return {**_named(config, EPSILON), "feed_forward_length": config.n_inner or 4 * config.n_embd}


def _starcoder(config: Any) -> Settings:
    return {**_named(config, EPSILON), KV_HEADS: 1}


def _stablelm(config: Any) -> Settings:
    return {
        **_without(_usual(config), "rope.freq", "attention.key", "attention.value"),
        "rope.dimension_count": _rotated(config),
        "use_parallel_residual": config.use_parallel_residual,
    }


def _rotated(config: Any) -> int:
    return int(_head(config) * _rope(config)["partial_rotary_factor"])


def _phi2(config: Any) -> Settings:
    return {**_named(config, KV_HEADS, EPSILON), "rope.dimension_count": _rotated(config)}


def _gptneox(config: Any) -> Settings:
    parallel = {"use_parallel_residual": config.use_parallel_residual}
    return {**_named(config, EPSILON), **parallel, "rope.dimension_count": _rotated(config)}


def _falcon(config: Any) -> Settings:
    n_kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    own = {"context_length": 2048, "tensor_data_layout": "jploski"}
    return {**_named(config, EPSILON), **own, KV_HEADS: n_kv_heads}


def _nemotron(config: Any) -> Settings:
    return {
        **_usual(config),
        "vocab_size": config.vocab_size,
        "attention.layer_norm_epsilon": config.norm_eps,
        "rope.dimension_count": _rotated(config),
        "rope.scaling.type": "none",
    }


def _granite(config: Any) -> Settings:
    return {
        **_without(_like_llama(config), "attention.key_length", "attention.value_length"),
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _space(config: Any, inner: int, rank: str, groups: str | None = None) -> Settings:
    """Settings of a state space in a hybrid. Args: inner: its values. rank, groups: fields of the config."""
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": inner,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": getattr(config, rank),
        **({} if groups is None else {"ssm.group_count": getattr(config, groups)}),
    }


def _granitehybrid(config: Any) -> Settings:
    return {
        **_granite(config),
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        **_space(config, config.mamba_expand * config.hidden_size, "mamba_n_heads", "mamba_n_groups"),
        KV_HEADS: [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types],
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
    }


def _nemotron_h(config: Any) -> Settings:
    """NemotronHModel: a layer with an MLP, or with experts, is one for which a width is written."""
    has_experts = "moe" in config.layer_types
    width = config.moe_intermediate_size if has_experts else config.intermediate_size
    experts = {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
    }
    return {
        **_without(_named(config, *NAMES), "expert"),
        **(experts if has_experts else {}),
        "block_count": len(config.layer_types),
        "vocab_size": config.vocab_size,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": 10000.0,
        "rope.scaling.finetuned": False,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "feed_forward_length": [width * (kind in ("mlp", "moe")) for kind in config.layer_types],
        KV_HEADS: [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types],
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
    }


def _jamba(config: Any) -> Settings:
    return {
        **_named(config, "feed_forward_length", "attention.head_count", "attention.layer_norm_rms_epsilon"),
        KV_HEADS: [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types],
        **_space(config, config.mamba_expand * config.hidden_size, "mamba_dt_rank"),
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
    }


def _falcon_h1(config: Any) -> Settings:
    return {
        **_like_llama(config),
        **_space(config, config.mamba_d_ssm, "mamba_n_heads", "mamba_n_groups"),
        "attention.key_length": _head(config),
        "attention.value_length": _head(config),
    }


def _mamba(config: Any) -> Settings:
    """MambaModel and Mamba2Model."""
    is_older = config.model_type == "mamba"
    heads = {"ssm.time_step_rank": config.time_step_rank, "ssm.dt_b_c_rms": False}
    if not is_older:
        heads = {"ssm.time_step_rank": config.num_heads, "ssm.group_count": config.n_groups}
    return {
        **_named(config, "attention.layer_norm_rms_epsilon"),
        "context_length": 1 << 20,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.expand * config.hidden_size,
        "ssm.state_size": config.state_size,
        **heads,
    }


def _chatglm(config: Any) -> Settings:
    return {
        **_named(config, KV_HEADS, "attention.layer_norm_rms_epsilon"),
        "rope.dimension_count": int(config.hidden_size // config.num_attention_heads * 0.5),
        "rope.freq_base": float(_rope(config)["rope_theta"]),
    }


def _glm4(config: Any) -> Settings:
    return {**_usual(config), "rope.dimension_count": _rotated(config)}


def _olmo(config: Any) -> Settings:
    clip = {} if config.clip_qkv is None else {"attention.clamp_kqv": config.clip_qkv}
    return {**_usual(config), "attention.layer_norm_epsilon": 1e-5, **clip}


def _windows(config: Any) -> Settings:
    window = getattr(config, "sliding_window", None)
    if window is None:
        return {}
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": slides}


def _cohere(config: Any) -> Settings:
    return {**_usual(config), "logit_scale": config.logit_scale, "rope.scaling.type": "none"}


def _cohere2(config: Any) -> Settings:
    return {
        **_cohere(config),
        "attention.sliding_window": config.sliding_window,
        "vocab_size": config.vocab_size,
        "rope.dimension_count": _head(config),
    }


def _hunyuan(config: Any) -> Settings:
    rope, head = _rope(config), _head(config)
    scaled = rope["rope_theta"] * rope["alpha"] ** (head / (head - 2))
    return {
        **_usual(config),
        "rope.freq_base": scaled,
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 256 * 1024,
        "context_length": 256 * 1024,
    }


def _mistral3(config: Any) -> Settings:
    rope = _rope(config)
    return {
        **_like_llama(config),
        "rope.scaling.yarn_log_multiplier": float(rope.get("mscale_all_dim", 0.0)),
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _experts(config: Any) -> Settings:
    return {
        **_usual(config),
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


SIGMOID = 2  # gguf.ExpertGatingFuncType.SIGMOID


def _deepseek_experts(config: Any) -> Settings:
    """What Glm4MoeModel and Dots1Model write of routers like DeepSeek's."""
    kinds = _first(config, "mlp_layer_types")
    return {
        **_usual(config),
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_gating_func": SIGMOID,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "leading_dense_block_count": kinds.count("dense") if kinds else config.first_k_dense_replace,
    }


def _deepseek2(config: Any) -> Settings:
    """DeepseekV2Model: one key head as wide as a latent and what is rotated, and how wide heads are without it."""
    rope, q_rank = _rope(config), config.q_lora_rank
    damping = rope.get("mscale_all_dim")
    written = {
        **_deepseek_experts(config),
        **({} if q_rank is None else {"attention.q_lora_rank": q_rank}),
        **({} if damping is None else {"rope.scaling.yarn_log_multiplier": 0.1 * damping}),
        KV_HEADS: 1,
        "vocab_size": config.vocab_size,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "expert_gating_func": 1 if config.model_type == "deepseek_v2" else SIGMOID,
    }
    return written if config.norm_topk_prob else _without(written, "expert_weights_norm")


def _exaone_moe(config: Any) -> Settings:
    return {
        **_experts(config),
        **_windows(config),
        "vocab_size": config.vocab_size,
        "expert_shared_count": config.num_shared_experts,
        "expert_shared_feed_forward_length": config.moe_intermediate_size * config.num_shared_experts,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_gating_func": SIGMOID,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "leading_dense_block_count": config.mlp_layer_types.index("sparse"),
    }


def _ernie_moe(config: Any) -> Settings:
    return {
        **_usual(config),
        "expert_count": config.moe_num_experts,
        "expert_used_count": config.moe_k,
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.moe_num_shared_experts,
        "expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads,
    }


def _hunyuan_moe(config: Any) -> Settings:
    return {
        **_hunyuan(config),
        "expert_count": config.num_experts,
        "expert_used_count": config.moe_topk,
        "expert_shared_feed_forward_length": config.intermediate_size,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_count": 1,
    }


def _gpt_oss(config: Any) -> Settings:
    window = {"attention.sliding_window": config.sliding_window}
    return {**_usual(config), **window, "expert_feed_forward_length": config.intermediate_size}


def _llama4(config: Any) -> Settings:
    return {
        **_like_llama(config),
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
    }


def _delta(config: Any) -> Settings:
    kinds, rope = config.layer_types, _rope(config)
    sections = {"rope.dimension_sections": [*rope.get("mrope_section", (11, 11, 10)), 0]}
    interval = kinds.index("full_attention") + 1
    regular = [(layer + 1) % interval != 0 for layer in range(len(kinds))]
    mixed = [kind == "linear_attention" for kind in kinds]
    return {
        **(_usual(config) if getattr(config, "num_experts", None) is None else _experts(config)),
        **(sections if config.model_type != "qwen3_next" else {}),
        **({"full_attention_interval": interval} if mixed == regular else {"attention.recurrent_layers": mixed}),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "rope.dimension_count": int(_head(config) * rope.get("partial_rotary_factor", 0.25)),
    }


def _delta_moe(config: Any) -> Settings:
    return {**_delta(config), "expert_shared_feed_forward_length": config.shared_expert_intermediate_size}


def _lfm2(config: Any) -> Settings:
    return {
        **_usual(config),
        KV_HEADS: [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types],
        "vocab_size": config.vocab_size,
        "shortconv.l_cache": config.conv_L_cache,
    }


def _lfm2_moe(config: Any) -> Settings:
    return {
        **_experts(config),
        **_lfm2(config),
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": SIGMOID,
    }


_OWN: dict[str, Callable[[Any], Settings]] = {
    **dict.fromkeys(LIKE_LLAMA, _like_llama),
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "starcoder": _starcoder,
    "stablelm": _stablelm,
    "phi2": _phi2,
    "gptneox": _gptneox,
    "falcon": _falcon,
    "nemotron": _nemotron,
    "granite": _granite,
    "granitehybrid": _granitehybrid,
    **dict.fromkeys(NEMOTRON_H, _nemotron_h),
    "jamba": _jamba,
    "falcon-h1": _falcon_h1,
    "mamba": _mamba,
    "mamba2": _mamba,
    "chatglm": _chatglm,
    "glm4": _glm4,
    "olmo": _olmo,
    "olmo2": lambda config: {**_usual(config), **_windows(config)},
    "exaone4": lambda config: {**_usual(config), "vocab_size": config.vocab_size, **_windows(config)},
    "command-r": _cohere,
    "cohere2": _cohere2,
    "hunyuan-dense": _hunyuan,
    "jais2": lambda config: {**_usual(config), "rope.dimension_count": _head(config)},
    "bitnet": lambda config: {
        **_usual(config),
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 1.0,
        "hidden_activation": config.hidden_act,
    },
    "mistral3": _mistral3,
    "qwen2moe": lambda config: {
        **_experts(config),
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    },
    "qwen3moe": _experts,
    "granitemoe": _granite,
    "glm4moe": lambda config: {**_deepseek_experts(config), "rope.dimension_count": _rotated(config)},
    "deepseek2": _deepseek2,
    "dots1": _deepseek_experts,
    "exaone-moe": _exaone_moe,
    "minimax-m2": lambda config: {
        **_usual(config),
        "expert_feed_forward_length": config.intermediate_size,
        "rope.dimension_count": int(_head(config) * _rope(config).get("partial_rotary_factor", 1.0)),
        "expert_gating_func": SIGMOID,
    },
    "ernie4_5-moe": _ernie_moe,
    "hunyuan-moe": _hunyuan_moe,
    "phimoe": lambda config: {**_usual(config), "attention.sliding_window": config.sliding_window or 0},
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
    "qwen35": _delta,
    "qwen35moe": _delta_moe,
    "qwen3next": _delta_moe,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "olmoe": lambda config: {**_experts(config), "attention.layer_norm_rms_epsilon": config.rms_norm_eps},
}


def tensors_of(model: Any, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file: modify_tensors of the converter's classes."""
    config, state = model.config, model.state_dict()
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    places = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    shared = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    permutes = architecture in ("olmo", *NEMOTRON_H) or (architecture in LIKE_LLAMA and architecture not in UNPERMUTED)
    for name, tensor in state.items():
        skips_head = config.tie_word_embeddings or architecture in NO_OUTPUT
        if ".act_fn." in name or (name == "lm_head.weight" and skips_head):
            continue
        if architecture in NORMS_PLUS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
            tensor = tensor + 1
        if tensor.dim() == 3 and ("conv1d" in name or "conv.conv" in name):
            tensor = tensor.squeeze(1)
        if architecture in TILED and ".linear_attn." in name:
            tensor = _tiled(name, tensor, config)
        if name.endswith(".A_log"):
            tensor = -tensor.exp()
        if architecture == "falcon-h1":
            tensor = _multiplied(name, tensor, config)
        if architecture in MAMBA2 and name.endswith((".A_log", ".D")):
            tensor = tensor[:, None]
        if architecture in MAMBA2 and name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            tensor = tensor.view(_first(config, "mamba_n_groups", "n_groups"), -1)
        name = name.replace(".dt_bias", ".dt_proj.bias")
        if permutes and ".q_proj." in name:
            tensor = _permuted(tensor, config.num_attention_heads)
        if permutes and ".k_proj." in name:
            tensor = _permuted(tensor, config.num_key_value_heads)
        if architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            tensor = tensor.T
        if "query_key_value" in name:
            tensor = _regrouped(tensor, config)
        if norms := re.fullmatch(r"(.*\.(q|k)_layernorm)\.norms\.(\d+)\.weight", name):
            if norms[3] != "0":
                continue
            n_heads = config.num_attention_heads if norms[2] == "q" else config.num_key_value_heads
            tensor = torch.stack([state[f"{norms[1]}.norms.{head}.weight"] for head in range(n_heads)])
            name = f"{norms[1]}.weight"
        layer = re.search(r"\.(\d+)\.", name)
        if name.endswith(".kv_b_proj.weight") and layer is not None:
            sizes = [config.qk_nope_head_dim, config.v_head_dim]
            of_keys, of_values = tensor.unflatten(0, (config.num_attention_heads, -1)).split(sizes, dim=1)
            yield f"blk.{layer[1]}.attn_k_b.weight", of_keys.transpose(1, 2)
            yield f"blk.{layer[1]}.attn_v_b.weight", of_values
            continue
        if ".experts." in name and layer is not None:
            part, kind = name.rpartition(".")[2].removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
            if architecture in ("gpt-oss", "llama4") and kind == "weight":
                tensor = tensor.transpose(1, 2)
            if part == "gate_up_proj" and architecture == "gemma4":
                yield f"blk.{layer[1]}.ffn_gate_up_exps.weight", tensor
            elif part == "gate_up_proj":
                gate, up = (tensor[:, ::2], tensor[:, 1::2]) if architecture == "gpt-oss" else tensor.chunk(2, dim=1)
                yield f"blk.{layer[1]}.ffn_gate_exps.{kind}", gate
                yield f"blk.{layer[1]}.ffn_up_exps.{kind}", up
            else:
                yield f"blk.{layer[1]}.ffn_{part.removesuffix('_proj')}_exps.{kind}", tensor
            continue
        if "in_proj_qkvz" in name and layer is not None:
            shared = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
            by_key_head = tensor.view(config.linear_num_key_heads, -1, tensor.shape[-1])
            *qkv, z = by_key_head.split([config.linear_key_head_dim] * 2 + [shared] * 2, dim=1)
            yield f"blk.{layer[1]}.attn_qkv.weight", torch.cat([part.flatten(0, 1) for part in qkv])
            yield f"blk.{layer[1]}.attn_gate.weight", z.flatten(0, 1)
            continue
        if ".router." in name and name.endswith("scale") and layer is not None:
            yield f"blk.{layer[1]}.{'ffn_down_exps' if 'per_expert' in name else 'ffn_gate_inp'}.scale", tensor
            continue
        if name.endswith(("e_score_correction_bias", ".expert_bias")) and layer is not None:
            yield f"blk.{layer[1]}.exp_probs_b.bias", tensor.flatten()
            continue
        if "block_sparse_moe.router." in name and layer is not None:
            yield f"blk.{layer[1]}.ffn_gate_inp.weight", tensor
            continue
        if name.endswith((".sinks", ".layer_scalar")):
            name += ".weight"
        if "shared_mlp.input_linear" in name and layer is not None:
            gate, up = tensor.chunk(2)
            yield f"blk.{layer[1]}.ffn_gate{shared}.weight", gate
            yield f"blk.{layer[1]}.ffn_up{shared}.weight", up
            continue
        if "shared_mlp.output_linear" in name and layer is not None:
            yield f"blk.{layer[1]}.ffn_down{shared}.weight", tensor
            continue
        if name.endswith("_sub_norm.weight") and layer is not None:
            yield f"blk.{layer[1]}.{name.split('.')[-2]}.weight", tensor
            continue
        if architecture in NEMOTRON_H:
            name = name.replace("model.", "backbone.", 1)
        place = places.get_name(name, try_suffixes=(".weight", ".bias"))
        assert place is not None, name
        yield place, tensor
    if architecture == "gemma4":
        yield "rope_freqs.weight", _rotated_pairs(config)


def _rotated_pairs(config: Any) -> Tensor:
    """Gemma4Model.generate_extra_tensors: factors of the frequencies of layers without a window."""
    head, rotated = config.per_layer_config["full_attention"].head_dim, _rope(config)["partial_rotary_factor"]
    n_rotated = int(head * rotated / 2)
    return torch.tensor([1.0] * n_rotated + [1e30] * (head // 2 - n_rotated))


def _multiplied(name: str, tensor: Tensor, config: Any) -> Tensor:
    """FalconH1Model puts the config's multipliers into the weights."""
    inner, keys = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    if "mamba.in_proj" in name:
        rows = torch.tensor(config.ssm_multipliers).repeat_interleave(
            torch.tensor([inner, inner, keys, keys, config.mamba_n_heads])
        )
        return tensor * config.ssm_in_multiplier * rows[:, None]
    gate, out = config.mlp_multipliers
    factors = {
        "down_proj": out,
        "gate_proj": gate,
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    leaf = name.removesuffix(".weight")
    return tensor * next((factor for part, factor in factors.items() if leaf.endswith(f".{part}") or leaf == part), 1.0)


def _permuted(weights: Tensor, n_heads: int) -> Tensor:
    shape = weights.shape
    return weights.reshape(n_heads, 2, shape[0] // n_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _tiled(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Value heads by their number within a key head, then by key head; transformers has them by key head."""
    n_keys, n_heads = config.linear_num_key_heads, config.linear_num_value_heads
    if name.endswith("norm.weight"):
        return tensor
    dim, first = int("out_proj" in name), 0
    if "in_proj_qkv" in name or "conv1d" in name:
        first = 2 * n_keys * config.linear_key_head_dim
    kept, values = tensor.split([first, tensor.shape[dim] - first], dim=dim)
    by_head = values.unflatten(dim, (n_keys, n_heads // n_keys, -1))
    return torch.cat((kept, by_head.swapaxes(dim, dim + 1).flatten(dim, dim + 2)), dim=dim)


def _regrouped(tensor: Tensor, config: Any) -> Tensor:
    """All queries, then all keys, then all values; transformers has them by key head."""
    n_heads, n_groups = config.num_attention_heads, config.num_attention_heads
    if config.model_type == "falcon":
        n_groups = config.num_kv_heads if config.new_decoder_architecture else 1
    width = config.hidden_size // n_heads
    grouped = tensor.reshape(n_groups, n_heads // n_groups + 2, width, -1)
    parts = [grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]]
    return torch.cat([part.reshape(-1, grouped.shape[-1]) for part in parts]).reshape(tensor.shape)


def llama3_factors(config: Any) -> Tensor:
    """What the converter keeps of Llama 3's scaling: what each frequency is divided by."""
    rope, head = _rope(config), _head(config)
    old = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for frequency in 1.0 / rope["rope_theta"] ** (torch.arange(0, head, 2).float() / head):
        length = 2 * math.pi / float(frequency)
        smooth = (old / length - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if length < old / high else factor if length > old / low else between)
    return torch.tensor(factors)
