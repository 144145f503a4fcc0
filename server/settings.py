"""Settings of a server: API keys, stream folders, limits.

The server knows only the hashes of keys. Several keys may be valid, and a changed key file is read again.
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
from ..core.logs import Outage

VARIABLE = "SWIFTOPT_API_KEYS"
FILE_VARIABLE = "SWIFTOPT_API_KEYS_FILE"
FOLDERS_VARIABLE = "SWIFTOPT_STREAM_FOLDERS"
ADMIN = "admin"  # Role in a key's entry.
MIB = 1024 * 1024
# Path prefixes of routes that need an API key if keys are configured.
GUARDED = ("/v1/", "/tokenize", "/detokenize")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")

logger = logging.getLogger(__name__)


def new_key(name: str) -> tuple[str, str]:
    """Return a new random key, and its entry `name:sha256hex`.

    Raises: SettingsError: the name cannot be used.
    """
    if not _NAME.fullmatch(name):
        raise SettingsError(f"the key name {name!r} is not valid: use up to 64 letters, digits and -_.")
    key = f"swiftopt-{secrets.token_urlsafe(32)}"
    return key, f"{name}:{_hash(key)}"


class Key(NamedTuple):
    """A key's entry; `task` is the default task of its requests. An admin's key may read the usage of all keys."""

    name: str
    hashed: str
    task: str | None
    is_admin: bool = False


class KeyRing:
    """The keys of an environment variable and of a file, which is read again when it changes.

    Raises: SettingsError: an entry is not `name:sha256hex[:task][:admin]`, or the file cannot be read.
    """

    def __init__(self, entries: str = "", file: Path | None = None) -> None:
        self._variable_keys, self._file = _parse(entries.split(","), VARIABLE), file
        self._stamp, self._file_keys = ((0, 0, 0), []) if file is None else _read(file)
        self._outage = Outage(logger, "keys=kept", "keys=current")

    @classmethod
    def from_environment(cls) -> KeyRing:
        """Return the keys of the two environment variables."""
        file = os.environ.get(FILE_VARIABLE)
        return cls(os.environ.get(VARIABLE, ""), Path(file) if file else None)

    @property
    def required(self) -> bool:
        """Whether requests need a key. With an empty key file, every request is refused."""
        return self._file is not None or bool(self._variable_keys)

    @property
    def empty(self) -> bool:
        """Whether there is no key at all."""
        return not self._variable_keys and not self._file_keys

    def names(self) -> tuple[str, ...] | None:
        """Return the names of all valid keys; None if requests need no key."""
        return tuple(dict.fromkeys(entry.name for entry in self._entries())) if self.required else None

    def owner(self, key: str) -> str | None:
        """Return the name of the key's entry, or None for a wrong key; both take the same time."""
        key_hash, owner_name = _hash(key), None
        for entry in self._entries():
            if hmac.compare_digest(entry.hashed, key_hash):
                owner_name = entry.name
        return owner_name

    def find(self, name: str | None) -> Key | None:
        """Return the last entry with this name; None: there is none."""
        return next((entry for entry in reversed(self._entries()) if entry.name == name), None)

    def _entries(self) -> list[Key]:
        """Return all entries. A changed file is read again; if it cannot be read, its last entries stay valid."""
        try:
            if self._file is not None and _stamp(self._file) != self._stamp:
                self._stamp, self._file_keys = _read(self._file)
                logger.info("keys=read file=%s n=%d", self._file, len(self._file_keys))
            self._outage.over()
        except (OSError, SettingsError) as error:
            self._outage.failed(error)
        return self._variable_keys + self._file_keys


def _read(file: Path) -> tuple[tuple[int, int, int], list[Key]]:
    try:
        stamp, text = _stamp(file), file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        problem = f"the key file {file} cannot be read ({reason}): check {FILE_VARIABLE} and permissions"
        raise SettingsError(problem) from error
    return stamp, _parse((line.partition("#")[0] for line in text.splitlines()), str(file))


def _stamp(file: Path) -> tuple[int, int, int]:
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _parse(entries: Iterable[str], source: str) -> list[Key]:
    keys: dict[str, Key] = {}
    for number, entry in enumerate(entries, start=1):
        if not entry.strip():
            continue
        name, hashed, task, role = [*map(str.strip, entry.split(":", 3)), "", "", ""][:4]
        is_name = _NAME.fullmatch(name) and (not task or _NAME.fullmatch(task))
        if not is_name or not _HASH.fullmatch(hashed.lower()) or role not in ("", ADMIN):
            raise SettingsError(  # Do not quote the entry: it may be a key that was put there by mistake.
                f"entry {number} of {source} is not name:sha256hex, name:sha256hex:task or name:sha256hex:task:{ADMIN}"
                " (the task may be empty): create one with `swiftopt serve --new-key NAME`"
            )
        keys[name] = Key(name, hashed.lower(), task or None, role == ADMIN)
    return list(keys.values())


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of a server. Single lookups, health checks and metrics do not count against `requests_per_min`."""

    keys: KeyRing = field(default_factory=KeyRing)
    stream_folders: tuple[Path, ...] = ()  # Folders with the stream files that jobs may name.
    max_body_bytes: int = 32 * MIB
    requests_per_min: int = 600  # Per caller; 0: no limit.
    tokens_per_min: int = 0  # Prompt and completion tokens per caller; 0: no limit.
    max_waiting: int = 128  # Maximum waiting completions per model.
    drain_s: int = 30  # Seconds for completions in progress to finish at shutdown.
    timeout_s: float = 600.0  # Time limit of a completion, waiting included.
    load_wait_s: float = 300.0  # Maximum wait of a request for a model that is being loaded.
    origins: tuple[str, ...] = ()  # Origins of web pages that may call the API; "*": all.
    explains: bool = True  # Whether answers state how they were decoded.
    log_polls: bool = False  # Whether the access log has health checks and metrics.


def allowed_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Return the origins as browsers send them.

    Raises: SettingsError: one of them is not an origin.
    """
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin.lower()):
            raise SettingsError(
                f"{origin!r} is not an origin: use scheme://host[:port], for example https://chat.example.org, or '*'"
                " for all"
            )
    return tuple(origin.lower() for origin in origins)


def stream_folders(names: Sequence[str] = ()) -> tuple[Path, ...]:
    """Return the named folders, or those of the environment variable.

    Raises: SettingsError: one of them is not a folder.
    """
    folder_names = list(names) or [name for name in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if name]
    for folder in folder_names:
        if not os.path.isdir(folder):
            raise SettingsError(f"the stream folder {folder} is not a folder: create it, or name another")
    return tuple(Path(folder).resolve() for folder in folder_names)
