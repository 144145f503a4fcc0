"""The ablations by name: which table or figure of a paper each has the shape of, and what its rows show. No torch."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA = "swiftopt.ablation/1"


@dataclass(frozen=True, slots=True)
class Ablation:
    """`varied` names the values that tell the rows apart, `shown` the figures of a row, in the paper's order."""

    title: str
    source: str
    varied: tuple[str, ...]
    shown: tuple[str, ...]


_SPEED = ("mean_generated_length", "acceptance_rate", "ratio")
_SEARCH = ("optimise_ms", "optimise_share")

ABLATIONS: dict[str, Ablation] = {
    "swift-parts": Ablation("SWIFT without its parts", "arXiv:2410.06916, Table 8", (), _SPEED),
    "swift-self-sd": Ablation("SWIFT beside Self-SD", "arXiv:2410.06916, Tables 10 and 12", (), _SPEED),
    "swift-window": Ablation("SWIFT's context window γ", "arXiv:2410.06916, Table 9", ("γ",), (*_SPEED, *_SEARCH)),
    "swift-schedule": Ablation(
        "SWIFT's search steps S and Bayesian interval β",
        "arXiv:2410.06916, Figure 8 (a)",
        ("S", "β"),
        (*_SPEED, *_SEARCH),
    ),
    "swift-ratio": Ablation("SWIFT's skip ratio r", "arXiv:2410.06916, Figure 8 (b)", ("r",), _SPEED),
    "adadecode-parts": Ablation(
        "AdaDecode without its parts",
        "arXiv:2506.03700, Table 3",
        ("heads",),
        ("extra_parameters", "consistency", "ratio"),
    ),
    "adadecode-threshold": Ablation(
        "AdaDecode's threshold γ",
        "arXiv:2506.03700, Figure 5",
        ("γ",),
        ("ratio", "early_share", "rejected_share"),
    ),
    "adadecode-trees": Ablation(
        "AdaDecode's heads, and trees of heads that say three tokens ahead",
        "arXiv:2506.03700, appendix E",
        (),
        ("extra_parameters", *_SPEED),
    ),
    "spd-settings": Ablation(
        "Speculative decoding's draft length n and threshold",
        "arXiv:2506.03700, Figure 6 (a, b)",
        ("n", "threshold"),
        _SPEED,
    ),
    "self-sd-steps": Ablation(
        "The steps of Self-SD's search", "arXiv:2506.03700, Figure 6 (c)", ("steps",), ("acceptance_rate", "ratio")
    ),
    "paradecode-parts": Ablation(
        "ParaDecode without its parts", "ParaDecode, Table 3", ("heads",), ("consistency", "ratio")
    ),
    "paradecode-threshold": Ablation(
        "ParaDecode's threshold γ", "ParaDecode, Figure 6", ("γ",), ("ratio", "early_share", "rejected_share")
    ),
    "mtad-threshold": Ablation(
        "MTAD's threshold τ", "MTAD, Table 10", ("τ",), ("mean_generated_length", "tok_s", "perplexity")
    ),
    "mtad-beams": Ablation(
        "MTAD's beams",
        "MTAD, Table 11",
        ("beams",),
        ("tok_s", "joules_per_token", "perplexity", "mean_generated_length"),
    ),
    "mtad-warp": Ablation("Top-k and top-p", "MTAD, Table 12", ("k", "p"), ("perplexity", "tok_s")),
    "adaspeed": Ablation("AdaSPEED", "AdaSPEED, Table I", ("decoding",), ("tok_s", "ratio")),
    "adaspeed-exit": Ablation(
        "The exit layer of AdaSPEED", "AdaSPEED, III.A", ("layer",), ("acceptance_rate", "tok_s", "ratio")
    ),
}
