"""What a server is told when it starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..core.errors import SettingsError
from .keys import KeyRing

FOLDERS_VARIABLE = "SWIFTOPT_STREAM_FOLDERS"
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`stream_folders` hold the streams that a job may name; `requests_per_min` 0 means no limit.

    Look-ups of single layer sets, health and metrics are not counted against the limit.
    """

    keys: KeyRing = field(default_factory=KeyRing)
    stream_folders: tuple[Path, ...] = ()
    max_body_bytes: int = 32 * MIB
    requests_per_min: int = 600


def stream_folders(named: Sequence[str] = ()) -> tuple[Path, ...]:
    """The folders named, or those of the environment variable.

    Raises: SettingsError: one of them is no folder.
    """
    listed = list(named) or [part for part in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if part]
    for folder in listed:
        if not os.path.isdir(folder):
            raise SettingsError(f"the stream folder {folder} is no folder: create it, or name another")
    return tuple(Path(folder).resolve() for folder in listed)
