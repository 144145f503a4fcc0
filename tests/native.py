"""What tests of our kernels share: the library at each level this processor can run, and one linear map called by hand.

The libraries come from the user's own cache, for a compiler takes some ten seconds for each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from fakes import cheap_draft_costs
from families import VOCAB, tiny_runtime
from mtp_files import with_layer
from torch import Tensor
from wings import is_here

from swiftopt.core.layer_sets import LayerSet
from swiftopt.decoding.methods import Resources
from swiftopt.models.coded import CodedLinear
from swiftopt.models.kernels import build, calls
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


def native_runtime(family: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changed: Any) -> Runtime:
    """A random tiny model whose passes our kernels compute."""
    library()
    runtime = tiny_runtime(family, dtype, seed, **changed)
    at_speed(runtime, "exact")
    assert runtime.native is not None
    return runtime


def quick_runtime(family: str, seed: int = 0, **changed: Any) -> Runtime:
    """A random tiny model for laws that take many passes: on our kernels, or on torch in float64 where there are none.

    Drafts change no token of either; our kernels take a tenth of the time.
    """
    runtime = tiny_runtime(family, torch.float32, seed, **changed)
    at_speed(runtime, "auto")
    return runtime if runtime.exact else tiny_runtime(family, seed=seed, **changed)


@cache
def native(family: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Runtime:
    return native_runtime(family, dtype, seed)


def words(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(n)]


@cache
def parts(family: str, with_model: bool = False) -> Resources:
    """What methods are made of; what papers' methods need where these are here."""
    runtime, learned = with_layer(native(family)), dict[str, Any]()
    if is_here("papers"):
        from swiftopt.papers.early_exit import Heads, Probe

        width, generator = runtime.config.hidden_size, torch.Generator().manual_seed(3)
        learned["heads"] = Heads({depth: torch.eye(width, dtype=runtime.dtype) * 3 for depth in (1, 2)})
        learned["probe"] = Probe(1, torch.randn(width, generator=generator), 0.5)
    draft = native(family, seed=1) if with_model else None
    return Resources(runtime, LayerSet(4, frozenset({1}), frozenset({2})), learned, draft, cheap_draft_costs())


def repeating(seed: int) -> list[int]:
    """Words that repeat, so that looking them up finds something."""
    return words(seed, 6) * 3


def linear(
    kernels: build.Kernels,
    x: Tensor,
    weight: Tensor | QuantisedLinear | CodedLinear,
    bias: Tensor | None = None,
    n_threads: int = 1,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """(rows, n_in) by (n_out, n_in); `rows`: those of `x` that are wanted."""
    index = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    return calls.linear(kernels, calls.map_of(weight, bias), x.contiguous(), index, n_threads=n_threads)
