"""Linear maps that bitsandbytes computes by its own modules: LLM.int8, nf4 and fp4, also with coded scales."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import ModelNotFound, UnsupportedModel
from .families import family_of
from .saved import StoredTensors
from .schemes import Scheme

LIBRARY = "bitsandbytes"
MARKS = {"int8": ".SCB", "nf4": ".quant_state.bitsandbytes__nf4", "fp4": ".quant_state.bitsandbytes__fp4"}
PACKED_ROWS = 32  # outputs that a block of the library's own layout for CPUs has


def is_by_library(module: nn.Module) -> bool:
    """Tell whether a library computes a linear map, from a weight that only it can read."""
    return isinstance(module, nn.Linear) and type(module).__module__.partition(".")[0] == LIBRARY


def check_library(folder: Path, scheme: Scheme) -> None:
    """Check, before anything is loaded, that the library is here and the files hold what the config says.

    Raises: UnsupportedModel: it is not installed. ModelNotFound: no map is stored in that way.
    """
    if importlib.util.find_spec(LIBRARY) is None:
        raise UnsupportedModel(
            f"{folder} is quantised ({scheme.words}), and the library {LIBRARY} is not installed here: pip install"
            " 'swiftopt[quantised]'"
        )
    logging.getLogger(LIBRARY).setLevel(logging.ERROR)  # it warns of each cast, in every pass
    with StoredTensors(folder) as tensors:
        if not any(name.endswith(MARKS[str(scheme.kind)]) for name in tensors.shapes()):
            raise ModelNotFound(
                f"{folder / 'config.json'} says {scheme.words}, but no linear map in its files is stored so: copy the"
                " model's folder again"
            )


def take_maps(model: Any, scheme: Scheme, dtype: str, folder: Path) -> int:
    """Check the maps that transformers has loaded, and let a row's result depend on that row alone.

    Args:    dtype: as `models.loading.load`, of all that is not quantised, and in which 4-bit maps compute; "auto": as
             the config says.
    Returns: how many parameters the model stands for.
    Raises:  ModelNotFound: a map is not what the config says. UnsupportedModel: the head is quantised, or the library
             would read a map wrongly on a CPU.
    """
    wanted = (model.config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    maps = {name: module for name, module in model.named_modules() if is_by_library(module)}
    sizes = {id(module.weight): module.in_features * module.out_features for module in maps.values()}
    for name, module in maps.items():
        _check(name, module, model, scheme, folder)
        if scheme.kind != "int8":
            _set_compute_dtype(module, None if dtype == "auto" else wanted)
        elif module.state.threshold > 0:
            module.forward = partial(_by_row, module, module.forward, module.state.threshold)
            module.state.threshold = 0.0
    n_parameters = 0
    for parameter in model.parameters():
        n_parameters += sizes.get(id(parameter), parameter.numel())
        if id(parameter) not in sizes:
            parameter.data = parameter.data.to(wanted)  # transformers leaves them as they are stored
    return n_parameters


def _check(name: str, module: Any, model: Any, scheme: Scheme, folder: Path) -> None:
    if name == family_of(model.config).head:
        raise UnsupportedModel(
            f"{folder} has a head that {LIBRARY} quantised, which is not supported: quantise it with"
            f" llm_int8_skip_modules=[{name!r}]"
        )
    if not _is_whole(module, scheme):
        raise ModelNotFound(
            f"{name} in {folder} is not what its config.json says ({scheme.words}): its weight is"
            f" {module.weight.dtype} of shape {list(module.weight.shape)}, without the scales of such a map;"
            " download or copy the model again"
        )
    state = getattr(module.weight, "quant_state", None)
    if state is not None and module.in_features % state.blocksize and module.weight.device.type == "cpu":
        # Seen in 0.50.2: its kernel for CPUs begins a block with every row, where the codes' blocks go on.
        raise UnsupportedModel(
            f"{name} in {folder} has {module.in_features} inputs, which blocks of {state.blocksize} do not divide,"
            f" and {LIBRARY} reads such a map wrongly on a CPU: use --device cuda"
        )


def _is_whole(module: Any, scheme: Scheme) -> bool:
    """Whether a map has codes and scales of its size."""
    shape = (module.out_features, module.in_features)
    if scheme.kind == "int8":
        scales = getattr(module.weight, "SCB", None)
        return scales is not None and tuple(module.weight.shape) == shape and scales.numel() == shape[0]
    state = getattr(module.weight, "quant_state", None)
    if state is None or tuple(state.shape) != shape or state.quant_type != scheme.kind:
        return False
    n_weights = shape[0] * shape[1]
    sizes = (module.weight.nbytes, state.absmax.numel())
    return sizes == (-(-n_weights // 2), -(-n_weights // state.blocksize))


def _set_compute_dtype(module: Any, dtype: torch.dtype | None) -> None:
    if dtype is not None:
        module.compute_dtype, module.compute_type_is_set = dtype, True
    # On CPUs with bfloat16 products the library lays weights out anew at the first pass and computes in bfloat16,
    # whatever the dtype, and dies of outputs that do not fill its blocks.
    fits = module.out_features % PACKED_ROWS == 0
    module.support_avx512bf16_for_cpu &= fits and module.compute_dtype == torch.bfloat16


def _by_row(module: Any, compute: Callable[[Tensor], Tensor], threshold: float, x: Tensor) -> Tensor:
    """Map (…, in) to (…, out) by LLM.int8, outliers of a row apart.

    DEVIATION: the library takes an input out of the 8-bit product for all rows of a pass as soon as one row has an
    outlier there. A token would then depend on what is drafted beside it; here each row has what it has alone.
    """
    outliers = x.half().abs() >= threshold
    out = compute(x.masked_fill(outliers, 0))
    inputs = outliers.flatten(0, -2).any(dim=0).nonzero()[:, 0]
    if not len(inputs):
        return out
    codes, scales = module.state.CB[:, inputs], module.state.SCB[:, None] / 127
    kept = torch.where(outliers, x, 0)[..., inputs]
    return out + F.linear(kept, (codes.float() * scales).to(x.dtype))
