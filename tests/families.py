"""Random tiny models of every supported family: four layers, float64, a vocabulary of 97 words."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from swiftopt.core.records import ModelInfo
from swiftopt.models.runtime import Runtime
from swiftopt.models.transformers_models import list_language_model

VOCAB = 97
WINDOW = 12  # tokens; shorter than what the tests decode, so that windows are crossed
_SIZE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
GROUPED: dict[str, Any] = {**_SIZE, "num_key_value_heads": 2}
_BY_LAYER = ["sliding_attention", "full_attention"] * 2

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "mistral": MistralConfig(**GROUPED, sliding_window=None),
    "mistral-window": MistralConfig(**GROUPED, sliding_window=WINDOW),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen2-window": Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2, layer_types=_BY_LAYER
    ),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "gemma3": Gemma3TextConfig(**GROUPED, head_dim=16, sliding_window=WINDOW, layer_types=_BY_LAYER),
    "gemma3-softcap": Gemma3TextConfig(
        **GROUPED, head_dim=16, sliding_window=WINDOW, layer_types=_BY_LAYER, final_logit_softcapping=3.0
    ),
    "phi3": Phi3Config(**GROUPED, sliding_window=None),
    "phi3-window": Phi3Config(**GROUPED, sliding_window=WINDOW),
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "gpt_neox": GPTNeoXConfig(**_SIZE, rotary_pct=0.25),
    "gpt_neox-serial": GPTNeoXConfig(**_SIZE, rotary_pct=0.5, use_parallel_residual=False),
}
_WINDOWS: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": _BY_LAYER}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_GEMMA4: dict[str, Any] = {**_WINDOWS, "head_dim": 16, "global_head_dim": 24, "final_logit_softcapping": 3.0}
# As E2B, and as 31B: keys are values in layers without a window.
GEMMA4 = {
    **_GEMMA4,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
GEMMA4_KEYS: dict[str, Any] = {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.7,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
_OLMO3_ROPE = {"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
# Heads of a state space as wide as a vector and a half of our kernels, and chunks shorter than a prompt.
_SPACE: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_head": 24,
    "mamba_expand": 3,
    "mamba_chunk_size": 8,
}
_GRANITE_4: dict[str, Any] = {
    **_MULTIPLIERS,
    **_SPACE,
    "shared_intermediate_size": 48,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
_NEMOTRON_H: dict[str, Any] = {
    **{"mamba_num_heads": 4, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 8},
    "head_dim": 16,
}
_STATELESS: dict[str, Any] = {**_GRANITE_4, "num_local_experts": 0, "layer_types": ["full_attention"] * 4}
_FALCON_H1: dict[str, Any] = {
    **_SPACE,
    "mamba_d_ssm": 96,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.7, 1.3],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.4,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.8, 1.2, 0.7, 1.3, 0.9],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
}

DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
# Values of heads narrower than keys, of which some are rotated.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_CONVOLUTIONS: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}

# Types of models whose layers are attention, or what stands for it, and one MLP: how each differs from `GROUPED`; the
# first variant of a type has most of its mechanisms.
DENSE: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 16},
    "gemma2": {**_WINDOWS, **_CAPS, "head_dim": 16, "query_pre_attn_scalar": 20},
    "vaultgemma": {**_WINDOWS, **_CAPS, "head_dim": 16, "query_pre_attn_scalar": 20},
    "gemma4_text": GEMMA4,
    "gemma4_text:31b": {**GEMMA4_KEYS, "hidden_size_per_layer_input": 0},
    "gemma4_unified_text": {**GEMMA4_KEYS, "num_kv_shared_layers": 1},
    "ministral": {**_WINDOWS, "head_dim": 16},
    "ministral3": {"head_dim": 8, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3}},
    "ministral3:window": {"sliding_window": WINDOW, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
    "seed_oss": {"head_dim": 16, "attention_bias": True, "attention_out_bias": True},
    "cwm": _WINDOWS,
    "internlm3": {"head_dim": 16, "bias": True, "qkv_bias": True},
    "iquestcoder": {"head_dim": 16},
    "starcoder2": {"sliding_window": WINDOW, "use_bias": True},
    "starcoder2:whole": {"sliding_window": None, "use_bias": False},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True},
    "stablelm:serial": {"qk_layernorm": False, "use_parallel_residual": False},
    "arcee": {"mlp_bias": True},
    "nemotron": {"head_dim": 8},
    "jais2": {},
    "apertus": {},
    "phi": {"qk_layernorm": True},
    "phi:no norms": {"qk_layernorm": False},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, **_WINDOWS},
    "smollm3:whole": {"no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False},
    "granite": {**_MULTIPLIERS, "attention_bias": True},
    "granitemoehybrid:dense": {**_GRANITE_4, "num_local_experts": 0, "position_embedding_type": "rope"},
    "granitemoehybrid:attention": {**_STATELESS, "position_embedding_type": "rope"},
    "granitemoehybrid:nope": {**_STATELESS, "position_embedding_type": "nope"},
    "bamba": {**_SPACE, "attn_layer_indices": [1]},
    "falcon_h1": {**_FALCON_H1, "mamba_rms_norm": False},
    "falcon_h1:norm": {**_FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
    "falcon_h1:gate": {**_FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "nemotron_h:dense": {
        **_NEMOTRON_H,
        "layers_block_type": ["full_attention", "linear_attention", "mlp", "linear_attention"],
    },
    "mamba2": {
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "max_position_embeddings")),
        **{"num_heads": 4, "head_dim": 24, "n_groups": 2, "state_size": 12, "expand": 3, "chunk_size": 8},
    },
    "mamba": {
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "max_position_embeddings")),
        **{"expand": 5, "intermediate_size": 160, "state_size": 12, "time_step_rank": 5, "initializer_range": 0.02},
    },
    "hyperclovax": {**_MULTIPLIERS, "use_post_norm": True},
    "hyperclovax:plain": {"use_post_norm": False},
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "glm": {"head_dim": 16, "attention_bias": True},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "helium": {"head_dim": 8},
    "olmo": {"clip_qkv": 1.5},
    "olmo:unbounded": {"clip_qkv": None},
    "olmo2": {},
    "olmo3": {**_WINDOWS, "rope_parameters": _OLMO3_ROPE},
    "exaone4": {**_WINDOWS, "head_dim": 16},
    "exaone4:whole": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.3},
    "cohere:no norms": {"use_qk_norm": False},
    "cohere2": {**_WINDOWS, "logit_scale": 0.3, "head_dim": 16},
    "hunyuan_v1_dense": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
    },
    "bitnet": {"hidden_act": "relu2"},
    "nanochat": {"final_logit_softcapping": 3.0},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48, "bias": True},
    "falcon:7b": {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True},
    "falcon:serial": {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "bias": True},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": None},
    "gpt_bigcode": {"multi_query": True, "n_inner": 48},
    "gpt_bigcode:heads": {"multi_query": False, "n_inner": 48},
    "qwen3_5_text": {**DELTA, "rope_parameters": {**_AXES, "partial_rotary_factor": 0.5}},
    "lfm2": {**_CONVOLUTIONS, "conv_bias": True, "block_auto_adjust_ff_dim": False},
    # Transformers clears the embedding of a padding token when it reads a model whose head is tied.
    "youtu": {**LATENT, "q_lora_rank": 20, "pad_token_id": None},
    "youtu:queries": {**LATENT, "q_lora_rank": None, "attention_bias": True, "pad_token_id": None},
    "minicpm3": {**LATENT, "q_lora_rank": 20, "scale_emb": 3, "scale_depth": 1.2, "dim_model_base": 20},
    "lfm2:longer": {"layer_types": ["full_attention", "conv", "conv", "conv"], "conv_L_cache": 5},
}


_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_GROUPS: dict[str, Any] = {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5, "n_shared_experts": 1}
_SPARSE = ["dense", "sparse", "sparse", "sparse"]

# Types with mixtures of experts, in the same way; each of four experts or more, some with a first layer without.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 16, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    "qwen3_moe:unnormalised": {
        "head_dim": 16,
        "norm_topk_prob": False,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
    },
    "qwen2_moe": {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "mixtral": {"sliding_window": WINDOW},
    "olmoe": {"clip_qkv": 1.5},
    "flex_olmo": {},
    "glm4_moe": {**_GROUPS, "use_qk_norm": True, "first_k_dense_replace": 1, "head_dim": 16},
    "glm4_moe:ungrouped": {**_GROUPS, "n_group": 1, "topk_group": 1, "use_qk_norm": False, "first_k_dense_replace": 0},
    "dots1": {**_GROUPS, **_WINDOWS, "first_k_dense_replace": 1, "head_dim": 16},
    "solar_open": {**_GROUPS, "head_dim": 16},
    "exaone_moe": {**_GROUPS, **_WINDOWS, "num_shared_experts": 1, "mlp_layer_types": _SPARSE, "head_dim": 16},
    "hy_v3": {"num_shared_experts": 1, "router_scaling_factor": 1.3, "mlp_layer_types": _SPARSE, "head_dim": 16},
    "minimax_m2": {"head_dim": 16},
    "mellum": {**_WINDOWS, "rope_parameters": _OLMO3_ROPE, "mlp_layer_types": _SPARSE, "head_dim": 16},
    "gemma4_text:26b": {
        **GEMMA4_KEYS,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
    "granitemoe": _MULTIPLIERS,
    "granitemoehybrid": _GRANITE_4,
    "nemotron_h": {
        **{**_GROUPS, **_NEMOTRON_H},
        "layers_block_type": ["full_attention", "linear_attention", "mlp", "moe"],
        "moe_shared_expert_intermediate_size": 40,
    },
    "jamba": {
        **{"mamba_expand": 5, "mamba_d_state": 12, "mamba_dt_rank": 5, "norm_topk_prob": False},
        **{"attn_layer_period": 4, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    },
    "qwen3_next": {**DELTA, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "qwen3_5_moe_text": {**DELTA, "shared_expert_intermediate_size": 40},
    "lfm2_moe": {**_CONVOLUTIONS, "num_dense_layers": 1, "routed_scaling_factor": 1.5, "use_expert_bias": True},
    "deepseek_v2": {
        **{**_GROUPS, **LATENT, "q_lora_rank": None, "first_k_dense_replace": 1},
        "topk_method": "group_limited_greedy",
        "rope_parameters": {**_YARN, "mscale_all_dim": 0.7, "mscale": 0.7},
    },
    "deepseek_v2:greedy": {**LATENT, "n_group": 3, "topk_group": 2, "topk_method": "greedy", "q_lora_rank": 20},
    "deepseek_v3": {**_GROUPS, **LATENT, "q_lora_rank": 20, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**_GROUPS, **LATENT, "q_lora_rank": 20, "v_head_dim": 20, "attention_bias": True},
    "mistral4": {
        **{**_GROUPS, **LATENT, "q_lora_rank": 20},
        "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3, "mscale_all_dim": 0.7, "mscale": 0.7},
    },
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "hunyuan_v1_moe": {"moe_topk": 2, "head_dim": 16},
    "phimoe": {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2},
    "phimoe:window": {"sliding_window": WINDOW, "attention_bias": False},
    "gpt_oss": {**_WINDOWS, "head_dim": 16, "rope_parameters": {**_YARN, "truncate": False}},
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 40,
        "attention_chunk_size": WINDOW,
        "moe_layers": [1, 2, 3],
        "no_rope_layers": [1, 0, 1, 1],
        "floor_scale": 4,
        "attn_scale": 0.3,
        "norm_topk_prob": False,
    },
    "llama4_text:maverick": {
        "head_dim": 16,
        "norm_topk_prob": False,
        "intermediate_size_mlp": 40,
        "attention_chunk_size": 2 * WINDOW,
        "moe_layers": [1, 3],
        "no_rope_layers": [1, 1, 1, 0],
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
    },
    "cohere2_moe": {
        **_WINDOWS,
        "logit_scale": 0.3,
        "head_dim": 16,
        "num_shared_experts": 1,
        "mlp_layer_types": _SPARSE,
    },
}
DENSE |= {variant: {**_EXPERTS, **settings} for variant, settings in MIXTURES.items()}
# Of each type: a head apart from the embedding where its configs tie both, and a tied one where they do not.
HEADS = {f"{variant}:head": variant for variant in DENSE if ":" not in variant}
DENSE |= {of_head: DENSE[variant] for of_head, variant in HEADS.items()}


def is_mixture(family: str) -> bool:
    return HEADS.get(family, family) in MIXTURES


def dense_config(variant: str) -> PreTrainedConfig:
    """The config of a variant of `DENSE`. The test is skipped where this transformers has no such type."""
    model_type = variant.partition(":")[0]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no type {model_type}")
    settings = {**GROUPED, **DENSE[variant]}
    if variant in HEADS:
        usual = AutoConfig.for_model(model_type, **settings)
        settings["tie_word_embeddings"] = not usual.tie_word_embeddings
    return AutoConfig.for_model(model_type, **settings)


# Types whose mechanisms others have in the default suite.
ALIKE = ("deepseek_v2", "glm4_moe_lite", "mistral4", "minicpm3", "youtu")


def dense_variants() -> list[Any]:
    """Parameters: the variants of `DENSE`; those beyond the first of a type, and of types `ALIKE`, are marked."""
    return [pytest.param(name, marks=pytest.mark.families if ":" in name or name in ALIKE else ()) for name in DENSE]


# One variant of each family, with the mechanisms of its others, for the default suite; `make families` runs the rest.
ONE_EACH = ("llama", "mistral-window", "qwen2", "qwen3", "gemma3-softcap", "phi3", "gpt2", "gpt_neox")


def variants(rows: Iterable[Any] = CONFIGS) -> list[Any]:
    """Parameters that are a family, or rows that begin with one; those beyond `ONE_EACH` are marked `families`."""
    marked = []
    for row in rows:
        family, *others = (row,) if isinstance(row, str) else row
        marked.append(pytest.param(family, *others, marks=() if family in ONE_EACH else pytest.mark.families))
    return marked


def taken_in_turns(rows: Iterable[str], columns: Iterable[str], n: int) -> list[tuple[str, tuple[str, ...]]]:
    """Each row with `n` columns, and each column with about as many rows as every other.

    For laws that hold of rows and of columns, and need not be tested with every pair. Row i has the columns i, i + 1,
    i + 3, i + 6, …, round and round.
    """
    names = list(columns)
    places = list(accumulate(range(n)))
    return [(row, tuple(names[(i + place) % len(names)] for place in places)) for i, row in enumerate(rows)]


def tiny_model(
    family: str, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 4.0, **changed: Any
) -> Any:
    """A random model whose residual stream is large enough that skipping a sub-layer changes few argmaxes.

    Args: scale: of its weights; the larger, the more do texts differ. changed: settings of its configuration that are
          not as in `CONFIGS`; fewer layers are the first of those there.
    """
    torch.manual_seed(seed)
    usual = dense_config(family) if family in DENSE else CONFIGS[family]
    settings = {**usual.to_dict(), **changed}
    if settings.get("layer_types") is not None:
        settings["layer_types"] = settings["layer_types"][: settings["num_hidden_layers"]]
    if "per_layer_config" in settings:
        by_layer = settings["per_layer_config"].items()
        settings["per_layer_config"] = {i: own for i, own in by_layer if int(i) < settings["num_hidden_layers"]}
    config = type(usual)(**settings)
    list_language_model(config.model_type)
    # Torch's own attention, transformers' default, leaves caps of scores out.
    how: dict[str, Any] = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    how |= {"experts_implementation": "eager"} if is_mixture(family) else {}  # The default knows no float64.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                is_mixture(family) and parameter.dim() > 1 and not parameter.any()
            ):  # A router that would tell none apart.
                parameter.normal_()
            if parameter.dim() > 1 and not any(part in name for part in ("embed", "wte", "A_log")):
                parameter.mul_(scale)
            elif family in DENSE and "alpha" not in name:  # Norms and biases that nothing else would tell from ones.
                parameter.add_(torch.randn(parameter.shape) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
        for module in model.modules():  # Else a state would be small beside what a state space reads past it.
            if hasattr(module, "ssm_state_size"):
                module.conv1d.weight.mul_(0.6 / module.conv1d.weight.std())
    return model.to(dtype).eval().requires_grad_(False)


def tiny_runtime(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changed: Any) -> Runtime:
    """The runtime of a random tiny model, without a tokenizer."""
    model = tiny_model(family, dtype, seed, **changed)
    n_layers, n_parameters = model.config.num_hidden_layers, sum(p.numel() for p in model.parameters())
    return Runtime(model, None, ModelInfo(f"tiny-{family}", family, n_layers, n_parameters))
