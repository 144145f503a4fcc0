"""A stream that changes its task: does acceptance come back to that of each task's own set (SWIFT Figure 7).

python -m swiftopt.bench.stream_shift --model M --stream five-tasks.jsonl --max-new-tokens 64 --png shift.png
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click
from rich.table import Table

from ..core.costs import CostProfile, expected_of
from ..core.errors import InvalidInput
from ..core.events import PromptFinished, StreamShifted, TrialsDone, event_line
from ..core.requests import GenerateRequest
from ..core.settings import SwiftSettings, TuningSettings
from ..core.streams import read_stream
from ..core.types import Completion, LayerSet, Prompt, Sampling
from ..decoding.draft_models import SkippedTarget
from ..decoding.session import Session
from ..decoding.work import exhaust
from ..models.costs import machine_name, with_formats
from ..models.runtime import Runtime
from ..optimizer.drafting import drafting_with, prepared
from ..optimizer.strategies import strategy_info
from ..optimizer.tuning import Tuner
from ..tasks.recipes import stored_costs
from ..terminal import options, program, tuning_options
from ..terminal.charts import Pictures
from ..terminal.options import decoding_request, load, measurement, pick, positive
from ..terminal.output import Result, StepNotes, note
from ..terminal.render import fixed, number, numbers, table
from .charts import draw_stream_shift

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
        """Return the object that `python -m swiftopt.bench.stream_shift --json` prints.

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


# --- the command


@options.command(common="model stream prompts max_new_tokens strategy max_steps png as_json")
@options.model
@click.option("--stream", required=True, type=options.FILE, help="Prompts that come task by task; - is standard input.")
@measurement("--prompts", type=positive, default=16, help="Prompts of each task.")
@options.pictures("Draw acceptance along the stream.")
@options.machine(GenerateRequest, "max_new_tokens", "speed")
@tuning_options.settings
@options.shared(TuningSettings, "seed")
@options.json
def command(stream: str, prompts: int, pictures: Pictures, **values: Any) -> Result:
    """Decode several tasks as one stream that does not name them, and see how soon the layer set follows.

    Three runs on the same prompts: each task with the set that a search on it alone ends with; all tasks with the
    first one's set; and all as one stream, where a shift must be noticed from acceptance and hidden states. After ten
    prompts of a task, acceptance should be within 5 points of that of its own set; the speedups are expected ones, by
    measured costs. Ctrl-C shows what was decoded with the sets, once every task has its own.
    """
    lines = read_stream(stream, None, None)
    if len({prompt.task for prompt in lines}) < 2:
        raise InvalidInput("this stream has one task only: give one whose lines name several, one after the other")
    settings: SwiftSettings = pick(TuningSettings, values)
    strategy_info(settings.strategy)  # an unknown one is refused
    tuning_options.warn_idle(settings, "max_steps")  # no stream's length ends these searches
    request = decoding_request({**values, "settings": settings})

    runtime = load(request)
    session = Session(runtime, request.sampling, request.max_new_tokens)
    n_positions = max(session.check(prompt) for prompt in lines)
    plain = stored_costs(runtime, None, n_positions, StepNotes())

    def measured(*formats: str) -> CostProfile:
        return with_formats(runtime, plain, formats, StepNotes())

    settings, costs = exhaust(prepared(session, lines, settings, measured), lambda event: note(event_line(event) or ""))
    shift = StreamShift(runtime, lines, prompts, settings, request.max_new_tokens, costs, note)
    report = {"model": request.model, **shift.run()}
    pictures.draw(draw_stream_shift, report)
    return Result(report, [_shift_table(report)], interrupted=report["interrupted"])


def _shift_table(report: Mapping[str, Any]) -> Table:
    noticed = ", ".join(str(shift["prompt"] + 1) for shift in report["shifts"]) or "never"
    caption = (
        f"α and expected speedup after the first {report['settled_after']} prompts of each task:"
        " with its own set, with the first task's, and in one stream that adapts"
    )
    title = f"{report['model']}, {report['dtype']}, {report['device']}; shifts noticed after prompts {noticed}"
    columns = [fixed("task"), *numbers("left out", "α own", "α first", "α one", "missing", "x own", "x one")]
    rows = []
    for result in report["results"]:
        rates = (number(result[run]["settled"], 3) for run in ("own", "kept", "adapted"))
        gap = "–" if result["gap"] is None else f"{result['gap']:+.3f}"
        speeds = (number(result[run]["expected"], unit="x") for run in ("own", "adapted"))
        rows.append((result["task"], str(result["n_skipped"]), *rates, gap, *speeds))
    return table(columns, rows, lined=True, title=title, caption=caption)


if __name__ == "__main__":
    program.main(command, "python -m swiftopt.bench.stream_shift")
