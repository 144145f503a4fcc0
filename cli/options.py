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
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_type_hints

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ..core.errors import LayerSetError, SettingsError, SwiftoptError
from ..core.records import LayerSetRecord
from ..core.requests import DEFAULT_QUEUE, GenerateRequest, ModelRequest
from ..core.settings import AUTO, FORMATS, PRESETS, STORED, THREADS, Branching, SwiftSettings, TuningSettings, preset_of
from ..core.streams import StreamForm
from ..core.templates import TEMPLATES
from ..core.types import Sampling
from ..optimizer.strategies import MOST, SIZE_CHOOSING, STRATEGIES, strategy_info
from .charts import Pictures
from .output import Result, note

if TYPE_CHECKING:
    from ..store import Store

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Command], Command]
Parameter = TypeVar("Parameter")


# headings of help, where a command has many options
MAIN, PROMPTS, MACHINE = "Main options", "Prompts and completions", "Model and machine"
DRAFTING, SAMPLING, SEARCH, SERVICES = "Drafting", "Sampling", "Search", "Jobs and database"
MEASUREMENT, ENGINES = "Measurement", "Other engines"
OTHER = "Other options"
MANY = 12  # options from which on they have headings
N_MAIN = 3  # that come first: those that a command declares first
HEADINGS: dict[click.Parameter, str] = {}


class GroupedCommand(click.Command):
    """Lists many options under headings, the first few of them before all."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [param for param in self.get_params(ctx) if param.get_help_record(ctx) is not None]
        shown = [param for param in found if isinstance(param, click.Option)]
        if len(shown) < MANY:
            return super().format_options(ctx, formatter)
        sections: dict[str, list[click.Option]] = {MAIN: shown[:N_MAIN]}
        for param in shown[N_MAIN:]:
            sections.setdefault(HEADINGS.get(param, OTHER), []).append(param)
        others = sections.pop(OTHER)  # --help at least
        for heading, params in [*sections.items(), (OTHER, others)]:
            with formatter.section(heading):
                formatter.write_dl([record for param in params if (record := param.get_help_record(ctx))])


class ConfiguredGroup(click.Group):
    """Passes configured values on to its commands, where click looks for them; lists commands as they were added."""

    command_class = GroupedCommand

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        configured = ctx.default_map or {}
        ctx.default_map = {name: configured for name in self.list_commands(ctx)}
        return super().invoke(ctx)


def command(name: str | None = None, **more: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of no group; `more` goes to `click.command`."""
    return click.command(name, cls=GroupedCommand, **more)


def together(*options: Decorator[Any]) -> Decorator[Any]:
    """Join decorators to one; help lists their options in the order given."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def group(heading: str, *options: Decorator[Any]) -> Decorator[Any]:
    """Join decorators to one; help lists their options under that heading, where a command has many."""

    def decorate(command: Any) -> Any:
        n_before = len(getattr(command, "__click_params__", ()))  # where click keeps them until there is a command
        command = together(*options)(command)
        for param in command.__click_params__[n_before:]:
            HEADINGS[param] = heading
        return command

    return decorate


class ModelTask(NamedTuple):
    """What MODEL/TASK names."""

    model: str
    task: str

    def __str__(self) -> str:
        return f"{self.model}/{self.task}"


class Parsed(click.ParamType[Parameter]):
    """Reads an option with a function, whose ValueError says what is wrong; errors of ours pass through."""

    def __init__(self, name: str, parse: Callable[[str], Parameter]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Parameter:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except SwiftoptError:
            raise
        except ValueError as error:
            self.fail(str(error), param, ctx)


# --- completion in a shell


def files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of a file, which the shell does itself."""
    return [CompletionItem(incomplete, type="file")]


def folders(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of a folder, which the shell does itself."""
    return [CompletionItem(incomplete, type="dir")]


def models(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete a model's alias, else the name of a folder or a GGUF file."""
    from ..models.sources import ALIASES

    found = [CompletionItem(name, help=known.hub_id) for name, known in ALIASES.items() if name.startswith(incomplete)]
    return found or files(context, parameter, incomplete)


def methods(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of a decoding method."""
    from ..decoding.methods import METHODS

    return [CompletionItem(name, help=each.title) for name, each in METHODS.items() if name.startswith(incomplete)]


def strategies(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of a search strategy."""
    return [CompletionItem(name, help=each.help) for name, each in STRATEGIES.items() if name.startswith(incomplete)]


# --- options and arguments


def _model_task(text: str) -> ModelTask:
    """Split at the last slash, for a model may be a folder or a hub id."""
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

    records = import_file(file, lambda name: known.n_layers if (known := find_alias(name)) else None)
    if len(records) != 1:
        raise LayerSetError(f"{file} holds {len(records)} layer sets: import it, then choose one with --task")
    return records[0]


def _token_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ValueError(f"{text!r} is no bias: give a token id and a number, for example 50=-2.5") from None


positive = click.IntRange(min=1)
model_task = click.argument("name", type=Parsed("MODEL/TASK", _model_task), metavar="MODEL/TASK")
model = group(
    MACHINE,
    click.option(
        "--model",
        required=True,
        shell_complete=models,
        help="Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases.",
    ),
)


def _with_form(command: Any) -> Any:
    """Hand the options of a stream's form on as one value."""

    @functools.wraps(command)
    def call(*args: Any, template: str | None, shots: int | None, stop: tuple[str, ...], **values: Any) -> Any:
        return command(*args, form=StreamForm(template, shots, stop), **values)

    return call


def _use_template(context: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    """Make the template's length of an answer the default."""
    if name is not None:
        own = {"max_new_tokens": TEMPLATES[name].max_new_tokens}
        context.default_map = {**(context.default_map or {}), **own}
    return name


form = group(
    PROMPTS,
    click.option(
        "--template",
        metavar="NAME",
        is_eager=True,
        callback=_use_template,
        type=click.Choice([*TEMPLATES]),
        help=f"The file holds rows of a data set, asked, ended and judged as usual: {', '.join(TEMPLATES)}.",
    ),
    click.option("--shots", type=click.IntRange(min=0), help="Its first rows that are examples.  [default: as usual]"),
    click.option("--stop", multiple=True, metavar="STR", help="End before this text; may be repeated."),
    _with_form,
)
stream = group(
    PROMPTS,
    click.option(
        "--stream",
        required=True,
        metavar="FILE",
        shell_complete=files,
        help="Prompts, one JSON object per line; - is standard input.",
    ),
)
method = group(
    DRAFTING,
    click.option(
        "--method",
        type=Parsed("NAME", _method_name),
        shell_complete=methods,
        help="Overrule the stored plan; docs/methods.md lists the methods.",
    ),
)
draft_model = group(
    DRAFTING,
    click.option(
        "--draft-model",
        metavar="MODEL",
        shell_complete=models,
        help="A smaller model with the same tokenizer, for drafts.",
    ),
)
layer_set = group(
    DRAFTING,
    click.option(
        "--layer-set",
        type=Parsed("FILE", _layer_set),
        shell_complete=files,
        help="Draft with this exported layer set.",
    ),
)
limit = group(PROMPTS, click.option("--limit", type=positive, help="Take only the first prompts of the stream."))
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
db = group(
    SERVICES,
    click.option(
        "--db",
        metavar="URL|FILE",
        shell_complete=files,
        help="Database of layer sets: a file or an SQLAlchemy URL.  [default: in your data folder]",
    ),
)
redis = group(
    SERVICES, click.option("--redis", metavar="URL", help="Redis that delivers jobs.  [env: SWIFTOPT_REDIS_URL]")
)
server = group(
    SERVICES,
    click.option(
        "--server",
        metavar="URL",
        help="Server of jobs and layer sets; its key: SWIFTOPT_API_KEY.  [env: SWIFTOPT_SERVER_URL]",
    ),
)
queue = group(
    SERVICES,
    click.option(
        "--queue",
        type=Parsed("NAME", _queue_name),
        default=DEFAULT_QUEUE,
        show_default=False,
        help="Queue of the workers.  [env: SWIFTOPT_QUEUE; default: default]",
    ),
)


def pictures(help: str) -> Decorator[Any]:
    """Make --png and --svg; the command gets both as `pictures`, files that were found to be writable.

    A file that is not ends the command before it begins its work.
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

    def option(flag: str, help: str) -> Decorator[Any]:
        return click.option(flag, type=Path, metavar="FILE", shell_complete=files, help=help)

    return together(option("--png", help), option("--svg", "The same picture, as SVG."), decorate)


alias = click.option("--alias", default="best", help="Name of the choice.")


def default_of(values: type[Any], name: str) -> Any:
    """Return the default of a dataclass's field."""
    return next(field.default for field in dataclasses.fields(values) if field.name == name)


def from_field(values: type[Any], name: str, help: str, **more: Any) -> Decorator[Any]:
    """Make an option for a dataclass's field, with its type and default.

    A Literal of words becomes a choice, a truth value a flag: `--no-NAME` where it is on by default. `more` goes to
    `click.option`.
    """
    hint, default = get_type_hints(values)[name], default_of(values, name)
    flag, kinds = name.replace("_", "-"), get_args(hint) or (hint,)
    if hint is bool:
        return click.option(
            f"--no-{flag}" if default else f"--{flag}",
            name,
            flag_value=not default,
            default=default,
            show_default=False,
            help=help,
        )
    if "type" not in more and all(isinstance(kind, str) for kind in kinds):
        more["type"] = click.Choice(kinds)
    more.setdefault("type", next(kind for kind in kinds if kind is not NoneType))
    return click.option(f"--{flag}", name, default=default, help=help, **more)


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


threads = click.option(
    "--threads",
    type=click.IntRange(1, 255),
    expose_value=False,
    callback=_set_threads,
    help="Threads to compute with in this process.  [default: one per usable core]",
)
SHARED: dict[str, dict[str, Any]] = {  # what `from_field` is told of fields that several dataclasses have
    "dtype": {"help": "auto (as stored), float32, bfloat16 or float16."},
    "device": {"help": "auto, cpu, cuda, cuda:N, or auto-map for several GPUs."},
    "max_new_tokens": {"help": "Tokens per completion, where the stream's line says nothing.", "type": positive},
    "speed": {"help": "auto is native (our CPU kernels) where they work, else eager; the others are torch's."},
    "seed": {"help": "Seed of every random choice."},
}


SHARED_HEADINGS = {
    "dtype": MACHINE,
    "device": MACHINE,
    "speed": MACHINE,
    "max_new_tokens": PROMPTS,
    "seed": SAMPLING,
}


def shared(values: type[Any], *names: str) -> Decorator[Any]:
    """Make options for fields that several dataclasses have; `values` has the defaults."""
    return together(*(group(SHARED_HEADINGS[name], from_field(values, name, **SHARED[name])) for name in names))


def machine(values: type[Any], *more: str) -> Decorator[Any]:
    """Make the options for where a model runs, and `more` that are shared; `values` has the defaults."""
    return together(group(MACHINE, threads), shared(values, "dtype", "device", *more))


sampling = group(
    SAMPLING,
    from_field(Sampling, "temperature", "0 takes the most probable token."),
    from_field(Sampling, "top_p", "Draw from the most probable tokens that reach this mass."),
    from_field(Sampling, "top_k", "Draw from the k most probable tokens; 0 is off."),
    from_field(Sampling, "min_p", "Draw from tokens of at least this share of the most probable one's chance."),
    from_field(Sampling, "presence_penalty", "Taken off the logit of every token generated before; -2 to 2."),
    from_field(Sampling, "frequency_penalty", "Likewise, for each time that it was generated; -2 to 2."),
    click.option(
        "--logit-bias",
        multiple=True,
        type=Parsed("ID=BIAS", _token_bias),
        help="Added to a token's logit, -100 to 100; may be repeated.",
    ),
    shared(Sampling, "seed"),
)

_setting = functools.partial(from_field, TuningSettings)
searching = group(
    SEARCH,
    _setting("method", "What the layer set is to draft for; adaptive decides by measured time."),
    _setting(
        "draft_format",
        "Weights of what a draft keeps; auto: those that pay most here.",
        type=click.Choice([AUTO, *FORMATS, STORED]),
    ),
    _setting(
        "strategy",
        f"Who proposes layer sets: {'; '.join(f'{name} ({recipe.help})' for name, recipe in STRATEGIES.items())}.",
        shell_complete=strategies,
    ),
    _setting("objective", "What a layer set is scored by."),
    _setting("exportable", "Keep to sets that `swiftopt export` writes for other engines as they are."),
    _setting(
        "skip_ratio", "r, from 0 to 1, where the strategy leaves the size to it.  [default: 0.45, 0.5 from 34B on]"
    ),
    _setting("context_window", "γ, generated tokens that score a layer set."),
    _setting("max_steps", f"S, candidates to try at most; {', '.join(SIZE_CHOOSING)} stop at {MOST} for themselves."),
    _setting(
        "optimise",
        "Keep what a search starts from: nothing left out of quantised drafts, else evenly spaced sub-layers.",
    ),
    _setting("deterministic", "Wait for late suggestions: the same seed then gives the same trials."),
)


def _branching(text: str) -> Branching:
    """Read confidences and candidates such as 0.5:10,0.8:5,1:1."""
    try:
        pairs = [pair.split(":") for pair in text.split(",")]
        return tuple((float(bound), int(k)) for bound, k in pairs)
    except ValueError:
        raise ValueError(f"{text!r} is no branching: give CONFIDENCE:CANDIDATES pairs like 0.5:10,0.8:5,1:1") from None


def _use_preset(context: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    """Make a preset's values the defaults of the command's options; those of its command line win."""
    if name is not None and (preset := preset_of(name)).is_tuned:
        context.default_map = {**(context.default_map or {}), **preset.tuning}
    return name


preset = group(
    SEARCH,
    click.option(
        "--preset",
        metavar="NAME",
        type=click.Choice([*PRESETS]),
        is_eager=True,
        callback=_use_preset,
        help=f"A paper's method with each of its numbers, but for options beside it: {', '.join(PRESETS)}.",
    ),
)
swift_drafts = group(
    "SWIFT's drafts, with --method swift",
    _setting("stop_threshold", "ε, confidence below which a draft stops."),
    _setting("max_draft_length", "N_D, steps of a draft."),
    _setting("early_stop", "Drafts always have N_D tokens."),
    _setting("dynamic_verification", "Drafts are chains, not trees."),
    _setting(
        "branching",
        "k: candidates that a position offers up to each confidence.  [default: 0.5:10,0.8:5,0.95:3,1:1]",
        type=Parsed("CONFIDENCE:K,...", _branching),
        show_default=False,
    ),
    _setting("sampled", "With --temperature: draw drafts and weigh them, instead of their most probable tokens."),
    _setting("search_drafting", "Keep ε, N_D and k as given, instead of choosing them by time."),
)
published = group(
    "SWIFT's search, as --preset swift sets it",
    _setting("bayes_interval", "β, candidates from one suggestion of the Gaussian process to the next."),
    _setting("patience", "Candidates without a better one that end the search."),
    _setting("target_matchness", "Matchness above which the search ends, where the strategy keeps to r."),
    _setting("adoption", "What makes a set the one in use: several windows, or the highest score so far."),
    _setting("window_at", "Which γ tokens of a completion score a set."),
    _setting("optimise_interval", "Rounds from one pass of candidates to the next."),
    _setting("candidates", "Candidates of one pass.  [default: as many as measured costs make cheap]", type=positive),
    _setting("min_acceptance", "α below which r is lowered."),
    _setting("min_acceptance_rounds", "Rounds that α must stay below it."),
    _setting("skip_ratio_step", "What r is lowered by."),
)
settings = together(preset, searching, swift_drafts, published)


class Idle(NamedTuple):
    """A setting that has no effect with settings of which `when` is true; `words` say so, with settings' values."""

    name: str
    when: Callable[[SwiftSettings], bool]
    words: str


def _chooses_size(own: SwiftSettings) -> bool:
    return own.strategy in SIZE_CHOOSING and own.objective == "expected_speedup"


_ADAPTIVE = "has no effect with --method adaptive, whose drafts end by measured time: it is for --method swift"
_NO_SEARCH = "has no effect with --no-optimise, which searches for no layer set"
IDLE = (
    *(
        Idle(name, lambda own: own.method == "adaptive", _ADAPTIVE)
        for name in ("stop_threshold", "max_draft_length", "early_stop", "dynamic_verification", "search_drafting")
    ),
    Idle(
        "stop_threshold",
        lambda own: not own.early_stop,
        "has no effect with --no-early-stop, with which every draft has its full length: leave one of them out",
    ),
    Idle(
        "search_drafting",
        lambda own: own.objective == "matchness",
        "has no effect with --objective matchness, with which ε, N_D and k are kept anyway",
    ),
    *(
        Idle(name, lambda own: not own.optimise, _NO_SEARCH)
        for name in ("max_steps", "deterministic", "search_drafting")
    ),
    # without a search the set that it would start from is used, whose size is the ratio's where it is not quantised
    Idle(
        "skip_ratio",
        lambda own: _chooses_size(own) and (own.optimise or own.draft_format in FORMATS),
        "does not set the size with --strategy {strategy}, which measures what pays: --strategy swift takes it",
    ),
    Idle(
        "max_steps",
        lambda own: own.strategy in SIZE_CHOOSING and own.max_steps > MOST,
        f"has no effect above {MOST} with --strategy {{strategy}}, which ends there: --strategy swift goes on",
    ),
    Idle(
        "deterministic",
        lambda own: own.strategy in STRATEGIES and not strategy_info(own.strategy).suggests,
        "has no effect with --strategy {strategy}, which waits for no suggestions",
    ),
)


def on_command_line(name: str) -> bool:
    """Return whether the running command got an option from its command line itself."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def warn_idle(settings: SwiftSettings, *used: str) -> None:
    """Say of each option of the command line that it has no effect with the other settings; others pass silently.

    Args: used: settings that the running command uses all the same.
    """
    flags = {param.name: param.opts[0] for param in click.get_current_context().command.params}
    warned = set(used)
    for name, when, words in IDLE:
        if name not in warned and on_command_line(name) and when(settings):
            warned.add(name)
            note(f"warning: {flags[name]} {words.format(strategy=settings.strategy)}")


def pick(values: type[Any], options: dict[str, Any]) -> Any:
    """Make a dataclass from those options that are its fields.

    Raises: SettingsError: a value is out of its range.
    """
    names = {field.name for field in dataclasses.fields(values)}
    return values(**{name: value for name, value in options.items() if name in names})


def decoding_request(values: dict[str, Any]) -> GenerateRequest:
    """Make the request of a command that decodes, with its sampling.

    Raises: SwiftoptError: a value is out of its range, the name of model, dtype or device is unknown, or the model's
        architecture is not supported.
    """
    request: GenerateRequest = pick(GenerateRequest, {**values, "sampling": pick(Sampling, values)})
    check_model(request)
    return request


def check_model(request: ModelRequest) -> None:
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


def json(command: Any) -> Any:
    """Add --json to a command that returns a `Result`, and print it as the option says."""

    @functools.wraps(command)
    def call(*args: Any, as_json: bool, **values: Any) -> int:
        result: Result = command(*args, **values)
        return result.print(as_json)

    return as_json(call)
