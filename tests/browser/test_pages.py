"""The dashboard in a real browser, on a real server with a real engine: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
from api import Served, serving
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright
from tiny_files import save

from swiftopt.server.dashboard import PAGES

CHROMIUM = shutil.which("chromium")
WIDTHS = (360, 1280, 1920)
START_S = 60
NASTY = ("<img src=x onerror=alert(1)>", "a'b\"c&amp;", "\u05e9\u05dc\u05d5\u05dd", "x" * 500)  # names of tasks

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="this machine has no Chromium: `make browser` installs it")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that has decoded something."""
    where = tmp_path_factory.mktemp("served")
    options = ["--model", f"tiny={save(where / 'tiny')}", "--rate", "0", "--threads", "1"]
    with serving(str(where / "a.db"), where / "log", *options) as served:
        until = time.monotonic() + START_S
        while served.client.get("/health").status_code != 200:
            assert time.monotonic() < until, served.log.read_text()
            time.sleep(0.1)
        for task in ("code", *NASTY):
            ask(served, task)
        yield served


def ask(served: Served, task: str) -> None:
    """Have the engine decode something of a task."""
    body = {"model": "tiny", "prompt": "w3 w5 w7", "max_tokens": 16, "swiftopt": {"task": task}}
    assert served.client.post("/v1/completions", json=body).status_code == 200


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
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


@pytest.mark.parametrize("address", [address for address, _ in PAGES])
def test_page_is_sound_at_every_width_in_both_themes(browser: Browser, server: Served, address: str) -> None:
    for theme in ("light", "dark"):
        with Tab(browser, server, color_scheme=theme) as tab:
            for width in WIDTHS:
                tab.page.set_viewport_size({"width": width, "height": 900})
                tab.page.goto(address)
                assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
            found = Axe().run(tab.page).response["violations"]
            serious = [rule for rule in found if rule["impact"] in ("serious", "critical")]
            assert not serious, [(rule["id"], rule["nodes"][0]["html"]) for rule in serious]


@pytest.mark.parametrize("address", [address for address, _ in PAGES])
def test_page_says_the_same_without_scripts(browser: Browser, server: Served, address: str) -> None:
    with Tab(browser, server, java_script_enabled=False) as tab:
        assert tab.page.goto(address).status == 200
        assert tab.page.locator("h1").count() == 1 and "alert" not in tab.wrong


def test_overview_follows_what_is_decoded(browser: Browser, server: Served) -> None:
    with Tab(browser, server) as tab:
        tab.page.goto("/")
        tab.page.wait_for_selector("th:has-text('code')")
        ask(server, "new-task")
        tab.page.wait_for_selector("th:has-text('new-task')", timeout=10_000)


def test_traffic_is_drawn_from_its_tables(browser: Browser, server: Served) -> None:
    with Tab(browser, server) as tab:
        tab.page.goto("/traffic?span=10+minutes")
        tab.page.wait_for_selector("figure.chart canvas")
        assert tab.page.locator("figure.chart canvas").count() == 6
        before = tab.page.locator(".facts").inner_text()
        ask(server, "code")
        tab.page.wait_for_function("before => document.querySelector('.facts').innerText !== before", arg=before)
        assert tab.page.locator("figure.chart canvas").count() == 6
