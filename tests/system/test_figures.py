"""Figures have one definition: after a served stream, pages, `/v1/tuning`, `/metrics` and commands agree."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from api import Served, serving, token, until_ready
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from tiny_files import save

import swiftopt
from swiftopt.cli.main import swiftopt as program
from swiftopt.core.events import TaskTuning, Tuning
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord
from swiftopt.core.requests import ServedModel
from swiftopt.core.types import Completion, Timings
from swiftopt.models.costs import machine_name
from swiftopt.server.app import create_app
from swiftopt.server.dashboard import moment, number, percent, seconds, tok_s
from swiftopt.server.engines import Engines
from swiftopt.server.metrics import Period
from swiftopt.server.settings import ServerSettings
from swiftopt.store import Store
from swiftopt.worker.queue import JobService

START_S = 60
TEXT = "w3 w5 w3 w5 w7"
# Tasks, and what a request says of its plan: a search on "notes" might find another set, and drop what is known of one.
STREAM = [("code", {}), ("notes", {"tune": False})] * 8
OTHERS = [("notes", {"tune": False}), ("code", {"plan": "plain"}), ("rare", {"plan": "plain"})]
EVIDENCE = tuple((8, 1.0, 40, 2.0 + 0.02 * i) for i in range(6))  # a gain of 2.45


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def database(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a database with a plan for the task "notes", as stored by a server."""
    url = str(tmp_path_factory.mktemp("database") / "a.db")
    runtime = swiftopt.load(str(folder), dtype="float32").runtime
    of_model = {"fingerprint": runtime.info.fingerprint, "device": machine_name(runtime), "dtype": "float32"}
    measured = {"measured_speedup": 2.4390, "measured_interval": (2.3, 2.5), "verdict": "use", "evidence": EVIDENCE}
    drafts = LayerSet(runtime.n_layers).filled("int4")
    with Store.open(url) as store:
        store.remember_model(runtime.info)
        store.add_layer_set(
            LayerSetRecord("tiny", "notes", drafts, settings={"method": "adaptive"}, **of_model, **measured)
        )
    return url


@pytest.fixture(scope="module")
def server(folder: Path, database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a server that has answered a stream, other requests, and a playground's request."""
    options = ["--model", f"tiny={folder}", "--dtype", "float32", "--rate", "0", "--threads", "1"]
    with serving(database, tmp_path_factory.mktemp("served") / "log", *options) as served:
        until_ready(served)
        for task, more in [*STREAM, *OTHERS]:
            body = {
                "model": "tiny",
                "prompt": TEXT,
                "max_tokens": 40,
                "ignore_eos": True,
                "swiftopt": {"task": task, **more},
            }
            answer = served.client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
        form = {"model": "tiny", "task": "code", "prompt": TEXT, "form": "text", "tokens": "30", "temperature": "0"}
        form |= {"token": token(served.client.get("/playground").text), "plan": "", "after": ""}
        tried = served.client.post("/playground", data=form, follow_redirects=True)
        until = time.monotonic() + START_S
        while "Both texts are the same" not in served.client.get(tried.url).text:
            assert time.monotonic() < until, tried.text
            time.sleep(0.1)
        yield served


def tasks_of(server: Served) -> dict[str, TaskTuning]:
    found = Tuning.from_json(server.client.get("/v1/tuning").json())
    return {task.task: task for task in found.models["tiny"].tasks}


def text(client: Any, path: str, **query: object) -> str:
    """Return the text of a page."""
    found = client.get(f"{path}?{urlencode(query)}" if query else path)
    assert found.status_code == 200, found.text
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", found.text)))


def metrics(client: Any) -> dict[tuple[str, str], float]:
    """Return the samples of `/metrics` by name and task, or by name and position or reason if there is no task."""
    return {
        (
            sample.name,
            next((sample.labels[key] for key in ("task", "position", "finished_reason") if key in sample.labels), ""),
        ): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }


def saved(task: TaskTuning) -> str:
    before = f" ({seconds(task.saved_before_s)} before)" if task.saved_before_s else ""
    return seconds(task.saved_s) + before


def interval(task: TaskTuning) -> str:
    return "–" if task.interval is None else f"{number(task.interval[0])}–{number(task.interval[1])}"


def test_figures_of_a_task_agree_with_each_other(server: Served) -> None:
    tasks = tasks_of(server)
    assert tasks["notes"].version == 1 and tasks["notes"].pairs >= len(EVIDENCE)
    for task in tasks.values():
        assert task.compared_s <= task.seconds
        assert task.search.share == pytest.approx(task.search.seconds / task.seconds if task.seconds else 0, abs=1e-3)
        if task.ratio is None:
            assert (task.timed, task.saved_s, task.plain_tok_s) == (None, None, None)
            continue
        assert task.drafted_tok_s is not None and task.plain_tok_s is not None and task.saved_s is not None
        assert task.ratio == pytest.approx(task.drafted_tok_s / task.plain_tok_s, rel=1e-3)
        assert task.saved_s == pytest.approx(task.drafted_s * (task.ratio - 1), abs=2e-3)
    assert any(task.ratio is not None for task in tasks.values())


def test_every_page_counts_the_requests_and_tokens_of_clients(server: Served) -> None:
    """Counted however they were decoded, without the playground's, from which nothing is learnt."""
    tasks, found = tasks_of(server), metrics(server.client)
    n = {task: sum(own == task for own, _ in [*STREAM, *OTHERS]) for task in ("code", "notes", "rare")}
    assert {name: task.requests for name, task in tasks.items()} == n
    assert {name: task.tokens for name, task in tasks.items()} == {name: 40 * each for name, each in n.items()}
    whole = sum(n.values())
    assert found["vllm:generation_tokens_total", ""] == 40 * whole
    assert found["vllm:request_success_total", "length"] == whole
    assert f"{number(40 * whole, 0)} tokens served" in text(server.client, "/")
    assert f"{whole} requests, {number(40 * whole, 0)} tokens" in text(server.client, "/traffic", span="6 hours")
    only = text(server.client, "/traffic", span="6 hours", model="tiny", task="code")
    assert f"{n['code']} requests, {number(40 * n['code'], 0)} tokens" in only


def test_pages_and_metrics_show_the_figures_of_tuning(server: Served) -> None:
    tasks, found = tasks_of(server), metrics(server.client)
    overview, searches = text(server.client, "/"), text(server.client, "/searches")
    for name, task in tasks.items():
        low, high = task.interval or (None, None)
        for metric, value in {
            **{"drafts": task.in_use == "drafts", "version": task.version, "ratio": task.ratio},
            **{"ratio_low": low, "ratio_high": high, "plain_tokens_per_second": task.plain_tok_s},
            **{"drafted_tokens_per_second": task.drafted_tok_s, "saved_seconds": task.all_saved_s},
            **{"requests_total": task.requests, "tokens_total": task.tokens},
            **{"decode_seconds_total": task.seconds, "search_seconds_total": task.search.seconds},
        }.items():
            assert found.get((f"swiftopt_serving_{metric}", name)) == value, metric
        row = [name, number(task.ratio, 2, "x"), saved(task), task.in_use, moment(task.since), interval(task)]
        row += [str(task.pairs), str(task.requests), number(task.tokens, 0), str(task.search.trials)]
        assert " ".join(row) in overview
        assert f"{percent(task.search.share, 1)} of {seconds(task.seconds)} of decoding" in searches
    assert f"Time saved {seconds(sum(task.all_saved_s for task in tasks.values()))} " in overview


def test_page_of_a_plan_and_commands_show_its_figures(server: Served, database: str) -> None:
    task = tasks_of(server)["notes"]
    page = text(server.client, "/plans/task", model="tiny", task="notes")
    assert f"Ratio to plain {number(task.ratio, 2, 'x')} ({interval(task)}): " in page
    speeds = f"{tok_s(task.drafted_tok_s)} tokens per second with drafts, {tok_s(task.plain_tok_s)} plainly"
    assert f"{speeds}, decoding alone, in the latest {task.pairs} pairs" in page
    assert f"{task.requests} requests, {task.tokens} tokens; time saved: {saved(task)}." in page
    listed = json.loads(CliRunner().invoke(program, ["layers", "list", "--json", "--db", database]).stdout)
    best = json.loads(CliRunner().invoke(program, ["layers", "best", "tiny/notes", "--json", "--db", database]).stdout)
    looked_up = server.client.get("/v1/layer-sets/tiny/notes").json()
    plans = text(server.client, "/plans")
    for record in (next(each for each in listed["layer_sets"] if each["version"] == task.version), best, looked_up):
        low, high = record["measured_interval"]
        stored = f"{number(record['measured_speedup'], 2, 'x')} {number(low)}–{number(high)}"
        assert stored in plans and stored in page


def test_traffic_overview_and_metrics_agree_on_finished_requests(tmp_path: Path) -> None:
    """Speeds, acceptance and waits of the last minute agree on the traffic page and in `/metrics`."""
    engines = Engines([ServedModel("tiny", "/models/tiny")], 8)
    for n, accepted, waited in ((40, 6, 0.5), (1, 0, 0.2), (80, 3, 1.5)):
        spent = Timings(0.1, 0.2 * n, 0.3 * n, 0.5)
        counts = (
            {"drafted": 8, "accepted": accepted, "by_draft_length": {8: (0,) * accepted + (1,)}} if accepted else {}
        )
        done = Completion(
            (1,) * n, "", "length", "adaptive", first_tokens=1, n_prompt_tokens=10, n_cached=4, timings=spent,
            accepted_per_position=(1,) * accepted, **counts,
        )  # fmt: skip
        total_s = waited + 0.02 * n
        engines.metrics.add("tiny", "code", Period.of(done, waited, total_s), total_s, done.finish_reason)
    with Store.open(str(tmp_path / "a.db")) as store:
        app = create_app(store, JobService(store, None), ServerSettings(requests_per_min=0), engines=engines)
        client = TestClient(app)
        found, overview = metrics(client), text(client, "/")
        traffic = client.get("/traffic?span=6 hours").text
    whole = engines.metrics.history.total("tiny")
    decode = tok_s(118 / (0.5 * 121))
    assert f"Tokens per second of decoding, last minute {decode} " in overview
    assert f"3 requests, 121 tokens, decoded at {decode} tokens per second of one request" in traffic
    accepted = (
        found["vllm:spec_decode_num_accepted_tokens_total", ""] / found["vllm:spec_decode_num_draft_tokens_total", ""]
    )
    assert (
        accepted == whole.acceptance_rate == 9 / 16 and f"Drafts accepted, last minute {percent(9 / 16)} " in overview
    )
    [shown] = set(re.findall(r"accepted / drafted</th>.*?<td class=\"n\">(0\.\d+)</td>", traffic, re.S))
    assert float(shown) == pytest.approx(9 / 16, abs=1e-4)
    for name, mean in (
        ("time_to_first_token", whole.mean_first_token_s),
        ("inter_token_latency", whole.mean_between_tokens_s),
    ):
        total, n = (found[f"vllm:{name}_seconds_{part}", ""] for part in ("sum", "count"))
        assert total / n == pytest.approx(mean)
        assert f'<td class="n">{round(total / n, 4)}</td>' in traffic
    drafts = found["vllm:spec_decode_num_drafts_total", ""]
    by_position = [
        found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(place)] / drafts for place in range(6)
    ]
    assert by_position == whole.accepted_by_position == [1.0] * 3 + [0.5] * 3
