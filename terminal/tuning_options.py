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
        raise ValueError(f"{text!r} is no branching: give CONFIDENCE:CANDIDATES pairs like 0.5:10,0.8:5,1:1") from None


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
        help=f"A paper's method with each of its numbers, but for options given with it: {', '.join(presets())}.",
    ),
    _search("method", "What the layer set is to draft for; adaptive decides by measured time."),
    _search(
        "draft_format",
        "Weights of what a draft keeps; auto: those that pay most here.",
        type=click.Choice([AUTO, *FORMATS, STORED]),
    ),
    _search(
        "strategy",
        f"Who proposes layer sets: {'; '.join(f'{name} ({recipe.help})' for name, recipe in STRATEGIES.items())}.",
        type=Parsed(
            "TEXT", str, partial(complete_name, help_by_name={name: each.help for name, each in STRATEGIES.items()})
        ),
    ),
    _search("objective", "What a layer set is scored by."),
    _search("exportable", "Keep to sets that `swiftopt export` writes for other engines as they are."),
    _search(
        "skip_ratio", "r, from 0 to 1, where the strategy leaves the size to it.  [default: 0.45, 0.5 from 34B on]"
    ),
    _search("context_window", "γ, generated tokens that score a layer set."),
    _search(
        "max_steps",
        f"S, candidates to try at most; {', '.join(SIZE_CHOOSING)} stop at {MAX_CANDIDATES} for themselves.",
    ),
    _search(
        "optimise",
        "Keep what a search starts from: nothing left out of quantised drafts, else evenly spaced sub-layers.",
    ),
    _search("deterministic", "Wait for late suggestions: the same seed then gives the same trials."),
    _swift("stop_threshold", "ε, confidence below which a draft stops."),
    _swift("max_draft_length", "N_D, steps of a draft."),
    _swift("early_stop", "Drafts always have N_D tokens."),
    _swift("dynamic_verification", "Drafts are chains, not trees."),
    _swift(
        "branching",
        "k: candidates that a position offers up to each confidence.  [default: 0.5:10,0.8:5,0.95:3,1:1]",
        type=Parsed("CONFIDENCE:K,...", _branching),
        show_default=False,
    ),
    _swift(
        "drawn_branching",
        "The same for drafts that are drawn, with --sampled.  [default: as --branching]",
        type=Parsed("CONFIDENCE:K,...", _branching),
    ),
    _swift("sampled", "With --temperature: draw drafts and weigh them, instead of their most probable tokens."),
    _swift("search_drafting", "Keep ε, N_D and k as given, instead of choosing them by time."),
    _published("bayes_interval", "β, candidates from one suggestion of the Gaussian process to the next."),
    _published("patience", "Candidates without a better one that end the search."),
    _published("target_matchness", "Matchness above which the search ends, where the strategy keeps to r."),
    _published("adoption", "What makes a set the one in use: several windows, or the highest score so far."),
    _published("window_at", "Which γ tokens of a completion score a set."),
    _published("optimise_interval", "Rounds from one pass of candidates to the next."),
    _published("candidates", "Candidates of one pass.  [default: as many as measured costs make cheap]", type=positive),
    _published("min_acceptance", "α below which r is lowered."),
    _published("min_acceptance_rounds", "Rounds that α must stay below it."),
    _published("skip_ratio_step", "What r is lowered by."),
)


# Settings without effect: their names, the condition on the other settings, and the warning printed.
IDLE: tuple[tuple[tuple[str, ...], Callable[[SwiftSettings], bool], str], ...] = (
    (
        ("stop_threshold", "max_draft_length", "early_stop", "dynamic_verification", "search_drafting"),
        lambda tuning: tuning.method == "adaptive",
        "has no effect with --method adaptive, whose drafts end by measured time: it is for --method swift",
    ),
    (
        ("stop_threshold",),
        lambda tuning: not tuning.early_stop,
        "has no effect with --no-early-stop, with which every draft has its full length: leave one of them out",
    ),
    (
        ("search_drafting",),
        lambda tuning: tuning.objective == "matchness",
        "has no effect with --objective matchness, with which ε, N_D and k are kept anyway",
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
        "does not set the size with --strategy {strategy}, which measures what pays: --strategy swift takes it",
    ),
    (
        ("max_steps",),
        lambda tuning: tuning.strategy in SIZE_CHOOSING and tuning.max_steps > MAX_CANDIDATES,
        f"has no effect above {MAX_CANDIDATES} with --strategy {{strategy}}, which ends there: use --strategy swift",
    ),
    (
        ("deterministic",),
        lambda tuning: tuning.strategy in STRATEGIES and not strategy_info(tuning.strategy).suggests,
        "has no effect with --strategy {strategy}, which waits for no suggestions",
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
