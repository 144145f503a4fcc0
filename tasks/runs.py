"""Run methods by turns on the same prompts in one process, so that disturbances of the machine affect all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

from ..core.errors import SwiftoptError
from ..core.types import Completion, Prompt
from ..decoding.engine import alone
from ..decoding.methods import Method
from ..decoding.session import Session
from ..optimizer.search import Search
from ..optimizer.verdict import Timed
from .measures import EnergyMeter

WARM_UP_TOKENS = 4
SLOWEST = 2.0  # times plain decoding's whole time that a method may take
FEWEST = 2  # prompts that a slow method decodes all the same: an interval needs two
Decoded = tuple[tuple[int, ...], Completion | None]
OnRun = Callable[[str, int, int, Timed], None]  # contender, prompt number from 0, prompts, figures


@dataclass(frozen=True, slots=True)
class Contender:
    """A named way to decode a prompt; `run` returns the tokens, and the completion if our own loop decoded."""

    name: str
    run: Callable[[Prompt], Decoded]


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt under one contender, prefill included."""

    token_ids: tuple[int, ...]
    seconds: float
    completion: Completion | None = None
    joules: float | None = None

    @property
    def timed(self) -> Timed:
        """Return tokens and seconds."""
        return Timed(len(self.token_ids), self.seconds)


@dataclass(slots=True)
class Runs:
    """A contender's runs by prompt number; `error` says why there are no more."""

    name: str
    by_prompt: dict[int, Run] = field(default_factory=dict)
    error: str | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds of all runs together."""
        return sum(run.seconds for run in self.by_prompt.values())


def decoding_with(session: Session, by: Method | Search) -> Callable[[Prompt], Decoded]:
    """Decode prompts of one turn with that method, or with what a search drafts with while it goes on."""

    def run(prompt: Prompt) -> Decoded:
        work = by.request(session, prompt) if isinstance(by, Search) else session.request(prompt, by)
        completion = alone(work)[0].completion
        return completion.token_ids, completion

    return run


class Interleaved:
    """Run the contenders, the first of which is the base, in an order that rotates from prompt to prompt.

    One that takes more than SLOWEST times the base's time stops after as many prompts as fit in that, FEWEST at least.
    One that fails runs no further and its error is recorded; the base's is raised. With `complete` every contender
    decodes every prompt, and any error is raised.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        prompts: Sequence[Prompt],
        meter: EnergyMeter | None = None,
        on_run: OnRun | None = None,
        complete: bool = False,
    ) -> None:
        self.contenders, self.prompts, self.complete = list(contenders), list(prompts), complete
        self.meter = meter or EnergyMeter(())
        self.on_run = on_run
        self.base = contenders[0].name
        self.runs = {contender.name: Runs(contender.name) for contender in contenders}

    def run(self) -> bool:
        """Warm up, then decode everything; return False if Ctrl-C came before the end. Finished runs are in `runs`."""
        try:
            for contender in self.contenders:
                self._guarded(contender.name, partial(contender.run, warm_up_prompt(self.prompts[0])))
            for number, prompt in enumerate(self.prompts):
                turn = number % len(self.contenders)
                for contender in [*self.contenders[turn:], *self.contenders[:turn]]:
                    if len(self.runs[contender.name].by_prompt) < self.affordable(contender.name):
                        self._guarded(contender.name, partial(self._one, contender, number, prompt))
        except KeyboardInterrupt:
            return False
        return True

    def affordable(self, name: str) -> int:
        """Return how many prompts a contender may decode, by its speed so far."""
        own, base = self.runs[name], self.runs[self.base]
        if self.complete or not own.by_prompt or not base.by_prompt or name == self.base:
            return len(self.prompts)
        per_prompt = own.seconds / len(own.by_prompt)
        allowed = SLOWEST * len(self.prompts) * base.seconds / len(base.by_prompt)
        return max(FEWEST, int(allowed / per_prompt))

    def _guarded(self, name: str, work: Callable[[], object]) -> None:
        if self.runs[name].error is not None:
            return
        try:
            work()
        except SwiftoptError as error:
            if self.complete or name == self.base:
                raise
            self.runs[name].error = str(error)

    def _one(self, contender: Contender, number: int, prompt: Prompt) -> None:
        before, clock = self.meter.read(), perf_counter()
        token_ids, completion = contender.run(prompt)
        seconds = perf_counter() - clock
        run = Run(token_ids, seconds, completion, self.meter.joules_since(before))
        self.runs[contender.name].by_prompt[number] = run
        if self.on_run is not None:
            self.on_run(contender.name, number, len(self.prompts), run.timed)


def warm_up_prompt(prompt: Prompt) -> Prompt:
    """Return the prompt with a short completion, which takes the first allocations out of the timing."""
    return replace(prompt, max_new_tokens=WARM_UP_TOKENS)
