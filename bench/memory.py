"""Peak memory of plain decoding against drafting: each in a process of its own, because a peak never falls.

    python -m swiftopt.bench.memory --model smollm2-135m --prompt-tokens 128 --max-new-tokens 128

Prints one JSON object; the share is of the whole process's peak (CPU) or of what torch allocated (CUDA).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

import torch

from ..core.settings import SwiftSettings
from ..core.types import LayerSet, Sampling, n_skipped_for
from ..decoding.context import Ending, TokenRule
from ..decoding.loop import decode
from ..decoding.methods import PLAIN, Method, swift
from ..models.loading import load


def peak_bytes(model: str, method: str, n_prompt: int, max_new_tokens: int, dtype: str, device: str) -> int:
    """Decode once in this process and say how far memory rose."""
    runtime = load(model, dtype, device)
    uniform = LayerSet.uniform(runtime.n_layers, n_skipped_for(runtime.n_layers, 0.45))
    decoder: Method = PLAIN if method == "plain" else swift(uniform, SwiftSettings())
    prompt = [7 + i % 50 for i in range(n_prompt)]
    decode(runtime, prompt, decoder, TokenRule.of(Sampling(), None), Ending(max_new_tokens))
    if runtime.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(runtime.device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports kibibytes


def main() -> None:
    """Run both methods as children, alternating, and compare their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", choices=["plain", "swift"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        size = peak_bytes(args.model, args.child, args.prompt_tokens, args.max_new_tokens, args.dtype, args.device)
        print(size)
        return
    peaks: dict[str, list[int]] = {"plain": [], "swift": []}
    for _ in range(args.repeats):
        for method, sizes in peaks.items():
            command = [sys.executable, "-m", "swiftopt.bench.memory", *sys.argv[1:], "--child", method]
            sizes.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    middle = {method: sorted(sizes)[len(sizes) // 2] for method, sizes in peaks.items()}
    report = {"schema": "swiftopt.bench-memory/1", "model": args.model, "peak_bytes": peaks}
    print(json.dumps({**report, "extra_share": round(middle["swift"] / middle["plain"] - 1, 4)}))


if __name__ == "__main__":
    main()
