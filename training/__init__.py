"""Training on a frozen model: heads at intermediate layers, and a probe that predicts acceptance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Public name -> module, loaded on first use: the front doors read the settings without torch.
_EXPORTS = {"train_heads": "heads", "train_probe": "probe"}

__all__ = ["train_heads", "train_probe"]

if TYPE_CHECKING:
    from .heads import train_heads
    from .probe import train_probe


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
