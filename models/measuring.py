"""Keeps measurements on a device apart, and tells how much other load disturbed them."""

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

import torch
from filelock import FileLock, Timeout

from ..core.settings import measures_alone
from .saved import OnStep, no_step

MOST_SHARE = 0.1  # Largest share of CPU time that other programs may use during a valid measurement.
TURN_S = 120.0  # Longest wait for another process that measures on the same device.
PROC_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6)  # Busy-time columns of a cpu line in /proc/stat: user, nice, system, irq, softirq.
_STEAL = 7  # Column of the time that the host gave to other virtual machines.

logger = logging.getLogger(__name__)


@contextmanager
def measuring_turn(device: torch.device, on_step: OnStep = no_step, wait_s: float = TURN_S) -> Iterator[None]:
    """Hold the lock for measurements on a device; after waiting `wait_s`, go on without it.

    The measurement's own checks then report it as disturbed. A process that holds the lock may enter again.
    """
    if not measures_alone():
        yield
        return
    name = f"swiftopt-measuring-{_lock_name(device)}.lock"
    lock = FileLock(Path(tempfile.gettempdir()) / name, mode=0o666, is_singleton=True, thread_local=False)
    try:
        if not _acquired(lock, 0.0):
            on_step("waiting for another process that measures on this device")
            if not _acquired(lock, wait_s):
                logger.warning("measuring=beside-another device=%s waited_s=%.0f", device, wait_s)
        yield
    finally:
        if lock.is_locked:
            lock.release()


def _acquired(lock: FileLock, wait_s: float) -> bool:
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        return False
    except OSError as error:  # No temporary folder, or the lock file belongs to another user.
        logger.warning("measuring=without-turns reason=%r", str(error))
        return True
    return True


def _lock_name(device: torch.device) -> str:
    """Return a device name that is the same in all processes, even if they number visible GPUs differently."""
    if device.type != "cuda":
        return "cpu"
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
