"""Describes the supported architectures of transformers: one row per family, used by everything that reads models.

A skipped sub-layer contributes zero to the residual stream. So a row has the names of modules, the shape of the
query/key/value projection, and whether attention and MLP read the same residual; then what an MLP computes, for our
kernels; and what other formats of a model call it, for files and exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..core.errors import UnsupportedModel

_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How llama.cpp keeps a family: its architecture, and how its tensors differ from transformers'.

    `pairs_halves`: the two halves of a rotary pair lie side by side. `adds_to_norms`: so much was added to the weights
    of norms. `pre_tokenizer`: its words for how texts become words, for files that are written; None: none are.

    `fields`: config fields by the names of settings, beside those of all architectures. `has_head_dim`: the config has
    a field for the size of a head. `rotates_in_part`: it has one for how much of a head is rotated. `scalings` of
    rotary positions that it takes.
    """

    architecture: str
    pre_tokenizer: str | None = None
    pairs_halves: bool = False
    adds_to_norms: float = 0.0
    fields: Mapping[str, str] = field(default_factory=lambda: dict(_RMS))
    has_head_dim: bool = False
    rotates_in_part: bool = False
    scalings: tuple[str, ...] = ("linear", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Family:
    """Module names, dotted from the causal-LM model (`layers` … `head`) or from one decoder layer (the rest).

    `projection`: "split" has q_proj, k_proj, v_proj; "fused" one projection, queries then keys then values; "heads" one
    projection that interleaves query, key and value per head (GPT-NeoX). The names of `mlp_in` and `mlp_out` are of
    linear maps in the MLP: with `gated`, its input is the product of two halves, one of them behind the activation.

    A learned embedding of `positions` is added to the token's. With `rotary_by_type` the rotary module takes the
    layer's type (Gemma 3). `head_norms` are of queries and of keys, by head. `sliding` tells for which layers a
    configured window holds; `parallel_flag` is the config's flag for attention and MLP that both read the layer's
    input. Linear maps that are `transposed` are stored as (inputs, outputs). `fields` has the config's own names of
    usual fields.

    GGUF files are read where there is a `gguf` form. vLLM's DeciLM computes the family where there is a
    `decilm_bias`: the biases of attention are as the config says, or there are none, or those of q, k and v.
    """

    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    positions: str | None = None
    norm: str = "model.norm"
    rotary: str | None = "model.rotary_emb"
    rotary_by_type: bool = False
    head: str = "lm_head"
    attn: str = "self_attn"
    attn_norm: str = "input_layernorm"
    attn_post_norm: str | None = None
    mlp: str = "mlp"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    projection: Literal["split", "fused", "heads"] = "split"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    head_norms: tuple[str, str] | None = None
    out: str = "o_proj"
    mlp_in: tuple[str, ...] = ("gate_proj", "up_proj")
    mlp_out: str = "down_proj"
    gated: bool = True
    transposed: bool = False
    sliding: Literal["none", "all", "by_layer"] = "none"
    parallel_flag: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    gguf: GgufForm | None = None
    decilm_bias: Literal["configured", "none", "qkv"] | None = None

    def setting(self, config: Any, name: str) -> Any:
        """Return a field of a config by its usual name; None: the config has none."""
        return getattr(config, self.fields.get(name, name), None)


_HEAD_NORMS = ("q_norm", "k_norm")
_LLAMA_FORM = GgufForm("llama", "smollm", pairs_halves=True, has_head_dim=True)

FAMILIES: dict[str, Family] = {
    "llama": Family(gguf=_LLAMA_FORM, decilm_bias="configured"),
    "mistral": Family(sliding="all", gguf=_LLAMA_FORM, decilm_bias="none"),
    "qwen2": Family(sliding="by_layer", gguf=GgufForm("qwen2", "qwen2"), decilm_bias="qkv"),
    "qwen3": Family(sliding="by_layer", head_norms=_HEAD_NORMS, gguf=GgufForm("qwen3", "qwen2", has_head_dim=True)),
    "gemma3_text": Family(
        rotary_by_type=True,
        head_norms=_HEAD_NORMS,
        fields={"hidden_act": "hidden_activation"},
        attn_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
        sliding="by_layer",
        gguf=GgufForm(
            "gemma3",
            adds_to_norms=1.0,
            fields=_RMS | dict(zip(_SOFT_CAPS, _SOFT_CAPS, strict=True)),
            has_head_dim=True,
            scalings=("linear", "yarn"),
        ),
    ),
    "phi3": Family(
        projection="fused",
        qkv=("qkv_proj",),
        mlp_in=("gate_up_proj",),
        sliding="all",
        gguf=GgufForm("phi3", rotates_in_part=True, scalings=("longrope",)),
    ),
    "gpt2": Family(
        layers="transformer.h",
        embed="transformer.wte",
        positions="transformer.wpe",
        norm="transformer.ln_f",
        rotary=None,
        attn="attn",
        attn_norm="ln_1",
        mlp_norm="ln_2",
        projection="fused",
        qkv=("c_attn",),
        out="c_proj",
        mlp_in=("c_fc",),
        mlp_out="c_proj",
        gated=False,
        transposed=True,
        fields={"hidden_act": "activation_function", "intermediate_size": "n_inner"},
        gguf=GgufForm("gpt2", fields={"attention.layer_norm_epsilon": "layer_norm_epsilon"}),
    ),
    "gpt_neox": Family(
        layers="gpt_neox.layers",
        embed="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        rotary="gpt_neox.rotary_emb",
        attn="attention",
        projection="heads",
        qkv=("query_key_value",),
        out="dense",
        mlp_in=("dense_h_to_4h",),
        mlp_out="dense_4h_to_h",
        gated=False,
        parallel_flag="use_parallel_residual",
    ),
}


def family_of(config: Any) -> Family:
    """Return the row for a transformers config.

    Raises: UnsupportedModel: the model type has no row, or the config asks for what no test proves.
    """
    model_type = str(getattr(config, "model_type", "unknown"))
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model type {model_type!r} is not supported: swiftopt can skip sub-layers in {', '.join(sorted(FAMILIES))}"
        )
    refused = {
        "attn_logit_softcapping": "attention soft-capping",
        "use_bidirectional_attention": "bidirectional attention",
        "add_cross_attention": "cross-attention",
        "attention_chunk_size": "chunked attention",
    }
    for flag, words in refused.items():
        if getattr(config, flag, None):
            raise UnsupportedModel(f"this {model_type} model sets {flag}, and {words} is not supported")
    return FAMILIES[model_type]


def is_parallel(config: Any) -> bool:
    """Tell whether attention and MLP of a layer read the same residual."""
    flag = FAMILIES[config.model_type].parallel_flag
    return bool(getattr(config, flag, False)) if flag else False


def windows_of(config: Any, family: Family, n_layers: int) -> tuple[int | None, ...]:
    """Return per layer the sliding window in tokens, None where a layer sees everything before it."""
    window = getattr(config, "sliding_window", None)
    if family.sliding == "none" or window is None:
        return (None,) * n_layers
    if family.sliding == "all":
        return (int(window),) * n_layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in config.layer_types)


def context_limit(config: Any) -> int:
    """Return the most positions (prompt and completion) that the runtime lays out for this model.

    Rotary schemes that change their frequencies beyond the trained length ("dynamic", "longrope") are used up to that
    length only: a position must have one rotation, whenever it is reached. "yarn" reaches its factor times the trained
    length: it is switched on by adding it to a config, whose own number stays.

    Raises: UnsupportedModel: there are none.
    """
    limit = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    per_type = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    for parameters in per_type:
        if parameters.get("rope_type") == "longrope":
            limit = min(limit, int(parameters.get("original_max_position_embeddings", limit)))
        if parameters.get("rope_type") == "yarn":
            trained = parameters.get("original_max_position_embeddings") or limit
            limit = max(limit, int(trained * (parameters.get("factor") or 1.0)))
    if limit < 1:
        raise UnsupportedModel(f"this model's config says max_position_embeddings {limit}: copy or download it again")
    return limit
