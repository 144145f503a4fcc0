"""A job as everyone sees it: the queue, its workers, the API and the terminal (design 9).

queued ──claim──▶ running ──▶ succeeded | failed | cancelled
  ▲  ▲              │  │
  │  └─ hand back, ─┘  └─pause─▶ paused ──resume──▶ queued
  │     lost worker, error with attempts left
  └──────────── retry of a failed or cancelled job
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, get_args

from .errors import StoreError
from .events import JobState, PromptFinished
from .requests import TuneRequest
from .serialization import Record
from .types import LayerSetRecord, Prompt

JobKind = Literal["tune", "noop"]  # a no-op measures the queue itself and needs no torch
Verb = Literal["pause", "resume", "stop", "cancel", "retry"]
Wanted = Literal["pause", "stop"]  # what a running job is asked to do at its next step

Promotion = Literal["always", "if none", "never"]  # when look-ups find a new set: if none, where they found none before

STATES: tuple[JobState, ...] = get_args(JobState)
VERBS: tuple[Verb, ...] = get_args(Verb)
END_STATES: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")
UNFINISHED: tuple[JobState, ...] = ("queued", "running", "paused")

DEFAULT_QUEUE = "default"
LINES_FROM = (
    "stream",
    "form",
    "out",
    "task",
    "limit",
)  # of a request: what its lines, which travel apart, were made by


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write for a job, as long as this attempt is its latest and the job runs."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """One attempt on its way to a worker of `queue`."""

    job: str
    attempt: int
    queue: str

    @property
    def id(self) -> str:
        """Its name in the queue: every attempt has its own."""
        return f"{self.job}-a{self.attempt}"


@dataclass(frozen=True, slots=True)
class Job(Record):
    """A job's row. `queue` None: it runs in the process that began it, and nobody else may take it.

    `attempt` is the one that is queued or running; `request` is `TuneRequest.to_json()`; `progress` the latest figures,
    as in the event of that name; times are UTC, ISO 8601. `n_outputs` counts finished completions; `layer_sets` are
    what the job stored, one per task.
    """

    SCHEMA: ClassVar = "swiftopt.job/1"
    ERROR: ClassVar = StoreError

    id: str
    kind: JobKind
    state: JobState
    queue: str | None
    attempt: int
    fingerprint: str
    request: Mapping[str, Any]
    stream: str | None = None
    wanted: Wanted | None = None
    worker: str | None = None
    error: str | None = None
    progress: Mapping[str, Any] | None = None
    n_prompts: int = 0
    n_outputs: int = 0
    layer_sets: tuple[LayerSetRecord, ...] = ()
    created_at: str = ""
    started_at: str | None = None
    finished_at: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether it has ended and nothing but `retry` changes it any more."""
        return self.state in END_STATES

    @property
    def model(self) -> str:
        """The model's name, for people."""
        return str(self.request.get("model", ""))


@dataclass(frozen=True, slots=True)
class JobEvent(Record):
    """An event as stored: `id` rises with time, `data` is the event's JSON object."""

    id: int
    type: str
    data: Mapping[str, Any]
    created_at: str


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What is submitted. `lines` is the stream as JSON Lines, every line with its task; `stream` its SHA-256."""

    kind: JobKind
    queue: str | None
    request: Mapping[str, Any] = field(default_factory=dict)
    stream: str | None = None
    lines: str | None = None
    n_prompts: int = 0
    idempotency_key: str | None = None

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 over what decides the result; two unfinished jobs never share one."""
        values = {key: value for key, value in self.request.items() if key not in LINES_FROM}
        return hashlib.sha256(
            json.dumps([self.kind, self.queue, values, self.stream], sort_keys=True).encode()
        ).hexdigest()


@dataclass(frozen=True, slots=True)
class JobList(Record):
    """Jobs, newest first."""

    SCHEMA: ClassVar = "swiftopt.jobs-list/1"
    ERROR: ClassVar = StoreError

    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class EventPage(Record):
    """Events of a job; ask again for those behind `next_after`."""

    SCHEMA: ClassVar = "swiftopt.events/1"
    ERROR: ClassVar = StoreError

    events: tuple[JobEvent, ...]
    next_after: int


class JobBoard(Protocol):
    """Where jobs are submitted, seen and steered: the database and queue themselves, or a server over HTTP.

    Raises: NotFound, Conflict, StoreError, ServiceUnreachable: as the place has it.
    """

    def submit(
        self,
        request: TuneRequest,
        prompts: Sequence[Prompt],
        queue: str = DEFAULT_QUEUE,
        idempotency_key: str | None = None,
    ) -> tuple[Job, bool]:
        """The job for the request on these prompts, and whether it is new."""

    def get(self, job: str) -> Job:
        """One job as it is now."""

    def latest(self, state: JobState | None = None, limit: int = 100) -> list[Job]:
        """The newest jobs first."""

    def act(self, job: str, verb: Verb) -> Job:
        """Pause, resume, stop, cancel or retry; the job as it is then."""

    def events(self, job: str, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """What the job reported behind event number `after`, oldest first."""

    def outputs(self, job: str) -> list[PromptFinished]:
        """The finished completions in the order of the stream."""
