"""`swiftopt tune`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..core.events import TaskFinished
from ..core.requests import TuneRequest
from ..core.settings import SwiftSettings
from ..core.streams import STDIN, read_stream
from ..core.types import Sampling
from .checks import check_model, check_words
from .options import (
    db_option,
    from_field,
    json_option,
    machine_options,
    open_store,
    pick,
    positive,
    sampling_options,
    settings_options,
)
from .output import console, emit_json, note


@click.command(short_help="Find the layer set that decodes a stream fastest.")
@click.option("--model", required=True, help="Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases.")
@click.option("--stream", required=True, metavar="FILE", help="Prompts, one JSON object per line; - is standard input.")
@from_field(TuneRequest, "task", "Task of lines that name none.  [default: the file's stem]")
@from_field(TuneRequest, "out", "File for the completions.  [default: in your data folder]", metavar="FILE")
@from_field(TuneRequest, "limit", "Take only the first prompts.", type=positive)
@machine_options(TuneRequest)
@sampling_options
@settings_options
@db_option
@json_option
def tune(db: str | None, as_json: bool, **options: Any) -> None:
    """Find the layer set with which a model decodes a stream of prompts fastest.

    Decodes every prompt on the way, losslessly, and keeps the completions. Ends with the layer set of each task, its
    speed against plain decoding on held-out prompts, and the verdict, all of which go to the database.

    \b
    Example:
      swiftopt tune --model smollm2-135m --stream prompts.jsonl --task notes --max-new-tokens 128
    """
    request = _request(options)
    if _is_rereadable(request.stream):
        read_stream(request.stream, request.task, request.limit)  # a bad line must not cost the loading of torch

    from ..optimizer.strategies import STRATEGIES
    from ..worker.outputs import default_output

    check_words("strategy", [request.settings.strategy], STRATEGIES)
    check_model(request)
    if request.out is None:  # decided here, so that a run cut short can tell where its completions are
        request = replace(request, out=str(default_output(request.stream)))

    from ..worker.run import run_tuning
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
        database = store.url
    commands = [_command(request, task, db) for task in result.tasks]
    _show(request, result.job, str(result.out), database, list(zip(result.tasks, commands, strict=True)), as_json)


def _is_rereadable(stream: str) -> bool:
    """Whether the runner will find the prompts again; a pipe such as <(command) gives them only once."""
    return stream != STDIN and not (Path(stream).is_fifo() or Path(stream).is_char_device())


def _request(options: dict[str, Any]) -> TuneRequest:
    sampling = pick(Sampling, options)
    settings = pick(SwiftSettings, options)
    request: TuneRequest = pick(TuneRequest, {**options, "sampling": sampling, "settings": settings})
    return request


def _command(request: TuneRequest, task: TaskFinished, db: str | None) -> list[str]:
    """The command line that decodes with what was found; presets apply to it as they did to this one."""
    command = ["swiftopt", "generate", "--model", request.model, "--task", task.task]
    context = click.get_current_context()
    for name, value in (("dtype", request.dtype), ("device", request.device), ("db", db)):
        if value and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            command += [f"--{name}", value]
    return [*command, "--prompt", "Write your prompt here"]


def _show(
    request: TuneRequest, job: str, out: str, database: str, tasks: list[tuple[TaskFinished, list[str]]], as_json: bool
) -> None:
    from .payloads import task_json, tune_json
    from .render import tune_summary

    if as_json:
        emit_json(tune_json(request.model, job, out, database, [task_json(*task) for task in tasks]))
        return
    to = console()
    for task, command in tasks:
        to.print(tune_summary(task, out, command, to.width), crop=False)  # a path that is cut is of no use
