"""Finished answers in a folder, so that a server finds them again when it starts (`serve --keep-corpus DIR`).

Each generation is a file that answers are appended to, one write per answer. A process that is killed while it writes
leaves at most its last answer incomplete, which is cut off when the file is read. Files are named by a hash of salt and
task, in a folder per API key, so that all of a key's answers can be removed with it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..core.errors import OutputError, SettingsError
from ..core.requests import owner_of

HEADER = struct.Struct("<4sII")  # MARK, number of an answer's tokens, CRC-32 of the tokens (int32, little-endian).
MARK = b"SwA1"
SUFFIX = ".answers"
NO_KEY, KEY = "no-key", "key-"  # Names of the folders of owners.
TOKEN_BYTES = 4

logger = logging.getLogger(__name__)


class OwnerFolders:
    """A private folder with a folder per model, and in it one per API key; at most one process uses a model's.

    Args:   model: the model's identity. option: names the folder, for errors.
    Raises: SettingsError: another process uses it. OutputError: it cannot be written to.
    """

    def __init__(self, root: Path, model: str, option: str) -> None:
        self.root, self.model = root, root / hashlib.sha256(model.encode()).hexdigest()[:32]
        try:
            for folder in (root, self.model):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.model / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            problem = f"another server keeps files of this model in {root}: give each server its own folder"
            raise SettingsError(f"{problem} ({option})") from error
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OutputError(f"cannot write to {root}: {reason}; choose another {option}") from error

    def of(self, owner: str) -> Path:
        """Return the folder of an API key's files of this model, "" of those without keys."""
        folder = self.model / (f"{KEY}{owner}" if owner else NO_KEY)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def forget_owners(self, is_gone: Callable[[str], bool]) -> None:
        """Remove the files of owners that are gone, of all models."""
        for folder in self.root.glob("*/*/"):
            name = folder.name
            if (name == NO_KEY or name.startswith(KEY)) and is_gone("" if name == NO_KEY else name.removeprefix(KEY)):
                remove_folder(folder)

    def close(self) -> None:
        os.close(self._lock)


def remove_folder(folder: Path) -> None:
    """Remove a folder with the files in it; a process that uses them may have removed some."""
    with suppress(OSError):
        for file in folder.iterdir():
            file.unlink(missing_ok=True)
        folder.rmdir()


class GenerationFile:
    """The file of a generation; only the owner of the process may read it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, token_ids: NDArray[np.int32]) -> None:
        """Append an answer. Where that fails, as on a full disk, it is not stored, and the file stays readable."""
        tokens = token_ids.astype("<i4").tobytes()
        record = HEADER.pack(MARK, len(token_ids), zlib.crc32(tokens)) + tokens
        try:
            # Opened for each answer: callers may have any number of salts and tasks, and a process few open files.
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            logger.warning("corpus=not kept reason=%r", str(error))
            return
        try:
            size_before = os.fstat(file).st_size
            if os.write(file, record) < len(record):
                os.ftruncate(file, size_before)
        except OSError as error:
            logger.warning("corpus=not kept reason=%r", str(error))
        finally:
            os.close(file)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class CorpusFolder(OwnerFolders):
    """The answers of one model in a folder.

    Args:   model: the model's fingerprint. max_tokens: files of more tokens than this are removed at the start, the
            oldest first.
    """

    def __init__(self, root: Path, model: str, max_tokens: int) -> None:
        super().__init__(root, model, "--keep-corpus")
        files = sorted(self.model.glob(f"*/*{SUFFIX}"), key=lambda file: file.stat().st_mtime, reverse=True)
        n_tokens = 0
        for file in files:
            n_tokens += file.stat().st_size // TOKEN_BYTES
            if n_tokens > max_tokens:
                file.unlink(missing_ok=True)

    def load(self, salt: str, task: str) -> list[tuple[NDArray[np.int32], GenerationFile]]:
        """Return the stored answers of a salt and task by generation, the oldest first, and their files."""
        folder, digest = self.of(owner_of(salt)), _digest(salt, task)
        paths = sorted(folder.glob(f"{digest}-*{SUFFIX}"), key=_number)
        return [(token_ids, GenerationFile(path)) for path in paths if len(token_ids := _read(path))]

    def begin(self, salt: str, task: str) -> GenerationFile:
        """Return the file of a new generation."""
        folder, digest = self.of(owner_of(salt)), _digest(salt, task)
        numbers = [_number(path) for path in folder.glob(f"{digest}-*{SUFFIX}")]
        return GenerationFile(folder / f"{digest}-{max(numbers, default=0) + 1}{SUFFIX}")


def _number(path: Path) -> int:
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _digest(salt: str, task: str) -> str:
    return hashlib.sha256(f"{salt}\0{task}".encode()).hexdigest()[:32]


def _read(path: Path) -> NDArray[np.int32]:
    """Return a file's answers, one after the other; cut the file after the last whole one."""
    content, end, answers = path.read_bytes(), 0, list[NDArray[np.int32]]()
    while end + HEADER.size <= len(content):
        mark, n_tokens, checksum = HEADER.unpack_from(content, end)
        start, stop = end + HEADER.size, end + HEADER.size + TOKEN_BYTES * n_tokens
        if mark != MARK or stop > len(content) or zlib.crc32(content[start:stop]) != checksum:
            break
        answers.append(np.frombuffer(content, "<i4", n_tokens, start).astype(np.int32))
        end = stop
    if end < len(content):
        os.truncate(path, end)
    if not answers:
        path.unlink(missing_ok=True)
        return np.empty(0, np.int32)
    return np.concatenate(answers)
