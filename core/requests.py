"""What a caller asks for: the values behind `swiftopt tune` and `swiftopt generate`, whoever runs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .serialization import Settings, count
from .settings import SwiftSettings, TuningSettings
from .types import LayerSetRecord, Sampling

Speed = Literal[
    "auto", "native", "eager", "onednn", "compiled", "graphs", "compiled+graphs"
]  # how a runtime computes: models.loading.at_speed
MAX_NEW_TOKENS = 128  # tokens per completion, unless the caller or the stream's line says otherwise


@dataclass(frozen=True, slots=True)
class TuneRequest(Settings):
    """Tune `model` on the prompts of `stream` (a path, or "-" for standard input).

    `task` names the task of lines that have none (default: the file's stem); `out` is where completions go, one JSON
    object per line (None: a file in the user's data folder); `limit` takes only the first prompts; `concurrency`
    prompts are decoded at once.
    """

    NAME: ClassVar = "a tuning job"

    model: str
    stream: str
    task: str | None = None
    out: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    speed: Speed = "auto"
    max_new_tokens: int = count(MAX_NEW_TOKENS)
    limit: int | None = count(None)
    sampling: Sampling = field(default_factory=Sampling)
    settings: TuningSettings = field(default_factory=TuningSettings)
    concurrency: int = count(1)


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
