"""Completions to JSON and back: one object for output files, the command line, the store and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .types import Completion, LayerSet, Prompt, Timings


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """A completion with its counts and rates, as the CLI and the output files show it."""
    used = completion.layer_set
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "n_tokens": completion.n_tokens,
        "finish_reason": completion.finish_reason,
        "method": completion.method,
        "lossy": completion.lossy,
        "exact": completion.exact,
        "target_passes": completion.target_passes,
        "drafted": completion.drafted,
        "accepted": completion.accepted,
        "accepted_per_position": list(completion.accepted_per_position),
        "refused": completion.refused,
        "acceptance_rate": completion.acceptance_rate,
        "mean_generated_length": completion.mean_generated_length,
        "timings": timings_to_json(completion.timings),
        "n_prompt_tokens": completion.n_prompt_tokens,
        "first_tokens": completion.first_tokens,
        "verified_widths": widths_to_json(completion.verified_widths),
        "prefill_s": completion.prefill_s,
        "layer_set": None if used is None else layer_set_to_json(used),
        "reckoned_cost": completion.reckoned_cost,
    }


def output_line(prompt: Prompt, completion: Completion) -> str:
    """A completion as a line of an output file, without the line's end."""
    values = {"id": prompt.id, "task": prompt.task, **completion_to_json(completion)}
    return json.dumps(values, ensure_ascii=False)


def completion_from_json(values: Mapping[str, Any]) -> Completion:
    """Inverse of `completion_to_json`; the rates are reckoned anew.

    Raises: KeyError, TypeError, ValueError: something is missing or of another kind.
    """
    used = values["layer_set"]
    return Completion(
        token_ids=tuple(values["token_ids"]),
        text=values["text"],
        finish_reason=values["finish_reason"],
        method=values["method"],
        n_prompt_tokens=values["n_prompt_tokens"],
        target_passes=values["target_passes"],
        first_tokens=values["first_tokens"],
        drafted=values["drafted"],
        accepted=values["accepted"],
        accepted_per_position=tuple(values["accepted_per_position"]),
        refused=values.get("refused", 0),  # as `lossy`
        verified_widths=widths_from_json(values["verified_widths"]),
        timings=timings_from_json(values["timings"]),
        prefill_s=values["prefill_s"],
        layer_set=None if used is None else layer_set_from_json(used),
        lossy=values.get("lossy", False),  # checkpoints of before there were lossy methods lack it
        exact=values.get("exact", False),
        reckoned_cost=values.get("reckoned_cost"),
    )


def timings_to_json(timings: Timings) -> dict[str, float]:
    """Seconds by part."""
    return {
        "optimise": timings.optimise_s,
        "draft": timings.draft_s,
        "verify": timings.verify_s,
        "other": timings.other_s,
    }


def timings_from_json(values: Mapping[str, Any]) -> Timings:
    """Inverse of `timings_to_json`."""
    return Timings(values["optimise"], values["draft"], values["verify"], values["other"])


def widths_to_json(widths: Mapping[int, int]) -> dict[str, int]:
    """Passes per number of rows; JSON's keys are texts."""
    return {str(n_rows): count for n_rows, count in widths.items()}


def widths_from_json(values: Mapping[str, Any]) -> dict[int, int]:
    """Inverse of `widths_to_json`."""
    return {int(n_rows): count for n_rows, count in values.items()}


def layer_set_to_json(layer_set: LayerSet) -> dict[str, Any]:
    """The bare set, without figures; `quantised` is there where something is."""
    bare: dict[str, Any] = {
        "n_layers": layer_set.n_layers,
        "skip_attn": sorted(layer_set.skip_attn),
        "skip_mlp": sorted(layer_set.skip_mlp),
    }
    return {**bare, "quantised": dict(layer_set.formats)} if layer_set.formats else bare


def layer_set_from_json(values: Mapping[str, Any]) -> LayerSet:
    """Inverse of `layer_set_to_json`.

    Raises: LayerSetError: it names layers that may not be skipped.
    """
    formats = tuple(values.get("quantised", {}).items())
    return LayerSet(values["n_layers"], frozenset(values["skip_attn"]), frozenset(values["skip_mlp"]), formats)
