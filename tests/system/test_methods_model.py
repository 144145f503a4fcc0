"""Every lossless method on the real SmolLM2-135M in float32: a real prompt, the tokens of plain decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes import cheap_draft_costs

import swiftopt
from swiftopt.core.streams import read_stream
from swiftopt.core.types import LayerSet, Sampling
from swiftopt.decoding.methods import METHODS, PLAIN, Resources, build
from swiftopt.decoding.methods.early_exit import default_exit
from swiftopt.decoding.session import Session
from swiftopt.models.early_exit import Heads, Probe
from swiftopt.models.loading import load
from swiftopt.models.runtime import Runtime

pytestmark = pytest.mark.model
EXAMPLES = Path(swiftopt.__file__).parent / "examples" / "stream.jsonl"
LOSSLESS = [info.name for info in METHODS.values() if not info.lossy and info.name != "plain"]
N_NEW = 16


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return load("smollm2-135m", "float32", "cpu")


@pytest.fixture(scope="module")
def plain(runtime: Runtime) -> dict[str, tuple[int, ...]]:
    session = Session(runtime, Sampling(), N_NEW)
    prompts = read_stream(str(EXAMPLES), limit=1)
    return {prompt.id: next(iter(session.run(prompt, PLAIN)))[1].token_ids for prompt in prompts}


@pytest.mark.parametrize("name", LOSSLESS)
def test_real_prompt_gets_the_tokens_of_plain_decoding(
    name: str, runtime: Runtime, plain: dict[str, tuple[int, ...]]
) -> None:
    """Untrained heads and a probe at random: what is drafted is poor, what comes out must not be."""
    width = runtime.config.hidden_size
    heads = Heads({depth: torch.eye(width, dtype=runtime.dtype) for depth in (20, 26)})
    probe = Probe(default_exit(runtime.n_layers), torch.zeros(width), 3.0)
    costs = cheap_draft_costs(n_layers=runtime.n_layers)
    method = build(name, Resources(runtime, LayerSet.uniform(runtime.n_layers, 12), heads, probe, costs=costs))
    session = Session(runtime, Sampling(), N_NEW)
    for prompt in read_stream(str(EXAMPLES), limit=1):
        assert next(iter(session.run(prompt, method)))[1].token_ids == plain[prompt.id]
