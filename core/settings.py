"""What can be set: SWIFT's settings, each default once (SWIFT appendix B.2), presets, weight formats, threads."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, get_args

from .errors import LayerSetError, SettingsError, look_up
from .serialization import LARGEST, Settings, count, ranged, share
from .wings import load, wings

# weight formats that parts of a draft can have beside the model's own
Format = Literal["int8", "fp8", "int4", "int4-64", "int4-32"]
FORMATS: tuple[str, ...] = get_args(Format)
FP8_ON_CPU = "our kernels for a CPU do not read fp8: draft in int8 or int4"
GROUP = 128  # weights that share a scale in "int4"; "int4-64" and "int4-32" name their own
# Other engines, as `export --to`, `tune --engine` and look-ups name them.
EngineName = Literal["transformers", "llamacpp", "vllm", "openvino", "sglang", "tensorrt-llm"]
ENGINES: tuple[str, ...] = get_args(EngineName)
EXPORT_SCHEMA, EXPORT_SUMMARY = (
    "swiftopt.export/1",
    "export.json",
)  # The schema and the name of the summary that `export` writes.
AUTO = "auto"  # Chosen by measured time and agreement with the model.
STORED: Final = "stored"  # the model's own weights, where a wider entry of `LayerSet.formats` says otherwise

_PART = re.compile(r"(attn|mlp)(:\d+)?|head")

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"  # Log lines of long-running processes.
THREADS = "SWIFTOPT_THREADS"  # environment: overrules what is found
MEASURING = "SWIFTOPT_MEASURING"  # environment: "together" trusts measurements that are made at the same time
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # The container's quota: "max 100000", or microseconds per period.

Branching = tuple[tuple[float, int], ...]

# Confidence up to and including the bound -> candidates offered there (SWIFT 4.2).
PAPER_BRANCHING: Branching = ((0.5, 10), (0.8, 5), (0.95, 3), (1.0, 1))
MOST_CANDIDATES = 1_000_000  # The most candidates of a draft position.
LARGE_MODEL_PARAMETERS = 30_000_000_000  # Larger models, the paper's 34B and 70B, start at r = 0.5.


@dataclass(frozen=True, slots=True)
class SwiftSettings(Settings):
    """All settings of SWIFT; the defaults are those of appendix B.2.

    The three switches of the paper's ablation (Table 8) are `early_stop`, `dynamic_verification` and `optimise`.

    Raises: SettingsError: a value is out of its range.
    """

    # what the layer set drafts for: SWIFT's own trees, or adaptive drafts with quantised copies (docs/methods.md)
    method: Literal["swift", "adaptive"] = "swift"
    draft_format: str = STORED  # of the sub-layers that a draft keeps, and of its head: one of FORMATS, or "auto"
    # drafting and verification (4.2)
    stop_threshold: float = share(0.8)  # ε; B.2 gives none, this is the published code's
    max_draft_length: int = count(25)  # N_D, draft steps per round
    branching: Branching = PAPER_BRANCHING
    drawn_branching: Branching | None = None  # of drafts that are drawn (`sampled`); None: `branching`
    early_stop: bool = True
    dynamic_verification: bool = True
    sampled: bool = False  # at temperatures above 0: drafts are drawn and weighed; else the most probable tokens
    search_drafting: bool = False  # threshold, length and branching are chosen by measured time when the search ends
    # layer-set optimisation (4.1)
    optimise: bool = True
    strategy: str = "swift"
    objective: Literal["expected_speedup", "matchness"] = "expected_speedup"
    exportable: bool = False  # only sets that alternate attention and MLP, which other engines load as a checkpoint
    skip_ratio: float | None = share(None)  # r; None: 0.45, 0.5 from 34B on
    context_window: int = count(32)  # γ, tokens
    window_at: Literal["latest", "first"] = "latest"  # of a text's generated tokens; first: SWIFT's published code
    optimise_interval: int = count(1)  # rounds from one pass of candidates to the next
    candidates: int | None = count(None)  # per pass; None: as many as measured costs make cheap
    adoption: Literal["finals", "highest"] = "finals"  # by several windows, or the highest score so far (4.1)
    max_steps: int = count(1000, least=0)  # S, candidates
    bayes_interval: int = count(25)  # β, candidates
    patience: int = count(300)  # candidates without a better one that end the search
    target_matchness: float = share(0.95)  # above it the search ends
    # lowering of r (C.2)
    min_acceptance: float = share(0.7)
    min_acceptance_rounds: int = count(50)  # rounds that α must stay below it
    skip_ratio_step: float = ranged(0.05, gt=0, le=1)
    # reproducibility
    seed: int = ranged(0, ge=-LARGEST, le=LARGEST)
    deterministic: bool = False  # wait for a late suggestion instead of drawing at random

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        formats = (*FORMATS, STORED, AUTO)
        if self.draft_format not in formats:
            raise SettingsError(f"draft_format {self.draft_format} is out of range: use {', '.join(formats)}")
        for branching in filter(None, (self.branching, self.drawn_branching)):
            bounds = [bound for bound, _ in branching]
            rising = bounds == sorted(set(bounds)) and bounds[-1:] == [1.0]
            if not rising or not all(1 <= k <= MOST_CANDIDATES for _, k in branching):
                rule = "rising (confidence, candidates) pairs that end at confidence 1"
                raise SettingsError(f"branching {branching} is out of range: use {rule}")

    def candidates_at(self, confidence: float) -> int:
        """k: how many top candidates a draft position of that confidence offers (SWIFT 4.2)."""
        return candidates_at(self.branching, confidence) if self.dynamic_verification else 1

    def stops_after(self, confidence: float, n_drafted: int) -> bool:
        """Whether drafting ends with the token just drafted, which stays in the tree."""
        return n_drafted >= self.max_draft_length or (self.early_stop and confidence < self.stop_threshold)

    def start_skip_ratio(self, n_parameters: int) -> float:
        """r to start with for a model of that size."""
        if self.skip_ratio is not None:
            return self.skip_ratio
        return 0.5 if n_parameters >= LARGE_MODEL_PARAMETERS else 0.45


@dataclass(frozen=True, slots=True)
class TuningSettings(SwiftSettings):
    """SWIFT's settings, whose defaults are what decodes fastest here (bench/RESULTS.md) instead of the paper's."""

    method: Literal["swift", "adaptive"] = "adaptive"
    draft_format: str = AUTO
    search_drafting: bool = True
    strategy: str = "knapsack"


def candidates_at(branching: Branching, confidence: float) -> int:
    """k: how many top candidates a draft position of that confidence offers (SWIFT 4.2)."""
    return next((k for bound, k in branching if confidence <= bound), branching[-1][1])


# --- papers' methods with each of their numbers and nothing of ours mixed in: `--preset`


@dataclass(frozen=True, slots=True)
class Preset:
    """How a paper decodes: by `method`, with `settings` in place of its defaults; `source` is their place in papers.

    `making` are settings by which what the method needs is made: of `TuningSettings` where that is searched while
    decoding (`is_tuned`), else of the maker of that part. `sampling`: how the paper warps the model's distribution, for
    its method and for all that are compared with it.
    """

    method: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    making: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_tuned(self) -> bool:
        """Whether its layer set is searched while a stream is decoded."""
        return self.method == "swift"

    @property
    def tuning(self) -> dict[str, Any]:
        """Every value of `TuningSettings` by name, of a preset that `is_tuned`."""
        return {**asdict(SwiftSettings()), **self.settings, **self.making}


# What SWIFT leaves to its published code: which window is scored, one candidate a round, the highest score is used, and
# how the Gaussian process proposes.
_SEARCH = {
    "strategy": "published",
    "objective": "matchness",
    "adoption": "highest",
    "window_at": "first",
    "candidates": 1,
    "deterministic": True,
    "skip_ratio_step": 0.1,  # from 0.5 to 0.4, C.2; after how many rounds, neither says
}
PRESETS: Mapping[str, Preset] = {
    "swift": Preset("swift", "SWIFT 4, B.2, C.2", {"sampled": True}, _SEARCH),
    "swift-code": Preset(
        "swift",
        "SWIFT's published code",
        {
            "sampled": True,
            "branching": ((0.5, 10), (0.8, 8), (0.95, 5), (1.0, 3)),
            "drawn_branching": PAPER_BRANCHING,
        },
        _SEARCH,
    ),
}


@cache
def presets() -> Mapping[str, Preset]:
    """Return all presets by name, those of wings last."""
    of_wings = (load(wing.presets) for wing in wings() if wing.presets)
    return {**PRESETS, **{name: preset for each in of_wings for name, preset in each.items()}}


def preset_of(name: str) -> Preset:
    """Find a preset, as `look_up`."""
    return look_up("preset", name, presets())


# --- formats of weights, and threads


def group_size(name: str, width: int) -> int | None:
    """Weights of a row of `width` that share a scale; None where the whole row does (int8, fp8).

    A width that the format's group does not divide takes the next smaller group that does; one that 32 does not divide
    is int8.
    """
    if name in ("int8", "fp8"):
        return None
    size = int(name.partition("-")[2] or GROUP)
    return next((group for group in (128, 64, 32) if group <= size and width % group == 0), None)


def check_formats(formats: tuple[tuple[str, str], ...], n_layers: int) -> None:
    """Raises: LayerSetError: a part or a format is not known."""
    for part, name in formats:
        if not _PART.fullmatch(part) or int(part.partition(":")[2] or 0) >= n_layers:
            raise LayerSetError(
                f"there is no {part!r} to quantise in {n_layers} layers: use attn, mlp, attn:3, mlp:3 or head"
            )
        if name not in (*FORMATS, STORED):
            raise LayerSetError(f"{part} cannot be {name!r}: known formats are {', '.join(FORMATS)} and {STORED}")


def cpu_words(key: str) -> str:
    """Return what Linux says of the processor under a key, such as "model name"; empty where it cannot be read."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")
    except OSError:
        return ""


def usable_cores() -> int:
    """Processors that this process may use, a container's quota counted in."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return max(1, min(affinity, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no such file, or no quota
        return affinity


def n_threads() -> int:
    """SWIFTOPT_THREADS, else OMP_NUM_THREADS, else one per usable core.

    Raises: SettingsError: SWIFTOPT_THREADS is no number from 1 to 255.
    """
    given = os.environ.get(THREADS)
    if given is None:
        usual = os.environ.get("OMP_NUM_THREADS", "")
        return min(int(usual) if usual.isdecimal() and int(usual) > 0 else usable_cores(), 255)
    if not given.isdecimal() or not 1 <= int(given) <= 255:
        raise SettingsError(f"{THREADS} is {given!r}: give a number of threads from 1 to 255")
    return int(given)


def measures_alone() -> bool:
    """Whether measurements wait for each other and are checked, which the processes of a test suite must not do.

    Raises: SettingsError: SWIFTOPT_MEASURING is neither "alone" nor "together".
    """
    given = os.environ.get(MEASURING, "alone")
    if given not in ("alone", "together"):
        raise SettingsError(f"{MEASURING} is {given!r}: use alone or together")
    return given == "alone"
