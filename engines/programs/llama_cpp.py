"""llama.cpp through xllamacpp, which runs its server inside the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def load(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Options: those of all programs; `settings` are options of llama-server."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.n_ctx = options["n_ctx"]
    params.n_parallel = 1
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE  # a mapped file could be dropped between turns
    params.cache_ram_mib = 0
    params.verbosity = 1
    params.fit_params = False
    drafting, simple = params.speculative.draft, params.speculative.ngram_simple
    for pool in (params.cpuparams, params.cpuparams_batch, drafting.cpuparams, drafting.cpuparams_batch):
        pool.n_threads = options["threads"]
    if options.get("draft"):
        drafting.mparams.path = options["draft"]
    places = {
        "spec-draft-n-max": (drafting, "n_max"),
        "spec-draft-n-min": (drafting, "n_min"),
        "spec-draft-p-min": (drafting, "p_min"),
        "spec-ngram-simple-size-n": (simple, "size_n"),
        "spec-ngram-simple-size-m": (simple, "size_m"),
        "spec-ngram-simple-min-hits": (simple, "min_hits"),
    }
    for name, value in _settings(options).items():
        if name == "spec-type":
            names = [f"COMMON_SPECULATIVE_TYPE_{kind.upper().replace('-', '_')}" for kind in value.split(",")]
            params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind) for kind in names]
        elif name in places:
            setattr(*places[name], value)
        else:
            raise ValueError(f"{name} is not known here: use spec-type, {', '.join(places)}")
    drafts = [kind for kind in params.speculative.types if kind.value]  # 0 is none
    server = xllamacpp.Server(params)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        request = {
            **{"prompt": asked["prompt_ids"], "max_tokens": asked["max_new_tokens"], "temperature": 0, "top_k": 1},
            **{"ignore_eos": True, "cache_prompt": False, "return_tokens": True, "verbose": True},
        }
        done = server.handle_completions(request)
        if "error" in done:
            raise RuntimeError(str(done["error"].get("message", done["error"])))
        timings = done["timings"]  # without drafts in it where none was made
        counts = {"drafted": timings.get("draft_n", 0), "accepted": timings.get("draft_n_accepted", 0)}
        answered = {"token_ids": done["__verbose"]["tokens"], "prefill_s": timings["prompt_ms"] / 1000}
        return {**answered, **(counts if drafts else {})}

    return answer


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    if "settings" in options:
        return {name: value for name, value in options["settings"].items() if name != "model-draft"}
    if options.get("draft"):
        return {
            "spec-type": "draft-simple",
            "spec-draft-n-max": options["draft_tokens"],
            "spec-draft-p-min": options["min_confidence"],
        }
    if options.get("ngram"):
        return {
            "spec-type": "ngram-simple",
            "spec-ngram-simple-size-n": options["ngram_tokens"],
            "spec-ngram-simple-size-m": options["draft_tokens"],
        }
    return {}
