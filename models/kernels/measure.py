"""Measures implementations of a linear map on this machine, in GB of weights per second."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..measuring import MOST_SHARE, DisturbanceMeter
from .build import ROWS, SHAPES, Kernels, Speeds, compiled_levels, kept_speeds, kernels, speeds_file

if TYPE_CHECKING:
    from torch import Tensor

# (weights, inputs) -> a function that computes their products.
Way = Callable[["list[Tensor]", "Tensor"], Callable[[], Any]]

WEIGHT_BYTES = 110 << 20  # Weights read per run: more than CPU caches hold.
REPEATS = 5
READ = "memory read"


def measured() -> Speeds:
    """Return the speeds of compiled levels of our kernels, of torch's and oneDNN's kernels, and of reading.

    They are measured in turns in bfloat16, and stored for `preferred`. While other programs run, they are stored only
    if there are none yet.
    """
    import torch

    ways, meter = _ways(), DisturbanceMeter()
    by_way: dict[str, dict[str, list[float]]] = {name: {} for name in (*ways, READ)}
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
                    if repeat:  # The first repeat is a warm-up.
                        speed = n_bytes * len(weights) / (perf_counter() - clock) / 1e9
                        by_way[name].setdefault(f"{shape[0]} x {shape[1]}, {rows}", []).append(speed)
    speeds = {name: {case: median(samples) for case, samples in cases.items()} for name, cases in by_way.items()}
    if kept_speeds() and meter.read().share > MOST_SHARE:
        return speeds
    with suppress(OSError):
        speeds_file().parent.mkdir(parents=True, exist_ok=True)
        speeds_file().write_text(json.dumps(speeds), encoding="utf-8")
    return speeds


def _ways() -> dict[str, Way]:
    import torch

    from .calls import linear, map_of

    mkldnn: Any = torch.ops.mkldnn
    backend: Any = torch.backends.mkldnn

    def by_kernels(library: Kernels, weights: list[Tensor], x: Tensor) -> Callable[[], Any]:
        return lambda: [linear(library, map_of(weight), x) for weight in weights]

    def by_torch(weights: list[Tensor], x: Tensor) -> Callable[[], Any]:
        return lambda: [torch.nn.functional.linear(x, weight) for weight in weights]

    def by_onednn(weights: list[Tensor], x: Tensor) -> Callable[[], Any]:
        packed = [mkldnn._reorder_linear_weight(weight, x.shape[0]) for weight in weights]
        return lambda: [mkldnn._linear_pointwise(x, weight, None, "none", [], "") for weight in packed]

    libraries = [compiled for name in (None, *compiled_levels()) if isinstance(compiled := kernels(name), Kernels)]
    ways: dict[str, Way] = {library.level: partial(by_kernels, library) for library in libraries}
    ways["torch"] = by_torch
    with suppress(RuntimeError, AttributeError):  # oneDNN does not support bfloat16 on this processor.
        if backend.is_available():
            mkldnn._reorder_linear_weight(torch.zeros((16, 16), dtype=torch.bfloat16))
            ways["oneDNN"] = by_onednn
    return ways
