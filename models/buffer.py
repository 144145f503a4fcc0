"""A preallocated buffer of slots per request, shared by draft and target; its contents are never cloned."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .coded_slots import CodedSlots, SlotCoding
from .family import SlotShape
from .free_memory import free_memory
from .recurrent import RecurrentStates

# Device, number of heads, width, and whether a slot has values beside its keys; a block for each.
_Form = tuple[torch.device, int, int, bool]
_Place = tuple[_Form, int]  # The block's form, and the index of a tensor in the block.
MOST_VIEWS = 8  # Cached views of a buffer, one per range of slots; the cache is cleared when full.


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device; a container's limit counts on the CPU."""
    if device.type == "cuda":
        # Torch reuses memory that it has reserved.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return free_memory()


class KVBuffer:
    """Keys and values of attention layers, and inputs of short convolutions, in slots.

    Slot i holds position i of the committed text. A draft writes its rows into the slots after the committed ones, and
    the target overwrites them when it verifies; the scoring of candidates also writes there, for one pass at a time.
    Keys and values of equal form on one device share a block (tensors, n_heads, capacity, width), keys of all layers
    before values, so that moving a slot is one copy per block. Blocks begin as zeros, because a masked slot that was
    never written must not hold a NaN.

    Args: shapes: what each layer stores in a slot (None: nothing). states: those of recurrent layers. sources: the
          layer whose keys and values each layer reads (default: its own).
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        shapes: Sequence[SlotShape | None],
        capacity: int,
        dtype: torch.dtype,
        states: RecurrentStates | None = None,
        sources: Sequence[int] = (),
    ) -> None:
        self.capacity, self.states = capacity, states
        # Copies of committed slots in 4 bits, which drafts read in long contexts, and how they are made.
        self.coding: SlotCoding | None = None
        self.coded: CodedSlots | None = None
        self._views: dict[tuple[int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        counts: Counter[_Form] = Counter()

        def places_of(widths: Sequence[int]) -> list[_Place | None]:
            places: list[_Place | None] = []
            for device, shape, width in zip(devices, shapes, widths, strict=True):
                form = None if shape is None or not width else (device, shape.n_heads, width, shape.value_width > 0)
                places.append(None if form is None else (form, counts[form]))
                if form is not None:
                    counts[form] += 1
            return [places[source] for source in sources] if sources else places

        self._key_places = places_of([0 if shape is None else shape.key_width for shape in shapes])
        values = places_of([0 if shape is None else shape.value_width for shape in shapes])
        # A convolution has inputs only: they stand for keys and values.
        self._value_places = [value or key for value, key in zip(values, self._key_places, strict=True)]
        self._blocks: dict[_Form, Tensor] = {}
        for form, n in counts.items():
            device, n_heads, width, _ = form
            self._blocks[form] = torch.zeros((n, n_heads, capacity, width), dtype=dtype, device=device)
        self._nothing = [torch.empty((1, 0, 0), dtype=dtype, device=device) for device in devices]
        # One tensor (n_heads, capacity, width) per layer, an empty one for a layer that stores nothing in slots.
        self.keys, self.values = self._by_layer({form: block.unbind() for form, block in self._blocks.items()})

    def _by_layer(self, tensors: Mapping[_Form, Sequence[Tensor]]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return each layer's keys and values, given the tensors of each block."""

        def at(places: Sequence[_Place | None]) -> tuple[Tensor, ...]:
            pairs = zip(places, self._nothing, strict=True)
            return tuple(nothing if place is None else tensors[place[0]][place[1]] for place, nothing in pairs)

        return at(self._key_places), at(self._value_places)

    def between(self, start: int, end: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return views of the keys and values in slots start … end - 1, (n_heads, end - start, width) per layer.

        The views of all layers are created together and cached: creating them one by one takes several times as long.
        """
        views = self._views.get((start, end))
        if views is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            views = self._by_layer({form: block[:, :, start:end].unbind() for form, block in self._blocks.items()})
            self._views[start, end] = views
        return views

    def address(self, device: torch.device) -> int:
        """Memory address of attention's only block on a device: its keys and values must have one form."""
        (block,) = (block for form, block in self._blocks.items() if form[0] == device and form[3])
        return block.data_ptr()

    @cached_property
    def addresses(self) -> tuple[ctypes.Array[ctypes.c_void_p], ...]:
        """Memory addresses of keys, values, recurrent inputs and recurrent states: an array by layer for each."""
        pointers, layers = ctypes.c_void_p * len(self.keys), range(len(self.keys))
        by_slot = [pointers(*(part.data_ptr() for part in parts)) for parts in (self.keys, self.values)]
        if self.states is None:
            return (*by_slot, pointers(), pointers())
        of_states = (self.states.inputs, self.states.states)
        by_layer = ([one[i].data_ptr() if i in one else None for i in layers] for one in of_states)
        return *by_slot, *(pointers(*addresses) for addresses in by_layer)

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent layers' states, which do not depend on the number of slots."""
        return 0 if self.states is None else self.states.n_bytes

    @property
    def coded_bytes(self) -> int:
        """Bytes of the slots' copies in 4 bits."""
        return 0 if self.coded is None else self.coded.n_bytes

    def code(self, n_slots: int, at_once: bool = False) -> bool:
        """Copy the first slots in 4 bits, as far as they are not yet copied; return whether there are copies to read.

        Args: n_slots: number of committed slots. at_once: copy all of them, although other requests wait meanwhile.
        """
        if self.coding is None or n_slots < self.coding.least:
            return False
        if self.coded is None:
            self.coded = CodedSlots(self.coding, self.keys, self.values)
        self.coded.extend(n_slots, at_once)
        return True

    def commit(self, n_slots: int, is_place: bool = False) -> None:
        """Mark the first slots as committed. Args: is_place: take a snapshot, from which other texts can continue."""
        if self.states is not None:
            self.states.commit(n_slots)
            if is_place:
                self.states.take_snapshot()

    def reachable(self, n_slots: int) -> int:
        """Return how many of the first `n_slots` slots another text can take over from this buffer."""
        return n_slots if self.states is None else self.states.reachable(n_slots)

    def copy_from(self, other: KVBuffer, n: int) -> None:
        """Copy another buffer's first `n` slots, a number that its `reachable` returned; call it before any pass."""
        if self.states is not None and other.states is not None:
            self.states.copy_from(other.states, other.states.reachable(n))
        for form, block in self._blocks.items():
            block[:, :, :n] = other._blocks[form][:, :, :n]
        if self.coding is not None and other.coded is not None and n >= self.coding.least:
            self.coded = CodedSlots(self.coding, self.keys, self.values)
            self.coded.copy_from(other.coded, n)

    def places(self, n_slots: int) -> list[int]:
        """Return the numbers of slots, up to `n_slots`, from which a text can continue; [] if no states limit them."""
        return [] if self.states is None else self.states.places(n_slots)

    def saved_states(self, n_slots: int) -> bytes:
        """Return the recurrent layers' states after the first `n_slots` slots, one of `places`."""
        assert self.states is not None
        return self.states.saved(n_slots)

    def restore_states(self, n_slots: int, saved: NDArray[np.uint8]) -> None:
        """Restore what `saved_states` returned; call it before any pass. Raises: ValueError: the data is damaged."""
        assert self.states is not None
        self.states.restore(n_slots, saved)

    def saved(self, start: int, end: int) -> NDArray[np.uint8]:
        """Return a copy of all layers' bytes in slots start … end - 1, for `restore` of a buffer of the same form."""
        parts = (block[:, :, start:end].cpu().contiguous() for block in self._blocks.values())
        as_bytes = [part.flatten().view(torch.uint8) for part in parts]
        return torch.cat([torch.empty(0, dtype=torch.uint8), *as_bytes]).numpy()

    def restore(self, start: int, end: int, saved: NDArray[np.uint8]) -> None:
        """Write what `saved` returned into slots start … end - 1."""
        place = 0
        for block in self._blocks.values():
            slots = block[:, :, start:end]
            if not slots.numel():  # Torch cannot view an empty tensor of bytes as numbers.
                continue
            n_bytes = slots.numel() * slots.element_size()
            part = torch.from_numpy(saved[place : place + n_bytes].copy())
            slots.copy_(part.view(block.dtype).view(slots.shape))
            place += n_bytes

    def move(self, source: int | Tensor, target: int) -> None:
        """Copy a slot's keys and values of all layers to slot `target`; several, int64 (n,), to `target` and after."""
        if self.states is not None:
            self.states.move(source if isinstance(source, int) else source.tolist(), target)
        for block in self._blocks.values():
            slots = block.movedim(2, 0)
            if isinstance(source, int):
                slots[target] = slots[source]
            else:
                slots[target : target + len(source)] = slots.index_select(0, source.to(block.device))
