"""A growing completion: its text, thought and tool calls, names and offsets of its tokens, and statistics."""

from __future__ import annotations

import time
from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.answer_forms import NO_FORM, AnswerForm, merged
from ..core.messages import AnswerDone, AnswerText, PieceLogprob, PromptRead
from ..core.requests import Piece
from ..core.types import Completion
from .answer_parsers import ThoughtParser, ToolParser
from .engines import Reply


@dataclass(slots=True)
class Choice:
    """One completion of an answer as it grows.

    `schemas` are those of the arguments of its tools, by name. It may make at most `most_calls` calls (None: no limit),
    and must make one if it `is_forced`.

    If the prompt is echoed, `prefix` is its text, and `first` its first token, which has no log probability, until it
    is sent. `first_text_s` is the client's wait for the first text. `done` is the engine's last answer, which has the
    `completion`. `n_prompt` and `n_thought` count tokens, `n_sent_thought` characters. `splitter` is set if the model
    marks its thoughts; `end_of_thought` is the token that ends them, or -1.

    `logprobs` belong to tokens whose text was not sent yet. For token offsets, `n_characters` counts the characters so
    far, and `half` has the bytes of an incomplete character.
    """

    index: int
    reply: Reply
    schemas: Mapping[str, Any] = field(default_factory=dict)
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
        self._expect(NO_FORM)

    def fresh_copy(self) -> Choice:
        """Return the choice without its text, for a new engine process that decodes it again."""
        return Choice(self.index, self.reply, self.schemas, self.is_forced, self.most_calls)

    def _expect(self, form: AnswerForm) -> None:
        """Create the parser of tool calls in a form, if there are tools."""
        self.tools = ToolParser(self.schemas, self.is_forced, self.most_calls, form) if self.schemas else None

    def begin(self, read: PromptRead) -> None:
        """Store the data of the prompt that the engine has read."""
        self.n_prompt, self.prefix, self.first = read.n_tokens, read.text, read.first
        form = merged(read.forms)
        self._expect(form)
        if (form.thinks or form.hidden) and not read.is_constrained:
            self.splitter = ThoughtParser(read.in_thought, form)
            self.end_of_thought = -1 if read.end_of_thought is None else read.end_of_thought

    @property
    def waited_s(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self.reply.sent_at

    def add(self, answer: AnswerText | AnswerDone) -> str:
        """Add a part of the text, or the end; return the new text for the client."""
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
        """Add a part of the text to the parsers; return what is neither thought nor tool call."""
        if self.splitter is not None:
            thought, text = self.splitter.add(text)
            self.thought += thought
            self.n_thought = self.n_tokens if self.splitter.is_open else self.n_thought
        return text if self.tools is None else self.tools.add(text)

    def _rest(self) -> str:
        """End the parsers; return the rest of the text, and count the tokens of the thought."""
        rest = ""
        if self.splitter is not None:
            thought, rest = self.splitter.end()
            self.thought += thought
            token_ids, end = self.completion.token_ids, self.end_of_thought
            if self.splitter.is_open or (self.splitter.has_begun and end in token_ids):
                self.n_thought = token_ids.index(end) + 1 if end in token_ids else len(token_ids)
        if self.tools is None:
            return rest
        return self.tools.add(rest) + self.tools.end(is_cut=self.completion.finish_reason == "length")

    def offset(self, piece: Piece, text: str) -> int:
        """Return the next token's offset in the whole text; a token that is not part of the text has width 0."""
        offset = self.n_characters
        if isinstance(piece, list):
            characters, n_read = utf_8_decode(self.half + bytes(piece), "replace", False)
            self.n_characters, self.half = offset + len(characters), (self.half + bytes(piece))[n_read:]
            return offset
        # An incomplete character before other text is shown as a replacement character.
        if self.half:
            offset, self.half = offset + 1, b""
        spellings = (piece, f" {piece}", piece.removeprefix(" "))
        match = next((word for word in spellings if word.startswith(text[offset : offset + len(word)])), "")
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
    """Return a token's name and bytes; a token that is not valid text by itself is named by its bytes."""
    if isinstance(token, str):
        return token, list(token.encode())
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token), token


def logprob_by_name(alternatives: Sequence[tuple[Piece, float]]) -> dict[str, float]:
    """Return the log probabilities of alternatives by name; the likelier of two with one name comes first and wins."""
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
