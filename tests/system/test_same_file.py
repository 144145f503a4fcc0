"""`bench peers --gguf FILE`: its cells, its starts and its tables, on a tiny file with engines that pretend."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import write_gguf
from families import tiny_model

from swiftopt.cli.main import run
from swiftopt.core.errors import ContextOverflow, SettingsError
from swiftopt.engines import same_file
from swiftopt.engines.packages import Row
from swiftopt.engines.same_file import SameFile, SameFileRequest, file_rows

# Answers like at_once.py: tokens 1, 2, 3, …; half a second to the first token, and a quarter for each later one.
PRETENDING = """
def load(options):
    if options.get("broken"):
        raise RuntimeError("it is broken")

    def answer(line):
        longest = max(len(asked["prompt_ids"]) for asked in line["requests"])
        if len(line["requests"]) > options["at_once"] or longest + 4 > options["n_ctx"]:
            raise RuntimeError("there is no room")
        own = [
            {"token_ids": list(range(1, asked["max_new_tokens"] + 1)), "first_s": 0.5,
             "last_s": 0.5 + 0.25 * (asked["max_new_tokens"] - 1)}
            for asked in line["requests"]
        ]
        return {"answers": own}

    return answer
"""
SMALL: dict[str, Any] = {"depths": (0, 40), "at_once": (1, 2), "max_new_tokens": 5, "threads": 1}
pytestmark = pytest.mark.wing("engines")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path / "cache"))
    model = tiny_model("llama", torch.float32, max_position_embeddings=512)
    return write_gguf(tmp_path / "tiny.gguf", model)


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Row]:
    """Ours, and llama.cpp's, which pretends."""
    program = tmp_path / "pretending.py"
    program.write_text(PRETENDING)
    named = {row.name: row for row in file_rows()}
    engine = replace(named["llama-cpp/plain"].engine, file=program, tool="own", steps=())
    broken = replace(engine, name="ik-llama-cpp")
    return {
        **{"swiftopt/plain": named["swiftopt/plain"], "swiftopt/best": named["swiftopt/best"]},
        "llama-cpp/plain": replace(named["llama-cpp/plain"], engine=engine),
        "ik-llama-cpp/plain": replace(named["ik-llama-cpp/plain"], engine=broken, options={"broken": True}),
    }


@pytest.mark.slow
def test_each_row_is_measured_in_each_cell_or_has_a_reason(file: Path, rows: dict[str, Row]) -> None:
    bench = SameFile(SameFileRequest(str(file), **SMALL, rounds=1), list(rows.values()))
    bench.run()
    report = bench.report("a machine")
    assert (report["schema"], report["bytes"], report["interrupted"]) == (
        same_file.SCHEMA,
        file.stat().st_size,
        False,
    )
    cells = {(own["row"], own["depth"], own["at_once"]): own for own in report["results"]}
    assert set(cells) == {(row, depth, n) for row in rows for depth in (0, 40) for n in (1, 2)}
    for (row, _, n), own in cells.items():
        if row == "ik-llama-cpp/plain":
            assert own["tok_s"] is None and "it is broken" in own["reason"]
            continue
        assert own["reason"] is None and own["tok_s"] > 0 and own["peak_bytes"] > 0
        if row == "llama-cpp/plain":
            assert (own["first_token_s"], own["decode_tok_s"], own["ratio"]) == (0.5, 4.0 * n, 1.0)
        if row == "swiftopt/best":
            assert own["equal"] == n
    starts = {own["row"]: own for own in report["starts"]}
    assert starts["swiftopt/plain"]["warm_s"] > 0 and starts["swiftopt/plain"]["cold_s"] > 0
    assert "it is broken" in starts["ik-llama-cpp/plain"]["reason"]


def test_prompts_have_their_depths_length_and_no_common_prefix(file: Path) -> None:
    bench = SameFile(SameFileRequest(str(file), **SMALL), [])
    for depth, n_ids in ((0, same_file.LEAST_TOKENS), (40, 40)):
        prompts = [tuple(own["prompt_ids"]) for own in bench._requests(depth, 2, 5)]
        assert [len(prompt) for prompt in prompts] == [n_ids] * 2
        assert {prompt[0] for prompt in prompts} == {1}  # the file's first token of a text
        assert prompts[0][:8] != prompts[1][:8]


def test_cells_beyond_the_limits_are_refused_before_any_installation(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ContextOverflow, match=r"a depth of 8000 needs 8192 positions .* has 512: lower --depths"):
        SameFile(SameFileRequest(str(file)), file_rows())
    with pytest.raises(SettingsError, match="is not a GGUF file"):
        SameFile(SameFileRequest("qwen2.5-0.5b"), file_rows())


def test_command_shows_both_tables_and_reasons_of_failed_rows(
    file: Path, rows: dict[str, Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del rows["swiftopt/plain"], rows["swiftopt/best"]
    monkeypatch.setattr(same_file, "file_rows", lambda: list(rows.values()))
    given = ["bench", "peers", "--gguf", str(file), "--depths", "0", "--at-once", "2", "--max-new-tokens", "5"]
    assert run([*given, "--limit", "3"]) == 0
    out, err = capsys.readouterr()
    assert "until the first token" in out and "llama-cpp/plain" in out and "not run (1)" in out
    assert "(1) ik-llama-cpp/plain, ik-llama-cpp/plain at depth 0, 2 at once: RuntimeError: it is broken" in " ".join(
        out.split()
    )
    assert "warning: --limit has no effect without --model" in err
    assert run([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == same_file.SCHEMA


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--depths", "0,x"], "is not a list of numbers from 0 on: use for example 1,4,8"),
        (["--at-once", "0"], "is not a list of numbers from 1 on"),
        (["--gguf", "b.gguf"], "without --model one file is measured"),
        (["--peers", "vllm"], "peer 'vllm' is unknown"),
        (["--model", "smollm2-135m"], "missing option '--stream'"),
    ],
)
def test_a_slip_costs_one_sentence(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "peers", "--gguf", "a.gguf", *more]) in (2, 3)
    out, err = capsys.readouterr()
    assert out == "" and words in err and "Traceback" not in err
