"""Alternating runs of several methods, the report that compares them with plain decoding, and the resulting plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from ..core.costs import CostProfile, expected_of, published_speedup
from ..core.errors import LayerSetNotFound, SwiftoptError
from ..core.records import FoundPlan, Plan
from ..core.requests import BASE
from ..core.serialization import Record
from ..core.types import Completion, Prompt
from ..decoding.engine import alone
from ..decoding.methods import METHODS, Method
from ..decoding.session import Session, hf_generate
from ..models.runtime import Runtime
from ..optimizer.search import Search
from ..optimizer.verdict import Array, Timed, jackknife_interval, ratio_interval, speed, speed_interval, speed_ratio
from ..store import Store
from .measures import EnergyMeter, pass_at
from .recipes import Recipe

SCHEMA = "swiftopt.compare/1"
K = 10  # k of the pass@k metric.
WARM_UP_TOKENS = 4
MAX_SLOWDOWN = 2.0  # A method stops before it takes longer than this many times plain decoding's time for all prompts.
LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens of hf-lookup, as in the documentation of transformers.
MIN_PROMPTS = 2  # Prompts that even a slow method decodes, because a confidence interval needs two.

S = TypeVar("S", Timed, Array)
Decoded = tuple[tuple[int, ...], Completion | None]  # Token ids; the completion is None if transformers decoded.
Decode = Callable[[Prompt], Decoded]
NLL = Callable[[int, tuple[int, ...]], float]  # (prompt number, token ids) -> negative log-likelihood under the target.
OnRun = Callable[[str, int, int, Timed], None]  # (method, prompt number, number of prompts, timings).


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt decoded with one method; `seconds` include the prefill."""

    token_ids: tuple[int, ...]
    seconds: float
    completion: Completion | None = None
    joules: float | None = None

    @property
    def timed(self) -> Timed:
        return Timed(len(self.token_ids), self.seconds)


@dataclass(slots=True)
class Runs:
    """A method's runs by prompt number."""

    name: str
    by_prompt: dict[int, Run] = field(default_factory=dict)
    error: str | None = None  # Why the method stopped early.

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.by_prompt.values())


def decoder(session: Session, drafter: Method | Search) -> Decode:
    """Return a function that decodes single-turn prompts with a method, or with a search's drafts while it searches."""

    def decode(prompt: Prompt) -> Decoded:
        request_work = (
            drafter.request(session, prompt) if isinstance(drafter, Search) else session.request(prompt, drafter)
        )
        completion = alone(request_work)[0].completion
        return completion.token_ids, completion

    return decode


def peer(name: str, session: Session, draft: Runtime | None) -> Decode:
    """Return a function that decodes prompts with transformers, as one of the PEERS; "hf-assisted" uses `draft`."""
    options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if name == "hf-lookup" else {}
    if name == "hf-assisted" and draft is not None:
        options = {"assistant_model": draft.hf_model}

    def decode(prompt: Prompt) -> Decoded:
        return hf_generate(session, session.encode(prompt), session.room(prompt), prompt.stop, **options), None

    return decode


class Interleaved:
    """Runs methods alternately on the same prompts, so that disturbances of the machine affect all equally.

    The first method is the base. The order of the methods rotates from prompt to prompt. A method that takes more than
    MAX_SLOWDOWN times the base's time stops early, after at least MIN_PROMPTS prompts. If a method fails, it stops and
    its error is recorded; if the base fails, its error is raised. With `complete`, every method decodes every prompt,
    and any error is raised.
    """

    def __init__(
        self,
        methods: Mapping[str, Decode],
        prompts: Sequence[Prompt],
        meter: EnergyMeter | None = None,
        on_run: OnRun | None = None,
        complete: bool = False,
    ) -> None:
        self.methods, self.prompts, self.complete = methods, list(prompts), complete
        self.meter, self.on_run = meter or EnergyMeter(()), on_run
        self.base = next(iter(methods))
        self.runs = {name: Runs(name) for name in methods}

    def run(self) -> bool:
        """Warm up, then decode all prompts with all methods; return False if Ctrl-C ended it early.

        The finished runs are in `runs`.
        """
        names = [*self.methods]
        # A short completion makes one-time allocations, which must not count in the timings.
        warm_up = replace(self.prompts[0], max_new_tokens=WARM_UP_TOKENS)
        try:
            for name in names:
                self._call_or_record_error(name, partial(self.methods[name], warm_up))
            for number, prompt in enumerate(self.prompts):
                n_rotated = number % len(names)
                for name in [*names[n_rotated:], *names[:n_rotated]]:
                    if len(self.runs[name].by_prompt) < self.max_prompts(name):
                        self._call_or_record_error(name, partial(self._run_prompt, name, number, prompt))
        except KeyboardInterrupt:
            return False
        return True

    def max_prompts(self, name: str) -> int:
        """Return how many prompts a method may decode, given its speed so far."""
        method_runs, base_runs = self.runs[name], self.runs[self.base]
        if self.complete or not method_runs.by_prompt or not base_runs.by_prompt or name == self.base:
            return len(self.prompts)
        per_prompt_s = method_runs.seconds / len(method_runs.by_prompt)
        allowed_s = MAX_SLOWDOWN * len(self.prompts) * base_runs.seconds / len(base_runs.by_prompt)
        return max(MIN_PROMPTS, int(allowed_s / per_prompt_s))

    def _call_or_record_error(self, name: str, call: Callable[[], object]) -> None:
        """Call a method's decoding, unless the method has failed before; record its error."""
        if self.runs[name].error is not None:
            return
        try:
            call()
        except SwiftoptError as error:
            if self.complete or name == self.base:
                raise
            self.runs[name].error = str(error)

    def _run_prompt(self, name: str, number: int, prompt: Prompt) -> None:
        start_counts, started_s = self.meter.read(), perf_counter()
        token_ids, completion = self.methods[name](prompt)
        seconds = perf_counter() - started_s
        run = Run(token_ids, seconds, completion, self.meter.joules_since(start_counts))
        self.runs[name].by_prompt[number] = run
        if self.on_run is not None:
            self.on_run(name, number, len(self.prompts), run.timed)


@dataclass(frozen=True, slots=True)
class Figures(Record):
    """One row of the comparison; a figure that was not measured is None. "Plain" means plain decoding."""

    method: str
    title: str = ""
    lossy: bool = False
    prompts: int = 0  # Prompts that were decoded, ...
    of: int = 0  # ... of this number.
    tokens: int = 0
    seconds: float = 0.0
    tok_s: float | None = None
    ratio: float | None = None  # Speed ÷ plain speed.
    ratio_interval: tuple[float, float] | None = None
    acceptance_rate: float | None = None
    mean_generated_length: float | None = None
    passes_per_token: float | None = None  # Passes of the target, without prefill.
    expected_ratio: float | None = None  # E(Spd.) of the rounds, by measured costs.
    published_ratio: float | None = None  # E(Spd.) with c = 1 - r of the layer set (SWIFT Eq. 6).
    identical: int | None = None  # Prompts whose tokens equal the plain ones.
    perplexity: float | None = None  # Of the output, under the target.
    perplexity_ratio: float | None = None  # Perplexity ÷ plain perplexity.
    perplexity_interval: tuple[float, float] | None = None
    early_share: float | None = None  # Share of tokens that were accepted from an intermediate layer.
    rejected_share: float | None = None  # Share of verified early predictions that the last layer contradicted.
    extra_parameters: int | None = None
    extra_bytes: int | None = None  # Tensors other than the target's weights and KV buffer.
    joules_per_token: float | None = None
    quality: float | None = None  # Mean of the data set's measure.
    quality_interval: tuple[float, float] | None = None
    pass_at_10: float | None = None  # Mean pass@10, if there are at least 10 samples.
    settings: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None  # Why figures are missing, or cover only some of the prompts.

    def unmeasured(self, n_prompts: int, reason: str) -> Figures:
        """Return the row of a method that decoded none of the prompts."""
        return replace(self, of=n_prompts, reason=reason, extra_parameters=None, extra_bytes=None)


def figures(
    base_row: Figures,
    method_runs: Runs,
    plain_runs: Runs,
    n_prompts: int,
    nll: NLL | None,
    keeps_tokens: bool = True,
    predicts_early: bool = False,
    samples: int = 1,
    costs: CostProfile | None = None,
) -> Figures:
    """Fill in a method's row from its runs and those of plain decoding.

    Args: base_row: the row with the fields that are known without running the method. nll: None: no perplexity.
          keeps_tokens: the method emits plain decoding's tokens, even when sampling from the same seed. predicts_early:
          its drafts are predictions at an intermediate layer. samples: number of consecutive completions of one prompt.
          They are correlated, so intervals count them as one. costs: of passes with its layer set, if it has one.
    """
    numbers = [number for number in method_runs.by_prompt if number in plain_runs.by_prompt]
    if not numbers:
        return base_row.unmeasured(n_prompts, method_runs.error or "interrupted before its first prompt was done")
    runs, matching_plain = [method_runs.by_prompt[i] for i in numbers], [plain_runs.by_prompt[i] for i in numbers]
    timings, plain_timings = [run.timed for run in runs], [run.timed for run in matching_plain]
    n_tokens = sum(run.tokens for run in timings)
    joules = [run.joules for run in runs if run.joules is not None]
    total_joules = sum(joules) if len(joules) == len(runs) else 0.0
    n_identical = sum(run.token_ids == plain.token_ids for run, plain in zip(runs, matching_plain, strict=True))
    return replace(
        base_row,
        prompts=len(numbers),
        of=n_prompts,
        tokens=n_tokens,
        seconds=sum(run.seconds for run in timings),
        tok_s=speed(timings),
        ratio=speed_ratio(timings, plain_timings),
        ratio_interval=speed_interval(
            _sum_samples(numbers, timings, samples), _sum_samples(numbers, plain_timings, samples)
        ),
        **_decoding_figures([run.completion for run in runs if run.completion is not None], predicts_early, costs),
        identical=n_identical if keeps_tokens else None,
        **_perplexities(numbers, method_runs, plain_runs, nll, samples) if nll else {},
        joules_per_token=total_joules / n_tokens if total_joules and n_tokens else None,
        reason=method_runs.error,
    )


def qualities(scores: Mapping[int, float], samples: int) -> dict[str, Any]:
    """Return quality figures from the scores (0 to 1) by answer number; a prompt's samples have consecutive numbers."""
    scores_by_prompt: dict[int, list[float]] = {}
    for number, score in scores.items():
        scores_by_prompt.setdefault(number // samples, []).append(score)
    # A slow method that stopped early may lack samples of its last prompt: leave that prompt out.
    complete = [prompt_scores for prompt_scores in scores_by_prompt.values() if len(prompt_scores) == samples]
    if not complete:
        return {}
    score_means = np.array([[sum(prompt_scores) / samples, 1.0] for prompt_scores in complete])
    interval = jackknife_interval(score_means, lambda mean_sums: np.asarray(mean_sums[..., 0] / mean_sums[..., 1]))
    pass_at_k = None
    if samples >= K and all(score in (0.0, 1.0) for prompt_scores in complete for score in prompt_scores):
        pass_at_k = sum(pass_at(K, samples, round(sum(prompt_scores))) for prompt_scores in complete) / len(complete)
    return {
        "quality": float(score_means[:, 0].mean()),
        "quality_interval": interval and (max(0.0, interval[0]), min(1.0, interval[1])),
        "pass_at_10": pass_at_k,
    }


def _sum_samples(numbers: Sequence[int], values: Sequence[S], samples: int) -> list[S]:
    """Return the values of the answers with these numbers, summed over each prompt's samples."""
    sums: dict[int, S] = {}
    for number, value in zip(numbers, values, strict=True):
        prompt_number = number // samples
        sums[prompt_number] = sums[prompt_number] + value if prompt_number in sums else value
    return list(sums.values())


def _perplexities(
    numbers: Sequence[int], method_runs: Runs, plain_runs: Runs, nll: NLL, samples: int
) -> dict[str, Any]:
    """Return the perplexity of the output and its ratio to plain decoding's, with an interval over prompts."""
    both_runs = method_runs.by_prompt, plain_runs.by_prompt
    # Columns: nats and tokens of the method, nats and tokens of plain decoding.
    rows = np.array(
        [[value for runs in both_runs for value in (nll(i, runs[i].token_ids), runs[i].timed.tokens)] for i in numbers]
    )

    def log_ratio(sums: Array) -> Array:
        """Return the differences in nats per token of sums (..., 4) of the columns."""
        return np.asarray(sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3])

    totals = rows.sum(axis=0)
    if not totals[1::2].all():
        return {}
    return {
        "perplexity": math.exp(totals[0] / totals[1]),
        "perplexity_ratio": math.exp(log_ratio(totals)),
        "perplexity_interval": ratio_interval(np.array(_sum_samples(numbers, list(rows), samples)), log_ratio),
    }


def _decoding_figures(
    completions: Sequence[Completion], predicts_early: bool, costs: CostProfile | None
) -> dict[str, Any]:
    """Return the figures from the decoding loop's counters; all are None without completions of this package."""
    n_drafted = sum(completion.drafted for completion in completions)
    n_accepted = sum(completion.accepted for completion in completions)
    n_rejected = sum(completion.refused for completion in completions)
    n_passes = sum(completion.target_passes for completion in completions)
    n_decoded = sum(completion.n_decoded for completion in completions)
    has_early = predicts_early and n_decoded > 0
    layer_sets = {completion.layer_set for completion in completions if not completion.lossy}
    layer_set = layer_sets.pop() if len(layer_sets) == 1 else None
    published_ratio = None
    if layer_set is not None and not layer_set.formats and n_accepted and n_passes:
        published_ratio = published_speedup(layer_set, n_decoded / n_passes, n_accepted / n_drafted)
    return {
        "acceptance_rate": n_accepted / n_drafted if n_drafted else None,
        "mean_generated_length": n_decoded / n_passes if n_passes else None,
        "expected_ratio": expected_of(costs, completions),
        "published_ratio": published_ratio,
        "passes_per_token": n_passes / n_decoded if n_decoded else None,
        "early_share": n_accepted / n_decoded if has_early else None,
        "rejected_share": n_rejected / (n_accepted + n_rejected) if has_early and n_drafted else None,
    }


def best_of(rows: Sequence[Figures]) -> Figures | None:
    """Return the fastest lossless method whose ratio's interval is above 1; None if plain decoding is the best."""
    faster_rows = [
        row for row in rows if not row.lossy and row.ratio_interval is not None and row.ratio_interval[0] > 1
    ]
    return max(faster_rows, key=lambda row: row.ratio or 0.0, default=None)


def by_ratio(rows: Sequence[Figures]) -> list[Figures]:
    """Return the rows sorted by ratio, the fastest first, rows without figures last."""
    return sorted(rows, key=lambda row: -math.inf if row.ratio is None else row.ratio, reverse=True)


def with_plan(
    report: Mapping[str, Any],
    rows: Sequence[Figures],
    recipes: Mapping[str, Recipe],
    fingerprint: str,
    store: Store | None,
) -> dict[str, Any]:
    """Return the report with the plan that follows from it; store both if there is a store.

    An interrupted comparison makes no plan. If the stored `best` plan has a method that did not run here and was
    measured to be faster, it stays `best`.
    """
    plan = None if report["interrupted"] else plan_of(report, rows, recipes)
    version, kept_plan = None, None
    measured_methods = [row.method for row in rows if row.ratio is not None]
    if store is not None and plan is not None:
        kept_plan = _find_better_plan(report, fingerprint, plan, measured_methods, store)
        version = store.add_plan(fingerprint, report["task"], plan, promote=kept_plan is None).version
    full_report = {
        **report,
        "plan": None if plan is None else _plan_json(plan, version),
        "standing": None if kept_plan is None else _plan_json(kept_plan.plan, kept_plan.version),
        "stored": store is not None and bool(measured_methods),
    }
    if store is not None and measured_methods:
        task_device_dtype = report["task"], report["device"], report["dtype"]
        store.add_comparison(fingerprint, *task_device_dtype, full_report, report["created_at"])
    return full_report


def plan_of(report: Mapping[str, Any], rows: Sequence[Figures], recipes: Mapping[str, Recipe]) -> Plan:
    """Return the plan of the best lossless method of this package with its parts, or of plain decoding."""
    best = best_of([row for row in rows if row.method in METHODS])
    if best is None:
        return Plan(BASE, verdict="plain", device=report["device"], dtype=report["dtype"])
    recipe = recipes[best.method]
    draft_model = report["draft_model"] if METHODS[best.method].drafts_with_model else None
    return Plan(
        best.method,
        recipe.layer_set,
        best.settings,
        recipe.learned,
        draft_model,
        verdict="use",
        measured_speedup=best.ratio,
        measured_interval=best.ratio_interval,
        acceptance_rate=best.acceptance_rate,
        mean_generated_length=best.mean_generated_length,
        device=report["device"],
        dtype=report["dtype"],
    )


def _find_better_plan(
    report: Mapping[str, Any], fingerprint: str, plan: Plan, measured_methods: Sequence[str], store: Store
) -> FoundPlan | None:
    """Return the stored plan for this task, device and dtype if it is faster than `plan` and its method did not run."""
    try:
        stored_plan = store.lookup(fingerprint, report["task"], report["device"], report["dtype"])
    except LayerSetNotFound:
        return None
    is_faster = (stored_plan.plan.measured_speedup or 1.0) > (plan.measured_speedup or 1.0)
    is_better = (
        stored_plan.fallback is None
        and stored_plan.plan.verdict == "use"
        and is_faster
        and stored_plan.plan.method not in measured_methods
    )
    return stored_plan if is_better else None


def _plan_json(plan: Plan, version: int | None) -> dict[str, Any]:
    return {"method": plan.method, "version": version, **plan.figures}
