"""Decoding methods side by side on the same prompts, interleaved in one process: how fast, and is it the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import torch

from ..core.errors import LayerSetNotFound, SettingsError
from ..core.requests import GenerateRequest
from ..core.settings import SwiftSettings
from ..core.types import Completion, CostProfile, Prompt
from ..decoding.loop import Watch
from ..decoding.method import PLAIN, Method
from ..decoding.session import Session
from ..models.costs import device_name
from ..models.runtime import Runtime
from ..optimizer.search import Search
from ..optimizer.verdict import Timed, bootstrap_interval, speed_ratio
from ..store import Store
from ..worker.generate import Planner
from ..worker.stored_costs import stored_costs

METHODS = ("plain", "swift", "hf-plain", "hf-lookup")
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
) -> dict[str, Any]:
    """Decode every prompt with every method, their order rotating from prompt to prompt, after one warm-up each.

    `swift` drafts with the request's layer set or the stored one; with neither it searches while it decodes, and the
    time of that counts. Chats are cut to their first turn, so that all methods see the same ids.

    Returns: the object that `swiftopt bench decode --json` prints.
    Raises:  SettingsError: a method is unknown, or there is nothing to compare.
    """
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods:
        raise SettingsError(f"unknown methods {unknown}: known are {', '.join(METHODS)}")
    session = Session(runtime, request.sampling, request.max_new_tokens)
    prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
    n_positions = max(session.check(prompt) for prompt in prompts)
    costs = stored_costs(runtime, store, n_positions) if store is not None and "swift" in methods else None
    runners = {method: _runner(method, runtime, session, request, store, costs) for method in methods}
    for method in methods:
        _warm_up(method, session, prompts[0])
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
    return _report(runtime, request, runs, costs, len(prompts))


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
        "device": device_name(runtime.device),
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
        "optimise_seconds": round(sum(done.timings.optimise_s for done in own.completions), 3),
    }


def _against_expected(
    own: MethodRuns, base: MethodRuns, costs: CostProfile | None
) -> tuple[float | None, float | None]:
    """Ratio of decoding time without prefill and search, and what Eq. 6 says of it.

    None where that has no meaning: no layer set or several, or no target pass after the prefill.
    """
    sets = {done.layer_set for done in own.completions}
    layer_set = next(iter(sets)) if len(sets) == 1 else None
    passes = [sum(done.target_passes for done in runs.completions) for runs in (own, base)]
    if costs is None or layer_set is None or not all(passes):
        return None, None
    speeds = [
        sum(done.n_tokens - done.first_tokens for done in runs.completions)
        / sum(done.timings.total_s - done.prefill_s - done.timings.optimise_s for done in runs.completions)
        for runs in (own, base)
    ]
    return speeds[0] / speeds[1], costs.expected_of(layer_set, own.completions)


def _warm_up(method: str, session: Session, prompt: Prompt) -> None:
    """A few tokens, so that no method pays for first allocations."""
    brief = replace(prompt, max_new_tokens=4)
    if method.startswith("hf-"):
        _hf_runner(method, session)(brief)
    else:
        list(session.run(brief, PLAIN))


def _runner(
    method: str,
    runtime: Runtime,
    session: Session,
    request: GenerateRequest,
    store: Store | None,
    costs: CostProfile | None,
) -> Runner:
    if method.startswith("hf-"):
        return _hf_runner(method, session)
    if method == "plain":
        return _own_runner(session, lambda prompt: (PLAIN, None))
    return _own_runner(session, _SwiftPlans(runtime, request, store, costs))


def _own_runner(session: Session, plan: Callable[[Prompt], tuple[Method, Watch | None]]) -> Runner:
    def run(prompt: Prompt) -> tuple[tuple[int, ...], Completion | None]:
        method, watch = plan(prompt)
        completion = next(iter(session.run(prompt, method, watch)))[1]
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

    def __call__(self, prompt: Prompt) -> tuple[Method, Watch | None]:
        task = self.request.task or prompt.task
        if task not in self._stored and task not in self._searches:
            try:
                insisted = replace(self.request, method="swift")
                self._stored[task] = Planner(insisted, self.runtime, self.store).plan_for(task)[0]
            except LayerSetNotFound:
                self._searches[task] = self._start(task)
        if task in self._stored:
            return self._stored[task], None
        search = self._searches[task]
        watch = Watch(
            before_round=search.before_round if search.optimising else None,
            after_round=search.after_round,
            scratch_rows=search.scratch_rows,
        )
        return search.method, watch

    def _start(self, task: str) -> Search:
        settings = self.request.settings or SwiftSettings()
        ratio = settings.start_skip_ratio(self.runtime.info.n_parameters)
        return Search(task, self.runtime.n_layers, settings, ratio, self.costs, lambda event: None, lambda: "")


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


def _hf_runner(method: str, session: Session) -> Runner:
    options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if method == "hf-lookup" else {}

    def run(prompt: Prompt) -> tuple[tuple[int, ...], Completion | None]:
        max_new_tokens = prompt.max_new_tokens or session.max_new_tokens
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
