"""Laws of the Triton kernel for gated short convolutions: it agrees with torch, and bits do not depend on splits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from families import tiny_runtime
from on_device import HALF, PLACE, close, drawn, here, seen_by

from swiftopt.core.layer_sets import LayerSet
from swiftopt.models.blocks import Block
from swiftopt.models.buffer import KVBuffer
from swiftopt.models.rows import BufferPlan, PassPlan, Rows
from swiftopt.models.runtime import Runtime

pytest.importorskip("triton")

TREE = [-1, 0, 0, 2, -1]
N_TEXT, N_ROWS = 4, len(TREE)
# With a bias, and with more taps than the text has tokens.
each_variant = pytest.mark.parametrize("variant", ["lfm2", "lfm2:longer"])


def made(variant: str, dtype: torch.dtype) -> tuple[Runtime, Block]:
    runtime = here(tiny_runtime(variant, dtype))
    return runtime, next(block for block in runtime.blocks if not block.has_attention)


def convolved(runtime: Runtime, block: Block, buffer: KVBuffer, rows: Rows, projected: torch.Tensor) -> torch.Tensor:
    plan = PassPlan(runtime, rows, buffer)
    return BufferPlan().rows(block, [(plan, plan.every)]).convolution(block, block.parts.conv, projected)


def tree(first: int, parents: Sequence[int]) -> Rows:
    seen = seen_by(parents, first)
    return Rows([0] * len(parents), first, seen.sum(dim=1).sub(1).tolist(), seen)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_rows_and_slots_are_torchs(variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text, a tree after it, and rows of two layer sets, of which only the second runs the convolution."""
    runtime, block = made(variant, dtype)
    projected, found = drawn(N_TEXT + N_ROWS + 4, 3 * 32, dtype=dtype), list[list[torch.Tensor]]()
    for places in ((), (PLACE.type,)):
        monkeypatch.setattr("swiftopt.models.kernels.device.PLACES", places)
        buffer = runtime.new_buffer(32)
        outs = [convolved(runtime, block, buffer, Rows([0] * N_TEXT, 0), projected[:N_TEXT])]
        end = N_TEXT + N_ROWS
        outs.append(convolved(runtime, block, buffer, tree(N_TEXT, TREE), projected[N_TEXT:end]))
        sets = (LayerSet(4, skip_attn=frozenset({block.index})), LayerSet(4))
        seen = seen_by([-1, 0, -1, 2], N_TEXT)
        rows = Rows([0] * 4, N_TEXT, [N_TEXT, N_TEXT + 1] * 2, seen, sets)
        plan = PassPlan(runtime, rows, buffer)
        kept = BufferPlan().rows(block, [(plan, frozenset({1}))])
        outs.append(kept.convolution(block, block.parts.conv, projected[end : end + 2]))
        found.append([*outs, buffer.keys[block.index]])
    for by_torch, by_kernel in zip(*found, strict=True):
        close(by_kernel, by_torch, dtype)


@each_variant
def test_bits_do_not_depend_on_how_a_text_is_cut_nor_on_other_rows(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is read at once, in pieces, row by row, and as a path of a tree whose other branch is rejected."""
    monkeypatch.setattr("swiftopt.models.kernels.device.PLACES", (PLACE.type,))
    runtime, block = made(variant, HALF)
    projected, other = (drawn(8, 3 * 32, seed=seed, dtype=HALF) for seed in (0, 1))
    found = dict[str, tuple[torch.Tensor, torch.Tensor]]()
    for name, n_rows in {"whole": 8, "in pieces": 3, "row by row": 1}.items():
        buffer, outs = runtime.new_buffer(32), list[torch.Tensor]()
        for start in range(0, 8, n_rows):
            rows = projected[start : start + n_rows]
            outs.append(convolved(runtime, block, buffer, Rows([0] * len(rows), start), rows))
        found[name] = torch.cat(outs), buffer.keys[block.index][0, :8].clone()
    buffer, outs = runtime.new_buffer(32), list[torch.Tensor]()
    for start in (0, 4):  # Rows by turns of the text and of a branch that is rejected.
        rows = torch.stack([part[start + i] for i in range(4) for part in (projected, other)])
        outs.append(convolved(runtime, block, buffer, tree(start, [-1, -1, 0, 0, 2, 2, 4, 4]), rows)[::2])
        buffer.move(torch.tensor([start + 2 * i for i in range(4)]), start)
    found["drafted"] = torch.cat(outs), buffer.keys[block.index][0, :8].clone()
    for name, (out, slots) in found.items():
        assert torch.equal(out, found["whole"][0]) and torch.equal(slots, found["whole"][1]), name
