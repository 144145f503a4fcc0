"""`swiftopt generate` and `swiftopt chat`: decode here with the tuned plan, or chat with a server."""

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
from ..terminal.program import end_by_signals
from ..terminal.render import number
from ..terminal.value_types import FILE, MODEL, positive
from .backend import Backend

if TYPE_CHECKING:
    from ..client.chat import Answered
    from ..decoding.events import GenerateInfo

Message = Mapping[str, str]

ANSWER_TOKENS = 512  # Default maximum number of tokens of one answer.
COMMANDS = """\
/system TEXT  set the system message from now on; without TEXT, remove it
/clear        clear the conversation
/help         show this list
/quit         end the chat, like Ctrl-D"""


@commands.command(
    short_help="Decode with the tuned plan of a task.",
    common="model task prompt stream limit out max_new_tokens temperature seed method db as_json",
)
@options.model
@options.task("plan", "Task whose stored plan to use.  [default: the prompt's task, or default]")
@option(PROMPTS, "--prompt", help="Raw text to continue.")
@option(PROMPTS, "--stream", type=FILE, help=options.STREAM_HELP)
@options.limit
@option(PROMPTS, "-o", "--out", type=FILE, help="Also write one JSON object per prompt to a file.")
@options.method
@options.draft_model
@options.layer_set
@options.stop
@from_field(commands.SAMPLING, Sampling, "repetition_penalty", "Above 1: repeat less.  [default: the model's own]")
@from_field(
    PROMPTS,
    GenerateRequest,
    "concurrency",
    "Number of prompts decoded at once; each is shown when it is done.",
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
    """Decode with the tuned plan of a task, or plainly if that is faster or nothing is stored.

    Takes --prompt, --stream, or text from standard input. --json prints one object per prompt, each on a line.
    """
    prompts = _prompts(prompt, stream, limit, values["task"])
    request = decoding_request(values)
    if request.method is not None:
        method = method_info(request.method)
        other_model = request.draft_model is not None and method.drafts_with_model
        if request.draft_model is not None and not other_model:
            note(f"warning: --draft-model has no effect with --method {method.name}, which drafts with no other model")
        if request.layer_set is not None and (other_model or not method.takes_layer_set):
            reason = (
                "--draft-model, which drafts without it" if other_model else f"--method {method.name}, which uses none"
            )
            note(f"warning: --layer-set has no effect with {reason}")
    _begin_loading(request)
    for name in ("limit", "concurrency"):
        if stream is None and on_command_line(name):
            note(f"warning: --{name} has no effect without --stream: there is one prompt")
    is_streamed = stream is None and not as_json  # Whether the text is printed as it is generated.
    noted_remarks: set[str] = set()
    with ExitStack() as stack:
        # Plain decoding needs no lookup, and importing the database code takes time; a named database is opened anyway.
        is_used = request.method != "plain" or on_command_line("db")
        store = stack.enter_context(inputs.open_store(db)) if is_used else None
        lines = stack.enter_context(LineWriter(Path(out), append=False)) if out is not None else None

        from ..decoding.events import Generated
        from ..tasks.generate import generate as decode

        has_open_line, printer = False, TextPrinter()
        try:
            for event in decode(request, prompts, store, StepNotes("load: ")):
                if not isinstance(event, Generated):
                    if is_streamed:
                        printer.write(event.text)
                        has_open_line = True
                    continue
                output = completion_json(request.model, *event)
                if as_json:
                    emit_json(output)
                else:
                    click.echo("" if is_streamed else f"== {event.prompt.id}\n{event.completion.text}")
                    has_open_line = False
                if lines is not None:
                    lines.write(json.dumps(output))
                note_remarks(event.completion, event.info, noted_remarks)
                if not as_json:
                    note(completion_words(event.completion, event.info))
        except Exception:  # Not for KeyboardInterrupt: click itself ends the line after Ctrl-C.
            if has_open_line:
                click.echo()
            raise


def _begin_loading(request: GenerateRequest) -> None:
    """Begin to load the request's model if that needs no torch, which is imported at the same time.

    Raises: SwiftoptError: it cannot be loaded.
    """
    from ..models.gguf_packing import begin_packing
    from ..models.sources import resolve

    source = resolve(request.model)
    if source.kind == "gguf":
        begin_packing(Path(source.location), request.dtype, request.device, request.speed)


def _prompts(prompt: str | None, stream: str | None, limit: int | None, task: str | None) -> list[Prompt]:
    if prompt is not None and stream is not None:
        raise click.UsageError("--prompt and --stream exclude each other: use one of them")
    if stream is not None:
        return options.prompts_of(stream, task, limit)
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("there is no prompt: use --prompt TEXT or --stream FILE, or pipe in text")
    text = _decode_stdin(sys.stdin.buffer.read(), "or use --stream FILE") if prompt is None else prompt
    if not text.strip():
        raise click.UsageError("the prompt is empty: use --prompt TEXT or --stream FILE, or pipe in text")
    task = DEFAULT_TASK if task is None else task
    return [raw_prompt(text, task, "standard input" if prompt is None else "--prompt")]


def _decode_stdin(stdin_bytes: bytes, advice: str) -> str:
    try:
        return stdin_bytes.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StreamError(f"standard input is not UTF-8 text: pipe in text, {advice}") from error


def completion_json(model: str, prompt: Prompt, completion: Completion, decoding: GenerateInfo) -> dict[str, Any]:
    """Return a completion and its metadata; `layer_set` is the set used, null for plain decoding."""
    used_set = decoding.record if completion.method != "plain" else None
    return {
        "schema": "swiftopt.generate/1",
        "id": prompt.id,
        "task": prompt.task,
        "model": model,
        **completion.to_json(),
        "layer_set": used_set.to_json() if used_set else None,
        "fallback": decoding.fallback,
        "verdict": decoding.verdict,
    }


def note_remarks(completion: Completion, decoding: GenerateInfo, noted_remarks: set[str]) -> None:
    """Print remarks on how the plan was chosen, except those in `noted_remarks`, and add them there."""
    remarks = [decoding.note] if decoding.note else []
    if decoding.fallback:
        remarks.append(f"no exact match was stored: {decoding.fallback}")
    if completion.method == "plain" and decoding.record is not None:
        remarks.append(
            f"decoded plainly, as the stored verdict says; --method {decoding.record.found_for} drafts anyway"
        )
    if completion.lossy:
        remarks.append(f"{completion.method} is lossy: plain decoding may give another text")
    for text in remarks:
        if text not in noted_remarks:
            noted_remarks.add(text)
            note(f"note: {text}")


def completion_words(completion: Completion, decoding: GenerateInfo) -> str:
    draft_figures = f", α {number(completion.acceptance_rate)}, M {number(completion.mean_generated_length)}"
    version = f" version {decoding.version}" if decoding.version is not None and completion.method != "plain" else ""
    speed = f"{completion.n_tokens} tokens, {number(completion.tok_s, 1)} tok/s"
    figures = f"{speed}{draft_figures if completion.drafted else ''}"
    return f"[{completion.method}{version}: {figures}]"


# --- chat


@commands.command(
    short_help="Chat in the terminal, with a server or a local model.",
    common="model server task system message max_new_tokens temperature seed db as_json",
)
@click.option(
    "--model",
    type=MODEL,
    help="Model to load here; with --server, one of its models.  [default: its only one]",
)
@click.option(
    "--server",
    metavar="URL",
    help="Server to chat with, any that speaks OpenAI's protocol; key: SWIFTOPT_API_KEY.  [env: SWIFTOPT_SERVER_URL]",
)
@from_field(OTHER, GenerateRequest, "task", "Task whose stored plan to use.  [default: default]")
@options.method
@option(PROMPTS, "--system", metavar="TEXT", help="System message.")
@option(PROMPTS, "--message", metavar="TEXT", help="Ask this one question and exit.")
@option(PROMPTS, "--max-new-tokens", default=ANSWER_TOKENS, type=positive, help="Maximum tokens of an answer.")
@options.machine(GenerateRequest, "speed")
@options.sampling
@options.db
@options.as_json
@commands.example("chat --model smollm2-135m", 'chat --server http://127.0.0.1:8000 --message "Why is the sky blue?"')
def chat(
    server: str | None, db: str | None, system: str | None, message: str | None, as_json: bool, **values: Any
) -> None:
    """Chat with a model on a server that speaks OpenAI's protocol, or with one loaded here.

    Each line of standard input is a question; /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat.
    --json prints one object per answer, each on a line.
    """
    values["sampling"] = pick(Sampling, values)
    backend = Backend.from_options(server, None, db)
    if values["task"] is not None:
        check_task(values["task"], "--task")
    instruction = None if system is None else _check_text(system, "--system")
    question = None if message is None else _check_text(message, "--message")
    opened = served_model(backend.server, values) if backend.server else loaded_model(backend.db, values)
    with opened as chat_model:
        conversation = Conversation(chat_model, instruction, as_json)
        if question is not None:
            conversation.ask(question)
        elif sys.stdin.isatty():
            _at_terminal(conversation)
        else:
            for line in sys.stdin.buffer:
                if not conversation.take(_decode_stdin(line, "one question per line")):
                    return


def _check_text(text: str, source: str) -> str:
    """Return a prompt text after checking that it can be encoded.

    Raises: StreamError: the text is empty or not valid text.
    """
    return raw_prompt(text, DEFAULT_TASK, source).text or ""


# --- sources of answers: a server, or a model in this process


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A model's name, and a function that streams the answer to messages and yields its figures last."""

    name: str
    answer: Callable[[Sequence[Message]], Iterator[str | Answered]]


@contextmanager
def served_model(url: str, values: Mapping[str, Any]) -> Iterator[ChatModel]:
    """Give access to a model of the server at `url`; `values` are the command's options.

    Raises: InvalidInput: the server has no model, or several of which none is named. UsageError: an option is only for
        models that are loaded here. ServiceUnreachable: the server does not answer.
    """
    from ..client.chat import ChatClient

    for name in options.PLACEMENT:
        if on_command_line(name):
            raise click.UsageError(f"--{name} is for a model that is loaded here: remove it, or --server")
    with ChatClient(url) as client:
        served_models = client.models()
        fields = _fields(values)
        if served_models.is_swiftopt:  # Other servers may reject fields that OpenAI's API lacks.
            fields["return_metrics"] = True
        name = values["model"] or _only(served_models.names)
        yield ChatModel(name, partial(client.answer, name, **fields))


def _only(names: Sequence[str]) -> str:
    if not names:
        raise InvalidInput("the server has no model: start it with `swiftopt serve --model NAME`")
    if len(names) > 1:
        raise InvalidInput(f"the server has {len(names)} models: choose one with --model ({', '.join(names)})")
    return names[0]


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as request fields; fields that OpenAI's API lacks are sent only if set."""
    sampling = values["sampling"].to_json()
    fields = {"max_tokens": values["max_new_tokens"]}
    fields |= {name: sampling[name] for name in ("temperature", "top_p", "seed")}
    extensions = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias")
    fields |= {name: sampling[name] for name in extensions if sampling[name]}
    swiftopt_fields = {name: values[name] for name in ("task", "method") if values[name] is not None}
    return {**fields, "swiftopt": swiftopt_fields} if swiftopt_fields else fields


@contextmanager
def loaded_model(db: str | None, values: Mapping[str, Any]) -> Iterator[ChatModel]:
    """Load a model and start its engine, whose KV cache is kept, so that each turn continues the last one.

    Raises: UsageError: no model is named. InvalidInput: the model has no chat template. SwiftoptError: loading failed.
    """
    if not values["model"]:
        raise click.UsageError("no model is given: use --model, or a server with --server")
    request = decoding_request(dict(values))
    _begin_loading(request)
    noted_remarks: set[str] = set()

    def answer(messages: Sequence[Message]) -> Iterator[str | Answered]:
        prompt = Prompt("chat", values["task"] or DEFAULT_TASK, messages=tuple(messages))
        options = {name: values[name] for name in ("method", "max_new_tokens", "sampling")}
        ticket = engine.submit(prompt, **options)
        try:
            yield from ticket
        finally:
            ticket.cancel()
        _, completion, decoding = ticket.generated[-1]
        yield Answered(completion.finish_reason, completion.n_tokens, completion.tok_s, completion.acceptance_rate)
        note_remarks(completion, decoding, noted_remarks)  # Printed after `Answered`, which ends the answer's line.

    with inputs.open_store(db) as store:
        from ..client.chat import Answered
        from ..tasks.model import Model

        model = Model(request.model, inputs.load(request), store)
        if getattr(model.runtime.tokenizer, "chat_template", None) is None:
            raise InvalidInput(f"{model.name} has no chat template: use an instruct model, or `swiftopt generate`")
        with model.engine(concurrency=1) as engine:
            yield ChatModel(model.name, answer)


# --- the conversation


class Conversation:
    """The turns of a chat; streams answers to stdout, and thoughts, figures and remarks to stderr."""

    def __init__(self, model: ChatModel, system: str | None, as_json: bool) -> None:
        self.model, self.system = model, system
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
            self.ask(_check_text(line.strip(), "the question"))
            return True
        command, _, text = line.strip().partition(" ")
        match command:
            case "/quit":
                return False
            case "/clear":
                self._turns.clear()
                note("the conversation is cleared")
            case "/system":
                self.system = _check_text(text, command) if text.strip() else None
                note("the system message applies from now on" if self.system else "the system message is removed")
            case "/help":
                note(COMMANDS)
            case _:
                note(f"unknown command {command}: /help lists them; put a space before a question that begins with /")
        return True

    def ask(self, question: str) -> None:
        """Show the answer; a question that got no answer is not added to the history.

        Raises: SwiftoptError: there is no answer, or it was interrupted.
        """
        from ..client.chat import Thought

        user_message, answer_texts, thought_texts = {"role": "user", "content": question}, list[str](), list[str]()
        system_messages = [{"role": "system", "content": self.system}] if self.system else []
        answer: Any = self.model.answer([*system_messages, *self._turns, user_message])
        try:
            with closing(answer):  # Stops the generation if reading ends early.
                for event in answer:
                    if isinstance(event, Thought):
                        thought_texts.append(event)
                        self._show(event, thought=True)
                    elif isinstance(event, str):
                        if thought_texts and not answer_texts:
                            self._show("\n", thought=True)
                        answer_texts.append(event)
                        self._show(event)
                    else:
                        self._show_end("".join(answer_texts), "".join(thought_texts), event)
        except BaseException:
            if answer_texts:
                self._show("\n")
            raise
        finally:
            if answer_texts:
                self._turns += [user_message, {"role": "assistant", "content": "".join(answer_texts)}]

    def _show(self, text: str, thought: bool = False) -> None:
        if not self._as_json:
            (self._thought if thought else self._answer).write(text)

    def _show_end(self, text: str, thought: str, end: Answered) -> None:
        if self._as_json:
            texts = {"text": text, "reasoning_content": thought} if thought else {"text": text}
            emit_json({"schema": "swiftopt.chat/1", "model": self.model.name, **texts, **asdict(end)})
        else:
            self._show("\n")
            figures = [] if end.n_tokens is None else [f"{end.n_tokens} tokens"]
            figures.append(f"{number(end.tokens_per_second, 1)} tok/s")
            if end.acceptance_rate is not None:
                figures.append(f"α {number(end.acceptance_rate)}")
            if end.finish_reason == "length":
                figures.append("truncated: raise --max-new-tokens")
            note(click.style(f"[{', '.join(figures)}]", dim=True))


# --- input


def _at_terminal(conversation: Conversation) -> None:
    """Read lines from the terminal until Ctrl-D or /quit; an error or Ctrl-C ends an answer, not the chat."""
    with suppress(ImportError):
        import readline  # noqa: F401  The import gives input() line editing and a history.

    end_by_signals()  # Ctrl-C does not end a chat, which has nothing to keep.
    note(f"{conversation.model.name}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat")
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
