"""Train heads or a probe for a model and task, and store them: what `heads train` and `probe train` run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..core.records import LearnedRecord
from ..core.streams import stream_sha256
from ..core.types import Prompt, now
from ..models.early_exit import learned_to_bytes, n_parameters
from ..models.loading import load
from ..models.runtime import Runtime
from ..models.saved import cache_root
from ..store import Store
from ..training import descent
from ..training.features import Checkpoint
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
    store.remember_model(runtime.info)
    values = {**settings.to_json(), "dtype": runtime.dtype_name}
    stream = stream_sha256(prompts)
    identity = {
        "fingerprint": runtime.info.fingerprint,
        "dtype": runtime.dtype_name,
        "stream": stream,
        "depths": list(settings.depths(runtime.n_layers)),
        "max_new_tokens": settings.max_new_tokens,
    }
    kept = Checkpoint(cache_root() / "training", identity, {**values, "kind": settings.KIND})
    trained = descent.train(runtime, prompts, settings, on_step, kept=kept)
    record = record_of(runtime, request.model, request.task, trained, values, stream)
    record = store.add_learned(record, learned_to_bytes(trained.model, record))
    kept.remove()
    return record


def record_of(
    runtime: Runtime,
    model: str,
    task: str,
    trained: Trained,
    settings: Mapping[str, Any],
    stream: str | None = None,
) -> LearnedRecord:
    """Describe what was trained for a task of the model, under the name that the caller used for it."""
    return LearnedRecord(
        kind=trained.model.KIND,
        model=model,
        task=task,
        fingerprint=runtime.info.fingerprint,
        depths=trained.model.depths,
        n_parameters=n_parameters(trained.model),
        settings=dict(settings),
        figures=trained.figures,
        curve=trained.curve,
        stream_sha256=stream,
        swiftopt_version=__version__,
        created_at=now(),
    )
