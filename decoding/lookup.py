"""Prompt lookup: where the text's end occurred before, what followed it there is the draft.

A drafted token costs a row of the target's pass, so a draft is only as long as it is likely to stand. How likely is
learnt from the text itself: at each of its tokens, the prompt's included, the match before it said what would come.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.method_settings import LookupSettings
from ..core.types import LayerSet
from .automaton import SuffixAutomaton
from .context import Context
from .draft import Draft, Drafting, Outcome
from .engine import PassGenerator
from .tree import DraftTree

WORTH = 0.1  # chance of standing from which on a token is drafted; about a row's cost over that of a token
LONGEST = 8  # match lengths from here on are counted together
PRIOR_TOKENS = 2  # how many observed tokens the prior weighs
EARLIER_TOKENS = 8  # and how many what earlier texts say
MOST_SEEN = 1024.0  # observations of a length that are kept


class LookupDrafter:
    """What followed the longest earlier occurrence of the text's end, if at least `min_match` tokens match.

    The cost of a round does not grow with the context. The draft is a function of the committed text, so that
    `TargetWalk` is exact at every temperature.
    """

    layer_set: LayerSet | None = None

    def __init__(self, settings: LookupSettings) -> None:
        self.settings = settings

    def begin(self, context: Context) -> Drafting:
        """See `Drafter`."""
        return _LookingUp(self.settings, context)

    def max_rows(self, room: int) -> int:
        """See `Drafter`."""
        return 1 + min(room, self.settings.max_draft_length)


class _LookingUp:
    def __init__(self, settings: LookupSettings, context: Context) -> None:
        self.settings, self.context = settings, context
        self.text = SuffixAutomaton()
        self.rates = HitRates()

    def draft(self, room: int) -> PassGenerator[Draft]:
        """The first call reads the prompt, so that this counts as drafting; later ones read the new tokens only."""
        yield from ()
        for token_id in self.context.token_ids[len(self.text.token_ids) :]:
            self._read(token_id)
        followed: list[int] = []
        if self.text.match_length >= self.settings.min_match:
            start = self.text.match_end
            followed = self.text.token_ids[start : start + self._length(min(room, self.settings.max_draft_length))]
        return Draft(DraftTree.grow(self.context.token_ids[-1], [(token_id,) for token_id in followed]))

    def observe(self, outcome: Outcome) -> None:
        """There is nothing in an outcome that the committed text does not say."""

    def _read(self, token_id: int) -> None:
        text = self.text
        if text.match_length:
            self.rates.learn(text.match_length, text.token_ids[text.match_end] == token_id)
        text.extend(token_id)

    def _length(self, most: int) -> int:
        """How many tokens are worth drafting: until the chance that all of them stand falls below `WORTH`."""
        chance, n = 1.0, 0
        while n < most:
            chance *= self.rates.rate(self.text.match_length + n)  # each token that stands makes the match longer
            if chance < WORTH:
                break
            n += 1
        return n


class HitRates:
    """How often the token that followed a match came again, by the match's length.

    Before anything is seen, a match of m tokens is right with chance m / (m + 1), or as often as in `earlier` texts,
    whose rates learn along.
    """

    def __init__(self, earlier: HitRates | None = None) -> None:
        self._earlier = earlier
        self._seen = [0.0] * (LONGEST + 1)
        self._hits = [0.0] * (LONGEST + 1)

    def alone(self) -> HitRates:
        """The same rates, from which no earlier texts' learn."""
        own = HitRates()
        own._seen, own._hits = self._seen, self._hits
        return own

    def state(self) -> list[list[float]]:
        """What was seen of each length, as JSON values, without the earlier texts."""
        return [list(own) for own in zip(self._hits, self._seen, strict=True)]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Go on from `state`."""
        hits, seen = zip(*state, strict=True)
        self._hits, self._seen = list(hits), list(seen)

    def learn(self, match_length: int, hit: bool) -> None:
        """A match of that length was right, or was not."""
        length = min(match_length, LONGEST)
        if self._seen[length] >= MOST_SEEN:  # old observations fade
            self._seen[length], self._hits[length] = self._seen[length] / 2, self._hits[length] / 2
        self._seen[length] += 1
        self._hits[length] += hit
        if self._earlier is not None:
            self._earlier.learn(match_length, hit)

    def rate(self, match_length: int) -> float:
        """The chance that a match of that length is right."""
        length = min(match_length, LONGEST)
        if self._earlier is None:
            prior, weight = length / (length + 1), PRIOR_TOKENS
        else:
            prior, weight = self._earlier.rate(match_length), EARLIER_TOKENS
        return (self._hits[length] + weight * prior) / (self._seen[length] + weight)
