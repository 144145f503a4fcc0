"""Decoding methods side by side on the same prompts, interleaved in one process: how fast, and is it the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import torch

from ..core.costs import CostProfile
from ..core.errors import LayerSetNotFound, SettingsError
from ..core.requests import GenerateRequest
from ..core.settings import SwiftSettings
from ..core.types import Completion, Prompt
from ..decoding.methods import METHODS as METHOD_INFOS
from ..decoding.methods import PLAIN, Method
from ..decoding.session import Session
from ..models.costs import machine_name
from ..models.runtime import Runtime
from ..optimizer.drafting import expected_of
from ..optimizer.search import Search
from ..optimizer.verdict import Timed, bootstrap_interval, speed_ratio
from ..store import Store
from ..tasks.generate import Planner
from ..tasks.runs import first_turn
from ..tasks.stored_costs import stored_costs

HF_OPTIONS = ("hf-plain", "hf-lookup", "hf-assistant")
METHODS = (*METHOD_INFOS, "best", *HF_OPTIONS)
LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens of hf-lookup, the value of transformers' documentation
SCHEMA = "swiftopt.bench-decode/1"


class Runner(Protocol):
    """One method: decodes a prompt and says which tokens came out."""

    def __call__(self, prompt: Prompt, /) -> tuple[tuple[int, ...], Completion | None]: ...


@dataclass(slots=True)
class MethodRuns:
    """All runs of one method, prompt by prompt."""

    method: str
    token_ids: list[tuple[int, ...]]
    timed: list[Timed]
    completions: list[Completion]

    def rate(self, over: Callable[[Completion], float], under: Callable[[Completion], float]) -> float | None:
        """Ratio of two sums over the completions; None where the lower one is 0."""
        below = sum(map(under, self.completions))
        return sum(map(over, self.completions)) / below if below else None


def run_methods(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    methods: Sequence[str],
    request: GenerateRequest,
    store: Store | None,
    on_run: Callable[[str, int, int, Timed], None] | None = None,
    assistant: Runtime | None = None,
    ignore_eos: bool = False,
) -> dict[str, Any]:
    """Decode every prompt with every method, their order rotating from prompt to prompt, after one warm-up each.

    `best` is what the stored plan of the prompt's task says; `assistant` drafts for `hf-assistant`. `swift` drafts with
    the request's layer set or the stored one; with neither it searches while it decodes, and the time of that counts.
    Chats are cut to their first turn, so that all methods see the same ids. With `ignore_eos` stop tokens end nothing.

    Returns: the object that `swiftopt bench decode --json` prints.
    Raises:  SettingsError: a method is unknown, or there is nothing to compare.
    """
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods:
        raise SettingsError(f"unknown methods {unknown}: known are {', '.join(METHODS)}")
    session = Session(runtime, request.sampling, request.max_new_tokens, ignore_eos=ignore_eos)
    prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
    n_positions = max(session.check(prompt) for prompt in prompts)
    if "hf-assistant" in methods and assistant is None:
        raise SettingsError("hf-assistant needs a model that drafts: pass --assistant MODEL")
    costs = stored_costs(runtime, store, n_positions) if store is not None and "swift" in methods else None
    runners = {method: _runner(method, runtime, session, request, store, costs, assistant) for method in methods}
    for runner in runners.values():
        runner(replace(prompts[0], max_new_tokens=4))  # so that no method pays for first allocations later
    runs = {method: MethodRuns(method, [], [], []) for method in methods}
    for number, prompt in enumerate(prompts):
        turn = number % len(methods)
        for method in [*methods[turn:], *methods[:turn]]:
            clock = perf_counter()
            token_ids, completion = runners[method](prompt)
            timed = Timed(len(token_ids), perf_counter() - clock)
            runs[method].token_ids.append(token_ids)
            runs[method].timed.append(timed)
            runs[method].completions += [completion] if completion is not None else []
            if on_run is not None:
                on_run(method, number, len(prompts), timed)
    return {**_report(runtime, request, runs, costs, len(prompts)), "ignore_eos": ignore_eos}


def _report(
    runtime: Runtime,
    request: GenerateRequest,
    runs: dict[str, MethodRuns],
    costs: CostProfile | None,
    n_prompts: int,
) -> dict[str, Any]:
    base = runs.get("plain") or next(iter(runs.values()))
    return {
        "schema": SCHEMA,
        "model": request.model,
        "device": machine_name(runtime),
        "dtype": runtime.dtype_name,
        "torch": torch.__version__,
        "max_new_tokens": request.max_new_tokens,
        "prompts": n_prompts,
        "base": base.method,
        "results": [_result(own, base, costs) for own in runs.values()],
    }


def _result(own: MethodRuns, base: MethodRuns, costs: CostProfile | None) -> dict[str, Any]:
    tokens, seconds = sum(t.tokens for t in own.timed), sum(t.seconds for t in own.timed)
    drafted = own.rate(lambda done: done.accepted, lambda done: done.drafted)
    decode_ratio, expected = _against_expected(own, base, costs)
    return {
        "method": own.method,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tok_s": round(tokens / seconds, 3),
        "ratio": round(speed_ratio(own.timed, base.timed), 4),
        "ratio_interval": [round(end, 4) for end in bootstrap_interval(own.timed, base.timed)],
        "acceptance_rate": drafted,
        "mean_generated_length": own.rate(lambda done: done.n_tokens - done.first_tokens, lambda d: d.target_passes),
        "identical": sum(a == b for a, b in zip(own.token_ids, base.token_ids, strict=True)),
        "of": len(base.token_ids),
        "decode_ratio": decode_ratio,
        "expected_ratio": expected,
        "decoded_with": sorted({done.method for done in own.completions}),
        "optimise_seconds": round(sum(done.timings.optimise_s for done in own.completions), 3),
    }


def _against_expected(
    own: MethodRuns, base: MethodRuns, costs: CostProfile | None
) -> tuple[float | None, float | None]:
    """Ratio of decoding time without prefill and search, and what measured costs say of it.

    The expected ratio is Eq. 6's for one layer set, and the drafter's own reckoning where it decides by such costs;
    None where neither is there, or no target pass came after the prefill.
    """
    passes = [sum(done.target_passes for done in runs.completions) for runs in (own, base)]
    expected = expected_of(costs, own.completions)
    if expected is None or not all(passes):
        return None, None
    speeds = [
        sum(done.n_tokens - done.first_tokens for done in runs.completions)
        / sum(done.timings.total_s - done.prefill_s - done.timings.optimise_s for done in runs.completions)
        for runs in (own, base)
    ]
    return speeds[0] / speeds[1], expected


def _runner(
    method: str,
    runtime: Runtime,
    session: Session,
    request: GenerateRequest,
    store: Store | None,
    costs: CostProfile | None,
    assistant: Runtime | None,
) -> Runner:
    if method in HF_OPTIONS:
        return _hf_runner(method, session, assistant)
    if method == "plain":
        return _own_runner(session, lambda prompt: (PLAIN, None))
    if method == "swift":
        return _own_runner(session, _SwiftPlans(runtime, request, store, costs))
    planner = Planner(replace(request, method=None if method == "best" else method), runtime, store)
    return _own_runner(session, lambda prompt: (planner.plan_for(request.task or prompt.task)[0], None))


def _own_runner(session: Session, plan: Callable[[Prompt], tuple[Method, Search | None]]) -> Runner:
    def run(prompt: Prompt) -> tuple[tuple[int, ...], Completion | None]:
        completion = first_turn(session, prompt, *plan(prompt))
        return completion.token_ids, completion

    return run


class _SwiftPlans:
    """The stored or given set of a prompt's task; where there is none, a search that goes on from prompt to prompt."""

    def __init__(
        self, runtime: Runtime, request: GenerateRequest, store: Store | None, costs: CostProfile | None
    ) -> None:
        self.runtime, self.request, self.store, self.costs = runtime, request, store, costs
        self._stored: dict[str, Method] = {}
        self._searches: dict[str, Search] = {}

    def __call__(self, prompt: Prompt) -> tuple[Method, Search | None]:
        task = self.request.task or prompt.task
        if task not in self._stored and task not in self._searches:
            try:
                insisted = replace(self.request, method="swift")
                self._stored[task] = Planner(insisted, self.runtime, self.store).plan_for(task)[0]
            except LayerSetNotFound:
                self._searches[task] = self._start(task)
        if task in self._stored:
            return self._stored[task], None
        return self._searches[task].method, self._searches[task]

    def _start(self, task: str) -> Search:
        settings = self.request.settings or SwiftSettings()
        ratio = settings.start_skip_ratio(self.runtime.info.n_parameters)
        return Search(task, self.runtime.n_layers, settings, ratio, self.costs)


def hf_generate(session: Session, token_ids: Sequence[int], max_new_tokens: int, **options: Any) -> tuple[int, ...]:
    """What transformers' own greedy generate says, on the very same model object and with the same stop tokens."""
    model: Any = session.runtime.hf_model
    inputs = torch.tensor([token_ids], device=session.runtime.device)
    out = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(session.ending(1).stop_token_ids) or None,
        **options,
    )
    return tuple(out[0, len(token_ids) :].tolist())


def _hf_runner(method: str, session: Session, assistant: Runtime | None) -> Runner:
    options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if method == "hf-lookup" else {}
    if method == "hf-assistant" and assistant is not None:
        options = {"assistant_model": assistant.hf_model}

    def run(prompt: Prompt) -> tuple[tuple[int, ...], Completion | None]:
        max_new_tokens = session.room(prompt)
        return hf_generate(session, session.encode(prompt), max_new_tokens, **options), None

    return run


def rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The report's table, one row per method."""
    for result in report["results"]:
        low, high = result["ratio_interval"]
        acceptance, length = result["acceptance_rate"], result["mean_generated_length"]
        yield (
            result["method"],
            f"{result['tok_s']:.1f}",
            f"{result['ratio']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            "–" if acceptance is None else f"{acceptance:.2f}",
            "–" if length is None else f"{length:.2f}",
            f"{result['identical']}/{result['of']}",
        )
