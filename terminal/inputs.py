"""Builds requests, loaded models and databases from the values of options. Importing this loads no torch."""

from __future__ import annotations

import importlib.util
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

import click
from click.core import ParameterSource

from ..core.errors import SettingsError
from ..core.requests import GenerateRequest, ModelRequest
from .output import StepNotes

if TYPE_CHECKING:
    from ..models.runtime import Runtime
    from ..store import Store


def on_command_line(name: str) -> bool:
    """Return whether an option was given on the command line, not by a default or the configuration."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def pick(values: type[Any], options: dict[str, Any]) -> Any:
    """Build a dataclass from the options named like its fields; nested dataclasses are built in the same way.

    Raises: SettingsError: a value is out of its range.
    """
    hints = {field.name: get_type_hints(values)[field.name] for field in fields(values)}
    nested = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    nested_records = {name: pick(hint, options) for name, hint in nested.items() if name not in options}
    return values(**{name: value for name, value in {**nested_records, **options}.items() if name in hints})


def decoding_request(values: dict[str, Any], *other_models: str | None) -> GenerateRequest:
    """Make the request of a command that decodes, with its sampling; `other_models` as for `check_model`.

    Raises: SwiftoptError: a value is out of its range, the name of model, dtype or device is unknown, or the model's
        architecture is not supported.
    """
    request: GenerateRequest = pick(GenerateRequest, values)
    check_model(request, request.draft_model, *other_models)
    return request


def check_model(request: ModelRequest, *other_models: str | None) -> None:
    """Check the names of model, dtype and device, and of `other_models`: models, if any, that are loaded likewise.

    Raises: SwiftoptError: one of them is unknown, or the model's architecture is not supported.
    """
    from ..models.sources import check_names

    for name in filter(None, (request.model, *other_models)):
        check_names(name, request.dtype, request.device, request.speed)


def lacks(package: str) -> str:
    """Return an error message on a missing package, with advice; the API-only Docker image lacks many packages."""
    return (
        f"{package} is not installed here, and this command needs it: pip install swiftopt with its dependencies, or"
        " use the image that has models"
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
