"""Laws of quantised drafts: the error of copies, an unchanged target, and lossless output."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from families import VOCAB, tiny_model, tiny_runtime, variants
from torch import nn

from swiftopt.core.errors import LayerSetError, SettingsError
from swiftopt.core.layer_sets import LayerSet, PartForm
from swiftopt.core.records import ModelInfo
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.loop import decode
from swiftopt.decoding.methods import PLAIN, swift
from swiftopt.models import copy_files
from swiftopt.models.coded import by_rows, plain_linear
from swiftopt.models.quantised import QuantisedLinear, cpu_multiplies_fp8, cuda_tiles, quantise_groups, quantise_int4
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime

WIDTH = 256
MIXED = (("attn", "int8"), ("head", "int8"), ("mlp", "int4"), ("mlp:2", "stored"))

needs_fp8 = pytest.mark.skipif(not cpu_multiplies_fp8(), reason="this torch has one fp8 scale for all rows on a CPU")


def linear_weight(n_out: int = 40, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(n_out, width, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "steps"), [("int8", 254), ("int4", 15), ("int4-64", 15), ("int4-32", 15)])
def test_quantised_weight_is_within_half_a_step_of_each_groups_range(name: str, steps: int, dtype: torch.dtype) -> None:
    weight = linear_weight().to(dtype)
    copy = QuantisedLinear([plain_linear(weight, None)], name)
    seen = copy(torch.eye(WIDTH, dtype=dtype)).T.float()  # what the kernel makes of each weight
    grouped = weight.float().unflatten(1, (-1, copy.group or WIDTH))
    reach = (
        grouped.amax(-1) - grouped.amin(-1) if copy.group else 2 * grouped.abs().amax(-1)
    )  # the range that codes cover
    error = (seen.unflatten(1, (-1, copy.group or WIDTH)) - grouped).abs().square().mean(-1).sqrt()
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    assert (error <= reach / steps / 12**0.5 * 1.25 + rounding).all()


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [WIDTH, 40])
def test_fp8_product_has_the_error_of_three_mantissa_bits(dtype: torch.dtype, width: int) -> None:
    """e4m3 has three bits of mantissa, so each factor has an error of at most 1/16, or 2^-9 of its row's scale."""
    weight, x = linear_weight(21, width).to(dtype), linear_weight(7, width).to(dtype)
    copy = QuantisedLinear([plain_linear(weight, torch.arange(21.0, dtype=dtype))], "fp8")
    found, sizes = copy(x).double(), x.double().abs() @ weight.double().abs().T
    exact = x.double() @ weight.double().T + torch.arange(21.0)
    assert found.shape == exact.shape and ((found - exact).abs() <= sizes / 7 + exact.abs() / 128).all()
    assert (found - exact).norm() < 0.05 * exact.norm()
    torch.testing.assert_close(copy(x[2:3])[0], copy(x)[2])


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (9, 0)])
def test_fp8_is_refused_where_it_cannot_run(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    runtime, device = tiny_runtime("llama"), torch.device("cuda:0")
    if capability < (8, 9):
        told = "^cuda:0 does not multiply fp8, as Ada and Hopper do: draft in int8 or int4$"
        with pytest.raises(SettingsError, match=told):
            runtime.copies._check_runs("fp8", device)
    else:
        runtime.copies._check_runs("fp8", device)


@needs_fp8
def test_fp8_is_refused_by_the_native_kernels() -> None:
    runtime, draft = tiny_runtime("llama"), LayerSet(4).filled("fp8")
    runtime.copies.prepare(draft)
    runtime.copies.lay_out(packed=True)
    with pytest.raises(SettingsError, match="our CPU kernels do not support fp8: draft in int8 or int4"):
        runtime.copies.prepare(draft)


def test_fp8_is_refused_on_a_cpu_whose_torch_has_one_scale_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def per_tensor(*args: torch.Tensor, **options: torch.dtype) -> torch.Tensor:
        raise RuntimeError("Now _scaled_mm only supports per-tensor scaling for CPU backend.")

    monkeypatch.setattr(torch, "_scaled_mm", per_tensor)
    cpu_multiplies_fp8.cache_clear()
    try:
        with pytest.raises(SettingsError, match=r"^torch .* does not multiply fp8 row by row on a CPU: draft in int8"):
            tiny_runtime("llama").copies.prepare(LayerSet(4).filled("fp8"))
    finally:
        cpu_multiplies_fp8.cache_clear()


@pytest.mark.parametrize("quantise", [quantise_int4, quantise_groups])
def test_pieces_of_any_size_have_the_codes_of_the_whole(
    quantise: Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantise(linear_weight(), 64)
    for chunk in (1, 3 * WIDTH):
        monkeypatch.setattr("swiftopt.models.coded.CHUNK", chunk)
        for part, own in zip(quantise(linear_weight(), 64), whole, strict=True):
            assert torch.equal(part, own)


def test_large_maps_are_quantised_in_one_piece_on_a_gpu() -> None:
    """The maps are CodeLlama-13B's; on a CPU the smallest of them is quantised in 854 pieces."""
    pieces = list[int]()

    @by_rows
    def noting(rows: torch.Tensor) -> tuple[torch.Tensor]:
        pieces.append(rows.numel())
        return (rows[:, :1],)

    for shape in ((5120, 5120), (13824, 5120), (5120, 13824), (32016, 5120)):
        noting(torch.empty(shape, device="meta"))
    assert len(pieces) == 5 and sum(pieces[-2:]) == 32016 * 5120
    pieces.clear()
    noting(torch.empty(5120, 5120, dtype=torch.int8))
    assert len(pieces) == 854


def test_finer_groups_are_never_worse() -> None:
    weight = linear_weight()
    errors = [
        (QuantisedLinear([plain_linear(weight, None)], name)(torch.eye(WIDTH)).T - weight).norm()
        for name in ("int4", "int4-64", "int4-32", "int8")
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] > 0


def test_maps_of_one_input_are_joined_with_their_biases() -> None:
    first, second = linear_weight(24), linear_weight(9)
    bias = torch.arange(9.0)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(4))
    joined = QuantisedLinear([plain_linear(first, None), plain_linear(second, bias)], "int4")(x)
    torch.testing.assert_close(joined[:, :24], QuantisedLinear([plain_linear(first, None)], "int4")(x))
    torch.testing.assert_close(joined[:, 24:], QuantisedLinear([plain_linear(second, bias)], "int4")(x))


@pytest.mark.parametrize("packed", [False, True])
def test_copy_is_moved_like_other_modules(packed: bool) -> None:
    copy = QuantisedLinear([plain_linear(linear_weight(), torch.zeros(40))], "int8", packed=packed).to("meta")
    assert copy.bias is not None and copy.codes.is_meta and copy.scales.is_meta and copy.bias.is_meta


def test_width_without_a_matching_group_is_int8() -> None:
    copy = QuantisedLinear([plain_linear(linear_weight(8, 48), None)], "int4")
    assert copy.group is None and copy.codes.dtype == torch.int8


@pytest.mark.parametrize(("width", "tiles"), [(576, 4), (960, 4), (1536, 8), (896, 8), (96, 2)])
def test_cuda_layout_divides_every_row_that_can_be_quantised(width: int, tiles: int) -> None:
    """torch's check: `in.size(1) % (innerKTiles * 16) == 0`; the kernel knows 2, 4 and 8."""
    assert cuda_tiles(width) == tiles and width % (16 * tiles) == 0


@pytest.mark.parametrize("family", variants())
def test_output_equals_plain_decoding_for_any_quantised_parts(family: str) -> None:
    runtime = tiny_runtime(family)
    rule, ending = TokenRule.of(Sampling(), None), Ending(24)
    prompt = [5, 9, 11, 2, 7]
    plain = decode(runtime, prompt, PLAIN, rule, ending)
    names = ("int4", "fp8") if cpu_multiplies_fp8() else ("int4",)
    for formats in (MIXED, *(LayerSet(4).filled(name).formats for name in names)):
        draft = LayerSet(4, frozenset({1}), frozenset({2}), formats)
        drafted = decode(runtime, prompt, swift(draft, SwiftSettings()), rule, ending)
        assert drafted.token_ids == plain.token_ids
        assert drafted.drafted > 0 and drafted.layer_set == draft


def test_copy_of_a_dispatched_model_runs_its_own_maps() -> None:
    """`dispatch_model` with several devices binds a `forward` to each module."""
    plain, spread = (tiny_runtime("llama", torch.float32) for _ in range(2))
    attach_align_device_hook_on_blocks(spread.hf_model, execution_device={"": torch.device("cpu")})
    assert "forward" in vars(spread.blocks[0].parts.mlp)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    own, found = (each.copies.parts("mlp", 0, PartForm("int4")).mlp for each in (plain, spread))
    assert torch.equal(found(x), own(x)) and not torch.equal(found(x), plain.blocks[0].parts.mlp(x))
    assert torch.equal(spread.blocks[0].parts.mlp(x), plain.blocks[0].parts.mlp(x))  # which keeps its hook
    draft = LayerSet(4).filled("int4")
    for each in (plain, spread):
        each.copies.prepare(draft)
    drafted = [each.forward(Rows([5, 9], 0, variants=(draft,)), each.new_buffer(8)) for each in (plain, spread)]
    assert torch.equal(*drafted)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_draft_of_quantised_parts_equals_a_model_with_their_weights(family: str) -> None:
    """A quantised pass equals a pass of a model with the copies' weights."""
    runtime, other = tiny_runtime(family), tiny_runtime(family)
    formats = (("attn", "int8"), ("mlp", "int4"))
    for layer, block in enumerate(other.blocks):
        for kind in ("attn", "mlp"):
            parts = runtime.copies.parts(kind, layer, PartForm(dict(formats)[kind]))  # type: ignore[arg-type]
            assert parts is not runtime.blocks[layer].parts
            own = [*block.parts.qkv, block.parts.out] if kind == "attn" else [block.parts.mlp]
            for module in (part for each in own for part in each.modules()):
                weight = getattr(module, "weight", None)
                if isinstance(weight, nn.Parameter) and weight.dim() == 2:
                    is_conv = type(module).__name__ == "Conv1D"
                    stored = weight.data.T if is_conv else weight.data
                    copy = QuantisedLinear([plain_linear(stored, None)], dict(formats)[kind])
                    seen = copy(torch.eye(stored.shape[1]).double())
                    weight.data = seen if is_conv else seen.T.contiguous()
    rows = [3, 1, 4, 1, 5]
    variant = LayerSet(4, formats=formats)
    quantised = runtime.forward(Rows(rows, 0, variants=(variant,)), runtime.new_buffer(8))
    expected = other.forward(Rows(rows, 0), other.new_buffer(8))
    torch.testing.assert_close(quantised, expected, rtol=2e-5, atol=2e-4)


def test_variants_of_one_pass_have_separate_formats() -> None:
    runtime = tiny_runtime("llama")
    sets = (LayerSet(4), LayerSet(4, frozenset({1}), formats=MIXED), LayerSet(4, formats=(("head", "int4"),)))
    alone = [runtime.forward(Rows([3, 1, 4], 0, variants=(one,)), runtime.new_buffer(8)) for one in sets]
    visible = torch.zeros((9, 9), dtype=torch.bool)
    for i in range(3):
        visible[3 * i : 3 * i + 3, 3 * i : 3 * i + 3] = torch.ones((3, 3), dtype=torch.bool).tril()
    together = runtime.forward(Rows([3, 1, 4] * 3, 0, [0, 1, 2] * 3, visible, sets), runtime.new_buffer(16))
    torch.testing.assert_close(together, torch.cat(alone))


def test_target_is_untouched_and_copies_are_made_once() -> None:
    runtime = tiny_runtime("llama")
    before = {name: tensor.clone() for name, tensor in runtime.hf_model.state_dict().items()}
    assert runtime.copies.n_bytes == 0
    draft = LayerSet(4, frozenset({1}), formats=(("attn", "int4"), ("mlp", "int4"), ("head", "int4")))
    runtime.copies.prepare(draft)
    held = runtime.copies.n_bytes
    runtime.copies.prepare(replace(draft, skip_attn=frozenset({1, 2})))
    assert runtime.copies.n_bytes == held > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in runtime.hf_model.state_dict().items())


@pytest.mark.parametrize(
    ("formats", "words"),
    [
        ((("attn:4", "int8"),), "'attn:4' cannot be quantised in a model of 4 layers"),
        ((("ffn", "int8"),), "'ffn' cannot be quantised"),
        ((("mlp", "int3"),), "cannot be 'int3': known formats are int8, fp8, int4"),
    ],
)
def test_unknown_part_or_format_is_named(formats: tuple[tuple[str, str], ...], words: str) -> None:
    with pytest.raises(LayerSetError, match=words):
        LayerSet(4, formats=formats)


def test_format_of_a_layer_overrides_that_of_all() -> None:
    layer_set = LayerSet(4, formats=MIXED)
    assert layer_set.format_of("mlp", 1) == "int4" and layer_set.format_of("mlp", 2) is None
    assert layer_set.format_of("attn", 3) == "int8" and layer_set.format_of("head") == "int8"
    assert VOCAB % 16  # heads of these models need rows of padding


@pytest.mark.parametrize("name", ["int4", pytest.param("fp8", marks=needs_fp8)])
def test_copies_are_stored_for_the_next_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(copy_files, "LEAST_BYTES", 0)
    draft = LayerSet(4).filled(name)
    steps: list[str] = []

    def next_process() -> Runtime:
        model = tiny_model("llama")
        return Runtime(model, None, ModelInfo("v1:0123456789abcdef", "llama", 4, 1))

    first, second = next_process(), next_process()
    first.copies.prepare(draft, steps.append)
    assert steps and len(list(tmp_path.rglob("*.safetensors"))) == 3  # attention, MLPs, head
    steps.clear()
    second.copies.prepare(draft, steps.append)
    kept = [module.codes for layer in range(4) for module in (second.copies.parts("attn", layer, PartForm(name)).out,)]
    assert all(codes.data_ptr() % 64 == 0 for codes in kept)  # torch's int8 kernel dies of others
    assert steps == [] and second.copies.n_bytes == first.copies.n_bytes
    rows = Rows([3, 1, 4], 0, variants=(draft,))
    assert torch.equal(first.forward(rows, first.new_buffer(4)), second.forward(rows, second.new_buffer(4)))


def test_unreadable_file_of_copies_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(copy_files, "LEAST_BYTES", 0)
    runtime = Runtime(tiny_model("llama"), None, ModelInfo("v1:0123456789abcdef", "llama", 4, 1))
    path = copy_files.copy_file("v1:0123456789abcdef", "head", "int8", runtime.dtype, runtime.device)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half a file")
    left, fresh = path.with_name("of-a-dead-one.part"), path.with_name("of-another.part")
    for part in (left, fresh):
        part.write_bytes(b"half a file")
    os.utime(left, (0, 0))
    runtime.copies.prepare(LayerSet(4, formats=(("head", "int8"),)))
    assert {each.name for each in path.parent.iterdir()} == {path.name, fresh.name}
    assert copy_files.read_copy(path, runtime.device) is not None
