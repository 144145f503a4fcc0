"""Mixtures of experts with the shapes of real models and random weights: writes a GGUF file, measures bytes per pass.

python -m swiftopt.bench.mixtures file qwen3-30b-a3b qwen3-30b-a3b.gguf
python -m swiftopt.bench.mixtures rates qwen3-30b-a3b.gguf
swiftopt bench peers --gguf qwen3-30b-a3b.gguf --depths 0 --at-once 1,4,8 --max-new-tokens 64
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import torch

from ..models.block_experts import HALVES, PARTS, BlockExperts
from ..models.block_maps import PackedBlocks
from ..models.blocks import Block
from ..models.buffer import KVBuffer
from ..models.costs import machine_name
from ..models.huge_pages import PAGES
from ..models.kernels.calls import linear
from ..models.kernels.native import NativePasses
from ..models.loading import load
from ..models.rows import Rows
from ..models.runtime import Runtime
from .turn import measured

SCHEMA = "swiftopt.bench-mixture/1"
TOKENS = 1024  # Vocabulary size; with a full vocabulary the head would outweigh a few layers.
TEXT = Path(__file__).parent.parent / "examples" / "stream.jsonl"
BLOCKS = {"Q4_K": (256, 144), "Q8_0": (32, 34), "MXFP4": (32, 17)}  # Values and bytes of a block.
Q4_K_MIDDLE = 7.5  # Mean of Q4_K's unsigned codes, which its minimum subtracts, so that weights have mean 0.
REPEATS = 15
DENSE_EXPERTS = 8  # Number of experts whose maps are joined to a dense map.


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """Shape of a real model's layer; `kinds`: tensor types of the experts and of the other matrices."""

    architecture: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    kinds: tuple[str, str]
    head_norms: bool = False
    biases: bool = False
    window: int | None = None


SHAPES = {
    "qwen3-30b-a3b": MixtureShape("qwen3moe", 2048, 768, 32, 4, 128, 128, 8, ("Q4_K", "Q4_K"), head_norms=True),
    "gpt-oss-20b": MixtureShape("gpt-oss", 2880, 2880, 64, 8, 64, 32, 4, ("MXFP4", "Q8_0"), biases=True, window=128),
}


@click.group()
def main() -> None:
    """Measure mixtures of experts with the shapes of real models and random weights."""


@main.command()
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--layers", default=8, show_default=True)
def file(shape: str, path: Path, layers: int) -> None:
    """Write a GGUF file of some layers with random weights, which llama.cpp can load too."""
    import gguf

    mixture, rng = SHAPES[shape], np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), mixture.architecture, use_temp_file=False)
    writer.add_name(f"{shape}, {layers} layers of random weights")
    for name, value in _settings(mixture, layers).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{mixture.architecture}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = [*map(chr, range(33, 127)), "ab"]
    writer.add_token_list([*letters, *(f"<{i}>" for i in range(TOKENS - len(letters)))])
    writer.add_token_types([1] * TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    tensors = list(_tensors(mixture, layers, rng))
    for name, shape_of_tensor, kind, _ in tensors:
        stored_shape = _stored_shape(shape_of_tensor, kind)
        dtype = np.dtype(np.float32 if kind == "F32" else np.uint8)
        n_bytes = int(np.prod(stored_shape)) * dtype.itemsize
        raw_type = None if kind == "F32" else gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(name, stored_shape, dtype, n_bytes, raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, _, _, make in tensors:
        writer.write_tensor_data(make())
    writer.close()
    click.echo(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


def _settings(mixture: MixtureShape, layers: int) -> dict[str, Any]:
    window = {"attention.sliding_window": mixture.window} if mixture.window else {}
    return {
        "block_count": layers,
        "context_length": 32768,
        "embedding_length": mixture.hidden,
        "feed_forward_length": mixture.inner,
        "attention.head_count": mixture.heads,
        "attention.head_count_kv": mixture.kv_heads,
        "attention.key_length": mixture.head_dim,
        "attention.value_length": mixture.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "expert_count": mixture.experts,
        "expert_used_count": mixture.chosen,
        "expert_feed_forward_length": mixture.inner,
        **window,
    }


Tensor = tuple[str, tuple[int, ...], str, Callable[[], "np.ndarray[Any, Any]"]]


def _tensors(mixture: MixtureShape, layers: int, rng: np.random.Generator) -> Iterator[Tensor]:
    """Yield each tensor: its name, shape and type, and the function that makes it."""
    expert_kind, matrix_kind = mixture.kinds

    def matrix(name: str, *shape: int, kind: str = matrix_kind) -> Tensor:
        return name, shape, kind, lambda: _random(shape, kind, rng)

    def ones(name: str, n: int) -> Tensor:
        return name, (n,), "F32", lambda: np.ones(n, np.float32)

    def small(name: str, *shape: int) -> Tensor:
        return name, shape, "F32", lambda: rng.normal(0, 0.02, shape).astype(np.float32)

    yield matrix("token_embd.weight", TOKENS, mixture.hidden)
    yield ones("output_norm.weight", mixture.hidden)
    yield matrix("output.weight", TOKENS, mixture.hidden)
    sizes = {
        "q": mixture.heads * mixture.head_dim,
        "k": mixture.kv_heads * mixture.head_dim,
        "v": mixture.kv_heads * mixture.head_dim,
    }
    for layer in range(layers):
        at = f"blk.{layer}"
        yield ones(f"{at}.attn_norm.weight", mixture.hidden)
        yield ones(f"{at}.{'post_attention_norm' if mixture.biases else 'ffn_norm'}.weight", mixture.hidden)
        for part, n_out in sizes.items():
            yield matrix(f"{at}.attn_{part}.weight", n_out, mixture.hidden)
            if mixture.biases:
                yield small(f"{at}.attn_{part}.bias", n_out)
        yield matrix(f"{at}.attn_output.weight", mixture.hidden, sizes["q"])
        if mixture.head_norms:
            yield ones(f"{at}.attn_q_norm.weight", mixture.head_dim)
            yield ones(f"{at}.attn_k_norm.weight", mixture.head_dim)
        yield f"{at}.ffn_gate_inp.weight", (mixture.experts, mixture.hidden), "F32", _router(mixture, rng)
        for part in PARTS:
            n_out, n_in = (mixture.hidden, mixture.inner) if part == "down" else (mixture.inner, mixture.hidden)
            yield matrix(f"{at}.ffn_{part}_exps.weight", mixture.experts, n_out, n_in, kind=expert_kind)
            if mixture.biases:
                yield small(f"{at}.ffn_{part}_exps.bias", mixture.experts, n_out)
        if mixture.biases:
            yield small(f"{at}.attn_output.bias", mixture.hidden)
            yield small(f"{at}.attn_sinks.weight", mixture.heads)
            yield small(f"{at}.ffn_gate_inp.bias", mixture.experts)


def _router(mixture: MixtureShape, rng: np.random.Generator) -> Callable[[], np.ndarray[Any, Any]]:
    """Return a function that makes a router with near uniform choices, the worst case for experts shared by rows."""
    return lambda: rng.normal(0, 1 / np.sqrt(mixture.hidden), (mixture.experts, mixture.hidden)).astype(np.float32)


def _stored_shape(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """Return the shape in the file: of values for F32, of bytes for other types."""
    if kind == "F32":
        return shape
    values, n_bytes = BLOCKS[kind]
    return (*shape[:-1], shape[-1] // values * n_bytes)


def _random(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return blocks with random codes and scales by which weights have a standard deviation of 0.7 / √inputs."""
    values, n_bytes = BLOCKS[kind]
    blocks = np.frombuffer(rng.bytes(int(np.prod(shape)) // values * n_bytes), np.uint8).reshape(-1, n_bytes).copy()
    deviation = 0.7 / np.sqrt(shape[-1])
    if kind == "Q4_K":
        scale = np.float16(deviation / (31 * 4.6))
        blocks[:, :4] = np.array([scale, scale * np.float16(Q4_K_MIDDLE)], np.float16).view(np.uint8)
    elif kind == "Q8_0":
        blocks[:, :2] = np.array([deviation / 74], np.float16).view(np.uint8)
    else:
        blocks[:, 0] = 127 + round(float(np.log2(deviation / 2.6)))
    return blocks.reshape(_stored_shape(shape, kind))


@main.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option("--rows", default="1,2,4,8,16", show_default=True)
@click.option("--context", default=100, show_default=True)
@torch.inference_mode()
def rates(path: Path, rows: str, context: int) -> None:
    """Measure the bytes per second of passes, with each distinct expert counted once, and of dense maps.

    The dense maps have the same codes. Rows are the letters of `examples/stream.jsonl`, others for each pass.
    """
    runtime = load(str(path), device="cpu", speed="exact")
    PAGES.finish()
    token_ids = [ord(letter) - 33 for letter in TEXT.read_text(encoding="utf-8") if 33 <= ord(letter) < 127]
    results = []
    for n_rows in map(int, rows.split(",")):
        result = _rate(runtime, token_ids, context, n_rows)
        results.append(result)
        click.echo(
            f"{n_rows} rows: {result['ms']:.2f} ms, {result['mb']:.0f} MB, {result['gb_s']:.1f} GB/s; dense maps of the"
            f" same codes {result['dense_gb_s']:.1f} GB/s: {result['share']:.2f}"
        )
    click.echo(json.dumps({"schema": SCHEMA, "file": path.name, "device": machine_name(runtime), "results": results}))


def _rate(runtime: Runtime, token_ids: list[int], context: int, n_rows: int) -> dict[str, Any]:
    """Time passes over rows after a context, alternately with dense maps, and count the bytes that the passes read."""
    native, buffer = runtime.native, runtime.new_buffer(context + n_rows)
    assert isinstance(native, NativePasses)
    runtime.prefill(token_ids[:context], buffer)
    dense_maps = [
        map_and_rows for block in runtime.blocks for map_and_rows in _dense_maps(_experts(runtime, block), n_rows)
    ]
    dense_bytes = sum(_n_bytes(packed) for packed, _ in dense_maps)
    pass_s, dense_rates, byte_counts = [], [], []
    for repeat in range(REPEATS + 1):
        first = context + repeat * n_rows
        ids = token_ids[first : first + n_rows]
        start = time.perf_counter()
        runtime.forward(Rows(ids, context), buffer)
        pass_end = time.perf_counter()
        for packed, x in dense_maps:
            linear(native.kernels, packed.map(), x)
        end = time.perf_counter()
        if repeat:  # Round 0 is a warm-up.
            pass_s.append(pass_end - start)
            dense_rates.append(dense_bytes / (end - pass_end))
            byte_counts.append(_bytes_read(runtime, ids, context, buffer))
    rate = median(n_bytes / seconds for n_bytes, seconds in zip(byte_counts, pass_s, strict=True))
    return {
        "rows": n_rows,
        "ms": round(1e3 * median(pass_s), 3),
        "mb": round(median(byte_counts) / 1e6, 1),
        "gb_s": round(rate / 1e9, 2),
        "dense_gb_s": round(median(dense_rates) / 1e9, 2),
        "share": round(rate / median(dense_rates), 3),
    }


def _experts(runtime: Runtime, block: Block) -> BlockExperts:
    names = runtime.family.experts
    assert names is not None
    experts = block.parts.mlp.get_submodule(names.experts)
    assert isinstance(experts, BlockExperts)
    return experts


def _dense_maps(experts: BlockExperts, n_rows: int) -> list[tuple[PackedBlocks, torch.Tensor]]:
    """Join the maps of some experts to two dense maps, of gate and up and of the outputs; return each with its rows."""
    joined_maps = []
    for parts in HALVES.values():
        expert_maps = [expert_map for part in parts for expert_map in experts.maps[part][:DENSE_EXPERTS]]
        blocks = [expert_map for expert_map in expert_maps if isinstance(expert_map, PackedBlocks)]
        codes, scales = (torch.cat([getattr(packed, name) for packed in blocks]) for name in ("codes", "scales"))
        joined = replace(blocks[0], codes=codes, scales=scales, n_out=sum(packed.n_out for packed in blocks))
        joined_maps.append((joined, torch.randn(n_rows, joined.n_in).bfloat16()))
    return joined_maps


def _n_bytes(packed: Any) -> int:
    return int(packed.codes.nbytes + packed.scales.nbytes)


def _bytes_read(runtime: Runtime, ids: list[int], context: int, buffer: KVBuffer) -> int:
    """Return the bytes of the weights that a pass over rows reads."""
    names, native, choices = runtime.family.experts, runtime.native, list[torch.Tensor]()
    assert names is not None
    routers = [block.parts.mlp.get_submodule(names.router) for block in runtime.blocks]
    hooks = [router.register_forward_hook(lambda _, args, out: choices.append(out[2])) for router in routers]
    runtime.native = None  # Only torch's path calls the routers.
    try:
        runtime.forward(Rows(ids, context), buffer)
    finally:
        runtime.native = native
        for hook in hooks:
            hook.remove()
    total = _n_bytes(runtime.head_module(None))
    for block, router, layer_choices in zip(runtime.blocks, routers, choices, strict=True):
        experts = _experts(runtime, block)
        total += sum(_n_bytes(packed) for packed in (*block.parts.qkv, block.parts.out)) + router.weight.nbytes
        total += sum(_n_bytes(experts.maps[part][i]) for i in torch.unique(layer_choices).tolist() for part in PARTS)
    return total


if __name__ == "__main__":
    measured(main)
