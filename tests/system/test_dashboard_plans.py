"""The dashboard's pages of plans and searches, as a server answers them on a real store."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlencode

import pytest
from api import client_of, token
from click.testing import CliRunner
from job_table import finished, task_finished
from searched import fill, searching, trials
from starlette.testclient import TestClient

from swiftopt.cli.main import swiftopt
from swiftopt.core.events import (
    DraftingChosen,
    SearchStatus,
    ShiftStatus,
    SkipRatioLowered,
    TaskTuning,
    TrialsDone,
)
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord, Plan
from swiftopt.core.types import ORIGINS, Timings, origin_words
from swiftopt.server.dashboard import plans, render
from swiftopt.server.dashboard.drawing import Plot, differing_parts, layer_map, map_words, spans, ticks
from swiftopt.server.dashboard.searches import is_news
from swiftopt.server.dashboard.trial_costs import front_of, tried_sets
from swiftopt.server.dashboard.trials import skip_shares
from swiftopt.store import Store
from swiftopt.store.results import StoredSearch

OF = {"model": "m", "task": "code"}
NASTY = ("<img src=x onerror=alert(1)>", "a'b\"c&amp;", "\u05e9\u05dc\u05d5\u05dd", "x" * 10_000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "a.db")) as opened:
        yield opened


@pytest.fixture
def client(store: Store) -> TestClient:
    return client_of(store)


def text(client: TestClient, path: str, status: int = 200, **query: object) -> str:
    """Return the text of a page."""
    found = client.get(f"{path}?{urlencode(query)}" if query else path)
    assert found.status_code == status, found.text
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", found.text)))


def post(client: TestClient, path: str, **values: object) -> int:
    """Send a form of the task's page, and return the status."""
    page = client.get("/plans/task", params={**OF, "version": 1})
    return client.post(path, data={"token": token(page.text), **OF, **values}, follow_redirects=False).status_code


def test_pages_of_an_empty_database_explain_how_to_fill_it(client: TestClient) -> None:
    assert "No plan is stored yet" in text(client, "/plans")
    assert "Nothing has been tried yet" in text(client, "/searches")
    assert "no layer set is stored for m/code" in text(client, "/plans/task", 404, **OF)
    assert "no job 'none' is stored" in text(client, "/searches/none", 404)
    assert client.get("/plans/task", params={"model": "", "task": "code"}).status_code == 422


def test_task_page_shows_its_versions_and_the_evidence_of_one(store: Store, client: TestClient) -> None:
    job = fill(store)
    best = text(client, "/plans/task", **OF)
    assert "Version 2, the best one" in best and "Served requests: plain and drafted rounds of each. Each text" in best
    first = text(client, "/plans/task", **OF, version=1)
    assert (
        f"Job {job}, on prompts that its search did not score: the interval holds 1." in first
        and "10.0 tok/s" in first
        and "10.5 tok/s" in first
    )
    assert "p3 6 10.00 6 8.00 1.25x six" in first and "request 2 8 4.00 8 5.00 0.80x" in best
    plain = text(client, "/plans/task", **OF, version=3)
    assert "decodes with plain, which needs no layer set" in plain
    assert "there is no version 9 here: stored are 3, 2, 1" in text(client, "/plans/task", 404, **OF, version=9)
    assert "version 2 of 3" in text(client, "/plans")


def test_version_without_stored_pairs_shows_the_output_of_its_job(store: Store, client: TestClient) -> None:
    fill(store, evidence=())
    found = text(client, "/plans/task", **OF, version=1)
    assert "of this version only the plain runs are stored" in found and "p3 6 10.00 – – – six" in found


def test_version_of_a_comparison_has_it_as_evidence(store: Store, client: TestClient) -> None:
    fill(store)
    row = {"method": "spd", "title": "SpD", "tok_s": 12.5, "ratio": 1.25, "ratio_interval": [1.1, 1.4], "prompts": 8}
    store.add_comparison("m", "code", "cpu", "float32", {"plan": {"version": 3}, "results": [row]}, "2026-11-22")
    found = text(client, "/plans/task", **OF, version=3)
    assert "A comparison of methods on cpu, 2026-11-22." in found and "SpD 12.5 1.25x 1.10–1.40 8" in found


def test_plan_shows_the_acceptance_of_its_own_evidence(store: Store, client: TestClient) -> None:
    fill(store)
    own = store.layer_set("m", "code", 2)
    figures = {"measured_speedup": 1.4, "measured_interval": (1.3, 1.5)}
    measured = {"acceptance_rate": 0.61, "mean_generated_length": 2.44, "device": "cpu", "dtype": "float32"}
    store.add_plan("m", "code", Plan("swift", own, verdict="use", **figures, **measured))
    store.add_plan("m", "other", Plan("spd", verdict="use", draft_model="small", **figures, **measured))
    for task in ("code", "other"):
        assert f"{task} m" in (plans := text(client, "/plans")) and "use 1.40x 1.30–1.50 0.61 2.44 cpu" in plans
        page = text(client, "/plans/task", model="m", task=task)
        assert "use 1.40x 1.30–1.50 0.61 2.44 cpu" in page, "among the versions"
        assert "α, acceptance rate 0.61 M, tokens per pass 2.44" in page
    assert "1.40x 1.30–1.50 0.70" not in text(client, "/plans/task", **OF)


def test_forms_promote_and_roll_back_a_version_only_with_their_token(store: Store, client: TestClient) -> None:
    fill(store)
    for path in ("/plans/promote", "/plans/rollback", "/plans/pin"):
        sent = client.post(path, data={**OF, "version": 1, "served": "m", "way": "plain", "token": "forged"})
        assert sent.status_code == 403
    assert store.lookup("m", "code").version == 2
    assert post(client, "/plans/promote", version=1) == 303
    assert store.lookup("m", "code").version == 1
    assert "Roll back to version 2" in text(client, "/plans/task", **OF)
    assert post(client, "/plans/rollback") == 303
    assert store.lookup("m", "code").version == 2
    assert "rolled back to version 2" in text(client, "/plans/task", **OF)
    assert post(client, "/plans/promote", version=9) == 404
    assert post(client, "/plans/promote", version="x") == 422


def test_only_version_can_not_be_rolled_back(store: Store, client: TestClient) -> None:
    fill(store)
    store.add_layer_set(LayerSetRecord("m", "notes", LayerSet(8)))
    assert "Roll back" not in text(client, "/plans/task", model="m", task="notes")
    assert post(client, "/plans/rollback", task="notes") == 404


def test_export_equals_the_commands_output(store: Store, client: TestClient, tmp_path: Path) -> None:
    fill(store)
    for version in (1, 2):
        found = client.get("/plans/export", params={**OF, "version": version})
        command = ["layers", "export", "m/code", "--version", str(version), "--db", str(tmp_path / "a.db")]
        assert found.text == CliRunner().invoke(swiftopt, command).stdout
        assert found.headers["content-disposition"] == f'attachment; filename="layer-set-v{version}.json"'
    assert "has no layer set" in text(client, "/plans/export", 404, **OF, version=3)


def test_two_versions_are_compared_side_by_side(store: Store, client: TestClient) -> None:
    fill(store)
    found = text(client, "/plans/compare", **OF, left=1, right=2)
    assert "They differ in attention 0–1, 3–7; MLP 0–2, 4–7, marked by frames." in found
    assert "α, acceptance rate – 0.70 ≠" in found and "Device cpu cpu" in found
    assert 'class="differs"' in client.get("/plans/compare", params={**OF, "left": 1, "right": 2}).text
    assert "The layer maps are the same." in text(client, "/plans/compare", **OF, left=1, right=1)
    assert "needs no layer set" in text(client, "/plans/compare", **OF, left=1, right=3)
    assert "there is no version 7" in text(client, "/plans/compare", 404, **OF, left=1, right=7)


def test_names_cannot_break_a_page(store: Store, client: TestClient) -> None:
    for name in NASTY:
        store.add_layer_set(LayerSetRecord(f"org/{name}", name, LayerSet(8, frozenset({2}))))
        searching(store, 3, name)
        store.jobs.act(store.searches()[0].job, "cancel")
    for path in ("/plans", "/searches"):
        page = client.get(path)
        assert page.status_code == 200 and "<img" not in page.text and len(page.text) < 100_000
        links = [unescape(link) for link in re.findall(r'href="(/(?:plans|searches)[/?][^"]+)"', page.text)]
        assert len(links) == len(NASTY)
        for link in links:
            found = client.get(link)
            assert found.status_code == 200 and "<img" not in found.text


def test_map_repeats_its_colours_in_words_and_marks() -> None:
    layer_set = LayerSet(8, frozenset({2, 3, 5}), frozenset(), (("mlp", "int4-64"), ("mlp:1", "stored")))
    assert map_words(layer_set) == (
        "Attention: skipped in 2–3, 5; kept in 0–1, 4, 6–7. MLP: kept in 1; int4-64 in 0, 2–7. Head: kept."
    )
    drawn = layer_map(layer_set, "<title>")
    assert "<title>&lt;title&gt;</title>" in drawn and map_words(layer_set) in drawn
    cells = {name: len(re.findall("v20", path)) for name, path in re.findall(r'<path class="(\w+)" d="([^"]+)"', drawn)}
    assert cells == {"kept": 5 + 1 + 1, "int4": 7 + 1, "skipped": 3 + 1}, "and one of each in the legend"
    assert len(layer_map(LayerSet(200), "deep")) < 20_000


def test_spans_and_differences_of_sets() -> None:
    assert spans([]) == "" and spans([5, 1, 2, 3, 7]) == "1–3, 5, 7"
    one, two = LayerSet(8, frozenset({2})), LayerSet(8, frozenset(), frozenset({3}))
    assert differing_parts(one, two) == [("attn", 2), ("mlp", 3)] and differing_parts(one, one) == []


def test_search_page_shows_trials_and_their_cost(store: Store, client: TestClient) -> None:
    job = fill(store)
    found = text(client, f"/searches/{job}", task="code")
    assert "The search ended: the trials are used up." in found
    best = max(store.tried(job, "code"), key=lambda each: each.score)
    assert f"{best.step} {best.score:.2f} {best.matchness:.2f} at random" in found
    assert "skipped in all of the best 4 trials" in found
    assert "int4 4.000 ms" in found and "cpu, float32, context of 256 tokens" in found
    assert "has no trials for this task: it has some for code" in text(client, f"/searches/{job}", 404, task="x")
    assert re.search(rf"{job[:11]}\S* code [\d.]+ [\d.]+ 40 a job, succeeded m", text(client, "/searches"))


def test_search_page_states_that_costs_are_missing(store: Store, client: TestClient) -> None:
    lease = searching(store, 5)
    found = text(client, f"/searches/{lease.job}")
    assert "No measured costs of this model are stored" in found and "running" in found


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf])
def test_infinite_figures_do_not_break_a_page(store: Store, client: TestClient, figure: float) -> None:
    lease = searching(store, 20)
    shown = [f"/jobs/{lease.job}", f"/searches/{lease.job}", f"/plans/task?{urlencode(OF | {'task': 't'})}"]
    if not math.isnan(figure):  # which SQLite does not store
        odd = replace(trials(1, start=20)[0], score=figure)
        store.jobs.checkpoint(lease, 2, [TrialsDone("code", (odd,))], {})
        store.jobs.checkpoint(lease, 3, [TrialsDone("other", (odd,))], {})
        shown.append(f"/searches/{lease.job}?task=other")
    done = finished()
    spent = replace(done.completion, timings=Timings(figure, figure, figure, figure), prefill_s=figure)
    events = [SkipRatioLowered("t", figure, figure), DraftingChosen("t", figure, 4, ((1.0, 2),), figure, figure)]
    store.jobs.checkpoint(lease, 4, [*events, replace(done, completion=spent)], {})
    found = task_finished(lease.job)
    odd_set = replace(found.record, evidence=((1, figure, 1, 2.0), (4, 2.0, 4, 1.0)))
    store.jobs.finish_task(lease, 5, replace(found, record=odd_set, draft_cost=figure), "swift", "always", {})
    store.jobs.end(lease, "succeeded")
    assert [client.get(path).status_code for path in shown] == [200] * len(shown)


def test_job_without_trials_is_described_as_such(store: Store, client: TestClient) -> None:
    lease = searching(store, 0)
    assert "This job is running and has tried nothing yet." in text(client, f"/searches/{lease.job}")


def test_front_has_the_sets_that_no_cheaper_one_matches(store: Store) -> None:
    job = fill(store)
    tried, costs = store.tried(job, "code"), store.cost_profiles("f" * 16)[0]
    found = tried_sets(tried, costs)
    assert sum(each.n_trials for each in found) == len(tried)
    assert all(each.cost == pytest.approx(costs.draft_cost(each.trial.layer_set)) for each in found)
    front = front_of(found)
    for before, after in pairwise(front):
        assert before.cost <= after.cost and before.matchness < after.matchness
    for each in found:
        assert any(one.cost <= each.cost and one.matchness >= each.matchness for one in front)


def test_shares_count_skipped_sub_layers(store: Store) -> None:
    tried, made = store.tried(searching(store, 30).job, "code"), trials(30)
    shares = skip_shares(tried)
    assert shares["attn"] == [sum(i in each.layer_set.skip_attn for each in made) / 30 for i in range(8)]
    assert shares["mlp"] == [sum(i in each.layer_set.skip_mlp for each in made) / 30 for i in range(8)]


def test_live_search_is_drawn_again_after_a_change() -> None:
    searches = [StoredSearch("j", "running", "m", "", "code", n, 1.0, 1.0) for n in (20, 21, 10_000, 10_050, 10_200)]
    few, more, many, hardly, clearly = searches
    assert is_news([few], [more]) and not is_news([few], [few])
    assert is_news([many], [clearly]) and not is_news([many], [hardly])
    assert is_news([many], [many._replace(state="failed")]) and is_news([many], [many, many._replace(task="other")])


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 7.0), (0.21, 0.29), (0, 10_000), (5.0, 5.0)])
def test_ticks_are_round_numbers_within_the_axis(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 7 and all(low - 1e-9 <= each <= high + 1e-9 for each in found)
    assert all(float(f"{each:.4g}") == pytest.approx(each, abs=1e-9) for each in found)


def test_plans_are_listed_in_pages_with_every_version_counted(
    store: Store, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "PER_PAGE", 3)
    for task in "abcde":
        for n in (1, 2):
            store.add_layer_set(LayerSetRecord("m", task, LayerSet(8, frozenset({n})), "f" * 16))
    found = [re.findall(r"task=([a-e])\"", client.get(f"/plans?page={page}").text) for page in (1, 2)]
    assert found == [["a", "b", "c"], ["d", "e"]]
    second = client.get("/plans?page=2").text
    assert "version 2 of 2" in second and "Page 2 of 2" in second and 'rel="next"' not in second
    assert "There is no such page" in client.get("/plans?page=3").text
    versions, n_tasks = store.plan_page(3, 3)
    of_tasks = [version for version in store.plan_versions() if version.task in "de"]
    assert versions == of_tasks and n_tasks == 5


def test_page_of_10_000_trials_is_small(store: Store, client: TestClient) -> None:
    fill(store)
    job = searching(store, 10_000).job
    for path in (f"/searches/{job}", "/searches", "/plans"):
        found = client.get(path)
        assert found.status_code == 200 and len(found.content) < 100_000 and found.text.count("<path") < 250


def test_pages_report_an_unreachable_database(store: Store, client: TestClient, tmp_path: Path) -> None:
    job = fill(store)
    paths = ["/plans", "/searches", f"/searches/{job}", f"/plans/task?{urlencode(OF)}"]
    assert [client.get(path).status_code for path in paths] == [200] * 4
    store.close()
    (tmp_path / "a.db").write_bytes(b"no database" * 1000)
    for path in paths:
        found = client.get(path)
        assert found.status_code in (500, 503) and "is not a database" in found.text, found.text


@pytest.mark.parametrize("lowest", [0.2, 0.93, 0.999, 1.0])
def test_axis_of_a_share_ends_at_one(lowest: float) -> None:
    drawn = str(Plot("t", "d", "trial", "matchness", [(0, lowest), (1, 1.0)], top=1.0).draw())
    labels = [float(label) for label in re.findall(r'text-anchor="end">([\d.]+)<', drawn)]
    assert len(labels) > 1 and max(labels) <= 1
    free = str(Plot("t", "d", "trial", "score", [(0, lowest), (1, 1.0)]).draw())
    assert free != drawn


@pytest.mark.parametrize("origin", [*ORIGINS, "tpe"])
def test_searches_name_the_origin_of_the_latest_candidate(origin: str) -> None:
    latest = replace(trials(1)[0], origin=origin, matchness=0.5)
    task = TaskTuning(
        "notes", "drafts", 0.0, "use", 1, None, latest.layer_set, 0, None, None, None, ShiftStatus(), 1, 3, 20.0, 0.1,
        0.4, None, 0.0, None, None, None, None, SearchStatus(8, 0.5, 0.025, latest=latest),
    )  # fmt: skip
    shown = " ".join(re.sub(r"<[^>]+>", " ", render("searches_part.html", rows=[], served=[("m", task, "")])).split())
    assert (
        f"8 trials in 0.5 s, 2.5 % of 20 s of decoding; the latest ({origin_words(origin)}) had matchness 0.50" in shown
    )
    assert origin_words(origin) != origin
