"""What a caller asks for: the values behind `swiftopt tune`, whoever runs it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from .settings import SwiftSettings
from .types import LayerSetRecord, Sampling

MAX_NEW_TOKENS = 128  # tokens per completion, unless the caller or the stream's line says otherwise


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """Tune `model` on the prompts of `stream` (a path, or "-" for standard input).

    `task` names the task of lines that have none (default: the file's stem); `out` is where completions go, one JSON
    object per line (None: a file in the user's data folder); `limit` takes only the first prompts.
    """

    model: str
    stream: str
    task: str | None = None
    out: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_new_tokens: int = MAX_NEW_TOKENS
    limit: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    settings: SwiftSettings = field(default_factory=SwiftSettings)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the store."""
        return {**dataclasses.asdict(self), "settings": self.settings.to_json()}


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Decode with `model`: the values behind `swiftopt generate`.

    `task` chooses the stored plan (None: the prompt's own task); `method` "plain" or "swift" overrules it (None: what
    the plan says); `layer_set` takes the place of the stored set; a completion ends before the first of the `stop`
    strings; `settings` None means those stored with the plan, or the defaults where there is none.
    """

    model: str
    task: str | None = None
    method: str | None = None
    layer_set: LayerSetRecord | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_new_tokens: int = MAX_NEW_TOKENS
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    settings: SwiftSettings | None = None
