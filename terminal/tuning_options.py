"""Options that control the search of `tune` and of the search benchmark, and warnings about useless combinations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import click

from ..core.settings import AUTO, FORMATS, STORED, Branching, SwiftSettings, TuningSettings, preset_of, presets
from ..optimizer.strategies import MAX_CANDIDATES, SIZE_CHOOSING, STRATEGIES, strategy_info
from .commands import SEARCH, from_field, option, together
from .inputs import on_command_line
from .output import note
from .value_types import Parsed, complete_name, positive


def _branching(text: str) -> Branching:
    try:
        pairs = [pair.split(":") for pair in text.split(",")]
        return tuple((float(confidence), int(k)) for confidence, k in pairs)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a branching: use CONFIDENCE:CANDIDATES pairs, for example 0.5:10,0.8:5,1:1"
        ) from None


def _use_preset(context: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    """Use a preset's values as defaults of the command's options; explicit options win."""
    if name is not None:
        preset = preset_of(name)
        tuning = preset.tuning if preset.is_tuned else {}
        context.default_map = {**(context.default_map or {}), **tuning, **preset.sampling}
    return name


_search = partial(from_field, SEARCH, TuningSettings)
_swift = partial(from_field, "SWIFT's drafts, with --method swift", TuningSettings)
_published = partial(from_field, "SWIFT's search, as --preset swift sets it", TuningSettings)
settings = together(
    option(
        SEARCH,
        "--preset",
        metavar="NAME",
        type=click.Choice([*presets()]),
        is_eager=True,
        callback=_use_preset,
        help=f"Use a paper's method with all of its numbers; other options override it: {', '.join(presets())}.",
    ),
    _search("method", "Method that the layer set is for; adaptive decides by measured time."),
    _search(
        "draft_format",
        "Weight format of the parts that a draft keeps; auto: the fastest here.",
        type=click.Choice([AUTO, *FORMATS, STORED]),
    ),
    _search(
        "strategy",
        f"Proposes layer sets: {'; '.join(f'{name} ({recipe.help})' for name, recipe in STRATEGIES.items())}.",
        type=Parsed(
            "TEXT", str, partial(complete_name, help_by_name={name: each.help for name, each in STRATEGIES.items()})
        ),
    ),
    _search("objective", "Score of a layer set."),
    _search("exportable", "Search only sets that `swiftopt export` can write unchanged for other engines."),
    _search("skip_ratio", "r, from 0 to 1, for strategies with a fixed size.  [default: 0.45, 0.5 from 34B on]"),
    _search("context_window", "γ, number of generated tokens that score a layer set."),
    _search(
        "max_steps",
        f"S, maximum number of candidates; {', '.join(SIZE_CHOOSING)} stop at {MAX_CANDIDATES}.",
    ),
    _search(
        "optimise",
        "Keep the initial set: quantised drafts skip nothing, others evenly spaced sub-layers.",
    ),
    _search("deterministic", "Wait for late suggestions: the same seed then gives the same trials."),
    _swift("stop_threshold", "ε, confidence below which a draft stops."),
    _swift("max_draft_length", "N_D, steps of a draft."),
    _swift("early_stop", "Draft always N_D tokens."),
    _swift("dynamic_verification", "Draft chains, not trees."),
    _swift(
        "branching",
        "k: number of candidates per position, up to each confidence.  [default: 0.5:10,0.8:5,0.95:3,1:1]",
        type=Parsed("CONFIDENCE:K,...", _branching),
        show_default=False,
    ),
    _swift(
        "drawn_branching",
        "The same for sampled drafts, with --sampled.  [default: as --branching]",
        type=Parsed("CONFIDENCE:K,...", _branching),
    ),
    _swift("sampled", "With --temperature: sample drafts and weigh them, instead of taking the most probable tokens."),
    _swift("search_drafting", "Keep the given ε, N_D and k instead of choosing them by time."),
    _published("bayes_interval", "β, candidates between two suggestions of the Gaussian process."),
    _published("patience", "Candidates without an improvement after which the search ends."),
    _published("target_matchness", "Matchness above which the search ends, for strategies with a fixed size."),
    _published("adoption", "When a set is adopted: after several windows, or at the highest score so far."),
    _published("window_at", "Which γ tokens of a completion score a set."),
    _published("optimise_interval", "Rounds between two scoring passes."),
    _published(
        "candidates", "Candidates per scoring pass.  [default: as many as are cheap by measured costs]", type=positive
    ),
    _published("min_acceptance", "α below which r is lowered."),
    _published("min_acceptance_rounds", "Rounds for which α must stay below it."),
    _published("skip_ratio_step", "Amount by which r is lowered."),
)


# Settings without effect: their names, the condition on the other settings, and the warning printed.
IDLE: tuple[tuple[tuple[str, ...], Callable[[SwiftSettings], bool], str], ...] = (
    (
        ("stop_threshold", "max_draft_length", "early_stop", "dynamic_verification", "search_drafting"),
        lambda tuning: tuning.method == "adaptive",
        "has no effect with --method adaptive, which ends drafts by measured time: use --method swift",
    ),
    (
        ("stop_threshold",),
        lambda tuning: not tuning.early_stop,
        "has no effect with --no-early-stop, which drafts at full length: remove one of them",
    ),
    (
        ("search_drafting",),
        lambda tuning: tuning.objective == "matchness",
        "has no effect with --objective matchness, which keeps ε, N_D and k anyway",
    ),
    (
        ("max_steps", "deterministic", "search_drafting"),
        lambda tuning: not tuning.optimise,
        "has no effect with --no-optimise, which searches for no layer set",
    ),
    # Without a search, the search's initial set is used; skip_ratio sets its size unless the draft is quantised.
    (
        ("skip_ratio",),
        lambda tuning: (
            tuning.strategy in SIZE_CHOOSING
            and tuning.objective == "expected_speedup"
            and (tuning.optimise or tuning.draft_format in FORMATS)
        ),
        "has no effect with --strategy {strategy}, which chooses the size itself: use --strategy swift",
    ),
    (
        ("max_steps",),
        lambda tuning: tuning.strategy in SIZE_CHOOSING and tuning.max_steps > MAX_CANDIDATES,
        f"has no effect above {MAX_CANDIDATES} with --strategy {{strategy}}, which stops there: use --strategy swift",
    ),
    (
        ("deterministic",),
        lambda tuning: tuning.strategy in STRATEGIES and not strategy_info(tuning.strategy).suggests,
        "has no effect with --strategy {strategy}, which never waits for suggestions",
    ),
)


def warn_idle(settings: SwiftSettings, *used_settings: str) -> None:
    """Warn about each option on the command line that has no effect with the other settings.

    Args: used_settings: settings that the running command uses nevertheless.
    """
    flags, silenced = (
        {param.name: param.opts[0] for param in click.get_current_context().command.params},
        set(used_settings),
    )
    for name, is_idle, warning in ((name, is_idle, warning) for names, is_idle, warning in IDLE for name in names):
        if name not in silenced and on_command_line(name) and is_idle(settings):
            silenced.add(name)
            note(f"warning: {flags[name]} {warning.format(strategy=settings.strategy)}")
