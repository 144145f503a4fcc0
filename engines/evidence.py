"""Reads two runs of an engine's own benchmark, plain and with a plan, and derives the plan's verdict from them.

It reads the results of `vllm bench serve --save-result --save-detailed`, and answers of llama.cpp's server, which carry
`timings`, one JSON object per line.
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
    """One benchmark: each request's tokens and seconds, prefill included, and its prompt's tokens where they are known.

    `drafted` and `accepted` are tokens of all requests together; None: the engine did not count them.
    """

    timed: tuple[Timed, ...]
    prompt_tokens: tuple[int, ...] = ()
    drafted: int | None = None
    accepted: int | None = None

    @property
    def acceptance(self) -> float | None:
        """Return accepted / drafted tokens; None where nothing was drafted."""
        return (self.accepted or 0) / self.drafted if self.drafted else None


def read_run(path: Path) -> EngineRun:
    """Read an engine's benchmark.

    Raises: FileNotFound: there is no such file. InvalidInput: it is none of the formats, or a request of it failed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileNotFound(f"there is no file {path}: check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read ({error}): give an engine's benchmark as text") from error
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
        raise InvalidInput(f"{path} lacks what a benchmark has ({error}): give the file as it was written") from error
    raise InvalidInput(
        f"{path} is no benchmark that is known: give the file of `vllm bench serve --save-result --save-detailed`, or"
        " answers of llama.cpp's server, one per line"
    )


def _checked(run: EngineRun, path: Path) -> EngineRun:
    """Raises: InvalidInput: a request has a negative token count, or its time is not positive and finite."""
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
    failed = [error for error in values.get("errors", ()) if error]
    if failed:
        raise InvalidInput(f"{path} has {len(failed)} requests that failed ({failed[0][:80]}): run it again")
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
    drafting = [timing for timing in timings if "draft_n" in timing]
    counts = [sum(int(timing[name]) for timing in drafting) for name in ("draft_n", "draft_n_accepted")]
    # Prompt lengths stay empty: `prompt_n` excludes cached tokens, so it cannot identify a prompt.
    return EngineRun(timed, (), *(counts if drafting else (None, None)))


def import_evidence(
    store: Store, model: str, task: str, plan: Plan, plain: Path, drafted: Path
) -> tuple[FoundPlan, Verdict, EngineRun]:
    """Store a plan for an engine with the verdict of the engine's benchmark, plain and with the plan.

    If the verdict is not "use", plain decoding is stored instead, with the measured ratio.

    Raises: as `read_run`; InvalidInput: the two are not of the same requests. StoreError: the model is not known.
    """
    base, drafted_run = read_run(plain), read_run(drafted)
    if len(base.timed) != len(drafted_run.timed):
        raise InvalidInput(
            f"{plain} has {len(base.timed)} requests and {drafted} {len(drafted_run.timed)}:"
            " run both on the same prompts"
        )
    if base.prompt_tokens and drafted_run.prompt_tokens:
        for number, (one, other) in enumerate(zip(base.prompt_tokens, drafted_run.prompt_tokens, strict=True), start=1):
            if one != other:
                raise InvalidInput(
                    f"prompt {number} has {one} tokens in {plain} and {other} in {drafted}: run both on the same"
                    " prompts, in the same order"
                )
    verdict = judge(drafted_run.timed, base.timed, None)
    stored = store.add_plan(model, task, judged(plan, verdict, drafted_run.acceptance))
    return stored, verdict, drafted_run


def judged(plan: Plan, verdict: Verdict, acceptance_rate: float | None = None) -> Plan:
    """Return the plan to store for an engine: `plan` itself if the verdict is "use", else plain decoding.

    Args: acceptance_rate: of its drafts in the runs of the verdict; None: the engine did not count them.
    """
    plan = replace(plan, verdict=verdict.word, measured_speedup=verdict.ratio, measured_interval=verdict.interval)
    if verdict.word == "use":
        return replace(plan, acceptance_rate=acceptance_rate)
    kept = {name: value for name, value in plan.settings.items() if name == "engine_version"}
    return replace(plan, method="plain", layer_set=None, draft_model=None, settings=kept)
