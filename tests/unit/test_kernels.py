"""Laws of our kernels' products, without a model: what they compute, that rows do not see each other, odd numbers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native import LEVELS, library, linear
from torch import Tensor, nn

from swiftopt.models.kernels.build import Kernels
from swiftopt.models.quantised import QuantisedLinear, quantised

DTYPES = [torch.float32, torch.bfloat16]
FORMATS = ["int8", "int4", "int4-64", "int4-32"]

n_rows = st.one_of(st.integers(1, 64), st.sampled_from([96, 97, 130]))
widths = st.one_of(st.sampled_from([1, 7, 31, 33, 2047, 2048, 2049, 4099]), st.integers(1, 300))
n_outputs = st.one_of(st.sampled_from([1, 3, 15, 17, 63, 64, 65, 129]), st.integers(1, 80))


@dataclass(frozen=True)
class Case:
    """A linear map and what goes into it; the weights begin and their rows lie anywhere."""

    rows: int
    n_in: int
    n_out: int
    seed: int
    has_bias: bool = False
    offset: int = 0
    gap: int = 0

    def random(self, shape: tuple[int, ...], salt: int, whole: bool) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + salt)
        if whole:
            return torch.randint(-8, 9, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    def made(self, dtype: torch.dtype, whole: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs, weights and biases; `whole`: small whole numbers, whose sums are exact in any order."""
        x = self.random((self.rows, self.n_in), 0, whole).to(dtype)
        stride = self.n_in + self.gap
        flat = torch.full((self.offset + self.n_out * stride,), float("nan"), dtype=dtype)
        weight = flat[self.offset :].view(self.n_out, stride)[:, : self.n_in]
        weight.copy_(self.random((self.n_out, self.n_in), 1, whole))
        return x, weight, self.random((self.n_out,), 2, whole).to(dtype) if self.has_bias else None


cases = st.builds(
    Case,
    n_rows,
    widths,
    n_outputs,
    st.integers(0, 10**6),
    st.booleans(),
    offset=st.integers(0, 17),
    gap=st.sampled_from([0, 0, 1, 3, 16]),
)


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The library at each level that this processor can run."""
    return library(request.param)


each_level = pytest.mark.parametrize("level", LEVELS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def same_bits(one: Tensor, other: Tensor) -> bool:
    whole = torch.int32 if one.dtype == torch.float32 else torch.int16
    return torch.equal(one.view(whole), other.view(whole))


# -- maps in the model's own type --------------------------------------------------------------------------------------


@each_level
@each_dtype
@settings(max_examples=60)
@given(case=cases)
def test_product_of_whole_numbers_is_exact(level: str, dtype: torch.dtype, case: Case) -> None:
    """Every input counts once, for its own output: nothing is lost in rounding that could hide a slip."""
    x, weight, bias = case.made(dtype, whole=True)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert torch.equal(linear(library(level), x, weight, bias), expected.to(dtype))


@each_level
@each_dtype
@settings(max_examples=40)
@given(case=cases)
def test_product_is_close_to_that_in_float64(level: str, dtype: torch.dtype, case: Case) -> None:
    x, weight, bias = case.made(dtype)
    own = torch.zeros(case.n_out) if bias is None else bias
    expected = x.double() @ weight.double().T + own.double()
    size = x.double().abs() @ weight.double().abs().T + own.double().abs()
    bound = (case.n_in / 4 + 16) * 2**-24 * size  # each lane of the narrowest vectors rounds that often
    if dtype == torch.bfloat16:
        bound += 2**-8 * expected.abs()
    assert ((linear(library(level), x, weight, bias).double() - expected).abs() <= bound).all()


@each_level
@each_dtype
@settings(max_examples=40)
@given(case=cases, data=st.data())
def test_row_has_the_same_bits_whatever_rows_and_threads_are_beside_it(
    level: str, dtype: torch.dtype, case: Case, data: st.DataObject
) -> None:
    own, (x, weight, bias) = library(level), case.made(dtype)
    together = linear(own, x, weight, bias)
    for n_threads in (2, 3):
        assert same_bits(linear(own, x, weight, bias, n_threads), together)
    for i in range(case.rows):
        assert same_bits(linear(own, x[i : i + 1], weight, bias), together[i : i + 1])
    some = data.draw(st.lists(st.integers(0, case.rows - 1), min_size=1, max_size=20), label="some rows")
    assert same_bits(linear(own, x, weight, bias, rows=some), together[some])


@each_dtype
def test_outputs_are_the_same_bits_wherever_the_map_is_cut(kernels: Kernels, dtype: torch.dtype) -> None:
    """Outputs in whole tiles and those left over at the end are summed in one order."""
    x, weight, _ = Case(13, 2051, 80, 5).made(dtype)
    whole = linear(kernels, x, weight)
    for start, end in ((0, 1), (1, 4), (3, 80), (63, 66), (77, 80)):
        assert same_bits(linear(kernels, x, weight[start:end]), whole[:, start:end].contiguous())


# -- packed maps -------------------------------------------------------------------------------------------------------


def packed(weight: Tensor, name: str, bias: Tensor | None = None) -> QuantisedLinear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=weight.dtype).requires_grad_(False)
    module.weight.data = weight.contiguous()
    if bias is not None:
        module.bias.data = bias
    return quantised([module], name, packed=True)


def unpacked(copy: QuantisedLinear) -> Tensor:
    """The weights that a packed copy stands for, in float64, read as `quantised.h` describes the layout."""
    assert copy.group is not None
    blocks, groups = copy.scales.shape[:2]
    if copy.bits == 4:
        pieces = copy.codes.view(blocks, -1, 1, 16, 4)
        pieces = torch.cat((pieces & 15, pieces >> 4), dim=2).flatten(1, 2)  # (blocks, inputs / 4, 16, 4)
    else:
        pieces = copy.codes.view(blocks, -1, 16, 4)
    codes = pieces.transpose(1, 2).reshape(blocks * 16, groups, copy.group).double()
    scale, zero = copy.scales.double().permute(2, 0, 3, 1).reshape(2, blocks * 16, groups, 1)
    whole = (codes - 2 ** (copy.bits - 1)) * scale + zero
    return whole.flatten(1)[: copy.n_out, : copy.n_in]


def rounded(x: Tensor, group: int) -> Tensor:
    """Activations as the packed kernels see them, in float64: 127 steps to the largest of each group of inputs."""
    parts = []
    for part in x.float().split(group, dim=1):
        most = part.abs().amax(dim=1, keepdim=True)
        inverse = torch.where(most > 0, torch.tensor(127.0).div(most), 0)  # `127 / most` rounds twice
        parts.append((part * inverse).round().double() * (most / 127).double())
    return torch.cat(parts, dim=1)


packed_cases = st.builds(
    Case,
    st.integers(1, 20),
    st.one_of(st.sampled_from([1, 7, 31, 33, 64, 127, 128, 1000, 2049]), st.integers(1, 300)),
    n_outputs,
    st.integers(0, 10**6),
    st.booleans(),
)


@each_level
@each_dtype
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15)
@given(case=packed_cases)
def test_packed_product_is_that_of_rounded_activations_and_weights(
    level: str, dtype: torch.dtype, name: str, case: Case
) -> None:
    x, weight, bias = case.made(dtype)
    copy = packed(weight, name, bias)
    own = torch.zeros(case.n_out) if bias is None else bias
    assert copy.group is not None
    inputs, weights = rounded(x, copy.group), unpacked(copy)
    expected = inputs @ weights.T + own.double()
    size = inputs.abs() @ weights.abs().T + own.double().abs()
    bound = 64 * 2**-24 * size * 16 + (2**-8 * expected.abs() if dtype == torch.bfloat16 else 0)
    assert ((linear(library(level), x, copy, bias).double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(("name", "off", "rounding"), [("int8", 0.02, 0.01), ("int4", 0.03, 0.13)])
@pytest.mark.parametrize(("n_in", "n_out"), [(256, 64), (577, 65), (1000, 17), (33, 129)])
def test_packed_product_is_near_that_of_its_weights_and_they_near_the_models(
    kernels: Kernels, name: str, off: float, rounding: float, n_in: int, n_out: int
) -> None:
    x, weight, _ = Case(9, n_in, n_out, 11).made(torch.float32)
    copy = packed(weight, name)
    seen = unpacked(copy)
    exact = x.double() @ seen.T
    assert (linear(kernels, x, copy).double() - exact).norm() < off * exact.norm()
    assert (seen - weight.double()).norm() < rounding * weight.double().norm()


@each_level
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15)
@given(case=packed_cases, dtype=st.sampled_from(DTYPES))
def test_packed_row_has_the_same_bits_whatever_rows_and_threads_are_beside_it(
    level: str, name: str, case: Case, dtype: torch.dtype
) -> None:
    own, (x, weight, bias) = library(level), case.made(dtype)
    copy = packed(weight, name, bias)
    together = linear(own, x, copy, bias)
    for n_threads in (2, 3):
        assert same_bits(linear(own, x, copy, bias, n_threads), together)
    for i in range(case.rows):
        assert same_bits(linear(own, x[i : i + 1], copy, bias), together[i : i + 1])


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_of_one_value_keep_it(kernels: Kernels, name: str) -> None:
    """Groups without any range, the largest codes and zeros: what a scale could be lost in."""
    x = torch.ones(2, 96)
    for value in (0.0, 1.0, -2.5):
        out = linear(kernels, x, packed(torch.full((18, 96), value), name))
        torch.testing.assert_close(out, torch.full((2, 18), 96 * value), rtol=8e-3, atol=1e-6)


def test_extreme_codes_do_not_overflow(kernels: Kernels) -> None:
    """Activations and weights at the ends of their codes: products of two pairs exceed 16 bits."""
    signs = torch.tensor([1.0, -1.0]).repeat(64)
    for x in (torch.ones(128), -torch.ones(128), signs):
        for weight in (torch.ones(128), -torch.ones(128), signs):
            copy = packed(weight.expand(16, 128), "int8")
            out = linear(kernels, x[None], copy)
            torch.testing.assert_close(out.double(), (x.double() @ unpacked(copy).T)[None], rtol=1e-5, atol=1e-5)


# -- what is no number -------------------------------------------------------------------------------------------------


def alike(out: Tensor, expected: Tensor) -> bool:
    """NaN and infinities at the same places."""
    expected = expected.to(out.dtype)
    return torch.equal(out.isnan(), expected.isnan()) and torch.equal(
        torch.where(out.isinf(), out, 0), torch.where(expected.isinf(), expected, 0)
    )


@each_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 16, 2047, 2048, 2052])
def test_what_is_no_number_reaches_its_own_outputs_alone(
    kernels: Kernels, dtype: torch.dtype, value: float, at: int
) -> None:
    clean_x, clean_weight, bias = Case(6, 2053, 35, 8, True).made(dtype)
    clean = linear(kernels, clean_x, clean_weight, bias)
    for row, output in ((0, 34), (4, 0), (5, 33)):
        x, weight = clean_x.clone(), clean_weight.clone()
        x[row, at] = value
        out = linear(kernels, x, clean_weight, bias)
        others = [i for i in range(6) if i != row]
        assert alike(out, x.double() @ clean_weight.double().T) and not out[row].isfinite().any()
        assert same_bits(out[others], clean[others])
        weight[output, at] = value
        out = linear(kernels, clean_x, weight, bias)
        others = [i for i in range(35) if i != output]
        assert alike(out, clean_x.double() @ weight.double().T) and not out[:, output].isfinite().any()
        assert same_bits(out[:, others].contiguous(), clean[:, others].contiguous())


@each_dtype
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_in_a_drafts_row_stays_in_that_row(
    kernels: Kernels, dtype: torch.dtype, name: str, value: float
) -> None:
    x, weight, _ = Case(6, 300, 35, 8).made(dtype)
    copy = packed(weight, name)
    clean = linear(kernels, x, copy)
    x[3, 299] = value
    out = linear(kernels, x, copy)
    others = [0, 1, 2, 4, 5]
    assert same_bits(out[others], clean[others])
    assert not out[3].isfinite().any()


@each_dtype
def test_pass_of_no_rows_gives_nothing(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight, bias = Case(3, 40, 17, 1, True).made(dtype)
    for map_ in (weight, packed(weight, "int8", bias), packed(weight, "int4", bias)):
        for n_threads in (1, 3):
            assert linear(kernels, x[:0], map_, bias, n_threads).shape == (0, 17)
            assert linear(kernels, x, map_, bias, n_threads, rows=[]).shape == (0, 17)
    assert linear(kernels, x, weight, bias).isfinite().all()
