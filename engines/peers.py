"""Rows and report of `bench peers`, which compares swiftopt with other engines on the same prompts.

Rows are chosen before torch is loaded; modules that load it are imported for type checking only.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import SettingsError, nearest_words
from ..core.settings import EXPORT_SCHEMA, EXPORT_SUMMARY
from ..optimizer.verdict import speed, speed_interval, speed_ratio
from .packages import PACKAGES, RUNNABLE, Row, Weights

if TYPE_CHECKING:
    from .turns import Question, RowRuns, TurnsRequest

SCHEMA = "swiftopt.bench-peers/1"
BASES = ("llama-cpp/plain", "node-llama-cpp/plain")  # The faster of these is the default base of ratios.
STOP_BELOW = {"min_confidence": 0.6}  # Drafts end at a token with a lower probability.
TRANSFORMERS_DEFAULTS = {"draft_tokens": 20, "min_confidence": 0.4}
NGRAM = {"ngram": True}
TURN_KEYS = ("prefill_s", "drafted", "accepted")


def all_rows(ggufs: Sequence[Path] = (), assistant: Path | None = None, exported: Sequence[Path] = ()) -> list[Row]:
    """Return every row, in the table's order; each file of `ggufs` gives one row per build of llama.cpp.

    Raises: SettingsError: a GGUF file is missing, or two have the same name; or as `exported_rows`.
    """
    for path in ggufs:
        if not path.is_file():
            raise SettingsError(f"--gguf {path} is not a file: check the path")
    if len({path.stem for path in ggufs}) < len(ggufs):
        raise SettingsError("two files of --gguf have the same name, which rows are named by: rename one")
    rows: list[Row] = []

    def add(name: str, variant: str, weights: Weights, options: Mapping[str, Any] | None = None, **fields: Any) -> None:
        rows.append(Row(PACKAGES[name], variant, weights, dict(options or {}), **fields))

    add("swiftopt", "plain", "folder")
    add("swiftopt", "best", "folder", {"best": True})
    for name in ("llama-cpp", "node-llama-cpp"):
        add(name, "plain", "stored")
        add(name, "draft", "stored", STOP_BELOW, draft="Q4_0")
        add(name, "ngram", "stored", NGRAM)
        add(name, "q8_0", "Q8_0")
        add(name, "q4_0", "Q4_0")
        for path in ggufs:
            add(name, path.stem, "file", file=path)
    add("openvino", "plain", "F16")
    add("openvino", "draft", "F16", STOP_BELOW, draft="Q4_0")
    add("openvino", "ngram", "F16", NGRAM)
    add("vllm", "plain", "folder")
    add("vllm", "ngram", "folder", NGRAM)
    add("transformers", "plain", "folder")
    add("transformers", "compiled", "folder", {"compiled": True})
    add("transformers", "ngram", "folder", NGRAM)
    if assistant:
        add("transformers", "assisted", "folder", TRANSFORMERS_DEFAULTS, draft=assistant)
    return [*rows, *exported_rows(exported)]


def exported_rows(folders: Sequence[Path]) -> list[Row]:
    """Return a row for each folder that `swiftopt export` wrote: its engine with the exported settings and draft.

    A row is named `exported`, or `exported-` plus the folder's name if its engine has several. A folder for
    transformers with a layer set also gets a row `shared`, which runs swiftopt inside transformers.

    Raises: SettingsError: a folder is no export, swiftopt cannot run its engine, or two rows have the same name.
    """
    summaries = [(folder, _summary(folder)) for folder in folders]
    n_folders = Counter(summary["engine"] for _, summary in summaries)
    rows = []
    for folder, summary in summaries:
        engine = summary["engine"]
        runnable, suffix = RUNNABLE[engine], "" if n_folders[engine] == 1 else f"-{folder.resolve().name}"
        package = PACKAGES[runnable.package]
        options = {"settings": summary["settings"], **(NGRAM if summary["kind"] == "text" else {})}
        draft = folder / summary["draft"] if summary["draft"] else None
        if draft is not None or summary["kind"] == "text":
            rows.append(Row(package, f"exported{suffix}", runnable.weights, options, draft))
        if summary.get("layer_set"):
            shared = {"layer_set": str((folder / summary["layer_set"]).resolve())}
            rows.append(Row(package, f"shared{suffix}", runnable.weights, shared))
    if len({row.name for row in rows}) < len(rows):
        raise SettingsError("two folders of --exported have the same name, which rows are named by: rename one")
    return rows


def _summary(folder: Path) -> dict[str, Any]:
    """Read the summary of an exported plan.

    Raises: SettingsError: it is missing or incomplete, its engine cannot run here, or a file that it names is missing.
    """
    path = folder / EXPORT_SUMMARY
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        is_complete = summary["schema"] == EXPORT_SCHEMA and isinstance(summary["settings"], dict)
        engine, kind, draft = summary["engine"], summary["kind"], summary["draft"]
    except (OSError, ValueError, KeyError, TypeError):
        is_complete = False
    if not is_complete:
        raise SettingsError(f"{folder} is not an exported plan: name a folder that `swiftopt export` wrote")
    if engine not in RUNNABLE:
        raise SettingsError(
            f"{folder} is for {engine}, which swiftopt cannot run: export to one of {', '.join(RUNNABLE)}"
        )
    paths = [path for path in (draft, summary.get("layer_set")) if path is not None]
    if kind == "draft" and not paths:
        raise SettingsError(f"{folder} names no draft for {engine}: export the plan again")
    if missing := [path for path in paths if not (folder / path).exists()]:
        raise SettingsError(f"{folder} lacks its draft {missing[0]}: export the plan again")
    return dict(summary)


def chosen_rows(words: Iterable[str], rows: Sequence[Row]) -> list[Row]:
    """Return the rows that --peers names: `all`, engines, or rows as `engine/variant`; in the table's order.

    Raises: SettingsError: a word names no row, or there is no word.
    """
    words = [word.strip() for word in words if word.strip()]
    names = {"all", *(row.engine.name for row in rows), *(row.name for row in rows)}
    for word in words:
        if word not in names:
            nearest = nearest_words(word, sorted(names))
            engines = ", ".join(dict.fromkeys(row.engine.name for row in rows))
            raise SettingsError(
                f"peer {word!r} is unknown{nearest}: use all, {engines}, or rows such as {rows[0].name}"
            )
    chosen = [row for row in rows if {"all", row.engine.name, row.name} & set(words)]
    if not chosen:
        raise SettingsError(f"no peer was named: use all, or rows such as {rows[0].name}")
    return chosen


# --- the report


def report_of(
    request: TurnsRequest,
    runs: Sequence[RowRuns],
    questions: Sequence[Question],
    machine: str,
    base: str | None = None,
    interrupted: bool = False,
) -> dict[str, Any]:
    """Return the object that `swiftopt bench peers --json` prints.

    Ratios are to the row `base`. If it was not measured, they are to llama.cpp's faster plain row, and without this to
    the first measured row.
    """
    measured = {run.row.name: run for run in runs if run.turns}
    llama_cpp = [measured[name] for name in BASES if name in measured]
    base_run = measured.get(base or "") or max(llama_cpp, key=lambda run: speed(run.timed), default=None)
    base_run = base_run or next(iter(measured.values()), None)
    return {
        "schema": SCHEMA,
        "model": request.model,
        "device": machine,
        "placement": request.device,
        "threads": request.threads,
        "prompts": len(questions),
        "max_new_tokens": max(question.max_new_tokens for question in questions),
        "ignore_eos": True,
        "base": base_run.row.name if base_run else None,
        "interrupted": interrupted,
        "results": [_result(run, base_run, measured) for run in runs],
    }


def _result(runs: RowRuns, base: RowRuns | None, measured: Mapping[str, RowRuns]) -> dict[str, Any]:
    row = runs.row
    identity = {
        "row": row.name,
        "rival": row.engine.title,
        "weights": runs.weights,
        "same_weights": row.same_weights,
        "reason": runs.reason or None,
    }
    if not runs.turns or base is None:
        return {**identity, "tok_s": None}
    interval = speed_interval(runs.timed, base.timed)
    # Seconds can be compared directly: every row generates the same number of tokens.
    ratios = [base_turn.seconds / turn.seconds for turn, base_turn in zip(runs.timed, base.timed, strict=True)]
    reference = _reference(row, measured)
    pairs = zip(runs.turns, reference.turns, strict=True) if reference else ()
    drafted, accepted = runs.drafts or (None, None)
    return {
        **identity,
        "tokens": sum(run.tokens for run in runs.timed),
        "seconds": round(sum(run.seconds for run in runs.timed), 3),
        "tok_s": round(speed(runs.timed), 3),
        "decode_tok_s": rounded(runs.decode_speed(), 3),
        "ratio": round(speed_ratio(runs.timed, base.timed), 4),
        "ratio_interval": interval and [round(end, 4) for end in interval],
        "ratio_median": round(statistics.median(ratios), 4),
        "peak_bytes": runs.peak_bytes,
        "equal_to": reference.row.name if reference else None,
        "identical": sum(turn.token_ids == expected.token_ids for turn, expected in pairs) if reference else None,
        "of": len(runs.turns),
        "decoded_with": sorted(runs.methods),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": rounded(runs.acceptance, 4),
        "turns": [
            {"seconds": round(turn.seconds, 4), **{key: getattr(turn, key) for key in TURN_KEYS}} for turn in runs.turns
        ],
    }


def rounded(value: float | None, digits: int = 3) -> float | None:
    """Return the value rounded to `digits` digits after the point; None for None."""
    return None if value is None else round(value, digits)


def _reference(row: Row, measured: Mapping[str, RowRuns]) -> RowRuns | None:
    """Return the row whose tokens this row should equal: its engine's plain row if it drafts, else swiftopt's."""
    if not row.same_weights:
        return None
    reference = measured.get(f"{row.engine.name}/plain" if row.equals_plain else "swiftopt/plain")
    return None if reference is None or reference.row is row else reference


def equal_to(result: dict[str, Any]) -> str:
    """Return the row whose tokens a row should equal, and on how many prompts it does, in words."""
    if not result["same_weights"]:
        return "other weights"  # The row's name says which weights.
    if result["equal_to"] is None:
        return f"same weights ({result['weights']})"
    is_same_engine = result["equal_to"].split("/")[0] == result["row"].split("/")[0]
    return f"{'its own plain' if is_same_engine else result['equal_to']} {result['identical']}/{result['of']}"
