"""Applies GGUF settings that transformers drops: config fields, pre-tokenizer, end-of-turn tokens.

It reads some settings and leaves out all others without a word, such as Phi-3's sliding window. One that says what is
computed and has no place in the config is refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from ..core.errors import UnsupportedModel
from .families import FAMILIES

# GGUF settings common to all architectures, by name without the architecture's prefix, and their config fields.
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
MORE_FIELDS = {
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_theta of sliding attention",
    "rope.dimension_count": "rotary width",
}
CHECKED = "rope.scal"  # Name prefix of the rotary scaling settings, which gguf_model.py checks.
NOTES = ("tensor_data_layout",)  # Settings without effect on what the model computes.
TURN_KEYS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
)  # End-of-turn tokens of usual chat templates, for files that name none.
# Pre-tokenizer names (`tokenizer.ggml.pre`) that llama.cpp splits by GPT-2's regular expression (LIKE_GPT2), or by
# single digits and then by that expression (DIGITS_APART).
LIKE_GPT2 = ("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum", "gigachat", "a.x-4.0")
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
# Settings without a config field, and their values that do not change what the model computes.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0.0, 1.0)),
}
NOTHING = (0, False, "", "none")


def take_settings(settings: Mapping[str, Any], config: Any, gguf: Path) -> None:
    """Correct a transformers config where it differs from the file's settings.

    Args:   settings: those of its architecture, by their names behind that.
    Raises: UnsupportedModel: the config has no field for one of them.
    """
    fields = {**FIELDS, **MORE_FIELDS}
    # Apply in the order of the table: a setting may depend on earlier ones.
    in_order = [name for name in fields if name in settings]
    for name in (*in_order, *(name for name in settings if name not in fields)):
        if name in NOTES or name.startswith(CHECKED):
            continue
        given, field = settings[name], fields.get(name)
        value = given[0] if isinstance(given, list) and given and given == given[:1] * len(given) else given
        if field is None:
            if value not in NEUTRAL.get(name, NOTHING):
                raise _no_place(gguf, name, value, config)
        elif not _is_equal(_known(config, field), value) and not _set(config, field, value):
            raise _no_place(gguf, name, value, config)


def _no_place(gguf: Path, name: str, value: Any, config: Any) -> UnsupportedModel:
    return UnsupportedModel(
        f"{gguf} has the setting {name} = {value}, for which a model of type {config.model_type} has no place when"
        " transformers reads GGUF: use the model's hub id"
    )


def _is_equal(known: Any, value: Any) -> bool:
    if isinstance(known, int | float) and isinstance(value, int | float):
        return math.isclose(known, value, rel_tol=1e-6)  # GGUF stores floats in 32 bits.
    return known == value or (known is None and value == 0)


def _known(config: Any, field: str) -> Any:
    """Return the config's value of a field, or the value derived from other fields."""
    n_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    if field == "head_dim":
        return head_dim
    if field == "num_key_value_heads":
        return getattr(config, field, None) or n_heads
    if field == "intermediate_size":
        return FAMILIES[config.model_type].setting(config, field) or 4 * config.hidden_size
    rotary = dict(_rotary(config))
    if field == "rotary width":
        factors = [part.get("partial_rotary_factor") or 1.0 for part in rotary.values()]
        return int(head_dim * factors[0]) if factors else None
    if field == "rope_theta":
        return rotary.get("full_attention", {}).get("rope_theta")
    if field == "rope_theta of sliding attention":
        return rotary.get("sliding_attention", {}).get("rope_theta")
    return getattr(config, field, None)


def _rotary(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rotary parameters of each type of layer; "full_attention" where all layers share them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {name: part for name, part in parameters.items() if isinstance(part, dict)}
    yield from (nested or ({"full_attention": parameters} if parameters else {})).items()


def _set(config: Any, field: str, value: Any) -> bool:
    """Set a field; False where the config has none."""
    if field in ("rope_theta", "rope_theta of sliding attention"):
        kind = "full_attention" if field == "rope_theta" else "sliding_attention"
        part = dict(_rotary(config)).get(kind)
        if part is None:
            return False
        part["rope_theta"] = value
        return True
    family = FAMILIES[config.model_type]
    name = family.fields.get(field, field)
    if not hasattr(config, name) or isinstance(value, list):
        return False
    if field == "sliding_window" and family.sliding == "by_layer" and "sliding_attention" not in config.layer_types:
        return False
    setattr(config, name, value or None if field == "sliding_window" else value)
    return True


def take_split(settings: Mapping[str, Any], tokenizer: Any, gguf: Path) -> None:
    """Set the pre-tokenizer that the file names; transformers uses GPT-2's for names that it does not know.

    Raises: UnsupportedModel: the way is not known here either.
    """
    model, split = (settings.get(key) for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre"))
    if model != "gpt2" or split is None or split in LIKE_GPT2:
        return
    if split in DIGITS_APART:
        digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    elif split not in _splits_of_transformers(split):
        raise UnsupportedModel(
            f"{gguf} cuts texts into words by {split!r}, which transformers does not know when it reads GGUF: use the"
            " model's hub id"
        )


def _splits_of_transformers(split: str) -> Collection[str]:
    """Return the pre-tokenizers that transformers knows; before 5.23 it chooses them by architecture."""
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping
    except ImportError:
        return (split,)
    return getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", (split,))


def take_ends(settings: Mapping[str, Any], tokenizer: Any, generation_config: Any) -> None:
    """Add end-of-turn tokens to the stop tokens: transformers reads only the end-of-text token."""
    named = [settings[key] for key in TURN_KEYS if key in settings]
    vocab, template = tokenizer.get_vocab(), str(tokenizer.chat_template)
    named += [vocab[text] for text in TURN_ENDS if text in template and text in vocab]
    eos = generation_config.eos_token_id
    ends = [eos] if isinstance(eos, int) else list(eos or ())
    if not set(named) <= set(ends):
        generation_config.eos_token_id = list(dict.fromkeys(ends + named))
