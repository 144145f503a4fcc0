"""Random models of a real one's shape, with sub-layers that a draft can do without as far as is wanted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ..core.records import ModelInfo
from ..core.settings import SwiftSettings
from ..core.types import Completion, LayerSet, Sampling
from ..decoding.context import Ending, TokenRule
from ..decoding.engine import side_by_side
from ..decoding.loop import decode, decoding
from ..decoding.methods import Method, swift
from ..models.runtime import Runtime

HALVINGS = 12  # inner sub-layers are scaled by 1 down to 2^-12
STEPS = 7  # of the bisection between them


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model of Llama's kind, and the sizes, in MiB, of what bandwidth is measured with."""

    n_layers: int
    hidden: int
    inner: int
    heads: int
    vocab: int
    positions: int
    mebibytes: int
    kv_heads: int | None = None  # None: as many as heads

    def config(self) -> LlamaConfig:
        # As wide a projection, as small its weights: what a sub-layer adds is then as large at every width.
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.n_layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads or self.heads,
            max_position_embeddings=self.positions,
            initializer_range=1.4 / self.hidden**0.5,
            eos_token_id=None,
            tie_word_embeddings=False,
        )


SHAPES = {
    "codellama-13b": ModelShape(40, 5120, 13824, 40, 32016, 16384, 2048),
    "llama-70b-8-layers": ModelShape(8, 8192, 28672, 64, 32000, 4096, 2048, kv_heads=8),
    "tiny": ModelShape(8, 256, 512, 4, 256, 2048, 16),
}


@torch.inference_mode()
def random_runtime(shape: ModelShape, device: str) -> Runtime:
    """A random bfloat16 model whose head reads a permutation of its embeddings.

    Each token so has a likely successor: the likelier, the less its sub-layers add to the residual stream. A head of
    random numbers would give near ties, which rounding alone decides.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = cast(Any, AutoModelForCausalLM).from_config(shape.config(), dtype=torch.bfloat16)
        embedding = model.get_input_embeddings().weight
        embedding.normal_()
        model.get_output_embeddings().weight.copy_(embedding[torch.randperm(shape.vocab)] / shape.hidden**0.5)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Runtime(model.eval().requires_grad_(False), None, ModelInfo("random", "llama", shape.n_layers, n_parameters))


@torch.inference_mode()
def scale_inner(runtime: Runtime, factor: float) -> None:
    """Scale what all sub-layers but those of the first and last layer add."""
    for block in runtime.blocks[1:-1]:
        for weight in (block.parts.out.weight, block.parts.mlp.down_proj.weight):
            weight.mul_(factor)


def prompt_of(runtime: Runtime, number: int = 0) -> list[int]:
    """Return one of several fixed prompts."""
    return [1 + (7 * i + 31 * number) % (runtime.vocab_size - 1) for i in range(16)]


def run(runtime: Runtime, method: Method, n_new: int) -> Completion:
    """Decode `n_new` tokens after a fixed prompt."""
    return decode(runtime, prompt_of(runtime), method, TokenRule.of(Sampling(), None), Ending(n_new))


def run_together(runtime: Runtime, method: Method, n_new: int, n_requests: int) -> float:
    """Decode `n_new` tokens after each of so many prompts, all at once; return the tokens per second of all."""
    requests = [
        decoding(runtime, prompt_of(runtime, i), method, TokenRule.of(Sampling(), None), Ending(n_new))
        for i in range(n_requests)
    ]
    clock = perf_counter()
    deque(side_by_side(requests, at_once=n_requests), 0)
    return n_requests * n_new / (perf_counter() - clock)


def drafting(layer_set: LayerSet, length: int) -> Method:
    """Chains of a fixed length: a random model is never confident, so that nothing else can end them."""
    return swift(layer_set, SwiftSettings(max_draft_length=length, early_stop=False, dynamic_verification=False))


def make_redundant(runtime: Runtime, layer_set: LayerSet, wanted: float, n_new: int) -> float:
    """Scale the inner sub-layers by the largest factor found whose drafts are accepted as often as wanted."""
    now, low, high = 0.0, 0.0, float(HALVINGS)  # exponents of 1/2; low is too little
    for step in range(STEPS + 2):
        # The ends first: as it stands, then as redundant as it gets.
        tried = (0.0, high)[step] if step < 2 else (low + high) / 2
        scale_inner(runtime, 2.0 ** (now - tried))
        now = tried
        if (run(runtime, drafting(layer_set, 4), n_new).acceptance_rate or 0.0) >= wanted:
            high = tried
        else:
            low = tried
        if high == 0.0:
            break
    scale_inner(runtime, 2.0 ** (now - high))
    return float(2.0**-high)
