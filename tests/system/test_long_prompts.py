"""Long prompts beside others: those that decode go on at one pace, however deep the prompt has been read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from native import quick_runtime, words

from swiftopt.core.types import Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.engine import Engine
from swiftopt.decoding.loop import decoding
from swiftopt.decoding.methods import PLAIN
from swiftopt.models.runtime import PREFILL_ROWS_BESIDE

DEPTH = 8192


def test_others_get_a_token_for_each_piece_of_a_long_prompt() -> None:
    runtime, engine = quick_runtime("llama", max_position_embeddings=2 * DEPTH), Engine()
    runtime.info = replace(runtime.info, n_parameters=10**9)  # So that attention is little beside the maps.
    short, long = words(1, 4), words(2, DEPTH)
    rule, n_tokens, n_pieces = TokenRule.of(Sampling(), None), 0, 0
    running = engine.add(decoding(runtime, short, PLAIN, rule, Ending(DEPTH)))
    for _ in range(3):
        list(engine.step())
    late = engine.add(decoding(runtime, long, PLAIN, rule, Ending(2)))
    list(engine.step())
    while late.pass_ is not None and late.pass_.kind == "beside":
        assert len(late.pass_.rows.token_ids) <= PREFILL_ROWS_BESIDE
        n_tokens += sum(len(event.token_ids) for event in engine.step() if event.context.n_prompt == len(short))
        n_pieces += 1
    assert not running.is_done and n_tokens == n_pieces >= DEPTH // PREFILL_ROWS_BESIDE
    engine.close()


@pytest.mark.parametrize("family", ["llama", "mistral-window", "lfm2"])
def test_passes_that_others_wait_for_have_the_same_cost_at_any_depth(family: str) -> None:
    """By their multiply-adds at the shape of a small model; where a window bounds these, its passes stay long."""
    runtime = quick_runtime(family, max_position_embeddings=4 * DEPTH)
    n_layers = {"llama": 4, "mistral-window": 0, "lfm2": 2}[family]
    runtime.info = replace(runtime.info, n_parameters=1_000_000)
    buffer, products = runtime.new_buffer(1, 1), list[int]()
    for pass_ in runtime.prefill_passes([1] * 3 * DEPTH, buffer, is_shared=lambda: True):
        n_rows = len(pass_.rows.token_ids)
        products.append(n_rows * (1_000_000 + 2 * 32 * n_layers * pass_.rows.first_slot))
    whole = PREFILL_ROWS_BESIDE * 1_000_000
    assert max(products) <= whole and min(products[:-1]) > whole / 2
    alone = [len(pass_.rows.token_ids) for pass_ in runtime.prefill_passes([1] * DEPTH, buffer)]
    assert set(alone) == {512}
