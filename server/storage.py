"""Whether what a server keeps can be written: its database, and the folders of its files."""

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

PERIOD_S = 10.0  # between two looks, while somebody asks
WAIT_S = 1.0  # A caller waits so long for a look: a database may be locked for longer.
LEAST_FREE = 1 << 20  # bytes of a disk, below which the next write may fail

logger = logging.getLogger(__name__)


class StorageCheck:
    """Tries a small write at most every PERIOD_S; threads may share it.

    Args: folders: beside that of a database in a file, what must have room.
    """

    def __init__(self, store: Store, folders: Collection[Path] = ()) -> None:
        file = store.file
        self._store, self._folders = store, {*folders, *([file.parent] if file is not None else [])}
        self._reason, self._looked_at = "", -math.inf
        self._looking = threading.Lock()

    def problem(self) -> str:
        """Return why something cannot be written, in a sentence, as of the last look; empty: it can."""
        if time.monotonic() - self._looked_at >= PERIOD_S and self._looking.acquire(blocking=False):
            look = threading.Thread(target=self._look, name="storage", daemon=True)
            look.start()
            look.join(WAIT_S)
        return self._reason

    def _look(self) -> None:
        try:
            look = self._found()
            if look != self._reason:
                level, state = (logging.ERROR, "not writable") if look else (logging.INFO, "writable")
                logger.log(level, "storage=%r reason=%r", state, look)
            self._reason = look
        finally:
            self._looked_at = time.monotonic()
            self._looking.release()

    def _found(self) -> str:
        for folder in sorted(self._folders):
            with suppress(OSError):  # one that is gone fails the write
                if (free := shutil.disk_usage(folder).free) < LEAST_FREE:
                    return f"the disk of {folder} is full ({free / 1024:.0f} KiB are left): free some space"
        try:
            self._store.check_writable()
        except StoreError as error:
            return str(error)
        return ""
