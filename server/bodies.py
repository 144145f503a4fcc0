"""Base classes of request bodies: handling of unknown fields, and names of fields in errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema

from ..core.json_schemas import Place
from ..core.messages import TEMPLATE_FIELDS
from ..core.serialization import schemas_in, to_javascript_path

PROMPT_FIELDS = frozenset(  # Fields that determine a prompt's tokens.
    [
        *("model", "prompt", "messages", "tools", "tool_choice"),
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *TEMPLATE_FIELDS,
    ]
)
NAMES = {  # Field of the engine's request -> field in the client's request.
    **{
        "text": "prompt",
        "token_ids": "prompt",
        "json_schema": "response_format.json_schema.schema",
        "method": "swiftopt.method",
    },
    **{"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"},
    **{"task": "swiftopt.task", "version": "swiftopt.plan"},
}
# Fields of other servers and of sibling routes that would change an answer and are refused, each with the values that
# are accepted because they ask for the default behaviour. A route that knows such a field takes it.
REFUSED_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "web_search_options", "prompt_logprobs", "truncate_prompt_tokens"), ()),
    **{"modalities": (["text"],), "suffix": ("",), "allowed_token_ids": (), "bad_words": ([],), "best_of": (0, 1)},
    **dict.fromkeys(("functions", "function_call", "chat_template", "prompt_embeds", "options"), ()),
    **dict.fromkeys(("include_stop_str_in_output", "use_beam_search", "early_stopping", "echo", "logprobs"), (False,)),
    **dict.fromkeys(("return_tokens_as_token_ids", "add_special_tokens"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "do_sample"), (True,)),
    **dict.fromkeys(("length_penalty", "repeat_penalty", "typical_p", "tfs_z", "num_beams", "n"), (1, 1.0)),
    **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "top_a"), (0, 0.0)),
    **dict.fromkeys(("no_repeat_ngram_size", "min_new_tokens", "min_length", "top_logprobs"), (0,)),
    **dict.fromkeys(("documents", "stop_sequences", "stop_words", "logits_processors", "lora", "tools"), ([],)),
    **{"custom_logit_processor": (), "lora_path": (), "tool_choice": ("none", "auto")},
    # The text's form.
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("grammar", "regex", "ebnf", "json_schema", "structural_tag", "format"), ("",)),
    **{"response_format": ({"type": "text"},), "text": ({"format": {"type": "text"}},)},
    # Its length.
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_length"), ()),
    **dict.fromkeys(("n_predict", "num_predict"), (-1,)),
    # What is to be answered.
    **dict.fromkeys(("messages", "prompt", "input", "inputs", "previous_response_id", "conversation"), ()),
    "instructions": ("",),
}
REPLACEMENTS = {  # Refused field -> field to use instead; "{form}", "{length}" and "{prompt}" are the route's own.
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), "{form}"),
    **dict.fromkeys(("grammar", "regex", "ebnf", "json_schema", "structural_tag", "format"), "{form}"),
    **dict.fromkeys(("response_format", "text"), "{form}"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"), "{length}"),
    **dict.fromkeys(("max_length", "n_predict", "num_predict"), "{length}"),
    **dict.fromkeys(("messages", "prompt", "input", "inputs", "instructions"), "{prompt}"),
    **dict.fromkeys(("previous_response_id", "conversation"), "{prompt}, with all of the conversation"),
    **dict.fromkeys(("stop_sequences", "stop_words"), "stop"),
    **dict.fromkeys(("min_new_tokens", "min_length"), "min_tokens"),
    **dict.fromkeys(("bad_words", "allowed_token_ids"), "logit_bias"),
    **dict.fromkeys(("tools", "tool_choice"), "/v1/chat/completions"),
    **{"functions": "tools", "function_call": "tool_choice", "repeat_penalty": "repetition_penalty"},
    **{"do_sample": "temperature", "options": "its fields in the body itself"},
    "prompt_logprobs": "echo with logprobs at /v1/completions",
}


class Body(BaseModel):
    """Report only the first invalid item of a list: pydantic keeps an error, a hundred times its size, for each."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        for subschema in schemas_in(schema):
            if subschema.get("type") in ("list", "dict"):
                subschema["fail_fast"] = True
        return schema


class Strict(Body):
    """Unknown keys and values of another type are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown_key(cls, values: Any) -> Any:
        if not isinstance(values, dict) or len(unknown := values.keys() - cls.model_fields.keys()) < 2:
            return values
        first_unknown = next(key for key in values if key in unknown)
        return {key: value for key, value in values.items() if key == first_unknown or key not in unknown}


class Lenient(Body):
    """Unknown keys are kept; with `PASSES_ON` they go to the chat template, so none counts as ignored."""

    PASSES_ON: ClassVar[bool] = False

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # Refused fields of a route, as REFUSED_FIELDS.

    model_config = ConfigDict(extra="allow")

    @property
    def extra(self) -> dict[str, Any]:
        """The unknown fields."""
        return self.model_extra or {}

    @property
    def ignored(self) -> list[str]:
        """The places of fields without effect: unknown keys, and those of `unused`, in ASCII for a header."""
        paths = {to_javascript_path(path) for path in unknown_keys(self)} - set(self.UNSUPPORTED) | {*self.unused()}
        return [json.dumps(path)[1:-1] for path in sorted(paths)]

    def unused(self) -> Iterator[str]:
        """Yield the places of known fields that have no effect in this combination."""
        yield from ()


def unknown_keys(value: Any, path: Place = ()) -> Iterator[Place]:
    """Yield the places of unknown keys, in a request or a part of one, at any depth."""
    if isinstance(value, list):
        for i, element in enumerate(value):
            yield from unknown_keys(element, (*path, i))
    if not isinstance(value, Lenient):
        return
    if not value.PASSES_ON:
        yield from ((*path, key) for key, extra_value in (value.model_extra or {}).items() if extra_value is not None)
    for name, field in type(value).model_fields.items():
        yield from unknown_keys(getattr(value, name), (*path, field.alias or name))
