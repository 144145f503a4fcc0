"""Our kernels under AddressSanitizer and UndefinedBehaviorSanitizer, over fuzzed GGUF files and blocks.

    python tests/sanitized.py [N_FILES]

compiles each level of this processor with -fsanitize=address,undefined and starts itself again with the sanitizers'
libraries loaded first. That process reads mutated headers, lays out whatever their tensors hold, and computes with
random blocks. Blocks are copied into memory of exactly their size: the sanitizer does not see reads behind a mapped
file. The first report ends the process.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

COMPILER = os.environ.get("CXX", "g++")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O1")
LIBRARIES = "SWIFTOPT_SANITIZED"  # Folder of the compiled libraries, for the second process.
N_FILES = 10_000
N_BLOCKS = 40  # Tensors of random bytes for each type and level.
SEED = 0


def compiled(folder: Path) -> list[str]:
    """Compile a library for each level of this processor; return the levels."""
    from swiftopt.models.kernels import build
    from swiftopt.models.kernels.levels import FLAGS, LEVELS, MATHS, SOURCES, options

    flags = build.processor_flags()
    levels = [name for name, level in LEVELS.items() if level.needs <= flags]
    for name in levels:
        instructions = options(name, LEVELS[name].extras_for(flags))
        source = str(build.FOLDER / SOURCES[-1])
        command = [COMPILER, *FLAGS, *MATHS, *SANITIZE, "-shared", *instructions, source, "-o", str(folder / name)]
        print(f"compiling {name}", flush=True)
        subprocess.run(command, check=True)
        library = (folder / name).read_bytes()
        (folder / name).write_bytes(library + build.seal(library))
    return levels


def run_again(folder: Path, n_files: int) -> int:
    runtimes = [
        subprocess.run([COMPILER, f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True)
        for name in ("asan", "ubsan")
    ]
    environ = {
        **os.environ,
        LIBRARIES: str(folder),
        "LD_PRELOAD": " ".join(done.stdout.strip() for done in runtimes),
        # Python and torch keep memory until they end, and torch's own libraries are compiled without the sanitizers.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:protect_shadow_gap=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run([sys.executable, __file__, str(n_files)], env=environ, check=False).returncode


def fuzz(folder: Path, n_files: int) -> None:
    """Read mutated files and compute with random blocks, at each level."""
    import gguf
    import numpy as np
    import torch

    from swiftopt.core.errors import SwiftoptError
    from swiftopt.models.block_maps import BlockLinear, packed_blocks
    from swiftopt.models.gguf_packing import forms
    from swiftopt.models.gguf_reader import TYPES, FileTensor, GgufFile
    from swiftopt.models.kernels.build import Kernels, _opened

    sys.path.insert(0, str(Path(__file__).parent))
    from native import linear

    rng = random.Random(SEED)

    def exercise(kernels: Kernels, tensor: FileTensor, products: bool) -> None:
        """Lay out a tensor, read it back, and multiply with it."""
        exact = FileTensor(tensor.name, tensor.kind, tensor.shape, np.array(tensor.data))
        n_out, n_in = exact.shape
        order = torch.randperm(n_out, generator=torch.Generator().manual_seed(SEED)).int()
        for rows in (None, order):
            packed = packed_blocks(exact, kernels, rows)
            packed.numbers(torch.arange(n_out))
        for n_rows in (1, 5, 17) if products else ():
            x = torch.randn(n_rows, n_in, generator=torch.Generator().manual_seed(n_rows))
            for dtype in (torch.bfloat16, torch.float32):
                linear(kernels, x.to(dtype), BlockLinear(packed, None, dtype))

    levels = sorted(path.name for path in folder.iterdir() if path.suffix != ".gguf")
    libraries = {name: _opened(name, folder / name) for name in levels}
    for level, kernels in libraries.items():
        for kind in forms(kernels):
            name, block, block_bytes = TYPES[kind]
            for number in range(N_BLOCKS):
                n_out, n_in = rng.choice((1, 15, 16, 17, 40)), block * rng.choice((1, 2, 3))
                n_in *= 1 if block == 256 else 8
                data = np.frombuffer(rng.randbytes(n_out * n_in // block * block_bytes), np.uint8)
                exercise(kernels, FileTensor(name, kind, (n_out, n_in), data), number % 4 == 0)
        print(f"{level}: {N_BLOCKS} tensors of random bytes of each of {len(forms(kernels))} types", flush=True)

    seed = folder / "seed.gguf"
    writer = gguf.GGUFWriter(str(seed), "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    values = np.random.default_rng(SEED).normal(size=(4, 256)).astype(np.float32)
    for type_name in ("F32", "Q8_0", "Q4_0"):
        own = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(f"weight.{type_name}", gguf.quants.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole, path, n_read = seed.read_bytes(), folder / "mutated.gguf", 0
    header = whole.index(b"weight.Q4_0") + 64
    best = libraries[levels[0]]
    for _ in range(n_files):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(header if rng.random() < 0.8 else len(content))
            content[at] = rng.choice((0, 1, 2, 8, 12, 13, 14, 127, 128, 255, rng.randrange(256)))
        if rng.random() < 0.1:
            del content[rng.randrange(len(content)) :]
        path.write_bytes(content)
        with suppress(SwiftoptError):
            file = GgufFile(path)
            n_read += 1
            for tensor in file.tensors.values():
                if tensor.kind in forms(best) and len(tensor.shape) == 2 and tensor.shape[1] % 256 == 0:
                    exercise(best, tensor, products=False)
    print(f"{n_files} mutated files, of which {n_read} are read", flush=True)


def main() -> int:
    n_files = int(sys.argv[1]) if len(sys.argv) > 1 else N_FILES
    if LIBRARIES in os.environ:
        fuzz(Path(os.environ[LIBRARIES]), n_files)
        return 0
    if shutil.which(COMPILER) is None:
        print(f"there is no {COMPILER} here: install it, or name another compiler in CXX", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="swiftopt-sanitized-") as folder:
        compiled(Path(folder))
        return run_again(Path(folder), n_files)


if __name__ == "__main__":
    sys.exit(main())
