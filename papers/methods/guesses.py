"""Drafts without a draft model: guesses that the target's own passes refine.

Jacobi decoding: a block of guesses is checked as a chain, and the same pass refines those that were refused (Santilli
et al., arXiv:2305.10427, as a block that moves along with the text).

Lookahead decoding: n-grams that guesses pass through are drafted. Beside the draft, the target's pass runs a window of
W columns and N - 1 levels. Column i of the oldest level guesses the token i after the root (column 0 is the root), and
each further level the token after the one before it, as guessed one pass later. The argmax under each column completes
an n-gram for the pool and becomes the newest level, while the oldest is dropped: after one committed token, every guess
is again where it belongs. The n-grams that begin with the root's token are the next draft (Fu et al., arXiv:2402.02057,
3.1 and 3.2).

Both are functions of committed tokens and of argmaxes after them, and depend on no draw of the round that
checks them: `TargetWalk` is exact at every temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ...core.serialization import Settings, count
from ...decoding.draft import Draft, Drafter, Outcome
from ...decoding.draft_tree import DraftTree, ExtraRows
from ...decoding.methods import Resources, method
from ...decoding.verify import TargetWalk, Verifier

if TYPE_CHECKING:
    from torch import Tensor

    from ...decoding.work import PassGenerator


@dataclass(frozen=True, slots=True)
class JacobiSettings(Settings):
    """Parallel (Jacobi) decoding (arXiv:2305.10427): guesses refined together."""

    window: int = count(8, most=256)


@method("jacobi", "Jacobi decoding", "arXiv:2305.10427", JacobiSettings)
def _jacobi(resources: Resources, settings: JacobiSettings) -> tuple[Drafter, Verifier]:
    return JacobiDrafter(settings), TargetWalk()


class JacobiDrafter(Drafter):
    """`window` guesses, each replaced by the target's argmax after the guesses before it, until they no longer change.

    A fixed point is the greedy output.
    """

    def __init__(self, settings: JacobiSettings) -> None:
        self.max_depth = settings.window

    def start(self) -> None:
        self.guesses = [self.context.token_ids[-1]] * self.max_depth

    def draft(self, room: int) -> PassGenerator[Draft]:
        yield from ()
        return Draft(DraftTree.chain([self.context.token_ids[-1], *self.guesses[:room]]), wants_argmaxes=True)

    def observe(self, outcome: Outcome) -> None:
        """Update the guesses with the argmaxes of the rows after the committed tokens."""
        committed = outcome.walk.token_ids
        refined_guesses = list(outcome.argmaxes[len(committed) :])
        last_guess = refined_guesses[-1] if refined_guesses else committed[-1]
        self.guesses = refined_guesses + [last_guess] * (self.max_depth - len(refined_guesses))


@dataclass(frozen=True, slots=True)
class LookaheadSettings(Settings):
    """Lookahead decoding (arXiv:2402.02057)."""

    ngram: int = count(5, least=2, most=16)  # N: tokens of an n-gram.
    window: int = count(7, most=256)  # W: columns of the guess window.
    guesses: int = count(7, most=256)  # G: maximum n-grams verified per round.


@method("lookahead", "Lookahead decoding", "arXiv:2402.02057", LookaheadSettings)
def _lookahead(resources: Resources, settings: LookaheadSettings) -> tuple[Drafter, Verifier]:
    return LookaheadDrafter(settings), TargetWalk()


class LookaheadDrafter(Drafter):
    """At most `guesses` (G) n-grams of `ngram` (N) tokens, from a window `window` (W) columns wide."""

    def __init__(self, settings: LookaheadSettings) -> None:
        self.settings = settings

    def max_rows(self, room: int) -> int:
        settings = self.settings
        n_extra = max(n * (settings.window + settings.ngram - 1 - n) - 1 for n in range(1, settings.ngram))
        return 1 + settings.guesses * min(room, settings.ngram - 1) + n_extra

    def start(self) -> None:
        self.pool = NgramPool(self.settings.guesses)
        self.window = Window(self.settings, self.context.token_ids[: self.context.n_prompt])
        self._adds_guess_rows = False  # True if the current round also runs the window's guesses.

    def draft(self, room: int) -> PassGenerator[Draft]:
        yield from ()
        root_id = self.context.token_ids[-1]
        tree = merge_paths(root_id, self.pool.continuations(root_id), room)
        # Skip the window if this is the last round or if its guesses would exceed the model's positions.
        max_depth = self.window.width + self.window.n_levels - 2  # Positions from the root to the last guess.
        self._adds_guess_rows = room > 1 and self.context.root_slot + max_depth < self.context.runtime.max_positions
        return Draft(
            tree,
            extra_rows=self.window.rows(root_id) if self._adds_guess_rows else None,
            wants_argmaxes=self._adds_guess_rows,
        )

    def observe(self, outcome: Outcome) -> None:
        if not self._adds_guess_rows:
            return
        # The root is the first cell of the window, so its argmax comes first.
        new_guesses = [outcome.argmaxes[0], *outcome.argmaxes[outcome.draft.tree.n_nodes :]]
        for ngram in self.window.advance(new_guesses[-self.window.width :]):
            self.pool.add(ngram)


class NgramPool:
    """The `size` latest n-grams for each first token."""

    def __init__(self, size: int) -> None:
        self.size = size
        # First token -> continuations of its n-grams, oldest first.
        self._continuations: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram as the newest of its first token; evict that token's oldest n-gram if full."""
        continuation, continuations = tuple(ngram[1:]), self._continuations.setdefault(ngram[0], {})
        continuations.pop(continuation, None)
        continuations[continuation] = None
        if len(continuations) > self.size:
            del continuations[next(iter(continuations))]

    def continuations(self, first: int) -> list[tuple[int, ...]]:
        """Return the stored continuations of a token, newest first."""
        return list(reversed(self._continuations.get(first, {})))


class Window:
    """The guesses: `levels[j][i]` is i + j tokens after the root, `levels[0][0]` the root.

    DEVIATION: a round that commits more than one token leaves the guesses that far behind: moving the columns along
    accepted less in a small trial (SmolLM2-135M, M 1.37 against 1.42).

    At first there is only the oldest level, filled with the prompt's last tokens. Every further level removes a column,
    and the initial width is chosen so that N - 1 levels of W columns remain.
    """

    def __init__(self, settings: LookaheadSettings, prompt_ids: Sequence[int]) -> None:
        self.max_levels = settings.ngram - 1
        width = settings.window + self.max_levels - 1
        n_repeats = -(-width // len(prompt_ids))
        self.levels = [(list(prompt_ids) * n_repeats)[-width:]]

    @property
    def n_levels(self) -> int:
        return len(self.levels)

    @property
    def width(self) -> int:
        return len(self.levels[0])

    def rows(self, root: int) -> ExtraRows | None:
        """Return all guesses except the root, level by level, as extra rows of the verification pass."""
        self.levels[0][0] = root
        cells = [(level, column) for level in range(self.n_levels) for column in range(self.width)][1:]
        if not cells:
            return None
        token_ids = tuple(self.levels[level][column] for level, column in cells)
        depths = tuple(level + column for level, column in cells)
        return ExtraRows(token_ids, depths, guess_mask(self.n_levels, self.width), min(self.width, len(cells)))

    def advance(self, newest: list[int]) -> list[tuple[int, ...]]:
        """Append the argmaxes `newest` as the next level; return the n-grams that they complete."""
        if self.n_levels < self.max_levels:
            self.levels = [level[1:] for level in (*self.levels, newest)]
            return []
        ngrams = list(zip(*self.levels, newest, strict=True))
        self.levels = [*self.levels[1:], newest]
        return ngrams


@lru_cache(maxsize=64)
def guess_mask(n_levels: int, width: int) -> Tensor:
    """Return the attention mask of guesses: a guess sees level 0 up to its column, and its column up to its level.

    Returns: bool, (guesses, guesses) in the order of `Window.rows`; not to be written to.
    """
    import torch

    level = torch.arange(n_levels).repeat_interleave(width)[1:]
    column = torch.arange(width).repeat(n_levels)[1:]
    is_older_column = (level[None] == 0) & (column[None] <= column[:, None])
    return is_older_column | (column[None] == column[:, None]) & (level[None] <= level[:, None])


def merge_paths(root: int, continuations: Sequence[Sequence[int]], room: int) -> DraftTree:
    """Return all continuations, cut to `room` tokens, as a tree with shared prefixes; keeps their order."""
    token_ids, parents, depth = [root], [-1], 0
    node_of_token: dict[tuple[int, int], int] = {}
    for continuation in continuations:
        node = 0
        for level, token_id in enumerate(continuation[:room], 1):
            if (node, token_id) not in node_of_token:
                node_of_token[node, token_id] = len(token_ids)
                token_ids.append(token_id)
                parents.append(node)
            node, depth = node_of_token[node, token_id], max(depth, level)
    return DraftTree(tuple(token_ids), tuple(parents), depth)
