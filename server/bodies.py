"""What requests may hold; the fields and defaults are those of the core's dataclasses."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model, model_validator

from ..core.jobs import DEFAULT_QUEUE
from ..core.requests import MAX_NEW_TOKENS, TUNING, Speed, TuneRequest
from ..core.types import Sampling
from ..models.sources import DTYPES
from ..optimizer.strategies import STRATEGIES

MAX_QUERIES = 1000
LARGEST = 2**63 - 1  # what every database can store

# no control characters: PostgreSQL stores no NUL, and a name has no line break
Word = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]
Task = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^/\x00-\x1f\x7f]+$")]
QueueName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Depth = Annotated[int, Field(ge=1, le=2**31 - 1)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Whole = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Number = Annotated[float, Field(ge=-1e300, le=1e300, allow_inf_nan=False)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Strict(BaseModel):
    """Unknown keys and values of another type are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")


def _narrow(hint: Any) -> Any:
    """The hint with the bounds that storage sets."""
    if get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(_narrow(part) for part in get_args(hint))]  # noqa: UP007
    return {int: Whole, float: Number}.get(hint, hint)


def _like(defaults: Any, name: str, doc: str, **instead: Any) -> type[Strict]:
    """A model with a dataclass's fields, each of them optional, and the values that `defaults` has."""
    hints = get_type_hints(type(defaults))
    fields_: dict[str, Any] = {}
    for field in dataclasses.fields(defaults):
        hint = instead.get(field.name, _narrow(hints[field.name]))
        fields_[field.name] = (hint, getattr(defaults, field.name))
    return create_model(name, __base__=Strict, __doc__=doc, **fields_)


Settings = _like(
    TUNING,
    "Settings",
    "How tuning searches and drafts; what is left out takes its default.",
    strategy=Literal[tuple(STRATEGIES)],
    branching=list[Annotated[list[Annotated[float, Field(ge=0, le=1e6)]], Field(min_length=2, max_length=2)]],
    seed=Whole,
)
SamplingBody = _like(Sampling(), "Sampling", "How a token is taken; temperature 0 is greedy.")


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
    settings: Settings = Field(default_factory=Settings)  # type: ignore[valid-type]
    sampling: SamplingBody = Field(default_factory=SamplingBody)  # type: ignore[valid-type]
    max_new_tokens: Count = MAX_NEW_TOKENS
    dtype: Literal[DTYPES] = "auto"  # type: ignore[valid-type]
    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:[0-9]{1,4})?|auto-map)$")] = "auto"
    speed: Speed = Field(default="auto", description="How the worker's runtime computes; graphs want CUDA.")
    limit: Depth | None = Field(default=None, description="Take only the first prompts.")
    queue: QueueName = DEFAULT_QUEUE

    @model_validator(mode="before")
    @classmethod
    def _storable(cls, values: Any) -> Any:
        _check_storable(values)
        return values

    def tune_request(self, stream: str, task: str) -> TuneRequest:
        """The request that a worker gets; the prompts travel apart.

        Raises: SettingsError: a value is out of its range.
        """
        return TuneRequest.from_json(
            {
                "model": self.model,
                "stream": stream,
                "task": task,
                "dtype": self.dtype,
                "device": self.device,
                "speed": self.speed,
                "max_new_tokens": self.max_new_tokens,
                "limit": self.limit,
                "sampling": dict(self.sampling),
                "settings": dict(self.settings),
            }
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
