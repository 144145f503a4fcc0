"""Rows of families whose layers have attention or another mixer of tokens; part of `families.FAMILIES`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .family import GATED_SHARED, Experts, Family, GatedDelta, ShortConv
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

HYBRIDS: dict[str, Family] = {
    "granitemoehybrid": Family(
        models="Granite 4 without experts and states",
        embed_scale="embedding_multiplier",
        residual_scale="residual_multiplier",
        logit_divisor="logits_scaling",
        rotary="model.rotary_emb?",
        mlp="shared_mlp",
        mlp_in=("input_linear",),
        mlp_out="output_linear",
        fields={"intermediate_size": "shared_intermediate_size"},
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
