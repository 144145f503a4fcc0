"""Streams of prompts: the fields of a line, and the errors of bad lines."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from swiftopt.core.errors import SettingsError, StreamError, StreamNotFound
from swiftopt.core.streams import parse_stream, read_stream, stream_lines, stream_sha256
from swiftopt.core.types import Prompt


def write(path: Path, *lines: object) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def test_stream_reads_every_known_field_into_its_place(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    stream = write(
        tmp_path / "mixed.jsonl",
        {"prompt": " def f():\n"},
        {"messages": messages, "id": "chat"},
        {"question": "How many?", "answer": "7", "task": "maths"},
        {"turns": ["One.", "Two."], "id": 501, "max_new_tokens": 5},
    )
    assert read_stream(stream) == [
        Prompt("1", "mixed", text=" def f():\n"),
        Prompt("chat", "mixed", messages=tuple(messages)),
        Prompt("3", "maths", turns=("How many?",)),
        Prompt("501", "mixed", turns=("One.", "Two."), max_new_tokens=5),
    ]


def test_stream_task_is_the_lines_then_the_callers_then_the_files(tmp_path: Path) -> None:
    stream = write(tmp_path / "notes.jsonl", {"prompt": "a", "task": "own"}, {"prompt": "b"})
    assert [prompt.task for prompt in read_stream(stream)] == ["own", "notes"]
    assert [prompt.task for prompt in read_stream(stream, "given")] == ["own", "given"]


def test_stream_skips_blank_lines_and_numbers_ids_by_line(tmp_path: Path) -> None:
    stream = write(tmp_path / "s.jsonl", "", {"prompt": "a"}, "   ", {"prompt": "b"})
    assert [prompt.id for prompt in read_stream(stream)] == ["2", "4"]


def test_stream_ignores_byte_order_mark_and_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [prompt.text for prompt in read_stream(str(path))] == ["a", "b"]


def test_stream_keeps_unicode_line_separators_inside_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes('{"prompt": "a\u2028b\u0085c"}\n'.encode())
    assert [prompt.text for prompt in read_stream(str(path))] == ["a\u2028b\u0085c"]


def test_stream_limit_leaves_later_lines_unread(tmp_path: Path) -> None:
    stream = write(tmp_path / "s.jsonl", {"prompt": "a"}, {"prompt": "b"}, "no json")
    assert len(read_stream(stream, limit=2)) == 2
    with pytest.raises(StreamError, match=r"line 3 "):
        read_stream(stream, limit=3)
    with pytest.raises(SettingsError, match="limit 0"):
        read_stream(stream, limit=0)


def test_stream_reads_standard_input_under_the_task_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{"prompt": "b"\n')))
    with pytest.raises(
        StreamError, match=r"standard input line 2 is not valid JSON \(Expecting ',' delimiter, column 15\)"
    ):
        read_stream("-")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}')))
    assert read_stream("-") == [Prompt("1", "default", text="a")]


BAD_LINES = {
    "broken": ('{"prompt": "a"', "is not valid JSON"),
    "not an object": ('["a"]', "is not a JSON object"),
    "no known field": ('{"text": "a"}', "prompt, messages, question, turns"),
    "null field": ('{"prompt": null}', "none of the fields"),
    "two fields": ('{"prompt": "a", "turns": ["b"]}', "'prompt' and 'turns'"),
    "prompt of a wrong type": ('{"prompt": 3}', "prompt is 3: use a text"),
    "empty prompt": ('{"prompt": "  "}', "prompt: the text is empty"),
    "half a character": ('{"prompt": "\\ud83d"}', "surrogate"),
    "turns of a wrong type": ('{"turns": "a"}', "turns is 'a': use a list"),
    "no turns": ('{"turns": []}', "turns is []: use at least 1 item"),
    "empty turn": ('{"turns": ["a", ""]}', "turns.1: the text is empty"),
    "message without content": ('{"messages": [{"role": "user"}]}', "messages.0 lacks 'content'"),
    "message with an unknown role": (
        '{"messages": [{"role": "bot", "content": "a"}]}',
        "messages.0.role is 'bot': use 'system', 'developer'",
    ),
    "message that is a text": ('{"messages": ["a"]}', "messages.0 is 'a': use an object"),
    "task with a slash": (
        '{"prompt": "a", "task": "b/c"}',
        "the task 'b/c' is not a valid name: use a word without '/'",
    ),
    "task of a wrong type": ('{"prompt": "a", "task": 3}', "the task 3 is not a valid name"),
    "id of a wrong type": ('{"prompt": "a", "id": [1]}', "id is [1]: use a text"),
    "task of kilobytes": (
        '{"prompt": "a", "task": "' + "b" * 513 + '"}',
        f"the task '{'b' * 40}'... has 513 characters: use at most 512",
    ),
    "id of kilobytes": ('{"prompt": "a", "id": "' + "b" * 513 + '"}', "id: it has 513 characters: use at most 512"),
    "number of kilobytes as id": ('{"prompt": "a", "id": ' + "9" * 4000 + "}", "id: it has 4000 characters"),
    "no new tokens": (
        '{"prompt": "a", "max_new_tokens": 0}',
        "max_new_tokens is 0: use a number greater than or equal to 1",
    ),
    "true new tokens": ('{"prompt": "a", "max_new_tokens": true}', "max_new_tokens is true: use a whole number"),
    "endless number": ('{"prompt": "a", "id": ' + "9" * 5000 + "}", "is not valid JSON"),
    "endless nesting": ('{"prompt": ' + "[" * 100_000, "is not valid JSON"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_stream_names_file_line_and_fault_when_a_line_is_bad(kind: str, tmp_path: Path) -> None:
    line, fault = BAD_LINES[kind]
    stream = write(tmp_path / "s.jsonl", *[{"prompt": "fine"}] * 16, line)
    with pytest.raises(StreamError) as caught:
        read_stream(stream)
    assert str(caught.value).startswith(f"{stream} line 17")
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_stream_refuses_bytes_that_are_no_text(tmp_path: Path) -> None:
    for name, content in {
        "utf16": '{"prompt": "a"}'.encode("utf-16"),
        "zeros": b"\0\0\0\n",
        "latin": b"\xe9\n",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(StreamError, match=r"line 1 .*JSON Lines"):
            read_stream(str(tmp_path / name))


def test_stream_without_prompts_is_an_error(tmp_path: Path) -> None:
    for content in ("", "\n\n  \n"):
        (tmp_path / "empty.jsonl").write_text(content)
        with pytest.raises(StreamError, match="holds no prompt"):
            read_stream(str(tmp_path / "empty.jsonl"))


def test_stream_error_names_the_nearest_file_when_it_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "summary.jsonl", {"prompt": "a"})
    with pytest.raises(StreamNotFound, match=r"did you mean .*summary\.jsonl"):
        read_stream(str(tmp_path / "sumary.jsonl"))
    with pytest.raises(StreamNotFound, match="does not exist either"):
        read_stream(str(tmp_path / "nowhere" / "s.jsonl"))
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(StreamError, match="cannot be read"):
            read_stream(name)


def test_a_stream_without_a_name_is_refused_in_a_sentence() -> None:
    with pytest.raises(StreamError, match="the stream has no name: use a file of prompts"):
        read_stream("")


def test_stream_error_names_a_file_inside_when_it_is_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "inside.jsonl", {"prompt": "a"})
    with pytest.raises(StreamNotFound, match=r"is a folder: .*inside\.jsonl"):
        read_stream(str(tmp_path))


def test_stream_refuses_a_callers_task_with_a_slash(tmp_path: Path) -> None:
    stream = write(tmp_path / "s.jsonl", {"prompt": "a"})
    with pytest.raises(StreamError, match="'a/b'"):
        read_stream(stream, "a/b")


def test_stream_hash_depends_on_the_prompts_and_not_on_the_file(tmp_path: Path) -> None:
    one = read_stream(write(tmp_path / "one.jsonl", {"prompt": "a", "id": "x"}), "t")
    same = read_stream(write(tmp_path / "two.jsonl", "", '{"id":"x",   "prompt":"a"}'), "t")
    other = read_stream(write(tmp_path / "three.jsonl", {"prompt": "b", "id": "x"}), "t")
    assert stream_sha256(one) == stream_sha256(same) != stream_sha256(other)
    assert len(stream_sha256(one)) == 64


def test_example_stream_has_two_tasks_of_at_least_fourteen_prompts() -> None:
    prompts = read_stream(str(Path(__file__).parents[2] / "examples" / "stream.jsonl"))
    tasks = [prompt.task for prompt in prompts]
    assert tasks == sorted(tasks, key=tasks.index)  # grouped
    assert {task: tasks.count(task) >= 14 for task in tasks} == {"summary": True, "code": True}
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert all(prompt.messages for prompt in prompts if prompt.task == "summary")
    assert all(prompt.text for prompt in prompts if prompt.task == "code")


def test_content_of_a_message_may_be_parts_of_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    line = json.dumps({"messages": [{"role": "user", "content": parts}]})
    [prompt] = parse_stream([line.encode()], "x", "t")
    assert prompt.messages == ({"role": "user", "content": "ab"},)
    assert parse_stream([stream_lines([prompt]).encode()], "x", "t") == [prompt]


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": ["text"]}, "a", {"type": "text"}]
)
def test_part_that_is_no_text_is_named_with_its_line(part: Any) -> None:
    line = json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]})
    with pytest.raises(StreamError, match=r"x line 1: messages\.0\.content: content\[1\] (is of type|has no text)"):
        parse_stream([line.encode()], "x", "t")
