"""The one runner of tuning: loads, measures, tunes, and writes what the optimizer reports, for every front door."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import getpid
from pathlib import Path

from ..core.errors import JobCancelled, JobFailed, LeaseLost, SettingsError, SwiftoptError
from ..core.events import Event, TaskFinished
from ..core.requests import TuneRequest
from ..core.streams import read_stream
from ..core.types import Prompt
from ..store import Claim, Store
from .job import LeaseKeeper, patiently, tune_spec
from .outputs import CompletionWriter, default_output
from .tune import TuningRun


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What a tuning run left behind: the job's id, one result per task, and the file of completions."""

    job: str
    tasks: tuple[TaskFinished, ...]
    out: Path


def run_tuning(
    request: TuneRequest,
    store: Store,
    on_event: Callable[[Event], None],
    prompts: Sequence[Prompt] | None = None,
) -> TuneResult:
    """Tune as asked, in this process; every trial and completion is on disk before the next event.

    Args:   prompts: in place of those that the request's stream holds.
    Raises: SwiftoptError: as the parts raise it; JobCancelled: somebody cancelled the job meanwhile; JobFailed: it
        counted as dead, for nothing was heard of it; KeyboardInterrupt after the best sets so far were stored.
    """
    if prompts is None:
        prompts = read_stream(request.stream, request.task, request.limit)
    check_room(request, prompts)
    store.jobs.expire()  # where no service runs, nobody else ends the runs whose process was killed
    with CompletionWriter(Path(request.out) if request.out else default_output(request.stream)) as writer:
        claim = store.jobs.begin_here(tune_spec(request, prompts, None), f"{socket.gethostname()}-{getpid()}")
        with LeaseKeeper(store.jobs, claim.lease, fatal=False) as keeper:
            run = TuningRun(request, prompts, store, claim, keeper, on_event, writer)
            tasks = _tune(run, store, claim)
        patiently(lambda: store.jobs.end(claim.lease, "succeeded"))
        return TuneResult(claim.job.id, tuple(tasks), writer.path)


def check_room(request: TuneRequest, prompts: Sequence[Prompt]) -> None:
    """Refuse completions that end before the search could begin.

    Raises: SettingsError: they are not longer than the context window.
    """
    window = request.settings.context_window
    longest = max(prompt.max_new_tokens or request.max_new_tokens for prompt in prompts)
    if request.settings.optimise and longest <= window:
        raise SettingsError(
            f"max_new_tokens {longest} leaves nothing to decode after the context window of {window}"
            " tokens: raise --max-new-tokens or lower --context-window"
        )


def _tune(run: TuningRun, store: Store, claim: Claim) -> list[TaskFinished]:
    try:
        return run.tune()
    except LeaseLost as error:
        raise _ended(store, claim.job.id) from error
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        # Where the store is what failed, too, the first error is the one to report.
        with suppress(SwiftoptError):
            run.keep_unfinished()
            store.jobs.end(claim.lease, "cancelled" if interrupted else "failed", str(error) or type(error).__name__)
        raise


def _ended(store: Store, job: str) -> SwiftoptError:
    """Why a run lost its job: a machine that slept past the lease, say, is told so."""
    ended = store.jobs.get(job)
    if ended.state == "failed":
        return JobFailed(f"job {job} was ended from outside ({ended.error}); its completions so far are kept")
    return JobCancelled(f"job {job} was cancelled; its completions so far are kept")
