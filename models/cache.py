"""The user's cache folder: files and folders in it are whole once they have their names, whoever else writes there."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..core.errors import ModelNotFound, OutputError, SwiftoptError, first_line

STALE_S = 24 * 3600  # Unfinished cache files of other processes are removed at this age.
PART = ".part"  # Suffix of a file that is still being written.
CONVERSION = "5"  # Version hashed into the folder names of GGUF files; raise it when the conversion changes.
SETTINGS = "4"  # Version of configs and tokenizers made of GGUF files; raise it when they are made in another way.
N_SAMPLES = 9  # Positions in a GGUF file whose bytes are hashed into its folder's name.
SAMPLE_BYTES = 1 << 20  # Bytes of each sample.


def cache_root() -> Path:
    """Return SWIFTOPT_CACHE_DIR, or the user's cache folder of this system."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get("SWIFTOPT_CACHE_DIR") or user_cache_dir("swiftopt", appauthor=False)).expanduser()


def converted_folder(gguf: Path) -> Path:
    """Return the cache folder for a converted GGUF file, whether or not it exists yet.

    Raises: ModelNotFound: the file cannot be read.
    """
    try:
        size = gguf.stat().st_size
        digest = hashlib.sha256(f"{CONVERSION} {gguf.name} {size}".encode())
        with gguf.open("rb") as file:
            for i in range(N_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * i // (N_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise ModelNotFound(f"{gguf} cannot be read ({error.strerror}): check its permissions") from error
    name = re.sub(r"[^a-z0-9.]+", "-", gguf.stem.lower())[:60]
    return cache_root() / "gguf" / f"{name}-{digest.hexdigest()[:16]}"


def gguf_settings_folder(gguf: Path) -> Path:
    """Return the cache folder for the config and tokenizer of a GGUF file, whether or not it exists yet.

    Raises: ModelNotFound: the file cannot be read.
    """
    return cache_root() / "gguf-settings" / f"{converted_folder(gguf).name}-{SETTINGS}"


def remove_stale(leftovers: Iterable[Path]) -> None:
    """Remove unfinished files and folders in the cache that are older than STALE_S: their processes have crashed."""
    for left in leftovers:
        with suppress(OSError):  # Another process may have just finished or removed it.
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary path next to `path`; the file is renamed to `path` if the block ends without an error.

    Unfinished files of crashed processes are removed. `mode`: permissions, as another user may share the cache.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(path.parent.glob(f"*{PART}"))
    handle, name = tempfile.mkstemp(suffix=PART, dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(mode)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def made_once(folder: Path, is_whole: Callable[[], bool], write: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, which `write` fills the first time in a temporary folder next to it.

    The folder gets its final name only when it is complete, so several processes may make it at the same time.

    Raises: OutputError: the cache cannot be written.
    """
    if is_whole():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(folder.parent.glob(".*"))
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
        ) as unfinished:
            write(Path(unfinished))
            share(Path(unfinished))
            try:
                os.replace(unfinished, folder)
            except OSError:
                if not is_whole():  # Else another process has already made the same folder.
                    shutil.rmtree(folder, ignore_errors=True)  # Remove an incomplete folder, for example after a crash.
                    os.replace(unfinished, folder)
    except SwiftoptError:
        raise
    except Exception as error:  # A full disk raises safetensors' own error, not OSError.
        raise OutputError(
            f"the cache {folder.parent} cannot be written ({first_line(error)}): make room there or set"
            " SWIFTOPT_CACHE_DIR"
        ) from error
    return folder


def share(folder: Path) -> None:
    """Let other users read a new folder and its files: temporary folders, and safetensors' files, are their owner's."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
