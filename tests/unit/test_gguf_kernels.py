"""Maps with the blocks of GGUF files: each type's values, products and rows, at each level of the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf_blocks import PACKED, made, meant
from native import LEVELS, library, linear
from torch import Tensor

from swiftopt.models import gguf_packing
from swiftopt.models.block_maps import BlockEmbedding, BlockLinear, packed_blocks
from swiftopt.models.expert_checkpoints import PAIRS_OF_MXFP4, mxfp4_numbers
from swiftopt.models.gguf_packing import forms
from swiftopt.models.gguf_reader import TYPES, FileTensor
from swiftopt.models.kernels.build import Kernels

MXFP4 = 39
ids = [TYPES[kind][0] for kind in PACKED]
each_level = pytest.mark.parametrize("level", LEVELS)
each_type = pytest.mark.parametrize("kind", PACKED, ids=ids)


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The library at each level that this processor can run."""
    return library(request.param)


def same_bits(one: Tensor, other: Tensor) -> bool:
    whole = torch.int32 if one.dtype == torch.float32 else torch.int16
    return torch.equal(one.view(whole), other.view(whole))


def rounded(x: Tensor, group: int) -> Tensor:
    """Return float64 activations as the kernels round them: 127 steps up to the largest of each group of inputs."""
    parts = x.float().unflatten(1, (-1, group))
    most = parts.abs().amax(dim=2, keepdim=True)
    inverse = torch.where(most > 0, torch.tensor(127.0).div(most), 0)
    return ((parts * inverse).round().double() * (most / 127).double()).flatten(1)


def test_the_kernels_know_the_blocks_of_the_reader(kernels: Kernels) -> None:
    known = {kind: (form.inputs, form.block_bytes) for kind, form in forms(kernels).items()}
    assert known == {kind: TYPES[kind][1:] for kind in PACKED} | {PAIRS_OF_MXFP4: TYPES[MXFP4][1:]}


@each_level
@each_type
@pytest.mark.parametrize(("n_out", "n_in"), [(16, 256), (37, 768), (1, 512)])
def test_numbers_are_those_of_the_file(level: str, kind: int, n_out: int, n_in: int) -> None:
    tensor = made(kind, n_out, n_in)
    packed = packed_blocks(tensor, library(level))
    assert torch.equal(packed.numbers(torch.arange(n_out)), meant(tensor))


def test_blocks_of_mxfp4_checkpoints_stand_for_what_transformers_reads(kernels: Kernels) -> None:
    """Each byte has two neighbouring codes; the exponent of their scale precedes them."""
    generator = torch.Generator().manual_seed(9)
    blocks = torch.randint(0, 256, (37, 5, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 160, (37, 5), generator=generator, dtype=torch.uint8)
    scales[0, :2] = torch.tensor([0, 1])
    data = torch.cat((scales[..., None], blocks), dim=-1).numpy().reshape(-1)
    packed = packed_blocks(FileTensor("weight", PAIRS_OF_MXFP4, (37, 160), data), kernels)
    numbers = packed.numbers()
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    expected = table[codes] * 2.0 ** (scales.double()[..., None] - 127)
    assert torch.equal(numbers.double(), expected.flatten(1).float().double())
    assert torch.equal(mxfp4_numbers(blocks, scales), numbers)


def test_the_types_with_kernels_take_at_most_three_percent_more_than_in_the_file(kernels: Kernels) -> None:
    for kind in (2, 8, 12, 13, 14, 20, 23, 39):
        tensor = made(kind, 64, 512)
        packed = packed_blocks(tensor, kernels)
        assert packed.codes.nbytes + packed.scales.nbytes <= 1.03 * tensor.data.nbytes


@each_level
@each_type
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_product_is_that_of_rounded_activations_and_the_files_numbers(
    level: str, kind: int, dtype: torch.dtype
) -> None:
    tensor = made(kind, 70, 768, seed=1)
    x = torch.randn(9, 768, generator=torch.Generator().manual_seed(2)).to(dtype)
    bias = torch.randn(70, generator=torch.Generator().manual_seed(3)).to(dtype)
    packed = BlockLinear(packed_blocks(tensor, library(level)), bias, dtype)
    inputs, weight = rounded(x, 32), meant(tensor).double()
    expected = inputs @ weight.T + bias.double()
    size = inputs.abs() @ weight.abs().T + bias.double().abs()
    bound = 2**-14 * size + (2**-8 * expected.abs() if dtype == torch.bfloat16 else 0)
    assert ((linear(library(level), x, packed, bias).double() - expected).abs() <= bound).all()
    exact = x.double() @ weight.T + bias.double()
    assert (expected - exact).norm() < 0.02 * exact.norm()


@each_level
@each_type
def test_a_row_has_the_same_bits_whatever_rows_and_threads_are_beside_it(level: str, kind: int) -> None:
    own, tensor = library(level), made(kind, 150, 512, seed=4)
    packed = BlockLinear(packed_blocks(tensor, own), None, torch.bfloat16)
    x = torch.randn(27, 512, generator=torch.Generator().manual_seed(5)).bfloat16()
    together = linear(own, x, packed)  # of so many rows that blocks are spread
    for n_rows in (3, 11, 21):
        assert same_bits(linear(own, x[:n_rows], packed), together[:n_rows])
    for n_threads in (2, 3):
        assert same_bits(linear(own, x, packed, None, n_threads), together)
    for i in range(len(x)):
        assert same_bits(linear(own, x[i : i + 1], packed), together[i : i + 1])


def test_a_large_tensor_is_packed_and_released_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, released = made(12, 100, 256), list[FileTensor]()
    whole = packed_blocks(tensor, library("portable"))
    monkeypatch.setattr(gguf_packing, "PACKED_BYTES", 40 * len(tensor.data) // 100)
    parts = packed_blocks(tensor, library("portable"), release=released.append)
    assert torch.equal(parts.codes, whole.codes) and torch.equal(parts.scales, whole.scales)
    assert [len(part.data) for part in released] == [len(tensor.data) * rows // 100 for rows in (32, 32, 32, 4)]
    assert np.array_equal(np.concatenate([part.data for part in released]), tensor.data)


def test_rows_are_laid_out_in_the_order_asked_for(kernels: Kernels) -> None:
    tensor = made(12, 40, 256, seed=6)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(7))
    packed = packed_blocks(tensor, kernels, order.int())
    assert torch.equal(packed.numbers(torch.arange(40)), meant(tensor)[order])


def test_an_embedding_gives_the_rows_of_its_tokens(kernels: Kernels) -> None:
    tensor = made(14, 50, 256, seed=8)
    embedding = BlockEmbedding(packed_blocks(tensor, kernels), torch.bfloat16, torch.tensor(3.0))
    token_ids = torch.tensor([[3, 49], [0, 3]])
    assert torch.equal(embedding(token_ids), meant(tensor)[token_ids].bfloat16() * torch.tensor(3.0).bfloat16())
    with pytest.raises(IndexError):
        embedding(torch.tensor([50]))
