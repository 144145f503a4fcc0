"""Makes the tables of bench/RESULTS.md and README.md, and the manual's charts, from the files in bench/results.

    python -m swiftopt.bench.tables            print the tables of RESULTS.md
    python -m swiftopt.bench.tables --write    write the tables into their pages, and draw the charts
    python -m swiftopt.bench.tables --check    name the pages and charts that differ from the result files

A result file is an object {"date", "commit", "command", "note", "report"}; `report` is what `command` printed:
`swiftopt compare --json`, `swiftopt bench … --json`, another benchmark, or a step of `make gpu`. RESULTS.md has every
row of every file, with a table for each kind of report. README has the rows that a file of `bench peers` names as its
`"headline"`; the newest of these, and the newest files of `bench serve` and `bench agents`, are charts as well. A chart
is an SVG file that contains a digest of its data: releases of matplotlib write different files for the same data.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import InvalidInput, SwiftoptError
from ..core.requests import EARLIER_NAMES
from ..engines.peers import SCHEMA as PEERS_SCHEMA
from ..engines.peers import equal_to
from ..engines.same_file import SCHEMA as SAME_FILE_SCHEMA
from ..tasks.report import SCHEMA as COMPARE_SCHEMA
from ..terminal.charts import Pictures, Report, draw_ratios
from ..terminal.render import interval, number
from .agents import SCHEMA as AGENTS_SCHEMA
from .charts import draw_agents, draw_serving
from .decode import SCHEMA
from .gpu import SCHEMA as GPU_SCHEMA
from .parity import SCHEMA as PARITY_SCHEMA
from .search import SCHEMA as SEARCH_SCHEMA
from .serving import SCHEMA as SERVE_SCHEMA
from .stream_shift import SCHEMA as SHIFT_SCHEMA
from .throughput import SCHEMA as THROUGHPUT_SCHEMA
from .tunings import SCHEMA as TUNE_SCHEMA

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "bench" / "RESULTS.md"
README = ROOT / "README.md"
SERVING_CHART, AGENTS_CHART, RIVALS_CHART = (ROOT / "docs" / f"{name}.svg" for name in ("served", "agents", "rivals"))
BEGIN, END = "<!-- results -->", "<!-- /results -->"
KEYS = ("date", "commit", "command", "note", "report")
BASE = "1 (base)"
NO_RESULTS = "No measurement is published yet."


def table(folder: Path = RESULTS) -> str:
    """Return all results as markdown tables, each with the commands that reproduce its files.

    Raises: InvalidInput: a file is not a result.
    """
    results = _results(folder)
    sections = []
    for kind in dict.fromkeys(KINDS.values()):
        of_kind = [(path, result) for path, result in results if KINDS[result["report"]["schema"]] is kind]
        if of_kind:
            title = [f"**{kind.title}**", ""] if kind.title else []
            rows = (
                (*row, _where(result["report"]), _link(path, result, PAGE))
                for path, result in of_kind
                for row in kind.rows({**result["report"], "command": result["command"]})
            )
            lines = _markdown((*kind.header, "device" if kind is PEERS_TABLE else "device, dtype", "file"), rows)
            sections.append("\n".join([*title, *lines, "", *(_origin(path, result) for path, result in of_kind)]))
    return "\n\n".join(sections) or NO_RESULTS


def short_table(folder: Path = RESULTS) -> str:
    """Return README's tables: the headline rows of `bench peers`, each table below a line that says what was run.

    Raises: InvalidInput: a file is not a result.
    """
    sections = []
    for path, result in _results(folder):
        if headline := result.get("headline"):
            rows = (cells[1:] for cells in _peer_rows(result["report"]) if cells[1] in headline)
            sections.append(f"{_text(result['report'])}, {_where(result['report'])} ({_link(path, result, README)}):")
            sections.append("\n".join(_markdown(("", *PEERS_TABLE.header[2:]), rows)))
    return "\n\n".join(sections) or NO_RESULTS


@dataclass(frozen=True)
class ManualChart:
    """A chart in README or the manual: its file, the function that draws it, and the report."""

    path: Path
    draw: Callable[[Report, Pictures], None]
    report: Report

    @property
    def origin(self) -> str:
        """The report's digest, which the file contains."""
        return f"sha256 of the report: {hashlib.sha256(json.dumps(self.report, sort_keys=True).encode()).hexdigest()}"

    @property
    def is_current(self) -> bool:
        """Whether the file was drawn from this report."""
        return self.path.is_file() and self.origin in self.path.read_text(encoding="utf-8")

    def write(self) -> None:
        """Draw the file.

        Raises: OutputError: the file cannot be written.
        """
        pictures = Pictures(svg=self.path, origin=self.origin)
        self.draw(self.report, pictures)
        pictures.raise_failed()


def charts(folder: Path = RESULTS) -> list[ManualChart]:
    """Return the charts: the newest results of `bench serve` and `bench agents`, and the newest headline.

    Raises: InvalidInput: a file is not a result.
    """
    manual_charts = []
    results = sorted(
        _results(folder), key=lambda path_and_result: (path_and_result[1]["date"], path_and_result[0].name)
    )
    for path, draw, schema in (
        (SERVING_CHART, draw_serving, SERVE_SCHEMA),
        (AGENTS_CHART, draw_agents, AGENTS_SCHEMA),
    ):
        if reports := [result["report"] for _, result in results if result["report"]["schema"] == schema]:
            manual_charts.append(ManualChart(path, draw, reports[-1]))
    if headlines := [result for _, result in results if "headline" in result]:
        report = headlines[-1]["report"]
        rows = [row for row in report["results"] if row["row"] in headlines[-1]["headline"]]
        manual_charts.append(ManualChart(RIVALS_CHART, draw_ratios, {**report, "results": rows}))
    return manual_charts


def out_of_date() -> list[Path]:
    """Return the pages and charts that do not match the result files.

    Raises: InvalidInput: a file is not a result, or a page lacks its markers.
    """
    texts = ((page, page.read_text(encoding="utf-8"), body) for page, body in _pages())
    pages = [page for page, text, body in texts if refresh(text, body) != text]
    return [*pages, *(chart.path for chart in charts() if not chart.is_current)]


def _pages() -> list[tuple[Path, str]]:
    return [(PAGE, table()), (README, short_table())]


def _results(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    results = [(path, _read(path)) for path in sorted(folder.glob("*.json"))]
    return sorted(
        results,
        key=lambda path_and_result: [path_and_result[1]["report"].get(key, "") for key in ("model", "device", "dtype")],
    )


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [header, ("---",) * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]


def _link(path: Path, result: dict[str, Any], page: Path) -> str:
    """Return a link from a page to a result file."""
    folder = RESULTS.relative_to(page.parent).as_posix()
    return f"[{result['commit']}]({folder}/{path.name})"


def refresh(text: str, body: str) -> str:
    """Return `text` with `body` inserted between its marker comments.

    Raises: InvalidInput: the markers are missing, repeated or out of order.
    """
    head, begin_mark, after_begin = text.partition(BEGIN)
    _, end_mark, tail = after_begin.partition(END)
    if not begin_mark or not end_mark or BEGIN in after_begin or END in head + tail:
        raise InvalidInput(f"the page must contain {BEGIN} and, after it, {END}, once each: put them around the tables")
    return f"{head}{BEGIN}\n{body}\n{END}{tail}"


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{path} is not JSON ({error}): write the bench's object into it again") from error
    missing_keys = [key for key in KEYS if key not in result] if isinstance(result, dict) else list(KEYS)
    if missing_keys:
        raise InvalidInput(f"{path} is not a result: it lacks {missing_keys}")
    schema = result["report"].get("schema") if isinstance(result["report"], dict) else None
    if schema not in KINDS:
        raise InvalidInput(f"{path} has a report of schema {schema!r}: this version reads {', '.join(KINDS)}")
    return dict(result)


def _method_rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of `bench decode` and `compare`; of a method that did not run, only the file has the reason."""
    options = _options(report["command"])
    task = _text(report, options.task or Path(options.stream).stem)
    task += ", stop tokens ignored" if report.get("ignore_eos") else ""
    temperature = report.get("sampling", {}).get("temperature") or 0.0
    task += f", T = {temperature:g}" if temperature else ""
    task += f", the set of {Path(options.layer_set).name}" if options.layer_set else ""
    for row in report["results"]:
        name = EARLIER_NAMES.get(row["method"], row["method"])
        name += " (lossy)" if row.get("lossy") else ", searching" if row.get("optimise_seconds") else ""
        settings = [setting.removeprefix(f"{name}.") for setting in options.set if setting.startswith(f"{name}.")]
        figures: tuple[str, ...] = ("not run", "–", "–", "–", "–")
        if row["ratio"] is not None:
            figures = (
                number(row["tok_s"], 1),
                _ratio(row, row["method"] == report["base"]),
                number(row["acceptance_rate"]),
                number(row["mean_generated_length"]),
                _identical(row),
            )
        yield (report["model"], task, ", ".join((name, *settings)), *figures)


def _identical(row: dict[str, Any]) -> str:
    n_prompts = row["prompts"] if "prompts" in row else row["of"]
    return "–" if row["identical"] is None else f"{row['identical']}/{n_prompts}"


def _peer_rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of `bench peers`, fastest first, those without a result last."""
    for row in sorted(report["results"], key=lambda row: -(row["tok_s"] or 0)):
        figures: tuple[str, ...] = ("–", "–", "–", "–", f"not run: {row.get('reason')}")
        if row["tok_s"] is not None:
            decoding, memory = row["decode_tok_s"], row["peak_bytes"]
            figures = (
                number(row["tok_s"], 1),
                number(decoding, 1),
                _ratio(row, row["row"] == report["base"]),
                number(memory and memory / 1e9, 1, " GB"),
                equal_to(row),
            )
        yield (_text(report), row["row"], *figures)


def _same_file_rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of `bench peers --gguf FILE` by depth and requests at once, fastest first."""
    starts = {start["row"]: start["warm_s"] for start in report["starts"]}
    text = f"{Path(report['file']).name}, {report['bytes'] / 1e9:.2f} GB, {report['max_new_tokens']} tokens"
    for row in sorted(report["results"], key=lambda row: (row["depth"], row["at_once"], -(row["tok_s"] or 0))):
        speeds = (number(row[name], digits) for name, digits in (("tok_s", 1), ("decode_tok_s", 1), ("ratio", 2)))
        times = number(row["first_token_s"], 2), number(starts.get(row["row"]), 1)
        yield (
            text,
            f"{row['depth']:,}",
            str(row["at_once"]),
            row["row"],
            *speeds,
            *times,
            f"{row['peak_bytes'] / 1e9:.2f}",
        )


def _search_rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in report["results"]:
        yield (
            report["model"],
            f"{report['windows']} of {report['window']} tokens",
            row["strategy"],
            f"{row['final']:.3f}x",
            number(row.get("of_long")),
            str(row["n_skipped"]),
            f"{row['passes']:.0f}",
            *("not reached" if goal is None else f"{goal['passes']:.0f}" for goal in (row["to_goal"], row["to_base"])),
        )


def _shift_rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in report["results"]:
        rates = (number(row[run]["settled"]) for run in ("own", "kept", "adapted"))
        gap_cell = "–" if row["gap"] is None else f"{row['gap']:+.3f}"
        # Files of earlier versions lack this figure.
        speeds = (number(row[run].get("expected")) for run in ("own", "adapted"))
        yield (report["model"], f"{report['method']}, {report['draft_format']}", row["task"], *rates, gap_cell, *speeds)


def _throughput_rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in sorted(report["results"], key=lambda row: int(row["concurrency"])):
        plain, drafting = row["plain"], row["drafting"]
        times = (mode["per_token_s"][p] for mode in (plain, drafting) for p in ("p50", "p95"))
        per_token = (number(seconds and 1000 * seconds, 0) for seconds in times)
        speeds = f"{plain['tok_s']:.1f}", f"{drafting['tok_s']:.1f}", f"{row['ratio']:.2f}x"
        yield (_text(report), str(row["concurrency"]), *speeds, *per_token, f"{row['equal']}/{row['compared']}")


def _tuning_rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for variant, figures in report["ways"].items():
        seconds = [run["search_s"] for run in report["results"] if run["way"] == variant]
        text = f"{report['model']}, tuned on {report['prompts']} prompts, timed on {report['unseen']}"
        speeds = (f"{ratio:.2f}x" for ratio in (figures["ratio"], *figures["ratios"]))
        share_cells = (f"{figures['to_best'][name]:.3f}" for name in ("mean", "worst"))
        yield (text, variant, str(len(seconds)), *speeds, *share_cells, f"{sum(seconds) / len(seconds):.0f}")


def _serving_rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    text = f"{report['model']}, {report['prompts']} requests, {report['max_new_tokens']} tokens"
    runs, (task, *_) = report["results"], report["tuning"]["tasks"]
    speeds = (sum(run["tokens"] for run in runs) / sum(run[key] for run in runs) for key in ("plain_s", "served_s"))
    search = f"{task['search']['trials']} trials, {task['search']['seconds']:.1f} s"
    equal, ratios = f"{report['equal']}/{report['prompts']}", " ".join(f"{ratio:.2f}" for ratio in report["windows"])
    yield (text, str(report["concurrency"]), *(f"{speed:.1f}" for speed in speeds), ratios, search, equal)


def _agent_rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    text = f"{Path(report['model']).name}, {report['turns']} turns, {report['max_new_tokens']} tokens"
    for row in report["summary"]:
        times = (number(row[key], 1) for key in ("whole_s", "later_s"))
        ratios = (number(row[key], unit="x") for key in ("whole_ratio", "later_ratio"))
        firsts = (number(row[key], 2) for key in ("first_token_s", "later_first_token_s"))
        shares = f"{row['cached']:.0%}", f"{row['repeated'] or 0:.0%}", f"{row['peak_bytes'] / 1e9:.2f}"
        yield (text, f"{row['length']:,}", row["way"], *times, *ratios, *firsts, *shares)


def _gpu_rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    plain, passes, draft = report["plain"], report["pass_ms"], report["draft"]
    verify, loads = passes["verify"], report["load"]
    drafts = [
        ("left out", passes["draft"], draft),
        *((name, figures.get("pass_ms"), figures) for name, figures in report["formats"].items()),
    ]
    yield (
        report["shape"],
        report["speed"],
        f"{plain['tokens_per_s']:.1f}, {plain['share']:.0%}",
        " / ".join(f"{verify[rows]:.2f}" for rows in ("1", "4", "16")),
        "; ".join(f"{name}: {ms:.2f} ms, {figures['ratio']:.2f}x" for name, ms, figures in drafts if ms is not None),
        ", ".join(f"{n}: {figures['plain_tokens_per_s']:.0f}, {figures['ratio']:.2f}x" for n, figures in loads.items()),
    )


@dataclass(frozen=True)
class Kind:
    """A kind of report, which has its own table; the device and the file are added as last columns."""

    title: str
    columns: str
    rows: Callable[[dict[str, Any]], Iterator[tuple[str, ...]]]

    @property
    def header(self) -> list[str]:
        return self.columns.split(" | ")


METHODS_TABLE = Kind("", "model | task | method | tok/s | ratio [95 %] | α | M | identical", _method_rows)
PEERS_TABLE = Kind(
    "swiftopt and other engines, alternately: the same token ids, greedy decoding",
    "model, text | row | tok/s | decoding alone | ratio [95 %] | memory | tokens equal to",
    _peer_rows,
)


def _parity_rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    options = _options(report["command"])
    for drafts, identical in report["identical"].items():
        reference_words = "our own plain decoding" if report["against"] == "plain" else "transformers' generate"
        yield _text(report, Path(options.stream).stem), drafts, reference_words, f"{identical}/{report['prompts']}"


KINDS = {
    PEERS_SCHEMA: PEERS_TABLE,
    SAME_FILE_SCHEMA: Kind(
        "One GGUF file in several engines, by depth of the prompt and number of requests at once",
        "file | depth | at once | row | tok/s | decoding alone | ratio | first token, s | start, s | memory, GB",
        _same_file_rows,
    ),
    SCHEMA: METHODS_TABLE,
    COMPARE_SCHEMA: METHODS_TABLE,
    SEARCH_SCHEMA: Kind(
        "Searches: passes until 95 % of the best objective, and until 95 % of SWIFT's",
        "model | windows | strategy | objective | of a long search's | left out | passes | to 95 % of the best"
        " | to 95 % of swift's",
        _search_rows,
    ),
    TUNE_SCHEMA: Kind(
        "Ways of tuning: the plans that they find, timed on unseen prompts",
        "model, text | way | runs | to plain, mean | lowest | highest | of the best plan, mean | worst | search s",
        _tuning_rows,
    ),
    PARITY_SCHEMA: Kind(
        "Parity: prompts whose tokens with drafting all equal those of greedy decoding",
        "model, text | drafts | equal to | prompts",
        _parity_rows,
    ),
    SERVE_SCHEMA: Kind(
        "A server that learns from an empty database, over HTTP: plain seconds ÷ served seconds of each ten requests",
        "model, text | at once | plain tok/s | served | of each ten | search | equal",
        _serving_rows,
    ),
    AGENTS_SCHEMA: Kind(
        "Recorded conversations of coding agents, each turn answered again; ratio: seconds of llama.cpp's faster way ÷"
        " the row's",
        "model | tokens | way | all, s | later turns, s | ratio | later | first token, s | later, s | cached | repeated"
        " | memory, GB",
        _agent_rows,
    ),
    THROUGHPUT_SCHEMA: Kind(
        "Several requests at once: drafting against plain batching",
        "model, text | at once | plain tok/s | drafting tok/s | ratio | plain ms/token p50 | p95 | drafting p50 | p95"
        " | equal",
        _throughput_rows,
    ),
    GPU_SCHEMA: Kind(
        "Random models with the shapes of real ones, on a GPU",
        "model | speed | plain tok/s, of what bandwidth allows | pass over 1 / 4 / 16 rows, ms | drafts: pass, ratio"
        " | at once: plain tok/s, ratio",
        _gpu_rows,
    ),
    SHIFT_SCHEMA: Kind(
        "Streams that change: acceptance after the first ten prompts of each task",
        "model | drafts | task | α own set | α first task's | α one stream | missing | expected, own set"
        " | expected, one stream",
        _shift_rows,
    ),
}


def _where(report: dict[str, Any]) -> str:
    return ", ".join(report[key] for key in ("device", "dtype") if key in report)


def _text(report: dict[str, Any], name: str | None = None) -> str:
    return f"{name or report['model']}, {report['prompts']} prompts, {report['max_new_tokens']} tokens"


def _ratio(row: dict[str, Any], is_base: bool) -> str:
    bounds = row["ratio_interval"] or (row["ratio"], row["ratio"])
    return BASE if is_base else f"{number(row['ratio'], unit='x')} [{interval(bounds)}]"


def _origin(path: Path, result: dict[str, Any]) -> str:
    note = f" {result['note']}" if result["note"] else ""
    return f"- {path.stem}: commit {result['commit']}, {result['date']}, `{result['command']}`.{note}"


def _options(command: str) -> argparse.Namespace:
    """Return those options of a command that the tables show."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--task")
    parser.add_argument("--stream", default="")
    parser.add_argument("--layer-set")
    parser.add_argument("--set", action="append", default=[])
    return parser.parse_known_args(shlex.split(command))[0]


def main(args: Sequence[str] | None = None) -> int:
    """Print the tables, or write or check the pages and charts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="write RESULTS.md and README.md, and draw the charts")
    action.add_argument("--check", action="store_true", help="exit with 1 if a page or chart is out of date")
    parsed = parser.parse_args(args)
    try:
        if parsed.check:
            for path in (outdated := out_of_date()):
                print(f"error: {path} is out of date: run python -m swiftopt.bench.tables --write", file=sys.stderr)
            return 1 if outdated else 0
        if not parsed.write:
            print(table())
            return 0
        for page, body in _pages():
            page.write_text(refresh(page.read_text(encoding="utf-8"), body), encoding="utf-8")
        for chart in charts():
            if not chart.is_current:
                chart.write()
    except SwiftoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
