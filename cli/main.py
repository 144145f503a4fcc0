"""The program `swiftopt`: reads the configuration, and imports a command when it is called.

Values of options come from the command line, `SWIFTOPT_*` in the environment, ./swiftopt.toml, and their defaults.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from keyword import iskeyword
from typing import Any, NoReturn

import click
from pydantic import AliasChoices, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from .. import __version__
from ..core.errors import SettingsError
from ..terminal import commands, program
from ..terminal.commands import ConfiguredGroup
from ..terminal.output import note

NAME = "swiftopt"
MODULES = {  # Module of each command, in the order of --help; wings insert theirs.
    "tune": "jobs",
    "generate": "generate",
    "chat": "generate",
    "compare": "compare",
    "layers": "layers",
    "models": "layers",
    "jobs": "jobs",
    "worker": "services",
    "serve": "services",
    "db": "services",
    "doctor": "doctor",
    "completion": "reference",
}
TOML_FILE = "swiftopt.toml"
PREFIX = "SWIFTOPT_"
# Variables read directly by the code that uses them, so `ProgramSettings` has no fields for them.
OTHER_VARIABLES = (
    "API_KEY",
    "API_KEYS",
    "API_KEYS_FILE",
    "CACHE_DIR",
    "STREAM_FOLDERS",
    "MODEL_FOLDERS",
    "DATABASE_URL_FILE",
    "REDIS_URL_FILE",
)
LIKE = 0.8  # Name similarity (0 to 1) from which an unknown variable counts as misspelt.
LONG_NAMES = {"db": "SWIFTOPT_DATABASE_URL", "redis": "SWIFTOPT_REDIS_URL", "server": "SWIFTOPT_SERVER_URL"}


# --- the configuration


def _field_with_names(long_name: str, short_name: str) -> Any:
    """Make a setting with two names, of which other programs use the long one, too (DATABASE_URL)."""
    names = (f"{PREFIX}{long_name.upper()}", f"{PREFIX}{short_name.upper()}", long_name, short_name)
    return Field(default=None, validation_alias=AliasChoices(*names))


class ProgramSettings(BaseSettings):
    """Defaults of the options of the same names, set by environment variables or swiftopt.toml.

    None means not set. The dataclasses built from these values check their ranges.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, toml_file=TOML_FILE, extra="forbid", populate_by_name=True)

    db: str | None = _field_with_names("database_url", "db")
    redis: str | None = _field_with_names("redis_url", "redis")
    server: str | None = _field_with_names("server_url", "server")
    queue: str | None = None
    log_format: str | None = None
    model: str | None = None
    dtype: str | None = None
    device: str | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    strategy: str | None = None
    objective: str | None = None
    skip_ratio: float | None = None
    context_window: int | None = None
    max_steps: int | None = None
    stop_threshold: float | None = None
    max_draft_length: int | None = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        *sources: PydanticBaseSettingsSource,
        **named_sources: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read environment variables first, then the TOML file; pydantic's other sources are unused."""
        return named_sources["env_settings"], TomlConfigSettingsSource(settings_cls)


def load_settings() -> dict[str, Any]:
    """Return the configured values by option name, without those that are not set.

    Raises: SettingsError: the file is broken or has an unknown key, or a value is of the wrong type.
    """
    try:
        return ProgramSettings().model_dump(exclude_none=True)
    except UnicodeDecodeError as error:
        raise SettingsError(f"{TOML_FILE} is not UTF-8 text; correct or remove it") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{TOML_FILE} is not valid TOML: {error}; correct or remove it") from error
    except OSError as error:
        raise SettingsError(f"{TOML_FILE} cannot be read: {error.strerror}; correct its permissions") from error
    except ValidationError as error:
        first_error = error.errors()[0]
        raise SettingsError(
            _sentence(str(first_error["loc"][0]), first_error["type"], first_error["msg"], first_error["input"])
        ) from error


def warn_misspelt(environment: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each variable whose name is close to a known one, since it would be ignored."""
    names = [*(name.removeprefix(PREFIX) for name in LONG_NAMES.values()), *OTHER_VARIABLES]
    names += [name.upper() for name in ProgramSettings.model_fields]
    for name in sorted(environment):
        unprefixed = name.removeprefix(PREFIX)
        if unprefixed == name or unprefixed in names or unprefixed.startswith("TEST_"):
            continue
        close_names = difflib.get_close_matches(unprefixed, names, n=1, cutoff=LIKE)
        if close_names:
            yield f"the variable {name} is unknown and ignored: did you mean {PREFIX}{close_names[0]}?"


def _sentence(key: str, kind: str, message: str, value: object) -> str:
    if kind == "extra_forbidden":
        names = sorted(ProgramSettings.model_fields)
        close_names = difflib.get_close_matches(key, names, n=1)
        advice = f"did you mean {close_names[0]!r}?" if close_names else f"known are {', '.join(names)}"
        return f"{TOML_FILE} has the unknown key {key!r}: {advice}"
    variable = key if key.startswith(PREFIX) else PREFIX + key.upper()
    source = variable if variable in os.environ else f"{key} in {TOML_FILE}"
    return f"{source} is {value!r}, which cannot be used: {message[0].lower()}{message[1:]}"


# --- the program


class LazyGroup(ConfiguredGroup):
    """Group that imports a command's module only when the command runs or help lists it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return self.among_wings(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return super().get_command(ctx, cmd_name)
        module = import_module(f".{MODULES[cmd_name]}", __package__)
        command: click.Command = getattr(module, cmd_name + "_" * iskeyword(cmd_name))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            names = self.list_commands(ctx)
            raise click.exceptions.NoSuchCommand(error.command_name, possibilities=names, ctx=ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        ctx.default_map = load_settings()
        for remark in warn_misspelt(os.environ):
            note(f"note: {remark}")
        return super().invoke(ctx)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(__version__, prog_name=NAME)
@click.option("--no-color", is_flag=True, help="No colours; the variable NO_COLOR does the same.")
@click.pass_context
@commands.example(
    "tune --model smollm2-135m --stream prompts.jsonl --task notes",
    'generate --model smollm2-135m --task notes --prompt "Once upon a time"',
)
def swiftopt(context: click.Context, no_color: bool) -> None:
    """Find the sub-layers that a language model can skip while drafting, and decode losslessly faster.

    Results go to stdout, progress and warnings to stderr. Options override SWIFTOPT_* variables, these override
    ./swiftopt.toml, and that overrides the defaults.
    """
    if no_color or os.environ.get("NO_COLOR"):
        context.color = False


def run(args: Sequence[str]) -> int:
    """Run one command line of `swiftopt`, as `program.run`."""
    return program.run(swiftopt, args, NAME)


def main() -> NoReturn:
    """Run the console script."""
    program.main(swiftopt, NAME)
