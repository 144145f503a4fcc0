"""The requests that ended last, in figures: how each was decoded and why. They are kept in memory, and bounded.

Texts are kept only where the operator keeps prompts in a file anyway (`--keep-prompts`), and only their beginnings.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Literal

from ..core.messages import AnswerDone
from ..core.plainly import WhyPlain
from ..core.requests import CompletionRequest
from ..core.rounds import NO_ROUNDS, RequestRounds, RoundFigures
from ..core.types import DEFAULT_TASK, FinishReason, VerdictWord
from .metrics import Period

MOST_REQUESTS = 10_000  # Requests that are kept.
MOST_CHARACTERS = 2000  # Characters that are kept of a prompt and of its answer.

Constraint = Literal["json", "tool"]  # What a text is held to: a JSON schema, or the call of a tool.
# Most rounds are alike: equal ones are one object, so that a round takes 8 bytes.
_shared = lru_cache(maxsize=4096)(RoundFigures)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended. Each of several choices is one, with its index after the id of their answer.

    `at` is its end, in seconds since 1970, `owner` the name of its API key; `asked` is the plan that it asked for, in
    words, empty where it left the choice to the server. `sums` are its figures, and `total_s` is what its client
    waited, `queued_s` of which for a place. `error` is the sentence with which it failed, empty where it did not.
    Prompt and answer are empty unless prompts are kept.
    """

    id: str
    at: float
    model: str
    task: str
    owner: str | None
    asked: str
    constraint: Constraint | None
    sums: Period
    total_s: float
    finish_reason: FinishReason | Literal["error"]
    error: str = ""
    queued_s: float = 0.0
    target_passes: int = 0
    crowded_rounds: int = 0
    method: str = ""
    version: int | None = None
    verdict: VerdictWord | None = None
    why_plain: WhyPlain | None = None
    rounds: RequestRounds = NO_ROUNDS
    prompt: str = ""
    answer: str = ""

    @classmethod
    def of(
        cls,
        id: str,
        model: str,
        request: CompletionRequest,
        done: AnswerDone,
        waits_s: tuple[float, float],
        owner: str | None = None,
        keeps_texts: bool = False,
    ) -> EndedRequest:
        """Return the figures of an answer; `waits_s` are the client's seconds until its first text and its end."""
        completion, rounds = done.completion, done.rounds
        return cls(
            id,
            time.time(),
            model,
            done.task,
            owner,
            *_asked(request),
            Period.of(completion, *waits_s, rounds),
            waits_s[1],
            completion.finish_reason,
            queued_s=done.queued_s,
            target_passes=completion.target_passes,
            crowded_rounds=completion.crowded_rounds,
            method=done.decoded_with,
            version=done.version,
            verdict=done.verdict,
            why_plain=done.why_plain,
            rounds=replace(rounds, first=tuple(_shared(*figures) for figures in rounds.first)),
            prompt=_prompt_text(request)[:MOST_CHARACTERS] if keeps_texts else "",
            answer=completion.text[:MOST_CHARACTERS] if keeps_texts else "",
        )

    @property
    def way(self) -> Literal["drafts", "plain", "failed"]:
        """How it was decoded; plainly, too, if nothing was drafted."""
        if self.error:
            return "failed"
        return "plain" if self.why_plain is not None or not self.sums.drafted else "drafts"

    @classmethod
    def failed(
        cls, id: str, model: str, request: CompletionRequest, error: str, total_s: float, owner: str | None = None
    ) -> EndedRequest:
        """Return a request that failed with this sentence, after so many seconds; it has no figures."""
        task, error = request.task or DEFAULT_TASK, error[:MOST_CHARACTERS]
        asked = _asked(request)
        return cls(id, time.time(), model, task, owner, *asked, Period(0), total_s, "error", error)


def _asked(request: CompletionRequest) -> tuple[str, Constraint | None]:
    """Return the plan that a request asks for, in words, and what its text is held to."""
    constraint: Constraint | None = "tool" if request.forced else None if request.json_schema is None else "json"
    return request.method or ("" if request.version is None else f"version {request.version}"), constraint


def _prompt_text(request: CompletionRequest) -> str:
    messages = (f"{message.get('role')}: {message.get('content')}" for message in request.messages)
    return "\n".join(messages) if request.messages else request.text


class RequestLog:
    """The latest requests of all models, by their ids."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, EndedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: EndedRequest) -> None:
        """Keep a request; the oldest makes way."""
        self._requests[request.id] = request
        if len(self._requests) > MOST_REQUESTS:
            self._requests.popitem(last=False)

    def find(self, id: str) -> EndedRequest | None:
        """Return a request, if it is still kept."""
        return self._requests.get(id)

    def latest(
        self, n: int, offset: int = 0, model: str | None = None, task: str | None = None, way: str | None = None
    ) -> list[EndedRequest]:
        """Return `n` requests, the newest first, of a model, a task and a way of decoding; None: of all.

        Args: way: "drafts", "plain", or "failed".
        """

        def matches() -> Iterator[EndedRequest]:
            # Copy, because a page may be made in another thread.
            for request in reversed(list(self._requests.values())):
                if way in (None, request.way) and model in (None, request.model) and task in (None, request.task):
                    yield request

        return list(islice(matches(), offset, offset + n))
