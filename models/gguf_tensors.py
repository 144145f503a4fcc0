"""Slices, joins and de-quantises tensors of a GGUF file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ModelNotFound
from .gguf_reader import TYPES, FileTensor
from .mapped_rows import RowReader

FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
FLOAT32 = next(kind for kind, (name, _, _) in TYPES.items() if name == "F32")


def rows_between(tensor: FileTensor, first: int, last: int, shape: tuple[int, ...]) -> FileTensor:
    """Return rows first … last - 1 of a tensor, as a tensor of a shape."""
    row_bytes = tensor.data.nbytes // tensor.shape[0]
    return replace(tensor, shape=shape, data=tensor.data[first * row_bytes : last * row_bytes])


def taken_rows(tensor: FileTensor, rows: Tensor, path: Path) -> FileTensor:
    """Return a tensor of some rows of another. Raises: ModelNotFound: it has too few rows."""
    if len(tensor.shape) != 2 or int(rows.max()) >= tensor.shape[0]:
        check_shape(path, tensor, (int(rows.max()) + 1, *tensor.shape[1:]), tensor.shape)
    data = tensor.data.reshape(tensor.shape[0], -1)[rows.numpy()].reshape(-1)
    return replace(tensor, shape=(len(rows), *tensor.shape[1:]), data=data)


def halves_of(joint: FileTensor) -> dict[str, FileTensor]:
    """Split a tensor with the gate and up maps of experts into the two."""
    n_experts, n_both, n_in = joint.shape
    halves = joint.data.reshape(n_experts, 2, -1)
    shape = n_experts, n_both // 2, n_in
    parts = (np.ascontiguousarray(halves[:, number]).reshape(-1) for number in range(2))
    return {part: replace(joint, shape=shape, data=data) for part, data in zip(("gate", "up"), parts, strict=True)}


def joined(tensors: list[FileTensor], path: Path) -> FileTensor:
    """Concatenate the rows of tensors; if their types differ, the result is float32."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    for tensor in tensors:
        check_shape(path, tensor, first.shape, tensor.shape)
    if len({tensor.kind for tensor in tensors}) > 1:
        tensors = [
            replace(tensor, kind=FLOAT32, data=numbers(tensor).numpy().reshape(-1).view(np.uint8)) for tensor in tensors
        ]
    data = np.concatenate([tensor.data for tensor in tensors])
    return replace(tensors[0], shape=(len(tensors) * first.shape[0], *first.shape[1:]), data=data)


def row_reader(tensor: FileTensor) -> RowReader:
    """Return a function that reads rows of a tensor from the mapped file and de-quantises them."""
    n_rows, width = tensor.shape
    whole = tensor.data.reshape(n_rows, -1)

    def read(rows: Tensor) -> Tensor:
        return numbers(replace(tensor, shape=(len(rows), width), data=whole[rows.numpy()].reshape(-1)))

    return read


def check_shape(path: Path, tensor: FileTensor, expected: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if shape != expected:
        raise ModelNotFound(
            f"{tensor.name} in {path} has the shape {list(shape)}, and a model of its settings has {list(expected)}"
            " there: download it again"
        )


def numbers(tensor: FileTensor) -> Tensor:
    """De-quantise a tensor to float32."""
    import gguf

    name = tensor.type_name
    if name in FLOATS:
        return torch.from_numpy(tensor.data.view(FLOATS[name]).astype(np.float32).reshape(tensor.shape))
    values = gguf.quants.dequantize(
        tensor.data.reshape(math.prod(tensor.shape[:-1]), -1), gguf.GGMLQuantizationType(tensor.kind)
    )
    return torch.from_numpy(np.ascontiguousarray(values, np.float32).reshape(tensor.shape))
