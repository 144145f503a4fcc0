"""Drafts of the small trained mixture with fewer experts: what windows predict of their value is what rounds give."""

from __future__ import annotations

import pytest

from swiftopt.bench.mixture_drafts import EXAMPLES, unit_costs, value_of
from swiftopt.bench.small_mixture import trained
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.streams import read_stream
from swiftopt.core.types import LayerSet, Sampling
from swiftopt.decoding.session import Session
from swiftopt.models.loading import load


@pytest.mark.slow
def test_value_of_drafts_with_fewer_experts_is_as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In units of cost, so that no clock is read. The model is trained at first, for minutes."""
    monkeypatch.delenv("SWIFTOPT_CACHE_DIR", raising=False)
    runtime = load(str(trained()), dtype="auto", device="cpu")
    session = Session(runtime, Sampling(), 96, ignore_eos=True)
    settings = SwiftSettings(early_stop=False, max_draft_length=3, dynamic_verification=False)
    prompts = read_stream(str(EXAMPLES / "stream.jsonl"), limit=4)
    for number in (2, 1):
        draft = LayerSet(runtime.n_layers, experts=(("mlp", number),))
        value = value_of(session, prompts, draft, unit_costs(runtime), settings)
        assert value.acceptance is not None and value.acceptance > 0.5
        assert 0.95 < value.ratio < 1.05
