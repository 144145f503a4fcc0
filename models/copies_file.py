"""Quantised copies on disk: made once per model, format and kind of processor, read back in about a second per GB."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .gguf_file import STALE_S, cache_root

LAYOUT = "1"  # part of every name; raise it when weights are rounded or packed another way
PART = ".part"  # of a name, while the copy is being written
LEAST_BYTES = 16 << 20  # smaller copies are made faster than read


def file_of(
    fingerprint: str, part: str, name: str, dtype: torch.dtype, device: torch.device, packed: bool = False
) -> Path:
    """Where the copy of a part (`attn`, `mlp`, `head`) in a format lies; torch packs codes by the processor."""
    if packed:
        key = "|".join((LAYOUT, fingerprint, part, name, "packed"))
    else:
        kernel = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else str(torch.version.cuda)
        key = "|".join((LAYOUT, fingerprint, part, name, str(dtype), device.type, kernel, torch.__version__))
    return cache_root() / "quantised" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"


def read(path: Path, device: torch.device, packed: bool = False) -> dict[str, Tensor] | None:
    """What was written there; None where there is nothing, or nothing that can be read."""
    try:
        found = load_file(path, device=str(device))
        # In the mapped file tensors begin anywhere. Our kernels read them there; torch's int8 kernel dies of codes that
        # are not aligned, and gets a copy in memory of torch's own.
        return found if packed else {key: tensor.clone() for key, tensor in found.items()}
    except (OSError, SafetensorError):
        return None


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Keep a copy, as far as there is room: it can be made again."""
    if sum(tensor.nbytes for tensor in tensors.values()) < LEAST_BYTES:
        return
    part: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        handle, name = tempfile.mkstemp(suffix=PART, dir=path.parent)
        os.close(handle)
        part = Path(name)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, part)
        part.chmod(0o644)  # another user may share the cache
        part.replace(path)
    except (OSError, SafetensorError):
        if part is not None:
            part.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what processes left that died while writing."""
    for left in folder.glob(f"*{PART}"):
        with suppress(OSError):  # another process has just finished, or swept, it
            if time.time() - left.stat().st_mtime > STALE_S:
                left.unlink()
