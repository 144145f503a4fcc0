"""The progress of a training run on disk, so that it can be killed at any time and resumes where it was.

A folder per (model, stream, what is collected): the collected states in parts, each written once, and beside them a
state of training per set of training settings. Every file appears under its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.errors import OutputError

SAVE_S = 3.0
SAVING_SHARE = 20  # a save may take 1/20 of the time


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """States of n positions, in the model's dtype, on the CPU.

    `hidden[depth]` (n, hidden_size): after that many layers; `final` (n, hidden_size): after all, and the final norm.
    """

    hidden: Mapping[int, Tensor]
    final: Tensor

    @property
    def n_rows(self) -> int:
        """Positions."""
        return self.final.shape[0]

    @classmethod
    def joined(cls, parts: Sequence[Features]) -> Features:
        """Concatenate the positions of several."""
        depths = parts[0].hidden
        return cls(
            {depth: torch.cat([part.hidden[depth] for part in parts]) for depth in depths},
            torch.cat([part.final for part in parts]),
        )


class Checkpoint:
    """The files of one training run.

    Args:   identity: all that decides what is collected; settings: all else that decides the result.
            every_s: seconds of work that a kill may lose; more where saving takes long. 0 saves after every step.
    Raises: OutputError: the folder cannot be written.
    """

    def __init__(
        self, root: Path, identity: Mapping[str, Any], settings: Mapping[str, Any], every_s: float = SAVE_S
    ) -> None:
        self.every_s = every_s
        self.folder = root / _key(identity)
        self._state = self.folder / f"state-{_key(settings)}.safetensors"
        self._pending: dict[int, Features] = {}
        self._saved_at = time.monotonic()
        self._save_s = 0.0
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "about.json").write_text(json.dumps({**identity, "settings": dict(settings)}))

    def features(self) -> dict[int, Features]:
        """Read the states collected so far, by the prompt's index."""
        found: dict[int, Features] = {}
        for path in sorted(self.folder.glob("part-*.safetensors")):
            tensors = (_read(path) or ({}, {}))[0]
            for index in {int(name.split(".")[0]) for name in tensors}:
                own = {name.split(".")[1]: t for name, t in tensors.items() if name.startswith(f"{index}.")}
                found[index] = Features({int(name): t for name, t in own.items() if name != "final"}, own["final"])
        return found

    def add(self, index: int, features: Features) -> None:
        """Keep the states of a prompt; written with the next ones if the last write was just now."""
        self._pending[index] = features
        if self.due():
            self.flush()

    def flush(self) -> None:
        """Write the states that are not yet written."""
        if not self._pending:
            return
        tensors = {f"{index}.final": part.final for index, part in self._pending.items()}
        for index, part in self._pending.items():
            tensors |= {f"{index}.{depth}": hidden for depth, hidden in part.hidden.items()}
        self._write(self.folder / f"part-{min(self._pending):06d}-{time.time_ns()}.safetensors", tensors, {})
        self._pending = {}

    def due(self) -> bool:
        """Tell whether so much time has passed that the state should be saved."""
        pause_s = max(self.every_s, SAVING_SHARE * self._save_s) if self.every_s else 0.0
        return time.monotonic() - self._saved_at >= pause_s

    def save(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Keep a state of training in place of the last one."""
        self._write(self._state, tensors, {"values": json.dumps(values)})

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read the last state of training; None if there is none that can be read."""
        found = _read(self._state) if self._state.exists() else None
        return None if found is None else (found[0], json.loads(found[1]["values"]))

    def remove(self) -> None:
        """Delete the folder: training is over and its result is safe."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        started = time.monotonic()
        unfinished = path.with_name(f".{path.name}-{os.getpid()}")
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, unfinished, metadata
            )
            os.replace(unfinished, path)
        self._saved_at = time.monotonic()
        self._save_s = self._saved_at - started

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"the checkpoint {self.folder} cannot be written ({error}): make room there or set SWIFTOPT_CACHE_DIR"
            ) from error


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Read tensors and metadata of a file; None where it is damaged, for what it held can be made again."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None


def _key(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
