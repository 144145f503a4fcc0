"""The rows that `bench peers` makes of each engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from ..core.errors import SettingsError
from ..engines.packages import PACKAGES
from ..engines.turns import Row

UNSURE = {"min_confidence": 0.6}  # a draft ends at a token less sure than that
OWN_DEFAULTS = {"draft_tokens": 20, "min_confidence": 0.4}  # transformers' own for assistants


def all_rows(ggufs: Sequence[Path] = (), assistant: Path | None = None) -> list[Row]:
    """Every row, in the table's order; each of `ggufs` is one for each build of llama.cpp.

    Raises: SettingsError: a GGUF file is not there, or two have one name.
    """
    for path in ggufs:
        if not path.is_file():
            raise SettingsError(f"--gguf {path} is no file: check the path")
    if len({path.stem for path in ggufs}) < len(ggufs):
        raise SettingsError("two files of --gguf have the same name, and rows are named by it: rename one")
    rows = [
        Row(PACKAGES["swiftopt"], "plain", "folder"),
        Row(PACKAGES["swiftopt"], "best", "folder", {"best": True}),
    ]
    for name in ("llama-cpp", "node-llama-cpp"):
        rows += [
            Row(PACKAGES[name], "plain", "stored"),
            Row(PACKAGES[name], "draft", "stored", UNSURE, "Q4_0"),
            Row(PACKAGES[name], "ngram", "stored", {"ngram": True}),
            Row(PACKAGES[name], "q8_0", "Q8_0"),
            Row(PACKAGES[name], "q4_0", "Q4_0"),
            *(Row(PACKAGES[name], path.stem, "file", file=path) for path in ggufs),
        ]
    return [
        *rows,
        Row(PACKAGES["openvino"], "plain", "F16"),
        Row(PACKAGES["openvino"], "draft", "F16", UNSURE, "Q4_0"),
        Row(PACKAGES["openvino"], "ngram", "F16", {"ngram": True}),
        Row(PACKAGES["vllm"], "plain", "folder"),
        Row(PACKAGES["vllm"], "ngram", "folder", {"ngram": True}),
        Row(PACKAGES["transformers"], "plain", "folder"),
        Row(PACKAGES["transformers"], "compiled", "folder", {"compiled": True}),
        Row(PACKAGES["transformers"], "ngram", "folder", {"ngram": True}),
        *([Row(PACKAGES["transformers"], "assisted", "folder", OWN_DEFAULTS, assistant)] if assistant else []),
    ]


def chosen_rows(words: Iterable[str], rows: Sequence[Row]) -> list[Row]:
    """The rows that --peers names: `all`, engines, or rows as `engine/variant`; in the table's order.

    Raises: SettingsError: a word names none.
    """
    words = [word.strip() for word in words if word.strip()]
    known = {"all", *(row.engine.name for row in rows), *(row.name for row in rows)}
    for word in words:
        if word not in known:
            near = get_close_matches(word, sorted(known), n=1)
            nearest = f" (nearest: {near[0]})" if near else ""
            names = ", ".join(dict.fromkeys(row.engine.name for row in rows))
            raise SettingsError(f"peer {word!r} is unknown{nearest}: use all, {names}, or rows such as {rows[0].name}")
    found = [row for row in rows if {"all", row.engine.name, row.name} & set(words)]
    if not found:
        raise SettingsError(f"no peer was named: use all, or rows such as {rows[0].name}")
    return found
