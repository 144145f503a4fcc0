"""swiftopt in Python: load a model, decode by its stored plans, and tune it.

swiftopt.tune("smollm2-135m", "prompts.jsonl", task="notes")
model = swiftopt.load("smollm2-135m")
print(model.generate("Once upon a time", task="notes").text)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any, TypedDict, Unpack

from ..core.errors import SettingsError, StreamError
from ..core.events import Event, KeptTexts
from ..core.requests import MAX_NEW_TOKENS, GenerateRequest, Speed, TuneRequest
from ..core.types import DEFAULT_TASK, Completion, Prompt, Sampling, check_task
from ..decoding.engine import Engine, Request, side_by_side
from ..decoding.events import Generated, GenerateInfo, Shown, TextAdded, WorkEvent
from ..decoding.methods import Method
from ..decoding.prefix_files import PrefixFolder
from ..decoding.session import Session
from ..decoding.work import Work, subscribed
from ..models import loading
from ..models.costs import memory_for_texts
from ..models.runtime import Runtime
from ..models.saved import no_step
from ..store import Store
from .generate import Planner, decode_as_planned
from .job import Cancelled, ModelTurn
from .tune import TuneResult, run_tuning

_n_tuned = 0  # Completed calls of `tune` in this process.
TURN_SHARE = 0.03  # Largest share of decoding time during which other threads may use the model.


def load(
    name: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    on_step: Callable[[str], None] = no_step,
    speed: Speed = "auto",
    db: str | Path | None = None,
) -> Model:
    """Open the database with the plans that a model decodes by, and load the model.

    Args:   name: alias, hub id, folder or GGUF file. dtype, device, speed: see `swiftopt.models.loading.load`.
            on_step: called with each step in a few words. db: a path or an SQLAlchemy URL; None: the default one.
    Raises: ModelNotFound, UnsupportedModel, SettingsError: see `swiftopt.models.loading.load`. StoreError: the database
            cannot be opened.
    """
    name = str(name)
    with ExitStack() as stack:
        store = stack.enter_context(Store.open(db))
        model = Model(name, loading.load(name, dtype, device, on_step, speed), store)
        stack.pop_all()
        return model


def tune(
    model: str | Path,
    stream: str | Path | Sequence[str | Prompt],
    task: str | None = None,
    db: str | Path | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    **options: Any,
) -> TuneResult:
    """Find the layer set with which a model decodes a stream fastest, and store it; what `swiftopt tune` does.

    Args:   stream: a file of prompts, or the prompts. task: of lines that name none, and of texts. on_event: called
            with every event after it was stored. options: other fields of `TuneRequest`, such as `max_new_tokens`.
    Raises: SwiftoptError: as the parts raise it.
    """
    global _n_tuned
    prompts = None
    if not isinstance(stream, str | Path):
        name = DEFAULT_TASK if task is None else task
        prompts = [as_prompt(prompt, name, number) for number, prompt in enumerate(stream, start=1)]
    options |= {name: str(value) for name, value in options.items() if isinstance(value, Path)}
    request = TuneRequest(str(model), str(stream) if prompts is None else DEFAULT_TASK, task=task, **options)
    try:
        with Store.open(db) as store:
            return run_tuning(request, store, on_event, prompts)
    finally:
        _n_tuned += 1


def as_prompt(text_or_prompt: str | Prompt, task: str, number: int = 1) -> Prompt:
    """Return a text as a prompt of the task, a prompt as it is.

    Raises: StreamError: there is nothing to decode, or the task is no name.
    """
    prompt = Prompt(str(number), task, text_or_prompt) if isinstance(text_or_prompt, str) else text_or_prompt
    check_task(prompt.task, f"the task of prompt {prompt.id!r},", StreamError)
    if prompt.text is None and not (prompt.messages or prompt.turns or prompt.token_ids):
        raise StreamError(f"prompt {prompt.id!r} has neither text, messages nor turns: give it one of them")
    return prompt


class PromptOptions(TypedDict, total=False):
    """How a prompt is decoded; see `Model.work`."""

    task: str
    method: str | None
    max_new_tokens: int
    sampling: Sampling | None
    stop: str | Sequence[str]


class Model(AbstractContextManager["Model"]):
    """A loaded model that decodes by its stored plans; to be closed, or used as a context manager."""

    def __init__(self, name: str, runtime: Runtime, store: Store | None) -> None:
        self.name, self.runtime, self.store = name, runtime, store
        self._planners: dict[tuple[str | None, int | None], Planner] = {}
        self.turn: ModelTurn = nullcontext  # Context for planners to measure costs in.
        self._n_tuned = _n_tuned  # Value of the module's _n_tuned at the last lookup of plans.

    def close(self) -> None:
        """Close the database."""
        if self.store is not None:
            self.store.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, prompt: str | Prompt, **options: Unpack[PromptOptions]) -> Completion:
        """Decode one prompt; return the completion of its last turn. See `work` for the options."""
        generated = [event for event in side_by_side([self.work(prompt, **options)]) if isinstance(event, Generated)]
        return generated[-1].completion

    def stream(self, prompt: str | Prompt, **options: Unpack[PromptOptions]) -> Iterator[str]:
        """Decode one prompt, and yield its text as it grows. See `work` for the options."""
        for event in side_by_side([self.work(prompt, **options)]):
            if isinstance(event, TextAdded):
                yield event.text

    def engine(self, concurrency: int = 8, memory: int | None = None, folder: PrefixFolder | None = None) -> LiveEngine:
        """Start a thread that decodes requests side by side; to be closed, or used as a context manager.

        Args:   concurrency: most requests at a time. memory: most bytes of keys and values; None: half of what is free.
                folder: where what requests read is stored, too.
        Raises: SettingsError: `concurrency` is below 1.
        """
        if concurrency < 1:
            raise SettingsError(f"concurrency {concurrency} is out of range: use 1 or more", "concurrency")
        return LiveEngine(self, concurrency, memory_for_texts(self.runtime) if memory is None else memory, folder)

    def work(
        self,
        prompt: str | Prompt,
        task: str = DEFAULT_TASK,
        method: str | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
    ) -> Work[None]:
        """Return a prompt's decoding, for an engine; it reports `TextAdded` and, per turn, `Generated`, too.

        Args:   task: whose stored plan to use; a `Prompt` has its own. method: in place of what the plan says.
                stop: a text, or several, before which the completion ends.
        Raises: StreamError: there is nothing to decode, or the task is no name. SwiftoptError: when it is run, as the
                parts raise it.
        """
        prompt = as_prompt(prompt, task)
        if self._n_tuned != _n_tuned:
            self._n_tuned = _n_tuned
            for planner in list(self._planners.values()):
                planner.refresh()
        stops = (stop,) if isinstance(stop, str) else stop
        session = Session(self.runtime, sampling or Sampling(), max_new_tokens, stops)
        return self.decoding(session, prompt, method)

    def decoding(
        self, session: Session, prompt: Prompt, method: str | None, version: int | None = None, **options: Any
    ) -> Work[None]:
        """Decode a prompt as planned when that begins; arguments as for `plan_for` and `Session.request`."""
        yield from decode_as_planned(session, self.plan_for(prompt.task, method, version), prompt, **options)

    def plan_for(self, task: str, method: str | None, version: int | None) -> tuple[Method, GenerateInfo]:
        """Return what `Planner.plan_for` does with such a `method` and `version`; any thread may ask."""
        planner = self._planners.get((method, version))
        if planner is None:
            request = GenerateRequest(self.name, method=method)
            planner = Planner(request, self.runtime, self.store, version=version, turn=self.turn)
        method_and_info = planner.plan_for(task)
        # Keep a planner only after it succeeded: clients may name any number of versions that do not exist.
        self._planners.setdefault((method, version), planner)
        return method_and_info

    def refresh_plans(self) -> None:
        """Decode what comes by the plans that are the best now; see `Planner.refresh`."""
        if (planner := self._planners.get((None, None))) is not None:
            planner.refresh()


class Ticket:
    """A request of a live engine, as its caller sees it. Iterate over it for the text as it grows."""

    def __init__(self) -> None:
        self._events: SimpleQueue[Shown | None] = SimpleQueue()  # None marks the end.
        self._done = threading.Event()
        self.give_up: Callable[[], None] = lambda: None
        self.generated: list[Generated] = []
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        while (event := self._events.get()) is not None:
            if isinstance(event, TextAdded):
                yield event.text
        self._events.put(None)  # A second iteration must also end.
        self._raise()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end; return the completion of the last turn.

        Raises: TimeoutError: it is not done after so many seconds. SwiftoptError: what it failed with.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the request is not done after {timeout:g} s: wait longer, or cancel it")
        self._raise()
        return self.generated[-1].completion

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def cancel(self) -> None:
        """Cancel the request; its slots are free before the next pass."""
        self.give_up()

    def put(self, event: Shown) -> None:
        """Pass an event on, in the engine's thread."""
        if isinstance(event, Generated):
            self.generated.append(event)
        self._events.put(event)

    def end(self, error: BaseException | None = None) -> None:
        """End the events, in the engine's thread."""
        self.error = error
        self._done.set()
        self._events.put(None)

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


class LiveEngine(AbstractContextManager["LiveEngine"]):
    """Decodes requests of any threads side by side in one thread, which alone uses the model, or grants turns."""

    def __init__(self, model: Model, concurrency: int, memory: int, folder: PrefixFolder | None = None) -> None:
        self.model = model
        self._engine = Engine(memory, concurrency, folder=folder)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        self._requests: dict[Ticket, Request[None]] = {}
        # Waiting threads: (future set once the thread may use the model, event set when it has finished).
        self._turns: deque[tuple[Future[bool], threading.Event]] = deque()
        # Seconds spent decoding, and seconds that requests waited while other threads used the model.
        self._decoded_s = self._turns_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: str | Prompt, **options: Unpack[PromptOptions]) -> Ticket:
        """Decode a prompt together with the others; options as for `Model.work`.

        Raises: Cancelled: the engine is closed.
        """
        ticket = Ticket()
        self.run(self.model.work(prompt, **options), ticket)
        return ticket

    def run(self, work: Work[None], ticket: Ticket) -> None:
        """Decode together with the others; the ticket gets the events.

        Raises: Cancelled: the engine is closed.
        """
        ticket.give_up = lambda: self.call(lambda: self._drop(ticket))
        with self._lock:
            if self._closed:
                raise Cancelled("this engine is closed: start another one")
            self.call(lambda: self._add(ticket, work))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the engine's thread, between two steps, with the caller's context variables."""
        self._inbox.put(partial(copy_context().run, function))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Use the model from the calling thread: while nothing is decoded, else for TURN_SHARE of the time at most.

        Raises: Cancelled: the engine is closed, or closes before the turn.
        """
        turn_granted, turn_over = Future[bool](), threading.Event()
        with self._lock:
            if self._closed:
                turn_granted.set_result(False)
            else:
                self.call(lambda: self._turns.append((turn_granted, turn_over)))
        if not turn_granted.result():
            raise Cancelled("this engine is closed: start another one")
        try:
            yield
        finally:
            turn_over.set()

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def most_tokens(self) -> int:
        """Tokens that its memory holds, if nothing drafts."""
        assert self._engine.memory is not None
        return self._engine.memory // self.model.runtime.slot_bytes

    @property
    def n_waiting(self) -> int:
        return sum(request.is_new for request in self._engine.requests)

    def forget_owners(self, is_gone: Callable[[str], bool]) -> None:
        """See `Engine.forget_owners`; call it in the engine's thread."""
        self._engine.forget_owners(is_gone)

    @property
    def kept(self) -> KeptTexts:
        """What is kept of texts that were read."""
        prefixes, folder = self._engine.prefixes, self._engine.folder
        in_memory = KeptTexts(prefix_tokens=prefixes.n_tokens, prefix_bytes=prefixes.n_bytes)
        return in_memory if folder is None else replace(in_memory, disk_bytes=folder.n_bytes, disk_tokens=folder.n_read)

    def close(self) -> None:
        """Cancel all requests and end the thread."""
        with self._lock:
            self._closed = True
        self._inbox.put(lambda: None)
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while True:
                while not self._inbox.empty() or not (self._requests or self._turns or self._closed):
                    self._inbox.get()()  # Blocks while there is nothing to decode.
                if self._closed:
                    return
                if self._turns and (not self._requests or self._turns_s <= TURN_SHARE * self._decoded_s):
                    self._turns_s += self._grant(*self._turns.popleft())
                if self._requests:
                    self._step()
        finally:
            with self._lock:
                self._closed = True
            while not self._inbox.empty():
                self._inbox.get()()
            for ticket in list(self._requests):
                self._drop(ticket)
            for turn_granted, _ in self._turns:
                turn_granted.set_result(False)

    def _grant(self, turn_granted: Future[bool], turn_over: threading.Event) -> float:
        """Let another thread use the model; return the seconds that requests waited for it."""
        started_s, has_requests = perf_counter(), bool(self._requests)
        self._engine.load.n_beside += has_requests
        turn_granted.set_result(True)
        turn_over.wait()
        return perf_counter() - started_s if has_requests else 0.0

    def _add(self, ticket: Ticket, work: Work[None]) -> None:
        def put(event: WorkEvent) -> None:
            if isinstance(event, Shown):
                ticket.put(event)

        self._requests[ticket] = self._engine.add(subscribed(work, put))

    def _step(self) -> None:
        started_s = perf_counter()
        for _ in self._engine.step():
            pass
        self._decoded_s += perf_counter() - started_s
        for ticket, request in list(self._requests.items()):
            if request.is_done:
                del self._requests[ticket]
                ticket.end(request.error)

    def _drop(self, ticket: Ticket) -> None:
        if ticket.is_done:
            return
        self._engine.cancel(self._requests.pop(ticket))
        ticket.end(Cancelled("the request was cancelled, or its engine closed: submit it again"))
