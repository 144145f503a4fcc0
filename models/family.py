"""What a row of the table of supported architectures says; `models/families.py` has the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..core.layer_sets import KINDS, Kind
from .mtp_names import Mtp


@dataclass(frozen=True, slots=True)
class MixtureNorms:
    """Norms of a layer whose experts and MLP each have their own (Gemma 4): their names in the layer.

    All of them, and the router, read the residual stream. `mlp_before` is the family's `mlp_norm`.
    """

    before: str = "pre_feedforward_layernorm_2"
    after: str = "post_feedforward_layernorm_2"
    mlp_before: str = "pre_feedforward_layernorm"
    mlp_after: str = "post_feedforward_layernorm_1"


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP, in some or all layers: names in its module.

    `router` is a linear map to a logit for each expert, and `experts` has their maps as two tensors, gate_up_proj
    (experts, 2 inner, hidden) and down_proj (experts, hidden, inner). `shared` is an MLP that all rows go through,
    times the sigmoid of `shared_gate`.

    `scores`: of experts, "softmax" or "sigmoid" of the logits, or which the config's expert_selection_fn says, or those
    by which Phi's "sparse_mixer" chooses two; with "late_sigmoid" experts are chosen by logits. Weights of a row's
    experts are their scores, divided by the sum: as `normalised` says, or where it is None as norm_topk_prob does. A
    group's score, of experts in groups, is the sum of its `n_best` best. Logits are in float32, or rounded to the
    model's type before (`rounds_logits`). With `weighs_inputs` a weight multiplies what an expert reads, and not what
    it gives (Llama 4).

    Checkpoints that are quantised map by map call an expert's gate, other half and output as in `stored`; parts of the
    names of a mixture's other tensors there are `renamed` here.

    With `by_inputs` maps are (experts, inputs, outputs). With `alternating` they have biases, and a gate's output and
    the other half's by turns.
    With `clamped` both halves are bounded, the gate is x · sigmoid(alpha x), and one is added to the other half; the
    module's `limit` and `alpha` are the numbers (gpt-oss).

    With `beside` the layer has the router and the experts in a module of this name, and the family's MLP beside it is
    the shared one. With `norms` it has them itself.
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
    """A gated short convolution in place of attention, in layers of `layer_type`: its names in the layer.

    `into` maps a row to a gate, a second gate and values. What is convolved are the values times the first gate; what
    comes out is multiplied by the second, and goes through `out`. `conv` has a filter of a few taps for each channel.
    """

    layer_type: str = "conv"
    module: str = "conv"
    into: tuple[str, ...] = ("in_proj",)
    conv: str = "conv"
    norm: str | None = None
    out: str = "out_proj"


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta rule in place of attention, in layers of `layer_type`: its names in the layer.

    `into` are linear maps to queries, keys and values, which go through the convolution `conv`, to gates, and to two
    numbers per head, the update's amount and its step; `by_key_head`: two maps instead, in each of which what belongs
    to a key head lies together. `norm` is of each head's output, and has the gate as its second input.
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
    """A selective state space, Mamba-2's, in place of attention in layers of `layer_type`: its names in the layer.

    `into` maps a row to gates, values, keys, queries and a step for each head; values, keys and queries go through the
    convolution `conv`. `norm` is of what the heads read, and has the gate as its second input; without one what they
    read is multiplied by the gate alone.

    `beside`: in these layers it stands beside attention; both read the same norm, and the sum of what they give is
    added. `out_scale` is the config's multiplier of what it gives, and `sizes` are the config's fields with the number
    of heads, their width, the number of key heads, and the width of a key.
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
    """A selective state space, Mamba-1's, in place of attention in layers of `layer_type`: its names in the layer.

    `into` maps a row to values and gates. Values go through the convolution `conv`. `low` maps what comes out to a step
    of low rank, a key and a query, which may have a norm each (`norms`). `steps` maps that step to one for each value.
    What is read of the state is multiplied by the gate. `expand`: the config's field with values by hidden size.
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
    """A vector for each token and layer, which a layer's last term is multiplied by: names in the model and the layer.

    It is a token's row of `embed`, plus the norm of what `project` makes of the token's embedding. The layer's term is
    `after` of `out` of the `activation` of `gate`, times the vector. `size` is the config's field with its length; 0 or
    None: there are none.
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
    """What a layer keeps in a slot: a key and a value for each of `n_heads`, or of a convolution one input."""

    n_heads: int
    key_width: int
    value_width: int = 0

    @property
    def n_values(self) -> int:
        return self.n_heads * (self.key_width + self.value_width)


@dataclass(frozen=True, slots=True)
class Family:
    """Module names, dotted from the causal-LM model (`layers` … `head`) or from one decoder layer (the rest).

    `models` are of this type; `is_proven`: tests decode with a real one's weights, too; `classes`: how the names of
    transformers' classes begin, in small letters, where that is not the type. Of several names with `|` between them
    the first that the model has counts. With a `?` after the last, and of the names that may be None, the model may
    lack all. An `nn.Identity` counts as lacking.

    Norms are before a sub-layer, after it (`…_post_norm`), or both. `parallel`: attention and MLP read the layer's
    input, always, or if one of these flags of the config is set.

    `projection`: "split" has q_proj, k_proj, v_proj; "fused" one projection, queries then keys then values; "grouped"
    one projection that has, per key head, its queries, then the key and the value (GPT-NeoX); "multi_query" is fused
    with one key head where the config says multi_query, else grouped. `clip`: the config's bound of what they give.
    `head_norms` are of queries and of keys. `head_norm`: by head, of all heads at once ("whole"), by head after the
    rotation ("rotated"), or of latents ("latent"). With `latents`, multi-head latent attention, the maps of `qkv` are
    to latents, and these maps from there to heads: of queries, without which they have no latent, and of keys and
    values. `scaling` is the attention module's name for what scores are multiplied by; the config's
    attn_logit_softcapping bounds them. `sinks`, a tensor of attention (heads,), are further scores, which take a share
    and read nothing. `inner_norm` is of what the heads read. `value_norm` is of each value. `key_values`: a flag of the
    config by which layers without a window have no map of values: these are the keys before their norm and rotation.
    `sharing`: the config's number of last layers that have neither, and read those of the last layer of their type
    before them.

    `rotation`: which values of a head are a pair: those half the rotated width apart, turned forwards ("halves") or
    backwards ("reversed"), or neighbours ("pairs"). `rotates_wide`: in float32, and rounded once. `unrotated`: layers
    without a rotation: those that the config's no_rope_layers has 0 for ("listed"), all without a window
    ("windowless"), or these if the config has a window ("beside_windows"). With `rotary_by_type` the rotary module
    takes the layer's type (Gemma 3); with `half_tables` its tables have one number for a pair. `scales_queries`:
    by position, those of layers that have a rotation (Ministral 3) or of those that have none (Llama 4). A learned
    embedding of `positions` is added to the token's. `sliding` tells for which layers a configured window holds; with
    "chunks" rows of such layers see their own chunk alone, of as many positions as attention_chunk_size says.

    The names of `mlp_in` and `mlp_out` are of linear maps in the MLP, which may be the layer itself (""), with its
    `activation`. With `gated`, the output map reads the product of two halves, one of them after the activation;
    `mlp_inner_norm` is before it. With `experts`, layers may have a mixture of such MLPs instead. Linear maps that are
    `transposed` are stored as (inputs, outputs).

    `layer_inputs`: see there. `layer_scale` is a tensor (1,) of a layer, which the residual stream is multiplied by
    after it.

    With `gated_heads` what a head reads is multiplied by the sigmoid of a gate, which lies after its query. `mixer` is
    what layers of its type have in place of attention, or beside it. Layers of a type in `alone` are one sub-layer of
    this kind. `hidden_act`: the activation, where configs do not name it.

    `attn_scales` are fields of the config: multipliers of what attention reads, of its keys, and of what it gives.
    `mlp_scales` are names in the MLP's module: multipliers of the gate and of the output.

    `embed_norm` is of embeddings. `embed_scale`, `residual_scale`, `logit_scale` and `logit_divisor` are fields of the
    config: multipliers of embeddings, of what a sub-layer adds, and of logits. `fields` has the config's own names of
    usual fields.

    `mtp`: where checkpoints have a multi-token-prediction layer.

    vLLM's DeciLM computes the family where there is a `decilm_bias`: the biases of attention are as the config says, or
    there are none, or those of q, k and v.
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
        """Return a field of a config by its usual name; None: the config has none."""
        return getattr(config, self.fields.get(name, name), None)

    def mixer_of(self, config: Any, layer: int) -> Mixer | None:
        """Return what a layer has in place of attention, or beside it; None: nothing."""
        is_mixed = self.mixer is not None and config.layer_types[layer] == self.mixer.layer_type
        return self.mixer if is_mixed else None

    def kinds_of(self, config: Any, layer: int) -> tuple[Kind, ...]:
        """Return the sub-layers that a layer has, in their order."""
        kind = self.alone.get(config.layer_types[layer]) if self.alone else None
        return tuple(KINDS) if kind is None else (kind,)

    def has_attention(self, config: Any, layer: int) -> bool:
        """Tell whether a layer has attention, alone or with another mixer beside it."""
        mixer = self.mixer_of(config, layer)
        is_beside = isinstance(mixer, Selective) and mixer.beside
        return "attn" in self.kinds_of(config, layer) and (mixer is None or is_beside)

    def modules_of(self, kind: Kind) -> tuple[str, ...]:
        """Return the names of a sub-layer's modules in a decoder layer. A norm that both read is attention's."""
        attn = (self.attn, self.attn_norm, self.attn_post_norm, self.mixer and self.mixer.module)
        maps = (self.mlp, self.experts and self.experts.beside) if self.mlp else (*self.mlp_in, self.mlp_out)
        mlp = (*maps, self.mlp_norm, self.mlp_post_norm)
        names = tuple(one for name in {"attn": attn, "mlp": mlp}[kind] if name for one in names_in(name))
        return names if kind == "attn" else tuple(name for name in names if name not in self.modules_of("attn"))


def names_in(names: str) -> list[str]:
    """Return the names that a field of a row has, the first of which that a model has counts."""
    return names.removesuffix("?").split("|")


# Tests of a row, and in which words it then differs from Llama's.
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
    """Return in words what a row computes otherwise than Llama."""
    return [words for is_so, words in DIFFERENCES if is_so(row)]
