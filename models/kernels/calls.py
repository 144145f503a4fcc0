"""Calls the kernels' library (`pass.cpp`) with torch's tensors: runs steps or a linear map, or finds likely tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.errors import SettingsError
from ...core.settings import THREADS
from ..coded import CodedLinear
from ..quantised import QuantisedLinear
from . import layout
from .build import Kernels


def map_of(weight: Tensor | QuantisedLinear | CodedLinear, bias: Tensor | None = None) -> layout.Map:
    """Describe a linear map with contiguous weights (n_out, n_in) or with packed codes."""
    bias_at = None if bias is None else bias.data_ptr()
    if isinstance(weight, CodedLinear):
        return weight.map(bias)
    if isinstance(weight, QuantisedLinear):
        assert weight.group is not None  # Packed weights have a group size.
        form = weight.n_in, weight.n_out, weight.bits, weight.group, layout.ZERO_VALUES
        return layout.Map(weight.codes.data_ptr(), bias_at, weight.scales.data_ptr(), None, 0, *form)
    n_out, n_in = weight.shape
    return layout.Map(weight.data_ptr(), bias_at, None, None, weight.stride(0), n_in, n_out, 0, 0, 0)


def linear(
    kernels: Kernels,
    map_: layout.Map,
    x: Tensor,
    index: Tensor | None = None,
    norm: layout.Norm | None = None,
    n_threads: int | None = None,
) -> Tensor:
    """Apply an optional norm and a linear map to `x` (rows, n_in), or to its rows at `index` (int32)."""
    out = torch.empty((x.shape[0] if index is None else len(index), map_.n_out), dtype=x.dtype)
    step = (layout.Step * 1)(layout.Step(ctypes.addressof(map_), layout.LOGITS, 0, 0, 0, -1, 0))
    call = layout.Call(logits=out.data_ptr(), norm=None if norm is None else ctypes.pointer(norm))
    run(kernels, call, x, step, [index], n_threads)
    return out


def run(
    kernels: Kernels,
    call: layout.Call,
    hidden: Tensor,
    steps: ctypes.Array[layout.Step],
    indices: Sequence[Tensor | None],
    n_threads: int | None = None,
) -> None:
    """Run steps on `hidden` (rows, hidden_size), in place.

    Args:   indices: the rows of each row list, int32 in ascending order (None: all rows).
    Raises: MemoryError: the pass needs more memory than there is. SettingsError: no further thread could be started.
    """
    if not hidden.is_contiguous():
        raise ValueError("the states of a pass must be contiguous")
    n = hidden.shape[0]
    lists = (layout.RowList * len(indices))(
        *(layout.RowList(None, n) if i is None else layout.RowList(i.data_ptr(), len(i)) for i in indices)
    )
    call.hidden, call.lists = hidden.data_ptr(), lists
    call.n_rows, call.n_hidden, call.n_lists = n, hidden.shape[1], len(indices)
    call.n_threads = n_threads or torch.get_num_threads()
    call.is_bf16 = hidden.dtype == torch.bfloat16
    failure = kernels.run(ctypes.byref(call), steps, len(steps))
    if failure == 1:
        raise MemoryError(f"a pass over {n} rows needs more memory than there is")
    if failure:
        raise SettingsError(f"no further thread could be started: lower {THREADS}")


def likeliest(kernels: Kernels, logits: Tensor) -> tuple[list[int], list[float]]:
    """Return the most probable token of each row of `logits` (rows, vocab), and its log probability."""
    token_ids, logprobs = (ctypes.c_int64 * len(logits))(), (ctypes.c_double * len(logits))()
    write_likeliest(kernels, logits, token_ids, logprobs)
    return list(token_ids), list(logprobs)


def write_likeliest(kernels: Kernels, logits: Tensor, token_ids: Any, logprobs: Any) -> None:
    """Write the most probable token of each row to int64 (rows,), and log probabilities to float64 (rows,) or None."""
    logits = logits.contiguous()
    kernels.likeliest(logits.data_ptr(), logits.dtype == torch.bfloat16, *logits.shape, token_ids, logprobs)
