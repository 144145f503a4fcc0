"""Who answers in a chat: a server's model, or one that is loaded here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import click

from ..core.errors import InvalidInput
from ..core.requests import GenerateRequest
from ..core.types import Prompt, Sampling
from ..decoding.methods import method_info
from .backend import on_command_line
from .generate import remarks
from .options import check_model, pick
from .output import note, note_load

if TYPE_CHECKING:
    from ..client.chat import Answered, ChatClient
    from ..tasks.model import LiveEngine

Message = Mapping[str, str]

DEFAULT_TASK = "default"
PLACEMENT = ("dtype", "device", "speed")  # options that a server decides for itself


class Partner(Protocol):
    """Who answers: the model's name, and the answer to messages as it grows, with what it came to at its end."""

    name: str

    def answer(self, messages: Sequence[Message]) -> Iterator[str | Answered]: ...


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
        yield _Served(client, values["model"] or _only(served.names), fields)


def _only(names: Sequence[str]) -> str:
    if not names:
        raise InvalidInput("the server decodes with no model: start it with `swiftopt serve --model NAME`")
    if len(names) > 1:
        raise InvalidInput(f"the server has {len(names)} models: choose one with --model ({', '.join(names)})")
    return names[0]


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as fields of a request; those beyond OpenAI's only where they are used."""
    sampling: Sampling = values["sampling"]
    fields: dict[str, Any] = {"max_tokens": values["max_new_tokens"], "temperature": sampling.temperature}
    fields |= {"top_p": sampling.top_p, "seed": sampling.seed}
    written = sampling.to_json()
    names = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias")
    fields |= {name: written[name] for name in names if written[name]}
    own = {name: values[name] for name in ("task", "method") if values[name] is not None}
    return {**fields, "swiftopt": own} if own else fields


class _Served:
    """A server's model."""

    def __init__(self, client: ChatClient, name: str, fields: Mapping[str, Any]) -> None:
        self.name = name
        self._client, self._fields = client, fields

    def answer(self, messages: Sequence[Message]) -> Iterator[str | Answered]:
        return self._client.answer(self.name, messages, **self._fields)


@contextmanager
def loaded_partner(db: str | None, values: Mapping[str, Any]) -> Iterator[Partner]:
    """Load a model and start its engine; `values` are the command's options.

    Raises: UsageError: no model is named. InvalidInput: it has no chat template. SwiftoptError: it cannot be loaded.
    """
    if not values["model"]:
        raise click.UsageError("nobody answers: name a model with --model, or a server with --server")
    if values["method"] is not None:
        method_info(values["method"])
    check_model(pick(GenerateRequest, dict(values)))
    from ..tasks.model import load

    model = load(values["model"], values["dtype"], values["device"], note_load, values["speed"], db)
    with ExitStack() as stack:
        if model.store is not None:
            stack.callback(model.store.close)
        if getattr(model.runtime.tokenizer, "chat_template", None) is None:
            raise InvalidInput(f"{model.name} has no chat template: use an instruct model, or `swiftopt generate`")
        yield _Loaded(stack.enter_context(model.engine(concurrency=1)), values)


class _Loaded:
    """A model of this process; its engine keeps what was read and said, so that each turn goes on behind the last."""

    def __init__(self, engine: LiveEngine, values: Mapping[str, Any]) -> None:
        self.name = engine.model.name
        self._engine, self._task = engine, values["task"] or DEFAULT_TASK
        self._options = {name: values[name] for name in ("method", "max_new_tokens", "sampling")}
        self._noted: set[str] = set()

    def answer(self, messages: Sequence[Message]) -> Iterator[str | Answered]:
        from ..client.chat import Answered

        ticket = self._engine.submit(Prompt("chat", self._task, messages=tuple(messages)), **self._options)
        try:
            yield from ticket
        finally:
            ticket.cancel()
        _, done, info = ticket.generated[-1]
        for text in remarks(done, info):
            if text not in self._noted:
                self._noted.add(text)
                note(f"note: {text}")
        speed = done.n_tokens / done.timings.total_s if done.timings.total_s else None
        yield Answered(done.finish_reason, done.n_tokens, speed, done.acceptance_rate)
