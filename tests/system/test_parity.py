"""The promise: whatever is skipped, the tokens are those of plain decoding; float64, so kernel order flips no tie."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import torch
from families import CONFIGS, VOCAB, WINDOW, tiny_runtime, variants

from swiftopt.core.layer_sets import LayerSet, searchable
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.loop import decode
from swiftopt.decoding.methods import PLAIN, swift
from swiftopt.models.config_layout import slot_shapes
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime

N_NEW = 40
SETTINGS = [
    SwiftSettings(stop_threshold=0.02, max_draft_length=5, branching=((0.03, 4), (0.06, 2), (1.0, 1))),
    SwiftSettings(early_stop=False, max_draft_length=7),
    SwiftSettings(early_stop=False, max_draft_length=4, dynamic_verification=False),
]


def prompt(seed: int, length: int = 9) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def reference(runtime: Runtime, token_ids: list[int], **options: Any) -> list[int]:
    """What transformers' own greedy generate says."""
    inputs = torch.tensor([token_ids])
    out = runtime.hf_model.generate(  # type: ignore[operator]
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=N_NEW, do_sample=False, **options
    )
    return list(out[0].tolist()[len(token_ids) :])


def random_set(seed: int, n_layers: int = 4) -> LayerSet:
    rng = random.Random(seed)
    subs = searchable(n_layers)
    return LayerSet(n_layers).skipping(rng.sample(subs, rng.randrange(1, len(subs) + 1)))


@pytest.mark.parametrize("family", variants())
def test_plain_decoding_equals_transformers_generate(family: str) -> None:
    runtime = tiny_runtime(family)
    for seed in range(3):
        ids = prompt(seed, length=WINDOW + 5 * seed)
        done = decode(runtime, ids, PLAIN, TokenRule.of(Sampling(), None), Ending(N_NEW))
        assert list(done.token_ids) == reference(runtime, ids)


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


FACTORS: dict[str, Any] = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0] * 4}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", rope("linear", factor=4.0)),
    "dynamic": ("llama", rope("dynamic", factor=4.0)),
    "yarn": ("llama", rope("yarn", factor=5.0, original_max_position_embeddings=64)),
    "llama3": (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "partial": ("llama", rope("default", partial_rotary_factor=0.5)),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one key head, wide": ("llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "windows of the last layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "layer_types": None},
    ),
    "gemma3 scale": ("gemma3", {"query_pre_attn_scalar": 100, "tie_word_embeddings": False}),
    "gemma3 linear": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "longrope": ("phi3", {**rope("longrope", **FACTORS), "original_max_position_embeddings": 128}),
    "gpt2 unscaled": ("gpt2", {"scale_attn_weights": False, "n_inner": 48, "activation_function": "gelu"}),
    "gpt2 by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}),
    "gpt_neox without biases": ("gpt_neox", {"attention_bias": False, "hidden_act": "gelu_fast"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_for_every_option_of_a_config(variant: str) -> None:
    family, changes = VARIANTS[variant]
    runtime = tiny_runtime(family, **changes)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in runtime.hf_model.named_parameters():
        if name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    assert runtime.max_positions == {"yarn": 320, "longrope": 128}.get(variant, 256)
    ids = prompt(5, length=60)
    buffer, model = runtime.new_buffer(60), cast(Any, runtime.hf_model)
    parts = [runtime.forward(Rows(part, first), buffer) for first, part in ((0, ids[:25]), (25, ids[25:]))]
    torch.testing.assert_close(torch.cat(parts), model(torch.tensor([ids])).logits[0], rtol=0, atol=1e-9)


SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.9, top_p=0.9, seed=5),
    "shaped": Sampling(
        temperature=0.9, min_p=0.05, presence_penalty=1.0, frequency_penalty=-0.5, logit_bias=((5, 3.0),)
    ),
}


@pytest.mark.parametrize("family", variants())
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_swift_equals_plain_decoding_for_any_layer_set(family: str, kind: str) -> None:
    """The settings are taken in turns: each family meets all of them, and so does each kind of sampling."""
    runtime, sampling = tiny_runtime(family), SAMPLINGS[kind]
    seed = list(CONFIGS).index(family) + list(SAMPLINGS).index(kind)
    ids = prompt(seed)
    plain = decode(runtime, ids, PLAIN, TokenRule.of(sampling, None, len(ids)), Ending(N_NEW))
    drafter = swift(random_set(seed), SETTINGS[seed % len(SETTINGS)])
    fast = decode(runtime, ids, drafter, TokenRule.of(sampling, None, len(ids)), Ending(N_NEW))
    assert fast.token_ids == plain.token_ids
    assert fast.drafted > 0 and fast.target_passes <= plain.target_passes


def test_swift_accepts_side_leaves() -> None:
    """Guards the parity tests: they must cross the path that moves a row."""
    runtime = tiny_runtime("llama")
    drafter = swift(LayerSet(4, frozenset({1, 2}), frozenset({1})), SETTINGS[1])
    moved = 0
    move = type(runtime.new_buffer(1)).move

    class Counting(type(runtime.new_buffer(1))):  # type: ignore[misc]
        def move(self, source: int, target: int) -> None:
            nonlocal moved
            moved += 1
            move(self, source, target)

    shapes = slot_shapes(runtime.config)
    runtime.new_buffer = lambda capacity, *sizes: Counting(  # type: ignore[method-assign]
        [b.device for b in runtime.blocks], shapes, capacity, runtime.dtype
    )
    for seed in range(4):
        decode(runtime, prompt(seed), drafter, TokenRule.of(Sampling(), None), Ending(N_NEW))
    assert moved > 0


def test_repetition_penalty_equals_transformers() -> None:
    runtime = tiny_runtime("llama")
    sampling = Sampling(repetition_penalty=1.7)
    expected = reference(runtime, prompt(1), repetition_penalty=1.7)
    assert expected != reference(runtime, prompt(1))
    for drafter in (PLAIN, swift(random_set(2), SETTINGS[1])):
        done = decode(runtime, prompt(1), drafter, TokenRule.of(sampling, None), Ending(N_NEW))
        assert list(done.token_ids) == expected


@pytest.mark.parametrize("family", variants())
def test_a_batch_of_candidates_equals_each_candidate_alone(family: str) -> None:
    runtime = tiny_runtime(family)
    ids = prompt(3, length=30)
    at, n = 18, 8  # a window of 8 tokens that starts at position 18
    variants = tuple(random_set(seed) for seed in range(3))
    buffer = runtime.new_buffer(30 + 3 * n)
    runtime.prefill(ids, buffer)

    def window(share: tuple[LayerSet, ...]) -> torch.Tensor:
        count = n * len(share)
        visible = torch.zeros((count, 30 + count), dtype=torch.bool)
        visible[:, :at] = True
        for v in range(len(share)):
            visible[v * n : (v + 1) * n, 30 + v * n : 30 + (v + 1) * n] = torch.ones((n, n), dtype=torch.bool).tril()
        positions = [at + i for i in range(n)] * len(share)
        return runtime.forward(Rows(ids[at : at + n] * len(share), 30, positions, visible, share), buffer)

    together = window(variants)
    for v, layer_set in enumerate(variants):
        torch.testing.assert_close(together[v * n : (v + 1) * n], window((layer_set,)))


def test_requests_with_different_sets_are_independent() -> None:
    runtime = tiny_runtime("qwen2")
    alone = [
        decode(runtime, prompt(7), swift(random_set(s), SETTINGS[0]), TokenRule.of(Sampling(), None), Ending(12))
        for s in (1, 2)
    ]
    again = decode(runtime, prompt(7), swift(random_set(1), SETTINGS[0]), TokenRule.of(Sampling(), None), Ending(12))
    assert (again.token_ids, again.drafted, again.accepted) == (alone[0].token_ids, alone[0].drafted, alone[0].accepted)
