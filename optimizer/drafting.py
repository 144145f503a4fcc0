"""Choice of how a task drafts: method, weight format, stop threshold, draft length and branching."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

from ..core.costs import CostProfile, CostSource
from ..core.errors import SettingsError
from ..core.events import FormatTried, PhaseChanged
from ..core.layer_sets import LayerSet, SubLayer, searchable
from ..core.settings import AUTO, STORED, Branching, SwiftSettings
from ..core.types import Prompt
from ..decoding.draft_models import SkippedTarget
from ..decoding.engine import alone, side_by_side
from ..decoding.events import Prefilled, Round, Turn
from ..decoding.methods import Method, swift
from ..decoding.methods.adaptive import AdaptiveSettings, adaptive
from ..decoding.session import Session
from ..models.runtime import Runtime
from .evaluation import WindowScore, adaptive_speedup, score_window, swift_speedup
from .verdict import ERROR_RATE, Timed, speed, speed_interval

ADAPTIVE = AdaptiveSettings(draft_format=STORED)  # STORED: take the format of each sub-layer from its layer set.

MIN_WINDOWS = 2  # Minimum windows scored before the draft settings are searched.
MIN_GAIN = 1.01  # Minimum ratio of expected speedups for replacing the settings in use.
MAX_WINDOWS = 12  # Maximum windows of the set in use that are kept for replays.
BRANCHING_WIDTHS = (1, 2, 3, 5, 10)  # Branching widths to try, at the lowest confidence.
THRESHOLDS = [percent / 100 for percent in range(5, 96)]  # Stop thresholds to try.
# Coordinate sweeps. Two reach 0.9999 of the best known speedup on average and 0.995 at worst, over 100 random replays.
# Optuna's TPE with 48 trials reached 0.996 and 0.937.
N_SWEEPS = 2

CANDIDATES = ("int4", "int8")  # Draft formats to try on a CPU, the cheapest first.
GPU_CANDIDATES = ("int4", "fp8", "int8")
# Expected speedup from which no further format is tried: 8-bit drafts, which read half of the bytes, hardly reach it.
SUFFICIENT_SPEEDUP = 2.5
MIN_SPEEDUP = 1.05  # Minimum expected speedup that justifies the memory of quantised copies.
N_PROMPTS, N_WINDOWS = 2, 2  # Prompts on which each format is tried, and windows per prompt.

# Formats are timed if their estimated speedups differ by less than this factor. For SmolLM2 the estimate was 1.15 times
# the measured speedup with 4 bits, and 1.26 times with 8 bits.
MAX_SPEEDUP_RATIO = 1.25
# Minimum and maximum prompts on which formats are timed, and their share of the stream. Whole completions are timed,
# because the lead can grow with the length: for SmolLM2 int4 led int8 by 2 % on the first 64 of 96 tokens, and by 9 %
# on all 96.
MIN_TIMED_PROMPTS, MAX_TIMED_PROMPTS, TIMED_PROMPT_SHARE = 3, 10, 0.25
STANDARD_ERROR = 0.32  # Error probability of an interval of ±1 standard error.

FormatEvent = FormatTried | PhaseChanged  # Progress events while formats are tried.
# Called with names of formats; makes the copies of the weights in them and returns costs that include them.
MeasureFormats = Callable[..., CostProfile]


def drafting_with(draft: SkippedTarget, settings: SwiftSettings, costs: CostSource | None) -> Method:
    """Return the method of `settings`, drafting with `draft`; SWIFT if adaptive drafts lack the costs they need."""
    if settings.method == "adaptive" and costs is not None:
        return adaptive(draft, costs, ADAPTIVE)
    return swift(draft, settings)


def starting_set(
    whole: LayerSet, settings: SwiftSettings, n_skipped: int, chooses_size: bool, sub_layers: Sequence[SubLayer]
) -> LayerSet:
    """Return a search's first set.

    It skips `n_skipped` evenly spaced sub-layers. If the strategy chooses their number and drafts are quantised, it
    skips nothing.
    """
    if chooses_size and settings.draft_format != STORED:
        return whole.filled(settings.draft_format)
    if len(sub_layers) == len(searchable(whole.n_layers)):
        return LayerSet.uniform(whole.n_layers, n_skipped).filled(settings.draft_format)
    by_depth = sorted(sub_layers, key=lambda sub_layer: sub_layer[1])
    evenly_spaced = (by_depth[math.floor((j + 0.5) * len(by_depth) / n_skipped)] for j in range(n_skipped))
    return whole.skipping(evenly_spaced).filled(settings.draft_format)


def branching_of(widest: int) -> Branching:
    """Return the numbers of candidate tokens by confidence, in SWIFT's proportions; SWIFT's `widest` is 10."""
    return ((0.5, widest), (0.8, math.ceil(widest / 2)), (0.95, math.ceil(widest * 0.3)), (1.0, 1))


def search_drafting(
    scores: Sequence[WindowScore], layer_set: LayerSet, settings: SwiftSettings, costs: CostProfile, max_length: int
) -> tuple[SwiftSettings, float, float]:
    """Find the branching, stop threshold and draft length with the highest expected speedup, by coordinate search.

    Args:    scores: predictions of the layer set over some windows. max_length: maximum draft steps per round.
    Returns: the best settings, or `settings` if the gain is below `MIN_GAIN`; their expected speedup; the expected
             speedup of `settings`.
    """

    @cache
    def expected(candidate: SwiftSettings) -> float:
        return swift_speedup(scores, layer_set, candidate, costs)

    best_settings = replace(settings, stop_threshold=0.6, max_draft_length=max_length, branching=branching_of(3))
    choices: tuple[tuple[str, Sequence[Any]], ...] = (
        ("branching", [branching_of(widest) for widest in BRANCHING_WIDTHS]),
        ("stop_threshold", THRESHOLDS),
        ("max_draft_length", range(1, max_length + 1)),
    )
    for name, values in choices * N_SWEEPS:
        best_settings = max(best_settings, *(replace(best_settings, **{name: value}) for value in values), key=expected)
    if expected(best_settings) < expected(settings) * MIN_GAIN:
        best_settings = settings
    return best_settings, expected(best_settings), expected(settings)


def choose_format(
    session: Session,
    prompts: Sequence[Prompt],
    window: int,
    costs: CostProfile,
    measure: MeasureFormats,
) -> Generator[FormatEvent, None, tuple[str, CostProfile]]:
    """Choose the weight format with which drafts that skip nothing are fastest; drop the copies in other formats.

    Formats are compared by expected speedup; those that are close are timed.

    Args:    window: tokens of a window. costs: without any format.
    Returns: the format, or "stored" if no format is worth its memory; the costs including it.
    """
    runtime = session.runtime
    estimates = yield from _estimate_formats(session, prompts[:N_PROMPTS], window, measure)
    if not estimates:
        return STORED, costs
    methods = [
        adaptive(SkippedTarget(runtime.whole.filled(format_name)), format_costs, ADAPTIVE)
        for format_name, (_, _, format_costs) in estimates.items()
    ]
    phase = PhaseChanged("", "profile", f"timing drafts in {' and '.join(estimates)}")
    runs = yield from time_methods(session, prompts, methods, phase)
    best_format = max(estimates, key=lambda format_name: estimates[format_name][0])
    if runs:
        for (_, event, _), format_runs in zip(estimates.values(), runs, strict=True):
            yield replace(event, tok_s=speed(format_runs))
        best_format = list(estimates)[unbeaten_methods(runs)[0]]
    _drop_copies(runtime, estimates.keys() - {best_format})
    return best_format, estimates[best_format][2]


def _estimate_formats(
    session: Session, prompts: Sequence[Prompt], window: int, measure: MeasureFormats
) -> Generator[FormatEvent, None, dict[str, tuple[float, FormatTried, CostProfile]]]:
    """Return the formats that may be the fastest: name -> (expected speedup, event, costs including the format)."""
    runtime = session.runtime
    estimates: dict[str, tuple[float, FormatTried, CostProfile]] = {}
    for format_name in GPU_CANDIDATES if runtime.device.type == "cuda" else CANDIDATES:
        draft = runtime.whole.filled(format_name)
        try:
            format_costs = measure(format_name)
            score = yield from _score_draft(session, prompts, window, format_name, draft, format_costs)
        except (RuntimeError, MemoryError, SettingsError) as error:
            # The device has no kernel for the format, or not enough memory.
            yield FormatTried(format_name, None, None, (str(error) or type(error).__name__).splitlines()[0])
            _drop_copies(runtime, {format_name})
            continue
        speedup = adaptive_speedup(score, draft, format_costs)
        event = FormatTried(format_name, speedup, score.matchness)
        yield event
        estimates[format_name] = speedup, event, format_costs
        min_speedup = max(MIN_SPEEDUP, max(speedup for speedup, _, _ in estimates.values()) / MAX_SPEEDUP_RATIO)
        close_estimates = {name: estimate for name, estimate in estimates.items() if estimate[0] > min_speedup}
        _drop_copies(runtime, estimates.keys() - close_estimates.keys())
        estimates = close_estimates
        if speedup >= SUFFICIENT_SPEEDUP:
            break
    return estimates


def _drop_copies(runtime: Runtime, formats: Iterable[str]) -> None:
    for format_name in formats:
        runtime.drop_copies(format_name)


def time_methods(
    session: Session, prompts: Sequence[Prompt], methods: Sequence[Method], phase: PhaseChanged
) -> Generator[PhaseChanged, None, list[list[Timed]]]:
    """Decode the first turns of the same prompts with each method in turn, until one method is significantly faster.

    Args:    phase: the event that reports progress; each prompt's number is added to its detail.
    Returns: each method's runs without their prefill; [] for a single method, or for too few prompts.
    """
    n_prompts = max(MIN_TIMED_PROMPTS, min(MAX_TIMED_PROMPTS, int(TIMED_PROMPT_SHARE * len(prompts))))
    if len(methods) < 2 or len(prompts) < n_prompts:
        return []
    runs: list[list[Timed]] = [[] for _ in methods]
    for prompt_index, prompt in enumerate(prompts[:n_prompts]):
        first_turn = replace(prompt, turns=prompt.turns[:1])
        order = range(len(methods))
        yield replace(phase, detail=f"{phase.detail}, prompt {prompt_index + 1}")
        for method_index in reversed(order) if prompt_index % 2 else order:
            with closing(side_by_side([session.request(first_turn, methods[method_index])])) as events:
                completions = [event.completion for event in events if isinstance(event, Turn)]
            runs[method_index].append(Timed(completions[0].n_decoded, completions[0].timings.decode_s))
        if prompt_index + 1 >= MIN_TIMED_PROMPTS and len(unbeaten_methods(runs, ERROR_RATE)) == 1:
            break
    return runs


def unbeaten_methods(runs: Sequence[Sequence[Timed]], error: float = STANDARD_ERROR) -> list[int]:
    """Return the indices of the methods that no other method beats significantly on the same prompts; at least one.

    If several remain, callers use the first: it needs less memory, or the search rated it higher.
    """

    def is_faster(fast: Sequence[Timed], slow: Sequence[Timed]) -> bool:
        interval = speed_interval(fast, slow, error)
        return interval is not None and interval[0] > 1

    unbeaten = [
        index
        for index, method_runs in enumerate(runs)
        if not any(is_faster(other_runs, method_runs) for other_runs in runs if other_runs is not method_runs)
    ]
    return unbeaten or [0]


def prepare_draft_format(
    session: Session,
    prompts: Sequence[Prompt],
    settings: SwiftSettings,
    measure: MeasureFormats,
) -> Generator[FormatEvent, None, tuple[SwiftSettings, CostProfile]]:
    """Make the copies of the weights in the settings' draft format, which is chosen first if it is "auto".

    Returns: the settings with that format, and the costs including it.
    """
    format_name = settings.draft_format
    if format_name == AUTO:
        format_name, costs = yield from choose_format(session, prompts, settings.context_window, measure(), measure)
    else:
        costs = measure(format_name)
    session.runtime.copies.prepare(session.runtime.whole.filled(format_name))
    return replace(settings, draft_format=format_name), costs


def _score_draft(
    session: Session, prompts: Sequence[Prompt], window: int, format_name: str, draft: LayerSet, costs: CostProfile
) -> Generator[PhaseChanged, None, WindowScore]:
    """Return the draft's predictions over several windows of the model's completions, joined to one window."""
    scores: list[WindowScore] = []
    # A window is scored after a round, which may exceed the window's end by a whole draft.
    max_scored_tokens = N_WINDOWS * (window + ADAPTIVE.max_draft_length) + 1
    for prompt in prompts:
        max_new_tokens = min(session.room(prompt), max_scored_tokens)
        first_turn = replace(prompt, turns=prompt.turns[:1], max_new_tokens=max_new_tokens)
        method = adaptive(SkippedTarget(draft), costs, ADAPTIVE)
        n_scored, prompt_scores = 0, list[WindowScore]()
        with closing(side_by_side([session.request(first_turn, method, scratch_rows=window)])) as events:
            for event in events:
                if isinstance(event, Prefilled | Round) and event.context.finish is None:
                    if len(event.context.generated) - n_scored >= window:
                        n_scored = len(event.context.generated)
                        prompt_scores += alone(score_window(event.context, [draft], window))
                        n_windows = len(scores) + len(prompt_scores)
                        yield PhaseChanged("", "profile", f"trying {format_name} drafts, window {n_windows}")
                    if len(prompt_scores) == N_WINDOWS:
                        break
        scores += prompt_scores
    if not scores:  # All answers were shorter than a window: assume a perfect draft.
        return WindowScore((0,), (1.0,))
    ranks, confidences = zip(*((score.ranks, score.confidences) for score in scores), strict=True)
    return WindowScore(tuple(chain(*ranks)), tuple(chain(*confidences)), scores[0].reads_late)
