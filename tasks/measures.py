"""What a comparison measures beside time: energy, memory beside the target's own, and perplexity of the output.

Energy comes from the machine's own counters, NVML for an NVIDIA GPU and RAPL for the processor, or is not measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..decoding.methods import Method
from ..models.rows import Rows
from ..models.runtime import Runtime

POWERCAP = Path("/sys/class/powercap")
ROWS = 64  # tokens per pass of `nll`, so that the logits of a large vocabulary stay small


@dataclass(frozen=True, slots=True)
class Counter:
    """A rising count of microjoules; with `span` it wraps to 0 after that value."""

    source: str
    read: Callable[[], int]
    span: int | None = None

    def between(self, before: int, after: int) -> int:
        """Return the microjoules from one reading to the next."""
        return after - before if after >= before or self.span is None else after + self.span - before


class EnergyMeter:
    """Measure the energy of whole devices, including whatever else runs on them.

    `source` names the counters ("nvml", "rapl" or both); None: there are none.
    """

    def __init__(self, counters: Sequence[Counter]) -> None:
        self._counters = tuple(counters)
        self.source = " + ".join(dict.fromkeys(counter.source for counter in counters)) or None

    @classmethod
    def of(cls, device_type: str, index: int = 0) -> EnergyMeter:
        """Use the counters of the processor and, for a model on "cuda", of that GPU."""
        return cls([*(nvml(index) if device_type == "cuda" else ()), *rapl(POWERCAP)])

    def read(self) -> tuple[int, ...]:
        """Read every counter, for `joules_since`."""
        return tuple(counter.read() for counter in self._counters)

    def joules_since(self, before: Sequence[int]) -> float | None:
        """Return the joules of all counters together since that reading; None where there is no counter."""
        if not self._counters:
            return None
        spent = (c.between(b, a) for c, b, a in zip(self._counters, before, self.read(), strict=True))
        return sum(spent) / 1e6


def rapl(root: Path) -> list[Counter]:
    """Return a counter per processor package under `root`; none where they cannot be read (usually they need root)."""
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


def nvml(index: int) -> list[Counter]:
    """Return the energy counter of torch's GPU of that number; none on GPUs that lack it."""
    library: Any = import_module("pynvml")
    try:
        library.nvmlInit()
        handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        library.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (library.NVMLError, AttributeError):
        return []
    return [Counter("nvml", lambda: 1000 * int(library.nvmlDeviceGetTotalEnergyConsumption(handle)))]


def held_bytes(method: Method, runtime: Runtime) -> int:
    """Return the bytes of tensors that the method refers to beyond the target's: heads, stacks, a draft model.

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


def buffer_bytes(method: Method, runtime: Runtime, n_positions: int, room: int) -> int:
    """Return the bytes of key/value slots beyond plain decoding's: draft rows, and all of a draft model's.

    Args: n_positions: prompt and completion together; room: tokens of the completion.
    """
    n_rows = method.drafter.max_rows(room)
    return (n_rows - 1) * runtime.slot_bytes + (n_positions + n_rows) * method.drafter.slot_bytes


def _of_module(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield every tensor under a value: in modules, containers, and attributes of this package's objects."""
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


@torch.inference_mode()
def nll(runtime: Runtime, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
    """Return the summed -log probability of the tokens after the prompt, under the model without any sampling rule."""
    if not token_ids:
        return 0.0
    text = [*prompt_ids, *token_ids[:-1]]
    buffer = runtime.new_buffer(len(text))
    first = len(prompt_ids) - 1
    if first:
        runtime.prefill(text[:first], buffer)
    total = 0.0
    for start in range(0, len(token_ids), ROWS):
        rows = text[first + start : first + start + ROWS]
        logits = runtime.forward(Rows(rows, first + start), buffer).float()
        said = torch.tensor(token_ids[start : start + ROWS], device=logits.device)
        total -= float(torch.log_softmax(logits, dim=-1).gather(1, said[:, None]).double().sum())
    return total
