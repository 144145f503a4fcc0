"""Core types to rows and back: rows never leave the store."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from typing import cast

from ..core.costs import CostProfile
from ..core.known_sets import packed
from ..core.learned import LearnedKind, LearnedRecord
from ..core.times import now
from ..core.types import FoundPlan, LayerSet, LayerSetRecord, ModelInfo, Plan, Trial, VerdictWord
from .plan_tables import LearnedRow, PlanRow
from .tables import CostProfileRow, LayerSetRow, ModelRow, TrialRow


def now_ms() -> str:
    """As `core.times.now`, to the millisecond, for what is listed by its time."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def model_info(row: ModelRow, names: list[str]) -> ModelInfo:
    """The value of a model that has a fingerprint."""
    return ModelInfo(row.fingerprint or "", row.architecture, row.n_layers, row.n_parameters, tuple(sorted(names)))


def layer_set_row(record: LayerSetRecord, model: ModelRow, version: int) -> LayerSetRow:
    """A new row; a record without a time gets the present one."""
    low, high = record.measured_interval or (None, None)
    return LayerSetRow(
        model_id=model.id,
        task=record.task,
        version=version,
        model_name=record.model,
        skip_attn=sorted(record.layer_set.skip_attn),
        skip_mlp=sorted(record.layer_set.skip_mlp),
        quantised=dict(record.layer_set.formats),
        matchness=record.matchness,
        acceptance_rate=record.acceptance_rate,
        mean_generated_length=record.mean_generated_length,
        expected_speedup=record.expected_speedup,
        measured_speedup=record.measured_speedup,
        measured_low=low,
        measured_high=high,
        verdict=record.verdict,
        device=record.device,
        dtype=record.dtype,
        settings=dict(record.settings),
        stream_sha256=record.stream_sha256,
        swiftopt_version=record.swiftopt_version,
        created_at=record.created_at or now(),
        job_id=record.job,
        prompt_state=None if record.prompt_state is None else packed(record.prompt_state),
    )


def layer_set_record(row: LayerSetRow) -> LayerSetRecord:
    """Inverse of `layer_set_row`."""
    low, high = row.measured_low, row.measured_high
    return LayerSetRecord(
        model=row.model_name,
        task=row.task,
        layer_set=LayerSet(
            row.model.n_layers, frozenset(row.skip_attn), frozenset(row.skip_mlp), tuple(row.quantised.items())
        ),
        fingerprint=row.model.fingerprint,
        matchness=row.matchness,
        acceptance_rate=row.acceptance_rate,
        mean_generated_length=row.mean_generated_length,
        expected_speedup=row.expected_speedup,
        measured_speedup=row.measured_speedup,
        measured_interval=None if low is None or high is None else (low, high),
        verdict=cast(VerdictWord, row.verdict),
        device=row.device,
        dtype=row.dtype,
        settings=row.settings,
        stream_sha256=row.stream_sha256,
        swiftopt_version=row.swiftopt_version,
        created_at=row.created_at,
        version=row.version,
        job=row.job_id,
    )


def learned_row(record: LearnedRecord, model: ModelRow, version: int) -> LearnedRow:
    """A new row; a record without a time gets the present one."""
    return LearnedRow(
        model_id=model.id,
        task=record.task,
        kind=record.kind,
        version=version,
        model_name=record.model,
        depths=list(record.depths),
        n_parameters=record.n_parameters,
        settings=dict(record.settings),
        figures=dict(record.figures),
        curve=list(record.curve),
        stream_sha256=record.stream_sha256,
        swiftopt_version=record.swiftopt_version,
        created_at=record.created_at or now(),
    )


def learned_record(row: LearnedRow) -> LearnedRecord:
    """Inverse of `learned_row`."""
    return LearnedRecord(
        kind=cast(LearnedKind, row.kind),
        model=row.model_name,
        task=row.task,
        fingerprint=row.model.fingerprint or "",
        depths=tuple(row.depths),
        n_parameters=row.n_parameters,
        settings=row.settings,
        figures=row.figures,
        curve=tuple((step, loss) for step, loss in row.curve),
        stream_sha256=row.stream_sha256,
        swiftopt_version=row.swiftopt_version,
        created_at=row.created_at,
        version=row.version,
    )


def plan_row(plan: Plan, model: ModelRow, task: str, version: int, layer_set_id: int | None = None) -> PlanRow:
    """A new row; the caller knows which stored layer set and heads or probe it points at."""
    low, high = plan.measured_interval or (None, None)
    return PlanRow(
        model_id=model.id,
        task=task,
        version=version,
        method=plan.method,
        settings=dict(plan.settings),
        verdict=plan.verdict,
        layer_set_id=layer_set_id,
        draft_model=plan.draft_model,
        measured_speedup=plan.measured_speedup,
        measured_low=low,
        measured_high=high,
        device=plan.device,
        dtype=plan.dtype,
    )


def found_plan(row: PlanRow, alias: str, fallback: str | None = None) -> FoundPlan:
    """A look-up's answer."""
    low, high = row.measured_low, row.measured_high
    plan = Plan(
        method=row.method,
        layer_set=layer_set_record(row.layer_set) if row.layer_set is not None else None,
        settings=row.settings,
        verdict=cast(VerdictWord, row.verdict),
        learned=learned_record(row.learned) if row.learned is not None else None,
        draft_model=row.draft_model,
        measured_speedup=row.measured_speedup,
        measured_interval=None if low is None or high is None else (low, high),
        device=row.device,
        dtype=row.dtype,
    )
    return FoundPlan(plan, row.version, alias, fallback)


def cost_profile_row(profile: CostProfile) -> CostProfileRow:
    """A new row."""
    values = profile.to_json()
    return CostProfileRow(**{**values, "formats": values["formats"] or None}, created_at=now())


def cost_profile(row: CostProfileRow) -> CostProfile:
    """Inverse of `cost_profile_row`."""
    values = {each.name: getattr(row, each.name) for each in fields(CostProfile)}
    return CostProfile.from_json({**values, "formats": row.formats or {}})


def trial_row(job: str, task: str, trial: Trial) -> TrialRow:
    """A new row."""
    return TrialRow(
        job_id=job,
        task=task,
        step=trial.step,
        n_layers=trial.layer_set.n_layers,
        skip_attn=sorted(trial.layer_set.skip_attn),
        skip_mlp=sorted(trial.layer_set.skip_mlp),
        quantised=dict(trial.layer_set.formats) or None,
        origin=trial.origin,
        matchness=trial.matchness,
        score=trial.score,
        prompt_id=trial.prompt_id,
        position=trial.position,
        seed=trial.seed,
        adopted=trial.adopted,
        seconds=trial.seconds,
    )


def trial(row: TrialRow) -> Trial:
    """Inverse of `trial_row`."""
    return Trial(
        step=row.step,
        layer_set=LayerSet(
            row.n_layers, frozenset(row.skip_attn), frozenset(row.skip_mlp), tuple((row.quantised or {}).items())
        ),
        origin=row.origin,
        matchness=row.matchness,
        score=row.score,
        prompt_id=row.prompt_id,
        position=row.position,
        seed=row.seed,
        adopted=row.adopted,
        seconds=row.seconds,
    )
