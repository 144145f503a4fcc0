"""The real API on a free port of this machine, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import uvicorn

START_S = 30


def until_ready(url: str, within_s: float = 300) -> None:
    """Wait until a server takes requests for its models, which it loads after it has opened its port."""
    until = time.monotonic() + within_s
    while (answer := httpx2.get(f"{url}/health")).status_code != 200:
        assert time.monotonic() < until, answer.text
        time.sleep(0.1)


@contextmanager
def serving(app: Any, port: int = 0) -> Iterator[str]:
    """The URL of an app for as long as the block lasts; open streams are cut at its end."""
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until = time.monotonic() + START_S
        while not server.started:
            assert thread.is_alive() and time.monotonic() < until, "the server does not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_S)
