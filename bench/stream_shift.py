"""A stream that changes its task: does acceptance come back to that of each task's own set (SWIFT Figure 7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..core.costs import CostProfile, expected_of
from ..core.events import PromptFinished, StreamShifted, TrialsDone
from ..core.settings import SwiftSettings
from ..core.types import Completion, LayerSet, Prompt, Sampling
from ..decoding.draft_models import SkippedTarget
from ..decoding.engine import exhaust
from ..decoding.session import Session
from ..models.costs import machine_name
from ..models.runtime import Runtime
from ..optimizer.drafting import drafting_with
from ..optimizer.tuning import Tuner

SCHEMA = "swiftopt.bench-stream-shift/1"
SETTLED_AFTER = 10  # prompts of a task after which its acceptance must be back
WITHIN = 0.05  # The largest gap to the acceptance of the task's own set.
RUNS = ("own", "kept", "adapted")  # Runs with each task's own set, with the first task's set, and as one stream.
STREAM = "stream"  # the task under which all are decoded as one

OnStep = Callable[[str], None]


def acceptance(runs: Sequence[Completion]) -> float | None:
    """Return that of all of them together; None where nothing was drafted."""
    drafted = sum(run.drafted for run in runs)
    return sum(run.accepted for run in runs) / drafted if drafted else None


class StreamShift:
    """The runs of the benchmark, on a stream whose prompts come task by task.

    Chats are cut to their first turn. `n_prompts` of each task are taken, or as many as it has.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompts: Sequence[Prompt],
        n_prompts: int,
        settings: SwiftSettings,
        max_new_tokens: int,
        costs: CostProfile,
        on_step: OnStep,
    ) -> None:
        self.runtime, self.settings, self.costs, self.on_step = runtime, settings, costs, on_step
        self.max_new_tokens = max_new_tokens
        self.tasks: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            self.tasks.setdefault(prompt.task, []).append(replace(prompt, turns=prompt.turns[:1]))
        self.tasks = {name: prompts_of_task[:n_prompts] for name, prompts_of_task in self.tasks.items()}
        self.session = Session(runtime, Sampling(), max_new_tokens)
        self.runs: dict[str, dict[str, list[Completion]]] = {kind: {name: [] for name in self.tasks} for kind in RUNS}
        self.shifts: list[dict[str, Any]] = []
        self.n_trials = 0

    def run(self) -> dict[str, Any]:
        """Return the object that `swiftopt bench stream-shift --json` prints.

        Ctrl-C ends it with what was decoded, once every task has a set of its own.
        """
        tuned = {name: self._tuned(name, prompts) for name, prompts in self.tasks.items()}
        first, interrupted = tuned[next(iter(tuned))], False
        try:
            for name, prompts in self.tasks.items():
                self._decode(self.runs["own"][name], f"{name}, its own set", *tuned[name], prompts)
            for name, prompts in self.tasks.items():
                self._decode(self.runs["kept"][name], f"{name}, the first task's set", *first, prompts)
            self._adapt()
        except KeyboardInterrupt:
            if not any(self.runs["own"].values()):
                raise
            interrupted = True
        results = []
        for name, prompts in self.tasks.items():
            figures = {kind: self._figures(runs[name]) for kind, runs in self.runs.items()}
            about = {"task": name, "prompts": len(prompts), "n_skipped": tuned[name][0].n_skipped}
            results.append({**about, **figures, **_gap(figures["own"]["settled"], figures["adapted"]["settled"])})
        return {
            "schema": SCHEMA,
            "interrupted": interrupted,
            "device": machine_name(self.runtime),
            "dtype": self.runtime.dtype_name,
            "method": self.settings.method,
            "draft_format": self.settings.draft_format,
            "strategy": self.settings.strategy,
            "max_new_tokens": self.max_new_tokens,
            "settled_after": SETTLED_AFTER,
            "goal": WITHIN,
            "shifts": self.shifts,
            "candidates": self.n_trials,
            "results": results,
        }

    def _tuned(self, name: str, prompts: Sequence[Prompt]) -> tuple[LayerSet, SwiftSettings]:
        """Return the set of a search on the task alone; its prompts come twice, and it may take its time."""
        self.on_step(f"{name}: searching on this task alone")
        return exhaust(self._tuner().serve([*prompts, *prompts], sparing=False))[name]

    def _decode(
        self,
        runs: list[Completion],
        words: str,
        layer_set: LayerSet,
        settings: SwiftSettings,
        prompts: Sequence[Prompt],
    ) -> None:
        """Add the completions of the prompts to `runs`."""
        method = drafting_with(SkippedTarget(layer_set), settings, self.costs)
        for prompt in prompts:
            ((_, completion),) = self.session.run(prompt, method)
            runs.append(completion)
            self.on_step(f"{words}: {prompt.id}, α {completion.acceptance_rate or 0:.2f}")

    def _adapt(self) -> None:
        """Decode all tasks as one stream, and note where shifts were noticed, and the candidates scored."""
        named = [(name, prompt) for name, prompts_of_task in self.tasks.items() for prompt in prompts_of_task]
        runs = self.runs["adapted"]
        for event in self._tuner().serve([replace(prompt, task=STREAM) for _, prompt in named]):
            if isinstance(event, TrialsDone):
                self.n_trials += len(event.trials)
            elif isinstance(event, StreamShifted):
                place = sum(map(len, runs.values()))
                self.shifts.append({"prompt": place, "reason": event.reason, "n_known": event.n_known})
                self.on_step(f"shift noticed after prompt {place + 1}: {event.reason}")
            elif isinstance(event, PromptFinished):
                name = named[event.index][0]
                runs[name].append(event.completion)
                self.on_step(f"{name}, adapting: {event.prompt.id}, α {event.completion.acceptance_rate or 0:.2f}")

    def _figures(self, runs: Sequence[Completion]) -> dict[str, Any]:
        """Acceptance of all prompts, of those after the first ten, and of each; and the expected speedup after the ten.

        For a set that was chosen by time may give up acceptance for cheapness.
        """
        return {
            "acceptance": acceptance(runs),
            "settled": acceptance(runs[SETTLED_AFTER:]),
            "expected": expected_of(self.costs, runs[SETTLED_AFTER:]),
            "by_prompt": [run.acceptance_rate for run in runs],
        }

    def _tuner(self) -> Tuner:
        return Tuner(Session(self.runtime, Sampling(), self.max_new_tokens), self.settings, self.costs, "")


def _gap(best: float | None, reached: float | None) -> dict[str, float | bool | None]:
    """Return by how much acceptance misses that of the task's own set, below 0 where it is higher."""
    gap = None if best is None or reached is None else best - reached
    return {"gap": gap, "within": None if gap is None else gap <= WITHIN}
