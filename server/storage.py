"""Checks of whether a server's storage can be written: its database, and the disks of its folders."""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ..core.errors import StoreError
from ..store import Store

PERIOD_S = 10.0  # Minimum seconds between two write checks.
WAIT_S = 1.0  # Maximum wait of a caller for a write check, which a locked database may delay.
LEAST_FREE = 1 << 20  # Free bytes below which a disk counts as full.

logger = logging.getLogger(__name__)


class StorageCheck:
    """Tries a small write at most every PERIOD_S. Thread-safe.

    Args: folders: folders whose disks need free space, in addition to the folder of a database file.
    """

    def __init__(self, store: Store, folders: Collection[Path] = ()) -> None:
        file = store.file
        self._store, self._folders = store, {*folders, *([file.parent] if file is not None else [])}
        self._reason, self._checked_at_s = "", -math.inf
        self._check_lock = threading.Lock()

    def problem(self) -> str:
        """Return why storage was not writable at the last check, as a sentence; "" if it was."""
        if time.monotonic() - self._checked_at_s >= PERIOD_S and self._check_lock.acquire(blocking=False):
            check_thread = threading.Thread(target=self._update_reason, name="storage", daemon=True)
            check_thread.start()
            check_thread.join(WAIT_S)
        return self._reason

    def _update_reason(self) -> None:
        try:
            reason = self._find_problem()
            if reason != self._reason:
                level, state = (logging.ERROR, "not writable") if reason else (logging.INFO, "writable")
                logger.log(level, "storage=%r reason=%r", state, reason)
            self._reason = reason
        finally:
            self._checked_at_s = time.monotonic()
            self._check_lock.release()

    def _find_problem(self) -> str:
        for folder in sorted(self._folders):
            with suppress(OSError):  # Ignore a missing folder here: the write below fails.
                if (free_bytes := shutil.disk_usage(folder).free) < LEAST_FREE:
                    return f"the disk of {folder} is full ({free_bytes / 1024:.0f} KiB free): delete files"
        try:
            self._store.check_writable()
        except StoreError as error:
            return str(error)
        return ""
