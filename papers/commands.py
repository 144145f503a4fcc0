"""Commands of the papers: train, list, show and export heads and probes; `layers search`; presets of `tune`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..cli.compare import comparison
from ..core.errors import InvalidInput, SettingsError, safe_url
from ..core.records import LearnedKind, LearnedRecord
from ..core.requests import BASE, CompareRequest, GenerateRequest, ModelRequest, TuneRequest
from ..core.settings import preset_of
from ..core.streams import read_stream
from ..core.types import Prompt, Sampling
from ..terminal import commands, options, value_types
from ..terminal.charts import BLUE, Pictures, model_name, picture
from ..terminal.commands import Decorator, from_field, option
from ..terminal.inputs import decoding_request, open_store, pick
from ..terminal.output import Result, StepNotes, console, listing_result, note, writing
from ..terminal.render import (
    ROOMY,
    Columns,
    fixed,
    folding,
    layer_map,
    listing,
    number,
    numbers,
    percent,
    sparkline,
    table,
)
from ..terminal.value_types import ModelTask, positive
from .training.settings import MIXED_TASK, HeadSettings, ProbeSettings, TrainingStep

if TYPE_CHECKING:
    from ..store import Store

PRINT_INTERVAL_S = 5.0  # Minimum seconds between two progress lines.
# Confidence thresholds shown in the table; --json reports all.
SHOWN_THRESHOLDS = ("0.5", "0.6", "0.75", "0.85", "0.95")
CURVE_COLUMNS = 60  # Width of the loss curve, in characters.
LOSSES = {"heads": "KL to the last layer, nats", "probe": "binary cross-entropy, nats"}


@click.group(cls=commands.ConfiguredGroup, short_help="Train heads that predict tokens early.")
@commands.example("heads train --model smollm2-135m --stream prompts.jsonl --task code", "heads list")
def heads() -> None:
    """Light heads at intermediate layers, with which `adadecode` and `paradecode` predict tokens."""


@click.group(cls=commands.ConfiguredGroup, short_help="Train a probe that predicts acceptance.")
@commands.example("probe train --model smollm2-135m --stream prompts.jsonl --task code", "probe list")
def probe() -> None:
    """A linear probe at an early exit, with which `adaspeed-probe` decides when to stop drafting."""


# --- commands: train heads and probes


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise SettingsError(f"layers {text!r} is not a list of numbers: use for example 8,15,22") from error


TRAINING = "Training"  # Heading of the training options in --help.


def training_options(settings: type[HeadSettings] | type[ProbeSettings]) -> Decorator[Any]:
    """Return the options shared by both `train` commands, with defaults from `settings`."""
    field = partial(from_field, TRAINING, settings)
    return commands.together(
        options.model,
        click.option(
            "--stream",
            "streams",
            required=True,
            multiple=True,
            type=value_types.FILE,
            help="Prompts, one JSON object per line; - is standard input; may be repeated.",
        ),
        options.task("result", "Task to store the result under.  [default: the prompts' task; mixed if several]"),
        option(commands.PROMPTS, "--limit", type=positive, help="Use only the first prompts of each stream."),
        field("epochs", "Passes over all positions."),
        field("minutes", "Time limit of the training, without the completion of the prompts."),
        field("learning_rate", "Adam's highest learning rate."),
        field("seed", "Seed of the order of prompts and positions, and of sampling."),
        options.machine(TuneRequest, "max_new_tokens"),
        options.pictures("Draw the loss curve to a file."),
        options.db_and_json,
    )


@heads.command("train", short_help="Train heads on a model's own completions.")
@training_options(HeadSettings)
@from_field(
    TRAINING,
    HeadSettings,
    "layers",
    "Layers run before each head.  [default: 0.6, 0.73 and 0.87 of the depth]",
    type=value_types.Parsed("N,N,…", _layers),
)
@option(TRAINING, "--full", is_flag=True, help="Train full heads instead of transforms in front of the model's head.")
@commands.example("heads train --model smollm2-135m --stream prompts.jsonl --task code --minutes 10")
def train_heads(pictures: Pictures, **values: Any) -> Result:
    """Train heads that predict the last layer's token after some layers, on the model's own greedy completions.

    The model itself does not change. A tenth of the prompts is held out for the figures. Several --stream give one set
    of heads for all, stored under the task `mixed`. After an interruption, the same command continues. The paper trains
    for 100 epochs; use --epochs 100 if you have the time.
    """
    return _train_and_print("heads", pick(HeadSettings, values), pictures, values)


@probe.command("train", short_help="Train a probe on a model's own completions.")
@training_options(ProbeSettings)
@from_field(TRAINING, ProbeSettings, "layer", "Layers run before the exit.  [default: a quarter of the depth]")
@from_field(TRAINING, ProbeSettings, "sampling", "How the exit's token is chosen and accepted: greedily, or by top-p.")
@commands.example("probe train --model smollm2-135m --stream prompts.jsonl --task code --sampling top-p")
def train_probe(pictures: Pictures, **values: Any) -> Result:
    """Train a probe that predicts from an early state whether the token read there will be accepted.

    A tenth of the prompts is held out for the figures. After an interruption, the same command continues.
    """
    return _train_and_print("probe", pick(ProbeSettings, values), pictures, values)


def _train_and_print(
    kind: LearnedKind, settings: HeadSettings | ProbeSettings, pictures: Pictures, values: dict[str, Any]
) -> Result:
    prompts = [
        prompt for stream in values["streams"] for prompt in read_stream(stream, values["task"], values["limit"])
    ]
    options.note_tasks(prompts)
    tasks = {prompt.task for prompt in prompts}
    task = values["task"] or (tasks.pop() if len(tasks) == 1 else MIXED_TASK)
    if "/" in task:
        raise InvalidInput(f"the task {task!r} contains a '/', which separates model and task: use another character")

    from ..models.sources import check_names

    check_names(values["model"], values["dtype"], values["device"])

    request = ModelRequest(values["model"], task=task, dtype=values["dtype"], device=values["device"])
    with open_store(values["db"]) as store:
        from .parts import train_and_store

        record = train_and_store(request, settings, prompts, store, StepPrinter(), StepNotes("load: "))
        database = safe_url(store.url)
    pictures.draw(draw_loss, record)
    output = {kind: record.to_json(), "database": database, **pictures.to_json()}
    return Result({"schema": f"swiftopt.{kind}-train/1", **output}, [trained_view(record)])


class StepPrinter:
    """Prints training progress to stderr: remarks at once, progress at most every `PRINT_INTERVAL_S` seconds."""

    def __init__(self) -> None:
        self._printed_at_s = 0.0
        self._phase = ""

    def __call__(self, step: TrainingStep) -> None:
        now = time.monotonic()
        if step.note:
            note(step.note)
        elif step.phase != self._phase or step.done == step.total or now - self._printed_at_s > PRINT_INTERVAL_S:
            self._phase, self._printed_at_s = step.phase, now
            messages = {
                "collect": f"collect: {step.done} of {step.total} prompts",
                "train": f"train: step {step.done} of {step.total}, loss {step.loss or 0:.3f}",
            }
            note(messages.get(step.phase, "measure: on the held-out prompts"))


# --- commands: `layers search` and presets of `tune`


@commands.command(short_help="Search a layer set offline, as Self-SD does.")
@options.model_and_stream
@options.task("result", "Task to store the set under.  [default: the first prompt's own]")
@commands.option(
    commands.PROMPTS, "--limit", type=positive, default=4, help="Number of prompts that each candidate decodes."
)
@commands.option(commands.SEARCH, "--max-steps", type=positive, default=200, help="Maximum number of candidates.")
@commands.option(
    commands.SEARCH,
    "--minutes",
    type=value_types.FloatRange(min=0, min_open=True),
    help="Start no candidate after this time.",
)
@options.form
@options.machine(GenerateRequest, "max_new_tokens")
@options.shared(Sampling, "seed")
@options.db_and_json
@commands.example(
    "layers search --model smollm2-135m --stream prompts.jsonl --task notes --minutes 10 --max-new-tokens 32"
)
@options.read
def search(prompts: Sequence[Prompt], max_steps: int, minutes: float | None, db: str | None, **values: Any) -> Result:
    """Search a layer set by Bayesian optimisation over all sub-layers; the score is Self-SD's speed with the set.

    The set is stored for the method self-sd; the best plan does not change until `swiftopt compare` finds it faster.
    """
    request = decoding_request(values)

    def show_candidate(number: int, candidate: Any) -> None:
        n_skipped = candidate.layer_set.n_skipped
        note(f"candidate {number}: {n_skipped} sub-layers skipped, {candidate.ratio:.2f}x plain decoding")

    max_search_s = float("inf") if minutes is None else 60 * minutes
    with open_store(db) as store:
        from .parts import search_offline

        record, result = search_offline(
            request, prompts, store, max_steps, max_search_s, StepNotes("load: "), show_candidate
        )
    best_ratio, median_ratio, n_tried = result.best.ratio, result.typical_ratio, len(result.candidates)
    figures = {"candidates": n_tried, "ratio": best_ratio, "median_ratio": median_ratio}
    text = (
        f"{record.model}/{record.task} version {record.version}: {best_ratio:.2f}x plain decoding on the search's"
        f" own prompts, the best of {n_tried} candidates (median {median_ratio:.2f}x)"
    )
    return Result(
        {"schema": "swiftopt.layers-search/1", "layer_set": record.to_json(), **figures},
        [layer_map(record.layer_set, console().width), text],
    )


def tune_preset(pictures: Pictures, values: dict[str, Any]) -> Result | None:
    """Make the parts of a paper's method on most prompts, and compare it with plain decoding on the held-out ones.

    Returns: the comparison; None if no preset is named, or if the usual tuning makes its layer set.
    """
    name = values["preset"]
    if name is None or preset_of(name).is_tuned:
        return None

    from ..optimizer.verdict import hold_out

    if values["server"] or values["redis"]:
        raise InvalidInput(
            f"--preset {name} runs locally only, because jobs only search layer sets: remove --redis and --server"
        )
    methods = (BASE, preset_of(name).method)
    request = pick(CompareRequest, {**values, "methods": methods, "presets": (name,)})
    prompts = read_stream(values["stream"], values["task"], values["limit"], values["form"])
    options.note_tasks(prompts, "result")
    tuning_prompts, compared_prompts = hold_out(prompts)
    if not compared_prompts:
        raise InvalidInput(f"{values['stream']} has too few prompts to hold some out: use at least 4")
    return comparison(request, compared_prompts, tuning_prompts, pictures, values["db"])


# --- commands: list, show and export stored heads and probes


newest_version = click.option("--version", type=positive, help="A version.  [default: the newest]")


def _add_commands(group: click.Group, kind: LearnedKind, one: str, several: str) -> None:
    @group.command("list", short_help=f"List the stored {several}.")
    @options.of_model
    @options.of_task
    @options.store_and_json
    @commands.example(f"{kind} list", help=f"List the stored {several}, newest first.")
    def list_(of_model: str | None, of_task: str | None, store: Store) -> Result:
        records = store.learned_list(of_model, of_task, kind)
        value = {"schema": f"swiftopt.{kind}-list/1", kind: [record.to_json() for record in records]}
        none = f"no {kind} stored yet: run `swiftopt {kind} train --model M --stream FILE --task T`"
        return listing_result(value, records, trained_table, none)

    @group.command("show", short_help=f"Show the figures of {one}.")
    @options.model_task
    @newest_version
    @options.pictures("Draw the loss curve to a file as well.")
    @options.store_and_json
    @commands.example(f"{kind} show smollm2-135m/code", help=f"Show the figures of {one}, and the curve of the loss.")
    def show_(name: ModelTask, version: int | None, pictures: Pictures, store: Store) -> Result:
        record = store.learned(name.model, name.task, kind, version)
        pictures.draw(draw_loss, record)
        value = {**record.to_json(), "curve": [list(point) for point in record.curve], **pictures.to_json()}
        return Result(value, [trained_view(record)])

    @group.command("export", short_help=f"Write {one} to a file.")
    @options.model_task
    @newest_version
    @click.option("-o", "--out", required=True, type=value_types.FILE, help="File to write.")
    @options.store_and_json
    @commands.example(
        f"{kind} export smollm2-135m/code -o {kind}.safetensors",
        help=f"Write {one} to a safetensors file, which names the model that it was trained on.",
    )
    def export(name: ModelTask, version: int | None, out: str, store: Store) -> Result:
        record = store.learned(name.model, name.task, kind, version)
        data = store.weights(record)
        with writing(Path(out)):
            Path(out).write_bytes(data)
        value = {"schema": f"swiftopt.{kind}-export/1", kind: record.to_json(), "out": out}
        return Result(value, remarks=[f"{len(data)} bytes written to {out}"])


_add_commands(heads, "heads", "stored heads", "heads")
_add_commands(probe, "probe", "a stored probe", "probes")


# --- tables and charts


def trained_view(record: LearnedRecord) -> RenderableType:
    """Show the figures of one record, in 80 columns."""
    figures = record.figures
    heading = f"{record.kind} of {record.model}/{record.task}, version {record.version}"
    training_words = (
        f"{number(figures.get('positions'), 0)} positions,"
        f" {number(figures.get('held_out_positions'), 0)} more held out;"
        f" {number(figures.get('steps'), 0)} steps in {number(figures.get('train_s'), 0)} s;"
        f" {record.n_parameters} parameters"
    )
    renderables: list[RenderableType] = [Text(heading, style="bold"), Text(training_words)]
    if len(record.curve) > 1:
        losses = [loss for _, loss in record.curve]
        renderables.append(Text(f"loss {losses[0]:.3f} {sparkline(losses, CURVE_COLUMNS)} {losses[-1]:.3f}"))
    return Group(*renderables, *_figures_tables(record))


def trained_table(records: Sequence[LearnedRecord], width: int) -> Table:
    """List stored records; omit the storage date if `width` is too small."""
    columns: Columns[LearnedRecord] = [
        (folding("model"), lambda record: record.model),
        (folding("task"), lambda record: record.task),
        (fixed("v"), lambda record: str(record.version)),
        (fixed("layers"), lambda record: ",".join(map(str, record.depths))),
        (folding("figures"), _summary),
        (fixed("stored"), lambda record: record.created_at[:10]),
    ]
    return listing(records, columns if width >= ROOMY else columns[:-1])


def _summary(record: LearnedRecord) -> str:
    figures = record.figures
    if record.kind == "probe":
        return f"accuracy {number(figures.get('accuracy'))}, AUC {number(figures.get('auc'))}"
    return f"early {percent(figures.get('early@0.75'))}, rejected {percent(figures.get('rejected@0.75'))}"


def _figures_tables(record: LearnedRecord) -> list[Table]:
    """Return the figures of heads by layer and by threshold, or those of a probe."""
    figures = record.figures
    if record.kind == "probe":
        cells = [number(figures.get(name)) for name in ("accuracy", "auc", "base_rate")]
        columns = numbers("after layer", "accuracy", "AUC", "accepted (base rate)")
        return [table(columns, [(str(record.depths[0]), *cells)], gap=2)]
    by_layer, by_threshold = [], []
    for depth in record.depths:
        kl, agreement, identity = (figures.get(f"{name}@{depth}") for name in ("kl", "agreement", "identity"))
        by_layer.append((str(depth), number(kl), percent(agreement), percent(identity)))
    for threshold in SHOWN_THRESHOLDS:
        early, rejected = (figures.get(f"{name}@{threshold}") for name in ("early", "rejected"))
        by_threshold.append((threshold, percent(early), percent(rejected if early else None)))
    return [
        table(numbers("after layer", "KL", "agrees with the last layer", "untrained"), by_layer, gap=2),
        table(numbers("threshold", "predicted early", "rejected of these"), by_threshold, gap=2),
    ]


def draw_loss(record: LearnedRecord, pictures: Pictures) -> None:
    layers = ", ".join(map(str, record.depths))
    title = f"{model_name(record.model)} / {record.task} · {record.kind} after layer {layers}"
    with picture(pictures, 4.2, title) as axes:
        axes.plot([step for step, _ in record.curve], [loss for _, loss in record.curve], color=BLUE)
        axes.set(xlabel="step", ylabel=LOSSES[record.kind], ylim=(0, None))
