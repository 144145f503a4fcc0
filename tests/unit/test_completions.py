"""Completions to JSON and back, and earlier calls in chats."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from swiftopt.core.errors import InvalidInput
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.types import Completion, Timings
from swiftopt.server.chat_fields import plain_messages
from swiftopt.server.jobs import JobSubmission
from swiftopt.server.responses import AskedResponse
from swiftopt.server.schemas import AskedChat, AskedText

COUNT = st.integers(0, 10**6)
SECONDS = st.floats(0, 1e6)
COMPLETIONS = st.builds(
    Completion,
    token_ids=st.lists(COUNT).map(tuple),
    text=st.text(),
    finish_reason=st.sampled_from(["stop", "length", "stop_string"]),
    method=st.sampled_from(["plain", "swift"]),
    n_prompt_tokens=COUNT,
    target_passes=COUNT,
    first_tokens=st.integers(0, 1),
    drafted=COUNT,
    accepted=COUNT,
    accepted_per_position=st.lists(COUNT).map(tuple),
    refused=COUNT,
    accepted_prediction=COUNT,
    rejected_prediction=COUNT,
    verified_widths=st.dictionaries(st.integers(1, 300), COUNT),
    by_draft_length=st.dictionaries(st.integers(1, 9), st.lists(COUNT).map(tuple)),
    timings=st.builds(Timings, SECONDS, SECONDS, SECONDS, SECONDS),
    prefill_s=SECONDS,
    layer_set=st.none() | st.builds(LayerSet, st.just(9), st.frozensets(st.integers(1, 7)), st.just(frozenset({3}))),
)


@given(COMPLETIONS)
def test_completion_survives_json(completion: Completion) -> None:
    assert Completion.from_json(completion.to_json()) == completion
    assert Completion.from_json(json.loads(json.dumps(completion.to_json()))) == completion


@pytest.mark.parametrize("key", ["token_ids", "n_prompt_tokens", "verified_widths", "timings", "layer_set"])
def test_completion_with_a_part_missing_is_not_read(key: str) -> None:
    values: dict[str, Any] = Completion((1, 2), "a b", "stop", "plain").to_json()
    del values[key]
    with pytest.raises(InvalidInput, match=f"lacks '{key}'"):
        Completion.from_json(values)


def chat_of(*messages: Any) -> tuple[dict[str, Any], ...]:
    """Return the messages that the engine gets."""
    return plain_messages(AskedChat.model_validate({"model": "m", "messages": messages}).messages)


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, '{"a', "[1]", [1], "null", None, ""])
def test_calls_of_earlier_answers_come_through_whatever_their_arguments_are(arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    assert chat_of({"role": "assistant", "tool_calls": [call]}) == (
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )


def test_calls_in_the_older_form_are_calls_of_tools() -> None:
    asked, called = chat_of(
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
        {"role": "function", "name": "add", "content": "2"},
    )
    [call] = asked["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": "{}"}
    assert (called["role"], called["tool_call_id"]) == ("tool", call["id"])


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]}, "ano"),
        ({"content": [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]}, "ab"),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": "a", "refusal": None, "audio": None, "annotations": None}, "a"),
        ({"content": []}, ""),
    ],
)
def test_text_of_a_message_is_that_of_its_parts(message: dict[str, Any], text: str) -> None:
    assert chat_of({"role": "assistant", **message}) == ({"role": "assistant", "content": text},)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, "messages[0].content[1].type"),
        ({"content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"content": [{"text": "a"}]}, "messages[0].content[0].type"),
        ({"audio": {"id": "a"}}, "messages[0].audio"),
        ({"tool_calls": [{"type": "custom"}]}, "messages[0].tool_calls[0].type"),
        ({"tool_calls": [{"type": "function"}]}, "messages[0].tool_calls[0].function"),
        ({"tool_calls": [{"function": {"name": ""}}]}, "messages[0].tool_calls[0].function.name"),
        ({"function_call": {"arguments": "{}"}}, "messages[0].function_call.name"),
    ],
)
def test_part_of_a_message_that_is_no_text_is_refused_by_its_place(message: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidInput) as error:
        chat_of({"role": "assistant", **message})
    assert error.value.param == place and place.rpartition(".")[0] in str(error.value)


ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "15C"}]}


def test_items_of_a_response_are_the_messages_of_its_chat() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]}
    asked = {
        "model": "m",
        "instructions": "Be kind.",
        "input": [{"role": "user", "content": "a"}, thought, answer, ITEM, ITEM, OUTPUT, ITEM],
    }
    [request] = AskedResponse.model_validate(asked).chat().requests("")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert request.messages == (
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": [call, call]},
        {"role": "tool", "content": "15C", "tool_call_id": "c"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )


IMAGE = [{"type": "input_image", "image_url": "data:,"}]


@pytest.mark.parametrize(
    ("own", "place"),
    [
        ({"input": [ITEM, {**OUTPUT, "output": IMAGE}]}, "input[1].output[0].type"),
        ({"input": [ITEM, {**OUTPUT, "output": None}]}, "input[1].output"),
        ({"input": [{"role": "user", "content": IMAGE}], "instructions": "a"}, "input[0].content[0].type"),
        ({"input": [{"role": "User", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [ITEM, {**ITEM, "name": None}]}, "input[1].name"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": []}, "input"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "a", "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ],
)
def test_places_of_a_response_are_those_of_its_request(own: dict[str, Any], place: str) -> None:
    body = AskedResponse.model_validate({"model": "m", **own})
    with pytest.raises(InvalidInput) as error, body.naming():
        chat = body.chat()
        chat.check()
        chat.requests("")
    assert error.value.param == place
    assert "messages" not in str(error.value) and "function.name" not in str(error.value)


@pytest.mark.parametrize(
    ("place", "own"),
    [
        ("messages[0].role", "instructions"),
        ("messages[1].role", "input[0].type"),
        ("messages[1].tool_calls[0]", "input[0]"),
        ("messages[2].role", "input[1].type"),
        ("messages[2].content", "input[1].output"),
        ("messages", "input"),
        ("max_new_tokens", "max_output_tokens"),
    ],
)
def test_places_that_the_engine_names_are_those_of_a_responses_request(place: str, own: str) -> None:
    body = AskedResponse.model_validate({"model": "m", "instructions": "a", "input": [ITEM, OUTPUT]})
    body.chat()
    with pytest.raises(InvalidInput) as error, body.naming():
        raise InvalidInput(f"the template leaves out {place}", place)
    assert error.value.param == own
    assert str(error.value) == f"the template leaves out {own}" or place == "max_new_tokens"


@pytest.mark.parametrize(("value", "most"), [(False, 1), (True, None), (None, None)])
def test_parallel_calls_can_be_forbidden(value: bool | None, most: int | None) -> None:
    said = {"model": "m", "messages": [{"role": "user", "content": "w1"}]}
    assert AskedChat.model_validate({**said, "parallel_tool_calls": value}).most_calls == most


@pytest.mark.parametrize(
    ("held", "schema"),
    [
        ({"type": "json_schema", "name": "x", "schema": {"type": "string"}, "strict": True}, {"type": "string"}),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "text"}, None),
        (None, None),
    ],
)
def test_form_of_a_responses_text_is_that_of_its_chat(
    held: dict[str, Any] | None, schema: dict[str, Any] | None
) -> None:
    asked = AskedResponse.model_validate({"model": "m", "input": "w1", "text": {"format": held}})
    [request] = asked.chat().requests("")
    assert request.json_schema == schema
    assert asked.repeated()["text"] == {"format": held or {"type": "text"}}


@pytest.mark.parametrize(
    ("form", "own"),
    [
        *((AskedChat, {name: [1] * 1000}) for name in ("messages", "stop", "tools")),
        (AskedChat, {"stop_token_ids": ["a"] * 1000}),
        (AskedChat, {"logit_bias": dict.fromkeys(map(str, range(1000)), "a")}),
        (AskedChat, {"prediction": {"type": "content", "content": [1] * 1000}}),
        (AskedText, {"prompt": [1.5] * 1000}),
        (AskedText, {"prompt": [[1.5] * 1000]}),
        (AskedResponse, {"input": [1] * 1000}),
        (JobSubmission, {"stream": {"prompts": [1] * 1000}}),
        (JobSubmission, dict.fromkeys(map(str, range(1000)))),
        (AskedChat, {"swiftopt": dict.fromkeys(map(str, range(1000)))}),
    ],
)
def test_of_many_wrong_items_the_first_is_told(form: type[BaseModel], own: dict[str, Any]) -> None:
    """All errors of a body of a few megabytes would need gigabytes."""
    with pytest.raises(ValidationError) as found:
        form.model_validate({"model": "tiny", "messages": [], **own})
    assert found.value.error_count() < 10
