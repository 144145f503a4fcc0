"""Measures where a large model spends its time on a GPU, and the speedup of drafts by layers, format and load.

    python -m swiftopt.bench.gpu --shape codellama-13b --redundancy 0.98
    python -m swiftopt.bench.gpu --shape tiny --device cpu

The model has the shape of a real one and random weights, which are made on the device. The outputs of its inner
sub-layers are scaled down until a draft that skips 45 % of them reaches the acceptance rate of `--redundancy`. Prints a
table, then one line of JSON; without a suitable device, a sentence on stderr and {"skipped": reason}.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, cast, get_args

import torch
from transformers import LlamaConfig

from ..core.costs import CostProfile, expected_of
from ..core.errors import SwiftoptError
from ..core.layer_sets import LayerSet, n_skipped_for
from ..core.requests import Speed
from ..core.settings import STORED, SwiftSettings
from ..core.types import Completion, Sampling
from ..decoding.context import Ending, TokenRule
from ..decoding.engine import side_by_side
from ..decoding.loop import decode, decoding
from ..decoding.methods import PLAIN, Method, Resources, build, swift
from ..decoding.methods.adaptive import AdaptiveSettings
from ..models.costs import RECORD_AT, device_name, measure_costs, measure_format
from ..models.loading import at_speed, random_runtime, use_expandable_segments
from ..models.rows import Rows, best_of
from ..models.runtime import Runtime
from .turn import measured

SCHEMA = "swiftopt.bench-gpu/1"
SKIP_RATIO = 0.45
VERIFY_ROWS = (1, 2, 4, 8, 16)
LONGEST_DRAFT = 25
REPEATS, PASS_REPEATS = 3, 20
FORMATS = ("int8", "fp8", "int4")  # Formats of quantised drafts, in the order of measuring.
LOADS = (1, 4, 16, 32)  # Numbers of concurrent requests.
LOAD_REPEATS = 2
WARM_RUNS = 6  # Largest number of warm-up runs; they end when all passes replay captured CUDA graphs.
SPARE = 1.15  # Required free memory, as a multiple of the weights' size.
HALVINGS = 12  # The bisection scales inner sub-layers by 1 to 2^-HALVINGS.
BISECTIONS = 7  # Steps of the bisection for the exponent of that scale.


# --- model: random weights in a real model's shape, with adjustable redundancy of the sub-layers


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a Llama model; `mebibytes`: size of the tensors that measure bandwidth."""

    n_layers: int
    hidden: int
    inner: int
    heads: int
    vocab: int
    positions: int
    mebibytes: int
    kv_heads: int | None = None  # None: same as `heads`.

    def config(self) -> LlamaConfig:
        # The initializer range shrinks with the width, so that sub-layers add the same amount at every width.
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.n_layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads or self.heads,
            max_position_embeddings=self.positions,
            initializer_range=1.4 / self.hidden**0.5,
            eos_token_id=None,
            tie_word_embeddings=False,
        )


SHAPES = {
    "codellama-13b": ModelShape(40, 5120, 13824, 40, 32016, 16384, 2048),
    "llama-70b-8-layers": ModelShape(8, 8192, 28672, 64, 32000, 4096, 2048, kv_heads=8),
    "llama-1b": ModelShape(22, 2048, 5632, 32, 32000, 2048, 512, kv_heads=4),
    "tiny": ModelShape(8, 256, 512, 4, 256, 2048, 16),
}


@torch.inference_mode()
def permuting_runtime(model_shape: ModelShape, device: str) -> Runtime:
    """Return a random bfloat16 model whose head is a permutation of its embeddings.

    Each token then has one likely successor, and the less the sub-layers add to the residual stream, the likelier it
    is. With a random head the top logits would nearly tie, and rounding would decide between them.
    """
    torch.manual_seed(0)
    runtime = random_runtime(model_shape.config(), device)
    model = cast(Any, runtime.hf_model)
    embedding = model.get_input_embeddings().weight
    embedding.normal_()
    successors = embedding[torch.randperm(model_shape.vocab, device=device)] / model_shape.hidden**0.5
    model.get_output_embeddings().weight.copy_(successors)
    return runtime


@torch.inference_mode()
def scale_inner(runtime: Runtime, factor: float) -> None:
    """Scale the output of all sub-layers except those of the first and last layer."""
    for block in runtime.blocks[1:-1]:
        for weight in (block.parts.out.weight, block.parts.mlp.down_proj.weight):
            weight.mul_(factor)


def prompt_of(runtime: Runtime, number: int = 0) -> list[int]:
    """Return the ids of 16 tokens, others for each number."""
    return [1 + (7 * i + 31 * number) % (runtime.vocab_size - 1) for i in range(16)]


def run(runtime: Runtime, method: Method, n_new: int) -> Completion:
    return decode(runtime, prompt_of(runtime), method, TokenRule.of(Sampling(), None), Ending(n_new))


def run_together(runtime: Runtime, method: Method, n_new: int, n_requests: int) -> float:
    """Decode `n_new` tokens for each of `n_requests` concurrent requests; return total tokens per second."""
    requests = [
        decoding(runtime, prompt_of(runtime, i), method, TokenRule.of(Sampling(), None), Ending(n_new))
        for i in range(n_requests)
    ]
    clock = perf_counter()
    deque(side_by_side(requests, at_once=n_requests), 0)
    return n_requests * n_new / (perf_counter() - clock)


def drafting(layer_set: LayerSet, length: int) -> Method:
    """Return drafting with a fixed length: a random model has too little confidence for early stopping."""
    return swift(layer_set, SwiftSettings(max_draft_length=length, early_stop=False, dynamic_verification=False))


def make_redundant(runtime: Runtime, layer_set: LayerSet, min_acceptance: float, n_new: int) -> float:
    """Scale the inner sub-layers by the largest factor at which acceptance is at least `min_acceptance`; return it."""
    # Exponents of 1/2. At `low_exponent` the acceptance is too low; the weights are scaled by `applied_exponent`.
    applied_exponent, low_exponent, high_exponent = 0.0, 0.0, float(HALVINGS)
    for step in range(BISECTIONS + 2):
        # Try both ends first: no scaling, then the strongest.
        exponent = (0.0, high_exponent)[step] if step < 2 else (low_exponent + high_exponent) / 2
        scale_inner(runtime, 2.0 ** (applied_exponent - exponent))
        applied_exponent = exponent
        if (run(runtime, drafting(layer_set, 4), n_new).acceptance_rate or 0.0) >= min_acceptance:
            high_exponent = exponent
        else:
            low_exponent = exponent
        if high_exponent == 0.0:
            break
    # Each scaling rounds the weights, so measure again and scale further if needed.
    while True:
        scale_inner(runtime, 2.0 ** (applied_exponent - high_exponent))
        applied_exponent = high_exponent
        if (
            high_exponent >= 2 * HALVINGS
            or (run(runtime, drafting(layer_set, 4), n_new).acceptance_rate or 0.0) >= min_acceptance
        ):
            return float(2.0**-high_exponent)
        high_exponent += 0.125


# --- measurements


def median_s(task: Callable[[], object], device: torch.device) -> float:
    """Return a task's median seconds; the device is synchronised before and after each run."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    samples = []
    for _ in range(2 + PASS_REPEATS):  # The first two runs are warm-up.
        wait()
        clock = perf_counter()
        task()
        wait()
        samples.append(perf_counter() - clock)
    return median(samples[2:])


@torch.inference_mode()
def bandwidth(device: torch.device, mebibytes: int) -> dict[str, float]:
    """Return GB/s of a copy (bytes read and written) and of a bfloat16 matrix-vector product (bytes of the matrix)."""
    source = torch.zeros(mebibytes << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device)
    width = 1 << 12
    matrix = torch.zeros((mebibytes << 19) // width, width, dtype=torch.bfloat16, device=device)
    vector = torch.zeros(1, width, dtype=torch.bfloat16, device=device)
    product_s = median_s(lambda: torch.nn.functional.linear(vector, matrix), device)
    return {"copy": 2e-9 * source.numel() / copy_s, "matvec": 2e-9 * matrix.numel() / product_s}


def bytes_per_token(runtime: Runtime) -> int:
    """Return the weight bytes that a one-row pass reads: all except the embedding table."""
    model: Any = runtime.hf_model
    embedding = model.get_input_embeddings().weight
    return sum(p.numel() * p.element_size() for p in model.parameters() if p is not embedding)


def draft_seconds(runtime: Runtime, layer_set: LayerSet) -> float:
    buffer = runtime.new_buffer(512)
    rows = Rows([1], 256, variants=(layer_set,))
    return median_s(lambda: best_of(runtime.forward(rows, buffer)).tolist(), runtime.device)


def best_length(profile: CostProfile, layer_set: LayerSet, acceptance: float) -> int:
    """Return the draft length with the highest expected speedup, if each token is accepted with this probability."""

    def expected_speedup(n: int) -> float:
        tokens = sum(acceptance**i for i in range(n + 1))
        return profile.expected_speedup(layer_set, tokens, n, {n + 1: 1})

    return max(range(1, LONGEST_DRAFT + 1), key=expected_speedup)


def speed_of(completion: Completion) -> float:
    """Return decoded tokens per second, without prefill and its tokens."""
    return (completion.n_tokens - completion.first_tokens) / (completion.timings.total_s - completion.prefill_s)


def run_pairs(runtime: Runtime, method: Method, n_new: int) -> list[tuple[Completion, Completion]]:
    """Decode alternately with plain decoding and with `method`."""
    return [(run(runtime, PLAIN, n_new), run(runtime, method, n_new)) for _ in range(REPEATS)]


def speedup(pairs: Sequence[tuple[Completion, Completion]]) -> float:
    return median(speed_of(drafted) / speed_of(plain) for plain, drafted in pairs)


def measure(shape: ModelShape, device: str, min_acceptance: float, speed: Speed, n_new: int) -> dict[str, Any]:
    """Return the report without its schema and shape name."""
    runtime = permuting_runtime(shape, device)
    layer_set = LayerSet.uniform(runtime.n_layers, n_skipped_for(runtime.n_layers, SKIP_RATIO))
    at_speed(runtime, speed)
    scale = make_redundant(runtime, layer_set, min_acceptance, n_new)
    profile = measure_costs(runtime, 256)
    alpha = run(runtime, drafting(layer_set, 4), n_new).acceptance_rate or 0.0
    length = best_length(profile, layer_set, alpha)
    pairs = run_pairs(runtime, drafting(layer_set, length), n_new)
    plain_completions, drafted_completions = zip(*pairs, strict=True)
    read_gb_s = bandwidth(runtime.device, shape.mebibytes)
    plain_speed = median(map(speed_of, plain_completions))
    limit = 1e9 * max(read_gb_s.values()) / bytes_per_token(runtime)
    ratio, expected_ratio = speedup(pairs), expected_of(profile, drafted_completions) or 0.0
    report = {
        "device": device_name(runtime.device),
        "dtype": runtime.dtype_name,
        "speed": speed,
        "parameters": runtime.info.n_parameters,
        "bandwidth_gb_s": read_gb_s,
        "plain": {"tokens_per_s": plain_speed, "limit_tokens_per_s": limit, "share": plain_speed / limit},
        "pass_ms": {
            "draft": 1e3 * draft_seconds(runtime, layer_set),
            "verify": {str(n): 1e3 * profile.target_pass_s(n) for n in VERIFY_ROWS},
        },
        "redundancy": {"wanted": min_acceptance, "scale": scale},
        "draft": {
            "skip_ratio": layer_set.skip_ratio,
            "length": length,
            "acceptance_rate": sum(completion.accepted for completion in drafted_completions)
            / sum(completion.drafted for completion in drafted_completions),
            "mean_generated_length": drafted_completions[0].mean_generated_length,
            "ratio": ratio,
            "expected_ratio": expected_ratio,
            "measured_over_expected": ratio / expected_ratio if expected_ratio else None,
            "identical": _identical(*pairs[0]),
        },
    }
    formats, profile = measure_formats(runtime, profile, n_new)
    return {**report, "formats": formats, "load": measure_load(runtime, profile, n_new // 2)}


def measure_formats(runtime: Runtime, profile: CostProfile, n_new: int) -> tuple[dict[str, Any], CostProfile]:
    """Measure quantised drafts of the whole model: time to quantise, time per pass, and speedup of adaptive drafting.

    Returns: by format the figures, or the reason for its failure; and the profile with the costs of working formats.
    """
    by_format: dict[str, Any] = {}
    for name in FORMATS:
        clock = perf_counter()
        try:
            profile = measure_format(runtime, profile, name)
        except (RuntimeError, SwiftoptError) as error:  # For example, torch lacks a kernel for this shape or device.
            by_format[name] = {"reason": str(error).splitlines()[0]}
            continue
        ready_s, method = perf_counter() - clock, adaptive(runtime, profile, name)
        pairs = run_pairs(runtime, method, n_new)
        drafted_completion = pairs[0][1]
        by_format[name] = {
            "ready_s": ready_s,
            "pass_ms": 1e3 * draft_seconds(runtime, runtime.whole.filled(name)),
            "acceptance_rate": drafted_completion.acceptance_rate,
            "ratio": speedup(pairs),
            "expected_ratio": expected_of(profile, [drafted_completion]),
            "identical": _identical(*pairs[0]),
        }
    return by_format, profile


def measure_load(runtime: Runtime, profile: CostProfile, n_new: int) -> dict[str, Any]:
    """Measure tokens per second of concurrent requests, alternately with plain decoding and adaptive drafting."""
    name = next((candidate for candidate in reversed(FORMATS) if candidate in profile.formats), STORED)
    method, by_load = adaptive(runtime, profile, name), dict[str, Any]()
    for n in LOADS:
        if runtime.graphs is not None:
            _capture(runtime, method, n_new, n)
        pairs = [
            (run_together(runtime, PLAIN, n_new, n), run_together(runtime, method, n_new, n))
            for _ in range(LOAD_REPEATS)
        ]
        by_load[str(n)] = {
            "plain_tokens_per_s": median(plain_tok_s for plain_tok_s, _ in pairs),
            "ratio": median(drafted_tok_s / plain_tok_s for plain_tok_s, drafted_tok_s in pairs),
        }
    return by_load


def _capture(runtime: Runtime, method: Method, n_new: int, n_requests: int) -> None:
    """Run requests until no further CUDA graph is captured; each run has one prefill pass, hence the first loop."""
    for _ in range(RECORD_AT - 1):
        run_together(runtime, method, 1, n_requests)
    for _ in range(WARM_RUNS):
        n_first = runtime.n_first
        run_together(runtime, method, n_new, n_requests)
        if runtime.n_first == n_first:
            break


def adaptive(runtime: Runtime, profile: CostProfile, name: str) -> Method:
    resources = Resources(runtime, runtime.whole, costs=profile)
    return build("adaptive", resources, AdaptiveSettings.from_json({"draft_format": name, "lookup": False}))


def _identical(plain: Completion, drafted: Completion) -> float:
    """Return the share of equal tokens."""
    return sum(a == b for a, b in zip(plain.token_ids, drafted.token_ids, strict=True)) / plain.n_tokens


def table(report: dict[str, Any]) -> str:
    """Return the report as lines of text for people."""
    plain, draft, passes = report["plain"], report["draft"], report["pass_ms"]
    verify = ", ".join(f"{n}: {ms:.2f}" for n, ms in passes["verify"].items())
    gb_s = ", ".join(f"{name} {gb_s_value:.0f}" for name, gb_s_value in report["bandwidth_gb_s"].items())
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
        *((f"{name} drafts", _format_words(figures)) for name, figures in report["formats"].items()),
        (
            "tokens/s by load",
            ", ".join(f"{n}: {figures['plain_tokens_per_s']:.0f}" for n, figures in report["load"].items()),
        ),
        ("drafting by load", ", ".join(f"{n}: {figures['ratio']:.2f}" for n, figures in report["load"].items())),
    )
    return "\n".join(f"{name:<18}{text}" for name, text in rows)


def _format_words(figures: dict[str, Any]) -> str:
    if "reason" in figures:
        return f"none: {figures['reason']}"
    alpha = "nothing drafted" if figures["acceptance_rate"] is None else f"α {figures['acceptance_rate']:.2f}"
    times = f"{figures['pass_ms']:.2f} ms, ready in {figures['ready_s']:.1f} s"
    return f"{times}, {alpha}, {figures['ratio']:.2f}x"


def obstacle(shape: ModelShape, device: str) -> str | None:
    """Return the reason why this machine cannot run the measurement; None if it can."""
    if not device.startswith("cuda"):
        return None
    if not torch.cuda.is_available():
        return "this machine has no CUDA device: use --device cpu --shape tiny to see the report"
    per_layer = 4 * shape.hidden**2 + 3 * shape.hidden * shape.inner
    needed = SPARE * 2 * (shape.n_layers * per_layer + 2 * shape.vocab * shape.hidden) + 2 * (shape.mebibytes << 20)
    free_bytes = torch.cuda.mem_get_info(torch.device(device))[0]
    if free_bytes < needed:
        return (
            f"the model needs {needed / 1e9:.0f} GB, and {device} has {free_bytes / 1e9:.0f} GB free: use --shape tiny"
        )
    return None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="codellama-13b")
    parser.add_argument("--redundancy", type=float, default=0.98, help="share of drafted tokens that the model accepts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--speed", choices=get_args(Speed), default="eager")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per completion")
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    if args.device != "cpu":
        use_expandable_segments()
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
    measured(main)
