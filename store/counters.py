"""Sums over all jobs, kept in SQL because the processes that count live no longer than a job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from ..core.types import Completion
from .tables import CounterRow


class Count(NamedTuple):
    """One counter's value; `label` is what it is split by."""

    name: str
    model: str = ""
    task: str = ""
    label: str = ""
    value: float = 1.0


def count(session: Session, name: str, label: str = "", value: float = 1.0) -> None:
    """Add to one counter of no model."""
    add(session, [Count(name, label=label, value=value)])


def add(session: Session, counts: Iterable[Count]) -> None:
    """Add to counters, in an order that keeps two transactions from waiting for each other."""
    sums: dict[tuple[str, str, str, str], float] = {}
    for entry in counts:
        sums[entry[:4]] = sums.get(entry[:4], 0.0) + entry.value
    if not sums:
        return
    values = [
        {"name": name, "model": model, "task": task, "label": label, "value": sums[name, model, task, label]}
        for name, model, task, label in sorted(sums)
    ]
    dialect = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    insert = dialect.insert(CounterRow).values(values)
    key = ["name", "model", "task", "label"]
    more = {"value": CounterRow.value + insert.excluded.value}
    session.execute(insert.on_conflict_do_update(index_elements=key, set_=more))


def read(session: Session) -> list[Count]:
    """Every counter."""
    return [
        Count(row.name, row.model, row.task, row.label, row.value)
        for row in session.scalars(select(CounterRow).order_by(CounterRow.name, CounterRow.model, CounterRow.task))
    ]


def of_completion(model: str, task: str, completion: Completion) -> list[Count]:
    """What a completion adds: drafts (rounds that drafted), draft and accepted tokens, and those by position."""
    if not completion.drafted:
        return []
    per_position = completion.accepted_per_position
    return [
        Count("drafts", model, task, value=completion.target_passes),
        Count("draft_tokens", model, task, value=completion.drafted),
        Count("accepted_tokens", model, task, value=completion.accepted),
        *(Count("accepted_per_position", model, task, str(i), n) for i, n in enumerate(per_position) if n),
    ]
