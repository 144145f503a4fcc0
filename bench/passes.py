"""Where the time of a pass goes: linear maps, attention, the rest of the kernels' work, and Python's share.

    python -m swiftopt.bench.passes --model qwen2.5-coder-1.5b --contexts 200,2000 --rows 1,8 --sequences 1,8

Passes of our kernels and of torch's (`--speed eager`) in turns; prints a line per context, number of sequences and rows
of each with the medians in ms, then one JSON object. `weights_gb_s` is what the maps' time comes to.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ..models.costs import machine_name
from ..models.kernels import layout
from ..models.kernels.native import NativePasses
from ..models.loading import at_speed, load
from ..models.rows import Pass, Rows
from ..models.runtime import Runtime

REPEATS = 9


def measured(runtime: Runtime, context: int, n_rows: int, n_sequences: int = 1) -> dict[str, Any]:
    """Median ms of a pass over `n_rows` rows of each sequence behind `context` slots, and of its parts."""
    native = runtime.native
    assert isinstance(native, NativePasses)
    rows = Rows([1] * n_rows, context)
    passes = [Pass(runtime, rows, runtime.new_buffer(context + n_rows)) for _ in range(n_sequences)]
    samples: dict[str, list[float]] = {}
    for repeat in range(REPEATS + 1):
        native.seconds = (ctypes.c_double * len(layout.WORK))()
        clock = perf_counter()
        torch.cat(runtime.forward_together(passes)).argmax(dim=-1).tolist()
        total = perf_counter() - clock
        parts = dict(zip(layout.WORK, native.seconds, strict=True))
        runtime.native, native.seconds = None, None  # torch's own operations, on the same weights
        try:
            clock = perf_counter()
            torch.cat(runtime.forward_together(passes)).argmax(dim=-1).tolist()
            eager = perf_counter() - clock
        finally:
            runtime.native = native
        if repeat:  # the first round warms up
            python = total - sum(parts.values())
            for name, seconds in {"total": total, **parts, "python": python, "eager": eager}.items():
                samples.setdefault(name, []).append(1e3 * seconds)
    ms = {name: round(median(values), 2) for name, values in samples.items()}
    model: Any = runtime.hf_model
    n_bytes = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    table, head = model.get_input_embeddings().weight, runtime.head_module(None).weight
    if table.data_ptr() != head.data_ptr():  # of the table a pass reads a row per token
        del n_bytes[table.data_ptr()]
    about = {"context": context, "sequences": n_sequences, "rows": n_rows}
    return {**about, "ms": ms, "weights_gb_s": round(sum(n_bytes.values()) / ms["maps"] / 1e6, 1)}


@torch.inference_mode()
def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--contexts", default="200,2000")
    parser.add_argument("--rows", default="1,8", help="of each sequence")
    parser.add_argument("--sequences", default="1")
    args = parser.parse_args()
    runtime = load(args.model, args.dtype, "cpu", speed="eager")
    at_speed(runtime, "native")
    results = []
    for context in map(int, args.contexts.split(",")):
        for n_sequences, n_rows in product(map(int, args.sequences.split(",")), map(int, args.rows.split(","))):
            results.append(measured(runtime, context, n_rows, n_sequences))
            ms = results[-1]["ms"]
            parts = ", ".join(f"{name} {ms[name]:.2f}" for name in (*layout.WORK, "python"))
            of = f" of {n_sequences} sequences" if n_sequences > 1 else ""
            print(f"{context} slots, {n_rows} rows{of}: {ms['total']:.2f} ms ({parts}); by torch {ms['eager']:.2f} ms")
    about = {"schema": "swiftopt.bench-passes/1", "model": args.model, "device": machine_name(runtime)}
    print(json.dumps({**about, "dtype": runtime.dtype_name, "results": results}))


if __name__ == "__main__":
    main()
