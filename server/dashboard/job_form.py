"""The form for a new job: its fields, their labels, and its submission."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from itertools import chain
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError
from starlette.datastructures import FormData

from ...core.errors import (
    ModelNotFound,
    StoreError,
    SwiftoptError,
    UnsupportedModel,
)
from ...core.requests import DEFAULT_QUEUE, Job, TuneRequest
from ...core.serialization import explain_error
from ...core.settings import AUTO, FORMATS, STORED, TuningSettings
from ...core.types import Sampling
from ...models.sources import DTYPES
from ...models.stores import stored_models
from ...optimizer.strategies import STRATEGIES
from .. import jobs as api
from ..jobs import JobSubmission, StreamSource
from ..middleware import State

NAMES_OFFERED = 200  # Maximum number of suggestions for a text field.
LABELS = {  # Field -> label, if the field's name is not clear enough.
    "limit": "Use only the first prompts",
    "max_new_tokens": "Tokens per completion",
    "concurrency": "Prompts decoded at once",
    "dtype": "Weights as",
    "speed": "How passes are computed",
    "n_prompts": "Prompts",
    "settings.optimise": "Search for layer sets",
    "settings.search_drafting": "Choose drafting by measured time",
    "settings.strategy": "Search strategy",
    "settings.exportable": "Only sets that other engines can load",
    "settings.draft_format": "Format of draft weights",
    "settings.max_steps": "Maximum number of candidates",
    "settings.patience": "Candidates without an improvement that end the search",
    "settings.context_window": "Tokens on which a candidate is scored",
    "settings.bayes_interval": "Candidates between two suggestions",
    "settings.seed": "Seed of the search",
    "sampling.seed": "Seed of sampling",
    "sampling.top_k": "Top k (0: off)",
    "sampling.min_p": "Min p (0: off)",
}


def label(name: str) -> str:
    """Return a field's label: a special one, or its last name in words."""
    text = name.rpartition(".")[2].replace("_", " ")
    return LABELS.get(name, text[:1].upper() + text[1:])


NUMBER: TypeAdapter[int | float] = TypeAdapter(int | Annotated[float, Field(allow_inf_nan=False)])


@dataclass(frozen=True, slots=True)
class Option:
    """A field of the form: `value` is its default as shown; with `choices` one of them is chosen."""

    name: str
    value: str
    kind: Literal["text", "number", "choice"]
    choices: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its label in the form."""
        return label(self.name)

    def read(self, text: str) -> Any:
        """Return the value of a text; an invalid number stays a text, which validation refuses."""
        if self.choices == ("yes", "no"):
            return text == "yes"
        with suppress(ValueError):
            return NUMBER.validate_strings(text) if self.kind == "number" else text
        return text


def options_of(record_type: type, prefix: str = "", names: Sequence[str] = ()) -> list[Option]:
    """Return an option for each field of a record that is a single value; `names` choose some."""
    choices = {"strategy": tuple(STRATEGIES), "draft_format": (AUTO, STORED, *FORMATS), "dtype": DTYPES}
    field_types, options = get_type_hints(record_type), []
    for field in fields(record_type):
        name, field_type = f"{prefix}{field.name}", field_types[field.name]
        default = "" if field.default is MISSING or field.default is None else field.default
        types = {field_type, *get_args(field_type)}
        if names and field.name not in names:
            continue
        if field_type is bool:
            options.append(Option(name, "yes" if default else "no", "choice", ("yes", "no")))
        elif get_origin(field_type) is Literal or field.name in choices:
            options.append(Option(name, str(default), "choice", choices.get(field.name, get_args(field_type))))
        elif types & {int, float} and get_origin(field_type) is not tuple:
            options.append(Option(name, f"{default:g}" if default != "" else "", "number"))
        elif field_type is str:
            options.append(Option(name, str(default), "text"))
    return options


FIRST_OPTIONS = options_of(TuneRequest, names=("limit", "max_new_tokens", "concurrency"))
OTHER_OPTIONS = {
    "The model": [
        *options_of(TuneRequest, names=("device", "dtype", "speed")),
        Option("queue", DEFAULT_QUEUE, "text"),
    ],
    "The search and its drafts": options_of(TuningSettings, "settings."),
    "Sampling": options_of(Sampling, "sampling."),
}
OPTIONS = {option.name: option for option in (*FIRST_OPTIONS, *chain.from_iterable(OTHER_OPTIONS.values()))}


def _form_text(form: FormData, name: str) -> str:
    text = form.get(name, "")
    return text.strip() if isinstance(text, str) else ""


def submitted_values(form: FormData, stream: str) -> dict[str, Any]:
    """Return the form as values of a `JobSubmission`, without those at their defaults."""
    values: dict[str, Any] = {"model": _form_text(form, "model"), "stream": {"name": stream}}
    if task := _form_text(form, "task"):
        values["task"] = task
    for name, option in OPTIONS.items():
        text = _form_text(form, name)
        if text not in ("", option.value):
            group, _, field = name.rpartition(".")
            (values.setdefault(group, {}) if group else values)[field] = option.read(text)
    return values


def submit_form(app: State, form: FormData, content: bytes, file: str) -> tuple[Job, bool]:
    """Submit the job of a form; return it, and whether it is new. `content` is that of the uploaded `file`, if any.

    Raises: ValidationError: a value is invalid. SwiftoptError: the stream is invalid, or the database is unavailable.
    """
    body = JobSubmission.model_validate(submitted_values(form, file or _form_text(form, "stream")))
    if file:
        sha256, _ = api.keep_upload(app, content, body.task or PurePosixPath(file).stem)
        body = body.model_copy(update={"task": None, "stream": StreamSource(upload=sha256)})
    prompts, stream, task = api.prompts_of(app, body)
    return app.board.submit(body.tune_request(stream, task), prompts, body.queue)


def form_errors(error: ValidationError | SwiftoptError) -> list[tuple[str, str]]:
    """Return the errors of a form as (name of the field, sentence)."""
    if isinstance(error, SwiftoptError):
        about = "model" if isinstance(error, ModelNotFound | UnsupportedModel) else "stream"
        return [(error.param or about, str(error))]
    problems = []
    for problem in error.errors():
        name = ".".join(str(name_part) for name_part in problem["loc"][:2])
        name = "stream" if name.startswith("stream") else name
        problems.append(
            (name, explain_error([label(name)] if name else [], problem["type"], problem["msg"], problem["input"]))
        )
    return problems


def form_values(app: State, form: FormData, errors: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the values of the form: its texts, its errors, and suggestions of names.

    Suggested models are those served, those loaded before, and those that other programs keep on this machine. A form
    without a model yet gets the served one, if there is only one.
    """
    served = [engine.served.path for engine in app.engines.of.values()]
    models_known = dict.fromkeys(served)
    with suppress(StoreError):  # Without the database, suggest fewer names.
        models_known |= dict.fromkeys(app.store.model_names())
    models_known |= dict.fromkeys(model.name for model in stored_models() if model.problem is None)
    folders = app.settings.stream_folders
    typed = {name: _form_text(form, name) for name in ("model", "task", "stream", *OPTIONS)}
    if "model" not in form and len(served) == 1:
        typed["model"] = served[0]
    return {
        "typed": typed,
        "wrong": errors,
        "wrong_at": {name for name, _ in errors},
        "first": FIRST_OPTIONS,
        "rest": OTHER_OPTIONS,
        "opened": any(
            name not in ("", "model", "task", "stream", *(field.name for field in FIRST_OPTIONS)) for name, _ in errors
        ),
        "models": list(models_known)[:NAMES_OFFERED],
        "streams": api.stream_names(folders)[:NAMES_OFFERED],
        "has_folders": bool(folders),
    }
