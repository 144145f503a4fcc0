"""What responses hold, for the OpenAPI document; the values themselves are made by the core's `…_to_json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..core.jobs import JobKind, JobState, Wanted
from ..core.learned import LearnedKind

VerdictWord = Literal["use", "plain", "unmeasured"]


class Shape(BaseModel):
    """Newer servers may add keys."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Problem(Shape):
    """RFC 9457."""

    type: str = Field(description="A stable URN per class of error.")
    title: str
    status: int
    detail: str = Field(description="One sentence: what, where, what to do.")


class LayerSetObject(Shape):
    """The object that the command line, the store's export and the API share."""

    schema_: str = Field(alias="schema")
    model: str
    fingerprint: str | None
    task: str
    n_layers: int
    skip_attn: list[int]
    skip_mlp: list[int]
    quantised: dict[str, str]
    skip_ratio: float
    matchness: float | None
    acceptance_rate: float | None
    mean_generated_length: float | None
    expected_speedup: float | None
    measured_speedup: float | None
    measured_interval: list[float] | None
    verdict: VerdictWord
    device: str | None
    dtype: str | None
    settings: dict[str, Any]
    stream_sha256: str | None
    swiftopt_version: str
    created_at: str
    version: int | None = None


class LearnedObject(Shape):
    """Trained heads or a trained probe; the weights stay in the database."""

    schema_: str = Field(alias="schema")
    kind: LearnedKind
    model: str
    task: str
    version: int
    fingerprint: str
    depths: list[int]
    n_parameters: int
    settings: dict[str, Any]
    figures: dict[str, float | None]
    stream_sha256: str | None
    swiftopt_version: str
    created_at: str


class PlanAnswer(Shape):
    """How to decode; `fallback` says in words what differs from what was asked.

    `layer_set` and `learned` are null where the method needs none; `draft_model` names a smaller model that drafts.
    """

    schema_: str = Field(alias="schema")
    model: str
    task: str
    alias: str | None
    version: int
    method: str
    settings: dict[str, Any]
    draft_model: str | None
    verdict: VerdictWord
    measured_speedup: float | None
    measured_interval: list[float] | None
    fallback: str | None
    layer_set: LayerSetObject | None
    learned: LearnedObject | None


class LookupAnswers(Shape):
    """An answer per query, in order."""

    schema_: str = Field(alias="schema")
    answers: list[PlanAnswer | Problem]


class LayerSetList(Shape):
    """Stored layer sets, newest first."""

    schema_: str = Field(alias="schema")
    layer_sets: list[LayerSetObject]


class StoredModel(Shape):
    """A model that was loaded once."""

    fingerprint: str
    architecture: str
    n_layers: int
    n_parameters: int
    names: list[str]


class ModelList(Shape):
    """Stored models, and every name that a look-up knows."""

    schema_: str = Field(alias="schema")
    models: list[StoredModel]
    names: list[str]


class JobObject(Shape):
    """A job; times are UTC, ISO 8601."""

    schema_: str = Field(alias="schema")
    id: str
    kind: JobKind
    state: JobState
    queue: str | None
    attempt: int
    fingerprint: str
    request: dict[str, Any]
    stream: str | None
    wanted: Wanted | None
    worker: str | None
    error: str | None
    progress: dict[str, Any] | None
    n_prompts: int
    n_outputs: int
    layer_sets: list[LayerSetObject]
    created_at: str
    started_at: str | None
    finished_at: str | None


class JobList(Shape):
    """Jobs, newest first."""

    schema_: str = Field(alias="schema")
    jobs: list[JobObject]


class EventObject(Shape):
    """An event of a job; `id` rises with time."""

    id: int
    type: str
    data: dict[str, Any]
    created_at: str


class EventPage(Shape):
    """Events of a job; ask again with `after` = `next_after`."""

    schema_: str = Field(alias="schema")
    events: list[EventObject]
    next_after: int


class StreamObject(Shape):
    """A stored stream."""

    schema_: str = Field(alias="schema")
    sha256: str
    n_prompts: int


class Liveness(Shape):
    """The process answers."""

    status: Literal["ok"]


class Readiness(Shape):
    """Whether requests can be served; each part says `ok` or what is wrong."""

    status: Literal["ok", "unavailable"]
    database: str
    migrations: str
    redis: str
