"""What chats and completions ask: OpenAI's fields, vLLM's and our own, checked and made requests of the engine.

Fields that nobody knows are ignored; those that are known and would have no effect here are refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..core.requests import CompletionRequest
from ..core.types import Sampling
from .problems import UnusableField
from .state import Depth, Strict, Task

MOST_CHOICES = 128
MOST_LOGPROBS = 20
TEXT_TOKENS = 16  # of a completion of text whose length nobody names
RESERVED = frozenset(  # arguments of the tokenizer, which are not the template's
    [
        *("conversation", "tools", "documents", "chat_template", "tokenize", "return_dict", "return_tensors"),
        *("return_assistant_tokens_mask", "padding", "truncation", "max_length", "tokenizer_kwargs"),
    ]
)
SAMPLED = {each.name for each in fields(Sampling)}  # fields of the same names


class Options(Strict):
    """Our own part of a request."""

    task: Task | None = None
    method: str | None = None
    plan: Literal["best", "plain"] | Depth = "best"  # or a stored version
    tune: bool = True


class StreamOptions(BaseModel):
    """What a stream tells beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Lenient(BaseModel):
    """Unknown keys are kept as they are."""

    model_config = ConfigDict(extra="allow")


class JsonSchema(Lenient):
    """A schema by name, as OpenAI wraps it."""

    name: str = ""
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(BaseModel):
    """What the text is to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_of_text(self) -> dict[str, Any] | None:
        """Return the JSON schema that the text keeps to.

        Raises: UnusableField: it is missing.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        if self.json_schema is None:
            place = "response_format.json_schema"
            raise UnusableField(place, f"{place} is missing: give the schema")
        return self.json_schema.schema_


class Prediction(BaseModel):
    """Text that the completion is expected to repeat: it drafts."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class AskedModel(Lenient):
    """The fields that every form has."""

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    user: str | None = None
    swiftopt: Options = Field(default_factory=Options)


class Asked(AskedModel):
    """The fields that chats and completions share."""

    UNSUPPORTED: ClassVar[tuple[str, ...]] = ("best_of", "suffix", "audio", "modalities", "web_search_options")

    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[int, float] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    min_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, max_length=128)
    return_metrics: bool = False

    def check(self) -> None:
        """Refuse what is known and has no effect here.

        Raises: UnusableField: a field is.
        """
        for name in self.UNSUPPORTED:
            if (self.model_extra or {}).get(name) is not None:
                raise UnusableField(name, f"{name} is not supported: leave it out")
        if self.stream_options is not None and not self.stream:
            raise UnusableField("stream_options", "stream_options needs stream: set stream to true, or leave it out")

    @property
    def n_logprobs(self) -> int | None:
        """Return how many alternatives of each token are wanted with log probabilities; None: no log probabilities."""
        return None

    def sampling(self) -> Sampling:
        """Return how tokens are drawn; OpenAI's default is the distribution itself, with a seed that nobody chose."""
        told = self.model_dump(include=SAMPLED, exclude_none=True)
        own = {"top_k": max(0, self.top_k or 0), "logit_bias": tuple((self.logit_bias or {}).items())}
        return Sampling(**{"temperature": 1.0, "seed": secrets.randbits(62), **told, **own})

    def common(self, salt: str) -> CompletionRequest:
        """Return the request without its prompt."""
        return CompletionRequest(
            task=self.swiftopt.task,
            method="plain" if self.swiftopt.plan == "plain" else self.swiftopt.method,
            version=self.swiftopt.plan if isinstance(self.swiftopt.plan, int) else None,
            learn=self.swiftopt.tune,
            max_new_tokens=self.max_tokens,
            sampling=self.sampling(),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids),
            min_new_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=self.n_logprobs,
            json_schema=None if self.response_format is None else self.response_format.schema_of_text(),
            prediction="" if self.prediction is None else joined(self.prediction.content, "prediction.content"),
            salt=f"{salt}:{self.cache_salt or ''}",
        )


def joined(content: str | Sequence[Mapping[str, Any]], place: str) -> str:
    """Return the text of a content.

    Raises: UnusableField: a part of it is no text.
    """
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UnusableField(place, f"{place}: only parts of type text are supported here")
    return "".join(part["text"] for part in content)


class Message(Lenient):
    """One message of a chat; parts of text are joined."""

    role: str
    content: str | list[dict[str, Any]] | None = None


def plain_messages(messages: Iterable[Message]) -> tuple[dict[str, Any], ...]:
    """Return the messages as templates read them.

    Raises: UnusableField: a part of one is no text.
    """
    found = []
    for i, each in enumerate(messages):
        more = {name: value for name, value in (each.model_extra or {}).items() if value is not None}
        content = joined(each.content or "", f"messages[{i}].content")
        found.append({"role": each.role, "content": content, **more})
    return tuple(found)


class NamedTool(BaseModel):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: dict[str, Any]


class AskedChat(Asked):
    """A chat."""

    UNSUPPORTED = (*Asked.UNSUPPORTED, "functions", "function_call")

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise UnusableField("top_logprobs", "top_logprobs needs logprobs: set logprobs to true, or leave it out")

    @property
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def requests(self, salt: str) -> list[CompletionRequest]:
        """The one prompt.

        Raises: UnusableField: a field cannot be used beside another, or at all.
        """
        template = self._template()
        schema = self._forced_call()
        if schema is not None and self.response_format is not None and self.response_format.type != "text":
            raise UnusableField("tool_choice", "tool_choice that forces a call and response_format exclude each other")
        common = self.common(salt)
        request = replace(
            common,
            json_schema=schema or common.json_schema,
            messages=plain_messages(self.messages),
            tools=tuple(self.tools or ()) if self.tool_choice != "none" else (),
            template=template,
            max_new_tokens=self.max_completion_tokens or self.max_tokens,
        )
        return [request]

    def _template(self) -> dict[str, Any]:
        """Return the values of the template."""
        given = "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and self.add_generation_prompt and given:
            words = "continue_final_message and add_generation_prompt exclude each other: choose one"
            raise UnusableField("continue_final_message", words)
        for name in sorted(RESERVED & set(self.chat_template_kwargs)):
            place = f"chat_template_kwargs.{name}"
            raise UnusableField(place, f"{place} is no value of a template: leave it out")
        if self.continue_final_message:
            return {**self.chat_template_kwargs, "continue_final_message": True, "add_generation_prompt": False}
        return {**self.chat_template_kwargs, **({} if self.add_generation_prompt else {"add_generation_prompt": False})}

    def _forced_call(self) -> dict[str, Any] | None:
        """Return the schema of the call that must be made; None: none must be.

        Raises: UnusableField: there is no such tool.
        """
        if self.tool_choice in (None, "none", "auto"):
            return None
        wanted = self.tool_choice.function.get("name") if isinstance(self.tool_choice, NamedTool) else None
        functions = functions_of(self.tools or ())
        calls = [_call_schema(each) for each in functions if wanted is None or each["name"] == wanted]
        if not calls:
            words = "a tool is to be called, but none is given" if wanted is None else f"there is no tool {wanted!r}"
            raise UnusableField("tool_choice", f"{words}: add it to tools, or leave tool_choice out")
        return {"anyOf": calls}


def functions_of(tools: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the functions that a request offers as tools, by name."""
    functions = (tool.get("function") for tool in tools)
    return [own for own in functions if isinstance(own, Mapping) and isinstance(own.get("name"), str)]


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a call of a function."""
    arguments = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


class AskedText(Asked):
    """A completion of texts, or of token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs

    def requests(self, salt: str) -> list[CompletionRequest]:
        """A request per prompt.

        Raises: UnusableField: there is none.
        """
        is_one = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        prompts: Any = [self.prompt] if is_one else self.prompt
        if not prompts:
            raise UnusableField("prompt", "prompt is an empty list: give at least one prompt")
        common = replace(self.common(salt), max_new_tokens=self.max_tokens or TEXT_TOKENS, echo=self.echo)
        return [
            replace(common, text=each) if isinstance(each, str) else replace(common, token_ids=tuple(each))
            for each in prompts
        ]


class AskedTokens(Lenient):
    """A text, or a chat, whose tokens are wanted; vLLM's form."""

    model: str
    prompt: str | None = None
    messages: list[Message] | None = None


class AskedDetokenized(Lenient):
    """Token ids whose text is wanted."""

    model: str
    tokens: list[int]
