"""What requests hold, and those responses that are no records of the core's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from ..core.jobs import DEFAULT_QUEUE
from ..core.requests import MAX_NEW_TOKENS, Speed, TuneRequest
from ..core.settings import TuningSettings
from ..core.types import FoundPlan, Sampling
from ..models.sources import DTYPES
from ..optimizer.strategies import STRATEGIES

MAX_QUERIES = 1000

# no control characters: PostgreSQL stores no NUL, and a name has no line break
Word = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]
Task = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^/\x00-\x1f\x7f]+$")]
QueueName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Depth = Annotated[int, Field(ge=1, le=2**31 - 1)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Strict(BaseModel):
    """Unknown keys and values of another type are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamSource(Strict):
    """The prompts: exactly one of the three."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    prompts: list[dict[str, Any]] = Field(
        default_factory=list,
        min_length=1,
        description="Stream lines: objects with one of prompt, messages, question, turns; task, id, max_new_tokens.",
    )
    name: Word = Field(default="", description="A file under a stream folder of the server: a plain relative path.")
    upload: Sha256 = Field(default="", description="What POST /v1/streams gave.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError("give exactly one of prompts, name and upload")
        return self


class JobSubmission(Strict):
    """A tuning job."""

    model: Word = Field(description="Alias, hub id, or path on the workers.")
    stream: StreamSource
    task: Task | None = Field(default=None, description="Task of lines that name none; default: the name's stem.")
    settings: TuningSettings = Field(default_factory=TuningSettings)
    sampling: Sampling = Field(default_factory=Sampling)
    max_new_tokens: Count = MAX_NEW_TOKENS
    dtype: Literal[DTYPES] = "auto"  # type: ignore[valid-type]
    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:[0-9]{1,4})?|auto-map)$")] = "auto"
    speed: Speed = Field(default="auto", description="How the worker's runtime computes; graphs want CUDA.")
    limit: Depth | None = Field(default=None, description="Take only the first prompts.")
    concurrency: Depth = Field(default=1, description="How many prompts are decoded at once.")
    queue: QueueName = DEFAULT_QUEUE

    @model_validator(mode="before")
    @classmethod
    def _storable(cls, values: Any) -> Any:
        _check_storable(values)
        return values

    @model_validator(mode="after")
    def _known_strategy(self) -> Self:
        if self.settings.strategy not in STRATEGIES:
            raise ValueError(f"settings.strategy is {self.settings.strategy!r}: use one of {', '.join(STRATEGIES)}")
        return self

    def tune_request(self, stream: str, task: str) -> TuneRequest:
        """Return the request that a worker gets; the prompts travel apart."""
        return TuneRequest(
            model=self.model,
            stream=stream,
            task=task,
            dtype=self.dtype,
            device=self.device,
            speed=self.speed,
            max_new_tokens=self.max_new_tokens,
            limit=self.limit,
            concurrency=self.concurrency,
            sampling=self.sampling,
            settings=self.settings,
        )


class LookupQuery(Strict):
    """One look-up of a batch."""

    model: Word
    task: Word
    alias: Word = "best"
    device: Word | None = None
    dtype: Word | None = None
    version: Depth | None = None


class Batch(Strict):
    """Look-ups to answer together."""

    queries: list[LookupQuery] = Field(max_length=MAX_QUERIES)


class Problem(BaseModel):
    """An error, as RFC 9457 has it."""

    type: str = Field(description="A stable URN per class of error.")
    title: str
    status: int
    detail: str = Field(description="One sentence: what, where, what to do.")


class OpenAIError(BaseModel):
    """An error, as OpenAI has it."""

    class Told(BaseModel):
        """What was wrong; `code` is the HTTP status, `param` the field."""

        message: str
        type: str
        param: str | None
        code: int

    error: Told


@dataclass(frozen=True, slots=True)
class PlanAnswer(FoundPlan):
    """How to decode, under the names that were asked for; `fallback` says in words what differs from them.

    `layer_set` and `learned` are null where the method needs none, `alias` where a version was asked for.
    """

    model: str = ""
    task: str = ""


class LookupAnswers(BaseModel):
    """An answer per query, in order."""

    schema_: Literal["swiftopt.lookup/1"] = Field(alias="schema")
    answers: list[PlanAnswer | Problem]


class StreamObject(BaseModel):
    """A stored stream."""

    schema_: Literal["swiftopt.stream/1"] = Field(alias="schema")
    sha256: str
    n_prompts: int


class Liveness(BaseModel):
    """The process answers."""

    status: Literal["ok"]


class Readiness(BaseModel):
    """Whether requests can be served; each part says `ok` or what is wrong."""

    status: Literal["ok", "unavailable"]
    database: str
    migrations: str
    redis: str
    engines: dict[str, str] = Field(description="By model that is served.")


def _check_storable(value: Any) -> None:
    """Raises: ValueError: a text or number in it that no database stores as JSON."""
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("a text holds a NUL character: delete it")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError("a text holds half of a surrogate pair, which is no text: delete that character")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no finite number")
    elif isinstance(value, list):
        for entry in value:
            _check_storable(entry)
    elif isinstance(value, dict):
        for key, entry in value.items():
            _check_storable(key)
            _check_storable(entry)
