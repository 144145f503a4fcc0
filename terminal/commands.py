"""Commands of the command line: their groups, their --help, and how options are added to them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import click

from ..core.wings import WingCommand, wings
from ..core.wings import load as load_from_wing

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Command], Command]


# Headings of --help for commands with many options.
COMMON, MAIN, PROMPTS, MACHINE = "Common options", "Main options", "Prompts and completions", "Model and machine"
DRAFTING, SAMPLING, SEARCH, SERVICES = "Drafting", "Sampling", "Search", "Jobs and database"
MEASUREMENT, ENGINES = "Measurement", "Other engines"
OTHER = "Other options"
# Key of `Context.meta`: true if help lists all options instead of only the common ones.
ALL_OPTIONS = "swiftopt.all-options"
MANY = 12  # Number of options from which --help groups them under headings.
N_MAIN = 3  # The first N_MAIN declared options are listed as main options.


class HeadedOption(click.Option):
    """An option with the heading under which --help lists it if the command has many options."""

    def __init__(self, *names: Any, heading: str = OTHER, **option_settings: Any) -> None:
        super().__init__(*names, **option_settings)
        self.heading = heading


class GroupedCommand(click.Command):
    """A command whose --help groups many options under headings, the main ones first.

    If `common` names parameters, `--help` lists only these, in that order, and `--help-all` lists all.
    """

    def __init__(self, *args: Any, common: str = "", **command_settings: Any) -> None:
        super().__init__(*args, **command_settings)
        self.common = common.split()

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *([_HELP_ALL] if self.common else [])]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        visible = self._shown_options(ctx)
        if self.common and not ctx.meta.get(ALL_OPTIONS):
            by_name = {param.name: param for param in visible}
            # Options of wings may not be installed. The last two options are --help-all and --help.
            listed_options = [*(by_name[name] for name in self.common if name in by_name), *visible[-2:]]
            self._write(ctx, formatter, COMMON, listed_options)
            n_more = len(visible) - len(listed_options)
            formatter.write_paragraph()
            formatter.write_text(f"{n_more} more options: {ctx.command_path} --help-all")
            return
        if len(visible) < MANY:
            return super().format_options(ctx, formatter)
        sections: dict[str, list[click.Option]] = {MAIN: visible[:N_MAIN]}
        for param in visible[N_MAIN:]:
            sections.setdefault(getattr(param, "heading", OTHER), []).append(param)
        other_options = sections.pop(OTHER)  # Never empty: --help has no heading.
        for heading, params in [*sections.items(), (OTHER, other_options)]:
            self._write(ctx, formatter, heading, params)

    def _shown_options(self, ctx: click.Context) -> list[click.Option]:
        """Return the options that are not hidden."""
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        return [param for param in params if param.get_help_record(ctx) is not None]

    def _write(
        self, ctx: click.Context, formatter: click.HelpFormatter, heading: str, params: Sequence[click.Option]
    ) -> None:
        with formatter.section(heading):
            formatter.write_dl([record for param in params if (record := param.get_help_record(ctx))])


def _show_all(context: click.Context, parameter: click.Parameter, is_requested: bool) -> None:
    if is_requested and not context.resilient_parsing:
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
        wing_commands = self._of_wings().values()
        return [
            name
            for name_before in names
            for name in (
                name_before,
                *(wing_command.name for wing_command in wing_commands if wing_command.after == name_before),
            )
        ]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (wing_command := self._of_wings().get(cmd_name)) is None:
            return super().get_command(ctx, cmd_name)
        command: click.Command = load_from_wing(wing_command.reference)
        return command

    def _of_wings(self) -> dict[str, WingCommand]:
        return {
            wing_command.name: wing_command
            for wing in wings()
            for wing_command in wing.commands
            if wing_command.group == self.name
        }

    def invoke(self, ctx: click.Context) -> Any:
        configured = ctx.default_map or {}
        ctx.default_map = {name: configured for name in self.list_commands(ctx)}
        return super().invoke(ctx)


def command(name: str | None = None, **command_settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command outside any group; `command_settings` goes to `click.command`."""
    return click.command(name, cls=GroupedCommand, **command_settings)


def together(*options: Decorator[Any]) -> Decorator[Any]:
    """Combine decorators into one; --help lists their options in the given order."""
    return lambda command: functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


def of_wings(command: str) -> Decorator[Any]:
    """Add the options that wings declare for a command, such as `engines` for `tune`."""
    return together(*(load_from_wing(wing.options[command]) for wing in wings() if command in wing.options))


def example(*lines: str, help: str | None = None) -> Decorator[Any]:
    """Add command lines, each without `swiftopt`, to a command's help, which is `help` or else its docstring."""
    text = "".join(f"\n  swiftopt {line}" for line in lines)

    def add(command: Any) -> Any:
        command.__doc__ = f"{help or inspect.cleandoc(command.__doc__)}\n\n\b\nExample:{text}"
        return command

    return add


def option(heading: str, *names: str, **option_settings: Any) -> Decorator[Any]:
    """Make an option that help lists under `heading`; `option_settings` goes to `click.option`."""
    return click.option(*names, cls=HeadedOption, heading=heading, **option_settings)


measurement = functools.partial(option, MEASUREMENT)


def default_of(values: type[Any], name: str) -> Any:
    return next(field.default for field in fields(values) if field.name == name)


def from_field(heading: str, values: type[Any], name: str, help: str, **option_settings: Any) -> Decorator[Any]:
    """Make an option for a dataclass's field, with its type and default.

    A Literal of words becomes a choice, a truth value a flag: `--no-NAME` where it is on by default.
    `option_settings` goes to `click.option`.
    """
    hint, default = get_type_hints(values)[name], default_of(values, name)
    flag, kinds = name.replace("_", "-"), get_args(hint) or (hint,)
    if hint is bool:
        flag = f"no-{flag}" if default else flag
        option_settings |= {"flag_value": not default, "show_default": False}
    elif "type" not in option_settings:
        is_choice = all(isinstance(kind, str) for kind in kinds)
        option_settings["type"] = (
            click.Choice(kinds) if is_choice else next(kind for kind in kinds if kind is not NoneType)
        )
    return option(heading, f"--{flag}", name, default=default, help=help, **option_settings)
