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
from .output import Result, console, note
from .progress import TuneProgress
from .render import tune_summary


@click.command(short_help="Find the layer set that decodes a stream fastest.")
@options.model
@options.stream
@options.from_field(TuneRequest, "task", "Task of lines that name none.  [default: the file's stem]")
@options.from_field(TuneRequest, "out", "File for the completions.  [default: in your data folder]", metavar="FILE")
@options.from_field(TuneRequest, "limit", "Take only the first prompts.", type=positive)
@options.from_field(TuneRequest, "concurrency", "How many prompts are decoded at once.", type=positive)
@options.machine(TuneRequest, "max_new_tokens", "speed")
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
def tune(**values: Any) -> Result:
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
    file = Path(request.stream)
    read_twice = request.stream != STDIN and not (file.is_fifo() or file.is_char_device())  # <(command) gives text once
    if queued or read_twice:  # a bad line must not cost the loading of torch
        prompts = read_stream(request.stream, request.task, request.limit)
    check_words("strategy", [request.settings.strategy], STRATEGIES)
    if queued:
        return _tune_through_queue(request, prompts, backend, values["queue"], values["detach"])
    return _tune_here(request, values["db"])


def _tune_here(request: TuneRequest, db: str | None) -> Result:
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
    return tune_result(request, result.job, result.tasks, database, Backend(db=db), given, str(result.out))


def _tune_through_queue(
    request: TuneRequest, prompts: Sequence[Prompt], backend: Backend, queue: str, detach: bool
) -> Result:
    """Submit the job, and follow it to its end unless it is to be left alone."""
    out = Path(request.out) if request.out is not None else default_output(request.stream)
    if request.out is not None:
        with LineWriter(out):  # a file that cannot be written is reported before the job begins
            pass
    if not os.path.isabs(request.model) or os.path.exists(request.model):  # else it may be on the workers only
        check_model(request)
    path = os.path.expanduser(request.model)
    name = os.path.abspath(path) if os.path.exists(path) else request.model  # for workers with other working folders
    sent = replace(request, model=name, out=None)
    with backend.open() as client:
        job, is_new = client.jobs.submit(sent, prompts, queue, uuid.uuid4().hex)
        if detach:
            return _submitted(client, backend, job.id, is_new)
        if not is_new:
            note(f"job {job.id} already does the same: following it")
        if backend.server and (reason := client.why_waiting(job)):  # a queue of ours is asked while following
            note(f"note: {reason}")
        ended = result_of(backend, client, job)
        completions = client.jobs.outputs(job.id)
        with LineWriter(out) as writer:
            for event in completions:
                writer.write_completion(event.prompt, event.completion)
        return tune_result(sent, job.id, ended.tasks, client.database, backend, changed(sent), str(out))


def _submitted(client: JobClient, backend: Backend, job_id: str, is_new: bool) -> Result:
    """Return what became of a job that nobody follows; `is_new` is false where an unfinished one does the same."""
    job = client.jobs.get(job_id)
    if reason := client.why_waiting(job):
        note(f"note: {reason}")
    known = "" if is_new else ", which already does the same"
    value = {"schema": "swiftopt.submitted/1", "job": job_id, "state": job.state, "new": is_new}
    return Result(value, [f"job {job_id}{known}: watch it with {backend.command('jobs', 'watch', job_id)}"])


def changed(request: TuneRequest) -> list[str]:
    """Return the options for where and how the model runs that are not at their defaults."""
    return [name for name in ("dtype", "device", "speed") if getattr(request, name) != default_of(TuneRequest, name)]


def tune_result(
    request: TuneRequest,
    job: str,
    tasks: Sequence[TaskFinished],
    database: str,
    backend: Backend,
    repeated: Sequence[str],
    out: str | None,
    fetch: str = "–",
) -> Result:
    """Return the result of a tuning run: what it found for each task, and the command line that uses it.

    `repeated` are the options that these command lines repeat. `out` is the file of the completions; where there is
    none, `fetch` says how to get them.
    """
    found, shown = [], []
    for task in tasks:
        command = _use(request, task, backend, repeated)
        shown.append(tune_summary(task, out or fetch, command, console().width))
        values = task.to_json()
        del values["record"], values["trials"]  # the trials are in the store, under the job
        layer_set, timings = task.record.to_json(), seconds_by_part(task.timings)
        more = {"layer_set": layer_set, "n_trials": len(task.trials), "timings": timings, "command": command}
        found.append({**values, **more})
    value = {"model": request.model, "job": job, "out": out, "database": database, "tasks": found}
    return Result({"schema": "swiftopt.tune/1", **value}, shown)


def _use(request: TuneRequest, task: TaskFinished, backend: Backend, repeated: Sequence[str]) -> list[str]:
    """Return the command line that decodes with what was found; a server's layer sets are asked for with curl."""
    if backend.server is not None:
        place = "/".join(quote(name, safe="") for name in (task.record.model, task.task))
        return ["curl", f"{safe_url(backend.server).rstrip('/')}/v1/layer-sets/{place}"]
    words = ["swiftopt", "generate", "--model", request.model, "--task", task.task]
    for name in repeated:
        words += [f"--{name}", getattr(request, name)]
    if backend.db and on_command_line("db"):
        words += ["--db", safe_url(backend.db)]
    return [*words, "--prompt", "Write your prompt here"]
