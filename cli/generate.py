"""`swiftopt generate` and `swiftopt chat`: decode here with what was tuned, or chat with a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.errors import InvalidInput, StreamError, SwiftoptError
from ..core.requests import GenerateRequest
from ..core.streams import LineWriter, raw_prompt
from ..core.types import DEFAULT_TASK, Completion, Prompt, Sampling, check_task
from ..decoding.methods import method_info
from ..terminal import commands, inputs, options
from ..terminal.commands import OTHER, PROMPTS, from_field, option
from ..terminal.inputs import decoding_request, on_command_line, pick
from ..terminal.output import StepNotes, TextPrinter, emit_json, note
from ..terminal.render import number
from ..terminal.value_types import FILE, MODEL, positive
from .backend import Backend

if TYPE_CHECKING:
    from ..client.chat import Answered
    from ..decoding.events import GenerateInfo

Message = Mapping[str, str]

ANSWER_TOKENS = 512  # Default maximum number of tokens of one answer.
COMMANDS = """\
/system TEXT  say how to answer from now on; without TEXT, take that back
/clear        forget what was said until now
/help         show this
/quit         end the chat, as Ctrl-D does"""


@commands.command(
    short_help="Decode with what was tuned for a task.",
    common="model task prompt stream limit out max_new_tokens temperature seed method db as_json",
)
@options.model
@options.task("plan", "Whose stored layer set to use.  [default: the prompt's own task, or default]")
@option(PROMPTS, "--prompt", help="Raw text to continue.")
@option(PROMPTS, "--stream", type=FILE, help=options.STREAM_HELP)
@options.limit
@option(PROMPTS, "-o", "--out", type=FILE, help="Write one JSON object per prompt to a file as well.")
@options.method
@options.draft_model
@options.layer_set
@options.stop
@from_field(commands.SAMPLING, Sampling, "repetition_penalty", "Above 1 repeats less.  [default: the model's own]")
@from_field(
    PROMPTS,
    GenerateRequest,
    "concurrency",
    "How many prompts of a stream are decoded at once; each is shown when it is done.",
    type=positive,
)
@options.machine(GenerateRequest, "max_new_tokens", "speed")
@options.sampling
@options.db
@options.as_json
@commands.example('generate --model smollm2-135m --task notes --prompt "Once upon a time" --max-new-tokens 64')
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
    if request.method is not None:
        info = method_info(request.method)
        other_model = request.draft_model is not None and info.drafts_with_model
        if request.draft_model is not None and not other_model:
            note(f"warning: --draft-model has no effect with --method {info.name}, which drafts with no other model")
        if request.layer_set is not None and (other_model or not info.takes_layer_set):
            why = "--draft-model, which drafts alone" if other_model else f"--method {info.name}, which takes none"
            note(f"warning: --layer-set has no effect with {why}")
    for name in ("limit", "concurrency"):
        if stream is None and on_command_line(name):
            note(f"warning: --{name} has no effect without --stream: there is one prompt")
    grows = stream is None and not as_json  # Whether the text is printed as it is generated.
    noted: set[str] = set()
    with ExitStack() as stack:
        store = stack.enter_context(inputs.open_store(db))
        lines = stack.enter_context(LineWriter(Path(out), append=False)) if out is not None else None

        from ..decoding.events import Generated
        from ..tasks.generate import generate as decode

        in_line, printer = False, TextPrinter()
        try:
            for event in decode(request, prompts, store, StepNotes("load: ")):
                if not isinstance(event, Generated):
                    if grows:
                        printer.write(event.text)
                        in_line = True
                    continue
                value = completion_json(request.model, *event)
                if as_json:
                    emit_json(value)
                else:
                    click.echo("" if grows else f"== {event.prompt.id}\n{event.completion.text}")
                    in_line = False
                if lines is not None:
                    lines.write(json.dumps(value))
                note_remarks(event.completion, event.info, noted)
                if not as_json:
                    note(completion_words(event.completion, event.info))
        except Exception:  # Not for KeyboardInterrupt: click itself ends the line after Ctrl-C.
            if in_line:
                click.echo()
            raise


def _prompts(prompt: str | None, stream: str | None, limit: int | None, task: str | None) -> list[Prompt]:
    if prompt is not None and stream is not None:
        raise click.UsageError("--prompt and --stream exclude each other: give one of them")
    if stream is not None:
        return options.prompts_of(stream, task, limit)
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("there is no prompt: give --prompt TEXT or --stream FILE, or pipe text in")
    text = _decoded(sys.stdin.buffer.read(), "or give --stream FILE") if prompt is None else prompt
    if not text.strip():
        raise click.UsageError("the prompt is empty: give --prompt TEXT or --stream FILE, or pipe text in")
    task = DEFAULT_TASK if task is None else task
    return [raw_prompt(text, task, "standard input" if prompt is None else "--prompt")]


def _decoded(piped: bytes, advice: str) -> str:
    try:
        return piped.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StreamError(f"standard input is not UTF-8 text: pipe text in, {advice}") from error


def completion_json(model: str, prompt: Prompt, completion: Completion, info: GenerateInfo) -> dict[str, Any]:
    """Return a completion and its metadata; `layer_set` is the set used, null for plain decoding."""
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
    """Print remarks on how the plan was chosen, except those in `noted`, and add them there."""
    remarks = [info.note] if info.note else []
    if info.fallback:
        remarks.append(f"this is not quite what was asked for: {info.fallback}")
    if completion.method == "plain" and info.record is not None:
        remarks.append(
            f"plain decoding, as the stored verdict says; --method {info.record.found_for} drafts all the same"
        )
    if completion.lossy:
        remarks.append(f"{completion.method} is lossy: this is not what plain decoding would have said")
    for text in remarks:
        if text not in noted:
            noted.add(text)
            note(f"note: {text}")


def completion_words(completion: Completion, info: GenerateInfo) -> str:
    drafted = f", α {number(completion.acceptance_rate)}, M {number(completion.mean_generated_length)}"
    version = f" version {info.version}" if info.version is not None and completion.method != "plain" else ""
    figures = (
        f"{completion.n_tokens} tokens, {number(completion.tok_s, 1)} tok/s{drafted if completion.drafted else ''}"
    )
    return f"[{completion.method}{version}: {figures}]"


# --- chat


@commands.command(
    short_help="Chat in the terminal, with a server or a model of your own.",
    common="model server task system message max_new_tokens temperature seed db as_json",
)
@click.option(
    "--model",
    type=MODEL,
    help="Model to load here; with --server, which of its models.  [default: its only one]",
)
@click.option(
    "--server",
    metavar="URL",
    help="Server to chat with, ours or another of OpenAI's protocol; its key: SWIFTOPT_API_KEY."
    "  [env: SWIFTOPT_SERVER_URL]",
)
@from_field(OTHER, GenerateRequest, "task", "Whose stored plan to use.  [default: default]")
@options.method
@option(PROMPTS, "--system", metavar="TEXT", help="Message that says how to answer.")
@option(PROMPTS, "--message", metavar="TEXT", help="Ask this one question, and end.")
@option(PROMPTS, "--max-new-tokens", default=ANSWER_TOKENS, type=positive, help="Most tokens of an answer.")
@options.machine(GenerateRequest, "speed")
@options.sampling
@options.db
@options.as_json
@commands.example("chat --model smollm2-135m", 'chat --server http://127.0.0.1:8000 --message "Why is the sky blue?"')
def chat(
    server: str | None, db: str | None, system: str | None, message: str | None, as_json: bool, **values: Any
) -> None:
    """Chat with a model: of a server that speaks OpenAI's protocol, or one that is loaded here.

    Each line of standard input is a question; /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat.
    With --json there is one object per answer, each on a line.
    """
    values["sampling"] = pick(Sampling, values)
    chosen = Backend.chosen(server, None, db)
    if values["task"] is not None:
        check_task(values["task"], "--task")
    instruction = None if system is None else _checked(system, "--system")
    question = None if message is None else _checked(message, "--message")
    opened = served_partner(chosen.server, values) if chosen.server else loaded_partner(chosen.db, values)
    with opened as partner:
        conversation = Conversation(partner, instruction, as_json)
        if question is not None:
            conversation.ask(question)
        elif sys.stdin.isatty():
            _at_terminal(conversation)
        else:
            for line in sys.stdin.buffer:
                if not conversation.take(_decoded(line, "one question per line")):
                    return


def _checked(text: str, where: str) -> str:
    """Return a prompt text after checking that it can be encoded.

    Raises: StreamError: the text is empty or not valid text.
    """
    return raw_prompt(text, DEFAULT_TASK, where).text or ""


# --- sources of answers: a server, or a model in this process


@dataclass(frozen=True, slots=True)
class Partner:
    """A model's name, and a function that streams the answer to messages and yields its figures last."""

    name: str
    answer: Callable[[Sequence[Message]], Iterator[str | Answered]]


@contextmanager
def served_partner(url: str, values: Mapping[str, Any]) -> Iterator[Partner]:
    """Give access to a model of the server at `url`; `values` are the command's options.

    Raises: InvalidInput: the server has no model, or several of which none is named. UsageError: an option is only for
        models that are loaded here. ServiceUnreachable: the server does not answer.
    """
    from ..client.chat import ChatClient

    for name in options.PLACEMENT:
        if on_command_line(name):
            raise click.UsageError(f"--{name} is for a model that is loaded here: leave it out, or --server")
    with ChatClient(url) as client:
        served = client.models()
        fields = _fields(values)
        if served.is_swiftopt:  # Other servers may reject fields that OpenAI's API lacks.
            fields["return_metrics"] = True
        name = values["model"] or _only(served.names)
        yield Partner(name, partial(client.answer, name, **fields))


def _only(names: Sequence[str]) -> str:
    if not names:
        raise InvalidInput("the server decodes with no model: start it with `swiftopt serve --model NAME`")
    if len(names) > 1:
        raise InvalidInput(f"the server has {len(names)} models: choose one with --model ({', '.join(names)})")
    return names[0]


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as request fields; fields that OpenAI's API lacks are sent only if set."""
    sampling = values["sampling"].to_json()
    fields = {"max_tokens": values["max_new_tokens"]}
    fields |= {name: sampling[name] for name in ("temperature", "top_p", "seed")}
    beyond = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias")
    fields |= {name: sampling[name] for name in beyond if sampling[name]}
    chosen = {name: values[name] for name in ("task", "method") if values[name] is not None}
    return {**fields, "swiftopt": chosen} if chosen else fields


@contextmanager
def loaded_partner(db: str | None, values: Mapping[str, Any]) -> Iterator[Partner]:
    """Load a model and start its engine, whose KV cache is kept, so that each turn continues the last one.

    Raises: UsageError: no model is named. InvalidInput: the model has no chat template. SwiftoptError: loading failed.
    """
    if not values["model"]:
        raise click.UsageError("no model is named: name one with --model, or a server with --server")
    request = decoding_request(dict(values))
    noted: set[str] = set()

    def answer(messages: Sequence[Message]) -> Iterator[str | Answered]:
        prompt = Prompt("chat", values["task"] or DEFAULT_TASK, messages=tuple(messages))
        given = {name: values[name] for name in ("method", "max_new_tokens", "sampling")}
        ticket = engine.submit(prompt, **given)
        try:
            yield from ticket
        finally:
            ticket.cancel()
        _, done, info = ticket.generated[-1]
        yield Answered(done.finish_reason, done.n_tokens, done.tok_s, done.acceptance_rate)
        note_remarks(done, info, noted)  # Printed after `Answered`, which ends the answer's line.

    with inputs.open_store(db) as store:
        from ..client.chat import Answered
        from ..tasks.model import Model

        model = Model(request.model, inputs.load(request), store)
        if getattr(model.runtime.tokenizer, "chat_template", None) is None:
            raise InvalidInput(f"{model.name} has no chat template: use an instruct model, or `swiftopt generate`")
        with model.engine(concurrency=1) as engine:
            yield Partner(model.name, answer)


# --- the conversation


class Conversation:
    """The turns of a chat; streams answers to stdout, and thoughts, figures and remarks to stderr."""

    def __init__(self, partner: Partner, system: str | None, as_json: bool) -> None:
        self.partner, self.system = partner, system
        self._as_json = as_json
        self._answer, self._thought = TextPrinter(), TextPrinter(err=True, dim=True)
        self._turns: list[Message] = []

    def take(self, line: str) -> bool:
        """Run a command or answer a question; return False at the chat's end.

        Raises: SwiftoptError: the question cannot be answered.
        """
        if not line.strip():
            return True
        if not line.startswith("/"):
            self.ask(_checked(line.strip(), "the question"))
            return True
        command, _, text = line.strip().partition(" ")
        match command:
            case "/quit":
                return False
            case "/clear":
                self._turns.clear()
                note("what was said is forgotten")
            case "/system":
                self.system = _checked(text, command) if text.strip() else None
                note("answers follow that from now on" if self.system else "there is no system message any more")
            case "/help":
                note(COMMANDS)
            case _:
                note(f"there is no command {command}: /help lists them; a question may begin with a blank")
        return True

    def ask(self, question: str) -> None:
        """Show the answer; a question that got no answer is not added to the history.

        Raises: SwiftoptError: there is no answer, or it broke off.
        """
        from ..client.chat import Thought

        asked, said, thought = {"role": "user", "content": question}, list[str](), list[str]()
        before = [{"role": "system", "content": self.system}] if self.system else []
        answer: Any = self.partner.answer([*before, *self._turns, asked])
        try:
            with closing(answer):  # Stops the generation if reading ends early.
                for event in answer:
                    if isinstance(event, Thought):
                        thought.append(event)
                        self._show(event, thought=True)
                    elif isinstance(event, str):
                        if thought and not said:
                            self._show("\n", thought=True)
                        said.append(event)
                        self._show(event)
                    else:
                        self._show_end("".join(said), "".join(thought), event)
        except BaseException:
            if said:
                self._show("\n")
            raise
        finally:
            if said:
                self._turns += [asked, {"role": "assistant", "content": "".join(said)}]

    def _show(self, text: str, thought: bool = False) -> None:
        if not self._as_json:
            (self._thought if thought else self._answer).write(text)

    def _show_end(self, text: str, thought: str, answered: Answered) -> None:
        if self._as_json:
            texts = {"text": text, "reasoning_content": thought} if thought else {"text": text}
            emit_json({"schema": "swiftopt.chat/1", "model": self.partner.name, **texts, **asdict(answered)})
        else:
            self._show("\n")
            parts = [] if answered.n_tokens is None else [f"{answered.n_tokens} tokens"]
            parts.append(f"{number(answered.tokens_per_second, 1)} tok/s")
            if answered.acceptance_rate is not None:
                parts.append(f"α {number(answered.acceptance_rate)}")
            if answered.finish_reason == "length":
                parts.append("cut off: raise --max-new-tokens")
            note(click.style(f"[{', '.join(parts)}]", dim=True))


# --- input


def _at_terminal(conversation: Conversation) -> None:
    """Read lines from the terminal until Ctrl-D or /quit; an error or Ctrl-C ends an answer, not the chat."""
    with suppress(ImportError):
        import readline  # noqa: F401  The import gives input() line editing and a history.

    note(f"{conversation.partner.name}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat")
    while True:
        try:
            line = _typed_line()
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note("\nCtrl-D or /quit ends the chat")
            continue
        try:
            if not conversation.take(line):
                return
        except KeyboardInterrupt:
            note("(stopped)")
        except SwiftoptError as error:
            note(f"error: {error}")


def _typed_line() -> str:
    if sys.stdout.isatty():
        return input("> ")
    click.echo("> ", nl=False, err=True)  # stdout is no terminal, so the prompt goes to stderr.
    return input()
