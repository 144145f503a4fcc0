"""Completions on disk, one JSON object per line, each flushed when it is finished."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import platformdirs

from ..core.errors import OutputError
from ..core.types import Completion, Prompt


def default_output(stream: str) -> Path:
    """Where completions go when the caller names no file: the user's data folder, named by stream and time."""
    stem = "stdin" if stream == "-" else Path(stream).stem
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    folder = Path(platformdirs.user_data_dir("swiftopt")) / "completions"
    return folder / f"{stem}-{stamp}-{os.getpid()}.jsonl"


class CompletionWriter:
    """Appends completions to a file.

    Raises: OutputError: the file cannot be opened or written; lines written before stay.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_written = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot write completions to {path}: {error.strerror}; choose another --out") from error

    def write(self, prompt: Prompt, completion: Completion) -> None:
        """Add one line, and see it on its way to the disk."""
        line = json.dumps({"id": prompt.id, "task": prompt.task, **completion_to_json(completion)}, ensure_ascii=False)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(
                f"cannot write to {self.path}: {error.strerror}; the {self.n_written} completions before this one are"
                " there, free some space and run again"
            ) from error
        self.n_written += 1

    def __enter__(self) -> CompletionWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as error:
            # What close() could not flush was reported by write() already, unless nothing else went wrong.
            if value is None:
                raise OutputError(f"cannot write to {self.path}: {error.strerror}; free some space") from error


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """The figures of a completion as the CLI and the output files show them."""
    timings = completion.timings
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "n_tokens": completion.n_tokens,
        "finish_reason": completion.finish_reason,
        "method": completion.method,
        "target_passes": completion.target_passes,
        "drafted": completion.drafted,
        "accepted": completion.accepted,
        "accepted_per_position": list(completion.accepted_per_position),
        "acceptance_rate": completion.acceptance_rate,
        "mean_generated_length": completion.mean_generated_length,
        "timings": {
            "optimise": timings.optimise_s,
            "draft": timings.draft_s,
            "verify": timings.verify_s,
            "other": timings.other_s,
        },
    }
