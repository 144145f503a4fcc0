"""Types of the generators that an engine runs: what they yield and receive.

Such a generator yields a `Demand` and is sent its `Answer`: the logits of a `Pass`, or a buffer for `Slots`. Everything
else that it yields is an event, a `WorkEvent`. The caller receives it before the generator continues, so the state can
be read or saved between any two events. Then its subscribers receive it (`subscribed`), which may demand passes and
report events themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..models.buffer import KVBuffer
from ..models.coded_slots import SlotCoding
from ..models.rows import Pass
from ..models.runtime import Runtime
from .events import WorkEvent
from .load import Load

T = TypeVar("T")
E = TypeVar("E")


@dataclass(frozen=True, slots=True, eq=False)
class ReadPass:
    """Demand for a pass whose argmaxes are read at once, together with other numbers still on its device.

    The answer contains the logits, and the most probable token of each row (the first of equal ones), followed by the
    numbers of `unread`. Numbers of all passes that run together are moved from the device in one transfer.
    """

    pass_: Pass
    unread: Tensor | None = None

    def run(self) -> Generator[ReadPass, ReadLogits, ReadLogits]:
        return (yield self)


class ReadLogits(NamedTuple):
    """Answer to a `ReadPass`."""

    logits: Tensor
    numbers: list[float]


@dataclass(eq=False)
class Slots:
    """Demand for a buffer of `capacity` slots, for a text that begins with `token_ids`.

    The answer is a `Granted` buffer. If memory is bounded it has `first` slots; when they are full, the text frees
    them and demands more. The text's passes write only after its read part. Only texts with the same `salt` share
    slots. `draft_slot_bytes` is the memory for drafting per slot. The buffer has up to `spare` additional slots, for
    passes that are skipped if memory is short. `state` is the mean state of the prompt read so far, for texts that
    continue from it; None: unknown. Recurrent layers need `rows`, the maximum rows of a pass after committed text, and
    `lag`, the number of committed slots that rows of a search may leave unread. `coding` defines how drafts read slots.
    """

    runtime: Runtime
    capacity: int
    first: int
    token_ids: Sequence[int]
    salt: str = ""
    draft_slot_bytes: int = 0
    spare: int = 0
    state: Tensor | None = None
    rows: int = 1
    lag: int = 0
    coding: SlotCoding | None = None

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        return np.array(self.token_ids, np.int64)

    @property
    def n_bytes(self) -> int:
        return self.bytes_of(self.capacity)

    @property
    def bytes_per_slot(self) -> int:
        coded = 0 if self.coding is None else self.coding.slot_bytes
        return self.runtime.slot_bytes + self.draft_slot_bytes + coded

    def bytes_of(self, n_slots: int) -> int:
        return n_slots * self.bytes_per_slot + self.runtime.state_bytes(self.rows, self.lag)

    def acquire(self) -> Generator[Slots, Granted, Granted]:
        return (yield self)


class Granted(NamedTuple):
    """Answer to `Slots`: a buffer whose first `n_read` slots already hold the text's keys and values.

    `n_read` is smaller than the number of tokens; `state` is that of the text that was read. `load` is the engine's.
    """

    buffer: KVBuffer
    n_read: int
    state: Tensor | None
    load: Load


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """Returns the buffer of `slots`, which holds the keys and values of `token_ids`, to the engine."""

    slots: Slots
    token_ids: Sequence[int]


Demand = Pass | ReadPass | Slots | Free
Answer = Tensor | ReadLogits | Granted | None  # None answers `Free` demands and events.
PassGenerator = Generator[Pass, Tensor, T]  # Yields passes only; receives each one's logits (rows, vocab).
Work = Generator[Demand | WorkEvent, Answer, T]
Subscriber = Callable[[WorkEvent], Work[None] | None]  # May return work to run before the generator continues.


def exhaust(events: Generator[E, None, T], on_event: Callable[[E], None] = lambda event: None) -> T:
    """Pass all events of a generator to `on_event`; return the generator's result."""
    while True:
        try:
            on_event(next(events))
        except StopIteration as end:
            return_value: T = end.value
            return return_value


def subscribed(work: Work[T], subscriber: Subscriber) -> Work[T]:
    """Run a generator, and pass each event to `subscriber` after the caller has received it.

    The subscriber's demands and events follow the event, before the generator continues.
    """
    with closing(work):
        answer: Answer = None
        error: Exception | None = None
        while True:
            try:
                demand_or_event = work.send(answer) if error is None else work.throw(error)
            except StopIteration as end:
                return_value: T = end.value
                return return_value
            answer = error = None
            if not isinstance(demand_or_event, Demand):
                yield demand_or_event
                yield from subscriber(demand_or_event) or ()
                continue
            try:
                answer = yield demand_or_event
            except Exception as raised:
                error = raised
