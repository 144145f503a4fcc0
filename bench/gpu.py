"""Where the time of a large model goes on a GPU, and what skipping sub-layers while drafting gains there.

    python -m swiftopt.bench.gpu --shape codellama-13b --redundancy 0.98
    python -m swiftopt.bench.gpu --shape tiny --device cpu

The model is random, of a real one's shape, and made on the device. What its inner sub-layers add is scaled down until
a draft without 45 % of them is accepted as often as `--redundancy` says. Prints a table, then one line of JSON; where
there is no such device, a sentence on stderr and {"skipped": reason}.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, get_args

import torch

from ..core.costs import CostProfile, expected_of
from ..core.errors import SwiftoptError
from ..core.requests import Speed
from ..core.types import Completion, LayerSet, n_skipped_for
from ..decoding.methods import PLAIN
from ..models.costs import device_name, measure_costs
from ..models.loading import at_speed
from ..models.rows import Rows
from ..models.runtime import Runtime
from .gpu_model import SHAPES, ModelShape, drafting, make_redundant, random_runtime, run

SCHEMA = "swiftopt.bench-gpu/1"
SKIP_RATIO = 0.45
VERIFY_ROWS = (1, 2, 4, 8, 16)
LONGEST_DRAFT = 25
REPEATS = 3
SPARE = 1.15  # memory wanted, in sizes of the weights


def seconds(task: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median seconds of a task, with the device done before and after each."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    samples = []
    for _ in range(repeats + 2):
        wait()
        clock = perf_counter()
        task()
        wait()
        samples.append(perf_counter() - clock)
    return median(samples[2:])


@torch.inference_mode()
def bandwidth(device: torch.device, mebibytes: int) -> dict[str, float]:
    """GB/s of a copy, read and written, and of a matrix-vector product in bfloat16, its matrix read."""
    source = torch.zeros(mebibytes << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = seconds(lambda: target.copy_(source), device)
    width = 1 << 12
    matrix = torch.zeros((mebibytes << 19) // width, width, dtype=torch.bfloat16, device=device)
    vector = torch.zeros(1, width, dtype=torch.bfloat16, device=device)
    multiplied = seconds(lambda: torch.nn.functional.linear(vector, matrix), device)
    return {"copy": 2e-9 * source.numel() / copied, "matvec": 2e-9 * matrix.numel() / multiplied}


def bytes_per_token(runtime: Runtime) -> int:
    """Weights that a one-row pass reads: all but the embeddings, of which it reads one row."""
    model: Any = runtime.hf_model
    embedding = model.get_input_embeddings().weight
    return sum(p.numel() * p.element_size() for p in model.parameters() if p is not embedding)


def draft_seconds(runtime: Runtime, layer_set: LayerSet) -> float:
    """One draft pass and its answer."""
    buffer = runtime.new_buffer(512)
    rows = Rows([1], 256, variants=(layer_set,))
    return seconds(lambda: runtime.forward(rows, buffer).max(dim=-1).indices.tolist(), runtime.device)


def best_length(profile: CostProfile, layer_set: LayerSet, acceptance: float) -> int:
    """The chain length with the most expected tokens per second, if every draft stands with that chance."""

    def worth(n: int) -> float:
        tokens = sum(acceptance**i for i in range(n + 1))
        return profile.expected_speedup(layer_set, tokens, n, {n + 1: 1})

    return max(range(1, LONGEST_DRAFT + 1), key=worth)


def speed_of(done: Completion) -> float:
    """Tokens per second, prefill and its token left out."""
    return (done.n_tokens - done.first_tokens) / (done.timings.total_s - done.prefill_s)


def measure(shape: ModelShape, device: str, wanted: float, speed: Speed, n_new: int) -> dict[str, Any]:
    """Everything that the report holds but the name of the shape."""
    runtime = random_runtime(shape, device)
    layer_set = LayerSet.uniform(runtime.n_layers, n_skipped_for(runtime.n_layers, SKIP_RATIO))
    scale = make_redundant(runtime, layer_set, wanted, n_new)
    at_speed(runtime, speed)
    profile = measure_costs(runtime, 256)
    alpha = run(runtime, drafting(layer_set, 4), n_new).acceptance_rate or 0.0
    length = best_length(profile, layer_set, alpha)
    plain, drafted = zip(
        *((run(runtime, PLAIN, n_new), run(runtime, drafting(layer_set, length), n_new)) for _ in range(REPEATS)),
        strict=True,
    )
    read = bandwidth(runtime.device, shape.mebibytes)
    plain_speed = median(map(speed_of, plain))
    limit = 1e9 * max(read.values()) / bytes_per_token(runtime)
    ratio = median(speed_of(fast) / speed_of(slow) for slow, fast in zip(plain, drafted, strict=True))
    expected = expected_of(profile, drafted) or 0.0
    return {
        "device": device_name(runtime.device),
        "dtype": runtime.dtype_name,
        "speed": speed,
        "parameters": runtime.info.n_parameters,
        "bandwidth_gb_s": read,
        "plain": {"tokens_per_s": plain_speed, "limit_tokens_per_s": limit, "share": plain_speed / limit},
        "pass_ms": {
            "draft": 1e3 * draft_seconds(runtime, layer_set),
            "verify": {str(n): 1e3 * profile.target_pass_s(n) for n in VERIFY_ROWS},
        },
        "redundancy": {"wanted": wanted, "scale": scale},
        "draft": {
            "skip_ratio": layer_set.skip_ratio,
            "length": length,
            "acceptance_rate": sum(done.accepted for done in drafted) / sum(done.drafted for done in drafted),
            "mean_generated_length": drafted[0].mean_generated_length,
            "ratio": ratio,
            "expected_ratio": expected,
            "measured_over_expected": ratio / expected if expected else None,
            "identical": sum(a == b for a, b in zip(plain[0].token_ids, drafted[0].token_ids, strict=True)) / n_new,
        },
    }


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    plain, draft, passes = report["plain"], report["draft"], report["pass_ms"]
    verify = ", ".join(f"{n}: {ms:.2f}" for n, ms in passes["verify"].items())
    gb_s = ", ".join(f"{name} {value:.0f}" for name, value in report["bandwidth_gb_s"].items())
    rows = (
        ("model", f"{report['shape']}, {report['parameters'] / 1e9:.2f}e9 parameters, {report['dtype']}"),
        ("device", f"{report['device']}, {report['speed']} runtime"),
        ("bandwidth, GB/s", gb_s),
        ("plain", f"{plain['tokens_per_s']:.1f} tokens/s, {plain['share']:.0%} of {plain['limit_tokens_per_s']:.1f}"),
        ("draft pass, ms", f"{passes['draft']:.2f} at r = {draft['skip_ratio']:.2f}"),
        ("verify pass, ms", f"{verify} (rows: ms)"),
        ("redundancy", f"inner sub-layers scaled by {report['redundancy']['scale']:.4f}"),
        ("drafting", f"{draft['length']} tokens at a time, α {draft['acceptance_rate']:.3f}"),
        ("ratio to plain", f"measured {draft['ratio']:.2f}, expected {draft['expected_ratio']:.2f}"),
        ("same tokens", f"{draft['identical']:.0%}"),
    )
    return "\n".join(f"{name:<18}{text}" for name, text in rows)


def obstacle(shape: ModelShape, device: str) -> str | None:
    """Why nothing can be measured here, None where it can."""
    if not device.startswith("cuda"):
        return None
    if not torch.cuda.is_available():
        return "this machine has no CUDA device: pass --device cpu --shape tiny to see the report"
    per_layer = 4 * shape.hidden**2 + 3 * shape.hidden * shape.inner
    wanted = SPARE * 2 * (shape.n_layers * per_layer + 2 * shape.vocab * shape.hidden) + 2 * (shape.mebibytes << 20)
    free = torch.cuda.mem_get_info(torch.device(device))[0]
    if free < wanted:
        return f"the model needs {wanted / 1e9:.0f} GB, and {device} has {free / 1e9:.0f} GB free: use --shape tiny"
    return None


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="codellama-13b")
    parser.add_argument("--redundancy", type=float, default=0.98, help="share of the draft's tokens to be accepted")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--speed", choices=get_args(Speed), default="eager")
    parser.add_argument("--tokens", type=int, default=128, help="per completion")
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    reason = obstacle(shape, args.device)
    report: dict[str, Any] = {"schema": SCHEMA, "shape": args.shape}
    if reason is None:
        try:
            report |= measure(shape, args.device, args.redundancy, args.speed, args.tokens)
            print(table(report))
        except SwiftoptError as error:
            reason = str(error)
    if reason is not None:
        print(f"nothing was measured: {reason}", file=sys.stderr)
        report = {"skipped": reason}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
