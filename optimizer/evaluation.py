"""Scores of candidate layer sets on generated text, several candidates in one pass, and their expected speedups."""

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

# Positions of a window's block; see `score_window`. With 4, observed speedups of poor drafts are 0.94 to 1.04 times the
# predicted ones; with 32 they are up to 1.5 times (bench/LOG.md).
DRAFT_BLOCK = 4
MAX_CHAIN_LENGTH = 24  # Maximum tokens of an adaptive chain in a replay.
LAMBDA_ITERATIONS = 4  # Fixed-point iterations for λ, see `adaptive_speedup`.
# Maximum seconds of a pass that scores candidates, because decoding waits for it. A pass may always take twice the time
# of one candidate's.
MAX_PASS_S = 1.0
SEARCH_TIME_SHARE = 0.03  # Maximum share of a stream's decoding time that the search may take.
MIN_CANDIDATES = 36  # Candidates that a search may always score, even on a short stream.
# Candidates that may always be scored after a shift: the set in use, known sets, and the first new candidates.
MIN_CANDIDATES_REOPENED = 5
USUAL_SPEEDUP = 3.0  # Assumed speedup over plain decoding, to estimate how long a stream takes.
MAX_BATCH_COST_RATIO = 0.95  # A larger batch must cut the time per candidate to at most this share.


@dataclass(frozen=True, slots=True)
class WindowScore:
    """A candidate's predictions over a window, one entry per position.

    `ranks[i]`: number of tokens that the draft rates above the generated one (0: the generated token is its argmax).
    `confidences[i]`: the draft's top-1 probability. `reads_late`: on this device a drafted token is read only while
    the next draft step runs.
    """

    ranks: tuple[int, ...]
    confidences: tuple[float, ...]
    reads_late: bool = False

    @property
    def matchness(self) -> float:
        """Share of positions at which the draft's argmax is the generated token (SWIFT Eq. 4)."""
        return sum(rank == 0 for rank in self.ranks) / len(self.ranks)


def score_window(
    context: Context, layer_sets: Sequence[LayerSet], window: int, start: int | None = None, block: int = DRAFT_BLOCK
) -> PassGenerator[list[WindowScore]]:
    """Predict `window` generated tokens with every layer set, all in one pass; return the scores.

    The window's tokens are the input, so one pass predicts all positions (SWIFT Eq. 3). The window is scored in blocks
    of about a draft's length. A candidate reads the target's keys and values up to a block, as a draft does up to its
    first token, and its own within the block, which lie in scratch slots.

    DEVIATION: the paper does not cut windows, so that a draft reads more of its own keys than in real rounds. With the
    objective "matchness", which is the paper's, a window is one block.

    Args: window: at most the number of generated tokens; the buffer must have window * len(layer_sets) free slots.
          start: position of the window's first token in the text; None: the window ends with the latest token.
          block: number of positions of a block; the last block of a window may be shorter.
    """
    n_slots = context.root_slot + window * len(layer_sets)
    assert n_slots <= context.buffer.capacity, f"{n_slots} slots of {context.buffer.capacity}"
    # Position of the token that predicts the first token of the window.
    first_position = (len(context.token_ids) - window if start is None else start) - 1
    input_ids, n_sets = context.token_ids[first_position : first_position + window], len(layer_sets)
    offsets = torch.arange(window)
    starts_of_blocks = offsets - offsets % block
    older = torch.arange(context.root_slot - first_position) < starts_of_blocks[:, None]
    own = (offsets[:, None] >= offsets) & (offsets >= starts_of_blocks[:, None])
    visible = torch.cat((older.repeat(n_sets, 1), torch.eye(n_sets, dtype=torch.bool).kron(own)), dim=1)
    positions = list(range(first_position, first_position + window)) * n_sets
    rows = Rows(input_ids * n_sets, context.root_slot, positions, visible, tuple(layer_sets))
    logits = yield Pass(context.runtime, rows, context.buffer, kind="beside")  # Shape (n * window, vocab).
    return [
        _window_score(context, set_logits, first_position) for set_logits in logits.reshape(n_sets, window, -1).unbind()
    ]


def _window_score(context: Context, logits: Tensor, first_position: int) -> WindowScore:
    """Return the score of one candidate's logits (window, vocab) for the tokens after position `first_position`.

    Called for one candidate at a time to limit the memory for scores in float32.
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
    """Return how many rounds begin at each position while a window's number of tokens is generated.

    A round begins where the previous one ended, and such positions precede a mismatch more often than others do. The
    window wraps around. The result is the mean over all positions at which the first round can begin.

    Args: tokens_of_rounds: number of tokens that a round from each position generates.
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

    A token is accepted if it is the draft's argmax. A token among the other candidates that the confidence allows is
    accepted as a side leaf, which ends the round. If drafts are read late, a draft has one step more, and its last step
    has no side leaves.

    DEVIATION: after a mismatch the draft continues with its confidences on the true text, because its own continuation
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
    """Return the expected speedup of SWIFT's rounds over plain decoding, replayed over all windows."""
    totals = replay(scores, settings)
    return costs.expected_speedup(layer_set, totals.tokens, totals.draft_steps, totals.widths)


def adaptive_speedup(score: WindowScore, layer_set: LayerSet, costs: CostProfile) -> float:
    """Return the expected speedup of adaptive chains over a window; see `rounds_by_start`.

    A chain continues while the chance that its next token is accepted exceeds λ times the cost of that step. λ is the
    speedup of such chains, found by fixed-point iteration. If drafts are read late, the chance of the latest token is
    not known yet. Drafts from earlier text and second candidates are ignored, because they help all sets alike.
    """
    n_positions, pass_costs = len(score.ranks), PassCosts(costs, layer_set)
    tokens_per_cost = 1.0  # λ: tokens per cost of a plain pass.
    acceptance = Acceptance()
    for rank, confidence in zip(score.ranks, score.confidences, strict=True):
        acceptance.learn(confidence, rank == 0)
    chances = [acceptance.of(confidence) for confidence in score.confidences]
    usual_acceptance = acceptance.overall.value
    for _ in range(LAMBDA_ITERATIONS):
        tokens_of_rounds, costs_of_rounds = list[int](), list[float]()
        for start in range(n_positions):
            length, n_tokens, is_accepted = 0, 1, True
            # Chances that the whole chain is accepted, and that the next token will be accepted as well.
            chain_chance, next_chance = 1.0, usual_acceptance
            while length < min(n_positions, MAX_CHAIN_LENGTH):
                step_cost = pass_costs.draft(1) + pass_costs.verify(length + 2) - pass_costs.verify(length + 1)
                if next_chance < tokens_per_cost * step_cost:
                    break
                position = (start + length) % n_positions
                is_accepted = is_accepted and score.ranks[position] == 0
                n_tokens += is_accepted
                chance_before, chain_chance = chain_chance, chain_chance * chances[position]
                next_chance = (
                    chance_before * usual_acceptance**2 if score.reads_late else chain_chance * usual_acceptance
                )
                length += 1
            tokens_of_rounds.append(n_tokens)
            costs_of_rounds.append(length * pass_costs.draft(1) + pass_costs.verify(length + 1))
        counts = rounds_by_start(tokens_of_rounds)
        total_tokens, total_cost = (sum(map(mul, counts, values)) for values in (tokens_of_rounds, costs_of_rounds))
        tokens_per_cost = total_tokens / total_cost
    return tokens_per_cost


def objective(score: WindowScore, layer_set: LayerSet, settings: SwiftSettings, costs: CostProfile | None) -> float:
    """Return the score that the search maximises: matchness (SWIFT), or expected speedup over plain decoding."""
    if settings.objective == "matchness" or costs is None:
        return score.matchness
    if settings.method == "adaptive":
        return adaptive_speedup(score, layer_set, costs)
    return swift_speedup([score], layer_set, settings, costs)


def candidates_per_pass(costs: CostProfile | None, window: int) -> int:
    """Return the number of candidates per pass with the lowest measured cost per candidate.

    Only measured widths are considered: measurements end where further rows no longer lower the cost per row
    (`models.costs`).
    """
    best_batch, batch = 1, 2
    while costs is not None and batch * window <= max(costs.pass_s):
        pass_s, best_pass_s = costs.target_pass_s(batch * window), costs.target_pass_s(best_batch * window)
        is_short = pass_s <= max(MAX_PASS_S, 2 * costs.target_pass_s(window))
        if is_short and pass_s / batch < MAX_BATCH_COST_RATIO * best_pass_s / best_batch:
            best_batch = batch
        batch *= 2
    return best_batch


def affordable_candidates(costs: CostProfile | None, layer_set: LayerSet, window: int, n_tokens: int) -> int:
    """Return the maximum number of candidates that a search may score in a stream of `n_tokens`, by measured costs."""
    n_in_share = candidates_in_share(costs, layer_set, window, n_tokens / USUAL_SPEEDUP)
    return max(MIN_CANDIDATES, min(MAX_CANDIDATES, n_in_share))


def candidates_in_share(costs: CostProfile | None, layer_set: LayerSet, window: int, n_passes: float) -> int:
    """Return how many candidates take `SEARCH_TIME_SHARE` of the time of `n_passes` plain passes; 0 without costs.

    A candidate costs one draft pass with `layer_set` over a window, plus half a pass for scoring the set in use.
    """
    return 0 if costs is None else int(SEARCH_TIME_SHARE * n_passes / (1.5 * costs.draft_cost(layer_set, window)))
