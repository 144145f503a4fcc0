"""Completions to JSON and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftopt.core.errors import InvalidInput
from swiftopt.core.types import Completion, LayerSet, Timings

COUNT = st.integers(0, 10**6)
SECONDS = st.floats(0, 1e6)
COMPLETIONS = st.builds(
    Completion,
    token_ids=st.lists(COUNT).map(tuple),
    text=st.text(),
    finish_reason=st.sampled_from(["stop", "length", "stop_string"]),
    method=st.sampled_from(["plain", "swift"]),
    n_prompt_tokens=COUNT,
    target_passes=COUNT,
    first_tokens=st.integers(0, 1),
    drafted=COUNT,
    accepted=COUNT,
    accepted_per_position=st.lists(COUNT).map(tuple),
    refused=COUNT,
    accepted_prediction=COUNT,
    rejected_prediction=COUNT,
    verified_widths=st.dictionaries(st.integers(1, 300), COUNT),
    by_draft_length=st.dictionaries(st.integers(1, 9), st.lists(COUNT).map(tuple)),
    timings=st.builds(Timings, SECONDS, SECONDS, SECONDS, SECONDS),
    prefill_s=SECONDS,
    layer_set=st.none() | st.builds(LayerSet, st.just(9), st.frozensets(st.integers(1, 7)), st.just(frozenset({3}))),
)


@given(COMPLETIONS)
def test_completion_survives_json(completion: Completion) -> None:
    assert Completion.from_json(completion.to_json()) == completion
    assert Completion.from_json(json.loads(json.dumps(completion.to_json()))) == completion


@pytest.mark.parametrize("key", ["token_ids", "n_prompt_tokens", "verified_widths", "timings", "layer_set"])
def test_completion_with_a_part_missing_is_not_read(key: str) -> None:
    values: dict[str, Any] = Completion((1, 2), "a b", "stop", "plain").to_json()
    del values[key]
    with pytest.raises(InvalidInput, match=f"lacks '{key}'"):
        Completion.from_json(values)
