"""Copies numbers to and from a device without waiting for its earlier work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


def fetched(values: Tensor) -> Callable[[], Any]:
    """Start copying values to the CPU; return a function that waits for this copy only and returns them as a list."""
    here = values.to("cpu", non_blocking=True)  # Torch copies from a GPU to pinned memory.
    if values.device.type != "cuda":
        return here.tolist
    moved = cast(Any, torch.cuda.Event)()
    moved.record(torch.cuda.current_stream(values.device))

    def wait() -> Any:
        moved.synchronize()
        return here.tolist()

    return wait


def uploaded(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for the device's earlier work."""
    tensor = torch.as_tensor(values).to(dtype)
    if device.type == "cpu" or tensor.device == device:
        return tensor
    if tensor.device.type == "cpu" and torch.cuda.is_available():  # Only CPU memory can be pinned.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
