"""Drafting token by token with one model: a chain that grows until a stop rule ends it.

SWIFT drafts with the target without some sub-layers; speculative decoding drafts with a smaller model, or like SWIFT if
there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.serialization import Settings, count, share
from ...core.settings import Branching, SwiftSettings, candidates_at
from ..draft import AcceptanceProbe, Draft, Drafter, DraftModel, Outcome, draw_distinct, drawable, offers_of
from ..draft_tree import DraftTree
from ..verify import BlockRatio, ChainRatio, SeveralRatio, TargetWalk, Verifier
from . import Method, Resources, method

if TYPE_CHECKING:
    from torch import Tensor

    from ...core.layer_sets import LayerSet
    from ..draft_models import SkippedTarget
    from ..work import PassGenerator


@dataclass(frozen=True, slots=True)
class SpdSettings(Settings):
    """Speculative decoding with a draft model (arXiv:2211.17192, 2302.01318)."""

    max_draft_length: int = count(5)
    # Equals transformers' assistant_confidence_threshold; None: fixed draft length.
    stop_threshold: float | None = share(0.4)
    # Block verification at temperatures above 0 accepts at least as many tokens (arXiv:2403.10444).
    block_verification: bool = True


@method("swift", "SWIFT", "arXiv:2410.06916", SwiftSettings, ["layer_set"])
def _swift(resources: Resources, settings: SwiftSettings) -> tuple[Drafter, Verifier]:
    swift_method = swift(resources.skipped(), settings)
    return swift_method.drafter, swift_method.verifier


def swift(draft: LayerSet | SkippedTarget, settings: SwiftSettings) -> Method:
    """Build SWIFT: the target without some sub-layers drafts, stopped early, each position with its top candidates.

    Args:   draft: the layer set, or the object that holds it while a search changes it.
    Source: SWIFT 4.2, Eq. 5.
    """
    from ..draft_models import SkippedTarget

    stop_rule = StopRule(settings.max_draft_length, settings.stop_threshold if settings.early_stop else None)
    branching = settings.branching if settings.dynamic_verification else None
    model = draft if isinstance(draft, SkippedTarget) else SkippedTarget(draft)
    drafter = ChainDrafter(model, stop_rule, branching, settings.sampled, branching and settings.drawn_branching)
    return Method("swift", drafter, SeveralRatio("without") if settings.sampled else TargetWalk())


@method("spd", "speculative decoding", "arXiv:2211.17192", SpdSettings, drafts_with_model=True)
def _spd(resources: Resources, settings: SpdSettings) -> tuple[Drafter, Verifier]:
    stop_rule = StopRule(settings.max_draft_length, settings.stop_threshold)
    verifier = BlockRatio() if settings.block_verification else ChainRatio()
    return ChainDrafter(resources.draft_model(), stop_rule, sampled=True), verifier


@dataclass(slots=True, eq=False)
class StopRule:
    """Ends a draft after `max_draft_length` steps, or when the confidence falls below `threshold` (None: never).

    The confidence of a step is the draft's probability of its token (the largest probability without `keeps_last`), or
    the prediction of `probe` for the state behind the token. The token that ends a draft stays in it. With `keeps_last`
    off, the target decides the unsure position instead, which is exact only for deterministic drafts. Each request has
    a copy, which may adapt.
    """

    max_draft_length: int
    threshold: float | None = None
    probe: AcceptanceProbe | None = None
    keeps_last: bool = True

    def start(self) -> None:
        """Begin a draft."""

    def unsure(self, confidence: float, hidden: Tensor | None) -> bool:
        """Return whether the step just drafted falls below the threshold.

        Args: hidden: the state behind the step, if a probe has not already given the confidence.
        """
        if self.threshold is None:
            return False
        if self.probe is not None and hidden is not None:
            confidence = float(self.probe.acceptance(hidden))
        return self.compared_value(confidence) < self.threshold

    def compared_value(self, confidence: float) -> float:
        """Return the value that is compared with the threshold after a step of this confidence."""
        return confidence

    def observe(self, n_drafted: int, n_accepted: int) -> None:
        """Adapt to a round with `n_drafted` steps, of which the first `n_accepted` were accepted."""


class ChainDrafter(Drafter):
    """A chain from `model`, ended by `stop`; with `branching`, side leaves where the draft is less sure (SWIFT 4.2).

    With `sampled`, and if the request samples, the chain's tokens are drawn from the draft's distribution, for a
    verifier that weighs the two distributions. Otherwise each token is the draft's most probable one; if the request
    samples, the scores include the noise of the target's draws. Sampled side leaves are drawn together with the chain's
    token, without replacement (SWIFT 4.2, multi-candidate speculative sampling), as many as `drawn_branching` says.
    """

    model: DraftModel

    def __init__(
        self,
        model: DraftModel,
        stop: StopRule,
        branching: Branching | None = None,
        sampled: bool = False,
        drawn_branching: Branching | None = None,
    ) -> None:
        self.model, self.stop, self.sampled = model, stop, sampled
        self.branching, self.drawn_branching = branching, drawn_branching or branching
        widths = [n_candidates for pairs in (self.branching, self.drawn_branching) for _, n_candidates in pairs or ()]
        self.max_depth, self.max_width = stop.max_draft_length, max(widths, default=1)

    def start(self) -> None:
        self.stop = copy(self.stop)
        self.draws = self.sampled and not self.context.rule.greedy
        if self.draws:
            self.branching = self.drawn_branching

    def draft(self, room: int) -> PassGenerator[Draft]:
        model, stop = self.model, self.stop
        tokens, candidates = [self.context.token_ids[-1]], list[tuple[int, ...]]()
        step_probs: list[Tensor] = []
        model.restart()
        stop.start()
        max_steps = min(room, self.max_depth, model.room)
        if max_steps > 0 and stop.keeps_last and model.reads_late:
            return (yield from self._draft_ahead(max_steps))
        while len(candidates) < max_steps:
            logits = (yield from model.extend(tokens[-1:], (len(tokens) - 2,)))[0]
            step_candidates, confidence, probs = self._choose_candidates(tokens[1:], logits)
            is_unsure = stop.unsure(confidence, model.hidden)
            if is_unsure and not stop.keeps_last:
                break
            if probs is not None:
                step_probs.append(probs)
            candidates.append(step_candidates)
            tokens.append(step_candidates[0])
            if is_unsure:
                break
        tree = DraftTree.grow(tokens[0], candidates)
        return Draft(tree, offers_of(tree, step_probs), staged=model.rest(len(tokens), tokens[-1]))

    def _draft_ahead(self, max_steps: int) -> PassGenerator[Draft]:
        """Draft on a device: read each step while the next one runs.

        DEVIATION: the draft ends one step after the unsure one, at which SWIFT's ends: dropping that step would cost
        a draft pass per round (docs/gpu.md).
        """
        stop, branching, is_unsure = self.stop, self.branching, False

        def on_candidates(candidates: tuple[int, ...], confidence: float) -> int:
            nonlocal is_unsure
            is_unsure = stop.unsure(confidence, None)
            return 1 if branching is None else candidates_at(branching, confidence)

        n_candidates = 0 if stop.threshold is None and branching is None else self.max_width
        return (
            yield from self.model.draft_ahead(
                max_steps, n_candidates, on_candidates, lambda: not is_unsure, self.draws, stop.probe
            )
        )

    def observe(self, outcome: Outcome) -> None:
        self.stop.observe(outcome.draft.n_steps, min(len(outcome.walk.path), outcome.draft.n_steps))

    def _choose_candidates(
        self, drafted: Sequence[int], logits: Tensor
    ) -> tuple[tuple[int, ...], float, Tensor | None]:
        """Return the tokens offered at this step, the first one's probability, and its distribution if it was drawn."""
        rule, branching = self.context.rule, self.branching
        if branching is None and rule.is_argmax:
            # One kernel call, where scores would be a float32 copy and four of torch's operations.
            ((token_id, confidence),) = self.context.confidences(logits[None])
            return (token_id,), confidence, None
        if not self.draws:
            scores = self.context.noisy_scores(drafted, logits)
            token_id, confidence = rule.confidence(scores)
            n_candidates = 1 if branching is None else candidates_at(branching, confidence)
            return rule.candidates(scores, token_id, n_candidates), confidence, None
        scores = self.context.scores(drafted, logits)
        probs = scores.double().softmax(dim=-1)
        if branching is not None:
            _, confidence = rule.confidence(scores)
            draws = draw_distinct(rule, probs, candidates_at(branching, confidence))
            return tuple(drawable(draws).tolist()), confidence, probs
        token_id = int(rule.draw_drafts(probs))
        # BiLD stops by the draft's highest probability; the other methods stop by the probability of the drawn token.
        return (token_id,), float(probs[token_id] if self.stop.keeps_last else probs.max()), probs
