"""Tiny checkpoints of GPTQ, AWQ and compressed-tensors, written number by number as these formats define them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import tiny_model
from safetensors.torch import load_file, save_file
from tiny_files import edit_config, save
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

SIZE = {"hidden_size": 64, "intermediate_size": 96}  # so that a group of 64 is cut off in the MLP
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NumberArray = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Packing:
    """How the maps of a checkpoint are stored; `group` -1: a scale per row."""

    format: str
    bits: int
    group: int
    symmetric: bool = True
    act_order: bool = False
    scale_dtype: torch.dtype = torch.float16
    head: bool = False
    whole_zeros: bool = False  # compressed-tensors' older files: zeros in 8 bits each

    @property
    def config(self) -> dict[str, Any]:
        if self.format in ("gptq", "gptq_v2"):
            own = {"quant_method": "gptq", "bits": self.bits, "group_size": self.group, "sym": self.symmetric}
            return {**own, "desc_act": self.act_order, "checkpoint_format": self.format}
        if self.format == "awq":
            own = {"quant_method": "awq", "bits": self.bits, "group_size": self.group}
            return {**own, "version": "gemm", "zero_point": True}
        strategy = {"strategy": "channel"} if self.group < 0 else {"strategy": "group", "group_size": self.group}
        weights = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, **strategy}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "config_groups": groups,
            "ignore": ["lm_head"],
        }


PACKINGS = [
    Packing("gptq", 4, 32),
    Packing("gptq", 4, 64, symmetric=False, act_order=True),
    Packing("gptq", 8, -1, symmetric=False, scale_dtype=torch.bfloat16),
    Packing("gptq_v2", 4, -1, symmetric=False, head=True),
    Packing("gptq_v2", 8, 32, act_order=True, scale_dtype=torch.float32),
    Packing("awq", 4, 32, symmetric=False),
    Packing("awq", 4, -1, symmetric=False),
    Packing("pack-quantized", 4, 32, scale_dtype=torch.bfloat16),
    Packing("pack-quantized", 4, 32, symmetric=False, act_order=True),
    Packing("pack-quantized", 4, 64, symmetric=False, whole_zeros=True),
    Packing("pack-quantized", 8, -1, symmetric=False),
    Packing("int-quantized", 8, -1, scale_dtype=torch.float32),
    Packing("int-quantized", 8, 32, symmetric=False),
]


def packed_folder(folder: Path, family: str, packing: Packing, **changed: Any) -> dict[str, Tensor]:
    """Write a tiny model with its linear maps quantised; the others, and norms, in float16.

    Returns: the state that the checkpoint stands for by its format's definition, in float32.
    """
    changed = changed or ({} if family == "gpt2" else SIZE)
    save(folder, family)
    model = tiny_model(family, torch.float32, **changed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    model.save_pretrained(folder)
    stored = {name: value.half() for name, value in load_file(folder / "model.safetensors").items()}
    meant = {name: value.float() for name, value in stored.items()}
    rng = np.random.default_rng(4)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and (name != "lm_head" or packing.head):
            turned = isinstance(module, Conv1D)
            weight = (module.weight.T if turned else module.weight).detach().numpy()
            stored.pop(f"{name}.weight", None)
            tensors, value = packed_map(weight, packing, rng)
            stored |= {f"{name}.{part}": tensor for part, tensor in tensors.items()}
            meant[f"{name}.weight"] = (value.T if turned else value).contiguous()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config=packing.config, dtype="float16")
    return meant


def packed_map(weight: NumberArray, packing: Packing, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of one map, and the weight (out, in) in float32 that they stand for."""
    n_out, n_in = weight.shape
    top, half = (1 << packing.bits) - 1, 1 << (packing.bits - 1)
    size = n_in if packing.group < 0 else packing.group
    groups = np.arange(n_in) // size
    if packing.act_order:
        groups = groups[rng.permutation(n_in)]
    codes = np.zeros((n_out, n_in), np.int64)
    scales = torch.zeros((n_out, groups.max() + 1), dtype=packing.scale_dtype)
    zeros = np.full(scales.shape, half)
    for g in range(groups.max() + 1):
        own = weight[:, groups == g]
        low, high = own.min(1), own.max(1)
        scale = np.maximum(-low, high) / (half - 1) if packing.symmetric else (high - low) / top
        scales[:, g] = torch.from_numpy(scale)
        seen = scales[:, g].float().numpy()
        if not packing.symmetric:
            zeros[:, g] = np.clip(np.round(-low / seen), 0, top)
        codes[:, groups == g] = np.clip(np.round(own / seen[:, None]) + zeros[:, g, None], 0, top)
    if not packing.symmetric:
        zeros[0, 0] = 0  # which GPTQ's first format stores as all bits
    meant = torch.from_numpy(codes - zeros[:, groups]).float() * scales.float()[:, groups]
    index = torch.from_numpy(groups.astype(np.int32))
    if packing.format in ("gptq", "gptq_v2"):
        filed = (zeros - (packing.format == "gptq")) & top
        tensors = {
            "qweight": words(codes.T, packing.bits, 0),  # along the inputs
            "qzeros": words(filed.T, packing.bits, 1),
            "scales": scales.T.contiguous(),
            "g_idx": index,
        }
    elif packing.format == "awq":
        tensors = {
            "qweight": words(shuffled(codes.T), 4, 1),
            "qzeros": words(shuffled(zeros.T), 4, 1),
            "scales": scales.T.contiguous(),
        }
    else:
        tensors = {"weight_scale": scales}
        if packing.format == "pack-quantized":
            tensors["weight_packed"] = words(codes, packing.bits, 1)
            tensors["weight_shape"] = torch.tensor([n_out, n_in])
        else:
            tensors["weight"] = torch.from_numpy(codes - half).to(torch.int8)
        if not packing.symmetric:
            by_byte = packing.format == "int-quantized" or packing.whole_zeros
            tensors["weight_zero_point"] = (
                torch.from_numpy(zeros - half).to(torch.int8) if by_byte else words(zeros, packing.bits, 0)
            )
        if packing.act_order:
            tensors["weight_g_idx"] = index
    return tensors, meant


def words(codes: NumberArray, bits: int, axis: int) -> Tensor:
    """Codes along an axis in words of 32 bits, the first in the lowest bits."""
    codes = codes if axis == 1 else codes.T
    per_word = 32 // bits
    packed = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), np.uint32)
    for i in range(codes.shape[1]):
        packed[:, i // per_word] |= codes[:, i].astype(np.uint32) << np.uint32(bits * (i % per_word))
    made = torch.from_numpy(packed.view(np.int32))
    return (made if axis == 1 else made.T).contiguous()


def shuffled(codes: NumberArray) -> NumberArray:
    """Each eight outputs in the order in which AWQ puts them into a word."""
    return np.concatenate([codes[:, at : at + 8][:, AWQ_ORDER] for at in range(0, codes.shape[1], 8)], axis=1)
