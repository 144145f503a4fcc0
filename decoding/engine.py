"""Whatever computes is a generator that yields what it needs; an engine runs any number of them side by side.

Such a generator yields a `Pass` and is sent its logits, or `Slots` and is sent a buffer. Whatever else it yields is an
event: the engine's caller gets it before the generator goes on, so that the state can be read or saved between any two
events. Generators that wait for passes of one model share a forward pass: its weights are read once for all of their
rows. A round's draft passes go first, until every sequence waits for its target.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import takewhile
from operator import itemgetter
from time import perf_counter
from traceback import clear_frames
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.errors import ContextOverflow
from ..models.buffer import KVBuffer
from ..models.costs import is_out_of_memory
from ..models.rows import Load, Pass
from ..models.runtime import Runtime
from .pass_clock import PassClock

T = TypeVar("T")
E = TypeVar("E")
Event = Any  # whatever is yielded beside demands
Work = Generator[Any, Any, T]  # yields demands and events; is sent what it demanded, None for an event
PassGenerator = Generator[Pass, Tensor, T]  # yields passes only; is sent the wanted logits (rows, vocab) of each


@dataclass(eq=False)
class Slots:
    """The demand for a buffer of `capacity` slots, for a text that begins with `token_ids`.

    The answer is the buffer, how many of its slots hold that text's keys and values already (fewer than there are
    tokens), the `state` of the text that these are of, and the engine's load. Where memory is bounded the buffer has
    `first` slots; when they are full, the text frees them and asks for more. The text's passes write only behind what
    it has read. Only texts of one `salt` share any. `draft_slot_bytes` are those of drafting beside each slot. The
    buffer has up to `spare` slots more, for passes that the text does without where memory is short. `state` is the
    mean state of what is read of the text's prompt, for others that go on from it; None: not known.
    """

    runtime: Runtime
    capacity: int
    first: int
    token_ids: Sequence[int]
    salt: str = ""
    draft_slot_bytes: int = 0
    spare: int = 0
    state: Tensor | None = None

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        return np.array(self.token_ids, np.int64)

    @property
    def n_bytes(self) -> int:
        return self.bytes_of(self.capacity)

    def bytes_of(self, n_slots: int) -> int:
        return n_slots * (self.runtime.slot_bytes + self.draft_slot_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """The buffer of those slots is not needed any more; it holds the keys and values of `token_ids`."""

    slots: Slots
    token_ids: Sequence[int]


DEMANDS = (Pass, Slots, Free)


def alone(work: Work[T]) -> T:
    """Run one generator to its end, dropping its events; return what it returns."""
    with closing(Engine()) as engine:
        request = engine.add(work)
        while not request.is_done:
            for _ in engine.step():
                pass
        return request.result


def side_by_side(
    works: Iterable[Work[Any]], at_once: int = 1, memory: int | None = None, by_time: bool = True
) -> Generator[Event, None, None]:
    """Run generators in an engine, each added when there is a place for it; yield their events as they come.

    When one fails no other is started, those in flight run to their ends, and its error is raised.

    Args: at_once, memory, by_time: see `Engine`.
    """
    waiting, errors = iter(works), list[Exception]()
    with closing(Engine(memory, at_once, by_time)) as engine:
        while True:
            while not errors and engine.has_place and (work := next(waiting, None)) is not None:
                engine.add(work)
            if not engine.requests:
                break
            running = list(engine.requests)
            yield from engine.step()
            errors += (request.error for request in running if request.error is not None)
    if errors:
        raise errors[0]


def exhaust(events: Generator[E, None, T], on_event: Callable[[E], None] = lambda event: None) -> T:
    """Pass all events of a generator to `on_event`; return what it returns."""
    while True:
        try:
            on_event(next(events))
        except StopIteration as end:
            result: T = end.value
            return result


def intercept(work: Work[T], handle: Callable[[Event], Iterator[Any]]) -> Work[T]:
    """Yield what a generator demands, and in place of each of its events what `handle` yields for it."""
    with closing(work):
        answer: Any = None
        error: Exception | None = None
        while True:
            try:
                step = work.send(answer) if error is None else work.throw(error)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = error = None
            if not isinstance(step, DEMANDS):
                yield from handle(step)
                continue
            try:
                answer = yield step
            except Exception as failure:
                error = failure


class Request(Generic[T]):
    """A generator in flight: the demand that it waits for, its result or error, and the slots that it holds."""

    def __init__(self, work: Work[T]) -> None:
        self._work = work
        self.wanted: Pass | Slots | Free | None = None
        self.held: dict[Slots, KVBuffer] = {}
        self.is_new = True
        self.waits = False  # for another to read what it begins with
        self.error: Exception | None = None
        self._result: list[T] = []

    @property
    def is_done(self) -> bool:
        return bool(self._result) or self.error is not None

    @property
    def result(self) -> T:
        """What the generator returned; raises what it raised."""
        if self.error is not None:
            raise self.error
        return self._result[0]

    @property
    def texts(self) -> Iterator[tuple[_Prefix, int]]:
        """What it reads or has read, and how many tokens of each so far."""
        if isinstance(wanted := self.wanted, Pass):
            for slots, buffer in self.held.items():
                n_read = wanted.rows.first_slot if wanted.buffer is buffer else len(slots.tokens)
                yield _Prefix(slots, buffer, slots.tokens), n_read

    def send(self, answer: Any) -> Iterator[Event]:
        """Send what it waits for (None: it begins), and run up to its next demand."""
        self.is_new = False
        return self._advance(partial(self._work.send, answer))

    def throw(self, error: Exception) -> Iterator[Event]:
        return self._advance(partial(self._work.throw, error))

    def close(self) -> None:
        self.wanted = None
        self.held.clear()
        self._work.close()

    def _advance(self, go_on: Callable[[], Any]) -> Iterator[Event]:
        self.wanted = None
        while True:
            try:
                step = go_on()
            except StopIteration as end:
                self._result.append(end.value)
                return self.held.clear()
            except Exception as error:
                clear_frames(error.__traceback__)  # they hold what a failed pass held in memory
                self.error = error
                return self.held.clear()
            if isinstance(step, DEMANDS):
                self.wanted = step
                return None
            yield step
            go_on = partial(next, self._work)


@dataclass(slots=True)
class _Prefix:
    """What a request read, for others to go on from."""

    slots: Slots
    buffer: KVBuffer
    token_ids: NDArray[np.int64]

    def common(self, slots: Slots, token_ids: NDArray[np.int64]) -> int:
        """Return how many of its slots a text of those tokens can go on from."""
        if self.slots.runtime is not slots.runtime or self.slots.salt != slots.salt:
            return 0
        n = min(len(self.token_ids), len(token_ids))
        same = self.token_ids[:n] == token_ids[:n]
        return n if same.all() else int(same.argmin())


LEAST_SHARED = 32  # tokens that a request waits for another to read
SHARE_WAITED_FOR = 1 / 4  # of what it would read itself, at least
SPARE_SHARE = 1 / 8  # of an engine's memory, that spare slots may take: requests wait for it, or lose what is kept
PLAIN_ROUNDS = 3  # of a trial of plain decoding
DRAFTED_ROUNDS = 64  # of a trial of drafts, of all sequences together
FIRST_WAIT, LAST_WAIT = 128, 512  # rounds between two trials of the way that is not in use
LEAST_GAIN = 1.1  # below, drafts bring less than it costs that sequences end, and prompts are read, apart


@dataclass(slots=True)
class _Rounds:
    """Tokens and seconds of rounds of one kind, of which old ones fade; `n` since the latest trial began."""

    n: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float, memory: float = 0.97) -> None:
        self.n += 1
        self.tokens, self.seconds = memory * self.tokens + tokens, memory * self.seconds + seconds

    def try_again(self) -> None:
        self.n, self.tokens, self.seconds = 0, self.tokens / 4, self.seconds / 4


@dataclass(slots=True)
class DraftTrials:
    """Whether drafts pay with `n_sequences` side by side, by measured time.

    The more rows a pass has, the less drafts pay, and a sequence cannot know from where on: that depends on what the
    others add, and all wait for those that draft. So rounds in which any sequence drafted are compared with plain ones.
    The first few are plain; then the faster way is used, and the other tried ever more rarely while it stays slower.
    """

    n_sequences: int
    plain: _Rounds = field(default_factory=_Rounds)
    drafted: _Rounds = field(default_factory=_Rounds)
    paid: bool = True  # by the latest comparison
    idle: int = 0  # rounds since the latest trial
    wait: int = FIRST_WAIT

    @classmethod
    def beginning(cls, n_sequences: int, others: Iterable[DraftTrials]) -> Self:
        """Return those of a new number of sequences; where drafts lost with nearly as many, no trial is due."""
        own = cls(n_sequences)
        tried = [other for other in others if other.drafted.seconds]
        near = min(tried, key=lambda other: abs(other.n_sequences - n_sequences), default=own)
        if not near.paid and 4 * abs(near.n_sequences - n_sequences) <= n_sequences:
            own.paid, own.drafted.n = False, DRAFTED_ROUNDS
        return own

    @property
    def drafts(self) -> bool:
        """Whether the next round may draft."""
        return self.plain.n >= PLAIN_ROUNDS and (self.paid or self._tries_drafts)

    @property
    def _tries_drafts(self) -> bool:
        return self.drafted.n * self.n_sequences < DRAFTED_ROUNDS

    def add(self, drafted: bool, tokens: int, seconds: float) -> None:
        """Learn from a round of all sequences."""
        (self.drafted if drafted else self.plain).add(tokens, seconds)
        if self.plain.n < PLAIN_ROUNDS or self._tries_drafts:
            return
        gain = self.drafted.tokens * self.plain.seconds - LEAST_GAIN * self.plain.tokens * self.drafted.seconds
        before, self.paid = self.paid, gain > 0
        self.idle += 1
        if before != self.paid:
            self.idle, self.wait = 0, FIRST_WAIT
        elif self.idle >= self.wait:
            self.idle, self.wait = 0, min(2 * self.wait, LAST_WAIT)
            (self.plain if self.paid else self.drafted).try_again()


class Engine:
    """Runs requests side by side, a step at a time; a request that fails leaves the others alone.

    Args: memory: most bytes that buffers may take. Requests wait for theirs in the order of arrival. What finished ones
          read is kept until its memory is needed, and a request that begins with the same tokens goes on from there, or
          from what another has read or is reading, with the same bits where kernels are row-invariant. None: no
          limit, and nothing is kept or shared.
          at_once: most requests that run together, started in the order of arrival; None: all.
          by_time: whether drafts beside others stop where measured time says that they do not pay. Tokens do not depend
          on it; what is drafted does, and so is not the same in every run.
    """

    def __init__(self, memory: int | None = None, at_once: int | None = None, by_time: bool = True) -> None:
        self.requests: list[Request[Any]] = []
        self.memory, self.at_once, self.by_time = memory, at_once, by_time
        self.load = Load()
        self._clock = PassClock(self.load)
        self._trials: dict[int, DraftTrials] = {}  # by the number of sequences
        self._drafting, self._checked = False, (Load(checked=0), 0.0)  # since the latest check; the load and time then
        self._kept: list[_Prefix] = []  # the latest used last

    @property
    def n_bytes(self) -> int:
        return sum(slots.bytes_of(buffer.capacity) for slots, buffer in self._held)

    @property
    def kept_bytes(self) -> int:
        return sum(kept.buffer.capacity * kept.slots.runtime.slot_bytes for kept in self._kept)

    @property
    def _held(self) -> Iterator[tuple[Slots, KVBuffer]]:
        return (held for request in self.requests for held in request.held.items())

    @property
    def has_place(self) -> bool:
        """Whether one more would begin with the next step."""
        return self.at_once is None or len(self.requests) < self.at_once

    def add(self, work: Work[T]) -> Request[T]:
        """Add a generator; it begins with the next step that has a place for it."""
        request = Request(work)
        self.requests.append(request)
        return request

    def cancel(self, request: Request[Any]) -> None:
        """Stop a request; its buffer is free at once."""
        request.close()
        with suppress(ValueError):
            self.requests.remove(request)

    @torch.inference_mode()
    def step(self) -> Iterator[Event]:
        """Begin what is new, then run the draft passes that wait, or else all that wait, and send their logits.

        Yields the events that arise; to be run to its end before the next step.
        """
        yield from self._begin()
        yield from self._serve_slots()
        checked = yield from self._run_passes()  # which holds no buffer any more when those that are free are given out
        if checked and self.by_time:
            self._compare()
        yield from self._serve_slots()
        self.requests = [request for request in self.requests if not request.is_done]
        if not self.requests:
            self.load.checked, self.load.drafts = 1, True

    def _run_passes(self) -> Generator[Event, None, bool]:
        """Run the draft passes that wait, or else all that wait; return whether these were checks of the target."""
        waiting = [(request, request.wanted) for request in self.requests if isinstance(request.wanted, Pass)]
        drafting = [(request, wanted) for request, wanted in waiting if wanted.drafts]
        if drafting:
            self.load.drafted, self._drafting = len(drafting), True
        else:
            self._drafting |= any(len(wanted.rows.token_ids) > 1 for _, wanted in waiting)
            self.load.checked = max(1, len(waiting))
            self.load.n_checks += not all(wanted.beside for _, wanted in waiting)
            self.load.n_beside += any(wanted.beside for _, wanted in waiting)
        together: dict[Any, list[tuple[Request[Any], Pass]]] = {}
        for request, wanted in drafting or waiting:
            together.setdefault((wanted.runtime, wanted.layers), []).append((request, wanted))
        for (runtime, _), some in together.items():
            n_first = runtime.n_first
            yield from self._run(some)
            self.load.n_beside += runtime.n_first > n_first  # its time tells nothing of later rounds
        return bool(waiting) and not drafting

    def _run(self, some: list[tuple[Request[Any], Pass]]) -> Iterator[Event]:
        logits, kept = None, self._kept
        passes, runtime = [wanted for _, wanted in some], some[0][1].runtime
        started, away, n_first = perf_counter(), 0.0, runtime.n_first
        try:
            logits = runtime.forward_together(passes)
        except Exception as error:
            kept = kept if is_out_of_memory(error) else []
            if len(some) == 1 and not kept:
                yield from some[0][0].throw(error)
                return
        if logits is None:  # here, and not where the error keeps what the pass held in memory
            # All again without what was kept, or one by one, so that only the request whose pass it was fails.
            again = [some] if kept else [[each] for each in some]
            kept.clear()
            for each in again:
                yield from self._run(each)
            return
        for number, ((request, wanted), own) in enumerate(zip(some, logits, strict=True)):
            if request.wanted is wanted:  # not cancelled meanwhile
                for event in request.send(own):
                    left = perf_counter()
                    yield event
                    away += perf_counter() - left
            if number == 0:  # whose reader waited for the logits of all
                self._clock.add(passes, started, perf_counter() - away, runtime.n_first == n_first)

    def _compare(self) -> None:
        """Learn what the round that ends here took, if all of it was decoding, and whether the next one may draft."""
        load, (before, since), now = self.load, self._checked, perf_counter()
        if load.checked not in self._trials:
            self._trials[load.checked] = DraftTrials.beginning(load.checked, self._trials.values())
        trials = self._trials[load.checked]
        if (load.checked, load.n_beside) == (before.checked, before.n_beside):
            # Methods that cannot stop draft in either kind of round. This one was begun as the round before it ended.
            trials.add(self._drafting and before.drafts, load.n_tokens - before.n_tokens, now - since)
        self._drafting, self._checked = False, (replace(load), now)
        load.drafts = load.checked == 1 or trials.drafts

    def _begin(self) -> Iterator[Event]:
        n_running = sum(not request.is_new for request in self.requests)
        for request in [each for each in self.requests if each.is_new]:
            if self.at_once is not None and n_running >= self.at_once:
                break
            yield from request.send(None)
            n_running += not request.is_done

    def close(self) -> None:
        while self.requests:
            self.cancel(self.requests[-1])

    def _serve_slots(self) -> Iterator[Event]:
        """Take back what is free, and give out buffers in the order of arrival as far as memory goes."""
        full, promised = False, 0  # bytes for those that wait for others to read
        for request in list(self.requests):
            while isinstance(wanted := request.wanted, Slots | Free):
                if isinstance(wanted, Free):
                    self._keep(wanted, request.held.pop(wanted.slots))
                    yield from request.send(None)
                elif self.memory is not None and wanted.n_bytes > self.memory:
                    yield from request.throw(_too_long(wanted, self.memory))
                elif full or not self._fits(promised + wanted.bytes_of(wanted.first)):
                    full = True  # no later request is served before it
                    break
                elif self._is_being_read(request, wanted):
                    promised += wanted.bytes_of(wanted.first)
                    break
                else:
                    try:
                        buffer, *known = self._buffer(wanted, promised)
                    except Exception as error:
                        yield from request.throw(error)
                        continue
                    request.held[wanted] = buffer
                    yield from request.send((buffer, *known, self.load))

    def _fits(self, n_bytes: int) -> bool:
        return self.memory is None or self.n_bytes + n_bytes <= self.memory

    def _is_being_read(self, request: Request[Any], wanted: Slots) -> bool:
        """Whether an earlier request is reading so much of a text that this one had better wait, then go on from it.

        As their passes would run together, that takes one pass more at most.
        """
        if self.memory is None:
            return False
        tokens, (now, _) = wanted.tokens[:-1], self._longest(wanted)
        earlier = takewhile(lambda each: each is not request, self.requests)
        foremost = (text for one in earlier for text, n_read in one.texts if n_read >= now)
        gain = max((text.common(wanted, tokens) for text in foremost), default=0) - now
        request.waits = gain >= (1 if request.waits else max(LEAST_SHARED, SHARE_WAITED_FOR * (len(tokens) - now)))
        return request.waits

    def _buffer(self, wanted: Slots, promised: int) -> tuple[KVBuffer, int, Tensor | None]:
        """Return a buffer with as much of the text as another request has read, how much, and that one's state."""
        least = wanted.capacity if self.memory is None else wanted.first
        for capacity in dict.fromkeys((least + self._spare(wanted, promised), least)):
            try:
                return self._filled(wanted, capacity)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
        self._kept.clear()  # before the request fails
        return self._filled(wanted, least)

    def _spare(self, wanted: Slots, promised: int) -> int:
        """Return how many spare slots there are for a buffer: all that are wanted, as far as a share of memory goes."""
        if self.memory is None:
            return wanted.spare
        taken = sum(slots.bytes_of(buffer.capacity - slots.first) for slots, buffer in self._held)
        left = self.memory - self.n_bytes - promised - wanted.bytes_of(wanted.first)
        return max(0, min(wanted.spare, min(int(SPARE_SHARE * self.memory) - taken, left) // wanted.bytes_of(1)))

    def _longest(self, wanted: Slots) -> tuple[int, _Prefix | None]:
        """Return how much of a text has been read, and where; where several have, the latest.

        So a beginning that many have in common puts none before those used after it.
        """
        tokens = wanted.tokens[:-1]  # the last one is always read
        found = [(each.common(wanted, tokens), each) for each in self._kept]
        if self.memory is not None:
            running = (text for one in self.requests for text in one.texts)
            found += [(min(n_read, text.common(wanted, tokens)), text) for text, n_read in running]
        n, best = max(reversed(found), key=itemgetter(0), default=(0, None))
        return n, best if n else None

    def _filled(self, wanted: Slots, capacity: int) -> tuple[KVBuffer, int, Tensor | None]:
        n_filled, best = self._longest(wanted)
        n_bytes = wanted.bytes_of(capacity)
        # The one that is used goes to the end.
        self._kept.sort(key=lambda kept: kept is best)
        self._make_room(n_bytes, keep=sum(kept is best for kept in self._kept))
        buffer = wanted.runtime.new_buffer(capacity)
        if best is None:
            return buffer, 0, None
        buffer.copy_from(best.buffer, n_filled)
        self._make_room(n_bytes)
        return buffer, n_filled, best.slots.state

    def _keep(self, freed: Free, buffer: KVBuffer) -> None:
        """Keep what a request read for others to go on from, in place of shorter ones that it contains."""
        if self.memory is None:
            return
        new = _Prefix(freed.slots, buffer, np.array(freed.token_ids, np.int64))
        self._kept = [kept for kept in self._kept if kept.common(new.slots, new.token_ids) < len(kept.token_ids)]
        self._kept.append(new)
        self._make_room(0)

    def _make_room(self, n_bytes: int, keep: int = 0) -> None:
        """Drop what was not used for longest, until so many bytes are free; not the latest `keep`."""
        assert self.memory is not None or not self._kept
        while len(self._kept) > keep:
            if self.n_bytes + self.kept_bytes + n_bytes <= (self.memory or 0):
                return
            del self._kept[0]


def _too_long(wanted: Slots, memory: int) -> ContextOverflow:
    return ContextOverflow(
        f"the prompt is too long, or too many new tokens are to follow ({wanted.capacity} tokens need"
        f" {wanted.n_bytes / 1e6:.0f} MB of keys and values, which may take {memory / 1e6:.0f} MB):"
        " shorten the prompt or ask for fewer new tokens"
    )
