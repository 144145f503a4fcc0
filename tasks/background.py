"""Queries of a database in a thread of their own, for an engine whose rounds must not wait for it."""

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
    """Queries the database in a separate thread, in order; `take` processes the results in the decoding thread.

    No round waits for a slow or unreachable database.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "traffic")
        self._pending: dict[tuple[str, str], tuple[Future[Any], Callable[[Any], None]]] = {}
        self._asked_at_s: dict[tuple[str, str], float] = {}

    def ask(
        self, query_name: str, task: str, run_query: Callable[[], T], take: Callable[[T], None], every_s: float = 0.0
    ) -> None:
        """Pass the result of `run_query` to `take`, unless the query is pending or ran less than `every_s` ago."""
        query, now_s = (query_name, task), time.monotonic()
        if query not in self._pending and now_s - self._asked_at_s.get(query, -math.inf) >= every_s:
            self._asked_at_s[query] = now_s
            self._pending[query] = self._pool.submit(run_query), take

    def take(self) -> None:
        """Pass on the available results; log a query that failed because the database was unreachable."""
        for query, (future, take) in list(self._pending.items()):
            if not future.done():
                return
            del self._pending[query]
            try:
                take(future.result())
            except StoreError as error:
                logger.warning("tuning=no %s task=%s reason=%r", *query, str(error))

    def forget(self, task: str) -> None:
        """Forget the times of a task's last queries."""
        self._asked_at_s = {query: asked_s for query, asked_s in self._asked_at_s.items() if query[1] != task}

    def close(self) -> None:
        """Wait for the running query and for pending writes of versions; drop all other queries."""
        for query, (future, _) in list(self._pending.items()):
            if query[0] != "version" and future.cancel():
                del self._pending[query]
        self._pool.shutdown()
        self.take()
