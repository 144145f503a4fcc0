"""What a caller asks for: the values behind `swiftopt tune`, whoever runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import SettingsError
from .formats import AUTO
from .settings import SwiftSettings
from .typed import check_type
from .types import LayerSetRecord, Sampling

# What tuning does unless it is told otherwise: not the paper's SWIFT, but what decodes fastest here (bench/RESULTS.md).
TUNING = SwiftSettings(method="adaptive", draft_format=AUTO, strategy="knapsack", search_drafting=True)
Speed = Literal[
    "auto", "native", "eager", "onednn", "compiled", "graphs", "compiled+graphs"
]  # how a runtime computes: models.loading.at_speed
MAX_NEW_TOKENS = 128  # tokens per completion, unless the caller or the stream's line says otherwise


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """Tune `model` on the prompts of `stream` (a path, or "-" for standard input).

    `task` names the task of lines that have none (default: the file's stem); `out` is where completions go, one JSON
    object per line (None: a file in the user's data folder); `limit` takes only the first prompts; `concurrency`
    prompts are decoded at once.
    """

    model: str
    stream: str
    task: str | None = None
    out: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    speed: Speed = "auto"
    max_new_tokens: int = MAX_NEW_TOKENS
    limit: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    settings: SwiftSettings = TUNING
    concurrency: int = 1

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the store."""
        return {**dataclasses.asdict(self), "settings": self.settings.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TuneRequest:
        """Inverse of `to_json`; a missing key takes its default.

        Raises: SettingsError: a key is unknown, missing, or its value of the wrong type or out of range.
        """
        unknown = sorted(set(values) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise SettingsError(f"a tuning job has no {unknown[0]!r}: known are {_names(cls)}")
        for name, kind in _KINDS.items():
            if name in values and not _is(values[name], kind):
                raise SettingsError(f"{name} of a tuning job is {values[name]!r}: use {_WORDS[kind]}")
        try:
            sampling = Sampling(**(values.get("sampling") or {}))
            settings = SwiftSettings.from_json({**TUNING.to_json(), **(values.get("settings") or {})})
            request = cls(**{**values, "sampling": sampling, "settings": settings})
            check_type(request, cls, "a tuning job")
            return request
        except TypeError as error:
            raise SettingsError(f"this tuning job cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Decode with `model`: the values behind `swiftopt generate`.

    `task` chooses the stored plan (None: the prompt's own task); `method`, a name of `decoding.methods`, overrules it
    (None: what the plan says); `layer_set` takes the place of the stored set, `draft_model` of the plan's; a completion
    ends before the first of the `stop` strings; `settings` None means those stored with the plan, or the defaults where
    there is none; `concurrency` prompts are decoded at once.
    """

    model: str
    task: str | None = None
    method: str | None = None
    layer_set: LayerSetRecord | None = None
    draft_model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    speed: Speed = "auto"
    max_new_tokens: int = MAX_NEW_TOKENS
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    settings: SwiftSettings | None = None
    concurrency: int = 1


_KINDS = {
    "model": str,
    "stream": str,
    "task": str | None,
    "out": str | None,
    "dtype": str,
    "device": str,
    "speed": str,
    "max_new_tokens": int,
    "limit": int | None,
    "concurrency": int,
    "sampling": Mapping,
    "settings": Mapping,
}
_WORDS = {
    str: "a string",
    str | None: "a string or null",
    int: "a whole number of 1 or more",
    int | None: "a whole number of 1 or more, or null",
    Mapping: "an object",
}


def _is(value: Any, kind: Any) -> bool:
    """Whether `value` is of that kind; true and false are no numbers, and numbers begin at 1."""
    if not isinstance(value, kind):
        return False
    return not isinstance(value, bool) and (not isinstance(value, int) or value >= 1)


def _names(values: type[Any]) -> str:
    return ", ".join(field.name for field in dataclasses.fields(values))
