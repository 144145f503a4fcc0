"""Events to JSON and back: how a job's events are stored, sent over HTTP, and drawn by whoever follows it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, get_args

from .completions import completion_from_json, completion_to_json, layer_set_from_json, layer_set_to_json
from .errors import StoreError
from .events import Adopted, DraftingChosen, Event, PromptFinished, TaskFinished, TrialsDone
from .records import record_to_json, stored_from_json
from .typed import check_type
from .types import Prompt, Timings, Trial, Verdict

TYPES: dict[str, type[Any]] = {re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in get_args(Event)}
NAMES = {kind: name for name, kind in TYPES.items()}


def event_type(event: Event) -> str:
    """The event's name: prompt_finished, trials_done ..."""
    return NAMES[type(event)]


def event_to_json(event: Event) -> dict[str, Any]:
    """The event's values without its name. The trials of `TaskFinished` are left out: `TrialsDone` brought them."""
    match event:
        case TrialsDone():
            return {"task": event.task, "trials": [trial_to_json(trial) for trial in event.trials]}
        case Adopted():
            return {**_plain(event), "layer_set": layer_set_to_json(event.layer_set)}
        case DraftingChosen():
            return {**_plain(event), "branching": [list(pair) for pair in event.branching]}
        case PromptFinished():
            prompt = {"id": event.prompt.id, "task": event.prompt.task}
            completion = completion_to_json(event.completion)
            return {"prompt": prompt, "index": event.index, "completion": completion, "held_out": event.held_out}
        case TaskFinished():
            record = {**record_to_json(event.record), "job": event.record.job}
            parts = {"record": record, "verdict": dataclasses.asdict(event.verdict)}
            return {**_plain(event), **parts, "timings": dataclasses.asdict(event.timings), "trials": None}
        case _:
            return _plain(event)


def event_from_json(name: str, values: Mapping[str, Any]) -> Event:
    """Inverse of `event_to_json`.

    Raises: StoreError: there is no such event, or its values were changed by hand.
    """
    try:
        kind = TYPES[name]
        event = kind(**{**values, **_parts(kind, values)})
        check_type(event, kind, name)
        return event  # type: ignore[no-any-return]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"an event {name!r} of the job cannot be read ({error!r}): it was changed by hand, or by a newer swiftopt"
        ) from error


def trial_to_json(trial: Trial) -> dict[str, Any]:
    """One scored candidate."""
    return {**_plain(trial), "layer_set": layer_set_to_json(trial.layer_set)}


def trial_from_json(values: Mapping[str, Any]) -> Trial:
    """Inverse of `trial_to_json`."""
    return Trial(**{**values, "layer_set": layer_set_from_json(values["layer_set"])})


def _parts(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values that are not plain."""
    if kind is TrialsDone:
        return {"trials": tuple(trial_from_json(trial) for trial in values["trials"])}
    if kind is Adopted:
        return {"layer_set": layer_set_from_json(values["layer_set"])}
    if kind is DraftingChosen:
        return {"branching": tuple((bound, k) for bound, k in values["branching"])}
    if kind is PromptFinished:
        return {"prompt": Prompt(**values["prompt"]), "completion": completion_from_json(values["completion"])}
    if kind is TaskFinished:
        verdict = dict(values["verdict"])
        verdict["interval"] = tuple(verdict["interval"]) if verdict.get("interval") else None
        return {
            "record": stored_from_json(values["record"], "the job's result"),
            "verdict": Verdict(**verdict),
            "timings": Timings(**values["timings"]),
            "trials": (),
        }
    return {}


def _plain(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
