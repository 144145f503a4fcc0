"""`swiftopt serve` as a process: keys, large bodies, interrupted streams, start and end."""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx2
import openai
import psutil
import pytest
from api import LOOKUP, Served, client_of, filled, serving, sse, submission
from click.testing import CliRunner
from serving import serving as in_thread

from swiftopt.cli.main import run
from swiftopt.cli.main import swiftopt as program
from swiftopt.core.errors import SettingsError
from swiftopt.core.events import PhaseChanged
from swiftopt.core.requests import Lease
from swiftopt.server import app, transport
from swiftopt.server.app import listen
from swiftopt.server.settings import ServerSettings
from swiftopt.store import Store

JSON = {"Content-Type": "application/json"}
Ended = Callable[..., tuple[int, str]]


def entry(name: str, key: str) -> str:
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def database(sqlite_url: str) -> str:
    filled(sqlite_url).close()
    return sqlite_url


@pytest.fixture(scope="module")
def served(schema_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a server for all tests that leave it running."""
    folder = tmp_path_factory.mktemp("served")
    database = str(shutil.copy(schema_file, folder))
    filled(database).close()
    with serving(database, folder / "log", "--max-body-mb", "2") as running:
        yield running


@pytest.fixture
def ended(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ended:
    """Return exit code and stderr of a `serve` that fails to start."""

    def end(*options: str, **environment: str) -> tuple[int, str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        code = run(["serve", *options])
        return code, capsys.readouterr().err

    return end


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_USER_TIMEOUT is Linux's")
def test_connection_of_a_client_that_reads_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "CLIENT_STALL_TIMEOUT_S", 1)
    with listen("127.0.0.1", 0, ServerSettings()) as bound, socket.create_connection(bound.getsockname()):
        connection, _ = bound.accept()
        with connection, pytest.raises(TimeoutError) as ended:
            connection.settimeout(20)
            while connection.send(bytes(1 << 16)):
                pass
    assert ended.value.errno == errno.ETIMEDOUT


# --- keys


def test_keys_guard_everything_under_v1_and_rotate_without_a_restart(database: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{entry('ci', 'old')}  # to be replaced\n")
    settings = {"SWIFTOPT_API_KEYS_FILE": str(file), "SWIFTOPT_API_KEYS": entry("ops", "fixed")}
    with serving(database, tmp_path / "log", **settings) as server:
        for headers in ({}, bearer("wrong"), bearer(entry("ci", "old")), {"Authorization": "Basic b2xk"}, bearer("é")):
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            for path in (LOOKUP, "/v1/jobs", "/v1/nothing"):
                refused = server.client.get(path, headers=raw)
                assert refused.status_code == 401 and refused.headers["www-authenticate"].startswith("Bearer")
                said = refused.json()  # in OpenAI's form where the route is none of ours
                if said.get("type") != "urn:swiftopt:problem:unauthorised":
                    told = said["error"]
                    assert (told["type"], told["code"]) == ("invalid_request_error", "invalid_api_key")
        assert [server.client.get(path).status_code for path in ("/livez", "/readyz", "/metrics")] == [200] * 3
        assert [server.client.head(path).status_code for path in ("/livez", "/readyz", "/health")] == [200] * 3
        assert 'swiftopt_http_requests_total{status="401"} 15.0\n' in server.client.get("/metrics").text
        assert [server.client.get(LOOKUP, headers=bearer(key)).status_code for key in ("old", "fixed")] == [200, 200]
        file.write_text(f"{entry('ci', 'old')}\n{entry('ci-2', 'new')}\n")
        assert [server.client.get(LOOKUP, headers=bearer(key)).status_code for key in ("old", "new")] == [200, 200]
        file.write_text(f"{entry('ci-2', 'new')}\n")
        keys = ("old", "new", "fixed")
        assert [server.client.get(LOOKUP, headers=bearer(key)).status_code for key in keys] == [401, 200, 200]
        file.write_text("broken\n")  # the last good entries stay
        assert [server.client.get(LOOKUP, headers=bearer(key)).status_code for key in keys] == [401, 200, 200]
    log = (tmp_path / "log").read_text()
    assert " 200 " in log and "ci-2" in log
    assert not [word for word in ("old", "fixed", "wrong") if f" {word}" in log or f"{word} " in log]


def test_new_key_is_accepted_with_its_entry(database: str, tmp_path: Path) -> None:
    printed = CliRunner().invoke(program, ["serve", "--new-key", "ci", "--json"], catch_exceptions=False)
    values = json.loads(printed.stdout)
    with serving(database, tmp_path / "log", SWIFTOPT_API_KEYS=values["entry"]) as server:
        assert server.client.get("/v1/jobs", headers=bearer(values["key"])).status_code == 200
        assert server.client.get("/v1/jobs").status_code == 401
    assert values["key"] not in values["entry"] and values["key"] not in (tmp_path / "log").read_text()


def test_public_address_needs_a_key(ended: Ended, database: str, tmp_path: Path) -> None:
    code, said = ended("--host", "0.0.0.0", "--port", "0", "--db", database)
    assert code == 2 and "no API key is set" in said and said.count("\n") == 1, said
    for host in ("::", "0.0.0.0"):
        with pytest.raises(SettingsError, match="no API key is set"):
            listen(host, 0, ServerSettings())
    with serving(database, tmp_path / "log", "--host", "0.0.0.0", SWIFTOPT_API_KEYS=entry("a", "k")) as server:
        assert server.client.get("/v1/jobs", headers=bearer("k")).status_code == 200


@pytest.mark.parametrize("entries", ["plain-key", "a:zz", "a b:" + "0" * 64])
def test_invalid_key_entry_ends_the_start_without_being_shown(ended: Ended, entries: str, database: str) -> None:
    code, said = ended("--port", "0", "--db", database, SWIFTOPT_API_KEYS=entries)
    assert code == 2 and "--new-key" in said and entries not in said and said.count("\n") == 1


def test_impossible_start_ends_with_a_sentence(ended: Ended, database: str, served: Served) -> None:
    port = str(served.address[1])
    for options, words in (
        (("--port", port), f"port {port} (address already in use): stop the program"),
        (("--port", "0", "--host", "no such host"), "cannot be resolved"),
        (("--port", "0", "--stream-folder", "/nowhere/at/all"), "is not a folder"),
    ):
        code, said = ended("--db", database, *options)
        assert code == 2 and words in said and said.count("\n") == 1, said


# --- methods and bodies


def test_head_is_answered_as_get_without_a_body(served: Served) -> None:
    job = served.client.post("/v1/jobs", json=submission("of HEAD")).json()["id"]
    pages = ("/", "/jobs", "/openapi.json", "/metrics", "/livez", "/readyz", "/health")
    for path in (*pages, "/v1/models", "/v1/jobs", f"/v1/jobs/{job}", LOOKUP, "/v1/models/none", "/v1/none", "/none"):
        got, head = served.client.get(path), served.client.head(path)
        assert (head.status_code, head.headers["content-type"]) == (got.status_code, got.headers["content-type"])
        assert head.content == b"" and 0 < int(head.headers["content-length"]) < 1.1 * len(got.content) + 9, path
    for path in ("/v1/jobs", "/v1/completions"):
        assert served.client.head(path).status_code == (200 if path == "/v1/jobs" else 405)
    assert served.client.delete("/v1/models").headers["allow"] == "GET, HEAD"
    endless = served.client.head(f"/v1/jobs/{job}/events")
    assert endless.headers["content-type"].startswith("text/event-stream") and served.client.get("/livez").is_success


def test_body_in_another_coding_is_415_in_a_sentence(served: Served) -> None:
    body = gzip.compress(b'{"model": "m", "prompt": "a"}')
    for coding in ("gzip", "br", "gzip, identity"):
        headers = {**JSON, "Content-Encoding": coding}
        answer = served.client.post("/v1/completions", content=body, headers=headers)
        words = f"the body is encoded as {coding!r}: send it uncompressed, without Content-Encoding"
        assert (answer.status_code, answer.json()["error"]["message"]) == (415, words)
        assert answer.headers["accept-encoding"] == "identity"
        kind = served.client.post("/v1/jobs", content=body, headers=headers).json()["type"]
        assert kind == "urn:swiftopt:problem:unsupported-encoding"
    plain = served.client.post("/v1/jobs", json=submission("of codings"), headers={"Content-Encoding": "Identity"})
    assert plain.status_code == 202


def test_body_of_200_mb_is_cut_off_and_memory_stays_small(served: Served) -> None:
    before = psutil.Process(served.process.pid).memory_info().rss

    def endless() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * 1_000_000

    for path, kind in (("/v1/jobs", "application/json"), ("/v1/streams", "application/jsonl")):
        connection = http.client.HTTPConnection(*served.address, timeout=30)
        connection.putrequest("POST", path)
        connection.putheader("Content-Type", kind)
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        try:
            for block in endless():
                connection.send(b"%x\r\n%b\r\n" % (len(block), block))
        except OSError:
            pass  # the server has closed
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("content-type")) == (413, "application/problem+json")
        answer.read()
        connection.close()
    assert psutil.Process(served.process.pid).memory_info().rss - before < 30_000_000
    assert served.client.get("/livez").status_code == 200


LARGE = b" " * 40_000_000  # more than the buffers of a connection hold


def by_http_client(
    served: Served, path: str, *, method: str = "POST", kind: str = "application/json", chunked: bool = False
) -> int:
    connection = http.client.HTTPConnection(*served.address, timeout=30)
    parts = (LARGE[at : at + 1_000_000] for at in range(0, len(LARGE), 1_000_000))
    connection.request(method, path, parts if chunked else LARGE, {"Content-Type": kind}, encode_chunked=chunked)
    return connection.getresponse().status


def by_httpx(served: Served, path: str) -> int:
    return httpx2.post(served.url + path, content=LARGE, headers=JSON, timeout=30).status_code


def by_openai(served: Served, path: str) -> int:
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=30)
    with pytest.raises(openai.APIStatusError) as error:
        client.post(path, cast_to=object, body={"text": "a" * len(LARGE)})
    return error.value.status_code


def by_curl(served: Served, path: str, header: str = "Accept: */*") -> int:
    options = ["-s", "-o", os.devnull, "-w", "%{http_code}", "--data-binary", "@-", "-H", header]
    command = ["curl", *options, "-H", "Content-Type: application/json", served.url + path]
    done = subprocess.run(command, input=LARGE, capture_output=True, timeout=30, check=False)
    assert done.returncode == 0, done
    return int(done.stdout)


CLIENTS: dict[str, Callable[[Served, str], int]] = {
    "http.client": by_http_client,
    "http.client in chunks": partial(by_http_client, chunked=True),
    "httpx": by_httpx,
    "openai": by_openai,
    "curl": by_curl,
    "curl that waits": partial(by_curl, header="Expect: 100-continue"),
    "curl that does not wait": partial(by_curl, header="Expect:"),
    "curl in chunks": partial(by_curl, header="Transfer-Encoding: chunked"),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_client_with_a_large_body_receives_its_413(served: Served, client: str) -> None:
    if client.startswith("curl") and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    assert CLIENTS[client](served, "/v1/chat/completions") == 413


def test_client_that_still_sends_receives_an_early_answer(served: Served) -> None:
    assert by_http_client(served, "/v1/streams", kind="text/plain") == 415
    assert by_http_client(served, "/v1/chat/completions", method="PUT") == 405
    assert by_http_client(served, "/v1/nothing", chunked=True) == 404


def test_endless_body_is_dropped_at_a_limit(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServerSettings(requests_per_min=0, max_body_bytes=1000)
    monkeypatch.setattr(transport, "LINGER_BYTES", 10_000_000)
    with Store.open(str(served.log.parent / "other.db")) as store, in_thread(client_of(store, settings).app) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        endless = iter(lambda: b" " * 1_000_000, None)
        with pytest.raises(OSError):
            connection.request("POST", "/v1/jobs", endless, JSON, encode_chunked=True)
        connection.close()
        monkeypatch.setattr(transport, "LINGER_WAIT_S", 0.1)
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nContent-Length: 200000000\r\n\r\n")
            raw.sendall(b"Content-Type")
            answer = b"".join(iter(lambda: raw.recv(1000), b""))  # to the end: the server closes it by itself
            assert answer.startswith(b"HTTP/1.1 415")


def test_announced_size_alone_is_refused(served: Served) -> None:
    with socket.create_connection(served.address, timeout=10) as raw:
        raw.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 200000000\r\n\r\n"
        )
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "head", [b"\x16\x03\x01\x02\0", b"GET / HTTP/9\r\n\r\n", b"POST /v1/jobs HTTP/1.1\r\nContent-Length: x\r\n\r\n"]
)
def test_invalid_http_does_no_harm(served: Served, head: bytes) -> None:
    with socket.create_connection(served.address, timeout=10) as raw:
        raw.sendall(head + b"\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400")
    assert served.client.get("/livez").status_code == 200


def test_log_has_one_line_per_request(served: Served) -> None:
    served.client.get("/v1/layer-sets/a%0Aforged%20GET/b?token=hidden")
    deadline = time.monotonic() + 10  # the line is written when the answer is already out
    while "forged" not in (text := served.log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    (line,) = [line for line in text.splitlines() if "forged" in line]
    assert "swiftopt.access" in line and "/v1/layer-sets/a%0Aforged%20GET/b 404" in line and "hidden" not in text


@pytest.mark.slow
@pytest.mark.parametrize(("log", "polls", "requests"), [("warnings", 0, 0), ("requests", 0, 1), ("all", 5, 1)])
def test_health_checks_and_metrics_are_logged_only_with_all(
    log: str, polls: int, requests: int, database: str, tmp_path: Path
) -> None:
    with serving(database, tmp_path / "log", "--log", log) as server:
        for path in ("/livez", "/readyz", "/health", "/metrics", "/livez?by=probe"):
            assert server.client.get(path).status_code == 200
        assert server.client.get("/v1/jobs").status_code == 200
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "swiftopt.access" in line]
    assert len(lines) == polls + requests and len([line for line in lines if "/v1/jobs" in line]) == requests


# --- events


def test_events_continue_after_a_disconnect_and_end_at_sigterm(database: str, tmp_path: Path) -> None:
    with serving(database, tmp_path / "log") as served:
        events_go_on(served, database)
    assert "Traceback" not in served.log.read_text()


def events_go_on(served: Served, database: str) -> None:
    """Read a job's events, disconnect, continue after the last one, and then stop the server."""
    job = served.client.post("/v1/jobs", json=submission()).json()["id"]
    with Store.open(database) as store:
        claim = store.jobs.claim(Lease(job, 1), "w1")
        assert claim is not None
        with served.client.stream("GET", f"/v1/jobs/{job}/events") as answer:
            first = sse(answer.iter_lines(), limit=2)
        store.jobs.renew(claim.lease, [PhaseChanged("notes", "load"), PhaseChanged("notes", "accumulate")])
        headers = {"Last-Event-ID": str(first[-1][1])}
        with served.client.stream("GET", f"/v1/jobs/{job}/events", headers=headers) as answer:
            lines = answer.iter_lines()
            assert [data["phase"] for _, _, data in sse(lines, limit=2)] == ["load", "accumulate"]
            served.process.send_signal(signal.SIGTERM)
            with suppress(httpx2.RemoteProtocolError):  # cut off: a client goes on with Last-Event-ID
                assert sse(lines) == []
            assert served.process.wait(30) == 0
            assert "timeout graceful shutdown exceeded" not in served.log.read_text(), "ended at once"


def test_lookups_are_answered_while_redis_is_away(database: str, tmp_path: Path) -> None:
    with serving(database, tmp_path / "log", "--redis", f"unix://{tmp_path}/none.sock") as server:
        assert server.client.get("/readyz").json()["redis"] == "unreachable, jobs wait"
        assert server.client.post("/v1/jobs", json=submission()).status_code == 202
        assert [server.client.get(LOOKUP).status_code for _ in range(5)] == [200] * 5


def test_server_starts_without_torch() -> None:
    program = "import sys, swiftopt.server.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
