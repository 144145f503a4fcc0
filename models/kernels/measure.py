"""How fast the ways to compute a linear map are on this machine, in GB of weights per second."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..gguf_file import cache_root
from .build import LEVELS, Kernels, compiled_levels, kernels, processor_key

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = ((8960, 1536), (1536, 8960))  # outputs by inputs: an MLP's maps of a model of 1.5B
ROWS = (1, 8)
WEIGHT_BYTES = 110 << 20  # that each run reads: more than caches hold
REPEATS = 5
READ = "memory read"
CLEARLY = 1.2
Speeds = dict[str, dict[str, float]]  # way -> "outputs x inputs, rows" -> GB/s


def measured(fresh: bool = True) -> Speeds:
    """The speed of each way: the levels of our kernels that are compiled, torch's own and oneDNN's; and of reading.

    Measured in turns, in bfloat16, and kept for `preferred`.

    Args: fresh: measure even where an earlier measurement was kept.
    """
    import torch

    if not fresh and (kept := _kept()):
        return kept
    ways = _ways()
    found: dict[str, dict[str, list[float]]] = {name: {} for name in (*ways, READ)}
    for shape in SHAPES:
        n_bytes = shape[0] * shape[1] * 2
        weights = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(max(2, WEIGHT_BYTES // n_bytes))]
        together = torch.cat([weight.view(-1) for weight in weights]).view(torch.int64)
        for rows in ROWS:
            x = torch.randn(rows, shape[1], dtype=torch.bfloat16)
            runs: dict[str, Callable[[], Any]] = {name: make(weights, x) for name, make in ways.items()}
            runs[READ] = together.sum
            for repeat in range(REPEATS + 1):
                for name, run in runs.items():
                    clock = perf_counter()
                    run()
                    if repeat:  # the first one warms up
                        speed = n_bytes * len(weights) / (perf_counter() - clock) / 1e9
                        found[name].setdefault(f"{shape[0]} x {shape[1]}, {rows}", []).append(speed)
    speeds = {name: {case: median(all_) for case, all_ in cases.items()} for name, cases in found.items()}
    with suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        _file().write_text(json.dumps(speeds), encoding="utf-8")
    return speeds


def at_rows(speeds: Speeds, way: str, rows: int) -> float:
    """GB/s of a way over all shapes, weights of each shape counted alike."""
    own = [speed for case, speed in speeds[way].items() if case.endswith(f", {rows}")]
    return len(own) / sum(1 / speed for speed in own)


def preferred() -> str | None:
    """The level that was fastest when all were measured here; None where nothing was."""
    kept = {name: cases for name, cases in _kept().items() if name in LEVELS}
    # A busy machine measures unevenly, and levels differ in their last bits: a lower one must be clearly faster.
    handicap = {name: CLEARLY**number for number, name in enumerate(LEVELS)}
    seconds = {name: sum(1 / at_rows(kept, name, rows) for rows in ROWS) * handicap[name] for name in kept}
    return min(seconds, key=lambda name: seconds[name], default=None)


def _ways() -> dict[str, Callable[[list[Tensor], Tensor], Callable[[], Any]]]:
    import torch

    from .native import linear, map_of

    current = kernels()
    own = {current.level: current} if isinstance(current, Kernels) else {}
    own |= {name: found for name in compiled_levels() if isinstance(found := kernels(name), Kernels)}

    def native(library: Kernels) -> Callable[[list[Tensor], Tensor], Callable[[], Any]]:
        return lambda weights, x: lambda: [linear(library, map_of(weight), x) for weight in weights]

    def onednn(weights: list[Tensor], x: Tensor) -> Callable[[], Any]:
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0]) for weight in weights]
        return lambda: [torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "") for weight in packed]

    ways: dict[str, Callable[[list[Tensor], Tensor], Callable[[], Any]]] = {
        **{name: native(library) for name, library in own.items()},
        "torch": lambda weights, x: lambda: [torch.nn.functional.linear(x, weight) for weight in weights],
    }
    mkldnn: Any = torch.backends.mkldnn
    try:
        if mkldnn.is_available():
            torch.ops.mkldnn._reorder_linear_weight(torch.zeros((16, 16), dtype=torch.bfloat16), 1)
            return {**ways, "oneDNN": onednn}
    except (RuntimeError, AttributeError):  # a processor whose bfloat16 it does not know
        pass
    return ways


def _file() -> Any:
    return cache_root() / "kernels" / f"speeds-{processor_key()}.json"


def _kept() -> Speeds:
    try:
        kept = json.loads(_file().read_text(encoding="utf-8"))
        speeds = {str(name): {str(case): float(speed) for case, speed in cases.items()} for name, cases in kept.items()}
        cases = {f"{n_out} x {n_in}, {rows}" for n_out, n_in in SHAPES for rows in ROWS}
        return {name: own for name, own in speeds.items() if set(own) == cases and min(own.values()) > 0}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
