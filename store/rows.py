"""Core's records as rows and back, matched by the names of their fields; rows never leave the store.

A field that has a column of its name needs no line here.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from ..core.costs import CostProfile
from ..core.records import FoundPlan, LayerSetRecord, LearnedRecord, Plan, packed
from ..core.types import LayerSet, Trial, now
from .tables import Base, CostProfileRow, LayerSetRow, LearnedRow, ModelRow, PlanRow, TrialRow

Row = TypeVar("Row", bound=Base)
Record = TypeVar("Record")


def to_row(table: type[Row], record: Any, **others: Any) -> Row:
    """Return a new row with those fields of the record that the table has; `others` are its other columns."""
    shared = {each.name: getattr(record, each.name) for each in fields(record) if hasattr(table, each.name)}
    return table(**{**shared, **others})


def to_record(kind: type[Record], row: Base, **others: Any) -> Record:
    """Return the record whose fields are the row's columns; `others` are the fields that are no columns.

    Raises: LayerSetError, TypeError: the row was changed by hand.
    """
    shared = {each.name: _tuples(getattr(row, each.name)) for each in fields(kind) if each.name not in others}  # type: ignore[arg-type]
    return kind(**shared, **others)


def _tuples(value: Any) -> Any:
    """Undo what JSON does to a tuple."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def layer_set_row(record: LayerSetRecord, model: ModelRow, version: int) -> LayerSetRow:
    """Return a new row; a record without a time gets the present one."""
    return to_row(
        LayerSetRow,
        record,
        model_id=model.id,
        version=version,
        prompt_state=None if record.prompt_state is None else packed(record.prompt_state),
        created_at=record.created_at or now(),
        **_skips(record.layer_set),
    )


def layer_set_record(row: LayerSetRow) -> LayerSetRecord:
    """Return the record of a row, without its prompt state.

    Raises: LayerSetError, TypeError: the row was changed by hand.
    """
    values: dict[str, Any] = {"fingerprint": row.owner.fingerprint, "prompt_state": None}
    values |= {"layer_set": _layer_set(row, row.owner.n_layers), "evidence": _tuples(row.evidence or [])}
    return to_record(LayerSetRecord, row, **values)


def learned_record(row: LearnedRow) -> LearnedRecord:
    """Return the record of a row, without its weights."""
    return to_record(LearnedRecord, row, fingerprint=row.owner.fingerprint or "")


def found_plan(row: PlanRow, alias: str = "", fallback: str | None = None) -> FoundPlan:
    """Return a look-up's answer."""
    plan = to_record(
        Plan,
        row,
        layer_set=layer_set_record(row.layer_set) if row.layer_set is not None else None,
        learned=learned_record(row.learned) if row.learned is not None else None,
    )
    return FoundPlan(plan, row.version, alias, fallback)


def cost_profile_row(profile: CostProfile) -> CostProfileRow:
    """Return a new row."""
    values = profile.to_json()
    return CostProfileRow(**{**values, "formats": values["formats"] or None}, created_at=now())


def cost_profile(row: CostProfileRow) -> CostProfile:
    """Return the profile of a row; one of an earlier version has measured no formats."""
    values = {each.name: getattr(row, each.name) for each in fields(CostProfile)}
    return CostProfile.from_json({**values, "formats": row.formats or {}})


def trial_row(job: str, task: str, trial: Trial) -> TrialRow:
    """Return a new row."""
    layer_set = trial.layer_set
    return to_row(TrialRow, trial, job_id=job, task=task, n_layers=layer_set.n_layers, **_skips(layer_set))


def trial(row: TrialRow) -> Trial:
    """Return the trial of a row.

    Raises: LayerSetError, TypeError: the row was changed by hand.
    """
    return to_record(Trial, row, layer_set=_layer_set(row, row.n_layers))


def _skips(layer_set: LayerSet) -> dict[str, Any]:
    """Return the columns of a layer set, without its number of layers."""
    return {
        "skip_attn": sorted(layer_set.skip_attn),
        "skip_mlp": sorted(layer_set.skip_mlp),
        "quantised": dict(layer_set.formats),
    }


def _layer_set(row: LayerSetRow | TrialRow, n_layers: int) -> LayerSet:
    formats = tuple((row.quantised or {}).items())  # None: a trial of before drafts could be quantised
    return LayerSet(n_layers, frozenset(row.skip_attn), frozenset(row.skip_mlp), formats)
