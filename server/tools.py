"""Calls of tools, and thoughts, in what a model wrote.

Calls are `<tool_call>{…}</tool_call>` (Qwen, Hermes), or a completion that begins with a JSON object (Llama 3) or with
a list of such (Mistral, Phi-4), behind a tag of theirs where the tokenizer shows it. A thought is `<think>…</think>`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.requests import THINK, THOUGHT

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGS = ("<|python_tag|>", "[TOOL_CALLS]", "<|tool_call|>", "functools")  # Llama's, Mistral's, and Phi-4's two
LAST_TAG = "<|/tool_call|>"  # behind Phi-4's
_BLOCK = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)
_CUT_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(.*)', re.DOTALL)
_JSON = json.JSONDecoder()


class ToolText:
    """Splits a completion that grows into text for the reader and calls of tools.

    `is_forced`: it can be nothing but a call; then what is cut in its middle is a call as well, as far as it goes.
    Behind the last of `most_calls` (None: any number) nothing counts.
    """

    def __init__(self, names: Sequence[str], is_forced: bool = False, most_calls: int | None = None) -> None:
        self._names, self._is_forced, self._most_calls = names, is_forced, most_calls
        self._held = ""
        self._after_call = self._has_text = False
        self.calls: list[dict[str, Any]] = []
        self.is_cut = False

    def add(self, text: str) -> str:
        """Take more of the completion in; return what can be shown: no call begins in it."""
        if self._is_full():
            return ""
        self._held += text
        shown = ""
        while not self._is_full() and (block := _BLOCK.search(self._held)) is not None and self._take(block[1]):
            before = self._held[: block.start()]
            shown += before.lstrip("\n") if self._after_call else before
            self._held, self._after_call = self._held[block.end() :], True
        is_open = self._may_be_calls("}" in text or "]" in text)
        if self._is_full():
            self._held = ""
        if is_open:
            return shown
        if self._after_call:  # line breaks between calls are nobody's text
            self._held = self._held.lstrip("\n").removeprefix(LAST_TAG)
            if LAST_TAG.startswith(self._held):
                return shown
            self._after_call = False
        cut = _begun(self._held, OPEN)
        shown, self._held = shown + self._held[:cut], self._held[cut:]
        self._has_text = self._has_text or bool(shown.strip())
        return shown

    def end(self) -> str:
        """Take the end in; return the rest that is no call."""
        rest, self._held = self._held, ""
        if not self._is_forced or self.calls:
            return rest
        self.is_cut = True
        if (cut := _CUT_CALL.match(rest)) is not None:
            self._add(json.loads(cut[1]), cut[2])
        return ""

    def _is_full(self) -> bool:
        return self._most_calls is not None and len(self.calls) >= self._most_calls

    def _may_be_calls(self, is_closed: bool) -> bool:
        """Take the calls that the completion begins with; True where they are not complete yet.

        `is_closed` says that a bracket was closed since this was asked last.
        """
        start = self._held.lstrip()
        if self._has_text or self.calls or not start:
            return False
        tag = next((tag for tag in TAGS if start.startswith(tag)), "")
        if not tag and any(tag.startswith(start) for tag in TAGS):
            return True
        body = start.removeprefix(tag).lstrip()
        within = body[1:].lstrip()
        if not body:
            return True
        if body[0] not in "[{" or (body[0] == "[" and within and within[0] != "{"):
            return False
        if not is_closed:
            return True
        try:
            found, end = _JSON.raw_decode(body)
        except json.JSONDecodeError:
            return True
        if self._take_all(found if isinstance(found, list) else [found]):
            self._held, self._after_call = body[end:], True
        return False

    def _take(self, text: str) -> bool:
        """Add the call that the text is; False where it is none of a known tool."""
        try:
            return self._take_all([json.loads(text)])
        except json.JSONDecodeError:
            return False

    def _take_all(self, found: Sequence[Any]) -> bool:
        """Add the calls; False, and none of them, where one is none of a known tool."""
        if not all(isinstance(each, Mapping) and each.get("name") in self._names for each in found):
            return False
        for each in found:
            arguments = each.get("arguments", each.get("parameters", {}))
            self._add(
                each["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            )
        return bool(found)

    def _add(self, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        if not self._is_full():
            self.calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})


class ThoughtText:
    """Splits a completion that grows into the thought that it begins with, if it does, and what it says then.

    `is_open`: the prompt has begun the thought. Line breaks beside the tags are nobody's text.
    """

    def __init__(self, is_open: bool) -> None:
        self.is_open, self._is_undecided = is_open, not is_open
        self.has_begun = is_open
        self._held, self._strips = "", True

    def add(self, text: str) -> tuple[str, str]:
        """Take more of the completion in; return more of the thought, and of what is said."""
        self._held += text
        if self._is_undecided:
            start = self._held.lstrip()
            if start != THINK and THINK.startswith(start):
                return "", ""
            self._is_undecided, self.is_open = False, start.startswith(THINK)
            self._strips = self.has_begun = self.is_open
            self._held = start.removeprefix(THINK) if self.is_open else self._held
        self._strip()
        if not self.is_open:
            said, self._held = self._held, ""
            return "", said
        cut = _begun(self._held, THOUGHT)
        thought = self._held[:cut].rstrip("\n")
        if not self._held[cut:].startswith(THOUGHT):
            self._held = self._held[len(thought) :]
            return thought, ""
        self.is_open, self._strips = False, True
        self._held = self._held[cut + len(THOUGHT) :]
        self._strip()
        said, self._held = self._held, ""
        return thought, said

    def end(self) -> tuple[str, str]:
        """Take the end in; return the rest of both."""
        rest, self._held = self._held, ""
        return (rest, "") if self.is_open else ("", rest)

    def _strip(self) -> None:
        if self._strips:
            self._held = self._held.lstrip("\n")
            self._strips = not self._held


def _begun(text: str, mark: str) -> int:
    """Return where `mark`, or a beginning of it at the end, starts in the text; its length if nowhere."""
    if (at := text.find(mark)) >= 0:
        return at
    return next(
        (len(text) - n for n in range(min(len(mark), len(text)), 0, -1) if mark.startswith(text[-n:])), len(text)
    )
