"""Draft chains with a paper's rule for stopping or for acceptance: Self-SD, typical acceptance, BiLD."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...core.serialization import Settings, count, ranged, share
from ...decoding.draft import AcceptanceProbe, Drafter
from ...decoding.methods import Resources, method
from ...decoding.methods.chains import ChainDrafter, StopRule
from ...decoding.verify import ChainRatio, Verifier
from ..verifiers import Rollback, Typical


@dataclass(frozen=True, slots=True)
class AdaptiveThreshold(Settings):
    """Settings of a chain whose stop threshold γ follows the acceptance rate (Draft & Verify; AdaSPEED, appendix A).

    After every round: rate ← β1 · rate + (1 - β1) · accepted / drafted; γ̃ = γ + ε if rate ≤ α, else γ - ε;
    γ ← β2 · γ + (1 - β2) · γ̃. β1, β2, ε and α are those of Draft & Verify's published code, the maximum length that of
    AdaDecode's appendix C.

    DEVIATION: two rules are from Draft & Verify's published code: the rate starts at 0; and a draft of full length does
    not lower the threshold, because a lower one could not have made it longer. Two are ours: the threshold stays at or
    below 1, because above 1 every draft ends at its first token and a higher value would only take longer to fall; and
    a sampled token is judged by the distribution that it was drawn from, where that code uses the one before
    temperature and top-p.
    """

    stop_threshold: float = share(0.8)  # γ at the start (AdaSPEED, appendix A).
    max_draft_length: int = count(12)
    target_acceptance: float = share(0.9)  # α: acceptance rate that the threshold is adapted to reach.
    threshold_step: float = share(0.01)  # ε: distance of the round's threshold γ̃ from γ.
    rate_memory: float = share(0.5)  # β1: weight of the previous rate in its moving average.
    threshold_memory: float = share(0.9)  # β2: weight of the previous threshold in its moving average.


@dataclass(frozen=True, slots=True)
class TypicalSettings(Settings):
    """Typical acceptance (Medusa, arXiv:2401.10774): accepts tokens with a probability above min(ε, δ · exp(-H))."""

    epsilon: float = share(0.09)  # ε, named posterior_threshold in Medusa's code.
    delta: float = share(0.3)  # δ, named posterior_alpha in Medusa's code; √ε by default.
    max_draft_length: int = count(5)


@dataclass(frozen=True, slots=True)
class BildSettings(Settings):
    """BiLD (arXiv:2302.07863)."""

    fallback_threshold: float = share(0.6)  # Drafting stops when the draft model's confidence is below this value.
    rollback_threshold: float = ranged(3.0, ge=0)  # Maximum -log target probability (nats) of an accepted token.
    max_draft_length: int = count(10)


@method("self-sd", "Self-SD (Draft & Verify)", "arXiv:2309.08168", AdaptiveThreshold, ["layer_set"])
def _self_sd(resources: Resources, settings: AdaptiveThreshold) -> tuple[Drafter, Verifier]:
    return ChainDrafter(resources.skipped(), AdaptiveStop.of(settings), sampled=True), ChainRatio()


@method("bild", "BiLD", "arXiv:2302.07863", BildSettings, drafts_with_model=True, lossy=True)
def _bild(resources: Resources, settings: BildSettings) -> tuple[Drafter, Verifier]:
    stop = StopRule(settings.max_draft_length, settings.fallback_threshold, keeps_last=False)
    return ChainDrafter(resources.draft_model(), stop, sampled=True), Rollback(settings.rollback_threshold)


@method("typical", "typical decoding", "arXiv:2401.10774", TypicalSettings, drafts_with_model=True, lossy=True)
def _typical(resources: Resources, settings: TypicalSettings) -> tuple[Drafter, Verifier]:
    drafter = ChainDrafter(resources.draft_model(), StopRule(settings.max_draft_length), sampled=True)
    return drafter, Typical(settings.epsilon, settings.delta)


@dataclass(slots=True, eq=False)
class AdaptiveStop(StopRule):
    """A stop rule whose threshold follows the acceptance rate.

    With `joint`, the threshold is for the product of the confidences of all steps of the draft (AdaSPEED, Algorithm 2).
    """

    joint: bool = False
    adaptation: AdaptiveThreshold = field(default_factory=AdaptiveThreshold)
    _rate: float = 0.0  # Moving average of the acceptance rate.
    _product: float = 1.0  # Product of the confidences of the current draft's tokens.

    @classmethod
    def of(cls, settings: AdaptiveThreshold, joint: bool = False, probe: AcceptanceProbe | None = None) -> AdaptiveStop:
        return cls(settings.max_draft_length, settings.stop_threshold, probe, joint=joint, adaptation=settings)

    def start(self) -> None:
        self._product = 1.0

    def compared_value(self, confidence: float) -> float:
        self._product *= confidence
        return self._product if self.joint else confidence

    def observe(self, n_drafted: int, n_accepted: int) -> None:
        """Update the acceptance rate and the threshold after a round."""
        rule = self.adaptation
        if self.threshold is None or not n_drafted:
            return
        self._rate = rule.rate_memory * self._rate + (1 - rule.rate_memory) * n_accepted / n_drafted
        round_threshold = self.threshold
        if self._rate <= rule.target_acceptance:
            round_threshold += rule.threshold_step
        elif n_drafted < self.max_draft_length:
            round_threshold -= rule.threshold_step
        memory = rule.threshold_memory
        self.threshold = min(1.0, memory * self.threshold + (1 - memory) * round_threshold)
