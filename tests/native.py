"""What tests of our kernels share: the library at each level this processor can run, and one linear map called by hand.

The libraries come from the user's own cache, for a compiler takes some ten seconds for each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from families import tiny_runtime
from torch import Tensor

from swiftopt.models.kernels import build, layout
from swiftopt.models.loading import at_speed
from swiftopt.models.quantised import QuantisedLinear
from swiftopt.models.runtime import Runtime

LEVELS = [name for name, level in build.LEVELS.items() if level.needs <= build.processor_flags()]


@cache
def library(level: str | None = None) -> build.Kernels:
    """The library at a level, or at the best one; in this process `build.kernels` answers with it from then on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SWIFTOPT_CACHE_DIR", raising=False)
        patch.delenv(build.FORCED, raising=False)
        found = build.kernels() if level is None else build.kernels(level)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def native_runtime(family: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Runtime:
    """A random tiny model whose passes our kernels compute."""
    library()
    runtime = tiny_runtime(family, dtype, seed)
    at_speed(runtime, "native")
    assert runtime.native is not None
    return runtime


def linear(
    kernels: build.Kernels,
    x: Tensor,
    weight: Tensor | QuantisedLinear,
    bias: Tensor | None = None,
    n_threads: int = 1,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """(rows, n_in) by (n_out, n_in), as a pass of one LOGITS step; `rows`: those of `x` that are wanted."""
    x = x.contiguous()
    bias_at = None if bias is None else bias.data_ptr()
    if isinstance(weight, QuantisedLinear):
        codes, scales, group = weight.codes.data_ptr(), weight.scales.data_ptr(), weight.group or 0
        one = layout.Map(codes, bias_at, scales, 0, weight.n_in, weight.n_out, weight.bits, group)
    else:
        n_out, n_in = weight.shape
        one = layout.Map(weight.data_ptr(), bias_at, None, weight.stride(0), n_in, n_out, 0, 0)
    index = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    n = len(x) if rows is None else len(rows)
    listed = layout.RowList(None if index is None else index.data_ptr(), n)
    out = torch.full((n, one.n_out), 7e7, dtype=x.dtype)
    steps = (layout.Step * 1)(layout.Step(ctypes.addressof(one), layout.LOGITS, 0, 0, 0, -1, 0))
    call = layout.Pass(
        hidden=x.data_ptr(),
        lists=(layout.RowList * 1)(listed),
        logits=out.data_ptr(),
        n_rows=len(x),
        n_hidden=one.n_in,
        n_threads=n_threads,
        is_bf16=x.dtype == torch.bfloat16,
    )
    assert kernels.run(ctypes.byref(call), steps, 1) == 0
    return out
