"""Chats with an OpenAI-compatible server, ours or another: answers as they grow, and their figures."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx2

from ..core.errors import ServiceUnreachable, safe_url
from .http import ServerConnection, error_of, openai_problem

CONNECT_S = 30.0
# Read timeout in seconds. It is long because a server sends nothing while it processes a long prompt.
SILENCE_S = 600.0
SESSION = "X-Session-ID"  # Header by which load balancers route all requests of a chat to one replica.
DONE = "[DONE]"  # Data of the event that ends a stream.
# Errors raised when a response does not have the expected fields.
MALFORMED_ANSWER = (AttributeError, KeyError, TypeError)


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer's figures; None: not measured, or not sent."""

    finish_reason: str | None = None
    n_tokens: int | None = None
    tokens_per_second: float | None = None
    acceptance_rate: float | None = None


class Thought(str):
    """Reasoning before an answer; later requests of the chat leave it out."""


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The models that a server decodes with; `is_swiftopt`: whether the server is ours."""

    names: tuple[str, ...]
    is_swiftopt: bool


class ChatClient(ServerConnection):
    """One chat with the server at `url`; else as `ServerConnection`."""

    ADVICE = "use a server with OpenAI's chat completions"

    def __init__(self, url: str, api_key: str | None = None) -> None:
        super().__init__(url, api_key, httpx2.Timeout(CONNECT_S, read=SILENCE_S), {SESSION: uuid.uuid4().hex})

    def models(self) -> ServedModels:
        """Return the served models; a swiftopt server without a model has no names."""
        cards = self._json("GET", "/v1/models", again=True)
        with self._reading(*MALFORMED_ANSWER):
            return ServedModels(tuple(str(model["id"]) for model in cards.get("data", ())), "schema" in cards)

    def answer(self, model: str, messages: Sequence[Mapping[str, str]], **fields: Any) -> Iterator[str | Answered]:
        """Yield thoughts and text as they grow, then the answer's figures; closing the iterator ends the request.

        Args: fields: further fields of the request's body, such as `max_tokens`.
        """
        body = {"model": model, "messages": list(messages), "stream": True, **fields}
        body["stream_options"] = {"include_usage": True}
        answer_so_far = _AnswerSoFar()
        with closing(self._send("POST", "/v1/chat/completions", again=True, stream=True, json=body)) as response:
            for chunk in self._chunks(response):
                with self._reading(*MALFORMED_ANSWER):
                    texts = answer_so_far.take(chunk)
                yield from filter(None, texts)
        with self._reading(*MALFORMED_ANSWER):
            figures = answer_so_far.answered()
        yield figures

    def _chunks(self, response: httpx2.Response) -> Iterator[Any]:
        """Yield the objects of a stream up to its end.

        Raises: ServiceUnreachable: it has no proper end.
        """
        try:
            for event in self._events(response):
                if event.data == DONE:
                    return
                with self._reading(ValueError):
                    chunk = json.loads(event.data)
                problem = openai_problem(chunk, 500) if isinstance(chunk, Mapping) else None
                if problem is not None:
                    raise error_of(problem)
                yield chunk
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error
        raise ServiceUnreachable(f"the answer of {safe_url(self.url)} was interrupted: send the request again")


@dataclass(slots=True)
class _AnswerSoFar:
    """The content of the chunks of one answer so far."""

    began: float = field(default_factory=time.monotonic)
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def take(self, chunk: Mapping[str, Any]) -> tuple[Thought, str]:
        """Return the thought and the text that a chunk adds; servers name thoughts in two ways."""
        self.usage = chunk.get("usage") or self.usage
        self.metrics = chunk.get("metrics") or self.metrics
        thought = text = ""
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            thought += delta.get("reasoning_content") or delta.get("reasoning") or ""
            text += delta.get("content") or ""
        return Thought(thought), text

    def answered(self) -> Answered:
        """Return the answer's figures; the speed is the server's own figure, else measured here."""
        n_tokens, speed = self.usage.get("completion_tokens"), self.metrics.get("tokens_per_second")
        if speed is None and n_tokens:
            speed = n_tokens / (time.monotonic() - self.began)
        drafts = self.metrics.get("speculative_decoding") or {}
        n_drafted = drafts.get("num_draft_tokens")
        rate = drafts.get("num_accepted_draft_tokens", 0) / n_drafted if n_drafted else None
        return Answered(self.finish_reason, n_tokens, speed, rate)
