"""Drafts of mixtures with fewer experts and with quantised experts, and the counting of experts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from families import MIXTURES, tiny_runtime
from native import native, native_runtime, words
from torch import Tensor

from swiftopt.core.errors import LayerSetError
from swiftopt.core.layer_sets import LayerSet, PartForm
from swiftopt.models.costs import RECORD_AT, measure_costs, with_formats
from swiftopt.models.graphs import GraphPasses
from swiftopt.models.loading import at_speed
from swiftopt.models.quantised_experts import QuantisedExperts
from swiftopt.models.row_invariant import make_row_invariant
from swiftopt.models.rows import Pass, Rows
from swiftopt.models.runtime import Runtime

ONE = (("mlp", 1),)
SHARED = "glm4_moe"  # A type with shared experts, and a first layer without a mixture.


def drafted(runtime: Runtime, draft: LayerSet, ids: list[int]) -> Tensor:
    variants = () if draft.is_whole else (draft,)
    return runtime.forward(Rows(ids, 0, variants=variants), runtime.new_buffer(len(ids)))


def choices_of(runtime: Runtime, ids: list[int]) -> dict[int, Tensor]:
    """Return the experts (rows, chosen) that torch's path chooses in each layer with a mixture."""
    taken: dict[int, Tensor] = {}
    handles = []
    for block in runtime.blocks:
        if block.experts is not None:
            experts = cast(Any, block.parts.mlp).experts
            handles.append(
                experts.register_forward_pre_hook(
                    lambda module, args, layer=block.index: taken.update({layer: args[1].clone()})
                )
            )
    drafted(runtime, LayerSet(runtime.n_layers), ids)
    for handle in handles:
        handle.remove()
    return taken


@pytest.mark.families
@pytest.mark.parametrize("variant", [variant for variant in MIXTURES if not variant.startswith("phimoe")])
def test_our_kernels_take_fewer_experts_as_torch_does(variant: str) -> None:
    """One expert, of every type whose number is free, and another number in half of the layers."""
    ids = words(6, 40)
    exact, mine = tiny_runtime(variant), native(variant, torch.float32)
    for draft in (LayerSet(4, experts=ONE), LayerSet(4, frozenset({2}), experts=(("mlp:1", 1), ("mlp:3", 1)))):
        expected = drafted(exact, draft, ids)
        scale = float(expected.abs().max())
        torch.testing.assert_close(drafted(mine, draft, ids).double(), expected, rtol=1e-4, atol=1e-4 * scale)
        assert not torch.allclose(expected, drafted(exact, replace(draft, experts=()), ids), atol=1e-3 * scale)


def test_shared_experts_alone_are_a_draft() -> None:
    ids, draft = words(8, 20), LayerSet(4, experts=(("mlp", 0),))
    exact, mine = tiny_runtime(SHARED), native(SHARED, torch.float32)
    expected = drafted(exact, draft, ids)
    scale = float(expected.abs().max())
    torch.testing.assert_close(drafted(mine, draft, ids).double(), expected, rtol=1e-4, atol=1e-4 * scale)
    parts = exact.copies.parts("mlp", 1, PartForm(None, 0))
    states = torch.randn(5, 32, dtype=torch.float64)
    shared = cast(Any, exact.blocks[1].parts.mlp).shared_experts(states)
    torch.testing.assert_close(exact.blocks[1].mlp(states, parts), shared)


def test_a_draft_with_all_experts_is_the_model() -> None:
    runtime, ids = native("qwen3_moe"), words(9, 20)
    two = drafted(runtime, LayerSet(4, experts=(("mlp", 2),)), ids)
    assert torch.equal(two, drafted(runtime, LayerSet(4), ids))


@pytest.mark.parametrize(
    ("variant", "number", "words_of_error"),
    [
        ("qwen3_moe", 3, "takes 3 experts, but a token of this model takes 2: use 1 to 2"),
        ("qwen3_moe", 0, "takes 0 experts, but a token of this model takes 2: use 1 to 2"),
        (SHARED, 3, "takes 3 experts, but a token of this model takes 2: use 0 to 2"),
        ("llama", 1, "takes fewer experts, but this model has none"),
    ],
)
def test_a_number_of_experts_that_the_model_has_not_is_refused(variant: str, number: int, words_of_error: str) -> None:
    with pytest.raises(LayerSetError, match=words_of_error):
        tiny_runtime(variant).check_layer_set(LayerSet(4, experts=(("mlp", number),)))


@pytest.mark.parametrize("name", ["int8", "int4-32"])
@pytest.mark.parametrize("variant", ["qwen3_moe", SHARED])
def test_copies_of_experts_compute_what_their_codes_say(variant: str, name: str) -> None:
    """Only the native kernels round inputs to 8 bits; the layer is compared with its de-quantised weights."""
    runtime, ids = native_runtime(variant, torch.float32), words(11, 30)
    draft = LayerSet(4, formats=(("mlp:2", name),))
    runtime.copies.prepare(draft)
    mine = drafted(runtime, draft, ids)
    copied = cast(Any, runtime.copies.parts("mlp", 2, PartForm(name)).mlp)
    assert isinstance(copied.experts, QuantisedExperts)
    whole = drafted(runtime, LayerSet(4), ids)
    expected = tiny_runtime(variant, torch.float32)
    block = expected.blocks[2]
    block.parts = replace(block.parts, mlp=copied)
    for linear in (getattr(getattr(copied, "shared_experts", None), part, None) for part in ("gate_proj", "up_proj")):
        if linear is not None:
            return  # Shared experts of a copy are packed for our kernels alone; torch does not compute them.
    by_codes = drafted(expected, LayerSet(4), ids)
    assert (mine - by_codes).norm() < 0.25 * (whole - by_codes).norm() + 0.01 * by_codes.norm()
    assert not torch.allclose(mine, whole, rtol=1e-3, atol=1e-3)


def test_copies_of_experts_with_fewer_of_them_are_one_draft() -> None:
    runtime, ids = native("qwen3_moe", torch.float32), words(12, 20)
    both = LayerSet(4, experts=ONE).filled("int8")
    runtime.copies.prepare(both)
    one, whole = drafted(runtime, LayerSet(4, experts=ONE), ids), drafted(runtime, LayerSet(4), ids)
    error, distance = (drafted(runtime, both, ids) - one).norm(), (one - whole).norm()
    assert error < 0.3 * distance


def test_copies_of_experts_have_half_or_a_quarter_of_their_bytes() -> None:
    runtime = native_runtime("qwen3_moe")
    mlp = cast(Any, runtime.blocks[1].parts.mlp)
    n_bytes = sum(weight.nbytes for weight in (mlp.experts.gate_up_proj, mlp.experts.down_proj))
    for name, share in (("int8", 0.5), ("int4-32", 0.25)):
        draft = LayerSet(4, formats=(("mlp:1", name),))
        runtime.copies.prepare(draft)
        # Outputs are padded to blocks of 16, and each group of inputs has a scale and a zero.
        assert share < runtime.copies.bytes_of(draft) / n_bytes < 2.2 * share


def counting(way: str) -> Runtime:
    """Return a mixture on a path; captured passes run again instead of being replayed by a GPU."""
    if way == "native":
        return native_runtime("qwen3_moe", torch.float32)
    runtime = tiny_runtime("qwen3_moe", torch.float32)
    at_speed(runtime, "eager")
    if way == "triton":
        assert make_row_invariant(runtime) is None
        runtime.counter.watch()
    if way == "graphs":
        runtime.graphs = GraphPasses(runtime, lambda static: static.run)
    return runtime


each_way = pytest.mark.parametrize(
    "way", ["native", "eager", "graphs", pytest.param("triton", marks=pytest.mark.families)]
)


@each_way
@pytest.mark.usefixtures("few_steps")
def test_passes_count_the_experts_that_rows_take(way: str) -> None:
    """All paths count the same."""
    ids = words(13, 6)
    mine, taken = counting(way), choices_of(tiny_runtime("qwen3_moe"), ids)
    for _ in range(RECORD_AT if way == "graphs" else 1):
        mine.taken_experts()
        drafted(mine, LayerSet(4), ids)
    assert mine.graphs is None or mine.graphs._passes
    counts = mine.taken_experts()
    assert counts is not None and mine.taken_experts() is None
    rows = [[set(row.tolist()) for row in choices] for choices in taken.values()]
    assert counts.distinct == sum(len(set().union(*layer)) for layer in rows) / len(rows)
    assert counts.taken == 2 * (len(ids) - 1) * len(rows)
    assert counts.repeated == sum(len(a & b) for layer in rows for a, b in pairwise(layer))


@pytest.mark.families
@pytest.mark.parametrize("variant", MIXTURES)
def test_every_type_with_experts_is_counted_by_torchs_way(variant: str) -> None:
    runtime, ids = tiny_runtime(variant, torch.float32), words(3, 3)
    at_speed(runtime, "eager")
    drafted(runtime, LayerSet(runtime.n_layers), ids)
    counts, mixtures = runtime.taken_experts(), runtime.mixtures
    assert counts is not None and mixtures is not None
    assert counts.taken == 2 * mixtures.n_chosen * len(mixtures.layers)
    assert mixtures.n_chosen <= counts.distinct <= 3 * mixtures.n_chosen


@pytest.mark.parametrize("way", ["native", "eager"])
def test_rows_of_other_sequences_are_no_neighbours(way: str) -> None:
    runtime = counting(way)
    if way != "native":
        drafted(runtime, LayerSet(4, experts=ONE), [1, 2])
        assert runtime.taken_experts() is None
    runtime.taken_experts()
    passes = [Pass(runtime, Rows(words(seed, 3), 0), runtime.new_buffer(3)) for seed in (1, 2)]
    runtime.forward_together(passes)
    counts = runtime.taken_experts()
    assert counts is not None and counts.taken == 2 * 2 * 2 * 3  # Two rows of two sequences, in three layers.


@pytest.mark.parametrize("way", ["native", "eager"])
def test_costs_of_experts_are_measured(way: str) -> None:
    runtime = native_runtime(SHARED) if way == "native" else tiny_runtime(SHARED, torch.float32)
    if way == "eager":
        at_speed(runtime, "eager")
    costs = with_formats(runtime, measure_costs(runtime, 32), ["int4"] if way == "native" else [])
    experts = costs.experts
    assert experts is not None and (experts.n_experts, experts.n_chosen, experts.layers) == (6, 2, (1, 2, 3))
    assert experts.least == 0 and experts.distinct[1] == 2 and experts.distinct[8] > 4
    assert costs.draft_pass_s(LayerSet(4, experts=ONE)) <= costs.draft_pass_s(LayerSet(4))
    assert measure_costs(native_runtime("llama"), 32).experts is None
