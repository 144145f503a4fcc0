"""Laws of the rule that chooses a token from scores: its processors, their order, and their scope."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from families import VOCAB, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, TopPLogitsWarper

from swiftopt.core.types import Sampling
from swiftopt.decoding.context import TokenRule, TopP

PROMPT = [3, 5, 5, 9]


def scores_of_transformers(text: list[int], logits: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the scores of the processors that `generate` makes from its options."""
    found: list[LogitsProcessorList] = []

    def grab(model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, **options: Any) -> Any:
        found.append(logits_processor)
        return input_ids

    inputs = torch.tensor([PROMPT])
    mask = torch.ones_like(inputs)
    tiny_model("llama").generate(inputs, attention_mask=mask, max_new_tokens=9, custom_generate=grab, **options)
    processors: Any = found[0]
    scores: torch.Tensor = processors(torch.tensor([text]), logits[None])[0]
    return scores


@pytest.mark.parametrize(
    "cuts",
    [
        {"min_p": 0.2},
        {"top_k": 9, "min_p": 0.1},
        {"top_p": 0.8, "min_p": 0.05},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
    ],
)
def test_scores_are_those_of_transformers(cuts: dict[str, float]) -> None:
    text = [*PROMPT, 7, 7, 11]
    sampling = Sampling(temperature=0.7, logit_bias=((11, 3.0), (60, -4.0)), **cuts)  # type: ignore[arg-type]
    rule = TokenRule.of(sampling, None, len(PROMPT))
    for seed in range(5):
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
        bias = [[[11], 3.0], [[60], -4.0]]
        options = {"top_k": 0, **cuts, "do_sample": True, "temperature": 0.7, "sequence_bias": bias}
        expected = scores_of_transformers(text, logits, **options)
        assert torch.equal(rule.scores(text, logits), expected)
        assert 1 <= int(expected.isfinite().sum()) < VOCAB


def test_top_p_keeps_what_transformers_keeps() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [scale * torch.randn(1, 5000, generator=generator) for scale in (0.0, 0.1, 1.0, 4.0, 9.0)]
    rows += [row.masked_fill(row < row.topk(20).values[0, -1], -torch.inf) for row in rows[1:]]
    for top_p, row in product((1e-9, 0.1, 0.5, 0.9, 0.999), rows):
        ours, theirs = (kind(top_p)(torch.tensor([[]]), row) for kind in (TopP, TopPLogitsWarper))
        if row.any():
            assert torch.equal(ours, theirs)
        else:  # which ones of equal scores are kept is open
            assert ours.isfinite().sum() == theirs.isfinite().sum()


@pytest.mark.parametrize("top_p", [0.0, 1e-300, 1e-9])
def test_top_p_that_one_token_reaches_takes_the_token_of_temperature_0(top_p: float) -> None:
    greedy, sampled = Sampling(presence_penalty=2.0), Sampling(temperature=2.0, top_p=top_p, presence_penalty=2.0)
    rules = [TokenRule.of(sampling, None, len(PROMPT)) for sampling in (greedy, sampled)]
    rows = [torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    for row in [*rows, torch.zeros(VOCAB), rows[0].round()]:  # the last two have several best tokens
        first, second = (rule.noisy(rule.scores([*PROMPT, 7], row), len(PROMPT) + 1).argmax() for rule in rules)
        assert first == second


def test_smallest_and_largest_values_still_give_a_token() -> None:
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    row[PROMPT[0]] = 0.0  # which a penalty too small for float32 would divide by 0
    tiny = (5e-324, 1e-300, 1e-30)
    for temperature, top_p, min_p, penalty in product((*tiny, 2.0), (*tiny, 1e-5, 1.0), (0.0, 1.0), (*tiny, 1e18)):
        penalties = {"repetition_penalty": penalty, "presence_penalty": -2.0, "frequency_penalty": 2.0}
        rule = TokenRule.of(Sampling(temperature, top_p, min_p=min_p, **penalties), None, len(PROMPT))  # type: ignore[arg-type]
        scores = rule.noisy(rule.scores([*PROMPT, 7, 7], row), len(PROMPT) + 2)
        assert not scores.isnan().any() and scores.max() > -torch.inf, (temperature, top_p, min_p, penalty)


def test_top_p_does_not_sort_the_whole_vocabulary() -> None:
    row, empty = 6 * torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0)), torch.tensor([[]])
    sizes = dict[type, int]()
    for kind in (TopP, TopPLogitsWarper):
        with Sorted() as calls:
            kind(0.9)(empty, row)
        sizes[kind] = max(calls.sizes)
    assert sizes[TopPLogitsWarper] == 100_000 and sizes[TopP] < 2000


class Sorted(TorchDispatchMode):
    """Counts the numbers that are sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.sort, torch.ops.aten.topk):
            self.sizes.append(args[0].shape[-1])
        return func(*args, **(kwargs or {}))


def test_presence_and_frequency_penalties_count_what_was_generated() -> None:
    """As OpenAI defines it: logit - presence · (count > 0) - frequency · count, without the prompt's tokens."""
    rule = TokenRule.of(Sampling(presence_penalty=0.5, frequency_penalty=0.25), None, len(PROMPT))
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rule.scores(PROMPT, logits), logits)
    change = rule.scores([*PROMPT, 5, 8, 8, 8], logits) - logits
    assert {i: round(float(change[i]), 4) for i in change.nonzero()[:, 0].tolist()} == {5: -0.75, 8: -1.25}
    wider = TokenRule.of(Sampling(presence_penalty=-2.0), None, 0)  # a text may have ids beyond a narrow head
    assert torch.equal(wider.scores([VOCAB + 3], logits), logits)


def chosen(rule: TokenRule, text: list[int], logits: torch.Tensor) -> int:
    return int(rule.noisy(rule.scores(text, logits), len(text)).argmax())


def test_biased_tokens_are_taken_by_greedy_requests_too() -> None:
    logits = torch.zeros(VOCAB)
    logits[4], logits[8] = 2.0, 1.0
    assert chosen(TokenRule.of(Sampling(), None), [], logits) == 4
    assert chosen(TokenRule.of(Sampling(logit_bias=((4, -100.0),)), None), [], logits) == 8
    assert chosen(TokenRule.of(Sampling(logit_bias=((50, 100.0),)), None), [], logits) == 50


def test_constraint_stands_whatever_the_bias_is() -> None:
    constraint = MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, [4], "cpu")
    rule = TokenRule.of(Sampling(logit_bias=((4, 100.0),)), None, len(PROMPT), [constraint])
    logits = torch.zeros(VOCAB)
    assert chosen(rule, PROMPT, logits) == chosen(rule, [*PROMPT, 9], logits) == 0
    assert chosen(rule, [*PROMPT, 9, 9], logits) == 4


def peaked(seed: int, size: int = 12) -> torch.Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_token_is_drawn_from_the_softmax_of_the_scores() -> None:
    """20,000 positions, one row of logits: chi-square, at most 10 degrees, below 41 (false alarm 1e-5, fixed seed)."""
    rule = TokenRule.of(Sampling(temperature=0.8, seed=5, top_k=11), None)
    logits, n = peaked(0), 20_000
    probs = rule.probs(rule.scores((), logits))
    counts = torch.zeros(len(logits))
    for position in range(n):
        counts[int(rule.noisy(rule.scores((), logits), position).argmax())] += 1
    assert counts[probs == 0].sum() == 0
    often = n * probs >= 5
    assert int(often.sum()) >= 4
    assert float((((counts - n * probs) ** 2)[often] / (n * probs[often])).sum()) < 41


def test_draws_at_two_positions_and_of_two_seeds_do_not_tell_of_each_other() -> None:
    even = torch.zeros(1000)
    rules = [TokenRule.of(Sampling(temperature=1.0, seed=seed), None) for seed in (0, 1, -1)]
    columns = [[int(rule.noisy(even, position).argmax()) for position in range(400)] for rule in rules]
    columns.append([*columns[0][1:], 0])
    correlation = torch.corrcoef(torch.tensor(columns, dtype=torch.float64)) - torch.eye(4)
    assert float(correlation.abs().max()) < 0.25  # 5 standard errors


def test_draw_does_not_depend_on_which_positions_were_asked_for_before() -> None:
    ahead, behind = (TokenRule.of(Sampling(temperature=1.0, seed=3), None) for _ in range(2))
    positions = list(range(200))
    first = {at: int(ahead.noisy(peaked(at), at).argmax()) for at in positions}
    assert {at: chosen(behind, [1] * at, peaked(at)) for at in reversed(positions)} == first


@pytest.mark.parametrize("distance", [0.1, 0.5, 2.0])
def test_draft_with_the_targets_noise_proposes_its_token_as_often_as_the_bound_says(distance: float) -> None:
    """Daliri et al. (arXiv:2408.07978): at least (1 - TV) / (1 + TV). A draft's own argmax matches less often."""
    rule, hits, bound, most_probable, n = TokenRule.of(Sampling(temperature=1.0, seed=1), None), 0, 0.0, 0.0, 600
    for seed in range(n):
        logits = peaked(seed) / 2
        drafted = logits + distance * peaked(10_000 + seed) / 3
        target, draft = logits.softmax(-1), drafted.softmax(-1)
        apart = 0.5 * float((target - draft).abs().sum())
        bound += (1 - apart) / (1 + apart)
        most_probable += float(target[draft.argmax()])
        hits += int(rule.noisy(logits, seed).argmax()) == int(rule.noisy(drafted, seed).argmax())
    assert hits > bound - 3 * (n / 4) ** 0.5 and hits > 1.1 * most_probable


def test_greedy_scores_have_no_noise() -> None:
    assert torch.equal(TokenRule.of(Sampling(seed=4), None).noisy(peaked(0), 7), peaked(0))
