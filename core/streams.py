"""Streams of prompts and files of completions: JSON Lines, one object per line.

Prompts are checked line by line before any model is loaded; every completion is flushed when it is written.
"""

from __future__ import annotations

import dataclasses
import difflib
import gzip
import hashlib
import io
import json
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from itertools import islice
from json import JSONDecodeError
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal

import platformdirs

from .errors import InvalidInput, OutputError, SettingsError, StreamError, StreamNotFound, UnsupportedValue
from .serialization import Form, Record, Settings, count, ranged
from .templates import JUDGES, template_of
from .types import DEFAULT_TASK, MAX_NAME_LENGTH, Completion, Prompt, check_task

STDIN = "-"
# Number of prompts after `limit` that are also read, for short searches and trainings.
N_LEARNED_PROMPTS = 32
# Each line of a stream has exactly one of these fields.
FIELDS = ("prompt", "messages", "question", "turns")
IDS = ("id", "task_id", "qid")  # Fields in which data sets give the id of a row.
GZIP_SUFFIX = ".gz"
# Fields of `Prompt` that earlier versions lacked. Empty ones are not hashed, so old streams keep their SHA-256.
LATER_FIELDS = ("stop", "reference", "sample")
EXAMPLE = '{"prompt": "..."}'
EMPTY_STOP = "a stop string is empty, and would end every completion at once: remove it"


def encodable(value: Any) -> Any:
    """Return the value unchanged. Raises ValueError for a string that UTF-8 or a database cannot hold."""
    if isinstance(value, str) and "\0" in value:
        raise ValueError("the text contains a NUL character: delete it")
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("the text contains a lone surrogate, which is not valid text: delete that character")
    return value


def _not_blank(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        raise ValueError("the text is empty: write one or delete the line")
    return encodable(value)


def _id_text(value: Any) -> Any:
    text = str(value) if type(value) is int else encodable(value)
    if isinstance(text, str) and len(text) > MAX_NAME_LENGTH:
        raise ValueError(f"it has {len(text)} characters: use at most {MAX_NAME_LENGTH}, or remove it")
    return text


def _as_list(value: Any) -> Any:
    if value is not None and not isinstance(value, str | list):
        raise ValueError("use a text or a list of texts")
    return [value] if isinstance(value, str) else value or []


def _reference(value: Any) -> dict[str, str]:
    """Read a line's reference answer. In streams that swiftopt did not write, the field may be something else."""
    if not isinstance(value, dict) or value.get("judge") not in JUDGES:
        return {}
    return {str(name): encodable(str(text)) for name, text in value.items()}


Text = Annotated[str, Form(str, str, _not_blank)]

# For each type of content part, the key that holds its text.
TEXT_PARTS: Mapping[str, str] = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
}


def text_of(content: str | Iterable[Any], path: str = "content", parts: Mapping[str, str] = TEXT_PARTS) -> str:
    """Return the text of a content, which may be a list of parts in OpenAI's form.

    Args:   parts: the accepted types of parts, each with the key of its text.
    Raises: InvalidInput: a part is not text; `param` is its place.
    """
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        part_type = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part_type, str) or part_type not in parts:
            problem = f"{path}[{index}] is of type {part_type!r}: only text is supported, send parts of type text"
            raise UnsupportedValue(problem, f"{path}[{index}].type")
        if not isinstance(text := part.get(parts[part_type]), str):
            raise InvalidInput(f"{path}[{index}] has no text: add one", f"{path}[{index}].{parts[part_type]}")
        texts.append(text)
    return "".join(texts)


def _content(value: Any) -> Any:
    return _not_blank(text_of(value) if isinstance(value, list) else value)


@dataclass(frozen=True, slots=True)
class ChatTurn(Record):
    """A message of a line; parts of text are joined."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, Form(str, str, _content)]


@dataclass(frozen=True, slots=True)
class StreamLine(Record):
    """A line of a stream; it has exactly one of `FIELDS`. Unknown keys are ignored."""

    ERROR: ClassVar = StreamError

    prompt: Text | None = None
    messages: tuple[ChatTurn, ...] | None = field(default=None, metadata={"min_length": 1})
    question: Text | None = None
    turns: tuple[Text, ...] | None = field(default=None, metadata={"min_length": 1})
    id: Annotated[str, Form(str, str, _id_text)] | None = None
    task: Any = None
    max_new_tokens: int | None = ranged(None, ge=1)
    stop: Annotated[tuple[Annotated[str, Form(str, str, encodable)], ...], Form(list, list[str], _as_list)] = ()
    reference: Annotated[Mapping[str, str], Form(dict, dict[str, str], _reference)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamForm(Settings):
    """How lines become prompts: optionally as rows of a data set, with examples and stop strings.

    `template` names one of `core.templates`; the first `shots` rows (None: the template's number) are then examples
    for all others, and not prompts. `stop` are strings that end every completion, in addition to the template's.

    Raises: SettingsError: the template is unknown, there are shots without a template, or a stop string is empty.
    """

    NAME: ClassVar = "the stream's form"

    template: str | None = None
    shots: int | None = count(None, least=0)
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if "" in self.stop:
            raise SettingsError(EMPTY_STOP, "stop")
        if self.template is not None:
            template_of(self.template)
        elif self.shots is not None:
            raise SettingsError("shots are examples of a data set: add --template", "shots")


def read_stream(
    path: str, default_task: str | None = None, limit: int | None = None, form: StreamForm | None = None
) -> list[Prompt]:
    """The prompts of a JSON Lines file (optionally gzip), or of standard input for "-", in order.

    `prompt` becomes raw text; `question` and `turns` become turns of the user; `messages` are used unchanged; `stop` is
    one string or several. The task is that of the line, or `default_task`, or the file's stem ("default" for standard
    input). The id is that of the line, or its number from 1. With `limit`, only the first `limit` prompts are read.

    Raises: StreamNotFound: there is no such file. StreamError: it cannot be read, contains no prompt, or a line is not
        a prompt. SettingsError: `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise SettingsError(f"limit {limit} is out of range: use 1 or more")
    where = "standard input" if path == STDIN else path
    stem = Path(path.removesuffix(GZIP_SUFFIX)).stem
    task = default_task if default_task is not None else (DEFAULT_TASK if path == STDIN else stem)
    with _open_stream(path) as source:
        return parse_stream(source, where, task, limit, form)


def read_with_others(
    path: str, default_task: str | None, limit: int | None, form: StreamForm | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the first `limit` prompts of a stream, and up to `N_LEARNED_PROMPTS` further prompts for training."""
    prompts = read_stream(path, default_task, limit, form)
    if limit is None or path == STDIN:
        return prompts, []
    try:
        return prompts, read_stream(path, default_task, limit + N_LEARNED_PROMPTS, form)[len(prompts) :]
    except StreamError:  # A line after `limit` is invalid, which must not make the command fail.
        return prompts, []


def parse_stream(
    source: Iterable[bytes], where: str, task: str, limit: int | None = None, form: StreamForm | None = None
) -> list[Prompt]:
    """The prompts of JSON Lines, as in `read_stream`; `where` names their origin in errors.

    Raises: StreamError: there is no prompt, or a line is not a prompt.
    """
    form = form or StreamForm()
    check_task(task, "the task", StreamError)
    numbered_lines = enumerate(_text_lines(source, where), start=1)
    lines = ((number, f"{where} line {number}", line) for number, line in numbered_lines if line.strip())
    if form.template is None:
        prompts_read: Iterable[Prompt] = (
            _prompt(_parse_object(line, line_name), number, task, line_name) for number, line_name, line in lines
        )
        what_is_missing = f"no prompt: write one JSON object per line, for example {EXAMPLE}"
    else:
        shots = template_of(form.template).shots if form.shots is None else form.shots
        prompts_read = _row_prompts(lines, task, form.template, shots)
        what_is_missing = f"no row after its first {shots}, the examples: lower --shots or add rows"
    prompts = [replace(prompt, stop=(*prompt.stop, *form.stop)) for prompt in islice(prompts_read, limit)]
    if not prompts:
        raise StreamError(f"{where} holds {what_is_missing}")
    return prompts


def _row_prompts(lines: Iterable[tuple[int, str, str]], task: str, template: str, shots: int) -> Iterator[Prompt]:
    """The rows of a data set as prompts, without the first `shots` rows, which serve as examples."""
    row_template, rows = (
        template_of(template),
        ((number, line_name, _parse_object(line, line_name)) for number, line_name, line in lines),
    )
    examples = "".join(row_template.example(row, line_name) for _, line_name, row in islice(rows, shots))
    for number, line_name, row in rows:
        row_id = next((row[name] for name in IDS if name in row), None)
        prompt = _prompt({"prompt": examples + row_template.ask(row, line_name), "id": row_id}, number, task, line_name)
        yield replace(prompt, stop=row_template.stop, reference=row_template.reference(row, line_name))


def stream_lines(prompts: Iterable[Prompt]) -> str:
    """The prompts as JSON Lines, from which `parse_stream` restores them exactly."""
    return "".join(json.dumps(_line_values(prompt)) + "\n" for prompt in prompts)


def _line_values(prompt: Prompt) -> dict[str, Any]:
    values: dict[str, Any] = {"id": prompt.id, "task": prompt.task}
    if prompt.text is not None:
        values["prompt"] = prompt.text
    elif prompt.messages:
        values["messages"] = [dict(message) for message in prompt.messages]
    else:
        values["turns"] = list(prompt.turns)
    optional_values = {
        "max_new_tokens": prompt.max_new_tokens,
        "stop": list(prompt.stop),
        "reference": dict(prompt.reference),
    }
    return {**values, **{name: value for name, value in optional_values.items() if value}}


def raw_prompt(text: str, task: str, where: str) -> Prompt:
    """Return a single text as a prompt; `where` names its origin in errors.

    Raises: StreamError: it is empty or not text, or the task is not a valid name.
    """
    check_task(task, "the task", StreamError)
    if not text.strip():
        raise StreamError(f"{where}: the text is empty: write one, or remove {where}")
    try:
        return Prompt("1", task, encodable(text))
    except ValueError as error:
        raise StreamError(f"{where}: {error}") from error


def stream_sha256(prompts: Iterable[Prompt]) -> str:
    """Hex SHA-256 of the prompts in order, independent of the file they were read from."""
    digest = hashlib.sha256()
    for prompt in prompts:
        values = {**dataclasses.asdict(prompt), "messages": [dict(message) for message in prompt.messages]}
        values = {name: value for name, value in values.items() if value or name not in LATER_FIELDS}
        digest.update(json.dumps(values, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


@contextmanager
def _open_stream(path: str) -> Iterator[BinaryIO]:
    if path == STDIN:
        yield sys.stdin.buffer
        return
    if not path:
        raise StreamError("the stream has no name: use a file of prompts, or - for standard input")
    target = Path(path)
    # Not `Path.is_dir`, which raises if the path is too long.
    if os.path.isdir(path):
        file_names = sorted(entry.name for entry in target.glob("*.jsonl"))
        advice = f"use one of its files, such as {file_names[0]}" if file_names else "use a JSON Lines file"
        raise StreamNotFound(f"the stream {path} is a folder: {advice}")
    try:
        source = target.open("rb")
    except FileNotFoundError as error:
        raise StreamNotFound(f"there is no stream {path}: {_nearest_file(target)}") from error
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL character.
        reason = error.strerror if isinstance(error, OSError) else error
        raise StreamError(f"the stream {path} cannot be read ({reason}): check its path and permissions") from error
    with source:
        yield source if target.suffix != GZIP_SUFFIX else _decompress(source, path)


def _decompress(source: BinaryIO, path: str) -> BinaryIO:
    """Return the decompressed stream of a gzip file.

    Raises: StreamError: it is not a gzip file.
    """
    try:
        return io.BytesIO(gzip.decompress(source.read()))
    except (OSError, EOFError, zlib.error) as error:
        raise StreamError(
            f"the stream {path} is not a gzip file ({error}): unpack it, or check the download"
        ) from error


def _nearest_file(target: Path) -> str:
    try:
        names = sorted(entry.name for entry in target.parent.iterdir() if entry.is_file())
    except OSError:
        return f"the folder {target.parent} does not exist either, check the path"
    similar_names = difflib.get_close_matches(target.name, names, n=1, cutoff=0.5)
    # The names without their extensions must also be similar.
    similar_names = [name for name in similar_names if difflib.get_close_matches(target.stem, [Path(name).stem])]
    return f"did you mean {target.parent / similar_names[0]}?" if similar_names else "check the path"


def _text_lines(source: Iterable[bytes], where: str) -> Iterator[str]:
    """Lines split at newlines only (JSON strings may hold other Unicode separators), without a byte-order mark."""
    try:
        for number, raw_line in enumerate(source, start=1):
            try:
                text = raw_line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise StreamError(f"{where} line {number} is not UTF-8 text: save the stream as JSON Lines") from error
            if "\0" in text:
                raise StreamError(f"{where} line {number} contains binary data: save the stream as JSON Lines in UTF-8")
            yield text
    except OSError as error:
        raise StreamError(f"{where} cannot be read to its end ({error.strerror}): check the file") from error


def _prompt(values: Mapping[str, Any], number: int, task: str, line_name: str) -> Prompt:
    given_fields = [name for name in FIELDS if values.get(name) is not None]
    if not given_fields:
        similar = [(key, name) for key in values if key not in FIELDS for name in get_close_matches(key, FIELDS, n=1)]
        advice = f"did you mean {similar[0][1]!r} by {similar[0][0]!r}?" if similar else "add one of them"
        raise StreamError(f"{line_name} has none of the fields {', '.join(FIELDS)}: {advice}")
    if len(given_fields) > 1:
        raise StreamError(f"{line_name} has {' and '.join(repr(name) for name in given_fields)}: keep only one of them")
    line = StreamLine.from_json(values, line_name)
    if line.task is not None:
        check_task(line.task, f"{line_name}: the task", StreamError)
    if "" in line.stop:
        raise StreamError(f"{line_name}: {EMPTY_STOP}")
    return Prompt(
        id=str(number) if line.id is None else line.id,
        task=task if line.task is None else line.task,
        text=line.prompt,
        messages=tuple({"role": message.role, "content": message.content} for message in line.messages or ()),
        turns=(line.question,) if line.question is not None else line.turns or (),
        max_new_tokens=line.max_new_tokens,
        stop=line.stop,
        reference=line.reference,
    )


def _parse_object(line: str, line_name: str) -> Mapping[str, Any]:
    try:
        values = json.loads(line.rstrip())  # A line's end would begin another line, whose columns count from 1.
    # Not only for invalid JSON: also for numbers of thousands of digits (ValueError) and deep nesting (RecursionError).
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg.removesuffix(' at')}, column {error.colno}" if isinstance(error, JSONDecodeError) else error
        )
        raise StreamError(f"{line_name} is not valid JSON ({reason}): expected {EXAMPLE}") from error
    if not isinstance(values, dict):
        raise StreamError(f"{line_name} is not a JSON object: write one per line, for example {EXAMPLE}")
    return values


# --- files of completions


def output_line(prompt: Prompt, completion: Completion) -> str:
    """Return a completion as a line of an output file, without the line's end."""
    values = {"id": prompt.id, "task": prompt.task, **completion.to_json()}
    return json.dumps(values, ensure_ascii=False)


def default_output(stream: str) -> Path:
    """Return the default file of completions: in the user's data folder, named by stream and time."""
    stem = "stdin" if stream == "-" else Path(stream).stem
    timestamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    folder = Path(platformdirs.user_data_dir("swiftopt")) / "completions"
    return folder / f"{stem}-{timestamp}-{os.getpid()}.jsonl"


class LineWriter(AbstractContextManager["LineWriter"]):
    """Append whole lines to a file, unbuffered.

    Without `append` the first line replaces the old content; a run that ends before it leaves the file unchanged.
    `what` (the kind of lines) and `option` (which names the file) are for error messages.

    Raises: OutputError: the file cannot be opened or written; earlier lines stay, and no partial line follows them.
    """

    def __init__(self, path: Path, append: bool = True, *, what: str = "completions", option: str = "--out") -> None:
        self.path, self._what = path, what
        self.n_written = 0
        self._drop_old = not append and path.is_file()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: nothing is left to write on closing, so closing cannot fail.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OutputError(f"cannot write {what} to {path}: {reason}; choose another {option}") from error

    def write(self, line: str) -> None:
        """Append one line."""
        size_before = os.fstat(self._file.fileno()).st_size
        unwritten = memoryview(f"{line}\n".encode())
        try:
            if self._drop_old:
                self._file.truncate(0)
                self._drop_old, size_before = False, 0
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size_before)
            kept_note = f"the {self.n_written} {self._what} before this one are saved, " if self.n_written else ""
            reason = (error.strerror or str(error)).lower()
            raise OutputError(
                f"cannot write to {self.path}: {reason}; {kept_note}free some space and run again"
            ) from error
        self.n_written += 1

    def write_completion(self, prompt: Prompt, completion: Completion) -> None:
        """Append a completion as one JSON object."""
        self.write(output_line(prompt, completion))

    def __exit__(self, *_: object) -> None:
        self._file.close()
