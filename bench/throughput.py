"""Concurrent requests: tokens per second and latencies of drafting against plain batching."""

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
class Served:
    """One request: its tokens, and the times in seconds at which the request and each token arrived."""

    arrived: float
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def note(self, started: float, event: WorkEvent) -> None:
        if isinstance(event, Prefilled | Round):
            self.times += [perf_counter() - started] * len(event.token_ids)
            self.token_ids += event.token_ids


def serve(
    session: Session, prompts: Sequence[Prompt], method_of: MethodOf, concurrency: int, rate: float | None, seed: int
) -> list[Served]:
    """Decode the prompts, up to `concurrency` at a time.

    Args: rate: requests that arrive per second, at exponentially distributed intervals; None: all at once.
    """
    rng, arrival_s = random.Random(seed), 0.0
    waiting: list[tuple[Prompt, Served]] = []
    for prompt in prompts:
        arrival_s += rng.expovariate(rate) if rate else 0.0
        waiting.append((prompt, Served(arrival_s)))
    clients = [client for _, client in waiting]
    engine, requests, started_s = Engine(at_once=concurrency), list[Request[object]](), perf_counter()
    while waiting or engine.requests:
        now_s = perf_counter() - started_s
        while waiting and waiting[0][1].arrived <= now_s:
            prompt, client = waiting.pop(0)
            request_work = session.request(prompt, method_of(prompt))
            requests.append(engine.add(subscribed(request_work, partial(client.note, started_s))))
        if engine.requests:
            list(engine.step())
        else:
            sleep(waiting[0][1].arrived - now_s)
    for request in requests:
        _ = request.result  # Reading the result raises the request's error, if any.
    return clients


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

    Plain and drafting take turns on the same prompts, `n_rounds` times, their order changing. Ctrl-C ends it with the
    numbers of requests that are measured, if any.
    """
    methods_by_mode: dict[str, MethodOf] = {"plain": lambda prompt: PLAIN, "drafting": method_of}
    for method_of_mode in methods_by_mode.values():  # Warm-up run of each method.
        serve(session, prompts[:1], method_of_mode, 1, None, 0)
    results, interrupted = list[dict[str, Any]](), False
    try:
        for concurrency in concurrencies:
            runs: dict[str, list[list[Served]]] = {name: [] for name in methods_by_mode}
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


def _compare(plain_runs: Sequence[Sequence[Served]], drafting_runs: Sequence[Sequence[Served]]) -> dict[str, Any]:
    """Return the figures of plain decoding and drafting, and their speed ratio per round."""
    plain_tok_s, drafting_tok_s = round(_tok_s(plain_runs), 2), round(_tok_s(drafting_runs), 2)
    pairs = list(zip(plain_runs, drafting_runs, strict=True))
    equal = [
        plain_client.token_ids == drafting_client.token_ids
        for plain_run, drafting_run in pairs
        for plain_client, drafting_client in zip(plain_run, drafting_run, strict=True)
    ]
    return {
        "plain": {"tok_s": plain_tok_s, **_waits(plain_runs)},
        "drafting": {"tok_s": drafting_tok_s, **_waits(drafting_runs)},
        "ratio": round(drafting_tok_s / plain_tok_s, 3),
        "ratios": [round(_tok_s([drafting_run]) / _tok_s([plain_run]), 3) for plain_run, drafting_run in pairs],
        "equal": sum(equal),
        "compared": len(equal),
    }


def _tok_s(runs: Sequence[Sequence[Served]]) -> float:
    """Return all tokens divided by the seconds from each run's first arrival to its last token."""
    seconds = sum(max(client.times[-1] for client in run) - min(client.arrived for client in run) for run in runs)
    return sum(len(client.token_ids) for run in runs for client in run) / seconds


def _waits(runs: Sequence[Sequence[Served]]) -> dict[str, dict[str, float | None]]:
    """Return percentiles in seconds of the time to first token (queueing included) and per later token."""
    all_clients = [client for run in runs for client in run]
    long_clients = [client for client in all_clients if len(client.times) > 1]
    return {
        "first_token_s": _percentiles([client.times[0] - client.arrived for client in all_clients]),
        "per_token_s": _percentiles(
            [(client.times[-1] - client.times[0]) / (len(client.times) - 1) for client in long_clients]
        ),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {f"p{p}": None for p in PERCENTILES}
    ascending = sorted(values)
    return {f"p{p}": round(ascending[min(len(ascending) - 1, len(ascending) * p // 100)], 4) for p in PERCENTILES}
