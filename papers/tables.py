"""The papers' tables and figures, repeated on one machine: one command each, and a page of our numbers next to theirs.

    python -m swiftopt.papers.tables --model MODEL --stream FILE [--only swift] [--limit 6]   runs and stores results
    python -m swiftopt.papers.tables --write                                                  writes the page from them

Results are stored in bench/results/papers, one file per entry, in the form of the files in bench/results
(`bench/tables.py`).
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.micro import RANK_SCHEMA
from ..bench.stream_shift import RUNS as SHIFT_RUNS
from ..bench.stream_shift import SCHEMA as SHIFT_SCHEMA
from ..bench.tables import RESULTS, ROOT, refresh
from ..core.errors import SwiftoptError
from ..core.types import now
from .ablations import SCHEMA as ABLATION_SCHEMA

FOLDER = RESULTS / "papers"
PAGE = ROOT / "docs" / "papers.md"
GREEDY = "--max-new-tokens 96"
SHOWN_FIGURES = {  # Label in the page's table -> key of the figure in a report's row.
    "α": "acceptance_rate",
    "M": "mean_generated_length",
    "PPL": "perplexity",
    "early": "early_share",
    "rejected": "rejected_share",
    "quality": "quality",
}
ABLATE = "swiftopt.papers.ablate"
# Report fields that are not kept in results because they hold local file paths.
DROPPED_KEYS = ("out", "database", "job")


@dataclass(frozen=True, slots=True)
class Repeated:
    """A table or figure: `theirs`, the paper's own numbers, and the command that repeats it.

    `command` is a command line without model, stream and limit, which the caller adds; "": the ablation named `key`.
    `takes_limit` is False if the command reads the whole stream. `example` is the default stream; "": the command
    reads no stream. `module` is the Python module of the command (default: swiftopt, or the ablations). `first` is a
    command that makes parts for `command`, and runs before it on the stream's lines after the limit.
    """

    key: str
    paper: str
    where: str
    theirs: str
    command: str = ""
    takes_limit: bool = True
    example: str = "examples/stream.jsonl"
    module: str = ""
    first: str = ""

    @property
    def program(self) -> str:
        """Name of the Python module that runs the command."""
        return self.module or ("swiftopt" if self.command else ABLATE)


SWIFT, ADADECODE, PARADECODE, MTAD, ADASPEED = "SWIFT", "AdaDecode", "ParaDecode", "MTAD", "AdaSPEED"
_CODE = "compare --preset swift --methods plain --template humaneval"
_PROBLEMS = "examples/problems.jsonl"  # Stream whose lines have HumanEval's fields.

PAPERS: tuple[Repeated, ...] = (
    Repeated(
        "swift-main",
        SWIFT,
        "Tables 2, 4, 5, 6",
        "Llama-2-13B, CNN/DM: Jacobi 0.95x (M 1.04), Lookahead 1.16x (1.38), SWIFT 1.37x (4.34, α 0.99)",
        f"compare --preset swift --methods jacobi,lookahead {GREEDY}",
    ),
    Repeated(
        "swift-code",
        SWIFT,
        "Tables 3, 7 (pass@1, greedy)",
        "CodeLlama-13B: 1.40x, M 4.75, α 0.98, pass@1 0.311 as plain decoding",
        f"{_CODE} {GREEDY}",
        example=_PROBLEMS,
    ),
    Repeated(
        "swift-pass10",
        SWIFT,
        "Tables 3, 7 (pass@10, temperature 0.6)",
        "CodeLlama-13B: 1.29x, M 3.55, α 0.93, pass@10 0.628 as plain decoding",
        f"{_CODE} --temperature 0.6 --top-p 0.95 --samples 10 {GREEDY}",
        example=_PROBLEMS,
    ),
    Repeated(
        "swift-parts",
        SWIFT,
        "Table 8",
        "1.560x (M 5.82, α 0.98); w/o early stopping 0.896x, dynamic verification 1.342x, optimisation 1.224x",
    ),
    Repeated("swift-window", SWIFT, "Table 9", "γ 16: 1.341x, 32: 1.560x, 64: 1.552x, 128: 1.550x"),
    Repeated(
        "swift-self-sd",
        SWIFT,
        "Tables 10, 12; Figure 11",
        "Self-SD 1.29x, w/ dynamic verification 1.52x, SWIFT 1.56x; after a like search time 0.97x, 1.17x, 1.56x",
    ),
    Repeated("swift-schedule", SWIFT, "Figure 8 (a)", "a figure: more steps are faster"),
    Repeated("swift-ratio", SWIFT, "Figure 8 (b)", "a figure"),
    Repeated(
        "swift-shift",
        SWIFT,
        "Figure 7",
        "SWIFT keeps its speed where the task changes, Self-SD loses it",
        "--prompts 4 --max-new-tokens 64 --method swift --draft-format stored",
        takes_limit=False,
        module="swiftopt.bench.stream_shift",
    ),
    Repeated(
        "swift-search",
        SWIFT,
        "Figures 2, 6, 10, 12",
        "matchness rises with the steps; skipped sub-layers differ by task",
        f"tune --preset swift {GREEDY}",
    ),
    Repeated(
        "adadecode-main",
        ADADECODE,
        "Table 2, Figure 4",
        "Llama-3.1-8B: XSum 1.14x, HumanEval 1.51x, GSM8K 1.48x",
        f"tune --preset adadecode {GREEDY}",
    ),
    Repeated(
        "adadecode-parts",
        ADADECODE,
        "Table 3",
        "1.51x; w/o verification 1.64x, one layer 1.37x, original head 0.84x, full heads 1.49x",
        first="heads train --task mixed --minutes 0.5",
    ),
    Repeated("adadecode-threshold", ADADECODE, "Figure 5", "a figure; 6 % rejected at γ 0.85"),
    Repeated(
        "adadecode-rank",
        ADADECODE,
        "Table 4",
        "a head's smallest singular value: Llama-3.1-8B 1.45, CodeLlama-13B 1.10, CodeLlama-34B 0.84; all of full rank",
        "head-rank",
        takes_limit=False,
        example="",
        module="swiftopt.bench.micro",
    ),
    Repeated(
        "adadecode-drafter",
        ADADECODE,
        "Figure 6 (a, b)",
        "a figure: n 14 at threshold 0.3 0.944x with a large drafter, others more",
        f"spd-settings {GREEDY}",
        module=ABLATE,
    ),
    Repeated(
        "adadecode-self-sd",
        ADADECODE,
        "Figure 6 (c)",
        "a figure: more steps of Self-SD's search are not always better",
        f"self-sd-steps {GREEDY}",
        module=ABLATE,
    ),
    Repeated(
        "adadecode-trees",
        ADADECODE,
        "appendix E",
        "no numbers: trees beat AdaDecode alone; trees of earlier layers, too, do not beat those of the last",
    ),
    Repeated("paradecode-parts", PARADECODE, "Table 3", "1.312x; w/o verification 1.605x, w/o training 0.863x"),
    Repeated("paradecode-threshold", PARADECODE, "Figure 6", "a figure: γ = 0 needs no search"),
    Repeated(
        "mtad-main",
        MTAD,
        "Tables 4, 5, 7, 8, 9",
        "Llama-2, tok/s and perplexity: SpD 36.8, 3.64; BiLD 34.4, 3.15; SpecTr 45.1, 3.64; MTAD 63.0, 2.06",
        "compare --methods mtad,mtjd,spd,spectr,specinfer,mcss,bild,typical"
        f" --temperature 1.0 --top-k 10 --top-p 0.9 {GREEDY}",
    ),
    Repeated(
        "mtad-threshold",
        MTAD,
        "Table 10, Figure 3",
        "tokens per iteration: τ 0.1 4.72, 0.3 4.43, 0.5 4.12, 0.7 3.93, 0.9 3.64",
    ),
    Repeated("mtad-beams", MTAD, "Table 11", "2 beams 55.9 tok/s, perplexity 2.44; 4: 59.9, 2.12; 8: 61.3, 2.10"),
    Repeated(
        "mtad-warp",
        MTAD,
        "Table 12",
        "k 20, p 0.9: multinomial 3.74, SpD 3.64, MTAD 2.06; k 10, p 0.8: 2.56, 2.53, 1.80",
    ),
    Repeated(
        "adaspeed-main",
        ADASPEED,
        "Table I",
        "1B, greedy: LayerSkip 1.00, Draft & Verify 1.10, AdaSPEED 1.16, with a probe 1.10; top-p: 1.00, 1.35, 1.42,"
        " 1.51; 7B, greedy: 1.00, 1.12, 1.18, 1.12; top-p: 1.00, 1.14, 1.21, 1.24",
        f"adaspeed {GREEDY}",
        module=ABLATE,
    ),
    Repeated("adaspeed-exit", ADASPEED, "III.A, the exit layer", "best exit: 4 of 16 for AdaSPEED, 6 for LayerSkip"),
)


def command_of(entry: Repeated, model: str, stream: str | None, limit: int | None) -> list[str]:
    """Return the arguments of the entry's program."""
    arguments = [*shlex.split(entry.command or f"{entry.key} {GREEDY}"), "--model", model]
    arguments += ["--stream", stream or entry.example] if entry.example else []
    return [*arguments, "--limit", str(limit)] if limit is not None and entry.takes_limit else arguments


def run(entry: Repeated, model: str, stream: str | None, limit: int | None, commit: str) -> bool:
    """Run an entry's command and save its result; return False if the command failed."""
    arguments = command_of(entry, model, stream, limit)
    shown_command = f"{'' if entry.program == 'swiftopt' else 'python -m '}{entry.program} {shlex.join(arguments)}"
    print(f"{entry.paper}, {entry.where}: {shown_command}", flush=True)
    folder = None if stream else ROOT  # The example streams' paths are relative to the repository root.
    if entry.first:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as training_stream:
            training_stream.writelines(training_lines(Path(stream) if stream else ROOT / entry.example, limit))
            training_stream.flush()
            first_command = [*shlex.split(entry.first), "--model", model, "--stream", training_stream.name]
            subprocess.run(
                [sys.executable, "-m", "swiftopt", *first_command], stdout=subprocess.DEVNULL, cwd=folder, check=True
            )
    command = [sys.executable, "-m", entry.program, *arguments, "--json"]
    process = subprocess.run(command, stdout=subprocess.PIPE, cwd=folder, check=False)
    if process.returncode:
        return False
    report = {key: value for key, value in json.loads(process.stdout).items() if key not in DROPPED_KEYS}
    result_file = {
        "date": now()[:10],
        "commit": commit,
        "command": shown_command,
        "note": entry.where,
        "report": report,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{entry.key}.json").write_text(json.dumps(result_file, indent=1) + "\n", encoding="utf-8")
    return True


def training_lines(stream: Path, limit: int | None) -> list[str]:
    """Return the stream's lines after the first `limit`, or all lines if there are no more."""
    lines = stream.read_text(encoding="utf-8").splitlines(keepends=True)
    return lines[limit:] or lines


def table(folder: Path = FOLDER) -> str:
    """Return all entries as a Markdown table, with our figures where a result exists."""
    lines = ["| paper | where | the paper | here | file |", "|---|---|---|---|---|"]
    for entry in PAPERS:
        path = folder / f"{entry.key}.json"
        our_figures, link = "not run", ""
        if path.is_file():
            result = json.loads(path.read_text(encoding="utf-8"))
            our_figures = "; ".join(figures(result["report"])) or "nothing ran"
            link = f"[{result['commit']}](../bench/results/papers/{entry.key}.json)"
        lines.append(f"| {entry.paper} | {entry.where} | {entry.theirs} | {our_figures} | {link} |")
    return "\n".join(lines)


def figures(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the figures of each row of a report in a few words."""
    if "tasks" in report:  # Only reports of `swiftopt tune` have this key.
        for task in report["tasks"]:
            layer_set, verdict = task["layer_set"], task["verdict"]
            ratio = f" {verdict['ratio']:.2f}x" if verdict["ratio"] else ""
            yield (
                f"{Path(report['model']).name}, {task['task']}: {task['n_trials']} sets in"
                f" {task['timings']['optimise']:.0f} s, matchness {layer_set['matchness']:.2f},"
                f" {verdict['word']}{ratio}"
            )
        return
    if report["schema"] == RANK_SCHEMA:
        yield (
            f"{Path(report['model']).name}: {report['vocab']} x {report['width']}, {report['rank']} singular values"
            f" above 0, the smallest {report['smallest']:.2f}"
        )
        return
    if report["schema"] == SHIFT_SCHEMA:
        for row in report["results"]:
            rates = ", ".join(f"{run} {row[run]['acceptance'] or 0:.2f}" for run in SHIFT_RUNS)
            yield f"{row['task']}: α {rates}"
        return
    label_key = "label" if report["schema"] == ABLATION_SCHEMA else "method"
    for row in report.get("rows", report.get("results", ())):
        if row["ratio"] is None:
            yield f"{row[label_key]}: not run"
            continue
        figure_words = [f"{name} {row[key]:.2f}" for name, key in SHOWN_FIGURES.items() if row.get(key) is not None]
        if row["prompts"] < row["of"]:
            figure_words.append(f"{row['prompts']} of {row['of']} prompts")
        yield f"{row[label_key]} {row['ratio']:.2f}x" + (f" ({', '.join(figure_words)})" if figure_words else "")


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--stream", help="prompts, one JSON object per line (default: each entry's example)")
    parser.add_argument("--limit", type=int, default=6, help="number of prompts (default: 6)")
    parser.add_argument("--only", default="", metavar="PREFIX", help="run only entries whose key starts with PREFIX")
    parser.add_argument("--write", action="store_true", help="run nothing; write docs/papers.md from the results")
    options = parser.parse_args(args)
    if options.write:
        PAGE.write_text(refresh(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
        return 0
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    commit = git.stdout.strip() or "unknown"
    entries = [entry for entry in PAPERS if entry.key.startswith(options.only)]
    failed_keys = [
        entry.key for entry in entries if not run(entry, options.model, options.stream, options.limit, commit)
    ]
    failures = f"; failed: {', '.join(failed_keys)}" if failed_keys else ""
    print(f"{len(entries) - len(failed_keys)} of {len(entries)} repeated{failures}")
    return 1 if failed_keys or not entries else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SwiftoptError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
