"""Options that several commands share; every default is read from the dataclass that has it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_type_hints

import click

from ..core.errors import LayerSetError
from ..core.formats import AUTO, FORMATS, STORED
from ..core.jobs import DEFAULT_QUEUE
from ..core.processors import THREADS
from ..core.requests import TUNING
from ..core.types import LayerSetRecord, Sampling
from ..optimizer.strategies import SIZE_CHOOSING, STRATEGIES

if TYPE_CHECKING:
    from ..store import Store

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Command], Command]


class PresetGroup(click.Group):
    """Hands its presets on to each of its commands, where click looks a command's own up."""

    def invoke(self, ctx: click.Context) -> Any:
        presets = ctx.default_map or {}
        ctx.default_map = {name: presets for name in self.list_commands(ctx)}
        return super().invoke(ctx)


class ModelTask(NamedTuple):
    """What MODEL/TASK names."""

    model: str
    task: str

    def __str__(self) -> str:
        return f"{self.model}/{self.task}"


class ModelTaskType(click.ParamType[ModelTask]):
    """Splits MODEL/TASK at the last slash, for a model may be a folder or a hub id."""

    name = "MODEL/TASK"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ModelTask:
        if isinstance(value, ModelTask):
            return value
        model, _, task = str(value).rpartition("/")
        if not model or not task:
            self.fail(f"{value!r} lacks a model or a task: give MODEL/TASK, for example smollm2-135m/notes", param, ctx)
        return ModelTask(model, task)


class QueueName(click.ParamType[str]):
    """A queue, under the names that every front door takes."""

    name = "NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", str(value)):
            self.fail(f"{value!r} is no queue: use up to 64 letters, digits, '-', '_' and '.'", param, ctx)
        return str(value)


model_task_argument = click.argument("name", type=ModelTaskType(), metavar="MODEL/TASK")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
db_option = click.option(
    "--db",
    metavar="URL|FILE",
    help="Database of layer sets: a file or an SQLAlchemy URL.  [default: in your data folder]",
)
redis_option = click.option("--redis", metavar="URL", help="Redis that delivers jobs.  [env: SWIFTOPT_REDIS_URL]")
server_option = click.option(
    "--server",
    metavar="URL",
    help="Server of jobs and layer sets; its key: SWIFTOPT_API_KEY.  [env: SWIFTOPT_SERVER_URL]",
)
queue_option = click.option(
    "--queue",
    type=QueueName(),
    default=DEFAULT_QUEUE,
    help="Queue of the workers.  [env: SWIFTOPT_QUEUE; default: default]",
)
alias_option = click.option("--alias", default="best", show_default=True, help="Name of the choice.")


def default_of(values: type[Any], name: str) -> Any:
    """The default of a dataclass's field."""
    return next(field.default for field in dataclasses.fields(values) if field.name == name)


def from_field(values: Any, name: str, help: str, **more: Any) -> Decorator[Any]:
    """An option for a field of a dataclass, with its default, or of a value, with that; Literals are choices."""
    of_type = isinstance(values, type)
    hint = get_type_hints(values if of_type else type(values))[name]
    if "type" not in more and get_args(hint) and all(isinstance(word, str) for word in get_args(hint)):
        more["type"] = click.Choice(get_args(hint))
    flag = f"--{name.replace('_', '-')}"
    default = default_of(values, name) if of_type else getattr(values, name)
    return click.option(flag, name, default=default, show_default=True, help=help, **more)


def switch_off(name: str, help: str) -> Decorator[Any]:
    """`--no-NAME` for a field of the settings that is on by default."""
    on = getattr(TUNING, name)
    return click.option(f"--no-{name.replace('_', '-')}", name, flag_value=False, default=on, help=help)


def together(*options: Decorator[Any]) -> Decorator[Any]:
    """One decorator for several, listed in the help in the order given."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _set_threads(context: click.Context, parameter: click.Parameter, value: int | None) -> None:
    if value is not None:
        os.environ[THREADS] = str(value)


def machine_options(values: type[Any]) -> Decorator[Any]:
    """Where the model runs and how long its answers get; `values` has the defaults."""
    return together(
        click.option(
            "--threads",
            type=click.IntRange(1, 255),
            expose_value=False,
            callback=_set_threads,
            help="Threads to compute with in this process.  [default: one per usable core]",
        ),
        from_field(values, "dtype", "auto (as stored), float32, bfloat16 or float16."),
        from_field(values, "device", "auto, cpu, cuda, cuda:N, or auto-map for several GPUs."),
        from_field(
            values, "max_new_tokens", "Tokens per completion, where the stream's line says nothing.", type=positive
        ),
    )


def speed_option(values: type[Any]) -> Decorator[Any]:
    """How the runtime computes."""
    return from_field(
        values,
        "speed",
        "auto is native (our CPU kernels) where they work, else eager; the others are torch's.",
    )


positive = click.IntRange(min=1)

sampling_options = together(
    from_field(Sampling, "temperature", "0 takes the most probable token.", type=float),
    from_field(Sampling, "top_p", "Draw from the most probable tokens that reach this mass.", type=float),
    from_field(Sampling, "top_k", "Draw from the k most probable tokens; 0 is off.", type=int),
    from_field(Sampling, "seed", "Seed of every random choice.", type=int),
)

settings_options = together(
    from_field(TUNING, "method", "What the layer set is to draft for; adaptive decides by measured time."),
    from_field(
        TUNING,
        "draft_format",
        "Weights of what a draft keeps; auto: those that pay most here.",
        type=click.Choice([AUTO, *FORMATS, STORED]),
    ),
    from_field(
        TUNING,
        "strategy",
        f"Who proposes layer sets: {'; '.join(f'{name} ({recipe.help})' for name, recipe in STRATEGIES.items())}.",
    ),
    from_field(TUNING, "objective", "What a layer set is scored by."),
    from_field(
        TUNING,
        "skip_ratio",
        "r, from 0 to 1, where the strategy leaves the size to it.  [default: 0.45, 0.5 from 34B on]",
        type=float,
    ),
    from_field(TUNING, "context_window", "γ, generated tokens that score a layer set.", type=int),
    from_field(
        TUNING,
        "max_steps",
        f"S, candidates to try at most; {', '.join(SIZE_CHOOSING)} stop at 96 for themselves.",
        type=int,
    ),
    from_field(TUNING, "stop_threshold", "ε, confidence below which a SWIFT draft stops.", type=float),
    from_field(TUNING, "max_draft_length", "N_D, steps of a SWIFT draft.", type=int),
    switch_off("early_stop", "SWIFT drafts always have N_D tokens."),
    switch_off("dynamic_verification", "SWIFT drafts are chains, not trees."),
    switch_off("search_drafting", "Keep ε, N_D and k of SWIFT's drafts as given, instead of choosing them by time."),
    switch_off(
        "optimise",
        "Keep what a search starts from: nothing left out of quantised drafts, else evenly spaced sub-layers.",
    ),
    click.option(
        "--deterministic",
        is_flag=True,
        default=TUNING.deterministic,
        help="Wait for late suggestions: the same seed then gives the same trials.",
    ),
)


def pick(values: type[Any], options: dict[str, Any]) -> Any:
    """A dataclass from those options that are its fields.

    Raises: SettingsError: a value is out of its range.
    """
    names = {field.name for field in dataclasses.fields(values)}
    return values(**{name: value for name, value in options.items() if name in names})


def open_store(db: str | None) -> Store:
    """The database of --db, or the default one, at the newest schema."""
    from ..store import Store, as_url

    return Store.open(as_url(db) if db else None)


def read_layer_set(file: str) -> LayerSetRecord:
    """The one layer set in a file.

    Raises: NotFound: no such file. LayerSetError: it holds none, or several.
    """
    from ..models.catalog import find_alias
    from ..store import import_file

    records = import_file(file, lambda name: alias.n_layers if (alias := find_alias(name)) else None)
    if len(records) != 1:
        raise LayerSetError(f"{file} holds {len(records)} layer sets: import it, then choose one with --task")
    return records[0]
