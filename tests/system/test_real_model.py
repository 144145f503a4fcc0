"""Commands on SmolLM2-135M: tune, look up, generate, bench, serve.

Interrupted runs and servers are separate processes; other commands run in this process.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from api import serving, until_ready

from swiftopt.bench.parity import adaptive_drafts, compare, margin_and_noise, random_sets
from swiftopt.cli.main import run
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.streams import read_stream
from swiftopt.core.types import Prompt, Sampling
from swiftopt.decoding.methods import PLAIN, swift
from swiftopt.decoding.session import Session
from swiftopt.models.loading import load
from swiftopt.models.runtime import Runtime
from swiftopt.store import Store
from swiftopt.tasks.recipes import TYPICAL_POSITIONS, stored_costs

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.usefixtures("rough_costs")]

MODEL, DTYPE = "smollm2-135m", "float32"
RUN = ("--model", MODEL, "--dtype", DTYPE)
EXAMPLES = Path(__file__).parents[2] / "examples" / "stream.jsonl"


@dataclass(frozen=True)
class Said:
    """The output of a command."""

    stdout: str
    stderr: str


def swiftopt(*args: str, expect: int = 0) -> Said:
    """Run a command in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        code = run(args)
    said = Said(*(stream.buffer.getvalue().decode() for stream in (out, err)))  # type: ignore[attr-defined]
    assert code == expect, said.stderr
    return said


@pytest.fixture(scope="module")
def short_stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return five prompts of the second example task; the second is long, so that costs are measured in its context."""
    lines = [line for line in EXAMPLES.read_text(encoding="utf-8").splitlines() if '"code"' in line]
    second = {**json.loads(lines[1]), "prompt": "\n".join(json.loads(line)["prompt"] for line in lines[6:13])}
    path = tmp_path_factory.mktemp("stream") / "code.jsonl"
    path.write_text("\n".join([lines[0], json.dumps(second), *lines[2:5]]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def runtime32() -> Runtime:
    return load(MODEL, DTYPE, "cpu")


@pytest.fixture(scope="module")
def tuned(rough_costs: None, short_stream: Path, own_folders: Path) -> dict[str, Any]:
    """Tune shortly in a given format, with costs that all tests share; return the JSON summary."""
    out = own_folders / "out.jsonl"
    args = ["tune", *RUN, "--stream", str(short_stream), "--out", str(out), "--max-new-tokens", "40"]
    summary: dict[str, Any] = json.loads(
        swiftopt(*args, "--max-steps", "12", "--draft-format", "int4", "--json").stdout
    )
    assert len(out.read_text(encoding="utf-8").splitlines()) == 5
    return summary


def test_tokens_equal_transformers_generate_in_float32(
    runtime32: Runtime, tuned: dict[str, Any], own_folders: Path
) -> None:
    """Drafts use the costs that the tuning has measured."""
    prompts = read_stream(str(EXAMPLES))
    picked = [prompts[3], prompts[16]]  # the shortest of each task
    sets = {**random_sets(runtime32.n_layers, 1), "uniform": LayerSet.uniform(runtime32.n_layers, 25)}
    methods = {name: swift(layer_set, SwiftSettings()) for name, layer_set in sets.items()}
    with Store.open(str(own_folders / "swiftopt.db")) as store:
        costs = stored_costs(runtime32, store, TYPICAL_POSITIONS)
    methods |= adaptive_drafts(runtime32, ["int4"], costs)
    report = compare(runtime32, picked, methods, 10, "transformers")
    assert report["identical"] == dict.fromkeys(methods, 2), report["divergences"]


def test_bfloat16_diverges_only_where_the_margin_is_within_the_noise() -> None:
    """A divergence is allowed only if the margin of the two best logits is at most twice the difference between passes
    over one row and several rows of the same text, measured at that position; both logits may change."""
    runtime = load(MODEL, "bfloat16", "cpu")
    session = Session(runtime, Sampling(), 32)
    for prompt in read_stream(str(EXAMPLES), limit=3):
        plain = next(iter(session.run(prompt, PLAIN)))[1].token_ids
        drafter = swift(LayerSet.uniform(runtime.n_layers, 25), SwiftSettings())
        fast = next(iter(session.run(prompt, drafter)))[1].token_ids
        at = next((i for i, (a, b) in enumerate(zip(plain, fast, strict=False)) if a != b), None)
        if at is not None:
            margin, noise = margin_and_noise(runtime, [*session.encode(prompt), *plain[:at]])
            ulp = 2.0**-3  # one step of bfloat16 for logits from 16 to 32
            assert margin <= 2 * max(noise, ulp), (prompt.id, at, margin, noise)


def test_sampling_with_a_seed_gives_plain_tokens(runtime32: Runtime) -> None:
    session = Session(runtime32, Sampling(temperature=0.8, top_p=0.9, seed=7), 32)
    prompt = Prompt("1", "t", text="Once upon a time")
    drafter = swift(LayerSet.uniform(runtime32.n_layers, 12), SwiftSettings())
    plain, fast = (next(iter(session.run(prompt, d)))[1] for d in (PLAIN, drafter))
    assert plain.token_ids == fast.token_ids and fast.accepted > 0


def test_stop_string_ends_the_text_before_it(runtime32: Runtime) -> None:
    prompt = Prompt("1", "t", text="def add(a, b):")
    full = next(iter(Session(runtime32, Sampling(), 24).run(prompt, PLAIN)))[1].text
    stop = full.strip().split()[3]
    drafter = swift(LayerSet.uniform(runtime32.n_layers, 12), SwiftSettings())
    for way in (PLAIN, drafter):
        done = next(iter(Session(runtime32, Sampling(), 24, [stop]).run(prompt, way)))[1]
        assert done.finish_reason == "stop_string" and done.text == full[: full.index(stop)]


def test_tune_stores_a_set_that_best_prints(tuned: dict[str, Any]) -> None:
    best = json.loads(swiftopt("layers", "best", f"{MODEL}/code", "--json").stdout)
    assert best["schema"] == "swiftopt.layer-set/1" and best["task"] == "code" and best["n_layers"] == 30
    assert best["verdict"] in ("use", "plain") and best["measured_speedup"] > 0
    low, high = best["measured_interval"]
    assert low <= best["measured_speedup"] <= high
    assert tuned["schema"].startswith("swiftopt.tune/")


def test_generate_reports_what_it_did(tuned: dict[str, Any]) -> None:
    common = ["generate", *RUN, "--task", "code", "--prompt", "def add(a, b):", "--max-new-tokens", "16"]
    adaptive = json.loads(swiftopt(*common, "--method", "adaptive", "--json").stdout)
    plain = json.loads(swiftopt(*common, "--method", "plain", "--json").stdout)
    assert adaptive["token_ids"] == plain["token_ids"] and len(plain["token_ids"]) <= 16
    assert adaptive["drafted"] >= adaptive["accepted"] and plain["drafted"] == 0
    assert adaptive["target_passes"] <= plain["target_passes"]  # on a busy machine nothing may pay
    assert set(adaptive["timings"]) == {"optimise", "draft", "verify", "other"}
    assert adaptive["layer_set"]["schema"] == "swiftopt.layer-set/1"
    obeyed = json.loads(swiftopt(*common, "--json").stdout)
    assert obeyed["method"] == ("adaptive" if obeyed["verdict"] == "use" else "plain")


def test_generate_takes_an_exported_set_and_a_stream(tuned: dict[str, Any], short_stream: Path, tmp_path: Path) -> None:
    file = tmp_path / "set.json"
    swiftopt("layers", "export", f"{MODEL}/code", "-o", str(file))
    args = ["generate", *RUN, "--stream", str(short_stream), "--limit", "2", "--layer-set", str(file)]
    lines = swiftopt(*args, "--max-new-tokens", "8", "--json").stdout.splitlines()
    assert [json.loads(line)["method"] for line in lines] == ["adaptive", "adaptive"]


def test_bench_decode_ends_with_one_json_object(tuned: dict[str, Any]) -> None:
    args = ["bench", "decode", *RUN, "--stream", str(EXAMPLES), "--limit", "2", "--max-new-tokens", "12"]
    report = json.loads(swiftopt(*args, "--json").stdout)
    assert {"schema", "model", "device", "dtype", "prompts", "results"} <= set(report)
    assert [result["method"] for result in report["results"]] == ["plain", "swift", "hf-plain", "hf-lookup"]
    assert all(result["identical"] == result["of"] == 2 for result in report["results"])
    assert report["results"][0]["ratio"] == 1.0


def test_interrupting_a_tune_keeps_what_was_finished(
    tuned: dict[str, Any], own_folders: Path, short_stream: Path, tmp_path: Path
) -> None:
    """Costs are known and the format is given, so that prompts start at once."""
    out, db = tmp_path / "out.jsonl", shutil.copy(own_folders / "swiftopt.db", tmp_path / "cut.db")
    args = ["tune", *RUN, "--stream", str(short_stream), "--out", str(out), "--db", str(db), "--draft-format", "stored"]
    process = subprocess.Popen(
        [sys.executable, "-m", "swiftopt", *args, "--max-new-tokens", "40"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (out.exists() and out.read_text(encoding="utf-8")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    lines = out.read_text(encoding="utf-8").splitlines()
    assert lines and all(json.loads(line)["n_tokens"] > 0 for line in lines)
    kept = json.loads(swiftopt("layers", "list", "--db", str(db), "--json").stdout)
    newest = max((each for each in kept["layer_sets"] if each["model"] == MODEL), key=lambda each: each["version"])
    assert (newest["task"], newest["verdict"]) == ("code", "unmeasured")


def test_a_prompt_longer_than_the_context_is_refused_by_name(tmp_path: Path) -> None:
    stream = tmp_path / "long.jsonl"
    stream.write_text(json.dumps({"id": "huge", "prompt": "word " * 9000}) + "\n", encoding="utf-8")
    done = swiftopt("generate", "--model", MODEL, "--stream", str(stream), expect=2)
    assert "'huge'" in done.stderr and "context length is 8192" in done.stderr and "Traceback" not in done.stderr


def test_peak_rows_of_a_draft_cost_little_memory(runtime32: Runtime) -> None:
    """Drafting needs a further buffer of less than 5 % of the model's weights."""
    drafter = swift(LayerSet.uniform(runtime32.n_layers, 25), SwiftSettings())
    weights = sum(p.numel() * p.element_size() for p in runtime32.hf_model.parameters())
    buffer = runtime32.new_buffer(drafter.drafter.max_rows(128))
    extra = sum(part.nbytes for part in (*buffer.keys, *buffer.values))
    assert isinstance(runtime32.device, torch.device) and extra < 0.05 * weights


def test_served_model_keeps_to_schemas_and_calls_the_tool_it_must(
    tuned: dict[str, Any], own_folders: Path, tmp_path: Path
) -> None:
    database = str(own_folders / "swiftopt.db")  # knows what passes cost
    parameters = {"type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}, "required": ["town"]}
    closed = {**parameters, "additionalProperties": False}
    with serving(database, tmp_path / "log", *RUN, "--rate", "0", "--threads", "1") as served:
        until_ready(served)
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        asked: Any = {"model": MODEL, "temperature": 0, "max_tokens": 60}
        messages: Any = [{"role": "user", "content": "How warm is it in Rome?"}]
        schema: Any = {"type": "json_schema", "json_schema": {"name": "town", "schema": closed}}
        done = client.chat.completions.create(**asked, messages=messages, response_format=schema)
        assert json.loads(done.choices[0].message.content or "")["town"] in ("Rome", "Oslo")
        assert done.choices[0].finish_reason == "stop"
        tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": closed}}]
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            called = client.chat.completions.create(
                **asked, messages=messages, tools=tools, tool_choice=choice
            ).choices[0]
            assert called.finish_reason == "tool_calls" and called.message.tool_calls is not None
            assert called.message.content is None
            function: Any = called.message.tool_calls[0]
            assert function.function.name == "weather" and json.loads(function.function.arguments)["town"] == "Rome"
        with pytest.raises(openai.BadRequestError, match="there is no tool 'other'"):
            other: Any = {"type": "function", "function": {"name": "other"}}
            client.chat.completions.create(**asked, messages=messages, tools=tools, tool_choice=other)
