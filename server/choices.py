"""One completion of an answer as it grows: text, thought and calls, its tokens' names and places, its statistics."""

from __future__ import annotations

import time
from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.requests import Piece
from ..core.types import Completion
from .engines import Reply
from .tools import ThoughtText, ToolText

Told = list[Any]  # a token's piece, its log probability (None: it has none), and both of its alternatives


@dataclass(slots=True)
class Choice:
    """One completion of an answer as it grows."""

    index: int
    reply: Reply
    names: Sequence[str] = ()  # of the tools that it may call
    is_forced: bool = False  # to call one
    most_calls: int | None = None  # None: any number
    prefix: str = ""  # the prompt, where it is echoed
    first: Piece | None = None  # its first token, which has no log probability, until it is told
    text: str = ""
    n_tokens: int = 0
    first_text_s: float = 0.0  # that its client has waited for its first text
    done: Mapping[str, Any] | None = None  # the engine's last event
    completion: Completion = field(default_factory=lambda: Completion((), "", "length", ""))  # what it came to, then
    n_prompt: int = 0  # tokens, once they are known
    n_told_calls: int = 0
    thought: str = ""
    n_told_thought: int = 0  # characters of it that were handed on
    n_thought: int = 0  # tokens
    tools: ToolText | None = field(init=False)
    splitter: ThoughtText | None = None  # of a model that may think first
    end_of_thought: int = -1  # the token
    prompt_logprobs: list[Told] = field(default_factory=list)  # where the prompt is echoed
    logprobs: list[Told] = field(default_factory=list)  # of the tokens whose text was not handed on yet
    n_characters: int = 0  # of the tokens that were, for their offsets
    half: bytes = b""  # of a character that the last of these have begun

    def __post_init__(self) -> None:
        self.tools = ToolText(self.names, self.is_forced, self.most_calls) if self.names else None

    def again(self) -> Choice:
        """Return the choice as it began: the engine died, and another one is asked."""
        return Choice(self.index, self.reply, self.names, self.is_forced, self.most_calls)

    def begin(self, event: Mapping[str, Any], may_think: bool) -> None:
        """Take in what the engine says of the prompt."""
        self.n_prompt, self.prefix, self.first = event["n_tokens"], event.get("text", ""), event.get("first")
        if may_think and "end_of_thought" in event:
            self.end_of_thought, self.splitter = event["end_of_thought"], ThoughtText(event["in_thought"])

    @property
    def waited_s(self) -> float:
        """Return the seconds since it was asked for."""
        return time.perf_counter() - self.reply.asked_at

    def add(self, event: Mapping[str, Any]) -> str:
        """Take a piece of text or the end in; return what of it can be shown."""
        if not self.n_tokens:  # with the end as well: then it has no text
            self.first_text_s = self.waited_s
        if event["event"] == "text":
            self.n_tokens += event["n_tokens"]
            if self.first is not None and "prompt_logprobs" in event:
                self.prompt_logprobs = [[self.first, None, []], *event["prompt_logprobs"]]
                self.first = None
            self.logprobs += event.get("logprobs", ())
            text = self._split(event["text"])
        else:
            self.done, self.completion = event, Completion.from_json(event["completion"])
            self.n_tokens = self.completion.n_tokens
            text = self._rest()
        self.text += text
        return text

    def _split(self, text: str) -> str:
        """Return what of a piece of text is shown, and is neither a thought nor a call."""
        if self.splitter is not None:
            thought, text = self.splitter.add(text)
            self.thought += thought
            self.n_thought = self.n_tokens if self.splitter.is_open else self.n_thought
        return text if self.tools is None else self.tools.add(text)

    def _rest(self) -> str:
        """Return what is shown at the end; count the tokens of the thought."""
        rest = ""
        if self.splitter is not None:
            thought, rest = self.splitter.end()
            self.thought += thought
            token_ids, end = self.completion.token_ids, self.end_of_thought
            if self.splitter.has_begun:
                self.n_thought = token_ids.index(end) + 1 if end in token_ids else len(token_ids)
        return rest if self.tools is None else self.tools.add(rest) + self.tools.end()

    def offset(self, piece: Piece, whole: str) -> int:
        """Return where in the whole text the next token begins; what is not shown in it has no width."""
        at = self.n_characters
        if isinstance(piece, list):
            text, n_read = utf_8_decode(self.half + bytes(piece), "replace", False)
            self.n_characters, self.half = at + len(text), (self.half + bytes(piece))[n_read:]
            return at
        if self.half:  # it stays one, and is shown as such
            at, self.half = at + 1, b""
        widths = (piece, f" {piece}", piece.removeprefix(" "))
        shown = next((each for each in widths if each.startswith(whole[at : at + len(each)])), "")
        self.n_characters = at + len(shown)
        return at + (len(shown) > len(piece))

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Return the calls of tools that it makes."""
        return [] if self.tools is None else self.tools.calls

    @property
    def finish_reason(self) -> str:
        """Return why it has ended, in OpenAI's words."""
        if self.calls and not (self.tools is not None and self.tools.is_cut):
            return "tool_calls"
        return "length" if self.completion.finish_reason == "length" else "stop"


def named(piece: Piece) -> tuple[str, list[int]]:
    """Return a token's name and bytes; what is no text by itself is named by its bytes."""
    if isinstance(piece, str):
        return piece, list(piece.encode())
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece), piece


def by_name(top: Sequence[tuple[Piece, float]]) -> dict[str, float]:
    """Return alternatives by name; of two with one name the likelier, which comes first."""
    return {named(piece)[0]: value for piece, value in reversed(top)}


def speculative(done: Completion) -> dict[str, Any]:
    """Return a completion's drafts in vLLM's form; steps are the rounds that drafted, without those that did not."""
    by_length = done.by_draft_length
    longest = max(by_length, default=0)
    histogram = [sum(rounds[n] for rounds in by_length.values() if n < len(rounds)) for n in range(longest + 1)]
    n_steps, n_accepted = sum(histogram), sum(n * rounds for n, rounds in enumerate(histogram))
    return {
        "mean_acceptance_length": 1 + n_accepted / n_steps if n_steps else 1.0,
        "draft_acceptance_rate": done.acceptance_rate or 0.0,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {str(n): list(rounds) for n, rounds in by_length.items()},
        "num_spec_steps": n_steps,
        "num_accepted_draft_tokens": n_accepted,
        "num_draft_tokens": done.drafted,
        "num_spec_tokens": longest,
    }
