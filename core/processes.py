"""Child processes that end when their parent dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # Option of prctl(2): signal sent to a child when its parent dies.


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, or the thread that forked it.

    Call it right after the fork. Linux only: on other systems it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent died before prctl was called, so no signal will come.
    if os.getppid() != parent_pid:
        os._exit(1)
