"""Errors and logs never show passwords of URLs or megabytes of a value."""

from __future__ import annotations

import pytest

from swiftopt.core.errors import InvalidInput, StoreError, safe_url
from swiftopt.store import Store
from swiftopt.store.database import without_password

URLS = [
    "postgresql://me:pw@host/db",
    "postgresql://me@host/db?password=pw",
    "postgresql://me@host/db?sslmode=require&sslpassword=pw&connect_timeout=1",
    "postgresql://me:p@pw@host/db",
    "postgresql://me@host/db?PASSWORD=pw",
    "redis://host:6379/0?password=pw",
    "http://[me:pw@host",
]


@pytest.mark.parametrize("url", URLS)
def test_password_is_never_shown(url: str) -> None:
    assert "pw" not in safe_url(url) and "pw" not in without_password(url)


def test_error_of_a_server_that_is_away_does_not_tell_a_password_among_the_options() -> None:
    with pytest.raises(StoreError) as caught:
        Store.open("postgresql+psycopg://me@127.0.0.1:1/db?password=hidden")
    assert "hidden" not in str(caught.value) and "password=***" in str(caught.value)


def test_error_that_quotes_a_value_of_megabytes_keeps_its_beginning_and_its_advice() -> None:
    said = str(InvalidInput(f"no model {'x' * 2**20!r} is not served here: did you mean 'tiny'?"))
    assert len(said) < 2010 and said.startswith("no model 'xxx") and said.endswith("did you mean 'tiny'?")
