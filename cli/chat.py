"""`swiftopt chat`: a chat in the terminal, with a server's model or with one that is loaded here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..core.errors import InvalidInput, StreamError, SwiftoptError
from ..core.requests import GenerateRequest
from ..core.streams import raw_prompt
from ..core.types import DEFAULT_TASK, Prompt, Sampling, check_task
from . import options
from .backend import Backend
from .generate import note_remarks
from .options import check_model, on_command_line, pick, positive
from .output import emit_json, note, note_load
from .render import number

if TYPE_CHECKING:
    from ..client.chat import Answered

Message = Mapping[str, str]

PLACEMENT = ("dtype", "device", "speed")  # options that a server decides for itself
ANSWER_TOKENS = 512  # of one answer at most, unless the caller says otherwise
COMMANDS = """\
/system TEXT  say how to answer from now on; without TEXT, take that back
/clear        forget what was said until now
/help         show this
/quit         end the chat, as Ctrl-D does"""


@options.command(short_help="Chat in the terminal, with a server or a model of your own.")
@click.option(
    "--model",
    shell_complete=options.models,
    help="Model to load here; with --server, which of its models.  [default: its only one]",
)
@click.option(
    "--server",
    metavar="URL",
    help="Server to chat with, ours or another of OpenAI's protocol; its key: SWIFTOPT_API_KEY."
    "  [env: SWIFTOPT_SERVER_URL]",
)
@options.from_field(GenerateRequest, "task", "Whose stored plan to use.  [default: default]")
@options.method
@options.group(options.PROMPTS, click.option("--system", metavar="TEXT", help="Message that says how to answer."))
@options.group(options.PROMPTS, click.option("--message", metavar="TEXT", help="Ask this one question, and end."))
@options.group(
    options.PROMPTS,
    click.option("--max-new-tokens", default=ANSWER_TOKENS, type=positive, help="Most tokens of an answer."),
)
@options.machine(GenerateRequest, "speed")
@options.sampling
@options.db
@options.as_json
@options.example("chat --model smollm2-135m", 'chat --server http://127.0.0.1:8000 --message "Why is the sky blue?"')
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
            for line in _piped_lines():
                if not conversation.take(line):
                    return


def _checked(text: str, where: str) -> str:
    """Return a text that a model can read.

    Raises: StreamError: it is empty, or no text.
    """
    return raw_prompt(text, DEFAULT_TASK, where).text or ""


# --- who answers


@dataclass(frozen=True, slots=True)
class Partner:
    """Who answers: the model's name, and the answer to messages as it grows, with what it came to at its end."""

    name: str
    answer: Callable[[Sequence[Message]], Iterator[str | Answered]]


@contextmanager
def served_partner(url: str, values: Mapping[str, Any]) -> Iterator[Partner]:
    """Give access to a model of the server at `url`; `values` are the command's options.

    Raises: InvalidInput: the server has no model, or several of which none is named. UsageError: an option is only for
        models that are loaded here. ServiceUnreachable: the server does not answer.
    """
    from ..client.chat import ChatClient

    for name in PLACEMENT:
        if on_command_line(name):
            raise click.UsageError(f"--{name} is for a model that is loaded here: leave it out, or --server")
    with ChatClient(url) as client:
        served = client.models()
        fields = _fields(values)
        if served.is_swiftopt:  # others may refuse what is not OpenAI's
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
    """Return the options as fields of a request; those beyond OpenAI's only where they are used."""
    sampling = values["sampling"].to_json()
    fields = {"max_tokens": values["max_new_tokens"]}
    fields |= {name: sampling[name] for name in ("temperature", "top_p", "seed")}
    beyond = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias")
    fields |= {name: sampling[name] for name in beyond if sampling[name]}
    own = {name: values[name] for name in ("task", "method") if values[name] is not None}
    return {**fields, "swiftopt": own} if own else fields


@contextmanager
def loaded_partner(db: str | None, values: Mapping[str, Any]) -> Iterator[Partner]:
    """Load a model and start its engine, which keeps what was read and said: each turn goes on behind the last.

    Raises: UsageError: no model is named. InvalidInput: it has no chat template. SwiftoptError: it cannot be loaded.
    """
    if not values["model"]:
        raise click.UsageError("nobody answers: name a model with --model, or a server with --server")
    check_model(pick(GenerateRequest, dict(values)))
    from ..client.chat import Answered
    from ..tasks.model import load

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
        note_remarks(done, info, noted)
        speed = done.n_tokens / done.timings.total_s if done.timings.total_s else None
        yield Answered(done.finish_reason, done.n_tokens, speed, done.acceptance_rate)

    model = load(values["model"], values["dtype"], values["device"], note_load, values["speed"], db)
    with model.store or nullcontext():
        if getattr(model.runtime.tokenizer, "chat_template", None) is None:
            raise InvalidInput(f"{model.name} has no chat template: use an instruct model, or `swiftopt generate`")
        with model.engine(concurrency=1) as engine:
            yield Partner(model.name, answer)


# --- the chat


class Conversation:
    """What was said so far, shown on stdout as it is said; thoughts, figures and remarks go to stderr."""

    def __init__(self, partner: Partner, system: str | None, as_json: bool) -> None:
        self.partner, self.system = partner, system
        self._as_json = as_json
        self._turns: list[Message] = []

    def take(self, line: str) -> bool:
        """Obey a command, or answer a question; return False at the chat's end.

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
        """Show the answer; a question is forgotten if not a word of its answer came.

        Raises: SwiftoptError: there is no answer, or it broke off.
        """
        from ..client.chat import Thought

        asked, said, thought = {"role": "user", "content": question}, list[str](), list[str]()
        before = [{"role": "system", "content": self.system}] if self.system else []
        answer: Any = self.partner.answer([*before, *self._turns, asked])
        try:
            with closing(answer):  # the partner gives up its answer where we stop listening
                for event in answer:
                    if isinstance(event, Thought):
                        thought.append(event)
                        self._show_thought(event)
                    elif isinstance(event, str):
                        if thought and not said:
                            self._show_thought("\n")
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

    def _show(self, text: str) -> None:
        if not self._as_json:
            click.echo(text, nl=False)

    def _show_thought(self, text: str) -> None:
        if not self._as_json:
            click.echo(click.style(text, dim=True), nl=False, err=True)

    def _show_end(self, text: str, thought: str, answered: Answered) -> None:
        if self._as_json:
            texts = {"text": text, "reasoning_content": thought} if thought else {"text": text}
            emit_json({"schema": "swiftopt.chat/1", "model": self.partner.name, **texts, **asdict(answered)})
        else:
            click.echo()
            parts = [] if answered.n_tokens is None else [f"{answered.n_tokens} tokens"]
            parts.append(f"{number(answered.tokens_per_second, 1)} tok/s")
            if answered.acceptance_rate is not None:
                parts.append(f"α {number(answered.acceptance_rate)}")
            if answered.finish_reason == "length":
                parts.append("cut off: raise --max-new-tokens")
            note(click.style(f"[{', '.join(parts)}]", dim=True))


# --- where lines come from


def _at_terminal(conversation: Conversation) -> None:
    """Take lines from a person, until Ctrl-D or /quit; an error or Ctrl-C ends an answer, not the chat."""
    with suppress(ImportError):
        import readline  # noqa: F401  input() has editing and a history with it

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
    click.echo("> ", nl=False, err=True)  # stdout leads to a file, which is for answers
    return input()


def _piped_lines() -> Iterator[str]:
    for line in sys.stdin.buffer:
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise StreamError("standard input is not UTF-8 text: pipe text in, one question per line") from error
        yield text
