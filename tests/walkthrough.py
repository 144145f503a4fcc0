"""Run what README.md and docs/start.md tell a newcomer to type, as it stands there, in their order: `make readme`.

    python tests/walkthrough.py

The commands run in a copy of the tracked files, with an empty database and without the hub. Bash runs blocks without a
language, line by line; the environment's Python runs those of Python. A line that starts a server runs on until the
next such line, or the end. Where SWIFTOPT_PORT is set, servers listen there in place of 8000. The first command that
fails ends the run, and so does the time limit.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/start.md")
SKIPPED = {"make test": ".ci/run runs it by itself"}
SERVERS = {"swiftopt serve": "swiftopt serves"}  # lines that do not end begin so; what they print when they are ready
ENVIRONMENT = (". ", "export ")  # beginnings of lines that hold for all lines after them
MOST_LINES = {"make demo": 60}  # that a person gets to read
LIMIT_S = 600.0
PORT = "8000"


@dataclass(frozen=True)
class Step:
    """A line for bash, or a program for Python, and the page that has it."""

    page: str
    language: str
    text: str

    @property
    def begins(self) -> str:
        return self.text.strip().splitlines()[0]


def steps(pages: tuple[str, ...] = PAGES, root: Path = ROOT) -> Iterator[Step]:
    """Yield what the pages tell to type."""
    for page in pages:
        text = (root / page).read_text(encoding="utf-8")
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if language == "python":
                yield Step(page, language, block)
            elif not language:
                for line in block.replace("\\\n", " ").splitlines():
                    yield Step(page, "", line.strip())


class Walk:
    """One run of the steps in a folder; `path` leads to the environment's programs."""

    def __init__(self, folder: Path, path: str, port: str, running: ExitStack) -> None:
        self._folder, self._port, self._running = folder, port, running
        self._until = time.monotonic() + LIMIT_S
        self._before: list[str] = []  # lines of ENVIRONMENT
        self._variables = {
            # Without those of a make that runs this: its own would say more.
            **{name: value for name, value in os.environ.items() if not name.startswith(("SWIFTOPT_", "MAKE"))},
            **{"PATH": path, "HF_HUB_OFFLINE": "1", "SWIFTOPT_DATABASE_URL": str(folder / "swiftopt.db")},
        }

    def take(self, step: Step) -> None:
        """Run a step.

        Raises: SystemExit: it failed, says too much, or there is no time left.
        """
        text, began = step.text.replace(f"127.0.0.1:{PORT}", f"127.0.0.1:{self._port}"), time.monotonic()
        if text in SKIPPED:
            print(f"skip  {text}: {SKIPPED[text]}", flush=True)
            return
        if text.startswith(ENVIRONMENT):
            self._before.append(text)
        server = next((begin for begin in SERVERS if text.startswith(begin)), None)
        if server is not None:
            at_port = "" if self._port == PORT else f" --port {self._port}"
            self._running.close()
            self._running.enter_context(self._served(text + at_port, SERVERS[server]))
        else:
            self._done(step, text)
        print(f"ok    {time.monotonic() - began:5.1f} s  {step.page}: {step.begins}", flush=True)

    def _done(self, step: Step, text: str) -> None:
        """Run a command to its end."""
        command = [str(shutil.which("python", path=self._variables["PATH"])), "-c", text]
        if not step.language:
            command = ["bash", "-euo", "pipefail", "-c", "\n".join([*self._before, text])]
        left_s = max(1.0, self._until - time.monotonic())
        try:
            done = subprocess.run(
                command,
                cwd=self._folder,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=left_s,
            )
        except subprocess.TimeoutExpired as late:
            said = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout
            sys.exit(f"{said or ''}\n{step.page}: not done {LIMIT_S:.0f} s after the beginning: {step.begins}")
        n_lines = len(done.stdout.splitlines())
        if done.returncode or n_lines > MOST_LINES.get(text, sys.maxsize):
            reason = f"exit code {done.returncode}" if done.returncode else f"{n_lines} lines"
            sys.exit(f"{done.stdout}\n{step.page}: {reason}: {step.begins}")

    @contextmanager
    def _served(self, line: str, ready: str) -> Iterator[None]:
        """Run a server until the end of the walk; it is ready when its log has a line that begins with `ready`."""
        log = self._folder / "server.log"
        command = "\n".join([*self._before, f"exec {line}"])
        with log.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-euc", command], cwd=self._folder, env=self._variables, stdout=file, stderr=file
            )
        try:
            while not re.search(f"^{ready}", log.read_text(encoding="utf-8"), re.MULTILINE):
                if process.poll() is not None or time.monotonic() > self._until:
                    sys.exit(f"{log.read_text(encoding='utf-8')}\nthe server does not come up: {line}")
                time.sleep(0.1)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def copy_tracked(folder: Path) -> None:
    """Copy the tracked files into a folder, which is made."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def main() -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name) / "swiftopt"
        copy_tracked(folder)
        (folder / ".venv").symlink_to(sys.prefix)  # the environment that runs this, whose set-up is done
        path = os.pathsep.join([str(folder / ".venv" / "bin"), os.environ["PATH"]])
        walk = Walk(folder, path, os.environ.get("SWIFTOPT_PORT", PORT), running)
        for step in steps():
            walk.take(step)


if __name__ == "__main__":
    main()
