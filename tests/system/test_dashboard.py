"""The dashboard's pages: log-in, forms, headers, and reports of unreachable services."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from api import client_of, filled, token
from fakes import READY
from starlette.testclient import TestClient

from swiftopt.core.errors import Busy, InvalidInput
from swiftopt.core.messages import AnswerDone, AnswerText, Decode, Steer, TracedPiece
from swiftopt.core.requests import CompletionRequest, ServedModel
from swiftopt.core.types import Completion, Timings
from swiftopt.server.app import create_app
from swiftopt.server.dashboard import COOKIE, PAGES, STATIC
from swiftopt.server.dashboard.headline import ServedNow
from swiftopt.server.dashboard.playground import PlaygroundRun, Side, request_of
from swiftopt.server.dashboard.traffic import charts
from swiftopt.server.engines import EngineProcess, Engines
from swiftopt.server.metrics import KEPT_S, History, Period
from swiftopt.server.settings import KeyRing, ServerSettings, new_key
from swiftopt.store import Store
from swiftopt.worker.queue import JobService

ADDRESSES = [address for address, _ in PAGES]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with filled(str(tmp_path / "a.db")) as store:
        yield store


@pytest.fixture
def client(store: Store) -> TestClient:
    return client_of(store)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, Path]:
    """Return a key, and the file with its entry."""
    key, entry = new_key("ann")
    (tmp_path / "keys").write_text(entry)
    return key, tmp_path / "keys"


def guarded(store: Store, file: Path) -> TestClient:
    return client_of(store, ServerSettings(keys=KeyRing(file=file), requests_per_min=0))


@pytest.mark.parametrize("address", ADDRESSES)
def test_page_loads_nothing_from_other_hosts_and_has_no_inline_script(client: TestClient, address: str) -> None:
    found = client.get(address)
    assert found.status_code == 200 and found.headers["content-type"].startswith("text/html")
    policy = found.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';") and "unsafe" not in policy
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", found.text)
    assert not re.search(r"<script(?![^>]* src=)|<style|style=| on\w+=", found.text)
    assert '<html lang="en">' in found.text and '<main id="content">' in found.text
    for file in re.findall(r'"(/static/[^"]+)"', found.text):
        assert client.get(file).status_code == 200, file


@pytest.mark.parametrize("address", ADDRESSES)
def test_page_of_a_server_with_keys_needs_one(store: Store, keys: tuple[str, Path], address: str) -> None:
    client, (key, _) = guarded(store, keys[1]), keys
    found = client.get(address, follow_redirects=False)
    assert (found.status_code, found.headers["location"]) == (303, f"/login?next={address}")
    wrong = client.post("/login", data={"key": "swiftopt-wrong", "next": address})
    assert wrong.status_code == 401 and "not valid on this server" in wrong.text and COOKIE not in client.cookies
    right = client.post("/login", data={"key": key, "next": address}, follow_redirects=False)
    assert (right.status_code, right.headers["location"]) == (303, address)
    flags = right.headers["set-cookie"].lower()
    assert "httponly" in flags and "samesite=strict" in flags
    assert key not in right.headers["set-cookie"] and "Log out ann" in client.get(address).text


def test_session_ends_with_its_key_and_with_log_out(store: Store, keys: tuple[str, Path]) -> None:
    client, (key, file) = guarded(store, keys[1]), keys
    client.post("/login", data={"key": key})
    assert client.post("/logout", data={"token": "forged"}).status_code == 403
    assert (
        client.post("/logout", data={"token": token(client.get("/").text)}, follow_redirects=False).status_code == 303
    )
    assert client.get("/", follow_redirects=False).status_code == 303
    client.post("/login", data={"key": key})
    assert client.get("/", follow_redirects=False).status_code == 200
    file.write_text(new_key("ann")[1])
    assert client.get("/", follow_redirects=False).status_code == 303, "the key of that name is another one now"


def test_forms_of_other_sites_and_sessions_are_refused(store: Store, keys: tuple[str, Path]) -> None:
    client, other, (key, _) = guarded(store, keys[1]), guarded(store, keys[1]), keys
    assert client.post("/login", data={"key": key}, headers={"origin": "http://evil"}).status_code == 403
    for each in (client, other):
        each.post("/login", data={"key": key})
    mine, theirs = token(client.get("/").text), token(other.get("/").text)
    assert client.post("/logout", data={"token": theirs}).status_code == 403
    assert client.post("/logout", data={"token": mine}, headers={"origin": "http://evil"}).status_code == 403
    forged = guarded(store, keys[1])
    forged.cookies.set(COOKIE, f"ann:{client.cookies[COOKIE].partition('.')[2]}")
    assert forged.get("/", follow_redirects=False).status_code == 303


@pytest.mark.parametrize("path", ["//evil.org", "/\\evil.org", "https://evil.org", "/a\nb"])
def test_log_in_redirects_only_to_this_server(store: Store, keys: tuple[str, Path], path: str) -> None:
    client, (key, _) = guarded(store, keys[1]), keys
    found = client.post("/login", data={"key": key, "next": path}, follow_redirects=False)
    assert found.headers["location"] == "/"


def test_guesses_of_a_key_are_limited(store: Store, keys: tuple[str, Path]) -> None:
    client = guarded(store, keys[1])
    statuses = [client.post("/login", data={"key": str(n)}).status_code for n in range(30)]
    assert statuses[0] == 401 and statuses[-1] == 429


def ended(n_tokens: int, drafted: int, accepted: int) -> Completion:
    """Return a completion with one drafted round and plain rounds."""
    return Completion(
        (0,) * n_tokens,
        "",
        "length",
        "adaptive",
        first_tokens=1,
        drafted=drafted,
        accepted=accepted,
        accepted_per_position=(1,) * accepted,
        by_draft_length={drafted: (*(0,) * accepted, 1, *(0,) * (drafted - accepted))} if drafted else {},
        verified_widths={1: n_tokens},
        timings=Timings(draft_s=1.0, verify_s=2.0),
    )


@pytest.mark.parametrize("second", [0.0, 0.5, 9.9, 31.0, 59.9])
def test_current_figures_cover_the_last_60_seconds(monkeypatch: pytest.MonkeyPatch, second: float) -> None:
    history = History()
    for ago in range(600, -1, -1):  # ten tokens end every second
        monkeypatch.setattr("time.time", lambda ago=ago: 1_000_020.0 + second - ago)
        history.add("a", "code", Period.of(ended(10, 8, 4), 0.5, 1.4))
    found = ServedNow(None, None, history.now("a"), history.total("a"))  # type: ignore[arg-type]
    assert 500 <= found.lately.tokens <= 610 and found.throughput == pytest.approx(10, rel=0.05)
    for length, n in ((600, 10), (3600, 60), (3600, 6)):  # the newest period counts its seconds so far
        tok_s = history.last(length, n)[-1].throughput(length // n)
        assert tok_s is None or tok_s == pytest.approx(10, rel=0.2)
    assert found.total.tokens == 6010


def test_history_adds_up_by_model_task_and_period(monkeypatch: pytest.MonkeyPatch) -> None:
    history, now = History(), 1_000_000.0
    monkeypatch.setattr("swiftopt.server.metrics.time.time", lambda: now)
    history.add("a", "code", Period.of(ended(10, 8, 4), 0.5, 1.4))
    history.add("a", "notes", Period.of(ended(20, 0, 0), 0.1, 2.0))
    now += 60
    history.add("b", "code", Period.of(ended(30, 10, 5), 0.2, 3.1))
    every, of_a = history.last(600, 10), history.last(600, 10, "a")
    assert [period.tokens for period in every[-2:]] == [30, 30] and sum(period.requests for period in every) == 3
    assert [period.tokens for period in of_a] == [*[0] * 8, 30, 0]
    assert sum(period.drafted for period in history.last(600, 10, None, "code")) == 18
    assert every[-2].spent == Timings(draft_s=2.0, verify_s=4.0) and every[-2].accepted_per_position == [1] * 4
    speeds, *_, acceptance, _, _ = charts(every, 60)
    assert acceptance.lines["accepted / drafted"][-2:] == [0.5, 0.5] and acceptance.top == 1.0
    assert speeds.lines["decoding, one request"][-2:] == [round(28 / 6, 4), round(29 / 3, 4)]
    assert sum(every, Period(0)).accepted_by_position == [1.0] * 4 + [0.5], "of the rounds that drafted"
    assert [history.total(model).tokens for model in ("a", "b", "c")] == [30, 30, 0]
    now += KEPT_S
    assert not any(period.requests for period in history.last(KEPT_S, 10))


def test_history_keeps_the_tasks_of_the_latest_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    history, now = History(), 1_000_000.0
    monkeypatch.setattr("swiftopt.server.metrics.time.time", lambda: now)
    monkeypatch.setattr("swiftopt.server.metrics.MOST_HISTORIES", 3)
    for task in ("a", "b", "c", "a", "d"):
        now += 20
        history.add("m", task, Period.of(ended(10, 8, 4), 0.5, 1.4))
    assert {task for _, task in history.tasks} == {"a", "c", "d"}


def test_traffic_page_shows_figures_without_scripts(store: Store) -> None:
    engines = Engines()
    engines.metrics.add("tiny", "a/<b>", Period.of(ended(10, 8, 4), 0.5, 1.4), 1.4, "stop")
    app = create_app(store, JobService(store, None), ServerSettings(requests_per_min=0), engines=engines)
    client = TestClient(app)
    found = client.get("/traffic?span=10 minutes").text
    assert "1 requests, 10 tokens" in found and "a/&lt;b&gt;" in found and found.count("<tr>") > 70
    ends = re.findall(r'data-top="([^"]+)">\s*<figcaption>([^<]+)<', found)
    assert ends == [("1.0", "Acceptance"), ("1.0", "Prompt tokens read before")], "axes of shares end at 1"
    assert "0 requests, 0 tokens" in client.get("/traffic?model=other").text
    assert client.get("/traffic?span=" + "x" * 30).status_code == 422


def test_vendored_files_match_their_list() -> None:
    listed = dict(re.findall(r"^(\S+\.(?:js|css))  .*  ([0-9a-f]{64})$", STATIC["VENDORED.txt"].read_text(), re.M))
    assert len(listed) == 4
    for name, sha256 in listed.items():
        assert hashlib.sha256(STATIC[name].read_bytes()).hexdigest() == sha256


def test_full_queue_refuses_completions_but_answers_questions() -> None:
    engine = EngineProcess(ServedModel("tiny", "tiny", concurrency=1), 1)
    engine.about = READY
    for _ in range(2):
        engine.ask(Decode(CompletionRequest()))
    with pytest.raises(Busy, match="2 requests already run or wait for tiny"):
        engine.ask(Decode(CompletionRequest()))
    engine.ask(Steer())


# --- playground


TYPED = {"prompt": "p", "plan": "", "task": "", "form": "text", "tokens": "5", "temperature": "0"}


@pytest.mark.parametrize(
    ("typed", "param"),
    [
        ({"prompt": " \n"}, "prompt"),
        ({"tokens": "0"}, "tokens"),
        ({"tokens": "1e9"}, "tokens"),
        ({"tokens": "nan"}, "tokens"),
        ({"temperature": "-1"}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"task": "a/b"}, "task"),
        ({"task": "x" * 10_000}, "task"),
    ],
)
def test_playground_names_an_unusable_field(typed: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidInput) as error:
        request_of({**TYPED, **typed}, None)
    assert error.value.param == param and len(str(error.value)) < 200


def test_playground_sends_the_form_without_learning() -> None:
    asked = request_of({**TYPED, "plan": " 3 ", "task": " code "}, None)
    assert (asked.version, asked.method, asked.task, asked.text) == (3, None, "code", "p")
    assert asked.trace and not asked.learn and asked.max_new_tokens == 5
    assert request_of({**TYPED, "plan": "swift"}, None).method == "swift"
    assert request_of({**TYPED, "plan": "best"}, None).method is None
    chat = request_of({**TYPED, "form": "chat"}, None)
    side = Side("The plan", chat, completion=Completion((1,), "answer", "stop", "plain"))
    follow = request_of({**TYPED, "form": "chat", "prompt": "more"}, PlaygroundRun("1", None, TYPED, (side, side)))
    assert [each["content"] for each in follow.messages] == ["p", "answer", "more"]


def test_parts_of_a_character_are_shown_as_one() -> None:
    euro = list("€".encode())
    told: list[TracedPiece] = [
        ("a", "target", ()),
        (euro[:2], "draft", (euro[:1],)),
        (euro[2:], "text", ("b",)),
        ([255], "text", ()),
    ]
    side = Side("Plain", request_of(TYPED, None), traced=told)
    assert [text for text, _, _ in side.tokens] == ["a", "", "€", "\ufffd"]
    assert [rejected for _, _, rejected in side.tokens] == ["", "\ufffd", "b", ""]
    assert side.by_source == [("the model itself", 1), ("its draft", 1), ("earlier text", 2)]


def test_end_token_is_not_shown() -> None:
    pieces: tuple[TracedPiece, ...] = (("a", "target", ()), ("<end>", "text", ()))
    for traced in (pieces, pieces[:1]):  # It came with other text, or alone, and then is not sent.
        side = Side("Plain", request_of(TYPED, None))
        side._take(AnswerText(1, "a", 1, trace=traced))
        side._take(AnswerDone(1, 0.0, "", Completion((5, 1), "a", "stop", "plain"), "plain", None, None))
        assert [text for text, _, _ in side.tokens] == ["a"]


def test_first_difference_of_texts_is_shown() -> None:
    asked = request_of(TYPED, None)

    def unlike(one: tuple[int, ...], other: tuple[int, ...]) -> int | None:
        sides = [Side("", asked, completion=Completion(each, "", "stop", "plain")) for each in (one, other)]
        return PlaygroundRun("1", None, TYPED, (sides[0], sides[1])).unlike

    assert [unlike((1, 2), (1, 2)), unlike((1, 2), (1, 3)), unlike((1, 2), (1, 2, 3))] == [None, 2, 3]


def test_completions_of_another_key_are_not_shown(store: Store, keys: tuple[str, Path]) -> None:
    client, (key, _) = guarded(store, keys[1]), keys
    client.post("/login", data={"key": key})
    tries = client.app.state.swiftopt.tries  # type: ignore[attr-defined]
    side = Side("The plan", request_of(TYPED, None), traced=[("<script>", "draft", ("<b>",))])
    for owner in ("ann", "bob"):
        tries[owner] = PlaygroundRun(owner, owner, {**TYPED, "model": "m", "after": ""}, (side, side))
    mine, theirs = client.get("/playground/ann"), client.get("/playground/bob")
    assert mine.status_code == 200 and "&lt;script&gt;" in mine.text and "<script>" not in mine.text
    assert theirs.status_code == 404 and "no longer stored" in theirs.text
    assert client.get("/live/playground/bob").status_code == 404
    assert client.post("/playground/bob/stop", data={"token": token(mine.text)}).status_code in (403, 404)


def test_unknown_address_is_html_for_browsers_and_json_for_programs(store: Store) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    client = client_of(store)
    found = client.get("/no/such/<script>", headers=browser)
    assert (found.status_code, found.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "There is no page at /no/such/" in found.text and "<script>" not in found.text
    assert all(f'href="{address}"' in found.text for address in ("/", "/jobs", "/openapi.json"))
    assert "frame-ancestors 'none'" in found.headers["content-security-policy"]
    for address, headers in (("/no/such", {}), ("/v1/jobs/", browser), ("/v1/none", browser)):
        assert "json" in client.get(address, headers=headers).headers["content-type"]
    wrong = client.get("/logout", headers=browser)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
