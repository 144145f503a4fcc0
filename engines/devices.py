"""The device that all engines of a run compute on: which one it is, what processes see of it, and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ..core.errors import SettingsError
from ..models.buffer import free_bytes
from ..models.loading import placement
from ..models.sources import check_device

SPARE_BYTES = 1 << 30  # Memory of the machine and of a GPU that is left to everything else.
HOST_BYTES = 4 << 30  # Memory of the machine that a process on a GPU needs: libraries, and weights on their way.
VISIBLE = "CUDA_VISIBLE_DEVICES"


def chosen_device(device: str, folder: Path, dtype: str) -> str:
    """Return where all engines compute, "cpu" or "cuda:N": of "auto", where swiftopt itself would load the model.

    Raises: DeviceMissing: it is not on this machine. SettingsError: no single device has room for the model.
    """
    check_device(device)
    if device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    place = placement(device, folder, dtype)
    if place == "auto-map":
        raise SettingsError(
            f"engines are compared on one device, and {folder} would be spread over several: use --device cpu, cuda:N"
            " or a smaller model"
        )
    return place


def only_device(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a process with this environment sees that GPU alone, as its first one."""
    if device == "cpu":
        return {}
    index = int(device.partition(":")[2])
    seen = environ.get(VISIBLE)
    return {VISIBLE: seen.split(",")[index].strip() if seen else str(index)}


def free_on(device: str) -> int:
    """Return the bytes that are free on a GPU, or of this machine's memory for the CPU."""
    return free_bytes(torch.device(device))


def room_for(device: str, n_bytes: float) -> bool:
    """Tell whether the device has that much memory free for one more process, and some to spare."""
    return free_on(device) >= n_bytes + SPARE_BYTES and (device == "cpu" or free_on("cpu") >= HOST_BYTES + SPARE_BYTES)
