"""`bench throughput`: requests that arrive together or at a rate, plainly and with drafts; and `bench serve`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from httpx2 import Client, MockTransport, Response
from tiny_files import save

from swiftopt.bench import commands as bench
from swiftopt.bench import serving, throughput
from swiftopt.cli.main import run
from swiftopt.core.errors import ServiceUnreachable
from swiftopt.decoding.engine import Engine


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    lines = "".join(f'{{"prompt": "w{i} w{i + 1} w{i}", "id": "p{i}"}}\n' for i in range(2, 7))
    (tmp_path / "s.jsonl").write_text(lines)
    model = ["--model", str(save(tmp_path / "model")), "--dtype", "float32"]
    return ["bench", "throughput", *model, "--stream", str(tmp_path / "s.jsonl"), "--db", str(tmp_path / "a.db")]


def test_every_concurrency_is_measured_plainly_and_with_drafts(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times count steps of the engine, so that they do not depend on the machine."""
    n_steps = 0

    class CountingEngine(Engine):
        def step(self) -> Iterator[Any]:
            nonlocal n_steps
            n_steps += 1
            return super().step()

    monkeypatch.setattr(throughput, "Engine", CountingEngine)
    monkeypatch.setattr(throughput, "perf_counter", lambda: float(n_steps))
    options = ["--concurrency", "1,3", "--rounds", "2", "--max-new-tokens", "24", "--method", "prompt-lookup", "--json"]
    assert run([*command, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "swiftopt.bench-throughput/1" and report["rate"] is None
    assert [row["concurrency"] for row in report["results"]] == [1, 3]
    for row in report["results"]:
        assert row["equal"] == row["compared"] == 2 * 5 and len(row["ratios"]) == 2
        for way in (row["plain"], row["drafting"]):
            assert way["tok_s"] > 0
            assert 0 < way["first_token_s"]["p50"] <= way["first_token_s"]["p95"] <= way["first_token_s"]["p99"]
            assert 0 < way["per_token_s"]["p50"] <= way["per_token_s"]["p99"]
    alone, together = (row["plain"]["first_token_s"]["p50"] for row in report["results"])
    # One at a time, the third of five requests waits for two answers of 24 tokens. Three at a time, it starts at once.
    assert alone > 2 * 23 and together <= 3


def test_requests_arrive_at_a_rate_and_the_table_fits_a_terminal(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*command, "--concurrency", "2", "--rate", "50", "--rounds", "1", "--max-new-tokens", "4"]) == 0
    out = capsys.readouterr().out
    assert "plain" in out and "drafting: adaptive; 50 requests arrive per second" in out and "5 of 5" in out
    assert max(map(len, out.splitlines())) <= 80


def test_single_tokens_have_no_time_per_token(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [*command, "--concurrency", "1", "--rounds", "1", "--max-new-tokens", "1", "--svg", str(tmp_path / "t.svg")]
    assert run([*short, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["results"]
    assert row["plain"]["per_token_s"] == {"p50": None, "p95": None, "p99": None} and row["equal"] == 5
    assert run(short) == 0 and "–" in capsys.readouterr().out and "ms per token" in (tmp_path / "t.svg").read_text()


def test_ctrl_c_shows_the_finished_concurrencies(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupting(line: str) -> None:
        if line.startswith("2 at once, drafting"):
            raise KeyboardInterrupt

    monkeypatch.setattr(bench, "note", interrupting)
    options = ["--rounds", "1", "--max-new-tokens", "4", "--method", "prompt-lookup", "--json"]
    assert run([*command, "--concurrency", "1,2,3", *options]) == 130
    report = json.loads(capsys.readouterr().out)
    assert [row["concurrency"] for row in report["results"]] == [1] and report["interrupted"]
    assert run([*command, "--concurrency", "2", *options]) == 130 and capsys.readouterr().out == ""


def test_ctrl_c_shows_the_requests_that_a_server_answered_both_ways(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, choice = {"id": "model", "device": "cpu", "dtype": "float32"}, {"choices": [{"text": "w1"}]}
    responses = {
        "/v1/models": {"data": [model]},
        "/v1/tuning": {"models": {"model": {"tasks": []}}},
        "/v1/completions": {**choice, "usage": {"completion_tokens": 1}},
    }
    transport = MockTransport(lambda request: Response(200, json=responses[request.url.path]))
    monkeypatch.setattr(serving, "served", lambda *_: Client(transport=transport, base_url="http://server"))

    def interrupting(line: str) -> None:
        if line.startswith("request 2 of"):
            raise KeyboardInterrupt

    monkeypatch.setattr(bench, "note", interrupting)
    serve = ["bench", "serve", *command[2:], "--max-new-tokens", "4"]
    assert run([*serve, "--window", "1", "--json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert report["interrupted"] and report["prompts"] == report["equal"] == len(report["windows"]) == 2
    assert run([*serve, "--concurrency", "2", "--window", "1", "--stay"]) == 130
    assert "equal to plain decoding: 2 of 2" in capsys.readouterr().out


def test_benchmark_fails_with_the_reason_why_an_engine_cannot_load() -> None:
    states = iter(["it is loading the model", "device cuda was asked for"])
    transport = MockTransport(lambda request: Response(503, json={"engines": {"model": next(states)}}))
    with (
        Client(transport=transport, base_url="http://server") as client,
        pytest.raises(ServiceUnreachable, match=r"the engine does not start \(device cuda was asked for\)"),
    ):
        serving._wait(client, SimpleNamespace(poll=lambda: None), lambda step: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--concurrency=0,2", "not a list of numbers"),
        ("--rate=0", "0.0 is not in the range"),
        ("--rate=nan", "'nan' is not a finite number"),
    ],
)
def test_numbers_out_of_range_are_refused_in_a_sentence(
    command: list[str], option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, option]) == 2
    assert words in capsys.readouterr().err
