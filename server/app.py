"""The app: routes, errors and the gate put together around one store and one job board."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI

from .. import __version__
from ..core.jobs import JobBoard
from ..store import Store
from . import events, health, jobs, lookups, problems, streams
from .cache import Answers
from .gate import Gate
from .metrics import LookupTimes
from .openapi import document
from .parts import Parts, QueueView
from .settings import ServerSettings

ROUTERS = (lookups.router, streams.router, events.router, jobs.router, health.router)


def bare_app() -> FastAPI:
    """The routes without anything behind them: enough for the OpenAPI document."""
    app = FastAPI(
        title="swiftopt",
        version=__version__,
        description="Layer sets to decode with, and the jobs that find them.",
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
    )
    for router in ROUTERS:
        app.include_router(router)
    problems.install(app)
    app.openapi = partial(document, app)  # type: ignore[method-assign]
    return app


def create_app(
    store: Store, board: JobBoard, settings: ServerSettings | None = None, queue: QueueView | None = None
) -> FastAPI:
    """An app over the store; `queue` None: no Redis, so jobs only wait."""
    settings = settings or ServerSettings()
    app = bare_app()
    answers = Answers(partial(lookups.find_plan, store))
    app.state.parts = Parts(store, board, queue, settings, answers, LookupTimes())
    app.add_middleware(Gate, settings=settings)
    return app
