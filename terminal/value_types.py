"""Types of the values of options and arguments, and what a shell completes them to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

from ..core.errors import LayerSetError, SwiftoptError
from ..core.records import LayerSetRecord
from ..core.serialization import LARGEST
from ..core.streams import EMPTY_STOP

Parameter = TypeVar("Parameter")
Completer = Callable[[str], list[CompletionItem[str]]]  # Maps an incomplete value to the shell's completions.


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


def complete_name(incomplete: str, help_by_name: Mapping[str, str]) -> list[CompletionItem[str]]:
    """Complete one of the known names, each with its help."""
    return [CompletionItem(name, help=help) for name, help in help_by_name.items() if name.startswith(incomplete)]


def _models(incomplete: str) -> list[CompletionItem[str]]:
    """Complete a model's alias; if none matches, a folder or GGUF file."""
    from ..models.sources import ALIASES

    return complete_name(incomplete, {name: alias.hub_id for name, alias in ALIASES.items()}) or _files(incomplete)


def _methods(incomplete: str) -> list[CompletionItem[str]]:
    from ..decoding.methods import METHODS

    return complete_name(incomplete, {name: method.title for name, method in METHODS.items()})


def _model_task(text: str) -> ModelTask:
    """Split MODEL/TASK at the last slash: a folder or hub id may itself contain slashes."""
    model, _, task = text.rpartition("/")
    if not model or not task:
        raise ValueError(f"{text!r} lacks a model or a task: use MODEL/TASK, for example smollm2-135m/notes")
    return ModelTask(model, task)


def _queue_name(text: str) -> str:
    """Return a name that the server and Redis accept for a queue as well."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text):
        raise ValueError(f"{text!r} is not a queue name: use up to 64 letters, digits, '-', '_' and '.'")
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
        raise LayerSetError(f"{file} contains {len(records)} layer sets: import it, then choose one with --task")
    return records[0]


def _token_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ValueError(f"{text!r} is not a bias: use a token id and a number, for example 50=-2.5") from None


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
MODEL_TASK = Parsed("MODEL/TASK", _model_task)
STOP = Parsed("STR", _stop)
LAYER_SET = Parsed("FILE", _layer_set, _files)
QUEUE = Parsed("NAME", _queue_name)
TOKEN_BIAS = Parsed("ID=BIAS", _token_bias)
METHOD = Parsed("NAME", _method_name, _methods)
