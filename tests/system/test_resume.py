"""A run that is interrupted anywhere and resumed in a new tuner equals the uninterrupted run."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache
from typing import Any

import pytest
from fakes import WordTokenizer, cheap_draft_costs, flat_costs
from families import CONFIGS
from native import quick_runtime

from swiftopt.core.costs import CostProfile
from swiftopt.core.errors import SettingsError, UnsupportedModel
from swiftopt.core.events import (
    Adopted,
    DraftingChosen,
    Event,
    PhaseChanged,
    Progress,
    PromptFinished,
    PromptStarted,
    SkipRatioLowered,
    StreamShifted,
    TaskFinished,
    TrialsDone,
)
from swiftopt.core.layer_sets import LayerSet, n_skipped_for
from swiftopt.core.records import KnownSet, unit
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Prompt, Sampling, Trial
from swiftopt.decoding.session import Session
from swiftopt.models.restacked import pairs_of
from swiftopt.models.runtime import Runtime
from swiftopt.optimizer import shift, tuning, verdict
from swiftopt.optimizer.task_state import VERSION, TaskState
from swiftopt.optimizer.tuning import EVENTS_WITHIN_STEP, Tuner

SMALL: dict[str, Any] = dict(
    context_window=6, strategy="random", stop_threshold=0.05, max_draft_length=4, target_matchness=1.0
)
N_LAYERS = 8
SCALE = 12.0  # of the random weights, at which texts differ and some candidates are adopted
FREE = flat_costs(n_layers=N_LAYERS)  # batches of eight
ALARM = shift.ALARM
STRIDES = 4  # snapshots of a run, evenly spaced, that are gone on from
KEPT = (TrialsDone, PromptFinished, Progress)
DEAR = dataclasses.replace(FREE, pass_s={n: float(n) for n in (1, 2, 4, 8, 16, 32, 64)})  # batches of one


@pytest.fixture(autouse=True, scope="module")
def restored() -> Iterator[None]:
    """Restore what a case sets for all of its runs."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((shift, "ALARM"), (verdict, "is_open"), (tuning, "PROGRESS_INTERVAL_S")):
            patch.setattr(module, name, getattr(module, name))
        yield


@cache
def runtime() -> Runtime:
    """Return a model of eight layers, with more layer sets of a size than a run tries; most change some argmaxes."""
    made = quick_runtime("llama", seed=2, scale=SCALE, num_hidden_layers=N_LAYERS)
    made.tokenizer = WordTokenizer()
    made.tokenizer.chat_template = "all messages"
    made.tokenizer.eos_token_id = None
    return made


def words(rng: random.Random, n: int) -> str:
    return " ".join(f"w{rng.randrange(2, 97)}" for _ in range(n))


def texts(n: int, task: str = "t") -> list[Prompt]:
    rng = random.Random(0)
    return [Prompt(f"{task}{i}", task, text=words(rng, 5)) for i in range(n)]


def chats(n: int) -> list[Prompt]:
    rng = random.Random(1)
    return [Prompt(f"c{i}", "t", turns=tuple(words(rng, 3) for _ in range(1 + i % 3))) for i in range(n)]


def mixed(n: int) -> list[Prompt]:
    return [prompt for pair in zip(texts(n, "a"), texts(n, "b"), strict=True) for prompt in pair]


@dataclasses.dataclass
class Case:
    """The prompts and settings of a tuning."""

    prompts: list[Prompt]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    costs: CostProfile = FREE
    max_new_tokens: int = 20
    alarm: float = ALARM  # a random model's acceptance hardly changes with its text
    known: tuple[KnownSet, ...] = ()
    concurrency: int = 1
    stays_open: bool = False  # whether no look decides the verdict, which the clock would say

    def tuner(self) -> Tuner:
        shift.ALARM = self.alarm
        verdict.is_open = lambda verdict: self.stays_open
        # signs of life come by the clock: on a slow machine no life would get further
        tuning.PROGRESS_INTERVAL_S = math.inf
        settings = SwiftSettings(**{**SMALL, "deterministic": True, **self.settings})
        session = Session(runtime(), self.sampling, self.max_new_tokens)
        return Tuner(session, settings, self.costs, "tiny", self.known, self.concurrency)


@dataclasses.dataclass
class Ledger:
    """The stored state: events, and the snapshot of the last one, written in one transaction."""

    case: Case
    events: list[Event] = dataclasses.field(default_factory=list)
    start: str = "null"
    history: list[tuple[int, str]] = dataclasses.field(default_factory=list)  # after so many events, that snapshot

    def trials(self) -> dict[str, list[Trial]]:
        found: dict[str, list[Trial]] = {}
        for event in self.events:
            if isinstance(event, TrialsDone):
                found.setdefault(event.task, []).extend(event.trials)
        return found

    def live(self, cut_at: int | None = None, kept: tuple[type[Event], ...] = KEPT) -> bool:
        """Run until the end, or until event `cut_at` of this run; return whether the end was reached."""
        pending: list[Event] = []
        tuner = self.case.tuner()
        with closing(tuner.run(self.case.prompts, json.loads(self.start), self.trials())) as events:
            for number, event in enumerate(events, 1):
                pending.append(event)
                if number == cut_at:
                    return False
                if isinstance(event, (*kept, TaskFinished)):
                    self.events += pending
                    pending.clear()
                    self.start = json.dumps(tuner.snapshot())
                    self.history.append((len(self.events), self.start))
        return True


def outcome(events: Sequence[Event]) -> dict[str, Any]:
    """Return the parts of a run that do not depend on the clock."""
    timeless = dict(measured_speedup=None, measured_interval=None, verdict="unmeasured")
    trials = [trial for event in events if isinstance(event, TrialsDone) for trial in event.trials]
    results = [event for event in events if isinstance(event, TaskFinished)]
    return {
        "trials": [dataclasses.replace(trial, seconds=0.0) for trial in trials],
        "finished": [
            (event.prompt, event.index, event.held_out, dataclasses.replace(event.completion, timings=0, prefill_s=0))  # type: ignore[arg-type]
            for event in events
            if isinstance(event, PromptFinished)
        ],
        "adopted": [event for event in events if isinstance(event, Adopted)],
        "shifts": [event for event in events if isinstance(event, StreamShifted)],
        "drafting": [event for event in events if isinstance(event, DraftingChosen)],
        "tasks": [
            (
                dataclasses.replace(result.record, **timeless),  # type: ignore[arg-type]
                result.record.prompt_state,
                result.stopped_because,
                result.n_prompts,
                result.n_tokens,
                [dataclasses.replace(trial, seconds=0.0) for trial in result.trials],
            )
            for result in results
        ],
    }


LOWERED = dict(skip_ratio=1.0, early_stop=False, min_acceptance=1.0, min_acceptance_rounds=4, skip_ratio_step=0.25)
ADAPTIVE = dict(method="adaptive", draft_format="int4", strategy="knapsack", max_steps=30)
CHEAP = cheap_draft_costs(0.1, N_LAYERS)
WIDTH = CONFIGS["llama"].hidden_size
ELSEWHERE = tuple(KnownSet(LayerSet.uniform(N_LAYERS, n), unit([1.0] * WIDTH)) for n in (2, 4))
CASES = {
    "batches": Case(texts(4), dict(max_steps=30)),
    "single": Case(texts(4), dict(max_steps=9), costs=DEAR),
    "all-looks": Case(texts(12), dict(max_steps=9), costs=DEAR, stays_open=True),
    "patience": Case(texts(4), dict(patience=7), costs=DEAR),
    "lowered": Case(texts(4), LOWERED, costs=DEAR),
    "two-tasks": Case(mixed(3), dict(max_steps=12), costs=DEAR),
    "chats": Case(chats(6), dict(max_steps=30), max_new_tokens=9),
    "sampled": Case(texts(4), dict(max_steps=20), Sampling(0.9, top_k=40, repetition_penalty=1.2, seed=3), DEAR),
    "drawn": Case(texts(4), dict(max_steps=20, sampled=True), Sampling(0.9, seed=3), DEAR),
    "plain-start": Case(texts(3), dict(optimise=False)),
    "knapsack": Case(texts(5), dict(strategy="knapsack"), costs=DEAR),
    "local": Case(mixed(4), dict(strategy="local", max_steps=30)),
    "shifting": Case(texts(14), dict(max_steps=4), costs=DEAR, alarm=0.2, known=ELSEWHERE),
    "drafting": Case(texts(8), dict(max_steps=16, strategy="knapsack", search_drafting=True), costs=DEAR),
    "adaptive": Case(texts(6), ADAPTIVE, costs=CHEAP, max_new_tokens=32),
    "adaptive-chats": Case(chats(8), ADAPTIVE, costs=CHEAP, max_new_tokens=20, stays_open=True),
    "exportable": Case(texts(4), dict(exportable=True, max_steps=12), costs=DEAR),
    "exportable-knapsack": Case(texts(5), dict(exportable=True, strategy="knapsack", max_steps=20), costs=DEAR),
    "clasp-matchness": Case(texts(5), dict(strategy="clasp", objective="matchness"), costs=DEAR),
}


@cache
def whole(name: str) -> Ledger:
    """Return the uninterrupted run."""
    ledger = Ledger(CASES[name])
    assert ledger.live()
    return ledger


# One case per kind of search is cut again and again, and one goes on from every snapshot; the others are variants.
OFTEN_CUT = ("batches", "chats", "drawn", "shifting", "drafting", "adaptive", "clasp-matchness")
FROM_EVERY = ("single", "patience", "two-tasks", "sampled", "knapsack", "local", "shifting", "adaptive", "exportable")


@pytest.mark.parametrize(
    ("name", "every"),
    [
        pytest.param(name, (5, 11)[i % 2], marks=() if name in OFTEN_CUT else pytest.mark.families)
        for i, name in enumerate(CASES)
    ],
)
def test_repeatedly_interrupted_run_equals_the_uninterrupted_one(name: str, every: int) -> None:
    ledger, n_lives = Ledger(CASES[name]), 1
    while not ledger.live(cut_at=every):
        n_lives += 1
        assert n_lives < 400  # each life gets further
    assert n_lives > 2
    assert outcome(ledger.events) == outcome(whole(name).events)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FROM_EVERY else pytest.mark.families) for name in CASES]
)
def test_run_continues_identically_from_every_snapshot(name: str) -> None:
    reference = whole(name)
    expected = outcome(reference.events)
    assert len(reference.history) > 8
    for n_events, start in reference.history[:: 1 + len(reference.history) // STRIDES]:
        ledger = Ledger(CASES[name], reference.events[:n_events], start)
        assert ledger.live()
        assert outcome(ledger.events) == expected


@pytest.mark.parametrize("name", ["exportable", "exportable-knapsack"])
def test_every_set_of_an_exportable_search_is_a_checkpoint(name: str) -> None:
    events = whole(name).events
    tried = [trial.layer_set for event in events if isinstance(event, TrialsDone) for trial in event.trials]
    results = [event.record.layer_set for event in events if isinstance(event, TaskFinished)]
    assert len(set(tried)) > 3 and all(pairs_of(layer_set) for layer_set in [*tried, *results])


def test_exportable_search_is_refused_if_no_set_is_a_checkpoint() -> None:
    gemma = quick_runtime("gemma3")
    with pytest.raises(UnsupportedModel, match="differ in their attention"):
        TaskState.begin("t", gemma, SwiftSettings(exportable=True), FREE, ())


def test_search_restarts_with_known_sets_after_a_shift() -> None:
    events = whole("shifting").events
    shifts = [event for event in events if isinstance(event, StreamShifted)]
    assert shifts and shifts[0].n_known == 2 and shifts[0].reason.startswith("acceptance ")
    later = [t for event in events[events.index(shifts[0]) :] if isinstance(event, TrialsDone) for t in event.trials]
    assert {own.layer_set for own in ELSEWHERE} - {shifts_set(events, shifts[0])} <= {
        trial.layer_set for trial in later if trial.origin == "stored"
    }
    (result,) = [event for event in events if isinstance(event, TaskFinished)]
    assert result.record.prompt_state is not None
    assert sum(value**2 for value in result.record.prompt_state) == pytest.approx(1.0, abs=1e-5)


def test_drafting_settings_are_chosen_at_the_end_and_stored_with_the_set() -> None:
    events = whole("drafting").events
    (chosen,) = [event for event in events if isinstance(event, DraftingChosen)]
    (result,) = [event for event in events if isinstance(event, TaskFinished)]
    assert chosen.expected >= chosen.before * 1.01
    settings = SwiftSettings.from_json(result.record.settings)
    assert (settings.stop_threshold, settings.max_draft_length) == (chosen.stop_threshold, chosen.max_draft_length)
    assert settings.branching == chosen.branching
    longest = max(len(event.completion.accepted_per_position) for event in events if isinstance(event, PromptFinished))
    assert longest <= SMALL["max_draft_length"]


def shifts_set(events: Sequence[Event], notice: Event) -> LayerSet:
    """Return the set in use when a shift was detected."""
    before = events[: events.index(notice)]
    held = [event.layer_set for event in before if isinstance(event, Adopted)]
    return held[-1] if held else LayerSet.uniform(N_LAYERS, 5)


@pytest.mark.parametrize("name", ["batches", "lowered", "chats"])
def test_run_continues_from_an_older_snapshot_with_only_trials_and_prompts(name: str) -> None:
    ledger = Ledger(CASES[name])
    cuts = iter([9, 14, 23, 31])
    while not ledger.live(next(cuts, None), kept=(TrialsDone, PromptFinished)):
        pass
    assert outcome(ledger.events) == outcome(whole(name).events)


def test_trials_are_reported_with_a_snapshot_that_includes_the_end() -> None:
    for n_events, start in whole("single").history:
        event = whole("single").events[n_events - 1]
        if isinstance(event, TrialsDone):
            stopped = json.loads(start)["tasks"]["t"]["search"]["stopped_because"]
            assert bool(stopped) == (event.trials[-1].step == 8)


def test_pairs_of_a_verdict_are_stored_and_not_repeated() -> None:
    """The resumed run keeps their timings and does not report their prompts again."""
    reference = whole("chats")
    held = [number for number, (n, _) in enumerate(reference.history) if is_held_out(reference.events[n - 1])]
    n_events, start = reference.history[held[2]]
    before = pairs_in(json.loads(start))
    assert len(before) == 3
    ledger = Ledger(CASES["chats"], reference.events[:n_events], start)
    assert ledger.live()
    after = next(pairs for _, text in ledger.history if len(pairs := pairs_in(json.loads(text))) > 3)
    assert [timeless(pair) for pair in after[:3]] == [timeless(pair) for pair in before]
    retold = [event for event in ledger.events[n_events:] if is_held_out(event)]
    assert len(retold) == len(held) - 3


def pairs_in(snapshot: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the timed pairs for the verdict of the only task; none once it is finished."""
    return [pair for task in snapshot["tasks"].values() for pairs in task["timed"] for pair in pairs]


def test_open_verdict_continues_with_the_latest_unscored_prompts() -> None:
    """Then all pairs run again, plain and tuned, and served prompts are not reported again."""
    events = whole("all-looks").events
    scored = {trial.prompt_id for event in events if isinstance(event, TrialsDone) for trial in event.trials}
    first = next(place for place, event in enumerate(events) if is_verdict(event))
    started = [event.prompt_id for event in events[first:] if isinstance(event, PromptStarted)]
    held_out = [f"t{i}" for i in range(6, 12)]
    more = [f"t{i}" for i in range(2, 6) if f"t{i}" not in scored]  # the first two choose the draft's format
    assert scored and len(more) > 1 and started == [*held_out, *more] * 2
    assert [event.detail for event in events if is_verdict(event)] == [
        "6 held-out prompts, plain and tuned",
        f"undecided: {len(more)} more prompts on which no candidate was scored",
        f"undecided: all {6 + len(more)} prompts again",
    ]
    told = [event.index for event in events if isinstance(event, PromptFinished)]
    assert told == [*range(12)] and [event.index for event in events if is_held_out(event)] == [*range(6, 12)]
    [result] = [event for event in events if isinstance(event, TaskFinished)]
    assert result.verdict.n_prompts == len(result.record.evidence) == 6 + len(more)


def is_verdict(event: Event) -> bool:
    return isinstance(event, PhaseChanged) and event.phase == "verdict"


def test_verdict_is_over_chats_and_its_evidence_over_turns() -> None:
    [result] = [event for event in whole("chats").events if isinstance(event, TaskFinished)]
    held_out = [event.index for event in whole("chats").events if is_held_out(event)]  # type: ignore[union-attr]
    assert result.verdict.n_prompts == len(set(held_out)) == 3
    assert len(result.record.evidence) == len(held_out) == 6


def test_verdict_excludes_time_of_its_caller() -> None:
    """A caller writes checkpoints and, in a server's engine, waits for its turn."""
    tuner, waited, has_begun = CASES["single"].tuner(), 0.0, False
    tuning.PROGRESS_INTERVAL_S = 0.0
    for event in tuner.run(CASES["single"].prompts):
        has_begun |= is_verdict(event)
        if has_begun and isinstance(event, Progress):
            time.sleep(0.02)
            waited += 0.02
        if isinstance(event, TaskFinished):
            assert 0 < sum(plain_s + own_s for _, plain_s, _, own_s in event.record.evidence) < waited


def is_held_out(event: Event) -> bool:
    return isinstance(event, PromptFinished) and event.held_out


def timeless(pair: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a pair without its texts, which are dropped when no later turn needs them."""
    return [{**run, "text": ""} for run in pair]


def test_seconds_of_an_interrupted_run_are_kept() -> None:
    reference = whole("batches")
    found = [(n, json.loads(text)) for n, text in reference.history]
    n_events, start = next((n, s) for n, s in found if s["flights"].get("0", {}).get("begun"))
    tally, task = start["flights"]["0"]["begun"]["tally"], start["tasks"]["t"]
    for values in (tally, task):
        for key in values:
            if key.endswith("_s") or key == "seconds":
                values[key] += 1000.0
    ledger = Ledger(CASES["batches"], reference.events[:n_events], json.dumps(start))
    assert ledger.live()
    done = next(event.completion for event in ledger.events[n_events:] if isinstance(event, PromptFinished))
    assert done.prefill_s > 1000 and done.timings.draft_s > 1000 and 3000 < done.timings.optimise_s + 2000 < 3100
    assert json.loads(ledger.history[-2][1])["tasks"]["t"]["seconds"] > 1000


def test_snapshot_does_not_grow_with_trials_or_prompts() -> None:
    ledger = Ledger(Case(texts(20), dict(max_steps=400, patience=400, min_acceptance=0.0, min_acceptance_rounds=4)))
    assert ledger.live()
    sizes = [
        (len(start), json.loads(start)["tasks"]["t"]["search"]["n_trials"])
        for n, start in ledger.history
        if isinstance(ledger.events[n - 1], PromptFinished) and not is_held_out(ledger.events[n - 1])
    ]
    assert sizes[-1][1] > 4 * sizes[0][1]
    assert sizes[-1][0] < 1.1 * sizes[0][0]


def test_adopted_set_respects_a_skip_ratio_lowered_by_a_concurrent_prompt() -> None:
    """Its pass was running when low acceptance on the other prompt lowered the skip ratio."""
    settings = {**LOWERED, "adoption": "highest", "max_steps": 400}
    most, case = 2 * N_LAYERS, Case(texts(24), settings, costs=DEAR, max_new_tokens=40, concurrency=3)
    for event in case.tuner().run(case.prompts):
        if isinstance(event, SkipRatioLowered):
            most = n_skipped_for(N_LAYERS, event.skip_ratio)
        if isinstance(event, Adopted):
            assert event.layer_set.n_skipped <= most


# stopping


def n_without_progress(events: Sequence[Event]) -> int:
    """Return the number of events without progress events, whose number depends on the clock."""
    return sum(not isinstance(event, Progress) for event in events)


def stopped_at(name: str, stop_at: int, start: str = "null", before: Sequence[Event] = ()) -> tuple[list[Event], Tuner]:
    """Return a run closed at an event, not counting progress; `start` is the snapshot after the events `before`."""
    seen, tuner = list(before), CASES[name].tuner()
    trials = Ledger(CASES[name], seen).trials()
    with closing(tuner.run(CASES[name].prompts, json.loads(start), trials)) as events:
        for event in events:
            seen.append(event)
            if n_without_progress(seen) >= stop_at and not isinstance(event, EVENTS_WITHIN_STEP):
                break
    return seen, tuner


@pytest.mark.parametrize("name", ["batches", "two-tasks", "chats"])
def test_stopped_run_keeps_its_trials(name: str) -> None:
    reference = whole(name)
    n_events = n_without_progress(reference.events)
    kept = [(0, "null", 0), *((n, start, n_without_progress(reference.events[:n])) for n, start in reference.history)]
    for stop_at in range(1, n_events, 1 + n_events // 24):
        n, start, _ = max((each for each in kept if each[2] < stop_at), key=lambda each: each[0])
        events, tuner = stopped_at(name, stop_at, start, reference.events[:n])
        tried = {event.task for event in events if isinstance(event, TrialsDone)}
        done = {event.task for event in events if isinstance(event, TaskFinished)}
        left = list(tuner.unfinished())
        assert {result.task for result in left} == tried - done
        assert all(result.record.verdict == "unmeasured" and result.stopped_because for result in left)
        trials = [trial for event in events if isinstance(event, TrialsDone) for trial in event.trials]
        assert sum(len(result.trials) for result in left) <= len(trials)


def test_concurrent_prompts_continue_where_they_were_interrupted() -> None:
    """Every prompt is completed once and as by plain decoding, wherever the run was interrupted; no trial is lost."""
    case = dataclasses.replace(CASES["chats"], concurrency=3)
    full = Ledger(case)
    assert full.live()
    finished = {
        event.prompt.id: event.completion.token_ids for event in full.events if isinstance(event, PromptFinished)
    }
    assert len(full.history) > 12
    for n_events, start in full.history[:: 1 + len(full.history) // 12]:
        ledger = Ledger(case, full.events[:n_events], start)
        assert ledger.live()
        again = [event for event in ledger.events if isinstance(event, PromptFinished)]
        assert {event.prompt.id: event.completion.token_ids for event in again} == finished
        assert len(again) == len(finished)
        assert [trial.step for trial in ledger.trials()["t"]] == list(range(len(ledger.trials()["t"])))


def test_stopped_run_can_be_continued() -> None:
    events, tuner = stopped_at("batches", 10)
    assert not any(isinstance(event, TaskFinished) for event in events)
    ledger = Ledger(CASES["batches"], events, json.dumps(tuner.snapshot()))
    assert ledger.live()
    assert outcome(ledger.events) == outcome(whole("batches").events)


def test_stopped_run_continues_with_the_tasks_that_were_not_stored() -> None:
    """This happens after a cancel between two stored tasks of a stop, and a retry."""
    events, tuner = stopped_at("two-tasks", 33)
    first = next(tuner.unfinished()).task
    assert not any(isinstance(event, TaskFinished) for event in events)
    ledger = Ledger(CASES["two-tasks"], events, json.dumps(tuner.snapshot()))
    assert ledger.live()
    assert {event.task for event in ledger.events if isinstance(event, TaskFinished)} == {"a", "b"} - {first}


# snapshots that do not fit


def broken(**changes: Any) -> tuple[dict[str, Any], dict[str, list[Trial]]]:
    n_events, start = whole("batches").history[6]
    trials = Ledger(CASES["batches"], whole("batches").events[:n_events]).trials()
    return {**json.loads(start), **changes}, trials


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(version=1), f"has version 1, but this swiftopt reads version {VERSION}"),
        (dict(n_layers=5), "model with 5 layers, but this model has 8"),
        (dict(n_prompts=5), "stream of 5 prompts"),
        (dict(tasks={"u": {}}), r"tasks \['u'\]"),
        (dict(next="x"), "cannot be read"),
        (dict(flights={"1": {"answers": ["one", "two"], "begun": None}}), "no turn left"),
        (dict(tasks={"t": {}}), "cannot be read"),
        (dict(flights={}, concluded=None), "cannot be read"),
    ],
)
def test_incompatible_snapshot_is_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    start, trials = broken(**changes)
    with pytest.raises(SettingsError, match=words) as caught:
        next(CASES["batches"].tuner().run(CASES["batches"].prompts, start, trials))
    assert "\n" not in str(caught.value)


def test_snapshot_is_refused_if_a_trial_is_missing_or_of_another_model() -> None:
    start, trials = broken()
    assert len(trials["t"]) > 1
    foreign = [dataclasses.replace(trial, layer_set=LayerSet(7)) for trial in trials["t"]]
    for stored in ({}, {"t": trials["t"][:-1]}, {"t": trials["t"][1:]}, {"t": foreign}):
        with pytest.raises(SettingsError, match="cannot be read"):
            next(CASES["batches"].tuner().run(CASES["batches"].prompts, start, stored))
