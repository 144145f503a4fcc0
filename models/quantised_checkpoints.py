"""Reads quantised checkpoints: GPTQ, AWQ, compressed-tensors, fp8 and MXFP4 itself, bitsandbytes through its library.

For the formats that are read here, the model is built on the meta device. Its quantised linear maps become
`CodedLinear`, or plain maps if the codes are 8-bit floats; other tensors are read as they are stored. Checkpoints of
bitsandbytes (LLM.int8, nf4 and fp4, also with quantised scales) keep that library's modules.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.errors import ModelNotFound, UnsupportedModel
from .coded import CodedLinear, Codes, plain_linear
from .expert_checkpoints import BLOCKS, SCALES, mixtures_of, read_experts, read_mxfp4, renamed, stored_experts
from .families import family_of
from .fingerprint import plain_name
from .kernels.build import kernels
from .mapped_rows import mapped_table, put_mapped
from .saved import ReadShare, WeightStorage, refuse_missing, refuse_unread, supported_config, weight_files
from .schemes import CONFIG_KEYS, CheckpointFormat, Scheme
from .stored_tensors import stored_tensors

# Tensor names of a quantised map by format; the first name marks a map as quantised.
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
    "mxfp4": (BLOCKS, SCALES),
}
BIAS = "bias"  # GPTQ files store a bias of zeros even if the model has no bias.
OPTIONAL = ("g_idx", "weight_zero_point", "weight_g_idx", "weight_shape")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # Outputs (of eight) of the 4-bit codes in an AWQ word, from the lowest bits up.

LIBRARY = "bitsandbytes"
MARKS = {"int8": ".SCB", "nf4": ".quant_state.bitsandbytes__nf4", "fp4": ".quant_state.bitsandbytes__fp4"}
PACKED_ROWS = 32  # Outputs per block of bitsandbytes' own weight layout for CPUs.


def load_packed(folder: Path, scheme: Scheme, dtype: str, storage: WeightStorage, share: ReadShare) -> tuple[Any, int]:
    """Load a quantised checkpoint on the CPU; its maps become `CodedLinear`, or plain maps if codes are 8-bit floats.

    Args:    dtype: as for `models.loading.load`. storage: says whether our kernels compute experts on this CPU or on a
             CUDA device; if neither, experts are de-quantised. share: reports the share of the weights that was read.
    Returns: the model, in evaluation mode, and its number of weights.
    Raises:  ModelNotFound: tensors are missing, or are not what the config says.
    """
    model, dtype_asked = empty_model(folder, dtype)
    named = family_of(model.config).experts
    keeps = storage.for_device or (storage.coded and dtype_asked in (torch.bfloat16, torch.float32))
    chosen = kernels() if keeps else "experts are computed by torch"
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    places = {plain_name(name): name for name in model.state_dict()}
    with stored_tensors(folder) as tensors:
        stored_names = {renamed(plain_name(name), named): name for name in tensors.shapes()}
        rest = {places[name]: stored for name, stored in stored_names.items() if name in places}
        maps = _quantised_maps(model, scheme, stored_names)
        blocks = [
            name for name in mixtures_of(model, named) if plain_name(f"{name}.down_proj_{BLOCKS}") in stored_names
        ]
        experts = stored_experts(model, named, NAMES[scheme.format], stored_names)
        if not maps and not experts and not blocks:
            raise _none_stored(folder, scheme)
        read_here = {*rest.values(), *(stored for parts in maps.values() for stored in parts.values())}
        read_here |= {stored for mixture in experts for stored in mixture.names()}
        n_bytes = {name: shape.n_bytes for name, shape in tensors.stored_shapes().items()}
        share.begin(sum(n_bytes.values()))

        def done(names: Iterable[str]) -> None:
            share.add(sum(n_bytes[name] for name in names))

        def read_rest(places: Mapping[str, str]) -> None:
            values = {}
            for name, stored in places.items():
                values[name] = tensors.read(stored)
                done([stored])
            _take_rest(model, values, dtype_asked, folder)

        def make(parts: Mapping[str, Tensor], n_out: int, n_in: int) -> CodedLinear | nn.Linear:
            empty = nn.Linear(n_in, n_out, bias=False, device="meta")
            if NAMES[scheme.format][0] not in parts:  # The checkpoint has not quantised this expert.
                return plain_linear(_shaped(parts, "weight", n_out, n_in, parts["weight"].dtype), None)
            return _made(scheme, empty, parts, dtype_asked)

        def read_block(name: str) -> Tensor:
            stored = stored_names.get(plain_name(name))
            if stored is None:
                raise _Mismatch(f"it lacks {name}")
            read_here.add(stored)
            done([stored])
            return cast(Tensor, tensors.read(stored))

        # Read the biases of experts before their maps, whose modules take them over.
        within = [f"{name}." for name in (*blocks, *(mixture.module for mixture in experts))]
        table = mapped_table(model.config, weight_files(folder)) if storage.maps_rows else None
        if table is not None and (stored_table := rest.pop(f"{table}.weight", None)) is not None:
            value = tensors.read(stored_table)
            _refuse_other(f"{table}.weight", value, model.get_submodule(table).weight.shape, folder)
            put_mapped(model, table, value.__getitem__, len(value), dtype_asked)
            done([stored_table])
        first = {name: rest.pop(name) for name in list(rest) if name.startswith(tuple(within))}
        read_rest(first)
        for stored in experts:
            assert named is not None
            with _fitting(stored.module, folder, scheme):
                kept = not isinstance(chosen, str) or storage.for_device
                read_experts(
                    model, stored, named, dtype_asked, kept, lambda name: tensors.read(name).contiguous(), make
                )
            done(stored.names())
        for name in blocks:
            assert named is not None
            with _fitting(name, folder, scheme):
                read_mxfp4(model, name, named, dtype_asked, None if isinstance(chosen, str) else chosen, read_block)
        for name, parts in maps.items():
            rest.pop(f"{name}.bias", None)
            rest.pop(f"{name}.weight", None)
            read = {part: tensors.read(stored).contiguous() for part, stored in parts.items()}
            with _fitting(name, folder, scheme):
                made = _made(scheme, model.get_submodule(name), read, dtype_asked)
            if name == "lm_head":
                model.config.tie_word_embeddings = False  # The quantised LM head has its own weights, so do not tie it.
            model.set_submodule(name, made)
            done(parts.values())
        read_rest(rest)
    model.tie_weights()
    refuse_missing([name for name, parameter in model.named_parameters() if parameter.is_meta], folder)
    refuse_unread(set(stored_names.values()) - read_here, folder)
    return model.eval().requires_grad_(False), n_parameters


def _none_stored(folder: Path, scheme: Scheme) -> ModelNotFound:
    return ModelNotFound(
        f"{folder / 'config.json'} says {scheme.words}, but no linear map in its files is stored so: copy the model's"
        " folder again"
    )


def empty_model(folder: Path, dtype: str) -> tuple[Any, torch.dtype]:
    """Return the unquantised model on the meta device (without weights), and its dtype."""
    config, dtype_asked = unquantised_config(folder, dtype)
    return without_weights(config, dtype_asked), dtype_asked


def unquantised_config(folder: Path, dtype: str) -> tuple[Any, torch.dtype]:
    """Return the config of a folder's model without its quantisation, and the requested dtype."""
    config = supported_config(folder)
    for name in CONFIG_KEYS:
        if hasattr(config, name):
            delattr(config, name)
    stored = getattr(config, "dtype", None) or torch.float32
    return config, stored if dtype == "auto" else getattr(torch, dtype)


def without_weights(config: Any, dtype: torch.dtype) -> Any:
    """Return transformers' model of a config, with its parameters on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):
        return auto.from_config(config, dtype=dtype)


def _quantised_maps(model: nn.Module, scheme: Scheme, stored_names: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return for each quantised linear map the names of its stored tensors, by their names in the format."""
    maps = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            stem = plain_name(f"{name}.weight").removesuffix("weight")
            names = (*NAMES[scheme.format], BIAS)
            parts = {part: stored_names[stem + part] for part in names if stem + part in stored_names}
            if NAMES[scheme.format][0] in parts:
                maps[name] = parts
    return maps


def _take_rest(model: nn.Module, values: Mapping[str, Tensor], dtype: torch.dtype, folder: Path) -> None:
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    for name, value in values.items():
        _refuse_other(name, value, shapes[name], folder)
    model.load_state_dict({name: value.to(dtype) for name, value in values.items()}, strict=False, assign=True)


def _refuse_other(name: str, value: Tensor, shape: torch.Size, folder: Path) -> None:
    """Raises: ModelNotFound: a stored tensor has another shape than the config says, or is quantised."""
    # 8-bit floats are quantised: they would need a scale.
    if value.shape != shape or not value.is_floating_point() or value.itemsize == 1:
        raise ModelNotFound(
            f"{name} in {folder} is {value.dtype} of shape {list(value.shape)}, and a model of its config.json has"
            f" floating-point numbers of shape {list(shape)} there: download or copy the model again"
        )


class _Mismatch(ValueError):
    """A map's stored tensors do not fit the config; the message says how."""


@contextmanager
def _fitting(name: str, folder: Path, scheme: Scheme) -> Iterator[None]:
    """Turn a mismatch of stored tensors into an error that names the map."""
    try:
        yield
    except ValueError as error:
        raise ModelNotFound(
            f"{name} in {folder} is not what its config.json says ({scheme.words}): {error}; download or copy the model"
            " again"
        ) from None


def _made(scheme: Scheme, module: Any, parts: Mapping[str, Tensor], dtype: torch.dtype) -> CodedLinear | nn.Linear:
    """Return the module with weights that replaces the model's empty `module`."""
    shape = tuple(module.weight.T.shape if isinstance(module, Conv1D) else module.weight.shape)
    bias = _bias(parts, shape[0], needed=module.bias is not None)
    if scheme.is_float:
        bias_made = None if bias is None else bias.to(dtype)
        return plain_linear(_read_floats(scheme, shape, parts).to(dtype), bias_made)
    return CodedLinear(_read_codes(scheme, shape, parts), bias, dtype)


def _read_floats(scheme: Scheme, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> Tensor:
    """Read a map's weight, float32 (out, in) = `shape`, from 8-bit floats and a scale for each block of them."""
    name, codes = NAMES[scheme.format]
    if codes not in parts:
        raise _Mismatch(f"it lacks {codes}")
    n_out, n_in = shape
    weight = _shaped(parts, codes, n_out, n_in, torch.float8_e4m3fn).float()
    rows, columns = scheme.rows or n_out, scheme.group or n_in
    part_read = parts[name]
    if part_read.numel() == 1:
        part_read = part_read.reshape(1, 1)
    scales = _shaped({name: part_read}, name, -(-n_out // rows), -(-n_in // columns))
    if not scales.is_floating_point() or scales.itemsize == 1:
        raise _Mismatch(f"its {name} is {scales.dtype}")
    spread = scales.float().repeat_interleave(rows, dim=0)[:n_out]
    if columns < n_in:
        spread = spread.repeat_interleave(columns, dim=1)[:, :n_in]
    return weight.mul_(spread)


def _read_codes(scheme: Scheme, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> Codes:
    """Read a map (out, in) = `shape` from its tensors, whose names are those of `NAMES`."""
    zeros_needed = not scheme.symmetric and scheme.format in ("pack-quantized", "int-quantized")
    optional = [name for name in OPTIONAL if name != "weight_zero_point" or not zeros_needed]
    missing = [name for name in NAMES[scheme.format] if name not in parts and name not in optional]
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
    """Return a map's bias (out,); None: it has none, or the model has none and the stored one is zero."""
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
    words = _shaped(parts, "qweight", -(-n_in // per_word), n_out)  # Codes are packed along the inputs.
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


# Codes (out, in); scales and zeros (out, groups); the group index of each input, or None.
_Read = tuple[Tensor, Tensor, Tensor, Tensor | None]
_READERS: dict[CheckpointFormat, Callable[[Scheme, int, int, int, Mapping[str, Tensor]], _Read]] = {
    "gptq": _gptq,
    "awq": _awq,
    "pack-quantized": _compressed,
    "int-quantized": _compressed,
}


def _shaped(
    parts: Mapping[str, Tensor], name: str, rows: int, columns: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a tensor after checking its shape and dtype; codes and zeros are int32 unless `dtype` says otherwise."""
    tensor = parts[name]
    if tuple(tensor.shape) != (rows, columns):
        raise _Mismatch(f"its {name} has shape {list(tensor.shape)} in place of {[rows, columns]}")
    dtype_asked = dtype or (tensor.dtype if "scale" in name else torch.int32)
    if tensor.dtype != dtype_asked:
        raise _Mismatch(f"its {name} is {tensor.dtype} in place of {dtype_asked}")
    return tensor


def _codes(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words (rows, words) to codes, uint8 (rows, words * 32 / bits), the lowest bits first."""
    as_bytes = words.contiguous().view(torch.uint8)
    return as_bytes if bits == 8 else torch.stack((as_bytes & 15, as_bytes >> 4), dim=-1).flatten(1)


def _order(index: Tensor, n_in: int, group: int) -> Tensor | None:
    """Return the order that sorts the inputs by group; None if they are already sorted."""
    if index.shape != (n_in,) or index.dtype not in (torch.int32, torch.int64):
        raise _Mismatch(f"its g_idx is {index.dtype} of shape {list(index.shape)} for {n_in} inputs")
    if (index < 0).all():  # compressed-tensors stores negative indices when inputs are not reordered.
        return None
    in_order = torch.arange(n_in) // group
    order = index.long().argsort(stable=True)
    if not torch.equal(index.long()[order], in_order):
        raise _Mismatch(f"its g_idx does not put its {n_in} inputs into groups of {group}")
    return None if torch.equal(index.long(), in_order) else order


def is_by_library(module: nn.Module) -> bool:
    """Tell whether a library computes a linear map, whose weight only that library can read."""
    return isinstance(module, nn.Linear) and type(module).__module__.partition(".")[0] == LIBRARY


def check_library(folder: Path, scheme: Scheme) -> None:
    """Check before loading that the library is installed and that the files are quantised as the config says.

    Raises: UnsupportedModel: it is not installed. ModelNotFound: no map is stored in that way.
    """
    if importlib.util.find_spec(LIBRARY) is None:
        raise UnsupportedModel(
            f"{folder} is quantised ({scheme.words}), and the library {LIBRARY} is not installed here: pip install"
            " 'swiftopt[quantised]'"
        )
    logging.getLogger(LIBRARY).setLevel(logging.ERROR)  # bitsandbytes warns of each cast in every pass.
    with stored_tensors(folder) as tensors:
        if not any(name.endswith(MARKS[str(scheme.kind)]) for name in tensors.shapes()):
            raise _none_stored(folder, scheme)


def take_maps(model: Any, scheme: Scheme, dtype: str, folder: Path) -> int:
    """Check the maps that transformers has loaded, and make a row's result independent of other rows.

    Args:    dtype: as for `models.loading.load`; tensors that are not quantised get it, and 4-bit maps compute in it.
             "auto": the config's.
    Returns: the model's number of weights.
    Raises:  ModelNotFound: a map is not what the config says. UnsupportedModel: the head is quantised, or the library
             would read a map wrongly on a CPU.
    """
    dtype_asked = (model.config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    maps = {name: module for name, module in model.named_modules() if is_by_library(module)}
    sizes = {id(module.weight): module.in_features * module.out_features for module in maps.values()}
    for name, module in maps.items():
        _check(name, module, model, scheme, folder)
        if scheme.kind != "int8":
            _set_compute_dtype(module, None if dtype == "auto" else dtype_asked)
        elif module.state.threshold > 0:
            module.forward = partial(_by_row, module, module.forward, module.state.threshold)
            module.state.threshold = 0.0
    n_parameters = 0
    for parameter in model.parameters():
        n_parameters += sizes.get(id(parameter), parameter.numel())
        if id(parameter) not in sizes:
            # transformers leaves these parameters in their stored dtype.
            parameter.data = parameter.data.to(dtype_asked)
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
        # In bitsandbytes 0.50.2, the CPU kernel starts a new block at every row, but stored blocks run across rows.
        raise UnsupportedModel(
            f"{name} in {folder} has {module.in_features} inputs, which blocks of {state.blocksize} do not divide,"
            f" and {LIBRARY} reads such a map wrongly on a CPU: use --device cuda"
        )


def _is_whole(module: Any, scheme: Scheme) -> bool:
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
    # On CPUs with bfloat16 instructions, bitsandbytes transposes the weights at the first pass and computes in bfloat16
    # whatever the dtype. It crashes if the number of outputs is not a multiple of PACKED_ROWS.
    fits = module.out_features % PACKED_ROWS == 0
    module.support_avx512bf16_for_cpu &= fits and module.compute_dtype == torch.bfloat16


def _by_row(module: Any, compute: Callable[[Tensor], Tensor], threshold: float, x: Tensor) -> Tensor:
    """Map (…, in) to (…, out) with LLM.int8 (arXiv:2208.07339), each row's outliers separately.

    DEVIATION: the library takes an input out of the 8-bit product for all rows of a pass as soon as one row has an
    outlier there. A token would then depend on the other rows of its pass; here each row is computed as if alone.
    """
    outliers = x.half().abs() >= threshold
    out = compute(x.masked_fill(outliers, 0))
    inputs = outliers.flatten(0, -2).any(dim=0).nonzero()[:, 0]
    if not len(inputs):
        return out
    codes, scales = module.state.CB[:, inputs], module.state.SCB[:, None] / 127
    kept = torch.where(outliers, x, 0)[..., inputs]
    return out + F.linear(kept, (codes.float() * scales).to(x.dtype))
