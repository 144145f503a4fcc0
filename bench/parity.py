"""Compares tokens with drafting to those of transformers' greedy `generate` or of plain decoding, on real prompts.

Drafts come from several layer sets and from adaptive drafting.

    python -m swiftopt.bench.parity --model smollm2-135m --stream humaneval.jsonl --dtype float32 --random-sets 3
    python -m swiftopt.bench.parity --model smollm2-135m --stream gsm8k.jsonl --random-sets 0 --adaptive int4
    python -m swiftopt.bench.parity --model smollm2-135m --stream gsm8k.jsonl --dtype bfloat16 --against plain

Prints a line per prompt, then one JSON object. It lists each first divergence with two figures of that position: the
margin between the target's two highest logits, and their noise, the difference between passes over one row and several.
In a 16-bit dtype the noise can exceed the margin.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..core.costs import SMALLEST_BUCKET, CostProfile
from ..core.layer_sets import LayerSet, n_skipped_for, searchable
from ..core.records import LayerSetRecord
from ..core.settings import SwiftSettings
from ..core.streams import read_stream
from ..core.types import Prompt, Sampling, n_turns
from ..decoding.methods import PLAIN, Method, Resources, build, swift
from ..decoding.methods.adaptive import AdaptiveSettings
from ..decoding.session import Session, hf_generate, turn_of
from ..models.costs import machine_name, measure_costs, with_formats
from ..models.loading import load
from ..models.rows import Rows
from ..models.runtime import Runtime

SCHEMA = "swiftopt.bench-parity/1"
SKIP_RATIOS = (0.2, 0.45, 0.7)  # Skip ratios of the random layer sets, in rotation.
MARGIN_ROWS = 8  # Rows of the pass that is compared with a one-row pass.


def random_sets(n_layers: int, count: int) -> dict[str, LayerSet]:
    """Return `count` random layer sets with seeds from 0, by name."""
    sets = {}
    for seed in range(count):
        ratio = SKIP_RATIOS[seed % len(SKIP_RATIOS)]
        skipped = random.Random(seed).sample(searchable(n_layers), n_skipped_for(n_layers, ratio))
        sets[f"random {seed} (r = {ratio})"] = LayerSet(n_layers).skipping(skipped)
    return sets


@torch.inference_mode()
def margin_and_noise(runtime: Runtime, ids: Sequence[int]) -> tuple[float, float]:
    """Return the margin between the target's two highest logits after `ids`, and the noise of these logits.

    The noise is the largest difference between a pass over one row and a pass over `MARGIN_ROWS` rows.
    """
    buffer = runtime.new_buffer(len(ids) + MARGIN_ROWS)
    if len(ids) > 1:
        runtime.prefill(ids[:-1], buffer)
    single_row = runtime.forward(Rows(ids[-1:], len(ids) - 1), buffer)[0].float()
    first_row = max(0, len(ids) - MARGIN_ROWS)
    many_rows = runtime.forward(Rows(ids[first_row:], first_row), buffer)[-1].float()
    best = single_row.topk(2)
    return float(best.values[0] - best.values[1]), float((single_row - many_rows).abs()[best.indices].max())


def adaptive_drafts(runtime: Runtime, formats: Sequence[str], costs: CostProfile | None = None) -> dict[str, Method]:
    """Return adaptive drafting in each format; without `costs`, they are measured first."""
    costs = with_formats(runtime, costs or measure_costs(runtime, SMALLEST_BUCKET), formats)
    resources = Resources(runtime, costs=costs)
    return {
        f"adaptive, {name}": build("adaptive", resources, AdaptiveSettings.from_json({"draft_format": name}))
        for name in dict.fromkeys(formats)
    }


def compare(
    runtime: Runtime, prompts: Sequence[Prompt], methods: dict[str, Method], max_new_tokens: int, against: str
) -> dict[str, Any]:
    """Return the number of identical turns of each method, and the first divergence of each other turn.

    Args: against: "plain" (swiftopt's plain decoding) or "transformers".
    """
    session = Session(runtime, Sampling(), max_new_tokens)
    n_equal_by_method = dict.fromkeys(methods, 0)
    divergences: list[dict[str, Any]] = []
    n_prompts = n_tokens = 0
    for prompt, ids, reference in _references(session, prompts, against):
        n_prompts += 1
        n_tokens += len(reference)
        for name, method in methods.items():
            token_ids = session.run(prompt, method)[0].completion.token_ids
            if token_ids == reference:
                n_equal_by_method[name] += 1
                continue
            differences = (i for i, (a, b) in enumerate(zip(token_ids, reference, strict=False)) if a != b)
            position = next(differences, len(reference))
            margin, noise = margin_and_noise(runtime, [*ids, *reference[:position]])
            divergences.append({"prompt": prompt.id, "set": name, "token": position, "margin": margin, "noise": noise})
        print(f"{prompt.id}: {json.dumps(n_equal_by_method)}", file=sys.stderr, flush=True)
    return {
        "schema": SCHEMA,
        "device": machine_name(runtime),
        "dtype": runtime.dtype_name,
        "against": against,
        "prompts": n_prompts,
        "tokens": n_tokens,
        "identical": n_equal_by_method,
        "divergences": divergences,
    }


def _references(
    session: Session, prompts: Sequence[Prompt], against: str
) -> Iterator[tuple[Prompt, list[int], tuple[int, ...]]]:
    """Yield for each turn its prompt, token ids and reference completion; later turns have this in their history."""
    for prompt in prompts:
        history = prompt.messages
        for number in range(n_turns(prompt)):
            turn = turn_of(prompt, number)
            if prompt.turns:
                history = (*history, {"role": "user", "content": prompt.turns[number]})
                turn = replace(turn, turns=(), messages=history)
            ids = session.encode(turn)
            if against == "plain":
                reference = session.run(turn, PLAIN)[0].completion.token_ids
            else:
                reference = hf_generate(session, ids, session.max_new_tokens)
            yield turn, ids, reference
            answer = session.ending(session.max_new_tokens).text(reference)
            history = (*history, {"role": "assistant", "content": answer})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--stream", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--against", choices=("transformers", "plain"), default="transformers")
    parser.add_argument("--random-sets", type=int, default=3)
    parser.add_argument(
        "--adaptive", action="append", default=[], metavar="FORMAT", help="add adaptive drafts in this format"
    )
    parser.add_argument("--layer-set", action="append", default=[], help="add an exported layer set; may be repeated")
    args = parser.parse_args()
    runtime = load(args.model, args.dtype, args.device)
    sets = random_sets(runtime.n_layers, args.random_sets)
    for path in args.layer_set:
        sets[Path(path).name] = LayerSetRecord.load(Path(path)).layer_set
    methods = {name: swift(layer_set, SwiftSettings()) for name, layer_set in sets.items()}
    methods |= adaptive_drafts(runtime, args.adaptive)
    prompts = read_stream(args.stream, limit=args.limit)
    print(json.dumps({"model": args.model, **compare(runtime, prompts, methods, args.max_new_tokens, args.against)}))


if __name__ == "__main__":
    main()
