"""Random blocks of each type of GGUF files that has codes, and of MXFP4 checkpoints, and what they stand for."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from swiftopt.models.block_maps import PackedBlocks, packed_blocks
from swiftopt.models.expert_checkpoints import PAIRS_OF_MXFP4, mxfp4_numbers
from swiftopt.models.gguf_reader import TYPES, FileTensor
from swiftopt.models.kernels.build import Kernels

PACKED = [kind for kind, (_, block, _) in TYPES.items() if block > 1]
HALVES = {  # Where the numbers in float16 of a block stand.
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()},
}


def made(kind: int, n_out: int, n_in: int, seed: int = 0) -> FileTensor:
    """A tensor of random blocks whose scales are finite numbers of ordinary sizes."""
    name, block, block_bytes = TYPES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (n_out * n_in // block, block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        scales = generator.normal(0, 0.05, len(blocks)).astype("<f2")
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = generator.integers(118, 132, len(blocks))
    return FileTensor("weight", kind, (n_out, n_in), blocks.reshape(-1))


def meant(tensor: FileTensor) -> Tensor:
    """The weight as the library of the format reads it: float32 (out, in)."""
    rows = tensor.data.reshape(tensor.shape[0], -1)
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(tensor.kind))
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(tensor.shape)


def mxfp4(n_experts: int, n_out: int, n_in: int, kernels: Kernels, seed: int = 0) -> tuple[list[PackedBlocks], Tensor]:
    """Maps of experts as gpt-oss's checkpoints have them, and their numbers (experts, out, in)."""
    draw = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (n_experts, n_out, n_in // 32, 16), dtype=torch.uint8, generator=draw)
    powers = torch.randint(120, 126, blocks.shape[:-1], dtype=torch.uint8, generator=draw)
    powers[0, 0, 0] = 0
    data = torch.cat((powers[..., None], blocks), dim=-1).numpy().reshape(n_experts, -1)
    files = (FileTensor("weight", PAIRS_OF_MXFP4, (n_out, n_in), np.ascontiguousarray(one)) for one in data)
    return [packed_blocks(one, kernels) for one in files], mxfp4_numbers(blocks, powers)
