"""`swiftopt chat`: a chat in the terminal, with a server or with an engine of this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..core.errors import StreamError, SwiftoptError
from ..core.requests import GenerateRequest
from ..core.streams import raw_prompt
from ..core.types import Sampling, check_task
from . import options
from .backend import Backend
from .options import pick, positive
from .output import emit_json, note
from .partners import DEFAULT_TASK, Message, Partner, loaded_partner, served_partner
from .render import number

if TYPE_CHECKING:
    from ..client.chat import Answered

ANSWER_TOKENS = 512  # of one answer at most, unless the caller says otherwise
COMMANDS = """\
/system TEXT  say how to answer from now on; without TEXT, take that back
/clear        forget what was said until now
/help         show this
/quit         end the chat, as Ctrl-D does"""


@click.command(short_help="Chat in the terminal, with a server or a model of your own.")
@click.option("--model", help="Model to load here; with --server, which of its models.  [default: its only one]")
@click.option(
    "--server",
    metavar="URL",
    help="Server to chat with, ours or another of OpenAI's protocol; its key: SWIFTOPT_API_KEY."
    "  [env: SWIFTOPT_SERVER_URL]",
)
@options.from_field(GenerateRequest, "task", "Whose stored plan to use.  [default: default]")
@options.method
@click.option("--system", metavar="TEXT", help="Message that says how to answer.")
@click.option("--message", metavar="TEXT", help="Ask this one question, and end.")
@click.option(
    "--max-new-tokens", default=ANSWER_TOKENS, show_default=True, type=positive, help="Most tokens of an answer."
)
@options.placement(GenerateRequest)
@options.speed(GenerateRequest)
@options.sampling
@options.db
@options.json
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


# --- the chat


class Conversation:
    """What was said so far, shown on stdout as it is said; figures and remarks go to stderr."""

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
        asked, said = {"role": "user", "content": question}, list[str]()
        before = [{"role": "system", "content": self.system}] if self.system else []
        try:
            for event in self._answer([*before, *self._turns, asked]):
                if isinstance(event, str):
                    said.append(event)
                    self._show(event)
                else:
                    self._show_end("".join(said), event)
        except BaseException:
            if said:
                self._show("\n")
            raise
        finally:
            if said:
                self._turns += [asked, {"role": "assistant", "content": "".join(said)}]

    def _answer(self, messages: Sequence[Message]) -> Iterator[str | Answered]:
        """Yield what the partner does, and give up its answer when the caller stops."""
        answer: Any = self.partner.answer(messages)
        with closing(answer):
            yield from answer

    def _show(self, text: str) -> None:
        if not self._as_json:
            click.echo(text, nl=False)

    def _show_end(self, text: str, answered: Answered) -> None:
        if self._as_json:
            emit_json(_answer_json(self.partner.name, text, answered))
        else:
            click.echo()
            note(click.style(_figures(answered), dim=True))


def _figures(answered: Answered) -> str:
    """Return an answer's figures on one line."""
    parts = [] if answered.n_tokens is None else [f"{answered.n_tokens} tokens"]
    parts.append(f"{number(answered.tokens_per_second, 1)} tok/s")
    if answered.acceptance_rate is not None:
        parts.append(f"α {number(answered.acceptance_rate)}")
    if answered.finish_reason == "length":
        parts.append("cut off: raise --max-new-tokens")
    return f"[{', '.join(parts)}]"


def _answer_json(model: str, text: str, answered: Answered) -> dict[str, Any]:
    return {"schema": "swiftopt.chat/1", "model": model, "text": text, **asdict(answered)}


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
