"""What is told of a task: its state after a round, its record for the store, and its result."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.costs import CostProfile
from ..core.events import Progress, TaskFinished
from ..core.types import Completion, LayerSetRecord, Verdict
from ..models.runtime import Runtime
from .snapshot import TaskState
from .verdict import Timed, speed


def progress_of(task: TaskState) -> Progress:
    """The state of a task after a round."""
    trials = task.search.trials
    return Progress(
        task=task.name,
        phase=task.phase,
        tokens=task.tokens,
        tok_s=task.tokens / max(1e-9, task.seconds),
        matchness=trials[-1].matchness if trials else None,
        best_matchness=task.search.matchness,
        n_trials=len(trials),
        acceptance_rate=task.accepted / task.drafted if task.drafted else None,
        mean_generated_length=task.tokens / task.rounds if task.rounds else None,
        skip_ratio=task.search.skip_ratio,
    )


def result_of(
    task: TaskState,
    record: LayerSetRecord,
    verdict: Verdict,
    costs: CostProfile,
    plain: Sequence[Timed],
    tuned: Sequence[Timed],
) -> TaskFinished:
    """The task's result, with the runs that its verdict was made of."""
    return TaskFinished(
        task=task.name,
        record=record,
        verdict=verdict,
        stopped_because=task.search.stopped_because or verdict.reason,
        trials=tuple(task.search.trials),
        timings=task.timings,
        n_prompts=task.n_prompts,
        n_tokens=task.n_tokens,
        draft_cost=costs.draft_cost(task.search.layer_set),
        plain_tok_s=speed(plain) if plain else None,
        tuned_tok_s=speed(tuned) if tuned else None,
    )


def record_of(
    task: TaskState, tuned: Sequence[Completion], verdict: Verdict, model: str, runtime: Runtime, costs: CostProfile
) -> LayerSetRecord:
    """The set in use with the figures of the `tuned` runs, or of the prompts served so far where there are none."""
    drafted, passes = sum(done.drafted for done in tuned), sum(done.target_passes for done in tuned)
    if not tuned:
        drafted, accepted, passes, tokens = task.drafted, task.accepted, task.rounds, task.tokens
    else:
        accepted = sum(done.accepted for done in tuned)
        tokens = sum(done.n_tokens - done.first_tokens for done in tuned)
    interval = verdict.interval
    return LayerSetRecord(
        model=model,
        task=task.name,
        layer_set=task.search.layer_set,
        fingerprint=runtime.info.fingerprint,
        matchness=_rounded(task.search.matchness),
        acceptance_rate=_rounded(accepted / drafted if drafted else None),
        mean_generated_length=_rounded(tokens / passes if passes else None),
        expected_speedup=_rounded(verdict.expected),
        measured_speedup=_rounded(verdict.ratio),
        measured_interval=None if interval is None else (round(interval[0], 4), round(interval[1], 4)),
        verdict=verdict.word,
        device=costs.device,
        dtype=costs.dtype,
        settings=task.search.settings.to_json(),
        prompt_state=task.shift.state,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
