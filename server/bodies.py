"""Base classes of request bodies: handling of unknown and refused fields, and names of fields in errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
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


class FieldRefusal(NamedTuple):
    """How a route refuses a field that it does not have, although the field would change the answer.

    `accepted` are the values that ask for what the server does anyway. `replacement` is what to use instead; "{form}",
    "{length}" and "{prompt}" in it stand for the route's own fields.
    """

    accepted: tuple[Any, ...] = ()
    replacement: str = ""

    def accepts(self, value: Any) -> bool:
        """Return whether a value has no effect; `true` does not count as 1."""
        return any(type(value) is type(accepted) and value == accepted for accepted in self.accepted)


# Fields of other servers and of sibling routes. A route that has such a field itself does not refuse it.
REFUSED_FIELDS: Mapping[str, FieldRefusal] = {
    name: FieldRefusal(accepted, replacement)
    for names, accepted, replacement in (
        ("audio web_search_options truncate_prompt_tokens chat_template prompt_embeds", (), ""),
        ("custom_logit_processor lora_path", (), ""),
        ("prompt_logprobs", (), "echo with logprobs at /v1/completions"),
        ("modalities", (["text"],), ""),
        ("suffix", ("",), ""),
        ("best_of", (0, 1), ""),
        ("include_stop_str_in_output use_beam_search early_stopping echo logprobs", (False,), ""),
        ("return_tokens_as_token_ids add_special_tokens", (False,), ""),
        ("skip_special_tokens spaces_between_special_tokens", (True,), ""),
        ("do_sample", (True,), "temperature"),
        ("length_penalty typical_p tfs_z num_beams n", (1, 1.0), ""),
        ("repeat_penalty", (1, 1.0), "repetition_penalty"),
        ("mirostat dry_multiplier xtc_probability dynatemp_range top_a", (0, 0.0), ""),
        ("no_repeat_ngram_size top_logprobs", (0,), ""),
        ("documents logits_processors lora", ([],), ""),
        ("allowed_token_ids", (), "logit_bias"),
        ("bad_words", ([],), "logit_bias"),
        ("stop_sequences stop_words", ([],), "stop"),
        ("options", (), "its fields in the body itself"),
        # Tools.
        ("functions", (), "tools"),
        ("function_call", (), "tool_choice"),
        ("tools", ([],), "/v1/chat/completions"),
        ("tool_choice", ("none", "auto"), "/v1/chat/completions"),
        # The form of the text.
        ("structured_outputs guided_json guided_regex guided_choice guided_grammar", (), "{form}"),
        ("grammar regex ebnf json_schema structural_tag format", ("",), "{form}"),
        ("response_format", ({"type": "text"},), "{form}"),
        ("text", ({"format": {"type": "text"}},), "{form}"),
        # Its length.
        ("max_tokens max_completion_tokens max_output_tokens max_new_tokens max_length", (), "{length}"),
        ("n_predict num_predict", (-1,), "{length}"),
        ("min_new_tokens min_length", (0,), "min_tokens"),
        # The prompt.
        ("messages prompt input inputs", (), "{prompt}"),
        ("instructions", ("",), "{prompt}"),
        ("previous_response_id conversation", (), "{prompt}, with all of the conversation"),
    )
    for name in names.split()
}


class Body(BaseModel):
    """A body of which only the first invalid item of a list is reported.

    pydantic would keep an error per item, which takes a hundred times the memory of the item.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        for subschema in schemas_in(schema):
            if subschema.get("type") in ("list", "dict"):
                subschema["fail_fast"] = True
        return schema


class Strict(Body):
    """A body without unknown keys and conversions of types."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown_key(cls, values: Any) -> Any:
        if not isinstance(values, dict) or len(unknown := values.keys() - cls.model_fields.keys()) < 2:
            return values
        first_unknown = next(key for key in values if key in unknown)
        return {key: value for key, value in values.items() if key == first_unknown or key not in unknown}


class Lenient(Body):
    """Unknown keys are kept; with `PASSES_ON` they go to the chat template, so `ignored` does not name them."""

    PASSES_ON: ClassVar[bool] = False

    UNSUPPORTED: ClassVar[Mapping[str, FieldRefusal]] = {}

    model_config = ConfigDict(extra="allow")

    @property
    def extra(self) -> dict[str, Any]:
        """The unknown fields."""
        return self.model_extra or {}

    @property
    def ignored(self) -> list[str]:
        """The places of fields without effect: unknown keys, and those of `unused`."""
        paths = {to_javascript_path(path) for path in unknown_keys(self)} - set(self.UNSUPPORTED) | {*self.unused()}
        return sorted(paths)

    def unused(self) -> Iterator[str]:
        """Yield the places of known fields without effect in this combination."""
        yield from ()


def unknown_keys(value: Any, path: Place = ()) -> Iterator[Place]:
    """Yield the places of unknown keys at any depth of a request, or of a part at `path`."""
    if isinstance(value, list):
        for i, element in enumerate(value):
            yield from unknown_keys(element, (*path, i))
    if not isinstance(value, Lenient):
        return
    if not value.PASSES_ON:
        yield from ((*path, key) for key, extra_value in (value.model_extra or {}).items() if extra_value is not None)
    for name, field in type(value).model_fields.items():
        yield from unknown_keys(getattr(value, name), (*path, field.alias or name))
