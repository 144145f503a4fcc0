"""A preallocated key/value buffer per request, shared by draft and target; its contents are never cloned."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import psutil
import torch
from torch import Tensor

MOST_VIEWS = 8  # Cached views of a buffer, one per range of slots; the cache is cleared when full.
CONTAINER = Path("/sys/fs/cgroup")  # Folder of the container's memory limit and usage files (cgroup v2).


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device; on the CPU within the container's limit."""
    if device.type == "cuda":
        # Memory that torch has reserved and can use again.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((CONTAINER / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        kept = dict(line.split() for line in (CONTAINER / "memory.stat").read_text(encoding="ascii").splitlines())
        return min(free, max(0, limit - used + int(kept["inactive_file"])))
    except (OSError, ValueError, KeyError):  # There is no limit, or its files cannot be read.
        return free


class KVBuffer:
    """Keys and values of every layer by slot.

    Slot i holds position i of the committed text. Behind the committed slots a draft writes its chain, the target
    overwrites it when it verifies, and candidate evaluation writes scratch rows that the next pass overwrites.
    Layers on one device share one block of shape (2, layers, kv_heads, capacity, head_dim), so that moving a row
    is one copy per device. Zero-filled: a masked slot that was never written must not hold a NaN.
    """

    def __init__(
        self, devices: Sequence[torch.device], kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype
    ) -> None:
        self.capacity = capacity
        self._blocks: dict[torch.device, Tensor] = {}
        self.keys: list[Tensor] = []  # One tensor (kv_heads, capacity, head_dim) per layer.
        self.values: list[Tensor] = []
        self._views: dict[tuple[int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        for device in dict.fromkeys(devices):
            shape = (2, sum(d == device for d in devices), kv_heads, capacity, head_dim)
            self._blocks[device] = torch.zeros(shape, dtype=dtype, device=device)
        taken = dict.fromkeys(devices, 0)
        for device in devices:
            block = self._blocks[device]
            self.keys.append(block[0, taken[device]])
            self.values.append(block[1, taken[device]])
            taken[device] += 1

    def between(self, start: int, end: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Views of the keys and the values at slots start … end - 1, per layer (kv_heads, end - start, head_dim).

        The views of all layers are created together and cached: creating them one by one takes several times as long.
        """
        views = self._views.get((start, end))
        if views is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            per_device = {
                device: zip(*(part.unbind() for part in block[:, :, :, start:end].unbind()), strict=True)
                for device, block in self._blocks.items()
            }
            keys, values = zip(*(next(per_device[part.device]) for part in self.keys), strict=True)
            views = self._views[start, end] = keys, values
        return views

    def address(self, device: torch.device) -> int:
        return self._blocks[device].data_ptr()

    @cached_property
    def addresses(self) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p]]:
        """Memory addresses of each layer's keys and values."""
        pointers = ctypes.c_void_p * len(self.keys)
        return pointers(*(part.data_ptr() for part in self.keys)), pointers(*(part.data_ptr() for part in self.values))

    def copy_from(self, other: KVBuffer, n: int) -> None:
        for device, block in self._blocks.items():
            block[:, :, :, :n] = other._blocks[device][:, :, :, :n]

    def move(self, source: int | Tensor, target: int) -> None:
        """Copy a slot's keys and values of all layers to another slot; several, int64 (n,), to consecutive ones."""
        for device, block in self._blocks.items():
            if isinstance(source, int):
                block[:, :, :, target] = block[:, :, :, source]
            else:
                block[:, :, :, target : target + len(source)] = block.index_select(3, source.to(device))
