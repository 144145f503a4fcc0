"""Train heads or a probe for a model and task, and store them: what `heads train` and `probe train` run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..core.streams import stream_sha256
from ..core.types import LearnedKind, LearnedRecord, Prompt, now
from ..models.early_exit import heads_to_bytes, probe_to_bytes
from ..models.loading import load
from ..models.runtime import Runtime
from ..models.saved import cache_root
from ..store import Store
from ..training.checkpoint import Checkpoint
from ..training.heads import train_heads
from ..training.probe import train_probe
from ..training.settings import HeadSettings, OnStep, ProbeSettings, Trained


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """What to train, on which model; `task` is what the result is stored and looked up under."""

    model: str
    task: str
    settings: HeadSettings | ProbeSettings
    dtype: str = "auto"
    device: str = "auto"


def train(
    request: TrainRequest,
    prompts: Sequence[Prompt],
    store: Store,
    on_step: OnStep,
    on_load: Callable[[str], None] | None = None,
) -> LearnedRecord:
    """Train as requested, from the checkpoint of an earlier run that was cut short; return the stored record.

    Raises: SettingsError: a layer is out of range. InvalidInput: the stream or its completions are too short.
            OutputError: the checkpoint cannot be written.
    """
    runtime, settings = load(request.model, request.dtype, request.device, on_load), request.settings
    kind: LearnedKind = "heads" if isinstance(settings, HeadSettings) else "probe"
    at = settings.depths(runtime.n_layers) if isinstance(settings, HeadSettings) else [settings.depth(runtime.n_layers)]
    store.remember_model(runtime.info)
    values = {**settings.to_json(), "dtype": runtime.dtype_name}
    stream = stream_sha256(prompts)
    identity = {
        "fingerprint": runtime.info.fingerprint,
        "dtype": runtime.dtype_name,
        "stream": stream,
        "depths": list(at),
        "max_new_tokens": settings.max_new_tokens,
    }
    kept = Checkpoint(cache_root() / "training", identity, {**values, "kind": kind})
    trained: Trained[Any] = (
        train_heads(runtime, prompts, settings, on_step, kept=kept)
        if isinstance(settings, HeadSettings)
        else train_probe(runtime, prompts, settings, on_step, kept=kept)
    )
    record = record_of(kind, runtime, request.model, request.task, trained, values, stream)
    record = store_trained(store, record, trained)
    kept.remove()
    return record


def record_of(
    kind: LearnedKind,
    runtime: Runtime,
    model: str,
    task: str,
    trained: Trained[Any],
    settings: Mapping[str, Any],
    stream: str | None = None,
) -> LearnedRecord:
    """Describe what was trained for a task of the model, under the name that the caller used for it."""
    return LearnedRecord(
        kind=kind,
        model=model,
        task=task,
        fingerprint=runtime.info.fingerprint,
        depths=trained.depths,
        n_parameters=trained.model.n_parameters,
        settings=dict(settings),
        figures=trained.figures,
        curve=trained.curve,
        stream_sha256=stream,
        swiftopt_version=__version__,
        created_at=now(),
    )


def store_trained(store: Store, record: LearnedRecord, trained: Trained[Any]) -> LearnedRecord:
    """Store record and weights; the model must have been remembered. Returns the record with its version."""
    to_bytes: Callable[[Any, LearnedRecord], bytes] = heads_to_bytes if record.kind == "heads" else probe_to_bytes
    return store.add_learned(record, to_bytes(trained.model, record))
