"""What tests of the Triton kernels share: a CUDA device where there is one, else Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swiftopt.models.buffer import KVBuffer
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if PLACE.type == "cuda" else torch.float16  # The interpreter multiplies no bfloat16.
DTYPES = [torch.float32, HALF]
CLOSE = {torch.float32: 1e-4, HALF: 3e-2}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(PLACE, dtype)


def here(runtime: Runtime) -> Runtime:
    return Runtime(runtime.hf_model.to(PLACE), None, runtime.info)


def in_steps_and_in_a_tree(
    runtime: Runtime, prompt: Sequence[int], chain: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, KVBuffer]:
    """A prompt's logits, those of a chain step by step, those of the chain's rows in one pass, and that pass's buffer.

    In the pass each row of the chain has a row of another branch after it.
    """
    one, tree = runtime.new_buffer(64), runtime.new_buffer(64)
    prefilled = runtime.prefill(prompt, one)
    first = len(prompt)
    steps = [runtime.forward(Rows([token], first + i), one)[0] for i, token in enumerate(chain)]
    runtime.prefill(prompt, tree)
    tokens = [token for link in chain for token in (link, 1)]
    seen = torch.zeros((len(tokens), first + len(tokens)), dtype=torch.bool)
    seen[:, :first] = True
    for row in range(len(tokens)):
        seen[row, [first + i for i in range(0, row, 2)] + [first + row]] = True
    positions = [first + (row + 1) // 2 for row in range(len(tokens))]
    rows = runtime.forward(Rows(tokens, first, positions, seen), tree)
    return prefilled, steps, rows[::2], tree


def seen_by(parents: Sequence[int], first: int, n_read: int | None = None) -> torch.Tensor:
    """Return which slots the rows of a tree see, given their parents (-1: the text)."""
    seen = torch.zeros((len(parents), first + len(parents)), dtype=torch.bool)
    seen[:, : first if n_read is None else n_read] = True
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] |= seen[parent]
        seen[row, first + row] = True
    return seen


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=CLOSE[dtype], atol=CLOSE[dtype] * 3)
