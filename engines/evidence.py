"""Reads two runs of an engine's own benchmark, plain and with a plan, and derives the plan's verdict.

The benchmarks are results of `vllm bench serve --save-result --save-detailed`, or answers of llama.cpp's server with
their `timings`, one JSON object per line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from ..core.errors import FileNotFound, InvalidInput
from ..core.records import FoundPlan, Plan
from ..core.types import Verdict
from ..optimizer.verdict import Timed, judge
from ..store import Store


@dataclass(frozen=True, slots=True)
class EngineRun:
    """The requests of one benchmark."""

    timed: tuple[Timed, ...]  # Tokens and seconds of each request, prefill included.
    prompt_tokens: tuple[int, ...] = ()  # Length of each prompt; empty if unknown.
    drafted: int | None = None  # Tokens of all requests; None: the engine did not count them.
    accepted: int | None = None

    @property
    def acceptance(self) -> float | None:
        """Accepted / drafted tokens; None if nothing was drafted."""
        return (self.accepted or 0) / self.drafted if self.drafted else None


def read_run(path: Path) -> EngineRun:
    """Read the file of an engine's benchmark.

    Raises: FileNotFound: there is no such file. InvalidInput: it has another format, or a request failed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileNotFound(f"there is no file {path}: check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read ({error}): give the file that the benchmark wrote") from error
    try:
        objects = _objects(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON ({error}): give the file that the benchmark wrote") from error
    try:
        if len(objects) == 1 and "output_throughput" in objects[0]:
            return _checked(_of_vllm(objects[0], path), path)
        if objects and all("timings" in line or "predicted_ms" in line for line in objects):
            return _checked(_of_llamacpp([line.get("timings", line) for line in objects]), path)
    except InvalidInput:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(
            f"{path} lacks a field of a benchmark, or one is wrong ({error}): give the file that the benchmark wrote"
        ) from error
    raise InvalidInput(
        f"{path} is not a known benchmark: give the file of `vllm bench serve --save-result --save-detailed`, or"
        " answers of llama.cpp's server, one per line"
    )


def _checked(run: EngineRun, path: Path) -> EngineRun:
    """Return the run.

    Raises: InvalidInput: a request has a negative number of tokens, or its time is not positive and finite.
    """
    for number, timed in enumerate(run.timed, start=1):
        if timed.tokens < 0 or not 0 < timed.seconds < inf:
            raise InvalidInput(
                f"request {number} in {path} has {timed.tokens} tokens in {timed.seconds} s: run the benchmark again"
            )
    return run


def _objects(text: str) -> list[Any]:
    """Return the values of a file that is one JSON list or has one JSON value per line."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return parsed if isinstance(parsed, list) else [parsed]


def _of_vllm(values: Mapping[str, Any], path: Path) -> EngineRun:
    if "output_lens" not in values or "latencies" not in values:
        raise InvalidInput(f"{path} has totals only: run `vllm bench serve` with --save-detailed as well")
    errors = [error for error in values.get("errors", ()) if error]
    if errors:
        raise InvalidInput(f"{path} has {len(errors)} requests that failed ({errors[0][:80]}): run it again")
    timed = tuple(
        Timed(int(n), float(seconds)) for n, seconds in zip(values["output_lens"], values["latencies"], strict=True)
    )
    names = ("spec_decode_draft_tokens", "spec_decode_accepted_tokens")
    counts = (None if values.get(name) is None else int(values[name]) for name in names)
    return EngineRun(timed, tuple(values.get("input_lens", ())), *counts)


def _of_llamacpp(timings: Sequence[Mapping[str, Any]]) -> EngineRun:
    timed = tuple(
        Timed(int(timing["predicted_n"]), (float(timing["prompt_ms"]) + float(timing["predicted_ms"])) / 1000)
        for timing in timings
    )
    with_drafts = [timing for timing in timings if "draft_n" in timing]
    counts = [sum(int(timing[name]) for timing in with_drafts) for name in ("draft_n", "draft_n_accepted")]
    # Prompt lengths stay unknown: `prompt_n` excludes cached tokens, so it differs between runs of the same prompt.
    return EngineRun(timed, (), *(counts if with_drafts else (None, None)))


def import_evidence(
    store: Store, model: str, task: str, plan: Plan, plain: Path, drafted: Path
) -> tuple[FoundPlan, Verdict, EngineRun]:
    """Store a plan for an engine, with the verdict of its benchmark: the files `plain`, and `drafted` with the plan.

    If the verdict is not "use", plain decoding is stored instead, with the measured ratio.

    Raises: as `read_run`. InvalidInput: the files have different requests. StoreError: the model is not known.
    """
    plain_run, drafted_run = read_run(plain), read_run(drafted)
    if len(plain_run.timed) != len(drafted_run.timed):
        raise InvalidInput(
            f"{plain} has {len(plain_run.timed)} requests and {drafted} {len(drafted_run.timed)}:"
            " run both on the same prompts"
        )
    if plain_run.prompt_tokens and drafted_run.prompt_tokens:
        lengths = zip(plain_run.prompt_tokens, drafted_run.prompt_tokens, strict=True)
        for number, (n_plain, n_drafted) in enumerate(lengths, start=1):
            if n_plain != n_drafted:
                raise InvalidInput(
                    f"prompt {number} has {n_plain} tokens in {plain} and {n_drafted} in {drafted}: run both on the"
                    " same prompts, in the same order"
                )
    verdict = judge(drafted_run.timed, plain_run.timed, None)
    stored = store.add_plan(model, task, judged(plan, verdict, drafted_run.acceptance))
    return stored, verdict, drafted_run


def judged(plan: Plan, verdict: Verdict, acceptance_rate: float | None = None) -> Plan:
    """Return the plan to store for an engine: `plan` with its figures if the verdict is "use", else plain decoding.

    Args: acceptance_rate: acceptance rate in the verdict's runs; None: the engine did not count drafts.
    """
    plan = replace(plan, verdict=verdict.word, measured_speedup=verdict.ratio, measured_interval=verdict.interval)
    if verdict.word == "use":
        return replace(plan, acceptance_rate=acceptance_rate)
    version = {name: value for name, value in plan.settings.items() if name == "engine_version"}
    return replace(plan, method="plain", layer_set=None, draft_model=None, settings=version)
