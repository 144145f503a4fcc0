"""A store that is fast from its first use in a fork: what a child would compile, its parent has compiled."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from ..core.jobs import JobSpec, Lease
from ..store import Store
from ..store.database import as_url, connect, store_errors, writing
from ..store.jobs import Jobs
from ..store.schema import ensure_head
from ..store.transactions import Transactions

T = TypeVar("T")


class _Rehearsal(Transactions):
    """Everything in one transaction, which is never committed."""

    def __init__(self, engine: Engine, url: str, session: Session) -> None:
        super().__init__(engine, url)
        self._session = session

    def read(self, work: Callable[[Session], T]) -> T:
        return work(self._session)

    write = read


def warm_store(url: str, lease_s: float) -> Store:
    """As `Store.open`, without an open connection, and with every statement of a plain attempt compiled.

    Close it before a fork: a connection that is open in two processes serves neither. It opens again when it is used.

    Raises: StoreError: as `Store.open`.
    """
    url = as_url(url)
    engine = connect(url)
    with store_errors(url):
        ensure_head(engine, url)
        with Session(writing(engine)) as session:
            _rehearse(Jobs(_Rehearsal(engine, url, session)))
            session.rollback()
    engine.dispose()
    store = Store(engine, url)
    store.jobs.lease_s = lease_s
    gc.collect()
    gc.freeze()  # else the collector touches, and so copies, every page that a child shares with us
    return store


def _rehearse(jobs: Jobs) -> None:
    for stop in (False, True):  # each verb of an attempt once; the job is gone with the transaction
        job, _ = jobs.submit(JobSpec("noop", "rehearsal", {"n": secrets.token_hex(8)}))
        lease = Lease(job.id, job.attempt)
        jobs.claim(lease, "rehearsal")
        jobs.renew(lease)
        jobs.peek(lease)
        if stop:
            jobs.hand_back(lease, "rehearsal")
        else:
            jobs.end(lease, "succeeded")
