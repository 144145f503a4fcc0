"""An embedding whose table stays in its file; a pass reads only the rows of its tokens.

Gemma 4's embedding by layer is more than half of a small model's weights, and a pass reads one row of it per token. The
file is memory-mapped, so the system caches the rows that were read as long as the memory is not needed otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .families import family_of

MAPPED = (".safetensors", ".gguf")  # Suffixes of files that can be mapped.
RowReader = Callable[[Tensor], Tensor]  # Indices of rows, int64 (n,) -> the rows (n, width).


class MappedEmbedding(nn.Module):
    """An embedding (n_rows, width) without a parameter; `read` returns rows of its table from the mapped file.

    Rows are rounded to `dtype` and multiplied by `scale`, as in transformers' embeddings of these families.
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
    """Return the name of the embedding by layer that stays in the model's files; None: there is none.

    Files in torch's format cannot be mapped by tensor.
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
    """Return a model's number of weights, mapped tables included."""
    n_mapped = sum(embedding.n_values for embedding in mapped_in(model))
    return sum(parameter.numel() for parameter in model.parameters()) + n_mapped
