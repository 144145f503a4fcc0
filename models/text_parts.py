"""Finds the text part of a multimodal checkpoint: the values of its config, and the names of its tensors.

Qwen-VL's rotary embedding has several axes, and a token of text has the same position on all of them. So the text part
of such a model computes the same as Qwen, and is loaded as that family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..core.errors import UnsupportedModel

# Multimodal model types, and for each the families of text parts by the text part's own type; the first of several is
# the default.
MULTIMODAL: dict[str, Mapping[str, str]] = {
    "gemma3": {"gemma3_text": "gemma3_text"},
    "gemma4": {"gemma4_text": "gemma4_text"},
    "gemma4_unified": {"gemma4_unified_text": "gemma4_unified_text"},
    "mistral3": {"mistral": "mistral", "ministral3": "ministral3", "mistral4": "mistral4"},
    "qwen2_vl": {"qwen2_vl_text": "qwen2"},
    "qwen2_5_vl": {"qwen2_5_vl_text": "qwen2"},
    "qwen3_vl": {"qwen3_vl_text": "qwen3"},
    "qwen3_vl_moe": {"qwen3_vl_moe_text": "qwen3_moe"},
    "glm4v_moe": {"glm4v_moe_text": "glm4_moe"},
    "kimi_k25": {"deepseek_v3": "deepseek_v3", "kimi_k2": "deepseek_v3"},
    "llama4": {"llama4_text": "llama4_text"},
    "qwen3_5": {"qwen3_5_text": "qwen3_5_text"},
    "qwen3_5_moe": {"qwen3_5_moe_text": "qwen3_5_moe_text"},
}
# Names of models of these types.
NAMES = {
    "gemma3": "Gemma 3 4B, 12B, 27B",
    "gemma4": "Gemma 4 E2B, E4B, 26B-A4B, 31B",
    "gemma4_unified": "Gemma 4 12B",
    "mistral3": "Mistral Small 3.1, 3.2 and 4, Ministral 3",
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL 30B-A3B and 235B-A22B",
    "glm4v_moe": "GLM-4.5V, GLM-4.6V",
    "kimi_k25": "Kimi K2.5",
    "llama4": "Llama 4 Scout and Maverick",
    "qwen3_5": "Qwen3.5, Qwen3.6, Qwen3.8",
    "qwen3_5_moe": "Qwen3.5 MoE, Qwen3.6 MoE",
}
# Fields of a family's config that have a fixed value in a type's text part.
CONSTANTS: dict[str, dict[str, Any]] = {"qwen3_vl_moe": {"norm_topk_prob": True}}
FLAT = ("qwen2_vl", "qwen2_5_vl")  # Older configs of these mix the values of the text part with the others.
# Config fields that the whole model has and that its text part needs; they take precedence over the text part's own.
OF_ALL = (
    *("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config", "compression_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
# Rotary parameters that concern only images, and the older name of "rope_type", which has already been read.
OF_IMAGES = ("mrope_section", "mrope_interleaved", "type")
HEAD = "lm_head.weight"
_OTHER_PARTS = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|vision_embedder|multi_modal_projector|mm_projector|audio_tower"
    r"|embed_vision|embed_audio)\."
)
_TEXT_PREFIX = re.compile(r"(model\.)?language_model\.(model\.)?")


def text_name(stored: str) -> str | None:
    """Return a tensor's name in the text part; None: it belongs to another part.

    Older and newer versions of transformers write "language_model.model.", "model.language_model." or "model.".
    """
    if _OTHER_PARTS.match(stored):
        return None
    name = _TEXT_PREFIX.sub("", stored, count=1) if _TEXT_PREFIX.match(stored) else stored
    return name if name == stored or name.startswith("lm_head.") else f"model.{name}"


def whole_names(name: str) -> tuple[str, ...]:
    """Return the names that a module of the text part may have in the whole model, which `text_name` reads."""
    inner = name.removeprefix("model.")
    return name, f"model.language_model.{inner}", f"language_model.model.{inner}"


def text_values(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the values of a multimodal config for its text part; `model_type` is the text part's own.

    Args:   path: the config's, for messages.
    Raises: UnsupportedModel: the type of the text part is not supported.
    """
    outer = values["model_type"]
    types = MULTIMODAL[outer]
    inner = values.get("text_config")
    if inner is None and outer in FLAT:
        inner = {key: value for key, value in values.items() if key != "model_type"}
    if not isinstance(inner, dict):
        raise UnsupportedModel(f"{path} has no text_config, from which a {outer} model is read: copy it again")
    text_type = inner.get("model_type", next(iter(types)))
    if not isinstance(text_type, str) or text_type not in types:
        raise UnsupportedModel(
            f"{path} has a text part of the type {text_type!r}, which is not supported in a {outer} model: use one of"
            f" {', '.join(types)}"
        )
    of_all = {key: values[key] for key in OF_ALL if values.get(key) is not None}
    return {**inner, **of_all, "model_type": text_type}


def text_config(values: Mapping[str, Any], outer: str) -> Any:
    """Return transformers' config of the family for the values that `text_values` returned."""
    from transformers import CONFIG_MAPPING, AutoConfig

    family = MULTIMODAL[outer][values["model_type"]]
    # Let the type's own class fill in its defaults first. Kimi K2 has no class of its own, so the family's is used.
    values = values if values["model_type"] in CONFIG_MAPPING else {**values, "model_type": family}
    filled = AutoConfig.for_model(**values).to_dict()
    config_class: Any = CONFIG_MAPPING[family]
    # Qwen3 MoE's config accepts head_dim without declaring it. A declared field may have another attribute name.
    names = {
        "head_dim",
        "per_layer_config",
        *config_class.attribute_map.values(),
        *(field.name for field in fields(config_class)),
    }
    settings = {name: value for name, value in filled.items() if name in names}
    rotation = settings["rope_parameters"]
    settings["rope_parameters"] = {key: value for key, value in rotation.items() if key not in OF_IMAGES}
    config = AutoConfig.for_model(family, **settings, **CONSTANTS.get(outer, {}))
    for key in ("quantization_config", "compression_config"):
        if key in values:
            setattr(config, key, values[key])
    return config
