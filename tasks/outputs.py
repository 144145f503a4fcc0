"""Files of completions, one JSON object per line, each flushed when it is written."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import platformdirs

from ..core.errors import OutputError
from ..core.events import output_line
from ..core.types import Completion, Prompt


def default_output(stream: str) -> Path:
    """Return where completions go by default: the user's data folder, named by stream and time."""
    stem = "stdin" if stream == "-" else Path(stream).stem
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    folder = Path(platformdirs.user_data_dir("swiftopt")) / "completions"
    return folder / f"{stem}-{stamp}-{os.getpid()}.jsonl"


class LineWriter:
    """Append whole lines to a file, unbuffered.

    Without `append` the old content is dropped when the first line comes: a run that ends before that keeps it.

    Raises: OutputError: the file cannot be opened or written; earlier lines stay, and no partial line follows them.
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
        """Append one line."""
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

    def write_completion(self, prompt: Prompt, completion: Completion) -> None:
        """Append a completion as one JSON object."""
        self.write(output_line(prompt, completion))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
