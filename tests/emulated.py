"""The kernels' tests on an emulated machine, Linux on arm64: `make emulated`, as root.

    python emulated.py [pytest's options]

The root is of Debian's packages, unpacked and not configured, with packages of PyPI for that machine; it is kept under
the user's cache. qemu's user emulation runs its Python, and the kernels are those of the wheel for arm64.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs
from walkthrough import ROOT, copy_tracked

EMULATOR = Path("/usr/bin/qemu-aarch64-static")
PACKAGES = "python3,libpython3.11-stdlib,libgomp1,libstdc++6"
REQUIREMENTS = ("numpy", "transformers", "gguf", "llguidance", "filelock", "pydantic", "platformdirs", "psutil")
# Builds of torch from 2.11 on are for CUDA on that machine, and want its libraries. Without dependencies, for pip would
# take those of the machine that it runs on.
ALONE = ("torch==2.9.1", "accelerate")
OF_TORCH = ("fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
TESTING = ("hypothesis", "pytest", "pytest-timeout")
PYPI = ("--only-binary=:all:", "--platform", "manylinux_2_28_aarch64", "--platform", "manylinux2014_aarch64")
DEFAULT = ("tests/unit/test_kernels.py", "-q", "--timeout=3000", "-p", "no:cacheprovider")


def machine() -> Path:
    """Return the root of the machine, made at first."""
    root = Path(platformdirs.user_cache_dir("swiftopt")) / "arm64"
    if (root / "done").exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    options = ["--variant=extract", "--architectures=arm64", f"--include={PACKAGES}"]
    subprocess.run(["mmdebstrap", *options, "bookworm", root], check=True)
    site = root / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", site, "--python-version", "3.11", *PYPI]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    constraints = root / "constraints.txt"
    constraints.write_text("".join(line for line in lines if not line.startswith("torch==")))
    pip += ["--constraint", constraints]
    subprocess.run([*pip, *REQUIREMENTS, *OF_TORCH, *TESTING], check=True)
    subprocess.run([*pip, "--no-deps", *ALONE], check=True)
    shutil.copy2(EMULATOR, root / EMULATOR.name)
    (root / "done").touch()
    return root


def copy_sources(root: Path) -> None:
    """Copy the tracked files, with kernels for the machine."""
    folder = root / "work" / "swiftopt"
    shutil.rmtree(folder, ignore_errors=True)
    copy_tracked(folder)
    env = {**os.environ, "SWIFTOPT_PLATFORM": "linux-aarch64"}
    with tempfile.TemporaryDirectory() as wheels:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, str(ROOT)]
        subprocess.run(pip, env=env, check=True)
        [wheel] = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            libraries = [name for name in archive.namelist() if name.endswith(".so")]
            archive.extractall(folder.parent, libraries)


def main() -> None:
    root = machine()
    copy_sources(root)
    for name in ("proc", "dev"):
        (root / name).mkdir(exist_ok=True)
        subprocess.run(["mount", "--bind", f"/{name}", root / name], check=True)
    try:
        variables = {"PYTHONPATH": "/site:/work", "HOME": "/tmp", "OMP_NUM_THREADS": "1"}
        variables["PATH"] = "/usr/sbin:/usr/bin:/bin"
        program = "import os, sys, pytest, torch; os.chdir('/work/swiftopt'); sys.exit(pytest.main(sys.argv[1:]))"
        words = [f"/{EMULATOR.name}", "/usr/bin/python3.11", "-c", program, *(sys.argv[1:] or DEFAULT)]
        sys.exit(subprocess.run(["chroot", root, *words], env=variables).returncode)
    finally:
        for name in ("dev", "proc"):
            subprocess.run(["umount", root / name], check=False)


if __name__ == "__main__":
    main()
