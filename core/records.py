"""Layer-set records to and from JSON: the one object that the CLI, the store's export and the API share."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .errors import FileNotFound, LayerSetError
from .types import LayerSet, LayerSetRecord

SCHEMA = "swiftopt.layer-set/1"
REQUIRED = ("schema", "model", "n_layers", "skip_attn", "skip_mlp")


def record_to_json(record: LayerSetRecord) -> dict[str, Any]:
    """The exchanged object of design §8, keys in its order, with the store's `version` last where there is one."""
    layer_set = record.layer_set
    out: dict[str, Any] = {
        "schema": SCHEMA,
        "model": record.model,
        "fingerprint": record.fingerprint,
        "task": record.task,
        "n_layers": layer_set.n_layers,
        "skip_attn": sorted(layer_set.skip_attn),
        "skip_mlp": sorted(layer_set.skip_mlp),
        "quantised": dict(layer_set.formats),
        "skip_ratio": round(layer_set.skip_ratio, 4),
        "matchness": record.matchness,
        "acceptance_rate": record.acceptance_rate,
        "mean_generated_length": record.mean_generated_length,
        "expected_speedup": record.expected_speedup,
        "measured_speedup": record.measured_speedup,
        "measured_interval": list(record.measured_interval) if record.measured_interval else None,
        "verdict": record.verdict,
        "device": record.device,
        "dtype": record.dtype,
        "settings": dict(record.settings),
        "stream_sha256": record.stream_sha256,
        "swiftopt_version": record.swiftopt_version,
        "created_at": record.created_at,
    }
    if record.version is not None:
        out["version"] = record.version
    return out


def record_from_json(values: Mapping[str, Any], where: str) -> LayerSetRecord:
    """Inverse of `record_to_json`; `where` names the file in errors.

    Raises: LayerSetError: a required key is missing, of the wrong type, or the set is out of range.
    """
    missing = [key for key in REQUIRED if key not in values]
    if missing:
        raise LayerSetError(f"{where} is no layer set: it lacks {missing}; required are {list(REQUIRED)}")
    if values["schema"] != SCHEMA:
        raise LayerSetError(f"{where} has schema {values['schema']!r}, this version reads {SCHEMA!r}")
    try:
        interval = values.get("measured_interval")
        return LayerSetRecord(
            model=_word(values["model"], "model"),
            task=_word(values.get("task") or "default", "task"),
            layer_set=LayerSet(
                _depth(values["n_layers"]),
                frozenset(_layers(values["skip_attn"])),
                frozenset(_layers(values["skip_mlp"])),
                tuple(dict(values.get("quantised") or {}).items()),
            ),
            fingerprint=_word_or_none(values.get("fingerprint"), "fingerprint"),
            matchness=_number(values.get("matchness")),
            acceptance_rate=_number(values.get("acceptance_rate")),
            mean_generated_length=_number(values.get("mean_generated_length")),
            expected_speedup=_number(values.get("expected_speedup")),
            measured_speedup=_number(values.get("measured_speedup")),
            measured_interval=(float(interval[0]), float(interval[1])) if interval else None,
            verdict=_verdict(values.get("verdict")),
            device=_word_or_none(values.get("device"), "device"),
            dtype=_word_or_none(values.get("dtype"), "dtype"),
            settings=dict(values.get("settings") or {}),
            stream_sha256=values.get("stream_sha256"),
            swiftopt_version=str(values.get("swiftopt_version") or ""),
            created_at=str(values.get("created_at") or ""),
        )
    except LayerSetError as error:
        raise LayerSetError(f"{where}: {error}") from error
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise LayerSetError(f"{where} cannot be read as a layer set: {error}") from error


def stored_from_json(values: Mapping[str, Any], where: str) -> LayerSetRecord:
    """As `record_from_json`, with the version and the job that a store gave the set.

    Raises: LayerSetError: as there.
    """
    return replace(record_from_json(values, where), version=values.get("version"), job=values.get("job"))


def load_record(path: Path) -> LayerSetRecord:
    """The layer set in an exported file.

    Raises: FileNotFound: no such file. LayerSetError: it is not a layer set.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFound(f"there is no layer-set file {path}: export one with `swiftopt layers export`") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise LayerSetError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise LayerSetError(f"{path} holds no JSON object: export a set with `swiftopt layers export`")
    return record_from_json(values, str(path))


def _layers(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise LayerSetError(f"layers must be a list of whole numbers, not {value!r}")
    return value


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise LayerSetError(f"a figure must be a finite number, not {value!r}")
    return float(value)


def _depth(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LayerSetError(f"n_layers must be a whole number above 0, not {value!r}")
    return value


def _word(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise LayerSetError(f"{key} must be a text, not {value!r}")
    return value


def check_task(value: Any) -> str:
    """Raises: LayerSetError: no task could be called that in MODEL/TASK."""
    if not isinstance(value, str) or not value.strip() or "/" in value or not value.isprintable():
        raise LayerSetError(f"task {value!r} is no name: use a word without '/', such as 'code'")
    return value


def _word_or_none(value: Any, key: str) -> str | None:
    return None if value is None else _word(value, key)


def _verdict(value: Any) -> Any:
    if value not in ("use", "plain", "unmeasured", None):
        raise LayerSetError(f"verdict {value!r} is none of use, plain, unmeasured")
    return value or "unmeasured"
