"""Reading and writing in transactions, shared by the parts of the store."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from ..core.errors import StoreError
from .database import shown, store_errors, writing

T = TypeVar("T")

ATTEMPTS = 4  # of a write that met another one creating the same row
RETRY_S = 0.02  # longest pause before the next attempt
RETRIED = ("40001", "40P01")  # PostgreSQL gave a transaction up for another one: serialization failure, deadlock


@contextmanager
def _one_sentence(url: str) -> Iterator[None]:
    """As `store_errors`, and for columns of JSON that hold something else, which SQLite lets in."""
    try:
        with store_errors(url):
            yield
    except json.JSONDecodeError as error:
        raise StoreError(
            f"the database {shown(url)} has a row that is no JSON ({error}): it was changed by hand, correct it"
        ) from error


class Transactions:
    """One database; safe to share between threads.

    Raises: StoreError: in every method, when the database cannot be read or written; StoreUnavailable if only just now.
    """

    def __init__(self, engine: Engine, url: str) -> None:
        self.url = url
        self.engine = engine
        self._writer = writing(engine)

    def read(self, work: Callable[[Session], T]) -> T:
        """Run `work` in a transaction that writes nothing."""
        with _one_sentence(self.url), Session(self.engine) as session:
            return work(session)

    def write(self, work: Callable[[Session], T]) -> T:
        """Run `work` in one transaction, again if another one created the same row meanwhile (PostgreSQL only)."""
        with _one_sentence(self.url):
            for _ in range(ATTEMPTS - 1):
                try:
                    return self._write_once(work)
                except (IntegrityError, StaleDataError):
                    pass
                except OperationalError as error:
                    if getattr(error.orig, "sqlstate", None) not in RETRIED:
                        raise
                time.sleep(random.uniform(0, RETRY_S))  # two that gave way to each other must not meet again
            return self._write_once(work)

    def _write_once(self, work: Callable[[Session], T]) -> T:
        with Session(self._writer) as session, session.begin():
            return work(session)
