"""What a comparison leaves behind: the plan of its task, and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import LayerSetNotFound
from ..core.types import FoundPlan, Plan
from ..decoding.methods import METHODS
from ..store import Store
from .recipes import Pieces
from .report import Figures, best_of
from .requests import BASE


def with_plan(
    report: Mapping[str, Any],
    rows: Sequence[Figures],
    pieces: Mapping[str, Pieces],
    fingerprint: str,
    store: Store | None,
) -> dict[str, Any]:
    """The report with its plan, both stored if there is a store; an interrupted comparison makes no plan.

    A standing plan of a method that did not run stays `best` if it was measured to be faster.
    """
    plan = None if report["interrupted"] else plan_of(report, rows, pieces)
    found, standing = None, None
    ran = [row.method for row in rows if row.ratio is not None]
    if store is not None and plan is not None:
        standing = _standing(report, fingerprint, plan, ran, store)
        found = store.add_plan(fingerprint, report["task"], plan, promote=standing is None)
    whole = {
        **report,
        "plan": None if plan is None else _plan_json(plan, None if found is None else found.version),
        "standing": None if standing is None else _plan_json(standing.plan, standing.version),
        "stored": store is not None and bool(ran),
    }
    if store is not None and ran:
        where = report["task"], report["device"], report["dtype"]
        store.add_comparison(fingerprint, *where, whole, report["created_at"])
    return whole


def plan_of(report: Mapping[str, Any], rows: Sequence[Figures], pieces: Mapping[str, Pieces]) -> Plan:
    """The best lossless method of our own with all that it needs, or plain decoding."""
    best = best_of([row for row in rows if row.method in METHODS])
    if best is None:
        return Plan(BASE, verdict="plain", device=report["device"], dtype=report["dtype"])
    return Plan(
        best.method,
        pieces[best.method].layer_set,
        best.settings,
        "use",
        pieces[best.method].learned,
        report["draft_model"] if METHODS[best.method].drafts_with_model else None,
        best.ratio,
        best.ratio_interval,
        report["device"],
        report["dtype"],
    )


def _standing(
    report: Mapping[str, Any], fingerprint: str, plan: Plan, ran: Sequence[str], store: Store
) -> FoundPlan | None:
    """The plan that stays: one for this very task, device and dtype, by a method that did not run, and faster."""
    try:
        found = store.lookup(fingerprint, report["task"], report["device"], report["dtype"])
    except LayerSetNotFound:
        return None
    faster = (found.plan.measured_speedup or 1.0) > (plan.measured_speedup or 1.0)
    stays = found.fallback is None and found.plan.verdict == "use" and faster and found.plan.method not in ran
    return found if stays else None


def _plan_json(plan: Plan, version: int | None) -> dict[str, Any]:
    return {
        "method": plan.method,
        "verdict": plan.verdict,
        "version": version,
        "measured_speedup": plan.measured_speedup,
        "measured_interval": plan.measured_interval,
    }
