"""Calls and thoughts in completions that arrive in pieces, and the text of single tokens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from swiftopt.core.requests import Piece
from swiftopt.server.answer_parsers import ThoughtParser, ToolParser
from swiftopt.worker.served_tokens import Tokens

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
MISTRAL = '[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 1}}]'
OTHER = '<tool_call>{"name": "unknown"}</tool_call>'
CODER = """{
  "name": "add",
  "arguments": {
    "a": 1
  }
}"""
WHOLE = {
    f"Let me see.{CALL}": ("Let me see.", 1),
    f"{CALL}\n{CALL}": ("", 2),
    LLAMA: ("", 1),
    f"<|python_tag|>{LLAMA}": ("", 1),
    f"Here: {LLAMA}": (f"Here: {LLAMA}", 0),
    f"{LLAMA} is it": (" is it", 1),
    f"```json\n{LLAMA}\n```": ("", 1),
    f"```\n{MISTRAL}\n```\n": ("", 2),
    f"I call it:\n```json\n{CODER}\n```\nDone.": ("I call it:\nDone.", 1),
    f"```json\n{CODER}\n```\n\n```json\n{LLAMA}\n```": ("", 2),
    f"```json\n{LLAMA}```python\nadd(1)\n```": ("python\nadd(1)\n```", 1),
    f"```json\n{LLAMA}\n```{CALL}": ("", 2),
    f"{OTHER}{CALL}": (OTHER, 1),
    '```json\n{"name": "adder"}\n```': ('```json\n{"name": "adder"}\n```', 0),
    "```python\nadd(1)\n```\nor `add` ``": ("```python\nadd(1)\n```\nor `add` ``", 0),
    "```json\n[1, 2]\n```": ("```json\n[1, 2]\n```", 0),
    '```json\n{"a": "```"': ('```json\n{"a": "```"', 0),
    MISTRAL: ("", 2),
    f"[TOOL_CALLS] {MISTRAL}": ("", 2),
    f"functools{MISTRAL}": ("", 2),
    f"<|tool_call|>{MISTRAL}<|/tool_call|>": ("", 2),
    "[1] and [2]": ("[1] and [2]", 0),
    '[{"a": 1}]': ('[{"a": 1}]', 0),
    '[{"name": "add"}, 3]': ('[{"name": "add"}, 3]', 0),
    "functional": ("functional", 0),
    '{"a": 1} is an object': ('{"a": 1} is an object', 0),
    OTHER: (OTHER, 0),
    "a < b and <tool": ("a < b and <tool", 0),
    "": ("", 0),
}


def pieces_of(text: str, cuts: Sequence[int]) -> Iterator[str]:
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return (text[start:end] for start, end in itertools.pairwise(ends))


@given(st.lists(st.integers(0, 200)))
def test_behind_the_only_call_that_is_wanted_nothing_counts(cuts: list[int]) -> None:
    tools = ToolParser({"add": None}, most_calls=1)
    shown = "".join(map(tools.add, pieces_of(f"One.{CALL}\nTwo.{CALL} Three.", cuts))) + tools.end()
    assert (shown, len(tools.calls)) == ("One.", 1)
    both = ToolParser({"add": None}, most_calls=1)
    one = '{"name": "add", "arguments": {"a": 1}}'
    assert "".join(map(both.add, pieces_of(f"[TOOL_CALLS] [{one}, {one}] Two.", cuts))) + both.end() == ""
    assert len(both.calls) == 1


@given(st.sampled_from(sorted(WHOLE)), st.lists(st.integers(0, 90)))
def test_text_and_calls_do_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    tools, shown = ToolParser({"add": None}), ""
    for piece in pieces_of(text, cuts):
        shown += tools.add(piece)
        assert WHOLE[text][0].startswith(shown)
    shown += tools.end()
    assert (shown, len(tools.calls)) == WHOLE[text]
    assert all(json.loads(call["function"]["arguments"]) == {"a": 1} for call in tools.calls) and not tools.is_cut
    assert len({call["id"] for call in tools.calls}) == len(tools.calls)


@pytest.mark.parametrize("text", [CALL, LLAMA, MISTRAL, f"```json\n{CODER}"])
def test_call_is_known_as_soon_as_it_is_complete(text: str) -> None:
    tools = ToolParser({"add": None})
    assert tools.add(text[:-1]) == "" and not tools.calls
    assert tools.add(text[-1]) == "" and tools.calls


def test_block_of_code_is_shown_as_soon_as_it_can_be_no_call() -> None:
    tools = ToolParser({"add": None})
    assert tools.add("See:\n```") == "See:\n" and tools.add("python") == "```python"
    assert tools.add("\n```js") == "\n" and tools.add('on\n{"na') == ""
    assert tools.add('me": "sub') == '```json\n{"name": "sub'


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (r'{"a": "\ud83d"}', r'{"a": "\ud83d"}'),
        ('{"a": "```</tool_call>é"}', '{"a": "```</tool_call>é"}'),
        ('{"a": -1e999}', '{"a": -1.7976931348623157e+308}'),
        ('{"a": NaN}', None),
        ('{"a": ' + "[" * 100_000, None),
    ],
    ids=["half of a character", "marks", "beyond floats", "no number", "deep"],
)
def test_arguments_are_json_that_can_be_sent(written: str, told: str | None) -> None:
    for begin, end in (("<tool_call>", "</tool_call>"), ("", ""), ("```json\n", "\n```")):
        tools, text = ToolParser({"add": None}), f'{begin}{{"name": "add", "arguments": {written}}}{end}'
        shown = tools.add(text) + tools.end()
        assert [call["function"]["arguments"] for call in tools.calls] == ([] if told is None else [told])
        assert shown == (text if told is None else "") and json.dumps(tools.calls, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "add", "arguments": {"a": 1', '{"a": 1'),
        ('{"name": "add", "arguments":', ""),
        ('{"name": "ad', None),
        ('{"name": "a\\d", "arguments": {"a": 1', None),
    ],
)
def test_forced_call_that_is_cut_is_a_call_as_far_as_it_goes(text: str, arguments: str | None) -> None:
    tools = ToolParser({"add": None}, is_forced=True)
    assert tools.add(text) + tools.end() == "" and tools.is_cut
    told = [(call["function"]["name"], call["function"]["arguments"]) for call in tools.calls]
    assert told == ([] if arguments is None else [("add", arguments)])
    free = ToolParser({"add": None})
    assert free.add(text) + free.end() == text and not free.calls


THOUGHTS = {
    (False, "<think>\nOne\n\ntwo\n</think>\n\nSo: 3\n"): ("One\n\ntwo", "So: 3\n"),
    (False, "\n<think>\n\n</think>\n\n3"): ("", "3"),
    (True, "One</think>3 </think>"): ("One", "3 </think>"),
    (True, "\nOne\n"): ("One\n", ""),
    (False, "<think>One </thi"): ("One </thi", ""),
    (False, "\n3 <think> 4"): ("", "\n3 <think> 4"),
    (False, "<thin"): ("", "<thin"),
    (False, ""): ("", ""),
}


@given(st.sampled_from(sorted(THOUGHTS)), st.lists(st.integers(0, 40)))
def test_thought_does_not_depend_on_the_pieces(case: tuple[bool, str], cuts: list[int]) -> None:
    is_open, text = case
    splitter = ThoughtParser(is_open)
    told = [*map(splitter.add, pieces_of(text, cuts)), splitter.end()]
    thoughts, said = zip(*told, strict=True)
    assert ("".join(thoughts), "".join(said)) == THOUGHTS[case]


def test_tokens_of_a_sentencepiece_vocabulary_keep_their_spaces_and_bytes() -> None:
    words: dict[str, Piece] = {"<unk>": "<unk>", "▁": " ", "▁Hi": " Hi", "<0xE2>": [0xE2], "<0x41>": "A", "o": "o"}
    backend = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokens = Tokens(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    assert [tokens.piece(i) for i in range(len(words))] == list(words.values())
    assert tokens.end_of_thought is None
