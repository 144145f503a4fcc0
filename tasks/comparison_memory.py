"""Memory beside the target's own: tensors that a method holds on to, and the buffers that a request needs more of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..decoding.methods import Method
from ..models.runtime import Runtime


def held_bytes(method: Method, runtime: Runtime) -> int:
    """Bytes of tensors that can be reached from the method and are not the target's: heads, stacks, a draft model.

    Quantised copies lie with the target, for all methods to share; they count for each that runs them.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in _of_module(runtime.hf_model)}
    found: dict[int, int] = {}
    seen = {id(runtime), id(runtime.hf_model)}
    for tensor in _tensors(method, seen):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
    copies = 0 if method.layer_set is None else runtime.copies.bytes_of(method.layer_set)
    return sum(found.values()) + copies


def buffer_bytes(method: Method, runtime: Runtime, draft: Runtime | None, n_positions: int, room: int) -> int:
    """Bytes of key/value slots beyond plain decoding's: behind the committed ones, and all of a draft model's.

    Args: n_positions: prompt and completion together; room: tokens of the completion.
    """
    slot = runtime.new_buffer(1).n_bytes
    n_rows = method.drafter.max_rows(room)
    extra = (n_rows - 1) * slot
    if draft is not None:
        extra += (n_positions + n_rows) * draft.new_buffer(1).n_bytes
    return extra


def _of_module(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor under a value: in modules, containers, and attributes of this program's own objects."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from _of_module(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _tensors(item, seen)
    elif type(value).__module__.startswith(__package__.partition(".")[0]):
        for item in _attributes(value):
            yield from _tensors(item, seen)


def _attributes(value: Any) -> list[Any]:
    found = list(getattr(value, "__dict__", {}).values())
    names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return found + [getattr(value, name) for name in dict.fromkeys([*names, *slots]) if hasattr(value, name)]
