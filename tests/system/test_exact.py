"""The native kernels give a row's logits the same bits beside any other rows, so the output equals plain decoding's."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from fakes import cheap_draft_costs
from families import CONFIGS, taken_in_turns, tiny_model, tiny_runtime, variants
from native import LEVELS, library, native, native_runtime, parts, repeating, words
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from swiftopt.core.errors import SettingsError
from swiftopt.core.layer_sets import LayerSet, searchable
from swiftopt.core.records import ModelInfo
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.streams import read_stream
from swiftopt.core.types import Sampling, TokenLogprob
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.draft_tree import ancestor_mask
from swiftopt.decoding.engine import Engine, side_by_side
from swiftopt.decoding.events import Prefilled, WorkEvent
from swiftopt.decoding.logprobs import token_logprobs
from swiftopt.decoding.loop import decode, decoding
from swiftopt.decoding.methods import METHODS, PLAIN, Method, Resources, build, swift
from swiftopt.decoding.methods.adaptive import AdaptiveSettings
from swiftopt.decoding.session import Session
from swiftopt.decoding.work import subscribed
from swiftopt.models.buffer import KVBuffer
from swiftopt.models.kernels.native import NativePasses
from swiftopt.models.loading import at_speed, load
from swiftopt.models.rows import Pass, Rows
from swiftopt.models.runtime import Runtime

N_NEW = 32
GREEDY = Sampling()
WARM = Sampling(temperature=0.9, top_p=0.9, seed=5)
SHAPED = Sampling(
    temperature=0.9,
    min_p=0.05,
    presence_penalty=0.8,
    frequency_penalty=0.4,
    logit_bias=((5, 3.0), (7, -100.0)),
    seed=5,
)
EXAMPLES = Path(__file__).parents[2] / "examples" / "stream.jsonl"
LOSSLESS = [info.name for info in METHODS.values() if not info.lossy]
WITH_A_MODEL = [info.name for info in METHODS.values() if info.drafts_with_model and not info.lossy]
SETTINGS = [
    SwiftSettings(stop_threshold=0.02, max_draft_length=5, branching=((0.03, 4), (0.06, 2), (1.0, 1))),
    SwiftSettings(early_stop=False, max_draft_length=7),
    SwiftSettings(early_stop=False, max_draft_length=4, branching=((1.0, 3),)),
]
FORMATS = [
    (),
    (("attn", "int4"), ("mlp", "int4")),
    (("attn", "int8"), ("head", "int4"), ("mlp", "int8")),
    (("head", "int8"), ("mlp", "int4-32"), ("mlp:2", "stored")),
]

WIDE = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 72, "hidden_size": 48}

each_family = pytest.mark.parametrize("family", variants())
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


@pytest.fixture
def several_threads() -> Iterator[None]:
    """Run passes with three threads, whatever the process has otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def random_set(seed: int, formats: tuple[tuple[str, str], ...] = ()) -> LayerSet:
    rng = random.Random(seed)
    subs = searchable(4)
    return replace(LayerSet(4).skipping(rng.sample(subs, rng.randrange(1, len(subs)))), formats=formats)


def one_by_one(runtime: Runtime, ids: Sequence[int], buffer: KVBuffer, first: int = 0) -> Tensor:
    """Return the logits (rows, vocab) of a chain, each row in a separate pass."""
    return torch.cat([runtime.forward(Rows([token], first + i), buffer) for i, token in enumerate(ids)])


def same_bits(one: Tensor, other: Tensor) -> bool:
    assert bool(one.isfinite().all())
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def same_slots(one: KVBuffer, other: KVBuffer, n: int) -> bool:
    """Return keys and values of the first `n` slots of all layers."""
    pairs = zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    return all(same_bits(a[:, :n], b[:, :n]) for a, b in pairs)


# -- passes ------------------------------------------------------------------------------------------------------------


@each_family
def test_passes_agree_with_torch(family: str) -> None:
    """In float32 up to rounding errors; in bfloat16 the error against float64 is at most that of torch's kernels."""
    ids = words(1, 40)

    def logits(runtime: Runtime) -> list[Tensor]:
        buffer = runtime.new_buffer(60)
        first = runtime.forward(Rows(ids[:30], 0), buffer)
        visible = torch.cat((torch.ones(4, 30, dtype=torch.bool), ancestor_mask([-1, 0, 0, 2])), dim=1)
        tree = runtime.forward(Rows(ids[30:34], 30, [30, 31, 31, 32], visible), buffer)
        skipping = runtime.forward(Rows(ids[30:33], 30, variants=(random_set(3),)), buffer)
        return [each.double() for each in (first, tree, skipping)]

    exact = logits(tiny_runtime(family))
    for mine, right in zip(logits(native(family, torch.float32)), exact, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))
    stored = tiny_model(family, torch.bfloat16)
    info = ModelInfo("tiny", family, 4, 1)
    exact = logits(Runtime(stored.double(), None, info))
    theirs, mine_too = logits(tiny_runtime(family, torch.bfloat16)), logits(native(family))
    errors = [sum(float((a - b).norm()) for a, b in zip(each, exact, strict=True)) for each in (mine_too, theirs)]
    assert errors[0] < 1.5 * errors[1]


@each_family
@each_dtype
def test_prompt_in_any_pieces_gives_the_same_bits(family: str, dtype: torch.dtype) -> None:
    runtime, ids = native(family, dtype), words(2, 150)
    alone = runtime.new_buffer(160)
    expected = one_by_one(runtime, ids, alone)
    rng = random.Random(7)
    for capacity in (150, 151, 201):
        cuts = sorted({0, len(ids), *rng.sample(range(1, len(ids)), rng.choice((0, 2, 5)))})
        buffer = runtime.new_buffer(capacity)
        pieces = [runtime.forward(Rows(ids[a:b], a), buffer) for a, b in pairwise(cuts)]
        assert same_bits(torch.cat(pieces), expected) and same_slots(buffer, alone, len(ids))
    assert same_bits(runtime.prefill(ids, runtime.new_buffer(155)), expected[-1])


@each_family
@each_dtype
def test_chain_of_any_length_gives_the_bits_of_single_rows(family: str, dtype: torch.dtype) -> None:
    runtime = native(family, dtype)
    for base, seed in ((1, 3), (9, 4), (30, 5)):
        ids = words(seed, base + 20)
        alone = runtime.new_buffer(base + 20)
        runtime.prefill(ids[:base], alone)
        expected = one_by_one(runtime, ids[base:], alone, base)
        for n in range(1, 21):
            buffer = runtime.new_buffer(base + n + 3 * (n % 2))
            runtime.prefill(ids[:base], buffer)
            assert same_bits(runtime.forward(Rows(ids[base : base + n], base), buffer), expected[:n])
            assert same_slots(buffer, alone, base + n)
        assert same_bits(runtime.forward(Rows(ids[base:], base), buffer, [17, 18, 19]), expected[-3:])


@each_family
@each_dtype
def test_nodes_of_a_tree_have_the_bits_of_their_paths(family: str, dtype: torch.dtype) -> None:
    """Trees are random, with paths in any slots; then a path is compacted, as in decoding, and continued."""
    runtime = native(family, dtype)
    for seed in range(4):
        rng = random.Random(seed)
        base, n = (5, 24, 63, 130)[seed], rng.choice((6, 11, 17))
        ids, tokens = words(seed, base), words(seed + 50, n)
        # Parents anywhere before: side branches lie between the nodes of a path.
        parents = [-1, *(rng.randrange(max(0, i - 3), i) for i in range(1, n))]
        paths = [[0]]
        for node in range(1, n):
            paths.append([*paths[parents[node]], node])
        visible = torch.cat((torch.ones(n, base, dtype=torch.bool), ancestor_mask(parents)), dim=1)
        buffer = runtime.new_buffer(base + n + seed)
        runtime.prefill(ids, buffer)
        positions = [base + len(path) - 1 for path in paths]
        tree = runtime.forward(Rows(tokens, base, positions, visible), buffer)
        wanted = rng.sample(range(n), 4)
        picked = runtime.forward(Rows(tokens, base, positions, visible), buffer, wanted=wanted)
        assert same_bits(picked, tree[wanted])
        plain = runtime.new_buffer(base + n + 1)
        runtime.prefill(ids, plain)
        for path in paths:
            chain = one_by_one(runtime, [tokens[node] for node in path], plain, base)
            assert same_bits(tree[path], chain)
        for i, node in enumerate(path):
            buffer.move(base + node, base + i)
        end = base + len(path)
        assert same_slots(buffer, plain, end)
        assert same_bits(runtime.forward(Rows([7], end), buffer), runtime.forward(Rows([7], end), plain))


@each_dtype
@pytest.mark.parametrize("shape", [(10, 1, 10), (9, 3, 64), (20, 2, 36), (12, 12, 96), (8, 4, 128)])
def test_attention_of_any_heads_agrees_with_torch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Heads, key heads and widths vary; the text has more slots than the kernels read at a time."""
    library()
    heads, kv_heads, width = shape
    size = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width, "hidden_size": 4 * heads}
    theirs, mine = (tiny_runtime("llama", dtype, **size) for _ in range(2))
    at_speed(mine, "exact")
    ids, base = words(8, 140), 131
    visible = torch.cat((torch.ones(5, base, dtype=torch.bool), ancestor_mask([-1, 0, 0, 2, 1])), dim=1)
    tree = Rows(ids[base : base + 5], base, [base, base + 1, base + 1, base + 2, base + 2], visible)
    buffers = [each.new_buffer(150) for each in (theirs, mine)]
    expected, read = (each.prefill(ids[:base], buffer) for each, buffer in zip((theirs, mine), buffers, strict=True))
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(read, expected, rtol=0, atol=tolerance * float(expected.abs().max()))
    expected, read = (each.forward(tree, buffer) for each, buffer in zip((theirs, mine), buffers, strict=True))
    torch.testing.assert_close(read, expected, rtol=0, atol=tolerance * float(expected.abs().max()))
    for path in ([0, 1, 4], [0, 2, 3]):
        plain = mine.new_buffer(160)
        mine.prefill(ids[:base], plain)
        assert same_bits(read[path], one_by_one(mine, [ids[base + node] for node in path], plain, base))


@pytest.fixture(scope="module", params=LEVELS)
def wide(request: pytest.FixtureRequest) -> Runtime:
    """Return a model with six heads per key head and a width of partial tiles, at each level of this processor."""
    found = library(request.param)
    runtime = tiny_runtime("llama", torch.bfloat16, max_position_embeddings=2048, **WIDE)
    runtime.native = NativePasses(runtime, found)
    return runtime


def test_rows_after_several_blocks_have_the_bits_of_one_row(wide: Runtime) -> None:
    """A block has 512 slots; chains and trees end before, at and after its edges; the text has any chunks."""
    ids = words(3, 1060)
    whole = wide.new_buffer(1060)
    wide.forward(Rows(ids, 0), whole, [0])
    for base in (497, 511, 512, 1023, 1040):
        plain = wide.new_buffer(base + 20)
        for first in range(0, base, 100):
            wide.forward(Rows(ids[first : min(first + 100, base)], first), plain, [0])
        assert same_slots(plain, whole, base)
        buffer = wide.new_buffer(base + 20)
        wide.forward(Rows(ids[:base], 0), buffer, [0])
        parents = [-1, 0, 0, 2, 1, 3, 3]
        visible = torch.cat((torch.ones(7, base, dtype=torch.bool), ancestor_mask(parents)), dim=1)
        positions = [base + i for i in (0, 1, 1, 2, 2, 3, 3)]
        tree = wide.forward(Rows(ids[base : base + 7], base, positions, visible), buffer)
        for path in ([0, 1, 4], [0, 2, 3, 6]):
            assert same_bits(tree[path], one_by_one(wide, [ids[base + node] for node in path], plain, base))
        chain = wide.forward(Rows(ids[base : base + 18], base), buffer)
        assert same_bits(chain, one_by_one(wide, ids[base : base + 18], plain, base))


def test_nan_row_does_not_change_rows_before_it(wide: Runtime) -> None:
    """Rows of a chunk are computed together, and 0 · NaN would be NaN."""
    ids, n = words(4, 90), 40
    hidden = wide.embed(ids, 0).clone()
    clean = wide.run_layers(hidden, 0, wide.new_buffer(90), 0, 1)
    for value in (float("nan"), float("inf")):
        hidden[n] = value
        found = wide.run_layers(hidden, 0, wide.new_buffer(90), 0, 1)
        assert same_bits(found[:n], clean[:n]) and not found[n].isfinite().all()


def test_long_text_is_as_close_to_float64_as_torch(wide: Runtime) -> None:
    ids, size = words(6, 700), 700
    model = tiny_model("llama", torch.bfloat16, max_position_embeddings=2048, **WIDE)
    info = ModelInfo("tiny", "llama", 4, 1)
    theirs = Runtime(model, None, info).forward(Rows(ids, 0), Runtime(model, None, info).new_buffer(size)).double()
    mine = wide.forward(Rows(ids, 0), wide.new_buffer(size)).double()
    exact = Runtime(model.double(), None, info)
    expected = exact.forward(Rows(ids, 0), exact.new_buffer(size))
    assert float((mine - expected).norm()) < 1.2 * float((theirs - expected).norm())


@each_family
@each_dtype
def test_variants_of_one_pass_have_the_bits_of_separate_passes(family: str, dtype: torch.dtype) -> None:
    runtime, base, n = native(family, dtype), 20, 3
    ids = words(9, base + n)
    for seed, formats in enumerate(FORMATS):
        sets = (LayerSet(4), random_set(seed, formats), random_set(seed + 9), LayerSet(4, formats=formats))
        for each in sets:
            runtime.copies.prepare(each)
        order = random.Random(seed).sample(range(len(sets)), len(sets))
        variants = tuple(sets[i] for i in order)
        buffer = runtime.new_buffer(base + n * len(sets))
        runtime.prefill(ids[:base], buffer)
        own = torch.block_diag(*[torch.ones(n, n).tril()] * len(sets)).bool()
        visible = torch.cat((torch.ones(n * len(sets), base, dtype=torch.bool), own), dim=1)
        positions = [base + i for i in range(n)] * len(sets)
        together = runtime.forward(Rows(ids[base:] * len(sets), base, positions, visible, variants), buffer)
        for v, each in enumerate(variants):
            alone = runtime.new_buffer(base + n)
            runtime.prefill(ids[:base], alone)
            share = together[v * n : (v + 1) * n]
            assert same_bits(share, runtime.forward(Rows(ids[base:], base, variants=(each,)), alone))
            one = torch.cat(
                [runtime.forward(Rows([ids[base + i]], base + i, variants=(each,)), alone) for i in range(n)]
            )
            assert same_bits(share, one)
            if each == LayerSet(4):
                assert same_bits(share, runtime.forward(Rows(ids[base:], base), alone))


def random_pass(runtime: Runtime, rng: random.Random, context: int, capacity: int) -> Pass:
    """Return a pass of a chain, a tree or drafts of several layer sets after a text of that length."""
    buffer, n = runtime.new_buffer(capacity), rng.choice((1, 1, 3, 6))
    if context:
        runtime.prefill(words(context, context), buffer)
    tokens = words(rng.randrange(1000), n)
    kind = rng.choice(("chain", "tree", "variants"))
    if kind == "tree":
        parents = [-1, *(rng.randrange(i) for i in range(1, n))]
        seen = ancestor_mask(parents)
        visible = torch.cat((torch.ones(n, context, dtype=torch.bool), seen), dim=1)
        rows = Rows(tokens, context, [context + int(seen[i].sum()) - 1 for i in range(n)], visible)
    elif kind == "variants":
        sets = tuple(random_set(rng.randrange(3), rng.choice(FORMATS)) for _ in range(1 if n == 1 else 3))
        visible = torch.cat((torch.ones(n, context, dtype=torch.bool), torch.eye(n, dtype=torch.bool)), dim=1)
        rows = Rows(tokens, context, [context] * n, visible, sets)
    else:
        rows = Rows(tokens, context)
    return Pass(runtime, rows, buffer, rng.choice((None, (n - 1,), tuple(range(n)))))


@each_family
@each_dtype
def test_sequences_of_one_pass_have_the_bits_of_separate_passes(family: str, dtype: torch.dtype) -> None:
    """The sequences are chains, trees and drafts of any layer sets and formats, each with its own keys and values."""
    runtime = native(family, dtype)
    for seed in range(6):
        rng = random.Random(seed)
        contexts = [rng.choice((0, 1, 13, 40, 70)) for _ in range(rng.choice((1, 2, 5, 9)))]
        together, alone = (
            [random_pass(runtime, random.Random(f"{seed} {i}"), c, c + 8 + i) for i, c in enumerate(contexts)]
            for _ in range(2)
        )
        found = runtime.forward_together(together)
        for one, own, logits in zip(together, alone, found, strict=True):
            assert same_bits(logits, runtime.forward(own.rows, own.buffer, wanted=own.wanted))
            assert same_slots(one.buffer, own.buffer, one.rows.first_slot + len(one.rows.token_ids))


@each_family
def test_sequences_share_a_pass_of_torch(family: str) -> None:
    """Each linear map runs once for all of them, and logits equal those of separate passes up to rounding (float64)."""
    runtime = tiny_runtime(family)
    for seed in range(4):
        contexts = [random.Random(seed).choice((0, 1, 13, 40)) + 3 * i for i in range(4)]
        passes, alone = (
            [random_pass(runtime, random.Random(f"{seed} {i}"), c, c + 8 + i) for i, c in enumerate(contexts)]
            for _ in range(2)
        )
        for own, logits in zip(alone, runtime.forward_together(passes), strict=True):
            torch.testing.assert_close(logits, runtime.forward(own.rows, own.buffer, wanted=own.wanted))
    calls: list[int] = []
    hook = runtime.blocks[1].parts.out.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    runtime.forward_together([Pass(runtime, Rows([3, 4, 5], 0), runtime.new_buffer(4)) for _ in range(5)])
    hook.remove()
    assert calls == [15]


@each_family
def test_layers_in_two_parts_give_the_bits_of_one_run(family: str) -> None:
    """Rows that left the model early continue from where they stopped."""
    runtime, ids = native(family), words(4, 18)
    whole, parts = runtime.new_buffer(20), runtime.new_buffer(20)
    states: dict[int, list[Tensor]] = {1: [], 3: []}
    expected = runtime.forward(Rows(ids, 0), whole, capture=states)
    hidden = runtime.embed(ids, 0)
    for first, last in ((0, 1), (1, 3), (3, 4)):
        before = hidden.clone()
        after = runtime.run_layers(hidden, 0, parts, first, last)
        assert torch.equal(hidden, before)  # the caller's
        hidden = after
        if last in states:
            assert same_bits(hidden, states[last][0])
    assert same_bits(runtime.logits(hidden), expected) and same_slots(whole, parts, 18)
    assert same_bits(runtime.logits(hidden[5:6]), expected[5:6])


@each_family
def test_number_of_threads_changes_no_bit(family: str, several_threads: None) -> None:
    runtime, ids = native(family), words(6, 40)
    draft = random_set(2, FORMATS[2])
    runtime.copies.prepare(draft)
    seen = []
    for n_threads in (3, 1, 2):
        torch.set_num_threads(n_threads)
        buffer = runtime.new_buffer(48)
        first = runtime.forward(Rows(ids, 0), buffer)
        seen.append(torch.cat((first, runtime.forward(Rows([5, 6], 40, variants=(draft,)), buffer))))
    assert same_bits(seen[0], seen[1]) and same_bits(seen[1], seen[2])


def test_reused_buffer_gives_the_same_bits() -> None:
    """Slots after those of a pass are never read."""
    runtime, ids = native("gemma3"), words(8, 30)
    clean = runtime.new_buffer(40)
    used = runtime.new_buffer(40)
    for part in (*used.keys, *used.values):
        part.fill_(float("nan"))
    visible = torch.cat((torch.ones(3, 30, dtype=torch.bool), ancestor_mask([-1, 0, 0])), dim=1)
    for rows in (Rows(ids, 0), Rows([3, 4, 5], 30, [30, 31, 31], visible), Rows([3], 30)):
        assert same_bits(runtime.forward(rows, used), runtime.forward(rows, clean))


def test_pass_that_does_not_fit_its_buffer_is_refused_before_it_writes() -> None:
    runtime = native("llama")
    buffer = runtime.new_buffer(4)
    one, wide = torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 4, dtype=torch.bool)
    for rows in (Rows([3] * 5, 0), Rows([3, 4], 3), Rows([3], 2, [2], wide), Rows([3], 0, [0, 1], one)):
        with pytest.raises(ValueError, match=r"positions|do not fit"):
            runtime.forward(rows, buffer)
    assert not any(part.any() for part in (*buffer.keys, *buffer.values))


def test_slots_before_a_mask_are_all_visible() -> None:
    own = torch.eye(2, dtype=torch.bool)
    whole = Rows([3, 4], 3, [3, 3], own)
    some = Rows([3, 4], 3, [1, 2], torch.cat((torch.tensor([[0, 0], [1, 0]], dtype=torch.bool), own), dim=1))
    for rows, seen, n_text in (
        (Rows([3], 4), None, 4),
        (whole, [[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]], 3),
        (some, [[1, 0, 0, 1, 0], [1, 1, 0, 0, 1]], 1),
    ):
        mask = rows.seen()
        assert (mask if mask is None else mask.int().tolist()) == seen
        assert [n for n in range(rows.first_slot + 1) if rows.see_all(n)] == [*range(n_text + 1)]


# -- decoding ----------------------------------------------------------------------------------------------------------


@cache
def plain_tokens(family: str, ids: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    return tokens(native(family), list(ids), PLAIN, sampling)


def tokens(runtime: Runtime, ids: list[int], method: Method, sampling: Sampling = GREEDY) -> tuple[int, ...]:
    return decode(runtime, ids, method, TokenRule.of(sampling, None, len(ids)), Ending(N_NEW)).token_ids


METHOD_CASES = [
    (family, name, with_model)
    for name in LOSSLESS
    for with_model in (False, True)[: 1 + (name in WITH_A_MODEL)]
    for family in (
        CONFIGS
        if name in ("plain", "swift", "adaptive", "prompt-lookup", "lookahead")
        else ("llama", "gemma3-softcap", "gpt2", "gpt_neox", "phi3")
    )
]


@pytest.mark.parametrize(("family", "name", "with_model"), variants(METHOD_CASES))
def test_every_method_gives_plain_tokens_in_bfloat16(family: str, name: str, with_model: bool) -> None:
    own = parts(family, with_model)
    method = build(name, own)
    for seed in range(2):
        ids = repeating(seed)
        assert tokens(own.runtime, ids, method) == plain_tokens(family, tuple(ids), GREEDY)


@pytest.mark.parametrize(("name", "sampling", "is_exact"), [
    ("spd", GREEDY, True), ("spd", WARM, False), ("prompt-lookup", WARM, True), ("plain", WARM, True),
])  # fmt: skip
def test_only_lossless_tokens_are_marked_exact(name: str, sampling: Sampling, is_exact: bool) -> None:
    own, ids = parts("llama", name in WITH_A_MODEL), repeating(0)
    done = decode(own.runtime, ids, build(name, own), TokenRule.of(sampling, None, len(ids)), Ending(N_NEW))
    assert done.exact == is_exact


@each_family
@pytest.mark.parametrize("sampling", [GREEDY, WARM, SHAPED], ids=["greedy", "sampled", "shaped"])
def test_any_draft_in_any_format_gives_plain_tokens_in_bfloat16(family: str, sampling: Sampling) -> None:
    """Each family and kind of sampling has two of the formats, in rotation."""
    runtime, drafted, turn = native(family), 0, list(CONFIGS).index(family) + (GREEDY, WARM, SHAPED).index(sampling)
    for seed in (turn, turn + 2):
        ids, formats = words(seed, 11), FORMATS[seed % len(FORMATS)]
        draft = random_set(seed, formats)
        runtime.copies.prepare(draft)
        method = swift(draft, SETTINGS[seed % len(SETTINGS)])
        done = decode(runtime, ids, method, TokenRule.of(sampling, None, len(ids)), Ending(N_NEW))
        assert done.token_ids == plain_tokens(family, tuple(ids), sampling)
        drafted += done.drafted
    assert drafted > 0
    method = build("adaptive", parts(family), AdaptiveSettings(draft_format="int4"))
    ids = repeating(6)
    assert tokens(runtime, ids, method, sampling) == plain_tokens(family, tuple(ids), sampling)


def logprobs_anew(runtime: Runtime, text: list[int], first: int, n_top: int) -> list[TokenLogprob]:
    """Return the log probabilities of the tokens from `first` on, of one pass over the whole text."""
    logits = runtime.forward(Rows(text, 0), runtime.new_buffer(len(text)))
    return list(token_logprobs(logits[first - 1 :], text[first:], n_top))


@pytest.mark.parametrize("sampling", [GREEDY, SHAPED], ids=["greedy", "shaped"])
@pytest.mark.parametrize(
    ("name", "families"),
    taken_in_turns([name for name in METHODS if name != "mtjd"], ("llama", "gemma3", "gpt2"), 1),
)
def test_log_probabilities_equal_those_of_one_pass_bitwise(
    name: str, families: Sequence[str], sampling: Sampling
) -> None:
    """This holds for lossy methods too, and makes those of all lossless methods equal to plain decoding's."""
    (family,) = families
    own = parts(family, with_model=True)
    for seed in range(2):
        ids = repeating(seed)
        rule = TokenRule.of(sampling, None, len(ids))
        work = decoding(
            own.runtime, ids, build(name, own), rule, Ending(N_NEW), logprobs=seed * 3, prompt_logprobs=True
        )
        events = list(side_by_side([work]))
        text = [*ids, *(token_id for event in events for token_id in event.token_ids)]
        told = [each for event in events for each in event.logprobs]
        assert [*events[0].prompt_logprobs, *told] == logprobs_anew(own.runtime, text, 1, seed * 3)
        assert len(told) == N_NEW and all(len(each.top) == seed * 3 for each in told)


def test_log_probabilities_are_of_unprocessed_logits() -> None:
    """They are of the logits before any processor, and the most probable tokens are in order."""
    runtime, ids = tiny_runtime("llama"), repeating(1)
    rule, ending = TokenRule.of(SHAPED, None, len(ids)), Ending(8)
    work = decoding(runtime, ids, PLAIN, rule, ending, logprobs=5, prompt_logprobs=True)
    began, *rounds = side_by_side([work])
    told = [*began.prompt_logprobs, *began.logprobs, *(each for event in rounds for each in event.logprobs)]
    text = [*ids, *(each.token_id for each in told[len(ids) - 1 :])]
    logits = runtime.hf_model(torch.tensor([text])).logits[0, :-1]  # type: ignore[operator]
    expected = logits.float().log_softmax(dim=-1)
    assert [each.token_id for each in told] == text[1:]
    torch.testing.assert_close(torch.tensor([e.logprob for e in told]), expected[range(len(told)), text[1:]])
    assert [[token_id for token_id, _ in each.top] for each in told] == expected.topk(5).indices.tolist()


def test_log_probabilities_of_a_prompt_span_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that another request has read is read again."""
    runtime, ids = native("gemma3"), words(4, 50)
    expected = logprobs_anew(runtime, ids, 1, 2)
    monkeypatch.setattr("swiftopt.models.runtime.PREFILL_ROWS", 16)
    engine = Engine(memory=1 << 30)
    for _ in range(2):
        found: list[TokenLogprob] = []

        def note(event: WorkEvent, found: list[TokenLogprob] = found) -> None:
            found += event.prompt_logprobs if isinstance(event, Prefilled) else ()

        rule = TokenRule.of(GREEDY, None)
        work = decoding(runtime, ids, PLAIN, rule, Ending(3), logprobs=2, prompt_logprobs=True)
        request = engine.add(subscribed(work, note))
        while engine.requests:
            list(engine.step())
        assert request.result.n_tokens == 3 and found == expected


@pytest.mark.wing("papers")
def test_method_without_log_probabilities_is_refused_first() -> None:
    own, ids = parts("llama"), repeating(1)
    work = decoding(own.runtime, ids, build("mtjd", own), TokenRule.of(GREEDY, None), Ending(4), logprobs=0)
    with pytest.raises(SettingsError, match=r"mtjd.*no log probabilities"):
        next(work)


@pytest.mark.model
def test_drafts_of_a_real_model_give_plain_tokens_in_bfloat16() -> None:
    library()
    runtime = load("smollm2-135m", "bfloat16", "cpu", speed="exact")
    assert runtime.exact
    own = Resources(runtime, costs=cheap_draft_costs(n_layers=runtime.n_layers))
    methods = {
        "swift": swift(LayerSet.uniform(runtime.n_layers, 25), SETTINGS[0]),
        "adaptive": build("adaptive", own, AdaptiveSettings(draft_format="int4")),
    }
    session = Session(runtime, GREEDY, 32)
    accepted = dict.fromkeys(methods, 0)
    prompts = read_stream(str(EXAMPLES))
    for prompt in (prompts[0], prompts[-1]):  # of two tasks
        plain = next(iter(session.run(prompt, PLAIN)))[1]
        for name, method in methods.items():
            done = next(iter(session.run(prompt, method)))[1]
            assert done.token_ids == plain.token_ids, (prompt.id, name)
            accepted[name] += done.accepted
    assert all(accepted.values())


# -- processes and weights ---------------------------------------------------------------------------------------------


def answer(runtime: Runtime, ids: list[int], to: Connection) -> None:
    logits = runtime.forward(Rows(ids, 0), runtime.new_buffer(len(ids)))
    to.send_bytes(logits.float().numpy().tobytes())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_process_computes_the_same_bits(several_threads: None) -> None:
    """The team's threads do not exist in a child. Two forks, because the parent continues beside it."""
    runtime, ids = native("llama"), words(3, 12)
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        expected = runtime.forward(Rows(ids, 0), runtime.new_buffer(12))
        mine, theirs = context.Pipe(duplex=False)
        child = context.Process(target=answer, args=(runtime, ids, theirs))
        child.start()
        try:
            assert mine.poll(60), "the child hangs"
            assert mine.recv_bytes() == expected.float().numpy().tobytes()
            child.join(60)
            assert child.exitcode == 0
        finally:
            child.kill()
            child.join()


def test_weights_of_gpt2_are_transposed_only_if_allowed() -> None:
    library()
    for lay_out in (False, True):
        runtime = tiny_runtime("gpt2", torch.bfloat16)
        maps = {name: m for name, m in runtime.hf_model.named_modules() if isinstance(m, Conv1D)}
        strides = {name: m.weight.stride() for name, m in maps.items()}
        values = {name: value.clone() for name, value in runtime.hf_model.state_dict().items()}
        assert maps and all(m.weight.is_contiguous() for m in maps.values())
        if lay_out:
            at_speed(runtime, "exact")
            assert runtime.speed == "native" and all(m.weight.stride(0) == 1 for m in maps.values())
        else:
            with pytest.raises(SettingsError, match="weights of such a layout are computed by torch"):
                at_speed(runtime, "exact", lay_out=False)
            at_speed(runtime, "auto", lay_out=False)
            assert (runtime.speed, runtime.native, runtime.copies.packed) == ("eager", None, False)
            assert {name: m.weight.stride() for name, m in maps.items()} == strides
        after = runtime.hf_model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in values.items())
        eager = tiny_runtime("gpt2", torch.bfloat16).hf_model(torch.tensor([[3, 1, 4]])).logits
        torch.testing.assert_close(runtime.hf_model(torch.tensor([[3, 1, 4]])).logits, eager, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_unsupported_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    library()
    runtime = tiny_runtime("llama", dtype)
    with pytest.raises(SettingsError, match=f"weights of {dtype} are computed by torch"):
        at_speed(runtime, "exact")
    at_speed(runtime, "auto")
    assert (runtime.native, runtime.speed, runtime.exact) == (None, "eager", False)


# -- changes of mind ---------------------------------------------------------------------------------------------------


def test_quantised_head_is_made_on_first_use() -> None:
    runtime = native_runtime("llama")
    rows = Rows([3, 1, 4], 0, variants=(LayerSet(4, formats=(("head", "int4"),)),))
    first = runtime.forward(rows, runtime.new_buffer(4))
    runtime.drop_copies("int4")
    assert same_bits(runtime.forward(rows, runtime.new_buffer(4)), first)


def test_copies_for_torch_are_remade_for_the_kernels() -> None:
    library()
    runtime = tiny_runtime("llama", torch.bfloat16)
    draft = LayerSet(4, formats=FORMATS[1])
    runtime.copies.prepare(draft)
    at_speed(runtime, "exact")
    assert runtime.forward(Rows([3, 1], 0, variants=(draft,)), runtime.new_buffer(4)).isfinite().all()


def test_runtime_returns_to_torch_on_request() -> None:
    runtime, ids = native_runtime("llama"), words(1, 9)
    at_speed(runtime, "eager")
    assert (runtime.speed, runtime.native, runtime.exact, runtime.copies.packed) == ("eager", None, False, False)
    eager = tiny_runtime("llama", torch.bfloat16)
    assert torch.equal(*(each.forward(Rows(ids, 0), each.new_buffer(9)) for each in (runtime, eager)))


def test_refused_speed_leaves_the_weights_unchanged() -> None:
    library()
    runtime = tiny_runtime("gpt2", torch.float64)
    maps = [m for m in runtime.hf_model.modules() if isinstance(m, Conv1D)]
    with pytest.raises(SettingsError):
        at_speed(runtime, "exact")
    assert maps and all(m.weight.is_contiguous() for m in maps)
