"""What a measurement needs of the machine: to be the only one on its device, and to know whether it was alone."""

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

TURN_S = 120.0  # longest wait for another process's measurement on the same device
PROC_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6)  # columns of a processor's line that are work: user, nice, system, irq, softirq
_STEAL = 7  # what the host gave to other machines

logger = logging.getLogger(__name__)


@contextmanager
def measuring_turn(device: torch.device, on_step: OnStep = no_step, wait_s: float = TURN_S) -> Iterator[None]:
    """Be the only process of this machine that measures on a device; after `wait_s` go on beside the other one.

    What is measured then counts as disturbed by its own checks. A process may enter again while it has the turn.
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
    except OSError as error:  # no folder for temporary files, or another user's file that is not for all
        logger.warning("measuring=without-turns reason=%r", str(error))
        return True
    return True


def _lock_name(device: torch.device) -> str:
    """Return a name that is the same in all processes, which may number visible GPUs differently."""
    if device.type != "cuda":
        return "cpu"
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return hashlib.sha256(uuid.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """How much of a time others had: shares of the time of all processors that this process may use.

    `others`: other processes; `stolen`: the host of a virtual machine; `own`: this process, for comparison.
    """

    others: float
    stolen: float
    own: float

    @property
    def share(self) -> float:
        return self.others + self.stolen


class DisturbanceMeter:
    """Reads how busy the processors are with anything but this process; where that cannot be read, nothing is."""

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
        """Return what others had since the meter was made."""
        wall, busy, stolen, ours = (end - begin for end, begin in zip(self._read(), self._began, strict=True))
        room = wall * max(1, len(self._cores))
        if busy == 0.0:
            return Disturbance(0.0, max(0.0, stolen) / room, ours / room)
        return Disturbance(max(0.0, busy - ours) / room, max(0.0, stolen) / room, ours / room)
