"""A growing completion: its text, thought and tool calls, its tokens' names and offsets, and statistics.

Calls are `<tool_call>{…}</tool_call>` (Qwen, Hermes), what a block of code begins with (Qwen-Coder), or a completion
that begins with a JSON object (Llama 3) or with a list of them (Mistral, Phi-4), after the family's tag where the
tokenizer shows it. A thought is `<think>…</think>`.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
import time
from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ..core.messages import AnswerDone, AnswerText, PieceLogprob, PromptRead
from ..core.requests import CALL_BEGINS, CALL_ENDS, THINK, THOUGHT, Piece, settled_length
from ..core.types import Completion
from .engines import Reply

# Tags that begin tool calls: Llama's, Mistral's, and the two of Phi-4, which end with LAST_TAG.
TAGS = ("<|python_tag|>", "[TOOL_CALLS]", "<|tool_call|>", "functools")
LAST_TAG = "<|/tool_call|>"
_CUT_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(.*)', re.DOTALL)
FENCE = "```"
_BEGIN = re.compile(rf"(?P<tag>{CALL_BEGINS}\s*)|{FENCE}(?:json)?\s*(?=[{{\[])")
_TAG_END = re.compile(rf"\s*{CALL_ENDS}")
# Incomplete text at the end that may become a fenced tool call.
_OPEN_FENCE = re.compile(rf"`{{1,2}}$|{FENCE}(?:j|js|jso|json)?$|{FENCE}(?:json)?(\s+$|\s*[{{\[])")
_BLANKS = re.compile(r"\s+")


def _finite(number: str) -> float:
    """Read a number; return the largest float for greater ones, because JSON has no infinity."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(number)))


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)


class ToolParser:
    """Splits a growing completion into visible text and tool calls.

    `is_forced`: the completion must be a call; then an incomplete call at the end counts, too. Text after the last of
    `most_calls` (None: any number) is dropped.
    """

    def __init__(self, names: Sequence[str], is_forced: bool = False, most_calls: int | None = None) -> None:
        self._names, self._is_forced, self._most_calls = names, is_forced, most_calls
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
        visible = ""
        is_closed = "}" in text or "]" in text
        self._drop_end()
        while not self._is_full() and (preceding_text := self._take_block(is_closed or ">" in text)) is not None:
            visible, self._after_call = visible + preceding_text, True
            self._drop_end()
        is_open = self._may_be_calls(is_closed)
        if self._is_full():
            self._pending_text = ""
        if is_open:
            return visible
        self._drop_end()
        if self._after_call:
            if self._end_mark.startswith(self._pending_text):
                return visible
            self._after_call = False
        n_visible = min(settled_length(self._pending_text, [CALL_BEGINS]), self._open_fence())
        visible, self._pending_text = visible + self._pending_text[:n_visible], self._pending_text[n_visible:]
        self._has_text = self._has_text or bool(visible.strip())
        return visible

    def end(self) -> str:
        """End the completion; return the remaining text that is no tool call."""
        rest, self._pending_text = self._pending_text, ""
        if not self._is_forced or self.calls:
            return rest
        self.is_cut = True
        if (cut_call := _CUT_CALL.match(rest)) is not None:
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
            calls, end = _JSON.raw_decode(body)
        except (ValueError, RecursionError):
            return True
        if self._take_all(calls):
            self._pending_text, self._after_call, self._end_mark = body[end:], True, LAST_TAG
        return False

    def _take_block(self, is_closed: bool) -> str | None:
        """Parse the first call between tags or in a code block; return the text before it, None without a call."""
        for opening in _BEGIN.finditer(self._pending_text) if is_closed else ():
            try:
                calls, end = _JSON.raw_decode(self._pending_text, opening.end())
            except (ValueError, RecursionError):
                continue
            tag_end = _TAG_END.match(self._pending_text, end)
            if (tag_end is None and opening["tag"]) or not self._take_all(calls):
                continue
            preceding_text = self._pending_text[: opening.start()]
            self._end_mark = "" if opening["tag"] else FENCE
            self._pending_text = self._pending_text[tag_end.end() if opening["tag"] and tag_end is not None else end :]
            return preceding_text
        return None

    def _open_fence(self) -> int:
        """Return the start of a code block that may become a call; without one, the length of the held text."""
        names = [_BLANKS.sub("", json.dumps(name, ensure_ascii=False)) for name in self._names]
        heads = [f'{bracket}{{"name":{name}' for name in names for bracket in ("", "[")]
        for fence in _OPEN_FENCE.finditer(self._pending_text):
            body = _BLANKS.sub("", self._pending_text[fence.start() :].lstrip("`").removeprefix("json"))
            if fence.end() == len(self._pending_text) or any(
                body.startswith(head) or head.startswith(body) for head in heads
            ):
                return fence.start()
        return len(self._pending_text)

    def _take_all(self, calls: Any) -> bool:
        """Add a call or a list of calls; add none and return False if one of them names an unknown tool."""
        calls = calls if isinstance(calls, list) else [calls]
        if not all(isinstance(call, Mapping) and call.get("name") in self._names for call in calls):
            return False
        for call in calls:
            arguments = call.get("arguments", call.get("parameters", {}))
            self._add(call["name"], arguments if isinstance(arguments, str) else _arguments_json(arguments))
        return bool(calls)

    def _add(self, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        if not self._is_full():
            self.calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})


def _arguments_json(arguments: Any) -> str:
    """Return arguments as JSON; lone surrogates, which UTF-8 cannot encode, are escaped."""
    text = json.dumps(arguments, ensure_ascii=False)
    return json.dumps(arguments) if re.search("[\ud800-\udfff]", text) else text


class ThoughtParser:
    """Splits a growing completion into the thought that it may begin with, and the answer.

    `is_open`: the prompt has begun the thought. Line breaks next to the tags are dropped.
    """

    def __init__(self, is_open: bool) -> None:
        self.is_open, self._is_undecided = is_open, not is_open
        self.has_begun = is_open
        self._pending_text, self._strips = "", True

    def add(self, text: str) -> tuple[str, str]:
        """Add a part of the completion; return its share of the thought and of the answer."""
        self._pending_text += text
        if self._is_undecided:
            start = self._pending_text.lstrip()
            if start != THINK and THINK.startswith(start):
                return "", ""
            self._is_undecided, self.is_open = False, start.startswith(THINK)
            self._strips = self.has_begun = self.is_open
            self._pending_text = start.removeprefix(THINK) if self.is_open else self._pending_text
        thought = ""
        if self.is_open:
            self._strip()
            thought_end = settled_length(self._pending_text, [THOUGHT])
            thought = self._pending_text[:thought_end].rstrip("\n")
            if not self._pending_text.startswith(THOUGHT, thought_end):
                self._pending_text = self._pending_text[len(thought) :]
                return thought, ""
            self._pending_text = self._pending_text[thought_end + len(THOUGHT) :]
            self.is_open, self._strips = False, True
        self._strip()
        answer, self._pending_text = self._pending_text, ""
        return thought, answer

    def end(self) -> tuple[str, str]:
        """End the completion; return the rest of the thought and of the answer."""
        rest, self._pending_text = self._pending_text, ""
        return (rest, "") if self.is_open else ("", rest)

    def _strip(self) -> None:
        if self._strips:
            self._pending_text = self._pending_text.lstrip("\n")
            self._strips = not self._pending_text


@dataclass(slots=True)
class Choice:
    """One completion of an answer as it grows.

    It may call the tools of `names`, `most_calls` of them (None: any number), and has to call one where it `is_forced`.

    `prefix` is the prompt where it is echoed, and `first` that prompt's first token, which has no log probability,
    until it is sent. `first_text_s` is the time that its client has waited for its first text. `done` is the engine's
    last answer, with the `completion`. `n_prompt` and `n_thought` count tokens, `n_sent_thought` characters. `splitter`
    is there for a model that may think first, and `end_of_thought` is the token that ends that.

    `logprobs` belong to tokens whose text was not sent yet. For token offsets, `n_characters` counts the characters so
    far, and `half` holds the bytes of an incomplete character.
    """

    index: int
    reply: Reply
    names: Sequence[str] = ()
    is_forced: bool = False
    most_calls: int | None = None
    prefix: str = ""
    first: Piece | None = None
    text: str = ""
    n_tokens: int = 0
    first_text_s: float = 0.0
    done: AnswerDone | None = None
    completion: Completion = field(default_factory=lambda: Completion((), "", "length", ""))
    n_prompt: int = 0
    n_sent_calls: int = 0
    thought: str = ""
    n_sent_thought: int = 0
    n_thought: int = 0
    tools: ToolParser | None = field(init=False)
    splitter: ThoughtParser | None = None
    end_of_thought: int = -1
    prompt_logprobs: list[PieceLogprob] = field(default_factory=list)
    logprobs: list[PieceLogprob] = field(default_factory=list)
    n_characters: int = 0
    half: bytes = b""

    def __post_init__(self) -> None:
        self.tools = ToolParser(self.names, self.is_forced, self.most_calls) if self.names else None

    def fresh_copy(self) -> Choice:
        """Return a fresh copy of the choice, for a new engine process that decodes it again."""
        return Choice(self.index, self.reply, self.names, self.is_forced, self.most_calls)

    def begin(self, read: PromptRead, may_think: bool) -> None:
        """Store the engine's data about the prompt."""
        self.n_prompt, self.prefix, self.first = read.n_tokens, read.text, read.first
        if may_think and read.end_of_thought is not None:
            self.end_of_thought, self.splitter = read.end_of_thought, ThoughtParser(read.in_thought)

    @property
    def waited_s(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self.reply.sent_at

    def add(self, answer: AnswerText | AnswerDone) -> str:
        """Add a part of the text, or the end; return the text to show."""
        if not self.n_tokens:  # For a completion without text, the end counts as the first text.
            self.first_text_s = self.waited_s
        match answer:
            case AnswerText():
                self.n_tokens += answer.n_tokens
                if self.first is not None and answer.prompt_logprobs is not None:
                    self.prompt_logprobs = [(self.first, None, ()), *answer.prompt_logprobs]
                    self.first = None
                self.logprobs += answer.logprobs
                text = self._split(answer.text)
            case AnswerDone():
                self.done, self.completion = answer, answer.completion
                self.n_tokens = self.completion.n_tokens
                text = self._rest()
        self.text += text
        return text

    def _split(self, text: str) -> str:
        """Return the part of a text that is neither thought nor tool call."""
        if self.splitter is not None:
            thought, text = self.splitter.add(text)
            self.thought += thought
            self.n_thought = self.n_tokens if self.splitter.is_open else self.n_thought
        return text if self.tools is None else self.tools.add(text)

    def _rest(self) -> str:
        """Return the rest of the text to show; count the tokens of the thought."""
        rest = ""
        if self.splitter is not None:
            thought, rest = self.splitter.end()
            self.thought += thought
            token_ids, end = self.completion.token_ids, self.end_of_thought
            if self.splitter.has_begun:
                self.n_thought = token_ids.index(end) + 1 if end in token_ids else len(token_ids)
        return rest if self.tools is None else self.tools.add(rest) + self.tools.end()

    def offset(self, piece: Piece, text: str) -> int:
        """Return the next token's offset in the whole text; a token that is not part of the text has width 0."""
        offset = self.n_characters
        if isinstance(piece, list):
            match_text, n_read = utf_8_decode(self.half + bytes(piece), "replace", False)
            self.n_characters, self.half = offset + len(match_text), (self.half + bytes(piece))[n_read:]
            return offset
        # An incomplete character was followed by other text: it is shown as a replacement character.
        if self.half:
            offset, self.half = offset + 1, b""
        candidates = (piece, f" {piece}", piece.removeprefix(" "))
        match = next(
            (match_text for match_text in candidates if match_text.startswith(text[offset : offset + len(match_text)])),
            "",
        )
        self.n_characters = offset + len(match)
        return offset + (len(match) > len(piece))

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls of the choice."""
        return [] if self.tools is None else self.tools.calls

    @property
    def finish_reason(self) -> str:
        """OpenAI's finish_reason."""
        if self.calls and not (self.tools is not None and self.tools.is_cut):
            return "tool_calls"
        return "length" if self.completion.finish_reason == "length" else "stop"


def token_name_and_bytes(token: Piece) -> tuple[str, list[int]]:
    """Return a token's name and bytes; a token that is no valid text by itself is named by its bytes."""
    if isinstance(token, str):
        return token, list(token.encode())
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token), token


def logprob_by_name(alternatives: Sequence[tuple[Piece, float]]) -> dict[str, float]:
    """Return name -> alternative token; of two with the same name, the likelier one, which comes first."""
    return {token_name_and_bytes(token)[0]: logprob for token, logprob in reversed(alternatives)}


def draft_statistics(completion: Completion) -> dict[str, Any]:
    """Return a completion's draft statistics in vLLM's form; `steps` counts only rounds that drafted."""
    by_length = completion.by_draft_length
    longest = max(by_length, default=0)
    histogram = [sum(rounds[n] for rounds in by_length.values() if n < len(rounds)) for n in range(longest + 1)]
    n_steps, n_accepted = sum(histogram), sum(n * rounds for n, rounds in enumerate(histogram))
    return {
        "mean_acceptance_length": 1 + n_accepted / n_steps if n_steps else 1.0,
        "draft_acceptance_rate": completion.acceptance_rate or 0.0,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {str(n): list(rounds) for n, rounds in by_length.items()},
        "num_spec_steps": n_steps,
        "num_accepted_draft_tokens": n_accepted,
        "num_draft_tokens": completion.drafted,
        "num_spec_tokens": longest,
    }
