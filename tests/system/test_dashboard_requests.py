"""The pages of requests: their log, the reasons in words, and who may see texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from api import filled
from starlette.testclient import TestClient

from swiftopt.core.messages import AnswerDone
from swiftopt.core.plainly import CROWDED, NO_GAIN, REQUESTED, WhyPlain
from swiftopt.core.requests import CompletionRequest
from swiftopt.core.rounds import MOST_ROUNDS, RequestRounds, RoundFigures, RoundLog
from swiftopt.core.types import Completion, Timings
from swiftopt.server import request_log
from swiftopt.server.app import create_app
from swiftopt.server.dashboard.requests import PER_PAGE, PER_STRIP, aspects, legend, round_strip, why
from swiftopt.server.engines import Engines
from swiftopt.server.request_log import EndedRequest, RequestLog
from swiftopt.server.settings import KeyRing, ServerSettings, new_key
from swiftopt.store import Store
from swiftopt.worker.queue import JobService

PLAIN, DRAFTED = RoundFigures(1, 0, 0, "target"), RoundFigures(4, 5, 3, "draft")
BY_TEXT, BY_GRAMMAR = RoundFigures(1, 2, 0, "text"), RoundFigures(3, 3, 3, "grammar")
ROUNDS = RequestRounds(4, 1, 0.5, 8, 1.0, 0.0, (PLAIN, DRAFTED, BY_TEXT, BY_GRAMMAR))
COMPLETION = Completion(
    (0,) * 10,
    "open sesame",
    "stop",
    "adaptive",
    n_prompt_tokens=7,
    target_passes=4,
    first_tokens=1,
    drafted=10,
    accepted=6,
    exact=True,
    timings=Timings(draft_s=0.5, verify_s=1.0),
)
DONE = AnswerDone(1, 0.25, "code", COMPLETION, "adaptive", 3, None, verdict="use", rounds=ROUNDS)
SECRET = CompletionRequest(text="the prompt")


def ended(id: str = "cmpl-1", done: AnswerDone = DONE, request: CompletionRequest = SECRET) -> EndedRequest:
    return EndedRequest.of(id, "tiny", request, done, (0.5, 2.0))


def plain(reason: WhyPlain, done: AnswerDone = DONE) -> AnswerDone:
    completion = replace(done.completion, drafted=0, accepted=0, crowded_rounds=3 if reason is CROWDED else 0)
    return replace(done, completion=completion, why_plain=reason, rounds=RequestRounds(9, 9, 4.5, beside=2.5))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with filled(str(tmp_path / "a.db")) as store:
        yield store


def client_with(store: Store, *requests: EndedRequest, keys: KeyRing | None = None) -> TestClient:
    engines, settings = Engines(), ServerSettings(requests_per_min=0, **({"keys": keys} if keys else {}))
    for request in requests:
        engines.requests.add(request)
    return TestClient(create_app(store, JobService(store, None), settings, engines=engines))


def text(html: str) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)))


def test_rounds_are_summed_and_the_first_of_them_kept() -> None:
    log = RoundLog()
    for _ in range(MOST_ROUNDS):
        log.add(PLAIN, 0.5, 1)
        log.add(DRAFTED, 1.0, 3)
    total = log.total()
    assert (total.n, total.plain_tokens, total.drafted_tokens) == (2 * MOST_ROUNDS, MOST_ROUNDS, 4 * MOST_ROUNDS)
    assert (total.plain_s, total.drafted_s, total.beside) == (MOST_ROUNDS / 2, MOST_ROUNDS, 1.0)
    assert len(total.first) == MOST_ROUNDS and RoundLog().total() == RequestRounds()


def test_log_keeps_the_latest_and_no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "MOST_REQUESTS", 3)
    log = RequestLog()
    for n in range(5):
        log.add(ended(f"r{n}", DONE if n % 2 else plain(NO_GAIN)))
    assert [each.id for each in log.latest(9)] == ["r4", "r3", "r2"] and log.find("r0") is None
    assert [each.id for each in log.latest(1, 1)] == ["r3"]
    assert [each.id for each in log.latest(9, way="plain")] == ["r4", "r2"]
    assert [each.id for each in log.latest(9, way="drafts")] == ["r3"] and not log.latest(9, task="other")
    assert "the prompt" not in str(log.latest(9)) and "open sesame" not in str(log.latest(9))
    first, second = log.latest(2)
    assert second.rounds.first[1] is DRAFTED or (second.rounds.first[1] == DRAFTED and first.sums.tokens == 10)


def test_figures_are_of_the_request_alone() -> None:
    sums = ended().sums
    assert sums.ratio == pytest.approx(8 / 1.0 / (1 / 0.5)) and sums.decode_tok_s == pytest.approx(9 / 1.5)
    assert sums.acceptance_rate == 0.6 and ended(done=plain(NO_GAIN)).sums.ratio is None


@pytest.mark.parametrize(
    ("done", "asked", "sentence"),
    [
        (DONE, {}, "stored version 3 of code: drafts were measured to be faster"),
        (replace(DONE, version=None, verdict="unmeasured"), {}, "too few timings for a verdict"),
        (DONE, {"version": 2}, "the request asks for version 2"),
        (DONE, {"method": "swift"}, "the request asks for swift"),
        (plain(NO_GAIN), {}, NO_GAIN.message),
        (plain(REQUESTED), {"method": "plain"}, "the request asks for plain decoding"),
    ],
)
def test_reason_is_in_words(done: AnswerDone, asked: dict[str, object], sentence: str) -> None:
    assert sentence in why(ended(done=done, request=replace(SECRET, **asked)))


def test_aspects_name_plan_verdict_load_context_and_grammar() -> None:
    found = dict(aspects(ended(request=replace(SECRET, json_schema={}))))
    assert found == {
        "Way": "with drafts in 3 of 4 rounds: 1 by the model's draft, 1 by earlier text, 1 by the grammar",
        "Plan": "stored version 3 of code",
        "Verdict": "drafts were measured to be faster",
        "Load": "alone",
        "Context": "7 tokens of the prompt, 10 of the answer",
        "Grammar": "the text is constrained by a JSON schema",
    }
    crowded = dict(aspects(ended(done=replace(plain(CROWDED), verdict=None), request=replace(SECRET, forced=(0,)))))
    assert (
        crowded["Way"].startswith("plainly: with so many concurrent requests")
        and "does not learn" in crowded["Verdict"]
    )
    assert crowded["Load"].startswith("with 2.5 other requests on average; in 3 rounds")
    assert "tool call" in crowded["Grammar"]


def test_strip_has_a_bar_per_round_and_marks_what_drafted() -> None:
    strip = str(round_strip(ROUNDS.first))
    frames, filled_bars = (
        re.search(r'class="frame" d="([^"]+)', strip),
        re.search(r'class="by-draft" d="([^"]+)', strip),
    )
    assert (
        frames is not None and frames[1].count("M") == 3 and filled_bars is not None and filled_bars[1].count("M") == 1
    )
    assert "4 rounds, 3 with a draft; 6 of 10 drafted tokens were accepted." in strip
    assert [name for _, name in legend(ROUNDS.first)] == [
        "no draft",
        "drafted by the model's draft",
        "drafted by earlier text",
        "drafted by the grammar",
    ]
    assert 'height="96"' in str(round_strip([DRAFTED] * (PER_STRIP + 1))), "two rows"
    assert 'class="frame"' not in str(round_strip([PLAIN]))


def test_pages_list_and_show_requests(store: Store) -> None:
    many = [ended(f"cmpl-{n:04}", plain(NO_GAIN) if n % 2 else DONE) for n in range(PER_PAGE + 5)]
    client = client_with(store, *many)
    first = client.get("/requests").text
    assert first.count('scope="row"') == PER_PAGE and 'href="/requests/cmpl-0054"' in first
    second = client.get("/requests?page=2").text
    assert second.count('scope="row"') == 5 and "cmpl-0004" in second and "Newer" in second
    assert client.get("/requests?way=plain&task=code&model=").text.count('scope="row"') == (PER_PAGE + 5) // 2
    assert "No request of this kind is kept" in client.get("/requests?task=none").text
    page = text(client.get("/requests/cmpl-0054").text)
    assert "equal to plain decoding" in page and "Plan stored version 3 of code" in page and "4.00x" in page
    assert "2 4 5 3 the model's draft" in page, "the strip as a table"
    assert "open sesame" not in page and "Its texts" not in page
    gone = client.get("/requests/cmpl-none")
    assert gone.status_code == 404 and "there is no request 'cmpl-none' here" in unescape(gone.text)
    assert "No request has ended yet" in client_with(store).get("/requests").text


def test_failed_request_is_listed_with_its_reason(store: Store) -> None:
    failed = EndedRequest.failed(
        "cmpl-9", "tiny", SECRET, "the engine of tiny died: send the request again", 1.5, "ann"
    )
    client = client_with(store, ended(), failed)
    listed = text(client.get("/requests?way=failed").text)
    assert (
        "failed" in listed
        and "the engine of tiny died: send the request again" in listed
        and "stored version 3" not in listed
    )
    page = text(client.get("/requests/cmpl-9").text)
    assert "Why it failed" in page and "the engine of tiny died" in page and "1.5 s" in page
    assert "equal to plain" not in page and "the prompt" not in page
    assert "died" not in text(client.get("/requests?way=plain").text)


def test_texts_are_shown_with_the_key_that_sent_them_alone(store: Store, tmp_path: Path) -> None:
    (ann, ann_entry), (bob, bob_entry) = new_key("ann"), new_key("bob")
    (tmp_path / "keys").write_text(
        f"{ann_entry}{bob_entry}" if ann_entry.endswith("\n") else f"{ann_entry}\n{bob_entry}"
    )
    kept = EndedRequest.of("cmpl-1", "tiny", replace(SECRET, text="<b>" + "x" * 9000), DONE, (0.5, 2.0), "ann", True)
    assert len(kept.prompt) == request_log.MOST_CHARACTERS
    for key, sees in ((ann, True), (bob, False)):
        client = client_with(store, kept, keys=KeyRing(file=tmp_path / "keys"))
        client.post("/login", data={"key": key})
        page = client.get("/requests/cmpl-1").text
        assert ("open sesame" in page and "&lt;b&gt;xxx" in page) == sees and "<b>x" not in page


def test_last_page_of_a_full_log_lists_the_oldest_requests(store: Store) -> None:
    client = client_with(store, *(ended(f"r{n}") for n in range(request_log.MOST_REQUESTS)))
    page = client.get(f"/requests?page={request_log.MOST_REQUESTS // PER_PAGE}&way=drafts").text
    oldest = [f"r{n}" for n in reversed(range(PER_PAGE))]
    assert list(dict.fromkeys(re.findall(r'/requests/(r\d+)"', page))) == oldest
