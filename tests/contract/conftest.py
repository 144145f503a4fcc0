"""What suites of laws start from: a store on each kind of database, and no configuration of the user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine

from swiftopt.store import Jobs, Store


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable sets an option or says what a terminal shows; only the cache stays the session's own."""
    shown = {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}
    for name in list(os.environ):
        if name in shown or (name.startswith("SWIFTOPT_") and name not in ("SWIFTOPT_CACHE_DIR", "SWIFTOPT_MEASURING")):
            monkeypatch.delenv(name)


@pytest.fixture
def small_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's kernels are measured on small weights, and for no other test."""
    measure = "swiftopt.models.kernels.measure"
    monkeypatch.setattr(f"{measure}.SHAPES", ((64, 32),))
    monkeypatch.setattr(f"{measure}.WEIGHT_BYTES", 0)
    monkeypatch.setattr(f"{measure}.speeds_file", lambda: tmp_path / "speeds.json")


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store.open(database_url) as opened:
        yield opened


@pytest.fixture
def jobs(store: Store) -> Jobs:
    return store.jobs


@pytest.fixture
def engine(store: Store, database_url: str) -> Iterator[Engine]:
    """Our own connection to the database, past the store's methods."""
    made = create_engine(database_url)
    yield made
    made.dispose()
