"""Runs engines in processes that take turns: one computes while the others are stopped."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ..core.processes import die_with
from .packages import EngineFailed, Launch

END_S = 5  # Seconds after which a process that was asked to end is killed.


class Memory(NamedTuple):
    """Memory of a process in bytes: peak resident, resident now, and the part of it mapped from files."""

    peak: int = 0
    resident: int = 0
    mapped: int = 0


class Child:
    """An engine's process, which answers JSON lines; it is stopped between turns, so that it uses no CPU time.

    It leads its own process group. On Linux the kernel kills it when this process ends.

    Raises: EngineFailed: the process cannot be started, or its log cannot be written.
    """

    def __init__(self, launch: Launch, options: Mapping[str, Any], environ: Mapping[str, str], log: Path) -> None:
        self.log = log
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("w", encoding="utf-8") as errors:
                self._process = subprocess.Popen(
                    (*launch.command, json.dumps(options)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    encoding="utf-8",
                    env={**environ, **launch.environ},
                    process_group=0,
                    preexec_fn=partial(die_with, os.getpid()),
                )
        except OSError as error:
            raise EngineFailed(f"{launch.command[0]} cannot be started ({error})") from error
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the engine is loaded.

        Raises: EngineFailed: it could not load, or took too long.
        """
        self._answer(timeout_s, "to load")

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a question and return the answer; the process runs during this call only.

        Raises: EngineFailed: the process reported an error, ended, or took too long.
        """
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineFailed(self._end_reason()) from error
        return self._answer(timeout_s, "for an answer")

    def memory(self) -> Memory:
        """Return the memory of the process and its children; all 0 if the system does not report it."""
        return memory_of(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self, at_once: bool = False) -> None:
        """End the process; `at_once` kills it without waiting for it to finish an answer."""
        self._signal(signal.SIGCONT)
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(0 if at_once else END_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._reader.join()

    def _answer(self, timeout_s: float, purpose: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineFailed(f"it took more than {timeout_s:.0f} s {purpose}: see {self.log}") from None
        self._signal(signal.SIGSTOP)
        if not line:
            raise EngineFailed(self._end_reason())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{answer['error']}: see {self.log}")
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                self._lines.put(line)
        self._lines.put("")

    def _end_reason(self) -> str:
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        code = self._process.poll()
        cause = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with code {code}"
        return f"its process ended {cause}: see {self.log}"

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def refuse_other_lengths(answers: Sequence[Mapping[str, Any]], n_tokens: int) -> None:
    """Check that each answer of `at_once` has the number of tokens that its request asks for.

    Raises: EngineFailed: one has another number.
    """
    for answer in answers:
        if (n_received := len(answer["token_ids"])) != n_tokens:
            raise EngineFailed(f"it gave {n_received} tokens for a request that asks for {n_tokens}")


def memory_of(pid: int) -> Memory:
    """Return the memory of a process and its children; all 0 if the system does not report it."""
    try:
        leader = psutil.Process(pid)
        process_bytes = [_memory_of(process.pid) for process in (leader, *leader.children(recursive=True))]
    except psutil.Error:
        return Memory()
    return Memory(*(sum(values) for values in zip(*process_bytes, strict=True)))


def _memory_of(pid: int) -> Memory:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return Memory()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
    return Memory(sizes.get("VmHWM", 0), sizes.get("VmRSS", 0), sizes.get("RssFile", 0))
