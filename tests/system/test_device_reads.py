"""A round waits for its device once, for its tokens; late reads do not change the drafts.

The device is torch's `meta`, whose tensors have no data. Each read, and each transfer that waits, is counted and
answered with one random number <= 0, like a log probability, so that all drafts are accepted. A transfer without
waiting is counted when it is read, unless another pass was requested in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from fakes import cheap_draft_costs, letter_tokenizer, results_of
from families import VOCAB, tiny_runtime
from native import quick_runtime, words
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import MinNewTokensLengthLogitsProcessor

from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.settings import Branching, SwiftSettings
from swiftopt.core.types import Completion, Sampling, TokenLogprob
from swiftopt.decoding.context import Context, Ending, TokenRule
from swiftopt.decoding.draft import Draft, DraftModel, Outcome, Walk
from swiftopt.decoding.draft_models import OtherModel, SkippedTarget
from swiftopt.decoding.draft_tree import DraftTree
from swiftopt.decoding.draft_worth import PassCosts
from swiftopt.decoding.engine import alone, side_by_side
from swiftopt.decoding.events import Prefilled, Round
from swiftopt.decoding.grammar import Grammar, GrammarMask
from swiftopt.decoding.loop import decode, decoding
from swiftopt.decoding.methods import PLAIN, Method, Resources, build, swift
from swiftopt.decoding.methods.adaptive import AdaptiveDrafter, AdaptiveSettings
from swiftopt.decoding.methods.chains import ChainDrafter, SpdSettings, StopRule
from swiftopt.decoding.verify import BlockRatio, ChainRatio, SeveralRatio, SeveralRule, Target
from swiftopt.decoding.work import PassGenerator, Work
from swiftopt.models.graphs import GraphPasses
from swiftopt.models.kernels import device_attention
from swiftopt.models.loading import at_speed
from swiftopt.models.rows import Pass
from swiftopt.models.runtime import Runtime
from swiftopt.optimizer.evaluation import score_window
from swiftopt.papers.early_exit import Heads, Probe
from swiftopt.papers.methods.chains import AdaptiveStop, AdaptiveThreshold, BildSettings
from swiftopt.papers.methods.early_exit import EarlyExit
from swiftopt.papers.verifiers import Typical

META = torch.device("meta")
PROMPT = [3, 17, 42, 8, 91, 5]
SKIPPING = LayerSet(4, frozenset({1}), frozenset({2}))
EARLY_STOP = swift(SKIPPING, SwiftSettings(stop_threshold=0.6))
CHAINS = swift(SKIPPING, SwiftSettings(early_stop=False, dynamic_verification=False, max_draft_length=4))
BRANCHED = swift(SKIPPING, SwiftSettings(early_stop=False, max_draft_length=4))
READS = {
    "item", "tolist", "cpu", "numpy", "nonzero", "__array__", "__bool__", "__int__", "__float__", "__index__",
}  # fmt: skip


class Waits(TorchFunctionMode):
    """Counts what waits for the `meta` device, and answers reads.

    Results on `meta` depend only on the kinds of arguments; they are cached, because torch computes them slowly.
    """

    _made: ClassVar[dict[Any, tuple[Any, ...]]] = {}  # sizes, strides and type, by function and arguments

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.n_passes, self.n_late = 0, 0  # passes asked for; reads of what was moved before the latest of them
        self.n_sent = 0  # numbers moved to the device
        self._moved: list[tuple[Tensor, int]] = []  # and the passes asked for by then
        self._drawn = Random(0)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        own = args[0] if args and isinstance(args[0], Tensor) else None
        self.n_passes += name == "embedding"
        if name == "to" and own is not None and own.device != META and kwargs.get("non_blocking"):
            self.n_sent += own.numel()
        if name == "to" and own is not None and own.device == META and kwargs.get("non_blocking"):
            self._moved.append((torch.full(own.shape, -self._drawn.random(), dtype=own.dtype), self.n_passes))
            return self._moved[-1][0]
        for moved, n_passes in self._moved if name == "tolist" else ():
            if moved is own:
                self.n_late += self.n_passes > n_passes
                self.seen += ["what was just moved"] * (self.n_passes == n_passes)
        if own is not None and own.device == META and name in READS:
            self.seen.append(name)
            return getattr(torch.full(own.shape, -self._drawn.choice(range(4)), dtype=own.dtype), name)()
        if name == "__getitem__" and own is not None and own.device == META and self._is_moved(args[1]):
            self.seen.append("an index of this machine")
        answer = self._answer(func, args, kwargs) if "out" not in kwargs else func(*args, **kwargs)
        if isinstance(answer, Tensor) and answer.device == META and not kwargs.get("non_blocking"):
            to_meta = torch.device(kwargs.get("device") or "cpu") == META
            sources = [part for part in args if isinstance(part, Tensor)]
            if (name in ("tensor", "as_tensor") and to_meta) or (
                name in ("to", "copy_", "__setitem__") and any(part.device != META for part in sources if part.dim())
            ):
                self.seen.append(f"{name} to the device")
        return answer

    @classmethod
    def _answer(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `func`, computed once for arguments of the same kind."""
        try:
            made = cls._made.get(key := (func, cls._kind(args), cls._kind(tuple(kwargs.items()))))
        except TypeError:  # an argument of its own kind
            return func(*args, **kwargs)
        if made is not None:
            return torch.empty_strided(made[0], made[1], dtype=made[2], device=made[3])
        answer = func(*args, **kwargs)
        if isinstance(answer, Tensor) and answer.device.type == "meta" and not any(answer is each for each in args):
            cls._made[key] = answer.shape, answer.stride(), answer.dtype, answer.device
        return answer

    @classmethod
    def _kind(cls, value: Any) -> Any:
        """Return everything on which a result's shape can depend."""
        if isinstance(value, Tensor):
            return value.shape, value.stride(), value.dtype, value.device
        if isinstance(value, (tuple, list)):
            return tuple([cls._kind(each) for each in value])
        return type(value), (value.start, value.stop, value.step) if isinstance(value, slice) else value

    @staticmethod
    def _is_moved(index: Any) -> bool:
        parts = index if isinstance(index, tuple) else (index,)
        return any(isinstance(part, list) or (isinstance(part, Tensor) and part.device != META) for part in parts)


def without_data(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> Runtime:
    """Return a runtime on a device without data."""
    runtime = tiny_runtime("llama", torch.float32)
    runtime.hf_model.to(META)
    runtime.device = runtime._head_device = META
    for block in runtime.blocks:
        block.device = META
    runtime.reads_late = True
    monkeypatch.setattr(device_attention, "store", lambda query, *args: query)
    monkeypatch.setattr(device_attention, "attend", lambda query, *args, **options: torch.empty_like(query).flatten(1))
    if graphs:
        runtime.graphs = GraphPasses(runtime, lambda static: static.run)
    return runtime


def adaptive(lookup: bool, model: DraftModel | None = None) -> Method:
    """Return adaptive drafts by a model that is assumed to cost a tenth of a pass."""
    costs, model = PassCosts(cheap_draft_costs(0.1), LayerSet(4).filled("int4")), model or SkippedTarget(SKIPPING)
    return Method("adaptive", AdaptiveDrafter(model, costs, AdaptiveSettings(lookup=lookup)))


def near_model() -> Runtime:
    """Return another model on its own device. It differs from the tiny llama in a layer, and agrees on many tokens."""
    runtime, others = (tiny_runtime("llama", torch.float32, seed) for seed in (0, 1))
    layers = (each.hf_model.get_submodule("model.layers.2") for each in (runtime, others))
    for own, other in zip(*(layer.parameters() for layer in layers), strict=True):
        own.lerp_(other, 0.3)
    at_speed(runtime, "auto")
    runtime.reads_late, runtime.device = True, torch.device("cpu", 0)
    return runtime


def probed(device: torch.device | str = "cpu") -> Probe:
    """Return a probe of the tiny llama's states after three layers."""
    return Probe(3, torch.linspace(-20, 20, 32, device=device), 2.0)


def predicting(runtime: Runtime) -> Heads:
    """Return heads of the tiny llama after its inner layers, without a transform."""
    return Heads({depth: torch.eye(32, device=runtime.device, dtype=runtime.dtype) for depth in (1, 2, 3)})


def draft_model(kind: str) -> DraftModel:
    """Return the draft model of the tiny llama."""
    if kind == "another model":
        return OtherModel(near_model())
    return EarlyExit(3) if kind in ("early exit", "probe") else SkippedTarget(SKIPPING)


def drawing(model: DraftModel, stop: StopRule, branching: Branching | None = None) -> ChainDrafter:
    return ChainDrafter(model, stop, branching, sampled=True)


SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3)]
CUTS: dict[str, Any] = {"top_k": 60, "min_p": 0.001, "logit_bias": ((5, 0.5),)}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.1}
PENALISED = replace(SAMPLINGS[1], **CUTS, **PENALTIES)


def letters(n_prompt: int) -> GrammarMask:
    """Return a mask that allows the letters of one half of the alphabet."""
    return Grammar.regex("[a-m]*").mask(letter_tokenizer(), VOCAB, n_prompt, [0])


OF_SEVERAL = ("spectr", "specinfer", "mcss", "mtad", "mtjd")


@pytest.mark.parametrize(
    ("sampling", "graphs"),
    [
        pytest.param(SAMPLINGS[0], True, id="greedy-graphs"),
        pytest.param(PENALISED, False, id="penalised-eager", marks=pytest.mark.families),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        *("plain", "chains", "early stop", "branched", "adaptive", "adaptive by text", "another model"),
        *("another model, adaptive", "early exit", "early exit, of one length", "block", "drawn, branched"),
        *("drawn, of one length", "drawn by an early exit", "typical", "probe", "pipeline"),
        *("jacobi", "lookahead", "prompt-lookup"),
        *OF_SEVERAL,
    ],
)
def test_a_round_waits_for_the_device_once(
    name: str, sampling: Sampling, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its tokens and their log probabilities together."""
    runtime, other = without_data(monkeypatch, graphs), OtherModel(without_data(monkeypatch, graphs))
    if not graphs:  # then on a device of its own
        other.runtime.device = torch.device("meta", 0)
    methods = {
        "plain": (PLAIN, 12),
        "chains": (CHAINS, 24),
        "early stop": (EARLY_STOP, 30),
        "branched": (BRANCHED, 24),
        "adaptive": (adaptive(lookup=False), 24),
        "adaptive by text": (adaptive(lookup=True), 30),
        "another model": (Method("spd", ChainDrafter(other, StopRule(5, 0.6))), 30),
        "another model, adaptive": (adaptive(False, other), 24),
        "early exit": (Method("adaspeed", ChainDrafter(EarlyExit(2), AdaptiveStop(5, 0.3, joint=True))), 30),
        "early exit, of one length": (Method("layerskip", ChainDrafter(EarlyExit(2), StopRule(4))), 24),
        "block": (Method("spd", drawing(other, StopRule(5, 0.6)), BlockRatio()), 20),
        "drawn, branched": (swift(SKIPPING, SwiftSettings(sampled=True)), 20),
        "drawn, of one length": (Method("spd", drawing(other, StopRule(4)), ChainRatio()), 24),
        "drawn by an early exit": (Method("adaspeed", drawing(EarlyExit(2), StopRule(5, 0.3)), ChainRatio()), 30),
        "probe": (Method("adaspeed-probe", drawing(EarlyExit(2), StopRule(5, 0.3, probe=probed(META)))), 30),
        "typical": (Method("typical", drawing(other, StopRule(4)), Typical(0.09, 0.3)), 24),
        "pipeline": (build("paradecode", Resources(runtime, learned={"heads": predicting(runtime)})), 20),
    }
    if name not in methods:
        by_another = name in ("spectr", "mtad")
        resources = Resources(runtime, SKIPPING, draft_runtime=other.runtime if by_another else None)
        methods[name] = build(name, resources), 24
    method, n_new = methods[name]
    long_enough = MinNewTokensLengthLogitsProcessor(len(PROMPT), 8, [2], "meta")
    rule = TokenRule.of(sampling, None, len(PROMPT), () if sampling.greedy else [long_enough])
    n_top = None if graphs or name == "mtjd" else 2
    work = decoding(runtime, PROMPT, method, rule, Ending(n_new), logprobs=n_top)
    rounds, drafted, waits = 0, 0, Waits()
    with waits:
        for event in side_by_side([work]):
            if isinstance(event, Round):
                assert len(waits.seen) <= 1, waits.seen
                assert len(event.logprobs) == (0 if n_top is None else len(event.token_ids))
                rounds, drafted = rounds + 1, drafted + event.n_steps
            waits.seen.clear()
    assert rounds > 3 and (drafted > 1.2 * rounds) == (name not in ("plain", "pipeline", "mtjd"))
    of_one_length = ("pipeline", "chains", "early exit, of one length", "drawn, of one length", "typical", *OF_SEVERAL)
    assert (waits.n_late > 4) == (name not in ("plain", "jacobi", "lookahead", "prompt-lookup", *of_one_length))
    if runtime.graphs is not None and name != "pipeline":
        assert runtime.graphs._passes  # type: ignore[attr-defined]


@pytest.mark.parametrize("greedy", [True, False])
def test_concurrent_requests_wait_once_per_round_together_or_separately(
    greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, waits, n_begun, n_rounds, n_waits = without_data(monkeypatch, graphs=True), Waits(), 0, 0, 0
    mixed = list(product((PLAIN, EARLY_STOP, BRANCHED), (SAMPLINGS[0], PENALISED)))
    works = [
        decoding(runtime, words(i, 6), method, TokenRule.of(sampling, None, 6), Ending(40))
        for i, (method, sampling) in enumerate([(PLAIN, SAMPLINGS[0])] * 6 if greedy else mixed)
    ]
    with waits:
        for event in side_by_side(works, at_once=len(works)):
            n_begun += isinstance(event, Prefilled)
            if isinstance(event, Round) and n_begun == len(works):
                n_rounds, n_waits = n_rounds + 1, n_waits + len(waits.seen)
            waits.seen.clear()
    assert 0 < n_waits <= (n_rounds / len(works) if greedy else n_rounds) and n_rounds > 60


@pytest.mark.parametrize("name", ["early stop", "branched", "lookahead"])
def test_data_moved_to_the_device_per_round_do_not_grow_with_the_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks cover only the rows; graphs have tables of a fixed size instead."""
    methods = {"early stop": EARLY_STOP, "branched": BRANCHED}
    runtime, most = without_data(monkeypatch, graphs=False), list[dict[int, int]]()
    for n_prompt in (8, 80):
        method = methods.get(name) or build(name, Resources(runtime))
        works = [decoding(runtime, words(3, n_prompt), method, TokenRule.of(Sampling(), None), Ending(40))]
        waits, found = Waits(), dict[int, int]()
        with waits:
            for event in side_by_side(works):
                if isinstance(event, Round):
                    found[event.n_rows] = max(found.get(event.n_rows, 0), waits.n_sent)
                waits.n_sent = 0
        most.append(found)
    short, long = most
    assert any(n_rows > 4 for n_rows in short)
    for n_rows in set(short).intersection(long):
        assert long[n_rows] <= short[n_rows] <= n_rows**2 + 20 * n_rows


@pytest.mark.parametrize("name", ["typical", "bild"])
def test_a_check_of_a_lossy_method_waits_for_the_device_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """BiLD reads each step of its draft, even that of the token which it leaves to the target."""
    runtime, is_bild = without_data(monkeypatch, graphs=False), name == "bild"
    settings = BildSettings(fallback_threshold=0.1) if is_bild else None
    method = build(name, Resources(runtime, SKIPPING), settings)
    work = decoding(runtime, PROMPT, method, TokenRule.of(Sampling(), None), Ending(40))
    lengths, waits = list[int](), Waits()
    with waits:
        for event in side_by_side([work]):
            if isinstance(event, Round):
                lengths.append(event.n_steps)
                assert len(waits.seen) <= 1 + is_bild * (event.n_steps + 1), waits.seen
            waits.seen.clear()
    assert len(lengths) > 5 and sum(lengths) > len(lengths)


@pytest.mark.parametrize("sampling", [*SAMPLINGS, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_late_reads_give_the_same_numbers(family: str, sampling: Sampling) -> None:
    runtime, rule = quick_runtime(family), TokenRule.of(sampling, None)
    expected = decode(runtime, PROMPT, PLAIN, rule, Ending(60)).token_ids
    found = []
    for runtime.reads_late in (False, True):
        done = decode(runtime, PROMPT, CHAINS, TokenRule.of(sampling, None), Ending(60))
        assert done.token_ids == expected
        found.append((done.drafted, done.accepted, done.accepted_per_position, done.target_passes))
    assert found[0] == found[1] and found[0][0] > 60


def decoded_late_or_not(name: str, sampling: Sampling, settings: Any = None) -> list[tuple[Completion, Any]]:
    """Return the tokens and log probabilities of a method with early reads of drafts, and with late reads."""
    runtime, found = quick_runtime("llama"), list[Completion]()
    resources = Resources(runtime, None, {"heads": predicting(runtime), "probe": probed()}, near_model())
    n_top, logprobs = None if name == "mtjd" else 3, list[list[TokenLogprob]]()

    def finishing(work: Work[Completion]) -> Work[None]:
        found.append((yield from work))

    for runtime.reads_late in (False, True):
        method, rule = build(name, resources, settings), TokenRule.of(sampling, None)
        events = side_by_side([finishing(decoding(runtime, PROMPT, method, rule, Ending(40), logprobs=n_top))])
        logprobs.append([each for event in events for each in event.logprobs])
        assert n_top is None or [each.token_id for each in logprobs[-1]] == [*found[-1].token_ids]
    return list(zip(found, logprobs, strict=True))


OF_ONE_LENGTH = {
    "layerskip": None,
    "paradecode": None,
    "typical": None,
    "spd": SpdSettings(stop_threshold=None),
    "spd, no blocks": SpdSettings(stop_threshold=None, block_verification=False),
}
READ_AT_ONCE = {"bild": BildSettings(fallback_threshold=0.023)}


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SAMPLINGS[0], id="greedy", marks=pytest.mark.families),
        pytest.param(SAMPLINGS[1], id="sampled", marks=pytest.mark.families),
        pytest.param(PENALISED, id="penalised"),
    ],
)
@pytest.mark.parametrize("name", [*OF_ONE_LENGTH, *OF_SEVERAL, *READ_AT_ONCE])
def test_late_reads_do_not_change_drafts_that_need_no_early_read(name: str, sampling: Sampling) -> None:
    """This holds for sampled drafts: the draws of draft and target, and the tests, are the same as with early reads."""
    settings = {**OF_ONE_LENGTH, **READ_AT_ONCE}.get(name)
    (at_once, logprobs), (late, read_late) = decoded_late_or_not(name.partition(",")[0], sampling, settings)
    assert at_once.token_ids == late.token_ids
    assert read_late == logprobs and all(len(each.top) == 3 for each in read_late)
    assert (at_once.drafted > 30) == (name != "mtjd")  # whose beams are the target's own tokens
    assert at_once.by_draft_length == late.by_draft_length


@pytest.mark.parametrize("name", ["spd", "adaspeed", "adaspeed-probe"])
def test_late_reads_with_early_stops_give_plain_tokens(name: str) -> None:
    (at_once, _), (late, _) = decoded_late_or_not(name, SAMPLINGS[0])
    assert at_once.token_ids == late.token_ids == plain_tokens(SAMPLINGS[0], 40)
    assert late.drafted / late.target_passes > at_once.drafted / at_once.target_passes


@cache
def plain_tokens(sampling: Sampling, n_new: int) -> tuple[int, ...]:
    """Return the tokens of the tiny llama's plain decoding."""
    return decode(quick_runtime("llama"), PROMPT, PLAIN, TokenRule.of(sampling, None), Ending(n_new)).token_ids


def noted(work: Work[Completion], runtime: Runtime, seen: list[tuple[int, int]]) -> Work[Completion]:
    """Run `work`, and record the first slot and the number of rows of each pass of `runtime`."""
    answer: Any = None
    while True:
        try:
            wanted = work.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if isinstance(wanted, Pass) and wanted.runtime is runtime:
            seen.append((wanted.rows.first_slot, len(wanted.rows.token_ids)))
        answer = yield wanted


@pytest.mark.parametrize("branching", [None, ((1.0, 2),)], ids=["chains", "branched"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_draft_model_with_late_reads_repeats_no_accepted_token(
    sampling: Sampling, branching: tuple[tuple[float, int], ...] | None
) -> None:
    """Its passes are the same as with early reads: it knows which of its tokens are committed."""
    runtime, other, found = quick_runtime("llama"), near_model(), list[tuple[list[tuple[int, int]], Completion]]()
    for runtime.reads_late in (False, True):
        method, seen = Method("spd", ChainDrafter(OtherModel(other), StopRule(5), branching)), list[tuple[int, int]]()
        work = decoding(runtime, PROMPT, method, TokenRule.of(sampling, None), Ending(80))
        done = alone(noted(work, other, seen))
        found.append((seen, done))
    (at_once, first), (late, second) = found
    assert first.token_ids == second.token_ids
    assert {n_rows for _, n_rows in late[1:]} == {1, 2}  # at most the draft's last token is new beside the root
    if branching is None:  # else the last step has side leaves only where it is read at once
        assert at_once == late and 0.2 < (second.acceptance_rate or 0) < 0.95


def offered(tree: DraftTree) -> list[set[int]]:
    """Return the candidates of each step of a draft, spine and side leaves."""
    leaves = range(tree.n_steps + 1, tree.n_nodes)
    return [
        {tree.token_ids[step + 1], *(tree.token_ids[leaf] for leaf in leaves if tree.parents[leaf] == step)}
        for step in range(tree.n_steps)
    ]


class Twice(ChainDrafter):
    """Drafts every round with early and with late reads and the same draws, and keeps both trees and their limits."""

    def __init__(
        self, model: DraftModel, stop: StopRule, branching: Sequence[tuple[float, int]] | None, sampled: bool = False
    ) -> None:
        super().__init__(model, stop, None if branching is None else tuple(branching), sampled)
        self.pairs: list[tuple[DraftTree, DraftTree, int]] = []

    def draft(self, room: int) -> PassGenerator[Draft]:
        runtime, draws = self.context.runtime, self.context.rule._draft_generator
        runtime.reads_late, before = False, draws.get_state()
        self.at_once = yield from super().draft(room)
        runtime.reads_late = True
        draws.set_state(before)
        self.longest = min(room, self.max_depth)
        return (yield from super().draft(room))

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        self.pairs.append((self.at_once.tree, outcome.draft.tree, self.longest))


# Thresholds that a good part of a draft's steps falls below, greedy and sampled.
UNSURE = {
    "skipped": (0.022, 0.2),
    "another model": (0.023, 0.2),
    "early exit": (0.0245, 0.2),
    "probe": (0.5, 0.5),
}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("source", "branched"),
    [*product(("skipped", "another model"), (False, True)), ("early exit", False), ("probe", False)],
)
@pytest.mark.parametrize(
    "kind", ["adapted", *(pytest.param(kind, marks=pytest.mark.families) for kind in ("fixed", "never"))]
)
def test_draft_with_late_reads_has_one_step_more(kind: str, source: str, branched: bool, sampling: Sampling) -> None:
    """Up to there it equals the draft with early reads; its last step has no side leaves."""
    runtime, threshold = quick_runtime("llama"), UNSURE[source][not sampling.greedy]
    branching = [(threshold, 3), (1.0, 2)] if branched else None
    adapted = AdaptiveStop.of(AdaptiveThreshold(threshold, 5, target_acceptance=0.3, threshold_step=0.2 * threshold))
    stop = {"fixed": StopRule(5, threshold), "adapted": adapted, "never": StopRule(5)}[kind]
    stop.probe = probed() if source == "probe" else None
    drafter = Twice(draft_model(source), stop, branching)
    done = decode(runtime, PROMPT, Method("swift", drafter), TokenRule.of(sampling, None), Ending(80))
    assert done.token_ids == plain_tokens(sampling, 80)
    assert done.drafted == sum(late.n_steps for _, late, _ in drafter.pairs)
    for at_once, late, longest in drafter.pairs:
        steps, others = offered(late), offered(at_once)
        assert len(steps) == min(len(others) + 1, longest) and late.n_nodes == 1 + sum(map(len, steps))
        assert steps[:-1] == others[: len(steps) - 1]
        assert not steps or steps[-1] == {late.token_ids[late.n_steps]}
        if len(steps) == len(others):
            assert late.token_ids[: late.n_steps + 1] == at_once.token_ids[: late.n_steps + 1]
    stopped = [len(offered(late)) < longest for _, late, longest in drafter.pairs]
    assert any(stopped) == (kind != "never") and not all(stopped)


class Both(BlockRatio):
    """Walks a draft with joint reads, and again node by node; both walks must be equal."""

    n_refused = 0

    def __init__(self, rule: SeveralRule | None) -> None:
        super().__init__(rule or "with")
        self.one_way = BlockRatio() if rule is None else SeveralRatio(rule)

    def weighed(self, draft: Draft, target: Target) -> list[list[int]]:
        return self.one_way.weighed(draft, target)

    def weigh(self, draft: Draft, target: Target, nodes: Sequence[int]) -> Iterator[Tensor]:
        return self.one_way.weigh(draft, target, nodes)

    def verify(self, draft: Draft, target: Target) -> Walk:
        rule = target.rule
        assert sorted(target._weights) == sorted(draft.offers)
        peeked, states = rule._peeked, [own.get_state() for own in (rule._generator, rule._accept_generator)]
        walked = self.one_way.verify(draft, target)
        used = rule._peeked, [own.get_state() for own in (rule._generator, rule._accept_generator)]
        target._draft, rule._peeked = draft, peeked
        target._weights.clear()
        target._probs.clear()
        target.backed.clear()
        for own, state in zip((rule._generator, rule._accept_generator), states, strict=True):
            own.set_state(state)
        assert self.one_way.verify(draft, target) == walked
        assert rule._peeked == used[0] and torch.equal(rule._accept_generator.get_state(), used[1][1])
        self.n_refused += len(walked.path) < draft.n_steps
        return walked


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("early exit", "with"),
        ("early exit", None),
        ("probe", None),
        *product(("skipped", "another model"), ("with", "without", None)),
    ],
)
def test_sampled_draft_with_late_reads_has_one_step_more_and_the_same_walk(
    source: str, rule: SeveralRule | None
) -> None:
    """Every step has two candidates, or one, so that drafts with early reads have the same number of tokens."""
    branching, verifier = [(1.0, 2)] if rule == "without" else None, Both(rule)
    stop = StopRule(5, 0.5, probe=probed()) if source == "probe" else StopRule(5, 0.2)
    drafter = Twice(draft_model(source), stop, branching, sampled=True)
    tokens = TokenRule.of(Sampling(temperature=0.15, seed=3), None)
    decode(quick_runtime("llama"), PROMPT, Method("spd", drafter, verifier), tokens, Ending(100))
    assert verifier.n_refused > 5
    stopped = 0
    for at_once, late, longest in drafter.pairs:
        steps, others = offered(late), offered(at_once)
        assert len(steps) == min(len(others) + 1, longest)
        assert steps[:-1] == others[: len(steps) - 1]
        assert not steps or steps[-1] == {late.token_ids[late.n_steps]}
        stopped += len(steps) < longest
    assert 5 < stopped < len(drafter.pairs)


class Followed(AdaptiveDrafter):
    """Drafts with late reads, then with early reads, in steps of two candidates each, and compares the drafts."""

    def __init__(self, model: SkippedTarget, costs: PassCosts) -> None:
        super().__init__(model, costs, AdaptiveSettings())
        self.n_offered = Counter[int]()

    def draft(self, room: int) -> PassGenerator[Draft]:
        runtime = self.context.runtime
        runtime.reads_late = True
        draft = yield from super().draft(room)
        runtime.reads_late = False
        chain = ChainDrafter(SkippedTarget(SKIPPING), StopRule(draft.n_steps), ((1.0, 2),)).begin(self.context)
        self.at_once = (yield from chain.draft(draft.n_steps)).tree
        self.is_late = draft.unread is not None
        return draft

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        late = outcome.draft.tree
        if self.is_late:
            assert late.token_ids[: late.n_steps + 1] == self.at_once.token_ids[: late.n_steps + 1]
            assert all(some <= both for some, both in zip(offered(late), offered(self.at_once), strict=True))
            assert len(self.chain.confidences) == late.n_steps and len(offered(late)[-1]) == 1
            self.n_offered.update(map(len, offered(late)))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_adaptive_drafts_with_late_reads_are_the_models(sampling: Sampling) -> None:
    runtime, rule = quick_runtime("llama"), TokenRule.of(sampling, None)
    costs = PassCosts(cheap_draft_costs(0.01), LayerSet(4).filled("int4"))
    drafter = Followed(SkippedTarget(SKIPPING), costs)
    done = decode(runtime, PROMPT, Method("adaptive", drafter), rule, Ending(150))
    assert done.token_ids == plain_tokens(sampling, 150)
    assert min(drafter.n_offered[1], drafter.n_offered[2]) > 15


@pytest.mark.parametrize("sampling", [*SAMPLINGS, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("with_grammar", [False, True])
def test_search_scores_account_for_late_reads(with_grammar: bool, sampling: Sampling) -> None:
    runtime, found = quick_runtime("llama"), list[bool]()
    for runtime.reads_late in (False, True):
        rule = TokenRule.of(sampling, None, len(PROMPT), [letters(len(PROMPT))] if with_grammar else ())
        context = Context(runtime, runtime.new_buffer(30), rule, [*PROMPT, 7, 9], len(PROMPT))
        runtime.prefill(context.token_ids[:-1], context.buffer)
        (score,) = alone(score_window(context, [SKIPPING], 2))
        found.append(score.reads_late)
    assert found == [False, not with_grammar]


@pytest.mark.parametrize("at_once", [1, 3])
def test_concurrent_requests_with_late_reads_give_plain_tokens(at_once: int) -> None:
    """Requests with a grammar are read at every step."""
    runtime = quick_runtime("llama")
    runtime.reads_late = True
    other, early = (
        Method(kind, ChainDrafter(draft_model(kind), StopRule(5, 0.1))) for kind in ("another model", "early exit")
    )
    methods = [
        *(lambda: CHAINS, lambda: adaptive(False), lambda: adaptive(True), lambda: EARLY_STOP),
        *(lambda: other, lambda: early),
    ]
    ids, end = [words(i, 7) * 2 for i in range(4)], Ending(40)

    def rules() -> list[TokenRule]:
        asked = zip([*SAMPLINGS, PENALISED, SAMPLINGS[1]], [(), (), (), [letters(14)]], strict=True)
        return [TokenRule.of(sampling, None, 14, constraints) for sampling, constraints in asked]

    works = [
        decoding(runtime, own, make(), rule, end) for make in methods for own, rule in zip(ids, rules(), strict=True)
    ]
    plain = [decode(runtime, own, PLAIN, rule, end).token_ids for own, rule in zip(ids, rules(), strict=True)]
    assert [done.token_ids for done in results_of(works, at_once)] == plain * len(methods)
