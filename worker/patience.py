"""Waiting for a database that is away, so that an outage of minutes costs those minutes and no more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from ..core.errors import StoreUnavailable

T = TypeVar("T")

PATIENCE_S = 600.0  # after which the attempt ends with the error; its job goes on elsewhere from its last checkpoint
LONGEST_WAIT_S = 5.0

logger = logging.getLogger(__name__)


def patiently(work: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Call `work` again while the database cannot be reached.

    Raises: StoreUnavailable: it stayed away.
    """
    retrying = Retrying(
        retry=retry_if_exception_type(StoreUnavailable),
        wait=wait_random_exponential(multiplier=0.2, max=LONGEST_WAIT_S),
        stop=stop_after_delay(patience_s),
        before_sleep=_tell,
        reraise=True,
    )
    return retrying(work)


def _tell(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    logger.warning("database=away try=%d reason=%r", state.attempt_number, str(error))
