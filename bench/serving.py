"""`bench serve`: sends blocks of requests to a real server over HTTP, alternately with learned drafts and plainly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import httpx2

from ..core.errors import ServiceUnreachable
from ..core.events import phase_of
from ..core.types import Prompt
from .turn import started

SCHEMA = "swiftopt.bench-serve/1"
LOAD_S = 600.0
ANSWER_S = 1800.0

T = TypeVar("T")


@contextmanager
def served(model: str, options: Sequence[str], on_step: Callable[[str], None]) -> Iterator[httpx2.Client]:
    """Run `swiftopt serve` for one model on a free port; yield an HTTP client once the engine is ready.

    Raises: ServiceUnreachable: the server does not start.
    """
    with served_process(model, options, on_step) as (client, _):
        yield client


@contextmanager
def served_process(
    model: str, options: Sequence[str], on_step: Callable[[str], None], in_group: bool = False
) -> Iterator[tuple[httpx2.Client, subprocess.Popen[str]]]:
    """Run a server as `served` does, and yield its process too, which leads its own group if `in_group`.

    Raises: ServiceUnreachable: the server does not start.
    """
    command = [sys.executable, "-m", "swiftopt", "serve", "--port", "0", "--json", "--rate", "0", "--log", "warnings"]
    with started(
        [*command, "--model", model, *options],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
        process_group=0 if in_group else None,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise ServiceUnreachable("the server did not start: see its error above")
            with httpx2.Client(base_url=json.loads(line)["url"], timeout=ANSWER_S) as client:
                _wait(client, process, on_step)
                yield client, process
        finally:
            process.terminate()


def _wait(client: httpx2.Client, process: subprocess.Popen[str], on_step: Callable[[str], None]) -> None:
    deadline_s, logged = time.monotonic() + LOAD_S, ""
    while (state := _state(client)) != "ok":
        # Any other state than loading is an error, after which the server would try again without end.
        has_failed = not state.startswith("it is loading")
        if has_failed or process.poll() is not None or time.monotonic() > deadline_s:
            raise ServiceUnreachable(f"the engine does not start ({state}): try `swiftopt doctor`")
        phase = phase_of(state.partition(": ")[2])
        if phase != logged:
            logged = phase
            on_step(f"load: {phase}")
        time.sleep(0.1)


def _state(client: httpx2.Client) -> str:
    """Return the state of the server's only engine."""
    (state,) = client.get("/health").json()["engines"].values()
    return str(state)


def measure(
    client: httpx2.Client,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    concurrency: int,
    window: int,
    on_run: Callable[[str], None],
) -> dict[str, Any]:
    """Send every prompt twice, with the best plan and plainly; return seconds, speedup per window, traffic shifts.

    A single client alternates per request. Several clients alternate per window and wait for its last request, so
    short windows lose time at their ends. Each request has a new cache salt, so that no prefix is reused. After Ctrl-C
    the report covers the requests that were sent both ways.

    Raises: KeyboardInterrupt: no request was sent both ways.
    """
    card = model_card(client)
    results: list[dict[str, Any]] = []
    shifts: list[dict[str, Any]] = []
    tuning, interrupted = dict[str, Any](), False
    try:
        with ThreadPoolExecutor(concurrency) as pool:
            for number, block in enumerate(_blocks(prompts, 1 if concurrency == 1 else window)):
                walls, texts = {}, {}
                for plan in ("best", "plain")[:: 1 if number % 2 == 0 else -1]:
                    clock = time.perf_counter()
                    texts[plan] = list(pool.map(partial(ask, client, card["id"], max_new_tokens, plan), block))
                    walls[plan] = time.perf_counter() - clock
                tuning = model_tuning(client)
                times = {"served_s": round(walls["best"], 4), "plain_s": round(walls["plain"], 4)}
                n_tokens = sum(n for _, n in texts["best"])
                n_equal = sum(a == b for a, b in zip(texts["best"], texts["plain"], strict=True))
                results.append({"requests": len(block), **times, "tokens": n_tokens, "equal": n_equal})
                n_done = sum(result["requests"] for result in results)
                served_s, plain_s = walls["best"], walls["plain"]
                speeds = f"{n_tokens / served_s:.1f} tok/s as served, {n_tokens / plain_s:.1f} plainly"
                on_run(f"request {n_done} of {len(prompts)}: {speeds}")
                for shift in new_shifts(tuning, shifts):
                    on_run(shift_line(shift))
                    shifts.append(shift)
    except KeyboardInterrupt:  # Ctrl-C also stops the server, so no further request is possible.
        if not results:
            raise
        interrupted = True
    return {
        "schema": SCHEMA,
        "interrupted": interrupted,
        "device": card["device"],
        "dtype": card["dtype"],
        "concurrency": concurrency,
        "prompts": sum(result["requests"] for result in results),
        "max_new_tokens": max_new_tokens,
        "results": results,
        "window": window,
        "windows": windows(results, window),
        "equal": sum(result["equal"] for result in results),
        "shifts": shifts,
        "tuning": tuning,
    }


def model_card(client: httpx2.Client) -> dict[str, Any]:
    """Return the /v1/models entry of the server's only model."""
    (card,) = client.get("/v1/models").json()["data"]
    return dict(card)


def model_tuning(client: httpx2.Client) -> dict[str, Any]:
    (tuning,) = client.get("/v1/tuning").json()["models"].values()
    return dict(tuning)


def new_shifts(tuning: dict[str, Any], known_shifts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each task's latest traffic shift, without those in `known_shifts`."""
    latest = [
        {"task": task["task"], "request": task["shifts"]["at_request"], "reason": task["shifts"]["latest"]}
        for task in tuning["tasks"]
        if task["shifts"]["n"]
    ]
    return [shift for shift in latest if shift not in known_shifts]


def shift_line(shift: dict[str, Any]) -> str:
    return f"the traffic changed at request {shift['request']} of task {shift['task']}: {shift['reason']}"


def windows(results: Sequence[dict[str, Any]], window: int) -> list[float]:
    """Return plain seconds ÷ served seconds of consecutive blocks of `window` requests."""
    size = max(1, window // results[0]["requests"]) if results else 1
    return [
        round(sum(run["plain_s"] for run in block) / sum(run["served_s"] for run in block), 4)
        for block in _blocks(results, size)
    ]


def _blocks(values: Sequence[T], size: int) -> list[Sequence[T]]:
    return [values[block_start : block_start + size] for block_start in range(0, len(values), size)]


def ask(client: httpx2.Client, model: str, max_new_tokens: int, plan: str, prompt: Prompt) -> tuple[str, int]:
    """Return the text and number of tokens of a completion; only the first turn of a chat is sent.

    Raises: ServiceUnreachable: the server refuses the prompt.
    """
    common: dict[str, Any] = {
        "model": model,
        "max_tokens": prompt.max_new_tokens or max_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": f"{plan} {time.perf_counter_ns()}",
        "swiftopt": {"task": prompt.task, "plan": plan},
    }
    if prompt.text is not None:
        completion = client.post("/v1/completions", json={**common, "prompt": prompt.text})
    else:
        messages = prompt.messages or [{"role": "user", "content": prompt.turns[0]}]
        completion = client.post("/v1/chat/completions", json={**common, "messages": list(messages)})
    if completion.status_code != 200:
        raise ServiceUnreachable(f"the server refused prompt {prompt.id!r}: {completion.json()['error']['message']}")
    answer = completion.json()
    choice = answer["choices"][0]
    text = choice["text"] if prompt.text is not None else choice["message"]["content"]
    return text, answer["usage"]["completion_tokens"]
