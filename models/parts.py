"""Checks that a runtime computes all of a model: each module must be used, contain used modules, or do nothing.

A runtime computes only what its family's row names. Any other parameter, norm or hook would change the text that
transformers generates, but not swiftopt's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..core.errors import UnsupportedModel

IDLE = (nn.Identity, nn.Dropout)  # Modules that do nothing in evaluation mode.
ADVICE = "swiftopt would leave it out and give other text: use transformers' own generate, or a model without it"


def refuse_unnamed(model: nn.Module, parts: Iterable[Any], tensors: Iterable[Any] = ()) -> None:
    """Refuse a model with a module, parameter, buffer or hook outside of the parts that a runtime uses.

    Args:   parts: the modules that the runtime calls; each may be None, and includes its submodules. tensors: those
            that the runtime reads itself.
    Raises: UnsupportedModel: it has one.
    """
    read = {id(tensor) for tensor in tensors}
    called = {module for part in parts if isinstance(part, nn.Module) for module in part.modules()}
    for name, module in model.named_modules():
        if module in called:
            continue
        kind = f"{type(module).__name__} at {name or 'its root'}"
        for tensor in (name for name in _stored(module) if id(getattr(module, name)) not in read):
            raise UnsupportedModel(f"the {kind} has a {tensor} that belongs to no known part of the model: {ADVICE}")
        if next(module.children(), None) is None and not isinstance(module, (*IDLE, nn.ModuleList)):
            raise UnsupportedModel(f"the {kind} is no known part of the model: {ADVICE}")
        if module._forward_hooks or module._forward_pre_hooks:
            raise UnsupportedModel(f"the {kind} has a hook: {ADVICE}")
        if not _is_original(module):
            raise UnsupportedModel(f"the {kind} has its own forward: {ADVICE}")


def _stored(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters and persistent buffers."""
    buffers = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
    tensors = {**module._parameters, **module._buffers}
    return [name for name in (*module._parameters, *buffers) if tensors[name] is not None]


def _is_original(module: nn.Module) -> bool:
    """Tell whether a module runs its transformers or torch class's own forward, possibly compiled or dispatched."""
    libraries = ("transformers", "torch", __name__.partition(".")[0])  # Our own modules are those of `skeleton`.
    if type(module).forward.__module__.partition(".")[0] not in libraries:
        return False
    forward = vars(module).get("forward")
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    by_accelerate = type(getattr(module, "_hf_hook", None)).__module__.partition(".")[0] == "accelerate"
    return forward is None or by_accelerate or getattr(forward, "__func__", None) is type(module).forward
