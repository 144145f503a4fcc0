"""Parsers of a growing completion: its thoughts, its answer and its tool calls.

They parse the `AnswerForm` of the model's chat template, and for any model:
`<tool_call>{…}</tool_call>`, calls at the start of a code block (as Qwen2.5-Coder writes them), and a completion that
begins with a JSON object or a list of them, also after one of `TAGS`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..core.answer_forms import FORMS, NAME, NO_FORM, AnswerForm
from ..core.requests import settled_length
from .call_readers import READERS, Call, Incomplete, Schemas, calls_of, decoded

# Tags that begin tool calls: Llama's, Mistral's, and the two of Phi-4, which end with LAST_TAG.
TAGS = ("<|python_tag|>", "[TOOL_CALLS]", "<|tool_call|>", "functools")
LAST_TAG = "<|/tool_call|>"
_CUT_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(.*)', re.DOTALL)
FENCE = "```"
_FENCE_BEGIN = rf"{FENCE}(?:json)?\s*(?=[{{\[])"
_FENCED = AnswerForm()  # An object or a list in a block of code.
ANY_MODELS_CALL = FORMS["tool_call"]
# Incomplete text at the end that may become a fenced tool call.
_OPEN_FENCE = re.compile(rf"`{{1,2}}$|{FENCE}(?:j|js|jso|json)?$|{FENCE}(?:json)?(\s+$|\s*[{{\[])")
_BLANKS = re.compile(r"\s+")
_CLOSINGS = ("}", "]", ">", ")")  # The last characters of calls and of their marks.


class ToolParser:
    """Splits a growing completion into visible text and tool calls.

    `tools` are the schemas of arguments by name. `is_forced`: the completion must be a call; then an incomplete call at
    the end counts, too. Text after the last of `most_calls` (None: any number) is dropped.
    """

    def __init__(
        self, tools: Schemas, is_forced: bool = False, most_calls: int | None = None, form: AnswerForm = NO_FORM
    ) -> None:
        self._tools, self._is_forced, self._most_calls = tools, is_forced, most_calls
        self._forms = _forms_by_mark((form, ANY_MODELS_CALL), tools)
        marks = sorted(self._forms, key=len, reverse=True)
        self._begin = re.compile(rf"(?P<mark>{'|'.join(map(re.escape, marks))})|{_FENCE_BEGIN}")
        self._pending_text = ""
        self._after_call = self._has_text = False
        self._end_mark = ""  # Closing tag or fence that may follow the latest call.
        self.calls: list[dict[str, Any]] = []
        self.is_cut = False

    def add(self, text: str) -> str:
        """Add a part of the completion; return the text that cannot belong to a tool call."""
        if self._is_full():
            return ""
        self._pending_text += text
        if self._may_be_calls("}" in text or "]" in text):
            return ""
        visible = self._take_blocks() if any(closing in text for closing in _CLOSINGS) else ""
        if self._is_full():
            self._pending_text = ""
        self._drop_end()
        if self._after_call:
            if self._end_mark.startswith(self._pending_text):
                return visible
            self._after_call = False
        n_visible = min(settled_length(self._pending_text, list(self._forms)), self._open_fence())
        visible, self._pending_text = visible + self._pending_text[:n_visible], self._pending_text[n_visible:]
        self._has_text = self._has_text or bool(visible.strip())
        return visible

    def end(self, is_cut: bool = False) -> str:
        """End the completion; return the remaining text that is not a tool call.

        `is_cut`: the completion was truncated. Otherwise a call may lack its closing marker, because some models end
        their turn instead, and because a marker that is a stop token is not part of the text.
        """
        visible = "" if is_cut or self._is_full() else self._take_blocks(is_last=True)
        rest, self._pending_text = visible + self._pending_text, ""
        if not self._is_forced or self.calls:
            return rest
        self.is_cut = True
        if (cut_call := _CUT_CALL.match(rest)) is not None:
            with suppress(ValueError):  # A lossy method may write a name that is not JSON.
                self._add(json.loads(cut_call[1]), cut_call[2])
        return ""

    def _drop_end(self) -> None:
        """Drop the closing mark of the latest call, and the line breaks after it."""
        if self._after_call:
            self._pending_text = self._pending_text.lstrip("\n")
            if self._end_mark and self._pending_text.startswith(self._end_mark):
                self._pending_text, self._end_mark = self._pending_text.removeprefix(self._end_mark).lstrip("\n"), ""

    def _is_full(self) -> bool:
        return self._most_calls is not None and len(self.calls) >= self._most_calls

    def _may_be_calls(self, is_closed: bool) -> bool:
        """Parse the calls at the beginning of the completion; return whether they are still incomplete.

        `is_closed`: a bracket was closed since the last call.
        """
        start = self._pending_text.lstrip()
        if self._has_text or self.calls or not start:
            return False
        tag = next((tag for tag in TAGS if start.startswith(tag)), "")
        if not tag and any(tag.startswith(start) for tag in TAGS):
            return True
        body = start.removeprefix(tag).lstrip()
        after_bracket = body[1:].lstrip()
        if not body:
            return True
        if body[0] not in "[{" or (body[0] == "[" and after_bracket and after_bracket[0] != "{"):
            return False
        if not is_closed:
            return True
        try:
            value, end = decoded(body, 0)
            calls = calls_of(value)
        except Incomplete:
            return True
        except (ValueError, RecursionError):
            return False
        if self._take_all(calls):
            self._pending_text, self._after_call, self._end_mark = body[end:], True, LAST_TAG
        return False

    def _take_blocks(self, is_last: bool = False) -> str:
        """Take all complete calls between marks or in blocks of code; return the text before and between them."""
        visible = ""
        self._drop_end()
        while not self._is_full() and (preceding_text := self._take_block(is_last)) is not None:
            visible, self._after_call = visible + preceding_text, True
            self._drop_end()
        return visible

    def _take_block(self, is_last: bool) -> str | None:
        """Take the first complete call; return the text before it, None without a call."""
        for opening in self._begin.finditer(self._pending_text):
            mark = opening["mark"]
            for form in (_FENCED,) if mark is None else self._forms[mark]:
                # A mark with a tool's name is part of the body, which may then do without the closing mark.
                is_named = mark is not None and mark not in form.calls
                needs_end = not is_named and not is_last
                if needs_end and self._pending_text.find(form.calls_end, opening.end()) < 0:
                    return None
                start = opening.start() if is_named else opening.end()
                try:
                    calls, end = READERS[form.body](self._pending_text, start, form, self._tools)
                except Incomplete:
                    return None  # What looks like a call within a body is a text in its arguments.
                except (ValueError, RecursionError):
                    continue
                rest_at, is_open = self._after_mark(end, form.calls_end, is_last)
                if is_open and needs_end:
                    return None
                if rest_at is None and is_named and not is_last:
                    rest_at = end
                if rest_at is None or not self._take_all(calls):
                    continue
                preceding_text = self._pending_text[: opening.start()]
                self._end_mark = FENCE if mark is None else ""
                self._pending_text = self._pending_text[rest_at:]
                return preceding_text
        return None

    def _after_mark(self, end: int, closing: str, is_last: bool) -> tuple[int | None, bool]:
        """Return the position after a body's closing marker, and whether the marker may still come.

        The position is None without the marker; at the end of a completion a part of it is enough.
        """
        rest = self._pending_text[end:].lstrip()
        if not closing or rest.startswith(closing):
            return (len(self._pending_text) - len(rest) + len(closing) if closing else end), False
        is_open = closing.startswith(rest)
        return (len(self._pending_text) if is_open and is_last else None), is_open

    def _open_fence(self) -> int:
        """Return the start of a code block that may become a call; without one, the length of the held text."""
        names = [_BLANKS.sub("", json.dumps(name, ensure_ascii=False)) for name in self._tools]
        heads = [f'{bracket}{{"name":{name}' for name in names for bracket in ("", "[")]
        for fence in _OPEN_FENCE.finditer(self._pending_text):
            body = _BLANKS.sub("", self._pending_text[fence.start() :].lstrip("`").removeprefix("json"))
            if fence.end() == len(self._pending_text) or any(
                body.startswith(head) or head.startswith(body) for head in heads
            ):
                return fence.start()
        return len(self._pending_text)

    def _take_all(self, calls: Sequence[Call]) -> bool:
        """Add the calls; add none and return False if one of them names an unknown tool."""
        if not all(isinstance(name, str) and name in self._tools for name, _ in calls):
            return False
        for name, arguments in calls:
            self._add(name, arguments if isinstance(arguments, str) else _arguments_json(arguments))
        return bool(calls)

    def _add(self, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        if not self._is_full():
            self.calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})


def _forms_by_mark(forms: Sequence[AnswerForm], tools: Schemas) -> Mapping[str, list[AnswerForm]]:
    """Return by opening marker the forms whose calls it may begin; a marker with a name occurs once per tool."""
    forms_by_mark: dict[str, list[AnswerForm]] = {}
    for form in forms:
        for mark in form.calls:
            for written in dict.fromkeys(mark.replace(NAME, name) for name in tools):
                forms_by_mark.setdefault(written, []).append(form)
    return forms_by_mark


def _arguments_json(arguments: Any) -> str:
    """Return arguments as JSON; lone surrogates, which UTF-8 cannot encode, are escaped."""
    text = json.dumps(arguments, ensure_ascii=False)
    return json.dumps(arguments) if re.search("[\ud800-\udfff]", text) else text


class ThoughtParser:
    """Splits a growing completion into its thoughts and the answer, both without the form's markers.

    A completion begins with its thought; if the form `rethinks`, further thoughts may follow other text. With
    `calls_in_thoughts`, a call ends the thought, and its marker belongs to the answer. `is_open`: the prompt has begun
    the thought. Line breaks next to markers are dropped.
    """

    def __init__(self, is_open: bool, form: AnswerForm = FORMS["think"]) -> None:
        self.is_open, self._is_undecided = is_open, not is_open
        self.has_begun = is_open
        self._form = form
        self._pending_text, self._strips = "", True

    def add(self, text: str) -> tuple[str, str]:
        """Add a part of the completion; return its share of the thought and of the answer."""
        self._pending_text += text
        if self._is_undecided and not self._decide():
            return "", ""
        thought = answer = ""
        for is_thought, part in self._parts():
            thought, answer = (thought + part, answer) if is_thought else (thought, answer + part)
        return thought, answer

    def end(self) -> tuple[str, str]:
        """End the completion; return the rest of the thought and of the answer."""
        rest, self._pending_text = self._pending_text, ""
        if self._is_undecided and rest.lstrip() in self._form.thinks:  # A longer mark might have followed.
            self.is_open, self.has_begun, rest = True, True, ""
        return (rest, "") if self.is_open else ("", rest)

    def _decide(self) -> bool:
        """Determine whether the completion begins with a thought; return whether that is known yet."""
        start, marks = self._pending_text.lstrip(), self._form.thinks
        if any(mark != start and mark.startswith(start) for mark in marks):
            return False
        mark = max((mark for mark in marks if start.startswith(mark)), key=len, default=None)
        self._is_undecided, self.is_open = False, mark is not None
        self.has_begun = self.is_open
        self._strips = self.is_open or bool(self._form.hidden)  # The prompt may end with the mark of an answer.
        self._pending_text = self._pending_text if mark is None else start.removeprefix(mark)
        return True

    def _parts(self) -> Iterator[tuple[bool, str]]:
        """Yield parts, each with whether it belongs to a thought; stop at what may be the start of a marker."""
        form = self._form
        while True:
            self._strip()
            begins = () if self.is_open or not form.rethinks else form.thinks
            calls = form.calls if form.calls_in_thoughts else ()
            marks = (*form.thought_ends, *calls) if self.is_open else (*begins, *form.hidden)
            n_settled = settled_length(self._pending_text, marks)
            part = self._pending_text[:n_settled]
            rest = self._pending_text[n_settled:]
            mark = max((mark for mark in marks if rest.startswith(mark)), key=len, default=None)
            # A longer mark may begin with this one.
            if mark is None or any(longer != mark and longer.startswith(rest) for longer in marks):
                part = part.rstrip("\n") if marks else part
                self._pending_text = self._pending_text[len(part) :]
                yield self.is_open, part
                return
            yield self.is_open, part.rstrip("\n") if self.is_open or mark in form.hidden else part
            self._pending_text = rest if self.is_open and mark in calls else rest.removeprefix(mark)
            self.is_open, self._strips = mark in begins, True
            self.has_begun = self.has_begun or self.is_open

    def _strip(self) -> None:
        if self._strips:
            self._pending_text = self._pending_text.lstrip("\n")
            self._strips = not self._pending_text
