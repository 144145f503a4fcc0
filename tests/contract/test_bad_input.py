"""What a user can do wrong: each gets one sentence on stderr, the right exit code, and loses nothing finished.

The first half needs no model, and the program then starts no torch; the second half runs a random tiny one.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from wings import of_wings

from swiftopt.cli.backend import TuneProgress
from swiftopt.cli.main import run
from swiftopt.core.errors import InvalidInput
from swiftopt.core.events import PhaseChanged, Progress, PromptStarted, TrialsDone
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord
from swiftopt.core.types import Trial
from swiftopt.store import Store
from swiftopt.tasks import generate

SCRIPT = shutil.which("swiftopt", path=str(Path(sys.executable).parent)) or "swiftopt"
GENERATE = ["generate", "--prompt", "w1"]
TUNE = ["tune", "--model", "smollm2-135m", "--stream"]
SERVE = ["serve", "--port", "0"]
IMPORT = ["import", "gpt2/t", "--plain", "good.jsonl", "--drafted", "good.jsonl"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, unconfigured: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a database of its own and a file for each mistake."""
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", str(tmp_path / "home.db"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    good = '{"prompt": "w1 w2"}\n'
    texts = {
        "good.jsonl": good * 20,
        "empty.jsonl": "",
        "line17.jsonl": good * 16 + '{"prompt": "w1\n' + good,
        "field.jsonl": '{"text": "w1"}\n',
        "typing.jsonl": '{"promt": "w1", "prompt": null}\n',
        "half.jsonl": '{"prompt": "w1", "id": "\\ud800"}\n',
        "letter.txt": "Dear reader, " * 100,
        "deep.json": "[" * 100_000,
        "set.json": json.dumps(layer_set_values()),
        "range.json": json.dumps(layer_set_values(skip_attn=[30])),
        "list.json": "[1]",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.jsonl").write_bytes(b"\x7fELF\xd0\xff" * 50)
    bert = '{"model_type": "bert"}'
    for folder, config in {"bert": bert, "x=y": bert, "list": "[1]", "broken": "{bad"}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(config)
    return tmp_path


def layer_set_values(**changes: Any) -> dict[str, Any]:
    values = {"schema": "swiftopt.layer-set/1", "model": "smollm2-135m", "n_layers": 30}
    return {**values, "skip_attn": [3], "skip_mlp": [4], **changes}


def script(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run([SCRIPT, *args], **{**pipes, **more}, text=True, timeout=120)


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr, with nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


# --- without a model

SLIPS: list[tuple[list[str], int, str]] = [
    ([*GENERATE, "--model", "smollm-135m"], 3, "nearest: smollm2-135m"),
    ([*GENERATE, "--model", "./nowhere"], 3, "no folder ./nowhere: check the path"),
    ([*GENERATE, "--model", "good.jsonl"], 3, "the file good.jsonl is no model"),
    ([*GENERATE, "--model", "missing.gguf"], 3, "no GGUF file missing.gguf"),
    (
        [*GENERATE, "--model", "bert"],
        2,
        "'bert', which is not supported: use one of those that `swiftopt models --types`",
    ),
    ([*GENERATE, "--model", "list"], 3, "config.json is no model's config"),
    ([*GENERATE, "--model", "broken"], 3, "config.json is no model's config"),
    ([*GENERATE, "--model", "gpt2", "--dtype", "fp8"], 2, "dtype 'fp8' is unknown: use one of auto"),
    ([*GENERATE, "--model", "gpt2", "--device", "cdua"], 2, "device 'cdua' is unknown: use one of auto"),
    ([*GENERATE, "--model", "gpt2", "--task", "a/b"], 2, "'a/b' is not a valid name: use a word without '/'"),
    ([*GENERATE, "--model", "gpt2", "--layer-set", "range.json"], 2, "range.json: layer set skips layers [30]"),
    ([*GENERATE, "--model", "gpt2", "--layer-set", "list.json"], 2, "expected one JSON object"),
    (["generate", "--model", "gpt2", "--prompt", "a\udcff"], 2, "--prompt: the text contains a lone surrogate"),
    ([*TUNE, "empty.jsonl"], 2, "empty.jsonl holds no prompt: write"),
    ([*TUNE, "line17.jsonl"], 2, "line17.jsonl line 17 is not valid JSON (Unterminated string starting, column 12)"),
    ([*TUNE, "typing.jsonl"], 2, "did you mean 'prompt' by 'promt'?"),
    ([*TUNE, "field.jsonl"], 2, "field.jsonl line 1 has none of the fields prompt, messages, question, turns"),
    ([*TUNE, "half.jsonl"], 2, "half.jsonl line 1: id: the text contains a lone surrogate"),
    ([*TUNE, "binary.jsonl"], 2, "binary.jsonl line 1 is not UTF-8 text"),
    ([*TUNE, "missing.jsonl"], 3, "no stream missing.jsonl: check the path"),
    ([*TUNE, "god.jsonl"], 3, "did you mean good.jsonl?"),
    ([*TUNE, "good.jsonl", "--max-new-tokens", "0"], 2, "'--max-new-tokens': 0 is not in the range x>=1 (see `"),
    ([*TUNE, "good.jsonl", "--strategy", "swfit"], 2, "strategy 'swfit' is unknown: use one of random, bayes"),
    ([*TUNE, "good.jsonl", "--strategy", "swfit"], 2, "nearest: swift"),
    (["tune", "--model", "bert", "--stream", "good.jsonl"], 2, "'bert', which is not supported"),
    (["serve", "--memory-gb", "nan"], 2, "'nan' is not a finite number"),
    ([*SERVE, "--model", "=gpt2"], 2, "--model =gpt2 lacks a name or a model: use NAME=MODEL"),
    ([*SERVE, "--model", "a="], 2, "--model a= lacks a name or a model: use NAME=MODEL"),
    ([*SERVE, "--model", "a=bert"], 2, "'bert', which is not supported"),
    ([*SERVE, "--model", "x=y"], 2, "'bert', which is not supported"),
    ([*SERVE, "--model", "gpt2", "--keep-prompts", "bert"], 1, "cannot write prompts to bert: is a directory; choose"),
    ([*SERVE, "--model", "gpt2", "--keep-corpus", "good.jsonl"], 1, "cannot write to good.jsonl: file exists; choose"),
    ([*SERVE, "--model", "gpt2", "--keep-prefixes", "/proc/none"], 1, "choose another --keep-prefixes"),
    (["layers", "show", "gpt2/t", "--version", "9" * 20], 2, "99999999999999999999 is too large"),
    ([*GENERATE, "--model", "gpt2", "--concurrency", "1e3"], 2, "'1e3' is not a valid integer (see"),
    ([*GENERATE, "--model", "gpt2", "--stop", ""], 2, "'--stop': a stop string is empty"),
    ([*GENERATE, "--model", "gpt2", "--task", ""], 2, "the task '' is not a valid name"),
    ([*GENERATE, "--model", "gpt2", "--method", "plain", "--draft-model", "smollm-135m"], 3, "nearest: smollm2-135m"),
    ([*GENERATE, "--model", "gpt2", "--db", "bert"], 1, "bert cannot be opened: check"),
    ([*GENERATE, "--model", "gpt2", "--out", "bert"], 1, "cannot write completions to bert: is a directory"),
    ([*TUNE, "good.jsonl", "--db", "bert"], 1, "bert cannot be opened: check"),
    ([*TUNE, "good.jsonl", "--out", "bert"], 1, "cannot write completions to bert: is a directory"),
    (["chat", "--model", "gpt2", "--message", "hello", "--db", "bert"], 1, "bert cannot be opened: check"),
    (["completion"], 2, "missing argument '{bash|zsh|fish}': choose from bash, zsh, fish (see `"),
    (["genrate"], 2, "no such command 'genrate': did you mean 'generate'?"),
    (["layers", "lst"], 2, "did you mean 'list'?"),
    (["layers", "promote", "smollm2-135m/t", "--version", "7"], 3, "swiftopt tune --model smollm2-135m"),
    (["layers", "rollback", "smollm2-135m/t"], 3, "swiftopt tune --model smollm2-135m"),
    (["layers", "import", "range.json"], 2, "range.json: layer set skips layers [30]"),
    (["layers", "import", "letter.txt"], 2, "letter.txt is not JSON"),
    (["layers", "import", "binary.jsonl"], 2, "binary.jsonl is not UTF-8 text"),
    (["layers", "import", "set.json", "--task", "a/b"], 2, "task 'a/b' is not a valid name"),
    (["layers", "import", "set.json", "--task", ""], 2, "task '' is not a valid name"),
    (["layers", "list", "--db", "letter.txt"], 1, "letter.txt is not a database: choose another file with --db"),
    (["layers", "list", "--db", "bert"], 1, "bert cannot be opened: check"),
    (["layers", "list", "--db", "letter.txt/x/a.db"], 1, "cannot be created"),
    (
        ["layers", "list", "--db", "postgresql://u:secret@h:port/x"],
        1,
        "is not a database that swiftopt can use",
    ),
    (["layers", "list", "--db", "sqlite:///a.db?foo=bar"], 1, "has options that SQLite lacks (foo)"),
]
OF_WINGS = {
    "bench": [
        (
            ["bench", "decode", "--model", "gpt2", "--stream", "good.jsonl", "--methods", "plain,swfit"],
            2,
            "nearest: swift",
        ),
        (
            ["bench", "decode", "--model", "gpt2", "--stream", "good.jsonl", "--methods", "hf-assistant"],
            2,
            "--assistant",
        ),
        (["bench", "decode", "--model", "bert", "--stream", "good.jsonl"], 2, "'bert', which is not supported"),
        (
            ["bench", "throughput", "--model", "gpt2", "--stream", "good.jsonl", "--rate", "nan"],
            2,
            "not a finite number",
        ),
        (
            ["bench", "throughput", "--model", "gpt2", "--stream", "good.jsonl", "--db", "bert"],
            1,
            "bert cannot be opened",
        ),
        (
            ["bench", "decode", "--model", "gpt2", "--stream", "good.jsonl", "--assistant", "smollm-135m"],
            3,
            "smollm2-135m",
        ),
    ],
    "engines": [
        (["export", "gpt2/t", "--to", "vllm", "--out", "bert"], 2, "bert exists already: name a new folder with --out"),
        (["export", "gpt2/t", "--to", "vllm", "--out", "new"], 3, "no layer set is stored for gpt2/t"),
        (["bench", "peers", "--model", "bert", "--stream", "good.jsonl"], 2, "'bert', which is not supported"),
        (
            ["bench", "peers", "--model", "gpt2", "--stream", "good.jsonl", "--peers", "lama-cpp"],
            2,
            "nearest: llama-cpp",
        ),
        (
            ["bench", "peers", "--model", "gpt2", "--stream", "good.jsonl", "--gguf", "no.gguf"],
            2,
            "no.gguf is not a file",
        ),
        ([*TUNE, "good.jsonl", "--engine", "sglang"], 2, "swiftopt cannot run sglang: start its servers"),
        ([*TUNE, "good.jsonl", "--engine", "vllm", "--limit", "3"], 2, "has 3 prompts: tuning an engine needs 4"),
        ([*TUNE, "good.jsonl", "--engine", "vllm", "--draft-model", "smollm-135m"], 3, "nearest: smollm2-135m"),
        (["import", "gpt2/t", "--engine", "vllm", "--plain", "no.json", "--drafted", "no.json"], 3, "no file no.json"),
        ([*IMPORT, "--engine", "vllm", "--settings", "deep.json"], 2, "deep.json is not JSON"),
        ([*IMPORT, "--engine", "vllm", "--settings", "no.json"], 3, "no file no.json with an engine's settings"),
        ([*IMPORT, "--exported", "bert"], 3, "no file bert/export.json with an exported plan"),
    ],
    "papers": [
        (["layers", "search", "--minutes", "inf"], 2, "'inf' is not a finite number"),
        ([*TUNE, "good.jsonl", "--preset", "adadecode", "--limit", "1"], 2, "too few prompts to hold some out"),
    ],
}
SLIPS += of_wings(OF_WINGS)


@pytest.mark.parametrize(("args", "code", "says"), SLIPS, ids=range(len(SLIPS)))
def test_slip_gets_its_code_and_one_sentence(
    args: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == code
    told = sentence(capsys)
    assert says in told
    assert "secret" not in told


def test_options_of_generate_without_an_effect_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Each ends at a database that cannot be opened, so that no model is loaded."""
    command = [*GENERATE, "--model", "gpt2", "--db", "bert"]
    assert run([*command, "--limit", "3", "--concurrency", "2", "--method", "plain", "--draft-model", "gpt2"]) == 1
    told = capsys.readouterr().err
    for words in (
        "--limit has no effect without",
        "--concurrency has no effect without",
        "--draft-model has no effect",
    ):
        assert f"warning: {words}" in told
    for fits in (
        ["spd", "--draft-model", "gpt2"],
        ["spd", "--layer-set", "set.json"],
        ["adaptive", "--layer-set", "set.json"],
    ):
        assert run([*command, "--method", *fits]) == 1
        assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["plain"], "--method plain, which uses none"),
        (["prompt-lookup"], "--method prompt-lookup, which uses none"),
        (["spd", "--draft-model", "gpt2"], "--draft-model, which drafts without it"),
    ],
)
def test_layer_set_that_nothing_drafts_with_is_told(
    args: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*GENERATE, "--model", "gpt2", "--db", "bert", "--layer-set", "set.json", "--method", *args]) == 1
    assert f"warning: --layer-set has no effect with {why}\n" in capsys.readouterr().err


def test_slips_cost_no_loading_of_torch() -> None:
    program = (
        "import json, sys; from swiftopt.cli.main import run\n"
        "codes = [run(args) for args in json.loads(sys.argv[1])]\n"
        "print(*codes, *{'torch', 'transformers'} & set(sys.modules))"
    )
    cases = json.dumps([args for args, _, _ in SLIPS])
    done = subprocess.run([sys.executable, "-c", program, cases], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(code) for _, code, _ in SLIPS]


def test_promote_and_rollback_name_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open() as store:
        store.add_layer_set(LayerSetRecord("m", "t", LayerSet(30, frozenset({3}), frozenset())))
    assert run(["layers", "promote", "m/t", "--version", "7"]) == 3
    assert "no version 7: stored are 1" in sentence(capsys)
    assert run(["layers", "rollback", "m/t"]) == 3
    assert "version 1 is the first it had" in sentence(capsys)


def test_database_of_a_newer_version_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Store.open().close()
    with sqlite3.connect(home / "home.db") as connection:
        connection.execute("UPDATE swiftopt_alembic_version SET version_num = '9.9.0'")
    connection.close()
    assert run(["layers", "list"]) == 1
    assert "was written by a newer swiftopt" in sentence(capsys)


def test_configuration_that_is_no_text_is_one_sentence(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "swiftopt.toml").write_bytes(b"seed = '\xff\xfe'")
    assert run(["layers", "list"]) == 2
    assert "swiftopt.toml is not UTF-8 text" in sentence(capsys)


def test_data_folder_that_cannot_be_made_is_one_sentence(home: Path) -> None:
    env = {**os.environ, "HOME": "/proc/nothing"}
    del env["SWIFTOPT_DATABASE_URL"], env["XDG_DATA_HOME"]
    done = script("layers", "list", env=env)
    assert done.returncode == 1
    assert "cannot be created" in done.stderr and "choose another with --db" in done.stderr
    assert done.stderr.count("\n") == 1


def test_picture_says_nothing_of_matplotlibs_folders(home: Path) -> None:
    with Store.open() as store:
        store.add_layer_set(LayerSetRecord("m", "t", LayerSet(30, frozenset({3}), frozenset())))
    done = script("layers", "show", "m/t", "--png", "x.png", env={**os.environ, "HOME": "/proc/nothing"})
    assert (done.returncode, done.stderr) == (0, "drawn to x.png\n")


@pytest.mark.parametrize("args", [["models"], ["models", "--json"], ["--help"]], ids=" ".join)
def test_full_disk_under_stdout_is_one_sentence(args: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = script(*args, stdout=full)
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the result: no space left on device; redirect stdout elsewhere\n"


def test_full_disk_under_stderr_changes_no_exit_code() -> None:
    with open("/dev/full", "w") as full:
        assert script("layers", "best", "m/t", stderr=full).returncode == 3
        assert script("layers", "list", stderr=full).returncode == 0


@pytest.mark.parametrize(("closed", "code"), [(0, 2), (1, 0), (2, 0)])
def test_closed_channels_cause_no_traceback(closed: int, code: int) -> None:
    args = ["generate", "--model", "gpt2"] if closed == 0 else ["models"]
    done = script(*args, preexec_fn=lambda: os.close(closed))
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_piped_prompt_that_is_no_text_is_one_sentence() -> None:
    process = subprocess.Popen([SCRIPT, "generate", "--model", "gpt2"], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = process.communicate(b"\xff\xfe", timeout=60)
    assert process.returncode == 2
    assert err == b"error: standard input is not UTF-8 text: pipe in text, or use --stream FILE\n"


def test_lines_before_a_full_disk_stay_whole(home: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from swiftopt.core.errors import OutputError
from swiftopt.core.streams import LineWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with LineWriter(Path("out.jsonl")) as lines:
        for _ in range(int(sys.argv[1])):
            lines.write("x" * 299)
        lines.write("x" * 1999)
except OutputError as error:
    sys.exit(str(error))
"""
    done = subprocess.run([sys.executable, "-c", program, "0"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "cannot write to out.jsonl: file too large; free some space and run again\n"
    done = subprocess.run([sys.executable, "-c", program, "9"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "cannot write to out.jsonl" in done.stderr and "the 3 completions before this one are saved" in done.stderr
    assert (home / "out.jsonl").read_text() == ("x" * 299 + "\n") * 3


# --- the live display


@pytest.mark.parametrize("width", [80, 120])
def test_live_display_wraps_no_line_and_keeps_only_news(width: int) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    with TuneProgress(console) as progress:
        for n in range(3):
            progress(PhaseChanged("notes", "profile", f"measuring costs, round {n}"))
            progress(PromptStarted("notes", str(n), n, 3))
            progress(PhaseChanged("notes", "optimise", ""))
        progress(PhaseChanged("notes", "accelerate", "no better layer set in 300 candidates, " * 6))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    kept = [line for line in plain.replace("\r", "\n").splitlines() if line.startswith("notes: ")]
    assert len(kept) == 1 and kept[0].startswith("notes: search ended: no better")
    assert len(kept[0].rstrip()) <= width


def test_display_never_shows_a_best_matchness_below_one_that_it_has_shown() -> None:
    trials = tuple(
        Trial(step, LayerSet.uniform(30, 9), "random", value, value) for step, value in enumerate((0.8, 0.4))
    )
    now = Progress("notes", "optimise", 9, 5.0, 0.4, 0.4, 2, 0.9, 3.0, 0.45)
    progress = TuneProgress(Console(file=io.StringIO()))
    progress(TrialsDone("notes", trials))
    progress(now)
    assert progress.state.progress is not None and progress.state.progress.best_matchness == 0.8


def test_log_tells_each_phase_once() -> None:
    shown = io.StringIO()
    with TuneProgress(Console(file=shown, width=80)) as progress:
        for n in range(3):
            progress(PhaseChanged("", "profile", f"measuring costs, round {n}"))
        for _ in range(3):
            progress(PhaseChanged("notes", "accumulate", ""))
            progress(PhaseChanged("notes", "optimise", ""))
    assert shown.getvalue().splitlines() == [
        "preparing: measuring costs, round 0",
        "notes: collecting text",
        "notes: searching",
    ]


# --- with a model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tiny_files import save

    return str(save(tmp_path_factory.mktemp("tiny") / "model"))


def told_last(capsys: pytest.CaptureFixture[str]) -> str:
    """The last line on stderr; nothing but steps of loading came before it."""
    *steps, last = capsys.readouterr().err.splitlines()
    assert all(step.startswith("load: ") for step in steps)
    return last


@pytest.mark.parametrize("command", [["generate"], ["compare", "--methods", "prompt-lookup"]], ids=lambda own: own[0])
def test_prompt_longer_than_the_context_is_named_before_the_model_is_loaded(
    command: list[str], tiny: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "long.jsonl").write_text('{"prompt": "w1"}\n' + json.dumps({"prompt": "w5 " * 400, "id": "six"}) + "\n")
    assert run([*command, "--model", tiny, "--stream", "long.jsonl", "--max-new-tokens", "8"]) == 2
    [told] = capsys.readouterr().err.splitlines()
    assert "'six'" in told and "the prompt has 400" in told and "context length is 256" in told


def test_chat_is_refused_where_the_model_has_no_template(
    tiny: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "w1"}]}\n')
    assert run(["generate", "--model", tiny, "--stream", "chat.jsonl"]) == 2
    assert "no chat template" in told_last(capsys)


@pytest.mark.parametrize(
    ("changes", "says"), [({}, "is for 30 layers"), ({"n_layers": 4, "skip_attn": [1], "skip_mlp": []}, "fp")]
)
@pytest.mark.parametrize(
    "command",
    [GENERATE, *of_wings({"bench": [["bench", "decode", "--stream", "good.jsonl", "--methods", "plain"]]})],
)
def test_layer_set_of_another_model_is_refused_before_anything_is_decoded(
    command: list[str],
    changes: dict[str, Any],
    says: str,
    tiny: str,
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fingerprint = {"fingerprint": "v1:fp"} if changes else {}
    (home / "other.json").write_text(json.dumps(layer_set_values(**changes, **fingerprint)))
    assert run([*command, "--model", tiny, "--layer-set", "other.json"]) == 2
    assert says in told_last(capsys)


@pytest.mark.wing("bench")
def test_bench_decode_tells_of_a_layer_set_that_no_method_takes(
    tiny: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "fits.json").write_text(json.dumps(layer_set_values(n_layers=4, skip_attn=[1], skip_mlp=[])))
    command = ["bench", "decode", "--model", tiny, "--stream", "good.jsonl", "--limit", "1", "--max-new-tokens", "4"]
    for methods, told in (("plain,prompt-lookup", True), ("plain,spd", False)):
        assert run([*command, "--layer-set", "fits.json", "--methods", methods]) == 0
        assert ("warning: --layer-set has no effect with these methods" in capsys.readouterr().err) == told


def test_error_in_the_middle_of_a_text_begins_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Iterator[generate.TextAdded]:
        yield generate.TextAdded("half a")
        raise InvalidInput("no more")

    monkeypatch.setattr(generate, "generate", broken)
    assert run([*GENERATE, "--model", "gpt2"]) == 2
    assert capsys.readouterr() == ("half a\n", "error: no more\n")


def test_full_disk_under_the_output_file_is_one_sentence(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*GENERATE, "--model", tiny, "--max-new-tokens", "4", "-o", "/dev/full"]) == 1
    assert "cannot write to /dev/full: no space left on device" in told_last(capsys)


def test_old_output_is_spared_by_a_run_that_fails_before_its_first_completion(
    tiny: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = home / "out.jsonl"
    out.write_text("old\n")
    assert run([*GENERATE, "--model", tiny, "--max-new-tokens", "4000", "-o", str(out)]) == 2
    assert out.read_text() == "old\n"
    assert run([*GENERATE, "--model", tiny, "--max-new-tokens", "4", "-o", str(out)]) == 0
    assert [json.loads(line)["n_tokens"] for line in out.read_text().splitlines()] == [4]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_tuning_tells_where_its_completions_are(tiny: str, home: Path, number: signal.Signals) -> None:
    args = ["tune", "--model", tiny, "--stream", "good.jsonl", "--max-new-tokens", "8", "--no-optimise"]
    process = subprocess.Popen([SCRIPT, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    told = ""
    while "prompt 2" not in told:
        line = process.stderr.readline()
        assert line, told
        told += line
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in told + err and "interrupted" in err
    counted = next(line for line in err.splitlines() if " completions are in " in line)
    n_told, path = counted.split(" completions are in ")
    ids = [json.loads(line)["id"] for line in Path(path).read_text().splitlines()]
    assert ids == [str(n + 1) for n in range(int(n_told))] and len(ids) >= 2
