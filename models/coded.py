"""Linear maps with weights in codes of 4 or 8 bits: in the layout of our kernels, and in that of compressed-tensors.

Our kernels read the codes of any checkpoint in memory. `PackedForm` writes checkpoints as `pack-quantized`, which vLLM,
SGLang and others read. Its codes are symmetric: a weight is (code - 2^(bits - 1)) · scale, with a scale for each group
of inputs or for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.layer_sets import LayerSet, SubLayer
from ..core.settings import FORMATS, group_size
from .kernels import layout
from .kernels.layout import ROWS

GROUPS = (128, 64, 32)  # Inputs per scale that our kernels support.
ZEROS_AS_CODES = {
    torch.bfloat16: layout.ZERO_CODES_BF16,
    torch.float16: layout.ZERO_CODES_F16,
    torch.float32: layout.ZERO_CODES_F32,
}
CHUNK = 1 << 15  # Weights quantised per step on a CPU.
DEVICE_CHUNK = 1 << 27  # Weights quantised per step on a GPU.
SCRATCH = 30  # Bytes of scratch memory that quantising needs per weight of a step.
DEQUANTISED = 256  # Blocks that are de-quantised at a time, so that a large map needs no whole copy in float32.
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # Shares of the full scale to try: clipping outliers may reduce the error.

Form = ParamSpec("Form")
Parts = TypeVar("Parts", bound=tuple[Tensor, ...])


def weights_at_once(device: torch.device) -> int:
    return CHUNK if device.type == "cpu" else DEVICE_CHUNK


def by_rows(quantise: Callable[Concatenate[Tensor, Form], Parts]) -> Callable[Concatenate[Tensor, Form], Parts]:
    """Quantise a few rows at a time: they stay in a CPU's caches, which is several times faster than all rows at once.

    On a GPU each step has a hundred million weights, because a step costs kernel launches.
    """

    @wraps(quantise)
    def of_all(weight: Tensor, /, *args: Form.args, **kwargs: Form.kwargs) -> Parts:
        chunk = weights_at_once(weight.device)
        parts = [quantise(rows, *args, **kwargs) for rows in torch.split(weight, max(1, chunk // weight.shape[1]))]
        return cast(Parts, tuple(torch.cat(same) for same in zip(*parts, strict=True)))

    return of_all


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight (out, in) as checkpoints define it: (code - zero) * scale.

    codes: uint8 (out, in), with the inputs of each group adjacent.
    scales, zeros: (out, groups), in the stored dtype and in int16.
    order: int64 (in,), the map's input of each column; None: they are in order.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group: int
    order: Tensor | None = None


class CodedLinear(nn.Module):
    """A linear map that keeps the codes of a checkpoint.

    Scales keep their stored dtype, and zeros are integers, so no weight changes. Groups of a size that our kernels do
    not support are split into equal parts of a supported size, if possible.

    DEVIATION: our kernels round a map's inputs to 8 bits per group, which none of the formats specifies; `forward`
    does not.

    Args: coded: the weight. bias: (out,) or None. dtype: the model's.
    """

    order: Tensor | None
    bias: Tensor | None

    def __init__(self, coded: Codes, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.n_out, self.n_in = coded.codes.shape
        self.bits, self.dtype = coded.bits, dtype
        fitting = (size for size in GROUPS if coded.group % size == 0)
        # With one scale per row, the scale also serves the padding after the last input.
        by_row = coded.group >= self.n_in
        self.group = next(fitting, GROUPS[-1] if by_row else coded.group)
        width = self.n_in + -self.n_in % self.group
        codes = coded.codes
        if width != self.n_in or self.n_out % ROWS:  # F.pad copies the codes, so it is not called without need.
            codes = F.pad(codes, (0, width - self.n_in, 0, -self.n_out % ROWS))
        offsets = (1 << (self.bits - 1)) - coded.zeros  # The kernels take the middle code as zero.
        scales, zeros = (
            F.pad(part, (0, 0, 0, -self.n_out % ROWS)).repeat_interleave(-(-coded.group // self.group), dim=1)
            for part in (coded.scales, offsets.to(coded.scales.dtype))
        )
        n_groups = width // self.group
        laid_out, pairs = pack(codes, scales[:, :n_groups], zeros[:, :n_groups], self.bits)
        self.codes, self.scales = nn.Parameter(laid_out, requires_grad=False), nn.Parameter(pairs, requires_grad=False)
        self.register_buffer("order", None if coded.order is None else coded.order.int(), persistent=False)
        bias_parameter = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)
        self.register_parameter("bias", bias_parameter)

    @property
    def scale_type(self) -> int:
        """Encoding of the scales and zeros, a constant of `kernels.layout`."""
        return ZEROS_AS_CODES[self.scales.dtype]

    @property
    def table(self) -> int:
        """The table that codes index, a constant of `kernels.layout`; these codes are plain numbers."""
        return layout.NUMBERS

    def map(self, bias: Tensor | None = None) -> layout.Map:
        """Describe the map to our kernels. Args: bias: replaces the map's own."""
        bias = self.bias if bias is None else bias
        bias_at = None if bias is None else bias.data_ptr()
        order = None if self.order is None else self.order.data_ptr()
        assert self.group is not None  # Packed weights have a group size.
        form = self.n_in, self.n_out, self.bits, self.group, self.scale_type, self.table
        return layout.Map(self.codes.data_ptr(), bias_at, self.scales.data_ptr(), order, 0, *form)

    def numbers(self) -> Tensor:
        """Return the de-quantised weight (out, in) in the model's dtype."""
        return self.weight

    @property
    def weight(self) -> Tensor:
        """The de-quantised weight (out, in) in the model's dtype, computed at each call."""
        weight = torch.empty((self.n_out, self.n_in), dtype=self.dtype, device=self.codes.device)
        n_blocks = len(self.codes)
        for first in range(0, n_blocks, DEQUANTISED):
            codes, scales, offsets = unpack(
                self.codes[first : first + DEQUANTISED], self.scales[first : first + DEQUANTISED], self.bits
            )
            whole = codes.short().sub_(1 << (self.bits - 1)).view(len(codes), -1, self.group)
            part = ((whole + offsets[..., None].short()).float() * scales[..., None].float()).flatten(1)
            rows = weight[first * ROWS : (first + DEQUANTISED) * ROWS]
            part = part[: len(rows), : self.n_in].to(self.dtype)
            if self.order is None:
                rows.copy_(part)
            else:
                rows.index_copy_(1, self.order.long(), part)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, in) to (…, out) with the de-quantised weight: a slow reference implementation."""
        return F.linear(x, self.weight, self.bias)

    def plain(self) -> nn.Linear:
        """Return the same map with a de-quantised weight."""
        return plain_linear(self.weight, self.bias)


def weight_form(module: Any) -> tuple[torch.device, torch.dtype, tuple[int, ...]]:
    """Return device, dtype and shape of a module's weight, without de-quantising a coded one."""
    codes = getattr(module, "codes", None)
    if codes is None or not hasattr(module, "dtype"):
        return module.weight.device, module.weight.dtype, tuple(module.weight.shape)
    return codes.device, module.dtype, (module.n_out, module.n_in)


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear map that shares the given weight (out, in) and bias (out,)."""
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.data, requires_grad=False)
    return made.eval()


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Lay out codes and scales for `kernels/quantised.h`.

    Args:    codes: (out, in), whole blocks and groups. scales, zeros: (out, in / group), of one dtype.
    Returns: codes, uint8 (blocks, bytes of a block), and scales and zeros, (blocks, groups, 2, 16) in their dtype.
    """
    n_out, n_in = codes.shape
    quads = codes.to(torch.uint8).contiguous().view(torch.int32)  # Move four inputs per int32, which is faster.
    blocks = quads.view(n_out // ROWS, ROWS, n_in // 4).transpose(1, 2)  # (blocks, n_in / 4, 16)
    if bits == 4:
        blocks = blocks[:, 0::2] | (blocks[:, 1::2] << 4)
    pairs = torch.stack((scales, zeros), dim=-1).view(n_out // ROWS, ROWS, -1, 2).permute(0, 2, 3, 1)
    return blocks.contiguous().view(torch.uint8).view(n_out // ROWS, -1), pairs.contiguous()


def unpack(blocks: Tensor, pairs: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Undo `pack`; return codes (out, in), scales and zeros (out, groups)."""
    quads = blocks.view(len(blocks), -1, ROWS, 4)
    if bits == 4:
        quads = torch.stack((quads & 15, quads >> 4), dim=2).flatten(1, 2)
    codes = quads.transpose(1, 2).reshape(len(blocks) * ROWS, -1)
    scales, zeros = pairs.permute(0, 3, 1, 2).reshape(len(blocks) * ROWS, -1, 2).unbind(dim=-1)
    return codes, scales, zeros


@dataclass(frozen=True, slots=True)
class PackedForm:
    """The form in which linear maps are written; `group`: number of inputs that share a scale (None: a whole row)."""

    bits: Literal[4, 8]
    group: int | None

    @property
    def words(self) -> str:
        """The form in words, for messages."""
        return f"int{self.bits}, {f'groups of {self.group}' if self.group else 'a scale per row'}"

    def tensors(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors to store for a map `name` with a weight (out, in); scales have the weight's dtype."""
        codes, scales = rounded(weight, self.bits, self.group)
        return {
            f"{name}.weight_packed": packed(codes, self.bits),
            f"{name}.weight_scale": scales,
            f"{name}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
        }

    def config(self, ignored: Iterable[str]) -> dict[str, Any]:
        """Return the model's quantization_config. Args: ignored: names of maps that are not quantised."""
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
    """Return the form for all quantised sub-layers among `subs`: their most frequent format; None: none is quantised.

    Args: widths: numbers of inputs of the maps; the group divides all of them.
    """
    names = [name for sub in subs if (name := layer_set.format_of(*sub)) is not None]
    if not names:
        return None
    name = max(FORMATS, key=names.count)
    groups = [group_size(name, width) for width in widths]
    if None in groups:
        return PackedForm(8, None)
    return PackedForm(4, min(group for group in groups if group))


@by_rows
def rounded(weight: Tensor, bits: int, group: int | None) -> tuple[Tensor, Tensor]:
    """Return codes uint8 (out, in) and scales (out, groups) in the weight's dtype; of `SHRINKS` the best is taken."""
    half = 1 << (bits - 1)
    grouped = weight.float().reshape(weight.shape[0], -1, group or weight.shape[1])
    reach = grouped.abs().amax(dim=-1, keepdim=True) / (half - 1)
    least = torch.full_like(reach, float("inf"))
    best, codes = torch.ones_like(reach), torch.zeros_like(grouped)
    for shrink in SHRINKS if bits == 4 else SHRINKS[:1]:
        # Round the scale to its stored type before computing codes: its rounding error is multiplied by the code.
        scale = (shrink * reach).to(weight.dtype).float()
        scale = torch.where(scale > 0, scale, 1.0)  # The scale is 0 for all-zero groups or by underflow.
        rounded_codes = (grouped / scale).round_().clamp_(-half, half - 1)
        error = (rounded_codes * scale - grouped).square_().sum(dim=-1, keepdim=True)
        better = error < least
        best, codes = torch.where(better, scale, best), torch.where(better, rounded_codes, codes)
        least = torch.minimum(error, least)
    return (codes + half).to(torch.uint8).flatten(1), best[..., 0].to(weight.dtype)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return codes (out, in) as int32 words (out, ⌈in · bits / 32⌉), the first code in the lowest bits."""
    per_word = 32 // bits
    padded = F.pad(codes, (0, -codes.shape[1] % per_word))
    lanes = padded.view(codes.shape[0], -1, per_word).to(torch.int64) << (bits * torch.arange(per_word))
    return lanes.sum(dim=-1).to(torch.int32)  # Bit 31 becomes the sign.
