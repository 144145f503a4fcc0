"""What `heads` and `probe` have in common: how training is asked for and told, and what is done with the results."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from ..core.errors import InvalidInput
from ..core.learned import LearnedKind, LearnedRecord, learned_to_json
from ..core.requests import TuneRequest
from ..core.streams import read_stream
from ..core.types import Prompt
from ..core.urls import safe_url
from ..training.settings import HeadSettings, ProbeSettings, TrainingStep
from .options import (
    Decorator,
    ModelTask,
    db_option,
    from_field,
    json_option,
    machine_options,
    model_task_argument,
    open_store,
    positive,
    together,
)
from .output import console, emit_json, note, note_load, show, writing

MIXED = "mixed"
NEWS_S = 5.0  # seconds between two lines of progress


def training_options(settings: type[HeadSettings] | type[ProbeSettings]) -> Decorator[Any]:
    """Options of both `train` commands, with the defaults of `settings`."""
    return together(
        click.option(
            "--model", required=True, help="Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases."
        ),
        click.option(
            "--stream",
            "streams",
            required=True,
            multiple=True,
            metavar="FILE",
            help="Prompts, one JSON object per line; - is standard input; may be repeated.",
        ),
        click.option("--task", help="What to store it under.  [default: the prompts' own task, or mixed]"),
        click.option("--limit", type=positive, help="Take only the first prompts of each stream."),
        from_field(settings, "epochs", "Passes over all positions.", type=int),
        from_field(settings, "minutes", "End training after so long; completing the prompts is extra.", type=float),
        from_field(settings, "learning_rate", "Adam's, at its highest.", type=float),
        from_field(settings, "seed", "Seed of the order and of every draw.", type=int),
        machine_options(TuneRequest),
        click.option("--png", metavar="FILE", help="Draw the loss curve to a file."),
        db_option,
        json_option,
    )


def run_training(kind: LearnedKind, settings: HeadSettings | ProbeSettings, options: dict[str, Any]) -> None:
    """Train, store, and show what came of it."""
    prompts = [p for path in options["streams"] for p in read_stream(path, options["task"], options["limit"])]
    task = options["task"] or _task_of(prompts)
    if "/" in task:
        raise InvalidInput(f"the task {task!r} holds a '/', which parts model from task: use another character")

    from ..models.sources import check_names

    check_names(options["model"], options["dtype"], options["device"])

    from ..tasks.train import TrainRequest, train

    request = TrainRequest(options["model"], task, settings, options["dtype"], options["device"])
    with open_store(options["db"]) as store:
        record = train(request, prompts, store, Teller(), note_load)
        database = safe_url(store.url)
    _draw(record, options["png"])
    if options["as_json"]:
        trained = {kind: learned_to_json(record), "database": database, "png": options["png"]}
        emit_json({"schema": f"swiftopt.{kind}-train/1", **trained})
    else:
        _show(record)


def _task_of(prompts: list[Prompt]) -> str:
    tasks = {prompt.task for prompt in prompts}
    return tasks.pop() if len(tasks) == 1 else MIXED


class Teller:
    """Says on stderr how training goes: remarks at once, progress every few seconds."""

    def __init__(self) -> None:
        self._told_at = 0.0
        self._phase = ""

    def __call__(self, step: TrainingStep) -> None:
        """Take note of a step."""
        now = time.monotonic()
        if step.note:
            note(step.note)
        elif step.phase != self._phase or step.done == step.total or now - self._told_at > NEWS_S:
            self._phase, self._told_at = step.phase, now
            note(_words(step))


def _words(step: TrainingStep) -> str:
    match step.phase:
        case "collect":
            return f"collect: {step.done} of {step.total} prompts"
        case "train":
            return f"train: step {step.done} of {step.total}, loss {step.loss or 0:.3f}"
        case _:
            return "measure: on the held-out prompts"


def _draw(record: LearnedRecord, png: str | None) -> None:
    if png is not None:
        from .curve_figure import draw_curve

        draw_curve(record, Path(png))
        note(f"drawn to {png}")


def _show(record: LearnedRecord) -> None:
    from .learned_view import figures_table

    show(figures_table(record))


version_option = click.option("--version", type=positive, help="A version.  [default: the newest]")


def stored_commands(group: click.Group, kind: LearnedKind) -> None:
    """Give the group its `list`, `show` and `export`."""
    for make in (_list_command, _show_command, _export_command):
        group.add_command(make(kind))


def _list_command(kind: LearnedKind) -> click.Command:
    @click.command("list", short_help=f"List the stored {kind}.", help=_help(kind, "list", f"List the stored {kind}"))
    @click.option("--model", "of_model", help="Only this model's.")
    @click.option("--task", "of_task", help="Only this task's.")
    @db_option
    @json_option
    def list_(of_model: str | None, of_task: str | None, db: str | None, as_json: bool) -> None:
        from .learned_view import learned_table

        with open_store(db) as store:
            records = store.learned_list(of_model, of_task, kind)
        if as_json:
            emit_json({"schema": f"swiftopt.{kind}-list/1", kind: [learned_to_json(record) for record in records]})
        elif records:
            show(learned_table(records, console().width))
        else:
            note(f"no {kind} stored yet: run `swiftopt {kind} train --model M --stream FILE --task T`")

    return list_


def _show_command(kind: LearnedKind) -> click.Command:
    words = f"Show the figures of stored {kind}, and the curve of the loss"

    @click.command("show", short_help=f"Show the figures of stored {kind}.", help=_help(kind, "show", words))
    @model_task_argument
    @version_option
    @click.option("--png", metavar="FILE", help="Draw the loss curve to a file as well.")
    @db_option
    @json_option
    def show_(name: ModelTask, version: int | None, png: str | None, db: str | None, as_json: bool) -> None:
        with open_store(db) as store:
            record = store.learned(name.model, name.task, kind, version)
        _draw(record, png)
        if as_json:
            emit_json({**learned_to_json(record), "curve": [list(point) for point in record.curve], "png": png})
        else:
            _show(record)

    return show_


def _export_command(kind: LearnedKind) -> click.Command:
    words = f"Write stored {kind} to a safetensors file"

    @click.command("export", short_help=f"Write stored {kind} to a file.", help=_help(kind, "export", words))
    @model_task_argument
    @version_option
    @click.option("-o", "--out", required=True, metavar="FILE", help="Where to write them.")
    @db_option
    @json_option
    def export(name: ModelTask, version: int | None, out: str, db: str | None, as_json: bool) -> None:
        with open_store(db) as store:
            record = store.learned(name.model, name.task, kind, version)
            data = store.weights(record)
        with writing(Path(out)):
            Path(out).write_bytes(data)
        if as_json:
            emit_json({"schema": f"swiftopt.{kind}-export/1", kind: learned_to_json(record), "out": out})
        else:
            note(f"{len(data)} bytes written to {out}")

    return export


def _help(kind: str, command: str, words: str) -> str:
    more = {"list": "", "show": " smollm2-135m/code", "export": f" smollm2-135m/code -o {kind}.safetensors"}[command]
    order = {"list": ", newest first.", "show": ".", "export": ", which names the model that it was trained on."}
    return f"{words}{order[command]}\n\n\b\nExample:\n  swiftopt {kind} {command}{more}"
