"""A study of the model agrees with the model's passes, and the dynamic programs are correct."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import WordTokenizer
from families import CONFIGS, tiny_runtime, variants
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from swiftopt.core.layer_sets import LayerSet, SubLayer, searchable
from swiftopt.core.records import ModelInfo
from swiftopt.core.types import Sampling
from swiftopt.decoding.context import Context, TokenRule
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.optimizer.proposer import (
    N_BUCKETS,
    Change,
    StudyItem,
    StudyPass,
    clasp_items,
    extend_paths,
    knapsack_items,
    max_study_rows,
    study,
    study_slots,
)
from swiftopt.optimizer.strategies.base import ExpertLevels, SearchProblem

WINDOW = 6
N_LAYERS = 8


SUB_LAYERS: list[SubLayer] = [
    (kind, layer)  # type: ignore[misc]
    for layer in range(N_LAYERS)
    for kind in ("attn", "mlp")
]


def deep_runtime() -> Runtime:
    torch.manual_seed(0)
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "num_hidden_layers": N_LAYERS})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            parameter.mul_(6.0)
    return Runtime(model, WordTokenizer(), ModelInfo("tiny", "llama", N_LAYERS, 1))


def context_of(runtime: Runtime, n: int = 20) -> Context:
    """Return the context of a text whose last tokens count as generated."""
    ids = [(11 * i * i + 3 * i + 5) % 95 + 2 for i in range(n)]
    buffer = runtime.new_buffer(n + study_slots("knapsack", WINDOW, runtime.n_layers))
    runtime.prefill(ids[:-1], buffer)
    return Context(runtime, buffer, TokenRule.of(Sampling(), None), ids, n - WINDOW - 2)


def own_logits(context: Context, window: int) -> Tensor:
    """Return the full model's logits at the positions of a study, from a pass over the whole text."""
    runtime, ids = context.runtime, context.token_ids
    return runtime.forward(Rows(ids, 0), runtime.new_buffer(len(ids)))[-window - 1 : -1]


def draft_logits(context: Context, layer_set: LayerSet) -> Tensor:
    """Return the logits of a draft that reads the target's keys and values of all but the last position."""
    runtime, ids = context.runtime, context.token_ids
    buffer = runtime.new_buffer(len(ids))
    runtime.prefill(ids[:-2], buffer)
    return runtime.forward(Rows([ids[-2]], len(ids) - 2, variants=(layer_set,)), buffer)


def test_states_are_brought_to_each_layers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half of the model is on another device."""
    runtime = tiny_runtime("llama")
    context = context_of(runtime)

    def delta(look: StudyPass, sub: SubLayer, hidden: Tensor, entered: Tensor, positions: Any) -> Tensor:
        device = look.runtime.blocks[sub[1]].device
        assert hidden.device == device == entered.device
        return torch.zeros(hidden.shape, dtype=hidden.dtype, device=device)

    monkeypatch.setattr(StudyPass, "delta", delta)
    for block in runtime.blocks[2:]:
        monkeypatch.setattr(block, "device", torch.device("meta"))
    states = StudyPass(context, WINDOW).run_window()
    assert [state.device.type for state in states] == ["cpu"] * 5 + ["meta"] * 4


@pytest.mark.parametrize("family", [*variants(), "gemma4_text"])
def test_window_states_equal_those_of_the_models_pass(family: str) -> None:
    context = context_of(tiny_runtime(family))
    with torch.inference_mode():
        states = StudyPass(context, WINDOW).run_window()
    assert len(states) == 2 * context.runtime.n_layers + 1
    logits = context.runtime.logits(states[-1])
    assert torch.allclose(logits, own_logits(context, WINDOW), atol=1e-9)


@pytest.mark.parametrize("family", variants())
def test_every_path_of_a_program_equals_the_draft_of_its_set(family: str) -> None:
    """Checked on one token, where the draft shares the target's keys and values except at its own position. Each subset
    has its own weight, so that all are kept."""
    context = context_of(tiny_runtime(family))
    look = StudyPass(context, 1)
    weights = {("attn", 1): 1, ("mlp", 1): 2, ("attn", 2): 4, ("mlp", 2): 8}
    items = [item_of(sub, weights.get(sub, 0)) for sub in SUB_LAYERS if sub[1] < 4]
    with torch.inference_mode():
        paths = extend_paths(look, look.run_window(), items, 15, [0])
    assert len(set(paths.bits)) == 16
    logits = context.runtime.logits(paths.hidden[:, 0])
    for own, bits in zip(logits, paths.bits, strict=True):
        layer_set = LayerSet(context.runtime.n_layers).skipping(SUB_LAYERS[index] for index in bits)
        assert torch.allclose(own, draft_logits(context, layer_set)[0], atol=1e-9)


def item_of(sub_layer: SubLayer, weight: int) -> StudyItem:
    """Return an item that may be skipped if it has a weight; its bit is its position among all sub-layers."""
    return StudyItem((sub_layer,), (Change((SUB_LAYERS.index(sub_layer),), weight),) if weight else ())


@pytest.mark.parametrize("family", ["glm4_moe", pytest.param("flex_olmo", marks=pytest.mark.families)])
def test_every_path_through_a_mixture_equals_the_draft_of_its_set(family: str) -> None:
    """All combinations of skipped sub-layers and numbers of experts are enumerated, each with its own weight."""
    context = context_of(tiny_runtime(family))
    runtime = context.runtime
    assert runtime.mixtures is not None
    levels = ExpertLevels((1, 2), (1, 0) if runtime.mixtures.least == 0 else (1,))
    problem = SearchProblem(LayerSet(runtime.n_layers), 0, 0, experts=levels)
    n_bits = len(problem.bits_of(problem.base))
    items, _ = knapsack_items(runtime.n_layers, searchable(runtime.n_layers), [1.0] * n_bits, levels)
    weighted, weight = [], 1
    for item in items:
        changes = tuple(replace(change, weight=n * weight) for n, change in enumerate(item.changes, start=1))
        weighted.append(replace(item, changes=changes))
        weight *= 1 + len(changes)
    look = StudyPass(context, 1)
    with torch.inference_mode():
        paths = extend_paths(look, look.run_window(), weighted, weight, [0])
    sets = [problem.set_of(tuple(int(index in bits) for index in range(n_bits))) for bits in paths.bits]
    assert len(set(sets)) == len(sets) == (2 * (2 + len(levels.numbers))) ** 2
    for own, layer_set in zip(runtime.logits(paths.hidden[:, 0]), sets, strict=True):
        assert torch.allclose(own, draft_logits(context, layer_set)[0], atol=1e-5)  # Routers compute in float32.


@pytest.mark.parametrize("kind", ["similarity", "knapsack", "clasp"])
def test_study_leaves_committed_slots_unchanged(kind: Any) -> None:
    context = context_of(deep_runtime())
    root = context.root_slot
    before = [(k[:, :root].clone(), v[:, :root].clone()) for k, v in pairs(context)]
    study(context, kind, WINDOW, searchable(N_LAYERS), [1.0] * 12, 0.5)
    assert all(
        torch.equal(k[:, :root], old_k) and torch.equal(v[:, :root], old_v)
        for (k, v), (old_k, old_v) in zip(pairs(context), before, strict=True)
    )


def pairs(context: Context) -> list[tuple[Tensor, Tensor]]:
    return list(zip(context.buffer.keys, context.buffer.values, strict=True))


def nearness(look: StudyPass, states: list[Tensor], skipped: frozenset[SubLayer]) -> float:
    """Return the mean cosine between the last states of the full model and of the path that skips exactly these."""
    hidden = entered = states[0]
    for sub in SUB_LAYERS:
        entered = hidden if sub[0] == "attn" else entered
        if sub not in skipped:
            hidden = hidden + look.delta(sub, hidden, entered, look.positions)
    return float(F.cosine_similarity(hidden, states[-1], dim=-1).mean())


def test_program_is_never_better_than_an_exhaustive_search() -> None:
    """It is exact for one sub-layer, and for all or all but one of four; in between it is greedy."""
    context = context_of(deep_runtime())
    free: list[SubLayer] = [("attn", 2), ("mlp", 3), ("attn", 5), ("mlp", 6)]
    items = [item_of(sub, int(sub in free)) for sub in SUB_LAYERS]
    look = StudyPass(context, WINDOW)
    with torch.inference_mode():
        states = look.run_window()
        paths = extend_paths(look, states, items, 4, range(WINDOW))
        subsets = {frozenset(own) for n in range(5) for own in combinations(free, n)}
        by_hand = {own: nearness(look, states, own) for own in subsets}
    near = F.cosine_similarity(paths.hidden, states[-1][None], dim=-1).mean(dim=1).tolist()
    assert paths.weights == [0, 1, 2, 3, 4] and near[0] == pytest.approx(1.0)
    by_weight = [frozenset(SUB_LAYERS[index] for index in bits) for bits in paths.bits]
    for weight, skipped, own in zip(paths.weights, by_weight, near, strict=True):
        assert len(skipped) == weight and skipped <= set(free)
        best = max(value for subset, value in by_hand.items() if len(subset) == weight)
        assert own == pytest.approx(by_hand[skipped]) and own <= best + 1e-12
    assert by_weight[4] == frozenset(free)


def test_sub_layer_without_effect_is_skipped_first() -> None:
    runtime = deep_runtime()
    model: Any = runtime.hf_model
    model.model.layers[3].mlp.down_proj.weight.zero_()
    found = study(context_of(runtime), "knapsack", WINDOW, searchable(N_LAYERS), [1.0] * 12, 0.5)
    order = searchable(N_LAYERS)
    assert found.turns[order.index(("mlp", 3))] == 0 == min(found.turns)
    first = found.sets[0]
    assert [sub for sub, bit in zip(order, first, strict=True) if bit] == [("mlp", 3)]


def test_knapsack_uses_measured_costs_and_clasp_counts_layers() -> None:
    items, capacity = knapsack_items(6, searchable(6), [1.0] * 4 + [5.0] * 4)
    weights = {item.sub_layers[0]: [change.weight for change in item.changes] for item in items}
    assert weights["attn", 0] == weights["mlp", 5] == [] and capacity == N_BUCKETS
    assert weights["mlp", 2][0] > 3 * weights["attn", 2][0] > 0
    layers, most = clasp_items(6, searchable(6), 0.5)
    assert [[change.weight for change in item.changes] for item in layers] == [[], [1], [1], [1], [1], []] and most == 2
    assert layers[2].changes[0].bits == tuple(searchable(6).index((kind, 2)) for kind in ("attn", "mlp"))


def test_knapsack_weighs_experts_by_their_joint_saving() -> None:
    levels = ExpertLevels((2, 3), (4, 2, 1))
    items, _ = knapsack_items(6, searchable(6), [2.0] * 8 + [0.8, 0.4, 0.4] * 2, levels)
    assert [len(item.changes) for item in items] == [0, 0, 1, 1, 1, 4, 1, 4, 1, 1, 0, 0]
    skipped, *fewer = items[5].changes
    assert [change.experts for change in fewer] == [4, 2, 1]
    assert [change.bits for change in fewer] == [(8,), (8, 9), (8, 9, 10)] and skipped.bits == (5,)
    assert [change.weight for change in fewer] == [2, 3, 4]  # Buckets are of 0.4.
    assert items[7].changes[3].bits == (11, 12, 13)


def test_a_study_finds_that_a_mixture_needs_one_expert() -> None:
    """In layer 2 the second expert of each row has no effect, so one expert there is the closest draft of its cost."""
    runtime = tiny_runtime("qwen3_moe")
    mixture: Any = runtime.blocks[2].parts.mlp
    mixture.gate.weight.mul_(400.0)  # The first expert's weight becomes one.
    levels = ExpertLevels((1, 2), (1,))
    savings = [1.0, 1.0, 1.0, 1.0, 0.3, 0.3]
    found = study(context_of(runtime), "knapsack", WINDOW, searchable(runtime.n_layers), savings, 0.5, levels)
    assert found.sets[0] == (0, 0, 0, 0, 0, 1)
    assert all(len(bits) == 6 for bits in found.sets)
    assert found.rows <= max_study_rows("knapsack", WINDOW, runtime.n_layers, levels)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_models_without_inner_layers_have_nothing_to_study(family: str) -> None:
    changes = {"n_layer" if family == "gpt2" else "num_hidden_layers": 2}
    config = type(CONFIGS[family])(**{**CONFIGS[family].to_dict(), **changes})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    runtime = Runtime(model, None, ModelInfo("tiny", family, 2, 1))
    found = study(context_of(runtime), "knapsack", WINDOW, searchable(2), [], 0.5)
    assert found.turns == found.sets == ()


def test_cost_of_a_study_is_in_rows_of_the_model() -> None:
    context = context_of(deep_runtime())
    small = study(context, "similarity", WINDOW, searchable(N_LAYERS), [1.0] * 12, 0.5)
    large = study(context, "knapsack", WINDOW, searchable(N_LAYERS), [1.0] * 12, 0.5)
    assert small.rows == WINDOW and small.rows < large.rows <= WINDOW + study_slots("knapsack", WINDOW, N_LAYERS) + 8
