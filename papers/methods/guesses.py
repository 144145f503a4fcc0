"""Drafts without a draft model: guesses that the target's own passes refine.

Jacobi decoding: a block of guesses is verified as a chain, and the same pass refines the guesses that were refused
(Santilli et al., arXiv:2305.10427). The block moves along with the text.

Lookahead decoding: the target's pass also runs a window of guesses with W columns and N - 1 levels. Column i of the
oldest level guesses the token i positions after the root, which is column 0. Each newer level holds the guesses of one
pass later, for the token after that of the level before it. The argmaxes after the newest level complete an n-gram per
column, which goes into a pool. They become the next level, and the oldest level is dropped; when one token is
committed, the remaining guesses are again at the right distance from the root. The pool's n-grams that begin with the
root's token are the next draft (Fu et al., arXiv:2402.02057, 3.1 and 3.2).

Guesses depend on committed tokens and argmaxes only, not on what the verifying round draws, so `TargetWalk` is exact at
every temperature.
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
    """Parallel (Jacobi) decoding (arXiv:2305.10427)."""

    window: int = count(8, most=256)  # Number of guesses.


@method("jacobi", "Jacobi decoding", "arXiv:2305.10427", JacobiSettings)
def _jacobi(resources: Resources, settings: JacobiSettings) -> tuple[Drafter, Verifier]:
    return JacobiDrafter(settings), TargetWalk()


class JacobiDrafter(Drafter):
    """Drafts `window` guesses; every pass replaces a guess by the target's argmax after the guesses before it.

    Guesses that no longer change are the greedy output.
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
    """Drafts the pool's n-grams that begin with the root's token, merged into a tree."""

    def __init__(self, settings: LookaheadSettings) -> None:
        self.settings = settings

    def max_rows(self, room: int) -> int:
        settings = self.settings
        n_extra = max(n * (settings.window + settings.ngram - 1 - n) - 1 for n in range(1, settings.ngram))
        return 1 + settings.guesses * min(room, settings.ngram - 1) + n_extra

    def start(self) -> None:
        self.pool = NgramPool(self.settings.guesses)
        self.window = Window(self.settings, self.context.token_ids[: self.context.n_prompt])
        self._runs_window = False  # True if the current round also runs the window's guesses.

    def draft(self, room: int) -> PassGenerator[Draft]:
        yield from ()
        root_id = self.context.token_ids[-1]
        tree = merge_paths(root_id, self.pool.continuations(root_id), room)
        # Skip the window in the last round, and where its guesses would exceed the model's positions.
        max_depth = self.window.width + self.window.n_levels - 2  # Positions from the root to the last guess.
        self._runs_window = room > 1 and self.context.root_slot + max_depth < self.context.runtime.max_positions
        extra_rows = self.window.rows(root_id) if self._runs_window else None
        return Draft(tree, extra_rows=extra_rows, wants_argmaxes=self._runs_window)

    def observe(self, outcome: Outcome) -> None:
        if not self._runs_window:
            return
        # The root is the window's first cell; its argmax comes first, and those of the other cells after the tree's.
        argmaxes = [outcome.argmaxes[0], *outcome.argmaxes[outcome.draft.tree.n_nodes :]]
        for ngram in self.window.advance(argmaxes[-self.window.width :]):
            self.pool.add(ngram)


class NgramPool:
    """The `size` latest n-grams for each first token."""

    def __init__(self, size: int) -> None:
        self.size = size
        # First token -> continuations of its n-grams, oldest first.
        self._continuations: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram as the newest of its first token; drop this token's oldest n-gram if there are too many."""
        continuation, continuations = tuple(ngram[1:]), self._continuations.setdefault(ngram[0], {})
        continuations.pop(continuation, None)
        continuations[continuation] = None
        if len(continuations) > self.size:
            del continuations[next(iter(continuations))]

    def continuations(self, first: int) -> list[tuple[int, ...]]:
        """Return the stored continuations of a token, newest first."""
        return list(reversed(self._continuations.get(first, {})))


class Window:
    """The window's guesses: `levels[j][i]` is i + j positions after the root, `levels[0][0]` the root.

    At first there is only the oldest level, filled with the prompt's last tokens. A new level removes a column until
    there are N - 1 levels; the initial width is chosen so that W columns remain.

    DEVIATION: the columns do not move when a round commits more than one token, so the guesses then lag behind the
    root. Moving them gave shorter accepted drafts in a small trial (SmolLM2-135M: M 1.37 instead of 1.42).
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
        """Add the argmaxes `newest` as the next level; return the n-grams that they complete."""
        if self.n_levels < self.max_levels:
            self.levels = [level[1:] for level in (*self.levels, newest)]
            return []
        ngrams = list(zip(*self.levels, newest, strict=True))
        self.levels = [*self.levels[1:], newest]
        return ngrams


@lru_cache(maxsize=64)
def guess_mask(n_levels: int, width: int) -> Tensor:
    """Return the attention mask of guesses: a guess sees level 0 up to its column, and its column up to its level.

    Returns: bool, (guesses, guesses) in the order of `Window.rows`; shared by callers, which must not write to it.
    """
    import torch

    level = torch.arange(n_levels).repeat_interleave(width)[1:]
    column = torch.arange(width).repeat(n_levels)[1:]
    is_in_level_0 = (level[None] == 0) & (column[None] <= column[:, None])
    is_in_column = (column[None] == column[:, None]) & (level[None] <= level[:, None])
    return is_in_level_0 | is_in_column


def merge_paths(root: int, continuations: Sequence[Sequence[int]], room: int) -> DraftTree:
    """Return the continuations, cut to `room` tokens, as a tree where equal prefixes share nodes; keep their order."""
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
