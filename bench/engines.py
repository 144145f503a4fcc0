"""Checks exported plans in their engines: `python -m swiftopt.bench.engines`, which `make engines` runs.

Tunes a layer set on every other prompt of a stream and exports it to every engine that runs here. Each engine decodes
the other prompts alternately with plain decoding, with its own n-gram drafts, and with the export. As a reference for
the engines' acceptance, swiftopt decodes them with the exported checkpoint as a draft model. One engine runs at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..core.settings import EXPORT_SUMMARY
from ..core.streams import read_stream
from ..engines.packages import PACKAGES, RUNNABLE, Row
from ..engines.peers import all_rows, exported_rows, report_of
from ..engines.turns import Turns, TurnsRequest, questions_of
from ..models.costs import device_name
from ..models.sources import local_folder, resolve
from ..terminal.output import note, show
from ..terminal.render import folding, number, numeric, table
from .turn import measured, started

TASK = "engines"  # Task of all lines, so that one layer set is tuned for all of them.
TUNED_TOKENS = "64"  # Value of --max-new-tokens for tuning.
REFERENCE = "transformers"  # swiftopt can also load the draft checkpoint that is exported for this engine.
TRANSFORMERS_CONFIDENCE = 0.4  # transformers' default assistant_confidence_threshold.


@dataclass(frozen=True, slots=True)
class EngineChecks:
    """Results of an engine; `own`: swiftopt's result with the same draft checkpoint and stopping rule."""

    engine: str
    plain: Mapping[str, Any]
    ngram: Mapping[str, Any]
    exported: Mapping[str, Any]
    own: Mapping[str, Any]

    @property
    def failed(self) -> bool:
        """Whether the engine runs on this machine and fails with its export."""
        return self.plain["reason"] is None and self.exported["reason"] is not None

    @property
    def report(self) -> dict[str, Any]:
        rows = {"plain": self.plain, "ngram": self.ngram, "exported": self.exported, "swiftopt": self.own}
        return {"engine": self.engine, **rows}

    @property
    def cells(self) -> tuple[str, ...]:
        own_acceptance, engine_acceptance = self.own.get("acceptance"), self.exported.get("acceptance")
        if self.exported["reason"] is not None:
            return (self.engine, *"–––––", f"not run: {self.exported['reason']}")
        counts = "–" if engine_acceptance is None else f"{self.exported['accepted']} / {self.exported['drafted']}"
        return (
            self.engine,
            counts,
            number(engine_acceptance, 3),
            number(own_acceptance, 3),
            number(engine_acceptance / own_acceptance if engine_acceptance is not None and own_acceptance else None, 3),
            number(self.ngram.get("acceptance"), 3),
            f"{self.exported['identical']} of {self.exported['of']}",
        )


def swiftopt(arguments: Sequence[str]) -> int:
    """Run a command line of `swiftopt` and return its exit code."""
    return started([sys.executable, "-m", "swiftopt", *arguments]).wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks; return 1 if an engine that runs here fails with its export."""
    args = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="swiftopt-engines-") as temporary:
        work_folder = Path(temporary)
        tuned_stream, held_out = _split_stream(Path(args.stream), args.limit, work_folder)
        db = str(work_folder / "plans.db")
        common = ("--model", args.model, "--db", db)
        drafting = ("--task", TASK, "--method", "swift", "--draft-format", "stored", "--max-new-tokens", TUNED_TOKENS)
        files = ("--stream", str(tuned_stream), "--out", str(work_folder / "out.jsonl"))
        tune = ["tune", *common, *drafting, *files]
        import_arguments = ["layers", "import", str(args.layer_set), *common, "--task", TASK]
        if code := swiftopt(import_arguments if args.layer_set else tune):
            return code
        folders = {}
        for engine in dict.fromkeys((REFERENCE, *args.engines.split(","))):
            folders[engine] = work_folder / engine
            export = ["export", f"{args.model}/{TASK}", "--to", engine, "--out", str(folders[engine])]
            if code := swiftopt([*export, "--db", db]):
                return code
        checks = _measure(args, folders, held_out)
    headings = ("accepted / drafted", "acceptance", "swiftopt's", "÷ swiftopt's", "own n-grams")
    title = f"{args.model}: exported drafts in their engines"
    columns = [folding("engine"), *map(numeric, headings), folding("equal to its own plain")]
    show(table(columns, [check.cells for check in checks], title=title, title_justify="left"))
    return int(any(check.failed for check in checks))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make engines", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--stream", default="examples/stream.jsonl")
    parser.add_argument("--layer-set", type=Path, help="file of a layer set to use instead of tuning one")
    parser.add_argument("--limit", type=int, default=None, help="take only the first prompts of the stream")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int, help="tokens of every draft instead of the exported settings")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--engines", default=",".join(RUNNABLE))
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser


def _split_stream(stream: Path, limit: int | None, work_folder: Path) -> tuple[Path, Path]:
    """Split the stream into two files of one task: its first, third, … lines for tuning, the others for measuring."""
    lines = [json.loads(line) for line in stream.read_text(encoding="utf-8").splitlines() if line.strip()][:limit]
    paths = (work_folder / "tuned.jsonl", work_folder / "held-out.jsonl")
    for first_line, path in enumerate(paths):
        task_lines = [json.dumps({**line, "task": TASK}) + "\n" for line in lines[first_line::2]]
        path.write_text("".join(task_lines), encoding="utf-8")
    return paths


def _measure(args: argparse.Namespace, folders: Mapping[str, Path], stream: Path) -> list[EngineChecks]:
    """Measure one engine after the other, and before an engine swiftopt with its draft length and stopping rule."""
    folder = local_folder(resolve(args.model), note)
    questions = questions_of(folder, read_stream(str(stream)), args.max_new_tokens)
    common = TurnsRequest(args.model, folder, args.dtype, args.threads)

    def run(*rows: Row) -> list[dict[str, Any]]:
        turns = Turns(common, questions, rows, note)
        turns.run()
        machine = device_name(torch.device("cpu"))
        results: list[dict[str, Any]] = report_of(common, turns.runs, turns.questions, machine, rows[0].name)["results"]
        return results

    rows_by_name = {row.name: row for row in all_rows()}
    baselines: dict[tuple[int, float], dict[str, Any]] = {}
    checks = []
    for engine in args.engines.split(","):
        exported = folders[engine]
        row = exported_rows([exported])[0]  # transformers may have a second row, `shared`.
        about = json.loads((exported / EXPORT_SUMMARY).read_text(encoding="utf-8"))
        rule = (args.draft_tokens or about["draft_tokens"], 0.0)
        if args.draft_tokens and row.draft is not None:
            row = replace(row, options={"draft_tokens": args.draft_tokens})
        elif engine == REFERENCE:
            rule = (rule[0], about["settings"].get("assistant_confidence_threshold", TRANSFORMERS_CONFIDENCE))
        if row.draft is not None and rule not in baselines:
            checkpoint = folders[REFERENCE] / "draft"
            options = {"draft_tokens": rule[0], "min_confidence": rule[1]}
            name = f"draft-{rule[0]}" + (f"-{rule[1]:g}" if rule[1] else "")
            (baselines[rule],) = run(Row(PACKAGES["swiftopt"], name, "folder", options, checkpoint))
        package = row.engine.name
        plain_result, ngram_result, exported_result = run(
            rows_by_name[f"{package}/plain"], rows_by_name[f"{package}/ngram"], row
        )
        checks.append(EngineChecks(engine, plain_result, ngram_result, exported_result, baselines.get(rule, {})))
        # Write after every engine, so that an interrupted run keeps the finished ones.
        if args.json:
            args.json.write_text(json.dumps([check.report for check in checks], indent=1) + "\n", encoding="utf-8")
    return checks


if __name__ == "__main__":
    measured(main)
