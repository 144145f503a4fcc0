"""Packs the weights of a GGUF file for our kernels (`kernels/gguf.h`), also while torch is still being imported.

Packing changes no weight: scales stay as they are, and so do codes, which get more bits if no kernel supports their
number of bits. Packing does not need torch, and importing torch takes about as long; so `begin_packing` packs in a
thread meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Condition, Thread
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.errors import SwiftoptError
from ..core.requests import Speed
from ..core.settings import n_threads
from .free_memory import free_memory
from .gguf_forms import FORMS
from .gguf_layers import ENCODER_TENSORS, TOKEN_TABLE, unused_keys
from .gguf_reader import FileTensor, GgufFile, parts_of
from .gguf_settings import NEXT_LAYERS
from .kernels import layout
from .kernels.build import Kernels, kernels

SUPER = 256  # Inputs of a super-block: K-quant types store one float16 scale (and minimum) for each.
# Numbers per group and output for these scale types; other types have two.
SCALE_NUMBERS = {layout.CENTRED: 1, layout.SUPER_CENTRED: 1, layout.EXPONENTS: 1}
SCALE_BYTES = {layout.ZERO_CODES_F32: 4, layout.EXPONENTS: 1}  # Bytes per number; other types have two.
MOST_TYPES = 64
PACKED_BYTES = 16 << 20  # Bytes of a file that are packed in one call.
MAPPED = 1 << 20  # Packed weights of at least so many bytes get a mapping of their own.
LINE = 64  # Bytes of a cache line, to which codes are aligned.
# Packing begins early only if this multiple of the file's size is free: otherwise the load may be refused.
ROOM = 2
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.weight$")
GPUS = ("nvidia[0-9]*", "kfd", "dxg")  # Files in /dev with which the device "auto" may be a GPU.


class BlockForm(NamedTuple):
    """The packed form of a GGUF tensor type, and the bytes and inputs of a block in the file."""

    block_bytes: int
    inputs: int
    bits: int
    group: int
    scale_type: int
    table: int

    def scale_bytes(self, n_in: int) -> int:
        """Return the bytes of the scales of a block of outputs."""
        numbers, groups = SCALE_NUMBERS.get(self.scale_type, 2) * layout.ROWS, n_in // self.group
        if self.scale_type >= layout.SUPER_PAIRS:
            return numbers * (groups + 2 * n_in // SUPER)
        return numbers * groups * SCALE_BYTES.get(self.scale_type, 2)

    def map(self, codes: int, scales: int, n_in: int, n_out: int, bias: int | None = None) -> layout.Map:
        """Describe a map to our kernels, given the addresses of its parts."""
        form = n_in, n_out, self.bits, self.group, self.scale_type, self.table
        return layout.Map(codes, bias, scales, None, 0, *form)


@cache
def forms(kernels: Kernels) -> dict[int, BlockForm]:
    """Return the GGUF tensor types that the kernels support, by type number."""
    numbers = (ctypes.c_int32 * (7 * MOST_TYPES))()
    n_types = kernels.gguf_types(numbers)
    rows = (numbers[7 * i : 7 * i + 7] for i in range(n_types))
    return {kind: BlockForm(*form) for kind, *form in rows}


class PackedArrays(NamedTuple):
    """A weight (out, in) as our kernels read it: codes and scales, each uint8 (blocks of outputs, bytes)."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    n_out: int
    n_in: int
    form: BlockForm
    kernels: Kernels


def packed_arrays(
    tensor: FileTensor,
    kernels: Kernels,
    order: NDArray[np.int32] | None = None,
    release: Callable[[FileTensor], None] = lambda tensor: None,
    threads: Callable[[], int] = n_threads,
) -> PackedArrays:
    """Pack a file's tensor (out, in).

    Args:   order: (out,), the row of the tensor for each output. release: called with each part of the tensor after it
            is packed, to drop its pages from memory. threads: number of threads.
    Raises: MemoryError: there is too little memory.
    """
    form, (n_out, n_in) = forms(kernels)[tensor.kind], tensor.shape
    n_blocks, row_bytes = -(-n_out // layout.ROWS), n_in // form.inputs * form.block_bytes
    codes = _room(n_blocks, n_in * layout.ROWS * form.bits // 8)
    scales = _room(n_blocks, form.scale_bytes(n_in))
    # With an order, any row may be needed, so all rows are packed in one call.
    step = n_out if order is not None else max(1, PACKED_BYTES // row_bytes // layout.ROWS) * layout.ROWS
    for first in range(0, n_out, step):
        n_rows, block = min(step, n_out - first), first // layout.ROWS
        rows = tensor.data.reshape(-1)[first * row_bytes : (first + n_rows) * row_bytes]
        part = form.map(_address(codes[block:]), _address(scales[block:]), n_in, n_rows)
        order_at = None if order is None else _address(order)
        if kernels.repack(tensor.kind, _address(rows), order_at, ctypes.byref(part), threads()):
            raise MemoryError(f"laying out {tensor.name} needs more memory or threads than there are")
        release(replace(tensor, data=rows))
    return PackedArrays(codes, scales, n_out, n_in, form, kernels)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _room(n_blocks: int, n_bytes: int) -> NDArray[np.uint8]:
    """Return memory for blocks, uint8 (n_blocks, n_bytes), aligned to a cache line.

    Raises: MemoryError: there is too little memory.
    """
    size = n_blocks * n_bytes
    if size >= MAPPED:
        try:
            # numpy would request huge pages, and a virtual machine takes several times as long to fill these for the
            # first time. `huge_pages` moves weights to them later.
            pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"there is no memory for {size} bytes of weights") from error
        return np.frombuffer(pages, np.uint8).reshape(n_blocks, n_bytes)
    whole = np.empty(size + LINE, np.uint8)
    start = -_address(whole) % LINE
    return whole[start : start + size].reshape(n_blocks, n_bytes)


class EarlyPacking:
    """Packs tensors of a file in a thread, in the order of the file, for a load that follows.

    The load packs the other tensors itself, and so raises the error if packing one fails. `n_bytes` is the number of
    the file's bytes that are packed so far.
    """

    def __init__(self, file: GgufFile, kernels: Kernels) -> None:
        self.kernels, self.n_bytes = kernels, 0
        self.file, self._changed = file, Condition()
        self._tensors = {tensor.name: tensor for tensor in _whole_maps(file, kernels)}
        self._packed: dict[str, PackedArrays] = {}
        self._is_awaited = self._has_ended = False
        Thread(target=self._run, name="packing", daemon=True).start()

    def take(self, tensor: FileTensor) -> PackedArrays | None:
        """Wait for a tensor's packed weights and return them; None: the caller must pack the tensor."""
        if self._tensors.get(tensor.name) is not tensor:  # The thread packs only whole tensors of the file.
            return None
        with self._changed:
            self._is_awaited = True
            self._changed.wait_for(lambda: tensor.name in self._packed or self._has_ended)
            return self._packed.pop(tensor.name, None)

    def stop(self) -> None:
        """Pack no further tensors, and free those that were not taken."""
        with self._changed:
            self._tensors = {}
            self._packed.clear()

    def _run(self) -> None:
        try:
            # The load will raise the same error and report it.
            with suppress(SwiftoptError, MemoryError):
                for tensor in list(self._tensors.values()):
                    if not self._tensors:
                        break
                    self.file.refuse_changed()
                    packed = packed_arrays(tensor, self.kernels, None, self._release, self._threads)
                    with self._changed:
                        if self._tensors:
                            self._packed[tensor.name] = packed
                        self._changed.notify_all()
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _release(self, part: FileTensor) -> None:
        self.n_bytes += part.data.nbytes
        self.file.release(part)

    def _threads(self) -> int:
        return n_threads() if self._is_awaited else max(1, n_threads() - 1)


def _whole_maps(file: GgufFile, kernels: Kernels) -> Iterator[FileTensor]:
    """Yield the tensors that probably become linear maps unchanged, judged by the file's header.

    If the load needs another form of a tensor, packing it was wasted.
    """
    own_forms = [form for form in FORMS.values() if file.architecture in form.architectures]
    # Tensors that are joined with others or split into several maps, or whose rows are reordered.
    others = {part for form in own_forms for parts in form.joined.values() for part in parts} | {"attn_qkv"}
    others |= {part for form in own_forms for part in form.stacked.values()}
    others |= {"attn_q", "attn_k"} if any(form.pairs_halves for form in own_forms) else set()
    others |= {"attn_gate", "ssm_alpha", "ssm_beta"} if any(form.tiled_heads for form in own_forms) else set()
    settings = file.own_settings()
    n_layers = int(settings.get("block_count", 0)) - int(settings.get(NEXT_LAYERS, 0))
    unread = {TOKEN_TABLE, *unused_keys(file, n_layers)}
    for tensor in file.tensors.values():
        name = _LAYER.match(tensor.name)
        is_loaded = name is None or (int(name[1]) < n_layers and name[2] not in others)
        is_loaded = is_loaded and tensor.name not in unread and not tensor.name.startswith(ENCODER_TENSORS)
        is_scaled = f"{tensor.name.removesuffix('.weight')}.scale" in file.tensors
        if is_loaded and not is_scaled and len(tensor.shape) == 2 and tensor.kind in forms(kernels):
            yield tensor


_begun: dict[Path, EarlyPacking] = {}  # By path of a file that will be loaded.
_taken: dict[GgufFile, EarlyPacking] = {}  # By file that is being loaded.


def begin_packing(path: Path, dtype: str, device: str, speed: Speed) -> None:
    """Start to pack a file's weights in a thread, if a load with the same arguments will need packed weights.

    Nothing is packed if only one thread may compute, if the device "auto" may be a GPU, or if memory may be short.

    Raises: ModelNotFound, UnsupportedModel: as `GgufFile`. SettingsError: as `kernels`.
    """
    if path in _begun or dtype not in ("auto", "bfloat16") or speed not in ("auto", "exact") or n_threads() < 2:
        return
    if device != "cpu" and (device != "auto" or any(any(Path("/dev").glob(name)) for name in GPUS)):
        return
    chosen = kernels()
    if isinstance(chosen, str) or ROOM * sum(part.stat().st_size for part in parts_of(path)) > free_memory():
        return
    _begun[path] = EarlyPacking(GgufFile(path), chosen)


@contextmanager
def opened(path: Path, dtype: str, device: str, speed: Speed) -> Iterator[GgufFile]:
    """Open a file for a load with these arguments; meanwhile its weights are packed as in `begin_packing`.

    Raises: as `begin_packing`.
    """
    begin_packing(path, dtype, device, speed)
    begun = _begun.pop(path, None)
    if begun is not None and not begun.file.is_current():
        begun.stop()
        begun = None
    if begun is None:
        yield GgufFile(path)
        return
    _taken[begun.file] = begun
    try:
        yield begun.file
    finally:
        del _taken[begun.file]
        begun.stop()


def packing_of(file: GgufFile) -> EarlyPacking | None:
    """Return the packing of a file that is `opened`; None: it is not packed early."""
    return _taken.get(file)
