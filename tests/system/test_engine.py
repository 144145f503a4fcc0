"""Laws of the engine: a request gives the same tokens beside any others, and returns its memory."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import sleep

import pytest
import torch
from fakes import results_of
from families import tiny_runtime
from hypothesis import given, settings
from hypothesis import strategies as st
from native import native, parts, repeating, words
from tiny_files import save
from torch import Tensor

from swiftopt.cli.main import run
from swiftopt.core.errors import ContextOverflow
from swiftopt.core.types import Completion, Sampling
from swiftopt.decoding.context import Context, Ending, TokenRule
from swiftopt.decoding.draft import Draft, Drafter
from swiftopt.decoding.draft_trials import DraftTrials
from swiftopt.decoding.engine import Engine, Request, alone, side_by_side
from swiftopt.decoding.events import Prefilled, Round, WorkEvent
from swiftopt.decoding.loop import decode, decoding
from swiftopt.decoding.methods import METHODS, PLAIN, Method, Resources, build
from swiftopt.decoding.work import PassGenerator, Slots, Work, subscribed
from swiftopt.models.buffer import KVBuffer
from swiftopt.models.costs import RECORD_AT
from swiftopt.models.graphs import GraphPasses
from swiftopt.models.rows import Pass, Rows
from swiftopt.models.runtime import Runtime

N_NEW = 20
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9, top_p=0.9, seed=5),
    Sampling(temperature=0.8, min_p=0.02, presence_penalty=0.5, frequency_penalty=0.1, seed=11),
]
FAMILIES = [
    "llama",
    "gemma3",
    *(pytest.param(family, marks=pytest.mark.families) for family in ("gpt2", "phi3-window")),
]


@cache
def in_float64(family: str) -> Resources:
    """Return the parts of methods on torch's operations, whose bits depend on the number of rows."""
    own = parts(family)
    return Resources(tiny_runtime(family), own.layer_set, {}, tiny_runtime(family, seed=1), own.costs)


def methods_of(own: Resources, names: Sequence[str]) -> list[Method]:
    """Return one of each method, with its own state."""
    return [build(name, own) for name in names]


def request(
    own: Resources, method: Method, ids: list[int], sampling: Sampling, n_new: int = N_NEW, scratch_rows: int = 0
) -> Work[Completion]:
    rule = TokenRule.of(sampling, None, len(ids))
    return decoding(own.runtime, ids, method, rule, Ending(n_new), scratch_rows=scratch_rows)


def by_itself(
    own: Resources, method: Method, ids: list[int], sampling: Sampling, n_new: int = N_NEW
) -> tuple[int, ...]:
    return alone(request(own, method, ids, sampling, n_new)).token_ids


def finish(engine: Engine) -> None:
    """Run all requests to their end."""
    while engine.requests:
        list(engine.step())


def buffers() -> int:
    """Return the buffers that are still referenced."""
    gc.collect()
    return sum(type(each) is KVBuffer for each in gc.get_objects())


TWICE = [name for name in METHODS for _ in range(2)]
ASKED = [(words(i, 3 + 5 * (i % 3)) * 2, SAMPLINGS[i % 3]) for i in range(len(TWICE))]


@cache
def each_by_itself(family: str) -> list[tuple[int, ...]]:
    own = parts(family, with_model=True)
    return [
        by_itself(own, method, ids, sampling)
        for method, (ids, sampling) in zip(methods_of(own, TWICE), ASKED, strict=True)
    ]


@pytest.mark.parametrize(
    ("family", "at_once"),
    [
        *(("llama", 5), ("gemma3", 2), ("gpt2", 40)),
        *(pytest.param(*row, marks=pytest.mark.families) for row in (("llama", 2), ("llama", 40), ("phi3-window", 5))),
    ],
)
def test_every_method_gives_the_same_tokens_beside_every_other(family: str, at_once: int) -> None:
    """This holds bitwise in bfloat16 and for lossy methods: a row's logits do not depend on other rows."""
    own = parts(family, with_model=True)
    works = (
        request(own, method, ids, sampling)
        for method, (ids, sampling) in zip(methods_of(own, TWICE), ASKED, strict=True)
    )
    assert [done.token_ids for done in results_of(works, at_once)] == each_by_itself(family)


@pytest.mark.parametrize("name", METHODS)
def test_no_method_blocks_the_rounds_of_others(name: str) -> None:
    own, engine, rounds = parts("llama", with_model=True), Engine(by_time=False), Counter[bool]()
    other, _ = (engine.add(request(own, method, words(1, 9), SAMPLINGS[0])) for method in (build(name, own), PLAIN))
    contexts = list[Context]()  # that of the other request first
    while not other.is_done:
        for event in engine.step():
            contexts += [event.context] if isinstance(event, Prefilled) else []
            rounds[event.context is contexts[0]] += isinstance(event, Round)
    assert rounds[False] >= rounds[True] - 1 > 0


@pytest.mark.wing("papers")
@settings(max_examples=40)
@given(st.data())
def test_tokens_do_not_depend_on_arrivals_and_cancels(data: st.DataObject) -> None:
    own = data.draw(st.sampled_from([parts("llama"), parts("gemma3"), in_float64("llama")]))
    names = ["plain", "swift", "adaptive", "prompt-lookup", "lookahead", "jacobi"]
    engine, running, cancelled = Engine(), list[tuple[Request[Completion], tuple[int, ...]]](), set[int]()
    for _ in range(data.draw(st.integers(3, 25))):
        act = data.draw(st.sampled_from(["add", "step", "step", "cancel"]))
        if act == "add":
            name, seed = data.draw(st.sampled_from(names)), data.draw(st.integers(0, 5))
            n_new, sampling = data.draw(st.sampled_from([1, 7, 16])), SAMPLINGS[seed % 2]
            ids = repeating(seed)
            expected = decode(own.runtime, ids, PLAIN, TokenRule.of(sampling, None), Ending(n_new)).token_ids
            running.append((engine.add(request(own, build(name, own), ids, sampling, n_new)), expected))
        elif act == "cancel" and running:
            at = data.draw(st.integers(0, len(running) - 1))
            if not running[at][0].is_done:
                engine.cancel(running[at][0])
                cancelled.add(at)
        else:
            list(engine.step())
    finish(engine)
    for i, (one, expected) in enumerate(running):
        assert one.is_done != (i in cancelled)
        if one.is_done:
            assert one.result.token_ids == expected


def rounds_drafted(trials: DraftTrials, n: int, gain: float) -> int:
    """Run rounds that gain `gain` if they may draft; return the number of those that may."""
    n_drafted = 0
    for _ in range(n):
        drafts = trials.drafts
        n_drafted += drafts
        trials.add(drafts, 16, 16 / gain if drafts else 16.0)
    return n_drafted


def test_drafts_stop_when_they_lose_time_and_resume_when_they_pay() -> None:
    """Few rounds are lost, whatever the loss; a gain below the cost of trials does not count."""
    trials = DraftTrials(8)
    assert rounds_drafted(trials, 1000, 0.9) == 4 * 8, "at first, and after 128, 256 and 512 rounds"
    assert rounds_drafted(trials, 1000, 1.3) > 400, "texts have changed, which the next trial finds"
    assert rounds_drafted(trials, 1000, 0.9) < 100, "and changed back"
    assert rounds_drafted(DraftTrials(2), 1000, 1.3) > 970
    assert rounds_drafted(DraftTrials(4), 1000, 1.02) < 70


def test_drafts_are_not_tried_again_at_a_similar_load_after_a_loss() -> None:
    lost, pays = DraftTrials(16), DraftTrials(4)
    rounds_drafted(lost, 60, 0.9)
    rounds_drafted(pays, 60, 1.3)
    for n, n_tried in ((15, 0), (13, 0), (12, 6), (9, 8)):
        assert rounds_drafted(DraftTrials.beginning(n, [lost, pays]), 60, 0.9) == n_tried
    assert rounds_drafted(DraftTrials.beginning(5, [lost, pays]), 60, 1.3) > 50
    spared = DraftTrials.beginning(15, [lost, pays])
    assert DraftTrials.beginning(12, [spared]).paid, "what was not tried tells nothing"


@pytest.mark.parametrize(
    ("draft_s", "check_s", "by_time", "fewest", "most"),
    [(0.02, 0.0, True, 1, 26), (0.0, 0.06, True, 24, 60), (0.02, 0.0, False, 30, 60)],
)
def test_engine_stops_drafting_when_passes_take_too_long(
    monkeypatch: pytest.MonkeyPatch, draft_s: float, check_s: float, by_time: bool, fewest: int, most: int
) -> None:
    """Only beside other requests, and not in deterministic runs; the tokens are the same."""
    own, n_passes, run_passes = parts("llama"), Counter[bool](), Runtime.forward_together

    def slowly(runtime: Runtime, passes: Sequence[Pass]) -> list[Tensor]:
        n_passes[passes[0].kind == "draft"] += 1
        sleep(draft_s if passes[0].kind == "draft" else check_s)
        return run_passes(runtime, passes)

    asked = [repeating(seed) for seed in range(4)]
    expected = [by_itself(own, PLAIN, ids, Sampling(), 60) for ids in asked]
    monkeypatch.setattr(Runtime, "forward_together", slowly)
    engine, method = Engine(by_time=by_time), build("swift", own)
    running = [engine.add(request(own, method, ids, Sampling(), 60)) for ids in asked]
    finish(engine)
    assert [each.result.token_ids for each in running] == expected
    assert fewest <= n_passes[True] <= most
    if by_time:
        n_passes.clear()
        engine.add(request(own, method, asked[0], Sampling(), 60))
        finish(engine)
        assert n_passes[True] > 20, "one by itself drafts as its method says"


@pytest.mark.wing("papers")
def test_requests_that_may_stop_drafting_run_beside_one_that_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds in which the others do not draft count as plain, although this request drafts in all."""
    own, run_passes = parts("llama"), Runtime.forward_together

    def slowly(runtime: Runtime, passes: Sequence[Pass]) -> list[Tensor]:
        sleep(0 if passes[0].kind == "draft" else 0.003)
        return run_passes(runtime, passes)

    monkeypatch.setattr(Runtime, "forward_together", slowly)
    engine, names = Engine(), ("self-sd", "swift", "swift")
    running = [engine.add(request(own, build(n, own), repeating(i), SAMPLINGS[0], 120)) for i, n in enumerate(names)]
    finish(engine)
    stands, *may_stop = (each.result.drafted for each in running)
    assert stands > 60 and min(may_stop) > 14, "10 where no round beside it counted as a plain one"


class _Failing(Drafter):
    """Drafts twice, then raises or requests a pass that cannot run."""

    def __init__(self, bad_pass: bool) -> None:
        self.bad_pass = bad_pass

    def start(self) -> None:
        self.plain = PLAIN.drafter.begin(self.context)

    def draft(self, room: int) -> PassGenerator[Draft]:
        if len(self.context.generated) >= 3:
            if not self.bad_pass:
                raise RuntimeError("no more ideas")
            runtime, buffer = self.context.runtime, self.context.buffer
            yield Pass(runtime, Rows([1], buffer.capacity), buffer, kind="draft")
        return (yield from self.plain.draft(room))

    def max_rows(self, room: int) -> int:
        return 1


@pytest.mark.parametrize("bad_pass", [False, True])
def test_failed_request_affects_no_other(bad_pass: bool) -> None:
    own, engine = parts("llama"), Engine()
    ids, expected = repeating(1), by_itself(parts("llama"), PLAIN, repeating(1), SAMPLINGS[0])
    good = [engine.add(request(own, PLAIN, ids, SAMPLINGS[0])) for _ in range(3)]
    bad = engine.add(request(own, Method("failing", _Failing(bad_pass)), ids, SAMPLINGS[0]))
    finish(engine)
    assert [one.result.token_ids for one in good] == [expected] * 3
    with pytest.raises(ValueError if bad_pass else RuntimeError, match="do not fit" if bad_pass else "no more ideas"):
        _ = bad.result


def test_memory_of_a_failed_pass_is_free_when_its_requests_run_one_by_one() -> None:
    own, held = parts("llama"), list[weakref.ref[Tensor]]()

    class Full(Runtime):
        def forward_together(self, passes: Sequence[Pass]) -> list[Tensor]:
            assert not any(ref() is not None for ref in held)
            states = torch.ones(len(passes))
            held.append(weakref.ref(states))
            if len(passes) > 1 or passes[0].rows.first_slot == 2:  # the shortest prompt's rounds do not fit at all
                raise torch.OutOfMemoryError(f"CUDA out of memory: {len(states)} passes")
            return super().forward_together(passes)

    runtime, engine = own.runtime, Engine()
    before, runtime.__class__ = runtime.__class__, Full
    try:
        running = [engine.add(request(own, PLAIN, words(1, n), SAMPLINGS[0], 6)) for n in (2, 5, 7)]
        finish(engine)
    finally:
        runtime.__class__ = before
    with pytest.raises(torch.OutOfMemoryError, match="1 passes"):
        _ = running[0].result
    assert [len(each.result.token_ids) for each in running[1:]] == [6, 6]


def test_kept_prefixes_are_evicted_before_a_request_fails_for_memory() -> None:
    own, engine = parts("llama"), Engine(PLENTY)

    class Full(Runtime):
        def new_buffer(self, capacity: int, n_rows: int | None = None, lag: int = 0) -> KVBuffer:
            if engine.kept_bytes:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().new_buffer(capacity, n_rows, lag)

    engine.add(request(own, PLAIN, words(1, 20), SAMPLINGS[0], 6))
    finish(engine)
    assert engine.kept_bytes
    before, own.runtime.__class__ = own.runtime.__class__, Full
    try:
        late = engine.add(request(own, PLAIN, words(2, 20), SAMPLINGS[0], 6))
        finish(engine)
    finally:
        own.runtime.__class__ = before
    assert late.result.token_ids == by_itself(own, PLAIN, words(2, 20), SAMPLINGS[0], 6)


def test_kept_prefixes_are_evicted_before_a_pass_fails_for_memory() -> None:
    own, engine, n_passes = parts("llama"), Engine(PLENTY), list[int]()

    class Full(Runtime):
        def forward_together(self, passes: Sequence[Pass]) -> list[Tensor]:
            n_passes.append(len(passes))
            if engine.kept_bytes:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward_together(passes)

    engine.add(request(own, PLAIN, words(1, 20), SAMPLINGS[0], 6))
    finish(engine)
    before, own.runtime.__class__ = own.runtime.__class__, Full
    try:
        late = [engine.add(request(own, PLAIN, words(n, 20), SAMPLINGS[0], 6)) for n in (2, 3)]
        finish(engine)
    finally:
        own.runtime.__class__ = before
    assert [one.result.token_ids for one in late] == [
        by_itself(own, PLAIN, words(n, 20), SAMPLINGS[0], 6) for n in (2, 3)
    ]
    assert n_passes == [2] * 7, "together again, once"


@pytest.mark.slow
def test_first_passes_of_cuda_graphs_do_not_count_as_round_time() -> None:
    runtime = tiny_runtime("llama", torch.float32)
    runtime.graphs = GraphPasses(runtime, lambda static: static.run)
    engine, counts = Engine(), list[int]()
    engine.add(decoding(runtime, words(1, 4), PLAIN, TokenRule.of(Sampling(), None), Ending(12)))
    while engine.requests:
        list(engine.step())
        counts.append(engine.load.n_beside)
    n_prompt = counts[0]
    rounds = [n - n_prompt for n in counts[1:]]
    assert n_prompt and rounds[:RECORD_AT] == [1, 2, 3], "two like others, and a capture"
    assert len(rounds) > 8 and set(rounds[RECORD_AT:]) == {RECORD_AT}


@pytest.mark.wing("papers")
def test_draft_passes_share_a_pass_and_the_target_waits_for_them() -> None:
    """Two requests draft and one does not; the target's weights are read once for all three."""
    own = parts("llama")
    seen: list[list[bool]] = []

    class Watched(Runtime):
        def forward_together(self, passes: Sequence[Pass]) -> list[Tensor]:
            seen.append([each.kind == "draft" for each in passes])
            return super().forward_together(passes)

    runtime = own.runtime
    before, runtime.__class__ = runtime.__class__, Watched
    try:
        works = [request(own, build(name, own), repeating(2), SAMPLINGS[0]) for name in ("self-sd", "self-sd", "plain")]
        results = results_of(works, 3)
    finally:
        runtime.__class__ = before
    assert len({done.token_ids for done in results}) == 1
    assert seen[0] == [False] * 3  # the prompts
    assert [True, True] in seen and [False] * 3 in seen[1:]
    assert all(len(set(drafts)) == 1 for drafts in seen)


def test_drafts_become_shorter_under_load_and_longer_after_it() -> None:
    """If rows of the target are expensive, adaptive drafting stops under load and resumes after it."""
    own, ids = parts("llama"), repeating(2)
    assert own.costs is not None
    whole = own.costs.pass_s[1]
    dear = replace(own.costs, pass_s={1: whole, 4: 1.1 * whole, 8: 4 * whole, 64: 32 * whole})

    def drafted(at_once: int) -> list[int]:
        works = [
            request(own, build("adaptive", replace(own, costs=dear)), ids, SAMPLINGS[0], n_new=60 if i == 0 else 12)
            for i in range(6)
        ]
        done = results_of(works, at_once)
        assert [each.token_ids[:12] for each in done] == [done[0].token_ids[:12]] * 6
        return [each.drafted for each in done]

    single, together = drafted(1), drafted(6)
    assert sum(together[1:]) < 0.5 * sum(single[1:])
    assert 0 < together[0] <= single[0]  # most of its tokens come when the others are done


def test_buffers_of_requests_are_given_back() -> None:
    """Finished, cancelled and failed requests leave no buffer referenced."""
    own, engine = parts("gemma3"), Engine()
    names = [name for name in METHODS if not METHODS[name].lossy]
    alone(request(own, PLAIN, words(1, 5), SAMPLINGS[0]))
    before = buffers()
    for i in range(150):
        one = engine.add(request(own, build(names[i % len(names)], own), words(i, 4), SAMPLINGS[i % 3], 1 + i % 9))
        for _ in range(i % 4):
            list(engine.step())
        if i % 3 == 0 and not one.is_done:
            engine.cancel(one)
        if i % 10 == 0:
            failing = Method("failing", _Failing(bad_pass=bool(i % 20)))
            engine.add(request(own, failing, words(i, 4), SAMPLINGS[0]))
        del one
    finish(engine)
    del engine, failing
    assert buffers() == before


def test_events_are_immediate_and_abandoned_streams_end_their_requests() -> None:
    own, begun = parts("llama"), list[int]()

    def works() -> Iterator[Work[Completion]]:
        for i in range(6):
            begun.append(i)
            yield request(own, PLAIN, words(i, 4), SAMPLINGS[0], n_new=20 if i == 0 else 3)

    before = buffers()
    events = side_by_side(works(), 2)
    ended = [event for _, event in zip(range(26), events, strict=False) if event.context.finish is not None]
    assert [len(event.context.generated) for event in ended] == [3, 3, 3, 3]  # others end beside the long one
    assert begun == [0, 1, 2, 3, 4, 5]
    del ended
    events.close()  # type: ignore[attr-defined]
    del events
    assert buffers() == before


def test_request_waits_until_its_event_is_consumed() -> None:
    """Its state can thus be saved between any two events, whatever runs beside it."""
    own, seen = parts("llama"), dict[int, int]()
    works = [request(own, PLAIN, words(i, 4), SAMPLINGS[0], n_new=5 + i) for i in range(3)]
    for event in side_by_side(works, 3):
        before = seen.get(id(event.context), 0)
        assert len(event.context.generated) == before + len(event.token_ids)
        seen[id(event.context)] = len(event.context.generated)
    assert sorted(seen.values()) == [5, 6, 7]


def test_failed_request_stops_new_ones_and_lets_running_ones_end() -> None:
    own, begun = parts("llama"), list[int]()

    def works() -> Iterator[Work[Completion]]:
        for i in range(9):
            method = Method("failing", _Failing(bad_pass=False)) if i == 1 else PLAIN
            yield noting(i, request(own, method, words(3, 4), SAMPLINGS[0], n_new=12))

    def noting(number: int, work: Work[Completion]) -> Work[Completion]:
        begun.append(number)
        return (yield from work)

    lengths: dict[int, int] = {}
    with pytest.raises(RuntimeError, match="no more ideas"):
        for event in side_by_side(works(), 3, by_time=False):
            lengths[id(event.context)] = len(event.context.generated)
    assert begun == [0, 1, 2] and sorted(lengths.values()) == [3, 12, 12]


# buffers


class Counting(Runtime):
    """Counts the rows of passes."""

    n_rows = 0

    def forward_together(self, passes: Sequence[Pass]) -> list[Tensor]:
        Counting.n_rows += sum(len(each.rows.token_ids) for each in passes)
        return super().forward_together(passes)


@contextmanager
def counting(runtime: Runtime) -> Iterator[None]:
    before, runtime.__class__, Counting.n_rows = runtime.__class__, Counting, 0
    try:
        yield
    finally:
        runtime.__class__ = before


PLENTY = 1 << 30


@pytest.mark.parametrize("family", FAMILIES)
def test_request_reuses_a_prefix_of_another(family: str) -> None:
    """A prompt that begins like an earlier text with its completion gives the same bits as when read in full."""
    own = parts(family, with_model=True)
    for number, name in enumerate(METHODS):
        if METHODS[name].lossy:
            continue
        ids, sampling = repeating(number), SAMPLINGS[number % 3]
        engine = Engine(PLENTY)
        first = engine.add(request(own, build(name, own), ids, sampling))
        finish(engine)
        longer = [*ids, *first.result.token_ids, *words(number, 9)]
        expected = by_itself(own, PLAIN, longer, SAMPLINGS[0])
        with counting(own.runtime):
            again = engine.add(request(own, PLAIN, longer, SAMPLINGS[0]))
            finish(engine)
        assert again.result.token_ids == expected, name
        n_kept = len(ids) + len(first.result.token_ids) - 1
        assert Counting.n_rows == len(longer) - n_kept + len(expected) - 1, name


def test_prefix_is_shared_by_requests_of_the_same_salt() -> None:
    own, document = parts("llama"), words(3, 60)
    engine = Engine(PLENTY)

    def ask(question: list[int], salt: str = "") -> Request[Completion]:
        rule, ending = TokenRule.of(SAMPLINGS[0], None), Ending(6)
        return engine.add(decoding(own.runtime, [*document, *question], PLAIN, rule, ending, salt=salt))

    ask([5, 6])
    finish(engine)
    for salt, n_read in (("", 2 + 3), ("other", 60 + 2 + 3)):
        with counting(own.runtime):
            both = [ask([7, 8], salt), ask([9, 10, 11], salt)]
            finish(engine)
        expected = [by_itself(own, PLAIN, [*document, *more], SAMPLINGS[0], 6) for more in ([7, 8], [9, 10, 11])]
        assert [one.result.token_ids for one in both] == expected
        assert Counting.n_rows == n_read + 2 * 5


@pytest.mark.parametrize("family", FAMILIES)
def test_request_reuses_a_prefix_of_a_running_one(family: str) -> None:
    """The running one may draft with any method, because rounds write only after its prompt."""
    own, salts = parts(family, with_model=True), ("", "other")
    for number, name in enumerate(METHODS):
        ids, sampling = repeating(number), SAMPLINGS[number % 3]
        engine, longer = Engine(PLENTY), [*ids, *words(number, 9)]
        first = engine.add(request(own, build(name, own), ids, sampling, 40))
        for _ in range(2 + number % 3):
            list(engine.step())
        assert not first.is_done or name == "paradecode", "which runs no pass that others could share"
        rule, ending = TokenRule.of(SAMPLINGS[0], None), Ending(6)
        late = [engine.add(decoding(own.runtime, longer, PLAIN, rule, ending, salt=salt)) for salt in salts]
        finish(engine)
        assert [one.result.token_ids for one in late] == [by_itself(own, PLAIN, longer, SAMPLINGS[0], 6)] * 2, name
        assert [one.result.n_cached for one in late] == [len(ids), 0], name


def test_concurrent_equal_prompts_are_read_once() -> None:
    own, ids = parts("llama"), words(1, 60)
    engine, samplings = Engine(PLENTY), [replace(SAMPLINGS[1], seed=seed) for seed in range(4)]
    with counting(own.runtime):
        running = [engine.add(request(own, PLAIN, ids, sampling, 6)) for sampling in samplings]
        finish(engine)
    assert Counting.n_rows == 60 + 3 + 4 * 5
    assert [one.result.n_cached for one in running] == [0, 59, 59, 59]
    assert [one.result.token_ids for one in running] == [by_itself(own, PLAIN, ids, each, 6) for each in samplings]


@pytest.mark.parametrize("end", ["", "cancel", "fail"])
def test_common_prefix_is_read_once_and_again_if_its_reader_ends(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """A request that shares little of it does not wait."""
    for name in ("PREFILL_ROWS", "PREFILL_ROWS_BESIDE"):
        monkeypatch.setattr(f"swiftopt.models.runtime.{name}", 16)
    own, head, engine = parts("llama"), words(0, 64), Engine(PLENTY)
    asked = [[*head, 10 + seed, *words(seed, seed)] for seed in range(8)]
    little = [*head[: 8 if end else 36], *words(9, 120)]
    with counting(own.runtime):
        first, *others = running = [engine.add(request(own, PLAIN, ids, SAMPLINGS[0], 4)) for ids in [*asked, little]]
        list(engine.step())
        assert [one for one in running if one.held] == [first, others[-1]]
        list(engine.step())
        if end == "cancel":
            engine.cancel(first)
        elif end == "fail":
            list(first.throw(RuntimeError("no more")))
        finish(engine)
    read = (32 + 64 - 8 + sum(range(2, 9)) if end else 64 + sum(range(1, 9))) + len(little)
    assert Counting.n_rows == read + (8 if end else 9) * 3
    for one, ids in zip(others, [*asked[1:], little], strict=True):
        assert one.result.token_ids == by_itself(own, PLAIN, ids, SAMPLINGS[0], 4)


def test_least_recently_used_of_similar_prefixes_is_evicted_first() -> None:
    own, header = parts("llama"), words(0, 4)
    texts = [[*header, 10 + seed, *words(seed, 19)] for seed in range(7)]
    engine = Engine(5 * (len(texts[0]) + 3) * own.runtime.slot_bytes)  # two new tokens each, and a row behind them

    def n_read(number: int) -> int:
        with counting(own.runtime):
            engine.add(request(own, PLAIN, texts[number], SAMPLINGS[0], 2))
            finish(engine)
        return Counting.n_rows - 1

    assert [n_read(number) for number in range(5)] == [24, 20, 20, 20, 20]
    assert n_read(0) == 1, "it is the latest used then"
    assert [n_read(number) for number in (5, 6)] == [20, 20], "in place of the oldest"
    assert [n_read(number) for number in (4, 0, 1)] == [1, 1, 20]


@pytest.mark.parametrize("first_new", [2, 256])
def test_state_of_a_prompt_includes_a_reused_prefix(monkeypatch: pytest.MonkeyPatch, first_new: int) -> None:
    """A repeated or continued prompt has the same state as if it were read in full."""
    monkeypatch.setattr("swiftopt.decoding.loop.FIRST_NEW_SLOTS", first_new)
    own, prompt, states = parts("llama"), words(1, 40), list[Tensor]()
    engine = Engine(PLENTY)
    for ids, host in ((prompt, engine), (prompt, engine), ([*prompt, 7], engine), ([*prompt, 7], Engine())):
        rule = TokenRule.of(SAMPLINGS[0], None, len(ids))
        host.add(decoding(own.runtime, ids, PLAIN, rule, Ending(8), with_state=True))
        while host.requests:
            states += [event.state for event in host.step() if isinstance(event, Prefilled)]
    whole, again, longer, anew = states
    assert torch.cosine_similarity(whole, again, dim=0) > 0.98
    torch.testing.assert_close(longer, (40 * again + (41 * anew - 40 * whole)) / 41, atol=1e-3, rtol=1e-3)


def test_state_of_a_prompt_includes_a_prefix_of_a_running_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFILL_ROWS", "PREFILL_ROWS_BESIDE"):
        monkeypatch.setattr(f"swiftopt.models.runtime.{name}", 8)
    own, head, states = parts("llama"), words(1, 40), dict[int, list[Tensor]]()
    long, short = [*head, *words(2, 60)], [*head, 7, 8, 9]
    for asked in ([long, short], [short]):
        engine = Engine(PLENTY)
        for ids in asked:
            rule = TokenRule.of(SAMPLINGS[0], None, len(ids))
            engine.add(decoding(own.runtime, ids, PLAIN, rule, Ending(8), with_state=True))
        while engine.requests:
            for event in engine.step():
                if isinstance(event, Prefilled):
                    states.setdefault(event.context.n_prompt, []).append(event.state)
                    assert event.context.tally.n_cached == (40 if len(asked) == 2 and len(states) == 1 else 0)
    torch.testing.assert_close(*states[len(short)], atol=1e-6, rtol=1e-6)


@settings(max_examples=40)
@given(st.data())
def test_memory_is_never_exceeded_and_requests_are_served_in_order(data: st.DataObject) -> None:
    own = data.draw(st.sampled_from([parts("llama"), in_float64("llama")]))
    memory = data.draw(st.integers(40, 200)) * own.runtime.slot_bytes
    engine, running = Engine(memory), list[tuple[Request[Completion], tuple[int, ...]]]()
    began: list[int] = []
    first_new, n_rows = data.draw(st.sampled_from((1, 3, 256))), data.draw(st.sampled_from((3, 512)))
    least_shared, cancels = data.draw(st.sampled_from((1, 32))), data.draw(st.lists(st.integers(0, 11), max_size=4))
    for number in range(data.draw(st.integers(2, 12))):
        ids = words(data.draw(st.integers(0, 2)), data.draw(st.integers(1, 25)))
        n_new, scratch = data.draw(st.integers(1, 10)), data.draw(st.sampled_from((0, 0, 3, 1000)))

        def noting(
            number: int = number, ids: list[int] = ids, n_new: int = n_new, scratch: int = scratch
        ) -> Work[Completion]:
            def note(event: WorkEvent) -> None:
                if isinstance(event, Prefilled):
                    began.append(number)

            return subscribed(request(own, PLAIN, ids, SAMPLINGS[0], n_new, scratch), note)

        running.append((engine.add(noting()), by_itself(own, PLAIN, ids, SAMPLINGS[0], n_new)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swiftopt.decoding.loop.FIRST_NEW_SLOTS", first_new)
        patch.setattr("swiftopt.decoding.engine.MIN_SHARED_TOKENS", least_shared)
        for name in ("PREFILL_ROWS", "PREFILL_ROWS_BESIDE"):
            patch.setattr(f"swiftopt.models.runtime.{name}", n_rows)
        while engine.requests:
            list(engine.step())
            assert engine.n_bytes + engine.kept_bytes <= memory
            if cancels and (number := cancels.pop()) < len(running):
                engine.cancel(running[number][0])
    done = [(one.result.token_ids, expected) for one, expected in running if one.is_done]
    assert len(done) >= len(running) - 4 and all(tokens == expected for tokens, expected in done)
    assert engine.n_bytes == 0


def test_search_slots_take_a_share_of_memory_that_no_text_needs() -> None:
    own = parts("llama")
    engine, held = Engine(160 * own.runtime.slot_bytes), list[tuple[int, int]]()
    for n_prompt in (20, 30, 19, 50):  # 29, 39, 28 and 59 slots with eight new tokens each
        engine.add(request(own, PLAIN, words(n_prompt, n_prompt), SAMPLINGS[0], 8, scratch_rows=15))
    list(engine.step())
    for each in engine.requests:
        held += [(slots.capacity, buffer.capacity - slots.capacity) for slots, buffer in each.held.items()]
    assert held == [(29, 14), (39, 6), (28, 0)]
    running = list(engine.requests)
    finish(engine)
    assert [len(each.result.token_ids) for each in running] == [8] * 4


def test_text_beyond_memory_is_refused_and_the_others_continue() -> None:
    own = parts("llama")
    engine = Engine(60 * own.runtime.slot_bytes)
    fits, too_long, behind = (engine.add(request(own, PLAIN, words(n, n), SAMPLINGS[0], 8)) for n in (20, 70, 30))
    finish(engine)
    assert len(fits.result.token_ids) == len(behind.result.token_ids) == 8
    with pytest.raises(ContextOverflow, match=r"79 tokens need .* MB of keys and values, which may take"):
        _ = too_long.result


@pytest.mark.parametrize("family", FAMILIES)
def test_buffer_that_grows_with_its_text_changes_no_token(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    own = parts(family, with_model=True)
    asked = [(name, repeating(number), SAMPLINGS[number % 3]) for number, name in enumerate(METHODS)]
    expected = [by_itself(own, build(name, own), ids, sampling, 40) for name, ids, sampling in asked]
    monkeypatch.setattr("swiftopt.decoding.loop.FIRST_NEW_SLOTS", 4)
    engine = Engine(PLENTY)
    running = [engine.add(request(own, build(name, own), ids, sampling, 40)) for name, ids, sampling in asked]
    list(engine.step())
    n_slots = sum(buffer.capacity for one in running for buffer in one.held.values())
    finish(engine)
    for (name, *_), one, tokens in zip(asked, running, expected, strict=True):
        assert one.result.token_ids == tokens, name
    assert n_slots < sum(next(request(own, build(n, own), ids, how, 40)).capacity for n, ids, how in asked) - 500


def test_requests_with_long_limits_run_together_until_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose buffer cannot grow waits and keeps its tokens."""
    monkeypatch.setattr("swiftopt.decoding.loop.FIRST_NEW_SLOTS", 8)
    own, n_beside = parts("llama"), 0
    engine = Engine(200 * own.runtime.slot_bytes)  # one needs 151
    running = [engine.add(request(own, PLAIN, words(seed, 10), SAMPLINGS[0], 140)) for seed in range(6)]
    while engine.requests:
        list(engine.step())
        n_beside = max(n_beside, sum(bool(one.held) for one in running))
        assert engine.n_bytes <= engine.memory
    assert n_beside == 6
    expected = [by_itself(own, PLAIN, words(seed, 10), SAMPLINGS[0], 140) for seed in range(6)]
    assert [one.result.token_ids for one in running] == expected


def test_cancelled_request_frees_its_memory_for_waiting_ones() -> None:
    own = parts("llama")
    engine = Engine(60 * own.runtime.slot_bytes)
    holds, waits = (engine.add(request(own, PLAIN, words(n, 20), SAMPLINGS[0], 20)) for n in (1, 2))
    for _ in range(3):
        list(engine.step())
    assert isinstance(waits.pending, Slots)
    engine.cancel(holds)
    finish(engine)
    assert waits.result.token_ids == by_itself(own, PLAIN, words(2, 20), SAMPLINGS[0], 20)


def test_a_thousand_requests_leave_the_memory_as_it_was() -> None:
    own, rng = parts("llama"), random.Random(0)
    engine, before = Engine(400 * own.runtime.slot_bytes), buffers()
    for number in range(1000):
        one = engine.add(request(own, PLAIN, words(rng.randrange(9), rng.randrange(1, 20)), SAMPLINGS[0], 2))
        for _ in range(rng.randrange(3)):
            list(engine.step())
        if number % 5 == 0 and not one.is_done:
            engine.cancel(one)
    finish(engine)
    del one
    assert engine.n_bytes == 0 and engine.kept_bytes <= engine.memory
    del engine
    assert buffers() == before


def test_prompt_longer_than_a_pass_is_read_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces join the passes of the requests that decode."""
    for name in ("PREFILL_ROWS", "PREFILL_ROWS_BESIDE"):
        monkeypatch.setattr(f"swiftopt.models.runtime.{name}", 8)
    own = parts("llama")
    asked = [(words(5, 60), 4), (words(6, 5), 12), (words(7, 33), 3)]
    works = [request(own, PLAIN, ids, SAMPLINGS[0], n_new) for ids, n_new in asked]
    found = [done.token_ids for done in results_of(works, 3)]
    monkeypatch.undo()
    assert found == [by_itself(own, PLAIN, ids, SAMPLINGS[0], n_new) for ids, n_new in asked]
    assert native("llama") is own.runtime


def test_draft_model_reads_a_long_prompt_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests that decode get a token for each piece."""
    monkeypatch.setattr("swiftopt.models.runtime.PREFILL_ROWS_BESIDE", 8)
    own, engine, between = parts("llama", with_model=True), Engine(), [0]
    long, short = words(2, 100), words(1, 4)
    running = engine.add(request(own, PLAIN, short, SAMPLINGS[0], 60))
    list(engine.step())
    late = engine.add(request(own, build("spd", own), long, SAMPLINGS[0], 8))
    while not late.is_done:
        n_tokens = sum(len(event.token_ids) for event in engine.step() if event.context.n_prompt == len(short))
        between = [*between[:-1], between[-1] + 1] if not n_tokens else [*between, 0]
    finish(engine)
    assert late.result.token_ids == by_itself(own, PLAIN, long, SAMPLINGS[0], 8)
    assert running.result.token_ids == by_itself(own, PLAIN, short, SAMPLINGS[0], 60)
    assert max(between) <= 5, "no more than a draft has steps"


def test_stream_gives_the_same_completions_for_any_concurrency(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, stream = str(save(tmp_path / "model")), tmp_path / "stream.jsonl"
    texts = [f"w{i + 1} w{i + 2} w{i + 1}" for i in range(9)]
    prompts = [{"prompt": text, "id": f"p{i}", "max_new_tokens": 4 + 3 * (i % 4)} for i, text in enumerate(texts)]
    stream.write_text("".join(json.dumps(each) + "\n" for each in prompts))

    def lines(*options: str) -> list[tuple[str, str, str]]:
        args = ["generate", "--model", model, "--stream", str(stream), "--method", "prompt-lookup", "--json", *options]
        assert run(args) == 0
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [(each["id"], each["text"], each["finish_reason"]) for each in told]

    found = lines("--concurrency", "4")
    assert sorted(found) == lines()  # as they are finished
