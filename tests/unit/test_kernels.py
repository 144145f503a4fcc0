"""Laws of the native kernels: exact products, bits that do not depend on other rows, and how their library is built."""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from families import tiny_runtime
from hypothesis import given, settings
from hypothesis import strategies as st
from native import LEVELS, library, linear
from tiny_files import save
from torch import Tensor, nn

import swiftopt
from swiftopt.core.errors import SettingsError
from swiftopt.models.coded import CodedLinear, Codes
from swiftopt.models.kernels import build, levels
from swiftopt.models.kernels.build import Kernels
from swiftopt.models.kernels.calls import likeliest
from swiftopt.models.kernels.levels import BUILT, library_name, options, variants, zig_cpu
from swiftopt.models.loading import at_speed, load
from swiftopt.models.quantised import QuantisedLinear

DTYPES = [torch.float32, torch.bfloat16]
FORMATS = ["int8", "int4", "int4-64", "int4-32"]

n_rows = st.one_of(st.integers(1, 64), st.sampled_from([96, 97, 130]))
widths = st.one_of(st.sampled_from([1, 7, 31, 33, 2047, 2048, 2049, 4099]), st.integers(1, 300))
n_outputs = st.one_of(st.sampled_from([1, 3, 15, 17, 63, 64, 65, 129]), st.integers(1, 80))


@dataclass(frozen=True)
class Case:
    """A linear map with its inputs; the offset of the weights and the stride of their rows vary."""

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
        """Return inputs, weights and biases; `whole`: small integers, whose sums are exact in any order."""
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


# -- the likeliest token of a row --------------------------------------------------------------------------------------


@each_level
@each_dtype
@settings(max_examples=60)
@given(shape=st.tuples(st.integers(1, 4), widths), seed=st.integers(0, 10**6), scale=st.sampled_from([0.0, 1.0, 30.0]))
def test_best_token_and_its_probability_equal_those_of_float64(
    level: str, dtype: torch.dtype, shape: tuple[int, int], seed: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(shape, generator=generator)).to(dtype)
    logits[:, 1:][torch.rand((shape[0], shape[1] - 1), generator=generator) < 0.2] = float("-inf")
    token_ids, logprobs = likeliest(library(level), logits)
    assert token_ids == [row.index(max(row)) for row in logits.tolist()]
    expected = logits.double().log_softmax(-1).amax(-1)
    torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float64), expected, rtol=1e-5, atol=2e-6)


@each_level
@each_dtype
def test_logits_that_are_not_numbers_have_no_probability(level: str, dtype: torch.dtype) -> None:
    logits = torch.zeros((4, 70), dtype=dtype)
    logits[0, 69], logits[1], logits[2, 3] = float("nan"), float("-inf"), float("inf")
    logits[3] = float("nan")
    token_ids, logprobs = likeliest(library(level), logits)
    assert [math.isnan(each) for each in logprobs] == [True] * 4
    assert token_ids[1:] == [0, 3, 0]


# -- maps in the model's own type --------------------------------------------------------------------------------------


@each_level
@each_dtype
@settings(max_examples=60)
@given(case=cases)
def test_product_of_whole_numbers_is_exact(level: str, dtype: torch.dtype, case: Case) -> None:
    """Integers have no rounding errors that could hide a wrong index."""
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
def test_row_has_the_same_bits_for_any_other_rows_and_threads(
    level: str, dtype: torch.dtype, case: Case, data: st.DataObject
) -> None:
    own, (x, weight, bias) = library(level), case.made(dtype)
    together = linear(own, x, weight, bias)
    for n_threads in (2, 3):
        assert same_bits(linear(own, x, weight, bias, n_threads), together)
    for i in range(case.rows):
        assert same_bits(linear(own, x[i : i + 1], weight, bias), together[i : i + 1])
    some = sorted(
        data.draw(st.sets(st.integers(0, case.rows - 1), min_size=1), label="some rows")
    )  # as `run` wants them
    assert same_bits(linear(own, x, weight, bias, rows=some), together[some])


@each_dtype
def test_outputs_have_the_same_bits_however_the_map_is_split(kernels: Kernels, dtype: torch.dtype) -> None:
    """Whole tiles and the remaining outputs are summed in the same order."""
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
    return QuantisedLinear([module], name, packed=True)


def unpacked(copy: QuantisedLinear) -> Tensor:
    """Return the weights of a packed copy in float64, read by the layout in `quantised.h`."""
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
    """Return float64 activations as packed kernels round them: 127 steps up to the largest of each group of inputs."""
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
def test_packed_product_equals_that_of_rounded_activations_and_weights(
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
def test_packed_product_and_weights_are_close_to_the_models(
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
def test_packed_row_has_the_same_bits_for_any_other_rows_and_threads(
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
def test_packed_weights_of_one_value_are_exact(kernels: Kernels, name: str) -> None:
    """Groups without a range, of the largest codes, and of zeros have the most delicate scales."""
    x = torch.ones(2, 96)
    for value in (0.0, 1.0, -2.5):
        out = linear(kernels, x, packed(torch.full((18, 96), value), name))
        torch.testing.assert_close(out, torch.full((2, 18), 96 * value), rtol=8e-3, atol=1e-6)


def test_extreme_codes_do_not_overflow(kernels: Kernels) -> None:
    """With the largest codes of activations and weights, the sum of two products exceeds 16 bits."""
    signs = torch.tensor([1.0, -1.0]).repeat(64)
    for x in (torch.ones(128), -torch.ones(128), signs):
        for weight in (torch.ones(128), -torch.ones(128), signs):
            copy = packed(weight.expand(16, 128), "int8")
            out = linear(kernels, x[None], copy)
            torch.testing.assert_close(out.double(), (x.double() @ unpacked(copy).T)[None], rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class CodedCase:
    """A map of a checkpoint with its inputs; scales may be so small that float16 loses digits."""

    rows: int
    n_in: int
    n_out: int
    seed: int
    bits: int
    group: int | None
    scale_dtype: torch.dtype
    ordered: bool

    def made(self, dtype: torch.dtype) -> tuple[Tensor, CodedLinear, Tensor, Tensor]:
        """Return inputs, the map, its float64 weight, its columns by group, and the range of its codes."""
        generator = torch.Generator().manual_seed(self.seed)
        group, top = self.group or self.n_in, 1 << self.bits
        shape = self.n_out, -(-self.n_in // group)
        codes = torch.randint(0, top, (self.n_out, self.n_in), generator=generator).to(torch.uint8)
        zeros = torch.randint(0, top, shape, generator=generator).short()
        scales = torch.randn(shape, generator=generator).exp2().mul(10.0 ** -(self.seed % 8)).to(self.scale_dtype)
        order = torch.randperm(self.n_in, generator=generator) if self.ordered else None
        by_input = [part.repeat_interleave(group, dim=1)[:, : self.n_in] for part in (scales, zeros)]
        meant = (codes.double() - by_input[1].double()) * by_input[0].double()
        bias = torch.randn(self.n_out, generator=generator)
        coded = CodedLinear(Codes(codes, scales, zeros, self.bits, group, order), bias, dtype)
        return torch.randn(self.rows, self.n_in, generator=generator).to(dtype), coded, meant, by_input[0].abs() * top


coded_cases = st.builds(
    CodedCase,
    st.integers(1, 20),
    st.one_of(st.sampled_from([1, 31, 64, 300, 1000, 2049]), st.integers(1, 300)),
    n_outputs,
    st.integers(0, 10**6),
    st.sampled_from([4, 8]),
    st.sampled_from([None, 32, 64, 96, 128, 256]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.booleans(),
)


@each_level
@each_dtype
@settings(max_examples=40)
@given(case=coded_cases)
def test_product_with_a_checkpoints_codes_equals_that_of_its_weights(
    level: str, dtype: torch.dtype, case: CodedCase
) -> None:
    x, coded, meant, reach = case.made(dtype)
    turned = meant if coded.order is None else torch.empty_like(meant).index_copy_(1, coded.order.long(), meant)
    assert torch.equal(coded.weight, turned.to(torch.float32).to(dtype))
    assert coded.bias is not None
    inputs = rounded(x if coded.order is None else x[:, coded.order.long()], coded.group)
    expected, bias = inputs @ meant.T + coded.bias.double(), coded.bias.double().abs()
    # Codes and their zero are summed apart, so that what is rounded is as large as a code of the highest bit.
    size = inputs.abs() @ (meant.abs() + reach).T + bias
    bound = 128 * 2**-24 * size * 16 + (2**-8 * expected.abs() if dtype == torch.bfloat16 else 0)
    own = library(level)
    together = linear(own, x, coded, coded.bias)
    assert ((together.double() - expected).abs() <= bound).all()
    for i in range(case.rows):
        assert same_bits(linear(own, x[i : i + 1], coded, coded.bias, 2), together[i : i + 1])


# -- what is no number -------------------------------------------------------------------------------------------------


def alike(out: Tensor, expected: Tensor) -> bool:
    """Whether NaN and infinities are at the same positions."""
    expected = expected.to(out.dtype)
    return torch.equal(out.isnan(), expected.isnan()) and torch.equal(
        torch.where(out.isinf(), out, 0), torch.where(expected.isinf(), expected, 0)
    )


@each_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 16, 2047, 2048, 2052])
def test_nan_and_infinity_reach_only_their_own_outputs(
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
def test_nan_in_a_drafts_row_stays_in_that_row(kernels: Kernels, dtype: torch.dtype, name: str, value: float) -> None:
    x, weight, _ = Case(6, 300, 35, 8).made(dtype)
    copy = packed(weight, name)
    clean = linear(kernels, x, copy)
    x[3, 299] = value
    out = linear(kernels, x, copy)
    others = [0, 1, 2, 4, 5]
    assert same_bits(out[others], clean[others])
    assert not out[3].isfinite().any()


@each_dtype
def test_product_of_no_rows_is_empty(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight, bias = Case(3, 40, 17, 1, True).made(dtype)
    for form in (weight, packed(weight, "int8", bias), packed(weight, "int4", bias)):
        for n_threads in (1, 3):
            assert linear(kernels, x[:0], form, bias, n_threads).shape == (0, 17)
            assert linear(kernels, x, form, bias, n_threads, rows=[]).shape == (0, 17)
    assert linear(kernels, x, weight, bias).isfinite().all()


# -- how the library comes to be ---------------------------------------------------------------------------------------

USED = """
import ctypes
from swiftopt.models.kernels import build, layout
found = build.kernels()
if isinstance(found, str):
    raise SystemExit(found)
x, weight, out = (ctypes.c_float * 3)(1, 2, 3), (ctypes.c_float * 3)(4, 5, 6), (ctypes.c_float * 1)()
form = layout.Map(ctypes.addressof(weight), None, None, None, 3, 3, 1, 0, 0, 0)
step = layout.Step(ctypes.addressof(form), layout.LOGITS, 0, 0, 0, -1, 0)
rows = layout.RowList(None, 1)
call = layout.Call(hidden=ctypes.addressof(x), lists=ctypes.pointer(rows), logits=ctypes.addressof(out),
                   n_rows=1, n_hidden=3, n_threads=1)
assert found.run(ctypes.byref(call), ctypes.byref(step), 1) == 0
print(found.level, found.path, out[0])
"""
OTHER_LAYOUT = """
#include <stdlib.h>
int swiftopt_run(void) { abort(); }
void swiftopt_sizes(int* sizes) { for (int i = 0; i < 6; i++) sizes[i] = 8; }
"""


def without_seal(kernels: Kernels) -> bytes:
    """Return a compiled library without the seal, which only libraries in the cache have."""
    content = kernels.path.read_bytes()
    return content if kernels.path.parent == BUILT else content[:-32]


@dataclass(frozen=True)
class Place:
    """A test's own cache folder, and programs that stand in for compilers."""

    folder: Path

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def compiler(self, text: str | bytes, name: str = "own-c++") -> str:
        path = self.folder / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        path.chmod(0o755)
        return str(path)

    def copier(self, source: Path | None = None) -> str:
        """Make a compiler that copies a file or a compiled library, and records its runs."""
        if source is None:
            source = self.folder / "compiled"
            source.write_bytes(without_seal(library(LEVELS[0])))
        return self.compiler(
            f'#!/bin/sh\necho run >> "{self.folder}/runs"\nwhile [ "$1" != -o ]; do shift; done\ncp "{source}" "$2"\n'
        )

    @property
    def n_runs(self) -> int:
        runs = self.folder / "runs"
        return len(runs.read_text().splitlines()) if runs.exists() else 0

    def use(self, expect: int = 0, **variables: str) -> str:
        """Return the output of a new process that multiplies with the library, or its reason for having none."""
        path = [str(Path(swiftopt.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        kept = {name: value for name, value in os.environ.items() if name not in ("CXX", build.FORCED)}
        kept |= {
            build.COMPILER: "auto",
            build.FORCED: LEVELS[0],
            "SWIFTOPT_CACHE_DIR": str(self.cache),
            "PYTHONPATH": os.pathsep.join(path),
        }
        done = subprocess.run(
            [sys.executable, "-c", USED], capture_output=True, text=True, check=False, env=kept | variables
        )
        assert done.returncode == expect and "Traceback" not in done.stderr, (done.returncode, done.stderr)
        return done.stdout if expect == 0 else done.stderr

    def library(self) -> Path:
        """The library in the cache."""
        (found,) = self.cache.rglob("*.so")
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    try:
        subprocess.run([sys.executable, "-c", ""], check=True)
    except OSError:
        pytest.skip("an emulator starts no programs of its machine")
    return Place(tmp_path)


@pytest.fixture
def other_layout(tmp_path: Path) -> Path:
    """Return a library with the right names and a different layout of structures."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("there is no C compiler here")
    source, built = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(OTHER_LAYOUT)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, source], check=True)
    return built


def test_library_is_compiled_once_and_then_read_from_the_cache(place: Place) -> None:
    copier = place.copier()
    for _ in range(2):
        level, path, product = place.use(CXX=copier).split()
        assert (level, path, product) == (LEVELS[0], str(place.library()), "32.0")
    assert place.n_runs == 1 and [each.suffix for each in place.library().parent.iterdir()] == [".so"]


def test_wheels_library_is_used_without_a_compiler_and_nothing_is_compiled(place: Place) -> None:
    if not BUILT.is_dir():
        pytest.skip("swiftopt was installed here without kernels")
    empty = place.folder / "empty"
    empty.mkdir()
    level, path, product = place.use(PATH=str(empty), SWIFTOPT_CXX="").split()
    assert (level, Path(path).parent, product) == (LEVELS[0], BUILT, "32.0") and not place.cache.exists()


def test_library_names_differ_by_level_and_extras() -> None:
    for machine, n in (("x86_64", 6), ("aarch64", 1), ("arm64", 1)):
        named = [library_name(level, extras, "Linux", machine) for level, extras in variants(machine)]
        assert len(set(named)) == len(named) == n
    assert options("avx512", ("avx512_bf16", "avx512_vnni")) == ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"]
    assert zig_cpu("amx", ("avx512_vnni", "amx_tile")) == "x86_64_v4+avx512vnni+amx_tile"
    assert (options("portable", ()), zig_cpu("portable", ())) == ([], "baseline")


def test_library_name_depends_on_every_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = [*build.FOLDER.glob("*.h"), *build.FOLDER.glob("*.cpp")]
    for source in sources:
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(levels, "FOLDER", tmp_path)
    names = {library_name("portable", (), "Linux", "x86_64")}
    for source in sources:
        with (tmp_path / source.name).open("a") as file:
            file.write("// changed")
        names.add(library_name("portable", (), "Linux", "x86_64"))
    assert len(names) == 1 + len(sources)


NARROW_NUMBERS = """
#include "vec.h"
extern "C" {
vf load_signed(const int8_t* from) { return load(from); }
vf load_unsigned(const uint8_t* from) { return load(from); }
vf load_bf16(const bf16* from) { return load(from); }
vf load_f16(const f16* from) { return load(from); }
void store_as_bytes(void* to, vi value) { store_bytes(to, value); }
void store_as_words(void* to, vi value) { store_words(to, value); }
}
"""


@pytest.mark.parametrize("level", ["avx2", "avx512"])
def test_compiler_converts_narrow_numbers_by_whole_vectors(level: str, tmp_path: Path) -> None:
    """Left to itself, gcc 12 converts vectors of bytes byte by byte, and kernels of codes take 1.6 times as long."""
    if platform.machine() != "x86_64" or (compiler := shutil.which("c++")) is None:
        pytest.skip("needs a C++ compiler for x86-64")
    source = tmp_path / "narrow.cpp"
    source.write_text(NARROW_NUMBERS, encoding="utf-8")
    command = [compiler, *levels.FLAGS, *levels.MATHS, *options(level, ()), f"-I{build.FOLDER}", "-Wno-psabi", "-S"]
    lines = subprocess.check_output([*command, str(source), "-o", "-"], text=True).splitlines()
    counts: dict[str, int] = {}
    for line in lines:
        if (label := re.fullmatch(r"(\w+):.*", line)) is not None:
            counts[label[1]] = 0
        elif counts and re.match(r"\s+[a-z]", line):
            counts[list(counts)[-1]] += 1
    loads = {name: n for name, n in counts.items() if name.startswith("load_")}
    stores = {name: n for name, n in counts.items() if name.startswith("store_as_")}
    assert len(loads) == 4 and max(loads.values()) <= 5, loads
    assert len(stores) == 2 and max(stores.values()) <= 12, stores


def test_processor_uses_the_best_set_of_extras_that_it_supports() -> None:
    level = build.LEVELS["avx512"]
    assert level.extras_for(frozenset({"avx512_bf16", "avx512_vnni", "sse"})) == ("avx512_bf16", "avx512_vnni")
    assert level.extras_for(frozenset({"avx512_vnni"})) == ("avx512_vnni",)
    assert level.extras_for(frozenset({"avx512_bf16"})) == level.extras_for(frozenset()) == ()


def test_missing_compiler_is_an_error_that_says_how_to_install_one(place: Place) -> None:
    empty = place.folder / "empty"
    empty.mkdir()
    words = place.use(1, PATH=str(empty))
    assert "there is no C++ compiler here" in words and "g++" in words
    assert f"without kernels for this processor ({platform.machine()})" in words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "#!/bin/sh\necho 'error: no such march' >&2\nexit 1\n",
            r"cannot compile the kernels \(error: no such march\)",
        ),
        ("#!/bin/sh\nexit 7\n", r"cannot compile the kernels \(it ended with 7\)"),
        ("#!/bin/sh\nprintf 'caf\\351' >&2\nexit 1\n", r"cannot compile the kernels \(caf"),
        ("#!/bin/sh\nexit 0\n", "cannot be loaded"),  # and wrote nothing
        ("#!/no/such/shell\n", "cannot be run"),
        (b"\x7fELF, but not quite", "cannot be run"),
    ],
    ids=["refuses", "refuses silently", "refuses in latin-1", "writes nothing", "has no shell", "is no program"],
)
def test_error_of_a_failed_compiler_has_its_name_and_output(place: Place, text: str | bytes, words: str) -> None:
    assert re.search(words, place.use(1, CXX=place.compiler(text)))
    assert not list(place.cache.rglob("*.part"))


@pytest.mark.parametrize(
    "kept",
    [0, 1000, -1, *(pytest.param(kept, marks=pytest.mark.slow) for kept in (10, 64, 4096, 100_000, -40_000, -32))],
)
def test_truncated_library_is_compiled_again(place: Place, kept: int) -> None:
    copier = place.copier()
    place.use(CXX=copier)
    whole = place.library()
    content = whole.read_bytes()
    whole.unlink()  # others may run it
    whole.write_bytes(content[:kept])
    assert place.use(CXX=copier).endswith("32.0\n") and place.n_runs == 2
    assert place.use(CXX=copier).endswith("32.0\n") and place.n_runs == 2


def test_damaged_or_unsealed_library_is_compiled_again(place: Place) -> None:
    copier = place.copier()
    place.use(CXX=copier)
    whole = place.library()
    content = whole.read_bytes()
    middle = len(content) // 2
    turned = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for n, damaged in enumerate((turned, b"garbage" * 5000, b"\x7fELF" + bytes(5000)), start=2):
        whole.unlink()
        whole.write_bytes(damaged)
        assert place.use(CXX=copier).endswith("32.0\n") and place.n_runs == n


def test_library_of_another_layout_is_never_called(place: Place, other_layout: Path) -> None:
    copier = place.copier()
    place.use(CXX=copier)
    place.library().unlink()
    shutil.copy(other_layout, place.cache / "kernels" / library(LEVELS[0]).path.name)
    assert place.use(CXX=copier).endswith("32.0\n") and place.n_runs == 2
    place.library().unlink()
    assert "does not fit this version of swiftopt" in place.use(1, CXX=place.copier(other_layout))


def test_each_process_compiles_when_the_cache_cannot_be_written(place: Place) -> None:
    file = place.folder / "file"
    file.write_text("")
    for n in (1, 2):
        words = place.use(CXX=place.copier(), SWIFTOPT_CACHE_DIR=str(file / "cache"))
        assert words.endswith("32.0\n") and place.n_runs == n
    assert not Path(words.split()[1]).exists()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A process that has not looked for a library yet, with its own cache."""

    def forget() -> None:
        build.kernels.cache_clear()
        build.processor_flags.cache_clear()
        library.cache_clear()

    forget()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(build.FORCED, raising=False)
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path / "cache"))
    yield monkeypatch
    monkeypatch.undo()
    forget()


def test_torch_runs_the_model_without_a_library(fresh: pytest.MonkeyPatch, place: Place, tmp_path: Path) -> None:
    save(tmp_path / "model", dtype=torch.bfloat16)
    fresh.setenv(build.COMPILER, place.compiler("#!/bin/sh\necho 'the disk is full' >&2\nexit 1\n"))
    runtime = load(str(tmp_path / "model"), "bfloat16", "cpu")
    with pytest.raises(SettingsError, match=r"passes cannot be exact here: .*the disk is full"):
        at_speed(runtime, "exact")
    assert (runtime.native, runtime.speed, runtime.exact, runtime.copies.packed) == (None, "eager", False, False)
    assert runtime.prefill([3, 1, 4], runtime.new_buffer(4)).isfinite().all()


def test_kernels_can_be_chosen_by_the_environment(fresh: pytest.MonkeyPatch) -> None:
    runtime = tiny_runtime("llama", torch.float32)
    for word in ("nonsense", "AVX2", " "):
        fresh.setenv(build.FORCED, word)
        for speed in ("auto", "exact"):
            with pytest.raises(SettingsError, match=rf"{build.FORCED}={word} is no kind of kernels.*portable, torch"):
                at_speed(runtime, speed)  # type: ignore[arg-type]
        build.kernels.cache_clear()
    fresh.setenv(build.FORCED, "torch")
    at_speed(runtime, "auto")
    assert (runtime.native, runtime.speed) == (None, "eager")
    with pytest.raises(SettingsError, match=f"{build.FORCED}=torch"):
        at_speed(runtime, "exact")


def test_every_level_can_be_forced(fresh: pytest.MonkeyPatch) -> None:
    runtime = tiny_runtime("llama", torch.float32)
    fresh.delenv("SWIFTOPT_CACHE_DIR")
    for level in LEVELS:
        library(level)
        build.kernels.cache_clear()
        fresh.setenv(build.FORCED, level)
        at_speed(runtime, "auto")
        assert runtime.speed == "native" and runtime.native is not None and runtime.native.kernels.level == level


def test_next_level_is_compiled_when_the_compiler_lacks_the_best(fresh: pytest.MonkeyPatch, place: Place) -> None:
    ready = place.folder / "ready"
    ready.write_bytes(without_seal(library(LEVELS[-1])))
    copier = place.copier(ready)
    refuses = "#!/bin/sh\nfor each; do [ $each != -mamx-tile ] || { echo 'error: no tiles' >&2; exit 1; }; done\n"
    fresh.setenv(build.COMPILER, place.compiler(f'{refuses}exec {copier} "$@"\n', "old-c++"))
    fresh.setenv("SWIFTOPT_CACHE_DIR", str(place.cache))
    fresh.setattr(build, "processor_flags", lambda: build.LEVELS["amx"].needs)
    build.kernels.cache_clear()
    found = build.kernels()
    assert isinstance(found, Kernels) and (found.level, place.n_runs) == ("avx512", 1)
    assert "no tiles" in str(build.kernels("amx"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tiles are x86-64's")
def test_amx_tiles_need_permission_from_linux(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(build, "cpu_words", lambda _: " ".join(build.LEVELS["amx"].needs))
    for granted in (True, False):
        fresh.setattr(build, "_enable_tiles", lambda granted=granted: granted)
        build.processor_flags.cache_clear()
        can = {name for name, level in build.LEVELS.items() if level.needs <= build.processor_flags()}
        assert can == {"amx", "avx512", "portable"} - (set() if granted else {"amx"})


def test_unsupported_level_is_refused() -> None:
    missing = [name for name in build.LEVELS if name not in LEVELS]
    if not missing:
        pytest.skip("this processor can run all levels")
    with pytest.raises(SettingsError, match=f"this processor has no {missing[0]}"):
        build.kernels(missing[0])


# -- time --------------------------------------------------------------------------------------------------------------
