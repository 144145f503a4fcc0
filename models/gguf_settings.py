"""Makes a model's config from a GGUF file's settings.

Every setting of the architecture must become a field of the config, or have a value without effect. A file with any
other setting is refused, because the model would compute something else.
"""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..core.errors import ModelNotFound, UnsupportedModel
from .config_bounds import check_values
from .families import CHUNKS, FAMILIES, SLIDING, family_of
from .family import Family
from .gguf_form import GgufForm
from .gguf_forms import FORMS
from .gguf_layers import layers_of
from .gguf_reader import GgufFile, Texts
from .gguf_values import KV_HEADS, MLP_WIDTH, PATTERN, OwnSettings, shown

HEAD = "output.weight"
# Tensors of factors that divide rotary frequencies: at any length, up to the trained length, and beyond it.
FREQUENCY_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
# Settings for the layers with another mixer than attention: a list, or the n of "all but each n-th layer".
RECURRENT, INTERVAL = "attention.recurrent_layers", "full_attention_interval"
WINDOW = "attention.sliding_window"
FACTORS = (FREQUENCY_FACTORS, SHORT_FACTORS, LONG_FACTORS)
UNBOUNDED = 1e29  # A larger factor means that a pair is not rotated: its angle is 0 at all positions.
THETA = 10_000.0  # Default base of rotary frequencies.
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}  # llama.cpp's and transformers' defaults.
# GGUF settings common to all architectures, by name without the architecture's prefix, and their config fields.
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    MLP_WIDTH: "intermediate_size",
    "attention.head_count": "num_attention_heads",
    KV_HEADS: "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
NEEDED = tuple(FIELDS)[:5]
COUNTS = {"leading_dense_block_count": 0}  # Settings for which 0 is a valid value, and their defaults.
NEXT_LAYERS = "nextn_predict_layers"  # Number of multi-token-prediction layers after the model's own.
LAYER_NUMBER = re.compile(r"^blk\.\d+\.")  # Prefix of the names of a layer's tensors.
IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
SENTENCEPIECE = {"bos_token_id": 1, "eos_token_id": 2}  # llama.cpp's default ids for such a tokenizer.
TURN_KEYS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
OLLAMA_ENDS = "tokenizer.ggml.eos_token_ids"  # All end tokens, in Ollama's files.
SUPPRESSED = "tokenizer.ggml.suppress_tokens"  # Tokens that are never generated.
# End-of-turn tokens of usual chat templates, for files that name none.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end|>", "<end_of_turn>", "<turn|>")


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the content of a config.json for transformers; it says that weights keep the file's codes.

    Raises: UnsupportedModel: the architecture is not supported, or the config has no field for a setting.
            ModelNotFound: a setting is missing or invalid.
    """
    model_type, form = form_of(file)
    family = FAMILIES[model_type]
    if not file.tensors:
        raise ModelNotFound(f"{file.path} has no tensors: download it again")
    settings = OwnSettings(file)
    by_type = layers_of(file, settings) if form.by_type else {}
    # A model with experts in all layers may have no width of a plain MLP.
    usual = {MLP_WIDTH: file.own_settings().get("expert_feed_forward_length")}
    needed = NEEDED if form.ignored.keys().isdisjoint(NEEDED) else [name for name in NEEDED if name not in form.ignored]
    check_values({FIELDS["block_count"]: settings.size("block_count")}, file.path)  # Before lists of this length.
    # Multi-token-prediction layers come last, and block_count includes them.
    n_further = min(int(settings.number(NEXT_LAYERS, 0)), settings.size("block_count") - 1)
    n_layers = settings.size("block_count") - n_further
    layer_types = _layer_types(settings, family, form, n_layers, n_further)
    values = {FIELDS[name]: settings.size(name, usual.get(name)) for name in needed}
    vocab = file.settings.get("tokenizer.ggml.tokens")
    values["vocab_size"] = settings.size("vocab_size", len(vocab) if isinstance(vocab, Texts) else None)
    check_values(values, file.path)
    values["num_hidden_layers"] = n_layers
    heads = values.get("num_attention_heads", 1)
    if family.rotary is not None or form.mixed_by in ("kv_heads", "sub_layers"):
        n_kv_heads = settings.size(KV_HEADS, heads)  # With latent attention, files say 1 or the number of heads.
        values["num_key_value_heads"] = n_kv_heads if family.latents is None else heads
    config: dict[str, Any] = {
        **form.constants,
        **{family.fields.get(name, name): value for name, value in values.items()},
    }
    taken: dict[str, Any] = {}
    for name, field in form.fields.items():
        value = settings.number(name, COUNTS.get(name))
        if (value or name in COUNTS) and taken.setdefault(field, value) != value:
            raise settings.refusal(name, value)  # Two settings of the same number differ.
    config |= taken
    config |= {field: settings.size(name) for name, field in form.sizes.items()}
    for field, (name, other) in form.quotients.items():
        value, divisor = settings.size(name), settings.size(other)
        if value % divisor:
            raise settings.refusal(name, value)
        config[field] = value // divisor
    of_layers = {LAYER_NUMBER.sub("", name, count=1) for name in file.tensors}
    for field, (tensor, if_there, if_not) in form.flags.items():
        is_there = not of_layers.isdisjoint((tensor, tensor.replace("attn_q.", "attn_qkv.")))
        config[field] = if_there if is_there else if_not
    config |= {field: settings.choice(name, choices) for name, (field, choices) in form.choices.items()}
    for tensor, fields in form.periods.items():
        config |= zip(fields, _period(file, tensor, n_layers), strict=True)
    for name in form.by_layer.values():
        layer_numbers(file, name, n_layers)
    head_dim = 0
    if family.latents is not None:
        config |= _sizes_of_latents(settings)
        head_dim = config["qk_rope_head_dim"]
    elif family.rotary is not None or form.has_head_dim:
        head_dim = _head_dim(settings, form, values["hidden_size"], heads)
    config |= {"head_dim": head_dim} if form.has_head_dim else {}
    if family.rotary is not None:
        if form.score_scale is not None:
            config[form.score_scale] = settings.number("attention.scale") or head_dim**-0.5
        if form.unnormed is not None:
            config["use_qk_norm"] = config.get("num_local_experts") != form.unnormed
        if form.wide_scores is not None:
            config["query_pre_attn_scalar"] = (
                values["hidden_size"] // heads if n_layers == form.wide_scores else head_dim
            )
        config |= _positions(file, settings, family, form, head_dim, values["max_position_embeddings"])
        config |= _windows(settings, family, form, n_layers, n_further)
    if form.lists_layers or (form.mixed_by is not None and not form.periods):
        config[family.fields.get("layer_types", "layer_types")] = layer_types
    config |= by_type
    settings.refuse_left(form)
    check_values(config, file.path)
    family_of(SimpleNamespace(model_type=model_type, **config))
    bits = -(-8 * sum(tensor.data.nbytes for tensor in file.tensors.values()) // file.n_values)
    return {
        "model_type": model_type,
        **config,
        **token_ids(file),
        "tie_word_embeddings": HEAD not in file.tensors,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "gguf", "bits": bits},
    }


def form_of(file: GgufFile) -> tuple[str, GgufForm]:
    """Return the model type as which a file is loaded, and its form: that with most settings `when` that the file has.

    Raises: UnsupportedModel: there is none.
    """
    settings = file.own_settings()
    fitting = [
        (form.model_type or model_type, form)
        for model_type, form in FORMS.items()
        if file.architecture in form.architectures and all(settings.get(name) for name in form.when)
    ]
    if fitting:
        return max(fitting, key=lambda item: len(item[1].when))
    architectures = sorted({architecture for form in FORMS.values() for architecture in form.architectures})
    raise UnsupportedModel(
        f"{file.path} is of the architecture {shown(file.architecture)}, which is not supported: use one of"
        f" {', '.join(architectures)}"
    )


def _layer_types(settings: OwnSettings, family: Family, form: GgufForm, n_layers: int, n_further: int) -> list[str]:
    """Return each layer's token mixer: attention, or the family's other mixer."""
    mixed = [False] * n_layers
    if form.mixed_by == "sub_layers":
        widths, mlp = settings.take(MLP_WIDTH), "moe" if settings.take("expert_count") else "mlp"
        state = family.mixer.layer_type if family.mixer else ""
        kinds = {(False, True): "full_attention", (True, False): mlp, (True, True): state}
        without = [settings.layers_without(name, n_layers, n_further) for name in (KV_HEADS, MLP_WIDTH)]
        if not kinds.keys() >= set(layers := list(zip(*without, strict=True))):
            raise settings.refusal(MLP_WIDTH, widths)  # A layer has both attention and an MLP.
        return [kinds[layer] for layer in layers]
    if form.mixed_by == "kv_heads":
        mixed = settings.layers_without(KV_HEADS, n_layers)
    elif form.mixed_by == "interval":
        interval = settings.size(INTERVAL, 4)
        listed = settings.take(RECURRENT, [(layer + 1) % interval != 0 for layer in range(n_layers)])
        if not isinstance(listed, list):  # `take` returns one value if all layers have the same.
            listed = [listed] * n_layers
        if len(listed) not in (n_layers, n_layers + n_further):
            raise settings.refusal(RECURRENT, listed)
        mixed = [bool(flag) for flag in listed[:n_layers]]
    return [family.mixer.layer_type if family.mixer and other else "full_attention" for other in mixed]


def _period(file: GgufFile, tensor: str, n_layers: int) -> tuple[int, int]:
    """Return the period of the layers that have a tensor, and the index of the first one.

    Raises: UnsupportedModel: these layers are not periodic.
    """
    having = [layer for layer in range(n_layers) if f"blk.{layer}.{tensor}" in file.tensors]
    first = having[0] if having else n_layers
    period = having[1] - first if len(having) > 1 else n_layers + 1
    if having != list(range(first, n_layers, period)) or first >= period:
        raise UnsupportedModel(
            f"{file.path} has {shown(tensor)} in the layers {shown(having)}, which do not follow at equal distances:"
            " use the model's hub id"
        )
    return period, first


def _head_dim(settings: OwnSettings, form: GgufForm, hidden: int, heads: int) -> int:
    """Return the width of a head, which is that of keys and of values."""
    usual = hidden // heads
    size = settings.size("attention.key_length", usual)
    of_values = settings.size("attention.value_length", size)
    if of_values != size:
        raise settings.refusal("attention.value_length", of_values)
    if size != usual and not form.has_head_dim:
        raise settings.refusal("attention.key_length", size)
    return size


def _sizes_of_latents(settings: OwnSettings) -> dict[str, int]:
    """Return the config's sizes of latent attention; older files have the sizes of keys and values instead."""
    width, of_values = (
        settings.size(f"attention.{name}_length_mla", settings.size(f"attention.{name}_length"))
        for name in ("key", "value")
    )
    rotary = settings.size("rope.dimension_count")
    if rotary >= width:
        raise settings.refusal("rope.dimension_count", rotary)
    return {"qk_rope_head_dim": rotary, "qk_nope_head_dim": width - rotary, "v_head_dim": of_values}


def _positions(
    file: GgufFile, settings: OwnSettings, family: Family, form: GgufForm, head_dim: int, context: int
) -> dict[str, Any]:
    """Return the config's fields for positions; `context`: the number of positions in the file's settings."""
    rotation = _rotation(file, settings, family, form, head_dim, context)
    base = settings.number("rope.freq_base_swa", form.window_base or rotation["rope_theta"])
    if not family.rotary_by_type and base != rotation["rope_theta"]:
        raise settings.refusal("rope.freq_base_swa", base)
    fields: dict[str, Any] = {"rope_parameters": rotation}
    if family.rotary_by_type:
        in_windows = {"rope_type": "default", "rope_theta": float(base)}
        fields["rope_parameters"] = {"full_attention": rotation, "sliding_attention": in_windows}
    if "original_max_position_embeddings" in rotation:  # Phi-3's config also has it at top level, with precedence.
        fields["original_max_position_embeddings"] = rotation["original_max_position_embeddings"]
    return fields


def _rotation(
    file: GgufFile, settings: OwnSettings, family: Family, form: GgufForm, head_dim: int, context: int
) -> dict[str, Any]:
    """Return transformers' rotary parameters for layers without a window."""
    parameters: dict[str, Any] = {"rope_theta": float(settings.number("rope.freq_base", THETA))}
    width = settings.size("rope.dimension_count", head_dim)
    if form.rotates_in_part:  # Also if all of a head is rotated, because the config's default is a part.
        parameters["partial_rotary_factor"] = width / head_dim
    if int(head_dim * parameters.get("partial_rotary_factor", 1.0)) != width:
        raise settings.refusal("rope.dimension_count", width)
    if "proportional" in form.scalings:
        return {"rope_type": "proportional", **parameters, "partial_rotary_factor": _rotated_share(file, width)}
    kind = settings.take("rope.scaling.type") or "none"
    older = settings.number("rope.scale_linear", 1.0)
    factor = settings.number("rope.scaling.factor", older) or 1.0
    trained = settings.number("rope.scaling.original_context_length", context) or context
    attention = settings.number("rope.scaling.attn_factor", 1.0) or 1.0
    damping = settings.number("rope.scaling.yarn_log_multiplier", 0.0) if family.scales_queries == "rotated" else 0.0
    factors = {name: _factors(file, name, width) for name in FACTORS if name in file.tensors}
    is_scaled = any(value != 1.0 for values in factors.values() for value in values)
    if kind == "none":  # Files with tensors of factors name no type, and neither do old files.
        kind = "longrope" if is_scaled else "linear" if factor != 1.0 else "default"
    scaling: dict[str, Any] = {}
    if kind == "longrope" and is_scaled:
        scaling = {**_long_rotation(file, factors, trained, context), "attention_factor": attention}
    elif kind == "linear":
        scaling = {"factor": factor}
    elif kind == "yarn":
        scaling = {"factor": factor, "original_max_position_embeddings": trained}
        scaling |= {name: settings.number(f"rope.scaling.yarn_{name}", usual) for name, usual in YARN.items()}
        if family.latents is None:
            scaling["attention_factor"] = attention * _magnitude(factor, 1.0) / _magnitude(factor, damping)
        elif log_multiplier := settings.number("rope.scaling.yarn_log_multiplier", 0.0):
            # The factor only applies to scores: that of rotated values cancels with its inverse.
            scaling["mscale"] = scaling["mscale_all_dim"] = round(log_multiplier / 0.1, 6)
    if (is_scaled or kind == "longrope") and "long_factor" not in scaling:
        raise settings.refusal("rope.scaling.type", kind)
    if kind not in ("default", *form.scalings):
        raise settings.refusal("rope.scaling.type", kind)
    if attention != 1.0 and "attention_factor" not in scaling:
        raise settings.refusal("rope.scaling.attn_factor", attention)
    if family.scales_queries == "rotated":
        scaling |= {"llama_4_scaling_beta": float(settings.number("attention.temperature_scale", 0.0))}
        scaling["original_max_position_embeddings"] = trained
        length = settings.number("attention.temperature_length", trained) or trained
        if length != trained:
            raise settings.refusal("attention.temperature_length", length)
    return {"rope_type": kind, **parameters, **scaling}


def _magnitude(factor: float, scale: float) -> float:
    """Return YaRN's factor of rotated values (arXiv:2309.00071), for `factor` times the trained positions."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _long_rotation(file: GgufFile, factors: dict[str, list[float]], trained: int, context: int) -> dict[str, Any]:
    """Return the parameters of scaling by factors, which transformers calls "longrope".

    Llama 3's factors apply at any length, so they serve as both the short and the long factors.
    """
    if FREQUENCY_FACTORS in factors:
        short = long = factors[FREQUENCY_FACTORS]
        trained = context
    elif SHORT_FACTORS in factors and LONG_FACTORS in factors:
        short, long = factors[SHORT_FACTORS], factors[LONG_FACTORS]
    else:
        raise ModelNotFound(f"{file.path} lacks {SHORT_FACTORS} or {LONG_FACTORS}: download it again")
    return {
        "short_factor": short,
        "long_factor": long,
        "factor": context / trained,
        "original_max_position_embeddings": trained,
    }


def _rotated_share(file: GgufFile, width: int) -> float:
    """Return the share of a head's pairs that is rotated: the first ones, whose factor is 1."""
    factors = _factors(file, FREQUENCY_FACTORS, width)
    n_rotated = factors.count(1.0)
    if any(factor != 1.0 for factor in factors[:n_rotated]) or any(
        factor < UNBOUNDED for factor in factors[n_rotated:]
    ):
        raise UnsupportedModel(
            f"{FREQUENCY_FACTORS} in {file.path} has factors between those of pairs that are rotated and of those that"
            " are not: use the model's hub id"
        )
    return n_rotated / len(factors)


def _factors(file: GgufFile, name: str, width: int) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise ModelNotFound(f"{file.path} lacks {name}: download it again")
    if tensor.type_name != "F32" or tensor.shape != (width // 2,):
        raise ModelNotFound(
            f"{name} in {file.path} is {tensor.type_name} of the shape {list(tensor.shape)}, and a model of its"
            f" settings has F32 of [{width // 2}] there: download it again"
        )
    values = tensor.data.view(np.dtype("<f4"))
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ModelNotFound(f"{name} in {file.path} has values that are no factors: download it again")
    return [float(value) for value in values]


def _windows(settings: OwnSettings, family: Family, form: GgufForm, n_layers: int, n_further: int) -> dict[str, Any]:
    """Return the config's fields for the window and, if it differs by layer, the layers' types.

    Args: n_further: number of layers in the file after the model's own.
    """
    if family.sliding == "none":
        return {}
    in_chunks = family.sliding == "chunks"
    window = settings.number(WINDOW, form.window) or None
    fields: dict[str, Any] = {"attention_chunk_size" if in_chunks else "sliding_window": window}
    if form.window_flag is not None:
        fields[form.window_flag] = window is not None
    if family.sliding == "all":
        return fields
    pattern = settings.take(PATTERN, form.window_period)
    if pattern is None:
        if window is not None:
            raise settings.refusal(WINDOW, window)
        pattern = False
    if isinstance(pattern, bool):  # `take` returns one value if all layers have the same.
        pattern = [pattern] * n_layers
    if isinstance(pattern, int):
        pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(n_layers)]
    if isinstance(pattern, list) and len(pattern) == n_layers + n_further:
        pattern = pattern[:n_layers]
    if not isinstance(pattern, list) or len(pattern) != n_layers:
        raise settings.refusal(PATTERN, pattern)
    slides = [window is not None and bool(has_window) for has_window in pattern]
    has_window = CHUNKS if in_chunks else SLIDING
    if in_chunks:  # The other layers are not rotated.
        fields["no_rope_layers"] = [int(sliding or window is None) for sliding in slides]
    return fields | {"layer_types": [has_window if sliding else "full_attention" for sliding in slides]}


def layer_numbers(file: GgufFile, name: str, n_layers: int) -> list[float]:
    """Return each layer's number in a setting (full name), which has a number for each layer or one for all.

    Raises: ModelNotFound: the setting has other values, or is missing.
    """
    setting = file.settings.get(name)
    numbers: list[Any] = setting if isinstance(setting, list) else [setting] * n_layers
    are_numbers = all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
    if len(numbers) != n_layers or not are_numbers:
        raise ModelNotFound(
            f"{file.path} has the setting {name} = {shown(setting)}, and needs a number for each of {n_layers} layers:"
            " download it again"
        )
    return [float(number) for number in numbers]


def token_ids(file: GgufFile) -> dict[str, int | None]:
    """Return the ids of special tokens by transformers' names; None: the file does not name it.

    Raises: ModelNotFound: an id is not that of a token.
    """
    usual = SENTENCEPIECE if file.settings.get("tokenizer.ggml.model") == "llama" else {}
    ids = {name: file.settings.get(key, usual.get(name)) for name, key in IDS.items()}
    n_tokens = len(file.settings.get("tokenizer.ggml.tokens", ()))
    for name, number in ids.items():
        if number is not None and not (type(number) is int and 0 <= number < n_tokens):
            raise ModelNotFound(
                f"{file.path} has the setting {IDS[name]} = {shown(number)}, which is none of its {n_tokens} tokens:"
                " download it again"
            )
    return ids


def ends_of(file: GgufFile) -> int | list[int] | None:
    """Return the tokens that end a text or a turn; the setting for the end of a text names only one of them."""
    tokens, template = file.settings["tokenizer.ggml.tokens"], str(file.settings.get("tokenizer.chat_template"))
    listed = file.settings.get(OLLAMA_ENDS)
    ids = [token_ids(file)["eos_token_id"], *(file.settings.get(key) for key in TURN_KEYS)]
    ids += listed if isinstance(listed, list) else []
    ids += [tokens.index(text) for text in TURN_ENDS if text in template and text in tokens]
    ends = list(dict.fromkeys(number for number in ids if type(number) is int and 0 <= number < len(tokens)))
    return ends if len(ends) > 1 else next(iter(ends), None)
