"""Choice of a task's drafting method, format of weights, stop threshold and branching."""

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
from ..core.settings import AUTO, STORED, Branching, SwiftSettings
from ..core.types import LayerSet, Prompt, n_skipped_for
from ..decoding.draft_models import SkippedTarget
from ..decoding.engine import alone, side_by_side
from ..decoding.events import Prefilled, Round, Turn
from ..decoding.methods import Method, swift
from ..decoding.methods.adaptive import AdaptiveSettings, adaptive
from ..decoding.session import Session
from ..models.runtime import Runtime
from .evaluation import WindowScore, adaptive_speedup, score_window, swift_speedup
from .verdict import ERROR, Timed, speed, speed_interval

ADAPTIVE = AdaptiveSettings(draft_format=STORED)  # STORED: take the format of each sub-layer from its layer set.

FEWEST_WINDOWS = 2  # Minimum windows scored before the draft settings are searched.
GAIN = 1.01  # Minimum ratio of expected speedups for replacing the settings in use.
MOST_WINDOWS = 12  # Maximum windows of the set in use that are kept for replays.
WIDTHS = (1, 2, 3, 5, 10)  # Candidate branching widths at the lowest confidence.
THRESHOLDS = [percent / 100 for percent in range(5, 96)]
# Two sweeps reach 0.9999 of the best known speedup on average and 0.995 at worst, over 100 random replays. Optuna's TPE
# with 48 trials reached 0.996 and 0.937.
N_SWEEPS = 2

CANDIDATES = ("int4", "int8")  # Draft formats to try on a CPU, the cheapest first.
GPU_CANDIDATES = ("int4", "fp8", "int8")
# Expected speedup at which no further format is tried: 8 bits, half of the weights' bytes, hardly reach it.
ENOUGH = 2.5
WORTH_IT = 1.05  # Minimum expected speedup that justifies the memory of quantised copies.
N_PROMPTS, N_WINDOWS = 2, 2  # Prompts on which each format is tried, and windows per prompt.

# Time two formats if their estimated speedups differ by less than this factor. For SmolLM2 the estimate was 1.15 times
# the measured speedup with 4 bits, and 1.26 times with 8 bits.
DOUBT = 1.25
# Minimum and maximum prompts on which formats are timed, and their share of the stream. Whole completions are timed:
# for SmolLM2 int4 led int8 by 2 % on the first 64 of 96 tokens, and by 9 % on all 96.
FEWEST_TIMED, MOST_TIMED, TIMED_SHARE = 3, 10, 0.25
STANDARD_ERROR = 0.32  # Error probability of an interval of ±1 standard error.

Trying = FormatTried | PhaseChanged  # Progress events while formats are tried.
# Called as (*formats); returns costs that include them, and makes their copies.
MeasureFormats = Callable[..., CostProfile]


def drafting_with(draft: SkippedTarget, settings: SwiftSettings, costs: CostSource | None) -> Method:
    """Build the method of `settings`, drafting with `draft`; SWIFT if there are no costs for adaptive drafts."""
    if settings.method == "adaptive" and costs is not None:
        return adaptive(draft, costs, ADAPTIVE)
    return swift(draft, settings)


def starting_set(n_layers: int, settings: SwiftSettings, skip_ratio: float, chooses_size: bool) -> LayerSet:
    """Return a search's first set: evenly spaced skipped sub-layers, or a quantised draft that skips nothing."""
    if chooses_size and settings.draft_format != STORED:
        return LayerSet(n_layers).filled(settings.draft_format)
    return LayerSet.uniform(n_layers, n_skipped_for(n_layers, skip_ratio)).filled(settings.draft_format)


def branching_of(widest: int) -> Branching:
    """Return the number of candidates by confidence, in the paper's proportions; `widest` is 10 in the paper."""
    return ((0.5, widest), (0.8, math.ceil(widest / 2)), (0.95, math.ceil(widest * 0.3)), (1.0, 1))


def search_drafting(
    scores: Sequence[WindowScore], layer_set: LayerSet, settings: SwiftSettings, costs: CostProfile, longest: int
) -> tuple[SwiftSettings, float, float]:
    """Find the stop threshold, draft length and branching with the highest expected speedup, one of them at a time.

    Args:    scores: what the layer set predicted over some windows. longest: draft steps per round at most.
    Returns: the settings with them, or those given where nothing is better by `GAIN`; their expected speedup, and that
             of those given.
    """

    @cache
    def expected(candidate: SwiftSettings) -> float:
        return swift_speedup(scores, layer_set, candidate, costs)

    best = replace(settings, stop_threshold=0.6, max_draft_length=longest, branching=branching_of(3))
    choices: tuple[tuple[str, Sequence[Any]], ...] = (
        ("branching", [branching_of(widest) for widest in WIDTHS]),
        ("stop_threshold", THRESHOLDS),
        ("max_draft_length", range(1, longest + 1)),
    )
    for name, values in choices * N_SWEEPS:
        best = max(best, *(replace(best, **{name: value}) for value in values), key=expected)
    if expected(best) < expected(settings) * GAIN:
        best = settings
    return best, expected(best), expected(settings)


def choose_format(
    session: Session,
    prompts: Sequence[Prompt],
    window: int,
    costs: CostProfile,
    measured: MeasureFormats,
) -> Generator[Trying, None, tuple[str, CostProfile]]:
    """Choose the fastest format for drafts with all sub-layers: by expected speedup; close formats are timed.

    Copies that are not chosen are dropped.

    Args:    window: tokens of a window. measured: returns the costs with those of a format, and makes its copies.
    Returns: the format, "stored" where none is worth its memory; and the costs with it.
    """
    runtime = session.runtime
    tried = yield from _estimated(session, prompts[:N_PROMPTS], window, measured)
    if not tried:
        return STORED, costs
    methods = [
        adaptive(SkippedTarget(LayerSet(runtime.n_layers).filled(name)), format_costs, ADAPTIVE)
        for name, (_, _, format_costs) in tried.items()
    ]
    phase = PhaseChanged("", "profile", f"timing drafts in {' and '.join(tried)}")
    runs = yield from timed_by_turns(session, prompts, methods, phase)
    best = max(tried, key=lambda name: tried[name][0])
    if runs:
        for (_, event, _), timed in zip(tried.values(), runs, strict=True):
            yield replace(event, tok_s=speed(timed))
        best = list(tried)[unbeaten(runs)[0]]
    _drop_copies(runtime, tried.keys() - {best})
    return best, tried[best][2]


def _estimated(
    session: Session, prompts: Sequence[Prompt], window: int, measured: MeasureFormats
) -> Generator[Trying, None, dict[str, tuple[float, FormatTried, CostProfile]]]:
    """Return the formats that may be fastest, each with its expected speedup, its event, and costs including it."""
    runtime = session.runtime
    tried: dict[str, tuple[float, FormatTried, CostProfile]] = {}
    for name in GPU_CANDIDATES if runtime.device.type == "cuda" else CANDIDATES:
        draft = LayerSet(runtime.n_layers).filled(name)
        try:
            format_costs = measured(name)
            score = yield from _scored(session, prompts, window, name, draft, format_costs)
        except (RuntimeError, MemoryError, SettingsError) as error:
            # The device has no kernel for the format or not enough memory.
            yield FormatTried(name, None, None, (str(error) or type(error).__name__).splitlines()[0])
            _drop_copies(runtime, {name})
            continue
        worth = adaptive_speedup(score, draft, format_costs)
        event = FormatTried(name, worth, score.matchness)
        yield event
        tried[name] = worth, event, format_costs
        least = max(WORTH_IT, max(worth for worth, _, _ in tried.values()) / DOUBT)
        kept = {name: estimate for name, estimate in tried.items() if estimate[0] > least}
        _drop_copies(runtime, tried.keys() - kept.keys())
        tried = kept
        if worth >= ENOUGH:
            break
    return tried


def _drop_copies(runtime: Runtime, formats: Iterable[str]) -> None:
    for name in formats:
        runtime.drop_copies(name)


def timed_by_turns(
    session: Session, prompts: Sequence[Prompt], methods: Sequence[Method], phase: PhaseChanged
) -> Generator[PhaseChanged, None, list[list[Timed]]]:
    """Decode the same prompts with each method in turn, until one is significantly faster or enough are decoded.

    Only first turns are decoded.

    Args:    phase: what this is reported as.
    Returns: the runs of each method, without their prefill; [] where there is nothing to choose, or too little to time.
    """
    n = max(FEWEST_TIMED, min(MOST_TIMED, int(TIMED_SHARE * len(prompts))))
    if len(methods) < 2 or len(prompts) < n:
        return []
    runs: list[list[Timed]] = [[] for _ in methods]
    for number, prompt in enumerate(prompts[:n]):
        short = replace(prompt, turns=prompt.turns[:1])
        order = range(len(methods))
        yield replace(phase, detail=f"{phase.detail}, prompt {number + 1}")
        for at in reversed(order) if number % 2 else order:
            with closing(side_by_side([session.request(short, methods[at])])) as run:
                done = [event.completion for event in run if isinstance(event, Turn)]
            runs[at].append(Timed(done[0].n_decoded, done[0].timings.decode_s))
        if number + 1 >= FEWEST_TIMED and len(unbeaten(runs, ERROR)) == 1:
            break
    return runs


def unbeaten(runs: Sequence[Sequence[Timed]], error: float = STANDARD_ERROR) -> list[int]:
    """Return the indices of the methods that no other one beats significantly on the same prompts; at least one.

    If several remain, use the first: it takes less memory, or the search rated it higher.
    """

    def leads(fast: Sequence[Timed], slow: Sequence[Timed]) -> bool:
        interval = speed_interval(fast, slow, error)
        return interval is not None and interval[0] > 1

    beaten = [any(leads(other, timed) for other in runs if other is not timed) for timed in runs]
    return [at for at, is_beaten in enumerate(beaten) if not is_beaten] or [0]


def prepared(
    session: Session,
    prompts: Sequence[Prompt],
    settings: SwiftSettings,
    measured: MeasureFormats,
) -> Generator[Trying, None, tuple[SwiftSettings, CostProfile]]:
    """Return the settings with a draft format, chosen here if it is "auto", and the costs including that format.

    Makes its copies.
    """
    name = settings.draft_format
    if name == AUTO:
        name, costs = yield from choose_format(session, prompts, settings.context_window, measured(), measured)
    else:
        costs = measured(name)
    session.runtime.copies.prepare(LayerSet(session.runtime.n_layers).filled(name))
    return replace(settings, draft_format=name), costs


def _scored(
    session: Session, prompts: Sequence[Prompt], window: int, name: str, draft: LayerSet, costs: CostProfile
) -> Generator[PhaseChanged, None, WindowScore]:
    """Return the draft's predictions over several windows of the model's completions, joined to one window."""
    scores: list[WindowScore] = []
    for prompt in prompts:
        # Windows are scored after a round, which may pass the end of the window by a whole draft.
        enough = N_WINDOWS * (window + ADAPTIVE.max_draft_length) + 1
        short = replace(prompt, turns=prompt.turns[:1], max_new_tokens=min(session.room(prompt), enough))
        method = adaptive(SkippedTarget(draft), costs, ADAPTIVE)
        n_scored, prompt_scores = 0, list[WindowScore]()
        with closing(side_by_side([session.request(short, method, scratch_rows=window)])) as run:
            for event in run:
                if isinstance(event, Prefilled | Round) and event.context.finish is None:
                    if len(event.context.generated) - n_scored >= window:
                        n_scored = len(event.context.generated)
                        prompt_scores += alone(score_window(event.context, [draft], window))
                        yield PhaseChanged(
                            "", "profile", f"trying {name} drafts, window {len(scores) + len(prompt_scores)}"
                        )
                    if len(prompt_scores) == N_WINDOWS:
                        break
        scores += prompt_scores
    if not scores:  # All answers were shorter than a window: assume a perfect draft.
        return WindowScore((0,), (1.0,))
    ranks, confidences = zip(*((score.ranks, score.confidences) for score in scores), strict=True)
    return WindowScore(tuple(chain(*ranks)), tuple(chain(*confidences)), scores[0].reads_late)
