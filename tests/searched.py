"""A store that the dashboard's pages have something to show of: versions of plans, a search, and what was judged."""

from __future__ import annotations

import random
from dataclasses import replace

from job_table import finished, running, task_finished, tune

from swiftopt.core.costs import CostProfile, FormatCosts
from swiftopt.core.events import TrialsDone
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import ModelInfo, Plan
from swiftopt.core.requests import Lease
from swiftopt.core.types import Prompt, Trial
from swiftopt.store import Store

MODEL = ModelInfo("f" * 16, "LlamaForCausalLM", 8, 1000, ("m",))
COSTS = CostProfile(
    MODEL.fingerprint,
    "cpu",
    "float32",
    256,
    MODEL.n_layers,
    0.01,
    0.02,
    0.03,
    0.01,
    {1: 0.28, 4: 0.3},
    {"int4": FormatCosts(0.004, 0.008, 0.01, 0.01)},
)
AT_ONCE = 500
PAIRS = ((6, 10.0, 6, 8.0),)


def trials(n: int, start: int = 0) -> list[Trial]:
    """Trials of sets that are nearly all different; the more one leaves out, the lower its matchness."""
    rng = random.Random(start)
    made = []
    for step in range(start, start + n):
        attn, mlp = ({layer for layer in range(1, 7) if rng.random() < 0.4} for _ in range(2))
        formats = tuple((f"mlp:{layer}", "int4") for layer in range(1, 7) if rng.random() < 0.1) or (("mlp", "int4"),)
        matchness = max(0.0, min(1.0, 1 - 0.05 * len(attn | mlp) + rng.gauss(0, 0.05)))
        score = 1 + matchness + rng.gauss(0, 0.1)
        layer_set = LayerSet(8, frozenset(attn), frozenset(mlp), formats)
        made.append(Trial(step, layer_set, "random", matchness, score, "p", adopted=step % 50 == 0, seconds=0.1))
    return made


def searching(store: Store, n_trials: int, task: str = "code") -> Lease:
    """A running job with so many trials."""
    lease = running(store.jobs, tune())
    found = trials(n_trials)
    for at in range(0, n_trials, AT_ONCE):
        store.jobs.checkpoint(lease, 1 + at // AT_ONCE, [TrialsDone(task, tuple(found[at : at + AT_ONCE]))], {})
    return lease


def fill(store: Store, task: str = "code", evidence: tuple[tuple[int, float, int, float], ...] = PAIRS) -> str:
    """Store a model with costs, and a job that has made version 1 of its task; 2 is another set, 3 plain decoding."""
    store.remember_model(MODEL)
    store.save_cost_profile(COSTS)
    lease = searching(store, 40, task)
    store.jobs.checkpoint(lease, 2, [replace(finished(3, held_out=True), prompt=Prompt("p3", task))], {})
    done = task_finished(lease.job, task)
    record = replace(done.record, fingerprint=MODEL.fingerprint, device="cpu", dtype="float32", evidence=evidence)
    store.jobs.finish_task(lease, 3, replace(done, record=record), "adaptive", "always", {})
    store.jobs.end(lease, "succeeded")
    other = LayerSet(8, frozenset({2, 3}), frozenset({3}), (("attn", "int8"), ("mlp", "int4")))
    pairs = ((8, 4.0, 8, 2.0), (8, 4.0, 8, 5.0))
    store.add_layer_set(replace(record, layer_set=other, job=None, acceptance_rate=0.7, evidence=pairs))
    store.add_plan("m", task, Plan("plain", verdict="plain", device="cpu", dtype="float32"), promote=False)
    return lease.job
