"""Narrow passes replayed as CUDA graphs: one launch instead of hundreds, for draft steps and verification.

A graph has fixed shapes and addresses. So a pass is rounded up, its rows to one of `WIDTHS` and the slots it reads to
a context bucket; slots, positions and masks are inputs, and rows that only fill up write to a slot that nobody reads.
Buffers are lent from a store of their own, for a captured pass reads and writes one buffer for ever. A layer set is
part of what is captured: a sub-layer that it skips is not in the graph.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from ..core.errors import SettingsError
from ..core.types import LayerSet
from .blocks import Block, RowGroup
from .buffer import KVBuffer
from .costs import context_bucket
from .rows import PassPlan, Rows
from .runtime import Runtime

WIDTHS = (1, 2, 4, 8, 16, 32)  # rows
RECORD_AT = 3  # the pass of a shape that is captured: most layer sets of a search are run once and never again
MOST_GRAPHS = 64
PROBES, PROBE_SLOTS = 9, 128  # passes that are timed when a model is loaded, and the slots that they read

Key = tuple[int, int, int, tuple[LayerSet, ...]]  # buffer, rows, slots, layer set


class StaticPass(PassPlan):
    """A pass over `width` rows that read the first `n_slots` slots, with every input in a tensor that never moves.

    `fill` brings the inputs, `run` computes; between the two nothing depends on the rows but the tensors' contents.
    """

    runtime: Runtime
    buffer: KVBuffer

    def __init__(
        self, runtime: Runtime, buffer: KVBuffer, width: int, n_slots: int, variants: tuple[LayerSet, ...]
    ) -> None:
        super().__init__(runtime, Rows([0] * width, 0, variants=variants), buffer)
        self.width, self.n_slots = width, n_slots
        device = runtime.device
        self.inputs = torch.zeros((3, width), dtype=torch.int64, device=device)  # token ids, positions, slots
        self.masks = {
            window: torch.zeros((width, n_slots), dtype=runtime.dtype, device=device) for window in set(runtime.windows)
        }
        # Held here, for the runtime drops a table when it makes a longer one, and a graph reads where this one lies.
        self.tables = {
            block.layer_type: runtime.rotation(block.layer_type, device, min(n_slots, runtime.max_positions))
            for block in runtime.blocks
        }

    def fill(self, rows: Rows) -> None:
        """Take the rows of one pass, at most `width`, none of which sees a slot from `n_slots` on."""
        n = len(rows.token_ids)
        end, spare = rows.first_slot + n, self.width - n
        positions = list(range(rows.first_slot, end)) if rows.positions is None else list(rows.positions)
        unread = [self.buffer.capacity - 1] * spare
        self.inputs.copy_(
            torch.tensor(
                [
                    [*rows.token_ids, *([rows.token_ids[-1]] * spare)],
                    [*positions, *([positions[-1]] * spare)],
                    [*range(rows.first_slot, end), *unread],
                ]
            )
        )
        plan = PassPlan(self.runtime, rows)
        for window, mask in self.masks.items():
            mask.fill_(torch.finfo(mask.dtype).min)
            mask[:n, :end] = plan.mask(window, mask.device)

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Compute the logits (width, vocab)."""
        self._groups.clear()  # what a pass shares is made from the inputs each time
        hidden = self.runtime.states(self.inputs[0], self)
        name = self.rows.variants[0].format_of("head") if self.rows.variants else None
        return self.runtime.head(self.runtime.normed(hidden), name)

    def positions(self, device: torch.device) -> Tensor:
        return self.inputs[1]

    def _make_group(self, block: Block, variants: frozenset[int]) -> RowGroup:
        cos = sin = None
        table = self.tables[block.layer_type]
        if table is not None:
            cos, sin = (part[self.inputs[1]][:, None] for part in table)
        mask = block.heads.of_groups(self.masks[block.window])
        return RowGroup(cos, sin, (), 0, self.n_slots, mask, self.inputs[2])


Record = Callable[[StaticPass], Callable[[], Tensor]]


class GraphPasses:
    """The captured passes of one runtime, and the buffers that they work on.

    Args:   record: makes of a filled pass what runs it again on the inputs of the moment.
    Raises: SettingsError: the model is not on one CUDA device.
    """

    def __init__(self, runtime: Runtime, record: Record | None = None) -> None:
        if record is None and (runtime.device.type != "cuda" or not runtime.one_device):
            raise SettingsError(
                f"CUDA graphs need a model that lies on one CUDA device, and this one lies on {runtime.device}:"
                " use the eager or the compiled runtime"
            )
        self.runtime = runtime
        self._record: Record = record or _Capture()
        self._uses: Counter[Key] = Counter()
        self._passes: OrderedDict[Key, tuple[StaticPass, Callable[[], Tensor]]] = OrderedDict()
        self._free: list[KVBuffer] = []
        self._lent: weakref.WeakKeyDictionary[KVBuffer, KVBuffer] = weakref.WeakKeyDictionary()

    def lend(self, capacity: int) -> KVBuffer:
        """Return an empty buffer of `capacity` slots, whose memory is lent again once nobody holds it."""
        size = context_bucket(capacity + 1)  # one more: what fills a pass up is written to the last slot
        own = next((buffer for buffer in self._free if buffer.capacity == size), None)
        if own is None:
            own = self.runtime.own_buffer(size)
        else:
            self._free.remove(own)
            for part in (*own.keys, *own.values):
                part.zero_()
        lent = copy.copy(own)
        lent.capacity = capacity
        self._lent[lent] = own
        weakref.finalize(lent, self._free.append, own)
        return lent

    def forward(self, rows: Rows, buffer: KVBuffer) -> Tensor | None:
        """Return the logits (rows, vocab) of a pass; None without a graph: it is too wide, too new, of several sets."""
        own, n = self._lent.get(buffer), len(rows.token_ids)
        if own is None or n > WIDTHS[-1] or len(rows.variants) > 1:
            return None
        width = next(each for each in WIDTHS if each >= n)
        key = (id(own), width, context_bucket(rows.first_slot + n), rows.variants)
        if key not in self._passes:
            if len(self._uses) > 64 * MOST_GRAPHS:
                self._uses.clear()
            self._uses[key] += 1
            if self._uses[key] < RECORD_AT:
                return None
            static = StaticPass(self.runtime, own, width, key[2], rows.variants)
            static.fill(rows)
            self._passes[key] = static, self._record(static)
            if len(self._passes) > MOST_GRAPHS:
                self._passes.popitem(last=False)
        self._passes.move_to_end(key)
        static, replay = self._passes[key]
        static.fill(rows)
        return replay()[:n].clone()  # the next replay writes where this one's logits lie

    def forget(self) -> None:
        """Drop every captured pass: some of the weights lie elsewhere now."""
        self._passes.clear()
        self._uses.clear()


@torch.inference_mode()
def are_faster(runtime: Runtime, graphs: GraphPasses) -> bool:
    """Tell whether the model's one-row passes take less time replayed than run one operation after the other."""
    rows, seconds = Rows([0], PROBE_SLOTS - 1), list[float]()
    for replayed in (False, True):
        buffer = graphs.lend(PROBE_SLOTS) if replayed else runtime.own_buffer(PROBE_SLOTS)
        times = []
        for _ in range(RECORD_AT + PROBES):
            clock = perf_counter()
            logits = graphs.forward(rows, buffer) if replayed else None
            (runtime.forward(rows, buffer) if logits is None else logits).max(dim=-1).indices.tolist()  # waits for it
            times.append(perf_counter() - clock)
        seconds.append(median(times[RECORD_AT:]))
    return seconds[1] < seconds[0]


class _Capture:
    """Captures passes on the current CUDA device; their scratch memory is shared, for one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, static: StaticPass) -> Callable[[], Tensor]:
        device = static.runtime.device
        aside = cast(Any, torch.cuda.Stream)(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            static.run()  # kernels are chosen and quantised copies made before, and never while, it is captured
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph, pool=self._pool):
            logits = static.run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
