"""The first page: its headline, its curve and its alarms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from api import client_of, filled
from fakes import READY
from starlette.testclient import TestClient

from swiftopt.core.errors import ServiceUnreachable
from swiftopt.core.events import CostStatus, ModelTuning, SearchStatus, ShiftStatus, TaskTuning
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.messages import Loading
from swiftopt.core.requests import ServedModel
from swiftopt.core.rounds import RequestRounds
from swiftopt.core.types import Completion, Timings
from swiftopt.server.app import create_app
from swiftopt.server.dashboard.headline import ServedNow, headline, saved_share
from swiftopt.server.dashboard.overview import alarms, recent_periods, speed_chart, stretches
from swiftopt.server.dashboard.traffic import LEAST_POINTS, periods_with_data
from swiftopt.server.engines import EngineProcess, Engines
from swiftopt.server.metrics import History, Period
from swiftopt.server.settings import ServerSettings
from swiftopt.store import Store
from swiftopt.worker.queue import JobService

NOT_JUDGED = TaskTuning(
    task="notes",
    in_use="drafts",
    since=0.0,
    verdict="unmeasured",
    version=None,
    pinned=None,
    layer_set=LayerSet(4),
    pairs=3,
    timed=None,
    ratio=None,
    interval=None,
    shifts=ShiftStatus(),
    requests=5,
    tokens=100,
    seconds=10.0,
    compared_s=1.0,
    drafted_s=8.0,
    saved_s=None,
    saved_before_s=0.0,
    plain_tok_s=None,
    drafted_tok_s=None,
    acceptance_rate=None,
    mean_generated_length=None,
    search=SearchStatus(0, 0.0),
)
CODE = replace(NOT_JUDGED, task="code", ratio=1.28, interval=(1.1, 1.5), verdict="use", saved_s=2.24)
SUMMARY = replace(CODE, task="summary", ratio=1.69, saved_s=10.0)
UNSURE = replace(CODE, task="unsure", ratio=1.01, interval=(0.9, 1.1), verdict="unmeasured", saved_s=0.01)
OFF = replace(NOT_JUDGED, task="chat", in_use="plain", ratio=0.91, interval=(0.8, 0.95), verdict="plain", saved_s=-0.5)
PINNED = replace(NOT_JUDGED, task="fixed", in_use="plain", pinned="plain")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with filled(str(tmp_path / "a.db")) as store:
        yield store


def state(*tasks: TaskTuning, tokens: int = 1265, exact: int | None = None, **served: Any) -> ServedNow:
    engine = EngineProcess(ServedModel(**{"name": "tiny", "path": "tiny", **served}), 1)
    engine.about = READY
    total = Period(0, requests=9 * (tokens > 0), tokens=tokens, exact=tokens if exact is None else exact)
    return ServedNow(engine, ModelTuning(tasks=tasks), Period(0), total)


def loading() -> ServedNow:
    found = state(tokens=0)
    found.engine.about, found.engine.reason = None, "it is loading the model: reading its weights"
    return found


ALL_EQUAL = "1,265 tokens served, all equal to plain decoding."


@pytest.mark.parametrize(
    ("served", "jobs", "sentence"),
    [
        (
            [state(CODE, SUMMARY)],
            {},
            f"Drafting saves 38 % of decoding time: summary 1.69x, code 1.28x. {ALL_EQUAL}",
        ),
        (
            [state(UNSURE)],
            {},
            f"Drafting has saved no time so far: unsure 1.01x (not certain: 0.90–1.10). {ALL_EQUAL}",
        ),
        ([state(replace(UNSURE, ratio=0.8, saved_s=-2.0))], {}, "Drafting costs 25 % of decoding time: unsure 0.80x"),
        (
            [state(replace(UNSURE, saved_before_s=10.0))],
            {},
            "Drafting has saved 50 % of decoding time, most of it with earlier drafts; now: unsure 1.01x",
        ),
        ([state(OFF)], {}, f"Drafting is off: chat (drafts 0.91x). {ALL_EQUAL}"),
        ([state(PINNED)], {}, f"Drafting is off: fixed (pinned). {ALL_EQUAL}"),
        ([state(SUMMARY, OFF)], {}, "summary 1.69x. It is off for chat (drafts 0.91x). 1,265"),
        ([state(NOT_JUDGED)], {}, f"Not measured yet: notes (3 pairs of timings so far). {ALL_EQUAL}"),
        ([state(NOT_JUDGED, OFF)], {}, "Drafting is off for chat (drafts 0.91x). Not measured yet: notes"),
        ([state(tokens=0)], {}, "tiny is ready. Nothing has been served yet."),
        ([state(NOT_JUDGED, tokens=0)], {}, "tiny is ready. Nothing has been served yet."),
        ([loading()], {}, "tiny: it is loading the model: reading its weights. Nothing has been served yet."),
        ([state(tune=False)], {}, f"With --no-tune the saving of drafts is not measured. {ALL_EQUAL}"),
        ([state(exact=1000)], {}, "1,265 tokens served, 1,000 of them proven equal to plain decoding."),
        ([state(CODE), state(SUMMARY, name="other")], {}, "other/summary 1.69x, tiny/code 1.28x. 2,530 tokens served"),
        ([state(*[replace(CODE, task=f"t{n}") for n in range(7)])], {}, "t3 1.28x and 3 more."),
        ([], {}, "No model is served here."),
        ([], {"running": 1, "queued": 2, "succeeded": 9}, "No model is served here. Jobs: 1 runs, 2 wait."),
    ],
)
def test_headline_says_what_is_the_case(served: list[ServedNow], jobs: dict[str, int], sentence: str) -> None:
    assert sentence in headline(served, jobs)


def test_task_without_a_request_since_the_start_is_not_named() -> None:
    assert "code" not in headline([state(replace(CODE, requests=0), SUMMARY)], {})


def test_saved_share_counts_comparisons_and_earlier_drafts_and_no_task_that_was_not_judged() -> None:
    assert saved_share([NOT_JUDGED]) is None
    assert saved_share([replace(CODE, saved_s=5.0, saved_before_s=5.0), NOT_JUDGED]) == pytest.approx(0.5)


def test_alarms_name_what_is_away_costs_measured_beside_other_work_and_tasks_without_drafts() -> None:
    disturbed = state(OFF, PINNED)
    costs = CostStatus("disturbed", "it ran beside 2 others", 256, 0.1)
    disturbed = replace(disturbed, tuning=replace(disturbed.tuning, costs=costs))
    down = replace(loading(), tuning=ModelTuning(unavailable="gone"))
    found = alarms([disturbed, down], ["The database is unavailable", ""])
    assert found[:2] == [
        "tiny does not serve: it is loading the model: reading its weights",
        "The database is unavailable",
    ]
    assert "measured while other programs ran (it ran beside 2 others)" in found[2]
    assert found[3].startswith("Drafting is off for tiny/chat since") and len(found) == 4, "a pin is no alarm"
    quiet = replace(disturbed, tuning=ModelTuning(costs=replace(costs, quality="quiet")))
    assert alarms([quiet], []) == []


def test_page_tells_of_an_unreachable_redis_and_of_a_full_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Away:
        def ping(self) -> None:
            raise ServiceUnreachable("away")

    client = client_of(store, queue=Away())  # type: ignore[arg-type]
    monkeypatch.setattr(client.app.state.swiftopt.storage, "problem", lambda: "the disk is full: free space")  # type: ignore[attr-defined]
    page = client.get("/").text
    assert "Redis is unreachable, jobs wait" in page and "Nothing can be stored: the disk is full" in page
    assert page.index('class="alarm"') < page.index('class="headline"')


def test_health_tells_how_far_the_weights_are_read(store: Store) -> None:
    told: list[tuple[str, str]] = []
    engines = Engines([ServedModel("tiny", "tiny")], on_state=lambda name, state: told.append((name, state)))
    app = create_app(store, JobService(store, None), ServerSettings(requests_per_min=0), engines=engines)
    for share in (7, 40):
        engines.of["tiny"]._receive(Loading(f"reading tiny, {share} % of the weights"))
        answer = TestClient(app).get("/health")
        expected = f"it is loading the model: reading tiny, {share} % of the weights"
        assert (answer.status_code, answer.json()["engines"]) == (503, {"tiny": expected})
        assert told[-1] == ("tiny", expected)


# --- the curve


def ended(plain: tuple[int, float], drafted: tuple[int, float]) -> tuple[Completion, RequestRounds]:
    n_tokens = plain[0] + drafted[0]
    completion = Completion((0,) * n_tokens, "", "length", "adaptive", exact=True, timings=Timings(draft_s=1.0))
    return completion, RequestRounds(n_tokens, *plain, *drafted)


def test_first_page_draws_the_point_of_a_single_request(store: Store) -> None:
    engines = Engines()
    completion, rounds = ended((5, 1.0), (30, 2.0))
    engines.metrics.add("tiny", "code", Period.of(completion, 0.5, 3.5, rounds), 3.5, "stop")
    app = create_app(store, JobService(store, None), ServerSettings(requests_per_min=0), engines=engines)
    page = unescape(TestClient(app).get("/").text)
    assert "On average with drafts 15.0, plain 5.0 tokens per second." in page
    for name in ("drafted", "plain"):
        assert len(re.findall(rf'<path class="{name} dots" d="M[\d.]+ [\d.]+h0"/>', page)) == 1
    assert re.search(r'text-anchor="middle">\d\d:\d\d', page), "the axis is a clock's"
    empty = create_app(store, JobService(store, None), ServerSettings(requests_per_min=0))
    assert "<figure" not in TestClient(empty).get("/").text


def test_lines_of_the_curve_end_where_nothing_was_measured() -> None:
    assert stretches([(0.0, 1.0), (60.0, 2.0), (180.0, 3.0)], 60) == [[(0.0, 1.0), (60.0, 2.0)], [(180.0, 3.0)]]
    periods = [Period(60 * n, plain_tokens=n % 3, plain_s=1.0 if n % 3 else 0.0) for n in range(6)]
    assert str(speed_chart(periods)).count('<path class="plain" d="M') == 3, "two stretches and the legend"
    assert speed_chart([Period(0), Period(60)]) is None


def test_hour_that_is_shown_is_the_one_that_has_data(monkeypatch: pytest.MonkeyPatch) -> None:
    history, now = History(), 1_000_000.0
    monkeypatch.setattr("time.time", lambda: now)
    assert len(periods_with_data(history, 3600, 60)) == LEAST_POINTS, "nothing has ended"
    completion, rounds = ended((5, 1.0), (30, 2.0))
    history.add("a", "code", Period.of(completion, 0.5, 3.5, rounds))
    only = periods_with_data(history, 3600, 60)
    assert recent_periods(history)[1].at - recent_periods(history)[0].at == 10
    assert len(only) == LEAST_POINTS and only[-1].drafted_tok_s == 15.0 and only[-1].plain_tok_s == 5.0
    now += 1800
    history.add("a", "notes", Period.of(completion, 0.5, 3.5, rounds))
    both = periods_with_data(history, 3600, 60)
    assert len(both) == 32 and [n for n, period in enumerate(both) if period.requests] == [1, 31]
    assert recent_periods(history)[1].at - recent_periods(history)[0].at == 60, "ten minutes have not all of it"
    now += 2 * 3600
    earlier = periods_with_data(history, 3600, 60, "a", "code")
    assert earlier[-1].requests == 1 and earlier[-1].at < now - 2.4 * 3600, "the hour ends with its last request"
    assert sum(period.requests for period in periods_with_data(history, 3600, 60)) == 2
