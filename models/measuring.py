"""Keeps measurements on a device apart, and tells how much other load disturbed them.

Nothing here needs torch, except for the lock of a CUDA device.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from ..core.errors import Busy
from ..core.settings import measures_alone
from .saved import OnStep, no_step

if TYPE_CHECKING:
    import torch

MOST_SHARE = 0.1  # Largest share of CPU time that other programs may use during a valid measurement.
MOST_OF_COMMAND = 120  # Characters of a command line that a message quotes.
TURN_S = 120.0  # Longest wait for another process that measures on the same device.
HELD = "SWIFTOPT_MEASURING_HELD"  # Environment variable: lock file that the process which started this one holds.
PROC_STAT = Path("/proc/stat")
PROC_LOCKS = Path("/proc/locks")
_BUSY = (0, 1, 2, 5, 6)  # Busy-time columns of a cpu line in /proc/stat: user, nice, system, irq, softirq.
_STEAL = 7  # Column of the time that the host gave to other virtual machines.

logger = logging.getLogger(__name__)


@contextmanager
def measuring_turn(
    device: torch.device | str, on_step: OnStep = no_step, wait_s: float = TURN_S, alone: bool = False
) -> Iterator[None]:
    """Hold the lock for measurements on a device; after waiting `wait_s`, go on without it.

    The measurement's own checks then report it as disturbed. A process that holds the lock may enter again, and so may
    the processes that it starts. The lock of a process that was killed is free.

    Raises: Busy: `alone`, and another process still held the lock after `wait_s`.
    """
    path = _lock_path(device)
    if not measures_alone() or os.environ.get(HELD) == str(path):
        yield
        return
    lock = FileLock(path, mode=0o666, is_singleton=True, thread_local=False)
    try:
        if not _acquired(lock, 0.0):
            on_step(f"waiting for {_holder(path)}, which measures on this device")
            if not _acquired(lock, wait_s):
                if alone:
                    raise Busy(
                        f"{_holder(path)} still measures on this device after {wait_s:.0f} s: start again when it has"
                        " ended, or end it"
                    )
                logger.warning("measuring=beside-another device=%s waited_s=%.0f", device, wait_s)
        yield
    finally:
        if lock.is_locked:
            lock.release()


@contextmanager
def held_by_children(device: torch.device | str) -> Iterator[None]:
    """Let the processes that this one starts measure within its turn."""
    os.environ[HELD] = str(_lock_path(device))
    try:
        yield
    finally:
        del os.environ[HELD]


def _lock_path(device: torch.device | str) -> Path:
    return Path(tempfile.gettempdir()) / f"swiftopt-measuring-{_lock_name(device)}.lock"


def _acquired(lock: FileLock, wait_s: float) -> bool:
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        return False
    except OSError as error:  # No temporary folder, or the lock file belongs to another user.
        logger.warning("measuring=without-turns reason=%r", str(error))
        return True
    return True


def _holder(path: Path) -> str:
    """Return the process that holds a lock file, in words, with its command where the system tells it."""
    with suppress(OSError, ValueError, IndexError):
        inode = str(path.stat().st_ino)
        for line in PROC_LOCKS.read_text(encoding="ascii").splitlines():
            _, kind, _, _, pid, file, *_ = line.split()
            if kind == "FLOCK" and file.rpartition(":")[2] == inode:
                command = Path(f"/proc/{int(pid)}/cmdline").read_text(encoding="utf-8", errors="replace")
                words = " ".join(word.replace("\n", " ") for word in command.split("\0"))
                return f"process {pid} ({words.strip()[:MOST_OF_COMMAND]})"
    return "another process"


def _lock_name(device: torch.device | str) -> str:
    """Return a device name that is the same in all processes, even if they number visible GPUs differently."""
    if not str(device).startswith("cuda"):
        return "cpu"
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return hashlib.sha256(uuid.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """CPU time used by others, as shares of the time of all processors that this process may use.

    `others`: other processes; `stolen`: the host of a virtual machine; `own`: this process, for comparison. They add up
    to at most 1.
    """

    others: float
    stolen: float
    own: float

    @property
    def share(self) -> float:
        return self.others + self.stolen


class DisturbanceMeter:
    """Measures how busy other processes keep the CPUs; reports no load where this cannot be read."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._began = self._read()

    def _read(self) -> tuple[float, float, float, float]:
        """Return seconds: on the clock, of all work on our processors, stolen, and of this process."""
        busy = stolen = 0.0
        with suppress(OSError, ValueError, IndexError):
            tick = os.sysconf("SC_CLK_TCK")
            for line in PROC_STAT.read_text(encoding="ascii").splitlines():
                name, *columns = line.split()
                if name.removeprefix("cpu").isdecimal() and int(name.removeprefix("cpu")) in self._cores:
                    ticks = [int(column) for column in columns]
                    busy += sum(ticks[i] for i in _BUSY) / tick
                    stolen += ticks[_STEAL] / tick
        return perf_counter(), busy, stolen, process_time()

    def read(self) -> Disturbance:
        """Return the CPU shares used by others since the meter was created."""
        wall, busy, stolen, ours = (end - begin for end, begin in zip(self._read(), self._began, strict=True))
        others, stolen = (max(0.0, busy - ours) if busy else 0.0), max(0.0, stolen)
        # A guest may count stolen time as its own, and ticks are coarser than the clock: shares of what they add up to.
        room = max(wall * max(1, len(self._cores)), others + stolen + ours)
        return Disturbance(others / room, stolen / room, ours / room)
