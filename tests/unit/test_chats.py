"""Chats as prompts: what a template would omit is refused, unless another form of it is complete."""

from __future__ import annotations

from typing import Any

import pytest
from chat_tokenizers import GEMMA, QWEN, call, qwen, said, templated
from transformers import PreTrainedTokenizerFast

from swiftopt.core.errors import InvalidInput
from swiftopt.decoding.chats import ChatPrompt
from swiftopt.decoding.template_inputs import template_inputs

ANY_ROLE = "{% for m in messages %}<|im_start|>{{ m.role + ' ' + m.content }}<|im_end|>{% endfor %}"


# --- nothing is left out


@pytest.mark.parametrize(
    ("template", "messages", "place"),
    [
        (QWEN, [*said("w"), {"role": "function", "content": "rain"}], "messages[1].role"),
        (QWEN, [*said("w"), {"role": "user", "content": "w", "tool_calls": [call("{}")]}], "messages[1].tool_calls[0]"),
        (GEMMA, [*said("w"), {"role": "tool", "content": "rain"}], "messages[1].role"),
        (GEMMA, [{"role": "system", "content": "w"}, *said("w")], "messages[0].role"),
        ("{{ messages[0].content }}", said("w", "say"), "messages[1].role"),
        ("{{ messages[-1].content }}", said("w", "say", "w"), "messages[0].role"),
        ("{% for m in messages if m.content %}{{ m.content }}{% endfor %}", said("w", "", "w"), "messages[1].content"),
        ("{% for m in messages %}{{ m.content[0] }}{% endfor %}", said("w"), "messages[0].role"),
    ],
)
def test_what_a_template_would_leave_out_is_refused_by_its_place(
    template: str, messages: list[dict[str, Any]], place: str
) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidInput) as error:
            ChatPrompt(templated(template), messages, {})
        assert error.value.param == place


def test_message_vanishes_for_one_tokenizer_and_not_for_another() -> None:
    messages = [*said("w"), {"role": "function", "content": "rain"}]
    assert "function rain" in ChatPrompt(templated(ANY_ROLE), messages, {}).text
    with pytest.raises(InvalidInput):
        ChatPrompt(templated(QWEN), messages, {})


def test_developer_is_the_system_where_the_template_knows_no_such_role() -> None:
    messages = [{"role": "developer", "content": "be kind"}, *said("w")]
    assert "<|im_start|>system\nbe kind" in ChatPrompt(qwen(), messages, {}).text
    assert "developer be kind" in ChatPrompt(templated(ANY_ROLE + "{# developer #}"), messages, {}).text


@pytest.mark.parametrize(
    "template",
    ["{% if m.content %}{% endif %}", "{% if m.role == 'system' and not m.content %}{% continue %}{% endif %}"],
)
def test_empty_system_message_may_vanish(template: str) -> None:
    whole = f"{{% for m in messages %}}{template}{{{{ m.role + m.content }}}}{{% endfor %}}"
    assert ChatPrompt(templated(whole), [{"role": "system", "content": ""}, *said("w")], {}).text.endswith("userw")


# --- forms that templates read


EACH = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}CALL{% endfor %}{% endfor %}"
CONCATENATED = EACH.replace("CALL", "{{ '!' + c.function.arguments + c.function.name }}")
WRITTEN = EACH.replace("CALL", "{{ c.function.name }}:{{ c.function.arguments }}")
BY_KEY = EACH.replace(
    "CALL", "{{ c.function.name }}{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
)
AS_PARTS = "{% for m in messages %}{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endfor %}"
ONE_CALL = """{% for m in messages %}{% if m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}
{%- if m.tool_calls[0].id | length != 9 %}{{ raise_exception('an id of 9 characters') }}{% endif %}
{{- '[' + m.tool_calls[0].id + m.tool_calls[0].function | tojson + ']' }}
{%- else %}{{ m.content }}{% if m.tool_call_id %}{{ m.tool_call_id }}{% endif %}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("arguments", "template", "written"),
    [
        ('{"city": "Paris"}', QWEN, '"arguments": {"city": "Paris"}}'),
        ({"city": "Paris"}, QWEN, '"arguments": {"city": "Paris"}}'),
        ('{"city": "Par', QWEN, '"arguments": {"city": "Par}'),
        ("[1, 2]", QWEN, '"arguments": [1, 2]}'),
        ('"Paris"', QWEN, '"arguments": Paris}'),
        ("5", QWEN, '"arguments": 5}'),
        ("", QWEN, '"arguments": {}}'),
        (None, QWEN, '"arguments": {}}'),
        ("null", QWEN, '"arguments": {}}'),
        ("[" * 100_000, QWEN, '"arguments": ' + "[" * 100_000),
        ('{"city": "Paris"}', CONCATENATED, '!{"city": "Paris"}weather'),
        ('{"city": "Par', CONCATENATED, '!{"city": "Parweather'),
        ("[1, 2]", CONCATENATED, "![1, 2]weather"),
        ('{"city": "Paris"}', WRITTEN, 'weather:{"city": "Paris"}'),
        ("[1, 2]", WRITTEN, "weather:[1, 2]"),
        ('{"city": "Paris"}', BY_KEY, "weathercity=Paris"),
        ('{"city": "Par', BY_KEY, 'weatherarguments={"city": "Par'),
        ("[1, 2]", BY_KEY, "weatherarguments=[1, 2]"),
        (
            '{"city": "Paris"}',
            ANY_ROLE,
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        ),
        ('{"city": "Par', ANY_ROLE, '<tool_call>\n{"name": "weather", "arguments": {"city": "Par}\n</tool_call>'),
    ],
)
def test_arguments_of_earlier_calls_go_on_whatever_they_are(arguments: Any, template: str, written: str) -> None:
    answer = {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}
    chat = [*said("w"), answer, {"role": "tool", "content": "rain", "tool_call_id": "call_1"}]
    text = ChatPrompt(templated(template), chat, {}).text
    assert written in text and "rain" in text


def test_contents_are_parts_where_the_template_reads_nothing_else() -> None:
    assert ChatPrompt(templated(AS_PARTS), said("say", "rain"), {}).text == "sayrain"


def test_calls_are_made_one_by_one_with_short_ids_where_the_template_wants_it() -> None:
    calls = [call('{"city": "Paris"}', number="call_0123456789"), call("{}", "sun", "call_9876543210")]
    results = [{"role": "tool", "content": "rain", "tool_call_id": each["id"]} for each in calls]
    chat = [*said("w"), {"role": "assistant", "content": "Let me see. ", "tool_calls": calls}, *results]
    text = ChatPrompt(templated(ONE_CALL), chat, {}).text
    first, second = text.split("[")[1][:9], text.split("[")[2][:9]
    assert first != second and text.startswith("wLet me see. [")
    # Each result stands behind its call: such a template may take it for that of the last call.
    assert f'"Paris"}}}}]rain{first}[{second}' in text and text.endswith(f"]rain{second}")


HARMONY = (  # As gpt-oss's template writes tools, calls and results: the last call's name stands before a result.
    "{%- for tool in tools or [] %}{{- '// ' + tool.function.description + '|' + tool.function.name }}{%- endfor %}"
    "{%- set last = namespace(name=none) %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' and 'tool_calls' in m %}"
    "{%- if m.content and m.thinking %}{{- raise_exception('content and thinking') }}{%- endif %}"
    "{%- if m.content or m.thinking %}{{- '<analysis>' + (m.content or m.thinking) }}{%- endif %}"
    "{%- set last.name = m.tool_calls[0].function.name %}"
    "{{- '<to ' + last.name + '>' + (m.tool_calls[0].function.arguments | tojson) }}"
    "{%- elif m.role == 'tool' %}{{- '<from ' + last.name + '>' + m.content }}"
    "{%- else %}{{- '<' + m.role + '>' + m.content }}{%- endif %}{%- endfor %}"
)


def test_parallel_calls_keep_their_results_and_one_thought_where_a_template_reads_one_call() -> None:
    calls = [call('{"city": "Paris"}', number="a"), call("{}", "sun", "b")]
    results = [
        {"role": "tool", "content": text, "tool_call_id": number} for number, text in (("b", "up"), ("a", "rain"))
    ]
    answer = {"role": "assistant", "content": "", "reasoning_content": "Both.", "tool_calls": calls}
    text = ChatPrompt(templated(HARMONY), [*said("w"), answer, *results, *said("And?")], {}).text
    calls_text = '<to weather>{"city": "Paris"}<from weather>rain<to sun>{}<from sun>up'
    assert text == f"<user>w<analysis>Both.{calls_text}<user>And?"


def test_text_and_thought_beside_a_call_are_kept_where_a_template_takes_one_of_them() -> None:
    answer = {"role": "assistant", "content": "Let me see.", "thinking": "Hm.", "tool_calls": [call("{}", "sun", "b")]}
    text = ChatPrompt(templated(HARMONY), [*said("w"), answer], {}).text
    assert text == "<user>w<assistant>Let me see.<analysis>Hm.<to sun>{}"


@pytest.mark.parametrize("description", [{}, {"description": None}])
def test_a_function_without_a_description_is_offered(description: dict[str, Any]) -> None:
    described = {"type": "function", "function": {"name": "moon", "description": "Its phase."}}
    tools = [described, {"type": "function", "function": {"name": "sun", **description}}]
    tokenizer = templated(HARMONY)
    assert ChatPrompt(tokenizer, said("w"), {"tools": [described]}).text == "// Its phase.|moon<user>w"
    assert ChatPrompt(tokenizer, said("w"), {"tools": tools}).text == "// Its phase.|moon// |sun<user>w"


# --- what a template reads


def test_template_reads_the_values_and_the_keys_that_it_names() -> None:
    inputs = template_inputs(qwen())
    assert inputs is not None and inputs.message_keys is not None
    # `content` is set in a branch alone: elsewhere the template would read it from the request.
    assert {*inputs.values} - {"content"} == {"messages", "tools", "note", "add_generation_prompt"}
    assert {"role", "content", "tool_calls"} <= {*inputs.message_keys}
    assert {"m", "call", "weight", "reasoning_content"}.isdisjoint(inputs.message_keys)
    thinking = template_inputs(templated(HARMONY))
    assert thinking is not None and {"thinking", "reasoning_content"} <= {*(thinking.message_keys or ())}
    assert template_inputs(PreTrainedTokenizerFast(tokenizer_object=qwen().backend_tokenizer)) is None


def test_value_with_a_default_of_the_template_is_read() -> None:
    default = "{% if level is not defined %}{% set level = 'low' %}{% endif %}"
    macro = f"{{% macro effort() %}}{default}{{{{ level }}}}{{% endmacro %}}{{{{ effort() }}}}"
    inputs = template_inputs(templated(macro + ANY_ROLE))
    assert inputs is not None and {*inputs.values} == {"messages", "level"}


@pytest.mark.parametrize(
    "written",
    [
        "{{ m | tojson }}",
        "{% for key, value in m.items() %}{{ value }}{% endfor %}",
        "{% if m.role == 'tool' %}{{ m }}{% endif %}",
    ],
)
def test_template_that_writes_whole_messages_may_read_any_key(written: str) -> None:
    inputs = template_inputs(templated(f"{{% for m in messages %}}{{{{ m.role + m.content }}}}{written}{{% endfor %}}"))
    assert inputs is not None and inputs.message_keys is None
