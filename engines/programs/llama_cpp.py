"""llama.cpp through xllamacpp, which runs its server inside the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def load(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Options: model, threads, n_ctx; draft (a GGUF file) or ngram (true) where it speculates."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.n_ctx = options["n_ctx"]
    params.n_parallel = 1
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE  # a mapped file could be dropped between turns
    params.cache_ram_mib = 0
    params.verbosity = 1
    params.fit_params = False
    kinds = xllamacpp.common_speculative_type
    drafting = params.speculative.draft
    for pool in (params.cpuparams, params.cpuparams_batch, drafting.cpuparams, drafting.cpuparams_batch):
        pool.n_threads = options["threads"]
    if options.get("draft"):
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        drafting.mparams.path = options["draft"]
        drafting.n_max = options["draft_tokens"]
        drafting.p_min = options["min_confidence"]
    elif options.get("ngram"):
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = options["ngram_tokens"]
        params.speculative.ngram_simple.size_m = options["draft_tokens"]
    server = xllamacpp.Server(params)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        request = {
            **{"prompt": asked["prompt_ids"], "max_tokens": asked["max_new_tokens"], "temperature": 0, "top_k": 1},
            **{"ignore_eos": True, "cache_prompt": False, "return_tokens": True, "verbose": True},
        }
        done = server.handle_completions(request)
        if "error" in done:
            raise RuntimeError(str(done["error"].get("message", done["error"])))
        return {"token_ids": done["__verbose"]["tokens"], "prefill_s": done["timings"]["prompt_ms"] / 1000}

    return answer
