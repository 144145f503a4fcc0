"""`bench decode`: compares methods on the same prompts with stored plans, as `swiftopt compare` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.costs import CostProfile, expected_of
from ..core.errors import LayerSetNotFound, SettingsError
from ..core.requests import BASE, PEERS, GenerateRequest
from ..core.settings import SwiftSettings
from ..core.types import Completion, Prompt
from ..decoding.methods import Method
from ..decoding.session import Session
from ..models.costs import machine_name
from ..models.runtime import Runtime
from ..optimizer.search import Search
from ..optimizer.task_state import sub_layers_of
from ..store import Store
from ..tasks.compare import first_turns
from ..tasks.generate import Planner
from ..tasks.recipes import stored_costs
from ..tasks.report import Decode, Decoded, Figures, Interleaved, OnRun, Runs, decoder, figures, peer

SCHEMA = "swiftopt.bench-decode/1"


def run_methods(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    methods: Sequence[str],
    request: GenerateRequest,
    store: Store | None,
    on_run: OnRun | None = None,
    draft: Runtime | None = None,
    ignore_eos: bool = False,
) -> dict[str, Any]:
    """Decode every prompt with every method, after a warm-up of each; the order rotates from prompt to prompt.

    `best` is the stored plan of the prompt's task; `draft` is the draft model of `hf-assisted`. `swift` drafts with the
    request's layer set or the stored one; without either it searches while it decodes, and that time counts. Only the
    first turn of a chat is decoded. With `ignore_eos`, completions do not end at stop tokens. After Ctrl-C the result
    covers the prompts that every method has decoded.

    Returns: the object that `swiftopt bench decode --json` prints.
    Raises:  SettingsError: `methods` is empty or contains an unknown name. LayerSetNotFound, LearnedNotFound: a method
             has nothing stored. KeyboardInterrupt: before every method has decoded a prompt.
    """
    if not methods:
        raise SettingsError("no method is named: use --methods")
    session = Session(runtime, request.sampling, request.max_new_tokens, ignore_eos=ignore_eos)
    prompts = first_turns(prompts)
    n_positions = max(session.check(prompt) for prompt in prompts)
    costs = stored_costs(runtime, store, n_positions) if store is not None and "swift" in methods else None
    base_method = BASE if BASE in methods else methods[0]

    def decoder_of(name: str) -> Decode:
        if name in PEERS:
            return peer(name, session, draft)
        planner = Planner(replace(request, method=None if name == "best" else name), runtime, store)
        return _decoder_by_task(session, planner, costs)

    decoders = {name: decoder_of(name) for name in (base_method, *methods)}
    interleaved = Interleaved(decoders, prompts, on_run=on_run, complete=True)
    is_complete, all_runs = interleaved.run(), interleaved.runs.values()
    n_done = min(len(runs.by_prompt) for runs in all_runs)
    if not n_done:
        raise KeyboardInterrupt
    for runs in all_runs:
        runs.by_prompt = {number: runs.by_prompt[number] for number in range(n_done)}
    return {
        "schema": SCHEMA,
        "interrupted": not is_complete,
        "model": request.model,
        "device": machine_name(runtime),
        "dtype": runtime.dtype_name,
        "torch": torch.__version__,
        "max_new_tokens": request.max_new_tokens,
        "prompts": n_done,
        "base": base_method,
        "results": [_result(interleaved.runs[name], interleaved.runs[base_method], costs) for name in methods],
        "ignore_eos": ignore_eos,
    }


def _result(method_runs: Runs, base_runs: Runs, costs: CostProfile | None) -> dict[str, Any]:
    row = figures(Figures(method_runs.name), method_runs, base_runs, len(method_runs.by_prompt), None)
    decode_ratio, expected_ratio = _decode_ratios(_completions(method_runs), _completions(base_runs), costs)
    ratio = row.ratio or 0.0
    return {
        "method": method_runs.name,
        "tokens": row.tokens,
        "seconds": round(row.seconds, 3),
        "tok_s": round(row.tok_s or 0.0, 3),
        "ratio": round(ratio, 4),
        "ratio_interval": [round(bound, 4) for bound in row.ratio_interval or (ratio, ratio)],
        "acceptance_rate": row.acceptance_rate,
        "mean_generated_length": row.mean_generated_length,
        "identical": row.identical,
        "of": row.of,
        "decode_ratio": decode_ratio,
        "expected_ratio": expected_ratio,
        "decoded_with": sorted({completion.method for completion in _completions(method_runs)}),
        "optimise_seconds": round(sum(completion.timings.optimise_s for completion in _completions(method_runs)), 3),
    }


def _completions(runs: Runs) -> list[Completion]:
    return [run.completion for run in runs.by_prompt.values() if run.completion is not None]


def _decode_ratios(
    method_completions: Sequence[Completion], base_completions: Sequence[Completion], costs: CostProfile | None
) -> tuple[float | None, float | None]:
    """Return the ratio of decoding speeds without prefill and search, and the ratio expected from measured costs.

    The expected ratio is that of Eq. 6 for one layer set, or the estimate of a drafter that decides by costs. Both are
    None if there is no such estimate, or no target pass after prefill.
    """
    expected_ratio = expected_of(costs, method_completions)
    if expected_ratio is None or not all(
        sum(completion.target_passes for completion in completions)
        for completions in (method_completions, base_completions)
    ):
        return None, None
    speeds = [
        sum(completion.n_tokens - completion.first_tokens for completion in completions)
        / sum(
            completion.timings.total_s - completion.prefill_s - completion.timings.optimise_s
            for completion in completions
        )
        for completions in (method_completions, base_completions)
    ]
    return speeds[0] / speeds[1], expected_ratio


def _decoder_by_task(session: Session, planner: Planner, costs: CostProfile | None) -> Decode:
    """Return a decoder with each task's method; without a layer set, `swift` searches over the prompts of a task."""
    by_task: dict[str, Decode] = {}

    def method(task: str) -> Method | Search:
        try:
            return planner.plan_for(task)[0]
        except LayerSetNotFound:
            if planner.request.method != "swift":
                raise
            settings = planner.request.settings or SwiftSettings()
            ratio = settings.start_skip_ratio(planner.runtime.info.n_parameters)
            return Search(task, planner.runtime.whole, sub_layers_of(planner.runtime), settings, ratio, costs)

    def run(prompt: Prompt) -> Decoded:
        task = planner.request.task or prompt.task
        if task not in by_task:
            by_task[task] = decoder(session, method(task))
        return by_task[task](prompt)

    return run
