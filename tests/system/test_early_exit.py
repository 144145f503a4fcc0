"""Drafting with part of the depth: rows that were run part of the way are finished, never run again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from families import CONFIGS, VOCAB, taken_in_turns, tiny_runtime, variants
from native import quick_runtime

from swiftopt.core.types import Completion, Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.engine import alone
from swiftopt.decoding.loop import decode
from swiftopt.decoding.methods import PLAIN, Method
from swiftopt.decoding.methods.chains import ChainDrafter, StopRule
from swiftopt.decoding.verify import TargetWalk
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.papers.ablation_recipes import N_HOPS, HopDrafter
from swiftopt.papers.early_exit import Heads, StackedLayers, StagedPass
from swiftopt.papers.methods.early_exit import EarlyDrafter, EarlyExit, PipelineDrafter

N_NEW = 40


def prompt(seed: int, length: int = 9) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def run(runtime: Runtime, ids: list[int], method: Method, sampling: Sampling | None = None) -> Completion:
    return decode(runtime, ids, method, TokenRule.of(sampling or Sampling(), None), Ending(N_NEW))


def heads(runtime: Runtime, *depths: int) -> Heads:
    width = runtime.config.hidden_size
    return Heads({depth: torch.eye(width, dtype=runtime.dtype) for depth in depths})


@pytest.mark.parametrize("family", variants())
def test_rows_of_any_depths_finish_to_the_logits_of_one_pass(family: str) -> None:
    runtime = tiny_runtime(family)
    ids = prompt(1, 20)
    buffer = runtime.new_buffer(20)
    runtime.prefill(ids[:15], buffer)
    whole = runtime.forward(Rows(ids[15:], 15), buffer)
    staged = StagedPass(runtime, buffer, 15)
    for token_id, depth in zip(ids[15:], (3, 1, 1, 2, 0), strict=True):
        staged.add(token_id)
        if depth:
            alone(staged.advance(depth))
    assert staged.depths == [3, 2, 2, 2, 0]  # the fourth row took those that waited below it along
    torch.testing.assert_close(alone(staged.finish()), whole)


@pytest.mark.parametrize(("family", "depths"), variants(taken_in_turns(CONFIGS, "123", 1)))
def test_layerskip_equals_plain_decoding(family: str, depths: Sequence[str]) -> None:
    runtime = tiny_runtime(family)
    for depth in map(int, depths):
        method = Method("layerskip", ChainDrafter(EarlyExit(depth), StopRule(5)))
        done, plain = run(runtime, prompt(depth), method), run(runtime, prompt(depth), PLAIN)
        assert done.token_ids == plain.token_ids and done.drafted > 0


@pytest.mark.parametrize(("family", "thresholds"), variants(taken_in_turns(CONFIGS, ("0.0", "0.015", "0.02"), 1)))
def test_adadecode_equals_plain_decoding(family: str, thresholds: Sequence[str]) -> None:
    runtime = tiny_runtime(family)
    for threshold in map(float, thresholds):
        method = Method("adadecode", EarlyDrafter(heads(runtime, 1, 2, 3), threshold, 5))
        done, plain = run(runtime, prompt(1), method), run(runtime, prompt(1), PLAIN)
        assert done.token_ids == plain.token_ids and (done.drafted > 0 or threshold)


@pytest.mark.parametrize(("family", "early"), variants(taken_in_turns(CONFIGS, ("late", "early"), 1)))
def test_trees_of_several_hops_equal_plain_decoding(family: str, early: Sequence[str]) -> None:
    runtime = quick_runtime(family)
    own = heads(runtime, 1, 2, runtime.n_layers)
    n_accepted = 0
    for sampling in (Sampling(), Sampling(temperature=0.7, seed=3)):
        for seed in range(2):
            method = Method("hop-heads", HopDrafter([own] * N_HOPS, "early" in early, 0.015), TargetWalk())
            done, plain = (run(runtime, prompt(seed), each, sampling) for each in (method, PLAIN))
            assert done.token_ids == plain.token_ids and done.drafted > 0
            n_accepted += done.accepted
    assert n_accepted > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["row-by-row", "batched"])
@pytest.mark.parametrize("family", variants())
def test_stacked_layers_equal_the_layers(family: str, dtype: torch.dtype) -> None:
    runtime = tiny_runtime(family, dtype)
    ids = prompt(4, 20)
    buffer, again = runtime.new_buffer(24), runtime.new_buffer(24)
    for each in (buffer, again):
        runtime.prefill(ids, each)
    states = torch.randn(2, runtime.config.hidden_size, dtype=runtime.dtype)
    stacked = StackedLayers(runtime)
    both = stacked.step(states, [0, 2], [21, 20], again)
    for row, (layer, slot) in enumerate(((0, 21), (2, 20))):
        buffer.keys[layer][:, 20] = again.keys[layer][:, 20]
        buffer.values[layer][:, 20] = again.values[layer][:, 20]
        own = runtime.run_layers(states[row : row + 1], slot, buffer, layer, layer + 1)
        torch.testing.assert_close(both[row : row + 1], own, rtol=1e-4, atol=1e-4)


def test_stacking_changes_no_weight_and_holds_none_twice() -> None:
    runtime = tiny_runtime("llama")
    before = {name: p.detach().clone() for name, p in runtime.hf_model.named_parameters()}
    StackedLayers(runtime)
    first = {name: p.data_ptr() for name, p in runtime.hf_model.named_parameters()}
    StackedLayers(runtime)
    for name, parameter in runtime.hf_model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.data_ptr() == first[name]


@pytest.mark.parametrize("family", variants())
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=5)], ids=["greedy", "sampled"]
)
def test_paradecode_equals_plain_decoding(family: str, sampling: Sampling) -> None:
    """The depths are taken in turns, two of them for each family; one is computed by torch, one by our kernels."""
    runtime = (tiny_runtime if sampling.greedy else quick_runtime)(family)
    options: list[tuple[Any, float]] = [((1, 2), 0.0), ((2,), 0.0), ((1, 3), 0.015)]
    depths, threshold = options[(list(CONFIGS).index(family) + sampling.greedy) % len(options)]
    method = Method("paradecode", PipelineDrafter(heads(runtime, *depths), threshold, StackedLayers(runtime)))
    done, plain = run(runtime, prompt(0), method, sampling), run(runtime, prompt(0), PLAIN, sampling)
    assert done.token_ids == plain.token_ids and (done.drafted > 0 or threshold)
