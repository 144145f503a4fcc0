"""`swiftopt tune`: here, or through a queue of workers."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from ..core.errors import InvalidInput, safe_url
from ..core.events import TaskFinished
from ..core.requests import TuneRequest
from ..core.settings import TuningSettings
from ..core.streams import STDIN, LineWriter, default_output, read_stream
from ..core.types import Prompt, Sampling, seconds_by_part
from ..optimizer.strategies import STRATEGIES
from . import options
from .backend import Backend, JobClient, on_command_line, result_of
from .options import check_model, check_words, default_of, open_store, pick, positive
from .output import answer, console, note
from .progress import TuneProgress
from .render import tune_summary


@click.command(short_help="Find the layer set that decodes a stream fastest.")
@options.model
@options.stream
@options.from_field(TuneRequest, "task", "Task of lines that name none.  [default: the file's stem]")
@options.from_field(TuneRequest, "out", "File for the completions.  [default: in your data folder]", metavar="FILE")
@options.from_field(TuneRequest, "limit", "Take only the first prompts.", type=positive)
@options.from_field(TuneRequest, "concurrency", "How many prompts are decoded at once.", type=positive)
@options.machine(TuneRequest)
@options.speed(TuneRequest)
@options.sampling
@options.settings
@options.redis
@options.server
@options.queue
@click.option("--detach", is_flag=True, help="Submit the job and return at once.")
@click.option("--local", is_flag=True, help="Run in this process, although a Redis or server is configured.")
@options.db
@options.json
@options.example(
    "tune --model smollm2-135m --stream prompts.jsonl --task notes --max-new-tokens 128",
    "tune --model smollm2-135m --stream prompts.jsonl --redis redis://127.0.0.1:6379 --detach",
)
def tune(as_json: bool, **values: Any) -> None:
    """Find the layer set with which a model decodes a stream of prompts fastest.

    Decodes every prompt on the way, losslessly, and keeps the completions. Ends with the layer set of each task, its
    speed against plain decoding on held-out prompts, and the verdict, all of which go to the database.

    Runs in this process, unless a Redis or a server is named: then the job is submitted to a queue and followed, and
    Ctrl-C leaves it running.
    """
    request = pick(
        TuneRequest, {**values, "sampling": pick(Sampling, values), "settings": pick(TuningSettings, values)}
    )
    backend = Backend() if values["local"] else Backend.chosen(values["server"], values["redis"], values["db"])
    queued = bool(backend.server or backend.redis)
    if values["detach"] and not queued:
        raise InvalidInput("--detach needs workers to leave the job to: name their --redis or --server, not --local")
    if values["detach"] and request.out is not None:
        raise InvalidInput("--detach writes no file: leave out --out, and fetch it later with `swiftopt jobs outputs`")
    prompts = []
    if queued or _is_rereadable(request.stream):
        # a bad line must not cost the loading of torch
        prompts = read_stream(request.stream, request.task, request.limit)

    check_words("strategy", [request.settings.strategy], STRATEGIES)
    if queued:
        _tune_through_queue(request, prompts, backend, values["queue"], values["detach"], as_json)
    else:
        _tune_here(request, values["db"], as_json)


def _tune_here(request: TuneRequest, db: str | None, as_json: bool) -> None:
    """Tune in this process."""
    check_model(request)
    if request.out is None:  # decided here, so that a run cut short can tell where its completions are
        request = replace(request, out=str(default_output(request.stream)))

    from ..tasks.tune import run_tuning

    with open_store(db) as store:
        progress = TuneProgress(console(stderr=True))
        try:
            with progress:
                result = run_tuning(request, store, progress)
        except BaseException:
            if progress.n_finished:
                note(f"{progress.n_finished} completions are in {request.out}")
            raise
        database = safe_url(store.url)
    # presets apply to the command that is printed as they did to this one
    given = [name for name in ("dtype", "device", "speed") if on_command_line(name)]
    commands = [_generate_command(request, task, given, db) for task in result.tasks]
    show_tuned(request.model, result.job, str(result.out), database, result.tasks, commands, as_json)


def _tune_through_queue(
    request: TuneRequest, prompts: Sequence[Prompt], backend: Backend, queue: str, detach: bool, as_json: bool
) -> None:
    """Submit the job, and follow it to its end unless it is to be left alone."""
    out = Path(request.out) if request.out is not None else default_output(request.stream)
    if request.out is not None:
        with LineWriter(out):  # a file that cannot be written is reported before the job begins
            pass
    if not _may_be_on_workers_only(request.model):
        check_model(request)
    sent = replace(request, model=_absolute_name(request.model), out=None)
    with backend.open() as client:
        job, is_new = client.jobs.submit(sent, prompts, queue, uuid.uuid4().hex)
        if detach:
            _show_submitted(client, backend, job.id, is_new, as_json)
            return
        if not is_new:
            note(f"job {job.id} already does the same: following it")
        if backend.server and (reason := client.why_waiting(job)):  # a queue of ours is asked while following
            note(f"note: {reason}")
        ended = result_of(backend, client, job)
        completions = client.jobs.outputs(job.id)
        with LineWriter(out) as writer:
            for event in completions:
                writer.write_completion(event.prompt, event.completion)
        commands = [use_command(sent, task, backend) for task in ended.tasks]
        show_tuned(sent.model, job.id, str(out), client.database, ended.tasks, commands, as_json)


def _show_submitted(client: JobClient, backend: Backend, job_id: str, is_new: bool, as_json: bool) -> None:
    """Print a job that nobody follows; `is_new` is false where an unfinished job already does the same."""
    job = client.jobs.get(job_id)
    known = "" if is_new else ", which already does the same"
    text = f"job {job_id}{known}: watch it with {backend.command('jobs', 'watch', job_id)}"
    value = {"schema": "swiftopt.submitted/1", "job": job_id, "state": job.state, "new": is_new}
    answer(as_json, value, lambda: click.echo(text))
    if reason := client.why_waiting(job):
        note(f"note: {reason}")


def _is_rereadable(stream: str) -> bool:
    """Return whether the prompts can be read again; a pipe such as <(command) gives them only once."""
    return stream != STDIN and not (Path(stream).is_fifo() or Path(stream).is_char_device())


def _may_be_on_workers_only(model: str) -> bool:
    """Return whether the model is a path that this machine does not have, but workers may."""
    return os.path.isabs(model) and not os.path.exists(model)


def _absolute_name(model: str) -> str:
    """Return the model's name as a worker with another working folder finds it."""
    return os.path.abspath(os.path.expanduser(model)) if os.path.exists(os.path.expanduser(model)) else model


def _generate_command(request: TuneRequest, task: TaskFinished, names: Sequence[str], db: str | None) -> list[str]:
    """Return the command line that decodes with what was found; `names` are the options that it repeats."""
    words = ["swiftopt", "generate", "--model", request.model, "--task", task.task]
    for name in names:
        words += [f"--{name}", getattr(request, name)]
    if db and on_command_line("db"):
        words += ["--db", safe_url(db)]
    return [*words, "--prompt", "Write your prompt here"]


def use_command(request: TuneRequest, task: TaskFinished, backend: Backend) -> list[str]:
    """Return the command line that uses what a job has found; a server's layer sets are asked for with curl."""
    if backend.server is None:
        changed = [n for n in ("dtype", "device", "speed") if getattr(request, n) != default_of(TuneRequest, n)]
        return _generate_command(request, task, changed, backend.db)
    names = (quote(name, safe="") for name in (task.record.model, task.task))
    return ["curl", f"{safe_url(backend.server).rstrip('/')}/v1/layer-sets/{'/'.join(names)}"]


def show_tuned(
    model: str,
    job: str,
    out: str | None,
    database: str,
    tasks: Sequence[TaskFinished],
    commands: Sequence[Sequence[str]],
    as_json: bool,
) -> None:
    """Print the result of a tuning run; `out` is where its completions are, if there is such a file."""

    def show_text() -> None:
        to = console()
        for task, words in zip(tasks, commands, strict=True):
            to.print(tune_summary(task, out or "–", words, to.width), crop=False)  # a cut path is of no use

    found = [task_json(task, words) for task, words in zip(tasks, commands, strict=True)]
    answer(as_json, tune_json(model, job, out, database, found), show_text)


def tune_json(model: str, job: str, out: str | None, database: str, tasks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON object of a tuning run."""
    values = {"model": model, "job": job, "out": out, "database": database, "tasks": list(tasks)}
    return {"schema": "swiftopt.tune/1", **values}


def task_json(finished: TaskFinished, command: Sequence[str]) -> dict[str, Any]:
    """Return one task of a tuning run; its trials are in the store, under the run's job."""
    return {
        "task": finished.task,
        "layer_set": finished.record.to_json(),
        "verdict": finished.verdict.to_json(),
        "stopped_because": finished.stopped_because,
        "n_trials": len(finished.trials),
        "n_prompts": finished.n_prompts,
        "n_tokens": finished.n_tokens,
        "draft_cost": finished.draft_cost,
        "plain_tok_s": finished.plain_tok_s,
        "tuned_tok_s": finished.tuned_tok_s,
        "timings": seconds_by_part(finished.timings),
        "command": list(command),
    }
