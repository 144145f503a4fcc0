"""What pages say can be done or looked up works: terms lead to their sentence, commands parse, choices are offered."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from api import client_of
from fakes import READY
from pages import named_command
from searched import MODEL, fill
from serving import until_ready
from starlette.testclient import TestClient
from tiny_files import save

import swiftopt
from swiftopt.core.errors import InvalidInput
from swiftopt.core.requests import ServedModel
from swiftopt.server.app import create_app
from swiftopt.server.dashboard.playground import request_of
from swiftopt.server.dashboard.terms import LABELS, TERMS, explained, slug
from swiftopt.server.engines import Engines
from swiftopt.server.settings import ServerSettings
from swiftopt.store import Store
from swiftopt.worker.queue import JobService

SERVER = Path(swiftopt.__file__).parent / "server"
TYPED = {"prompt": "p", "plan": "", "task": "", "form": "text", "tokens": "5", "temperature": "0"}
BROWSER = {"Accept": "text/html"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "a.db")) as opened:
        yield opened


def test_each_term_has_one_sentence_and_a_place_on_the_page(store: Store) -> None:
    page = unescape(client_of(store).get("/terms").text)
    assert len({slug(term) for term in TERMS}) == len(TERMS) and set(LABELS.values()) <= set(TERMS)
    for term, sentence in TERMS.items():
        assert f'<div id="{slug(term)}"><dt><dfn>{term}</dfn></dt><dd>{sentence}</dd>' in page
        assert sentence.endswith(".") and len(sentence) < 120


def test_headings_and_figures_link_to_their_terms(store: Store) -> None:
    assert explained("Device") == "Device" and explained("<b>") == "&lt;b&gt;"
    assert explained("α").startswith('<a class="term" href="/terms#acceptance-rate" title="Accepted draft tokens')
    job = fill(store)
    client = client_of(store)
    for path, labels in (
        ("/plans", ("Ratio to plain", "α", "M", "Verdict")),
        (f"/searches/{job}", ("Best matchness", "Score", "Adopted", "Trial")),
        ("/plans/task?model=m&task=code", ("Interval", "Version")),
    ):
        page = unescape(client.get(path).text)
        for label in labels:
            assert re.search(rf'<a class="term" href="/terms#[a-z-]+" title="[^"]+">{label}</a>', page), (path, label)
    targets = {slug(term) for term in TERMS}
    assert set(re.findall(r'href="/terms#([^"]+)"', page)) <= targets


def commands() -> list[tuple[str, str]]:
    """(file, command) of every `swiftopt …` that a page or a sentence of the server names; docstrings are left out."""
    found = []
    for path in sorted([*SERVER.rglob("*.html"), *SERVER.rglob("*.py")]):
        text = re.sub(r'""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        codes = re.findall(r"(?:<code>|`)(swiftopt [a-z][^`<]*?)(?:</code>|`)", text)
        found += [(path.name, unescape(code)) for code in codes]
    return found


def test_pages_name_commands() -> None:
    assert {path for path, _ in commands()} >= {"plans_part.html", "searches_part.html", "login.html", "engines.py"}


@pytest.mark.parametrize(("where", "line"), commands())
def test_command_that_a_page_names_parses(
    where: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the command line's own parser has it; FILE is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text('{"prompt": "a"}\n')
    context, words = named_command(shlex.split(line)[1:])
    context.command.parse_args(context, words)


# What a command gets besides, so that it ends, or takes a port of its own.
ENDING = {"swiftopt worker": "--burst", "swiftopt serve --model MODEL": "--port 0 --json"}


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted({line for _, line in commands()}))
def test_command_that_a_page_names_runs(line: str, tmp_path: Path, redis_url: str) -> None:
    """With a tiny model as MODEL and a few prompts as FILE; what serves is ended once it answers."""
    prompts = [json.dumps({"prompt": f"w{n} w3 w5", "max_new_tokens": 40}) for n in range(6)]
    (tmp_path / "FILE").write_text("\n".join(prompts))
    words = f"{line} {ENDING.get(line, '')}".replace("MODEL", str(save(tmp_path / "tiny"))).split()
    services = {"SWIFTOPT_DATABASE_URL": str(tmp_path / "a.db")}
    if "worker" in words:  # With a Redis `tune` would wait for one.
        services["SWIFTOPT_REDIS_URL"] = redis_url
    command = [sys.executable, "-m", *words]
    environment = {**os.environ, **services}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            if "--json" in words:
                assert process.stdout is not None
                url = json.loads(process.stdout.readline())["url"]
                until_ready(url)
                process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 0, line
        finally:
            process.kill()


def test_addresses_that_are_unknown_get_a_page(store: Store) -> None:
    client = client_of(store)
    for path in ("/none", "/plans/none", "/jobs/none", "/static/none", "/requests/none", "/playground/none"):
        found = client.get(path, headers=BROWSER)
        assert found.status_code == 404 and found.headers["content-type"].startswith("text/html"), path
        assert 'role="alert"' in found.text and 'href="/"' in found.text


# --- the playground's choices


def served(store: Store, is_loaded: bool = True) -> TestClient:
    engines = Engines([ServedModel("m", "m")])
    if is_loaded:
        engines.of["m"].about = replace(READY, fingerprint=MODEL.fingerprint)
    return TestClient(create_app(store, JobService(store, None), ServerSettings(requests_per_min=0), engines=engines))


def test_form_of_jobs_names_the_only_model_that_is_served_until_something_is_typed(store: Store) -> None:
    client = served(store)
    assert '<input id="model" name="model" value="m"' in client.get("/jobs/new").text
    assert '<input id="model" name="model" value=""' in client.get("/jobs/new?model=").text


def test_playground_offers_tasks_versions_and_methods(store: Store) -> None:
    fill(store)
    page = unescape(served(store).get("/playground").text)
    assert re.search(r'<select id="task".*?<option value="code">code</option>', page)
    for value in ("3 of code", "2 of code", "1 of code", "prompt-lookup"):
        assert f'<option value="{value}">' in page
    linked = unescape(served(store).get("/playground?plan=2&task=code&model=m").text)
    assert '<option value="2 of code" selected>' in linked and '<option value="code" selected>' in linked
    assert '<option value="none" selected>none</option>' in unescape(served(store).get("/playground?plan=none").text)


def test_playground_has_no_button_while_the_model_is_loaded(store: Store) -> None:
    loading, ready = (served(store, is_loaded).get("/playground").text for is_loaded in (False, True))
    assert "Decode both ways" not in loading and "is not available: it is loading the model" in loading
    assert "Decode both ways" in ready and "is not available" not in ready


def test_version_that_is_chosen_names_its_task() -> None:
    asked = request_of({**TYPED, "plan": "3 of code"}, None)
    assert (asked.version, asked.task, asked.method) == (3, "code", None)
    assert request_of({**TYPED, "plan": "3 of code", "task": "code"}, None).version == 3
    with pytest.raises(InvalidInput, match="version 3 is of the task 'code', not of 'notes'") as error:
        request_of({**TYPED, "plan": "3 of code", "task": "notes"}, None)
    assert error.value.param == "plan"


def test_every_button_has_an_effect(store: Store) -> None:
    job = fill(store)
    client = client_of(store)
    for path in ("/plans/task?model=m&task=code", f"/jobs/{job}", "/jobs/new", f"/jobs/{job}/cancel", "/playground"):
        page = client.get(path).text
        assert "disabled" not in page, path
    assert "Cancel the job" not in client.get(f"/jobs/{job}/cancel").text, "it has ended"
