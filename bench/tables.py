"""The tables of results in bench/RESULTS.md and README.md, and README's charts, made of the files in bench/results.

    python -m swiftopt.bench.tables            prints the tables of RESULTS.md
    python -m swiftopt.bench.tables --write    puts the tables between the marks of their pages, and draws the charts
    python -m swiftopt.bench.tables --check    names the pages and charts that are not those of the files

A file holds one object: {"date", "commit", "command", "note", "report"}, where `report` is what `swiftopt compare
--json` or `swiftopt bench decode|peers|search|stream-shift --json` printed for `command`. Every row of every file is
shown, those that lose among them, in one table for methods, one for rivals, one for searches and one for streams that
change. The README has the rows that a file of rivals names as its `"headline"`, as a chart as well, and a chart of the
newest file of `swiftopt bench serve`; the others are a link away. A chart is an SVG file that holds a digest of its
data, for another matplotlib may draw the same data as other bytes.
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

from ..cli.charts import Pictures, Report, draw_peers, draw_serving
from ..core.errors import InvalidInput, SwiftoptError
from ..tasks.report import SCHEMA as COMPARE_SCHEMA
from .decode import SCHEMA, rows
from .peers import SCHEMA as PEERS_SCHEMA
from .peers import equal_to
from .search import SCHEMA as SEARCH_SCHEMA
from .serving import SCHEMA as SERVE_SCHEMA
from .stream_shift import SCHEMA as SHIFT_SCHEMA
from .throughput import SCHEMA as THROUGHPUT_SCHEMA

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "bench" / "RESULTS.md"
README = ROOT / "README.md"
SERVING_CHART, RIVALS_CHART = ROOT / "docs" / "served.svg", ROOT / "docs" / "rivals.svg"
BEGIN, END = "<!-- results -->", "<!-- /results -->"
KEYS = ("date", "commit", "command", "note", "report")
HEADER = ("model", "task", "method", "tok/s", "ratio [95 %]", "α", "M", "identical", "device, dtype")
PEERS_HEADER = ("model, text", "row", "tok/s", "decoding alone", "ratio [95 %]", "memory", "tokens equal to", "device")
BASE = "1 (base)"
NOTHING = "No measurement is published yet."


def table(folder: Path = RESULTS) -> str:
    """All results as markdown tables, and under each the command that makes each of its files again.

    Raises: InvalidInput: a file is no result.
    """
    results = _results(folder)
    parts = []
    for kind in dict.fromkeys(KINDS.values()):
        own = [(path, result) for path, result in results if KINDS[result["report"]["schema"]] is kind]
        if own:
            title = [f"**{kind.title}**", ""] if kind.title else []
            rows = ((*row, _link(path, result, PAGE)) for path, result in own for row in kind.rows(result))
            lines = _markdown((*kind.header, "file"), rows)
            parts.append("\n".join([*title, *lines, "", *(_origin(path, result) for path, result in own)]))
    return "\n\n".join(parts) or NOTHING


def short_table(folder: Path = RESULTS) -> str:
    """The headline's rows of rivals, and above each table what was run.

    Raises: InvalidInput: a file is no result.
    """
    parts = []
    for path, result in _results(folder):
        if named := result.get("headline"):
            found = {cells[1]: cells for cells in _peers(result) if cells[1] in named}
            _, _, *shown, _ = PEERS_HEADER
            first = next(iter(found.values()))
            parts.append(f"{first[0]}, {first[-1]} ({_link(path, result, README)}):")
            parts.append("\n".join(_markdown(("", *shown), (cells[1:-1] for cells in found.values()))))
    return "\n\n".join(parts) or NOTHING


@dataclass(frozen=True)
class ReadmeChart:
    """A picture of README: its file, what draws it, and of which report."""

    path: Path
    draw: Callable[[Report, Pictures], None]
    report: Report

    @property
    def origin(self) -> str:
        """What the picture's metadata say of its data."""
        return f"sha256 of the report: {hashlib.sha256(json.dumps(self.report, sort_keys=True).encode()).hexdigest()}"

    @property
    def is_current(self) -> bool:
        """Whether the file was drawn of this report."""
        return self.path.is_file() and self.origin in self.path.read_text(encoding="utf-8")

    def write(self) -> None:
        """Draw the file.

        Raises: OutputError: it cannot be written.
        """
        pictures = Pictures(svg=self.path, origin=self.origin)
        self.draw(self.report, pictures)
        pictures.raise_failed()


def charts(folder: Path = RESULTS) -> list[ReadmeChart]:
    """README's charts: the newest result of `bench serve`, and the headline's rows of rivals.

    Raises: InvalidInput: a file is no result.
    """
    found = []
    results = sorted(_results(folder), key=lambda item: (item[1]["date"], item[0].name))
    if served := [result["report"] for _, result in results if result["report"]["schema"] == SERVE_SCHEMA]:
        found.append(ReadmeChart(SERVING_CHART, draw_serving, served[-1]))
    for _, result in results:
        if named := result.get("headline"):
            report = result["report"]
            rows = [row for row in report["results"] if row["row"] in named]
            found.append(ReadmeChart(RIVALS_CHART, draw_peers, {**report, "results": rows}))
    return found


def out_of_date() -> list[Path]:
    """Return the pages and charts that are not those of the result files.

    Raises: InvalidInput: a file is no result, or a page lacks its marks.
    """
    texts = ((page, page.read_text(encoding="utf-8"), body) for page, body in _pages())
    pages = [page for page, text, body in texts if refreshed(text, body) != text]
    return [*pages, *(chart.path for chart in charts() if not chart.is_current)]


def _pages() -> list[tuple[Path, str]]:
    """Return each page and what goes between its marks."""
    return [(PAGE, table()), (README, short_table())]


def _results(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    results = [(path, _read(path)) for path in sorted(folder.glob("*.json"))]
    return sorted(results, key=lambda item: [item[1]["report"].get(key, "") for key in ("model", "device", "dtype")])


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [header, ("---",) * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]


def _link(path: Path, result: dict[str, Any], page: Path) -> str:
    """To a result file, from a page."""
    folder = RESULTS.relative_to(page.parent).as_posix()
    return f"[{result['commit']}]({folder}/{path.name})"


def refreshed(text: str, body: str) -> str:
    """`text` with `body` between the marks.

    Raises: InvalidInput: the marks are not there, once each and in order.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in head + tail:
        raise InvalidInput(f"the page must have {BEGIN} and, after it, {END}, once each: put them where the table goes")
    return f"{head}{BEGIN}\n{body}\n{END}{tail}"


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{path} is not JSON ({error}): write the bench's object into it again") from error
    missing = [key for key in KEYS if key not in result] if isinstance(result, dict) else list(KEYS)
    if missing:
        raise InvalidInput(f"{path} is no result: it lacks {missing}")
    schema = result["report"].get("schema") if isinstance(result["report"], dict) else None
    if schema not in KINDS:
        raise InvalidInput(f"{path} holds a report of schema {schema!r}: this version reads {', '.join(KINDS)}")
    return dict(result)


def _rows(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    report = result["report"]
    given = _options(result["command"])
    named = given.task or Path(given.stream).stem
    task = f"{named}, {report['prompts']} prompts, {report['max_new_tokens']} tokens"
    task += ", stop tokens ignored" if report.get("ignore_eos") else ""
    temperature = report.get("sampling", {}).get("temperature") or 0.0
    task += f", T = {temperature:g}" if temperature else ""
    task += f", the set of {Path(given.layer_set).name}" if given.layer_set else ""
    where = f"{report['device']}, {report['dtype']}"
    for row in _compared(report) if report["schema"] == COMPARE_SCHEMA else _decoded(report):
        own = f"{row[0]}."
        told = [each.removeprefix(own) for each in given.set if each.startswith(own)]
        yield (report["model"], task, ", ".join((row[0], *told)), *row[1:], where)


def _decoded(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of `bench decode`."""
    for row, own in zip(rows(report), report["results"], strict=True):
        method, tok_s, ratio, interval, acceptance, length, identical = row
        compared = BASE if method == report["base"] else f"{ratio} [{interval}]"
        named = f"{method}, searching" if own["optimise_seconds"] else method
        yield (named, tok_s, compared, acceptance, length, identical)


def _compared(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of `compare`; a method that could not run has its reason in the file."""
    for row in report["results"]:
        if row["ratio"] is None:
            yield (row["method"], "not run", "–", "–", "–", "–")
            continue
        low, high = row["ratio_interval"] or (row["ratio"], row["ratio"])
        compared = BASE if row["method"] == report["base"] else f"{row['ratio']:.2f}x [{low:.2f}-{high:.2f}]"
        yield (
            f"{row['method']} (lossy)" if row["lossy"] else row["method"],
            f"{row['tok_s']:.1f}",
            compared,
            _figure(row["acceptance_rate"]),
            _figure(row["mean_generated_length"]),
            "–" if row["identical"] is None else f"{row['identical']}/{row['prompts']}",
        )


def _peers(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of `bench peers`, the fastest first, and those that were not run behind them."""
    report = result["report"]
    task = f"{report['model']}, {report['prompts']} prompts, {report['max_new_tokens']} tokens"
    for row in sorted(report["results"], key=lambda row: -(row["tok_s"] or 0)):
        if row["tok_s"] is None:
            yield (task, row["row"], "–", "–", "–", "–", f"not run: {row['reason']}", report["device"])
            continue
        low, high = row["ratio_interval"]
        compared = BASE if row["row"] == report["base"] else f"{row['ratio']:.2f}x [{low:.2f}-{high:.2f}]"
        decoding = "–" if row["decode_tok_s"] is None else f"{row['decode_tok_s']:.1f}"
        memory = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f} GB"
        yield (task, row["row"], f"{row['tok_s']:.1f}", decoding, compared, memory, equal_to(row), report["device"])


def _searched(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of `bench search`."""
    report = result["report"]
    for row in report["results"]:
        yield (
            report["model"],
            f"{report['windows']} of {report['window']} tokens",
            row["strategy"],
            f"{row['final']:.3f}x",
            _figure(row.get("of_long")),
            str(row["n_skipped"]),
            f"{row['passes']:.0f}",
            "not reached" if row["to_goal"] is None else f"{row['to_goal']['passes']:.0f}",
            "not reached" if row["to_base"] is None else f"{row['to_base']['passes']:.0f}",
            f"{report['device']}, {report['dtype']}",
        )


def _shifted(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of `bench stream-shift`."""
    report = result["report"]
    for row in report["results"]:
        rates = (_figure(row[run]["settled"]) for run in ("own", "kept", "adapted"))
        missing = "–" if row["gap"] is None else f"{row['gap']:+.3f}"
        speeds = (_figure(row[run].get("expected")) for run in ("own", "adapted"))  # earlier files lack it
        drafts = f"{report['method']}, {report['draft_format']}"
        where = f"{report['device']}, {report['dtype']}"
        yield (report["model"], drafts, row["task"], *rates, missing, *speeds, where)


def _served(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of `bench throughput`."""
    report = result["report"]
    text = f"{report['model']}, {report['prompts']} prompts, {report['max_new_tokens']} tokens"
    for row in sorted(report["results"], key=lambda row: int(row["concurrency"])):
        plain, drafting = row["plain"], row["drafting"]
        per_token = (f"{1000 * own['per_token_s'][p]:.0f}" for own in (plain, drafting) for p in ("p50", "p95"))
        speeds = f"{plain['tok_s']:.1f}", f"{drafting['tok_s']:.1f}", f"{row['ratio']:.2f}x"
        equal = f"{row['equal']}/{row['compared']}"
        yield (text, str(row["concurrency"]), *speeds, *per_token, equal, f"{report['device']}, {report['dtype']}")


def _learnt(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The row of `bench serve`."""
    report = result["report"]
    text = f"{report['model']}, {report['prompts']} requests, {report['max_new_tokens']} tokens"
    runs, (task, *_) = report["results"], report["tuning"]["tasks"]
    speeds = (sum(run["tokens"] for run in runs) / sum(run[key] for run in runs) for key in ("plain_s", "served_s"))
    search = f"{task['search']['trials']} trials, {task['search']['seconds']:.1f} s"
    equal, ratios = f"{report['equal']}/{report['prompts']}", " ".join(f"{ratio:.2f}" for ratio in report["windows"])
    device = f"{report['device']}, {report['dtype']}"
    yield (text, str(report["concurrency"]), *(f"{speed:.1f}" for speed in speeds), ratios, search, equal, device)


@dataclass(frozen=True)
class Kind:
    """A table of its own: title, header, and the rows of a file."""

    title: str
    header: tuple[str, ...]  # without the file, which comes last
    rows: Callable[[dict[str, Any]], Iterator[tuple[str, ...]]]


METHODS_TABLE = Kind("", HEADER, _rows)
PEERS_TABLE = Kind("Beside other engines: the same token ids, greedy, by turns", PEERS_HEADER, _peers)
KINDS = {
    PEERS_SCHEMA: PEERS_TABLE,
    SCHEMA: METHODS_TABLE,
    COMPARE_SCHEMA: METHODS_TABLE,
    SEARCH_SCHEMA: Kind(
        "Searches: candidate passes until 95 % of the best objective, and of SWIFT's own",
        (
            "model",
            "windows",
            "strategy",
            "objective",
            "of a long search's",
            "left out",
            "passes",
            "to 95 % of the best",
            "to 95 % of swift's",
            "device, dtype",
        ),
        _searched,
    ),
    SERVE_SCHEMA: Kind(
        "A server that learns, from an empty database: plain seconds / served seconds of each ten requests, over HTTP",
        ("model, text", "at once", "plain tok/s", "served", "of each ten", "search", "equal", "device, dtype"),
        _learnt,
    ),
    THROUGHPUT_SCHEMA: Kind(
        "Several requests at once: drafting beside plain batching",
        (
            "model, text",
            "at once",
            "plain tok/s",
            "drafting tok/s",
            "ratio",
            "plain ms/token p50",
            "p95",
            "drafting p50",
            "p95",
            "equal",
            "device, dtype",
        ),
        _served,
    ),
    SHIFT_SCHEMA: Kind(
        "Streams that change: acceptance after the first ten prompts of each task",
        (
            "model",
            "drafts",
            "task",
            "α own set",
            "α first task's",
            "α one stream",
            "missing",
            "expected, own set",
            "expected, one stream",
            "device, dtype",
        ),
        _shifted,
    ),
}


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _origin(path: Path, result: dict[str, Any]) -> str:
    note = f" {result['note']}" if result["note"] else ""
    return f"- {path.stem}: commit {result['commit']}, {result['date']}, `{result['command']}`.{note}"


def _options(command: str) -> argparse.Namespace:
    """Those of a bench command that the rows tell of."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--task")
    parser.add_argument("--stream", default="")
    parser.add_argument("--layer-set")
    parser.add_argument("--set", action="append", default=[])
    return parser.parse_known_args(shlex.split(command))[0]


def main(args: Sequence[str] | None = None) -> int:
    """Print the tables, write or check pages and charts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="write into RESULTS.md and README.md, and draw the charts")
    action.add_argument("--check", action="store_true", help="exit with 1 where a page or chart is out of date")
    parsed = parser.parse_args(args)
    try:
        if parsed.check:
            for path in (old := out_of_date()):
                print(f"error: {path} is out of date: run python -m swiftopt.bench.tables --write", file=sys.stderr)
            return 1 if old else 0
        if not parsed.write:
            print(table())
            return 0
        for page, body in _pages():
            page.write_text(refreshed(page.read_text(encoding="utf-8"), body), encoding="utf-8")
        for chart in charts():
            if not chart.is_current:
                chart.write()
    except SwiftoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
