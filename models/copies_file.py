"""Quantised copies on disk: made once per model, format and kind of processor, read back in about a second per GB."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .gguf_file import cache_root

LEAST_BYTES = 16 << 20  # smaller copies are made faster than read


def file_of(fingerprint: str, part: str, name: str, dtype: torch.dtype, device: torch.device) -> Path:
    """Where the copy of a part (`attn`, `mlp`, `head`) in a format lies; packed codes differ by processor."""
    kernel = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else str(torch.version.cuda)
    key = "|".join((fingerprint, part, name, str(dtype), device.type, kernel, torch.__version__))
    return cache_root() / "quantised" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"


def read(path: Path, device: torch.device) -> dict[str, Tensor] | None:
    """What was written there; None where there is nothing, or nothing that can be read."""
    try:
        # Copied to memory of torch's own: in the mapped file tensors begin anywhere, and torch's int8 kernel dies of
        # codes that are not aligned.
        return {key: tensor.clone() for key, tensor in load_file(path, device=str(device)).items()}
    except (OSError, SafetensorError):
        return None


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Keep a copy, as far as there is room: it can be made again."""
    if sum(tensor.nbytes for tensor in tensors.values()) < LEAST_BYTES:
        return
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, part)
        part.replace(path)
    except (OSError, SafetensorError):
        part.unlink(missing_ok=True)
