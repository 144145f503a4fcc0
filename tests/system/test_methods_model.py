"""Every lossless method on the real SmolLM2-135M in float32: a real prompt, the tokens of plain decoding."""

from __future__ import annotations

import pytest
import torch
from fakes import cheap_draft_costs, results_of

from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.types import Prompt, Sampling
from swiftopt.decoding.methods import METHODS, PLAIN, Resources, build
from swiftopt.decoding.session import Session
from swiftopt.models.loading import load
from swiftopt.models.runtime import Runtime
from swiftopt.papers.early_exit import Heads, Probe
from swiftopt.papers.training.settings import default_exit

pytestmark = [pytest.mark.model, pytest.mark.slow]
TEXT = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n"  # goes on with what it has said
# SmolLM2 has no multi-token-prediction layer.
LOSSLESS = [info.name for info in METHODS.values() if not info.lossy and info.name not in ("plain", "mtp")]
N_NEW = 16


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return load("smollm2-135m", "float32", "cpu")


@pytest.fixture(scope="module")
def decoded(runtime: Runtime) -> dict[str, tuple[int, ...]]:
    """What each method, and plain decoding, makes of the prompt: side by side, so that the weights are read once.

    Untrained heads and a probe at random: what is drafted is poor, what comes out must not be.
    """
    width = runtime.config.hidden_size
    heads = Heads({depth: torch.eye(width, dtype=runtime.dtype) for depth in (20, 26)})
    probe = Probe(default_exit(runtime.n_layers), torch.zeros(width), 3.0)
    costs = cheap_draft_costs(n_layers=runtime.n_layers)
    parts = Resources(runtime, LayerSet.uniform(runtime.n_layers, 12), {"heads": heads, "probe": probe}, costs=costs)
    session, prompt = Session(runtime, Sampling(), N_NEW), Prompt("add", "code", text=TEXT)
    methods = [PLAIN, *(build(name, parts) for name in LOSSLESS)]
    turns = results_of((session.request(prompt, method) for method in methods), at_once=len(methods))
    return {method.name: turn.completion.token_ids for method, (turn,) in zip(methods, turns, strict=True)}


@pytest.mark.parametrize("name", LOSSLESS)
def test_real_prompt_gets_the_tokens_of_plain_decoding(name: str, decoded: dict[str, tuple[int, ...]]) -> None:
    assert decoded[name] == decoded["plain"] and len(decoded[name]) == N_NEW
