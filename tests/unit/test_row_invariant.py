"""Laws of the Triton kernels: they agree with torch, and rows are independent. Without a GPU they are interpreted."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import VOCAB, tiny_runtime
from native import library
from on_device import DTYPES, HALF, PLACE, close, drawn, here, in_steps_and_in_a_tree
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm

from swiftopt.core.errors import SettingsError
from swiftopt.core.layer_sets import LayerSet, PartForm
from swiftopt.models.buffer import KVBuffer
from swiftopt.models.coded import CodedLinear, Codes, unpack
from swiftopt.models.config_layout import AttentionWindow, HeadLayout
from swiftopt.models.family import SlotShape
from swiftopt.models.fused import GATES, GatedMlp, fuse
from swiftopt.models.heads import attend
from swiftopt.models.kernels.limits import known_form
from swiftopt.models.loading import at_speed
from swiftopt.models.quantised import QuantisedLinear, cpu_multiplies_fp8
from swiftopt.models.rotation import RotaryTables, rotate
from swiftopt.models.row_invariant import coded_map, make_row_invariant
from swiftopt.models.row_tables import RowTable
from swiftopt.models.rows import PassPlan, Rows
from swiftopt.models.transfers import uploaded

pytest.importorskip("triton")
from swiftopt.models.kernels import device, device_attention, device_codes, layout

FAMILIES = ["llama", "gemma3", "gpt2"]
OTHERS = (
    "gemma2",
    "olmo2",
    "glm4",
    "hunyuan_v1_dense",
    "stablelm:serial",
    "bitnet",
    "granite",
    "olmo",
    "falcon",
    "opt",
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_in", "n_out"), [(40, 17), (300, 33)])
def test_linear_map_equals_torchs_and_rows_are_independent(dtype: torch.dtype, n_in: int, n_out: int) -> None:
    x, weight, bias = drawn(33, n_in, dtype=dtype), drawn(n_out, n_in, seed=1, dtype=dtype), drawn(n_out, dtype=dtype)
    for own in (weight, weight.t().contiguous().t()):  # GPT-2's lie the other way
        whole = device.linear(x, own, bias)
        close(whole, F.linear(x.double(), weight.double(), bias.double()), dtype)
        for rows in (slice(0, 1), slice(16, 17), slice(5, 22)):
            assert torch.equal(device.linear(x[rows], own, bias), whole[rows])


def test_fp8_copy_is_read_with_its_rounded_values() -> None:
    plain, x = nn.Linear(300, 37), drawn(19, 300)
    made = QuantisedLinear([plain], "fp8", packed=True).to(PLACE)
    weight = (made.codes.float() * made.scales)[: made.n_out, : made.n_in].double()
    assert ((weight.cpu() - plain.weight).abs() <= 2**-4 * plain.weight.abs() + made.scales.cpu()[:37] * 2**-9).all()
    found = made(x)
    close(found, F.linear(x.double(), weight, plain.bias.double().to(PLACE)), torch.float32)
    for row in (0, 18):
        assert torch.equal(made(x[row : row + 1])[0], found[row])


@pytest.mark.parametrize("name", ["int8", "int4-32", "int4-64"])
def test_packed_copy_is_read_with_its_packed_values(name: str) -> None:
    plain = nn.Linear(100, 37)
    made = QuantisedLinear([plain], name, packed=True).to(PLACE)
    assert made.group is not None
    width = made.scales.shape[1] * made.group
    x = F.pad(drawn(19, 100), (0, width - 100))
    by = device_codes.CodedMap(made.codes, made.scales, made.bits, made.group, made.n_out, layout.ZERO_VALUES)
    found = device_codes.coded_linear(x, by)
    codes, scales, zeros = (part.float() for part in unpack(made.codes, made.scales, made.bits))
    steps = codes.unflatten(1, (-1, made.group)) - (1 << (made.bits - 1))
    weight = (steps * scales[..., None] + zeros[..., None]).flatten(1)[: made.n_out]
    close(found, x.double() @ weight.double().t(), torch.float32)
    assert made.bias is not None
    assert torch.equal(made(x[:, :100]), found + made.bias)
    for row in (0, 18):
        alone = device_codes.coded_linear(x[row : row + 1], by)
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_of_a_checkpoint_are_read_as_stored(bits: int) -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 1 << bits, (21, 64), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 1 << bits, (21, 2), dtype=torch.int16, generator=generator)
    coded = CodedLinear(
        Codes(codes, torch.rand(21, 2, generator=generator), zeros, bits, 32), torch.randn(21), torch.float32
    ).to(PLACE)
    x = drawn(5, 64)
    found = device_codes.coded_linear(x, coded_map(coded), coded.bias)
    close(found, coded(x), torch.float32)


@pytest.mark.parametrize("kind", ["layer", "rms", "rms-plus-one", "unweighted"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_equals_the_models(kind: str, dtype: torch.dtype) -> None:
    if kind == "unweighted":
        own: Any = NanoChatRMSNorm(eps=1e-5)
    else:
        own = tiny_runtime({"layer": "gpt2", "rms": "llama", "rms-plus-one": "gemma3"}[kind], dtype).final_norm
        own.weight.data = drawn(32, seed=4, dtype=dtype).cpu()
    x = drawn(7, 32, dtype=dtype)
    form = known_form(own, 32, dtype, torch.device("cpu"))
    bias = None if form.bias is None else form.bias.to(PLACE)
    found = device.norm(x, form.weight.to(PLACE), bias, form.eps, kind == "layer", "plus" in kind)
    close(found, own(x.cpu()).to(PLACE), dtype)


class Shape:
    """The attributes of a model that tables of rows read."""

    max_positions, n_layers, windows, dtype = 512, 2, (None, AttentionWindow(40)), torch.float32
    givers: frozenset[int] = frozenset()

    def __init__(self, heads: int, kv_heads: int, width: int) -> None:
        layout_of_heads = HeadLayout(heads, kv_heads, width, False)
        self.blocks = [SimpleNamespace(heads=layout_of_heads, device=PLACE, has_attention=True)] * 2


def filled(shape: Any, capacity: int, seed: int, dtype: torch.dtype) -> KVBuffer:
    heads = shape.blocks[0].heads
    buffer = KVBuffer([PLACE] * 2, [SlotShape(heads.n_kv_heads, heads.width, heads.width)] * 2, capacity, dtype)
    for part in (*buffer.keys, *buffer.values):
        part.copy_(drawn(*part.shape, seed=(seed := seed + 1), dtype=dtype))
    return buffer


TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "dtype", "softcap", "with_sinks"),
    [
        (4, 2, 16, torch.float32, 0.7, True),
        pytest.param(4, 2, 16, HALF, None, True, marks=pytest.mark.families),
        pytest.param(3, 3, 20, torch.float32, None, False, marks=pytest.mark.families),
        (17, 1, 16, HALF, None, False),
    ],
)
def test_attention_of_several_sequences_equals_torchs(
    heads: int, kv_heads: int, width: int, dtype: torch.dtype, softcap: float | None, with_sinks: bool
) -> None:
    """Chains, a tree, single rows of a tree, and rows that see only some slots, with and without a window."""
    shape: Any = Shape(heads, kv_heads, width)
    sequences = [
        Rows([0] * 5, 295),
        Rows([0] * 4, 30, [30, 31, 31, 32], TREE),
        Rows([0] * 2, 302, [301, 302], torch.cat((torch.ones(2, 2, dtype=torch.bool), TREE[2:]), dim=1)),
        Rows([0] * 2, 60, [50, 53], torch.cat((torch.arange(10) < torch.tensor([[0], [3]]), TREE[[0, 2], :2]), dim=1)),
        Rows([0], 0),
    ]
    buffers = [filled(shape, rows.first_slot + 9, 10 * i, dtype) for i, rows in enumerate(sequences)]
    plans: list[PassPlan] = []
    for rows, buffer in zip(sequences, buffers, strict=True):
        plans.append(PassPlan(shape, rows, buffer, plans[-1].first + plans[-1].n if plans else 0))
    n = plans[-1].first + plans[-1].n
    query = drawn(n, heads, width, dtype=dtype)
    key, value = (drawn(n, kv_heads, width, seed=seed, dtype=dtype) for seed in (5, 6))
    table = RowTable(shape)
    data = uploaded(table.made([(plan, plan.every) for plan in plans], PLACE), PLACE)
    assert device_attention.store(query, key, value, data, None, 1, 2) is query
    sinks = drawn(heads, seed=7, dtype=dtype) if with_sinks else None
    how = (width**-0.5, softcap, sinks)
    for view, window in enumerate(shape.windows):
        found = device_attention.attend(
            query, data, table.field(view), table.n_tiles[view], table.n_slots, 1, 2, kv_heads, *how
        )
        for plan, buffer in zip(plans, buffers, strict=True):
            own = slice(plan.first, plan.first + plan.n)
            at = slice(plan.rows.first_slot, plan.end)
            assert torch.equal(buffer.keys[1][:, at], key[own].transpose(0, 1))
            assert torch.equal(buffer.values[1][:, at], value[own].transpose(0, 1))
            mask = plan.mask(window, PLACE).to(dtype).repeat(heads // kv_heads, 1)
            keys, values = (part[1][:, : plan.end] for part in (buffer.keys, buffer.values))
            close(found[own], attend(query[own], keys, values, mask, *how), dtype)
            for row in {0, plan.n - 1}:  # alone, over a text of the slots that it sees
                seen = mask[row] == 0
                alone = KVBuffer([PLACE], [SlotShape(kv_heads, width, width)], int(seen.sum()), dtype)
                alone.keys[0].copy_(keys[:, seen])
                alone.values[0].copy_(values[:, seen])
                one = RowTable(shape)
                made = uploaded(
                    one.made([(PassPlan(shape, Rows([0], alone.capacity - 1), alone), frozenset({0}))], PLACE), PLACE
                )
                bits = device_attention.attend(
                    query[own][row : row + 1], made, one.field(0), 1, one.n_slots, 0, 1, kv_heads, *how
                )
                assert torch.equal(bits[0], found[own][row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rotated"), [(16, 16), (20, 8)])
def test_keys_and_queries_are_rotated_by_position(width: int, rotated: int, dtype: torch.dtype) -> None:
    """They are rotated as by `rotate`; the keys of padding rows are not written."""
    shape: Any = Shape(4, 2, width)
    buffer = filled(shape, 12, 3, dtype)
    before = buffer.keys[1].clone()
    plan = PassPlan(shape, Rows([0] * 3, 5, [5, 6, 6], TREE[:3, :3]), buffer)
    fused = drawn(4, 8 * width, dtype=dtype)  # one projection's outputs: none of the three is contiguous
    query, key, value = (part.view(4, -1, width) for part in fused.split([4 * width, 2 * width, 2 * width], dim=-1))
    cos, sin = (drawn(16, rotated, seed=seed, dtype=dtype) for seed in (8, 9))
    data = uploaded(RowTable(shape, 4, 16, 4).made([(plan, plan.every)], PLACE), PLACE)
    found = device_attention.store(query, key, value, data, (cos, sin), 1, 2)
    turn = RotaryTables(cos, sin).at(torch.tensor([5, 6, 6]))
    close(found[:3], rotate(query[:3], turn), dtype)
    close(buffer.keys[1][:, 5:8], rotate(key[:3], turn).transpose(0, 1), dtype)
    assert torch.equal(buffer.values[1][:, 5:8], value[:3].transpose(0, 1))
    for part in (slice(0, 5), slice(8, 12)):
        assert torch.equal(buffer.keys[1][:, part], before[:, part])


def test_tiles_group_rows_of_one_sequence_with_a_common_first_slot() -> None:
    shape: Any = Shape(8, 2, 16)
    table = RowTable(shape)
    buffer = filled(shape, 64, 0, torch.float32)
    plans = [
        PassPlan(shape, Rows([0] * 6, 36), buffer),
        PassPlan(shape, Rows([0] * 4, 8, [8, 9, 9, 10], TREE), buffer, 6),
    ]
    made = table.made([(plan, plan.every) for plan in plans], PLACE)

    def tiles(view: int) -> list[tuple[int, int]]:
        part = made[table.field(view) :, : table.n_tiles[view]]
        return list(
            zip(part[device_attention.TILE_FIRST].tolist(), part[device_attention.TILE_COUNT].tolist(), strict=True)
        )

    assert tiles(0) == [(0, 4), (4, 2), (6, 2), (8, 1), (9, 1)]  # four rows of four heads fill a tile
    assert tiles(1) == [(0, 4), (4, 1), (5, 1), (6, 2), (8, 1), (9, 1)]  # from the 41st row on a window moves
    assert table.longest == 2 and made.shape[0] == table.n_fields == 5 + 2 * (5 + 2)
    wider = RowTable(shape, 16, 64, 1)
    with pytest.raises(ValueError, match="lists of 2 slots do not fit"):
        wider.made([(plan, plan.every) for plan in plans], PLACE)


# Types of which each has several mechanisms that the kernels compute, or leave to torch.
DENSE = ("ministral3", *(pytest.param(name, marks=pytest.mark.families) for name in OTHERS))


@pytest.mark.slow
@pytest.mark.usefixtures("few_steps")  # the text fits the first
@pytest.mark.parametrize("family", [*FAMILIES, *DENSE])
def test_rows_of_a_tree_have_the_bits_of_a_chain(family: str) -> None:
    # Torch's functions of a CPU take what is left of their vectors another way: widths are whole vectors.
    shape: dict[str, Any] = {} if family in ("gpt2", "falcon", "opt") else {"intermediate_size": 64}
    shape["num_hidden_layers"] = 2  # what the second is given are bits of the first
    runtime, reference = (here(tiny_runtime(family, torch.float32, **shape)) for _ in range(2))
    assert runtime.n_layers == 2
    assert make_row_invariant(runtime) is None and runtime.exact
    rng = random.Random(3)
    prompt, chain = ([rng.randrange(2, VOCAB) for _ in range(n)] for n in (6, 2))
    prefilled, steps, rows, _ = in_steps_and_in_a_tree(runtime, prompt, chain)
    assert torch.equal(rows, torch.stack(steps))
    close(prefilled, reference.prefill(prompt, reference.new_buffer(64)), torch.float32)


_STATE_AND_ATTENTION = {"layer_types": ["linear_attention", "full_attention"]}
# Types with other token mixers than attention, and what makes two layers of whole vectors of each.
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1:norm": {},
    "falcon_h1:gate": {},
    "falcon_h1": {},
    "qwen3_5_text": _STATE_AND_ATTENTION,
    "qwen3_next": {**_STATE_AND_ATTENTION, "shared_expert_intermediate_size": 64},
    "qwen3_5_moe_text": {**_STATE_AND_ATTENTION, "shared_expert_intermediate_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "moe_intermediate_size": 32},
    "bamba": {},
    "granitemoehybrid": {},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe"], "moe_shared_expert_intermediate_size": 64},
    "mamba2": {},
    "mamba": {},
    "jamba": {"attn_layer_period": 2},
}
DEFAULT_HYBRIDS = ("lfm2", "falcon_h1:norm")


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(
    "family", [name if name in DEFAULT_HYBRIDS else pytest.param(name, marks=pytest.mark.families) for name in HYBRIDS]
)
def test_rows_with_states_have_the_bits_of_a_chain_and_of_a_text(family: str) -> None:
    shape: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 64, **HYBRIDS[family]}
    runtime, reference = (here(tiny_runtime(family, torch.float32, **shape)) for _ in range(2))
    assert any(block.n_taps for block in runtime.blocks)
    assert make_row_invariant(runtime) is None and runtime.exact
    prompt, chain = [5, 9, 2, 7], [3, 8]
    prefilled, steps, rows, _ = in_steps_and_in_a_tree(runtime, prompt, chain)
    assert torch.equal(rows, torch.stack(steps))
    assert torch.equal(runtime.prefill([*prompt, *chain], runtime.new_buffer(64)), steps[-1])
    close(prefilled, reference.prefill(prompt, reference.new_buffer(64)), torch.float32)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("family", [*FAMILIES, "qwen2", "phi3", "gpt_neox"])
def test_fused_layer_equals_the_models_and_keeps_its_modules(family: str) -> None:
    runtime, reference = (here(tiny_runtime(family, torch.float32, num_hidden_layers=2)) for _ in range(2))
    norms, before = runtime.blocks[0].parts.attn_norm, runtime.final_norm
    fuse(runtime)
    parts = runtime.blocks[0].parts
    fuse(runtime)  # which changes nothing more
    assert (
        runtime.final_norm.module is before
        and parts.attn_norm.module is norms
        and parts.mlp is runtime.blocks[0].parts.mlp
    )
    assert "forward" not in vars(before) and not runtime.exact
    assert len(parts.qkv) == 1 and isinstance(parts.mlp, GatedMlp) == (family in ("llama", "gemma3", "qwen2"))
    buffers = runtime.new_buffer(16), reference.new_buffer(16)
    found, wanted = (
        each.prefill([3, 5, 8, 2], buffer) for each, buffer in zip((runtime, reference), buffers, strict=True)
    )
    close(found, wanted, torch.float32)
    # Without attention in the first layer, the second adds to states that no norm has summed up.
    some = Rows([4, 4], 4, variants=(LayerSet(2, skip_attn=frozenset({0})), LayerSet(2, skip_mlp=frozenset({1}))))
    close(
        *(each.forward(some, buffer) for each, buffer in zip((runtime, reference), buffers, strict=True)), torch.float32
    )
    close(*(each.hf_model(torch.tensor([[3, 5]], device=PLACE)).logits for each in (runtime, reference)), torch.float32)
    assert runtime.final_norm(drawn(2, 32).requires_grad_()).requires_grad  # by torch, where heads are trained
    if isinstance(parts.mlp, GatedMlp):
        assert parts.mlp(drawn(2, 32).requires_grad_()).requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gate_equals_torchs(activation: str, dtype: torch.dtype) -> None:
    x = 4 * drawn(3, 2 * 37, dtype=dtype)
    x[0, 0], x[1, 0] = -100, 100
    gate, up = x.double().chunk(2, dim=-1)
    close(device.gated(x, GATES[activation]), ACT2FN[activation](gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_after_a_sum_has_the_bits_of_separate_kernels(dtype: torch.dtype) -> None:
    x, added, weight, bias = (
        drawn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(5, 40), (5, 40), (40,), (40,)])
    )
    for centred, plus_one, with_bias in ((True, False, bias), (False, True, None), (False, False, None)):
        total, normed = device.added_norm(x, added, weight, with_bias, 1e-5, centred, plus_one)
        assert torch.equal(total, x + added)
        assert torch.equal(normed, device.norm(x + added, weight, with_bias, 1e-5, centred, plus_one))


def test_coded_maps_are_read_in_place() -> None:
    runtime = here(tiny_runtime("llama", torch.float32))
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (32, 48), dtype=torch.uint8, generator=generator)
    order = torch.randperm(48, generator=generator)
    coded = CodedLinear(
        Codes(codes, torch.rand(32, 1), torch.full((32, 1), 8).short(), 4, 64, order), None, runtime.dtype
    )
    x = drawn(2, 3, 48)
    wanted = coded(x.cpu())
    runtime.hf_model.set_submodule("model.layers.0.mlp.down_proj", coded.to(PLACE))
    assert make_row_invariant(runtime) is None
    close(coded(x).cpu(), wanted, torch.float32)


def test_drafts_use_the_faster_kernel_of_their_format() -> None:
    """Both kernels run the same map over the same rows once, when the format is first used."""
    runtime, seen = here(tiny_runtime("llama", torch.float32)), list[tuple[Any, bool, int]]()
    ours_take = {"int4": 0.5, "int8": 2.0, **({"fp8": 0.5} if cpu_multiplies_fp8() else {})}

    def seconds(task: Any) -> float:
        out, copy = task(), task.func
        name = "fp8" if copy.fp8 else f"int{copy.bits}"
        seen.append((name, copy.packed, len(out)))
        assert out.shape[1] == copy.n_out and not out.any()  # of zeros
        return ours_take[name] if copy.packed else 1.0

    runtime.copies.lay_out(packed=seconds)
    assert not seen
    for name, ours in ours_take.items():
        maps = [runtime.copies.parts("attn", layer, PartForm(name)).out for layer in (0, 1)]
        assert [each.packed for each in maps] == [ours < 1.0] * 2
        assert seen == [(name, packed, n) for packed in (False, True) for n in (1, 4)]
        seen.clear()


def test_kernel_that_cannot_be_timed_is_replaced_by_torchs(caplog: pytest.LogCaptureFixture) -> None:
    runtime = here(tiny_runtime("llama", torch.float32))
    runtime.copies.lay_out(packed=lambda task: 1 / 0)
    assert not runtime.copies.parts("attn", 0, PartForm("int8")).out.packed
    assert "our kernel for drafts in int8 is not used here: division by zero" in caplog.text


def test_exact_speed_uses_the_native_kernels_on_a_cpu() -> None:
    library()
    runtime = tiny_runtime("llama", torch.float32)
    at_speed(runtime, "exact")
    assert runtime.exact and runtime.speed == "native"
    with pytest.raises(SettingsError, match=r"cannot be exact here: .*float64"):
        at_speed(tiny_runtime("llama"), "exact")


def test_models_without_row_invariance_state_the_reason() -> None:
    assert "float64" in str(make_row_invariant(tiny_runtime("llama")))
    runtime = tiny_runtime("llama", torch.float32)
    runtime.blocks[0].parts.out.register_forward_hook(lambda *_: None)
    assert "hooks" in str(make_row_invariant(runtime)) and not runtime.exact
    runtime = tiny_runtime("llama", torch.float32)
    runtime.hf_model.get_submodule("model.layers.3").to("meta")
    assert make_row_invariant(runtime) == "the model lies on cpu and meta" and not runtime.exact
