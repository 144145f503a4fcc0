"""The summary sentence of the first page: what drafting gains, and what was served, from the available figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...core.events import ModelTuning, TaskTuning
from ..engines import EngineProcess
from ..metrics import NOW_S, Period

MOST_NAMED = 4  # Maximum number of tasks named in a sentence.
LEAST_SHARE = 0.005  # Minimum share of the decoding time that is reported as saved or lost.


@dataclass(frozen=True, slots=True)
class ServedNow:
    """An engine, its tuning, and its traffic: of the last minute, and since the server's start."""

    engine: EngineProcess
    tuning: ModelTuning
    lately: Period
    total: Period

    @property
    def name(self) -> str:
        """The model's name."""
        return self.engine.served.name

    @property
    def throughput(self) -> float | None:
        """Tokens per second of the last minute, of all requests."""
        return self.lately.throughput(NOW_S)


NamedTask = tuple[str, TaskTuning]  # A task that has had requests, with the name that a sentence gives it.


def headline(served: Sequence[ServedNow], jobs: Mapping[str, int]) -> str:
    """Return a summary in a few sentences; `jobs` counts jobs by state."""
    if not served:
        return " ".join(("No model is served here.", *_of_jobs(jobs)))
    tokens = sum(state.total.tokens for state in served)
    if not tokens:
        return " ".join((*map(_readiness, served), "Nothing has been served yet.", *_of_jobs(jobs)))
    has_many = len(served) > 1
    tasks = [
        (f"{state.name}/{task.task}" if has_many else task.task, task)
        for state in served
        for task in state.tuning.tasks
        if task.requests
    ]
    exact = sum(state.total.exact for state in served)
    equal = "all equal to plain decoding" if exact == tokens else f"{exact:,} of them proven equal to plain decoding"
    return " ".join((*_of_drafting(tasks, served), f"{tokens:,} tokens served, {equal}.", *_of_jobs(jobs)))


def saved_share(tasks: Iterable[TaskTuning]) -> float | None:
    """Return saved seconds / seconds that plain decoding would have taken; None: no task has a verdict.

    The cost of comparisons counts, because their rounds are part of the decoding time.
    """
    judged = [task for task in tasks if task.ratio is not None or task.saved_before_s]
    saved_s = sum(task.all_saved_s for task in judged)
    plain_s = saved_s + sum(task.seconds for task in judged)
    return saved_s / plain_s if plain_s > 0 else None


def _readiness(state: ServedNow) -> str:
    return f"{state.name} is ready." if state.engine.about is not None else f"{state.name}: {state.engine.state}."


def _of_jobs(jobs: Mapping[str, int]) -> Iterator[str]:
    words = {"running": ("runs", "run"), "queued": ("waits", "wait"), "failed": ("has failed", "have failed")}
    phrases = [f"{n} {verbs[n > 1]}" for state, verbs in words.items() if (n := jobs.get(state, 0))]
    if phrases:
        yield f"Jobs: {', '.join(phrases)}."


def _of_drafting(tasks: Sequence[NamedTask], served: Sequence[ServedNow]) -> Iterator[str]:
    by_saving = sorted(tasks, key=lambda named: -named[1].all_saved_s)
    drafting = [named for named in by_saving if named[1].in_use == "drafts" and named[1].ratio is not None]
    unjudged = [named for named in by_saving if named[1].in_use == "drafts" and named[1].ratio is None]
    off = [named for named in by_saving if named[1].in_use == "plain"]
    if drafting:
        yield f"{_saving([task for _, task in tasks])}: {_named(drafting, _ratio)}."
    elif off and not unjudged:
        yield f"Drafting is off: {_named(off, _why_off)}."
    if off and (drafting or unjudged):
        yield f"It is off for {_named(off, _why_off)}." if drafting else f"Drafting is off for {_named(off, _why_off)}."
    if unjudged:
        yield f"Not measured yet: {_named(unjudged, _pairs)}."
    if not all(state.engine.served.tune for state in served):
        yield "With --no-tune the saving of drafts is not measured."


def _saving(tasks: Sequence[TaskTuning]) -> str:
    share = saved_share(tasks) or 0.0
    if abs(share) < LEAST_SHARE:
        return "Drafting has saved no time so far"
    share_words, verb = f"{100 * abs(share):.0f} % of decoding time", "saves" if share > 0 else "costs"
    before_s = sum(task.saved_before_s for task in tasks)
    if share > 0 and before_s > sum(task.all_saved_s for task in tasks) / 2:
        return f"Drafting has saved {share_words}, most of it with earlier drafts; now"
    return f"Drafting {verb} {share_words}"


def _named(tasks: Sequence[NamedTask], words_of: Callable[[TaskTuning], str]) -> str:
    names = [f"{name} {words_of(task)}".strip() for name, task in tasks[:MOST_NAMED]]
    return ", ".join(names) + (f" and {len(tasks) - MOST_NAMED} more" if len(tasks) > MOST_NAMED else "")


def _ratio(task: TaskTuning) -> str:
    uncertain = "" if task.verdict == "use" or task.interval is None else " (not certain: {:.2f}–{:.2f})"
    return f"{task.ratio:.2f}x" + uncertain.format(*(task.interval or ()))


def _why_off(task: TaskTuning) -> str:
    if task.pinned is not None:
        return "(pinned)"
    return "" if task.ratio is None else f"(drafts {task.ratio:.2f}x)"


def _pairs(task: TaskTuning) -> str:
    return f"({task.pairs or 'no'} pair{'' if task.pairs == 1 else 's'} of timings so far)"
