"""Report of a comparison: one row of figures per method against plain decoding, and the plan that follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..core.errors import LayerSetNotFound
from ..core.records import FoundPlan, Plan
from ..core.requests import BASE
from ..core.serialization import Record
from ..core.types import Completion
from ..decoding.methods import METHODS
from ..optimizer.verdict import Array, bootstrap_interval, resampled, speed, speed_ratio
from ..store import Store
from .quality import pass_at
from .recipes import Recipe
from .runs import Run, Runs

SCHEMA = "swiftopt.compare/1"
K = 10  # of pass@k


@dataclass(frozen=True, slots=True)
class Figures(Record):
    """One row of the comparison; None where nothing was measured.

    `prompts` of `of` were decoded; `ratio` and `identical` are against plain decoding of the same prompts. α, M and
    `passes_per_token` (of the target, without prefill) are over all completions. `perplexity` is that of the output
    under the target itself; its ratio and the ratio's interval over prompts are to plain decoding's. `early_share`:
    share of tokens accepted from an intermediate layer; `rejected_share`: share of the verified early predictions that
    the last layer contradicted. `quality` is the mean of the data set's measure over the prompts, `pass_at_10` that of
    pass@10 where there are as many samples. `extra_bytes`: tensors beside the target's weights and buffer. `reason`:
    why there are no figures, or not of all prompts.
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
    quality: float | None = None
    quality_interval: tuple[float, float] | None = None
    pass_at_10: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None

    def missing(self, n_prompts: int, reason: str) -> Figures:
        """Return the row without any figures."""
        return replace(self, of=n_prompts, reason=reason, extra_parameters=None, extra_bytes=None)


def figures(
    known: Figures,
    own: Runs,
    base: Runs,
    n_prompts: int,
    nll: Callable[[int, Run], float] | None,
    keeps_tokens: bool = True,
    predicts_early: bool = False,
) -> Figures:
    """Fill in a method's row from its runs and those of plain decoding.

    Args: known: the row with what is known without running the method. nll: (prompt number, run) -> negative
          log-likelihood of the run's tokens under the target; None leaves the perplexity out. keeps_tokens: the method
          emits the very tokens of plain decoding, also when sampling from the same seed. predicts_early: its drafts are
          predictions at an intermediate layer.
    """
    shared = [number for number in own.by_prompt if number in base.by_prompt]
    if not shared:
        return known.missing(n_prompts, own.error or "interrupted before its first prompt was done")
    runs, plain = [own.by_prompt[i] for i in shared], [base.by_prompt[i] for i in shared]
    timed, slow = [run.timed for run in runs], [run.timed for run in plain]
    n_tokens = sum(run.tokens for run in timed)
    joules = [run.joules for run in runs if run.joules is not None]
    spent = sum(joules) if len(joules) == len(runs) else 0.0
    return replace(
        known,
        prompts=len(shared),
        of=n_prompts,
        tokens=n_tokens,
        seconds=sum(run.seconds for run in timed),
        tok_s=speed(timed),
        ratio=speed_ratio(timed, slow),
        ratio_interval=bootstrap_interval(timed, slow) if len(shared) > 1 else None,
        **_counts([run.completion for run in runs if run.completion is not None], predicts_early),
        identical=_identical(runs, plain) if keeps_tokens else None,
        **_perplexities(shared, own, base, nll) if nll else {},
        joules_per_token=spent / n_tokens if spent and n_tokens else None,
        reason=own.error,
    )


def qualities(scores: Mapping[int, float], samples: int) -> dict[str, Any]:
    """Return the quality figures of answers scored from 0 to 1, by number; each prompt's samples are neighbours."""
    by_prompt: dict[int, list[float]] = {}
    for number, score in scores.items():
        by_prompt.setdefault(number // samples, []).append(score)
    whole = [own for own in by_prompt.values() if len(own) == samples]  # a slow method may have stopped in the middle
    if not whole:
        return {}
    means = np.array([[sum(own) / samples] for own in whole])
    many = samples >= K and all(score in (0.0, 1.0) for own in whole for score in own)
    return {
        "quality": float(means.mean()),
        "quality_interval": resampled(means, lambda sums: np.asarray(sums[..., 0] / len(whole))),
        "pass_at_10": sum(pass_at(K, samples, round(sum(own))) for own in whole) / len(whole) if many else None,
    }


def _perplexities(shared: Sequence[int], own: Runs, base: Runs, nll: Callable[[int, Run], float]) -> dict[str, Any]:
    """Return the perplexity of the output and its ratio to plain decoding's, with an interval over prompts."""
    rows = np.array(
        [
            [value for run in (own.by_prompt[i], base.by_prompt[i]) for value in (nll(i, run), run.timed.tokens)]
            for i in shared
        ]
    )

    def perplexities(sums: Array) -> Array:
        """Return those of the method and of plain decoding, (..., 2), for sums of nats and tokens of each, (..., 4)."""
        with np.errstate(invalid="ignore"):  # a resample without a token
            return np.asarray(np.exp(sums[..., ::2] / sums[..., 1::2]))

    def ratio(sums: Array) -> Array:
        found = perplexities(sums)
        return np.asarray(found[..., 0] / found[..., 1])

    whole = rows.sum(axis=0)
    if not whole[1::2].all():
        return {}
    return {
        "perplexity": float(perplexities(whole)[0]),
        "perplexity_ratio": float(ratio(whole)),
        "perplexity_interval": resampled(rows, ratio) if len(rows) > 1 else None,
    }


def _identical(runs: Sequence[Run], plain: Sequence[Run]) -> int:
    return sum(a.token_ids == b.token_ids for a, b in zip(runs, plain, strict=True))


def _counts(completions: Sequence[Completion], predicts_early: bool) -> dict[str, Any]:
    """Return the figures made of the decoding loop's counts; none where another loop decoded."""
    drafted, accepted = sum(done.drafted for done in completions), sum(done.accepted for done in completions)
    passes, decoded = sum(d.target_passes for d in completions), sum(d.n_tokens - d.first_tokens for d in completions)
    refused = sum(d.refused for d in completions)
    early = predicts_early and decoded > 0
    return {
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_generated_length": decoded / passes if passes else None,
        "passes_per_token": passes / decoded if decoded else None,
        "early_share": accepted / decoded if early else None,
        "rejected_share": refused / (accepted + refused) if early and drafted else None,
    }


def best_of(rows: Sequence[Figures]) -> Figures | None:
    """Return the fastest lossless method whose whole interval lies above 1; None: plain decoding is the plan."""
    sure = [row for row in rows if not row.lossy and row.ratio_interval is not None and row.ratio_interval[0] > 1]
    return max(sure, key=lambda row: row.ratio or 0.0, default=None)


def by_ratio(rows: Sequence[Figures]) -> list[Figures]:
    """Sort the rows, fastest first, those without figures last."""
    return sorted(rows, key=lambda row: -math.inf if row.ratio is None else row.ratio, reverse=True)


def with_plan(
    report: Mapping[str, Any],
    rows: Sequence[Figures],
    recipes: Mapping[str, Recipe],
    fingerprint: str,
    store: Store | None,
) -> dict[str, Any]:
    """Return the report with its plan, both stored if there is a store; an interrupted comparison makes no plan.

    The current plan, if of a method that did not run, stays `best` where it was measured to be faster.
    """
    plan = None if report["interrupted"] else plan_of(report, rows, recipes)
    found, standing = None, None
    ran = [row.method for row in rows if row.ratio is not None]
    if store is not None and plan is not None:
        standing = _standing(report, fingerprint, plan, ran, store)
        found = store.add_plan(fingerprint, report["task"], plan, promote=standing is None)
    whole = {
        **report,
        "plan": None if plan is None else _plan_json(plan, None if found is None else found.version),
        "standing": None if standing is None else _plan_json(standing.plan, standing.version),
        "stored": store is not None and bool(ran),
    }
    if store is not None and ran:
        where = report["task"], report["device"], report["dtype"]
        store.add_comparison(fingerprint, *where, whole, report["created_at"])
    return whole


def plan_of(report: Mapping[str, Any], rows: Sequence[Figures], recipes: Mapping[str, Recipe]) -> Plan:
    """Return the plan: the best lossless method of this package with its parts, or plain decoding."""
    best = best_of([row for row in rows if row.method in METHODS])
    if best is None:
        return Plan(BASE, verdict="plain", device=report["device"], dtype=report["dtype"])
    return Plan(
        best.method,
        recipes[best.method].layer_set,
        best.settings,
        "use",
        recipes[best.method].learned,
        report["draft_model"] if METHODS[best.method].drafts_with_model else None,
        best.ratio,
        best.ratio_interval,
        report["device"],
        report["dtype"],
    )


def _standing(
    report: Mapping[str, Any], fingerprint: str, plan: Plan, ran: Sequence[str], store: Store
) -> FoundPlan | None:
    """Return the plan that stays: for this very task, device and dtype, of a method that did not run, and faster."""
    try:
        found = store.lookup(fingerprint, report["task"], report["device"], report["dtype"])
    except LayerSetNotFound:
        return None
    faster = (found.plan.measured_speedup or 1.0) > (plan.measured_speedup or 1.0)
    stays = found.fallback is None and found.plan.verdict == "use" and faster and found.plan.method not in ran
    return found if stays else None


def _plan_json(plan: Plan, version: int | None) -> dict[str, Any]:
    return {
        "method": plan.method,
        "verdict": plan.verdict,
        "version": version,
        "measured_speedup": plan.measured_speedup,
        "measured_interval": plan.measured_interval,
    }
