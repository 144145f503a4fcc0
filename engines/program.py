"""Program of an engine's process: loads the engine, then answers JSON lines until its standard input ends.

    python -P program.py <program> '<options as JSON>'

It runs in the engine's own environment, so only the programs that decode with swiftopt import it. A program is one of
PROGRAMS, or the name of a Python file with a function `load`, which maps the options to a function from an input line
to its answer. A line in: {"prompt_ids": [...], "max_new_tokens": 128, "task": "code"}. Lines
out: {"ready": true} once, then for each line {"token_ids": [...], "seconds": s, "prefill_s": s}, where the seconds
until the first token may be null; or {"error": "..."}, after which the process ends. Whatever a library prints goes to
standard error.

Options of all programs: `model`, `dtype`, `threads`, `n_ctx`, `device` ("cpu", or "cuda" for the only visible GPU).
Drafts come from `draft` (a file or folder) or `ngram` (true), with `settings` by the engine's own names; programs whose
engine is not in ENGINES read `draft_tokens` (per round), `min_confidence` (0: drafts always have full length) and
`ngram_tokens` instead. A program that drafts also answers how many tokens were `drafted` and how many `accepted`.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import perf_counter
from typing import Any

Values = dict[str, Any]
Decoder = Callable[[Values], Values]  # Maps a parsed input line to its answer.

# Maximum length of an error message in an answer, in characters; standard error has the full message.
MESSAGE = 300
KEY = "SWIFTOPT_ENGINE_API_KEY"  # Environment variable with the server's API key, if needed.
ANSWER_S = 600.0  # Time limit for a server's answer, in seconds.
ON_GPU: Mapping[str, Values] = {  # Library arguments for computing on a GPU; none are needed on a CPU.
    "transformers": {"device_map": "cuda"},
    "llama-cpp": {"n_gpu_layers": 999},  # More than any model has: put all layers on the GPU.
    # By default vLLM reserves nearly all GPU memory, and checks before loading that it is free. 2 GiB of KV cache hold
    # 2,600 tokens of a 13B model without grouped-query attention; gpu_memory_utilization then affects only the check.
    "vllm": {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.01},
}
VLLM_COUNTERS = {
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


def for_device(program: str, options: Values) -> Values:
    """Return the library arguments that make `program` compute on the device in `options`."""
    return ON_GPU[program] if options["device"] == "cuda" else {}


def swiftopt(options: Values) -> Decoder:
    """swiftopt itself: plain decoding, a draft model, or what is stored for the task, else adaptive drafts.

    Options: `model` and `draft` are folders; speed; best (true) with db (or null).
    """
    from swiftopt.core.requests import GenerateRequest
    from swiftopt.core.types import Sampling
    from swiftopt.decoding.loop import decode
    from swiftopt.decoding.methods import PLAIN, Resources, build
    from swiftopt.decoding.methods.chains import SpdSettings
    from swiftopt.decoding.session import Session
    from swiftopt.models.huge_pages import PAGES
    from swiftopt.models.loading import load as load_runtime
    from swiftopt.store import Store
    from swiftopt.tasks.generate import Planner

    def loaded(folder: str) -> Any:
        return load_runtime(folder, options["dtype"], options["device"], None, options["speed"])

    runtime = loaded(options["model"])
    where = {name: options[name] for name in ("dtype", "device", "speed")}
    request = GenerateRequest(options["model"], **where)
    session = Session(runtime, Sampling(), 1, ignore_eos=True)
    store = Store.open(options["db"]) if options.get("best") else None
    planner = Planner(request, runtime, store)
    fixed = PLAIN
    if options.get("draft"):
        settings = SpdSettings(options["draft_tokens"], options["min_confidence"] or None)
        fixed = build("spd", Resources(runtime, draft_runtime=loaded(options["draft"])), settings)
    PAGES.finish()  # The thread that moves weights would disturb the turns of other engines.

    def answer(line: Values) -> Values:
        method = planner.drafting_for(line["task"]) if options.get("best") else fixed
        done = decode(runtime, line["prompt_ids"], method, session.rule(), session.ending(line["max_new_tokens"]))
        counts = {} if method is PLAIN else {"drafted": done.drafted, "accepted": done.accepted}
        return {"token_ids": list(done.token_ids), "prefill_s": done.prefill_s, "method": done.method, **counts}

    return answer


def transformers(options: Values) -> Decoder:
    """transformers' own greedy generate: plain, compiled, with prompt lookup, an assistant, or swiftopt inside it.

    Options: `model` and `draft` are folders; compiled (true); layer_set, a file's path. `settings` are those of the
    assistant's generation, or of generate's prompt lookup.
    """
    import torch
    from transformers import GenerationConfig

    configuration: Any = GenerationConfig
    torch.set_num_threads(options["threads"])
    model = _hf_model(options["model"], options)
    passes: list[float] = []  # Times at which the model's forward passes ended.
    more = _generate_options(model, options)
    # generate takes settings that `config` leaves unset from the model's generation_config.
    model.generation_config.eos_token_id = None
    config = configuration(do_sample=False, pad_token_id=0, return_dict_in_generate=True)

    def noting(*pass_: Any) -> None:
        if not passes and options["device"] == "cuda":
            # CUDA runs asynchronously: the first pass returns before it has been computed.
            torch.cuda.synchronize()
        passes.append(perf_counter())

    if options.get("layer_set"):  # custom_generate bypasses model.forward, so hooks would not run.
        more["on_tokens"] = lambda token_ids: passes.append(perf_counter())
    else:
        model.register_forward_hook(noting)
    counts = _counted(model) if options.get("ngram") or options.get("draft") else {}

    def answer(line: Values) -> Values:
        passes.clear()
        counts.update(dict.fromkeys(counts, 0))
        begun = perf_counter()
        inputs = torch.tensor([line["prompt_ids"]], device=options["device"])  # (batch 1, seq)
        given = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": line["max_new_tokens"], **more}
        with torch.inference_mode():
            if options.get("compiled"):
                more["past_key_values"].reset()
            out = model.generate(inputs, generation_config=config, **given)
        if options.get("layer_set"):
            counts.update(drafted=out.drafted, accepted=out.accepted)
        return {"token_ids": out.sequences[0, inputs.shape[1] :].tolist(), "prefill_s": passes[0] - begun, **counts}

    return answer


def _hf_model(folder: str, options: Values) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    where = for_device("transformers", options)
    return auto.from_pretrained(folder, dtype=getattr(torch, options["dtype"]), local_files_only=True, **where).eval()


def _generate_options(model: Any, options: Values) -> Values:
    """Return the arguments of generate that choose the decoding method."""
    if options.get("compiled"):
        return {"past_key_values": _compiled(model, options["n_ctx"])}
    if options.get("layer_set"):
        from swiftopt import custom_generate

        return {"custom_generate": custom_generate, "layer_set": options["layer_set"]}
    if options.get("ngram"):
        return dict(options["settings"])
    if not options.get("draft"):
        return {}
    assistant = _hf_model(options["draft"], options)
    for name, value in options["settings"].items():
        setattr(assistant.generation_config, name, value)
    return {"assistant_model": assistant}


def _compiled(model: Any, n_ctx: int) -> Any:
    """Compile passes over one token, as generate does on GPUs; each new prompt length would compile again.

    Returns: a static cache of one size for these passes; a new size would compile again.
    """
    import torch
    from transformers import StaticCache

    static_cache: Any = StaticCache
    eager, compiled = model.forward, torch.compile(model.forward)

    def forward(input_ids: Any = None, **inputs: Any) -> Any:
        return (compiled if input_ids.shape[1] == 1 else eager)(input_ids=input_ids, **inputs)

    model.forward = forward
    return static_cache(config=model.config, max_cache_len=n_ctx)


def _counted(model: Any) -> dict[str, int]:
    """Return counts of drafted and accepted tokens, updated by a wrapper of the model's candidate generators."""
    counts = {"drafted": 0, "accepted": 0}
    make = model._get_candidate_generator

    def making(*args: Any, **kwargs: Any) -> Any:
        generator = make(*args, **kwargs)
        update = generator.update_candidate_strategy

        def counting(input_ids: Any, scores: Any, num_matches: Any) -> None:
            """`scores` has one row per candidate token and one for the next token."""
            counts["drafted"] += scores.shape[1] - 1
            counts["accepted"] += int(num_matches)
            update(input_ids, scores, num_matches)

        generator.update_candidate_strategy = counting
        return generator

    model._get_candidate_generator = making
    return counts


def llama_cpp(options: Values) -> Decoder:
    """llama.cpp through xllamacpp, which runs its server inside the process; `settings` are llama-server's options."""
    import xllamacpp

    params = llama_params(options)
    drafts = [kind for kind in params.speculative.types if kind.value]  # Value 0 means no drafting.
    server = xllamacpp.Server(params)

    def answer(line: Values) -> Values:
        request = {
            **{
                "prompt": line["prompt_ids"],
                "max_tokens": line["max_new_tokens"],
                "temperature": 0,
                "top_k": 1,
            },
            **{"ignore_eos": True, "cache_prompt": False, "return_tokens": True, "verbose": True},
        }
        done = server.handle_completions(request)
        if "error" in done:
            raise RuntimeError(str(done["error"].get("message", done["error"])))
        timings = done["timings"]  # Lacks draft_n if nothing was drafted.
        counts = {"drafted": timings.get("draft_n", 0), "accepted": timings.get("draft_n_accepted", 0)}
        answered = {"token_ids": done["__verbose"]["tokens"], "prefill_s": timings["prompt_ms"] / 1000}
        return {**answered, **(counts if drafts else {})}

    return answer


def llama_params(options: Values) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.n_ctx = options["n_ctx"]
    params.n_parallel = 1
    # Read the file instead of mapping it: the system could evict mapped weights between turns.
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE
    params.cache_ram_mib = 0
    params.verbosity = 1
    params.fit_params = False
    drafting, simple = params.speculative.draft, params.speculative.ngram_simple
    for pool in (params.cpuparams, params.cpuparams_batch, drafting.cpuparams, drafting.cpuparams_batch):
        pool.n_threads = options["threads"]
    for name, value in for_device("llama-cpp", options).items():
        setattr(params, name, value)
        setattr(drafting, name, value)
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
    for name, value in options.get("settings", {}).items():
        if name == "spec-type":
            names = [f"COMMON_SPECULATIVE_TYPE_{kind.upper().replace('-', '_')}" for kind in value.split(",")]
            params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind) for kind in names]
        elif name in places:
            setattr(*places[name], value)
        elif name != "model-draft":
            raise ValueError(f"{name} is not known here: use spec-type, {', '.join(places)}")
    return params


def openvino(options: Values) -> Decoder:
    """OpenVINO GenAI on a GGUF file, which it converts to its own graph, or on a folder in its own format (IR).

    Options: precision ("bf16" or "f32"). `settings` are those of its GenerationConfig.
    """
    import numpy as np
    import openvino
    import openvino_genai

    more: Values = {
        "INFERENCE_NUM_THREADS": options["threads"],
        "INFERENCE_PRECISION_HINT": options["precision"],
    }
    if options.get("draft"):
        draft = options["draft"]
        folder = _ir_folder(draft) if draft.endswith(".gguf") else draft
        more = {**more, "draft_model": openvino_genai.draft_model(folder, "CPU", **more)}
    elif options.get("ngram"):
        more = {**more, "prompt_lookup": True}
    pipeline = openvino_genai.LLMPipeline(options["model"], "CPU", **more)
    config = openvino_genai.GenerationConfig()
    config.update_generation_config(ignore_eos=True, do_sample=False, **options.get("settings", {}))

    def answer(line: Values) -> Values:
        config.max_new_tokens = line["max_new_tokens"]
        inputs = openvino.Tensor(np.array([line["prompt_ids"]], dtype=np.int64))  # (batch 1, seq)
        done = pipeline.generate(inputs, config)
        answered = {"token_ids": list(done.tokens[0]), "prefill_s": done.perf_metrics.get_ttft().mean / 1000}
        # OpenVINO gives no counts for plain decoding, nor for prompt lookup.
        counts = done.extended_perf_metrics
        if counts is None:
            return answered
        return {**answered, "drafted": counts.get_num_draft_tokens(), "accepted": counts.get_num_accepted_tokens()}

    return answer


def _ir_folder(gguf: str) -> str:
    """Return the folder of the model in OpenVINO's format, converted once: OpenVINO needs it for draft models."""
    import openvino_genai

    folder = Path(f"{gguf.removesuffix('.gguf')}-openvino")
    if not folder.is_dir():
        unfinished = Path(f"{folder}.{os.getpid()}")
        unfinished.mkdir()
        try:
            link = unfinished / "model.gguf"  # OpenVINO writes its model next to this link.
            link.symlink_to(Path(gguf).resolve())
            openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
            link.unlink()
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return str(folder)


def vllm(options: Values) -> Decoder:
    """vLLM's build for the device, with its engine in this process; `settings` are a speculative_config.

    If `settings` name a drafting class of swiftopt, swiftopt is imported from the folder `swiftopt`. With
    `trust_remote_code`, vLLM runs Python files in the folders `model` and `draft`; drafts with swiftopt's own config
    need that. The parent process sets threads and, on a CPU, the KV cache size by environment variables.
    """
    from vllm import LLM, SamplingParams

    speculative = options.get("settings")
    if speculative and options.get("draft"):
        speculative = {**speculative, "model": options["draft"]}
    if (speculative or {}).get("method") == "custom_class":
        _load_package("swiftopt", options["swiftopt"])
    engine = LLM(
        options["model"],
        dtype=options["dtype"],
        trust_remote_code=options["trust_remote_code"],
        max_model_len=options["n_ctx"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=speculative,
        disable_log_stats=False,
        **for_device("vllm", options),
    )

    def counts() -> dict[str, int]:
        if speculative is None:
            return {}
        counters = {metric.name: metric.value for metric in engine.get_metrics() if metric.name in VLLM_COUNTERS}
        return {word: int(counters.get(name, 0)) for name, word in VLLM_COUNTERS.items()}

    def answer(line: Values) -> Values:
        rule = SamplingParams(temperature=0, max_tokens=line["max_new_tokens"], ignore_eos=True, detokenize=False)
        before = counts()
        (done,) = engine.generate({"prompt_token_ids": line["prompt_ids"]}, rule, use_tqdm=False)
        return {
            "token_ids": list(done.outputs[0].token_ids),
            "prefill_s": getattr(done.metrics, "first_token_latency", None),
            **{word: number - before[word] for word, number in counts().items()},
        }

    return answer


def _load_package(name: str, folder: str) -> None:
    """Import a package by its path; its parent may be a whole environment, so it is not put into sys.path."""
    spec = spec_from_file_location(name, f"{folder}/__init__.py", submodule_search_locations=[folder])
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def server(options: Values) -> Decoder:
    """A running server with OpenAI's completions API, whose answers must include token ids.

    vLLM gives them when asked with `return_token_ids`, llama.cpp's server with `verbose` and `return_tokens`.
    Options: url, of the server or of its /v1.
    """
    url = options["url"].rstrip("/").removesuffix("/v1")
    try:
        model = _fetched(f"{url}/v1/models")["data"][0]["id"]
    except (KeyError, IndexError, TypeError) as error:
        raise RuntimeError(f"{url}/v1/models lists no model: it is no server with OpenAI's API") from error

    def answer(line: Values) -> Values:
        body = {
            **{"model": model, "prompt": line["prompt_ids"], "max_tokens": line["max_new_tokens"]},
            **{"temperature": 0, "ignore_eos": True, "cache_prompt": False},
            **{"return_token_ids": True, "return_tokens": True, "verbose": True},
        }
        done = _fetched(f"{url}/v1/completions", body)
        choice = (done.get("choices") or [{}])[0]
        token_ids = choice.get("token_ids") or (done.get("__verbose") or {}).get("tokens")
        if not token_ids:
            raise RuntimeError(f"{url} returns no token ids: use vLLM's or llama.cpp's own server")
        timings = done.get("timings") or {}
        reply = {"token_ids": token_ids, "prefill_s": timings["prompt_ms"] / 1000 if "prompt_ms" in timings else None}
        if "draft_n" in timings:
            reply |= {"drafted": timings["draft_n"], "accepted": timings["draft_n_accepted"]}
        return reply

    return answer


def _fetched(url: str, body: Mapping[str, Any] | None = None) -> Values:
    headers = {"Content-Type": "application/json"}
    if os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {os.environ[KEY]}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=ANSWER_S) as answer:
            answer_read = json.load(answer)
    except urllib.error.HTTPError as error:
        words = error.read(300).decode(errors="replace")
        raise RuntimeError(f"{url} answered {error.code}: {words}") from error
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{url} does not answer ({error}): is the server running?") from error
    if not isinstance(answer_read, dict):
        raise RuntimeError(f"{url} answered no JSON object")
    return answer_read


PROGRAMS: dict[str, Callable[[Values], Decoder]] = {
    "swiftopt": swiftopt,
    "transformers": transformers,
    "llama-cpp": llama_cpp,
    "openvino": openvino,
    "vllm": vllm,
    "server": server,
}


def main(program: str, options: Values) -> int:
    """Answer every input line until the end; return the exit code."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def send(answer: Values) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        try:
            load = PROGRAMS.get(program) or runpy.run_path(program)["load"]
            decode = load(options)
            send({"ready": True})
            for line in sys.stdin:
                values = json.loads(line)
                begun = perf_counter()
                answer = decode(values)
                send({**answer, "seconds": perf_counter() - begun})
        except Exception as error:  # Engines raise any type; the parent reports it in a row.
            words = " ".join(str(error).split()) or "no message"
            send({"error": f"{type(error).__name__}: {words[:MESSAGE]}"})
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
