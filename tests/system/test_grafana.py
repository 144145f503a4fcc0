"""deploy/grafana.json: a board whose every metric and label is one that an app tells at /metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from api import submission
from starlette.testclient import TestClient

import swiftopt
from swiftopt.core.events import ModelTuning, PromptFinished, SearchStatus, ShiftStatus, TaskTuning
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.requests import Lease, ServedModel
from swiftopt.core.types import Completion, Prompt
from swiftopt.server.app import create_app
from swiftopt.server.engines import Engines
from swiftopt.server.metrics import Period
from swiftopt.store import Store
from swiftopt.worker.queue import JobService, RedisQueue

BOARD: dict[str, Any] = json.loads((Path(swiftopt.__file__).parent / "deploy/grafana.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = BOARD["panels"]
DRAFTED = Completion(
    (1, 2, 3), "abc", "length", "swift", n_prompt_tokens=4, target_passes=1, first_tokens=1, drafted=2, accepted=1,
    accepted_per_position=(1,), by_draft_length={2: (0, 1)},
)  # fmt: skip
LEARNT = TaskTuning(
    "notes", "drafts", 0.0, "use", 1, None, LayerSet(4), 9, "rounds", 1.8, (1.7, 1.9), ShiftStatus(), 1, 3, 1.0, 0.1,
    0.5, 0.4, 0.0, 5.0, 9.0, 0.5, 2.0, SearchStatus(8, 0.2),
)  # fmt: skip


def queries() -> list[tuple[str, str, str]]:
    """(panel, expression, legend) of all that the board asks."""
    targets = [(panel["title"], target) for panel in PANELS for target in panel.get("targets", ())]
    return [(title, target["expr"], target["legendFormat"]) for title, target in targets]


def asked() -> str:
    """All expressions, those of the variables as well."""
    variables = [each["definition"] for each in BOARD["templating"]["list"] if each["type"] == "query"]
    return "\n".join([*variables, *(expression for _, expression, _ in queries())])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    """/metrics of an app with a database, a Redis and a model, each of which has counted something."""
    valkey = request.getfixturevalue("valkey_server")
    valkey.start()
    queue = RedisQueue(valkey.url)
    engines = Engines([ServedModel("tiny", "/models/tiny")], 8)
    engines.of["tiny"].tuning = ModelTuning(tasks=(LEARNT,))
    engines.metrics.add("tiny", "notes", Period.of(DRAFTED, 0.1, 0.2), 0.2, DRAFTED.finish_reason)
    with Store.open(str(tmp_path_factory.mktemp("board") / "a.db")) as store:
        client = TestClient(create_app(store, JobService(store, queue), queue=queue, engines=engines))
        job = client.post("/v1/jobs", json=submission()).json()["id"]
        claim = store.jobs.claim(Lease(job, 1), "w1")
        assert claim is not None
        store.jobs.checkpoint(claim.lease, 1, [PromptFinished(Prompt("0", "notes", "x"), 0, DRAFTED)], None)
        yield client.get("/metrics").text
    queue.close()


def test_board_has_unique_ids_titles_and_names() -> None:
    assert BOARD["id"] is None  # else Grafana looks for a board that is there
    assert BOARD["uid"] and BOARD["title"] and BOARD["schemaVersion"] >= 36
    for values in ([panel["id"] for panel in PANELS], [panel["title"] for panel in PANELS]):
        assert len(values) == len(set(values)) > 20
    assert [each["name"] for each in BOARD["templating"]["list"]] == ["datasource", "model", "task"]


def test_panels_stand_side_by_side_and_within_the_width() -> None:
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["w"] > 0 and place["x"] + place["w"] <= 24 and place["h"] > 0
    for one, other in combinations(PANELS, 2):
        a, b = one["gridPos"], other["gridPos"]
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (one["title"], other["title"])


def test_every_panel_uses_the_chosen_data_source_and_has_a_description() -> None:
    for panel in PANELS:
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
        for place in (panel, *panel["targets"]):
            assert place["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        names = [target["refId"] for target in panel["targets"]]
        assert len(names) == len(set(names))


def test_brackets_close_and_variables_are_known() -> None:
    known = {"model", "task", "__rate_interval", "__range"}
    for title, expression, _ in queries():
        assert all(expression.count(a) == expression.count(b) for a, b in ("()", "[]", "{}")), title
        assert set(re.findall(r"\$(\w+)", expression)) <= known, title


def test_every_metric_of_the_board_exists(told: str) -> None:
    names = set(re.findall(r"(?:vllm:|swiftopt_)\w+", asked()))
    kinds = dict(line.split()[2:4] for line in told.splitlines() if line.startswith("# TYPE "))
    parts = {f"{name}_bucket" for name, kind in kinds.items() if kind == "histogram"}
    assert len(names) > 25
    assert names - {*kinds, *parts} == set()


def test_counters_are_queried_by_rate_and_gauges_by_value(told: str) -> None:
    kinds = dict(line.split()[2:4] for line in told.splitlines() if line.startswith("# TYPE "))
    for title, expression, _ in queries():
        for asked_for, name in re.findall(r"(\w*)\(((?:vllm:|swiftopt_)\w+)", expression.replace(" (", "(")):
            is_gauge = kinds.get(name) == "gauge"
            assert is_gauge != (asked_for in ("rate", "increase")), (title, name)


def test_every_label_of_the_board_exists(told: str) -> None:
    labels: dict[str, set[str]] = {}
    for line in told.splitlines():
        if sample := re.match(r"([\w:]+)(?:\{(.*)\})? \S+$", line):
            labels.setdefault(sample[1], set()).update(re.findall(r"(\w+)=\"", sample[2] or ""))
    n_checked = 0
    for title, expression, legend in queries():
        wanted = [
            (name, re.findall(r"(\w+)=~", inside)) for name, inside in re.findall(r"([\w:]+)\{(.*?)\}", expression)
        ]
        by = re.findall(r"by \((.*?)\) \((?:rate\(|increase\(|rate \(|increase \()?([\w:]+)", expression)
        wanted += [(name, names.split(", ")) for names, name in by]
        for name, names in wanted:
            if name in labels:  # of workers there is none here
                assert set(names) <= labels[name], (title, name)
                n_checked += 1
        shown = {label for names, _ in by for label in names.split(", ")}
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= shown, title
    assert n_checked > 40


def test_board_has_the_panels_of_the_dashboard() -> None:
    titles = {panel["title"] for panel in PANELS}
    assert {
        "Tokens per second", "Ratio to plain decoding", "Requests running and waiting", "Time to first token",
        "Time per token", "Acceptance", "Acceptance by position", "Tokens per round that drafted", "Cache hits",
        "Drafts on or off", "Share of the search", "Jobs by state", "Workers", "Queue depth", "Database and Redis",
        "Answers by status",
    } <= titles  # fmt: skip
