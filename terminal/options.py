"""Options that several commands share; every default is read from the dataclass that has it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from ..core.logs import FORMATS
from ..core.requests import DEFAULT_QUEUE
from ..core.settings import THREADS
from ..core.streams import StreamForm, read_stream, read_with_others
from ..core.templates import TEMPLATES
from ..core.types import Prompt, Sampling
from .charts import Pictures
from .commands import (
    DRAFTING,
    MACHINE,
    OTHER,
    PROMPTS,
    SAMPLING,
    SERVICES,
    Decorator,
    HeadedOption,
    from_field,
    option,
    together,
)
from .inputs import open_store
from .output import Result, note
from .value_types import (
    FILE,
    LAYER_SET,
    METHOD,
    MODEL,
    MODEL_TASK,
    PATH,
    QUEUE,
    STOP,
    TOKEN_BIAS,
    IntRange,
    natural,
    positive,
)

TASKS_SHOWN = 3  # Maximum number of tasks named in a remark on a stream.
PLACEMENT = ("dtype", "device", "speed")  # Options that choose where and how a model runs.


def adapt_values(change: Callable[..., dict[str, Any]]) -> Decorator[Any]:
    """Make a decorator that passes option values through `change` before the command gets them."""

    def decorate(command: Any) -> Any:
        return functools.wraps(command)(lambda **values: command(**change(**values)))

    return decorate


# Remarks on stream lines that name a task other than --task, by what the command uses --task for.
TaskUse = Literal["default", "result", "plan"]
OTHER_TASKS: Mapping[TaskUse, str] = {
    "default": "they keep it, and --task {task} applies to {rest}",
    "result": "the result is stored under --task {task}, for all lines",
    "plan": "all lines are decoded with the plan of --task {task}",
}


class TaskOption(HeadedOption):
    """Option --task of a command that reads a stream; `use` says what the command uses the task for."""

    def __init__(self, *names: Any, use: TaskUse, **option_settings: Any) -> None:
        super().__init__(*names, **option_settings)
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
    other_tasks = sorted({prompt.task for prompt in prompts} - {name})
    n_others = sum(prompt.task != name for prompt in prompts)
    if name is None or not n_others:
        return
    declared_use = next(param.use for param in context.command.params if isinstance(param, TaskOption))
    n_rest = len(prompts) - n_others
    rest_words = f"the other {n_rest}" if n_rest else "lines without a task, of which there are none"
    task_list = ", ".join([*other_tasks[:TASKS_SHOWN], *(["…"] if len(other_tasks) > TASKS_SHOWN else [])])
    treatment = OTHER_TASKS[use or declared_use].format(task=name, rest=rest_words)
    note(f"note: {n_others} of {len(prompts)} lines name another task ({task_list}): {treatment}")


def prompts_of(stream: str, task: str | None, limit: int | None, form: StreamForm | None = None) -> list[Prompt]:
    """Read a stream as `read_stream` does, and print a note if lines name a task other than --task.

    Raises: StreamNotFound, StreamError, SettingsError: as `read_stream`.
    """
    prompts = read_stream(stream, task, limit, form)
    note_tasks(prompts)
    return prompts


@adapt_values
def _with_form(template: str | None, shots: int | None, stop: tuple[str, ...], **values: Any) -> dict[str, Any]:
    return {**values, "form": StreamForm(template, shots, stop)}


@adapt_values
def read(stream: str, limit: int | None, form: StreamForm, **values: Any) -> dict[str, Any]:
    """Read the stream given by --stream, --task, --limit and `form` into `prompts`."""
    return {**values, "prompts": prompts_of(stream, values["task"], limit, form)}


@adapt_values
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


def _set_threads(context: click.Context, parameter: click.Parameter, n_threads: int | None) -> None:
    if n_threads is not None:
        os.environ[THREADS] = str(n_threads)


model_task = click.argument("name", type=MODEL_TASK, metavar="MODEL/TASK")
MODEL_HELP = "Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases."
model = option(MACHINE, "--model", required=True, type=MODEL, help=MODEL_HELP)
STREAM_HELP = "Prompts, one JSON object per line; - is standard input."
stream = option(PROMPTS, "--stream", required=True, type=FILE, help=STREAM_HELP)
model_and_stream = together(model, stream)
limit = option(PROMPTS, "--limit", type=positive, help="Take only the first prompts of the stream.")
stop = option(PROMPTS, "--stop", multiple=True, type=STOP, help="End before this text; may be repeated.")
form = together(
    option(
        PROMPTS,
        "--template",
        metavar="NAME",
        is_eager=True,
        callback=_use_template,
        type=click.Choice([*TEMPLATES]),
        help=f"Read the file as a data set, with its usual prompts and judging: {', '.join(TEMPLATES)}.",
    ),
    option(
        PROMPTS, "--shots", type=natural, help="Number of its first rows to use as examples.  [default: the template's]"
    ),
    stop,
    _with_form,
)
method = option(
    DRAFTING,
    "--method",
    type=METHOD,
    help="Override the stored plan; docs/methods.md lists the methods.",
)
draft_model = option(
    DRAFTING,
    "--draft-model",
    metavar="MODEL",
    type=MODEL,
    help="A smaller model with the same tokenizer that drafts.",
)
layer_set = option(DRAFTING, "--layer-set", type=LAYER_SET, help="Draft with this exported layer set.")
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
    help="Server of jobs and layer sets; key: SWIFTOPT_API_KEY.  [env: SWIFTOPT_SERVER_URL]",
)
queue = option(
    SERVICES,
    "--queue",
    type=QUEUE,
    default=DEFAULT_QUEUE,
    show_default=False,
    help="Queue of the workers.  [env: SWIFTOPT_QUEUE; default: default]",
)
log_format = option(
    SERVICES,
    "--log-format",
    type=click.Choice(FORMATS),
    default="text",
    help="Format of the log's lines: text, or JSON objects.  [env: SWIFTOPT_LOG_FORMAT]",
)
alias = click.option("--alias", default="best", help="Name of the alias.")
version = click.option("--version", type=positive, help="A version.  [default: the best one]")
of_model = click.option("--model", "of_model", type=MODEL, help="Only those of this model.")
of_task = click.option("--task", "of_task", help="Only those of this task.")
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
    "max_new_tokens": (PROMPTS, "Maximum tokens of a completion, unless the stream's line sets it."),
    "seed": (SAMPLING, "Seed of every random choice."),
}


def shared(values: type[Any], *names: str) -> Decorator[Any]:
    """Make options for fields that several dataclasses have; `values` has the defaults."""
    types = {"max_new_tokens": {"type": positive}}
    rows = ((name, *SHARED[name]) for name in names)
    return together(*(from_field(heading, values, name, help, **types.get(name, {})) for name, heading, help in rows))


def machine(values: type[Any], *further_fields: str) -> Decorator[Any]:
    """Make the options for where a model runs, and `further_fields` that are shared; `values` has the defaults."""
    return together(threads, shared(values, "dtype", "device", *further_fields))


def pictures(help: str) -> Decorator[Any]:
    """Make --png and --svg; the command gets both as `pictures`.

    The command fails before its work if one of the files cannot be written.
    """

    def decorate(command: Any) -> Any:
        @functools.wraps(command)
        def call(*args: Any, png: Path | None, svg: Path | None, **values: Any) -> Any:
            if png is not None and png == svg:
                raise click.UsageError(f"--png and --svg both name {png}: give each its own file")
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
    _draw("temperature", "0: always take the most probable token."),
    _draw("top_p", "Draw from the most probable tokens that sum to this probability."),
    _draw("top_k", "Draw from the k most probable tokens; 0: no limit."),
    _draw("min_p", "Draw from tokens with at least this share of the highest probability."),
    _draw("presence_penalty", "Subtracted from the logit of every token generated before; -2 to 2."),
    _draw("frequency_penalty", "The same for each time that the token was generated; -2 to 2."),
    option(
        SAMPLING,
        "--logit-bias",
        multiple=True,
        type=TOKEN_BIAS,
        help="Added to a token's logit, -100 to 100; may be repeated.",
    ),
    shared(Sampling, "seed"),
)


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
        command_result: Result = command(*args, **values)
        return command_result.print(as_json)

    return as_json(call)


store_and_json, db_and_json = together(store, json), together(db, json)
