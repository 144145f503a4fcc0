"""Laws of the Triton kernel for packed weights: each type of code has the file's values, and rows are independent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gguf_blocks import PACKED, made, meant, mxfp4
from native import library
from on_device import HALF, PLACE, close, drawn

from swiftopt.models.block_maps import BlockLinear, PackedBlocks, packed_blocks
from swiftopt.models.gguf_reader import TYPES

pytest.importorskip("triton")

from swiftopt.models.kernels import device_codes, device_experts
from swiftopt.models.row_invariant import coded_map

USUAL = ("Q8_0", "Q4_K", "Q5_K", "Q6_K")  # They have every number of bits, and every type of scales but MXFP4's.
each_type = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if TYPES[kind][0] in USUAL else pytest.mark.families) for kind in PACKED],
    ids=[TYPES[kind][0] for kind in PACKED],
)


def there(packed: PackedBlocks) -> PackedBlocks:
    packed.codes.data, packed.scales.data = packed.codes.data.to(PLACE), packed.scales.data.to(PLACE)
    return packed


@each_type
@pytest.mark.parametrize("dtype", [HALF, pytest.param(torch.float32, marks=pytest.mark.families)])
def test_products_with_a_files_codes_are_those_of_its_numbers(kind: int, dtype: torch.dtype) -> None:
    """The number of outputs is odd, and the last row has the same bits alone."""
    tensor = made(kind, 21, 256, seed=kind)
    by = coded_map(there(packed_blocks(tensor, library())))
    x, bias = drawn(3, 256, dtype=dtype) / 16, drawn(21, seed=1, dtype=dtype)
    found = device_codes.coded_linear(x, by, bias)
    close(found, x.double() @ meant(tensor).double().to(PLACE).t() + bias.double(), dtype)
    assert torch.equal(device_codes.coded_linear(x[2:], by, bias)[0], found[2])


def test_experts_in_mxfp4_are_those_of_their_numbers() -> None:
    """With biases, for rows that share an expert and rows that do not."""
    maps, numbers = mxfp4(3, 18, 96, library())
    by = coded_map(maps[0])._replace(
        codes=torch.stack([one.codes for one in maps]).to(PLACE),
        scales=torch.stack([one.scales for one in maps]).to(PLACE),
    )
    x, bias = drawn(3, 96, dtype=HALF) / 4, drawn(3, 18, seed=1, dtype=HALF)
    taken = torch.tensor([[0, 2], [1, 2], [0, 1]], dtype=torch.int32, device=PLACE)

    def computed(rows: slice) -> torch.Tensor:
        own = taken[rows].contiguous()
        return device_experts.expert_linear(x[rows], by, bias, own, *device_experts.shared_out(own, 3))

    found, weights = computed(slice(None)), numbers.double().to(PLACE)
    for choice, expert in enumerate(taken.flatten().tolist()):
        close(found[choice], weights[expert] @ x[choice // 2].double() + bias[expert].double(), HALF)
    assert torch.equal(computed(slice(2, 3)), found[4:])


def test_codes_elsewhere_than_in_this_machines_memory_are_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map on a GPU is read in blocks of the requested outputs."""
    tensor = made(14, 70, 256)
    module = BlockLinear(packed_blocks(tensor, library()), None, torch.float32)
    outputs = torch.tensor([69, 3, 17, 3])
    assert torch.equal(module.packed._moved(outputs), meant(tensor)[outputs])
    moved: list[Any] = []
    monkeypatch.setattr(PackedBlocks, "_moved", lambda self, outputs: moved.append(self) or meant(tensor)[outputs])
    module.to("meta")
    assert module.packed.codes.device.type == "meta" and torch.equal(module.weight, meant(tensor))
    assert moved == [module.packed]
