"""The suffix automaton finds the same matches as an exhaustive search, at a constant cost per token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftopt.decoding.text_matches import SuffixAutomaton

TEXTS = st.one_of(
    st.lists(st.integers(0, 1), max_size=60), st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 50))
)


def longest_match(text: Sequence[int]) -> int:
    """Return the length of the longest suffix of the text that also occurs earlier, by trying all."""
    n = len(text)
    lengths = (length for length in range(n - 1, 0, -1) for end in range(length, n))
    return next((k for k in lengths if any(text[e - k : e] == text[n - k :] for e in range(k, n))), 0)


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_the_match_is_the_longest_end_that_occurs_earlier(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for n, token_id in enumerate(text, 1):
        automaton.extend(token_id)
        assert automaton.match_length == longest_match(text[:n])


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_the_match_ends_where_the_same_tokens_stood_earlier(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for n, token_id in enumerate(text, 1):
        automaton.extend(token_id)
        length, end = automaton.match_length, automaton.match_end
        if length:
            assert length <= end < n
            assert text[end - length : end] == text[n - length : n]


def test_the_most_recent_of_several_occurrences_is_taken() -> None:
    first, second, third = [5, 6, 7], [5, 6, 8], [5, 6, 9]
    automaton = SuffixAutomaton([*first, 1, *second, 2, *third, 3, 5, 6])
    assert automaton.match_length == 2
    assert automaton.token_ids[automaton.match_end] == 9


def test_a_text_without_repetition_has_no_match() -> None:
    automaton = SuffixAutomaton(range(100))
    assert automaton.match_length == 0


def random_text(n: int) -> list[int]:
    rng = random.Random(3)
    return [int(50 * rng.random() ** 3) for _ in range(n)]


def copied_text(n: int) -> list[int]:
    """Return a text of earlier passages with occasional new tokens, like code and chats."""
    rng, text = random.Random(4), list(range(20))
    while len(text) < n:
        start = rng.randrange(len(text))
        text += [*text[start : start + rng.randrange(2, 30)], rng.randrange(1000)]
    return text[:n]


@pytest.mark.parametrize(
    "make",
    [random_text, copied_text, lambda n: [7] * n, lambda n: [1, 2, 3, 4, 5] * (n // 5), lambda n: list(range(n))],
    ids=["random", "copied", "one token", "periodic", "all different"],
)
def test_work_per_token_does_not_grow_with_the_text(make: object) -> None:
    """Counts links and transitions, for the last thousands of tokens of a long text and for a short one."""
    assert callable(make)
    text: list[int] = make(40_000)
    automaton = SuffixAutomaton(text[:4_000])
    early = automaton.n_moves / 4_000
    for token_id in text[4_000:36_000]:
        automaton.extend(token_id)
    before = automaton.n_moves
    for token_id in text[36_000:]:
        automaton.extend(token_id)
    assert (automaton.n_moves - before) / 4_000 <= 1.5 * early
    assert len(automaton._link) <= 2 * len(text)
