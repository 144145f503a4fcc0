"""The corpus of finished answers: which drafts it gives, how much memory it takes, and what it forgets."""

from __future__ import annotations

import random
import signal
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftopt.core.errors import SettingsError
from swiftopt.decoding.corpus import (
    BYTES_PER_TOKEN,
    END,
    FIRST_CAPACITY,
    MAX_MATCH,
    NGRAM,
    Corpora,
    CorpusPlace,
    Generation,
    Occurrence,
    TaskCorpus,
)
from swiftopt.decoding.corpus_files import CorpusFolder

PLENTY = 1 << 24
EVERY = 1 << 30  # More candidates than there are.


def corpus_of(*answers: Sequence[int]) -> TaskCorpus:
    corpora = Corpora(PLENTY)
    for answer in answers:
        corpora.add("", "code", (), answer)
    corpus = corpora.of("", "code")
    assert corpus is not None
    return corpus


def followed_by(corpus: TaskCorpus, tail: Sequence[int], n: int = 50) -> list[int]:
    """Return the tokens that the corpus predicts after `tail`, along one occurrence."""
    place, token_ids = CorpusPlace(corpus, list(tail[:-1])), list[int]()
    place.move(tail[-1])
    while len(token_ids) < n and (token_id := place.token_id) is not None:
        token_ids.append(token_id)
        place.move(token_id)
    return token_ids


@given(st.lists(st.lists(st.integers(0, 3), min_size=NGRAM + 1, max_size=40), max_size=8), st.lists(st.integers(0, 3)))
@settings(max_examples=80, deadline=None)
def test_match_equals_that_of_an_exhaustive_search(answers: list[list[int]], tail: list[int]) -> None:
    corpus, tail = corpus_of(*answers), tail[-MAX_MATCH:]
    lengths = [
        length
        for answer in answers
        for place in range(NGRAM, len(answer))
        for length in range(NGRAM, min(place, len(tail)) + 1)
        if answer[place - length : place] == tail[-length:]
    ]
    found = corpus.find(tail, EVERY)
    assert (0 if found is None else found[1]) == max(lengths, default=0)
    if found is not None:
        (generation, place), length = found
        text = generation._tokens.tolist()
        assert text[place - length : place] == tail[-length:] and generation.token(place) == text[place] != END


def test_draft_does_not_continue_into_the_next_answer() -> None:
    corpus = corpus_of([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    assert followed_by(corpus, [1, 2, 3]) == [4, 5]
    assert followed_by(corpus, [3, 4, 5]) == followed_by(corpus, [4, 5, 6]) == []


def test_latest_answer_is_followed_until_its_token_is_rejected() -> None:
    corpus = corpus_of([1, 2, 3, 4, 50], [1, 2, 3, 4, 60])
    assert followed_by(corpus, [2, 3, 4]) == [60]
    found = corpus.find([2, 3, 4], EVERY)
    assert found is not None
    found[0].judge(accepted=False)
    assert followed_by(corpus, [2, 3, 4]) == [50]
    Occurrence(*found[0]).judge(accepted=True)
    assert followed_by(corpus, [2, 3, 4]) == [60], "of equal credit the latest"
    assert followed_by(corpus, [9, 2, 3, 4]) == [60]


def test_repeated_answer_takes_no_further_memory() -> None:
    corpora, answer = Corpora(PLENTY), list(range(100))
    for lead in ([7, 8], [7, 9], [7, 9]):
        corpora.add("", "code", lead, answer)
    assert corpora.n_tokens == 2 + 100 + 1
    corpora.add("", "code", (), answer[:50])  # the beginning of an answer is another one
    corpora.add("", "code", (), answer[50:])  # its end is not
    assert corpora.n_tokens == 2 + 100 + 1 + 50 + 1


def test_start_of_an_answer_is_found_by_the_end_of_its_prompt() -> None:
    corpora = Corpora(PLENTY)
    corpora.add("", "code", [91, 92, 93], [1, 2, 3, 4])
    corpus = corpora.of("", "code")
    assert corpus is not None and followed_by(corpus, [91, 92, 93]) == [1, 2, 3, 4]


def test_token_takes_at_most_32_bytes() -> None:
    """Measured as all allocated memory, for a growing number of answers of 200 tokens."""
    rng = random.Random(3)
    answers = [[rng.randrange(150_000) for _ in range(200)] for _ in range(400)]
    tracemalloc.start()
    try:
        before, corpora, worst = tracemalloc.get_traced_memory()[0], Corpora(PLENTY), 0.0
        for n, answer in enumerate(answers, 1):
            corpora.add("", "code", (), answer)
            if n > 10:
                worst = max(worst, (tracemalloc.get_traced_memory()[0] - before) / corpora.n_tokens)
    finally:
        tracemalloc.stop()
    assert corpora.n_tokens == 400 * 201
    assert BYTES_PER_TOKEN < worst <= 32


@pytest.mark.parametrize("n_salts", [1, 50])
def test_memory_stays_within_the_budget_and_a_flood_replaces_its_own_answers(n_salts: int) -> None:
    """A flood removes no answers of another key, and none of another task of its key."""
    rng, corpora = random.Random(4), Corpora(1 << 20)

    def answer() -> list[int]:
        return [rng.randrange(50_000) for _ in range(500)]

    kept = {("good:", "code"): [answer() for _ in range(40)]}
    if n_salts == 1:
        kept["bad:", "chat"] = [answer() for _ in range(20)]
    for (salt, task), answers in kept.items():
        for each in answers:
            corpora.add(salt, task, (), each)
    for n in range(600):
        corpora.add(f"bad:{n % n_salts or ''}", "junk", (), answer())
        assert corpora.n_bytes <= corpora.max_bytes
    for (salt, task), answers in kept.items():
        corpus = corpora.of(salt, task)
        assert corpus is not None and all(corpus.has(each) for each in answers), task


def test_answers_with_accepted_drafts_outlive_later_ones() -> None:
    rng, corpora = random.Random(5), Corpora(1 << 18)
    used = [rng.randrange(50_000) for _ in range(500)]
    corpora.add("", "code", (), used)
    corpus = corpora.of("", "code")
    assert corpus is not None
    for _ in range(150):
        corpora.add("", "code", (), [rng.randrange(50_000) for _ in range(500)])
        found = corpus.find(used[:20], EVERY)
        assert found is not None, "it was forgotten"
        for _ in range(30):
            found[0].judge(accepted=True)
    assert len(corpus.generations) > 3 and corpora.n_bytes <= 1 << 18
    for _ in range(150):  # no longer used
        corpora.add("", "code", (), [rng.randrange(50_000) for _ in range(500)])
    assert corpus.find(used[:20], EVERY) is None


def test_nothing_is_kept_without_a_budget() -> None:
    corpora = Corpora(0)
    corpora.add("", "code", (), list(range(50)))
    assert corpora.of("", "code") is None and corpora.n_bytes == 0


# --- in a folder


def test_stored_answers_belong_to_a_salt_task_and_model(tmp_path: Path) -> None:
    answers, folder = [list(range(n, n + 50)) for n in range(10)], CorpusFolder(tmp_path, "m", 1 << 20)
    corpora = Corpora(PLENTY, folder)
    for answer in answers:
        corpora.add("ci:x", "code", (), answer)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_dir()} == {0o700}
    assert not any(b"code" in path.read_bytes() or "code" in path.name for path in files)
    with pytest.raises(SettingsError, match=r"another server keeps files of this model in .*--keep-corpus"):
        CorpusFolder(tmp_path, "m", 1 << 20)
    folder.close()
    for model, salt, task, n in (
        *(("m", "ci:x", "code", 10), ("m", "ci:x", "chat", 0), ("m", "ci:", "code", 0)),
        *(("m", "cd:x", "code", 0), ("n", "ci:x", "code", 0)),
    ):
        again = CorpusFolder(tmp_path, model, 1 << 20)
        corpus = Corpora(PLENTY, again).of(salt, task)
        assert corpus is not None and sum(corpus.has(answer) for answer in answers) == n
        again.close()


def test_answers_of_a_key_are_removed_with_it(tmp_path: Path) -> None:
    folder = CorpusFolder(tmp_path, "m", 1 << 20)
    corpora = Corpora(PLENTY, folder)
    for salt in ("ci:", "ci:x", "cd:", ":"):
        corpora.add(salt, "code", (), list(range(50)))
    corpora.forget_owners(lambda owner: owner not in ("cd", ""))
    for salt, n in (("ci:", 0), ("ci:x", 0), ("cd:", 51), (":", 51)):
        corpus = corpora.of(salt, "code")
        assert corpus is not None and corpus.n_tokens == n
    assert {path.parent.name for path in tmp_path.rglob("*.answers")} == {"key-cd", "no-key"}


def test_folder_stays_within_the_budget(tmp_path: Path) -> None:
    rng, folder = random.Random(6), CorpusFolder(tmp_path, "m", 1 << 20)
    corpora = Corpora(1 << 18, folder)
    for _ in range(200):
        corpora.add("", "code", (), [rng.randrange(50_000) for _ in range(500)])
    stored = sum(path.stat().st_size for path in tmp_path.rglob("*.answers"))
    assert stored <= 4 * corpora.n_tokens + 12 * 200 < 1 << 18
    folder.close()
    CorpusFolder(tmp_path, "m", 10_000)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.answers")) <= 4 * 10_000


WRITER = """
import random, sys
from pathlib import Path
from swiftopt.decoding.corpus import Corpora
from swiftopt.decoding.corpus_files import CorpusFolder

corpora, rng = Corpora(1 << 24, CorpusFolder(Path(sys.argv[1]), "m", 1 << 22)), random.Random(7)
for n in range(1_000_000):
    corpora.add("", "code", (), [rng.randrange(50_000) for _ in range(400)])
    print(n + 1, flush=True)
"""


def test_kill_during_a_write_loses_at_most_that_answer(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        n_done = next(int(line) for line in writer.stdout if int(line) >= 40)
        writer.send_signal(signal.SIGKILL)
        n_done = max([n_done, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    rng = random.Random(7)
    answers = [[rng.randrange(50_000) for _ in range(400)] for _ in range(n_done + 1)]
    file = max(tmp_path.rglob("*.answers"), key=lambda path: int(path.stem.rpartition("-")[2]))
    whole = file.read_bytes()
    # Of each place at which the write of the last answer may be cut: what was killed here shows one of them.
    for n_cut in (0, 1, 4 * 200, 4 * 401 + 11):
        file.write_bytes(whole[: len(whole) - n_cut])
        folder = CorpusFolder(tmp_path, "m", 1 << 22)
        corpora = Corpora(PLENTY, folder)
        corpus = corpora.of("", "code")
        assert corpus is not None
        n_found = sum(corpus.has(answer) for answer in answers)
        assert n_found >= n_done - (n_cut > 0) and all(corpus.has(answer) for answer in answers[:n_found])
        corpora.add("", "code", (), list(range(50)))  # goes on behind the last whole one
        folder.close()
        reread = CorpusFolder(tmp_path, "m", 1 << 22)
        corpus = Corpora(PLENTY, reread).of("", "code")
        assert corpus is not None and corpus.has(list(range(50))) and corpus.has(answers[n_found - 1])
        reread.close()


def test_damaged_file_gives_the_answers_before_the_damage(tmp_path: Path) -> None:
    folder = CorpusFolder(tmp_path, "m", 1 << 20)
    corpora, answers = Corpora(PLENTY, folder), [list(range(n, n + 50)) for n in range(4)]
    for answer in answers:
        corpora.add("", "code", (), answer)
    folder.close()
    (file,) = tmp_path.rglob("*.answers")
    content = bytearray(file.read_bytes())
    content[2 * (12 + 51 * 4) + 60] ^= 1
    file.write_bytes(content)
    corpus = Corpora(PLENTY, CorpusFolder(tmp_path, "m", 1 << 20)).of("", "code")
    assert corpus is not None and [corpus.has(answer) for answer in answers] == [True, True, False, False]


def test_generation_grows_without_losing_entries() -> None:
    rng, generation, answers = random.Random(8), Generation(), list[list[int]]()
    while generation.capacity < 16 * FIRST_CAPACITY:
        answers.append([*(rng.randrange(300) for _ in range(rng.randrange(4, 90))), END])
        generation.append(np.array(answers[-1], np.int32))
        assert all(generation.has(answer[:-1]) for answer in answers[-3:])
    assert all(generation.has(answer[:-1]) for answer in answers)
