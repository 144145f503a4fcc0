"""Reasons why a completion was decoded without drafts, as reported in server responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .serialization import Record
from .types import Completion

Chosen = Literal[
    "requested", "pinned", "verdict", "unmeasured", "no_plan", "unusable_plan"
]  # Reasons that are known before decoding begins.
# Reasons that arise while a method that drafts is decoding.
NotDrafted = Literal["one_token", "comparison", "crowded", "no_gain"]


@dataclass(frozen=True, slots=True)
class WhyPlain(Record):
    """A reason in a word for programs, and in a sentence for people."""

    reason: Chosen | NotDrafted
    message: str


REQUESTED = WhyPlain("requested", "the request asks for plain decoding")
ONE_TOKEN = WhyPlain("one_token", "the completion ended with its first token, which is never drafted")
COMPARISON = WhyPlain("comparison", "it was short: all its rounds were the plain ones with which drafts are compared")
CROWDED = WhyPlain("crowded", "with so many concurrent requests drafts do not pay, by measured time")
NO_GAIN = WhyPlain("no_gain", "no draft promised to save time, by the measured costs of passes")


def why_nothing_was_drafted(completion: Completion) -> WhyPlain | None:
    """Return why a drafting method gave only one token per pass; None if it did draft."""
    n_passes = completion.target_passes
    if n_passes == 0:
        return ONE_TOKEN
    if completion.drafted or completion.n_tokens - completion.first_tokens > n_passes:
        return None
    return CROWDED if 2 * completion.crowded_rounds > n_passes else NO_GAIN
