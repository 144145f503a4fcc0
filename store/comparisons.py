"""What comparisons of methods measured, kept as they were reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from ..core.errors import StoreError
from .names import find_model
from .plan_tables import ComparisonRow


def add_comparison(
    session: Session, model: str, task: str, device: str, dtype: str, report: Mapping[str, Any], created_at: str
) -> int:
    """Its number.

    Raises: StoreError: the model was never loaded.
    """
    found = find_model(session, model)
    if found is None:
        raise StoreError(f"no model {model} is stored: remember it before its comparisons")
    row = ComparisonRow(
        model_id=found.id,
        task=task,
        model_name=model,
        device=device,
        dtype=dtype,
        report=dict(report),
        created_at=created_at,
    )
    session.add(row)
    session.flush()
    return row.id


def list_comparisons(session: Session, model: str | None, task: str | None, limit: int) -> list[dict[str, Any]]:
    """Those of the model (name or fingerprint) and task, newest first; none if nothing matches."""
    query = select(ComparisonRow).order_by(ComparisonRow.id.desc()).limit(limit)
    if model is not None:
        row = find_model(session, model)
        if row is None:
            return []
        query = query.where(ComparisonRow.model_id == row.id)
    if task is not None:
        query = query.where(ComparisonRow.task == task)
    return [_value(found) for found in session.scalars(query)]


def _value(row: ComparisonRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "model": row.model_name,
        "task": row.task,
        "device": row.device,
        "dtype": row.dtype,
        "created_at": row.created_at,
        "report": row.report,
    }
