"""The number of candidates per pass, and per stream."""

from __future__ import annotations

import dataclasses

from fakes import cheap_draft_costs, flat_costs

from swiftopt.core.layer_sets import LayerSet
from swiftopt.optimizer.evaluation import MIN_CANDIDATES, affordable_candidates, candidates_per_pass
from swiftopt.optimizer.strategies import MAX_CANDIDATES

INT4 = LayerSet(4).filled("int4")


def test_more_candidates_share_a_pass_where_rows_are_free() -> None:
    free = flat_costs(n_layers=4)
    dear = dataclasses.replace(free, pass_s={n: float(n) for n in (1, 2, 4, 8, 16, 32, 64)})
    assert candidates_per_pass(free, 8) == 8
    assert candidates_per_pass(free, 32) == 2  # beyond the widths that were measured nothing is promised
    assert candidates_per_pass(dear, 8) == candidates_per_pass(None, 8) == 1
    wide = dataclasses.replace(free, pass_s={n: 0.02 + n / 10**5 for n in (1, 64, 512, 4096)})  # as on a GPU
    assert candidates_per_pass(wide, 32) == 128
    slow = dataclasses.replace(wide, pass_s={n: 20 * seconds for n, seconds in wide.pass_s.items()})
    assert candidates_per_pass(slow, 32) == 64  # 0.8 s; a pass of 128 would hold decoding up for longer than a second


def test_search_gets_its_share_of_a_stream_within_bounds() -> None:
    costs = cheap_draft_costs(0.25)
    assert affordable_candidates(costs, INT4, 32, 0) == affordable_candidates(None, INT4, 32, 10**9) == MIN_CANDIDATES
    assert affordable_candidates(costs, INT4, 32, 10**9) == MAX_CANDIDATES
    counts = [affordable_candidates(costs, INT4, 32, n) for n in range(0, 60_000, 2_000)]
    assert counts == sorted(counts) and MIN_CANDIDATES in counts and len(set(counts)) > 5
    # shorter windows cost less
    assert affordable_candidates(costs, INT4, 8, 16_000) >= affordable_candidates(costs, INT4, 32, 16_000)
    dear = affordable_candidates(cheap_draft_costs(0.9), INT4, 32, 40_000)
    assert dear <= affordable_candidates(costs, INT4, 32, 40_000)
