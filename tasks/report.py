"""Alternating runs of methods, the report that compares them with plain decoding, and the resulting plan."""

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
SLOWEST = 2.0  # A method stops once it would take this many times as long as plain decoding takes for all prompts.
LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens of hf-lookup, as in the documentation of transformers.
FEWEST = 2  # Prompts that even a slow method decodes: a confidence interval needs two.

S = TypeVar("S", Timed, Array)
Decoded = tuple[tuple[int, ...], Completion | None]  # Token ids; the Completion is None for other engines' decoding.
Decode = Callable[[Prompt], Decoded]
NLL = Callable[[int, tuple[int, ...]], float]  # (prompt number, token ids) -> negative log-likelihood under the target.
OnRun = Callable[[str, int, int, Timed], None]  # (method, prompt's index, number of prompts, timings).


@dataclass(frozen=True, slots=True)
class Run:
    """A prompt decoded with a method; its time includes the prefill."""

    token_ids: tuple[int, ...]
    seconds: float
    completion: Completion | None = None
    joules: float | None = None

    @property
    def timed(self) -> Timed:
        return Timed(len(self.token_ids), self.seconds)


@dataclass(slots=True)
class Runs:
    """A method's runs by prompt number; `error` says why it stopped early."""

    name: str
    by_prompt: dict[int, Run] = field(default_factory=dict)
    error: str | None = None

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.by_prompt.values())


def decoder(session: Session, drafter: Method | Search) -> Decode:
    """Return what decodes prompts of one turn with a method, or with a search's drafts while it goes on."""

    def decode(prompt: Prompt) -> Decoded:
        request_work = (
            drafter.request(session, prompt) if isinstance(drafter, Search) else session.request(prompt, drafter)
        )
        completion = alone(request_work)[0].completion
        return completion.token_ids, completion

    return decode


def peer(name: str, session: Session, draft: Runtime | None) -> Decode:
    """Return transformers' own decoding, of the PEERS; `draft` drafts for "hf-assisted"."""
    options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if name == "hf-lookup" else {}
    if name == "hf-assisted" and draft is not None:
        options = {"assistant_model": draft.hf_model}

    def decode(prompt: Prompt) -> Decoded:
        return hf_generate(session, session.encode(prompt), session.room(prompt), prompt.stop, **options), None

    return decode


class Interleaved:
    """Run methods alternately on the same prompts, so that disturbances of the machine affect all equally.

    The first method is the base; the order rotates from prompt to prompt. A method that takes more than SLOWEST times
    the base's time stops early, after at least FEWEST prompts. A method that fails stops, and its error is recorded; an
    error of the base is raised. With `complete` every method decodes every prompt, and any error is raised.
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
        """Warm up, then decode everything; return False if Ctrl-C came before the end. Finished runs are in `runs`."""
        names = [*self.methods]
        # Warm up with a short completion: one-time allocations must not count in the timings.
        warm_up = replace(self.prompts[0], max_new_tokens=WARM_UP_TOKENS)
        try:
            for name in names:
                self._run_guarded(name, partial(self.methods[name], warm_up))
            for number, prompt in enumerate(self.prompts):
                first_method = number % len(names)
                for name in [*names[first_method:], *names[:first_method]]:
                    if len(self.runs[name].by_prompt) < self.n_affordable(name):
                        self._run_guarded(name, partial(self._run_prompt, name, number, prompt))
        except KeyboardInterrupt:
            return False
        return True

    def n_affordable(self, name: str) -> int:
        """Return how many prompts a method may decode, given its speed so far."""
        method_runs, base_runs = self.runs[name], self.runs[self.base]
        if self.complete or not method_runs.by_prompt or not base_runs.by_prompt or name == self.base:
            return len(self.prompts)
        per_prompt_s = method_runs.seconds / len(method_runs.by_prompt)
        allowed_s = SLOWEST * len(self.prompts) * base_runs.seconds / len(base_runs.by_prompt)
        return max(FEWEST, int(allowed_s / per_prompt_s))

    def _run_guarded(self, name: str, call: Callable[[], object]) -> None:
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
    """One row of the comparison; None where nothing was measured.

    `prompts` of `of` were decoded; `ratio` and `identical` are against plain decoding of the same prompts. α, M and
    `passes_per_token` (of the target, without prefill) are over all completions. `perplexity` is that of the output
    under the target itself; its ratio and the ratio's interval over prompts are to plain decoding's. `early_share`:
    share of tokens accepted from an intermediate layer; `rejected_share`: share of the verified early predictions that
    the last layer contradicted. `quality` is the mean of the data set's measure over the prompts, `pass_at_10` that of
    pass@10 where there are as many samples. `extra_bytes`: tensors other than the target's weights and buffer.
    `expected_ratio` is E(Spd.) of the rounds by measured costs, `published_ratio` with a layer set's c = 1 - r (SWIFT
    Eq. 6). `reason`: why there are no figures, or not of all prompts.
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
    expected_ratio: float | None = None
    published_ratio: float | None = None
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
        return replace(self, of=n_prompts, reason=reason, extra_parameters=None, extra_bytes=None)


def figures(
    unmeasured_row: Figures,
    method_runs: Runs,
    base_runs: Runs,
    n_prompts: int,
    nll: NLL | None,
    keeps_tokens: bool = True,
    predicts_early: bool = False,
    samples: int = 1,
    costs: CostProfile | None = None,
) -> Figures:
    """Fill in a method's row from its runs and those of plain decoding.

    Args: unmeasured_row: the row with what is known without running the method. nll: None leaves the perplexity out.
          keeps_tokens: the method emits plain decoding's tokens, also when sampling from the same seed.
          predicts_early: its drafts are predictions at an intermediate layer. samples: neighbours that are completions
          of one prompt: they are alike, and intervals over them would be too narrow. costs: of the passes of its
          layer set, where it has one.
    """
    shared_numbers = [number for number in method_runs.by_prompt if number in base_runs.by_prompt]
    if not shared_numbers:
        return unmeasured_row.missing(n_prompts, method_runs.error or "interrupted before its first prompt was done")
    runs, plain_runs = (
        [method_runs.by_prompt[i] for i in shared_numbers],
        [base_runs.by_prompt[i] for i in shared_numbers],
    )
    timings, plain_timings = [run.timed for run in runs], [run.timed for run in plain_runs]
    n_tokens = sum(run.tokens for run in timings)
    joules = [run.joules for run in runs if run.joules is not None]
    total_joules = sum(joules) if len(joules) == len(runs) else 0.0
    return replace(
        unmeasured_row,
        prompts=len(shared_numbers),
        of=n_prompts,
        tokens=n_tokens,
        seconds=sum(run.seconds for run in timings),
        tok_s=speed(timings),
        ratio=speed_ratio(timings, plain_timings),
        ratio_interval=speed_interval(
            _by_prompt(shared_numbers, timings, samples), _by_prompt(shared_numbers, plain_timings, samples)
        ),
        **_counts([run.completion for run in runs if run.completion is not None], predicts_early, costs),
        identical=sum(run.token_ids == plain_run.token_ids for run, plain_run in zip(runs, plain_runs, strict=True))
        if keeps_tokens
        else None,
        **_perplexities(shared_numbers, method_runs, base_runs, nll, samples) if nll else {},
        joules_per_token=total_joules / n_tokens if total_joules and n_tokens else None,
        reason=method_runs.error,
    )


def qualities(scores: Mapping[int, float], samples: int) -> dict[str, Any]:
    """Return quality figures from answer number -> score (0 to 1); a prompt's samples have consecutive numbers."""
    by_prompt: dict[int, list[float]] = {}
    for number, score in scores.items():
        by_prompt.setdefault(number // samples, []).append(score)
    complete = [
        prompt_scores for prompt_scores in by_prompt.values() if len(prompt_scores) == samples
    ]  # Leave out a prompt some of whose samples are missing because a slow method stopped early.
    if not complete:
        return {}
    score_means = np.array([[sum(prompt_scores) / samples, 1.0] for prompt_scores in complete])
    interval = jackknife_interval(score_means, lambda mean_sums: np.asarray(mean_sums[..., 0] / mean_sums[..., 1]))
    has_pass_at_k = samples >= K and all(score in (0.0, 1.0) for prompt_scores in complete for score in prompt_scores)
    return {
        "quality": float(score_means[:, 0].mean()),
        "quality_interval": interval and (max(0.0, interval[0]), min(1.0, interval[1])),
        "pass_at_10": sum(pass_at(K, samples, round(sum(prompt_scores))) for prompt_scores in complete) / len(complete)
        if has_pass_at_k
        else None,
    }


def _by_prompt(numbers: Sequence[int], values: Sequence[S], samples: int) -> list[S]:
    """Return the sums over each prompt's samples."""
    sums_by_prompt: dict[int, S] = {}
    for number, sample in zip(numbers, values, strict=True):
        prompt_number = number // samples
        sums_by_prompt[prompt_number] = (
            sums_by_prompt[prompt_number] + sample if prompt_number in sums_by_prompt else sample
        )
    return list(sums_by_prompt.values())


def _perplexities(
    shared_numbers: Sequence[int], method_runs: Runs, base_runs: Runs, nll: NLL, samples: int
) -> dict[str, Any]:
    """Return the perplexity of the output and its ratio to plain decoding's, with an interval over prompts."""
    both_runs = method_runs.by_prompt, base_runs.by_prompt
    rows = np.array(
        [
            [number for runs in both_runs for number in (nll(i, runs[i].token_ids), runs[i].timed.tokens)]
            for i in shared_numbers
        ]
    )

    def log_ratio(sums_of_both: Array) -> Array:
        """Return the difference in nats per token, from an array (..., 4) of both methods' sums of nats and tokens."""
        return np.asarray(sums_of_both[..., 0] / sums_of_both[..., 1] - sums_of_both[..., 2] / sums_of_both[..., 3])

    totals = rows.sum(axis=0)
    if not totals[1::2].all():
        return {}
    return {
        "perplexity": math.exp(totals[0] / totals[1]),
        "perplexity_ratio": math.exp(log_ratio(totals)),
        "perplexity_interval": ratio_interval(np.array(_by_prompt(shared_numbers, list(rows), samples)), log_ratio),
    }


def _counts(completions: Sequence[Completion], predicts_early: bool, costs: CostProfile | None) -> dict[str, Any]:
    """Return figures from our decoding loop's counters; an empty result for other engines' decoding."""
    n_drafted, n_accepted = (
        sum(completion.drafted for completion in completions),
        sum(completion.accepted for completion in completions),
    )
    n_passes, n_decoded = (
        sum(completion.target_passes for completion in completions),
        sum(completion.n_decoded for completion in completions),
    )
    n_refused = sum(completion.refused for completion in completions)
    has_early = predicts_early and n_decoded > 0
    sets = {completion.layer_set for completion in completions if not completion.lossy}
    layer_set = sets.pop() if len(sets) == 1 else None
    published = None
    if layer_set is not None and not layer_set.formats and n_accepted and n_passes:
        published = published_speedup(layer_set, n_decoded / n_passes, n_accepted / n_drafted)
    return {
        "acceptance_rate": n_accepted / n_drafted if n_drafted else None,
        "mean_generated_length": n_decoded / n_passes if n_passes else None,
        "expected_ratio": expected_of(costs, completions),
        "published_ratio": published,
        "passes_per_token": n_passes / n_decoded if n_decoded else None,
        "early_share": n_accepted / n_decoded if has_early else None,
        "rejected_share": n_refused / (n_accepted + n_refused) if has_early and n_drafted else None,
    }


def best_of(rows: Sequence[Figures]) -> Figures | None:
    """Return the fastest lossless method whose speed-up's interval lies above 1; None: plain decoding is the plan."""
    faster_rows = [
        row for row in rows if not row.lossy and row.ratio_interval is not None and row.ratio_interval[0] > 1
    ]
    return max(faster_rows, key=lambda row: row.ratio or 0.0, default=None)


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
    version, standing = None, None
    measured_methods = [row.method for row in rows if row.ratio is not None]
    if store is not None and plan is not None:
        standing = _find_standing(report, fingerprint, plan, measured_methods, store)
        version = store.add_plan(fingerprint, report["task"], plan, promote=standing is None).version
    full_report = {
        **report,
        "plan": None if plan is None else _plan_json(plan, version),
        "standing": None if standing is None else _plan_json(standing.plan, standing.version),
        "stored": store is not None and bool(measured_methods),
    }
    if store is not None and measured_methods:
        task_device_dtype = report["task"], report["device"], report["dtype"]
        store.add_comparison(fingerprint, *task_device_dtype, full_report, report["created_at"])
    return full_report


def plan_of(report: Mapping[str, Any], rows: Sequence[Figures], recipes: Mapping[str, Recipe]) -> Plan:
    """Return the plan: the best lossless method of this package with its parts, or plain decoding."""
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


def _find_standing(
    report: Mapping[str, Any], fingerprint: str, plan: Plan, measured_methods: Sequence[str], store: Store
) -> FoundPlan | None:
    """Return the stored plan to keep: same task, device and dtype, faster, and of a method that did not run."""
    try:
        stored_plan = store.lookup(fingerprint, report["task"], report["device"], report["dtype"])
    except LayerSetNotFound:
        return None
    is_faster = (stored_plan.plan.measured_speedup or 1.0) > (plan.measured_speedup or 1.0)
    is_kept = (
        stored_plan.fallback is None
        and stored_plan.plan.verdict == "use"
        and is_faster
        and stored_plan.plan.method not in measured_methods
    )
    return stored_plan if is_kept else None


def _plan_json(plan: Plan, version: int | None) -> dict[str, Any]:
    return {"method": plan.method, "version": version, **plan.figures}
