"""Children of the worker: end with their parent, be waited for, and have a store that is fast from its first use."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from ..core.jobs import JobSpec, Lease
from ..store import Jobs, Store
from ..store.database import Transactions, as_url, store_errors, writing
from ..store.schema import connect_at_head

PR_SET_PDEATHSIG = 1  # of prctl(2)
POLL_S = 0.02  # between two looks at a child, where the system cannot tell that it ended

T = TypeVar("T")


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; call it right after the fork.

    Linux only. On other systems the child ends when its lease is lost.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the kernel was told
        os._exit(1)


def wait_for(pid: int, seconds: float) -> tuple[int, resource.struct_rusage] | None:
    """Return a child's wait(2) status and resource usage; None if it still runs after `seconds`."""
    if hasattr(os, "pidfd_open"):
        descriptor = os.pidfd_open(pid)
        try:
            select.select([descriptor], [], [], seconds)
        finally:
            os.close(descriptor)
        found, status, usage = os.wait4(pid, os.WNOHANG)
        return (status, usage) if found else None
    deadline = time.monotonic() + seconds
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            return status, usage
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL_S)


class _Rehearsal(Transactions):
    """Run everything in one transaction, which is never committed."""

    def __init__(self, engine: Engine, url: str, session: Session) -> None:
        super().__init__(engine, url)
        self._session = session

    def read(self, work: Callable[[Session], T]) -> T:
        return work(self._session)

    write = read


def warm_store(url: str, lease_s: float) -> Store:
    """Open the store without an open connection and with every statement of a plain attempt compiled.

    Close it before a fork: two processes cannot share a connection. It opens again when it is used.

    Raises: StoreError: as `Store.open`.
    """
    url = as_url(url)
    engine = connect_at_head(url)
    with store_errors(url), Session(writing(engine)) as session:
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
