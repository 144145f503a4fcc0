"""The residual stream: sub-layers read its norm and add their outputs to it."""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor


@runtime_checkable
class AddingNorm(Protocol):
    """A norm whose kernel also computes the addition before it."""

    def after(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of two tensors (rows, n), and the norm of the sum."""
        ...


def normed(norm: Any, states: Tensor) -> Tensor:
    """Return the norm of states (rows, n), or the states themselves where a sub-layer has no norm before it."""
    return states if norm is None else cast(Tensor, norm(states))


class Residual:
    """The residual stream (rows, hidden_size) of some rows. The kernel of the next norm may compute its last addition.

    Args: added: the output of the last sub-layer, not yet added to `states`.
    """

    def __init__(self, states: Tensor, added: Tensor | None = None) -> None:
        self._states, self._added = states, added

    def whole(self) -> Tensor:
        if self._added is not None:
            self._states, self._added = self._states + self._added, None
        return self._states

    def normed(self, norm: Any, index: Tensor | None = None) -> Tensor:
        """Return the norm of all rows, or of those that `index` names."""
        if self._added is None or index is not None or not isinstance(norm, AddingNorm):
            return normed(norm, self.whole() if index is None else self.whole()[index])
        self._states, states_normed = norm.after(self._states, self._added)
        self._added = None
        return states_normed

    def plus(self, added: Tensor, index: Tensor | None = None) -> Residual:
        """Return the stream after a sub-layer added to all rows, or to those that `index` names."""
        return Residual(self.whole(), added) if index is None else Residual(self.whole().index_add(0, index, added))
