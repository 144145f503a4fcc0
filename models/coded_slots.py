"""Copies in 4 bits of slots that stay, which drafts in long contexts read in place of keys and values.

A draft pass over thousands of slots reads mostly keys and values, however few bits the weights of the draft have. The
target never reads these copies: they change what is drafted, and no token that is given out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..core.context_costs import SlotCopies
from ..core.errors import SettingsError
from ..core.settings import THREADS

if TYPE_CHECKING:
    from .kernels.build import Kernels

# Copies are made where keys and values are at least this share of the weights' bytes, and so many slots.
LEAST_SHARE = 1 / 16
LEAST_SLOTS = 4096
UNITS_AT_ONCE = 8  # Units copied before a draft at most: other requests wait meanwhile.


class Unit(NamedTuple):
    """Slots of one head that are copied together, and the bytes of their copies; 0: such heads have none."""

    n_slots: int
    n_bytes: int


def unit_of(kernels: Kernels, width: int) -> Unit:
    n_slots = ctypes.c_int32()
    n_bytes = kernels.coded_unit(width, ctypes.byref(n_slots))
    return Unit(n_slots.value, n_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class SlotCoding:
    """How a model's slots are copied: the units of each layer that has copies, for contexts of `least` slots or more.

    `sources`: the layer whose slots each layer reads. `slot_bytes`: of the copies, for each slot. `share`: bytes that a
    draft reads / bytes that the target reads of a slot that all rows see.
    """

    kernels: Kernels
    units: Mapping[int, Unit]
    sources: Sequence[int]
    least: int
    slot_bytes: int
    share: float

    @property
    def copies(self) -> SlotCopies:
        """What the prices of drafts are computed by."""
        return SlotCopies(self.least, self.share)

    @classmethod
    def of(
        cls,
        kernels: Kernels,
        heads: Mapping[int, tuple[int, int]],
        sources: Sequence[int],
        n_parameters: int,
        capacity: int,
        value_bytes: int,
    ) -> SlotCoding | None:
        """Return how drafts read a buffer of `capacity` slots; None: as the target does.

        Args: heads: the number of key heads and their width, of each layer whose rows see all slots before their own.
              value_bytes: of a number of a key or value.
        """
        possible = {layer: unit_of(kernels, heads[layer][1]) for layer in sources if layer in heads}
        units = {layer: unit for layer, unit in possible.items() if unit.n_bytes}
        if not units:
            return None
        n_values = sum(2 * heads[layer][0] * heads[layer][1] for layer in units)
        least = max(LEAST_SLOTS, int(LEAST_SHARE * n_parameters / n_values))
        if capacity < least:
            return None
        whole = {layer: 2 * n_heads * width * value_bytes for layer, (n_heads, width) in heads.items()}
        coded = {layer: heads[layer][0] * unit.n_bytes / unit.n_slots for layer, unit in units.items()}
        readers = [source for source in sources if source in heads]
        share = sum(coded.get(layer, whole[layer]) for layer in readers) / sum(whole[layer] for layer in readers)
        return cls(kernels, units, sources, least, ceil(sum(coded.values())), share)


class CodedSlots:
    """The copies of a buffer's first slots, whole units of them; `kernels/coded_slots.h` says how they lie.

    Args: keys, values: of each layer, (heads, capacity, width).
    """

    def __init__(self, coding: SlotCoding, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._coding, self._keys, self._values = coding, keys, values
        self.n_slots = 0  # Slots whose copies are up to date.
        self._unit_slots = next(iter(coding.units.values())).n_slots
        self.n_units = keys[next(iter(coding.units))].shape[1] // self._unit_slots
        # By layer: uint8 (heads, units, bytes of a unit).
        self._copies = {
            layer: torch.empty((keys[layer].shape[0], self.n_units, unit.n_bytes), dtype=torch.uint8)
            for layer, unit in coding.units.items()
        }

    @property
    def n_bytes(self) -> int:
        return sum(copies.nbytes for copies in self._copies.values())

    @cached_property
    def addresses(self) -> ctypes.Array[ctypes.c_void_p]:
        """Memory addresses of the copies that each layer reads; None: it has none."""
        read = [self._copies.get(source) for source in self._coding.sources]
        return (ctypes.c_void_p * len(read))(*(None if copies is None else copies.data_ptr() for copies in read))

    def extend(self, n_slots: int, at_once: bool = False) -> None:
        """Copy what is new of the first `n_slots` slots, as far as they fill units; not `at_once`: some units at most.

        Raises: SettingsError: no thread could be started.
        """
        first = self.n_slots // self._unit_slots
        last = min(n_slots // self._unit_slots, first + (self.n_units if at_once else UNITS_AT_ONCE))
        if last <= first:
            return
        for layer, copies in self._copies.items():
            keys, values = self._keys[layer], self._values[layer]
            n_heads, capacity, width = keys.shape
            places = keys.data_ptr(), values.data_ptr(), copies.data_ptr(), capacity, self.n_units
            sizes = n_heads, width, first, last, keys.dtype == torch.bfloat16, torch.get_num_threads()
            if self._coding.kernels.code_slots(*places, *sizes):
                raise SettingsError(f"no further thread could be started: lower {THREADS}")
        self.n_slots = last * self._unit_slots

    def cut(self, n_slots: int) -> None:
        """Forget the copies of all but the first `n_slots` slots: the others are written again."""
        self.n_slots = min(self.n_slots, n_slots // self._unit_slots * self._unit_slots)

    def copy_from(self, other: CodedSlots, n_slots: int) -> None:
        """Take the copies of another buffer's first `n_slots` slots, as far as it has them."""
        self.n_slots = min(other.n_slots, n_slots // self._unit_slots * self._unit_slots)
        n_units = self.n_slots // self._unit_slots
        for layer, copies in self._copies.items():
            copies[:, :n_units] = other._copies[layer][:, :n_units]
