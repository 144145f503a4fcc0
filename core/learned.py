"""What was trained for a model and task: heads or a probe, with its figures and provenance. The weights lie apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LearnedKind = Literal["heads", "probe"]


@dataclass(frozen=True, slots=True)
class LearnedRecord:
    """Trained heads or a trained probe; `version` is given by the store, counted per model, task and kind.

    `depths` are the layers run before each head, or the probe's one depth; `figures` what training measured (final
    loss, agreement with the last layer, seconds, tokens); `curve` pairs of (step, loss) for the picture.
    """

    kind: LearnedKind
    model: str
    task: str
    fingerprint: str
    depths: tuple[int, ...]
    n_parameters: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    curve: tuple[tuple[int, float], ...] = ()
    stream_sha256: str | None = None
    swiftopt_version: str = ""
    created_at: str = ""
    version: int | None = None


SCHEMA = "swiftopt.learned/1"


def learned_to_json(record: LearnedRecord) -> dict[str, Any]:
    """The record as front doors show it."""
    return {
        "schema": SCHEMA,
        "kind": record.kind,
        "model": record.model,
        "task": record.task,
        "version": record.version,
        "fingerprint": record.fingerprint,
        "depths": list(record.depths),
        "n_parameters": record.n_parameters,
        "settings": dict(record.settings),
        "figures": dict(record.figures),
        "stream_sha256": record.stream_sha256,
        "swiftopt_version": record.swiftopt_version,
        "created_at": record.created_at,
    }
