"""Compares ways of tuning one stream: their plans are timed alternately on prompts that none of them has seen.

Every run of a way measures costs and chooses the drafts' format again, as a new process would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from time import perf_counter
from typing import Any

from ..core.costs import CostProfile
from ..core.events import Event, FormatTried, Progress, PromptFinished, TrialsDone
from ..core.layer_sets import LayerSet
from ..core.settings import FORMATS, SwiftSettings, TuningSettings, preset_of
from ..core.types import Prompt
from ..decoding.draft_models import SkippedTarget
from ..decoding.methods import PLAIN, Method
from ..decoding.session import Session
from ..decoding.work import exhaust
from ..models.costs import machine_name, with_formats
from ..optimizer.drafting import drafting_with, prepare_draft_format
from ..optimizer.tuning import Tuner
from ..optimizer.verdict import Timed, faster, speed, speed_interval, speed_ratio
from ..tasks.recipes import stored_costs

SCHEMA = "swiftopt.bench-tune/1"
# Names of tuning variants, the second with a preset's name after it; any other name is a search strategy.
DEFAULT, PRESET = "default", "preset "
MAX_POINTS = 4  # Largest number of a run's plans that are timed, evenly spaced from the first to the last.
N_LAPS = 2  # Timed runs of each prompt with each plan; the fastest counts.
STREAM = "stream"  # Task of all prompts, so that they are tuned as one task.

OnStep = Callable[[str], None]


def settings_of(variant: str, seed: int) -> TuningSettings:
    """Return a variant's settings: the defaults, a preset's, or the defaults with the strategy of that name."""
    if variant == DEFAULT:
        return TuningSettings(seed=seed)
    if variant.startswith(PRESET):
        return TuningSettings(**{**preset_of(variant.removeprefix(PRESET)).tuning, "seed": seed})
    return TuningSettings(strategy=variant, seed=seed)


@dataclass(frozen=True)
class DraftPlan:
    """A layer set and the settings with which a run drafts."""

    layer_set: LayerSet
    settings: SwiftSettings

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for plans that draft identically, whichever run found them."""
        settings = self.settings
        drafting = (
            settings.method,
            settings.stop_threshold,
            settings.max_draft_length,
            settings.branching,
            settings.sampled,
        )
        return self.layer_set, (settings.method,) if settings.method == "adaptive" else drafting


@dataclass
class WayRun:
    """A run of a tuning variant: the plans that it used, each with the seconds of searching before its first use.

    `setup_s`: time of measuring costs and choosing formats. `seconds`: all time of searching, with `setup_s` and
    without `decode_s`.
    """

    way: str
    seed: int
    costs: CostProfile
    setup_s: float = 0.0
    seconds: float = 0.0
    decode_s: float = 0.0
    n_candidates: int = 0
    plans: list[tuple[float, DraftPlan]] = field(default_factory=list)

    def use(self, seconds: float, plan: DraftPlan) -> None:
        """Record that `plan` is in use after `seconds` of searching, unless it drafts as the previous plan does."""
        if not self.plans or plan.key != self.plans[-1][1].key:
            self.plans.append((seconds, plan))

    @property
    def final(self) -> DraftPlan:
        """The last plan of the run."""
        return self.plans[-1][1]

    def to_json(self) -> dict[str, Any]:
        """Return the run and its last plan as JSON values."""
        settings, layer_set = self.final.settings, self.final.layer_set
        return {
            "way": self.way,
            "seed": self.seed,
            "candidates": self.n_candidates,
            "setup_s": round(self.setup_s, 2),
            "search_s": round(self.seconds, 2),
            "decode_s": round(self.decode_s, 2),
            "method": settings.method,
            "draft_format": settings.draft_format,
            "skip_attn": sorted(layer_set.skip_attn),
            "skip_mlp": sorted(layer_set.skip_mlp),
        }


def thin_out(plans: Sequence[tuple[float, DraftPlan]]) -> list[tuple[float, DraftPlan]]:
    """Return at most `MAX_POINTS` plans, evenly spaced, with the first and the last."""
    n = min(len(plans), MAX_POINTS)
    return [plans[round(i * (len(plans) - 1) / max(1, n - 1))] for i in range(n)]


class TuningBench:
    """Tunes with every variant and seed on the first prompts of a stream, and times the plans on other prompts.

    Args: session: greedy decoding. unseen_prompts: the prompts on which plans are timed.
    """

    def __init__(
        self, session: Session, prompts: Sequence[Prompt], unseen_prompts: Sequence[Prompt], model: str, on_step: OnStep
    ) -> None:
        self.session, self.runtime, self.model, self.on_step = session, session.runtime, model, on_step
        self.prompts = [replace(prompt, task=STREAM, turns=prompt.turns[:1]) for prompt in prompts]
        self.unseen = [replace(prompt, turns=prompt.turns[:1]) for prompt in unseen_prompts]
        self.n_positions = max(session.check(prompt) for prompt in [*self.prompts, *self.unseen])

    def run(self, seeds: Mapping[str, int]) -> dict[str, Any]:
        """Return the object that `swiftopt bench tune --json` prints.

        Ctrl-C ends the tuning; the plans of finished runs are then timed.

        Args:   seeds: number of runs of each tuning variant.
        Raises: KeyboardInterrupt: no run has finished.
        """
        runs, interrupted = list[WayRun](), False
        try:
            for seed in range(max(seeds.values())):
                variants = [variant for variant, n in seeds.items() if seed < n]
                shift = seed % len(variants)
                for variant in [*variants[shift:], *variants[:shift]]:
                    runs.append(self.tune_once(variant, seed))
        except KeyboardInterrupt:
            if not runs:
                raise
            interrupted = True
        return {
            "schema": SCHEMA,
            "interrupted": interrupted,
            "device": machine_name(self.runtime),
            "dtype": self.runtime.dtype_name,
            "prompts": len(self.prompts),
            "unseen": len(self.unseen),
            "max_new_tokens": self.session.max_new_tokens,
            **self._judge(runs),
        }

    def tune_once(self, variant: str, seed: int) -> WayRun:
        """Tune the stream once with a variant and a seed."""
        for name in FORMATS:
            self.runtime.drop_copies(name)
        started_s = perf_counter()
        label = f"{variant}, seed {seed}"
        self.on_step(f"{label}: costs and formats")
        plain_costs = stored_costs(self.runtime, None, self.n_positions)

        def costs_with_formats(*formats: str) -> CostProfile:
            return with_formats(self.runtime, plain_costs, formats)

        def show(event: Event) -> None:
            if isinstance(event, FormatTried):
                speed = event.expected if event.tok_s is None else event.tok_s
                self.on_step(f"{label}: {event.format} {'x' if event.tok_s is None else 'tok/s'} {speed or 0:.2f}")

        settings, costs = exhaust(
            prepare_draft_format(self.session, self.prompts, settings_of(variant, seed), costs_with_formats), show
        )
        run = WayRun(variant, seed, costs, setup_s=perf_counter() - started_s)
        decoding_s = prefill_s = scoring_s = 0.0

        def follow(event: Event) -> None:
            nonlocal decoding_s, prefill_s, scoring_s
            if isinstance(event, Progress):  # The time of `tok_s` includes the scoring.
                decoding_s = event.tokens / event.tok_s - scoring_s if event.tok_s else 0.0
            elif isinstance(event, PromptFinished):
                prefill_s += event.completion.prefill_s or 0.0
            elif isinstance(event, TrialsDone):
                run.n_candidates += len(event.trials)
                scoring_s += sum(trial.seconds for trial in event.trials)
                in_use = [trial for trial in event.trials if trial.adopted or trial.origin in ("uniform", "trimmed")]
                for trial in in_use[-1:] if run.plans else in_use[:1]:
                    run.use(perf_counter() - started_s - decoding_s - prefill_s, DraftPlan(trial.layer_set, settings))

        tuner = Tuner(self.session, settings, costs, self.model)
        [final_plan] = exhaust(tuner.serve(self.prompts), follow).values()
        run.decode_s = decoding_s + prefill_s
        run.seconds = perf_counter() - started_s - run.decode_s
        run.use(run.seconds, DraftPlan(*final_plan))
        run.plans = thin_out(run.plans)
        self.on_step(f"{label}: {run.n_candidates} candidates in {run.seconds:.0f} s of searching")
        return run

    def _judge(self, runs: Sequence[WayRun]) -> dict[str, Any]:
        """Time all plans of the runs on the unseen prompts, and return the figures by way and by run."""
        plans = {plan.key: (plan, run.costs) for run in runs for _, plan in run.plans}
        for name in {name for plan, _ in plans.values() for _, name in plan.layer_set.formats}:
            self.runtime.copies.prepare(self.runtime.whole.filled(name))
        methods = [drafting_with(SkippedTarget(plan.layer_set), plan.settings, costs) for plan, costs in plans.values()]
        (plain_timings, *timed_plans), n_equal = self._time_methods([PLAIN, *methods])
        by_key = dict(zip(plans, timed_plans, strict=True))
        fastest = max((by_key[run.final.key] for run in runs), key=speed)
        results: list[dict[str, Any]] = []
        for run in runs:
            final_timings = by_key[run.final.key]
            interval = speed_interval(final_timings, plain_timings)
            curve = [
                [round(elapsed_s, 2), round(speed_ratio(by_key[plan.key], plain_timings), 4)]
                for elapsed_s, plan in run.plans
            ]
            speeds = {
                "tok_s": round(speed(final_timings), 2),
                "ratio": round(speed_ratio(final_timings, plain_timings), 4),
                "ratio_interval": interval and [round(bound, 4) for bound in interval],
                "to_best": round(speed_ratio(final_timings, fastest), 4),
            }
            results.append({**run.to_json(), **speeds, "curve": curve})
        results_by_variant = {
            variant: _summarise([result for result in results if result["way"] == variant])
            for variant in dict.fromkeys(run.way for run in runs)
        }
        about = {"plans": len(methods), "equal": n_equal, "of": N_LAPS * len(methods) * len(self.unseen)}
        return {**about, "plain_tok_s": round(speed(plain_timings), 2), "ways": results_by_variant, "results": results}

    def _time_methods(self, methods: Sequence[Method]) -> tuple[list[list[Timed]], int]:
        """Decode every unseen prompt with all methods, alternately.

        Returns: each method's fastest run of every prompt, and the number of runs with the first method's tokens.
        """
        runs: list[list[Timed]] = [[] for _ in methods]
        n_equal = 0
        for lap_number in range(N_LAPS):
            for number, prompt in enumerate(self.unseen):
                shift = (number * 7) % len(methods)
                order = [*range(shift, len(methods)), *range(shift)]
                ids_by_method = {}
                for method_index in order[::-1] if lap_number % 2 else order:
                    ((_, completion),) = self.session.run(prompt, methods[method_index])
                    ids_by_method[method_index] = completion.token_ids
                    timing = Timed(completion.n_decoded, completion.timings.decode_s)
                    if lap_number:
                        runs[method_index][number] = faster(runs[method_index][number], timing)
                    else:
                        runs[method_index].append(timing)
                n_equal += sum(token_ids == ids_by_method[0] for token_ids in ids_by_method.values()) - 1
                self.on_step(f"timing: prompt {number + 1} of {len(self.unseen)}, lap {lap_number + 1} of {N_LAPS}")
        return runs, n_equal


def _summarise(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean and range of a variant's speedups, and the speeds of its runs relative to the fastest plan."""
    ratios, speed_shares = ([result[name] for result in results] for name in ("ratio", "to_best"))
    return {
        "ratio": round(mean(ratios), 4),
        "ratios": [min(ratios), max(ratios)],
        "to_best": {"worst": min(speed_shares), "mean": round(mean(speed_shares), 4)},
    }
