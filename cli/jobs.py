"""`swiftopt jobs`: see the jobs of a queue, follow them, and steer them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from ..core.completions import output_line
from ..core.errors import InvalidInput, JobCancelled, JobFailed
from ..core.jobs import Job, JobState, Verb, job_to_json
from ..core.requests import TuneRequest
from .options import Decorator, PresetGroup, db_option, json_option, positive, redis_option, server_option, together
from .output import console, emit_json, note, show, write_text
from .place import Board, Place, chosen, command, opened, quoted, waits

ORDER = ("list", "show", "watch", "pause", "resume", "stop", "cancel", "retry", "outputs")
INTERRUPTED = 130
STDOUT = "-"

place_options: Decorator[Any] = together(redis_option, server_option, db_option)
job_argument = click.argument("job", metavar="ID")


class JobsGroup(PresetGroup):
    """Lists its commands in the order of use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(ORDER)


@click.group(cls=JobsGroup, short_help="Show, follow and steer the jobs of a queue.")
def jobs() -> None:
    """The jobs of a queue: see them, follow one, steer one. The jobs of runs in this process are listed, too.

    \b
    Example:
      swiftopt jobs list --state running
      swiftopt jobs watch 3f2a9c81d04e
    """


@jobs.command("list", short_help="List the newest jobs.")
@click.option("--state", type=click.Choice(get_args(JobState)), help="Only jobs in this state.")
@click.option("--limit", type=positive, default=50, show_default=True, help="How many at most.")
@place_options
@json_option
def list_(
    state: JobState | None, limit: int, redis: str | None, server: str | None, db: str | None, as_json: bool
) -> None:
    """List the newest jobs first, each with how far it is and what it found.

    \b
    Example:
      swiftopt jobs list --state failed
    """
    from .job_view import jobs_table
    from .payloads import jobs_json

    with opened(chosen(Place(server, redis, db))) as board:
        found = board.jobs.latest(state, limit)
    if as_json:
        emit_json(jobs_json(found))
    elif found:
        show(jobs_table(found, console().width))
    else:
        note(f"no job is {state}" if state else "there is no job yet: submit one with `swiftopt tune --redis URL …`")


@jobs.command("show", short_help="Show a job.")
@job_argument
@place_options
@json_option
def show_(job: str, redis: str | None, server: str | None, db: str | None, as_json: bool) -> None:
    """Show everything about a job: state, worker, progress, last error, and the layer sets it stored.

    \b
    Example:
      swiftopt jobs show 3f2a9c81d04e
    """
    from .job_view import job_view

    with opened(chosen(Place(server, redis, db))) as board:
        found = board.jobs.get(job)
        reason = waits(board, found)
    if as_json:
        emit_json(job_to_json(found))
        return
    show(job_view(found))
    if reason is not None:
        note(f"note: {reason}")


@jobs.command(short_help="Follow a job to its end.")
@job_argument
@place_options
@json_option
@click.pass_context
def watch(
    context: click.Context, job: str, redis: str | None, server: str | None, db: str | None, as_json: bool
) -> None:
    """Follow a job to its end and print its result, as `tune` does; Ctrl-C leaves the job running.

    The result of a job that has ended is printed at once.

    \b
    Example:
      swiftopt jobs watch 3f2a9c81d04e
    """
    from .follow import Detached, follow, look_back, tell_detached, tell_outputs
    from .live import TuneProgress

    place = chosen(Place(server, redis, db))
    with opened(place) as board:
        found = board.jobs.get(job)
        try:
            if found.is_finished:
                ended = look_back(board, found)
            else:
                ended = follow(board, found, TuneProgress(console(stderr=True)))
        except Detached:
            tell_detached(place, job)
            context.exit(INTERRUPTED)
        except (JobFailed, JobCancelled):
            tell_outputs(place, board.jobs.get(job))
            raise
        _show_ended(board, place, ended.job, list(ended.tasks), as_json)


def _show_ended(board: Board, place: Place, job: Job, tasks: list[Any], as_json: bool) -> None:
    from .tune import show_tuned, use_command

    if job.kind != "tune":
        emit_json(job_to_json(job)) if as_json else click.echo(f"job {job.id} has succeeded")
        return
    request = TuneRequest.from_json(job.request)
    commands = [use_command(request, task, place) for task in tasks]
    out = None if as_json else quoted(command(place, "jobs", "outputs", job.id, "--out", "FILE"))
    show_tuned(request.model, job.id, out, board.database, tasks, commands, as_json)


@jobs.command(short_help="Write a job's completions as JSON Lines.")
@job_argument
@click.option("-o", "--out", metavar="FILE", default=STDOUT, help="File to write; - is standard output.  [default: -]")
@place_options
@json_option
def outputs(job: str, out: str, redis: str | None, server: str | None, db: str | None, as_json: bool) -> None:
    """Write the completions that a job has finished, in the order of its stream, one JSON object per line.

    The lines are those of `tune --out`. --json prints an object with their number, and so needs a file.

    \b
    Example:
      swiftopt jobs outputs 3f2a9c81d04e --out completions.jsonl
    """
    if as_json and out == STDOUT:
        raise InvalidInput("--json would mix with the completions on standard output: name a file with --out")
    with opened(chosen(Place(server, redis, db))) as board:
        found = board.jobs.outputs(job)
    lines = [output_line(event.prompt, event.completion) for event in found]
    if out == STDOUT:
        for line in lines:
            click.echo(line)
        return
    write_text(Path(out), "".join(f"{line}\n" for line in lines))
    if as_json:
        emit_json({"schema": "swiftopt.job-outputs/1", "job": job, "out": out, "n_outputs": len(found)})
    else:
        note(f"{len(found)} completions written to {out}")


VERBS: dict[Verb, tuple[str, str]] = {
    "pause": (
        "Let a job rest.",
        "Let a job rest: a running one saves where it is and frees its device at its next step.",
    ),
    "resume": ("Let a paused job go on.", "Queue a paused job again; it goes on from where it was."),
    "stop": (
        "End a job with the best found so far.",
        "End a job at its next step; it succeeds, with the best layer sets found so far.",
    ),
    "cancel": (
        "End a job without a result.",
        "End a job without a result; the completions it has finished are kept.",
    ),
    "retry": (
        "Queue a failed or cancelled job again.",
        "Queue a failed or cancelled job again; it goes on from its last checkpoint.",
    ),
}


def _command(verb: Verb, short: str, words: str) -> click.Command:
    @job_argument
    @place_options
    @json_option
    def act(job: str, redis: str | None, server: str | None, db: str | None, as_json: bool) -> None:
        with opened(chosen(Place(server, redis, db))) as board:
            found = board.jobs.act(job, verb)
            reason = waits(board, found)
        if as_json:
            emit_json(job_to_json(found))
            return
        click.echo(f"job {found.id} is {_state_words(found)}")
        if reason is not None:
            note(f"note: {reason}")

    text = f"{words}\n\n\b\nExample:\n  swiftopt jobs {verb} 3f2a9c81d04e"
    make: Callable[[Any], click.Command] = click.command(verb, short_help=short, help=text)
    return make(act)


def _state_words(job: Job) -> str:
    wanted = {"pause": "will pause", "stop": "will stop"}.get(job.wanted or "")
    return f"{job.state}, and {wanted} at its next step" if wanted else job.state


for verb, (short, words) in VERBS.items():
    jobs.add_command(_command(verb, short, words))
