"""Random tiny multimodal models, and their checkpoints in the spellings that transformers has written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from families import DELTA, GEMMA4, GEMMA4_KEYS, GROUPED, LATENT, WINDOW
from safetensors.torch import save_file
from tiny_files import save_words
from torch import Tensor

_LAYERS: dict[str, Any] = dict(hidden_size=16, intermediate_size=16)
_IMAGES: dict[str, Any] = dict(**_LAYERS, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
_GEMMA4_IMAGES: dict[str, Any] = dict(
    **_LAYERS, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8, patch_size=4
)
_QWEN_IMAGES: dict[str, Any] = dict(depth=1, num_heads=2, patch_size=4)

_ROUTED: dict[str, Any] = dict(
    n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1
)
_YARN: dict[str, Any] = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=4.0,
    original_max_position_embeddings=16,
    llama_4_scaling_beta=0.3,
)


def _axes(*section: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **more}


# Model type (and the text part's, where it is not the usual one) -> class of transformers, values of the text part,
# values of the vision tower.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {
            **GROUPED,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {"model_type": "siglip_vision_model", **_IMAGES},
    ),
    "gemma4": ("Gemma4", {**GROUPED, **GEMMA4}, {"model_type": "gemma4_vision", **_GEMMA4_IMAGES}),
    "gemma4_unified": (
        "Gemma4Unified",
        {**GROUPED, **GEMMA4_KEYS},
        {"model_type": "gemma4_unified_vision", "patch_size": 4, "mm_embed_dim": 16, "output_proj_dims": 32},
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", **GROUPED, "head_dim": 16, "sliding_window": None},
        {"model_type": "pixtral", **_IMAGES, "head_dim": 8},
    ),
    "mistral3:ministral3": (
        "Mistral3",
        {
            "model_type": "ministral3",
            **GROUPED,
            "head_dim": 16,
            "rope_parameters": dict(_YARN),
        },
        {"model_type": "pixtral", **_IMAGES, "head_dim": 8},
    ),
    "mistral3:mistral4": (
        "Mistral3",
        {
            **{**GROUPED, **LATENT, **_ROUTED, "model_type": "mistral4", "q_lora_rank": 20},
            "rope_parameters": dict(_YARN),
        },
        {"model_type": "pixtral", **_IMAGES, "head_dim": 8},
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {**GROUPED, "rope_parameters": _axes(2, 1, 1)},
        {**_QWEN_IMAGES, "embed_dim": 16, "hidden_size": 32},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            **GROUPED,
            "rope_parameters": _axes(2, 1, 1),
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
        {**_QWEN_IMAGES, **_LAYERS, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {**GROUPED, "head_dim": 16, "rope_parameters": _axes(4, 2, 2, mrope_interleaved=True)},
        {**_QWEN_IMAGES, **_LAYERS, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    ),
    "kimi_k25": (
        "Kimi_K25",
        {**GROUPED, **LATENT, **_ROUTED, "model_type": "deepseek_v3", "q_lora_rank": 20},
        {
            **{**_LAYERS, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4},
            **{"pos_emb_height": 2, "pos_emb_width": 2},
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {**GROUPED, **DELTA, "rope_parameters": _axes(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5)},
        {**_QWEN_IMAGES, **_LAYERS, "out_hidden_size": 32},
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            **GROUPED,
            **DELTA,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "rope_parameters": _axes(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5),
        },
        {**_QWEN_IMAGES, **_LAYERS, "out_hidden_size": 32},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            **GROUPED,
            "head_dim": 16,
            "rope_parameters": _axes(4, 2, 2, mrope_interleaved=True),
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
        },
        {**_QWEN_IMAGES, **_LAYERS, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    ),
    "llama4": (
        "Llama4",
        {
            **GROUPED,
            "head_dim": 16,
            "intermediate_size_mlp": 40,
            "attention_chunk_size": WINDOW,
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "floor_scale": 4,
            "attn_scale": 0.3,
        },
        {**_IMAGES, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
    "glm4v_moe": (
        "Glm4vMoe",
        {
            **GROUPED,
            "head_dim": 16,
            "rope_parameters": _axes(1, 1, 2, partial_rotary_factor=0.5),
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
        },
        {**_QWEN_IMAGES, **_LAYERS, "out_hidden_size": 32, "image_size": 8},
    ),
}
BY_INPUTS = re.compile(r"\.experts\.(gate_up|down)_proj$")  # How Qwen3-VL's checkpoints have maps of experts.


def whole_model(model_type: str, tied: bool = False) -> Any:
    """A random model with its vision tower, float32, whose residual stream is as large as that of `tiny_model`."""
    name, text, vision = MODELS[model_type]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        text_config={**text, "tie_word_embeddings": tied}, vision_config=vision, tie_word_embeddings=tied
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not parameter.any():  # A router that would tell no experts apart.
                parameter.normal_()
            if parameter.dim() > 1 and "embed" not in parameter_name:
                parameter.mul_(4.0)
            elif parameter_name.endswith("bias"):
                parameter.normal_()
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.fill_(0.8)
    return model.float().eval().requires_grad_(False)


def _as_llava(name: str) -> str:
    """Names before version 5 of transformers, of models whose parts stand side by side."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    return name.removeprefix("model.").replace("language_model.", "language_model.model.", 1)


def _as_qwen(name: str) -> str:
    """Names of older Qwen-VL checkpoints: the text part as if it was alone."""
    return name.removeprefix("model.") if "visual." in name else name.replace("model.language_model.", "model.", 1)


SPELLINGS: dict[str, Callable[[str], str]] = {"new": str, "llava": _as_llava, "qwen": _as_qwen}


def write(folder: Path, model: Any, spelling: str = "new", **changed: Any) -> Path:
    """A checkpoint of two files: one of the text part, and one of the others.

    Args: changed: values of config.json; None: it has no such value.
    """
    tied, by_inputs = model.config.tie_word_embeddings, model.config.model_type == "qwen3_vl_moe"
    tensors = {
        name: (tensor.transpose(1, 2) if by_inputs and BY_INPUTS.search(name) else tensor).contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    return write_parts(folder, tensors, json.loads(model.config.to_json_string()) | changed, spelling)


def write_parts(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], spelling: str = "new") -> Path:
    folder.mkdir(parents=True)
    files: dict[str, dict[str, Tensor]] = {"text.safetensors": {}, "images.safetensors": {}}
    for name, tensor in tensors.items():
        is_text = name.startswith(("lm_head.", "model.language_model.", "language_model."))
        files["text.safetensors" if is_text else "images.safetensors"][SPELLINGS[spelling](name)] = tensor
    for file, held in files.items():
        save_file(held, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    values = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return save_words(folder)
