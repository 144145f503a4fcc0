"""4-bit copies of slots, which drafts in long contexts read: their values, their readers and their cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from families import tiny_runtime
from native import LEVELS, library, native_runtime, words
from torch import Tensor
from wings import is_here

from swiftopt.core.context_costs import SlotCopies
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.draft_models import SkippedTarget
from swiftopt.decoding.draft_tree import tree_rows
from swiftopt.decoding.engine import Engine, Request, alone
from swiftopt.decoding.loop import decoding
from swiftopt.decoding.methods import PLAIN, Method
from swiftopt.decoding.methods.chains import swift
from swiftopt.models import costs
from swiftopt.models.buffer import KVBuffer
from swiftopt.models.coded_slots import CodedSlots, SlotCoding
from swiftopt.models.kernels.native import NativePasses
from swiftopt.models.rows import Pass, Rows
from swiftopt.models.runtime import Runtime

UNIT, PIECE, LEAST = 512, 128, 600
SHAPE = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 2048,
}


@pytest.fixture(autouse=True)
def short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftopt.models.coded_slots.LEAST_SLOTS", LEAST)
    monkeypatch.setattr("swiftopt.models.coded_slots.LEAST_SHARE", 0.0)


def odd_keys(buffer: KVBuffer) -> None:
    """Fill a buffer with keys whose channels differ by orders of magnitude, as in a real model."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for keys, values in zip(buffer.keys, buffer.values, strict=True):
        n_heads, capacity, width = keys.shape
        by_channel = 0.1 * (2.5 * normal(n_heads, 1, width)).exp()
        keys.copy_(by_channel * (normal(n_heads, capacity, width) + 3 * normal(n_heads, 1, width)))
        values.copy_(normal(n_heads, capacity, width) + normal(n_heads, 1, width))
    for block in (*buffer.keys, *buffer.values):  # So that a buffer of any type may hold the same numbers.
        block.copy_(block.bfloat16())


def numbers_of(part: Tensor, n_in: int, n_out: int) -> Tensor:
    """Return the values (n_out, n_in) of 4-bit codes; a line has 8 inputs of 16 outputs."""
    lines = part.view(n_out // 16, n_in // 8, 16, 4)
    eight = torch.cat((lines & 15, lines >> 4), dim=3)
    return eight.transpose(1, 2).reshape(n_out, n_in).double() - 8


def decoded(copies: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values (slots, width) of one head's units in a float32 model."""
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for unit in copies:
        for of_values, half in enumerate(unit.view(2, UNIT // PIECE, -1)):
            for piece in half:
                steps, middles = piece[: 4 * width].view(torch.bfloat16).double().view(2, width)
                sizes = (width, PIECE) if not of_values else (PIECE, width)
                numbers = numbers_of(piece[4 * width :], *sizes)
                found[of_values].append((numbers.t() if of_values else numbers) * steps + middles)
    return torch.cat(found[0]), torch.cat(found[1])


def coding_of(runtime: Runtime, capacity: int) -> SlotCoding | None:
    return SkippedTarget(LayerSet(runtime.n_layers)).coding(runtime, capacity)


def coded(runtime: Runtime, buffer: KVBuffer, n_slots: int) -> CodedSlots:
    buffer.coding = coding_of(runtime, buffer.capacity)
    assert buffer.code(n_slots) and buffer.coded is not None
    return buffer.coded


def drafted(runtime: Runtime, rows: Rows, buffer: KVBuffer) -> Tensor:
    return runtime.forward_together([Pass(runtime, rows, buffer, reads_coded=True)])[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("width", [32, 96])
def test_rows_read_the_values_of_the_copies(level: str, width: int) -> None:
    """Compared with torch in float64 on the values of the copies."""
    n, ids = 1100, words(1, 5)
    library()
    exact, size = tiny_runtime("llama", torch.float64, head_dim=width, **SHAPE), 1110
    runtimes = {t: tiny_runtime("llama", t, head_dim=width, **SHAPE) for t in (torch.float32, torch.bfloat16)}
    errors = dict[torch.dtype, tuple[float, float]]()
    meant = exact.new_buffer(size)
    for dtype, runtime in runtimes.items():
        runtime.native = NativePasses(runtime, library(level))
        buffer = runtime.new_buffer(size)
        odd_keys(buffer)
        copies = coded(runtime, buffer, n)
        if dtype == torch.float32:
            for layer, (keys, values) in enumerate(zip(meant.keys, meant.values, strict=True)):
                keys.copy_(buffer.keys[layer]), values.copy_(buffer.values[layer])
                for head, units in enumerate(copies._copies[layer]):
                    keys[head, : copies.n_slots], values[head, : copies.n_slots] = decoded(units, width)
                steps = (buffer.keys[layer] - keys).abs().amax(dim=1) / buffer.keys[layer].std(dim=1)
                assert 0 < steps.max() < 0.3  # Half a step of 15 in a piece's range.
            expected = exact.forward(Rows(ids, n), meant)
        found = drafted(runtime, Rows(ids, n), buffer)
        plain = runtime.forward(Rows(ids, n), buffer)
        errors[dtype] = tuple(float((one - expected).norm() / expected.norm()) for one in (found, plain))
    for dtype, (found, plain) in errors.items():
        assert found < (0.2 if dtype == torch.float32 else 0.7) * plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_codes_are_the_nearest_numbers_of_their_channel(level: str, dtype: torch.dtype) -> None:
    """They are bitwise equal, for keys whose channels differ by orders of magnitude."""
    width = 96
    runtime = tiny_runtime("llama", dtype, head_dim=width, **SHAPE)
    runtime.native = NativePasses(runtime, library(level))
    buffer = runtime.new_buffer(UNIT)
    odd_keys(buffer)
    buffer.coding = coding_of(runtime, LEAST)
    copies = CodedSlots(buffer.coding, buffer.keys, buffer.values)  # type: ignore[arg-type]
    copies.extend(UNIT)
    for head, (unit,) in enumerate(copies._copies[0]):
        for of_values, half in enumerate(unit.view(2, UNIT // PIECE, -1)):
            slots = (buffer.values if of_values else buffer.keys)[0][head].float().view(UNIT // PIECE, PIECE, width)
            for piece, numbers in zip(half, slots, strict=True):
                low, high = numbers.amin(dim=0), numbers.amax(dim=0)
                middles = (low + (high - low) * (8 / 15)).bfloat16().float()
                steps = (torch.maximum((high - middles) / 7, (middles - low) / 8) * (1 + 1 / 256)).bfloat16().float()
                codes = ((numbers - middles) * (1 / steps) + 8).clamp(0, 15).round()
                stored_steps, stored_middles = piece[: 4 * width].view(torch.bfloat16).float().view(2, width)
                stored = numbers_of(piece[4 * width :], *((PIECE, width) if of_values else (width, PIECE))).float() + 8
                columns = torch.stack((middles, steps, *codes))  # (…, channels)
                found = torch.stack((stored_middles, stored_steps, *(stored.t() if of_values else stored)))
                if of_values:  # Levels differ in the order of these channels.
                    columns, found = (columns.unique(dim=1), found.unique(dim=1))
                assert torch.equal(found, columns)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return native_runtime("llama", head_dim=32, max_position_embeddings=2048)


def test_row_of_a_draft_has_the_same_bits_beside_any_rows(runtime: Runtime) -> None:
    n, ids, parents = 1100, words(1, 7), [-1, 0, 0, 2, 1, 3, 3]
    buffers = [runtime.new_buffer(1120) for _ in range(2)]
    for buffer in buffers:
        odd_keys(buffer)
        assert coded(runtime, buffer, n).n_slots == 2 * UNIT
    chain, tree = drafted(runtime, Rows(ids, n), buffers[0]), tree_rows(ids, parents, n)
    beside = runtime.forward_together(
        [
            Pass(runtime, rows, buffer, reads_coded=True)
            for rows, buffer in zip((tree, Rows(ids, n)), buffers, strict=True)
        ]
    )
    assert torch.equal(beside[1], chain)
    for path in ([0, 1, 4], [0, 2, 3, 6]):
        for depth, node in enumerate(path):
            one = drafted(runtime, Rows([ids[node]], n + depth), buffers[1])
            assert torch.equal(one[0], beside[0][node])
    for i, token_id in enumerate(ids):
        assert torch.equal(drafted(runtime, Rows([token_id], n + i), buffers[1])[0], chain[i])
    assert not torch.equal(runtime.forward(Rows(ids, n), buffers[0]), chain)


def test_rewritten_slots_are_copied_again(runtime: Runtime) -> None:
    ids, buffer, fresh = words(2, 1200), runtime.new_buffer(1200), runtime.new_buffer(1200)
    runtime.prefill(words(3, 1200), buffer)
    copies = coded(runtime, buffer, 1200)
    runtime.prefill(ids, buffer)
    assert copies.n_slots == 0
    runtime.prefill(ids, fresh)
    expected = drafted(runtime, Rows([5], 1199), fresh)
    assert torch.equal(drafted(runtime, Rows([5], 1199), buffer), expected)  # Without copies that are up to date.
    coded(runtime, fresh, 1199)
    assert buffer.code(1199) and copies.n_slots == 2 * UNIT
    expected = drafted(runtime, Rows([5], 1199), fresh)
    assert torch.equal(drafted(runtime, Rows([5], 1199), buffer), expected)
    taken = runtime.new_buffer(1300)
    taken.coding = buffer.coding
    taken.copy_from(buffer, 1100)
    assert taken.coded is not None and taken.coded.n_slots == 2 * UNIT
    taken.copy_from(buffer, 1000)
    assert taken.coded.n_slots == UNIT


def test_many_slots_are_copied_before_several_drafts(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftopt.models.coded_slots.UNITS_AT_ONCE", 1)
    buffer = runtime.new_buffer(1600)
    assert coded(runtime, buffer, 1600).n_slots == UNIT
    assert buffer.code(1600) and buffer.coded is not None and buffer.coded.n_slots == 2 * UNIT


@pytest.fixture
def drafts_in_full(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of copied slots that each draft pass reads."""
    read, forward = list[int](), Runtime.forward_together

    def noting(self: Runtime, passes: Sequence[Pass]) -> list[Tensor]:
        done = forward(self, passes)
        for pass_ in passes:
            assert pass_.kind == "draft" or not pass_.reads_coded
            if pass_.kind == "draft":
                read.append(pass_.buffer.coded.n_slots if pass_.reads_coded and pass_.buffer.coded else 0)
        return done

    monkeypatch.setattr(Runtime, "forward_together", noting)
    return read


def drafting() -> Method:
    return swift(LayerSet(4, frozenset({1}), frozenset({2})), SwiftSettings(stop_threshold=0.0, max_draft_length=3))


def ask(engine: Engine, runtime: Runtime, ids: Sequence[int], method: Method, n_new: int = 12) -> Request[object]:
    return engine.add(decoding(runtime, ids, method, TokenRule.of(Sampling(), None, len(ids)), Ending(n_new)))


def test_drafts_that_read_copies_change_no_token(
    runtime: Runtime, drafts_in_full: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With side leaves, after kept prefixes, in growing buffers, and when texts are evicted."""
    monkeypatch.setattr("swiftopt.decoding.loop.FIRST_NEW_SLOTS", 4)
    text = words(4, 1000)
    prompts = [text, [*text, *words(5, 30)], words(6, 700), [*text[:640], *words(7, 20)], text]
    expected = [
        alone(decoding(runtime, ids, PLAIN, TokenRule.of(Sampling(), None, len(ids)), Ending(12))) for ids in prompts
    ]
    a_slot = runtime.slot_bytes + coding_of(runtime, 1024).slot_bytes  # type: ignore[union-attr]
    cached = 0
    for memory in (1 << 30, 2000 * a_slot):
        engine, at_once = Engine(memory), 1 if memory > 1 << 29 else 2
        for first in range(0, len(prompts), at_once):
            asked = [ask(engine, runtime, ids, drafting()) for ids in prompts[first : first + at_once]]
            while engine.requests:
                list(engine.step())
                held = [buffer for request in engine.requests for buffer in request.held.values()]
                assert engine.n_bytes + engine.kept_bytes <= memory
                own = sum(buffer.capacity * runtime.slot_bytes + buffer.coded_bytes for buffer in held)
                assert own <= engine.n_bytes
            for request, plain in zip(asked, expected[first : first + at_once], strict=True):
                assert request.result.token_ids == plain.token_ids  # type: ignore[attr-defined]
                cached += request.result.n_cached  # type: ignore[attr-defined]
    assert cached > 2000 and drafts_in_full.count(UNIT) > 100 and not drafts_in_full.count(0)


def test_short_contexts_have_no_copies(runtime: Runtime, drafts_in_full: list[int]) -> None:
    engine, ids = Engine(1 << 30), words(8, LEAST - 50)
    request = ask(engine, runtime, ids, drafting())
    list(engine.step())
    assert engine.n_bytes == sum(buffer.capacity * runtime.slot_bytes for buffer in request.held.values())
    while engine.requests:
        list(engine.step())
        assert all(buffer.coded is None for buffer in request.held.values())
    assert drafts_in_full and not any(drafts_in_full)
    assert PLAIN.drafter.coding(runtime, 2000) is None


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.families) for name in ("gemma3", "gemma4_text", "gpt2", "qwen3_next")],
)
def test_layers_with_windows_or_states_have_no_copies(family: str) -> None:
    """Layers that share another layer's slots read its copies."""
    runtime = native_runtime(family, max_position_embeddings=2048)
    coding = coding_of(runtime, 1024)
    full = [b for b in runtime.blocks if b.has_attention and b.window is None and b.heads.width % 32 == 0]
    assert (coding is None) == (not full)
    if coding is None:
        return
    assert set(coding.units) == {block.source for block in full}
    buffer = runtime.new_buffer(1100)
    runtime.prefill(words(1, 1090), buffer)
    buffer.coding = coding
    assert buffer.code(1090)
    whole = runtime.forward(Rows([5], 1090), buffer)
    read = drafted(runtime, Rows([5], 1090), buffer)
    assert not torch.equal(whole, read) and float((whole - read).norm()) < 0.5 * float(whole.norm())


def test_passes_that_read_copies_are_measured(runtime: Runtime) -> None:
    if not is_here("bench"):
        pytest.skip("the benchmarks are left out")
    from swiftopt.bench.coded_slots import copy_times

    short, long = (copy_times(runtime, context, 2) for context in (LEAST - 2, 1100))
    assert short["coded"] == 0 and long["coded"] == 2 * UNIT
    assert set(long["c"]) == {"target", "draft", "draft by copies"} and min(long["c"].values()) > 0


SLOT_S, COPIED_SLOT_S, REST_S = 1e-5, 2e-6, 1e-2  # Of each layer's attention, and of the rest of a pass.


@pytest.fixture
def slots_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let passes take made-up seconds by the slots that their attentions read, fewer for copies."""
    taken, forward = list[float](), Runtime.forward_together

    def noting(self: Runtime, passes: Sequence[Pass]) -> list[Tensor]:
        (pass_,) = passes
        (skips,) = pass_.rows.variants or (self.whole,)
        n_copied = pass_.buffer.coded.n_slots if pass_.reads_coded and pass_.buffer.coded else 0
        slots_s = COPIED_SLOT_S * n_copied + SLOT_S * (pass_.rows.first_slot - n_copied)
        taken.append(REST_S + (self.n_layers - len(skips.skip_attn)) * slots_s)
        return forward(self, passes)

    def seconds(run: Callable[[], None]) -> float:
        run()
        return taken[-1]

    monkeypatch.setattr(Runtime, "forward_together", noting)
    monkeypatch.setattr(costs, "_seconds", seconds)
    monkeypatch.setattr(costs, "REPEATS", (1, 1))
    monkeypatch.setattr(costs, "AGAIN_S", 0.0)


@pytest.mark.parametrize("context", [512, 1024])
def test_drafts_are_measured_as_they_read_long_contexts(context: int, runtime: Runtime, slots_take_time: None) -> None:
    """A draft in few bits, and one with the model's weights. The target reads all slots."""
    profile = costs.measure_format(runtime, costs.measure_costs(runtime, context), "int4")
    slot_s = COPIED_SLOT_S if context > LEAST else SLOT_S
    n = runtime.n_layers
    assert profile.target_pass_s(1) == pytest.approx(REST_S + n * context * SLOT_S)
    assert profile.draft_pass_s(LayerSet(n).filled("int4")) == pytest.approx(REST_S + n * context * slot_s)
    skips = LayerSet(n, frozenset({1}), frozenset({2}))
    assert profile.draft_pass_s(skips) == pytest.approx(REST_S + (n - 1) * context * slot_s)


def test_prices_of_drafts_include_reading_copies(runtime: Runtime) -> None:
    """128 slots have 4 bits per value, and a step and a middle of 16 bits per channel."""
    n_bits = {torch.bfloat16: 16, torch.float32: 32}[runtime.dtype]
    assert costs.slot_copies(runtime) == SlotCopies(LEAST, pytest.approx((4 + 2 * 16 / 128) / n_bits))
    short = native_runtime("llama", head_dim=32, max_position_embeddings=LEAST - 1)
    assert costs.slot_copies(short) is None
