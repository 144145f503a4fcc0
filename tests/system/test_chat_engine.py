"""`swiftopt chat` with a model of its own: the answers are the model's, and a turn reads only what is new."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_files import CHAT_TEMPLATE, save

import swiftopt
from swiftopt.cli.main import run
from swiftopt.models.runtime import Runtime

SHORT = ["--dtype", "float32", "--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tmp_path_factory.mktemp("chat") / "model", chat_template=CHAT_TEMPLATE))


def pipe(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode())))


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines on stderr that are not of loading."""
    return [line for line in capsys.readouterr().err.splitlines() if not line.startswith("load: ")]


def test_turns_are_answered_with_the_whole_chat(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    n_read: list[int] = []
    prefill_passes = Runtime.prefill_passes

    def counted(self: Runtime, token_ids: Any, *args: Any, **more: Any) -> Any:
        n_read.append(len(token_ids))
        return prefill_passes(self, token_ids, *args, **more)

    monkeypatch.setattr(Runtime, "prefill_passes", counted)
    pipe(monkeypatch, "w3 w4", "w5")
    assert run(["chat", "--model", folder, "--system", "w7", "--json", *SHORT]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["schema"], first["model"], first["n_tokens"]) == ("swiftopt.chat/1", folder, 12)
    assert first["tokens_per_second"] > 0 and first["finish_reason"] == "length"
    # w94 w7 w95 w3 w4 w96; then the last token of the answer, which no pass has read, and w95 w5 w96
    assert n_read == [6, 4]
    messages = [{"role": "system", "content": "w7"}, {"role": "user", "content": "w3 w4"}]
    messages += [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "w5"}]
    model = swiftopt.load(folder, dtype="float32")
    for answer, asked in ((first, messages[:2]), (second, messages)):
        prompt = swiftopt.Prompt("1", "default", messages=tuple(asked))
        assert model.generate(prompt, max_new_tokens=12).text == answer["text"]


def test_text_grows_to_stdout_and_figures_go_to_stderr(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chat", "--model", folder, "--message", "w3 w4", "--method", "prompt-lookup", *SHORT]
    assert run([*words, "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)["text"]
    assert run(words) == 0
    out, err = capsys.readouterr()
    assert out == f"{expected}\n"
    assert err.splitlines()[-1].startswith("[12 tokens, ") and "truncated: raise --max-new-tokens" in err


def test_stored_plan_of_the_task_is_used_and_shown_after_the_answer(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", sys.stdout)  # as a terminal shows both
    assert run(["chat", "--model", folder, "--message", "w3", "--task", "rhymes", *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"note: nothing is stored for the task rhymes of {folder}") for line in lines)


def test_model_without_a_chat_template_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = str(save(tmp_path / "bare"))
    capsys.readouterr()
    assert run(["chat", "--model", bare, "--message", "w3", *SHORT]) == 2
    assert told(capsys) == [f"error: {bare} has no chat template: use an instruct model, or `swiftopt generate`"]


@pytest.mark.parametrize(
    ("template", "question", "says"),
    [
        ("{{ raise_exception('no system role') }}", "w3", "no system role"),
        (CHAT_TEMPLATE, "w3 " * 300, "context length is 256"),
    ],
    ids=["template", "context"],
)
def test_question_that_cannot_be_answered_is_one_sentence(
    template: str, question: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = str(save(tmp_path / "odd", chat_template=template))
    capsys.readouterr()
    assert run(["chat", "--model", odd, "--message", question, *SHORT]) == 2
    (line,) = told(capsys)
    assert line.startswith("error: ") and says in line
