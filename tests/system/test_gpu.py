"""What only a CUDA device can show: parity, margins and memory there."""

from __future__ import annotations

import warnings

import pytest
import torch
from families import tiny_model, tiny_runtime, variants

from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import ModelInfo
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.draft_models import OtherModel
from swiftopt.decoding.engine import side_by_side
from swiftopt.decoding.events import Round
from swiftopt.decoding.loop import decode, decoding
from swiftopt.decoding.methods import PLAIN, Method, swift
from swiftopt.decoding.methods.chains import ChainDrafter, StopRule
from swiftopt.models.graphs import captured, replayed_s
from swiftopt.models.loading import at_speed
from swiftopt.models.runtime import Runtime
from swiftopt.papers.methods.early_exit import EarlyExit

pytestmark = pytest.mark.gpu

PROMPT = [3, 17, 42, 8, 91, 5]
EARLY_STOP = swift(LayerSet(4, frozenset({1}), frozenset({2})), SwiftSettings(stop_threshold=0.022))
DRAFTER = swift(LayerSet(4, frozenset({1}), frozenset({2})), SwiftSettings(early_stop=False, max_draft_length=5))


def on_gpu(family: str, dtype: torch.dtype) -> Runtime:
    model = tiny_model(family, dtype).to("cuda")
    return Runtime(model, None, ModelInfo("tiny", family, 4, 1))


def tokens(runtime: Runtime, drafter: Method) -> tuple[int, ...]:
    return decode(runtime, PROMPT, drafter, TokenRule.of(Sampling(), None), Ending(40)).token_ids


@pytest.mark.parametrize("family", variants())
def test_gpu_tokens_equal_cpu_tokens_in_float64(family: str) -> None:
    cpu = tokens(tiny_runtime(family), PLAIN)
    gpu = on_gpu(family, torch.float64)
    assert tokens(gpu, PLAIN) == tokens(gpu, DRAFTER) == tokens(gpu, EARLY_STOP) == cpu


@pytest.mark.parametrize("name", ["plain", "branched", "early stop", "early exit", "another model"])
@pytest.mark.parametrize("speed", ["eager", "graphs"])
def test_a_round_synchronises_with_the_device_once(speed: str, name: str) -> None:
    """By torch's own count, in which waiting for numbers that a later pass has been queued behind is none."""
    runtime, other = on_gpu("llama", torch.float32), on_gpu("llama", torch.float32)
    for each in (runtime, other):
        at_speed(each, speed)
    method = {
        "plain": PLAIN,
        "branched": DRAFTER,
        "early stop": EARLY_STOP,
        "early exit": Method("adaspeed", ChainDrafter(EarlyExit(2), StopRule(5, 0.022))),
        "another model": Method("spd", ChainDrafter(OtherModel(other), StopRule(5, 0.022))),
    }[name]
    tokens(runtime, method)  # kernels are compiled, graphs captured
    work = decoding(runtime, PROMPT, method, TokenRule.of(Sampling(), None), Ending(40), logprobs=2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for event in side_by_side([work]):
                waits = [each for each in seen if "synchronizing CUDA operation" in str(each.message)]
                assert not isinstance(event, Round) or len(waits) <= 1
                seen.clear()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_gpu_bfloat16_logits_of_one_row_and_of_several_are_close(family: str) -> None:
    runtime = on_gpu(family, torch.bfloat16)
    from swiftopt.bench.parity import margin_and_noise

    _, noise = margin_and_noise(runtime, PROMPT * 3)
    assert noise < 0.5


def test_drafting_on_a_gpu_adds_little_memory() -> None:
    runtime = on_gpu("llama", torch.float32)
    peaks = []
    for drafter in (PLAIN, DRAFTER):
        torch.cuda.reset_peak_memory_stats()
        tokens(runtime, drafter)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.05 * peaks[0] + 2**20


def test_a_model_split_over_devices_decodes_the_same() -> None:
    model = tiny_model("llama", torch.float64)
    whole = tokens(Runtime(model, None, ModelInfo("tiny", "llama", 4, 1)), PLAIN)
    for layer in model.model.layers[2:]:
        layer.to("cuda")
    split = Runtime(model, None, ModelInfo("tiny", "llama", 4, 1))
    assert not split.one_device and tokens(split, DRAFTER) == whole


def test_a_kernel_for_drafts_is_chosen_by_replayed_time() -> None:
    """The chosen kernel is torch's or ours; drafting with it gives plain decoding's tokens."""
    runtime = on_gpu("llama", torch.float32)
    at_speed(runtime, "graphs")
    large, small = (torch.ones(n, n, device="cuda") for n in (2048, 64))
    assert replayed_s(runtime.device, lambda: large @ large) > replayed_s(runtime.device, lambda: small @ small) > 0
    drafter = swift(LayerSet(4, frozenset({1}), frozenset({2})).filled("int4"), SwiftSettings(max_draft_length=5))
    assert tokens(runtime, drafter) == tokens(runtime, PLAIN)


def test_a_capture_that_fails_leaves_the_device_to_the_next() -> None:
    device, numbers = torch.device("cuda", torch.cuda.current_device()), torch.arange(3.0, device="cuda")
    before = torch.cuda.current_stream(device)
    with pytest.raises(RuntimeError):
        captured(numbers.nonzero, device)  # which waits for how many there are
    assert torch.cuda.current_stream(device) == before
    replay = captured(lambda: 2 * numbers, device)
    numbers += 1
    assert replay().tolist() == [2.0, 4.0, 6.0]
