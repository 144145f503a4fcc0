"""Clients that no one here wrote, against a real server: `make conformance`.

    python conformance.py [--model smollm2-135m] [--only lm-eval]

Each is installed into an environment of its own under the user's cache. llm-comply holds answers to the schemas of
OpenAI's document, for chats and for Responses; lm-eval's log probabilities of given continuations must be those of
transformers in float32; npm's `openai` streams, parses, and is refused; guidellm streams several requests at once by
each route, with prompts that it makes by the model's tokenizer: all must succeed, be timed, and have the tokens that
the server counts. Once the environments are there, nothing needs a network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import platformdirs
from api import Served, serving, until_ready

from swiftopt.models.sources import local_folder, resolve

# Of llm-comply; images, phases and reasoning are none of ours.
CASES = ("basic-response", "system-prompt", "multi-turn", "tool-calling", "streaming-response", "streaming-usage")
MODELS_OWN = ("got 'incomplete'", "got 'length'")  # a small model may go on to the end of its context
CONTEXT = 512  # tokens, so that this does not take minutes
FORMS = {"openai-chat": "chat-", "open-responses": ""}  # with what their cases begin


QUESTIONS = (  # and continuations, the likely one first
    ("def add(a, b):\n    return a", (" + b", " - b", " * b")),
    ("The capital of France is", (" Paris", " Rome", " a bicycle")),
    ("for i in range(10):\n   ", (" print(i)", " banana", " import")),
    ("Water boils at a temperature of", (" 100 degrees", " green", " the")),
)
LM_TASK = """
task: made
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
N_REQUESTS, N_AT_ONCE = 24, 4  # of guidellm, by each route
PROMPT_TOKENS, OUTPUT_TOKENS = 40, 24
COUNTED = {"request_success": "successful", "prompt_tokens": "prompt", "generation_tokens": "output"}
CLOSE = 2e-3  # of a continuation's log probability, in nats: several sums of float32 in another order


def environment(name: str, *requirements: str) -> Path:
    """The folder of the programs of an environment that has the packages."""
    folder = Path(platformdirs.user_cache_dir("swiftopt")) / "conformance" / name
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *requirements], check=True)
        (folder / "done").touch()
    return folder / "bin"


def npm_environment(name: str, *packages: str) -> Path:
    """The folder of an environment that has npm's packages."""
    folder = Path(platformdirs.user_cache_dir("swiftopt")) / "conformance" / f"npm-{name}"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, *packages], check=True
        )
        (folder / "done").touch()
    return folder


def lm_eval(served: Served, model: str, path: str) -> list[str]:
    """Where lm-eval's figures over HTTP are not those of transformers."""
    program = environment("lm-eval-0.4.13", "lm-eval[api]==0.4.13", "transformers") / "lm_eval"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        docs = [{"question": text, "choices": list(choices), "answer": 0} for text, choices in QUESTIONS]
        (folder / "made.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        (folder / "made.yaml").write_text(LM_TASK.format(file=folder / "made.jsonl"))
        options = {"model": model, "base_url": f"{served.url}/v1/completions", "tokenizer": path, "num_concurrent": "4"}
        subprocess.run(
            [
                *(program, "run", "--model", "local-completions", "--tasks", "made", "--include_path", folder),
                *("--model_args", ",".join(f"{key}={value}" for key, value in options.items())),
                *("--log_samples", "--output_path", folder / "out"),
            ],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")},
            capture_output=True,
            check=True,
        )
        [file] = (folder / "out").rglob("samples_made_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
    wrong = []
    for sample in sorted(samples, key=lambda own: int(own["doc_id"])):
        text, choices = QUESTIONS[sample["doc_id"]]
        told = [float(value) for ((value, _),) in sample["resps"]]
        expected = log_probabilities(path, text, choices)
        print(f"lm-eval {text!r}: {told}, transformers {expected}")
        wrong += [f"{text!r}: {a} and {b}" for a, b in zip(told, expected, strict=True) if abs(a - b) > CLOSE]
    return wrong


def log_probabilities(path: str, text: str, choices: Sequence[str]) -> list[float]:
    """What transformers' own model says of each continuation, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    n_before, found = len(tokenizer(text.rstrip()).input_ids), []  # lm-eval gives spaces at the end to continuations
    for choice in choices:
        ids = tokenizer(text + choice, return_tensors="pt").input_ids
        with torch.inference_mode():
            own = model(ids).logits[0, n_before - 1 : -1].log_softmax(-1)
        found.append(float(own.gather(1, ids[0, n_before:, None]).sum()))
    return found


def npm_openai(served: Served, model: str, path: str) -> list[str]:
    """What npm's client did not get as it should."""
    folder = npm_environment("openai-7.57.0", "openai@7.57.0")
    script = folder / "openai.mjs"  # beside what it imports
    script.write_text((Path(__file__).parent / "clients" / "openai.mjs").read_text())
    done = subprocess.run(["node", script, served.url, model], capture_output=True, text=True, check=False)
    if done.returncode:
        return [f"npm openai: {done.stderr.strip()[-500:]}"]
    print(f"npm openai: {done.stdout.strip()}")
    found = json.loads(done.stdout)
    checks = {
        "a stream is the whole": found["streamed"] == found["whole"] == found["response"] != "",
        "its end": found["finish"] in ("stop", "length"),
        "usage": found["tokens"][0] == found["tokens"][1] > 0,
        "a schema": found["n"] == "number",
        "an unknown model": found["refused"] == {"status": 404, "name": "NotFoundError"},
        "models": found["models"] == [model],
    }
    return [f"npm openai: {name}: {found}" for name, holds in checks.items() if not holds]


def llm_comply(served: Served, model: str, path: str) -> list[str]:
    """What llm-comply finds wrong."""
    program, wrong = environment("llm-comply-0.5.0", "llm-comply==0.5.0") / "llm-comply", []
    for form, begin in FORMS.items():
        names = [begin + case for case in (*CASES, "error-handling")]
        common = ["--base-url", f"{served.url}/v1", "--api-key", "none", "--model", model, "--format", form]
        done = subprocess.run(
            [program, *common, "--filter", ",".join(names), "--json", "--timeout", "300"],
            capture_output=True,
            text=True,
            check=False,
        )
        report: dict[str, Any] = json.loads(done.stdout)
        for case in report["results"]:
            print(f"llm-comply {form} {case['id']}: {case['status']}")
            errors = [error for error in case.get("errors", ()) if not error.endswith(MODELS_OWN)]
            wrong += [f"{form} {case['id']}: {error}" for error in errors]
    return wrong


def guidellm(served: Served, model: str, path: str) -> list[str]:
    """What guidellm finds wrong under load."""
    program = environment("guidellm-0.8.1", "torch==2.13.0", "guidellm==0.8.1") / "guidellm"
    return [
        f"guidellm {route}: {line}"
        for route in ("/v1/completions", "/v1/chat/completions", "/v1/responses")
        for line in under_load(program, served, model, path, route)
    ]


def under_load(program: Path, served: Served, model: str, path: str, route: str) -> list[str]:
    """What is wrong with guidellm's report on requests to a route; its tokens are those of `usage`."""
    options = {
        "backend": f"kind=openai_http,target={served.url},model={model},request_format={route}",
        "profile": f"kind=concurrent,streams={N_AT_ONCE}",
        "constraint": f"kind=max_requests,count={N_REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={path}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
    }
    before = n_counted(served)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        chosen = [word for name, value in options.items() for word in (f"--{name}", value)]
        done = subprocess.run(
            [program, "run", "--disable-console", *chosen, "--output", f"kind=json,path={file}"],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": folder},
            capture_output=True,
            text=True,
            cwd=folder,
            check=False,
        )
        if done.returncode:
            return [done.stderr.strip()[-500:]]
        [report] = json.loads(file.read_text())["benchmarks"]
    counted = {name: n - before[name] for name, n in n_counted(served).items()}
    requests, metrics = report["requests"]["successful"], report["metrics"]
    waits = [metrics[f"{name}_ms"]["successful"]["median"] for name in ("time_to_first_token", "inter_token_latency")]
    n_prompt, n_output = (sum(each[f"{kind}_tokens"] for each in requests) for kind in ("prompt", "output"))
    print(f"guidellm {route}: {metrics['request_totals']}, {n_prompt} + {n_output} tokens, ms {waits}")
    checks = {
        "all succeed": metrics["request_totals"]["successful"] == metrics["request_totals"]["total"] == N_REQUESTS,
        "they are timed": min(waits) > 0,
        "the server counts the same": counted == {"successful": N_REQUESTS, "prompt": n_prompt, "output": n_output},
    }
    if route == "/v1/completions":  # no template, and `ignore_eos` holds
        checks["lengths"] = (n_prompt, n_output) == (N_REQUESTS * PROMPT_TOKENS, N_REQUESTS * OUTPUT_TOKENS)
    return [
        f"{name}: {metrics['request_totals']}, {n_prompt} + {n_output} tokens, {waits}, the server {counted}"
        for name, holds in checks.items()
        if not holds
    ]


def n_counted(served: Served) -> dict[str, int]:
    """Requests and tokens that the server has counted."""
    lines = [line.split() for line in served.client.get("/metrics").text.splitlines() if line.startswith("vllm:")]
    values = Counter[str]()
    for name, value in lines:
        values[name.partition("{")[0]] += round(float(value))
    return {own: values[f"vllm:{name}_total"] for name, own in COUNTED.items()}


CLIENTS: dict[str, Callable[[Served, str, str], list[str]]] = {
    "llm-comply": llm_comply,
    "lm-eval": lm_eval,
    "npm-openai": npm_openai,
    "guidellm": guidellm,
}


def with_short_context(path: str, where: Path) -> str:
    """Return a folder that links to a model's files, but says that its context is short."""
    where.mkdir()
    for file in Path(path).iterdir():
        if file.name != "config.json":
            (where / file.name).symlink_to(file.resolve())
    config = json.loads((Path(path) / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return str(where)


def main() -> None:
    """Run the clients; exits with 1 where one finds something wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", choices=sorted(CLIENTS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(temporary)
        path = with_short_context(str(local_folder(resolve(args.model))), where / "model")
        options = ("--model", f"model={path}", "--rate", "0", "--dtype", "float32")
        with serving(str(where / "a.db"), where / "log", *options) as served:
            until_ready(served)
            chosen = [own for name, own in CLIENTS.items() if args.only in (None, name)]
            wrong = [line for own in chosen for line in own(served, "model", path)]
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
