"""`swiftopt serve --model`: a real server with its engine's process, used by OpenAI's client and by plain requests."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from codecs import utf_8_decode
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from io import BytesIO
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx2
import openai
import psutil
import pytest
import torch
from api import Served, serving, until_ready
from converted import write_gguf
from fakes import READY, letter_tokenizer
from families import tiny_model
from hypothesis import HealthCheck, Phase, given, settings
from tiny_files import save
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import swiftopt
from swiftopt.core.errors import (
    Busy,
    ContextOverflow,
    EngineGone,
    HubUnreachable,
    InvalidInput,
    ModelNotFound,
    NotFound,
    SettingsError,
    UnsupportedModel,
)
from swiftopt.core.events import TaskTuning, Tuning
from swiftopt.core.messages import (
    AnswerDone,
    Cancel,
    Decode,
    Detokenize,
    Failed,
    FromEngine,
    PromptRead,
    Question,
    Steer,
    TokensText,
    encode,
    from_engine,
)
from swiftopt.core.requests import CompletionRequest, ServedModel
from swiftopt.core.streams import read_stream
from swiftopt.models.rows import Pass, Rows
from swiftopt.server.engines import ANSWER_S, MOST_RESTARTS, EngineProcess, Engines, Reply, Restarted
from swiftopt.server.settings import new_key
from swiftopt.store import Store
from swiftopt.worker.served_tokens import session_of
from swiftopt.worker.serving import LONG_LINE, EngineHost, MessageWriter, SentCompletion

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    import schemathesis
    from schemathesis.checks import CHECKS

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}w1 {{ m.content }} {% endfor %}"
    "{% if date %}{{ 'w4 ' + date }}{% endif %}{% if add_generation_prompt %}w2{% endif %}"
)
TEXT = "w3 w5 w3 w5 w7"
START_S = 60
FUZZ_S = {  # of random requests to an engine
    **{"/v1/chat/completions": 2.0, "/v1/completions": 1.0, "/v1/responses": 1.0},
    **{"/tokenize": 0.5, "/detokenize": 0.5},
}
KEPT = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(tmp_path_factory.mktemp("model") / "tiny")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    where = tmp_path_factory.mktemp("served")
    options = ["--model", f"tiny={folder}", "--dtype", "float32", "--rate", "0", "--concurrency", "4", "--threads", "1"]
    with serving(str(where / "a.db"), where / "log", *options) as served:
        until_ready(served)
        yield served


@pytest.fixture(scope="module")
def lettered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a server of a tiny model that writes letters and parts of multi-byte characters, and can end a thought."""
    where = tmp_path_factory.mktemp("lettered")
    folder = save(where / "tiny")
    whole = json.loads(letter_tokenizer().backend_tokenizer.to_str())
    others = {"#": "Ã", "%": "©", "&": "¨", "Q": "</think>"}
    whole["model"]["vocab"] = {others.get(word, word): i for word, i in whole["model"]["vocab"].items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(whole)), eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if thinking or messages[-1].content == 'muse' %}<think>{% endif %}"
        "{# a thought ends with </think> #}"
    )
    tokenizer.save_pretrained(folder)
    options = ["--model", f"tiny={folder}", "--dtype", "float32", "--rate", "0", "--threads", "1", "--no-tune"]
    with serving(str(where / "a.db"), where / "log", *options) as served:
        until_ready(served)
        yield served


def id_of(word: str) -> str:
    """Return the id of a token of the letters' tokenizer."""
    return str(letter_tokenizer().get_vocab()[word])


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def model(folder: Path) -> swiftopt.Model:
    return swiftopt.Model("tiny", swiftopt.load(str(folder), dtype="float32").runtime, None)


def engine_of(served: Served) -> psutil.Process:
    """Return the server's process that decodes."""
    children = psutil.Process(served.process.pid).children(recursive=True)
    return next(child for child in children if "swiftopt.worker.serving" in child.cmdline())


@contextmanager
def slowed(engine: psutil.Process) -> Iterator[None]:
    """Let an engine run for a small share of the time, so that a test can act within a completion."""
    over = threading.Event()

    def pulse() -> None:
        with suppress(psutil.NoSuchProcess):
            while not over.wait(0.001):
                engine.suspend()
                time.sleep(0.05)
                engine.resume()

    engine.nice(19)  # it then also waits for this thread, where others want the processors
    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def refused(response: Any, status: int, param: str | None = None) -> str:
    """Return the message of an error in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
    kinds = {"tokens", "requests"} if status == 429 else {"server_error" if status >= 500 else "invalid_request_error"}
    assert error["type"] in kinds
    assert error["code"] is None or re.fullmatch("[a-z_]+", error["code"])
    assert "\n" not in error["message"] and "Traceback" not in error["message"]
    return str(error["message"])


def chunks_of(lines: Iterator[str]) -> list[Any]:
    """Yield the objects of a stream, with `[DONE]` as text."""
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in found]


def test_completion_is_plain_decoding_of_the_same_prompt(client: openai.OpenAI, model: swiftopt.Model) -> None:
    expected = model.generate(TEXT, max_new_tokens=24)
    for extra in ({}, {"swiftopt": {"plan": "plain"}}, {"swiftopt": {"task": "notes"}}):
        done = client.completions.create(model="tiny", prompt=TEXT, max_tokens=24, temperature=0, extra_body=extra)
        assert done.choices[0].text == expected.text and done.choices[0].finish_reason == "length"
        assert done.usage is not None and done.usage.completion_tokens == 24
        assert done.usage.prompt_tokens == expected.n_prompt_tokens == done.usage.total_tokens - 24


def test_stream_joins_to_the_whole_completion_and_ends_with_done(client: openai.OpenAI, server: Served) -> None:
    messages: Any = [{"role": "system", "content": "w9"}, {"role": "user", "content": TEXT}]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=24, temperature=0)
    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == whole.choices[0].message.content
    body = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        first, *content, last, usage, done = chunks_of(response.iter_lines())
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(list(chunk["choices"][0]["delta"]) == ["content"] and chunk["usage"] is None for chunk in content)
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 24 and done == "[DONE]"
    assert {chunk["object"] for chunk in (first, *content, last, usage)} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (first, *content, last, usage)}) == 1


def test_prompts_as_lists_and_ids_choices_seeds_and_stops(client: openai.OpenAI, model: swiftopt.Model) -> None:
    ids = model.runtime.tokenizer(TEXT)["input_ids"]
    ask = client.completions.create
    one = ask(model="tiny", prompt=TEXT, max_tokens=12, temperature=0).choices[0].text
    for prompt, n in ((ids, 1), ([TEXT, TEXT], 2), ([ids, ids, ids], 3)):
        done = ask(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        assert [choice.text for choice in done.choices] == [one] * n
        assert [choice.index for choice in done.choices] == list(range(n)) and done.usage is not None
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (n * len(ids), 12 * n)
    assert ask(model="tiny", prompt=TEXT, max_tokens=12, temperature=0, echo=True).choices[0].text == TEXT + one
    drawn = ask(model="tiny", prompt=TEXT, max_tokens=12, temperature=1, n=3, seed=7)
    again = ask(model="tiny", prompt=TEXT, max_tokens=12, temperature=1, n=3, seed=7)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == len(ids) - 1, "of one prompt"
    texts = [choice.text for choice in drawn.choices]
    assert texts == [choice.text for choice in again.choices] and len(set(texts)) == 3
    assert drawn.usage is not None and drawn.usage.prompt_tokens == len(ids)
    word = one.split()[4]
    cut = ask(model="tiny", prompt=TEXT, max_tokens=12, temperature=0, stop=word)
    assert cut.choices[0].finish_reason == "stop" and cut.choices[0].text == one[: one.index(word)]


def test_concurrent_requests_get_the_same_answers_as_alone(client: openai.OpenAI, model: swiftopt.Model) -> None:
    texts = [f"w{i + 1} w{i + 2} w{i + 1}" for i in range(12)]
    expected = [model.generate(text, max_new_tokens=16).text for text in texts]

    def ask(text: str) -> str:
        done = client.completions.create(model="tiny", prompt=text, max_tokens=16, temperature=0)
        return done.choices[0].text

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, texts)) == expected


def test_cancelled_streams_of_an_async_client_free_their_places(server: Served, model: swiftopt.Model) -> None:
    texts = [f"w{i + 1} w{i + 3} w{i + 1}" for i in range(8)]
    expected = [model.generate(text, max_new_tokens=16).text for text in texts]

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:

            async def streamed(text: str, max_tokens: int, begun: asyncio.Event) -> str:
                more = {"ignore_eos": True}
                stream = await client.completions.create(
                    model="tiny", prompt=text, max_tokens=max_tokens, temperature=0, stream=True, extra_body=more
                )
                pieces = []
                async for chunk in stream:
                    begun.set()
                    pieces.append(chunk.choices[0].text)
                return "".join(pieces)

            assert await asyncio.gather(*(streamed(text, 16, asyncio.Event()) for text in texts)) == expected
            n_done = n_succeeded(server)
            events = [asyncio.Event() for _ in range(4)]  # as many as there are places
            long = [asyncio.create_task(streamed(text, 240, event)) for text, event in zip(texts, events, strict=False)]
            await asyncio.gather(*(event.wait() for event in events))
            for task in long:
                task.cancel()
            ended = await asyncio.gather(*long, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in ended)
            assert await asyncio.gather(*(streamed(text, 16, asyncio.Event()) for text in texts)) == expected
            until_idle(server)
            assert n_succeeded(server) == n_done + len(texts)  # the others were given up, not finished

    asyncio.run(ask())


def test_bad_requests_are_refused_in_openais_form(server: Served) -> None:
    post = server.client.post
    chat = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}]}
    assert "did you mean 'tiny'?" in refused(
        post("/v1/chat/completions", json={**chat, "model": "tinny"}), 404, "model"
    )
    told = refused(post("/v1/chat/completions", json={**chat, "model": "gpt-4o"}), 404, "model")
    assert told.endswith("is not served here: use tiny")
    refused(post("/v1/chat/completions", json={**chat, "temperature": 3}), 400, "temperature")
    refused(post("/v1/chat/completions", json={**chat, "stream_options": {}}), 400, "stream_options")
    refused(post("/v1/chat/completions", json={"model": "tiny"}), 400, "messages")
    robot = [{"role": "robot", "content": "w1"}]
    words = refused(post("/v1/chat/completions", json={**chat, "messages": robot}), 400, "messages[0].role")
    assert "'robot': use 'developer', 'system', 'user'" in words
    tool = [*chat["messages"], {"role": "tool", "content": "w1"}]
    assert "no role tool" in refused(
        post("/v1/chat/completions", json={**chat, "messages": tool}), 400, "messages[1].role"
    )
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    words = refused(post("/v1/chat/completions", json={**chat, "messages": image}), 400, "messages[0].content[0].type")
    assert "of type 'image_url': only text is supported" in words
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    words = refused(post("/v1/responses", json={"model": "tiny", "input": image}), 400, "input[0].content[0].type")
    assert "of type 'input_image': only text is supported" in words
    refused(post("/v1/completions", json={"model": "tiny", "prompt": []}), 400, "prompt")
    refused(post("/v1/completions", content=b"{", headers={"content-type": "application/json"}), 400)
    streamed = post("/v1/completions", json={"model": "tiny", "prompt": TEXT, "max_tokens": 4000, "stream": True})
    refused(streamed, 400, "max_tokens")
    streamed = post("/v1/responses", json={"model": "tiny", "input": "w1 " * 300, "stream": True})
    assert "256" in refused(streamed, 400, "input")
    ignored = post("/v1/chat/completions", json={**chat, "max_tokens": 1, "verbosity": "low"})
    assert ignored.status_code == 200 and ignored.headers["x-swiftopt-ignored"] == "verbosity"


def test_models_tokens_health_and_metrics(server: Served, client: openai.OpenAI, model: swiftopt.Model) -> None:
    assert [card.id for card in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
    ids = model.runtime.tokenizer(TEXT)["input_ids"]
    tokens = server.client.post("/tokenize", json={"model": "tiny", "prompt": TEXT}).json()
    assert (tokens["tokens"], tokens["count"]) == (ids, len(ids))
    text = server.client.post("/detokenize", json={"model": "tiny", "tokens": ids}).json()
    assert text["prompt"] == TEXT
    ignored = server.client.post("/detokenize", json={"model": "tiny", "tokens": ids, "skip_special_tokens": True})
    assert ignored.headers["x-swiftopt-ignored"] == "skip_special_tokens"
    long = server.client.post("/tokenize", json={"model": "tiny", "prompt": "w3 " * 300}).json()
    assert (long["count"], long["max_model_len"]) == (300, 256), "so that a client can see by how much it is too long"
    client.completions.create(model="tiny", prompt=TEXT, max_tokens=8)
    found = server.client.get("/metrics").text
    assert 'vllm:num_requests_running{model_name="tiny"} 0.0' in found
    assert 'vllm:generation_tokens_total{model_name="tiny"}' in found
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"}' in found
    ours = {line.split()[0]: float(line.split()[1]) for line in found.splitlines() if line.startswith("swiftopt_serv")}
    tasks = server.client.get("/v1/tuning").json()["models"]["tiny"]["tasks"]
    assert tasks
    for task in tasks:
        of = f'{{model_name="tiny",task="{task["task"]}"}}'
        assert ours[f"swiftopt_serving_drafts{of}"] == (task["in_use"] == "drafts")
        assert ours[f"swiftopt_serving_requests_total{of}"] == task["requests"] > 0
        assert ours[f"swiftopt_serving_tokens_total{of}"] == task["tokens"]
        assert ours[f"swiftopt_serving_search_seconds_total{of}"] <= task["search"]["seconds"]
        known = [f"swiftopt_serving_{name}{of}" in ours for name in ("ratio", "ratio_low", "ratio_high")]
        assert known == [task["ratio"] is not None, *[task["interval"] is not None] * 2]


def test_metrics_do_not_wait_for_an_engine(server: Served) -> None:
    engine = engine_of(server)
    engine.suspend()
    try:
        assert "swiftopt_serving_requests_total" in server.client.get("/metrics", timeout=ANSWER_S / 2).text
    finally:
        engine.resume()


def test_engine_has_no_database_among_its_arguments(server: Served) -> None:
    """The database's URL may contain a password, and `ps` shows arguments to all users."""
    assert server.log.parent.name not in " ".join(engine_of(server).cmdline())


def test_health_reports_the_steps_of_loading(server: Served) -> None:
    before, ready, _ = server.log.read_text().partition("engine=ready")
    assert ready and "engine=loading" in before and "reading its weights" in before


@pytest.mark.slow
def test_requests_wait_for_a_model_that_is_being_loaded(folder: Path, tmp_path: Path) -> None:
    options = ["--model", f"tiny={folder}", "--dtype", "float32", "--rate", "0", "--threads", "1", "--no-tune"]
    asked = [*BODIES.items(), ("/tokenize", BODIES[CHAT]), ("/detokenize", {"model": "tiny", "tokens": [3]})]
    with serving(str(tmp_path / "a.db"), tmp_path / "log", *options) as served:
        post = partial(served.client.post, timeout=START_S)

        def statuses() -> list[int]:
            with ThreadPoolExecutor(6) as pool:
                streamed = pool.submit(post, CHAT, json={**BODIES[CHAT], "stream": True, "reasoning_effort": "low"})
                answers = list(pool.map(lambda each: post(each[0], json=each[1]), asked))
            # Only the loaded model's template says whether it reads a field.
            assert streamed.result().headers["x-swiftopt-ignored"] == "reasoning_effort"
            assert not any("x-swiftopt-ignored" in answer.headers for answer in answers[:3])
            return [answer.status_code for answer in (*answers, streamed.result())]

        assert "engine=ready" not in served.log.read_text()
        refused(post(CHAT, json={**BODIES[CHAT], "temperature": 3}), 400, "temperature")  # without waiting
        assert "engine=ready" not in served.log.read_text()
        assert statuses() == [200] * 6
        engine_of(served).send_signal(signal.SIGBUS)  # As the system does where a mapped file was cut.
        while served.client.get("/health").status_code == 200:
            time.sleep(0.01)
        assert statuses() == [200] * 6, "while its successor loads it"
        assert (
            "ended by signal 7, because a file of the model was truncated while it was read: the model is loaded again"
            in (served.log.read_text())
        )


def test_request_gets_503_if_its_model_is_not_loaded_in_time(folder: Path, tmp_path: Path) -> None:
    options = ["--model", f"tiny={folder}", "--load-wait", "0", "--threads", "1"]
    with serving(str(tmp_path / "a.db"), tmp_path / "log", *options) as served:
        for path, body in (*BODIES.items(), ("/tokenize", BODIES[CHAT])):
            answer = served.client.post(path, json=body)
            assert "is not available (it is loading the model" in refused(answer, 503)
            assert int(answer.headers["retry-after"]) > 0


def test_server_ends_with_the_reason_if_its_model_cannot_be_loaded(tmp_path: Path) -> None:
    """A request that waits for the model gets the reason first."""
    file = write_gguf(tmp_path / "cut.gguf", tiny_model("llama", torch.float32), "F32")
    file.write_bytes(file.read_bytes()[:-1000])
    options = ["--model", f"tiny={file}", "--threads", "1"]
    with serving(str(tmp_path / "a.db"), tmp_path / "log", *options) as served:
        words = refused(served.client.post(COMPLETION, json=BODIES[COMPLETION], timeout=START_S), 503)
        assert served.process.wait(START_S) == ModelNotFound.exit_code
    log = served.log.read_text()
    assert "is not available (" in words and "it is loading" not in words
    assert log.count("engine=ended") == 1
    assert log.splitlines()[-1].startswith(f"error: {file} is cut short") and log.endswith(": download it again\n")


def test_waiting_requests_are_limited_and_get_an_answer_when_the_server_ends() -> None:
    async def wait() -> None:
        engine = EngineProcess(ServedModel("tiny", "tiny", concurrency=1), most_waiting=1)
        waiting = [asyncio.create_task(engine.until_loaded(START_S)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="2 requests already run or wait"):
            await engine.until_loaded(START_S)
        engine.give_up()
        assert await asyncio.gather(*waiting) == [None, None] and engine.n_until_loaded == 0
        with pytest.raises(EngineGone):
            engine.ask(Decode(CompletionRequest()))

    asyncio.run(wait())


@pytest.mark.slow
def test_server_announces_a_model_once_it_answers(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swiftopt", "serve", "--port", "0", "--db", str(tmp_path / "a.db")]
    command += ["--model", f"mine={folder}", "--no-tune"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        said = next(line for line in process.stderr if line.startswith("swiftopt serves"))
        found = httpx2.get(f"{said.split()[4].rstrip(';')}/health").json()
        process.terminate()
    assert first == "loading mine; requests wait until it is loaded\n"
    assert said.startswith("swiftopt serves mine at http://127.0.0.1:") and found["engines"] == {"mine": "ok"}


@pytest.mark.skipif(sys.platform != "linux", reason="a terminal of ours is Linux's")
@pytest.mark.slow
def test_terminal_shows_one_line_while_a_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "swiftopt", "serve", "--port", "0", "--db", str(tmp_path / "a.db")]
    with subprocess.Popen([*command, "--model", f"mine={folder}"], stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"swiftopt serves mine" not in shown:
            shown += os.read(ours, 1 << 16)
        process.terminate()
    os.close(ours)
    assert b"loading mine: measuring costs" in shown and b"engine=loading" not in shown
    assert len(shown.partition(b"swiftopt serves")[0].split(b"\n")) <= 2  # one, and what moves to the next


def test_statistics_have_vllms_form_on_request(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=32, temperature=0, extra_body={"return_metrics": True}
    )
    found = done.model_extra["metrics"] if done.model_extra else {}
    drafts = found["speculative_decoding"]
    timed = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
    assert all(found[name] >= 0 for name in timed) and found["tokens_per_second"] > 0
    assert found["mean_itl_ms"] == pytest.approx(found["generation_time_ms"] / 31, abs=1e-3)
    counts, n_steps = drafts["acceptance_histogram"], drafts["num_spec_steps"]  # rounds by accepted draft tokens
    assert 0 < sum(counts) == n_steps and len(counts) == drafts["num_spec_tokens"] + 1
    assert sum(n * rounds for n, rounds in enumerate(counts)) == drafts["num_accepted_draft_tokens"]
    assert drafts["mean_acceptance_length"] == 1 + drafts["num_accepted_draft_tokens"] / n_steps
    by_length = {int(n): rounds for n, rounds in drafts["acceptance_histogram_by_draft_length"].items()}
    assert all(len(rounds) == n + 1 for n, rounds in by_length.items()) and sum(map(sum, by_length.values())) == n_steps
    assert sum(n * sum(rounds) for n, rounds in by_length.items()) == drafts["num_draft_tokens"]


@pytest.mark.slow
@pytest.mark.wing("engines")
def test_another_engine_is_tuned_over_http_and_its_plan_is_looked_up(
    server: Served, folder: Path, tmp_path: Path
) -> None:
    stream = tmp_path / "code.jsonl"
    stream.write_text("".join(json.dumps({"prompt": f"w{i} w5 w{i}"}) + "\n" for i in range(8)))
    db = str(tmp_path / "other.db")
    words = ["tune", "--model", str(folder), "--stream", str(stream), "--engine", "vllm", "--max-new-tokens", "8"]
    words += ["--engine-url", f"plain={server.url}", "--engine-url", f"again={server.url}/v1", "--db", db, "--json"]
    done = subprocess.run([sys.executable, "-m", "swiftopt", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (task,) = json.loads(done.stdout)["tasks"]
    assert [(each["name"], each["step"]) for each in task["tried"]][:2] == [("plain", 1), ("again", 1)]
    assert all(each["equal"] == each["n_prompts"] > 0 for each in task["tried"])  # it is one server, after all
    with swiftopt.Store.open(db) as store:
        found = store.lookup(str(folder), "code", alias="vllm")
    assert found.to_json() == task["found"] and found.plan.engine == "vllm"


def test_statistics_of_a_request_without_drafts_count_none(client: openai.OpenAI, server: Served) -> None:
    def n_drafts() -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith("vllm:spec_decode_num_drafts_total"))

    before = n_drafts()
    common: Any = {"model": "tiny", "prompt": TEXT, "max_tokens": 8}
    extra = {"return_metrics": True, "swiftopt": {"plan": "plain"}}
    done = client.completions.create(**common, extra_body=extra)
    found = (done.model_extra or {})["metrics"]["speculative_decoding"]
    nothing = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens")
    assert [found[name] for name in nothing] == [0] * 4
    assert found["acceptance_histogram"] == [0] and found["mean_acceptance_length"] == 1.0
    assert n_drafts() == before
    two = client.completions.create(**common, n=2, extra_body=extra)
    assert (two.model_extra or {})["metrics"] is None


def test_log_probabilities_are_the_models_in_both_forms(client: openai.OpenAI, model: swiftopt.Model) -> None:
    common: Any = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    done = client.completions.create(**common, prompt=TEXT, logprobs=2, echo=True).choices[0]
    assert done.logprobs is not None and done.text.startswith(TEXT)
    told, ids = done.logprobs, model.runtime.tokenizer(TEXT)["input_ids"]
    assert told.tokens is not None and told.token_logprobs is not None and told.top_logprobs is not None
    assert len(told.tokens) == len(told.token_logprobs) == len(ids) + 6
    buffer = model.runtime.new_buffer(len(ids))
    rows = Pass(model.runtime, Rows(ids, 0), buffer)
    expected = model.runtime.forward_together([rows])[0].float().log_softmax(-1)
    assert told.token_logprobs[0] is None
    own = [float(expected[i, token_id]) for i, token_id in enumerate(ids[1:])]
    assert told.token_logprobs[1 : len(ids)] == pytest.approx(own, abs=1e-5)
    assert all(
        max(top.values()) == value
        for value, top in zip(told.token_logprobs[len(ids) :], told.top_logprobs[len(ids) :], strict=True)
    )
    messages: Any = [{"role": "user", "content": TEXT}]
    chat = client.chat.completions.create(**common, messages=messages, logprobs=True, top_logprobs=3).choices[0]
    assert chat.logprobs is not None and chat.logprobs.content is not None and len(chat.logprobs.content) == 6
    assert all(
        len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob == token.logprob
        for token in chat.logprobs.content
    )
    stream = client.chat.completions.create(**common, messages=messages, logprobs=True, top_logprobs=3, stream=True)
    pieces = [piece.choices[0].logprobs for piece in stream if piece.choices[0].logprobs is not None]
    assert [token.logprob for piece in pieces for token in piece.content or ()] == [
        token.logprob for token in chat.logprobs.content
    ]


def test_token_that_ends_a_completion_has_its_log_probability(lettered: Served) -> None:
    """The token has no text, whatever number of tokens came with it."""
    own = {"logprobs": 1, "min_tokens": 3, "logit_bias": {id_of("<eos>"): 100, id_of("a"): 50}}
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 8, "temperature": 0, **own}
    answer = lettered.client.post("/v1/completions", json=body).json()
    [choice] = answer["choices"]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 4)
    assert len(choice["logprobs"]["tokens"]) == 4 and choice["logprobs"]["tokens"][-1] == "<eos>"
    with lettered.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        chunks = [chunk["choices"][0] for chunk in chunks_of(response.iter_lines())[:-1]]
    assert [each for chunk in chunks for each in chunk["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]


def test_echoed_stream_has_the_log_probabilities_of_its_own_text(server: Served) -> None:
    body = {"model": "tiny", "prompt": TEXT, "temperature": 0, "max_tokens": 6, "logprobs": 1, "echo": True}
    whole = server.client.post("/v1/completions", json=body).json()["choices"][0]
    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        chunks = [chunk["choices"][0] for chunk in chunks_of(response.iter_lines())[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"] and chunks[0]["text"] == TEXT
    for chunk in chunks:
        assert chunk["logprobs"]["tokens"] == chunk["text"].split()
    values = [value for chunk in chunks for value in chunk["logprobs"]["token_logprobs"]]
    assert values == whole["logprobs"]["token_logprobs"]


def test_usage_of_a_stream_has_the_prompt_from_the_first_chunk(server: Served, model: swiftopt.Model) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "prompt": [TEXT, "w3"], "max_tokens": 6, "n": 2, "stream": True, "stream_options": options}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        *chunks, _ = chunks_of(response.iter_lines())
    n_prompt = sum(len(model.runtime.tokenizer(text)["input_ids"]) for text in (TEXT, "w3"))
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks[-4:]} == {n_prompt}
    assert chunks[0]["usage"]["prompt_tokens"] > 0


def test_prompt_of_several_choices_is_read_once_and_its_cached_tokens_count_once(server: Served) -> None:
    body = {"model": "tiny", "prompt": "w9 w4 w6 " * 20, "max_tokens": 4, "n": 3, "cache_salt": "read once"}

    def n_found() -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total{"))

    for n_readers in (1, 0):
        before, usage = n_found(), server.client.post("/v1/completions", json=body).json()["usage"]
        n_shared = usage["prompt_tokens"] - 1
        assert n_shared > 50 and usage["prompt_tokens_details"]["cached_tokens"] == (0 if n_readers else n_shared)
        assert n_found() - before == (3 - n_readers) * n_shared


def test_bytes_of_tokens_are_exact_and_offsets_count_characters(lettered: Served) -> None:
    """The model writes a first byte and two second bytes of characters at random; invalid sequences are `\ufffd`."""
    halves = {"bytes:\\xc3": [0xC3], "bytes:\\xa9": [0xA9], "bytes:\\xa8": [0xA8]}
    bias = {id_of(word): 100 for word in "#%&"}
    body = {"model": "tiny", "logit_bias": bias, "max_tokens": 24, "seed": 5, "temperature": 2}
    asked = {**body, "messages": [{"role": "user", "content": "ab"}], "logprobs": True, "top_logprobs": 3}
    [choice] = lettered.client.post("/v1/chat/completions", json=asked).json()["choices"]
    told = choice["logprobs"]["content"]
    assert all(each["bytes"] == halves[each["token"]] for each in told) and len(told) == 24
    assert {each["token"] for each in told} == set(halves)
    written = bytes(byte for each in told for byte in each["bytes"])
    assert written.decode(errors="replace") == choice["message"]["content"]
    tops = [[top["token"] for top in each["top_logprobs"]] for each in told]
    assert all(len(set(top)) == 3 for top in tops)
    asked = {**body, "prompt": "ab", "echo": True, "logprobs": 3}
    [choice] = lettered.client.post("/v1/completions", json=asked).json()["choices"]
    told, text = choice["logprobs"], choice["text"]
    raw = [halves.get(token, list(token.encode())) for token in told["tokens"]]
    before = [bytes(byte for each in raw[:i] for byte in each) for i in range(len(raw))]
    assert told["text_offset"] == [len(utf_8_decode(each, "replace", False)[0]) for each in before]
    assert text.startswith("ab") and len(text) >= told["text_offset"][-1] > 2
    assert all(top is None or len(top) == 3 for top in told["top_logprobs"])
    with lettered.client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response:
        chunks = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(response.iter_lines())[:-1]]
    assert [offset for chunk in chunks for offset in chunk["text_offset"]] == told["text_offset"]


def test_thought_is_separated_from_the_answer_and_counted(lettered: Served) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "temperature": 0, "max_tokens": 8}
    body |= {"chat_template_kwargs": {"thinking": True}, "ignore_eos": True}

    def ask(**more: Any) -> tuple[dict[str, Any], str, str]:
        answer = lettered.client.post("/v1/chat/completions", json={**body, **more}).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with lettered.client.stream("POST", "/v1/chat/completions", json={**body, **more, **options}) as response:
            *chunks, last, _ = chunks_of(response.iter_lines())
        assert last["usage"]["completion_tokens_details"] == answer["usage"]["completion_tokens_details"]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        streamed = ["".join(delta.get(key) or "" for delta in deltas) for key in ("reasoning_content", "content")]
        return answer, streamed[0], streamed[1]

    answer, thought, said = ask()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (thought, None) and thought and not said
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 8
    answer, thought, said = ask(logit_bias={id_of("Q"): 100})  # again and again; the first one ends the thought
    message = answer["choices"][0]["message"]
    assert said == message["content"] == "</think>" * 7 and "reasoning_content" not in message
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1
    answer, thought, said = ask(chat_template_kwargs={})
    assert said == answer["choices"][0]["message"]["content"] and not thought
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_response_has_its_thought_as_a_separate_item(lettered: Served) -> None:
    client = openai.OpenAI(base_url=f"{lettered.url}/v1", api_key="none", max_retries=0, timeout=60)
    asked: dict[str, Any] = {"model": "tiny", "input": "muse", "temperature": 0, "max_output_tokens": 8}
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    thought = whole.output[0].content[0].text
    assert thought and whole.output_text == "" and whole.usage.output_tokens_details.reasoning_tokens == 8
    events = list(client.responses.create(**asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == thought
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[2:4] == ["output_item.added", "content_part.added"]
    assert kinds[-4:] == ["reasoning_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert events[-1].response.output[0] == whole.output[0].model_copy(update={"id": events[-1].response.output[0].id})


def test_calls_of_tools_are_streamed_as_name_and_arguments_before_the_last_chunk(lettered: Served) -> None:
    arguments = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "add", "parameters": {**arguments, "additionalProperties": False}}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "tools": [tool], "temperature": 0}
    body |= {"tool_choice": "required", "stream": True}
    ends: list[tuple[str, str]] = []
    most = lettered.client.post("/v1/chat/completions", json={**body, "stream": False}).json()["usage"]
    for max_tokens in (200, most["completion_tokens"] - 4, 2):
        asked = {**body, "max_tokens": max_tokens}
        with lettered.client.stream("POST", "/v1/chat/completions", json=asked) as response:
            *chunks, _ = chunks_of(response.iter_lines())
        choices = [chunk["choices"][0] for chunk in chunks]
        assert not any(choice["delta"].get("content") for choice in choices) and choices[-1]["delta"] == {}
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        if calls:
            assert calls[0]["function"] == {"name": "add", "arguments": ""} and calls[0]["id"].startswith("call_")
        ends.append((choices[-1]["finish_reason"], "".join(call["function"]["arguments"] for call in calls)))
        [whole] = lettered.client.post("/v1/chat/completions", json={**asked, "stream": False}).json()["choices"]
        assert whole["finish_reason"] == choices[-1]["finish_reason"] and whole["message"]["content"] is None
        told = [call["function"]["arguments"] for call in whole["message"].get("tool_calls", ())]
        assert "".join(told) == ends[-1][1] and bool(told) == bool(calls)
    complete, cut, nothing = ends
    assert complete[0] == "tool_calls" and set(json.loads(complete[1])) == {"a"}
    assert cut[0] == "length" and cut[1] and complete[1].startswith(cut[1])
    assert nothing == ("length", "")


def test_every_answer_states_how_it_was_decoded(server: Served, model: swiftopt.Model) -> None:
    said = {"model": "tiny", "temperature": 0, "swiftopt": {"plan": "plain", "task": "poems"}}
    chat = {**said, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 6}
    text, response = {**said, "prompt": TEXT, "n": 2, "max_tokens": 6}, {**said, "input": TEXT, "max_output_tokens": 6}
    expected: dict[str, Any] = {"exact": model.runtime.exact, "task": "poems", "method": "plain", "plan": None}
    expected["why_plain"] = {"reason": "requested", "message": "the request asks for plain decoding"}
    usage = {"stream_options": {"include_usage": True}}
    for path, body, more in (
        *(("chat/completions", chat, own) for own in ({}, usage)),
        *(("completions", text, own) for own in ({}, usage)),
        ("responses", response, {}),
    ):
        assert server.client.post(f"/v1/{path}", json=body).json()["swiftopt"] == expected
        lines = server.client.post(f"/v1/{path}", json={**body, **more, "stream": True}).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        told = [event.get("response", event).get("swiftopt") for event in events]
        assert told[-1] == expected and not any(told[:-1])


def test_answers_state_why_nothing_was_drafted(server: Served, lettered: Served) -> None:
    def told(served: Served, **own: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": TEXT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **own}
        return dict(served.client.post("/v1/completions", json=body).json()["swiftopt"])

    def pin(way: str | None) -> None:
        answer = server.client.post("/v1/tuning:pin", json={"model": "tiny", "task": "letters", "way": way})
        assert answer.status_code == 200, answer.text

    own = {"swiftopt": {"task": "letters", "tune": False}}
    assert told(server, **own, max_tokens=1)["why_plain"]["reason"] == "one_token"
    pin("plain")
    assert told(server, **own)["why_plain"]["reason"] == "pinned"
    pin(None)
    drafting = told(server, **own)
    assert drafting["method"] == "adaptive" and (drafting["why_plain"] or {"reason": "no_gain"})["reason"] == "no_gain"
    planned = told(lettered, prompt="abc")
    assert (planned["why_plain"]["reason"], planned["plan"]) == ("no_plan", None)
    assert "nothing is stored for" in planned["why_plain"]["message"]


def test_prediction_drafts_and_changes_nothing(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": TEXT}]
    common: Any = {"model": "tiny", "temperature": 0, "max_tokens": 24, "messages": messages}
    plain = client.chat.completions.create(**common, extra_body={"swiftopt": {"plan": "plain"}})
    text = plain.choices[0].message.content
    prediction: Any = {"type": "content", "content": text or ""}
    learning = client.chat.completions.create(**common, prediction=prediction)
    assert learning.choices[0].message.content == text  # drafted or not: that is decided by measured time
    always = {"swiftopt": {"method": "prompt-lookup"}}
    done = client.chat.completions.create(**common, prediction=prediction, extra_body=always)
    assert done.choices[0].message.content == text and done.usage is not None
    details = done.usage.completion_tokens_details
    assert details is not None and details.accepted_prediction_tokens and details.accepted_prediction_tokens > 4


def test_sampling_fields_reach_the_model(client: openai.OpenAI, server: Served) -> None:
    common: Any = {"model": "tiny", "prompt": TEXT, "max_tokens": 8}
    first = client.completions.create(**common, temperature=0).choices[0].text.split()[0]
    banned = client.completions.create(**common, temperature=0, logit_bias={first[1:]: -100})
    assert first not in banned.choices[0].text.split()
    narrow = client.completions.create(**common, temperature=2, seed=3, extra_body={"min_p": 1.0})
    assert narrow.choices[0].text == client.completions.create(**common, temperature=0).choices[0].text
    ended = client.completions.create(**common, temperature=0, extra_body={"stop_token_ids": [int(first[1:])]})
    assert ended.choices[0].finish_reason == "stop" and ended.usage is not None and ended.usage.completion_tokens == 1
    nonsense = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    asked = {**common, "response_format": nonsense}
    assert "JSON schema" in refused(
        server.client.post("/v1/completions", json=asked), 400, "response_format.json_schema.schema"
    )


def test_responses_are_the_same_chats(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "w9"}, {"role": "user", "content": TEXT}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    messages[0]["role"] = "developer"  # the same, to a template that does not know it
    again = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    assert again.choices[0].message.content == chat.choices[0].message.content
    asked: Any = {"model": "tiny", "instructions": "w9", "max_output_tokens": 12, "temperature": 0}
    done = client.responses.create(**asked, input=TEXT)
    assert done.output_text == chat.choices[0].message.content and done.status == "incomplete"
    assert done.usage is not None and chat.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    said: Any = [{"role": "developer", "content": "w9"}, {"role": "user", "content": TEXT}]
    same = client.responses.create(**{**asked, "instructions": None}, input=said)
    assert same.output_text == done.output_text
    events = list(client.responses.create(**asked, input=[{"role": "user", "content": TEXT}], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        f"response.{word}" for word in ("created", "in_progress", "output_item.added", "content_part.added")
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == done.output_text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == done.output_text
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
        client.responses.create(**asked, input=TEXT, previous_response_id="resp-1")


def test_tuning_can_be_shown_paused_and_pinned(server: Served, client: openai.OpenAI, model: swiftopt.Model) -> None:
    def ask() -> str:
        more = {"swiftopt": {"task": "pinned"}, "return_metrics": True}
        done = client.completions.create(model="tiny", prompt=TEXT, max_tokens=16, temperature=0, extra_body=more)
        assert done.model_extra is not None
        return str(done.model_extra["metrics"]["decoded_with"])

    def of(tuning: Tuning) -> TaskTuning:
        return next(task for task in tuning.models["tiny"].tasks if task.task == "pinned")

    ask()
    with swiftopt.Client(server.url) as ours:
        seen = of(ours.tuning())
        assert (seen.requests, seen.pairs, seen.in_use, seen.pinned) == (1, 1, "drafts", None)
        assert seen.seconds > 0 and seen.layer_set.n_layers == model.runtime.n_layers
        assert server.client.get("/v1/tuning").json()["models"]["tiny"]["tasks"][-1] == seen.to_json()
        pinned = of(ours.steer_tuning("pin", task="pinned", way="plain"))
        assert (pinned.pinned, pinned.in_use) == ("plain", "plain") and ask() == "plain"
        assert of(ours.steer_tuning("pin", "tiny", "pinned")).pinned is None and ask() == "adaptive"
        before = of(ours.tuning())
        body = {"model": "tiny", "prompt": TEXT, "max_tokens": 16, "swiftopt": {"task": "pinned", "tune": False}}
        assert server.client.post("/v1/completions", json=body).status_code == 200
        after = of(ours.tuning())
        assert (after.requests, after.pairs) == (before.requests + 1, before.pairs), "nothing was tried on it"
        body["swiftopt"] = {"task": "pinned", "plan": 7}
        problem = refused(server.client.post("/v1/completions", json=body), 404, "swiftopt.plan")
        assert "tiny/pinned" in problem and "tiny --stream FILE --task pinned" in problem
        assert ours.steer_tuning("pause").models["tiny"].paused
        assert not ours.steer_tuning("resume", "tiny").models["tiny"].paused
        with pytest.raises(InvalidInput, match="pin is for one task"):
            ours.steer_tuning("pin")
        with pytest.raises(NotFound, match=r"the model .other. is not served here: use tiny"):
            ours.steer_tuning("pause", "other")


@pytest.mark.slow
def test_server_without_tuning_refuses_to_steer_it(lettered: Served) -> None:
    answer = lettered.client.post("/v1/tuning:pin", json={"task": "default", "way": "plain"})
    assert answer.status_code == 409 and "--no-tune" in answer.json()["detail"]
    assert lettered.client.get("/v1/tuning").json()["models"]["tiny"]["tasks"] == []


SAID = [{"role": "user", "content": TEXT}]
CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": SAID, "max_tokens": 2, "temperature": 0},
    COMPLETION: {"model": "tiny", "prompt": TEXT, "max_tokens": 2, "temperature": 0},
    RESPONSE: {"model": "tiny", "input": TEXT, "max_output_tokens": 2, "temperature": 0},
}
NAMED = {"type": "function", "function": {"name": "add"}}
HALF = "half of a \ud83d"
NOT_A_NUMBER = {"type": "function", "name": "f", "parameters": {"x": float("nan")}}


def nested(depth: int) -> dict[str, Any]:
    """Return objects that are nested too deeply."""
    return {"items": nested(depth - 1)} if depth else {}


CALLED = {"id": "1", "type": "function", "function": {"name": "", "arguments": "{"}}
TYPELESS = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
WRONG: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    # what a completion cannot do
    *(
        (CHAT, {name: value}, name, f"{name} is not supported here")
        for name, value in {
            **{"structured_outputs": {"regex": "a+"}, "allowed_token_ids": [5], "bad_words": ["w1"]},
            **{"prompt_logprobs": 1, "truncate_prompt_tokens": 3, "include_stop_str_in_output": True},
            **{"skip_special_tokens": False, "add_special_tokens": True, "chat_template": "{{1}}", "guided_json": {}},
            **{"use_beam_search": True, "return_tokens_as_token_ids": True, "echo": True, "suffix": "x", "best_of": 2},
            **{"functions": [], "function_call": "auto", "audio": {}},
        }.items()
    ),
    (RESPONSE, {"top_logprobs": 3}, "top_logprobs", "not supported"),
    (RESPONSE, {"include": ["message.output_text.logprobs"]}, "include", "not supported"),
    (RESPONSE, {"truncation": "auto"}, "truncation", "not supported"),
    (RESPONSE, {"return_metrics": True}, "return_metrics", "/v1/chat/completions"),
    (CHAT, {"return_token_ids": True, "stream": True}, "return_token_ids", "whole answers"),
    (RESPONSE, {"structured_outputs": {}}, "structured_outputs", "not supported"),
    # values that exclude each other
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 5}, "max_tokens", "exclude each other"),
    (CHAT, {"min_tokens": 9}, "min_tokens", "more than the 2 tokens"),
    (COMPLETION, {"min_tokens": 17, "max_tokens": None}, "min_tokens", "more than the 16 tokens"),
    (CHAT, {"swiftopt": {"plan": "plain", "method": "swift"}}, "swiftopt.method", "exclude each other"),
    (CHAT, {"swiftopt": {"plan": 1, "method": "plain"}}, "swiftopt.method", "exclude each other"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "use a number greater than or equal to 1"),
    # more than there are places
    (
        COMPLETION,
        {"prompt": ["w1"] * 2, "n": 100},
        "n",
        "200 completions are requested, but this server accepts at most 132",
    ),
    (
        COMPLETION,
        {"prompt": ["w1"] * 140},
        "prompt",
        "140 completions are requested, but this server accepts at most 132",
    ),
    # what only the engine knows
    (COMPLETION, {"prompt": ""}, "prompt", "the prompt has no tokens"),
    (COMPLETION, {"prompt": [[]]}, "prompt", "the prompt has no tokens"),
    (COMPLETION, {"prompt": [10**6]}, "prompt", "there is no token 1000000: use token ids from 0 to"),
    (COMPLETION, {"prompt": [5] * 300}, "prompt", "maximum context length is 256 tokens, but the prompt has 300"),
    (COMPLETION, {"max_tokens": 4000}, "max_tokens", "4000 new tokens are requested: shorten the prompt or ask"),
    (CHAT, {"messages": [{"role": "user", "content": "w1 " * 300}]}, "messages", "shorten"),
    (COMPLETION, {"prompt": "w1 " * 9000}, "prompt", "length is 256 tokens, but the prompt has more than 342"),
    (CHAT, {"messages": [{"role": "user", "content": "w1 " * 9000}]}, "messages", "the prompt has more than 342"),
    (RESPONSE, {"max_output_tokens": 4000}, "max_output_tokens", "shorten"),
    (CHAT, {"logit_bias": {"9999": 1}}, "logit_bias", "token 9999"),
    (CHAT, {"logit_bias": {"5": 200}}, "logit_bias", "200"),
    (RESPONSE, {"logit_bias": {"9999": 1}}, "logit_bias", "token 9999"),
    (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids", "token -1"),
    (CHAT, {"stop": ""}, "stop", "empty"),
    (CHAT, {"stop": ["w1"] * 129}, "stop", "at most 128 items"),
    *(
        (CHAT, {"chat_template_kwargs": {name: "x"}}, f"chat_template_kwargs.{name}", "is not a value for a template")
        for name in ("self", "messages", "conversations", "tokenize")
    ),
    (CHAT, {"chat_template_kwargs": {"date": 5}}, "messages", "does not suit this model's chat template (can only"),
    (CHAT, {"messages": SAID * 16385}, "messages", "at most 16384 items"),
    (RESPONSE, {"input": SAID * 16385}, "input", "at most 16384 items"),
    (CHAT, {"swiftopt": {"method": "nope"}}, "swiftopt.method", "method 'nope' is unknown: use one of plain"),
    (CHAT, {"swiftopt": {"method": "swift"}}, "swiftopt.method", "or pass one"),
    (CHAT, {"response_format": TYPELESS}, "response_format.json_schema.schema", "JSON schema"),
    (
        RESPONSE,
        {"text": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}},
        "text.format.schema",
        "JSON",
    ),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}]}
        | {"tool_choice": "required"},
        "tools[0].function.parameters",
        "JSON schema",
    ),
    # tools, their calls, and schemas
    (CHAT, {"tools": [NAMED, {"type": "function"}]}, "tools[1].function", "tools[1] lacks 'function'"),
    (CHAT, {"tools": [{"type": "retrieval"}]}, "tools[0].type", "is 'retrieval': use 'function'"),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
        "tools[0].function.parameters",
        "is 5: use an object",
    ),
    (RESPONSE, {"tools": [{"type": "of_no_kind"}]}, "tools[0].type", "only functions and custom tools"),
    (CHAT, {"tool_choice": NAMED}, "tool_choice", "there is no tool 'add'"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [CALLED]}]},
        "messages[0].tool_calls[0].function.name",
        "send the call as the server returned it",
    ),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "missing"),
    (RESPONSE, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing"),
    # what cannot be sent to an engine
    (COMPLETION, {"prompt": HALF}, "", "half of a character"),
    (CHAT, {"messages": [{"role": "user", "content": HALF}]}, "", "half of a character"),
    (RESPONSE, {"input": HALF}, "", "half of a character"),
    # what a response cannot repeat
    (RESPONSE, {"metadata": {"a": HALF}}, "metadata", "half of a character"),
    (RESPONSE, {"metadata": {"a": float("inf")}}, "metadata", "a number that JSON cannot represent"),
    (RESPONSE, {"tools": [NOT_A_NUMBER]}, "tools", "a number that JSON cannot represent"),
    (CHAT, {"messages": [{"role": "user", "content": "w1", "more": nested(300)}]}, "", "nested too deeply"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": nested(300)}}},
        "",
        "nested too deeply",
    ),
    # sentences without the words of a parser
    (CHAT, {"tool_choice": "any"}, "tool_choice", "is 'any': use 'none', 'auto' or 'required', or an object"),
    (CHAT, {"logit_bias": {"abc": 1}}, "logit_bias", "logit_bias has the key 'abc': use a whole number"),
    (CHAT, {"ignore_eos": "q"}, "ignore_eos", "ignore_eos is 'q': use true or false"),
    (CHAT, {"max_tokens": "\ud800"}, "max_tokens", "use a text of whole characters"),
    (CHAT, {"stop": [None]}, "stop[0]", "stop[0] is null: use a text"),
    (CHAT, {"swiftopt": {"task": "a/b"}}, "swiftopt.task", "use a text without '/' and control characters"),
    (CHAT, {"messages": []}, "messages", "messages is []: use at least 1 item"),
    (COMPLETION, {"prompt": 5}, "prompt", "prompt is 5: use a text, or a list"),
    # the element that is wrong, and not the first one
    (COMPLETION, {"prompt": [1, "a"]}, "prompt[1]", "prompt[1] is 'a': use a whole number"),
    (COMPLETION, {"prompt": ["a", "b", 1]}, "prompt[2]", "prompt[2] is 1: use a text"),
    (COMPLETION, {"prompt": ["2", 1]}, "prompt[1]", "prompt[1] is 1: use a text"),
    (COMPLETION, {"prompt": [[1], [2, "a"]]}, "prompt[1][1]", "prompt[1][1] is 'a': use a whole number"),
    (COMPLETION, {"prompt": [[1], "a"]}, "prompt[1]", "prompt[1] is 'a': use a list"),
    (RESPONSE, {"input": [SAID[0], 5]}, "input[1]", "input[1] is 5: use an object"),
    (RESPONSE, {"text": {"format": {"type": "xml"}}}, "text.format.type", "use 'text', 'json_object' or 'json_schema'"),
)


@pytest.mark.parametrize(("path", "own", "param", "words"), WRONG, ids=[f"{one[0]} {one[1]}"[:60] for one in WRONG])
def test_unsupported_field_is_named(server: Served, path: str, own: dict[str, Any], param: str, words: str) -> None:
    body, kind = json.dumps({**BODIES[path], **own}), {"content-type": "application/json"}
    told = refused(server.client.post(path, content=body, headers=kind), 400, param or None)
    assert words in told and "[key]" not in told and "literal[" not in told and "--max" not in told


@pytest.mark.parametrize("path", BODIES)
def test_null_and_default_values_of_fields_have_no_effect(server: Served, path: str) -> None:
    """Every optional field of the OpenAPI document may be null."""
    schemas = server.client.get("/openapi.json").json()["components"]["schemas"]
    form = {CHAT: "AskedChat", COMPLETION: "AskedText", RESPONSE: "AskedResponse"}[path]
    optional = set(schemas[form]["properties"]) - set(schemas[form]["required"]) - set(BODIES[path])
    usual = {"use_beam_search": False, "skip_special_tokens": True, "include_stop_str_in_output": False}
    usual |= {"bad_words": [], "suffix": "", "best_of": 1, "length_penalty": 1.0, "modalities": ["text"]}
    answer = server.client.post(path, json={**BODIES[path], **dict.fromkeys(optional), **usual, "unheard_of": None})
    assert answer.status_code == 200, answer.text
    assert "x-swiftopt-ignored" not in answer.headers and len(optional) > 15


def test_template_gets_values_of_any_name_and_the_header_names_those_that_it_does_not_read(server: Served) -> None:
    given = {"chat_template_kwargs": {"name": "x", "template": "y", "tokenizer": "z", "date": "w5"}}
    for path in (CHAT, "/tokenize"):
        answer = server.client.post(path, json={**BODIES[CHAT], **given})
        assert answer.status_code == 200
        unread = [name for name in answer.headers["x-swiftopt-ignored"].split(", ") if "kwargs" in name]
        assert unread == [f"chat_template_kwargs.{name}" for name in ("name", "template", "tokenizer")]


def test_unsatisfiable_schema_is_refused_without_a_parsers_state(lettered: Served) -> None:
    endless = {"$ref": "urn:a", "$defs": {"a": {"$id": "urn:a", "$ref": "urn:a"}}}
    form = {"type": "json_schema", "json_schema": {"schema": endless}}
    told = refused(lettered.client.post(COMPLETION, json={**BODIES[COMPLETION], "response_format": form}), 400)
    ours = "the grammar cannot be followed any further: use a simpler schema or expression (llguidance: "
    assert told.startswith(ours) and len(told) < len(ours) + 60


def test_text_of_many_characters_but_few_tokens_is_accepted(server: Served) -> None:
    answer = server.client.post(COMPLETION, json={**BODIES[COMPLETION], "prompt": " " * 9000 + TEXT})
    assert answer.json()["usage"]["prompt_tokens"] == len(TEXT.split())


def test_unknown_fields_are_named_in_a_header(server: Served) -> None:
    for path, body in BODIES.items():
        answer = server.client.post(path, json={**body, "nonsense": 1, "größe": 2, "a\r\nb": 3})
        assert answer.status_code == 200
        assert answer.headers["x-swiftopt-ignored"] == "a\\r\\nb, gr\\u00f6\\u00dfe, nonsense"


def test_responses_accept_the_fields_of_chats(server: Served) -> None:
    def text(path: str, **own: Any) -> str:
        length = {"max_output_tokens" if path == RESPONSE else "max_tokens": 24}
        found = server.client.post(path, json={**BODIES[path], **length, **own}).json()
        return str(
            found["output"][0]["content"][0]["text"] if path == RESPONSE else found["choices"][0]["message"]["content"]
        )

    plain = text(CHAT)
    same: tuple[dict[str, Any], ...] = (
        {"temperature": 2, "seed": 5},
        {"stop": plain.split()[3]},
        {"temperature": 2, "seed": 5, "top_k": 2},
        {"temperature": 2, "seed": 6, "min_p": 0.9},
        {"logit_bias": {plain.split()[0][1:]: -100}},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"prediction": {"type": "content", "content": plain}},
        {"swiftopt": {"plan": "plain"}, "cache_salt": "a"},
    )
    for own in same:
        assert text(RESPONSE, **own) == text(CHAT, **own), own
    assert len({text(CHAT, **own) for own in same}) > 5


@pytest.mark.parametrize("path", BODIES)
def test_top_p_0_gives_the_text_of_temperature_0(server: Served, path: str) -> None:
    length = {"max_output_tokens" if path == RESPONSE else "max_tokens": 24}
    common = {**BODIES[path], **length, "seed": 3}

    def written(**own: Any) -> Any:
        answer = server.client.post(path, json={**common, **own}).json()
        return answer["output"][0]["content"] if path == RESPONSE else answer["choices"]

    texts = [written(temperature=0), *(written(temperature=1, top_p=top_p) for top_p in (0, 1e-9))]
    assert texts[0] == texts[1] == texts[2] != written(temperature=1, top_p=1)


def test_prompt_can_be_scored_without_a_completion(client: openai.OpenAI, server: Served) -> None:
    """With `max_tokens` 0 and `echo`, the log probabilities are a completion's, and no token is generated."""
    common: Any = {"model": "tiny", "prompt": TEXT, "temperature": 0, "logprobs": 2, "echo": True}
    longer = client.completions.create(**common, max_tokens=1).choices[0].logprobs
    scored = client.completions.create(**common, max_tokens=0)
    [choice] = scored.choices
    assert (choice.text, choice.finish_reason) == (TEXT, "length") and choice.logprobs is not None
    assert longer is not None and longer.tokens is not None and longer.token_logprobs is not None
    assert choice.logprobs.tokens == longer.tokens[:-1] and len(longer.tokens) > 3
    assert choice.logprobs.token_logprobs == longer.token_logprobs[:-1]
    assert scored.usage is not None and scored.usage.completion_tokens == 0
    pieces = list(client.completions.create(**common, max_tokens=0, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == TEXT
    told = [token for piece in pieces if piece.choices[0].logprobs for token in piece.choices[0].logprobs.tokens or ()]
    assert told == choice.logprobs.tokens
    for max_tokens in (0, 1):  # a single token has no log probability, and is there
        one = client.completions.create(**{**common, "prompt": "w3"}, max_tokens=max_tokens).choices[0].logprobs
        assert one is not None and one.tokens is not None and one.token_logprobs is not None
        assert (one.tokens[0], one.token_logprobs[0], len(one.tokens)) == ("w3", None, 1 + max_tokens)
    for n in (1, 2):  # without its echo a prompt is only read, and counted
        read = client.completions.create(model="tiny", prompt=TEXT, max_tokens=0, n=n, logprobs=0)
        assert [(each.text, each.finish_reason) for each in read.choices] == [("", "length")] * n
        assert read.usage is not None and scored.usage.prompt_tokens == read.usage.total_tokens
    plain = server.client.post(COMPLETION, json={"model": "tiny", "prompt": TEXT, "max_tokens": 0, "echo": True})
    assert plain.json()["choices"][0] == {"index": 0, "text": TEXT, "finish_reason": "length", "logprobs": None}


@pytest.mark.parametrize("method", [None, "plain"])
def test_prompt_beyond_memory_is_refused_for_any_method(method: str | None) -> None:
    out = BytesIO()
    request = CompletionRequest(messages=({"role": "user", "content": "w1"},), method=method)
    SentCompletion(MessageWriter(out), 1, request, str, lambda done: None).end(ContextOverflow("too long"))
    assert from_engine(out.getvalue()) == Failed(1, "ContextOverflow", "too long", "messages")


@pytest.mark.parametrize("token_id", [-1, 99999999, 1 << 70])
def test_unknown_token_id_is_refused(server: Served, token_id: int) -> None:
    answer = server.client.post("/detokenize", json={"model": "tiny", "tokens": [3, token_id]})
    assert f"there is no token {token_id}" in refused(answer, 400, "tokens")


def test_openai_routes_answer_errors_in_openais_form(client: openai.OpenAI, server: Served) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("tinny")
    assert "did you mean 'tiny'?" in error.value.body["message"] and error.value.param == "model"  # type: ignore[index,call-overload]
    with pytest.raises(openai.NotFoundError, match="there is nothing at this address"):
        client.embeddings.create(model="tiny", input="w1")
    with pytest.raises(openai.NotFoundError, match="there is nothing at this address"):
        client.moderations.create(input="w1")
    refused(server.client.get("/v1/completions"), 405)
    assert server.client.get("/v1/jobs/none").headers["content-type"] == "application/problem+json"
    assert server.client.get("/nothing").headers["content-type"] == "application/problem+json"
    with swiftopt.Client(server.url) as ours:
        assert ours.models() is not None


@pytest.mark.slow
@pytest.mark.parametrize("path", FUZZ_S)
def test_engine_survives_generated_requests(server: Served, path: str) -> None:
    """An engine gets valid and invalid requests of the OpenAPI document, and all answers conform to it."""
    operation = schemathesis.openapi.from_dict(server.client.get("/openapi.json").json())[path]["POST"]
    n_answered = Counter[int]()
    for mode, sought in ((schemathesis.GenerationMode.POSITIVE, 200), (schemathesis.GenerationMode.NEGATIVE, 400)):
        until = time.monotonic() + FUZZ_S[path] / 2

        @given(operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=500,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def holds(case: schemathesis.Case) -> None:
            if time.monotonic() > until and n_answered[sought] >= FEWEST:  # noqa: B023
                raise TimeIsUp
            if isinstance(case.body, dict):
                case.body = answerable(case.body)
            answer = case.call(base_url=server.url)
            n_answered[answer.status_code] += 1
            case.validate_response(answer, checks=[CHECKS.get_one(name) for name in KEPT])

        with suppress(TimeIsUp):
            holds()
        assert n_answered[sought] >= FEWEST, n_answered
    assert "Traceback" not in server.log.read_text()


FEWEST = 6  # answers of each kind, however slow the machine is


class TimeIsUp(Exception):
    """Ends the generation of examples."""


def answerable(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with an existing model, existing roles, texts and a small length, if it has such fields."""
    known = {"model": "tiny", "max_tokens": 2, "max_output_tokens": 2, "max_completion_tokens": None, "min_tokens": 0}
    body = {**body, **{name: value for name, value in known.items() if isinstance(body.get(name), str | int)}}
    for message in body["messages"] if isinstance(body.get("messages"), list) else ():
        if isinstance(message, dict) and isinstance(message.get("role"), str):
            message |= {"role": "user", "content": message.get("content") or "w1"}
    return body


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 240}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 200}),
        ("/v1/responses", {"input": TEXT, "max_output_tokens": 200}),
    ],
    ids=["text", "chat", "response"],
)
def test_request_ends_when_its_client_disconnects(server: Served, path: str, own: dict[str, Any]) -> None:
    body = {"model": "tiny", "temperature": 0, "stream": True, "ignore_eos": True, **own}
    for _ in range(6):
        with server.client.stream("POST", path, json=body) as response:
            next(response.iter_lines())
    until_idle(server)


@pytest.mark.slow
def test_timeout_and_no_explain_of_one_server(folder: Path, tmp_path: Path) -> None:
    """Two options are tested on one server, because its start takes seconds."""
    options = ["--model", f"tiny={folder}", "--dtype", "float32", "--threads", "1", "--no-tune"]
    with serving(str(tmp_path / "a.db"), tmp_path / "log", *options, "--timeout", "1", "--no-explain") as served:
        until_ready(served)
        engine = engine_of(served)
        engine.suspend()
        asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 4}
        assert "fewer tokens" in refused(served.client.post("/v1/completions", json=asked), 503)
        engine.resume()
        answer = served.client.post("/v1/completions", json=asked)
        assert answer.status_code == 200 and "swiftopt" not in answer.json()


@pytest.mark.slow
def test_stream_that_has_begun_is_decoded_to_its_end_at_sigterm(folder: Path, tmp_path: Path) -> None:
    options = ["--model", f"tiny={folder}", "--dtype", "float32", "--threads", "1", "--no-tune"]
    with serving(str(tmp_path / "a.db"), tmp_path / "log", *options) as served:
        until_ready(served)
        engine = engine_of(served)
        asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 240, "stream": True, "ignore_eos": True}
        with served.client.stream("POST", "/v1/completions", json=asked) as response:
            lines = response.iter_lines()
            first = next(lines)
            engine.suspend()
            served.process.send_signal(signal.SIGTERM)
            time.sleep(1.5)  # streams of jobs and pages are ended half a second after it
            with pytest.raises(httpx2.ConnectError):
                httpx2.get(f"{served.url}/health")
            engine.resume()
            *_, last, done = chunks_of(iter([first, *lines]))
        assert last["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
        assert served.process.wait(30) == 0


@pytest.mark.slow
def test_completions_beyond_the_drain_time_end_with_an_error(folder: Path, tmp_path: Path) -> None:
    options = ["--model", f"tiny={folder}", "--dtype", "float32", "--threads", "1", "--no-tune", "--drain", "1"]
    with serving(str(tmp_path / "a.db"), tmp_path / "log", *options) as served, ThreadPoolExecutor(1) as threads:
        until_ready(served)
        engine = engine_of(served)
        asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 240, "ignore_eos": True}
        with served.client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response:
            lines = response.iter_lines()
            first = next(lines)
            engine.suspend()
            whole = threads.submit(httpx2.post, f"{served.url}/v1/completions", json=asked, timeout=30)
            time.sleep(0.5)
            served.process.send_signal(signal.SIGTERM)
            *_, last, done = chunks_of(iter([first, *lines]))
        assert "--drain" in last["error"]["message"] and done == "[DONE]"
        assert "--drain" in refused(whole.result(), 503)
        engine.resume()
        assert served.process.wait(30) == 0
        log = served.log.read_text()
        assert "drain=over requests=2" in log and "Traceback" not in log


@pytest.mark.slow
def test_key_has_its_task_and_its_tokens(folder: Path, tmp_path: Path) -> None:
    (key, entry), (other, second), (third, last) = (new_key(name) for name in ("ci", "laptop", "phone"))
    prompts = tmp_path / "prompts.jsonl"
    options = ["--model", f"tiny={folder}", "--dtype", "float32", "--token-rate", "40", "--threads", "1"]
    options += ["--keep-prompts", str(prompts)]
    with serving(
        str(tmp_path / "a.db"), tmp_path / "log", *options, SWIFTOPT_API_KEYS=f"{entry}:notes,{second},{last}"
    ) as served:
        until_ready(served)

        def post(own: str, **more: Any) -> Any:
            asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 16, "ignore_eos": True, **more}
            return served.client.post("/v1/completions", json=asked, headers={"authorization": f"Bearer {own}"})

        answers = [post(key)]
        while answers[-1].status_code == 200 and len(answers) < 20:  # each costs what half a minute gives back
            answers.append(post(key))
        *served_ones, refused_one = answers
        assert sum(answer.json()["usage"]["total_tokens"] for answer in served_ones) >= 40
        assert "40 tokens a minute" in refused(refused_one, 429)
        assert 0 < int(refused_one.headers["retry-after"]) <= 120
        assert post(other, swiftopt={"task": "mine"}).status_code == 200
        said = [{"role": "user", "content": "w9 w8"}, {"role": "assistant", "content": "w2"}]
        for content in ("w7", " "):  # the second is no line of a stream
            messages = [*said, {"role": "user", "content": content}]
            asked = {"model": "tiny", "messages": messages, "max_tokens": 2, "swiftopt": {"task": "mine"}}
            headers = {"authorization": f"Bearer {other}"}
            assert served.client.post("/v1/chat/completions", json=asked, headers=headers).status_code == 200
        said.append({"role": "user", "content": "w7"})
        served.client.headers["authorization"] = f"Bearer {key}"
        tasks = served.client.get("/v1/tuning").json()["models"]["tiny"]["tasks"]
        assert {task["task"] for task in tasks} == {"notes", "mine"}
        long = {"prompt": [3] * 50, "stream": True, "max_tokens": 100}
        with served.client.stream(
            "POST", "/v1/completions", json={"model": "tiny", **long}, headers={"authorization": f"Bearer {third}"}
        ) as response:
            next(response.iter_lines())
        for _ in range(15):  # what was cancelled has cost its prompt; these cost 30 tokens at most
            time.sleep(0.2)
            answer = post(third, prompt="w3", max_tokens=1)
            if answer.status_code == 429:
                break
        assert "40 tokens a minute" in refused(answer, 429)
        kept = read_stream(str(prompts), None, None)
        assert {(prompt.task, prompt.text) for prompt in kept} == {("notes", TEXT), ("mine", TEXT), ("mine", None)}
        [chat] = [prompt for prompt in kept if prompt.text is None]
        assert chat.messages == tuple(said)
        assert TEXT not in served.log.read_text()


def test_server_without_models_answers_with_the_reason(tmp_path: Path) -> None:
    with serving(str(tmp_path / "a.db"), tmp_path / "log") as served:
        asked = {"model": "tiny", "prompt": "w1"}
        words = refused(served.client.post("/v1/completions", json=asked), 404, "model")
        assert "swiftopt serve --model" in words
        assert served.client.get("/health").status_code == 200


@pytest.mark.slow
def test_killed_engine_is_restarted_and_unanswered_requests_are_repeated(
    folder: Path, tmp_path: Path, model: swiftopt.Model
) -> None:
    options = ["--model", f"tiny={folder}", "--dtype", "float32", "--rate", "0", "--concurrency", "1", "--threads", "1"]
    with serving(str(tmp_path / "a.db"), tmp_path / "log", *options) as served:
        until_ready(served)
        served.client.post("/v1/tuning:pin", json={"task": "notes", "way": "plain"})
        expected = model.generate(TEXT, max_new_tokens=8).text
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)
        stopped = engine_of(served)
        body = {
            "model": "tiny",
            "prompt": TEXT,
            "max_tokens": 240,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        with ThreadPoolExecutor(3) as pool, served.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            stopped.suspend()
            waiting = [
                pool.submit(client.completions.create, model="tiny", prompt=TEXT, max_tokens=8, temperature=0)
                for _ in range(3)
            ]
            time.sleep(0.5)
            os.kill(stopped.pid, signal.SIGKILL)
            *_, error, done = chunks_of(lines)
            assert "died" in error["error"]["message"] and done == "[DONE]"
            assert [each.result().choices[0].text for each in waiting] == [expected] * 3
        broken = 'vllm:request_success_total{finished_reason="error",model_name="tiny"} 1.0\n'
        assert "died" in served.client.get("/requests?way=failed").text
        assert broken in served.client.get("/metrics").text
        logged = served.log.read_text().splitlines()
        at = [line[:23] for line in logged if "engine=ended" in line or "starting the process" in line]
        _, ended, started = map(datetime.fromisoformat, at[:3])
        assert (started - ended).total_seconds() < 5, "between the end of one process and the start of the next"
        until_ready(served)
        expected = model.generate(TEXT, max_new_tokens=240).text
        n_before, before = n_succeeded(served), engine_of(served)
        with ThreadPoolExecutor(1) as pool:  # a whole answer whose beginning the engine has sent, and no one has seen
            asked: Any = {"model": "tiny", "prompt": TEXT, "max_tokens": 240, "temperature": 0, "n": 8}
            whole = pool.submit(client.completions.create, **asked, extra_body={"ignore_eos": True})
            until = time.monotonic() + 30
            while n_succeeded(served) == n_before:
                assert time.monotonic() < until
            before.kill()
            assert not whole.done()
            answer = whole.result()
        assert [choice.text for choice in answer.choices] == [expected] * 8 and answer.usage is not None
        assert answer.usage.completion_tokens == 8 * 240 and "engine=ended" in served.log.read_text()
        assert engine_of(served).pid != stopped.pid
        tasks = served.client.get("/v1/tuning").json()["models"]["tiny"]["tasks"]
        assert [task["pinned"] for task in tasks if task["task"] == "notes"] == ["plain"], "steered as before"


@pytest.mark.slow
def test_stream_of_a_response_fails_when_its_engine_is_killed(folder: Path, tmp_path: Path) -> None:
    options = ["--model", f"tiny={folder}", "--dtype", "float32", "--rate", "0", "--threads", "1", "--no-tune"]
    with serving(str(tmp_path / "a.db"), tmp_path / "log", *options) as served:
        until_ready(served)
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)
        for _ in range(5):  # on a busy machine an engine may be done before it is killed
            second = engine_of(served)
            with slowed(second):
                asked: Any = {"model": "tiny", "input": TEXT, "max_output_tokens": 200, "temperature": 0}
                stream = client.responses.create(**asked, stream=True)
                begun = list(takewhile(lambda event: event.type != "response.output_text.delta", stream))
                second.kill()
            *rest, failed = stream
            if failed.type != "response.incomplete":
                break
            until_ready(served)
        assert failed.type == "response.failed" and failed.sequence_number == len(begun) + len(rest) + 1
        assert failed.response.status == "failed" and failed.response.error is not None
        assert failed.response.error.code == "server_error" and "died" in failed.response.error.message
        [item] = failed.response.output
        assert item.type == "message" and item.status == "incomplete" and failed.response.output_text


@pytest.mark.parametrize("is_read", [True, False], ids=["decoded", "being read"])
def test_request_that_kills_engines_fails_after_a_few_attempts(is_read: bool) -> None:
    """No process is killed; the test covers what happens to the request."""

    async def lives() -> list[type[object]]:
        engine = EngineProcess(ServedModel("tiny", "tiny"), most_waiting=1)
        engine.about = READY
        reply = engine.ask(Decode(CompletionRequest()))
        for _ in range(1 + MOST_RESTARTS):
            if is_read:
                engine._receive(PromptRead(reply.question.id, 1))
            engine._fail_replies()
        assert engine.n_requests == 0
        return [type(reply.answers.get_nowait()[1]) for _ in range(reply.answers.qsize())]

    read = [PromptRead] * is_read
    assert asyncio.run(lives()) == [*[*read, Restarted] * MOST_RESTARTS, *read, Failed]


def test_engine_that_dies_within_a_message_is_restarted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its output ends within a line."""
    start, command = asyncio.create_subprocess_exec, (sys.executable, "-c", """print('loading {"st', end="")""")
    monkeypatch.setattr(asyncio, "create_subprocess_exec", lambda *_, **options: start(*command, **options))
    monkeypatch.setattr("swiftopt.server.engines.BACKOFF_S", (0.0, 0.0))

    async def lives() -> None:
        engine = EngineProcess(ServedModel("tiny", "tiny"), most_waiting=1)
        keeping = asyncio.create_task(engine.keep())
        while engine.n_starts < 3:
            assert not keeping.done(), keeping.exception()
            await asyncio.sleep(0.01)
        keeping.cancel()
        await asyncio.wait([keeping])

    asyncio.run(lives())
    assert "its process ended with code 0" in caplog.text


@pytest.mark.parametrize(
    ("messages", "is_tried_again"),
    [
        ([Failed.of(None, ModelNotFound("m.gguf is cut short"))], False),
        ([Failed.of(None, UnsupportedModel("m mixes tokens in an unknown way"))], False),
        ([Failed.of(None, HubUnreachable("the hub does not answer"))], True),
        ([Failed.of(None, SettingsError("m needs 9 GB, and 8 GB are free"))], True),
        ([READY, Failed.of(None, ModelNotFound("m.gguf is cut short"))], True),
    ],
)
def test_loading_is_repeated_unless_the_first_load_proves_it_impossible(
    messages: list[FromEngine], is_tried_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, printed = asyncio.create_subprocess_exec, b"".join(map(encode, messages))
    command = sys.executable, "-c", f"import sys; sys.stdout.buffer.write({printed!r})"
    monkeypatch.setattr(asyncio, "create_subprocess_exec", lambda *_, **options: start(*command, **options))
    monkeypatch.setattr("swiftopt.server.engines.BACKOFF_S", (0.0, 0.0))

    async def lives() -> None:
        engines = Engines([ServedModel("tiny", "tiny")])
        keeping = asyncio.create_task(engines.of["tiny"].keep())
        while not keeping.done() and engines.of["tiny"].n_starts < 2:
            await asyncio.sleep(0.01)
        assert keeping.done() != is_tried_again == (engines.load_error is None)
        keeping.cancel()
        await asyncio.wait([keeping])

    asyncio.run(lives())


@pytest.mark.parametrize("what", ["plan", "long text"])
def test_request_waiting_for_its_plan_or_encoding_delays_no_other(
    folder: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not decoded if it was cancelled in the meantime."""
    lines, told = SimpleQueue[bytes | None](), SimpleQueue[tuple[int | None, type[object]]]()
    answering, lookup = threading.Event(), Store.lookup
    slow_text = TEXT + " " * LONG_LINE * (what == "long text")

    class Told(MessageWriter):
        def send(self, message: FromEngine) -> None:
            told.put((getattr(message, "id", None), type(message)))

    def slow(store: Store, fingerprint: str, task: str, *more: Any) -> Any:
        assert task != "slow" or answering.wait(60)
        return lookup(store, fingerprint, task, *more)

    def slow_session(model: swiftopt.Model, request: CompletionRequest, *more: Any) -> Any:
        assert len(request.text) <= LONG_LINE or answering.wait(60)
        return session_of(model, request, *more)

    def until(*last: Any) -> list[tuple[int | None, type[object]]]:
        found = [told.get(timeout=30)]
        while found[-1] != last:
            found.append(told.get(timeout=30))
        return found

    monkeypatch.setattr(Store, "lookup", slow)
    monkeypatch.setattr("swiftopt.worker.serving.session_of", slow_session)
    monkeypatch.setattr(EngineHost, "_refresh_plans", lambda host: None)
    served = ServedModel("tiny", str(folder), dtype="float32", db=str(tmp_path / "a.db"), tune=False)
    host = EngineHost(served, Told(sys.stderr.buffer))
    serving = threading.Thread(target=host.run, args=(iter(lines.get, None),))
    serving.start()
    for number, task in enumerate(("slow", "slow", "quick"), start=1):
        text = slow_text if task == "slow" else TEXT
        lines.put(encode(Decode(CompletionRequest(text=text, task=task, max_new_tokens=4), number)))
    until(3, AnswerDone)
    lines.put(encode(Cancel(2)))
    lines.put(encode(Detokenize((3,), 4)))
    until(4, TokensText)
    answering.set()
    assert (2, AnswerDone) not in until(1, AnswerDone)
    lines.put(None)
    serving.join(30)
    assert not serving.is_alive() and (2, AnswerDone) not in [told.get() for _ in range(told.qsize())]


def test_requests_are_counted_while_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape of the metrics counts them in its own thread."""
    engine = EngineProcess(ServedModel("tiny", "tiny"), most_waiting=1)
    engine.about = READY
    reply = engine.ask(Decode(CompletionRequest()))

    class Meanwhile(Reply):
        @property
        def question(self) -> Question:  # type: ignore[override]
            engine.ask(Steer())
            return reply.question

    engine._replies[reply.question.id] = Meanwhile.__new__(Meanwhile)
    assert engine.n_requests == 1


@pytest.mark.parametrize("n_requests", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_requests_leave_nothing_behind(server: Served, model: swiftopt.Model, n_requests: int) -> None:
    """Valid and malformed requests, slow readers and clients that disconnect get documented answers from one engine.
    Afterwards no request runs or waits, and neither process has grown.
    """
    expected = model.generate(TEXT, max_new_tokens=8).text
    engine, seen = engine_of(server), dict[int, int]()
    processes = [psutil.Process(server.process.pid), engine]

    def storm(first: int, last: int) -> None:
        with ThreadPoolExecutor(8) as pool:
            for status in pool.map(lambda number: one_of_many(server, number, expected), range(first, last)):
                seen[status] = seen.get(status, 0) + 1

    def used() -> list[tuple[int, int]]:
        until_idle(server)
        return [(process.num_fds(), process.memory_info().rss) for process in processes]

    storm(0, n_requests // 3)
    before = used()
    storm(n_requests // 3, n_requests)
    assert set(seen) <= {0, 200, 400, 404, 413, 422, 429}, seen  # 0: the client was gone
    assert sum(seen.values()) == n_requests and seen[200] > 0.3 * n_requests and seen[400] > 0.1 * n_requests
    for (files, memory), (files_now, memory_now) in zip(before, used(), strict=True):
        assert files_now <= files + 8  # connections that clients keep open
        assert memory_now - memory < 30e6
    assert engine_of(server).pid == engine.pid
    assert "Traceback" not in server.log.read_text()


BAD_BODIES: tuple[Any, ...] = (
    {"prompt": TEXT},
    {"model": "tinny", "prompt": TEXT},
    {"model": "tiny", "prompt": 5},
    {"model": "tiny", "prompt": TEXT, "max_tokens": -1},
    {"model": "tiny", "prompt": TEXT, "max_tokens": 1 << 40},
    {"model": "tiny", "prompt": TEXT, "temperature": "warm"},
    {"model": "tiny", "prompt": [1 << 40]},
    {"model": "tiny", "prompt": "w1 " * 5000},
    {"model": "tiny", "messages": [{"role": "nobody", "content": "w1"}]},
    {"model": "tiny", "messages": []},
    {"model": "tiny", "prompt": TEXT, "swiftopt": {"plan": "fastest"}},
    [],
    None,
    "{",
)


def one_of_many(server: Served, number: int, expected: str) -> int:
    """Send a request of a random kind and return its status; 0 if the client did not wait."""
    rng = random.Random(number)
    good = {"model": "tiny", "prompt": TEXT, "max_tokens": 8, "temperature": 0, "seed": number}
    stream = {**good, "max_tokens": rng.randint(1, 60), "stream": True, "ignore_eos": True}
    kind = rng.choice(("good", "good", "sampled", "bad", "bad", "leaves", "slow", "breaks", "oversized"))
    path = f"/v1/{rng.choice(('completions', 'chat/completions', 'responses'))}"
    if kind == "good":
        response = server.client.post("/v1/completions", json=good)
        assert response.status_code == 429 or response.json()["choices"][0]["text"] == expected
    elif kind == "sampled":
        chat = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "max_tokens": rng.randint(1, 20)}
        fields = {"temperature": rng.uniform(0, 2), "top_p": rng.uniform(0.1, 1), "n": rng.randint(1, 3)}
        response = server.client.post("/v1/chat/completions", json={**chat, **fields})
    elif kind == "bad":
        body = rng.choice(BAD_BODIES)
        text = body if isinstance(body, str) else json.dumps(body)
        response = server.client.post(path, content=text, headers={"content-type": "application/json"})
        assert response.status_code >= 400, body
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, body
    elif kind == "oversized":
        with posting(server, path, 1 << 30) as raw:
            assert raw.recv(1000).startswith(b"HTTP/1.1 413")
        return 413
    elif kind == "breaks":
        text = json.dumps(stream).encode()
        with posting(server, path, len(text)) as raw:
            raw.sendall(text[: rng.randint(0, len(text))])
        return 0
    else:
        with server.client.stream("POST", "/v1/completions", json=stream) as response:
            for n_lines, _ in enumerate(response.iter_lines()):
                if kind == "leaves" and n_lines == 1:
                    return 0
                if kind == "slow" and n_lines < 20:
                    time.sleep(0.01)
    return int(response.status_code)


def posting(server: Served, path: str, length: int) -> socket.socket:
    """Open a connection that has announced a body of this many bytes."""
    raw = socket.create_connection(server.address)
    lines = (f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {length}", "", "")
    raw.sendall("\r\n".join(lines).encode())
    return raw


def n_succeeded(served: Served) -> int:
    """Return the number of requests that ended normally."""
    lines = served.client.get("/metrics").text.splitlines()
    ended = [line for line in lines if line.startswith("vllm:request_success_total{")]
    assert all('finished_reason="' in line for line in ended), ended
    return round(sum(float(line.split()[-1]) for line in ended))


def until_idle(served: Served) -> None:
    """Wait until no request runs or waits."""
    until = time.monotonic() + START_S
    idle = [f'num_requests_{state}{{model_name="tiny"}} 0.0' for state in ("running", "waiting")]
    while not all(line in served.client.get("/metrics").text for line in idle):
        assert time.monotonic() < until
        time.sleep(0.05)
