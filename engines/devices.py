"""Chooses the device of all engines of a run, restricts their processes to it, and measures its free memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ..core.errors import SettingsError
from ..models.buffer import free_bytes
from ..models.loading import placement
from ..models.sources import check_device

SPARE_BYTES = 1 << 30  # Bytes left free for other programs, both in RAM and on a GPU.
# Bytes of RAM that a process on a GPU needs: for its libraries, and for weights while they are copied to the GPU.
HOST_BYTES = 4 << 30
VISIBLE = "CUDA_VISIBLE_DEVICES"


def chosen_device(device: str, folder: Path, dtype: str) -> str:
    """Return the device of all engines, "cpu" or "cuda:N"; for "auto" the one on which swiftopt would load the model.

    Raises: DeviceMissing: it is not on this machine. SettingsError: no single device has room for the model.
    """
    check_device(device)
    if device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    place = placement(device, folder, dtype)
    if place == "auto-map":
        raise SettingsError(
            f"engines are compared on one device, and {folder} would need several: use --device cpu, cuda:N or a"
            " smaller model"
        )
    return place


def only_device(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that make a process see only the device's GPU, as its GPU 0."""
    if device == "cpu":
        return {}
    index = int(device.partition(":")[2])
    visible = environ.get(VISIBLE)
    return {VISIBLE: visible.split(",")[index].strip() if visible else str(index)}


def free_on(device: str) -> int:
    """Return the free bytes of the GPU's memory, or of RAM for the CPU."""
    return free_bytes(torch.device(device))


def room_for(device: str, n_bytes: float) -> bool:
    """Tell whether the device has `n_bytes` of memory free for one more process, in addition to a reserve."""
    return free_on(device) >= n_bytes + SPARE_BYTES and (device == "cpu" or free_on("cpu") >= HOST_BYTES + SPARE_BYTES)
