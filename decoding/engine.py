"""An engine, which runs any number of generators (`work.py`) concurrently, a step at a time.

Generators that wait for passes of one model share a forward pass, which reads the weights once for all rows. Draft
passes of a round go first, until every sequence waits for its target.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from itertools import takewhile
from time import perf_counter
from traceback import clear_frames
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ContextOverflow
from ..models.buffer import KVBuffer
from ..models.costs import is_out_of_memory
from ..models.rows import Pass, PassRunner
from .draft_trials import DraftTrials
from .events import WorkEvent
from .load import Load
from .pass_clock import PassClock
from .prefixes import Match, Prefix, PrefixCache
from .work import Answer, Demand, Free, Granted, PassGenerator, ReadLogits, ReadPass, Slots, Work

if TYPE_CHECKING:
    from .prefix_files import PrefixFolder

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
E = TypeVar("E")


def alone(work: Work[T] | PassGenerator[T]) -> T:
    """Run one generator to its end without its events; return its result."""

    def as_work() -> Work[T]:
        return (yield from work)

    with closing(Engine()) as engine:
        request = engine.add(as_work())
        while not request.is_done:
            for _ in engine.step():
                pass
        return request.result


def side_by_side(
    works: Iterable[Work[object]], at_once: int = 1, memory: int | None = None, by_time: bool = True
) -> Generator[WorkEvent, None, None]:
    """Run generators in an engine, adding each when the engine has a free slot; yield their events.

    If one fails, no further one is started, those in flight run to their ends, and its error is raised.

    Args: at_once, memory, by_time: see `Engine`.
    """
    pending_works, errors = iter(works), list[Exception]()
    with closing(Engine(memory, at_once, by_time)) as engine:
        while True:
            while not errors and engine.has_free_place and (work := next(pending_works, None)) is not None:
                engine.add(work)
            if not engine.requests:
                break
            running = list(engine.requests)
            yield from engine.step()
            errors += (request.error for request in running if request.error is not None)
    if errors:
        raise errors[0]


class Request(Generic[T_co]):
    """A running generator with its pending demand, its result or error, and the slots that it holds.

    The generator runs with the context variables of the caller that added it.
    """

    def __init__(self, work: Work[T_co]) -> None:
        self._work, self._context = work, copy_context()
        self.pending: Demand | None = None
        self.held: dict[Slots, KVBuffer] = {}
        self.is_new = True
        self.waits = False  # True while another request reads the same prefix.
        # Answer to a demand for slots, while stored blocks of the text are read into its buffer.
        self.granted: Granted | None = None
        self.stored_blocks: Iterator[tuple[int, Tensor | None]] = iter(())
        self.error: Exception | None = None
        self._result: list[T_co] = []

    @property
    def is_done(self) -> bool:
        return bool(self._result) or self.error is not None

    @property
    def result(self) -> T_co:
        """The generator's return value; raises the error that ended it."""
        if self.error is not None:
            raise self.error
        return self._result[0]

    @property
    def pass_(self) -> Pass | None:
        """The pass that the request waits for; None if it waits for something else."""
        demand = self.pending.pass_ if isinstance(self.pending, ReadPass) else self.pending
        return demand if isinstance(demand, Pass) else None

    @property
    def texts(self) -> Iterator[tuple[Prefix, int]]:
        """The texts in the request's buffers, each with its number of tokens read so far."""
        if (pass_ := self.pass_) is not None:
            for slots, buffer in self.held.items():
                n_read = pass_.rows.first_slot if pass_.buffer is buffer else len(slots.tokens)
                yield Prefix(slots, buffer, slots.tokens), n_read

    def send(self, answer: Answer) -> Iterator[WorkEvent]:
        """Send the answer to the pending demand (None to start), and run up to the next demand."""
        self.is_new = False
        return self._advance(partial(self._work.send, answer))

    def throw(self, error: Exception) -> Iterator[WorkEvent]:
        return self._advance(partial(self._work.throw, error))

    def close(self) -> None:
        self.pending = None
        self.held.clear()
        self._work.close()

    def _advance(self, resume_work: Callable[[], Demand | WorkEvent]) -> Iterator[WorkEvent]:
        self.pending = None
        while True:
            try:
                step = self._context.run(resume_work)
            except StopIteration as end:
                self._result.append(end.value)
                return self.held.clear()
            except Exception as error:
                clear_frames(error.__traceback__)  # Traceback frames keep the failed pass's tensors alive.
                self.error = error
                return self.held.clear()
            if isinstance(step, Demand):
                self.pending = step
                return None
            yield step
            resume_work = partial(next, self._work)


Waiting = tuple[Request[object], Pass]


MIN_SHARED_TOKENS = 32  # Minimum shared tokens for which a request waits while another one reads them.
READ_S = 0.05  # Seconds of a step after which no further stored block is read, because other requests wait.
MIN_SHARED_FRACTION = 1 / 4  # The shared tokens must be at least this share of those the request would read itself.
# Maximum share of the memory for spare slots. They can delay other requests or evict kept texts.
MAX_SPARE_FRACTION = 1 / 8


class Engine:
    """Runs requests concurrently, a step at a time; a request that fails does not affect the others.

    Args: memory: maximum bytes of buffers. Requests wait for buffers in the order of arrival. Prefixes read by finished
          requests are kept until their memory is needed. A request that begins with the same tokens continues from
          them, or from what another request has read or is reading; the bits are the same if kernels are
          row-invariant. None: no limit, and nothing is kept or shared.
          at_once: maximum number of concurrent requests, started in the order of arrival; None: all.
          by_time: whether drafting stops if measured time shows that it does not pay with several requests. Tokens do
          not depend on this, but drafts do, so they differ between runs.
          folder: folder to store prefixes on disk; used only if memory is limited.
    """

    def __init__(
        self,
        memory: int | None = None,
        at_once: int | None = None,
        by_time: bool = True,
        folder: PrefixFolder | None = None,
    ) -> None:
        self.requests: list[Request[object]] = []
        self.memory, self.at_once, self.by_time = memory, at_once, by_time
        self.folder = folder
        self.load = Load()
        self._clock = PassClock(self.load)
        self._trials: dict[int, DraftTrials] = {}  # Trials by number of concurrent sequences.
        # State since the latest target pass: whether anything was drafted, and the load and time at that pass.
        self._has_drafted, self._checked = False, (Load(checked=0), 0.0)
        self.prefixes = PrefixCache()

    @property
    def n_bytes(self) -> int:
        return sum(slots.bytes_of(buffer.capacity) for slots, buffer in self._held_buffers)

    @property
    def kept_bytes(self) -> int:
        return self.prefixes.n_bytes

    @property
    def _held_buffers(self) -> Iterator[tuple[Slots, KVBuffer]]:
        return (slots_and_buffer for request in self.requests for slots_and_buffer in request.held.items())

    @property
    def has_free_place(self) -> bool:
        """Whether one more request would start with the next step."""
        return self.at_once is None or len(self.requests) < self.at_once

    def add(self, work: Work[T]) -> Request[T]:
        """Add a generator; it starts with the first step at which a place is free."""
        request = Request(work)
        self.requests.append(request)
        return request

    def cancel(self, request: Request[object]) -> None:
        """Stop a request and free its buffer at once."""
        request.close()
        with suppress(ValueError):
            self.requests.remove(request)

    @torch.inference_mode()
    def step(self) -> Iterator[WorkEvent]:
        """Start new requests, then run all waiting draft passes, or else all waiting passes, and send their logits.

        Yields the requests' events; the caller must exhaust it before the next step.
        """
        yield from self._start_new_requests()
        yield from self._serve_slots()
        # No local variable of a finished pass may keep a freed buffer alive while slots are granted.
        ran_target = yield from self._run_passes()
        if ran_target and self.by_time:
            self._time_round()
        yield from self._serve_slots()
        self.requests = [request for request in self.requests if not request.is_done]
        if not self.requests:
            self.load.checked, self.load.drafts = 1, True

    def _run_passes(self) -> Generator[WorkEvent, None, bool]:
        """Run all waiting draft passes, or else all waiting passes; return whether these were passes of the target."""
        waiting_passes = [(request, pass_) for request in self.requests if (pass_ := request.pass_) is not None]
        draft_passes = [(request, pass_) for request, pass_ in waiting_passes if pass_.kind == "draft"]
        if draft_passes:
            self.load.drafted, self._has_drafted = len(draft_passes), True
        else:
            self._has_drafted |= any(len(pass_.rows.token_ids) > 1 for _, pass_ in waiting_passes)
            self.load.checked = max(1, len(waiting_passes))
            self.load.n_checks += not all(pass_.kind == "beside" for _, pass_ in waiting_passes)
            self.load.n_beside += any(pass_.kind == "beside" for _, pass_ in waiting_passes)
        groups: dict[tuple[PassRunner, tuple[int, int] | None], list[Waiting]] = {}
        for request, pass_ in draft_passes or waiting_passes:
            groups.setdefault((pass_.runtime, pass_.layers), []).append((request, pass_))
        for (runtime, _), group in groups.items():
            n_first_before = runtime.n_first
            yield from self._run_group(group)
            # A first pass is slower (compilation, capture), so exclude it from timing.
            self.load.n_beside += runtime.n_first > n_first_before
        return bool(waiting_passes) and not draft_passes

    def _run_group(self, group: list[Waiting]) -> Iterator[WorkEvent]:
        answers, has_evictable = None, len(self.prefixes) > 0
        passes, runtime = [pass_ for _, pass_ in group], group[0][1].runtime
        started, paused_s, n_first_before = perf_counter(), 0.0, runtime.n_first
        try:
            answers = _pair_answers(group, runtime.forward_together(passes))
        except Exception as error:
            has_evictable = has_evictable and is_out_of_memory(error)
            if len(group) == 1 and not has_evictable:
                yield from group[0][0].throw(error)
                return
        if answers is None:  # Retry outside the `except` block: the exception keeps the failed pass's tensors alive.
            # Retry without the kept texts, or pass by pass, so that only the request that cannot run fails.
            runtime.taken_experts()
            retry_groups = [group] if has_evictable else [[member] for member in group]
            if has_evictable:
                self.prefixes.clear()
            for retry_group in retry_groups:
                yield from self._run_group(retry_group)
            return
        for pass_index, ((request, pass_), answer) in enumerate(zip(group, answers, strict=True)):
            if request.pass_ is pass_:  # Skip a request that was cancelled in the meantime.
                for event in request.send(answer):
                    paused_at = perf_counter()
                    yield event
                    paused_s += perf_counter() - paused_at
            if pass_index == 0:  # Time the passes at the first answer: reading it waits for all of them.
                ended, experts = perf_counter() - paused_s, runtime.taken_experts()
                self._clock.add(passes, started, ended, runtime.n_first == n_first_before, experts)
                self.prefixes.costs.learn(passes, ended - started)

    def _time_round(self) -> None:
        """Time the round that ends here, if it only decoded, and decide whether the next one may draft."""
        load, (load_before, checked_at), now = self.load, self._checked, perf_counter()
        if load.checked not in self._trials:
            self._trials[load.checked] = DraftTrials.beginning(load.checked, self._trials.values())
        trials = self._trials[load.checked]
        if (load.checked, load.n_beside) == (load_before.checked, load_before.n_beside):
            # Some methods cannot stop drafting, so count a round as drafted only if drafting was allowed when the round
            # began.
            trials.add(self._has_drafted and load_before.drafts, load.n_tokens - load_before.n_tokens, now - checked_at)
        self._has_drafted, self._checked = False, (replace(load), now)
        load.drafts = load.checked == 1 or trials.drafts

    def _start_new_requests(self) -> Iterator[WorkEvent]:
        n_running = sum(not request.is_new for request in self.requests)
        for request in [request for request in self.requests if request.is_new]:
            if self.at_once is not None and n_running >= self.at_once:
                break
            yield from request.send(None)
            n_running += not request.is_done

    def forget_owners(self, is_gone: Callable[[str], bool]) -> None:
        """Delete prefixes of removed owners, also on disk."""
        self.prefixes.forget_owners(is_gone)
        if self.folder is not None:
            self.folder.forget_owners(is_gone)

    def close(self) -> None:
        while self.requests:
            self.cancel(self.requests[-1])

    def _serve_slots(self) -> Iterator[WorkEvent]:
        """Take back freed buffers and grant new ones in the order of arrival, as far as memory allows.

        `promised_bytes` are the bytes of requests that wait until others have read their prefix.
        """
        is_full, promised_bytes = False, 0
        for request in list(self.requests):
            while isinstance(demand := request.pending, Slots | Free):
                if isinstance(demand, Free):
                    self._keep(demand, request.held.pop(demand.slots))
                    yield from request.send(None)
                elif demand in request.held:
                    if (granted := self._read_stored(request)) is None:
                        break
                    yield from request.send(granted)
                elif self.memory is not None and demand.n_bytes > self.memory:
                    yield from request.throw(_too_long_error(demand, self.memory))
                elif is_full or not self._fits(promised_bytes + demand.bytes_of(demand.first)):
                    is_full = True  # Later requests must not overtake this one.
                    break
                elif self._is_being_read(request, demand):
                    promised_bytes += demand.bytes_of(demand.first)
                    break
                else:
                    try:
                        buffer, n_read, state = self._grant_buffer(demand, promised_bytes)
                    except Exception as error:
                        yield from request.throw(error)
                        continue
                    request.held[demand] = buffer
                    request.granted = Granted(buffer, n_read, state, self.load)
                    request.stored_blocks = self._stored_blocks(demand, buffer, n_read)

    def _stored_blocks(self, slots: Slots, buffer: KVBuffer, n_filled: int) -> Iterator[tuple[int, Tensor | None]]:
        """Return an iterator that reads the text's blocks from disk, if they have more of it than any buffer."""
        folder = self.folder
        if folder is None or folder.n_stored(slots) < n_filled + MIN_SHARED_TOKENS:
            return iter(())
        return folder.reading(slots, buffer, n_filled)

    def _read_stored(self, request: Request[object]) -> Granted | None:
        """Read a request's stored blocks for a moment; return the answer to its demand once all are read."""
        assert request.granted is not None
        until = perf_counter() + READ_S
        for n_read, state in request.stored_blocks:
            self.load.n_beside += 1
            request.granted = request.granted._replace(n_read=n_read, state=state)
            if perf_counter() > until:
                return None
        # A request that ends, or whose buffer grows, must not hold this buffer.
        granted, request.granted, request.stored_blocks = request.granted, None, iter(())
        return granted

    def _fits(self, n_bytes: int) -> bool:
        return self.memory is None or self.n_bytes + n_bytes <= self.memory

    def _is_being_read(self, request: Request[object], slots: Slots) -> bool:
        """Return whether the request should wait until an earlier one has read the same prefix.

        Waiting costs at most one more pass, because the two requests' passes would run together.
        """
        if self.memory is None or slots.runtime.recurrent:  # A state that has advanced cannot be shared.
            return False
        tokens, (n_read, _) = slots.tokens[:-1], self._longest_prefix(slots)
        earlier_requests = takewhile(lambda other_request: other_request is not request, self.requests)
        running_texts = (
            text
            for other_request in earlier_requests
            for text, n_text_read in other_request.texts
            if n_text_read >= n_read
        )
        n_saved = max((text.common(slots, tokens) for text in running_texts), default=0) - n_read
        min_saved = 1 if request.waits else max(MIN_SHARED_TOKENS, MIN_SHARED_FRACTION * (len(tokens) - n_read))
        request.waits = n_saved >= min_saved
        return request.waits

    def _grant_buffer(self, slots: Slots, promised_bytes: int) -> tuple[KVBuffer, int, Tensor | None]:
        """Return a buffer, the number of slots copied from another request's buffer, and that request's state."""
        min_capacity = slots.capacity if self.memory is None else slots.first
        for capacity in dict.fromkeys((min_capacity + self._spare_slots(slots, promised_bytes), min_capacity)):
            try:
                return self._new_buffer(slots, capacity)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
        self.prefixes.clear()  # Evict kept texts before letting the request fail.
        return self._new_buffer(slots, min_capacity)

    def _spare_slots(self, slots: Slots, promised_bytes: int) -> int:
        """Return how many of the requested spare slots a buffer gets, within `MAX_SPARE_FRACTION` of the memory."""
        if self.memory is None:
            return slots.spare
        spare_bytes_used = sum(
            held_slots.bytes_per_slot * (buffer.capacity - held_slots.first)
            for held_slots, buffer in self._held_buffers
        )
        free_bytes = self.memory - self.n_bytes - promised_bytes - slots.bytes_of(slots.first)
        return max(
            0,
            min(
                slots.spare,
                min(int(MAX_SPARE_FRACTION * self.memory) - spare_bytes_used, free_bytes) // slots.bytes_per_slot,
            ),
        )

    def _longest_prefix(self, slots: Slots) -> Match:
        """Return the longest prefix of a text that some buffer holds, and the latest such buffer."""
        tokens = slots.tokens[:-1]  # The last token is always read again, for its logits.
        longest = self.prefixes.longest(slots, tokens)
        if self.memory is not None:
            for text, n_read in (text for request in self.requests for text in request.texts):
                n_tokens = text.reachable(slots, tokens[:n_read])
                if n_tokens and n_tokens >= longest.n_tokens:
                    longest = Match(n_tokens, text)
        return longest

    def _new_buffer(self, slots: Slots, capacity: int) -> tuple[KVBuffer, int, Tensor | None]:
        n_filled, prefix = self._longest_prefix(slots)
        n_bytes = slots.bytes_of(capacity)
        if prefix is not None:
            self.prefixes.use(prefix, n_filled)
        self._make_room(n_bytes, keep=prefix)
        buffer = slots.runtime.new_buffer(capacity, slots.rows, slots.lag)
        buffer.coding = slots.coding
        if buffer.states is not None:
            buffer.states.keeps_snapshots = self.memory is not None
        if prefix is None:
            return buffer, 0, None
        buffer.copy_from(prefix.buffer, n_filled)
        self._make_room(n_bytes)
        return buffer, n_filled, prefix.slots.state

    def _keep(self, freed: Free, buffer: KVBuffer) -> None:
        """Keep a freed buffer for reuse, and drop kept texts that are prefixes of it."""
        if self.memory is None:
            return
        if freed.token_ids:
            prefix = Prefix(freed.slots, buffer, np.array(freed.token_ids, np.int64))
            self.prefixes.add(prefix)
            if self.folder is not None:
                self.folder.store(prefix)
        self._make_room(0)

    def _make_room(self, n_bytes: int, keep: Prefix | None = None) -> None:
        """Evict the least valuable texts, never `keep`, until `n_bytes` fit in the memory."""
        if len(self.prefixes):
            assert self.memory is not None
            self.prefixes.evict(self.n_bytes + self.kept_bytes + n_bytes - self.memory, keep)


def _pair_answers(group: Sequence[Waiting], logits: Sequence[Tensor]) -> list[Tensor | ReadLogits]:
    """Return each request's answer, given the logits of its pass."""
    answers: list[Tensor | ReadLogits] = [*logits]
    read_demands = [
        (index, demand) for index, (request, _) in enumerate(group) if isinstance(demand := request.pending, ReadPass)
    ]
    if read_demands:
        numbers_per_pass = group[0][1].runtime.read_best(
            [logits[index] for index, _ in read_demands], [demand.unread for _, demand in read_demands]
        )
        for (index, _), numbers in zip(read_demands, numbers_per_pass, strict=True):
            answers[index] = ReadLogits(logits[index], numbers)
    return answers


def _too_long_error(slots: Slots, memory: int) -> ContextOverflow:
    most_tokens = slots.capacity * memory // max(1, slots.n_bytes)
    # Clients recognise this error by its first words, which are those of other servers.
    return ContextOverflow(
        f"this model's maximum context length is {most_tokens} tokens in the memory that it may take, but"
        f" {slots.capacity} tokens need {slots.n_bytes / 1e6:.0f} MB of keys and values, which may take"
        f" {memory / 1e6:.0f} MB: shorten the prompt or request fewer new tokens"
    )
