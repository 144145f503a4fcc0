"""Interfaces of the two ways to run passes without launching torch's operations one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..core.costs import ExpertCounts
from .coded_slots import SlotCoding
from .rows import HeadRows, Pass

if TYPE_CHECKING:
    from .kernels.build import Kernels


class CapturedPasses(Protocol):
    """Interface of passes captured as CUDA graphs; implemented in `models.graphs`."""

    n_first: int

    def forward(self, passes: Sequence[Pass]) -> list[Tensor] | None: ...

    def forget(self) -> None: ...


class KernelPasses(Protocol):
    """Interface of passes computed by our C++ kernels; implemented in `models.kernels.native`."""

    level: str
    kernels: Kernels
    library: str  # The library's file name, which contains a digest of its sources.

    def run_layers(
        self,
        hidden: Tensor,
        passes: Sequence[Pass],
        first: int,
        last: int,
        read: HeadRows | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor | None: ...

    def join(self, embedded: Tensor, of_tokens: Tensor) -> Tensor: ...

    def logits(
        self, hidden: Tensor, name: str | None = None, index: Tensor | None = None, normed: bool = True
    ) -> Tensor: ...

    def mapped(self, x: Tensor, module: Any) -> Tensor: ...

    def likeliest(self, logits: Tensor) -> tuple[list[int], list[float]]: ...

    def best(self, logits: Tensor) -> Tensor: ...

    def taken_experts(self) -> ExpertCounts | None: ...

    def slot_coding(self, capacity: int) -> SlotCoding | None: ...

    def forget(self) -> None: ...
