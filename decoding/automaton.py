"""The longest end of a growing text that occurred before, found in constant time per token whatever the length."""

from __future__ import annotations

from collections.abc import Iterable

_FRESHENED = 8  # states whose latest occurrence is brought up to date per token: a bound, so that the cost has one


class SuffixAutomaton:
    """A text's substrings, grouped into states by where they end; extended token by token, at most 2n states.

    A state stands for all substrings that end at the same places. The state of the whole text holds the ends of it that
    occur nowhere else; its suffix link leads to the state whose longest member is the longest end of the text that
    occurred before (the two may overlap). Each state remembers an earlier place where its substrings ended: the most
    recent one that it was told of, which is the most recent of all unless the text is nested deeply in itself.

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
        self._match_end = 0
        for token_id in token_ids:
            self.extend(token_id)

    @property
    def match_length(self) -> int:
        """Tokens at the text's end that occurred before, as many as possible; 0 where the last token is new."""
        return self._length[max(0, self._link[self._last])]

    @property
    def match_end(self) -> int:
        """Tokens up to the end of that earlier occurrence: what followed it is from here."""
        return self._match_end

    @property
    def n_states(self) -> int:
        """Groups of substrings: at most two per token, and one."""
        return len(self._link)

    def extend(self, token_id: int) -> None:
        """Append a token."""
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
        """The state whose longest member is that of `state` and the token; split off where it had longer company."""
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
        self._match_end = self._end[state]
        for _ in range(_FRESHENED):
            if state <= 0:
                break
            self._end[state] = len(self.token_ids)
            state = self._link[state]
            self.n_moves += 1
