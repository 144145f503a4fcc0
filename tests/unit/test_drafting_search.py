"""Stop threshold, draft length and branching are chosen on scored windows by measured costs."""

from __future__ import annotations

import dataclasses
import random

import pytest

from swiftopt.core.costs import CostProfile
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.settings import PAPER_BRANCHING, SwiftSettings
from swiftopt.optimizer.drafting import branching_of, search_drafting
from swiftopt.optimizer.evaluation import WindowScore, swift_speedup

SET = LayerSet.uniform(8, 6)
SETTINGS = SwiftSettings()
LONGEST = SETTINGS.max_draft_length


def costs(draft: float, row: float) -> CostProfile:
    """Return costs: a draft pass costs `draft` plain passes, and each further row of the target's pass `row`."""
    passes = {n: 1.0 + row * (n - 1) for n in (1, 2, 4, 8, 16, 32, 64)}
    part = (1.0 - draft) / 6  # six of sixteen parts are left out
    return CostProfile("f", "cpu", "float32", 256, 8, part, part, 0.0, 1.0 - 16 * part, passes)


def windows(agreement: float, seed: int = 0, n: int = 6) -> list[WindowScore]:
    """Return windows of a draft that is right with probability `agreement`, and then more confident."""
    rng = random.Random(seed)
    scores = []
    for _ in range(n):
        right = [rng.random() < agreement for _ in range(32)]
        sure = [min(0.99, max(0.05, rng.gauss(0.85 if hit else 0.5, 0.15))) for hit in right]
        scores.append(WindowScore(tuple(0 if hit else rng.choice((1, 2, 7)) for hit in right), tuple(sure)))
    return scores


def test_branching_keeps_the_papers_proportions() -> None:
    assert branching_of(10) == PAPER_BRANCHING
    assert branching_of(1) == ((0.5, 1), (0.8, 1), (0.95, 1), (1.0, 1))


@pytest.mark.parametrize(("draft", "row"), [(0.3, 0.001), (0.3, 0.15), (0.9, 0.02)])
def test_found_settings_promise_more_on_those_windows(draft: float, row: float) -> None:
    scores, measured = windows(0.8), costs(draft, row)
    found, promised, before = search_drafting(scores, SET, SETTINGS, measured, LONGEST)
    assert before == pytest.approx(swift_speedup(scores, SET, SETTINGS, measured))
    assert promised == pytest.approx(swift_speedup(scores, SET, found, measured))
    assert promised >= before and (found == SETTINGS) == (promised == before)
    kept = {"stop_threshold", "max_draft_length", "branching"}
    other = {f.name for f in dataclasses.fields(SETTINGS)} - kept
    assert all(getattr(found, name) == getattr(SETTINGS, name) for name in other)


def test_dear_rows_make_for_narrow_drafts_and_dear_drafts_for_short_ones() -> None:
    scores = windows(0.8)
    dear_rows, *_ = search_drafting(scores, SET, SETTINGS, costs(0.3, 0.3), LONGEST)
    free_rows, *_ = search_drafting(scores, SET, SETTINGS, costs(0.3, 0.0), LONGEST)
    assert dear_rows.branching[0][1] < free_rows.branching[0][1]
    dear_drafts, *_ = search_drafting(scores, SET, SETTINGS, costs(0.95, 0.0), LONGEST)
    assert dear_drafts.max_draft_length < free_rows.max_draft_length or (
        dear_drafts.stop_threshold > free_rows.stop_threshold
    )


def test_draft_may_become_longer_again_than_it_was_chosen_for_another_text() -> None:
    short = dataclasses.replace(SETTINGS, max_draft_length=2, stop_threshold=0.05)
    found, *_ = search_drafting(windows(0.98), SET, short, costs(0.3, 0.001), LONGEST)
    assert 2 < found.max_draft_length <= LONGEST


def test_search_repeats_itself_and_a_good_choice_is_left_alone() -> None:
    scores, measured = windows(0.9, seed=3), costs(0.5, 0.02)
    first = search_drafting(scores, SET, SETTINGS, measured, LONGEST)
    assert search_drafting(scores, SET, SETTINGS, measured, LONGEST) == first
    again, promised, before = search_drafting(scores, SET, first[0], measured, LONGEST)
    assert (again, promised, before) == (first[0], first[1], first[1])
