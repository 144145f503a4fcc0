"""Describes the supported architectures of transformers: one row per family, used by everything that reads models.

A skipped sub-layer adds nothing to the residual stream, so a row says where the sub-layers are: the names of modules,
the shape of the query/key/value projection, and whether attention and MLP read the same residual. It also says in what
the layers differ from Llama's, and how other file formats name the family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from ..core.errors import UnsupportedModel
from .family import GATED_SHARED, SIGMOID_EXPERTS, Experts, Family, LayerInputNames, MixtureNorms, differences
from .gguf_forms import FORMS
from .hybrids import HYBRIDS
from .latent_families import LATENT
from .mtp_names import NAMED, NUMBERED
from .text_parts import MULTIMODAL, NAMES

_HEAD_NORMS = ("q_norm", "k_norm")
_FOUR_NORMS: dict[str, Any] = dict(
    attn_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_NORMS_BEHIND: dict[str, Any] = dict(
    attn_norm=None,
    attn_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)
_UNGATED: dict[str, Any] = dict(mlp_in=("up_proj",), gated=False)
_JOINT_GATE: dict[str, Any] = dict(mlp_in=("gate_up_proj",))
_PAIRS: dict[str, Any] = dict(rotation="pairs")
_WIDE_PAIRS: dict[str, Any] = dict(rotation="pairs", rotates_wide=True)
_HIDDEN_ACTIVATION = {"hidden_act": "hidden_activation"}
_GEMMA4: dict[str, Any] = dict(
    _FOUR_NORMS,
    rotary_by_type=True,
    head_norms=_HEAD_NORMS,
    value_norm="v_norm",
    key_values="attention_k_eq_v",
    sharing="num_kv_shared_layers",
    layer_scale="layer_scalar",
    fields=_HIDDEN_ACTIVATION,
    sliding="by_layer",
)
_MULTIPLIERS: dict[str, Any] = dict(embed_scale="embedding_multiplier", residual_scale="residual_multiplier")
_GPT2: dict[str, Any] = dict(
    layers="transformer.h",
    embed="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    rotary=None,
    attn="attn",
    attn_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("c_attn",),
    out="c_proj",
    mlp_in=("c_fc",),
    mlp_out="c_proj",
    gated=False,
    fields={"hidden_act": "activation_function", "intermediate_size": "n_inner"},
)
_NEOX_MLP: dict[str, Any] = dict(
    qkv=("query_key_value",), out="dense", mlp_in=("dense_h_to_4h",), mlp_out="dense_4h_to_h", gated=False
)
_COHERE: dict[str, Any] = dict(
    _WIDE_PAIRS,
    parallel=True,
    mlp_norm="input_layernorm",
    head_norms=("q_norm?", "k_norm?"),
    logit_scale="logit_scale",
)

_MIXTRAL: dict[str, Any] = dict(stored=("w1", "w3", "w2"), renamed={".block_sparse_moe.": ".mlp."})

FAMILIES: dict[str, Family] = {
    "llama": Family(
        models="Llama 1 to 3.3, CodeLlama, SmolLM2, TinyLlama, Yi, DeepSeek-R1 distills",
        is_proven=True,
        decilm_bias="configured",
    ),
    "mistral": Family(models="Mistral 7B, Mistral Nemo, Codestral", sliding="all", decilm_bias="none"),
    "qwen2": Family(
        models="Qwen2, Qwen2.5, Qwen2.5-Coder, DeepSeek-R1 distills",
        is_proven=True,
        sliding="by_layer",
        decilm_bias="qkv",
    ),
    "qwen3": Family(models="Qwen3", sliding="by_layer", head_norms=_HEAD_NORMS),
    "gemma": Family(models="Gemma, CodeGemma"),
    "gemma2": Family(models="Gemma 2", **_FOUR_NORMS, sliding="by_layer", fields=_HIDDEN_ACTIVATION),
    "vaultgemma": Family(
        models="VaultGemma", mlp_norm="pre_feedforward_layernorm", sliding="by_layer", fields=_HIDDEN_ACTIVATION
    ),
    "gemma3_text": Family(
        models="Gemma 3 of text alone (270M, 1B)",
        is_proven=True,
        **_FOUR_NORMS,
        rotary_by_type=True,
        head_norms=_HEAD_NORMS,
        fields=_HIDDEN_ACTIVATION,
        sliding="by_layer",
    ),
    "gemma4_text": Family(
        models="Gemma 4 of text alone",
        **_GEMMA4,
        layer_inputs=LayerInputNames(),
        experts=Experts(router="router.whole.proj", shared="mlp", normalised=True, norms=MixtureNorms()),
    ),
    "gemma4_unified_text": Family(models="Gemma 4 12B of text alone", **_GEMMA4),
    "phi3": Family(
        models="Phi-3, Phi-3.5, Phi-4",
        **_JOINT_GATE,
        projection="fused",
        qkv=("qkv_proj",),
        sliding="all",
    ),
    "gpt2": Family(
        models="GPT-2",
        **_GPT2,
        projection="fused",
        transposed=True,
    ),
    "gpt_neox": Family(
        models="GPT-NeoX, Pythia",
        **_NEOX_MLP,
        layers="gpt_neox.layers",
        embed="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        rotary="gpt_neox.rotary_emb",
        attn="attention",
        projection="grouped",
        parallel=("use_parallel_residual",),
    ),
    "gpt_bigcode": Family(models="StarCoder, SantaCoder", **_GPT2, projection="multi_query"),
    "ministral": Family(models="Ministral 8B", sliding="by_layer"),
    "ministral3": Family(models="Ministral 3", sliding="all", scales_queries="rotated"),
    "seed_oss": Family(models="Seed-OSS"),
    "cwm": Family(models="Code World Model", sliding="by_layer"),
    "internlm3": Family(
        models="InternLM3",
        classes=("llama",),
    ),
    "iquestcoder": Family(
        models="IQuest-Coder",
        classes=("llama",),
    ),
    "starcoder2": Family(models="StarCoder2", sliding="all", mlp_in=("c_fc",), mlp_out="c_proj", gated=False),
    "stablelm": Family(
        models="StableLM 2, StableLM 3B",
        parallel=("use_parallel_residual",),
        mlp_norm="post_attention_layernorm|input_layernorm",
        head_norms=("q_layernorm?", "k_layernorm?"),
    ),
    "arcee": Family(models="Arcee AFM", **_UNGATED),
    "nemotron": Family(models="Nemotron 3 and 4, Minitron", **_UNGATED),
    "jais2": Family(models="Jais 2", **_UNGATED),
    "apertus": Family(
        models="Apertus",
        **_UNGATED,
        attn_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        head_norms=_HEAD_NORMS,
    ),
    "phi": Family(
        models="Phi-1, Phi-1.5, Phi-2",
        norm="model.final_layernorm",
        parallel=True,
        mlp_norm="input_layernorm",
        head_norms=("q_layernorm?", "k_layernorm?"),
        out="dense",
        mlp_in=("fc1",),
        mlp_out="fc2",
        gated=False,
    ),
    "smollm3": Family(models="SmolLM3", sliding="by_layer", unrotated="listed"),
    "granite": Family(models="Granite 3", **_MULTIPLIERS, logit_divisor="logits_scaling"),
    "hyperclovax": Family(
        models="HyperCLOVA X SEED",
        **_MULTIPLIERS,
        logit_scale="logits_scaling",
        attn_post_norm="post_norm1?",
        mlp_post_norm="post_norm2?",
    ),
    "ernie4_5": Family(models="ERNIE 4.5 0.3B", **_WIDE_PAIRS),
    "glm": Family(models="GLM-4 9B, GLM-Edge", **_PAIRS, **_JOINT_GATE),
    "glm4": Family(
        models="GLM-4-0414",
        **_PAIRS,
        **_JOINT_GATE,
        attn_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
    ),
    "helium": Family(models="Helium", **_PAIRS),
    "olmo": Family(models="OLMo", rotates_wide=True, clip="clip_qkv"),
    "olmo2": Family(models="OLMo 2", **_NORMS_BEHIND, rotates_wide=True, head_norms=_HEAD_NORMS, head_norm="whole"),
    "olmo3": Family(
        models="OLMo 3",
        **_NORMS_BEHIND,
        rotates_wide=True,
        rotary_by_type=True,
        head_norms=_HEAD_NORMS,
        head_norm="whole",
        sliding="by_layer",
    ),
    "exaone4": Family(
        models="EXAONE 4", **_NORMS_BEHIND, head_norms=_HEAD_NORMS, sliding="by_layer", unrotated="beside_windows"
    ),
    "cohere": Family(models="Command R, Aya 23", **_COHERE),
    "cohere2": Family(models="Command R7B, Command A, Tiny Aya", **_COHERE, sliding="by_layer", unrotated="windowless"),
    "hunyuan_v1_dense": Family(
        models="Hunyuan dense",
        classes=("hunyuandensev1",),
        head_norms=("query_layernorm", "key_layernorm"),
        head_norm="rotated",
    ),
    "bitnet": Family(
        models="BitNet b1.58, weights in bfloat16", inner_norm="attn_sub_norm", mlp_inner_norm="ffn_sub_norm"
    ),
    "nanochat": Family(
        models="nanochat",
        mlp_in=("fc1",),
        mlp_out="fc2",
        gated=False,
        embed_norm="model.norm",
        rotation="reversed",
        head_norms=_HEAD_NORMS,
        head_norm="rotated",
    ),
    "falcon": Family(
        models="Falcon 7B, 40B, 180B, Falcon 2",
        **_NEOX_MLP,
        layers="transformer.h",
        embed="transformer.word_embeddings",
        norm="transformer.ln_f",
        rotary="transformer.rotary_emb",
        attn="self_attention",
        attn_norm="ln_attn|input_layernorm",
        mlp_norm="ln_mlp|post_attention_layernorm|input_layernorm",
        projection="multi_query",
        scaling="inv_norm_factor",
        parallel=("new_decoder_architecture", "parallel_attn"),
        fields={
            "hidden_act": "activation",
            "intermediate_size": "ffn_hidden_size",
            "num_key_value_heads": "num_kv_heads",
        },
    ),
    "opt": Family(
        models="OPT but for 350M",
        layers="model.decoder.layers",
        embed="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        norm="model.decoder.final_layer_norm",
        rotary=None,
        attn_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        out="out_proj",
        mlp="",
        activation="activation_fn",
        mlp_in=("fc1",),
        mlp_out="fc2",
        gated=False,
        fields={"hidden_act": "activation_function", "intermediate_size": "ffn_dim"},
    ),
    "qwen3_moe": Family(
        models="Qwen3 30B-A3B and 235B-A22B, Qwen3-Coder 30B and 480B",
        sliding="all",
        head_norms=_HEAD_NORMS,
        experts=Experts(),
    ),
    "qwen2_moe": Family(
        models="Qwen1.5-MoE, Qwen2 57B-A14B",
        sliding="by_layer",
        experts=GATED_SHARED,
    ),
    "mixtral": Family(models="Mixtral 8x7B and 8x22B", sliding="all", experts=Experts(normalised=True, **_MIXTRAL)),
    "olmoe": Family(models="OLMoE", clip="clip_qkv", head_norms=_HEAD_NORMS, head_norm="whole", experts=Experts()),
    "flex_olmo": Family(
        models="FlexOlmo",
        **_NORMS_BEHIND,
        rotates_wide=True,
        head_norms=_HEAD_NORMS,
        head_norm="whole",
        experts=Experts(),
    ),
    "glm4_moe": Family(
        models="GLM-4.5, GLM-4.6, GLM-4.7",
        head_norms=("q_norm?", "k_norm?"),
        experts=SIGMOID_EXPERTS,
        mtp=NUMBERED,
    ),
    "dots1": Family(models="dots.llm1", sliding="by_layer", head_norms=_HEAD_NORMS, experts=SIGMOID_EXPERTS),
    "solar_open": Family(models="Solar Open", experts=SIGMOID_EXPERTS),
    "exaone_moe": Family(
        models="K-EXAONE",
        head_norms=_HEAD_NORMS,
        sliding="by_layer",
        unrotated="beside_windows",
        experts=replace(SIGMOID_EXPERTS, renamed={"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"}),
        mtp=NAMED,
    ),
    "hy_v3": Family(
        models="Hy3",
        head_norms=_HEAD_NORMS,
        experts=replace(
            SIGMOID_EXPERTS,
            normalised=True,
            renamed={
                "mlp.router.gate.weight": "mlp.gate.weight",
                "mlp.expert_bias": "mlp.e_score_correction_bias",
                "mlp.shared_mlp.": "mlp.shared_experts.",
            },
        ),
        mtp=NUMBERED,
    ),
    "minimax_m2": Family(
        models="MiniMax M2",
        head_norms=_HEAD_NORMS,
        head_norm="whole",
        experts=Experts(scores="sigmoid", normalised=True, **_MIXTRAL),
    ),
    "mellum": Family(
        models="Mellum 2",
        rotary_by_type=True,
        sliding="by_layer",
        head_norms=_HEAD_NORMS,
        experts=Experts(),
        mtp=replace(NAMED, attention="sliding_attention"),
    ),
    "granitemoe": Family(
        models="Granite 3 MoE",
        **_MULTIPLIERS,
        logit_divisor="logits_scaling",
        mlp="block_sparse_moe",
        experts=Experts(router="router", normalised=True),
    ),
    "ernie4_5_moe": Family(
        models="ERNIE 4.5 21B-A3B and 300B-A47B",
        **_WIDE_PAIRS,
        experts=Experts(
            shared="shared_experts?",
            normalised=True,
            rounds_logits=False,
            renamed={"mlp.moe_statics.": "mlp.gate.moe_statics."},
        ),
    ),
    "hunyuan_v1_moe": Family(
        models="Hunyuan A13B",
        head_norms=("query_layernorm", "key_layernorm"),
        head_norm="rotated",
        classes=("hunyuanmoev1",),
        experts=Experts(router="gate.wg", shared="shared_mlp", normalised=True, rounds_logits=False),
    ),
    "phimoe": Family(
        models="Phi-3.5-MoE, Phi-tiny-MoE, Phi-mini-MoE",
        sliding="all",
        experts=Experts(
            router="router",
            scores="sparse_mixer",
            stored=_MIXTRAL["stored"],
            renamed={".block_sparse_moe.gate.": ".mlp.router.", **_MIXTRAL["renamed"]},
        ),
    ),
    "gpt_oss": Family(
        models="gpt-oss 20B and 120B",
        half_tables=True,
        sliding="by_layer",
        sinks="sinks",
        experts=Experts(router="router", normalised=True, by_inputs=True, alternating=True, clamped=True),
    ),
    "llama4_text": Family(
        models="Llama 4 Scout and Maverick, of text alone",
        **_WIDE_PAIRS,
        half_tables=True,
        sliding="chunks",
        unrotated="listed",
        scales_queries="unrotated",
        head_norms=("qk_norm?", "qk_norm?"),
        head_norm="rotated",
        mlp="feed_forward",
        experts=Experts(
            router="router", shared="shared_expert", scores="late_sigmoid", by_inputs=True, weighs_inputs=True
        ),
        fields={"intermediate_size": "intermediate_size_mlp"},
    ),
    "cohere2_moe": Family(
        models="Command A MoE",
        **_COHERE,
        sliding="by_layer",
        unrotated="windowless",
        experts=Experts(shared="shared_experts?", scores="configured"),
    ),
    **HYBRIDS,
    **LATENT,
}

# Fields of configs that change what a model computes: a test of the values that are refused, and their meaning.
SLIDING = "sliding_attention"  # Type of layers with a window.
ATTENTION_TYPES = {"full_attention", SLIDING}
CHUNKS = "chunked_attention"  # Type of layers in which a row sees only its own chunk.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    # "vision" concerns the tokens of images only, so text is not affected.
    "use_bidirectional_attention": (lambda value: value not in (None, False, "vision"), "bidirectional attention"),
    "add_cross_attention": (bool, "cross-attention"),
    "attention_chunk_size": (bool, "chunked attention"),
    "rope_interleave": (lambda value: value is False, "a rotation of halves in latent attention"),
    "alibi": (bool, "a bias of scores by distance"),
    "do_layer_norm_before": (lambda value: value is False, "a norm of the residual stream itself"),
    "_remove_final_layer_norm": (bool, "a head without a norm before it"),
}


class ModelType(NamedTuple):
    """A supported model type of config.json files.

    `differences` says in words how it differs from Llama; `gguf` is its architecture in GGUF files, if they are
    supported; `weights` says whether tests run a published checkpoint or a random model.
    """

    type: str
    models: str
    differences: list[str]
    gguf: str | None
    weights: Literal["real", "random"]


def model_types() -> list[ModelType]:
    """Return a row for each supported type, in the order of their names."""
    types = {
        name: ModelType(
            name,
            row.models,
            differences(row),
            FORMS[name].architecture if name in FORMS else None,
            "real" if row.is_proven else "random",
        )
        for name, row in FAMILIES.items()
    }
    for outer, families in MULTIMODAL.items():
        words = [f"its text part, as {' or '.join(families.values())}"]
        form = FORMS.get(next(iter(families.values())))
        architecture = None if form is None else form.architectures[-1]
        types[outer] = ModelType(outer, NAMES[outer], words, architecture, "random")
    return [types[name] for name in sorted(types)]


def family_of(config: Any) -> Family:
    """Return the row for a transformers config.

    Raises: UnsupportedModel: the model type has no row, or a field of the config has an unsupported value.
    """
    model_type = str(getattr(config, "model_type", "unknown"))
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model type {model_type!r} is not supported: use one of those that `swiftopt models --types` lists"
        )
    row = FAMILIES[model_type]
    types = ATTENTION_TYPES | set(row.alone) | ({row.mixer.layer_type} if row.mixer else set())
    refused = dict(REFUSED)
    if row.sliding == "chunks":
        types.add(CHUNKS)
        del refused["attention_chunk_size"]
    refused["layer_types"] = lambda kinds: set(kinds or ()) - types, "a layer of another type than attention"
    for name, (is_refused, words) in refused.items():
        if is_refused(value := getattr(config, name, None)):
            raise UnsupportedModel(f"this {model_type} model sets {name} to {value!r}, and {words} is not supported")
    if row.experts is None and getattr(config, "num_local_experts", None):
        raise UnsupportedModel(f"this {model_type} model has experts and an MLP in one layer, which is not supported")
    return row
