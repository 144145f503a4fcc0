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

_n_tunings = 0  # Finished calls of `tune` in this process.
TURN_SHARE = 0.03  # Maximum share of the decoding time for which other threads may use the model.


def load(
    name: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    on_step: Callable[[str], None] = no_step,
    speed: Speed = "auto",
    db: str | Path | None = None,
) -> Model:
    """Load a model, and open the database with its plans.

    Args:   name: alias, hub id, folder or GGUF file. dtype, device, speed: see `swiftopt.models.loading.load`.
            on_step: called with a short description of each step. db: a path or an SQLAlchemy URL; None: the default
            database.
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
    """Find the layer set with which a model decodes a stream fastest, and store it, as `swiftopt tune` does.

    Args:   stream: a file of prompts, or the prompts. task: the task of texts, and of lines that name none. on_event:
            called with every event after it was stored. options: other fields of `TuneRequest`, such as
            `max_new_tokens`.
    Raises: SwiftoptError: the model, the stream or the database cannot be used, or the run failed.
    """
    global _n_tunings
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
        _n_tunings += 1


def as_prompt(text_or_prompt: str | Prompt, task: str, number: int = 1) -> Prompt:
    """Return a text as a prompt of the task; return a prompt unchanged.

    Raises: StreamError: the prompt is empty, or its task is not a valid name.
    """
    prompt = Prompt(str(number), task, text_or_prompt) if isinstance(text_or_prompt, str) else text_or_prompt
    check_task(prompt.task, f"the task of prompt {prompt.id!r},", StreamError)
    if prompt.text is None and not (prompt.messages or prompt.turns or prompt.token_ids):
        raise StreamError(f"prompt {prompt.id!r} has neither text, messages nor turns: give it one of them")
    return prompt


class PromptOptions(TypedDict, total=False):
    """Options for decoding a prompt; see `Model.work`."""

    task: str
    method: str | None
    max_new_tokens: int
    sampling: Sampling | None
    stop: str | Sequence[str]


class Model(AbstractContextManager["Model"]):
    """A loaded model that decodes by its stored plans. Close it, or use it as a context manager."""

    def __init__(self, name: str, runtime: Runtime, store: Store | None) -> None:
        self.name, self.runtime, self.store = name, runtime, store
        self._planners: dict[tuple[str | None, int | None], Planner] = {}  # By method and version of the plan.
        self.turn: ModelTurn = nullcontext  # Context in which planners measure costs.
        self._n_tunings = _n_tunings  # The module's `_n_tunings` when plans were looked up last.

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
        """Decode one prompt, and yield its text while it is decoded. See `work` for the options."""
        for event in side_by_side([self.work(prompt, **options)]):
            if isinstance(event, TextAdded):
                yield event.text

    def engine(self, concurrency: int = 8, memory: int | None = None, folder: PrefixFolder | None = None) -> LiveEngine:
        """Start a thread that decodes requests concurrently. Close it, or use it as a context manager.

        Args:   concurrency: maximum requests at a time. memory: maximum bytes of keys and values; None: half of the
                free memory. folder: where the keys and values of prefixes are stored on disk; None: nowhere.
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
        """Return the work of decoding a prompt, for an engine; it also yields `TextAdded`, and `Generated` per turn.

        Args:   task: whose stored plan to use; a `Prompt` names its task itself. method: the method to use instead of
                the plan's. stop: one or several texts; the completion ends before the first that appears.
        Raises: StreamError: the prompt is empty, or its task is not a valid name. SwiftoptError: when the work runs, if
                the plan cannot be looked up or the prompt cannot be decoded.
        """
        prompt = as_prompt(prompt, task)
        if self._n_tunings != _n_tunings:
            self._n_tunings = _n_tunings
            for planner in list(self._planners.values()):
                planner.refresh()
        stop_strings = (stop,) if isinstance(stop, str) else stop
        session = Session(self.runtime, sampling or Sampling(), max_new_tokens, stop_strings)
        return self.decoding(session, prompt, method)

    def decoding(
        self, session: Session, prompt: Prompt, method: str | None, version: int | None = None, **options: Any
    ) -> Work[None]:
        """Decode a prompt by the plan found when the work starts; arguments as for `plan_for` and `Session.request`."""
        yield from decode_as_planned(session, self.plan_for(prompt.task, method, version), prompt, **options)

    def plan_for(self, task: str, method: str | None, version: int | None) -> tuple[Method, GenerateInfo]:
        """Return the method for a task and its origin, for a requested `method` or plan `version`. Thread-safe."""
        planner = self._planners.get((method, version))
        if planner is None:
            request = GenerateRequest(self.name, method=method)
            planner = Planner(request, self.runtime, self.store, version=version, turn=self.turn)
        method_and_info = planner.plan_for(task)
        # Keep a planner only after it succeeded, because clients may name any number of versions that do not exist.
        self._planners.setdefault((method, version), planner)
        return method_and_info

    def refresh_plans(self) -> None:
        """Decode further requests by the plans that are `best` now; see `Planner.refresh`."""
        if (planner := self._planners.get((None, None))) is not None:
            planner.refresh()


class Ticket:
    """A submitted request of a live engine. Iterate over it to get the text while it is decoded."""

    def __init__(self) -> None:
        self._events: SimpleQueue[Shown | None] = SimpleQueue()  # None marks the end.
        self._done = threading.Event()
        self.on_cancel: Callable[[], None] = lambda: None
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

        Raises: TimeoutError: the request is not done after `timeout` seconds. SwiftoptError: the request failed.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the request is not done after {timeout:g} s: wait longer, or cancel it")
        self._raise()
        return self.generated[-1].completion

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def cancel(self) -> None:
        """Cancel the request; its slots are freed before the next pass."""
        self.on_cancel()

    def put(self, event: Shown) -> None:
        """Add an event; called in the engine's thread."""
        if isinstance(event, Generated):
            self.generated.append(event)
        self._events.put(event)

    def end(self, error: BaseException | None = None) -> None:
        """End the events; called in the engine's thread."""
        self.error = error
        self._done.set()
        self._events.put(None)

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


class LiveEngine(AbstractContextManager["LiveEngine"]):
    """Decodes requests from any thread concurrently, in one thread; other threads use the model only in a `turn`."""

    def __init__(self, model: Model, concurrency: int, memory: int, folder: PrefixFolder | None = None) -> None:
        self.model = model
        self._engine = Engine(memory, concurrency, folder=folder)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()  # Calls to run in the engine's thread.
        self._lock, self._closed = threading.Lock(), False
        self._requests: dict[Ticket, Request[None]] = {}
        # Threads that wait for a turn: a future (True once the thread may use the model, False if the engine closed),
        # and an event that the thread sets when it has finished.
        self._turns: deque[tuple[Future[bool], threading.Event]] = deque()
        # Seconds spent decoding, and seconds that requests waited for the turns of other threads.
        self._decoded_s = self._turns_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: str | Prompt, **options: Unpack[PromptOptions]) -> Ticket:
        """Decode a prompt together with the running requests; options as for `Model.work`.

        Raises: Cancelled: the engine is closed.
        """
        ticket = Ticket()
        self.run(self.model.work(prompt, **options), ticket)
        return ticket

    def run(self, work: Work[None], ticket: Ticket) -> None:
        """Run a request's work together with the running requests; `ticket` receives its events.

        Raises: Cancelled: the engine is closed.
        """
        ticket.on_cancel = lambda: self.call(lambda: self._drop(ticket))
        with self._lock:
            if self._closed:
                raise Cancelled("this engine is closed: start another one")
            self.call(lambda: self._add(ticket, work))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the engine's thread, between two steps, with the caller's context variables."""
        self._inbox.put(partial(copy_context().run, function))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the calling thread use the model, once the engine grants it.

        While requests are decoded, all turns together take at most TURN_SHARE of the decoding time.

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
    def memory_tokens(self) -> int:
        """Number of tokens whose keys and values fit in the engine's memory, without those of drafts."""
        assert self._engine.memory is not None
        return self._engine.memory // self.model.runtime.slot_bytes

    @property
    def n_waiting(self) -> int:
        """Number of requests that have not started."""
        return sum(request.is_new for request in self._engine.requests)

    def forget_owners(self, is_gone: Callable[[str], bool]) -> None:
        """See `Engine.forget_owners`. Call it in the engine's thread."""
        self._engine.forget_owners(is_gone)

    @property
    def kept(self) -> KeptTexts:
        """Size of the prefixes that are kept in memory and on disk."""
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
        """Let another thread use the model until it has finished; return the seconds that requests waited."""
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
