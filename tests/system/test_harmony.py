"""Harmony, gpt-oss's form of answers, from request to answer: a server of a tiny gpt-oss that learnt four answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from api import Served, serving, until_ready
from chat_tokenizers import trained
from families import tiny_model
from tokenizers import pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from swiftopt.decoding.chats import ChatPrompt

pytestmark = pytest.mark.slow

SPECIAL = ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>")
# As gpt-oss's own template, but for the words around tools. A thought of an earlier answer stands only before a call
# that no answer follows, a message has one call, and a result is that of the last call.
TEMPLATE = (
    "{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{%- for tool in tools or [] %}{{- '<|start|>developer<|message|>// ' + tool.function.description + '\\ntype ' }}"
    "{{- tool.function.name + '<|end|>' }}{%- endfor %}{%- set last = namespace(name=none) %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' and 'tool_calls' in m %}"
    "{%- if m.content and m.thinking %}{{- raise_exception('content and thinking') }}{%- endif %}"
    "{%- set later = namespace(final=false) %}{%- for n in messages[loop.index:] %}"
    "{%- if n.role == 'assistant' and 'tool_calls' not in n %}{%- set later.final = true %}{%- endif %}{%- endfor %}"
    "{%- if (m.content or m.thinking) and not later.final %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{%- endif %}"
    "{%- set last.name = m.tool_calls[0].function.name %}"
    "{{- '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json<|message|>' }}"
    "{{- (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'tool' %}{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary' }}"
    "{{- '<|message|>' + (m.content | tojson) + '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
PARAMETERS = {"type": "object", "properties": {"city": {}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
ASKED = [{"role": "user", "content": "Rain in Paris?"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
CALLED = [
    *ASKED,
    {"role": "assistant", "content": None, "reasoning_content": "Use the tool.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "15 degrees"},
]
GREETED = [{"role": "user", "content": "Hello"}]
AGAIN = [*CALLED, {"role": "assistant", "content": "No rain."}, {"role": "user", "content": "Sure?"}]
FINAL = "<|start|>assistant<|channel|>final<|message|>"
# What the model learnt to write of each chat, and whether it is offered the tool.
LEARNT: tuple[tuple[list[dict[str, Any]], bool, str], ...] = (
    (
        ASKED,
        True,
        "<|channel|>analysis<|message|>Use the tool.<|end|><|start|>assistant to=functions.weather<|channel|>commentary"
        ' json<|message|>{"city": "Paris"}<|call|>',
    ),
    (CALLED, True, f"<|channel|>analysis<|message|>It is dry.<|end|>{FINAL}No rain.<|return|>"),
    (GREETED, False, f"<|channel|>analysis<|message|>Greet.<|end|>{FINAL}Hi, child!<|return|>"),
    (AGAIN, True, "<|channel|>final<|message|>Yes, it is.<|return|>"),
)


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as the server passes them to the template."""
    return [{**message, "content": message["content"] or ""} for message in messages]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = trained(BPE(), pre_tokenizers.ByteLevel.alphabet(), SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TEMPLATE, eos_token="<|return|>", pad_token="<|return|>"
    )
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|return|>",)]
    shape = {"vocab_size": len(tokenizer), "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    shape |= {"intermediate_size": 64, "max_position_embeddings": 1024, "sliding_window": 512}
    model = tiny_model("gpt_oss", torch.float32, scale=1.0, **shape, eos_token_id=ends, pad_token_id=ends[0])
    examples = []
    for messages, has_tool, answer in LEARNT:
        prompt = ChatPrompt(tokenizer, plain(messages), {"tools": [TOOL] if has_tool else None}).encode()
        completion = tokenizer(answer, add_special_tokens=False)["input_ids"]
        examples.append((torch.tensor([prompt + completion]), len(prompt)))
    learn(model, examples)
    folder = tmp_path_factory.mktemp("harmony") / "gpt-oss"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def learn(model: Any, examples: list[tuple[torch.Tensor, int]]) -> None:
    """Train until the model predicts every token of every answer."""
    model.requires_grad_(True).train()
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(400):
        is_known = True
        for ids, n_prompt in examples:
            logits = model(ids).logits[0, n_prompt - 1 : -1]
            wanted = ids[0, n_prompt:]
            is_known &= bool((logits.argmax(-1) == wanted).all())
            torch.nn.functional.cross_entropy(logits, wanted).backward()
        if is_known:
            break
        optimiser.step()
        optimiser.zero_grad()
    assert is_known
    model.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    where = tmp_path_factory.mktemp("served")
    options = ["--model", f"oss={folder}", "--dtype", "float32", "--rate", "0", "--threads", "1"]
    with serving(str(where / "a.db"), where / "log", *options) as served:
        until_ready(served)
        yield served


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)


def body_of(messages: list[dict[str, Any]], has_tool: bool) -> dict[str, Any]:
    return {"model": "oss", "messages": messages, "temperature": 0, **({"tools": [TOOL]} if has_tool else {})}


def parts_of(answer: str) -> tuple[str, str, Any]:
    """Return the thought, the text and the arguments of the call in the model's output."""
    _, _, thought = answer.partition("analysis<|message|>")
    thought, _, rest = thought.partition("<|end|>") if thought else ("", "", answer)
    is_call = "to=functions" in rest
    body = rest.rpartition("<|message|>")[2].removesuffix("<|call|>").removesuffix("<|return|>")
    return thought, "" if is_call else body, json.loads(body) if is_call else None


def told(message: Mapping[str, Any]) -> tuple[str, str, Any]:
    """Return the same parts of a message in OpenAI's form."""
    calls = message.get("tool_calls") or []
    assert all(call["function"]["name"] == "weather" for call in calls) and len(calls) < 2
    arguments = json.loads(calls[0]["function"]["arguments"]) if calls else None
    return message.get("reasoning_content") or "", message.get("content") or "", arguments


@pytest.mark.parametrize("case", range(len(LEARNT)))
def test_whole_answer_has_its_thought_its_text_and_its_call(served: Served, case: int) -> None:
    messages, has_tool, answer = LEARNT[case]
    got = served.client.post("/v1/chat/completions", json=body_of(messages, has_tool)).json()
    (choice,) = got["choices"]
    thought, _, arguments = expected = parts_of(answer)
    assert told(choice["message"]) == expected
    assert choice["finish_reason"] == ("stop" if arguments is None else "tool_calls")
    assert (got["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0) == bool(thought)


@pytest.mark.parametrize("case", range(len(LEARNT)))
def test_stream_has_the_same_without_a_mark(client: openai.OpenAI, case: int) -> None:
    messages, has_tool, answer = LEARNT[case]
    body: Any = body_of(messages, has_tool)
    found: dict[str, Any] = {"reasoning_content": "", "content": "", "tool_calls": []}
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            found["content"] += delta.get("content") or ""
            found["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                if call["function"].get("name"):
                    found["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
                found["tool_calls"][-1]["function"]["arguments"] += call["function"].get("arguments") or ""
    assert told(found) == parts_of(answer) and "<|" not in json.dumps(found)


def test_responses_have_items_of_the_thought_and_of_the_call(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TOOL["function"]}
    response = client.responses.create(model="oss", input="Rain in Paris?", tools=[tool], temperature=0)
    thought, call = response.output
    assert (thought.type, call.type) == ("reasoning", "function_call")
    assert thought.content[0].text == "Use the tool." and json.loads(call.arguments) == {"city": "Paris"}


def test_text_held_to_json_is_the_final_message(served: Served) -> None:
    """The prompt starts the message, so that the model need not write JSON instead of a channel's name."""
    body = body_of(GREETED, False)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    free, held = (
        served.client.post("/v1/chat/completions", json=each).json()
        for each in (body, {**body, "response_format": form})
    )
    assert json.loads(held["choices"][0]["message"]["content"])["a"] in (1, 2)
    n_marks = len(PreTrainedTokenizerFast.from_pretrained(_root(served))("<|channel|>final<|message|>")["input_ids"])
    assert held["usage"]["prompt_tokens"] == free["usage"]["prompt_tokens"] + n_marks
    forced = served.client.post(
        "/v1/chat/completions", json={**body_of(ASKED, True), "tool_choice": "required", "max_tokens": 60}
    ).json()
    assert forced["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"


def _root(served: Served) -> str:
    return str(served.client.get("/v1/models").json()["data"][0]["root"])


def test_effort_reaches_the_template(served: Served) -> None:
    def prompt_of(**more: Any) -> tuple[str, str]:
        answer = served.client.post("/tokenize", json={"model": "oss", "messages": GREETED, **more})
        tokens = served.client.post("/detokenize", json={"model": "oss", "tokens": answer.json()["tokens"]})
        return tokens.json()["prompt"], answer.headers.get("x-swiftopt-ignored", "")

    assert "Reasoning: medium" in prompt_of()[0]
    assert prompt_of(reasoning_effort="high")[0].count("Reasoning: high") == 1
    assert "reasoning_effort" not in prompt_of(reasoning_effort="high")[1]
    answer = served.client.post(
        "/v1/responses", json={"model": "oss", "input": "Hello", "reasoning": {"effort": "low"}}
    )
    assert answer.status_code == 200 and answer.json()["reasoning"]["effort"] == "low"
    assert "reasoning" not in answer.headers.get("x-swiftopt-ignored", "")
