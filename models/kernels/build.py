"""Finds and loads the library of our C++ kernels: from the wheel, or compiled once per machine.

The library has a C interface and needs no C++ runtime, so it fits all versions of torch and Python. If the wheel has no
library for the processor, it is compiled with the compiler in CXX, or with c++, g++ or clang++, and kept in the cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...core.errors import SettingsError
from ...core.settings import cpu_words
from ..cache import cache_root, replacing
from . import layout
from .levels import BUILT, FLAGS, FOLDER, LEVELS, MATHS, SOURCES, TILES, library_name, options

FORCED = "SWIFTOPT_KERNELS"  # Environment variable: a level of `LEVELS`, "auto", or "torch" for torch's own kernels.
# Environment variable: compile with this compiler (or with c++, g++ or clang++ if "auto") instead of using the wheel's
# library.
COMPILER = "SWIFTOPT_CXX"
COMPILE_S = 900  # Time limit for compiling the kernels: on a loaded machine they take minutes.
# (outputs, inputs) of the MLP maps of a 1.5B model, used to measure a level's speed.
SHAPES = ((8960, 1536), (1536, 8960))
ROWS = (1, 8)  # Row counts at which a level's speed is measured.
CLEARLY = 1.2  # A lower level is preferred only if it is faster by this factor.
_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
# Return and argument types of the library's functions, by name without the prefix `swiftopt_`.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "run": (ctypes.c_int, [ctypes.POINTER(layout.Call), ctypes.POINTER(layout.Step), _INT32]),
    "likeliest": (None, [_POINTER, _INT32, _INT64, _INT64, _POINTER, _POINTER]),
    "repack": (ctypes.c_int, [_INT32, _POINTER, _POINTER, ctypes.POINTER(layout.Map), _INT32]),
    "dequantise": (None, [ctypes.POINTER(layout.Map), _POINTER, _INT64, _POINTER]),
    "gguf_types": (ctypes.c_int, [_POINTER]),
    "coded_unit": (_INT64, [_INT32, ctypes.POINTER(_INT32)]),
    "code_slots": (ctypes.c_int, [*[_POINTER] * 3, _INT64, _INT64, *[_INT32] * 6]),
}
# The compiler's name and version, which GCC and clang (and zig, which is a clang) write into a library.
_COMPILERS = re.compile(rb"(GCC): \([^)]*\) ([\d.]+)|(clang) version ([\d.]+)")
Speeds = dict[str, dict[str, float]]  # Implementation -> "outputs x inputs, rows" -> GB/s.


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """A loaded library; its functions are described in `pass.cpp`."""

    level: str
    path: Path
    run: Callable[..., int]
    likeliest: Callable[..., None]
    repack: Callable[..., int]
    dequantise: Callable[..., None]
    gguf_types: Callable[..., int]
    coded_unit: Callable[..., int]
    code_slots: Callable[..., int]

    @property
    def origin(self) -> str:
        """Where the library comes from, and which compiler made it."""
        place = "from the package" if self.path.parent == BUILT else "compiled on this machine"
        match = _COMPILERS.search(self.path.read_bytes()) if self.path.is_file() else None
        compiler = [] if match is None else [part.decode() for part in match.groups() if part]
        return f"{place} by {' '.join(compiler)}" if compiler else place


@cache
def kernels(level: str | None = None) -> Kernels | str:
    """Return the library of the best level that processor and compiler support, or of `level`; else why there is none.

    Raises: SettingsError: SWIFTOPT_KERNELS or `level` is unknown, or not supported by this processor.
    """
    level_asked = level or os.environ.get(FORCED) or "auto"
    if level_asked == "torch":
        return f"{FORCED}=torch asks for torch's own kernels"
    if level_asked not in ("auto", *LEVELS):
        raise SettingsError(f"{FORCED}={level_asked} is no kind of kernels: use {', '.join(LEVELS)}, torch or auto")
    flags = processor_flags()
    if level_asked != "auto" and not LEVELS[level_asked].needs <= flags:
        raise SettingsError(
            f"kernels for {level_asked} were asked for, but this processor has no {level_asked}: use another kind"
        )
    levels = [level_asked]
    if level_asked == "auto":
        fastest = preferred()
        # Try the fastest level first, then the others in order.
        levels = sorted(LEVELS, key=lambda name: name != fastest)
    problems = list[str]()
    for name in levels:
        if LEVELS[name].needs <= flags:
            try:
                return _loaded(name)
            except _NoLibrary as error:  # An older compiler may still support the next level.
                problems.append(str(error))
    return problems[0]


@cache
def processor_flags() -> frozenset[str]:
    """Return the instruction sets that this process may use, by Linux's names; empty if they cannot be read.

    Read on x86-64 only: emulators of other machines show the host's flags.
    """
    if platform.machine() != "x86_64":
        return frozenset()
    flags = frozenset(cpu_words("flags").split())
    return flags if flags.isdisjoint(TILES) or _enable_tiles() else flags.difference(TILES)


def _enable_tiles() -> bool:
    """Ask Linux for permission to use AMX tiles, whose instructions fail without it; return whether it is given."""
    arch_prctl, request, tiles = 158, 0x1023, 18  # x86-64 syscall, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tiles) == 0)


def compiled_levels() -> list[str]:
    """Levels that this processor supports and whose library exists, the highest first."""
    supported = [name for name, level in LEVELS.items() if level.needs <= processor_flags()]
    return [name for name in supported if any(os.path.isfile(place / _library(name)) for place in _places())]


def _library(name: str) -> str:
    """Return the file name of a level's library for this machine."""
    extras = LEVELS[name].extras_for(processor_flags())
    return library_name(name, extras, platform.system(), platform.machine())


def _places() -> list[Path]:
    """Return the folders searched for libraries, in order; new libraries are compiled into the last one."""
    cache, requested = cache_root() / "kernels", os.environ.get(COMPILER)
    if not requested:
        return [BUILT, cache]
    return [cache if requested == "auto" else cache / Path(requested).name]  # One folder per compiler.


class _NoLibrary(Exception):
    """A library cannot be found, loaded or compiled; the message says why."""


def _loaded(name: str) -> Kernels:
    file = _library(name)
    for place in _places():
        with suppress(_NoLibrary):
            return _opened(name, place / file)
    path = _places()[-1] / file
    try:
        return _compiled(name, path)
    except OSError:
        # The cache cannot be written: compile the library into a temporary folder, for this process only.
        with tempfile.TemporaryDirectory(prefix="swiftopt-kernels-") as temporary:
            return _compiled(name, Path(temporary) / path.name)


def _compiled(name: str, path: Path) -> Kernels:
    requested = os.environ.get(COMPILER) or "auto"
    names = (os.environ.get("CXX"), "c++", "g++", "clang++") if requested == "auto" else (requested,)
    compiler = next((program for name in names if name and (program := shutil.which(name))), None)
    if compiler is None:
        raise _NoLibrary(
            f"swiftopt was installed without kernels for this processor ({platform.machine()}), and there is no C++"
            " compiler here (c++, g++ or clang++): install one, for example the package g++"
        )
    with replacing(path, mode=0o755) as part:
        instructions = options(name, LEVELS[name].extras_for(processor_flags()))
        command = [compiler, *FLAGS, *MATHS, "-shared", *instructions, str(FOLDER / SOURCES[-1]), "-o", str(part)]
        if (problem := _problem_of(command)) is not None:
            raise _NoLibrary(f"{compiler} {problem}: try another compiler by the variable CXX")
        with part.open("ab") as file:
            file.write(seal(part.read_bytes()))
    return _opened(name, path)


def seal(library: bytes) -> bytes:
    """Return the checksum appended to a library file: loading a truncated library would crash the process."""
    return hashlib.sha256(library).digest()


def _problem_of(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=COMPILE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"took more than {COMPILE_S} s to compile the kernels"
    except OSError as error:
        return f"cannot be run ({error.strerror})"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    return f"cannot compile the kernels ({next((line for line in lines if 'error' in line), lines[0])[:160]})"


def _opened(level: str, path: Path) -> Kernels:
    if not os.path.isfile(path):  # os.path.isfile is False for unreadable folders; Path.is_file may raise.
        raise _NoLibrary(f"{path} is not there")
    try:
        content = path.read_bytes()
        # Check only libraries compiled here: the wheel's installer has checked those of the wheel.
        if path.parent != BUILT and seal(content[:-32]) != content[-32:]:
            raise _NoLibrary(f"{path} is damaged: remove it")
        library = ctypes.CDLL(str(path))
        sizes = (ctypes.c_int32 * len(layout.STRUCTURES))()
        library.swiftopt_sizes(sizes)
        if list(sizes) != [ctypes.sizeof(structure) for structure in layout.STRUCTURES]:
            raise _NoLibrary(f"{path} does not fit this version of swiftopt: remove it")
        functions = {name: getattr(library, f"swiftopt_{name}") for name in FUNCTIONS}
    except (OSError, AttributeError) as error:
        raise _NoLibrary(f"{path} cannot be loaded ({error}): remove it") from error
    for name, (returned, arguments) in FUNCTIONS.items():
        functions[name].restype, functions[name].argtypes = returned, arguments
    return Kernels(level, path, **functions)


def at_rows(speeds: Speeds, way: str, rows: int) -> float:
    """Return an implementation's mean GB/s over all shapes, each counted with the same number of weight bytes."""
    speeds_at_rows = [speed for case, speed in speeds[way].items() if case.endswith(f", {rows}")]
    return len(speeds_at_rows) / sum(1 / speed for speed in speeds_at_rows)


def preferred() -> str | None:
    """Return the level that was fastest when measured on this machine; None if none was measured."""
    kept = {name: cases for name, cases in kept_speeds().items() if name in LEVELS}
    # Take a lower level only if it is clearly faster: measurements on a busy machine vary, and switching levels changes
    # the last bits of results.
    handicap = {name: CLEARLY**number for number, name in enumerate(LEVELS)}
    seconds = {name: sum(1 / at_rows(kept, name, rows) for rows in ROWS) * handicap[name] for name in kept}
    return min(seconds, key=lambda name: seconds[name], default=None)


def speeds_file() -> Path:
    """Return the file of the speeds that `measure` found for this type of processor."""
    key = hashlib.sha256("|".join([platform.machine(), *sorted(processor_flags())]).encode()).hexdigest()[:16]
    return cache_root() / "kernels" / f"speeds-{key}.json"


def kept_speeds() -> Speeds:
    try:
        kept = json.loads(speeds_file().read_text(encoding="utf-8"))
        speeds = {str(name): {str(case): float(speed) for case, speed in cases.items()} for name, cases in kept.items()}
        cases = {f"{n_out} x {n_in}, {rows}" for n_out, n_in in SHAPES for rows in ROWS}
        return {
            name: by_case for name, by_case in speeds.items() if set(by_case) == cases and min(by_case.values()) > 0
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
