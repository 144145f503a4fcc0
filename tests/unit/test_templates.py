"""Rows of data sets as prompts: wording, examples, stop strings and references."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from swiftopt.core.errors import SettingsError, StreamError
from swiftopt.core.streams import StreamForm, parse_stream, read_stream, stream_lines, stream_sha256
from swiftopt.core.templates import TEMPLATES
from swiftopt.core.types import Prompt

GSM8K = [
    {
        "id": f"g{i}",
        "question": f"What is {i} + {i}?",
        "answer": f"{i} + {i} = <<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}",
    }
    for i in range(8)
]
ROWS: dict[str, Mapping[str, Any]] = {  # one of each data set, as its files have it
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": "def one():\n",
        "canonical_solution": "    return 1",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
        "entry_point": "one",
    },
    "mbpp": {
        "task_id": 601,
        "text": "Write one.",
        "code": "def one():\n    return 1",
        "test_list": ["assert one() == 1", "assert one() < 2"],
        "test_setup_code": "",
    },
    "gsm8k": GSM8K[3],
    "cnn-dm": {"id": "c", "article": "Rain fell.", "highlights": "Rain."},
    "xsum": {"id": "x", "document": "Snow fell.", "summary": "Snow."},
    "tinystories": {"text": "Once upon a time " * 20},
    "alpaca": {"instruction": "Add.", "input": "1 and 2", "output": "3"},
    "wmt14-de-en": {"translation": {"de": "Ja.", "en": "Yes."}},
    "natural-questions": {"question": "who is it", "answer": ["Ada", "Ada Lovelace"]},
}


def saved(folder: Path, rows: list[Mapping[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_template_has_a_row_here() -> None:
    assert set(ROWS) == set(TEMPLATES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_row_of_a_data_set_becomes_a_prompt(name: str, tmp_path: Path) -> None:
    template, n = TEMPLATES[name], TEMPLATES[name].shots + 2
    prompts = read_stream(saved(tmp_path, [ROWS[name]] * n), form=StreamForm(name))
    assert len(prompts) == 2 and all(prompt.task == "rows" for prompt in prompts)
    prompt = prompts[0]
    assert prompt.stop == template.stop and prompt.max_new_tokens is None
    assert prompt.text is not None and prompt.text == (template.example(ROWS[name], "") * template.shots) + (
        template.ask(ROWS[name], "")
    )
    assert "{" not in prompt.text and prompt.reference.get("judge") == template.judge


def test_first_rows_are_examples_and_no_prompts(tmp_path: Path) -> None:
    path = saved(tmp_path, GSM8K)
    first, *others = read_stream(path, form=StreamForm("gsm8k", shots=2))
    assert [prompt.id for prompt in (first, *others)] == [f"g{i}" for i in range(2, 8)]
    assert first.text == (
        "Question: What is 0 + 0?\nAnswer: 0 + 0 = 0\n#### 0\n\n"
        "Question: What is 1 + 1?\nAnswer: 1 + 1 = 2\n#### 2\n\n"
        "Question: What is 2 + 2?\nAnswer:"
    )
    assert read_stream(path, form=StreamForm("gsm8k", shots=0))[0].text == "Question: What is 0 + 0?\nAnswer:"
    assert len(read_stream(path, limit=1, form=StreamForm("gsm8k"))) == 1


def test_tests_of_mbpp_are_asked_with_the_first_and_judged_by_all(tmp_path: Path) -> None:
    (prompt,) = read_stream(saved(tmp_path, [ROWS["mbpp"]]), form=StreamForm("mbpp", shots=0))
    assert prompt.text is not None and "assert one() == 1\n" in prompt.text and "one() < 2" not in prompt.text
    assert prompt.reference["after"] == "assert one() == 1\nassert one() < 2"


def test_story_is_cut_to_its_beginning(tmp_path: Path) -> None:
    (prompt,) = read_stream(saved(tmp_path, [ROWS["tinystories"]]), form=StreamForm("tinystories"))
    assert prompt.text is not None and len(prompt.text.split()) == TEMPLATES["tinystories"].words


def test_file_in_gzip_is_read_under_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(ROWS["humaneval"]).encode()))
    (prompt,) = read_stream(str(path), form=StreamForm("humaneval"))
    assert (prompt.id, prompt.task) == ("HumanEval/0", "HumanEval")
    path.write_bytes(b"no gzip")
    with pytest.raises(StreamError, match="is not a gzip file"):
        read_stream(str(path))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"template": "humanevil"}, "'humanevil' is unknown: use one of .* \\(nearest: humaneval\\)"),
        ({"shots": 2}, "shots are examples of a data set: add --template"),
        ({"stop": ("",)}, "a stop string is empty"),
        ({"template": "gsm8k", "shots": -1}, "shots -1 is out of range"),
    ],
)
def test_form_that_makes_no_sense_is_one_sentence(form: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        StreamForm(**form)


def test_rows_of_another_data_set_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        StreamError, match=r"line 1 has no field for .*'question'.*: use a file of the template's data set"
    ):
        read_stream(saved(tmp_path, [ROWS["xsum"]]), form=StreamForm("gsm8k"))
    with pytest.raises(StreamError, match=r"holds no row after its first 5, the examples"):
        read_stream(saved(tmp_path, GSM8K[:5]), form=StreamForm("gsm8k"))


# --- stop strings


def test_stop_strings_of_lines_and_of_the_form_come_together(tmp_path: Path) -> None:
    path = saved(tmp_path, [{"prompt": "a", "stop": "X"}, {"prompt": "b", "stop": ["Y", "Z"]}, {"prompt": "c"}])
    prompts = read_stream(path, form=StreamForm(stop=("W",)))
    assert [prompt.stop for prompt in prompts] == [("X", "W"), ("Y", "Z", "W"), ("W",)]


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (3, "stop: use a text or a list of texts"),
        ([""], "a stop string is empty"),
        (["a", 2], r"stop\.1 is 2: use a text"),
        ({"a": 1}, "stop: use a text or a list of texts"),
        ("", "a stop string is empty"),
    ],
)
def test_stop_that_is_no_text_is_one_sentence(stop: Any, words: str) -> None:
    with pytest.raises(StreamError, match=f"line 1: {words}"):
        parse_stream([json.dumps({"prompt": "a", "stop": stop}).encode()], "s", "t")


def test_prompts_of_a_data_set_reach_a_worker_as_they_are(tmp_path: Path) -> None:
    prompts = read_stream(saved(tmp_path, [ROWS["humaneval"]] * 2), form=StreamForm("humaneval", stop=("END",)))
    lines = (line.encode() for line in stream_lines(prompts).splitlines())
    assert parse_stream(lines, "the job", "other") == prompts


def test_streams_without_ends_have_the_hash_that_they_had() -> None:
    plain = Prompt("1", "t", text="a")
    assert stream_sha256([plain]) == "7c37ee2059bc54eba6ab5e6f4a6be3a9ff69d6f5814292fbff277903c0e030ed"
    assert stream_sha256([plain]) != stream_sha256([Prompt("1", "t", text="a", stop=("X",))])
