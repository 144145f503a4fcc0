"""What computes is a generator that yields the passes it wants; an engine runs any number of them side by side.

Those that wait for passes of one model share a forward pass: its weights are read once for all of their rows. A round's
draft passes go first, until every sequence waits for its target.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..models.rows import Pass
from ..models.runtime import Runtime

T = TypeVar("T")
PassGenerator = Generator[Pass, Tensor, T]  # yields passes, is sent the wanted logits (rows, vocab) of each


@torch.inference_mode()
def alone(work: PassGenerator[T]) -> T:
    """Run every pass of one generator; what it returns."""
    try:
        wanted = next(work)
        while True:
            wanted.runtime.load = 1
            wanted = work.send(wanted.runtime.forward_together([wanted])[0])
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        work.close()


class Request(Generic[T]):
    """A generator in flight: the pass that it waits for, or what became of it."""

    def __init__(self, work: PassGenerator[T]) -> None:
        self._work = work
        self.wanted: Pass | None = None
        self.error: Exception | None = None
        self._result: list[T] = []

    @property
    def is_done(self) -> bool:
        """Whether it has returned or failed."""
        return bool(self._result) or self.error is not None

    @property
    def result(self) -> T:
        """What the generator returned; raises what it raised."""
        if self.error is not None:
            raise self.error
        return self._result[0]

    def start(self) -> None:
        """Run up to the first pass."""
        self._advance(lambda: next(self._work))

    def send(self, logits: Tensor) -> None:
        """Hand over the logits that it waits for, and run up to its next pass."""
        self._advance(lambda: self._work.send(logits))

    def throw(self, error: Exception) -> None:
        """Tell it that its pass failed."""
        self._advance(lambda: self._work.throw(error))

    def close(self) -> None:
        """Give it up, wherever it is."""
        self.wanted = None
        self._work.close()

    def _advance(self, go_on: Callable[[], Pass]) -> None:
        self.wanted = None
        try:
            self.wanted = go_on()
        except StopIteration as end:
            self._result.append(end.value)
        except Exception as error:
            self.error = error


class Engine:
    """Runs requests side by side, a step at a time; a request that fails takes no other along."""

    def __init__(self) -> None:
        self.requests: list[Request[Any]] = []

    @torch.inference_mode()
    def add(self, work: PassGenerator[T]) -> Request[T]:
        """Take a generator in, and run it up to its first pass."""
        request = Request(work)
        request.start()
        if not request.is_done:
            self.requests.append(request)
        return request

    def cancel(self, request: Request[Any]) -> None:
        """Give a request up; its buffer is free at once."""
        request.close()
        with suppress(ValueError):
            self.requests.remove(request)

    @torch.inference_mode()
    def step(self) -> None:
        """Run the draft passes that wait, or else all that wait, and hand out their logits."""
        waiting = [(request, request.wanted) for request in self.requests if request.wanted is not None]
        chosen = [(request, wanted) for request, wanted in waiting if wanted.drafts] or waiting
        for runtime in dict.fromkeys(wanted.runtime for _, wanted in chosen):
            _run(runtime, [(request, wanted) for request, wanted in chosen if wanted.runtime is runtime])
        self.requests = [request for request in self.requests if not request.is_done]
        if not self.requests:
            for _, wanted in chosen:
                wanted.runtime.load = 1

    def close(self) -> None:
        """Give all requests up."""
        while self.requests:
            self.cancel(self.requests[-1])


def side_by_side(works: Iterable[PassGenerator[T]], at_once: int) -> Iterator[T]:
    """The results of generators in their order, up to `at_once` running together; an error comes in its turn."""
    engine, works, started = Engine(), iter(works), list[Request[T]]()
    try:
        while True:
            while len(engine.requests) < at_once and (work := next(works, None)) is not None:
                started.append(engine.add(work))
            while started and started[0].is_done:
                yield started.pop(0).result
            if not started:
                return
            engine.step()
    finally:
        engine.close()


def _run(runtime: Runtime, some: list[tuple[Request[Any], Pass]]) -> None:
    try:
        logits = runtime.forward_together([wanted for _, wanted in some])
    except Exception as error:
        if len(some) == 1:
            return some[0][0].throw(error)
        for each in some:  # one after the other, so that whose pass it was fails and no other
            _run(runtime, [each])
        return None
    if not some[0][1].drafts:
        runtime.load = len(some)
    for (request, _), own in zip(some, logits, strict=True):
        request.send(own)
    return None
