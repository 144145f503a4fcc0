"""Jobs for a person: a list, and one with everything about it; pure functions, as in render.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.errors import StoreError
from ..core.event_json import event_from_json
from ..core.events import Progress
from ..core.jobs import Job, JobState
from ..core.types import LayerSetRecord
from .live import progress_words
from .render import figures_table, heading, ratio

JOB_STYLES: dict[JobState, str] = {
    "queued": "yellow", "running": "cyan", "paused": "yellow",
    "succeeded": "green", "failed": "bold red", "cancelled": "dim",
}  # fmt: skip
JOB_WANTED = {"pause": "pausing", "stop": "stopping"}


def jobs_table(jobs: Sequence[Job], width: int) -> Table:
    """Jobs with how far they are; who works on them and when they came only where `width` has room for it."""
    roomy = width >= 110
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", width=width if roomy else None)
    for name in ("id", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("model", overflow="fold", min_width=6)
    table.add_column("done", justify="right", no_wrap=True)
    table.add_column("found", overflow="fold", min_width=6)
    if roomy:
        table.add_column("queue", overflow="fold")
        table.add_column("worker", overflow="fold")
        table.add_column("tries", justify="right", no_wrap=True)
    table.add_column("submitted", no_wrap=True)
    for job in jobs:
        found = ", ".join(f"{record.task} {ratio(record.measured_speedup)}" for record in job.layer_sets)
        more = (job.queue or "–", job.worker or "–", str(job.attempt)) if roomy else ()
        done = f"{job.n_outputs}/{job.n_prompts}" if job.n_prompts else "–"
        state = Text(JOB_WANTED.get(job.wanted or "", job.state), style=JOB_STYLES[job.state])
        submitted = job.created_at[:16].replace("T", " ")
        table.add_row(job.id, state, job.model or job.kind, done, found or "–", *more, submitted)
    return table


def job_view(job: Job) -> RenderableType:
    """Everything about a job, in two columns."""
    wanted = f", to {job.wanted} at its next step" if job.wanted else ""
    found = [(f"found for {record.task}", found_words(record)) for record in job.layer_sets]
    rows = [
        ("state", f"{job.state} (attempt {job.attempt}){wanted}"),
        ("error", job.error or ""),
        ("model", job.model or f"none, a {job.kind} job"),
        ("stream", str(job.request.get("stream") or "")),
        ("completions", f"{job.n_outputs} of {job.n_prompts}" if job.n_prompts else ""),
        ("now", "" if job.progress is None or job.is_finished else figures_words(job.progress)),
        *found,
        ("queue", job.queue or "none, it runs where it was begun"),
        ("worker", job.worker or ""),
        ("submitted", job.created_at),
        ("started", job.started_at or ""),
        ("ended", job.finished_at or ""),
        ("took", duration(job.started_at, job.finished_at)),
        ("fingerprint", job.fingerprint),
    ]
    return Group(heading(f"job {job.id}"), figures_table([(name, value) for name, value in rows if value]))


def found_words(record: LayerSetRecord) -> str:
    """A stored set in a few words."""
    measured = ratio(record.measured_speedup, record.measured_interval)
    return f"version {record.version}, r {record.layer_set.skip_ratio:.2f}, measured {measured}, {record.verdict}"


def figures_words(values: Mapping[str, Any]) -> str:
    """A running job's figures, as its worker left them in its row; nothing if a newer one did."""
    with suppress(StoreError):
        progress = event_from_json("progress", {key: value for key, value in values.items() if key != "type"})
        if isinstance(progress, Progress):
            return f"{progress.task}, {progress.phase}: {progress_words(progress)}"
    return ""


def duration(start: str | None, end: str | None) -> str:
    """From one time to another (None: now) as people say it: 41 s, 3 min 20 s, 2 h 5 min."""
    if start is None:
        return ""
    try:
        until = datetime.now(UTC) if end is None else datetime.fromisoformat(end)
        seconds = max(0, round((until - datetime.fromisoformat(start)).total_seconds()))
    except (ValueError, TypeError):  # a time that was changed by hand
        return ""
    if seconds < 60:
        return f"{seconds} s"
    minutes, hours = seconds // 60, seconds // 3600
    return f"{minutes} min {seconds % 60} s" if minutes < 60 else f"{hours} h {minutes % 60} min"
