"""Usage of a server by API key and model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from .errors import StoreError
from .serialization import Record


@dataclass(frozen=True, slots=True)
class KeyUsage(Record):
    """Sums over the requests of one API key, by its name, to one model; `key` None: requests to a server without keys.

    The tokens are those of the answers' `usage`; `cached_tokens` are part of `prompt_tokens`. `saved_s` are the seconds
    that plain decoding would have taken longer, negative if drafts were slower.
    """

    key: str | None
    model: str
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    saved_s: float = 0.0


SUMS = tuple(field.name for field in fields(KeyUsage))[2:]  # Fields that are added up.


@dataclass(frozen=True, slots=True)
class Usage(Record):
    """Usage since `since` (UTC, ISO 8601), by key and model: of one server since its start, or of all since a day."""

    SCHEMA: ClassVar = "swiftopt.usage/1"
    ERROR: ClassVar = StoreError

    since: str
    keys: tuple[KeyUsage, ...]
