"""Codes of a GGUF file's Q8_0 or Q4_0 matrices as a checkpoint of compressed-tensors, number by number the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .compressed import PackedForm, packed

BLOCK = 32  # inputs that share a scale
FORMS = {"Q8_0": PackedForm(8, BLOCK), "Q4_0": PackedForm(4, BLOCK)}
SCALE_BYTES = 2  # of a block, in float16, before its codes
HEAD, EMBEDDING = "lm_head", "token_embd.weight"


def coded_checkpoint(reader: Any, model: Any) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return a state with the file's codes in place of weights, and what the config has to say then.

    The codes are those of linear maps in the type that most of them have; None where that is neither Q8_0 nor Q4_0.

    Args: reader: gguf's, of the file. model: as transformers read it, in float32: what the codes have to stand for.
    """
    tensors = _tensors_of_maps(reader, model)
    (kind, _), *_ = Counter(tensor.tensor_type.name for tensor in tensors.values()).most_common(1) or [("", 0)]
    if kind not in FORMS:
        return None
    state, plain = dict(model.state_dict()), []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        tensor = tensors.get(name)
        coded = (
            None if tensor is None or tensor.tensor_type.name != kind else _coded(tensor, module.weight, model.config)
        )
        if coded is None:
            plain.append(name)
            continue
        del state[f"{name}.weight"]
        state |= {f"{name}.{part}": value for part, value in coded.items()}
    tied = bool(model.config.tie_word_embeddings) and HEAD in plain
    config = {**FORMS[kind].config(plain), "ignore": sorted(plain)}  # the head is coded, too, where it can be
    return state, {"quantization_config": config, "tie_word_embeddings": tied}


def _tensors_of_maps(reader: Any, model: Any) -> dict[str, Any]:
    """The file's tensors of the model's linear maps; of a head that is tied, the embedding's."""
    import gguf

    stored: Mapping[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
    name = reader.fields["general.architecture"].contents()
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    places = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    found = {}
    for own, module in model.named_modules():
        if isinstance(module, nn.Linear):
            place = places.get_name(f"{own}.weight", try_suffixes=(".weight",))
            tensor = stored.get(place or "") or (stored.get(EMBEDDING) if own == HEAD else None)
            if tensor is not None:
                found[own] = tensor
    return found


def _coded(tensor: Any, weight: Tensor, config: Any) -> dict[str, Tensor] | None:
    """A matrix's tensors in the checkpoint; None where its codes are not seen to stand for that weight."""
    n_out, n_in = weight.shape
    blocks = np.asarray(tensor.data).reshape(n_out, n_in // BLOCK, -1)
    scales = torch.from_numpy(blocks[..., :SCALE_BYTES].copy().view(np.float16)[..., 0])
    found = torch.from_numpy(blocks[..., SCALE_BYTES:].copy())
    bits = FORMS[tensor.tensor_type.name].bits
    # Bytes of Q8_0 have a sign; those of Q4_0 hold the first half of a block in their low halves.
    codes = (found ^ 128 if bits == 8 else torch.cat((found & 15, found >> 4), dim=-1)).flatten(1)
    values = (codes.short() - (1 << (bits - 1))).float() * scales.float().repeat_interleave(BLOCK, dim=1)
    rows = _rows_in_order(values, weight, config)
    if rows is None:
        return None
    words = packed(codes[rows], bits)
    return {"weight_packed": words, "weight_scale": scales[rows], "weight_shape": torch.tensor([n_out, n_in])}


def _rows_in_order(values: Tensor, weight: Tensor, config: Any) -> Tensor | None:
    """The file's rows in the order of the weight's: llama.cpp keeps rotary pairs side by side in some models."""
    as_filed = torch.arange(len(values))
    orders = [as_filed]
    for n_heads in {config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)}:
        if len(values) % (2 * n_heads) == 0:
            orders.append(as_filed.view(n_heads, -1, 2).transpose(1, 2).reshape(-1))
    return next((rows for rows in orders if torch.equal(values[rows], weight.float())), None)
