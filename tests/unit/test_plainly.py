"""The reason why nothing was drafted, by the counts of a completion."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swiftopt.core.plainly import why_nothing_was_drafted
from swiftopt.core.types import Completion

PLAIN = Completion(tuple(range(9)), "", "length", "adaptive", target_passes=8, first_tokens=1)


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        (PLAIN, "no_gain"),
        (replace(PLAIN, crowded_rounds=5), "crowded"),
        (replace(PLAIN, crowded_rounds=4), "no_gain"),
        (replace(PLAIN, token_ids=(1,), target_passes=0), "one_token"),
        (replace(PLAIN, drafted=1), None),
        (replace(PLAIN, target_passes=4), None),  # more tokens than passes: the method ran the model itself
    ],
)
def test_reason_is_that_of_the_rounds(completion: Completion, reason: str | None) -> None:
    why = why_nothing_was_drafted(completion)
    assert (why and why.reason) == reason
