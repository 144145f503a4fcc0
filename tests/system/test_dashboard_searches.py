"""The pages of searches: of jobs and of served models, sorted, filtered and compared; which sub-layers matter."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest
from api import client_of
from searched import MODEL, fill, searching, trials
from starlette.testclient import TestClient

from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.types import Trial
from swiftopt.server.dashboard.trials import PER_PAGE, TrialQuery, importance
from swiftopt.store import Store
from swiftopt.store.served_trials import ServedSearch

SERVED = ServedSearch("served1", MODEL.fingerprint, "tiny", "notes", "2026-11-27T10:00:00Z")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "a.db")) as opened:
        yield opened


@pytest.fixture
def client(store: Store) -> TestClient:
    return client_of(store)


def page(client: TestClient, path: str, status: int = 200, **query: object) -> str:
    found = client.get(f"{path}?{urlencode(query)}")
    assert found.status_code == status, found.text
    return unescape(found.text)


def steps(html: str) -> list[int]:
    """The trials of the page's table, in their order."""
    table = html[html.index('aria-label="Table of trials"') :]
    return [
        int(step) for step in re.findall(r'<th scope="row" class="n"><a[^>]*>(\d+)<', table[: table.index("</table>")])
    ]


def test_search_of_a_served_model_is_shown_like_that_of_a_job(store: Store, client: TestClient) -> None:
    fill(store)
    store.add_served_trials(SERVED, trials(25))
    listed = page(client, "/searches")
    assert 'href="/searches/served1?task=notes"' in listed and "a served model" in listed
    found = page(client, "/searches/served1", task="notes")
    assert "by a served model, while it answers requests" in found and "Which sub-layers matter" in found
    assert "Cost against quality" in found and "The front" in found, "by the costs of its model"
    assert "hx-sse:connect" in found and client.get("/searches/none").status_code == 404


def test_list_is_filtered_and_sorted_by_its_address(store: Store, client: TestClient) -> None:
    job = fill(store)
    other = searching(store, 5, "summary").job
    store.add_served_trials(SERVED, trials(25))

    def ids(**query: object) -> list[str]:
        table = (
            page(client, "/searches", **query).partition('aria-label="List of searches"')[2].partition("</table>")[0]
        )
        return re.findall(r'href="/searches/([^?"]+)\?', table)

    assert set(ids()) == {job, other, "served1"} and ids(kind="served") == ["served1"]
    assert ids(task="summary", model="") == [other] and ids(sort="trials") == [job, "served1", other]
    assert "No search is of this kind" in page(client, "/searches", task="none")
    assert client.get("/searches?sort=colour").status_code == 422


def test_trials_are_sorted_filtered_and_paged_by_the_address(store: Store, client: TestClient) -> None:
    store.add_served_trials(SERVED, made := trials(60))
    of = {"task": "notes"}
    by_score = [trial.step for trial in sorted(made, key=lambda trial: -trial.score)]
    assert steps(page(client, "/searches/served1", **of)) == by_score[:PER_PAGE]
    assert steps(page(client, "/searches/served1", **of, page=3)) == by_score[2 * PER_PAGE :]
    assert steps(page(client, "/searches/served1", **of, sort="newest"))[:2] == [59, 58]
    assert steps(page(client, "/searches/served1", **of, sort="oldest", adopted="true")) == [0, 50]
    best = max(made, key=lambda trial: trial.matchness)
    assert steps(page(client, "/searches/served1", **of, sort="matchness"))[0] == best.step
    assert "No trial is of this kind" in page(client, "/searches/served1", **of, origin="tpe")
    assert TrialQuery("a b", "newest", page=3).address(page=1) == "task=a+b&sort=newest"


def test_best_of_trials_with_one_score_has_the_highest_matchness(store: Store, client: TestClient) -> None:
    """Where drafts do not pay, each promises plain decoding's speed."""
    made = [replace(trial, score=1.0) for trial in trials(30)]
    best = max(made, key=lambda trial: trial.matchness)
    store.add_served_trials(SERVED, made)
    assert steps(page(client, "/searches/served1", task="notes"))[0] == best.step != 0
    compared = page(client, "/searches/compare", left="served1/notes", right="served1/notes")
    assert compared.count(f"Its best set, of trial {best.step}<") == 2


def test_dot_links_to_its_trial(store: Store, client: TestClient) -> None:
    store.add_served_trials(SERVED, trials(30))
    found = page(client, "/searches/served1", task="notes", sort="newest")
    links = re.findall(r'<a href="(\?[^"]+)" tabindex="-1" aria-label="Trial 7"><circle class="dots"', found)
    assert len(links) == 2 and links[0] == "?task=notes&sort=newest&trial=7#trial"
    shown = page(client, f"/searches/served1{links[0].partition('#')[0]}".partition("?")[0], task="notes", trial=7)
    assert "Layer map of trial 7" in shown and 'id="trial">Trial 7<' in shown and "trial=6" in shown
    assert '<tr class="shown">' in page(client, "/searches/served1", sort="oldest", trial=7)
    assert "There is no trial 99 here" in page(client, "/searches/served1", trial=99)


def test_two_searches_are_compared_side_by_side(store: Store, client: TestClient) -> None:
    job = fill(store)
    store.add_served_trials(SERVED, trials(25, start=100))
    form = page(client, "/searches")
    assert f'<option value="{job}/code"' in form and '<option value="served1/notes"' in form
    found = page(client, "/searches/compare", left=f"{job}/code", right="served1/notes")
    assert found.count("Layer map of trial") == 2 and "sub-layer" in found and 'class="differs"' in found
    same = page(client, "/searches/compare", left=f"{job}/code", right=f"{job}/code")
    assert "Their best sets are the same" in same
    empty = searching(store, 0).job
    assert "has tried nothing" in page(client, "/searches/compare", 404, left=f"{empty}/code", right="served1/notes")


def test_importance_ranks_sub_layers_by_their_loss(store: Store) -> None:
    """Each left out sub-layer costs its own share; how many are left out varies, which must not be mistaken for it."""
    rng, cost = random.Random(0), {("attn", 2): 0.3, ("mlp", 5): 0.15}
    made = []
    for step in range(400):
        left_out = {(kind, i) for kind in ("attn", "mlp") for i in range(1, 7) if rng.random() < rng.choice((0.2, 0.6))}
        matchness = 1 - sum(cost.get(part, 0.02) for part in left_out)
        sets = (frozenset(i for kind, i in left_out if kind == wanted) for wanted in ("attn", "mlp"))
        made.append(Trial(step, LayerSet(8, *sets), "random", matchness, 1.0))
    store.add_served_trials(SERVED, made)
    found = importance(store.served_tried(SERVED.id))
    assert found["attn"][0] is None and found["mlp"][7] is None, "they were never left out"
    ranked = sorted(
        ((value, kind, i) for kind, values in found.items() for i, value in enumerate(values) if value is not None),
        reverse=True,
    )
    assert [(kind, i) for _, kind, i in ranked[:2]] == [("attn", 2), ("mlp", 5)]
    assert ranked[0][0] == pytest.approx(0.28, abs=0.05) and abs(ranked[-1][0]) < 0.1
    whole = [replace(made[0], layer_set=LayerSet(8))]
    store.add_served_trials(replace(SERVED, id="whole"), whole)
    assert set(importance(store.served_tried("whole"))["attn"]) == {None}
