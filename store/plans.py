"""Plans: one sequence of versions per model and task, including layer sets, and the version that each alias refers to.

Alias moves are only added, so that each can be undone. If a plan, version or alias does not exist, LayerSetNotFound is
raised; its message names what is stored instead, or the command that tunes.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection, Sequence

from sqlalchemy import Select, String, bindparam, case, func, literal, select, union_all
from sqlalchemy.orm import Session, aliased, lazyload, undefer

from ..core.errors import InvalidInput, LayerSetNotFound, StoreError
from ..core.records import (
    FOUND_SET_SETTINGS,
    AliasMove,
    FoundPlan,
    KnownSet,
    LayerSetRecord,
    Plan,
    pack_state,
    unpack_state,
)
from ..core.requests import tune_command
from ..core.settings import ENGINES
from ..core.types import DEFAULT_TASK, now
from .names import find_model, known_model, lock, model_for, newest, next_version, where_task
from .results import find_row
from .tables import (
    JobRow,
    LayerSetRow,
    ModelRow,
    MoveRow,
    NameRow,
    PlanRow,
    add_row,
    found_plan,
    layer_set_record,
    reading,
    to_row,
)

logger = logging.getLogger(__name__)

# Most stored layer sets, newest first, that a search compares with a text.
N_KNOWN = 100

# Selects the ids of an alias's moves that no rollback has undone. `_select_moves` then reads only the wanted rows,
# with their plans.
_MOVE, _UNDOING = aliased(MoveRow), aliased(MoveRow)
_STANDING = (
    select(_MOVE.id)
    .where(_MOVE.model_id == bindparam("model_id"), _MOVE.task.in_(bindparam("tasks", expanding=True)))
    .where(_MOVE.alias == bindparam("alias"))
    # With a plain `IS NULL`, SQLite would use this column's index and scan the moves of all models.
    .where(func.coalesce(_MOVE.undoes_id, 0) == 0)
    .where(~select(_UNDOING.id).where(_UNDOING.undoes_id == _MOVE.id).exists())
)
_DEVICE, _DTYPE = (bindparam(name, type_=String) for name in ("device", "dtype"))
_NEWEST = _MOVE.id.desc()


def _select_moves(move_ids: Select[int]) -> Select[MoveRow]:
    return select(MoveRow).where(MoveRow.id.in_(move_ids)).order_by(MoveRow.id.desc())


# Built once: SQLAlchemy takes longer to build these statements than the database takes to run them.
LATEST_MOVES = _select_moves(_STANDING.order_by(_NEWEST).limit(2))
LATEST_ON_DEVICE = _select_moves(
    _STANDING.where(_MOVE.device.is_not_distinct_from(_DEVICE), _MOVE.dtype.is_not_distinct_from(_DTYPE))
    .order_by(_NEWEST)
    .limit(1)
)
# Prefers the newest move for the same device and dtype, then for the device, then for the dtype, then any.
_DISTANCE = (case((_MOVE.device == _DEVICE, 0), else_=1), case((_MOVE.dtype == _DTYPE, 0), else_=1))
_RANK = func.row_number().over(partition_by=_MOVE.task, order_by=(*_DISTANCE, _NEWEST))
_RANKED = _STANDING.add_columns(_RANK.label("rank")).subquery()
NEAREST_MOVES = _select_moves(select(_RANKED.c.id).where(_RANKED.c.rank == 1))  # One per task.
_NEWEST_OF_MODEL = select(func.max(MoveRow.id)).where(MoveRow.model_id == ModelRow.id).scalar_subquery()
_ASKED = bindparam("asked", type_=String, expanding=True)
# A name goes before a fingerprint: it comes last, and the last row of a name counts.
LOOKUP_STATES = union_all(
    select(literal(0).label("rank"), ModelRow.fingerprint, ModelRow.id, _NEWEST_OF_MODEL).where(
        ModelRow.fingerprint.in_(_ASKED)
    ),
    select(literal(1), NameRow.name, ModelRow.id, _NEWEST_OF_MODEL).join(ModelRow).where(NameRow.name.in_(_ASKED)),
).order_by("rank")


# --- layer sets ---


def add_layer_set(
    session: Session, record: LayerSetRecord, plan_method: str | None = None, promote: bool = True
) -> LayerSetRecord:
    """Store a new version with its plan and, by default, point `best` at it; return the record as stored.

    If no method is named, the plan uses the one for which the set was found.

    `best` does not move if, for the same device and dtype, it points to a plan of another method with the verdict "use"
    and the new set has a lower measured speedup or another verdict.

    Raises: LayerSetError: the model has another number of layers. StoreError: the record names an unknown job.
    """
    row, plan = add_version(session, record, plan_method or record.found_for)
    if promote:
        offer(session, plan)
    return layer_set_record(row)


def add_version(session: Session, record: LayerSetRecord, method: str) -> tuple[LayerSetRow, PlanRow]:
    """Add a layer set and the plan to decode with it, whatever `best` means.

    Raises: LayerSetError, StoreError: as `add_layer_set`.
    """
    if record.job is not None and session.get(JobRow, record.job) is None:
        raise StoreError(f"no job {record.job} is stored: create it before its layer sets")
    model = model_for(session, record)
    set_row = to_row(
        LayerSetRow,
        record,
        model_id=model.id,
        version=next_version(session, PlanRow, model, record.task),
        prompt_state=None if record.prompt_state is None else pack_state(record.prompt_state),
        created_at=record.created_at or now(),
    )
    row = add_row(session, set_row)
    # The plan gets the same measured figures as the layer set.
    plan = to_row(
        PlanRow,
        record,
        model_id=model.id,
        version=row.version,
        method=method,
        settings=FOUND_SET_SETTINGS if method == "adaptive" else record.settings,
        layer_set=row,
    )
    return row, add_row(session, plan)


def layer_set_of(session: Session, model: str, task: str, version: int) -> LayerSetRecord:
    """Return the layer set stored with a version or, for a version made by a comparison, the one that its plan uses."""
    plan = plan_of(session, model, task, version)
    if plan.layer_set is not None:
        return layer_set_record(plan.layer_set)
    stored_versions = _versions(session, LayerSetRow, plan.owner, task)
    raise LayerSetNotFound(
        f"version {version} of {model}/{task} decodes with {plan.method} and has no layer set: "
        + (
            f"those with one are {_version_list(stored_versions)}"
            if stored_versions
            else f"tune one with `{tune_command(model, task)}`"
        )
    )


def list_layer_sets(session: Session, model: str | None = None, task: str | None = None) -> list[LayerSetRecord]:
    """Return the stored versions of a model (name or fingerprint), a task, both or all, newest first."""
    return [layer_set_record(row) for row in session.scalars(newest(session, LayerSetRow, model, task))]


def known_sets(session: Session, fingerprint: str) -> list[KnownSet]:
    """Return a model's newest layer sets for all tasks, with the mean hidden state of their prompts; newest first.

    Unreadable rows are left out, with a warning.
    """
    query = newest(session, LayerSetRow, fingerprint, None).where(LayerSetRow.prompt_state.is_not(None))
    rows = session.scalars(query.options(undefer(LayerSetRow.prompt_state)).limit(N_KNOWN))
    readable_sets = []
    for row in rows:
        try:
            with reading(LayerSetRow, row.id):
                state = unpack_state(row.prompt_state or b"")
            readable_sets.append(KnownSet(layer_set_record(row).layer_set, state, row.task))
        except StoreError as error:  # A search can do without an unreadable layer set.
            message = "layer set=skipped model=%s version=%d task=%s reason=%r"
            logger.warning(message, fingerprint, row.version, row.task, str(error))
    return readable_sets


# --- plans ---


def add_plan(session: Session, model: str, task: str, plan: Plan, promote: bool = True) -> FoundPlan:
    """Store a plan as the next version and, by default, point its usual alias at it.

    The plan's layer set and heads or probe must be stored records. `alias` is "" if none was moved.

    Raises: LayerSetNotFound, LearnedNotFound: they are not stored. StoreError: the model was never stored.
    """
    owner = known_model(session, model, "plans")
    lock(session, owner)
    row = to_row(
        PlanRow,
        plan,
        model_id=owner.id,
        task=task,
        version=next_version(session, PlanRow, owner, task),
        layer_set=_stored_set(session, owner, plan.layer_set) if plan.layer_set is not None else None,
        learned=find_row(session, plan.learned) if plan.learned is not None else None,
    )
    add_row(session, row)
    return move(session, row, plan.usual_alias) if promote else found_plan(row)


def get_plan(session: Session, model: str, task: str, version: int) -> FoundPlan:
    """Return the plan of one version, whatever alias means it; its `alias` is ""."""
    return found_plan(plan_of(session, model, task, version))


def plan_of(session: Session, model: str, task: str, version: int) -> PlanRow:
    """Return the plan of one version."""
    row = find_model(session, model)
    plan = session.scalar(select(PlanRow).where(where_task(PlanRow, row, task), PlanRow.version == version))
    if plan is not None:
        return plan
    stored_versions = _versions(session, PlanRow, row, task)
    if not stored_versions:
        raise _not_found(session, model, task)
    raise LayerSetNotFound(f"{model}/{task} has no version {version}: stored are {_version_list(stored_versions)}")


# --- aliases ---


def lookup(
    session: Session, model: str, task: str, device: str | None = None, dtype: str | None = None, alias: str = "best"
) -> FoundPlan:
    """Return the plan for a model (name or fingerprint) and task; device or dtype None accepts any.

    Falls back to another dtype or device, then to the task "default"; `fallback` then describes the difference.

    Raises: LayerSetNotFound: the message names the nearest model and task, and the command that tunes this one.
    """
    found_move = _nearest_moves(session, model, [task], device, dtype, alias).get(task)
    if found_move is None:
        raise _not_found(session, model, task, alias)
    return found_plan(found_move.plan, alias, _difference(found_move, task, device, dtype))


def lookup_many(
    session: Session,
    model: str,
    tasks: Sequence[str],
    device: str | None = None,
    dtype: str | None = None,
    alias: str = "best",
) -> dict[str, FoundPlan]:
    """Return the result of `lookup` by task, with two queries for all tasks.

    Tasks without a plan are left out, and so are unreadable plans, with a warning.
    """
    plans = {}
    for task, found_move in _nearest_moves(session, model, tasks, device, dtype, alias).items():
        try:
            plans[task] = found_plan(found_move.plan, alias, _difference(found_move, task, device, dtype))
        except StoreError as error:
            logger.warning("plan=skipped model=%s task=%s reason=%r", model, task, str(error))
    return plans


def _nearest_moves(
    session: Session, model: str, tasks: Sequence[str], device: str | None, dtype: str | None, alias: str
) -> dict[str, MoveRow]:
    """Return by task the alias move that a lookup uses; tasks without one are left out."""
    asked = list(dict.fromkeys((*tasks, DEFAULT_TASK)))
    row = find_model(session, model)
    moves = {move.task: move for move in _moves(session, NEAREST_MOVES, row, asked, alias, device=device, dtype=dtype)}
    found_moves = {task: moves.get(task) or moves.get(DEFAULT_TASK) for task in tasks}
    return {task: found_move for task, found_move in found_moves.items() if found_move is not None}


# Seconds after which a lookup is repeated although its state is unchanged, because models may have been merged.
REREAD_S = 60.0
# A model's id, and the id of its newest move of an alias; None: no such model.
LookupState = tuple[int, int | None] | None


def lookup_state(session: Session, model: str) -> LookupState:
    """Return a state of a model (name or fingerprint); while it is unchanged, so are lookups, except after merges."""
    return lookup_states(session, [model]).get(model)


def lookup_states(session: Session, models: Sequence[str]) -> dict[str, tuple[int, int | None]]:
    """Return by model (name or fingerprint) its `lookup_state`, in one query; unknown models are left out."""
    rows = session.execute(LOOKUP_STATES, {"asked": list(models)})
    return {name: (model_id, newest_move) for _, name, model_id, newest_move in rows}


def tasks_moved(session: Session, model_id: int, since: int | None) -> set[str]:
    """Return the tasks of a model with an alias move since the move `since` of its `lookup_state`.

    If "default" is among them, lookups of any task may have changed, because they may fall back to it.
    """
    moved = select(MoveRow.task).where(MoveRow.model_id == model_id, MoveRow.id > (since or 0))
    return set(session.scalars(moved.distinct()))


def tasks_between(
    before: LookupState, after: LookupState, moved_since: Callable[[int, int | None], Collection[str]]
) -> Collection[str] | None:
    """Return the tasks that had a move between two states of a model; None: lookups of any task may have changed.

    Args: moved_since: the store's `tasks_moved`.
    """
    if before == after:
        return ()
    same_model = before is not None and after is not None and before[0] == after[0]
    return moved_since(*before) if before is not None and same_model else None


def promote(session: Session, model: str, task: str, version: int, alias: str = "best") -> FoundPlan:
    """Point the alias at that version, for the device and dtype of its measurement.

    For a plan for another engine, `best` stands for that engine's own alias.

    Raises: InvalidInput: the alias is an engine's, but the plan is not for that engine.
    """
    plan = plan_of(session, model, task, version)
    if alias in ENGINES and plan.engine != alias:
        raise InvalidInput(
            f"version {version} of {model}/{task} is not for {alias}: choose one that is, or use another alias"
        )
    return move(session, plan, (plan.engine or alias) if alias == "best" else alias)


def rollback(session: Session, model: str, task: str, alias: str = "best") -> FoundPlan:
    """Undo the alias's last move, for any device and dtype, and return the plan of the move before."""
    row = find_model(session, model)
    if row is not None:
        lock(session, row)
    latest_moves = _moves(session, LATEST_MOVES, row, [task], alias)
    if not latest_moves:
        raise _not_found(session, model, task, alias)
    if len(latest_moves) == 1:
        raise LayerSetNotFound(
            f"the alias {alias!r} of {model}/{task} cannot go back: "
            f"version {latest_moves[0].plan.version} is the first it had; promote another version"
        )
    last_move, previous_move = latest_moves[0], latest_moves[1]
    session.add(_move_row(previous_move.plan, alias, undoes=last_move))
    return found_plan(previous_move.plan, alias)


def alias_moves(session: Session, model: str, task: str, alias: str = "best") -> list[AliasMove]:
    """Return the history of the alias, newest move first."""
    query = newest(session, MoveRow, model, task).where(MoveRow.alias == alias).options(lazyload(MoveRow.plan))
    moves = session.execute(query.join(MoveRow.plan).add_columns(PlanRow.version)).all()
    undone_ids = {move.undoes_id for move, _ in moves}
    return [
        AliasMove(version, move.device, move.dtype, move.created_at, move.undoes_id is not None, move.id in undone_ids)
        for move, version in moves
    ]


def move(session: Session, plan: PlanRow, alias: str) -> FoundPlan:
    """Point the alias at the plan, for the plan's device and dtype; no move if it already does."""
    lock(session, plan.owner)
    latest_moves = _moves(session, LATEST_MOVES, plan.owner, [plan.task], alias)
    if not latest_moves or latest_moves[0].plan_id != plan.id:
        session.add(_move_row(plan, alias))
    return found_plan(plan, alias)


def offer(session: Session, plan: PlanRow) -> None:
    """Move `best` to a tuned plan, unless it points to a faster plan of another method for this device and dtype."""
    lock(session, plan.owner)
    current_moves = _moves(
        session, LATEST_ON_DEVICE, plan.owner, [plan.task], "best", device=plan.device, dtype=plan.dtype
    )
    if not current_moves or not _is_better(current_moves[0].plan, plan):
        move(session, plan, "best")


def has_best(session: Session, plan: PlanRow) -> bool:
    """Return whether `best` is set for the plan's model and task."""
    return bool(_moves(session, LATEST_MOVES, plan.owner, [plan.task], "best"))


def _is_better(current: PlanRow, new: PlanRow) -> bool:
    """Return whether the current plan has the verdict "use" and the new plan is not measured to be as fast."""
    if current.method == new.method or current.verdict != "use":
        return False
    return new.verdict != "use" or (current.measured_speedup or 0.0) > (new.measured_speedup or 0.0)


def _moves(
    session: Session,
    statement: Select[MoveRow],
    model: ModelRow | None,
    tasks: Sequence[str],
    alias: str,
    **conditions: str | None,
) -> list[MoveRow]:
    """Return the alias moves selected by one of the statements at the top of this file."""
    parameters = {"model_id": model.id if model else None, "tasks": tasks, "alias": alias, **conditions}
    return list(session.scalars(statement, parameters))


def _difference(found_move: MoveRow, task: str, device: str | None, dtype: str | None) -> str | None:
    """Describe how the returned plan differs from the request; None if it does not."""
    differences = ["model default"] if found_move.task != task else []
    if device not in (None, found_move.device) or dtype not in (None, found_move.dtype):
        tuned_on = " ".join(name for name in (found_move.device, found_move.dtype) if name)
        differences.append(f"tuned on {tuned_on or 'an unknown device'}")
    return ", ".join(differences) or None


def _move_row(plan: PlanRow, alias: str, undoes: MoveRow | None = None) -> MoveRow:
    return MoveRow(
        model_id=plan.model_id,
        task=plan.task,
        alias=alias,
        device=plan.device,
        dtype=plan.dtype,
        plan_id=plan.id,
        undoes_id=undoes.id if undoes else None,
        created_at=now(),
    )


# --- helpers for versions and stored sets ---


def _versions(session: Session, table: type[PlanRow | LayerSetRow], model: ModelRow | None, task: str) -> list[int]:
    return list(session.scalars(select(table.version).where(where_task(table, model, task)).order_by(table.version)))


def _stored_set(session: Session, model: ModelRow, record: LayerSetRecord) -> LayerSetRow:
    """Return the stored row of a record. Its task may differ from the plan's, as a lookup may have fallen back."""
    of_task = where_task(LayerSetRow, model, record.task)
    set_row = session.scalar(select(LayerSetRow).where(of_task, LayerSetRow.version == record.version))
    if set_row is None:
        raise LayerSetNotFound(
            f"the plan's layer set, version {record.version} of {record.model}/{record.task}, is not stored for that"
            " model: store it first"
        )
    return set_row


def _not_found(session: Session, model: str, task: str, alias: str = "best") -> LayerSetNotFound:
    """Return the error for a model and task without a plan, with the nearest ones that have one."""
    if alias in ENGINES:
        command = f"{tune_command(model, task)} --engine {alias}"
        return LayerSetNotFound(f"no plan for {alias} is stored for {model}/{task}: run `{command}`")
    stored_versions = _versions(session, PlanRow, find_model(session, model), task)
    if stored_versions:
        return LayerSetNotFound(
            f"{model}/{task} has no layer set under the alias {alias!r}: promote one of its versions"
            f" {_version_list(stored_versions)}"
        )
    model_task = f"{model}/{task}"
    nearest = _nearest(session, model, task)
    hint = f" (the nearest is {nearest})" if nearest else ""
    return LayerSetNotFound(f"no layer set is stored for {model_task}{hint}: run `{tune_command(model, task)}`")


def _nearest(session: Session, model: str, task: str) -> str | None:
    """Return the most similar name of a model that has plans, with the most similar task among its own."""
    # Do not search all pairs, because comparing a text with thousands takes a tenth of a second.
    has_plans = select(PlanRow.id).where(PlanRow.model_id == NameRow.model_id).exists()
    model_ids = {name: id for name, id in session.execute(select(NameRow.name, NameRow.model_id).where(has_plans))}
    names = difflib.get_close_matches(model, sorted(model_ids), n=1, cutoff=0.0)
    if not names:
        return None
    stored_tasks = session.scalars(select(PlanRow.task).where(PlanRow.model_id == model_ids[names[0]]).distinct())
    return f"{names[0]}/{difflib.get_close_matches(task, sorted(stored_tasks), n=1, cutoff=0.0)[0]}"


def _version_list(versions: list[int]) -> str:
    return ", ".join(map(str, versions))
