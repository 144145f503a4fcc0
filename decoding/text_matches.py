"""Predictions from earlier text: what followed the longest suffix that occurred before, and how often it is right.

Earlier text is the request's own text and the finished answers of its task (`corpus.py`). A drafted token costs a row
of the target's pass, so a draft should be only as long as it is likely to be accepted. That probability is learnt from
the text itself: each of its tokens, including the prompt's, was predicted by the match before it. Matches with finished
answers are rated only at the tokens of the completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from ..core.types import TokenSource
from .corpus import MAX_DRAFT_CANDIDATES, MAX_MATCH, CorpusPlace, Occurrence, TaskCorpus
from .hit_rates import MAX_RATED_LENGTH, HitRates

_MAX_UPDATED_STATES = 8  # Maximum states per token whose latest occurrence is updated; bounds the time per token.


class SuffixAutomaton:
    """A text's substrings, grouped into states by where they end; extended token by token, at most 2n states.

    A state represents all substrings that end at the same places. The state of the whole text contains the suffixes
    that occur nowhere else; its suffix link leads to the state whose longest member is the longest suffix that occurred
    before (the two may overlap). Each state remembers an earlier place where its substrings ended: the most recent one,
    unless the text is deeply self-similar.

    Source: Blumer et al., 1985 (the construction); amortised O(1) per token, memory linear in the text.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self.token_ids: list[int] = []
        self.n_moves = 0  # Transitions and links followed or set so far; measures the running time.
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]  # Length of each state's longest substring.
        self._end: list[int] = [0]  # Token count up to the end of one occurrence of each state's substrings.
        self._last = 0
        self.match_end = 0  # Index of the token that followed the earlier occurrence of the match.
        for token_id in token_ids:
            self.extend(token_id)

    @property
    def match_length(self) -> int:
        """Length of the longest suffix of the text that occurred before; 0 if the last token is new."""
        return self._length[max(0, self._link[self._last])]

    def extend(self, token_id: int) -> None:
        new_state = self._add(self._length[self._last] + 1, len(self.token_ids) + 1, -1, {})
        self.token_ids.append(token_id)
        state = self._last
        while state >= 0 and token_id not in self._next[state]:
            self._next[state][token_id] = new_state
            state = self._link[state]
            self.n_moves += 1
        self._link[new_state] = 0 if state < 0 else self._exact_state(state, token_id)
        self._last = new_state
        self._update_ends(self._link[new_state])

    def _exact_state(self, state: int, token_id: int) -> int:
        """Return the state whose longest substring is `state`'s longest plus the token; split it off if necessary."""
        target_state = self._next[state][token_id]
        length = self._length[state] + 1
        if self._length[target_state] == length:
            return target_state
        clone = self._add(length, self._end[target_state], self._link[target_state], dict(self._next[target_state]))
        self._link[target_state] = clone
        while state >= 0 and self._next[state].get(token_id) == target_state:
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

    def _update_ends(self, state: int) -> None:
        """Set `match_end`, then record the text's end as the latest occurrence of the match and of its suffixes."""
        self.match_end = self._end[state]
        for _ in range(_MAX_UPDATED_STATES):
            if state <= 0:
                break
            self._end[state] = len(self.token_ids)
            state = self._link[state]
            self.n_moves += 1


class Guess(NamedTuple):
    """A predicted token, its probability of being right, and its source; for a corpus also the place there."""

    token_id: int
    chance: float
    source: TokenSource
    occurrence: Occurrence | None = None


class Matches:
    """The committed text with its matches, and hit rates by length of match.

    Args: prediction: text that the caller expects after the prompt. It is read as earlier text, following the prompt's
          last tokens; rates of other texts do not learn from it. corpus: finished answers that the completion may
          repeat.
    """

    def __init__(
        self,
        earlier: HitRates | None = None,
        prompt_ids: Sequence[int] = (),
        prediction: Sequence[int] = (),
        corpus: TaskCorpus | None = None,
    ) -> None:
        self.text = SuffixAutomaton()
        self.rates = HitRates(earlier)
        self.pairs: dict[tuple[int, int], int] = {}  # Token pair -> index after its latest occurrence.
        self.corpus_rates = HitRates(None if corpus is None else corpus.rates)
        self.corpus_place = None if corpus is None else CorpusPlace(corpus, list(prompt_ids[-MAX_MATCH:]))
        self._n_prompt = len(prompt_ids)
        preceding_ids = [*prompt_ids[-MAX_RATED_LENGTH:], *prediction] if prediction else []
        # Indices of the prediction's tokens in the text.
        self.predicted = range(len(preceding_ids) - len(prediction), len(preceding_ids))
        self._n_before = len(preceding_ids)
        self.extend(preceding_ids, known=True)

    @property
    def n_read(self) -> int:
        return len(self.text.token_ids) - self._n_before

    def read(self, token_ids: Sequence[int], known: bool = False) -> None:
        """Add the tokens committed since the last call; at the first call, the prompt.

        Args: known: whether an earlier process has read it, so that earlier texts' rates already include it.
        """
        n_read = self.n_read
        self.extend(token_ids[n_read:], known)
        if self.corpus_place is not None:
            self._follow(self.corpus_place, token_ids[max(n_read, self._n_prompt) :], known)

    def extend(self, token_ids: Iterable[int], known: bool = False) -> None:
        """Append tokens to the text; see `read`."""
        text, rates = self.text, self.rates.alone() if known else self.rates
        for token_id in token_ids:
            if text.match_length:
                rates.learn(text.match_length, text.token_ids[text.match_end] == token_id)
            text.extend(token_id)
            if len(text.token_ids) > 2:  # Do not store the last pair yet: it would match itself.
                self.pairs[text.token_ids[-3], text.token_ids[-2]] = len(text.token_ids) - 1

    def _follow(self, place: CorpusPlace, token_ids: Iterable[int], known: bool) -> None:
        """Move the place in the corpus along the completion's tokens, and rate its matches."""
        rates = self.corpus_rates.alone() if known else self.corpus_rates
        for token_id in token_ids:
            if (expected_id := place.token_id) is not None:
                rates.learn(place.length, expected_id == token_id)
            place.move(token_id)

    def at_end(self) -> Cursor:
        """Return a cursor after the earlier occurrences of the committed text's suffix."""
        text, corpus_place = self.text, self.corpus_place
        return Cursor(self, text.match_end, text.match_length, text.token_ids[-1], corpus_place and corpus_place.copy())


@dataclass(slots=True, eq=False)
class Cursor:
    """Positions in the earlier text and in the corpus that match the draft's end; advanced with each drafted token."""

    matches: Matches
    place: int
    length: int  # Number of tokens that match in the text.
    last: int  # Token after which the next one is predicted.
    corpus_place: CorpusPlace | None = None

    @property
    def match_length(self) -> int:
        """Length of the longer match."""
        return max(self.length, 0 if self.corpus_place is None else self.corpus_place.length)

    @property
    def token_id(self) -> int | None:
        """The token that followed the match in the text; None without a match."""
        token_ids = self.matches.text.token_ids
        return token_ids[self.place] if self.length and self.place < len(token_ids) else None

    @property
    def guess(self) -> Guess | None:
        """The likelier prediction of text and corpus; None without a match."""
        guess = None
        if (token_id := self.token_id) is not None:
            source: TokenSource = "prediction" if self.place in self.matches.predicted else "text"
            guess = Guess(token_id, self.matches.rates.rate(self.length), source)
        corpus_place = self.corpus_place
        if corpus_place is not None and (token_id := corpus_place.token_id) is not None:
            chance = self.matches.corpus_rates.rate(corpus_place.length)
            if guess is None or chance > guess.chance:
                return Guess(token_id, chance, "corpus", corpus_place.occurrence)
        return guess

    def move(self, token_id: int) -> None:
        """Advance by a token: along the matches, or to the latest occurrence of the last tokens."""
        if self.token_id == token_id:
            self.place, self.length = self.place + 1, self.length + 1
        else:
            pair_end = self.matches.pairs.get((self.last, token_id))
            self.place, self.length = (0, 0) if pair_end is None else (pair_end, 2)
        self.last = token_id
        if self.corpus_place is not None:
            self.corpus_place.move(token_id, MAX_DRAFT_CANDIDATES)

    def ahead(self) -> Iterator[Guess]:
        """Yield the predicted tokens, each with its probability of being right if all before it are."""
        corpus_place = self.corpus_place and self.corpus_place.copy()
        copied_cursor = Cursor(self.matches, self.place, self.length, self.last, corpus_place)
        while (guess := copied_cursor.guess) is not None:
            yield guess
            copied_cursor.move(guess.token_id)

    def guesses(self, max_guesses: int, min_chance: float) -> list[Guess]:
        """Return up to `max_guesses` predicted tokens, while P(all are right) is at least `min_chance`."""
        joint_chance, guesses = 1.0, list[Guess]()
        for guess in islice(self.ahead(), max_guesses):
            joint_chance *= guess.chance
            if joint_chance < min_chance:
                break
            guesses.append(guess)
        return guesses
