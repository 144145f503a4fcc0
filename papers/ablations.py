"""The papers' ablations by name: source, variants and the figures to show. This module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ..core.types import Sampling
from ..decoding.methods import PLAIN, Method

if TYPE_CHECKING:
    from ..optimizer.search import Search
    from .ablation_recipes import AblationRecipes
    from .early_exit import Heads

SCHEMA = "swiftopt.ablation/1"
# (maximum optimisation steps S, Bayesian interval β). The last two are from SWIFT's Figure 8 (a), which also shows
# (500, 25); the others finish within a short stream.
SCHEDULES = ((20, 5), (100, 5), (100, 25), (1000, 25), (1000, 50))
EXIT_SHARES = (0.125, 0.1875, 0.25, 0.375, 0.5)  # Exit layers as shares of the depth: layers 2, 3, 4, 6 and 8 of 16.
SPD_LENGTHS, SPD_THRESHOLDS = (2, 8, 14), (0.3, 0.5, 0.8)
WARPS = ((20, 0.9), (20, 0.8), (10, 0.9), (10, 0.8))  # (top-k, top-p) pairs of MTAD's Table 12.
SAMPLED = Sampling(temperature=1.0)
TOP_P = Sampling(temperature=1.0, top_p=0.9)  # AdaSPEED III decodes with top-p and names neither p nor temperature.


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of an ablation.

    `make` returns the method, or a search that runs while decoding; it raises SwiftoptError if a part is missing.
    `values` are the row's settings by their symbols in the paper. The speedup is relative to the row labelled `base`.
    `heads` returns the heads whose parameters are counted.
    """

    label: str
    make: Callable[[], Method | Search]
    values: Mapping[str, Any] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    base: str = "plain"
    heads: Callable[[], Heads] | None = None


@dataclass(frozen=True, slots=True)
class Ablation:
    """The definition of an ablation: `varied` names the settings that differ by row, `shown` the figures of a row."""

    title: str
    source: str
    varied: tuple[str, ...]
    shown: tuple[str, ...]
    variants: Callable[[AblationRecipes], Iterable[Variant]]


def _vary_setting(
    make: Callable[..., Method | Search], name: str, setting: str, *values: float, **variant_fields: Any
) -> list[Variant]:
    """Return one variant per value of `setting`; `name` is the paper's symbol or word for the setting."""
    return [
        Variant(
            f"{name} {value}" if len(name) == 1 else f"{value} {name}",
            partial(make, **{setting: value}),
            {name: value},
            **variant_fields,
        )
        for value in values
    ]


def _swift_parts(recipes: AblationRecipes) -> Iterator[Variant]:
    yield Variant("SWIFT", recipes.search)
    yield Variant("w/o early stopping", partial(recipes.search, early_stop=False))
    yield Variant("w/o dynamic verification", partial(recipes.search, dynamic_verification=False))
    yield Variant("w/o optimisation", partial(recipes.search, optimise=False))


def _swift_self_sd(recipes: AblationRecipes) -> Iterator[Variant]:
    yield Variant("Self-SD", partial(recipes.method, "self-sd"))
    yield Variant("Self-SD w/ dynamic verification", recipes.branching)
    yield Variant("SWIFT", recipes.search)


def _swift_schedule(recipes: AblationRecipes) -> Iterator[Variant]:
    for steps, interval in SCHEDULES:
        make = partial(recipes.search, max_steps=steps, bayes_interval=interval)
        yield Variant(f"S {steps}, β {interval}", make, {"S": steps, "β": interval})


def _adadecode_parts(recipes: AblationRecipes) -> Iterator[Variant]:
    rows: dict[str, Callable[[], Heads]] = {
        "AdaDecode": recipes.heads,
        "w/o verification": recipes.heads,
        "w/ fixed-layer early prediction": recipes.one_head,
        "w/ original LM head": recipes.original_head,
        "w/ mixed-domain LM head": recipes.mixed_heads,
        "w/ full-parameterized LM head": cache(recipes.full_heads),
    }
    for label, heads in rows.items():
        yield Variant(label, partial(recipes.early, heads, label != "w/o verification"), heads=heads)


def _adadecode_trees(recipes: AblationRecipes) -> Iterator[Variant]:
    hops = cache(recipes.hop_heads)
    yield Variant("AdaDecode", partial(recipes.early, recipes.heads), heads=recipes.heads)
    for label, early in (("trees of the last layer", False), ("trees of earlier layers, too", True)):
        added_heads = partial(recipes.added_by_trees, hops, early)
        yield Variant(label, partial(recipes.trees, hops, early), heads=added_heads)


def _spd_settings(recipes: AblationRecipes) -> Iterator[Variant]:
    for draft_length in SPD_LENGTHS:
        for threshold in SPD_THRESHOLDS:
            make = partial(recipes.method, "spd", max_draft_length=draft_length, stop_threshold=threshold)
            yield Variant(f"n {draft_length}, threshold {threshold}", make, {"n": draft_length, "threshold": threshold})


def _paradecode_parts(recipes: AblationRecipes) -> Iterator[Variant]:
    for label, heads, verified in (
        ("ParaDecode", recipes.heads, True),
        ("w/o verification step", recipes.heads, False),
        ("w/o lightweight LM head training", recipes.original_head, True),
    ):
        yield Variant(label, partial(recipes.stacked, heads, verified), heads=heads)


def _thresholds(recipes: AblationRecipes, method: str, *values: float) -> list[Variant]:
    return _vary_setting(partial(recipes.method, method), "γ", "early_threshold", *values, heads=recipes.heads)


def _mtad(recipes: AblationRecipes, name: str, setting: str, *values: float) -> list[Variant]:
    return _vary_setting(partial(recipes.method, "mtad"), name, setting, *values, sampling=SAMPLED)


def _mtad_warp(recipes: AblationRecipes) -> Iterator[Variant]:
    for top_k, top_p in WARPS:
        methods: dict[str, Callable[[], Method]] = {
            "multinomial": lambda: PLAIN,
            "SpD": partial(recipes.method, "spd"),
            "MTAD": partial(recipes.method, "mtad", top_k=top_k, top_p=top_p),
        }
        warped = Sampling(temperature=1.0, top_k=top_k, top_p=top_p)
        for name, make in methods.items():
            yield Variant(f"{name}, k {top_k}, p {top_p}", make, {"k": top_k, "p": top_p}, warped)


def _adaspeed(recipes: AblationRecipes) -> Iterator[Variant]:
    rows: dict[str, Callable[[], Method]] = {
        "LayerSkip": partial(recipes.method, "layerskip"),
        "Draft & Verify": recipes.marginal,
        "AdaSPEED (no probe)": partial(recipes.method, "adaspeed"),
        "AdaSPEED (probe)": partial(recipes.method, "adaspeed-probe"),
    }
    for sampling_name, sampling in (("greedy", Sampling()), ("top-p", TOP_P)):
        for label, make in rows.items():
            yield Variant(
                f"{label}, {sampling_name}", make, {"decoding": sampling_name}, sampling, f"LayerSkip, {sampling_name}"
            )


def _adaspeed_exit(recipes: AblationRecipes) -> Iterator[Variant]:
    n_layers = recipes.runtime.n_layers
    for layer in dict.fromkeys(max(1, round(share * n_layers)) for share in EXIT_SHARES):
        for label, name in (("LayerSkip", "layerskip"), ("AdaSPEED (no probe)", "adaspeed")):
            make = partial(recipes.method, name, exit_layer=layer)
            yield Variant(f"{label}, layer {layer}", make, {"layer": layer})


_SPEED = ("mean_generated_length", "acceptance_rate", "ratio")
_SEARCH = (*_SPEED, "optimise_ms", "optimise_share")
_EARLY = ("ratio", "early_share", "rejected_share")
_SWIFT, _ADADECODE = "arXiv:2410.06916", "arXiv:2506.03700"

ABLATIONS: dict[str, Ablation] = {
    "swift-parts": Ablation("SWIFT without its parts", f"{_SWIFT}, Table 8", (), _SPEED, _swift_parts),
    "swift-self-sd": Ablation("SWIFT and Self-SD", f"{_SWIFT}, Tables 10 and 12", (), _SPEED, _swift_self_sd),
    "swift-window": Ablation(
        "SWIFT's context window γ",
        f"{_SWIFT}, Table 9",
        ("γ",),
        _SEARCH,
        lambda recipes: _vary_setting(recipes.search, "γ", "context_window", 16, 32, 64, 128),
    ),
    "swift-schedule": Ablation(
        "SWIFT's search steps S and Bayesian interval β",
        f"{_SWIFT}, Figure 8 (a)",
        ("S", "β"),
        _SEARCH,
        _swift_schedule,
    ),
    "swift-ratio": Ablation(
        "SWIFT's skip ratio r",
        f"{_SWIFT}, Figure 8 (b)",
        ("r",),
        _SPEED,
        lambda recipes: _vary_setting(recipes.search, "r", "skip_ratio", 0.3, 0.35, 0.4, 0.45, 0.5, 0.55),
    ),
    "adadecode-parts": Ablation(
        "AdaDecode without its parts",
        f"{_ADADECODE}, Table 3",
        ("heads",),
        ("extra_parameters", "consistency", "ratio"),
        _adadecode_parts,
    ),
    "adadecode-threshold": Ablation(
        "AdaDecode's threshold γ",
        f"{_ADADECODE}, Figure 5",
        ("γ",),
        _EARLY,
        lambda recipes: _thresholds(recipes, "adadecode", 0.0, 0.25, 0.5, 0.65, 0.75, 0.85, 0.95, 1.0),
    ),
    "adadecode-trees": Ablation(
        "AdaDecode's heads, and trees of heads that predict three tokens ahead",
        f"{_ADADECODE}, appendix E",
        (),
        ("extra_parameters", *_SPEED),
        _adadecode_trees,
    ),
    "spd-settings": Ablation(
        "Speculative decoding's draft length n and threshold",
        f"{_ADADECODE}, Figure 6 (a, b)",
        ("n", "threshold"),
        _SPEED,
        _spd_settings,
    ),
    "self-sd-steps": Ablation(
        "The steps of Self-SD's search",
        f"{_ADADECODE}, Figure 6 (c)",
        ("steps",),
        ("acceptance_rate", "ratio"),
        # Fewer steps than the paper's hundreds, so that the ablation takes minutes.
        lambda recipes: _vary_setting(recipes.self_sd, "steps", "steps", 3, 10, 30),
    ),
    "paradecode-parts": Ablation(
        "ParaDecode without its parts",
        "ParaDecode, Table 3",
        ("heads",),
        ("consistency", "ratio"),
        _paradecode_parts,
    ),
    "paradecode-threshold": Ablation(
        "ParaDecode's threshold γ",
        "ParaDecode, Figure 6",
        ("γ",),
        _EARLY,
        lambda recipes: _thresholds(recipes, "paradecode", 0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    ),
    "mtad-threshold": Ablation(
        "MTAD's threshold τ",
        "MTAD, Table 10",
        ("τ",),
        ("mean_generated_length", "tok_s", "perplexity"),
        lambda recipes: _mtad(recipes, "τ", "acceptance_threshold", 0.1, 0.3, 0.5, 0.7, 0.9),
    ),
    "mtad-beams": Ablation(
        "MTAD's beams",
        "MTAD, Table 11",
        ("beams",),
        ("tok_s", "joules_per_token", "perplexity", "mean_generated_length"),
        lambda recipes: _mtad(recipes, "beams", "beam_width", 2, 4, 6, 8),
    ),
    "mtad-warp": Ablation("Top-k and top-p", "MTAD, Table 12", ("k", "p"), ("perplexity", "tok_s"), _mtad_warp),
    "adaspeed": Ablation("AdaSPEED", "AdaSPEED, Table I", ("decoding",), ("tok_s", "ratio"), _adaspeed),
    "adaspeed-exit": Ablation(
        "The exit layer of AdaSPEED",
        "AdaSPEED, III.A",
        ("layer",),
        ("acceptance_rate", "tok_s", "ratio"),
        _adaspeed_exit,
    ),
}
