"""Bad and hostile input over HTTP: every response is a problem of one sentence, and nothing is stored."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from api import LOOKUP, client_of, filled, problem, submission, token
from starlette.testclient import TestClient

from swiftopt.core.errors import SettingsError
from swiftopt.core.requests import Lease
from swiftopt.server.middleware import RateLimit
from swiftopt.server.settings import KeyRing, ServerSettings, allowed_origins, new_key
from swiftopt.store import Store


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    with filled(sqlite_url) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(schema_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Return a client for all tests with refused input, which leaves nothing in the database."""
    file = shutil.copy(schema_file, tmp_path_factory.mktemp("refusing"))
    with filled(str(file)) as opened, client_of(opened) as refusing:
        yield refusing


# --- streams


def test_upload_can_be_named_by_a_job(store: Store) -> None:
    client = client_of(store)
    data = b'{"prompt": "a"}\n{"prompt": "b", "task": "own"}\n'
    raw = client.post("/v1/streams?task=up", content=data, headers={"Content-Type": "application/jsonl"})
    form = client.post("/v1/streams?task=up", files={"file": ("s.jsonl", data)})
    assert raw.status_code == form.status_code == 201 and raw.json() == form.json()
    assert raw.json()["n_prompts"] == 2
    job = client.post("/v1/jobs", json=submission() | {"stream": {"upload": raw.json()["sha256"]}, "limit": 2}).json()
    claim = store.jobs.claim(Lease(job["id"], 1), "w")
    assert claim is not None and [json.loads(line)["task"] for line in claim.lines.splitlines()] == ["up", "own"]


def test_unknown_upload_is_not_found(client: TestClient) -> None:
    problem(client.post("/v1/jobs", json=submission() | {"stream": {"upload": "0" * 64}}), 404, "not-found")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "holds no prompt"),
        (b'{"prompt": "a"}\n{"prompt": ', "line 2 is not valid JSON"),
        (b'{"prompt": "a"}\n\xff\xfe\x00\x80', "line 2 is not UTF-8"),
        (bytes(range(1, 100)) + b"\0", "line 1"),
        (b"[1]", "line 1 is not a JSON object"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "line 1"),
    ],
)
def test_upload_with_a_bad_line_names_it(client: TestClient, data: bytes, words: str) -> None:
    answer = client.post("/v1/streams", content=data, headers={"Content-Type": "application/jsonl"})
    assert words in problem(answer, 422, "stream-error")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "streams"
    (inside / "deep").mkdir(parents=True)
    (inside / "humaneval.jsonl").write_text('{"prompt": "a"}\n')
    (inside / "deep" / "more.jsonl").write_text('{"prompt": "b"}\n')
    (inside / "binary.jsonl").write_bytes(b"\x80\0\1")
    (tmp_path / "secret.jsonl").write_text('{"prompt": "secret"}\n')
    (inside / "out.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (inside / "up").symlink_to(tmp_path)
    (inside / "in.jsonl").symlink_to("deep/more.jsonl")
    (inside / "loop").symlink_to("loop")
    (inside / "large.jsonl").write_bytes(b'{"prompt": "a"}\n' * 100_000)
    os.mkfifo(inside / "pipe")
    return inside


def with_folder(store: Store, folder: Path) -> TestClient:
    return client_of(store, ServerSettings(stream_folders=(folder.resolve(),), max_body_bytes=1_000_000))


def test_stream_is_named_under_a_folder(store: Store, folder: Path) -> None:
    with with_folder(store, folder) as client:
        for name, task in (("humaneval.jsonl", "humaneval"), ("deep/more.jsonl", "more"), ("in.jsonl", "in")):
            answer = client.post("/v1/jobs", json=submission() | {"stream": {"name": name}})
            assert answer.status_code == 202 and answer.json()["request"]["task"] == task
        missing = client.post("/v1/jobs", json=submission() | {"stream": {"name": "humanevil.jsonl"}})
        assert "'humaneval.jsonl'" in problem(missing, 404, "stream-not-found")


@pytest.mark.parametrize(
    "name",
    ["../secret.jsonl", "deep/../../secret.jsonl", "/etc/passwd", "out.jsonl", "up/secret.jsonl", "deep", ".", "pipe",
     "loop", "a\0b", "large.jsonl", "x" * 400, "..\\secret.jsonl", "", "a\nb", "binary.jsonl"],
)  # fmt: skip
def test_stream_name_outside_the_folder_is_refused(store: Store, folder: Path, name: str) -> None:
    with with_folder(store, folder) as client:
        answer = client.post("/v1/jobs", json=submission() | {"stream": {"name": name}})
        assert answer.status_code in (404, 422), answer.text
        assert str(folder.parent) not in answer.text and "secret" not in client.get("/v1/jobs").text
        assert client.get("/v1/jobs").json()["jobs"] == []


def test_stream_name_without_folders_is_not_found(client: TestClient) -> None:
    problem(client.post("/v1/jobs", json=submission() | {"stream": {"name": "a.jsonl"}}), 404, "stream-not-found")


# --- hostile input


@pytest.mark.parametrize(
    "change",
    [
        {"model": 7}, {"model": ""}, {"model": "a\0b"}, {"model": None}, {"unknown": 1}, {"queue": "a/b"},
        {"queue": "q" * 65}, {"queue": ""}, {"limit": 0}, {"limit": True}, {"limit": 10**30}, {"max_new_tokens": 1.5},
        {"dtype": "int7"}, {"device": "cuda:x"}, {"settings": {"nothing": 1}}, {"settings": {"max_steps": "7"}},
        {"settings": {"skip_ratio": 7}}, {"settings": {"strategy": "luck"}}, {"sampling": {"top_p": -0.1}},
        {"sampling": {"seed": 2**63}}, {"settings": []}, {"stream": {}}, {"stream": {"prompts": []}},
        {"stream": {"prompts": [{"prompt": "a"}], "name": "b"}}, {"stream": {"prompts": [{"prompt": 1}]}},
        {"stream": {"prompts": [{"prompt": "a\0"}]}}, {"stream": {"prompts": "a"}}, {"task": "a/b"}, {"task": " "},
        {"settings": {"branching": [[1.0]]}}, {"settings": {"branching": [[0.5, 1e308], [1.0, 1]]}},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_value_in_a_job_is_refused_in_a_sentence(client: TestClient, change: dict[str, Any]) -> None:
    answer = client.post("/v1/jobs", json=submission() | change)
    told = answer.json()["detail"]
    assert answer.status_code == 422 and told and "pattern" not in told, answer.text
    assert client.get("/v1/jobs").json()["jobs"] == []


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("/v1/jobs/a%20b", "path.job is 'a b': use up to 64 of the characters 0-9A-Za-z_-"),
        ("/v1/usage?since=2026-13-45", "query.since is '2026-13-45': use a day such as 2026-11-01"),
        ("/requests?way=fast", "query.way is 'fast': use 'drafts', 'plain' or 'failed'"),
        ("/requests?model=%00", r"query.model is '\x00': use a text without control characters"),
    ],
)
def test_wrong_parameter_is_reported_in_plain_words(client: TestClient, address: str, words: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 422 and words in unescape(answer.text)


@pytest.mark.parametrize("text", ["", "{", "[1", "nul", '{"a": 1}}', "\xff", "[" * 200_000, "1" * 5000])
def test_body_that_is_not_json_is_refused(client: TestClient, text: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/jobs", content=text.encode("latin-1"), headers=headers)
    assert answer.status_code in (400, 422) and answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", '"\\ud800"'])
def test_number_or_text_that_json_lacks_is_refused(client: TestClient, value: str) -> None:
    text = '{"model": "m", "stream": {"prompts": [{"prompt": "a"}]}, "sampling": {"temperature": VALUE}}'.replace(
        "VALUE", value
    )
    answer = client.post("/v1/jobs", content=text, headers={"Content-Type": "application/json"})
    problem(answer, 422, "invalid-input")


def test_other_routes_methods_and_media_types_are_problems(client: TestClient) -> None:
    problem(client.get("/v2"), 404, "no-such-route")
    refused = client.delete("/v1/jobs")
    assert problem(refused, 405, "method-not-allowed") and refused.headers["allow"]
    problem(
        client.post("/v1/jobs", content="{}", headers={"Content-Type": "text/plain"}), 415, "unsupported-media-type"
    )
    problem(client.post("/v1/streams", content="{}"), 415, "unsupported-media-type")


def test_names_that_databases_cannot_store_are_refused(database_url: str) -> None:
    with filled(database_url) as store, client_of(store) as client:
        for path in ("/v1/layer-sets/a%00b/c", "/v1/layer-sets?model=%00", "/v1/jobs/%00", LOOKUP + "?alias=%0A"):
            problem(client.get(path), 422, "invalid-input")
        assert client.get("/v1/layer-sets/%ff%fe/c").status_code == 404
        nul = {"stream": {"prompts": [{"prompt": "a", "note": "\0"}]}}
        problem(client.post("/v1/jobs", json=submission() | nul), 422, "invalid-input")


def test_page_of_another_site_cannot_post(client: TestClient) -> None:
    answer = client.post("/v1/jobs", json=submission(), headers={"Origin": "https://evil.example"})
    problem(answer, 403, "foreign-origin")


def test_pages_of_allowed_origins_call_the_api_with_a_key_and_nothing_else(store: Store) -> None:
    key, entry = new_key("page")
    origin, evil = {"Origin": "https://chat.example:8443"}, {"Origin": "https://evil.example"}
    settings = ServerSettings(KeyRing(entry), requests_per_min=0, origins=allowed_origins([origin["Origin"]]))
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    allowed = "access-control-allow-origin"
    with client_of(store, settings) as client:
        preflight = client.options("/v1/chat/completions", headers=origin | asks)
        assert (preflight.status_code, preflight.headers[allowed]) == (200, origin["Origin"])
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        without = client.post("/v1/jobs", json=submission(), headers=origin)
        assert (without.status_code, without.headers[allowed]) == (401, origin["Origin"]), "a page can read why"
        bearer = {"Authorization": f"Bearer {key}"}
        sent = client.post("/v1/jobs", json=submission(), headers=origin | bearer)
        assert (sent.status_code, sent.headers[allowed]) == (202, origin["Origin"])
        assert "location" in sent.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in {*sent.headers, *preflight.headers}, "no cookies"
        problem(client.post("/v1/jobs", json=submission(), headers=evil | bearer), 403, "foreign-origin")
        assert allowed not in client.get("/v1/jobs", headers=evil | bearer).headers
        assert allowed not in client.options("/v1/jobs", headers=evil | asks).headers
        assert client.post("/login", data={"key": key}, headers=origin).status_code == 403
        client.post("/login", data={"key": key})
        form = {"token": token(client.get("/").text)}
        for answer in (
            client.post("/logout", data=form, headers=origin),
            client.options("/logout", headers=origin | asks),
            client.get("/", headers=origin),
        ):
            assert allowed not in answer.headers and answer.status_code in (403, 405, 200)
        assert client.post("/logout", data=form, headers=origin).status_code == 403


def test_pages_of_all_origins_can_be_allowed_and_none_are_by_default(client: TestClient, store: Store) -> None:
    asks = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    assert not [name for name in client.options("/v1/jobs", headers=asks).headers if name.startswith("access-control")]
    with client_of(store, ServerSettings(requests_per_min=0, origins=allowed_origins("*"))) as open_to_all:
        answer = open_to_all.post("/v1/jobs", json=submission(), headers={"Origin": "https://chat.example"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (202, "*")


@pytest.mark.parametrize(
    "origin", ["chat.example", "null", "https://", "https://chat.example/", "http://a b", "http://u@a"]
)
def test_invalid_origin_is_refused(origin: str) -> None:
    with pytest.raises(SettingsError, match=r"is not an origin: use .*https://chat\.example\.org") as error:
        allowed_origins([origin])
    assert origin in str(error.value)


def test_rate_is_limited_but_lookups_are_not(store: Store) -> None:
    with client_of(store, ServerSettings(requests_per_min=3)) as client:
        assert [client.get("/v1/jobs").status_code for _ in range(4)] == [200, 200, 200, 429]
        refused = client.get("/v1/jobs")
        assert problem(refused, 429, "too-many-requests") and int(refused.headers["retry-after"]) in (59, 60)
        assert {client.get(LOOKUP).status_code for _ in range(20)} == {200}
        assert client.get("/readyz").status_code == 200


def test_rate_recovers_with_time_and_callers_do_not_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    rate = RateLimit(60)

    def asked(caller: str) -> int:
        if not (wait_s := rate.wait_s(caller)):
            rate.spend(caller)
        return wait_s

    assert [asked("a") for _ in range(61)] == [0] * 60 + [60]
    assert asked("b") == 0
    now[0] += 45.5
    assert asked("a") == 15
    now[0] += 15.0
    assert asked("a") == 0


@pytest.mark.parametrize("n", [90, 500])
def test_counted_limit_may_be_exceeded_by_one_request(n: int) -> None:
    """A caller with a remaining budget gets its whole request, and then waits at most until the next minute."""
    rate = RateLimit(100, counted=True)
    assert rate.wait_s("a") == 0
    rate.spend("a", n)
    rate.spend("a", 40)
    assert 0 < rate.wait_s("a") <= 120
    assert rate.wait_s("b") == 0 and RateLimit(0, counted=True).wait_s("a") == 0
