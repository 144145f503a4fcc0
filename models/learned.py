"""What is trained on a frozen model: light heads at intermediate layers, and a probe that predicts acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .runtime import Runtime


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """Light heads: at depth l (layers run), the head's weights E* · T with T (hidden, hidden) of that depth.

    DEVIATION: the final norm is applied to the state before T, which AdaDecode 2.1 does not say; T = identity is then
    the model's own head read early, the paper's ablation, and training starts from there.
    """

    transforms: Mapping[int, Tensor]  # depth -> (hidden_size, hidden_size), in the model's dtype
    full: bool = False  # the tensors are whole heads (vocab, hidden_size) instead (Table 3, full-parameterized)

    @property
    def depths(self) -> tuple[int, ...]:
        """Where a token can be predicted early, shallowest first."""
        return tuple(sorted(self.transforms))

    @property
    def n_parameters(self) -> int:
        """Parameters in addition to the model's."""
        return sum(transform.numel() for transform in self.transforms.values())

    @property
    def n_bytes(self) -> int:
        """Memory in addition to the model's."""
        return sum(transform.numel() * transform.element_size() for transform in self.transforms.values())

    def logits(self, runtime: Runtime, depth: int, hidden: Tensor) -> Tensor:
        """Logits (rows, vocab) of states (rows, hidden_size) after `depth` layers."""
        normed = runtime.normed(hidden)
        transform = self.transforms[depth]
        if self.full:
            return torch.nn.functional.linear(normed, transform)
        return runtime.head(torch.nn.functional.linear(normed, transform))


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A linear probe: the probability σ(v · h + b) that the token read from the state h at `depth` is accepted.

    Source: AdaSPEED II.B. `direction` is float32 (hidden_size,).
    """

    depth: int
    direction: Tensor
    bias: float

    @property
    def n_parameters(self) -> int:
        """Parameters in addition to the model's."""
        return self.direction.numel() + 1

    @property
    def n_bytes(self) -> int:
        """Memory in addition to the model's."""
        return self.direction.numel() * self.direction.element_size() + 4

    def acceptance(self, hidden: Tensor) -> float:
        """Of a state (1, hidden_size)."""
        return float(torch.sigmoid(hidden[-1].float() @ self.direction.to(hidden.device) + self.bias))
