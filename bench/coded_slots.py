"""Measures drafts that read keys and values in 4 bits.

python -m swiftopt.bench.coded_slots --model qwen2.5-coder-1.5b --contexts 8000,24000
"""

from __future__ import annotations

import json
from statistics import median
from time import perf_counter, process_time
from typing import Any

import click
import torch

from ..core.layer_sets import LayerSet
from ..decoding.draft_models import SkippedTarget
from ..models.costs import machine_name
from ..models.loading import load
from ..models.rows import Pass, Rows
from ..models.runtime import Runtime


@click.command()
@click.option("--model", required=True)
@click.option("--contexts", default="2000,8000,24000")
@click.option("--repeats", default=9)
@click.option("--dtype", default="auto")
def main(model: str, contexts: str, repeats: int, dtype: str) -> None:
    """Time passes over one row of the target, of its int4 copy, and of the copy that reads slots in 4 bits.

    Slots are random. The passes alternate. Shows medians in ms of the wall clock and of the processors' time.
    """
    runtime = load(model, dtype, "cpu", speed="exact")
    results = [copy_times(runtime, int(context), repeats) for context in contexts.split(",")]
    report = {"schema": "swiftopt.bench-coded-slots/1", "device": machine_name(runtime), "results": results}
    click.echo(json.dumps(report))


@torch.inference_mode()
def copy_times(runtime: Runtime, context: int, repeats: int) -> dict[str, Any]:
    """Time the passes at one context; "coded" is the number of slots with a 4-bit copy, 0 if drafts make none."""
    draft, buffer = LayerSet(runtime.n_layers).filled("int4"), runtime.new_buffer(context + 1)
    runtime.copies.prepare(draft)
    for block in (*buffer.keys, *buffer.values):
        block.normal_()
    buffer.coding, clock = SkippedTarget(draft).coding(runtime, buffer.capacity), process_time()
    n_slots = buffer.coded.n_slots if buffer.code(context, at_once=True) and buffer.coded is not None else 0
    coding_s = process_time() - clock
    ways = {"target": ((), False), "draft": ((draft,), False), "draft by copies": ((draft,), True)}
    samples: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way, (variants, reads_coded) in ways.items():
            start_s, start_cpu_s = perf_counter(), process_time()
            runtime.forward_together(
                [Pass(runtime, Rows([1], context, variants=variants), buffer, reads_coded=reads_coded)]
            )
            if repeat:  # Round 0 is a warm-up.
                samples[way].append((perf_counter() - start_s, process_time() - start_cpu_s))
    medians = {
        way: [round(1e3 * median(seconds), 3) for seconds in zip(*pairs, strict=True)] for way, pairs in samples.items()
    }
    c = {way: round(medians[way][0] / medians["target"][0], 3) for way in ways}
    click.echo(
        f"{context} slots, {n_slots} in 4 bits: "
        + ", ".join(f"{way} {times[0]:.1f} ms" for way, times in medians.items())
    )
    copies = {"coded": n_slots, "coding_s": round(coding_s, 3)}
    return {"context": context, **copies, "ms": medians, "c": c}


if __name__ == "__main__":
    main()
