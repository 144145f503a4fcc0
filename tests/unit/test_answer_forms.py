"""Thoughts and calls that templates write are parsed back unchanged, token by token and in pieces of any size."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from answer_templates import FAMILIES, SCHEMA, TOOLS, tokenizer_of, turn_end_of
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftopt.core.answer_forms import FORMS, forms_of, merged
from swiftopt.core.messages import AnswerDone, AnswerText, PromptRead
from swiftopt.core.types import Completion, FinishReason, Prompt, Sampling
from swiftopt.decoding.chats import ChatPrompt
from swiftopt.decoding.session import Session
from swiftopt.decoding.turn_tokens import turn_end_ids
from swiftopt.server.choices import Choice
from swiftopt.tasks.generate import GrowingText
from swiftopt.worker.served_tokens import Tokens

QUESTION = {"role": "user", "content": "Say what the weather is in Paris."}
THOUGHT = 'It is asked\n\nfor the weather: é {"a": 1} [1].'
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
TEXT = "Let me see: 1 < 2."
ARGUMENTS: tuple[Mapping[str, Any], ...] = (
    {"a": 1},
    {},
    {
        "city": 'Zürich, "東京" 😀',
        "options": {"deep": [1, 2.5, None, True, {"k": "a\nb"}]},
        "places": ["x", [], {}],
        "flag": False,
        "text": "line 1\nit's line 2 </tool_call> [TOOL_CALLS]",
    },
)
TAGGED = {"text": "a </parameter> b", "city": "\n", "places": None}
ONE_CALL = ("llama3", "gpt-oss")  # Templates that take one call at a time.
WITHOUT_TEXT = ("command-r7b", "mistral-7b")  # Templates that write no text beside calls.
UNQUOTED = ("olmo3", "lfm2.5", "llama3.2 pythonic")  # Templates that quote nothing within a text.
CALLING = [name for name, family in FAMILIES.items() if merged(family.rows).calls]
THINKING = [name for name, family in FAMILIES.items() if family.thinks]


def called(*arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": "add", "arguments": json.dumps(each)}}
        for i, each in enumerate(arguments)
    ]


def written(name: str, **answer: Any) -> tuple[list[int], str, list[int]]:
    """Return the prompt's tokens, and the answer that the template writes after it, as text and as tokens."""
    tokenizer, values = tokenizer_of(name), {"tools": list(TOOLS)}
    prompt = ChatPrompt(tokenizer, [QUESTION], values)
    messages = [QUESTION, {"role": "assistant", "content": "", **answer}]
    text = ChatPrompt(tokenizer, messages, {**values, "add_generation_prompt": False}).text
    assert text.startswith(prompt.text)
    completion = text.removeprefix(prompt.text)
    return prompt.encode(), completion, tokenizer(completion, add_special_tokens=False)["input_ids"]


def session_of(name: str, with_tools: bool = True) -> Session:
    tokenizer = tokenizer_of(name)
    marks = merged(forms_of(FAMILIES[name].template)).marks(with_tools)
    runtime: Any = SimpleNamespace(tokenizer=tokenizer, hf_model=None, vocab_size=len(tokenizer))
    return Session(runtime, Sampling(), 1000, shown_marks=marks)


def begun(name: str, prompt_ids: Sequence[int] = (), tools: Mapping[str, Any] = {"add": SCHEMA}) -> Choice:
    tokens, reply = Tokens(tokenizer_of(name)), SimpleNamespace(sent_at=0.0)
    choice = Choice(0, reply, tools)  # type: ignore[arg-type]  # Only the reply's time is read.
    in_thought = tokens.ends_in_thought(prompt_ids)
    choice.begin(
        PromptRead(0, len(prompt_ids), forms=tokens.forms, end_of_thought=tokens.end_of_thought, in_thought=in_thought)
    )
    return choice


def add_all(choice: Choice, texts: Iterator[str], ids: Sequence[int] = (), finish: FinishReason = "stop") -> None:
    for text in texts:
        choice.add(AnswerText(0, text, 1))
    end(choice, ids, finish)


def end(choice: Choice, ids: Sequence[int] = (), finish: FinishReason = "stop") -> None:
    choice.add(AnswerDone(0, 0.0, "default", Completion(tuple(ids), "", finish, ""), "plain", None, None))


def texts_of(session: Session, ids: Sequence[int]) -> Iterator[str]:
    """Return the text that each token adds up to the end of the turn, as the engine's process sends it."""
    ids, reason = session.ending(1000).crop([], ids)
    growing = GrowingText(session, Prompt("1", "default", token_ids=(0,)))
    for token_id in ids:
        yield growing.add([token_id])
    ended = Completion(tuple(ids), session.ending(1000).text(ids), reason or "stop", "")
    yield from (added.text for added in growing.finish_completion(ended))


def told(choice: Choice) -> tuple[str, str, list[Any]]:
    calls = [json.loads(call["function"]["arguments"]) for call in choice.calls]
    assert all(call["function"]["name"] == "add" for call in choice.calls)
    return choice.thought.strip("\n"), choice.text.strip("\n"), calls


def expected(name: str, thought: str, text: str, arguments: Sequence[Any]) -> tuple[str, str, list[Any]]:
    return thought if FAMILIES[name].thinks else "", "" if arguments and name in WITHOUT_TEXT else text, [*arguments]


def answers(name: str) -> Iterator[tuple[str, str, list[Any]]]:
    """Draw a thought, a text and arguments of calls that the family's template can write."""
    kinds = [*ARGUMENTS, *([TAGGED] if any("tags" in row or row == "seed" for row in FAMILIES[name].rows) else [])]
    yield THOUGHT, TEXT, []
    for arguments in kinds:
        yield THOUGHT, "", [arguments]
    if name in CALLING and name not in (*ONE_CALL, *WITHOUT_TEXT):
        yield THOUGHT, TEXT, [ARGUMENTS[0], ARGUMENTS[2]]


def answer_of(thought: str, text: str, arguments: Sequence[Any]) -> dict[str, Any]:
    calls = {"tool_calls": called(*arguments)} if arguments else {}
    return {"content": text, "reasoning_content": thought, **calls}


# --- which rows hold


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_found_by_the_template(name: str) -> None:
    assert forms_of(FAMILIES[name].template) == FAMILIES[name].rows


def test_every_row_has_a_family_in_the_tests() -> None:
    assert {row for family in FAMILIES.values() for row in family.rows} == {*FORMS} - {"think, unclosed"}


def test_unknown_template_has_no_row_and_uses_the_general_form() -> None:
    assert forms_of("{{ messages }}") == () and merged(()).thinks == ()
    choice = begun("gemma3")
    add_all(choice, iter("<think>Hm.</think>"))
    assert told(choice) == ("", "<think>Hm.</think>", [])


# --- what the template writes is read back


@pytest.mark.parametrize("name", CALLING)
def test_answer_is_read_token_by_token(name: str) -> None:
    for thought, text, arguments in answers(name):
        prompt_ids, _, ids = written(name, **answer_of(thought, text, arguments))
        choice = begun(name, prompt_ids)
        add_all(choice, texts_of(session_of(name), ids), ids)
        assert told(choice) == expected(name, thought, text, arguments)
        assert choice.finish_reason == ("tool_calls" if arguments else "stop")
        assert (choice.n_thought > 0) == FAMILIES[name].thinks


@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=4, deadline=None)
@given(cuts=st.lists(st.integers(0, 400)))
def test_answer_does_not_depend_on_how_its_text_is_split(name: str, cuts: list[int]) -> None:
    for thought, text, arguments in answers(name):
        prompt_ids, _, ids = written(name, **answer_of(thought, text, arguments))
        whole = "".join(texts_of(session_of(name), ids))
        ends = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
        for pieces in ([whole[a:b] for a, b in itertools.pairwise(ends)], list(whole)):
            choice, shown = begun(name, prompt_ids), ""
            for piece in pieces:
                shown += choice.add(AnswerText(0, piece, 1))
                assert text.startswith(shown.strip("\n"))  # No part of a mark is shown.
            end(choice, ids)
            assert told(choice) == expected(name, thought, text, arguments)


@pytest.mark.parametrize("name", CALLING)
def test_parallel_choices_are_parsed_separately(name: str) -> None:
    both = [answer_of(THOUGHT, "", [ARGUMENTS[i]]) for i in (0, 2)]
    runs = [written(name, **answer) for answer in both]
    choices = [begun(name, prompt_ids) for prompt_ids, _, _ in runs]
    streams = [texts_of(session_of(name), ids) for _, _, ids in runs]
    for texts in itertools.zip_longest(*streams, fillvalue=""):
        for choice, text in zip(choices, texts, strict=True):
            choice.add(AnswerText(0, text, 1))
    for choice, i in zip(choices, (0, 2), strict=True):
        end(choice)
        assert told(choice)[2] == [ARGUMENTS[i]]


# --- what is no call, or no end


@pytest.mark.parametrize("name", CALLING)
def test_call_of_an_unknown_tool_stays_text(name: str) -> None:
    prompt_ids, _, ids = written(name, **answer_of(THOUGHT, "", [ARGUMENTS[2]]))
    choice = begun(name, prompt_ids, {"subtract": SCHEMA})
    add_all(choice, texts_of(session_of(name), ids), ids)
    assert not choice.calls and choice.finish_reason == "stop"
    assert "line 2 </tool_call> [TOOL_CALLS]" in choice.text and "add" in choice.text


@pytest.mark.parametrize("name", CALLING)
def test_cut_call_stays_text_and_nothing_is_lost(name: str) -> None:
    prompt_ids, _, ids = written(name, **answer_of(THOUGHT, "", [ARGUMENTS[2]]))
    whole, form = "".join(texts_of(session_of(name), ids)), merged(FAMILIES[name].rows)
    marks = re.compile("|".join(map(re.escape, (*form.thinks, *form.thought_ends, *form.hidden))) or "(?!)")
    for length in range(len(whole)):
        choice = begun(name, prompt_ids)
        add_all(choice, iter([whole[:length]]), finish="length")
        assert told(choice)[2] in ([], [ARGUMENTS[2]])
        said = choice.thought + choice.text
        assert choice.calls or "".join(said.split()) == "".join(marks.sub("", whole[:length]).split())


@pytest.mark.parametrize("name", THINKING)
def test_unfinished_thought_is_a_thought(name: str) -> None:
    prompt_ids, completion, _ = written(name, **answer_of(THOUGHT, TEXT, []))
    cut = completion[: completion.index("weather:")]
    choice = begun(name, prompt_ids)
    add_all(choice, iter(cut), range(9), "length")
    assert told(choice) == (THOUGHT[: THOUGHT.index("weather:")].strip("\n"), "", [])
    assert (choice.n_thought, choice.finish_reason) == (9, "length")


def test_marks_around_an_answer_are_left_out() -> None:
    for name, mark in (("hunyuan-a13b", "answer"), ("granite3.3", "response"), ("ernie4.5", "response")):
        choice = begun(name)
        add_all(choice, iter(f"<think>{THOUGHT}</think>\n<{mark}>\n{TEXT}\n</{mark}>"))
        assert told(choice) == (THOUGHT, TEXT, [])


@pytest.mark.parametrize("name", [name for name in CALLING if name not in UNQUOTED])
def test_call_spelled_within_an_argument_is_not_a_call(name: str) -> None:
    form = merged(FAMILIES[name].rows)
    _, _, ids = written(name, **answer_of(THOUGHT, "", [{"a": 2}]))
    spelled = "".join(texts_of(session_of(name), ids))
    city = CALL if form.body in ("tags", "arguments") else f"{spelled} {CALL}"  # Tags within tags end the outer ones.
    prompt_ids, _, ids = written(name, **answer_of(THOUGHT, "", [{"city": city, "a": 3}]))
    choice = begun(name, prompt_ids)
    for letter in "".join(texts_of(session_of(name), ids)):
        choice.add(AnswerText(0, letter, 1))
        assert [call for call in choice.calls if json.loads(call["function"]["arguments"])["a"] != 3] == []
    end(choice, ids)
    assert len(choice.calls) == 1


def test_completion_of_json_mode_has_no_thought() -> None:
    choice = begun("deepseek-r1")
    choice.begin(PromptRead(0, 1, forms=FAMILIES["deepseek-r1"].rows, in_thought=True, is_constrained=True))
    add_all(choice, iter('{"a": 1}'))
    assert told(choice) == ("", '{"a": 1}', [])


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("gpt-oss", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}', {"a": 1}),
        ("gpt-oss", '<|channel|>analysis to=functions.add code<|message|>{"a": 1}', None),
        ("mistral-small-3.2", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', {"a": 1}),
        ("mistral-small-3.2", '[TOOL_CALLS]add{"a": 1}', {"a": 1}),
        ("kimi", '<|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_argument_begin|>{"a": 1}', None),
        ("qwen3-coder", "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>", {"a": 1}),
        ("qwen3-coder", "<tool_call>\n<function=add>\n<parameter=a>\nx</parameter>\n</function></tool_call>",
         {"a": "\nx"}),
        ("qwen3-coder", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', {"a": 1}),
        ("lfm2.5", "<|tool_call_start|>[add(a=-1, options={'k': (1, 2.5)}, text=None)]<|tool_call_end|>",
         {"a": -1, "options": {"k": [1, 2.5]}, "text": None}),
        ("lfm2.5", r'<|tool_call_start|>[add(text="a\n\"b\" \u00e9 \d")]<|tool_call_end|>', {"text": 'a\n"b" é \\d'}),
        ("lfm2.5", "<|tool_call_start|>[add(a=b)]<|tool_call_end|>", None),
        ("lfm2.5", "<|tool_call_start|>[add(a=" + "[" * 9000, None),
        ("olmo3", "<function_calls>\n[add(a=1)\n</function_calls>", None),
        ("seed-oss", "<seed:tool_call><function=add><parameter=options>{'k': [True, None]}</parameter></function>",
         {"options": {"k": [True, None]}}),
        ("seed-oss", "<seed:tool_call><function=add><parameter=a>1</parameter>", None),
        ("apertus", '<|tools_prefix|>[{"add": {"a": 1}, "more": 2}]<|tools_suffix|>', None),
        ("glm4.5", "<tool_call>add</tool_call>", {}),
        ("hunyuan3-preview", "<tool_calls><tool_call>add<tool_sep></tool_call></tool_calls>", {}),
        ("hunyuan3-preview", "<tool_calls><tool_call>add<tool_sep><arg_key>a</arg_key><arg_value>1</arg_value>"
         "</tool_call></tool_calls>", {"a": 1}),
        ("hunyuan3-preview", "<tool_calls><tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>", {"a": 1}),
        ("hunyuan3-preview", "<tool_calls><tool_call>add<arg_key>a</arg_key>", None),
        ("gemma4", '<|tool_call>call:add{a:1,options:{k b:[1,<|"|>x:{},y<|"|>],"q":None},text:"z"}<tool_call|>',
         {"a": 1, "options": {"k b": [1, "x:{},y"], "q": None}, "text": "z"}),
        ("gemma4", "<|tool_call>call:add{a:b}<tool_call|>", None),
        ("gemma4", "<|tool_call>add{a:1}<tool_call|>", None),
        ("gemma4", '<|tool_call>call:add{text:<|"|>x}<tool_call|>', None),
        ("hyperclova x", ' -> tool/function_call\n{"name": "add","input": {"a": 1}}<|im_end|>', {"a": 1}),
        ("llama4", '{"type": "function", "name": "add", "parameters": {"a": 1}}', {"a": 1}),
        ("llama4", '<|python_start|>{"name": "add", "parameters": {"a": 1}}<|python_end|>', {"a": 1}),
        ("llama4", '<|python_start|>[add(a=1, text="x")]<|python_end|>', {"a": 1, "text": "x"}),
        ("llama4", '{"name": "add", "parameters": {"a": 1}', None),
        ("functiongemma", "<start_function_call>call:add{city:<escape>Ulm<escape>}<end_function_call>",
         {"city": "Ulm"}),
    ],
)  # fmt: skip
def test_calls_are_read_in_every_form_that_models_write(name: str, text: str, arguments: Any) -> None:
    choice = begun(name)
    add_all(choice, iter(text))
    assert told(choice)[2] == ([] if arguments is None else [arguments])
    assert arguments is not None or text.strip() in choice.text.replace("\n", "\n")


@pytest.mark.parametrize("name", ["command-r7b", "olmo3", "qwen3", "lfm2.5"])
def test_turn_may_end_instead_of_the_closing_mark_of_a_call(name: str) -> None:
    form = merged(FAMILIES[name].rows)
    prompt_ids, _, ids = written(name, **answer_of(THOUGHT, "", [ARGUMENTS[0]]))
    whole = "".join(texts_of(session_of(name), ids)).rstrip()
    assert whole.endswith(form.calls_end)
    choices = []
    for finish in ("stop", "length"):
        choices.append(begun(name, prompt_ids))
        add_all(choices[-1], iter([whole.removesuffix(form.calls_end)]), finish=finish)
    assert [len(choice.calls) for choice in choices] == [1, 0]


@pytest.mark.parametrize(("options", "end"), [({}, "assistant"), ({"force_reasoning": True}, "assistant/think\n")])
def test_header_of_a_turn_begins_a_thought_or_leaves_it_to_the_model(options: dict[str, Any], end: str) -> None:
    prompt = ChatPrompt(tokenizer_of("hyperclova x"), [QUESTION], options)
    assert prompt.text.endswith(f"<|im_start|>{end}")
    choice = begun("hyperclova x", prompt.encode())
    begin = "" if options else "/think\n"
    add_all(choice, iter(f"{begin}{THOUGHT}<|im_end|>\n<|im_start|>assistant\n{TEXT}<|im_end|>"), range(9))
    assert (choice.thought, choice.text) == (THOUGHT, TEXT)


def test_line_break_after_the_header_is_not_part_of_the_answer() -> None:
    choice = begun("hyperclova x")
    add_all(choice, iter(f"\n{TEXT}<|im_end|>"))
    assert (choice.thought, choice.text) == ("", TEXT)


# --- ends of turns, and the tokens that are shown


@pytest.mark.parametrize("name", FAMILIES)
def test_turn_ends_at_the_templates_token_without_a_generation_config(name: str) -> None:
    tokenizer, token = tokenizer_of(name), turn_end_of(name)
    assert tokenizer.eos_token_id is None
    token_id = tokenizer.convert_tokens_to_ids(token)
    assert token_id in turn_end_ids(tokenizer)
    form = merged(FAMILIES[name].rows)
    stops = set(tokenizer.convert_ids_to_tokens(turn_end_ids(tokenizer)))
    assert stops.isdisjoint({*form.thinks, *form.thought_ends, *form.calls, form.calls_end})
    session = session_of(name)
    assert session.ending(9).crop([], [5, token_id, 6]) == ([5, token_id], "stop")
    session.ignore_eos = True
    assert session.ending(9).crop([], [5, token_id, 6]) == ([5, token_id, 6], None)


def test_end_mark_of_calls_ends_a_turn() -> None:
    for name, tokens in (
        ("gpt-oss", ["<|call|>", "<|return|>"]),
        ("glm4.5", ["<|observation|>", "<|user|>"]),
        ("hyperclova x", ["<|endofturn|>", "<|stop|>"]),
        ("llama4", ["<|eot|>", "<|eom|>"]),
    ):
        tokenizer = tokenizer_of(name)
        assert {*tokens} == {*tokenizer.convert_ids_to_tokens(turn_end_ids(tokenizer))}


def test_marks_of_calls_are_removed_without_tools() -> None:
    _, _, ids = written("mistral-small-3.2", content=TEXT, tool_calls=called({"a": 1}))
    assert "[TOOL_CALLS]" in session_of("mistral-small-3.2").to_text(ids)
    shown = session_of("mistral-small-3.2", with_tools=False).to_text(ids)
    assert "[" not in shown and shown.startswith(TEXT)


# --- earlier answers reach the template


@pytest.mark.parametrize("name", THINKING)
def test_earlier_thoughts_are_in_the_field_that_the_template_reads(name: str) -> None:
    for field in ("reasoning_content", "reasoning", "thinking"):
        assert "Hm." in written(name, tool_calls=called(ARGUMENTS[0]), **{field: "Hm."})[1]


def test_apertus_gets_blocks_for_all_answers_if_one_has_a_thought() -> None:
    tokenizer = tokenizer_of("apertus")
    call = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": called({"a": 1})}
    messages = [QUESTION, call, {"role": "tool", "content": "3", "tool_call_id": "call_0"}]
    messages += [{"role": "assistant", "content": "It is 3."}, QUESTION]
    asked = f"<|user_start|>{QUESTION['content']}<|user_end|>"
    turn = '<|assistant_start|><|inner_prefix|>Hm.<|tools_prefix|>[{"add": {"a": 1}}]<|tools_suffix|>[3]'
    text = f"{asked}{turn}<|inner_suffix|>It is 3.<|assistant_end|>{asked}<|assistant_start|>"
    assert ChatPrompt(tokenizer, messages, {}).text == text
    plain = [QUESTION, {"role": "assistant", "content": "It is 3."}, QUESTION]
    assert ChatPrompt(tokenizer, plain, {}).text.count("It is 3.<|assistant_end|>") == 1
    choice = begun("apertus")
    add_all(choice, iter("<|inner_suffix|>It is 3."))
    assert told(choice) == ("", "It is 3.", [])


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in CALLING])
def test_earlier_calls_are_text_for_a_template_without_calls(name: str) -> None:
    _, completion, ids = written(name, content=TEXT, tool_calls=called({"a": 1}))
    wrapped = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert completion.startswith(f"{TEXT}\n{wrapped}")
    choice = begun(name)
    add_all(choice, texts_of(session_of(name), ids), ids)
    assert told(choice) == ("", TEXT, [{"a": 1}])


def test_ids_of_kimis_calls_contain_the_function_name() -> None:
    tokenizer = tokenizer_of("kimi")
    messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": called({"a": 1}, {})}]
    messages.append({"role": "tool", "content": "3", "tool_call_id": "call_1"})
    text = ChatPrompt(tokenizer, messages, {}).text
    assert "functions.add:0<" in text and "functions.add:1<" in text
