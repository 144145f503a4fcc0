"""Drafts from text in vLLM: requests change places in a batch, and drafts have the best length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swiftopt.engines import vllm_drafts
from swiftopt.engines.vllm_drafts import StepTimes, TextProposer

N_CONTEXT = 64


class Batch:
    """Stands in for vLLM: requests by place with their tokens, and a clock on which a step takes `seconds(rows)`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 5) -> None:
        config: Any = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=most),
            model_config=SimpleNamespace(max_model_len=N_CONTEXT),
        )
        self.proposer, self.now = TextProposer(config), 0.0
        self.texts: list[list[int]] = []
        monkeypatch.setattr(vllm_drafts, "perf_counter", lambda: self.now)

    def step(self, *sampled: list[int], seconds: float = 1.0) -> list[list[int]]:
        """Append the sampled tokens by place, and request drafts."""
        self.now += seconds
        table = np.full((8, N_CONTEXT), 999, np.int32)
        for place, tokens in enumerate(sampled):
            self.texts[place] += tokens
            table[place, : len(self.texts[place])] = self.texts[place]
        lengths = np.array([len(text) for text in self.texts] + [0] * (8 - len(self.texts)), np.int32)
        drafts = self.proposer.propose(sampled, lengths, table, slot_mappings=None)
        table[:] = -1  # vLLM's own memory, which it writes over
        return drafts


def test_what_followed_the_text_before_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(monkeypatch, most=3)
    batch.texts = [[1, 2, 3, 4, 5, 6, 1, 2], [7, 8, 9]]
    assert batch.step([3], [10]) == [[4, 5, 6], []]
    assert batch.step([4], []) == [[5, 6, 1], []]  # the second waits, and is read later
    assert batch.step([5, 6], [7])[0] == [1, 2, 3]
    assert all(type(token) is int for token in batch.step([1], [8])[0])


def test_texts_are_followed_when_places_change_and_two_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(monkeypatch, most=2)
    batch.texts = [[1, 2, 3, 1], [4, 5, 6, 4], [4, 5, 6, 4]]
    assert batch.step([2], [5], [5]) == [[3, 1], [6, 4], [6, 4]]
    followed = batch.proposer._texts[2].matches
    batch.texts = [batch.texts[2], batch.texts[1]]
    assert batch.step([6], [9]) == [[4, 5], []]
    assert {id(text.matches) for text in batch.proposer._texts} >= {id(followed)}
    assert [len(text.ids) for text in batch.proposer._texts] == [6, 6]
    assert [text.matches.n_read for text in batch.proposer._texts] == [6, 6]


def test_drafts_end_where_the_context_does(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(monkeypatch)
    batch.texts = [[1, 2, 3] * 20]
    assert len(batch.step([1])[0]) == 64 - 61 - 1
    batch.step([2, 3])
    assert batch.step([1]) == [[]]


def test_a_draft_is_as_long_as_a_rows_time_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free rows are all used; if a row costs as much as a step, only nearly certain tokens are drafted."""

    def drafted(row_s: float) -> float:
        batch = Batch(monkeypatch)
        rng = np.random.default_rng(0)
        batch.texts = [[1, 2, 3, 4]]
        drafts, lengths = [[]], []
        for _ in range(24):
            tokens = [int(rng.integers(1, 4))]
            drafts = batch.step(tokens, seconds=1.0 + row_s * len(drafts[0]))
            lengths.append(len(drafts[0]))
        return float(np.mean(lengths[8:]))

    free, dear = drafted(0.0), drafted(1.0)
    assert free > 3 and dear < 1.5


def test_a_row_is_worth_what_the_steps_say() -> None:
    times = StepTimes()
    assert times.row_cost == vllm_drafts.INITIAL_ROW_COST
    for rows in (1, 4, 8, 2, 6, 1, 4):
        times.add(rows, 1.0 + 0.1 * (rows - 1), tokens=2)
        times.add(rows, 1.0 + 0.1 * (rows - 1), tokens=2)
    times.add(4, 60.0, tokens=2)  # one that compiled
    n, _, _, seconds, *_ = times.sums
    mean = seconds / n
    assert times.row_cost == pytest.approx(0.1 * 2 / mean)
    for _ in range(400):
        times.add(1, 1.0, tokens=1)
    assert times.row_cost == vllm_drafts.INITIAL_ROW_COST  # what is not seen for long is tried again
