"""Compares swiftopt with other engines on one GPU, with a random model: the last step of `make gpu`.

    python -m swiftopt.bench.gpu_peers [--device cuda]

Nothing is downloaded: only engines run that are installed in the cache, or whose wheels are in PIP_FIND_LINKS. A line
names the engines that were left out; the last line is the report of `swiftopt bench peers`, after Ctrl-C with the
results so far. `--device cpu --shape tiny` tries the script.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ..core.errors import SwiftoptError
from ..engines.commands import peers_view
from ..engines.devices import chosen_device
from ..engines.peers import all_rows, chosen_rows, report_of
from ..engines.turns import Question, Turns, TurnsRequest
from ..models.costs import device_name
from ..terminal.output import note, show
from .gpu import SHAPES, ModelShape, obstacle, permuting_runtime, prompt_of, scale_inner
from .turn import measured

ROWS = ("swiftopt", "transformers/plain", "llama-cpp/plain", "node-llama-cpp/plain", "vllm/plain")
SCALE = 0.0625  # Scales the inner sub-layers' outputs; otherwise int4 drafts of random weights are rarely accepted.
N_PROMPTS = 3
NEW_TOKENS = 128
TIMEOUT_S = 75.0  # Time limit for an engine to load (with vLLM's compilation) or to answer.
OFFLINE = {"PIP_NO_INDEX": "1", "npm_config_offline": "true"}


def save_random(shape: ModelShape, device: str, folder: Path) -> list[list[int]]:
    """Save a random model, and a tokenizer with one word per token id; return prompts of token ids."""
    runtime = permuting_runtime(shape, device)
    scale_inner(runtime, SCALE)
    model: Any = runtime.hf_model
    model.save_pretrained(folder)
    word_tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(shape.vocab)}, unk_token="w0"))
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=word_tokenizer, unk_token="w0").save_pretrained(folder)
    return [prompt_of(runtime, number) for number in range(N_PROMPTS)]


def left_out(report: Mapping[str, Any]) -> str:
    """Return a line that names the rows without a result, with their reasons."""
    rows = [f"{result['row']} ({result['reason']})" for result in report["results"] if result["tok_s"] is None]
    return f"left out: {'; '.join(rows) or 'nothing'}"


def measure(shape: str, device_option: str, row_names: Sequence[str], n_new: int) -> dict[str, Any]:
    """Return the report of `bench peers`.

    Raises: SwiftoptError: the device does not exist. KeyboardInterrupt: before all rows have answered a prompt.
    """
    with tempfile.TemporaryDirectory(prefix="swiftopt-peers-") as temporary:
        folder = Path(temporary)
        prompts = save_random(SHAPES[shape], device_option, folder)
        if device_option != "cpu":
            torch.cuda.empty_cache()
        device = chosen_device(device_option, folder, "auto")
        peer_options: dict[str, Any] = {
            "timeout_s": TIMEOUT_S,
            "speed": "auto",
            "db": f"{temporary}/plans.db",
            "device": device,
        }
        request = TurnsRequest(f"random {shape}", folder, **peer_options)
        questions = [Question(str(i), "random", tuple(prompt), n_new) for i, prompt in enumerate(prompts)]
        bench = Turns(request, questions, chosen_rows(row_names, all_rows()), note)
        bench.run()
        machine = device_name(torch.device(device))
        return report_of(request, bench.runs, bench.questions, machine, "swiftopt/plain", bench.interrupted)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if a row of swiftopt or transformers, which are always installed, has no result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peers", default=",".join(ROWS))
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="tokens per completion")
    args = parser.parse_args(argv)
    # Shells let background jobs ignore SIGINT, but it must end the measurement.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    reason, report = obstacle(SHAPES[args.shape], args.device), dict[str, Any]()
    if reason is None:
        try:
            report = measure(args.shape, args.device, args.peers.split(","), args.tokens)
            for view in peers_view(report):
                show(view)
            print(left_out(report))
        except SwiftoptError as error:
            reason = str(error)
        except KeyboardInterrupt:
            reason = "it was interrupted before every engine had answered a prompt"
    if reason is not None:
        print(f"nothing was measured: {reason}", file=sys.stderr)
        report = {"skipped": reason}
    print(json.dumps(report))
    installed_rows = [
        result for result in report.get("results", ()) if result["row"].startswith(("swiftopt/", "transformers/"))
    ]
    return int(any(result["tok_s"] is None for result in installed_rows))


if __name__ == "__main__":
    measured(main)
