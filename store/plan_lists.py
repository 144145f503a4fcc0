"""Versions of plans for lists: with all names of their model, and where they are the best."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from sqlalchemy import Select, select, tuple_
from sqlalchemy.orm import Session, lazyload

from ..core.errors import StoreError
from ..core.records import PlanVersion
from .names import names_of, newest
from .tables import MoveRow, PlanRow, found_plan


def plan_versions(session: Session, model: str | None = None, task: str | None = None) -> list[PlanVersion]:
    """Return the versions of a model (name or fingerprint), a task, both or all, newest first.

    Unreadable rows, and models without a name, are left out.
    """
    return _versions_shown(session, newest(session, PlanRow, model, task), newest(session, MoveRow, model, task))


def plan_page(session: Session, limit: int, offset: int = 0) -> tuple[list[PlanVersion], int]:
    """Return the versions of some tasks, newest first, and the number of tasks; these are sorted by model and task."""
    names = names_of(session)
    tasks = session.execute(select(PlanRow.model_id, PlanRow.task).distinct()).all()
    by_name = sorted(tasks, key=lambda of_task: (names.get(of_task[0], [""])[0], of_task[1]))
    of_page = [tuple(of_task) for of_task in by_name[offset : offset + limit]]
    plans = newest(session, PlanRow, None, None).where(tuple_(PlanRow.model_id, PlanRow.task).in_(of_page))
    moves = newest(session, MoveRow, None, None).where(tuple_(MoveRow.model_id, MoveRow.task).in_(of_page))
    return _versions_shown(session, plans, moves), len(tasks)


def _versions_shown(session: Session, plans: Select[PlanRow], moves: Select[MoveRow]) -> list[PlanVersion]:
    rows = session.scalars(plans).unique().all()
    names = names_of(session)
    # Do not load the moves' plans: `rows` contains them already.
    moves_newest = session.scalars(moves.options(lazyload(MoveRow.plan))).all()
    # Moves are newest first, so the dict keeps the date of each plan's oldest move.
    made_at = {move.plan_id: move.created_at for move in moves_newest}
    best = _best_for(moves_newest)
    versions = []
    for row in rows:
        model_names = (*names.get(row.model_id, ()), *filter(None, [row.owner.fingerprint]))
        if not model_names:
            continue
        with suppress(StoreError):
            plan = found_plan(row).plan
            version = PlanVersion(
                model_names, row.owner.fingerprint, row.task, row.version, plan, None, best.get(row.id, ())
            )
            created_at = made_at.get(row.id) if version.own_set is None else version.own_set.created_at
            versions.append(replace(version, created_at=created_at))
    return versions


def _best_for(moves: Sequence[MoveRow]) -> dict[int, tuple[tuple[str | None, str | None, str], ...]]:
    """Return, by plan id, for which device and dtype its usual alias means it, and since when; `moves` newest first."""
    undone_ids = {move.undoes_id for move in moves}
    best_by_plan: dict[int, tuple[tuple[str | None, str | None, str], ...]] = {}
    seen_keys = set()
    for move in moves:
        key = (move.model_id, move.task, move.alias, move.device, move.dtype)
        is_usual_alias = move.alias == (move.plan.engine or "best")
        if is_usual_alias and move.undoes_id is None and move.id not in undone_ids and key not in seen_keys:
            seen_keys.add(key)
            best_by_plan[move.plan_id] = (
                *best_by_plan.get(move.plan_id, ()),
                (move.device, move.dtype, move.created_at),
            )
    return best_by_plan
