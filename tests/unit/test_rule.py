"""The laws of the rule that makes a token of scores: which processors it applies, in which order, to what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import VOCAB, tiny_model
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor

from swiftopt.core.types import Sampling
from swiftopt.decoding.rule import TokenRule

PROMPT = [3, 5, 5, 9]


def scores_of_transformers(text: list[int], logits: torch.Tensor, **options: Any) -> torch.Tensor:
    """What the processors give that `generate` makes of its options."""
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


def test_presence_and_frequency_penalties_count_what_was_generated() -> None:
    """OpenAI: logit - presence · (count > 0) - frequency · count; the prompt's tokens are not counted."""
    rule = TokenRule.of(Sampling(presence_penalty=0.5, frequency_penalty=0.25), None, len(PROMPT))
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rule.scores(PROMPT, logits), logits)
    change = rule.scores([*PROMPT, 5, 8, 8, 8], logits) - logits
    assert {i: round(float(change[i]), 4) for i in change.nonzero()[:, 0].tolist()} == {5: -0.75, 8: -1.25}
    wider = TokenRule.of(Sampling(presence_penalty=-2.0), None, 0)  # a text may have ids beyond a narrow head
    assert torch.equal(wider.scores([VOCAB + 3], logits), logits)


def test_biased_tokens_are_taken_by_greedy_requests_too() -> None:
    logits = torch.zeros(VOCAB)
    logits[4], logits[8] = 2.0, 1.0
    assert TokenRule.of(Sampling(), None).choose([], logits) == 4
    assert TokenRule.of(Sampling(logit_bias=((4, -100.0),)), None).choose([], logits) == 8
    assert TokenRule.of(Sampling(logit_bias=((50, 100.0),)), None).choose([], logits) == 50


def test_constraint_stands_whatever_the_bias_is() -> None:
    constraint = MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, [4], "cpu")
    rule = TokenRule.of(Sampling(logit_bias=((4, 100.0),)), None, len(PROMPT), [constraint])
    logits = torch.zeros(VOCAB)
    assert rule.choose(PROMPT, logits) == rule.choose([*PROMPT, 9], logits) == 0
    assert rule.choose([*PROMPT, 9, 9], logits) == 4
