"""Each type of model, of dense layers or with experts: transformers' logits and tokens, and our kernels' laws."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from families import DENSE, MIXTURES, dense_variants, is_mixture, tiny_runtime
from native import library, native, words
from torch import Tensor

from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.draft_tree import ancestor_mask
from swiftopt.decoding.loop import decode
from swiftopt.decoding.methods import PLAIN, Method, Resources, build, swift
from swiftopt.models.families import FAMILIES
from swiftopt.models.kernels.layout import Unsupported
from swiftopt.models.kernels.native import NativePasses
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.optimizer.task_state import sub_layers_of

N_NEW = 24


def type_of(variant: str) -> str:
    return variant.partition(":")[0]


# Of these a rotation, the exponentials of capped scores, or a router are in float32 whatever a model computes in.
IN_FLOAT32 = {"ernie4_5", "cohere", "cohere2", "gemma2", "vaultgemma", *map(type_of, MIXTURES)}
IN_FLOAT32 |= {"qwen3_5_text", "bamba", "falcon_h1", "mamba2", "mamba", "jamba"}  # Recurrences.
each_variant = pytest.mark.parametrize("variant", dense_variants())


def logits_in_pieces(runtime: Runtime, ids: list[int]) -> Tensor:
    buffer = runtime.new_buffer(len(ids))
    return torch.cat([runtime.forward(Rows(ids[a:b], a), buffer) for a, b in ((0, 25), (25, 26), (26, len(ids)))])


@cache
def plain(variant: str, seed: int) -> tuple[int, ...]:
    runtime = native(variant)
    return decode(runtime, words(seed, 11), PLAIN, TokenRule.of(Sampling(), None), Ending(N_NEW)).token_ids


def tokens(variant: str, seed: int, method: Method) -> tuple[int, ...]:
    ids = words(seed, 11)
    return decode(native(variant), ids, method, TokenRule.of(Sampling(), None), Ending(N_NEW)).token_ids


@each_variant
def test_torchs_path_gives_the_logits_and_tokens_of_transformers(variant: str) -> None:
    runtime, ids = tiny_runtime(variant), words(5, 40)
    model = cast(Any, runtime.hf_model)
    bound = 1e-5 if type_of(variant) in IN_FLOAT32 else 1e-9
    expected = model(torch.tensor([ids])).logits[0].double()
    torch.testing.assert_close(
        logits_in_pieces(runtime, ids), expected, rtol=bound, atol=bound * float(expected.abs().max())
    )
    prompt = torch.tensor([ids[:12]])
    theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=N_NEW, do_sample=False)
    done = decode(runtime, ids[:12], PLAIN, TokenRule.of(Sampling(), None), Ending(N_NEW))
    assert list(done.token_ids) == theirs[0].tolist()[12:]


@each_variant
def test_native_kernels_agree_with_torch(variant: str) -> None:
    """In float32 to its rounding, and in bfloat16 no further from float64 than torch's own kernels are."""
    ids = words(6, 40)
    exact = logits_in_pieces(tiny_runtime(variant), ids)
    mine = logits_in_pieces(native(variant, torch.float32), ids).double()
    torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
    stored = tiny_runtime(variant, torch.bfloat16)
    theirs, mine = (logits_in_pieces(runtime, ids).double() for runtime in (stored, native(variant)))
    exact = logits_in_pieces(Runtime(stored.hf_model.double(), None, stored.info), ids)
    errors = [(each - exact).norm(dim=-1) for each in (mine, theirs)]
    if is_mixture(variant):  # Rounding makes some rows take another expert, here or in torch, which later rows read.
        errors = [error.quantile(0.1) for error in errors]
    assert float(errors[0].norm()) < 1.5 * float(errors[1].norm())


@each_variant
def test_a_row_has_the_same_bits_alone_and_in_company(variant: str) -> None:
    runtime, ids = native(variant), words(7, 34)
    alone, together = runtime.new_buffer(40), runtime.new_buffer(40)
    one_by_one = torch.cat([runtime.forward(Rows([token], i), alone) for i, token in enumerate(ids)])
    assert torch.equal(logits_in_pieces(runtime, ids).view(torch.int16), one_by_one.view(torch.int16))
    runtime.prefill(ids[:30], together)
    parents = [-1, 0, 0, 2]
    visible = torch.cat((torch.ones(4, 30, dtype=torch.bool), ancestor_mask(parents)), dim=1)
    tree = runtime.forward(Rows([ids[30], 5, ids[31], ids[32]], 30, [30, 31, 31, 32], visible), together)
    assert torch.equal(tree[[0, 2, 3]].view(torch.int16), one_by_one[30:33].view(torch.int16))


DRAFTS = {
    "skipping": LayerSet(4, frozenset({1}), frozenset({2})),
    "fewer bits": LayerSet(4, formats=(("attn", "int4"), ("head", "int8"), ("mlp", "int4"))),
    "both": LayerSet(4, frozenset({2}), frozenset({1}), formats=(("attn", "int8"), ("mlp", "int4-32"))),
}
# Of mixtures alone: fewer experts, in the model's own weights and in fewer bits. Phi's choose two at a time.
DRAFTS_OF_MIXTURES = {
    "fewer experts": LayerSet(4, experts=(("mlp", 1),)),
    "fewer experts and bits": LayerSet(4, frozenset({1}), formats=(("mlp", "int4"),), experts=(("mlp:2", 1),)),
}


@each_variant
def test_drafts_give_the_tokens_of_plain_decoding(variant: str) -> None:
    """Trees and chains, by skipping, by fewer bits and by fewer experts, and of text."""
    runtime, drafted = native(variant), 0
    drafts = DRAFTS | (DRAFTS_OF_MIXTURES if is_mixture(variant) and not variant.startswith("phimoe") else {})
    settings = (
        SwiftSettings(stop_threshold=0.02, max_draft_length=5, branching=((0.03, 4), (0.06, 2), (1.0, 1))),
        SwiftSettings(early_stop=False, max_draft_length=4, dynamic_verification=False),
    )
    for seed, (draft, how) in enumerate((draft, how) for draft in drafts.values() for how in settings):
        runtime.copies.prepare(draft)
        ids = words(seed, 11)
        done = decode(runtime, ids, swift(draft, how), TokenRule.of(Sampling(), None), Ending(N_NEW))
        assert done.token_ids == plain(variant, seed)
        drafted += done.drafted
    assert drafted > 0
    lookup = build("prompt-lookup", Resources(runtime, DRAFTS["skipping"]))
    assert tokens(variant, 3, lookup) == plain(variant, 3)


def test_attention_with_shared_keys_is_in_every_draft() -> None:
    """Else those layers would read what other rows have left in its slots."""
    ids, asked = words(9, 20), DRAFTS["skipping"]
    computed = replace(asked, skip_attn=frozenset())
    for runtime in (tiny_runtime("gemma4_text"), native("gemma4_text")):
        assert runtime.givers == {0, 1} and ("attn", 1) not in sub_layers_of(runtime)
        buffers = [runtime.new_buffer(24) for _ in range(2)]
        logits = []
        for buffer, layer_set in zip(buffers, (asked, computed), strict=True):
            runtime.prefill(ids, buffer)
            logits.append(runtime.forward(Rows([3, 5], 20, variants=(layer_set,)), buffer))
        assert torch.equal(*logits)
        assert all(torch.equal(*pair) for pair in zip(buffers[0].keys, buffers[1].keys, strict=True))
        assert runtime.slot_bytes == runtime.dtype.itemsize * 2 * 2 * (16 + 24)  # Two of four layers have keys.


def test_every_type_has_a_variant() -> None:
    old = {"llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt2", "gpt_neox"}
    assert {type_of(variant) for variant in DENSE} | old == set(FAMILIES)


def test_steps_of_a_state_space_are_within_its_configs_limits() -> None:
    """Transformers' prefill keeps to them; its decoding does not."""
    ids, limits = words(8, 40), {"time_step_limit": (0.9, 1.1), "num_hidden_layers": 2}
    runtime = tiny_runtime("granitemoehybrid:dense", **limits)
    model = cast(Any, runtime.hf_model)
    expected = model(torch.tensor([ids])).logits[0].double()
    bound = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(logits_in_pieces(runtime, ids), expected, rtol=1e-5, atol=bound)
    unlimited = tiny_runtime("granitemoehybrid:dense", num_hidden_layers=2)
    assert not torch.allclose(logits_in_pieces(unlimited, ids), expected, rtol=1e-2)
    model.float()
    passes = Runtime(model, None, runtime.info)
    passes.native = NativePasses(passes, library())
    torch.testing.assert_close(logits_in_pieces(passes, ids).double(), expected, rtol=1e-4, atol=10 * bound)


@pytest.mark.parametrize("n_chosen", [0, 7])
def test_choice_of_too_many_experts_is_left_to_torch(n_chosen: int) -> None:
    """The kernels would write beside what they have room for."""
    runtime = tiny_runtime("qwen3_moe", torch.float32)
    mlp = cast(Any, runtime.blocks[1].parts.mlp)
    mlp.gate.top_k = n_chosen
    with pytest.raises(Unsupported, match=f"a choice of {n_chosen} from 6 experts"):
        NativePasses(runtime, library())
