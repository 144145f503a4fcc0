"""The report of swiftopt and other engines on the same prompts: speeds, ratios, and whose tokens are equal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..engines.turns import Question, Row, RowRuns, TimedAnswer, TurnsRequest
from ..optimizer.verdict import bootstrap_interval, speed, speed_ratio

SCHEMA = "swiftopt.bench-peers/1"
BASES = ("llama-cpp/plain", "node-llama-cpp/plain")  # the faster of them is what rows are compared with


def report_of(
    request: TurnsRequest,
    runs: Sequence[RowRuns],
    questions: Sequence[Question],
    machine: str,
    base: str | None = None,
    interrupted: bool = False,
) -> dict[str, Any]:
    """The object that `swiftopt bench peers --json` prints; where `base` was not measured, the default takes its place.

    That is llama.cpp's faster plain row, else the first one that was measured.
    """
    measured = {own.row.name: own for own in runs if own.turns}
    llama = [measured[name] for name in BASES if name in measured]
    compared = measured.get(base or "") or max(llama, key=lambda own: speed(own.timed), default=None)
    compared = compared or next(iter(measured.values()), None)
    return {
        "schema": SCHEMA,
        "model": request.model,
        "device": machine,
        "threads": request.threads,
        "prompts": len(questions),
        "max_new_tokens": max(question.max_new_tokens for question in questions),
        "ignore_eos": True,
        "base": compared.row.name if compared else None,
        "interrupted": interrupted,
        "results": [_result(own, compared, measured) for own in runs],
    }


def _result(own: RowRuns, base: RowRuns | None, measured: Mapping[str, RowRuns]) -> dict[str, Any]:
    row = own.row
    named = {
        "row": row.name,
        "rival": row.engine.title,
        "weights": own.weights,
        "same_weights": row.same_weights,
        "reason": own.reason or None,
    }
    if not own.turns or base is None:
        return {**named, "tok_s": None}
    ratios = [one.seconds / mine.seconds for mine, one in zip(own.timed, base.timed, strict=True)]  # of equal tokens
    reference = _reference(row, measured)
    decode_speed = own.decode_speed()
    drafted, accepted = own.drafts or (None, None)
    return {
        **named,
        "tokens": sum(run.tokens for run in own.timed),
        "seconds": round(sum(run.seconds for run in own.timed), 3),
        "tok_s": round(speed(own.timed), 3),
        "decode_tok_s": None if decode_speed is None else round(decode_speed, 3),
        "ratio": round(speed_ratio(own.timed, base.timed), 4),
        "ratio_interval": [round(end, 4) for end in bootstrap_interval(own.timed, base.timed)],
        "ratio_median": round(statistics.median(ratios), 4),
        "peak_bytes": own.peak_bytes,
        "equal_to": reference.row.name if reference else None,
        "identical": None if reference is None else sum(map(_same, own.turns, reference.turns)),
        "of": len(own.turns),
        "decoded_with": sorted(own.methods),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": None if own.acceptance is None else round(own.acceptance, 4),
        "turns": [
            {
                "seconds": round(turn.seconds, 4),
                "prefill_s": turn.prefill_s,
                "drafted": turn.drafted,
                "accepted": turn.accepted,
            }
            for turn in own.turns
        ],
    }


def _same(one: TimedAnswer, other: TimedAnswer) -> bool:
    return one.token_ids == other.token_ids


def _reference(row: Row, measured: Mapping[str, RowRuns]) -> RowRuns | None:
    """Whose tokens a row's are held against: drafting rows their engine's plain ones, all others swiftopt's."""
    if not row.same_weights:
        return None
    found = measured.get(f"{row.engine.name}/plain" if row.equals_plain else "swiftopt/plain")
    return None if found is None or found.row is row else found


def equal_to(result: dict[str, Any]) -> str:
    """What the row's tokens may be held against, and on how many prompts they are the same."""
    if not result["same_weights"]:
        return "other weights"  # the row's name says which
    if result["equal_to"] is None:
        return f"same weights ({result['weights']})"
    own = result["equal_to"].split("/")[0] == result["row"].split("/")[0]
    return f"{'its own plain' if own else result['equal_to']} {result['identical']}/{result['of']}"
