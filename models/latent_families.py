"""Rows of families with multi-head latent attention; part of `families.FAMILIES`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .family import SIGMOID_EXPERTS, Experts, Family
from .mtp_names import NUMBERED

_LATENT: dict[str, Any] = dict(
    qkv=("q_a_proj|q_proj", "kv_a_proj_with_mqa"),
    head_norms=("q_a_layernorm?", "kv_a_layernorm"),
    head_norm="latent",
    latents=("q_b_proj?", "kv_b_proj"),
)
_PAIRS: dict[str, Any] = dict(_LATENT, rotation="pairs")

LATENT: dict[str, Family] = {
    "deepseek_v2": Family(
        models="DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-Coder-V2",
        **_PAIRS,
        rotates_wide=True,
        half_tables=True,
        experts=Experts(shared="shared_experts", normalised=False, n_best=1, rounds_logits=False),
    ),
    "deepseek_v3": Family(
        models="DeepSeek-V3, DeepSeek-R1, Moonlight", **_PAIRS, experts=SIGMOID_EXPERTS, mtp=NUMBERED
    ),
    "glm4_moe_lite": Family(models="GLM-4.7-Flash", **_PAIRS, experts=SIGMOID_EXPERTS, mtp=NUMBERED),
    "mistral4": Family(
        models="Mistral Small 4",
        **_PAIRS,
        scales_queries="rotated",
        experts=replace(SIGMOID_EXPERTS, scores="softmax", rounds_logits=True),
    ),
    "youtu": Family(models="Youtu-LLM 2B", **_PAIRS),
    "minicpm3": Family(
        models="MiniCPM3 4B", **_LATENT, residual_scale="residual_scale", logit_divisor="logits_scaling"
    ),
}
