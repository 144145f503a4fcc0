"""Schemas of requests: types of fields that routes share, and chats and completions, which become engine requests.

Chats and completions have OpenAI's fields, vLLM's and our own. Unknown fields are ignored. Known fields that the server
cannot obey are refused, unless their value asks for what the server does anyway. null means the default.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from ..core.errors import InvalidInput, SwiftoptError, UnsupportedField, UnsupportedValue
from ..core.json_schemas import list_not_enforced, relax
from ..core.messages import TEMPLATE_FIELDS, TemplateInputs
from ..core.requests import CompletionRequest
from ..core.serialization import LARGEST, to_javascript_path
from ..core.streams import text_of
from ..core.types import Sampling
from .bodies import NAMES, PROMPT_FIELDS, REFUSED_FIELDS, Lenient, Strict
from .chat_fields import Message, NamedTool, Tool, plain_messages

# No control characters: PostgreSQL cannot store NUL, and names must fit on one line.
Word = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]
Task = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^/\x00-\x1f\x7f]+$")]
Depth = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(strict=True)]  # Strict: a list of texts and numbers is not one of token ids.

MOST_CHOICES = 128
MOST_EFFORT = 64  # Maximum characters of `reasoning_effort`.
MOST_LOGPROBS = 20
MOST_MESSAGES = 1 << 14  # Maximum messages of a chat, because checking them blocks the event loop.
MOST_STOPS = 128  # Maximum stop strings, because each is searched for after every token.
MOST_SEED = 9223372036854776000  # Largest seed in OpenAI's API reference: 2**63 - 1, rounded.
TEXT_TOKENS = 16  # Default of max_tokens for /v1/completions, as in OpenAI's API.
RESERVED_ARGUMENTS = frozenset(  # Arguments of apply_chat_template itself, which clients cannot pass to the template.
    [
        *("self", "conversation", "conversations", "messages", "tools", "documents", "chat_template", "tokenize"),
        *("return_dict", "return_tensors", "sanitize_control_tokens"),
        *("return_assistant_tokens_mask", "padding", "truncation", "max_length", "tokenizer_kwargs"),
    ]
)
CONTINUES = "continue_final_message"  # An argument of apply_chat_template that no template reads.
SAMPLED = {field.name for field in fields(Sampling)}  # Fields that a request and Sampling have in common.


class Options(Strict):
    """The field `swiftopt` of a request."""

    task: Task | None = None
    method: str | None = None
    plan: Literal["best", "plain"] | Depth | None = None  # An int names a stored version.
    tune: bool | None = None


class StreamOptions(Lenient):
    """What a stream reports in addition to its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Lenient):
    """A named JSON schema, in OpenAI's form."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Lenient):
    """The required form of the text; a `schema` directly in it is llama.cpp's form of a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    def check(self) -> None:
        """Raise InvalidInput if a schema is missing, does not fit the type, or is given twice."""
        schemas = {"json_schema": self.json_schema, "schema": self.schema_}
        paths = [f"response_format.{key}" for key, value in schemas.items() if value is not None]
        if self.json_schema is not None and self.type != "json_schema":
            raise InvalidInput(f"{paths[0]} needs type json_schema: set it, or leave it out", paths[0])
        if self.schema_ is not None and self.type == "text":
            raise InvalidInput(f"{paths[0]} needs type json_schema: set it, or leave it out", paths[0])
        if len(paths) > 1:
            raise InvalidInput(f"{paths[0]} and {paths[1]} exclude each other: choose one", paths[1])
        if self.type == "json_schema" and self.raw_schema is None:
            raise InvalidInput(f"{self.place} is missing: give the schema", self.place)

    @property
    def is_json(self) -> bool:
        """Whether the text is JSON, which ends by itself."""
        return self.type != "text"

    @property
    def place(self) -> str:
        """The place of the schema in the request."""
        return "response_format.schema" if self.schema_ is not None else "response_format.json_schema.schema"

    @property
    def raw_schema(self) -> dict[str, Any] | None:
        """The JSON schema, if there is one."""
        return self.schema_ if self.json_schema is None else self.json_schema.schema_

    @property
    def is_relaxed(self) -> bool:
        """Whether the schema is only a hint to the model, as OpenAI treats one that is not strict."""
        return self.json_schema is not None and self.json_schema.strict is False

    def schema_of_text(self) -> Mapping[str, Any] | None:
        """Return the JSON schema that the text must satisfy; None: free text."""
        if not self.is_json:
            return None
        schema = {"type": "object"} if self.raw_schema is None else self.raw_schema
        return relax(schema) if self.is_relaxed else schema


class Prediction(Lenient):
    """Text that the completion is expected to repeat, used as a draft."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class CommonFields(Lenient):
    """The fields of chats, completions and responses."""

    UNSUPPORTED: ClassVar = REFUSED_FIELDS
    # The route's fields by their names in `FieldRefusal.replacement`.
    REPLACED_BY: ClassVar = {"form": "response_format", "length": "max_tokens", "prompt": "messages"}

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    user: str | None = None
    swiftopt: Options | None = None
    top_k: int | None = Field(default=None, ge=-1, le=LARGEST)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[int, float] | None = None
    seed: int | None = Field(default=None, ge=-MOST_SEED, le=MOST_SEED)
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = Field(default=None, ge=0, le=LARGEST)
    ignore_eos: bool | None = None
    prediction: Prediction | None = None
    stream: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=128)
    return_metrics: bool | None = None
    return_token_ids: bool | None = None

    def check(self) -> None:
        """Check what the types of the fields cannot express.

        Raises: InvalidInput: a field cannot be obeyed, alone or together with another.
        """
        for name, refusal in self.UNSUPPORTED.items():
            value = self.extra.get(name)
            if value is not None and not refusal.accepts(value):
                replacement = refusal.replacement.format(**self.REPLACED_BY)
                advice = f"use {replacement}" if replacement else "leave it out"
                kind = UnsupportedValue if refusal.accepted else UnsupportedField
                raise kind(f"{name} is not supported here: {advice}", name)

    @property
    def beside_prompt(self) -> list[str]:
        """The request's fields that do not change the tokens of the prompt."""
        fields_set = self.model_fields_set & type(self).model_fields.keys() - PROMPT_FIELDS
        return sorted(name for name in fields_set if getattr(self, name) is not None)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Let errors in the block name fields as the client does."""
        try:
            yield
        except SwiftoptError as error:
            self.name(error)
            raise

    def name(self, error: SwiftoptError) -> None:
        """Replace the error's field by the client's name of it; an unknown field already has this name."""
        if error.param is not None and error.param not in self.extra:
            error.param = self.name_of(error.param)

    def name_of(self, field: str) -> str:
        """Return the client's name of a field of the engine's request."""
        return NAMES.get(field, field)


class GenerationFields(CommonFields):
    """The fields that chats and completions share."""

    max_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        super().check()
        if self.response_format is not None:
            self.response_format.check()
        if self.stream_options is not None and not self.stream:
            raise InvalidInput("stream_options needs stream: set stream to true, or leave it out", "stream_options")
        if self.return_token_ids and self.stream:
            raise InvalidInput("return_token_ids is for whole answers: leave out stream, or it", "return_token_ids")
        extension = self.swiftopt or Options()
        if extension.plan not in (None, "best") and extension.method not in (None, extension.plan):
            both_fields = f"swiftopt.plan {extension.plan!r} and swiftopt.method {extension.method!r}"
            problem = f"{both_fields} exclude each other: choose one"
            raise InvalidInput(problem, "swiftopt.method")
        if self.min_tokens and self.most_tokens is not None and self.min_tokens > self.most_tokens:
            problem = f"min_tokens {self.min_tokens} is more than the {self.most_tokens} tokens of a completion"
            raise InvalidInput(f"{problem}: lower it, or ask for more", "min_tokens")

    def name_of(self, field: str) -> str:
        form = self.response_format
        return form.place if field == "json_schema" and form is not None else super().name_of(field)

    @property
    def is_json(self) -> bool:
        """Whether the completion must be JSON. It ends by itself, and `stop` would cut it, so `stop` is ignored."""
        return self.response_format is not None and self.response_format.is_json

    def unused(self) -> Iterator[str]:
        if self.is_json:
            yield from (name for name in ("stop", "stop_token_ids") if getattr(self, name))
        form = self.response_format
        if form is not None and form.is_json and form.is_relaxed:
            yield from (f"{form.place}.{to_javascript_path(path)}" for path in list_not_enforced(form.raw_schema or {}))

    def unread(self, template: TemplateInputs) -> Iterator[str]:
        """Yield the places of the values that only the chat template could use, but does not read."""
        yield from ()

    @property
    def most_tokens(self) -> int | None:
        """Maximum tokens of a completion; None: as many as fit the context."""
        return self.max_tokens

    @property
    def n_logprobs(self) -> int | None:
        """Number of alternatives per token with log probabilities; None: no log probabilities at all."""
        return None

    def common(self, salt: str) -> CompletionRequest:
        """Return the request without its prompt. By default it samples with a random seed, as OpenAI does."""
        extension = self.swiftopt or Options()
        sampling_fields = self.model_dump(include=SAMPLED, exclude_none=True)
        sampling_fields |= {"top_k": max(0, self.top_k or 0), "logit_bias": tuple((self.logit_bias or {}).items())}
        if self.seed is not None:
            sampling_fields["seed"] = (self.seed + 2**63) % 2**64 - 2**63
        return CompletionRequest(
            task=extension.task,
            method="plain" if extension.plan == "plain" else extension.method,
            version=extension.plan if isinstance(extension.plan, int) else None,
            learn=extension.tune is not False,
            max_new_tokens=self.most_tokens,
            sampling=Sampling(**{"temperature": 1.0, "seed": secrets.randbits(62), **sampling_fields}),
            stop=() if self.is_json else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=() if self.is_json else tuple(self.stop_token_ids or ()),
            min_new_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.n_logprobs,
            json_schema=None if self.response_format is None else self.response_format.schema_of_text(),
            prediction="" if self.prediction is None else text_of(self.prediction.content, "prediction.content"),
            salt=f"{salt}:{self.cache_salt or ''}",
        )


class AskedChat(GenerationFields):
    """A request for the next message of a chat."""

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(default=None, max_length=MOST_EFFORT)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidInput("top_logprobs needs logprobs: set logprobs to true, or leave it out", "top_logprobs")
        lengths = (self.max_tokens, self.max_completion_tokens)
        if None not in lengths and lengths[0] != lengths[1]:
            problem = (
                f"max_tokens {lengths[0]} and max_completion_tokens {lengths[1]} exclude each other: leave one out"
            )
            raise InvalidInput(problem, "max_tokens")

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def most_calls(self) -> int | None:
        """Maximum number of tool calls in an answer; None: any number."""
        return 1 if self.parallel_tool_calls is False else None

    @property
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def requests(self, salt: str) -> list[CompletionRequest]:
        """Return the chat's single request.

        Raises: InvalidInput: a field cannot be used, alone or together with another.
        """
        template, common, forced = self._template(), self.common(salt), self._forced()
        request = replace(
            common,
            forced=forced,
            json_schema=None if forced else common.json_schema,  # A forced call leaves no text for a schema.
            messages=plain_messages(self.messages),
            tools=tuple(tool.client_form for tool in self.tools or ()) if self.tool_choice != "none" else (),
            template=template,
        )
        return [request]

    def _template(self) -> dict[str, Any]:
        """Return the values for the chat template."""
        template_values = {name: getattr(self, name) for name in TEMPLATE_FIELDS if getattr(self, name) is not None}
        template_values |= self.chat_template_kwargs or {}
        if self.continue_final_message and self.add_generation_prompt:
            problem = "continue_final_message and add_generation_prompt exclude each other: choose one"
            raise InvalidInput(problem, "continue_final_message")
        for name in sorted(RESERVED_ARGUMENTS & set(self.chat_template_kwargs or {})):
            path = f"chat_template_kwargs.{name}"
            raise InvalidInput(f"{path} is not a value for a template: leave it out", path)
        if self.continue_final_message:
            template_values[CONTINUES] = True
        if self.continue_final_message or self.add_generation_prompt is False:
            template_values["add_generation_prompt"] = False
        return template_values

    @property
    def must_call(self) -> bool:
        """Whether the answer must call a tool."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def is_json(self) -> bool:
        return self.must_call or super().is_json

    def unused(self) -> Iterator[str]:
        yield from super().unused()
        forced = self._forced()
        if forced and self.response_format is not None and self.response_format.is_json:
            yield "response_format"
        for i, tool in enumerate(self.tools or ()):
            path, function = f"tools[{i}].function", tool.function
            if function.strict and i not in forced:
                yield f"{path}.strict"  # Only the arguments of forced calls are constrained to the schema.
            elif function.strict is False and i in forced:
                yield from (
                    f"{path}.parameters.{to_javascript_path(parameter)}"
                    for parameter in list_not_enforced(function.parameters or {})
                )

    def unread(self, template: TemplateInputs) -> Iterator[str]:
        yield from (name for name in TEMPLATE_FIELDS if getattr(self, name) is not None and name not in template.values)
        for name in (self.chat_template_kwargs or {}).keys() - {*template.values, CONTINUES}:
            yield to_javascript_path(("chat_template_kwargs", name))
        if template.message_keys is not None:
            message_keys = frozenset(template.message_keys)
            for i, message in enumerate(self.messages):
                yield from (to_javascript_path(("messages", i, key)) for key in message.unread(message_keys))

    def _forced(self) -> tuple[int, ...]:
        """Return the indices of the tools of which the answer must call one; none: a call is optional.

        Raises: InvalidInput: `tool_choice` names no tool of the request.
        """
        if not self.must_call:
            return ()
        function_name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        names = [tool.function.name for tool in self.tools or ()]
        if forced := tuple(i for i, name in enumerate(names) if function_name in (None, name)):
            return forced
        problem = (
            "tool_choice requires a call, but there are no tools: add one"
            if function_name is None
            else f"there is no tool {function_name!r}: add it to tools"
        )
        raise InvalidInput(f"{problem}, or leave tool_choice out", "tool_choice")


class AskedText(GenerationFields):
    """A request to complete texts or token ids."""

    REPLACED_BY: ClassVar = {**GenerationFields.REPLACED_BY, "prompt": "prompt"}

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    add_special_tokens: bool | None = None
    max_tokens: int | None = Field(default=None, ge=0, le=LARGEST)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        return TEXT_TOKENS if self.max_tokens is None else self.max_tokens

    def requests(self, salt: str) -> list[CompletionRequest]:
        """Return a request per prompt.

        Raises: InvalidInput: there is no prompt.
        """
        is_one = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        prompts: Any = [self.prompt] if is_one else self.prompt
        if not prompts:
            raise InvalidInput("prompt is an empty list: give at least one prompt", "prompt")
        common = replace(self.common(salt), echo=bool(self.echo), special_tokens=self.add_special_tokens is not False)
        return [
            replace(common, text=prompt) if isinstance(prompt, str) else replace(common, token_ids=tuple(prompt))
            for prompt in prompts
        ]


def _form_of(body: Any) -> str:
    """Return the name of the class that validates a body."""
    is_chat = isinstance(body, Mapping) and body.get("messages") is not None
    return (AskedChat if is_chat else AskedText).__name__


AskedTokens = Annotated[  # Bodies of /tokenize: any request with a prompt.
    Annotated[AskedChat, Tag(AskedChat.__name__)] | Annotated[AskedText, Tag(AskedText.__name__)],
    Discriminator(_form_of),
]


class AskedDetokenized(Lenient):
    """A request for the text of token ids."""

    model: str
    tokens: list[int]
