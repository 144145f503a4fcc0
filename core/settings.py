"""Settings: SWIFT's, with their defaults (SWIFT appendix B.2), presets, weight formats, threads."""

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

# Weight formats for parts of a draft, besides the model's own format.
Format = Literal["int8", "fp8", "int4", "int4-64", "int4-32"]
FORMATS: tuple[str, ...] = get_args(Format)
FP8_ON_CPU = "our CPU kernels do not support fp8: draft in int8 or int4"
# Weights per scale in format "int4"; "int4-64" and "int4-32" have the group size in their name.
GROUP = 128
# Names of other inference engines in `export --to`, `tune --engine` and lookups.
EngineName = Literal["transformers", "llamacpp", "vllm", "openvino", "sglang", "tensorrt-llm"]
ENGINES: tuple[str, ...] = get_args(EngineName)
EXPORT_SCHEMA, EXPORT_SUMMARY = (
    "swiftopt.export/1",
    "export.json",
)  # Schema and file name of the summary that `export` writes.
# Value of `draft_format` that lets swiftopt choose the weight format, by measured time and agreement with the model.
AUTO = "auto"
# The model's own weights. In `LayerSet.formats` it exempts one part from an entry that covers more parts.
STORED: Final = "stored"

_PART = re.compile(r"(attn|mlp)(:\d+)?|head")

THREADS = "SWIFTOPT_THREADS"  # Environment variable that overrides the detected number of threads.
OMP_THREADS = "OMP_NUM_THREADS"  # The same for every program that computes with OpenMP or torch.
# Environment variable; "together": measurements may run at the same time and are trusted unchecked.
MEASURING = "SWIFTOPT_MEASURING"
# CPU quota of the container's cgroup: microseconds (or "max") per period, for example "200000 100000".
QUOTA = Path("/sys/fs/cgroup/cpu.max")

Branching = tuple[tuple[float, int], ...]

# Pairs of an upper bound of draft confidence and the number of candidate tokens up to it (SWIFT 4.2).
PAPER_BRANCHING: Branching = ((0.5, 10), (0.8, 5), (0.95, 3), (1.0, 1))
MAX_CANDIDATES_PER_STEP = 1_000_000  # Upper limit of candidate tokens per draft position.
# Models with more parameters start with skip ratio 0.5, as the paper's 34B and 70B do.
LARGE_MODEL_PARAMETERS = 30_000_000_000


@dataclass(frozen=True, slots=True)
class SwiftSettings(Settings):
    """All settings of SWIFT; the defaults are those of appendix B.2.

    The three switches of the paper's ablation (Table 8) are `early_stop`, `dynamic_verification` and `optimise`.

    Raises: SettingsError: a value is out of its range.
    """

    # Method that drafts with the layer set: SWIFT's token trees, or adaptive drafts with quantised weights
    # (docs/methods.md).
    method: Literal["swift", "adaptive"] = "swift"
    # Weight format of the draft's sub-layers and head: "stored", one of FORMATS, or "auto".
    draft_format: str = STORED
    # --- drafting and verification (SWIFT 4.2)
    # ε: drafting stops below this confidence. B.2 gives no value; 0.8 is from SWIFT's published code.
    stop_threshold: float = share(0.8)
    max_draft_length: int = count(25)  # N_D: largest number of draft steps per round.
    branching: Branching = PAPER_BRANCHING
    # Branching of sampled drafts (see `sampled`); None: as `branching`.
    drawn_branching: Branching | None = None
    early_stop: bool = True
    dynamic_verification: bool = True
    # At temperatures above 0, draft tokens are sampled and verified by speculative sampling. False: drafts are the most
    # probable tokens.
    sampled: bool = False
    # When the search ends, choose stop threshold, draft length and branching by measured time.
    search_drafting: bool = False
    # --- layer-set optimisation (SWIFT 4.1)
    optimise: bool = True
    strategy: str = "swift"
    objective: Literal["expected_speedup", "matchness"] = "expected_speedup"
    # Search only layer sets whose kept sub-layers alternate attention and MLP: other engines can load these drafts as
    # checkpoints.
    exportable: bool = False
    skip_ratio: float | None = share(None)  # r: share of sub-layers to skip. None: 0.45, or 0.5 for models from 34B on.
    context_window: int = count(32)  # γ: generated tokens on which candidates are scored.
    # Which generated tokens form the window; "first" is what SWIFT's published code does.
    window_at: Literal["latest", "first"] = "latest"
    optimise_interval: int = count(1)  # Rounds between two passes that score candidates.
    # Candidates scored per pass; None: as many as measured costs make cheap.
    candidates: int | None = count(None)
    # How a candidate replaces the set in use: by winning on several windows ("finals"), or by the highest score so far
    # (SWIFT 4.1).
    adoption: Literal["finals", "highest"] = "finals"
    max_steps: int = count(1000, least=0)  # S: candidates after which the search ends.
    bayes_interval: int = count(25)  # β: every β-th candidate comes from Bayesian optimisation.
    patience: int = count(300)  # Candidates without improvement after which the search ends.
    target_matchness: float = share(0.95)  # Matchness above which the search ends.
    # --- lowering of the skip ratio r (SWIFT C.2)
    min_acceptance: float = share(0.7)
    # Consecutive rounds with α below min_acceptance after which the skip ratio is lowered.
    min_acceptance_rounds: int = count(50)
    skip_ratio_step: float = ranged(0.05, gt=0, le=1)
    # --- reproducibility
    seed: int = ranged(0, ge=-LARGEST, le=LARGEST)
    # Wait for a late suggestion of the optimiser instead of using a random candidate.
    deterministic: bool = False

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        formats = (*FORMATS, STORED, AUTO)
        if self.draft_format not in formats:
            raise SettingsError(f"draft_format {self.draft_format} is out of range: use {', '.join(formats)}")
        for branching in filter(None, (self.branching, self.drawn_branching)):
            bounds = [bound for bound, _ in branching]
            is_rising = bounds == sorted(set(bounds)) and bounds[-1:] == [1.0]
            if not is_rising or not all(1 <= n_candidates <= MAX_CANDIDATES_PER_STEP for _, n_candidates in branching):
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
    """n_candidates: how many top candidates a draft position of that confidence offers (SWIFT 4.2)."""
    return next((n_candidates for bound, n_candidates in branching if confidence <= bound), branching[-1][1])


# --- presets (`--preset`): methods exactly as their papers describe them


@dataclass(frozen=True, slots=True)
class Preset:
    """A paper's configuration: `method` with `settings` in place of its defaults; `source` is the place in the paper.

    `making` are the settings for creating the parts that the method needs: those of `TuningSettings` if the layer set
    is searched during decoding (`is_tuned`), otherwise those of the part's maker. `sampling` is how the paper warps the
    model's distribution, for its method and for all methods compared with it.
    """

    method: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    making: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_tuned(self) -> bool:
        """Whether its layer set is searched during the decoding of a stream."""
        return self.method == "swift"

    @property
    def tuning(self) -> dict[str, Any]:
        """All values of `TuningSettings` by name, for a preset that `is_tuned`."""
        return {**asdict(SwiftSettings()), **self.settings, **self.making}


# Search settings that the SWIFT paper does not state, taken from its published code: the scored window, one candidate
# per round, adoption of the highest score, and how the Gaussian process proposes.
_SEARCH = {
    "strategy": "published",
    "objective": "matchness",
    "adoption": "highest",
    "window_at": "first",
    "candidates": 1,
    "deterministic": True,
    # C.2 lowers r from 0.5 to 0.4. Neither paper nor code says after how many rounds.
    "skip_ratio_step": 0.1,
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
    wing_presets = (load(wing.presets) for wing in wings() if wing.presets)
    return {**PRESETS, **{name: preset for preset_table in wing_presets for name, preset in preset_table.items()}}


def preset_of(name: str) -> Preset:
    """Return a preset by name; errors as in `look_up`."""
    return look_up("preset", name, presets())


# --- weight formats, and threads


def group_size(name: str, width: int) -> int | None:
    """Number of weights that share a scale in a row of `width`; None if the whole row does (int8, fp8).

    If the format's group size does not divide the width, the next smaller one that does is used; if 32 does not divide
    it, the row is int8.
    """
    if name in ("int8", "fp8"):
        return None
    size = int(name.partition("-")[2] or GROUP)
    return next((group for group in (128, 64, 32) if group <= size and width % group == 0), None)


def check_formats(formats: tuple[tuple[str, str], ...], n_layers: int) -> None:
    """Raises: LayerSetError: a part or a format is unknown."""
    for part, name in formats:
        if not _PART.fullmatch(part) or int(part.partition(":")[2] or 0) >= n_layers:
            raise LayerSetError(
                f"{part!r} cannot be quantised in a model of {n_layers} layers: use attn, mlp, attn:3, mlp:3 or head"
            )
        if name not in (*FORMATS, STORED):
            raise LayerSetError(f"{part} cannot be {name!r}: known formats are {', '.join(FORMATS)} and {STORED}")


def check_experts(experts: tuple[tuple[str, int], ...], n_layers: int) -> None:
    """Raises: LayerSetError: a part is unknown, or a number is negative."""
    for part, number in experts:
        if not re.fullmatch(r"mlp(:\d+)?", part) or int(part.partition(":")[2] or 0) >= n_layers:
            raise LayerSetError(f"{part!r} has no experts in a model of {n_layers} layers: use mlp or mlp:3")
        if number < 0:
            raise LayerSetError(f"a token cannot use {number} experts of {part}: use 0 or more")


def check_absent(absent: tuple[str, ...], n_layers: int) -> None:
    """Raises: LayerSetError: a part is not a sub-layer of one of the layers."""
    for part in absent:
        if not re.fullmatch(r"(attn|mlp):\d+", part) or int(part.partition(":")[2]) >= n_layers:
            raise LayerSetError(f"{n_layers} layers have no sub-layer {part!r}: use a name such as mlp:3")


def cpu_words(key: str) -> str:
    """Return an entry of Linux's /proc/cpuinfo, such as "model name"; empty if it cannot be read."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")
    except OSError:
        return ""


def usable_cores() -> int:
    """Number of processors that this process may use, limited by a container's quota."""
    n_affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return max(1, min(n_affine, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # The file does not exist (no cgroup v2), or sets no quota.
        return n_affine


def n_threads() -> int:
    """SWIFTOPT_THREADS, or else OMP_NUM_THREADS, or else one per usable core.

    Raises: SettingsError: SWIFTOPT_THREADS is not a number from 1 to 255.
    """
    requested = os.environ.get(THREADS)
    if requested is None:
        omp_threads = os.environ.get(OMP_THREADS, "")
        return min(int(omp_threads) if omp_threads.isdecimal() and int(omp_threads) > 0 else usable_cores(), 255)
    if not requested.isdecimal() or not 1 <= int(requested) <= 255:
        raise SettingsError(f"{THREADS} is {requested!r}: use a number of threads from 1 to 255")
    return int(requested)


def measures_alone() -> bool:
    """Whether measurements take turns and are checked; false for test suites.

    Raises: SettingsError: SWIFTOPT_MEASURING is neither "alone" nor "together".
    """
    setting = os.environ.get(MEASURING, "alone")
    if setting not in ("alone", "together"):
        raise SettingsError(f"{MEASURING} is {setting!r}: use alone or together")
    return setting == "alone"
