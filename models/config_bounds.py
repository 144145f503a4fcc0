"""Refuses configs with absurd numbers, before memory of such a size is requested.

Values are checked as they are in the file. Relations between them are checked again after transformers has filled in
its defaults.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import ModelNotFound, cut_short
from .config_layout import heads_of, layer_config, windows_of
from .families import family_of
from .family import Selective

DEEPEST = 16  # Most levels of objects and lists in a config.
ADVICE = "copy or download it again"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The smallest and the largest allowed value of a field; `whole`: only integers are allowed."""

    least: float
    most: float
    whole: bool = True

    def holds(self, value: Any) -> bool:
        kinds = int if self.whole else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.least <= value <= self.most

    @property
    def words(self) -> str:
        if self.whole:
            return f"a whole number from {int(self.least)} to {int(self.most):,}"
        return f"a number from {self.least:g} to {self.most:g}"


TINY = 1e-30  # Lower bound of floats that must be above 0.
LAYERS, HEADS, WIDTH = Bounds(1, 1 << 10), Bounds(1, 1 << 12), Bounds(1, 1 << 20)
TAPS, EXPERTS, GROUPS = Bounds(1, 1 << 6), Bounds(0, 1 << 12), Bounds(1, 1 << 12)
VOCAB, POSITIONS, COUNT = Bounds(1, 1 << 24), Bounds(1, 1 << 30), Bounds(0, 1 << 30)
EPSILON, FACTOR, SHARE = Bounds(0, 1, False), Bounds(TINY, 1 << 20, False), Bounds(TINY, 1, False)
THETA, CAP, AMOUNT = Bounds(1, 1e18, False), Bounds(TINY, 1e9, False), Bounds(0, 1e9, False)

# Names of the fields with the number of experts of a layer, and with the number that a token takes.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_COUNTS = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")

# Bounds of fields, under all names that configs have for them, at any level. A missing field, or null, has a default.
BOUNDS: dict[str, Bounds] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads"), HEADS),
    **dict.fromkeys(("hidden_size", "n_embd", "intermediate_size", "n_inner", "head_dim"), WIDTH),
    **dict.fromkeys(("shared_intermediate_size", "ffn_hidden_size", "ffn_dim", "word_embed_proj_dim"), WIDTH),
    "vocab_size": VOCAB,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), POSITIONS),
    "original_max_position_embeddings": POSITIONS,
    **dict.fromkeys(("conv_L_cache", "linear_conv_kernel_dim"), TAPS),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), WIDTH),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "num_heads", "mamba_n_groups", "n_groups"), HEADS),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_d_ssm", "mamba_head_dim"), WIDTH),
    **dict.fromkeys(("mamba_d_conv", "conv_kernel", "mamba_expand", "expand"), TAPS),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "moe_shared_expert_intermediate_size"), WIDTH),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), WIDTH),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), WIDTH),
    **dict.fromkeys(("block_multiple_of", "dim_model_base", "global_head_dim"), WIDTH),
    "hidden_size_per_layer_input": Bounds(0, 1 << 16),
    "vocab_size_per_layer_input": VOCAB,
    "num_global_key_value_heads": HEADS,
    "num_kv_shared_layers": COUNT,
    **dict.fromkeys((*EXPERT_COUNTS, *CHOSEN_COUNTS), EXPERTS),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), EXPERTS),
    **dict.fromkeys(("n_group", "topk_group"), GROUPS),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_interval", "no_rope_layer_interval"), LAYERS),
    **dict.fromkeys(("sliding_window", "max_window_layers", "first_k_dense_replace", "num_dense_layers"), COUNT),
    **{"attention_chunk_size": COUNT, "floor_scale": POSITIONS, "attn_scale": AMOUNT, "intermediate_size_mlp": WIDTH},
    "interleave_moe_layer_step": LAYERS,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), EPSILON),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), THETA),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), SHARE),
    **dict.fromkeys(("factor", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "alpha"), FACTOR),
    "block_ffn_dim_multiplier": FACTOR,
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"), AMOUNT),
    **dict.fromkeys(("llama_4_scaling_beta", "routed_scaling_factor", "router_scaling_factor", "moe_norm_min"), AMOUNT),
    **dict.fromkeys(("swiglu_alpha", "router_jitter_noise", "input_jitter_noise", "router_aux_loss_coef"), AMOUNT),
    **dict.fromkeys(
        ("attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout", "dropout"), EPSILON
    ),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "activation_dropout", "layerdrop", "dropout"), EPSILON),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), AMOUNT),
    **dict.fromkeys(("key_multiplier", "attention_in_multiplier", "attention_out_multiplier"), AMOUNT),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier", "mlp_multipliers", "ssm_multipliers"), AMOUNT),
    **dict.fromkeys(("scale_emb", "scale_depth"), AMOUNT),
    "lm_head_multiplier": CAP,
    **dict.fromkeys(("logits_scaling", "logit_scale", "clip_qkv", "swiglu_limit"), CAP),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar"), CAP),
}


def check_values(values: Mapping[str, Any], path: Path) -> None:
    """Check the values of a config as they are in its file. Args: path: the config's, for messages.

    Raises: ModelNotFound: a value is out of bounds, not a finite number, or nested too deeply.
    """
    per_layer = (name for name, types in PER_LAYER.items() if values.get("model_type") in types)
    for name, value in _numbers(values, path, frozenset((*LISTS, *per_layer))):
        bounds = BOUNDS.get(name)
        if bounds is not None and not bounds.holds(value):
            raise ModelNotFound(f"{path} has {name} = {shown(value)}, which is not {bounds.words}: {ADVICE}")
        if isinstance(value, float) and not math.isfinite(value) and name != UNBOUNDED:
            raise ModelNotFound(f"{path} has {name} = {value}, which is no number to compute with: {ADVICE}")


def _numbers(
    values: Any, path: Path, lists: frozenset[str], name: str = "", depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield each value that is not null, an object or a list, with its field.

    Args: lists: fields of `BOUNDS` that may have several numbers.
    """
    if depth > DEEPEST:
        raise ModelNotFound(f"{path} nests its values deeper than {DEEPEST} levels: {ADVICE}")
    if isinstance(values, Mapping):
        if name in BOUNDS:
            raise ModelNotFound(f"{path} has an object as {name}, which is not {BOUNDS[name].words}: {ADVICE}")
        for key, value in values.items():
            yield from _numbers(value, path, lists, str(key), depth + 1)
    elif isinstance(values, list):
        if name in BOUNDS and name not in lists:
            raise ModelNotFound(f"{path} has a list as {name}, which is not {BOUNDS[name].words}: {ADVICE}")
        for value in values:
            yield from _numbers(value, path, lists, name, depth + 1)
    elif values is not None:
        yield name, values


UNBOUNDED = "time_step_limit"  # A field that is infinite in configs of models with state spaces.
FACTORS = ("short_factor", "long_factor")  # Fields that have a number for each rotary frequency.
LISTS = (*FACTORS, "mlp_multipliers", "ssm_multipliers")  # Fields of `BOUNDS` that may have several numbers.
# Fields of `BOUNDS` that may have a number for each layer, and the model types in which they do.
PER_LAYER = {"moe_topk": ("hunyuan_v1_moe",), "moe_intermediate_size": ("hunyuan_v1_moe",)}


def shown(value: Any) -> str:
    """Return a value for a message, short and on one line."""
    return cut_short(repr(value))


def check_together(config: Any, path: Path) -> None:
    """Check the relations between a config's values, after transformers has filled in its defaults.

    Raises: ModelNotFound: heads do not share key heads evenly or do not fill the hidden size, a list has a wrong
            length, or a field that every model has is missing.
    """
    layers, hidden = config.num_hidden_layers, config.hidden_size
    types = getattr(config, "layer_types", None)
    if types is not None and len(types) != layers:
        raise ModelNotFound(f"{path} has {len(types)} layer_types for {layers} layers: {ADVICE}")
    for layer in range(layers):
        heads = heads_of(config, layer)
        if heads.n_heads % heads.n_kv_heads:
            raise ModelNotFound(
                f"{path} has {heads.n_heads} attention heads for {heads.n_kv_heads} key heads, no multiple: {ADVICE}"
            )
        if not getattr(layer_config(config, layer), "head_dim", None) and hidden % heads.n_heads:
            raise ModelNotFound(
                f"{path} has a hidden size of {hidden} for {heads.n_heads} heads, no multiple: {ADVICE}"
            )
    heads = heads_of(config)
    inputs = family_of(config).layer_inputs
    n_inputs = config.vocab_size_per_layer_input if inputs is not None and inputs.width(config) else config.vocab_size
    if n_inputs < config.vocab_size:
        raise ModelNotFound(f"{path} has inputs by layer for {n_inputs} of {config.vocab_size} tokens: {ADVICE}")
    for name in PER_LAYER:
        numbers = getattr(config, name, None)
        if isinstance(numbers, list) and len(numbers) != layers:
            raise ModelNotFound(f"{path} has {len(numbers)} numbers as {name} for {layers} layers: {ADVICE}")
    _check_experts(config, path)
    rank = _first(config, "mamba_dt_rank", "time_step_rank")
    if rank is not None and not WIDTH.holds(rank):
        raise ModelNotFound(f"{path} has {shown(rank)} as the rank of a state's steps, not {WIDTH.words}: {ADVICE}")
    if any(window is not None and window.size == 0 for window in windows_of(config, family_of(config), layers)):
        raise ModelNotFound(f"{path} has a sliding window of 0 tokens: {ADVICE}")
    listed = getattr(config, "no_rope_layers", None)
    if listed and len(listed) < layers:
        raise ModelNotFound(f"{path} has {len(listed)} no_rope_layers for {layers} layers: {ADVICE}")
    mixer = family_of(config).mixer
    of_state = mixer.sizes[::2] if isinstance(mixer, Selective) else ("linear_num_value_heads", "linear_num_key_heads")
    shared, key_heads = (getattr(config, name, 1) for name in of_state)
    if shared % key_heads:
        raise ModelNotFound(f"{path} has {shared} heads of a state for {key_heads} key heads, no multiple: {ADVICE}")
    for parameters in rotations(config):
        # In latent attention, head_dim is the rotated part of a head in some configs, and all of it in others.
        size = getattr(layer_config(config, 0), "head_dim", None) or heads.width
        width = int(size * (parameters.get("partial_rotary_factor") or 1.0))
        if heads.latent is not None and (width != heads.latent.rotary or width % 2):
            raise ModelNotFound(
                f"{path} rotates {width} values of a head, and qk_rope_head_dim is {heads.latent.rotary}: {ADVICE}"
            )
        if width < 2:
            raise ModelNotFound(f"{path} rotates {width} values of a head, and a pair is the least: {ADVICE}")
        for name in FACTORS:
            factors = parameters.get(name)
            if factors is not None and (not isinstance(factors, list) or len(factors) != width // 2):
                n_factors = len(factors) if isinstance(factors, list) else shown(factors)
                raise ModelNotFound(f"{path} has {n_factors} as {name} for {width // 2} frequencies: {ADVICE}")


def _check_experts(config: Any, path: Path) -> None:
    """Check that there are at least as many experts and groups as a token chooses."""
    n_experts = _first(config, *EXPERT_COUNTS)
    n_chosen = _first(config, *CHOSEN_COUNTS)
    most_chosen = max(n_chosen, default=0) if isinstance(n_chosen, list) else n_chosen or 0
    if n_experts and most_chosen > n_experts:
        raise ModelNotFound(f"{path} has {most_chosen} experts of a token and {n_experts} in all: {ADVICE}")
    n_groups, n_chosen_groups = (getattr(config, name, None) or 1 for name in ("n_group", "topk_group"))
    if not n_experts or n_groups == 1 == n_chosen_groups:
        return
    # A group's score is that of its two best experts, so each group needs two.
    if n_experts % n_groups or n_experts < 2 * n_groups or n_chosen_groups > n_groups:
        raise ModelNotFound(
            f"{path} has {n_experts} experts in {n_groups} groups, of which a token takes {n_chosen_groups}: {ADVICE}"
        )
    if most_chosen > n_chosen_groups * (n_experts // n_groups):
        raise ModelNotFound(
            f"{path} has {most_chosen} experts of a token in {n_chosen_groups} of {n_groups} groups of"
            f" {n_experts // n_groups}: {ADVICE}"
        )


def _first(config: Any, *names: str) -> Any:
    """Return the value of the first of these fields that a config has; None: it has none."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def rotations(config: Any) -> list[Mapping[str, Any]]:
    """Return a config's rotary parameters: one for all layers, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [value for value in rope.values() if isinstance(value, Mapping)] or ([rope] if rope else [])
