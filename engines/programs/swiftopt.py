"""swiftopt itself: plain decoding, a draft model, or what is stored for the task, else adaptive drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def load(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Options: those of all programs, `model` and `draft` being folders, and speed; best (true) with db (or null)."""
    from swiftopt.core.requests import GenerateRequest
    from swiftopt.core.types import Sampling
    from swiftopt.decoding.loop import decode
    from swiftopt.decoding.methods import PLAIN, Resources, build
    from swiftopt.decoding.methods.chains import SpdSettings
    from swiftopt.decoding.session import Session
    from swiftopt.models.loading import load as load_runtime
    from swiftopt.store import Store
    from swiftopt.tasks.generate import Planner

    def loaded(folder: str) -> Any:
        return load_runtime(folder, options["dtype"], "cpu", None, options["speed"])

    runtime = loaded(options["model"])
    request = GenerateRequest(options["model"], dtype=options["dtype"], device="cpu", speed=options["speed"])
    session = Session(runtime, Sampling(), 1, ignore_eos=True)
    store = Store.open(options["db"]) if options.get("best") else None
    planner = Planner(request, runtime, store)
    fixed = PLAIN
    if options.get("draft"):
        settings = SpdSettings(options["draft_tokens"], options["min_confidence"] or None)
        fixed = build("spd", Resources(runtime, draft_runtime=loaded(options["draft"])), settings)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        method = planner.drafting_for(asked["task"]) if options.get("best") else fixed
        done = decode(runtime, asked["prompt_ids"], method, session.rule(), session.ending(asked["max_new_tokens"]))
        counts = {} if method is PLAIN else {"drafted": done.drafted, "accepted": done.accepted}
        return {"token_ids": list(done.token_ids), "prefill_s": done.prefill_s, "method": done.method, **counts}

    return answer
