"""Training on SmolLM2-135M: seconds of it beat its own head read early."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftopt.core.streams import read_stream
from swiftopt.models.loading import load
from swiftopt.papers.training.settings import HeadSettings
from swiftopt.papers.training.trainer import train

pytestmark = pytest.mark.model

EXAMPLES = Path(__file__).parents[2] / "examples" / "stream.jsonl"


@pytest.mark.slow
def test_brief_training_beats_the_models_head() -> None:
    prompts = read_stream(str(EXAMPLES), limit=10)
    settings = HeadSettings(max_new_tokens=32, minutes=5 / 60, epochs=1000, layers=(15, 22))
    trained = train(load("smollm2-135m", "bfloat16", "cpu"), prompts, settings)
    assert trained.figures["steps"] < settings.epochs  # The clock ended it.
    own, learned = ([trained.figures[f"{name}@{depth}"] for depth in (15, 22)] for name in ("identity", "agreement"))
    assert sum(learned) > sum(own), trained.figures
