"""Results as the JSON objects that `--json` prints; each has a `schema` key with a version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..core.completions import completion_to_json, timings_to_json
from ..core.events import TaskFinished
from ..core.jobs import Job, job_to_json
from ..core.plans import plan_to_json
from ..core.records import record_to_json
from ..core.types import Completion, FoundPlan, LayerSetRecord, ModelInfo, Prompt, Trial

if TYPE_CHECKING:
    from ..tasks.generate import GenerateInfo


def task_json(finished: TaskFinished, command: Sequence[str]) -> dict[str, Any]:
    """One task of a tuning run; its trials are in the store, under the run's job."""
    return {
        "task": finished.task,
        "layer_set": record_to_json(finished.record),
        "verdict": asdict(finished.verdict),
        "stopped_because": finished.stopped_because,
        "n_trials": len(finished.trials),
        "n_prompts": finished.n_prompts,
        "n_tokens": finished.n_tokens,
        "draft_cost": finished.draft_cost,
        "plain_tok_s": finished.plain_tok_s,
        "tuned_tok_s": finished.tuned_tok_s,
        "timings": timings_to_json(finished.timings),
        "command": list(command),
    }


def tune_json(
    model: str, job: str, out: str | None, database: str, tasks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A tuning run; `out` is None where nobody has written its completions to a file."""
    return {
        "schema": "swiftopt.tune/1",
        "model": model,
        "job": job,
        "out": out,
        "database": database,
        "tasks": list(tasks),
    }


def submitted_json(job: Job, new: bool) -> dict[str, Any]:
    """A job that nobody follows; `new` is false where an unfinished job already does the same."""
    return {"schema": "swiftopt.submitted/1", "job": job.id, "state": job.state, "new": new}


def jobs_json(jobs: Sequence[Job]) -> dict[str, Any]:
    """Jobs, newest first."""
    return {"schema": "swiftopt.jobs-list/1", "jobs": [job_to_json(job) for job in jobs]}


def completion_json(model: str, prompt: Prompt, completion: Completion, info: GenerateInfo) -> dict[str, Any]:
    """A completion and how it came about; `layer_set` is the one that was used, null for plain decoding."""
    used = info.record if completion.method != "plain" else None
    return {
        "schema": "swiftopt.generate/1",
        "id": prompt.id,
        "task": prompt.task,
        "model": model,
        **completion_to_json(completion),
        "layer_set": record_to_json(used) if used else None,
        "fallback": info.fallback,
        "verdict": info.verdict,
    }


def list_json(records: Sequence[tuple[LayerSetRecord, bool]]) -> dict[str, Any]:
    """Stored layer sets, newest first; `best` says whether look-ups on their device and dtype find them."""
    sets = [{**record_to_json(record), "best": best} for record, best in records]
    return {"schema": "swiftopt.layers-list/1", "layer_sets": sets}


def show_json(record: LayerSetRecord, trials: Sequence[Trial], png: str | None) -> dict[str, Any]:
    """A layer set with the trials of the run that found it."""
    return {
        "schema": "swiftopt.layers-show/1",
        "layer_set": record_to_json(record),
        "trials": [trial_json(trial) for trial in trials],
        "png": png,
    }


def trial_json(trial: Trial) -> dict[str, Any]:
    """One scored candidate."""
    return {
        "step": trial.step,
        "origin": trial.origin,
        "matchness": trial.matchness,
        "score": trial.score,
        "adopted": trial.adopted,
        "skip_attn": sorted(trial.layer_set.skip_attn),
        "skip_mlp": sorted(trial.layer_set.skip_mlp),
    }


def plan_json(schema: str, model: str, task: str, found: FoundPlan) -> dict[str, Any]:
    """What an alias means after it was moved."""
    return {
        "schema": schema,
        "model": model,
        "task": task,
        "alias": found.alias,
        "version": found.version,
        **plan_to_json(found.plan),
    }


def import_json(records: Sequence[tuple[LayerSetRecord, bool]]) -> dict[str, Any]:
    """Imported layer sets, and whether each became the best one."""
    sets = [{**record_to_json(record), "promoted": promoted} for record, promoted in records]
    return {"schema": "swiftopt.layers-import/1", "layer_sets": sets}


def models_json(
    aliases: Mapping[str, Any], stored: Sequence[ModelInfo], tasks_of: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The short names, the models that were loaded here, and the tasks tuned under each name."""
    return {
        "schema": "swiftopt.models/1",
        "aliases": [{"alias": name, **asdict(alias)} for name, alias in aliases.items()],
        "stored": [{**asdict(info), "names": list(info.names)} for info in stored],
        "tasks": {name: list(tasks) for name, tasks in tasks_of.items()},
    }
