"""Usage of API keys by day, which all servers of a database add to."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ..core.usage import SUMS, KeyUsage
from .database import insert
from .tables import UsageRow

_KEY = ("day", "key", "model")


def add_usage(session: Session, day: str, usages: Sequence[KeyUsage]) -> None:
    """Add what keys have used to a day (UTC, ISO 8601)."""
    if not usages:
        return
    # Sorted, so that two servers that add at the same time cannot deadlock.
    rows = sorted((usage.key or "", usage.model, usage) for usage in usages)
    sums = [{name: getattr(usage, name) for name in SUMS} for *_, usage in rows]
    keys = [{"day": day, "key": key, "model": model} for key, model, _ in rows]
    inserted = insert(session, UsageRow).values([{**key, **values} for key, values in zip(keys, sums, strict=True)])
    increments = {name: getattr(UsageRow, name) + inserted.excluded[name] for name in SUMS}
    session.execute(inserted.on_conflict_do_update(index_elements=_KEY, set_=increments))


def usage_since(session: Session, day: str) -> list[KeyUsage]:
    """Return the sums of each key and model from a day (UTC, ISO 8601) on."""
    sums = [func.sum(getattr(UsageRow, name)) for name in SUMS]
    query = select(UsageRow.key, UsageRow.model, *sums).where(UsageRow.day >= day)
    rows = session.execute(query.group_by(UsageRow.key, UsageRow.model).order_by(UsageRow.key, UsageRow.model))
    return [
        # PostgreSQL's sums of integers are decimal numbers.
        KeyUsage(key or None, model, int(requests), int(prompt), int(completion), int(cached), saved_s)
        for key, model, requests, prompt, completion, cached, saved_s in rows
    ]
