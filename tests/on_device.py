"""What tests of the Triton kernels share: a CUDA device where there is one, else Triton's interpreter on the CPU."""

from __future__ import annotations

import torch

from swiftopt.models.runtime import Runtime

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if PLACE.type == "cuda" else torch.float16  # The interpreter multiplies no bfloat16.
DTYPES = [torch.float32, HALF]
CLOSE = {torch.float32: 1e-4, HALF: 3e-2}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(PLACE, dtype)


def here(runtime: Runtime) -> Runtime:
    return Runtime(runtime.hf_model.to(PLACE), None, runtime.info)


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=CLOSE[dtype], atol=CLOSE[dtype] * 3)
