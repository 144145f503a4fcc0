"""Search during decoding, on a tiny random model."""

from __future__ import annotations

import dataclasses
import json
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from fakes import flat_costs, worded_runtime
from torch import Tensor

from swiftopt.core.events import (
    Adopted,
    Event,
    PhaseChanged,
    PromptFinished,
    PromptStarted,
    SkipRatioLowered,
    TaskFinished,
    TrialsDone,
)
from swiftopt.core.layer_sets import LayerSet, searchable
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Prompt, Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.engine import alone, side_by_side
from swiftopt.decoding.events import Prefilled, Round
from swiftopt.decoding.loop import decode, decoding
from swiftopt.decoding.methods import PLAIN
from swiftopt.decoding.session import Session
from swiftopt.models.buffer import KVBuffer
from swiftopt.models.rows import Pass
from swiftopt.models.runtime import Runtime
from swiftopt.optimizer.challengers import ChallengerTest, Incumbent, trim
from swiftopt.optimizer.evaluation import MIN_CANDIDATES_REOPENED, candidates_per_pass
from swiftopt.optimizer.search import Search
from swiftopt.optimizer.tuning import Tuner

SMALL: dict[str, Any] = dict(context_window=8, strategy="random", stop_threshold=0.05, max_draft_length=4)


def stream(n: int, task: str = "t") -> list[Prompt]:
    rng = random.Random(0)
    return [Prompt(f"{task}{i}", task, text=" ".join(f"w{rng.randrange(2, 97)}" for _ in range(6))) for i in range(n)]


def tune(prompts: list[Prompt], max_new_tokens: int = 24, **settings: Any) -> tuple[list[Any], list[Event]]:
    runtime, values = worded_runtime(), SwiftSettings(**{**SMALL, **settings})
    events = list(Tuner(Session(runtime, Sampling(), max_new_tokens), values, flat_costs(), "tiny").run(prompts))
    return [event for event in events if isinstance(event, TaskFinished)], events


def test_tuning_produces_plain_output_for_every_prompt() -> None:
    prompts = stream(6)
    _, events = tune(prompts, max_steps=40)
    runtime = worded_runtime()
    finished = [event for event in events if isinstance(event, PromptFinished)]
    assert [event.index for event in finished] == list(range(6))
    for event in finished:
        ids = runtime.tokenizer(event.prompt.text)["input_ids"]
        plain = decode(runtime, ids, PLAIN, TokenRule.of(Sampling(), None), Ending(24))
        assert event.completion.token_ids == plain.token_ids


def test_every_trial_is_reported_once_in_order() -> None:
    (result,), events = tune(stream(4), max_steps=30)
    reported = [trial for event in events if isinstance(event, TrialsDone) for trial in event.trials]
    assert tuple(reported) == result.trials
    assert [trial.step for trial in reported] == list(range(30))
    assert reported[0].origin == "uniform" and result.stopped_because == "30 candidates were scored"


def test_same_seed_and_profile_give_the_same_trials() -> None:
    def trials(seed: int) -> list[tuple[LayerSet, float, bool]]:
        (result,), _ = tune(stream(4), max_steps=20, strategy="swift", bayes_interval=5, deterministic=True, seed=seed)
        return [(trial.layer_set, trial.score, trial.adopted) for trial in result.trials]

    assert trials(1) == trials(1) != trials(2)


def test_adopted_set_beats_the_start_on_the_windows_both_saw() -> None:
    (result,), events = tune(stream(8), max_steps=120, target_matchness=1.0, seed=1)
    adopted = [event for event in events if isinstance(event, Adopted)]
    assert adopted and adopted[-1].layer_set == result.record.layer_set
    assert [trial.step for trial in result.trials if trial.adopted] == [event.step for event in adopted]


def test_search_ends_without_further_improvement() -> None:
    (result,), _ = tune(stream(8), patience=12, max_steps=500, target_matchness=1.0)
    last_gain = max([trial.step for trial in result.trials if trial.adopted], default=0)
    assert result.stopped_because == "no better layer set in 12 candidates"
    assert len(result.trials) - last_gain >= 12


@pytest.mark.parametrize("strategy", [pytest.param("random", marks=pytest.mark.families), "knapsack"])
def test_prompts_are_tuned_on_concurrently(strategy: str) -> None:
    """The allowed number of prompts starts; candidates join other passes; the output equals plain decoding's."""
    prompts = stream(9) + stream(4, "u")
    runtime, settings = worded_runtime(), SwiftSettings(**{**SMALL, "strategy": strategy, "max_steps": 30})
    passes: list[list[int]] = []

    class Noting(Runtime):
        def forward_together(self, together: Sequence[Pass]) -> list[Tensor]:
            passes.append([len(each.rows.variants) for each in together])
            return super().forward_together(together)

    runtime.__class__ = Noting
    tuner = Tuner(Session(runtime, Sampling(), 24), settings, flat_costs(), "tiny", concurrency=3)
    running, most, serving = set[int](), 0, True
    results = {}
    for event in tuner.run(prompts):
        json.dumps(tuner.snapshot())
        if isinstance(event, PhaseChanged) and event.phase == "verdict":
            serving = False  # verdicts decode one prompt at a time, and only their first runs end one
        elif isinstance(event, PromptStarted):
            running.add(event.index)
        elif isinstance(event, PromptFinished):
            running.discard(event.index)
            ids = runtime.tokenizer(event.prompt.text)["input_ids"]
            plain = decode(worded_runtime(), ids, PLAIN, TokenRule.of(Sampling(), None), Ending(24))
            assert event.completion.token_ids == plain.token_ids
        elif isinstance(event, TaskFinished):
            results[event.task] = event
        most = max(most, len(running)) if serving else most
    assert most == 3 and list(results) == ["t", "u"]
    assert all(len(result.trials) > 4 and result.verdict.n_prompts for result in results.values())
    assert any(0 in shared and max(shared) > 0 for shared in passes)  # candidates beside somebody's own rows


def test_concurrent_prompts_wait_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an engine, memory holds three of eight prompts, even when some start in the step in which others end."""
    made, alive, most = Runtime.new_buffer, weakref.WeakSet[KVBuffer](), list[int]()

    def noting(runtime: Runtime, capacity: int, *sizes: Any) -> KVBuffer:
        alive.add(buffer := made(runtime, capacity, *sizes))
        most.append(runtime.slot_bytes * sum(each.capacity for each in alive))
        return buffer

    monkeypatch.setattr(Runtime, "new_buffer", noting)
    prompts, runtime = stream(10), worded_runtime()
    settings = SwiftSettings(**{**SMALL, "max_steps": 30})
    memory = 250 * runtime.slot_bytes
    tuner = Tuner(Session(runtime, Sampling(), 24), settings, flat_costs(), "tiny", concurrency=8, memory=memory)
    events = list(tuner.serve(prompts))
    assert memory / 2 < max(most) <= memory
    assert sum(isinstance(event, PromptFinished) for event in events) == 10
    assert any(isinstance(event, TrialsDone) for event in events)


@pytest.mark.slow
def test_phase_of_concurrent_prompts_changes_as_rarely_as_that_of_one() -> None:
    """A window that fills up beside full ones causes no event, because each event is written to the database."""
    settings = SwiftSettings(**{**SMALL, "strategy": "random", "max_steps": 200, "target_matchness": 1.0})
    changes = []
    for concurrency in (1, 4):
        tuner = Tuner(
            Session(worded_runtime(), Sampling(), 40), settings, flat_costs(), "tiny", concurrency=concurrency
        )
        changes.append(sum(isinstance(event, PhaseChanged) for event in tuner.run(stream(8))))
    assert changes[1] <= changes[0]


def test_search_ends_when_matchness_is_high_enough() -> None:
    (result,), _ = tune(stream(4), skip_ratio=0.25, target_matchness=0.0)
    assert "is above 0.0" in result.stopped_because


def test_skip_ratio_is_lowered_while_acceptance_stays_low() -> None:
    (result,), events = tune(
        stream(8), skip_ratio=1.0, early_stop=False, min_acceptance=1.0, min_acceptance_rounds=4, skip_ratio_step=0.25
    )
    lowered = [event for event in events if isinstance(event, SkipRatioLowered)]
    assert lowered and all(event.acceptance_rate < 1.0 for event in lowered)
    assert result.record.layer_set.n_skipped < 4
    sizes = {trial.layer_set.n_skipped for trial in result.trials}
    assert len(sizes) > 1


def test_set_without_skipped_sub_layers_is_unchanged_at_low_acceptance() -> None:
    settings = SwiftSettings(context_window=8, min_acceptance=1.0, min_acceptance_rounds=1)
    search = Search("t", LayerSet(4), searchable(4), settings, 0.45, flat_costs(), LayerSet(4))
    ids = worded_runtime().tokenizer("w3 w4 w5 w6")["input_ids"]
    ratios: list[float] = []
    for event in side_by_side(
        [decoding(worded_runtime(), ids, search.method, TokenRule.of(Sampling(), None), Ending(24))]
    ):
        if isinstance(event, Round):
            assert list(search.lower_skip_ratio(replace(event, n_accepted=0, n_steps=2))) == []
            ratios.append(search.skip_ratio)
    assert set(ratios) == {0.45} and search.layer_set == LayerSet(4)
    search.close()


def test_no_trials_when_optimisation_is_switched_off() -> None:
    (result,), _ = tune(stream(4), optimise=False)
    assert result.trials == () and result.record.layer_set == LayerSet.uniform(4, 2)


def test_each_task_gets_its_own_set_and_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftopt.optimizer.verdict.is_open", lambda verdict: False)  # which the clock would decide
    mixed = [prompt for pair in zip(stream(6, "a"), stream(6, "b"), strict=True) for prompt in pair]
    results, events = tune(mixed, max_steps=20)
    assert [result.task for result in results] == ["a", "b"]
    assert all(result.verdict.n_prompts == 3 for result in results)
    assert sum(isinstance(event, PromptFinished) for event in events) == 12


def test_batch_grows_only_while_it_makes_a_candidate_cheaper() -> None:
    assert candidates_per_pass(flat_costs(), 8) == 8
    assert candidates_per_pass(flat_costs(), 32) == 2  # 64 rows are the most that was measured
    dear = {n: float(n) for n in (1, 2, 4, 8, 16, 32, 64)}
    assert candidates_per_pass(dataclasses.replace(flat_costs(), pass_s=dear), 8) == 1
    assert candidates_per_pass(None, 8) == 1


@pytest.mark.parametrize("n", [0, 1, 3, 5, 9])
def test_trimmed_set_is_a_subset_of_the_requested_size(n: int) -> None:
    whole = LayerSet(8, frozenset({1, 3, 4, 6}), frozenset({2, 5, 6}))
    smaller = trim(whole, n)
    assert smaller.n_skipped == min(n, whole.n_skipped)
    assert smaller.skip_attn <= whole.skip_attn and smaller.skip_mlp <= whole.skip_mlp


def test_nothing_is_searched_before_the_window_is_full() -> None:
    (result,), _ = tune(stream(2), max_new_tokens=8)
    assert result.trials == ()
    (result,), _ = tune(stream(2), max_new_tokens=10)
    assert result.trials


# strategies that look at the model, and searches that begin again

TOO_SMALL = "a scoring pass with one candidate does not fit in memory"
GUIDED: dict[str, Any] = dict(context_window=8, stop_threshold=0.05, max_draft_length=4, strategy="knapsack")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["local", "knapsack", "clasp"])
def test_guided_tuning_chooses_the_size_and_keeps_plain_output(strategy: str) -> None:
    (result,), events = tune(stream(8), strategy=strategy, target_matchness=0.0, patience=20)
    runtime = worded_runtime()
    for event in events:
        if isinstance(event, PromptFinished):
            ids = runtime.tokenizer(event.prompt.text)["input_ids"]
            plain = decode(runtime, ids, PLAIN, TokenRule.of(Sampling(), None), Ending(24))
            assert event.completion.token_ids == plain.token_ids
    assert len({trial.layer_set.n_skipped for trial in result.trials}) > 1
    assert "is above" not in result.stopped_because  # a set that leaves nothing out matches, too
    assert not any(isinstance(event, SkipRatioLowered) for event in events)
    adopted = [event for event in events if isinstance(event, Adopted)]
    assert [trial.step for trial in result.trials if trial.adopted] == [event.step for event in adopted]


def run_on(search: Search, number: int, n_tokens: int = 40, name: str = "p") -> list[Event]:
    """Decode another text with the search, and return its events."""
    rule, ending = TokenRule.of(Sampling(), None), Ending(n_tokens)
    ids, rows = [2 + number, 50, 7], search.scratch_rows
    work = decoding(worded_runtime(), ids, search.method, rule, ending, scratch_rows=rows)
    return [event for event in side_by_side([search.during(work, name)]) if not isinstance(event, Prefilled | Round)]


def search_of(**settings: Any) -> Search:
    return Search("t", LayerSet(4), searchable(4), SwiftSettings(**{**GUIDED, **settings}), 0.45, flat_costs())


@pytest.mark.parametrize("strategy", ["random", "knapsack"])
def test_reopened_search_scores_the_given_sets_first_and_forgets_earlier_scores(strategy: str) -> None:
    search = search_of(strategy=strategy, max_steps=6, target_matchness=1.0)
    run_on(search, 1)
    assert not search.optimising and len(search.trials) == 6
    held = search.layer_set
    stored = [LayerSet(4, frozenset({1})), LayerSet(4, frozenset({2}), frozenset({1})), held]
    assert search.reopen(stored)
    assert search.optimising and search.layer_set == held
    run_on(search, 2, name="q")
    anew = search.trials[6:]
    assert [trial.origin for trial in anew[:3]] == ["in use", "stored", "stored"]
    assert [trial.layer_set for trial in anew[:3]] == [held, *stored[:2]]
    assert len(anew) == 6 and search.stopped_because == "6 candidates were scored"


def test_reopened_search_scores_its_first_set_again() -> None:
    search = search_of(strategy="random", max_steps=6, target_matchness=1.0)
    start = search.layer_set
    run_on(search, 1)
    thin, stored = LayerSet(4, frozenset({1, 2}), frozenset({1, 2})), LayerSet(4, frozenset({2}))
    search._challengers = ChallengerTest(Incumbent(thin))
    assert search.reopen([stored])
    run_on(search, 2, name="q")
    assert [(trial.origin, trial.layer_set) for trial in search.trials[6:9]] == [
        ("in use", thin),
        ("stored", stored),
        ("uniform", start),
    ]


def test_reopened_search_continues_identically_from_its_state() -> None:
    search = search_of(max_steps=200)
    run_on(search, 1)
    search.reopen([LayerSet(4, frozenset({2}))])
    run_on(search, 2, 24, "q")
    assert search.optimising and len(search.trials) > 4
    again = search_of(max_steps=200)
    again.restore(json.loads(json.dumps(search.state())), search.trials)
    assert again.state() == search.state()
    for one in (search, again):
        run_on(one, 3, name="r")
    assert [replace(trial, seconds=0.0) for trial in again.trials] == [replace(t, seconds=0.0) for t in search.trials]


def test_endless_shifts_take_at_most_a_share_of_the_time() -> None:
    """The stream and its first shift have a full budget each; later shifts have known sets and what rounds earn."""
    search = Search("t", LayerSet(4), searchable(4), SwiftSettings(**GUIDED), 0.45, flat_costs(), n_tokens=100)
    known = [LayerSet(4, frozenset({1})), LayerSet(4, frozenset({2})), LayerSet(4, frozenset(), frozenset({1}))]
    opened = list[int]()
    for shift in range(4):
        for number in range(20):
            if search.optimising:
                run_on(search, 20 * shift + number, 80, name=f"{shift}-{number}")
        assert not search.optimising
        opened.append(len(search.trials) - sum(opened))
        assert search.reopen(known)
    n_earned = 0.03 * search._n_rounds / (1.5 * flat_costs().draft_cost(search._start, 8))
    assert opened[:2] == [36, 36] and all(
        MIN_CANDIDATES_REOPENED <= n <= MIN_CANDIDATES_REOPENED + n_earned for n in opened[2:]
    )
    assert {t.origin for t in search.trials[-opened[-1] :]} >= {"in use", "stored"}


def test_search_that_is_switched_off_is_not_reopened() -> None:
    for settings in (dict(optimise=False), dict(max_steps=0)):
        search = search_of(**settings)
        because = search.stopped_because
        assert not search.reopen()
        assert not search.optimising and search.stopped_because == because


def test_guided_search_pays_for_a_pass_only_when_half_of_its_window_is_new() -> None:
    search = search_of(max_steps=100)
    events = run_on(search, 1)
    positions = [event.trials[0].position for event in events if isinstance(event, TrialsDone)]
    assert len(positions) > 3
    assert min(later - earlier for earlier, later in pairwise(positions)) >= 4
    assert search.rows_run >= 8 * len(search.trials)
    assert {event.trials[0].origin for event in events if isinstance(event, TrialsDone)} == {"uniform", "in use"}


def beside_a_request(**options: int) -> tuple[Search, TokenRule, list[int]]:
    """Return a random search, with the rule and the prompt of a request."""
    return search_of(strategy="random", **options), TokenRule.of(Sampling(), None), [3, 50, 7]


@pytest.mark.parametrize("fits", [2, 0])
def test_search_beyond_memory_needs_fewer_slots_and_the_request_continues(
    fits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Runtime.forward_together

    def small(runtime: Runtime, passes: Sequence[Pass]) -> list[Tensor]:
        if any(each.kind == "beside" and len(each.rows.variants) > fits for each in passes):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(runtime, passes)

    monkeypatch.setattr(Runtime, "forward_together", small)
    search, rule, ids = beside_a_request(max_steps=20, candidates=8)
    work = decoding(worded_runtime(), ids, search.method, rule, Ending(60), scratch_rows=search.scratch_rows)
    done = alone(search.during(work, "p"))
    assert done.token_ids == decode(worded_runtime(), ids, PLAIN, rule, Ending(60)).token_ids
    assert search.batch == fits and len(search.trials) == (20 if fits else 0)
    assert search.stopped_because == ("20 candidates were scored" if fits else TOO_SMALL)


def test_known_sets_are_scored_later_if_their_pass_exceeds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Runtime.forward_together

    def small(runtime: Runtime, passes: Sequence[Pass]) -> list[Tensor]:
        if any(each.kind == "beside" and len(each.rows.variants) > 2 for each in passes):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(runtime, passes)

    search = search_of(strategy="random", max_steps=12, candidates=8, target_matchness=1.0)
    run_on(search, 1)
    known = [LayerSet(4, frozenset({1})), LayerSet(4, frozenset({2}), frozenset({1})), LayerSet(4, frozenset({2}))]
    search.reopen(known)
    monkeypatch.setattr(Runtime, "forward_together", small)
    run_on(search, 2, name="q")
    assert search.batch == 2
    assert [trial.layer_set for trial in search.trials[12:] if trial.origin == "stored"] == known


@pytest.mark.parametrize("short", ["of a budget", "on the device"])
def test_search_without_further_memory_uses_the_free_slots_of_the_text(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text's buffer has 104 slots; 32 candidates and the set in use would need more than twice as many."""
    made, capacities = Runtime.new_buffer, list[int]()

    def small(runtime: Runtime, capacity: int, *sizes: Any) -> KVBuffer:
        if short == "on the device" and capacity > 120:
            raise torch.OutOfMemoryError("CUDA out of memory")
        capacities.append(capacity)
        return made(runtime, capacity, *sizes)

    monkeypatch.setattr(Runtime, "new_buffer", small)
    search, rule, ids = beside_a_request(max_steps=60, candidates=32)
    runtime = worded_runtime()
    memory = 120 * runtime.slot_bytes if short == "of a budget" else None
    work = decoding(runtime, ids, search.method, rule, Ending(60), scratch_rows=search.scratch_rows)
    events, tokens = list(side_by_side([search.during(work, "p")], memory=memory)), [*ids]
    for event in events:
        if isinstance(event, Prefilled | Round):
            tokens += event.token_ids
    assert 104 <= capacities[0] <= 120
    sizes = [len(event.trials) for event in events if isinstance(event, TrialsDone)]
    assert 8 < max(sizes) < 15 and sum(sizes) == len(search.trials) and search.batch == 32
    assert tuple(tokens[3:]) == decode(worded_runtime(), ids, PLAIN, rule, Ending(60)).token_ids


def test_candidates_have_the_formats_of_the_starting_set() -> None:
    start = LayerSet(4, frozenset({1}), formats=(("mlp", "stored"),))
    settings = SwiftSettings(**GUIDED, max_steps=12)
    search = Search("t", LayerSet(4), searchable(4), settings, 0.45, flat_costs(), start)
    run_on(search, 1)
    assert len(search.trials) > 6 and {trial.layer_set.formats for trial in search.trials} == {start.formats}
