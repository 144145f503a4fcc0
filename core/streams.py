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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import platformdirs

from .errors import OutputError, SettingsError, StreamError, StreamNotFound
from .serialization import Settings, count
from .templates import JUDGES, template_of
from .types import DEFAULT_TASK, Completion, Prompt

STDIN = "-"
LEARNED_ON = 32  # prompts behind a limit that brief searches and trainings look at
FIELDS = ("prompt", "messages", "question", "turns")  # a line has exactly one of them
IDS = ("id", "task_id", "qid")  # fields of data sets that name a row
PACKED = ".gz"
ADDED = ("stop", "reference", "sample")  # fields of prompts that streams of earlier versions lack
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class StreamForm(Settings):
    """How lines become prompts beyond what they say: as rows of a data set, with examples before them, with an end.

    `template` names one of `core.templates`; then the first `shots` rows (None: as many as the template says) are the
    examples of all others and no prompts. `stop` are strings that end every completion, beside the template's.

    Raises: SettingsError: the template is unknown, there are shots without one, or a stop string is empty.
    """

    NAME: ClassVar = "the stream's form"

    template: str | None = None
    shots: int | None = count(None, least=0)
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if "" in self.stop:
            raise SettingsError("a stop string is empty, and would end every completion at once: leave it out", "stop")
        if self.template is not None:
            template_of(self.template)
        elif self.shots is not None:
            raise SettingsError("shots are examples of a data set: name its template", "shots")


def read_stream(
    path: str, default_task: str | None = None, limit: int | None = None, form: StreamForm | None = None
) -> list[Prompt]:
    """The prompts of a JSON Lines file (perhaps in gzip), or of standard input for "-", in their order.

    `prompt` becomes raw text; `question` and `turns` become turns of the user; `messages` stay whole; `stop` is a
    string or several. The task is the line's, else `default_task`, else the file's stem ("default" for standard input).
    The id is the line's, else its number from 1. With `limit`, lines after the first `limit` prompts are not looked at.

    Raises: StreamNotFound: there is no such file. StreamError: it cannot be read, holds no prompt, or a line is none.
        SettingsError: `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise SettingsError(f"limit {limit} is out of range: use 1 or more")
    form = form or StreamForm()
    where = "standard input" if path == STDIN else path
    stem = Path(path.removesuffix(PACKED)).stem
    task = default_task if default_task is not None else (DEFAULT_TASK if path == STDIN else stem)
    with _opened(path) as source:
        if form.template is None:
            prompts = parse_stream(source, where, task, limit)
        else:
            prompts = _rows(source, where, task, limit, form)
    return [replace(prompt, stop=(*prompt.stop, *form.stop)) for prompt in prompts] if form.stop else prompts


def read_with_others(
    path: str, default_task: str | None, limit: int | None, form: StreamForm | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the first `limit` prompts of a stream, and up to `LEARNED_ON` behind them to learn on."""
    prompts = read_stream(path, default_task, limit, form)
    if limit is None or path == STDIN:
        return prompts, []
    try:
        return prompts, read_stream(path, default_task, limit + LEARNED_ON, form)[len(prompts) :]
    except StreamError:  # in a line that nobody asked for
        return prompts, []


def _rows(source: Iterable[bytes], where: str, task: str, limit: int | None, form: StreamForm) -> list[Prompt]:
    """The rows of a data set as prompts, those behind the ones that serve as examples."""
    assert form.template is not None
    template, examples, prompts = template_of(form.template), list[str](), list[Prompt]()
    shots = template.shots if form.shots is None else form.shots
    _check_task(task, "the task")
    for number, line in enumerate(_text_lines(source, where), start=1):
        if not line.strip():
            continue
        at = f"{where} line {number}"
        row = _object(line, at)
        if len(examples) < shots:
            examples.append(template.example(row, at))
            continue
        text = _text("".join(examples) + template.asked(row, at), "the prompt", at)
        known = next((row[name] for name in IDS if name in row), None)
        prompts.append(
            Prompt(
                _line_id(known, number, at),
                task,
                text,
                stop=template.stop,
                reference=template.reference(row, at),
            )
        )
        if len(prompts) == limit:
            break
    if not prompts:
        raise StreamError(f"{where} holds no row behind its first {shots}, the examples: lower --shots or add rows")
    return prompts


def parse_stream(source: Iterable[bytes], where: str, task: str, limit: int | None = None) -> list[Prompt]:
    """The prompts of JSON Lines, as `read_stream`; `where` names their origin in errors.

    Raises: StreamError: there is no prompt, or a line is none.
    """
    _check_task(task, "the task")
    prompts: list[Prompt] = []
    for number, line in enumerate(_text_lines(source, where), start=1):
        if not line.strip():
            continue
        prompts.append(_prompt(line, number, task, f"{where} line {number}"))
        if len(prompts) == limit:
            break
    if not prompts:
        raise StreamError(f"{where} holds no prompt: write one JSON object per line, such as {_example()}")
    return prompts


def stream_lines(prompts: Iterable[Prompt]) -> str:
    """The prompts as JSON Lines that `parse_stream` gives back exactly, whatever its task."""
    return "".join(json.dumps(_line(prompt)) + "\n" for prompt in prompts)


def _line(prompt: Prompt) -> dict[str, Any]:
    values: dict[str, Any] = {"id": prompt.id, "task": prompt.task}
    if prompt.text is not None:
        values["prompt"] = prompt.text
    elif prompt.messages:
        values["messages"] = [dict(message) for message in prompt.messages]
    else:
        values["turns"] = list(prompt.turns)
    own = {"max_new_tokens": prompt.max_new_tokens, "stop": list(prompt.stop), "reference": dict(prompt.reference)}
    return {**values, **{name: value for name, value in own.items() if value}}


def raw_prompt(text: str, task: str, where: str) -> Prompt:
    """A text that came without a stream; `where` names its origin in errors.

    Raises: StreamError: it is no text, or the task is no name.
    """
    _check_task(task, "the task")
    return Prompt(id="1", task=task, text=_text(text, "the prompt", where))


def stream_sha256(prompts: Iterable[Prompt]) -> str:
    """Hex SHA-256 over the prompts in their order, whatever file they came from."""
    digest = hashlib.sha256()
    for prompt in prompts:
        values = {**dataclasses.asdict(prompt), "messages": [dict(message) for message in prompt.messages]}
        values = {name: value for name, value in values.items() if value or name not in ADDED}
        digest.update(json.dumps(values, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if path == STDIN:
        yield sys.stdin.buffer
        return
    target = Path(path)
    if os.path.isdir(path):  # pathlib raises for a path that is too long
        inside = sorted(entry.name for entry in target.glob("*.jsonl"))
        name_one = f"name one of its files, such as {inside[0]}" if inside else "name a JSON Lines file"
        raise StreamNotFound(f"the stream {path} is a folder: {name_one}")
    try:
        source = target.open("rb")
    except FileNotFoundError as error:
        raise StreamNotFound(f"there is no stream {path}: {_nearest_file(target)}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise StreamError(f"the stream {path} cannot be read ({reason}): check its path and permissions") from error
    with source:
        yield source if target.suffix != PACKED else _unpacked(source, path)


def _unpacked(source: BinaryIO, path: str) -> BinaryIO:
    """Return what a gzip file holds.

    Raises: StreamError: it is none.
    """
    try:
        return io.BytesIO(gzip.decompress(source.read()))
    except (OSError, EOFError, zlib.error) as error:
        raise StreamError(f"the stream {path} is no gzip file ({error}): unpack it, or check the download") from error


def _nearest_file(target: Path) -> str:
    try:
        names = sorted(entry.name for entry in target.parent.iterdir() if entry.is_file())
    except OSError:
        return f"the folder {target.parent} does not exist either, check the path"
    near = difflib.get_close_matches(target.name, names, n=1, cutoff=0.5)
    near = [name for name in near if difflib.get_close_matches(target.stem, [Path(name).stem])]  # not for .jsonl alone
    return f"did you mean {target.parent / near[0]}?" if near else "check the path"


def _text_lines(source: Iterable[bytes], where: str) -> Iterator[str]:
    """Lines split at newlines only (JSON strings may hold other Unicode separators), without a byte-order mark."""
    lines = iter(source)
    number = 0
    while True:
        number += 1
        try:
            raw = next(lines, None)
        except OSError as error:
            raise StreamError(f"{where} cannot be read to its end ({error.strerror}): check the file") from error
        if raw is None:
            return
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise StreamError(f"{where} line {number} is not UTF-8 text: save the stream as JSON Lines") from error
        if "\0" in text:
            raise StreamError(f"{where} line {number} holds binary data: save the stream as JSON Lines in UTF-8")
        yield text


def _prompt(line: str, number: int, task: str, at: str) -> Prompt:
    values = _object(line, at)
    given = [name for name in FIELDS if values.get(name) is not None]
    if not given:
        raise StreamError(f"{at} has none of the fields {', '.join(FIELDS)}: give it one of them")
    if len(given) > 1:
        raise StreamError(f"{at} has {' and '.join(repr(name) for name in given)}: keep only one of them")
    own_task = values.get("task")
    if own_task is not None:
        _check_task(own_task, f"{at}: the task")
    field = given[0]
    return Prompt(
        id=_line_id(values.get("id"), number, at),
        task=task if own_task is None else own_task,
        text=_text(values["prompt"], "'prompt'", at) if field == "prompt" else None,
        messages=_messages(values["messages"], at) if field == "messages" else (),
        turns=_turns(values, field, at) if field in ("question", "turns") else (),
        max_new_tokens=_max_new_tokens(values.get("max_new_tokens"), at),
        stop=_stop(values.get("stop"), at),
        reference=_reference(values.get("reference"), at),
    )


def _stop(value: Any, at: str) -> tuple[str, ...]:
    strings = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(each, str) and each for each in strings):
        raise StreamError(f"{at}: 'stop' is {json.dumps(value)}, expected a text or a list of texts")
    return tuple(_encodable(each, "'stop'", at) for each in strings)


def _reference(value: Any, at: str) -> Mapping[str, str]:
    """Read what the line of a job says of a row; a field of that name in someone's own stream may be anything else."""
    if not isinstance(value, dict) or value.get("judge") not in JUDGES:
        return {}
    return {str(name): _encodable(str(text), "'reference'", at) for name, text in value.items()}


def _object(line: str, at: str) -> Mapping[str, Any]:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise StreamError(
            f"{at} is not valid JSON ({error.msg.removesuffix(' at')}, column {error.colno}): expected {_example()}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of nested lists
        raise StreamError(f"{at} cannot be read as JSON ({error}): expected {_example()}") from error
    if not isinstance(values, dict):
        raise StreamError(f"{at} holds {_kind(values)}: expected one JSON object per line, such as {_example()}")
    return values


def _text(value: Any, what: str, at: str) -> str:
    if not isinstance(value, str):
        raise StreamError(f"{at}: {what} is {_kind(value)}, expected a string")
    if not value.strip():
        raise StreamError(f"{at}: {what} is empty: write a text or delete the line")
    return _encodable(value, what, at)


def _encodable(value: str, what: str, at: str) -> str:
    if "\0" in value:
        raise StreamError(f"{at}: {what} holds a NUL character, which no text has: delete it")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise StreamError(f"{at}: {what} holds half of a surrogate pair, which is no text: delete that character")
    return value


def _turns(values: Mapping[str, Any], field: str, at: str) -> tuple[str, ...]:
    if field == "question":
        return (_text(values["question"], "'question'", at),)
    return tuple(_text(turn, f"turn {i}", at) for i, turn in enumerate(_items(values["turns"], "turns", at), start=1))


def _messages(value: Any, at: str) -> tuple[Mapping[str, str], ...]:
    found = []
    for i, message in enumerate(_items(value, "messages", at), start=1):
        if not isinstance(message, dict):
            raise StreamError(f"{at}: message {i} is {_kind(message)}, expected an object with 'role' and 'content'")
        role = message.get("role")
        if role not in ROLES:
            raise StreamError(f"{at}: message {i} has the role {role!r}, expected one of {', '.join(ROLES)}")
        found.append({"role": role, "content": _text(message.get("content"), f"the content of message {i}", at)})
    return tuple(found)


def _items(value: Any, field: str, at: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise StreamError(f"{at}: {field!r} is {_kind(value)}, expected a list")
    if not value:
        raise StreamError(f"{at}: {field!r} is empty: write at least one entry or delete the line")
    return value


def _max_new_tokens(value: Any, at: str) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise StreamError(f"{at}: 'max_new_tokens' is {json.dumps(value)}, expected a whole number of 1 or more")
    return value


def _line_id(value: Any, number: int, at: str) -> str:
    if value is None:
        return str(number)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise StreamError(f"{at}: 'id' is {_kind(value)}, expected a string or a whole number")
    return _encodable(str(value), "'id'", at)


def _check_task(task: Any, what: str) -> None:
    if not isinstance(task, str) or not task.strip():
        raise StreamError(f"{what} {json.dumps(task)} is no name: use a word such as 'code'")
    if "/" in task:
        raise StreamError(
            f"{what} {task!r} holds a '/', which parts model from task in MODEL/TASK: use another character"
        )
    if not task.isprintable():  # a line break, or half of a surrogate pair
        raise StreamError(f"{what} {task!r} holds a character that cannot be shown: use a word such as 'code'")


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _example() -> str:
    return '{"prompt": "..."}'


# --- files of completions


def output_line(prompt: Prompt, completion: Completion) -> str:
    """Return a completion as a line of an output file, without the line's end."""
    values = {"id": prompt.id, "task": prompt.task, **completion.to_json()}
    return json.dumps(values, ensure_ascii=False)


def default_output(stream: str) -> Path:
    """Return where completions go by default: the user's data folder, named by stream and time."""
    stem = "stdin" if stream == "-" else Path(stream).stem
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    folder = Path(platformdirs.user_data_dir("swiftopt")) / "completions"
    return folder / f"{stem}-{stamp}-{os.getpid()}.jsonl"


class LineWriter(AbstractContextManager["LineWriter"]):
    """Append whole lines to a file, unbuffered.

    Without `append` the old content is dropped when the first line comes: a run that ends before that keeps it. `what`
    the lines are and the `option` that names the file are for errors.

    Raises: OutputError: the file cannot be opened or written; earlier lines stay, and no partial line follows them.
    """

    def __init__(self, path: Path, append: bool = True, *, what: str = "completions", option: str = "--out") -> None:
        self.path, self._what = path, what
        self.n_written = 0
        self._drop_old = not append and path.is_file()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)  # unbuffered, so that closing has nothing left to fail with
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OutputError(f"cannot write {what} to {path}: {reason}; choose another {option}") from error

    def write(self, line: str) -> None:
        """Append one line."""
        size = os.fstat(self._file.fileno()).st_size
        rest = memoryview(f"{line}\n".encode())
        try:
            if self._drop_old:
                self._file.truncate(0)
                self._drop_old, size = False, 0
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size)
            raise OutputError(
                f"cannot write to {self.path}: {(error.strerror or str(error)).lower()}; the {self.n_written}"
                f" {self._what} before this one are there, free some space and run again"
            ) from error
        self.n_written += 1

    def write_completion(self, prompt: Prompt, completion: Completion) -> None:
        """Append a completion as one JSON object."""
        self.write(output_line(prompt, completion))

    def __exit__(self, *_: object) -> None:
        self._file.close()
