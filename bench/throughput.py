"""`bench throughput`: speed and latencies of concurrent requests, with drafting and with plain batching."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, sleep
from typing import Any

import torch

from ..core.types import Prompt
from ..decoding.engine import Engine, Request
from ..decoding.events import Prefilled, Round, WorkEvent
from ..decoding.methods import PLAIN, Method
from ..decoding.session import Session
from ..decoding.work import subscribed
from ..models.costs import machine_name

SCHEMA = "swiftopt.bench-throughput/1"
PERCENTILES = (50, 95, 99)

MethodOf = Callable[[Prompt], Method]


@dataclass(slots=True)
class TimedRequest:
    """A request: its tokens, and the seconds from the start at which the request and each token arrived."""

    arrival_s: float
    token_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def note(self, started_s: float, event: WorkEvent) -> None:
        if isinstance(event, Prefilled | Round):
            self.token_s += [perf_counter() - started_s] * len(event.token_ids)
            self.token_ids += event.token_ids


def serve(
    session: Session, prompts: Sequence[Prompt], method_of: MethodOf, concurrency: int, rate: float | None, seed: int
) -> list[TimedRequest]:
    """Decode the prompts, up to `concurrency` at a time.

    Args: rate: requests that arrive per second, at exponentially distributed intervals; None: all at once.
    """
    rng, arrival_s = random.Random(seed), 0.0
    waiting: list[tuple[Prompt, TimedRequest]] = []
    for prompt in prompts:
        arrival_s += rng.expovariate(rate) if rate else 0.0
        waiting.append((prompt, TimedRequest(arrival_s)))
    timed_requests = [timed for _, timed in waiting]
    engine, requests, started_s = Engine(at_once=concurrency), list[Request[object]](), perf_counter()
    while waiting or engine.requests:
        now_s = perf_counter() - started_s
        while waiting and waiting[0][1].arrival_s <= now_s:
            prompt, timed = waiting.pop(0)
            request_work = session.request(prompt, method_of(prompt))
            requests.append(engine.add(subscribed(request_work, partial(timed.note, started_s))))
        if engine.requests:
            list(engine.step())
        else:
            sleep(waiting[0][1].arrival_s - now_s)
    for request in requests:
        _ = request.result  # Raises the request's error, if it failed.
    return timed_requests


def measure(
    session: Session,
    prompts: Sequence[Prompt],
    method_of: MethodOf,
    concurrencies: Sequence[int],
    rate: float | None,
    n_rounds: int,
    on_run: Callable[[str], None],
) -> dict[str, Any]:
    """Return the object that `swiftopt bench throughput --json` prints.

    Plain batching and drafting alternate on the same prompts `n_rounds` times, and their order changes. After Ctrl-C
    the object covers the finished concurrencies.

    Raises: KeyboardInterrupt: no concurrency is finished.
    """
    methods_by_mode: dict[str, MethodOf] = {"plain": lambda prompt: PLAIN, "drafting": method_of}
    for method_of_mode in methods_by_mode.values():  # Warm-up run of each method.
        serve(session, prompts[:1], method_of_mode, 1, None, 0)
    results, interrupted = list[dict[str, Any]](), False
    try:
        for concurrency in concurrencies:
            runs: dict[str, list[list[TimedRequest]]] = {name: [] for name in methods_by_mode}
            for number in range(n_rounds):
                for name in list(methods_by_mode)[:: 1 if number % 2 == 0 else -1]:
                    runs[name].append(serve(session, prompts, methods_by_mode[name], concurrency, rate, number))
                    on_run(f"{concurrency} at once, {name}: {_tok_s(runs[name][-1:]):.1f} tok/s")
            results.append({"concurrency": concurrency, **_compare(runs["plain"], runs["drafting"])})
    except KeyboardInterrupt:
        if not results:
            raise
        interrupted = True
    return {
        "schema": SCHEMA,
        "interrupted": interrupted,
        "methods": sorted({method_of(prompt).name for prompt in prompts}),
        "device": machine_name(session.runtime),
        "dtype": session.runtime.dtype_name,
        "threads": torch.get_num_threads(),
        "prompts": len(prompts),
        "max_new_tokens": session.max_new_tokens,
        "rate": rate,
        "rounds": n_rounds,
        "results": results,
    }


def _compare(
    plain_runs: Sequence[Sequence[TimedRequest]], drafting_runs: Sequence[Sequence[TimedRequest]]
) -> dict[str, Any]:
    """Return the figures of plain batching and drafting, and the ratio of their speeds."""
    plain_tok_s, drafting_tok_s = round(_tok_s(plain_runs), 2), round(_tok_s(drafting_runs), 2)
    pairs = list(zip(plain_runs, drafting_runs, strict=True))
    equal = [
        plain.token_ids == drafting.token_ids
        for plain_run, drafting_run in pairs
        for plain, drafting in zip(plain_run, drafting_run, strict=True)
    ]
    return {
        "plain": {"tok_s": plain_tok_s, **_waits(plain_runs)},
        "drafting": {"tok_s": drafting_tok_s, **_waits(drafting_runs)},
        "ratio": round(drafting_tok_s / plain_tok_s, 3),
        "ratios": [round(_tok_s([drafting_run]) / _tok_s([plain_run]), 3) for plain_run, drafting_run in pairs],
        "equal": sum(equal),
        "compared": len(equal),
    }


def _tok_s(runs: Sequence[Sequence[TimedRequest]]) -> float:
    """Return all tokens divided by the seconds from each run's first arrival to its last token."""
    seconds = sum(max(timed.token_s[-1] for timed in run) - min(timed.arrival_s for timed in run) for run in runs)
    return sum(len(timed.token_ids) for run in runs for timed in run) / seconds


def _waits(runs: Sequence[Sequence[TimedRequest]]) -> dict[str, dict[str, float | None]]:
    """Return percentiles in seconds of the time to the first token, with queueing, and of the time per later token."""
    requests = [timed for run in runs for timed in run]
    longer = [timed.token_s for timed in requests if len(timed.token_s) > 1]
    return {
        "first_token_s": _percentiles([timed.token_s[0] - timed.arrival_s for timed in requests]),
        "per_token_s": _percentiles([(token_s[-1] - token_s[0]) / (len(token_s) - 1) for token_s in longer]),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {f"p{p}": None for p in PERCENTILES}
    ascending = sorted(values)
    return {f"p{p}": round(ascending[min(len(ascending) - 1, len(ascending) * p // 100)], 4) for p in PERCENTILES}
