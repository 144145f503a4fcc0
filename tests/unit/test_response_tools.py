"""Tools of Responses become functions of a chat, and calls become items: namespaces, custom tools, ignored tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swiftopt.core.errors import InvalidInput, UnsupportedValue
from swiftopt.server.response_tools import ResponseTools, chat_call
from swiftopt.server.responses import AskedResponse

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "name": "read", "description": "Read a file.", "parameters": PARAMETERS, "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
FILES = {"type": "namespace", "name": "mcp__files", "description": "Files of the project.", "tools": [READ, PATCH]}


def asked(**values: Any) -> AskedResponse:
    return AskedResponse.model_validate({"model": "m", "input": "Hi", **values})


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_functions_of_a_namespace_are_offered_by_a_name_of_both_and_called_by_their_own() -> None:
    tools = ResponseTools([FILES])
    first, second = (tool["function"] for tool in tools.functions)
    assert (first["name"], second["name"]) == ("mcp__files__read", "mcp__files__apply_patch")
    assert first["description"] == "Files of the project.\nRead a file." and first["parameters"] == PARAMETERS
    assert "Files of the project" not in second["description"]
    item = tools.item(call("mcp__files__read", '{"path": "a"}'))
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "read", "mcp__files")
    # What the client sends back is the call that the model wrote.
    assert chat_call(item)["function"] == {"name": "mcp__files__read", "arguments": '{"path": "a"}'}


def test_functions_of_openais_own_namespace_keep_their_names() -> None:
    tools = ResponseTools([{**FILES, "name": "functions", "description": ""}])
    assert tools.functions[0]["function"]["name"] == "read"
    assert tools.functions[0]["function"]["description"] == "Read a file."
    assert tools.item(call("read", "{}"))["namespace"] == "functions"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin \\"Patch\\""}', '*** Begin "Patch"'),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"inp', '{"inp'),
    ],
)
def test_a_custom_tool_is_a_function_of_one_text(arguments: str, text: str) -> None:
    tools = ResponseTools([PATCH])
    [tool] = tools.functions
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert tool["function"]["description"] == "Edit files.\nThe input follows this lark grammar:\nstart: /.+/"
    assert tools.left_out == ["tools[0].format"]  # Nothing enforces the grammar.
    item = tools.item(call("apply_patch", arguments))
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", text)
    assert json.loads(chat_call(item)["function"]["arguments"]) == {"input": text}


def test_tools_that_openai_runs_are_left_out_and_named() -> None:
    hosted = ["web_search", "web_search_preview_2025_03_11", "web_search_2025_08_26", "computer_use_preview", "mcp"]
    hosted += ["file_search", "image_generation", "code_interpreter", "local_shell", "shell", "tool_search"]
    body = asked(tools=[*({"type": kind} for kind in hosted), READ])
    chat = body.chat()
    assert [tool.function.name for tool in chat.tools or ()] == ["read"]
    assert set(body.ignored) == {f"tools[{i}]" for i in range(len(hosted))}
    # Errors in the chat's only tool are about the request's last one.
    assert body.name_of("tools[0].function.parameters.x") == f"tools[{len(hosted)}].parameters.x"
    assert body.repeated()["tools"][0] == {"type": "web_search"}


def test_unknown_tools_and_namespaces_without_tools_are_refused_by_their_places() -> None:
    with pytest.raises(UnsupportedValue, match=r"tools\[1\] is of type 'fuction'") as found:
        asked(tools=[READ, {"type": "fuction"}]).chat()
    assert found.value.param == "tools[1].type"
    with pytest.raises(UnsupportedValue, match=r"tools\[0\].tools\[0\] is of type 'namespace'"):
        asked(tools=[{**FILES, "tools": [FILES]}]).chat()
    with pytest.raises(InvalidInput, match=r"tools\[0\] is not a namespace") as found_namespace:
        asked(tools=[{"type": "namespace", "name": "a"}]).chat()
    assert found_namespace.value.param == "tools[0]"


def test_a_choice_names_a_tool_as_the_client_does() -> None:
    forced = asked(
        tools=[FILES], tool_choice={"type": "custom", "namespace": "mcp__files", "name": "apply_patch"}
    ).chat()
    assert forced.tool_choice is not None and forced.must_call
    [request] = forced.requests("")
    assert request.forced == (1,)


def test_thoughts_without_a_text_are_left_out_and_named() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
    ]
    body = asked(input=items, tools=[PATCH])
    roles = [message.role for message in body.chat().messages]
    assert roles == ["user", "assistant", "tool"] and "input[1]" in body.ignored


def test_a_form_of_the_text_has_no_effect_where_a_tool_must_be_called() -> None:
    """instructor sends a schema both for the text and as a tool that must be called."""
    form = {"format": {"type": "json_schema", "name": "read", "schema": PARAMETERS}}
    chat = asked(tools=[READ], tool_choice={"type": "function", "name": "read"}, text=form).chat()
    [request] = chat.requests("")
    assert request.forced == (0,) and request.json_schema is None and "response_format" in chat.ignored
