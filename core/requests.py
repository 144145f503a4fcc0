"""What a caller asks for: the values behind `swiftopt tune`, `generate`, `compare` and `serve`, whoever runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .errors import SettingsError
from .serialization import Record, Settings, count
from .settings import SwiftSettings, TuningSettings
from .streams import StreamForm
from .types import LayerSetRecord, Sampling

Speed = Literal[
    "auto", "exact", "native", "eager", "onednn", "compiled", "graphs", "compiled+graphs"
]  # how a runtime computes: models.loading.at_speed
MAX_NEW_TOKENS = 128  # tokens per completion, unless the caller or the stream's line says otherwise

BASE = "plain"  # the method that a comparison measures the others against
PEERS: Mapping[str, str] = {
    "hf-plain": "transformers, greedy",
    "hf-lookup": "transformers, prompt lookup",
    "hf-assisted": "transformers, draft model",
}
EARLIER_NAMES = {"hf-assistant": "hf-assisted"}  # as the result files of earlier versions have them


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest(Settings):
    """What every request says: the model, how it is loaded (`models.loading.load`), and how tokens are taken from it.

    `task` chooses the stored plan, or is what a new one is stored under.
    """

    NAME: ClassVar = "the request"

    model: str = field(kw_only=False)
    task: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    speed: Speed = "auto"
    max_new_tokens: int = count(MAX_NEW_TOKENS)
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest(ModelRequest):
    """Tune `model` on the prompts of `stream` (a path, or "-" for standard input).

    `form` says how its lines become prompts; `task` names the task of lines that have none (default: the file's stem);
    `out` is where completions go, one JSON object per line (None: a file in the user's data folder); `limit` takes only
    the first prompts; `concurrency` prompts are decoded at once.
    """

    NAME: ClassVar = "a tuning job"

    stream: str = field(kw_only=False)
    form: StreamForm = field(default_factory=StreamForm)
    out: str | None = None
    limit: int | None = count(None)
    settings: TuningSettings = field(default_factory=TuningSettings)
    concurrency: int = count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest(ModelRequest):
    """Decode with `model`: the values behind `swiftopt generate`.

    `task` None: the prompt's own task; `method`, a name of `decoding.methods`, overrules the stored plan (None: what
    the plan says); `layer_set` takes the place of the stored set, `draft_model` of the plan's; a completion ends before
    the first of the `stop` strings; `settings` None means those stored with the plan, or the defaults where there is
    none; `concurrency` prompts are decoded at once.
    """

    method: str | None = None
    layer_set: LayerSetRecord | None = None
    draft_model: str | None = None
    stop: tuple[str, ...] = ()
    settings: SwiftSettings | None = None
    concurrency: int = count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest(ModelRequest):
    """Compare `methods` on the same prompts; `plain`, which the others are measured against, always runs.

    `methods` are names of `decoding.methods` or PEERS; `settings`, by method, replace defaults; `task` names the plan
    (None: the stream's task, or "default" where it holds several). The methods of `presets`, names of `core.presets`,
    run with the presets' settings, and what they need is made by the preset, whatever is stored. Every prompt is
    decoded `samples` times, with seeds of their own. `keep` stores the report, the plan and what had to be made.
    """

    methods: tuple[str, ...] = field(kw_only=False)
    draft_model: str | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    presets: tuple[str, ...] = ()
    samples: int = count(1)
    keep: bool = True

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        peers = [name for name in self.methods if name in PEERS]
        if peers and not self.sampling.greedy:
            raise SettingsError(f"{peers[0]} runs greedily only: leave it out, or drop --temperature")
        if self.samples > 1 and self.sampling.greedy:
            raise SettingsError("samples of greedy decoding are all alike: give --temperature, or leave --samples out")
        if "hf-assisted" in peers and self.draft_model is None:
            raise SettingsError("hf-assisted drafts with a smaller model: name one with --draft-model, or leave it out")


@dataclass(frozen=True, slots=True)
class CompletionRequest(Settings):
    """One completion of a served model, as the HTTP process asks the model's engine for it.

    The prompt is `token_ids`, else `messages` for the chat template, with `tools` and the template's own `template`
    values, else `text`; `echo` has it told as well. `task` None: the one whose prompts lie nearest; `method` overrules
    the plan, `version` names a stored one; without `learn` nothing is tried on it; `max_new_tokens` None: as many as
    the context has room for, 0: the prompt is only read; `logprobs`: of each token, with so many alternatives, None:
    not wanted; with `trace` text is told with where its tokens came from; `json_schema` is what the text keeps to;
    `prediction` is text that is expected. Only requests of one `salt` share what was read of a prompt.
    """

    NAME: ClassVar = "the request"

    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    task: str | None = None
    method: str | None = None
    version: int | None = count(None)
    learn: bool = True
    max_new_tokens: int | None = count(None, least=0)
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = count(0, least=0)
    logprobs: int | None = count(None, least=0)
    echo: bool = False
    trace: bool = False
    json_schema: Mapping[str, Any] | None = None
    prediction: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel(Record):
    """A model that a server decodes with, and how its engine runs it.

    `path` is what is loaded, `name` what clients call it; `concurrency` requests run at once, their keys and values in
    `memory` bytes (None: half of what is free); with `tune` the engine learns from what it serves. `keep_prompts` is a
    file that prompts are appended to, as lines of a stream.
    """

    name: str
    path: str
    dtype: str = "auto"
    device: str = "auto"
    speed: Speed = "auto"
    db: str | None = None
    concurrency: int = 8
    memory: int | None = None
    tune: bool = True
    keep_prompts: str | None = None
