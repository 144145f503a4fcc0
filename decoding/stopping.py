"""When a draft ends: at a length, when the draft is unsure, or when a mistake has become likely."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..models.early_exit import Probe


@dataclass(frozen=True, slots=True)
class Adaptation:
    """How a threshold follows the acceptance rate (Draft & Verify; AdaSPEED appendix A).

    After every round: rate ← β1 · rate + (1 - β1) · accepted / drafted; wanted = threshold + step where the rate is
    not above `target_acceptance`, else threshold - step; threshold ← β2 · threshold + (1 - β2) · wanted.

    DEVIATION: as in Draft & Verify's published code, a draft that reached its full length at a good rate leaves the
    threshold alone: lowering it could not have made the draft longer; and the rate starts at 0. Beyond the paper, the
    threshold stays at or below 1: above it every draft ends at once, and going further would only delay the way back.
    That code judges a sampled token by its probability before temperature and top-p; here by what it was drawn from.
    """

    target_acceptance: float = 0.9  # α
    threshold_step: float = 0.01  # ε
    rate_memory: float = 0.5  # β1
    threshold_memory: float = 0.9  # β2


@dataclass(frozen=True, slots=True, eq=False)
class StopRule:
    """Drafting ends after `max_draft_length` steps, or where the confidence falls below `threshold` (None: never).

    The confidence of a step is the draft's probability of its token (its largest one without `keeps_last`), or what
    `probe` says of the state it was read from; `joint` multiplies those of all steps of the draft (AdaSPEED, Algorithm
    2). The token that ends a draft stays in it, unless `keeps_last` is off (BiLD hands an unsure position to the
    target), which is exact for drafts made without chance only.
    """

    max_draft_length: int
    threshold: float | None = None
    joint: bool = False
    adaptation: Adaptation | None = None
    probe: Probe | None = None
    keeps_last: bool = True

    def begin(self) -> Stopping:
        """The rule at work on one request."""
        return Stopping(self)


class Stopping:
    """A stop rule's state in one request: the threshold, the acceptance rate, and the draft in progress."""

    def __init__(self, rule: StopRule) -> None:
        self.rule = rule
        self.threshold = rule.threshold
        self._rate = 0.0
        self._product = 1.0

    def start(self) -> None:
        """A new draft begins."""
        self._product = 1.0

    def unsure(self, confidence: float, hidden: Tensor | None) -> bool:
        """Whether the step just drafted falls below the threshold."""
        if self.threshold is None:
            return False
        if self.rule.probe is not None and hidden is not None:
            confidence = self.rule.probe.acceptance(hidden)
        self._product *= confidence
        return (self._product if self.rule.joint else confidence) < self.threshold

    def observe(self, n_drafted: int, n_accepted: int) -> None:
        """A round of `n_drafted` steps had the first `n_accepted` accepted."""
        rule = self.rule.adaptation
        if rule is None or self.threshold is None or not n_drafted:
            return
        self._rate = rule.rate_memory * self._rate + (1 - rule.rate_memory) * n_accepted / n_drafted
        wanted = self.threshold
        if self._rate <= rule.target_acceptance:
            wanted += rule.threshold_step
        elif n_drafted < self.rule.max_draft_length:
            wanted -= rule.threshold_step
        self.threshold = min(1.0, rule.threshold_memory * self.threshold + (1 - rule.threshold_memory) * wanted)
