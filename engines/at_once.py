"""Program of an engine's process that decodes several requests at once; `program` runs it.

Input line: {"requests": [{"prompt_ids": [...], "max_new_tokens": 128, "task": "code"}, ...]}. Its answer: {"answers":
[{"token_ids": [...], "first_s": s, "last_s": s}, ...]}, the seconds from the line to a request's first and last token.
Options are those of `program`, with a GGUF file as `model` and the context of one request as `n_ctx`; and `engine`, a
name in ENGINES; `at_once`, the maximum number of requests of a line. Files are mapped if that is the engine's default.
With `cache` (true; llama-cpp only) the keys and values of earlier prompts are reused, as its server does by default,
and an answer has the number of `cached` tokens.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

Values = dict[str, Any]
Decoder = Callable[[Values], Values]

PROGRAM = Path(__file__).with_name("program.py")
BATCH = 512  # Tokens of a prompt that ik_llama.cpp reads in one call: llama.cpp's default physical batch.


def swiftopt(options: Values) -> Decoder:
    """swiftopt: plain decoding, or with `best` (true) the plan stored in `db`, else adaptive drafts."""
    from swiftopt.models.gguf_packing import begin_packing

    where = {name: options[name] for name in ("dtype", "device", "speed")}
    begin_packing(Path(options["model"]), **where)  # Weights are packed while torch is imported, as by `generate`.

    from swiftopt.core.requests import GenerateRequest
    from swiftopt.core.types import Sampling
    from swiftopt.decoding.engine import Engine
    from swiftopt.decoding.events import Prefilled, Round, WorkEvent
    from swiftopt.decoding.loop import decoding
    from swiftopt.decoding.methods import PLAIN
    from swiftopt.decoding.session import Session
    from swiftopt.decoding.work import subscribed
    from swiftopt.models.huge_pages import PAGES
    from swiftopt.models.loading import load as load_runtime
    from swiftopt.tasks.generate import Planner

    runtime = load_runtime(options["model"], options["dtype"], options["device"], None, options["speed"])
    session = Session(runtime, Sampling(), 1, ignore_eos=True)
    store = None
    if options.get("best") and options.get("db"):
        from swiftopt.store import Store

        store = Store.open(options["db"])
    planner = Planner(GenerateRequest(options["model"], **where), runtime, store)

    def answer(line: Values) -> Values:
        started, engine, running = perf_counter(), Engine(at_once=options["at_once"]), []
        times: list[list[float]] = [[] for _ in line["requests"]]  # Of each request's prefill and rounds.
        for request, request_times in zip(line["requests"], times, strict=True):
            method = planner.drafting_for(request["task"]) if options.get("best") else PLAIN
            ending = session.ending(request["max_new_tokens"])

            def add_time(event: WorkEvent, request_times: list[float] = request_times) -> None:
                if isinstance(event, Prefilled | Round):
                    request_times.append(perf_counter() - started)

            work = decoding(runtime, request["prompt_ids"], method, session.rule(), ending)
            running.append(engine.add(subscribed(work, add_time)))
        while engine.requests:
            list(engine.step())
        token_ids = [list(request.result.token_ids) for request in running]
        answers = [_answer(ids, seconds[0], seconds[-1]) for ids, seconds in zip(token_ids, times, strict=True)]
        if line["requests"][0]["max_new_tokens"] > 1:  # A request for one token measures the start, not to be delayed.
            PAGES.finish()  # Otherwise this thread would disturb the turns of other engines.
        return {"answers": answers}

    return answer


def llama_cpp(options: Values) -> Decoder:
    """llama.cpp through xllamacpp; each request has a slot of its server."""
    import xllamacpp

    n_slots = options["at_once"]
    params = runpy.run_path(str(PROGRAM))["llama_params"]({**options, "n_ctx": n_slots * options["n_ctx"]})
    params.n_parallel = n_slots
    defaults, uses_cache = xllamacpp.CommonParams(), bool(options.get("cache"))
    params.load_mode = defaults.load_mode
    if uses_cache:
        params.cache_ram_mib = defaults.cache_ram_mib
    server = xllamacpp.Server(params)

    def complete(request: Values, started: float) -> Values:
        completion = server.handle_completions(
            {
                "prompt": request["prompt_ids"],
                "max_tokens": request["max_new_tokens"],
                **{"temperature": 0, "top_k": 1, "ignore_eos": True},
                **{"cache_prompt": uses_cache, "return_tokens": True, "verbose": True},
            }
        )
        last_s, timings = perf_counter() - started, completion.get("timings")
        if "error" in completion:
            raise RuntimeError(str(completion["error"].get("message", completion["error"])))
        # The server measures predicted_ms from a request's first token on.
        first_s = last_s - timings["predicted_ms"] / 1000
        cached = {"cached": timings["cache_n"]} if uses_cache else {}
        return {**_answer(completion["__verbose"]["tokens"], first_s, last_s), **cached}

    def answer(line: Values) -> Values:
        started = perf_counter()
        with ThreadPoolExecutor(n_slots) as pool:
            return {"answers": list(pool.map(lambda request: complete(request, started), line["requests"]))}

    return answer


def ik_llama_cpp(options: Values) -> Decoder:
    """ik_llama.cpp by its C interface: it reads the prompts one by one, then runs one row per request in each pass."""
    import ctypes

    import numpy as np
    from ik_llama_cpp import _ctypes_api as api

    n_slots = options["at_once"]
    api.llama_backend_init()
    model = api.llama_model_load_from_file(options["model"].encode(), api.llama_model_default_params())
    if not model:
        raise RuntimeError("ik_llama.cpp cannot load the file")
    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    params = api.llama_context_default_params()
    params.n_ctx, params.n_seq_max = n_slots * options["n_ctx"], n_slots
    params.n_batch = params.n_ubatch = BATCH
    params.n_threads = params.n_threads_batch = options["threads"]
    # Its flash attention (0.1.5) aborts if a row sees no slot of a block, which happens with several sequences.
    params.flash_attn = n_slots == 1
    context = api.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"ik_llama.cpp has no room for {params.n_ctx} tokens")
    batch = api.llama_batch_init(BATCH, 0, 1)

    def argmaxes(rows: list[tuple[int, int, int]], read_rows: list[int]) -> list[int]:
        """Run rows of (token, position, sequence); return the argmax after each of `read_rows`."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, sequence
            batch.logits[i] = i in read_rows
        if code := api.llama_decode(context, batch):
            raise RuntimeError(f"ik_llama.cpp cannot decode {len(rows)} rows (code {code})")
        size = ctypes.POINTER(ctypes.c_float * n_vocab)
        logits = (ctypes.cast(api.llama_get_logits_ith(context, i), size).contents for i in read_rows)
        return [int(np.frombuffer(row, np.float32).argmax()) for row in logits]

    def answer(line: Values) -> Values:
        started, requests = perf_counter(), line["requests"]
        api.llama_kv_cache_clear(context)
        token_ids: list[list[int]] = []
        first_s, last_s = [], [0.0] * len(requests)
        for sequence, request in enumerate(requests):
            prompt = list(enumerate(request["prompt_ids"]))
            for start in range(0, len(prompt), BATCH):
                rows = [(token, position, sequence) for position, token in prompt[start : start + BATCH]]
                is_last = start + BATCH >= len(prompt)
                first_ids = argmaxes(rows, [len(rows) - 1] if is_last else [])
            token_ids.append(first_ids)
            first_s.append(perf_counter() - started)
        while True:
            running = [i for i, ids in enumerate(token_ids) if len(ids) < requests[i]["max_new_tokens"]]
            now_s = perf_counter() - started
            last_s = [last_s[i] or (0.0 if i in running else now_s) for i in range(len(requests))]
            if not running:
                break
            rows = [(token_ids[i][-1], len(requests[i]["prompt_ids"]) + len(token_ids[i]) - 1, i) for i in running]
            for i, token in zip(running, argmaxes(rows, list(range(len(rows)))), strict=True):
                token_ids[i].append(token)
        return {"answers": [_answer(*figures) for figures in zip(token_ids, first_s, last_s, strict=True)]}

    return answer


def _answer(token_ids: list[int], first_s: float, last_s: float) -> Values:
    return {"token_ids": token_ids, "first_s": first_s, "last_s": last_s}


ENGINES: dict[str, Callable[[Values], Decoder]] = {
    "swiftopt": swiftopt,
    "llama-cpp": llama_cpp,
    "ik-llama-cpp": ik_llama_cpp,
}


def load(options: Values) -> Decoder:
    """Load the engine; return the function that answers an input line."""
    return ENGINES[options["engine"]](options)
