"""Predictions from earlier text: the longest end of a growing text that occurred before, and how often it is right.

A drafted token costs a row of the target's pass, so a draft should be only as long as it is likely to be accepted. How
likely is learnt from the text itself: at each of its tokens, the prompt's included, the match before it predicted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from ..core.types import TokenSource

LONGEST = 8  # match lengths from here on are counted together
PRIOR_TOKENS = 2  # how many observed tokens the prior weighs
EARLIER_TOKENS = 8  # Earlier texts' continuations count as so many tokens.
MOST_SEEN = 1024.0  # observations of a length that are kept
_FRESHENED = 8  # states whose latest occurrence is brought up to date per token: a bound, so that the cost has one


class SuffixAutomaton:
    """A text's substrings, grouped into states by where they end; extended token by token, at most 2n states.

    A state stands for all substrings that end at the same places. The state of the whole text holds the ends of it that
    occur nowhere else; its suffix link leads to the state whose longest member is the longest end of the text that
    occurred before (the two may overlap). Each state remembers an earlier place where its substrings ended: the most
    recent one, unless the text is nested deeply in itself.

    Source: Blumer et al., 1985 (the construction); amortised O(1) per token, memory linear in the text.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self.token_ids: list[int] = []
        self.n_moves = 0  # transitions and links followed or set so far: the work done
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]  # of a state's longest member
        self._end: list[int] = [0]  # tokens up to and with an occurrence of it
        self._last = 0
        self.match_end = 0  # tokens up to the end of the match's earlier occurrence: what followed it is from here
        for token_id in token_ids:
            self.extend(token_id)

    @property
    def match_length(self) -> int:
        """Tokens at the text's end that occurred before, as many as possible; 0 where the last token is new."""
        return self._length[max(0, self._link[self._last])]

    def extend(self, token_id: int) -> None:
        new = self._add(self._length[self._last] + 1, len(self.token_ids) + 1, -1, {})
        self.token_ids.append(token_id)
        state = self._last
        while state >= 0 and token_id not in self._next[state]:
            self._next[state][token_id] = new
            state = self._link[state]
            self.n_moves += 1
        self._link[new] = 0 if state < 0 else self._upto(state, token_id)
        self._last = new
        self._freshen(self._link[new])

    def _upto(self, state: int, token_id: int) -> int:
        """Return the state whose longest member is that of `state` and the token; split it off if need be."""
        reached = self._next[state][token_id]
        length = self._length[state] + 1
        if self._length[reached] == length:
            return reached
        clone = self._add(length, self._end[reached], self._link[reached], dict(self._next[reached]))
        self._link[reached] = clone
        while state >= 0 and self._next[state].get(token_id) == reached:
            self._next[state][token_id] = clone
            state = self._link[state]
            self.n_moves += 1
        return clone

    def _add(self, length: int, end: int, link: int, transitions: dict[int, int]) -> int:
        self._next.append(transitions)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        self.n_moves += 1 + len(transitions)
        return len(self._length) - 1

    def _freshen(self, state: int) -> None:
        """Take the match's earlier place, then note that the text's end is one now, for it and the ends within it."""
        self.match_end = self._end[state]
        for _ in range(_FRESHENED):
            if state <= 0:
                break
            self._end[state] = len(self.token_ids)
            state = self._link[state]
            self.n_moves += 1


@dataclass(slots=True, eq=False)
class HitRates:
    """How often the token that followed a match came again, by the match's length.

    The prior for a match of m tokens is m / (m + 1), or how often it was right in `earlier` texts, whose rates learn
    along.
    """

    earlier: HitRates | None = None
    seen: list[float] = field(default_factory=lambda: [0.0] * (LONGEST + 1))
    hits: list[float] = field(default_factory=lambda: [0.0] * (LONGEST + 1))

    def alone(self) -> HitRates:
        """Return the same rates, without the earlier texts' ones, which then learn nothing."""
        return HitRates(None, self.seen, self.hits)

    def learn(self, match_length: int, hit: bool) -> None:
        length = min(match_length, LONGEST)
        if self.seen[length] >= MOST_SEEN:  # old observations fade
            self.seen[length], self.hits[length] = self.seen[length] / 2, self.hits[length] / 2
        self.seen[length] += 1
        self.hits[length] += hit
        if self.earlier is not None:
            self.earlier.learn(match_length, hit)

    def rate(self, match_length: int) -> float:
        length = min(match_length, LONGEST)
        if self.earlier is None:
            prior, weight = length / (length + 1), PRIOR_TOKENS
        else:
            prior, weight = self.earlier.rate(match_length), EARLIER_TOKENS
        return (self.hits[length] + weight * prior) / (self.seen[length] + weight)


class Guess(NamedTuple):
    """What came next at an earlier place, the chance that it does here, and which text that place is in."""

    token_id: int
    chance: float
    source: TokenSource


class Matches:
    """The committed text with all its matches, and how often a match of which length was right.

    Args: prediction: what the caller expects behind the prompt. It is read as earlier text, behind the prompt's last
          tokens; other texts' rates learn nothing from it.
    """

    def __init__(
        self, earlier: HitRates | None = None, prompt_ids: Sequence[int] = (), prediction: Sequence[int] = ()
    ) -> None:
        self.text = SuffixAutomaton()
        self.rates = HitRates(earlier)
        self.pairs: dict[tuple[int, int], int] = {}  # two tokens -> where the latest occurrence of both ended
        before = [*prompt_ids[-LONGEST:], *prediction] if prediction else []
        self.predicted = range(len(before) - len(prediction), len(before))  # places of the prediction's tokens
        self._n_before = len(before)
        self.extend(before, known=True)

    @property
    def n_read(self) -> int:
        return len(self.text.token_ids) - self._n_before

    def read(self, token_ids: Sequence[int], known: bool = False) -> None:
        """Read what was committed since the last call; the prompt at the first.

        Args: known: whether an earlier process has read it, so that earlier texts' rates have learnt it.
        """
        self.extend(token_ids[self.n_read :], known)

    def extend(self, token_ids: Iterable[int], known: bool = False) -> None:
        """Read tokens behind those that were read; see `read`."""
        text, rates = self.text, self.rates.alone() if known else self.rates
        for token_id in token_ids:
            if text.match_length:
                rates.learn(text.match_length, text.token_ids[text.match_end] == token_id)
            text.extend(token_id)
            if len(text.token_ids) > 2:  # the pair at the end is no earlier occurrence of itself
                self.pairs[text.token_ids[-3], text.token_ids[-2]] = len(text.token_ids) - 1

    def at_end(self) -> Cursor:
        """Return where the committed text's end occurred before."""
        return Cursor(self, self.text.match_end, self.text.match_length, self.text.token_ids[-1])


@dataclass(slots=True, eq=False)
class Cursor:
    """A place in the earlier text that matches the end of the drafted one; moved on by each drafted token."""

    matches: Matches
    place: int
    length: int  # tokens that match
    last: int  # the latest token

    @property
    def token_id(self) -> int | None:
        """What came next there; None without a match."""
        token_ids = self.matches.text.token_ids
        return token_ids[self.place] if self.length and self.place < len(token_ids) else None

    def move(self, token_id: int) -> None:
        """Move behind that token: further along the match, or to where the last two tokens occurred last."""
        if self.token_id == token_id:
            self.place, self.length = self.place + 1, self.length + 1
        else:
            place = self.matches.pairs.get((self.last, token_id))
            self.place, self.length = (0, 0) if place is None else (place, 2)
        self.last = token_id

    def ahead(self) -> Iterator[Guess]:
        """Yield what comes next, token by token, each with its chance given those before it."""
        cursor = Cursor(self.matches, self.place, self.length, self.last)
        while (token_id := cursor.token_id) is not None:
            source: TokenSource = "prediction" if cursor.place in self.matches.predicted else "text"
            yield Guess(token_id, self.matches.rates.rate(cursor.length), source)
            cursor.move(token_id)

    def guesses(self, most: int, worth: float) -> list[Guess]:
        """Return what comes next, up to `most` tokens, while the chance that all of them do is at least `worth`."""
        chance, guesses = 1.0, list[Guess]()
        for guess in islice(self.ahead(), most):
            chance *= guess.chance
            if chance < worth:
                break
            guesses.append(guess)
        return guesses
