"""The instruction sets that the kernels' library is compiled for, for builds of wheels and for the running program.

This module imports nothing of swiftopt, so a build can import it before anything is installed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
BUILT = FOLDER / "built"  # Folder of the libraries shipped in the wheel.
SOURCES = (*sorted(path.name for path in FOLDER.glob("*.h")), "pass.cpp")  # The last one includes the others.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fno-exceptions", "-fno-rtti")
# Do not let the compiler fuse multiplications and additions on its own: rows could differ in their last bits.
MATHS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")


@dataclass(frozen=True, slots=True)
class Level:
    """Instructions that the library is compiled for; a processor must have all of `needs`.

    `march` is the compilers' name of the architecture. `extras` are sets of further instructions, the best first. There
    is a library for each set, and a processor uses the first set that it supports completely.
    """

    march: str | None
    needs: frozenset[str] = frozenset()
    extras: tuple[tuple[str, ...], ...] = ((),)

    def extras_for(self, flags: frozenset[str]) -> tuple[str, ...]:
        """Return the optional instruction sets that a processor with these flags supports."""
        return next((extras for extras in self.extras if flags.issuperset(extras)), ())


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "bmi2", "movbe"})
_NUMBERS = ("avx512_bf16", "avx512_vnni")
_TILES = ("amx_tile", "amx_bf16", "amx_int8")
TILES = frozenset(_TILES)
LEVELS = {
    "amx": Level("x86-64-v4", _AVX512.union(_NUMBERS, _TILES), ((*_NUMBERS, *_TILES),)),
    "avx512": Level("x86-64-v4", _AVX512, (_NUMBERS, ("avx512_vnni",), ())),
    "avx2": Level("x86-64-v3", frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})),
    "portable": Level(None),
}


def library_name(level: str, extras: tuple[str, ...], system: str, machine: str) -> str:
    """Return the file name of a library, with a digest of everything that its content depends on but the compiler.

    Args: system, machine: as `platform.system` and `platform.machine` name them.
    """
    parts = [system, machine, level, *extras, *FLAGS, *MATHS, str(LEVELS[level].march)]
    digest = hashlib.sha256("|".join(parts).encode())
    for source in SOURCES:
        digest.update((FOLDER / source).read_bytes())
    return f"{level}-{digest.hexdigest()[:16]}.so"


def options(level: str, extras: tuple[str, ...]) -> list[str]:
    """Return the instructions of a level as options of GCC and clang."""
    march = LEVELS[level].march
    if march is None:
        return []
    return [f"-march={march}", *(f"-m{_joined(extra)}" for extra in extras)]


def zig_cpu(level: str, extras: tuple[str, ...]) -> str:
    """Return a level's instruction sets as a CPU name for zig."""
    march = LEVELS[level].march
    if march is None:
        return "baseline"
    return "+".join([march.replace("-", "_"), *(_joined(extra).replace("-", "_") for extra in extras)])


def _joined(extra: str) -> str:
    return extra.replace("avx512_", "avx512").replace("_", "-")


def variants(machine: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every level of a machine with each of its sets of extras."""
    for name, level in LEVELS.items():
        if level.march is None or machine == "x86_64":
            for extras in level.extras:
                yield name, extras
