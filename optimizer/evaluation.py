"""Scoring candidate layer sets on generated text, several in one pass, and estimating their speedups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import mul

import torch
from torch import Tensor

from ..core.costs import CostProfile
from ..core.layer_sets import LayerSet
from ..core.settings import SwiftSettings
from ..decoding.context import Context
from ..decoding.draft_worth import Acceptance, PassCosts
from ..decoding.work import PassGenerator
from ..models.rows import Pass, Rows
from .strategies import MAX_CANDIDATES

MAX_CHAIN_LENGTH = 24  # Maximum tokens of an adaptive chain in a replay.
LAMBDA_ROUNDS = 4
# Maximum seconds of a pass that scores candidates, as decoding waits for it; twice one candidate's pass if longer.
MAX_PASS_S = 1.0
SEARCH_TIME_SHARE = 0.03  # Maximum share of a stream's decoding time that the search may take.
MIN_CANDIDATES = 36  # Candidates that a search may always score, even on a short stream.
# Candidates that may always be scored after a shift: the set in use, known sets, and the first new ones.
MIN_CANDIDATES_REOPENED = 5
USUAL_SPEEDUP = 3.0  # Expected speedup over plain decoding, for estimating the time of a stream.
MAX_BATCH_COST_RATIO = 0.95  # A larger batch must cut the time per candidate to at most this share.


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

    Each candidate reads the target's keys and values up to the window and then its own, in scratch slots; the
    tokens of the window are the input, so one pass predicts all positions (SWIFT Eq. 3).

    Args: window: at most the number of generated tokens; the buffer must have window * len(layer_sets) slots left.
          start: where the window begins in the text; None: so that it ends with the latest token.
    """
    n_slots = context.root_slot + window * len(layer_sets)
    assert n_slots <= context.buffer.capacity, f"{n_slots} slots of {context.buffer.capacity}"
    # Position of the token that predicts the first token of the window.
    first_position = (len(context.token_ids) - window if start is None else start) - 1
    input_ids, n_sets = context.token_ids[first_position : first_position + window], len(layer_sets)
    visible = torch.eye(n_sets, dtype=torch.bool).kron(torch.ones((window, window), dtype=torch.bool).tril())
    positions = list(range(first_position, first_position + window)) * n_sets
    rows = Rows(input_ids * n_sets, context.root_slot, positions, visible, tuple(layer_sets), n_read=first_position)
    logits = yield Pass(context.runtime, rows, context.buffer, kind="beside")  # Shape (n * window, vocab).
    return [
        _window_score(context, set_logits, first_position) for set_logits in logits.reshape(n_sets, window, -1).unbind()
    ]


def _window_score(context: Context, logits: Tensor, first_position: int) -> WindowScore:
    """Return the score of logits (window, vocab) for the tokens after position `first_position`.

    One candidate at a time: all scores in float32 would fill a memory that holds the logits of all candidates.
    """
    rule, window = context.rule, len(logits)
    context.looks_back = len(context.token_ids) - 1 - first_position
    if rule.is_argmax:
        scores = logits.float()
    else:
        committed_ids = context.text(logits.device)
        noisy_rows = [
            rule.noisy(rule.scores(committed_ids[:position], row), position)
            for position, row in enumerate(logits, first_position + 1)
        ]
        scores = torch.stack(noisy_rows)
    next_tokens = torch.tensor(
        context.token_ids[first_position + 1 : first_position + 1 + window], device=scores.device
    )
    top_scores, argmax = scores.max(dim=-1)
    ranks = (scores > scores.gather(1, next_tokens[:, None])).sum(dim=-1)
    # Scores often tie in 16 bits. If the draft's argmax is another token of equal score, the rank is 1.
    ranks += (ranks == 0) & (argmax != next_tokens)
    confidences = (top_scores - scores.logsumexp(dim=-1)).exp()
    return WindowScore(tuple(ranks.tolist()), tuple(confidences.tolist()), context.reads_late)


@dataclass(slots=True)
class Replay:
    """Mean totals of replayed rounds of drafting: tokens, draft steps, and target passes per number of rows."""

    tokens: float = 0.0
    draft_steps: float = 0.0
    widths: dict[int, float] = field(default_factory=dict)


def rounds_by_start(tokens_of_rounds: Sequence[int]) -> list[float]:
    """Return how many rounds begin at each position of a window while as many tokens as it has are generated.

    A round begins where the last one ended, which is more often before a miss than any position is. The window wraps
    around, and the result is the mean over all positions at which the first round can begin.

    Args: tokens_of_rounds: how many tokens a round from each position gives.
    """
    n_positions = len(tokens_of_rounds)
    counts = [0] * n_positions
    for first in range(n_positions):
        n_tokens = 0
        while n_tokens < n_positions:
            start = (first + n_tokens) % n_positions
            counts[start] += 1
            n_tokens += tokens_of_rounds[start]
    return [count / n_positions for count in counts]


def replay(scores: Iterable[WindowScore], settings: SwiftSettings) -> Replay:
    """Replay SWIFT's rounds over windows; see `rounds_by_start`.

    A position is accepted if the generated token is the draft's argmax, or, as a side leaf that ends the round, among
    the candidates that its confidence offers. Where drafts are read late, each has one step more, and the last one no
    side leaves.

    DEVIATION: after a miss the draft continues with the confidences it had on the true text, as its own continuation
    was not computed.
    """
    totals = Replay()
    for score in scores:
        n_positions = len(score.ranks)
        rounds: list[tuple[int, int, int]] = []  # Tokens, draft steps and rows of the round from each position.
        for start in range(n_positions):
            steps, accepted, rows, on_path, is_stopped = 0, 0, 1, True, False
            while True:
                position = (start + steps) % n_positions
                steps += 1
                was_stopped, is_stopped = is_stopped, settings.stops_after(score.confidences[position], steps)
                is_last_step = was_stopped or steps >= settings.max_draft_length if score.reads_late else is_stopped
                n_candidates = (
                    1 if is_last_step and score.reads_late else settings.candidates_at(score.confidences[position])
                )
                rows += n_candidates
                if on_path and score.ranks[position] < n_candidates:
                    accepted += 1
                on_path = on_path and score.ranks[position] == 0
                if is_last_step:
                    break
            rounds.append((accepted + 1, steps, rows))
        counts = rounds_by_start([n_tokens for n_tokens, _, _ in rounds])
        for count, (n_tokens, steps, rows) in zip(counts, rounds, strict=True):
            totals.tokens += count * n_tokens
            totals.draft_steps += count * steps
            totals.widths[rows] = totals.widths.get(rows, 0.0) + count
    return totals


def swift_speedup(
    scores: Iterable[WindowScore], layer_set: LayerSet, settings: SwiftSettings, costs: CostProfile
) -> float:
    """Return the expected speedup of SWIFT's rounds, replayed over all the windows."""
    totals = replay(scores, settings)
    return costs.expected_speedup(layer_set, totals.tokens, totals.draft_steps, totals.widths)


def adaptive_speedup(score: WindowScore, layer_set: LayerSet, costs: CostProfile) -> float:
    """Return the speedup of adaptive chains over a window; see `rounds_by_start`.

    A chain continues while the chance that its next token is accepted exceeds λ times that step's cost; λ is the
    speedup of such chains, found by fixed-point iteration. Where drafts are read late, the latest token's chance is not
    known yet. Earlier text and second candidates, by which all sets gain, are left out.
    """
    n_positions, pass_costs, tokens_per_cost = len(score.ranks), PassCosts(costs, layer_set), 1.0
    acceptance = Acceptance()
    for rank, confidence in zip(score.ranks, score.confidences, strict=True):
        acceptance.learn(confidence, rank == 0)
    chances = [acceptance.of(confidence) for confidence in score.confidences]
    usual_acceptance = acceptance.overall.value
    for _ in range(LAMBDA_ROUNDS):
        tokens_of_rounds, costs_of_rounds = list[int](), list[float]()
        for start in range(n_positions):
            # `expected_chance` is the chance that the next token is accepted.
            length, is_right, chain_chance, expected_chance = 0, True, 1.0, usual_acceptance
            n_tokens = 1
            while length < min(n_positions, MAX_CHAIN_LENGTH):
                step_cost = pass_costs.draft(1) + pass_costs.verify(length + 2) - pass_costs.verify(length + 1)
                if expected_chance < tokens_per_cost * step_cost:
                    break
                position = (start + length) % n_positions
                is_right = is_right and score.ranks[position] == 0
                n_tokens += is_right
                chance_before, chain_chance = chain_chance, chain_chance * chances[position]
                expected_chance = (
                    chance_before * usual_acceptance**2 if score.reads_late else chain_chance * usual_acceptance
                )
                length += 1
            tokens_of_rounds.append(n_tokens)
            costs_of_rounds.append(length * pass_costs.draft(1) + pass_costs.verify(length + 1))
        counts = rounds_by_start(tokens_of_rounds)
        n_tokens_of_all, cost_of_all = (sum(map(mul, counts, part)) for part in (tokens_of_rounds, costs_of_rounds))
        tokens_per_cost = n_tokens_of_all / cost_of_all
    return tokens_per_cost


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
    best_batch, batch = 1, 2
    while costs is not None and batch * window <= max(costs.pass_s):
        seconds = costs.target_pass_s(batch * window)
        max_pass_s = max(MAX_PASS_S, 2 * costs.target_pass_s(window))
        if (
            seconds <= max_pass_s
            and seconds / batch < MAX_BATCH_COST_RATIO * costs.target_pass_s(best_batch * window) / best_batch
        ):
            best_batch = batch
        batch *= 2
    return best_batch


def affordable_candidates(costs: CostProfile | None, layer_set: LayerSet, window: int, n_tokens: int) -> int:
    """Return the number of candidates that a search may score in a stream of `n_tokens`, by measured costs."""
    return max(
        MIN_CANDIDATES, min(MAX_CANDIDATES, candidates_in_share(costs, layer_set, window, n_tokens / USUAL_SPEEDUP))
    )


def candidates_in_share(costs: CostProfile | None, layer_set: LayerSet, window: int, n_passes: float) -> int:
    """Return how many candidates take `SEARCH_TIME_SHARE` of the time of `n_passes` plain passes; 0 without costs.

    A candidate costs a draft pass with `layer_set` over a window, and half of one for the set in use.
    """
    return 0 if costs is None else int(SEARCH_TIME_SHARE * n_passes / (1.5 * costs.draft_cost(layer_set, window)))
