"""Logs as text and as JSON, and the request id in lines of server and engine."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
from api import Served, client_of, filled, serving
from tiny_files import save

from swiftopt.cli.main import run
from swiftopt.core import logs
from swiftopt.core.errors import SettingsError
from swiftopt.core.logs import (
    MOST_ID_CHARACTERS,
    REMIND_S,
    JsonFormatter,
    Outage,
    TextFormatter,
    about_request,
    valid_request_id,
)
from swiftopt.core.messages import Decode, Detokenize, encode
from swiftopt.core.requests import CompletionRequest, JobSpec, ServedModel
from swiftopt.server.settings import KeyRing, new_key
from swiftopt.worker.queue import JobService, RedisQueue
from swiftopt.worker.serving import EngineHost, MessageWriter

ID = "trace/7f3a:1=="
BODY = {"model": "tiny", "prompt": "w3 w5 w3", "max_tokens": 4}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[StringIO]:
    """Capture a JSON log; the process's log and hooks are restored afterwards."""
    for owner, name in ((sys, "excepthook"), (threading, "excepthook")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    root, lines = logging.getLogger(), StringIO()
    before, level = root.handlers[:], root.level
    root.handlers[:] = []
    try:
        logs.start("json", logging.INFO, logging.StreamHandler(lines))
        yield lines
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = before
        root.setLevel(level)


def objects(text: str) -> list[dict[str, Any]]:
    """Return the log's lines, each as an object."""
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "tiny")


def options(folder: Path) -> list[str]:
    return ["--model", f"tiny={folder}", "--dtype", "float32", "--rate", "0", "--threads", "1"]


def test_an_outage_is_logged_again_only_for_another_reason_or_after_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    now_s = 1000.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now_s)
    outage = Outage(logging.getLogger("part"), "part=waiting", "part=working")
    outage.over()
    for reason, later_s in (("refused", 5.0), ("refused", REMIND_S), ("refused", 5.0), ("timeout", 5.0), ("", 5.0)):
        outage.failed(OSError(reason))
        now_s += later_s
    outage.failed(OSError("refused"))
    outage.over()
    outage.over()
    assert caplog.messages == [
        *["part=waiting reason='refused'"] * 2,
        *("part=waiting reason='timeout'", "part=waiting reason='OSError'", "part=waiting reason='refused'"),
        f"part=working after={REMIND_S + 20:.0f} s",
    ]


def test_a_key_file_that_is_lost_is_logged_once_not_at_every_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file, (key, entry) = tmp_path / "keys", new_key("laptop")
    file.write_text(entry)
    keys = KeyRing(file=file)
    file.rename(tmp_path / "elsewhere")
    assert [keys.owner(key) for _ in range(3)] == ["laptop"] * 3
    (tmp_path / "elsewhere").rename(file)
    assert keys.owner(key) == "laptop"
    assert [message.split()[0] for message in caplog.messages] == ["keys=kept", "keys=current"]


def test_record_is_one_object_with_everything_of_it(started: StringIO) -> None:
    logger = logging.getLogger("some.part")
    logger.info("two\nlines of %s", "é", extra={"values": {"status": 200}})
    with about_request(ID):
        try:
            raise ValueError("of no use")
        except ValueError:
            logger.exception("it failed")
        logging.getLogger("other").debug("not at this level")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    thrown = threading.Thread(target=lambda: 1 / 0)
    thrown.start()
    thrown.join()
    told, failed, warned, uncaught = objects(started.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told.pop("time"))
    expected = {"level": "INFO", "logger": "some.part", "request_id": None, "status": 200}
    assert told == {**expected, "message": "two\nlines of é"}
    assert (failed["request_id"], failed["level"], failed["message"]) == (ID, "ERROR", "it failed")
    assert failed["exception"].startswith("Traceback") and failed["exception"].endswith("ValueError: of no use")
    assert warned["logger"] == "py.warnings" and "old" in warned["message"]
    assert uncaught["level"] == "CRITICAL" and "ZeroDivisionError" in uncaught["exception"]
    assert logs.current_format() == "json"


def test_half_of_a_character_in_a_record_breaks_no_line() -> None:
    record = logging.LogRecord("some.part", logging.INFO, __file__, 1, "é\ud800", (), None)
    line = JsonFormatter().format(record)
    assert line.isascii() and json.loads(line)["message"] == "é\ud800"


def test_text_names_the_request_before_a_traceback() -> None:
    record = logging.makeLogRecord({"name": "a", "levelname": "INFO", "msg": "said"})
    assert TextFormatter().format(record).endswith(" INFO a said")
    record.exc_info = (ValueError, ValueError("b"), None)
    with about_request(ID):
        assert TextFormatter().format(record).endswith(f" INFO a said request={ID}\nValueError: b")
    assert json.loads(JsonFormatter().format(record))["request_id"] is None


@pytest.mark.parametrize("given", ["a", ID, "a" * MOST_ID_CHARACTERS, "0F-5.b_c@d+e"])
def test_clients_id_is_taken(given: str) -> None:
    assert valid_request_id(given) == given


@pytest.mark.parametrize("given", ["", "a b", "a\n", "é", 'a"', "a" * (MOST_ID_CHARACTERS + 1), "a,b", "<a>"])
def test_id_that_cannot_stand_in_a_log_is_replaced(given: str, sqlite_url: str) -> None:
    assert re.fullmatch(r"req-[0-9a-f]{24}", valid_request_id(given))
    with filled(sqlite_url) as store, client_of(store) as client:
        for path in ("/livez", "/v1/nothing", "/"):
            sent = [("x-request-id", given.encode("latin-1"))]
            found = client.get(path, headers=sent).headers.get_list("x-request-id")  # type: ignore[arg-type]
            assert len(found) == 1 and re.fullmatch(r"req-[0-9a-f]{24}", found[0])


def test_lines_of_server_and_engine_are_objects_that_name_their_request(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(str(tmp_path / "a.db"), log, *options(folder), "--log-format", "json") as served:
        answers = [
            served.client.post("/v1/completions", json=BODY, headers={"X-Request-ID": ID}),
            served.client.post("/v1/completions", json={**BODY, "stream": True}, headers={"X-Request-ID": "second"}),
            served.client.post("/v1/completions", json={**BODY, "swiftopt": {"plan": "plain"}}),
            served.client.post("/v1/completions", json={"model": "tiny"}, headers={"X-Request-ID": "bad"}),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 400]
        ids = [answer.headers["x-request-id"] for answer in answers]
        assert (ids[0], ids[1], ids[3]) == (ID, "second", "bad") and ids[2].startswith("req-")
    lines = objects(log.read_text())
    assert all({"time", "level", "logger", "message", "request_id"} <= set(line) for line in lines)
    of_access = {line["request_id"]: line for line in lines if line["logger"] == "swiftopt.access"}
    of_engine = {line["request_id"]: line for line in lines if line["message"].startswith("completion=done")}
    assert {*of_engine} == {*ids[:3]} and {*of_access} == {*ids}
    asked = of_access[ID]
    assert (asked["method"], asked["path"], asked["status"]) == ("POST", "/v1/completions", 200) and asked["ms"] > 0
    assert of_engine[ids[2]]["logger"] == "swiftopt.worker.serving" and "method=plain" in of_engine[ids[2]]["message"]
    assert [line["message"] for line in lines if line["message"].startswith("serving url=")] == [
        f"serving url={served.url} models=tiny"
    ]


def test_error_of_the_engine_names_the_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, started: StringIO
) -> None:
    """The error may occur while a prompt is encoded, or in the engine's thread."""
    host = EngineHost(ServedModel("tiny", str(folder), "float32", tune=False), MessageWriter(BytesIO()))

    def broken(*_: object, **__: object) -> Iterator[None]:
        raise RuntimeError("a fault")
        yield

    monkeypatch.setattr("swiftopt.worker.serving.check_vocabulary", lambda *_: next(broken()))
    monkeypatch.setattr("swiftopt.worker.serving.decode_as_planned", broken)
    asked = Decode(CompletionRequest(text="w3 w5", max_new_tokens=4), 2, "of the work")

    def lines() -> Iterator[bytes]:
        yield encode(Detokenize((1,), 1, "of the text"))
        yield encode(asked)
        while not host._tickets[2].is_done:
            time.sleep(0.01)

    host.run(lines())
    failed = [line for line in objects(started.getvalue()) if line["message"].startswith("completion=failed")]
    assert [line["request_id"] for line in failed] == ["of the text", "of the work"]
    assert all("RuntimeError: a fault" in line["exception"] for line in failed)


def test_lines_of_a_worker_and_its_job_are_objects(sqlite_url: str, redis_url: str) -> None:
    with filled(sqlite_url) as store, closing(RedisQueue(redis_url)) as queue:
        job, _ = JobService(store, queue).submit_spec(JobSpec("noop", "default", {"seconds": 0.0}))
        command = [sys.executable, "-m", "swiftopt", "worker", "--burst", "--log-format", "json"]
        command += ["--redis", redis_url, "--db", sqlite_url]
        told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert store.jobs.get(job.id).state == "succeeded"
    messages = [line["message"] for line in objects(told.stderr)]
    assert any(message.endswith(" listens on queue 'default'") for message in messages)
    assert any(f"job={job.id}" in message and "state=succeeded" in message for message in messages)


@pytest.mark.slow
def test_format_comes_from_the_environment_and_the_file(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def first_line(served: Served) -> str:
        served.client.get("/v1/jobs")
        until = time.monotonic() + 10
        while time.monotonic() < until:  # The line may be written behind the answer.
            for line in served.log.read_text().splitlines():
                if "/v1/jobs" in line:
                    return line
            time.sleep(0.05)
        raise AssertionError("no line tells of the request")

    with serving(sqlite_url, tmp_path / "log", SWIFTOPT_LOG_FORMAT="json") as served:
        assert json.loads(first_line(served))["path"] == "/v1/jobs"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swiftopt.toml").write_text('log_format = "json"\n')
    with serving(sqlite_url, tmp_path / "log") as served:
        assert json.loads(first_line(served))["status"] == 200
    with serving(sqlite_url, tmp_path / "log", "--log-format", "text") as served:
        assert re.search(r"swiftopt\.access GET /v1/jobs 200 .* request=req-[0-9a-f]{24}$", first_line(served))
    assert run(["serve", "--log-format", "yaml"]) == SettingsError("").exit_code
    assert "'yaml' is not one of" in capsys.readouterr().err
