"""Tiny models of all architectures of GGUF files, for tests that write such files."""

from __future__ import annotations

from typing import Any

IDS = [3 + (7 * i) % 90 for i in range(40)]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BY_LAYER = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
FOURTH = ["sliding_attention"] * 3 + ["full_attention"]
THIRDS = ["linear_attention"] * 3 + ["full_attention"]
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2], "partial_rotary_factor": 1.0}
NO_STATES = {"num_experts_per_tok": 0, "mamba_d_head": "auto"}
# Heads of layers without a window, whose rows are whole blocks of codes.
WHOLE_HEADS: dict[int, dict[str, int]] = {layer: {"head_dim": 128} for layer in (1, 3)}
ONE_KEY = {layer: {**own, "num_key_value_heads": 1} for layer, own in WHOLE_HEADS.items()}
# What a file is made of: a model of `families`, and how it differs. Names with a comma are variants of an architecture.
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "internlm3": ("internlm3", {}),
    "iquestcoder": ("iquestcoder", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma4": ("gemma4_text", {"per_layer_config": WHOLE_HEADS}),
    "gemma4, 31b": ("gemma4_text:31b", {"per_layer_config": ONE_KEY}),
    "gemma4, 26b": ("gemma4_text:26b", {"per_layer_config": ONE_KEY}),
    "starcoder": ("gpt_bigcode", {}),
    "starcoder2": ("starcoder2:whole", {"use_bias": True}),
    "stablelm": ("stablelm", {}),
    "stablelm, serial": ("stablelm:serial", {}),
    "phi2": ("phi:no norms", {}),
    "nemotron": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3:whole", {}),
    "granite": ("granite", {"mlp_bias": True}),
    "granitehybrid": ("granitemoehybrid:dense", {"num_experts_per_tok": 0}),
    "granitehybrid, with experts": ("granitemoehybrid", {}),
    "granitehybrid, of attention": ("granitemoehybrid:attention", NO_STATES),
    "granitehybrid, without positions": ("granitemoehybrid:nope", NO_STATES),
    "ernie4_5": ("ernie4_5", {}),
    "chatglm": ("glm", {"head_dim": 8}),
    "glm4": ("glm4", {}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"layer_types": BY_LAYER}),
    "exaone4": ("exaone4", {}),
    "exaone4, without windows": ("exaone4:whole", {"rope_parameters": LLAMA3}),
    "command-r": ("cohere", {}),
    "command-r, without norms": ("cohere:no norms", {"attention_bias": True}),
    "cohere2": ("cohere2", {"head_dim": 8, "layer_types": FOURTH}),
    "hunyuan-dense": ("hunyuan_v1_dense", {}),
    "seed_oss": ("seed_oss", {}),
    "arcee": ("arcee", {"mlp_bias": False}),
    "apertus": ("apertus", {"rope_parameters": LLAMA3}),
    "bitnet": ("bitnet", {"tie_word_embeddings": True}),
    "falcon": ("falcon", {"bias": False}),
    "falcon, 7b": ("falcon:7b", {}),
    "falcon, 2": ("falcon", {"num_ln_in_parallel_attn": 1}),
    "gptneox": ("gpt_neox", {}),
    "gptneox, serial": ("gpt_neox-serial", {}),
    "mistral3": ("ministral3", {}),
    "mistral3, damped": (
        "ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "jais2": ("jais2", {}),
    "qwen3moe": ("qwen3_moe", {"mlp_only_layers": []}),
    "qwen2moe": ("qwen2_moe", {"mlp_only_layers": [], "norm_topk_prob": False}),
    "olmoe": ("olmoe", {"clip_qkv": None, "norm_topk_prob": False}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "granitemoe": ("granitemoe", {}),
    "glm4moe": ("glm4_moe", {}),
    "glm4moe, ungrouped": ("glm4_moe:ungrouped", {"norm_topk_prob": False}),
    "dots1": ("dots1", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone-moe": ("exaone_moe", {"layer_types": FOURTH}),
    "minimax-m2": ("minimax_m2", {}),
    "ernie4_5-moe": ("ernie4_5_moe", {}),
    "hunyuan-moe": (
        "hunyuan_v1_moe",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    ),
    "phimoe": ("phimoe", {"router_jitter_noise": 0.01}),
    "gpt-oss": ("gpt_oss", {}),
    "llama4": (
        "llama4_text",
        {
            **{"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "moe_layers": [0, 1, 2, 3]},
            **{"no_rope_layers": [1, 1, 1, 0], "layer_types": ["chunked_attention"] * 3 + ["full_attention"]},
            "rope_parameters": LLAMA3,
        },
    ),
    "qwen35": ("qwen3_5_text", {"layer_types": THIRDS}),
    "qwen35moe": ("qwen3_5_moe_text", {"rope_parameters": AXES}),
    "qwen3next": ("qwen3_next", {"mlp_only_layers": [], "layer_types": THIRDS}),
    "lfm2": ("lfm2", {"conv_bias": False}),
    "lfm2moe": ("lfm2_moe", {"routed_scaling_factor": 1.0}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["full_attention", "linear_attention", "moe", "moe"]}),
    "nemotron_h, with an MLP": ("nemotron_h:dense", {}),
    "jamba": ("jamba", {}),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-h1, with a norm": ("falcon_h1:gate", {}),
    "mamba": ("mamba", {"expand": 2, "intermediate_size": 64}),
    "mamba2": ("mamba2", {}),
    "deepseek2": ("deepseek_v3", {}),
    "deepseek2, of GLM": ("glm4_moe_lite", {"attention_bias": False}),
    "deepseek2, softmax": ("deepseek_v2", {"norm_topk_prob": False}),
}
