"""Trials of served models are stored once, in batches, and the oldest make way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from searched import MODEL, trials

from swiftopt.store import Store, served_trials
from swiftopt.store.served_trials import ServedSearch

SEARCH = ServedSearch("a" * 16, MODEL.fingerprint, "m", "code", "2026-11-27T00:00:00Z")


@pytest.fixture
def store(empty_database_url: str):  # type: ignore[no-untyped-def]
    with Store.open(empty_database_url) as opened:
        yield opened


def test_batches_are_stored_once(store: Store) -> None:
    made = trials(30)
    store.add_served_trials(SEARCH, made[:20])
    store.add_served_trials(SEARCH, made[:20])  # as after an answer that was lost
    store.add_served_trials(SEARCH, made[10:])
    tried = store.served_tried(SEARCH.id)
    assert [trial.step for trial in tried] == list(range(30))
    assert [trial.layer_set for trial in tried] == [trial.layer_set for trial in made]
    (found,) = store.served_searches()
    assert (found.job, found.state, found.model, found.task, found.n_trials) == (SEARCH.id, "served", "m", "code", 30)
    assert found.best_score == max(trial.score for trial in made)
    assert store.fingerprint_of_search(SEARCH.id) == MODEL.fingerprint and store.fingerprint_of_search("none") is None


def test_old_trials_and_old_searches_make_way(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_trials, "MOST_TRIALS", 10)
    monkeypatch.setattr(served_trials, "MOST_SEARCHES", 2)
    made = trials(25)
    for begin in (0, 8, 16):
        store.add_served_trials(SEARCH, made[begin : begin + 8])
    assert [trial.step for trial in store.served_tried(SEARCH.id)] == list(range(14, 24))
    store.add_served_trials(replace(SEARCH, id="other task", task="notes"), made[:1])
    for n in range(3):
        store.add_served_trials(replace(SEARCH, id=f"later {n}", created_at=f"2026-11-28T00:00:0{n}Z"), made[:2])
    assert [found.job for found in store.served_searches()] == ["later 2", "later 1", "other task"]
    assert not store.served_tried(SEARCH.id) and len(store.served_searches(limit=1)) == 1
