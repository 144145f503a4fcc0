"""Runs engines in turns on the same token ids, each row in a separate process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from ..core.errors import ContextOverflow, ModelNotFound, SwiftoptError
from ..core.settings import OMP_THREADS
from ..core.types import Prompt, Sampling
from ..decoding.session import Session
from ..models.cache import cache_root
from ..models.gguf_files import Rounding, gguf_of, stored_type
from ..models.gguf_model import settings_folder
from ..models.loading import load_tokenizer
from ..models.restacked import has_no_ops, takes_no_ops
from ..models.runtime import Runtime
from ..models.saved import OnStep, no_step, quiet, supported_config, supported_type
from ..models.sources import resolve
from ..optimizer.verdict import Timed, speed
from .devices import free_on, only_device, room_for
from .drafts import Speculation
from .export import ENGINES, NGRAM_TOKENS
from .packages import EngineFailed, Launch, Launches, Row, Weights
from .processes import Child

PLAIN_BITS = 16  # Weights with fewer bits than this count as quantised.
DRAFT_TOKENS = 8  # Default maximum draft length in tokens.
# Share of a process's peak memory that must still be resident; below it, its weights have been evicted.
RESIDENT_SHARE = 0.8
WARM_TOKENS = 8  # Tokens per warm-up, in which engines allocate and compile.
WARM_PROMPTS = 2  # Minimum number of warm-up prompts; some engines compile per length.
PRECISIONS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
PROCESS_BYTES = 1 << 30  # First estimate of a process's memory besides weights, in bytes.
GPU_PROCESS_BYTES = 4 << 30  # The same on a GPU: CUDA context, workspaces and KV cache.


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt as token ids, the same for every row."""

    prompt_id: str
    task: str
    token_ids: tuple[int, ...]
    max_new_tokens: int

    def to_json(self, max_new_tokens: int | None = None) -> dict[str, Any]:
        """Return the input line for an engine's process; `max_new_tokens` may lower the question's own number."""
        n_tokens = min(max_new_tokens or self.max_new_tokens, self.max_new_tokens)
        return {"prompt_ids": list(self.token_ids), "max_new_tokens": n_tokens, "task": self.task}


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """A row's completion of one prompt."""

    token_ids: tuple[int, ...]
    seconds: float
    prefill_s: float | None  # Seconds until the first token; None: the engine does not report them.
    drafted: int | None = None  # Drafted tokens; None: the row does not draft, or its engine does not count them.
    accepted: int | None = None


@dataclass(slots=True)
class RowRuns:
    """All turns of one row, or the `reason` why it has none."""

    row: Row
    weights: str  # Type or file name of the target's weights.
    turns: list[TimedAnswer] = field(default_factory=list)
    peak_bytes: int | None = None  # Peak memory: of the GPU if the row runs on one, else RAM.
    methods: set[str] = field(default_factory=set)  # Methods that swiftopt decoded with.
    reason: str = ""

    @property
    def timed(self) -> list[Timed]:
        return [Timed(len(turn.token_ids), turn.seconds) for turn in self.turns]

    @property
    def drafts(self) -> tuple[int, int] | None:
        """Total drafted and accepted tokens; None unless every turn counted them."""
        drafted = [turn.drafted for turn in self.turns if turn.drafted is not None]
        accepted = [turn.accepted for turn in self.turns if turn.accepted is not None]
        is_counted = self.turns and len(drafted) == len(accepted) == len(self.turns)
        return (sum(drafted), sum(accepted)) if is_counted else None

    @property
    def acceptance(self) -> float | None:
        """Acceptance rate, accepted / drafted tokens of all turns; None if nothing was drafted or counted."""
        drafted, accepted = self.drafts or (0, 0)
        return accepted / drafted if drafted else None

    def decode_speed(self) -> float | None:
        """Decoding speed in tokens per second without prefill; None if the engine does not time prefill separately."""
        decoding = [Timed(len(t.token_ids) - 1, t.seconds - t.prefill_s) for t in self.turns if t.prefill_s is not None]
        return speed(decoding) if len(decoding) == len(self.turns) else None


@dataclass(frozen=True, slots=True)
class TurnsRequest:
    """Settings common to all rows; `folder` holds the model, `db` is the database with swiftopt's plans.

    `device` is "cpu" or "cuda:N", see `devices.chosen_device`; each engine runs in its build for that device.
    """

    model: str
    folder: Path
    dtype: str = "auto"
    threads: int = os.cpu_count() or 1
    timeout_s: float = 600.0
    speed: str = "eager"
    db: str | None = None
    device: str = "cpu"

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def gguf(self) -> Path | None:
        """Path of the model if it is a quantised GGUF file, which swiftopt and GGUF engines load directly."""
        try:
            source = resolve(self.model)
        except ModelNotFound:  # `model` is only a label; the weights in `folder` were generated.
            return None
        if source.kind != "gguf":
            return None
        path = Path(source.location)
        scheme = supported_type(settings_folder(path, no_step))[1]
        return path if scheme is not None and scheme.bits < PLAIN_BITS else None


def questions_of(folder: Path, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Question]:
    """Return the prompts as token ids; of chats, the first turn.

    Raises: InvalidInput: the folder has no tokenizer or no chat template for a prompt. ContextOverflow: a prompt does
        not fit the model's context. ModelNotFound: the tokenizer cannot be read.
    """
    with quiet():
        tokenizer, config = load_tokenizer(folder), supported_config(folder)
    # The only fields of a Runtime that encoding reads.
    runtime_fields = {"tokenizer": tokenizer, "hf_model": None, "vocab_size": config.vocab_size}
    session = Session(cast(Runtime, SimpleNamespace(**runtime_fields)), Sampling(), max_new_tokens, ignore_eos=True)
    questions = [
        Question(prompt.id, prompt.task, tuple(session.encode(prompt)), session.room(prompt)) for prompt in prompts
    ]
    n_positions = config.max_position_embeddings
    for question in questions:
        n_needed = len(question.token_ids) + question.max_new_tokens
        if n_needed > n_positions:
            raise ContextOverflow(
                f"prompt {question.prompt_id!r} needs {n_needed} positions with its completion, and the model has"
                f" {n_positions}: shorten it or lower --max-new-tokens"
            )
    return questions


class Turns:
    """Runs every row on every question; the order of the rows rotates from prompt to prompt.

    `has_room` tells whether the device has so many bytes free for one more process.
    """

    def __init__(
        self,
        request: TurnsRequest,
        questions: Sequence[Question],
        rows: Sequence[Row],
        on_step: OnStep = no_step,
        has_room: Callable[[float], bool] | None = None,
    ) -> None:
        self.request, self.questions, self._on_step = request, questions, on_step
        self._has_room = has_room or partial(room_for, request.device)
        self.dtype = DTYPES[stored_type(request.folder)] if request.dtype == "auto" else request.dtype
        self._gguf = request.gguf
        stored = self._gguf.name if self._gguf else stored_type(request.folder)
        built_rows = (replace(row, engine=row.engine.built_for(request.device)) for row in rows)
        self.runs = [RowRuns(row, _weights_word(row, stored)) for row in built_rows]
        self._launches = Launches(on_step)
        self._children: dict[str, Child] = {}  # Processes by row name, the most recently used one last.
        self._gpu_bytes: dict[str, int] = {}  # GPU memory of each row's process.
        self.interrupted = False
        self._n_ctx = -(-max(len(q.token_ids) + q.max_new_tokens + 2 * DRAFT_TOKENS for q in questions) // 256) * 256

    def groups(self) -> list[list[Row]]:
        """Split the rows into groups that probably fit into memory together; each group includes the first row."""
        first, *others = (runs.row for runs in self.runs)
        groups = [[first]]
        for row in others:
            if len(groups[-1]) > 1 and not self._has_room(sum(map(self._row_bytes, [*groups[-1], row]))):
                groups.append([first])
            groups[-1].append(row)
        return groups

    def run(self) -> None:
        """Fill in the turns of each row, or the reason why it has none.

        An interrupt ends the run with the prompts that all rows have answered.

        Raises: KeyboardInterrupt: interrupted before all rows had answered a prompt.
        """
        try:
            for runs in self.runs:  # Install engines and prepare weights before any timing.
                self._attempt(runs, lambda runs: self._options(runs.row, self._launches.of(runs.row.engine)))
            for number, question in enumerate(self.questions):
                turn = number % len(self.runs)
                for runs in [*self.runs[turn:], *self.runs[:turn]]:
                    if not runs.reason:
                        self._attempt(runs, partial(self._turn, question))
        except KeyboardInterrupt:
            self.interrupted = True
            n_done = min((len(runs.turns) for runs in self.runs if not runs.reason), default=0)
            self.questions = self.questions[:n_done]
            for runs in self.runs:
                del runs.turns[n_done:]
            if not n_done:
                raise
        finally:
            while self._children:
                self._children.popitem()[1].close(at_once=self.interrupted)

    def _attempt(self, runs: RowRuns, act: Callable[[RowRuns], object]) -> None:
        try:
            act(runs)
        except (EngineFailed, SwiftoptError) as error:
            runs.reason, runs.turns = str(error), []
            self._on_step(f"{runs.row.name}: {error}")
            if child := self._children.pop(runs.row.name, None):
                child.close(at_once=True)

    def _turn(self, question: Question, runs: RowRuns) -> None:
        child = self._child(runs)
        with self._noting_memory(runs):
            answer = child.ask(question.to_json(), self.request.timeout_s)
        token_ids = tuple(int(token) for token in answer["token_ids"])
        if len(token_ids) != question.max_new_tokens:
            raise EngineFailed(f"it gave {len(token_ids)} tokens for a prompt that asks for {question.max_new_tokens}")
        figures = (answer.get(name) for name in ("prefill_s", "drafted", "accepted"))
        turn = TimedAnswer(token_ids, float(answer["seconds"]), *figures)
        runs.turns.append(turn)
        runs.methods |= {answer["method"]} if "method" in answer else set()
        tok_s = len(token_ids) / turn.seconds
        self._on_step(f"prompt {len(runs.turns)} of {len(self.questions)}, {runs.row.name}: {tok_s:.1f} tok/s")

    @contextmanager
    def _noting_memory(self, runs: RowRuns) -> Iterator[None]:
        """Record the peak memory of the row's process; on a GPU, add the decrease of free memory within this block."""
        name, device = runs.row.name, self.request.device
        free_before = free_on(device)
        yield
        if self.request.on_gpu:
            self._gpu_bytes[name] = self._gpu_bytes.get(name, 0) + free_before - free_on(device)
        if peak := self._gpu_bytes[name] if self.request.on_gpu else self._children[name].memory().peak:
            runs.peak_bytes = max(peak, runs.peak_bytes or 0)

    def _child(self, runs: RowRuns) -> Child:
        """Return the row's warm process, which is started if there is none.

        If memory is short, the most recently used processes end first: their next turn is the furthest away.
        """
        name = runs.row.name
        child = self._children.pop(name, None)
        if child is not None:
            if self.request.on_gpu or child.memory().resident > RESIDENT_SHARE * (runs.peak_bytes or 0):
                self._children[name] = child
                return child
            child.close()  # The system evicted its weights; to read them from disk again would distort its timing.
        launch = self._launches.of(runs.row.engine)
        options = self._options(runs.row, launch)
        needed = runs.peak_bytes or self._estimated_bytes(options)
        while self._children and not self._has_room(needed + self._mapped_bytes()):
            self._children.popitem()[1].close()
        self._on_step(f"starting {name}")
        self._gpu_bytes.pop(name, None)
        with self._noting_memory(runs):
            environ = engine_environ(self.request.device, self.request.threads)
            child = self._children[name] = Child(launch, options, environ, engine_log(name))
            child.wait_until_ready(self.request.timeout_s)
            for question in self._warm_ups():
                child.ask(question.to_json(WARM_TOKENS), self.request.timeout_s)
        return child

    def _mapped_bytes(self) -> int:
        """Return the bytes that processes map from files: the system counts them as free, but would evict them."""
        return 0 if self.request.on_gpu else sum(child.memory().mapped for child in self._children.values())

    def _warm_ups(self) -> list[Question]:
        """Return the first questions of all, and the first one of each task."""
        first_of_task = {question.task: question for question in reversed(self.questions)}
        return list(dict.fromkeys([*self.questions[:WARM_PROMPTS], *first_of_task.values()]))

    def _options(self, row: Row, launch: Launch) -> dict[str, Any]:
        """Return the options of the row's program; see `program`."""
        request = self.request
        draft = self._file(row.draft, row) if row.draft else None
        return {
            "model": str(self._file(row.weights, row)),
            "draft": str(draft) if draft else None,
            "trust_remote_code": draft is not None and has_no_ops(draft) and takes_no_ops(request.folder),
            "package": str(launch.folder),
            "swiftopt": str(Path(__file__).parents[1]),
            "dtype": self.dtype,
            "precision": PRECISIONS[self.dtype],
            "device": "cuda" if request.on_gpu else "cpu",  # A process sees one GPU only.
            "threads": request.threads,
            "n_ctx": self._n_ctx,
            "speed": request.speed,
            "db": request.db,
            "draft_tokens": DRAFT_TOKENS,
            "ngram_tokens": NGRAM_TOKENS,
            "min_confidence": 0.0,
            **self._settings(row),
            **row.options,
        }

    def _settings(self, row: Row) -> dict[str, Any]:
        """Return the row's drafting settings by the engine's names; empty without drafts, or if ENGINES lacks it."""
        options, own_text = row.options, bool(row.options.get("own_text"))
        if row.engine.engine is None or not (row.draft or own_text or options.get("ngram")):
            return {}
        speculation = Speculation(
            kind="draft" if row.draft else "text",
            n_tokens=options.get("draft_tokens", DRAFT_TOKENS),
            confidence=options.get("min_confidence", 0.0),
            own_text=own_text,
        )
        return {"settings": ENGINES[row.engine.engine].settings(speculation)}

    def _file(self, weights: Weights | Path, row: Row) -> Path:
        """Return the file or folder of weights that the row's engine can load; a GGUF file is written if needed."""
        if isinstance(weights, Path):
            is_checkpoint = (weights / "config.json").is_file() and not (weights / "openvino_model.xml").is_file()
            if not is_checkpoint or row.weights == "folder":
                return weights.resolve()
            return gguf_of(weights, "F16" if row.weights == "F16" else "stored", self._on_step)
        if weights == "file":
            assert row.file is not None
            return row.file.resolve()
        if weights == "folder":
            return self._gguf if self._gguf is not None and row.engine.name == "swiftopt" else self.request.folder
        if weights == "stored" and self._gguf is not None:
            return self._gguf
        rounding: Rounding = weights
        return gguf_of(self.request.folder, rounding, self._on_step)

    def _row_bytes(self, row: Row) -> float:
        try:
            return self._estimated_bytes(self._options(row, self._launches.of(row.engine)))
        except (EngineFailed, SwiftoptError):
            return 0.0  # The error is reported when the row runs.

    def _estimated_bytes(self, options: Mapping[str, Any]) -> float:
        """Estimate a new process's memory: 1.5 times its weight files, because engines copy weights, and libraries."""
        paths = [Path(options[key]) for key in ("model", "draft") if options.get(key)]
        process_bytes = GPU_PROCESS_BYTES if self.request.on_gpu else PROCESS_BYTES
        return 1.5 * sum(_weight_bytes(path) for path in paths) + process_bytes


def engine_environ(device: str, threads: int) -> dict[str, str]:
    """Return the environment of an engine's process that computes on the device with `threads` threads."""
    variables = {OMP_THREADS: str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # swiftopt sets OMP_WAIT_POLICY for itself; other engines must not inherit it.
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    return inherited | variables | only_device(device, os.environ)


def engine_log(name: str) -> Path:
    """Return the log file of the process called `name`, for example by its row."""
    return cache_root() / "peers" / "logs" / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}.log"


def _weight_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern))


def _weights_word(row: Row, stored: str) -> str:
    """Return what the report calls the row's weights; `stored` is the name of the model's own."""
    if row.weights == "file":
        return str(row.file.name if row.file else "")
    return stored if row.weights in ("folder", "stored") else row.weights
