"""Database queries in a background thread, for an engine whose rounds must not wait for the database."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ..core.errors import StoreError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class BackgroundQueries:
    """Runs queries in order in a background thread; `take` processes their results in the calling thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "traffic")
        # Queries by (name, task): pending ones with their callbacks, and when each was last asked (monotonic clock).
        self._pending: dict[tuple[str, str], tuple[Future[Any], Callable[[Any], None]]] = {}
        self._asked_at_s: dict[tuple[str, str], float] = {}

    def ask(
        self, query_name: str, task: str, run_query: Callable[[], T], on_result: Callable[[T], None], every_s: float = 0
    ) -> None:
        """Run `run_query` and let `take` call `on_result`, unless the query is pending or younger than `every_s`."""
        query, now_s = (query_name, task), time.monotonic()
        if query not in self._pending and now_s - self._asked_at_s.get(query, -math.inf) >= every_s:
            self._asked_at_s[query] = now_s
            self._pending[query] = self._pool.submit(run_query), on_result

    def take(self) -> None:
        """Process the results that are available; log queries that failed because the database was away."""
        for query, (future, on_result) in list(self._pending.items()):
            if not future.done():
                return
            del self._pending[query]
            try:
                on_result(future.result())
            except StoreError as error:
                logger.warning("tuning=no %s task=%s reason=%r", *query, str(error))

    def forget(self, task: str) -> None:
        """Forget when the queries of a task ran."""
        self._asked_at_s = {query: asked_s for query, asked_s in self._asked_at_s.items() if query[1] != task}

    def close(self) -> None:
        """Wait for the running query and for pending writes of versions; drop all other queries."""
        for query, (future, _) in list(self._pending.items()):
            if query[0] != "version" and future.cancel():
                del self._pending[query]
        self._pool.shutdown()
        self.take()
