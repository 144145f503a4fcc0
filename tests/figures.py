"""What a long run with servers of its own says: a figure, what it has to be, and how it was measured."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Run:
    """A kind of run, named after its target of `make`; its page carries the table of all its figures behind a mark."""

    name: str
    page: str

    @property
    def result(self) -> Path:
        """The file that keeps its figures."""
        return ROOT / "bench" / f"{self.name}.json"

    def with_table(self, text: str, table: str) -> str:
        """The text of its page with this table in place of the one there."""
        mark = f"<!-- written by `make {self.name}` -->\n"
        before, _, after = text.partition(mark)
        rest = re.sub(r"\A\n(?:\|.*\n)*", "", after)
        return f"{before}{mark}\n{table}\n{rest}"


CHAOS, FLEET = Run("chaos", "docs/failures.md"), Run("fleet", "docs/operations.md")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table; `values` are the single measurements behind it."""

    section: str
    measured: str
    wanted: str
    ok: bool
    how: str
    values: dict[str, Any] = field(default_factory=dict)


def seconds(section: str, samples: Sequence[float], limit_s: float, how: str) -> Figure:
    """A figure of times, the longest of which counts."""
    ordered = sorted(round(sample, 2) for sample in samples)
    middle = ordered[len(ordered) // 2]
    measured = f"{len(ordered)} of {len(ordered)}, median {middle:g} s, longest {ordered[-1]:g} s"
    return Figure(section, measured, f"each ≤ {limit_s:g} s", ordered[-1] <= limit_s, how, {"seconds": ordered})


def table(figures: Sequence[Figure]) -> str:
    """Markdown, as a page shows it."""
    rows = [
        f"| {f.section} | {f.measured} | {f.wanted} | {'yes' if f.ok else 'NO'} | {f.how} |".replace("\n", " ")
        for f in figures
    ]
    return "\n".join(["| section | measured | wanted | reached | how |", "|---|---|---|---|---|", *rows])


def write(figures: Sequence[Figure], run: Run) -> str:
    """Put the figures into the result file, in place of those of the same sections, and on the page.

    Returns: the run as one line of JSON.
    """
    result, page = run.result, ROOT / run.page
    known = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {"figures": {}}
    here = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "cores": os.cpu_count(), "machine": platform.machine()}
    measured = {figure.section: {**asdict(figure), **here} for figure in figures}
    known["figures"].update(measured)
    result.write_text(json.dumps(known, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    names = [field.name for field in fields(Figure)]
    stored = [Figure(**{name: values[name] for name in names}) for _, values in sorted(known["figures"].items())]
    page.write_text(run.with_table(page.read_text(encoding="utf-8"), table(stored)), encoding="utf-8")
    return json.dumps({"schema": f"swiftopt.{run.name}/1", "ok": all(f.ok for f in figures), "figures": measured})
