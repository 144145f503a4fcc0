"""Joules from the machine's own counters: NVML for an NVIDIA GPU, RAPL for the processor; where neither tells, none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Counter:
    """A rising count of microjoules; one with `span` begins again at 0 after it has reached that."""

    source: str
    read: Callable[[], int]
    span: int | None = None

    def between(self, before: int, after: int) -> int:
        """Microjoules from one reading to the next."""
        return after - before if after >= before or self.span is None else after + self.span - before


class EnergyMeter:
    """What a stretch of work took, whole devices counted: also what else ran on them.

    `source` names the counters ("nvml", "rapl" or both); None: nothing can be measured here.
    """

    def __init__(self, counters: Sequence[Counter]) -> None:
        self._counters = tuple(counters)
        self.source = " + ".join(dict.fromkeys(counter.source for counter in counters)) or None

    @classmethod
    def of(cls, device_type: str, index: int = 0) -> EnergyMeter:
        """The counters of the processor and, for a model on "cuda", of that GPU."""
        return cls([*(_nvml(index) if device_type == "cuda" else ()), *rapl(POWERCAP)])

    def read(self) -> tuple[int, ...]:
        """A reading of every counter, for `joules_since`."""
        return tuple(counter.read() for counter in self._counters)

    def joules_since(self, before: Sequence[int]) -> float | None:
        """Joules of all counters together since that reading; None where nothing can be measured."""
        if not self._counters:
            return None
        spent = (c.between(b, a) for c, b, a in zip(self._counters, before, self.read(), strict=True))
        return sum(spent) / 1e6


def rapl(root: Path) -> list[Counter]:
    """A counter per processor package under `root`; none where they cannot be read (usually they need root)."""
    found = []
    for zone in sorted(root.glob("intel-rapl:*")):
        try:
            # Zones below a package are part of it, and "psys" holds the packages: each joule counts once.
            if not (zone / "name").read_text().startswith("package"):
                continue
            int((zone / "energy_uj").read_text())
            span = int((zone / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            continue
        found.append(Counter("rapl", lambda file=zone / "energy_uj": int(file.read_text()), span))  # type: ignore[misc]
    return found


def _nvml(index: int) -> list[Counter]:
    """The energy counter of torch's GPU of that number; none without the NVML bindings or on GPUs that lack it."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return []
    import torch

    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (nvml.NVMLError, AttributeError):
        return []
    return [Counter("nvml", lambda: 1000 * int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)))]
