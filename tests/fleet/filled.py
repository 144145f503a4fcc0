"""A database as a fleet leaves it: models with plans per task, jobs that have ended, and their trials."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from job_table import finished
from searched import PAIRS, trials
from sqlalchemy import insert, literal, select, text
from sqlalchemy.orm import Session

from swiftopt.core.events import StateChanged, event_type
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord
from swiftopt.core.requests import TuneRequest
from swiftopt.store import Store
from swiftopt.store.tables import (
    EventRow,
    JobRow,
    LayerSetRow,
    Measured,
    ModelRow,
    MoveRow,
    NameRow,
    PlanRow,
    TrialRow,
    to_row,
)

DEVICE, DTYPE = "NVIDIA H100", "bfloat16"
N_LAYERS = 32
AT = "2026-11-01T00:00:{:02d}.{:03d}Z"
STATES = (*["succeeded"] * 17, "failed", "cancelled", "paused")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is stored: plans are tasks · versions, shared out over the models; jobs have `trials` each."""

    models: int = 50
    tasks: int = 5_000
    versions: int = 1
    jobs: int = 8_000
    trials: int = 125

    @property
    def tasks_of_model(self) -> int:
        """Tasks of each model."""
        return self.tasks // self.models


def model_name(number: int) -> str:
    return f"org/model-{number}"


def fingerprint(number: int) -> str:
    return f"v1:{number:016x}"


def task_name(number: int) -> str:
    return f"task-{number}"


def fill(store: Store, size: Size) -> None:
    """Store all of it, past the store's functions: these take a transaction for each row."""
    rng = random.Random(0)
    sets = [_set_row(model, version, task_name(task), rng) for model, task, version in _versions(size)]
    with Session(store.engine) as session, session.begin():
        session.execute(insert(ModelRow), _models(size))
        session.execute(insert(NameRow), [{"name": model_name(n), "model_id": n + 1} for n in range(size.models)])
        session.add_all(sets)
        session.flush()
        copied = ("model_id", "task", *Measured.__annotations__)
        plans = [{name: getattr(row, name) for name in ("version", *copied)} | {"layer_set_id": row.id} for row in sets]
        session.execute(insert(PlanRow), [{"method": "adaptive", **values} for values in plans])
        moved = (PlanRow.model_id, PlanRow.task, PlanRow.device, PlanRow.dtype, PlanRow.id)
        moves = select(*moved, literal("best"), literal(AT.format(0, 0))).order_by(PlanRow.id)
        into = ["model_id", "task", "device", "dtype", "plan_id", "alias", "created_at"]
        session.execute(insert(MoveRow).from_select(into, moves))
        session.execute(insert(JobRow), _jobs(size))
        session.execute(insert(EventRow), _events(size))
        session.add_all(to_row(TrialRow, trial, job_id=job_id(0), task="code") for trial in trials(size.trials))
        session.flush()
        columns = [column for column in TrialRow.__table__.c if column.name not in ("id", "job_id")]
        of_first = TrialRow.job_id == job_id(0)
        others = select(JobRow.id, *columns).join_from(TrialRow, JobRow, JobRow.id != job_id(0)).where(of_first)
        session.execute(insert(TrialRow).from_select(["job_id", *(column.name for column in columns)], others))
    with store.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("ANALYZE"))


def _versions(size: Size) -> Iterator[tuple[int, int, int]]:
    return product(range(size.models), range(size.tasks_of_model), range(1, size.versions + 1))


def _set_row(model: int, version: int, task: str, rng: random.Random) -> LayerSetRow:
    found = record(model, task, rng)
    return to_row(LayerSetRow, found, model_id=model + 1, version=version, created_at=AT.format(version % 60, 0))


def _models(size: Size) -> list[dict[str, object]]:
    about = {"architecture": "LlamaForCausalLM", "n_layers": N_LAYERS, "n_parameters": 8 * 10**9}
    return [
        {"id": n + 1, "fingerprint": fingerprint(n), "created_at": AT.format(0, 0), **about} for n in range(size.models)
    ]


def layer_set(rng: random.Random) -> LayerSet:
    """One that leaves out a third of the sub-layers."""
    attn, mlp = (frozenset(layer for layer in range(1, N_LAYERS - 1) if rng.random() < 0.35) for _ in range(2))
    return LayerSet(N_LAYERS, attn, mlp, (("mlp", "int4"),))


def record(number: int, task: str, rng: random.Random) -> LayerSetRecord:
    """A version that was measured to be faster."""
    ratio = 1.2 + rng.random()
    return LayerSetRecord(
        model_name(number),
        task,
        layer_set(rng),
        fingerprint(number),
        verdict="use",
        measured_speedup=ratio,
        measured_interval=(ratio - 0.1, ratio + 0.1),
        acceptance_rate=0.8,
        mean_generated_length=3.1,
        device=DEVICE,
        dtype=DTYPE,
        settings={"max_draft_tokens": 8},
        evidence=PAIRS * 8,
    )


def job_id(number: int) -> str:
    return f"{number:012x}"


def _jobs(size: Size) -> list[dict[str, object]]:
    requests = [TuneRequest(model_name(n), "s.jsonl", task="code").to_json() for n in range(size.models)]
    return [
        {
            "id": job_id(n),
            "kind": "tune",
            "state": STATES[n % len(STATES)],
            "queue": "default",
            "fingerprint": f"{n:064x}",
            "request": requests[n % size.models],
            "n_prompts": 32,
            "worker": None,
            "due_at": 1.79e9 + n,
            "n_checkpoints": 3,
            "created_at": AT.format(n // 1000 % 60, n % 1000),
            "started_at": AT.format(n // 1000 % 60, n % 1000),
            "finished_at": AT.format(n // 1000 % 60, n % 1000),
        }
        for n in range(size.jobs)
    ]


def _events(size: Size) -> list[dict[str, object]]:
    changes = [StateChanged(state, 1) for state in ("queued", "running", "succeeded")]
    kinds = [(event_type(event), event.to_json()) for event in (*changes, finished(0), finished(1), finished(2))]
    return [
        {"job_id": job_id(n), "type": name, "data": data, "created_at": AT.format(0, 0)}
        for n in range(size.jobs)
        for name, data in kinds
    ]
