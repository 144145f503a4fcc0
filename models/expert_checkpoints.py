"""Reads the experts of quantised checkpoints: separate tensors for each map, or MXFP4 blocks of all experts of a layer.

If our kernels compute, codes are kept. Otherwise maps are de-quantised into the tensors of transformers' modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.settings import n_threads
from .block_experts import HALVES, PARTS, BlockExperts, ExpertMap, stacked
from .block_maps import packed_blocks
from .coded import CodedLinear
from .family import Experts
from .fingerprint import plain_name
from .gguf_reader import FileTensor
from .kernels.build import Kernels

BLOCKS, SCALES = "blocks", "scales"  # Suffixes of MXFP4 tensors, joined by "_" to the name of a tensor of all experts.
PAIRS_OF_MXFP4 = 1039  # `CHECKPOINT_MXFP4` of `kernels/gguf.h`: a scale and 16 bytes of two codes each.
# Magnitudes of the floats of 4 bits (OCP Microscaling Formats, 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENT_BIAS = 127

# Makes a map's module from its stored tensors, by name in the format, and its sizes (out, in).
MakeMap = Callable[[Mapping[str, Tensor], int, int], CodedLinear | nn.Linear]


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The experts of a layer in files: for each map, its tensors' stored names by their names in the format."""

    module: str
    maps: Mapping[str, list[dict[str, str]]]  # Part of `PARTS` -> tensors of each expert's map.

    def names(self) -> Iterator[str]:
        for maps in self.maps.values():
            for parts in maps:
                yield from parts.values()


def mixtures_of(model: nn.Module, named: Experts | None) -> dict[str, Any]:
    """Return the modules of a model's experts, by name."""
    if named is None:
        return {}
    modules: dict[str, Any] = dict(model.named_modules())
    return {
        name: one for name, one in modules.items() if name.endswith(f".{named.experts}") and hasattr(one, "down_proj")
    }


def renamed(name: str, named: Experts | None) -> str:
    """Return the name in transformers' model of a tensor of a checkpoint's mixture."""
    for stored, part_name in named.renamed.items() if named is not None else ():
        if stored in name:
            return name.replace(stored, part_name, 1)
    return name


def stored_experts(
    model: nn.Module, named: Experts | None, formats: tuple[str, ...], stored_names: Mapping[str, str]
) -> list[StoredExperts]:
    """Find the experts whose maps are stored separately.

    Args: formats: names of a map's tensors in the format; the first marks a map as quantised. stored_names: by
          `plain_name`.
    """
    mixtures = []
    for module, experts in mixtures_of(model, named).items():
        assert named is not None
        n_experts = experts.down_proj.shape[0]
        maps: dict[str, list[dict[str, str]]] = {}
        for part, stored in zip(PARTS, named.stored, strict=True):
            stems = [plain_name(f"{module}.{expert}.{stored}.") for expert in range(n_experts)]
            maps[part] = [
                {leaf: stored_names[stem + leaf] for leaf in (*formats, "weight") if stem + leaf in stored_names}
                for stem in stems
            ]
        if any(formats[0] in parts for of_part in maps.values() for parts in of_part):
            mixtures.append(StoredExperts(module, maps))
    return mixtures


def read_experts(
    model: Any,
    stored: StoredExperts,
    named: Experts,
    dtype: torch.dtype,
    coded: bool,
    read: Callable[[str], Tensor],
    make: MakeMap,
) -> None:
    """Put a layer's experts into the model; several threads make the maps."""
    module: Any = model.get_submodule(stored.module)
    n_experts, *of_map = module.down_proj.shape
    n_inner, n_hidden = of_map if named.by_inputs else reversed(of_map)
    sizes = {part: (n_hidden, n_inner) if part == "down" else (n_inner, n_hidden) for part in PARTS}

    def made(place: tuple[str, int]) -> CodedLinear | nn.Linear:
        part, expert = place
        return make({leaf: read(name) for leaf, name in stored.maps[part][expert].items()}, *sizes[part])

    places = [(part, expert) for part in PARTS for expert in range(n_experts)]
    with ThreadPoolExecutor(n_threads()) as pool:
        all_maps = list(pool.map(made, places))
    maps = {part: all_maps[i * n_experts : (i + 1) * n_experts] for i, part in enumerate(PARTS)}
    codes = {part: [map_ for map_ in of_part if isinstance(map_, CodedLinear)] for part, of_part in maps.items()}
    if coded and all(len(of_part) == n_experts for of_part in codes.values()):
        model.set_submodule(stored.module, BlockExperts(codes, named, module, dtype))
        return
    for leaf, parts in HALVES.items():
        weights = {part: torch.stack([map_.weight.data.to(dtype) for map_ in maps[part]]) for part in parts}
        setattr(module, leaf, nn.Parameter(stacked(weights, leaf, named), requires_grad=False))


def read_mxfp4(
    model: Any,
    module_name: str,
    named: Experts,
    dtype: torch.dtype,
    kernels: Kernels | None,
    read: Callable[[str], Tensor],
) -> None:
    """Put a layer's MXFP4 experts into the model, as codes for these kernels (None: de-quantised).

    For each of the module's tensors, a checkpoint has codes, uint8 (experts, out, groups, 16) with two codes in a byte,
    and exponents of the groups' scales, uint8 (experts, out, groups).

    Raises: ValueError: the tensors have other shapes.
    """
    module: Any = model.get_submodule(module_name)
    n_experts, n_inner, n_hidden = module.down_proj.shape
    shapes = {"gate_up_proj": (2 * n_inner, n_hidden), "down_proj": (n_hidden, n_inner)}
    maps: dict[str, list[ExpertMap]] = {}
    for leaf, (n_out, n_in) in shapes.items():
        blocks, scales = (read(f"{module_name}.{leaf}_{kind}") for kind in (BLOCKS, SCALES))
        groups = (n_experts, n_out, n_in // 32)
        if n_in % 32 or tuple(blocks.shape) != (*groups, 16) or tuple(scales.shape) != groups:
            raise ValueError(f"its {leaf} has codes {list(blocks.shape)} with scales {list(scales.shape)}")
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise ValueError(f"its {leaf} has codes of {blocks.dtype} with scales of {scales.dtype}")
        if kernels is None:
            weights = torch.empty((n_experts, n_out, n_in), dtype=dtype)
            for expert in range(n_experts):
                weights[expert] = mxfp4_numbers(blocks[expert], scales[expert])
            setattr(module, leaf, nn.Parameter(weights.transpose(1, 2), requires_grad=False))
            continue
        whole = torch.cat((scales[..., None], blocks), dim=-1)
        for i, part in enumerate(HALVES[leaf]):
            step = len(HALVES[leaf])
            halves = [whole[expert, i::step].contiguous().numpy().reshape(-1) for expert in range(n_experts)]
            tensors = (
                FileTensor(f"{module_name}.{part}", PAIRS_OF_MXFP4, (n_out // step, n_in), data) for data in halves
            )
            maps[part] = [packed_blocks(tensor, kernels) for tensor in tensors]
    if kernels is not None:
        model.set_submodule(module_name, BlockExperts(maps, named, module, dtype))


def mxfp4_numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """De-quantise codes, uint8 (…, groups, 16), with scales, uint8 (…, groups); return float32 (…, 32 · groups)."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(table[codes.int()], scales.int()[..., None] - EXPONENT_BIAS).flatten(-2)
