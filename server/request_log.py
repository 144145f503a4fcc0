"""The requests that ended last, in figures: how each was decoded and why. They are kept in memory, and bounded.

Texts are kept only where the operator keeps prompts in a file anyway (`--keep-prompts`), and only their beginnings.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal

from ..core.messages import AnswerDone
from ..core.plainly import WhyPlain
from ..core.requests import CompletionRequest
from ..core.rounds import RequestRounds, RoundFigures
from ..core.types import FinishReason, Timings, VerdictWord

MOST_REQUESTS = 10_000  # Requests that are kept.
MOST_CHARACTERS = 2000  # Characters that are kept of a prompt and of its answer.

Constraint = Literal["json", "tool"]  # What a text is held to: a JSON schema, or the call of a tool.
# Most rounds are alike: equal ones are one object, so that a round takes 8 bytes.
_shared = lru_cache(maxsize=4096)(RoundFigures)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended. Each of several choices is one, with its index behind the id of their answer.

    `at` is its end, in seconds since 1970, `owner` the name of its API key; `asked` is the plan that it asked for, in
    words, empty where it left the choice to the server. `first_token_s` and `total_s` are what its client waited,
    `queued_s` of which for a place. Prompt and answer are empty unless prompts are kept.
    """

    id: str
    at: float
    model: str
    task: str
    owner: str | None
    asked: str
    constraint: Constraint | None
    n_prompt: int
    n_cached: int
    n_tokens: int
    finish_reason: FinishReason
    first_token_s: float
    total_s: float
    queued_s: float
    timings: Timings
    target_passes: int
    drafted: int
    accepted: int
    crowded_rounds: int
    decode_tok_s: float | None
    exact: bool
    method: str
    version: int | None
    verdict: VerdictWord | None
    why_plain: WhyPlain | None
    rounds: RequestRounds
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
        texts = (_prompt_text(request), completion.text) if keeps_texts else ("", "")
        return cls(
            id=id,
            at=time.time(),
            model=model,
            task=done.task,
            owner=owner,
            asked=request.method or ("" if request.version is None else f"version {request.version}"),
            constraint="tool" if request.forced else None if request.json_schema is None else "json",
            n_prompt=completion.n_prompt_tokens,
            n_cached=completion.n_cached,
            n_tokens=completion.n_tokens,
            finish_reason=completion.finish_reason,
            first_token_s=waits_s[0],
            total_s=waits_s[1],
            queued_s=done.queued_s,
            timings=completion.timings,
            target_passes=completion.target_passes,
            drafted=completion.drafted,
            accepted=completion.accepted,
            crowded_rounds=completion.crowded_rounds,
            decode_tok_s=completion.decode_tok_s if completion.n_decoded else None,
            exact=completion.exact,
            method=done.decoded_with,
            version=done.version,
            verdict=done.verdict,
            why_plain=done.why_plain,
            rounds=RequestRounds(
                rounds.n,
                rounds.plain_tokens,
                rounds.plain_s,
                rounds.drafted_tokens,
                rounds.drafted_s,
                rounds.beside,
                tuple(_shared(*figures) for figures in rounds.first),
            ),
            prompt=texts[0][:MOST_CHARACTERS],
            answer=texts[1][:MOST_CHARACTERS],
        )

    @property
    def acceptance_rate(self) -> float | None:
        """Acceptance rate α: accepted / drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def ratio(self) -> float | None:
        """Tokens per second of its rounds that drafted / of its others; None unless it had both.

        A request has few plain rounds, so this is no measurement of the task: the verdict compares many.
        """
        rounds = self.rounds
        plain_work = rounds.plain_tokens * rounds.drafted_s
        return rounds.drafted_tokens * rounds.plain_s / plain_work if plain_work else None


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

        Args: way: "drafts" or "plain".
        """

        def matches() -> Iterator[EndedRequest]:
            # Copy, because a page may be made in another thread.
            for request in reversed(list(self._requests.values())):
                is_plain = request.why_plain is not None or not request.drafted
                is_of_way = way is None or is_plain == (way == "plain")
                if is_of_way and model in (None, request.model) and task in (None, request.task):
                    yield request

        return list(islice(matches(), offset, offset + n))
