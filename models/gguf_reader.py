"""Reads GGUF files: metadata and tensor positions. Files are memory-mapped, so no weights are copied.

Every count, length and offset is checked against the file's size before use, so that a damaged or malicious file only
causes an error message.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ModelNotFound, UnsupportedModel, cut_short
from .saved import MAGIC, refuse_other_file

VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Tensor types by number in GGUF files: name, values per block, bytes per block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
LENGTH = struct.Struct("<Q")  # The length in bytes before every string.
MOST_DIMENSIONS = 4
LONGEST_NAME = 64  # Characters of a name shown in a message: GGUF's maximum for tensor names.
DEEPEST_ARRAY = 2  # Deepest nesting of arrays that is read: GGUF allows any, but no writer nests them.
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file.

    `shape` is in torch's order: values along the last dimension are adjacent. `data`, uint8 (bytes,), has the stored
    blocks of the type `kind`, a key of `TYPES`.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @property
    def type_name(self) -> str:
        return TYPES[self.kind][0]

    @property
    def n_values(self) -> int:
        return math.prod(self.shape)


def _decoded(text: bytes) -> str:
    """Decode a string of a file; invalid UTF-8 is kept as surrogates, because a token may be any bytes."""
    return text.decode("utf-8", "surrogateescape")


class Texts(Sequence[str]):
    """An array of strings of a file, decoded at the first use; not needed if the cache has the tokenizer."""

    def __init__(self, content: mmap.mmap, first: int, n: int) -> None:
        """Args: first: offset in `content` of the first string's length; `n` complete strings follow."""
        self._content, self._first, self._n = content, first, n

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.values[index]

    @cached_property
    def values(self) -> list[str]:
        content, at, length_at = self._content, self._first, LENGTH.unpack_from
        values: list[str] = []
        for _ in range(self._n):
            start = at + LENGTH.size
            at = start + length_at(content, at)[0]
            values.append(_decoded(content[start:at]))
        return values


class _Damaged(Exception):
    """The file is damaged; the message completes a sentence that begins with the file's name."""


class _Header:
    """A cursor that reads a file's header."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at = content, 0

    def take(self, n_bytes: int) -> int:
        """Return the offset of the next `n_bytes`, and move behind them. Raises: _Damaged: the file ends before."""
        at = self.at
        if n_bytes > len(self.content) - at:
            raise _Damaged("ends in its header")
        self.at = at + n_bytes
        return at

    def number(self, form: str) -> Any:
        return struct.unpack_from(f"<{form}", self.content, self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        n_bytes = self.number("Q")
        at = self.take(n_bytes)
        return _decoded(self.content[at : at + n_bytes])

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            if kind not in SCALARS:
                raise _Damaged(f"has a setting of the unknown type {kind}")
            return self.number(SCALARS[kind])
        item_kind, n_values = self.number("I"), self.number("Q")
        if depth >= DEEPEST_ARRAY:
            raise _Damaged("nests arrays too deeply")
        if item_kind in SCALARS:
            form = np.dtype(SCALARS[item_kind]).newbyteorder("<")
            at = self.take(n_values * form.itemsize)
            return np.frombuffer(self.content, form, n_values, at).tolist()
        if n_values > len(self.content) - self.at:  # A string or array takes at least eight bytes.
            raise _Damaged("ends in its header")
        if item_kind == STRING:
            return self._texts(n_values)
        return [self.value(item_kind, depth + 1) for _ in range(n_values)]

    def _texts(self, n_values: int) -> Texts:
        """Return an array of strings, reading only their lengths: a vocabulary has hundreds of thousands of strings."""
        content, at, length_at = self.content, self.at, LENGTH.unpack_from
        texts = Texts(content, at, n_values)
        try:
            for _ in range(n_values):
                at += LENGTH.size + length_at(content, at)[0]
        except (struct.error, OverflowError):  # A length is after the end of the file, or leads beyond any address.
            raise _Damaged("ends in its header") from None
        self.take(at - self.at)
        return texts


class GgufFile:
    """A GGUF file, or the files that one model is split into; `settings` has the metadata by full key.

    Raises: ModelNotFound: a file cannot be read, is damaged or cut short, or is missing. UnsupportedModel: a tensor has
            an unknown type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: dict[str, Any] = {}
        self.tensors: dict[str, FileTensor] = {}
        self._maps: list[mmap.mmap] = []
        self._states: dict[Path, tuple[int, ...]] = {}  # Each part's `_state` when it was mapped.
        for part in parts_of(path):
            try:
                self._read(part)
            except _Damaged as error:
                raise ModelNotFound(f"{part} {error}: download it again") from None
        n_parts = self.settings.get("split.count", 1)
        if isinstance(n_parts, int) and n_parts > max(1, len(self._maps)):
            raise ModelNotFound(
                f"{path} is one of {n_parts} files that hold the model together: keep them in one folder under the"
                " names that they were written with, which end in -00001-of-00002.gguf and so on"
            )
        n_tensors = self.settings.get("split.tensors.count", len(self.tensors))
        if n_tensors != len(self.tensors):
            raise ModelNotFound(
                f"{path} has {len(self.tensors)} tensors, and says that there are {n_tensors}: download it again"
            )

    @property
    def architecture(self) -> str:
        return str(self.settings.get("general.architecture", ""))

    @property
    def n_values(self) -> int:
        return sum(tensor.n_values for tensor in self.tensors.values())

    def own_settings(self) -> dict[str, Any]:
        """Return the settings of the architecture, without its prefix in their names."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.settings.items() if key.startswith(prefix)}

    def refuse_changed(self) -> None:
        """Raises: ModelNotFound: a part was truncated or written to since it was mapped.

        Reading past a file's new end would kill the process (SIGBUS). A part that was removed, or replaced by another
        file, stays readable while it is mapped.
        """
        for path, state in self._states.items():
            try:
                now = _state(path.stat())
            except OSError:
                continue
            if now[:2] == state[:2] and now != state:
                raise ModelNotFound(f"{path} was changed while it was read: load it again when its writer is done")

    def is_current(self) -> bool:
        """Tell whether the parts' paths still lead to the same, unchanged files."""
        try:
            return all(_state(path.stat()) == state for path, state in self._states.items())
        except OSError:
            return False

    def release(self, tensor: FileTensor) -> None:
        """Let the system drop the mapped pages of a tensor; a later access reads them from the file again."""
        address = tensor.data.__array_interface__["data"][0]
        for content in self._maps:
            start = np.frombuffer(content, np.uint8).__array_interface__["data"][0]
            if start <= address < start + len(content):
                first = (address - start) // mmap.PAGESIZE * mmap.PAGESIZE
                with suppress(OSError, ValueError):
                    content.madvise(mmap.MADV_DONTNEED, first, address - start + tensor.data.nbytes - first)

    def _read(self, path: Path) -> None:
        try:
            refuse_other_file(path)
            with path.open("rb") as file:
                self._states[path] = _state(os.fstat(file.fileno()))
                # Copy-on-write, because torch requires writable memory; nothing writes to it.
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ModelNotFound(f"{path} cannot be read ({reason}): check its permissions") from error
        self._maps.append(content)
        header = _Header(content)
        header.take(len(MAGIC))
        version = header.number("I")
        if version not in VERSIONS:
            raise _Damaged(f"is of version {version}, and versions {VERSIONS[0]} and {VERSIONS[1]} are read")
        n_tensors, n_settings = header.number("Q"), header.number("Q")
        for _ in range(n_settings):
            key = header.text()
            value = header.value(header.number("I"))
            if not (key.startswith("split.") and key in self.settings):
                self.settings[key] = value
        entries = [self._tensor_entry(header) for _ in range(n_tensors)]
        alignment = self.settings.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= len(content) or alignment & (alignment - 1):
            raise _Damaged("has an alignment that is no power of two")
        start = -(-header.at // alignment) * alignment
        ranges: list[tuple[int, int, str]] = []
        for name, kind, shape, offset in entries:
            _, block, block_bytes = TYPES[kind]
            if shape[-1] % block:
                raise _Damaged(f"has rows of {shape[-1]} values in {_shown(name)}, no whole blocks of {block}")
            n_bytes = math.prod(shape) // block * block_bytes
            if offset % alignment or offset + n_bytes > len(content) - start:
                raise _Damaged(f"is cut short, or names a wrong place for {_shown(name)}")
            if name in self.tensors:
                raise _Damaged(f"has two tensors {_shown(name)}")
            ranges.append((offset, offset + n_bytes, name))
            data = np.frombuffer(content, np.uint8, n_bytes, start + offset)
            self.tensors[name] = FileTensor(name, kind, shape, data)
        ranges.sort()
        for (_, end, first), (begin, _, second) in pairwise(ranges):
            if begin < end:
                raise _Damaged(f"has {_shown(first)} and {_shown(second)} in one place")

    def _tensor_entry(self, header: _Header) -> tuple[str, int, tuple[int, ...], int]:
        name, n_dimensions = header.text(), header.number("I")
        if not 0 < n_dimensions <= MOST_DIMENSIONS:
            raise _Damaged(f"has {n_dimensions} dimensions in {_shown(name)}")
        shape = tuple(header.number("Q") for _ in range(n_dimensions))[::-1]
        kind, offset = header.number("I"), header.number("Q")
        if kind not in TYPES:
            type_names = ", ".join(type_name for type_name, _, _ in TYPES.values())
            raise UnsupportedModel(
                f"{self.path} has the tensor {_shown(name)} of type {kind}, which is not read: use a file of"
                f" {type_names}"
            )
        if not all(shape):
            raise _Damaged(f"has no values in {_shown(name)}")
        return name, kind, shape, offset


def _state(status: os.stat_result) -> tuple[int, ...]:
    """Identify a file and its version: device and inode, size and time of the last change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _shown(name: str) -> str:
    """Shorten a name from a file for a message."""
    return cut_short(name, LONGEST_NAME)


def parts_of(path: Path) -> Iterator[Path]:
    """Yield the files that a model is split into, in order; if it is not split, the file alone.

    Raises: ModelNotFound: one of them is missing.
    """
    part = PART.search(path.name)
    if part is None:
        yield path
        return
    for number in range(1, int(part[2]) + 1):
        other = path.with_name(f"{path.name[: part.start()]}-{number:05}-of-{part[2]}.gguf")
        if not other.is_file():
            raise ModelNotFound(f"{other} is missing, a part of the model in {path}: download it, too")
        yield other
