"""A store on each kind of database, for the suites of laws."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine

from swiftopt.store import Jobs, Store


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
