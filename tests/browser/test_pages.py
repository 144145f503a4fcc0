"""The dashboard in a real browser, on a real server with a real engine: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api import Served, serving, until_ready
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright
from searched import MODEL, fill, searching, trials
from tiny_files import save

from swiftopt.core.events import TrialsDone
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord
from swiftopt.server.dashboard import PAGES
from swiftopt.store import Store
from swiftopt.store.served_trials import ServedSearch

CHROMIUM = shutil.which("chromium")
WIDTHS, SCHEMES = (360, 1280, 1920), ("light", "dark")
OF_PLANS = "/plans/task?model=m&task=code"  # what `fill` stores
COMPARED = "/plans/compare?model=m&task=code&left=1&right=2"
NASTY = ("<img src=x onerror=alert(1)>", "a'b\"c&amp;", "\u05e9\u05dc\u05d5\u05dd", "x" * 500)  # names of tasks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="this machine has no Chromium: `make browser` installs it"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that has decoded something."""
    where = tmp_path_factory.mktemp("served")
    (where / "streams").mkdir()
    lines = [json.dumps({"prompt": f"w{n} w3 w5", "max_new_tokens": 200}) for n in range(120)]
    (where / "streams" / "words.jsonl").write_text("\n".join(lines))
    (where / "streams" / "few.jsonl").write_text("\n".join(lines[:40]))
    options = ["--model", f"tiny={save(where / 'tiny')}", "--rate", "0", "--threads", "1"]
    options += ["--stream-folder", str(where / "streams")]
    with Store.open(str(where / "a.db")) as store:
        fill(store)
    with serving(str(where / "a.db"), where / "log", *options) as served:
        until_ready(served)
        for task in ("code", *NASTY):
            ask(served, task)
        yield served


def ask(served: Served, task: str, n_tokens: int = 16) -> None:
    """Have the engine decode something of a task."""
    body = {"model": "tiny", "prompt": "w3 w5 w7", "max_tokens": n_tokens, "swiftopt": {"task": task}}
    assert served.client.post("/v1/completions", json=body).status_code == 200


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Its address bar's menus are pages as well, made for each window: half of its time."""
    options = ["--no-sandbox", "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup"]
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield launched
        launched.close()


class Tab:
    """A page in the browser, and what went wrong in it."""

    def __init__(self, browser: Browser, served: Served, **options: Any) -> None:
        self.page: Page = browser.new_page(base_url=served.url, **options)
        self.wrong: list[str] = []
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda made: None if made.url.startswith(served.url) else self.wrong.append(made.url))

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *failure: object) -> None:
        self.page.close()
        if failure[0] is None:
            assert not self.wrong, self.wrong


def sound(page: Page, schemes: Sequence[str] = ("light",)) -> None:
    """Check that the page fits every width, and that axe finds nothing, in each scheme."""
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (page.url, width)
        violations = axe(page)
        assert not violations, (page.url, scheme, violations)


def axe(page: Page) -> list[tuple[str, str]]:
    """The rules that a page breaks, of any impact, and where it breaks each first."""
    found = Axe().run(page).response["violations"]
    return [(rule["id"], rule["nodes"][0]["html"]) for rule in found]


ADDRESSES = [*(address for address, _ in PAGES), "/jobs/new", "/terms", OF_PLANS, COMPARED]


@pytest.mark.parametrize(
    "address", [*ADDRESSES[:4], *(pytest.param(address, marks=pytest.mark.slow) for address in ADDRESSES[4:])]
)
def test_page_is_small_at_first_and_sound_at_every_width_in_both_themes(
    browser: Browser, server: Served, address: str
) -> None:
    loaded: list[Request] = []
    with Tab(browser, server) as tab:
        tab.page.on("requestfinished", lambda made: loaded.append(made))
        tab.page.goto(address)
        sizes = {made.url: made.sizes()["responseBodySize"] for made in loaded[:]}
        assert len(sizes) > 3 and sum(sizes.values()) <= 150_000, sizes
        sound(tab.page, SCHEMES)


def every_address(server: Served) -> list[str]:
    """Those that name something stored, and pages of errors, besides."""
    with Store.open(str(server.log.parent / "a.db")) as store:
        store.add_served_trials(ServedSearch("kept", MODEL.fingerprint, "tiny", "code", "2026"), trials(30))
        searched = store.searches()[0]
        jobs = store.jobs.latest()
    request = re.search(r'href="(/requests/[^"]+)"', server.client.get("/requests").text)
    assert request is not None
    both = f"left={searched.job}/{searched.task}&right=kept/code"
    named = [
        request[1],
        *(f"/jobs/{job.id}" for job in jobs[:1]),
        f"/searches/{searched.job}",
        "/searches/kept?trial=7",
    ]
    return [*ADDRESSES, *named, f"/searches/compare?{both}", "/requests?way=failed", "/jobs?page=99", "/no-such-page"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_breaks_a_rule_overflows_or_reports_an_error(
    browser: Browser, server: Served, width: int, scheme: str
) -> None:
    broken: list[object] = []
    for address in every_address(server):
        with Tab(browser, server, color_scheme=scheme, viewport={"width": width, "height": 900}) as tab:
            found = tab.page.goto(address)
            assert found is not None
            if found.status >= 400:
                tab.wrong.clear()  # the browser notes the status
            overflow = tab.page.evaluate("document.documentElement.scrollWidth") > width
            broken += [(address, *each) for each in axe(tab.page)] + ([(address, "overflow")] if overflow else [])
    assert not broken, broken


@pytest.mark.parametrize("address", ADDRESSES)
def test_page_says_the_same_without_scripts(browser: Browser, server: Served, address: str) -> None:
    with Tab(browser, server, java_script_enabled=False) as tab:
        assert tab.page.goto(address).status == 200
        assert tab.page.locator("h1").count() == 1 and "alert" not in tab.wrong


def test_newcomer_finds_five_answers_within_three_clicks(browser: Browser, server: Served) -> None:
    """What is in use, since when, what it saves, why, and how to go back."""
    task = "newcomer"
    with Store.open(str(server.log.parent / "a.db")) as store:
        store.add_layer_set(LayerSetRecord("tiny", task, LayerSet(4, frozenset({1})), verdict="use"))
    ask(server, task)
    with Tab(browser, server, java_script_enabled=False) as tab:
        page = tab.page
        page.goto("/")
        row = page.locator("tr", has=page.get_by_role("rowheader", name=task, exact=True))
        heads = [head.inner_text() for head in page.locator("thead th").all()]
        cells = dict(zip(heads, [cell.inner_text() for cell in row.locator("th, td").all()], strict=False))
        assert cells["In use"] == "drafts" and re.fullmatch(r"\d\d:\d\d", cells["Since"])
        assert cells["Ratio to plain"] and cells["Saved"]
        page.get_by_role("link", name="Plans", exact=True).click()
        page.get_by_role("link", name=task, exact=True).click()
        expect(page.get_by_role("heading", name="What it was judged on")).to_be_visible()
        page.get_by_role("button", name="Pin plain decoding").click()
        expect(page.locator("main")).to_contain_text("In use: plain (pinned)")
        page.goto("/")
        assert "plain (pinned)" in row.inner_text()


def test_overview_follows_what_is_decoded(browser: Browser, server: Served) -> None:
    with Tab(browser, server) as tab:
        tab.page.goto("/")
        tab.page.wait_for_selector("th:has-text('code')")
        ask(server, "new-task")
        tab.page.wait_for_selector("th:has-text('new-task')")


def test_traffic_is_drawn_from_its_tables(browser: Browser, server: Served) -> None:
    with Tab(browser, server) as tab:
        tab.page.goto("/traffic?span=10+minutes")
        expect(tab.page.locator("figure.chart canvas")).to_have_count(6)
        before = tab.page.locator(".facts").inner_text()
        ask(server, "code")
        tab.page.wait_for_function("before => document.querySelector('.facts').innerText !== before", arg=before)
        expect(tab.page.locator("figure.chart canvas")).to_have_count(6)


def test_request_is_found_with_its_rounds_and_why_it_was_plain(browser: Browser, server: Served) -> None:
    """Two clicks from the first page; the model of the server drafts by itself, or says why not."""
    ask(server, "asked", 40)
    body = {"model": "tiny", "prompt": "w3", "max_tokens": 8, "swiftopt": {"plan": "plain", "task": "asked"}}
    assert server.client.post("/v1/completions", json=body).status_code == 200
    with Tab(browser, server, java_script_enabled=True) as tab:
        page = tab.page
        page.goto("/requests?task=asked")
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("the request asks for plain decoding")
        rows.nth(1).get_by_role("link").click()
        expect(page.get_by_role("heading", name="How it was decoded, and why")).to_be_visible()
        expect(page.get_by_role("img", name="Rounds").last).to_be_visible()
        sound(page)


# --- jobs


def reach(page: Page, what: str) -> None:
    """Press Tab until a field of that name, or what reads so, has the focus."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("(at => (at.name || at.innerText || '').trim())(document.activeElement)") == what:
            return
    raise AssertionError(f"no Tab leads to {what}")


def model_path(served: Served) -> str:
    """What the server's engine has loaded."""
    return str(served.client.get("/v1/models").json()["data"][0]["root"])


def test_job_is_submitted_and_followed_with_the_keyboard_alone(browser: Browser, server: Served) -> None:
    """It runs in the server's own engine; its page shows what happens without being loaded again."""
    with Tab(browser, server) as tab:
        page = tab.page
        page.goto("/jobs")
        reach(page, "Submit a job")
        page.keyboard.press("Enter")
        page.wait_for_url("**/jobs/new")
        reach(page, "model")
        page.keyboard.type(model_path(server))
        reach(page, "stream")
        page.keyboard.type("few.jsonl")
        reach(page, "Submit")
        page.keyboard.press("Enter")
        page.wait_for_selector("h1:has-text('Job ')")
        page.evaluate("window.stillHere = true")
        page.wait_for_selector("p.facts:has-text('-engine')", timeout=30_000)
        page.wait_for_selector("#now", timeout=30_000)
        page.wait_for_function("document.querySelectorAll('tr[id^=event-]').length > 12", timeout=60_000)
        ids = [int(str(row.get_attribute("id"))[6:]) for row in page.locator("tr[id^=event-]").all()]
        assert ids == sorted(ids, reverse=True)
        page.wait_for_selector("strong.state.succeeded", timeout=120_000)
        page.wait_for_selector("a:has-text('Download all 40')")
        expect(page.locator("#found")).to_have_count(1)
        assert page.evaluate("window.stillHere")
        page.set_viewport_size({"width": 400, "height": 900})
        boxes = "[...document.querySelectorAll('.figures > div')]"
        assert page.evaluate(f"{boxes}.every(each => each.scrollWidth <= each.clientWidth)")
        assert not axe(page)


def test_running_job_pauses_and_goes_on_by_its_buttons(browser: Browser, server: Served) -> None:
    with Tab(browser, server) as tab:
        page = tab.page
        page.goto(f"/jobs/new?model={model_path(server)}&stream=words.jsonl&task=again")
        page.click("button:has-text('Submit')")
        page.wait_for_selector("#now", timeout=30_000)
        reach(page, "Pause")
        page.keyboard.press("Enter")
        page.wait_for_selector("strong.state:text-is('paused')", timeout=30_000)
        reach(page, "Resume")
        page.keyboard.press("Enter")
        page.wait_for_selector("strong.state:text-is('running')", timeout=30_000)
        expect(page.locator("p.facts:has-text('attempt 2')")).to_have_count(1)
        page.click("button:has-text('Stop')")
        page.wait_for_selector("strong.state.succeeded", timeout=60_000)


def test_job_is_submitted_and_cancelled_without_scripts(browser: Browser, server: Served, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "w1"}\n')
    with Tab(browser, server, java_script_enabled=False) as tab:
        page = tab.page
        page.goto("/jobs/new")
        page.fill("#model", NASTY[0])
        page.set_input_files("#file", tmp_path / "a.jsonl")
        page.fill("#limit", "none")
        page.click("button:has-text('Submit')")
        expect(page.get_by_role("alert")).to_contain_text("'none'")
        assert page.input_value("#model") == NASTY[0]
        tab.wrong.clear()  # the browser notes the status 422
        page.fill("#model", "smollm2-135m")  # a job of a model that does not exist is refused
        page.fill("#limit", "1")
        page.set_input_files("#file", tmp_path / "a.jsonl")
        page.click("button:has-text('Submit')")
        assert page.inner_text("strong.state") == "queued"
        page.click("button:has-text('Cancel')")
        assert "without a result" in page.inner_text("main")
        page.click("button:has-text('Cancel the job')")
        assert page.inner_text("strong.state") == "cancelled"


def test_open_page_says_that_the_database_is_away_and_goes_on_with_it(browser: Browser, tmp_path: Path) -> None:
    with serving(str(tmp_path / "a.db"), tmp_path / "log") as served, Tab(browser, served) as tab:
        tab.page.route("**/hx-sse*", lambda route: (time.sleep(0.5), route.continue_()))  # a script that comes late
        tab.page.goto("/jobs")
        tab.page.wait_for_selector("text=There is no job yet")
        for there, named in (("swiftopt_jobs", "gone"), ("gone", "swiftopt_jobs")):
            with sqlite3.connect(tmp_path / "a.db") as database:
                database.execute(f"ALTER TABLE {there} RENAME TO {named}")
            shown = "[role=alert]" if named == "gone" else "text=There is no job yet"
            tab.page.wait_for_selector(shown)


# --- plans and searches


def test_version_is_chosen_compared_promoted_and_rolled_back(browser: Browser, server: Served) -> None:
    with Tab(browser, server) as tab:
        tab.page.goto("/plans")
        tab.page.get_by_role("link", name="code", exact=True).first.click()
        tab.page.get_by_role("link", name="1", exact=True).click()
        tab.page.get_by_role("button", name="Compare").click()
        expect(tab.page.get_by_role("img", name="Layer map of version")).to_have_count(2)
        tab.page.go_back()
        tab.page.get_by_role("button", name="Make version 1 the best one").click()
        expect(tab.page.get_by_role("status")).to_have_text("This version is the best one now.")
        with tab.page.expect_download() as download:
            tab.page.get_by_role("link", name="Export the layer set").click()
        assert download.value.suggested_filename == "layer-set-v1.json"
        tab.page.get_by_role("button", name="Roll back to version 2").click()
        expect(tab.page.get_by_role("heading", name="Version 2, the best one")).to_be_visible()


def test_served_task_is_pinned_and_judged_again(browser: Browser, server: Served) -> None:
    with Store.open(str(server.log.parent / "a.db")) as store:
        store.add_layer_set(LayerSetRecord("tiny", "pinned", LayerSet(4, frozenset({1}))))
    ask(server, "pinned")
    with Tab(browser, server, java_script_enabled=False) as tab:
        tab.page.goto("/plans/task?model=tiny&task=pinned")
        tab.page.get_by_role("button", name="Pin plain decoding").click()
        expect(tab.page.locator("main")).to_contain_text("In use: plain (pinned)")
        tab.page.get_by_role("button", name="Unpin").click()
        expect(tab.page.locator("main")).not_to_contain_text("(pinned)")


def test_search_follows_its_job(browser: Browser, server: Served) -> None:
    with Store.open(str(server.log.parent / "a.db")) as store:
        lease = searching(store, 20)
        with Tab(browser, server) as tab:
            tab.page.goto(f"/searches/{lease.job}")
            for width in WIDTHS:
                tab.page.set_viewport_size({"width": width, "height": 900})
                assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
            assert not axe(tab.page)
            store.jobs.checkpoint(lease, 2, [TrialsDone("code", tuple(trials(5, start=20)))], {})
            tab.page.wait_for_selector(".figures dd:text-is('25')")
            store.jobs.end(lease, "succeeded")
            tab.page.wait_for_selector(".figures dd:text-is('succeeded')")


def test_dot_leads_to_its_trial_and_searches_compare(browser: Browser, server: Served) -> None:
    with Store.open(str(server.log.parent / "a.db")) as store:
        store.add_served_trials(ServedSearch("served", MODEL.fingerprint, "tiny", "code", "2026"), trials(30))
    with Tab(browser, server) as tab:
        page = tab.page
        page.goto("/searches?task=code&kind=job&sort=trials")
        page.locator("tbody tr").first.get_by_role("link").click()
        page.get_by_label("Trial 7").first.click()
        expect(page.get_by_role("heading", name="Trial 7")).to_be_visible()
        expect(page.get_by_role("img", name="Layer map of trial 7")).to_be_visible()
        page.get_by_role("link", name="Trial 8", exact=True).last.click()
        expect(page.get_by_role("heading", name="Trial 8")).to_be_visible()
        sound(page)
        page.goto("/searches")
        page.get_by_role("button", name="Compare the searches").click()
        expect(page.get_by_role("img", name="Layer map of trial")).to_have_count(2)
        sound(page)


# --- playground


def test_playground_decodes_both_ways_and_goes_on(browser: Browser, server: Served) -> None:
    with Tab(browser, server) as tab:
        page = tab.page
        page.goto("/playground?plan=prompt-lookup&form=text")
        page.fill("#prompt", f"w3 w5 w7 {NASTY[0]}")
        page.fill("#tokens", "200")
        page.click("button:has-text('Decode both ways')")
        page.wait_for_selector("text=Both texts are the same, token by token.")
        plan, plain = page.locator(".decoded").all()
        texts = [page.evaluate(WITHOUT_REJECTED, each.element_handle()) for each in (plan, plain)]
        assert texts[0] == texts[1] and len(texts[0]) > 200
        assert plan.locator(".from-text").count() > 20 and plain.locator(".from-text").count() == 0
        assert page.locator("del:visible").count() == 1  # the one that says what they look like
        page.check("#show-rejected")
        assert page.locator(".decoded del:visible").count() == plan.locator("del").count() > 0
        sound(page)
        first = page.url
        page.click("button:has-text('Decode both ways')")  # the form still has what was typed
        page.wait_for_url(lambda url: url != first)


WITHOUT_REJECTED = "of => [...of.querySelectorAll('span')].map(each => each.textContent).join('')"


def test_playground_works_without_scripts_and_stops(browser: Browser, server: Served) -> None:
    with Tab(browser, server, java_script_enabled=False) as tab:
        page = tab.page
        page.goto("/playground")
        page.select_option("#form", "text")
        page.fill("#prompt", "w3")
        page.fill("#tokens", "none")
        page.click("button:has-text('Decode both ways')")
        expect(page.get_by_role("alert")).to_contain_text("tokens is 'none'")
        tab.wrong.clear()  # the browser notes the status 400
        page.goto("/playground?plan=no-such-method")
        page.select_option("#form", "text")
        page.fill("#prompt", "w3")
        page.fill("#tokens", "16")
        page.click("button:has-text('Decode both ways')")
        page.wait_for_selector("[role=alert]:has-text('no-such-method')")
        page.select_option("#plan", "")
        page.fill("#tokens", "200")
        with ThreadPoolExecutor(48) as others:  # that keep the engine busy
            for _ in range(48):
                others.submit(ask, server, "busy", 200)
            page.click("button:has-text('Decode both ways')")
            page.click("button:has-text('Stop')")
        expect(page.locator("main")).to_contain_text("it was stopped")


def test_point_between_two_gaps_is_drawn_where_points_are_too_many_to_be(browser: Browser, server: Served) -> None:
    """The colour of a chart's first series is the only one of its canvas that is no grey."""
    with Tab(browser, server, viewport={"width": 360, "height": 900}) as tab:
        tab.page.goto("/traffic")
        n_coloured = tab.page.evaluate(
            """async () => {
                const figure = document.querySelector("figure.chart").cloneNode(true);
                figure.querySelector(".plot").replaceChildren();
                const [body] = figure.querySelector("details table").tBodies;
                const row = body.rows[0];
                for (const cell of row.cells) cell.textContent = "";
                body.replaceChildren(...[...Array(200).keys()].map((at) => {
                    const another = row.cloneNode(true);
                    another.cells[0].dataset.x = 60 * at;
                    return another;
                }));
                body.rows[100].cells[1].textContent = "5";
                // Outside of what live updates replace, and without the names by which these find it.
                figure.querySelectorAll("[id]").forEach((part) => part.removeAttribute("id"));
                document.body.append(figure);
                document.dispatchEvent(new Event("htmx:sse:after:message"));
                await new Promise((drawn) => setTimeout(drawn, 200));
                const canvas = figure.querySelector("canvas");
                const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                let coloured = 0;
                for (let i = 0; i < data.length; i += 4) {
                    coloured += data[i + 3] > 128 && Math.abs(data[i] - data[i + 2]) > 60;
                }
                return coloured;
            }"""
        )
    assert n_coloured
