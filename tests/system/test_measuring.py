"""Measurements take turns, detect disturbances, and are repeated after them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import psutil
import pytest
import torch
from families import tiny_runtime

from swiftopt.bench import turn
from swiftopt.bench.commands import bench
from swiftopt.core import settings
from swiftopt.core.errors import Busy, SettingsError
from swiftopt.core.settings import OMP_THREADS, THREADS, measures_alone
from swiftopt.models import costs
from swiftopt.models.costs import _doubts_of_machine, _doubts_of_passes, measure_costs
from swiftopt.models.kernels import build, measure
from swiftopt.models.measuring import Disturbance, DisturbanceMeter, measuring_turn
from swiftopt.store import Store
from swiftopt.tasks.recipes import stored_costs
from swiftopt.terminal.program import run

CPU = torch.device("cpu")
HOLDER = """
import sys, torch
from swiftopt.models.measuring import measuring_turn
with measuring_turn(torch.device("cpu")):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measure as outside of a test suite, with locks in the test's folder."""
    monkeypatch.setenv("SWIFTOPT_MEASURING", "alone")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """Start another process that holds the turn until it is sent a line."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.communicate("\n")


def test_one_process_measures_at_a_time(holder: subprocess.Popen[str]) -> None:
    steps: list[str] = []
    entered = threading.Event()

    def measure() -> None:
        with measuring_turn(CPU, steps.append):
            entered.set()

    thread = threading.Thread(target=measure)
    thread.start()
    assert not entered.wait(0.5)
    [step] = steps
    assert step.startswith(f"waiting for process {holder.pid} (") and step.endswith("), which measures on this device")
    assert holder.stdin is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert entered.wait(30)
    thread.join()


@pytest.mark.usefixtures("holder")
def test_wait_for_another_measurement_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    with measuring_turn(CPU, wait_s=0.2):
        assert "measuring=beside-another" in caplog.text


def test_measurement_alone_fails_with_the_name_of_the_other_process(holder: subprocess.Popen[str]) -> None:
    with pytest.raises(Busy, match=f"process {holder.pid} .* after 0 s"), measuring_turn(CPU, wait_s=0.2, alone=True):
        pass


def test_turn_of_a_killed_process_is_free(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    with measuring_turn(CPU, wait_s=10.0, alone=True):
        pass


def test_children_of_a_benchmark_share_its_turn_and_end_with_it(tmp_path: Path) -> None:
    inner = "import time; time.sleep(600)"
    outer = f"""
import sys, torch
from swiftopt.bench.turn import measured, started
from swiftopt.models.measuring import measuring_turn
def main():
    held = [sys.executable, "-c", {HOLDER!r}]
    done = started(held, stdin=-3)
    assert done.wait(60) == 0
    print(started([sys.executable, "-c", {inner!r}]).pid, flush=True)
    sys.stdin.readline()
measured(main)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", outer], stdin=pipe, stdout=pipe, text=True) as benchmark:
        assert benchmark.stdout is not None and benchmark.stdout.readline() == "held\n"
        child = psutil.Process(int(benchmark.stdout.readline()))
        with pytest.raises(Busy, match=f"process {benchmark.pid} "), measuring_turn(CPU, wait_s=0.0, alone=True):
            pass
        benchmark.kill()
        psutil.wait_procs([child], timeout=10)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        with measuring_turn(CPU, wait_s=10.0, alone=True):
            pass


def test_every_command_of_bench_but_not_its_help_waits_for_its_turn(
    holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The turn comes before the error that the model does not exist."""
    stream = tmp_path / "prompts.jsonl"
    stream.write_text('{"prompt": "a"}\n', encoding="utf-8")
    monkeypatch.setattr(turn, "WAIT_S", 0.0)
    names = bench.list_commands(click.Context(bench))
    assert {"decode", "throughput", "serve", "tune", "agents"} <= set(names)
    for name in names:
        assert run(bench, [name, "--help"], "bench") == 0
        stream_options = [] if name == "agents" else ["--stream", str(stream)]
        assert run(bench, [name, "--model", "absent", *stream_options], "bench") == Busy.exit_code
        assert f"process {holder.pid} " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("variables", "n_cores", "remark"),
    [
        ({}, 4, ""),
        ({}, 300, ""),  # of which 255 are used, by no variable
        ({OMP_THREADS: "4"}, 4, ""),
        ({OMP_THREADS: "1"}, 4, "measured on 1 of 4 cores, because OMP_NUM_THREADS is 1"),
        ({OMP_THREADS: "1", THREADS: "4"}, 4, ""),
        ({OMP_THREADS: "4", THREADS: "2"}, 4, "measured on 2 of 4 cores, because SWIFTOPT_THREADS is 2"),
    ],
)
def test_benchmark_says_which_variable_leaves_cores_idle(
    variables: dict[str, str],
    n_cores: int,
    remark: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in (OMP_THREADS, THREADS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for module in (turn, settings):
        monkeypatch.setattr(module, "usable_cores", lambda: n_cores)
    with turn.turn():
        pass
    assert capsys.readouterr().err.strip() == remark


def test_process_may_enter_its_turn_again() -> None:
    with measuring_turn(CPU), measuring_turn(CPU, wait_s=0.0):
        pass
    with measuring_turn(CPU, wait_s=0.0):
        pass


@pytest.mark.usefixtures("holder")
def test_processes_of_a_test_suite_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTOPT_MEASURING", "together")
    steps: list[str] = []
    with measuring_turn(CPU, steps.append):
        assert not steps
    monkeypatch.setenv("SWIFTOPT_MEASURING", "maybe")
    with pytest.raises(SettingsError, match="SWIFTOPT_MEASURING is 'maybe': use alone or together"):
        measures_alone()


def test_meter_separates_own_work_from_that_of_others() -> None:
    cores = len(os.sched_getaffinity(0))
    meter, until = DisturbanceMeter(), time.monotonic() + 1.0
    hog = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    busy = [subprocess.Popen([sys.executable, "-c", hog]) for _ in range(cores)]
    try:
        while time.monotonic() < until:
            pass
        beside = meter.read()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert beside.others > 0.2 and beside.own > 0.05 and beside.others + beside.own <= 1.0


def test_shares_of_processor_time_add_up_to_at_most_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 s on two cores, 1.0 s were stolen and 1.8 s busy, of which 1.2 s in this process."""
    readings = iter([(0.0, 0.0, 0.0, 0.0), (1.0, 1.8, 1.0, 1.2)])
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(DisturbanceMeter, "_read", lambda meter: next(readings))
    found = DisturbanceMeter().read()
    assert found.share + found.own == pytest.approx(1.0) and found.own == pytest.approx(1.2 / 2.8)


def test_remark_on_load_has_two_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DisturbanceMeter, "read", lambda meter: Disturbance(0.3, 0.1, 0.5))
    monkeypatch.setattr(costs, "_doubts_of_passes", lambda *_: iter(()))
    for limit in ("BUDGET_S", "AGAIN_S", "SHORTEST_S"):
        monkeypatch.setattr(costs, limit, 0.0)
    monkeypatch.setattr(costs, "MOST_SPREAD", 1e9)
    remark = measure_costs(tiny_runtime("llama"), 256).remark
    assert remark == "other programs had 40% of the processors' time, and swiftopt 50%"


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        ({}, None),
        ({"rows": {1: 10.0, 2: 9.6, 4: 12.0}}, None),  # as near as passes that cost the same come
        ({"rows": {1: 10.0, 2: 9.0, 4: 12.0}}, "a pass over 2 rows seemed faster than one over 1"),
        ({"rows": {1: 10.0, 2: 15.0, 4: 12.0}}, "a pass over 4 rows seemed faster than one over 2"),
        ({"rest": -0.9}, None),
        ({"rest": -6.0}, "the parts of a pass took 1.60 times the whole"),
        ({"unseen": 6.5}, None),
        ({"unseen": 8.0}, "a pass that the fit has not seen took 1.33 times its prediction"),
        ({"unseen": 5.0}, "a pass that the fit has not seen took 0.83 times its prediction"),
        ({"unseen": None}, None),
    ],
)
def test_implausible_seconds_cause_a_doubt(change: dict[str, object], doubt: str | None) -> None:
    raw = {"rows": {1: 10.0, 2: 10.5, 4: 12.0}, "rest": 0.5, "predicted": 6.0, "unseen": 6.0}
    assert list(_doubts_of_passes(**{**raw, **change})) == ([] if doubt is None else [doubt])  # type: ignore[arg-type]


def test_scattered_base_passes_cause_a_doubt() -> None:
    meter = DisturbanceMeter()
    assert "the same pass took from 10.0 to 20.0 ms (quartiles)" in [*_doubts_of_machine(meter, [0.01, 0.02] * 8)]
    assert not any("quartiles" in doubt for doubt in _doubts_of_machine(meter, [0.010, 0.012] * 8))


def test_disturbed_measurement_is_repeated_and_otherwise_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def doubts(meter: DisturbanceMeter, bases: object) -> Iterator[str]:
        calls.append(1)
        if len(calls) <= n_disturbed:
            yield "other programs had 40% of the processors' time, and swiftopt 60%"

    monkeypatch.setattr(costs, "_doubts_of_machine", doubts)
    monkeypatch.setattr(costs, "_doubts_of_passes", lambda *_: iter(()))
    monkeypatch.setattr(costs, "BUDGET_S", 0.0)
    runtime, n_disturbed = tiny_runtime("llama"), 1
    quiet = measure_costs(runtime, 256)
    assert (quiet.quality, quiet.remark, len(calls)) == ("quiet", "", 2)
    monkeypatch.setattr(costs, "AGAIN_S", 0.0)
    calls.clear()
    disturbed = measure_costs(runtime, 256)
    assert disturbed.quality == "disturbed" and disturbed.remark.startswith("other programs had 40%")


def test_costs_are_disturbed_if_only_their_widest_passes_were(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "other programs had 40% of the processors' time, and swiftopt 60%"
    monkeypatch.setattr(costs, "_doubts_of_machine", lambda meter, bases: iter([] if bases else [words]))
    monkeypatch.setattr(costs, "_doubts_of_passes", lambda *_: iter(()))
    monkeypatch.setattr(costs, "BUDGET_S", 0.0)
    runtime = tiny_runtime("llama")
    assert measure_costs(runtime, 256).quality == "quiet"  # These passes are too short to tell.
    monkeypatch.setattr(costs, "SHORTEST_S", 0.0)
    profile = measure_costs(runtime, 256)
    assert (profile.quality, profile.remark) == ("disturbed", words)


def test_disturbed_speeds_of_kernels_replace_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, shares = tmp_path / "speeds.json", [0.4, 0.05, 0.4]
    monkeypatch.setattr(build, "SHAPES", ((64, 32),))
    monkeypatch.setattr(build, "speeds_file", lambda: file)
    monkeypatch.setattr(measure, "SHAPES", ((64, 32),))
    monkeypatch.setattr(measure, "WEIGHT_BYTES", 0)
    monkeypatch.setattr(measure, "speeds_file", lambda: file)
    monkeypatch.setattr(DisturbanceMeter, "read", lambda meter: Disturbance(shares[0], 0.0, 0.5))
    kept = []
    while shares:
        measure.measured()
        kept.append(file.read_bytes())
        shares.pop(0)
    first, second, third = kept
    assert first != second == third  # The first is better than none.


def test_stored_costs_that_were_disturbed_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTOPT_MEASURING", "together")
    monkeypatch.setattr(costs, "BUDGET_S", 0.0)
    runtime = tiny_runtime("llama")
    with Store.open("sqlite://") as store:
        first = stored_costs(runtime, store, 32)
        assert first.quality == "quiet" and stored_costs(runtime, store, 32) == first
        store.save_cost_profile(replace(first, software="torch 0", quality="disturbed"))
        store.save_cost_profile(replace(first, quality="disturbed"))
        again = stored_costs(runtime, store, 32)
        assert again.quality == "quiet" and again != first
        assert stored_costs(runtime, store, 32) == again
