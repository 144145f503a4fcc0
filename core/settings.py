"""The settings of SWIFT, each default once (SWIFT appendix B.2), and where the program's own settings come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .errors import SettingsError
from .formats import AUTO, FORMATS, STORED

Branching = tuple[tuple[float, int], ...]

# Confidence up to and including the bound -> candidates offered there (SWIFT 4.2).
PAPER_BRANCHING: Branching = ((0.5, 10), (0.8, 5), (0.95, 3), (1.0, 1))
LARGE_MODEL_PARAMETERS = 30_000_000_000  # from here on (the paper's 34B and 70B) r starts at 0.5


@dataclass(frozen=True, slots=True)
class SwiftSettings:
    """Everything that SWIFT can be told; the defaults are those of appendix B.2.

    The three switches of the paper's ablation (Table 8) are `early_stop`, `dynamic_verification` and `optimise`.

    Raises: SettingsError: a value is out of its range.
    """

    # what the layer set drafts for: SWIFT's own trees, or adaptive drafts with quantised copies (docs/methods.md)
    method: Literal["swift", "adaptive"] = "swift"
    draft_format: str = STORED  # of the sub-layers that a draft keeps, and of its head: one of core.formats, or "auto"
    # drafting and verification (4.2)
    stop_threshold: float = 0.8  # ε; B.2 gives none, this is the published code's
    max_draft_length: int = 25  # N_D, draft steps per round
    branching: Branching = PAPER_BRANCHING
    early_stop: bool = True
    dynamic_verification: bool = True
    search_drafting: bool = False  # threshold, length and branching are chosen by measured time when the search ends
    # layer-set optimisation (4.1)
    optimise: bool = True
    strategy: str = "swift"
    objective: Literal["expected_speedup", "matchness"] = "expected_speedup"
    skip_ratio: float | None = None  # r; None: 0.45, 0.5 from 34B on
    context_window: int = 32  # γ, tokens
    max_steps: int = 1000  # S, candidates
    bayes_interval: int = 25  # β, candidates
    patience: int = 300  # candidates without a better one that end the search
    target_matchness: float = 0.95  # above it the search ends
    # lowering of r (C.2)
    min_acceptance: float = 0.7
    min_acceptance_rounds: int = 50  # rounds that α must stay below it
    skip_ratio_step: float = 0.05
    # reproducibility
    seed: int = 0
    deterministic: bool = False  # wait for a late suggestion instead of drawing at random

    def __post_init__(self) -> None:
        for name in ("stop_threshold", "target_matchness", "min_acceptance"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "a number from 0 to 1")
        for name in ("max_draft_length", "context_window", "bayes_interval", "patience", "min_acceptance_rounds"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        _check("max_steps", self.max_steps, self.max_steps >= 0, "0 or more")
        _check(
            "skip_ratio", self.skip_ratio, self.skip_ratio is None or 0 <= self.skip_ratio <= 1, "a number from 0 to 1"
        )
        _check("skip_ratio_step", self.skip_ratio_step, 0 < self.skip_ratio_step <= 1, "more than 0, at most 1")
        _check(
            "objective",
            self.objective,
            self.objective in ("expected_speedup", "matchness"),
            "expected_speedup or matchness",
        )
        _check("method", self.method, self.method in ("swift", "adaptive"), "swift or adaptive")
        formats = (*FORMATS, STORED, AUTO)
        _check("draft_format", self.draft_format, self.draft_format in formats, f"one of {', '.join(formats)}")
        bounds = [bound for bound, _ in self.branching]
        rising = bounds == sorted(set(bounds)) and bounds[-1:] == [1.0] and all(k >= 1 for _, k in self.branching)
        _check("branching", self.branching, rising, "rising (confidence, candidates) pairs that end at confidence 1")

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

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the store and the export file."""
        return {**dataclasses.asdict(self), "branching": [list(pair) for pair in self.branching]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SwiftSettings:
        """Inverse of `to_json`; a missing key takes its default.

        Raises: SettingsError: a key is unknown, or a value is out of range or of the wrong type.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise SettingsError(f"unknown settings {unknown}: known are {sorted(known)}")
        merged = dict(values)
        try:
            if "branching" in merged:
                merged["branching"] = tuple((float(bound), int(k)) for bound, k in merged["branching"])
            return cls(**merged)
        except SettingsError:
            raise
        except (TypeError, ValueError) as error:
            raise SettingsError(f"settings {dict(values)} cannot be read: {error}") from error


def candidates_at(branching: Branching, confidence: float) -> int:
    """k: how many top candidates a draft position of that confidence offers (SWIFT 4.2)."""
    return next((k for bound, k in branching if confidence <= bound), branching[-1][1])


def _check(name: str, value: object, ok: bool, wanted: str) -> None:
    if not ok:
        raise SettingsError(f"{name} {value} is out of range: use {wanted}")
