"""`swiftopt jobs`: see the jobs of a queue, follow them, and steer them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.errors import InvalidInput
from ..core.events import JobState, Progress
from ..core.jobs import Job, JobEvent, JobList, Verb
from ..core.requests import TuneRequest
from ..core.streams import output_line
from . import options
from .backend import Backend, JobClient, backend_options, event_of, result_of
from .options import PresetGroup, positive, together
from .output import Result, console, write_text
from .progress import progress_words
from .render import ROOMY, Columns, figures_table, fixed, folding, heading, listing, numeric, ratio
from .tune import changed, tune_result

STDOUT = "-"
JOB_STYLES: dict[JobState, str] = {
    "queued": "yellow", "running": "cyan", "paused": "yellow",
    "succeeded": "green", "failed": "bold red", "cancelled": "dim",
}  # fmt: skip
JOB_WANTED = {"pause": "pausing", "stop": "stopping"}

on_job = together(click.argument("job", metavar="ID"), backend_options, options.json)


@click.group(cls=PresetGroup, short_help="Show, follow and steer the jobs of a queue.")
@options.example("jobs list --state running", "jobs watch 3f2a9c81d04e")
def jobs() -> None:
    """The jobs of a queue: see them, follow one, steer one. The jobs of runs in this process are listed, too."""


@jobs.command("list", short_help="List the newest jobs.")
@click.option("--state", type=click.Choice(get_args(JobState)), help="Only jobs in this state.")
@click.option("--limit", type=positive, default=50, help="How many at most.")
@backend_options
@options.json
@options.example("jobs list --state failed")
def list_(state: JobState | None, limit: int, backend: Backend) -> Result:
    """List the newest jobs first, each with how far it is and what it found."""
    with backend.open() as client:
        found = client.jobs.latest(state, limit)
    none = f"no job is {state}" if state else "there is no job yet: submit one with `swiftopt tune --redis URL …`"
    table = [jobs_table(found, console().width)] if found else []
    return Result(JobList(tuple(found)).to_json(), table, [] if found else [none])


@jobs.command("show", short_help="Show a job.")
@on_job
@options.example("jobs show 3f2a9c81d04e")
def show_(job: str, backend: Backend) -> Result:
    """Show everything about a job: state, worker, progress, last error, and the layer sets it stored."""
    with backend.open() as client:
        found = client.jobs.get(job)
        return Result(found.to_json(), [job_view(found)], _why_waiting(client, found))


@jobs.command(short_help="Follow a job to its end.")
@on_job
@options.example("jobs watch 3f2a9c81d04e")
def watch(job: str, backend: Backend) -> Result:
    """Follow a job to its end and print its result, as `tune` does; Ctrl-C leaves the job running.

    The result of a job that has ended is printed at once.
    """
    with backend.open() as client:
        ended = result_of(backend, client, client.jobs.get(job))
        if ended.job.kind != "tune":
            return Result(ended.job.to_json(), [f"job {job} has succeeded"])
        request = TuneRequest.from_json(ended.job.request)
        fetch = backend.command("jobs", "outputs", job, "--out", "FILE")
        return tune_result(request, job, ended.tasks, client.database, backend, changed(request), None, fetch)


def _why_waiting(client: JobClient, job: Job) -> list[str]:
    reason = client.why_waiting(job)
    return [f"note: {reason}"] if reason else []


VERBS: dict[Verb, tuple[str, str]] = {
    "pause": (
        "Let a job rest.",
        "Let a job rest: a running one saves where it is and frees its device at its next step.",
    ),
    "resume": ("Let a paused job go on.", "Queue a paused job again; it goes on from where it was."),
    "stop": (
        "End a job with the best found so far.",
        "End a job at its next step; it succeeds, with the best layer sets found so far.",
    ),
    "cancel": (
        "End a job without a result.",
        "End a job without a result; the completions it has finished are kept.",
    ),
    "retry": (
        "Queue a failed or cancelled job again.",
        "Queue a failed or cancelled job again; it goes on from its last checkpoint.",
    ),
}


def _add_verb(verb: Verb, short: str, words: str) -> None:
    """Add the command of a verb to the group."""

    @jobs.command(verb, short_help=short)
    @on_job
    @options.example(f"jobs {verb} 3f2a9c81d04e", words=words)
    def act(job: str, backend: Backend) -> Result:
        with backend.open() as client:
            found = client.jobs.act(job, verb)
            wanted = f", and will {found.wanted} at its next step" if found.wanted else ""
            text = f"job {found.id} is {found.state}{wanted}"
            return Result(found.to_json(), [text], _why_waiting(client, found))


for verb, (short, words) in VERBS.items():
    _add_verb(verb, short, words)


@jobs.command(short_help="Write a job's completions as JSON Lines.")
@click.argument("job", metavar="ID")
@click.option("-o", "--out", metavar="FILE", default=STDOUT, help="File to write; - is standard output.")
@backend_options
@options.as_json
@options.example("jobs outputs 3f2a9c81d04e --out completions.jsonl")
def outputs(job: str, out: str, backend: Backend, as_json: bool) -> int:
    """Write the completions that a job has finished, in the order of its stream, one JSON object per line.

    The lines are those of `tune --out`. --json prints an object with their number, and so needs a file.
    """
    if as_json and out == STDOUT:
        raise InvalidInput("--json would mix with the completions on standard output: name a file with --out")
    with backend.open() as client:
        found = client.jobs.outputs(job)
    lines = [output_line(event.prompt, event.completion) for event in found]
    if out == STDOUT:
        for line in lines:
            click.echo(line)
        return 0
    write_text(Path(out), "".join(f"{line}\n" for line in lines))
    value = {"schema": "swiftopt.job-outputs/1", "job": job, "out": out, "n_outputs": len(found)}
    return Result(value, remarks=[f"{len(found)} completions written to {out}"]).print(as_json)


# --- text for a person


def jobs_table(jobs: Sequence[Job], width: int) -> Table:
    """List jobs with how far they are; who works on them only where `width` has room for it."""
    columns: Columns[Job] = [
        (fixed("id"), lambda job: job.id),
        (fixed("state"), lambda job: Text(JOB_WANTED.get(job.wanted or "", job.state), style=JOB_STYLES[job.state])),
        (folding("model", min_width=6), lambda job: job.model or job.kind),
        (numeric("done"), lambda job: f"{job.n_outputs}/{job.n_prompts}" if job.n_prompts else "–"),
        (
            folding("found", min_width=6),
            lambda job: ", ".join(f"{each.task} {ratio(each.measured_speedup)}" for each in job.layer_sets) or "–",
        ),
        (folding("queue"), lambda job: job.queue or "–"),
        (folding("worker"), lambda job: job.worker or "–"),
        (numeric("tries"), lambda job: str(job.attempt)),
        (fixed("submitted"), lambda job: job.created_at[:16].replace("T", " ")),
    ]
    return listing(jobs, columns, width=width) if width >= ROOMY else listing(jobs, [*columns[:5], columns[-1]])


def job_view(job: Job) -> RenderableType:
    """Show everything about a job, in two columns."""
    wanted = f", to {job.wanted} at its next step" if job.wanted else ""
    found = []
    for record in job.layer_sets:
        measured = ratio(record.measured_speedup, record.measured_interval)
        words = f"r {record.layer_set.skip_ratio:.2f}, measured {measured}, {record.verdict}"
        found.append((f"found for {record.task}", f"version {record.version}, {words}"))
    rows = [
        ("state", f"{job.state} (attempt {job.attempt}){wanted}"),
        ("error", job.error or ""),
        ("model", job.model or f"none, a {job.kind} job"),
        ("stream", str(job.request.get("stream") or "")),
        ("completions", f"{job.n_outputs} of {job.n_prompts}" if job.n_prompts else ""),
        ("now", now_words(job)),
        *found,
        ("queue", job.queue or "none, it runs where it was begun"),
        ("worker", job.worker or ""),
        ("submitted", job.created_at),
        ("started", job.started_at or ""),
        ("ended", job.finished_at or ""),
        ("took", duration(job.started_at, job.finished_at)),
        ("fingerprint", job.fingerprint),
    ]
    return Group(heading(f"job {job.id}"), figures_table((name, value) for name, value in rows if value))


def now_words(job: Job) -> str:
    """Return a running job's figures, as its worker left them in its row; nothing if a newer swiftopt did."""
    if job.progress is None or job.is_finished:
        return ""
    progress = event_of(JobEvent(0, "progress", job.progress, ""))
    if not isinstance(progress, Progress):
        return ""
    return f"{progress.task}, {progress.phase}: {progress_words(progress)}"


def duration(start: str | None, end: str | None) -> str:
    """Return the time from `start` to `end` (None: now) in the usual form: 41 s, 3 min 20 s, 2 h 5 min."""
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
