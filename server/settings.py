"""What a server is told when it starts: API keys, folders of streams, limits.

Of keys only the hashes are known here; several are valid at a time, and their file is read again when it changes.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..core.errors import SettingsError

VARIABLE = "SWIFTOPT_API_KEYS"
FILE_VARIABLE = "SWIFTOPT_API_KEYS_FILE"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
FOLDERS_VARIABLE = "SWIFTOPT_STREAM_FOLDERS"
MIB = 1024 * 1024

logger = logging.getLogger(__name__)


def new_key(name: str) -> tuple[str, str]:
    """Return a fresh key, and the entry `name:sha256hex` that lets it in.

    Raises: SettingsError: the name is none.
    """
    if not _NAME.fullmatch(name):
        raise SettingsError(f"the key name {name!r} is no name: use up to 64 letters, digits and -_.")
    key = f"swiftopt-{secrets.token_urlsafe(32)}"
    return key, f"{name}:{_hash(key)}"


class Key(NamedTuple):
    """An entry: the hash of a key, and the task of its completions where a request names none."""

    hashed: str
    task: str | None


class KeyRing:
    """Entries of the environment and of a file; `file` is read again when it changes.

    Raises: SettingsError: an entry is no `name:sha256hex` or `name:sha256hex:task`, or the file cannot be read.
    """

    def __init__(self, entries: str = "", file: Path | None = None) -> None:
        self._fixed, self._file = _parse(entries.split(","), VARIABLE), file
        self._stamp, self._filed = ((0, 0, 0), {}) if file is None else _read(file)

    @classmethod
    def from_environment(cls) -> KeyRing:
        """Return the keys that the two variables name."""
        file = os.environ.get(FILE_VARIABLE)
        return cls(os.environ.get(VARIABLE, ""), Path(file) if file else None)

    @property
    def required(self) -> bool:
        """Return whether requests need a key; an empty key file lets nobody in."""
        return self._file is not None or bool(self._fixed)

    @property
    def empty(self) -> bool:
        """Return whether there is no key at all."""
        return not self._fixed and not self._filed

    def owner(self, key: str) -> str | None:
        """Return the name of the key's entry, None for a wrong key, after the same time in either case."""
        self._refresh()
        given, found = _hash(key), None
        for name, entry in [*self._fixed.items(), *self._filed.items()]:
            if hmac.compare_digest(entry.hashed, given):
                found = name
        return found

    def hashed(self, name: str | None) -> str | None:
        """Return the hash of an entry's key, None where there is no such entry."""
        self._refresh()
        known = {**self._fixed, **self._filed}.get(name or "")
        return None if known is None else known.hashed

    def task(self, name: str | None) -> str | None:
        """Return the task of the completions that an entry's key asks for, if it has one."""
        known = {**self._fixed, **self._filed}.get(name or "")
        return None if known is None else known.task

    def _refresh(self) -> None:
        """Read the file again if it changed; one that cannot be read leaves the last good entries in force."""
        if self._file is None:
            return
        try:
            if _stamp(self._file) != self._stamp:
                self._stamp, self._filed = _read(self._file)
                logger.info("keys=read file=%s n=%d", self._file, len(self._filed))
        except (OSError, SettingsError) as error:
            logger.warning("keys=kept reason=%r", str(error))


def _read(file: Path) -> tuple[tuple[int, int, int], dict[str, Key]]:
    try:
        stamp, text = _stamp(file), file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SettingsError(
            f"the key file {file} cannot be read ({reason}): check {FILE_VARIABLE} and permissions"
        ) from error
    return stamp, _parse((line.partition("#")[0] for line in text.splitlines()), str(file))


def _stamp(file: Path) -> tuple[int, int, int]:
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _parse(entries: Iterable[str], where: str) -> dict[str, Key]:
    found: dict[str, Key] = {}
    for number, entry in enumerate(entries, start=1):
        if not entry.strip():
            continue
        name, hashed, task = [*map(str.strip, entry.split(":", 2)), "", ""][:3]
        if not _NAME.fullmatch(name) or not _HASH.fullmatch(hashed.lower()) or (task and not _NAME.fullmatch(task)):
            raise SettingsError(  # the entry itself may be a key that was put there by mistake
                f"entry {number} of {where} is no name:sha256hex or name:sha256hex:task: make one with"
                " `swiftopt serve --new-key NAME`"
            )
        found[name] = Key(hashed.lower(), task or None)
    return found


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`stream_folders` hold the streams that a job may name; `requests_per_min` and `tokens_per_min`, of prompts
    and completions, hold for each caller, 0 means no limit; `max_waiting` completions may wait per model, beside those
    that run; at its end the server waits `drain_s` seconds for them.

    Look-ups of single layer sets, health and metrics are not counted against the limit.
    """

    keys: KeyRing = field(default_factory=KeyRing)
    stream_folders: tuple[Path, ...] = ()
    max_body_bytes: int = 32 * MIB
    requests_per_min: int = 600
    tokens_per_min: int = 0
    max_waiting: int = 64
    drain_s: int = 30
    timeout_s: float = 600.0  # of a completion, waiting included


def stream_folders(named: Sequence[str] = ()) -> tuple[Path, ...]:
    """Return the folders named, or those of the environment variable.

    Raises: SettingsError: one of them is no folder.
    """
    listed = list(named) or [part for part in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if part]
    for folder in listed:
        if not os.path.isdir(folder):
            raise SettingsError(f"the stream folder {folder} is no folder: create it, or name another")
    return tuple(Path(folder).resolve() for folder in listed)
