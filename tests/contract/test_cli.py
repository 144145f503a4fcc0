"""The program's promises: channels, exit codes, JSON, configuration, and that looking things up needs no torch.

What a user can only see in a process of its own goes through the installed console script; the rest calls what the
script calls. Tuning and decoding have their own tests, on a model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import click
import pytest
import torch
from wings import WINGS, is_here, of_wings

from swiftopt.cli import doctor
from swiftopt.cli.main import run, swiftopt
from swiftopt.core.events import TaskFinished, TrialsDone
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord, PlanInUse
from swiftopt.core.requests import JobSpec
from swiftopt.core.types import Completion, Prompt, Timings, Trial, Verdict
from swiftopt.models.families import model_types
from swiftopt.models.loading import random_runtime
from swiftopt.store import Store
from swiftopt.terminal.commands import MANY, GroupedCommand

SCRIPT = shutil.which("swiftopt", path=str(Path(sys.executable).parent)) or "swiftopt"
HEAVY = {"torch", "transformers", "sqlalchemy", "matplotlib", "optuna", "bayes_opt", "sklearn"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, unconfigured: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a database of its own."""
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", str(tmp_path / "home.db"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def some_record(**changes: Any) -> LayerSetRecord:
    record = LayerSetRecord(
        model="smollm2-135m",
        task="notes",
        layer_set=LayerSet(30, frozenset({3, 4}), frozenset({5})),
        matchness=0.9,
        measured_speedup=1.2,
        measured_interval=(1.1, 1.3),
        verdict="use",
        device="cpu",
        dtype="bfloat16",
        created_at="2026-11-21T00:00:00Z",
    )
    return replace(record, **changes)


@pytest.fixture
def stored(home: Path) -> LayerSetRecord:
    """One layer set with the trials of its run, in the default database."""
    with Store.open() as store:
        lease = store.jobs.begin_here(JobSpec("tune", None, {"model": "smollm2-135m"}), "here").lease
        layer_set = LayerSet.uniform(30, 9)
        trials = tuple(Trial(i, layer_set, "random", 0.1 * i, 0.1 * i, adopted=i == 3) for i in range(8))
        store.jobs.checkpoint(lease, 1, [TrialsDone("notes", trials)], None)
        return store.add_layer_set(some_record(job=lease.job))


def script(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *args], capture_output=True, text=True, timeout=60, **more)


def every_command(group: click.Group = swiftopt, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    context = click.Context(group)
    found: list[tuple[str, ...]] = [path]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found += every_command(command, (*path, name)) if isinstance(command, click.Group) else [(*path, name)]
    return found


def command_at(path: tuple[str, ...]) -> click.Command:
    command: click.Command = swiftopt
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    return command


def is_group(path: tuple[str, ...]) -> bool:
    return isinstance(command_at(path), click.Group)


# --- help and start


@pytest.mark.parametrize("path", every_command(), ids=" ".join)
def test_help_has_an_example_for_every_command(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*path, "--help"]) == 0
    shown = capsys.readouterr().out
    example = shown.partition("Example:")[2].strip().splitlines()[0]
    assert example.startswith(" ".join(("swiftopt", *path)))


@pytest.mark.parametrize("path", [path for path in every_command() if not is_group(path)], ids=" ".join)
def test_every_command_offers_json(path: tuple[str, ...]) -> None:
    assert "--json" in {option for param in command_at(path).params for option in param.opts}


def test_help_lists_every_command_through_the_installed_script() -> None:
    done = script("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"\n  {name} " in done.stdout for name in swiftopt.list_commands(click.Context(swiftopt)))


@pytest.mark.parametrize(
    ("args", "allowed"),
    [
        (["--help"], set[str]()),
        (["tune", "--help"], set[str]()),
        (["layers", "best", "--help"], set[str]()),
        (["layers", "list", "--json"], {"sqlalchemy"}),
        (["models"], {"sqlalchemy"}),
    ],
    ids=lambda value: " ".join(sorted(value) if isinstance(value, set) else value),
)
def test_start_imports_nothing_heavy(args: list[str], allowed: set[str]) -> None:
    code = (
        "import sys; from swiftopt.cli.main import run; c = run(sys.argv[1:]); print(c, *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60)
    exit_code, *modules = done.stderr.splitlines()[-1].split()
    assert exit_code == "0"
    assert HEAVY & set(modules) <= allowed


def sections_of(path: tuple[str, ...], flag: str, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Return the options that help lists under each heading, by their first long name."""
    assert run([*path, flag]) == 0
    found: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if re.fullmatch(r"\S.*:", line):
            found[line[:-1]] = []
        elif found and (option := re.match(r"  (?:-\w, )?(--[a-z-]+)", line)):  # not a line of the words above
            found[list(found)[-1]].append(option[1])
    return found


def declared_options(path: tuple[str, ...]) -> dict[str, str]:
    """Return the first long name of each option, by the parameter's name."""
    options = [param for param in command_at(path).params if isinstance(param, click.Option)]
    return {param.name or "": next(name for name in param.opts if name.startswith("--")) for param in options}


COMMANDS = [path for path in every_command() if not is_group(path)]


def has_common(path: tuple[str, ...]) -> bool:
    command = command_at(path)
    return isinstance(command, GroupedCommand) and bool(command.common)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_full_help_lists_each_option_once_and_many_under_headings(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--help-all" if has_common(path) else "--help"
    found = sections_of(path, flag, capsys)
    declared = [*declared_options(path).values(), "--help", *(["--help-all"] if has_common(path) else [])]
    listed = [name for names in found.values() for name in names]
    assert sorted(listed) == sorted(declared)
    if len(declared) < MANY:
        assert [heading for heading, names in found.items() if names] == ["Options"]
    else:
        assert found["Main options"] == declared[:3]
        assert set(found["Other options"]) <= {"--help", "--help-all", "--json", "--png", "--svg", "--no-store"}


@pytest.mark.parametrize("path", every_command(), ids=" ".join)
def test_help_fits_60_lines_of_80_columns(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*path, "--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 60


@pytest.mark.parametrize("path", list(filter(has_common, COMMANDS)), ids=" ".join)
def test_help_lists_common_options_those_that_are_required_and_how_to_see_the_others(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    declared, command = declared_options(path), cast(GroupedCommand, command_at(path))
    listed = sections_of(path, "--help", capsys)["Common options"]
    common = [name for name in command.common if name in declared]
    assert common == command.common or not all(map(is_here, WINGS))  # some are options of wings
    assert listed == [*(declared[name] for name in common), "--help", "--help-all"]
    assert {declared[param.name or ""] for param in command.params if param.required} <= set(listed)
    assert run([*path, "--help"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{len(declared) - len(common)} more options: swiftopt {' '.join(path)} --help-all"


def test_full_help_of_tune_begins_with_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    found = sections_of(("tune",), "--help-all", capsys)
    assert found["Main options"] == ["--model", "--stream", "--task"]
    assert {"--strategy", "--max-steps"} <= set(found["Search"])
    assert "--stop-threshold" in found["SWIFT's drafts, with --method swift"]


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("width", [80, 120])
def test_help_keeps_to_the_width(
    width: int, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["tune", flag]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("    swiftopt ")]
    assert width // 2 < max(map(len, lines)) <= width  # examples are not wrapped, to be copied


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == "swiftopt, version 0.1.0\n"


# --- exit codes, one sentence, channels


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["nonsense"], 2, "nonsense"),
        (["tune"], 2, "--model"),
        (["layers", "best", "no-slash"], 2, "MODEL/TASK"),
        (["layers", "best", "smollm2-135m/notes"], 3, "swiftopt tune --model smollm2-135m"),
        (["layers", "show", "smollm2-135m/notes", "--version", "7"], 3, "smollm2-135m"),
        (["layers", "rollback", "smollm2-135m/notes"], 3, "smollm2-135m"),
        (["layers", "import", "missing.json"], 3, "missing.json"),
        (["tune", "--model", "m", "--stream", "missing.jsonl"], 3, "missing.jsonl"),
        (["tune", "--model", "m", "--stream", "broken.jsonl"], 2, "broken.jsonl line 2"),
        (["tune", "--model", "m", "--stream", "good.jsonl", "--skip-ratio", "2"], 2, "skip_ratio"),
        (["tune", "--model", "m", "--stream", "good.jsonl", "--objective", "fun"], 2, "objective"),
        (["generate", "--model", "m", "--stream", "missing.jsonl"], 3, "missing.jsonl"),
        (["generate", "--model", "m", "--prompt", "x", "--stream", "good.jsonl"], 2, "exclude each other"),
        (["generate", "--model", "m", "--prompt", " "], 2, "empty"),
        (["generate", "--model", "m", "--prompt", "x", "--layer-set", "missing.json"], 3, "missing.json"),
        (["generate", "--model", "m", "--prompt", "x", "--layer-set", "good.jsonl"], 2, "good.jsonl"),
        (["generate", "--model", "m", "--prompt", "x", "--temperature", "-1"], 2, "temperature"),
        (["generate", "--model", "m", "--prompt", "x", "--min-p", "1.5"], 2, "min_p"),
        (["generate", "--model", "m", "--prompt", "x", "--presence-penalty", "3"], 2, "presence_penalty"),
        (["tune", "--model", "m", "--stream", "x", "--logit-bias", "5"], 2, "50=-2.5"),
        (["tune", "--model", "m", "--stream", "x", "--logit-bias", "5=200"], 2, "logit_bias"),
        (["layers", "list", "--db", "good.jsonl"], 1, "good.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_gets_its_code_and_one_sentence(
    args: list[str], code: int, says: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "good.jsonl").write_text('{"prompt": "a"}\n' * 9)
    (home / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    assert run(args) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert len([line for line in err.splitlines() if not line.startswith(("Usage:", "Try ", "\n")) and line]) == 1


def test_error_leaves_stdout_empty_through_the_installed_script() -> None:
    done = script("layers", "best", "smollm2-135m/notes", "--json")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_ends_with_130_and_one_sentence(home: Path, number: signal.Signals) -> None:
    os.mkfifo(home / "prompts")
    args = [SCRIPT, "generate", "--model", "m", "--stream", "prompts"]
    heeds = partial(signal.signal, number, signal.SIG_DFL)  # Under nohup the tests' programs would ignore SIGHUP.
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeds)
    with (home / "prompts").open("wb"):  # opens when the program does, which then waits for a line
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err.strip()) == ("", "interrupted: finished work is kept")


def test_interrupt_while_libraries_are_imported_is_no_traceback() -> None:
    code = (
        "import runpy, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'pydantic': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting()); runpy.run_module('swiftopt', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_reader_that_leaves_is_no_error() -> None:
    process = subprocess.Popen([SCRIPT, "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 1


def test_unexpected_error_is_not_swallowed() -> None:
    code = (
        "import sys; from swiftopt.cli.main import main\n"
        "sys.modules['swiftopt.store'] = None\n"  # a broken installation, as Python reports it
        "sys.argv[1:] = ['layers', 'list']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["serve", "--model", "smollm2-135m"], 2),
        pytest.param(["worker", "--redis", "redis://127.0.0.1:1"], 2, marks=pytest.mark.slow),
        pytest.param(["generate", "--model", "smollm2-135m", "--prompt", "x"], 1, marks=pytest.mark.slow),
    ],
)
def test_installation_without_torch_says_what_it_lacks(args: list[str], code: int) -> None:
    """The image of the API is one."""
    program = f"import sys; sys.modules['torch'] = None; from swiftopt.cli.main import run; sys.exit(run({args!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("error: torch is not installed here") and done.stderr.count("\n") == 1


# --- JSON


def json_of(args: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run([*args, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    value: dict[str, Any] = json.loads(out)
    return value


@pytest.mark.parametrize(
    ("args", "schema"),
    [
        (["layers", "list"], "swiftopt.layers-list/1"),
        (["layers", "best", "smollm2-135m/notes"], "swiftopt.layer-set/1"),
        (["layers", "show", "smollm2-135m/notes"], "swiftopt.layers-show/1"),
        (["layers", "export", "smollm2-135m/notes"], "swiftopt.layer-set/1"),
        (["layers", "promote", "smollm2-135m/notes", "--version", "1"], "swiftopt.layers-promote/1"),
        (["models"], "swiftopt.models/1"),
        (["models", "--types"], "swiftopt.model-types/1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_json_is_one_object_with_its_schema(
    args: list[str], schema: str, stored: LayerSetRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json_of(args, capsys)["schema"] == schema


def test_types_tell_what_runs_them_and_with_which_weights_tests_decode(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "--types"]) == 0
    out = capsys.readouterr().out
    assert {line.split()[0] for line in out.splitlines() if line.strip()} >= {row.type for row in model_types()}
    assert out.splitlines()[-2].startswith("run by: on a CPU our kernels") and "\nproof: tests decode with" in out


def test_best_and_export_print_exactly_the_record(stored: LayerSetRecord, capsys: pytest.CaptureFixture[str]) -> None:
    assert json_of(["layers", "best", "smollm2-135m/notes"], capsys) == stored.to_json()
    assert run(["layers", "export", "smollm2-135m/notes"]) == 0
    assert json.loads(capsys.readouterr().out) == stored.to_json()


def test_best_draws_the_search_as_show_does(stored: LayerSetRecord, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for command in ("best", "show"):
        assert run(["layers", command, "smollm2-135m/notes"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "matchness of 8 trials" in shown[0]


def test_list_tells_the_best_version(stored: LayerSetRecord, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open() as store:
        store.add_layer_set(some_record(matchness=0.5), promote=False)
    sets = json_of(["layers", "list"], capsys)["layer_sets"]
    assert [(entry["version"], entry["best"]) for entry in sets] == [(2, False), (1, True)]


def test_show_tells_the_trials_of_the_run(stored: LayerSetRecord, capsys: pytest.CaptureFixture[str]) -> None:
    trials = json_of(["layers", "show", "smollm2-135m/notes"], capsys)["trials"]
    assert [trial["step"] for trial in trials] == list(range(8))
    assert trials[3]["adopted"]


def test_doctor_reports_and_its_code_follows_the_checks(
    home: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("swiftopt.models.kernels.measure.speeds_file", lambda: home / "speeds.json")
    report = json_of(["doctor", "--model", "smollm2-135m"], capsys)
    assert report["ok"]
    names = {check["name"] for check in report["checks"]}
    assert {"python", "torch", "transformers", "cores", "speed", "memory", "database", "cache", "model"} <= names
    kernels = next(check["text"] for check in report["checks"] if check["name"] == "kernels")
    assert re.search(r"(from the package|compiled on this machine) by (GCC|clang) \d+\.", kernels)
    (home / "home.db").write_text("this is no database, and long enough to be taken for one" * 40)
    request.getfixturevalue("small_measurement")  # the real one was above
    assert run(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("fail")] == ["database"]


@pytest.mark.parametrize(
    ("seconds", "status", "words"),
    [
        (
            (0.002, 0.0005),
            "ok",
            "auto selects CUDA graphs, 0.50 ms per pass of 4 small layers with graphs, 2.00 without",
        ),
        ((0.002, 0.003), "ok", "auto selects eager, 3.00 ms per pass of 4 small layers with graphs, 2.00 without"),
        (
            RuntimeError("stream is capturing\nCUDA"),
            "warn",
            "auto selects eager, because CUDA graphs cannot be used: stream is capturing",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "warn", "cuda:1 has too little memory for a small model"),
        (None, "warn", "auto selects eager, and exact is not possible: no Triton"),
    ],
)
def test_doctor_measures_what_auto_selects_on_a_gpu(
    seconds: Any, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the one with the most free memory."""

    def timed(runtime: Any, graphs: Any) -> tuple[float, float]:
        assert runtime.n_layers == 4 and graphs == "graphs of cpu"
        if isinstance(seconds, Exception):
            raise seconds
        return cast(tuple[float, float], seconds)

    def on_cpu(config: Any, device: str, made: Any = random_runtime) -> Any:
        assert device == "cuda:1"
        config.update({"hidden_size": 64, "intermediate_size": 64, "head_dim": 8})  # nothing is computed with it
        return made(config, "cpu")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: ((1, 70, 20)[index] * doctor.GIB, 80 * doctor.GIB))
    monkeypatch.setattr("swiftopt.models.loading.random_runtime", on_cpu)
    monkeypatch.setattr("swiftopt.models.graphs.GraphPasses", lambda runtime: f"graphs of {runtime.device}")
    monkeypatch.setattr("swiftopt.models.graphs.pass_seconds", timed)
    monkeypatch.setattr("swiftopt.models.kernels.device.obstacle", lambda: None if seconds else "no Triton")
    found = doctor.check_speed()
    assert found[0] == status and words in found[1]


@pytest.mark.parametrize("begun", [True, False])
def test_doctor_fails_where_the_database_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    file = tmp_path / "a.db" if begun else tmp_path / "new" / "a.db"
    if begun:
        Store.open(file).close()
    url, free = f"sqlite:///{file}", shutil.disk_usage(tmp_path)
    assert doctor.check_database(url)[0] == "ok"
    monkeypatch.setattr("shutil.disk_usage", lambda folder: free._replace(free=1 << 20))
    assert doctor.check_database(url) == ("fail", f"the disk of {file} is full: make room there")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    status, problem = doctor.check_database(url)
    assert (status, problem.partition(":")[0]) == ("fail", f"{file} cannot be written")


def test_doctor_tells_the_free_memory_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: ((1 + 70 * index) * doctor.GIB, 80 * doctor.GIB))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: f"card {index}")
    assert list(doctor.check_devices()) == [
        doctor.Check("cuda:0", "warn", "card 0, 1.0 of 80.0 GiB free"),
        doctor.Check("cuda:1", "ok", "card 1, 71.0 of 80.0 GiB free"),
    ]


@pytest.mark.parametrize(("driver", "status"), [(False, "ok"), (True, "warn")])
def test_doctor_warns_of_no_cuda_device_only_where_a_driver_is(
    driver: bool, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", tmp_path if driver else tmp_path / "absent")
    (found,) = doctor.check_devices()
    assert (found.name, found.status) == ("devices", status) and "no CUDA device" in found.text


def test_tune_object_keeps_the_verdict_and_the_command() -> None:
    from swiftopt.cli.backend import Backend, Ended
    from swiftopt.cli.jobs import tune_result
    from swiftopt.core.requests import Job, TuneRequest

    finished = TaskFinished(
        "notes", some_record(version=1), Verdict("plain", 0.9), "done", (), Timings(1, 2, 3, 4), 5, 60, 0.6, 9.0, 8.0
    )
    request = TuneRequest("m", "notes.jsonl")
    plan = PlanInUse("notes", 1, "plain", verdict="plain", measured_speedup=0.9)
    ended = Ended(Job("job", "tune", "succeeded", None, 1, "", {}, plans=(plan,)), (finished,))
    value = json.loads(json.dumps(tune_result(request, ended, "db", Backend(), ["dtype"], "out").value))
    assert value["schema"] == "swiftopt.tune/1"
    assert value["tasks"][0]["verdict"]["word"] == "plain" and value["tasks"][0]["plan"] == plan.to_json()
    assert value["tasks"][0]["timings"] == {"optimise": 1, "draft": 2, "verify": 3, "other": 4}
    command = ["swiftopt", "generate", "--model", "m", "--task", "notes", "--dtype", "auto", "--prompt"]
    assert value["tasks"][0]["command"][:-1] == command
    assert value["tasks"][0]["layer_set"] == some_record(version=1).to_json()


def test_completion_object_names_the_layer_set_only_when_it_was_used() -> None:
    from swiftopt.cli.generate import completion_json
    from swiftopt.decoding.events import GenerateInfo

    record = some_record(version=1)
    prompt, info = Prompt("1", "notes", text="x"), GenerateInfo("swift", record, 1, "use", "tuned on cpu")
    drafted = Completion((5, 6, 7), "abc", "length", "swift", target_passes=1, first_tokens=1, drafted=2, accepted=1)
    value = json.loads(json.dumps(completion_json("smollm2-135m", prompt, drafted, info)))
    wanted = "schema id task model text token_ids n_tokens finish_reason method target_passes drafted accepted"
    wanted += " accepted_per_position refused acceptance_rate mean_generated_length timings layer_set fallback verdict"
    assert set(wanted.split()) <= set(value)
    assert value["layer_set"] == record.to_json()
    assert (value["acceptance_rate"], value["fallback"], value["verdict"]) == (0.5, "tuned on cpu", "use")
    plain = replace(drafted, method="plain")
    assert completion_json("smollm2-135m", prompt, plain, info)["layer_set"] is None


@pytest.mark.parametrize("method", ["adaptive", "swift"])
def test_remark_on_a_plain_verdict_names_the_method_that_the_set_is_for(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from swiftopt.cli.generate import note_remarks
    from swiftopt.decoding.events import GenerateInfo

    info = GenerateInfo("plain", some_record(settings={"method": method}), 1, "plain")
    note_remarks(Completion((5,), "a", "length", "plain"), info, set())
    assert capsys.readouterr().err.endswith(f"as the stored verdict says; --method {method} drafts anyway\n")


# --- layer sets in and out


def test_exported_set_comes_back_the_same_on_import(
    stored: LayerSetRecord, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["layers", "export", "smollm2-135m/notes", "-o", "notes.json"]) == 0
    assert capsys.readouterr().out == ""
    value = json_of(["layers", "import", "notes.json", "--db", "other.db"], capsys)
    written = LayerSetRecord.from_json(json.loads((home / "notes.json").read_text()), "notes.json")
    assert value["layer_sets"] == [{**replace(written, version=1).to_json(), "promoted": True}]


def test_import_leaves_the_best_alone_when_there_is_one(
    stored: LayerSetRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["layers", "export", "smollm2-135m/notes", "-o", "notes.json"])
    assert json_of(["layers", "import", "notes.json"], capsys)["layer_sets"][0]["promoted"] is False
    assert json_of(["layers", "best", "smollm2-135m/notes"], capsys)["version"] == 1


def test_import_reads_the_published_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = {f"llama-2-13b_{task}": {"attention": [3], "mlp": [4, 5]} for task in ("cnndm", "gsm8k")}
    (home / "skip_layers.json").write_text(json.dumps(sets))
    imported = json_of(["layers", "import", "skip_layers.json"], capsys)["layer_sets"]
    assert [(s["model"], s["task"], s["n_layers"]) for s in imported] == [
        ("llama-2-13b", "cnndm", 40),
        ("llama-2-13b", "gsm8k", 40),
    ]
    assert run(["layers", "import", "skip_layers.json", "--model", "mine"]) == 2


def test_import_takes_depth_and_names_from_options(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "one.json").write_text(json.dumps({"mine_notes": {"attention": [3], "mlp": []}}))
    assert run(["layers", "import", "one.json"]) == 2
    assert "--n-layers" in capsys.readouterr().err
    args = ["layers", "import", "one.json", "--n-layers", "12", "--model", "org/mine", "--task", "code"]
    assert json_of(args, capsys)["layer_sets"][0]["n_layers"] == 12
    assert json_of(["layers", "best", "org/mine/code"], capsys)["skip_attn"] == [3]


def test_promote_and_rollback_move_the_best(stored: LayerSetRecord, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open() as store:
        store.add_layer_set(some_record(matchness=0.5), promote=False)
    assert json_of(["layers", "promote", "smollm2-135m/notes", "--version", "2"], capsys)["version"] == 2
    assert json_of(["layers", "best", "smollm2-135m/notes"], capsys)["version"] == 2
    assert json_of(["layers", "rollback", "smollm2-135m/notes"], capsys)["version"] == 1
    assert json_of(["layers", "best", "smollm2-135m/notes"], capsys)["version"] == 1


def test_png_is_drawn_with_and_without_trials(stored: LayerSetRecord, home: Path) -> None:
    assert run(["layers", "show", "smollm2-135m/notes", "--png", "notes.png", "--svg", "notes.svg"]) == 0
    drawn = (home / "notes.svg").read_text()
    assert all(f">{words}</text>" in drawn for words in ("smollm2-135m / notes · version 1", "attention", "adopted"))
    with Store.open() as store:
        store.add_layer_set(some_record(task="a $bare$ task", job=None))
    assert run(["layers", "show", "smollm2-135m/a $bare$ task", "--png", "bare.png"]) == 0
    heights = []
    for name in ("notes.png", "bare.png"):
        head = (home / name).read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        heights.append(int.from_bytes(head[20:24], "big"))
    assert heights[0] > heights[1] > 200


@pytest.mark.parametrize("command", [["export", "-o"], ["show", "--png"]], ids=" ".join)
@pytest.mark.parametrize(("file", "says"), [("/dev/full", "the disk is full"), ("no/such/folder.x", "no such file")])
def test_unwritable_file_is_one_sentence(
    command: list[str], file: str, says: str, stored: LayerSetRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    action, option = command
    assert run(["layers", action, "smollm2-135m/notes", option, file]) == 1
    out, err = capsys.readouterr()
    assert bool(out) == (action == "show" and file == "/dev/full"), "what was found is printed all the same"
    assert err.startswith(f"error: cannot write {file}: {says}")


# --- configuration


def test_option_wins_over_environment_over_file_over_default(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for task in ("toml", "env", "option"):
        with Store.open(str(home / f"{task}.db")) as store:
            store.add_layer_set(some_record(task=task))

    def task_listed(*args: str) -> list[str]:
        return [entry["task"] for entry in json_of(["layers", "list", *args], capsys)["layer_sets"]]

    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", str(home / "env.db"))
    (home / "swiftopt.toml").write_text('db = "toml.db"\n')
    assert task_listed("--db", "option.db") == ["option"]
    assert task_listed() == ["env"]
    monkeypatch.delenv("SWIFTOPT_DATABASE_URL")
    assert task_listed() == ["toml"]
    (home / "swiftopt.toml").write_text('database_url = "toml.db"\n')
    assert task_listed() == ["toml"]


@pytest.mark.parametrize("command", [["tune"], ["generate"], *of_wings({"bench": [["bench", "decode"]]})], ids=" ".join)
def test_configured_value_reaches_the_options_of_every_command(
    command: list[str], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [*command, "--stream", "missing.jsonl"]
    assert run(args) == 2
    assert "'--model'" in capsys.readouterr().err  # required, and set nowhere
    (home / "swiftopt.toml").write_text('model = "m"\nmax_new_tokens = 0\n')
    assert run(args) == 2
    assert "'--max-new-tokens'" in capsys.readouterr().err
    monkeypatch.setenv("SWIFTOPT_MAX_NEW_TOKENS", "8")
    assert run(args) == 3
    assert "missing.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("toml", "env", "says"),
    [
        ("modle = 'x'", {}, "swiftopt.toml has the unknown key 'modle': did you mean 'model'?"),
        ("zzz = 1", {}, "swiftopt.toml has the unknown key 'zzz': known are "),
        ("seed = 'x'", {}, "seed in swiftopt.toml is 'x'"),
        ("seed = ", {}, "swiftopt.toml is not valid TOML"),
        ("", {"SWIFTOPT_SEED": "x"}, "SWIFTOPT_SEED is 'x'"),
    ],
)
def test_bad_configured_value_is_one_sentence(
    toml: str,
    env: dict[str, str],
    says: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (home / "swiftopt.toml").write_text(toml)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert run(["layers", "list"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {says}")
    assert err.count("\n") == 1


def test_unknown_variable_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTOPT_SOMETHING_ELSE", "1")
    assert run(["layers", "list"]) == 0


# --- colour and width


def test_colours_come_only_where_they_are_wanted(
    stored: LayerSetRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def coloured(*args: str) -> bool:
        assert run([*args, "layers", "show", "smollm2-135m/notes"]) == 0
        return "\x1b[" in capsys.readouterr().out

    assert not coloured()  # no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert coloured()
    assert not coloured("--no-color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured()


def test_a_layer_map_can_be_read_where_the_terminal_shows_ascii_only(stored: LayerSetRecord) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    args = [SCRIPT, "layers", "show", "smollm2-135m/notes"]
    lines = subprocess.run(args, env=env, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    [attention] = [line for line in lines if line.startswith("attn")]
    assert attention.split()[1:] == ["#" if layer in (3, 4) else "." for layer in range(30)]
    assert any(line.split()[:2] == ["#", "skipped"] for line in lines)


@pytest.mark.parametrize("width", [80, 120])
def test_output_keeps_to_the_terminals_width(
    width: int, stored: LayerSetRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for args in (["layers", "list"], ["layers", "show", "smollm2-135m/notes"], ["models"], ["models", "--types"]):
        assert run(args) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        assert max(map(len, lines)) > width // 2


# --- options that have no effect


def warnings_of(line: str, home: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what `tune` warns of before it finds that there is no such model."""
    (home / "good.jsonl").write_text('{"prompt": "a"}\n' * 9)
    assert run(["tune", "--model", "no-such-model", "--stream", "good.jsonl", *line.split()]) == 3
    return [said for said in capsys.readouterr().err.splitlines() if said.startswith("warning: ")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--skip-ratio 0.3", "--skip-ratio has no effect with --strategy knapsack"),
        ("--strategy local --skip-ratio 0.3", "--skip-ratio has no effect with --strategy local"),
        ("--stop-threshold 0.5", "--stop-threshold has no effect with --method adaptive"),
        ("--max-draft-length 9", "--max-draft-length has no effect with --method adaptive"),
        ("--no-early-stop", "--no-early-stop has no effect with --method adaptive"),
        ("--no-dynamic-verification", "--no-dynamic-verification has no effect with --method adaptive"),
        ("--no-search-drafting", "--no-search-drafting has no effect with --method adaptive"),
        ("--max-steps 97", "--max-steps has no effect above 96 with --strategy knapsack"),
        ("--deterministic", "--deterministic has no effect with --strategy knapsack"),
        ("--deterministic --strategy random", "--deterministic has no effect with --strategy random"),
        ("--max-steps 9 --no-optimise", "--max-steps has no effect with --no-optimise"),
        ("--method swift --no-early-stop --stop-threshold 0.5", "--stop-threshold has no effect with --no-early-stop"),
        (
            "--method swift --objective matchness --no-search-drafting",
            "--no-search-drafting has no effect with --objective matchness",
        ),
    ],
)
def test_option_without_effect_is_named_once(
    line: str, says: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (said,) = warnings_of(line, home, capsys)
    assert said.startswith(f"warning: {says}")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--skip-ratio 0.3 --strategy swift",
        "--skip-ratio 0.3 --objective matchness",
        "--skip-ratio 0.3 --no-optimise --draft-format stored",
        "--max-steps 96",
        "--max-steps 200 --strategy tpe",
        "--deterministic --strategy bayes",
        "--method swift --stop-threshold 0.5 --max-draft-length 9 --no-dynamic-verification --no-search-drafting",
        "--method swift --no-early-stop",
        "--context-window 16 --draft-format int8 --no-optimise",
    ],
)
def test_option_with_an_effect_brings_no_warning(line: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert warnings_of(line, home, capsys) == []


def test_configured_value_without_effect_brings_no_warning(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWIFTOPT_SKIP_RATIO", "0.3")  # for other commands and strategies as well
    assert warnings_of("", home, capsys) == []


def test_several_options_without_effect_have_a_line_each(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = warnings_of("--skip-ratio 0.3 --stop-threshold 0.5 --no-early-stop", home, capsys)
    assert [line.split()[1] for line in said] == ["--stop-threshold", "--no-early-stop", "--skip-ratio"]


# --- a task beside lines that name theirs


def takes_task_and_stream(path: tuple[str, ...]) -> bool:
    return {"--task", "--stream"} <= {flag for param in command_at(path).params for flag in param.opts}


WITH_BOTH = [path for path in every_command() if takes_task_and_stream(path)]


def told(path: tuple[str, ...], tasks: list[str | None], capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
    """Run a command on a stream of such tasks, with --task notes; return its remarks on them."""
    lines = [{"prompt": "w1", **({} if task is None else {"task": task})} for task in tasks]
    Path("tasks.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert run([*path, "--model", "smolm2", "--stream", "tasks.jsonl", "--task", "notes", *more]) != 0
    return [line for line in capsys.readouterr().err.splitlines() if "lines name another task" in line]


@pytest.mark.parametrize("path", WITH_BOTH, ids=" ".join)
def test_task_beside_lines_that_name_others_says_what_it_does(
    path: tuple[str, ...], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (note,) = told(path, ["code", "summary", None, "notes"], capsys)
    assert note.startswith("note: 2 of 4 lines name another task (code, summary): ") and "--task notes" in note
    assert told(path, [None, "notes"], capsys) == []


def test_task_of_tune_says_how_many_lines_are_left_for_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = "note: 2 of 3 lines name another task (code, summary): they keep it, and --task notes applies to the other 1"
    assert told(("tune",), ["code", None, "summary"], capsys) == [kept]
    all_named = told(("tune",), ["a", "b", "c", "d", "a"], capsys)
    words = "they keep it, and --task notes applies to lines without a task, of which there are none"
    assert all_named == [f"note: 5 of 5 lines name another task (a, b, c, …): {words}"]


@pytest.mark.wing("papers")
def test_task_of_a_presets_tuning_is_what_its_result_is_stored_under(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "the result is stored under --task notes" in told(("tune",), ["a"], capsys, "--preset", "mtad")[0]


@pytest.mark.wing("bench", "papers")
def test_every_command_with_a_stream_and_a_task_is_among_those() -> None:
    assert {"tune", "generate", "compare", "layers search", "heads train", "probe train", "bench decode"} <= {
        " ".join(path) for path in WITH_BOTH
    }
