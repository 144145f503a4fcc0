"""Which wings of the package are here; tests of those that were left out are not collected."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import swiftopt

ROOT = Path(swiftopt.__file__).parent
WINGS = ("engines", "bench", "papers")
IMPORTED = re.compile(rf"^\s*(?:from|import) swiftopt\.({'|'.join(WINGS)})\b", re.MULTILINE)


def is_here(wing: str) -> bool:
    return (ROOT / wing / "wing.py").is_file()


def of_wings(table: Mapping[str, Sequence[Any]]) -> list[Any]:
    """The rows of a table by wing whose wing is here."""
    return [row for wing, rows in table.items() if is_here(wing) for row in rows]


def needs_missing(path: Path) -> bool:
    """Whether a file imports from a wing that is not here."""
    return not all(map(is_here, IMPORTED.findall(path.read_text(encoding="utf-8"))))
