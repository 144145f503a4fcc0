"""Servers that replay conversations: swiftopt's, and llama.cpp's in its package; they are stopped between turns."""

from __future__ import annotations

import json
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import httpx2

from ..core.errors import ServiceUnreachable
from ..engines.packages import PACKAGES, prepared
from ..engines.processes import Child, refuse_other_lengths
from ..engines.same_file import AT_ONCE, PAGE
from ..engines.turns import engine_environ
from ..models.cache import cache_root
from .recorded_answers import TASK
from .serving import served_process

ANSWER_S = 3600.0  # Longest time of an answer; prefill of a long prompt takes minutes.


@dataclass(frozen=True, slots=True)
class PlayerAnswer:
    """An answer: its text, seconds to the end and to the first token, and the number of cached prompt tokens."""

    seconds: float
    first_s: float
    cached: int
    text: str


class Player(ABC):
    """A way of decoding, whose processes run only while they answer."""

    @abstractmethod
    def answer(self, prompt_ids: Sequence[int], n_tokens: int) -> PlayerAnswer:
        """Answer a prompt with `n_tokens` tokens.

        Raises: EngineFailed, ServiceUnreachable: the server fails.
        """

    @property
    @abstractmethod
    def pid(self) -> int: ...

    @abstractmethod
    def close(self) -> None: ...


class ServedPlayer(Player):
    """`swiftopt serve` over HTTP, with streamed answers; `fields` are added to every request."""

    def __init__(
        self, model: str, options: Sequence[str], fields: Mapping[str, Any], note: Callable[[str], None]
    ) -> None:
        self._stack, self._fields = ExitStack(), fields
        self._client, self._process = self._stack.enter_context(served_process(model, options, note, in_group=True))
        (card,) = self._client.get("/v1/models").json()["data"]
        self._model = card["id"]
        self._signal(signal.SIGSTOP)

    def answer(self, prompt_ids: Sequence[int], n_tokens: int) -> PlayerAnswer:
        self._signal(signal.SIGCONT)
        body = {
            **{"model": self._model, "prompt": list(prompt_ids), "max_tokens": n_tokens, "temperature": 0},
            **{"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, **self._fields},
        }
        start, first_s, text, usage = perf_counter(), 0.0, "", dict[str, Any]()
        try:
            with self._client.stream("POST", "/v1/completions", json=body, timeout=ANSWER_S) as response:
                for event in _events(response):
                    for choice in event["choices"]:
                        first_s = first_s or (perf_counter() - start if choice["text"] else 0.0)
                        text += choice["text"]
                    usage = event.get("usage") or usage
        except httpx2.HTTPError as error:
            raise ServiceUnreachable(f"the server stopped answering ({error}): see its error above") from error
        seconds = perf_counter() - start
        self._signal(signal.SIGSTOP)
        return PlayerAnswer(seconds, first_s or seconds, usage["prompt_tokens_details"]["cached_tokens"], text)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._stack.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _events(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed response.

    Raises: ServiceUnreachable: the server refuses the request, or ends the stream with an error.
    """
    if response.status_code != 200:
        response.read()
        raise ServiceUnreachable(f"the server refused a prompt: {response.json()['error']['message']}")
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ServiceUnreachable(f"the server ended an answer: {event['error']['message']}")
            yield event


class LlamaPlayer(Player):
    """llama.cpp's server in a process of its package, with one slot and its prompt cache."""

    def __init__(
        self,
        name: str,
        gguf: str,
        options: Mapping[str, Any],
        n_ctx: int,
        threads: int,
        to_text: Callable[[Sequence[int]], str],
        note: Callable[[str], None],
    ) -> None:
        launch = prepared(replace(PACKAGES["llama-cpp"], file=AT_ONCE), note)
        child_options = {
            **{"model": gguf, "engine": "llama-cpp", "dtype": "auto", "device": "cpu", "threads": threads},
            **{"n_ctx": -(-n_ctx // PAGE) * PAGE, "at_once": 1, "cache": True, **options},
        }
        log = cache_root() / "peers" / "logs" / f"{name.replace('/', '-')}-agents.log"
        self._child, self._to_text = Child(launch, child_options, engine_environ("cpu", threads), log), to_text
        self._child.wait_until_ready(ANSWER_S)

    def answer(self, prompt_ids: Sequence[int], n_tokens: int) -> PlayerAnswer:
        request = {"prompt_ids": list(prompt_ids), "max_new_tokens": n_tokens, "task": TASK}
        reply = self._child.ask({"requests": [request]}, ANSWER_S)
        [answer] = reply["answers"]
        refuse_other_lengths(reply["answers"], n_tokens)
        return PlayerAnswer(reply["seconds"], answer["first_s"], answer["cached"], self._to_text(answer["token_ids"]))

    @property
    def pid(self) -> int:
        return self._child.pid

    def close(self) -> None:
        self._child.close()
