"""Conversion of the tools of Responses to functions of a chat, and of the chat's calls to items of Responses.

A chat has only functions. A function in a namespace gets the namespace's name as prefix. A custom tool, whose input is
a text, becomes a function with one argument. Tools that OpenAI's own servers run are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import InvalidInput, UnsupportedValue

# Types of tools that OpenAI runs, or whose calls only its models write. Some end with a date.
HOSTED = re.compile(
    r"(?:web_search|file_search|computer|mcp|code_interpreter|image_generation|local_shell|shell|apply_patch|tool_search"
    r"|programmatic_tool_calling)(?:_(?:use_)?preview)?(?:_[0-9_]+)?"
)
DEFAULT_NAMESPACE = "functions"  # OpenAI's name for the namespace of functions without one.
INPUT = "input"  # Name of a custom tool's text, as an argument and in items.
INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
# Type of a call's item -> the field with the tool's input, and the name of the events that stream it.
CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": (INPUT, "custom_tool_call_input"),
}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool that the client runs; `values` is its object in the request, at `path`."""

    path: str
    values: Mapping[str, Any]
    namespace: Mapping[str, Any] | None = None

    @property
    def is_custom(self) -> bool:
        return bool(self.values["type"] == "custom")

    def function(self, is_first: bool) -> dict[str, Any]:
        """Return the tool as a function of a chat; the first one of a namespace also gets its description."""
        function = {key: value for key, value in self.values.items() if key not in ("type", "format")}
        namespace_text = str((self.namespace or {}).get("description") or "") if is_first else ""
        descriptions = [namespace_text, function.get("description")]
        if self.is_custom:
            function |= {"parameters": INPUT_SCHEMA}
            descriptions.append(_format_description(self.values.get("format")))
        elif "format" in self.values:
            function["format"] = self.values["format"]
        if any(descriptions):
            are_texts = all(description is None or isinstance(description, str) for description in descriptions)
            # A description of another type is left as it is, so that the check of the chat names it.
            function["description"] = "\n".join(filter(None, descriptions)) if are_texts else descriptions[1]
        if self.namespace is not None:
            function["name"] = chat_name(self.namespace.get("name"), self.values.get("name"))
        return function

    def item(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chat's call of this tool as an item of a response."""
        kind, arguments = "function_call", call["function"]["arguments"]
        if self.is_custom:
            kind, arguments = "custom_tool_call", _input_text(arguments)
        namespace = {} if self.namespace is None else {"namespace": self.namespace["name"]}
        return {**call_item(call, kind, arguments), "name": self.values["name"], **namespace}


class ResponseTools:
    """The tools of a request as `functions` of a chat.

    `places` maps places of the chat's tools to places in the request. `left_out` lists the places in the request of
    what the chat lacks.

    Raises: UnsupportedValue: a tool has an unknown type. InvalidInput: a namespace has no name or no list of tools.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.left_out: list[str] = []
        self.places: dict[str, str] = {}
        self.functions: list[dict[str, Any]] = []
        self._by_name: dict[Any, ClientTool] = {}
        described = set[str]()  # Paths of the namespaces whose description is in a function.
        for tool in self._client_tools(tools, ""):
            namespace_path = tool.path.rpartition(".")[0]
            function = tool.function(is_first=namespace_path not in described)
            described.add(namespace_path)
            place = f"tools[{len(self.functions)}]"
            self.places |= {place: tool.path, f"{place}.function": tool.path}
            self.functions.append({"type": "function", "function": function})
            self._by_name.setdefault(str(function.get("name")), tool)
            if tool.is_custom and (tool.values.get("format") or {}).get("type", "text") != "text":
                self.left_out.append(f"{tool.path}.format")

    def _client_tools(
        self, tools: Sequence[Any], path: str, namespace: Mapping[str, Any] | None = None
    ) -> Iterator[ClientTool]:
        for i, tool in enumerate(tools):
            tool_path = f"{path}tools[{i}]"
            kind = tool.get("type") if isinstance(tool, Mapping) else None
            if kind in ("function", "custom"):
                yield ClientTool(tool_path, tool, namespace)
            elif kind == "namespace" and namespace is None:
                inner = tool.get("tools")
                if not isinstance(inner, list) or not isinstance(tool.get("name"), str):
                    raise InvalidInput(f"{tool_path} is not a namespace: give a name and a list of tools", tool_path)
                yield from self._client_tools(inner, f"{tool_path}.", tool)
            elif isinstance(kind, str) and HOSTED.fullmatch(kind):
                self.left_out.append(tool_path)
            else:
                supported = "functions and custom tools" + ("" if namespace else ", also in a namespace,")
                raise UnsupportedValue(
                    f"{tool_path} is of type {kind!r}: only {supported} are supported here", f"{tool_path}.type"
                )

    def item(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chat's call as an item of a response."""
        tool, function = self._by_name.get(call["function"]["name"]), call["function"]
        if tool is None:
            return {**call_item(call, "function_call", function["arguments"]), "name": function["name"]}
        return tool.item(call)


def chat_name(namespace: Any, name: Any) -> Any:
    """Return a tool's name in the chat, which has the namespace's name as prefix."""
    if not (isinstance(namespace, str) and isinstance(name, str)) or namespace == DEFAULT_NAMESPACE:
        return name
    return f"{namespace.rstrip('_')}__{name}"


def call_item(call: Mapping[str, Any], kind: str, arguments: str) -> dict[str, Any]:
    """Return the item of a chat's call, without the tool's name; `kind` is a key of CALLS."""
    mark = "fc" if kind == "function_call" else "ctc"
    common = {"id": f"{mark}_{call['id'].removeprefix('call_')}", "type": kind, "status": "completed"}
    return {**common, "call_id": call["id"], CALLS[kind][0]: arguments}


def chat_call(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of an earlier call as a call of a chat."""
    arguments = item.get("arguments")
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({INPUT: item.get(INPUT)}, ensure_ascii=False)
    function = {"name": chat_name(item.get("namespace"), item.get("name")), "arguments": arguments}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _format_description(input_format: Any) -> str:
    """Return the description for the model of a custom tool's format; "" for free text."""
    if not isinstance(input_format, Mapping) or input_format.get("type") != "grammar":
        return ""
    return f"The input follows this {input_format.get('syntax')} grammar:\n{input_format.get('definition')}"


def _input_text(arguments: str) -> str:
    """Return a custom tool's input; if the model wrote other arguments, all of them."""
    try:
        text = json.loads(arguments)[INPUT]
    except (ValueError, KeyError, TypeError):
        return arguments
    return text if isinstance(text, str) else arguments
