"""An embedding by layer stays in its file: the model's numbers, what is resident after passes, and what is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from converted import write_gguf
from families import VOCAB, tiny_model
from native import library
from packed_files import Packing, packed_folder
from tiny_files import save_adapter, save_words
from transformers import AutoModelForCausalLM

from swiftopt.models.adapters import read_adapter
from swiftopt.models.gguf_model import settings_folder
from swiftopt.models.huge_pages import PAGES
from swiftopt.models.loading import load
from swiftopt.models.mapped_rows import mapped_in
from swiftopt.models.memory import memory_plan
from swiftopt.models.merging import merged_folder
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.models.saved import no_step

IDS = [1, 5, 9, 2, 7, 33, 96]
N_ROWS, WIDTH = 12_000, 192  # Of a table of 18 MB in bfloat16: 4 layers of `WIDTH` values for each row.
LARGE: dict[str, Any] = {"hidden_size_per_layer_input": WIDTH, "vocab_size_per_layer_input": N_ROWS}
MOST = 2 << 20  # Bytes of the table that may be resident: the system maps neighbours of a page that is read.


def folder_of(path: Path, dtype: torch.dtype = torch.bfloat16, **changed: Any) -> tuple[Path, Any]:
    model = tiny_model("gemma4_text", dtype, **changed)
    model.save_pretrained(path)
    return save_words(path), model


def mapped(path: Path) -> tuple[int, int]:
    """Return the bytes that this process maps of a file, and how many of them are in memory."""
    here, n_mapped, n_resident = False, 0, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            here = line.endswith(str(path))
        elif here and line.startswith(("Size:", "Rss:")):
            kilobytes = int(line.split()[1])
            n_mapped += kilobytes << 10 if line.startswith("Size:") else 0
            n_resident += kilobytes << 10 if line.startswith("Rss:") else 0
    return n_mapped, n_resident


@pytest.mark.parametrize("kind", ["safetensors", "GGUF"])
def test_passes_load_only_the_rows_that_they_read(kind: str, tmp_path: Path, new_cache: Path) -> None:
    is_gguf = kind == "GGUF"
    if is_gguf:
        model = tiny_model("gemma4_text", torch.float32, **LARGE)
        path = named = write_gguf(tmp_path / "a.gguf", model, kinds={"per_layer_token_embd.weight": "Q8_0"})
    else:
        named, path = folder_of(tmp_path, **LARGE)[0], tmp_path / "model.safetensors"
    steps = list[str]()
    runtime = load(str(named), device="cpu", on_step=steps.append)
    PAGES.finish()
    runtime.forward(Rows(IDS, 0), runtime.new_buffer(16))
    n_bytes = N_ROWS * 4 * WIDTH * 34 // 32 if is_gguf else 2 * N_ROWS * 4 * WIDTH
    n_mapped, n_resident = mapped(path)
    assert n_mapped >= n_bytes > 4 * MOST and n_resident < MOST
    assert any(step.endswith(f"; {n_bytes / 1e6:.0f} MB of embeddings by layer stay in the file") for step in steps)
    folder = settings_folder(path, no_step) if is_gguf else named
    plan, on_gpu = (memory_plan(folder, "auto", on_cpu=on_cpu) for on_cpu in (True, False))
    assert plan.mapped == n_bytes and plan.weights < n_bytes / 4
    assert on_gpu.mapped == 0 and on_gpu.weights > 2 * N_ROWS * 4 * WIDTH


@pytest.mark.parametrize("stored", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.families)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_have_the_bits_of_a_model_in_memory(stored: torch.dtype, dtype: str, tmp_path: Path) -> None:
    folder, auto = folder_of(tmp_path, stored)[0], cast(Any, AutoModelForCausalLM)
    runtime = load(str(folder), dtype, "cpu", speed="eager")
    model = auto.from_pretrained(folder, dtype=dtype).eval().requires_grad_(False)
    whole = Runtime(model, None, runtime.info)
    found, expected = (one.forward(Rows(IDS, 0), one.new_buffer(16)) for one in (runtime, whole))
    assert torch.equal(found, expected) and found.dtype == getattr(torch, dtype)
    assert runtime.info.n_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert runtime.config.vocab_size_per_layer_input == VOCAB


def test_drafts_and_concurrent_rows_have_the_same_bits(tmp_path: Path) -> None:
    library()
    runtime = load(str(folder_of(tmp_path)[0]), "bfloat16", "cpu", speed="exact")
    together = runtime.forward(Rows(IDS, 0), runtime.new_buffer(16))
    buffer = runtime.new_buffer(16)
    alone = torch.cat([runtime.forward(Rows([token], i), buffer) for i, token in enumerate(IDS)])
    assert torch.equal(together.view(torch.int16), alone.view(torch.int16))


def test_quantised_checkpoint_leaves_the_embedding_in_the_file(tmp_path: Path) -> None:
    packed_folder(tmp_path, "gemma4_text", Packing("gptq", 4, 32))
    runtime = load(str(tmp_path), "bfloat16", "cpu")
    assert [one.n_rows for one in mapped_in(runtime.hf_model)] == [VOCAB]
    assert memory_plan(tmp_path, "bfloat16", on_cpu=True).mapped == 2 * VOCAB * 48


def test_merged_adapter_leaves_the_embedding_in_the_file(tmp_path: Path, new_cache: Path) -> None:
    base, model = folder_of(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, model, "q_proj", "per_layer_projection")
    wide = load(str(adapter), "float32", "cpu", speed="eager")
    assert [one.dtype for one in mapped_in(wide.hf_model)] == [torch.float32]
    runtime = load(str(adapter), device="cpu", speed="eager")
    whole = load(str(merged_folder(read_adapter(adapter, str(base)), base)), device="cpu", speed="eager")
    found, expected = (one.forward(Rows(IDS, 0), one.new_buffer(16)) for one in (runtime, whole))
    assert torch.equal(found, expected)


def test_missing_row_is_an_error(tmp_path: Path) -> None:
    (embedding,) = mapped_in(load(str(folder_of(tmp_path)[0]), device="cpu", speed="eager").hf_model)
    for token in (-1, VOCAB):
        with pytest.raises(IndexError, match=f"has {VOCAB} rows"):
            embedding(torch.tensor([0, token]))
