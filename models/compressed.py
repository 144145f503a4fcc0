"""Linear maps written in fewer bits as compressed-tensors' `pack-quantized`, which vLLM, SGLang and others read.

Codes are symmetric: a weight is (code - 2^(bits - 1)) · scale, the scale that of a group of inputs or of a whole row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.settings import FORMATS, group_size
from ..core.types import LayerSet, SubLayer
from .coded import CHUNK

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of the scale that reaches the largest weight: tails may cost less


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How the linear maps of some sub-layers are written; `group`: inputs that share a scale, None for all of a row."""

    bits: Literal[4, 8]
    group: int | None

    @property
    def words(self) -> str:
        """What a reader is told of it."""
        return f"int{self.bits}, {f'groups of {self.group}' if self.group else 'a scale per row'}"

    def tensors(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return what is stored for a map `name` with that weight (out, in); scales have the weight's dtype."""
        codes, scales = rounded(weight, self.bits, self.group)
        return {
            f"{name}.weight_packed": packed(codes, self.bits),
            f"{name}.weight_scale": scales,
            f"{name}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
        }

    def config(self, ignored: Iterable[str]) -> dict[str, Any]:
        """Return the model's quantization_config; `ignored` maps are stored whole."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "dynamic": False,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": sorted({"lm_head", *ignored}),
            "kv_cache_scheme": None,
        }


def packed_form(layer_set: LayerSet, subs: Sequence[SubLayer], widths: Iterable[int]) -> PackedForm | None:
    """Return the one form for all of those sub-layers that have fewer bits; None where none has.

    It is that of most of them. Args: widths: inputs of the maps, all of which the group divides.
    """
    names = [name for sub in subs if (name := layer_set.format_of(*sub)) is not None]
    if not names:
        return None
    name = max(FORMATS, key=names.count)
    groups = [group_size(name, width) for width in widths]
    if name == "int8" or None in groups:
        return PackedForm(8, None)
    return PackedForm(4, min(group for group in groups if group))


def rounded(weight: Tensor, bits: int, group: int | None) -> tuple[Tensor, Tensor]:
    """Return codes uint8 (out, in) and scales (out, groups) in the weight's dtype, of the least squared error tried."""
    parts = [_round_rows(rows, bits, group) for rows in torch.split(weight, max(1, CHUNK // weight.shape[1]))]
    codes, scales = (torch.cat(same) for same in zip(*parts, strict=True))
    return codes, scales


def _round_rows(weight: Tensor, bits: int, group: int | None) -> tuple[Tensor, Tensor]:
    half = 1 << (bits - 1)
    grouped = weight.float().reshape(weight.shape[0], -1, group or weight.shape[1])
    reach = grouped.abs().amax(dim=-1, keepdim=True) / (half - 1)
    least = torch.full_like(reach, float("inf"))
    best, codes = torch.ones_like(reach), torch.zeros_like(grouped)
    for shrink in SHRINKS if bits == 4 else SHRINKS[:1]:
        # As it is stored: an error of the scale counts as often as the code is large.
        scale = (shrink * reach).to(weight.dtype).float()
        scale = torch.where(scale > 0, scale, 1.0)  # of zeros, or too small for the dtype
        found = (grouped / scale).round_().clamp_(-half, half - 1)
        error = (found * scale - grouped).square_().sum(dim=-1, keepdim=True)
        better = error < least
        best, codes = torch.where(better, scale, best), torch.where(better, found, codes)
        least = torch.minimum(error, least)
    return (codes + half).to(torch.uint8).flatten(1), best[..., 0].to(weight.dtype)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return codes (out, in) as int32 words (out, ⌈in · bits / 32⌉), the first code in the lowest bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    lanes = padded.view(codes.shape[0], -1, per_word).to(torch.int64) << (bits * torch.arange(per_word))
    return lanes.sum(dim=-1).to(torch.int32)  # bits above the 31st become the sign
