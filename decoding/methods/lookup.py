"""Prompt lookup: if the text's end occurred before, the draft is what followed it there (`text_matches`).

The draft is a function of committed tokens and independent of the draws of the round that verifies it, so `TargetWalk`
is exact at every temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.serialization import Settings, count
from ..draft import Draft, Drafter
from ..draft_tree import DraftTree
from ..text_matches import Matches
from ..verify import TargetWalk, Verifier
from . import Resources, method

if TYPE_CHECKING:
    from ...core.types import TokenSource
    from ..work import PassGenerator

MIN_CHANCE = 0.1  # Minimum chance of acceptance to draft a token; about the cost of a row relative to a plain pass.


@dataclass(frozen=True, slots=True)
class LookupSettings(Settings):
    """Prompt lookup: what followed the longest earlier occurrence of the text's end."""

    max_draft_length: int = count(10)
    min_match: int = count(1)  # Minimum length of a match for drafting.


@method("prompt-lookup", "prompt lookup", "n-gram drafting", LookupSettings)
def _lookup(resources: Resources, settings: LookupSettings) -> tuple[Drafter, Verifier]:
    return LookupDrafter(settings), TargetWalk()


class LookupDrafter(Drafter):
    """What followed the longest earlier occurrence of the text's end, if at least `min_match` tokens match.

    The draft ends where the probability that all of it is accepted falls below `MIN_CHANCE`. The cost of a round does
    not grow with the context.
    """

    def __init__(self, settings: LookupSettings) -> None:
        self.max_depth, self.min_match = settings.max_draft_length, settings.min_match

    def start(self) -> None:
        context = self.context
        prompt_ids = context.token_ids[: context.n_prompt]
        self.matches = Matches(prompt_ids=prompt_ids, prediction=context.prediction, corpus=context.corpus)

    def draft(self, room: int) -> PassGenerator[Draft]:
        """Draft from the text. New tokens are indexed here, so that indexing counts as drafting time."""
        yield from ()
        guesses = self.guesses_behind((), room)
        tree = DraftTree.chain([self.context.token_ids[-1], *(token_id for token_id, _ in guesses)])
        return Draft(tree, sources={node: source for node, (_, source) in enumerate(guesses, 1)})

    def guesses_behind(self, token_ids: Sequence[int], room: int) -> list[tuple[int, TokenSource]]:
        self.matches.read(self.context.token_ids)
        cursor = self.matches.at_end()
        for token_id in token_ids:
            cursor.move(token_id)
        is_long_enough = cursor.match_length >= self.min_match
        guesses = cursor.guesses(min(room, self.max_depth), MIN_CHANCE) if is_long_enough else []
        return [(guess.token_id, guess.source) for guess in guesses]
