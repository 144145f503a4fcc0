"""Self-SD's offline search on a stream, its best layer set stored under the method it was found for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from .. import __version__
from ..core.requests import GenerateRequest
from ..core.times import now
from ..core.types import LayerSetRecord, Prompt
from ..decoding.session import Session
from ..models.costs import machine_name
from ..models.loading import load
from ..optimizer.self_sd import Candidate, SelfSdSearch, search
from ..store import Store

METHOD = "self-sd"


def search_offline(
    request: GenerateRequest,
    prompts: Sequence[Prompt],
    store: Store,
    max_steps: int,
    budget_s: float,
    on_step: Callable[[str], None],
    on_candidate: Callable[[int, Candidate], None],
) -> tuple[LayerSetRecord, SelfSdSearch]:
    """Search on all of `prompts` and store the outcome as a version that `best` does not mean.

    No figure of the search goes with it: it maximised them on its own prompts, and they would flatter.

    Raises: InvalidInput, ContextOverflow: a prompt cannot be decoded with this model.
    """
    runtime = load(request.model, request.dtype, request.device, on_step)
    store.remember_model(runtime.info)
    session = Session(runtime, request.sampling, request.max_new_tokens)
    for prompt in prompts:
        session.check(prompt)
    found = search(session, prompts, None, max_steps, budget_s, seed=request.sampling.seed, on_candidate=on_candidate)
    record = LayerSetRecord(
        model=request.model,
        task=request.task or prompts[0].task,
        layer_set=found.best.layer_set,
        fingerprint=runtime.info.fingerprint,
        device=machine_name(runtime),
        dtype=runtime.dtype_name,
        swiftopt_version=__version__,
        created_at=now(),
    )
    return store.add_layer_set(record, plan_method=METHOD, promote=False), found


def typical_ratio(found: SelfSdSearch) -> float:
    """The median ratio of all candidates to plain decoding: what a random one would give."""
    return median(candidate.ratio for candidate in found.candidates)
