"""Moves weights to huge pages while a model runs, so that passes have fewer TLB misses.

Weights are first in small pages or in mapped files, because a virtual machine takes several times as long to fill huge
pages for the first time. Then a thread moves them, one page at a time, while passes run: it collapses small pages
(Linux's `MADV_COLLAPSE`), and replaces pages of a mapped file by copies. Addresses and contents stay the same, so no
other code is affected.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from threading import Lock, Thread
from time import perf_counter, sleep
from typing import Any

from torch import Tensor, UntypedStorage, nn

from .block_experts import BlockExperts
from .free_memory import free_memory
from .saved import OnStep, no_step

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
MAPS = Path("/proc/self/maps")
WAIT_S = 1.0  # Delay after a load, so that moving does not delay the first token.
SHARE = 0.3  # Share of a processor's time for moving while the model runs.
MOST_REFUSED = 16  # Give up on a piece of memory after so many pages in a row that cannot be moved.
NEAR = 1 << 16  # Most bytes between two tensors of one piece of memory.
# If memory becomes short, the system can drop pages of a mapped file, but not copies of them. So copies are made only
# while this multiple of their size is free.
ROOM = 2
# Linux constants: advice, protection and flags of mappings.
HUGE, COLLAPSE = 14, 25
READ_WRITE, PRIVATE_ANONYMOUS = 3, 0x22
MOVE_TO_PLACE = 3
FAILED = ctypes.c_void_p(-1).value


def weights_in(model: nn.Module) -> Iterator[Tensor]:
    """Yield all tensors of a model that passes read."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        if isinstance(module, BlockExperts):
            for maps in module.maps.values():
                for map_ in maps:
                    yield from (map_.codes, map_.scales)


class _Piece:
    """A piece of memory with consecutive tensors, and its huge pages that are still to be moved."""

    def __init__(self, tensors: Sequence[Tensor], size: int) -> None:
        self._places = [(_start(tensor), _end(tensor), weakref.ref(tensor)) for tensor in tensors]
        self._starts = [start for start, _, _ in self._places]
        self._reached = list(accumulate((end for _, end, _ in self._places), max))  # With the tensors before each.
        self.pages = range(-(-self._starts[0] // size) * size, self._reached[-1] - size + 1, size)
        self.refused = 0  # Pages since the last one that was moved.

    def held(self, page: int, size: int) -> list[UntypedStorage]:
        """Return the storages of the tensors in a page, to keep them alive; [] if one has been freed."""
        storages, first, last = [], bisect_right(self._reached, page), bisect_left(self._starts, page + size)
        for start, end, reference in self._places[first:last]:
            if end > page:
                tensor = reference()
                if tensor is None or _start(tensor) != start:
                    return []
                storages.append(tensor.untyped_storage())
        return storages

    @cached_property
    def mapped(self) -> list[range]:
        """The address ranges of files that are mapped privately, so that writes stay in this process."""
        mapped = []
        for line in MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
            place, access, _, _, inode, *_ = line.split(maxsplit=5)
            if inode != "0" and access == "rw-p":
                start, end = (int(part, 16) for part in place.split("-"))
                mapped.append(range(start, end))
        return mapped


class PageMover:
    """Moves the pages of tensors in a daemon thread.

    It does nothing on a system without huge pages, or with the setting "never".
    """

    def __init__(self) -> None:
        self._pieces: deque[_Piece] = deque()
        self._size = _page_size()
        self._lock = Lock()
        self._thread: Thread | None = None

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Schedule the huge pages that these tensors fill; tensors on other devices are ignored."""
        if not self._size:
            return
        with self._lock:
            self._pieces.extend(_Piece(piece, self._size) for piece in _pieces(tensors))
            if self._pieces and (self._thread is None or not self._thread.is_alive()):
                self._thread = Thread(target=self._run, name="huge pages", daemon=True)
                self._thread.start()

    def finish(self, on_step: OnStep = no_step) -> None:
        """Move all remaining pages now, before passes are timed."""
        if self._pieces:
            on_step("moving weights to huge pages")
        while self._move():
            pass

    def _run(self) -> None:
        sleep(WAIT_S)
        while True:
            began = perf_counter()
            if not self._move():
                with self._lock:
                    if self._pieces:
                        continue
                    self._thread = None
                    return
            sleep((perf_counter() - began) * (1 / SHARE - 1))

    def _move(self) -> bool:
        """Move the next page; return False if none is left."""
        with self._lock:
            while self._pieces and (not self._pieces[0].pages or self._pieces[0].refused >= MOST_REFUSED):
                self._pieces.popleft()
            if not self._pieces:
                return False
            piece = self._pieces[0]
            page, piece.pages = piece.pages[0], piece.pages[1:]
        # A collapse is safe even if other data is there by now: it keeps contents, and fails for freed memory.
        is_moved = not _libc().madvise(page, self._size, COLLAPSE) or self._copied(piece, page)
        piece.refused = 0 if is_moved else piece.refused + 1
        return True

    def _copied(self, piece: _Piece, page: int) -> bool:
        """Replace a page of a mapped file by a copy; return False if it is not such a page, or memory is short."""
        size, held = self._size, piece.held(page, self._size)
        if not held or not any(page in place and page + size <= place.stop for place in piece.mapped):
            return False
        if free_memory() < ROOM * size * (len(piece.pages) + 1):
            return False
        libc = _libc()
        room = libc.mmap(None, 2 * size, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0)
        if room == FAILED:
            return False
        copy = -(-room // size) * size
        libc.madvise(copy, size, HUGE)
        ctypes.memmove(copy, page, size)
        is_moved = bool(libc.mremap(copy, size, size, MOVE_TO_PLACE, page) == page)
        for start, end in ((room, copy), (copy if not is_moved else copy + size, room + 2 * size)):
            if start < end:
                libc.munmap(start, end - start)
        return is_moved


@cache
def _libc() -> Any:
    library, address, length = ctypes.CDLL(None), ctypes.c_void_p, ctypes.c_size_t
    library.madvise.argtypes = address, length, ctypes.c_int
    library.mmap.argtypes = address, length, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    library.mmap.restype = library.mremap.restype = address
    library.mremap.argtypes = address, length, length, ctypes.c_int, address
    library.munmap.argtypes = address, length
    return library


def _page_size() -> int:
    """Return the bytes of a huge page; 0: this system does not use them."""
    if sys.platform == "linux":
        with suppress(OSError, ValueError):
            if "[never]" not in (SETTINGS / "enabled").read_text(encoding="ascii"):
                return int((SETTINGS / "hpage_pmd_size").read_text(encoding="ascii"))
    return 0


def _start(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _end(tensor: Tensor) -> int:
    """Return the address after the last value of a tensor, which may be strided."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.data_ptr() + tensor.element_size() * (1 + sum((n - 1) * step for n, step in steps))


def _pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors by the pieces of memory that they are in."""
    piece: list[Tensor] = []
    end = 0
    for tensor in sorted((t for t in tensors if t.device.type == "cpu" and t.numel()), key=_start):
        if piece and _start(tensor) > end + NEAR:
            yield piece
            piece = []
        piece.append(tensor)
        end = max(end, _end(tensor))
    if piece:
        yield piece


PAGES = PageMover()
