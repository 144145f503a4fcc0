"""Messages and tools of a chat's request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, model_validator

from ..core.errors import InvalidInput, UnsupportedField, UnsupportedValue
from ..core.streams import text_of
from .bodies import Lenient

# Roles whose messages need content. Answers may consist of calls, and functions may return nothing.
WITH_CONTENT = ("developer", "system", "user")
ID_KEYS = {"tool": ("tool_call_id",), "function": ("name",)}  # Role -> keys by which a result is matched with its call.


class Message(Lenient):
    """A message of a chat. Unknown keys go to the chat template; parts of text are joined."""

    PASSES_ON: ClassVar = True

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    refusal: str | None = None
    # Deprecated by OpenAI in favour of `tool_calls`, like the role "function" in favour of "tool".
    function_call: dict[str, Any] | None = None
    audio: Any = None

    def as_template_message(self, path: str) -> dict[str, Any]:
        """Return the message as templates read it, with its content as a text.

        Raises: InvalidInput: it has no content, a part of the content is not text, or a call names no function.
        """
        if self.content is None and self.role in WITH_CONTENT:
            raise InvalidInput(f"{path} has no content: give it a text", f"{path}.content")
        if self.audio is not None:
            raise UnsupportedField(f"{path}.audio: only text is supported, send it as content", f"{path}.audio")
        message = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        texts = (text_of(self.content or "", f"{path}.content"), self.refusal)
        message |= {"role": self.role, "content": "\n".join(filter(None, texts))}
        calls = [_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(self.tool_calls or ())]
        # A `function_call` has no id: derive one from the function's name, to match the message with its result.
        if self.function_call is not None:
            function = _call({"function": self.function_call}, path, "function_call")
            calls.append({"id": f"call_{self.function_call['name']}", **function})
        if self.role == "function":
            message |= {"role": "tool", "tool_call_id": f"call_{message.get('name')}"}
        return {**message, "tool_calls": calls} if calls else message

    def unread(self, template_keys: Collection[str]) -> Iterator[str]:
        """Yield the keys for the template that are not among those it reads, and whose value says something."""
        id_keys = ID_KEYS.get(self.role, ())
        for key, value in (self.model_extra or {}).items():
            if value and key not in template_keys and key not in id_keys:
                yield key


def plain_messages(messages: Iterable[Message]) -> tuple[dict[str, Any], ...]:
    """Return the messages as templates read them.

    Raises: InvalidInput: as `Message.as_template_message`.
    """
    return tuple(message.as_template_message(f"messages[{i}]") for i, message in enumerate(messages))


def _call(call: Mapping[str, Any], path: str, key: str = "function") -> dict[str, Any]:
    """Return a function call of an earlier answer as templates read it; its arguments may have any type."""
    if (kind := call.get("type", "function")) != "function":
        raise UnsupportedValue(f"{path} is of type {kind!r}: only function calls are supported", f"{path}.type")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise InvalidInput(f"{path} has no function: send the call as the server returned it", f"{path}.{key}")
    if not isinstance(name := function.get("name"), str) or not name:
        raise InvalidInput(f"{path}.{key} has no name: send the call as the server returned it", f"{path}.{key}.name")
    return {**call, "type": "function", "function": {"arguments": None, **function}}


class Tool(Lenient):
    """A function that the model may call."""

    class Function(Lenient):
        """The function's name and its description for the model; `parameters` is the schema of its arguments."""

        name: str = Field(min_length=1)
        description: str | None = None
        parameters: dict[str, Any] | None = None
        strict: bool | None = None

    type: Literal["function"]
    function: Function
    _client_form: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_client_form(cls, values: Any, handler: Callable[[Any], Tool]) -> Tool:
        tool = handler(values)
        if isinstance(values, dict):
            tool._client_form = values
        return tool

    @property
    def client_form(self) -> dict[str, Any]:
        """The tool's object in the request, for the chat template."""
        return self._client_form


class NamedTool(Lenient):
    """The tool that must be called."""

    class FunctionName(Lenient):
        """The tool's function."""

        name: str

    type: Literal["function"]
    function: FunctionName
