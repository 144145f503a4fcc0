"""Tiny checkpoints of GPTQ, AWQ, compressed-tensors and fp8, written number by number as these formats define them.

And what holds for every quantised target: whose logits it has, and that drafts change no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fakes import cheap_draft_costs
from families import tiny_model
from native import words as some_words
from safetensors.torch import load_file, save_file
from tiny_files import edit_config, save
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.loop import decode
from swiftopt.decoding.methods import PLAIN, Resources, build, swift
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime

IDS = [1, 5, 9, 2, 7, 11, 30, 4]
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
    rows: int | None = 1  # of 8-bit floats: outputs that share a scale, None for all

    @property
    def config(self) -> dict[str, Any]:
        if self.format in ("gptq", "gptq_v2"):
            own = {"quant_method": "gptq", "bits": self.bits, "group_size": self.group, "sym": self.symmetric}
            return {**own, "desc_act": self.act_order, "checkpoint_format": self.format}
        if self.format == "awq":
            own = {"quant_method": "awq", "bits": self.bits, "group_size": self.group}
            return {**own, "version": "gemm", "zero_point": True}
        if self.format == "fp8":
            block = None if self.rows is None else [self.rows, self.group]
            return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block}
        strategy: dict[str, Any] = {"strategy": "channel"}
        if self.rows is None:
            strategy = {"strategy": "tensor"}
        elif self.rows > 1:
            strategy = {"strategy": "block", "block_structure": [self.rows, self.group]}
        elif self.group > 0:
            strategy = {"strategy": "group", "group_size": self.group}
        floats = self.format == "float-quantized"
        kind = "float" if floats else "int"
        weights = {"num_bits": self.bits, "type": kind, "symmetric": self.symmetric, **strategy}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True} if floats else None
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
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

FLOATS = [
    Packing("float-quantized", 8, -1, scale_dtype=torch.bfloat16),
    Packing("float-quantized", 8, -1, rows=None, scale_dtype=torch.float32),
    Packing("float-quantized", 8, 32, head=True),
    Packing("float-quantized", 8, 64, rows=64, scale_dtype=torch.bfloat16),
    Packing("fp8", 8, 128, rows=128, scale_dtype=torch.float32),
    Packing("fp8", 8, 64, rows=32, scale_dtype=torch.float32),
    Packing("fp8", 8, 32, rows=32, scale_dtype=torch.float32),
    Packing("fp8", 8, -1, rows=None, scale_dtype=torch.float32),
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
    if packing in FLOATS:
        return float_map(torch.from_numpy(weight), packing)
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


def float_map(weight: Tensor, packing: Packing) -> tuple[dict[str, Tensor], Tensor]:
    """As `packed_map`, in 8-bit floats."""
    n_out, n_in = weight.shape
    rows, columns = packing.rows or n_out, n_in if packing.group < 0 else packing.group
    codes, meant = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape)
    scales = torch.zeros((-(-n_out // rows), -(-n_in // columns)), dtype=packing.scale_dtype)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[block].abs().max() / torch.finfo(codes.dtype).max
            codes[block] = (weight[block] / scales[i, j].float()).to(codes.dtype)
            meant[block] = codes[block].float() * scales[i, j].float()
    if packing.rows is None:
        scales = scales.reshape([1] if packing.format == "float-quantized" else [])
    return {"weight": codes, "weight_scale_inv" if packing.format == "fp8" else "weight_scale": scales}, meant


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


def reference(family: str, meant: dict[str, torch.Tensor]) -> Any:
    """The model of transformers with the weights that a checkpoint stands for, in float32."""
    model = tiny_model(family, torch.float32, **({} if family == "gpt2" else SIZE))
    named = {name.replace("embed_out", "lm_head"): value for name, value in meant.items()}  # GPT-NeoX's files
    missing, unexpected = model.load_state_dict(named, strict=False)
    assert unexpected == [] and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def logits_of(runtime: Runtime) -> torch.Tensor:
    return runtime.forward(Rows(IDS, 0), runtime.new_buffer(16))


def check_drafts(runtime: Runtime) -> None:
    """Plain, SWIFT's, adaptive and text drafts: the same tokens."""
    rule, ending = TokenRule.of(Sampling(), None), Ending(24)
    prompt = some_words(3, 6) * 2
    plain = decode(runtime, prompt, PLAIN, rule, ending)
    skipping = LayerSet(4, frozenset({1}), frozenset({2}))
    parts = Resources(runtime, skipping, costs=cheap_draft_costs())
    methods = [swift(skipping, SwiftSettings()), build("adaptive", parts), build("prompt-lookup", parts)]
    drafted = [decode(runtime, prompt, method, rule, ending) for method in methods]
    assert all(each.token_ids == plain.token_ids for each in drafted)
    assert all(each.drafted > 0 for each in drafted)
