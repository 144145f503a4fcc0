"""A served model learns from its requests: their output does not change, and drafts are used while they pay."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tiny_files import save
from torch import Tensor

import swiftopt
from swiftopt.bench.serving import new_shifts, shift_line
from swiftopt.core.costs import CostProfile, FormatCosts
from swiftopt.core.events import Way
from swiftopt.core.layer_sets import LayerSet, searchable
from swiftopt.core.records import FoundPlan, Plan
from swiftopt.core.settings import TuningSettings
from swiftopt.core.streams import read_stream
from swiftopt.core.types import Prompt, Sampling, Verdict
from swiftopt.decoding.corpus import Corpora
from swiftopt.decoding.engine import side_by_side
from swiftopt.decoding.events import Generated
from swiftopt.decoding.session import Session
from swiftopt.decoding.work import Slots, Work
from swiftopt.models.rows import Pass
from swiftopt.models.runtime import Runtime
from swiftopt.optimizer.challengers import Incumbent
from swiftopt.optimizer.evaluation import SEARCH_TIME_SHARE
from swiftopt.optimizer.search import Search
from swiftopt.optimizer.verdict import Timed
from swiftopt.store import Store
from swiftopt.tasks.generate import decode_as_planned
from swiftopt.tasks.served_task import (
    COMPARED_ROUNDS,
    INITIAL_OVERRUN,
    MAX_PAIRS,
    MIN_PAIRS,
    DraftedRounds,
    RoundTimings,
    TaskTraffic,
)
from swiftopt.tasks.traffic import LEASE_S, REFRESH_S, Traffic

TEXTS = [f"w{i + 1} w{i + 2} w{i + 1} w{i + 2}" for i in range(10)]
EXAMPLES = Path(__file__).parents[2] / "examples" / "stream.jsonl"
SETTINGS = TuningSettings(draft_format="int4", context_window=8, max_steps=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> swiftopt.Model:
    folder = save(tmp_path_factory.mktemp("model"))
    return swiftopt.Model("tiny", swiftopt.load(str(folder), dtype="float32").runtime, None)


@pytest.fixture
def store(sqlite_url: str, model: swiftopt.Model) -> Iterator[Store]:
    with Store.open(sqlite_url) as opened:
        yield opened


def answers(
    traffic: Traffic,
    runtime: Runtime,
    task: str | None,
    at_once: int = 1,
    n_new: int = 40,
    learn: bool = True,
    by_time: bool = True,
) -> list[Generated]:
    session = Session(runtime, Sampling(), n_new, ignore_eos=True)
    works = (traffic.work(session, Prompt(str(i), "x", text=text), task, learn) for i, text in enumerate(TEXTS))
    done = []
    for event in side_by_side(works, at_once, by_time=by_time):
        if isinstance(event, Generated):
            traffic.count(event)
            done.append(event)
    return done


def await_answers(traffic: Traffic) -> None:
    """Wait until the database has answered all queries."""
    while traffic._queries._pending:
        time.sleep(0.01)
        traffic._queries.take()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the test's database for writing."""
    (path,) = folder.glob("*.db")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


def rounds(task: TaskTraffic, compared_s: float, in_use_s: float) -> RoundTimings:
    """Return the requested rounds of the way not in use, and ten others, of a token and these seconds each."""
    n = task.compared_rounds_at(0)
    compared, in_use = Timed(n, n * compared_s), Timed(10, 10 * in_use_s)
    both = (compared, in_use) if task.drafts else (in_use, compared)
    return timings(task, *both, compares=n > 0)


def timings(task: TaskTraffic, plain: Timed, drafted: Timed, compares: bool = True) -> RoundTimings:
    """Return the rounds of a request that ran alone; a drafted one has four draft steps, three of them accepted."""
    rounds = DraftedRounds(drafted.tokens, drafted.tokens, drafted.seconds, 4 * drafted.tokens, 3 * drafted.tokens)
    return RoundTimings(task.drafts, compares, task.search.layer_set, [plain, drafted], plain.seconds, rounds)


def learnt(task: TaskTraffic, compared_s: float, in_use_s: float) -> bool:
    """Let the task learn from a request; return whether there is something new to store."""
    own = rounds(task, compared_s, in_use_s)
    task.count_rounds(own)
    return task.add(own)


def task_of(model: swiftopt.Model) -> TaskTraffic:
    whole = model.runtime.whole
    return TaskTraffic("code", Search("code", whole, searchable(whole.n_layers), SETTINGS, 0.4, None), looked_up=True)


def test_plan_learnt_under_a_served_name_is_found_by_the_models_names(model: swiftopt.Model, store: Store) -> None:
    traffic = Traffic("assistant", model.runtime, store, SETTINGS)
    answers(traffic, model.runtime, "code")
    traffic._store_version(traffic.task("code"))
    await_answers(traffic)
    (known,) = store.models()
    assert set(known.names) == {"assistant", *model.runtime.info.names} and known.n_parameters
    # A verdict on a busy machine may have stored a second version by now.
    (version,) = {store.lookup(name, "code").version for name in known.names}
    assert version in (1, 2)


@pytest.mark.parametrize("at_once", [1, 3])
def test_learning_changes_no_token(
    model: swiftopt.Model, store: Store, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {text: model.generate(text, max_new_tokens=40).token_ids for text in TEXTS}
    traffic = Traffic("tiny", model.runtime, store, SETTINGS)
    monkeypatch.setattr("swiftopt.tasks.served_task.SEARCH_TIME_SHARE", 1.0)
    for task in ("code", None):
        done = answers(traffic, model.runtime, task, at_once)
        assert {each.prompt.text: each.completion.token_ids[:40] for each in done} == expected
    found = {own.task: own for own in traffic.status().tasks}
    assert found["code"].requests >= len(TEXTS) and found["code"].pairs > 0
    assert sum(own.requests for own in found.values()) == 2 * len(TEXTS)
    assert any(own.search.trials for own in found.values())
    traffic.close()


def test_requests_are_searched_even_if_memory_holds_only_their_texts(
    model: swiftopt.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic, session = Traffic("tiny", model.runtime, None, SETTINGS), Session(model.runtime, Sampling(), 150)
    monkeypatch.setattr("swiftopt.tasks.served_task.SEARCH_TIME_SHARE", 1.0)

    def work(text: str, learn: bool = True) -> Work[None]:
        return traffic.work(session, Prompt("p", "x", text=text), None, learn)

    unread, unsearched = next(work(TEXTS[0])), next(work(TEXTS[0], learn=False))
    assert isinstance(unread, Slots) and isinstance(unsearched, Slots)
    assert unread.capacity == unsearched.capacity and unread.spare > 0 == unsearched.spare
    events = list(side_by_side(map(work, TEXTS[:4]), memory=unread.n_bytes))
    found = [event.completion.token_ids for event in events if isinstance(event, Generated)]
    assert found == [model.generate(text, max_new_tokens=150).token_ids for text in TEXTS[:4]]
    assert traffic.status().tasks[0].search.trials > 0
    traffic.close()


def test_drafts_are_used_until_they_lose_and_again_when_they_pay(model: swiftopt.Model) -> None:
    task = task_of(model)
    assert task.drafts and task.compared_rounds_at(0) == COMPARED_ROUNDS["unmeasured"]
    for _ in range(MIN_PAIRS):
        assert task.word == "unmeasured"
        learnt(task, 1.0, 0.4)  # plain: a second per token
    assert task.word == "use" and task.compared_rounds_at(0) == COMPARED_ROUNDS["use"]
    for _ in range(MAX_PAIRS):
        learnt(task, 1.0, 1.6)
    assert task.word == "plain" and not task.drafts
    for _ in range(MAX_PAIRS):
        learnt(task, 0.4, 1.0)  # drafts: less than half of one
    assert task.drafts


def test_verdict_is_by_context_length_once_enough_was_timed(model: swiftopt.Model) -> None:
    """Drafts halve the time in short contexts and double it in long ones; other contexts use the verdict of all."""
    task, short, long, other = task_of(model), 512, 16384, 2048
    for _ in range(12):
        for bucket, drafted_s in ((short, 0.5), (long, 2.0)):
            pair = timings(task, Timed(8, 8.0), Timed(10, 10 * drafted_s))
            task.add(replace(pair, context_bucket=bucket))
    assert task.drafts_at(short) and not task.drafts_at(long)
    assert task.compared_rounds_at(long) == COMPARED_ROUNDS["plain"]
    assert task.drafts_at(other) == task.drafts
    why = task.why_plain_at(long)
    assert task.why_plain_at(short) is None and why is not None and why.reason == "verdict"
    assert task.word == "plain" or "in contexts of up to 16,384 tokens" in why.message
    task.drop_pairs()
    assert task.drafts_at(long) == task.drafts, "the text has changed"


def test_repeated_looks_seldom_accept_drafts_without_a_gain(model: swiftopt.Model) -> None:
    """With separate looks at 95 %, a fifth of such tasks would get "use" within 50 requests, and a third within 100."""
    rng, n_used = np.random.default_rng(0), 0
    for _ in range(100):
        task = task_of(model)
        news = [learnt(task, *np.exp(0.05 * rng.standard_normal(2))) for _ in range(50)]
        n_used += any(news)
    assert n_used < 10


def test_different_lengths_and_speeds_of_requests_do_not_bias_the_ratio(model: swiftopt.Model) -> None:
    """Drafts gain nothing. Long prompts make each token slower, drafted or not, and have short answers."""
    task = task_of(model)
    for number in range(MAX_PAIRS):
        n, token_s = (40, 1 / 12) if number % 2 else (300, 1 / 20)
        own = timings(task, Timed(8, 8 * token_s), Timed(n, n * token_s))
        task.count_rounds(own)
        task.add(own)
    found = task.status()
    assert found.ratio == pytest.approx(1.0) and found.plain_tok_s == found.drafted_tok_s


def test_figures_of_drafts_are_consistent_at_every_request(model: swiftopt.Model) -> None:
    """The ratio is that of the two speeds, and the saved time is drafted seconds · (ratio - 1)."""
    task, rng, ratios = task_of(model), np.random.default_rng(1), set()
    for number in range(60):
        slower = 1.0 if number < 30 else 3.0  # drafts that pay, then some that do not
        n, spread = int(rng.integers(20, 300)), rng.lognormal(0, 0.2, 2)
        task.count_rounds(own := timings(task, Timed(8, 0.8 * spread[0]), Timed(n, 0.06 * n * slower * spread[1])))
        task.add(own)
        if number == 45:
            task.drop_pairs()
        found = task.status()
        if found.ratio is None:
            assert (found.timed, found.interval, found.saved_s, found.plain_tok_s) == (None, None, None, None)
            continue
        assert found.timed == "rounds" and found.interval is not None and found.saved_s is not None
        assert found.interval[0] < found.ratio < found.interval[1] and found.pairs >= MIN_PAIRS
        assert found.drafted_tok_s is not None and found.plain_tok_s is not None
        assert found.ratio == pytest.approx(found.drafted_tok_s / found.plain_tok_s, rel=1e-3)
        assert found.saved_s == pytest.approx(found.drafted_s * (found.ratio - 1), abs=0.1)
        assert (found.saved_s > 0) == (found.ratio > 1)
        ratios.add(found.ratio)
    assert min(ratios) < 1 < max(ratios) and found.saved_before_s != 0
    assert (found.acceptance_rate, found.mean_generated_length) == (0.75, 1.0)


def test_verdict_counts_only_the_drafts_in_use(model: swiftopt.Model) -> None:
    """Pairs that were timed with an earlier set do not count for the adopted one, nor does a request that had both."""
    task = task_of(model)
    for _ in range(MIN_PAIRS + 2):
        learnt(task, 1.0, 0.4)
    first, mixed = task.search.layer_set, rounds(task, 1.0, 0.4)
    task.search._challengers.incumbent = Incumbent(LayerSet(first.n_layers, frozenset({1}), formats=first.formats))
    assert task.search.layer_set != first and len(task.pairs) == MIN_PAIRS + 2
    assert not task.add(mixed)
    assert not task.pairs and task.judged.verdict.ratio is None and task.word == "use"
    news = [learnt(task, 1.0, 0.4) for _ in range(MIN_PAIRS + 2)]
    assert news.index(True) + 1 >= MIN_PAIRS and len(task.pairs) == MIN_PAIRS + 2


def test_set_without_a_certain_gain_is_not_stored(model: swiftopt.Model) -> None:
    task = task_of(model)
    task.word = "use"  # of an earlier set
    assert not any(learnt(task, 1.0, 0.4 if i % 2 else 2.0) for i in range(MAX_PAIRS))
    assert task.word == "use" and task.judged.verdict.word == "plain" and task.judged.verdict.ratio is not None


def costs_of(runtime: Runtime) -> CostProfile:
    """Return costs with cheap drafts, so that many are made."""
    cheap = FormatCosts(1e-3, 1e-3, 1e-3)
    return CostProfile("", "cpu", "float32", 256, runtime.n_layers, 0.1, 0.1, 0.1, 0.1, {1: 1.0}, {"int4": cheap})


class Clock:
    """A clock that only the model's passes advance, by set times of draft passes and target passes.

    A row of a prompt or a window takes a second, which `decoding_s` excludes. Studies of the model take no time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runtime: Runtime, draft_s: float, target_s: float) -> None:
        self.now, self.decoding_s, forward_together = 0.0, 0.0, runtime.forward_together

        def timed(passes: Sequence[Pass]) -> list[Tensor]:
            own = draft_s if passes[0].kind == "draft" else target_s
            self.decoding_s += 0 if all(each.kind == "beside" for each in passes) else own
            self.now += own + sum(len(each.rows.token_ids) for each in passes if each.kind == "beside")
            return forward_together(passes)

        monkeypatch.setattr(runtime, "forward_together", timed)
        for module in ("decoding.loop", "optimizer.search"):
            monkeypatch.setattr(f"swiftopt.{module}.perf_counter", lambda: self.now)


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("draft_s", [0.01, 3.0])
def test_ratio_of_drafts_equals_that_of_requests_with_and_without_them(
    model: swiftopt.Model, monkeypatch: pytest.MonkeyPatch, at_once: int, draft_s: float
) -> None:
    """This holds for concurrent requests too, where a plain round may wait for the drafts of others."""
    monkeypatch.setattr("swiftopt.tasks.served_task.SEARCH_TIME_SHARE", 0.0)
    monkeypatch.setattr("swiftopt.tasks.traffic.stored_costs", lambda *_: costs_of(model.runtime))
    clock = Clock(monkeypatch, model.runtime, draft_s, target_s=1.0)
    took: dict[Way, float] = {}
    for way in ("plain", "best"):
        traffic = Traffic("tiny", model.runtime, None, SETTINGS)
        traffic.steer("pin", "code", way)
        clock.decoding_s = 0.0
        answers(traffic, model.runtime, "code", at_once, by_time=False)
        took[way] = clock.decoding_s
    traffic = Traffic("tiny", model.runtime, None, SETTINGS)
    answers(traffic, model.runtime, "code", at_once, by_time=False)
    [found] = traffic.status().tasks
    assert found.pairs >= MIN_PAIRS and found.ratio == pytest.approx(took["plain"] / took["best"], rel=0.3)


@pytest.mark.parametrize("at_once", [1, 4])
def test_search_takes_at_most_its_share_of_the_time(
    model: swiftopt.Model, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """The share is of elapsed time, for any number of concurrent requests, and as in the task's figures."""
    share = 0.5
    monkeypatch.setattr("swiftopt.tasks.served_task.SEARCH_TIME_SHARE", share)
    costs = replace(costs_of(model.runtime), pass_s={1: 1.0, 256: 256.0})
    monkeypatch.setattr("swiftopt.tasks.traffic.stored_costs", lambda *_: costs)
    clock = Clock(monkeypatch, model.runtime, draft_s=0.5, target_s=1.0)
    traffic, shares = Traffic("tiny", model.runtime, None, SETTINGS), list[float]()
    session = Session(model.runtime, Sampling(), 40, ignore_eos=True)
    prompts = [Prompt(str(i), "x", text=text) for i, text in enumerate(TEXTS * 3 * at_once)]
    for event in side_by_side((traffic.work(session, each, "code") for each in prompts), at_once, by_time=False):
        if isinstance(event, Generated):
            [found] = traffic.status().tasks
            assert found.seconds <= clock.now
            assert found.search.share == pytest.approx(found.search.seconds / found.seconds, rel=1e-2)
            shares.append(found.search.share)
    assert 0 < max(shares) <= share
    traffic.close()


def test_task_states_why_it_is_decoded_plainly(model: swiftopt.Model) -> None:
    task = task_of(model)
    assert task.why_plain is None
    for _ in range(MIN_PAIRS + 2):
        learnt(task, 0.4 if task.drafts else 1.0, 1.0 if task.drafts else 0.4)
    why = task.why_plain
    assert why is not None and why.reason == "verdict" and "'code': measured at 0.40 times" in why.message
    task.pinned = "plain"
    assert task.why_plain is not None and task.why_plain.reason == "pinned"
    task.pinned = "best"
    assert task.why_plain is None
    assert timings(task, Timed(8, 8.0), Timed(0, 0.0)).why_plain is not None, "all rounds were compared"
    assert timings(task, Timed(8, 8.0), Timed(5, 5.0)).why_plain is None


def test_saved_time_is_the_further_time_of_plain_decoding(model: swiftopt.Model) -> None:
    task = task_of(model)
    first = rounds(task, 2.0, 1.0)
    assert task.saved_by(first) == 0.0, "nothing is known of the ratio"
    for _ in range(MIN_PAIRS):
        learnt(task, 2.0, 1.0)
    assert task.saved_by(first) == pytest.approx(10 * (2.0 - 1.0))
    assert task.saved_by(rounds(task, 2.0, 0.5)) == pytest.approx(5 * (2.0 - 1.0)), "by the known ratio"
    others = replace(first, layer_set=LayerSet(model.runtime.n_layers, frozenset({0})))
    assert task.saved_by(others) == 0.0, "the ratio is of other drafts"


def test_saved_time_with_a_stored_plan_follows_its_ratio(model: swiftopt.Model) -> None:
    method, info = model.plan_for("code", "adaptive", None)
    session = Session(model.runtime, Sampling(), 12, ignore_eos=True)
    saved = []
    for ratio in (None, 1.5):
        work = decode_as_planned(session, (method, replace(info, ratio=ratio)), Prompt("1", "code", text=TEXTS[0]))
        (done,) = [event for event in side_by_side([work]) if isinstance(event, Generated)]
        saved.append((done.info.saved_s, done.completion.timings.decode_s))
    assert saved[0][0] == 0.0
    assert saved[1][0] == pytest.approx(0.5 * saved[1][1])


def test_pinned_task_has_no_other_rounds(model: swiftopt.Model) -> None:
    task = task_of(model)
    task.pinned = "plain"
    assert not task.drafts and task.compared_rounds_at(0) == 0 and not task.may_search(0.0)
    assert not learnt(task, 1.0, 1.0) and not task.pairs


def test_profitable_drafts_are_stored_with_evidence_and_loaded_by_others(model: swiftopt.Model, store: Store) -> None:
    traffic = Traffic("tiny", model.runtime, store, SETTINGS)
    task = traffic.task("code")
    for _ in range(MIN_PAIRS + 2):
        if learnt(task, 1.0, 0.4):
            traffic._store_version(task)
    await_answers(traffic)
    [record] = store.layer_sets("tiny", "code")
    assert record.verdict == "use" and record.measured_speedup == pytest.approx(2.5) and task.version == record.version
    assert (record.acceptance_rate, record.mean_generated_length) == (0.75, 1.0)
    second = Traffic("tiny", model.runtime, store, SETTINGS)
    other = second.task("code")
    await_answers(second)
    assert (other.version, other.word, other.search.layer_set) == (record.version, "use", record.layer_set)
    assert other.search.optimising, "what a server has stored while it searched goes on being searched"
    assert len(other.pairs) == MIN_PAIRS and other.status().ratio == pytest.approx(2.5)
    with_more = Traffic("tiny", model.runtime, store, SETTINGS)
    task = with_more.task("code")
    await_answers(with_more)
    store.add_layer_set(swiftopt.LayerSetRecord(**{**_fields(record), "measured_speedup": 9.0}))
    with_more.task("code")
    assert not with_more._queries._pending  # it was looked up a moment ago
    with_more._queries._asked_at_s["plans", ""] -= REFRESH_S
    with_more.task("code")
    await_answers(with_more)
    assert task.version == 2
    store.rollback("tiny", "code")
    with_more._queries._asked_at_s["plans", ""] -= REFRESH_S
    with_more.task("code")
    await_answers(with_more)
    assert task.version == 1, "what was rolled back is left"


def test_plan_of_a_job_is_not_searched_again(model: swiftopt.Model) -> None:
    traffic = Traffic("tiny", model.runtime, None, SETTINGS)
    task, own = traffic.task("code"), LayerSet(model.runtime.n_layers).filled("int4")
    record = swiftopt.LayerSetRecord("tiny", "code", own, job="0123", evidence=((8, 1.0, 8, 0.4),) * MIN_PAIRS)
    plan = Plan("adaptive", record, verdict="use", measured_speedup=2.0, measured_interval=(1.8, 2.2))
    task.use_plan(FoundPlan(plan, 3, "best"), traffic._new_task("code", own).search)
    found = task.status()
    assert (found.version, found.in_use, found.ratio, found.interval) == (3, "drafts", 2.0, (1.8, 2.2))
    assert found.search.ended == "a stored plan is in use" and not task.pairs
    assert (found.timed, found.pairs) == ("requests", 0), "the plan's ratio is not that of its set's evidence"
    assert not learnt(task, 1.0, 0.4) and task.status().ratio == 2.0
    traffic.close()


def test_tasks_are_recognised_by_their_prompts_after_a_restart(
    model: swiftopt.Model, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftopt.tasks.traffic.MIN_SIMILARITY", -1.0)  # a model of chance spreads its states
    first = Traffic("tiny", model.runtime, store, SETTINGS)
    answers(first, model.runtime, "code")
    verdict = Verdict("use", 2.5, (2.0, 3.0))
    store.add_layer_set(first.task("code").record("tiny", model.runtime, verdict, []))
    first.close()
    second = Traffic("tiny", model.runtime, store, SETTINGS)
    answers(second, model.runtime, None)
    found = {each.task: each for each in second.status().tasks}
    assert found["code"].requests == len(TEXTS) and found["default"].requests == 0
    second.close()


def test_nothing_is_tried_on_a_request_without_learning(model: swiftopt.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftopt.tasks.served_task.SEARCH_TIME_SHARE", 1.0)
    traffic = Traffic("tiny", model.runtime, None, SETTINGS)
    done = answers(traffic, model.runtime, "code", learn=False)
    [found] = traffic.status().tasks
    assert found.requests == len(TEXTS) and found.tokens == sum(each.completion.n_tokens for each in done)
    assert (found.pairs, found.search.trials, found.compared_s) == (0, 0, 0.0)
    traffic.close()


def _fields(record: swiftopt.LayerSetRecord) -> dict[str, object]:
    names = ("model", "task", "layer_set", "fingerprint", "verdict", "device", "dtype", "settings", "measured_interval")
    return {name: getattr(record, name) for name in names}


def test_search_stays_within_its_share_of_the_time(model: swiftopt.Model) -> None:
    task = task_of(model)
    assert not task.may_search(0.1)  # nothing was decoded yet
    learnt(task, 1.0, 0.4)  # 12 seconds
    assert task.may_search(0.36 / INITIAL_OVERRUN) and not task.may_search(0.38 / INITIAL_OVERRUN)
    task.count_scoring(0.2, 0.2)
    assert task.may_search(0.1) and not task.may_search(0.2)
    task.count_scoring(0.1, 0.01)  # ten times what was expected
    assert task.may_search(0.005) and not task.may_search(0.01), "the next one may take ten times as long, too"


def test_search_compensates_a_slow_candidate_before_the_next(model: swiftopt.Model) -> None:
    """On a simulated clock, only a look that is slower than all before, relative to its estimate, exceeds the share."""
    task, random, expected_s = task_of(model), Random(0), 0.1
    shares: list[float] = []  # after each look
    for factor in [*(random.uniform(0, INITIAL_OVERRUN) for _ in range(300)), 90.0, *[1.0] * 300]:
        while not task.may_search(expected_s):
            task.seconds += 0.1
        task.count_scoring(factor * expected_s, expected_s)
        shares.append(task.search_s / task.seconds)
    before, slow, after = shares[:300], shares[300], shares[301:]
    assert before[-1] > 0.5 * SEARCH_TIME_SHARE and max(before) <= SEARCH_TIME_SHARE < slow
    assert after[-1] > 0.5 * SEARCH_TIME_SHARE and max(after) <= SEARCH_TIME_SHARE


def test_number_of_task_names_is_limited_in_memory_and_tables(
    model: swiftopt.Model, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftopt.tasks.traffic.MAX_TASKS", 3)
    traffic = Traffic("tiny", model.runtime, store, SETTINGS)
    assert [traffic.task(name).name for name in ("a", "b", "c", "a", "d", "a")] == ["a", "b", "c", "a", "d", "a"]
    assert {task.task for task in traffic.status().tasks} == {"a", "c", "d"}, "b was used least recently"
    await_answers(traffic)
    assert {task for _, task in traffic._queries._asked_at_s if task} == {"a", "c", "d"}
    traffic.steer("pin", "c", "plain")
    traffic.task("a").word, traffic.task("d").version = "use", 3
    assert traffic.task("e").name == "default" and len(traffic.status().tasks) == 4, "all others are tuned"
    traffic.steer("pin", "c", None)
    assert traffic.task("e").name == "e"
    assert {task.task for task in traffic.status().tasks} == {"a", "d", "default", "e"}
    traffic.close()


def test_paused_traffic_neither_searches_nor_compares(model: swiftopt.Model, store: Store) -> None:
    traffic = Traffic("tiny", model.runtime, store, SETTINGS)
    traffic.steer("pause")
    answers(traffic, model.runtime, "code")
    [found] = traffic.status().tasks
    assert found.pairs == 0 and found.search.trials == 0 and traffic.status().paused
    traffic.steer("resume")
    answers(traffic, model.runtime, "code")
    assert traffic.status().tasks[0].pairs > 0
    assert traffic.status().tasks[0].layer_set.n_layers == model.runtime.n_layers


def test_one_replica_at_a_time_searches_for_a_task(
    model: swiftopt.Model, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftopt.tasks.served_task.SEARCH_TIME_SHARE", 1.0)
    first, second = (Traffic("tiny", model.runtime, store, SETTINGS) for _ in range(2))

    def n_trials(traffic: Traffic, task: str) -> int:
        for _ in range(2):  # the first requests ask for the lease
            answers(traffic, model.runtime, task)
            await_answers(traffic)
        return next(each.search.trials for each in traffic.status().tasks if each.task == task)

    assert n_trials(first, "code") > 0 and n_trials(second, "code") == 0
    assert n_trials(second, "notes") > 0  # another task
    first.close()  # gives its search back
    second._queries._asked_at_s.clear()  # what it was told holds for some seconds
    second._has_lease("code")
    await_answers(second)
    assert second._has_lease("code")
    second.close()


def test_search_lease_of_a_replica_ends_when_the_database_says(
    model: swiftopt.Model, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = Traffic("tiny", model.runtime, store, SETTINGS)
    assert not traffic._has_lease("code")  # not yet answered
    await_answers(traffic)
    assert traffic._has_lease("code")
    later = time.monotonic() + LEASE_S
    monkeypatch.setattr("swiftopt.tasks.traffic.time.monotonic", lambda: later)
    assert not traffic._has_lease("code")
    traffic.close()


def test_no_round_waits_for_the_database(
    model: swiftopt.Model, store: Store, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the database is locked, requests are answered, and only what it has confirmed is searched or used."""
    monkeypatch.setattr("swiftopt.tasks.served_task.SEARCH_TIME_SHARE", 1.0)
    with Store.open(f"{sqlite_url}?timeout=600") as patient:
        first = Traffic("tiny", model.runtime, store, SETTINGS)
        task = first.task("notes")
        for _ in range(MIN_PAIRS + 2):
            if learnt(task, 1.0, 0.4):
                first._store_version(task)
        await_answers(first)
        monkeypatch.setattr("swiftopt.tasks.served_task.MIN_PAIRS", MAX_PAIRS + 1)  # no verdict, no version
        traffic = Traffic("tiny", model.runtime, patient, SETTINGS)
        with locked(tmp_path):
            for name in ("code", "notes"):
                assert len(answers(traffic, model.runtime, name)) == len(TEXTS)
            assert {*traffic._queries._pending, ("plans", "")} == {("lease", "code"), ("plan", "notes"), ("plans", "")}
            code, notes = (traffic._tasks[name] for name in ("code", "notes"))
            assert code.looked_up and not code.search.trials
            assert not notes.looked_up and notes.version is None and not notes.search.trials
        await_answers(traffic)
        assert notes.version == task.version == 1 and notes.word == "use"
        assert {each.info.version for each in answers(traffic, model.runtime, "notes")} == {1}
        answers(traffic, model.runtime, "code")
        assert code.search.trials
        traffic.close()
        first.close()


@pytest.mark.model
def test_change_from_code_to_summaries_is_detected_and_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = swiftopt.load("smollm2-135m", dtype="bfloat16").runtime
    monkeypatch.setattr("swiftopt.tasks.traffic.stored_costs", lambda *_: costs_of(runtime))
    traffic = Traffic("smollm2-135m", runtime, None)
    session = Session(runtime, Sampling(), 8, ignore_eos=True)
    kinds = {kind: [own for own in read_stream(str(EXAMPLES)) if own.task == kind][:10] for kind in ("code", "summary")}

    def shifts_after(kind: str) -> dict[str, object]:
        for prompt in kinds[kind]:
            for event in side_by_side([traffic.work(session, prompt, "mixed")]):
                if isinstance(event, Generated):
                    traffic.count(event)
        (told,) = traffic.status().to_json()["tasks"]
        assert told["task"] == "mixed"
        shifts: dict[str, object] = told["shifts"]
        return shifts

    n_code = len(kinds["code"])
    assert shifts_after("code") == {"n": 0, "latest": None, "at_request": None}
    assert new_shifts(traffic.status().to_json(), []) == []
    with caplog.at_level(logging.INFO, "swiftopt.tasks.traffic"):
        found = shifts_after("summary")
    assert found["n"] == 1 and isinstance(found["at_request"], int) and n_code < found["at_request"] <= n_code + 20
    assert f"tuning=shifted task=mixed reason={found['latest']!r}" in caplog.text
    [shift] = new_shifts(traffic.status().to_json(), [])
    assert shift_line(shift) == f"the traffic changed at request {found['at_request']} of task mixed: {found['latest']}"
    assert new_shifts(traffic.status().to_json(), [shift]) == []
    traffic.close()


def test_costs_of_a_served_model_follow_its_passes_and_are_stored(
    model: swiftopt.Model, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the profile drafts are free and checks expensive; the passes differ."""
    real = costs_of(model.runtime)
    free = {name: costs.scaled(1e-3) for name, costs in real.formats.items()}
    dear = {1: real.pass_s[1], 8: 7 * real.pass_s[1]}
    wrong = replace(real, formats=free, pass_s=dear, quality="disturbed", remark="others had 40 %")
    monkeypatch.setattr("swiftopt.tasks.traffic.stored_costs", lambda *_: wrong)
    traffic = Traffic("tiny", model.runtime, store, SETTINGS, corpora=Corpora(0))  # or all checks would be wide
    draft = LayerSet(model.runtime.n_layers).filled(SETTINGS.draft_format)
    before = traffic.costs.at()
    for _ in range(6):
        answers(traffic, model.runtime, "code")
    after = traffic.costs.refined()[0]
    assert after.draft_cost(draft) > 5 * before.draft_cost(draft)
    assert after.verify_cost(2) < before.verify_cost(2)
    shown = traffic.status().costs
    assert shown is not None and shown.quality == "refined" and shown.pass_s == traffic.costs.at().target_pass_s(1)
    traffic.close()
    assert after in store.cost_profiles(after.fingerprint)


def test_trials_of_served_requests_are_stored_by_search(
    model: swiftopt.Model, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftopt.tasks.served_task.SEARCH_TIME_SHARE", 100.0)
    counts: list[int] = []
    for _ in range(2):
        traffic = Traffic("tiny", model.runtime, store, SETTINGS)
        while not (tried := traffic.task("code").search.trials):
            answers(traffic, model.runtime, "code")
            await_answers(traffic)
        traffic.close()
        counts.append(len(tried))
    found = store.served_searches()
    assert sorted(search.n_trials for search in found) == sorted(counts)
    assert {(search.model, search.task) for search in found} == {("tiny", "code")}
    assert store.fingerprint_of_search(found[0].job) == model.runtime.info.fingerprint
