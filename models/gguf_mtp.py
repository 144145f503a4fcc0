"""Reads the multi-token-prediction layer of a GGUF file: one more layer after the model's own, with `nextn.*` tensors.

llama.cpp's converter uses these names for all families.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from .block_maps import BlockLinear, packed_blocks
from .coded import plain_linear
from .family import Family
from .gguf_model import Reading
from .gguf_packing import forms
from .gguf_reader import FileTensor, GgufFile
from .gguf_tensors import numbers
from .kernels.build import kernels
from .mtp_names import LAYER, config_of_layer
from .quantised_checkpoints import without_weights
from .saved import refuse_mismatched

# Parts besides the decoder layer, and the model's norm: their names in the file's layer.
NORMS = {"embed_norm": "enorm", "hidden_norm": "hnorm"}
PROJECTION, NORM = "eh_proj", "shared_head_norm"
COPIES = ("embed_tokens", "shared_head_head")  # Tensors that are copies of the model's embedding and head.


def has_next_layer(file: GgufFile, n_layers: int) -> bool:
    """Tell whether a file has one more layer than the model, and all parts of that layer are known."""
    needed = (*NORMS.values(), PROJECTION, NORM)
    return all(_name(n_layers, part) in file.tensors for part in needed)


def next_layer(file: GgufFile, config: Any, family: Family, dtype: torch.dtype, coded: bool, shared: nn.Module) -> Any:
    """Return a model of this layer and the parts besides it, on the CPU.

    Args:   coded: maps keep the file's codes if our kernels can read them. shared: the target, whose embedding and head
            are used.
    Raises: ModelNotFound, UnsupportedModel: as `gguf_model.load_gguf`.
    """
    assert family.mtp is not None
    n_layers = int(config.num_hidden_layers)
    has_experts = any(name.startswith(f"blk.{n_layers}.ffn_") and "_exps." in name for name in file.tensors)
    alone = config_of_layer(config, family.mtp, [f"{LAYER}mlp.experts."] if has_experts else [])
    model = without_weights(alone, dtype)
    for name in (family.embed, family.head):
        model.set_submodule(name, shared.get_submodule(name))
    chosen = kernels() if coded else ""
    reading = _NextLayer(file, model, dtype, None if isinstance(chosen, str) else chosen, n_layers)
    for name in model.state_dict():
        if name.startswith((LAYER, f"{family.norm}.")):
            reading.take(name)
    reading.finish()
    return model.eval().requires_grad_(False), reading.parts()


def _name(n_layers: int, part: str) -> str:
    return f"blk.{n_layers}.nextn.{part}.weight"


class _NextLayer(Reading):
    """Reads the tensors of the layer."""

    def _tensor(self, name: str) -> FileTensor | None:
        if name == f"{self.family.norm}.weight":
            return self._found(_name(self.first_layer, NORM))
        return super()._tensor(name)

    def to_read(self) -> list[str]:
        beside = {_name(self.first_layer, part) for part in (*NORMS.values(), PROJECTION, *COPIES)}
        return [
            name for name in self.file.tensors if name.startswith(f"blk.{self.first_layer}.") and name not in beside
        ]

    def parts(self) -> nn.ModuleDict:
        """Return the projection and the two norms, which are of the same class as the layer's last norm."""
        norm, parts = self.model.get_submodule(self.family.norm), nn.ModuleDict()
        for name, part in NORMS.items():
            copied: Any = deepcopy(norm)
            tensor = self._beside(part, tuple(copied.weight.shape))
            weight = numbers(tensor) - self.form.adds_to_norms
            copied.weight = nn.Parameter(weight.to(self.dtype), requires_grad=False)
            parts[name] = copied
        size = int(self.model.config.hidden_size)
        tensor = self._beside(PROJECTION, (size, 2 * size))
        if self.kernels is not None and tensor.kind in forms(self.kernels):
            packed = packed_blocks(tensor, self.kernels, None, self.file.release)
            parts["projection"] = BlockLinear(packed, None, self.dtype)
        else:
            parts["projection"] = plain_linear(numbers(tensor).to(self.dtype), None)
        return parts.eval().requires_grad_(False)

    def _beside(self, part: str, shape: tuple[int, ...]) -> FileTensor:
        """Return the tensor of a part besides the decoder layer. Raises: ModelNotFound: it has another shape."""
        tensor = self.file.tensors[_name(self.first_layer, part)]
        if tensor.shape != shape:
            refuse_mismatched([(tensor.name, tensor.shape, shape)], self.file.path, "its settings")
        return tensor
