"""What earlier text says comes next, also behind tokens that are drafted but not committed."""

from __future__ import annotations

from collections.abc import Sequence

from .automaton import SuffixAutomaton
from .lookup import HitRates


class Matches:
    """The committed text with all its matches, and how often a match of which length was right."""

    def __init__(self, earlier: HitRates | None = None) -> None:
        self.text = SuffixAutomaton()
        self.rates = HitRates(earlier)
        self._pairs: dict[tuple[int, int], int] = {}  # two tokens -> where the latest occurrence of both ended

    def read(self, token_ids: Sequence[int], known: bool = False) -> None:
        """Read what was committed since the last call; the prompt at the first.

        Args: known: what an earlier life of this text has read, so that earlier texts' rates have learnt it.
        """
        text, rates = self.text, self.rates.alone() if known else self.rates
        for token_id in token_ids[len(text.token_ids) :]:
            if text.match_length:
                rates.learn(text.match_length, text.token_ids[text.match_end] == token_id)
            text.extend(token_id)
            if len(text.token_ids) > 2:  # the pair at the end is no earlier occurrence of itself
                self._pairs[text.token_ids[-3], text.token_ids[-2]] = len(text.token_ids) - 1

    def at_end(self) -> Cursor:
        """Where the committed text's end occurred before."""
        return Cursor(self, self.text.match_end, self.text.match_length, self.text.token_ids[-1])

    def pair(self, first: int, second: int) -> int | None:
        """Where the latest occurrence of two tokens ended, None if there is none."""
        return self._pairs.get((first, second))


class Cursor:
    """A place in the earlier text that matches the end of the drafted one; moved on by each drafted token."""

    __slots__ = ("_matches", "_place", "last", "length")

    def __init__(self, matches: Matches, place: int, length: int, last: int) -> None:
        self._matches, self._place, self.length, self.last = matches, place, length, last

    def copy(self) -> Cursor:
        """One that moves on its own."""
        return Cursor(self._matches, self._place, self.length, self.last)

    @property
    def token_id(self) -> int | None:
        """What came next there; None without a match."""
        known = self._matches.text.token_ids
        return known[self._place] if self.length and self._place < len(known) else None

    @property
    def chance(self) -> float:
        """The chance that it comes next here too."""
        return self._matches.rates.rate(self.length)

    def move(self, token_id: int) -> None:
        """Behind that token: further along the match, or to the latest place where the last two tokens stood."""
        if self.token_id == token_id:
            self._place, self.length = self._place + 1, self.length + 1
        else:
            found = self._matches.pair(self.last, token_id)
            self._place, self.length = (0, 0) if found is None else (found, 2)
        self.last = token_id

    def guesses(self, most: int, worth: float) -> list[int]:
        """What comes next, up to `most` tokens, while the chance that all of them do is at least `worth`."""
        ahead, chance, found = self.copy(), 1.0, list[int]()
        while len(found) < most and (token_id := ahead.token_id) is not None:
            chance *= ahead.chance
            if chance < worth:
                break
            found.append(token_id)
            ahead.move(token_id)
        return found
