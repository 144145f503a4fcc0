"""Benchmarks of a server: `swiftopt bench serve`, and starts that other programs disturb."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import psutil
import pytest
from tiny_files import save

from swiftopt.bench.disturbed_start import N_WARM, start
from swiftopt.core.types import Prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.slow
def test_stay_keeps_the_dashboard_until_ctrl_c(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text("\n".join(json.dumps({"prompt": f"w{n} w3"}) for n in range(4)))
    command = [sys.executable, "-m", "swiftopt", "bench", "serve", "--model", str(folder), "--max-new-tokens", "8"]
    command += ["--stream", str(tmp_path / "s.jsonl"), "--task", "shown", "--db", str(tmp_path / "a.db"), "--stay"]
    command += ["--svg", str(tmp_path / "speed.svg")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "dashboard" in line)
        page = httpx2.get(line.split()[2])
        assert page.status_code == 200 and "shown" in page.text
        assert "4 requests of 8 tokens" in (tmp_path / "speed.svg").read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    refused = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert refused.returncode == 2 and "exclude each other: use one" in refused.stderr


@pytest.mark.slow
def test_disturbed_start_serves_all_prompts_and_ends_the_disturbing_programs(folder: Path) -> None:
    prompts = [Prompt(f"p{n}", "shown", text=f"w{n} w3") for n in range(N_WARM + 2)]
    run = start(str(folder), prompts, 8, is_disturbed=True)
    assert run["disturbed"] and run["equal"] == 2 and run["ratio"] > 0 and all(seconds > 0 for seconds in run["pass_s"])
    assert not any("copyto" in command_of(child) for child in psutil.Process().children())


def command_of(process: psutil.Process) -> str:
    """Return a process's command; nothing if it has ended, even if it was not waited for yet."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # Of which a zombie is a kind.
        return ""
