"""Makes a model's config of a GGUF file's settings.

Every setting of the architecture must be taken by a field of the config, or say what is computed anyhow: a setting that
is left is refused, because the model would compute something else.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..core.errors import ModelNotFound, UnsupportedModel
from .config_bounds import check_values
from .families import FAMILIES, family_of
from .family import Family, GgufForm
from .gguf_reader import GgufFile

HEAD = "output.weight"
# Tensors of factors that divide the rotary frequencies: at any length, and up to or beyond the trained length.
FREQUENCY_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (FREQUENCY_FACTORS, SHORT_FACTORS, LONG_FACTORS)
THETA = 10_000.0  # Base of the rotary frequencies where a file names none.
PATTERN = 6  # Gemma 3: each sixth layer attends without a window where a file says nothing else.
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}  # llama.cpp's and transformers' values where none are given.
LAYERS_27B = 62  # Gemma 3's largest model scales its scores by the width of a head of the embedding.
MOST = 1 << 31  # Larger counts are refused before anything is made of that size.
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
NEEDED = tuple(FIELDS)[:5]
NOTES = ("tensor_data_layout", "rope.scaling.finetuned")  # Settings without effect on what the model computes.
# Settings without a config field, and their values that do not change what the model computes.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    **dict.fromkeys(("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"), (1.0,)),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0.0, 1.0)),
}
NOTHING = (0, False, "", "none")
IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
SENTENCEPIECE = {"bos_token_id": 1, "eos_token_id": 2}  # Ids that llama.cpp takes where such a file names none.
TURN_KEYS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# End-of-turn tokens of usual chat templates, for files that name none.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")


class _Settings:
    """An architecture's settings; each is taken once, by its name without the architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.path, self._left = file.path, file.own_settings()

    def take(self, name: str, default: Any = None) -> Any:
        """Return a setting; of values by layer the one that all layers share."""
        given = self._left.pop(name, default)
        return given[0] if isinstance(given, list) and given and given == given[:1] * len(given) else given

    def number(self, name: str, default: Any = None) -> Any:
        """Return a setting that is a number; a whole one if `default` is.

        Raises: UnsupportedModel: it differs by layer. ModelNotFound: it is none.
        """
        value = self.take(name, default)
        if isinstance(value, list):
            raise self.refusal(name, value)
        plain = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST
        if value is not None and not plain:
            raise ModelNotFound(f"{self.path} has the setting {name} = {_shown(value)}: download it again")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Return a setting that is a whole number above 0.

        Raises: as `number`; ModelNotFound: it is missing.
        """
        value = self.number(name, default)
        if not isinstance(value, int) or value == 0:
            raise ModelNotFound(f"{self.path} has the setting {name} = {_shown(value)}: download it again")
        return value

    def refusal(self, name: str, value: Any) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.path} has the setting {name} = {_shown(value)}, for which its architecture has no place here: use"
            " the model's hub id"
        )

    def refuse_left(self) -> None:
        """Raises: UnsupportedModel: a setting was not taken, and changes what the model computes."""
        for name in list(self._left):
            value = self.take(name)
            if name not in NOTES and value not in NEUTRAL.get(name, NOTHING):
                raise self.refusal(name, value)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 and text.isprintable() else ascii(text[:40])


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the content of a config.json for transformers, of weights that keep the file's codes.

    Raises: UnsupportedModel: its architecture, or a setting for which the config has no place. ModelNotFound: a
            setting is missing, or not what it should be.
    """
    model_type, family, form = _family(file)
    if not file.tensors:
        raise ModelNotFound(f"{file.path} has no tensors: download it again")
    settings = _Settings(file)
    given = {FIELDS[name]: settings.size(name) for name in NEEDED}
    vocab = file.settings.get("tokenizer.ggml.tokens")
    given["vocab_size"] = settings.size("vocab_size", len(vocab) if isinstance(vocab, list) else None)
    check_values(given, file.path)
    config: dict[str, Any] = {family.fields.get(name, name): value for name, value in given.items()}
    for name, field in form.fields.items():
        if (value := settings.number(name)) is not None:
            config[field] = value
    if family.rotary is not None:
        heads = given["num_attention_heads"]
        head_dim = _head_dim(settings, form, given["hidden_size"], heads)
        config |= {"head_dim": head_dim} if form.has_head_dim else {}
        config["num_key_value_heads"] = settings.size("attention.head_count_kv", heads)
        rotation = _rotation(file, settings, form, head_dim, given["max_position_embeddings"])
        config["rope_parameters"] = rotation
        if (
            "original_max_position_embeddings" in rotation
        ):  # Phi-3's config also has it outside, which takes precedence.
            config["original_max_position_embeddings"] = rotation["original_max_position_embeddings"]
        if family.rotary_by_type:
            config["rope_parameters"] = {
                "full_attention": rotation,
                "sliding_attention": _rotation_in_windows(settings),
            }
            config |= _windows_by_layer(settings, given["num_hidden_layers"])
            is_27b = given["num_hidden_layers"] == LAYERS_27B
            config["query_pre_attn_scalar"] = given["hidden_size"] // heads if is_27b else head_dim
        elif family.sliding == "all":
            config["sliding_window"] = settings.number("attention.sliding_window") or None
    settings.refuse_left()
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


def _family(file: GgufFile) -> tuple[str, Family, GgufForm]:
    for model_type, family in FAMILIES.items():
        if family.gguf is not None and family.gguf.architecture == file.architecture:
            return model_type, family, family.gguf
    known = sorted({family.gguf.architecture for family in FAMILIES.values() if family.gguf is not None})
    raise UnsupportedModel(
        f"{file.path} is of the architecture {_shown(file.architecture)}, which is not supported: use one of"
        f" {', '.join(known)}"
    )


def _head_dim(settings: _Settings, form: GgufForm, hidden: int, heads: int) -> int:
    """Return how many values a head has; keys and values have as many."""
    usual = hidden // heads
    size = settings.size("attention.key_length", usual)
    of_values = settings.size("attention.value_length", size)
    if of_values != size:
        raise settings.refusal("attention.value_length", of_values)
    if size != usual and not form.has_head_dim:
        raise settings.refusal("attention.key_length", size)
    return size


def _rotation(file: GgufFile, settings: _Settings, form: GgufForm, head_dim: int, context: int) -> dict[str, Any]:
    """Return transformers' rotary parameters; `context`: positions that the file says the model has."""
    parameters: dict[str, Any] = {"rope_theta": float(settings.number("rope.freq_base", THETA))}
    width = settings.size("rope.dimension_count", head_dim)
    if width != head_dim:
        parameters["partial_rotary_factor"] = width / head_dim
        if not form.rotates_in_part or int(head_dim * parameters["partial_rotary_factor"]) != width:
            raise settings.refusal("rope.dimension_count", width)
    kind = settings.take("rope.scaling.type") or "none"
    older = settings.number("rope.scale_linear", 1.0)
    factor = settings.number("rope.scaling.factor", older) or 1.0
    trained = settings.number("rope.scaling.original_context_length", context) or context
    attention = settings.number("rope.scaling.attn_factor", 1.0) or 1.0
    factors = {name: _factors(file, name, width) for name in FACTORS if name in file.tensors}
    is_scaled = any(value != 1.0 for values in factors.values() for value in values)
    if kind == "none":  # Files name no type where tensors hold the factors, and did not before there were types.
        kind = "longrope" if is_scaled else "linear" if factor != 1.0 else "default"
    scaling: dict[str, Any] = {}
    if kind == "longrope" and is_scaled:
        scaling = {**_long_rotation(file, factors, trained, context), "attention_factor": attention}
    elif kind == "linear":
        scaling = {"factor": factor}
    elif kind == "yarn":
        scaling = {"factor": factor, "original_max_position_embeddings": trained}
        scaling |= {name: settings.number(f"rope.scaling.yarn_{name}", usual) for name, usual in YARN.items()}
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    if (is_scaled or kind == "longrope") and "long_factor" not in scaling:
        raise settings.refusal("rope.scaling.type", kind)
    if kind not in ("default", *form.scalings):
        raise settings.refusal("rope.scaling.type", kind)
    if attention != 1.0 and "attention_factor" not in scaling:
        raise settings.refusal("rope.scaling.attn_factor", attention)
    return {"rope_type": kind, **parameters, **scaling}


def _long_rotation(file: GgufFile, factors: dict[str, list[float]], trained: int, context: int) -> dict[str, Any]:
    """Return parameters of the scaling by factors, which transformers calls "longrope".

    Llama 3's factors hold at any length: they are those of any context up to the model's own, and of longer ones.
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


def _factors(file: GgufFile, name: str, width: int) -> list[float]:
    tensor = file.tensors[name]
    if tensor.type_name != "F32" or tensor.shape != (width // 2,):
        raise ModelNotFound(
            f"{name} in {file.path} is {tensor.type_name} of the shape {list(tensor.shape)}, and a model of its"
            f" settings has F32 of [{width // 2}] there: download it again"
        )
    values = tensor.data.view(np.dtype("<f4"))
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ModelNotFound(f"{name} in {file.path} has values that are no factors: download it again")
    return [float(value) for value in values]


def _rotation_in_windows(settings: _Settings) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": float(settings.number("rope.freq_base_swa", THETA))}


def _windows_by_layer(settings: _Settings, n_layers: int) -> dict[str, Any]:
    """Return the window and the type of each layer; without a window all layers see everything before them."""
    window = settings.number("attention.sliding_window") or None
    pattern = settings.take("attention.sliding_window_pattern", PATTERN)
    if isinstance(pattern, bool):  # All layers of a list said the same.
        pattern = [pattern] * n_layers
    if isinstance(pattern, int):
        pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(n_layers)]
    if not isinstance(pattern, list) or len(pattern) != n_layers:
        raise settings.refusal("attention.sliding_window_pattern", pattern)
    slides = [window is not None and bool(has_window) for has_window in pattern]
    types = ["sliding_attention" if sliding else "full_attention" for sliding in slides]
    return {"sliding_window": window, "layer_types": types}


def token_ids(file: GgufFile) -> dict[str, int | None]:
    """Return the ids of special tokens, by transformers' names; None where the file names none.

    Raises: ModelNotFound: one is no token of the file.
    """
    usual = SENTENCEPIECE if file.settings.get("tokenizer.ggml.model") == "llama" else {}
    given = {name: file.settings.get(key, usual.get(name)) for name, key in IDS.items()}
    n_tokens = len(file.settings.get("tokenizer.ggml.tokens", ()))
    for name, number in given.items():
        if number is not None and not (type(number) is int and 0 <= number < n_tokens):
            raise ModelNotFound(
                f"{file.path} has the setting {IDS[name]} = {_shown(number)}, which is none of its {n_tokens} tokens:"
                " download it again"
            )
    return given


def ends_of(file: GgufFile) -> int | list[int] | None:
    """Return the tokens that end a text or a turn, of which the key of the end names only one."""
    tokens, template = file.settings["tokenizer.ggml.tokens"], str(file.settings.get("tokenizer.chat_template"))
    ids = [token_ids(file)["eos_token_id"], *(file.settings.get(key) for key in TURN_KEYS)]
    ids += [tokens.index(text) for text in TURN_ENDS if text in template and text in tokens]
    ends = list(dict.fromkeys(number for number in ids if type(number) is int and 0 <= number < len(tokens)))
    return ends if len(ends) > 1 else next(iter(ends), None)
