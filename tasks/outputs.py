"""Completions on disk, one JSON object per line, each flushed when it is finished."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import platformdirs

from ..core.completions import output_line
from ..core.errors import OutputError
from ..core.types import Completion, Prompt


def default_output(stream: str) -> Path:
    """Where completions go when the caller names no file: the user's data folder, named by stream and time."""
    stem = "stdin" if stream == "-" else Path(stream).stem
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    folder = Path(platformdirs.user_data_dir("swiftopt")) / "completions"
    return folder / f"{stem}-{stamp}-{os.getpid()}.jsonl"


class LineWriter:
    """Adds whole lines to a file, each on its way to the disk when `write` returns.

    Without `append` an old content is dropped when the first line comes, not before: a run that ends early spares it.

    Raises: OutputError: the file cannot be opened or written; lines written before stay, and no half line follows them.
    """

    def __init__(self, path: Path, append: bool = True) -> None:
        self.path = path
        self.n_written = 0
        self._drop_old = not append and path.is_file()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)  # unbuffered, so that closing has nothing left to fail with
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OutputError(f"cannot write completions to {path}: {reason}; choose another --out") from error

    def write(self, line: str) -> None:
        """Add one line."""
        size = os.fstat(self._file.fileno()).st_size
        rest = memoryview(f"{line}\n".encode())
        try:
            if self._drop_old:
                self._file.truncate(0)
                self._drop_old, size = False, 0
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size)
            raise OutputError(
                f"cannot write to {self.path}: {(error.strerror or str(error)).lower()}; the {self.n_written}"
                " completions before this one are there, free some space and run again"
            ) from error
        self.n_written += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class CompletionWriter:
    """Appends completions to a file of JSON lines.

    Raises: OutputError: as `LineWriter`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = LineWriter(path)

    def write(self, prompt: Prompt, completion: Completion) -> None:
        """Add one completion."""
        self._lines.write(output_line(prompt, completion))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.__exit__(kind, value, trace)
