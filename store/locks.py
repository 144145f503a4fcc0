"""Locks with an end, by the database's clock."""

from __future__ import annotations

from sqlalchemy import or_, update
from sqlalchemy.orm import Session

from .clock import clock_s
from .tables import LockRow


def take(session: Session, name: str, owner: str, seconds: float) -> bool:
    """Take or keep the lock, if nobody else holds it."""
    free = update(LockRow).where(LockRow.name == name, or_(LockRow.owner == owner, LockRow.until < clock_s()))
    taken = session.execute(free.values(owner=owner, until=clock_s() + seconds).returning(LockRow.name))
    if taken.one_or_none() is not None:
        return True
    if session.get(LockRow, name) is not None:
        return False
    session.add(LockRow(name=name, owner=owner, until=0.0))
    session.flush()  # fails, and the write begins anew, if another process took it first
    session.execute(update(LockRow).where(LockRow.name == name).values(until=clock_s() + seconds))
    return True
