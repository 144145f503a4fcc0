"""swiftopt itself: plain decoding, or what is stored for the task and adaptive drafts where nothing is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def load(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Options: model (a folder), dtype, speed; best (true) with db (an SQLAlchemy URL or null)."""
    from swiftopt.core.requests import GenerateRequest
    from swiftopt.core.types import Sampling
    from swiftopt.decoding.loop import decode
    from swiftopt.decoding.methods import PLAIN
    from swiftopt.decoding.session import Session
    from swiftopt.models.loading import load as load_runtime
    from swiftopt.store import Store
    from swiftopt.tasks.generate import Planner

    runtime = load_runtime(options["model"], options["dtype"], "cpu", None, options["speed"])
    request = GenerateRequest(options["model"], dtype=options["dtype"], device="cpu", speed=options["speed"])
    session = Session(runtime, Sampling(), 1, ignore_eos=True)
    store = Store.open(options["db"]) if options.get("best") else None
    planner = Planner(request, runtime, store)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        method = planner.drafting_for(asked["task"]) if options.get("best") else PLAIN
        done = decode(runtime, asked["prompt_ids"], method, session.rule(), session.ending(asked["max_new_tokens"]))
        return {"token_ids": list(done.token_ids), "prefill_s": done.prefill_s, "method": done.method}

    return answer
