"""Progress of a tuning run on stderr: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ..core import events
from ..core.events import Event, Progress, event_line, event_task, state_words
from .render import number, sparkline

REFRESH_PER_S = 4  # redraws of the live display
LIVE_PHASES = ("load", "profile", "accumulate", "optimise")  # which the display shows well enough while they last
KEPT_VALUES = 4000  # matchness values that the live curve shows at most


@dataclass(frozen=True, slots=True)
class RunState:
    """What the display shows; each event gives the next one."""

    task: str = ""
    phase: str = "load"
    detail: str = ""
    prompt_id: str = ""
    index: int = 0
    n_prompts: int = 0
    progress: Progress | None = None
    matchness: tuple[float, ...] = field(default=())

    def after(self, event: Event) -> RunState:
        """Return the state once `event` has happened."""
        state = self if event_task(event) in ("", self.task) else RunState(task=event_task(event))
        match event:
            case events.StateChanged():
                return RunState(phase=state_words(event), matchness=self.matchness)
            case events.PhaseChanged():
                return replace(state, phase=event.phase, detail=event.detail)
            case events.PromptStarted():
                return replace(state, prompt_id=event.prompt_id, index=event.index, n_prompts=event.n_prompts)
            case Progress():
                best = max((m for m in (*state.matchness, event.best_matchness) if m is not None), default=None)
                return replace(state, phase=event.phase, progress=replace(event, best_matchness=best))
            case events.TrialsDone():
                values = (*state.matchness, *(trial.matchness for trial in event.trials))
                return replace(state, matchness=values[-KEPT_VALUES:])
            case _:
                return state


def live_view(state: RunState, width: int) -> RenderableType:
    """Show where the run is, its figures, and the curve of matchness so far, in at most four lines."""
    place = f"prompt {state.index + 1} of {state.n_prompts}" if state.n_prompts else ""
    head = Text(" · ".join(filter(None, (state.task, state.phase, place, state.detail or state.prompt_id))))
    head.truncate(width - 2, overflow="ellipsis")
    lines: list[RenderableType] = []
    if state.n_prompts:
        columns = min(40, width - 2)
        done = round(columns * min(1.0, state.index / state.n_prompts))
        lines.append(Text.assemble("  ", ("━" * done, "cyan"), ("━" * (columns - done), "dim")))
    if state.progress is not None:
        figures = Text("  " + progress_words(state.progress))
        figures.truncate(width, overflow="ellipsis")
        lines.append(figures)
    if state.matchness:
        lines.append(Text("  " + sparkline(state.matchness, min(60, width - 2)), style="green"))
    return Group(head, *lines)


def progress_words(progress: Progress) -> str:
    """Return the figures of a round on one line of 80 columns."""
    return (
        f"{progress.tok_s:.1f} tok/s  matchness {number(progress.matchness)} (best {number(progress.best_matchness)})"
        f"  {progress.n_trials} trials  α {number(progress.acceptance_rate)}"
        f"  M {number(progress.mean_generated_length, 1)}  r {progress.skip_ratio:.2f}"
    )


class TuneProgress:
    """Shows the events of a run while it is open as a context manager."""

    def __init__(self, console: Console) -> None:
        self.state = RunState()
        self.n_finished = 0  # completions that are on disk
        self._console = console
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        self._shown: set[tuple[str, str, str]] = set()

    def __enter__(self) -> TuneProgress:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._view,
                console=self._console,
                refresh_per_second=REFRESH_PER_S,
                transient=True,
                redirect_stdout=False,
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        self.state = self.state.after(event)
        self.n_finished += isinstance(event, events.PromptFinished)
        line = event_line(event, self.state.n_prompts)
        if line is not None and self._is_news(event):
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._live is None:
            self._console.print(line, soft_wrap=True)
        else:
            self._console.print(line, no_wrap=True, overflow="ellipsis")  # a wrapped line would tear the display

    def _is_news(self, event: Event) -> bool:
        """Return whether an event deserves a line that stays: phases come and go with every prompt."""
        if isinstance(event, events.StateChanged):
            self._shown.clear()  # another worker reports its phases anew
        if isinstance(event, events.PhaseChanged):
            key = (event.task, event.phase, "" if event.phase == "profile" else event.detail)
            is_new = key not in self._shown
            self._shown.add(key)
            return is_new and (self._live is None or event.phase not in LIVE_PHASES)
        return self._live is None or not isinstance(event, events.PromptFinished)

    def _view(self) -> RenderableType:
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_row(self._spinner, live_view(self.state, self._console.width - 2))
        return table
