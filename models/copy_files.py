"""Files of quantised copies in the cache: one for each model, part, format and kind of processor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .cache import cache_root, replacing

LAYOUT = "1"  # Version in the name of every cached copy; raise it when rounding or packing changes.
LEAST_BYTES = 16 << 20  # Smaller copies are not cached: making them is faster than reading.


def copy_file(
    fingerprint: str, part: str, name: str, dtype: torch.dtype, device: torch.device, packed: bool = False
) -> Path:
    """Return the file of the copy of a part (`attn`, `mlp`, `head`) in a format.

    Torch's layout of codes depends on the processor and on torch's version; that of our kernels (`packed`) does not.
    """
    if packed:
        key = "|".join((LAYOUT, fingerprint, part, name, "packed"))
    else:
        kernel = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else str(torch.version.cuda)
        key = "|".join((LAYOUT, fingerprint, part, name, str(dtype), device.type, kernel, torch.__version__))
    return cache_root() / "quantised" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"


def read_copy(path: Path, device: torch.device, packed: bool = False) -> dict[str, Tensor] | None:
    """Read a copy; None: there is no readable one."""
    try:
        tensors = load_file(path, device=str(device))
        # Tensors in the memory-mapped file may be unaligned. Our kernels can read them in place; torch's int8 kernel
        # for CPUs crashes on unaligned codes, so it gets a copy in memory that torch allocates.
        return tensors if packed or device.type != "cpu" else {key: tensors.pop(key).clone() for key in list(tensors)}
    except (OSError, SafetensorError):
        return None


def write_copy(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a copy; a full disk is ignored, because the copy can be made again."""
    if sum(tensor.nbytes for tensor in tensors.values()) < LEAST_BYTES:
        return
    with suppress(OSError, SafetensorError), replacing(path) as part:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, part)
