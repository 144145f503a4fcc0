"""Measures the cost of a disturbed start: servers started beside other programs alternate with servers started alone.

    python -m swiftopt.bench.disturbed_start --model M --stream FILE [--starts 5] [--max-new-tokens 32]

Each start has an empty database. During a disturbed start one process computes and another copies memory, until the
server is ready. The first requests are only served; the later ones are sent twice, with the plan and plainly, and their
ratio is plain seconds ÷ served seconds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ..core.streams import read_stream
from ..core.types import Prompt
from .serving import ask, measure, model_card, model_tuning, served
from .turn import measured, started

SCHEMA = "swiftopt.bench-disturbed-start/1"
N_WARM, N_MEASURED = 10, 20  # Requests before the measurement, and requests that are measured.
PROGRAMS = (
    "n = 0\nwhile True: n += 1",
    "import numpy as np\na, b = np.ones(1 << 26), np.empty(1 << 26)\nwhile True: np.copyto(b, a)",
)


@contextmanager
def busy() -> Iterator[None]:
    """Run a CPU-bound and a memory-bound process beside the body."""
    programs = [started([sys.executable, "-c", program]) for program in PROGRAMS]
    try:
        yield
    finally:
        for process in programs:
            process.kill()
            process.wait()


def start(model: str, prompts: Sequence[Prompt], max_new_tokens: int, is_disturbed: bool) -> dict[str, Any]:
    """Start a server, send it the prompts, and return the measured ratio with the costs before and after."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        with busy() if is_disturbed else nullcontext():
            options = ["--db", str(Path(folder) / "plans.db")]
            client = running.enter_context(served(model, options, lambda step: None))
        costs = model_tuning(client)["costs"]
        name = model_card(client)["id"]
        for prompt in prompts[:N_WARM]:
            ask(client, name, max_new_tokens, "best", prompt)
        report = measure(client, prompts[N_WARM:], max_new_tokens, 1, len(prompts), lambda line: None)
    after = report["tuning"]["costs"]
    return {
        "disturbed": is_disturbed,
        "ratio": report["windows"][0],
        "equal": report["equal"],
        "quality": [costs["quality"], after["quality"]],
        "remark": costs["remark"],
        "pass_s": [costs["pass_s"], after["pass_s"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--stream", required=True)
    parser.add_argument("--starts", type=int, default=5, help="starts of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args()
    prompts = list(read_stream(args.stream))[: N_WARM + N_MEASURED]
    results: list[dict[str, Any]] = []
    for number in range(2 * args.starts):
        # Order of starts: undisturbed, disturbed, disturbed, undisturbed, repeated.
        is_disturbed = number % 4 in (1, 2)
        results.append(start(args.model, prompts, args.max_new_tokens, is_disturbed))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    ratios = {kind: [run["ratio"] for run in results if run["disturbed"] == kind] for kind in (False, True)}
    undisturbed_ratio, disturbed_ratio = mean(ratios[False]), mean(ratios[True])
    spreads = {
        ("disturbed" if kind else "alone"): stdev(values) if len(values) > 1 else 0.0 for kind, values in ratios.items()
    }
    summary = {
        "alone": undisturbed_ratio,
        "disturbed": disturbed_ratio,
        "quotient": disturbed_ratio / undisturbed_ratio,
        "stdev": spreads,
    }
    print(json.dumps({"schema": SCHEMA, "requests": len(prompts), **summary, "results": results}))


if __name__ == "__main__":
    measured(main)
