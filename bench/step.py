"""What one optimisation step costs against one draft pass over the window, on a real prompt.

    python -m swiftopt.bench.step --model smollm2-135m --stream humaneval.jsonl

A step scores one candidate; candidates are scored in batches. Prints one JSON object with the medians in ms, for every
batch size, of interleaved repetitions, and what the search itself spent per trial beside the passes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch

from ..core.settings import SwiftSettings
from ..core.streams import read_stream
from ..core.types import LayerSet, Sampling, n_skipped_for, searchable
from ..decoding.context import Context
from ..decoding.engine import alone
from ..decoding.session import Session
from ..models.costs import machine_name
from ..models.loading import load
from ..models.rows import Rows
from ..models.runtime import Runtime
from ..optimizer.search import Search

REPEATS = 15
LARGEST_BATCH = 8  # candidates of one pass


def context_of(runtime: Runtime, session: Session, ids: list[int], n_generated: int) -> Context:
    """A request that has just generated `n_generated` tokens; random ones serve, only time is measured."""
    rng = random.Random(0)
    ids = [*ids, *(rng.randrange(100, 1000) for _ in range(n_generated))]
    buffer = runtime.new_buffer(len(ids) + (LARGEST_BATCH + 1) * n_generated)
    runtime.prefill(ids[:-1], buffer)
    return Context(runtime, buffer, session.rule(), ids, len(ids) - n_generated)


def draft_pass(context: Context, layer_set: LayerSet, window: int) -> Callable[[], object]:
    """One pass of the draft over the window's positions and its answer: what a step is measured against."""
    start = context.root_slot
    rows = Rows(context.token_ids[-window - 1 : -1], start, variants=(layer_set,))
    return lambda: context.runtime.forward(rows, context.buffer).float().max(dim=-1).indices.tolist()


def timed(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median ms of each, interleaved."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(REPEATS + 1):
        for name, run in runs.items():
            clock = perf_counter()
            run()
            if number:  # the first round warms up
                samples[name].append(1e3 * (perf_counter() - clock))
    return {name: round(median(values), 3) for name, values in samples.items()}


@torch.inference_mode()
def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--stream", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    runtime = load(args.model, args.dtype, args.device)
    settings = SwiftSettings(max_steps=10**6, patience=10**6, target_matchness=1.0, strategy="random")
    session = Session(runtime, Sampling(), 64)
    prompt = read_stream(args.stream, limit=1)[0]
    context = context_of(runtime, session, session.encode(prompt), settings.context_window)
    size = n_skipped_for(runtime.n_layers, 0.45)
    picked = random.Random(1).sample(searchable(runtime.n_layers), size)
    runs = {"draft pass": draft_pass(context, LayerSet(runtime.n_layers).skipping(picked), settings.context_window)}
    searches = {}
    for batch in (1, 2, 4, LARGEST_BATCH):
        search = Search("bench", runtime.n_layers, settings, 0.45, None)
        search.batch = batch
        searches[batch] = search
        runs[f"steps of {batch}"] = partial(step, search, context)
    ms = timed(runs)
    per_step = {str(batch): round(ms[f"steps of {batch}"] / batch, 3) for batch in searches}
    share = {batch: round(value / ms["draft pass"], 3) for batch, value in per_step.items()}
    report = {"schema": "swiftopt.bench-step/1", "model": args.model, "device": machine_name(runtime)}
    print(json.dumps({**report, "ms": ms, "ms_per_step": per_step, "share_of_draft_pass": share}))


def step(search: Search, context: Context) -> None:
    """Score candidates once more."""
    context.searched = False
    alone(search.score(context, ""))


if __name__ == "__main__":
    main()
