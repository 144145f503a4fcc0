"""Options that several commands share, and what is checked of them before torch is loaded.

Every default is read from the dataclass that has it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_type_hints

import click

from ..core.errors import LayerSetError, SettingsError
from ..core.jobs import DEFAULT_QUEUE
from ..core.requests import GenerateRequest, TuneRequest
from ..core.settings import AUTO, FORMATS, STORED, THREADS, TuningSettings
from ..core.types import LayerSetRecord, Sampling
from ..optimizer.strategies import SIZE_CHOOSING, STRATEGIES

if TYPE_CHECKING:
    from ..store import Store

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Command], Command]


class PresetGroup(click.Group):
    """Passes its presets on to its commands, where click looks for them; lists commands as they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

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
    """A name that the server and Redis accept for a queue as well."""

    name = "NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", str(value)):
            self.fail(f"{value!r} is no queue: use up to 64 letters, digits, '-', '_' and '.'", param, ctx)
        return str(value)


class TokenBias(click.ParamType[tuple[int, float]]):
    """Splits ID=BIAS into a token id and a number."""

    name = "ID=BIAS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        token_id, _, bias = str(value).partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"{value!r} is no bias: give a token id and a number, for example 50=-2.5", param, ctx)


positive = click.IntRange(min=1)
model_task = click.argument("name", type=ModelTaskType(), metavar="MODEL/TASK")
model = click.option(
    "--model", required=True, help="Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases."
)
stream = click.option(
    "--stream", required=True, metavar="FILE", help="Prompts, one JSON object per line; - is standard input."
)
method = click.option("--method", metavar="NAME", help="Overrule the stored plan; docs/methods.md lists the methods.")
limit = click.option("--limit", type=positive, help="Take only the first prompts of the stream.")
json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
db = click.option(
    "--db",
    metavar="URL|FILE",
    help="Database of layer sets: a file or an SQLAlchemy URL.  [default: in your data folder]",
)
redis = click.option("--redis", metavar="URL", help="Redis that delivers jobs.  [env: SWIFTOPT_REDIS_URL]")
server = click.option(
    "--server",
    metavar="URL",
    help="Server of jobs and layer sets; its key: SWIFTOPT_API_KEY.  [env: SWIFTOPT_SERVER_URL]",
)
queue = click.option(
    "--queue",
    type=QueueName(),
    default=DEFAULT_QUEUE,
    help="Queue of the workers.  [env: SWIFTOPT_QUEUE; default: default]",
)
alias = click.option("--alias", default="best", show_default=True, help="Name of the choice.")


def default_of(values: type[Any], name: str) -> Any:
    """Return the default of a dataclass's field."""
    return next(field.default for field in dataclasses.fields(values) if field.name == name)


def from_field(values: type[Any], name: str, help: str, **more: Any) -> Decorator[Any]:
    """Make an option for a dataclass's field, with its type and default; a Literal of words becomes a choice.

    `more` goes to `click.option`.
    """
    hint = get_type_hints(values)[name]
    kinds = get_args(hint) or (hint,)
    if "type" not in more and all(isinstance(kind, str) for kind in kinds):
        more["type"] = click.Choice(kinds)
    more.setdefault("type", next(kind for kind in kinds if kind is not NoneType))
    flag, default = f"--{name.replace('_', '-')}", default_of(values, name)
    return click.option(flag, name, default=default, show_default=True, help=help, **more)


def switch_off(name: str, help: str) -> Decorator[Any]:
    """Make `--no-NAME` for a field of the settings that is on by default."""
    flag, on = f"--no-{name.replace('_', '-')}", default_of(TuningSettings, name)
    return click.option(flag, name, flag_value=False, default=on, help=help)


def together(*options: Decorator[Any]) -> Decorator[Any]:
    """Join decorators to one; help lists their options in the order given."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def example(*lines: str, words: str | None = None) -> Decorator[Any]:
    """Add command lines, each without `swiftopt`, to a command's help, which is `words` or else its docstring."""
    text = "".join(f"\n  swiftopt {line}" for line in lines)

    def add(command: Any) -> Any:
        command.__doc__ = f"{words or inspect.cleandoc(command.__doc__)}\n\n\b\nExample:{text}"
        return command

    return add


def _set_threads(context: click.Context, parameter: click.Parameter, value: int | None) -> None:
    if value is not None:
        os.environ[THREADS] = str(value)


def max_new_tokens(values: type[Any]) -> Decorator[Any]:
    """Make `--max-new-tokens`; `values` has the default."""
    words = "Tokens per completion, where the stream's line says nothing."
    return from_field(values, "max_new_tokens", words, type=positive)


def machine(values: type[Any]) -> Decorator[Any]:
    """Make the options for where the model runs and how long its completions get; `values` has the defaults."""
    return together(placement(values), max_new_tokens(values))


def placement(values: type[Any]) -> Decorator[Any]:
    """Make the options for where the model runs; `values` has the defaults."""
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
    )


def speed(values: type[Any]) -> Decorator[Any]:
    """Make `--speed`; `values` has the default."""
    words = "auto is native (our CPU kernels) where they work, else eager; the others are torch's."
    return from_field(values, "speed", words)


def seed(values: type[Any]) -> Decorator[Any]:
    """Make `--seed`; `values` has the default."""
    return from_field(values, "seed", "Seed of every random choice.")


sampling = together(
    from_field(Sampling, "temperature", "0 takes the most probable token."),
    from_field(Sampling, "top_p", "Draw from the most probable tokens that reach this mass."),
    from_field(Sampling, "top_k", "Draw from the k most probable tokens; 0 is off."),
    from_field(Sampling, "min_p", "Draw from tokens of at least this share of the most probable one's chance."),
    from_field(Sampling, "presence_penalty", "Taken off the logit of every token generated before; -2 to 2."),
    from_field(Sampling, "frequency_penalty", "Likewise, for each time that it was generated; -2 to 2."),
    click.option(
        "--logit-bias", multiple=True, type=TokenBias(), help="Added to a token's logit, -100 to 100; may be repeated."
    ),
    seed(Sampling),
)

_setting = functools.partial(from_field, TuningSettings)
settings = together(
    _setting("method", "What the layer set is to draft for; adaptive decides by measured time."),
    _setting(
        "draft_format",
        "Weights of what a draft keeps; auto: those that pay most here.",
        type=click.Choice([AUTO, *FORMATS, STORED]),
    ),
    _setting(
        "strategy",
        f"Who proposes layer sets: {'; '.join(f'{name} ({recipe.help})' for name, recipe in STRATEGIES.items())}.",
    ),
    _setting("objective", "What a layer set is scored by."),
    _setting(
        "skip_ratio", "r, from 0 to 1, where the strategy leaves the size to it.  [default: 0.45, 0.5 from 34B on]"
    ),
    _setting("context_window", "γ, generated tokens that score a layer set."),
    _setting("max_steps", f"S, candidates to try at most; {', '.join(SIZE_CHOOSING)} stop at 96 for themselves."),
    _setting("stop_threshold", "ε, confidence below which a SWIFT draft stops."),
    _setting("max_draft_length", "N_D, steps of a SWIFT draft."),
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
        default=default_of(TuningSettings, "deterministic"),
        help="Wait for late suggestions: the same seed then gives the same trials.",
    ),
)


def pick(values: type[Any], options: dict[str, Any]) -> Any:
    """Make a dataclass from those options that are its fields.

    Raises: SettingsError: a value is out of its range.
    """
    names = {field.name for field in dataclasses.fields(values)}
    return values(**{name: value for name, value in options.items() if name in names})


def check_model(request: TuneRequest | GenerateRequest) -> None:
    """Check the names of model, dtype and device.

    Raises: SwiftoptError: one of them is unknown, or the model's architecture is not supported.
    """
    from ..models.sources import check_names

    check_names(request.model, request.dtype, request.device)


def check_words(what: str, words: Iterable[str], known: Iterable[str]) -> None:
    """Check that all words are known; the error names the nearest known one.

    Raises: SettingsError: one is not.
    """
    known = tuple(known)
    for word in words:
        if word not in known:
            near = get_close_matches(word, known, n=1)
            nearest = f" (nearest: {near[0]})" if near else ""
            raise SettingsError(f"{what} {word!r} is unknown: use {', '.join(known)}{nearest}")


def database_url(db: str | None) -> str:
    """Return the URL of the database of --db, or of the default one."""
    from ..store import as_url, default_url

    return as_url(db) if db else default_url()


def open_store(db: str | None) -> Store:
    """Open the database of --db, or the default one, at the newest schema."""
    from ..store import Store

    return Store.open(db or None)


def store(command: Any) -> Any:
    """Add --db to a command, which gets the opened database as `store`."""

    @functools.wraps(command)
    def call(*args: Any, db: str | None, **values: Any) -> Any:
        with open_store(db) as store:
            return command(*args, store=store, **values)

    return db(call)


def read_layer_set(file: str) -> LayerSetRecord:
    """Read a file that holds one layer set.

    Raises: NotFound: no such file. LayerSetError: it holds none, or several.
    """
    from ..models.sources import find_alias
    from ..store import import_file

    records = import_file(file, lambda name: known.n_layers if (known := find_alias(name)) else None)
    if len(records) != 1:
        raise LayerSetError(f"{file} holds {len(records)} layer sets: import it, then choose one with --task")
    return records[0]
