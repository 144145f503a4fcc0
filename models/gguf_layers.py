"""Reads a GGUF file's settings for layers that differ by type, as in Gemma 4.

A setting whose name ends in _swa applies to layers with a window, and the one without that ending to the others. Some
settings are lists with a number for each layer.
"""

from __future__ import annotations

import re
from typing import Any

from .gguf_reader import GgufFile
from .gguf_values import KV_HEADS, MLP_WIDTH, PATTERN, OwnSettings

SHARED = "attention.shared_kv_layers"  # Number of last layers that read another layer's keys and values.
TOKEN_TABLE = "per_layer_token_embd.weight"  # The embedding by layer: a row for each token.
ENCODER_TENSORS = ("v.", "a.", "mm.")  # Name prefixes of tensors of image and audio encoders.
_KEYS = re.compile(r"blk\.(\d+)\.attn_(?:k|k_norm|v)\.")  # Tensors of a layer's keys and values.


def layers_of(file: GgufFile, settings: OwnSettings) -> dict[str, Any]:
    """Return the config's fields that differ by layer type.

    If the file has no map of values for layers without a window, their values are the keys.

    Raises: UnsupportedModel: the config cannot express a difference. ModelNotFound: a setting is missing.
    """
    n_layers, slides = settings.size("block_count"), settings.listed(PATTERN)
    # In transformers the last layer never has a window.
    if not isinstance(slides, list) or len(slides) != n_layers or slides[-1]:
        raise settings.refusal(PATTERN, slides)
    n_shared = int(settings.number(SHARED, 0))
    first_shared = n_layers - n_shared
    if first_shared < 1:
        raise settings.refusal(SHARED, n_shared)
    inner = settings.of_layers(MLP_WIDTH, n_layers)
    is_double = inner[-1] != inner[0]
    if inner != [inner[0]] * first_shared + [(1 + is_double) * inner[0]] * n_shared:
        raise settings.refusal(MLP_WIDTH, inner)
    heads = settings.of_layers(KV_HEADS, n_layers)
    in_windows, elsewhere = (
        {n for n, slid in zip(heads, slides, strict=True) if bool(slid) is one} for one in (True, False)
    )
    with_keys = [layer for layer in range(first_shared) if not slides[layer]]
    keys_are_values = not any(f"blk.{layer}.attn_v.weight" in file.tensors for layer in with_keys)
    differ = len(in_windows | elsewhere) > 1
    if len(in_windows) > 1 or len(elsewhere) > 1 or (differ and not keys_are_values):
        raise settings.refusal(KV_HEADS, heads)
    width = settings.size("attention.key_length")
    width_in_windows = settings.size("attention.key_length_swa", width)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if settings.size(name, width_in_windows) != width_in_windows:
            raise settings.refusal(name, settings.take(name))
    table = file.tensors.get(TOKEN_TABLE)
    return {
        "head_dim": width_in_windows,
        "global_head_dim": width,
        "num_key_value_heads": (in_windows or elsewhere).pop(),
        "attention_k_eq_v": keys_are_values,
        "num_global_key_value_heads": elsewhere.pop() if keys_are_values and elsewhere else None,
        "num_kv_shared_layers": n_shared,
        "use_double_wide_mlp": is_double,
        "enable_moe_block": bool(settings.number("expert_count", 0)),
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
    }


def unused_keys(file: GgufFile, n_layers: int) -> set[str]:
    """Return the names of tensors of keys and values in layers that read another layer's.

    Checkpoints have such tensors although no layer uses them. Args: n_layers: the model's.
    """
    n_shared = file.own_settings().get(SHARED)
    first = n_layers - n_shared if isinstance(n_shared, int) else n_layers
    matches = ((name, _KEYS.match(name)) for name in file.tensors)
    return {name for name, match in matches if match and first <= int(match[1]) < n_layers}
