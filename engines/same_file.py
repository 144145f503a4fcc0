"""`bench peers --gguf FILE`: swiftopt and builds of llama.cpp on one GGUF file as it is.

A cell is a depth (tokens before the first generated one) and a number of requests at once. In each cell every row has a
separate process, and rows take turns. Before that, each row's start is timed: with the file out of the system's
cache, and again with it there.
"""

from __future__ import annotations

import os
import re
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
from ..models.cache import cache_root
from ..models.gguf_model import settings_folder
from ..models.gguf_reader import parts_of
from ..models.loading import load_tokenizer
from ..models.saved import OnStep, no_step, quiet, supported_config
from ..models.sources import resolve
from ..terminal.render import folding, number, numeric, table
from .devices import room_for
from .packages import PACKAGES, PROGRAM, EngineFailed, Launches, Row
from .processes import Child, refuse_other_lengths
from .turns import OWN_BYTES, engine_environ

SCHEMA = "swiftopt.bench-same-file/1"
AT_ONCE = PROGRAM.with_name("at_once.py")
LLAMA_CPP = ("llama-cpp/plain", "node-llama-cpp/plain")  # The faster of these in a cell is the base of its ratios.
OURS = "swiftopt/plain"
LEAST_TOKENS = 16  # Length of the prompts at depth 0.
ROOM = 64  # Slots of a request beyond its prompt and completion: drafts need some.
WARM_TOKENS = 4  # Tokens of the first, untimed requests of a process.
TASK = "default"
PAGE = 256  # n_ctx is a multiple of this, as llama.cpp rounds it.


def file_rows() -> list[Row]:
    """Return the rows, in the table's order: engines that read GGUF files, all with the same one."""
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("swiftopt", "plain", {}),
        ("swiftopt", "best", {"best": True}),
        ("llama-cpp", "plain", {}),
        ("node-llama-cpp", "plain", {}),
        ("ik-llama-cpp", "plain", {}),
    ]
    rows = []
    for name, variant, options in ways:
        package = PACKAGES[name]
        program = package.file if package.tool == "npm" else AT_ONCE
        rows.append(Row(replace(package, file=program), variant, "file", options))
    return rows


@dataclass(frozen=True, slots=True)
class SameFileRequest:
    """What is measured: `gguf`, a GGUF file's path or name; every cell of `depths` and `at_once`, `rounds` times."""

    gguf: str
    depths: tuple[int, ...] = (0, 2000, 8000)
    at_once: tuple[int, ...] = (1, 4, 8)
    max_new_tokens: int = 128
    rounds: int = 2
    threads: int = os.cpu_count() or 1
    timeout_s: float = 600.0
    speed: str = "auto"
    db: str | None = None


@dataclass(slots=True)
class CellRuns:
    """A row's runs in a cell: per run its seconds, and each request's tokens and seconds to its first and last one."""

    row: str
    depth: int
    at_once: int
    seconds: list[float] = field(default_factory=list)
    answers: list[list[dict[str, Any]]] = field(default_factory=list)
    peak_bytes: int = 0
    reason: str = ""

    @property
    def tok_s(self) -> float | None:
        """Tokens of all requests per second, with reading their prompts; None where nothing was measured."""
        n_tokens = sum(len(answer["token_ids"]) for run in self.answers for answer in run)
        return n_tokens / sum(self.seconds) if self.seconds else None

    @property
    def decode_tok_s(self) -> float | None:
        """Sum of the requests' speeds after their first tokens; the mean of the runs."""
        speeds = [sum(speed for speed in map(_decode_speed, run)) for run in self.answers]
        return statistics.mean(speeds) if speeds and min(speeds) > 0 else None

    @property
    def first_token_s(self) -> float | None:
        """Mean seconds to a request's first token, with waiting for others' prompts."""
        firsts = [answer["first_s"] for run in self.answers for answer in run]
        return statistics.mean(firsts) if firsts else None

    @property
    def token_ids(self) -> list[list[int]]:
        return [answer["token_ids"] for answer in self.answers[0]] if self.answers else []


def _decode_speed(answer: dict[str, Any]) -> float:
    n_tokens, seconds = len(answer["token_ids"]) - 1, answer["last_s"] - answer["first_s"]
    return n_tokens / seconds if n_tokens and seconds > 0 else 0.0


@dataclass(slots=True)
class StartRuns:
    """Seconds from starting a row's process to its first token; `cold_s` None where the cache cannot be emptied."""

    row: str
    cold_s: float | None = None
    warm_s: float | None = None
    peak_bytes: int = 0
    reason: str = ""


class SameFile:
    """Measures all rows on one file.

    Raises: ModelNotFound, UnsupportedModel: swiftopt cannot read the file. SettingsError: it is no GGUF file.
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
            raise SettingsError(f"{request.gguf} is no GGUF file: name one, or take --model for other models")
        self.request, self.rows, self._on_step = request, list(rows), on_step
        self.file = Path(source.location)
        self._has_room = has_room or (lambda n_bytes: room_for("cpu", n_bytes))
        folder = settings_folder(self.file, on_step)
        n_positions = supported_config(folder).max_position_embeddings
        needed = max(max(request.depths), LEAST_TOKENS) + request.max_new_tokens + ROOM
        if needed > n_positions:
            raise ContextOverflow(
                f"a depth of {max(request.depths)} needs {needed} positions with its completion, and the model has"
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
        """Fill in `starts` and `cells`; what fails gets the reason. An interrupt ends it with what is measured."""
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
        if self._children and not self._has_room(1.5 * self.n_bytes + OWN_BYTES):
            self._close_all()
        request, log = self.request, f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', row.name)}-same-file.log"
        options = {
            **{"model": str(self.file), "engine": row.engine.name, "package": str(launch.folder)},
            **{"dtype": "auto", "device": "cpu", "speed": request.speed, "db": request.db, "threads": request.threads},
            **{"n_ctx": -(-n_ctx // PAGE) * PAGE, "at_once": n_requests},
            **row.options,
        }
        child = Child(launch, options, engine_environ("cpu", request.threads), cache_root() / "peers" / "logs" / log)
        self._children[row.name] = child
        child.wait_until_ready(request.timeout_s)
        return child

    def _start(self, row: Row, start: StartRuns) -> None:
        self._launches.of(row.engine)  # Install the engine before its start is timed.
        seconds: list[float | None] = []
        for is_cold in (True, False):
            evicted = is_cold and all([_evict(path) for path in parts_of(self.file)])
            begun = perf_counter()
            child = self._child(row, LEAST_TOKENS + ROOM, 1)
            child.ask({"requests": self._requests(0, 1, 1)}, self.request.timeout_s)
            seconds.append(perf_counter() - begun if evicted or not is_cold else None)
            start.peak_bytes = max(start.peak_bytes, child.memory().peak)
            self._children.pop(row.name).close()
        start.cold_s, start.warm_s = seconds
        self._on_step(f"{row.name}: first token after {start.warm_s:.2f} s")

    def _turn(self, row: Row, cell: CellRuns) -> None:
        n, n_new = cell.at_once, self.request.max_new_tokens
        child = self._children.get(row.name)
        if child is None:
            child = self._child(row, max(cell.depth, LEAST_TOKENS) + n_new + ROOM, n)
            child.ask({"requests": self._requests(0, n, WARM_TOKENS)}, self.request.timeout_s)
        answer = child.ask({"requests": self._requests(cell.depth, n, n_new)}, self.request.timeout_s)
        refuse_other_lengths(answer["answers"], n_new)
        cell.seconds.append(float(answer["seconds"]))
        cell.answers.append(answer["answers"])
        cell.peak_bytes = max(cell.peak_bytes, child.memory().peak)
        self._on_step(f"depth {cell.depth}, {n} at once, {row.name}: {n * n_new / cell.seconds[-1]:.1f} tok/s")

    def _requests(self, depth: int, n_requests: int, n_new: int) -> list[dict[str, Any]]:
        """Return requests whose prompts begin at different places of the text, so that no prefix is shared."""
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
                    "cold_s": _rounded(start.cold_s),
                    "warm_s": _rounded(start.warm_s),
                    "peak_bytes": start.peak_bytes or None,
                }
                for start in self.starts
            ],
            "results": [self._result(cell) for cell in self.cells],
        }

    def _result(self, cell: CellRuns) -> dict[str, Any]:
        rows = {other.row: other for other in self.cells if (other.depth, other.at_once) == (cell.depth, cell.at_once)}
        base = max((rows[name].tok_s or 0.0 for name in LLAMA_CPP if name in rows), default=0.0)
        ours = rows[OURS].token_ids if OURS in rows and cell.row != OURS else []
        return {
            **{"row": cell.row, "depth": cell.depth, "at_once": cell.at_once, "reason": cell.reason or None},
            "tok_s": _rounded(cell.tok_s),
            "decode_tok_s": _rounded(cell.decode_tok_s),
            "ratio": _rounded(cell.tok_s / base if cell.tok_s and base else None),
            "first_token_s": _rounded(cell.first_token_s),
            "peak_bytes": cell.peak_bytes or None,
            "equal": sum(a == b for a, b in zip(cell.token_ids, ours, strict=True))
            if cell.token_ids and ours
            else None,
        }


def same_file_view(report: Mapping[str, Any]) -> list[RenderableType]:
    """Return the tables of starts and of cells, and under them why rows have no numbers."""
    name = Path(report["file"]).name
    title = f"{name}, {report['bytes'] / 1e9:.2f} GB, {report['device']}, {report['threads']} threads"
    failed: dict[str, list[str]] = {}

    def remark(result: Mapping[str, Any], where: str) -> str:
        if not result["reason"]:
            return ""
        failed.setdefault(result["reason"], []).append(where)
        return f"not run ({list(failed).index(result['reason']) + 1})"

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
        where = f"{result['row']} at depth {result['depth']}, {result['at_once']} at once"
        speeds = (number(result["tok_s"], 1), number(result["decode_tok_s"], 1), number(result["ratio"], unit="x"))
        equal = "" if result["equal"] is None else f"{result['equal']}/{result['at_once']}"
        figures = (*speeds, number(result["first_token_s"], 2, " s"), _memory(result), equal)
        cells.append((str(result["depth"]), str(result["at_once"]), result["row"], *figures, remark(result, where)))
    start_headings = ("cold", "warm", "memory")
    headings = ("tok/s", "decode", "ratio", "first token", "memory", "equal")
    caption = (
        f"{report['max_new_tokens']} tokens a request, {report['rounds']} times; tok/s: of all requests, with reading"
        " their prompts; decode: after the first tokens, summed over requests; ratio: of tok/s to llama.cpp's faster"
        " build; equal: requests whose tokens are swiftopt/plain's. Engines round differently."
    )
    views: list[RenderableType] = [
        table(
            [folding("row"), *map(numeric, start_headings), folding("")], starts, title=f"{title}: to the first token"
        ),
        "",
        table(
            [numeric("depth"), numeric("at once"), folding("row"), *map(numeric, headings), folding("")],
            cells,
            title=title,
        ),
        Text(caption),
    ]
    notes = [f"({n}) {', '.join(rows)}: {reason}" for n, (reason, rows) in enumerate(failed.items(), start=1)]
    return [*views, *map(Text, notes)]


def _memory(result: Mapping[str, Any]) -> str:
    return number(result["peak_bytes"] and result["peak_bytes"] / 1e9, 2, " GB")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _evict(path: Path) -> bool:
    """Drop a file from the system's cache; False where the system cannot."""
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
