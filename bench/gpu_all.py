"""Runs all measurements of a machine with a GPU, the most valuable first.

    python -m swiftopt.bench.gpu_all [--out FOLDER] [--device cuda]

The steps are the `gpu` tests, `bench.gpu` by speed and shape, and other engines that are installed. Each step is a
process, which gets SIGINT at its time limit. All steps together take less than 9 minutes; the last one gets the rest of
this time. The output of a step is shown; its last line, if it is JSON, and the outcomes of all steps are written to
FOLDER, by default gpu-results. `--device cpu` tries the script with tiny shapes.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from os import cpu_count
from pathlib import Path
from threading import Timer
from time import perf_counter

from .tables import ROOT
from .turn import measured, started

SCHEMA = "swiftopt.gpu-steps/1"
TOTAL_S = 530.0  # Time limit of all steps together.
LEAST_S = 20.0  # A step is skipped if less than this time is left.
GRACE_S = 10.0  # Time from SIGINT until a step is killed.


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A Python command with a time limit in seconds."""

    name: str
    words: tuple[str, ...]
    limit_s: float


def steps(device: str) -> list[DeviceStep]:
    on_gpu = device.startswith("cuda")
    tests = [str(ROOT / "tests" / "system" / f"test_{name}.py") for name in ("gpu", "bench_gpu", "speed", "edges")]

    def bench(shape: str, speed: str) -> tuple[str, ...]:
        return ("-m", "swiftopt.bench.gpu", "--shape", shape, "--speed", speed, "--device", device, "--tokens", "64")

    # GPU images have pytest-benchmark, which warns beside xdist, and warnings are errors here.
    pytest_options = ("-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-n", str(min(6, cpu_count() or 1)))
    test_command = ("-m", "pytest", *pytest_options)
    plan = [
        DeviceStep("machine", ("-m", "torch.utils.collect_env"), 20),
        DeviceStep("tests", (*test_command, "-m", "gpu", *tests), 60),
        DeviceStep("kernels", (*test_command, str(ROOT / "tests" / "unit" / "test_row_invariant.py")), 60),
    ]
    if on_gpu:
        plan += [
            DeviceStep("13b-graphs", bench("codellama-13b", "graphs"), 110),
            DeviceStep("13b-exact", bench("codellama-13b", "exact"), 100),
            DeviceStep("70b-layers", bench("llama-70b-8-layers", "graphs"), 60),
        ]
    else:
        plan.append(DeviceStep("tiny-eager", bench("tiny", "eager"), 120))
    size = ("--shape", "llama-1b") if on_gpu else ("--shape", "tiny", "--tokens", "16")
    return [*plan, DeviceStep("peers", ("-m", "swiftopt.bench.gpu_peers", *size, "--device", device), 180)]


def run(step: DeviceStep, folder: Path, left_s: float) -> dict[str, object]:
    """Run a step for at most `left_s` seconds, show its output, save its JSON report, and return the outcome."""
    if left_s < LEAST_S:
        print(f"== {step.name}: no time is left for it", flush=True)
        return {"step": step.name, "exit": None, "seconds": 0.0}
    print(f"== {step.name}: python {' '.join(step.words)}", flush=True)
    started_s, last_line = perf_counter(), ""
    with started([sys.executable, *step.words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        limit_s = min(step.limit_s, left_s)
        timers = [Timer(limit_s, process.send_signal, (signal.SIGINT,)), Timer(limit_s + GRACE_S, process.kill)]
        for timer in timers:
            timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last_line = line
        process.wait()
        for timer in timers:
            timer.cancel()
    if last_line.startswith("{"):
        (folder / f"{step.name}.json").write_text(json.dumps(json.loads(last_line), indent=1) + "\n", encoding="utf-8")
    return {"step": step.name, "exit": process.returncode, "seconds": round(perf_counter() - started_s, 1)}


def main(args: Sequence[str] | None = None) -> int:
    """Run every step and name those that failed; return 1 if any did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(args)
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[dict[str, object]] = []
    started_s = perf_counter()
    for step in steps(options.device):
        outcomes.append(run(step, options.out, TOTAL_S - (perf_counter() - started_s)))
        report = {"schema": SCHEMA, "device": options.device, "steps": outcomes}
        (options.out / "steps.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    failed_names = [str(outcome["step"]) for outcome in outcomes if outcome["exit"]]
    n_ran = sum(outcome["exit"] == 0 for outcome in outcomes)
    print(f"{n_ran} of {len(outcomes)} steps ran" + (f"; failed: {', '.join(failed_names)}" if failed_names else ""))
    return 1 if failed_names else 0


if __name__ == "__main__":
    measured(main)
