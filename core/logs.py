"""Logs of long-running processes, as text or as JSON: one record per line, with the id of its request.

Server and engine share the id: the server takes it from the header `x-request-id` or generates one, and sends it with
its messages to the engine.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, get_args

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
MOST_ID_CHARACTERS = 128
REMIND_S = 600.0  # Seconds after which an outage that lasts is logged again.
_REQUEST_ID = re.compile(rf"[A-Za-z0-9._:/+=@-]{{1,{MOST_ID_CHARACTERS}}}")

# Id of the request that this thread or coroutine works for; empty: none.
request_id: ContextVar[str] = ContextVar("request_id", default="")

logger = logging.getLogger(__name__)


def valid_request_id(given: str) -> str:
    """Return a client's id for its request, or a new one if it sent none that is safe for headers and logs."""
    return given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


@contextmanager
def about_request(id: str) -> Iterator[None]:
    """Add the request's id to all log records of the block."""
    token = request_id.set(id)
    try:
        yield
    finally:
        request_id.reset(token)


class TextFormatter(logging.Formatter):
    """`time level logger message request=ID`, and a traceback on the lines after it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        id = request_id.get()
        return super().formatMessage(record) + (f" request={id}" if id else "")


class JsonFormatter(logging.Formatter):
    """One JSON object: time (UTC, ISO 8601), level, logger, message, request_id (or null), and `exception` if any.

    A record's `values`, a mapping given as `extra`, are further keys.
    """

    def format(self, record: logging.LogRecord) -> str:
        created = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        values: dict[str, Any] = {
            "time": created.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": request_id.get() or None,
        }
        values |= getattr(record, "values", {})
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, default=str)


FORMATTERS: Mapping[LogFormat, Callable[[], logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


def start(format: LogFormat, level: int | str = logging.INFO, handler: logging.Handler | None = None) -> None:
    """Start this process's log, on stderr unless a handler is given; JSON includes uncaught errors and warnings."""
    handler = handler or logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[format]())
    logging.basicConfig(level=level, handlers=[handler])
    if format == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda thrown: _log_uncaught(thrown.exc_type, thrown.exc_value, thrown.exc_traceback)


def current_format() -> LogFormat:
    """Return the format of this process's log, for processes that it starts."""
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    return "json" if any(isinstance(formatter, JsonFormatter) for formatter in formatters) else "text"


class Outage:
    """Logs the failures of a step that is repeated every few seconds: the first one, each new reason, and the end.

    A reason that lasts is logged again every REMIND_S.

    Args: failing, working: beginnings of the lines, such as `usage=waiting` and `usage=stored`.
    """

    def __init__(self, logger: logging.Logger, failing: str, working: str) -> None:
        self._logger, self._failing, self._working = logger, failing, working
        self._reason = ""
        self._began_s = self._logged_s = 0.0  # On the monotonic clock.

    def failed(self, error: Exception) -> None:
        """Log that the step failed."""
        reason, now_s = str(error) or type(error).__name__, time.monotonic()
        if not self._reason:
            self._began_s = now_s
        if reason != self._reason or now_s - self._logged_s >= REMIND_S:
            self._reason, self._logged_s = reason, now_s
            self._logger.warning("%s reason=%r", self._failing, reason)

    def over(self) -> None:
        """Log that the step succeeded, if it had failed before."""
        if self._reason:
            self._logger.info("%s after=%.0f s", self._working, time.monotonic() - self._began_s)
        self.forget()

    def forget(self) -> None:
        """Log no end of this outage: another process has taken over the step."""
        self._reason = ""


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    logger.critical("uncaught error", exc_info=(kind, error or kind(), traceback))
