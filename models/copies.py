"""Quantised copies of a model's sub-layers and head, for drafts; the target itself is never touched.

On disk a copy is kept per model, format and kind of processor, and read back in about a second per GB.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Literal, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..core.types import LayerSet
from .blocks import Block, LayerModules
from .quantised import QuantisedLinear, quantised, replaced
from .saved import cache_root, remove_stale

HASH = re.compile(r"v\d+:[0-9a-f]{16}")  # what `models.fingerprint` gives; made-up names of tests are none
LAYOUT = "1"  # part of every file's name; raise it when weights are rounded or packed another way
PART = ".part"  # of a file's name, while the copy is being written
LEAST_BYTES = 16 << 20  # smaller copies are made faster than read
KINDS: tuple[Literal["attn", "mlp"], ...] = ("attn", "mlp")


class QuantisedCopies:
    """The quantised copies that drafts of one model asked for so far.

    Those of a model with a real fingerprint, a hash of its weights, are kept on disk for the next process.
    """

    def __init__(self, blocks: Sequence[Block], head: nn.Module, fingerprint: str) -> None:
        self._blocks, self.head_map = blocks, head
        self._fingerprint = fingerprint if HASH.fullmatch(fingerprint) else None
        self.packed = False  # for our kernels
        self._parts: dict[tuple[str, int, str], LayerModules] = {}
        self._heads: dict[str, QuantisedLinear] = {}

    @property
    def n_bytes(self) -> int:
        """Memory that all copies hold."""
        return sum(self._bytes_of(*key) for key in self._parts) + sum(head.n_bytes for head in self._heads.values())

    def bytes_of(self, layer_set: LayerSet) -> int:
        """Return the memory of the copies that a draft with that set runs, as far as they have been made."""
        own = sum(self._bytes_of(*key) for key in _wanted(layer_set) if key in self._parts)
        head = self._heads.get(layer_set.format_of("head") or "")
        return own + (0 if head is None else head.n_bytes)

    def _bytes_of(self, kind: str, layer: int, name: str) -> int:
        return sum(one.n_bytes for one in _maps(self._parts[kind, layer, name], kind))

    @torch.inference_mode()
    def parts(self, kind: Literal["attn", "mlp"], layer: int, name: str) -> LayerModules:
        """Return the modules of a layer with that sub-layer's linear maps quantised; made at the first call."""
        key = (kind, layer, name)
        if key not in self._parts:
            self._parts[key] = self._made(kind, layer, name, iter(()))
        return self._parts[key]

    @torch.inference_mode()
    def head(self, name: str) -> QuantisedLinear:
        """Return the quantised head; made at the first call."""
        if name not in self._heads:
            self._heads[name] = quantised([self.head_map], name, packed=self.packed)
        return self._heads[name]

    def lay_out(self, packed: bool) -> None:
        """Make copies from now on for our kernels (`packed`) or for torch's; those for the others are dropped."""
        if packed != self.packed:
            self.packed = packed
            self._parts.clear()
            self._heads.clear()

    def drop(self, name: str) -> None:
        """Free all copies in a format; one that is asked for again is made, or read, again."""
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
            kept = None if path is None else read_copy(path, weight.device, self.packed)
            made = None if kept is None else (kept["codes"], kept["scales"])
            self._heads[name_] = quantised([self.head_map], name_, made, self.packed)
            if path is not None and kept is None:
                write_copy(path, {"codes": self._heads[name_].codes, "scales": self._heads[name_].scales})

    def _prepare(
        self, kind: Literal["attn", "mlp"], layers: Sequence[int], name: str, on_step: Callable[[str], None] | None
    ) -> None:
        path = self._file(kind, name)
        kept = None if path is None else read_copy(path, self._blocks[0].device, self.packed)
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
            write_copy(path, tensors)

    def _made(
        self, kind: Literal["attn", "mlp"], layer: int, name: str, kept: Iterator[tuple[Tensor, Tensor]]
    ) -> LayerModules:
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
        return copy_file(self._fingerprint, part, name, dtype, one, self.packed)


def _pairs(kept: Mapping[str, Tensor], layer: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield codes and scales of a layer's maps, in their order."""
    for number in count():
        at = f"{layer}.{number}"
        if f"{at}.codes" not in kept:
            return
        yield kept[f"{at}.codes"], kept[f"{at}.scales"]


def _wanted(layer_set: LayerSet) -> list[tuple[Literal["attn", "mlp"], int, str]]:
    """Return the copies of sub-layers that a draft runs, as (kind, layer, format)."""
    return [
        (kind, layer, name)
        for layer in range(layer_set.n_layers)
        for kind in KINDS
        if not layer_set.skips(kind, layer) and (name := layer_set.format_of(kind, layer)) is not None
    ]


def _maps(parts: LayerModules, kind: str) -> list[QuantisedLinear]:
    modules = (*parts.qkv, parts.out) if kind == "attn" else (parts.mlp,)
    return [part for module in modules for part in module.modules() if isinstance(part, QuantisedLinear)]


def copy_file(
    fingerprint: str, part: str, name: str, dtype: torch.dtype, device: torch.device, packed: bool = False
) -> Path:
    """Return the file of the copy of a part (`attn`, `mlp`, `head`) in a format; torch packs codes by the processor."""
    if packed:
        key = "|".join((LAYOUT, fingerprint, part, name, "packed"))
    else:
        kernel = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else str(torch.version.cuda)
        key = "|".join((LAYOUT, fingerprint, part, name, str(dtype), device.type, kernel, torch.__version__))
    return cache_root() / "quantised" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"


def read_copy(path: Path, device: torch.device, packed: bool = False) -> dict[str, Tensor] | None:
    """Read a copy; None where there is none that can be read."""
    try:
        found = load_file(path, device=str(device))
        # In the mapped file tensors begin anywhere. Our kernels read them there; torch's int8 kernel dies of codes that
        # are not aligned, and gets a copy in memory of torch's own.
        return found if packed else {key: tensor.clone() for key, tensor in found.items()}
    except (OSError, SafetensorError):
        return None


def write_copy(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a copy where there is room for it; it can be made again."""
    if sum(tensor.nbytes for tensor in tensors.values()) < LEAST_BYTES:
        return
    part: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(path.parent.glob(f"*{PART}"))
        handle, name = tempfile.mkstemp(suffix=PART, dir=path.parent)
        os.close(handle)
        part = Path(name)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, part)
        part.chmod(0o644)  # another user may share the cache
        part.replace(path)
    except (OSError, SafetensorError):
        if part is not None:
            part.unlink(missing_ok=True)
