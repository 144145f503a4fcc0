"""Completions to JSON and back; and what chats say of earlier calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from swiftopt.core.errors import InvalidInput
from swiftopt.core.types import Completion, LayerSet, Timings
from swiftopt.server.jobs import JobSubmission
from swiftopt.server.responses import AskedResponse
from swiftopt.server.schemas import AskedChat, AskedText, Message, call_arguments, plain_messages

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


@pytest.mark.parametrize(
    ("sent", "read"), [('{"a": {"b": 1}}', {"a": {"b": 1}}), ({"a": 1}, {"a": 1}), ("", {}), (None, {})]
)
def test_arguments_of_calls_are_objects_for_templates(sent: Any, read: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": sent}}
    [message] = plain_messages([Message(role="assistant", tool_calls=[call])])
    assert message["tool_calls"] == [{**call, "function": {"name": "add", "arguments": read}}]
    assert message["content"] == ""


@pytest.mark.parametrize("sent", ["{", "[1]", "5", 5, [1], "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(sent: Any) -> None:
    with pytest.raises(InvalidInput, match="the arguments are no JSON") as error:
        call_arguments(sent, "messages[2]")
    assert error.value.param == "messages[2]"


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
    """All errors of a body of a few megabytes would take gigabytes."""
    with pytest.raises(ValidationError) as found:
        form.model_validate({"model": "tiny", "messages": [], **own})
    assert found.value.error_count() < 10
