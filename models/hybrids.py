"""Rows of families with other token mixers than attention in some layers; part of `families.FAMILIES`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .family import GATED_SHARED, SIGMOID_EXPERTS, Experts, Family, GatedDelta, Selective, SelectiveScan, ShortConv
from .mtp_names import NAMED

_LFM2: dict[str, Any] = dict(
    norm="model.embedding_norm",
    attn_norm="operator_norm",
    out="out_proj",
    head_norms=("q_layernorm", "k_layernorm"),
    mixer=ShortConv(),
    mlp="feed_forward",
    mlp_norm="ffn_norm",
    hidden_act="silu",
    mlp_in=("w1", "w3"),
    mlp_out="w2",
)
_QWEN_HYBRID: dict[str, Any] = dict(head_norms=("q_norm", "k_norm"), gated_heads=True, mtp=NAMED)
_NORM_BEFORE_MLP: dict[str, Any] = dict(norm="model.final_layernorm", mlp="feed_forward", mlp_norm="pre_ff_layernorm")
_BACKBONE: dict[str, Any] = dict(
    layers="backbone.layers",
    embed="backbone.embeddings",
    norm="backbone.norm_f",
    rotary=None,
    attn_norm="norm",
    alone={"linear_attention": "attn"},
)

HYBRIDS: dict[str, Family] = {
    "granitemoehybrid": Family(
        models="Granite 4",
        embed_scale="embedding_multiplier",
        residual_scale="residual_multiplier",
        logit_divisor="logits_scaling",
        rotary="model.rotary_emb?",
        mixer=Selective(),
        mlp="shared_mlp",
        mlp_in=("input_linear",),
        mlp_out="output_linear",
        experts=Experts(router="router", shared="shared_mlp", normalised=True, beside="block_sparse_moe"),
        fields={"intermediate_size": "shared_intermediate_size"},
    ),
    "bamba": Family(models="Bamba", **_NORM_BEFORE_MLP, mixer=Selective()),
    "falcon_h1": Family(
        models="Falcon-H1",
        **_NORM_BEFORE_MLP,
        embed_scale="embedding_multiplier",
        logit_scale="lm_head_multiplier",
        attn_scales=("attention_in_multiplier", "key_multiplier", "attention_out_multiplier"),
        mixer=Selective(layer_type="hybrid", beside=True, out_scale="ssm_out_multiplier"),
        mlp_scales=("gate_multiplier", "down_multiplier"),
    ),
    "nemotron_h": Family(
        models="Nemotron-H, Nemotron 3 Nano",
        embed="model.embeddings",
        norm="model.norm_f",
        rotary=None,
        attn="mixer",
        attn_norm="norm",
        mixer=Selective(module="mixer", sizes=("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")),
        mlp="mixer",
        mlp_norm="norm",
        mlp_in=("up_proj",),
        gated=False,
        experts=SIGMOID_EXPERTS,
        alone={"linear_attention": "attn", "full_attention": "attn", "mlp": "mlp", "moe": "mlp"},
        fields={"hidden_act": "mlp_hidden_act", "layer_types": "layers_block_type"},
    ),
    "mamba2": Family(
        models="Mamba-2, Codestral Mamba",
        **_BACKBONE,
        mixer=Selective(module="mixer", sizes=("num_heads", "head_dim", "n_groups", "state_size")),
    ),
    "jamba": Family(
        models="Jamba 1.5 to 1.7, Jamba Reasoning 3B",
        **_NORM_BEFORE_MLP,
        rotary=None,
        mixer=SelectiveScan(),
        experts=Experts(router="router"),
    ),
    "mamba": Family(
        models="Mamba 130M to 2.8B",
        **_BACKBONE,
        mixer=SelectiveScan(module="mixer", expand="expand"),
    ),
    "qwen3_5_text": Family(models="Qwen3.5, Qwen3.6, Qwen3.8 of text alone", **_QWEN_HYBRID, mixer=GatedDelta()),
    "qwen3_5_moe_text": Family(
        models="Qwen3.5 MoE of text alone",
        **_QWEN_HYBRID,
        mixer=GatedDelta(),
        experts=replace(GATED_SHARED, normalised=True),
    ),
    "qwen3_next": Family(
        models="Qwen3-Next, Qwen3-Coder-Next",
        **_QWEN_HYBRID,
        mixer=GatedDelta(into=("in_proj_qkvz", "in_proj_ba"), by_key_head=True),
        experts=GATED_SHARED,
    ),
    "lfm2": Family(models="LFM2, LFM2.5", **_LFM2),
    "lfm2_moe": Family(models="LFM2 8B-A1B", **_LFM2, rotary="model.pos_emb", experts=Experts(scores="sigmoid")),
}
