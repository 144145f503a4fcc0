"""What a chaos run says: a figure, what it has to be, and how it was measured."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "bench" / "chaos.json"
PAGE = ROOT / "docs" / "failures.md"  # carries the table of all figures, the last thing on it
MARK = "<!-- written by `make chaos` -->\n"


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
    """Markdown, as the page of failures shows it."""
    rows = [
        f"| {f.section} | {f.measured} | {f.wanted} | {'yes' if f.ok else 'NO'} | {f.how} |".replace("\n", " ")
        for f in figures
    ]
    return "\n".join(["| section | measured | wanted | reached | how |", "|---|---|---|---|---|", *rows])


def write(figures: Sequence[Figure]) -> str:
    """Put the figures into the result file, in place of those of the same sections, and on the page.

    Returns: the run as one line of JSON.
    """
    known = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"figures": {}}
    here = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "cores": os.cpu_count(), "machine": platform.machine()}
    run = {figure.section: {**asdict(figure), **here} for figure in figures}
    known["figures"].update(run)
    RESULT.write_text(json.dumps(known, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    names = [field.name for field in fields(Figure)]
    stored = [Figure(**{name: values[name] for name in names}) for _, values in sorted(known["figures"].items())]
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(f"{head}{MARK}\n{table(stored)}\n", encoding="utf-8")
    return json.dumps({"schema": "swiftopt.chaos/1", "ok": all(f.ok for f in figures), "figures": run})
