"""What the tests of the job table share: specifications, events, and a look past the store's methods."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, select, text, update

from swiftopt.core.events import PromptFinished, TaskFinished, TrialsDone
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord
from swiftopt.core.requests import JobSpec, Lease
from swiftopt.core.types import Completion, Prompt, Timings, Trial, Verdict
from swiftopt.store import Jobs
from swiftopt.store.migrations import FIRST
from swiftopt.store.tables import (
    Base,
    CostProfileRow,
    LayerSetRow,
    SchemaRow,
    ServedSearchRow,
    ServedTrialRow,
    TrialRow,
    UsageRow,
)

SMALL = LayerSet(8, frozenset({2}), frozenset({3, 4}))


def noop(n: float = 0.0, queue: str | None = "default", key: str | None = None) -> JobSpec:
    """A job of its own for every `n`."""
    return JobSpec("noop", queue, {"seconds": n}, idempotency_key=key)


def tune(model: str = "m", stream: str = "5" * 64, lines: str = '{"id": "p"}\n', queue: str = "default") -> JobSpec:
    return JobSpec("tune", queue, {"model": model, "stream": "s.jsonl"}, stream, lines, n_prompts=1)


def running(jobs: Jobs, spec: JobSpec | None = None, worker: str = "w1") -> Lease:
    """A job that a worker has taken."""
    job, _ = jobs.submit(spec or noop())
    return taken(jobs, Lease(job.id, job.attempt), worker)


def taken(jobs: Jobs, lease: Lease, worker: str = "w1") -> Lease:
    """The lease, claimed."""
    assert jobs.claim(lease, worker) is not None
    return lease


def trials_done(*steps: int, task: str = "t") -> TrialsDone:
    return TrialsDone(
        task, tuple(Trial(step, SMALL, "random", 0.5, 0.25, "p", seed=2**40, seconds=0.5) for step in steps)
    )


def finished(place: int = 0, prompt: str = "p", held_out: bool = False) -> PromptFinished:
    """A completion of 6 tokens: 4 rounds, of which 3 drafted 5 tokens; 3 accepted."""
    times, drafts = Timings(1, 2, 3, 4), {1: (0, 1), 2: (1, 0, 1)}
    figures = (4, 4, 1, 5, 3, (2, 1), {2: 2, 3: 1}, times, 0.5, SMALL)
    completion = Completion((1, 2, 3, 4, 5, 6), "six", "stop", "swift", *figures, by_draft_length=drafts)
    return PromptFinished(Prompt(prompt, "t"), place, completion, held_out)


def task_finished(job: str, task: str = "t") -> TaskFinished:
    record = LayerSetRecord("m", task, SMALL, "f" * 16, matchness=0.5, measured_interval=(0.9, 1.2), job=job)
    verdict = Verdict("plain", 1.05, (0.9, 1.2), 1.1, 4, "the interval holds 1")
    return TaskFinished(task, record, verdict, "the trials are used up", (), Timings(), 4, 24, 0.7, 10.0, 10.5)


def dump(engine: Engine) -> dict[str, list[Any]]:
    """Every row of the database."""
    with engine.connect() as connection:
        return {
            table.name: sorted(map(tuple, connection.execute(select(table))), key=repr)
            for table in Base.metadata.sorted_tables
        }


def edit(engine: Engine, table: str, values: str, **more: Any) -> None:
    """Change every row of a table by hand."""
    with engine.begin() as connection:
        assert connection.execute(text(f"UPDATE swiftopt_{table} SET {values}"), more).rowcount


def column(engine: Engine, name: str, job: str) -> Any:
    """A column of the job's row that `Job` does not show."""
    with engine.connect() as connection:
        return connection.execute(text(f"SELECT {name} FROM swiftopt_jobs WHERE id = :job"), {"job": job}).scalar()


def rewind(connection: Connection, has_served_trials: bool = False) -> None:
    """Give a database at the newest schema that of 0.1.0: as the first had it, or the last ones."""
    for table in (UsageRow, *(() if has_served_trials else (ServedTrialRow, ServedSearchRow))):
        table.__table__.drop(connection)  # type: ignore[attr-defined]
    for row in (LayerSetRow, TrialRow, CostProfileRow, *((ServedTrialRow,) if has_served_trials else ())):
        connection.execute(text(f"ALTER TABLE {row.__tablename__} DROP COLUMN experts"))
    for with_absent in (CostProfileRow, LayerSetRow):
        connection.execute(text(f"ALTER TABLE {with_absent.__tablename__} DROP COLUMN absent"))
    for index in ("ix_swiftopt_jobs_due", "ix_swiftopt_alias_moves_newest"):
        connection.execute(text(f"DROP INDEX {index}"))
    connection.execute(update(SchemaRow).values(version_num=FIRST))
