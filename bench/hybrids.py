"""Measures models that mix attention with recurrent layers, with the shapes of real ones and random weights.

python -m swiftopt.bench.hybrids --shape qwen3.5-2b --layers 24 --prompt-tokens 2000 --chat-tokens 4000

Prints one JSON object with these figures:
- the time of a pass over 8 rows ÷ that of a pass over 1 row, in int4 and in bfloat16;
- the time of a prompt ÷ that of the same shape with attention in all layers;
- the time of reading a chat's second turn ÷ that of reading the whole chat;
- the bytes of a sequence's states, and the share that drafts of 8 rows add to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import click
import torch
from transformers import AutoConfig

from ..core.types import Completion, Sampling
from ..decoding.context import Ending, TokenRule
from ..decoding.engine import Engine
from ..decoding.loop import decoding
from ..decoding.methods import PLAIN
from ..models.costs import machine_name
from ..models.loading import at_speed, random_runtime
from ..models.rows import Rows
from ..models.runtime import Runtime
from .turn import measured

SCHEMA = "swiftopt.bench-hybrid/1"
TOKENS = 4096  # Vocabulary size; with a full vocabulary the head would outweigh a few layers.
QWEN: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": TOKENS,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
}
GRANITE: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "vocab_size": TOKENS,
    "hidden_size": 1536,
    "shared_intermediate_size": 4096,
    "num_local_experts": 0,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
}
JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "vocab_size": TOKENS,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "num_experts": 1,
    "num_attention_heads": 20,
    "num_key_value_heads": 1,
    "mamba_d_state": 16,
    "mamba_dt_rank": 160,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
}
# Name -> settings of a config, and the period of layers with attention: one layer of that many has it.
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3.5-2b": (QWEN, 4),
    "granite-4.0-h-1b": (GRANITE, 10),
    "jamba-reasoning-3b": (JAMBA, 14),
}
REPEATS = 15
ROWS = 8
CONTEXT = 256
NEW_TOKENS, TURN_TOKENS = 16, 48  # Tokens of an answer, and of the user's message in a chat's second turn.


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen3.5-2b", show_default=True)
@click.option("--layers", default=24, show_default=True)
@click.option("--prompt-tokens", default=2000, show_default=True)
@click.option("--chat-tokens", default=4000, show_default=True)
def main(shape: str, layers: int, prompt_tokens: int, chat_tokens: int) -> None:
    """Measure a hybrid model of a shape; prints one JSON object."""
    settings, period = SHAPES[shape]
    hybrid, attention = random_model(settings, period, layers), random_model(settings, 1, layers)
    report: dict[str, Any] = {"schema": SCHEMA, "machine": machine_name(hybrid), "shape": shape, "layers": layers}
    report["threads"], report["level"] = torch.get_num_threads(), getattr(hybrid.native, "level", None)
    text = [(7 * i * i + 3 * i) % (TOKENS - 2) + 2 for i in range(chat_tokens)]
    report["rows_8_by_1"] = {name: _ratio_of_rows(hybrid, name) for name in ("int4", None)}
    seconds = [[_prefill_s(runtime, text[:prompt_tokens]) for runtime in (hybrid, attention)] for _ in range(3)]
    report["prompt_s"] = [min(runs) for runs in zip(*seconds, strict=True)]
    report["prompt_by_attention"] = median(hybrid_s / attention_s for hybrid_s, attention_s in seconds)
    report["second_turn"] = _second_turn(hybrid, text)
    state_bytes, drafting_bytes = hybrid.state_bytes(1), hybrid.state_bytes(1 + ROWS)
    report["state_bytes"], report["drafting_8_rows"] = state_bytes, drafting_bytes / state_bytes - 1
    click.echo(json.dumps(report))


def random_model(settings: Mapping[str, Any], period: int, n_layers: int) -> Runtime:
    """Return a model with random bfloat16 weights on swiftopt's kernels; one layer of `period` has attention."""
    kinds = ["full_attention" if layer % period == period - 1 else "linear_attention" for layer in range(n_layers)]
    layers: dict[str, Any] = {"layer_types": kinds}
    if settings["model_type"] == "jamba":
        layers = {"attn_layer_period": period, "attn_layer_offset": period - 1}
    config = AutoConfig.for_model(**settings, **layers, num_hidden_layers=n_layers)
    runtime = random_runtime(config, "cpu")
    at_speed(runtime, "exact")
    return runtime


def _ratio_of_rows(runtime: Runtime, format_name: str | None) -> float:
    """Return the time of a pass over `ROWS` rows ÷ that of a pass over 1 row, in a format or in the model's dtype."""
    layer_set = runtime.whole if format_name is None else runtime.whole.filled(format_name)
    runtime.copies.prepare(layer_set)
    buffer = runtime.new_buffer(CONTEXT + ROWS, ROWS)
    runtime.prefill([i % TOKENS for i in range(CONTEXT)], buffer)
    variants = () if format_name is None else (layer_set,)
    passes = [partial(runtime.forward, Rows(list(range(n)), CONTEXT, variants=variants), buffer) for n in (1, ROWS)]
    ratios: list[float] = []
    for _ in range(REPEATS + 2):  # The first two rounds are warm-up.
        seconds = []
        for run in passes:
            start = perf_counter()
            run()
            seconds.append(perf_counter() - start)
        ratios.append(seconds[1] / seconds[0])
    return median(ratios[2:])


def _prefill_s(runtime: Runtime, text: Sequence[int]) -> float:
    buffer, start = runtime.new_buffer(len(text), 1), perf_counter()
    runtime.prefill(text, buffer)
    return perf_counter() - start


def _second_turn(runtime: Runtime, text: list[int]) -> dict[str, float]:
    """Return the seconds of prefill for a chat's second turn, after the first turn and without it."""
    turn = text[:TURN_TOKENS]

    def answer(engine: Engine, ids: list[int]) -> Completion:
        rule = TokenRule.of(Sampling(), None)
        request = engine.add(decoding(runtime, ids, PLAIN, rule, Ending(NEW_TOKENS)))
        while engine.requests:
            list(engine.step())
        return request.result

    engine = Engine(1 << 34)
    first = answer(engine, text)
    longer = [*text, *first.token_ids, *turn]
    second, anew = answer(engine, longer), answer(Engine(1 << 34), longer)
    if second.token_ids != anew.token_ids:
        raise click.ClickException("after the first turn, the second has other tokens than in a new engine")
    return {"s": second.prefill_s, "anew_s": anew.prefill_s, "quotient": second.prefill_s / anew.prefill_s}


if __name__ == "__main__":
    measured(main)
