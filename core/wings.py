"""Wings: packages next to the floors, which add commands, methods, presets and parts, and which may be left out.

A folder of the package with a module `wing.py` is a wing; that module defines a `WING`, and imports little. No floor
imports a wing: this module lists what the installed wings offer, and loads an object by its reference when needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True, slots=True)
class WingCommand:
    """A command of a wing, and the command of its group after which help lists it; the top group is "swiftopt"."""

    group: str
    name: str
    after: str
    reference: str


@dataclass(frozen=True, slots=True)
class WingPart:
    """A part of methods that a wing creates: weights of some kind, or the layer set of a method with its own search.

    command: the command that creates it in full, without `swiftopt`. maker: a function of `MakingRecipes` and a preset
    or None, which returns the record of the created part. reader: for weights, a function of kind, bytes and runtime.
    """

    command: str
    maker: str
    reader: str = ""


@dataclass(frozen=True, slots=True)
class Wing:
    """The additions of a wing. A reference is "package.module:name" within swiftopt, so listing a wing loads no code.

    methods: a package whose files register methods. presets: a mapping of presets by name. parts: by kind of weights,
    or by the method whose layer set it is. options: decorators that add options to a floor's command, by its name.
    tunings: functions of pictures and of the values of `tune`'s options, which return None if the options do not
    select that kind of tuning.
    """

    commands: tuple[WingCommand, ...] = ()
    methods: str = ""
    presets: str = ""
    parts: Mapping[str, WingPart] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    tunings: tuple[str, ...] = ()


@cache
def wings() -> tuple[Wing, ...]:
    """Return the installed wings, sorted by folder name."""
    folders = sorted(path.parent.name for path in Path(__file__).parents[1].glob("*/wing.py"))
    return tuple(import_module(f"{PACKAGE}.{folder}.wing").WING for folder in folders)


def parts() -> dict[str, WingPart]:
    """Return the parts of all installed wings."""
    return {name: part for wing in wings() for name, part in wing.parts.items()}


def load(reference: str) -> Any:
    """Import and return the object of a reference "package.module:name"."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(f"{PACKAGE}.{module}"), attribute)
