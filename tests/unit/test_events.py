"""Events and jobs to JSON and back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftopt.core.errors import StoreError
from swiftopt.core.events import (
    TYPES,
    Adopted,
    DraftingChosen,
    Event,
    FormatTried,
    PhaseChanged,
    Progress,
    PromptFinished,
    PromptStarted,
    SkipRatioLowered,
    StateChanged,
    StreamShifted,
    TaskFinished,
    TrialsDone,
    event_from_json,
    event_type,
)
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord
from swiftopt.core.requests import STATES, Job
from swiftopt.core.types import Completion, Prompt, Timings, Trial, Verdict

FIGURE = st.floats(allow_nan=False, allow_infinity=False)
PERHAPS = st.none() | FIGURE
COUNT = st.integers(0, 2**53)
WORD = st.text(min_size=1)
PHASES = st.sampled_from(["load", "profile", "accumulate", "optimise", "accelerate", "verdict"])
LAYERS = st.frozensets(st.integers(1, 10))
SETS = st.builds(LayerSet, st.just(12), LAYERS, LAYERS)
INTERVALS = st.none() | st.tuples(FIGURE, FIGURE)
TIMINGS = st.builds(Timings, FIGURE, FIGURE, FIGURE, FIGURE)
VERDICTS = st.sampled_from(["use", "plain", "unmeasured"])
TRIALS = st.builds(Trial, COUNT, SETS, WORD, FIGURE, FIGURE, st.text(), COUNT, COUNT, st.booleans(), st.floats(0, 1e6))
COMPLETIONS = st.builds(
    Completion,
    token_ids=st.lists(COUNT).map(tuple),
    text=st.text(),
    finish_reason=st.sampled_from(["stop", "length", "stop_string"]),
    method=st.sampled_from(["plain", "swift"]),
    accepted_per_position=st.lists(COUNT).map(tuple),
    refused=COUNT,
    verified_widths=st.dictionaries(st.integers(1, 99), COUNT),
    timings=TIMINGS,
    layer_set=st.none() | SETS,
)
RECORDS = st.builds(
    LayerSetRecord,
    model=WORD,
    task=WORD,
    layer_set=SETS,
    fingerprint=st.none() | WORD,
    matchness=PERHAPS,
    expected_speedup=PERHAPS,
    measured_interval=INTERVALS,
    verdict=VERDICTS,
    device=st.none() | WORD,
    settings=st.dictionaries(st.text(), COUNT | st.text()),
    created_at=st.just("2026-11-21T00:00:00Z"),
    version=st.none() | st.integers(1, 99),
    job=st.none() | st.just("0123456789ab"),
)
EVENTS: dict[type[Any], st.SearchStrategy[Any]] = {
    StateChanged: st.builds(StateChanged, st.sampled_from(STATES), COUNT, st.text(), st.text()),
    PhaseChanged: st.builds(PhaseChanged, WORD, PHASES, st.text()),
    FormatTried: st.builds(FormatTried, WORD, PERHAPS, PERHAPS, st.text(), st.text()),
    PromptStarted: st.builds(PromptStarted, WORD, WORD, COUNT, COUNT),
    Progress: st.builds(
        Progress, WORD, PHASES, COUNT, FIGURE, PERHAPS, PERHAPS, COUNT, PERHAPS, PERHAPS, FIGURE | st.integers(0, 1)
    ),
    TrialsDone: st.builds(TrialsDone, WORD, st.lists(TRIALS, max_size=3).map(tuple)),
    Adopted: st.builds(Adopted, WORD, SETS, PERHAPS, COUNT),
    SkipRatioLowered: st.builds(SkipRatioLowered, WORD, FIGURE, FIGURE),
    DraftingChosen: st.builds(
        DraftingChosen,
        WORD,
        FIGURE,
        st.integers(1, 25),
        st.lists(st.tuples(FIGURE, st.integers(1, 9)), max_size=3).map(tuple),
        FIGURE,
        FIGURE,
    ),
    StreamShifted: st.builds(StreamShifted, WORD, WORD, st.integers(0, 9)),
    PromptFinished: st.builds(PromptFinished, st.builds(Prompt, WORD, WORD), COUNT, COMPLETIONS, st.booleans()),
    TaskFinished: st.builds(
        TaskFinished,
        task=WORD,
        record=RECORDS,
        verdict=st.builds(Verdict, VERDICTS, PERHAPS, INTERVALS, PERHAPS, COUNT, st.text()),
        stopped_because=st.text(),
        trials=st.just(()),  # `TrialsDone` brought them
        timings=TIMINGS,
        n_prompts=COUNT,
        n_tokens=COUNT,
        draft_cost=FIGURE,
        plain_tok_s=PERHAPS,
        tuned_tok_s=PERHAPS,
    ),
}


def test_every_event_is_generated_here_and_has_a_name_of_its_own() -> None:
    assert set(EVENTS) == set(get_args(Event)) == set(TYPES.values())
    assert TYPES["prompt_finished"] is PromptFinished and TYPES["trials_done"] is TrialsDone


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_event_survives_json(kind: type[Any]) -> None:
    @given(EVENTS[kind])
    def survives(event: Event) -> None:
        values = json.loads(json.dumps(event.to_json(), allow_nan=False))
        assert event_from_json(event_type(event), values) == event

    survives()


def test_trials_of_a_finished_task_are_not_written_twice() -> None:
    trial = Trial(0, LayerSet(12), "random", 0.5, 0.5)
    event = TaskFinished("t", LayerSetRecord("m", "t", LayerSet(12)), Verdict("use"), "", (), Timings(), 1, 1, 1, 2, 3)
    assert replace(event, trials=(trial,)).to_json() == event.to_json()


SAMPLES: dict[str, dict[str, Any]] = {
    event_type(event): event.to_json()
    for event in (
        StateChanged("running", 1),
        PhaseChanged("t", "load"),
        PromptStarted("t", "p", 0, 1),
        Progress("t", "optimise", 3, 2.5, None, 0.5, 1, None, 1.5, 0.4),
        TrialsDone("t", (Trial(0, LayerSet(12, frozenset({3})), "random", 0.5, 0.5),)),
        Adopted("t", LayerSet(12, frozenset({3})), 0.5, 1),
        SkipRatioLowered("t", 0.4, 0.5),
        FormatTried("int4", 2.5, 0.95),
        DraftingChosen("t", 0.5, 3, ((0.5, 3), (1.0, 1)), 1.2, 1.1),
        StreamShifted("t", "acceptance fell", 3),
        PromptFinished(Prompt("p", "t"), 0, Completion((1,), "a", "stop", "plain", layer_set=LayerSet(12))),
        TaskFinished(
            "t",
            LayerSetRecord("m", "t", LayerSet(12), measured_interval=(0.9, 1.1)),
            Verdict("use", interval=(0.9, 1.1)),
            "",
            (),
            Timings(),
            1,
            1,
            0.5,
            2.5,
            3.5,
        ),
    )
}
ODD = (..., [], {}, "x", -1.5, True, [5], {"a": 1}, [[1, 2, 3]])


@pytest.mark.parametrize("name", SAMPLES)
def test_event_of_odd_values_is_read_or_refused_in_one_sentence(name: str) -> None:
    """Each value at every depth is removed or replaced; an event that can be read has values of the right types."""
    n_refused = 0
    for path in paths(SAMPLES[name]):
        for odd in ODD:
            changed = put(SAMPLES[name], path, odd)
            try:
                event = event_from_json(name, changed)
            except StoreError as error:
                n_refused += 1
                assert "\n" not in str(error) and f"the event {name!r}" in str(error)
            else:
                json.dumps(event.to_json())
                assert event_type(event) == name
    assert n_refused > len(SAMPLES[name])


@pytest.mark.parametrize("values", [[], None, 3, "x", {}, {"speed": 1}])
@pytest.mark.parametrize("name", [*TYPES, "sneezed"])
def test_event_that_is_no_event_is_refused_in_one_sentence(name: str, values: Any) -> None:
    with pytest.raises(StoreError, match=f"the event '{name}'"):
        event_from_json(name, values)


def test_figure_that_was_not_finite_is_read_as_none() -> None:
    event = event_from_json("progress", {**SAMPLES["progress"], "tok_s": None})
    assert isinstance(event, Progress) and event.tok_s is None


def paths(value: Any) -> list[tuple[Any, ...]]:
    """Yield the path of every value at any depth."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way for key, part in inner for way in [(key,), *((key, *rest) for rest in paths(part))]]


def put(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """Return a copy with another value at a path; `...` removes it."""
    copied = value.copy()
    if len(path) > 1:
        copied[path[0]] = put(value[path[0]], path[1:], odd)
    elif odd is ...:
        del copied[path[0]]
    else:
        copied[path[0]] = odd
    return copied


JOBS = st.builds(
    Job,
    id=WORD,
    kind=st.sampled_from(["tune", "noop"]),
    state=st.sampled_from(STATES),
    queue=st.none() | WORD,
    attempt=COUNT,
    fingerprint=st.text(),
    request=st.dictionaries(st.text(), COUNT | st.text() | st.none()),
    stream=st.none() | WORD,
    wanted=st.none() | st.sampled_from(["pause", "stop"]),
    worker=st.none() | WORD,
    error=st.none() | WORD,
    progress=st.none() | st.dictionaries(st.text(), FIGURE),
    n_prompts=COUNT,
    n_outputs=COUNT,
    layer_sets=st.lists(RECORDS.map(lambda record: replace(record, job=None)), max_size=3).map(tuple),
    started_at=st.none() | WORD,
    finished_at=st.none() | WORD,
)


@given(JOBS)
def test_job_survives_json_with_its_layer_sets(job: Job) -> None:
    values = json.loads(json.dumps(job.to_json(), allow_nan=False))
    assert values["schema"] == Job.SCHEMA
    assert Job.from_json(values, "here") == job


def test_job_of_a_newer_service_is_read_without_what_is_new() -> None:
    job = Job("a", "noop", "queued", None, 1, "", {})
    assert Job.from_json({**job.to_json(), "mood": "good"}, "here") == job


def test_job_whose_layer_set_cannot_be_read_is_refused() -> None:
    job = Job("a", "noop", "queued", None, 1, "", {})
    with pytest.raises(StoreError, match=r"the answer of the server: layer_sets\.0: it lacks 'schema'"):
        Job.from_json({**job.to_json(), "layer_sets": [{"skip_attn": []}]}, "the answer of the server")
