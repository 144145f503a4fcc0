"""An embedding whose table stays in its file, of which only the rows of the tokens at hand are read.

Gemma 4's embedding by layer is more than half of a small model's weights, and a pass reads one row of it per token. The
file is mapped: the system keeps in memory what was read, as long as nobody else needs that memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .families import family_of

MAPPED = (".safetensors", ".gguf")  # Endings of files that are mapped.
RowReader = Callable[[Tensor], Tensor]  # From numbers of rows, int64 (n,), to the rows (n, width).


class MappedEmbedding(nn.Module):
    """An embedding (n_rows, width) that has no parameter: `read` gives rows of its table from the mapped file.

    Rows are rounded to `dtype` and multiplied by `scale`, as transformers' embeddings of these families do.
    """

    embed_scale: Tensor | None

    def __init__(
        self, read: RowReader, n_rows: int, width: int, dtype: torch.dtype, scale: Tensor | None = None
    ) -> None:
        super().__init__()
        self.read, self.n_rows, self.width, self.dtype = read, n_rows, width, dtype
        self.register_buffer("embed_scale", scale, persistent=False)

    @property
    def n_values(self) -> int:
        return self.n_rows * self.width

    def forward(self, token_ids: Tensor) -> Tensor:
        numbers = token_ids.flatten().long()
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.n_rows:
            raise IndexError(f"an embedding has {self.n_rows} rows")
        rows = self.read(numbers).to(self.dtype).view(*token_ids.shape, self.width)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(self.dtype)


def mapped_table(config: Any, paths: Iterable[Path]) -> str | None:
    """Return the name of the embedding by layer that stays in a model's files on a CPU.

    None: the model has none, or its files are those of torch, which cannot be mapped tensor by tensor.
    """
    named = family_of(config).layer_inputs
    is_there = named is not None and named.width(config) > 0
    return named.embed if named and is_there and all(path.suffix in MAPPED for path in paths) else None


def put_mapped(model: Any, name: str, read: RowReader, n_rows: int, dtype: torch.dtype) -> None:
    """Replace a model's embedding, which may have no memory, by one whose table is mapped."""
    old = model.get_submodule(name)
    scale = getattr(old, "embed_scale", None)
    model.set_submodule(name, MappedEmbedding(read, n_rows, old.embedding_dim, dtype, scale))


def mapped_in(model: nn.Module) -> Iterator[MappedEmbedding]:
    yield from (module for module in model.modules() if isinstance(module, MappedEmbedding))


def count_values(model: nn.Module) -> int:
    """Return how many parameters a model has, with those of tables that are mapped."""
    return sum(one.numel() for one in model.parameters()) + sum(one.n_values for one in mapped_in(model))
