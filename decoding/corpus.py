"""What a task's finished answers left for drafts: where the text's end occurs in one of them, what followed there.

Answers are kept apart by the caller's salt and by task, and no draft crosses either. All of them share one budget of
bytes. Answers are forgotten by generations: the caller and the task that hold most lose the generation from which
least was accepted lately, so that a flood of texts replaces its own.

Source: drafts from finished answers follow SuffixDecoding (arXiv:2411.04975). Here an index of 3-grams and a comparison
of the tokens before them take the place of its suffix trees, which need some 500 bytes a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.requests import owner_of
from .corpus_files import CorpusFolder, GenerationFile
from .hit_rates import HitRates

NGRAM = 3  # Tokens by which an occurrence is found; shorter matches are right too seldom.
MAX_MATCH = 32  # Longest match that is distinguished from a longer one.
MAX_CANDIDATES = 64  # Maximum occurrences compared to find the best one after the committed text.
MAX_DRAFT_CANDIDATES = 8  # The same within a draft, where the search is repeated at each token.
MAX_CREDIT = 8  # Bound on the credit of an occurrence, in accepted or refused drafts.
LEAD_TOKENS = 8  # Tokens of the prompt's end that are kept before an answer, to find its beginning by.
END = -1  # Stands after each answer: no draft goes on from one answer to the next.
FIRST_CAPACITY = 256  # Tokens that a new generation has room for; doubled as it fills.
MAX_GENERATION = 1 << 16  # Maximum tokens of a generation.
MIN_GENERATIONS = 8  # Minimum number of full generations that the budget holds.
NEW_WORTH = 256.0  # Worth of the newest generation before any draft, in accepted tokens.
BYTES_PER_TOKEN = 13  # Size of a generation's arrays, per token of its capacity.


class Occurrence(NamedTuple):
    """A place in a generation, whose token was drafted."""

    generation: Generation
    place: int

    def judge(self, accepted: bool) -> None:
        """Record whether the target accepted the token."""
        self.generation.judge(self.place, accepted)


class Generation:
    """Answers of a task, one after the other, with an index of their n-grams.

    A place is the index of a token. Places with the same hash of the n-gram before them form a chain, the latest first.
    """

    def __init__(self, capacity: int = FIRST_CAPACITY) -> None:
        self.n_tokens = 0
        self.accepted = 0.0  # Drafted tokens from here that were accepted, halved with each later generation.
        self.file: GenerationFile | None = None
        self._allocate(capacity)

    @classmethod
    def read(cls, token_ids: NDArray[np.int32], file: GenerationFile) -> Generation:
        """Return the generation of a file."""
        generation = cls(max(FIRST_CAPACITY, 1 << (len(token_ids) - 1).bit_length()))
        generation.append(token_ids)
        generation.file = file
        return generation

    def _allocate(self, capacity: int) -> None:
        self._tokens, self._earlier, self._latest = (np.full(capacity, END, np.int32) for _ in range(3))
        self._credit = np.zeros(capacity, np.int8)
        # Reading single items of a memoryview takes half the time of reading those of an array.
        arrays: tuple[Any, ...] = self._tokens, self._earlier, self._latest
        self._items = memoryview(arrays[0]), memoryview(arrays[1]), memoryview(arrays[2])

    @property
    def capacity(self) -> int:
        return len(self._tokens)

    @property
    def n_bytes(self) -> int:
        return self._tokens.nbytes + self._earlier.nbytes + self._latest.nbytes + self._credit.nbytes

    def token(self, place: int) -> int | None:
        """Return the token at a place; None after the end of an answer."""
        token_id = self._items[0][place]
        return None if token_id == END else token_id

    def credit(self, place: int) -> int:
        """Return how often the token there was accepted as a draft, less how often it was refused."""
        return int(self._credit[place])

    def judge(self, place: int, accepted: bool) -> None:
        credit = int(self._credit[place]) + (1 if accepted else -1)
        self._credit[place] = max(-MAX_CREDIT, min(MAX_CREDIT, credit))
        self.accepted += accepted

    def append(self, token_ids: NDArray[np.int32]) -> None:
        """Add answers, each of which ends with `END`."""
        n_before, self.n_tokens = self.n_tokens, self.n_tokens + len(token_ids)
        if self.n_tokens > self.capacity:
            tokens, credit = self._tokens[:n_before], self._credit[:n_before]
            self._allocate(1 << (self.n_tokens - 1).bit_length())
            self._tokens[:n_before], self._credit[:n_before] = tokens, credit
            self._tokens[n_before : self.n_tokens] = token_ids
            self._index(0)
        else:
            self._tokens[n_before : self.n_tokens] = token_ids
            self._index(n_before)

    def _index(self, start: int) -> None:
        """Put the places from `start` on into the chains of their n-grams."""
        ngrams = np.lib.stride_tricks.sliding_window_view(
            self._tokens[max(0, start - NGRAM) : self.n_tokens], NGRAM + 1
        )
        is_within = (ngrams != END).all(axis=1)
        places = np.flatnonzero(is_within).astype(np.int32) + np.int32(max(0, start - NGRAM) + NGRAM)
        hashes = _hashes(ngrams[is_within, :NGRAM].astype(np.uint64)).astype(np.intp) & (self.capacity - 1)
        order = np.argsort(hashes, kind="stable")
        places, hashes = places[order], hashes[order]
        is_first = np.ones(len(places), bool)
        is_first[1:] = hashes[1:] != hashes[:-1]
        self._earlier[places[1:]] = places[:-1]
        self._earlier[places[is_first]] = self._latest[hashes[is_first]]
        is_last = np.append(is_first[1:], True)[: len(places)]
        self._latest[hashes[is_last]] = places[is_last]

    def occurrences(self, tail: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield places after occurrences of the end of `tail`, the latest first, each with the length of the match.

        The length is at most `len(tail)`, and 0 where only the hash is the same.
        """
        tokens, earlier, latest = self._items
        place = latest[_hash(*tail[-NGRAM:]) & (self.capacity - 1)]
        while place >= 0:
            length, limit = 0, min(len(tail), place)
            while length < limit and tokens[place - 1 - length] == tail[-1 - length]:
                length += 1
            yield place, length if length >= NGRAM else 0
            place = earlier[place]

    def has(self, token_ids: Sequence[int]) -> bool:
        """Return whether these tokens, at least `NGRAM`, are the end of an answer here."""
        # The index has no place for the end of an answer, so look for the tokens before the last one.
        *before, last = token_ids
        places = (place for place, length in self.occurrences(before[-MAX_MATCH:]) if length)
        tokens = self._tokens
        return any(
            tokens[place] == last
            and tokens[place + 1] == END
            and place >= len(before)
            and np.array_equal(tokens[place - len(before) : place], before)
            for place in places
        )


def _hashes(ngrams: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the hash of each row (n, NGRAM), as `_hash` does."""
    factors = np.array(_FACTORS, np.uint64)
    mixed: NDArray[np.uint64] = (ngrams * factors).sum(axis=1, dtype=np.uint64) & np.uint64(0xFFFFFFFF)
    hashes: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(15))
    return hashes


_FACTORS = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D  # Odd numbers of 32 bits whose multiples are spread out.


def _hash(first: int, second: int, third: int) -> int:
    mixed = (first * _FACTORS[0] + second * _FACTORS[1] + third * _FACTORS[2]) & 0xFFFFFFFF
    return mixed ^ (mixed >> 15)


@dataclass(slots=True, eq=False)
class TaskCorpus:
    """The answers of one task and salt, oldest generation first, and how often drafts from them were right."""

    owner: str
    generations: list[Generation] = field(default_factory=list)
    rates: HitRates = field(default_factory=HitRates)
    used_at: float = 0.0

    @property
    def n_bytes(self) -> int:
        return sum(generation.n_bytes for generation in self.generations)

    @property
    def n_tokens(self) -> int:
        return sum(generation.n_tokens for generation in self.generations)

    def find(self, tail: Sequence[int], max_candidates: int) -> tuple[Occurrence, int] | None:
        """Return the best occurrence of the end of `tail`, and the length of its match.

        The longest match is the best; of several the one whose token was accepted more often, then the latest one.
        """
        if len(tail) < NGRAM:
            return None
        best, best_score, n_compared = None, (0, 0), 0
        for generation in reversed(self.generations):
            for place, length in generation.occurrences(tail):
                score = length, generation.credit(place)
                if length and score > best_score:
                    best, best_score = Occurrence(generation, place), score
                n_compared += 1
                if n_compared == max_candidates:
                    return None if best is None else (best, best_score[0])
        return None if best is None else (best, best_score[0])

    def has(self, token_ids: Sequence[int]) -> bool:
        """Return whether an answer that ends with these tokens is here."""
        return any(generation.has(token_ids) for generation in self.generations)

    def least_worthy(self) -> Generation:
        """Return the generation to forget first; the one that is being filled only if it is the only one."""
        ages = range(len(self.generations) - 1, -1, -1)
        worths = [
            generation.accepted + NEW_WORTH / 2**age for age, generation in zip(ages, self.generations, strict=True)
        ]
        n_closed = max(1, len(self.generations) - 1)
        return self.generations[min(range(n_closed), key=worths.__getitem__)]


@dataclass(slots=True, eq=False)
class CorpusPlace:
    """A place in a corpus that matches the end of the draft; advanced with each drafted token."""

    corpus: TaskCorpus
    tail: list[int]  # The latest tokens, `MAX_MATCH` at most.
    occurrence: Occurrence | None = None
    length: int = 0

    @property
    def token_id(self) -> int | None:
        """The token that followed the match; None without a match, or at the end of an answer."""
        return None if self.occurrence is None else self.occurrence.generation.token(self.occurrence.place)

    def move(self, token_id: int, max_candidates: int = MAX_CANDIDATES) -> None:
        """Advance by a token: along the match, or to the best occurrence of the latest tokens."""
        follows = self.occurrence is not None and self.token_id == token_id
        self.tail = [*self.tail[1 - MAX_MATCH :], token_id]
        if follows and self.occurrence is not None:
            self.occurrence = self.occurrence._replace(place=self.occurrence.place + 1)
            self.length += 1
        else:
            self.occurrence, self.length = self.corpus.find(self.tail, max_candidates) or (None, 0)

    def copy(self) -> CorpusPlace:
        return CorpusPlace(self.corpus, self.tail, self.occurrence, self.length)


class Corpora:
    """The corpora of a model by salt and task, within one budget.

    Args: max_bytes: of all generations together; 0: nothing is kept. folder: where answers are stored, too; None: they
          are kept in memory only.
    """

    def __init__(self, max_bytes: int, folder: CorpusFolder | None = None) -> None:
        self.max_bytes, self._folder = max_bytes, folder
        max_tokens = max(FIRST_CAPACITY, max_bytes // BYTES_PER_TOKEN // MIN_GENERATIONS)
        self._generation_tokens = min(MAX_GENERATION, 1 << max_tokens.bit_length() - 1)
        self._corpora: dict[tuple[str, str], TaskCorpus] = {}

    @property
    def n_bytes(self) -> int:
        return sum(corpus.n_bytes for corpus in self._corpora.values())

    @property
    def n_tokens(self) -> int:
        return sum(corpus.n_tokens for corpus in self._corpora.values())

    def of(self, salt: str, task: str) -> TaskCorpus | None:
        """Return the corpus of a salt and task, read from the folder if it is stored there; None: nothing is kept."""
        if not self.max_bytes:
            return None
        corpus = self._corpora.get((salt, task))
        if corpus is None:
            corpus = self._corpora[salt, task] = TaskCorpus(owner_of(salt))
            if self._folder is not None:
                corpus.generations += [Generation.read(*stored) for stored in self._folder.load(salt, task)]
            self._forget_until_it_fits()
        corpus.used_at = monotonic()
        return corpus

    def add(self, salt: str, task: str, lead: Sequence[int], answer: Sequence[int]) -> None:
        """Add a finished answer after the `lead`, the last tokens of its prompt, unless it is there already."""
        corpus = self.of(salt, task)
        if corpus is None or len(answer) <= NGRAM or corpus.has(answer):
            return
        kept_ids = [*lead[-LEAD_TOKENS:], *answer][1 - self._generation_tokens :]
        token_ids = np.array([*kept_ids, END], np.int32)
        latest = corpus.generations[-1] if corpus.generations else None
        if latest is None or latest.n_tokens + len(token_ids) > self._generation_tokens:
            for generation in corpus.generations:
                generation.accepted /= 2
            latest = Generation()
            if self._folder is not None:
                latest.file = self._folder.begin(salt, task)
            corpus.generations.append(latest)
        latest.append(token_ids)
        if latest.file is not None:
            latest.file.append(token_ids)
        self._forget_until_it_fits()

    def forget_owners(self, is_gone: Callable[[str], bool]) -> None:
        """Forget all answers of owners that are gone, in the folder, too."""
        for key, corpus in list(self._corpora.items()):
            if is_gone(corpus.owner):
                _remove_files(corpus.generations)
                del self._corpora[key]
        if self._folder is not None:
            self._folder.forget_owners(is_gone)

    def _forget_until_it_fits(self) -> None:
        bytes_by_owner: dict[str, int] = {}
        for corpus in self._corpora.values():
            bytes_by_owner[corpus.owner] = bytes_by_owner.get(corpus.owner, 0) + corpus.n_bytes
        total = sum(bytes_by_owner.values())
        while total > self.max_bytes:
            owner = max(bytes_by_owner, key=bytes_by_owner.__getitem__)
            corpora = (corpus for corpus in self._corpora.values() if corpus.owner == owner)
            corpus = max(corpora, key=lambda other: (other.n_bytes, -other.used_at))
            generation = corpus.least_worthy()
            corpus.generations.remove(generation)
            _remove_files([generation])
            bytes_by_owner[owner] -= generation.n_bytes
            total -= generation.n_bytes
        # Callers may name any number of salts and tasks; those without answers are not kept.
        if len(self._corpora) > MAX_EMPTY:
            self._corpora = {key: corpus for key, corpus in self._corpora.items() if corpus.generations}


MAX_EMPTY = 1024  # Number of corpora above which empty ones are dropped.


def _remove_files(generations: Iterable[Generation]) -> None:
    for generation in generations:
        if generation.file is not None:
            generation.file.remove()
