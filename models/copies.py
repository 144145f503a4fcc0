"""Quantised copies of a model's sub-layers and head, for drafts; the target itself is never touched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn

from ..core.types import LayerSet
from . import copies_file
from .blocks import Block, Parts
from .quantised import QuantisedLinear, quantised, replaced

HASH = re.compile(r"v\d+:[0-9a-f]{16}")  # what `models.fingerprint` gives; made-up names of tests are none
KINDS: tuple[Literal["attn", "mlp"], ...] = ("attn", "mlp")


class QuantisedCopies:
    """The quantised copies that drafts of one model asked for so far.

    Those of a model with a real fingerprint, a hash of its weights, are kept on disk for the next process.
    """

    def __init__(self, blocks: Sequence[Block], head: nn.Module, fingerprint: str) -> None:
        self._blocks, self.head_map = blocks, head
        self._fingerprint = fingerprint if HASH.fullmatch(fingerprint) else None
        self.packed = False  # for our kernels
        self._parts: dict[tuple[str, int, str], Parts] = {}
        self._heads: dict[str, QuantisedLinear] = {}

    @property
    def n_bytes(self) -> int:
        """Memory that all copies hold."""
        return sum(self._bytes_of(*key) for key in self._parts) + sum(head.n_bytes for head in self._heads.values())

    def bytes_of(self, layer_set: LayerSet) -> int:
        """Memory of the copies that a draft with that set runs, as far as they have been made."""
        own = sum(self._bytes_of(*key) for key in _wanted(layer_set) if key in self._parts)
        head = self._heads.get(layer_set.format_of("head") or "")
        return own + (0 if head is None else head.n_bytes)

    def _bytes_of(self, kind: str, layer: int, name: str) -> int:
        return sum(one.n_bytes for one in _maps(self._parts[kind, layer, name], kind))

    @torch.inference_mode()
    def parts(self, kind: Literal["attn", "mlp"], layer: int, name: str) -> Parts:
        """The modules of a layer with that sub-layer's linear maps quantised; made at the first call."""
        key = (kind, layer, name)
        if key not in self._parts:
            self._parts[key] = self._made(kind, layer, name, iter(()))
        return self._parts[key]

    @torch.inference_mode()
    def head(self, name: str) -> QuantisedLinear:
        """The quantised head; made at the first call."""
        if name not in self._heads:
            self._heads[name] = quantised([self.head_map], name, packed=self.packed)
        return self._heads[name]

    def lay_out(self, packed: bool) -> None:
        """From now on make copies for our kernels (`packed`) or for torch's; those for the others are dropped."""
        if packed != self.packed:
            self.packed = packed
            self._parts.clear()
            self._heads.clear()

    def drop(self, name: str) -> None:
        """Give back the memory of all copies in a format; who asks for one again has it made, or read, again."""
        self._parts = {key: parts for key, parts in self._parts.items() if key[2] != name}
        self._heads.pop(name, None)

    @torch.inference_mode()
    def prepare(self, layer_set: LayerSet, on_step: Callable[[str], None] | None = None) -> None:
        """Make all that a draft with that set runs, or read it, so that none of it is made while something is timed."""
        missing = [key for key in _wanted(layer_set) if key not in self._parts]
        for kind, name in dict.fromkeys((kind, name) for kind, _, name in missing):
            own = [layer for each, layer, format_ in missing if (each, format_) == (kind, name)]
            self._prepare(kind, own, name, on_step)
        if (name_ := layer_set.format_of("head")) is not None and name_ not in self._heads:
            path, weight = self._file("head", name_), cast(Tensor, self.head_map.weight)
            kept = None if path is None else copies_file.read(path, weight.device, self.packed)
            made = None if kept is None else (kept["codes"], kept["scales"])
            self._heads[name_] = quantised([self.head_map], name_, made, self.packed)
            if path is not None and kept is None:
                copies_file.write(path, {"codes": self._heads[name_].codes, "scales": self._heads[name_].scales})

    def _prepare(
        self, kind: Literal["attn", "mlp"], layers: Sequence[int], name: str, on_step: Callable[[str], None] | None
    ) -> None:
        path = self._file(kind, name)
        kept = None if path is None else copies_file.read(path, self._blocks[0].device, self.packed)
        for number, layer in enumerate(layers):
            if on_step is not None and kept is None and number % 4 == 0:
                on_step(f"quantising, {kind} {number + 1} of {len(layers)} as {name}")
            self._parts[kind, layer, name] = self._made(kind, layer, name, _pairs(kept or {}, layer))
        everything = {(kind, layer, name) for layer in range(len(self._blocks))}
        if path is not None and kept is None and everything <= set(self._parts):
            maps = {layer: _maps(self._parts[kind, layer, name], kind) for _, layer, _ in everything}
            pairs = [(f"{layer}.{i}", one) for layer, own in maps.items() for i, one in enumerate(own)]
            tensors = {f"{at}.codes": one.codes for at, one in pairs} | {
                f"{at}.scales": one.scales for at, one in pairs
            }
            copies_file.write(path, tensors)

    def _made(
        self, kind: Literal["attn", "mlp"], layer: int, name: str, kept: Iterator[tuple[Tensor, Tensor]]
    ) -> Parts:
        own = self._blocks[layer].parts
        if kind == "attn":
            qkv = quantised(own.qkv, name, next(kept, None), self.packed)
            return replace(own, qkv=(qkv,), out=quantised([own.out], name, next(kept, None), self.packed))
        return replace(own, mlp=replaced([own.mlp], lambda maps: quantised(maps, name, next(kept, None), self.packed)))

    def _file(self, part: str, name: str) -> Path | None:
        one = self._blocks[0].device
        if self._fingerprint is None or any(block.device != one for block in self._blocks):
            return None
        dtype = cast(Tensor, self.head_map.weight).dtype
        return copies_file.file_of(self._fingerprint, part, name, dtype, one, self.packed)


def _pairs(kept: Mapping[str, Tensor], layer: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Codes and scales of a layer's maps, in their order."""
    for number in count():
        at = f"{layer}.{number}"
        if f"{at}.codes" not in kept:
            return
        yield kept[f"{at}.codes"], kept[f"{at}.scales"]


def _wanted(layer_set: LayerSet) -> list[tuple[Literal["attn", "mlp"], int, str]]:
    """The copies of sub-layers that a draft runs, as (kind, layer, format)."""
    return [
        (kind, layer, name)
        for layer in range(layer_set.n_layers)
        for kind in KINDS
        if not layer_set.skips(kind, layer) and (name := layer_set.format_of(kind, layer)) is not None
    ]


def _maps(parts: Parts, kind: str) -> list[QuantisedLinear]:
    modules = (*parts.qkv, parts.out) if kind == "attn" else (parts.mlp,)
    return [part for module in modules for part in module.modules() if isinstance(part, QuantisedLinear)]
