"""Requests of callers, such as `swiftopt tune`, `generate`, `compare` and `serve`, and the records of jobs."""

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
# The text that a token adds, or its bytes if they are not valid UTF-8 on their own.
Piece = str | list[int]

# Method names in result files of earlier versions, with their current names.
EARLIER_NAMES = {"hf-assistant": "hf-assisted"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest(Settings):
    """Common part of all requests: the model, how it is loaded (`models.loading.load`), and how tokens are sampled.

    `task` selects the stored plan, or names the task of a new one.
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

    `form` defines how its lines become prompts; `task` is the task of lines that name none (default: the file's stem);
    `out` is the file of completions, one JSON object per line (None: a file in the user's data folder); `limit` uses
    only the first prompts; `concurrency` prompts are decoded at once.
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

    `task` None: the prompt's own task; `method`, a name of `decoding.methods`, overrides the stored plan (None: use
    the plan); `layer_set` replaces the stored set, and `draft_model` that of the plan; a completion ends before
    the first of the `stop` strings; `settings` None means those stored with the plan, or the defaults without a plan;
    `concurrency` prompts are decoded at once.
    """

    method: str | None = None
    layer_set: LayerSetRecord | None = None
    draft_model: str | None = None
    stop: tuple[str, ...] = ()
    settings: SwiftSettings | None = None
    concurrency: int = count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest(ModelRequest):
    """Compare `methods` on the same prompts; `plain`, the base of the ratios, always runs.

    `methods` are names of `decoding.methods` or PEERS; `settings`, by method, replace defaults; `task` is the plan's
    task (None: the stream's task, or "default" if it has several). The methods of `presets`, names of `core.settings`,
    run with the presets' settings and with parts that the preset trains, whatever is stored. Every prompt is
    decoded `samples` times, with different seeds. `keep` stores the report, the plan and the parts that were created.
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
            raise SettingsError(f"{peers[0]} supports only greedy decoding: remove it, or remove --temperature")
        if self.samples > 1 and self.sampling.greedy:
            raise SettingsError("greedy decoding gives identical samples: use --temperature, or remove --samples")
        if "hf-assisted" in peers and self.draft_model is None:
            raise SettingsError("hf-assisted needs a smaller draft model: use --draft-model, or remove hf-assisted")


@dataclass(frozen=True, slots=True)
class CompletionRequest(Settings):
    """One completion of a served model, as the HTTP process requests it from the model's engine.

    The prompt is `token_ids`; or `messages` for the chat template, with `tools` and the template's own `template`
    values; or `text`, with or without the tokenizer's `special_tokens`. With `echo` the answer begins with the prompt.
    `task` None: the task with the nearest prompts; `method` overrides the plan, `version` selects a stored one; without
    `learn` nothing is tried on the request; `max_new_tokens` None: as many as the context allows, 0: only read the
    prompt; `logprobs`: number of alternatives per token, None: no log probabilities; with `trace` the answer names the
    source of each token; `json_schema` constrains the text; `forced` are indices of tools of which one must be called;
    `prediction` is the expected text. Only requests with the same `salt` share kept prefixes.
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
    """Return the name of the API key at the start of a salt; "" without keys."""
    name, colon, _ = salt.partition(":")
    return name if colon else ""


def settled_length(text: str, stop_strings: Sequence[str], n_free: int = 0) -> int:
    """Return the length of the part of `text` that no stop string can cut, complete or begun at the end of `text`.

    Args: n_free: number of first characters in which a stop string may end without effect.
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

    `path` is the model to load, `name` its name for clients; `concurrency` requests run at once, with their keys and
    values in `memory` bytes (None: half of the free memory); with `tune` the engine learns from its requests.
    `keep_prompts` is a file to which prompts are appended, as lines of a stream. Finished answers, as sources of
    drafts, take up to `corpus_mb` MiB; `keep_corpus` is a folder to store them, too. `keep_prefixes` is a folder for
    keys and values of texts, up to `prefixes_gb` GB.
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
    "pause": "Pause a job: a running one saves a checkpoint and frees its device at its next step.",
    "resume": "Resume a paused job: it is queued again, and continues from its checkpoint.",
    "stop": "End a job with the best result so far: it succeeds at its next step, with the layer sets that it has.",
    "cancel": "End a job without a result: its finished completions are kept.",
    "retry": "Queue a failed or cancelled job again: it resumes from its last checkpoint.",
}
VERBS: tuple[Verb, ...] = tuple(VERB_HELP)
END_STATES: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")
UNFINISHED: tuple[JobState, ...] = ("queued", "running", "paused")

DEFAULT_QUEUE = "default"
# Request fields that only say how to read the prompts. A submitted job contains the prompts instead.
LINES_FROM = ("stream", "form", "out", "task", "limit")


def worker_command(queue: str) -> str:
    """Return the command that starts a worker of a queue, for hints."""
    option = "" if queue == DEFAULT_QUEUE else f" --queue {queue}"
    return f"`swiftopt worker{option}`"


def tune_command(model: str, task: str) -> str:
    """Return the shell command that tunes a model for a task."""
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
        """Its name in the queue, unique to the attempt."""
        return f"{self.job}-a{self.attempt}"


@dataclass(frozen=True, slots=True)
class Job(Record):
    """A job's row. `queue` None: it runs in the process that started it, and no worker may take it.

    `obstacle` is the reason why a queued job does not run; only a server's answer about a single job has it.

    `attempt` is the number of the queued or running attempt; `request` is `TuneRequest.to_json()`; `progress` has the
    latest figures, as in the event of that name; times are UTC, ISO 8601. `n_outputs` counts finished completions;
    `layer_sets` are those that the job stored: one per task, and one more if an interrupted run was retried. `plans`
    are the plans in use for each of these tasks.
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
        """Whether it has ended, so that only `retry` can change it."""
        return self.state in END_STATES

    @property
    def model(self) -> str:
        """The model's name, as shown to users."""
        return str(self.request.get("model", ""))

    @property
    def figures(self) -> Progress | None:
        """The latest figures of a running job; None if there are none, or a newer swiftopt wrote them."""
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
        """The event; None if it cannot be read, for example because a newer swiftopt wrote it."""
        with suppress(StoreError):
            return event_from_json(self.type, self.data)
        return None


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job to submit. `lines` is the stream as JSON Lines, every line with its task; `stream` its SHA-256."""

    kind: JobKind
    queue: str | None
    request: Mapping[str, Any] = field(default_factory=dict)
    stream: str | None = None
    lines: str | None = None
    n_prompts: int = 0
    idempotency_key: str | None = None

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 over everything that determines the result; two unfinished jobs never share one."""
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
    """A page of a job's events; the next page starts after `next_after`."""

    SCHEMA: ClassVar = "swiftopt.events/1"
    ERROR: ClassVar = StoreError

    events: tuple[JobEvent, ...]
    next_after: int


class JobBoard(Protocol):
    """Interface to submit, list and control jobs: directly in database and queue, or on a server over HTTP.

    Raises: NotFound, Conflict, StoreError, ServiceUnreachable: depending on the implementation.
    """

    def submit(
        self,
        request: TuneRequest,
        prompts: Sequence[Prompt],
        queue: str = DEFAULT_QUEUE,
        idempotency_key: str | None = None,
    ) -> tuple[Job, bool]:
        """Submit a request on these prompts; return its job, and whether the job is new."""

    def get(self, job: str) -> Job:
        """The current state of one job."""

    def latest(self, state: JobState | None = None, limit: int = 100) -> list[Job]:
        """The newest jobs first."""

    def act(self, job: str, verb: Verb) -> Job:
        """Pause, resume, stop, cancel or retry a job; return its new state."""

    def obstacle(self, job: Job) -> str | None:
        """The reason why a queued job does not run, as a sentence; None for other jobs, or if a worker can take it."""

    def events(self, job: str, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """The job's events after event number `after`, oldest first."""

    def outputs(self, job: str) -> list[PromptFinished]:
        """The finished completions in the order of the stream."""
