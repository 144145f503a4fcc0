"""What a served model says of the drafts that it learns: the object of `GET /v1/tuning`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from .errors import StoreError
from .serialization import Record
from .types import LayerSet, Trial, VerdictWord

Way = Literal["best", "plain"]  # what a task can be pinned to
TuningVerb = Literal["pause", "resume", "pin"]


@dataclass(frozen=True, slots=True)
class SearchStatus(Record):
    """What a search has cost, how well the set in use drafts (matchness, once it was scored), and why it has ended.

    `share` is its part of the seconds spent decoding; `latest` the candidate that was tried last.
    """

    trials: int
    seconds: float
    share: float = 0.0
    matchness: float | None = None
    ended: str | None = None
    latest: Trial | None = None


@dataclass(frozen=True, slots=True)
class ShiftStatus(Record):
    """How often a task's text has become another kind, the latest time's reason, and the request it was noticed at."""

    n: int = 0
    latest: str | None = None
    at_request: int | None = None


@dataclass(frozen=True, slots=True)
class TaskTuning(Record):
    """One task of a served model: the way in use, the verdict on its drafts, its requests and its search.

    `since` is when the way in use became that, in seconds since 1970.
    `version` is of the stored plan in use; `ratio` and its `interval` are plain seconds / drafted seconds, over the
    latest `pairs` of timings, as are the tokens per second of both; `seconds` were spent decoding its `requests`, of
    them `compared_s` on rounds of the way that is not in use, to compare; `saved_s` is what plain decoding would have
    taken longer, by the ratio that was known at each request.
    """

    task: str
    in_use: Literal["drafts", "plain"]
    since: float
    verdict: VerdictWord
    version: int | None
    pinned: Way | None
    layer_set: LayerSet
    pairs: int
    ratio: float | None
    interval: tuple[float, float] | None
    shifts: ShiftStatus
    requests: int
    tokens: int
    seconds: float
    compared_s: float
    saved_s: float
    plain_tok_s: float | None
    drafted_tok_s: float | None
    search: SearchStatus


@dataclass(frozen=True, slots=True)
class ModelTuning(Record):
    """The tasks of one model; `unavailable` says why its engine cannot tell."""

    paused: bool = False
    tasks: tuple[TaskTuning, ...] = ()
    unavailable: str | None = None


@dataclass(frozen=True, slots=True)
class Tuning(Record):
    """By model: what is in use, what is being tried, what that costs, and what it has brought."""

    SCHEMA: ClassVar = "swiftopt.tuning/1"
    ERROR: ClassVar = StoreError

    models: Mapping[str, ModelTuning]
