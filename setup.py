"""Compiles the kernels into a wheel, by the compiler of the package ziglang; all else stands in pyproject.toml.

`pip install` makes them for this machine. SWIFTOPT_PLATFORM=linux-aarch64 makes the wheel of another one; "none" makes
one without kernels, which then compiles them at first use. See `Makefile`, target `wheels`.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("levels", ROOT / "models" / "kernels" / "levels.py")
levels = importlib.util.module_from_spec(_spec)
sys.modules["levels"] = levels  # Dataclasses look up their module in sys.modules.
_spec.loader.exec_module(levels)


class Platform(NamedTuple):
    """A target machine: `system` and `machine` as Python names them, zig's `target`, and the wheel's `tag`."""

    system: str
    machine: str
    target: str
    tag: str


# Wheels need glibc 2.28 (2018) or newer, which every Linux with a packaged Python 3.11 has.
PLATFORMS = {
    "linux-x86_64": Platform("Linux", "x86_64", "x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64"),
    "linux-aarch64": Platform("Linux", "aarch64", "aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64"),
    "macos-arm64": Platform("Darwin", "arm64", "aarch64-macos.12.0-none", "macosx_12_0_arm64"),
}


# Developers' scripts, left out of the wheel; in a checkout, `python -m swiftopt.bench.micro` runs one.
SCRIPTS = {
    "swiftopt.bench": (
        *("coded_slots", "disturbed_start", "engines", "gpu", "gpu_all", "gpu_peers", "hybrids", "long_search"),
        *("micro", "mixture_drafts", "mixtures", "parity", "recorded_windows", "repeats", "search", "small_mixture"),
        *("stream_shift", "tables", "train_mtp", "verdicts"),
    ),
    "swiftopt.papers": ("ablate", "ablation_recipes", "ablations", "tables"),
}


def wanted() -> Platform | None:
    """Return the platform to compile kernels for, or None if kernels are not to be compiled."""
    given = os.environ.get("SWIFTOPT_PLATFORM")
    if given == "none":
        return None
    if given is not None and given not in PLATFORMS:
        raise SystemExit(f"SWIFTOPT_PLATFORM is {given!r}: use {', '.join(PLATFORMS)} or none")
    here = (platform.system(), platform.machine())
    if given is None and platform.libc_ver()[0] != "glibc" and here[0] == "Linux":
        return None
    return PLATFORMS[given] if given else next((target for target in PLATFORMS.values() if target[:2] == here), None)


def compile_library(place: Platform, folder: Path, cache: str, variant: tuple[str, tuple[str, ...]]) -> Path:
    """Compile the library of a level and its extras, unless it is there, and return it.

    Args:   cache: a folder for the compiler, which would take the user's, and this may not be writable.
    Raises: SystemExit: it cannot be compiled. setuptools passes over other exceptions in an editable install.
    """
    level, extras = variant
    path = folder / levels.library_name(level, extras, place.system, place.machine)
    if path.is_file():
        return path
    zig, target = [sys.executable, "-m", "ziglang"], ["-target", place.target]
    env = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
    with TemporaryDirectory() as work:
        made, library = Path(work) / "pass.o", Path(work) / path.name
        source, cpu = levels.FOLDER / levels.SOURCES[-1], f"-mcpu={levels.zig_cpu(level, extras)}"
        compiling = [*zig, "c++", *target, cpu, *levels.FLAGS, *levels.MATHS, "-c", source, "-o", made]
        # Link as C: with `c++` zig would first compile libc++, for minutes, and the kernels do not need it.
        linking = [*zig, "cc", *target, "-shared", "-s", "-pthread", made, "-lm", "-o", library]
        for command in (compiling, linking):
            if code := subprocess.run(command, env=env, check=False).returncode:
                raise SystemExit(
                    f"the kernels ({path.name}) cannot be compiled: {' '.join(zig[1:])} ended with {code};"
                    " SWIFTOPT_PLATFORM=none installs without them, and a compiler of this machine then makes them"
                )
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(library.read_bytes())
        part.chmod(0o755)
        part.replace(path)
    return path


class BuildWithKernels(build_py):
    """Copies the package and compiles its kernels; an editable install puts them into the source tree."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        scripts = SCRIPTS.get(package, ())
        return [module for module in super().find_package_modules(package, package_dir) if module[1] not in scripts]

    def run(self) -> None:
        super().run()
        if (place := wanted()) is None:
            return
        base = ROOT if self.editable_mode else Path(self.build_lib) / "swiftopt"
        folder = base / "models" / "kernels" / "built"
        with TemporaryDirectory() as cache, ThreadPoolExecutor(os.cpu_count()) as pool:
            made = set(pool.map(partial(compile_library, place, folder, cache), levels.variants(place.machine)))
        for other in set(folder.glob("*.so")) - made:  # Libraries of older sources or another platform.
            other.unlink()


class WithLibraries(Distribution):
    """A distribution whose wheel is specific to a platform if it contains kernels."""

    def has_ext_modules(self) -> bool:
        return wanted() is not None


class PlatformWheel(bdist_wheel):
    """Tags the wheel with the kernels' platform and any Python 3: no library uses Python's C API."""

    def get_tag(self) -> tuple[str, str, str]:
        place = wanted()
        return ("py3", "none", "any" if place is None else place.tag)


setup(distclass=WithLibraries, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
