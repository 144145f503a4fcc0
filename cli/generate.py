"""`swiftopt generate`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.errors import StreamError
from ..core.methods import method_info
from ..core.requests import GenerateRequest
from ..core.streams import raw_prompt, read_stream
from ..core.types import Completion, Prompt, Sampling
from .checks import check_model
from .options import (
    db_option,
    from_field,
    json_option,
    machine_options,
    open_store,
    pick,
    positive,
    read_layer_set,
    sampling_options,
    speed_option,
    together,
)
from .output import emit_json, json_line, note, note_load

if TYPE_CHECKING:
    from ..tasks.generate import Generated, GenerateInfo, TextAdded
    from ..tasks.outputs import LineWriter

source_options = together(
    click.option("--prompt", help="Raw text to continue."),
    click.option("--stream", metavar="FILE", help="Prompts, one JSON object per line; - is standard input."),
    click.option("--limit", type=positive, help="Take only the first prompts of the stream."),
    click.option("-o", "--out", metavar="FILE", help="Write one JSON object per prompt to a file as well."),
)
method_options = together(
    click.option("--method", metavar="NAME", help="Overrule the stored plan; docs/methods.md lists the methods."),
    click.option("--draft-model", metavar="NAME", help="Smaller model that drafts, for methods that draft with one."),
    click.option("--layer-set", "layer_set_file", metavar="FILE", help="Draft with this exported layer set."),
    click.option("--stop", multiple=True, metavar="STR", help="End before this text; may be repeated."),
    from_field(Sampling, "repetition_penalty", "Above 1 repeats less.  [default: the model's own]", type=float),
)


@click.command(short_help="Decode with what was tuned for a task.")
@click.option("--model", required=True, help="Alias, hub id, folder or GGUF file; `swiftopt models` lists aliases.")
@from_field(GenerateRequest, "task", "Whose stored layer set to use.  [default: the prompt's own task, or default]")
@source_options
@method_options
@from_field(
    GenerateRequest,
    "concurrency",
    "How many prompts of a stream are decoded at once; each is shown when it is done.",
    type=positive,
)
@machine_options(GenerateRequest)
@speed_option(GenerateRequest)
@sampling_options
@db_option
@json_option
def generate(
    prompt: str | None,
    stream: str | None,
    limit: int | None,
    out: str | None,
    layer_set_file: str | None,
    db: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Decode with what was tuned for a task, or plainly where that is faster or nothing is stored.

    Takes --prompt, --stream, or text from standard input. With --json there is one object per prompt, each on a line.

    \b
    Example:
      swiftopt generate --model smollm2-135m --task notes --prompt "Once upon a time" --max-new-tokens 64
    """
    prompts = _prompts(prompt, stream, limit, options["task"])
    record = read_layer_set(layer_set_file) if layer_set_file else None
    if options["method"] is not None:
        method_info(options["method"])
    request = pick(GenerateRequest, {**options, "layer_set": record, "sampling": pick(Sampling, options)})
    check_model(request)

    from ..tasks.generate import generate as decode
    from ..tasks.outputs import LineWriter

    with ExitStack() as stack:
        store = stack.enter_context(open_store(db))
        lines = stack.enter_context(LineWriter(Path(out), append=False)) if out is not None else None
        sink = _Sink(request.model, as_json, one_only=stream is None, out=lines)
        for event in decode(request, prompts, store, note_load):
            sink.show(event)


def _prompts(prompt: str | None, stream: str | None, limit: int | None, task: str | None) -> list[Prompt]:
    if prompt is not None and stream is not None:
        raise click.UsageError("--prompt and --stream exclude each other: give one of them")
    if stream is not None:
        return read_stream(stream, task, limit)
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("there is no prompt: give --prompt TEXT or --stream FILE, or pipe text in")
    text = prompt if prompt is not None else _piped_text()
    if not text.strip():
        raise click.UsageError("the prompt is empty: give --prompt TEXT or --stream FILE, or pipe text in")
    return [raw_prompt(text, task or "default", "standard input" if prompt is None else "--prompt")]


def _piped_text() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise StreamError("standard input is not UTF-8 text: pipe text in, or give --stream FILE") from error


class _Sink:
    """Where completions go: text to stdout as it grows, or JSON lines, and JSON lines to a file."""

    def __init__(self, model: str, as_json: bool, one_only: bool, out: LineWriter | None) -> None:
        self._model, self._as_json, self._out = model, as_json, out
        self._grows = one_only and not as_json
        self._noted: set[str] = set()

    def show(self, event: TextAdded | Generated) -> None:
        """Text as it grows, and a finished completion."""
        from .payloads import completion_json

        if not isinstance(event, tuple):
            if self._grows:
                click.echo(event.text, nl=False)
            return
        prompt, completion, info = event
        if self._as_json:
            emit_json(completion_json(self._model, *event))
        elif self._grows:
            click.echo()
        else:
            click.echo(f"== {prompt.id}\n{completion.text}")
        if self._out is not None:
            self._out.write(json_line(completion_json(self._model, *event)))
        self._remark(completion, info)

    def _remark(self, completion: Completion, info: GenerateInfo) -> None:
        for text in remarks(completion, info):
            if text not in self._noted:
                self._noted.add(text)
                note(f"note: {text}")
        if not self._as_json:
            note(completion_words(completion, info))


def remarks(completion: Completion, info: GenerateInfo) -> list[str]:
    """What a person should know of how the plan was chosen."""
    found = [info.note] if info.note else []
    if info.fallback:
        found.append(f"this is not quite what was asked for: {info.fallback}")
    if completion.method == "plain" and info.record is not None:
        found.append(
            "plain decoding, as the stored verdict says; --method swift drafts with the layer set all the same"
        )
    if completion.lossy:
        found.append(f"{completion.method} is lossy: this is not what plain decoding would have said")
    return found


def completion_words(completion: Completion, info: GenerateInfo) -> str:
    """A completion's figures on one line."""
    from .render import number

    total_s = completion.timings.total_s
    speed = number(completion.n_tokens / total_s if total_s else None, 1)
    drafted = f", α {number(completion.acceptance_rate)}, M {number(completion.mean_generated_length)}"
    version = f" version {info.version}" if info.version is not None and completion.method != "plain" else ""
    how = f"{completion.method}{version}"
    return f"[{how}: {completion.n_tokens} tokens, {speed} tok/s{drafted if completion.drafted else ''}]"
