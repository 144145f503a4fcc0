"""Small measurements, each of one part; every command prints one JSON object as its last line.

python -m swiftopt.bench.micro passes --model qwen2.5-coder-1.5b --contexts 200,2000 --rows 1,8 --sequences 1,8
python -m swiftopt.bench.micro attention --contexts 2000,24000 --rows 1,8,512 --threads 1,2
python -m swiftopt.bench.micro step --model smollm2-135m --stream humaneval.jsonl
python -m swiftopt.bench.micro memory --model smollm2-135m --prompt-tokens 128 --max-new-tokens 128
python -m swiftopt.bench.micro head-rank --model smollm2-135m
python -m swiftopt.bench.micro lookups
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
import torch

from ..core.errors import SwiftoptError
from ..core.layer_sets import LayerSet, n_skipped_for, searchable
from ..core.records import LayerSetRecord
from ..core.settings import SwiftSettings
from ..core.streams import read_stream
from ..core.types import Sampling
from ..decoding.context import Context, Ending, TokenRule
from ..decoding.engine import alone
from ..decoding.loop import decode
from ..decoding.methods import PLAIN, Method, swift
from ..decoding.session import Session
from ..models.costs import machine_name
from ..models.huge_pages import PAGES
from ..models.kernels import layout
from ..models.kernels.native import NativePasses
from ..models.loading import at_speed, load, random_runtime
from ..models.rows import Pass, Rows
from ..models.runtime import Runtime
from ..optimizer.search import Search
from ..optimizer.task_state import sub_layers_of
from ..store import Store
from .turn import measured, started

RANK_SCHEMA = "swiftopt.head-rank/1"
PASS_REPEATS, STEP_REPEATS = 9, 15
RATE_CASES = ((0, 1), (0, 512))  # Context and rows of the passes that measure the linear maps' rates.
SHAPE = {
    **{"vocab_size": 256, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12},
    **{"num_key_value_heads": 2, "max_position_embeddings": 65536},
}
LARGEST_BATCH = 8  # Largest number of candidates scored in one pass.
SKIP_RATIO = 0.45
N_SETS = 100  # Layer sets stored in the server's database.
N_CONNECTIONS = 8
LOOKUP_RATE = 100  # Requests per second in the constant-rate measurement.
NOWHERE = "redis://127.0.0.1:1/0"  # No Redis listens here: the server must answer without its cache.

MODEL = click.option("--model", required=True)
DTYPE = click.option("--dtype", default="auto")
DEVICE = click.option("--device", default="auto")


@click.group()
def main() -> None:
    """Small measurements, each of one part; every command prints one JSON object as its last line."""


@main.result_callback()
def _print(report: dict[str, Any] | None) -> None:
    if report is not None:
        click.echo(json.dumps(report))


# --- passes: time of each part of a forward pass


@main.command()
@MODEL
@DTYPE
@click.option("--contexts", default="200,2000")
@click.option("--rows", default="1,8", help="Rows of each sequence.")
@click.option("--sequences", default="1")
@torch.inference_mode()
def passes(model: str, dtype: str, contexts: str, rows: str, sequences: str) -> dict[str, Any]:
    """Split the time of a pass into linear maps, attention, the rest of the kernels' work, and Python.

    Passes of swiftopt's kernels and of torch's (`--speed eager`) alternate. Prints a line with medians in ms for each
    context, number of sequences and rows per sequence. `weights_gb_s`: bytes of the weights per second of linear maps;
    null for mixtures of experts, whose passes read a part of them (`bench.mixtures rates` counts it).
    """
    runtime = load(model, dtype, "cpu", speed="eager")
    at_speed(runtime, "exact")
    PAGES.finish()
    results = []
    for context, n_sequences, n_rows in product(
        *(map(int, number_list.split(",")) for number_list in (contexts, sequences, rows))
    ):
        results.append(pass_times(runtime, context, n_rows, n_sequences))
        ms = results[-1]["ms"]
        ms_words = ", ".join(f"{name} {ms[name]:.2f}" for name in (*layout.WORK, "python"))
        sequences_words = f" of {n_sequences} sequences" if n_sequences > 1 else ""
        click.echo(
            f"{context} slots, {n_rows} rows{sequences_words}: {ms['total']:.2f} ms ({ms_words});"
            f" by torch {ms['eager']:.2f} ms"
        )
    about = {"schema": "swiftopt.bench-passes/1", "model": model, "device": machine_name(runtime)}
    return {**about, "dtype": runtime.dtype_name, "results": results}


def pass_times(runtime: Runtime, context: int, n_rows: int, n_sequences: int) -> dict[str, Any]:
    """Return median ms of a pass, and of its parts, over `n_rows` rows per sequence after `context` slots."""
    native = runtime.native
    assert isinstance(native, NativePasses)
    rows = Rows([1] * n_rows, context)
    passes = [Pass(runtime, rows, runtime.new_buffer(context + n_rows)) for _ in range(n_sequences)]

    def run() -> float:
        clock = perf_counter()
        torch.cat(runtime.forward_together(passes)).argmax(dim=-1).tolist()
        return perf_counter() - clock

    samples: dict[str, list[float]] = {}
    for repeat in range(PASS_REPEATS + 1):
        native.seconds = (ctypes.c_double * len(layout.WORK))()
        total = run()
        seconds_by_part = dict(zip(layout.WORK, native.seconds, strict=True))
        # Without native kernels the runtime uses torch's operations on the same weights.
        runtime.native, native.seconds = None, None
        try:
            eager = run()
        finally:
            runtime.native = native
        if repeat:  # Round 0 is a warm-up.
            python = total - sum(seconds_by_part.values())
            for name, seconds in {"total": total, **seconds_by_part, "python": python, "eager": eager}.items():
                samples.setdefault(name, []).append(1e3 * seconds)
    ms = {name: round(median(values), 2) for name, values in samples.items()}
    model: Any = runtime.hf_model
    n_bytes = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    table, head = model.get_input_embeddings().weight, runtime.head_module(None).weight
    # A pass reads only one row per token of an untied embedding table.
    if table.data_ptr() != head.data_ptr():
        del n_bytes[table.data_ptr()]
    rate = None if runtime.family.experts else round(sum(n_bytes.values()) / ms["maps"] / 1e6, 1)
    return {"context": context, "sequences": n_sequences, "rows": n_rows, "ms": ms, "weights_gb_s": rate}


# --- attention: its time, and the time that its bytes and multiply-adds would take at the linear maps' rates


@main.command()
@click.option("--contexts", default="2000,24000")
@click.option("--rows", default="1,8,512")
@click.option("--threads", default="1,2")
@click.option("--layers", default=4)
@click.option("--repeats", default=PASS_REPEATS)
@torch.inference_mode()
def attention(contexts: str, rows: str, threads: str, layers: int, repeats: int) -> dict[str, Any]:
    """Compare attention's time with the time that it would take at the linear maps' rates.

    Layers have random bfloat16 weights and the shape of Qwen2.5-1.5B. Passes over 1 row measure how many bytes a second
    the maps read, passes over 512 rows how many multiply-adds they compute. Attention's expected time is the longer of
    the times for its bytes and its multiply-adds. All passes alternate. Prints a line with medians in ms per layer for
    each number of threads, context and rows.
    """
    from transformers import AutoConfig

    runtime = random_runtime(AutoConfig.for_model("qwen2", **SHAPE, num_hidden_layers=layers), "cpu")
    at_speed(runtime, "exact")
    cases = list(product(map(int, contexts.split(",")), map(int, rows.split(","))))
    results, n_before = list[dict[str, Any]](), torch.get_num_threads()
    for n_threads in map(int, threads.split(",")):
        torch.set_num_threads(n_threads)
        try:
            results += attention_times(runtime, cases, n_threads, repeats)
        finally:
            torch.set_num_threads(n_before)
    return {"schema": "swiftopt.bench-attention/1", "device": machine_name(runtime), "results": results}


def attention_times(
    runtime: Runtime, cases: list[tuple[int, int]], n_threads: int, repeats: int
) -> list[dict[str, Any]]:
    """Time passes over each case (context, rows), alternating with those that measure the linear maps' rates."""
    native = runtime.native
    assert isinstance(native, NativePasses)
    n_layers, width = runtime.n_layers, SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
    buffer = runtime.new_buffer(max(context + n_rows for context, n_rows in (*cases, *RATE_CASES)))
    for block in (*buffer.keys, *buffer.values):
        block.normal_()  # Memory that was never written would be read from one page of zeros, which stays in cache.
    samples: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for repeat in range(repeats + 1):
        for context, n_rows in (*cases, *RATE_CASES):
            native.seconds = (ctypes.c_double * len(layout.WORK))()
            runtime.forward(Rows([1] * n_rows, context), buffer, wanted=())
            maps_s, attention_s, _ = native.seconds
            if repeat:  # Round 0 is a warm-up.
                samples.setdefault((context, n_rows), []).append((maps_s, attention_s))
    native.seconds = None
    map_weights = sum(weight.numel() for name, weight in runtime.hf_model.named_parameters() if "proj.weight" in name)
    one_row_s, many_rows_s = (median(maps_s for maps_s, _ in samples[case]) for case in RATE_CASES)
    bytes_per_s, products_per_s = 2 * map_weights / one_row_s, map_weights * RATE_CASES[1][1] / many_rows_s
    results = []
    for context, n_rows in cases:
        slots = context + (n_rows + 1) / 2  # Average over the rows, as each row also sees the rows before it.
        n_bytes = 2 * 2 * width * SHAPE["num_key_value_heads"] * (context + n_rows)
        n_products = 2 * width * SHAPE["num_attention_heads"] * slots * n_rows
        layer_s = median(attention_s for _, attention_s in samples[context, n_rows]) / n_layers
        ratio = layer_s / max(n_bytes / bytes_per_s, n_products / products_per_s)
        results.append({"threads": n_threads, "context": context, "rows": n_rows, "ms": round(1e3 * layer_s, 4)})
        results[-1] |= {"ratio": round(ratio, 3), "gb_s": round(n_bytes / layer_s / 1e9, 2)}
        results[-1] |= {"maps_gb_s": round(bytes_per_s / 1e9, 2), "maps_gflop_s": round(2e-9 * products_per_s, 1)}
        click.echo(
            f"{n_threads} threads, {context} slots, {n_rows} rows: {1e3 * layer_s:.3f} ms a layer, {ratio:.2f} times"
            f" the time at the maps' {bytes_per_s / 1e9:.1f} GB/s and {2e-9 * products_per_s:.0f} GFLOP/s"
        )
    return results


# --- step: time of one search step


@main.command()
@MODEL
@click.option("--stream", required=True)
@DTYPE
@DEVICE
@torch.inference_mode()
def step(model: str, stream: str, dtype: str, device: str) -> dict[str, Any]:
    """Compare the cost of a search step with that of a draft pass over the window, on a real prompt.

    A step scores one candidate of a batch; its time includes the search's own work besides the pass. Shows medians in
    ms for each size of batch. The repetitions alternate.
    """
    runtime = load(model, dtype, device)
    settings = SwiftSettings(max_steps=10**6, patience=10**6, target_matchness=1.0, strategy="random")
    session = Session(runtime, Sampling(), 64)
    context = context_of(session, session.encode(read_stream(stream, limit=1)[0]), settings.context_window)
    skipped = random.Random(1).sample(searchable(runtime.n_layers), n_skipped_for(runtime.n_layers, SKIP_RATIO))
    variants = (runtime.whole.skipping(skipped),)
    window = Rows(context.token_ids[-settings.context_window - 1 : -1], context.root_slot, variants=variants)

    def draft_pass() -> object:
        """Run the draft over the window and read its tokens."""
        return runtime.forward(window, context.buffer).float().max(dim=-1).indices.tolist()

    def score(search: Search) -> object:
        context.searched = False
        return alone(search.score(context, ""))

    runs: dict[str, Callable[[], object]] = {"draft pass": draft_pass}
    batches = (1, 2, 4, LARGEST_BATCH)
    for batch in batches:
        search = Search("bench", runtime.whole, sub_layers_of(runtime), settings, SKIP_RATIO, None)
        search.batch = batch
        runs[f"steps of {batch}"] = partial(score, search)
    ms = measure_ms(runs)
    ms_per_step = {str(batch): round(ms[f"steps of {batch}"] / batch, 3) for batch in batches}
    share_of_pass = {batch: round(step_ms / ms["draft pass"], 3) for batch, step_ms in ms_per_step.items()}
    about = {"schema": "swiftopt.bench-step/1", "model": model, "device": machine_name(runtime)}
    return {**about, "ms": ms, "ms_per_step": ms_per_step, "share_of_draft_pass": share_of_pass}


def context_of(session: Session, ids: list[int], n_generated: int) -> Context:
    """Return the context of a request that has generated `n_generated` tokens; random ones take as long as others."""
    rng, runtime = random.Random(0), session.runtime
    ids = [*ids, *(rng.randrange(100, 1000) for _ in range(n_generated))]
    buffer = runtime.new_buffer(len(ids) + (LARGEST_BATCH + 1) * n_generated)
    runtime.prefill(ids[:-1], buffer)
    return Context(runtime, buffer, session.rule(), ids, len(ids) - n_generated)


def measure_ms(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median ms of each run, over repetitions that alternate."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(STEP_REPEATS + 1):
        for name, run in runs.items():
            clock = perf_counter()
            run()
            if repeat:  # Round 0 is a warm-up.
                samples[name].append(1e3 * (perf_counter() - clock))
    return {name: round(median(values), 3) for name, values in samples.items()}


# --- memory: peak memory with and without drafting


@main.command()
@MODEL
@click.option("--prompt-tokens", default=128)
@click.option("--max-new-tokens", default=128)
@DTYPE
@DEVICE
@click.option("--repeats", default=3)
@click.option("--child", type=click.Choice(["plain", "swift"]), hidden=True)
def memory(
    model: str, prompt_tokens: int, max_new_tokens: int, dtype: str, device: str, repeats: int, child: str | None
) -> dict[str, Any] | None:
    """Compare the peak memory of plain decoding and drafting, each in its own process, because a peak never falls.

    Counts all memory of the process on a CPU, and what torch allocated on a CUDA device.
    """
    if child:
        click.echo(peak_bytes(model, child, prompt_tokens, max_new_tokens, dtype, device))
        return None
    peaks: dict[str, list[int]] = {"plain": [], "swift": []}
    for _ in range(repeats):
        for method, sizes in peaks.items():
            command = [sys.executable, "-m", "swiftopt.bench.micro", *sys.argv[1:], "--child", method]
            sizes.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    median_bytes = {method: sorted(sizes)[len(sizes) // 2] for method, sizes in peaks.items()}
    about = {"schema": "swiftopt.bench-memory/1", "model": model, "peak_bytes": peaks}
    return {**about, "extra_share": round(median_bytes["swift"] / median_bytes["plain"] - 1, 4)}


def peak_bytes(model: str, method: str, n_prompt: int, max_new_tokens: int, dtype: str, device: str) -> int:
    """Decode once in this process and return its peak memory."""
    runtime = load(model, dtype, device)
    uniform = LayerSet.uniform(runtime.n_layers, n_skipped_for(runtime.n_layers, SKIP_RATIO))
    decoder: Method = PLAIN if method == "plain" else swift(uniform, SwiftSettings())
    prompt = [7 + i % 50 for i in range(n_prompt)]
    decode(runtime, prompt, decoder, TokenRule.of(Sampling(), None), Ending(max_new_tokens))
    if runtime.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(runtime.device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports ru_maxrss in KiB.


# --- head-rank: rank of the output head's matrix


@main.command("head-rank")
@MODEL
@click.option("--json", "as_json", is_flag=True)
def head_rank_of(model: str, as_json: bool) -> dict[str, Any] | None:
    """Compute the rank of a model's output head from its singular values (AdaDecode, Table 4)."""
    hf_model: Any = load(model, "auto", "cpu").hf_model
    head = hf_model.get_output_embeddings().weight.detach()
    rank, smallest = head_rank(head)
    vocab, width = head.shape
    if not as_json:
        click.echo(f"{vocab} x {width}: {rank} singular values above 0, the smallest {smallest:.5f}")
        return None
    about = {"schema": RANK_SCHEMA, "model": model}
    return {**about, "vocab": vocab, "width": width, "rank": rank, "smallest": smallest}


def head_rank(weight: torch.Tensor) -> tuple[int, float]:
    """Return the number of a matrix's singular values above 0, and the smallest singular value.

    They are roots of the eigenvalues of WᵀW in float64; values below 1e-7 of the largest count as 0.
    """
    double_weight = weight.double()
    values = torch.linalg.eigvalsh(double_weight.T @ double_weight).clamp_min(0).sqrt()
    return int((values > 1e-7 * values.max()).sum()), float(values.min())


# --- lookups: rate and latency of layer-set lookups over HTTP


@main.command()
@click.option("--seconds", default=20.0, help="Seconds of each part.")
def lookups(seconds: float) -> dict[str, Any]:
    """Measure lookups of layer sets over HTTP on loopback: their highest rate, and their latency at a constant rate.

    Starts `swiftopt serve` on a new SQLite file with 100 layer sets. Requests are sent as fast as a few connections
    can, then at 100 a second. At the constant rate each request has its time, even if the one before is unanswered, so
    a stall counts for all requests that it delays. Both parts are repeated with the address of a Redis that is down.
    """
    # Garbage collection in this client would add to the measured latency.
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        database = str(Path(folder) / "lookups.db")
        with Store.open(database) as store:
            for number in range(N_SETS):
                layer_set = LayerSet(32, frozenset({1 + number % 20, 25}), frozenset({7}))
                store.add_layer_set(LayerSetRecord("org/model-7b", f"task{number}", layer_set))
        by_cache = {"no Redis": lookup_times(database, (), seconds)}
        by_cache["Redis down"] = lookup_times(database, ("--redis", NOWHERE), seconds)
    for name, row in by_cache.items():
        click.echo("  ".join([f"{name:<11}", *(f"{key} {value}" for key, value in row.items())]))
    return {"schema": "swiftopt.bench-lookups/1", "cores": os.cpu_count(), "results": by_cache}


def lookup_times(database: str, options: Sequence[str], seconds: float) -> dict[str, Any]:
    """Start a server and measure its highest rate of lookups, and their latency at a constant rate."""
    environment = {name: value for name, value in os.environ.items() if name != "SWIFTOPT_REDIS_URL"}
    command = [sys.executable, "-m", "swiftopt", "serve", "--port", "0", "--json", "--db", database, *options]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        port = int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
        try:
            asyncio.run(flat_out(port, 1.0))  # One second of warm-up.
            per_second = asyncio.run(flat_out(port, seconds))
            latencies_ms = asyncio.run(steady(port, seconds))
        finally:
            process.terminate()
    percentiles = {
        f"p{percent}_ms": round(latencies_ms[int(len(latencies_ms) * percent / 100)], 2) for percent in (50, 90, 99)
    }
    return {
        "per_second": round(per_second),
        **percentiles,
        "longest_ms": round(latencies_ms[-1], 2),
        "n": len(latencies_ms),
    }


class Connection:
    """A minimal HTTP client with one connection, whose own time hardly counts."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = asyncio.Lock()
        self._reader_and_writer: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def look_up(self, number: int) -> None:
        """Request a layer set and read the whole response.

        Raises: RuntimeError: the status is not 200.
        """
        path = f"/v1/layer-sets/org%2Fmodel-7b/task{number % N_SETS}"
        async with self._lock:
            if self._reader_and_writer is None:
                self._reader_and_writer = await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = self._reader_and_writer
            writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            await reader.readexactly(length)
            if " 200 " not in head.split("\r\n")[0]:
                raise RuntimeError(f"the response to {path} is {head.splitlines()[0]}")


async def flat_out(port: int, seconds: float) -> float:
    """Return requests per second over `N_CONNECTIONS`, each of which sends again as soon as it has its response."""
    started_s = perf_counter()

    async def look_up_until_end(connection: Connection, first_number: int) -> int:
        number = first_number
        while perf_counter() - started_s < seconds:
            await connection.look_up(number)
            number += 1
        return number - first_number

    counts = await asyncio.gather(*(look_up_until_end(Connection(port), 13 * i) for i in range(N_CONNECTIONS)))
    return sum(counts) / (perf_counter() - started_s)


async def steady(port: int, seconds: float) -> list[float]:
    """Return the latencies in ms, ascending, each from the scheduled time of sending to the complete response."""
    connections = [Connection(port) for _ in range(N_CONNECTIONS)]

    async def look_up_at(number: int, due_s: float) -> float:
        await connections[number % N_CONNECTIONS].look_up(number)
        return 1e3 * (perf_counter() - due_s)

    started_s, tasks = perf_counter(), []
    for number in range(int(seconds * LOOKUP_RATE)):
        due_s = started_s + number / LOOKUP_RATE
        await asyncio.sleep(max(0.0, due_s - perf_counter()))
        tasks.append(asyncio.create_task(look_up_at(number, due_s)))
    return sorted(await asyncio.gather(*tasks))


if __name__ == "__main__":
    try:
        measured(main)
    except SwiftoptError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
