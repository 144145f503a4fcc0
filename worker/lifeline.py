"""A child that never outlives the process that forked it, and how that process waits for it."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1  # of prctl(2)
POLL_S = 0.02  # between two looks at a child, where the system cannot tell that it ended


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; to be called first thing after the fork.

    Linux only. On other systems the child ends when its lease is lost.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the kernel was told
        os._exit(1)


def wait_for(pid: int, seconds: float) -> tuple[int, resource.struct_rusage] | None:
    """What wait(2) says of a child, and what it used; None if it is still there after that time."""
    if hasattr(os, "pidfd_open"):
        descriptor = os.pidfd_open(pid)
        try:
            select.select([descriptor], [], [], seconds)
        finally:
            os.close(descriptor)
        found, status, usage = os.wait4(pid, os.WNOHANG)
        return (status, usage) if found else None
    deadline = time.monotonic() + seconds
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            return status, usage
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL_S)
