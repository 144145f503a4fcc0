"""What tests of our kernels share: the library at each level this processor can run, and one linear map called by hand.

The libraries come from the user's own cache, for a compiler takes some ten seconds for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from families import tiny_runtime
from torch import Tensor

from swiftopt.models.kernels import build, native
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
    """(rows, n_in) by (n_out, n_in); `rows`: those of `x` that are wanted."""
    index = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    return native.linear(kernels, native.map_of(weight, bias), x.contiguous(), index, n_threads=n_threads)
