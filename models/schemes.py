"""Reads from a checkpoint's config how its linear maps are quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from ..core.errors import UnsupportedModel

CheckpointFormat = Literal[
    "gptq", "awq", "pack-quantized", "int-quantized", "float-quantized", "fp8", "mxfp4", "bitsandbytes", "gguf"
]
SCHEME_BITS: dict[str, tuple[int, ...]] = {
    "gptq": (4, 8),
    "awq": (4,),
    "pack-quantized": (4, 8),
    "int-quantized": (8,),
    "float-quantized": (8,),
    "fp8": (8,),
    "mxfp4": (4,),
    "bitsandbytes": (4, 8),
    "gguf": tuple(range(2, 33)),
}
COMPRESSED = {
    "pack-quantized": "int",
    "int-quantized": "int",
    "float-quantized": "float",
}  # compressed-tensors formats and the number type of their codes.
SUPPORTED = (
    "use GPTQ (4 or 8 bits), AWQ (gemm, 4 bits), compressed-tensors (pack-quantized, int-quantized or float-quantized"
    " weights), fp8, mxfp4 (experts of gpt-oss), bitsandbytes, a GGUF file, or the model as it was before"
)
CONFIG_KEYS = ("quantization_config", "compression_config")  # compression_config: the former key of compressed-tensors.
EIGHT = 8  # Group sizes must be multiples of 8.


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's linear maps are quantised.

    group: number of inputs that share a scale (None: all inputs of a row).
    symmetric: compressed-tensors stores no zeros then.
    minus_one: stored zeros are one less than the real ones, as in GPTQ's first format.
    rows: for 8-bit floats, number of outputs that share a scale (None: all).
    kind: type of bitsandbytes' codes; that library stores their scales.
    """

    format: CheckpointFormat
    bits: int
    group: int | None
    symmetric: bool = False
    minus_one: bool = False
    rows: int | None = 1
    kind: Literal["int8", "nf4", "fp4"] | None = None

    @property
    def is_float(self) -> bool:
        """Whether codes are 8-bit floats; such maps are de-quantised when loaded, because no kernel supports them."""
        return self.format in ("float-quantized", "fp8")

    @property
    def words(self) -> str:
        if self.kind is not None:
            return f"{self.format}, {self.kind}"
        if self.rows != 1:
            shared = "a scale" if self.rows is None else f"blocks of {self.rows} x {self.group}"
        else:
            shared = f"groups of {self.group}" if self.group else "a scale per row"
        return f"{self.format}, {self.bits} bits, {shared}"


def scheme_in(config: Mapping[str, Any], path: Path) -> Scheme | None:
    """Return how a model's linear maps are quantised, according to its config; None: they are not.

    Args:   path: the config's, for messages.
    Raises: UnsupportedModel: the quantisation is not supported.
    """
    section = next((config[key] for key in CONFIG_KEYS if config.get(key) is not None), None)
    if section is None:
        return None
    method = section.get("quant_method", "(none)") if isinstance(section, Mapping) else "(unreadable)"
    try:
        if method not in _SCHEME_READERS:
            raise _Refused(f"quant_method {method!r}")
        scheme = _SCHEME_READERS[method](section)
        if scheme.bits not in SCHEME_BITS[scheme.format]:
            raise _Refused(f"{scheme.bits} bits in {scheme.format}")
        for size in (scheme.group, scheme.rows if scheme.rows != 1 else None):
            if size is not None and (size <= 0 or size % EIGHT):
                raise _Refused(f"groups of {size}")
    except _Refused as refused:
        raise UnsupportedModel(f"{path} asks for {refused}, which is not supported: {SUPPORTED}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModel(
            f"{path} has a quantization_config for {method} that cannot be read"
            f" ({type(error).__name__}: {error}): {SUPPORTED}"
        ) from error
    return scheme


class _Refused(Exception):
    """The quantisation is not supported; the message says which part of it."""


def _group(size: Any) -> int | None:
    return None if size is None or int(size) == -1 else int(size)


def _gptq(quantization: Mapping[str, Any]) -> Scheme:
    stored = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
    if stored not in ("gptq", "gptq_v2"):
        raise _Refused(f"the GPTQ format {stored!r}")
    if quantization.get("pack_dtype", "int32") != "int32":
        raise _Refused(f"GPTQ codes packed in {quantization['pack_dtype']}")
    return Scheme("gptq", int(quantization["bits"]), _group(quantization["group_size"]), minus_one=stored == "gptq")


def _awq(quantization: Mapping[str, Any]) -> Scheme:
    version = str(
        quantization.get("version") or quantization.get("checkpoint_format") or quantization.get("format") or "gemm"
    ).lower()
    if version != "gemm":
        raise _Refused(f"the AWQ version {version!r}")
    bits = quantization["bits"] if "bits" in quantization else quantization["w_bit"]
    return Scheme(
        "awq",
        int(bits),
        _group(quantization["group_size"] if "group_size" in quantization else quantization["q_group_size"]),
    )


def _compressed_tensors(quantization: Mapping[str, Any]) -> Scheme:
    groups = list(quantization["config_groups"].values())
    ways = [group["weights"] for group in groups]
    if not ways or any(way != ways[0] for way in ways):
        raise _Refused(f"{len(ways)} ways to quantise weights")
    activations = next((group["input_activations"] for group in groups if group.get("input_activations")), None)
    stored, weights = str(groups[0].get("format") or quantization.get("format")), ways[0]
    # DEVIATION: a float-quantized checkpoint may round activations to 8 bits; here they keep the model's dtype.
    if activations and not (stored == "float-quantized" and activations.get("dynamic") is True):
        raise _Refused(f"activations of {activations.get('num_bits')} bits in compressed-tensors")
    if (quantization.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _Refused("sparse weights in compressed-tensors")
    transforms = (quantization.get("transform_config") or {}).get("config_groups") or {}
    places = {place["location"] for transform in transforms.values() for place in transform["apply"]}
    # Transforms at weight_input and weight_output are already folded into the stored weights.
    if not places <= {"weight_input", "weight_output"}:
        raise _Refused("transformed activations in compressed-tensors")
    kind, symmetric = weights.get("type", "int"), bool(weights.get("symmetric", True))
    if COMPRESSED.get(stored) != kind or (kind == "float" and not symmetric):
        raise _Refused(f"the compressed-tensors format {stored!r} of {kind} weights")
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel", "tensor") and (strategy, kind) != ("block", "float"):
        raise _Refused(f"the compressed-tensors strategy {strategy!r}")
    group = _group(weights["group_size"]) if strategy == "group" else None
    rows: int | None = 1
    if kind == "float" and strategy == "tensor":
        rows = None
    elif strategy == "block":
        rows, group = _block(weights["block_structure"])
    return Scheme(cast(CheckpointFormat, stored), int(weights["num_bits"]), group, symmetric, rows=rows)


def _block(sizes: Any) -> tuple[int, int]:
    """Return the numbers of outputs and of inputs that share a scale; compressed-tensors also writes "128x128"."""
    rows, columns = sizes.split("x") if isinstance(sizes, str) else sizes
    return int(rows), int(columns)


def _fp8(quantization: Mapping[str, Any]) -> Scheme:
    # DEVIATION: the format rounds activations to 8 bits; here they keep the model's dtype.
    for key, allowed in (("activation_scheme", "dynamic"), ("fmt", "e4m3"), ("scale_fmt", "float")):
        if (quantization.get(key) or allowed) != allowed:
            raise _Refused(f"the {key} {quantization[key]!r} of fp8")
    sizes = quantization.get("weight_block_size", (128, 128))
    rows, group = (None, None) if sizes is None else _block(sizes)
    return Scheme("fp8", 8, group, symmetric=True, rows=rows)


def _bitsandbytes(quantization: Mapping[str, Any]) -> Scheme:
    if quantization.get("load_in_8bit"):
        return Scheme("bitsandbytes", 8, None, kind="int8")
    if not quantization.get("load_in_4bit"):
        raise _Refused("neither 4 nor 8 bits in bitsandbytes")
    kind = quantization.get("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        raise _Refused(f"the bnb_4bit_quant_type {kind!r} of bitsandbytes")
    return Scheme("bitsandbytes", 4, None, kind=kind)


_SCHEME_READERS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": lambda quantization: Scheme("mxfp4", 4, 32, symmetric=True),
    "bitsandbytes": _bitsandbytes,
    "gguf": lambda quantization: Scheme("gguf", int(quantization["bits"]), None),
}
