"""From settings to a process that listens: the socket, uvicorn, the reconciler beside it, and an end without delay."""

from __future__ import annotations

import errno
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import uvicorn

from ..core.errors import SettingsError
from ..core.requests import ServedModel
from ..store import Store
from ..worker.queue import JobService, RedisQueue
from ..worker.reconciler import Reconciler
from .app import create_app
from .engines import Engines
from .settings import ServerSettings

BACKLOG = 1024
SWITCH_S = 0.001  # that another thread may keep the event loop waiting; Python's 5 ms are half of a look-up's limit
DRAIN_S = 5  # seconds that requests in progress get at the end; event streams are ended at once


def listen(host: str, port: int, settings: ServerSettings) -> socket.socket:
    """A bound socket.

    Raises: SettingsError: the address is open to others and there is no key, or it cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"the host {host!r} leads to no address: use 127.0.0.1 or one of this machine's") from error
    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback and settings.keys.empty:
        raise SettingsError(
            f"{host} is open to other machines and no API key is set: make one with `swiftopt serve --new-key NAME` and"
            " put its entry into SWIFTOPT_API_KEYS, or listen on 127.0.0.1"
        )
    bound = socket.socket(
        family, kind, protocol
    )  # with protocol 0, asyncio would leave TCP_NODELAY off: 40 ms per answer
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        taken = error.errno == errno.EADDRINUSE
        advice = "end the program that has it, or choose another --port" if taken else "choose another --host or --port"
        raise SettingsError(
            f"cannot listen on {host} port {port} ({(error.strerror or '').lower()}): {advice}"
        ) from error
    return bound


def serve(
    bound: socket.socket,
    store: Store,
    redis_url: str | None,
    settings: ServerSettings,
    on_ready: Callable[[], None] = lambda: None,
    served: Sequence[ServedModel] = (),
) -> None:
    """Answer requests until SIGTERM or SIGINT; with models, requests in progress then get `settings.drain_s` to end.

    Raises: SettingsError: the Redis URL is none.
    """
    queue = RedisQueue(redis_url) if redis_url else None
    engines = Engines(served, settings.max_waiting) if served else None
    app = create_app(store, JobService(store, queue), settings, queue, engines)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # the gate writes one
        server_header=False,
        lifespan="on" if engines else "off",
        timeout_graceful_shutdown=settings.drain_s if engines else DRAIN_S,
    )
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # what is there now stays: without this a full collection walks it all, for 80 ms, and a look-up waits
    with _reconciling(store, queue), _quiet_end():
        on_ready()
        uvicorn.Server(config).run(sockets=[bound])
    if queue is not None:
        queue.close()


@contextmanager
def _reconciling(store: Store, queue: RedisQueue | None) -> Iterator[None]:
    """The reconciler's thread, where there is a Redis to reconcile with."""
    if queue is None:
        yield
        return
    stop = threading.Event()
    reconciler = Reconciler(store.jobs, queue, f"serve-{socket.gethostname()}-{os.getpid()}")
    thread = threading.Thread(target=reconciler.run, args=(stop,), name="reconciler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(DRAIN_S)


@contextmanager
def _quiet_end() -> Iterator[None]:
    """uvicorn sends itself the signal again when it is done; by then it means nothing more."""

    def ignore(number: int, frame: FrameType | None) -> None:
        logging.getLogger(__name__).info("ended by %s", signal.Signals(number).name)

    before = {number: signal.signal(number, ignore) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
