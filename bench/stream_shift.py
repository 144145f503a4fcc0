"""Measures whether acceptance recovers after a stream changes its task (SWIFT Figure 7).

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
from ..core.layer_sets import LayerSet
from ..core.requests import GenerateRequest
from ..core.settings import SwiftSettings, TuningSettings
from ..core.streams import read_stream
from ..core.types import Completion, Prompt, Sampling
from ..decoding.draft_models import SkippedTarget
from ..decoding.session import Session
from ..decoding.work import exhaust
from ..models.costs import machine_name, with_formats
from ..models.runtime import Runtime
from ..optimizer.drafting import drafting_with, prepare_draft_format
from ..optimizer.strategies import strategy_info
from ..optimizer.tuning import Tuner
from ..tasks.recipes import stored_costs
from ..terminal import commands, options, program, tuning_options, value_types
from ..terminal.charts import Pictures
from ..terminal.commands import measurement
from ..terminal.inputs import decoding_request, load, pick
from ..terminal.output import Result, StepNotes, note
from ..terminal.render import fixed, number, numbers, table
from ..terminal.value_types import positive
from .charts import draw_stream_shift
from .turn import measured

SCHEMA = "swiftopt.bench-stream-shift/1"
SETTLED_AFTER = 10  # Acceptance must recover within this number of prompts of a new task.
MAX_GAP = 0.05  # Goal: largest gap to the acceptance rate with the task's own layer set.
RUNS = ("own", "kept", "adapted")  # Runs with each task's own layer set, the first task's set, and a set that adapts.
STREAM = "stream"  # Task of all prompts in the run that adapts.

OnStep = Callable[[str], None]


def acceptance(runs: Sequence[Completion]) -> float | None:
    """Return the acceptance rate over all completions; None if nothing was drafted."""
    n_drafted = sum(run.drafted for run in runs)
    return sum(run.accepted for run in runs) / n_drafted if n_drafted else None


class StreamShift:
    """Runs the benchmark on a stream whose prompts are ordered by task.

    It uses at most `n_prompts` prompts of each task, and only the first turn of a chat.
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

        Once all tasks are tuned, Ctrl-C ends the decoding, and the object covers the completions so far.

        Raises: KeyboardInterrupt: Ctrl-C before the first completion.
        """
        tuned_by_task = {name: self._tune_alone(name, prompts) for name, prompts in self.tasks.items()}
        first_task_drafts, interrupted = tuned_by_task[next(iter(tuned_by_task))], False
        try:
            for name, prompts in self.tasks.items():
                self._decode(self.runs["own"][name], f"{name}, its own set", *tuned_by_task[name], prompts)
            for name, prompts in self.tasks.items():
                self._decode(self.runs["kept"][name], f"{name}, the first task's set", *first_task_drafts, prompts)
            self._adapt()
        except KeyboardInterrupt:
            if not any(self.runs["own"].values()):
                raise
            interrupted = True
        results = []
        for name, prompts in self.tasks.items():
            figures = {kind: self._figures(runs[name]) for kind, runs in self.runs.items()}
            about = {"task": name, "prompts": len(prompts), "n_skipped": tuned_by_task[name][0].n_skipped}
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
            "goal": MAX_GAP,
            "shifts": self.shifts,
            "candidates": self.n_trials,
            "results": results,
        }

    def _tune_alone(self, name: str, prompts: Sequence[Prompt]) -> tuple[LayerSet, SwiftSettings]:
        """Return the layer set and settings of a search over this task's prompts twice, without a budget."""
        self.on_step(f"{name}: searching on this task alone")
        return exhaust(self._tuner().serve([*prompts, *prompts], is_budgeted=False))[name]

    def _decode(
        self,
        runs: list[Completion],
        label: str,
        layer_set: LayerSet,
        settings: SwiftSettings,
        prompts: Sequence[Prompt],
    ) -> None:
        """Decode the prompts with a layer set and append the completions to `runs`."""
        method = drafting_with(SkippedTarget(layer_set), settings, self.costs)
        for prompt in prompts:
            ((_, completion),) = self.session.run(prompt, method)
            runs.append(completion)
            self.on_step(f"{label}: {prompt.id}, α {completion.acceptance_rate or 0:.2f}")

    def _adapt(self) -> None:
        """Decode all tasks as one stream; record the detected shifts and the number of scored candidates."""
        named_prompts = [(name, prompt) for name, prompts_of_task in self.tasks.items() for prompt in prompts_of_task]
        runs = self.runs["adapted"]
        for event in self._tuner().serve([replace(prompt, task=STREAM) for _, prompt in named_prompts]):
            if isinstance(event, TrialsDone):
                self.n_trials += len(event.trials)
            elif isinstance(event, StreamShifted):
                first_prompt = sum(map(len, runs.values()))
                self.shifts.append({"prompt": first_prompt, "reason": event.reason, "n_known": event.n_known})
                self.on_step(f"shift noticed after prompt {first_prompt + 1}: {event.reason}")
            elif isinstance(event, PromptFinished):
                name = named_prompts[event.index][0]
                runs[name].append(event.completion)
                self.on_step(f"{name}, adapting: {event.prompt.id}, α {event.completion.acceptance_rate or 0:.2f}")

    def _figures(self, runs: Sequence[Completion]) -> dict[str, Any]:
        """Return the acceptance of all prompts, of those after the first `SETTLED_AFTER`, and of each prompt.

        The figures include the expected speedup, because a search may trade acceptance for a cheaper draft.
        """
        return {
            "acceptance": acceptance(runs),
            "settled": acceptance(runs[SETTLED_AFTER:]),
            "expected": expected_of(self.costs, runs[SETTLED_AFTER:]),
            "by_prompt": [run.acceptance_rate for run in runs],
        }

    def _tuner(self) -> Tuner:
        return Tuner(Session(self.runtime, Sampling(), self.max_new_tokens), self.settings, self.costs, "")


def _gap(own: float | None, adapted: float | None) -> dict[str, float | bool | None]:
    """Return the acceptance with the task's own set minus the adapted one, and whether it is at most `MAX_GAP`."""
    gap = None if own is None or adapted is None else own - adapted
    return {"gap": gap, "within": None if gap is None else gap <= MAX_GAP}


# --- command line


@commands.command(common="model stream prompts max_new_tokens strategy max_steps png as_json")
@options.model
@click.option("--stream", required=True, type=value_types.FILE, help="Prompts, ordered by task; - is standard input.")
@measurement("--prompts", type=positive, default=16, help="Largest number of prompts of each task.")
@options.pictures("Draw acceptance along the stream.")
@options.machine(GenerateRequest, "max_new_tokens", "speed")
@tuning_options.settings
@options.shared(TuningSettings, "seed")
@options.json
def command(stream: str, prompts: int, pictures: Pictures, **values: Any) -> Result:
    """Decode several tasks as one stream that does not name them, and show how soon the layer set adapts.

    The same prompts are decoded three times: each task with the set of a search on this task alone, all tasks with the
    first task's set, and all tasks as one stream, where acceptance and hidden states must reveal each shift. After ten
    prompts of a task, acceptance should be within 5 points of that with the task's set. Speedups are expected from
    measured costs. After all tasks are tuned, Ctrl-C shows the results so far.
    """
    lines = read_stream(stream, None, None)
    if len({prompt.task for prompt in lines}) < 2:
        raise InvalidInput("this stream has one task only: use one whose lines name several tasks, ordered by task")
    settings: SwiftSettings = pick(TuningSettings, values)
    strategy_info(settings.strategy)  # Refuse an unknown strategy before the model is loaded.
    tuning_options.warn_idle(settings, "max_steps")  # --max-steps has an effect here.
    request = decoding_request({**values, "settings": settings})

    runtime = load(request)
    session = Session(runtime, request.sampling, request.max_new_tokens)
    n_positions = max(session.check(prompt) for prompt in lines)
    plain_costs = stored_costs(runtime, None, n_positions, StepNotes())

    def costs_with_formats(*formats: str) -> CostProfile:
        return with_formats(runtime, plain_costs, formats, StepNotes())

    settings, costs = exhaust(
        prepare_draft_format(session, lines, settings, costs_with_formats), lambda event: note(event_line(event) or "")
    )
    shift = StreamShift(runtime, lines, prompts, settings, request.max_new_tokens, costs, note)
    report = {"model": request.model, **shift.run()}
    pictures.draw(draw_stream_shift, report)
    return Result(report, [_shift_table(report)], interrupted=report["interrupted"])


def _shift_table(report: Mapping[str, Any]) -> Table:
    shift_prompts = ", ".join(str(shift["prompt"] + 1) for shift in report["shifts"]) or "never"
    caption = (
        f"α and expected speedup after the first {report['settled_after']} prompts of each task:"
        " with its own set, with the first task's, and in one stream that adapts"
    )
    title = f"{report['model']}, {report['dtype']}, {report['device']}; shifts noticed after prompts {shift_prompts}"
    columns = [fixed("task"), *numbers("left out", "α own", "α first", "α one", "missing", "x own", "x one")]
    rows = []
    for result in report["results"]:
        rates = (number(result[run]["settled"], 3) for run in ("own", "kept", "adapted"))
        gap = "–" if result["gap"] is None else f"{result['gap']:+.3f}"
        speeds = (number(result[run]["expected"], unit="x") for run in ("own", "adapted"))
        rows.append((result["task"], str(result["n_skipped"]), *rates, gap, *speeds))
    return table(columns, rows, lined=True, title=title, caption=caption)


if __name__ == "__main__":
    measured(lambda: program.main(command, "python -m swiftopt.bench.stream_shift"))
