"""The latest ended requests: how each was decoded and why. A bounded number is kept in memory.

The beginnings of texts are kept only if the operator stores prompts anyway (`--keep-prompts`).
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

MOST_REQUESTS = 10_000  # Maximum number of kept requests.
MOST_CHARACTERS = 2000  # Maximum kept characters of a prompt, and of its answer.

Constraint = Literal["json", "tool"]  # What the text must be: JSON of a schema, or the call of a tool.
# Most rounds have equal figures. Equal ones share one object, so a round takes 8 bytes.
_shared = lru_cache(maxsize=4096)(RoundFigures)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """An ended request. Each of several choices counts as one, with its index after the id of their answer.

    `at` is its end, in seconds since 1970; `owner` names its API key. `asked` is the requested plan in words, empty if
    the server was to choose. `sums` are its figures. Its client waited `total_s`, of which `queued_s` for a place.
    `error` is the message of a failure, otherwise empty. `prompt` and `answer` are empty unless prompts are kept.
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
        """Return the record of a request that was answered.

        Args: waits_s: the client's seconds until its first text and until the end.
        """
        completion, rounds = done.completion, done.rounds
        return cls(
            id,
            time.time(),
            model,
            done.task,
            owner,
            *_plan_and_constraint(request),
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
        """How it was decoded; "plain" also if nothing was drafted."""
        if self.error:
            return "failed"
        return "plain" if self.why_plain is not None or not self.sums.drafted else "drafts"

    @classmethod
    def failed(
        cls, id: str, model: str, request: CompletionRequest, error: str, total_s: float, owner: str | None = None
    ) -> EndedRequest:
        """Return the record of a request that failed after `total_s` with the message `error`; it has no figures."""
        task, error = request.task or DEFAULT_TASK, error[:MOST_CHARACTERS]
        asked, constraint = _plan_and_constraint(request)
        return cls(id, time.time(), model, task, owner, asked, constraint, Period(0), total_s, "error", error)


def _plan_and_constraint(request: CompletionRequest) -> tuple[str, Constraint | None]:
    """Return the plan that a request asks for, in words, and what its text must be."""
    constraint: Constraint | None = "tool" if request.forced else None if request.json_schema is None else "json"
    return request.method or ("" if request.version is None else f"version {request.version}"), constraint


def _prompt_text(request: CompletionRequest) -> str:
    messages = (f"{message.get('role')}: {message.get('content')}" for message in request.messages)
    return "\n".join(messages) if request.messages else request.text


class RequestLog:
    """The latest ended requests of all models, by id."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, EndedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: EndedRequest) -> None:
        """Keep a request; drop the oldest one beyond MOST_REQUESTS."""
        self._requests[request.id] = request
        if len(self._requests) > MOST_REQUESTS:
            self._requests.popitem(last=False)

    def find(self, id: str) -> EndedRequest | None:
        """Return a request; None if it is no longer kept."""
        return self._requests.get(id)

    def latest(
        self, n: int, offset: int = 0, model: str | None = None, task: str | None = None, way: str | None = None
    ) -> list[EndedRequest]:
        """Return `n` requests after the first `offset`, the newest first.

        Args: model, task: None: of all. way: "drafts", "plain", or "failed"; None: all.
        """

        def matches() -> Iterator[EndedRequest]:
            # Copy, because a page may be rendered in another thread.
            for request in reversed(list(self._requests.values())):
                if way in (None, request.way) and model in (None, request.model) and task in (None, request.task):
                    yield request

        return list(islice(matches(), offset, offset + n))
