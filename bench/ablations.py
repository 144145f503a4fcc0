"""What each ablation varies: a small table of variants per paper's table, each a method to run beside the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch

from ..core.errors import LearnedNotFound
from ..core.settings import PAPER_BRANCHING, PRESETS, SwiftSettings
from ..core.types import Sampling
from ..decoding.methods import PLAIN, Method, Resources, build, method_info
from ..decoding.methods.chains import AdaptiveThreshold, ChainDrafter, StopRule
from ..decoding.methods.early_exit import (
    AdaDecodeSettings,
    AdaSpeedSettings,
    EarlyDrafter,
    PipelineDrafter,
    early_exit,
)
from ..decoding.session import Session
from ..decoding.verify import ChainRatio, Rollback, SeveralRatio, TargetWalk, Verifier
from ..models.early_exit import Heads
from ..models.stacked import StackedLayers
from ..optimizer import self_sd
from ..optimizer.search import Search
from ..tasks.recipes import (
    BRIEF_EPOCHS,
    HEADS_S,
    LEAST_TOKENS,
    SELF_SD_PROMPTS,
    SELF_SD_TOKENS,
    MakingRecipes,
    Recipes,
)
from ..training.descent import train
from ..training.features import greedy_session
from ..training.settings import HeadSettings
from .hop_heads import HOPS, HopDrafter, joined, train_hops

T = TypeVar("T")

WINDOWS = (16, 32, 64, 128)
SCHEDULES = ((20, 5), (100, 5), (100, 25), (1000, 25), (1000, 50))  # (S, β)
RATIOS = (0.3, 0.35, 0.4, 0.45, 0.5, 0.55)
EARLY_THRESHOLDS = (0.0, 0.25, 0.5, 0.65, 0.75, 0.85, 0.95, 1.0)
STACKED_THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
EXIT_SHARES = (0.125, 0.1875, 0.25, 0.375, 0.5)  # of the depth: layers 2, 3, 4, 6 and 8 of 16
JOINT_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
BEAMS = (2, 4, 6, 8)
SPD_LENGTHS, SPD_THRESHOLDS = (2, 8, 14), (0.3, 0.5, 0.8)
SELF_SD_STEPS = (3, 10, 30)  # the paper's hundreds, scaled
WARPS = ((20, 0.9), (20, 0.8), (10, 0.9), (10, 0.8))  # (k, p)
MIXED_TASK = "mixed"  # of heads that were trained on several streams
TOP_P = Sampling(temperature=1.0, top_p=0.9)  # AdaSPEED III


@dataclass(frozen=True, slots=True)
class Variant:
    """A row: `make` gives the method, or a search that goes on while it decodes, or raises where a piece is missing.

    `base` is the label of the row that its ratio is to; `heads` are those whose parameters count.
    """

    label: str
    make: Callable[[], Method | Search]
    values: Mapping[str, Any] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    base: str = "plain"
    heads: Callable[[], Heads] | None = None


class AblationRecipes(MakingRecipes):
    """What variants are built of; a part is looked up or made when the first variant asks for it."""

    def method(self, name: str, **told: Any) -> Method:
        """Build a method with settings beyond its defaults."""
        return build(name, self.of(name, self.task).parts, method_info(name).settings_from(told))

    def search(self, **told: Any) -> Search:
        """Start SWIFT's search as published, but for those settings."""
        settings = replace(SwiftSettings(**PRESETS["swift"].tuning), **told)
        ratio = settings.start_skip_ratio(self.runtime.info.n_parameters)
        return Search("", self.runtime.n_layers, settings, ratio, None)

    def heads(self) -> Heads:
        """Return the task's heads."""
        return cast(Heads, self.weights(self.learned("heads", self.task)))

    def one_head(self) -> Heads:
        """Return the middle one of them."""
        heads = self.heads()
        depth = heads.depths[len(heads.depths) // 2]
        return Heads({depth: heads.transforms[depth]}, heads.full)

    def original_head(self) -> Heads:
        """Return the model's own head at the same depths."""
        return Heads({depth: torch.eye(t.shape[-1]).to(t) for depth, t in self.heads().transforms.items()})

    def mixed_heads(self) -> Heads:
        """Return heads that were trained on several streams.

        Raises: LearnedNotFound: they must be trained first, for that takes the other streams.
        """
        record = Recipes.learned(self, "heads", MIXED_TASK)
        if record.task != MIXED_TASK:
            raise LearnedNotFound("no mixed-domain heads are stored: train them with several --stream and --task mixed")
        return cast(Heads, self.weights(record))

    def full_heads(self) -> Heads:
        """Train whole heads at the same depths, as long as brief ones are."""
        n_tokens = self.session.max_new_tokens
        settings = HeadSettings(epochs=BRIEF_EPOCHS, layers=self.heads().depths, full=True, max_new_tokens=n_tokens)
        self.on_step(f"make: whole heads, by {HEADS_S:.0f} s of training")
        return cast(Heads, train(self.runtime, self.prompts, settings, budget_s=HEADS_S).model)

    def hop_heads(self) -> list[Heads]:
        """Train heads of every hop at the last layer and at the deeper two of the task's heads, as long as those."""
        depths, n_tokens = (
            (*self.heads().depths[-2:], self.runtime.n_layers),
            max(LEAST_TOKENS, self.session.max_new_tokens),
        )
        self.on_step(f"make: heads that say {HOPS} tokens ahead, by {HOPS * HEADS_S:.0f} s of training")
        session = greedy_session(self.runtime, n_tokens)
        return train_hops(session, self.prompts, depths, HOPS * HEADS_S, HeadSettings(epochs=BRIEF_EPOCHS))

    def self_sd(self, steps: int) -> Method:
        """Search Self-SD's set in so many steps, on as many prompts as a brief search has."""
        self.on_step(f"make: Self-SD's layer set, by {steps} candidates of its search")
        session = Session(self.runtime, Sampling(), min(SELF_SD_TOKENS, self.session.max_new_tokens))
        found = self_sd.search(session, self.prompts[:SELF_SD_PROMPTS], steps)
        return build("self-sd", Resources(self.runtime, found.best.layer_set), AdaptiveThreshold())


def variants(name: str, recipes: AblationRecipes) -> list[Variant]:
    """The rows of an ablation, in the paper's order."""
    return list(_VARIANTS[name](recipes))


def _swift_parts(recipes: AblationRecipes) -> Iterator[Variant]:
    yield Variant("SWIFT", recipes.search)
    yield Variant("w/o early stopping", lambda: recipes.search(early_stop=False))
    yield Variant("w/o dynamic verification", lambda: recipes.search(dynamic_verification=False))
    yield Variant("w/o optimisation", lambda: recipes.search(optimise=False))


def _swift_self_sd(recipes: AblationRecipes) -> Iterator[Variant]:
    yield Variant("Self-SD", _with(recipes.method, "self-sd"))
    yield Variant("Self-SD w/ dynamic verification", lambda: _branching(recipes))
    yield Variant("SWIFT", recipes.search)


def _branching(recipes: AblationRecipes) -> Method:
    """Self-SD's set and threshold rule, each position with SWIFT's candidates."""
    model = recipes.of("self-sd", recipes.task).parts.skipped()
    drafter = ChainDrafter(model, StopRule.adaptive(AdaptiveThreshold()), PAPER_BRANCHING, sampled=True)
    return Method("self-sd", drafter, SeveralRatio("without"))


def _swift_window(recipes: AblationRecipes) -> Iterator[Variant]:
    for window in WINDOWS:
        yield Variant(f"γ {window}", _with(recipes.search, context_window=window), {"γ": window})


def _swift_schedule(recipes: AblationRecipes) -> Iterator[Variant]:
    for steps, every in SCHEDULES:
        make = _with(recipes.search, max_steps=steps, bayes_interval=every)
        yield Variant(f"S {steps}, β {every}", make, {"S": steps, "β": every})


def _swift_ratio(recipes: AblationRecipes) -> Iterator[Variant]:
    for ratio in RATIOS:
        yield Variant(f"r {ratio}", _with(recipes.search, skip_ratio=ratio), {"r": ratio})


def _adadecode_parts(recipes: AblationRecipes) -> Iterator[Variant]:
    def row(label: str, heads: Callable[[], Heads], verifier: Verifier) -> Variant:
        return Variant(label, lambda: _early(heads(), verifier), heads=heads)

    yield row("AdaDecode", recipes.heads, ChainRatio())
    yield row("w/o verification", recipes.heads, Rollback(math.inf))
    yield row("w/ fixed-layer early prediction", recipes.one_head, ChainRatio())
    yield row("w/ original LM head", recipes.original_head, ChainRatio())
    yield row("w/ mixed-domain LM head", recipes.mixed_heads, ChainRatio())
    yield row("w/ full-parameterized LM head", _once(recipes.full_heads), ChainRatio())


def _early(heads: Heads, verifier: Verifier) -> Method:
    """AdaDecode with those heads; a verifier that refuses nothing leaves verification out."""
    settings = AdaDecodeSettings()
    return Method("adadecode", EarlyDrafter(heads, settings.early_threshold, settings.max_early), verifier)


def _adadecode_trees(recipes: AblationRecipes) -> Iterator[Variant]:
    hops = _once(recipes.hop_heads)

    def row(label: str, early: bool) -> Variant:
        def make() -> Method:
            return Method("hop-heads", HopDrafter(hops(), early, AdaDecodeSettings().early_threshold), TargetWalk())

        return Variant(label, make, heads=lambda: joined(hops(), early))

    yield Variant("AdaDecode", lambda: _early(recipes.heads(), ChainRatio()), heads=recipes.heads)
    yield row("trees of the last layer", False)
    yield row("trees of earlier layers, too", True)


def _spd_settings(recipes: AblationRecipes) -> Iterator[Variant]:
    for n in SPD_LENGTHS:
        for threshold in SPD_THRESHOLDS:
            make = _with(recipes.method, "spd", max_draft_length=n, stop_threshold=threshold)
            yield Variant(f"n {n}, threshold {threshold}", make, {"n": n, "threshold": threshold})


def _self_sd_steps(recipes: AblationRecipes) -> Iterator[Variant]:
    for steps in SELF_SD_STEPS:
        yield Variant(f"{steps} steps", _with(recipes.self_sd, steps), {"steps": steps})


def _paradecode_parts(recipes: AblationRecipes) -> Iterator[Variant]:
    def row(label: str, heads: Callable[[], Heads], verifier: Verifier) -> Variant:
        return Variant(label, lambda: _stacked(recipes, heads(), 0.0, verifier), heads=heads)

    yield row("ParaDecode", recipes.heads, TargetWalk())
    yield row("w/o verification step", recipes.heads, Rollback(math.inf))
    yield row("w/o lightweight LM head training", recipes.original_head, TargetWalk())


def _paradecode_threshold(recipes: AblationRecipes) -> Iterator[Variant]:
    for threshold in STACKED_THRESHOLDS:
        make = _with(recipes.method, "paradecode", early_threshold=threshold)
        yield Variant(f"γ {threshold}", make, {"γ": threshold}, heads=recipes.heads)


def _stacked(recipes: AblationRecipes, heads: Heads, threshold: float, verifier: Verifier) -> Method:
    """ParaDecode with those heads."""
    return Method("paradecode", PipelineDrafter(heads, threshold, StackedLayers(recipes.runtime)), verifier)


def _adadecode_threshold(recipes: AblationRecipes) -> Iterator[Variant]:
    for threshold in EARLY_THRESHOLDS:
        make = _with(recipes.method, "adadecode", early_threshold=threshold)
        yield Variant(f"γ {threshold}", make, {"γ": threshold}, heads=recipes.heads)


def _mtad_threshold(recipes: AblationRecipes) -> Iterator[Variant]:
    for threshold in JOINT_THRESHOLDS:
        make = _with(recipes.method, "mtad", acceptance_threshold=threshold)
        yield Variant(f"τ {threshold}", make, {"τ": threshold}, Sampling(temperature=1.0))


def _mtad_beams(recipes: AblationRecipes) -> Iterator[Variant]:
    for beams in BEAMS:
        make = _with(recipes.method, "mtad", beam_width=beams)
        yield Variant(f"{beams} beams", make, {"beams": beams}, Sampling(temperature=1.0))


def _mtad_warp(recipes: AblationRecipes) -> Iterator[Variant]:
    for k, p in WARPS:
        warp, values = Sampling(temperature=1.0, top_k=k, top_p=p), {"k": k, "p": p}
        yield Variant(f"multinomial, k {k}, p {p}", lambda: PLAIN, values, warp)
        yield Variant(f"SpD, k {k}, p {p}", _with(recipes.method, "spd"), values, warp)
        yield Variant(f"MTAD, k {k}, p {p}", _with(recipes.method, "mtad", top_k=k, top_p=p), values, warp)


def _adaspeed(recipes: AblationRecipes) -> Iterator[Variant]:
    for words, sampling in (("greedy", Sampling()), ("top-p", TOP_P)):
        base, values = f"LayerSkip, {words}", {"decoding": words}
        rows: dict[str, Callable[[], Method]] = {
            "LayerSkip": _with(recipes.method, "layerskip"),
            "Draft & Verify": lambda: _marginal(recipes),
            "AdaSPEED (no probe)": _with(recipes.method, "adaspeed"),
            "AdaSPEED (probe)": _with(recipes.method, "adaspeed-probe"),
        }
        for label, make in rows.items():
            yield Variant(f"{label}, {words}", make, values, sampling, base)


def _adaspeed_exit(recipes: AblationRecipes) -> Iterator[Variant]:
    n_layers = recipes.runtime.n_layers
    for layer in dict.fromkeys(max(1, round(share * n_layers)) for share in EXIT_SHARES):
        for label, name in (("LayerSkip", "layerskip"), ("AdaSPEED (no probe)", "adaspeed")):
            make = _with(recipes.method, name, exit_layer=layer)
            yield Variant(f"{label}, layer {layer}", make, {"layer": layer})


def _marginal(recipes: AblationRecipes) -> Method:
    """Draft & Verify's rule, each step's own probability against the threshold, on AdaSPEED's early exit."""
    settings = AdaSpeedSettings()
    model = early_exit(recipes.of("adaspeed", recipes.task).parts, settings.exit_layer)
    return Method("draft-verify", ChainDrafter(model, StopRule.adaptive(settings), sampled=True), ChainRatio())


def _with(make: Callable[..., Any], *args: Any, **told: Any) -> Callable[[], Any]:
    return lambda: make(*args, **told)


def _once(make: Callable[[], T]) -> Callable[[], T]:
    """The same heads however often they are asked for."""
    found: list[T] = []

    def get() -> T:
        if not found:
            found.append(make())
        return found[0]

    return get


_VARIANTS: dict[str, Callable[[AblationRecipes], Iterator[Variant]]] = {
    "swift-parts": _swift_parts,
    "swift-self-sd": _swift_self_sd,
    "swift-window": _swift_window,
    "swift-schedule": _swift_schedule,
    "swift-ratio": _swift_ratio,
    "adadecode-parts": _adadecode_parts,
    "adadecode-threshold": _adadecode_threshold,
    "adadecode-trees": _adadecode_trees,
    "spd-settings": _spd_settings,
    "self-sd-steps": _self_sd_steps,
    "paradecode-parts": _paradecode_parts,
    "paradecode-threshold": _paradecode_threshold,
    "mtad-threshold": _mtad_threshold,
    "mtad-beams": _mtad_beams,
    "mtad-warp": _mtad_warp,
    "adaspeed": _adaspeed,
    "adaspeed-exit": _adaspeed_exit,
}
