"""Set up swiftopt on fresh machines as docs/start.md says, and compare its speed there with this one's: `make fresh`.

    python fresh.py [--only NAME ...] [--limit 8]

A machine is a root of Debian's packages, in which buildah runs commands as a user without rights (see images.py). Each
takes one of the ways of the section "Set up", from a copy of the tracked files. Then `doctor` says what it finds, and
`bench decode` runs there and here by turns. Ends with a table, and with 1 where a machine decodes otherwise than plain
decoding, or sets up with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from images import PROGRAM, ROOT, STAND_INS, Container, Report, by_turns, done, have_base, pip_mounts, pip_settings
from walkthrough import copy_tracked

UID, HOME, SOURCES = 1000, "/home/user", "/home/user/swiftopt"
PYTHON = "python3 python3-venv ca-certificates"
BENCH = ["bench", "decode", "--model", "smollm2-135m", "--stream", "examples/stream.jsonl", "--max-new-tokens", "64"]


@dataclass(frozen=True)
class Machine:
    """`way`: the first word of the set-up. `has_home`: the user's home can be written."""

    release: str
    packages: str = PYTHON
    way: str = "python3"
    has_home: bool = True


MACHINES = {
    "debian12": Machine("bookworm"),
    "debian12-clang": Machine("bookworm", f"{PYTHON} clang"),
    "debian12-no-home": Machine("bookworm", has_home=False),
    "debian12-uv": Machine("bookworm", f"{PYTHON} python3-pip", "uv"),
    "debian12-pipx": Machine("bookworm", f"{PYTHON} pipx", "pipx"),
    "debian13": Machine("trixie"),
}


def set_up(way: str) -> str:
    """Return the commands of a way from docs/start.md."""
    text = (ROOT / "docs" / "start.md").read_text(encoding="utf-8").split("\n## ")[1]
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    [found] = [block for block in blocks if block.split()[0] == way]
    return found


def visit(name: str, machine: Machine, limit: int, report: Report) -> None:
    """Set up a machine, and measure it."""
    base = f"localhost/fresh-{name}"
    STAND_INS[base] = (machine.release, machine.packages, f"useradd --create-home --uid {UID} user", "/")
    have_base(base, report)
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        sources = folder / "swiftopt"
        copy_tracked(sources)
        for path in [sources, *sources.rglob("*")]:
            os.chown(path, UID, UID, follow_symlinks=False)
        container = Container(base, running, folder / "log")
        mounts = [f"{sources}:{SOURCES}", *pip_mounts(folder)]
        env = {"HOME": HOME if machine.has_home else "/nonexistent", "HF_HUB_OFFLINE": "1"}
        env |= {"UV_FIND_LINKS": pip_settings().get("find-links", ""), "PATH": f"{HOME}/.local/bin:/usr/bin:/bin"}
        if machine.way == "uv":
            env["UV_SYSTEM_CERTS"] = env["UV_NATIVE_TLS"] = "true"  # as pip's, where a network has its own
            install = ["python3", "-m", "pip", "install", "--break-system-packages", "uv"]
            done(*container.words(install, "root", {}, mounts))
            env["PATH"] = f"/usr/local/bin:{env['PATH']}"

        def there(command: str) -> list[str]:
            activate = f"cd {SOURCES}; [ ! -f .venv/bin/activate ] || . .venv/bin/activate; {command}"
            return container.words(["bash", "-euc", activate], f"{UID}:{UID}", env, mounts)

        began = time.monotonic()
        done(*there(set_up(machine.way)), limit_s=1800.0)
        report.add(f"{name}: set-up", f"{time.monotonic() - began:.0f} s")
        checks = json.loads(subprocess.run(there("swiftopt doctor --json"), capture_output=True, text=True).stdout)
        told = {check["name"]: check["text"] for check in checks["checks"]}
        report.add(f"{name}: kernels", told["kernels"].split(",")[0])
        if not machine.has_home:
            said = subprocess.run(there(f"swiftopt {' '.join(BENCH)} --limit 1"), capture_output=True, text=True)
            if said.returncode:
                lines = [line for line in said.stderr.splitlines() if line.startswith("error: ")]
                report.add(f"{name}: without a cache folder", " ".join(lines) or said.stderr[-300:])
                env["SWIFTOPT_CACHE_DIR"] = "/tmp/swiftopt"
        words = [*BENCH, "--limit", str(limit), "--methods", "plain,adaptive", "--json"]
        inside = there(f"SWIFTOPT_DATABASE_URL=/tmp/a.db swiftopt {' '.join(words)}")
        here = {**os.environ, "SWIFTOPT_DATABASE_URL": str(folder / "a.db")}
        by_turns(name, inside, [*PROGRAM, *words], here, report)
        report.add(f"{name}: drafted = plain", "yes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MACHINES), choices=list(MACHINES))
    parser.add_argument("--limit", type=int, default=8, help="prompts of examples/stream.jsonl")
    args = parser.parse_args()
    report = Report()
    for name in args.only:
        with report.attempt(name):
            visit(name, MACHINES[name], args.limit, report)
    report.end()


if __name__ == "__main__":
    main()
