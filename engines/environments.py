"""An environment for each package of `bench peers`, made once in the user's cache from its published packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..models.saved import OnStep, cache_root, no_step
from .packages import EnginePackage

PROGRAMS = Path(__file__).parent / "programs"
INSTALL_S = 1800  # an installation that takes longer is given up
READY = ".ready"  # written when an environment is complete


class EngineFailed(Exception):
    """Why a package has no numbers, in a sentence; a row of the table, never an error of the command."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a package's program starts: the words before its options, and what its environment has more."""

    command: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None


def prepared(package: EnginePackage, on_step: OnStep = no_step) -> Launch:
    """The package's environment, made where it is not there yet.

    Raises: EngineFailed: it cannot be installed.
    """
    program = str(PROGRAMS / package.program)
    if package.tool == "own":
        return Launch((sys.executable, "-P", str(PROGRAMS / "answer.py"), program), dict(package.environ))
    folder = cache_root() / "peers" / f"{package.package}-{package.version}"
    tools = {name: shutil.which(name) for name in (("npm", "node") if package.tool == "npm" else ())}
    missing = [name for name, path in tools.items() if path is None]
    if missing:
        raise EngineFailed(
            f"{package.title} needs {' and '.join(missing)}, not found here: install Node.js 20 or newer"
        )
    if not (folder / READY).is_file():
        on_step(f"installing {package.title} in {folder}, only once")
        _make(package, folder)
    if package.tool == "npm":
        return Launch((str(tools["node"]), program), dict(package.environ), folder)
    environ = dict(package.environ)
    libraries = [str(folder / name) for name in package.preload if (folder / name).is_file()]
    if libraries:
        environ["LD_PRELOAD"] = " ".join(libraries)
    return Launch((str(folder / "bin" / "python"), "-I", str(PROGRAMS / "answer.py"), program), environ, folder)


def _make(package: EnginePackage, folder: Path) -> None:
    """A complete environment, or none."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if package.tool == "pip":
            _run(package, (sys.executable, "-m", "venv", str(folder)))
        for step in package.steps:
            pip = (str(folder / "bin" / "python"), "-m", "pip", *step)
            _run(package, pip if package.tool == "pip" else ("npm", "--prefix", str(folder), *step))
        (folder / READY).touch()
    except OSError as error:
        raise EngineFailed(f"{package.title} cannot be installed in {folder} ({error.strerror})") from error
    finally:
        if not (folder / READY).is_file():
            shutil.rmtree(folder, ignore_errors=True)


def _run(package: EnginePackage, command: Sequence[str]) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise EngineFailed(f"{package.title} was not installed within {INSTALL_S // 60} minutes") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
        reason = (lines or ["no reason given"])[-1].removeprefix("ERROR: ").removeprefix("npm error ")
        raise EngineFailed(f"{package.title} cannot be installed: {reason}")
