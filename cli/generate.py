"""`swiftopt generate`."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.errors import StreamError
from ..core.requests import GenerateRequest
from ..core.streams import LineWriter, raw_prompt, read_stream
from ..core.types import DEFAULT_TASK, Completion, Prompt, Sampling
from . import options
from .options import decoding_request, open_store, positive, together
from .output import emit_json, note, note_load
from .render import number

if TYPE_CHECKING:
    from ..tasks.generate import GenerateInfo

source_options = together(
    options.group(options.PROMPTS, click.option("--prompt", help="Raw text to continue.")),
    options.group(
        options.PROMPTS,
        click.option(
            "--stream",
            metavar="FILE",
            shell_complete=options.files,
            help="Prompts, one JSON object per line; - is standard input.",
        ),
    ),
    options.limit,
    options.group(
        options.PROMPTS,
        click.option(
            "-o",
            "--out",
            metavar="FILE",
            shell_complete=options.files,
            help="Write one JSON object per prompt to a file as well.",
        ),
    ),
)
method_options = together(
    options.method,
    options.group(
        options.DRAFTING,
        click.option(
            "--draft-model",
            metavar="NAME",
            shell_complete=options.models,
            help="Smaller model that drafts, for methods that draft with one.",
        ),
    ),
    options.layer_set,
    options.group(
        options.PROMPTS,
        click.option("--stop", multiple=True, metavar="STR", help="End before this text; may be repeated."),
    ),
    options.group(
        options.SAMPLING,
        options.from_field(Sampling, "repetition_penalty", "Above 1 repeats less.  [default: the model's own]"),
    ),
)


@options.command(short_help="Decode with what was tuned for a task.")
@options.model
@options.from_field(
    GenerateRequest, "task", "Whose stored layer set to use.  [default: the prompt's own task, or default]"
)
@source_options
@method_options
@options.group(
    options.PROMPTS,
    options.from_field(
        GenerateRequest,
        "concurrency",
        "How many prompts of a stream are decoded at once; each is shown when it is done.",
        type=positive,
    ),
)
@options.machine(GenerateRequest, "max_new_tokens", "speed")
@options.sampling
@options.db
@options.as_json
@options.example('generate --model smollm2-135m --task notes --prompt "Once upon a time" --max-new-tokens 64')
def generate(
    prompt: str | None,
    stream: str | None,
    limit: int | None,
    out: str | None,
    db: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Decode with what was tuned for a task, or plainly where that is faster or nothing is stored.

    Takes --prompt, --stream, or text from standard input. With --json there is one object per prompt, each on a line.
    """
    prompts = _prompts(prompt, stream, limit, values["task"])
    request = decoding_request(values)

    from ..tasks.generate import Generated
    from ..tasks.generate import generate as decode

    grows = stream is None and not as_json  # the text is shown as it grows
    noted: set[str] = set()
    with ExitStack() as stack:
        store = stack.enter_context(open_store(db))
        lines = stack.enter_context(LineWriter(Path(out), append=False)) if out is not None else None
        for event in decode(request, prompts, store, note_load):
            if not isinstance(event, Generated):
                if grows:
                    click.echo(event.text, nl=False)
                continue
            value = completion_json(request.model, *event)
            if as_json:
                emit_json(value)
            else:
                click.echo("" if grows else f"== {event.prompt.id}\n{event.completion.text}")
            if lines is not None:
                lines.write(json.dumps(value))
            note_remarks(event.completion, event.info, noted)
            if not as_json:
                note(completion_words(event.completion, event.info))


def _prompts(prompt: str | None, stream: str | None, limit: int | None, task: str | None) -> list[Prompt]:
    if prompt is not None and stream is not None:
        raise click.UsageError("--prompt and --stream exclude each other: give one of them")
    if stream is not None:
        return read_stream(stream, task, limit)
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("there is no prompt: give --prompt TEXT or --stream FILE, or pipe text in")
    try:
        text = sys.stdin.buffer.read().decode("utf-8") if prompt is None else prompt
    except UnicodeDecodeError as error:
        raise StreamError("standard input is not UTF-8 text: pipe text in, or give --stream FILE") from error
    if not text.strip():
        raise click.UsageError("the prompt is empty: give --prompt TEXT or --stream FILE, or pipe text in")
    return [raw_prompt(text, task or DEFAULT_TASK, "standard input" if prompt is None else "--prompt")]


def completion_json(model: str, prompt: Prompt, completion: Completion, info: GenerateInfo) -> dict[str, Any]:
    """Return a completion and how it was made; `layer_set` is the one that was used, null for plain decoding."""
    used = info.record if completion.method != "plain" else None
    return {
        "schema": "swiftopt.generate/1",
        "id": prompt.id,
        "task": prompt.task,
        "model": model,
        **completion.to_json(),
        "layer_set": used.to_json() if used else None,
        "fallback": info.fallback,
        "verdict": info.verdict,
    }


def note_remarks(completion: Completion, info: GenerateInfo, noted: set[str]) -> None:
    """Print what a person should know of how the plan was chosen, but for what is in `noted`; add it there."""
    found = [info.note] if info.note else []
    if info.fallback:
        found.append(f"this is not quite what was asked for: {info.fallback}")
    if completion.method == "plain" and info.record is not None:
        found.append(
            "plain decoding, as the stored verdict says; --method swift drafts with the layer set all the same"
        )
    if completion.lossy:
        found.append(f"{completion.method} is lossy: this is not what plain decoding would have said")
    for text in found:
        if text not in noted:
            noted.add(text)
            note(f"note: {text}")


def completion_words(completion: Completion, info: GenerateInfo) -> str:
    """Return a completion's figures on one line."""
    total_s = completion.timings.total_s
    speed = number(completion.n_tokens / total_s if total_s else None, 1)
    drafted = f", α {number(completion.acceptance_rate)}, M {number(completion.mean_generated_length)}"
    version = f" version {info.version}" if info.version is not None and completion.method != "plain" else ""
    figures = f"{completion.n_tokens} tokens, {speed} tok/s{drafted if completion.drafted else ''}"
    return f"[{completion.method}{version}: {figures}]"
