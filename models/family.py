"""The fields of a row in the table of supported architectures; `models/families.py` has the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..core.layer_sets import KINDS, Kind
from .mtp_names import Mtp


@dataclass(frozen=True, slots=True)
class MixtureNorms:
    """Names of the norms in a layer whose experts and MLP each have their own (Gemma 4).

    The router and the norms before experts and MLP read the residual stream. `mlp_before` is the family's `mlp_norm`.
    """

    before: str = "pre_feedforward_layernorm_2"
    after: str = "post_feedforward_layernorm_2"
    mlp_before: str = "pre_feedforward_layernorm"
    mlp_after: str = "post_feedforward_layernorm_1"


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP, in some or all layers. Names are those in its module.

    router: linear map to a logit for each expert.
    experts: module with the maps of all experts as two tensors, gate_up_proj (experts, 2 inner, hidden) and down_proj
        (experts, hidden, inner).
    shared, shared_gate: an MLP that all rows go through, and the map whose sigmoid its output is multiplied by.
    scores: how logits become scores: "softmax", "sigmoid", as expert_selection_fn of the config says ("configured"), or
        as Phi's "sparse_mixer" does, which chooses two experts. With "late_sigmoid" experts are chosen by their logits,
        and the sigmoid follows.
    normalised: whether the scores of a row's experts are divided by their sum; None: as norm_topk_prob of the config.
    n_best: if experts are in groups, a group's score is the sum of its best n_best scores.
    rounds_logits: logits are rounded to the model's dtype; otherwise they are computed in float32.
    weighs_inputs: weights multiply an expert's input, not its output (Llama 4).
    stored: names of an expert's gate, up and down map in checkpoints that are quantised map by map.
    renamed: replaces parts of the names of a mixture's other tensors in such checkpoints.
    by_inputs: tensors of maps are (experts, inputs, outputs).
    alternating: maps have biases, and the outputs of gate and up alternate (gpt-oss).
    clamped: gate and up are clamped to the module's `limit`, the activation is x · sigmoid(alpha · x), and 1 is added
        to up (gpt-oss).
    beside: name in the layer of the module that has router and experts; the family's MLP is then the shared expert.
    norms: names of the norms, if the layer itself has router, experts and MLP (Gemma 4).
    """

    router: str = "gate"
    experts: str = "experts"
    shared: str | None = None
    shared_gate: str | None = None
    scores: Literal["softmax", "sigmoid", "configured", "sparse_mixer", "late_sigmoid"] = "softmax"
    normalised: bool | None = None
    n_best: int = 2
    rounds_logits: bool = True
    weighs_inputs: bool = False
    stored: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    renamed: Mapping[str, str] = field(default_factory=dict)
    by_inputs: bool = False
    alternating: bool = False
    clamped: bool = False
    beside: str | None = None
    norms: MixtureNorms | None = None


GATED_SHARED = Experts(shared="shared_expert", shared_gate="shared_expert_gate")
SIGMOID_EXPERTS = Experts(shared="shared_experts", scores="sigmoid", rounds_logits=False)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Names of a gated short convolution, which layers of `layer_type` have in place of attention (LFM2).

    `into` maps a row to an input gate, an output gate and values. The values times the input gate are convolved by
    `conv`, which has a filter of a few taps per channel; the result times the output gate goes through `out`.
    """

    layer_type: str = "conv"
    module: str = "conv"
    into: tuple[str, ...] = ("in_proj",)
    conv: str = "conv"
    norm: str | None = None
    out: str = "out_proj"


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Names of a gated delta rule (arXiv:2412.06464), which layers of `layer_type` have in place of attention.

    `into` are linear maps: to queries, keys and values, which then go through the convolution `conv`; to gates; and to
    two numbers per head, the strength of an update and the step of the decay. With `by_key_head` there are two maps
    instead, whose outputs are ordered by key head. `norm` normalises each head's output; its second input is the gate.
    """

    layer_type: str = "linear_attention"
    module: str = "linear_attn"
    into: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    by_key_head: bool = False
    conv: str = "conv1d"
    norm: str = "norm"
    out: str = "out_proj"


@dataclass(frozen=True, slots=True)
class Selective:
    """Names of a Mamba-2 state space (arXiv:2405.21060), which layers of `layer_type` have in place of attention.

    `into` maps a row to gates, values, keys, queries and a step for each head; values, keys and queries go through the
    convolution `conv`. `norm` normalises the heads' outputs; its second input is the gate. A family without such a norm
    multiplies the outputs by the gate.

    beside: the layers also have attention. Both read the same norm, and their outputs are added.
    out_scale: field of the config with a factor of the output.
    sizes: fields of the config with the number of heads, their width, the number of key heads and the width of a key.
    """

    layer_type: str = "linear_attention"
    module: str = "mamba"
    into: tuple[str, ...] = ("in_proj",)
    conv: str = "conv1d"
    norm: str = "norm"
    out: str = "out_proj"
    beside: bool = False
    out_scale: str | None = None
    sizes: tuple[str, str, str, str] = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state")


@dataclass(frozen=True, slots=True)
class SelectiveScan:
    """Names of a Mamba-1 state space (arXiv:2312.00752), which layers of `layer_type` have in place of attention.

    `into` maps a row to values and gates. The values go through the convolution `conv`. `low` maps the result to a step
    of low rank, a key and a query, which may each have a norm (`norms`). `steps` maps the step of low rank to one for
    each value. The state's output is multiplied by the gate. `expand` is the field of the config with the ratio of the
    number of values to the hidden size.
    """

    layer_type: str = "linear_attention"
    module: str = "mamba"
    into: tuple[str, ...] = ("in_proj",)
    conv: str = "conv1d"
    low: str = "x_proj"
    norms: tuple[str, str, str] = ("dt_layernorm", "b_layernorm", "c_layernorm")
    steps: str = "dt_proj"
    norm: str | None = None
    out: str = "out_proj"
    expand: str = "mamba_expand"


Mixer = ShortConv | GatedDelta | Selective | SelectiveScan


@dataclass(frozen=True, slots=True)
class LayerInputNames:
    """Names of per-layer inputs (Gemma 4): a vector for each token and layer, in the model and in its layers.

    The vector is the token's row of `embed` plus `norm` of `project` of the token's embedding. A layer ends by adding
    after(out(activation(gate(x)) · vector)) to its output x. `size` is the field of the config with the length of a
    vector; 0 or None: there are no such inputs.
    """

    embed: str = "model.embed_tokens_per_layer"
    project: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    out: str = "per_layer_projection"
    after: str = "post_per_layer_input_norm"
    activation: str = "act_fn"
    size: str = "hidden_size_per_layer_input"

    def width(self, config: Any) -> int:
        return int(getattr(config, self.size, None) or 0)


class SlotShape(NamedTuple):
    """What a layer stores in a slot: a key and a value for each of `n_heads`, or one input of a convolution."""

    n_heads: int
    key_width: int
    value_width: int = 0

    @property
    def n_values(self) -> int:
        return self.n_heads * (self.key_width + self.value_width)


@dataclass(frozen=True, slots=True)
class Family:
    """One row: where a model's modules are, and in what its layers differ from Llama's.

    Names of modules are dotted paths from the causal-LM model (`layers`, `embed`, `positions`, `norm`, `rotary` and
    `head`) or from a decoder layer (the rest). Of several names separated by `|`, the first that the model has is used.
    The model may lack a part whose names end with `?`, or whose name may be None. An `nn.Identity` counts as absent.

    Models:
        models: names of models of this type.
        is_proven: tests also decode with the weights of a real model.
        classes: beginnings of the names of transformers' classes, in lower case, if they differ from the type.

    Norms and structure:
        …_norm, …_post_norm: norms before and after a sub-layer; a family may have either or both.
        parallel: attention and MLP both read the layer's input: always, or if one of these flags of the config is set.
        alone: types of layers that have only this sub-layer.
        mixer: what layers of its type have in place of attention, or in parallel to it.
        layer_inputs: names of per-layer inputs.
        layer_scale: name of a tensor (1,) in the layer that the residual stream is multiplied by after the layer.
        embed_norm: norm of embeddings.
        embed_scale, residual_scale, logit_scale, logit_divisor: fields of the config: factors of embeddings, of what a
            sub-layer adds, and of logits.

    Attention:
        projection: "split": q_proj, k_proj and v_proj; "fused": one map to queries, then keys, then values; "grouped":
            one map to the queries, the key and the value of each key head in turn (GPT-NeoX); "multi_query": fused with
            one key head if the config sets multi_query, else grouped.
        clip: field of the config with a bound of the projections' outputs.
        head_norms: norms of queries and of keys; head_norm: they apply by head ("by_head"), to all heads at once
            ("whole"), by head after the rotation ("rotated"), or to latents ("latent").
        latents: multi-head latent attention: `qkv` maps to latents, and these two maps lead from there to heads: of
            queries (absent: queries have no latent), and of keys and values.
        value_norm: norm of each value.
        key_values: flag of the config with which layers without a window have no map of values: their values are the
            keys before norm and rotation.
        sharing: field of the config with the number of last layers that have no keys and values. They read those of the
            last layer of their type that has them.
        scaling: attribute of the attention module with the factor of scores. attn_logit_softcapping bounds scores.
        sinks: tensor (heads,) in the attention module: scores without a value, which only enlarge the softmax's sum.
        inner_norm: norm of the heads' outputs, before the output map.
        gated_heads: a head's output is multiplied by the sigmoid of a gate, which follows the head's query in its map.
        attn_scales: fields of the config with factors of attention's input, of its keys and of its output.
        sliding: the layers that use the configured window. With "chunks", a row of such a layer sees only its own chunk
            of attention_chunk_size positions.

    Positions:
        rotation: which values of a head are rotated as a pair: those half the rotated width apart, forwards ("halves")
            or backwards ("reversed"), or neighbours ("pairs").
        rotates_wide: the rotation is computed in float32 and rounded once.
        unrotated: layers without rotation: those with a 0 in no_rope_layers ("listed"), all without a window
            ("windowless"), or the latter only if the config has a window ("beside_windows").
        rotary_by_type: the rotary module takes the layer's type (Gemma 3).
        half_tables: the rotary module's tables have one number for each pair.
        scales_queries: queries are scaled by position in layers with rotation (Ministral 3) or without it (Llama 4).
        positions: learned embedding of positions, which is added to that of tokens.

    MLP:
        mlp_in, mlp_out, activation: names in the MLP; with `mlp` "" they are names in the layer.
        gated: the output map reads the product of two halves, one of them after the activation.
        mlp_inner_norm: norm before the output map.
        mlp_scales: attributes of the MLP with factors of the gate and of the output.
        experts: some or all layers have a mixture of such MLPs instead.
        hidden_act: the activation, if configs do not name it.
        transposed: linear maps are stored as (inputs, outputs).

    Files and exports:
        fields: names in this family's configs of fields that others call otherwise.
        mtp: names of the multi-token-prediction layer in checkpoints.
        decilm_bias: vLLM's DeciLM can run the family; which of attention's maps have biases: as the config says, none,
            or those of q, k and v.
    """

    models: str
    is_proven: bool = False
    classes: tuple[str, ...] = ()
    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    embed_norm: str | None = None
    embed_scale: str | None = None
    positions: str | None = None
    norm: str = "model.norm"
    rotary: str | None = "model.rotary_emb"
    rotary_by_type: bool = False
    half_tables: bool = False
    rotation: Literal["halves", "reversed", "pairs"] = "halves"
    rotates_wide: bool = False
    unrotated: Literal["none", "listed", "windowless", "beside_windows"] = "none"
    scales_queries: Literal["none", "rotated", "unrotated"] = "none"
    head: str = "lm_head"
    logit_scale: str | None = None
    logit_divisor: str | None = None
    residual_scale: str | None = None
    parallel: bool | tuple[str, ...] = False
    attn: str = "self_attn"
    attn_norm: str | None = "input_layernorm"
    attn_post_norm: str | None = None
    mlp: str = "mlp"
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    projection: Literal["split", "fused", "grouped", "multi_query"] = "split"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    clip: str | None = None
    head_norms: tuple[str, str] | None = None
    head_norm: Literal["by_head", "whole", "rotated", "latent"] = "by_head"
    latents: tuple[str, str] | None = None
    value_norm: str | None = None
    key_values: str | None = None
    sharing: str | None = None
    scaling: str = "scaling"
    sinks: str | None = None
    inner_norm: str | None = None
    out: str = "o_proj"
    attn_scales: tuple[str, str, str] | None = None
    mixer: Mixer | None = None
    alone: Mapping[str, Kind] = field(default_factory=dict)
    gated_heads: bool = False
    layer_inputs: LayerInputNames | None = None
    layer_scale: str | None = None
    experts: Experts | None = None
    hidden_act: str | None = None
    mlp_in: tuple[str, ...] = ("gate_proj", "up_proj")
    mlp_inner_norm: str | None = None
    mlp_scales: tuple[str, str] | None = None
    activation: str | None = None
    mlp_out: str = "down_proj"
    gated: bool = True
    transposed: bool = False
    sliding: Literal["none", "all", "by_layer", "chunks"] = "none"
    fields: Mapping[str, str] = field(default_factory=dict)
    decilm_bias: Literal["configured", "none", "qkv"] | None = None
    mtp: Mtp | None = None

    def setting(self, config: Any, name: str) -> Any:
        """Return a field of a config by the name that most families give it; None: the config lacks it."""
        return getattr(config, self.fields.get(name, name), None)

    def mixer_of(self, config: Any, layer: int) -> Mixer | None:
        """Return what a layer has in place of attention or in parallel to it; None: nothing."""
        has_mixer = self.mixer is not None and config.layer_types[layer] == self.mixer.layer_type
        return self.mixer if has_mixer else None

    def kinds_of(self, config: Any, layer: int) -> tuple[Kind, ...]:
        """Return the sub-layers that a layer has, in their order."""
        kind = self.alone.get(config.layer_types[layer]) if self.alone else None
        return tuple(KINDS) if kind is None else (kind,)

    def has_attention(self, config: Any, layer: int) -> bool:
        """Tell whether a layer has attention, alone or in parallel to another mixer."""
        mixer = self.mixer_of(config, layer)
        is_beside = isinstance(mixer, Selective) and mixer.beside
        return "attn" in self.kinds_of(config, layer) and (mixer is None or is_beside)

    def modules_of(self, kind: Kind) -> tuple[str, ...]:
        """Return the names of a sub-layer's modules in a decoder layer; a norm that both read counts as attention's."""
        attn = (self.attn, self.attn_norm, self.attn_post_norm, self.mixer and self.mixer.module)
        maps = (self.mlp, self.experts and self.experts.beside) if self.mlp else (*self.mlp_in, self.mlp_out)
        mlp = (*maps, self.mlp_norm, self.mlp_post_norm)
        names = tuple(name for names in {"attn": attn, "mlp": mlp}[kind] if names for name in names_in(names))
        return names if kind == "attn" else tuple(name for name in names if name not in self.modules_of("attn"))


def names_in(names: str) -> list[str]:
    """Split a field of a row into its alternative names, in their order of preference."""
    return names.removesuffix("?").split("|")


# Tests of a row, and the difference from Llama in words where they hold.
DIFFERENCES: tuple[tuple[Callable[[Family], bool], str], ...] = (
    (lambda row: row.sliding == "all", "sliding window"),
    (lambda row: row.sliding == "by_layer", "sliding window by layer"),
    (lambda row: row.sliding == "chunks", "attention in chunks"),
    (lambda row: row.parallel is True, "parallel attention and MLP"),
    (lambda row: isinstance(row.parallel, tuple), "parallel attention and MLP, by config"),
    (lambda row: row.attn_norm is None, "post-norms, no pre-norms"),
    (lambda row: row.attn_norm is not None and row.attn_post_norm is not None, "pre- and post-norms"),
    (lambda row: row.head_norms is not None and row.head_norm == "by_head", "q/k norms"),
    (lambda row: row.head_norm == "whole", "q/k norms over all heads"),
    (lambda row: row.head_norm == "rotated", "q/k norms after the rotation"),
    (lambda row: row.latents is not None, "multi-head latent attention (MLA)"),
    (lambda row: row.value_norm is not None, "norms of values"),
    (lambda row: row.key_values is not None, "keys as values, by config"),
    (lambda row: row.sharing is not None, "layers that read another layer's keys and values"),
    (lambda row: row.layer_inputs is not None, "inputs by layer, and what a layer adds by them"),
    (lambda row: row.layer_scale is not None, "a scale of each layer's output"),
    (lambda row: row.inner_norm is not None, "norms inside sub-layers"),
    (lambda row: row.embed_norm is not None, "a norm of embeddings"),
    (lambda row: row.positions is not None, "learned positions"),
    (lambda row: row.rotation == "pairs", "rotary pairs side by side"),
    (lambda row: row.rotation == "reversed", "rotation backwards"),
    (lambda row: row.rotary_by_type, "rotation by layer"),
    (lambda row: row.unrotated != "none", "layers without rotation"),
    (lambda row: row.scales_queries != "none", "queries scaled by position"),
    (lambda row: row.clip is not None, "clipped q, k and v"),
    (lambda row: row.sinks is not None, "attention sinks"),
    (lambda row: row.residual_scale is not None, "multipliers of embeddings, scores, sub-layers and logits"),
    (lambda row: row.logit_scale is not None and row.residual_scale is None, "a multiplier of logits"),
    (lambda row: row.projection in ("grouped", "multi_query"), "q, k and v in one map, by key head"),
    (lambda row: row.projection == "fused", "q, k and v in one map"),
    (lambda row: not row.gated, "ungated MLP"),
    (lambda row: row.gated_heads, "gated heads"),
    (lambda row: isinstance(row.mixer, GatedDelta), "layers with a gated delta rule in place of attention"),
    (lambda row: isinstance(row.mixer, Selective) and not row.mixer.beside, "layers with a state space (Mamba-2)"),
    (lambda row: isinstance(row.mixer, Selective) and row.mixer.beside, "a state space (Mamba-2) beside attention"),
    (lambda row: isinstance(row.mixer, SelectiveScan), "layers with a state space (Mamba-1)"),
    (lambda row: bool(row.alone), "layers of one sub-layer"),
    (lambda row: isinstance(row.mixer, ShortConv), "layers with a short convolution in place of attention"),
    (lambda row: row.experts is not None, "mixture of experts"),
    (lambda row: row.experts is not None and row.experts.shared is not None, "shared experts"),
    (lambda row: row.experts is not None and row.experts.weighs_inputs, "weighted inputs of experts"),
    (lambda row: row.experts is not None and row.experts.clamped, "clamped gates"),
    (lambda row: row.experts is not None and row.experts.scores == "sparse_mixer", "sparse mixer"),
    (lambda row: row.mtp is not None, "a multi-token-prediction layer"),
)


def differences(row: Family) -> list[str]:
    """Return in words how a family differs from Llama."""
    return [words for is_so, words in DIFFERENCES if is_so(row)]
