"""Scoring candidate layer sets on generated text, several in one pass, and estimating their speedups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.costs import CostProfile
from ..core.settings import SwiftSettings
from ..core.types import LayerSet
from ..decoding.context import Context
from ..decoding.methods.adaptive import Acceptance, PassCosts
from ..decoding.work import PassGenerator
from ..models.rows import Pass, Rows
from .strategies import MOST

LONGEST_CHAIN = 24  # Maximum tokens of an adaptive chain in a replay.
LAMBDA_ROUNDS = 4
# Maximum seconds of a pass that scores candidates, as decoding waits for it; twice one candidate's pass if longer.
LONGEST_PASS_S = 1.0
SEARCH_SHARE = 0.03  # Maximum share of a stream's decoding time that the search may take.
FEWEST = 36  # Candidates that a search may always score, even on a short stream.
# Candidates that may always be scored after a shift: the set in use, known sets, and the first new ones.
FEWEST_AGAIN = 5
USUAL_SPEEDUP = 3.0  # Expected speedup over plain decoding, for estimating the time of a stream.
BATCH_GAIN = 0.95  # A larger batch must cut the time per candidate to at most this share.


@dataclass(frozen=True, slots=True)
class WindowScore:
    """A candidate's predictions over a window, one entry per position.

    `ranks[i]`: how many tokens the draft held more probable than the generated one (0: it is the argmax);
    `confidences[i]`: the draft's top-1 probability. `reads_late`: drafts are read while their next step runs there.
    """

    ranks: tuple[int, ...]
    confidences: tuple[float, ...]
    reads_late: bool = False

    @property
    def matchness(self) -> float:
        """Share of positions whose argmax is the generated token (SWIFT Eq. 4)."""
        return sum(rank == 0 for rank in self.ranks) / len(self.ranks)


def score_window(
    context: Context, layer_sets: Sequence[LayerSet], window: int, start: int | None = None
) -> PassGenerator[list[WindowScore]]:
    """Predict `window` generated tokens with every layer set, all in one pass.

    Each candidate reads the target's keys and values up to the window and its own behind that, in scratch slots; the
    tokens of the window are the input, so one pass predicts all positions (SWIFT Eq. 3).

    Args: window: at most the number of generated tokens; the buffer must have window * len(layer_sets) slots left.
          start: where the window begins in the text; None: so that it ends with the latest token.
    """
    n_slots = context.root_slot + window * len(layer_sets)
    assert n_slots <= context.buffer.capacity, f"{n_slots} slots of {context.buffer.capacity}"
    # Position of the token that predicts the first token of the window.
    first = (len(context.token_ids) - window if start is None else start) - 1
    inputs, n = context.token_ids[first : first + window], len(layer_sets)
    visible = torch.eye(n, dtype=torch.bool).kron(torch.ones((window, window), dtype=torch.bool).tril())
    positions = list(range(first, first + window)) * n
    rows = Rows(inputs * n, context.root_slot, positions, visible, tuple(layer_sets), n_read=first)
    logits = yield Pass(context.runtime, rows, context.buffer, kind="beside")  # Shape (n * window, vocab).
    return [_window_score(context, set_logits, first) for set_logits in logits.reshape(n, window, -1).unbind()]


def _window_score(context: Context, logits: Tensor, first: int) -> WindowScore:
    """Return the score of logits (window, vocab) for the tokens after position `first`.

    One candidate at a time: all scores in float32 would fill a memory that holds the logits of all candidates.
    """
    rule, window = context.rule, len(logits)
    context.looks_back = len(context.token_ids) - 1 - first
    if rule.is_argmax:
        scores = logits.float()
    else:
        text = context.text(logits.device)
        rows = [rule.noisy(rule.scores(text[:n], row), n) for n, row in enumerate(logits, first + 1)]
        scores = torch.stack(rows)
    next_tokens = torch.tensor(context.token_ids[first + 1 : first + 1 + window], device=scores.device)
    top, argmax = scores.max(dim=-1)
    ranks = (scores > scores.gather(1, next_tokens[:, None])).sum(dim=-1)
    # Scores often tie in 16 bits. If the draft's argmax is another token of equal score, the rank is 1.
    ranks += (ranks == 0) & (argmax != next_tokens)
    confidences = (top - scores.logsumexp(dim=-1)).exp()
    return WindowScore(tuple(ranks.tolist()), tuple(confidences.tolist()), context.reads_late)


@dataclass(slots=True)
class Replay:
    """Totals of replayed rounds of drafting: tokens, draft steps, and target passes per number of rows."""

    tokens: int = 0
    draft_steps: int = 0
    widths: dict[int, int] = field(default_factory=dict)


def replay(scores: Iterable[WindowScore], settings: SwiftSettings) -> Replay:
    """Replay SWIFT's rounds over windows, one round from every position; windows wrap around.

    A position is accepted if the generated token is the draft's argmax, or, as a side leaf that ends the round, among
    the candidates that its confidence offers. Starting everywhere, not where the last round ended, makes as many rounds
    of a window as it has tokens. Where drafts are read late, each has one step more, and the last one no side leaves.

    DEVIATION: after a miss the draft continues with the confidences it had on the true text, as its own continuation
    was not computed.
    """
    total = Replay()
    for score in scores:
        n = len(score.ranks)
        for start in range(n):
            steps, accepted, rows, on_path, stops = 0, 0, 1, True, False
            while True:
                at = (start + steps) % n
                steps += 1
                stopped, stops = stops, settings.stops_after(score.confidences[at], steps)
                ends = stopped or steps >= settings.max_draft_length if score.reads_late else stops
                offered = 1 if ends and score.reads_late else settings.candidates_at(score.confidences[at])
                rows += offered
                if on_path and score.ranks[at] < offered:
                    accepted += 1
                on_path = on_path and score.ranks[at] == 0
                if ends:
                    break
            total.tokens += accepted + 1
            total.draft_steps += steps
            total.widths[rows] = total.widths.get(rows, 0) + 1
    return total


def swift_speedup(
    scores: Iterable[WindowScore], layer_set: LayerSet, settings: SwiftSettings, costs: CostProfile
) -> float:
    """Return the expected speedup of SWIFT's rounds, replayed over all the windows."""
    played = replay(scores, settings)
    return costs.expected_speedup(layer_set, played.tokens, played.draft_steps, played.widths)


def adaptive_speedup(score: WindowScore, layer_set: LayerSet, costs: CostProfile) -> float:
    """Return the speedup of adaptive chains over a window, one chain from every position; the window wraps around.

    A chain continues while the chance that its next token is accepted exceeds λ times that step's cost; λ is the
    speedup of such chains, found by fixed-point iteration. Where drafts are read late, the latest token's chance is not
    known yet. Earlier text and second candidates, by which all sets gain, are left out.
    """
    n, prices, rate = len(score.ranks), PassCosts(costs, layer_set), 1.0
    acceptance = Acceptance()
    for rank, confidence in zip(score.ranks, score.confidences, strict=True):
        acceptance.learn(confidence, rank == 0)
    chances = [acceptance.of(confidence) for confidence in score.confidences]
    ahead = acceptance.overall.value
    for _ in range(LAMBDA_ROUNDS):
        tokens, spent = 0, 0.0
        for start in range(n):
            # `expected` is the chance that the next token is accepted.
            length, right, alive, expected = 0, True, 1.0, ahead
            while length < min(n, LONGEST_CHAIN):
                step = prices.draft(1) + prices.verify(length + 2) - prices.verify(length + 1)
                if expected < rate * step:
                    break
                at = (start + length) % n
                right = right and score.ranks[at] == 0
                tokens += right
                before, alive = alive, alive * chances[at]
                expected = before * ahead**2 if score.reads_late else alive * ahead
                length += 1
            tokens += 1
            spent += length * prices.draft(1) + prices.verify(length + 1)
        rate = tokens / spent
    return rate


def objective(score: WindowScore, layer_set: LayerSet, settings: SwiftSettings, costs: CostProfile | None) -> float:
    """Return the score to maximise: matchness (SWIFT), or expected speedup over plain decoding."""
    if settings.objective == "matchness" or costs is None:
        return score.matchness
    if settings.method == "adaptive":
        return adaptive_speedup(score, layer_set, costs)
    return swift_speedup([score], layer_set, settings, costs)


def candidates_per_pass(costs: CostProfile | None, window: int) -> int:
    """Return the number of candidates per pass with the lowest measured cost per candidate.

    Measured widths end where more rows make none cheaper (`models.costs`).
    """
    best, n = 1, 2
    while costs is not None and n * window <= max(costs.pass_s):
        seconds = costs.target_pass_s(n * window)
        longest = max(LONGEST_PASS_S, 2 * costs.target_pass_s(window))
        if seconds <= longest and seconds / n < BATCH_GAIN * costs.target_pass_s(best * window) / best:
            best = n
        n *= 2
    return best


def affordable(costs: CostProfile | None, layer_set: LayerSet, window: int, n_tokens: int) -> int:
    """Return the number of candidates that a search may score in a stream of `n_tokens`, by measured costs."""
    return max(FEWEST, min(MOST, in_share(costs, layer_set, window, n_tokens / USUAL_SPEEDUP)))


def in_share(costs: CostProfile | None, layer_set: LayerSet, window: int, n_passes: float) -> int:
    """Return the number of candidates that take `SEARCH_SHARE` of the time of `n_passes` plain passes; 0 without costs.

    A candidate costs a draft pass with `layer_set` over a window, and half of one for the set in use beside it.
    """
    return 0 if costs is None else int(SEARCH_SHARE * n_passes / (1.5 * costs.draft_cost(layer_set, window)))
