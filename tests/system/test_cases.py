"""The requests of `tests/cases/*.json` to a real server, with their expected answers.

A file is an object of cases by name. A case has a `path`, a `body`, and `expected`: a value or a JSON schema for keys
that `read` returns. `also` repeats it in other forms: "stream", "responses", "responses stream". The model's name is
added to a body; without a `temperature` the model of bytes samples, and SmolLM2 decodes greedily. In every case, JSON
that was not truncated satisfies the requested schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest
from api import Served, serving, until_ready
from jsonschema import Draft202012Validator
from tiny_files import save_bytes

FILES = sorted((Path(__file__).parent.parent / "cases").glob("*.json"))
SAMPLING = {"tiny": {"temperature": 1, "seed": 0}, "smollm2-135m": {"temperature": 0}}
CASES = {f"{file.stem} {name}": case for file in FILES for name, case in json.loads(file.read_text()).items()}
Servers = Callable[[str], Served]
READ = [
    name
    for name, case in CASES.items()
    if case["expected"].get("status") == 200 and case["path"] in ("/v1/chat/completions", "/v1/completions")
]
# Only answers with tools depend on what a real model writes; its other ones are variants.
MODELS = ["tiny", pytest.param("smollm2-135m", marks=(pytest.mark.model, pytest.mark.families))]
FORMS = [
    pytest.param(
        model,
        case,
        "whole",
        id=f"{model} {name} whole".replace(" ", "-"),
        marks=() if model == "tiny" else (pytest.mark.model, *(() if "tools" in name else (pytest.mark.families,))),
    )
    for model in SAMPLING
    for name, case in CASES.items()
]
OTHER_FORMS = [
    pytest.param(case, form, id=f"{name} {form}".replace(" ", "-"))
    for name, case in CASES.items()
    for form in case.get("also", ())
]


@pytest.fixture(scope="module")
def server_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Return the server of a model, which starts with the first test that needs it."""
    with ExitStack() as running:

        @cache
        def started(model: str) -> Served:
            where = tmp_path_factory.mktemp("cases")
            words = f"tiny={save_bytes(where / 'tiny')}" if model == "tiny" else model
            options = ["--model", words, "--rate", "0", "--threads", "1", "--no-tune"]
            served = running.enter_context(serving(str(where / "a.db"), where / "log", *options))
            until_ready(served)
            return served

        yield started


@pytest.mark.parametrize(("name", "case", "form"), FORMS)
def test_answer_is_what_the_case_expects(server_of: Servers, name: str, case: Mapping[str, Any], form: str) -> None:
    check(server_of(name), name, case, form)


# The forms of an answer do not depend on whose text it is.
@pytest.mark.parametrize(("case", "form"), OTHER_FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_other_forms_of_the_answer_say_the_same(
    server_of: Servers, name: str, case: Mapping[str, Any], form: str
) -> None:
    check(server_of(name), name, case, form)


def check(served: Served, name: str, case: Mapping[str, Any], form: str) -> None:
    """Send a case in a form, and compare the answer with the expected one."""
    path, body = case["path"], {**SAMPLING[name], **case["body"], "model": name}
    if "responses" in form:
        path, body = "/v1/responses", as_response(body)
    if "stream" in form:
        body["stream"] = True
    answer = read(served.client.post(path, json=body, timeout=120))
    expected = {key: value if isinstance(value, dict) else {"const": value} for key, value in case["expected"].items()}
    wrong = Draft202012Validator({"properties": expected, "required": [*expected]}).iter_errors(answer)
    assert not [f"{error.json_path}: {error.message}" for error in wrong], answer
    if answer["status"] == 200 and answer.get("finish_reason") != "length":
        check_json(case["body"], answer)


def check_json(body: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Check the text by its schema, and the required calls by their parameters."""
    form = body.get("response_format", {}).get("json_schema") or body.get("text", {}).get("format", {})
    if "schema" in form and form.get("strict") is not False:
        Draft202012Validator(form["schema"]).validate(answer["json"])
    if body.get("tool_choice", "auto") not in ("auto", "none"):
        tools = [inner for tool in body["tools"] for inner in tool.get("tools", [tool])]  # Namespaces have several.
        functions = {function["name"]: function for function in (tool.get("function", tool) for tool in tools)}
        for call in answer["calls"]:
            function = functions[call["name"]]
            schema = {} if function.get("strict") is False else function.get("parameters") or {}
            Draft202012Validator({"type": "object", **schema}).validate(call["arguments"])


WHOLE = {"stream": None, "stream_options": None}


@pytest.mark.parametrize("case", READ)
@pytest.mark.parametrize("name", MODELS)
def test_tokenize_counts_what_the_same_body_reads(server_of: Servers, name: str, case: str) -> None:
    path, body, client = CASES[case]["path"], {**CASES[case]["body"], "model": name}, server_of(name).client
    counted = client.post("/tokenize", json=body)
    read = client.post(path, json={**body, **WHOLE, "max_tokens": 1, "n": 1})
    assert counted.json()["count"] == len(counted.json()["tokens"]) == read.json()["usage"]["prompt_tokens"]


def as_response(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat in the form of Responses."""
    body = {**chat, "input": chat["messages"], "max_output_tokens": chat.get("max_tokens")}
    form, choice = chat.get("response_format"), chat.get("tool_choice")
    if form is not None:
        body["text"] = {"format": {"type": form["type"], **form.get("json_schema", {})}}
    if isinstance(choice, dict):
        body["tool_choice"] = {"type": "function", **choice["function"]}
    body["tools"] = [{"type": tool["type"], **tool["function"]} for tool in chat.get("tools", ())]
    return {key: value for key, value in body.items() if key not in ("messages", "max_tokens", "response_format")}


def read(response: httpx2.Response) -> dict[str, Any]:
    """Return the parts of an answer by keys that are the same in all forms.

    They are its `status`, the `ignored` fields, and its `error` with its parts (`error.code`); or its `text`, the text
    as `json`, its `finish_reason`, its `calls`, and the `name` and `arguments` of the first; and the original `answer`.
    """
    ignored = response.headers.get("x-swiftopt-ignored")
    told = {"status": response.status_code, "ignored": ignored.split(", ") if ignored else []}
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        whole = whole_of([json.loads(event) for event in events if event != "[DONE]"])
    else:
        whole = response.json()
    if "error" in whole and response.status_code >= 400:
        parts = {f"error.{name}": value for name, value in whole["error"].items()}
        return {**told, "error": whole["error"], **parts, "answer": whole}
    told |= {"answer": whole} | (of_response(whole) if "output" in whole else of_chat(whole))
    with suppress(KeyError, ValueError):
        told["json"] = json.loads(told["text"])
    if told.get("calls"):
        told |= told["calls"][0]
    return told


def of_chat(whole: Mapping[str, Any]) -> dict[str, Any]:
    if "choices" not in whole:
        return {}
    choice = whole["choices"][0]
    message = choice.get("message", choice)
    text = message["content"] if "message" in choice else choice["text"]
    calls = [call_of(call["function"]) for call in message.get("tool_calls", ())]
    return {"text": text or "", "finish_reason": choice["finish_reason"], "calls": calls}


def of_response(whole: Mapping[str, Any]) -> dict[str, Any]:
    text = "".join(part["text"] for item in whole["output"] for part in item.get("content", ()))
    calls = [call_of(item) for item in whole["output"] if item["type"] == "function_call"]
    reason = "length" if whole["status"] == "incomplete" else "tool_calls" if calls else "stop"
    return {"text": text, "finish_reason": reason, "calls": calls}


def call_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's name and arguments, parsed if they are JSON."""
    arguments = function["arguments"]
    with suppress(ValueError):
        arguments = json.loads(arguments)
    return {"name": function["name"], "arguments": arguments}


def whole_of(events: list[Any]) -> dict[str, Any]:
    """Join a stream to the whole answer; a completion becomes a chat's answer."""
    if events[-1].get("type", "").startswith("response."):
        return dict(events[-1]["response"])
    text, reason, calls = "", None, list[dict[str, str]]()
    for choice in (choice for event in events for choice in event["choices"]):
        delta, reason = choice.get("delta", {"content": choice.get("text")}), choice["finish_reason"]
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "name" in call["function"]:
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    message = {"content": text, "tool_calls": [{"function": call} for call in calls]}
    return {"choices": [{"message": message, "finish_reason": reason}]}
