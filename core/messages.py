"""Messages between the server and a model's engine process: one per line, each a record.

A line is the message's name, a space, and its JSON object. The server starts with `Serve`; the engine sends `Loading`
until it is `Ready`. Then it answers each request, by its `id`, with one message or with those of a completion:
`PromptRead`, `AnswerText`, …, `AnswerDone`. `Failed` may end any of these. `request_id` is that of the HTTP request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, get_args

from . import errors
from .errors import InvalidInput, SettingsError, SwiftoptError
from .events import ModelTuning, TuningVerb, Way
from .plainly import WhyPlain
from .requests import CompletionRequest, Piece, ServedModel
from .rounds import NO_ROUNDS, RequestRounds
from .serialization import Record, adapter, kinds_by_name
from .types import Completion, TokenSource, VerdictWord

VERSION = 7  # Protocol version. Increase it when a message changes: both sides must have the same one.
MISMATCH = "server and engine are of different versions, perhaps because swiftopt was upgraded while running"

TEMPLATE_FIELDS = ("reasoning_effort",)  # Fields of chats that a template obeys, if it reads them.

# A token's text, its log probability (None: not available), and texts and log probabilities of the likeliest tokens
# at that position.
PieceLogprob = tuple[Piece, float | None, tuple[tuple[Piece, float], ...]]
# A token's text, its source, and the draft tokens rejected at that position.
TracedPiece = tuple[Piece, TokenSource, tuple[Piece, ...]]


# --- messages from the server to the engine


@dataclass(frozen=True, slots=True)
class Serve(Record):
    """Load this model and serve it; the first message."""

    model: ServedModel
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Decode(Record):
    """Complete a prompt."""

    request: CompletionRequest
    id: int = 0
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Cancel(Record):
    """Cancel the question with this id; the engine sends no reply."""

    id: int


@dataclass(frozen=True, slots=True)
class Tokenize(Record):
    """Ask for the token ids of a request's prompt."""

    request: CompletionRequest
    id: int = 0
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Detokenize(Record):
    """Ask for the text of token ids."""

    token_ids: tuple[int, ...]
    id: int = 0
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Steer(Record):
    """Carry out `verb`, if any, and ask for the tuning status. `pin` needs a task, and a way or None to unpin."""

    verb: TuningVerb | None = None
    task: str | None = None
    way: Way | None = None
    id: int = 0
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Keys(Record):
    """Names of the valid API keys, sent again whenever they change; texts kept for other keys are deleted."""

    names: tuple[str, ...]


Question = Decode | Tokenize | Detokenize | Steer
FromServer = Serve | Question | Cancel | Keys


# --- messages from the engine to the server


@dataclass(frozen=True, slots=True)
class Loading(Record):
    """A step of loading the model, in words."""

    step: str


@dataclass(frozen=True, slots=True)
class TemplateInputs(Record):
    """The names of the values and of the keys of messages that a chat template reads; keys None: it may read any."""

    values: tuple[str, ...] = ()
    message_keys: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Ready(Record):
    """The model is loaded; states its number of positions, and whether drafted outputs are exact.

    `template` is what its chat template reads; None: the model has no chats.
    """

    max_positions: int
    fingerprint: str
    exact: bool
    device: str
    dtype: str
    template: TemplateInputs | None
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Failed(Record):
    """A request, or loading the model (`id` None), failed: the error's class, its message, and the invalid field."""

    id: int | None
    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, id: int | None, error: SwiftoptError) -> Self:
        return cls(id, type(error).__name__, str(error), getattr(error, "param", None))

    @property
    def error(self) -> SwiftoptError:
        """The error as raised in the engine's process."""
        kind: type[SwiftoptError] = getattr(errors, self.kind, SwiftoptError)
        return kind(self.message, self.param)


@dataclass(frozen=True, slots=True)
class PromptRead(Record):
    """The prompt's length, before anything is decoded.

    `text` and its `first` token are set if the answer begins with the prompt (`echo`). `forms` names the rows of
    `answer_forms` for a chat's answer. `end_of_thought` is the token that ends a thought, if it is a single token;
    `in_thought`: the prompt has begun a thought. `is_constrained`: the output is constrained JSON, without a thought.
    """

    id: int
    n_tokens: int
    text: str = ""
    first: Piece | None = None
    forms: tuple[str, ...] = ()
    end_of_thought: int | None = None
    in_thought: bool = False
    is_constrained: bool = False


@dataclass(frozen=True, slots=True)
class AnswerText(Record):
    """The next part of the completion, with the requested data of its tokens and, once, of the prompt's."""

    id: int
    text: str
    n_tokens: int
    logprobs: tuple[PieceLogprob, ...] = ()
    prompt_logprobs: tuple[PieceLogprob, ...] | None = None
    trace: tuple[TracedPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerDone(Record):
    """The completion's end: how long it waited, its task, the method and the plan's version, or why it was plain.

    `saved_s` is the extra time of plain decoding in seconds, by the ratio known when the completion ended; `verdict`
    is the verdict at that time on the drafts of its task, or on the plan.
    """

    id: int
    queued_s: float
    task: str
    completion: Completion
    decoded_with: str
    version: int | None
    why_plain: WhyPlain | None
    saved_s: float = 0.0
    verdict: VerdictWord | None = None
    rounds: RequestRounds = NO_ROUNDS


@dataclass(frozen=True, slots=True)
class PromptTokens(Record):
    """The tokens of a prompt."""

    id: int
    token_ids: tuple[int, ...]
    max_positions: int


@dataclass(frozen=True, slots=True)
class TokensText(Record):
    """The text of tokens."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class TuningNow(Record):
    """The tuning status of the model."""

    id: int
    tuning: ModelTuning


Answer = PromptRead | AnswerText | AnswerDone | PromptTokens | TokensText | TuningNow | Failed
FromEngine = Loading | Ready | Answer

KINDS = kinds_by_name((*get_args(FromServer), *get_args(FromEngine)), "-")
_NAMES: dict[Any, str] = {kind: name for name, kind in KINDS.items()}


def encode(message: FromServer | FromEngine) -> bytes:
    """Return a message's line.

    Raises: InvalidInput: a text has a lone surrogate, or objects are nested too deeply.
    """
    kind: Any = type(message)
    try:
        return _NAMES[kind].encode() + b" " + adapter(kind).dump_json(message, warnings=False) + b"\n"
    except ValueError as error:
        if "surrogate" in str(error):
            advice = "a text in the body has a lone surrogate, half of a character: send whole characters"
        else:
            advice = "the body is nested too deeply: send it with fewer levels"
        raise InvalidInput(advice) from None


def _decode(kinds: Any, reader_name: str, line: bytes) -> Any:
    """Return the message of a line, one of the union `kinds`.

    Raises: SettingsError: the line is not a message to this reader, or the other process has another version.
    """
    name, _, values = line.partition(b" ")
    try:
        message = adapter(KINDS[name.decode()]).validate_json(values)
    except (KeyError, ValueError) as error:
        raise SettingsError(f"{MISMATCH} ({str(error).splitlines()[0]}): restart the server") from error
    if not isinstance(message, kinds):
        raise SettingsError(f"{MISMATCH} ({type(message).__name__} to the {reader_name}): restart the server")
    if isinstance(message, Serve | Ready) and message.version != VERSION:
        raise SettingsError(f"{MISMATCH} (version {message.version}, not {VERSION}): restart the server")
    return message


from_server: Callable[[bytes], FromServer] = partial(_decode, FromServer, "engine")
from_engine: Callable[[bytes], FromEngine] = partial(_decode, FromEngine, "server")
