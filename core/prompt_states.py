"""Layer sets with the kind of text that they were found on: where its prompts lie among the model's hidden states."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from operator import mul

from .types import LayerSet

State = tuple[float, ...]  # a mean hidden state as a unit vector, (hidden_size,)


@dataclass(frozen=True, slots=True)
class KnownSet:
    """A layer set, and the mean state of the prompts of a task that it was in use for."""

    layer_set: LayerSet
    state: State
    task: str = ""


def nearest(known: Iterable[KnownSet], state: State, n: int) -> list[LayerSet]:
    """At most `n` different sets, those first whose prompts' states have the largest cosine with `state`.

    Sets of states of another size, as another model's are, count for nothing.
    """
    alike = [own for own in known if len(own.state) == len(state)]
    alike.sort(key=lambda own: sum(map(mul, own.state, state)), reverse=True)
    return list(dict.fromkeys(own.layer_set for own in alike))[:n]


def unit(values: Sequence[float]) -> State:
    """The vector of length 1 in that direction; zeros stay zeros."""
    length = sqrt(sum(map(mul, values, values)))
    return tuple(value / length for value in values) if length else tuple(values)


def packed(state: State) -> bytes:
    """In single precision, little-endian."""
    return struct.pack(f"<{len(state)}f", *state)


def unpacked(data: bytes) -> State:
    """Inverse of `packed`.

    Raises: ValueError: these bytes are no such state.
    """
    if len(data) % 4:
        raise ValueError(f"a state has four bytes per value, but there are {len(data)} bytes")
    return struct.unpack(f"<{len(data) // 4}f", data)


def single(state: Sequence[float]) -> State:
    """The values as `packed` keeps them, so that who goes on from what was kept computes the same."""
    return unpacked(packed(tuple(state)))
