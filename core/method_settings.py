"""What each decoding method can be told; every default once, with where it comes from.

Where a paper leaves a default to others, the comment says whose it is. `exit_layer` counts layers run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from .errors import SettingsError
from .formats import FORMATS, STORED

Settings = TypeVar("Settings", bound="MethodSettings")


@dataclass(frozen=True, slots=True)
class MethodSettings:
    """Base of all; a method without settings has this one.

    Raises: SettingsError: a value is out of its range.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), field.metadata.get("choices")
            if choices is not None:
                if value not in choices:
                    raise SettingsError(f"{field.name} {value!r} is unknown: use one of {', '.join(choices)}")
                continue
            low, high, words = field.metadata.get("range", _ANY)
            if value is not None and not low <= value <= high:
                raise SettingsError(f"{field.name} {value} is out of range: use {words}")

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the store and for `--json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls: type[Settings], values: Mapping[str, Any]) -> Settings:
        """Inverse of `to_json`; a missing key takes its default.

        Raises: SettingsError: a key is unknown, or a value is out of range or of the wrong type.
        """
        hints = get_type_hints(cls)
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in values.items():
            if name not in known:
                raise SettingsError(f"there is no setting {name!r} here: known are {', '.join(known) or 'none'}")
            if not _fits(value, hints[name]):
                words = {bool: "true or false", str: "a word"}.get(hints[name], "a number")
                raise SettingsError(f"{name} is {value!r}: use {'a whole number' if hints[name] in _WHOLE else words}")
        return cls(**values)


_WHOLE = (int, int | None)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value is of a setting's type; true and false are no numbers, whole numbers are."""
    if hint is str or isinstance(value, str):
        return hint is str and isinstance(value, str)
    if value is None or hint is bool or isinstance(value, bool):
        return (value is None and hint in (int | None, float | None)) or (hint is bool and isinstance(value, bool))
    return isinstance(value, int if hint in _WHOLE else int | float)


_ANY = (float("-inf"), float("inf"), "any number")


def _share(default: float) -> Any:
    return dataclasses.field(default=default, metadata={"range": (0.0, 1.0, "a number from 0 to 1")})


def _count(default: int | None) -> Any:
    return dataclasses.field(default=default, metadata={"range": (1, float("inf"), "1 or more")})


def _choice(default: str, *choices: str) -> Any:
    return dataclasses.field(default=default, metadata={"choices": choices})


@dataclass(frozen=True, slots=True)
class _Adaptive(MethodSettings):
    """Draft & Verify's adaptive threshold; its published code's values, and the draft length of AdaDecode's setup."""

    stop_threshold: float = _share(0.8)
    max_draft_length: int = _count(12)
    target_acceptance: float = _share(0.9)
    threshold_step: float = _share(0.01)
    rate_memory: float = _share(0.5)  # β1
    threshold_memory: float = _share(0.9)  # β2


@dataclass(frozen=True, slots=True)
class SelfSdSettings(_Adaptive):
    """Draft & Verify (arXiv:2309.08168)."""


@dataclass(frozen=True, slots=True)
class LayerSkipSettings(MethodSettings):
    """LayerSkip (arXiv:2404.16710); its examples leave after 8 of 32 layers and draft 6 tokens."""

    exit_layer: int | None = _count(None)  # None: a quarter of the depth
    draft_length: int = _count(6)


@dataclass(frozen=True, slots=True)
class AdaSpeedSettings(_Adaptive):
    """AdaSPEED: the threshold is for the product of the draft's confidences; starts at 0.8 (its appendix A)."""

    exit_layer: int | None = _count(None)  # None: a quarter of the depth


@dataclass(frozen=True, slots=True)
class AdaDecodeSettings(MethodSettings):
    """AdaDecode, appendix D."""

    early_threshold: float = _share(0.75)  # γ
    max_early: int = _count(5)  # early predictions in a row


@dataclass(frozen=True, slots=True)
class ParaDecodeSettings(MethodSettings):
    """ParaDecode 4.3: γ = 0, every token is predicted early."""

    early_threshold: float = _share(0.0)


@dataclass(frozen=True, slots=True)
class SpdSettings(MethodSettings):
    """Speculative decoding with a draft model (arXiv:2211.17192, 2302.01318)."""

    max_draft_length: int = _count(5)
    stop_threshold: float | None = _share(0.4)  # transformers' assistant_confidence_threshold; None: constant length
    block_verification: bool = True  # at temperatures above 0 (arXiv:2403.10444): never accepts fewer


@dataclass(frozen=True, slots=True)
class SequencesSettings(MethodSettings):
    """SpecTr, SpecInfer, MCSS: how many sequences are drafted, and how long."""

    sequences: int = _count(4)
    draft_length: int = _count(4)


@dataclass(frozen=True, slots=True)
class BeamSettings(MethodSettings):
    """MTJD (MTAD 3.1): beams over the target itself, each block kept whole."""

    beam_width: int = _count(4)  # the paper's grid: 4, 8
    draft_length: int = _count(4)  # its grid: 3, 4
    top_k: int = _count(10)  # appendix F
    top_p: float = _share(0.9)


@dataclass(frozen=True, slots=True)
class MtadSettings(BeamSettings):
    """MTAD 3.2: beams over the draft, the longest prefix whose joint ratio exceeds τ."""

    acceptance_threshold: float = _share(0.5)  # τ; its grid: 0.1 to 0.9


@dataclass(frozen=True, slots=True)
class BildSettings(MethodSettings):
    """BiLD (arXiv:2302.07863)."""

    fallback_threshold: float = _share(0.6)  # the draft hands over where its confidence is below
    rollback_threshold: float = dataclasses.field(  # largest -log target probability of a kept token
        default=3.0, metadata={"range": (0.0, float("inf"), "0 or more")}
    )
    max_draft_length: int = _count(10)


@dataclass(frozen=True, slots=True)
class TypicalSettings(MethodSettings):
    """Typical acceptance (Medusa, arXiv:2401.10774): a token stays if its probability exceeds min(ε, δ · exp(-H))."""

    epsilon: float = _share(0.09)  # Medusa's posterior_threshold
    delta: float = _share(0.3)  # its posterior_alpha, √ε
    max_draft_length: int = _count(5)


@dataclass(frozen=True, slots=True)
class LookaheadSettings(MethodSettings):
    """Lookahead decoding (arXiv:2402.02057)."""

    ngram: int = dataclasses.field(default=5, metadata={"range": (2, float("inf"), "2 or more")})  # N
    window: int = _count(7)  # W
    guesses: int = _count(7)  # G


@dataclass(frozen=True, slots=True)
class JacobiSettings(MethodSettings):
    """Parallel (Jacobi) decoding (arXiv:2305.10427): guesses refined together."""

    window: int = _count(8)


@dataclass(frozen=True, slots=True)
class LookupSettings(MethodSettings):
    """Prompt lookup: what followed the longest earlier occurrence of the text's end."""

    max_draft_length: int = _count(10)
    min_match: int = _count(1)  # tokens that must match before anything is drafted


@dataclass(frozen=True, slots=True)
class AdaptiveSettings(MethodSettings):
    """Adaptive drafts: from earlier text and from a cheaper model, as measured time says."""

    draft_format: str = _choice("int4", *FORMATS, STORED)  # of all that the layer set names no format for
    max_draft_length: int = _count(24)
    lookup: bool = True
    second_candidates: bool = True
