"""Options that several commands share, and checks of them that need no torch.

Every default is read from the dataclass that has it.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ..core.errors import LayerSetError, SettingsError, SwiftoptError
from ..core.records import LayerSetRecord
from ..core.requests import DEFAULT_QUEUE, GenerateRequest, ModelRequest
from ..core.serialization import LARGEST
from ..core.settings import THREADS
from ..core.streams import EMPTY_STOP, StreamForm, read_stream, read_with_others
from ..core.templates import TEMPLATES
from ..core.types import Prompt, Sampling
from ..core.wings import WingCommand, wings
from ..core.wings import load as load_from_wing
from .charts import Pictures
from .output import Result, StepNotes, note

if TYPE_CHECKING:
    from ..models.runtime import Runtime
    from ..store import Store

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Command], Command]
Parameter = TypeVar("Parameter")
Completer = Callable[[str], list[CompletionItem[str]]]  # Maps an incomplete value to the shell's completions.


# --- commands and their help

# Headings of --help for commands with many options.
COMMON, MAIN, PROMPTS, MACHINE = "Common options", "Main options", "Prompts and completions", "Model and machine"
DRAFTING, SAMPLING, SEARCH, SERVICES = "Drafting", "Sampling", "Search", "Jobs and database"
MEASUREMENT, ENGINES = "Measurement", "Other engines"
OTHER = "Other options"
# Key of `Context.meta`: true if help lists all options instead of only the common ones.
ALL_OPTIONS = "swiftopt.all-options"
MANY = 12  # Number of options from which --help groups them under headings.
N_MAIN = 3  # The first N_MAIN declared options are listed as main options.
TASKS_SHOWN = 3  # Maximum number of tasks named in a remark on a stream.
PLACEMENT = ("dtype", "device", "speed")  # Options that choose where and how a model runs.


class HeadedOption(click.Option):
    """An option with the heading under which --help lists it if the command has many options."""

    def __init__(self, *names: Any, heading: str = OTHER, **more: Any) -> None:
        super().__init__(*names, **more)
        self.heading = heading


class GroupedCommand(click.Command):
    """A command whose --help groups many options under headings, the main ones first.

    If `common` names parameters, `--help` lists only these, in that order, and `--help-all` lists all.
    """

    def __init__(self, *args: Any, common: str = "", **more: Any) -> None:
        super().__init__(*args, **more)
        self.common = common.split()

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *([_HELP_ALL] if self.common else [])]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = self._shown(ctx)
        if self.common and not ctx.meta.get(ALL_OPTIONS):
            by_name = {param.name: param for param in shown}
            # Options of wings may not be installed. The last two options are --help-all and --help.
            listed = [*(by_name[name] for name in self.common if name in by_name), *shown[-2:]]
            self._write(ctx, formatter, COMMON, listed)
            n_more = len(shown) - len(listed)
            formatter.write_paragraph()
            formatter.write_text(f"{n_more} more options: {ctx.command_path} --help-all")
            return
        if len(shown) < MANY:
            return super().format_options(ctx, formatter)
        sections: dict[str, list[click.Option]] = {MAIN: shown[:N_MAIN]}
        for param in shown[N_MAIN:]:
            sections.setdefault(getattr(param, "heading", OTHER), []).append(param)
        others = sections.pop(OTHER)  # Never empty: --help has no heading of its own.
        for heading, params in [*sections.items(), (OTHER, others)]:
            self._write(ctx, formatter, heading, params)

    def _shown(self, ctx: click.Context) -> list[click.Option]:
        """Return the options that are not hidden."""
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        return [param for param in params if param.get_help_record(ctx) is not None]

    def _write(
        self, ctx: click.Context, formatter: click.HelpFormatter, heading: str, params: Sequence[click.Option]
    ) -> None:
        with formatter.section(heading):
            formatter.write_dl([record for param in params if (record := param.get_help_record(ctx))])


def _show_all(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[ALL_OPTIONS] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show all options and exit.",
)


class ConfiguredGroup(click.Group):
    """A group that passes configured values to its commands as `default_map` and includes commands of wings."""

    command_class = GroupedCommand

    def list_commands(self, ctx: click.Context) -> list[str]:
        return self.among_wings(self.commands)

    def among_wings(self, names: Iterable[str]) -> list[str]:
        """Return the command names; commands of wings follow the command that they name."""
        added = self._of_wings().values()
        return [name for known in names for name in (known, *(each.name for each in added if each.after == known))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (added := self._of_wings().get(cmd_name)) is None:
            return super().get_command(ctx, cmd_name)
        command: click.Command = load_from_wing(added.reference)
        return command

    def _of_wings(self) -> dict[str, WingCommand]:
        return {added.name: added for wing in wings() for added in wing.commands if added.group == self.name}

    def invoke(self, ctx: click.Context) -> Any:
        configured = ctx.default_map or {}
        ctx.default_map = {name: configured for name in self.list_commands(ctx)}
        return super().invoke(ctx)


def command(name: str | None = None, **more: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command outside any group; `more` goes to `click.command`."""
    return click.command(name, cls=GroupedCommand, **more)


def together(*options: Decorator[Any]) -> Decorator[Any]:
    """Combine decorators into one; --help lists their options in the given order."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


def of_wings(command: str) -> Decorator[Any]:
    """Add the options that wings declare for a command, such as `engines` for `tune`."""
    return together(*(load_from_wing(wing.options[command]) for wing in wings() if command in wing.options))


def example(*lines: str, words: str | None = None) -> Decorator[Any]:
    """Add command lines, each without `swiftopt`, to a command's help, which is `words` or else its docstring."""
    text = "".join(f"\n  swiftopt {line}" for line in lines)

    def add(command: Any) -> Any:
        command.__doc__ = f"{words or inspect.cleandoc(command.__doc__)}\n\n\b\nExample:{text}"
        return command

    return add


def option(heading: str, *names: str, **more: Any) -> Decorator[Any]:
    """Make an option that help lists under `heading`; `more` goes to `click.option`."""
    return click.option(*names, cls=HeadedOption, heading=heading, **more)


measurement = functools.partial(option, MEASUREMENT)


def default_of(values: type[Any], name: str) -> Any:
    return next(field.default for field in fields(values) if field.name == name)


def from_field(heading: str, values: type[Any], name: str, help: str, **more: Any) -> Decorator[Any]:
    """Make an option for a dataclass's field, with its type and default.

    A Literal of words becomes a choice, a truth value a flag: `--no-NAME` where it is on by default. `more` goes to
    `click.option`.
    """
    hint, default = get_type_hints(values)[name], default_of(values, name)
    flag, kinds = name.replace("_", "-"), get_args(hint) or (hint,)
    if hint is bool:
        flag = f"no-{flag}" if default else flag
        more |= {"flag_value": not default, "show_default": False}
    elif "type" not in more:
        words = all(isinstance(kind, str) for kind in kinds)
        more["type"] = click.Choice(kinds) if words else next(kind for kind in kinds if kind is not NoneType)
    return option(heading, f"--{flag}", name, default=default, help=help, **more)


# --- types of values, with what a shell completes them to


class ModelTask(NamedTuple):
    """A model and a task, parsed from MODEL/TASK."""

    model: str
    task: str

    def __str__(self) -> str:
        return f"{self.model}/{self.task}"


class Parsed(click.ParamType[Parameter]):
    """Parameter type that parses with a function; its ValueError becomes the usage error, SwiftoptErrors pass through.

    `complete` returns the shell completions of an incomplete value.
    """

    def __init__(self, name: str, parse: Callable[[str], Parameter], complete: Completer | None = None) -> None:
        self.name, self._parse, self._complete = name, parse, complete

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Parameter:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except SwiftoptError:
            raise
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        return self._complete(incomplete) if self._complete else []


def _files(incomplete: str) -> list[CompletionItem[str]]:
    """Let the shell complete a file name."""
    return [CompletionItem(incomplete, type="file")]


def beginning(incomplete: str, known: Mapping[str, str]) -> list[CompletionItem[str]]:
    """Complete one of the known names, each with its help."""
    return [CompletionItem(name, help=words) for name, words in known.items() if name.startswith(incomplete)]


def _models(incomplete: str) -> list[CompletionItem[str]]:
    """Complete a model's alias; if none matches, a folder or GGUF file."""
    from ..models.sources import ALIASES

    return beginning(incomplete, {name: alias.hub_id for name, alias in ALIASES.items()}) or _files(incomplete)


def _methods(incomplete: str) -> list[CompletionItem[str]]:
    from ..decoding.methods import METHODS

    return beginning(incomplete, {name: method.title for name, method in METHODS.items()})


def _model_task(text: str) -> ModelTask:
    """Split MODEL/TASK at the last slash: a folder or hub id may itself contain slashes."""
    model, _, task = text.rpartition("/")
    if not model or not task:
        raise ValueError(f"{text!r} lacks a model or a task: give MODEL/TASK, for example smollm2-135m/notes")
    return ModelTask(model, task)


def _queue_name(text: str) -> str:
    """Return a name that the server and Redis accept for a queue as well."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text):
        raise ValueError(f"{text!r} is no queue: use up to 64 letters, digits, '-', '_' and '.'")
    return text


def _method_name(text: str) -> str:
    from ..decoding.methods import method_info

    method_info(text)
    return text


def _layer_set(file: str) -> LayerSetRecord:
    """Read a file that holds one layer set."""
    from ..core.records import import_file
    from ..models.sources import find_alias

    records = import_file(file, lambda name: model_alias.n_layers if (model_alias := find_alias(name)) else None)
    if len(records) != 1:
        raise LayerSetError(f"{file} holds {len(records)} layer sets: import it, then choose one with --task")
    return records[0]


def _token_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ValueError(f"{text!r} is no bias: give a token id and a number, for example 50=-2.5") from None


def _stop(text: str) -> str:
    if not text:
        raise ValueError(EMPTY_STOP)
    return text


class IntRange(click.IntRange):
    """Also rejects integers too large for a database column."""

    name = "integer"  # Type name in error messages; click's is "integer range".

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number: int = super().convert(value, param, ctx)
        return number if number <= LARGEST else self.fail(f"{number} is too large", param, ctx)


class FloatRange(click.FloatRange):
    """Also rejects `nan` and `inf`, which the range check of click lets through."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a finite number", param, ctx)


positive, natural = IntRange(min=1), IntRange(min=0)
MODEL = Parsed("TEXT", str, _models)
FILE, PATH = Parsed("FILE", str, _files), Parsed("FILE", Path, _files)
FOLDER = Parsed("FOLDER", str, lambda incomplete: [CompletionItem(incomplete, type="dir")])


# --- options and arguments


def adapted(change: Callable[..., dict[str, Any]]) -> Decorator[Any]:
    """Make a decorator that passes option values through `change` before the command gets them."""

    def decorate(command: Any) -> Any:
        return functools.wraps(command)(lambda **values: command(**change(**values)))

    return decorate


# Remarks on stream lines that name a task other than --task, by what the command uses --task for.
TaskUse = Literal["default", "result", "plan"]
OTHER_TASKS: Mapping[TaskUse, str] = {
    "default": "they keep it, and --task {task} is for {rest}",
    "result": "--task {task} is what the result is stored under, for all lines",
    "plan": "--task {task} chooses what all lines are decoded with",
}


class TaskOption(HeadedOption):
    """Option --task of a command that reads a stream; `use` says what the command uses the task for."""

    def __init__(self, *names: Any, use: TaskUse, **more: Any) -> None:
        super().__init__(*names, **more)
        self.use = use


def task(use: TaskUse, help: str, heading: str = OTHER) -> Decorator[Any]:
    """Make --task of a command that reads a stream."""
    return click.option("--task", cls=TaskOption, use=use, heading=heading, help=help)


def note_tasks(prompts: Sequence[Prompt], use: TaskUse | None = None) -> None:
    """If some prompts name a task other than --task, print a note on how they are treated.

    Args: use: what --task is used for in this call, if not as the command declares.
    """
    context = click.get_current_context()
    name = context.params.get("task")
    others = sorted({prompt.task for prompt in prompts} - {name})
    n_others = sum(prompt.task != name for prompt in prompts)
    if name is None or not n_others:
        return
    usual = next(param.use for param in context.command.params if isinstance(param, TaskOption))
    n_rest = len(prompts) - n_others
    rest = f"the other {n_rest}" if n_rest else "lines without one, which there are none of"
    listed = ", ".join([*others[:TASKS_SHOWN], *(["…"] if len(others) > TASKS_SHOWN else [])])
    what = OTHER_TASKS[use or usual].format(task=name, rest=rest)
    note(f"note: {n_others} of {len(prompts)} lines name another task ({listed}): {what}")


def prompts_of(stream: str, task: str | None, limit: int | None, form: StreamForm | None = None) -> list[Prompt]:
    """Read a stream as `read_stream` does, and print a note if lines name a task other than --task.

    Raises: StreamNotFound, StreamError, SettingsError: as `read_stream`.
    """
    prompts = read_stream(stream, task, limit, form)
    note_tasks(prompts)
    return prompts


@adapted
def _with_form(template: str | None, shots: int | None, stop: tuple[str, ...], **values: Any) -> dict[str, Any]:
    return {**values, "form": StreamForm(template, shots, stop)}


@adapted
def read(stream: str, limit: int | None, form: StreamForm, **values: Any) -> dict[str, Any]:
    """Read the stream given by --stream, --task, --limit and `form` into `prompts`."""
    return {**values, "prompts": prompts_of(stream, values["task"], limit, form)}


@adapted
def read_more(stream: str, limit: int | None, form: StreamForm, **values: Any) -> dict[str, Any]:
    """Read the stream as `read` does, with the prompts beyond --limit as `others`."""
    prompts, others = read_with_others(stream, values["task"], limit, form)
    note_tasks(prompts)
    return {**values, "prompts": prompts, "others": others}


def _use_template(context: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    """Use the template's answer length as the default of --max-new-tokens."""
    if name is not None:
        defaults = {"max_new_tokens": TEMPLATES[name].max_new_tokens}
        context.default_map = {**(context.default_map or {}), **defaults}
    return name


def _set_threads(context: click.Context, parameter: click.Parameter, value: int | None) -> None:
    if value is not None:
        os.environ[THREADS] = str(value)


model_task = click.argument("name", type=Parsed("MODEL/TASK", _model_task), metavar="MODEL/TASK")
MODEL_HELP = "Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases."
model = option(MACHINE, "--model", required=True, type=MODEL, help=MODEL_HELP)
STREAM_HELP = "Prompts, one JSON object per line; - is standard input."
stream = option(PROMPTS, "--stream", required=True, type=FILE, help=STREAM_HELP)
model_and_stream = together(model, stream)
limit = option(PROMPTS, "--limit", type=positive, help="Take only the first prompts of the stream.")
stop = option(
    PROMPTS, "--stop", multiple=True, type=Parsed("STR", _stop), help="End before this text; may be repeated."
)
form = together(
    option(
        PROMPTS,
        "--template",
        metavar="NAME",
        is_eager=True,
        callback=_use_template,
        type=click.Choice([*TEMPLATES]),
        help=f"The file holds rows of a data set, asked, ended and judged as usual: {', '.join(TEMPLATES)}.",
    ),
    option(PROMPTS, "--shots", type=natural, help="Its first rows that are examples.  [default: as usual]"),
    stop,
    _with_form,
)
METHOD = Parsed("NAME", _method_name, _methods)
method = option(
    DRAFTING,
    "--method",
    type=METHOD,
    help="Overrule the stored plan; docs/methods.md lists the methods.",
)
draft_model = option(
    DRAFTING,
    "--draft-model",
    metavar="MODEL",
    type=MODEL,
    help="A smaller model with the same tokenizer, for drafts.",
)
layer_set = option(
    DRAFTING, "--layer-set", type=Parsed("FILE", _layer_set, _files), help="Draft with this exported layer set."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
db = option(
    SERVICES,
    "--db",
    metavar="URL|FILE",
    type=FILE,
    help="Database of layer sets: a file or an SQLAlchemy URL.  [default: in your data folder]",
)
redis = option(SERVICES, "--redis", metavar="URL", help="Redis that delivers jobs.  [env: SWIFTOPT_REDIS_URL]")
server = option(
    SERVICES,
    "--server",
    metavar="URL",
    help="Server of jobs and layer sets; its key: SWIFTOPT_API_KEY.  [env: SWIFTOPT_SERVER_URL]",
)
queue = option(
    SERVICES,
    "--queue",
    type=Parsed("NAME", _queue_name),
    default=DEFAULT_QUEUE,
    show_default=False,
    help="Queue of the workers.  [env: SWIFTOPT_QUEUE; default: default]",
)
alias = click.option("--alias", default="best", help="Name of the choice.")
version = click.option("--version", type=positive, help="A version.  [default: the best one]")
of_model = click.option("--model", "of_model", type=MODEL, help="Only this model's.")
of_task = click.option("--task", "of_task", help="Only this task's.")
threads = option(
    MACHINE,
    "--threads",
    type=IntRange(1, 255),
    expose_value=False,
    callback=_set_threads,
    help="Threads to compute with in this process.  [default: one per usable core]",
)
SHARED: dict[str, tuple[str, str]] = {  # Heading and help text of fields shared by several dataclasses.
    "dtype": (MACHINE, "auto (as stored), float32, bfloat16 or float16."),
    "device": (MACHINE, "auto, cpu, cuda, cuda:N, or auto-map for several GPUs."),
    "speed": (MACHINE, "exact: our kernels; eager: torch's operations; graphs: CUDA graphs; auto chooses."),
    "max_new_tokens": (PROMPTS, "Tokens per completion, where the stream's line says nothing."),
    "seed": (SAMPLING, "Seed of every random choice."),
}


def shared(values: type[Any], *names: str) -> Decorator[Any]:
    """Make options for fields that several dataclasses have; `values` has the defaults."""
    types = {"max_new_tokens": {"type": positive}}
    rows = ((name, *SHARED[name]) for name in names)
    return together(*(from_field(heading, values, name, help, **types.get(name, {})) for name, heading, help in rows))


def machine(values: type[Any], *more: str) -> Decorator[Any]:
    """Make the options for where a model runs, and `more` that are shared; `values` has the defaults."""
    return together(threads, shared(values, "dtype", "device", *more))


def pictures(help: str) -> Decorator[Any]:
    """Make --png and --svg; the command gets both as `pictures`.

    The command fails before its work if one of the files cannot be written.
    """

    def decorate(command: Any) -> Any:
        @functools.wraps(command)
        def call(*args: Any, png: Path | None, svg: Path | None, **values: Any) -> Any:
            if png is not None and png == svg:
                raise click.UsageError(f"--png and --svg both name {png}: give each a file of its own")
            pictures = Pictures(png, svg)
            pictures.check()
            code = command(*args, pictures=pictures, **values)
            pictures.raise_failed()
            return code

        return call

    svg = click.option("--svg", type=PATH, help="The same picture, as SVG.")
    return together(click.option("--png", type=PATH, help=help), svg, decorate)


_draw = functools.partial(from_field, SAMPLING, Sampling)
sampling = together(
    _draw("temperature", "0 takes the most probable token."),
    _draw("top_p", "Draw from the most probable tokens that reach this mass."),
    _draw("top_k", "Draw from the k most probable tokens; 0 is off."),
    _draw("min_p", "Draw from tokens of at least this share of the most probable one's chance."),
    _draw("presence_penalty", "Taken off the logit of every token generated before; -2 to 2."),
    _draw("frequency_penalty", "Likewise, for each time that it was generated; -2 to 2."),
    option(
        SAMPLING,
        "--logit-bias",
        multiple=True,
        type=Parsed("ID=BIAS", _token_bias),
        help="Added to a token's logit, -100 to 100; may be repeated.",
    ),
    shared(Sampling, "seed"),
)


def on_command_line(name: str) -> bool:
    """Return whether an option was given on the command line, not by a default or the configuration."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) is ParameterSource.COMMANDLINE


# --- what commands do with the values


def pick(values: type[Any], options: dict[str, Any]) -> Any:
    """Build a dataclass from the options named like its fields; nested dataclasses are built in the same way.

    Raises: SettingsError: a value is out of its range.
    """
    hints = {field.name: get_type_hints(values)[field.name] for field in fields(values)}
    nested = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    made = {name: pick(hint, options) for name, hint in nested.items() if name not in options}
    return values(**{name: value for name, value in {**made, **options}.items() if name in hints})


def decoding_request(values: dict[str, Any], *others: str | None) -> GenerateRequest:
    """Make the request of a command that decodes, with its sampling; `others` as for `check_model`.

    Raises: SwiftoptError: a value is out of its range, the name of model, dtype or device is unknown, or the model's
        architecture is not supported.
    """
    request: GenerateRequest = pick(GenerateRequest, values)
    check_model(request, request.draft_model, *others)
    return request


def check_model(request: ModelRequest, *others: str | None) -> None:
    """Check the names of model, dtype and device, and of `others`: models, if any, that are loaded likewise.

    Raises: SwiftoptError: one of them is unknown, or the model's architecture is not supported.
    """
    from ..models.sources import check_names

    for name in filter(None, (request.model, *others)):
        check_names(name, request.dtype, request.device, request.speed)


def lacks(package: str) -> str:
    """Return an error message on a missing package, with advice; the API-only Docker image lacks many packages."""
    return (
        f"{package} is not installed here, and this needs it: pip install swiftopt with its dependencies, or take the"
        " image that has models"
    )


def check_can_decode() -> None:
    """Raises: SettingsError: this installation cannot load a model."""
    if importlib.util.find_spec("torch") is None:
        raise SettingsError(lacks("torch"))


def load(request: ModelRequest) -> Runtime:
    """Load the model of a request, printing notes on the progress.

    Raises: SwiftoptError: it cannot be loaded.
    """
    from ..models.loading import load

    return load(request.model, request.dtype, request.device, StepNotes("load: "), request.speed)


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


def json(command: Any) -> Any:
    """Add --json to a command that returns a `Result`, and print it as the option says."""

    @functools.wraps(command)
    def call(*args: Any, as_json: bool, **values: Any) -> int:
        result: Result = command(*args, **values)
        return result.print(as_json)

    return as_json(call)


store_and_json, db_and_json = together(store, json), together(db, json)
