"""What is settled before a worker takes its first job, and how its log tells what was to be expected."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from ..core.errors import SettingsError, SwiftoptError
from .options import open_store
from .output import note

if TYPE_CHECKING:
    from ..worker.attempt import WorkerContext
    from ..worker.queue import RedisQueue

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
BEATS_S = 20.0  # a worker that lives has given a sign of life within this time
# torch is asked in a process of its own: what it starts for CUDA would not survive the worker's forks.
ASK_TORCH = """
import sys
from swiftopt.core.errors import SwiftoptError
from swiftopt.models.sources import check_device
try:
    check_device(sys.argv[1])
except SwiftoptError as error:
    sys.exit(str(error))
"""


class ForeseenInOneLine(logging.Filter):
    """Errors that have a sentence, and outages of Redis, are logged without the way they came."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Changes the record; always true."""
        from redis.exceptions import RedisError

        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, RedisError) and record.name.startswith("rq"):  # which believes that it ends now
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg, record.args = "redis=away reason=%r", (_first_line(error),)
        elif isinstance(error, SwiftoptError | RedisError):
            record.msg, record.args = "%s reason=%r", (record.getMessage(), _first_line(error))
        else:
            return True
        record.exc_info = record.exc_text = None
        return True


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0]


def start_log() -> None:
    """Send the log to stderr."""
    handler = logging.StreamHandler()
    handler.addFilter(ForeseenInOneLine())
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[handler])
    logging.getLogger("alembic").setLevel(logging.WARNING)


def check_start(working: WorkerContext) -> None:
    """What would make every job fail, or the worker end at once.

    Raises: SettingsError: the device is unknown or not here, or the name is taken. ServiceUnreachable, StoreError:
        Redis or the database cannot be used.
    """
    from ..models.sources import check_dtype_and_device
    from ..worker.queue import RedisQueue

    check_dtype_and_device("auto", working.device)
    queue = RedisQueue(working.redis)
    try:
        queue.ping()
        open_store(working.database).close()
        check_device_is_here(working.device)
        check_name(working.name, queue)
    finally:
        queue.close()


def check_device_is_here(device: str) -> None:
    """Raises: SettingsError: no such CUDA device on this machine; jobs would fail on it for good."""
    if not device.startswith("cuda"):
        return
    asked = subprocess.run([sys.executable, "-c", ASK_TORCH, device], capture_output=True, text=True)
    if asked.returncode:
        reason = asked.stderr.strip().split("\n")[-1] or f"torch ended with {asked.returncode}"
        raise SettingsError(f"a worker for {device} cannot run on this machine: {reason}")


def check_name(name: str, queue: RedisQueue) -> None:
    """Raises: SettingsError: another worker of this machine has the name; who ends first would take it off both."""
    for found in queue.workers():
        if found.name != name or found.heartbeat_age_s > BEATS_S:
            continue
        if found.hostname != socket.gethostname():
            note(
                f"note: a worker named {name} lives on {found.hostname}: if it still runs, give this one another --name"
            )
        elif found.pid != os.getpid() and _is_there(found.pid):
            raise SettingsError(f"a worker named {name} runs here already (process {found.pid}): choose another --name")


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
