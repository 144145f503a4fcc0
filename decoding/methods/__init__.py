"""All decoding methods by name, found in the files of this package; no torch until one is built."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ...core.errors import SettingsError
from .chains import swift
from .registry import PLAIN, REGISTERED, Method, MethodInfo, Resources

__all__ = ["METHODS", "PLAIN", "Method", "MethodInfo", "Resources", "build", "method_info", "swift"]

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")


def _place(info: MethodInfo) -> tuple[bool, bool, str]:
    """Plain decoding comes first and lossy methods last, families by their files' names, each in its file's order."""
    return info.name != "plain", info.lossy, info.builder.__module__


METHODS: dict[str, MethodInfo] = {info.name: info for info in sorted(REGISTERED, key=_place)}


def method_info(name: str) -> MethodInfo:
    """Return a method's row.

    Raises: SettingsError: there is no such method; names the nearest.
    """
    if name not in METHODS:
        nearest = get_close_matches(name, METHODS, n=1, cutoff=0.0)[0]
        raise SettingsError(f"there is no method {name!r} (nearest: {nearest}): known are {', '.join(METHODS)}")
    return METHODS[name]


def build(name: str, resources: Resources, settings: Any = None) -> Method:
    """Build a method by name.

    Args:   settings: an object of the method's settings class; None: the defaults.
    Raises: SettingsError: there is no such method, or a resource is missing. UnsupportedModel: the model cannot run it.
    """
    info = method_info(name)
    drafter, verifier = info.builder(resources, info.settings() if settings is None else settings)
    return Method(name, drafter, verifier)
