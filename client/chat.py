"""Chats with an OpenAI-compatible server, ours or another: answers as they grow, and what they came to."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx2

from ..core.errors import ServiceUnreachable, StoreError, safe_url
from .wire import check_key, check_url, error_of, openai_problem, parsed, sent, unreachable

CONNECT_S = 30.0
SILENCE_S = 600.0  # without a byte the connection counts as broken; a long prompt is read in silence
SESSION = "X-Session-ID"  # names the chat to load balancers, which keep it on one replica
DONE = "[DONE]"  # ends a stream, in place of a chunk


@dataclass(frozen=True, slots=True)
class Answered:
    """What an answer came to; None stands for what was not measured or not told."""

    finish_reason: str | None = None
    n_tokens: int | None = None
    tokens_per_second: float | None = None
    acceptance_rate: float | None = None


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The models that a server decodes with; `is_swiftopt`: whether the server is ours."""

    names: tuple[str, ...]
    is_swiftopt: bool


class ChatClient:
    """One chat with the server at `url`, with or without `/v1` at its end; `api_key` None takes `SWIFTOPT_API_KEY`.

    Raises: SettingsError: the URL or the key cannot be used. In every method: NotFound, InvalidInput: the server says
        so. ServiceUnreachable: it does not answer, is not ready, or refuses the key. StoreError: its answer has
        another form than OpenAI's.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = check_url(url).removesuffix("/v1")
        headers = {**check_key(api_key or os.environ.get("SWIFTOPT_API_KEY")), SESSION: uuid.uuid4().hex}
        self._http = httpx2.Client(headers=headers, timeout=httpx2.Timeout(CONNECT_S, read=SILENCE_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def models(self) -> ServedModels:
        """Return what the server decodes with; a server of ours without an engine has no names."""
        found = parsed(sent(lambda: self._http.get(f"{self.url}/v1/models"), self.url, again=True), self.url)
        with self._reading():
            return ServedModels(tuple(str(model["id"]) for model in found.get("data", ())), "schema" in found)

    def answer(self, model: str, messages: Sequence[Mapping[str, str]], **fields: Any) -> Iterator[str | Answered]:
        """Yield the answer's text as it grows, then what it came to; closing the iterator ends the request.

        Args: fields: further fields of the request's body, such as `max_tokens`.
        """
        body = {"model": model, "messages": list(messages), "stream": True, **fields}
        body["stream_options"] = {"include_usage": True}
        told = _Told()
        with closing(sent(lambda: self._opened(body), self.url, again=True)) as response:
            for chunk in self._chunks(response):
                with self._reading():
                    text = told.take(chunk)
                if text:
                    yield text
        with self._reading():
            answered = told.answered()
        yield answered

    def _opened(self, body: Mapping[str, Any]) -> httpx2.Response:
        request = self._http.build_request("POST", f"{self.url}/v1/chat/completions", json=body)
        response = self._http.send(request, stream=True)
        if not response.is_success:
            response.read()
        return response

    def _chunks(self, response: httpx2.Response) -> Iterator[Any]:
        """Yield the objects of a stream up to its end.

        Raises: ServiceUnreachable: it has no proper end.
        """
        try:
            for event in httpx2.EventSource(response, max_event_size=None):
                if event.data == DONE:
                    return
                yield self._chunk(event.data)
        except httpx2.SSEError as error:
            raise ServiceUnreachable(
                f"what answers at {safe_url(self.url)} sends no events ({error}): check the URL"
            ) from error
        except httpx2.TransportError as error:
            raise unreachable(self.url, error) from error
        raise ServiceUnreachable(f"the answer of {safe_url(self.url)} broke off before its end: ask again")

    def _chunk(self, data: str) -> Any:
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise self._unreadable(error) from error
        problem = openai_problem(chunk, 500) if isinstance(chunk, Mapping) else None
        if problem is not None:
            raise error_of(problem)
        return chunk

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (AttributeError, KeyError, TypeError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> StoreError:
        return StoreError(
            f"the answer of {safe_url(self.url)} cannot be read ({error}): use a server with OpenAI's chat completions"
        )


@dataclass(slots=True)
class _Told:
    """What the chunks of one answer have told so far."""

    began: float = field(default_factory=time.monotonic)
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def take(self, chunk: Mapping[str, Any]) -> str:
        """Return the text that a chunk adds."""
        self.usage = chunk.get("usage") or self.usage
        self.metrics = chunk.get("metrics") or self.metrics
        text = ""
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            text += (choice.get("delta") or {}).get("content") or ""
        return text

    def answered(self) -> Answered:
        """Return what the answer came to; its speed by the server's clock, else by ours."""
        n_tokens, speed = self.usage.get("completion_tokens"), self.metrics.get("tokens_per_second")
        if speed is None and n_tokens:
            speed = n_tokens / (time.monotonic() - self.began)
        drafts = self.metrics.get("speculative_decoding") or {}
        n_drafted = drafts.get("num_draft_tokens")
        rate = drafts.get("num_accepted_draft_tokens", 0) / n_drafted if n_drafted else None
        return Answered(self.finish_reason, n_tokens, speed, rate)
