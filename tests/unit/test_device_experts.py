"""Laws of the Triton kernels for experts: they agree with torch, and read only the weights of chosen experts."""

from __future__ import annotations

import random
from itertools import product
from typing import Any, cast

import pytest
import torch
from families import MIXTURES, VOCAB, tiny_runtime
from gguf_blocks import mxfp4
from native import library
from on_device import DTYPES, HALF, PLACE, close, drawn, here, in_steps_and_in_a_tree

from swiftopt.core.layer_sets import LayerSet
from swiftopt.models.block_experts import HALVES, PARTS, BlockExperts, stacked
from swiftopt.models.coded import CodedLinear, Codes
from swiftopt.models.expert_checkpoints import mixtures_of
from swiftopt.models.expert_choice import chooser_of
from swiftopt.models.families import FAMILIES
from swiftopt.models.kernels.experts import correction_of, routing_of
from swiftopt.models.loading import at_speed
from swiftopt.models.mixtures import in_order
from swiftopt.models.row_invariant import make_row_invariant
from swiftopt.models.rows import Rows

pytest.importorskip("triton")

from swiftopt.models.kernels import device, device_experts

ONE_EACH = ("glm4_moe",)  # It has groups of experts, a correction, shared experts, and weights that are scaled.
N_EXPERTS = 6
# Settings by which the only layer of a model has a mixture.
ONE_LAYER = {
    **{"mlp_layer_types": ["sparse"], "mlp_only_layers": []},
    **{"first_k_dense_replace": 0, "moe_layer_start_index": 0, "moe_layers": [0]},
}


def mixtures(with_attention_alone: bool = False) -> list[Any]:
    """Return the types whose mixtures the kernels compute; those beyond `ONE_EACH` are marked `families`.

    `test_row_invariant.py` has the hybrids; torch computes Gemma 4's layers.
    """
    others = [name for name in MIXTURES if not name.startswith(("lfm2_moe", "qwen3_next", "qwen3_5", "gemma4"))]
    if with_attention_alone:  # Of layers with latent attention, torch computes all.
        families = {name: FAMILIES[name.partition(":")[0]] for name in others}
        others = [name for name, family in families.items() if family.mixer is None and family.latents is None]
    return [pytest.param(name, marks=() if name in ONE_EACH else pytest.mark.families) for name in others]


@pytest.mark.parametrize("variant", mixtures())
def test_experts_are_chosen_as_by_the_models_router(variant: str) -> None:
    """Tokens have the same experts and weights; for some rows alone both are bitwise equal."""
    runtime = tiny_runtime(variant, torch.float32)
    block = next(block for block in runtime.blocks if block.experts is not None)
    mlp, named = block.parts.mlp, block.experts
    assert named is not None
    chooser, correction = chooser_of(mlp, named), correction_of(mlp)
    if correction is not None:
        correction.copy_(0.2 * torch.randn(N_EXPERTS, generator=torch.Generator().manual_seed(1)))
    hidden = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
    others = [correction] if variant in ("minimax_m2", "hy_v3") else []
    logits, weights, experts = in_order(chooser(hidden, *others))
    routing = routing_of(runtime.config, mlp, named, N_EXPERTS)
    on_place = None if correction is None else correction.to(PLACE)
    taken, found = device_experts.choose(logits.to(PLACE).contiguous(), on_place, routing)
    order = experts.argsort(dim=-1)
    assert torch.equal(taken.cpu().long(), experts.gather(1, order))
    torch.testing.assert_close(found.cpu(), weights.gather(1, order).float(), rtol=1e-5, atol=1e-6)
    for row in (0, 11):
        alone = device_experts.choose(logits[row : row + 1].to(PLACE).contiguous(), on_place, routing)
        assert torch.equal(alone[0][0], taken[row]) and torch.equal(alone[1][0], found[row])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # The interpreter computes with them, too.
def test_nan_logits_choose_existing_experts() -> None:
    runtime = tiny_runtime("qwen3_moe", torch.float32)
    block = runtime.blocks[1]
    assert block.experts is not None
    routing = routing_of(runtime.config, block.parts.mlp, block.experts, N_EXPERTS)
    taken, _ = device_experts.choose(torch.full((2, N_EXPERTS), torch.nan, device=PLACE), None, routing)
    assert taken.tolist() == [[0, 1], [0, 1]]


def tiles_of(experts: torch.Tensor, n_experts: int) -> list[tuple[int, list[int]]]:
    """Return the expert and the positions of the choices of each tile."""
    order, tiles = device_experts.shared_out(experts.to(PLACE, torch.int32), n_experts)
    expert, first, count = tiles.tolist()
    places = order.tolist()
    assert sorted(places) == list(range(experts.numel()))
    return [(e, places[at : at + n]) for e, at, n in zip(expert, first, count, strict=True) if n > 0]


def test_every_choice_is_in_exactly_one_tile_of_its_expert() -> None:
    """All choices of three rows among three experts are enumerated; then many rows, in full and partial tiles."""
    choices = [torch.tensor(one).view(-1, 1) for one in product(range(3), repeat=3)]
    generator = torch.Generator().manual_seed(0)
    choices += [torch.stack([torch.randperm(37, generator=generator)[:4] for _ in range(n)]) for n in (1, 9, 100)]
    for experts in choices:
        n_experts, flat = (3 if experts.shape[1] == 1 else 37), experts.flatten().tolist()
        tiles = tiles_of(experts, n_experts)
        assert sorted(place for _, places in tiles for place in places) == list(range(len(flat)))
        assert all(flat[place] == expert for expert, places in tiles for place in places)
        assert all(len(places) <= device.TILE for _, places in tiles)
        n_needed = sum(-(-flat.count(expert) // device.TILE) for expert in set(flat))
        assert len(tiles) == n_needed


@pytest.mark.parametrize(
    ("dtype", "by_inputs"),
    [
        (HALF, True),
        *(pytest.param(*one, marks=pytest.mark.families) for one in list(product(DTYPES, [False, True]))[:3]),
    ],
)
def test_experts_equal_torchs_and_rows_are_independent(dtype: torch.dtype, by_inputs: bool) -> None:
    """With biases and both layouts of maps. Experts that no row chooses are NaN and have no effect."""
    n_rows, n_chosen, n_in, n_inner, n_out = 20, 2, 40, 33, 17
    shapes = ((N_EXPERTS, 2 * n_inner, n_in), (N_EXPERTS, n_out, n_inner))
    into, down = (drawn(*shape, seed=i, dtype=dtype) / shape[2] ** 0.5 for i, shape in enumerate(shapes))
    biases = [drawn(N_EXPERTS, n, seed=i, dtype=dtype) for i, n in enumerate((2 * n_inner, n_out), start=2)]
    for part in (into, down, *biases):
        part[1] = torch.nan
    if by_inputs:
        into, down = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (into, down))
    x, weights = drawn(n_rows, n_in, seed=4, dtype=dtype), drawn(n_rows, n_chosen, seed=5).softmax(-1)
    generator = torch.Generator().manual_seed(6)
    taken = torch.stack(
        [torch.tensor([0, 2, 3, 4, 5])[torch.randperm(5, generator=generator)[:2]] for _ in range(n_rows)]
    )
    taken = taken.to(PLACE, torch.int32)

    def computed(rows: slice) -> torch.Tensor:
        own, shares = taken[rows].contiguous(), weights[rows].contiguous()
        tiles = device_experts.shared_out(own, N_EXPERTS)
        both = device_experts.expert_linear(x[rows], into, biases[0], own, *tiles)
        inner = device.gated(both, device.CLAMPED, by_turns=True, limit=2.0, slope=1.7)
        return device_experts.mixed(inner, down, biases[1], own, shares, *tiles)

    whole = computed(slice(None))
    expected = torch.zeros(n_rows, n_out, dtype=torch.float64, device=PLACE)
    for row, turn in product(range(n_rows), range(n_chosen)):
        expert = int(taken[row, turn])
        both = into[expert].double() @ x[row].double() + biases[0][expert].double()
        gate, up = both[::2].clamp(max=2.0), both[1::2].clamp(-2.0, 2.0)
        inner = (up + 1) * gate * torch.sigmoid(1.7 * gate)
        expected[row] += weights[row, turn] * (down[expert].double() @ inner + biases[1][expert].double())
    close(whole, expected, dtype)
    for rows in (slice(17, 18), slice(3, 20)):
        assert torch.equal(computed(rows), whole[rows])


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("variant", mixtures(with_attention_alone=True))
def test_rows_of_a_mixture_have_the_same_bits_alone_and_together(variant: str) -> None:
    """A chain runs step by step, and in one pass among rows of another branch; drafts choose fewer experts."""
    # Torch's functions of a CPU take what is left of their vectors another way: widths are whole vectors.
    shape: dict[str, Any] = {"num_hidden_layers": 1, "moe_intermediate_size": 32, "intermediate_size": 32}
    shape |= {name: value for name, value in ONE_LAYER.items() if name in MIXTURES[variant]}
    runtime, reference = (here(tiny_runtime(variant, torch.float32, **shape)) for _ in range(2))
    assert make_row_invariant(runtime) is None and runtime.exact
    rng = random.Random(3)
    prompt, chain = ([rng.randrange(2, VOCAB) for _ in range(n)] for n in (3, 1))
    prefilled, steps, rows, tree = in_steps_and_in_a_tree(runtime, prompt, chain)
    close(prefilled, reference.prefill(prompt, reference.new_buffer(64)), torch.float32)
    assert torch.equal(rows, torch.stack(steps))
    if not variant.startswith("phimoe"):  # Its router chooses two.
        draft = Rows([4], len(prompt), variants=(LayerSet(1, experts=(("mlp", 1),)),))
        drafted, wanted = (each.forward(draft, buffer) for each, buffer in ((runtime, tree), (reference, tree)))
        close(drafted, wanted, torch.float32)


def coded(n_out: int, n_in: int, bits: int, seed: int, is_ordered: bool) -> CodedLinear:
    """Return a map with random codes in groups of 32 inputs, which may be permuted."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (n_out, n_in), dtype=torch.uint8, generator=draw)
    scales = (torch.rand((n_out, n_in // 32), generator=draw) + 0.5) / ((1 << bits) * n_in**0.5)
    zeros = torch.randint(0, 1 << bits, scales.shape, dtype=torch.int16, generator=draw)
    order = torch.randperm(n_in, generator=draw) if is_ordered else None
    return CodedLinear(Codes(codes, scales, zeros, bits, 32, order), None, torch.float32)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(
    ("bits", "variant", "is_ordered"),
    [
        (4, "qwen3_moe", True),
        *(
            pytest.param(*row, marks=pytest.mark.families)
            for row in (
                (8, "qwen3_moe", False),
                (4, "llama4_text", True),
                (8, "glm4_moe", False),
                (None, "gpt_oss", False),
            )
        ),
    ],
)
def test_coded_experts_equal_experts_with_decoded_weights(bits: int | None, variant: str, is_ordered: bool) -> None:
    """Rows have the same bits alone. Afterwards the codes and scales of a layer are one tensor each.

    Without a number of bits the codes are MXFP4, and the model has biases and interleaved gates.
    """
    shape: dict[str, Any] = {"num_hidden_layers": 1, "moe_intermediate_size": 32, "intermediate_size": 32}
    shape |= {name: value for name, value in ONE_LAYER.items() if name in MIXTURES[variant]}
    runtime, reference = (tiny_runtime(variant, torch.float32, **shape) for _ in range(2))
    named = runtime.blocks[0].experts
    assert named is not None
    name = next(name for name in mixtures_of(runtime.hf_model, named))
    sizes = {"gate": (32, 32), "up": (32, 32), "down": (32, 32)}
    maps: dict[str, Any] = {
        part: mxfp4(N_EXPERTS, *sizes[part], library(), seed=i)[0]
        if bits is None
        else [coded(*sizes[part], bits, 7 * i + e, is_ordered) for e in range(N_EXPERTS)]
        for i, part in enumerate(PARTS)
    }
    whole: Any = reference.hf_model.get_submodule(name)
    for leaf in HALVES:
        numbers = {part: torch.stack([one.numbers() for one in maps[part]]) for part in PARTS}
        getattr(whole, leaf).data = stacked(numbers, leaf, named).contiguous()
    cast(Any, runtime.hf_model).set_submodule(name, BlockExperts(maps, named, whole, torch.float32))
    runtime, reference = here(runtime), here(reference)
    assert make_row_invariant(runtime) is None and runtime.exact
    assert len({one.codes.untyped_storage().data_ptr() for one in maps["gate"]}) == 1
    rng = random.Random(3)
    prompt, chain = ([rng.randrange(2, VOCAB) for _ in range(n)] for n in (3, 1))
    prefilled, steps, rows, _ = in_steps_and_in_a_tree(runtime, prompt, chain)
    close(prefilled, reference.prefill(prompt, reference.new_buffer(64)), torch.float32)
    assert torch.equal(rows, torch.stack(steps))


def test_unsupported_form_of_experts_is_named() -> None:
    runtime = tiny_runtime("qwen3_moe", torch.float32)
    experts: Any = runtime.blocks[1].parts.mlp.get_submodule("experts")
    experts.down_proj.data = experts.down_proj.data.to(torch.float16)
    assert make_row_invariant(runtime) == "experts such as Qwen3MoeExperts are computed by torch"
    assert not runtime.exact
    with pytest.raises(Exception, match="cannot be exact here"):
        at_speed(tiny_runtime("qwen3_moe"), "exact")
