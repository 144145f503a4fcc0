"""Program of an engine's process: loads the engine, then answers JSON lines until its standard input ends.

    python -P program.py <program> '<options as JSON>'

It runs in the engine's own environment, so only programs that decode with swiftopt import swiftopt. A program is one of
PROGRAMS, or the name of a Python file with a function `load`, which takes the options and returns a function from an
input line to its answer.

Input line: {"prompt_ids": [...], "max_new_tokens": 128, "task": "code"}. Output lines: {"ready": true} once, then for
each input line {"token_ids": [...], "seconds": s, "prefill_s": s}, where the seconds until the first token may be null;
or {"error": "..."}, after which the process ends. What libraries print goes to standard error.

Options of all programs: `model`, `dtype`, `threads`, `n_ctx`, `device` ("cpu", or "cuda" for the only visible GPU).
Drafts come from `draft` (a file or folder) or `ngram` (true), with `settings` by the engine's names. Programs whose
engine is not in `export.ENGINES` read `draft_tokens` (per round), `min_confidence` (0: drafts have full length) and
`ngram_tokens` instead. Answers of a program that drafts also have the numbers of `drafted` and `accepted` tokens.
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
MAX_MESSAGE = 300
KEY = "SWIFTOPT_ENGINE_API_KEY"  # Environment variable with the server's API key, if it needs one.
SERVER_TIMEOUT_S = 600.0  # Time limit for a server's answer, in seconds.
ON_GPU: Mapping[str, Values] = {  # Library arguments for computing on a GPU; none are needed on a CPU.
    "transformers": {"device_map": "cuda"},
    "llama-cpp": {"n_gpu_layers": 999},  # More than any model has: put all layers on the GPU.
    # By default vLLM reserves nearly all GPU memory, and checks before loading that it is free. 2 GiB of KV cache hold
    # 2,600 tokens of a 13B model without grouped-query attention; gpu_memory_utilization then affects the check only.
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
    """swiftopt: plain decoding, a draft model, or with `best` (true) the plan stored in `db`, else adaptive drafts.

    Options: `model` and `draft` are folders; `speed`; `best`, `db` (or null).
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

    def runtime_of(folder: str) -> Any:
        return load_runtime(folder, options["dtype"], options["device"], None, options["speed"])

    runtime = runtime_of(options["model"])
    where = {name: options[name] for name in ("dtype", "device", "speed")}
    request = GenerateRequest(options["model"], **where)
    session = Session(runtime, Sampling(), 1, ignore_eos=True)
    store = Store.open(options["db"]) if options.get("best") else None
    planner = Planner(request, runtime, store)
    fixed_method = PLAIN
    if options.get("draft"):
        settings = SpdSettings(options["draft_tokens"], options["min_confidence"] or None)
        fixed_method = build("spd", Resources(runtime, draft_runtime=runtime_of(options["draft"])), settings)
    PAGES.finish()  # The thread that moves weights would disturb the turns of other engines.

    def answer(line: Values) -> Values:
        method = planner.drafting_for(line["task"]) if options.get("best") else fixed_method
        result = decode(runtime, line["prompt_ids"], method, session.rule(), session.ending(line["max_new_tokens"]))
        counts = {} if method is PLAIN else {"drafted": result.drafted, "accepted": result.accepted}
        return {"token_ids": list(result.token_ids), "prefill_s": result.prefill_s, "method": result.method, **counts}

    return answer


def transformers(options: Values) -> Decoder:
    """transformers' greedy generate: plain, compiled, with prompt lookup, an assistant, or swiftopt inside it.

    Options: `model` and `draft` are folders; `compiled` (true); `layer_set`, a file's path. `settings` are arguments of
    generate's prompt lookup, or fields of the assistant's generation config.
    """
    import torch
    from transformers import GenerationConfig

    configuration: Any = GenerationConfig
    torch.set_num_threads(options["threads"])
    model = _hf_model(options["model"], options)
    pass_times: list[float] = []  # Times at which the model's forward passes ended.
    method_arguments = _generate_arguments(model, options)
    # generate reads settings that `config` lacks from the model's generation_config.
    model.generation_config.eos_token_id = None
    config = configuration(do_sample=False, pad_token_id=0, return_dict_in_generate=True)

    def add_pass_time(*_: Any) -> None:
        if not pass_times and options["device"] == "cuda":
            torch.cuda.synchronize()  # CUDA runs asynchronously: the first pass returns before it is computed.
        pass_times.append(perf_counter())

    if options.get("layer_set"):  # custom_generate bypasses model.forward, so hooks would not run.
        method_arguments["on_tokens"] = lambda token_ids: pass_times.append(perf_counter())
    else:
        model.register_forward_hook(add_pass_time)
    counts = _draft_counts(model) if options.get("ngram") or options.get("draft") else {}

    def answer(line: Values) -> Values:
        pass_times.clear()
        counts.update(dict.fromkeys(counts, 0))
        started = perf_counter()
        inputs = torch.tensor([line["prompt_ids"]], device=options["device"])  # (batch 1, seq)
        arguments = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": line["max_new_tokens"]}
        with torch.inference_mode():
            if options.get("compiled"):
                method_arguments["past_key_values"].reset()
            out = model.generate(inputs, generation_config=config, **arguments, **method_arguments)
        if options.get("layer_set"):
            counts.update(drafted=out.drafted, accepted=out.accepted)
        token_ids = out.sequences[0, inputs.shape[1] :].tolist()
        return {"token_ids": token_ids, "prefill_s": pass_times[0] - started, **counts}

    return answer


def _hf_model(folder: str, options: Values) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    where = for_device("transformers", options)
    return auto.from_pretrained(folder, dtype=getattr(torch, options["dtype"]), local_files_only=True, **where).eval()


def _generate_arguments(model: Any, options: Values) -> Values:
    """Return the arguments of generate that choose the decoding method."""
    if options.get("compiled"):
        return {"past_key_values": _compile(model, options["n_ctx"])}
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


def _compile(model: Any, n_ctx: int) -> Any:
    """Compile the model's passes over one token, as generate does on GPUs, and return the static cache that they need.

    Prefill is not compiled, because each new prompt length would compile again. So would each new size of the cache.
    """
    import torch
    from transformers import StaticCache

    static_cache: Any = StaticCache
    eager, compiled = model.forward, torch.compile(model.forward)

    def forward(input_ids: Any = None, **inputs: Any) -> Any:
        return (compiled if input_ids.shape[1] == 1 else eager)(input_ids=input_ids, **inputs)

    model.forward = forward
    return static_cache(config=model.config, max_cache_len=n_ctx)


def _draft_counts(model: Any) -> dict[str, int]:
    """Return the counts of drafted and accepted tokens, which wrappers of the model's candidate generators update."""
    counts = {"drafted": 0, "accepted": 0}
    get_generator = model._get_candidate_generator

    def get_counting_generator(*args: Any, **kwargs: Any) -> Any:
        generator = get_generator(*args, **kwargs)
        update = generator.update_candidate_strategy

        def count_and_update(input_ids: Any, scores: Any, num_matches: Any) -> None:
            counts["drafted"] += scores.shape[1] - 1  # `scores` has a row per candidate token and one for the next.
            counts["accepted"] += int(num_matches)
            update(input_ids, scores, num_matches)

        generator.update_candidate_strategy = count_and_update
        return generator

    model._get_candidate_generator = get_counting_generator
    return counts


def llama_cpp(options: Values) -> Decoder:
    """llama.cpp through xllamacpp, which runs its server inside the process; `settings` are llama-server's options."""
    import xllamacpp

    params = llama_params(options)
    is_drafting = any(kind.value for kind in params.speculative.types)  # Value 0 means no drafting.
    server = xllamacpp.Server(params)

    def answer(line: Values) -> Values:
        request = {
            **{"prompt": line["prompt_ids"], "max_tokens": line["max_new_tokens"], "temperature": 0, "top_k": 1},
            **{"ignore_eos": True, "cache_prompt": False, "return_tokens": True, "verbose": True},
        }
        completion = server.handle_completions(request)
        if "error" in completion:
            raise RuntimeError(str(completion["error"].get("message", completion["error"])))
        timings = completion["timings"]  # Lacks draft_n if nothing was drafted.
        counts = {"drafted": timings.get("draft_n", 0), "accepted": timings.get("draft_n_accepted", 0)}
        result = {"token_ids": completion["__verbose"]["tokens"], "prefill_s": timings["prompt_ms"] / 1000}
        return {**result, **(counts if is_drafting else {})}

    return answer


def llama_params(options: Values) -> Any:
    """Return the parameters of xllamacpp's server for these options."""
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
    fields = {  # llama-server's option -> the object and field that hold it.
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
        elif name in fields:
            setattr(*fields[name], value)
        elif name != "model-draft":
            raise ValueError(f"the setting {name} is not supported: use spec-type, {', '.join(fields)}")
    return params


def openvino(options: Values) -> Decoder:
    """OpenVINO GenAI on a GGUF file, which it converts, or on a folder in its own format (IR).

    Options: `precision` ("bf16" or "f32"). `settings` are fields of its GenerationConfig.
    """
    import numpy as np
    import openvino
    import openvino_genai

    properties = {"INFERENCE_NUM_THREADS": options["threads"], "INFERENCE_PRECISION_HINT": options["precision"]}
    drafting: Values = {}
    if options.get("draft"):
        draft = options["draft"]
        folder = _ir_folder(draft) if draft.endswith(".gguf") else draft
        drafting = {"draft_model": openvino_genai.draft_model(folder, "CPU", **properties)}
    elif options.get("ngram"):
        drafting = {"prompt_lookup": True}
    pipeline = openvino_genai.LLMPipeline(options["model"], "CPU", **properties, **drafting)
    config = openvino_genai.GenerationConfig()
    config.update_generation_config(ignore_eos=True, do_sample=False, **options.get("settings", {}))

    def answer(line: Values) -> Values:
        config.max_new_tokens = line["max_new_tokens"]
        inputs = openvino.Tensor(np.array([line["prompt_ids"]], dtype=np.int64))  # (batch 1, seq)
        out = pipeline.generate(inputs, config)
        result = {"token_ids": list(out.tokens[0]), "prefill_s": out.perf_metrics.get_ttft().mean / 1000}
        counts = out.extended_perf_metrics  # None for plain decoding and for prompt lookup.
        if counts is None:
            return result
        return {**result, "drafted": counts.get_num_draft_tokens(), "accepted": counts.get_num_accepted_tokens()}

    return answer


def _ir_folder(gguf: str) -> str:
    """Return a GGUF file's folder in OpenVINO's format, which draft models need; the file is converted once."""
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
    """vLLM's build for the device, with its engine in this process; `settings` are its speculative_config.

    If `settings` name a drafting class of swiftopt, swiftopt is imported from the folder `swiftopt`. With
    `trust_remote_code`, vLLM runs Python files in the folders `model` and `draft`, which drafts with swiftopt's config
    need. The parent process sets the number of threads and, on a CPU, the KV cache size by environment variables.
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
        return {key: int(counters.get(name, 0)) for name, key in VLLM_COUNTERS.items()}

    def answer(line: Values) -> Values:
        rule = SamplingParams(temperature=0, max_tokens=line["max_new_tokens"], ignore_eos=True, detokenize=False)
        counts_before = counts()
        (out,) = engine.generate({"prompt_token_ids": line["prompt_ids"]}, rule, use_tqdm=False)
        return {
            "token_ids": list(out.outputs[0].token_ids),
            "prefill_s": getattr(out.metrics, "first_token_latency", None),
            **{key: count - counts_before[key] for key, count in counts().items()},
        }

    return answer


def _load_package(name: str, folder: str) -> None:
    """Import a package by its path. Its parent may be a whole environment, so it is not added to sys.path."""
    spec = spec_from_file_location(name, f"{folder}/__init__.py", submodule_search_locations=[folder])
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def server(options: Values) -> Decoder:
    """A running server with OpenAI's completions API, whose answers must include token ids.

    vLLM returns them on request by `return_token_ids`, llama.cpp's server by `verbose` and `return_tokens`.
    Options: `url`, of the server or of its /v1.
    """
    url = options["url"].rstrip("/").removesuffix("/v1")
    try:
        model = _fetch(f"{url}/v1/models")["data"][0]["id"]
    except (KeyError, IndexError, TypeError) as error:
        raise RuntimeError(f"{url}/v1/models lists no model: use the URL of a server with OpenAI's API") from error

    def answer(line: Values) -> Values:
        body = {
            **{"model": model, "prompt": line["prompt_ids"], "max_tokens": line["max_new_tokens"]},
            **{"temperature": 0, "ignore_eos": True, "cache_prompt": False},
            **{"return_token_ids": True, "return_tokens": True, "verbose": True},
        }
        completion = _fetch(f"{url}/v1/completions", body)
        choice = (completion.get("choices") or [{}])[0]
        token_ids = choice.get("token_ids") or (completion.get("__verbose") or {}).get("tokens")
        if not token_ids:
            raise RuntimeError(f"{url} returns no token ids: use vLLM's or llama.cpp's server")
        timings = completion.get("timings") or {}
        result = {"token_ids": token_ids, "prefill_s": timings["prompt_ms"] / 1000 if "prompt_ms" in timings else None}
        if "draft_n" in timings:
            result |= {"drafted": timings["draft_n"], "accepted": timings["draft_n_accepted"]}
        return result

    return answer


def _fetch(url: str, body: Mapping[str, Any] | None = None) -> Values:
    """Return the JSON object with which the server answers a GET, or a POST of `body`.

    Raises: RuntimeError: it does not answer, or with an error or other content.
    """
    headers = {"Content-Type": "application/json"}
    if os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {os.environ[KEY]}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=SERVER_TIMEOUT_S) as response:
            content = json.load(response)
    except urllib.error.HTTPError as error:
        message = error.read(MAX_MESSAGE).decode(errors="replace")
        raise RuntimeError(f"{url} answered {error.code}: {message}") from error
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{url} does not answer ({error}): is the server running?") from error
    if not isinstance(content, dict):
        raise RuntimeError(f"{url} did not answer with a JSON object")
    return content


PROGRAMS: dict[str, Callable[[Values], Decoder]] = {
    "swiftopt": swiftopt,
    "transformers": transformers,
    "llama-cpp": llama_cpp,
    "openvino": openvino,
    "vllm": vllm,
    "server": server,
}


def main(program: str, options: Values) -> int:
    """Answer the lines of standard input until it ends; return the exit code."""
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
                started = perf_counter()
                answer = decode(values)
                send({**answer, "seconds": perf_counter() - started})
        except Exception as error:  # Engines raise any type; the parent process reports it in a row.
            message = " ".join(str(error).split()) or "no message"
            send({"error": f"{type(error).__name__}: {message[:MAX_MESSAGE]}"})
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
