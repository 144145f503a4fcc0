"""Calls of tools in what a model wrote: `<tool_call>{…}</tool_call>` (Qwen, Hermes), or one JSON object (Llama 3)."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAG = "<|python_tag|>"  # in front of Llama's, where its tokenizer shows it
_BLOCK = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)


class ToolText:
    """Splits a completion that grows into text for the reader and calls of tools."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._held = ""
        self._after_call = False
        self.calls: list[dict[str, Any]] = []

    def add(self, text: str) -> str:
        """Take more of the completion in; return what can be shown: no call begins in it."""
        self._held += text
        shown = ""
        while (block := _BLOCK.search(self._held)) is not None and self._take(block[1]):
            before = self._held[: block.start()]
            shown += before.lstrip("\n") if self._after_call else before
            self._held, self._after_call = self._held[block.end() :], True
        if self._after_call:  # line breaks between calls are nobody's text
            self._held = self._held.lstrip("\n")
            self._after_call = not self._held
        if self._could_be_object():
            return shown
        cut = _begun(self._held, OPEN)
        shown, self._held = shown + self._held[:cut], self._held[cut:]
        return shown

    def end(self) -> str:
        """Take the end in; return the rest that is no call."""
        rest, self._held = self._held, ""
        return "" if self._could_be(rest) and self._take(rest.strip().removeprefix(TAG)) else rest

    def _could_be_object(self) -> bool:
        return not self.calls and self._could_be(self._held)

    @staticmethod
    def _could_be(text: str) -> bool:
        start = text.lstrip()
        return bool(start) and (start.startswith(("{", TAG)) or TAG.startswith(start))

    def _take(self, text: str) -> bool:
        """Add the call that the text is; False where it is none of a known tool."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            return False
        if not isinstance(found, Mapping) or found.get("name") not in self._names:
            return False
        arguments = found.get("arguments", found.get("parameters", {}))
        words = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {"name": found["name"], "arguments": words}
        self.calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
        return True


def _begun(text: str, mark: str) -> int:
    """Return where `mark`, or a beginning of it at the end, starts in the text; its length if nowhere."""
    if (at := text.find(mark)) >= 0:
        return at
    return next(
        (len(text) - n for n in range(min(len(mark), len(text)), 0, -1) if mark.startswith(text[-n:])), len(text)
    )
