"""A preallocated buffer of slots per request, shared by draft and target; its contents are never cloned."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .free_memory import free_memory
from .recurrent import RecurrentStates

MOST_VIEWS = 8  # Cached views of a buffer, one per range of slots; the cache is cleared when full.


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device; on the CPU within the container's limit."""
    if device.type == "cuda":
        # Memory that torch has reserved and can use again.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return free_memory()


class KVBuffer:
    """Keys and values of every layer with attention by slot, or of layers with a short convolution its inputs.

    Slot i holds position i of the committed text. After the committed slots a draft writes its chain, the target
    overwrites it when it verifies, and candidate evaluation writes scratch rows that the next pass overwrites.
    Layers on one device share one block of shape (2, layers, kv_heads, capacity, head_dim), so that moving a row
    is one copy per device, and one of (layers, capacity, values) for convolutions. Zero-filled: a masked slot that was
    never written must not hold a NaN.

    Args: conv_inputs: per layer the values of a convolution's input, 0 for others; of one size (default: all 0).
          states: of recurrent layers. without_slots: layers that keep nothing by slot.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        conv_inputs: Sequence[int] = (),
        states: RecurrentStates | None = None,
        without_slots: Collection[int] = (),
    ) -> None:
        self.capacity, self.head_stride, self.states = capacity, capacity * head_dim, states
        conv_inputs = conv_inputs or (0,) * len(devices)
        self._blocks: dict[torch.device, Tensor] = {}
        self._inputs: dict[torch.device, Tensor] = {}
        # One tensor (kv_heads, capacity, head_dim) per layer; of a convolution twice its (1, capacity, values); empty
        # ones of a layer without slots.
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._views: dict[tuple[int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        for device in dict.fromkeys(devices):
            layers_here = enumerate(zip(conv_inputs, devices, strict=True))
            widths = [width for at, (width, place) in layers_here if place == device and at not in without_slots]
            shape = (2, widths.count(0), kv_heads, capacity, head_dim)
            self._blocks[device] = torch.zeros(shape, dtype=dtype, device=device)
            if any(widths):
                n_convolutions = len(widths) - widths.count(0)
                self._inputs[device] = torch.zeros((n_convolutions, capacity, max(widths)), dtype=dtype, device=device)
        layers = {device: iter(block.transpose(0, 1)) for device, block in self._blocks.items()}
        convolutions = {device: iter(inputs[:, None]) for device, inputs in self._inputs.items()}
        self._has_keys = [not width and layer not in without_slots for layer, width in enumerate(conv_inputs)]
        for layer, (device, has_keys) in enumerate(zip(devices, self._has_keys, strict=True)):
            if layer in without_slots:
                keys, values = [torch.empty((1, 0, 0), dtype=dtype, device=device)] * 2
            else:
                keys, values = next(layers[device]) if has_keys else [next(convolutions[device])] * 2
            self.keys.append(keys)
            self.values.append(values)

    def between(self, start: int, end: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Views of the keys and the values at slots start … end - 1, per layer (kv_heads, end - start, head_dim).

        Of a convolution both are of its inputs: (1, end - start, values).

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
            layers = zip(self.keys, self._has_keys, strict=True)
            keys, values = zip(
                *(next(per_device[part.device]) if has_keys else [part[:, start:end]] * 2 for part, has_keys in layers),
                strict=True,
            )
            views = self._views[start, end] = keys, values
        return views

    def address(self, device: torch.device) -> int:
        return self._blocks[device].data_ptr()

    @cached_property
    def addresses(self) -> tuple[ctypes.Array[ctypes.c_void_p], ...]:
        """Memory addresses of each layer's keys and values, and of a recurrent layer's inputs and states."""
        pointers, layers = ctypes.c_void_p * len(self.keys), range(len(self.keys))
        by_slot = [pointers(*(part.data_ptr() for part in parts)) for parts in (self.keys, self.values)]
        if self.states is None:
            return (*by_slot, pointers(), pointers())
        kept = (self.states.inputs, self.states.states)
        return *by_slot, *(pointers(*(one[at].data_ptr() if at in one else None for at in layers)) for one in kept)

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent layers' states, which do not depend on the number of slots."""
        return 0 if self.states is None else self.states.n_bytes

    def commit(self, n_slots: int, is_place: bool = False) -> None:
        """Say that the first slots hold text which stays, and whether other texts may go on from their end."""
        if self.states is not None:
            self.states.commit(n_slots)
            if is_place:
                self.states.take_snapshot()

    def reachable(self, n_slots: int) -> int:
        """Return after how many of the first slots another text can go on from this buffer."""
        return n_slots if self.states is None else self.states.reachable(n_slots)

    def copy_from(self, other: KVBuffer, n: int) -> None:
        """Take another buffer's first `n` slots, a number that it says is `reachable`; before the first pass."""
        if self.states is not None and other.states is not None:
            self.states.copy_from(other.states, other.states.reachable(n))
        for device, block in self._blocks.items():
            block[:, :, :, :n] = other._blocks[device][:, :, :, :n]
        for device, inputs in self._inputs.items():
            inputs[:, :n] = other._inputs[device][:, :n]

    def places(self, n_slots: int) -> list[int]:
        """Return behind which numbers of slots, up to `n_slots`, only states tell where a text can go on."""
        return [] if self.states is None else self.states.places(n_slots)

    def saved_states(self, n_slots: int) -> bytes:
        """Return the recurrent layers' states behind the first `n_slots` slots, one of `places`."""
        assert self.states is not None
        return self.states.saved(n_slots)

    def restore_states(self, n_slots: int, saved: NDArray[np.uint8]) -> None:
        """Go on from what `saved_states` returned; before the first pass. Raises: ValueError: it is damaged."""
        assert self.states is not None
        self.states.restore(n_slots, saved)

    @property
    def _stored(self) -> tuple[Tensor, ...]:
        """All that the slots hold: tensors (…, capacity, values)."""
        return *self._blocks.values(), *self._inputs.values()

    def saved(self, start: int, end: int) -> NDArray[np.uint8]:
        """Return a copy of the bytes of slots start … end - 1, of all layers, for `restore` of a buffer of its kind."""
        parts = (block[..., start:end, :].cpu().contiguous() for block in self._stored)
        return torch.cat([part.flatten().view(torch.uint8) for part in parts]).numpy()

    def restore(self, start: int, end: int, saved: NDArray[np.uint8]) -> None:
        """Write what `saved` returned into slots start … end - 1."""
        place = 0
        for block in self._stored:
            slots = block[..., start:end, :]
            if not slots.numel():  # Torch cannot view empty bytes as numbers.
                continue
            n_bytes = slots.numel() * slots.element_size()
            part = torch.from_numpy(saved[place : place + n_bytes].copy())
            slots.copy_(part.view(block.dtype).view(slots.shape))
            place += n_bytes

    def move(self, source: int | Tensor, target: int) -> None:
        """Copy a slot's keys and values of all layers to another slot; several, int64 (n,), to consecutive ones."""
        if self.states is not None:
            self.states.move(source if isinstance(source, int) else source.tolist(), target)
        for device, block in (*self._blocks.items(), *self._inputs.items()):
            slots = block.movedim(-2, 0)
            if isinstance(source, int):
                slots[target] = slots[source]
            else:
                slots[target : target + len(source)] = slots.index_select(0, source.to(device))
