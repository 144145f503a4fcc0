"""From runs to figures: one row per method against plain decoding, and which of them becomes the plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.types import Completion
from ..optimizer.verdict import bootstrap_interval, resampled, speed, speed_ratio
from .runs import Run, Runs

SCHEMA = "swiftopt.compare/1"


@dataclass(frozen=True, slots=True)
class About:
    """What is known of a method without running it.

    `keeps_tokens`: it emits the very tokens of plain decoding, also from the same seed. `extra_bytes` are tensors
    beside the target's own weights and buffer.
    """

    name: str
    title: str = ""
    lossy: bool = False
    keeps_tokens: bool = True
    predicts_early: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    extra_parameters: int | None = 0
    extra_bytes: int | None = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """One row of the comparison; None where nothing was measured.

    `prompts` of `of` were decoded; `ratio` and `identical` are against plain decoding of the same prompts. α, M and
    `passes_per_token` (of the target, prefill apart) are of all completions together. `perplexity` is that of the
    output under the target itself; its ratio and that one's interval over prompts are to plain decoding's.
    `early_share`: tokens that were predicted at an intermediate layer and stood; `rejected_share`: those of the early
    predictions, among the ones judged, that the last layer contradicted. `reason` says why figures are missing.
    """

    method: str
    title: str = ""
    lossy: bool = False
    prompts: int = 0
    of: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tok_s: float | None = None
    ratio: float | None = None
    ratio_interval: tuple[float, float] | None = None
    acceptance_rate: float | None = None
    mean_generated_length: float | None = None
    passes_per_token: float | None = None
    identical: int | None = None
    perplexity: float | None = None
    perplexity_ratio: float | None = None
    perplexity_interval: tuple[float, float] | None = None
    early_share: float | None = None
    rejected_share: float | None = None
    extra_parameters: int | None = None
    extra_bytes: int | None = None
    joules_per_token: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def missing(cls, about: About, n_prompts: int, reason: str) -> Figures:
        """The row of a method that has no figures."""
        return cls(about.name, about.title, about.lossy, of=n_prompts, settings=about.settings, reason=reason)


def figures(
    about: About, own: Runs, base: Runs, n_prompts: int, surprise: Callable[[int, Run], float] | None
) -> Figures:
    """A method's row from its runs and those of plain decoding.

    Args: surprise: (prompt number, run) -> -log probability of the run's tokens under the target, summed; None leaves
          the perplexity out.
    """
    shared = [number for number in own.by_prompt if number in base.by_prompt]
    if not shared:
        return Figures.missing(about, n_prompts, own.error or "interrupted before its first prompt was done")
    runs, plain = [own.by_prompt[i] for i in shared], [base.by_prompt[i] for i in shared]
    timed, slow = [run.timed for run in runs], [run.timed for run in plain]
    n_tokens = sum(run.tokens for run in timed)
    joules = [run.joules for run in runs if run.joules is not None]
    spent = sum(joules) if len(joules) == len(runs) else 0.0
    return Figures(
        about.name,
        about.title,
        about.lossy,
        prompts=len(shared),
        of=n_prompts,
        tokens=n_tokens,
        seconds=sum(run.seconds for run in timed),
        tok_s=speed(timed),
        ratio=speed_ratio(timed, slow),
        ratio_interval=bootstrap_interval(timed, slow) if len(shared) > 1 else None,
        **_counts([run.completion for run in runs if run.completion is not None], about),
        identical=_identical(runs, plain) if about.keeps_tokens else None,
        **_perplexities(shared, own, base, surprise) if surprise else {},
        extra_parameters=about.extra_parameters,
        extra_bytes=about.extra_bytes,
        joules_per_token=spent / n_tokens if spent and n_tokens else None,
        settings=about.settings,
        reason=own.error,
    )


def _perplexities(
    shared: Sequence[int], own: Runs, base: Runs, surprise: Callable[[int, Run], float]
) -> dict[str, Any]:
    """Perplexity of the output, and its ratio to plain decoding's with an interval over prompts."""
    pairs = [[(surprise(i, run), run.timed.tokens) for run in (own.by_prompt[i], base.by_prompt[i])] for i in shared]

    def perplexity(picks: Sequence[int], side: int) -> float:
        nats, tokens = (sum(pairs[i][side][part] for i in picks) for part in (0, 1))
        return math.exp(nats / tokens) if tokens else math.nan

    def ratio(picks: Sequence[int]) -> float:
        return perplexity(picks, 0) / perplexity(picks, 1)

    everyone = range(len(pairs))
    if not all(sum(pairs[i][side][1] for i in everyone) for side in (0, 1)):
        return {}
    return {
        "perplexity": perplexity(everyone, 0),
        "perplexity_ratio": ratio(everyone),
        "perplexity_interval": resampled(len(pairs), ratio) if len(pairs) > 1 else None,
    }


def _identical(runs: Sequence[Run], plain: Sequence[Run]) -> int:
    return sum(a.token_ids == b.token_ids for a, b in zip(runs, plain, strict=True))


def _counts(completions: Sequence[Completion], about: About) -> dict[str, Any]:
    """The figures that are made of the loop's own counts; none where another loop decoded."""
    drafted, accepted = sum(done.drafted for done in completions), sum(done.accepted for done in completions)
    passes, decoded = sum(d.target_passes for d in completions), sum(d.n_tokens - d.first_tokens for d in completions)
    refused = sum(d.refused for d in completions)
    early = about.predicts_early and decoded > 0
    return {
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_generated_length": decoded / passes if passes else None,
        "passes_per_token": passes / decoded if decoded else None,
        "early_share": accepted / decoded if early else None,
        "rejected_share": refused / (accepted + refused) if early and drafted else None,
    }


def best_of(rows: Sequence[Figures]) -> Figures | None:
    """The fastest lossless method whose whole interval lies above 1; None: plain decoding is the plan."""
    sure = [row for row in rows if not row.lossy and row.ratio_interval is not None and row.ratio_interval[0] > 1]
    return max(sure, key=lambda row: row.ratio or 0.0, default=None)


def by_ratio(rows: Sequence[Figures]) -> list[Figures]:
    """Fastest first, those without figures last."""
    return sorted(rows, key=lambda row: -math.inf if row.ratio is None else row.ratio, reverse=True)
