"""A second tier of kept prefixes, on disk: keys and values in the model's dtype, for later and for the next start.

Texts are stored in blocks of BLOCK_TOKENS tokens. A block is named by a hash over the salt and all tokens up to its
end, so texts with a common prefix share blocks, and only a text with the same salt and tokens finds a block. A model
with recurrent layers can continue a text only at places with known states. Each such place has a separate file, with
the states and the slots after the last whole block before it, named by a hash of the same kind and its number of
tokens. A folder belongs to one model, machine and software version, so the data read back have the bits of reading the
prompt again.

Source: blocks named by the hash of their prefix are those of vLLM's prefix cache (arXiv:2309.06180).
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.requests import owner_of
from ..models.buffer import KVBuffer
from ..models.costs import machine_name, software_of
from ..models.runtime import Runtime
from .corpus_files import OwnerFolders
from .prefixes import Prefix
from .work import Slots

BLOCK_TOKENS = 128
# Of a file: MARK, CRC-32 of the rest, values of the mean state, bytes of the slots. Recurrent states follow.
HEADER = struct.Struct("<4sIIQ")
MARK = b"SwP2"
LENGTH_BYTES = 4
NAME_BYTES = hashlib.sha256().digest_size  # Of a block's name; that of a place is longer by its number of tokens.
SUFFIX, UNFINISHED = ".block", ".tmp"

logger = logging.getLogger(__name__)


def identity_of(runtime: Runtime) -> str:
    """Return everything on which the bits of keys and values depend."""
    parts = runtime.info.fingerprint, machine_name(runtime), software_of(runtime), runtime.dtype_name
    return "\0".join((*parts, str(runtime.exact)))


class StoredBlock(NamedTuple):
    """A stored block, or a place with its states: its file and size."""

    path: Path
    n_bytes: int


class StoredText(NamedTuple):
    """The stored part of a text, `n_tokens` tokens: the names of its blocks and of the place after them."""

    n_tokens: int
    blocks: list[bytes]
    place: bytes | None = None

    @property
    def names(self) -> list[bytes]:
        return self.blocks if self.place is None else [*self.blocks, self.place]


NOTHING = StoredText(0, [])


class PrefixFolder(OwnerFolders):
    """Blocks of the texts of one runtime in a folder; a thread writes them, so that no request waits for the disk.

    Args:   root: may contain other models' blocks, too. max_bytes: limit for all blocks in it when it is opened, and
            for this runtime's from then on; the least recently used ones are removed.
    Raises: SettingsError: another process uses the folder. OutputError: it cannot be written to.
    """

    def __init__(self, root: Path, runtime: Runtime, max_bytes: int) -> None:
        super().__init__(root, identity_of(runtime), "--keep-prefixes")
        self.runtime, self.max_bytes = runtime, max_bytes
        self.n_read = 0  # Tokens read from disk since the start.
        self._lock_index = threading.Lock()
        self._blocks = self._index()  # Least recently used first.
        # Numbers of tokens of all stored places, also of some that were removed.
        self._lengths = {_length(name) for name in self._blocks if len(name) > NAME_BYTES}
        self._texts: Queue[Prefix | None] = Queue()
        self._writer = threading.Thread(target=self._write_texts, name="prefixes", daemon=True)
        self._writer.start()

    @property
    def n_bytes(self) -> int:
        with self._lock_index:
            return sum(block.n_bytes for block in self._blocks.values())

    def _index(self) -> OrderedDict[bytes, StoredBlock]:
        """Return this runtime's blocks, after removing the oldest of all until they fit."""
        for unfinished in self.model.glob(f"*/*{UNFINISHED}"):
            unfinished.unlink(missing_ok=True)
        stats = [(path, path.stat()) for path in self.root.glob(f"*/*/*{SUFFIX}")]
        stats.sort(key=lambda path_and_stat: path_and_stat[1].st_mtime_ns, reverse=True)
        n_bytes, kept = 0, list[tuple[bytes, StoredBlock]]()
        for path, stat in stats:
            n_bytes += stat.st_size
            if n_bytes > self.max_bytes:
                path.unlink(missing_ok=True)
            elif path.parent.parent == self.model:
                kept.append((bytes.fromhex(path.stem), StoredBlock(path, stat.st_size)))
        return OrderedDict(reversed(kept))

    def store(self, prefix: Prefix) -> None:
        """Queue a kept text for storing; what has been evicted by then is not stored."""
        if prefix.slots.runtime is self.runtime and len(prefix.token_ids) >= BLOCK_TOKENS:
            self._texts.put(prefix)

    def n_stored(self, slots: Slots) -> int:
        """Return the number of stored tokens at a text's start, always fewer than all of them."""
        return self._stored(slots).n_tokens

    def _stored(self, slots: Slots) -> StoredText:
        """Return the stored part of a text, always fewer than all of its tokens."""
        if slots.runtime is not self.runtime:
            return NOTHING
        token_ids = slots.tokens[:-1]
        names = _names(slots.salt, token_ids)
        with self._lock_index:
            n_blocks = next((n for n, name in enumerate(names) if name not in self._blocks), len(names))
            if not self.runtime.recurrent:
                return StoredText(n_blocks * BLOCK_TOKENS, names[:n_blocks])
            longest = min(len(token_ids), (n_blocks + 1) * BLOCK_TOKENS - 1)
            for length in sorted((one for one in self._lengths if one <= longest), reverse=True):
                if (place := _place_name(slots.salt, token_ids, names, length)) in self._blocks:
                    return StoredText(length, names[: length // BLOCK_TOKENS], place)
        return NOTHING

    def reading(self, slots: Slots, buffer: KVBuffer, n_filled: int) -> Iterator[tuple[int, Tensor | None]]:
        """Read the stored part of a text after its first `n_filled` tokens into a buffer, one file per step.

        Yields the number of tokens after which the text can continue so far, and the mean state of their text. Reading
        stops at a missing or damaged file.
        """
        while (text := self._stored(slots)).n_tokens > n_filled:
            self._touch(text.names)
            for number in range(n_filled // BLOCK_TOKENS, len(text.names)):
                start = number * BLOCK_TOKENS
                name, is_place = text.names[number], number == len(text.blocks)
                end = text.n_tokens if is_place else start + BLOCK_TOKENS
                try:
                    state = self._read(name, buffer, start, end, is_place)
                except (OSError, ValueError) as error:
                    logger.warning("prefix=lost reason=%r", str(error))
                    self._remove(name)
                    break  # Less is stored now.
                if is_place or text.place is None:
                    self.n_read += end - n_filled
                    n_filled = end
                yield n_filled, state

    def _touch(self, names: Sequence[bytes]) -> None:
        """Mark blocks as most recently used, a text's first one last, because the others are useless without it."""
        now_ns = time.time_ns()
        with self._lock_index:
            for number, name in enumerate(reversed(names)):
                if (block := self._blocks.get(name)) is not None:
                    self._blocks.move_to_end(name)
                    with suppress(OSError):
                        # Use distinct times, because the system's clock may give several files the same one.
                        os.utime(block.path, ns=(now_ns + number, now_ns + number))

    def _read(self, name: bytes, buffer: KVBuffer, start: int, end: int, is_place: bool) -> Tensor | None:
        with self._lock_index:
            block = self._blocks.get(name)
        if block is None:
            raise ValueError("a block was removed meanwhile")
        content: Any = np.fromfile(block.path, np.uint8)
        if len(content) < HEADER.size:
            raise ValueError(f"the file {block.path} is damaged")
        mark, checksum, n_state, n_slot_bytes = HEADER.unpack_from(content)
        body, n_before = content[HEADER.size :], 4 * n_state + n_slot_bytes
        n_states = len(body) - n_before
        if mark != MARK or n_states < 0 or (n_states and not is_place) or zlib.crc32(body) != checksum:
            raise ValueError(f"the file {block.path} is damaged")
        buffer.restore(start, end, body[4 * n_state : n_before])
        if is_place:
            buffer.restore_states(end, body[n_before:])
        return torch.from_numpy(body[: 4 * n_state].view("<f4").copy()) if n_state else None

    def _write_texts(self) -> None:
        while (prefix := self._texts.get()) is not None:
            try:
                self._write(prefix)
            except OSError as error:
                logger.warning("prefix=not stored reason=%r", str(error))
            finally:
                self._texts.task_done()
            del prefix  # It may be evicted meanwhile, and this thread must not keep its memory.

    def _write(self, prefix: Prefix) -> None:
        salt, token_ids, buffer = prefix.slots.salt, prefix.token_ids, prefix.buffer
        names = _names(salt, token_ids)
        files = [(name, number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS) for number, name in enumerate(names)]
        for end in buffer.places(len(token_ids)):
            start = end // BLOCK_TOKENS * BLOCK_TOKENS
            files.append((_place_name(salt, token_ids, names, end), start, end))
        folder = self.of(owner_of(salt))
        for name, start, end in files:
            with self._lock_index:
                is_stored = name in self._blocks
            if not prefix.is_kept:
                return
            if not is_stored:
                self._write_file(prefix, name, start, end, folder)
        self._touch([name for name, _, _ in files])

    def _write_file(self, prefix: Prefix, name: bytes, start: int, end: int, folder: Path) -> None:
        is_place = len(name) > NAME_BYTES
        slot_bytes = prefix.buffer.saved(start, end).tobytes()
        states = prefix.buffer.saved_states(end) if is_place else b""
        mean = prefix.slots.state
        mean_bytes = b"" if mean is None else mean.float().cpu().numpy().astype("<f4").tobytes()
        parts = mean_bytes, slot_bytes, states
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        header = HEADER.pack(MARK, checksum, len(mean_bytes) // 4, len(slot_bytes))
        n_bytes = len(header) + sum(map(len, parts))
        if n_bytes > self.max_bytes:
            return
        path = folder / f"{name.hex()}{SUFFIX}"
        unfinished = path.with_suffix(UNFINISHED)
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for part in (header, *parts):
                file.write(part)
        os.replace(unfinished, path)
        with self._lock_index:
            self._blocks[name] = StoredBlock(path, n_bytes)
            self._lengths |= {_length(name)} if is_place else set()
            total = sum(block.n_bytes for block in self._blocks.values())
            while total > self.max_bytes:
                _, oldest = self._blocks.popitem(last=False)
                oldest.path.unlink(missing_ok=True)
                total -= oldest.n_bytes

    def _remove(self, name: bytes) -> None:
        with self._lock_index:
            block = self._blocks.pop(name, None)
        if block is not None:
            block.path.unlink(missing_ok=True)

    def forget_owners(self, is_gone: Callable[[str], bool]) -> None:
        super().forget_owners(is_gone)
        with self._lock_index:
            self._blocks = OrderedDict((name, block) for name, block in self._blocks.items() if block.path.exists())

    def wait(self) -> None:
        """Wait until all queued texts are stored."""
        self._texts.join()

    def close(self) -> None:
        """Store the remaining queued texts, and release the folder for other processes."""
        self._texts.put(None)
        self._writer.join()
        super().close()


def _names(salt: str, token_ids: NDArray[np.int64]) -> list[bytes]:
    """Return the names of a text's whole blocks, in their order."""
    digest, names = hashlib.sha256(salt.encode()).digest(), list[bytes]()
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block_ids = np.ascontiguousarray(token_ids[start : start + BLOCK_TOKENS], "<i8")
        digest = hashlib.sha256(digest + block_ids.tobytes()).digest()
        names.append(digest)
    return names


def _place_name(salt: str, token_ids: NDArray[np.int64], names: Sequence[bytes], length: int) -> bytes:
    """Return the name of the place after a text's first `length` tokens. Args: names: of its whole blocks."""
    n_blocks = length // BLOCK_TOKENS
    before = names[n_blocks - 1] if n_blocks else hashlib.sha256(salt.encode()).digest()
    others = np.ascontiguousarray(token_ids[n_blocks * BLOCK_TOKENS : length], "<i8")
    return hashlib.sha256(before + others.tobytes()).digest() + length.to_bytes(LENGTH_BYTES, "little")


def _length(name: bytes) -> int:
    """Return the number of tokens before a place, by its name."""
    return int.from_bytes(name[NAME_BYTES:], "little")
