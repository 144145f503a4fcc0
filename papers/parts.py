"""Makes heads, probes and Self-SD's layer sets: in full for a command, briefly where a comparison lacks them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from .. import __version__
from ..core.records import LayerSetRecord, LearnedKind, LearnedRecord
from ..core.requests import GenerateRequest, ModelRequest
from ..core.settings import Preset
from ..core.streams import stream_sha256
from ..core.types import DEFAULT_TASK, Prompt, now
from ..decoding.methods import method_info
from ..decoding.session import Session
from ..models.cache import cache_root
from ..models.loading import load
from ..models.runtime import Runtime
from ..models.saved import OnStep
from ..store import Store
from ..tasks.recipes import MakingRecipes, open_session, set_record
from . import self_sd
from .early_exit import learned_to_bytes, n_parameters
from .self_sd import Candidate, SelfSdSearch
from .training.features import Checkpoint
from .training.settings import HeadSettings, ProbeSettings, Trained
from .training.settings import OnStep as OnTrainingStep
from .training.trainer import train

# Time limits in seconds of a brief layer search, head training and probe training.
SELF_SD_S, HEADS_S, PROBE_S = 15.0, 22.0, 8.0
BRIEF_EPOCHS = 1000  # Larger than any brief training can reach: the time limit ends the training.
MIN_TOKENS = 48  # Minimum max_new_tokens of training completions; shorter ones give too few training positions.
# New tokens and prompts decoded per candidate, few enough that several candidates fit into SELF_SD_S.
SELF_SD_TOKENS, SELF_SD_PROMPTS = 24, 2


def _train_part(kind: LearnedKind, recipes: MakingRecipes, preset: Preset | None) -> LearnedRecord:
    """Train heads or a probe: with a preset's settings, otherwise for `HEADS_S` or `PROBE_S` seconds."""
    part_name, seconds = ("heads", HEADS_S) if kind == "heads" else ("a probe", PROBE_S)
    started, runtime = perf_counter(), recipes.runtime
    n_tokens = max(MIN_TOKENS, recipes.session.max_new_tokens)
    brief_settings: Mapping[str, Any] = {"epochs": BRIEF_EPOCHS} if kind == "heads" else {}
    settings_class = HeadSettings if kind == "heads" else ProbeSettings
    settings = settings_class(**(brief_settings if preset is None else preset.making), max_new_tokens=n_tokens)
    duration = f"{seconds:.0f} s" if preset is None else f"{settings.epochs} epochs"
    recipes.on_step(f"make: {part_name}, by {duration} of training")
    trained = train(runtime, recipes.prompts, settings, budget_s=seconds if preset is None else None)
    recipes.record_part(kind, f"{trained.figures['steps']:.0f} steps of training", perf_counter() - started)
    values = {**settings.to_json(), "brief": preset is None}
    record = learned_record(runtime, recipes.model, recipes.task, trained, values)
    if recipes.keep is not None:
        record = recipes.keep.add_learned(record, learned_to_bytes(trained.model, record))
    recipes.keep_weights(record, trained.model)
    return record


make_heads, make_probe = partial(_train_part, "heads"), partial(_train_part, "probe")


def make_self_sd_set(recipes: MakingRecipes, preset: Preset | None) -> LayerSetRecord:
    """Search a layer set for Self-SD: with a preset's settings, otherwise for `SELF_SD_S` seconds."""
    search_settings = dict(preset.making if preset is not None else {})
    duration = f"{SELF_SD_S:.0f} s" if preset is None else f"{search_settings['max_steps']} candidates"
    recipes.on_step(f"make: Self-SD's layer set, by {duration} of its search")
    n_tokens, n_prompts = recipes.session.max_new_tokens, search_settings.pop("n_prompts", SELF_SD_PROMPTS)
    session, budget_s = recipes.session, math.inf
    if preset is None:
        session, budget_s = Session(recipes.runtime, session.sampling, min(SELF_SD_TOKENS, n_tokens)), SELF_SD_S
    else:
        search_settings["settings"] = method_info("self-sd").settings_from(preset.settings)
    search = self_sd.search(session, recipes.prompts[:n_prompts], budget_s=budget_s, **search_settings)
    recipes.record_part("Self-SD's layer set", f"{len(search.candidates)} candidates", search.seconds)
    return recipes.keep_layer_set("self-sd", search.best.layer_set)


def search_offline(
    request: GenerateRequest,
    prompts: Sequence[Prompt],
    store: Store,
    max_steps: int,
    budget_s: float,
    on_step: OnStep,
    on_candidate: Callable[[int, Candidate], None],
) -> tuple[LayerSetRecord, SelfSdSearch]:
    """Run Self-SD's search on all prompts and store the best set, which does not become the task's best plan.

    The set's speedup is not stored: it is biased, because the search maximised it on the same prompts.

    Raises: InvalidInput, ContextOverflow: a prompt cannot be decoded with this model.
    """
    session, seed = open_session(request, prompts, store, on_step), request.sampling.seed
    search = self_sd.search(session, prompts, max_steps, budget_s, seed=seed, on_candidate=on_candidate)
    record = set_record(session.runtime, request.model, request.task or prompts[0].task, search.best.layer_set)
    return store.add_layer_set(record, plan_method="self-sd", promote=False), search


def train_and_store(
    request: ModelRequest,
    settings: HeadSettings | ProbeSettings,
    prompts: Sequence[Prompt],
    store: Store,
    on_step: OnTrainingStep,
    on_load: OnStep | None = None,
) -> LearnedRecord:
    """Train heads or a probe for the request's model and task, store them, and return their record.

    A run that was interrupted continues from its checkpoint.

    Raises: SettingsError: a layer is out of range. InvalidInput: the stream or its completions are too short.
            OutputError: the checkpoint cannot be written.
    """
    runtime = load(request.model, request.dtype, request.device, on_load)
    store.remember_model(runtime.info)
    values, stream = {**settings.to_json(), "dtype": runtime.dtype_name}, stream_sha256(prompts)
    identity = {
        "fingerprint": runtime.info.fingerprint,
        "dtype": runtime.dtype_name,
        "stream": stream,
        "depths": list(settings.depths(runtime.n_layers)),
        "max_new_tokens": settings.max_new_tokens,
    }
    checkpoint = Checkpoint(cache_root() / "training", identity, {**values, "kind": settings.KIND})
    trained = train(runtime, prompts, settings, on_step, checkpoint=checkpoint)
    record = learned_record(runtime, request.model, request.task or DEFAULT_TASK, trained, values, stream)
    record = store.add_learned(record, learned_to_bytes(trained.model, record))
    checkpoint.remove()
    return record


def learned_record(
    runtime: Runtime,
    model: str,
    task: str,
    trained: Trained,
    settings: Mapping[str, Any],
    stream: str | None = None,
) -> LearnedRecord:
    """Return the record of heads or a probe trained for a task; `model` is the name by which the caller loaded it."""
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
