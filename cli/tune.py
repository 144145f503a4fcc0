"""`swiftopt tune`: here, or through a queue of workers."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
from click.core import ParameterSource

from ..core.errors import InvalidInput, JobCancelled, JobFailed
from ..core.events import TaskFinished
from ..core.requests import TuneRequest
from ..core.settings import SwiftSettings
from ..core.streams import STDIN, read_stream
from ..core.types import Prompt, Sampling
from ..core.urls import safe_url
from .checks import check_model, check_words
from .options import (
    db_option,
    default_of,
    from_field,
    json_option,
    machine_options,
    open_store,
    pick,
    positive,
    queue_option,
    redis_option,
    sampling_options,
    server_option,
    settings_options,
    speed_option,
)
from .output import console, emit_json, note
from .place import Board, Place, chosen, command, opened, quoted, waits

INTERRUPTED = 130


@click.command(short_help="Find the layer set that decodes a stream fastest.")
@click.option("--model", required=True, help="Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases.")
@click.option("--stream", required=True, metavar="FILE", help="Prompts, one JSON object per line; - is standard input.")
@from_field(TuneRequest, "task", "Task of lines that name none.  [default: the file's stem]")
@from_field(TuneRequest, "out", "File for the completions.  [default: in your data folder]", metavar="FILE")
@from_field(TuneRequest, "limit", "Take only the first prompts.", type=positive)
@from_field(TuneRequest, "concurrency", "How many prompts are decoded at once.", type=positive)
@machine_options(TuneRequest)
@speed_option(TuneRequest)
@sampling_options
@settings_options
@redis_option
@server_option
@queue_option
@click.option("--detach", is_flag=True, help="Submit the job and return at once.")
@click.option("--local", is_flag=True, help="Run in this process, although a Redis or server is configured.")
@db_option
@json_option
@click.pass_context
def tune(context: click.Context, /, as_json: bool, **options: Any) -> None:
    """Find the layer set with which a model decodes a stream of prompts fastest.

    Decodes every prompt on the way, losslessly, and keeps the completions. Ends with the layer set of each task, its
    speed against plain decoding on held-out prompts, and the verdict, all of which go to the database.

    Runs in this process, unless a Redis or a server is named: then the job is submitted to a queue and followed, and
    Ctrl-C leaves it running.

    \b
    Example:
      swiftopt tune --model smollm2-135m --stream prompts.jsonl --task notes --max-new-tokens 128
      swiftopt tune --model smollm2-135m --stream prompts.jsonl --redis redis://127.0.0.1:6379 --detach
    """
    request = _request(options)
    place = Place() if options["local"] else chosen(Place(options["server"], options["redis"], options["db"]))
    queued = bool(place.server or place.redis)
    if options["detach"] and not queued:
        raise InvalidInput("--detach needs workers to leave the job to: name their --redis or --server, not --local")
    if options["detach"] and request.out is not None:
        raise InvalidInput("--detach writes no file: leave out --out, and fetch it later with `swiftopt jobs outputs`")
    prompts = []
    if queued or _is_rereadable(request.stream):
        # a bad line must not cost the loading of torch
        prompts = read_stream(request.stream, request.task, request.limit)

    from ..optimizer.strategies import STRATEGIES

    check_words("strategy", [request.settings.strategy], STRATEGIES)
    if queued:
        context.exit(_through_queue(request, prompts, place, options["queue"], options["detach"], as_json))
    _here(request, options["db"], as_json)


def _here(request: TuneRequest, db: str | None, as_json: bool) -> None:
    from ..tasks.outputs import default_output

    check_model(request)
    if request.out is None:  # decided here, so that a run cut short can tell where its completions are
        request = replace(request, out=str(default_output(request.stream)))

    from ..tasks.run import run_tuning
    from .live import TuneProgress

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
    options = _given(dtype=request.dtype, device=request.device, speed=request.speed, db=db and safe_url(db))
    commands = [_generate(request, task, options) for task in result.tasks]
    show_tuned(request.model, result.job, str(result.out), database, result.tasks, commands, as_json)


def _through_queue(
    request: TuneRequest, prompts: Sequence[Prompt], place: Place, queue: str, detach: bool, as_json: bool
) -> int:
    """Submit, and unless told otherwise follow to the end; the exit code."""
    from ..tasks.outputs import CompletionWriter, default_output
    from .follow import Detached, follow, tell_detached, tell_outputs, write_outputs
    from .live import TuneProgress

    out = Path(request.out) if request.out is not None else default_output(request.stream)
    if request.out is not None:
        with CompletionWriter(out):  # a file that cannot be written is told before the job begins
            pass
    if not _only_there(request.model):
        check_model(request)
    sent = replace(request, model=_everywhere(request.model), out=None)
    with opened(place) as board:
        job, is_new = board.jobs.submit(sent, prompts, queue, uuid.uuid4().hex)
        if detach:
            _tell_submitted(board, place, job.id, is_new, as_json)
            return 0
        if not is_new:
            note(f"job {job.id} already does the same: following it")
        if place.server and (reason := waits(board, job)):  # a queue of ours is asked while following
            note(f"note: {reason}")
        try:
            ended = follow(board, job, TuneProgress(console(stderr=True)))
        except Detached:
            tell_detached(place, job.id)
            return INTERRUPTED
        except (JobFailed, JobCancelled):
            tell_outputs(place, board.jobs.get(job.id))
            raise
        write_outputs(board, job.id, out)
        commands = [use_command(sent, task, place) for task in ended.tasks]
        show_tuned(sent.model, job.id, str(out), board.database, ended.tasks, commands, as_json)
    return 0


def _tell_submitted(board: Board, place: Place, job: str, is_new: bool, as_json: bool) -> None:
    from .payloads import submitted_json

    found = board.jobs.get(job)
    if as_json:
        emit_json(submitted_json(found, is_new))
    else:
        known = "" if is_new else ", which already does the same"
        click.echo(f"job {job}{known}: watch it with {quoted(command(place, 'jobs', 'watch', job))}")
    if reason := waits(board, found):
        note(f"note: {reason}")


def _is_rereadable(stream: str) -> bool:
    """Whether the runner will find the prompts again; a pipe such as <(command) gives them only once."""
    return stream != STDIN and not (Path(stream).is_fifo() or Path(stream).is_char_device())


def _only_there(model: str) -> bool:
    """Whether the model may be a folder or file that workers have and this machine does not."""
    return os.path.isabs(model) and not os.path.exists(model)


def _everywhere(model: str) -> str:
    """The model's name as a worker with another working folder finds it."""
    return os.path.abspath(os.path.expanduser(model)) if os.path.exists(os.path.expanduser(model)) else model


def _request(options: dict[str, Any]) -> TuneRequest:
    sampling = pick(Sampling, options)
    settings = pick(SwiftSettings, options)
    request: TuneRequest = pick(TuneRequest, {**options, "sampling": sampling, "settings": settings})
    return request


def _generate(request: TuneRequest, task: TaskFinished, options: Mapping[str, str | None]) -> list[str]:
    """The command line that decodes with what was found."""
    words = ["swiftopt", "generate", "--model", request.model, "--task", task.task]
    for name, value in options.items():
        words += [f"--{name}", value] if value else []
    return [*words, "--prompt", "Write your prompt here"]


def _given(**values: str | None) -> dict[str, str | None]:
    """Those options that stand on the command line; presets apply to another command as they did to this one."""
    context = click.get_current_context()
    return {n: v for n, v in values.items() if context.get_parameter_source(n) is ParameterSource.COMMANDLINE}


def use_command(request: TuneRequest, task: TaskFinished, place: Place) -> list[str]:
    """How to use what a job has found; a server's layer sets are not here, so there the command asks for one."""
    if place.server is None:
        values = {"dtype": request.dtype, "device": request.device, "speed": request.speed}
        named = {name: value for name, value in values.items() if value != default_of(TuneRequest, name)}
        return _generate(request, task, {**named, **_given(db=place.db and safe_url(place.db))})
    names = (quote(name, safe="") for name in (task.record.model, task.task))
    return ["curl", f"{safe_url(place.server).rstrip('/')}/v1/layer-sets/{'/'.join(names)}"]


def show_tuned(
    model: str,
    job: str,
    out: str | None,
    database: str,
    tasks: Sequence[TaskFinished],
    commands: Sequence[Sequence[str]],
    as_json: bool,
) -> None:
    """The result, in the same words and the same object wherever it was found."""
    from .payloads import task_json, tune_json
    from .render import tune_summary

    if as_json:
        found = [task_json(task, words) for task, words in zip(tasks, commands, strict=True)]
        emit_json(tune_json(model, job, out, database, found))
        return
    to = console()
    for task, words in zip(tasks, commands, strict=True):
        to.print(tune_summary(task, out or "–", words, to.width), crop=False)  # a path that is cut is of no use
