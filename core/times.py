"""The time as records carry it."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """The time in UTC, ISO 8601, to the second: 2026-11-21T00:00:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
