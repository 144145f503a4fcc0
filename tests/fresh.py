"""Set up swiftopt on fresh machines as docs/start.md says, and compare its speed there with this one's: `make fresh`.

    python fresh.py [--only NAME ...] [--limit 8]

A machine is a root of Debian's packages, in which buildah runs commands as a user without rights (see images.py). Each
takes one of the ways of the section "Set up", from a copy of the tracked files. Then `doctor` says what it finds, and
`bench decode` runs there and here by turns. Ends with a table, and with 1 where a machine decodes otherwise than plain
decoding, or sets up with an error.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from images import ROOT, STAND_INS, Container, Failed, Report, done, have_base, pip_settings

USER, HOME, SOURCES = "1000:1000", "/home/user", "/home/user/swiftopt"
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


def copy_sources(folder: Path) -> None:
    """Copy what is committed, for a user of the machine."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, 1000, 1000, follow_symlinks=False)


def decoded(words: list[str], here: bool = False) -> dict[str, float]:
    """Return the tokens per second of each method, and how many outputs drafts have left equal."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "SWIFTOPT_DATABASE_URL": f"{folder}/a.db"} if here else None
        said = json.loads(done(*words, cwd=ROOT if here else None, env=env))
    rows = {row["method"]: row for row in said["results"]}
    equal = rows["adaptive"]["identical"] == rows["adaptive"]["of"]
    return {**{name: row["tok_s"] for name, row in rows.items()}, "equal": float(equal)}


def visit(name: str, machine: Machine, limit: int, report: Report) -> None:
    """Set up a machine, and measure it."""
    base = f"localhost/fresh-{name}"
    STAND_INS[base] = (machine.release, machine.packages, "useradd --create-home --uid 1000 user", "/")
    have_base(base, report)
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        sources = folder / "swiftopt"
        sources.mkdir()
        copy_sources(sources)
        container = Container(base, running, folder / "log")
        pip = pip_settings(folder / "pip")
        mounts = [f"{sources}:{SOURCES}", *pip[1::2]]
        home = HOME if machine.has_home else "/nonexistent"
        links = " ".join(word for mount in pip[1::2] if (word := mount.split(":")[1]) and "wheels" in word)
        env = {"HOME": home, "HF_HUB_OFFLINE": "1", "UV_FIND_LINKS": links, "PATH": f"{HOME}/.local/bin:/usr/bin:/bin"}
        if machine.way == "uv":
            env["UV_SYSTEM_CERTS"] = env["UV_NATIVE_TLS"] = "true"  # as pip's, where a network has its own
            done(
                *container.words(
                    ["python3", "-m", "pip", "install", "--break-system-packages", "uv"], "root", {}, mounts
                )
            )
            env["PATH"] = f"/usr/local/bin:{env['PATH']}"

        def there(command: str) -> list[str]:
            activate = f"cd {SOURCES}; [ ! -f .venv/bin/activate ] || . .venv/bin/activate; {command}"
            return container.words(["bash", "-euc", activate], USER, env, mounts)

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
        program = str(Path(sys.executable).with_name("swiftopt"))
        asked = there(f"SWIFTOPT_DATABASE_URL=/tmp/a.db swiftopt {' '.join(words)}")
        turns = [
            decoded([program, *words], here=True) if here else decoded(asked) for here in (True, False, False, True)
        ]
        for method in ("plain", "adaptive"):
            inside, outside = (turns[1][method] + turns[2][method]) / 2, (turns[0][method] + turns[3][method]) / 2
            report.add(f"{name}: {method}, tok/s ÷ here", f"{inside / outside:.2f} ({inside:.1f} ÷ {outside:.1f})")
        report.add(f"{name}: drafted = plain", "yes" if turns[1]["equal"] and turns[2]["equal"] else "NO")
        if not turns[1]["equal"]:
            raise Failed(f"{name}: drafts change outputs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MACHINES), choices=list(MACHINES))
    parser.add_argument("--limit", type=int, default=8, help="prompts of examples/stream.jsonl")
    args = parser.parse_args()
    report, failed = Report(), False
    for name in args.only:
        try:
            visit(name, MACHINES[name], args.limit, report)
        except (Failed, subprocess.TimeoutExpired) as error:
            failed = True
            print(f"error: {name}: {error}", file=sys.stderr)
            report.add(name, "FAILED")
    print()
    for what, value in report.rows:
        print(f"{what:48} {value}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
