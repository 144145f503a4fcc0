"""`bench peers --gguf FILE`: swiftopt and builds of llama.cpp on the same unchanged GGUF file.

A cell is a depth (tokens before the first generated one) and a number of concurrent requests. In each cell every row
has a separate process, and rows take turns. Before that, the start of each row is timed twice: without the file in the
system's cache (cold), and with it (warm).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ..core.errors import ContextOverflow, SettingsError, SwiftoptError
from ..models.gguf_model import settings_folder
from ..models.gguf_reader import parts_of
from ..models.loading import load_tokenizer
from ..models.saved import OnStep, no_step, quiet, supported_config
from ..models.sources import resolve
from ..terminal.render import folding, number, numeric, table
from .devices import room_for
from .packages import PACKAGES, PROGRAM, EngineFailed, Launches, Row
from .peers import rounded
from .processes import Child, refuse_other_lengths
from .turns import PROCESS_BYTES, engine_environ, engine_log

SCHEMA = "swiftopt.bench-same-file/1"
AT_ONCE = PROGRAM.with_name("at_once.py")
LLAMA_CPP = ("llama-cpp/plain", "node-llama-cpp/plain")  # The faster of these in a cell is the base of its ratios.
REFERENCE = "swiftopt/plain"  # Row whose tokens the others are compared with.
LEAST_TOKENS = 16  # Length of the prompts at depth 0.
ROOM = 64  # Slots of a request for drafts, beyond its prompt and completion.
WARM_TOKENS = 4  # Tokens of the first, untimed requests of a process.
TASK = "default"
PAGE = 256  # n_ctx is a multiple of this, as llama.cpp rounds it.


def file_rows() -> list[Row]:
    """Return the rows, in the table's order: the engines that read GGUF files, each with the same file."""
    variants: list[tuple[str, str, dict[str, Any]]] = [
        ("swiftopt", "plain", {}),
        ("swiftopt", "best", {"best": True}),
        ("llama-cpp", "plain", {}),
        ("node-llama-cpp", "plain", {}),
        ("ik-llama-cpp", "plain", {}),
    ]
    rows = []
    for name, variant, options in variants:
        package = PACKAGES[name]
        program = package.file if package.tool == "npm" else AT_ONCE
        rows.append(Row(replace(package, file=program), variant, "file", options))
    return rows


@dataclass(frozen=True, slots=True)
class SameFileRequest:
    """A measurement of every cell of `depths` and `at_once`."""

    gguf: str  # Path or name of the GGUF file.
    depths: tuple[int, ...] = (0, 2000, 8000)
    at_once: tuple[int, ...] = (1, 4, 8)  # Numbers of concurrent requests.
    max_new_tokens: int = 128
    rounds: int = 2  # Number of times that each row runs in a cell.
    threads: int = os.cpu_count() or 1
    timeout_s: float = 600.0
    speed: str = "auto"
    db: str | None = None


@dataclass(slots=True)
class CellRuns:
    """A row's runs in a cell, or the `reason` why it has none."""

    row: str
    depth: int
    at_once: int
    seconds: list[float] = field(default_factory=list)  # Of each run.
    # Of each run: an answer per request, with its tokens and the seconds until the first and the last one.
    answers: list[list[dict[str, Any]]] = field(default_factory=list)
    peak_bytes: int = 0
    reason: str = ""

    @property
    def tok_s(self) -> float | None:
        """Tokens of all requests per second, prefill included; None without runs."""
        n_tokens = sum(len(answer["token_ids"]) for run in self.answers for answer in run)
        return n_tokens / sum(self.seconds) if self.seconds else None

    @property
    def decode_tok_s(self) -> float | None:
        """Sum over requests of tokens per second after the first token, as the mean of the runs."""
        speeds = [sum(speed for speed in map(_decode_speed, run)) for run in self.answers]
        return statistics.mean(speeds) if speeds and min(speeds) > 0 else None

    @property
    def first_token_s(self) -> float | None:
        """Mean seconds until a request's first token, while the prompts of all requests are read."""
        seconds = [answer["first_s"] for run in self.answers for answer in run]
        return statistics.mean(seconds) if seconds else None

    @property
    def token_ids(self) -> list[list[int]]:
        """Token ids of each request in the first run."""
        return [answer["token_ids"] for answer in self.answers[0]] if self.answers else []


def _decode_speed(answer: dict[str, Any]) -> float:
    n_tokens, seconds = len(answer["token_ids"]) - 1, answer["last_s"] - answer["first_s"]
    return n_tokens / seconds if n_tokens and seconds > 0 else 0.0


@dataclass(slots=True)
class StartRuns:
    """Seconds from the start of a row's process until its first token, or the `reason` why it has none."""

    row: str
    cold_s: float | None = None  # None: the file cannot be removed from the system's cache.
    warm_s: float | None = None
    peak_bytes: int = 0
    reason: str = ""


class SameFile:
    """Measures all rows on one file.

    Raises: ModelNotFound, UnsupportedModel: swiftopt cannot read the file. SettingsError: it is not a GGUF file.
        ContextOverflow: a depth does not fit the model's context.
    """

    def __init__(
        self,
        request: SameFileRequest,
        rows: Sequence[Row],
        on_step: OnStep = no_step,
        has_room: Callable[[float], bool] | None = None,
    ) -> None:
        source = resolve(request.gguf)
        if source.kind != "gguf":
            raise SettingsError(f"{request.gguf} is not a GGUF file: name one, or use --model for other models")
        self.request, self.rows, self._on_step = request, list(rows), on_step
        self.file = Path(source.location)
        self._has_room = has_room or (lambda n_bytes: room_for("cpu", n_bytes))
        folder = settings_folder(self.file, on_step)
        n_positions = supported_config(folder).max_position_embeddings
        n_needed = max(max(request.depths), LEAST_TOKENS) + request.max_new_tokens + ROOM
        if n_needed > n_positions:
            raise ContextOverflow(
                f"a depth of {max(request.depths)} needs {n_needed} positions with its completion, and the model has"
                f" {n_positions}: lower --depths or --max-new-tokens"
            )
        with quiet():
            tokenizer = load_tokenizer(folder)
        self._bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
        self._text = _text_ids(tokenizer, max(request.depths) + LEAST_TOKENS * max(request.at_once))
        self.n_bytes = sum(path.stat().st_size for path in parts_of(self.file))
        self.starts = [StartRuns(row.name) for row in self.rows]
        self.cells: list[CellRuns] = []
        self._launches = Launches(on_step)
        self._children: dict[str, Child] = {}
        self.interrupted = False

    def run(self) -> None:
        """Fill in `starts` and `cells`, with the reason for each failure; an interrupt ends the run with what it has.

        Raises: KeyboardInterrupt: interrupted before anything was measured.
        """
        try:
            for row in self.rows:  # Install engines before any timing.
                with suppress(EngineFailed):
                    self._launches.of(row.engine)
            for row, start in zip(self.rows, self.starts, strict=True):
                self._attempt(row, start, partial(self._start, row, start))
            for depth in self.request.depths:
                for n_requests in self.request.at_once:
                    self._run_cell(depth, n_requests)
        except KeyboardInterrupt:
            self.interrupted = True
            if not self.cells and not any(start.warm_s for start in self.starts):
                raise
        finally:
            self._close_all()

    def _run_cell(self, depth: int, n_requests: int) -> None:
        cells = [CellRuns(row.name, depth, n_requests) for row in self.rows]
        self.cells += cells
        pairs = list(zip(self.rows, cells, strict=True))
        for i in range(self.request.rounds):
            turn = i % len(pairs)
            for row, cell in [*pairs[turn:], *pairs[:turn]]:
                if not cell.reason:
                    self._attempt(row, cell, partial(self._turn, row, cell))
        self._close_all()

    def _attempt(self, row: Row, runs: StartRuns | CellRuns, act: Callable[[], object]) -> None:
        try:
            act()
        except (EngineFailed, SwiftoptError) as error:
            runs.reason = str(error)
            self._on_step(f"{row.name}: {error}")
            if child := self._children.pop(row.name, None):
                child.close(at_once=True)

    def _child(self, row: Row, n_ctx: int, n_requests: int) -> Child:
        launch = self._launches.of(row.engine)
        if self._children and not self._has_room(1.5 * self.n_bytes + PROCESS_BYTES):
            self._close_all()
        request = self.request
        options = {
            **{"model": str(self.file), "engine": row.engine.name, "package": str(launch.folder)},
            **{"dtype": "auto", "device": "cpu", "speed": request.speed, "db": request.db, "threads": request.threads},
            **{"n_ctx": -(-n_ctx // PAGE) * PAGE, "at_once": n_requests},
            **row.options,
        }
        environ, log = engine_environ("cpu", request.threads), engine_log(f"{row.name}-same-file")
        child = self._children[row.name] = Child(launch, options, environ, log)
        child.wait_until_ready(request.timeout_s)
        return child

    def _start(self, row: Row, start: StartRuns) -> None:
        self._launches.of(row.engine)  # Install the engine before its start is timed.
        seconds: list[float | None] = []
        for is_cold in (True, False):
            evicted = is_cold and all([_evict(path) for path in parts_of(self.file)])
            started = perf_counter()
            child = self._child(row, LEAST_TOKENS + ROOM, 1)
            child.ask({"requests": self._requests(0, 1, 1)}, self.request.timeout_s)
            seconds.append(perf_counter() - started if evicted or not is_cold else None)
            start.peak_bytes = max(start.peak_bytes, child.memory().peak)
            self._children.pop(row.name).close()
        start.cold_s, start.warm_s = seconds
        self._on_step(f"{row.name}: first token after {start.warm_s:.2f} s")

    def _turn(self, row: Row, cell: CellRuns) -> None:
        n_requests, n_new = cell.at_once, self.request.max_new_tokens
        child = self._children.get(row.name)
        if child is None:
            child = self._child(row, max(cell.depth, LEAST_TOKENS) + n_new + ROOM, n_requests)
            child.ask({"requests": self._requests(0, n_requests, WARM_TOKENS)}, self.request.timeout_s)
        answer = child.ask({"requests": self._requests(cell.depth, n_requests, n_new)}, self.request.timeout_s)
        refuse_other_lengths(answer["answers"], n_new)
        cell.seconds.append(float(answer["seconds"]))
        cell.answers.append(answer["answers"])
        cell.peak_bytes = max(cell.peak_bytes, child.memory().peak)
        tok_s = n_requests * n_new / cell.seconds[-1]
        self._on_step(f"depth {cell.depth}, {n_requests} at once, {row.name}: {tok_s:.1f} tok/s")

    def _requests(self, depth: int, n_requests: int, n_new: int) -> list[dict[str, Any]]:
        """Return requests whose prompts start at different places of a text, so that they share no prefix."""
        n_ids = max(depth, LEAST_TOKENS)
        starts = (i * LEAST_TOKENS for i in range(n_requests))
        return [
            {
                "prompt_ids": [*self._bos, *self._text[start : start + n_ids]][:n_ids],
                "max_new_tokens": n_new,
                "task": TASK,
            }
            for start in starts
        ]

    def _close_all(self) -> None:
        while self._children:
            self._children.popitem()[1].close(at_once=self.interrupted)

    def report(self, machine: str) -> dict[str, Any]:
        """Return the object that `swiftopt bench peers --gguf FILE --json` prints."""
        request = self.request
        return {
            "schema": SCHEMA,
            "file": str(self.file),
            "bytes": self.n_bytes,
            "device": machine,
            "threads": request.threads,
            "max_new_tokens": request.max_new_tokens,
            "rounds": request.rounds,
            "interrupted": self.interrupted,
            "starts": [
                {
                    "row": start.row,
                    "reason": start.reason or None,
                    "cold_s": rounded(start.cold_s),
                    "warm_s": rounded(start.warm_s),
                    "peak_bytes": start.peak_bytes or None,
                }
                for start in self.starts
            ],
            "results": [self._result(cell) for cell in self.cells],
        }

    def _result(self, cell: CellRuns) -> dict[str, Any]:
        rows = {other.row: other for other in self.cells if (other.depth, other.at_once) == (cell.depth, cell.at_once)}
        base_tok_s = max((rows[name].tok_s or 0.0 for name in LLAMA_CPP if name in rows), default=0.0)
        expected = rows[REFERENCE].token_ids if REFERENCE in rows and cell.row != REFERENCE else []
        n_equal = None
        if cell.token_ids and expected:
            n_equal = sum(ids == expected_ids for ids, expected_ids in zip(cell.token_ids, expected, strict=True))
        return {
            **{"row": cell.row, "depth": cell.depth, "at_once": cell.at_once, "reason": cell.reason or None},
            "tok_s": rounded(cell.tok_s),
            "decode_tok_s": rounded(cell.decode_tok_s),
            "ratio": rounded(cell.tok_s / base_tok_s if cell.tok_s and base_tok_s else None),
            "first_token_s": rounded(cell.first_token_s),
            "peak_bytes": cell.peak_bytes or None,
            "equal": n_equal,
        }


def same_file_view(report: Mapping[str, Any]) -> list[RenderableType]:
    """Return the tables of starts and of cells, and below them the reasons why rows were not run."""
    name = Path(report["file"]).name
    title = f"{name}, {report['bytes'] / 1e9:.2f} GB, {report['device']}, {report['threads']} threads"
    failures: dict[str, list[str]] = {}  # Rows and cells that were not run, by reason.

    def remark(result: Mapping[str, Any], subject: str) -> str:
        if not result["reason"]:
            return ""
        failures.setdefault(result["reason"], []).append(subject)
        return f"not run ({list(failures).index(result['reason']) + 1})"

    starts = [
        (
            start["row"],
            *(number(start[key], 2, " s") for key in ("cold_s", "warm_s")),
            _memory(start),
            remark(start, start["row"]),
        )
        for start in report["starts"]
    ]
    cells = []
    for result in report["results"]:
        subject = f"{result['row']} at depth {result['depth']}, {result['at_once']} at once"
        speeds = (number(result["tok_s"], 1), number(result["decode_tok_s"], 1), number(result["ratio"], unit="x"))
        equal = "" if result["equal"] is None else f"{result['equal']}/{result['at_once']}"
        figures = (*speeds, number(result["first_token_s"], 2, " s"), _memory(result), equal)
        cells.append((str(result["depth"]), str(result["at_once"]), result["row"], *figures, remark(result, subject)))
    start_headings = ("cold", "warm", "memory")
    headings = ("tok/s", "decode", "ratio", "first token", "memory", "equal")
    caption = (
        f"{report['max_new_tokens']} tokens per request, {report['rounds']} runs; tok/s: of all requests, prefill"
        " included; decode: after the first token, summed over requests; ratio: of tok/s to llama.cpp's faster build;"
        " equal: requests with the tokens of swiftopt/plain. Engines round differently."
    )
    start_columns = [folding("row"), *map(numeric, start_headings), folding("")]
    columns = [numeric("depth"), numeric("at once"), folding("row"), *map(numeric, headings), folding("")]
    views: list[RenderableType] = [
        table(start_columns, starts, title=f"{title}: until the first token"),
        "",
        table(columns, cells, title=title),
        Text(caption),
    ]
    footnotes = [f"({n}) {', '.join(rows)}: {reason}" for n, (reason, rows) in enumerate(failures.items(), start=1)]
    return [*views, *map(Text, footnotes)]


def _memory(result: Mapping[str, Any]) -> str:
    return number(result["peak_bytes"] and result["peak_bytes"] / 1e9, 2, " GB")


def _evict(path: Path) -> bool:
    """Remove a file from the system's cache; return False if the system cannot."""
    try:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return True
    except (OSError, AttributeError):
        return False


def _text_ids(tokenizer: Any, n_ids: int) -> list[int]:
    """Return at least `n_ids` token ids of this package's own code, which every installation has."""
    ids: list[int] = []
    while len(ids) < n_ids:
        for path in sorted(Path(__file__).parent.glob("*.py")):
            ids += tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    return ids[:n_ids]
