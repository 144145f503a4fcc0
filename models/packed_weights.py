"""Reads checkpoints of GPTQ, AWQ, compressed-tensors and fp8 by what these formats define, without their libraries.

The model is built without memory, its quantised linear maps become `CodedLinear`, or plain ones where their codes are
8-bit floats, and all else is read as it is stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.pytorch_utils import Conv1D

from ..core.errors import ModelNotFound
from .coded import CodedLinear, Codes, plain_linear
from .fingerprint import plain_name
from .saved import TOLD_S, OnStep, StoredTensors, first_line, refuse_missing, supported_config
from .schemes import CONFIG_KEYS, CheckpointFormat, Scheme

# What each format's tensors of a map are called; the first is the one that says that a map is quantised.
GPTQ = ("qweight", "qzeros", "scales", "g_idx")
PACKED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
WHOLE = ("weight_scale", "weight", "weight_zero_point", "weight_g_idx")
NAMES: dict[CheckpointFormat, tuple[str, ...]] = {
    "gptq": GPTQ,
    "awq": GPTQ[:3],
    "pack-quantized": PACKED,
    "int-quantized": WHOLE,
    "float-quantized": WHOLE[:2],
    "fp8": ("weight_scale_inv", "weight"),
}
BIAS = "bias"  # which GPTQ's files also have where the model has none: zeros then
OPTIONAL = ("g_idx", "weight_zero_point", "weight_g_idx", "weight_shape")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of eight that a word's codes are for, lowest bits first


def load_packed(folder: Path, scheme: Scheme, dtype: str, doing: str, on_step: OnStep) -> tuple[Any, int]:
    """Load a quantised checkpoint on the CPU; its quantised maps are `CodedLinear`, of 8-bit floats plain ones.

    Args:    dtype: as `models.loading.load`. doing: what `on_step` is told with the share of the weights that is read.
    Returns: the model, in evaluation mode, and how many parameters it stands for.
    Raises:  ModelNotFound: tensors are missing, or are not what the config says.
    """
    config = supported_config(folder)
    for name in CONFIG_KEYS:
        if hasattr(config, name):
            delattr(config, name)
    stored = getattr(config, "dtype", None) or torch.float32
    wanted = stored if dtype == "auto" else getattr(torch, dtype)
    model = _empty(config, wanted)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    places = {plain_name(name): name for name in model.state_dict()}
    with StoredTensors(folder) as tensors:
        own = {plain_name(name): name for name in tensors.shapes()}
        rest = {places[name]: stored for name, stored in own.items() if name in places}
        maps = _quantised_maps(model, scheme, own)
        if not maps:
            raise ModelNotFound(
                f"{folder / 'config.json'} says {scheme.words}, but no linear map in its files is stored so: copy the"
                " model's folder again"
            )
        told = time.monotonic()
        for number, (name, parts) in enumerate(maps.items()):
            if time.monotonic() - told > TOLD_S:
                told = time.monotonic()
                on_step(f"{doing}, {100 * number // len(maps)} % of the weights")
            rest.pop(f"{name}.bias", None)
            rest.pop(f"{name}.weight", None)
            module = model.get_submodule(name)
            shape = tuple(module.weight.T.shape if isinstance(module, Conv1D) else module.weight.shape)
            try:
                read = {part: tensors.read(stored).contiguous() for part, stored in parts.items()}
                bias = _bias(read, shape[0], needed=module.bias is not None)
                made = _made(scheme, shape, read, bias, wanted)
            except _Mismatch as error:
                raise ModelNotFound(
                    f"{name} in {folder} is not what its config.json says ({scheme.words}): {error}; download or copy"
                    " the model again"
                ) from None
            if name == "lm_head":
                model.config.tie_word_embeddings = False  # it has weights of its own
            model.set_submodule(name, made)
        _take_rest(model, {name: tensors.read(stored) for name, stored in rest.items()}, wanted, folder)
    model.tie_weights()
    refuse_missing([name for name, parameter in model.named_parameters() if parameter.is_meta], folder)
    _take_generation_config(model, folder)
    return model.eval().requires_grad_(False), n_parameters


def _empty(config: Any, dtype: torch.dtype) -> Any:
    from accelerate import init_empty_weights

    auto: Any = AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):
        return auto.from_config(config, dtype=dtype)


def _quantised_maps(model: nn.Module, scheme: Scheme, own: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The linear maps that are stored quantised, and their tensors' names by the format's."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            stem = plain_name(f"{name}.weight").removesuffix("weight")
            parts = {part: own[stem + part] for part in (*NAMES[scheme.format], BIAS) if stem + part in own}
            if NAMES[scheme.format][0] in parts:
                found[name] = parts
    return found


def _take_rest(model: nn.Module, values: Mapping[str, Tensor], dtype: torch.dtype, folder: Path) -> None:
    """Put what is not quantised into the model, in its dtype."""
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    for name, value in values.items():
        if value.shape != shapes[name] or not value.is_floating_point() or value.itemsize == 1:  # which wants a scale
            raise ModelNotFound(
                f"{name} in {folder} is {value.dtype} of shape {list(value.shape)}, and a model of its config.json has"
                f" floating-point numbers of shape {list(shapes[name])} there: download or copy the model again"
            )
    model.load_state_dict({name: value.to(dtype) for name, value in values.items()}, strict=False, assign=True)


def _take_generation_config(model: Any, folder: Path) -> None:
    """Read what the model's makers set for decoding; without it the config's end-of-text token stays."""
    if not (folder / "generation_config.json").is_file():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # it checks its values, each with errors of its own
        path = folder / "generation_config.json"
        raise ModelNotFound(f"{path} cannot be read ({first_line(error)}): copy the model's folder again") from error


class _Mismatch(Exception):
    """What a map's tensors are and should not be."""


def _made(
    scheme: Scheme, shape: tuple[int, ...], parts: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype
) -> CodedLinear | nn.Linear:
    if scheme.format in ("float-quantized", "fp8"):
        own = None if bias is None else bias.to(dtype)
        return plain_linear(read_floats(scheme, shape, parts).to(dtype), own)
    return CodedLinear(read_codes(scheme, shape, parts), bias, dtype)


def read_floats(scheme: Scheme, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> Tensor:
    """Read a map's weight, float32 (out, in) = `shape`, from 8-bit floats and a scale of each block of them."""
    name, codes = NAMES[scheme.format]
    if codes not in parts:
        raise _Mismatch(f"it lacks {codes}")
    n_out, n_in = shape
    weight = _shaped(parts, codes, n_out, n_in, torch.float8_e4m3fn).float()
    rows, columns = scheme.rows or n_out, scheme.group or n_in
    found = parts[name]
    if found.numel() == 1:
        found = found.reshape(1, 1)
    scales = _shaped({name: found}, name, -(-n_out // rows), -(-n_in // columns))
    if not scales.is_floating_point() or scales.itemsize == 1:
        raise _Mismatch(f"its {name} is {scales.dtype}")
    spread = scales.float().repeat_interleave(rows, dim=0)[:n_out]
    if columns < n_in:
        spread = spread.repeat_interleave(columns, dim=1)[:, :n_in]
    return weight.mul_(spread)


def read_codes(scheme: Scheme, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> Codes:
    """Read a map (out, in) = `shape` from its tensors, by the names of `NAMES`."""
    missing = [name for name in NAMES[scheme.format] if name not in parts and name not in OPTIONAL]
    if not scheme.symmetric and scheme.format in ("pack-quantized", "int-quantized"):
        missing += [] if "weight_zero_point" in parts else ["weight_zero_point"]
    if missing:
        raise _Mismatch(f"it lacks {missing[0]}")
    n_out, n_in = shape
    group = scheme.group or n_in
    codes, scales, zeros, index = _READERS[scheme.format](scheme, n_out, n_in, -(-n_in // group), parts)
    if not scales.is_floating_point():
        raise _Mismatch(f"its scales are {scales.dtype}")
    order = None if index is None else _order(index, n_in, group)
    if order is not None:
        codes = codes[:, order]
    return Codes(codes.contiguous(), scales, zeros.short(), scheme.bits, group, order)


def _bias(parts: Mapping[str, Tensor], n_out: int, needed: bool) -> Tensor | None:
    """The bias (out,) of a map; None where there is none, or one of zeros and the model has none."""
    bias = parts.get(BIAS)
    if bias is None and needed:
        raise _Mismatch("it lacks its bias")
    if bias is None:
        return None
    if bias.shape != (n_out,) or not bias.is_floating_point():
        raise _Mismatch(f"its bias is {bias.dtype} of shape {list(bias.shape)} for {n_out} outputs")
    return bias if needed or bool(bias.any()) else None


def _gptq(scheme: Scheme, n_out: int, n_in: int, n_groups: int, parts: Mapping[str, Tensor]) -> _Read:
    per_word = 32 // scheme.bits
    words = _shaped(parts, "qweight", -(-n_in // per_word), n_out)  # packed along the inputs
    zeros = _codes(_shaped(parts, "qzeros", n_groups, -(-n_out // per_word)), scheme.bits)
    if scheme.minus_one:
        zeros = (zeros + 1) & ((1 << scheme.bits) - 1)
    codes = _codes(words.T.contiguous(), scheme.bits)[:, :n_in]
    return codes, _shaped(parts, "scales", n_groups, n_out).T, zeros[:, :n_out].T, parts.get("g_idx")


def _awq(scheme: Scheme, n_out: int, n_in: int, n_groups: int, parts: Mapping[str, Tensor]) -> _Read:
    place = torch.tensor(AWQ_ORDER).argsort()
    words = n_out // len(AWQ_ORDER)

    def in_order(name: str, rows: int) -> Tensor:
        codes = _codes(_shaped(parts, name, rows, words), scheme.bits)  # packed along the outputs
        return codes.view(rows, -1, len(AWQ_ORDER))[..., place].flatten(1).T

    scales = _shaped(parts, "scales", n_groups, n_out).T
    return in_order("qweight", n_in), scales, in_order("qzeros", n_groups), None


def _compressed(scheme: Scheme, n_out: int, n_in: int, n_groups: int, parts: Mapping[str, Tensor]) -> _Read:
    half, per_word = 1 << (scheme.bits - 1), 32 // scheme.bits
    if scheme.format == "pack-quantized":
        if "weight_shape" in parts and parts["weight_shape"].tolist() != [n_out, n_in]:
            raise _Mismatch(f"its weight_shape is {parts['weight_shape'].tolist()} in place of {[n_out, n_in]}")
        codes = _codes(_shaped(parts, "weight_packed", n_out, -(-n_in // per_word)), scheme.bits)[:, :n_in]
    else:
        codes = (_shaped(parts, "weight", n_out, n_in, torch.int8).short() + half).to(torch.uint8)
    stored = parts["weight_scale"]
    scales = stored.expand(n_out, 1) if stored.numel() == 1 else _shaped(parts, "weight_scale", n_out, n_groups)
    if "weight_zero_point" not in parts:
        return codes, scales, torch.full((n_out, n_groups), half), parts.get("weight_g_idx")
    zeros = parts["weight_zero_point"]
    if zeros.dtype == torch.int32:  # packed along the outputs
        words = _shaped(parts, "weight_zero_point", -(-n_out // per_word), n_groups).T.contiguous()
        zeros = _codes(words, scheme.bits)[:, :n_out].T
    elif zeros.numel() == 1:
        zeros = zeros.short().expand(n_out, 1) + half
    else:
        zeros = _shaped(parts, "weight_zero_point", n_out, n_groups, torch.int8).short() + half
    return codes, scales, zeros, parts.get("weight_g_idx")


_Read = tuple[Tensor, Tensor, Tensor, Tensor | None]  # codes (out, in); scales, zeros (out, groups); groups of inputs
_READERS: dict[CheckpointFormat, Callable[[Scheme, int, int, int, Mapping[str, Tensor]], _Read]] = {
    "gptq": _gptq,
    "awq": _awq,
    "pack-quantized": _compressed,
    "int-quantized": _compressed,
}


def _shaped(
    parts: Mapping[str, Tensor], name: str, rows: int, columns: int, dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor of that shape; codes and zeros are int32 unless `dtype` says otherwise."""
    tensor = parts[name]
    if tuple(tensor.shape) != (rows, columns):
        raise _Mismatch(f"its {name} has shape {list(tensor.shape)} in place of {[rows, columns]}")
    wanted = dtype or (tensor.dtype if "scale" in name else torch.int32)
    if tensor.dtype != wanted:
        raise _Mismatch(f"its {name} is {tensor.dtype} in place of {wanted}")
    return tensor


def _codes(words: Tensor, bits: int) -> Tensor:
    """Codes uint8 (rows, words * 32 / bits) of int32 words (rows, words), the lowest bits first."""
    found = words.contiguous().view(torch.uint8)
    return found if bits == 8 else torch.stack((found & 15, found >> 4), dim=-1).flatten(1)


def _order(index: Tensor, n_in: int, group: int) -> Tensor | None:
    """The inputs group by group, by the group of each; None where they lie so."""
    if index.shape != (n_in,) or index.dtype not in (torch.int32, torch.int64):
        raise _Mismatch(f"its g_idx is {index.dtype} of shape {list(index.shape)} for {n_in} inputs")
    if (index < 0).all():  # compressed-tensors' word for none
        return None
    in_order = torch.arange(n_in) // group
    order = index.long().argsort(stable=True)
    if not torch.equal(index.long()[order], in_order):
        raise _Mismatch(f"its g_idx does not put its {n_in} inputs into groups of {group}")
    return None if torch.equal(index.long(), in_order) else order
