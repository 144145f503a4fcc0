"""Sampled drafts, several sequences and beams on tiny models: lossless methods are exact, beams find the best block."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch
from fakes import results_of
from families import VOCAB, tiny_runtime, variants
from native import quick_runtime

from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.types import Completion, Sampling
from swiftopt.decoding.context import Context, Ending, TokenRule
from swiftopt.decoding.draft import Drafter
from swiftopt.decoding.draft_models import DraftModel, OtherModel, SkippedTarget
from swiftopt.decoding.engine import alone
from swiftopt.decoding.loop import decode, decoding
from swiftopt.decoding.methods import PLAIN, Method
from swiftopt.decoding.methods.chains import ChainDrafter, StopRule
from swiftopt.decoding.verify import BlockRatio, ChainRatio, SeveralRatio, Verifier
from swiftopt.models.runtime import Runtime
from swiftopt.papers.methods.beams import BeamDrafter, BeamSettings
from swiftopt.papers.methods.sequences import SequencesDrafter, SequencesSettings
from swiftopt.papers.verifiers import JointRatio, KeepAll, Rollback, Typical, k_seq, warp

N_NEW = 24
SKIPPED = LayerSet(4, frozenset({1, 2}), frozenset({1}))
LOSSLESS = ["chain", "block", "specinfer", "mcss", "spectr"]


def prompt(seed: int, length: int = 9) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def lossless(name: str, model: DraftModel, length: int = 4) -> Method:
    parts: dict[str, tuple[Drafter, Verifier]] = {
        "chain": (ChainDrafter(model, StopRule(length), sampled=True), ChainRatio()),
        "block": (ChainDrafter(model, StopRule(length), sampled=True), BlockRatio()),
        "specinfer": (SequencesDrafter(model, SequencesSettings(3, length), True), SeveralRatio("with")),
        "mcss": (SequencesDrafter(model, SequencesSettings(3, length), False), SeveralRatio("without")),
        "spectr": (SequencesDrafter(model, SequencesSettings(3, length), True), SeveralRatio(tries=k_seq)),
    }
    return Method(name, *parts[name])


def draft_model(kind: str, family: str = "llama", make: Callable[..., Runtime] = tiny_runtime) -> DraftModel:
    return SkippedTarget(SKIPPED) if kind == "skipped" else OtherModel(make(family, seed=1))


def runtime_of(family: str, seed: int = 0) -> Runtime:
    """Return a runtime: one family runs on torch, the others on the native kernels."""
    return (tiny_runtime if family == "llama" else quick_runtime)(family, seed=seed)


@cache
def plainly(family: str, seed: int, sampling: Sampling) -> Completion:
    return decode(runtime_of(family), prompt(seed), PLAIN, TokenRule.of(sampling, None), Ending(N_NEW))


@pytest.mark.parametrize("family", variants(["llama", "gpt2", "gemma3-softcap", "qwen2-window"]))
@pytest.mark.parametrize("kind", ["skipped", "other"])
def test_greedy_output_equals_plain_decoding(family: str, kind: str) -> None:
    runtime, model = runtime_of(family), draft_model(kind, family, runtime_of)
    for seed, name in enumerate(LOSSLESS):
        for penalty in (None, 1.3):
            sampling = Sampling(repetition_penalty=penalty)
            plain = plainly(family, seed, sampling)
            method = lossless(name, model)
            fast = decode(runtime, prompt(seed), method, TokenRule.of(sampling, None), Ending(N_NEW))
            assert fast.token_ids == plain.token_ids and fast.drafted > 0 and not fast.lossy


@pytest.mark.parametrize("name", LOSSLESS)
def test_target_as_draft_is_fully_accepted(name: str) -> None:
    """At T > 0 the target drafts for itself; nothing may be rejected, with tree masks and moved rows."""
    runtime, sampling = tiny_runtime("llama"), Sampling(temperature=1.0, seed=3)
    method = lossless(name, SkippedTarget(LayerSet(4)), length=3)
    done = decode(runtime, prompt(1), method, TokenRule.of(sampling, None), Ending(1 + 4 * 5))
    assert done.drafted == done.accepted == 15 and done.target_passes == 5


def after(runtime: Runtime, token_ids: list[int]) -> torch.Tensor:
    """Return the target's distribution after a text, without a buffer; float64 (vocab,)."""
    logits = runtime.hf_model(torch.tensor([token_ids])).logits[0, -1]  # type: ignore[operator]
    return torch.softmax(logits.double(), dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "skipped") for name in LOSSLESS), ("chain", "other"), ("spectr", "other")]
)
def test_sampled_output_has_the_targets_distribution(name: str, kind: str) -> None:
    """Chi-square over all sequences of 4 tokens at top-k 2; false alarm 1e-4 per case, fixed seeds."""
    runtime, ids, n, length = quick_runtime("llama"), prompt(2), 300, 4
    method = lossless(name, draft_model(kind, make=quick_runtime), length=2)
    rules = (TokenRule.of(Sampling(temperature=1.5, top_k=2, seed=seed), None) for seed in range(n))
    works = (decoding(runtime, ids, method, rule, Ending(length)) for rule in rules)
    counts = Counter(done.token_ids for done in results_of(works, at_once=50))
    expected: dict[tuple[int, ...], float] = {(): float(n)}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for path, weight in expected.items():
            logits = after(runtime, [*ids, *path]).log() / 1.5
            values, tokens = logits.topk(2)
            for token, share in zip(tokens.tolist(), torch.softmax(values, -1).tolist(), strict=True):
                grown[(*path, token)] = weight * share
        expected = grown
    assert set(counts) <= set(expected)
    rare = [path for path, weight in expected.items() if weight < 5.0]
    bins = [(counts[path], weight) for path, weight in expected.items() if weight >= 5.0]
    bins.append((sum(counts[path] for path in rare), max(1e-9, sum(expected[path] for path in rare))))
    statistic = torch.tensor(sum((seen - weight) ** 2 / weight for seen, weight in bins), dtype=torch.float64)
    freedom = torch.tensor(len(bins) - 1.0, dtype=torch.float64)
    assert len(bins) > 5  # or there is nothing to tell apart
    assert float(torch.special.gammaincc(freedom / 2, statistic / 2)) > 1e-4


def beam_blocks(runtime: Runtime, ids: list[int], width: int, length: int, top_k: int, top_p: float) -> list[int]:
    """Return MTJD's next block by an independent beam search without a buffer."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(length):
        grown = []
        for joint, path in beams:
            probs = warp(after(runtime, ids + path), top_k, top_p)
            grown += [(joint + math.log(float(probs[t])), [*path, t]) for t in probs.nonzero().flatten().tolist()]
        beams = sorted(grown, reverse=True)[:width]
    return beams[0][1]


def mtjd(width: int, length: int, top_k: int, top_p: float) -> Method:
    settings = BeamSettings(width, length, top_k, top_p)
    return Method("mtjd", BeamDrafter(SkippedTarget(None), settings, runs_target=True), KeepAll())


def test_block_is_the_most_probable_one_if_no_beam_is_dropped() -> None:
    """All 27 sequences of three tokens are within the width and are enumerated."""
    runtime, ids = tiny_runtime("llama"), prompt(4)
    done = decode(runtime, ids, mtjd(27, 3, 3, 1.0), TokenRule.of(Sampling(), None), Ending(4))
    first, block = done.token_ids[0], done.token_ids[1:]
    text, joint = [*ids, first], {}
    for path in itertools.product(range(3), repeat=3):
        tokens: list[int] = []
        weight = 1.0
        for rank in path:
            values, kept = after(runtime, text + tokens).topk(3)
            weight *= float(values[rank] / values.sum())
            tokens.append(int(kept[rank]))
        joint[tuple(tokens)] = weight
    assert block == max(joint, key=lambda tokens: joint[tokens])
    assert done.lossy and done.layer_set is None and done.drafted == 0 and done.target_passes == 3


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_consecutive_blocks_equal_a_search_without_a_buffer(family: str) -> None:
    """The 13 tokens after the first are three blocks of four, and a last one of one token."""
    runtime, ids = tiny_runtime(family), prompt(5)
    done = decode(runtime, ids, mtjd(4, 4, 10, 0.9), TokenRule.of(Sampling(), None), Ending(14))
    text = [*ids, done.token_ids[0]]
    for length in (4, 4, 4, 1):
        text += beam_blocks(runtime, text, 4, length, 10, 0.9)
    assert list(done.token_ids) == text[len(ids) :]
    assert done.target_passes == 13


def test_single_beam_equals_greedy_decoding() -> None:
    runtime = tiny_runtime("llama")
    plain = decode(runtime, prompt(6), PLAIN, TokenRule.of(Sampling(), None), Ending(N_NEW))
    done = decode(runtime, prompt(6), mtjd(1, 4, 1, 1.0), TokenRule.of(Sampling(), None), Ending(N_NEW))
    assert done.token_ids == plain.token_ids


def test_blocks_of_a_search_are_at_least_as_likely_as_greedy_ones() -> None:
    """Over 12 prompts the block of 4 is never less probable than the greedy one, and sometimes more."""
    runtime, gains = tiny_runtime("llama"), []
    for seed in range(12):
        found = {}
        for width in (1, 8):
            method = mtjd(width, 4, 10, 1.0)
            done = decode(runtime, prompt(seed), method, TokenRule.of(Sampling(), None), Ending(5))
            text, joint = [*prompt(seed), done.token_ids[0]], 0.0
            for token in done.token_ids[1:]:
                joint += math.log(float(warp(after(runtime, text), 10, 1.0)[token]))
                text.append(token)
            found[width] = joint
        gains.append(found[8] - found[1])
    assert min(gains) > -1e-9 and max(gains) > 0.01


@pytest.mark.parametrize("kind", ["skipped", "other"])
def test_beams_carry_the_draft_probability_of_each_token(kind: str) -> None:
    """If the target drafts for itself, MTAD's ratio is 1 for every prefix, so all tokens are kept for any τ below 1."""
    runtime, ids = tiny_runtime("llama"), prompt(7)
    model: DraftModel = SkippedTarget(LayerSet(4)) if kind == "skipped" else OtherModel(tiny_runtime("llama"))
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=2)):
        method = Method("mtad", BeamDrafter(model, BeamSettings()), JointRatio(0.999, 10, 0.9))
        done = decode(runtime, ids, method, TokenRule.of(sampling, None), Ending(21))
        assert done.drafted == done.accepted == 16 and done.lossy


def test_sampled_beams_are_drawn_and_the_draft_is_the_best_of_them() -> None:
    """With room for all 9 sequences of two tokens, drawing without replacement is deterministic."""
    runtime, ids = tiny_runtime("llama"), prompt(8)

    def block(width: int, seed: int) -> tuple[int, ...]:
        context = Context(
            runtime, runtime.new_buffer(60), TokenRule.of(Sampling(temperature=1.0, seed=seed), None), [*ids], 9
        )
        runtime.prefill(ids[:-1], context.buffer)
        drafter = BeamDrafter(SkippedTarget(LayerSet(4)), BeamSettings(width, 2, 3, 1.0))
        return alone(drafter.begin(context).draft(2)).tree.token_ids[1:]

    best = tuple(beam_blocks(runtime, ids, 9, 2, 3, 1.0))
    assert {block(9, seed) for seed in range(5)} == {best}
    assert len({block(1, seed) for seed in range(20)}) > 1


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=4)], ids=["greedy", "sampled"]
)
def test_lossy_methods_are_marked_and_keep_the_length(sampling: Sampling) -> None:
    runtime, model = tiny_runtime("llama"), SkippedTarget(SKIPPED)
    methods = [
        Method("mtad", BeamDrafter(model, BeamSettings()), JointRatio(0.5, 10, 0.9)),
        mtjd(4, 4, 10, 0.9),
        Method("bild", ChainDrafter(model, StopRule(10, 0.6, keeps_last=False)), Rollback(3.0)),
        Method("typical", ChainDrafter(model, StopRule(5)), Typical(0.09, 0.3)),
    ]
    for method in methods:
        for n_new in (1, 2, 3, 17):
            done = decode(runtime, prompt(9), method, TokenRule.of(sampling, None), Ending(n_new))
            assert done.lossy and done.method == method.name and done.n_tokens == n_new


@pytest.mark.parametrize("name", [*LOSSLESS, "mtad", "mtjd"])
def test_no_slot_after_the_stated_ones_is_written(name: str) -> None:
    """A draft with `room` runs in a buffer of just `max_rows` slots after the committed ones."""
    runtime, ids, model = tiny_runtime("llama"), prompt(3), SkippedTarget(SKIPPED)
    for room in range(6):
        if name in LOSSLESS:
            drafter = lossless(name, model).drafter
        else:
            drafter = mtjd(4, 4, 10, 0.9).drafter if name == "mtjd" else BeamDrafter(model, BeamSettings())
        buffer = runtime.new_buffer(len(ids) - 1 + drafter.max_rows(room))
        context = Context(runtime, buffer, TokenRule.of(Sampling(temperature=2.0), None), list(ids), len(ids))
        runtime.prefill(ids[:-1], buffer)
        draft = alone(drafter.begin(context).draft(room))
        assert draft.n_checked == 0 or len(ids) - 1 + draft.tree.n_nodes <= buffer.capacity
        assert draft.tree.n_steps == min(4, room + (name == "mtjd"))
