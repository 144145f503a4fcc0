"""How llama.cpp stores each family in a GGUF file: one row per model type, for reading and for writing files.

The gguf package maps names of tensors; a row says what the converter changes in them, and what the settings mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .gguf_form import RMS_EPSILON, GgufForm


def _flag(tensor: str) -> tuple[str, bool, bool]:
    return tensor, True, False


def _epsilon(name: str) -> dict[str, str]:
    return {"attention.layer_norm_epsilon": name}


_SOFT_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_ATTENTION_BIAS = {"attention_bias": _flag("attn_output.bias")}
_QKV_BIAS = {"attention_bias": _flag("attn_q.bias")}
_BIASES = {**_ATTENTION_BIAS, "mlp_bias": _flag("ffn_up.bias")}
_LLAMA: dict[str, Any] = dict(architecture="llama", pairs_halves=True, has_head_dim=True)
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_SHARED = {"expert_shared_feed_forward_length": "shared_intermediate_size"}
_GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
_SIGMOIDS = {"expert_gating_func": (2,)}  # Scores of experts are sigmoids, in all files of an architecture.
# Routers like DeepSeek's: sigmoids, possibly divided by their sum, times a factor.
_ROUTED: dict[str, Any] = dict(
    choices={"expert_weights_norm": ("norm_topk_prob", {True: True, False: False, None: False})},
    ignored=_SIGMOIDS,
)
_DEEPSEEK_EXPERTS = _GROUPS | {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_MLA_USUAL = {"q_lora_rank": None, "n_group": 1, "topk_group": 1}
_MLA: dict[str, Any] = dict(
    architecture="deepseek2",
    fields=RMS_EPSILON
    | _DEEPSEEK_EXPERTS
    | {"attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank"},
    choices=_ROUTED["choices"],
    ignored={"expert_gating_func": (1, 2), "expert_shared_feed_forward_length": None},
)
_LOGIT_SCALE = {"logit_scale": "logit_scale"}
_GRANITE: dict[str, Any] = dict(
    pairs_halves=True,
    score_scale="attention_multiplier",
    fields=RMS_EPSILON
    | {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
)
# Settings of state spaces, which llama.cpp's converter also writes for models without them.
_SPACE: dict[str, Any] = dict(
    sizes={
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.group_count": "mamba_n_groups",
        "ssm.time_step_rank": "mamba_n_heads",
    },
    quotients={
        "mamba_d_head": ("ssm.inner_size", "ssm.time_step_rank"),
        "mamba_expand": ("ssm.inner_size", "embedding_length"),
    },
)
_STATES_ALONE: dict[str, Any] = dict(
    fields={"attention.layer_norm_rms_epsilon": "layer_norm_epsilon"},
    sizes={"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size"},
    constants={"use_bias": False, "use_conv_bias": True},
    ignored={"attention.head_count": (0,), "feed_forward_length": (0,)},
)
_WINDOW = "attention.sliding_window"
# Settings for images: three positions of a token, which are equal for text, and layers that read an image's features.
_IMAGES: dict[str, None] = {"rope.dimension_sections": None, "n_deepstack_layers": None}
_DELTA: dict[str, Any] = dict(
    adds_to_norms=1.0,
    has_head_dim=True,
    rotates_in_part=True,
    mixed_by="interval",
    sizes={
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    quotients={"linear_value_head_dim": ("ssm.inner_size", "ssm.time_step_rank")},
    ignored=_IMAGES,
)
_GATED_SHARED: dict[str, Any] = dict(
    fields=RMS_EPSILON | _EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
)
_LFM2: dict[str, Any] = dict(
    mixed_by="kv_heads",
    fields={"attention.layer_norm_rms_epsilon": "norm_eps"},
    sizes={"shortconv.l_cache": "conv_L_cache"},
)

FORMS: dict[str, GgufForm] = {
    "llama": GgufForm(**_LLAMA, pre_tokenizer="smollm", flags=_BIASES),
    "mistral": GgufForm(**_LLAMA, pre_tokenizer="smollm", when=(_WINDOW,)),
    "ministral": GgufForm(**_LLAMA, when=(_WINDOW, f"{_WINDOW}_pattern")),
    "internlm3": GgufForm(**_LLAMA),
    "iquestcoder": GgufForm(**_LLAMA),
    "qwen2": GgufForm("qwen2", ("qwen2vl",), pre_tokenizer="qwen2", window_flag="use_sliding_window", ignored=_IMAGES),
    "qwen3": GgufForm(
        "qwen3",
        ("qwen3vl",),
        pre_tokenizer="qwen2",
        has_head_dim=True,
        window_flag="use_sliding_window",
        flags=_ATTENTION_BIAS,
        ignored=_IMAGES,
    ),
    "gemma": GgufForm("gemma", adds_to_norms=1.0, has_head_dim=True),
    "gemma2": GgufForm(
        "gemma2",
        adds_to_norms=1.0,
        fields=RMS_EPSILON | _SOFT_CAPS,
        has_head_dim=True,
        window=4096,
        window_period=2,
        wide_scores=46,
    ),
    "gemma3_text": GgufForm(
        "gemma3",
        adds_to_norms=1.0,
        fields=RMS_EPSILON | _SOFT_CAPS,
        has_head_dim=True,
        scalings=("linear", "yarn"),
        window_period=6,
        window_base=10_000.0,
        wide_scores=62,
    ),
    "gemma4_text": GgufForm(
        "gemma4",
        fields=RMS_EPSILON
        | _EXPERTS
        | {
            "expert_used_count": "top_k_experts",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        parameters={"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"},
        constants={"hidden_size_per_layer_input": 0},
        has_head_dim=True,
        scalings=("proportional",),
        by_type=True,
    ),
    "phi3": GgufForm("phi3", rotates_in_part=True, scalings=("longrope",)),
    "gpt2": GgufForm("gpt2", fields=_epsilon("layer_norm_epsilon")),
    "gpt_neox": GgufForm(
        "gptneox",
        fields=_epsilon("layer_norm_eps"),
        rotates_in_part=True,
        choices={"use_parallel_residual": ("use_parallel_residual", {True: True, False: False, None: True})},
        flags={"attention_bias": _flag("attn_qkv.bias")},
    ),
    "gpt_bigcode": GgufForm(
        "starcoder",
        fields=_epsilon("layer_norm_epsilon"),
        choices={"attention.head_count_kv": ("multi_query", {1: True})},
    ),
    "starcoder2": GgufForm(
        "starcoder2", fields=_epsilon("norm_epsilon"), flags={"use_bias": _flag("attn_output.bias")}
    ),
    "stablelm": GgufForm(
        "stablelm",
        fields=_epsilon("layer_norm_eps"),
        rotates_in_part=True,
        stacked={"self_attn.q_layernorm.norms": "attn_q_norm", "self_attn.k_layernorm.norms": "attn_k_norm"},
        flags={
            "use_qkv_bias": _flag("attn_q.bias"),
            "qk_layernorm": _flag("attn_q_norm.weight"),
            "use_parallel_residual": ("ffn_norm.weight", False, True),
        },
        ignored={"use_parallel_residual": None},  # Also true in files of serial models; llama.cpp looks at the norms.
    ),
    "phi": GgufForm("phi2", fields=_epsilon("layer_norm_eps"), rotates_in_part=True),
    "nemotron": GgufForm(
        "nemotron",
        adds_to_norms=1.0,
        # The converter writes the one number under both names.
        fields={"attention.layer_norm_rms_epsilon": "norm_eps", **_epsilon("norm_eps")},
        has_head_dim=True,
        rotates_in_part=True,
        flags=_BIASES,
    ),
    "smollm3": GgufForm("smollm3", pairs_halves=True, flags=_BIASES),
    "granite": GgufForm("granite", **_GRANITE, flags=_BIASES, ignored={"rope.scaling.finetuned": (True,)}),
    "granitemoehybrid": GgufForm(
        "granitehybrid",
        when=("embedding_scale",),
        **{**_GRANITE, "fields": _GRANITE["fields"] | _LOCAL_EXPERTS | _SHARED},
        joined={
            "shared_mlp.input_linear": ("ffn_gate", "ffn_up"),
            "shared_mlp.output_linear": ("ffn_down",),
            "block_sparse_moe.router": ("ffn_gate_inp",),
        },
        choices={"rope.scaling.finetuned": ("position_embedding_type", {True: "rope", False: "nope", None: "nope"})},
        flags=_ATTENTION_BIAS,
        constants={"num_local_experts": 0, "mamba_conv_bias": True, "mamba_proj_bias": False},
        **{**_SPACE, "sizes": _SPACE["sizes"] | {"feed_forward_length": "intermediate_size"}},
        mixed_by="kv_heads",
    ),
    "ernie4_5": GgufForm("ernie4_5", has_head_dim=True, flags={"use_bias": _flag("attn_output.bias")}),
    "glm": GgufForm("chatglm", has_head_dim=True, rotates_in_part=True, flags=_QKV_BIAS),
    "glm4": GgufForm("glm4", has_head_dim=True, rotates_in_part=True, flags=_QKV_BIAS),
    "olmo": GgufForm(
        "olmo",
        pairs_halves=True,
        fields={"attention.clamp_kqv": "clip_qkv"},
        ignored={"attention.layer_norm_epsilon": (float(np.float32(1e-5)),)},
    ),
    "olmo2": GgufForm("olmo2", flags=_ATTENTION_BIAS),
    "olmo3": GgufForm("olmo2", when=(_WINDOW,), flags=_ATTENTION_BIAS, window_period=4),
    "exaone4": GgufForm("exaone4", has_head_dim=True, window_period=4),
    "cohere": GgufForm(
        "command-r",
        fields=_epsilon("layer_norm_eps") | _LOGIT_SCALE,
        flags={**_ATTENTION_BIAS, "use_qk_norm": _flag("attn_q_norm.weight")},
    ),
    "cohere2": GgufForm("cohere2", fields=_epsilon("layer_norm_eps") | _LOGIT_SCALE, window_period=4),
    "hunyuan_v1_dense": GgufForm("hunyuan-dense", has_head_dim=True, flags=_ATTENTION_BIAS),
    "seed_oss": GgufForm(
        "seed_oss",
        has_head_dim=True,
        flags={**_BIASES, **_QKV_BIAS, "attention_out_bias": _flag("attn_output.bias")},
    ),
    "arcee": GgufForm("arcee", pairs_halves=True, has_head_dim=True, flags=_BIASES),
    "jais2": GgufForm("jais2", fields=_epsilon("layer_norm_eps"), has_head_dim=True, flags=_BIASES),
    "apertus": GgufForm(
        "apertus",
        by_layer={f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
        flags=_ATTENTION_BIAS,
    ),
    "bitnet": GgufForm(
        "bitnet",
        joined={"self_attn.attn_sub_norm": ("attn_sub_norm",), "mlp.ffn_sub_norm": ("ffn_sub_norm",)},
        # llama.cpp's default is silu.
        choices={"hidden_activation": ("hidden_act", {"relu2": "relu2", "silu": "silu", None: "silu"})},
        flags=_ATTENTION_BIAS,
    ),
    "falcon": GgufForm(
        "falcon",
        fields=_epsilon("layer_norm_epsilon"),
        # Attention and MLP are parallel in all models; one with a single key head is a new one with one group of heads.
        constants={"new_decoder_architecture": True, "parallel_attn": True, "alibi": False},
        flags={"bias": _flag("attn_qkv.bias"), "num_ln_in_parallel_attn": ("attn_norm_2.weight", 2, 1)},
    ),
    "ministral3": GgufForm("mistral3", pairs_halves=True, has_head_dim=True),
    "qwen3_moe": GgufForm(
        "qwen3moe",
        ("qwen3vlmoe",),
        has_head_dim=True,
        fields=RMS_EPSILON | _EXPERTS,
        constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        flags=_ATTENTION_BIAS,
        ignored=_IMAGES,
    ),
    "qwen2_moe": GgufForm(
        "qwen2moe",
        **_GATED_SHARED,
        constants={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "mixtral": GgufForm(**_LLAMA, when=tuple(_LOCAL_EXPERTS), fields=RMS_EPSILON | _LOCAL_EXPERTS),
    "granitemoe": GgufForm(
        "granitemoe",
        **{**_GRANITE, "fields": _GRANITE["fields"] | _LOCAL_EXPERTS},
        joined={"block_sparse_moe.router": ("ffn_gate_inp",)},
        flags=_ATTENTION_BIAS,
        ignored={"rope.scaling.finetuned": (True,)},
    ),
    "glm4_moe": GgufForm(
        "glm4moe",
        has_head_dim=True,
        rotates_in_part=True,
        fields=RMS_EPSILON | _DEEPSEEK_EXPERTS,
        flags={**_QKV_BIAS, "use_qk_norm": _flag("attn_q_norm.weight")},
        **_ROUTED,
    ),
    "dots1": GgufForm("dots1", has_head_dim=True, fields=RMS_EPSILON | _DEEPSEEK_EXPERTS, **_ROUTED),
    "deepseek_v2": GgufForm(**_MLA, constants={**_MLA_USUAL, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": GgufForm(**_MLA, constants=_MLA_USUAL, when=("expert_weights_norm",)),
    "exaone_moe": GgufForm(
        "exaone-moe",
        has_head_dim=True,
        fields=RMS_EPSILON
        | _EXPERTS
        | _GROUPS
        | {
            "expert_shared_count": "num_shared_experts",
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        window_period=4,
        choices=_ROUTED["choices"],
        ignored={**_SIGMOIDS, "expert_shared_feed_forward_length": None},
    ),
    "minimax_m2": GgufForm(
        "minimax-m2",
        has_head_dim=True,
        rotates_in_part=True,
        fields=RMS_EPSILON | _LOCAL_EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
        ignored=_SIGMOIDS,
    ),
    "ernie4_5_moe": GgufForm(
        "ernie4_5-moe",
        has_head_dim=True,
        fields=RMS_EPSILON
        | {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        flags={"use_bias": _flag("attn_output.bias")},
        ignored={"expert_shared_feed_forward_length": None},
    ),
    "hunyuan_v1_moe": GgufForm(
        "hunyuan-moe",
        has_head_dim=True,
        fields=RMS_EPSILON | {"expert_count": "num_experts", "expert_used_count": "moe_topk"},
        flags=_ATTENTION_BIAS,
        ignored=dict.fromkeys(
            ("expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count")
        ),
    ),
    "phimoe": GgufForm(
        "phimoe",
        fields=RMS_EPSILON | _LOCAL_EXPERTS,
        scalings=("longrope",),
        constants={"attention_bias": True, "lm_head_bias": True},
    ),
    "gpt_oss": GgufForm(
        "gpt-oss",
        has_head_dim=True,
        fields=RMS_EPSILON | _LOCAL_EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
        window_period=2,
        ignored={"expert_gating_func": None},
    ),
    # Files lack settings whose values are the same in Scout and Maverick.
    "llama4_text": GgufForm(
        "llama4",
        has_head_dim=True,
        fields=RMS_EPSILON
        | _LOCAL_EXPERTS
        | {
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        constants={"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1},
        window=8192,
        window_period=4,
        unnormed=128,
    ),
    # The converter multiplies all multipliers into the weights; gates come before the norm.
    "falcon_h1": GgufForm(
        "falcon-h1",
        has_head_dim=True,
        sizes=_SPACE["sizes"] | {"ssm.inner_size": "mamba_d_ssm"},
        quotients={"mamba_d_head": _SPACE["quotients"]["mamba_d_head"]},
        flags={"mamba_rms_norm": _flag("ssm_norm.weight")},
        constants={"mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_norm_before_gate": False},
    ),
    "mamba": GgufForm(
        "mamba",
        fields=_STATES_ALONE["fields"],
        sizes=_STATES_ALONE["sizes"] | {"ssm.time_step_rank": "time_step_rank"},
        quotients={"expand": ("ssm.inner_size", "embedding_length")},
        constants=_STATES_ALONE["constants"],
        ignored=_STATES_ALONE["ignored"] | {"ssm.dt_b_c_rms": (False,)},
    ),
    "mamba2": GgufForm(
        "mamba2",
        fields=_STATES_ALONE["fields"],
        sizes=_STATES_ALONE["sizes"] | {"ssm.time_step_rank": "num_heads", "ssm.group_count": "n_groups"},
        quotients={
            "head_dim": ("ssm.inner_size", "ssm.time_step_rank"),
            "expand": ("ssm.inner_size", "embedding_length"),
        },
        constants=_STATES_ALONE["constants"],
        ignored=_STATES_ALONE["ignored"],
    ),
    "jamba": GgufForm(
        "jamba",
        mixed_by="kv_heads",
        fields=RMS_EPSILON | {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        sizes={
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
        },
        quotients={"mamba_expand": ("ssm.inner_size", "embedding_length")},
        constants={"mamba_conv_bias": True, "mamba_proj_bias": False},
        periods={
            "attn_q.weight": ("attn_layer_period", "attn_layer_offset"),
            "ffn_gate_inp.weight": ("expert_layer_period", "expert_layer_offset"),
        },
    ),
    "nemotron_h": GgufForm(
        "nemotron_h_moe",
        ("nemotron_h",),
        root="backbone.",
        pairs_halves=True,
        has_head_dim=True,
        mixed_by="sub_layers",
        # The converter writes the one number under both names.
        fields=_epsilon("layer_norm_epsilon")
        | {"attention.layer_norm_rms_epsilon": "layer_norm_epsilon"}
        | _GROUPS
        | {
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_scale": "routed_scaling_factor",
        },
        choices=_ROUTED["choices"],
        sizes={
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "ssm_state_size",
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "mamba_num_heads",
        },
        quotients={"mamba_head_dim": ("ssm.inner_size", "ssm.time_step_rank")},
        flags={"mlp_bias": _flag("ffn_up.bias"), "use_conv_bias": _flag("ssm_conv1d.bias")},
        constants={"mlp_hidden_act": "relu2", "use_bias": False},
        # llama.cpp does not rotate in these models, whatever the file says.
        ignored={**_SIGMOIDS, "rope.dimension_count": None, "rope.freq_base": None},
    ),
    "qwen3_5_text": GgufForm("qwen35", **_DELTA, tiled_heads=True),
    "qwen3_5_moe_text": GgufForm("qwen35moe", **_DELTA, **_GATED_SHARED, tiled_heads=True),
    # It computes the same as Qwen3.5 MoE, whose modules have the form of newer files.
    "qwen3_next": GgufForm("qwen3next", model_type="qwen3_5_moe_text", **_DELTA, **_GATED_SHARED),
    "lfm2": GgufForm("lfm2", **_LFM2, constants={"block_auto_adjust_ff_dim": False, "conv_bias": False}),
    "lfm2_moe": GgufForm(
        "lfm2moe",
        **{**_LFM2, "fields": _LFM2["fields"] | _EXPERTS | {"leading_dense_block_count": "num_dense_layers"}},
        choices={"expert_weights_norm": ("norm_topk_prob", {True: True, None: True})},
        constants={"routed_scaling_factor": 1.0, "conv_bias": False},
        ignored=_SIGMOIDS,
    ),
    "olmoe": GgufForm("olmoe", pairs_halves=False, fields=RMS_EPSILON | _EXPERTS, constants={"norm_topk_prob": False}),
}
