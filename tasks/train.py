"""The runner behind `heads train` and `probe train`: loads, collects, trains, stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..core.learned import LearnedRecord
from ..core.streams import stream_sha256
from ..core.times import now
from ..core.types import Prompt
from ..models.early_exit import Heads, Probe, heads_to_bytes, probe_to_bytes
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
    """Train as asked, or go on with what was cut; the record as stored.

    Raises: SwiftoptError: as the parts raise it.
    """
    runtime = load(request.model, request.dtype, request.device, on_load)
    settings = request.settings
    at = (
        settings.depths(runtime.n_layers) if isinstance(settings, HeadSettings) else (settings.depth(runtime.n_layers),)
    )
    store.remember_model(runtime.info)
    values = {**settings.to_json(), "dtype": runtime.dtype_name}
    identity = {
        "fingerprint": runtime.info.fingerprint,
        "dtype": runtime.dtype_name,
        "stream": stream_sha256(prompts),
        "depths": list(at),
        "max_new_tokens": settings.max_new_tokens,
    }
    kind = "heads" if isinstance(settings, HeadSettings) else "probe"
    kept = Checkpoint(cache_root() / "training", identity, {**values, "kind": kind})
    record = _trained(runtime, request, prompts, on_step, kept, store, values)
    kept.remove()
    return record


def _trained(
    runtime: Runtime,
    request: TrainRequest,
    prompts: Sequence[Prompt],
    on_step: OnStep,
    kept: Checkpoint,
    store: Store,
    values: Mapping[str, Any],
) -> LearnedRecord:
    settings = request.settings
    if isinstance(settings, HeadSettings):
        heads = train_heads(runtime, prompts, settings, on_step, kept=kept)
        return keep_heads(store, runtime, request.model, request.task, prompts, heads, values)
    probe = train_probe(runtime, prompts, settings, on_step, kept=kept)
    return keep_probe(store, runtime, request.model, request.task, prompts, probe, values)


def keep_heads(
    store: Store,
    runtime: Runtime,
    model: str,
    task: str,
    prompts: Sequence[Prompt],
    trained: Trained[Heads],
    settings: Mapping[str, Any],
) -> LearnedRecord:
    """Store trained heads; the model must have been remembered."""
    record = _record("heads", runtime, model, task, prompts, trained, settings, trained.model.n_parameters)
    return store.add_learned(record, heads_to_bytes(trained.model, record))


def keep_probe(
    store: Store,
    runtime: Runtime,
    model: str,
    task: str,
    prompts: Sequence[Prompt],
    trained: Trained[Probe],
    settings: Mapping[str, Any],
) -> LearnedRecord:
    """Store a trained probe; the model must have been remembered."""
    record = _record("probe", runtime, model, task, prompts, trained, settings, trained.model.n_parameters)
    return store.add_learned(record, probe_to_bytes(trained.model, record))


def _record(
    kind: Any,
    runtime: Runtime,
    model: str,
    task: str,
    prompts: Sequence[Prompt],
    trained: Trained[Any],
    settings: Mapping[str, Any],
    n_parameters: int,
) -> LearnedRecord:
    return LearnedRecord(
        kind=kind,
        model=model,
        task=task,
        fingerprint=runtime.info.fingerprint,
        depths=trained.depths,
        n_parameters=n_parameters,
        settings=dict(settings),
        figures=trained.figures,
        curve=trained.curve,
        stream_sha256=stream_sha256(prompts),
        swiftopt_version=__version__,
        created_at=now(),
    )
