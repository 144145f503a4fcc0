"""What callers ask for, `swiftopt tune`, `generate`, `compare` and `serve` among them, and the jobs that do it."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, get_args

from .errors import SettingsError, StoreError
from .events import Event, JobState, Progress, PromptFinished, event_from_json
from .records import LayerSetRecord, PlanInUse
from .serialization import Record, Settings, count
from .settings import SwiftSettings, TuningSettings
from .streams import StreamForm
from .types import Prompt, Sampling

# Which kernels a runtime computes with; `models.loading.at_speed` describes them.
Speed = Literal["auto", "exact", "eager", "graphs"]
# Default limit of generated tokens per completion; a caller or a line of the stream can set another.
MAX_NEW_TOKENS = 128

BASE = "plain"  # Baseline method of a comparison.
PEERS: Mapping[str, str] = {
    "hf-plain": "transformers, greedy",
    "hf-lookup": "transformers, prompt lookup",
    "hf-assisted": "transformers, draft model",
}
# The text that a token adds, or its bytes where they are not valid UTF-8 on their own.
Piece = str | list[int]

# Method names in result files of earlier versions, with their current names.
EARLIER_NAMES = {"hf-assistant": "hf-assisted"}


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
    """Decode with `model`: the values of `swiftopt generate`.

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
    (None: the stream's task, or "default" where it holds several). The methods of `presets`, names of `core.settings`,
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
    """One completion of a served model, as the HTTP process requests it from the model's engine.

    The prompt is `token_ids`, else `messages` for the chat template, with `tools` and the template's own `template`
    values, else `text`, with the tokenizer's `special_tokens` or without; with `echo` the answer begins with it. `task`
    None: the one with the nearest prompts; `method` overrules the plan, `version` names a stored one; without `learn`
    nothing is tried on it; `max_new_tokens` None: as many as the context has room for, 0: the prompt is only read;
    `logprobs`: of each token, with so many alternatives, None: not wanted; with `trace` the answer names the source of
    each token; `json_schema` constrains the text; one of the tools at the places `forced` has to be called;
    `prediction` is text that is expected. Only requests of one `salt` share what was read of a prompt.
    """

    NAME: ClassVar = "the request"

    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: bool = True
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
    forced: tuple[int, ...] = ()
    prediction: str = ""
    salt: str = ""


def owner_of(salt: str) -> str:
    """Return the name of the API key that a salt begins with; "" where there are no keys."""
    name, colon, _ = salt.partition(":")
    return name if colon else ""


def settled_length(text: str, stop_strings: Sequence[str], n_free: int = 0) -> int:
    """Return the length of the part of `text` that no stop string, found or begun at its end, can cut.

    Args: n_free: characters within which a stop string may end without cutting anything.
    """
    length = len(text)
    for stop in stop_strings:
        stop_start = text.find(stop, max(0, n_free - len(stop) + 1))
        n_begun = next(
            (
                n_characters
                for n_characters in range(min(len(stop), len(text)), 0, -1)
                if text.endswith(stop[:n_characters])
            ),
            0,
        )
        length = min(length, stop_start if stop_start >= 0 else len(text) - n_begun)
    return length


@dataclass(frozen=True, slots=True)
class ServedModel(Record):
    """A model that a server decodes with, and how its engine runs it.

    `path` is what is loaded, `name` what clients call it; `concurrency` requests run at once, their keys and values in
    `memory` bytes (None: half of what is free); with `tune` the engine learns from what it serves. `keep_prompts` is a
    file that prompts are appended to, as lines of a stream. Finished answers, which drafts may repeat, take up to
    `corpus_mb` MiB; `keep_corpus` is a folder where they are stored, too. `keep_prefixes` is a folder where keys and
    values of texts are stored, up to `prefixes_gb` GB.
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
    corpus_mb: int = 64
    keep_corpus: str | None = None
    keep_prefixes: str | None = None
    prefixes_gb: float = 10.0


# --- jobs, as the queue, workers, API and terminal exchange them; their states:
#
# queued ──claim──▶ running ──▶ succeeded | failed | cancelled
#   ▲  ▲              │  │
#   │  └─ hand back, ─┘  └─pause─▶ paused ──resume──▶ queued
#   │     lost worker, error with attempts left
#   └──────────── retry of a failed or cancelled job

# A "noop" job does nothing: it measures the overhead of the queue without torch.
JobKind = Literal["tune", "noop"]
Verb = Literal["pause", "resume", "stop", "cancel", "retry"]
Wanted = Literal["pause", "stop"]  # Request that a running job obeys at its next step.

# When the alias `best` moves to a newly tuned plan; "if none": only if the task has no `best` yet.
Promotion = Literal["always", "if none", "never"]

STATES: tuple[JobState, ...] = get_args(JobState)
VERB_HELP: Mapping[Verb, str] = {
    "pause": "Let a job rest: a running one saves where it is and frees its device at its next step.",
    "resume": "Let a paused job go on: it is queued again, and goes on from where it was.",
    "stop": "End a job with the best found so far: it succeeds at its next step, with the layer sets that it has.",
    "cancel": "End a job without a result: the completions it has finished are kept.",
    "retry": "Queue a failed or cancelled job again: it goes on from its last checkpoint.",
}
VERBS: tuple[Verb, ...] = tuple(VERB_HELP)
END_STATES: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")
UNFINISHED: tuple[JobState, ...] = ("queued", "running", "paused")

DEFAULT_QUEUE = "default"
# Request fields that only say how to read the prompts. A submitted job contains the prompts instead.
LINES_FROM = ("stream", "form", "out", "task", "limit")


def worker_command(queue: str) -> str:
    """Return the command that starts a worker of a queue, as hints name it."""
    option = "" if queue == DEFAULT_QUEUE else f" --queue {queue}"
    return f"`swiftopt worker{option}`"


def tune_command(model: str, task: str) -> str:
    """Return the command that tunes a model for a task, as a shell reads it."""
    return shlex.join(["swiftopt", "tune", "--model", model, "--stream", "FILE", "--task", task])


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write for a job, as long as this attempt is its latest and the job runs."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Delivery(Lease):
    """One attempt on its way to a worker of `queue`, which may then write for it."""

    queue: str

    @property
    def id(self) -> str:
        """Its name in the queue: every attempt has its own."""
        return f"{self.job}-a{self.attempt}"


@dataclass(frozen=True, slots=True)
class Job(Record):
    """A job's row. `queue` None: it runs in the process that began it, and no worker may take it.

    `obstacle` says why a queued job does not run; a server tells it of single jobs, and the row knows nothing of it.

    `attempt` is the one that is queued or running; `request` is `TuneRequest.to_json()`; `progress` the latest figures,
    as in the event of that name; times are UTC, ISO 8601. `n_outputs` counts finished completions; `layer_sets` are
    what the job stored: one per task, and one more after where an interrupted run was retried. `plans` say what is in
    use for each of these tasks.
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
    plans: tuple[PlanInUse, ...] = ()
    created_at: str = ""
    started_at: str | None = None
    finished_at: str | None = None
    obstacle: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # The JSON of a layer set does not contain its job's id.
        sets = tuple(replace(record, job=self.id) for record in self.layer_sets)
        object.__setattr__(self, "layer_sets", sets)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended and nothing but `retry` changes it any more."""
        return self.state in END_STATES

    @property
    def model(self) -> str:
        """The model's name, as shown to users."""
        return str(self.request.get("model", ""))

    @property
    def figures(self) -> Progress | None:
        """The latest figures of a job that runs; None if it left none, or a newer swiftopt did."""
        if self.progress is None or self.is_finished:
            return None
        event = JobEvent(0, "progress", self.progress, "").event
        return event if isinstance(event, Progress) else None


@dataclass(frozen=True, slots=True)
class JobEvent(Record):
    """An event as stored: `id` rises with time, `data` is the event's JSON object."""

    id: int
    type: str
    data: Mapping[str, Any]
    created_at: str

    @property
    def event(self) -> Event | None:
        """The event as it was reported; None for one that cannot be read, such as a newer swiftopt's."""
        with suppress(StoreError):
            return event_from_json(self.type, self.data)
        return None


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
    """Events of a job; ask again for those after `next_after`."""

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

    def obstacle(self, job: Job) -> str | None:
        """Why a queued job does not run, in a sentence; None for other jobs, and where somebody can take it."""

    def events(self, job: str, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """What the job reported after event number `after`, oldest first."""

    def outputs(self, job: str) -> list[PromptFinished]:
        """The finished completions in the order of the stream."""
