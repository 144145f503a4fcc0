"""`swiftopt tune` and `swiftopt jobs`: tune here or through a queue, and list, follow and control its jobs."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any, get_args
from urllib.parse import quote

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.errors import InvalidInput, safe_url
from ..core.events import PHASES, JobState, TaskFinished
from ..core.records import PlanInUse
from ..core.requests import VERB_HELP, Job, JobList, TuneRequest, Verb
from ..core.streams import LineWriter, default_output, output_line
from ..core.types import Prompt, epoch_s, seconds_by_part
from ..core.wings import load, wings
from ..tasks.admission import check_tuning
from ..terminal import commands, inputs, options, tuning_options, value_types
from ..terminal.charts import Pictures, draw_tuning
from ..terminal.commands import PROMPTS, SERVICES, ConfiguredGroup, from_field, option
from ..terminal.inputs import on_command_line, pick
from ..terminal.output import Result, console, listing_result, note, write_text
from ..terminal.render import ROOMY, Columns, figures_table, fixed, folding, heading, listing, numeric, tune_summary
from ..terminal.value_types import FILE, positive
from .backend import Backend, Ended, JobClient, TuneProgress, backend_options, progress_words, result_of

STDOUT = "-"

JOB_STYLES: dict[JobState, str] = {
    "queued": "yellow", "running": "cyan", "paused": "yellow",
    "succeeded": "green", "failed": "bold red", "cancelled": "dim",
}  # fmt: skip
JOB_WANTED = {"pause": "pausing", "stop": "stopping"}

on_job = commands.together(click.argument("job", metavar="ID"), backend_options, options.json)


@commands.command(
    short_help="Find the layer set that decodes a stream fastest.",
    common="model stream task limit max_new_tokens out concurrency preset engine png redis server detach db as_json",
)
@options.model_and_stream
@options.task("default", "Task of lines that name none.  [default: the file's stem]")
@from_field(PROMPTS, TuneRequest, "out", "File for the completions.  [default: a file in your data folder]", type=FILE)
@from_field(PROMPTS, TuneRequest, "limit", "Use only the first prompts.", type=positive)
@from_field(PROMPTS, TuneRequest, "concurrency", "Number of prompts decoded at once.", type=positive)
@options.form
@options.machine(TuneRequest, "max_new_tokens", "speed")
@options.sampling
@tuning_options.settings
@options.redis
@options.server
@options.queue
@option(SERVICES, "--detach", is_flag=True, help="Submit the job and return at once.")
@option(SERVICES, "--local", is_flag=True, help="Run in this process even if a Redis or server is configured.")
@commands.of_wings("tune")
@option(
    commands.ENGINES,
    "--draft-model",
    type=value_types.MODEL,
    help="A smaller model that may draft, with --engine or --preset mtad.",
)
@options.pictures("Draw the layer map and the search of each task.")
@options.db_and_json
@commands.example(
    "tune --model smollm2-135m --stream prompts.jsonl --task notes --max-new-tokens 128",
    "tune --model smollm2-135m --stream prompts.jsonl --redis redis://127.0.0.1:6379 --detach",
    "tune --model smollm2-135m --stream prompts.jsonl --engine vllm",
)
def tune(pictures: Pictures, **values: Any) -> Result:
    """Find the layer set with which a model decodes a stream of prompts fastest.

    Every prompt is decoded losslessly during the search, and its completion is kept. The database then holds a layer
    set per task, its speed relative to plain decoding on held-out prompts, and a verdict.

    By default a dynamic program over measured costs proposes sets for drafts in fewer bits. --preset swift is the
    published system: random search with interval Bayesian optimisation, confidence-based early stopping, and top-k
    candidates. Other presets train the parts of their paper's method on most prompts, and measure it on the others.

    With --redis or --server the command submits a job and follows it; Ctrl-C leaves the job running. With --engine it
    tries the drafts that another engine can run, and compares the fastest with that engine's plain decoding; the
    verdict may be plain.
    """
    for reference in (reference for wing in wings() for reference in wing.tunings):
        result: Result | None = load(reference)(pictures, values)
        if result is not None:
            return result
    if values["draft_model"]:
        raise InvalidInput("--draft-model is for another engine: add --engine")
    request = pick(TuneRequest, values)
    backend = Backend() if values["local"] else Backend.from_options(values["server"], values["redis"], values["db"])
    queued = bool(backend.server or backend.redis)
    if values["detach"] and not queued:
        raise InvalidInput("--detach needs workers to run the job: use --redis or --server, and not --local")
    if values["detach"] and request.out is not None:
        raise InvalidInput(
            "--detach writes no file: remove --out, and fetch the completions later with `swiftopt jobs outputs`"
        )
    if values["detach"] and pictures:
        raise InvalidInput("--detach draws nothing: remove --png and --svg, and draw later with `swiftopt layers show`")
    prompts = options.prompts_of(request.stream, request.task, request.limit, request.form)
    tuning_options.warn_idle(request.settings)
    if queued:
        return _tune_through_queue(request, prompts, backend, values["queue"], values["detach"], pictures)
    return _tune_here(request, prompts, values["db"], pictures)


def _tune_here(request: TuneRequest, prompts: Sequence[Prompt], db: str | None, pictures: Pictures) -> Result:
    check_tuning(request, prompts)  # Checked first because loading torch takes seconds.
    # Choose the path here, so that an interrupted run can still print where its completions are.
    if request.out is None:
        request = replace(request, out=str(default_output(request.stream)))
    else:
        _check_completions_file(Path(request.out))
    with inputs.open_store(db) as store:
        from ..tasks.tune import run_tuning

        progress = TuneProgress(console(stderr=True))
        try:
            with progress:
                tuned = run_tuning(request, store, progress, prompts)
        except BaseException:
            if progress.n_finished:
                note(f"{progress.n_finished} completions are in {request.out}")
            raise
        database, job_end = safe_url(store.url), Ended(store.jobs.get(tuned.job), tuned.tasks)
    if tuned.tasks:
        pictures.draw(draw_tuning, tuned.tasks)
    # Repeat only options of the command line: the configuration applies to the printed command anyway.
    placement_options = [name for name in options.PLACEMENT if on_command_line(name)]
    backend, output_path = Backend(db=db), str(tuned.out)
    return tune_result(request, job_end, database, backend, placement_options, output_path)


def _check_completions_file(path: Path) -> None:
    """Raises: OutputError: the file of completions cannot be written, which is reported before the work begins."""
    with LineWriter(path):
        pass


def _tune_through_queue(
    request: TuneRequest, prompts: Sequence[Prompt], backend: Backend, queue: str, detach: bool, pictures: Pictures
) -> Result:
    """Submit the job, and follow it to its end unless it is detached."""
    output_path = Path(request.out) if request.out is not None else default_output(request.stream)
    if request.out is not None:
        _check_completions_file(output_path)
    path = os.path.expanduser(request.model)
    # A server may run in another working directory, so send a local path as an absolute one.
    name = os.path.abspath(path) if os.path.exists(path) else request.model
    submitted_request = replace(request, model=name, out=None)
    with backend.open() as client:
        job, is_new = client.jobs.submit(submitted_request, prompts, queue, uuid.uuid4().hex)
        if detach:
            return _submitted_result(client, backend, job.id, is_new)
        if not is_new:
            note(f"job {job.id} already does the same: following it")
        # For a server, ask now why the job waits; `follow` asks later.
        if backend.server and (reason := client.jobs.obstacle(job)):
            note(f"note: {reason}")
        job_end = result_of(backend, client, job)
        completions = client.jobs.outputs(job.id)
        with LineWriter(output_path) as writer:
            for event in completions:
                writer.write_completion(event.prompt, event.completion)
        if job_end.tasks:
            pictures.draw(draw_tuning, job_end.tasks)
        return tune_result(
            submitted_request, job_end, client.database, backend, changed_placement(submitted_request), str(output_path)
        )


def _submitted_result(client: JobClient, backend: Backend, job_id: str, is_new: bool) -> Result:
    """Return the result of a detached submission; `is_new` is false if an equal unfinished job already exists."""
    job = client.jobs.get(job_id)
    if reason := client.jobs.obstacle(job):
        note(f"note: {reason}")
    remark = "" if is_new else ", which already does the same"
    report = {"schema": "swiftopt.submitted/1", "job": job_id, "state": job.state, "new": is_new}
    return Result(report, [f"job {job_id}{remark}: watch it with {backend.command('jobs', 'watch', job_id)}"])


def changed_placement(request: TuneRequest) -> list[str]:
    """Return those options of PLACEMENT whose values differ from the defaults."""
    return [name for name in options.PLACEMENT if getattr(request, name) != commands.default_of(TuneRequest, name)]


def tune_result(
    request: TuneRequest,
    job_end: Ended,
    database: str,
    backend: Backend,
    placement_options: Sequence[str],
    output_path: str | None,
    fetch: str = "–",
) -> Result:
    """Return the result of a tuning run: what it found for each task, the plan in use, and the command line for that.

    These command lines repeat `placement_options`. `output_path` is the file of completions; if it is None, `fetch` is
    the command that gets them.
    """
    tasks, views = [], list[RenderableType]()
    plans = {plan.task: plan for plan in job_end.job.plans}
    for task in job_end.tasks:
        command, plan = (
            _usage_command(request, task, backend, placement_options),
            plans.get(task.task, PlanInUse(task.task)),
        )
        if views:
            views.append("")
        views.append(tune_summary(task, plan, output_path or fetch, command, console().width))
        values = task.to_json()
        del values["record"], values["trials"]  # The store keeps the trials of each job.
        layer_set, timings = task.record.to_json(), seconds_by_part(task.timings)
        extra_fields = {"layer_set": layer_set, "n_trials": len(task.trials), "timings": timings, "command": command}
        tasks.append({**values, **extra_fields, "plan": plan.to_json()})
    report = {"model": request.model, "job": job_end.job.id, "out": output_path, "database": database, "tasks": tasks}
    return Result({"schema": "swiftopt.tune/1", **report}, views)


def _usage_command(
    request: TuneRequest, task: TaskFinished, backend: Backend, placement_options: Sequence[str]
) -> list[str]:
    """Return the command line that decodes with what was found; a server's layer sets are fetched with curl."""
    if backend.server is not None:
        model_path = "/".join(quote(name, safe="") for name in (task.record.model, task.task))
        return ["curl", f"{safe_url(backend.server).rstrip('/')}/v1/layer-sets/{model_path}"]
    arguments = ["swiftopt", "generate", "--model", request.model, "--task", task.task]
    for name in placement_options:
        arguments += [f"--{name}", getattr(request, name)]
    if backend.db and on_command_line("db"):
        arguments += ["--db", safe_url(backend.db)]
    return [*arguments, "--prompt", "Write your prompt here"]


# --- jobs


@click.group(cls=ConfiguredGroup, short_help="Show, follow and control the jobs of a queue.")
@commands.example("jobs list --state running", "jobs watch 3f2a9c81d04e")
def jobs() -> None:
    """List, follow and control the jobs of a queue. Runs without a queue are listed, too."""


@jobs.command("list", short_help="List the newest jobs.")
@click.option("--state", type=click.Choice(get_args(JobState)), help="Only jobs in this state.")
@click.option("--limit", type=positive, default=50, help="Maximum number of jobs.")
@backend_options
@options.json
@commands.example("jobs list --state failed")
def list_(state: JobState | None, limit: int, backend: Backend) -> Result:
    """List jobs, the newest first, each with its progress and the plan that each of its tasks uses now."""
    with backend.open() as client:
        newest_jobs = client.jobs.latest(state, limit)
    empty_note = (
        f"no job is in the state {state}"
        if state
        else "there are no jobs yet: submit one with `swiftopt tune --redis URL …`"
    )
    return listing_result(JobList(tuple(newest_jobs)).to_json(), newest_jobs, jobs_table, empty_note)


@jobs.command("show", short_help="Show a job.")
@on_job
@commands.example("jobs show 3f2a9c81d04e")
def show_(job: str, backend: Backend) -> Result:
    """Show everything about a job: state, worker, progress, last error, the sets it stored, and the plans in use."""
    with backend.open() as client:
        job_now = client.jobs.get(job)
        return Result(job_now.to_json(), [job_view(job_now)], _why_waiting(client, job_now))


@jobs.command(short_help="Follow a job to its end.")
@on_job
@commands.example("jobs watch 3f2a9c81d04e")
def watch(job: str, backend: Backend) -> Result:
    """Follow a job to its end and print its result, like `tune`; Ctrl-C leaves the job running.

    If the job has already ended, its result is printed at once.
    """
    with backend.open() as client:
        job_end = result_of(backend, client, client.jobs.get(job))
        if job_end.job.kind != "tune":
            return Result(job_end.job.to_json(), [f"job {job} succeeded"])
        request = TuneRequest.from_json(job_end.job.request)
        fetch = backend.command("jobs", "outputs", job, "--out", "FILE")
        return tune_result(request, job_end, client.database, backend, changed_placement(request), None, fetch)


def _why_waiting(client: JobClient, job: Job) -> list[str]:
    reason = client.jobs.obstacle(job)
    return [f"note: {reason}"] if reason else []


def _add_verb(verb: Verb, help: str) -> None:
    @jobs.command(verb, short_help=help.partition(":")[0] + ".")
    @on_job
    @commands.example(f"jobs {verb} 3f2a9c81d04e", help=help)
    def act(job: str, backend: Backend) -> Result:
        with backend.open() as client:
            job_after = client.jobs.act(job, verb)
            remark = f", and will {job_after.wanted} at its next step" if job_after.wanted else ""
            return Result(
                job_after.to_json(),
                [f"job {job_after.id} is {job_after.state}{remark}"],
                _why_waiting(client, job_after),
            )


for verb, words in VERB_HELP.items():
    _add_verb(verb, words)


@jobs.command(short_help="Write a job's completions as JSON Lines.")
@click.argument("job", metavar="ID")
@click.option("-o", "--out", type=FILE, default=STDOUT, help="File to write; - is standard output.")
@backend_options
@options.as_json
@commands.example("jobs outputs 3f2a9c81d04e --out completions.jsonl")
def outputs(job: str, out: str, backend: Backend, as_json: bool) -> int:
    """Write the completions that a job has finished, in the order of its stream, one JSON object per line.

    The lines equal those of `tune --out`. --json prints an object with their number, so it needs --out FILE.
    """
    if as_json and out == STDOUT:
        raise InvalidInput("--json would be mixed with the completions on standard output: use --out FILE")
    with backend.open() as client:
        completions = client.jobs.outputs(job)
    lines = [output_line(event.prompt, event.completion) for event in completions]
    if out == STDOUT:
        for line in lines:
            click.echo(line.encode())  # Bytes, so that the terminal's encoding cannot change them.
        return 0
    write_text(Path(out), "".join(f"{line}\n" for line in lines))
    report = {"schema": "swiftopt.job-outputs/1", "job": job, "out": out, "n_outputs": len(completions)}
    return Result(report, remarks=[f"{len(completions)} completions written to {out}"]).print(as_json)


# --- text for a person


def jobs_table(jobs: Sequence[Job], width: int) -> Table:
    """List jobs with their progress; the worker's column is shown only if `width` has room for it."""
    columns: Columns[Job] = [
        (fixed("id"), lambda job: job.id),
        (fixed("state"), lambda job: Text(JOB_WANTED.get(job.wanted or "", job.state), style=JOB_STYLES[job.state])),
        (folding("model", min_width=6), lambda job: job.model or job.kind),
        (numeric("done"), lambda job: f"{job.n_outputs}/{job.n_prompts}" if job.n_prompts else "–"),
        (folding("plan", min_width=6), lambda job: ", ".join(f"{plan.task} {plan.brief}" for plan in job.plans) or "–"),
        (folding("queue"), lambda job: job.queue or "–"),
        (folding("worker"), lambda job: job.worker or "–"),
        (numeric("tries"), lambda job: str(job.attempt)),
        (fixed("submitted"), lambda job: job.created_at[:16].replace("T", " ")),
    ]
    return listing(jobs, columns, width=width) if width >= ROOMY else listing(jobs, [*columns[:5], columns[-1]])


def job_view(job: Job) -> RenderableType:
    remark = f", to {job.wanted} at its next step" if job.wanted else ""
    figures = job.figures
    table_rows = [
        (f"found for {record.task}", f"version {record.version}, r {record.layer_set.skip_ratio:.2f}")
        for record in job.layer_sets
    ]
    rows = [
        ("state", f"{job.state} (attempt {job.attempt}){remark}"),
        ("error", job.error or ""),
        ("model", job.model or f"none, a {job.kind} job"),
        ("stream", str(job.request.get("stream") or "")),
        ("completions", f"{job.n_outputs} of {job.n_prompts}" if job.n_prompts else ""),
        ("now", f"{figures.task}, {PHASES[figures.phase]}: {progress_words(figures)}" if figures is not None else ""),
        *table_rows,
        *(("plan in use", plan.sentence) for plan in job.plans),
        ("queue", job.queue or "none, it runs in the process that started it"),
        ("worker", job.worker or ""),
        ("submitted", job.created_at),
        ("started", job.started_at or ""),
        ("ended", job.finished_at or ""),
        ("took", duration(job.started_at, job.finished_at)),
        ("fingerprint", job.fingerprint),
    ]
    return Group(heading(f"job {job.id}"), figures_table((name, value) for name, value in rows if value))


def duration(start: str | None, end: str | None) -> str:
    """Return the time from `start` to `end` (None: now) in the usual form: 41 s, 3 min 20 s, 2 h 5 min."""
    begun_s, ended_s = epoch_s(start), time() if end is None else epoch_s(end)
    if begun_s is None or ended_s is None:
        return ""
    seconds = max(0, round(ended_s - begun_s))
    if seconds < 60:
        return f"{seconds} s"
    minutes, hours = seconds // 60, seconds // 3600
    return f"{minutes} min {seconds % 60} s" if minutes < 60 else f"{hours} h {minutes % 60} min"
