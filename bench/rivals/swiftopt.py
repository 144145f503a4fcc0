"""swiftopt itself: plain decoding, or what is stored for the task and adaptive drafts where nothing is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def load(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Options: model (a folder), dtype, speed; best (true) with db (an SQLAlchemy URL or null)."""
    from swiftopt.core.requests import GenerateRequest
    from swiftopt.core.types import Sampling
    from swiftopt.decoding.loop import decode
    from swiftopt.decoding.method import PLAIN, Method
    from swiftopt.decoding.session import Session
    from swiftopt.models.loading import load as load_runtime
    from swiftopt.store import Store
    from swiftopt.tasks.generate import Planner

    runtime = load_runtime(options["model"], options["dtype"], "cpu", None, options["speed"])
    request = GenerateRequest(options["model"], dtype=options["dtype"], device="cpu", speed=options["speed"])
    session = Session(runtime, Sampling(), 1, ignore_eos=True)
    store = Store.open(options["db"]) if options.get("best") else None
    stored = Planner(request, runtime, store)
    adaptive = Planner(replace(request, method="adaptive"), runtime, store)

    def method_for(task: str) -> Method:
        if not options.get("best"):
            return PLAIN
        method, info = stored.plan_for(task)
        return adaptive.plan_for(task)[0] if info.note else method  # the note says why nothing stored is used

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        method = method_for(asked["task"])
        done = decode(runtime, asked["prompt_ids"], method, session.rule(), session.ending(asked["max_new_tokens"]))
        return {"token_ids": list(done.token_ids), "prefill_s": done.prefill_s, "method": done.method}

    return answer
