"""The app around one store and one job board, and the process that serves it until a signal."""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from opentelemetry.trace import TracerProvider

from ..core.errors import SettingsError
from ..core.requests import JobBoard, ServedModel
from ..core.threads import repeating
from ..store import Store
from ..worker.queue import PERIOD_S, JobService, Reconciler, RedisQueue
from .dashboard import jobs, overview, pages_for_browsers, plans, playground, requests, searches, terms, traffic
from .dashboard import router as dashboard
from .engines import Engines, OnState
from .lookups import LookupCache, find_plans
from .middleware import AccessMiddleware, OriginsMiddleware, RateLimit, State
from .openapi import bare_app
from .settings import ServerSettings
from .storage import StorageCheck
from .tracing import provider_from_environment, shut_down
from .transport import TransportMiddleware
from .usage import stored_usage

PAGES = (overview, requests, plans, searches, jobs, traffic, playground, terms)
BACKLOG = 1024
CLIENT_STALL_TIMEOUT_S = 120  # Close a connection whose client reads nothing for this long.
# Interval at which threads yield to the event loop. Python's 5 ms would be half of a lookup's time limit.
SWITCH_S = 0.001
DRAIN_S = 5  # Seconds for requests in progress to finish at shutdown. Event streams end at once.
ABORT_GRACE_S = 2  # Extra seconds for aborted completions to send their error.


def create_app(
    store: Store,
    board: JobBoard,
    settings: ServerSettings | None = None,
    queue: RedisQueue | None = None,
    engines: Engines | None = None,
    traces: TracerProvider | None = None,
) -> FastAPI:
    """Return the app of a store. It starts and ends `engines`. Without a `queue` (Redis), jobs only wait."""
    settings, engines = settings or ServerSettings(), engines or Engines()
    app = bare_app(traces)
    for router in (dashboard, *(page.router for page in PAGES)):
        app.include_router(router)
    prompt_files = [Path(engine.served.keep_prompts) for engine in engines.of.values() if engine.served.keep_prompts]
    storage = StorageCheck(store, [file.absolute().parent for file in prompt_files])
    tokens = RateLimit(settings.tokens_per_min, counted=True)
    app.state.swiftopt = State(store, board, queue, settings, engines, tokens, storage, traces=traces)
    pages_for_browsers(app)
    app.state.lookups = LookupCache(partial(find_plans, store), store.lookup_states, store.tasks_moved)
    app.router.lifespan_context = engines.running
    app.add_middleware(AccessMiddleware, settings=settings, answers=app.state.swiftopt.answers)
    app.add_middleware(TransportMiddleware, max_bytes=settings.max_body_bytes)
    # CORS is outside the access checks, so that refusals have its headers and a web page can read them.
    if settings.origins:
        app.add_middleware(
            OriginsMiddleware,
            allow_origins=settings.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "x-swiftopt-ignored", "retry-after", "location"),
        )
    return app


def listen(host: str, port: int, settings: ServerSettings) -> socket.socket:
    """Return a bound socket.

    Raises: SettingsError: the address cannot be used, or other machines reach it and there is no API key.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise SettingsError(
            f"the host {host!r} cannot be resolved: use 127.0.0.1 or an address of this machine"
        ) from error
    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback and settings.keys.empty:
        raise SettingsError(
            f"{host} is reachable from other machines and no API key is set: create one with"
            " `swiftopt serve --new-key NAME` and put its entry into SWIFTOPT_API_KEYS, or listen on 127.0.0.1"
        )
    # Name the protocol: with protocol 0, asyncio does not set TCP_NODELAY, which delays each answer by 40 ms.
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sys.platform == "linux":  # Accepted connections inherit this option.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * CLIENT_STALL_TIMEOUT_S)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        is_taken = error.errno == errno.EADDRINUSE
        advice = (
            "stop the program that uses it, or choose another --port" if is_taken else "choose another --host or --port"
        )
        raise SettingsError(
            f"cannot listen on {host} port {port} ({(error.strerror or '').lower()}): {advice}"
        ) from error
    return listener


def serve(
    listener: socket.socket,
    store: Store,
    redis_url: str | None,
    settings: ServerSettings,
    on_state: OnState = lambda name, state: None,
    models: Sequence[ServedModel] = (),
) -> None:
    """Serve requests until SIGTERM or SIGINT; running completions then have `settings.drain_s` to finish.

    Raises: SettingsError: the Redis URL cannot be used. ModelNotFound, UnsupportedModel: a model cannot be loaded at
        all; requests that waited for it were answered.
    """
    queue = RedisQueue(redis_url) if redis_url else None
    engines = Engines(models, settings.max_waiting, on_state, settings.keys.names)
    traces = provider_from_environment()
    app = create_app(store, JobService(store, queue, models), settings, queue, engines, traces)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # AccessMiddleware writes the access log.
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=settings.drain_s + ABORT_GRACE_S if models else DRAIN_S,
    )
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # Keep existing objects out of full garbage collections, which would block lookups for 80 ms.
    with _reconciling(store, queue), stored_usage(store, app.state.swiftopt.usage), _quiet_end():
        _Server(config, engines, settings.drain_s).run(sockets=[listener])
    if traces is not None:
        shut_down(traces)
    if engines.load_error is not None:
        raise engines.load_error


class _Server(uvicorn.Server):
    """A server that also ends when a model cannot be loaded.

    Completions that still run `drain_s` after the shutdown began are aborted, in time to send their clients an error.
    """

    def __init__(self, config: uvicorn.Config, engines: Engines, drain_s: float) -> None:
        super().__init__(config)
        self._engines, self._drain_s = engines, drain_s

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._engines.load_error is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._engines.give_up)
        await super().shutdown(sockets)
        timer.cancel()


@contextmanager
def _reconciling(store: Store, queue: RedisQueue | None) -> Iterator[None]:
    """Run the reconciler if there is a Redis, and close its connections at the end."""
    if queue is None:
        yield
        return
    reconciler = Reconciler(store.jobs, queue, f"serve-{socket.gethostname()}-{os.getpid()}")
    try:
        with repeating(reconciler.try_step, PERIOD_S, "reconciler", DRAIN_S):
            yield
    finally:
        queue.close()


@contextmanager
def _quiet_end() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again after its shutdown."""

    def ignore(number: int, frame: FrameType | None) -> None:
        logging.getLogger(__name__).info("ended by %s", signal.Signals(number).name)

    previous_handlers = {number: signal.signal(number, ignore) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
