"""The rows that `bench peers` makes of each engine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..core.errors import SettingsError
from ..engines.export import SCHEMA, SUMMARY
from ..engines.packages import PACKAGES
from ..engines.tuning import RUNNABLE
from ..engines.turns import Row

UNSURE = {"min_confidence": 0.6}  # a draft ends at a token less sure than that
OWN_DEFAULTS = {"draft_tokens": 20, "min_confidence": 0.4}  # transformers' own for assistants


def all_rows(ggufs: Sequence[Path] = (), assistant: Path | None = None, exported: Sequence[Path] = ()) -> list[Row]:
    """Every row, in the table's order; each of `ggufs` is one for each build of llama.cpp.

    Raises: SettingsError: a GGUF file is not there, or two have one name; or as `exported_rows`.
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
        *exported_rows(exported),
    ]


def exported_rows(folders: Sequence[Path]) -> list[Row]:
    """A row of each folder that `swiftopt export` wrote: its engine with these settings and this draft.

    Rows are named `exported`, and where an engine has several, `exported-` with the folder's name. A folder for
    transformers with a layer set has a row `shared` for swiftopt inside transformers, too.

    Raises: SettingsError: a folder is no export, or of an engine that is not run here; or two have one name.
    """
    read = [(folder, _summary(folder)) for folder in folders]
    n_of = Counter(about["engine"] for _, about in read)
    rows = []
    for folder, about in read:
        runnable = RUNNABLE[about["engine"]]
        package, named = PACKAGES[runnable.package], "" if n_of[about["engine"]] == 1 else f"-{folder.resolve().name}"
        options = {"settings": about["settings"], **({"ngram": True} if about["kind"] == "text" else {})}
        draft = folder / about["draft"] if about["draft"] else None
        if draft is not None or about["kind"] == "text":
            rows.append(Row(package, f"exported{named}", runnable.weights, options, draft))
        if about.get("layer_set"):
            shared = {"layer_set": str((folder / about["layer_set"]).resolve())}
            rows.append(Row(package, f"shared{named}", runnable.weights, shared))
    if len({row.name for row in rows}) < len(rows):
        raise SettingsError("two folders of --exported have the same name, and rows are named by it: rename one")
    return rows


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        complete = about["schema"] == SCHEMA and isinstance(about["settings"], dict)
        engine, kind, draft = about["engine"], about["kind"], about["draft"]
    except (OSError, ValueError, KeyError, TypeError):
        complete = False
    if not complete:
        raise SettingsError(f"{folder} is no exported plan: name a folder that `swiftopt export` wrote")
    if engine not in RUNNABLE:
        raise SettingsError(f"{folder} is for {engine}, which is not run here: export to one of {', '.join(RUNNABLE)}")
    paths = [path for path in (draft, about.get("layer_set")) if path is not None]
    if kind == "draft" and not paths:
        raise SettingsError(f"{folder} names no draft for {engine}: export the plan again")
    if lacking := [path for path in paths if not (folder / path).exists()]:
        raise SettingsError(f"{folder} lacks its draft {lacking[0]}: export the plan again")
    return dict(about)


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
