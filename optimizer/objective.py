"""What a window's predictions are worth: the score that a search maximises."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..core.costs import CostProfile
from ..core.settings import SwiftSettings
from ..core.types import LayerSet
from ..decoding.worth import Acceptance, Prices
from .evaluation import WindowScore

LONGEST_CHAIN = 24  # tokens of an adaptive draft
LAMBDA_ROUNDS = 4


@dataclass(slots=True)
class Replay:
    """What rounds of drafting would have come to: tokens, draft steps, and target passes per number of rows."""

    tokens: int = 0
    draft_steps: int = 0
    widths: dict[int, int] = field(default_factory=dict)


def replay(score: WindowScore, settings: SwiftSettings) -> Replay:
    """Replay SWIFT's rounds over a window, one from every position, the window taken as a ring.

    A position is accepted if the generated token is the draft's argmax, or, as a side leaf that ends the round, among
    the candidates its confidence offers. Starting everywhere instead of where the last round ended makes one window
    worth as many rounds as it has tokens.

    DEVIATION: after a miss the draft goes on with the confidences it had on the true text; its own wrong
    continuation was never computed.
    """
    n = len(score.ranks)
    total = Replay()
    for start in range(n):
        steps, accepted, rows, on_path = 0, 0, 1, True
        while True:
            at = (start + steps) % n
            offered = settings.candidates_at(score.confidences[at])
            steps += 1
            rows += offered
            if on_path and score.ranks[at] < offered:
                accepted += 1
            on_path = on_path and score.ranks[at] == 0
            if settings.stops_after(score.confidences[at], steps):
                break
        total.tokens += accepted + 1
        total.draft_steps += steps
        total.widths[rows] = total.widths.get(rows, 0) + 1
    return total


def replay_all(scores: Iterable[WindowScore], settings: SwiftSettings) -> Replay:
    """`replay` over each of several windows, together."""
    total = Replay()
    for score in scores:
        played = replay(score, settings)
        total.tokens += played.tokens
        total.draft_steps += played.draft_steps
        for width, count in played.widths.items():
            total.widths[width] = total.widths.get(width, 0) + count
    return total


def adaptive_speedup(score: WindowScore, layer_set: LayerSet, costs: CostProfile) -> float:
    """Tokens per plain pass's time of adaptive chains over a window, one from every position, the window as a ring.

    A chain goes on while the chance that its next token counts exceeds λ times that step's cost; λ is what such chains
    come to, found by going round a few times. Earlier text and second candidates are left out: all sets gain by them.
    """
    n, prices, rate = len(score.ranks), Prices(costs, layer_set), 1.0
    acceptance = Acceptance()
    for rank, confidence in zip(score.ranks, score.confidences, strict=True):
        acceptance.learn(confidence, rank == 0)
    chances = [acceptance.of(confidence) for confidence in score.confidences]
    ahead = acceptance.overall.value
    for _ in range(LAMBDA_ROUNDS):
        tokens, spent = 0, 0.0
        for start in range(n):
            length, right, alive = 0, True, 1.0
            while length < min(n, LONGEST_CHAIN):
                step = prices.draft(1) + prices.verify(length + 2) - prices.verify(length + 1)
                if alive * ahead < rate * step:
                    break
                at = (start + length) % n
                right = right and score.ranks[at] == 0
                tokens += right
                alive *= chances[at]
                length += 1
            tokens += 1
            spent += length * prices.draft(1) + prices.verify(length + 1)
        rate = tokens / spent
    return rate


def objective(score: WindowScore, layer_set: LayerSet, settings: SwiftSettings, costs: CostProfile | None) -> float:
    """The number that a search maximises: matchness (SWIFT), or tokens per measured time against plain decoding."""
    if settings.objective == "matchness" or costs is None:
        return score.matchness
    if settings.method == "adaptive":
        return adaptive_speedup(score, layer_set, costs)
    played = replay(score, settings)
    return costs.expected_speedup(layer_set, played.tokens, played.draft_steps, played.widths)
