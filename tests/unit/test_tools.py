"""Calls of tools in a completion that comes in pieces."""

from __future__ import annotations

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from swiftopt.server.tools import ToolText

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
OTHER = '<tool_call>{"name": "unknown"}</tool_call>'
WHOLE = {
    f"Let me see.{CALL}": ("Let me see.", 1),
    f"{CALL}\n{CALL}": ("", 2),
    LLAMA: ("", 1),
    f"<|python_tag|>{LLAMA}": ("", 1),
    '{"a": 1} is an object': ('{"a": 1} is an object', 0),
    OTHER: (OTHER, 0),
    "a < b and <tool": ("a < b and <tool", 0),
    "": ("", 0),
}


@given(st.sampled_from(sorted(WHOLE)), st.lists(st.integers(0, 90)))
def test_text_and_calls_do_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    tools, shown = ToolText(["add"]), ""
    for start, end in itertools.pairwise(ends):
        shown += tools.add(text[start:end])
        assert WHOLE[text][0].startswith(shown)
    shown += tools.end()
    assert (shown, len(tools.calls)) == WHOLE[text]
    assert all(json.loads(call["function"]["arguments"]) == {"a": 1} for call in tools.calls)
    assert len({call["id"] for call in tools.calls}) == len(tools.calls)
