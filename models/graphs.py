"""Passes replayed as CUDA graphs: one launch instead of hundreds, for draft steps and verification of all requests.

A graph has fixed shapes and addresses. So a pass is padded: its rows to one of `WIDTHS`, and the slots that they see to
a context bucket. Everything else about its rows, also the addresses of their buffers, is a number in a table that the
kernels read (`models.rows`). Rows of several sequences share a pass; padding rows write nothing. There is a graph for
each layer set, without the sub-layers that it skips.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from time import perf_counter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..core.costs import context_bucket
from ..core.errors import SettingsError, first_line
from ..core.layer_sets import LayerSet
from .costs import RECORD_AT, RECORDED_ROWS
from .kernels import device as kernels
from .kernels import device_attention
from .row_tables import RowTable, TableFullError, TablePlan
from .rows import Pass, PassPlan, Rows, best_of, plans_of
from .runtime import Runtime
from .transfers import uploaded

logger = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 8, 16, 32, 64, RECORDED_ROWS)  # Row counts that passes are padded to.
LONGEST = 64  # Single slots (tree nodes) that a row of a captured pass may attend to after its contiguous run.
MOST_GRAPHS = 64
PROBES, PROBE_SLOTS = 9, 128  # Passes timed when a model is loaded, and the KV slots that each reads.
PROBED_CALLS = 16  # Repetitions of a timed task in one graph, because one run may be shorter than its launch.

T = TypeVar("T")

# States (width, hidden_size) after the last layer, and logits (width, vocab) or None.
Answer = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Shape:
    """Fixed properties of a captured pass: layers `first` … `last` - 1 over `width` rows of at most `n_slots` slots.

    `begun`: the input is states, not tokens. `is_read`: logits of some rows are wanted.
    """

    width: int
    n_slots: int
    variants: tuple[LayerSet, ...]
    first: int
    last: int
    begun: bool
    is_read: bool


class StaticPass:
    """A pass of a shape, with every input in a tensor at a fixed address.

    `fill` writes the inputs, and `run` computes from them.
    """

    def __init__(self, runtime: Runtime, shape: Shape) -> None:
        self.runtime, self.shape = runtime, shape
        self.table = RowTable(runtime, shape.width, shape.n_slots, LONGEST)
        self.data = torch.zeros((self.table.n_fields, shape.width), dtype=torch.int64, device=runtime.device)
        size = (shape.width, int(runtime.config.get_text_config().hidden_size))
        self.begun = torch.zeros(size, dtype=runtime.dtype, device=runtime.device) if shape.begun else None
        self.kinds = torch.zeros(shape.width, dtype=torch.int64, device=runtime.device)  # Rows' kinds, `ExpertCounter`.
        self.counts: Tensor | None = None  # Counts of experts in the last run.
        self._plan = PassPlan(runtime, Rows([0] * shape.width, 0, variants=shape.variants))
        # Keep these rotation tables alive: the runtime drops them when it makes longer ones, but the graph reads them.
        self._rotations = [
            runtime.rotation(block.layer_type, runtime.device, self.table.n_positions) for block in runtime.blocks
        ]

    def fill(self, passes: Sequence[Pass]) -> None:
        """Write the rows of passes of this shape into the inputs, one pass after the other.

        Raises: TableFullError: a row sees more slots than the table has room for.
        """
        plans, device = plans_of(self.runtime, passes), self.runtime.device
        made = self.table.made([(plan, plan.every) for plan in plans], device)
        self.data.copy_(uploaded(made, device))
        for pass_, plan in zip(passes, plans, strict=True):
            rows_of_pass = slice(plan.first, plan.first + plan.n)
            if isinstance(pass_.rows.token_ids, Tensor):
                self.data[device_attention.TOKEN, rows_of_pass] = pass_.rows.token_ids
            if self.begun is not None and pass_.hidden is not None:
                self.begun[rows_of_pass] = pass_.hidden
        if self.runtime.counter.counts(passes):
            kinds = self.runtime.counter.kinds(plans)
            self.kinds.zero_()[: len(kinds)] = kinds

    @torch.inference_mode()
    def run(self) -> Answer:
        runtime, shape = self.runtime, self.shape
        hidden = self.begun
        if hidden is None:
            hidden = runtime.entered(self.data[device_attention.TOKEN], self.data[device_attention.POSITION])
        shared = TablePlan(runtime, self.table, self.data)
        runtime.counter.record()
        hidden = runtime.through(hidden, [self._plan], shared, shape.first, shape.last)
        is_draft = bool(shape.variants) or (shape.first, shape.last) != (0, runtime.n_layers)
        self.counts = runtime.counter.counted(None if is_draft else self.kinds)
        name = shape.variants[0].format_of("head") if shape.variants else None
        return hidden, runtime.logits(hidden, name) if shape.is_read else None


Replay = Callable[[], Answer]
Record = Callable[[StaticPass], Replay]
Captured = tuple[StaticPass, Replay]


class GraphPasses:
    """The captured passes of one runtime.

    Args:   record: captures a pass, and returns the function that replays it (None: as a CUDA graph).
    Raises: SettingsError: the model is not on one CUDA device, or Triton's kernels cannot compute it.
    """

    def __init__(self, runtime: Runtime, record: Record | None = None) -> None:
        if record is None and (runtime.device.type != "cuda" or not runtime.one_device):
            raise SettingsError(
                f"CUDA graphs need a model that lies on one CUDA device, and this one lies on {runtime.device}:"
                " use another speed"
            )
        if reason := kernels.obstacle():
            raise SettingsError(f"CUDA graphs need our kernels in Triton, and {reason}")
        if runtime.dtype not in kernels.DTYPES:
            raise SettingsError(
                f"CUDA graphs need our kernels in Triton, which do not compute in {runtime.dtype_name}: use the speed"
                " eager"
            )
        if not runtime.has_alike_layers:
            raise SettingsError(
                "CUDA graphs have no kernels for layers with convolutions, states, latents or heads of several forms:"
                " use the speed eager"
            )
        self.runtime = runtime
        pool = None if record else torch.cuda.graph_pool_handle()
        self._record: Record = record or (lambda static: captured(static.run, runtime.device, pool))
        self._uses: Counter[Shape] = Counter()
        self._passes: OrderedDict[Shape, Captured] = OrderedDict()
        self.refused: dict[Shape, str] = {}  # Shape -> reason why its capture failed.
        self.n_first = 0  # Passes computed before replay, captures included; slower than replayed ones.

    def forward(self, passes: Sequence[Pass]) -> list[Tensor] | None:
        """Return the wanted logits (rows, vocab) of passes over the same layers, with one replay for each layer set.

        None: there is no captured pass, because there are too many rows, rows of one pass have several layer sets, or
        the shape is new.
        """
        sets: dict[tuple[LayerSet, ...], list[Pass]] = {}
        for pass_ in passes:
            sets.setdefault(pass_.rows.variants, []).append(pass_)
        shapes = [self._shape(members) for members in sets.values()]
        if None in shapes or not all([self._is_due(shape) for shape in shapes if shape is not None]):
            return None
        pairs = zip(shapes, sets.values(), strict=True)
        filled = [self._filled(cast(Shape, shape), members) for shape, members in pairs]
        # Check before the first replay: otherwise a fallback would record states a second time.
        if not all(filled):
            return None
        logits: dict[int, Tensor] = {}
        for captured_pass, members in zip(filled, sets.values(), strict=True):
            answers = _answers(*cast(Captured, captured_pass), members)
            logits |= {id(pass_): answer for pass_, answer in zip(members, answers, strict=True)}
        return [logits[id(pass_)] for pass_ in passes]

    def _shape(self, passes: Sequence[Pass]) -> Shape | None:
        model_pass, n = passes[0], sum(len(pass_.rows.token_ids) for pass_ in passes)
        first, last = model_pass.layers or (0, self.runtime.n_layers)
        begun = {pass_.hidden is not None for pass_ in passes}
        captured = {depth for pass_ in passes for depth in pass_.capture or ()}
        if n > WIDTHS[-1] or len(model_pass.rows.variants) > 1 or len(begun) > 1 or not captured <= {last}:
            return None
        n_slots = context_bucket(max(pass_.rows.first_slot + len(pass_.rows.token_ids) for pass_ in passes))
        is_read = any(pass_.wanted is None or len(pass_.wanted) for pass_ in passes)
        width = next(width for width in WIDTHS if width >= n)
        return Shape(width, n_slots, model_pass.rows.variants, first, last, begun.pop(), is_read)

    def _is_due(self, shape: Shape) -> bool:
        """Count a use of a shape; return whether it is captured, or should be captured now."""
        if shape in self._passes:
            return True
        if len(self._uses) > 64 * MOST_GRAPHS:
            self._uses.clear()
            self.refused.clear()
        self._uses[shape] += 1
        self.n_first += shape not in self.refused
        return self._uses[shape] >= RECORD_AT and shape not in self.refused

    def _filled(self, shape: Shape, passes: Sequence[Pass]) -> Captured | None:
        """Return the captured pass of a shape, filled with the rows of `passes`; None: it cannot run them.

        If a pass cannot be captured, mostly for lack of memory, the caller computes it without a graph.
        """
        try:
            static = self._passes[shape][0] if shape in self._passes else StaticPass(self.runtime, shape)
            static.fill(passes)
            if shape not in self._passes:
                self._passes[shape] = static, self._record(static)
        except TableFullError:
            return None
        except Exception as error:  # Compilers and drivers raise exceptions of many types.
            if shape in self._passes:
                raise
            self.refused[shape] = first_line(error)
            logger.warning("a pass of %d rows is not replayed: %s", shape.width, self.refused[shape])
            return None
        self._passes.move_to_end(shape)
        captured_pass = self._passes[shape]
        if len(self._passes) > MOST_GRAPHS:
            self._passes.popitem(last=False)
        return captured_pass

    def forget(self) -> None:
        """Drop every captured pass, after weights have moved in memory."""
        self._passes.clear()
        self._uses.clear()
        self.refused.clear()


def _answers(static: StaticPass, replay: Replay, passes: Sequence[Pass]) -> list[Tensor]:
    """Replay a captured pass, filled with the rows of `passes`; return the wanted logits (rows, vocab) of each."""
    n = sum(len(pass_.rows.token_ids) for pass_ in passes)
    hidden, logits = (None if part is None else part[:n] for part in replay())
    if static.counts is not None and static.runtime.counter.counts(passes):
        static.runtime.counter.add(static.counts)
    assert hidden is not None
    # Clone the results: the next replay overwrites the graph's output memory.
    logits = hidden[:0] if logits is None else logits.clone()
    hidden = hidden.clone() if any(pass_.capture for pass_ in passes) else hidden
    answers, at = list[Tensor](), 0
    for pass_ in passes:
        rows_of_pass = slice(at, at := at + len(pass_.rows.token_ids))
        if pass_.capture:
            pass_.capture[static.shape.last].append(hidden[rows_of_pass])
        answers.append(_wanted(logits[rows_of_pass], pass_.wanted))
    return answers


def _wanted(logits: Tensor, wanted: Sequence[int] | None) -> Tensor:
    if wanted is None or not len(wanted):
        return logits if wanted is None else logits[:0]
    if list(wanted) == list(range(wanted[0], wanted[-1] + 1)):
        return logits[wanted[0] : wanted[-1] + 1]
    return logits[uploaded(wanted, logits.device)]


@torch.inference_mode()
def pass_seconds(runtime: Runtime, graphs: GraphPasses) -> tuple[float, float]:
    """Return the median seconds of passes over one row: with launched operations, and replayed.

    Raises: RuntimeError: they cannot be captured.
    """
    one, seconds = Pass(runtime, Rows([0], PROBE_SLOTS - 1), runtime.new_buffer(PROBE_SLOTS)), list[float]()
    for replayed in (False, True):
        times = []
        for _ in range(RECORD_AT + PROBES):
            clock = perf_counter()
            logits = graphs.forward([one]) if replayed else None
            best_of((logits or runtime.forward_together([one]))[0]).tolist()  # Reading waits for the GPU.
            times.append(perf_counter() - clock)
        if graphs.refused:
            raise RuntimeError(next(iter(graphs.refused.values())))
        seconds.append(median(times[RECORD_AT:]))
    return seconds[0], seconds[1]


@cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for a device's captures: libraries keep scratch memory for each stream."""
    stream: torch.cuda.Stream = cast(Any, torch.cuda.Stream)(device)
    return stream


def captured(task: Callable[[], T], device: torch.device, pool: Any = None) -> Callable[[], T]:
    """Capture a task as a CUDA graph; return a function that replays it and returns the task's result.

    Args: pool: scratch memory that several graphs share; they must then run one at a time.
    """
    graph, aside = torch.cuda.CUDAGraph(), _aside(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    # Use our own capture stream: torch's default one belongs to the first device that captured, and stays current after
    # a failed capture.
    try:
        with torch.cuda.device(device), torch.cuda.stream(aside):
            # Run once before the capture, because choosing kernels and making quantised copies cannot be captured.
            task()
            with torch.cuda.graph(graph, pool=pool, stream=aside):
                answer = task()
    finally:
        torch.cuda.current_stream(device).wait_stream(aside)

    def replay() -> T:
        graph.replay()
        return answer

    return replay


def replayed_s(device: torch.device, task: Callable[[], object]) -> float:
    """Return the median seconds of a task's kernels on a CUDA device, without their launches."""
    replay, times = captured(lambda: [task() for _ in range(PROBED_CALLS)], device), list[float]()
    with torch.cuda.device(device):
        for _ in range(PROBES):
            start, end = (cast(Any, torch.cuda.Event)(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000 / PROBED_CALLS)
    return median(times)


def launched_s(device: torch.device, task: Callable[[], object]) -> float:
    """Return the median seconds of a repeated task on a CUDA device, launches included."""
    times = list[float]()
    for _ in range(1 + PROBES):  # The first run is a warm-up that chooses kernels.
        torch.cuda.synchronize(device)
        clock = perf_counter()
        for _ in range(PROBED_CALLS):
            task()
        torch.cuda.synchronize(device)
        times.append((perf_counter() - clock) / PROBED_CALLS)
    return median(times[1:])
