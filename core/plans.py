"""Plans to and from JSON: what the API's look-up and `swiftopt layers promote` show of one, beside its names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .formats import STORED
from .learned import LearnedRecord, learned_to_json
from .records import record_to_json, stored_from_json
from .types import Plan

AS_FOUND: Mapping[str, Any] = {"draft_format": STORED}  # of adaptive drafts with a set that names all formats itself


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Plain values; `layer_set` and `learned` are the objects of every front door, null where the method needs none."""
    return {
        "method": plan.method,
        "settings": dict(plan.settings),
        "draft_model": plan.draft_model,
        "verdict": plan.verdict,
        "measured_speedup": plan.measured_speedup,
        "measured_interval": list(plan.measured_interval) if plan.measured_interval else None,
        "layer_set": record_to_json(plan.layer_set) if plan.layer_set else None,
        "learned": learned_to_json(plan.learned) if plan.learned else None,
    }


def plan_from_json(values: Mapping[str, Any], where: str) -> Plan:
    """Inverse of `plan_to_json`, also of an older server's, whose plans all have a layer set with their settings.

    Device, dtype and the curve of `learned` are not exchanged.

    Raises: LayerSetError: the layer set cannot be read; `where` is named. KeyError, TypeError: it is no plan.
    """
    found, learned = values["layer_set"], values.get("learned")
    record = None if found is None else stored_from_json(found, where)
    interval = values.get("measured_interval")
    return Plan(
        method=values["method"],
        layer_set=record,
        settings=values.get("settings", record.settings if record is not None else {}),
        verdict=values["verdict"],
        learned=None if learned is None else _learned(learned),
        draft_model=values.get("draft_model"),
        measured_speedup=values.get("measured_speedup"),
        measured_interval=None if interval is None else (interval[0], interval[1]),
    )


def _learned(values: Mapping[str, Any]) -> LearnedRecord:
    """Inverse of `learned_to_json`."""
    return LearnedRecord(
        kind=values["kind"],
        model=values["model"],
        task=values["task"],
        fingerprint=values["fingerprint"],
        depths=tuple(values["depths"]),
        n_parameters=values["n_parameters"],
        settings=values["settings"],
        figures=values["figures"],
        stream_sha256=values["stream_sha256"],
        swiftopt_version=values["swiftopt_version"],
        created_at=values["created_at"],
        version=values["version"],
    )
